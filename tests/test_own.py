"A router for one's own models: what is kept, what is chosen, what is promised, and what a folder may not do."

import contextlib
import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from faulty import Faulty
from micro_router import with_threshold
from toy_own import PAIR, Adder, pair_module, ready, rows

from stepwise_routing import live, own
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.grading import is_equiv, is_right
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method import policy, rollouts
from stepwise_routing.models.names import open_models
from stepwise_routing.models.pair import Access, Model, Sampling, check_cost, public_name
from stepwise_routing.own import calibrate, collect, curve, fewest, own_table, route, train
from stepwise_routing.records import ModelSpec
from stepwise_routing.settings import Training
from stepwise_routing.store import Store

HERE = Path(__file__).parent
TABLES = 'train.npz', 'calibration.npz', 'problems.jsonl'


@pytest.fixture
def toys(monkeypatch):
    "Toy models in the place of real ones; `how` is for others, `made` has them, `opened` what was asked for."
    toys = SimpleNamespace(how={}, made=[], opened=[])

    @contextlib.contextmanager
    def open_toys(names, ledger=None, max_cents=None, **options):
        backends = [Adder(i, **toys.how) for i in range(len(names))]
        toys.made += backends
        toys.opened.append((names, ledger, options))
        yield backends

    monkeypatch.setattr(pair_module, 'open_models', open_toys)
    return toys


def content(folder) -> dict:
    with Store(Path(folder) / 'draws.db') as store:
        return {key: store.get(*key) for key in store.keys()}


# ---- the calls


def test_the_calls_on_toy_models(tmp_path, toys):
    got = collect(tmp_path, rows(), PAIR)
    assert got['train'] + got['calibration'] == 120 and got['new_steps'] > 240
    assert got['toy-0'] < got['toy-1'] and len(own_table(tmp_path, 'train')) == got['train']
    seen = train(tmp_path, 0.1, steps=10)
    assert list(seen['router']) == [*own.CLASSES[:2], *[own.CLASSES[2]] * 3]
    assert seen['cost'].between(0, 1).all() and seen['right'].between(0, 1).all()
    promise = calibrate(tmp_path, 0.1, guarantee=False)
    assert promise.n == got['calibration'] and promise.right >= promise.large_right - 0.1 - 1e-9
    answers = route(tmp_path, ['What is 3 + 4?', 'What is 5 + 6?'], PAIR)
    assert route(tmp_path, 'What is 3 + 4?', PAIR) == answers[0]
    for answer in answers:
        assert len(answer.steps) == len(answer.models) and set(answer.models) <= set(PAIR)
        assert answer.cost == 2 * (1e6 * answer.tokens[0] + 5e6 * answer.tokens[1])


@pytest.mark.parametrize('reading', rollouts.READINGS)
def test_a_replay_of_the_table_is_what_route_does(tmp_path, reading):
    "On micro models, for every router, at several thresholds: the same answers at the same cost, to the last bit."
    problems = load_problems('micro-gsm', 'train', 40)
    given = [dict(question=p.question, answer=p.answer) for p in problems]
    with open_models(['micro-small', 'micro-large'], **asdict(Sampling())) as backends:
        collect(tmp_path, given, backends)
        train(tmp_path, reading=reading, steps=10, seeds=1)
        outcomes = own_table(tmp_path, 'calibration')
        asked = own.own_split(own_problems(given), 0.4)['calibration']
        for name in own.CLASSES:
            router = own.min_prob
            if name != own.CLASSES[0]:
                router, _ = policy.load_policy(tmp_path / 'trained' / name)
            found = own.all_settings(outcomes, router, reading)
            for setting in np.linspace(2, len(found.kappas) - 2, 3).astype(int):
                kappa = float(found.kappas[setting])
                with with_threshold(router, backends, kappa, name, reading) as opened:
                    answers = opened.route([problem.question for problem in asked])
                right = [is_right(problem, a.answer) for problem, a in zip(asked, answers)]
                assert right == found.test.right[setting].tolist()
                assert [a.cost for a in answers] == found.test.cost[setting].tolist()


