"The public benchmarks, on samples of 20 rows: splits that share no question, files and the Hub, one line for bad rows."

import json
import sys
from pathlib import Path

import pytest

from stepwise_routing.data import benchmarks as data_benchmarks, sources as data_sources
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.sources import SPLITS

DATA = Path(__file__).parent / 'data'
SAMPLES = dict(
    gsm8k=DATA / 'gsm8k.jsonl', math500=DATA / 'math500.jsonl', omnimath=DATA / 'omnimath.jsonl'
)


def write(path, rows):
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    return path


def rows(name):
    return [json.loads(line) for line in SAMPLES[name].read_text(encoding='utf-8').splitlines()]


FILES = dict(
    gsm8k=('gsm8k_train', 'gsm8k_test'), math500=('math_train', 'math500'), omnimath=('omni_math',)
)
OTHER = [dict(question='Another?', problem='Another?', answer='#### 1', solution=r'\boxed{1}')]


def load(folder, name, split, raw, test=OTHER, n=None):
    "Problems of a split from a folder of copies; `raw` are the rows of its own file, `test` those of the test set."
    files = [folder / f'{f}.jsonl' for f in FILES[name]]
    write(files[-1], test)
    write(files[-1 if split == 'test' else 0], raw)
    return load_problems(name, split, n, data_dir=folder)


@pytest.mark.parametrize('name', SAMPLES)
def test_splits_are_disjoint_and_do_not_depend_on_the_order_of_the_file(name, tmp_path):
    raw = rows(name)
    split = {s: load(tmp_path, name, s, raw) for s in SPLITS}
    assert split == {s: load(tmp_path, name, s, raw[::-1]) for s in SPLITS}
    assert not {p.id for p in split['train']} & {p.id for p in split['calibration']}
    every = [p for s in SPLITS for p in split[s]]
    assert all(p.benchmark == name and p.answer and p.question for p in every)
    assert not any('\\boxed' in p.answer or '####' in p.answer for p in every)
    if name == 'omnimath':
        assert [len(split[s]) for s in SPLITS] == [8, 4, 8] and len({p.id for p in every}) == 20
    else:
        assert len(split['train']) + len(split['calibration']) == len(split['test']) == 20
    assert load(tmp_path, name, 'test', raw, n=3) == split['test'][:3]


@pytest.mark.parametrize('name', ['gsm8k', 'math500'])
def test_a_test_question_never_appears_in_train_or_calibration(name, tmp_path):
    field = data_sources.PUBLIC[name].fields[0]
    raw = rows(name)
    test = [{**r, field: '  ' + r[field].upper().replace(' ', '\n')} for r in raw[:10]]
    kept = [p for s in ('train', 'calibration') for p in load(tmp_path, name, s, raw, test)]
    assert len(kept) == 10
    keys = [
        {data_sources.question_key(p.question) for p in ps}
        for ps in (kept, load(tmp_path, name, 'test', test))
    ]
    assert not keys[0] & keys[1]


def test_from_the_hub_the_test_questions_are_left_out_too(monkeypatch):
    asked = []

    def hub(source):
        asked.append(source.revision)
        return rows('gsm8k')[: 20 if source.split == 'train' else 5]

    monkeypatch.setattr(data_sources, 'hub_rows', hub)
    parts = {s: load_problems('gsm8k', s) for s in SPLITS}
    assert len(parts['test']) == 5 and len(parts['train']) + len(parts['calibration']) == 15
    assert set(asked) == {'740312add88f781978c0658806c59bc2815b9866'}


def test_the_hub_is_asked_for_every_configuration_at_the_pinned_revision(monkeypatch):
    asked = []

    def load_dataset(name, config, split, revision):
        asked.append((name, config, split, revision))
        return [
            dict(problem=f'Question of {name} {config}', solution=r'\boxed{1}', level='Level 3')
        ]

    monkeypatch.setitem(
        sys.modules, 'datasets', type('datasets', (), dict(load_dataset=staticmethod(load_dataset)))
    )
    problems = load_problems('math500', 'train') + load_problems('math500', 'calibration')
    assert len(problems) == 7 and {p.difficulty for p in problems} == {3.0}
    sources = {('HuggingFaceH4/MATH-500', 'test'), ('EleutherAI/hendrycks_math', 'train')}
    assert {(n, s) for n, c, s, r in asked} == sources and all(len(r) == 40 for n, c, s, r in asked)
    assert len({c for n, c, s, r in asked if n.startswith('Eleuther')}) == 7


def test_twins_and_empty_answers_are_left_out(tmp_path):
    raw = rows('omnimath')
    twin, empty = (
        {**raw[0], 'problem': raw[0]['problem'].replace(' ', '  ').upper()},
        {**raw[1], 'answer': ''},
    )
    more = [*raw, twin, {**raw[2], 'answer': '\\[ ' + raw[2]['answer'] + ' \\]'}]
    found = [p for s in SPLITS for p in load(tmp_path, 'omnimath', s, more)]
    assert len(found) == 20
    assert next(p for p in found if p.question == raw[2]['problem']).answer == raw[2]['answer']
    assert (
        len([p for s in SPLITS for p in load(tmp_path, 'omnimath', s, [raw[0], empty, *raw[2:]])])
        == 19
    )


