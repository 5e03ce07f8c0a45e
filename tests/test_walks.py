"""Drawing and walking, on toy models: a live walk is what the table says, bills are right, nothing is drawn twice;
SpecReason and RSD against a second implementation of each."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from toy_models import ToyModel, random_of, toy_models, toy_problems

from stepwise_routing.method import baselines, judges, rollouts
from stepwise_routing.method.policy import fresh_router
from stepwise_routing.models.base import Preference, Request, Reward
from stepwise_routing.models.kept import Kept
from stepwise_routing.records import ModelSpec, boxed, score_messages
from stepwise_routing.store import Store

PRICES = ('gpt-4o-mini', 'gpt-4.1-mini', 'gpt-4.1-mini')


def by_text(pairs):
    "A grader that compares texts."
    return [answer == problem.answer for problem, answer in pairs]


def is_right(problem, steps):
    return boxed(steps[-1].text) == problem.answer


def drawn(models, problems, max_steps=30):
    "The table of what these models write."
    chains, rests = rollouts.draw_chains(problems, models, max_steps)
    specs = [model.spec for model in models]
    table = rollouts.outcome_table(problems, chains, rests, specs, 'test', by_text)
    return table, chains, rests


# ---- a live walk and the table


def coin(o):
    "As good as chance, but the same for the same step."
    return lambda features: np.sin(1e6 * features['min_odds'])


def untrained(o):
    policy = fresh_router(o.features, ('min_odds', 'step', 'final'), len(o.models), (4,), 0)
    return replace(policy, theta=4 * policy.theta)


ROUTERS = dict(
    coin=coin,
    low=lambda o: baselines.low('min_prob'),
    steer=baselines.fit_steer,
    policy=untrained,
    stakes=lambda o: baselines.fit_stakes(o, 'flops', 'continue'),
)
CASES = [(name, models) for name in ROUTERS for models in (2, 3)]
CASES.remove(('stakes', 3))  # it knows two models


@pytest.mark.parametrize('router, models', CASES)
@pytest.mark.parametrize('reading', rollouts.READINGS)
def test_a_live_walk_is_what_the_table_says(router, models, reading):
    "Right answers and bills at every unit, for chains that end, are cut, or hold empty steps."
    pair, problems = toy_models(models, end=0.15, prices=PRICES), toy_problems(70)
    o, chains, _ = drawn(pair, problems, max_steps=6)
    routed = ROUTERS[router](o)
    doubt = routed(o.features)
    kappas = rollouts.thresholds(doubt)
    for kappa in (kappas[0], *kappas[[5, len(kappas) // 2, -9]], kappas[-1]):
        walks = [rollouts.walk(p, routed, kappa, models, reading, max_steps=6) for p in problems]
        walked = rollouts.run_walks(walks, pair)
        for unit in rollouts.UNITS:
            want = rollouts.replay(o, doubt, [kappa], unit, reading)
            bills = [(chain.tokens * o.prices(unit)).sum() for chain in walked]
            if unit == 'cents':
                np.testing.assert_allclose(bills, want.cost[0], rtol=1e-12)
            else:
                assert bills == want.cost[0].tolist()  # whole numbers: every bit
        right = [is_right(p, chain.steps) for p, chain in zip(problems, walked)]
        assert right == want.right[0].tolist()
        paths = [''.join(str(step.model) for step in chain.steps) for chain in walked]
        assert all(list(path) == sorted(path) and len({*path}) <= 2 for path in paths)
    assert paths == ['0' * len(chain) for chain in chains], 'at last, nobody hands over'


@pytest.mark.parametrize('models', [2, 3])
def test_a_table_is_made_of_the_steps_that_were_drawn(models):
    pair, problems = toy_models(models, prices=PRICES, end=0.2), toy_problems(25)
    o, chains, rests = drawn(pair, problems, max_steps=6)
    assert o.steps.tolist() == [len(chain) for chain in chains]
    for i, (problem, chain) in enumerate(zip(problems, chains)):
        T, before = len(chain), 0
        for t, step in enumerate(chain):
            read_anew = max(step.prompt - before, 0)
            before = step.prompt + step.generated
            assert o.small[i, t].tolist() == [step.generated, read_anew, step.prompt, step.cached]
            assert o.features['length'][i, t] == step.generated
        for k in range(models - 1):
            for t, rest in enumerate(rests[k][i]):
                first, written = rest[0], sum(step.generated for step in rest)
                want = [written, first.prompt, first.prompt, first.cached]
                assert o.large[i, t, k].tolist() == want
                assert first.model == k + 1
                assert o.right[i, t, k] == is_right(problem, rest)
            assert not o.large[i, T:, k].any()
            assert (o.right[i, T:, k] == is_right(problem, chain)).all()
        ends = [chain, *(rests[k][i][0] for k in range(models - 1))]
        assert o.cut[i].tolist() == [end[-1].finish != 'stop' for end in ends]
    assert o.cut.any()
    assert not o.cut.all()


# ---- every step is drawn once


def kept_draw(pair, store, problems):
    "(Small chains, rests), and what was drawn for them now."
    before = [len(model.written) for model in pair]
    chains = rollouts.draw_chains(problems, [Kept(model, store) for model in pair], 30)
    new = [model.written[n:] for model, n in zip(pair, before)]
    return chains, sum(new, [])


def check_stored(store, problems, chains, rests):
    "Chains have an end, and each step is the one that the store has in its place."
    for problem, chain, of_chain in zip(problems, chains, rests[0]):
        for t, (step, rest) in enumerate(zip(chain, of_chain, strict=True)):
            assert store.get(problem.id, 0, '0' * t, 0) == step
            assert rest[-1].final or t + len(rest) == 30
            for u, step in enumerate(rest):
                assert store.get(problem.id, 0, '0' * t + '1' * u, 1) == step


@pytest.mark.parametrize('seeded', [True, False])
def test_a_store_that_was_cut_anywhere_goes_on_and_nothing_is_drawn_twice(tmp_path, seeded):
    "Also in the middle of a chain. A model without a seed for each step goes on from what is stored."
    problems = toy_problems(4)
    pair = toy_models(end=0.15, has_step_seeds=seeded)
    whole = Store(tmp_path / 'whole.db', dict(of='toys'))
    wanted, new = kept_draw(pair, whole, problems)
    keys = whole.keys()
    assert sorted(keys) == sorted(new)
    assert len({*new}) == len(new)
    assert kept_draw(pair, whole, problems) == (wanted, [])
    rows = [(key, whole.get(*key)) for key in keys]
    is_inside = [path.endswith(str(model)) for _, _, path, model in keys]
    assert sum(is_inside) > 20, 'a cut there is between two steps of one model'
    for n in range(0, len(rows), 7):
        with Store(tmp_path / f'{n}.db', dict(of='toys')) as store:
            store.put_many(rows[:n])
            chains, new = kept_draw(toy_models(end=0.15, has_step_seeds=seeded), store, problems)
            assert sorted([*keys[:n], *new]) == sorted(store.keys())
            check_stored(store, problems, *chains)
            if seeded:
                assert chains == wanted


def test_equal_requests_of_a_list_are_drawn_once_and_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr('stepwise_routing.models.kept.BLOCK', 4)
    (model,), store = toy_models(1), Store(tmp_path / 's.db', dict(of='toys'))
    requests = [Request(p, sample=i, to_end=True) for p in toy_problems(5) for i in range(2)]
    alone = model.write(requests)
    model.written.clear()
    assert Kept(model, store).write([*requests, *requests[::-1]]) == alone + alone[::-1]
    assert len(model.written) == len({*model.written}) == sum(map(len, alone)) == len(store)
    broken, kept = Store(tmp_path / 'b.db', dict(of='toys')), []

    def failing(requests):
        kept.append(len(broken))
        if len(kept) == 3:
            raise ConnectionError
        return ToyModel.write(model, requests)

    model.write = failing
    with pytest.raises(ConnectionError):
        Kept(model, broken).write(requests)
    sizes = [len(chain) for chain in alone]
    assert kept == [0, sum(sizes[:4]), sum(sizes[:8])]


# ---- SpecReason and RSD: stand-ins whose answers follow from the text
SIZE = 1_000_000, 5_000_000, 3_000_000  # parameters of small model, large model and reward model
ASK = 7  # tokens of the judge's question behind the chain


def size(text):  # tokens of a step for the language models
    return 1 + -(-len(text) // 3)


def weight(text):  # and for the reward model, which cuts text in its own way
    return 2 + len(text) // 5


class Plain(ToyModel):
    "A toy model whose tokens follow from the text, so that a chain is as long for whoever reads it."

    def with_tokens(self, r, text, finish, before, problem, is_right):
        n = size(text)
        ends = [min(3 * i + 3, len(text)) for i in range(n)]
        return self.billed(problem, before, text, finish, ends, (0.5,) * n, (1.0,) * n)

    def choose(self, conversations, options):
        self.asked += len(conversations)
        return [self.choice(messages, len(options)) for messages in conversations]

    asked = 0

    def choice(self, messages, n):
        steps = messages[2]['content'].split('\n\n')
        shared = len(messages[1]['content']) + sum(map(size, steps))
        cached = (shared + ASK) // 4 if self.spec.price else 0
        return Preference(self.prob(messages, n), shared + ASK, 1, cached, shared)

    def prob(self, messages, n):
        r = random_of('grade', str(messages))
        kind, digit = r.random(), r.randrange(n)
        if kind < 0.1:
            return (0.0,) * n  # no digit among what it would say
        if kind < 0.5:
            return tuple(float(i == digit) for i in range(n))
        p = [r.random() ** 3 for _ in range(n)]
        return tuple(x / sum(p) for x in p)


class PRM:
    "A reward model whose rewards follow from the chain."

    spec, asked = ModelSpec('toy-prm', SIZE[2]), 0

    def reward(self, requests):
        self.asked += len(requests)
        return [self.one(request) for request in requests]

    def one(self, request):
        texts = [step.text for step in request.steps]
        read = [len(request.problem.question) // 2, *map(weight, texts)]
        return Reward(self.value(request.problem, texts), sum(read), read[-1])

    def value(self, problem, texts):
        return round(random_of('reward', problem.question, *texts).random(), 2)


class World:
    "Two models, and a judge with an empty store."

    def __init__(self, folder, method, prices=(), **options):
        self.method = method
        self.pair = [Plain(i, params=SIZE[i], prices=prices, **options) for i in (0, 1)]
        self.asked = PRM() if method == 'RSD' else self.pair[1]
        kinds = dict(RSD=(judges.Rewards, Reward), SpecReason=(judges.Grades, Preference))
        judge, record = kinds[method]
        self.judge = judge(self.asked, Store(folder / 'asked.db', dict(of='toys'), record))
        self.models = *self.pair, self.judge

    def walks(self, problems, kappa, **ask):
        walks = [baselines.rewriting_walk(p, kappa, self.judge.payer, **ask) for p in problems]
        return [chain for chain, _ in rollouts.run_walks(walks, self.models)]

    def score(self, problem, steps):
        "Of the last step: its reward, or the mean digit."
        if self.method == 'RSD':
            return self.asked.value(problem, [step.text for step in steps])
        p = self.asked.prob(score_messages(problem, steps), 10)
        return sum(digit * x for digit, x in enumerate(p)) / 9


# ---- the second implementation
class Cache:
    "An ideal prefix cache: it holds what was processed last, piece by piece, and nothing of it is read again."

    def __init__(self):
        self.held = []

    def read(self, pieces, written=()):
        "(tokens of the prompt, tokens of it that were held); then it holds the prompt and what was written."
        known = 0
        for (name, n), (other, _) in zip(pieces, self.held):
            if name != other:
                break
            known += n
        self.held = [*pieces, *written]
        return sum(n for _, n in pieces), known


def pieces(question, chain, count):
    parts = [((i, step.model), count(step.text)) for i, step in enumerate(chain)]
    return [('question', question), *parts]


def by_hand(world, problem, threshold, max_steps):
    "(chain, tokens): draft, ask, keep it or let the large model write the step. No walk, no request list."
    chain, tokens, caches = [], np.zeros((3, 4), int), defaultdict(Cache)

    def writes(m):
        step = world.pair[m].write_one(Request(problem, tuple(chain), max_steps=max_steps))[0]
        n = size(step.text)
        parts = pieces(len(problem.question), chain, size)
        prompt, known = caches[m].read(parts, [((len(chain), m), n)])
        cached = prompt // 3 if world.pair[m].spec.price else 0
        tokens[m] += n, prompt - known, prompt, cached
        return step

    def score(draft):
        whole = [*chain, draft]
        if world.method == 'RSD':
            prompt, known = caches['prm'].read(pieces(len(problem.question) // 2, whole, weight))
            tokens[2] += 0, prompt - known, prompt, 0
        else:
            parts = [*pieces(len(problem.question), whole, size), ('ask', ASK)]
            prompt, known = caches[1].read(parts)
            tokens[1] += 1, prompt - known, prompt, prompt // 4 if world.asked.spec.price else 0
        return world.score(problem, whole)

    while len(chain) < max_steps:
        step = writes(0)
        if score(step) <= threshold:
            step = writes(1)
        chain.append(step)
        if step.finish != 'step':
            break
    return tuple(chain), tokens


@given(
    method=st.sampled_from(['RSD', 'SpecReason']),
    threshold=st.sampled_from([-0.1, 0.0, 0.5, 0.7, 1.0]) | st.floats(0, 1.1),
    salt=st.integers(0, 10**6),
    end=st.sampled_from([0.05, 0.3, 1.0]),
    empty=st.sampled_from([0, 0.5]),
    max_steps=st.sampled_from([1, 3, 30]),
    prices=st.sampled_from([(), (None, 'gpt-4.1-mini'), PRICES]),
)
def test_rewriting_walks_are_those_of_a_second_implementation(
    tmp_path_factory, method, threshold, salt, end, empty, max_steps, prices
):
    world = World(tmp_path_factory.mktemp('w'), method, prices=prices, end=end, empty=empty)
    problems = toy_problems(5, salt)
    for p, chain in zip(problems, world.walks(problems, -threshold, max_steps=max_steps)):
        steps, tokens = by_hand(world, p, threshold, max_steps)
        assert chain.steps == steps
        assert chain.tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize('method', ['RSD', 'SpecReason'])
def test_walks_at_all_settings_are_walks_at_each(tmp_path, method):
    "And the table of walks has their bills; the judge is asked once about every step."
    world, problems = World(tmp_path, method, prices=PRICES, end=0.15), toy_problems(20)
    o, chains, _ = drawn(world.pair, problems)
    scores = judges.judged_chains(world.judge, problems, chains)
    kappas = judges.walk_kappas(np.concatenate(scores))
    assert (np.diff(kappas) > 0).all()
    assert len(kappas) > 30
    for p, chain, row in zip(problems, chains, scores):
        want = [world.score(p, chain[: t + 1]) for t in range(len(chain))]
        np.testing.assert_allclose(row, want, rtol=1e-12)
    spec = world.asked.spec if method == 'RSD' else None
    walks = judges.draw_walks(method, o, problems, world.models, kappas, spec, by_text)
    answers = world.asked.asked
    for s in (0, len(kappas) // 3, -1):
        for i, chain in enumerate(world.walks(problems, kappas[s])):
            assert (walks.tokens[s, i] == chain.tokens).all()
            assert walks.right[s, i] == is_right(problems[i], chain.steps)
    assert world.asked.asked == answers, 'asked once, and kept'
    sizes = 2 * np.array(SIZE) * [1, 1, method == 'RSD']
    cost = rollouts.replay_walks(walks, 'flops').cost
    assert (cost == (walks.tokens[..., 0] * sizes).sum(2)).all()
    kept = [chain.steps for chain in world.walks(problems, kappas[-1])]
    assert kept == chains, 'the cheapest keeps every step'
