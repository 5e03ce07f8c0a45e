"""Runs the methods that walk, in several processes: which problems are walked together, and joining the results.

Here belongs chapter 04b for a whole run. How processes start and end belongs in `run.workers`, what a benchmark needs
in `run.stages`, the results of a method in `method.comparison`.
"""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np

from ..base.store import RolloutStore
from ..data.sources import SPLITS
from ..method.comparison import (
    Case,
    Walker,
    asked_scores,
    choose_walks,
    replay_case,
    walks_of,
)
from ..method.outcomes import take_rows, walk_outcomes
from ..method.routers import RSD, reward_table
from .config import Run, Setting
from .drawing import Part, is_shared
from .stages import (
    answer_stores,
    compare_walks,
    count_problems,
    open_answers,
    open_backends,
    open_case,
    open_run_grader,
    open_tree,
    read_table,
    read_walked,
    reward_model,
    save_case,
    shows_curves,
    walk_case,
    walking_methods,
    walking_routers,
    with_answers,
)
from .workers import follow, one_round, worker_count

PART = 30  # problems that a process walks at a time


# ---- what a job does, in any process: a function of a setting, the models' opener and the job's own arguments


def walk_whole(setting: Setting, opener, benchmarks: list) -> list:  # of `Case`s
    "Compare all methods on some benchmarks, and save the results."
    cases = [open_case(setting, b) for b in benchmarks]
    for case in cases:
        replay_case(case)
    with (
        open_run_grader(setting.run) as grade,
        reward_model(setting.run) as prm,
        opener(setting) as backends,
    ):
        for case in cases:
            walk_case(setting, case, backends, grade, prm)
            save_case(setting, case)
    return [grids_alone(case) for case in cases]


def grids_alone(case: Case) -> Case:
    "A case without its large parts: the grids remain."
    return replace(case, tables={}, policies=[], rows=[], singles=[], samples=None, points=[])


@contextmanager
def open_part(setting: Setting, opener, benchmark: str):  # (tree, answers)
    "Open the tree of a benchmark and the stores of verdicts, on stores that were lent to this process."
    with (
        open_run_grader(setting.run) as grade,
        reward_model(setting.run) as prm,
        opener(setting) as backends,
        open_tree(setting, benchmark, backends, grade, lent=True) as tree,
        open_answers(setting, benchmark, backends, prm, lent=True) as answers,
    ):
        yield tree, answers


def ask_part(setting: Setting, opener, part: Part, routers: list) -> list:
    "[The routers' scores of the part's small calibration chains, see `asked_scores`]. TRIM's rewards are stored."
    problems = part.problems(setting)
    with open_part(setting, opener, part.benchmark) as (tree, answers):
        ready = [with_answers(router, answers) for router in routers]
        if needs_all_rewards(setting):
            for split in SPLITS:
                table = read_table(setting, part.benchmark, split)
                rows = np.isin(table.problem_id, [p.id for p in problems[split]])
                if rows.any():
                    reward_table(take_rows(table, rows), problems[split], tree, ready[-1])
        return [[asked_scores(router, problems['calibration'], tree) for router in ready]]


def walk_part(setting: Setting, opener, part: Part, split: str, routers: list) -> list:
    "[Outcomes of the routers on the part's problems of one split]."
    problems = part.problems(setting)[split]
    with open_part(setting, opener, part.benchmark) as (tree, answers):
        wanted = [(with_answers(router, answers), problems) for router in routers]
        return [walk_outcomes(wanted, tree)]


def end_case(setting: Setting, opener, case: Case, methods: list, walked: list) -> list:
    "[The case] with the results of `walked`, the `done` of a `Walker`. The case is saved."
    replay_case(case)
    with ExitStack() as stack:
        run = Walker(
            read_walked(setting, case), stack.enter_context(open_tree(setting, case.benchmark))
        )
        run.done = walked
        rsd = None
        if needs_all_rewards(setting):
            path = setting.files.replies(case.benchmark, f'{RSD.kind}s')
            store = RolloutStore(path, readonly=True, record=RSD.record)
            rsd = RSD(stack.enter_context(store))
        compare_walks(setting, case, methods, run, rsd)
    save_case(setting, case)
    return [grids_alone(case)]


def needs_all_rewards(setting: Setting) -> bool:
    "Does TRIM run? It learns from the rewards of all small chains."
    baselines = setting.run.config.baselines
    return bool(baselines.reward_model and baselines.trim)


