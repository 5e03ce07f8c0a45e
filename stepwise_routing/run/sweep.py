"""Which policies a run trains, from its settings, and what their training looks like"""

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..base.tools import digest, note_progress
from ..method.bounds import oracle_frontier, random_frontier
from ..method.cpo import TableEnv
from ..method.outcomes import take_rows
from ..method.policy import (
    FULL_FEATURES,
    PAPER_FEATURES,
    Policy,
    decider,
    load_policy,
    policy_inputs,
)
from ..method.training import TreeEnv, fit, training_key
from .config import Setting
from .stages import open_backends, open_run_grader, open_tree, read_problems, read_table


@dataclass(frozen=True)
class Job:
    "One policy to train."

    variant: str  # its name in folders and tables
    on_escalate: str  # "append" or "regenerate"
    features: tuple  # what the policy sees
    s: Policy  # how it is trained
    seed: int  # of its weights, batches and actions
    alpha: float  # accuracy that its calibration may lose, as that of all other rows
    draws: int | None = None  # of every training problem that it sees; None: all

    def folder(self, root):
        return Path(root) / self.variant / f'alpha{self.s.alpha:g}-seed{self.seed}'


VARIANTS = {
    'append': ('append', PAPER_FEATURES),
    'append-full': ('append', FULL_FEATURES),
    'regenerate': ('regenerate', PAPER_FEATURES),
    'regenerate-full': ('regenerate', FULL_FEATURES),
}

PER_STEP = {'per_step': ('append', PAPER_FEATURES), 'per_step-full': ('regenerate', FULL_FEATURES)}

PAPER = dict(estimator='sampled', batch=5, steps=1000)

SAMPLED = PAPER | dict(
    batch=50
)  # its estimator, with the smallest batch of which no run froze or collapsed

ABLATIONS = {  # one change each to the training of regenerate-full; "one-draw" and "no-FEATURE" to what it sees
    'base': {},
    'joint': dict(constraint='joint'),
    'joint-0.1': dict(constraint='joint', alpha=0.1),
    'temp-0.01': dict(temp=(0.1, 0.01)),
    'temp-0.1': dict(temp=(0.1, 0.1)),
    'kappa-constant': dict(kappa_decay=0.0),
    'sampled-5': PAPER,
    'sampled-10': PAPER | dict(batch=10),
    'sampled-25': PAPER | dict(batch=25),
    'sampled-50': SAMPLED,
    'exact-5': PAPER | dict(estimator='exact'),
    'slack-0': dict(slack=0.0),
    'one-draw': {},
    'exact-50': dict(estimator='exact', batch=50, steps=300),
    'four-layers': dict(hidden=(64, 64, 64)),
    **{f'no-{f}': {} for f in FULL_FEATURES},
}


def _changed(config, changes):  # `Policy`
    s = replace(config.policy, **changes)
    return replace(s, steps=min(s.steps, config.sweep.most_steps)) if 'steps' in changes else s


def _ablation(name, config, seed):  # key of `ABLATIONS`
    s = _changed(config, ABLATIONS[name])
    features = tuple(f for f in FULL_FEATURES if name != f'no-{f}')
    draws = 1 if name == 'one-draw' else None
    return Job(f'ablation-{name}', 'regenerate', features, s, seed, config.policy.alpha, draws)


def planned(setting):  # -> `Job`s
    "The policies of a setting: variants and seeds; of the open one also the paper's estimator, ablations, per step."
    config, sweep, is_open = setting.run.config, setting.run.config.sweep, setting.name == 'open'
    s = config.policy
    first = config.seed
    n = sweep.per_step_problems
    seeds = range(first, first + (sweep.seeds if is_open else sweep.api_seeds))
    jobs = [
        Job(variant, *options, s, seed, s.alpha)
        for variant, options in VARIANTS.items()
        for seed in seeds
    ]
    if is_open and sweep.ablations:
        jobs += [
            Job('sampled', *VARIANTS['regenerate'], _changed(config, SAMPLED), seed, s.alpha)
            for seed in seeds
        ]
        jobs += [
            _ablation(name, config, first + i)
            for name in ABLATIONS
            for i in range(sweep.ablation_seeds)
        ]
    if is_open and sweep.per_step:
        s = replace(
            s, estimator='sampled', steps=sweep.per_step_steps, batch=min(sweep.per_step_batch, n)
        )
        jobs += [
            Job(variant, *options, s, first + i, s.alpha)
            for i in range(sweep.per_step_seeds)
            for variant, options in PER_STEP.items()
        ]
    return jobs


def _walked(
    setting, tree, env, held_out
):  # the same as live walks of fewer problems, and what else the key is made of
    n = setting.run.config.sweep.per_step_problems
    sizes = dict(train=min(n, len(env)), calibration=min(2 * n, len(held_out)))
    parts = [read_problems(setting, tree.benchmark, split, size) for split, size in sizes.items()]
    names = [[(p.benchmark, p.id) for p in part] for part in parts]
    envs = [
        TreeEnv(part, tree, env.scaler, 'per_step', env.on_escalate, setting.unit) for part in parts
    ]
    return envs, (names, tree.store.settings, digest(env.table.obs.tobytes().hex()))


