"""All tables of a run but Tables 1 and 2: every method, certain settings, comparisons, and their files

Here belong these tables and their files. The form of Tables 1 and 2 belongs in `report.paper_tables`.
Writing any table belongs in `report.writer`.
"""

import shutil
from pathlib import Path

import numpy as np

from ..util import one_of, write_file
from ..data.benchmarks import MICRO
from ..data.frozen import RECEIPT, read_frozen
from ..method.results import METHOD_STYLE, evaluate, headline, method_label
from .comparison import comparison_markdown, comparisons
from .paper_tables import (
    PAPER_TABLES,
    paper_table,
    printed_results,
    ranked,
    to_markdown,
    to_tex,
    unit_name,
)
from .shortfalls import listed, shortfalls
from .writer import (
    PERCENT,
    POINTS,
    Report,
    committed,
    in_points,
    interval,
    interval_table,
    label,
    markdown,
    percent,
    save_table,
)

# ---- every method

DETAILS = (
    'calibration_accuracy',
    'calibration_cost_share',
    'accuracy',
    'accuracy_vs_large',
    'miss',
    'excess',
    'coverage',
    'cost',
    'cost_share',
    'full_flops',
    'ac_percent',
    'ac_fraction',
    'steps',
    'small_tokens',
    'large_tokens',
    'large_share',
)


def _threshold_cell(row):
    return 'large only' if np.isinf(row['threshold']) else f'{row["threshold"]:.2g}'


def _kappa_cell(row):
    if np.isnan(row['kappa']):
        return '–'
    text = f'{row["kappa"]:.2g}'
    if row['kappa_min'] < row['kappa_max']:
        text += f'<br><sub>{row["kappa_min"]:.2g}–{row["kappa_max"]:.2g}</sub>'
    return text


def details(
    results,  # DataFrame of `evaluate`
) -> str:
    "Every row at its chosen setting, with the columns that Table 1 or 2 leaves out, as Markdown."
    cells = dict(threshold=_threshold_cell, kappa=_kappa_cell)
    for metric in DETAILS:
        cells[metric] = interval(metric)
    names = dict(benchmark='benchmark', method='label')
    return markdown(interval_table(ranked(results), names, cells))


METHOD_NOTES = """
How to read a row:

- Shares are fractions. *cost* is in {unit}. *large_share* is the share of steps that the large model wrote. *ac* is
  accuracy per cost.
- The setting of a row is the cheapest one that loses at most {points} to the large model on the calibration problems.
  *large only* says that no cheaper setting did.
- The *threshold* of ours is alpha. *kappa* follows from it: the mean over the training seeds, the least and the
  largest. The *threshold* of TRIM-Agg is the number of a setting.
- *Coverage* is one minus the share of problems that only the large model alone solves, in the draw that methods share.
  A *miss* is counted against independent draws of the large model. Its *excess* is over the large model's own misses.
- A row of ours is the mean over the training seeds, problem by problem.
- Intervals hold 95 %: test problems, calibration problems with the choice, and training seeds are drawn again. For
  *online kappa* and yardsticks only test problems are drawn again.

The methods:

- *Regenerate*: the large model writes the unsure step again. Without this word it goes on after that step.
- *Bare threshold*: hand over when the probability of the step's least sure token is low.
- *STEER (rest)* hands everything after the first unsure step to the large model.
- *SpecReason*: the large model grades every step of the small one with a digit, and writes the step again where the
  grade is low. The grade is the mean over all ten digits (*expected*).
- *RSD* does the same with the rewards of a process reward model. It is also TRIM-Thr. *TRIM-Agg* (after TRIM) learns a
  policy from these rewards.
- *GlimpRouter* looks at the first token of a step.
- *Ours* is the policy of chapter 03 on the paper's observation. *(full)* also sees the score from token probabilities.
  *(probability)* sees this score alone. *(nested)* is the simplest of these, and of a policy on the mean top logit, that
  is nearly the cheapest on calibration problems.
- *Ours (as the paper trains it)* learns from sampled trajectories with V-trace, critics and clipped ratios, at the
  smallest batch that was stable (50). The other rows of ours use exact gradients.
- *Ours (online kappa)* keeps the threshold of training; it sees the paper's observation.
- No methods, but yardsticks: *Random* escalates by chance, the *oracle* sees the answers.
"""

