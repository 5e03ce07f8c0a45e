"What is shipped of the real pair: complete, graded as it would be today; and the lab that draws such a pair."

import json
from dataclasses import replace

import numpy as np
import pytest
from recorded_pair import draw, judge, programs, read_along, record

from stepwise_routing.data.benchmarks import (
    find_benchmark,
    grade_by_rules,
    is_right,
    load_problems,
)
from stepwise_routing.data.recorded import FOLDER, MAX_STEPS, read_recorded
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method import rollouts
from stepwise_routing.method.baselines import small_alone
from stepwise_routing.models.base import Request
from stepwise_routing.models.open import find_weights, open_model
from stepwise_routing.records import Step
from stepwise_routing.store import Store
from stepwise_routing.util import PACKAGE

RECORDED = read_recorded('gsm8k')
TABLES = rollouts.shipped_outcomes('gsm8k')
PAIR = 'micro-small', 'micro-large'


def as_gsm8k(problem):
    "The problem as GSM8K has it, so that its answers are graded and not looked up."
    return replace(problem, benchmark='gsm8k')


# ---- what is shipped


def test_the_package_ships_one_recorded_benchmark_and_says_whose_it_is():
    assert [path.name for path in FOLDER.iterdir()] == [f'{name}.jsonl.xz' for name in MAX_STEPS]
    about = RECORDED.about
    assert about['licence'] and {'date', 'seconds', 'engine', 'command'} <= set(about['receipt'])
    for model in about['settings']['models']:
        assert len(model['weights']) == 64 and model['temperature'] == 0.2
    assert str(PACKAGE.parent) not in json.dumps(about)


def test_no_problem_is_in_two_splits():
    ids = [problem.id for split in SPLITS for problem in RECORDED.problems[split]]
    assert len(ids) == len(set(ids)) == 800


@pytest.mark.parametrize('split', SPLITS)
def test_the_table_of_outcomes_follows_from_the_recorded_steps(split):
    problems = RECORDED.problems[split]
    drawn = rollouts.draw_chains(problems, RECORDED.models, MAX_STEPS['gsm8k'])
    parts = RECORDED.specs, split, grade_by_rules, 'gpt-4.1-mini'
    made, shipped = rollouts.outcome_table(problems, *drawn, *parts), TABLES[split]
    for name in ('small', 'large', 'right', 'steps', 'cut', 'problem', 'params', 'dollars'):
        assert np.array_equal(getattr(made, name), getattr(shipped, name)), name
    for name, values in made.features.items():
        assert np.array_equal(values, shipped.features[name], equal_nan=True), name


def test_the_further_draws_are_complete_and_graded():
    read = find_benchmark('gsm8k').answer
    for problem in RECORDED.problems['calibration'] + RECORDED.problems['test']:
        for sample in (1, 2):
            request = Request(problem, sample=sample, to_end=True, max_steps=MAX_STEPS['gsm8k'])
            (chain,) = RECORDED.models[1].write([request])
            assert (problem.id, read(problem, chain)) in RECORDED.verdicts


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


# ---- the columns and walks of the lab


@pytest.mark.parametrize('split', SPLITS)
def test_the_large_model_has_read_every_step(split):
    table = TABLES[split]
    with np.load(read_along.FOLDER / f'gsm8k-{split}.npz') as file:
        assert np.array_equal(file['problem'], table.problem)
        for name in read_along.COLUMNS:
            assert np.array_equal(~np.isnan(file[name]), table.inside)


@pytest.mark.parametrize('split', ['calibration', 'test'])
def test_specreason_that_keeps_every_draft_is_the_small_model(split):
    table = TABLES[split]
    walks = rollouts.load(judge.FOLDER / f'gsm8k-{split}-SpecReason.npz')
    assert np.array_equal(walks.kappas, judge.KAPPAS) and list(judge.DIGITS)[-1] == 0
    assert np.array_equal(walks.right[-1], small_alone(table, 'flops').right)
    assert np.array_equal(walks.tokens[-1, :, 0, 0], table.small[..., 0].sum(1))
    with np.load(judge.FOLDER / f'gsm8k-{split}.npz') as file:
        assert np.array_equal(~np.isnan(file['digit']), table.inside)


