"""Draws a benchmark with the real pair, problem by problem: `python -m recorded_pair.draw gsm8k --help`, in nbs/labs.

Each split is drawn in the order of its ids, in turns: two problems to train on, three to calibrate, three to
test, and so on. So any beginning is a fair sample, and nothing depends on a result. A store that
was interrupted is continued; what it holds is not drawn again.
"""

import argparse
import asyncio
from contextlib import contextmanager
from dataclasses import dataclass

from stepwise_routing.store import RolloutStore, tree_settings
from stepwise_routing.util import gather_progress
from stepwise_routing.data.benchmarks import find_benchmark, load_problems
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.models.names import open_models


@dataclass(frozen=True)
class Plan:
    "What was fixed before the first problem was drawn."

    turn: dict  # split -> problems of it in a turn
    max_steps: int  # of a chain
    max_tokens: int  # of a step
    temperature: float = 0.2
    context: int = 1024  # tokens of prompt and chain
    longest_question: int = 2000  # characters; a longer one leaves no room in the context
    redraws: int = 2  # further draws of the large model alone, on calibration and test problems

    @property
    def options(self) -> dict:
        "Of `open_models`."
        return dict(temperature=self.temperature, max_tokens=self.max_tokens, context=self.context)


PAIR = ('Qwen2.5-Coder-0.5B-Instruct', 'Qwen2.5-Coder-1.5B-Instruct')  # as tables call them
PLANS = {
    'gsm8k': Plan(dict(train=2, calibration=3, test=3), max_steps=16, max_tokens=200),
    'math500': Plan(
        dict(train=2, calibration=3, test=3), max_steps=24, max_tokens=300, context=1536
    ),
}


def turns_of(benchmark: str, turns: int, data_dir) -> list:  # lists of (split, `Problem`) pairs
    "The problems of the first turns, each split in the order of its ids; at the end a split may be used up."
    plan = PLANS[benchmark]
    in_turns = [[] for _ in range(turns)]
    for split, count in plan.turn.items():
        problems = load_problems(benchmark, split, data_dir=data_dir)
        short = [p for p in problems if len(p.question) <= plan.longest_question]
        for i, problem in enumerate(short[: turns * count]):
            in_turns[i // count].append((split, problem))
    return in_turns


async def when_there_is_room(room: asyncio.Semaphore, work) -> None:
    async with room:
        await work


async def draw_chain(tree: RoutingTree, problem, path: str, model: int, whole: bool) -> None:
    """What a model writes from a node on.

    Stored step by step, or, if `whole`, at the chain's end: faster, but a stop loses the chains under way.
    """
    if whole:
        await tree.run(problem, path, model)
        return
    is_over = False
    while not is_over:
        (step,) = await tree.run(problem, path, model, to_end=False)
        path += str(model)
        is_over = step.final or len(path) >= tree.max_steps


async def draw(tree: RoutingTree, pairs: list, redraws: int, width: int, whole: bool) -> None:
    "First all small chains, then the large model from every prefix, so that one model computes at a time."

    async def small(split, problem):
        await draw_chain(tree, problem, '', 0, whole)

    async def large(split, problem):
        steps = await tree.run(problem, '', 0)
        chains = [draw_chain(tree, problem, '0' * t, 1, whole) for t in range(len(steps))]
        if split != 'train':
            further = range(1, redraws + 1)
            chains += [draw_chain(tree.resampled(i), problem, '', 1, whole) for i in further]
        await asyncio.gather(*chains)

    for phase, work, at_once in (('small', small, 4 * width), ('large', large, width)):
        room = asyncio.Semaphore(at_once)
        chains = [when_there_is_room(room, work(*pair)) for pair in pairs]
        await gather_progress(chains, f'{phase}, problems')


def store_parser(doc: str) -> argparse.ArgumentParser:
    "A command line that names a benchmark, its store and its copies; the first line of `doc` describes it."
    parser = argparse.ArgumentParser(description=doc.split('\n')[0])
    parser.add_argument('benchmark', choices=PLANS)
    parser.add_argument('store', help='file of the drawn steps')
    parser.add_argument('--data', help='folder with copies of the benchmark; without it, the Hub')
    return parser


def drawing_parser(doc: str) -> argparse.ArgumentParser:
    "A command line for drawing some turns of a benchmark."
    parser = store_parser(doc)
    parser.add_argument('small', help='vllm-server:URL#FOLDER of the small model, or its folder')
    parser.add_argument('large', help='the same of the large model')
    parser.add_argument('--turns', type=int, default=10, help='the last turn that is drawn')
    parser.add_argument('--after', type=int, default=0, help='turns that are left out before')
    share = 'of these turns, each N-th from the I-th on: N processes share them'
    parser.add_argument(
        '--every', type=int, nargs=2, default=(0, 1), metavar=('I', 'N'), help=share
    )
    parser.add_argument('--dtype', help='of a model that this process opens from its folder')
    parser.add_argument('--rows', type=int, default=256, help='chains that it writes at once')
    parser.add_argument('--prefix-mib', type=int, default=256, help='its memory for prefixes')
    return parser


@contextmanager
def open_drawing(args):  # (tree, turns)
    "The turns that a command line names, and the tree in its store; `args` of `drawing_parser`."
    plan = PLANS[args.benchmark]
    first, step = args.every
    turns = turns_of(args.benchmark, args.turns, args.data)[args.after :][first::step]
    options = dict(dtype=args.dtype, batch_size=args.rows, prefix_mib=args.prefix_mib)
    with open_models([args.small, args.large], **plan.options, **options) as backends:
        settings = tree_settings(args.benchmark, backends, find_benchmark(args.benchmark).draws)
        with RolloutStore(args.store, settings) as store:
            yield RoutingTree(backends, store, max_steps=plan.max_steps), turns


def main() -> None:
    parser = drawing_parser(__doc__)
    parser.add_argument('--block', type=int, default=8, help='turns whose small chains come first')
    parser.add_argument('--width', type=int, default=16, help='problems under way')
    parser.add_argument('--whole', action='store_true', help='store a chain when it has ended')
    args = parser.parse_args()
    redraws = PLANS[args.benchmark].redraws
    with open_drawing(args) as (tree, turns):
        for start in range(0, len(turns), args.block):
            pairs = [pair for turn in turns[start : start + args.block] for pair in turn]
            asyncio.run(draw(tree, pairs, redraws, args.width, args.whole))


if __name__ == '__main__':
    main()
