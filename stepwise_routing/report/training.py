"""Figures of training and of policies

Here belongs drawing the tables training.csv and policy.csv. Making them belongs in
`run.training_report`.
"""

from pathlib import Path

from .style import new_figure, paper_style

LINES = (
    ('#0173b2', '-'),
    ('#a85c00', '--'),
    ('#00735a', '-.'),
    ('#404040', ':'),
)  # a benchmark each
GREY = '#555555'
COLUMNS = dict(cost='cost, share of large', lost='accuracy lost', kappa=r'threshold $\kappa$')


def _draw_run(axes, rows, line, benchmark):
    "Draw the training on one benchmark, with a panel for each of `COLUMNS`."
    color, dash = line
    for ax, (column, title) in zip(axes, COLUMNS.items()):
        low = rows[f'{column}_min']
        high = rows[f'{column}_max']
        ax.fill_between(rows['step'], low, high, color=color, alpha=0.2, lw=0)
        ax.plot(rows['step'], rows[column], dash, color=color, label=benchmark)
        ax.set_ylabel(title)


def draw_training(
    curves,  # DataFrame of `training_curves`
):  # matplotlib figure
    "Draw the training of the rows Ours: mean and range over seeds, as a running mean of 5 steps."
    policies = list(curves.groupby('row', sort=False))
    fig, axes = new_figure(5.5, 3.2, nrows=len(policies), ncols=3, sharex=True)
    with paper_style():
        for (name, own), panels in zip(policies, axes):
            for (benchmark, rows), line in zip(own.groupby('benchmark', sort=False), LINES):
                _draw_run(panels, rows, line, benchmark)
            panels[1].axhline(own['alpha'].iloc[0], color=GREY, lw=0.5, ls=':')
            panels[1].set_title(name)
        for ax in axes[-1]:
            ax.set_xlabel('step')
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc='outside lower center', ncols=4, fontsize=7)
    return fig


def training_caption(
    curves,  # DataFrame of `training_curves`
) -> str:
    "The caption of the figure of training."
    first = curves.iloc[0]
    return (
        f'Training of the rows {" and ".join(curves["row"].unique())}, step by step. '
        f'A line is the mean over {first["seeds"]} seeds, smoothed over 5 steps; its band is the range over the seeds. '
        f'Cost and lost accuracy are those of the deployed policy (Gamma) on the {first["batch"]} training problems '
        "of a step. Lost accuracy is the large model's accuracy minus the policy's. Dotted line: alpha, which may be "
        'lost.'
    )


def _draw_policy(ax, rows):
    "Draw where one policy escalates: a line per step index, with the index on the line."
    import matplotlib

    for step, line in rows.groupby('step'):
        shade = matplotlib.colormaps['viridis'](0.16 * step)
        ax.plot(line['percentile'], line['escalate'], color=shade)
        numbered_point = line.iloc[int(len(line) * (0.12 + 0.12 * step))]
        ax.text(
            numbered_point['percentile'],
            numbered_point['escalate'],
            f'{step}',
            fontsize=6.5,
            ha='center',
            va='center',
            bbox=dict(fc='white', ec=shade, lw=0.5, pad=0.8),
        )
    kappa = rows['kappa'].iloc[0]
    ax.axhline(kappa, color=GREY, lw=0.5, ls=':')
    ax.text(99, kappa, r'$\kappa$', fontsize=7, color=GREY, ha='right', va='bottom')


def draw_policies(
    curves,  # DataFrame of `policy_curves`
):  # matplotlib figure
    "Draw where the policies escalate: a panel per benchmark, a line per step index."
    groups = list(curves.groupby('benchmark', sort=False))
    fig, axes = new_figure(5.5, 1.9, ncols=len(groups))
    with paper_style():
        for ax, (benchmark, rows) in zip(axes[0], groups):
            _draw_policy(ax, rows)
            ax.set(xlabel='percentile of the probability', ylim=(-0.03, 1.03), title=benchmark)
        axes[0, 0].set_ylabel(r'$\pi$(escalate)')
    return fig


def policies_caption(
    curves,  # DataFrame of `policy_curves`
) -> str:
    "The caption of the figure of policies."
    return (
        f'Where the policy {curves["row"].iloc[0]} (first seed) hands over. '
        'The height of a line is the probability of handing over. The number on it is the index of the step. '
        "To the right, the probability of the step's least sure token rises; its percentile is shown. "
        'All other features are at their median. Dotted line: the calibrated threshold kappa.'
    )


def policy_figures(
    tables,  # folder
) -> dict:  # stem -> (figure, caption)
    "The figures of training and policies, from their tables alone. {} if there are no such tables."
    import pandas as pd

    figures = {}
    training = Path(tables) / 'training.csv'
    if training.is_file():
        curves = pd.read_csv(training)
        figures['training'] = draw_training(curves), training_caption(curves)
    policy = Path(tables) / 'policy.csv'
    if policy.is_file():
        curves = pd.read_csv(policy)
        figures['policy'] = draw_policies(curves), policies_caption(curves)
    return figures
