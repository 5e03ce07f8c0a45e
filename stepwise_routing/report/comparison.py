"""Is ours cheaper than the others, on the same problems?

Here belong paired comparisons of methods at their chosen settings. Single settings belong in `report.tables`.
Arrays whose first axis is [1 + resample] hold the sample itself in row 0.
"""

import numpy as np

from ..method.results import headline, method_label, with_intervals
from ..method.uncertainty import CHOICES
from .writer import (
    HUNDREDTHS,
    POINTS,
    in_points,
    interval,
    interval_table,
    markdown,
)

ROUNDING = 1e-9  # of sums of shares


def _columns_of(means, method, on_escalate):
    "The columns of a method in `Means`, by rising threshold. ValueError if it has no rows."
    keys = means.keys[(means.keys['method'] == method) & (means.keys['on_escalate'] == on_escalate)]
    if keys.empty:
        raise ValueError(f'no rows of {method_label(method, on_escalate)}')
    return keys.sort_values('threshold', kind='stable').index.to_numpy()


def _chosen_column(choice, row):  # `Means` of `at_point`; (method, on_escalate)
    return _columns_of(choice, *row)[0]


def _cost_ratio(cost, other_cost):
    with np.errstate(invalid='ignore', divide='ignore'):  # nothing for nothing is a tie
        return np.where(cost == other_cost, 1.0, cost / other_cost)


def compare(
    choice,  # `Means` of `at_point`: all methods at the settings that are compared
    ours: tuple,  # (method, on_escalate)
    other: tuple,  # (method, on_escalate)
) -> dict:
    "Compare ours with another method on the same problems, both at their chosen settings."
    our_column = _chosen_column(choice, ours)
    other_column = _chosen_column(choice, other)
    cost = choice.columns['cost'][:, our_column]
    other_cost = choice.columns['cost'][:, other_column]
    accuracy = choice.columns['correct'][:, our_column]
    difference = accuracy - choice.columns['correct'][:, other_column]
    threshold = choice.keys['threshold']
    names = dict(
        benchmark=choice.keys['benchmark'][0],
        ours=ours[0],
        on_escalate=ours[1],
        other=other[0],
        other_on_escalate=other[1],
        ours_alone=bool(np.isinf(threshold[our_column])),
        large_alone=bool(np.isinf(threshold[other_column])),
        n=choice.counts.shape[1],
    )
    intervals = with_intervals(
        dict(
            cost_ratio=_cost_ratio(cost, other_cost),
            accuracy_difference=difference,
        )
    )
    return names | intervals


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

    `cheaper`, `dearer`: the whole interval of the cost ratio is below or above 1. `keeps`: the whole interval of the
    accuracy difference is above -alpha. `win`: cheaper and keeps. `counted`: False if an earlier row compares the same.
    """
    test = _tests_of(pairs)
    cheaper = pairs['cost_ratio_high'] < 1
    keeps = pairs['accuracy_difference_low'] >= -alpha - ROUNDING
    return pairs.assign(
        counted=~pairs.assign(test=test).duplicated('test'),
        cheaper=cheaper,
        dearer=pairs['cost_ratio_low'] > 1,
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
                    rows.append(compare(choice, own, other))
    # where both are the large model alone, there is nothing to compare
    rows = [row for row in rows if not (row['ours_alone'] and row['large_alone'])]
    pairs = pd.DataFrame(rows)
    return pairs if pairs.empty else judged(pairs, r.alpha).assign(target=target)


def comparisons(
    r,  # `RunResults`
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
- *Accuracy*: that of ours minus that of the other, in points.
- **Bold** marks a win: ours is cheaper, and its accuracy is at most {points} below the other's, both by the whole
  interval. The intervals are not corrected for the number of comparisons.
- *Large alone*: no setting of these methods was both accurate enough and cheaper than the large model, so the large
  model stands in for them. Ours against it is counted once. It is not counted where ours is the large model alone, too.

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


def _count_line(name, group):
    return (
        f'- against {name}: {len(group)} comparisons; ours wins {group["win"].sum()}, is cheaper in '
        f'{group["cheaper"].sum()}, and keeps the accuracy in {group["keeps"].sum()}.\n'
    )


def _comparison_part(pairs):  # of one target
    names = dict(Benchmark='benchmark', Ours=_our_name, Against=_against(pairs))
    cells = {
        'Cost ratio': _ratio_cell,
        'Accuracy, points': interval('accuracy_difference', POINTS, 100),
    }
    counted = pairs[pairs['counted']]
    others = counted.apply(_other_name, axis=1).where(
        ~counted['large_alone'], 'the large model alone'
    )
    lines = [_count_line(name, group) for name, group in counted.groupby(others, sort=False)]
    heading = f'{COMPARISON_HEADINGS[pairs["target"].iloc[0]]}, {len(counted)} comparisons'
    table = markdown(interval_table(counted, names, cells))
    return f'{heading}\n\n{table}\n{"".join(lines)}'


def comparison_markdown(
    pairs,  # of `comparisons`
) -> str:
    "The comparisons as Markdown tables with notes, and how often ours wins."
    parts = [_comparison_part(part) for _, part in pairs.groupby('target', sort=False)]
    notes = COMPARISON_NOTES.format(points=in_points(pairs['alpha'].iloc[0]))
    return '\n'.join(parts) + notes
