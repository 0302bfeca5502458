"""What our figures share: a color for each kind of model, a style, and a PNG written aside and renamed.

matplotlib is imported where it is used, without a display.
"""

from .checkpoints.files import file_aside

COLORS = {"teacher": "#33363d", "control": "#8d929c", "linear": "#d08a1d", "mhla": "#2563c9", "hybrid": "#2f9468"}
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


def pyplot():
    """A stand-in for matplotlib.pyplot. ImportError with the exact install line where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is missing: pip install 'mhla_hf[eval]'") from error
    from matplotlib.figure import Figure

    class Canvas:
        """What is used of pyplot, without its global state and without a display."""

        rc_context = staticmethod(matplotlib.rc_context)

        @staticmethod
        def subplots(*shape, figsize, layout, **options):
            figure = Figure(figsize=figsize, layout=layout)
            return figure, figure.subplots(*shape, **options)

    return Canvas


def save_figure(figure, path):
    """Write a figure as PNG, aside and renamed."""
    with file_aside(path) as aside:
        figure.savefig(aside, format="png")
