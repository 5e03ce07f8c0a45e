"""The gain of a whole sweep of thresholds, and tests whether ours is cheaper than the others

Here belong curves of accuracy over cost, areas under them, and paired comparisons. Single settings
belong in `report.tables`, frontiers in `method.bounds`, the bootstrap in `base.statistics`.
Arrays whose first axis is [1 + resample] hold the sample itself in row 0.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ..base.records import READINGS
from ..base.statistics import resamples
from ..method.bounds import oracle_frontier, random_frontier
from ..method.outcomes import take_rows, undominated
from ..method.results import headline, method_label, method_rank, with_intervals
from ..method.uncertainty import CHOICES
from .writer import (
    HUNDREDTHS,
    POINTS,
    in_points,
    interval,
    interval_table,
    label,
    markdown,
    percent,
)

# ---- curves


@dataclass(frozen=True)
class Curve:
    "Straight lines through points of rising cost, in every resample. The ends are continued level."

    cost: np.ndarray  # [1 + resample, point]
    accuracy: np.ndarray  # [1 + resample, point]

    def area(self, start, end):  # start and end: costs [1 + resample]
        "The area under the curve between two costs: [1 + resample]."
        return self._area_from_first_point(end) - self._area_from_first_point(start)

    def _area_from_first_point(self, end):
        x, y = self.cost, self.accuracy
        width = np.clip(end[:, None], x[:, :-1], x[:, 1:]) - x[:, :-1]
        with np.errstate(invalid='ignore', divide='ignore'):
            slope = np.diff(y) / np.diff(x)
        slope = np.nan_to_num(slope, posinf=0, neginf=0)  # a step upwards has no width
        under_lines = (width * (y[:, :-1] + slope * width / 2)).sum(1)
        before_first = np.minimum(end - x[:, 0], 0) * y[:, 0]
        after_last = np.maximum(end - x[:, -1], 0) * y[:, -1]
        return under_lines + before_first + after_last

    def least_cost(self, target):  # target: accuracies [1 + resample]
        "The least cost at which the curve reaches an accuracy: [1 + resample]. Infinite if it never does."
        x, y = self.cost, self.accuracy
        needed = target[:, None] - 1e-9
        at_points = np.where(y >= needed, x, np.inf)
        with np.errstate(invalid='ignore', divide='ignore'):
            share_of_line = (needed - y[:, :-1]) / (y[:, 1:] - y[:, :-1])
            crossing = x[:, :-1] + share_of_line * (x[:, 1:] - x[:, :-1])
        is_crossed = (y[:, :-1] < needed) != (y[:, 1:] < needed)
        between_points = np.where(is_crossed, crossing, np.inf)
        return np.minimum(at_points.min(1), between_points.min(1))


@dataclass(frozen=True)
class Winnable:
    "The most that a router can gain on a benchmark. All but `weights` are arrays [1 + resample]."

    weights: np.ndarray  # [1 + resample, problem]: the weight of a problem; a row sums to 1
    small_cost: np.ndarray
    small_accuracy: np.ndarray
    large_cost: np.ndarray
    large_accuracy: np.ndarray
    end: np.ndarray  # the cost up to which areas count
    chance: np.ndarray  # area under the random frontier
    hindsight: np.ndarray  # area under the oracle frontier


def _frontier_curve(frontier):  # of `method.bounds`
    return Curve(np.maximum.accumulate(frontier['cost'], 1), frontier['accuracy'])


def winnable(
    table,  # `OutcomeTable`
    counts,  # [1 + resample, problem], of `resamples`
    on_escalate='append',  # or "regenerate"
    cost='paper_flops',  # one of `UNITS`
) -> Winnable:
    "The area between chance and hindsight, and both models alone."
    weights = counts / len(table)
    small = table.outcome(-1)
    large = table.large_only()
    at_once = table.outcome(0, on_escalate)
    small_cost = weights @ small[cost]
    large_cost = weights @ large[cost]
    end = np.maximum(weights @ at_once[cost], large_cost)
    chance = random_frontier(table, on_escalate, np.linspace(0, 1, 201), cost, weights)
    hindsight = oracle_frontier(table, on_escalate, cost, weights)
    return Winnable(
        weights=weights,
        small_cost=small_cost,
        small_accuracy=weights @ small['correct'],
        large_cost=large_cost,
        large_accuracy=weights @ large['correct'],
        end=end,
        chance=_frontier_curve(chance).area(small_cost, end),
        hindsight=_frontier_curve(hindsight).area(small_cost, end),
    )


@dataclass(frozen=True)
class Sweep:
    "Costs and verdicts of a method at all its thresholds."

    method: str
    on_escalate: str
    calibration_cost: np.ndarray  # [threshold]
    calibration_accuracy: np.ndarray  # [threshold]
    cost: np.ndarray  # [threshold, problem], on test problems
    correct: np.ndarray  # [threshold, problem], on test problems

    def curve(
        self,
        area: Winnable,  # of the same reading
    ) -> Curve:
        "The curve from the small model through the thresholds that no other beats on calibration."
        best = undominated(self.calibration_cost, -self.calibration_accuracy)

        def mean(values):
            # contiguous: a sum over a transposed array has another order, so other last bits
            return area.weights @ np.ascontiguousarray(values[best].T)

        start = area.small_cost[:, None]
        cost = np.c_[start, np.maximum(mean(self.cost), start)]
        accuracy = np.c_[area.small_accuracy, mean(self.correct)]
        order = np.argsort(cost, axis=1, kind='stable')
        return Curve(
            np.take_along_axis(cost, order, axis=1), np.take_along_axis(accuracy, order, axis=1)
        )


# ---- metrics of a sweep

METRICS = {
    'share': 'Share of the area',
    'apgr': 'APGR',
    'cpt50': 'CPT(50)',
    'cpt80': 'CPT(80)',
    'cpt95': 'CPT(95)',
    'qnc': 'QNC',
}


def measures(
    area: Winnable,
    curve: Curve,
) -> dict:  # key of `METRICS` -> [1 + resample]
    "The metrics of one curve."
    gap = area.large_accuracy - area.small_accuracy
    won = curve.area(area.small_cost, area.end)
    up_to_large = curve.area(area.small_cost, area.large_cost)
    with np.errstate(invalid='ignore', divide='ignore'):
        share = (won - area.chance) / (area.hindsight - area.chance)
        mean_accuracy = up_to_large / (area.large_cost - area.small_cost)
        apgr = (mean_accuracy - area.small_accuracy) / gap
    reached = dict(share=share, apgr=apgr)
    for percentage in (50, 80, 95):
        target = area.small_accuracy + percentage / 100 * gap
        reached[f'cpt{percentage}'] = curve.least_cost(target) / area.large_cost
    reached['qnc'] = curve.least_cost(area.large_accuracy) / area.large_cost
    return reached


def _sweeps(part):  # yields a `Sweep` of every method of `BenchmarkResults` that has one
    unit = part.grid['unit'].iloc[0]
    is_sweep = np.isfinite(part.rows['threshold'])
    is_point = part.rows['method'].isin(('Ours (online kappa)', 'Ours (bound)'))
    groups = part.rows[is_sweep & ~is_point].groupby(['method', 'on_escalate'])
    for (method, on_escalate), rows in groups:
        of_method = part.grid['method'] == method
        of_reading = part.grid['on_escalate'] == on_escalate
        grid = part.grid[of_method & of_reading].set_index('threshold')
        if grid.empty and method != 'Knows the steps':
            continue
        table = rows.pivot(index='threshold', columns='problem', values=[unit, 'correct'])
        cost = table[unit].to_numpy(float)
        correct = table['correct'].to_numpy(float)
        if grid.empty:  # nothing was chosen on calibration
            calibration = cost.mean(1), correct.mean(1)
        else:
            calibration = grid.loc[table.index, ['cost', 'accuracy']].to_numpy(float).T
        yield Sweep(method, on_escalate, *calibration, cost, correct)


@cache
def metrics(
    part,  # `BenchmarkResults`
):  # DataFrame: benchmark, method, on_escalate, n, points, then `METRICS` with _low and _high
    "The metrics of all sweeps on a benchmark, a row per sweep."
    import pandas as pd

    unit = part.grid['unit'].iloc[0]
    areas = {
        on_escalate: winnable(part.table, part.means.counts, on_escalate, unit)
        for on_escalate in READINGS
    }
    rows = []
    for sweep in sorted(_sweeps(part), key=lambda s: (method_rank(s.method), s.on_escalate)):
        area = areas[sweep.on_escalate]
        curve = sweep.curve(area)
        names = dict(
            benchmark=part.table.benchmark,
            method=sweep.method,
            on_escalate=sweep.on_escalate,
            n=len(part.table),
            points=curve.cost.shape[1] - 1,
        )
        rows.append(names | with_intervals(measures(area, curve)))
    return pd.DataFrame(rows)


METRIC_NOTES = """
All numbers are in %. In brackets: 95 % intervals of the paired bootstrap.