def fit_job(
    setting, benchmark, job, tree=None
):  # `RoutingTree` to walk; None: outcome tables -> config.json
    "Train one policy, or find it in the store; a batch is at most all problems there are."
    splits = 'train', 'calibration'
    table, held = (read_table(setting, benchmark, split) for split in splits)
    if job.draws:
        table = take_rows(table, table.sample < job.draws)
    job = replace(job, s=replace(job.s, batch=job.s.batch and min(job.s.batch, len(table))))
    env = TableEnv(table, job.features, job.on_escalate, setting.unit)
    envs = env, TableEnv(held, job.features, job.on_escalate, setting.unit, env.scaler)
    inputs = [
        [digest(setting.files.outcomes(benchmark, split).read_bytes().hex()) for split in splits]
    ]
    if tree:
        envs, inputs = _walked(setting, tree, *envs)
    folder = job.folder(setting.store / 'policies' / benchmark)
    key = training_key(*inputs, setting.unit, asdict(job))
    config = fit(
        *envs,
        folder,
        job.s,
        job.seed,
        alpha=job.alpha,
        key=key,
        variant=job.variant,
        benchmark=benchmark,
        params=table.params,
        unit=setting.unit,
    )
    shutil.copytree(folder, job.folder(setting.files.policies(benchmark)), dirs_exist_ok=True)
    return config


def left_out(setting, benchmark):  # str; None where a policy can be trained
    "Why no policy can be trained on a benchmark."
    try:
        TableEnv(read_table(setting, benchmark, 'train'), unit=setting.unit)
    except ValueError as e:
        return str(e)


def _work(setting, benchmark, job):  # steps times problems, and what a step takes anyhow
    n = len(read_table(setting, benchmark, 'train'))
    return job.s.steps * (100 + min(job.s.batch or n, n))


def fit_tables(run):  # `Run` with outcome tables -> config.json of each policy
    "Train every policy that outcome tables can train, side by side; each is on disk when it is done."
    from joblib import Parallel, delayed, parallel_config
    from joblib.externals.loky import get_reusable_executor
    from tqdm.auto import tqdm

    jobs = [
        (s, b, job)
        for s in run.settings
        for b in s.benchmarks
        if not left_out(s, b)
        for job in planned(s)
        if job.variant not in PER_STEP
    ]
    order = sorted(range(len(jobs)), key=lambda i: -_work(*jobs[i]))
    with (
        TemporaryDirectory(
            ignore_cleanup_errors=True
        ) as folder,  # else joblib leaves one in memory
        parallel_config('loky', inner_max_num_threads=1, temp_folder=folder),
    ):
        done = Parallel(run.config.sweep.workers, return_as='generator')(
            delayed(fit_job)(*jobs[i]) for i in order
        )
        configs = {}
        for i, config in zip(order, tqdm(done, 'policies', len(jobs), disable=None)):
            configs[i] = config
            note_progress(f'policies: {len(configs):,} of {len(jobs):,}')
    get_reusable_executor().shutdown()  # else its end is noisy
    return [configs[i] for i in range(len(jobs))]


def fit_trees(run):  # `Run` with outcome tables of its open setting -> config.json of each policy
    "Train the per-step policies of a run, where it has any; opens the models."
    setting = Setting(run, 'open')
    configs = []
    jobs = [job for job in planned(setting) if job.variant in PER_STEP and setting.models]
    benchmarks = [b for b in setting.benchmarks if jobs and not left_out(setting, b)]
    if not benchmarks:
        return []
    with open_run_grader(setting) as grade, open_backends(setting) as backends:
        for b in benchmarks:
            with open_tree(setting, b, backends, grade) as tree:
                configs += [fit_job(setting, b, job, tree) for job in jobs]
    return configs


def calibration_table(
    configs,
):  # of `fit_tables` and `fit_trees` -> data frame by unit, benchmark, variant and target
    "What calibration found for every variant, means over the seeds; `least`: what the best fixed time loses."
    import pandas as pd

    configs = [c for c in configs if not c['variant'].startswith('ablation')]
    rows = [c | c[found] for c in configs for found in ('calibration', 'bounded')]
    if not rows:
        return 'No policies: there is nothing to learn from.'
    groups = pd.DataFrame(rows).groupby(['unit', 'benchmark', 'variant', 'target'], sort=False)
    return (
        groups[['online', 'cost', 'accuracy', 'large', 'miss', 'bound', 'met', 'least']]
        .mean()
        .round(3)
    )


def trained_setting(run):  # (`Setting`, its benchmarks that have policies)
    "The first setting of a run that has policies."
    every = [(s, [b for b in s.benchmarks if s.files.policies(b).is_dir()]) for s in run.settings]
    return next((pair for pair in every if pair[1]), (Setting(run, 'open'), []))


def _folders(setting, benchmark, variant):  # of the policies, one a seed
    return [
        j.folder(setting.files.policies(benchmark))
        for j in planned(setting)
        if j.variant == variant
    ]


