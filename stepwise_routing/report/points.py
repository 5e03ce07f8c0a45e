"""The points of the figures: methods, frontiers, single seeds

Here belong the points, their files, and the choice for the main figures. Drawing belongs in
`report.figures` and `report.slider`.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from ..base.records import READINGS
from ..base.settings import checked
from ..base.tools import one_of
from ..method.bounds import mixing_line, oracle_frontier, random_frontier
from ..method.results import headline
from .reading import (
    CostShare,
    Flag,
    Fraction,
    Unbounded,
    WholeNumber,
    check_intervals,
    read_table,
    table_error,
)
from .writer import save_table


def frontiers(
    part,  # `BenchmarkResults`
):  # DataFrame: benchmark, curve, cost_share, accuracy
    "The curves that methods are compared with: the small-large line, chance and hindsight."
    import pandas as pd

    table = part.table
    cost = part.grid['unit'].iloc[0]
    large_cost = table.large_only()[cost].mean()
    curves = {
        'small-large line': mixing_line(table, cost),
        'random': random_frontier(table, cost=cost),
        'oracle': oracle_frontier(table, cost=cost),
    }
    frames = []
    for name, curve in curves.items():
        share = curve['cost'] / large_cost
        columns = dict(
            benchmark=table.benchmark, curve=name, cost_share=share, accuracy=curve['accuracy']
        )
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def seed_points(
    part,  # `BenchmarkResults`
):  # DataFrame: benchmark, method, on_escalate, seed, cost_share, accuracy
    "Cost and accuracy of each single policy, at its own threshold."
    cost = part.grid['unit'].iloc[0]
    groups = part.singles.groupby(['benchmark', 'method', 'on_escalate', 'seed'])
    means = groups[[cost, 'correct']].mean()
    means = means.rename(columns={cost: 'cost_share', 'correct': 'accuracy'})
    means['cost_share'] /= part.table.large_only()[cost].mean()
    return means.reset_index()


def save_points(
    r,  # `SettingResults`
) -> None:
    "Write the points that evaluation.csv does not have, frontiers and single seeds, beside it."
    for stem, points in dict(frontiers=r.whole(frontiers), seeds=r.whole(seed_points)).items():
        if len(points):
            save_table(r.tables / f'{stem}{r.suffix}', points)


CURVES = 'small-large line', 'random', 'oracle'
INTERVALS = 'accuracy_low accuracy_high cost_share_low cost_share_high calibration_cost_share'
POINT = dict(benchmark=str, cost_share=CostShare, accuracy=Fraction)
VARIANT = dict(method=str, on_escalate=Literal[READINGS])
SETTING = dict(threshold=Unbounded, chosen=Flag, n=WholeNumber)
KINDS = dict(  # file -> column that its figures need -> kind of its cells
    evaluation=POINT | VARIANT | SETTING | dict.fromkeys(INTERVALS.split(), CostShare | None),
    frontiers=POINT | dict(curve=Literal[CURVES]),
    seeds=POINT | VARIANT,
)


def _check_points(path, points) -> None:
    "ValueError for rows of the evaluation that contradict each other."
    variant = ['benchmark', *VARIANT]
    for row in points.index[points.duplicated()]:
        raise table_error(path, f'row {row + 2}: the same as an earlier row')
    chosen = points[points['chosen'] == 1]
    for row in chosen.index[chosen.duplicated(variant)]:
        raise table_error(path, f'row {row + 2}: a second chosen row of a method on a benchmark')
    if points['cost_in'].nunique() > 1:
        raise table_error(path, 'cost_in differs between rows')
    for name in ('accuracy', 'cost_share'):
        check_intervals(path, points, name)


def _check_benchmarks(path, frame, expected) -> None:
    "ValueError if a file lacks one of the benchmarks that are expected in it."
    for benchmark in sorted({*expected} - {*frame['benchmark']}):
        raise table_error(path, f'it lacks {benchmark}: is it cut off?')


def read_points(
    tables,  # folder
    suffix: str = '',  # '_api': in cents
) -> dict:  # arguments of `draw_accuracy_cost`, and `facts`: profile, billing
    """Read the points of a run's figures from its tables. If only points in cents are there: those.

    ValueError in one line for a damaged file.
    """
    tables = Path(tables)
    if not any((tables / f'{stem}.csv').is_file() for stem in KINDS):
        suffix = '_api'
    cost_in = Literal['cents'] if suffix else Literal['paper_flops', 'full_flops']
    paths = {stem: tables / f'{stem}{suffix}.csv' for stem in KINDS}
    data = {}
    for stem, kinds in KINDS.items():
        if stem == 'evaluation':
            kinds = kinds | dict(cost_in=cost_in)
        path = paths[stem]
        may_lack = stem == 'seeds' and not path.is_file()
        data[stem] = None if may_lack else read_table(path, kinds)
    points = data['evaluation']
    curves = data['frontiers']
    _check_points(paths['evaluation'], points)
    path = paths['frontiers']
    _check_benchmarks(path, curves, points['benchmark'])
    _check_benchmarks(paths['evaluation'], points, curves['benchmark'])
    if data['seeds'] is not None:
        # Where no policy can be trained (say, from problems that no model solves), there are no seeds.
        trained = points[points['method'] == 'Ours']
        _check_benchmarks(paths['seeds'], data['seeds'], trained['benchmark'])
    for benchmark, names in curves.groupby('benchmark')['curve']:
        for name in sorted({*CURVES} - {*names}):
            raise table_error(path, f'it lacks the curve {name} of {benchmark}: is it cut off?')
    # Sorting would not help: the curve of chance goes beyond the large model's cost and back.
    for name, cost in curves.groupby(['benchmark', 'curve'])['cost_share']:
        way = cost.diff().abs().sum()
        if way > 2 * np.ptp(cost) + 0.01:  # further than there and back
            raise table_error(path, f'the rows of the curve {name} are in another order')
    stem, *facts = ('table2', 'profile', 'billing') if suffix else ('table1', 'profile')
    table = read_table(tables / f'{stem}.csv', dict.fromkeys(facts, str | None))
    data['points'] = data.pop('evaluation')
    data['facts'] = table[facts].iloc[0].to_dict()
    return data


def add_curve(
    points,  # DataFrame of `read_points` or `evaluate`
    name: str,  # name of the curve
    cost_share,  # of its points, as shares of the large model's cost: .35 is 35 %
    accuracy,  # of its points, as fractions
    benchmark: str = '',  # '': the only benchmark in `points`
    on_escalate: str = 'append',
):  # DataFrame
    """Add your own curve to the points. It is drawn in the order given.

    To draw it, put the pair (name, on_escalate) into `methods`. `style` takes its colour and label.
    """
    import pandas as pd

    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'name is {name!r:.40}: it should be a word for the legend')
    costs = checked('cost_share (.35 is 35 %)', np.array(cost_share).tolist(), list[CostShare])
    accuracies = checked('accuracy (.35 is 35 %)', np.array(accuracy).tolist(), list[Fraction])
    there = list(points['benchmark'].unique())
    if not benchmark and len(there) == 1:
        benchmark = there[0]
    one_of('benchmark', benchmark, there)
    one_of('on_escalate', on_escalate, READINGS)
    if len(costs) != len(accuracies) or not costs:
        raise ValueError(
            f'curve {name!r}: {len(costs)} costs and {len(accuracies)} accuracies; '
            'give one of each for every point'
        )
    if name in set(points['method'][points['benchmark'] == benchmark]):
        raise ValueError(f'{benchmark} has a method {name!r} already: choose another name')
    curve = pd.DataFrame(dict(cost_share=costs, accuracy=accuracies))
    of_benchmark = points[points['benchmark'] == benchmark].iloc[0]
    curve['threshold'] = range(len(curve))
    same = {column: of_benchmark[column] for column in ('n', 'unit', 'cost_in')}
    names = dict(benchmark=benchmark, method=name, on_escalate=on_escalate, chosen=0)
    return pd.concat([points, curve.assign(**names, **same)], ignore_index=True)


def sweep_points(
    points,  # DataFrame of `evaluate`, of one method
):  # DataFrame
    "The rows of the sweep. The row of ours at its own threshold is left out: it is not a point of the sweep."
    sweep = points[points['chosen'] == 0]
    is_ours = points['method'].iloc[0].startswith('Ours')
    return sweep if is_ours and len(sweep) else points


DRAWN_FAMILIES = (
    'Bare threshold (probability)',
    'SpecReason',
    'RSD',
    'STEER',
    'Ours',
    'Ours, best',
)


def drawn_methods(
    points,  # DataFrame of `evaluate`
) -> list:  # of (method, on_escalate)
    """The methods of the main figures: both models, and the chosen variant of each family.

    The families are those of Table 1 and the bare threshold.
    """
    families = headline(points)
    chosen = [families[family] for family in DRAWN_FAMILIES if family in families]
    return [('Small only', 'append'), ('Large only', 'append'), *chosen]
