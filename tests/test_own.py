import asyncio
import contextlib
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from toy_own import PAIR, Adder, ready, rows

import stepwise_routing.models.pair as pair_module
import stepwise_routing.own as own_module
from stepwise_routing.records import ModelSpec, extract_boxed
from stepwise_routing.settings import Policy
from stepwise_routing.store import RolloutStore
from stepwise_routing.util import count_steps, gather_progress, run_async
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method.candidates import Candidate, HeldOut, nested_classes, problems_worth
from stepwise_routing.method.certain import FEW, TARGETS, Calibration, is_safe
from stepwise_routing.method.confidence import FEATURES, Scaler
from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.method.policy import load_policy, threshold_policy
from stepwise_routing.models.pair import Access, Sampling, check_cost, public_name
from stepwise_routing.own import *
from stepwise_routing.report.card import CLASSES, LARGE_ALONE, median_seed, simplest_class

HERE = Path(__file__).parent
@pytest.fixture
def toys(monkeypatch):
    """Toy models in the place of real ones; `toys.change(...)` for others. `toys.made` has all that were opened,
    `toys.opened` what was asked for: names, ledger, options."""
    class Toys:
        how = {}
        def change(self, **how): self.how = how
        @contextlib.contextmanager
        def open(self, names, ledger=None, max_cents=None, **options):
            backends = [Adder(i, **self.how) for i in range(len(names))]
            self.made += backends
            self.opened.append((names, ledger, options))
            yield backends
    toys = Toys()
    toys.made, toys.opened = [], []
    monkeypatch.setattr(pair_module, 'open_models', toys.open)
    return toys

def content(folder):
    with RolloutStore(Path(folder)/'draws.db', readonly=True) as store: return {k: store.get(*k) for k in store.keys()}

# --- problems

def test_problems_come_from_a_file_or_from_rows(tmp_path):
    some = rows(5) + [dict(question='How much is a half?', answer=.5)] + rows(2)
    fives = [own_problems([dict(question='How much?', answer=answer)]) for answer in (5, np.int64(5))]
    assert fives[0] == fives[1]
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
    (dict(question='a', answer=None), "'answer' is neither text nor a number"),
    (dict(question='a', answer='3 + 4 = 7\n#### 7'), 'give only what stands behind ####'),
    (dict(question='a', answer='\frac{1}{2}'), "'answer' holds '\\x0crac{1}{2}', LaTeX that has lost its backslash"),
    ('a', 'row 2: not a JSON object'),
    (dict(question='What is 1 + 1?', answer='3'), 'an earlier row has the same question and another answer')])
def test_a_bad_row_is_named(tmp_path, row, said):
    some = [dict(question='What is 1 + 1?', answer='2'), row]
    file = tmp_path/'bad.jsonl'
    file.write_text('\n'.join(map(json.dumps, some)))
    for source, where in (some, 'problems, '), (file, f'{file}, '):
        with pytest.raises(ValueError) as e: own_problems(source)
        assert said in str(e.value) and str(e.value).startswith(where) and '\n' not in str(e.value)

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
    assert got['small right'] < got['large right'] and len(own_table(folder, 'train')) == got['train']
    seen = train(folder, .1, steps=20)
    assert [*zip(seen['class'], seen['seed'])] == [('score_prob', 0), ('score_logit', 0), *(
        (name, seed) for name in ('paper', 'full') for seed in range(3))]
    assert (seen["of the large model's cost"] > 0).all()
    done = calibrate(folder, 'miss', .1).calibration
    assert done.met and done.n == got['calibration'] and done.bound <= .1
    assert done.bound == pytest.approx((done.n*done.miss + 1)/(done.n + 1))
    answers = route(folder, ['What is 3 + 4?', 'What is 5 + 6?'], PAIR)
    again = route(folder, 'What is 3 + 4?', PAIR)
    assert again == answers[0] and [a.question for a in answers] == ['What is 3 + 4?', 'What is 5 + 6?']
    for a in answers:
        assert len(a.steps) == len(a.models) and set(a.models) <= {'toy-0', 'toy-1'}
        assert a.answer == extract_boxed(a.steps[-1])
        assert a.cost == 2*(1e6*a.tokens[0] + 5e6*a.tokens[1]) and a.unit == 'paper_flops'

