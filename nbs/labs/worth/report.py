"""The table and the figure of all cells, from their rows and curves alone.

Here belongs how results are written and drawn. What they are belongs in `cells`.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from stepwise_routing.method.results import style_of
from stepwise_routing.report.gains import holm
from stepwise_routing.report.style import new_figure, paper_style, save_figure
from stepwise_routing.report.writer import (
    POINTS,
    interval,
    interval_table,
    label,
    markdown,
    percent,
    save_table,
)

from .cells import POLICIES, RULES

PREFIXES = dict(zip(('nested', 'full'), POLICIES))  # of the columns of differences

# ---- table


def with_verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    "The rows, with p-values after Holm's correction over the cells, and verdicts by the intervals of the share."
    rows = rows.copy()
    for prefix in PREFIXES:
        for rule in set(RULES) & set(rows['method']):
            of_rule = rows['method'] == rule
            rows.loc[of_rule, f'{prefix}_p_holm'] = holm(rows.loc[of_rule, f'{prefix}_p'])
        wins = rows[f'{prefix}_share_low'] > 0
        loses = rows[f'{prefix}_share_high'] < 0
        verdicts = np.select([wins, loses], ['win', 'loss'], 'tie')
        rows[f'{prefix}_verdict'] = np.where(rows['method'].isin(RULES), verdicts, '')
    return rows


def share_name(share: float) -> str:
    "A share of problems in words: 0, 1/4, 1/2, 3/4."
    return str(Fraction(share).limit_denominator(100))


def hopeless_cell(row) -> str:
    return share_name(row['hopeless'])


def auroc_cell(row) -> str:
    "The AUROC that was asked for, and whether the score is below it without any noise."
    return f'{row["auroc"]:.2f}' + (' (no noise)' if row['chance'] == 0 else '')


CELL = {'Hopeless': hopeless_cell, 'AUROC': auroc_cell}

FACT_NOTES = """
AUROC: of the least token probability of a step, chapter 01's. *q*: chance that a step shows the confidences of another
step, found on the training problems; no noise: the score is below the target by itself. *Class*: the class of features
that ours (nested) takes, append / regenerate.
"""

LEVEL_NOTES = """
All test problems of both pools, one draw of each model; neither: all draws of the large model. Level 6 is the hopeless
one.
"""

ROW_NOTES = """
Test problems, [paired bootstrap 95% interval]. *Share*: of the area between chance and hindsight, %. *Cost*: % of the
large model's. *Lost*: points of accuracy that the large model has more. *Accuracy point*: the cheapest setting that
loses at most {points:g} points on calibration problems. *Certain point*: the last setting, from safe to cheap, of which
we are 90 % sure that it loses at most {points:g} points; 100 % of the cost and nothing lost: the large model alone. A
row is in the reading that is cheaper on calibration problems; ours is a mean over {seeds} training seeds.
"""

VERDICT_NOTES = """
Ours minus a rule: difference of the shares of the area, points [paired bootstrap 95% interval], both in the rule's
reading. **win**: the interval lies above 0; **loss**: below; p: two-sided, after Holm's correction over the cells.
"""


def facts_markdown(rows: pd.DataFrame) -> str:
    "What the cells are, a line each."
    first = rows.drop_duplicates(['hopeless', 'auroc'])
    cells = {
        'q': lambda row: f'{row["chance"]:.2f}',
        'AUROC without noise': lambda row: f'{row["auroc_clean"]:.3f}',
        'train': lambda row: f'{row["auroc_train"]:.3f}',
        'calibration': lambda row: f'{row["auroc_calibration"]:.3f}',
        'test': lambda row: f'{row["auroc_test"]:.3f}',
        'Small right, %': percent('small_accuracy'),
        'Large right, %': percent('large_accuracy'),
        'Small cost, %': percent('small_cost'),
        'Class': lambda row: f'{row["class_append"]} / {row["class_regenerate"]}',
    }
    return markdown(interval_table(first, CELL, cells)) + FACT_NOTES


def rows_markdown(rows: pd.DataFrame, alpha: float) -> str:
    "What every method reaches, a line a cell and method."
    cells = {
        'Share': percent('share'),
        'Cost, accuracy point': percent('cost_accuracy'),
        'Lost, accuracy point': interval('lost_accuracy', POINTS, 100),
        'Cost, certain point': percent('cost_certain'),
        'Lost, certain point': interval('lost_certain', POINTS, 100),
    }
    table = interval_table(rows, CELL | dict(Method=label), cells)
    notes = ROW_NOTES.format(points=100 * alpha, seeds=rows['seeds'].iloc[0])
    return markdown(table) + notes


def verdict_cell(prefix: str):  # row -> text
    "A difference with its interval, in bold where it is a win or a loss."
    number = interval(f'{prefix}_share', POINTS, 100)

    def cell(row):
        verdict = row[f'{prefix}_verdict']
        if verdict == 'tie':
            return number(row)
        return f'{number(row)} **{verdict}**, p {row[f"{prefix}_p_holm"]:.3f}'

    return cell


def verdicts_markdown(rows: pd.DataFrame) -> str:
    "Ours against the rules, a line a cell."
    of_rules = rows[rows['method'].isin(RULES)]
    cells = {f'{name} minus': verdict_cell(prefix) for prefix, name in PREFIXES.items()}
    names = of_rules['method'].map(lambda method: style_of(method)['label'])
    table = interval_table(of_rules.assign(rule=names), CELL, cells, 'rule')
    table.columns = table.columns.map(lambda head: (head[1], head[0]) if head[0] else head)
    return markdown(table) + VERDICT_NOTES


def cost_verdicts_markdown(rows: pd.DataFrame) -> str:
    "Ours (nested) minus the rules in cost, at both points."
    of_rules = rows[rows['method'].isin(RULES)]
    cells = {
        'accuracy point': interval('nested_cost_accuracy', POINTS, 100),
        'certain point': interval('nested_cost_certain', POINTS, 100),
    }
    names = of_rules['method'].map(lambda method: style_of(method)['label'])
    table = interval_table(of_rules.assign(rule=names), CELL, cells, 'rule')
    notes = """
