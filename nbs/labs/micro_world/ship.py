"""Writes the problems that the package ships: `python -m micro_world.ship`, in nbs/labs.

One file a benchmark, `stepwise_routing/micro_problems/NAME.jsonl.xz`: a line per problem, one split
after the other, each in the order in which the generator draws it. The bytes depend on the
generator and on the seed of the test problems (micro_world/freeze.py).
"""

import json
import lzma

from stepwise_routing.base.records import Problem
from stepwise_routing.base.tools import PACKAGE, write_file
from stepwise_routing.data.frozen import read_frozen

from .drafts import micro_problems
from .families import FAMILIES

SHIPPED = dict(train=1000, calibration=1000, test=1000)  # problems of a benchmark


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


def drawn_problems(benchmark: str, split: str) -> list:  # of `Problem`s
    "The problems of a split. Those of earlier seeds were seen: no new test problem is one of them."
    frozen = read_frozen()
    seed = frozen.test_seed if frozen and split == 'test' else 0
    seen = set()
    for earlier in range(seed):
        seen |= {p.id for p in micro_problems(benchmark, split, SHIPPED[split], earlier)}
    drawn = micro_problems(benchmark, split, SHIPPED[split] + len(seen), seed)
    return [p for p in drawn if p.id not in seen][: SHIPPED[split]]


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
