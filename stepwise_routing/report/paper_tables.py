"""Tables 1 and 2: the numbers printed in the paper beside those of this run

Here belong the paper's numbers, and putting ours into the same form. All other tables of a run belong
in `report.tables`.
"""

from pathlib import Path

import numpy as np

from ..records import PRICES, USUAL_PRICE
from ..util import one_of
from ..data.benchmarks import MICRO
from ..data.frozen import read_frozen
from ..method.results import headline, method_label, method_rank, style_of
from ..models.model_name import ModelName
from .writer import PERCENT, interval, interval_table, markdown, tabular, tex

# ---- as printed

PAPER_TABLES = {  # unit of cost -> table; read from the paper on 2026-11-21
    'paper_flops': dict(
        name='Table 1',
        cost='FLOPs',
        ac='ac_percent',
        notes=(),
        source='Table 1 of the paper as printed: Qwen2.5-Math-1.5B and -7B-Instruct; accuracy in %, 10^12 FLOPs, '
        '% per 10^12 FLOPs',
        rows={  # method: external models, then accuracy, FLOPs and A/C on GSM8K, MATH500 and OmniMath
            '1.5B Only': ('--', '85.2 0.973 87.56', '73.0 1.82 40.1', '26.4 2.72 9.7'),
            '7B Only': ('--', '94.6 4.42 21.40', '79.6 9.10 8.75', '28.2 13.56 2.08'),
            'SpecReason': ('no', '85.2 1.03 82.72', '77.4 7.74 10.0', '28.0 12.8 2.18'),
            'RSD': ('yes', '94.4 2.27 41.59', '79.8 4.56 17.5', '30.0 8.54 3.51'),
            'STEER': ('no', '94.4 2.66 35.49', '79.6 6.38 12.4', '28.3 9.16 3.09'),
            'Ours': ('no', '94.5 2.03 46.55', '82.8 5.34 15.5', '29.1 8.24 3.53'),
        },
    ),
    'cents': dict(
        name='Table 2',
        cost='Cost',
        ac='ac_fraction',
        source='Table 2 of the paper as printed: a Qwen2.5-Math-Instruct model and GPT-4.1-mini; accuracy in %, US '
        'cents, fraction per US cent',
        notes=(
            '† On GSM8K the small model of the paper is the 1.5B one, whose accuracy this is, not the 7B one.',
            '‡ Printed so; the accuracy and the cost beside it give .402/.2932 = 1.37.',
        ),
        rows={
            '7B Only': ('--', '85.2† 0.0 --', '79.6 0.0 --', '28.2 0.0 --'),
            'GPT-4.1-mini': ('--', '95.2 0.0293 32.4', '84.8 0.1313 6.46', '43.0 0.3356 1.28'),
            'SpecReason': ('no', '94.9 0.0994 9.55', '80.8 0.3653 2.21', '26.0 0.5691 0.46'),
            'RSD': ('yes', '93.5 0.0093 100.5', '87.1 0.0331 26.31', '40.2 0.2932 1.52‡'),
            'STEER': ('no', '94.5 0.0608 15.54', '84.0 0.0827 10.16', '30.0 0.0823 3.64'),
            'Ours': ('no', '94.5 0.0205 46.09', '85.0 0.0493 17.24', '38.6 0.285 1.35'),
        },
    ),
}


PAPER_BENCHMARKS = ('GSM8K', 'MATH500', 'OmniMath')


def _printed_row(cost, method, benchmark, external, cell):
    "One cell of the paper, such as `85.2 0.973 87.56`."
    row = dict(
        source='paper',
        benchmark=benchmark,
        method=method,
        label=method,
        external=external,
        unit=1e12,
        cost_in=cost,
    )
    texts = dict(zip(('accuracy', 'cost', 'ac'), cell.split()))
    for metric, text in texts.items():
        row[metric] = float(text.strip('†‡').replace('--', 'nan'))
    for metric, text in texts.items():
        row[f'{metric}_text'] = text
    return row


