"""Estimates the width of a LaTeX table without LaTeX

Here belongs the estimate. It uses the widths of letters in Computer Modern, from the font that
matplotlib ships. Times and most other fonts are narrower. The content of a table belongs in
`report.paper_tables`.
"""

import re
from functools import cache

# Computer Modern is wider at small sizes. Size in LaTeX -> points, times the factor of cmr9 or cmr8 over cmr10
FONT_SIZES = {r'\small': 9 * 1.028, r'\footnotesize': 8 * 1.0625}
BOLD = 1.15  # width of cmbx10 / width of cmr10
SCRIPT = 0.75  # size of an index / size of the text
EN_DASH = 0.5  # em
SYMBOLS = {  # command -> width in em
    r'\uparrow': 0.5,
    r'\downarrow': 0.5,
    r'\times': 0.78,
    r'\checkmark': 0.83,
    r'\infty': 1.0,
    r'\dagger': 0.44,
    r'\ddagger': 0.44,
    r'\S': 0.44,
}
POINTS_PER_INCH = 72.27


@cache
def _computer_modern():
    "The font cmr10, at a size of one point."
    from pathlib import Path

    import matplotlib
    from matplotlib.ft2font import FT2Font

    font = FT2Font(Path(matplotlib.get_data_path(), 'fonts', 'ttf', 'cmr10.ttf'))
    font.set_size(1000, 72)
    return font


@cache
def _letter_width(letter):  # in em
    return _computer_modern().load_char(ord(letter)).linearHoriAdvance / 65536 / 1000


def _replaced(text):
    "(A cell without its commands, the width in em of the symbols that they print)."
    width = 0.0
    for index in re.findall(r'\^(\\\w+)', text):
        width += SCRIPT * SYMBOLS[index]
    text = re.sub(r'\$\^\\\w+\$', '', text)
    for symbol in re.findall(r'\$(\\\w+)\$', text):
        width += SYMBOLS[symbol]
    text = re.sub(r'\$\\\w+\$', '', text)
    width += EN_DASH * text.count('--')
    text = text.replace('--', '')
    return re.sub(r'\\([%&_#${}])', r'\1', text), width


def cell_width(
    text: str,  # a cell of a tabular, as `writer.tex` writes it
) -> float:  # in em
    "The width of a cell in Computer Modern."
    bold = re.fullmatch(r'\\textbf\{(.*?)\}(.*)', text)
    if bold:
        return BOLD * cell_width(bold[1]) + cell_width(bold[2])
    letters, width = _replaced(text)
    return width + sum(map(_letter_width, letters))


def _rows(tabular):  # of texts
    "The rows of a tabular. A row is a list of (number of columns that a cell spans, text)."
    rows = []
    for line in tabular.splitlines():
        if line.endswith(r'\\'):
            cells = []
            for cell in line.removesuffix(r'\\').split(' & '):
                spanning = re.fullmatch(r'\\multicolumn\{(\d+)\}\{\w\}\{(.*)\}', cell.strip())
                cells.append((int(spanning[1]), spanning[2]) if spanning else (1, cell.strip()))
            rows.append(cells)
    return rows


def tabular_width(
    tabular: str,  # of `writer.tabular`, without intervals
    size: str,  # one of `FONT_SIZES`
    column_gap: float,  # points, of tabcolsep
) -> float:  # inches
    "The width of a table in Computer Modern, exact to about 1 %."
    widest = {}  # column -> em
    groups = []  # (first column, columns, em) of cells that span several
    for cells in _rows(tabular):
        column = 0
        for n_columns, text in cells:
            width = cell_width(text)
            if n_columns == 1:
                widest[column] = max(width, widest.get(column, 0))
            else:
                groups.append((column, n_columns, width))
            column += n_columns
    gap = 2 * column_gap / FONT_SIZES[size]  # em
    for first, n_columns, width in groups:
        columns = range(first, first + n_columns)
        inner = sum(widest[column] for column in columns) + gap * (n_columns - 1)
        widest[columns[-1]] += max(0, width - inner)
    return (sum(widest.values()) + gap * len(widest)) * FONT_SIZES[size] / POINTS_PER_INCH