def test_a_routed_problem_is_what_the_table_says(tmp_path, toys):
    "Questions that were collected too are routed on the same draws: live walks and the replay of the table agree."
    done, folder = ready(tmp_path/'mine').calibration, tmp_path/'mine'
    problems = own_split(own_problems(rows()), .4)['calibration']
    answers = route(folder, [p.question for p in problems], PAIR)
    right = np.array([is_equiv(p.answer, a.answer) for p, a in zip(problems, answers)])
    assert right.mean() == pytest.approx(done.accuracy)
    held = own_table(folder, 'calibration')
    assert np.mean([a.cost for a in answers])/held.large_only()['paper_flops'].mean() == pytest.approx(done.cost)

def test_nothing_is_done_twice(tmp_path, toys):
    ready(tmp_path/'mine')
    def times():
        return {p: p.stat().st_mtime_ns for d in ('policy', 'candidates') for p in (tmp_path/'mine'/d).rglob('*.*')}
    before = times()
    written = sum(b.steps_written for b in toys.made)
    assert collect(tmp_path/'mine', rows(), PAIR)['new steps'] == 0 == sum(b.steps_written for b in toys.made) - written
    train(tmp_path/'mine', .1, steps=20, seeds=1)
    assert before == times() and len(before) == 2 + 4*2 + 2 # two files a policy, and logs of those that are trained
    route(tmp_path/'mine', 'What is 3 + 4?', PAIR) # still calibrated

def test_problems_can_be_added(tmp_path, toys):
    folder = tmp_path/'mine'
    first = collect(folder, rows(40), PAIR)
    collect(folder, rows()[40:], PAIR)
    ready(tmp_path/'other')
    assert content(folder) == content(tmp_path/'other') and len(content(folder)) > 0 and first['train'] < 40
    for name in ('train.npz', 'calibration.npz', 'problems.jsonl'):
        assert (folder/name).read_bytes() == (tmp_path/'other'/name).read_bytes()
    with pytest.raises(ValueError, match='has the answer .* now, and .* in'):
        collect(folder, [dict(rows(1)[0], answer='0')], PAIR)
    assert collect(folder, rows(1), PAIR)['new steps'] == 0

def test_only_calibration_deploys(tmp_path, toys):
    "To train anew, or to look at other alphas, leaves the router that is in use as it is."
    folder = tmp_path/'mine'
    ready(folder)
    def deployed(): return {p.name: p.read_bytes() for p in (folder/'policy').iterdir()}
    before = deployed()
    train(folder, .2, steps=5, seeds=2)
    seen = {target: curve(folder, target, alphas=(.02, .2)) for target in TARGETS}
    assert deployed() == before
    for target, table in seen.items():
        row = calibrate(folder, target, .2).row()
        assert [table[name][1] for name in row if name != 'needed'] == [row[name] for name in row if name != 'needed']
    assert deployed() != before and route(folder, 'What is 3 + 4?', PAIR).steps

# --- which router is deployed

def found(cost, met=True, kappa=.5, target='certain', alpha=.05, n=120):
    "A `Calibration` on which only some numbers matter."
    return Calibration(kappa, target, alpha, met, n, .9, .92, .03, .04, cost)

@pytest.mark.parametrize('costs, taken', [
    (dict(score_prob=.4, score_logit=.4, paper=.4, full=.4), 'score_prob'),
    (dict(score_prob=.42, full=.4), 'score_prob'),
    (dict(score_prob=.4201, full=.4), 'full'), (dict(score_prob=.9, score_logit=.41, paper=.5, full=.4), 'score_logit'),
    (dict(score_prob=None, score_logit=.6, full=.59), 'score_logit'), # its bound is not met
    (dict(score_prob=1., score_logit=1.03, paper=.97), 'paper'), # the large model alone is no router
    (dict(score_prob=None, full=1.), None), (dict(score_prob=None), None)])
