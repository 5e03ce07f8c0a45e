"""The two pools of problems, hopeless and solvable, and every outcome of the micro pair on them.

Here belongs what is drawn once for all cells. How a cell is put together belongs in `cells`.
"""

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
from micro_world.drafts import as_problem, micro_drafts

from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.base.tools import run_async, write_file
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.data.steps import first_wrong
from stepwise_routing.method.outcomes import OutcomeTable, outcome_table
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.models.names import open_models
from stepwise_routing.run.workers import in_processes

from .plan import BENCHMARK, HOPELESS, MODELS, SOLVABLE, Folders, Plan

PART = 60  # problems that a process draws at a time

# ---- problems


def pool(
    split: str,
    levels: tuple,  # those that are drawn, each as likely as the others
    n: int,
    seed: int,
) -> list:  # of `Problem`s
    "New problems of some levels: no question twice, and none that the package ships."
    shipped = {problem.question for s in SPLITS for problem in load_problems(BENCHMARK, s)}
    weights = [int(level in levels) for level in range(1, 7)]
    rng = random.Random(f'worth/{split}/{levels}/{seed}')
    problems = {}
    for draft in micro_drafts(BENCHMARK, split, rng, weights):
        if len(problems) >= n:
            return list(problems.values())
        if draft.question not in shipped and draft.question not in problems:
            problems[draft.question] = as_problem(BENCHMARK, draft)


def pools(plan: Plan, split: str) -> list:  # of `Problem`s
    "The hopeless problems of a split, then the solvable ones."
    n_hopeless, n_solvable = plan.pool_sizes(split)
    seed = plan.problem_seed
    return pool(split, (HOPELESS,), n_hopeless, seed) + pool(split, SOLVABLE, n_solvable, seed)


# ---- what the models write


def parts_of(plan: Plan) -> list:  # of (split, first, every)
    "All problems in parts of about `PART`."
    parts = []
    for split in SPLITS:
        every = -(-sum(plan.pool_sizes(split)) // PART)
        parts += [(split, first, every) for first in range(every)]
    return parts


def draw_part(plan: Plan, folders: Folders, split: str, first: int, every: int) -> None:
    "Draw every so-many-th problem of a split; what the store holds is not drawn again."
    problems = pools(plan, split)[first::every]
    redraws = 0 if split == 'train' else plan.redraws
    with open_models(MODELS) as backends, RolloutStore(folders.draws, lent=True) as store:
        tree = RoutingTree(backends, store)
        collect_rollouts(problems, tree, redraws=redraws, part=f', {split}')


def draw_pools(plan: Plan, folders: Folders, workers: int) -> None:
    "Draw all that the outcome tables of the pools need."
    from tqdm.auto import tqdm

    parts = parts_of(plan)
    with open_models(MODELS) as backends:
        settings = tree_settings(BENCHMARK, backends)
    with (
        RolloutStore(folders.draws, settings),
        tqdm(desc='problems drawn, in parts', total=len(parts), disable=None) as bar,
    ):
        in_processes(partial(draw_part, plan, folders), parts, workers, ended=bar.update)


# ---- outcome tables


@dataclass(frozen=True)
class Pools:
    "The problems of a split with all their outcomes, hopeless ones first."

    table: OutcomeTable
    first_wrong: np.ndarray  # int [problem], the small chain's first wrong step; -1: none is


def read_pools(folders: Folders, split: str) -> Pools:
    "What `save_pools` saved."
    return Pools(OutcomeTable.load(folders.table(split)), np.load(folders.first_wrong(split)))


def save_array(path, values: np.ndarray) -> None:
    import io

    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    write_file(path, file.getvalue())


def save_pools(plan: Plan, folders: Folders, split: str) -> None:
    "Read the outcomes of a split off the store."
    problems = pools(plan, split)
    redraws = 0 if split == 'train' else plan.redraws
    with RolloutStore(folders.draws, readonly=True) as store:
        tree = RoutingTree(None, store)
        table = outcome_table(problems, tree, split, redraws=redraws)
        wrong = [first_wrong(p, run_async(tree.run(p, '', 0))) for p in problems]
    save_array(folders.first_wrong(split), np.array(wrong))
    table.save(folders.table(split))


def make_pools(plan: Plan, folders: Folders, workers: int) -> None:
    "Draw the pools and save their outcome tables, unless they are there."
    missing = [(split,) for split in SPLITS if not folders.table(split).is_file()]
    if missing:
        draw_pools(plan, folders, workers)
        in_processes(partial(save_pools, plan, folders), missing, workers)


# ---- what the pools are


def level_facts(folders: Folders):  # DataFrame: level, n, small, large, neither
    "How often each model solves the test problems of each level, and how often neither does in any draw."
    import pandas as pd

    table = read_pools(folders, 'test').table
    small = table.outcome(-1)['correct']
    columns = dict(
        level=[int(name.split('-')[1]) for name in table.problem_id],
        n=1,
        small=small,
        large=table.large_only()['correct'],
        neither=(small == 0) & (table.large_share == 0),
    )
    means = dict(n='size', small='mean', large='mean', neither='mean')
    return pd.DataFrame(columns).groupby('level').agg(means).reset_index()
