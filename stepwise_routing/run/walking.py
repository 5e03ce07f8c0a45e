"""Runs the methods that walk, in several processes: which problems are walked together, and joining the results.

Here belongs chapter 04b for a whole run. How processes start and end belongs in `run.workers`, what a benchmark needs
in `run.stages`, the results of a method in `method.comparison`.
"""

import math
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain

import numpy as np

from ..store import RolloutStore
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
from .config import Run
from .drawing import Part, is_shared
from .stages import (
    answer_stores,
    compare_walks,
    count_problems,
    open_answers,
    open_backends,
    open_cases,
    open_run_grader,
    open_tree,
    read_table,
    read_walked,
    reward_model,
    save_case,
    shows_curves,
    walk_cases,
    walking_methods,
    walking_routers,
    with_answers,
)
from .workers import follow, one_round, worker_count

PART = 30  # problems that a process walks at a time


# ---- what a job does, in any process: a function of a run, the models' opener and the job's own arguments


def walk_whole(run: Run, opener, benchmarks: list) -> list:  # of `Case`s
    "Compare all methods on some benchmarks, and save the results."
    cases = {b: open_cases(run, b) for b in benchmarks}
    every = [case for of_benchmark in cases.values() for case in of_benchmark]
    for case in every:
        replay_case(case)
    with open_run_grader(run) as grade, reward_model(run) as prm, opener(run) as backends:
        for of_benchmark in cases.values():
            walk_cases(run, of_benchmark, backends, grade, prm)
            for case in of_benchmark:
                save_case(run, case)
    return [grids_alone(case) for case in every]


def grids_alone(case: Case) -> Case:
    "A case without its large parts: the grids remain."
    return replace(case, tables={}, policies=[], rows=[], singles=[], samples=None, points=[])


@contextmanager
def open_part(run: Run, opener, benchmark: str):  # (tree, answers)
    "Open the tree of a benchmark and the stores of verdicts, on stores that were lent to this process."
    with (
        open_run_grader(run) as grade,
        reward_model(run) as prm,
        opener(run) as backends,
        open_tree(run, benchmark, backends, grade, lent=True) as tree,
        open_answers(run, benchmark, backends, prm, lent=True) as answers,
    ):
        yield tree, answers


def ask_part(run: Run, opener, part: Part, routers: list) -> list:
    "[The routers' scores of the part's small calibration chains, see `asked_scores`]. TRIM's rewards are stored."
    problems = part.problems(run)
    with open_part(run, opener, part.benchmark) as (tree, answers):
        ready = [with_answers(router, answers) for router in routers]
        if needs_all_rewards(run):
            for split in SPLITS:
                table = read_table(run, part.benchmark, split)
                rows = np.isin(table.problem_id, [p.id for p in problems[split]])
                if rows.any():
                    reward_table(take_rows(table, rows), problems[split], tree, ready[-1])
        return [[asked_scores(router, problems['calibration'], tree) for router in ready]]


def walk_part(run: Run, opener, part: Part, split: str, routers: list) -> list:
    "[Outcomes of the routers on the part's problems of one split]."
    problems = part.problems(run)[split]
    with open_part(run, opener, part.benchmark) as (tree, answers):
        wanted = [(with_answers(router, answers), problems) for router in routers]
        return [walk_outcomes(wanted, tree)]


def end_cases(run: Run, opener, cases: list, methods: list, walked: list) -> list:
    "The cases of a benchmark with the results of `walked`, the `done` of a `Walker`. They are saved."
    benchmark = cases[0].benchmark
    with ExitStack() as stack:
        tree = stack.enter_context(open_tree(run, benchmark))
        walker = Walker(read_walked(run, cases[0]), tree)
        walker.done = walked
        rsd = None
        if needs_all_rewards(run):
            path = run.files.replies(benchmark, f'{RSD.kind}s')
            store = RolloutStore(path, readonly=True, record=RSD.record)
            rsd = RSD(stack.enter_context(store))
        for case in cases:
            replay_case(case)
            compare_walks(run, case, methods, walker, rsd)
            save_case(run, case)
    return [grids_alone(case) for case in cases]


