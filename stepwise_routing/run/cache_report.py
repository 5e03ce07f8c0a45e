"""Table of prompt caches of a run's API setting: outcome tables and walks, replayed without models

Here belongs finding the routers of a run at their settings, and replaying their walks from its stores. Counting
tokens and cents, and the table itself, belong in `report.caches`.
"""

import csv
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from ..base.records import READINGS
from ..base.store import RolloutStore
from ..base.tools import gather_progress, run_async
from ..method.comparison import LARGE, NESTED, Case
from ..method.routers import AskingRouter, ScoreRouter, fit_steer
from ..method.walks import LargeOnly, walk_one
from ..report.caches import (
    cache_columns,
    cache_markdown,
    shown_settings,
    table_tokens,
    walk_tokens,
)
from ..report.writer import Report, committed, save_table
from .config import Run, Setting
from .stages import open_case, open_tree, read_problems, walking_routers

COLUMNS = 'part', 'benchmark', 'method', 'on_escalate', 'threshold', 'accuracy'  # from chapter 04b


def exact_threshold(path, near: float) -> float:  # path of a grid of chapter 04b
    "The threshold in a file that is nearest to one that pandas read from it: its last digit may be wrong."
    with open(path, newline='', encoding='utf-8') as file:
        thresholds = {float(row['threshold']) for row in csv.DictReader(file)}
    return min(thresholds - {LARGE}, key=lambda threshold: abs(threshold - near))


def baselines(
    setting: Setting, case: Case
) -> dict:  # (method, reading) -> router, at any threshold
    "The baselines of the table."
    steer = fit_steer(case.tables['train'], seed=case.seed)
    routers = walking_routers(setting, case)
    for reading in READINGS:
        routers += [ScoreRouter('score_prob', reading), replace(steer, on_escalate=reading)]
    return {(router.name, router.on_escalate): router for router in routers}


def own_routers(
    case: Case,
    classes,  # of `BenchmarkResults`
) -> dict:  # (method, reading) -> routers, one a seed
    "Our policies at their own thresholds."
    routers = {}
    for policies in case.variants(walks=False):
        group = [policy.router for policy in policies]
        routers[group[0].name, group[0].on_escalate] = group
    taken = classes[classes['taken'] == 1]
    for name in zip(taken['method'], taken['on_escalate']):
        routers[NESTED, name[1]] = routers.get(name)
    return routers


def shown_routers(setting: Setting, case: Case, part) -> list:  # as of `cache_rows`
    "(Row of `shown_settings`, its routers, one a seed) pairs. A row whose policies are gone is left out."
    own = own_routers(case, part.classes)
    others = baselines(setting, case)
    path = setting.files.methods(case.benchmark, '-grid')
    pairs = []
    for shown in shown_settings(part.results, case.alpha).to_dict('records'):
        name = shown['method'], shown['on_escalate']
        routers = own.get(name)
        if name[0] == 'Large only' or shown['threshold'] == LARGE:
            routers = [LargeOnly()]
        elif name in others:
            routers = [others[name].at(exact_threshold(path, shown['threshold']))]
        if routers:
            pairs.append((shown, routers))
    return pairs


async def tokens_of_walk(problem, router, tree) -> tuple | None:  # of `walk_tokens`
    "What the large model reads and writes in a walk. None if the stores lack a step of it."
    try:
        walk = await walk_one(problem, router, tree)
    except LookupError as error:
        if type(error) is LookupError:
            return None
        raise  # a fault of ours
    return walk_tokens(walk.calls)


def walked_tokens(
    setting: Setting,
    benchmark: str,
    routers: list,
) -> list:  # per router: the `walk_tokens` of each test problem, or None if they were not drawn
    "What the large model reads and writes in the walks of routers, replayed from the run's stores."
    if not routers or not setting.files.rollouts(benchmark).is_file():
        return [None] * len(routers)
    problems = read_problems(setting, benchmark, 'test')
    with ExitStack() as stores:
        tree = stores.enter_context(open_tree(setting, benchmark))
        ready = []
        for router in routers:
            if isinstance(router, AskingRouter):
                path = setting.files.replies(benchmark, f'{router.kind}s')
                store = RolloutStore(path, readonly=True, record=router.record)
                router = replace(router, store=stores.enter_context(store))
            ready.append(router)
        # problem by problem: the walks of a problem share most of their steps
        walks = [tokens_of_walk(problem, router, tree) for problem in problems for router in ready]
        tokens = run_async(gather_progress(walks, f'{benchmark} walks'))
    of_routers = [tokens[i :: len(routers)] for i in range(len(routers))]
    return [rows if all(rows) else None for rows in of_routers]


def cache_rows(
    setting: Setting,
    part,  # `BenchmarkResults`
):  # DataFrame, a row per method and setting
    "The rows of a benchmark. Accuracy is that of chapter 04b. Costs are nan if walks were not drawn."
    import pandas as pd

    case = open_case(setting, part.table.benchmark)
    pairs = shown_routers(setting, case, part)
    walkers = [routers[0] for _, routers in pairs if routers[0].mode == 'per_step']
    walked = iter(walked_tokens(setting, case.benchmark, walkers))
    rows = []
    for shown, routers in pairs:
        if routers[0].mode == 'per_step':
            tokens = next(walked)
        else:
            seeds = [table_tokens(router, case.tables['test']) for router in routers]
            tokens = np.concatenate(seeds)
        row = {name: shown[name] for name in COLUMNS}
        if all(router.start for router in routers):
            row['threshold'] = LARGE
        if tokens is not None:
            row |= cache_columns(tokens, setting.part.billed)
        rows.append(row)
    return pd.DataFrame(rows)


def report_caches(
    run: Run,
    results: dict,  # of `load_run`; empty: show the committed table
) -> Report:
    "Write and show the table of caches of the API setting. One line if the run has none."
    if not results:
        return committed('cache_api')
    if 'api' not in results:
        return Report('This run has no api setting.')
    setting = Setting(run, 'api')
    r = results['api']
    rows = r.whole(lambda part: cache_rows(setting, part))
    text = cache_markdown(rows, setting.part.billed, r.large)
    save_table(run.tables / f'cache{r.suffix}', rows, md=text)
    return Report(text)