def test_known_near_duplicates_are_left_out_of_training_sets_and_never_of_math500(tmp_path):
    # MATH train; a MATH-500 problem divides by 9
    question = 'What is the remainder when $1 + 2 + 3 + 4 + \\dots + 9 + 10$ is  divided by 8?'
    raw = [*rows('math500'), dict(problem=question, solution=r'\boxed{7}')]
    assert (
        len([p for s in ('train', 'calibration') for p in load(tmp_path, 'math500', s, raw)]) == 20
    )
    assert len(load(tmp_path, 'math500', 'test', raw)) == 21


def test_gsm8k_rows():
    p = data_sources.read_gsm8k(
        dict(question='Q?', answer='Half is 48/2=<<48/2=24>>24.\nTotal 1,000.\n#### 1,000')
    )
    assert p.answer == '1000' and p.solution == 'Half is 48/2=24.\n\nTotal 1,000.'


def test_math_rows_take_the_last_box_where_no_answer_is_given():
    row = dict(problem='P', solution=r'So \boxed{1}, no, $\boxed{\frac{1}{2}}$.', level='Level 5')
    p = data_sources.read_math(row)
    assert p.answer == r'\frac{1}{2}' and p.difficulty == 5.0
    assert (
        data_sources.read_math(dict(problem='P', solution=r'\boxed{1}', level='Level ?')).difficulty
        is None
    )


# ---- a folder of local copies
@pytest.fixture
def local(tmp_path):
    for name, files in FILES.items():
        for f in files:
            write(
                tmp_path / f'{f}.jsonl',
                rows(name)[: 20 if f != 'gsm8k_test' and f != 'math500' else 5],
            )
    return tmp_path


@pytest.mark.parametrize('name', FILES)
def test_a_folder_gives_what_the_hub_gives_and_the_hub_is_not_asked(name, local, monkeypatch):
    for split in SPLITS:
        monkeypatch.setattr(
            data_sources, 'hub_rows', lambda source: data_sources.file_rows(local / source.file)
        )
        expected = load_problems(name, split)
        monkeypatch.setattr(
            data_sources, 'hub_rows', lambda source: pytest.fail('the Hub was asked')
        )
        assert load_problems(name, split, data_dir=str(local)) == expected


GOOD = '{"question": "2+2?", "answer": "#### 4"}\n'
BAD = [
    ('', 'holds no rows'),
    (GOOD + '{"question": "3+', r'row 2: not a JSON object \(.*cut off'),
    (GOOD + '\xff\xfe\n', 'row 2: the text is not UTF-8'),
    (GOOD + '[1]\n', 'row 2: not a JSON object'),
    (
        '{"qestion": "3?", "answer": "#### 3"}',
        r"row 1: no field 'question' \(did you mean 'qestion'\?\)",
    ),
    (GOOD + '{"question": 3, "answer": "#### 3"}', "row 2: field 'question' is not text"),
    (GOOD + '{"question": "3?", "answer": "3"}', "row 2: field 'answer' has no \"#### number\""),
]


def test_bad_files_are_named_with_their_row(tmp_path):
    for text, message in BAD:
        (tmp_path / 'gsm8k_test.jsonl').write_bytes(text.encode('latin-1'))
        with pytest.raises(ValueError, match=message) as e:
            load_problems('gsm8k', 'test', data_dir=tmp_path)
        assert 'gsm8k_test.jsonl' in str(e.value) and '\n' not in str(e.value)


def test_bad_names_and_numbers_are_one_line(tmp_path):
    for args, line in (
        (('gms8k', 'test'), r"unknown benchmark 'gms8k' \(did you mean 'gsm8k'\?\)"),
        (('gsm8k', 'cal'), "unknown split 'cal'"),
        (('gsm8k', 'test', 0), 'at least 1'),
        (('micro-gsm', 'test', 10**6), 'micro-gsm test has .* problems: n=1000000 is too many'),
        (('micro-gsm', 'test', {'micro-gms': 3}), "did you mean 'micro-gsm'"),
        (('micro-gsm', 'test', {'micro-math': 3}), 'n has no value for micro-gsm'),
    ):
        with pytest.raises(ValueError, match=line):
            load_problems(*args)
    for folder, line in ((tmp_path, 'is not a file'), (tmp_path / 'none', 'is not a folder')):
        with pytest.raises(FileNotFoundError, match=line):
            load_problems('gsm8k', 'test', data_dir=folder)


def test_limits_and_numbers_per_benchmark():
    assert data_benchmarks.step_limit(30, 'gsm8k') == 30
    assert [
        data_benchmarks.step_limit(dict(default=30, omnimath=100), b) for b in ('gsm8k', 'omnimath')
    ] == [30, 100]
    counts = dict(default=3, omnimath=2)
    assert [len(load_problems(b, 'test', counts)) for b in data_benchmarks.MICRO] == [3] * 3


def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[hub\]" -c constraints\.txt'):
        load_problems('gsm8k', 'test')