def test_the_simplest_class_that_is_nearly_the_cheapest(costs, taken): assert simplest_class(costs) == taken

def test_a_class_stands_for_its_median_seed():
    assert median_seed([(0, found(.9)), (1, found(.2)), (2, found(.5))]) == (2, found(.5))
    assert median_seed([(0, found(.3)), (1, found(.3)), (2, found(.9))])[0] == 1
    assert median_seed([(0, found(.3)), (1, found(.2))])[0] == 0 # the dearer of two
    assert not median_seed([(0, found(.1, met=False)), (1, found(.2)), (2, found(.1, met=False))])[1].met
    assert median_seed([(0, found(.1, met=False)), (1, found(.2)), (2, found(.3))]) == (2, found(.3))

def constructed(folder, seen, n=300):
    """Small chains of four steps; half of them go wrong at one step, which the large model repairs if it takes over
    there. `seen`: what shows that step, "scores" or "length"."""
    collect(folder, rows(20), PAIR)
    rng = np.random.default_rng(0)
    for side in ('train', 'calibration'):
        wrong = np.where(rng.random(n) < .5, rng.integers(0, 4, n), 4)
        is_wrong = wrong[:, None] == np.arange(4)
        noise = rng.random((n, 4))
        score = np.where(is_wrong, .2*noise, .7 + .2*noise) if seen == 'scores' else noise
        columns = dict(score_prob=score, score_logit=20*score, index=np.arange(4), length=10 + 40.*is_wrong, final=0)
        obs = np.zeros((n, 4, len(FEATURES)))
        for name, values in columns.items(): obs[..., FEATURES.index(name)] = values
        toy = own_table(folder, side)
        left = np.tile([40, 30, 20, 10, 0], (n, 1))
        small = np.full((n, 4), 10)
        replace(toy, problem_id=np.arange(n).astype(str), sample=np.zeros(n, int), n_steps=np.full(n, 4), obs=obs,
                features=FEATURES, correct=1.*(np.arange(5) <= wrong[:, None]), large_tokens=left, large_prompt=left,
                large_steps=left//10, small_tokens=small, small_prompt=small, small_cents=0.*small, large_cents=0.*left,
                large_redraws_right=np.zeros((n, 0))).save(folder/f'{side}.npz')

def test_where_all_classes_can_do_it_the_threshold_is_deployed(tmp_path, toys, capsys):
    constructed(tmp_path/'mine', 'scores')
    train(tmp_path/'mine', steps=20, seeds=1)
    done = calibrate(tmp_path/'mine')
    assert done.model_class == 'score_prob' and done.calibration.met and done.calibration.cost < .8
    assert min(done.costs.values()) >= done.costs['score_prob']/1.05
    said = capsys.readouterr().out
    assert said == f'{done}\n' and 'A threshold on score_prob (kappa' in said and 'simplest class that costs' in said
    for line in [f'{CLASSES[name]}: {100*cost:.1f} %' for name, cost in done.costs.items()]: assert line in said
    n = done.calibration.n
    assert f'90 % sure: on questions like the {n} calibration questions, the accuracy is at most 5 points below' in said
    assert load_policy(tmp_path/'mine'/'policy').features == ('score_prob',)

def test_a_larger_class_is_deployed_where_it_is_much_cheaper(tmp_path, toys):
    constructed(tmp_path/'mine', 'length')
    train(tmp_path/'mine')
    done = calibrate(tmp_path/'mine')
    assert done.model_class == 'paper' and done.calibration.cost < .8*done.costs['score_prob']
    config = load_policy(tmp_path/'mine'/'policy').config
    assert (config['model_class'], config['seed'], config['kappa']) == ('paper', done.seed, done.calibration.kappa)
    every = train(tmp_path/'mine').query('`class` == "paper"')
    assert list(every['seed']) == [0, 1, 2] and done.seed in every['seed'].values