Cost of ours (nested) minus cost of a rule, in points of the large model's cost [paired bootstrap 95% interval], each at
its own setting and in its own reading; below 0: ours is cheaper. Look at the accuracies beside it.
"""
    return markdown(table) + notes


def levels_markdown(levels: pd.DataFrame) -> str:
    "How hard the levels are, a line each."
    names = dict(Level='level', Problems='n')
    cells = {
        'Small right, %': percent('small'),
        'Large right, %': percent('large'),
        'Neither right, %': percent('neither'),
    }
    return markdown(interval_table(levels, names, cells)) + LEVEL_NOTES


def table_text(rows: pd.DataFrame, levels: pd.DataFrame, alpha: float) -> str:
    "The whole page of results."
    parts = {
        'Ours against the rules, by the share of the area': verdicts_markdown(rows),
        'Ours against the rules, by cost': cost_verdicts_markdown(rows),
        'Every method': rows_markdown(rows, alpha),
        'The cells': facts_markdown(rows),
        'The levels': levels_markdown(levels),
    }
    n = rows.iloc[0]
    intro = (
        f'When is a policy worth having? Newly generated micro-omni problems; a cell has {n["n_train"]} to train on, '
        f'{n["n_calibration"]} to calibrate, {n["n_test"]} to test. Written by `python -m worth` in nbs/labs; the lab '
        '03_when_worth tells what was fixed before.\n'
    )
    return '\n'.join([intro, *(f'## {title}\n\n{text}' for title, text in parts.items())])


# ---- figure

DRAWN = {  # method -> what differs from its usual style
    'Bare threshold (probability)': dict(dash=(0, (1, 1))),
    'Two numbers (probability)': dict(color='#7a3e9d', marker='^', dash=(0, (4, 1.5))),
    'STEER (rest)': dict(dash=(0, (5, 1, 1, 1))),
    'Ours (full)': dict(color='#5a0000', marker='X', dash='-'),
    'Ours (nested)': dict(dash='-'),
}
SIZE = 7  # of texts, points
EDGE = 112  # % of the large model's cost; dearer points are not drawn


def _draw_method(ax, points: pd.DataFrame, method: str) -> None:
    "A curve, and its accuracy point as a marker."
    style = style_of(method) | DRAWN[method]
    own = points[points['method'] == method]
    curve = own[own['chosen'] == 0]
    chosen = own[own['chosen'] == 1].iloc[0]
    is_main = method == 'Ours (nested)'
    width = 1.6 if is_main else 0.9
    ax.plot(
        100 * curve['cost'],
        100 * curve['accuracy'],
        color=style['color'],
        lw=width,
        ls=style['dash'],
    )
    ax.plot(
        [100 * chosen['cost']],
        [100 * chosen['accuracy']],
        color=style['color'],
        marker=style['marker'],
        ms=6 if is_main else 4,
        mew=0.4,
        mec='white',
        lw=width,
        ls=style['dash'],
        label=style['label'],
        zorder=5 + is_main,
    )


def _draw_models(ax, facts) -> None:
    "Both models alone."
    alone = dict(
        small=(100 * facts['small_cost'], 100 * facts['small_accuracy'], 's'),
        large=(100, 100 * facts['large_accuracy'], 'D'),
    )
    for name, (cost, accuracy, marker) in alone.items():
        ax.plot([cost], [accuracy], marker, color='#404040', ms=3.5, label=name, zorder=4)


def _draw_panel(ax, facts, points: pd.DataFrame) -> None:
    _draw_models(ax, facts)
    for method in DRAWN:
        _draw_method(ax, points, method)
    noise = 'no noise' if facts['chance'] == 0 else f'AUROC {facts["auroc"]:.2f}'
    title = f'hopeless {hopeless_cell(facts)}, {noise} ({facts["auroc_test"]:.2f})'
    ax.set_title(title, fontsize=SIZE)
    ax.set_xlim(right=EDGE)
    ax.locator_params(nbins=5)


def draw_worth(rows: pd.DataFrame, curves: pd.DataFrame):  # matplotlib figure
    "A panel a cell: hopeless problems downwards, a better score to the right."
    cells = rows.drop_duplicates(['hopeless', 'auroc']).to_dict('records')
    ncols = rows['auroc'].nunique()
    nrows = len(cells) // ncols
    fig, axes = new_figure(5.5, 0.5 + 1.5 * nrows, nrows=nrows, ncols=ncols)
    with paper_style():
        for ax, facts in zip(axes.flat, cells):
            of_cell = (curves['hopeless'] == facts['hopeless']) & (
                curves['auroc'] == facts['auroc']
            )
            _draw_panel(ax, facts, curves[of_cell])
        for ax in axes[-1]:
            ax.set_xlabel("cost, % of the large model's", fontsize=SIZE)
        for ax in axes[:, 0]:
            ax.set_ylabel('accuracy, %', fontsize=SIZE)
        handles, names = axes[0, 0].get_legend_handles_labels()
        fig.legend(
            handles, names, loc='outside lower center', ncols=4, fontsize=SIZE, handlelength=3
        )
    return fig


def caption(rows: pd.DataFrame, alpha: float) -> str:
    "What the figure shows."
    first = rows.iloc[0]
    clean = rows[rows['chance'] == 0].drop_duplicates(['hopeless', 'auroc'])
    sentences = [
        "When is a policy worth having? Accuracy against cost (share of the large model's, 2N FLOPs a token for N "
        f'parameters) on {first["n_test"]} new micro-omni test problems a panel.',
        'Downwards: the share of problems beyond both models; to the right: the AUROC of the score, the least token '
        'probability of a step, as a detector of wrong small steps.',
        'The score was made noisy: with a fixed chance a step shows the confidences of another one, so that the AUROC '
        'on training problems is as named; in brackets: on the test problems.',
    ]
    if len(clean):
        sentences.append('No noise: the score by itself is below the AUROC that was asked for.')
    sentences += [
        f'Lines: settings that nothing beats on {first["n_calibration"]} calibration problems; markers: the cheapest '
        f'that loses at most {100 * alpha:g} points there.',
        f'Ours learns from {first["n_train"]} problems and is a mean over {first["seeds"]} training seeds; ours '
        '(full) sees all features, ours (nested) takes the simplest class of features that is nearly as cheap on '
        'calibration.',
        'Each method is in the reading of "escalate" that is cheaper on calibration. Square and diamond: the small '
        'and the large model alone.',
    ]
    return ' '.join(sentences)


# ---- files


def write_tables(
    rows: pd.DataFrame,  # of `read_cells`
    curves: pd.DataFrame,  # of `read_cells`
    levels: pd.DataFrame,  # of `level_facts`
    alpha: float,
    folder,
) -> list:  # paths
    "worth.csv, worth.md, worth_curves.csv and worth_levels.csv."
    folder = Path(folder)
    rows = with_verdicts(rows)
    paths = save_table(folder / 'worth', rows, md=table_text(rows, levels, alpha))
    paths += save_table(folder / 'worth_curves', curves)
    return paths + save_table(folder / 'worth_levels', levels)


def write_figure(tables, figures, alpha: float) -> list:  # paths
    "The figure and its caption, from the tables alone."
    rows = pd.read_csv(Path(tables) / 'worth.csv')
    curves = pd.read_csv(Path(tables) / 'worth_curves.csv')
    return save_figure(draw_worth(rows, curves), Path(figures) / 'worth', caption(rows, alpha))
