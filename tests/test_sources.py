"The public benchmarks, on samples of 20 rows: splits that share no question, from files and from the Hub."

import json
import sys
from pathlib import Path

import pytest

from stepwise_routing.data import sources
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.sources import PUBLIC, SPLITS, question_key

DATA = Path(__file__).parent / 'data'
FILES = dict(
    gsm8k=('gsm8k_train', 'gsm8k_test'), math500=('math_train', 'math500'), omnimath=('omni_math',)
)
OTHER = [dict(question='Another?', problem='Another?', answer='#### 1', solution=r'\boxed{1}')]


def rows(name):
    return [json.loads(line) for line in (DATA / f'{name}.jsonl').read_text('utf-8').splitlines()]


def load(folder, name, train, test=OTHER):  # (split -> problems, problems to train on)
    "From a folder of copies. A benchmark without a training set has one file."
    for file, content in zip(FILES[name], (train, test)):
        (folder / f'{file}.jsonl').write_text('\n'.join(map(json.dumps, content)))
    parts = {split: load_problems(name, split, data_dir=folder) for split in SPLITS}
    return parts, parts['train'] + parts['calibration']


@pytest.mark.parametrize('name', FILES)
def test_splits_are_disjoint_sorted_by_id_and_blind_to_the_order_of_the_file(name, tmp_path):
    raw = rows(name)
    parts, training = load(tmp_path, name, raw)
    assert parts == load(tmp_path, name, raw[::-1])[0]
    assert all(part == sorted(part, key=lambda p: p.id) for part in parts.values())
    assert all(p.question and p.answer for p in training)
    assert not any('\\boxed' in p.answer or '####' in p.answer for p in training)
    sizes = [len(part) for part in parts.values()]
    assert len({problem.id for part in parts.values() for problem in part}) == sum(sizes)
    assert sizes == [8, 4, 8] if name == 'omnimath' else sizes[0] + sizes[1] == 20
    assert load_problems(name, 'train', 3, data_dir=tmp_path) == parts['train'][:3]


@pytest.mark.parametrize('name', ['gsm8k', 'math500'])
def test_a_test_question_never_appears_in_train_or_calibration(name, tmp_path):
    field = PUBLIC[name].fields[0]
    raw = rows(name)
    test = [{**row, field: '  ' + row[field].upper().replace(' ', '\n')} for row in raw[:10]]
    parts, training = load(tmp_path, name, raw, test)
    keys = [question_key(p.question) for p in training + parts['test']]
    assert len(set(keys)) == len(keys) == 20 and len(parts['test']) == 10


def test_twins_empty_answers_and_known_near_duplicates_are_left_out(tmp_path):
    raw = rows('omnimath')
    twin = {**raw[0], 'problem': raw[0]['problem'].replace(' ', '  ').upper()}
    longer = {**raw[2], 'answer': '\\[ ' + raw[2]['answer'] + ' \\]'}
    empty = {**raw[1], 'answer': ''}
    more = [raw[0], empty, *raw[2:], twin, longer]
    parts, training = load(tmp_path, 'omnimath', more)
    found = training + parts['test']
    assert len(found) == 19
    assert {p.question: p.answer for p in found}[raw[2]['problem']] == raw[2]['answer']
    question = 'What is the remainder when $1 + 2 + 3 + 4 + \\dots + 9 + 10$ is  divided by 8?'
    more = [*rows('math500'), dict(problem=question, solution=r'\boxed{7}')]
    assert len(load(tmp_path, 'math500', more)[1]) == 20  # MATH-500 divides by 9
    assert len(load(tmp_path, 'math500', OTHER, more)[0]['test']) == 21


def test_rows_of_gsm8k_and_math():
    answer = 'Half is 48/2=<<48/2=24>>24.\nTotal 1,000.\n#### 1,000'
    problem = sources.read_gsm8k(dict(question='Q?', answer=answer))
    assert problem.answer == '1000' and problem.solution == 'Half is 48/2=24.\n\nTotal 1,000.'
    solution = r'So \boxed{1}, no, $\boxed{\frac{1}{2}}$.'
    problem = sources.read_math(dict(problem='P', solution=solution, level='Level 5'))
    assert (problem.answer, problem.difficulty) == (r'\frac{1}{2}', 5.0)


@pytest.mark.parametrize('name', FILES)
def test_the_hub_gives_what_a_folder_gives_at_pinned_revisions(name, tmp_path, monkeypatch):
    copies, _ = load(tmp_path, name, rows(name), rows(name)[:5])
    asked = set()

    def load_dataset(dataset, configuration, split, revision):
        asked.add((dataset, configuration, len(revision)))
        file = FILES[name][-1 if split == 'test' else 0]
        is_first = configuration in (None, 'main', 'algebra')
        return sources.file_rows(tmp_path / f'{file}.jsonl') if is_first else []

    datasets = type('datasets', (), dict(load_dataset=staticmethod(load_dataset)))
    monkeypatch.setitem(sys.modules, 'datasets', datasets)
    assert {split: load_problems(name, split) for split in SPLITS} == copies
    assert len(asked) == dict(gsm8k=1, math500=8, omnimath=1)[name]
    assert {length for *_, length in asked} == {40}
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[hub\]"'):
        load_problems(name, 'test')


def test_bad_files_are_named_with_their_row(tmp_path):
    good = '{"question": "2+2?", "answer": "#### 4"}'
    for bad in (good[:-1], '[1]', good.replace('qu', 'q'), good.replace('####', '')):
        (tmp_path / 'gsm8k_test.jsonl').write_text(f'{good}\n{bad}')
        with pytest.raises(ValueError, match='gsm8k_test.jsonl, row 2: [^\n]*$'):
            load_problems('gsm8k', 'test', data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match='math500.jsonl'):
        load_problems('math500', 'test', data_dir=tmp_path)
