"""How every figure looks and is saved: sizes as printed, no dates in the files"""

import io
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from ..util import write_file

WIDTHS = {1: 2.7, 2: 5.5}  # columns of a page -> inches
GREY = '#767676'
# a colour and a dash for each benchmark; they differ in lightness, too
LINES = (('#0072b2', '-'), ('#d55e00', '--'), ('#009e73', '-.'), ('#404040', ':'))

LOOK = {
    'font.family': 'STIXGeneral',
    'mathtext.fontset': 'stix',
    'font.size': 8,
    'axes.labelsize': 8,
    'axes.titlesize': 8,
    'xtick.labelsize': 7,
    'ytick.labelsize': 7,
    'legend.fontsize': 7,
    'axes.linewidth': 0.5,
    'xtick.major.width': 0.5,
    'ytick.major.width': 0.5,
    'lines.linewidth': 1,
    'lines.markersize': 4,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'legend.columnspacing': 1.2,
    'legend.handlelength': 2,
    'figure.constrained_layout.use': True,
    'savefig.dpi': 220,
    'pdf.fonttype': 42,  # letters that a reader can search and an editor can change
}
WITHOUT = dict(pdf=('CreationDate', 'Producer', 'Creator'), png=('Software',))  # dates and versions


@contextmanager
def our_look():
    "Matplotlib with our settings, during a `with` block. Those of the reader are back after it."
    with matplotlib.rc_context(LOOK):
        yield


class PageFigure(Figure):
    "A figure that a notebook shows as it is printed. It opens no window."

    def _ipython_display_(self):
        from IPython.display import Image, display

        display(Image(picture(self, 'png'), width=96 * self.get_figwidth()))


def panels(
    n: int,  # panels
    columns: int,  # of the page: 1 or 2; as many panels stand in a row
    height: float,  # inches of a row
    in_a_row: int | None = None,  # panels, if not as many as columns
):  # figure, list of axes
    "An empty figure as wide as one or two columns of a page."
    across = min(n, in_a_row or columns)
    rows = -(-n // across)
    fig = PageFigure(figsize=(WIDTHS[columns], rows * height))
    axes = list(fig.subplots(rows, across, squeeze=False).flat)
    for empty in axes[n:]:
        empty.set_axis_off()
    return fig, axes[:n]


def legend_below(fig, ncols: int) -> None:
    "One legend for all panels, in rows of at most ncols that are equally full."
    handles = {}
    for ax in fig.axes:
        for handle, name in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    rows = -(-len(handles) // ncols)
    columns = -(-len(handles) // rows)
    fig.legend(handles.values(), handles, loc='outside lower center', ncols=columns)


def picture(fig, kind: str) -> bytes:  # kind: "pdf" or "png"
    "A figure as a file. The same figure gives the same bytes."
    file = io.BytesIO()
    with our_look():
        fig.savefig(file, format=kind, metadata=dict.fromkeys(WITHOUT[kind]))
    return file.getvalue()


def save_figure(fig, folder, name: str) -> None:
    "Write NAME.pdf for a paper and NAME.png for a page."
    for kind in WITHOUT:
        write_file(Path(folder) / f'{name}.{kind}', picture(fig, kind))
