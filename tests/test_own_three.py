"A router of three models, small to large: collected, trained and calibrated on live walks, asked and served."
import numpy as np
import pytest
from micro_router import Scaler
from test_own import Adder, content, half_minute, rows, toys  # noqa: F401

from stepwise_routing.base.records import ModelSpec, api_cost
from stepwise_routing.base.settings import Policy
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.conversations import asked_problem
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.data.questions import own_problems
from stepwise_routing.method.live import Wish, live_steps
from stepwise_routing.method.policy import PolicyRouter, RoutingPolicy
from stepwise_routing.method.walks import LargeOnly
from stepwise_routing.models.hub import load_micro
from stepwise_routing.models.ledger import Ledger
from stepwise_routing.models.pair import Access, Model, check_cost, places
from stepwise_routing.own import *
from stepwise_routing.run.serve_command import serve_parser, with_options

THREE = ['toy-0', 'toy-1', 'toy-2']
QUESTIONS = [p['question'] for p in rows(40, seed=9)]

@pytest.fixture(autouse=True)
def few_thresholds(monkeypatch):
    "Each threshold takes walks; a few are enough here."
    pytest.importorskip('torch')
    from stepwise_routing.method.candidates import WalkedEnv
    monkeypatch.setattr(WalkedEnv, 'max_thresholds', 8)

def ready(folder, n=40, models=THREE, **how):
    collect(folder, rows(n), models)
    train(folder, .1, **dict(steps=4, seeds=1, models=models) | how)
    return calibrate(folder, 'accuracy', .1, models=models)

def test_places(): assert [places(n) for n in (2, 3, 4)] == [
    ['small', 'large'], ['small', 'middle', 'large'], ['small', 'middle 1', 'middle 2', 'large']]

def test_four_calls_on_three_models(tmp_path, toys):
    "What calibration says of its problems is what the deployed router does on them."
    folder = tmp_path/'mine'
    got = collect(folder, rows(40), THREE)
    assert got['train'] + got['calibration'] == 40
    assert got['small right'] < got['middle right'] < got['large right'] and 'new steps' in got
    assert not (folder/'train.npz').exists(), 'nobody has drawn all hand-overs'
    seen = train(folder, .1, steps=4, seeds=2, models=THREE)
    assert [*zip(seen['class'], seen['seed'])] == [(name, seed) for name in ('paper', 'full') for seed in (0, 1)]
    done = calibrate(folder, 'accuracy', .1, models=THREE).calibration
    problems = own_split(own_problems(rows(40)), .4)['calibration']
    with open_router(folder, THREE) as router:
        answers = router.route([p.question for p in problems])
        large = [live_path(p.question, router.backends) for p in problems]
    assert done.met and np.mean([is_equiv(p.answer, a.answer) for p, a in zip(problems, answers)]) == done.accuracy
    alone = np.mean([2*sum(25e6*s.step.generated for s in steps) for steps in large])
    assert np.mean([a.cost for a in answers])/alone == pytest.approx(done.cost)
    assert all([*a.path] == sorted(a.path) for a in answers) and {m for a in answers for m in a.path} >= {'0', '2'}

def live_path(question, backends, router=None, wish=Wish()):
    problem = asked_problem('own', question)
    async def steps(): return [s async for s in live_steps(problem, router or LargeOnly(2), backends, wish)]
    return run_async(steps())

def test_nothing_is_drawn_or_trained_twice(tmp_path, toys):
    folder = tmp_path/'mine'
    ready(folder)
    def times(): return {p: p.stat().st_mtime_ns for p in (folder/'candidates').rglob('*.*')}
    before, written = times(), sum(b.steps_written for b in toys.made)
    assert collect(folder, rows(40), THREE)['new steps'] == 0
    train(folder, .1, steps=4, seeds=1, models=THREE)
    calibrate(folder, 'accuracy', .1, models=THREE)
    assert curve(folder, 'accuracy', (.1,), models=THREE)['class'].tolist() in (['paper'], ['full'])
    assert times() == before and len(before) == 6 and sum(b.steps_written for b in toys.made) == written
    train(folder, .1, steps=5, seeds=1, models=THREE)
    assert times() != before

def test_a_log_says_how_much_training_and_calibration_draw(tmp_path, toys, half_minute, capsys):
    folder = tmp_path/'mine'
    collect(folder, rows(40), THREE)
    assert capsys.readouterr().err.startswith('own chains: 40 of 40 problems, ')
    for call in (lambda: train(folder, .1, steps=4, seeds=1, models=THREE),
                 lambda: calibrate(folder, 'accuracy', .1, models=THREE)):
        before = len(content(folder))
        call()
        drawn = len(content(folder)) - before
        assert drawn and capsys.readouterr().err == f'own walks, {drawn:,} steps drawn, 0 s\n'

