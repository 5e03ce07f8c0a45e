"""Tables and curves of the training of a run's policies

Here belong reading the policies, logs and calibration tables of a run, and making tables of them. The
policies of a run are planned in `run.sweep`. Figures are drawn in `report.training`.
"""

import numpy as np

from ..method.bounds import oracle_frontier, random_frontier
from ..method.cpo import TableEnv
from ..method.policy import decider, load_policy, policy_inputs
from ..report.figures import previews, save_and_show, tables_of
from ..report.training import policy_figures
from ..report.writer import interval_table, markdown, save_table
from .config import Run, Setting
from .stages import read_table
from .sweep import PER_STEP, Job, planned

ROW_LABELS = {'append': 'Ours', 'append-full': 'Ours (full)'}  # variants whose training is drawn
SMOOTHING = 5  # policy steps of the running mean
PERCENTILES = np.linspace(1, 99, 60)  # percentiles of score_prob in the curves of a policy

CHOICE_HEADINGS = {
    'Runs': 'runs',
    'Share of the area': 'share',
    'Cost': 'cost',
    'Cost, online kappa': 'online',
    'Lost, online kappa': 'lost',
    'Frozen': 'frozen',
    'Collapsed': 'collapsed',
}  # heading -> column

CHOICE_NOTES = """
The first numbers are means over the runs, on calibration problems. The share of the area lies between chance (0) and
hindsight (1). Cost is a fraction of the large model's cost. Lost is the fraction of answers lost against the large
model. *Frozen* is the number of runs without an accepted step in their last fifth. *Collapsed* is the number of runs
that hand over nearly all chains, or nearly none.
"""


def calibration_table(
    configs: list,  # config.json of each policy, of `fit_tables` and `fit_trees`
):  # data frame by unit, benchmark, variant and target; without policies, a line of text
    """The results of calibration for every variant, means over seeds. `least`: the accuracy that the
    best fixed step of handing over loses."""
    import pandas as pd

    rows = []
    for config in configs:
        if not config['variant'].startswith('ablation'):
            rows.append(config | config['calibration'])
            rows.append(config | config['bounded'])
    if not rows:
        return 'No policies: there is nothing to learn from.'
    groups = pd.DataFrame(rows).groupby(['unit', 'benchmark', 'variant', 'target'], sort=False)
    columns = ['online', 'cost', 'accuracy', 'large', 'miss', 'bound', 'met', 'least']
    return groups[columns].mean().round(3)


def trained_setting(run: Run) -> tuple:  # (`Setting`, its benchmarks with policies)
    "The first setting of a run that has policies. If none has, the open setting and no benchmarks."
    for setting in run.settings:
        benchmarks = [b for b in setting.benchmarks if setting.files.policies(b).is_dir()]
        if benchmarks:
            return setting, benchmarks
    return Setting(run, 'open'), []


def policy_folders(setting: Setting, benchmark: str, variant: str) -> list:  # one a seed
    "The folders of a variant's policies."
    root = setting.files.policies(benchmark)
    return [job.folder(root) for job in planned(setting) if job.variant == variant]


def sweep_share(
    env: TableEnv,  # of calibration problems
    policy,
    kappas,  # the policy's sweep of thresholds
) -> float:
    """The share of the area between the random and the oracle frontier, over cost, that a policy's
    thresholds reach."""
    large_cost = env.large_cost
    curve = env.risk_curve(policy, [*kappas, 1.0])
    small_only = float(env.cost[:, -1].mean())
    dearest = max(1.0, float(env.cost[:, 0].mean()))
    costs = np.linspace(small_only, dearest, 401)

    def accuracy_at_costs(cost, accuracy):
        order = np.argsort(cost, kind='stable')
        return np.interp(costs, np.asarray(cost)[order], np.asarray(accuracy)[order])

    random = random_frontier(env.table, env.on_escalate, cost=env.unit)
    oracle = oracle_frontier(env.table, env.on_escalate, env.unit)
    chance = accuracy_at_costs(random['cost'] / large_cost, random['accuracy'])
    best = accuracy_at_costs(oracle['cost'] / large_cost, oracle['accuracy'])
    reached = accuracy_at_costs(curve['cost'], curve['right'])
    return float((reached - chance).sum() / (best - chance).sum())


