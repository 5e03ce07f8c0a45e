"""Writes what was drawn as a recorded benchmark: `python -m recorded_pair.record gsm8k STORE --help`, in nbs/labs.

The first turns are recorded whose rollouts and further draws are complete. A turn comes whole from one store: from the
first one up to its first gap, then from the next one. Every answer that a replay can need is graded.
"""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stepwise_routing.store import RolloutStore
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


def find_turn(trees: list, turn: list, redraws: int) -> list:  # (split, problem, chains)
    """The chains of a turn, from the first tree. A tree that does not have it whole is taken off the list.

    LookupError if none is left.
    """
    while trees:
        try:
            return asyncio.run(chains_of_turn(trees[0], turn, redraws))
        except LookupError:
            trees.pop(0)
    raise LookupError('no store has this turn whole')


@dataclass
class Drawn:
    "The first turns that are complete."

    problems: dict  # split -> problems
    pairs: list  # (problem, answer) of all their chains
    sources: dict  # problem id -> the store that it comes from


def drawn_problems(trees: list, benchmark: str, data_dir) -> Drawn:
    """The first turns that are complete.

    Nothing behind the first gap of a store is taken: there, short chains end first, so the sample would not be fair.
    """
    read_answer = find_benchmark(benchmark).read_answer
    trees = list(trees)
    drawn = Drawn({split: [] for split in SPLITS}, [], {})
    for turn in turns_of(benchmark, MOST_TURNS, data_dir):
        try:
            found = find_turn(trees, turn, PLANS[benchmark].redraws)
        except LookupError:
            break
        for split, problem, chains in found:
            drawn.problems[split].append(problem)
            drawn.pairs += [(problem, read_answer(chain)) for chain in chains]
            drawn.sources[problem.id] = trees[0].store
    return drawn


def merge(drawn: Drawn, stores: list, target: RolloutStore) -> None:
    "Put the edges of the problems into one store, each problem's from the store that it comes from."
    for store in stores:
        keys = [key for key in store.keys() if drawn.sources.get(key[0]) is store]
        target.put_many([(key, store.get(*key)) for key in keys])


def with_names(settings: dict, names: tuple) -> dict:
    "The settings of a store whose models are called by these names, small to large."
    models = []
    for model, name in zip(settings['models'], names, strict=True):
        spec = model['spec'] | dict(name=name)
        models.append(model | dict(name=name, spec=spec))
    return settings | dict(models=models)


def record(benchmark: str, stores: list, data_dir, receipt: dict, folder: Path) -> str:
    "Write the recorded file of a benchmark; returns a line about it."
    max_steps = PLANS[benchmark].max_steps
    trees = [RoutingTree(None, store, max_steps=max_steps) for store in stores]
    drawn = drawn_problems(trees, benchmark, data_dir)

    verdicts = dict(grade_pairs(is_right, drawn.pairs))
    settings, *further = [with_names(store.settings, PAIR) for store in stores]
    about = dict(
        benchmark=benchmark,
        licence=find_benchmark(benchmark).source.licence,
        receipt=receipt,
        settings=settings,
    )
    if further:
        about |= dict(further_settings=further)  # of the later turns
    with TemporaryDirectory() as temporary:
        with RolloutStore(Path(temporary) / 'merged.db', stores[0].settings) as merged:
            merge(drawn, stores, merged)
            out = recorded_file(benchmark, folder)
            path = write_recorded(out, about, drawn.problems, merged, verdicts)
    counts = ', '.join(f'{len(part)} {split}' for split, part in drawn.problems.items())
    right = sum(verdicts.values())
    size = path.stat().st_size
    return (
        f'{path.name}: {counts} problems, {right} of {len(verdicts)} answers right, {size:,} bytes'
    )


def main() -> None:
    parser = store_parser(__doc__)
    parser.add_argument('--also', nargs='*', default=[], help='further stores: later turns')
    parser.add_argument('--receipt', help='JSON file: how it was drawn')
    parser.add_argument('--out', default=str(FOLDER), help='folder of the recorded benchmarks')
    args = parser.parse_args()
    receipt = json.loads(Path(args.receipt).read_text('utf-8')) if args.receipt else {}
    with ExitStack() as stack:
        files = [args.store, *args.also]
        stores = [stack.enter_context(RolloutStore(file, readonly=True)) for file in files]
        print(record(args.benchmark, stores, args.data, receipt, Path(args.out)))


if __name__ == '__main__':
    main()