def test_other_grades_are_other_problems(tmp_path, toys):
    "A folder that is graded anew is trained anew."
    folder = tmp_path/'mine'
    ready(folder)
    def weights(): return [p.read_bytes() for p in sorted((folder/'candidates').rglob('config.json'))]
    before = weights()
    train(folder, .1, steps=4, seeds=1, models=THREE, grade=lambda problem, answer: answer == problem.answer)
    assert weights() == before
    train(folder, .1, steps=4, seeds=1, models=THREE, grade=lambda problem, answer: str(answer)[-1:] in '12345')
    assert weights() != before

def test_what_three_models_cannot_have_is_said(tmp_path, toys):
    folder = tmp_path/'mine'
    ready(folder)
    before, policy = content(folder), {p.name: p.read_bytes() for p in (folder/'policy').iterdir()}
    for call, said in (
        (lambda: train(folder), r'has 3 models, so routers walk here.*models=\[SMALL, MIDDLE, LARGE\]'),
        (lambda: calibrate(folder), 'has 3 models, so routers walk here'),
        (lambda: route(folder, 'What?'), r'models=\[SMALL, MIDDLE, LARGE\]'),
        (lambda: train(folder, models=THREE[:2]), '3 in all, got 2'),
        (lambda: route(folder, 'What?', THREE[:2]), '3 in all, got 2'),
        (lambda: own_table(folder, 'train'), 'has 3 models; an outcome table is for two'),
        (lambda: report(folder, tmp_path/'page'), 'has 3 models; a report is for two'),
        (lambda: drift(folder, 'x', THREE), 'has 3 models; drift is for two'),
        (lambda: collect(folder, rows(40), THREE[:2]), 'other settings'),
        (lambda: train(folder, models=THREE, policy=Policy(estimator='exact', steps=2)), 'needs the outcome table')):
        with pytest.raises(ValueError, match=said) as e: call()
        assert '\n' not in str(e.value)
    assert content(folder) == before and {p.name: p.read_bytes() for p in (folder/'policy').iterdir()} == policy

@pytest.mark.parametrize('how, said', [(dict(slip=0., cut=0., empty=0.), 'the small model solves all'),
                                       (dict(cut=1.), 'the large model solves none')])
def test_nothing_to_learn(tmp_path, toys, how, said):
    toys.change(**how)
    collect(tmp_path/'mine', rows(20), THREE)
    with pytest.raises(ValueError, match=said): train(tmp_path/'mine', steps=2, models=THREE)

def test_costs_of_three():
    class Backend:
        def __init__(self, *spec): self.spec = ModelSpec(*spec)
    check_cost([Backend('a', 1e6), Backend('b', 0., '0.1/0.05/0.4'), Backend('c', 0., 'gpt-4.1-mini')])
    for specs, said in (((('a', 1e6), ('b', 0.), ('c', 7e9)), 'the middle model b costs'),
                        ((('a', 1e6), ('b', 5e6, 'gpt-4.1-mini'), ('c', 7e9)), 'the middle model b has a price')):
        with pytest.raises(ValueError, match=said): check_cost([Backend(*spec) for spec in specs])

# --- asked and served

def chooser(kappa):
    policy = RoutingPolicy(Scaler(('score_prob', 'index'), (0., 2.), (1., 1.)), 3, p_escalate=.6, seed=3)
    return PolicyRouter(policy, kappa, 'regenerate')

def test_notes_of_a_router_that_chooses():
    "Handed over where a larger model's chance is at the threshold; with no room, to a smaller one or to none."
    backends = [Adder(i, prices=[None, None, 'gpt-4.1-mini']) for i in range(3)]
    notes, capped = [], []
    for kappa in (.27, .3, .33):
        for question in QUESTIONS[:20]:
            notes += live_path(question, backends, chooser(kappa))
            capped += live_path(question, backends, chooser(kappa), Wish(max_cents=0))
    asked = [s for s in notes if s.decision != 'not_asked']
    assert {s.decision for s in asked} == {'keep', 'reject'} and {s.step.model for s in notes} == {0, 1, 2}
    assert all((s.score >= s.threshold) == (s.decision == 'reject') for s in asked)
    assert 2 not in {s.step.model for s in capped} and 1 in {s.step.model for s in capped}
    assert {s.decision for s in capped if s.step.model == 1} >= {'limit'}

