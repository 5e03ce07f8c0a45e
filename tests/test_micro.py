"The micro world: labels that find the slip, disjoint splits, files that the lab makes."

import random
import re

import pytest
from hypothesis import example, given, settings, strategies as st
from micro_world import drafts, families, ship
from micro_world.programs import solve
from micro_world.slips import corrupt

from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.data.frozen import read_frozen
from stepwise_routing.data.steps import check_line, first_wrong, right_steps
from stepwise_routing.util import PACKAGE

SHIPPED = {b: {split: load_problems(b, split) for split in ship.SIZES} for b in MICRO}
EVERY = {f.__name__: (b, f) for b, of_it in families.FAMILIES.items() for f in of_it}
anyone = dict(name=st.sampled_from([*EVERY]), level=st.integers(1, 6), seed=st.integers(0, 10**6))


# A label knows the text alone, and solutions repeat themselves: in 16^4 mod 12, "4*4=16" is due three times. So a check
# of line 5 may be word for word one of line 3, and put a mistake in line 3 right. The next line that is due is then 5.
@settings(max_examples=300)
@given(**anyone)
@example(name='power', level=1, seed=63)
@example(name='recurrence', level=1, seed=174)
@example(name='digits', level=3, seed=846299)
def test_a_slip_is_found_and_a_check_puts_right_what_it_states(name, level, seed):
    r = random.Random(seed)
    benchmark, family = EVERY[name]
    draft = family(r, level)
    problem, right = drafts.as_problem(benchmark, draft), solve(draft)
    wrong, at = corrupt(draft, r)
    assert first_wrong(problem, wrong) == at
    n, back = r.randint(at + 1, len(right) - 1), r.randint(1, 4)  # taken over after n steps
    check, end = check_line(right, n, back), r.choice(('', '.'))
    before, after = [step + end for step in wrong[:n]], [step + end for step in right[n + 1 :]]
    asked = [(last, k) for last in range(1, len(right)) for k in range(1, last + 1)]
    stated = [(last - k, last) for last, k in asked if check_line(right, last, k) == check]
    repaired = any(first <= at <= last for first, last in stated)
    marks = right_steps(problem, [*before, check, *after])
    assert marks[: n + 1] == [True] * at + [False] * (n - at) + [repaired]
    if len(stated) == 1:
        assert set(marks[n:]) == {repaired}
    repeated = right[:at] + right[max(at - 1, 0) :]  # a line word for word, again
    for sound in ([], right, wrong[:at], [*right[:n], check, *after], repeated):
        assert first_wrong(problem, sound) == -1


def test_there_are_2000_problems_a_split_none_in_two_drawn_after_everything_was_fixed():
    for splits in SHIPPED.values():
        assert [len(problems) for problems in splits.values()] == [2000] * 3
        problems = sum(splits.values(), [])
        assert len({p.id for p in problems}) == len({p.question for p in problems}) == 6000
    frozen = read_frozen()
    assert re.fullmatch('[0-9a-f]{40}', frozen.commit)
    assert frozen.test_seed > max(receipt['test_seed'] for receipt in frozen.earlier) >= 3


@pytest.mark.slow
def test_the_shipped_files_are_made_by_the_lab_and_have_no_earlier_question():
    for name in MICRO:
        made = ship.benchmark_file(name, read_frozen().test_seed)
        assert made == (PACKAGE / 'micro_problems' / f'{name}.jsonl.xz').read_bytes()
        earlier = ship.earlier_questions(name)
        assert len(earlier) > 5000
        assert earlier.isdisjoint(p.question for p in sum(SHIPPED[name].values(), []))