def paper_rows(
    cost: str,  # "paper_flops": Table 1; "cents": Table 2
):  # DataFrame, one row per method and benchmark; a printed dash is nan
    "A table of the paper as printed. ValueError if the paper has no table in this unit of cost."
    import pandas as pd

    one_of('cost of a table of the paper', cost, PAPER_TABLES)
    rows = []
    for method, (external, *cells) in PAPER_TABLES[cost]['rows'].items():
        for benchmark, cell in zip(PAPER_BENCHMARKS, cells):
            rows.append(_printed_row(cost, method, benchmark, external, cell))
    table = pd.DataFrame(rows)
    if cost == 'cents':
        table['ac_percent'] = 100 * table['ac']
    return table


# ---- of this run

CERTAIN_SOURCE = 'this run, certain'
RUN_SOURCE = 'this run'
SOURCES = {  # of a row in a table -> which setting it shows
    CERTAIN_SOURCE: 'at the setting of which we are 90 % sure that it keeps the accuracy',
    RUN_SOURCE: 'at the setting that is cheapest on calibration, without a promise',
    'paper': '',
}


def ranked(
    results,  # DataFrame of `evaluate`
):  # DataFrame, with the column `label`
    "The rows of the chosen thresholds: benchmarks in their order, then by method, then by reading."
    benchmarks = list(results['benchmark'].unique())
    order = dict(benchmark=benchmarks.index, method=method_rank, on_escalate=str)
    chosen = results[results['chosen'] == 1].sort_values(
        list(order), key=lambda column: column.map(order[column.name]), kind='stable'
    )
    labels = [*map(method_label, chosen['method'], chosen['on_escalate'])]
    return chosen.assign(label=labels).reset_index(drop=True)


PRINTED_FAMILIES = ('SpecReason', 'RSD', 'STEER', 'Ours', 'Ours, best')


def printed_results(
    r,  # `RunResults`
    results,  # DataFrame of `evaluate`
):  # DataFrame
    "The rows of Table 1 or 2: the paper's six methods, our best row, and your own methods."
    families = headline(r.results)
    rows = {('Small only', 'append'), ('Large only', 'append')}
    rows |= {row for family, row in families.items() if family in PRINTED_FAMILIES}
    pairs = zip(results['method'], results['on_escalate'])
    return results[[pair in rows for pair in pairs]]


def billed_as(
    large: str,  # the large model's name in the outcome table
    price: str = USUAL_PRICE,  # see `find_price`
) -> str:
    "Which large model answered, and at which prices."
    model = ModelName.parse(large).name
    if price not in PRICES:
        return (
            f'{model}, billed at {price} US dollars per million tokens (input/cached input/output)'
        )
    if model.startswith(price):
        return f'{price} at its published prices'
    if price == USUAL_PRICE:
        return f"{model}, billed at GPT-4.1-mini's prices"
    return f'{model}, billed at the prices of {price}'


def unit_name(
    cost: str,  # one of `UNITS`
    unit: float,  # FLOPs per unit
) -> str:
    "The unit of costs in words."
    return 'US cents' if cost == 'cents' else f'10^{round(np.log10(unit))} FLOPs'


def _run_rows(results, source, profile, large, pair, price):
    "The rows of this run in the form of the paper's rows."
    import pandas as pd

    cost = results['cost_in'].iloc[0]
    rows = ranked(results)
    facts = dict(
        source=source,
        profile=profile,
        benchmark=rows['benchmark'],
        method=rows['method'],
        label=rows['label'],
        external=[style_of(method)['external'] for method in rows['method']],
        threshold=rows['threshold'],
        n=rows['n'],
        unit=rows['unit'],
        cost_in=cost,
    )
    if pair:
        facts['pair'] = pair
    frozen = read_frozen()
    if frozen and set(rows['benchmark']) <= set(MICRO):
        facts['frozen'] = frozen.sentence
    # column here -> column of `evaluate`, factor
    metrics = dict(accuracy=('accuracy', 100), cost=('cost', 1), ac=(PAPER_TABLES[cost]['ac'], 1))
    if cost == 'cents':
        facts['billing'] = billed_as(large, price)
        metrics['ac_percent'] = ('ac_percent', 1)
    for column, (metric, factor) in metrics.items():
        for end in ('', '_low', '_high'):
            facts[f'{column}{end}'] = rows[f'{metric}{end}'] * factor
    return pd.DataFrame(facts)