def test_the_same_calls_give_the_same_router(tmp_path, toys):
    for name in ('one', 'two'):
        constructed(tmp_path/name, 'length')
        train(tmp_path/name, steps=10, seeds=2)
    looks = [curve(tmp_path/name, alphas=(.02, .05)) for name in ('one', 'two')]
    assert looks[0].equals(looks[1]) and calibrate(tmp_path/'one') == calibrate(tmp_path/'two')
    for file in ('config.json', 'model.safetensors'):
        assert (tmp_path/'one'/'policy'/file).read_bytes() == (tmp_path/'two'/'policy'/file).read_bytes()

def test_nothing_certain_means_the_large_model_alone(tmp_path, toys, capsys):
    folder = tmp_path/'mine'
    collect(folder, rows(), PAIR)
    train(folder, steps=5, seeds=1)
    done = calibrate(folder, alpha=.001)
    assert (done.model_class, done.calibration.kappa, done.calibration.cost) == (LARGE_ALONE, -1, 1)
    assert done.calibration.accuracy == done.calibration.large and done.needed > done.calibration.n
    line = capsys.readouterr().out.split('\n')[1]
    assert f'no router saves cost and keeps the promise; about {done.needed} of them would do' in line
    assert f'collect {math.ceil(done.needed/.4)} problems' in line
    answers = route(folder, [f'What is {i} + 4?' for i in range(5)], PAIR)
    assert {digit for answer in answers for digit in answer.path} == {'1'}
    look = curve(folder, alphas=(.001, .5))
    assert look['class'][0] == LARGE_ALONE and look['needed'][0] == done.needed
    assert look['cost'][1] < 1 and pd.isna(look['needed'][1])

def test_no_class_keeps_the_bound_on_misses(tmp_path, toys):
    "Handed over to append, even the first threshold misses too much; then the large model answers alone."
    folder = tmp_path/'mine'
    collect(folder, rows(), PAIR)
    train(folder, on_escalate='append', steps=5, seeds=1)
    done = calibrate(folder, 'miss', .03)
    assert set(done.costs.values()) == {None} and done.model_class == LARGE_ALONE and done.calibration.met
    assert str(done).count('left out, its bound is not met') == len(done.costs)

@pytest.mark.parametrize('alpha, least', [(.002, FEW), (.05, 1)])
def test_so_many_problems_would_do_by_the_test_that_decides(alpha, least):
    "Forty problems are too few, even if nothing is lost on them; below 300 the exact test decides."
    policy = threshold_policy(Scaler(('score_logit',), (17.,), (3.,)))
    table = toy_table(40, 'calibration')
    sure = replace(table, correct=table.correct*0 + 1, large_redraws_right=np.ones((40, 1)))
    env = HeldOut(policy, sure, ('score_logit',), 'regenerate', 'paper_flops', policy.scaler)
    needed = problems_worth(Candidate('score_logit', 0, policy, env, env), alpha)
    assert least <= needed and is_safe(np.zeros(needed), alpha) and not is_safe(np.zeros(40), alpha)

def test_classes_follow_from_what_the_interfaces_give():
    every = nested_classes(('score_logit', 'score_prob', 'index', 'length', 'final'))
    assert list(every) == list(CLASSES) and every['paper'] == ('score_logit', 'index', 'length', 'final')
    assert nested_classes(('score_prob', 'index', 'length', 'final')) == dict(
        score_prob=('score_prob',), paper=('score_prob', 'index', 'length', 'final'))
    assert nested_classes(('score_logit', 'index')) == dict(
        score_logit=('score_logit',), paper=('score_logit', 'index'))
    assert nested_classes(('index', 'length')) == dict(paper=('index', 'length'))

# --- what goes wrong

def test_order_of_the_calls(tmp_path, toys):
    folder = tmp_path/'mine'
    for call in (train, calibrate, lambda f: route(f, 'What?', PAIR)):
        with pytest.raises(FileNotFoundError, match='holds no router; make one with collect'): call(folder)
    collect(folder, rows(), PAIR)
    for call in (calibrate, curve):
        with pytest.raises(FileNotFoundError, match='nothing is trained yet'): call(folder)
    train(folder, .1, steps=5, seeds=1)
    with pytest.raises(FileNotFoundError, match='nothing is trained'): load_policy(folder/'policy')
    with pytest.raises(ValueError, match='no router is deployed yet'): route(folder, 'What?', PAIR)

