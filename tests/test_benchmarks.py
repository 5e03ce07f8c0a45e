"A benchmark is one record, and its steps can be lines."
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepwise_routing.records import Problem, Step, chat_prompt
from stepwise_routing.store import tree_settings
from stepwise_routing.util import run_async
from stepwise_routing.data import benchmarks
from stepwise_routing.data.benchmarks import (
    Benchmark,
    every_character,
    find_benchmark,
    load_problems,
    open_benchmark,
    register,
)
from stepwise_routing.data.grading import is_right
from stepwise_routing.data.recorded import closes_the_block, program_of
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.confidence import logit_confidence, math_token_mask, observe
from stepwise_routing.models import replies
from stepwise_routing.models.interface import Request, step_text

@pytest.fixture(autouse=True)
def unchanged(monkeypatch): monkeypatch.setattr(benchmarks, 'REGISTERED', dict(benchmarks.REGISTERED))

# ---- the record

class Sums: # the problems of a user
    licence, is_public = 'CC0', False
    def problems(self, split, data_dir=None):
        return [Problem('sums', f'{split}-{i}', f'What is {i} + 1?', str(i + 1)) for i in range(3)]

def test_ones_own_benchmark_is_loaded_graded_and_observed_by_its_record():
    sums = register(Benchmark('sums', Sums(), answer=lambda texts: texts[-1].split()[-1],
                              right=lambda problem, answer: int(answer) == int(problem.answer), scored=every_character))
    p = load_problems('sums', 'test', 2)[1]
    assert sums.read_answer((Step('x', 0, 'step'), Step('it is 2', 0, 'stop'))) == '2'
    assert is_right(p, '2') and not is_right(p, '3') and not is_right(p, None)
    step = Step('a 1', 0, 'step', ends=(1, 3), prob=(.5, .9), max_logit=(1., 3.))
    assert logit_confidence(step) == 3 and logit_confidence(step, sums.scored) == 2
    assert observe([step], sums.scored)[0, :2].tolist() == [2, .5]
    assert math_token_mask('a 1', (1, 3), every_character).tolist() == [True, True]

def test_a_shipped_benchmark_is_not_replaced_and_a_name_is_no_benchmark():
    for name in ('gsm8k', 'micro-gsm', 'gsm8k-recorded'):
        record = open_benchmark(name)
        with pytest.raises(ValueError, match=f'^{name} is shipped with the package: choose another name'):
            register(Benchmark(name))
        assert open_benchmark(name) is record
    with pytest.raises(ValueError, match="^register takes a Benchmark, got 'sums'"): register('sums')
    first, second = Benchmark('twice'), Benchmark('twice', separator='\n')
    assert register(first) is first and register(second) is open_benchmark('twice') is second

def test_own_asks_and_grades_as_the_record_of_its_name_says(tmp_path):
    from stepwise_routing.own import collect
    rows = [dict(question=p.question, answer=p.answer) for p in load_problems('micro-gsm', 'test', 6)]
    for name, right, percent in (('all', lambda p, answer: True, 100), ('none', lambda p, answer: False, 0)):
        register(Benchmark(name, right=right))
        got = collect(tmp_path/name, rows, ['micro-small', 'micro-large'], name=name)
        assert got['small right'] == got['large right'] == percent

