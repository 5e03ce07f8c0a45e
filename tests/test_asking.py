"""RSD and SpecReason, which ask about every draft: against a second implementation of each, by hand and token by
token, on trees of toy steps."""
import asyncio
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
    walk_outcomes,
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
from stepwise_routing.method.walks import SmallOnly, State, Walk, walk
from stepwise_routing.models.interface import Choice, NoRoom, Request, Reward

METHODS = 'rsd', 'greedy', 'expected'
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
        self.router = RSD(kept, self.asked) if method == 'rsd' else SpecReason(kept, self.asked, method)
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
        return p.index(max(p))/9 if setting.method == 'greedy' else sum(d*x for d, x in enumerate(p))/9
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

# ---- trees written out by hand
class Book(Plain):
    """Writes what the book says: after and by whom (path, its last digit the writer) -> (text, finish, tokens, tokens
    billed as cached)."""
    def __init__(self, index, book, grades):
        super().__init__(index, prices=(None, 'gpt-4.1-mini'))
        self.book, self.grades, self.spec = book, grades, ModelSpec(f'book-{index}', (.5, 5.)[index], self.spec.price)
    def _step(self, problem, prefix, seed, last):
        text, finish, n, hit = self.book[''.join(str(s.model) for s in prefix) + str(self.index)]
        return Step(text, self.index, finish, generated=n, prompt=50 + sum(s.generated for s in prefix), cached=hit)
    async def choose(self, messages, options):
        prob, shared, hit = self.grades[messages[2]['content']]
        return Choice(prob, shared + ASK, 1, hit, shared)

class Known(Rewards):
    "Rewards by chain: (value, tokens read, tokens of the last step)."
    def __init__(self, said): super().__init__(); self.said, self.spec = said, ModelSpec('book-prm', 50., None)
    async def reward(self, problem, steps): return Reward(*self.said[''.join(str(s.model) for s in steps)])

def digit(d): return tuple(float(i == d) for i in range(10))

def booked(tmp_path, threshold, book, rewards=None, grades=None, scoring='greedy', max_steps=6, answer='4'):
    "The walk of a book, and its costs."
    backends = [Book(i, book, grades) for i in (0, 1)]
    asked = backends[1] if grades else Known(rewards)
    store = answers_of(asked, tmp_path/'answers.db')
    router = SpecReason(store, asked, scoring) if grades else RSD(store, asked)
    tree = RoutingTree(backends, RolloutStore(tmp_path/'tree.db', tree_settings('toy', backends)), max_steps=max_steps)
    (w,) = walk([Problem('toy', 'p', 'Which?', answer)], router.at(threshold), tree)
    out = {k: v[0] for k, v in walk_outcome([w], tree.specs, getattr(router, 'external', None)).items()}
    store.close(); tree.store.close()
    for p in tmp_path.glob('*.db'): p.unlink()
    return w, [(c.model, c.kind, c.generated, c.prompt, c.cached, c.billed) for c in w.calls], out

STORY = { # kept, rejected, an empty step kept, the final step rejected
    '0': ('a', 'step', 4, 0), '00': ('b', 'step', 5, 0), '01': ('B', 'step', 7, 20), '010': ('', 'step', 1, 0),
    '0100': (r'\boxed{3}', 'step', 6, 0), '0101': (r'\boxed{4}', 'stop', 8, 48)}

