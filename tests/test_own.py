"A router for one's own models: what is kept, what is chosen, what is promised, and what a folder may not do."

import json
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from fake_api import PRICE, PROBLEMS, FakeAPI
from toy import toy
from toy_models import ToyModel, toy_models
from toy_own import ready, rows, with_threshold

from stepwise_routing import live, own
from stepwise_routing.data.benchmarks import is_right, load_problems
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method import policy, rollouts
from stepwise_routing.models.open import ModelOptions, open_models
from stepwise_routing.own import calibrate, collect, curve, fewest, own_table, route, train
from stepwise_routing.records import ModelSpec
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


def test_a_replay_of_the_table_is_what_route_does(tmp_path):
    "On micro models, both readings, for every router: the same answers and costs, bit by bit."
    problems = load_problems('micro-gsm', 'train', 12)
    given = [dict(question=p.question, answer=p.answer) for p in problems]
    models = open_models(['micro-small', 'micro-large'])
    collect(tmp_path, given, models)
    outcomes, asked = own_table(tmp_path, 'calibration'), calibration_problems(given)
    for reading in rollouts.READINGS:
        train(tmp_path, reading=reading, steps=2, seeds=1)
        for name in own.CLASSES:
            router = own.min_prob
            if name != own.CLASSES[0]:
                router, _ = policy.load_policy(tmp_path / 'trained' / name)
            found = own.all_settings(outcomes, router, reading)
            setting = len(found.kappas) // 2
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
    with pytest.raises(ValueError, match="has the answer '0'"):
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


def test_a_killed_collect_goes_on(tmp_path):
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
    assert content(folder) == content(tmp_path / 'whole')
    assert files(folder) == files(tmp_path / 'whole')


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


def test_a_paid_model_is_not_paid_twice_and_keeps_the_cap(tmp_path, monkeypatch):
    "The key is in no file of the folder, and the address in none that says what a router is."
    monkeypatch.setenv('MY_KEY', 'sk-123456789012345')
    given = [dict(question=p.question, answer=p.answer) for p in PROBLEMS[:12]]
    with FakeAPI(PROBLEMS[:12]) as fake:
        options = dict(base_url=fake.url, key_env='MY_KEY', price=PRICE, concurrency=4)
        models = ['micro-small', ModelOptions(name='openai:theirs', **options)]
        with pytest.raises(RuntimeError, match='the cap of 0.1 cents is reached'):
            collect(tmp_path, given, models, max_cents=0.1)
        calls = fake.paid.total()
        assert 0.1 <= fake.cents < 0.1 * (1 + 8 / calls)  # four calls were in flight
        collect(tmp_path, given, models)
        assert collect(tmp_path, given, models, max_cents=0)['new_steps'] == 0
        train(tmp_path, steps=2, seeds=1)
        promise = calibrate(tmp_path, 0.5, guarantee=False)
        answer = route(tmp_path, given[0]['question'], models)
        assert promise.unit == answer.unit == 'cents'
    assert set(fake.paid.values()) == {1} and len(fake.paid) > calls
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
    train(tmp_path, steps=1, seeds=1)
    assert capsys.readouterr().out.splitlines() == printed[:1]
    for side, line in zip(own.SIDES, printed, strict=True):
        table = own_table(tmp_path, side)
        small, large = table.cut.sum(0)
        assert f'{len(table)} {side} problems' in line and 'count as wrong. Raise max_st' in line
        assert f'a limit cut {small} of toy-0 alone, {large} of toy-1 alone' in line and small > 5
        assert (table.right[:, 0, 0] <= ~table.cut[:, 1]).all()
    capsys.readouterr()
    collect(tmp_path / 'whole', rows(40), toy_models(cut=0))
    assert capsys.readouterr().out == ''


# ---- what is chosen


