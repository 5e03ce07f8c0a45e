"""Tables and curves of the training of a run's policies

Here belong reading the policies, logs and calibration tables of a run, and making tables of them. The
policies of a run are planned in `run.sweep`. Figures are drawn in `report.training`.
"""

import numpy as np

from ..method.policy import decider, load_policy, policy_inputs
from ..report.figures import previews, save_and_show, tables_of
from ..report.training import policy_figures
from ..report.writer import save_table
from .config import Run
from .stages import read_table
from .sweep import planned

ROW_LABELS = {'append': 'Ours', 'append-full': 'Ours (full)'}  # variants whose training is drawn
SMOOTHING = 5  # policy steps of the running mean
PERCENTILES = np.linspace(1, 99, 60)  # percentiles of score_prob in the curves of a policy


def calibration_table(
    configs: list,  # config.json of each policy, of `fit_tables`
):  # data frame by unit, benchmark and variant; without policies, a line of text
    """The results of calibration for every variant, means over seeds. `least`: the accuracy that the
    best fixed step of handing over loses."""
    import pandas as pd

    rows = [config | config['calibration'] for config in configs]
    if not rows:
        return 'No policies: there is nothing to learn from.'
    groups = pd.DataFrame(rows).groupby(['unit', 'benchmark', 'variant'], sort=False)
    columns = ['online', 'cost', 'accuracy', 'large', 'miss', 'least']
    return groups[columns].mean().round(3)


def trained_benchmarks(run: Run) -> list:
    "The benchmarks of a run with policies."
    return [b for b in run.benchmarks if run.files.policies(b).is_dir()]


def policy_folders(run: Run, benchmark: str, variant: str) -> list:  # one a seed
    "The folders of a variant's policies."
    root = run.files.policies(benchmark)
    return [job.folder(root) for job in planned(run) if job.variant == variant]


def _training_curve(run, benchmark, variant):
    "Mean and range over the seeds of one variant, for each policy step."
    import pandas as pd

    seeds = []
    for folder in policy_folders(run, benchmark, variant):
        log = pd.read_csv(folder / 'log.csv', index_col='step')[['cost', 'lost', 'kappa']]
        seeds.append(log.rolling(SMOOTHING, min_periods=1).mean())
    curve = pd.concat(seeds).groupby(level='step').agg(['mean', 'min', 'max'])
    curve.columns = [name if end == 'mean' else f'{name}_{end}' for name, end in curve.columns]
    policy = run.config.policy
    n_train = len(read_table(run, benchmark, 'train'))
    return curve.reset_index().assign(
        row=ROW_LABELS[variant],
        benchmark=benchmark,
        seeds=len(seeds),
        batch=min(policy.batch or n_train, n_train),
        alpha=policy.alpha,
    )


def training_curves(
    run: Run,
    benchmarks: list,  # those with policies
):  # data frame: row, benchmark, step; cost, lost, kappa, each with _min and _max
    "The training of the rows Ours: mean and range over seeds, as a running mean of 5 steps."
    import pandas as pd

    curves = [_training_curve(run, b, variant) for variant in ROW_LABELS for b in benchmarks]
    return pd.concat(curves, ignore_index=True)


def _escalation_surface(policy, table, steps):  # [step index, percentile]
    """pi(escalate) by step index and percentile of score_prob. Other features are at their median, and
    the step is not final."""
    observed = table.obs[~np.isnan(table.obs).any(-1)]
    column = table.features.index
    grid = np.tile(np.median(observed, 0), (len(steps), len(PERCENTILES), 1))
    grid[..., column('final')] = 0.0
    levels = np.linspace(0.01, 0.99, len(PERCENTILES))
    score = column('score_prob')
    grid[..., score] = np.quantile(observed[:, score], levels)
    grid[..., column('index')] = np.array(steps)[:, None]
    return decider(policy)(policy_inputs(grid, table.features, policy.features))[..., 1]


def policy_curves(
    run: Run,
    benchmarks: list,  # those with policies
):  # data frame: row, benchmark, step, percentile, escalate, kappa
    "The curves of where the first full policy of each benchmark escalates."
    import pandas as pd

    variant = 'append-full'
    rows = []
    for benchmark in benchmarks:
        policy = load_policy(policy_folders(run, benchmark, variant)[0])
        table = read_table(run, benchmark, 'train')
        steps = range(min(5, table.n_steps.max()))
        surface = _escalation_surface(policy, table, steps)
        for step, probabilities in zip(steps, surface):
            names = dict(row=ROW_LABELS[variant], benchmark=benchmark, step=step)
            for percentile, escalate in zip(PERCENTILES, probabilities):
                values = dict(percentile=percentile, escalate=escalate, kappa=policy.kappa)
                rows.append(names | values)
    return pd.DataFrame(rows)


def report_training(run: Run) -> list:
    """Write tables and figures of a run's training and policies, and show the figures. [] if it trained
    no policies. Without results, show the committed figures."""
    if not run.has_results:
        return previews(policy_figures(tables_of(run)))
    benchmarks = trained_benchmarks(run)
    if not benchmarks:
        return []
    save_table(run.tables / 'training', training_curves(run, benchmarks).round(5))
    save_table(run.tables / 'policy', policy_curves(run, benchmarks).round(5))
    return save_and_show(policy_figures(run.tables), run.figures)
