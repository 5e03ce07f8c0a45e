"A benchmark is one record; a file of questions is a benchmark, too."

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from stepwise_routing import own
from stepwise_routing.data import benchmarks
from stepwise_routing.data.benchmarks import Benchmark, load_problems, prompt_digest, register
from stepwise_routing.data.questions import own_problems, with_earlier
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.confidence import chain_features
from stepwise_routing.records import Problem, Step


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    monkeypatch.setattr(benchmarks, 'REGISTERED', dict(benchmarks.REGISTERED))


def test_ones_own_benchmark_is_loaded_graded_and_observed_by_its_record():
    rules = dict(
        answer=lambda problem, steps: steps[-1].text.removeprefix(problem.question),
        right=lambda problem, answer: int(answer) == int(problem.answer),
        scored=lambda text: np.ones(len(text), bool),
    )
    problem = Problem('sums', '1', 'What is 1 + 1?', '2')
    sums = register(Benchmark('sums', SimpleNamespace(problems=lambda *_: [problem]), **rules))
    assert load_problems('sums', 'test', 1) == [problem]
    assert sums.answer(problem, [Step('What is 1 + 1?2', 0, 'stop')]) == '2'
    answers = {'2': True, '02': True, '3': False, None: False}
    pairs = [(problem, answer) for answer in [*answers, '2']]
    verdicts = benchmarks.graded(benchmarks.grade_by_rules, pairs)
    assert verdicts == {(problem.id, answer): right for answer, right in answers.items()}
    step = Step('a 1', 0, 'step', ends=(1, 3), prob=(0.5, 0.9), max_logit=(1.0, 3.0))
    assert chain_features([step], sums.scored)['mean_logit'].tolist() == [2]
    assert chain_features([step])['mean_logit'].tolist() == [3]
    asked = Benchmark('asked', prompt=lambda question: [dict(role='user', content=question)])
    assert prompt_digest(register(asked).name) != prompt_digest('gsm8k') == prompt_digest('sums')


def test_an_unknown_name_or_number_is_one_line():
    for given, line in (
        (('gms8k', 'test'), "mean 'gsm8k'"),
        (('micro-gsm', 'tset'), "mean 'test'"),
        (('micro-gsm', 'test', 10**6), 'n=1000000 is too many'),
    ):
        with pytest.raises(ValueError, match=line):
            load_problems(*given)


def test_ones_own_file_registers_for_commands_and_chapters(tmp_path, monkeypatch):
    (tmp_path / 'nbs' / 'params').mkdir(parents=True)
    lines = 'import stepwise_routing.data.benchmarks as b\nb.register(b.Benchmark("riddles"))\n'
    (tmp_path / 'nbs' / 'own_benchmarks.py').write_text(lines)
    monkeypatch.chdir(tmp_path)
    own.draw_settings('riddles', [])  # as all calls of `own` do
    assert 'riddles' in benchmarks.REGISTERED


# ---- files of questions

ROWS = [dict(question=f'What is\n{i} + 1, "please"?', answer=i + 1) for i in range(40)]


def test_a_file_of_questions_is_a_benchmark(tmp_path):
    lines, whole, table = (tmp_path / f'mine.{kind}' for kind in ('jsonl', 'json', 'csv'))
    lines.write_text('\ufeff' + '\n\n'.join(map(json.dumps, ROWS)), 'utf-8')
    whole.write_text(json.dumps(ROWS, indent=1))
    with open(table, 'w', newline='') as file:
        csv.writer(file).writerows([ROWS[0], *(row.values() for row in ROWS)])
    problems = own_problems(ROWS, 'mine')
    assert own_problems(lines, 'mine') == own_problems(whole, 'mine') == problems
    assert own_problems(table, 'mine') == own_problems(problems * 2, 'mine') == problems
    parts = [load_problems(str(table), split) for split in SPLITS]
    assert benchmarks.open_benchmark(str(table)).name == 'mine'
    with pytest.raises(ValueError, match='give the file another name'):
        benchmarks.open_benchmark(str(lines))
    with pytest.raises(FileNotFoundError, match='no file none.jsonl of questions'):
        benchmarks.open_benchmark('none.jsonl')
    assert sorted(p.id for part in parts for p in part) == sorted(p.id for p in problems)
    assert len(problems) == 40 and all(parts)


