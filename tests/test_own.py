"A router for one's own models: what is kept, what is chosen, what is promised, and what a folder may not do."

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from toy_models import ToyModel, toy_models
from toy_own import ready, rows, with_threshold

from stepwise_routing import live, own
from stepwise_routing.data.benchmarks import is_right, load_problems
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method import policy, rollouts
from stepwise_routing.models.open import ModelOptions, open_models
from stepwise_routing.own import calibrate, collect, curve, fewest, own_table, route, train
from stepwise_routing.records import ModelSpec
from stepwise_routing.settings import Training
from stepwise_routing.store import Store

HERE = Path(__file__).parent
TABLES = 'train.npz', 'calibration.npz', 'problems.jsonl'


def content(folder) -> dict:
    with Store(Path(folder) / 'draws.db') as store:
        return {key: store.get(*key) for key in store.keys()}


def files(folder) -> dict:
    return {name: (folder / name).read_bytes() for name in TABLES}


def calibration_problems(given=None):
    return own.own_split(own_problems(given or rows()), 0.4)['calibration']


def right_answers(problems, answers):
    return [is_right(problem, answer.answer) for problem, answer in zip(problems, answers)]


# ---- the promise is what route does


@pytest.mark.parametrize('reading', rollouts.READINGS)
def test_a_replay_of_the_table_is_what_route_does(tmp_path, reading):
    "On micro models, for every router, at several thresholds: the same answers at the same cost, to the last bit."
    problems = load_problems('micro-gsm', 'train', 40)
    given = [dict(question=p.question, answer=p.answer) for p in problems]
    models = open_models(['micro-small', 'micro-large'])
    collect(tmp_path, given, models)
    train(tmp_path, reading=reading, steps=10, seeds=1)
    outcomes = own_table(tmp_path, 'calibration')
    asked = calibration_problems(given)
    for name in own.CLASSES:
        router = own.min_prob
        if name != own.CLASSES[0]:
            router, _ = policy.load_policy(tmp_path / 'trained' / name)
        found = own.all_settings(outcomes, router, reading)
        for setting in np.linspace(2, len(found.kappas) - 2, 3).astype(int):
            opened = with_threshold(models, float(found.kappas[setting]), router, reading)
            answers = opened.route([problem.question for problem in asked])
            assert right_answers(asked, answers) == found.test.right[setting].tolist()
            assert [a.cost for a in answers] == found.test.cost[setting].tolist()


@pytest.mark.parametrize('k, reading', [(2, 'continue'), (2, 'rewrite'), (3, 'continue')])
def test_the_deployed_router_does_what_calibration_says(tmp_path, k, reading):
    "With two models or three. One question is answered as in a list."
    got = collect(tmp_path, rows(), toy_models(k))
    assert got['train'] + got['calibration'] == 120 and got['toy-0'] < got[f'toy-{k - 1}']
    seen = train(tmp_path, 0.1, reading, steps=10)
    assert list(seen['router']) == [*own.CLASSES[:2], *[own.CLASSES[2]] * 3]
    asked = calibration_problems()
    large = rollouts.large_alone(own_table(tmp_path, 'calibration'), 'flops')
    for alpha, guarantee in ((0.1, False), (0.3, True)):
        promise = calibrate(tmp_path, alpha, guarantee)
        assert promise.n == len(asked) == got['calibration'] and promise.router != live.LARGE
        assert promise.right >= promise.large_right - alpha - 1e-9
        assert promise.large_right == large.right.mean()
        answers = route(tmp_path, [problem.question for problem in asked], toy_models(k))
        assert np.mean(right_answers(asked, answers)) == pytest.approx(promise.right)
        cost = np.mean([answer.cost for answer in answers]) / large.cost.mean()
        assert cost == pytest.approx(promise.costs[promise.router])
    for answer in answers:
        assert len(answer.steps) == len(answer.models) and len(answer.tokens) == k
        assert answer.cost == sum(2e6 * 5**i * n for i, n in enumerate(answer.tokens))
    assert route(tmp_path, asked[0].question, toy_models(k)) == answers[0]