def test_the_deployed_router_does_what_calibration_says(tmp_path, toys):
    for guarantee in (True, False):
        ready(tmp_path)
        promise = calibrate(tmp_path, 0.3, guarantee)
        asked = own.own_split(own_problems(rows()), 0.4)['calibration']
        answers = route(tmp_path, [problem.question for problem in asked], PAIR)
        right = [is_equiv(problem.answer, a.answer) for problem, a in zip(asked, answers)]
        outcomes = own_table(tmp_path, 'calibration')
        large = rollouts.large_alone(outcomes, 'flops')
        assert np.mean(right) == pytest.approx(promise.right) and promise.router != live.LARGE
        cost = np.mean([a.cost for a in answers]) / large.cost.mean()
        assert cost == pytest.approx(promise.costs[promise.router])


# ---- what is kept


def test_nothing_is_drawn_twice_and_problems_can_be_added(tmp_path, toys):
    one, other = tmp_path / 'one', tmp_path / 'other'
    collect(one, rows(40), PAIR)
    collect(one, rows()[40:], PAIR)
    collect(other, rows(), PAIR)
    written = [model.steps_written for model in toys.made]
    assert collect(other, rows(), PAIR)['new_steps'] == 0 and sum(written[:4]) == sum(written[4:])
    assert content(one) == content(other) and len(content(one)) == sum(written[4:])
    for name in TABLES:
        assert (one / name).read_bytes() == (other / name).read_bytes()
    with pytest.raises(ValueError, match='has the answer .* now, and .* in'):
        collect(one, [dict(rows(1)[0], answer='0')], PAIR)


def test_problems_never_change_sides():
    problems = own_problems(rows(2000))
    sides = own.own_split(problems, 0.4)
    assert sorted(p.id for s in sides.values() for p in s) == sorted(p.id for p in problems)
    assert abs(len(sides['calibration']) / 2000 - 0.4) < 4 * (0.24 / 2000) ** 0.5
    assert set(own.own_split(problems[::3], 0.4)['train']) <= set(sides['train'])


CRASH = """
import contextlib, os, sys
sys.path[:0] = [{helpers!r}]
from toy_own import PAIR, Adder, collect, pair_module, rows
left = 500
class Mortal(Adder):
    async def write(self, request):
        global left
        left -= 1
        if left < 0: os.kill(os.getpid(), 9)
        return await super().write(request)
pair_module.open_models = lambda names, **options: contextlib.nullcontext([Mortal(0), Mortal(1)])
collect({folder!r}, rows(), PAIR)
"""


def test_a_killed_collect_goes_on(tmp_path, toys):
    folder = tmp_path / 'mine'
    code = CRASH.format(helpers=str(HERE / 'helpers'), folder=str(folder))
    died = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    begun = content(folder)
    with pytest.raises(ValueError, match='collect has not finished.*; call it again'):
        train(folder)
    got = collect(folder, rows(), PAIR)
    collect(tmp_path / 'whole', rows(), PAIR)
    assert 0 < len(begun) < len(content(folder)) == len(begun) + got['new_steps']
    assert content(folder) == content(tmp_path / 'whole')
    for name in TABLES:
        assert (folder / name).read_bytes() == (tmp_path / 'whole' / name).read_bytes()


def test_a_folder_stays_as_it_was_until_added_problems_are_drawn(tmp_path, toys, monkeypatch):
    promise, question = ready(tmp_path, 40), rows()[-1]['question']
    kept = {name: (tmp_path / name).read_bytes() for name in (*TABLES, 'own.json')}
    adder_step = Adder._step

    def refuse(self, problem, *args):
        if problem.question == question:
            raise RuntimeError('the server refuses the request')
        return adder_step(self, problem, *args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match='refuses'):
        patch.setattr(Adder, '_step', refuse)
        collect(tmp_path, rows(), PAIR)
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    assert calibrate(tmp_path, 0.1, guarantee=False) == promise
    got = collect(tmp_path, rows(), PAIR)
    assert got['train'] + got['calibration'] == 120


def test_a_paid_model_is_not_paid_twice_and_keeps_the_cap(tmp_path, monkeypatch):
    "The key is in no file of the folder, and the address in none that says what a router is."
    monkeypatch.setenv('MY_KEY', 'sk-123456789012345')
    given, sampling = rows(12), Sampling(max_reply=100)
    with Faulty(key='sk-123456789012345') as server:
        options = dict(base_url=server.url, key_env='MY_KEY', price='gpt-4.1-mini')
        models = ['micro-small', Model('openai:toy-model', **options)]
        with pytest.raises(RuntimeError, match='cap reached'):
            collect(tmp_path, given, models, sampling, max_cents=0.1)
        assert 0 < server.cents <= 0.1
        collect(tmp_path, given, models, sampling, max_cents=10)
        train(tmp_path, steps=2, seeds=1)
        promise = calibrate(tmp_path, 0.5, guarantee=False)
        answer = route(tmp_path, given[0]['question'], models, max_cents=10)
        assert promise.unit == answer.unit == 'cents'
        paid = Counter(request for request, _ in server.book)
        assert max(paid.values()) == 1 and len(paid) > 30
    for file in [path for path in tmp_path.rglob('*') if path.is_file()]:
        assert b'sk-123456789012345' not in file.read_bytes()
        if file.suffix == '.json':
            assert b'127.0.0.1' not in file.read_bytes() and b'MY_KEY' not in file.read_bytes()


