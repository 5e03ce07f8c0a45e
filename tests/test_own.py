import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy import ToyBackend, shuffled, toy_problems

import stepwise_routing.own as own_module
from stepwise_routing.base.records import extract_boxed
from stepwise_routing.base.store import RolloutStore
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.models.hub import micro_path
from stepwise_routing.own import *

HERE = Path(__file__).parent
PAIR = ['toy-0', 'toy-1']

@pytest.fixture(autouse=True, scope='module')
def home(tmp_path_factory):
    "The key that says which folders were made here lies in a home of its own."
    with pytest.MonkeyPatch.context() as m:
        m.setenv('XDG_CONFIG_HOME', str(tmp_path_factory.mktemp('config')))
        yield Path(os.environ['XDG_CONFIG_HOME'])/'stepwise-routing'/'key'

class Adder(ToyBackend):
    "A toy model that looks at the question alone: nobody tells it the answer."
    def _step(self, problem, *args):
        answer = sum(map(int, re.findall(r'\d+', problem.question)[:2]))
        return super()._step(replace(problem, answer=str(answer)), *args)

@pytest.fixture
def toys(monkeypatch):
    "Toy models in the place of real ones; `toys.change(...)` for others, `toys.made` has all that were opened."
    class Toys:
        how = {}
        def change(self, **how): self.how = how
        @contextlib.contextmanager
        def open(self, names, ledger=None, max_cents=None, **options):
            backends = [Adder(i, **self.how) for i in range(len(names))]
            self.made += backends
            yield backends
    toys = Toys()
    toys.made = []
    monkeypatch.setattr(own_module, 'open_models', toys.open)
    return toys

def rows(n=120, seed=0):
    return [dict(question=p.question + f' ({i})', answer=p.answer) for i, p in enumerate(toy_problems(n, seed))]

def content(folder):
    with RolloutStore(Path(folder)/'draws.db', readonly=True) as store: return {k: store.get(*k) for k in store.keys()}

def ready(folder, n=120, alpha=.1, **settings):
    collect(folder, rows(n), PAIR)
    train(folder, alpha, steps=20, **settings)
    return calibrate(folder)

# --- problems

def test_problems_come_from_a_file_or_from_rows(tmp_path):
    some = rows(5) + [dict(question='How much is a half?', answer=.5)] + rows(2)
    file = tmp_path/'mine.jsonl'
    file.write_text('\n'.join(map(json.dumps, some)) + '\n\n')
    problems = own_problems(file)
    assert problems == own_problems(some) == own_problems(problems) and len(problems) == 6
    assert problems[-1].answer == '0.5' and problems[0].benchmark == 'own'
    assert own_problems(some, 'mine')[0].id != problems[0].id

@pytest.mark.parametrize('row, said', [
    (dict(qestion='a', answer='1'), "row 2: no field 'question' (did you mean 'qestion'?); needed: question, answer"),
    (dict(question='a'), "row 2: no field 'answer'"),
    (dict(question=' ', answer='1'), "row 2: field 'question' is not text"),
    (dict(question=['a'], answer='1'), "field 'question' is not text"),
    (dict(question='a', answer=None), "'answer' is neither text nor a number"),
    (dict(question='a', answer=True), "'answer' is neither"), (dict(question='a', answer=' '), "'answer' is neither"),
    ('a', 'row 2: not a JSON object'),
    (dict(question='What is 1 + 1?', answer='3'), 'an earlier row has the same question and another answer')])
def test_a_bad_row_is_named(tmp_path, row, said):
    some = [dict(question='What is 1 + 1?', answer='2'), row]
    file = tmp_path/'bad.jsonl'
    file.write_text('\n'.join(map(json.dumps, some)))
    for source, where in (some, 'problems, '), (file, f'{file}, '):
        with pytest.raises(ValueError) as e: own_problems(source)
        assert said in str(e.value) and str(e.value).startswith(where) and '\n' not in str(e.value)

def test_no_problems_and_no_file(tmp_path):
    with pytest.raises(ValueError, match='holds no problems'): own_problems([])
    with pytest.raises(FileNotFoundError, match='is not a file'): own_problems(tmp_path/'none.jsonl')

def test_problems_never_change_sides():
    problems = own_problems(rows(2000))
    sides = own_split(problems, .4)
    assert sorted(p.id for s in sides.values() for p in s) == sorted(p.id for p in problems)
    assert abs(len(sides['calibration'])/2000 - .4) < 4*(.24/2000)**.5
    assert set(own_split(problems[::3], .4)['train']) <= set(sides['train'])