def test_rsd_by_hand(tmp_path):
    rewards = {'0': (.9, 46, 6), '00': (.69, 54, 8), '010': (.7, 58, 2), '0100': (.1, 67, 9)}
    w, calls, out = booked(tmp_path, .7, STORY, rewards)
    assert (w.path, [s.text for s in w.steps], w.answer, w.correct) == ('0101', ['a', 'B', '', r'\boxed{4}'], '4', True)
    assert calls == [
        (0, 'step', 4, 50, 0, 0), (-1, 'prm', 0, 46, 0, 0),                                # .9: kept
        # .69: written again, and not asked about again
        (0, 'draft', 5, 54, 54, 0), (-1, 'prm', 0, 54, 46, 0), (1, 'step', 7, 54, 0, 20),
        # a draft again; .7 is not below .7: kept
        (0, 'step', 1, 61, 54, 0), (-1, 'prm', 0, 58, 46, 0),
        # the final step, .1: written again
        (0, 'draft', 6, 62, 62, 0), (-1, 'prm', 0, 67, 58, 0), (1, 'step', 8, 62, 61, 48)]
    # small: 16 tokens, 57 read, 1 FLOP each; large: 15 tokens, 55 read, 10 each; reward model: 46 + 8 + 12 + 9 = 75
    # read, 100 each
    assert (out['paper_flops'], out['full_flops']) == (16 + 150, 16 + 57 + 150 + 550 + 7500)
    # (34 x .4 + 20 x .1 + 7 x 1.6) + (14 x .4 + 48 x .1 + 8 x 1.6) = 26.8 + 23.2 millionths of a dollar
    assert out['cents'] == pytest.approx(.005, rel=1e-12)
    assert [out[k] for k in ('small_tokens', 'large_tokens', 'steps', 'large_steps', 'correct')] == [16, 15, 4, 2, 1]

GRADES = {'a': (digit(8), 54, 0), 'a\n\nb': (digit(6), 59, 10), 'a\n\nB\n\n': (digit(7), 62, 16),
          'a\n\nB\n\n\n\n\\boxed{3}': (digit(0), 68, 64)}

def test_specreason_by_hand(tmp_path):
    w, calls, out = booked(tmp_path, .7, STORY, grades=GRADES)
    assert (w.path, [s.text for s in w.steps], w.answer, w.correct) == ('0101', ['a', 'B', '', r'\boxed{4}'], '4', True)
    assert calls == [
        (0, 'step', 4, 50, 0, 0), (1, 'judge', 1, 61, 0, 0),                               # 8/9: kept
        # 6/9: the large model has just read the chain
        (0, 'draft', 5, 54, 54, 0), (1, 'judge', 1, 66, 54, 10), (1, 'step', 7, 54, 54, 20),
        # what it wrote, it need not read
        (0, 'step', 1, 61, 54, 0), (1, 'judge', 1, 69, 61, 16),
        (0, 'draft', 6, 62, 62, 0), (1, 'judge', 1, 75, 62, 64), (1, 'step', 8, 62, 62, 48)]
    # large: 15 tokens and 4 grades; 61 + 12 + 0 + 8 + 13 + 0 = 94 read
    assert (out['paper_flops'], out['full_flops']) == (16 + 190, 16 + 57 + 190 + 940)
    # grades: 61 x .4 + 1.6 = 26; 56 x .4 + 1 + 1.6 = 25; 53 x .4 + 1.6 + 1.6 = 24.4; 11 x .4 + 6.4 + 1.6 = 12.4
    assert out['cents'] == pytest.approx((26.8 + 23.2 + 26 + 25 + 24.4 + 12.4)/1e4, rel=1e-12)
    assert [out[k] for k in ('small_tokens', 'large_tokens', 'steps', 'large_steps')] == [16, 19, 4, 2]

def test_a_grade_is_the_likeliest_or_the_expected_digit(tmp_path):
    unsure = (.35, 0, 0, 0, 0, 0, .25, 0, 0, .4)                                            # likeliest 9, expected 5.1
    grades = {'a': (unsure, 54, 0), 'a\n\nb': (digit(9), 59, 0), 'A\n\nc': (digit(9), 59, 0)}
    book = {'0': ('a', 'step', 4, 0), '00': ('b', 'stop', 5, 0), '1': ('A', 'step', 6, 0), '10': ('c', 'stop', 3, 0)}
    ask = lambda threshold, scoring, said=unsure: booked(tmp_path, threshold, book,
                                                         grades={**grades, 'a': (said, 54, 0)}, scoring=scoring)
    assert ask(1., 'greedy')[0].path == '00'                                                # 9/9 is not below 1
    assert ask(.56, 'expected')[0].path == '00'                                             # 5.1/9 = .567
    # the first step is written again
    w, calls, _ = ask(.57, 'expected')
    assert w.path == '10' and calls == [(0, 'draft', 4, 50, 0, 0), (1, 'judge', 1, 61, 0, 0), (1, 'step', 6, 50, 50, 0),
                                        (0, 'step', 3, 56, 50, 0), (1, 'judge', 1, 66, 56, 0)]
    for scoring in ('greedy', 'expected'):                                                  # no digit at all counts 0
        assert [ask(x, scoring, (0.,)*10)[0].path for x in (0., 1e-9, 1.)] == ['00', '10', '10']