def paper_table(
    results,  # DataFrame of `evaluate` in paper_flops (Table 1) or cents (Table 2), all benchmarks
    profile: str,  # name of the run's profile, such as "micro"
    large: str = 'micro-large',  # the large model's name in the outcome table
    pair: str = '',  # names of both models for the heading; '': not named
    certain=None,  # DataFrame of `evaluate` at the certain settings; None: they are left out
    price: str = USUAL_PRICE,  # of the large model, where cost is in cents
):  # DataFrame, one row per source (of `SOURCES`), benchmark and method
    """Table 1 or 2 at the certain and at the chosen settings, and the paper's printed numbers.

    Accuracy is in %; cost and accuracy per cost are in the paper's units.
    """
    import pandas as pd

    paper = paper_rows(results['cost_in'].iloc[0])
    parts = []
    if certain is not None:
        parts.append(_run_rows(certain, CERTAIN_SOURCE, profile, large, pair, price))
    parts.append(_run_rows(results, RUN_SOURCE, profile, large, pair, price))
    table = pd.concat([*parts, paper], ignore_index=True)
    return table.astype(dict(n='Int64'))


def read_paper_table(
    path,  # of a table1.csv or table2.csv
):  # DataFrame, as `paper_table` made it
    "Read Table 1 or 2 from its file, with the paper's numbers as printed."
    import pandas as pd

    table = pd.read_csv(Path(path))
    own = table[table['source'] != 'paper']
    whole = pd.concat([own, paper_rows(table['cost_in'].iloc[0])], ignore_index=True)
    return whole.astype(dict(n='Int64'))


# ---- as text


def _heading(part):
    "The heading of a part of `paper_table`, and its notes."
    first = part.iloc[0]
    paper = PAPER_TABLES[first['cost_in']]
    if first['source'] == 'paper':
        return paper['source'], list(paper['notes'])
    sizes = part.groupby('benchmark', sort=False)['n'].first()
    counts = ', '.join(f'{n} {benchmark}' for benchmark, n in sizes.items())
    pair = f'{first["pair"]}, ' if 'pair' in part else ''
    heading = (
        f'This run, {pair}{first["profile"]} profile, {SOURCES[first["source"]]} '
        f'({counts} test problems; {unit_name(first["cost_in"], first["unit"])}; [95% interval])'
    )
    notes = []
    if np.isinf(part['threshold']).any():
        notes.append(
            f'{STANDS_IN} The large model alone: no setting was both good enough and cheaper.'
        )
    if 'frozen' in part:
        notes.append(first['frozen'])
    if 'billing' in part:
        notes.append(f'Large model: {first["billing"]}. The small model costs nothing.')
    return heading, notes


EXTERNAL_MARKS = {'--': '–', 'no': '✗', 'yes': '✓'}  # needs a third model? -> its mark


STANDS_IN = '§'  # mark at the accuracy of a method that the large model replaces


def _accuracy_cell(row):
    text = interval('accuracy', PERCENT)(row)
    if not np.isinf(row['threshold']):
        return text
    number, line_break, rest = text.partition('<br>')
    return f'{number}{STANDS_IN}{line_break}{rest}'


def _external_cell(row):
    return EXTERNAL_MARKS[row['external']]


def _columns(table, external_heading='Ext. models'):
    "The columns that name a row, and the columns of numbers, with the functions that write them."
    cost_name = PAPER_TABLES[table['cost_in'].iloc[0]]['cost']
    names = {'Method': 'label', external_heading: _external_cell}
    cells = {
        'Acc ↑': _accuracy_cell,
        f'{cost_name} ↓': interval('cost'),
        'A/C ↑': interval('ac'),
    }
    return names, cells


