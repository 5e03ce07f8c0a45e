"""The policies that a run trains, from its settings, and their training

Here belongs the way from the settings of a run to policies on disk. Training one policy belongs in
`method.training`. Tables and curves of the training belong in `run.training_report`.
"""

import shutil
import warnings
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from .. import __version__
from ..base.tools import digest, note_progress
from ..method.cpo import TableEnv
from ..method.policy import FULL_FEATURES, PAPER_FEATURES, Policy
from ..method.training import TreeEnv, fit, training_key
from .config import Config, Run, Setting
from .stages import open_backends, open_run_grader, open_tree, read_problems, read_table
from .workers import in_processes


@dataclass(frozen=True)
class Job:
    "One policy to train."

    variant: str  # its name in folders and tables
    on_escalate: str  # "append" or "regenerate"
    features: tuple  # names of the features that the policy sees
    training: Policy  # hyper-parameters of its training
    seed: int  # of its weights, batches and actions
    alpha: float  # accuracy that its calibration may lose; the same for all rows

    def folder(self, root) -> Path:
        "Its folder inside a folder of policies."
        return Path(root) / self.variant / f'alpha{self.training.alpha:g}-seed{self.seed}'


VARIANTS = {  # name -> what an escalation does, and what the policy sees
    'append-prob': ('append', ('score_prob',)),
    'append-logit': ('append', ('score_logit',)),
    'append': ('append', PAPER_FEATURES),
    'append-full': ('append', FULL_FEATURES),
    'regenerate-prob': ('regenerate', ('score_prob',)),
    'regenerate-logit': ('regenerate', ('score_logit',)),
    'regenerate': ('regenerate', PAPER_FEATURES),
    'regenerate-full': ('regenerate', FULL_FEATURES),
}

PER_STEP = {'per_step': ('append', PAPER_FEATURES), 'per_step-full': ('regenerate', FULL_FEATURES)}

PAPER = dict(estimator='sampled', batch=5, steps=1000)

# the paper's estimator, with the smallest batch of which no run froze or collapsed
SAMPLED = PAPER | dict(batch=50)

# the paper's reading, features and estimator
AS_PAPER = ('append', PAPER_FEATURES)

# one change each to the training of regenerate-full;
# "no-FEATURE" changes what it sees
ABLATIONS = {
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
    'exact-50': dict(estimator='exact', batch=50, steps=300),
    'four-layers': dict(hidden=(64, 64, 64)),
    **{f'no-{feature}': {} for feature in FULL_FEATURES},
}


def _changed_training(config: Config, changes: dict) -> Policy:
    "The hyper-parameters of a run with some changed. The number of steps is capped."
    training = replace(config.policy, **changes)
    if 'steps' in changes:
        training = replace(training, steps=min(training.steps, config.sweep.most_steps))
    return training


def _ablation(name, config, seed) -> Job:  # key of `ABLATIONS`
    return Job(
        variant=f'ablation-{name}',
        on_escalate='regenerate',
        features=tuple(feature for feature in FULL_FEATURES if name != f'no-{feature}'),
        training=_changed_training(config, ABLATIONS[name]),
        seed=seed,
        alpha=config.policy.alpha,
    )


def _per_step_training(config: Config) -> Policy:
    "The hyper-parameters of per-step policies, which may return to the small model: few live walks."
    sweep = config.sweep
    batch = min(sweep.per_step_batch, sweep.per_step_problems)
    return replace(config.policy, estimator='sampled', steps=sweep.per_step_steps, batch=batch)


def planned(setting: Setting) -> list:  # of `Job`s
    """The policies of a setting, by variant and seed. The open setting also has policies trained as in
    the paper, ablations, and per-step policies."""
    config = setting.run.config
    sweep = config.sweep
    alpha = config.policy.alpha
    is_open = setting.name == 'open'
    seeds = [config.seed + i for i in range(sweep.seeds if is_open else sweep.api_seeds)]
    jobs = []
    for variant, options in VARIANTS.items():
        jobs += [Job(variant, *options, config.policy, seed, alpha) for seed in seeds]
    if is_open and sweep.as_paper:
        training = _changed_training(config, SAMPLED)
        jobs += [Job('as_paper', *AS_PAPER, training, seed, alpha) for seed in seeds]
    if is_open and sweep.ablations:
        options = VARIANTS['regenerate']
        sampled = _changed_training(config, SAMPLED)
        jobs += [Job('sampled', *options, sampled, seed, alpha) for seed in seeds]
        for name in ABLATIONS:
            for i in range(sweep.ablation_seeds):
                jobs.append(_ablation(name, config, config.seed + i))
    if is_open and sweep.per_step:
        training = _per_step_training(config)
        for i in range(sweep.per_step_seeds):
            for variant, options in PER_STEP.items():
                jobs.append(Job(variant, *options, training, config.seed + i, alpha))
    return jobs