def test_the_first_step_and_the_last_one_there_is_room_for(tmp_path):
    book = {'0': ('a', 'step', 3, 0), '1': ('A', 'step', 6, 0), '10': ('b', 'step', 2, 0), '100': ('c', 'step', 4, 0),
            '101': ('C', 'step', 9, 0)}
    w, calls, out = booked(tmp_path, .5, book, {'0': (.2, 44, 4), '10': (.95, 48, 3), '100': (0., 54, 6)}, max_steps=3)
    assert (w.path, [s.text for s in w.steps], w.answer, w.correct) == ('101', ['A', 'b', 'C'], None, False)
    assert calls == [
        (0, 'draft', 3, 50, 0, 0), (-1, 'prm', 0, 44, 0, 0), (1, 'step', 6, 50, 0, 0),
        # the question was read, with the step that is gone
        (0, 'step', 2, 56, 50, 0), (-1, 'prm', 0, 48, 40, 0),
        (0, 'draft', 4, 58, 58, 0), (-1, 'prm', 0, 54, 48, 0), (1, 'step', 9, 58, 56, 0)]
    assert (out['paper_flops'], out['full_flops']) == (9 + 150, 9 + 56 + 150 + 520 + 100*(44 + 8 + 6))
    assert out['large_steps'] == 2
    w, calls, _ = booked(tmp_path, .5, book, {'0': (.2, 44, 4)}, max_steps=1)
    assert w.path == '1' and [c[:2] for c in calls] == [(0, 'draft'), (-1, 'prm'), (1, 'step')]
    w, calls, _ = booked(tmp_path, .1, book | {'00': ('d', 'step', 5, 0)}, {'0': (.2, 44, 4), '00': (.1, 49, 5)},
                         max_steps=2)
    # the last one is asked about, and may stay
    assert w.path == '00' and [c[1] for c in calls] == ['step', 'prm', 'step', 'prm']

def test_a_chain_that_is_cut_off_has_no_answer_unless_it_boxed_one(tmp_path):
    book = {'0': ('a', 'step', 5, 0), '00': ('so it is 4', 'length', 6, 0), '01': ('B', 'step', 3, 0),
            '010': (r'\boxed{4}', 'stop', 2, 0)}
    rewards = {'0': (.8, 45, 5), '00': (.9, 51, 6), '010': (.9, 60, 9)}
    w, calls, _ = booked(tmp_path, .7, book, rewards)
    assert (w.path, w.answer, w.correct) == ('00', None, False)
    assert [c[1] for c in calls] == ['step', 'prm', 'step', 'prm']
    w, _, _ = booked(tmp_path, .7, {**book, '00': (r'so \boxed{4} or', 'length', 6, 0)}, rewards)
    assert (w.path, w.answer, w.correct) == ('00', '4', True)
    # cut off and rejected: the chain goes on
    w, calls, _ = booked(tmp_path, .7, book, {**rewards, '00': (.6, 51, 6)})
    assert (w.path, w.answer, w.correct) == ('010', '4', True)
    assert calls[2:] == [(0, 'draft', 6, 55, 55, 0), (-1, 'prm', 0, 51, 45, 0), (1, 'step', 3, 55, 0, 0),
                         (0, 'step', 2, 58, 55, 0), (-1, 'prm', 0, 60, 45, 0)]
    w, _, _ = booked(tmp_path, .7, {**book, '01': ('it is 4', 'length', 3, 0)}, {**rewards, '00': (.6, 51, 6)})
    assert (w.path, w.answer, w.correct) == ('01', None, False)

