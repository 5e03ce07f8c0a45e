"""Writes what was drawn as a recorded benchmark: `python -m recorded_pair.record gsm8k STORE --help`, in nbs/labs.

The first turns are recorded whose rollouts and further draws are complete. Every answer that a replay can need is
graded; programs are run for that, confined.
"""

import asyncio
import json
from pathlib import Path

from stepwise_routing.base.store import RolloutStore
from stepwise_routing.data.benchmarks import find_benchmark
from stepwise_routing.data.grading import grade_pairs, is_right
from stepwise_routing.data.recorded import FOLDER, recorded_file, write_recorded
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.tree import RoutingTree

from .draw import PAIR, PLANS, store_parser, turns_of

MOST_TURNS = 1000


async def chains_of(tree: RoutingTree, problem, redraws: int) -> list:  # of `Step`s
    "All chains of a problem. LookupError if one was not drawn to its end."
    small, continuations = await tree.rollouts(problem)
    again = await tree.redraws(problem, redraws)
    return [small, *continuations, *again]


async def chains_of_turn(
    tree: RoutingTree, turn: list, redraws: int
) -> list:  # (split, problem, chains)
    "All chains of the problems of a turn. LookupError if one was not drawn to its end."
    found = []
    for split, problem in turn:
        chains = await chains_of(tree, problem, 0 if split == 'train' else redraws)
        found.append((split, problem, chains))
    return found


def drawn_problems(tree: RoutingTree, benchmark: str, data_dir) -> tuple:
    """(split -> problems, (problem, answer) pairs of all their chains) of the first turns that are complete.

    Nothing behind the first gap is taken: there, short chains end first, so the sample would not be fair.
    """
    read_answer = find_benchmark(benchmark).read_answer
    problems = {split: [] for split in SPLITS}
    pairs = []
    for turn in turns_of(benchmark, MOST_TURNS, data_dir):
        try:
            found = asyncio.run(chains_of_turn(tree, turn, PLANS[benchmark].redraws))
        except LookupError:
            break
        for split, problem, chains in found:
            problems[split].append(problem)
            pairs += [(problem, read_answer(chain)) for chain in chains]
    return problems, pairs


def with_names(settings: dict, names: tuple) -> dict:
    "The settings of a store whose models are called by these names, small to large."
    models = []
    for model, name in zip(settings['models'], names, strict=True):
        spec = model['spec'] | dict(name=name)
        models.append(model | dict(name=name, spec=spec))
    return settings | dict(models=models)


def main() -> None:
    parser = store_parser(__doc__)
    parser.add_argument('--receipt', help='JSON file: how it was drawn')
    parser.add_argument('--out', default=str(FOLDER), help='folder of the recorded benchmarks')
    args = parser.parse_args()
    plan = PLANS[args.benchmark]
    source = find_benchmark(args.benchmark).source
    receipt = json.loads(Path(args.receipt).read_text('utf-8')) if args.receipt else {}
    with RolloutStore(args.store, readonly=True) as store:
        tree = RoutingTree(None, store, max_steps=plan.max_steps)
        problems, pairs = drawn_problems(tree, args.benchmark, args.data)

        def grade(problem, answer):
            return is_right(problem, answer, run_code=True)

        verdicts = dict(grade_pairs(grade, pairs))
        settings = with_names(store.settings, PAIR)
        about = dict(
            benchmark=args.benchmark, licence=source.licence, receipt=receipt, settings=settings
        )
        out = recorded_file(args.benchmark, Path(args.out))
        path = write_recorded(out, about, problems, store, verdicts)
    counts = ', '.join(f'{len(part)} {split}' for split, part in problems.items())
    right = sum(verdicts.values())
    print(
        f'{path.name}: {counts} problems, {right} of {len(verdicts)} answers right, '
        f'{path.stat().st_size:,} bytes'
    )


if __name__ == '__main__':
    main()