def needs_all_rewards(run: Run) -> bool:
    "Does TRIM run? It learns from the rewards of all small chains."
    return bool(run.config.baselines.reward_model)


# ---- what follows what


def walk_parts(run: Run, case: Case, split: str = '') -> list:  # of `Part`s
    "The parts of a benchmark, of about `PART` problems of a split, or of all splits for ''."
    n = len(case.tables[split]) if split else count_problems(run, case.benchmark)
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


def walk_in_parts(run: Run, benchmark: str):
    "A course of `run.workers`: the walks of a benchmark in parts, with the decisions between that need all parts."
    cases = open_cases(run, benchmark)
    first = cases[0]
    read_walked(run, first)
    routers = walking_routers(run)
    asked = []
    if routers:
        answers = yield [(run, ask_part, part, routers) for part in walk_parts(run, first)]
        asked = [list(chain(*scores)) for scores in zip(*chain(*answers))]
    methods = walking_methods(routers, asked)
    walker = Walker({}, None)
    wanted = walks_of(methods, 'calibration')
    walker.keep(wanted, (yield from walk_side_by_side(run, first, wanted)))
    shown = [set() for _ in methods]  # thresholds of each method that any unit of cost shows
    for case in cases:
        for all_shown, thresholds in zip(
            shown, choose_walks(case, methods, walker, shows_curves(run))[1]
        ):
            all_shown |= thresholds
    wanted = walks_of(methods, 'test', shown)
    walker.keep(wanted, (yield from walk_side_by_side(run, first, wanted)))
    yield [(run, end_cases, cases, methods, walker.done)]


def walk_side_by_side(run: Run, case: Case, wanted: list):  # (router, split) pairs
    "One round of walks, all on one split. Returns their outcomes."
    if not wanted:
        return []
    routers = [router for router, _ in wanted]
    split = wanted[0][1]
    parts = walk_parts(run, case, split)
    answers = yield [(run, walk_part, part, split, routers) for part in parts]
    return [whole_outcome(outcomes) for outcomes in zip(*chain(*answers))]


# ---- a whole run


@contextmanager
def lent_to_walk(run: Run, opener):
    """During a `with` block, hold the right to write to all stores that the walks of a run use, and lend it.

    The processes that walk write to the stores like those that draw, see `run.drawing`.
    """
    with ExitStack() as stores:
        with opener(run) as backends, reward_model(run) as prm:
            for b in run.benchmarks:
                stores.enter_context(RolloutStore(run.files.rollouts(b)))
                for _, _, path, settings, record in answer_stores(run, b, backends, prm):
                    stores.enter_context(RolloutStore(path, settings, record=record))
        yield


def walk_courses(run: Run, workers: int) -> list:  # of generators, see `run.workers`
    "The courses of a run: divided by problem, by benchmark, or not at all."
    if workers > 1 and is_shared(run):
        return [walk_in_parts(run, b) for b in run.benchmarks]
    if workers > 1 and not run.is_paid:
        return [one_round([(run, walk_whole, [b])]) for b in run.benchmarks]
    return [one_round([(run, walk_whole, run.benchmarks)])]


def job_size(run: Run, task, first, *details) -> int:
    "The number of problems that a job walks or asks about."
    if task is walk_whole:
        return sum(count_problems(run, b) for b in first)
    if task is walk_part:
        return len(first.problems(run)[details[0]])
    return first.count(run) if task is ask_part else 0


def walk_all(
    run: Run,
    opener=open_backends,  # run -> its models, for the time of a `with` block
) -> list:  # a `Case` per benchmark and unit of cost, with nothing but its grids
    "Compare all methods of a run, in `models.workers` processes, and save the results."

    def work(run, task, *details):
        return task(run, opener, *details)

    workers = worker_count(run)
    lent = lent_to_walk(run, opener) if workers > 1 and is_shared(run) else nullcontext()
    with lent:
        return follow(run, work, 'walks', walk_courses(run, workers), job_size, workers)
