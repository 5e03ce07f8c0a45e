"What the package ships of real models: complete, graded as it would be today, and of these models alone."
import json

import pytest

from stepwise_routing.store import RolloutStore
from stepwise_routing.util import PACKAGE, run_async
from stepwise_routing.data import recorded as records
from stepwise_routing.data.benchmarks import find_benchmark
from stepwise_routing.data.grading import is_right
from stepwise_routing.data.recorded import FOLDER, SUFFIX, read_recorded, recorded_names
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.outcomes import outcome_table, walk_outcomes
from stepwise_routing.method.routers import Grade
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.report.example import recorded_tree
from stepwise_routing.run.config import read_run
from stepwise_routing.run.stages import open_tree

NAMES = recorded_names()
MAX_STEPS = {'gsm8k': 16, 'mbpp': 40}  # of a chain, as they were drawn

@pytest.fixture(params=NAMES)
def recorded(request): return read_recorded(request.param)

def test_it_is_small_and_says_whose_it_is():
    assert NAMES and sum(path.stat().st_size for path in FOLDER.iterdir()) < 12e6
    for name in NAMES:
        about = read_recorded(name).about
        assert about['licence']
        assert {'date', 'seconds', 'engine', 'command'} <= set(about['receipt'])
        for model in about['settings']['models']: assert len(model['weights']) == 64 and model['temperature'] == .2
        assert str(PACKAGE.parent) not in json.dumps(about) and '/work' not in json.dumps(about)

def test_no_problem_is_in_two_splits(recorded):
    ids = [p.id for part in recorded.problems.values() for p in part]
    assert len(ids) == len(set(ids)) and all(recorded.problems[split] for split in SPLITS)

def test_every_hand_over_was_drawn_to_its_end_and_graded(recorded, tmp_path):
    "A replay needs no model: of every problem all continuations and further draws are there, and their verdicts."
    recorded.fill(tmp_path/'draws.db')
    name = recorded.about['benchmark']
    record = find_benchmark(name + SUFFIX)
    with RolloutStore(tmp_path/'draws.db', readonly=True) as store:
        tree = RoutingTree(None, store, max_steps=MAX_STEPS[name])
        for split, problems in recorded.problems.items():
            for problem in problems:
                small, continuations = run_async(tree.rollouts(problem))
                again = run_async(tree.redraws(problem, 0 if split == 'train' else 2))
                chains = [small, *continuations, *again]
                starts = [0, *range(len(continuations)), *[0] * len(again)]
                assert len(continuations) == len(small)
                for start, chain in zip(starts, chains, strict=True):
                    assert chain[-1].final or start + len(chain) == MAX_STEPS[name], (problem.id, start)
                answers = {record.read_answer(chain) for chain in chains}
                assert all((problem.id, answer) in recorded.verdicts for answer in answers)

def test_the_verdicts_are_those_of_today():
    "Of questions with one answer; no program is run."
    problems = {p.id: p for part in read_recorded('gsm8k').problems.values() for p in part}
    for (problem_id, answer), right in read_recorded('gsm8k').verdicts.items():
        problem = problems[problem_id]
        assert find_benchmark('gsm8k').right is None and is_right(replaced(problem), answer) == right, answer

def replaced(problem):
    "The problem as its own benchmark has it, so that it is graded and not looked up."
    from dataclasses import replace
    return replace(problem, benchmark=problem.benchmark.removesuffix(SUFFIX))

def test_other_models_are_refused_in_one_line(tmp_path):
    run = read_run('recorded', tmp_path, {'models.names': ['recorded:a', 'recorded:b']})
    with pytest.raises(ValueError, match=r'was written by Qwen2.5-Coder-0.5B-Instruct and .* not by a and b: set models.names'):
        with open_tree(run, 'gsm8k-recorded'): pass

def test_a_step_that_nobody_drew_is_named(recorded, tmp_path):
    "A walk that comes back to the small model needs a step that was not recorded."
    recorded.fill(tmp_path/'draws.db')
    problem = recorded.problems['test'][0]
    with RolloutStore(tmp_path/'draws.db', readonly=True) as store:
        tree = RoutingTree(None, store, max_steps=100)
        with pytest.raises(LookupError, match=problem.id) as e: tree.stored(problem, '1', 0)
    assert '\n' not in str(e.value)

@pytest.fixture
def lab(monkeypatch):
    "The lab that draws and records."
    monkeypatch.syspath_prepend(PACKAGE.parent/'nbs'/'labs')
    import recorded_pair.judge
    import recorded_pair.pieces
    import recorded_pair.record
    return recorded_pair

@pytest.fixture
def two_turns(lab, monkeypatch):
    "Turns of the first GSM8K problems that are recorded, in place of all of GSM8K."
    problems = read_recorded('gsm8k').problems
    turns = [[(split, replaced(problems[split][i])) for split in SPLITS] for i in range(2)]
    monkeypatch.setattr(lab.draw, 'turns_of', lambda *_: turns)
    return turns

