"""Draws GSM8K with the real pair, turn by turn: `python -m recorded_pair.draw --help`, in nbs/labs.

Each split is drawn in the order of its ids, in turns: two problems to train on, three to calibrate, three to
test, and so on. So any beginning is a fair sample, and nothing depends on a result. What the store holds is
not drawn again.
"""

import argparse
from contextlib import contextmanager

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.recorded import MAX_STEPS
from stepwise_routing.models.base import Request
from stepwise_routing.models.kept import Kept
from stepwise_routing.models.open import open_models
from stepwise_routing.store import Store, draw_settings

# What was fixed before the first problem was drawn
PAIR = ('Qwen2.5-Coder-0.5B-Instruct', 'Qwen2.5-Coder-1.5B-Instruct')  # as tables call them
TURN = dict(train=2, calibration=3, test=3)  # problems of a turn
REDRAWS = 2  # further draws of the large model alone, on calibration and test problems
WRITING = dict(
    temperature=0.2, max_tokens=200, context=1024
)  # tokens of a step; of prompt and chain
ASK = dict(to_end=True, max_steps=MAX_STEPS['gsm8k'])


def turns_of(turns: int, data_dir) -> list:  # lists of (split, `Problem`) pairs
    "The problems of the first turns, each split in the order of its ids."
    in_turns = [[] for _ in range(turns)]
    for split, count in TURN.items():
        problems = load_problems('gsm8k', split, turns * count, data_dir)
        for i, problem in enumerate(problems):
            in_turns[i // count].append((split, problem))
    return in_turns


def of_large(split: str, problem, chain) -> list:  # of `Request`s
    "What the large model writes: the rest behind each prefix of the small chain, and its further draws alone."
    redraws = 0 if split == 'train' else REDRAWS
    requests = [Request(problem, chain[:t], **ASK) for t in range(len(chain))]
    return requests + [Request(problem, sample=i, **ASK) for i in range(1, redraws + 1)]


def draw(pairs: list, small, large) -> None:
    "All chains of some (split, `Problem`) pairs; one model computes at a time."
    chains = small.write([Request(problem, **ASK) for _, problem in pairs])
    requests = []
    for pair, chain in zip(pairs, chains):
        requests += of_large(*pair, chain)
    large.write(requests)


def new_parser(doc: str) -> argparse.ArgumentParser:
    "A command line that names the models and their store."
    parser = argparse.ArgumentParser(description=doc.split('\n')[0])
    parser.add_argument('store', help='file of the drawn steps')
    parser.add_argument('small', help='folder of the small model; vllm:FOLDER runs it on vLLM')
    parser.add_argument('large', help='the same of the large model')
    parser.add_argument('--dtype', help='of the models, such as bfloat16')
    return parser


@contextmanager
def open_pair(args):
    "The small and the large model; what they write is kept."
    models = open_models([args.small, args.large], dtype=args.dtype, **WRITING)
    with Store(args.store, draw_settings('gsm8k', models)) as store:
        yield [Kept(model, store) for model in models]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument('--data', help='folder with a copy of GSM8K; without it, the Hub')
    parser.add_argument('--turns', type=int, default=10, help='the last turn that is drawn')
    parser.add_argument('--after', type=int, default=0, help='turns that are left out before')
    share = 'of these turns, each N-th from the I-th on: N processes share them'
    parser.add_argument(
        '--every', type=int, nargs=2, default=(0, 1), metavar=('I', 'N'), help=share
    )
    parser.add_argument('--block', type=int, default=8, help='turns whose small chains come first')
    args = parser.parse_args()
    first, step = args.every
    turns = turns_of(args.turns, args.data)[args.after :][first::step]
    with open_pair(args) as models:
        for start in range(0, len(turns), args.block):
            draw(sum(turns[start : start + args.block], []), *models)
            print(f'{min(start + args.block, len(turns))} of {len(turns)} turns', flush=True)


if __name__ == '__main__':
    main()
