"""RSD and SpecReason, which ask about every draft: against a second implementation of each, by hand and token by
token, on trees of toy steps."""
import asyncio
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from toy import ToyBackend, toy_problems

from stepwise_routing.base.records import Call, ModelSpec, Problem, Step, edge_seed, score_messages
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.method.comparison import (
    COLUMNS,
    LARGE,
    THRESHOLDS,
    Walker,
    grid_search,
    method_rows,
)
from stepwise_routing.method.outcomes import (
    cheapest_within,
    outcome_table,
    replay,
    toy_table,
    walk_outcome,
)
from stepwise_routing.method.routers import (
    RSD,
    TRIM_FEATURES,
    Grade,
    SpecReason,
    asking_settings,
    fit_trim,
    reward_table,
)
from stepwise_routing.method.tree import RoutingTree, collect_rollouts
from stepwise_routing.method.walks import SmallOnly, State, walk
from stepwise_routing.models.interface import Choice, NoRoom, Request, Reward

METHODS = 'rsd', 'specreason'
UNITS = 'paper_flops', 'full_flops', 'cents'
# input, cached input, output: US dollars per million tokens
PRICE = {'gpt-4.1-mini': (.40, .10, 1.60), 'gpt-4o-mini': (.15, .075, .60)}
SIZE = {-1: 3_000_000, 0: 1_000_000, 1: 5_000_000}                             # parameters
# tokens of the judge's question after the chain
ASK = 7