# --- the four calls, on toy models

def test_four_calls(tmp_path, toys):
    folder = tmp_path/'mine'
    got = collect(folder, rows(), PAIR)
    assert got['train'] + got['calibration'] == 120 and got['new steps'] > 240
    assert got['small right'] < got['large right']
    seen = train(folder, .1, steps=20)
    done = calibrate(folder, 'miss')
    assert done.met and done.n == got['calibration'] and done.bound <= .1 and seen["of the large model's cost"] > 0
    assert done.bound == pytest.approx((done.n*done.miss + 1)/(done.n + 1))
    answers = route(folder, ['What is 3 + 4?', 'What is 5 + 6?'])
    again = route(folder, 'What is 3 + 4?')
    assert again == answers[0] and [a.question for a in answers] == ['What is 3 + 4?', 'What is 5 + 6?']
    for a in answers:
        assert len(a.steps) == len(a.models) and set(a.models) <= {'toy-0', 'toy-1'}
        assert a.answer == extract_boxed(a.steps[-1])
        assert a.cost == 2*(1e6*a.tokens[0] + 5e6*a.tokens[1]) and a.unit == 'paper_flops'

def test_a_routed_problem_is_what_the_table_says(tmp_path, toys):
    "Questions that were collected too are routed on the same draws: live walks and the replay of the table agree."
    done, folder = ready(tmp_path/'mine'), tmp_path/'mine'
    problems = own_split(own_problems(rows()), .4)['calibration']
    answers = route(folder, [p.question for p in problems])
    right = np.array([is_equiv(p.answer, a.answer) for p, a in zip(problems, answers)])
    assert right.mean() == pytest.approx(done.accuracy)
    held = own_table(folder, 'calibration')
    assert np.mean([a.cost for a in answers])/held.large_only()['paper_flops'].mean() == pytest.approx(done.cost)

def test_nothing_is_done_twice(tmp_path, toys):
    ready(tmp_path/'mine')
    before = {p: p.stat().st_mtime_ns for p in (tmp_path/'mine'/'policy').iterdir()}
    written = sum(b.steps_written for b in toys.made)
    assert collect(tmp_path/'mine', rows(), PAIR)['new steps'] == 0 == sum(b.steps_written for b in toys.made) - written
    train(tmp_path/'mine', .1, steps=20)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path/'mine'/'policy').iterdir()}
    route(tmp_path/'mine', 'What is 3 + 4?') # still calibrated

def test_problems_can_be_added(tmp_path, toys):
    folder = tmp_path/'mine'
    first = collect(folder, rows(40), PAIR)
    collect(folder, rows()[40:], PAIR)
    ready(tmp_path/'other')
    assert content(folder) == content(tmp_path/'other') and len(content(folder)) > 0 and first['train'] < 40
    for name in ('train.npz', 'calibration.npz', 'problems.jsonl'):
        assert (folder/name).read_bytes() == (tmp_path/'other'/name).read_bytes()
    with pytest.raises(ValueError, match='the same question and another answer'):
        collect(folder, [dict(rows(1)[0], answer='0')], PAIR)
    assert collect(folder, rows(1), PAIR)['new steps'] == 0

def test_training_again_asks_for_calibration_again(tmp_path, toys):
    ready(tmp_path/'mine')
    train(tmp_path/'mine', .2, steps=20)
    with pytest.raises(ValueError, match='the threshold is not calibrated yet; call calibrate'):
        route(tmp_path/'mine', 'What is 3 + 4?')
    assert calibrate(tmp_path/'mine').alpha == .2 and route(tmp_path/'mine', 'What is 3 + 4?').steps

def test_a_program_asks_many_times(tmp_path, toys):
    ready(tmp_path/'mine')
    with open_router(tmp_path/'mine') as router:
        one = router.route('What is 3 + 4?')
        many = router.route(['What is 3 + 4?'] * 3 + ['What is 1 + 1?'])
        others = [router.route('What is 3 + 4?', sample=s).steps for s in range(5)]
        written = sum(b.steps_written for b in toys.made)
        router.route([a.question for a in many])
        assert sum(b.steps_written for b in toys.made) == written and router.route([]) == []
    assert many[:3] == [one]*3 and others[0] == one.steps and len(set(others)) > 1

