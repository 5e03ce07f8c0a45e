"""The paper's printed numbers beside this run's"""

from pathlib import Path

import numpy as np

from ..base.records import PRICES
from ..base.tools import one_of, write_file
from ..method.results import ABLATED, ablation_table, headline, method_label, method_rank, style_of
from .gains import comparison_markdown, comparisons, listed, metrics, metrics_markdown, shortfalls
from .writer import (
    PERCENT,
    Report,
    interval,
    interval_table,
    label,
    markdown,
    percent,
    save_table,
    tabular,
    tex,
)

PAPER_TABLES = {  # by their cost; read on 2026-11-21
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


def paper_rows(cost):
    "The printed table in this cost: a DataFrame, one row per method and benchmark; a dash is nan."
    import pandas as pd

    one_of('cost of a table of the paper', cost, PAPER_TABLES)

    def row(method, benchmark, external, printed):
        texts = dict(zip(('accuracy', 'cost', 'ac'), printed.split()))
        numbers = {
            metric: float(text.strip('†‡').replace('--', 'nan')) for metric, text in texts.items()
        }
        return dict(
            source='paper',
            benchmark=benchmark,
            method=method,
            label=method,
            external=external,
            unit=1e12,
            cost_in=cost,
            **numbers,
            **{f'{k}_text': text for k, text in texts.items()},
        )

    rows = pd.DataFrame(
        [
            row(method, benchmark, external, printed)
            for method, (external, *cells) in PAPER_TABLES[cost]['rows'].items()
            for benchmark, printed in zip(('GSM8K', 'MATH500', 'OmniMath'), cells)
        ]
    )
    return rows.assign(ac_percent=100 * rows['ac']) if cost == 'cents' else rows


def _ranked(results):
    "The rows of the chosen thresholds, by benchmark as they come, then by method, then by reading."
    benchmarks = list(results['benchmark'].unique())
    order = dict(benchmark=benchmarks.index, method=method_rank, on_escalate=str)
    by = results[results['chosen'] == 1].sort_values(
        list(order), key=lambda c: c.map(order[c.name]), kind='stable'
    )
    return by.assign(label=[*map(method_label, by['method'], by['on_escalate'])]).reset_index(
        drop=True
    )


def printed_results(r):
    "Of `SettingResults` the rows that Table 1 or 2 prints: the paper's six, and our best."
    best = headline(r.results)
    families = ('SpecReason', 'RSD', 'STEER', 'Ours', 'Ours, best')
    rows = {
        ('Small only', 'append'),
        ('Large only', 'append'),
        *(best[f] for f in families if f in best),
    }
    return r.results[[row in rows for row in zip(r.results['method'], r.results['on_escalate'])]]


def billed_as(large) -> str:
    "Who answered, and at whose prices, from the large model's name in the outcome table."
    own = next((p for p in PRICES if large.split(':')[-1].startswith(p)), None)
    if own:
        return f'{own} at its published prices'
    return f"{large.removeprefix('served:')} behind a local server, billed at GPT-4.1-mini's prices"


def unit_name(cost, unit):
    return 'US cents' if cost == 'cents' else f'10^{round(np.log10(unit))} FLOPs'


def paper_table(
    results,  # DataFrame of `evaluate` in paper_flops (Table 1) or cents (Table 2), all benchmarks
    profile,  # which run this is, e.g. "micro"
    large='micro-large',  # the large model's name in the outcome table
):  # DataFrame, one row per source ("this run", "paper"), benchmark and method
    "Table 1 or 2: accuracy (%), cost and accuracy per cost at the chosen thresholds, and the paper's printed numbers."
    import pandas as pd

    cost = results['cost_in'].iloc[0]
    r = _ranked(results)
    paper = paper_rows(cost)
    numbers = dict(accuracy=('accuracy', 100), cost=('cost', 1), ac=(PAPER_TABLES[cost]['ac'], 1))
    facts = dict(
        source='this run',
        profile=profile,
        benchmark=r['benchmark'],
        method=r['method'],
        label=r['label'],
        external=[style_of(m)['external'] for m in r['method']],
        threshold=r['threshold'],
        n=r['n'],
        unit=r['unit'],
        cost_in=cost,
    )
    if cost == 'cents':
        facts['billing'] = billed_as(large)
        numbers['ac_percent'] = ('ac_percent', 1)
    ends = {
        f'{k}{end}': r[f'{m}{end}'] * factor
        for k, (m, factor) in numbers.items()
        for end in ('', '_low', '_high')
    }
    return pd.concat([pd.DataFrame(facts | ends), paper], ignore_index=True).astype(dict(n='Int64'))


def _heading(part):
    "What a part of `paper_table` is, with its notes."
    first = part.iloc[0]
    paper = PAPER_TABLES[part['cost_in'].iloc[0]]
    if first['source'] == 'paper':
        return paper['source'], paper['notes']
    counts = ', '.join(
        f'{n} {b}' for b, n in part.groupby('benchmark', sort=False)['n'].first().items()
    )
    heading = (
        f'This run, {first["profile"]} profile ({counts} test problems; '
        f'{unit_name(first["cost_in"], first["unit"])}; [paired bootstrap 95% interval])'
    )
    return heading, [
        f'Large model: {b}. The small model costs nothing.' for b in part.get('billing', [])[:1]
    ]


def _panels(table, external='Ext. models'):
    "Of `paper_table`, per source: heading, table of `interval_table`, notes."
    name = PAPER_TABLES[table['cost_in'].iloc[0]]['cost']
    marks = {'--': '–', 'no': '✗', 'yes': '✓'}
    rows = {'Method': 'label', external: lambda row: marks[row['external']]}
    cells = {
        'Acc ↑': interval('accuracy', PERCENT),
        f'{name} ↓': interval('cost'),
        'A/C ↑': interval('ac'),
    }
    for _, part in table.groupby('source', sort=False):
        heading, notes = _heading(part)
        yield heading, interval_table(part, rows, cells, 'benchmark'), notes


_LEGEND = """
*Ext. models*: a method that needs a third model. *A/C*: accuracy per cost, in % per unit of FLOPs, as a fraction per
US cent.
"""


def to_markdown(table) -> str:
    "Table 1 or 2, of `paper_table`, as Markdown."
    parts = [
        '\n'.join([f'**{heading}**', '', markdown(text), *(f'{note}\n' for note in notes)])
        for heading, text, notes in _panels(table)
    ]
    return '\n'.join(parts) + _LEGEND


def _without_intervals(table):
    "`paper_table` as the paper prints it: groups by external models, a column's best of a group marked as `_best`."
    marks = ['--', 'no', 'yes']
    table = table.sort_values('external', key=lambda c: c.map(marks.index), kind='stable')
    groups = table.groupby(['source', 'benchmark', 'external'])
    for metric, how in dict(accuracy='max', cost='min', ac='max').items():
        several = groups[metric].transform('nunique') > 1  # else none is better
        table[f'{metric}_best'] = (table[metric] == groups[metric].transform(how)) & several
    return table.drop(columns=[c for c in table if c.endswith(('_low', '_high'))])


_SHORT = 'Ext.: with external models; in bold the best of a group'

_WIDTHS = (r'\small\setlength{\tabcolsep}{2.1pt}%', ''), (r'\resizebox{\linewidth}{!}{%', '}')


def to_tex(table, full=False) -> str:
    "The same for LaTeX, to be \\input: two booktabs tabulars, as wide as they are; `full`: with intervals, scaled."
    profile, (begin, end) = table['profile'].iloc[0], _WIDTHS[full]
    lines = [
        f'% generated by nbs/05_results.ipynb, {profile} profile; needs booktabs, amsfonts and graphicx',
        r'\begingroup',
    ]
    for heading, text, notes in (
        _panels(table) if full else _panels(_without_intervals(table), 'Ext.')
    ):
        if not full:
            heading = heading.replace('[paired bootstrap 95% interval]', _SHORT)
        lines += [rf'\noindent\emph{{{tex(heading)}}}\par\smallskip', r'\noindent', begin]
        lines += [tabular(text, None if full else 'Ext.') + end]
        lines += [rf'\par\smallskip\noindent{{\footnotesize {tex(note)}}}' for note in notes] + [
            '\\par\\medskip'
        ]
    return '\n'.join([*lines, r'\endgroup', ''])


_DETAILS = (
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


def details(results) -> str:
    "Every row of the results at its chosen setting, and what Table 1 or 2 leaves out, as Markdown."

    def threshold(row):
        return 'large only' if np.isinf(row['threshold']) else f'{row["threshold"]:.2g}'

    cells = dict(threshold=threshold) | {m: interval(m) for m in _DETAILS}
    return markdown(
        interval_table(_ranked(results), dict(benchmark='benchmark', method='label'), cells)
    )


_METHOD_NOTES = """
Shares are fractions, *cost* is in {unit}; *large_share*: of the steps, by the large model; *ac*: accuracy per cost. The
*threshold* of ours is alpha, of which kappa follows. Every setting is the cheapest one that loses at most 2 points to
the large model on the calibration problems; *large only*: nothing cheaper did. *Bare threshold*: on the mean top logit
or the least sure token's probability of the last step, in its own units. *STEER (rest)* hands everything after the
first unsure step to the large model; *STEER (next)* decides about every step anew. *Regenerate* writes the unsure step
again instead of going on after it. *SpecReason* has the large model grade every step of the small one with a digit, the
likeliest (*greedy*) or the mean over all ten (*expected*), and write it again where the grade is low; *RSD* the same by
a process reward model, which is also TRIM-Thr. *TRIM-Agg* (after TRIM) learns from those rewards; *GlimpRouter* looks
at the first token of a step. *Random* escalates by chance; the *oracle* sees the answers, *Knows the steps* the first
wrong step: both are no methods. *Coverage* is one minus the share of problems that only the large model alone gets
right, in the draw that methods share. A *miss* is counted against independent draws of it, its *excess* is over the
misses of the large model itself. *Ours* is the policy of chapter 03 on the paper's observation, *(full)* one that also
sees the score from token probabilities, *(online kappa)* keeps the threshold of training, *(bound)* bounds the misses,
*(per step)* decides about every step anew. A row of ours is the mean over the training seeds, problem by problem.
"""

NOTES = dict(
    paper_flops=_METHOD_NOTES
    + """*FLOPs* count generated tokens only, as the paper does: of a grade of SpecReason the
one token that says it, of RSD's reward model nothing. *Full FLOPs* also count prompt tokens that no cache holds,
discarded drafts, what the judge and the reward model read.
""",
    cents=_METHOD_NOTES
    + """*Cost* is what the large model's tokens cost, input, cached input and output at their own
prices; small model and reward model are run by ourselves and cost nothing here. A grade of SpecReason costs its whole
prompt and one token of output.
""",
)


def ablation_markdown(table) -> str:
    "The rows of `ablation_table`: intervals over problems, and ranges over seeds."

    def cell(metric):
        seeds = lambda r: (
            f'<br><sub>{100 * r[f"{metric}_min"]:.1f}–{100 * r[f"{metric}_max"]:.1f}</sub>'
        )
        return lambda r: percent(metric)(r) + (seeds(r) if r['seeds'] > 1 else '')

    rows = {'Benchmark': 'benchmark', 'Policy': label, 'Test problems': 'n', 'Seeds': 'seeds'}
    text = markdown(interval_table(table, rows, {head: cell(m) for m, head in ABLATED.items()}))
    return (
        text
        + '\nMeans over seeds; [bootstrap 95% interval over test problems]; lowest–highest seed.\n'
    )


REPORTS = {  # stem of the files: rows of `SettingResults`, how they are written, settings that have it
    'metrics': (lambda r: r.whole(metrics), metrics_markdown, ('open', 'api')),
    'comparison': (comparisons, comparison_markdown, ('open', 'api')),
    'ablations': (lambda r: r.whole(ablation_table), ablation_markdown, ('open',)),
}


def report(results, stem) -> Report:  # of `load_run`; one of `REPORTS`
    "Write a table of every setting that has it, and show it; a line where there is nothing to show."
    one_of('table', stem, REPORTS)
    make, write, settings = REPORTS[stem]

    def text(name):
        if name not in results:
            return f'This run has no {name} setting.'
        r = results[name]
        frame = make(r)
        if frame.empty:
            return 'Nothing to report: chapter 04 left no such rows (ablations: profile micro-ablations).'
        md = write(frame)
        save_table(r.tables / f'{stem}{r.suffix}', frame, md=md)
        return md

    return Report('\n\n'.join(map(text, settings)))


def report_paper(results) -> Report:
    "Write Tables 1 and 2 of `load_run`, and the full tables with all they leave out; show the former."
    out = []
    for r in results.values():
        table = paper_table(printed_results(r), r.profile, r.large)
        cost = r.unit
        name = PAPER_TABLES[cost]['name']
        folder = r.tables
        text = to_markdown(table)
        short = listed(shortfalls(r))
        rows = details(r.results)
        units = unit_name(cost, r.results['unit'].iloc[0])
        save_table(folder / f'evaluation{r.suffix}', r.results)
        stem = folder / name.lower().replace(' ', '')
        save_table(stem, table, tex=to_tex(table), md=f'{text}\n{short}')
        write_file(f'{stem}_full.tex', to_tex(table, full=True))
        full = [
            f'**All methods, {r.name} setting**',
            '',
            rows,
            NOTES[cost].format(unit=units),
            short,
        ]
        write_file(folder / f'full{r.suffix}.md', '\n'.join(full))
        out.append(text)
    return Report('\n'.join(out))


def report_shortfalls(results) -> Report:
    "What falls short in all settings of `load_run`, folded."
    missing = [
        f'This run has no {name} setting.' for name in ('open', 'api') if name not in results
    ]
    return Report(
        listed([*missing, *(sentence for r in results.values() for sentence in shortfalls(r))])
    )


def summary(
    tables, seconds, files, compared=''
) -> list:  # folder; now and of all stages; where; of `publish.compared`
    "Six lines about a finished run; fewer where it made no tables."
    import pandas as pd

    now, stages = (f'{s // 60:.0f} min {s % 60:.0f} s' for s in seconds)
    lines = [f'time: {now}; all stages {stages}']
    paths = sorted(Path(tables).glob('evaluation*.csv'))
    for path in paths[:1]:  # in FLOPs, where there are both
        results = pd.read_csv(path)
        chosen = results.query('chosen == 1').set_index(['method', 'on_escalate'])
        best = headline(results)
        ours = best.get('Ours, best', best.get('Ours', ('Small only', 'append')))
        for row in dict.fromkeys([('Small only', 'append'), ('Large only', 'append'), ours]):
            own = chosen.loc[[row]]
            right, cost = (
                ' / '.join(map(PERCENT, 100 * own[c])) for c in ('accuracy', 'cost_share')
            )
            names = ' / '.join(own['benchmark'])
            lines.append(f'{method_label(*row)}: {right} % right at {cost} % of the cost, {names}')
    lines.append(f'written: {files}')
    same, _, difference = compared.partition('different from the committed tables: ')
    verdict = same.replace('identical to the committed tables', 'yes').replace(
        'equal to the committed tables', 'yes,'
    )
    if difference:
        verdict = f'no, differs by {difference}'
    return [
        *lines,
        f'identical to the committed tables: {verdict or "not compared: other settings or profile"}',
    ]
