"""What a whole sweep gains, whether ours is really cheaper than the others, and what falls short"""

import math
from functools import cache

import numpy as np

from ..base.records import READINGS
from ..method.bounds import oracle_frontier, random_frontier
from ..method.results import METHOD_STYLE, headline, method_label, method_rank, with_intervals
from .writer import HUNDREDTHS, POINTS, interval, interval_table, label, markdown, percent


def _integral(
    x, y, end
):  # points [resample, point] by rising x, [resample]; level beyond the first and the last one
    "The integral of straight lines through the points, from the first x to `end`."
    dx = np.clip(end[:, None], x[:, :-1], x[:, 1:]) - x[:, :-1]
    with np.errstate(invalid='ignore', divide='ignore'):
        slope = np.diff(y) / np.diff(x)
    slope = np.nan_to_num(slope, posinf=0, neginf=0)
    before = np.minimum(end - x[:, 0], 0) * y[:, 0]
    behind = np.maximum(end - x[:, -1], 0) * y[:, -1]
    return (dx * (y[:, :-1] + slope * dx / 2)).sum(1) + before + behind


def _between(curve, start, end):
    return _integral(*curve, end) - _integral(*curve, start)


def _borders(table, on_escalate, cost, weights):
    "(Costs, accuracies) [resample, point] of chance and of hindsight."
    chance = random_frontier(table, on_escalate, np.linspace(0, 1, 201), cost, weights)
    best = oracle_frontier(table, on_escalate, cost, weights)
    return [(np.maximum.accumulate(f['cost'], 1), f['accuracy']) for f in (chance, best)]


def _area(table, counts, on_escalate='append', cost='paper_flops'):
    "What a router can win: areas under chance and hindsight up to `end`; cost and accuracy of both models [resample]."
    w = counts / len(table)
    at_once = table.outcome(0, on_escalate)
    small, large = (
        (w @ o[cost], w @ o['correct']) for o in (table.outcome(-1), table.large_only())
    )
    end = np.maximum(w @ at_once[cost], large[0])
    chance, best = (
        _between(border, small[0], end) for border in _borders(table, on_escalate, cost, w)
    )
    return dict(weights=w, end=end, chance=chance, best=best, small=small, large=large)


def _undominated(cost, accuracy):
    "Indices of the points that no other point beats, by rising cost."
    cost = np.asarray(cost, float)
    accuracy = np.asarray(accuracy, float)
    order = np.lexsort((-accuracy, cost))
    best = np.maximum.accumulate(np.r_[-np.inf, accuracy[order]])[:-1]
    return order[accuracy[order] > best]


def _curve(area, cal_points, test_points):
    "(Cost, accuracy) [resample, point], from (cost, accuracy) [point] on calibration, [point, problem] on test."
    kept = _undominated(*cal_points)
    start = area['small'][0][:, None]
    # contiguous: a sum over a transposed array takes another order, and so has other last bits
    cost, right = (
        area['weights'] @ np.ascontiguousarray(np.asarray(v, float)[kept].T) for v in test_points
    )
    points = np.c_[start, np.maximum(cost, start)], np.c_[area['small'][1], right]
    order = np.argsort(points[0], axis=1, kind='stable')
    return [np.take_along_axis(v, order, axis=1) for v in points]


def _least_cost(cost, accuracy, target):
    "Least cost at which the lines through the points [resample, point] reach the target [resample]; inf: nowhere."
    t = target[:, None] - 1e-9
    (x0, x1), (y0, y1) = (cost[:, :-1], cost[:, 1:]), (accuracy[:, :-1], accuracy[:, 1:])
    with np.errstate(invalid='ignore', divide='ignore'):
        cross = x0 + (t - y0) / (y1 - y0) * (x1 - x0)
    crossing = np.where((y0 < t) != (y1 < t), cross, np.inf)
    return np.minimum(np.where(accuracy >= t, cost, np.inf).min(1), crossing.min(1))


