"""The points of the figures: methods, frontiers, single seeds

Here belong the points, their files, and the choice for the main figures. Drawing belongs in
`report.figures` and `report.slider`.
"""

from pathlib import Path

from ..base.tools import one_of
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
    r,  # `SettingResults`
) -> None:
    "Write the points that evaluation.csv does not have, frontiers and single seeds, beside it."
    for stem, points in dict(frontiers=r.whole(frontiers), seeds=r.whole(seed_points)).items():
        if len(points):
            save_table(r.tables / f'{stem}{r.suffix}', points)


def read_drawn(
    path,  # CSV file of a run's tables
):  # DataFrame
    "What a figure draws. ValueError in one line if a number is none, or if the file is cut off."
    import pandas as pd

    frame = pd.read_csv(path)
    if not path.read_text('utf-8').endswith('\n'):
        raise ValueError(f'{path} is cut off: restore the file, or run the stages again')
    for column in ('cost_share', 'accuracy'):
        if column not in frame:
            raise ValueError(f'{path} has no column {column!r}: restore the file')
        wrong = pd.to_numeric(frame[column], errors='coerce').isna()
        if wrong.any():
            row = wrong.idxmax()
            raise ValueError(
                f'{path}, row {row + 2}: {column} is {frame[column][row]!r:.40}, not a number'
            )
    return frame


def read_points(
    tables,  # folder
    suffix: str = '',  # '_api': in cents
) -> dict:  # arguments of `draw_accuracy_cost`, and `facts`: profile, billing
    """Read the points of a run's figures from its tables. If only points in cents are there: those.

    ValueError in one line for a damaged file.
    """
    import pandas as pd

    tables = Path(tables)
    if not (tables / 'evaluation.csv').is_file():
        suffix = '_api'
    data = {}
    for name, stem in dict(points='evaluation', frontiers='frontiers', seeds='seeds').items():
        path = tables / f'{stem}{suffix}.csv'
        data[name] = read_drawn(path) if path.is_file() else None
    if data['frontiers'] is not None:
        for benchmark in data['points']['benchmark'].unique():
            if benchmark not in set(data['frontiers']['benchmark']):
                raise ValueError(
                    f'{tables}/frontiers{suffix}.csv lacks {benchmark}: is it cut off?'
                )
    first = pd.read_csv(tables / ('table2.csv' if suffix else 'table1.csv')).iloc[0]
    data['facts'] = {name: first[name] for name in ('profile', 'billing') if name in first}
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
    if len(cost_share) != len(accuracy) or not len(accuracy):
        raise ValueError(
            f'curve {name!r}: {len(cost_share)} costs and {len(accuracy)} accuracies; '
            'give one of each for every point'
        )
    if name in set(points['method'][points['benchmark'] == benchmark]):
        raise ValueError(f'{benchmark} has a method {name!r} already: choose another name')
    curve = pd.DataFrame(dict(cost_share=cost_share, accuracy=accuracy)).astype(float)
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