def test_fields_of_another_harness_are_named_by_the_user(tmp_path):
    file = tmp_path / 'theirs.jsonl'
    file.write_text(json.dumps(dict(problem='1 + 1?', solution='...', target=2)))
    with pytest.raises(ValueError, match=r'theirs.jsonl, row 1: .*problem, solution, target'):
        own_problems(file)
    (problem,) = own_problems(file, fields=dict(question='problem', answer='target'))
    assert (problem.question, problem.answer) == ('1 + 1?', '2')


def test_answers_are_known_for_all_questions_or_for_none(tmp_path):
    "Without them a problem is the same one, and a run, which grades, does not take it."
    bare = [dict(question=row['question']) for row in ROWS]
    problems = own_problems(bare)
    assert {problem.answer for problem in problems} == {''}
    assert [p.id for p in problems] == [p.id for p in own_problems(ROWS)]
    for empty in (None, ''):
        assert own_problems([row | dict(answer=empty) for row in bare]) == problems
    assert own_problems(ROWS, fields=dict(answer=None)) == problems
    with pytest.raises(ValueError, match="3 of 40 questions have no answer, such as 'What is 0"):
        own_problems([*bare[:3], *ROWS[3:]])
    with pytest.raises(ValueError, match=r"fields=\{'answer': None\} if no answers are known"):
        own_problems([dict(question='3?', target=2)])
    (tmp_path / 'bare.json').write_text(json.dumps(bare))
    with pytest.raises(ValueError, match='has no answers, and a run grades them'):
        load_problems(str(tmp_path / 'bare.json'), 'train')


@pytest.mark.parametrize('separator', [',', ', ', ';', '\t'])
def test_a_table_of_another_program_is_read_and_no_question_is_lost(separator, tmp_path):
    table = tmp_path / 'MINE.CSV'
    lines = [separator.join(['id', 'question', 'answer'])]
    for i in range(3):
        lines.append(separator.join([str(i), f'"Is {i}{separator}or 7?"', str(i)]))
    table.write_text('\n'.join(lines))
    wanted = [f'Is {i}{separator}or 7?' for i in range(3)]
    assert [problem.question for problem in own_problems(table)] == wanted
    broken = [lines[2].replace('"', ''), lines[2].replace('7?"', '7?'), '"' + lines[2]]
    for line in broken:  # no quotes; one quote, left open or in front
        table.write_text('\n'.join([lines[0], lines[1], line, lines[3]]))
        with pytest.raises(ValueError, match='MINE.CSV, row 2: [^\n]*quote'):
            own_problems(table)


def test_json_without_rows_and_a_folder_with_another_file_are_refused(tmp_path):
    file = tmp_path / 'problems.json'
    for text in ('null', '5', '{"data": []}'):
        file.write_text(text)
        with pytest.raises(ValueError, match='no list of rows'):
            own_problems(file)
    (tmp_path / 'problems.jsonl').write_text(GOOD)
    with pytest.raises(ValueError, match='problems.jsonl would be overwritten'):
        with_earlier(tmp_path, own_problems(ROWS), 'own')


GOOD = '{"question": "2+2?", "answer": 4}\n'
BAD = (
    '{"question": "3+',
    '[1]',
    '{"question": "3?", "solution": "3"}',
    '{"question": "3?", "answer": NaN}',
    '{"question": "3?", "answer": "so #### 3"}',
    r'{"question": "3?", "answer": "\frac{1}{2}"}',
    r'{"question": "3?\ud800", "answer": "3"}',
    '{"question": "2+2?", "answer": "5"}',
    '{"question": "3?", "answer": "\xff"}',
)


@pytest.mark.parametrize('text', BAD)
def test_a_bad_row_is_one_line_with_file_and_row(text, tmp_path):
    file = tmp_path / 'mine.jsonl'
    file.write_bytes((GOOD + text).encode('latin-1'))
    with pytest.raises(ValueError, match='mine.jsonl, row 2: ') as error:
        own_problems(file)
    assert '\n' not in str(error.value) and len(str(error.value)) < 300 + len(str(file))
