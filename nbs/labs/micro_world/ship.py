"""Writes the problems that the package ships: `python -m micro_world.ship`, in nbs/labs.

One file a benchmark, `stepwise_routing/micro_problems/NAME.jsonl.xz`: a line per problem, one split
after the other. The bytes depend on the generator and on the seed of the held-out problems
(micro_world/freeze.py).
"""

import json
import lzma
import random

from stepwise_routing.base.records import Problem
from stepwise_routing.base.tools import PACKAGE, write_file
from stepwise_routing.data.frozen import read_frozen

from .drafts import as_problem, micro_drafts, micro_problems
from .families import FAMILIES, LEVELS

SHIPPED = dict(train=1000, calibration=1000, test=1000)  # problems of a benchmark
HELD_OUT = 'calibration', 'test'
TOGETHER = 3  # from this seed on, calibration and test problems are drawn together


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


def seen_questions(
    benchmark: str,
    seed: int,  # of the held-out problems to come
) -> set:
    "Questions that an earlier calibration or test set has had, and some more."
    calibration = micro_problems(benchmark, 'calibration', SHIPPED['calibration'])
    seen = {problem.question for problem in calibration}
    for earlier in range(min(seed, TOGETHER)):
        # the test set of a seed left out those of all earlier seeds, so it reached further
        most = SHIPPED['test'] * (earlier + 1)
        seen |= {p.question for p in micro_problems(benchmark, 'test', most, earlier)}
    for earlier in range(TOGETHER, seed):
        seen |= {problem.question for problem in held_out_problems(benchmark, earlier)}
    return seen


def level_counts(benchmark: str, n: int) -> dict:  # level -> number
    "The declared share of each level of n problems, in whole problems."
    weights = LEVELS[benchmark]
    counts = {}
    for level, weight in enumerate(weights, 1):
        so_far = n * sum(weights[:level]) // sum(weights)
        if weight:
            counts[level] = so_far - sum(counts.values())
    return counts


def held_out_problems(benchmark: str, seed: int) -> list:  # of `Problem`s
    """New problems for calibration and test, in one random order, so that both are alike.

    Each level has its declared share. No question was in an earlier calibration or test set.
    """
    rng = random.Random(f'{benchmark}/held out/{seed}')
    drafts = [micro_drafts(benchmark, split, rng) for split in HELD_OUT]
    missing = level_counts(benchmark, sum(SHIPPED[split] for split in HELD_OUT))
    seen = seen_questions(benchmark, seed)
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


def drawn_problems(benchmark: str, split: str) -> list:  # of `Problem`s
    "The problems of a split. Those of calibration and test follow from the seed of the receipt."
    frozen = read_frozen()
    if not frozen or split not in HELD_OUT:
        return micro_problems(benchmark, split, SHIPPED[split])
    problems = held_out_problems(benchmark, frozen.test_seed)
    first = SHIPPED['calibration']
    return problems[:first] if split == 'calibration' else problems[first:]


def benchmark_file(benchmark: str) -> bytes:
    "The problems of a benchmark, compressed."
    lines = []
    for split in SHIPPED:
        for problem in drawn_problems(benchmark, split):
            lines.append(problem_line(split, problem))
    return lzma.compress(''.join(lines).encode(), preset=9)


def main() -> None:
    for benchmark in FAMILIES:
        data = benchmark_file(benchmark)
        path = write_file(PACKAGE / 'micro_problems' / f'{benchmark}.jsonl.xz', data)
        print(f'{path.name}: {len(data):,} bytes')


if __name__ == '__main__':
    main()