# ---- what is kept


def test_nothing_is_drawn_twice_and_problems_can_be_added(tmp_path):
    one, other, models = tmp_path / 'one', tmp_path / 'other', toy_models()
    collect(one, rows(40), models)
    first = files(one)
    collect(one, rows()[40:], models)
    collect(other, rows(), toy_models())
    assert collect(other, rows(), models)['new_steps'] == 0
    written = [key for model in models for key in model.written]
    assert sorted(written) == sorted(content(one)) and content(one) == content(other)
    assert files(one) == files(other) != first
    with pytest.raises(ValueError, match='has the answer .* now, and .* in'):
        collect(one, [dict(rows(1)[0], answer='0')], models)


def test_problems_never_change_sides():
    problems = own_problems(rows(2000))
    sides = own.own_split(problems, 0.4)
    assert sorted(p.id for s in sides.values() for p in s) == sorted(p.id for p in problems)
    assert abs(len(sides['calibration']) / 2000 - 0.4) < 4 * (0.24 / 2000) ** 0.5
    assert set(own.own_split(problems[::3], 0.4)['train']) <= set(sides['train'])


CRASH = """
import os, sys
sys.path[:0] = [{helpers!r}]
from toy_models import ToyModel, toy_models
from toy_own import collect, rows
class Mortal(ToyModel):
    def step(self, *args):
        if len(self.written) == 200: os.kill(os.getpid(), 9)
        return super().step(*args)
collect({folder!r}, rows(), [ToyModel(0), Mortal(1)])
"""


def test_a_killed_collect_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / 'mine'
    code = 'from stepwise_routing.method import rollouts\nrollouts.BLOCK = 8\n'
    code += CRASH.format(helpers=str(HERE / 'helpers'), folder=str(folder))
    died = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    begun = content(folder)
    assert {model for *_, model in begun} == {0, 1}
    with pytest.raises(ValueError, match='collect has not finished.*; call it again'):
        train(folder)
    got = collect(folder, rows(), toy_models())
    collect(tmp_path / 'whole', rows(), toy_models())
    assert len(begun) + got['new_steps'] == len(content(folder))
    assert content(folder) == content(tmp_path / 'whole') and files(folder) == files(
        tmp_path / 'whole'
    )


class Refusing(ToyModel):
    "A model behind a server that refuses one question."

    def write(self, requests):
        if any(request.problem.question == rows()[-1]['question'] for request in requests):
            raise RuntimeError('the server refuses the request')
        return super().write(requests)


def test_a_folder_stays_as_it_was_until_added_problems_are_drawn(tmp_path):
    promise = ready(tmp_path, 40)
    before, settings = files(tmp_path), (tmp_path / 'own.json').read_bytes()
    with pytest.raises(RuntimeError, match='refuses'):
        collect(tmp_path, rows(), [ToyModel(0), Refusing(1)])
    assert files(tmp_path) == before and (tmp_path / 'own.json').read_bytes() == settings
    assert calibrate(tmp_path, 0.1, guarantee=False) == promise
    got = collect(tmp_path, rows(), toy_models())
    assert got['train'] + got['calibration'] == 120