def _choice_row(setting, benchmark, job: Job) -> dict:
    "The results of one policy on calibration problems."
    import pandas as pd

    folder = job.folder(setting.files.policies(benchmark))
    policy = load_policy(folder)
    config = policy.config
    table = read_table(setting, benchmark, 'calibration')
    env = TableEnv(table, job.features, job.on_escalate, setting.unit, policy.scaler)
    deployed = env.deploy(policy, config['online'])
    escalated = (deployed['stop'].numpy() < env.table.n_steps).mean()
    accepted = pd.read_csv(folder / 'log.csv')['accepted']
    last_fifth = accepted.tail(max(1, len(accepted) // 5))
    return dict(
        benchmark=benchmark,
        variant=job.variant,
        runs=1,
        share=sweep_share(env, policy, config['sweep']),
        cost=config['calibration']['cost'],
        online=deployed['cost'].mean(),
        lost=config['calibration']['large'] - deployed['right'].mean(),
        frozen=int(not last_fifth.any()),
        collapsed=int(not 0.01 < escalated < 0.99),
    )


def choices_table(
    setting: Setting,
    benchmarks: list,  # those with policies
):  # data frame by benchmark and variant; means over the seeds
    """The results of every way of training on calibration problems. Frozen and collapsed are numbers
    of runs."""
    import pandas as pd

    jobs = [job for job in planned(setting) if job.variant not in PER_STEP]
    rows = pd.DataFrame([_choice_row(setting, b, job) for b in benchmarks for job in jobs])
    means = dict.fromkeys(['share', 'cost', 'online', 'lost'], 'mean')
    numbers = dict.fromkeys(['frozen', 'collapsed'], 'sum')
    groups = rows.groupby(['benchmark', 'variant'], sort=False)
    return groups.agg(dict(runs='sum') | means | numbers).round(3)


def _training_curve(setting, benchmark, variant):
    "Mean and range over the seeds of one variant, for each policy step."
    import pandas as pd

    seeds = []
    for folder in policy_folders(setting, benchmark, variant):
        log = pd.read_csv(folder / 'log.csv', index_col='step')[['cost', 'lost', 'kappa']]
        seeds.append(log.rolling(SMOOTHING, min_periods=1).mean())
    curve = pd.concat(seeds).groupby(level='step').agg(['mean', 'min', 'max'])
    curve.columns = [name if end == 'mean' else f'{name}_{end}' for name, end in curve.columns]
    policy = setting.run.config.policy
    n_train = len(read_table(setting, benchmark, 'train'))
    return curve.reset_index().assign(
        row=ROW_LABELS[variant],
        benchmark=benchmark,
        seeds=len(seeds),
        batch=min(policy.batch or n_train, n_train),
        alpha=policy.alpha,
    )


def training_curves(
    setting: Setting,
    benchmarks: list,  # those with policies
):  # data frame: row, benchmark, step; cost, lost, kappa, each with _min and _max
    "The training of the rows Ours: mean and range over seeds, as a running mean of 5 steps."
    import pandas as pd

    curves = [_training_curve(setting, b, variant) for variant in ROW_LABELS for b in benchmarks]
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
    setting: Setting,
    benchmarks: list,  # those with policies
):  # data frame: row, benchmark, step, percentile, escalate, kappa
    "The curves of where the first full policy of each benchmark escalates."
    import pandas as pd

    variant = 'append-full'
    rows = []
    for benchmark in benchmarks:
        policy = load_policy(policy_folders(setting, benchmark, variant)[0])
        table = read_table(setting, benchmark, 'train')
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
    setting, benchmarks = trained_setting(run)
    if not benchmarks:
        return []
    save_table(run.tables / 'training', training_curves(setting, benchmarks).round(5))
    save_table(run.tables / 'policy', policy_curves(setting, benchmarks).round(5))
    choices = choices_table(setting, benchmarks).reset_index()
    names = {'Benchmark': 'benchmark', 'Policies': 'variant'}
    cells = {
        heading: lambda row, column=column: f'{row[column]:g}'
        for heading, column in CHOICE_HEADINGS.items()
    }
    text = markdown(interval_table(choices, names, cells)) + CHOICE_NOTES
    save_table(run.tables / 'choices', choices, md=text)
    return save_and_show(policy_figures(run.tables), run.figures)
