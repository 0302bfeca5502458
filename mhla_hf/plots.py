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


def draw_heads(measured: dict) -> str:
    """The KV heads that a conversion kept, as text: a line for each KV head, a column for each layer.

    measured: `config.mhla_measured` of a conversion that chose by gates.
    """
    gates, kept = measured["gates"], measured["softmax_heads"]
    layers = range(max(map(int, gates)) + 1)
    lines = ["layer " + "".join(str(layer % 10) for layer in layers)]
    for head in range(max(map(len, gates.values()))):
        heads = {layer: head in kept.get(str(layer), ()) for layer in layers if head < len(gates.get(str(layer), ()))}
        marks = "".join({True: "#", False: ".", None: " "}[heads.get(layer)] for layer in layers)
        lines.append(f"KV {head:<3}{marks}".rstrip())
    return "\n".join(lines)


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