@pytest.mark.parametrize('column', ['min_odds', 'length'])
def test_the_simplest_router_that_is_nearly_the_cheapest(tmp_path, capsys, column):
    "A column shows where the small model slips: the one that the threshold looks at, or another one."
    collect(tmp_path, rows(20), toy_models())
    for side in own.SIDES:
        o = toy(500, split=side, seed=len(side))
        odds, noise = o.features['min_odds'], np.where(o.inside, 0.5, np.nan)
        shown = dict(min_odds=noise, min_prob=noise, mean_logit=noise) | {column: odds}
        if column == 'min_odds':
            shown['min_prob'] = o.features['min_prob']
        rollouts.save(replace(o, features=o.features | shown), tmp_path / f'{side}.npz')
    train(tmp_path, 0.03, seeds=1)
    capsys.readouterr()
    promise = calibrate(tmp_path, 0.03)
    costs, taken = list(promise.costs.values()), own.CLASSES.index(promise.router)
    assert (taken > 0) == (column == 'length') and costs[taken] < 0.9
    assert costs[taken] <= 1.05 * min(costs) < min([*costs[:taken], 9])
    said = capsys.readouterr().out
    assert said == f'{promise}\n' and f'Router: {promise.router} (kappa: ' in said
    assert '90 % sure: on questions like these 500, the accuracy is at most 3 points below' in said
    names = {path.name for path in (tmp_path / 'router').iterdir()}
    assert names == ({'policy.json'} if taken == 0 else {'policy.json', 'theta.safetensors'})
    deployed = (tmp_path / 'router' / 'policy.json').read_bytes()
    looks = curve(tmp_path, (0.03, 0.05))
    assert looks['router'][0] == promise.router and looks['right'][0] == promise.right
    train(tmp_path, 0.2, steps=2, seeds=1)
    assert (tmp_path / 'router' / 'policy.json').read_bytes() == deployed, 'calibrate alone deploys'


def test_a_model_that_shows_no_logits(tmp_path):
    collect(tmp_path, rows(), toy_models(has_logits=False))
    train(tmp_path, steps=5, seeds=1)
    columns = policy.load_policy(tmp_path / 'trained' / 'all features')[0].columns
    assert columns == ('min_odds', 'step', 'length', 'final')


def test_nothing_saved_means_the_large_model_alone(tmp_path):
    collect(tmp_path, rows(), toy_models())
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


def test_calls_out_of_order_and_bad_arguments_are_one_line(tmp_path):
    def refused(said, call, *args, **options):
        with pytest.raises((ValueError, FileNotFoundError), match=said) as error:
            call(*args, **options)
        assert '\n' not in str(error.value)

    def refused_models(said, *models, **options):
        refused(said, collect, tmp_path / 'new', rows(), models, **options)

    mine, toys = tmp_path / 'mine', toy_models()
    for call in (train, calibrate, curve, lambda folder: route(folder, 'What?', toys)):
        refused('holds no router; make one with collect', call, mine)
    collect(mine, rows(40), toys)
    for call in (calibrate, curve):
        refused('nothing is trained yet', call, mine)
    refused('seeds is 0', train, mine, seeds=0)
    refused("did you mean 'rewrite'", train, mine, reading='rewrites')
    train(mine, 0.1, steps=2, seeds=1)
    refused('no router is deployed yet', route, mine, 'What?', toys)
    refused('alpha is 1.5', calibrate, mine, 1.5)
    calibrate(mine, 0.5, guarantee=False)
    refused('does not fit other models', route, mine, 'What?', [ToyModel(0), ToyModel(2)])
    refused('a question should be text', route, mine, ' ', toys)
    refused_models('a small and a large model are needed, got 1', 'toy-0')
    refused_models("did you mean 'micro-small'", 'micro-smal', 'micro-large')
    refused_models("did you mean 'temperature'", 'micro-small', 'micro-large', temprature=1)
    refused_models('calibration is 1', *toys, calibration=1)
    refused_models('max_steps is 0', *toys, max_steps=0)
    assert not (tmp_path / 'new' / 'own.json').exists()
    bare, paid = ModelSpec('b', 0.0), ModelSpec('b', 0.0, 'gpt-4.1-mini')
    own.check_cost([ModelSpec('a', 0.0), paid])
    for specs in ([ModelSpec('a', 1.0), bare], [bare, ModelSpec('c', 1.0)]):
        refused('nothing says what b costs', own.check_cost, specs)


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
