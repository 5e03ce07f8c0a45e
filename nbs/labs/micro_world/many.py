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

SEED = 2000
SIZES = dict(train=300, calibration=2000, test=2000)


def shipped_questions(benchmark: str) -> set:
    return {problem.question for split in SPLITS for problem in load_problems(benchmark, split)}


def new_problems(benchmark: str):  # yields `Problem`s, without end
    "Problems from the three pools of routers in turn. None is shipped, and no question comes twice."
    rng = random.Random(f'{benchmark}/many/{SEED}')
    pools = [micro_drafts(benchmark, pool, rng) for pool in SPLITS]
    seen = shipped_questions(benchmark)
    while True:
        for pool in pools:
            draft = next(pool)
            if draft.question not in seen:
                seen.add(draft.question)
                yield as_problem(benchmark, draft)


def question_rows(
    benchmark: str,
    name: str,  # of the file; it decides which problem is in which split
    sizes=SIZES,  # split -> number of problems
) -> list:  # of dicts with "question" and "answer"
    "The rows of a file of new problems. Problems of a split that is full are left out."
    missing = dict(sizes)
    rows = []
    for problem in new_problems(benchmark):
        row = dict(question=problem.question, answer=problem.answer)
        split = QuestionFile.split_of(own_problem(row, name))
        if missing[split]:
            missing[split] -= 1
            rows.append(row)
        if not any(missing.values()):
            return rows


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