def test_too_few_problems_for_the_promise(tmp_path, toys):
    collect(tmp_path/'mine', rows(60), PAIR)
    train(tmp_path/'mine', .02, steps=5, seeds=1)
    n = len(own_table(tmp_path/'mine', 'calibration'))
    with pytest.raises(ValueError, match=f'{n} calibration problems are too few for 0.02, which takes at least 49'):
        calibrate(tmp_path/'mine', 'miss', .02)
    assert calibrate(tmp_path/'mine', 'miss', 1/(n + 1)).calibration.n == n # just enough
    with pytest.raises(ValueError, match=f'takes at least {n + 1}'): calibrate(tmp_path/'mine', 'miss', 1/(n + 2))

@pytest.mark.parametrize('how, said', [
    (dict(models=['toy-0', 'toy-2']), r'other settings: settings.models\[1\] is toy-1 there and toy-2 here'),
    (dict(max_steps=7), 'max_steps is 30 there and 7 here'),
    (dict(calibration=.5), 'calibration is 0.4 there and 0.5 here'),
    (dict(sampling=Sampling(temperature=.1)), 'sampling.temperature is 0.7 there and 0.1 here')])
def test_a_folder_is_for_one_thing(tmp_path, toys, how, said):
    collect(tmp_path/'mine', rows(20), PAIR)
    with pytest.raises(ValueError, match=said): collect(tmp_path/'mine', rows(20), **dict(dict(models=PAIR), **how))

def test_a_folder_in_which_nothing_was_drawn_takes_other_settings(tmp_path, toys, monkeypatch):
    "As after a wrong address: own.json and draws.db are there, and no draw is."
    def fail(problems, tree): raise RuntimeError('no connection')
    toys.change(slip=.3)
    with monkeypatch.context() as patch:
        patch.setattr(own_module, 'collect_rollouts', fail)
        with pytest.raises(RuntimeError, match='no connection'): collect(tmp_path/'mine', rows(20), PAIR, max_steps=7)
    toys.change()
    assert collect(tmp_path/'mine', rows(20), PAIR)['new steps'] > 0
    assert read_own(tmp_path/'mine').max_steps == 30
    with pytest.raises(ValueError, match='max_steps is 30 there and 7 here'):
        collect(tmp_path/'mine', rows(20), PAIR, max_steps=7)

def test_bad_arguments(tmp_path, toys):
    for bad, said in ((dict(models=['toy-0']), 'a small and a large model are needed, got 1'),
                      (dict(models=['a', 'b', 'c']), 'a small and a large model are needed, got 3'),
                      (dict(models=['toy-0', 'toy-0']), 'the model toy-0 is given twice'),
                      (dict(calibration=1), 'calibration is'), (dict(max_steps=0), 'max_steps is 0'),
                      (dict(sampling=dict(temperature=1.)), 'sampling is .* it should be')):
        with pytest.raises(ValueError, match=said) as e: collect(tmp_path/'mine', rows(), **dict(models=PAIR) | bad)
        assert '\n' not in str(e.value)
    with pytest.raises(ValueError, match=r"unknown setting 'temprature' \(did you mean 'temperature'\?\)"):
        Sampling(temprature=.1)
    assert not (tmp_path/'mine').exists()
    collect(tmp_path/'mine', rows(), PAIR)
    with pytest.raises(ValueError, match='seeds is 0'): train(tmp_path/'mine', seeds=0)
    train(tmp_path/'mine', .1, steps=5, seeds=1)
    with pytest.raises(ValueError, match="did you mean 'certain'"): calibrate(tmp_path/'mine', 'certian')
    calibrate(tmp_path/'mine')
    for question in (' ', 3):
        with pytest.raises(ValueError, match='a question should be text'): route(tmp_path/'mine', [question], PAIR)

