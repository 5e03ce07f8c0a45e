"""How every figure looks and is saved

Here belongs all that figures share: fonts and sizes, files without a date, the picture for a
notebook. The content of a figure belongs in `report.figures` and `report.training`.
"""

import io
from pathlib import Path

from ..util import write_file

RC_PARAMETERS = {
    'font.family': 'STIXGeneral',
    'mathtext.fontset': 'stix',
    'font.size': 8,
    'axes.labelsize': 8,
    'axes.titlesize': 8,
    'xtick.labelsize': 7,
    'ytick.labelsize': 7,
    'axes.linewidth': 0.5,
    'xtick.major.width': 0.5,
    'ytick.major.width': 0.5,
    'xtick.minor.width': 0.3,
    'lines.linewidth': 1,
    'lines.markersize': 4,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'figure.constrained_layout.use': True,
    'savefig.dpi': 220,
    'pdf.fonttype': 42,
}

DATES = dict(pdf=('CreationDate', 'Producer', 'Creator'), png=('Software',))  # entries left out


def paper_style(
    font: str = '',  # family, such as "serif" or "Times New Roman"; '': STIX
    rc=None,  # name -> value: settings of matplotlib that replace ours
):
    "Matplotlib's settings for our figures, during a `with` block."
    import matplotlib

    settings = dict(RC_PARAMETERS)
    if font:
        settings['font.family'] = font
    return matplotlib.rc_context(settings | dict(rc or {}))


def new_figure(
    width: float,  # inches
    height: float,  # inches
    nrows: int = 1,
    ncols: int = 1,
    sharex: bool = False,
    font: str = '',  # of `paper_style`
    rc=None,  # of `paper_style`
):  # matplotlib figure, axes [row, column]
    "An empty figure. It opens no window and leaves pyplot's state alone."
    from matplotlib.figure import Figure

    with paper_style(font, rc):
        fig = Figure(figsize=(width, height))
        return fig, fig.subplots(nrows, ncols, sharex=sharex, squeeze=False)


def file_bytes(
    fig,
    kind: str,  # "pdf" or "png"
    dpi: float | None = None,  # dots per inch; None: as for print
) -> bytes:
    "A figure as the bytes of a file without a date. The same figure gives the same bytes."
    buffer = io.BytesIO()
    with paper_style():
        fig.savefig(buffer, format=kind, metadata=dict.fromkeys(DATES[kind]), dpi=dpi)
    return buffer.getvalue()


CAPTIONS = 'captions.md'  # the captions of all figures in a folder, by their names


def save_figure(
    fig,
    stem,  # path without its ending
    caption: str,
) -> list:  # paths written
    "Write the figure as .pdf and .png, and its caption into captions.md of its folder."
    stem = Path(stem)
    files = dict(pdf=file_bytes(fig, 'pdf'), png=file_bytes(fig, 'png'))
    paths = [write_file(f'{stem}.{ending}', data) for ending, data in files.items()]
    file = stem.parent / CAPTIONS
    parts = file.read_text('utf-8').strip().split('\n\n') if file.is_file() else []
    kept = [part for part in parts if not part.startswith(f'**{stem.name}.** ')]
    captions = sorted([*kept, f'**{stem.name}.** {caption}'])
    return [*paths, write_file(file, '\n\n'.join(captions) + '\n')]


def preview(
    fig,
    dpi: float = 100,
):  # IPython Image
    "The figure for a notebook, as it will be saved but with 64 colours: a quarter of the bytes."
    from IPython.display import Image
    from PIL import Image as Picture

    picture = Picture.open(io.BytesIO(file_bytes(fig, 'png', dpi)))
    small = io.BytesIO()
    picture.convert('RGB').quantize(64).save(small, 'png', optimize=True)
    return Image(small.getvalue())
