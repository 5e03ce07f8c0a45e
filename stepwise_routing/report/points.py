"""The points of the figures: methods, frontiers, single seeds

Here belong the points, their files, and the choice for the main figures. Drawing belongs in
`report.figures`.
"""

from pathlib import Path

from ..util import one_of
from ..method.bounds import mixing_line, oracle_frontier, random_frontier
from ..method.results import headline
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
    r,  # `RunResults`
) -> None:
    "Write the points that evaluation.csv does not have, frontiers and single seeds, beside it."
    for stem, points in dict(frontiers=r.whole(frontiers), seeds=r.whole(seed_points)).items():
        if len(points):
            save_table(r.tables / f'{stem}{r.suffix}', points)


def read_points(
    tables,  # folder
    suffix: str = '',  # '_cents': in cents
) -> dict:  # arguments of `draw_accuracy_cost`, and `facts`: profile, billing
    "Read the points of a run's figures from its tables. If only points in cents are there: those."
    import pandas as pd

    tables = Path(tables)
    if not (tables / 'evaluation.csv').is_file():
        suffix = '_cents'
    data = {}
    for name, stem in dict(points='evaluation', frontiers='frontiers', seeds='seeds').items():
        path = tables / f'{stem}{suffix}.csv'
        # Where no policy can be trained (say, from problems that no model solves), there are no seeds.
        data[name] = None if name == 'seeds' and not path.is_file() else pd.read_csv(path)
    table = pd.read_csv(tables / ('table2.csv' if suffix else 'table1.csv'))
    facts = table.iloc[0].to_dict()
    data['facts'] = {name: facts[name] for name in ('profile', 'billing') if name in facts}
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

    there = list(points['benchmark'].unique())
    if not benchmark and len(there) == 1:
        benchmark = there[0]
    one_of('benchmark', benchmark, there)
    curve = pd.DataFrame(dict(cost_share=cost_share, accuracy=accuracy))
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