# ---- stand-ins
# tokens of a step for the language models: a text has one length
def size(text): return 1 + -(-len(text)//3)
# and for the reward model, which cuts text in its own way
def weight(text): return 2 + len(text)//5

class Plain(ToyBackend):
    """A toy model whose tokens follow from the text, so that a chain is as long for whoever reads it; `log` has what
    it was asked and what it wrote."""
    def __init__(self, index, **kwargs):
        super().__init__(index, params=SIZE[index], **kwargs); self.log, self.written = [], []
    def _tokens(self, r, text, sure):
        n = size(text.strip())
        return dict(ids=tuple(range(n)), ends=tuple(min(3*i + 3, len(text.strip())) for i in range(n)), prob=(.5,)*n,
                    max_logit=(1.,)*n)
    async def write(self, request):
        steps = await super().write(request)
        self.written += [s.generated for s in steps]
        return steps
    async def choose(self, messages, options):
        self.log.append((messages[1]['content'], messages[2]['content']))
        await asyncio.sleep(0)
        prob, shared = self.prob(messages, len(options)), len(messages[1]['content']) + sum(map(size,
            messages[2]['content'].split('\n\n')))
        return Choice(prob, shared + ASK, 1, cached=(shared + ASK)//4 if self.spec.price else 0, shared=shared)
    def prob(self, messages, n):
        r = self._random('grade', str(messages))
        kind, d = r.random(), r.randrange(n)
        if kind < .1: return (0.,)*n                                            # no digit among what it would say
        if kind < .5: return tuple(float(i == d) for i in range(n))
        p = [r.random()**3 for _ in range(n)]
        return tuple(x/sum(p) for x in p)

class Rewards:
    "A reward model whose rewards follow from the chain."
    def __init__(self, price=None): self.spec, self.log = ModelSpec('toy-prm', SIZE[-1], price), []
    def settings(self): return dict(weights='toy rewards')
    async def reward(self, problem, steps):
        self.log.append((problem.question, '\n\n'.join(s.text for s in steps)))
        await asyncio.sleep(0)
        read = [len(problem.question)//2, *(weight(s.text) for s in steps)]
        return Reward(self.value(problem, steps), sum(read), read[-1])
    def value(self, problem, steps):
        return round(Plain(0)._random('reward', problem.question, *(s.text for s in steps)).random(), 2)

def answers_of(asked, path):
    "The store of what a judge or a reward model says."
    record = Reward if isinstance(asked, Rewards) else Grade
    return RolloutStore(path, asking_settings('toy', asked), record=record)

class Setting:
    "Two models with an empty tree, and a method with an empty store of answers."
    def __init__(self, folder, method, max_steps=30, prices=(), prm_price=None, store='a', **kwargs):
        self.method, self.max_steps, self.folder = method, max_steps, Path(folder)
        self.backends = [Plain(i, prices=prices, **kwargs) for i in (0, 1)]
        self.asked = Rewards(prm_price) if method == 'rsd' else self.backends[1]
        kept = answers_of(self.asked, self.folder/f'{method}-{store}.db')
        self.router = RSD(kept, self.asked) if method == 'rsd' else SpecReason(kept, self.asked)
        self.tree = self.fresh(f'tree-{store}')
        self.external = self.asked.spec if method == 'rsd' else None
    def fresh(self, name, sample=0):
        return RoutingTree(self.backends, RolloutStore(self.folder/f'{name}.db', tree_settings('toy', self.backends)),
                           sample, self.max_steps,
                           grade=lambda problem, answer: answer == problem.answer)
    def walk(self, problems, threshold): return walk(problems, self.router.at(threshold), self.tree)
    def offline(self):
        return replace(self.router, model=None), RoutingTree(None, self.tree.store, max_steps=self.max_steps,
                                                             grade=self.tree.grade)
    def outcome(self, walks): return walk_outcome(walks, self.tree.specs, self.external)
    @property
    def log(self): return self.asked.log
    def close(self):
        self.router.store.close(); self.tree.store.close()
        for p in self.folder.glob('*.db'): p.unlink()

# ---- the second implementation
class Cache:
    "An ideal prefix cache: it holds what was processed last, piece by piece, and nothing of it is read again."
    def __init__(self): self.held = []
    def read(self, pieces, written=()):
        "(tokens of the prompt, tokens of it that were held); then holds the prompt and what was written after it."
        known = 0
        for (name, n), (other, _) in zip(pieces, self.held):
            if name != other: break
            known += n
        self.held = [*pieces, *written]
        return sum(n for _, n in pieces), known

def pieces(question, chain, count):
    return [('question', question), *(((i, s.model), count(s.text)) for i, s in enumerate(chain))]

def by_hand(setting, problem, threshold):
    """One problem, without tree, store or walk: draft, ask, keep it or let the large model write the step. Returns
    (chain, calls)."""
    rsd, chain, calls, caches = setting.method == 'rsd', [], [], defaultdict(Cache)
    def writes(m):
        path = ''.join(str(s.model) for s in chain)
        (step,) = asyncio.run(setting.backends[m].write(Request(problem, tuple(chain),
                                                                lambda i: edge_seed('toy', problem.id, 0, path, m),
                                                                False, setting.max_steps)))
        n = size(step.text)
        prompt, known = caches[m].read(pieces(len(problem.question), chain, size), [((len(chain), m), n)])
        calls.append(Call(m, n, prompt, known, 'step', prompt//3 if setting.backends[m].spec.price else 0))
        return step
    def score(draft):
        if rsd:
            prompt, known = caches[-1].read(pieces(len(problem.question)//2, [*chain, draft], weight))
            calls.append(Call(-1, 0, prompt, known, 'prm', 0))
            return setting.asked.value(problem, [*chain, draft])
        prompt, known = caches[1].read([*pieces(len(problem.question), [*chain, draft], size), ('ask', ASK)])
        calls.append(Call(1, 1, prompt, known, 'judge', prompt//4 if setting.backends[1].spec.price else 0))
        p = setting.asked.prob(score_messages(problem, [*chain, draft]), 10)
        return sum(d*x for d, x in enumerate(p))/9
    while len(chain) < setting.max_steps:
        drafted, step = len(calls), writes(0)
        if score(step) < threshold:
            calls[drafted] = replace(calls[drafted], kind='draft')
            step = writes(1)
        chain.append(step)
        if step.finish != 'step' or 'boxed' in step.text: break
    return chain, calls

def bill(calls, params, prices):
    "The three costs of a list of calls, by definition; both arguments by model."
    paper = sum(2*params[c.model]*c.generated for c in calls)
    full = paper + sum(2*params[c.model]*(c.prompt - c.cached) for c in calls)
    cents = 0
    for c in calls:
        new, old, out = PRICE[prices[c.model]] if prices.get(c.model) else (0, 0, 0)
        cents += 100*((c.prompt - c.billed)*new + c.billed*old + c.generated*out)/10**6
    return paper, full, cents

def same(setting, problems, threshold, walks):
    "Are walks, and their rows, what `by_hand` finds?"
    out = setting.outcome(walks)
    prices = {-1: setting.external and setting.external.price, **{i: b.spec.price for i,
        b in enumerate(setting.backends)}}
    for i, (p, w) in enumerate(zip(problems, walks)):
        chain, calls = by_hand(setting, p, threshold)
        assert w.path == ''.join(str(s.model) for s in chain) and w.steps == tuple(chain)
        assert list(w.calls) == calls
        boxed = chain[-1].text.rpartition(r'\boxed{')[2].partition('}')[0] if r'\boxed{' in chain[-1].text else None
        assert w.answer == boxed and w.correct == (boxed == p.answer)
        paper, full, cents = bill(calls, SIZE, prices)
        assert (out['paper_flops'][i], out['full_flops'][i]) == (paper, full)
        assert out['cents'][i] == pytest.approx(cents, rel=1e-12, abs=1e-15)
        made = [sum(c.generated for c in calls if (c.model == 1) == large) for large in (False, True)]
        got = [out[k][i] for k in ('correct', 'small_tokens', 'large_tokens', 'steps', 'large_steps')]
        assert got == [w.correct, *made, len(chain), sum(s.model for s in chain)]

thresholds = st.sampled_from([0., 1., 1.1, *THRESHOLDS]) | st.floats(0, 1.1)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(method=st.sampled_from(METHODS), threshold=thresholds, seed=st.integers(0, 10**6),
       max_steps=st.sampled_from([1, 2, 3, 7, 30]), cut=st.sampled_from([0, .1, .5]),
       end=st.sampled_from([.05, .3, 1.]), empty=st.sampled_from([0, .5]),
       prices=st.sampled_from([(), (None, 'gpt-4.1-mini'), ('gpt-4o-mini', 'gpt-4.1-mini')]),
       prm_price=st.sampled_from([None, 'gpt-4o-mini']))
def test_walks_are_what_a_hand_run_does(tmp_path, method, threshold, seed, max_steps, cut, end, empty, prices,
                                        prm_price):
    s, problems = Setting(tmp_path, method, max_steps, prices, prm_price, cut=cut, end=end,
                          empty=empty), toy_problems(3, seed)
    try: same(s, problems, threshold, s.walk(problems, threshold))
    finally: s.close()

# ---- thresholds
@pytest.mark.parametrize('method', METHODS)
def test_the_ends_of_the_threshold(tmp_path, method):
    s, problems = Setting(tmp_path, method, end=.15), toy_problems(30)
    never, always = s.walk(problems, 0.), s.walk(problems, 1.01)
    for w in never:
        assert set(w.path) == {'0'} and not any(c.kind == 'draft' for c in w.calls) and len(w.calls) == 2*len(w.path)
    for w in always:
        assert set(w.path) == {'1'}
        assert Counter(c.kind for c in w.calls) == {'draft': len(w.path), 'step': len(w.path),
                                                    s_kind(method): len(w.path)}
        assert [c.model for c in w.calls if c.kind == 'draft'] == [0]*len(w.path)
        assert [c.model for c in w.calls if c.kind == 'step'] == [1]*len(w.path)
    some = s.walk(problems, .5)
    assert sum('10' in w.path for w in some) > 3, 'a draft follows a step of the large model'
    assert sum('11' in w.path for w in some) > 3 and sum(w.path[-1] == '1' for w in some) > 3
    assert sum(w.path[0] == '1' for w in some) > 3

def s_kind(method): return 'prm' if method == 'rsd' else 'judge'

def no_room_after(asked, most):
    "From now on, a model that is asked has no room for a chain of more than `most` steps."
    name = 'reward' if isinstance(asked, Rewards) else 'choose'
    ask = getattr(asked, name)
    async def refuse(first, second):
        texts = [step.text for step in second] if name == 'reward' else first[2]['content'].split('\n\n')
        if len(texts) > most: raise NoRoom(f'{len(texts)} steps are too long')
        return await ask(first, second)
    setattr(asked, name, refuse)

@pytest.mark.filterwarnings('ignore:.* gives the lowest score')
@pytest.mark.parametrize('method', METHODS)
def test_a_draft_that_the_model_has_no_room_to_read_gets_the_lowest_score(tmp_path, method):
    free, s = (Setting(tmp_path, method, end=.15, store=store) for store in 'ab')
    problems = toy_problems(20)
    no_room_after(s.asked, 2)
    kind, later = s_kind(method), 0
    for threshold in (0., .3, 1.01):
        for want, w in zip(free.walk(problems, threshold), s.walk(problems, threshold)):
            # as if there were room, as far as there is; from there on no draft is kept, except by who keeps every one
            assert w.path[:2] == want.path[:2] and set(w.path[2:]) <= ({'0'} if threshold == 0 else {'1'})
            paid = [c for c in w.calls if c.kind == kind and c.prompt]
            assert paid == [c for c in want.calls if c.kind == kind][:2]
            unpaid = [c for c in w.calls if c.kind == kind and not c.prompt]
            assert len(unpaid) == len(w.path[2:]) and all(c.generated == c.cached == 0 for c in unpaid)
            later += len(unpaid)
    assert later > 20
    router, tree = s.offline()
    assert walk(problems, router.at(.3), tree) == s.walk(problems, .3)
    told = r'gives the lowest score to step 2 of toy-9-.* after "00": 3 steps are too long'
    with pytest.warns(UserWarning, match=told):
        s.walk([replace(p, id='toy-9-' + p.id) for p in toy_problems(20)], 0.)

@pytest.mark.parametrize('method', METHODS)
def test_every_question_is_asked_once_and_kept(tmp_path, method):
    s, problems = Setting(tmp_path, method, end=.15), toy_problems(12)
    live = {x: s.walk(problems, x) for x in THRESHOLDS}
    # the chains a draft followed
    about = {(w.problem.id, w.path[:i]) for ws in live.values() for w in ws for i in range(len(w.path))}
    chains = {(p.question, '\n\n'.join(y.text for y in (*s.tree.steps(p, path), s.tree.stored(p, path, 0))))
              for p in problems for i, path in about if i == p.id}
    assert set(s.log) == chains and len(s.log) == len(chains) == len(s.router.store)
    assert sum(c.kind == s_kind(method) for ws in live.values() for w in ws
               for c in w.calls) > 2*len(s.log), 'walks share them'
    asked, drawn = len(s.log), s.tree.drawn
    assert {x: s.walk(problems, x) for x in THRESHOLDS[::-1]} == live and (len(s.log), s.tree.drawn) == (asked, drawn)
    router, tree = s.offline()
    assert {x: walk(problems, router.at(x), tree) for x in THRESHOLDS} == live
    s.router.store.close()
    # as another process finds it
    with RolloutStore(s.router.store.path, readonly=True, record=s.router.record) as kept:
        assert {x: walk(problems, replace(router, store=kept, threshold=x), tree) for x in (.3, .8)} == {x: live[x]
            for x in (.3, .8)}

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('threshold', [0., .5])
def test_who_keeps_every_draft_asks_about_the_whole_chain_at_once(tmp_path, monkeypatch, method, threshold):
    "With the questions of threshold 0, and of no other; so nothing is asked in vain."
    s, (p,), busy = Setting(tmp_path, method, end=.15), toy_problems(1), []
    ask, most = type(s.router).ask, []
    async def counted(self, state):
        busy.append(1); most.append(len(busy))
        try: return await ask(self, state)
        finally: busy.pop()
    monkeypatch.setattr(type(s.router), 'ask', counted)
    (w,) = walk([p], s.router.at(threshold), s.tree)
    assert len(most) == len(s.log) == sum(c.kind in ('judge', 'prm') for c in w.calls)
    assert max(most) == (len(w.steps) if threshold == 0 else 1)

# ---- faults of the reference code
# ---- scores
@given(st.lists(st.floats(0, 1), min_size=10, max_size=10))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_score_is_the_expected_digit_over_nine(tmp_path, p):
    p = tuple(x/sum(p) for x in p) if sum(p) else tuple(p)
    judge = Plain(1)
    judge.prob = lambda messages, n: p
    state = State(Problem('toy', 'p', 'Which?', '4'), 0, (Step('y', 0, 'step', generated=9, prompt=50),), '0')
    with answers_of(judge, tmp_path/'s.db') as store:
        (expected,), (call,) = asyncio.run(SpecReason(store, judge).score([state]))
    (tmp_path/'s.db').unlink()
    assert expected == pytest.approx(sum(d*x for d, x in enumerate(p))/9, abs=1e-12) and 0 <= expected <= 1 + 1e-12
    assert (call.model, call.generated, call.kind) == (1, 1, 'judge')

# ---- the grid
@pytest.fixture(scope='module', params=METHODS)
def world(request, tmp_path_factory):
    "A method, two splits of problems and their outcome tables."
    s = Setting(tmp_path_factory.mktemp('world'), request.param, prices=(None, 'gpt-4.1-mini'), end=.15)
    problems = {split: toy_problems(15, i) for i, split in enumerate(('calibration', 'test'))}
    collect_rollouts([p for ps in problems.values() for p in ps], s.tree)
    return s, problems, {split: outcome_table(ps, s.tree, split) for split, ps in problems.items()}

@pytest.mark.parametrize('unit', UNITS)
def test_a_threshold_is_chosen_on_calibration_alone(world, unit):
    s, problems, tables = world
    run, walked = Walker(problems, s.tree), Counter()
    def counted(router, table): walked[table.split] += 1; return run(router, table)
    grid = grid_search(s.router, tables['calibration'], cost=unit, run=counted)
    rows = method_rows(s.router, tables['test'], grid.threshold, counted, ())
    if grid.threshold == LARGE: assert len(rows) == 15 and walked == dict(calibration=11)
    else: assert walked == dict(calibration=11, test=1)
    assert grid.thresholds == (*THRESHOLDS, LARGE)
    prices = {0: None, 1: 'gpt-4.1-mini'}
    for x, accuracy, cost in zip(THRESHOLDS, grid.accuracy, grid.cost):
        hand = [by_hand(s, p, x) for p in problems['calibration']]
        assert cost == pytest.approx(np.mean([bill(calls, SIZE, prices)[UNITS.index(unit)] for _, calls in hand]),
                                     rel=1e-12)
        assert accuracy == np.mean([rf'\boxed{{{p.answer}}}' in chain[-1].text for p,
                                    (chain, _) in zip(problems['calibration'], hand)])
    assert grid.chosen == cheapest_within(grid.accuracy, grid.cost, grid.large_accuracy, .02)
    assert (grid.unit, grid.n) == (unit, 15)
    assert (grid.method, grid.on_escalate) == (s.router.name, 'regenerate') and len(rows) == 15
    for x in {grid.threshold, .5} - {LARGE}:
        rows = method_rows({x: [s.router.at(x)]}, tables['test'], x, run)
        for r, p in zip(rows, problems['test']):
            hand = bill(by_hand(s, p, x)[1], SIZE, prices)[UNITS.index(unit)]
            assert r[COLUMNS.index(unit)] == pytest.approx(hand, rel=1e-12)

def test_rewards_join_the_outcome_table_with_their_bill(tmp_path):
    "Against RSD's own walks at threshold 0, and against minima and products by hand."
    s, problems = Setting(tmp_path, 'rsd', prices=(None, 'gpt-4.1-mini'), end=.15), toy_problems(15)
    collect_rollouts(problems, s.tree, samples=2)
    table = outcome_table(problems, s.tree, 'train', samples=2)
    read = reward_table(table, problems, s.tree, s.router)
    kept, small = s.outcome(s.walk(problems, 0.)), replay(SmallOnly(), read)
    assert all(np.allclose(small[k][table.sample == 0], kept[k]) for k in ('correct', *UNITS))
    at_once, plain = (t.outcome(np.zeros(30, int))['full_flops'] for t in (read, table))
    for i, (p, k) in enumerate(zip(table.problem_id, table.sample)):
        p = next(q for q in problems if q.id == p)
        chain = asyncio.run(s.tree.resampled(int(k)).run(p, '', 0))
        rewards = [s.asked.value(p, chain[:t + 1]) for t in range(len(chain))]
        for t in range(len(chain)):
            before = rewards[:t] or [1.]
            assert np.allclose(read.obs[i, t], (min(before), np.prod(before), rewards[t], chain[t].generated, t))
        first = len(p.question)//2 + weight(chain[0].text)
        assert at_once[i] - plain[i] == pytest.approx(2*SIZE[-1]*first)
    assert np.isnan(read.obs[~table.inside]).all()

def test_trim_earns_what_a_look_at_every_policy_could():
    "One step a chain and one reward that tells all: escalate where the reward is low, if the price is right."
    table, r = toy_table(200, 'train'), np.random.default_rng(0)
    one, wrong = np.ones(200, int), r.random(200) < .5
    columns = dict(n_steps=one, correct=np.c_[one, ~wrong], **{k: getattr(table, k)[:, :2] for k in (
        'large_tokens', 'large_prompt', 'large_steps', 'large_cents')})
    columns |= {k: getattr(table, k)[:, :1] for k in ('small_tokens', 'small_prompt', 'small_cents')}
    columns['large_tokens'] = np.c_[10*one, 0*one]
    obs = np.stack([one, one, np.where(wrong, .1, .9), 9*one, 0*one], -1)[:, None].astype(float)
    read = replace(table, obs=obs, features=TRIM_FEATURES, **columns)
    for lam, escalates in ((0.01, wrong), (.5, wrong), (1.5, 0*wrong)):
        o = replay(fit_trim(read, lam), read)
        assert (o['large_tokens'] == 10*escalates).all(), lam
    with pytest.raises(ValueError, match='was handed the test split'): fit_trim(replace(read, split='test'), .1)
