"""What our figures share: a color for each kind of model, a style, and a PNG written aside and renamed."""

import contextlib

from .checkpoints.files import file_aside
from .checkpoints.load import optional

COLORS = {"teacher": "#33363d", "control": "#8d929c", "linear": "#d08a1d", "mhla": "#2563c9", "hybrid": "#2f9468"}
PALETTE = (*COLORS.values(), "#7b4fb3", "#b3454f", "#4f8fb3", "#6b7a2f", "#a0669a")
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": "#40444c",
    "xtick.color": "#40444c",
    "ytick.color": "#40444c",
    "grid.color": "#e6e8eb",
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "figure.dpi": 150,
    "savefig.facecolor": "white",
}


@contextlib.contextmanager
def drawing(path, rows=1, columns=1, *, figsize, style=STYLE, note="", **options):
    """(figure, its panels `[rows][columns]`); when the block ends well they are a PNG at `path`.

    note: one line below them. options: of the panels.
    """
    with optional("a figure", "matplotlib", "eval"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context(style):
        figure = Figure(figsize=figsize, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        if note:
            figure.supxlabel(note, fontsize=8.5, color="#6b7079")
        with file_aside(path) as aside:
            figure.savefig(aside, format="png")