def test_other_promises(tmp_path, toys):
    done = ready(tmp_path/'mine', on_escalate='append')
    with pytest.warns(UserWarning, match='no threshold keeps the bound'):
        assert not calibrate(tmp_path/'mine', 'miss', .03).met
    found = calibrate(tmp_path/'mine', alpha=.5)
    assert done.met and found.accuracy >= found.large - .5 and found.cost <= done.cost
    assert route(tmp_path/'mine', 'What is 3 + 4?').steps

# --- what goes wrong

def test_order_of_the_calls(tmp_path, toys):
    folder = tmp_path/'mine'
    for call in (train, calibrate, lambda f: route(f, 'What?')):
        with pytest.raises(FileNotFoundError, match='holds no router; make one with collect'): call(folder)
    collect(folder, rows(), PAIR)
    with pytest.raises(FileNotFoundError, match=r"holds no router \(did you mean 'mine'\?\)"): train(tmp_path/'mime')
    for call in (calibrate, lambda f: route(f, 'What?')):
        with pytest.raises(FileNotFoundError, match='nothing is trained yet'): call(folder)
    train(folder, .1, steps=5)
    with pytest.raises(ValueError, match='not calibrated yet'): route(folder, 'What?')

def test_too_few_problems_for_the_promise(tmp_path, toys):
    collect(tmp_path/'mine', rows(60), PAIR)
    train(tmp_path/'mine', .02, steps=5)
    n = len(own_table(tmp_path/'mine', 'calibration'))
    with pytest.raises(ValueError, match=f'{n} calibration problems are too few for 0.02, which takes at least 49'):
        calibrate(tmp_path/'mine', 'miss')
    assert calibrate(tmp_path/'mine', 'miss', 1/(n + 1)).n == n # just enough
    with pytest.raises(ValueError, match=f'takes at least {n + 1}'): calibrate(tmp_path/'mine', 'miss', 1/(n + 2))

def test_models_that_have_changed(tmp_path, toys):
    ready(tmp_path/'mine')
    toys.change(slip=.3)
    for call in (lambda: collect(tmp_path/'mine', rows(), PAIR), lambda: route(tmp_path/'mine', 'What?')):
        with pytest.raises(ValueError, match=r'holds draws with other settings: .*models\[0\].weights') as e: call()
        assert '\n' not in str(e.value)

@pytest.mark.parametrize('how, said', [
    (dict(models=['toy-0', 'toy-2']), r'other settings: settings.models\[1\] is toy-1 there and toy-2 here'),
    (dict(max_steps=7), 'max_steps is 30 there and 7 here'),
    (dict(calibration=.5), 'calibration is 0.4 there and 0.5 here'),
    (dict(temperature=.1), 'temperature is missing there and 0.1 here')])
def test_a_folder_is_for_one_thing(tmp_path, toys, how, said):
    collect(tmp_path/'mine', rows(20), PAIR)
    with pytest.raises(ValueError, match=said): collect(tmp_path/'mine', rows(20), **dict(dict(models=PAIR), **how))

def test_bad_arguments(tmp_path, toys):
    for models in ('toy-0', ['toy-0'], ['a', 'b', 'c']):
        with pytest.raises(ValueError, match='a small and a large model are needed'):
            collect(tmp_path/'mine', rows(), models)
    for share in (0, 1, -1):
        with pytest.raises(ValueError, match='calibration='): collect(tmp_path/'mine', rows(), PAIR, calibration=share)
    with pytest.raises(ValueError, match='options are kept in own.json'):
        collect(tmp_path/'mine', rows(), PAIR, dtype=object())
    assert not (tmp_path/'mine').exists()
    collect(tmp_path/'mine', rows(), PAIR)
    with pytest.raises(ValueError, match="unknown setting 'step'.*did you mean 'steps'"): train(tmp_path/'mine', step=3)
    train(tmp_path/'mine', .1, steps=5); calibrate(tmp_path/'mine')
    for q in ('', ' ', None, 3):
        with pytest.raises(ValueError, match='a question is a text'): route(tmp_path/'mine', [q])
    (tmp_path/'mine'/'own.json').write_text('{"format": "another"}')
    with pytest.raises(ValueError, match='is damaged or of another version'): train(tmp_path/'mine')

def test_a_model_without_price_or_size(tmp_path, monkeypatch):
    def opened(*args, **options): return contextlib.nullcontext([Adder(0), SizeLess(1)])
    monkeypatch.setattr(own_module, 'open_models', opened)
    collect(tmp_path/'mine', rows(), PAIR)
    with pytest.raises(ValueError, match='nothing says what the large model costs.*price='): train(tmp_path/'mine', .1)