- *Share of the area*: where a curve lies between chance (0) and hindsight (100). Chance hands over at random, hindsight
  knows the answers. Each reading (append or regenerate) has its own chance and hindsight, so compare rows of one
  reading.
- *APGR*: how much of the gap in accuracy between the two models is closed, as a mean over all costs between theirs.
- *CPT(q)*: the smallest cost, in % of the large model's, at which q % of the gap is closed.
- *QNC*: the smallest cost at which the large model's accuracy is reached. A cost above 100 is dearer than the large
  model alone.
- *Not reached*: the curve ends before.

A curve begins at the small model alone. Straight lines join the thresholds that no other one beats on the calibration
problems. (1) marks a method with a single point, which says little. The table has one row for each family of methods;
the CSV file has all rows.
"""


def _sweep_name(row):
    return f'{label(row)} (1)' if row['points'] == 1 else label(row)


def _metric_cell(metric):
    return lambda row: percent(metric)(row).replace('∞', 'not reached')


def metrics_markdown(
    rows,  # of `metrics`, of all benchmarks
) -> str:
    "The metrics as a Markdown table with notes."
    cells = {heading: _metric_cell(metric) for metric, heading in METRICS.items()}
    names = dict(Benchmark='benchmark', Method=_sweep_name)
    return markdown(interval_table(rows, names, cells)) + METRIC_NOTES


# ---- by level


def _of_level(part, level):  # -> `BenchmarkResults`, without results
    "The part of a benchmark with the problems of one level."
    ids = {problem for problem, its_level in part.levels.items() if its_level == level}
    is_inside = np.array([problem in ids for problem in part.table.problem_id])
    table = take_rows(part.table, is_inside)
    rows = part.rows[part.rows['problem'].isin(ids)]
    counts = resamples(len(table), len(part.means.counts) - 1)
    return replace(part, table=table, rows=rows, means=replace(part.means, counts=counts))


def shares_by_level(
    part,  # `BenchmarkResults`
):  # DataFrame of `metrics` with the column `level`; no rows if problems have no levels
    "The metrics of all sweeps on the problems of each level."
    import pandas as pd

    levels = sorted(set(part.levels.values()))
    frames = [metrics(_of_level(part, level)).assign(level=level) for level in levels]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


LEVEL_NOTES = """
A number is the share of the area between chance (0) and hindsight (100) on the test problems of one level, in %. The
level has n test problems. In brackets: 95 % intervals of the paired bootstrap. The table has one row for each family of
methods; the CSV file has all rows. Level 6 of micro-omni is too hard for both models; chapter 05 tells when it was
added.
"""


def levels_markdown(
    rows,  # of `shares_by_level`
) -> str:
    "Shares of the area by level, as a Markdown table with notes."
    rows = rows.assign(
        column=[f'level {level:g} (n = {n})' for level, n in zip(rows['level'], rows['n'])]
    )
    names = dict(Benchmark='benchmark', Method=label)
    table = interval_table(rows, names, {'Share': _metric_cell('share')}, 'column')
    return markdown(table) + LEVEL_NOTES


# ---- ours against the others

ROUNDING = 1e-9  # of sums of shares


def p_value(
    difference,  # [1 + resample]; 0 means no difference
) -> float:
    "Two-sided p-value from a normal distribution, whose spread is that of the resamples."
    spread = difference[1:].std()
    if spread == 0:
        return float(difference[0] == 0)
    return math.erfc(abs(difference[0]) / spread / 2**0.5)


def holm(
    p_values,  # in any order
) -> np.ndarray:
    "Holm's corrected p-values: the chance of any false finding among all tests stays below the level."
    p = np.asarray(p_values, float)
    order = np.argsort(p, kind='stable')
    tests_left = np.arange(len(p), 0, -1)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(tests_left * p[order]), 1)
    return corrected


def _columns_of(means, method, on_escalate):
    "The columns of a method in `Means`, by rising threshold. ValueError if it has no rows."
    keys = means.keys[(means.keys['method'] == method) & (means.keys['on_escalate'] == on_escalate)]
    if keys.empty:
        raise ValueError(f'no rows of {method_label(method, on_escalate)}')
    return keys.sort_values('threshold', kind='stable').index.to_numpy()


def _chosen_column(choice, row):  # `Means` of `at_point`; (method, on_escalate)
    return _columns_of(choice, *row)[0]


def _whole_curve(means, row):
    "The curve of a method on test problems, from the small model to the large model."
    cost = means.columns['cost']
    sweep = _columns_of(means, *row)
    by_cost = sweep[np.argsort(cost[0][sweep], kind='stable')]
    small = _columns_of(means, 'Small only', 'append')
    large = _columns_of(means, 'Large only', 'append')
    columns = np.r_[small, by_cost, large]
    return Curve(cost[:, columns], means.columns['correct'][:, columns])


def _cost_ratio(cost, other_cost):
    with np.errstate(invalid='ignore', divide='ignore'):  # nothing for nothing is a tie
        return np.where(cost == other_cost, 1.0, cost / other_cost)


def compare(
    means,  # `Means` of a benchmark, all settings
    choice,  # `Means` of `at_point`: all methods at the settings that are compared
    ours: tuple,  # (method, on_escalate)
    other: tuple,  # (method, on_escalate)
) -> dict:
    """Compare ours with another method on the same problems, both at their chosen settings.

    `equal_ratio` is the ratio of costs if the other method may choose any point of its sweep that is as
    accurate as ours. ValueError if one of the two has no rows.
    """
    our_column = _chosen_column(choice, ours)
    other_column = _chosen_column(choice, other)
    cost = choice.columns['cost'][:, our_column]
    other_cost = choice.columns['cost'][:, other_column]
    accuracy = choice.columns['correct'][:, our_column]
    difference = accuracy - choice.columns['correct'][:, other_column]
    curve = _whole_curve(means, other)
    reachable = np.minimum(accuracy, curve.accuracy.max(1))
    threshold = choice.keys['threshold']
    names = dict(
        benchmark=means.keys['benchmark'][0],
        ours=ours[0],
        on_escalate=ours[1],
        other=other[0],
        other_on_escalate=other[1],
        ours_alone=bool(np.isinf(threshold[our_column])),
        large_alone=bool(np.isinf(threshold[other_column])),
        n=means.counts.shape[1],
    )
    intervals = with_intervals(
        dict(
            cost_ratio=_cost_ratio(cost, other_cost),
            accuracy_difference=difference,
            equal_ratio=_cost_ratio(cost, curve.least_cost(reachable)),
        )
    )
    return names | intervals | dict(p_cost=p_value(cost - other_cost))


def _tests_of(pairs) -> np.ndarray:  # int [pair]
    "The number of each pair's test. If several methods are the large model alone, they share one test."
    numbers = {}
    tests = []
    for pair in pairs.to_dict('records'):
        other = 'Large only' if pair['large_alone'] else (pair['other'], pair['other_on_escalate'])
        test = pair['benchmark'], pair['ours'], pair['on_escalate'], other
        tests.append(numbers.setdefault(test, len(numbers)))
    return np.array(tests)


def judged(
    pairs,  # DataFrame, a row of `compare` each
    alpha: float,  # accuracy that may be lost, as a fraction
):  # DataFrame, with the columns below
    """Add the verdicts.

    `cheaper`, `dearer`: ours is so, significantly, by Holm's test over the costs. `keeps`: the whole interval of the
    accuracy difference is above -alpha. `win`: cheaper and keeps. `counted`: False if an earlier row has this test.
    """
    test = _tests_of(pairs)
    counted = ~pairs.assign(test=test).duplicated('test')
    p_cost = holm(pairs['p_cost'][counted])[test]
    is_sure = p_cost < 0.05
    cheaper = is_sure & (pairs['cost_ratio'] < 1)
    keeps = pairs['accuracy_difference_low'] >= -alpha - ROUNDING
    return pairs.assign(
        counted=counted,
        p_cost=p_cost,
        cheaper=cheaper,
        dearer=is_sure & (pairs['cost_ratio'] > 1),
        keeps=keeps,
        win=cheaper & keeps,
        alpha=alpha,
    )


def _compared(r, target):  # DataFrame of `judged`, a row per pair and benchmark
    "Compare our rows of `headline` with the other families, at the settings of one target."
    import pandas as pd

    families = headline(r.results)
    ours = [row for family, row in families.items() if family.startswith('Ours')]
    others = [row for row in families.values() if row not in ours]
    rows = []
    for part in r.parts.values():
        choice = part.at_points[target]
        has_rows = set(zip(choice.keys['method'], choice.keys['on_escalate']))
        for own in ours:
            for other in others:
                if {own, other} <= has_rows:
                    rows.append(compare(part.means, choice, own, other))
    # where both are the large model alone, there is nothing to compare
    rows = [row for row in rows if not (row['ours_alone'] and row['large_alone'])]
    pairs = pd.DataFrame(rows)
    return pairs if pairs.empty else judged(pairs, r.alpha).assign(target=target)


@cache
def comparisons(
    r,  # `SettingResults`
):  # DataFrame of `judged`, a row per target, pair and benchmark
    "Compare ours with the others: at the certain settings, and at the cheapest settings on calibration."
    import pandas as pd

    tables = [_compared(r, target) for target in CHOICES]
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


COMPARISON_HEADINGS = {
    'certain': '**At the certain settings**',
    'accuracy': '**At the settings that are cheapest on calibration**',
}
COMPARISON_NOTES = """
- *Cost ratio*: the cost of ours, divided by the cost of the other method. Below 1, ours is cheaper.
- *p, cost*: how easily chance alone makes such a difference in cost (two-sided; Holm's correction for all cost tests of
  the table).
