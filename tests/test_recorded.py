"What is shipped of the real pair: complete, and graded as it would be today."

import json
from dataclasses import replace

import numpy as np
import pytest
from recorded_pair import judge, programs, read_along

from stepwise_routing.data.benchmarks import grade_by_rules, is_right
from stepwise_routing.data.recorded import FOLDER, MAX_STEPS, read_recorded
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method import rollouts
from stepwise_routing.method.baselines import small_alone
from stepwise_routing.models.base import Request
from stepwise_routing.records import Step
from stepwise_routing.util import PACKAGE

RECORDED = read_recorded('gsm8k')
TABLES = rollouts.shipped_outcomes('gsm8k')


def as_gsm8k(problem):
    "The problem as GSM8K has it, so that its answers are graded and not looked up."
    return replace(problem, benchmark='gsm8k')


def test_the_package_ships_one_recorded_benchmark_and_says_whose_it_is():
    assert [path.name for path in FOLDER.iterdir()] == ['gsm8k.jsonl.xz']
    about = RECORDED.about
    assert about['licence'] == 'MIT'
    assert {'date', 'seconds', 'engine', 'command'} <= {*about['receipt']}
    for model in about['settings']['models']:
        assert (len(model['weights']), model['temperature']) == (64, 0.2)
    assert str(PACKAGE.parent) not in json.dumps(about)


@pytest.mark.parametrize('split', SPLITS)
def test_the_table_of_outcomes_follows_from_the_recorded_steps(split):
    problems, shipped = RECORDED.problems[split], TABLES[split]
    drawn = rollouts.draw_chains(problems, RECORDED.models, MAX_STEPS['gsm8k'])
    parts = RECORDED.specs, split, grade_by_rules, 'gpt-4.1-mini'
    made = rollouts.outcome_table(problems, *drawn, *parts)
    for name in ('small', 'large', 'right', 'steps', 'cut', 'problem', 'params', 'dollars'):
        assert np.array_equal(getattr(made, name), getattr(shipped, name)), name
    for name, values in made.features.items():
        assert np.array_equal(values, shipped.features[name], equal_nan=True), name


def test_the_verdicts_are_those_of_today():
    problems = {p.id: as_gsm8k(p) for split in SPLITS for p in RECORDED.problems[split]}
    for (problem_id, answer), right in RECORDED.verdicts.items():
        assert is_right(problems[problem_id], answer) == right, answer


def test_a_step_that_nobody_drew_is_an_error():
    "A walk that comes back to the small model needs a step that was not recorded."
    problem = RECORDED.problems['test'][0]
    first = RECORDED.models[1].write([Request(problem)])[0]
    with pytest.raises(KeyError, match=problem.id):
        RECORDED.models[0].write([Request(problem, first)])


def test_the_large_model_has_read_and_judged_every_step():
    "SpecReason that keeps every draft is the small model alone."
    files = [(read_along.FOLDER, split, read_along.COLUMNS) for split in SPLITS]
    files += [(judge.FOLDER, split, ['digit']) for split in SPLITS[1:]]
    for folder, split, columns in files:
        with np.load(folder / f'gsm8k-{split}.npz') as file:
            assert np.array_equal(file['problem'], TABLES[split].problem)
            for name in columns:
                assert np.array_equal(~np.isnan(file[name]), TABLES[split].inside)
    for split in SPLITS[1:]:
        walks = rollouts.load(judge.FOLDER / f'gsm8k-{split}-SpecReason.npz')
        assert np.array_equal(walks.kappas, judge.KAPPAS)
        assert np.array_equal(walks.right[-1], small_alone(TABLES[split], 'flops').right)
        assert np.array_equal(walks.tokens[-1, :, 0, 0], TABLES[split].small[..., 0].sum(1))


def test_programs_are_recorded_and_never_run():
    mbpp = read_recorded('mbpp', programs.FOLDER)
    problems = mbpp.problems['test']
    drawn = rollouts.draw_chains(problems, mbpp.models, programs.MAX_STEPS)
    table = rollouts.outcome_table(problems, *drawn, mbpp.specs, 'test')
    assert small_alone(table, 'flops').right.sum() == 45
    text = 'Here:\n```python\ndef f(x):\n    return x\n\nassert f(1) == 1\n```\n'
    steps = [Step(line, 0, 'step') for line in text.splitlines()]
    assert programs.program_of(problems[0], steps) == 'def f(x):\n    return x\n'