def test_served_and_given_away(tmp_path, toys):
    openai = pytest.importorskip('openai')
    folder, seen = tmp_path/'mine', set()
    ready(folder)
    with open_router(folder, THREE) as router: whole = router.route(QUESTIONS[:12])
    with serving(folder, THREE) as url, openai.OpenAI(base_url=url, api_key='x') as c:
        names = [m.id for m in c.models.list().data]
        assert names == ['mine', 'mine@alpha=0.1', 'small', 'middle', 'large']
        def ask(model, question, **more):
            messages = [dict(role='user', content=question)]
            return c.chat.completions.create(model=model, seed=0, messages=messages, **more)
        for question, want in zip(QUESTIONS, whole[:6]):
            text = ''.join(k.choices[0].delta.content or '' for k in ask('mine', question, stream=True) if k.choices)
            assert text == want.text == ask('mine', question).choices[0].message.content
            for place, name in zip(('small', 'middle', 'large'), THREE):
                reply = ask(place, question)
                assert {s['model'] for s in reply.stepwise} == {name}
                seen.add((place, reply.system_fingerprint))
    assert len(seen) == 3
    assert 'hands over to toy-1 or toy-2' in exported(folder, tmp_path/'theirs')
    assert route(tmp_path/'theirs', QUESTIONS[:12], THREE) == whole

def exported(folder, out):
    export(folder, out)
    return (out/'README.md').read_text()

def test_the_command_takes_three_models():
    assert serve_parser().parse_args(['mine', '--models', *THREE]).models == THREE

def test_the_command_takes_an_option_for_all_models_or_one_per_model():
    words = ['mine', '--models', 'a', 'b', '--price', '1/1/2', '3/3/4', '--key-env', 'MINE']
    given = vars(serve_parser().parse_args(words))
    models, access = with_options(given['models'], {n: given[n] for n in ('price', 'key_env', 'base_url')})
    assert [(str(m), m.options) for m in models] == [('a', dict(price='1/1/2')), ('b', dict(price='3/3/4'))]
    assert access == Access(key_env='MINE')
    with pytest.raises(ValueError, match='--price takes one value, or one for each of the 3 models'):
        with_options(THREE, dict(price=['1/1/2', '3/3/4']))

# --- the micro models

def test_three_micro_models(tmp_path):
    "The third is the large one again. Calibration says what the router does, and a stream is what `route` answers."
    folder = tmp_path/'mine'
    problems = load_problems('micro-gsm', 'train', 40)
    lines = [dict(question=p.question, answer=p.answer) for p in problems]
    models = [load_micro('small'), load_micro('large'), load_micro('large', index=2, name='again')]
    got = collect(folder, lines, models)
    assert got['small right'] < got['middle right']
    train(folder, .2, steps=2, seeds=1, models=models)
    done = calibrate(folder, 'accuracy', .2, models=models).calibration
    held = own_split(own_problems(lines), .4)['calibration']
    with open_router(folder, models) as router:
        answers = router.route([p.question for p in held])
    assert np.mean([is_equiv(p.answer, a.answer) for p, a in zip(held, answers)]) == done.accuracy

MICRO = [Model('served:micro-small', price='0.1/0.05/0.4'), Model('served:micro-large', price='0.4/0.1/1.6'),
         Model('served:micro-large', price='2/0.5/8', timeout=100)]

@pytest.mark.slow
def test_three_micro_models_with_prices_of_their_own(tmp_path):
    "The third is the large one again, at another price. All that is drawn is paid once; a cap holds for train, too."
    folder, problems = tmp_path/'mine', load_problems('micro-gsm', 'train', 16)
    lines = [dict(question=p.question, answer=p.answer) for p in problems]
    def spent():
        book = Ledger(folder/'ledger.db')
        book.close()
        return book.spent
    got = collect(folder, lines, MICRO, max_cents=50)
    first = spent()
    assert got['large right'] >= got['small right'] and first > 0
    with pytest.raises(RuntimeError, match='cap reached'):
        train(folder, .3, steps=2, seeds=1, models=MICRO, max_cents=first)
    rows_of = train(folder, .3, steps=2, seeds=1, models=MICRO, max_cents=50)
    assert (rows_of["of the large model's cost"] > 0).all() and spent() > first
    calibrate(folder, 'accuracy', .3, models=MICRO, max_cents=50)
    paid = spent()
    train(folder, .3, steps=2, seeds=1, models=MICRO)
    calibrate(folder, 'accuracy', .3, models=MICRO)
    assert spent() == paid
    answer = route(folder, problems[0].question, MICRO)
    assert answer.unit == 'cents' and answer.cost > 0 and answer.models[0].startswith('served:micro')