METRICS = {
    'share': 'Share of the area',
    'apgr': 'APGR',
    'cpt50': 'CPT(50)',
    'cpt80': 'CPT(80)',
    'cpt95': 'CPT(95)',
    'qnc': 'QNC',
}


def _measures(area, cost, accuracy):  # of a curve -> `METRICS` [1 + resample]
    (x0, y0), (x1, y1) = area['small'], area['large']
    gap = y1 - y0
    curve = (cost, accuracy)
    least = {f'cpt{q}': _least_cost(cost, accuracy, y0 + q / 100 * gap) / x1 for q in (50, 80, 95)}
    with np.errstate(invalid='ignore', divide='ignore'):
        share = (_between(curve, x0, area['end']) - area['chance']) / (
            area['best'] - area['chance']
        )
        apgr = (_between(curve, x0, x1) / (x1 - x0) - y0) / gap
    return dict(share=share, apgr=apgr, **least, qnc=_least_cost(cost, accuracy, y1) / x1)


def _sweeps(p):
    "(method, reading, points on calibration, points on test) of every sweep; points as of `_curve`."
    cost = p.grid['unit'].iloc[0]
    rows = p.rows[
        np.isfinite(p.rows['threshold'])
        & ~p.rows['method'].isin(('Ours (online kappa)', 'Ours (bound)'))
    ]
    grids = p.grid.set_index('threshold')
    for (m, e), own in rows.groupby(['method', 'on_escalate']):
        grid = grids[(grids['method'] == m) & (grids['on_escalate'] == e)][['cost', 'accuracy']]
        if grid.empty and m != 'Knows the steps':
            continue
        table = own.pivot(index='threshold', columns='problem', values=[cost, 'correct'])
        test = [table[k].to_numpy(float) for k in (cost, 'correct')]
        yield (
            m,
            e,
            [v.mean(1) for v in test] if grid.empty else grid.loc[table.index].to_numpy().T,
            test,
        )


@cache
def metrics(
    p,
):  # DataFrame, one row per method: benchmark, method, on_escalate, n, points, then `METRICS`
    "What the sweeps on a benchmark (`BenchmarkResults`) win."
    import pandas as pd

    areas = {e: _area(p.table, p.means.counts, e, p.grid['unit'].iloc[0]) for e in READINGS}

    def row(m, e, *points):
        curve = _curve(areas[e], *points)
        return dict(
            benchmark=p.table.benchmark,
            method=m,
            on_escalate=e,
            n=len(p.table),
            points=curve[0].shape[1] - 1,
            **with_intervals(_measures(areas[e], *curve)),
        )

    sweeps = sorted(_sweeps(p), key=lambda sweep: (method_rank(sweep[0]), sweep[1]))
    return pd.DataFrame([row(*sweep) for sweep in sweeps])


_METRIC_NOTES = """
All in % [paired bootstrap 95% interval]. *Share of the area* between chance and hindsight (the random and the oracle
frontier of the same reading of "escalate"): 0 is chance, 100 is hindsight; compare within a reading. *APGR*: how much
of the gap between the two models is closed, as a mean over all costs between theirs. *CPT(q)*: the least share of the
large model's cost at which q % of the gap is closed; *QNC*: at which the large model's accuracy is reached. A curve is
the thresholds that nothing beats on the calibration split, and straight lines between them, from the small model on;
*not reached*: it ends before. Above 100: dearer than the large model alone. (1): a single point, which says little.
"""


def metrics_markdown(rows) -> str:
    "The rows of `metrics` of all benchmarks."

    def name(row):
        return label(row) + ' (1)' * (row['points'] == 1)

    cells = {
        head: lambda row, m=m: percent(m)(row).replace('∞', 'not reached')
        for m, head in METRICS.items()
    }
    return (
        markdown(interval_table(rows, dict(Benchmark='benchmark', Method=name), cells))
        + _METRIC_NOTES
    )


def _p_value(difference):  # [1 + resample], 0 is no difference
    spread = difference[1:].std()
    return math.erfc(abs(difference[0]) / spread / 2**0.5) if spread else float(difference[0] == 0)


