"A router for one's own models: what is kept, what is chosen, what is promised, and what a folder may not do."

import json
import re
from dataclasses import fields, replace
from unittest.mock import Mock

import numpy as np
import pytest
from fake_api import PRICE, PROBLEMS, FakeAPI
from toy import toy
from toy_models import ToyModel, toy_models
from toy_own import Calling, content, files, put, ready, refused, rows, with_threshold

from stepwise_routing import gain, live, own
from stepwise_routing.data.benchmarks import find_benchmark, grade_by_rules, is_right, load_problems
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method import policy, rollouts
from stepwise_routing.models.base import Request
from stepwise_routing.models.open import ModelOptions, open_models
from stepwise_routing.own import calibrate, collect, own_table, probe, route, train
from stepwise_routing.records import ModelSpec
from stepwise_routing.run.cli import main
from stepwise_routing.store import Replies


def right_answers(problems, answers):
    return [is_right(problem, answer.answer) for problem, answer in zip(problems, answers)]


def test_a_replay_of_the_table_is_what_route_does(tmp_path, monkeypatch):
    "On micro models, both readings, for every router: the same answers and costs, bit by bit."
    monkeypatch.setattr(gain, 'LEARNABLE', 2)
    models = open_models(['micro-small', 'micro-large'])
    given = own_problems(load_problems('micro-gsm', 'train', 12))
    collect(tmp_path, given, models)
    table = own_table(tmp_path, 'calibration')
    asked = [problem for problem in given if problem.id in table.problem]
    for reading in rollouts.READINGS:
        train(tmp_path, reading=reading, steps=2, seeds=1)
        for router in own.load_trained(tmp_path)[0].values():
            found = own.all_settings(table, router, reading)
            setting = len(found.kappas) // 2
            opened = with_threshold(models, float(found.kappas[setting]), router, reading)
            answers = opened.route([problem.question for problem in asked])
            assert right_answers(asked, answers) == found.test.right[setting].tolist()
            assert [a.cost for a in answers] == found.test.cost[setting].tolist()


@pytest.mark.parametrize('k, n, alpha', [(3, 400, 0.2), (2, 120, 0.1)])
def test_the_deployed_router_does_what_calibration_says(tmp_path, k, n, alpha):
    "One of three, or with few questions the threshold. It learns from none, so all of them calibrate it."
    reading = 'continue' if k == 3 else 'rewrite'
    got = collect(tmp_path, rows(n), toy_models(k))
    assert got['train'] + got['calibration'] == n and got['toy-0'] < got[f'toy-{k - 1}']
    routers = train(tmp_path, alpha, reading, steps=10)['router']
    assert [*routers] == ([*own.CLASSES, *own.CLASSES[2:] * 2] if n == 400 else [*own.CLASSES[:1]])
    for guarantee in (False, True):
        promise = calibrate(tmp_path, alpha, guarantee)
        side = '' if promise.router == own.CLASSES[0] else 'calibration'
        table = own_table(tmp_path, side)
        asked = [problem for problem in own_problems(rows(n)) if problem.id in table.problem]
        large = rollouts.large_alone(table, 'flops')
        assert promise.n == len(asked) and promise.handed_over > 0 and not promise.warning
        assert promise.right >= promise.large_right - alpha - 1e-9
        assert (promise.large_right, promise.large_cost) == (large.right.mean(), large.cost.mean())
        answers = route(tmp_path, [problem.question for problem in asked], toy_models(k))
        assert np.mean(right_answers(asked, answers)) == pytest.approx(promise.right)
        cost = np.mean([answer.cost for answer in answers]) / large.cost.mean()
        assert cost == pytest.approx(promise.cost)
        handed = np.mean([answer.models[-1] != 'toy-0' for answer in answers])
        assert handed == pytest.approx(promise.handed_over)
    assert list(answers[0].costs) == [2e6 * 5**i * n for i, n in enumerate(answers[0].tokens)]
    assert route(tmp_path, asked[0].question, toy_models(k)) == answers[0]