class Paid(BaseHTTPRequestHandler):
    "A server that is paid for each reply: it says that the answer is 7."

    protocol_version = 'HTTP/1.1'
    asked = Counter()

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers['content-length']))
        Paid.asked[body] += 1
        message = dict(role='assistant', content='One more.\n\nSo \\boxed{7}')
        usage = dict(prompt_tokens=500, completion_tokens=1000, total_tokens=1500)
        choice = dict(index=0, finish_reason='stop', message=message)
        reply = dict(id='1', object='chat.completion', created=1, model='m')
        data = json.dumps(reply | dict(choices=[choice], usage=usage)).encode()
        self.send_response(200)
        self.send_header('content-length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def paid_url():
    Paid.asked.clear()
    server = ThreadingHTTPServer(('127.0.0.1', 0), Paid)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/v1'
    server.shutdown()
    server.server_close()


def test_a_paid_model_is_not_paid_twice_and_keeps_the_cap(tmp_path, monkeypatch, paid_url):
    "The key is in no file of the folder, and the address in none that says what a router is."
    monkeypatch.setenv('MY_KEY', 'sk-123456789012345')
    options = dict(base_url=paid_url, key_env='MY_KEY', price='0.4/0.1/1.6', concurrency=4)
    models, cents = ['micro-small', ModelOptions(name='openai:theirs', **options)], 0.18
    with pytest.raises(RuntimeError, match='the cap of 2 cents is reached'):
        collect(tmp_path, rows(12), models, max_cents=2)
    assert 2 / cents <= len(Paid.asked) < 2 / cents + 4
    collect(tmp_path, rows(12), models, max_cents=100)
    assert collect(tmp_path, rows(12), models, max_cents=0)['new_steps'] == 0
    train(tmp_path, steps=2, seeds=1)
    promise = calibrate(tmp_path, 0.5, guarantee=False)
    answer = route(tmp_path, rows(1)[0]['question'], models, max_cents=100)
    assert promise.unit == answer.unit == 'cents'
    assert set(Paid.asked.values()) == {1} and len(Paid.asked) > 30
    for file in [path for path in tmp_path.rglob('*') if path.is_file()]:
        assert b'sk-123456789012345' not in file.read_bytes()
        if file.suffix == '.json':
            assert b'127.0.0.1' not in file.read_bytes() and b'MY_KEY' not in file.read_bytes()


def test_a_folder_is_for_one_thing(tmp_path):
    "Other settings are refused in one line, but a folder in which nothing was drawn takes them."
    with pytest.raises(RuntimeError, match='refuses'):
        collect(tmp_path, rows(), [Refusing(0), ToyModel(1)], max_steps=7)
    collect(tmp_path, rows(20), toy_models())
    assert own.read_own(tmp_path).max_steps == 50
    for change, said in (
        (dict(models=[ToyModel(0), ToyModel(2)]), 'spec.name is toy-1 there and toy-2 here'),
        (dict(models=toy_models(slip=0.1)), 'weights is .* there and .* here'),
        (dict(max_steps=7), 'max_steps is 50 there and 7 here'),
        (dict(calibration=0.5), 'calibration is 0.4 there and 0.5 here'),
    ):
        with pytest.raises(ValueError, match=said) as error:
            collect(tmp_path, rows(20), **dict(models=toy_models()) | change)
        assert '\n' not in str(error.value)


def test_cut_chains_are_counted_printed_and_named_as_the_cause(tmp_path, capsys):
    collect(tmp_path, rows(40), toy_models(cut=0, end=0.05), max_steps=5)
    printed = capsys.readouterr().out.splitlines()
    table = [own_table(tmp_path, side) for side in own.SIDES]
    for k, line in enumerate(printed):
        n = sum(int(part.cut[:, k].sum()) for part in table)
        assert n > 20 and line.startswith(f'{n} of 40 chains of toy-{k} alone were cut')
        assert 'raise max_steps (5)' in line
    assert len(printed) == 2
    assert all((part.right[:, 0, 0] <= ~part.cut[:, 1]).all() for part in table)


# ---- what is chosen


def constructed(folder, where):
    """Small chains of four steps; half of them go wrong at one step, which the large model repairs if it goes on there.

    `where`: what shows that step, "min_prob" or "length"."""
    collect(folder, rows(20), toy_models())
    rng, n = np.random.default_rng(0), 500
    for side in own.SIDES:
        wrong = np.where(rng.random(n) < 0.5, rng.integers(0, 4, n), 4)
        is_wrong = wrong[:, None] == np.arange(4)
        noise = rng.random((n, 4))
        prob = np.where(is_wrong, 0.2, 0.8) if where == 'min_prob' else noise
        length = 10 + 40.0 * is_wrong if where == 'length' else 10.0 + 0 * noise
        features = dict(min_prob=prob, mean_logit=20 * prob, min_odds=np.log(prob / (1 - prob)))
        features |= dict(step=np.arange(4) + 0 * noise, length=length, final=0 * noise)
        left = np.array([40, 30, 20, 10, 0])
        right = np.arange(5) <= wrong[:, None] + 1
        right[:, 4] = wrong == 4
        outcomes = replace(
            own_table(folder, side),
            problem=np.arange(n).astype(str),
            features=features | dict(next_entropy=noise),
            small=np.full((n, 4, 4), 10),
            large=np.broadcast_to(left[:, None, None], (n, 5, 1, 4)),
            right=right[..., None].astype(int),
            steps=np.full(n, 4),
            cut=np.zeros((n, 2), bool),
        )
        rollouts.save(outcomes, folder / f'{side}.npz')


@pytest.mark.parametrize('where', ['min_prob', 'length'])
def test_the_simplest_router_that_is_nearly_the_cheapest(tmp_path, capsys, where):
    constructed(tmp_path, where)
    train(tmp_path, 0.01, seeds=1)
    promise = calibrate(tmp_path, 0.01)
    costs, taken = list(promise.costs.values()), own.CLASSES.index(promise.router)
    assert (taken > 0) == (where == 'length') and costs[taken] < 0.9
    assert costs[taken] <= 1.05 * min(costs) < min([*costs[:taken], 9])
    said = capsys.readouterr().out
    assert said.endswith(f'{promise}\n') and f'Router: {promise.router} (kappa: ' in said
    assert '90 % sure: on questions like these 500, the accuracy is at most 1 points below' in said
    names = {path.name for path in (tmp_path / 'router').iterdir()}
    assert names == ({'policy.json'} if taken == 0 else {'policy.json', 'theta.safetensors'})
    deployed = (tmp_path / 'router' / 'policy.json').read_bytes()
    looks = curve(tmp_path, (0.01, 0.05))
    assert looks['router'][0] == promise.router and looks['right'][0] == promise.right
    train(tmp_path, 0.2, steps=2, seeds=1)
    assert (tmp_path / 'router' / 'policy.json').read_bytes() == deployed, 'calibrate alone deploys'


def test_the_seed_in_the_middle_is_taken_on_training_problems(tmp_path):
    constructed(tmp_path, 'length')
    seen = train(tmp_path, steps=3)
    costs = seen['cost'][seen['router'] == 'all features'].tolist()
    outcomes = own_table(tmp_path, 'train')
    columns = own.seen(outcomes, own.results.FULL)
    median = int(np.argsort(costs, kind='stable')[1])
    parts = outcomes, columns, Training(steps=3), 'flops', 'continue', median
    kept, facts = policy.load_policy(tmp_path / 'trained' / 'all features')
    assert kept.theta.equal(own.training.train(*parts)[0].theta)
    assert facts == dict(reading='continue')


def test_a_model_that_shows_no_logits(tmp_path):
    collect(tmp_path, rows(), toy_models(has_logits=False))
    train(tmp_path, steps=5, seeds=1)
    columns = policy.load_policy(tmp_path / 'trained' / 'all features')[0].columns
    assert columns == ('min_odds', 'step', 'length', 'final')


def test_nothing_saved_means_the_large_model_alone(tmp_path):
    collect(tmp_path, rows(400), toy_models())
    train(tmp_path, steps=3, seeds=1)
    n = len(own_table(tmp_path, 'calibration'))
    alpha = next(a for a in np.arange(0.01, 0.2, 0.001) if fewest(a) <= n)  # just enough
    promise = calibrate(tmp_path, float(alpha))
    assert (promise.router, promise.kappa, promise.right) == (live.LARGE, None, promise.large_right)
    assert 'nothing is lost against it, and nothing is saved' in str(promise)
    answers = route(tmp_path, [f'What is {i} + 4?' for i in range(5)], toy_models())
    assert {name for answer in answers for name in answer.models} == {'toy-1'}
    with pytest.raises(ValueError, match=f'{n} calibration problems are too few to guarantee'):
        calibrate(tmp_path, float(alpha) / 2)


@pytest.mark.parametrize('alpha', [0.02, 0.05, 0.2])
def test_so_many_problems_are_needed(alpha):
    def is_safe(n):
        counts, cost = np.ones((1, n)), np.array([[1.0, 0.0]])
        return policy.guaranteed(np.zeros((2, n)), cost, counts, alpha, policy.DELTA / 3)[0] == 1

    n = fewest(alpha)
    assert is_safe(n) and not is_safe(n - 1) and 1 < n < 300


# ---- what goes wrong


def test_order_of_the_calls(tmp_path):
    for call in (train, calibrate, lambda folder: route(folder, 'What?', toy_models())):
        with pytest.raises(FileNotFoundError, match='holds no router; make one with collect'):
            call(tmp_path)
    collect(tmp_path, rows(), toy_models())
    for call in (calibrate, curve):
        with pytest.raises(FileNotFoundError, match='nothing is trained yet'):
            call(tmp_path)
    train(tmp_path, 0.1, steps=5, seeds=1)
    with pytest.raises(FileNotFoundError, match='no router is deployed yet'):
        route(tmp_path, 'What?', toy_models())


def test_bad_arguments(tmp_path):
    bare, free = ModelSpec('b', 0.0), ModelSpec('b', 0.0, 'gpt-4.1-mini')
    own.check_cost([ModelSpec('a', 1.0), ModelSpec('b', 5.0)])
    own.check_cost([ModelSpec('a', 0.0), free])
    for specs in ([ModelSpec('a', 1.0), bare], [bare, ModelSpec('c', 1.0)]):
        with pytest.raises(ValueError, match='nothing says what b costs'):
            own.check_cost(specs)
    for bad, said in (
        (dict(models=['toy-0']), 'a small and a large model are needed, got 1'),
        (dict(models=['micro-smal', 'micro-large']), "did you mean 'micro-small'"),
        (dict(models=['micro-small', 'micro-large'], temprature=1), "did you mean 'temperature'"),
        (dict(calibration=1), 'calibration is 1'),
        (dict(max_steps=0), 'max_steps is 0'),
    ):
        with pytest.raises(ValueError, match=said) as error:
            collect(tmp_path / 'mine', rows(), **dict(models=toy_models()) | bad)
        assert '\n' not in str(error.value) and not (tmp_path / 'mine' / 'own.json').exists()
    ready(tmp_path / 'mine', 40)
    others = [ToyModel(0), ToyModel(2)]
    for call, said in (
        (lambda folder: train(folder, seeds=0), 'seeds is 0'),
        (lambda folder: train(folder, reading='rewrites'), "did you mean 'rewrite'"),
        (lambda folder: calibrate(folder, 1.5), 'alpha is 1.5'),
        (lambda folder: route(folder, 'What?', others), 'does not fit other models'),
        (lambda folder: route(folder, ' ', toy_models()), 'a question should be text'),
    ):
        with pytest.raises(ValueError, match=said):
            call(tmp_path / 'mine')


def test_a_folder_from_somebody_else_chooses_neither_host_nor_key_nor_model(tmp_path):
    "A router and own.json are enough to route, and they cannot say where models are."
    ready(tmp_path, 40)
    before = route(tmp_path, 'What is 3 + 4?', toy_models())
    for path in tmp_path.iterdir():
        if path.is_file() and path.name != 'own.json':
            path.unlink()
    values = json.loads((tmp_path / 'own.json').read_text())
    assert set(values) == {'format'} | {field.name for field in fields(own.Own)}

    def tamper(**changes):
        (tmp_path / 'own.json').write_text(json.dumps(values | changes))

    tamper(models=['/etc/passwd', 'openai:theirs'])
    assert route(tmp_path, 'What is 3 + 4?', toy_models()) == before
    for change in (dict(base_url='x'), dict(key_env='x'), dict(max_steps=0), dict(format='x')):
        tamper(**change)
        with pytest.raises(ValueError) as error:
            route(tmp_path, 'What?', toy_models())
        assert '\n' not in str(error.value)