def test_a_judge_that_hides_what_its_prompt_shares_leaves_no_trace_in_the_cache(tmp_path):
    grades = {k: (p, 0, 0) for k, (p, _, _) in GRADES.items()}
    _, calls, _ = booked(tmp_path, .7, STORY, grades=grades)
    assert [c[:1] + c[2:5] for c in calls if c[1] == 'judge'] == [(1, 1, ASK, 0)]*4
    # its own writing is still there
    assert [c[2:5] for c in calls if c[:2] == (1, 'step')] == [(7, 54, 0), (8, 62, 61)]

def test_what_a_reading_leaves_in_the_cache():
    """A reward model's prompt ends with the step, in tokens of its own; a judge's goes on with a question that no
    later prompt has."""
    step = Step('a', 0, 'step', generated=9)
    for call, seen, cached, after, rejected in ((Call(-1, 0, 70, 60, 'prm'), {-1: 45}, 45, {-1: 70}, {-1: 60}),
                                                (Call(-1, 0, 70, 60, 'prm'), {}, 0, {-1: 70}, {-1: 60}),
                                                (Call(1, 1, 76, 60, 'judge', 5), {0: 80, 1: 99}, 60, {0: 80, 1: 69},
                                                 {1: 60}), (Call(1, 1, 76, 0, 'judge'), {1: 45}, 0, {1: 45}, {})):
        w = Walk(None, RSD(None), SimpleNamespace(n_models=2), calls=[Call(0, 9, 50, 0)], processed=seen)
        before = w.bill_asking([call], step)
        assert w.calls == [Call(0, 9, 50, 0), replace(call, cached=cached)] and (seen, before) == (after, rejected)

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
def test_all_thresholds_together_ask_each_question_once(tmp_path, method):
    alone, together = (Setting(tmp_path, method, end=.15, store=x) for x in 'ab')
    problems = toy_problems(12)
    want = [alone.outcome(alone.walk(problems, x)) for x in THRESHOLDS]
    got = walk_outcomes([(together.router.at(x), problems) for x in THRESHOLDS], together.tree)
    assert all((g[k] == w[k]).all() for g, w in zip(got, want) for k in w)
    assert len(together.log) == len(set(together.log)) and set(together.log) == set(alone.log)
    assert len(together.tree.store) == len(alone.tree.store) == together.tree.drawn

@pytest.mark.parametrize('method', METHODS)
def test_equal_walks_of_a_grid_are_taken_once(tmp_path, monkeypatch, method):
    "As many walks as there are different bills, a problem; whatever the order of the thresholds."
    from stepwise_routing.method import walks as rollouts
    s, problems, taken = Setting(tmp_path, method, end=.15), toy_problems(12), Counter()
    walk_one = rollouts.walk_one
    async def counted(problem, *args, **kwargs): taken[problem.id] += 1; return await walk_one(problem, *args, **kwargs)
    alone = {x: s.walk(problems, x) for x in THRESHOLDS}
    monkeypatch.setattr(rollouts, 'walk_one', counted)
    routers = [s.router.at(x) for x in (*THRESHOLDS[::2], *THRESHOLDS[1::2])]
    rollouts.walk_together([(r, problems) for r in routers], s.tree, lambda r, *walked: walked)
    different = {p.id: len({(ws[i].path, ws[i].calls) for ws in alone.values()}) for i, p in enumerate(problems)}
    assert taken == different and sum(taken.values()) < 11*12

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

@pytest.mark.parametrize('method', METHODS)
def test_answers_are_kept_by_what_was_written(tmp_path, method):
    """Other draws of the same problems are other chains, whoever wrote them; a chain that was drawn before is not
    asked about again."""
    s, problems = Setting(tmp_path, method, end=.15), toy_problems(15)
    s.walk(problems, .5)
    fresh, other = Setting(tmp_path, method, end=.15, store='b'), s.fresh('other', 1)
    walks = walk(problems, s.router, other)
    assert walks == walk(problems, fresh.router, fresh.fresh('again', 1))
    assert [w.path for w in walks] != [w.path for w in s.walk(problems, .5)]
    asked = len(s.log)
    assert asked == len(set(s.log)) == len(s.router.store) and walk(problems, s.router, s.fresh('copy', 1)) == walks
    assert len(s.log) == asked

