"""Writes numbers with intervals as Markdown, LaTeX and CSV

Here belongs writing a number, a cell or a table of any content. Which numbers go into which table
belongs in `report.tables` and `report.paper_tables`.
"""

import re

import numpy as np

from ..util import find_project, write_file
from ..method.results import method_label

# ---- numbers

PERCENT = '{:.1f}'.format
POINTS = '{:+.1f}'.format
HUNDREDTHS = '{:.2f}'.format


def in_points(
    share: float,  # of the problems
) -> str:
    "A share in words. For example, .02 becomes `2 points`."
    number = f'{100 * share:g}'
    return f'{number} point' if number == '1' else f'{number} points'


def three_digits(number: float) -> str:
    "Three significant digits, without an exponent."
    if number == 0:
        return '0'
    exponent = int(f'{number:.2e}'.split('e')[1])
    decimals = min(6, max(0, 2 - exponent))
    return f'{number:.{decimals}f}'


def interval(
    metric: str,  # a column; `metric_low` and `metric_high` are its interval
    write_number=three_digits,  # number -> text
    factor: float = 1,  # multiplies the number; 100 turns a fraction into percent
):  # function: row -> text of a cell
    """Writes a number, with its interval under it if it has one.

    The number is bold if the row's `metric_best` is True. If the row has a text in `metric_text`, the
    text replaces the number.
    """

    def text(number):
        if np.isnan(number):
            return '–'
        return '∞' if np.isinf(number) else write_number(factor * number)

    def cell(row):
        printed = row.get(f'{metric}_text')
        number = printed if isinstance(printed, str) else text(row[metric])
        low = row.get(f'{metric}_low', np.nan)
        high = row.get(f'{metric}_high', np.nan)
        if not np.isnan(low):
            number += f'<br><sub>[{text(low)}, {text(high)}]</sub>'
        return f'**{number}**' if row.get(f'{metric}_best', False) else number

    return cell


def percent(
    metric: str,  # a column of fractions
):  # function: row -> text of a cell
    "Writes a fraction in percent, with its interval."
    return interval(metric, PERCENT, 100)


# ---- tables


def interval_table(
    frame,  # DataFrame of numbers, a row for each cell or group of cells
    rows: dict,  # heading -> column, or function of a row: the names of a row in the table
    cells: dict,  # heading -> function of a row, such as `interval`
    columns: str | None = None,  # column whose values become groups of columns
):  # DataFrame of text, columns (group, heading)
    "Turn numbers into the text of a table; every table uses this. A missing row of a group is a dash."
    import pandas as pd

    lines = {}
    for row in frame.to_dict('records'):
        names = tuple(str(name(row) if callable(name) else row[name]) for name in rows.values())
        group = row[columns] if columns else ''
        line = lines.setdefault(names, {})
        for heading, cell in cells.items():
            line[group, heading] = cell(row)
    groups = frame[columns].unique() if columns else ['']
    cell_heads = [(group, heading) for group in groups for heading in cells]
    texts = []
    for names, line in lines.items():
        texts.append([*names, *(line.get(head, '–') for head in cell_heads)])
    name_heads = [('', heading) for heading in rows]
    heads = pd.MultiIndex.from_tuples(name_heads + cell_heads)
    table = pd.DataFrame(texts, columns=heads)
    table.attrs['names'] = len(rows)
    return table


def label(
    row,  # with `method` and `on_escalate`
) -> str:
    "The name of a method's row in tables."
    return method_label(row['method'], row['on_escalate'])


def markdown(
    table,  # of `interval_table`
) -> str:
    "A table as Markdown. Names are aligned left, numbers right."
    n_names = table.attrs['names']
    n_cells = table.shape[1] - n_names
    heads = [' '.join(part for part in column if part) for column in table]
    align = ['---'] * n_names + ['--:'] * n_cells
    lines = [heads, align, *table.values]
    return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


# ---- LaTeX

TEX_CHARACTERS = {
    **{c: f'\\{c}' for c in '{}$%_&#'},
    '\\': r'\textbackslash{}',
    '^': r'\textasciicircum{}',
    '~': r'\textasciitilde{}',
    '<': '$<$',
    '>': '$>$',
    '†': r'$^\dagger$',
    '‡': r'$^\ddagger$',
    '§': r'$^\S$',
    '∞': r'$\infty$',
    '–': '--',
    '✗': r'$\times$',
    '✓': r'$\checkmark$',
    '↑': r'$\uparrow$',
    '↓': r'$\downarrow$',
}

SPECIAL_TEXT = re.compile(rf'10\^(\d+)|\*\*(.*?)\*\*|[{re.escape("".join(TEX_CHARACTERS))}]')


def _special_tex(match):  # of `SPECIAL_TEXT`
    exponent, bold = match.groups()
    if exponent:
        return f'$10^{{{exponent}}}$'
    return rf'\textbf{{{tex(bold)}}}' if bold else TEX_CHARACTERS.get(match[0], match[0])


def tex(
    text: str,  # of a cell
) -> str:
    "The text of a cell for LaTeX: powers of ten, **bold**, an interval under its number, escapes."
    number, _, below = text.removesuffix('</sub>').partition('<br><sub>')
    if below:
        return rf'\shortstack[r]{{{tex(number)}\\\tiny {tex(below)}}}'
    return SPECIAL_TEXT.sub(_special_tex, text)


def tabular(
    table,  # of `interval_table`
    grouped_by: str | None = None,  # heading of a column; a rule separates its groups of rows
) -> str:
    "A table for LaTeX, which needs booktabs and amsfonts. pandas' Styler writes it."
    import pandas as pd

    heads = [tuple(tex(part).replace(' $', '$') for part in column) for column in table]
    n_names = table.attrs['names']
    align = 'l' * n_names + 'r' * (table.shape[1] - n_names)
    texts = table.map(tex).set_axis(pd.MultiIndex.from_tuples(heads), axis=1)
    style = texts.style.hide(axis='index')
    text = style.to_latex(hrules=True, multicol_align='c', column_format=align)
    lines = text.strip().split('\n')
    groups = table['', grouped_by].tolist() if grouped_by else []
    first_row = lines.index(r'\midrule') + 1
    for i in reversed(range(1, len(groups))):
        if groups[i] != groups[i - 1]:
            lines.insert(first_row + i, r'\midrule')
    return '\n'.join(lines)


# ---- files


def save_table(
    stem,  # path without its ending
    frame,  # DataFrame for the .csv, unrounded, with intervals; columns of printed text are left out
    **texts: str,  # ending -> text, e.g. tex=..., md=...
) -> list:  # paths written
    "Write a table as .csv and in the other forms given. Ten digits: the order of sums does not change them."
    numbers = frame[[column for column in frame if not column.endswith('_text')]]
    csv = numbers.to_csv(index=False, lineterminator='\n', float_format='%.10g')
    return [write_file(f'{stem}.{ending}', text) for ending, text in dict(csv=csv, **texts).items()]


def committed(
    *stems: str,  # of tables, e.g. "certain"
) -> 'Report':
    "What a fresh clone shows before it has results of its own: tables of the repository, as they are."
    folder = find_project().root / 'tables'
    paths = [folder / f'{stem}.md' for stem in stems]
    return Report('\n\n'.join(path.read_text('utf-8') for path in paths if path.is_file()))


class Report(str):
    "Markdown text. A notebook displays it as Markdown, and stores it once."

    def _repr_markdown_(self):
        return str(self)

    def __repr__(self):
        return f'Report of {len(self)} characters'

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))
