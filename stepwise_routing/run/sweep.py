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
from ..util import digest, note_progress
from ..method.cpo import TableEnv
from ..method.policy import FULL_FEATURES, PAPER_FEATURES, Policy
from ..method.training import fit, training_key
from .config import Run
from .stages import read_table
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

# the paper's estimator, with the smallest batch of which no run froze or collapsed
SAMPLED = dict(estimator='sampled', batch=50, steps=1000)

# the paper's reading, features and estimator
AS_PAPER = ('append', PAPER_FEATURES)


def planned(run: Run) -> list:  # of `Job`s
    "The policies of a run on each benchmark, by variant and seed."
    config = run.config
    sweep = config.sweep
    alpha = config.policy.alpha
    seeds = [config.seed + i for i in range(sweep.seeds)]
    jobs = []
    for variant, options in VARIANTS.items():
        jobs += [Job(variant, *options, config.policy, seed, alpha) for seed in seeds]
    if sweep.as_paper:
        steps = min(SAMPLED['steps'], sweep.most_steps)
        training = replace(config.policy, **SAMPLED | dict(steps=steps))
        jobs += [Job('as_paper', *AS_PAPER, training, seed, alpha) for seed in seeds]
    return jobs


def fit_job(
    run: Run,
    benchmark: str,
    job: Job,
) -> dict:  # config.json
    "Train one policy, or find it in the store. A batch is never larger than the number of problems."
    unit = run.units[0]
    splits = ('train', 'calibration')
    table, held_out_table = (read_table(run, benchmark, split) for split in splits)
    batch = job.training.batch
    training = replace(job.training, batch=batch and min(batch, len(table)))
    job = replace(job, training=training)
    env = TableEnv(table, job.features, job.on_escalate, unit)
    held_out = TableEnv(held_out_table, job.features, job.on_escalate, unit, env.scaler)
    files = [run.files.outcomes(benchmark, split) for split in splits]
    inputs = [digest(file.read_bytes().hex()) for file in files]
    folder = job.folder(run.store / 'policies' / benchmark)
    with warnings.catch_warnings():
        # `out_of_reach` says it once for all seeds
        warnings.filterwarnings('ignore', 'alpha=.* is out of reach')
        config = fit(
            env,
            held_out,
            folder,
            job.training,
            job.seed,
            alpha=job.alpha,
            key=training_key(inputs, unit, asdict(job)),
            variant=job.variant,
            benchmark=benchmark,
            params=table.params,
            unit=unit,
            version=__version__,
        )
    shutil.copytree(folder, job.folder(run.files.policies(benchmark)), dirs_exist_ok=True)
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


def left_out(run: Run, benchmark: str) -> str | None:
    "The reason why no policy can be trained on a benchmark. None if one can."
    try:
        TableEnv(read_table(run, benchmark, 'train'), unit=run.units[0])
    except ValueError as e:
        return str(e)


def job_size(run: Run, benchmark: str, job: Job) -> int:
    "The amount of work for a policy: steps times problems, plus a constant per step."
    n = len(read_table(run, benchmark, 'train'))
    return job.training.steps * (100 + min(job.training.batch or n, n))


def table_jobs(run: Run) -> list:  # of (run, benchmark, job)
    "The policies of a run."
    jobs = []
    for benchmark in run.benchmarks:
        if not left_out(run, benchmark):
            jobs += [(run, benchmark, job) for job in planned(run)]
    return jobs


def fit_tables(
    run: Run,  # with outcome tables
) -> list:  # config.json of each policy
    "Train all policies, side by side. Each is saved when it is done."
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