def run_main(module, monkeypatch, *words):
    monkeypatch.setattr('sys.argv', ['lab', *map(str, words)])
    module.main()

def test_pieces_take_a_drawing_to_another_machine(lab, two_turns, monkeypatch, tmp_path, capsys):
    "What one piece holds is left out of the next. With all pieces nothing is drawn or asked again."
    pair, first_turn = ('micro-small', 'micro-large'), ('--every', 0, 2)
    draws, drawn, walked, grades = (tmp_path/name for name in ('draws.db', 'drawn.xz', 'walked.xz', 'grades.xz'))
    run_main(lab.draw, monkeypatch, 'gsm8k', draws, *pair, *first_turn)
    run_main(lab.pieces, monkeypatch, 'save', draws, drawn)
    run_main(lab.judge, monkeypatch, 'gsm8k', draws, *pair, tmp_path/'grades.db', *first_turn)
    run_main(lab.pieces, monkeypatch, 'save', draws, walked, '--without', drawn)
    run_main(lab.pieces, monkeypatch, 'save', tmp_path/'grades.db', grades, '--grades')
    keys = [{key for key, _ in lab.pieces.read_piece(piece)[1]} for piece in (drawn, walked)]
    assert keys[0] and keys[1] and not keys[0] & keys[1]
    run_main(lab.pieces, monkeypatch, 'load', grades, tmp_path/'asked.db', '--grades')
    capsys.readouterr()
    run_main(lab.judge, monkeypatch, 'gsm8k', tmp_path/'new.db', *pair, tmp_path/'asked.db', *first_turn,
             '--taken', drawn, walked)
    assert '\n0 edges, 0 tokens, 1 of 1 turns' in '\n' + capsys.readouterr().out

def test_what_specreason_may_ask_is_drawn_and_nothing_twice(lab, two_turns, monkeypatch, tmp_path, capsys):
    "After the drawing, SpecReason walks at every threshold without a model."
    words = ['gsm8k', tmp_path/'draws.db', 'micro-small', 'micro-large', tmp_path/'grades.db', '--every', 0, 2]
    run_main(lab.judge, monkeypatch, *words)
    run_main(lab.judge, monkeypatch, *words)
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.endswith(' grades'))
    assert not first.startswith('0 edges') and second.startswith('0 edges, 0 tokens')
    with RolloutStore(tmp_path/'draws.db', readonly=True) as draws, \
            RolloutStore(tmp_path/'grades.db', readonly=True, record=Grade) as grades:
        tree = RoutingTree(None, draws, max_steps=MAX_STEPS['gsm8k'], grade=lambda *_: False)
        problems = [problem for split, problem in two_turns[0] if split != 'train']
        routers = [lab.judge.LikeliestDigit(grades, threshold=x) for x in (0, .05, .5, .95, 1.05)]
        walked = walk_outcomes([(router, problems) for router in routers], tree)
    assert walked[0]['large_steps'].sum() == 0 < walked[-1]['large_steps'].sum()

def test_two_stores_become_one_record(lab, monkeypatch, tmp_path):
    shipped = read_recorded('gsm8k')
    turns = [[(split, replaced(shipped.problems[split][i])) for split in SPLITS] for i in range(4)]
    monkeypatch.setattr(lab.record, 'turns_of', lambda *_: turns)
    stores = []
    for name, part in (('first', turns[:1] + turns[2:3]), ('second', turns[1:3])): # the first one has a gap
        ids = {problem.id for turn in part for _, problem in turn}
        stores.append(RolloutStore(tmp_path/f'{name}.db', shipped.about['settings']))
        stores[-1].put_many([edge for edge in shipped.edges if edge[0][0] in ids])
    line = lab.record.record('gsm8k', stores, None, {}, tmp_path)
    for store in stores: store.close()
    assert '3 train, 3 calibration, 3 test problems' in line
    made = read_recorded('gsm8k', tmp_path)
    wanted = {problem.id for turn in turns[:3] for _, problem in turn}
    assert made.edges == tuple(edge for edge in shipped.edges if edge[0][0] in wanted)
    assert made.verdicts == {key: right for key, right in shipped.verdicts.items() if key[0] in wanted}
    assert len(made.about['further_settings']) == 1

@pytest.mark.parametrize('name', NAMES)
def test_every_recorded_benchmark_is_replayed_up_to_the_limit_of_its_drawing(name):
    assert records.MAX_STEPS == MAX_STEPS
    assert read_run('recorded').config.data.max_steps == MAX_STEPS['gsm8k']
    with recorded_tree(name) as (problems, tree):
        assert len(outcome_table(problems, tree, 'train')) == len(problems)
