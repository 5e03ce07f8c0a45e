"""The report about your own router: accuracy against cost, the cost of each alpha.

Here belong its tables, figure and text. Reports of a run with many methods are in
`report.tables` and `report.figures`.
"""

from pathlib import Path

import numpy as np

from ..base.tools import check_new_folder, write_file
from ..method.outcomes import replay
from .card import percent
from .style import new_figure, save_figure

CURVE = 60  # most thresholds in the figure

TEXT = """{card}
## Accuracy against cost

![Accuracy against cost](accuracy_cost.png)

On the {n} calibration problems. The line is the router at other thresholds; the filled mark is the
one that is in use.

## What each alpha costs

Target `{target}`. Alpha is the accuracy that may be lost against the large model.

{alphas}
"""


def markdown_table(rows: list) -> str:  # dicts with the same keys
    "Rows as a Markdown table."
    lines = ['| ' + ' | '.join(rows[0]) + ' |', '|' + '---|' * len(rows[0])]
    for row in rows:
        lines.append('| ' + ' | '.join(str(value) for value in row.values()) + ' |')
    return '\n'.join(lines)


def alpha_rows(choices) -> list:
    "The rows of the table of alphas: class, cost and accuracy of each choice."
    rows = []
    for choice in choices:
        result = choice.calibration
        rows.append(
            {
                'alpha': f'{result.alpha:g}',
                'router': choice.model_class,
                "of the large model's cost": percent(result.cost),
                'right': percent(result.accuracy),
                'large model right': percent(result.large),
            }
        )
    return rows


def curve_points(table, router, unit: str) -> tuple:  # (share of the large model's cost, accuracy)
    "Cost and accuracy of the router at other thresholds, from cheap to expensive."
    large = table.large_only()[unit].mean()
    chances = router.table_chances(table)[table.inside]
    kappas = np.unique(np.quantile(chances, np.linspace(0, 1, CURVE)))
    points = []
    for kappa in [*kappas, np.nextafter(kappas[-1], np.inf)]:
        outcome = replay(router.at(float(kappa)), table)
        points.append((outcome[unit].mean() / large, outcome['correct'].mean()))
    return tuple(np.array(sorted(points)).T)


def draw(table, router, unit: str, models):
    "Draw accuracy against cost: both models, the router, and the threshold in use."
    fig, ((ax,),) = new_figure(3.3, 2.4)
    large = table.large_only()
    unit_cost = large[unit].mean()
    if not router.start:
        cost, accuracy = curve_points(table, router, unit)
        ax.plot(100 * cost, 100 * accuracy, color='0.4', label='router')
    marks = {
        models[0]: (table.outcome(-1), 'v'),
        models[1]: (large, '^'),
        'in use': (replay(router, table), 'o'),
    }
    for name, (outcome, marker) in marks.items():
        share = 100 * outcome[unit].mean() / unit_cost
        ax.plot(share, 100 * outcome['correct'].mean(), marker, label=name)
    ax.set_xlabel("of the large model's cost, %")
    ax.set_ylabel('right, %')
    ax.legend()
    return fig


def write_report(
    out,  # new or empty folder
    card: str,  # of the router
    table,  # calibration problems
    router,  # the one in use
    unit: str,  # of cost
    models,  # public names
    choices,  # of several alphas
    price: str | None,  # not used
) -> list:  # names of the files
    "Write README.md and its figure. ValueError in one line if the folder is not empty."
    out = Path(out)
    check_new_folder(out)
    caption = "Accuracy against the share of the large model's cost, on the calibration problems."
    save_figure(draw(table, router, unit, models), out / 'accuracy_cost', caption)
    text = TEXT.format(
        card=card,
        n=len(table),
        target=choices[0].calibration.target,
        alphas=markdown_table(alpha_rows(choices)),
    )
    write_file(out / 'README.md', text)
    return sorted(path.name for path in out.iterdir())
