"""Writes far more problems than the package ships: `python -m micro_world.many ../../runs/many`, in nbs/labs.

One file of questions and answers a benchmark, for the profile micro-many: 300 problems to train on, 2,000 to
choose settings on and 2,000 to report. No question is one that the package ships, and the models never learned
from any of them. The bytes depend on the generator alone.
"""

import argparse
import json
import random
from pathlib import Path

from stepwise_routing.base.tools import write_file
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.questions import QuestionFile, own_problem
from stepwise_routing.data.sources import SPLITS

from .drafts import as_problem, micro_drafts
from .families import FAMILIES

SEED = 2001
EARLIER = 2000  # the seed of an earlier run, whose problems are left out
DRAWN = 12_000  # problems of a benchmark; some thousands of them are used
SIZES = dict(train=300, calibration=2000, test=2000)


def shipped_questions(benchmark: str) -> set:
    return {problem.question for split in SPLITS for problem in load_problems(benchmark, split)}


def new_problems(
    benchmark: str,
    n: int = DRAWN,
    seed: int = SEED,
    seen=None,  # questions to leave out; None: those that are shipped, and those of the earlier run
) -> list:  # of `Problem`s
    "New problems from the three pools of routers in turn. No question comes twice."
    if seen is None:
        shipped = shipped_questions(benchmark)
        earlier = new_problems(benchmark, n, EARLIER, shipped)
        seen = shipped | {problem.question for problem in earlier}
    rng = random.Random(f'{benchmark}/many/{seed}')
    pools = [micro_drafts(benchmark, pool, rng) for pool in SPLITS]
    problems = {}
    while len(problems) < n:
        for pool in pools:
            draft = next(pool)
            if draft.question not in seen:
                problems.setdefault(draft.question, draft)
    return [as_problem(benchmark, draft) for draft in problems.values()][:n]


def question_rows(
    benchmark: str,
    name: str,  # of the file; it decides which problem is in which split
    sizes=SIZES,  # split -> number of problems
    n: int = DRAWN,
) -> list:  # of dicts with "question" and "answer"
    """The rows of a file of new problems.

    All problems are drawn first. Then each split takes some of its own at random, so that all splits are alike.
    """
    rows = {split: [] for split in sizes}
    for problem in new_problems(benchmark, n):
        row = dict(question=problem.question, answer=problem.answer)
        rows[QuestionFile.split_of(own_problem(row, name))].append(row)
    rng = random.Random(f'{benchmark}/splits/{SEED}')
    return [row for split, size in sizes.items() for row in rng.sample(rows[split], size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder', type=Path, help='where the files go')
    args = parser.parse_args()
    for benchmark in FAMILIES:
        name = f'{benchmark}-many'
        lines = [json.dumps(row) + '\n' for row in question_rows(benchmark, name)]
        path = write_file(args.folder / f'{name}.jsonl', ''.join(lines))
        print(f'{path}: {len(lines):,} problems')


if __name__ == '__main__':
    main()