def test_without_answers_the_large_model_is_the_reference(tmp_path):
    "All is as if its answers had been given, but the promise speaks of agreement."
    bare, graded, grade = tmp_path / 'bare', tmp_path / 'graded', Mock(side_effect=grade_by_rules)
    problems = own_problems([dict(question=row['question']) for row in rows()])
    chains = ToyModel(2).write([Request(problem, to_end=True) for problem in problems])
    read = find_benchmark('own').answer
    known = {p.question: read(p, chain) or '' for p, chain in zip(problems, chains)}
    given = [dict(question=q, answer=answer or 'none') for q, answer in known.items()]
    collect(bare, problems, toy_models(3), grade)
    collect(graded, given, toy_models(3))
    asked = [problem for call in grade.call_args_list for problem, _ in call.args[0]]
    assert {p.question: p.answer for p in asked} == known and content(bare) == content(graded)
    promises = []
    for folder in (bare, graded):
        train(folder, reading='rewrite')
        promises.append(calibrate(folder, 0.2))
    assert promises[0] == replace(promises[1], agreement=True)
    assert promises[0].large_right == np.mean([answer != '' for answer in known.values()])
    assert "at most 20 of 100 answers differ from the large model's" in str(promises[0])
    refused('bare is for questions without', collect, bare, given[:1], toy_models(3))
    refused('graded is for questions with', collect, graded, problems[:1], toy_models(3))


def test_collect_goes_on_from_the_probe_and_names_its_price_first(tmp_path, capsys):
    "Nothing is drawn twice. Chains that a limit cut are counted."
    models = [Calling(i, lambda: print('asked'), prices=(None, PRICE)) for i in range(2)]
    price = r'collect: (\d+) questions are left; they need about .* US cents and .* minutes\n'
    found = probe(tmp_path, rows(), models)
    said = capsys.readouterr().out
    assert found.n == 40 and str(found) in said and 80 <= int(re.findall(price, said)[0]) <= 120
    assert all(len({key[0] for key in model.written}) == 40 for model in models)
    collect(tmp_path, rows(), models)
    assert re.match(price + 'asked', capsys.readouterr().out)
    assert collect(tmp_path, rows(), models)['new_steps'] == 0
    said = capsys.readouterr().out
    whole = probe(tmp_path, rows(), models, n=120)
    assert f'{whole.verdict} {whole.reason}' in said
    small, large = own_table(tmp_path).cut.sum(0)
    assert f'cut {small} of toy-0 alone, {large} of toy-1 alone; these chains count as wro' in said
    written = [key for model in models for key in model.written]
    assert sorted(written) == sorted(content(tmp_path)) and small > 5
    capsys.readouterr()
    collect(tmp_path / 'new', rows(), models)
    before, _, after = re.split(price, capsys.readouterr().out)
    assert before.count('asked') == 2 and 'AUROC' in before and 'asked' in after


def test_an_interrupted_collect_goes_on_and_until_then_a_folder_stays_as_it_was(tmp_path):
    "Problems are added, and keep their side and their answer."
    mine, whole, models = tmp_path / 'mine', tmp_path / 'whole', toy_models()
    promise, drawn, before = ready(mine, 40), content(mine), files(mine)
    sides = [set(own_table(mine, side).problem) for side in ('train', 'calibration')]
    stops = Mock(side_effect=[None, KeyboardInterrupt])  # before the hand-overs
    with pytest.raises(KeyboardInterrupt):
        collect(mine, rows(), [ToyModel(0), Calling(1, stops)])
    assert files(mine) == before and calibrate(mine, 0.1, guarantee=False) == promise
    assert (begun := content(mine)).items() > drawn.items()
    assert collect(mine, rows(), models)['new_steps'] == sum(len(m.written) for m in models)
    collect(whole, rows(), toy_models())
    assert content(mine) == content(whole) and files(mine) == files(whole) != before
    assert len(begun) + sum(len(model.written) for model in models) == len(content(mine))
    for side, problems in zip(('train', 'calibration'), sides):
        assert problems < set(own_table(mine, side).problem)
    refused("has the answer '0'", collect, mine, [dict(rows(1)[0], answer='0')], models)