class SizeLess(Adder):
    "A model behind an API that says nothing about its size."
    def __init__(self, index):
        super().__init__(index)
        self.spec = replace(self.spec, params=0.)

# --- a folder that somebody sent

def sent(folder, **changes):
    "As if it came from somebody else: own.json says what they like, without this user's mark or with an invented one."
    values = json.loads((folder/'own.json').read_text()) | dict(mark='0'*64) | changes
    (folder/'own.json').write_text(json.dumps(values))
    return folder

def test_a_foreign_folder_opens_no_model_of_its_choice(tmp_path, toys):
    ready(tmp_path/'mine')
    options = dict(base_url='https://evil.example/v1', key_env='AWS_SECRET_ACCESS_KEY')
    evil = sent(shutil.copytree(tmp_path/'mine', tmp_path/'evil'), options=options, models=['toy-0', 'openai:m'])
    made = len(toys.made)
    for call in (lambda: route(evil, 'What is 3 + 4?'), lambda: route(evil, 'What?', base_url='http://127.0.0.1:1/v1')):
        with pytest.raises(ValueError, match="was not made here.*'openai:m'.*evil.example.*AWS_SECRET_ACCESS_KEY") as e:
            call()
        assert '\n' not in str(e.value) and len(toys.made) == made
    for mark in ('', None, 'é', 7, (tmp_path/'mine'/'own.json').read_text()[-70:-5]):
        with pytest.raises(ValueError, match='was not made here'): route(sent(evil, mark=mark), 'What?')
    moved = shutil.move(tmp_path/'mine', tmp_path/'moved')
    assert route(moved, 'What is 3 + 4?').steps # what the user made stays one call

def test_with_models_of_ours_a_foreign_folder_says_neither_host_nor_key_nor_file(tmp_path, toys, monkeypatch):
    ready(tmp_path/'mine')
    before = route(tmp_path/'mine', 'What is 3 + 4?')
    opened = []
    @contextlib.contextmanager
    def spy(names, **options):
        opened.append((names, options))
        with toys.open(names) as backends: yield backends
    monkeypatch.setattr(own_module, 'open_models', spy)
    options = dict(base_url='https://evil.example/v1', key_env='HOME', identity={}, temperature=.7,
                   price='gpt-4.1-mini', max_tokens=['x'], ledger=str(tmp_path/'victim'))
    evil = sent(tmp_path/'mine', options=options)
    files = {p: p.read_bytes() for p in evil.rglob('*') if p.is_file()}
    assert route(evil, 'What is 3 + 4?', models=PAIR, key_env='MINE') == before
    (names, got), = opened
    assert names == PAIR and not got.pop('ledger').is_relative_to(tmp_path) and got.pop('max_cents') is None
    assert got == dict(temperature=.7, price='gpt-4.1-mini', key_env='MINE')
    assert files == {p: p.read_bytes() for p in evil.rglob('*') if p.is_file()} and not (tmp_path/'victim').exists()

def test_the_key_of_the_mark_is_for_its_user_alone(tmp_path, toys, home):
    collect(tmp_path/'mine', rows(20), PAIR)
    assert home.stat().st_mode & 0o777 == 0o600 and read_own(tmp_path/'mine')[1]
    key = home.read_bytes()
    home.unlink() # another user, or another machine
    assert not read_own(tmp_path/'mine')[1]
    collect(tmp_path/'mine', rows(20), PAIR)
    assert home.read_bytes() != key and read_own(tmp_path/'mine')[1]
    home.write_text('')
    with pytest.raises(ValueError, match='key is damaged: delete it'): read_own(tmp_path/'mine')
    home.unlink()