@pytest.mark.parametrize(
    'how, said',
    [
        (dict(models=['toy-0', 'toy-2']), r'settings.models\[1\].spec.name is toy-1 there'),
        (dict(max_steps=7), 'max_steps is 30 there and 7 here'),
        (dict(calibration=0.5), 'calibration is 0.4 there and 0.5 here'),
    ],
)
def test_a_folder_is_for_one_thing(tmp_path, toys, how, said):
    collect(tmp_path, rows(20), PAIR)
    if 'models' in how:
        how = dict(models=[Adder(0), Adder(2)])
    with pytest.raises(ValueError, match=said):
        collect(tmp_path, rows(20), **dict(models=PAIR) | how)


def test_a_folder_in_which_nothing_was_drawn_takes_other_settings(tmp_path, toys, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match='no connection'):
        patch.setattr(
            Adder, 'write', lambda *_: (_ for _ in ()).throw(RuntimeError('no connection'))
        )
        collect(tmp_path, rows(20), PAIR, max_steps=7)
    assert collect(tmp_path, rows(20), PAIR)['new_steps'] > 0
    assert own.read_own(tmp_path).max_steps == 30


def test_collect_says_what_was_cut_and_what_grading_gave_up(tmp_path, toys, capsys):
    toys.how = dict(cut=0, end=0.05)
    collect(tmp_path, rows(40), PAIR, max_steps=5)
    table = own_table(tmp_path, 'train'), own_table(tmp_path, 'calibration')
    n = sum(int(part.cut[:, 0].sum()) for part in table)
    line = f'{n} of 40 chains of toy-0 alone were cut: raise max_steps (5)'
    assert n > 0 and line in capsys.readouterr().out


# ---- what is chosen


def constructed(folder, where):
    """Small chains of four steps; half of them go wrong at one step, which the large model repairs if it goes on there.

    `where`: what shows that step, "min_prob" or "length"."""
    collect(folder, rows(20), PAIR)
    rng, n = np.random.default_rng(0), 500
    for side in own.SIDES:
        wrong = np.where(rng.random(n) < 0.5, rng.integers(0, 4, n), 4)
        is_wrong = wrong[:, None] == np.arange(4)
        noise = rng.random((n, 4))
        prob = np.where(is_wrong, 0.2, 0.8) if where == 'min_prob' else noise
        length = 10 + 40.0 * is_wrong if where == 'length' else 10.0 + 0 * noise
        features = dict(min_prob=prob, mean_logit=20 * prob, min_odds=np.log(prob / (1 - prob)))
        features |= dict(
            step=np.arange(4) + 0 * noise, length=length, final=0 * noise, next_entropy=noise
        )
        left = np.array([40, 30, 20, 10, 0])
        right = np.arange(5) <= wrong[:, None] + 1
        right[:, 4] = wrong == 4
        outcomes = replace(
            own_table(folder, side),
            problem=np.arange(n).astype(str),
            features=features,
            small=np.full((n, 4, 4), 10),
            large=np.broadcast_to(left[:, None, None], (n, 5, 1, 4)),
            right=right[..., None].astype(int),
            steps=np.full(n, 4),
            cut=np.zeros((n, 2), bool),
        )
        rollouts.save(outcomes, folder / f'{side}.npz')


@pytest.mark.parametrize('where', ['min_prob', 'length'])
def test_the_simplest_router_that_is_nearly_the_cheapest(tmp_path, toys, capsys, where):
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
    looks = curve(tmp_path, (0.01, 0.05))
    assert looks['router'][0] == promise.router and looks['right'][0] == promise.right


