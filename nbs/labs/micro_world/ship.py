"""Writes the problems that the package ships: `python -m micro_world.ship`, in nbs/labs.

One file a benchmark, `stepwise_routing/micro_problems/NAME.jsonl.xz`: a line per problem, one split
after the other. The bytes depend on the generator and on the seed of the receipt
(micro_world/freeze.py).
"""

import json
import lzma
import random

from stepwise_routing.data.frozen import read_frozen
from stepwise_routing.records import Problem
from stepwise_routing.util import PACKAGE, write_file

from .drafts import as_problem, micro_drafts, micro_problems
from .families import FAMILIES, LEVELS

SIZES = dict(train=2000, calibration=2000, test=2000)  # problems of a benchmark
EARLIER = 1000  # problems of a split in the sets of the seeds 0 to 3
TOGETHER = 3  # from this seed on, several splits are drawn together


def problem_line(split: str, problem: Problem) -> str:
    "One problem as JSON."
    row = dict(
        split=split,
        id=problem.id,
        level=problem.difficulty,
        question=problem.question,
        answer=problem.answer,
        solution=problem.solution,
    )
    return json.dumps(row) + '\n'


def level_counts(benchmark: str, n: int) -> dict:  # level -> number
    "The declared share of each level of n problems, in whole problems."
    weights = LEVELS[benchmark]
    counts = {}
    for level, weight in enumerate(weights, 1):
        so_far = n * sum(weights[:level]) // sum(weights)
        if weight:
            counts[level] = so_far - sum(counts.values())
    return counts


def new_problems(benchmark: str, rng, pools: tuple, n: int, seen: set) -> list:  # of `Problem`s
    "Problems of some pools in a random order, each level with its share. Their questions join `seen`."
    drafts = [micro_drafts(benchmark, pool, rng) for pool in pools]
    missing = level_counts(benchmark, n)
    problems = []
    while any(missing.values()):
        for of_pool in drafts:
            draft = next(of_pool)
            if missing[draft.level] and draft.question not in seen:
                missing[draft.level] -= 1
                seen.add(draft.question)
                problems.append(as_problem(benchmark, draft))
    rng.shuffle(problems)
    return problems


def earlier_questions(benchmark: str) -> set:
    "Questions of the sets of version 0.3 and before it, and some more."
    earlier = micro_problems(benchmark, 'train', EARLIER)
    earlier += micro_problems(benchmark, 'calibration', EARLIER)
    for seed in range(TOGETHER):
        # the test set of a seed left out those of all earlier seeds, so it reached further
        earlier += micro_problems(benchmark, 'test', EARLIER * (seed + 1), seed)
    seen = {problem.question for problem in earlier}
    rng = random.Random(f'{benchmark}/held out/{TOGETHER}')
    new_problems(benchmark, rng, ('calibration', 'test'), 2 * EARLIER, seen)
    return seen


def drawn_problems(benchmark: str, seed: int) -> dict:  # split -> `Problem`s
    "The problems of a benchmark. Each level has its share in every split."
    rng = random.Random(f'{benchmark}/all/{seed}')
    seen = earlier_questions(benchmark)
    pools = tuple(SIZES)
    return {split: new_problems(benchmark, rng, pools, n, seen) for split, n in SIZES.items()}


def benchmark_file(benchmark: str, seed: int) -> bytes:
    "The problems of a benchmark, compressed."
    lines = []
    for split, problems in drawn_problems(benchmark, seed).items():
        lines += [problem_line(split, problem) for problem in problems]
    return lzma.compress(''.join(lines).encode(), preset=9)


def main() -> None:
    for benchmark in FAMILIES:
        data = benchmark_file(benchmark, read_frozen().test_seed)
        path = write_file(PACKAGE / 'micro_problems' / f'{benchmark}.jsonl.xz', data)
        print(f'{path.name}: {len(data):,} bytes')


if __name__ == '__main__':
    main()