def test_a_paid_model_is_not_paid_twice_and_keeps_the_cap(tmp_path, monkeypatch, capsys):
    "The key is in no file of the folder, and the address in none that says what a router is."
    monkeypatch.setenv('MY_KEY', 'sk-123456789012345')
    given = own_problems(PROBLEMS[:12])
    with FakeAPI(PROBLEMS[:12]) as fake:
        options = dict(base_url=fake.url, key_env='MY_KEY', price=PRICE, concurrency=4)
        models = ['micro-small', ModelOptions(name='openai:theirs', **options)]
        with pytest.raises(RuntimeError, match='the cap of 0.02 cents is reached'):
            collect(tmp_path, given, models, max_cents=0.02)
        assert 0.02 <= fake.cents and len(fake.paid) < 12
        capsys.readouterr()
        refused('max_cents is 0.1: raise', collect, tmp_path, given, models, max_cents=0.1)
        before = capsys.readouterr().out
        assert len(fake.paid) == 12  # what is left costs more, so nobody is asked for it
        Replies(tmp_path / 'replies.db').put('of an interrupted call', {}, 0.05)
        collect(tmp_path, given, models)
        said = capsys.readouterr().out
        assert f'{fake.cents + 0.05:.3g} US cents are paid' in said
        needed = [float(re.findall('about (.*) to', text)[0]) for text in (before, said)]
        assert needed[0] - needed[1] == pytest.approx(0.05, abs=0.011), 'none is paid again'
        assert collect(tmp_path, given, models, max_cents=0)['new_steps'] == 0
        train(tmp_path)
        promise = calibrate(tmp_path, 0.5, guarantee=False)
        answer = route(tmp_path, given[0].question, models)
        assert promise.unit == answer.unit == 'cents' and answer.costs[0] == 0
        with pytest.raises(RuntimeError, match='the cap of 0.02 cents is reached'):
            own.service(tmp_path, models, max_cents=0.02)
    assert set(fake.paid.values()) == {1} and len(fake.paid) > 12
    kept = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    assert not any(b'sk-123456789012345' in data for data in kept.values())
    public = b''.join(data for path, data in kept.items() if path.suffix == '.json')
    assert b'127.0.0.1' not in public and b'MY_KEY' not in public


@pytest.mark.parametrize('columns', [['min_prob', 'min_odds'], ['length']])
def test_the_simplest_router_that_is_nearly_the_cheapest(tmp_path, columns):
    "Columns show where the small model slips: those that all routers look at, or one that only networks do."
    o = toy(1000, seed=2)
    shown = dict.fromkeys(('min_odds', 'min_prob', 'mean_logit'), np.where(o.inside, 0.5, np.nan))
    shown |= dict.fromkeys(columns, o.features['min_odds'])
    put(tmp_path, replace(o, features=o.features | shown))
    train(tmp_path, 0.03, seeds=1)
    promise = calibrate(tmp_path, 0.03)
    costs, taken = list(promise.costs.values()), own.CLASSES.index(promise.router)
    assert (taken > 0) == (columns == ['length']) and promise.cost == costs[taken] < 0.9
    assert costs[taken] <= 1.05 * min(costs) < min([*costs[:taken], 9])
    assert f'at most 3 of 100 answers are lost, on questions like your {promise.n}' in str(promise)
    deployed = (tmp_path / 'router' / 'policy.json').read_bytes()
    train(tmp_path, 0.2, steps=2, seeds=1)
    assert (tmp_path / 'router' / 'policy.json').read_bytes() == deployed, 'calibrate alone deploys'


@pytest.mark.parametrize('hidden', [['mean_logit'], ['mean_logit', 'min_prob', 'min_odds']])
def test_a_model_that_shows_less(tmp_path, monkeypatch, hidden):
    "An API has no logits; without probabilities there is no threshold, and policies learn from what is left."
    monkeypatch.setattr(gain, 'LEARNABLE', 2 if len(hidden) == 1 else 200)
    o = toy(60)
    none = {name: np.full_like(o.features[name], np.nan) for name in hidden}
    put(tmp_path, replace(o, features=o.features | none))
    train(tmp_path, steps=2, seeds=1)
    routers, left = own.load_trained(tmp_path)[0], ('min_odds', 'step', 'length', 'final')
    assert routers['all features'].columns == (left[1:] if 'min_odds' in hidden else left)
    names = [*own.CLASSES['min_prob' in hidden :]]
    assert list(routers) == list(calibrate(tmp_path, 0.2).costs) == names