# ---- what follows what


def walk_parts(setting: Setting, case: Case, split: str = '') -> list:  # of `Part`s
    "The parts of a benchmark, of about `PART` problems of a split, or of all splits for ''."
    n = len(case.tables[split]) if split else count_problems(setting, case.benchmark)
    parts = math.ceil(n / PART)
    return [Part(case.benchmark, i, parts) for i in range(parts)]


def in_order(parts: list) -> np.ndarray:
    "Join the values [problem] of the parts of a benchmark, in the order of its problems."
    n = sum(map(len, parts))
    places = np.concatenate([np.arange(n)[i :: len(parts)] for i in range(len(parts))])
    return np.concatenate(parts)[np.argsort(places)]


def whole_outcome(parts: list) -> dict:
    "Join the outcomes of a router on all parts."
    return {name: in_order([part[name] for part in parts]) for name in parts[0]}


def walk_in_parts(setting: Setting, benchmark: str):
    "A course of `run.workers`: the walks of a benchmark in parts, with the decisions between that need all parts."
    case = open_case(setting, benchmark)
    read_walked(setting, case)
    routers = walking_routers(setting)
    asked = []
    if routers:
        answers = yield [(setting, ask_part, part, routers) for part in walk_parts(setting, case)]
        asked = [list(chain(*scores)) for scores in zip(*chain(*answers))]
    methods = walking_methods(routers, asked)
    run = Walker({}, None)
    wanted = walks_of(methods, 'calibration')
    run.keep(wanted, (yield from walk_side_by_side(setting, case, wanted)))
    shown = choose_walks(case, methods, run, shows_curves(setting))[1]
    wanted = walks_of(methods, 'test', shown)
    run.keep(wanted, (yield from walk_side_by_side(setting, case, wanted)))
    yield [(setting, end_case, case, methods, run.done)]


def walk_side_by_side(setting: Setting, case: Case, wanted: list):  # (router, split) pairs
    "One round of walks, all on one split. Returns their outcomes."
    if not wanted:
        return []
    routers = [router for router, _ in wanted]
    split = wanted[0][1]
    parts = walk_parts(setting, case, split)
    answers = yield [(setting, walk_part, part, split, routers) for part in parts]
    return [whole_outcome(outcomes) for outcomes in zip(*chain(*answers))]


# ---- a whole run


@contextmanager
def lent_to_walk(setting: Setting, opener):
    """During a `with` block, hold the right to write to all stores that the walks of a setting use, and lend it.

    The processes that walk write to the stores like those that draw, see `run.drawing`.
    """
    with ExitStack() as stores:
        with opener(setting) as backends, reward_model(setting.run) as prm:
            for b in setting.benchmarks:
                stores.enter_context(RolloutStore(setting.files.rollouts(b)))
                for _, _, path, settings, record in answer_stores(setting, b, backends, prm):
                    stores.enter_context(RolloutStore(path, settings, record=record))
        yield


def walk_courses(setting: Setting, workers: int) -> list:  # of generators, see `run.workers`
    "The courses of a setting: divided by problem, by benchmark, or not at all."
    if workers > 1 and is_shared(setting):
        return [walk_in_parts(setting, b) for b in setting.benchmarks]
    if workers > 1 and setting.name == 'open':
        return [one_round([(setting, walk_whole, [b])]) for b in setting.benchmarks]
    return [one_round([(setting, walk_whole, setting.benchmarks)])]


def job_size(setting: Setting, task, first, *details) -> int:
    "The number of problems that a job walks or asks about."
    if task is walk_whole:
        return sum(count_problems(setting, b) for b in first)
    if task is walk_part:
        return len(first.problems(setting)[details[0]])
    return first.count(setting) if task is ask_part else 0


def walk_all(
    run: Run,
    opener=open_backends,  # setting -> its models, for the time of a `with` block
) -> list:  # a `Case` per setting and benchmark, with nothing but its grids
    "Compare all methods of a run, in `models.workers` processes, and save the results."

    def work(setting, task, *details):
        return task(setting, opener, *details)

    workers = worker_count(run)
    courses = []
    with ExitStack() as stack:
        for setting in run.settings:
            courses += walk_courses(setting, workers)
            if workers > 1 and is_shared(setting):
                stack.enter_context(lent_to_walk(setting, opener))
        return follow(run, work, 'walks', courses, job_size, workers)