def test_greedy_and_expected_share_their_questions(tmp_path):
    s, problems = Setting(tmp_path, 'greedy', end=.15), toy_problems(12)
    greedy, asked = s.walk(problems, 0.), len(s.log)
    assert walk(problems, replace(s.router, scoring='expected', threshold=0.), s.tree) == greedy and len(s.log) == asked

@pytest.mark.parametrize('method', METHODS)
def test_what_was_not_asked_is_one_clear_line(tmp_path, method):
    s, problems = Setting(tmp_path, method, end=.15), toy_problems(5)
    full = s.walk(problems, .5)
    router, tree = s.offline()
    name = 'RSD' if method == 'rsd' else 'SpecReason'
    with RolloutStore(tmp_path/'none.db', s.router.store.settings) as empty:
        with pytest.raises(LookupError,
                           match=rf'none.db does not hold what {name}.* asks about step 0 of toy-0-') as e:
            walk(problems, replace(router, store=empty), tree)
    assert '\n' not in str(e.value)
    w = next(w for w in full if '1' in w.path and w.path[-1] == '0')                         # now a gap further on
    with RolloutStore(tmp_path/'part.db', s.router.store.settings, record=s.router.record) as part:
        keys = s.router.store.keys()
        for k in keys[:1]: part.put(*k, s.router.store.get(*k))
        with pytest.raises(LookupError, match=rf'asks about step \d+ of {w.problem.id} after "[01]*"$'):
            walk([w.problem], replace(router, store=part), tree)
    live = replace(s.router, model=s.asked)
    assert walk(problems, live, s.tree) == full

def test_answers_of_another_model_or_benchmark_are_refused(tmp_path):
    prm, path = Rewards(), tmp_path/'r.db'
    with RolloutStore(path, asking_settings('toy', prm)) as store: store.put('p', 0, '', 0, Step('One.', 0, 'step'))
    other = Rewards(); other.spec = replace(prm.spec, params=5.)
    for said, field in ((asking_settings('gsm8k', prm), 'settings.benchmark'),
                        (asking_settings('toy', other), 'settings.spec.params'),
                        ({**asking_settings('toy', prm), 'weights': 'others'}, 'settings.weights')):
        with pytest.raises(ValueError, match=field) as e: RolloutStore(path, said)
        assert '\n' not in str(e.value)
    with RolloutStore(path) as store: assert RSD(store).external == prm.spec
    with pytest.raises(ValueError, match=r"unknown scoring 'greedi' \(did you mean 'greedy'\?\)"):
        SpecReason(None, scoring='greedi')
    assert [SpecReason(None, scoring=x).name for x in ('greedy', 'expected')] == ['SpecReason (greedy)',
        'SpecReason (expected)']
    assert RSD(None).name == 'RSD'

# ---- faults of the reference code
@pytest.mark.parametrize('method', METHODS)
def test_company_order_and_history_change_nothing(tmp_path, method):
    problems = toy_problems(40)
    among = Setting(tmp_path, method, end=.15)
    together = among.walk(problems, .6)
    alone = Setting(tmp_path, method, end=.15, store='b')
    assert [alone.walk([p], .6)[0] for p in problems[::-1]][::-1] == together
    # a store that has seen every threshold
    for x in THRESHOLDS[::-1]: alone.walk(problems, x)
    used = Setting(tmp_path, method, end=.15, store='c')
    for x in (1., .9, .1, 0.): used.walk(problems[::2], x)
    assert used.walk(problems, .6) == alone.walk(problems, .6) == together
    same(among, problems, .6, together)

@pytest.mark.parametrize('method', METHODS)
def test_long_chains_are_not_cut(tmp_path, method):
    s, problems = Setting(tmp_path, method, end=.02, cut=0), toy_problems(20)
    for x in (0., .5, 1.01):
        walks = s.walk(problems, x)
        lengths = [len(w.path) for w in walks]
        assert max(lengths) == 30 and sum(n > 5 for n in lengths) > 15
        assert all(w.steps[-1].final or len(w.path) == 30 for w in walks)
        assert all(not y.final for w in walks for y in w.steps[:-1])
        assert [len(s.walk([p], x)[0].path) for p in problems] == lengths