def test_the_seed_in_the_middle_is_taken_on_training_problems(tmp_path, toys):
    constructed(tmp_path, 'length')
    seen = train(tmp_path, steps=3)
    costs = seen['cost'][seen['router'] == 'all features'].tolist()
    outcomes = own_table(tmp_path, 'train')
    columns = own.seen(outcomes, own.results.FULL)
    median = int(np.argsort(costs, kind='stable')[1])
    fitted = own.training.train(outcomes, columns, Training(steps=3), 'flops', 'continue', median)[
        0
    ]
    kept, facts = policy.load_policy(tmp_path / 'trained' / 'all features')
    assert kept.theta.equal(fitted.theta) and facts == dict(reading='continue')


def test_an_interface_without_logits(tmp_path, toys):
    toys.how = dict(has_logits=False)
    ready(tmp_path)
    columns = policy.load_policy(tmp_path / 'trained' / 'all features')[0].columns
    assert columns == ('min_odds', 'step', 'length', 'final')


def test_nothing_saved_means_the_large_model_alone(tmp_path, toys):
    collect(tmp_path, rows(400), PAIR)
    train(tmp_path, steps=3, seeds=1)
    n = len(own_table(tmp_path, 'calibration'))
    alpha = next(a for a in np.arange(0.01, 0.2, 0.001) if fewest(a) <= n)  # just enough
    promise = calibrate(tmp_path, float(alpha))
    assert (promise.router, promise.kappa, promise.right) == (live.LARGE, None, promise.large_right)
    assert 'nothing is lost against it, and nothing is saved' in str(promise)
    answers = route(tmp_path, [f'What is {i} + 4?' for i in range(5)], PAIR)
    assert {name for answer in answers for name in answer.models} == {'toy-1'}
    with pytest.raises(
        ValueError, match=f'{n} calibration problems are too few to guarantee .* at least'
    ):
        calibrate(tmp_path, float(alpha) / 2)


@pytest.mark.parametrize('alpha', [0.02, 0.05, 0.2])
def test_so_many_problems_are_needed(alpha):
    def is_safe(n):
        counts, cost = np.ones((1, n)), np.array([[1.0, 0.0]])
        return policy.guaranteed(np.zeros((2, n)), cost, counts, alpha, policy.DELTA / 3)[0] == 1

    n = fewest(alpha)
    assert is_safe(n) and not is_safe(n - 1) and 1 < n < 300


def test_only_calibrate_deploys(tmp_path, toys):
    ready(tmp_path)
    before = (tmp_path / 'router' / 'policy.json').read_bytes()
    train(tmp_path, 0.2, steps=5, seeds=1)
    curve(tmp_path, (0.02, 0.2))
    assert (tmp_path / 'router' / 'policy.json').read_bytes() == before


# ---- what goes wrong


def test_order_of_the_calls(tmp_path, toys):
    for call in (train, calibrate, lambda folder: route(folder, 'What?', PAIR)):
        with pytest.raises(FileNotFoundError, match='holds no router; make one with collect'):
            call(tmp_path)
    collect(tmp_path, rows(), PAIR)
    for call in (calibrate, curve):
        with pytest.raises(FileNotFoundError, match='nothing is trained yet'):
            call(tmp_path)
    train(tmp_path, 0.1, steps=5, seeds=1)
    with pytest.raises(FileNotFoundError, match='no router is deployed yet'):
        route(tmp_path, 'What?', PAIR)