- *Accuracy*: that of ours minus that of the other, in points.
- **Bold** marks a win: ours is significantly cheaper (p < .05), and its accuracy is at most {points} below the other's,
  by the whole interval.
- *Large alone*: no setting of these methods was both accurate enough and cheaper than the large model, so the large
  model stands in for them. Ours against it is counted once. It is not counted where ours is the large model alone, too.
- *At equal accuracy*: the other method may choose its setting on the test problems, so that it is as accurate as ours.
  It may mix two neighbouring thresholds, or a threshold and a single model. These ratios are not corrected.

All is measured on test problems. In brackets: 95 % intervals. Each resample draws test problems, calibration problems
and training seeds again, and makes the choice again.

"""


def _our_name(pair):
    name = method_label(pair['ours'], pair['on_escalate'])
    return f'{name}: large alone' if pair['ours_alone'] else name


def _other_name(pair):
    return method_label(pair['other'], pair['other_on_escalate'])


def _against(pairs):
    "A function: pair -> name of the other method. For large alone: the methods it stands in for."

    def name(pair):
        if not pair['large_alone']:
            return _other_name(pair)
        same = pairs['large_alone'] & (pairs['benchmark'] == pair['benchmark'])
        same &= (pairs['ours'] == pair['ours']) & (pairs['on_escalate'] == pair['on_escalate'])
        return f'Large alone ({"; ".join(pairs[same].apply(_other_name, axis=1))})'

    return name


def _ratio_cell(pair):
    ratio = interval('cost_ratio', HUNDREDTHS)(pair)
    return f'**{ratio}**' if pair['win'] else ratio


def _p_cell(pair):
    return f'{pair["p_cost"]:.3f}'


def _count_line(name, group):
    return (
        f'- against {name}: {len(group)} comparisons; ours wins {group["win"].sum()}, is cheaper in '
        f'{group["cheaper"].sum()}, and keeps the accuracy in {group["keeps"].sum()}.\n'
    )


def _comparison_part(pairs):  # of one target
    names = dict(Benchmark='benchmark', Ours=_our_name, Against=_against(pairs))
    cells = {
        'Cost ratio': _ratio_cell,
        'p, cost': _p_cell,
        'Accuracy, points': interval('accuracy_difference', POINTS, 100),
        'Cost ratio at equal accuracy': interval('equal_ratio', HUNDREDTHS),
    }
    counted = pairs[pairs['counted']]
    others = counted.apply(_other_name, axis=1).where(
        ~counted['large_alone'], 'the large model alone'
    )
    lines = [_count_line(name, group) for name, group in counted.groupby(others, sort=False)]
    heading = f'{COMPARISON_HEADINGS[pairs["target"].iloc[0]]}, {len(counted)} cost tests'
    table = markdown(interval_table(counted, names, cells))
    return f'{heading}\n\n{table}\n{"".join(lines)}'


def comparison_markdown(
    pairs,  # of `comparisons`
) -> str:
    "The comparisons as Markdown tables with notes, and how often ours wins."
    parts = [_comparison_part(part) for _, part in pairs.groupby('target', sort=False)]
    notes = COMPARISON_NOTES.format(points=in_points(pairs['alpha'].iloc[0]))
    return '\n'.join(parts) + notes
