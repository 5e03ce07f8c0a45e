"A benchmark is one record, and its steps can be lines."
import json
from dataclasses import replace

import numpy as np
import pytest

from stepwise_routing.data import benchmarks
from stepwise_routing.data.benchmarks import (
    Benchmark,
    find_benchmark,
    load_problems,
    open_benchmark,
    register,
)
from stepwise_routing.data.grading import is_right
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.confidence import chain_features, logit_confidence, math_token_mask
from stepwise_routing.models.interface import Request, step_text
from stepwise_routing.records import Problem, Step
from stepwise_routing.store import draw_settings
from stepwise_routing.util import run_async


@pytest.fixture(autouse=True)
def unchanged(monkeypatch): monkeypatch.setattr(benchmarks, 'REGISTERED', dict(benchmarks.REGISTERED))

# ---- the record

class Sums: # the problems of a user
    licence, is_public = 'CC0', False
    def problems(self, split, data_dir=None):
        return [Problem('sums', f'{split}-{i}', f'What is {i} + 1?', str(i + 1)) for i in range(3)]

def every_character(text): return np.ones(len(text), bool)

def test_ones_own_benchmark_is_loaded_graded_and_observed_by_its_record():
    sums = register(Benchmark('sums', Sums(), answer=lambda texts: texts[-1].split()[-1],
                              right=lambda problem, answer: int(answer) == int(problem.answer), scored=every_character))
    p = load_problems('sums', 'test', 2)[1]
    assert sums.read_answer((Step('x', 0, 'step'), Step('it is 2', 0, 'stop'))) == '2'
    assert is_right(p, '2') and not is_right(p, '3') and not is_right(p, None)
    step = Step('a 1', 0, 'step', ends=(1, 3), prob=(.5, .9), max_logit=(1., 3.))
    assert logit_confidence(step) == 3 and logit_confidence(step, sums.scored) == 2
    assert chain_features([step], sums.scored)['mean_logit'].tolist() == [2]
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

def test_what_the_draws_depend_on_is_in_the_settings_of_a_store():
    assert find_benchmark('gsm8k').draws == {} == find_benchmark('anything').draws
    lines = Benchmark('lines', separator='\n')
    assert lines.draws['separator'] == '\n'
    other = replace(lines, prompt=lambda question: [dict(role='user', content=question)])
    assert draw_settings('lines', [], lines.draws) != draw_settings('lines', [], other.draws)

# ---- steps that are lines

@pytest.mark.parametrize('raw, text, ended', [
    ('def f(x):\n    return x\n', 'def f(x):', True), ('    return x\n', '    return x', True),
    ('\n  \n    if x:  \n', '    if x:', True), ('    return', '    return', False), ('\n\n', '', False)])
def test_a_line_keeps_its_indentation(raw, text, ended): assert step_text(raw, '\n') == (text, ended)

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