def test_bad_arguments(tmp_path, toys):
    for bad, said in (
        (dict(models=['toy-0']), 'a small and a large model are needed, got 1'),
        (dict(models=['toy-0', 'toy-0']), 'the model toy-0 is given twice'),
        (dict(calibration=1), 'calibration is'),
        (dict(max_steps=0), 'max_steps is 0'),
        (dict(sampling=dict(temperature=1.0)), 'sampling is .* it should be'),
    ):
        with pytest.raises(ValueError, match=said) as error:
            collect(tmp_path / 'mine', rows(), **dict(models=PAIR) | bad)
        assert '\n' not in str(error.value) and not (tmp_path / 'mine').exists()
    ready(tmp_path / 'mine')
    for call, said in (
        (lambda folder: train(folder, seeds=0), 'seeds is 0'),
        (lambda folder: train(folder, reading='rewrites'), "did you mean 'rewrite'"),
        (lambda folder: calibrate(folder, 1.5), 'alpha is 1.5'),
        (lambda folder: route(folder, 'What?', [Adder(0), Adder(2)]), 'does not fit other models'),
        (
            lambda folder: route(folder, 'What?', ['toy-0', Adder(1)]),
            'names of models, or backends',
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call(tmp_path / 'mine')


def test_costs_that_cannot_be_compared():
    def check(*specs):
        check_cost([SimpleNamespace(spec=ModelSpec(*spec)) for spec in specs])

    check(('a', 1e6), ('b', 5e6))
    check(('a', 0.0, '0.1/0.05/0.4'), ('b', 0.0, 'gpt-4.1-mini'))
    check(('a', 1e6), ('b', 0.0, 'gpt-4.1-mini'))
    for specs, said in (
        ((('a', 0.0), ('b', 5e6)), 'the small model a costs'),
        ((('a', 1.0), ('b', 0.0)), 'large model b'),
        ((('a', 1.0, 'gpt-4.1-mini'), ('b', 5e6)), 'give both a price, or neither'),
        ((('a', 0.0, '0/0/0'), ('b', 0.0, '0/0/0')), 'price 0 for output.*price="free"'),
    ):
        with pytest.raises(ValueError, match=said):
            check(*specs)


# ---- a folder from somebody else


def test_a_folder_says_nothing_about_where_models_are(tmp_path, toys):
    local = tmp_path / 'models' / 'mine'
    local.mkdir(parents=True)
    given = dict(
        base_url='http://10.1.2.3:8000/v1', key_env='SECRET_VARIABLE', price='gpt-4.1-mini'
    )
    models = [str(local), 'openai:gpt-4.1-mini']
    collect(tmp_path / 'router', rows(20), models, Sampling(temperature=0.2), Access(**given))
    values = json.loads((tmp_path / 'router' / 'own.json').read_text())
    assert values['models'] == ['mine', 'openai:gpt-4.1-mini']
    assert values['sampling'] == asdict(Sampling(temperature=0.2))
    assert set(values) == {'format'} | {field.name for field in fields(own.Own)}
    ((names, ledger, options),) = toys.opened
    assert names == models and ledger == tmp_path / 'router' / 'ledger.db'
    assert options == values['sampling'] | given | dict(memory_shares=())


def test_a_received_folder_chooses_neither_host_nor_key_nor_model(tmp_path, toys):
    ready(tmp_path)
    before = route(tmp_path, 'What is 3 + 4?', PAIR)
    values = json.loads((tmp_path / 'own.json').read_text())

    def tamper(**changes):
        (tmp_path / 'own.json').write_text(json.dumps(values | changes))

    tamper(models=['/etc/passwd', 'openai:theirs'])
    assert route(tmp_path, 'What is 3 + 4?', PAIR, access=Access(key_env='MINE')) == before
    names, _, options = toys.opened[-1]
    assert names == PAIR and options['key_env'] == 'MINE' and 'base_url' not in options
    for change in (dict(base_url='x'), dict(sampling=dict(key_env='x')), dict(max_steps=0)):
        tamper(**change)
        with pytest.raises(ValueError) as error:
            route(tmp_path, 'What?', PAIR)
        assert '\n' not in str(error.value)


def test_only_router_and_own_json_are_needed_to_route(tmp_path, toys):
    ready(tmp_path)
    before = route(tmp_path, 'What is 3 + 4?', PAIR)
    for path in tmp_path.iterdir():
        if path.is_file() and path.name != 'own.json':
            path.unlink()
    assert route(tmp_path, 'What is 3 + 4?', PAIR) == before


def test_a_link_in_a_folder_that_is_written_to_is_refused(tmp_path, toys):
    folder = tmp_path / 'mine'
    ready(folder)
    (folder / 'ledger.db').symlink_to(tmp_path / 'victim')
    for call in (
        lambda: collect(folder, rows(), PAIR),
        lambda: route(folder, 'What?', PAIR),
    ):
        with pytest.raises(ValueError, match='ledger.db is a link'):
            call()
    assert not (tmp_path / 'victim').exists()


@pytest.mark.parametrize(
    'name, public',
    [
        ('micro-large', 'micro-large'),
        ('~/models/mine', 'mine'),
        ('vllm:/home/me/models/mine', 'vllm:mine'),
        ('openai:gpt-4.1-mini', 'openai:gpt-4.1-mini'),
        ('vllm-server:http://10.0.0.7:8000/v1', 'vllm-server:a model behind a server'),
        ('vllm-server:http://me:pw@10.0.0.7/v1#/home/me/m', 'vllm-server:m'),
    ],
)
def test_a_public_name_says_not_where_a_model_lies(name, public):
    assert public_name(name) == public