def sweep_share(env, policy, kappas):  # `TableEnv` of calibration problems
    "Share of the area between the random and the oracle frontier, over cost, that thresholds recover."
    t = env.table
    unit = env.share
    curve = env.risk_curve(policy, [*kappas, 1.0])
    dearest = max(1.0, float(env.cost[:, 0].mean()))
    random = random_frontier(t, env.on_escalate, cost=env.unit)
    oracle = oracle_frontier(t, env.on_escalate, env.unit)
    spent = np.linspace(float(env.cost[:, -1].mean()), dearest, 401)

    def line(cost, accuracy):
        order = np.argsort(cost, kind='stable')
        return np.interp(spent, np.asarray(cost)[order], np.asarray(accuracy)[order])

    chance, best = (line(f['cost'] / unit, f['accuracy']) for f in (random, oracle))
    return float((line(curve['cost'], curve['right']) - chance).sum() / (best - chance).sum())


def choices_table(
    setting, benchmarks
):  # -> data frame by benchmark and variant; means over the seeds
    "What every way of training comes to on calibration problems; frozen and collapsed are numbers of runs."
    import pandas as pd

    rows = []
    for b, job in [
        (b, j) for b in benchmarks for j in planned(setting) if j.variant not in PER_STEP
    ]:
        folder = job.folder(setting.files.policies(b))
        policy = load_policy(folder)
        log = pd.read_csv(folder / 'log.csv')
        c = policy.config
        on = job.on_escalate
        env = TableEnv(
            read_table(setting, b, 'calibration'), job.features, on, setting.unit, policy.scaler
        )
        deployed = env.deploy(policy, c['online'])
        escalated = (deployed['stop'].numpy() < env.table.n_steps).mean()
        rows.append(
            dict(
                benchmark=b,
                variant=job.variant,
                runs=1,
                share=sweep_share(env, policy, c['sweep']),
                cost=c['calibration']['cost'],
                online=deployed['cost'].mean(),
                lost=c['calibration']['large'] - deployed['right'].mean(),
                frozen=int(not log['accepted'].tail(max(1, len(log) // 5)).any()),
                collapsed=int(not 0.01 < escalated < 0.99),
            )
        )
    how = dict(
        runs='sum',
        share='mean',
        cost='mean',
        online='mean',
        lost='mean',
        frozen='sum',
        collapsed='sum',
    )
    return pd.DataFrame(rows).groupby(['benchmark', 'variant'], sort=False).agg(how).round(3)


_LABELS = {'append': 'Ours', 'append-full': 'Ours (full)'}  # of the rows whose training is drawn


def training_curves(
    setting, benchmarks
):  # DataFrame: row, benchmark, step; cost, lost, kappa, each with _min and _max
    "Training of the rows Ours: mean and range over the seeds, running mean of 5 steps."
    import pandas as pd

    def curves(variant, b):
        logs = [pd.read_csv(f / 'log.csv', index_col='step') for f in _folders(setting, b, variant)]
        seeds = pd.concat(
            [log[['cost', 'lost', 'kappa']].rolling(5, min_periods=1).mean() for log in logs]
        )
        ends = seeds.groupby(level='step').agg(['mean', 'min', 'max'])
        ends.columns = [name + f'_{end}' * (end != 'mean') for name, end in ends.columns]
        s = setting.run.config.policy
        n = len(read_table(setting, b, 'train'))
        names = dict(
            row=_LABELS[variant],
            benchmark=b,
            seeds=len(logs),
            batch=min(s.batch or n, n),
            alpha=s.alpha,
        )
        return ends.reset_index().assign(**names)

    return pd.concat([curves(v, b) for v in _LABELS for b in benchmarks], ignore_index=True)


def _surface(policy, table, steps):  # [step index, percentile]
    "pi(escalate) by step index and percentile of score_prob; other features at their median, not final."
    rows = table.obs[~np.isnan(table.obs).any(-1)]
    column = table.features.index
    score = column('score_prob')
    grid = np.tile(np.median(rows, 0), (len(steps), 60, 1))
    grid[..., column('final')] = 0.0
    grid[..., score] = np.quantile(rows[:, score], np.linspace(0.01, 0.99, 60))
    grid[..., column('index')] = np.array(steps)[:, None]
    return decider(policy)(policy_inputs(grid, table.features, policy.features))[..., 1]


def policy_curves(
    setting, benchmarks
):  # DataFrame: row, benchmark, step, percentile, escalate, kappa
    "Where the first full policy of every benchmark escalates."
    import pandas as pd

    out = []
    variant = 'append-full'
    for b in benchmarks:
        policy = load_policy(_folders(setting, b, variant)[0])
        table = read_table(setting, b, 'train')
        steps = range(min(5, table.n_steps.max()))
        out += [
            dict(
                row=_LABELS[variant],
                benchmark=b,
                step=t,
                percentile=x,
                escalate=y,
                kappa=policy.kappa,
            )
            for t, line in zip(steps, _surface(policy, table, steps))
            for x, y in zip(np.linspace(1, 99, 60), line)
        ]
    return pd.DataFrame(out)