NOTES = dict(
    paper_flops=METHOD_NOTES
    + """
*FLOPs* count generated tokens only, as the paper does. Of a grade of SpecReason they count the one token that says it,
of RSD's reward model nothing. *Full FLOPs* also count prompt tokens that no cache holds, discarded drafts, and all that
judge and reward model read.
""",
    cents=METHOD_NOTES
    + """
*Cost* is the price of the large model's tokens: input, cached input and output have prices of their own. Small model
and reward model run on our own machine and cost nothing here. A grade of SpecReason costs its whole prompt and one
token of output.
""",
)


# ---- certain settings


def certain_rows(
    part,  # `BenchmarkResults`
):  # DataFrame: a row of `evaluate` per method at its certain setting, with `needed` and `point`
    "Every method at the setting that is certain on calibration. `point` is the cost of the chosen setting."
    names = ['method', 'on_escalate']
    certain = part.certain.rename(columns=dict(n='n_calibration'))
    facts = certain[[*names, 'n_calibration', 'alpha', 'needed']]
    chosen = part.results[part.results['chosen'] == 1]
    point = chosen[[*names, 'cost_share']].rename(columns=dict(cost_share='point'))
    rows = evaluate(part.at_points['certain']).merge(facts, on=names)
    return rows.merge(point, on=names)


CERTAIN_NOTES = """
We test settings from safe to cheap on {n} calibration problems. *Certain* is the last setting of which we are 90 %
sure: it loses at most {points} of the large model's accuracy on new problems. Cost is in % of the large model's cost.
Accuracy is in points above or below the large model's. Both are measured on test problems. In brackets: 95%
intervals; each resample chooses the setting again.
*Large alone* says that no setting is certain and cheaper. *Would do* then says about how many calibration problems
would be enough (formula of chapter 02c); a dash says that no number would. *Cost, not certain* is the cost of the
cheapest setting that kept the accuracy on the calibration problems. The table has one row for each family of methods;
the CSV file has all rows.
"""


def _needed_cell(row):
    if not np.isinf(row['threshold']):
        return ''
    return f'{row["needed"]:,.0f}' if row['needed'] else '–'


def _certain_cell(row):
    return 'large alone' if np.isinf(row['threshold']) else percent('cost_share')(row)


def certain_markdown(
    rows,  # of `certain_rows`
) -> str:
    "The certain settings as a Markdown table with notes."
    names = dict(Benchmark='benchmark', Method=label)
    cells = {
        'Cost, certain': _certain_cell,
        'Accuracy, points': interval('accuracy_vs_large', POINTS, 100),
        'Would do': _needed_cell,
        'Cost, not certain': lambda row: PERCENT(100 * row['point']),
    }
    n = ' / '.join(f'{n:g}' for n in rows['n_calibration'].unique())
    notes = CERTAIN_NOTES.format(points=in_points(rows['alpha'].iloc[0]), n=n)
    return markdown(interval_table(rows, names, cells)) + notes


# ---- what is written, and shown


def _all_certain(r):
    "The certain rows, with the column `shown`: one row per family, and your own routers."
    rows = r.whole(certain_rows)
    families = set(headline(r.results).values())
    names = zip(rows['method'], rows['on_escalate']) if len(rows) else ()
    return rows.assign(shown=[name in families or name[0] not in METHOD_STYLE for name in names])


REPORTS = {  # stem of the files -> (function that makes the rows, function that writes them)
    'comparison': (comparisons, comparison_markdown),
    'certain': (_all_certain, certain_markdown),
}


def report(
    results: dict,  # of `load_run`; empty: show the committed table
    stem: str,  # one of `REPORTS`
) -> Report:
    "Write and show a table of a run, in its first unit of cost. One line if there is nothing to show."
    one_of('table', stem, REPORTS)
    if not results:
        return committed(stem)
    rows_of, to_text = REPORTS[stem]
    r = next(iter(results.values()))
    rows = rows_of(r)
    if rows.empty:
        return Report('Nothing to report: chapter 04 left no such rows.')
    text = to_text(rows[rows['shown']] if 'shown' in rows else rows)
    save_table(r.tables / f'{stem}{r.suffix}', rows, md=text)
    return Report(text)