def test_an_exported_router_tells_nothing_private_and_answers_alike(tmp_path, toys, monkeypatch):
    monkeypatch.setenv('SECRET_VARIABLE', 'sk-1234567890')
    options = dict(temperature=.7, base_url='http://10.1.2.3:8000/v1', key_env='SECRET_VARIABLE')
    collect(tmp_path/'mine', rows(), PAIR, **options)
    train(tmp_path/'mine', .1, steps=20)
    with pytest.raises(ValueError, match='not calibrated yet'): export(tmp_path/'mine', tmp_path/'out')
    done = calibrate(tmp_path/'mine', 'miss')
    files = export(tmp_path/'mine', tmp_path/'out', licence='CC0-1.0')
    assert files == ['README.md', 'own.json', 'policy/config.json', 'policy/model.safetensors']
    text = ''.join((tmp_path/'out'/f).read_text() for f in files[:3])
    private = [str(tmp_path), str(Path.home()), '10.1.2.3', 'SECRET_VARIABLE', 'sk-1234567890', 'base_url', 'http',
               *(r['question'] for r in rows())]
    assert [x for x in private if x != '/' and x in text] == []
    card = (tmp_path/'out'/'README.md').read_text()
    for fact in ('toy-0', 'toy-1', 'CC0-1.0', 'alpha = 0.1', f'{done.n} calibration', f'{done.bound:.1%}', 'Limits'):
        assert fact in card
    with pytest.raises(ValueError, match='was not made here'): route(tmp_path/'out', 'What is 3 + 4?')
    with open_router(tmp_path/'out', models=PAIR) as router: answer = router.route('What is 3 + 4?')
    assert answer == route(tmp_path/'mine', 'What is 3 + 4?')
    with pytest.raises(ValueError, match='is not empty'): export(tmp_path/'mine', tmp_path/'out')
    toys.change(slip=.3)
    with pytest.raises(ValueError, match='trained for toy-0 with the weights') as e:
        route(tmp_path/'out', 'What?', models=PAIR)
    assert '\n' not in str(e.value)

def test_an_exported_router_says_not_where_its_models_lie(tmp_path, toys, monkeypatch):
    ready(tmp_path/'mine')
    own, here = read_own(tmp_path/'mine')
    own = replace(own, models=['toy-0', '/home/me/models/mine'])
    monkeypatch.setattr(own_module, 'read_own', lambda folder: (own, here))
    files = export(tmp_path/'mine', tmp_path/'out')
    assert not any(b'/home/me' in (tmp_path/'out'/f).read_bytes() for f in files)
    assert json.loads((tmp_path/'out'/'own.json').read_text())['models'] == ['toy-0', 'mine']

@pytest.mark.parametrize('name, public', [
    ('micro-large', 'micro-large'), ('Qwen/Qwen2.5@' + 'a'*40, 'Qwen/Qwen2.5@' + 'a'*40),
    ('/home/me/models/mine', 'mine'),
    ('vllm:/home/me/models/mine', 'vllm:mine'), ('openai:gpt-4.1-mini', 'openai:gpt-4.1-mini'),
    ('vllm-server:http://10.0.0.7:8000/v1', 'vllm-server:a model behind a server'),
    ('vllm-server:http://10.0.0.7:8000/v1#Qwen/Q', 'vllm-server:Qwen/Q'), ('served:/home/me/m', 'served:m'),
    ('vllm-server:http://me:pw@10.0.0.7/v1#/home/me/m', 'vllm-server:m')])
def test_a_public_name_says_not_where_a_model_lies(name, public): assert own_module._public(name) == public

@pytest.mark.parametrize('change', [dict(max_steps=0), dict(max_steps='x'), dict(models=['a']), dict(calibration='x'),
                                    dict(more=1), dict(format=0)])
def test_a_tampered_own_json_is_one_line(tmp_path, toys, change):
    ready(tmp_path/'mine')
    with pytest.raises(ValueError, match=r'own\.json is damaged') as e:
        route(sent(tmp_path/'mine', **change), 'What?', models=PAIR)
    assert '\n' not in str(e.value)

# --- interruptions

CRASH = '''
import contextlib, os, sys
sys.path[:0] = [{here!r}, {here!r} + '/helpers']
from test_own import PAIR, Adder, own_module, rows
left = {left}
@contextlib.contextmanager
def opened(names, **options):
    backends = [Adder(0), Adder(1)]
    for b in backends:
        async def write(request, b=b, old=b.write):
            global left
            left -= 1
            if left < 0: os.kill(os.getpid(), 9)
            return await old(request)
        b.write = write
    yield backends
own_module.open_models = opened
own_module.collect({folder!r}, rows(), PAIR)
'''

@pytest.mark.slow
def test_collect_says_what_grading_gave_up(tmp_path, toys):
    first = rows()[0]['question']
    def grade(problem, answer): return problem.question != first or is_equiv('3', '10^{10^{10^{10}}}')
    assert collect(tmp_path/'mine', rows(), PAIR, grade=grade)['answers given up'] == 1
    assert 'answers given up' not in collect(tmp_path/'other', rows(), PAIR)

