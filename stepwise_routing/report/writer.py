"""From numbers with intervals to Markdown, LaTeX and CSV"""

import re
from pathlib import Path

import numpy as np

from ..base.tools import write_file
from ..method.results import method_label

PERCENT = '{:.1f}'.format
POINTS = '{:+.1f}'.format
HUNDREDTHS = '{:.2f}'.format


def _digits(x):
    "Three significant digits, without an exponent."
    exponent = int(f'{x:.2e}'.split('e')[1])
    return '0' if x == 0 else f'{x:.{min(6, max(0, 2 - exponent))}f}'


def interval(
    metric: str,  # a column; `metric_low` and `metric_high` are its interval, `metric_text` what was printed
    show=_digits,  # number -> text
    factor: float = 1,  # 100 makes percent of a fraction
):  # row -> text: what a cell of a table holds
    "A number with its interval under it, where there is one; in bold where `metric_best` says so."

    def text(x):
        if np.isnan(x):
            return '–'
        return '∞' if np.isinf(x) else show(factor * x)

    def cell(row):
        low, high, number = (
            row.get(f'{metric}{end}', np.nan) for end in ('_low', '_high', '_text')
        )
        if not isinstance(number, str):
            number = text(row[metric])
        if not np.isnan(low):
            number += f'<br><sub>[{text(low)}, {text(high)}]</sub>'
        return f'**{number}**' if row.get(f'{metric}_best', False) else number

    return cell


def percent(metric):
    return interval(metric, PERCENT, 100)  # of a fraction


def interval_table(
    frame,  # DataFrame of numbers, a row for every cell or group of cells
    rows: dict,  # heading -> column, or function of a row: what names a row of the table
    cells: dict,  # heading -> function of a row, such as `interval`
    columns=None,  # column whose values become groups of columns, e.g. "benchmark"
):  # DataFrame of text, columns (group, heading); a dash where a group has no such row
    "One writer for every table: from numbers to text."
    import pandas as pd

    lines = {}
    for row in frame.to_dict('records'):
        names = tuple(str(name(row) if callable(name) else row[name]) for name in rows.values())
        group = row[columns] if columns else ''
        lines.setdefault(names, {}).update(
            {(group, heading): cell(row) for heading, cell in cells.items()}
        )
    heads = [
        (group, heading)
        for group in (frame[columns].unique() if columns else [''])
        for heading in cells
    ]
    texts = [[*names, *(line.get(h, '–') for h in heads)] for names, line in lines.items()]
    table = pd.DataFrame(
        texts, columns=pd.MultiIndex.from_tuples([*(('', h) for h in rows), *heads])
    )
    table.attrs['names'] = len(rows)
    return table


def label(row):
    return method_label(row['method'], row['on_escalate'])


def markdown(table) -> str:
    "A table of `interval_table` as Markdown, names to the left and numbers to the right."
    align = ['---' if i < table.attrs['names'] else '--:' for i in range(table.shape[1])]
    lines = [[' '.join(filter(None, column)) for column in table], align, *table.values]
    return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


_TEX = {c: f'\\{c}' for c in '{}$%_&#'} | {  # character -> LaTeX
    '\\': r'\textbackslash{}',
    '^': r'\textasciicircum{}',
    '~': r'\textasciitilde{}',
    '<': '$<$',
    '>': '$>$',
    '†': r'$^\dagger$',
    '‡': r'$^\ddagger$',
    '∞': r'$\infty$',
    '–': '--',
    '✗': r'$\times$',
    '✓': r'$\checkmark$',
    '↑': r'$\uparrow$',
    '↓': r'$\downarrow$',
}

_SPECIAL = re.compile(rf'10\^(\d+)|\*\*(.*?)\*\*|[{re.escape("".join(_TEX))}]')


def tex(text):
    "The text of a cell for LaTeX: a power of ten, **bold**, an interval under its number, and every character escaped."
    number, _, below = text.removesuffix('</sub>').partition('<br><sub>')
    if below:
        return rf'\shortstack[r]{{{tex(number)}\\\tiny {tex(below)}}}'

    def new(m):
        if m[1]:
            return f'$10^{{{m[1]}}}$'
        return rf'\textbf{{{tex(m[2])}}}' if m[2] else _TEX.get(m[0], m[0])

    return _SPECIAL.sub(new, text)


def tabular(
    table, by=None
) -> str:  # `interval_table`; heading of the column whose groups of rows are kept apart
    "A table for LaTeX (booktabs, amsfonts); pandas' Styler writes it."
    import pandas as pd

    heads = pd.MultiIndex.from_tuples(
        [tuple(tex(head).replace(' $', '$') for head in column) for column in table]
    )
    align = 'l' * table.attrs['names'] + 'r' * (table.shape[1] - table.attrs['names'])
    style = table.map(tex).set_axis(heads, axis=1).style.hide(axis='index')
    lines = style.to_latex(hrules=True, multicol_align='c', column_format=align).strip().split('\n')
    marks = table['', by].tolist() if by else []
    first = lines.index(r'\midrule') + 1
    for i in reversed(range(1, len(marks))):
        if marks[i] != marks[i - 1]:
            lines.insert(first + i, r'\midrule')
    return '\n'.join(lines)


def save_table(
    stem,  # path without its ending
    frame,  # DataFrame, for the .csv: unrounded, with intervals; columns of printed text are left out
    **texts,  # ending -> text, e.g. tex=..., md=...
) -> list:  # paths written
    "Write a table as .csv (ten digits, which no sum's order changes) and in the other forms given."
    plain = frame[[c for c in frame if not c.endswith('_text')]]
    texts = dict(csv=plain.to_csv(index=False, lineterminator='\n', float_format='%.10g'), **texts)
    return [write_file(f'{stem}.{ending}', text) for ending, text in texts.items()]


class Report(str):
    "Markdown that a notebook shows as such, and stores once."

    def _repr_markdown_(self):
        return str(self)

    def __repr__(self):
        return f'Report of {len(self)} characters'

    def _repr_pretty_(self, printer, cycle):
        printer.text(repr(self))


_SHARES = 'accuracy', 'coverage', 'cost_share', 'large_share', 'accuracy_vs_large'


def numbers(folder) -> dict:  # "evaluation.micro_gsm.ours_full.regenerate.cost_share" -> "72.1"
    "What evaluation*.csv say at the chosen thresholds, in percent, by name: file, benchmark, method, reading, column."
    import pandas as pd

    def slug(text):
        return re.sub('[^a-z0-9]+', '_', text.lower()).strip('_')

    out = {}
    for path in sorted(Path(folder).glob('evaluation*.csv')):
        for row in pd.read_csv(path).query('chosen == 1').to_dict('records'):
            name = '.'.join(
                [path.stem, *(slug(row[c]) for c in ('benchmark', 'method', 'on_escalate'))]
            )
            out |= {f'{name}.{metric}': PERCENT(100 * row[metric]) for metric in _SHARES}
    return out