def _report_paper_table(r) -> str:
    "Write Table 1 or 2 of a run, and its rows. Returns the table as Markdown."
    certain = r.whole(lambda part: evaluate(part.at_points['certain']))
    rows = printed_results(r, r.results)
    certain_rows = printed_results(r, certain)
    table = paper_table(rows, r.profile, r.large, r.pair, certain_rows, r.price)
    text = to_markdown(table)
    save_table(r.tables / f'evaluation{r.suffix}', r.results)
    stem = r.tables / PAPER_TABLES[r.unit]['name'].lower().replace(' ', '')
    save_table(stem, table, tex=to_tex(table), md=f'{text}\n{listed(shortfalls(r))}')
    return text


def _report_full(r) -> None:
    "Write the table of all methods of a run."
    unit = unit_name(r.unit, r.results['unit'].iloc[0])
    notes = NOTES[r.unit].format(unit=unit, points=in_points(r.alpha))
    full = ['**All methods**', '', details(r.results), notes, listed(shortfalls(r))]
    frozen = read_frozen()
    if frozen and set(r.parts) <= set(MICRO):
        full.append(f'{frozen.sentence}\n')
        shutil.copy(RECEIPT, r.tables / 'frozen.json')
    write_file(r.tables / f'full{r.suffix}.md', '\n'.join(full))


def report_paper(
    results: dict,  # of `load_run`; empty: show the committed tables
) -> Report:
    "Write Tables 1 and 2 and the table of all methods. Show Tables 1 and 2."
    if not results:
        return committed('table1', 'table2')
    texts = [_report_paper_table(r) for r in results.values()]
    _report_full(next(iter(results.values())))
    return Report('\n'.join(texts))


def report_shortfalls(
    results: dict,  # of `load_run`; empty: the committed tables say it themselves
) -> Report:
    "What falls short, as a folded list."
    if not results:
        return Report('It stands under Tables 1 and 2 above.')
    sentences = []
    for r in results.values():
        sentences += shortfalls(r)
    return Report(listed(dict.fromkeys(sentences)))


# ---- the end of a run


def _result_lines(results) -> list:
    "A line each for both models and our best row, at their chosen settings."
    chosen = results.query('chosen == 1').set_index(['method', 'on_escalate'])
    families = headline(results)
    ours = families.get('Ours, best', families.get('Ours', ('Small only', 'append')))
    lines = []
    for row in dict.fromkeys([('Small only', 'append'), ('Large only', 'append'), ours]):
        own = chosen.loc[[row]]
        accuracy = ' / '.join(map(PERCENT, 100 * own['accuracy']))
        cost = ' / '.join(map(PERCENT, 100 * own['cost_share']))
        benchmarks = ' / '.join(own['benchmark'])
        lines.append(
            f'{method_label(*row)}: {accuracy} % right at {cost} % of the cost, {benchmarks}'
        )
    return lines


def _verdict_on_tables(comparison) -> str:  # of `publish.compared`
    if not comparison:
        return 'not compared: other settings or profile'
    _, _, difference = comparison.partition('different from the committed tables: ')
    if difference:
        return f'no, differs by {difference}'
    text = comparison.replace('identical to the committed tables', 'yes')
    return text.replace('equal to the committed tables', 'yes,')


def _minutes(seconds):
    return f'{seconds // 60:.0f} min {seconds % 60:.0f} s'


def summary(
    tables,  # folder
    seconds: tuple,  # (of this call, of all stages)
    files: str,  # where the files are, in words
    compared: str = '',  # of `publish.compared`; '': not compared
) -> list:  # of lines
    "Six lines about a finished run. Fewer if it made no tables."
    import pandas as pd

    now, all_stages = map(_minutes, seconds)
    lines = [f'time: {now}; all stages {all_stages}']
    paths = sorted(Path(tables).glob('evaluation*.csv'))
    if paths:  # the table in FLOPs, if both are there
        lines += _result_lines(pd.read_csv(paths[0]))
    lines.append(f'written: {files}')
    lines.append(f'identical to the committed tables: {_verdict_on_tables(compared)}')
    return lines