def test_programs_are_recorded_and_never_run():
    mbpp = read_recorded('mbpp', programs.FOLDER)
    problems = mbpp.problems['test']
    drawn = rollouts.draw_chains(problems, mbpp.models, programs.MAX_STEPS)
    table = rollouts.outcome_table(problems, *drawn, mbpp.specs, 'test')
    assert small_alone(table, 'flops').right.sum() == 45
    text = 'Here:\n```python\ndef f(x):\n    return x\n\nassert f(1) == 1\n```\n'
    steps = [Step(line, 0, 'step') for line in text.splitlines()]
    assert programs.program_of(problems[0], steps) == 'def f(x):\n    return x\n'
    assert programs.program_of(problems[0], [Step('', 0, 'stop')]) is None


# ---- the lab draws and records


@pytest.fixture
def turns(monkeypatch):
    "Turns of the first recorded problems, in place of all of GSM8K."

    def turns_of(n, data_dir):
        return [
            [(split, as_gsm8k(RECORDED.problems[split][i])) for split in SPLITS] for i in range(n)
        ]

    for module in (draw, record):
        monkeypatch.setattr(module, 'turns_of', turns_of)
    return turns_of


def run(module, monkeypatch, *words):
    monkeypatch.setattr('sys.argv', ['lab', *map(str, words)])
    module.main()


def test_what_is_drawn_is_recorded_and_nothing_is_drawn_twice(turns, monkeypatch, tmp_path):
    steps, out = tmp_path / 'steps.db', tmp_path / 'gsm8k.jsonl.xz'
    words = steps, *PAIR, '--turns', 2, '--block', 1
    run(draw, monkeypatch, *words)
    with Store(steps) as store:
        first = store.keys()
    run(draw, monkeypatch, *words)
    with Store(steps) as store:
        assert store.keys() == first
    receipt = tmp_path / 'receipt.json'
    receipt.write_text('{}')
    run(record, monkeypatch, steps, '--turns', 4, '--receipt', receipt, '--out', out)
    made = read_recorded('gsm8k', tmp_path)
    assert {split: len(problems) for split, problems in made.problems.items()} == dict.fromkeys(
        SPLITS, 2
    )
    assert {key for key, _ in made.edges} == set(first)


def test_two_stores_become_one_record_up_to_the_first_gap(turns, tmp_path):
    first_turns, stores = turns(4, None), []
    for name, part in (('first', [0, 2]), ('second', [1, 2])):  # turn 2 comes from the second store
        ids = {problem.id for i in part for _, problem in first_turns[i]}
        stores.append(Store(tmp_path / f'{name}.db', RECORDED.about['settings']))
        stores[-1].put_many([edge for edge in RECORDED.edges if edge[0][0] in ids])
    (tmp_path / 'gsm8k.jsonl.xz').write_bytes(record.recorded_file(stores, first_turns, {}))
    for store in stores:
        store.close()
    made = read_recorded('gsm8k', tmp_path)
    wanted = {problem.id for turn in first_turns[:3] for _, problem in turn}
    assert made.edges == tuple(edge for edge in RECORDED.edges if edge[0][0] in wanted)
    verdicts = {key: right for key, right in RECORDED.verdicts.items() if key[0] in wanted}
    assert made.verdicts == verdicts and len(made.about['further_settings']) == 1


def test_the_judge_is_asked_once_about_each_step(monkeypatch, tmp_path):
    words = tmp_path / 'steps.db', *PAIR, tmp_path / 'grades.db', '--problems', 2, '--out', tmp_path
    run(judge, monkeypatch, *words)
    with Store(tmp_path / 'grades.db', record=judge.Preference) as grades:
        asked = grades.keys()
    walks = rollouts.load(tmp_path / 'gsm8k-test-SpecReason.npz')
    assert walks.right.shape == (len(judge.KAPPAS), 2)
    run(judge, monkeypatch, *words)
    with Store(tmp_path / 'grades.db', record=judge.Preference) as grades:
        assert grades.keys() == asked


def test_a_model_that_reads_its_own_steps_gives_its_own_probabilities():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    problems = load_problems('micro-gsm', 'test', 3)
    requests = [Request(problem, to_end=True) for problem in problems]
    chains = open_model('micro-small').write(requests)
    folder, _ = find_weights('micro-small')
    model = AutoModelForCausalLM.from_pretrained(folder, dtype='float32').eval()
    rows = read_along.read(model, AutoTokenizer.from_pretrained(folder), problems, chains)
    for of_steps, chain in zip(rows, chains, strict=True):
        logs = [np.log(step.prob) for step in chain]
        numbers = [(log.mean(), log.min(), np.mean(s.max_logit)) for log, s in zip(logs, chain)]
        assert of_steps[:, :3] == pytest.approx(np.array(numbers), abs=1e-3)
        assert (of_steps[:, 3] > 0).all()