def test_every_option_is_one_of_a_kind_of_model():
    "What the records say is what `open_models` takes, with the same values where nothing is said."
    from dataclasses import asdict, fields

    from stepwise_routing.models.chat import ApiOptions
    from stepwise_routing.models.hub import LocalOptions
    from stepwise_routing.models.vllm import VLLMOptions
    kinds = LocalOptions, VLLMOptions, ApiOptions
    taken = {field.name for kind in kinds for field in fields(kind)} | {'memory_shares'}
    assert set(asdict(Sampling()) | asdict(Access())) <= taken
    for name, value in asdict(Sampling()).items():
        assert {field.default for kind in kinds for field in fields(kind) if field.name == name} == {value}

def test_all_hyper_parameters_of_training(tmp_path, toys):
    collect(tmp_path/'mine', rows(), PAIR)
    exact = Policy(estimator='exact', batch=None, alpha=.1, steps=5, kappa=.3)
    def config(): return json.loads((tmp_path/'mine'/'candidates'/'full'/'seed0'/'config.json').read_text())
    one = train(tmp_path/'mine', seeds=1, policy=exact)
    assert one.equals(train(tmp_path/'mine', .1, steps=5, seeds=1, policy=replace(exact, steps=9)))
    assert [config()[name] for name in ('alpha', 'steps', 'estimator')] == [.1, 5, 'exact']
    train(tmp_path/'mine', seeds=1)
    assert config()['steps'] == 80

def test_costs_that_cannot_be_compared():
    def pair(*specs): return [SimpleNamespace(spec=ModelSpec(*spec)) for spec in specs]
    check_cost(pair(('a', 1e6), ('b', 5e6)))
    check_cost(pair(('a', 0., '0.1/0.05/0.4'), ('b', 0., 'gpt-4.1-mini')))
    check_cost(pair(('a', 1e6), ('b', 0., 'gpt-4.1-mini')))
    for specs, said in (((('a', 0.), ('b', 5e6)), 'the small model a costs'), ((('a', 1.), ('b', 0.)), 'large model b'),
                        ((('a', 1., 'gpt-4.1-mini'), ('b', 5e6)), 'give both a price, or neither')):
        with pytest.raises(ValueError, match=said): check_cost(pair(*specs))
    with pytest.raises(ValueError, match='price 0 for output.*price="free"'):
        check_cost(pair(('a', 0., '0/0/0'), ('b', 0., '0/0/0')))

def test_options_of_each_model_reach_it(monkeypatch):
    from stepwise_routing.models.names import open_models
    monkeypatch.setenv('MINE', 'sk-1234567890')
    each = [dict(base_url='http://127.0.0.1:9/v1', price='0.1/0.05/0.4'), dict(key_env='MINE', price='gpt-4o-mini')]
    with open_models(['openai:a', 'openai:b'], each=each, top_p=.5) as (small, large):
        assert (small.spec.price, large.spec.price) == ('0.1/0.05/0.4', 'gpt-4o-mini')
        assert (small.host, large.host, large.key) == ('127.0.0.1:9', 'api.openai.com', 'sk-1234567890')
        assert small.options.top_p == large.options.top_p == .5
    with pytest.raises(ValueError, match='price'), open_models(['openai:a'], price='1/2'): pass

def test_backends_stand_in_the_place_of_names(tmp_path):
    pair = [Adder(0), Adder(1)]
    collect(tmp_path/'mine', rows(), pair)
    train(tmp_path/'mine', .1, steps=5, seeds=1)
    calibrate(tmp_path/'mine', 'accuracy', .1)
    assert route(tmp_path/'mine', 'What is 3 + 4?', pair).steps
    with pytest.raises(ValueError, match='names of models, or backends'):
        route(tmp_path/'mine', 'What?', ['toy-0', pair[1]])

# --- where models are is said in each call