@pytest.mark.parametrize('routers', [1, 3])
def test_a_guarantee_takes_so_many_questions(tmp_path, monkeypatch, capsys, routers):
    "One router has the whole risk of 10 %, and is calibrated on all questions; of three each has a third of it."
    monkeypatch.setattr(gain, 'LEARNABLE', 2 if routers == 3 else 200)
    ones, delta = np.ones((1, 200)), policy.RISK / routers
    safe = [policy.passes_bets(0 * ones[:, :n], ones[:, :n], 0.05, delta) for n in range(20, 200)]
    needed = 20 + safe.index(True)  # without a loss
    o = toy(400)
    o = replace(o, right=np.ones_like(o.right))  # the small model never errs
    learnt_from, aside = own.own_split(o.problem, 0.4).values()
    for n in (needed - 1, needed):
        put(tmp_path, rollouts.take(o, [*learnt_from[:2], *aside[: n - 2]]))
        train(tmp_path, steps=1, seeds=1)
        capsys.readouterr()
        promise = calibrate(tmp_path, 0.05)
        said = capsys.readouterr().out
        assert (promise.n, len(promise.costs)) == (n, routers) and said.startswith(f'{promise}\n')
        if n < needed:
            assert (promise.router, promise.kappa, promise.cost) == (live.LARGE, None, 1)
            assert 'nothing is saved' in promise.warning and promise.words not in said
            assert f' 5 of 100 needs about {2 * n} questions in all if it is to save 5 %.' in said
            assert set(route(tmp_path, 'What is 1 + 4?', toy_models()).models) == {'toy-1'}
    assert promise.handed_over == 0 and promise.words in said
    assert 'the small model alone does as well' in promise.warning


def test_a_mistake_is_one_line(tmp_path):
    "Calls out of order, bad arguments, and other settings than those with which a folder was drawn."
    mine, new, toys = tmp_path / 'mine', tmp_path / 'new', toy_models()
    refused('holds no router; make one with collect', route, mine, 'What?', toys)
    with pytest.raises(KeyboardInterrupt):
        stops = Calling(0, Mock(side_effect=KeyboardInterrupt))
        collect(mine, rows(40), [stops, ToyModel(1)], max_steps=7)
    collect(mine, rows(40), toys)  # nothing was drawn, so it takes other settings
    assert own.read_own(mine).max_steps == 50
    refused('nothing is trained yet', calibrate, mine)
    refused('seeds is 0', train, mine, seeds=0)
    refused("did you mean 'rewrite'", train, mine, reading='rewrites')
    refused('n is 0', probe, mine, rows(40), toys, n=0)
    train(mine)
    calibrate(mine, 0.5, guarantee=False)
    refused('alpha is 1:', calibrate, mine, 1)
    refused('does not fit other models', route, mine, 'What?', [ToyModel(0), ToyModel(2)])
    refused('a question should be text', route, mine, ' ', toys)
    micro = 'micro-small', 'micro-large'
    for said, folder, models, options in (
        ('spec.name is toy-1 there and toy-2 here', mine, [ToyModel(0), ToyModel(2)], {}),
        ('weights is .* there and .* here', mine, toy_models(slip=0.1), {}),
        ('max_steps is 50 there and 7 here', mine, toys, dict(max_steps=7)),
        ('calibration is 0.4 there and 0.5 here', mine, toys, dict(calibration=0.5)),
        ('a small and a large model are needed, got 1', new, ['toy-0'], {}),
        ("did you mean 'micro-small'", new, ['micro-smal', 'micro-large'], {}),
        ("did you mean 'temperature'", new, micro, dict(temprature=1)),
        ('top_p: options are for models that are given by name', new, toys, dict(top_p=1)),
        ('calibration is 1', new, toys, dict(calibration=1)),
    ):
        refused(said, collect, folder, rows(40), models, **options)
    assert not (new / 'own.json').exists()
    bare, sized = ModelSpec('c', 0.0), ModelSpec('a', 1.0)
    own.check_cost([bare, ModelSpec('b', 0.0, 'gpt-4.1-mini')])
    refused('nothing says what c costs', own.check_cost, [bare, sized])
    refused('nothing says what c costs', own.check_cost, [sized, bare])