def test_equal_steps_in_a_row_do_not_end_a_chain(tmp_path):
    book = {'0'*n: ('the same', 'step', 2, 0) for n in range(1, 9)} | {'0'*9: (r'\boxed{4}', 'stop', 3, 0)}
    w, _, _ = booked(tmp_path, .5, book, {'0'*n: (.9, 40 + 3*n, 3) for n in range(1, 10)}, max_steps=30)
    assert (w.path, w.correct) == ('0'*9, True)

# ---- scores
@given(st.lists(st.floats(0, 1), min_size=10, max_size=10), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scores_are_digits_over_nine(tmp_path, p, silent):
    p = tuple(0. for _ in p) if silent or sum(p) == 0 else tuple(x/sum(p) for x in p)
    judge = Book(1, {}, {'y': (p, 60, 5)})
    state = State(Problem('toy', 'p', 'Which?', '4'), 0, (Step('y', 0, 'step', generated=9, prompt=50),), '0')
    with answers_of(judge, tmp_path/'s.db') as store:
        (greedy,), calls = asyncio.run(SpecReason(store, judge, 'greedy').score([state]))
        (expected,), _ = asyncio.run(SpecReason(store, None, 'expected').score([state]))
    (tmp_path/'s.db').unlink()
    assert greedy == max(range(10), key=lambda d: (p[d], -d))/9
    assert expected == pytest.approx(sum(d*x for d, x in enumerate(p))/9, abs=1e-12)
    assert 0 <= greedy <= 1 and 0 <= expected <= 1 + 1e-12 and (greedy, expected) == (0, 0) if not any(p) else True
    assert calls == [Call(1, 1, 67, 51, 'judge', 5)]

def test_the_judge_is_shown_the_chain_and_ten_digits(tmp_path):
    seen, judge = [], Book(1, {}, None)
    async def choose(messages, options):
        seen.append((messages, options))
        return Choice(digit(5), 60, 1, 0, 53)
    judge.choose = choose
    steps = tuple(Step(t, 0, 'step', generated=2) for t in ('one', 'two'))
    with answers_of(judge, tmp_path/'s.db') as store:
        asyncio.run(SpecReason(store, judge).score([State(Problem('toy', 'p', 'Which?', '4'), 0, steps, '00')]))
    ((system, user, chain, ask), options), = seen
    assert (user['content'], chain) == ('Which?', dict(role='assistant', content='one\n\ntwo'))
    assert list(options) == list('0123456789') and ask['role'] == 'user'

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

def test_the_test_split_chooses_nothing(world):
    s, problems, tables = world
    asked = len(s.log)
    def run(*_): raise AssertionError('walked on the test split')
    with pytest.raises(ValueError, match='choosing a threshold on toy was handed the test split') as e:
        grid_search(s.router, tables['test'], run=run)
    assert '\n' not in str(e.value) and len(s.log) == asked

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

@pytest.mark.filterwarnings('ignore:RSD gives the lowest score')
def test_a_reward_that_there_is_no_room_for_is_zero_and_costs_nothing(tmp_path):
    s, problems = Setting(tmp_path, 'rsd', end=.15), toy_problems(15)
    collect_rollouts(problems, s.tree)
    table = outcome_table(problems, s.tree, 'train')
    whole = reward_table(table, problems, s.tree, s.router)
    short = Setting(tmp_path, 'rsd', end=.15, store='b')
    no_room_after(short.asked, 2)
    read = reward_table(table, problems, s.tree, short.router)
    reward = TRIM_FEATURES.index('reward')
    later = table.inside & (np.arange(table.inside.shape[1]) > 1)
    assert later.sum() > 10 and (read.obs[later][:, reward] == 0).all()
    assert (read.obs[:, :2] == whole.obs[:, :2])[table.inside[:, :2]].all()
    assert (read.small_prompt == np.where(later, table.small_prompt, whole.small_prompt)).all()

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

def test_a_reward_model_must_be_paid_for(world):
    s, problems, tables = world
    walks = s.walk(problems['test'][:3], .5)
    if s.method != 'rsd': assert walk_outcome(walks, s.tree.specs)['cents'].min() > 0; return
    with pytest.raises(ValueError, match='pass external=') as e: walk_outcome(walks, s.tree.specs)
    assert '\n' not in str(e.value)