def holm(p) -> np.ndarray:  # p-values, as they come
    "Holm's corrected p-values: as many tests as there are all hold at once."
    p = np.asarray(p, float)
    order = np.argsort(p, kind='stable')
    out = np.empty_like(p)
    out[order] = np.minimum(np.maximum.accumulate(np.arange(len(p), 0, -1) * p[order]), 1)
    return out


def _sweep(means, method, on_escalate):
    "Columns of a method, by rising threshold. ValueError where it has no rows."
    keys = means.keys[(means.keys['method'] == method) & (means.keys['on_escalate'] == on_escalate)]
    if not len(keys):
        raise ValueError(f'no rows of {method_label(method, on_escalate)}')
    return keys.sort_values('threshold', kind='stable').index.to_numpy()


def _road(means, method, on_escalate):
    "The same by rising cost, from the small model on to the large one."
    own = _sweep(means, method, on_escalate)
    cost = means.columns['cost'][0]
    small, large = (_sweep(means, m, 'append') for m in ('Small only', 'Large only'))
    return np.r_[small, own[np.argsort(cost[own], kind='stable')], large]


def compare(means, ours, other) -> dict:  # (method, on_escalate) each
    "Paired: both at their chosen settings; `equal_ratio` of costs where the other's sweep is as accurate as ours."
    spent = means.columns['cost']
    right = means.columns['correct']
    keys = means.keys
    at = [next(i for i in _sweep(means, *row) if keys['chosen'][i] == 1) for row in (ours, other)]
    (cost, others), (accuracy, theirs) = ([v[:, i] for i in at] for v in (spent, right))
    road = _road(means, *other)
    price = _least_cost(spent[:, road], right[:, road], np.minimum(accuracy, right[:, road].max(1)))
    with np.errstate(invalid='ignore', divide='ignore'):  # nothing for nothing is a tie
        ratio, equal = (np.where(cost == x, 1.0, cost / x) for x in (others, price))
    names = dict(
        benchmark=keys['benchmark'][0],
        ours=ours[0],
        on_escalate=ours[1],
        other=other[0],
        other_on_escalate=other[1],
        n=means.counts.shape[1],
    )
    draws = dict(cost_ratio=ratio, accuracy_difference=accuracy - theirs, equal_ratio=equal)
    return (
        names
        | with_intervals(draws)
        | dict(p_cost=_p_value(cost - others), p_accuracy=_p_value(accuracy - theirs))
    )


@cache
def comparisons(
    r,
):  # DataFrame, a row per pair and benchmark; `cheaper`, `worse`: significantly (Holm)
    "Our rows of `headline` against those of the other families."
    import pandas as pd

    rows = headline(r.results)
    ours = [rows[f] for f in rows if f.startswith('Ours')]
    pairs = [(a, b) for a in ours for b in rows.values() if b not in ours]
    there = {p: set(zip(p.results['method'], p.results['on_escalate'])) for p in r.parts.values()}
    out = pd.DataFrame(
        [compare(p.means, *pair) for p in there for pair in pairs if there[p].issuperset(pair)]
    )
    if out.empty:
        return out
    tests = ['p_cost', 'p_accuracy']
    out[tests] = holm(out[tests].to_numpy().ravel()).reshape(-1, 2)
    return out.assign(
        cheaper=(out['cost_ratio'] < 1) & (out['p_cost'] < 0.05),
        worse=(out['accuracy_difference'] < 0) & (out['p_accuracy'] < 0.05),
    )


_NOTES = """
Cost of ours / cost of the other, and accuracy of ours - accuracy of the other, in points, each at the setting chosen on
calibration [paired bootstrap 95% intervals]; p: two-sided, Holm-corrected over all {n} tests of this table. **Bold**, a
win: ours is significantly cheaper and not significantly less accurate (p < .05). *At equal accuracy*: the other may
choose its spot on the test problems, anywhere on the straight lines along its thresholds and to the two single models
(not corrected).

"""


