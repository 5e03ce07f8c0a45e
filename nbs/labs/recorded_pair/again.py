"""Draws recorded problems again, to see whether models still write the same: `python -m recorded_pair.again --help`.

With the seeds of the recording, a server on another machine (or with other requests beside these) may round
differently, so texts may differ; how often a model is right may differ by chance alone. `--greedy` draws at temperature
0 instead, twice: all chains at once, and one after the other. Then the texts should be equal.
"""

import argparse
import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from scipy.stats import binomtest

from stepwise_routing.base.records import step_texts
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.data.benchmarks import find_benchmark
from stepwise_routing.data.grading import is_right
from stepwise_routing.data.recorded import read_recorded
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.models.names import open_models

from .draw import PLANS


def sign_test(gained: int, lost: int) -> float:  # two-sided p-value
    "How likely is a difference as large as this one, if gains and losses are equally likely?"
    changed = gained + lost
    return float(binomtest(gained, changed).pvalue) if changed else 1.0


async def both_chains(tree: RoutingTree, problem) -> tuple:
    "What each model writes alone."
    return await asyncio.gather(tree.run(problem, '', 0), tree.run(problem, '', 1))


async def all_chains(tree: RoutingTree, problems: list) -> list:
    return await asyncio.gather(*(both_chains(tree, problem) for problem in problems))


async def each_alone(tree: RoutingTree, problems: list) -> list:
    "The same chains, one after the other."
    pairs = []
    for problem in problems:
        pairs.append([await tree.run(problem, '', model) for model in (0, 1)])
    return pairs


def draw_again(
    benchmark: str,
    problems: list,
    models: tuple,
    folder: Path,
    sample: int,  # 0 has the seeds of the recording
    draw=all_chains,  # or `each_alone`
    **options,  # in place of the plan's
) -> list:  # (small chain, large chain) of each problem
    "Both chains of recorded problems, drawn again."
    plan = PLANS[benchmark]
    record = find_benchmark(benchmark)
    as_drawn = [replace(problem, benchmark=benchmark) for problem in problems]
    with open_models(models, **plan.options | options) as backends:
        settings = tree_settings(benchmark, backends, record.draws)
        with RolloutStore(folder / f'{draw.__name__}.db', settings) as store:
            tree = RoutingTree(backends, store, sample=sample, max_steps=plan.max_steps)
            return asyncio.run(draw(tree, as_drawn))


def recorded_chains(benchmark: str, problems: list, folder: Path) -> list:
    "Both chains of recorded problems, as they were recorded."
    recorded = read_recorded(benchmark)
    recorded.fill(folder / 'recorded.db')
    with RolloutStore(folder / 'recorded.db', readonly=True) as store:
        tree = RoutingTree(None, store, max_steps=PLANS[benchmark].max_steps)
        return asyncio.run(all_chains(tree, problems))


def compare(benchmark: str, problems: list, past: list, now: list) -> Counter:
    "How many chains are equal, and how many verdicts changed in which direction."
    record = find_benchmark(benchmark)
    counts = Counter()
    for problem, old_pair, new_pair in zip(problems, past, now):
        as_drawn = replace(problem, benchmark=benchmark)
        for old, new in zip(old_pair, new_pair):
            was_right = is_right(as_drawn, record.read_answer(old))
            now_right = is_right(as_drawn, record.read_answer(new))
            counts['chains'] += 1
            counts['equal texts'] += step_texts(old) == step_texts(new)
            counts['gained'] += now_right > was_right
            counts['lost'] += now_right < was_right
    return counts


def line(what: str, counts: Counter) -> str:
    "What `compare` counted, with the sign test."
    p = sign_test(counts['gained'], counts['lost'])
    return (
        f'{what}: {counts["chains"]} chains, {counts["equal texts"]} with equal texts; '
        f'right now and not then {counts["gained"]}, then and not now {counts["lost"]}, p = {p:.2f}'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('benchmark', choices=PLANS)
    parser.add_argument('small', help='vllm-server:URL#FOLDER of the small model')
    parser.add_argument('large', help='the same of the large model')
    parser.add_argument('--problems', type=int, default=10)
    parser.add_argument('--greedy', action='store_true', help='twice at temperature 0')
    args = parser.parse_args()
    problems = read_recorded(args.benchmark).problems['train'][: args.problems]
    models = (args.small, args.large)
    folder = Path(mkdtemp())
    if args.greedy:
        together, alone = (
            draw_again(args.benchmark, problems, models, folder, 0, draw, temperature=0.0)
            for draw in (all_chains, each_alone)
        )
        print(
            line('greedy, together and alone', compare(args.benchmark, problems, together, alone))
        )
        return
    past = recorded_chains(args.benchmark, problems, folder)
    for sample, seeds in enumerate(('the same seeds', 'other seeds')):
        now = draw_again(args.benchmark, problems, models, folder, sample)
        print(line(seeds, compare(args.benchmark, problems, past, now)))


if __name__ == '__main__':
    main()