def test_a_killed_collect_goes_on(tmp_path, toys):
    folder = tmp_path/'mine'
    died = subprocess.run([sys.executable, '-c', CRASH.format(here=str(HERE), left=200, folder=str(folder))],
                          capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    begun = content(folder)
    with pytest.raises(ValueError, match='collect has not finished; call it again'): train(folder)
    got = collect(folder, rows(), PAIR)
    collect(tmp_path/'whole', rows(), PAIR)
    assert 0 < len(begun) < len(content(folder)) == len(begun) + got['new steps']
    assert content(folder) == content(tmp_path/'whole')
    for name in ('train.npz', 'calibration.npz'):
        assert (folder/name).read_bytes() == (tmp_path/'whole'/name).read_bytes()
    ready(tmp_path/'whole')
    assert ready(folder) == calibrate(tmp_path/'whole')

def test_tables_of_fewer_problems_are_not_trained_on(tmp_path, toys):
    "Killed while problems were being added: the tables on disk are of the old ones."
    folder = tmp_path/'mine'
    collect(folder, rows(40), PAIR)
    def stop(*args, **kwargs): raise ZeroDivisionError
    with pytest.MonkeyPatch.context() as m, pytest.raises(ZeroDivisionError):
        m.setattr(own_module, 'outcome_table', stop)
        collect(folder, rows(), PAIR)
    with pytest.raises(ValueError, match='collect has not finished'): train(folder)
    collect(folder, rows(40), PAIR) # the others are in the folder already
    assert len(own_table(folder, 'train')) + len(own_table(folder, 'calibration')) == 120

# --- real models

@pytest.fixture(scope='module')
def questions(tmp_path_factory):
    "Own questions as a file; the last one is not in it."
    problems = load_problems('micro-omni', 'train', 25) # the small model misses enough of them
    file = tmp_path_factory.mktemp('own')/'questions.jsonl'
    file.write_text('\n'.join(json.dumps(dict(question=p.question, answer=p.answer)) for p in problems[:24]))
    return file, problems[-1].question

def calls(folder, file, models, **options):
    collect(folder, file, models, **options)
    train(folder, .3, steps=10)
    return calibrate(folder)

@pytest.mark.slow
def test_a_pair_with_other_token_ids(tmp_path, questions):
    file, question = questions
    pair = [shuffled(micro_path('small'), tmp_path/'small'), 'micro-large']
    done = calls(tmp_path/'mine', file, pair, max_tokens=64)
    assert done.met and done.n + len(own_table(tmp_path/'mine', 'train')) == 24
    answer = route(tmp_path/'mine', question)
    assert answer == route(tmp_path/'mine', question) and set(answer.models) <= {'small', 'micro-large'}
    steps = content(tmp_path/'mine')
    from stepwise_routing.models.hub import load_tokenizer
    texts = [load_tokenizer(p) for p in (pair[0], micro_path('large'))]
    for (_, _, path, m), s in list(steps.items())[:40]:
        # each step is in its own model's ids, which mean nothing to the other
        plain = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
        mine, other = (t.decode(s.ids, **plain) for t in (texts[m], texts[1 - m]))
        assert mine.strip() == s.text and other.strip() != s.text
    mixed = [s for (_, _, path, m), s in steps.items() if m == 1 and path.endswith('0')]
    assert len(mixed) > 5 and sum('=' in s.text for s in mixed) > .8*len(mixed) # and the large model goes on sensibly
    with pytest.raises(ValueError, match='other settings'):
        (tmp_path/'small'/'model.safetensors').write_bytes((micro_path('small')/'model.safetensors').read_bytes())
        route(tmp_path/'mine', question)

@pytest.mark.slow
def test_a_large_model_behind_a_server(tmp_path, questions):
    file, question = questions
    done = calls(tmp_path/'mine', file, ['micro-small', 'served:micro-large'], price='gpt-4.1-mini', max_cents=5,
                 max_reply=200)
    assert done.met
    with open_router(tmp_path/'mine', max_cents=5) as router: answer = router.route(question)
    assert answer.unit == 'cents'
    assert (answer.cost > 0) == ('served:micro-large' in answer.models or answer.tokens[1] > 0)
    assert collect(tmp_path/'mine', file, ['micro-small', 'served:micro-large'], price='gpt-4.1-mini', max_cents=0,
                   max_reply=200)['new steps'] == 0