def _panels(table):
    "Per source of `paper_table`: (source, heading, table of `interval_table`, notes)."
    names, cells = _columns(table)
    for source, part in table.groupby('source', sort=False):
        heading, notes = _heading(part)
        yield source, heading, interval_table(part, names, cells, 'benchmark'), notes


LEGEND = """
*Ext. models*: a method that needs a third model. *A/C*: accuracy per cost, in % per unit of FLOPs, as a fraction per
US cent.
"""


def to_markdown(
    table,  # of `paper_table`
) -> str:
    "Table 1 or 2 as Markdown."
    parts = []
    for _, heading, text, notes in _panels(table):
        lines = [f'**{heading}**', '', markdown(text), *(f'{note}\n' for note in notes)]
        parts.append('\n'.join(lines))
    return '\n'.join(parts) + LEGEND


def as_kept(value) -> float:
    "A number as a CSV file keeps it. Numbers that differ by rounding only become equal."
    return float(f'{value:.10g}')


def _without_intervals(table):
    "The table in the paper's form: grouped by external models, the best of each group and column marked."
    marks = list(EXTERNAL_MARKS)
    table = table.sort_values('external', key=lambda column: column.map(marks.index), kind='stable')
    for metric, better in dict(accuracy='max', cost='min', ac='max').items():
        kept = table[metric].map(as_kept)
        groups = kept.groupby([table.source, table.benchmark, table.external])
        differ = groups.transform('nunique') > 1  # else none is better
        table[f'{metric}_best'] = (kept == groups.transform(better)) & differ
    return table.drop(columns=[c for c in table if c.endswith(('_low', '_high'))])


def _tex_panels(table):
    "(Source, heading, LaTeX, notes) of each part of a table, scaled to the width of the text."
    legend = 'Ext.: with external models; in bold the best of a group'
    table = _without_intervals(table)
    for source, part in table.groupby('source', sort=False):
        heading, notes = _heading(part)
        names, cells = _columns(part, 'Ext.')
        text = tabular(interval_table(part, names, cells, 'benchmark'), 'Ext.')
        lines = ['\\noindent', r'\resizebox{\linewidth}{!}{%', text + '}']
        yield source, heading.replace('[95% interval]', legend), lines, notes


def _selected(table, rows, sources):
    "The chosen rows and sources of `paper_table`. ValueError for a row or source that it does not have."
    for row in rows or ():
        one_of('row', row, list(table['label'].unique()))
    for source in sources or ():
        one_of('source', source, list(table['source'].unique()))
    if rows:
        table = table[table['label'].isin(rows)]
    if sources:
        table = table[table['source'].isin(sources)]
    return table


def to_tex(
    table,  # of `paper_table`
    rows=None,  # labels of rows to keep, such as "Ours"; None: all
    sources=None,  # names of sources, such as ("this run",); None: all, the paper included
    captions=None,  # source -> your heading; "": no heading
    notes: bool = True,  # write the notes below
) -> str:
    r"Table 1 or 2 for LaTeX, to be \input: booktabs tabulars, scaled to the width of the text."
    table = _selected(table, rows, sources)
    profile = table['profile'].dropna()
    made_by = f', {profile.iloc[0]} profile' if len(profile) else ''
    lines = [
        f'% generated by nbs/05_results.ipynb{made_by}; needs booktabs, amsfonts and graphicx',
        r'\begingroup',
    ]
    for source, heading, text, remarks in _tex_panels(table):
        heading = (captions or {}).get(source, heading)
        if heading:
            lines.append(rf'\noindent\emph{{{tex(heading)}}}\par\smallskip')
        lines += text
        for remark in remarks if notes else ():
            lines.append(rf'\par\smallskip\noindent{{\footnotesize {tex(remark)}}}')
        lines.append(r'\par\medskip')
    return '\n'.join([*lines, r'\endgroup', ''])