def test_own_json_holds_nothing_that_says_where_models_are(tmp_path, toys):
    folder = tmp_path/'models'/'mine'
    folder.mkdir(parents=True)
    given = dict(base_url='http://10.1.2.3:8000/v1', key_env='SECRET_VARIABLE', price='gpt-4.1-mini', dtype='float32')
    models = [str(folder), 'openai:gpt-4.1-mini']
    collect(tmp_path/'router', rows(20), models, Sampling(temperature=.2), Access(**given))
    values = json.loads((tmp_path/'router'/'own.json').read_text())
    assert set(values) == {'format', 'models', 'name', 'max_steps', 'calibration', 'sampling'}
    assert values['models'] == ['mine', 'openai:gpt-4.1-mini'] and values['sampling']['temperature'] == .2
    assert set(values['sampling']) == {'temperature', 'top_p', 'max_tokens', 'max_reply', 'context', 'top',
                                       'top_logprobs'}
    (names, ledger, options), = toys.opened
    assert names == models and ledger == tmp_path/'router'/'ledger.db'
    assert options == values['sampling'] | given | dict(memory_shares=())

def test_the_folder_says_how_models_write(tmp_path, toys):
    sampling = Sampling(temperature=.2, max_tokens=64)
    collect(tmp_path/'mine', rows(), PAIR, sampling)
    train(tmp_path/'mine', .1, steps=5, seeds=1); calibrate(tmp_path/'mine')
    route(tmp_path/'mine', 'What is 3 + 4?', PAIR, Access(key_env='MINE'))
    names, ledger, options = toys.opened[-1]
    assert (options['temperature'], options['max_tokens'], options['key_env']) == (.2, 64, 'MINE')
    with pytest.raises(ValueError, match='sampling.max_tokens is 64 there and 512 here'):
        collect(tmp_path/'mine', rows(), PAIR, Sampling(temperature=.2))

# --- a folder that somebody sent

def tampered(folder, **changes):
    "own.json says what they like."
    values = json.loads((folder/'own.json').read_text()) | changes
    (folder/'own.json').write_text(json.dumps(values))
    return folder

def test_a_received_folder_chooses_neither_host_nor_key_nor_model(tmp_path, toys):
    ready(tmp_path/'mine')
    before = route(tmp_path/'mine', 'What is 3 + 4?', PAIR)
    evil = tampered(tmp_path/'mine', models=['/etc/passwd', 'openai:theirs'])
    assert route(evil, 'What is 3 + 4?', PAIR, Access(key_env='MINE')) == before
    names, ledger, options = toys.opened[-1]
    assert names == PAIR and ledger == evil/'ledger.db' and options['key_env'] == 'MINE'
    assert 'base_url' not in options and 'price' not in options
    for change in (dict(base_url='x'), dict(models=['a']), dict(sampling=dict(key_env='x')), dict(max_steps=0)):
        own = (evil/'own.json').read_text()
        with pytest.raises(ValueError, match=r'own\.json is damaged') as e: route(tampered(evil, **change), 'What?', PAIR)
        assert '\n' not in str(e.value)
        (evil/'own.json').write_text(own)

def test_a_link_in_a_folder_that_is_written_to_is_refused(tmp_path, toys):
    ready(tmp_path/'mine')
    (tmp_path/'mine'/'ledger.db').symlink_to(tmp_path/'victim')
    for call in (lambda: collect(tmp_path/'mine', rows(), PAIR), lambda: route(tmp_path/'mine', 'What?', PAIR)):
        with pytest.raises(ValueError, match='ledger.db is a link'): call()
    assert not (tmp_path/'victim').exists()

@pytest.mark.parametrize('name, public', [
    ('micro-large', 'micro-large'), ('Qwen/Qwen2.5@' + 'a'*40, 'Qwen/Qwen2.5@' + 'a'*40),
    ('/home/me/models/mine', 'mine'), ('~/models/mine', 'mine'), ('../models/mine', 'mine'),
    ('vllm:/home/me/models/mine', 'vllm:mine'), ('openai:gpt-4.1-mini', 'openai:gpt-4.1-mini'),
    ('vllm-server:http://10.0.0.7:8000/v1', 'vllm-server:a model behind a server'),
    ('vllm-server:http://10.0.0.7:8000/v1#Qwen/Q', 'vllm-server:Qwen/Q'),
    ('vllm-server:http://me:pw@10.0.0.7/v1#/home/me/m', 'vllm-server:m')])
def test_a_public_name_says_not_where_a_model_lies(name, public): assert public_name(name) == public

# --- interruptions