def test_models_and_their_options_from_a_file(tmp_path):
    file = tmp_path / 'models.yaml'
    for text, said in (
        ('name: micro-small', 'models.yaml should be a list of models'),
        ('- name: [', 'models.yaml'),
        ('- name: a\n- name: b\n  temprature: 1', "models.yaml, row 2: .*'temperature'"),
        ('- name: a\n- top_p: 1', 'models.yaml, row 2: .*name'),
    ):
        file.write_text(text)
        refused(said, own.opened, file, tmp_path, 1, {})
    file.write_text('- name: micro-small\n  temperature: 0\n- {name: micro-large, max_tokens: 60}')
    small, large = (model.settings() for model in own.opened(file, tmp_path, 1, {}))
    assert (small['temperature'], large['temperature'], large['max_tokens']) == (0, 0.7, 60)
    refused('top_p: options are for', own.opened, str(file), tmp_path, 1, dict(top_p=1))


def test_the_commands(tmp_path, monkeypatch, capsys):
    "From a file of questions to an answer; a mistake is one line and a status."
    monkeypatch.setattr(own, 'open_models', lambda given, *_, **__: toy_models(len(given)))
    lines = [json.dumps(dict(problem=r['question'], answer=r['answer'])) for r in rows()]
    (tmp_path / 'mine.jsonl').write_text('\n'.join(lines))
    monkeypatch.chdir(tmp_path)
    for words, said in (
        ('probe mine mine.jsonl toy-0 toy-1 --field question=problem -n 30', '30 questions, right'),
        ('train mine', '! mine: collect has not finished; call it again'),
        ('collect mine mine.jsonl toy-0 toy-1', "! .* no field 'question' among problem, answer"),
        ('collect mine mine.jsonl none.yaml --field question=problem', '! .*none.yaml'),
        ('collect mine mine.jsonl toy-0 toy-1 --field q=problem', '! --field q=problem: write'),
        ('collect mine mine.jsonl toy-0 toy-1 --field question=problem', '\n120 questions, right'),
        ('train mine --reading rewrite', 'min-prob threshold'),
        ('route mine What? toy-0 toy-1', '! .*no router is deployed yet'),
        ('curve mine --no-guarantee', 'large_right'),
        ('calibrate mine --alpha 1.5', '! .*alpha is 1.5'),
        ('calibrate mine --alpha 0.3', 'Router: min-prob threshold'),
        ('route mine What_is_3_+_4? toy-0 toy-1', r'toy-.: .*\n.* flops; tokens: '),
    ):
        with pytest.raises(SystemExit) as end:
            main(words.split())
        out, error = capsys.readouterr()
        is_wrong = said.startswith('! ')
        assert end.value.code == 2 * is_wrong and error.count('\n') == is_wrong, error
        assert re.search(said.replace('! ', 'stepwise-routing: '), error if is_wrong else out)
    promise = own.load_router('mine')[1]
    assert (promise.reading, promise.alpha, promise.guarantee) == ('rewrite', 0.3, True)


def test_a_folder_from_somebody_else_chooses_neither_host_nor_key_nor_model(tmp_path):
    "A router and own.json are enough to route, and they cannot say where models are."
    ready(tmp_path, 40)
    before = route(tmp_path, 'What is 3 + 4?', toy_models())
    for name in ('draws.db', 'problems.jsonl', 'outcomes.npz'):
        (tmp_path / name).unlink()
    file = tmp_path / 'own.json'
    values = json.loads(file.read_text())
    assert set(values) == {'format'} | {field.name for field in fields(own.Own)}
    file.write_text(json.dumps(values | dict(models=['/etc/passwd', 'openai:theirs'])))
    assert route(tmp_path, 'What is 3 + 4?', toy_models()) == before
    for change in (dict(base_url='x'), dict(key_env='x'), dict(max_steps=0), dict(format='x')):
        file.write_text(json.dumps(values | change))
        refused('.', route, tmp_path, 'What?', toy_models())


def test_a_model_that_thinks_aloud_is_named_with_what_to_do(tmp_path, capsys):
    small, step = ToyModel(0), ToyModel(0).step
    small.step = lambda *args: replace(step(*args), text='<think> So')
    probe(tmp_path, rows(40), [small, ToyModel(1)])
    assert re.search('\ntoy-0 thinks aloud.*enable_thinking', f'\n{capsys.readouterr().out}')