def _walked(setting, tree, env, held_out):
    """The environments of two tables as live walks on fewer problems, and the further parts of the
    policy's key in the store."""
    n = setting.run.config.sweep.per_step_problems
    sizes = dict(train=min(n, len(env)), calibration=min(2 * n, len(held_out)))
    envs = []
    names = []
    for split, size in sizes.items():
        problems = read_problems(setting, tree.benchmark, split, size)
        names.append([(problem.benchmark, problem.id) for problem in problems])
        walks = TreeEnv(problems, tree, env.scaler, 'per_step', env.on_escalate, setting.unit)
        envs.append(walks)
    observations = digest(env.table.obs.tobytes().hex())
    return envs, (names, tree.store.settings, observations)


def fit_job(
    setting: Setting,
    benchmark: str,
    job: Job,
    tree=None,  # `RoutingTree` to walk; None: outcome tables
) -> dict:  # config.json
    "Train one policy, or find it in the store. A batch is never larger than the number of problems."
    splits = ('train', 'calibration')
    table, held_out_table = (read_table(setting, benchmark, split) for split in splits)
    batch = job.training.batch
    training = replace(job.training, batch=batch and min(batch, len(table)))
    job = replace(job, training=training)
    env = TableEnv(table, job.features, job.on_escalate, setting.unit)
    held_out = TableEnv(held_out_table, job.features, job.on_escalate, setting.unit, env.scaler)
    if tree:
        envs, inputs = _walked(setting, tree, env, held_out)
    else:
        envs = (env, held_out)
        files = [setting.files.outcomes(benchmark, split) for split in splits]
        inputs = [[digest(file.read_bytes().hex()) for file in files]]
    folder = job.folder(setting.store / 'policies' / benchmark)
    with warnings.catch_warnings():
        # `out_of_reach` says it once for all seeds
        warnings.filterwarnings('ignore', 'alpha=.* is out of reach')
        config = fit(
            *envs,
            folder,
            job.training,
            job.seed,
            alpha=job.alpha,
            key=training_key(*inputs, setting.unit, asdict(job)),
            variant=job.variant,
            benchmark=benchmark,
            params=table.params,
            unit=setting.unit,
            version=__version__,
        )
    shutil.copytree(folder, job.folder(setting.files.policies(benchmark)), dirs_exist_ok=True)
    return config


def out_of_reach(
    configs: list,  # config.json of each policy
) -> list:  # of lines
    "A line per benchmark whose constraint is out of reach: no fixed step of handing over keeps it."
    lines = []
    for config in configs:
        if config['least'] > config['alpha'] + 1e-9:
            where = f'{config["benchmark"]}, {config["on_escalate"]}'
            problems = f'{config["n_train"]} training problems'
            least = f'the best fixed time of escalating comes to {100 * config["least"]:.1f} points'
            lines.append(
                f'{where}: alpha={config["alpha"]:g} is out of reach on the {problems}; {least}'
            )
    return list(dict.fromkeys(lines))


def left_out(setting: Setting, benchmark: str) -> str | None:
    "The reason why no policy can be trained on a benchmark. None if one can."
    try:
        TableEnv(read_table(setting, benchmark, 'train'), unit=setting.unit)
    except ValueError as e:
        return str(e)


def job_size(setting: Setting, benchmark: str, job: Job) -> int:
    "The amount of work for a policy: steps times problems, plus a constant per step."
    n = len(read_table(setting, benchmark, 'train'))
    return job.training.steps * (100 + min(job.training.batch or n, n))


def table_jobs(run: Run) -> list:  # of (setting, benchmark, job)
    "The policies of a run that are trained on outcome tables."
    jobs = []
    for setting in run.settings:
        for benchmark in setting.benchmarks:
            if not left_out(setting, benchmark):
                for job in planned(setting):
                    if job.variant not in PER_STEP:
                        jobs.append((setting, benchmark, job))
    return jobs


def fit_tables(
    run: Run,  # with outcome tables
) -> list:  # config.json of each policy
    """Train all policies that are trained on outcome tables, side by side. Each is saved when it is
    done."""
    from tqdm.auto import tqdm

    jobs = table_jobs(run)
    numbers = count(1)
    with tqdm(desc='policies', total=len(jobs), disable=None) as bar:

        def ended():
            bar.update()
            note_progress(f'policies: {next(numbers):,} of {len(jobs):,}')

        configs = in_processes(fit_job, jobs, run.config.sweep.workers, job_size, ended)
    for line in out_of_reach(configs):
        print(line)
    return configs


def fit_trees(
    run: Run,  # with outcome tables of its open setting
) -> list:  # config.json of each policy
    "Train the per-step policies of a run, if it has any. It opens the models."
    setting = Setting(run, 'open')
    jobs = [job for job in planned(setting) if job.variant in PER_STEP]
    if not jobs or not setting.models:
        return []
    benchmarks = [b for b in setting.benchmarks if not left_out(setting, b)]
    if not benchmarks:
        return []
    configs = []
    with open_run_grader(setting.run) as grade, open_backends(setting) as backends:
        for benchmark in benchmarks:
            with open_tree(setting, benchmark, backends, grade) as tree:
                configs += [fit_job(setting, benchmark, job, tree) for job in jobs]
    return configs