CRASH = '''
import contextlib, os, sys
sys.path[:0] = [{here!r}, {here!r} + '/helpers']
from toy_own import PAIR, Adder, collect, pair_module, rows
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
pair_module.open_models = opened
collect({folder!r}, rows(), PAIR)
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
    with pytest.raises(ValueError, match='collect has not finished.*; call it again'): train(folder)
    got = collect(folder, rows(), PAIR)
    collect(tmp_path/'whole', rows(), PAIR)
    assert 0 < len(begun) < len(content(folder)) == len(begun) + got['new steps']
    assert content(folder) == content(tmp_path/'whole')
    for name in ('train.npz', 'calibration.npz'):
        assert (folder/name).read_bytes() == (tmp_path/'whole'/name).read_bytes()
    ready(tmp_path/'whole')
    assert ready(folder) == calibrate(tmp_path/'whole', 'accuracy', .1)

# --- progress

@pytest.fixture
def half_minute(monkeypatch):
    "Lets half a minute pass on the clock of the bar. The lines about progress come then, and at the end."
    now, timers = [0.], []
    @contextlib.contextmanager
    def repeating(seconds, action):
        assert seconds == 30
        timers.append(action)
        yield
        timers.remove(action)
    def passes():
        now[0] += 30
        for action in timers: action()
    monkeypatch.setattr('stepwise_routing.util.repeating', repeating)
    monkeypatch.setattr('tqdm.std.time', lambda: now[0])
    monkeypatch.delenv('STEPWISE_PROGRESS', raising=False)
    return passes

def four_problems(half_minute, **how):
    "The first one needs no draw, each other one 1,000 steps and half a minute."
    async def problem(i):
        for _ in range(3*i): await asyncio.sleep(0)  # until the one before has ended
        if i: count_steps(1000)
        if i: half_minute()
    run_async(gather_progress(map(problem, range(4)), 'mine', **how))

def test_a_log_says_how_far_it_is(half_minute, capsys):
    four_problems(half_minute)
    assert capsys.readouterr().err.splitlines() == [
        'mine: 1 of 4 problems, 1,000 steps drawn, 30 s, time left ?',
        'mine: 2 of 4 problems, 2,000 steps drawn, 60 s, time left 02:00',
        'mine: 3 of 4 problems, 3,000 steps drawn, 90 s, time left 00:45',
        'mine: 4 of 4 problems, 3,000 steps drawn, 90 s, time left 00:00']

def test_a_folder_stays_as_it_was_until_added_problems_are_drawn(tmp_path, toys):
    folder, question = tmp_path/'mine', rows()[-1]['question']
    before = ready(folder, 40)
    kept = {f: (folder/f).read_bytes() for f in ('own.json', 'problems.jsonl', 'train.npz', 'calibration.npz')}
    def refuse(self, problem, *args):
        if problem.question == question: raise RuntimeError('the server refuses the request (400): too long')
        return adder_step(self, problem, *args)
    adder_step = Adder._step
    with pytest.MonkeyPatch.context() as m, pytest.raises(RuntimeError, match='refuses'):
        m.setattr(Adder, '_step', refuse)
        collect(folder, rows(), PAIR)
    assert {f: (folder/f).read_bytes() for f in kept} == kept
    train(folder, .1, steps=20, seeds=1)
    assert calibrate(folder, 'accuracy', .1) == before
    assert collect(folder, rows()[:-1], PAIR)['train'] + len(own_table(folder, 'calibration')) == 119

def test_a_question_that_no_model_can_read_is_named_before_anything_is_drawn(tmp_path):
    question = 'Add ' + '1 + ' * 5000 + '1?'
    good = [dict(question=f'What is {i} plus {i}?', answer=str(2*i)) for i in range(3)]
    pair = ['micro-small', 'micro-large']
    with pytest.raises(ValueError, match="the question 'Add 1 .*exceed the context of") as e:
        collect(tmp_path/'mine', [good[0], dict(question=question, answer='2')], pair)
    assert '\n' not in str(e.value) and not (tmp_path/'mine'/'own.json').exists()
    assert collect(tmp_path/'mine', good, pair)['new steps'] > 0