def comparison_markdown(pairs) -> str:
    "The rows of `comparisons`, and how often ours wins."

    def other(row):
        return method_label(row['other'], row['other_on_escalate'])

    def ratio(row):
        text = interval('cost_ratio', HUNDREDTHS)(row)
        return f'**{text}**' if row['cheaper'] and not row['worse'] else text

    rows = dict(
        Benchmark='benchmark',
        Ours=lambda row: method_label(row['ours'], row['on_escalate']),
        Against=other,
    )
    cells = {
        'Cost ratio': ratio,
        'p, cost': lambda row: f'{row["p_cost"]:.3f}',
        'Accuracy, points': interval('accuracy_difference', POINTS, 100),
        'p, accuracy': lambda row: f'{row["p_accuracy"]:.3f}',
        'Cost ratio at equal accuracy': interval('equal_ratio', HUNDREDTHS),
    }
    wins = pairs.assign(against=pairs.apply(other, axis=1), wins=pairs['cheaper'] & ~pairs['worse'])
    counts = wins.groupby('against', sort=False)[['wins', 'worse']].agg(['sum', 'size'])
    text = ''.join(
        f'- against {name}: of {n} rows ours wins {won}, and is significantly less accurate in {worse}.\n'
        for name, won, n, worse, _ in counts.itertuples()
    )
    return markdown(interval_table(pairs, rows, cells)) + _NOTES.format(n=2 * len(pairs)) + text


def _shortfalls(p):
    "What the numbers of a benchmark do not say."

    def names(rows):
        return '; '.join(dict.fromkeys(map(method_label, rows['method'], rows['on_escalate'])))

    chosen = p.results[p.results['chosen'] == 1]
    alpha = p.grid['alpha'].iloc[0]
    n = chosen['n'].iloc[0]
    judged = chosen.dropna(subset='calibration_accuracy')
    missing = [m for m in METHOD_STYLE if m not in set(chosen['method']) and 'per step' not in m]
    large = judged[np.isinf(judged['threshold'])]
    bound = judged['method'] == 'Ours (bound)'
    far = judged[judged['accuracy_vs_large_high'] < -alpha - 1e-12]
    low = judged[bound & (judged['coverage_high'] < 1 - alpha - 1e-12)]
    sentences = {
        f'{n} test problems, fewer than 300; the intervals are wide': n < 300,
        'the large model was not drawn again, so misses are counted against the draw that methods share': not p.table.large_redraws_right.shape[
            1
        ],
        f'no rows for {"; ".join(missing)}: not run in this setting, or switched off': missing,
        f'on calibration no setting of {names(large)} was accurate enough and cheaper than the large model alone, '
        'which stands in': len(large),
        f'{names(far)}: clearly more than {100 * alpha:g} points below the large model on test': len(
            far
        ),
        f'the coverage of {names(low)} on test lies clearly below 1 - alpha': len(low),
    }
    return [sentence for sentence, holds in sentences.items() if holds]


def shortfalls(r) -> list:  # sentences
    "What a reader of `SettingResults` must know that the numbers do not say."
    places = {}
    for b, p in r.parts.items():
        for sentence in _shortfalls(p):
            places.setdefault(sentence, []).append(b)
    out = [f'{", ".join(names)}: {sentence}.' for sentence, names in places.items()]
    if lost := r.given_up:
        out.append(
            f'{", ".join(r.parts)}: grading gave up on answers, which count as wrong: {lost}.'
        )
    if r.name == 'api':
        return [f'API setting, {sentence}' for sentence in out]
    bare = [b for b, p in r.parts.items() if p.singles['method'].isin(list(METHOD_STYLE)).all()]
    if not bare or not r.ablations:
        return out
    return [*out, f'No ablations of the policy on {", ".join(bare)}.']


def listed(sentences) -> str:
    "Sentences as folded Markdown."
    items = ''.join(f'- {sentence}\n' for sentence in sentences)
    return f'<details><summary>What falls short in this run</summary>\n\n{items}\n</details>\n'