def test_an_unknown_name_is_one_line_and_a_file_is_a_benchmark(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"): open_benchmark('gsm8')
    file = tmp_path/'mine.jsonl'
    file.write_text(''.join(json.dumps(dict(question=f'{i}?', answer=i)) + '\n' for i in range(40)))
    mine = open_benchmark(str(file))
    assert mine.name == 'mine'
    parts = {split: load_problems('mine', split) for split in SPLITS}
    assert sum(map(len, parts.values())) == 40 and all(parts.values())
    assert not {p.id for p in parts['train']} & {p.id for p in parts['test']}

def test_ones_own_file_registers_for_commands_and_chapters(tmp_path, monkeypatch):
    (tmp_path/'nbs'/'params').mkdir(parents=True)
    file = tmp_path/'nbs'/'own_benchmarks.py'
    imports = 'from stepwise_routing.data.benchmarks import Benchmark, register\n'
    file.write_text(imports + 'register(Benchmark("riddles"))\n')
    monkeypatch.chdir(tmp_path)
    assert open_benchmark('riddles').name == 'riddles'
    file.write_text('nonsense')
    with pytest.raises(ValueError, match='own_benchmarks.py: NameError') as e: open_benchmark('puzzles')
    assert '\n' not in str(e.value)

def test_the_benchmark_of_the_guide_works():
    code = re.findall(r'```python\n(.*?)```', (Path(__file__).parents[1]/'CONTRIBUTING.md').read_text('utf-8'), re.S)
    (example,) = [text for text in code if 'register(Benchmark(' in text]
    exec(example, {})
    p = load_problems('sums', 'test', 5)[4]
    answer = find_benchmark('sums').read_answer((Step('it is 5', 0, 'stop'),))
    assert is_right(p, answer) and not is_right(p, '4')

def test_what_the_draws_depend_on_is_in_the_settings_of_a_store():
    assert find_benchmark('gsm8k').draws == {} == find_benchmark('anything').draws
    lines = Benchmark('lines', separator='\n')
    assert lines.draws['separator'] == '\n'
    other = replace(lines, prompt=lambda question: [dict(role='user', content=question)])
    assert tree_settings('lines', [], lines.draws) != tree_settings('lines', [], other.draws)

# ---- steps that are lines

@pytest.mark.parametrize('raw, text, ended', [
    ('def f(x):\n    return x\n', 'def f(x):', True), ('    return x\n', '    return x', True),
    ('\n  \n    if x:  \n', '    if x:', True), ('    return', '    return', False), ('\n\n', '', False)])
def test_a_line_keeps_its_indentation(raw, text, ended): assert step_text(raw, '\n') == (text, ended)

def test_a_reply_is_cut_into_lines_and_ends_with_its_block():
    code = find_benchmark('mbpp-recorded')
    text = '```python\n# 1. add\ndef f(x):\n    return x + 1\n```\nThis works.'
    usage = dict(prompt=9, generated=20, cached=0)
    steps = replies.reply_steps(dict(text=text, finish='stop', usage=usage, ends=None, tokens=None), benchmark=code)
    assert [s.text for s in steps] == text.split('\n')[:-1]
    assert [s.finish for s in steps] == ['step']*4 + ['stop'] and steps[-1].final
    assert code.read_answer(steps) == '# 1. add\ndef f(x):\n    return x + 1'
    problem = Problem('mbpp-recorded', '1', 'Add one.', '{}')
    messages = replies.step_messages(Request(problem, steps[:4]))
    assert messages[:2] == chat_prompt('Add one.') and messages[2]['content'] == '\n'.join(text.split('\n')[:4])

def test_a_model_here_writes_lines():
    "The micro model writes paragraphs; as lines, its steps end at line ends, and its ids are those of one chain."
    from stepwise_routing.models.hub import load_micro
    problem = load_problems('micro-gsm', 'test', 1)[0]
    register(Benchmark('lines', separator='\n'))
    as_lines = replace(problem, benchmark='lines')
    model = load_micro('small', temperature=0)
    whole = run_async(model.write(Request(problem, to_end=True)))
    lines = run_async(model.write(Request(as_lines, to_end=True)))
    assert [s.text for s in lines] == [s.text for s in whole] and lines[-1].final
    one_by_one = ()
    while not (one_by_one and one_by_one[-1].final): one_by_one += run_async(model.write(Request(as_lines, one_by_one)))
    assert [s.ids for s in one_by_one] == [s.ids for s in lines]

def test_the_program_in_a_reply():
    assert program_of(('```python', 'def f(): pass', '```')) == 'def f(): pass' and program_of(('', ' ')) is None
    assert closes_the_block('```') and not closes_the_block('```python')
    assert closes_the_block('assert f(1) == 2') and program_of(('x = 1', 'assert x')) == 'x = 1'
    assert not closes_the_block('    assert x > 0'), 'a check inside of a function is code'

# ---- recorded outcomes

def test_recorded_outcomes_are_replayed_and_nothing_is_graded_again(tmp_path, monkeypatch):
    "The toy pair is drawn, recorded, read back and replayed: the outcome tables are equal."
    from toy_models import toy_backends, toy_problems

    from stepwise_routing.store import RolloutStore
    from stepwise_routing.data import recorded
    from stepwise_routing.method.outcomes import outcome_table
    from stepwise_routing.method.tree import RoutingTree, collect_rollouts
    problems, backends = toy_problems(12), toy_backends()
    with RolloutStore(tmp_path/'toy.db', tree_settings('toy', backends)) as store:
        tree = RoutingTree(backends, store)
        collect_rollouts(problems, tree, redraws=1)
        want = outcome_table(problems, tree, 'test', redraws=1)
        about = dict(benchmark='toy', licence='CC0', receipt={})
        paths = [tmp_path/name/'toy.jsonl.xz' for name in ('one', 'two')]
        parts = dict(test=problems[:10])
        files = [recorded.write_recorded(path, about, parts, store, tree.grades) for path in paths]
    assert files[0].read_bytes() == files[1].read_bytes()
    monkeypatch.setattr(recorded, 'FOLDER', tmp_path/'one')
    found = recorded.read_recorded('toy', tmp_path/'one')
    monkeypatch.setattr(recorded, 'read_recorded', lambda name: found)
    for _ in range(2): found.fill(tmp_path/'replay.db') # the second time there is nothing to do
    register(Benchmark('toy-recorded', recorded.RecordedSet('toy'), right=recorded.RecordedVerdict('toy')))
    replayed = load_problems('toy-recorded', 'test')
    assert [p.id for p in replayed] == [p.id for p in problems[:10]]
    with RolloutStore(tmp_path/'replay.db', readonly=True) as store:
        tree = RoutingTree(None, store)
        got = outcome_table(replayed, tree, 'test', redraws=1)
        with pytest.raises(LookupError, match='does not hold step'): run_async(tree.run(replayed[0], '01', 0))
    for name in ('correct', 'obs', 'small_tokens', 'large_tokens', 'large_redraws_right'):
        one, other = getattr(got, name), getattr(want, name)[:10]
        if one.ndim > 1: other = other[:, :one.shape[1]] # the longest chain may be of a problem that was not recorded
        assert np.array_equal(one, other, equal_nan=True), name
    with pytest.raises(LookupError, match='was not graded when toy was recorded'): is_right(replayed[0], 'never seen')

def test_a_benchmark_with_its_own_prompt_is_drawn_with_models(tmp_path):
    "The store knows the prompt, and so must the tree; another prompt is another store."
    from toy_models import toy_backends, toy_problems

    from stepwise_routing.store import RolloutStore
    from stepwise_routing.method.tree import RoutingTree, collect_rollouts
    def ask(question): return [dict(role='user', content=f'Please: {question}')]
    record = register(Benchmark('toy-asked', prompt=ask))
    backends = toy_backends()
    with RolloutStore(tmp_path/'draws.db', tree_settings('toy-asked', backends, record.draws)) as store:
        assert collect_rollouts(toy_problems(3, benchmark='toy-asked'), RoutingTree(backends, store)) > 3
        register(Benchmark('toy-asked', prompt=lambda question: ask(question * 2)))
        with pytest.raises(ValueError, match='settings.prompt is'): RoutingTree(backends, store)
