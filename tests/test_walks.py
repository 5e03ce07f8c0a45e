"""Drawing and walking, on toy models: a live walk is what the table says, bills are right, nothing is drawn twice;
SpecReason and RSD against a second implementation of each."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from toy_models import ToyModel, toy_models, toy_problems

from stepwise_routing.method.baselines import (
    Grades,
    Rewards,
    draw_walks,
    fit_steer,
    judged_chains,
    low,
    rewriting_walk,
    walk_kappas,
    walk_settings,
)
from stepwise_routing.method.policy import fresh_router
from stepwise_routing.method.rollouts import (
    READINGS,
    UNITS,
    Kept,
    draw_chains,
    large_alone,
    outcome_table,
    replay,
    replay_walks,
    run_walks,
    thresholds,
    walk,
)
from stepwise_routing.models.base import Request
from stepwise_routing.models.interface import Choice, Reward
from stepwise_routing.records import ModelSpec, edge_seed, extract_boxed, score_messages
from stepwise_routing.store import Store

both = pytest.mark.parametrize('models', [2, 3])
PRICES = ('gpt-4o-mini', 'gpt-4.1-mini', 'gpt-4.1-mini')


def is_answer(problem, answer):
    return answer == problem.answer


def drawn(models, problems, max_steps=30):
    "The table of what these models write."
    chains, rests = draw_chains(problems, models, max_steps)
    specs = [model.spec for model in models]
    return outcome_table(problems, chains, rests, specs, 'test', is_answer), chains, rests


# ---- a live walk and the table
def untrained(o):
    policy = fresh_router(o.features, ('min_odds', 'step', 'final'), len(o.models), (4,), 0)
    return replace(policy, theta=4 * policy.theta)


ROUTERS = dict(low=lambda o: low('min_prob'), steer=fit_steer, policy=untrained)


@both
@pytest.mark.parametrize('reading', READINGS)
@pytest.mark.parametrize('router', ROUTERS)
def test_a_live_walk_is_what_the_table_says(models, reading, router):
    "Right answers and bills at every unit, for chains that end, are cut, or hold empty steps."
    pair, problems = toy_models(models, end=0.15, prices=PRICES), toy_problems(70)
    o, chains, _ = drawn(pair, problems, max_steps=6)
    routed = ROUTERS[router](o)
    doubt = routed(o.features)
    kappas = thresholds(doubt)
    for kappa in (kappas[0], *kappas[[5, len(kappas) // 2, -9]], kappas[-1]):
        walks = [walk(p, routed, kappa, models, reading, max_steps=6) for p in problems]
        walked = run_walks(walks, pair)
        for unit in UNITS:
            want = replay(o, doubt, [kappa], unit, reading)
            bills = [(chain.tokens * o.prices(unit)).sum() for chain in walked]
            np.testing.assert_allclose(bills, want.cost[0], rtol=1e-12)
        right = [is_answer(p, extract_boxed(c.steps[-1].text)) for p, c in zip(problems, walked)]
        assert right == want.right[0].tolist()
        paths = [''.join(str(step.model) for step in chain.steps) for chain in walked]
        assert all(list(path) == sorted(path) and len({*path}) <= 2 for path in paths)
    assert paths == ['0' * len(chain) for chain in chains], 'at last, nobody hands over'


@both
def test_a_table_is_made_of_the_steps_that_were_drawn(models):
    pair, problems = toy_models(models, prices=PRICES, end=0.2), toy_problems(25)
    o, chains, rests = drawn(pair, problems)
    assert o.steps.tolist() == [len(chain) for chain in chains]
    for i, (problem, chain) in enumerate(zip(problems, chains)):
        for t, step in enumerate(chain):
            before = chain[t - 1].prompt + chain[t - 1].generated if t else 0
            want = step.generated, max(step.prompt - before, 0), step.prompt, step.cached
            assert o.small[i, t].tolist() == [*want]
            assert o.features['length'][i, t] == step.generated
        for k in range(models - 1):
            for t in range(len(chain)):
                rest = rests[k][i][t]
                first, written = rest[0], sum(step.generated for step in rest)
                want = written, first.prompt, first.prompt, first.cached
                assert o.large[i, t, k].tolist() == [*want] and first.model == k + 1
                assert o.right[i, t, k] == is_answer(problem, extract_boxed(rest[-1].text))
            assert not o.large[i, len(chain) :, k].any()
            small_right = is_answer(problem, extract_boxed(chain[-1].text))
            assert (o.right[i, len(chain) :, k] == small_right).all()
        ends = [chain, *(rests[k][i][0] for k in range(models - 1))]
        assert o.cut[i].tolist() == [x[-1].finish == 'length' or not x[-1].final for x in ends]
    assert o.cut.any() and not o.cut.all()
    large = large_alone(o, 'flops')
    assert (large.cost == 2 * o.params[-1] * o.large[:, 0, -1, 0]).all()


def test_a_model_without_a_price_is_free_and_the_largest_may_be_given_one():
    problems = toy_problems(2)
    for prices, price, want in (
        ((None, 'gpt-4.1-mini'), '', [[0, 0, 0], [0.4, 0.1, 1.6]]),
        ((), 'gpt-4o-mini', [[0, 0, 0], [0.15, 0.075, 0.6]]),
        ((), '', [[0, 0, 0], [0, 0, 0]]),
    ):
        pair = toy_models(prices=prices)
        specs = [model.spec for model in pair]
        drawn = draw_chains(problems, pair, 30)
        o = outcome_table(problems, *drawn, specs, 'train', is_answer, price, [[True]] * 2)
        assert o.dollars.tolist() == want
        assert o.step_right[:, 0].all() and not o.step_right[:, 1:].any()


# ---- every step is drawn once
def stored(tmp_path, name, pair):
    store = Store(tmp_path / f'{name}.db', dict(of='toys'))
    return store, [Kept(model, store) for model in pair]


def contents(store):
    return {key: store.get(*key) for key in store.keys()}


def test_a_chain_is_the_same_whole_or_step_by_step_and_seeds_follow_from_its_place(tmp_path):
    pair, (problem, *_) = toy_models(end=0.1, cut=0), toy_problems(1)
    whole = pair[1].write([Request(problem, pair[0].write_one(Request(problem)), 3, True)])[0]
    steps, asked = pair[0].write_one(Request(problem)), []
    seeds = [edge_seed('toy', problem.id, 3, '0' + '1' * i, 1) for i in range(len(whole))]
    for _ in whole:
        request = Request(problem, steps, 3)
        asked.append(request.seed(0, 1))
        steps += pair[1].write_one(request)
    assert steps[1:] == whole and asked == seeds and len({*seeds}) == len(whole) > 1


def test_what_is_kept_is_not_drawn_again(tmp_path):
    pair, problems = toy_models(), toy_problems(30)
    store, kept = stored(tmp_path, 'a', pair)
    first = drawn(kept, problems)
    written = sum(model.steps_written for model in pair)
    assert len(store) == written
    again = drawn(kept, problems[::-1])
    assert sum(model.steps_written for model in pair) == written
    assert again[1] == first[1][::-1] and again[2][0] == first[2][0][::-1]
    kappa = np.nanmedian(low('min_prob')(first[0].features))
    run_walks([walk(p, low('min_prob'), kappa) for p in problems], kept)
    assert sum(model.steps_written for model in pair) == written


def test_drawing_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr('stepwise_routing.method.rollouts.BLOCK', 4)
    pair, problems = toy_models(), toy_problems(20)
    whole, kept = stored(tmp_path, 'whole', pair)
    drawn(kept, problems)
    cut, kept = stored(tmp_path, 'cut', pair)
    write, left = pair[1].write, [3]

    def failing(requests):
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError('server gone')
        return write(requests)

    pair[1].write = failing
    with pytest.raises(ConnectionError, match='server gone'):
        drawn(kept, problems)
    survived, before = contents(cut), sum(model.steps_written for model in pair)
    pair[1].write = write
    drawn(kept, problems)
    assert survived and survived.items() <= contents(cut).items() == contents(whole).items()
    assert sum(model.steps_written for model in pair) - before == len(cut) - len(survived)


def test_walks_together_are_walks_alone():
    pair, problems = toy_models(3), toy_problems(12)
    router = low('min_prob')
    alone = [run_walks([walk(p, router, -0.7, 3)], pair)[0] for p in problems]
    together = run_walks([walk(p, router, -0.7, 3) for p in problems], pair)
    assert [chain.steps for chain in alone] == [chain.steps for chain in together]
    assert all((a.tokens == b.tokens).all() for a, b in zip(alone, together))


# ---- SpecReason and RSD: stand-ins whose answers follow from the text
SIZE = 1_000_000, 5_000_000, 3_000_000  # parameters of small model, large model and reward model
ASK = 7  # tokens of the judge's question behind the chain


def size(text):  # tokens of a step for the language models
    return 1 + -(-len(text) // 3)


def weight(text):  # and for the reward model, which cuts text in its own way
    return 2 + len(text) // 5


class Plain(ToyModel):
    "A toy model whose tokens follow from the text, so that a chain is as long for whoever reads it."

    def _tokens(self, r, text, sure):
        n = size(text.strip())
        ends = tuple(min(3 * i + 3, len(text.strip())) for i in range(n))
        return dict(ids=tuple(range(n)), ends=ends, prob=(0.5,) * n, max_logit=(1.0,) * n)

    def choose(self, conversations, options):
        self.asked += len(conversations)
        return [self.choice(messages, len(options)) for messages in conversations]

    asked = 0

    def choice(self, messages, n):
        steps = messages[2]['content'].split('\n\n')
        shared = len(messages[1]['content']) + sum(map(size, steps))
        cached = (shared + ASK) // 4 if self.spec.price else 0
        return Choice(self.prob(messages, n), shared + ASK, 1, cached, shared)

    def prob(self, messages, n):
        r = self._random('grade', str(messages))
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
        return round(Plain(0)._random('reward', problem.question, *texts).random(), 2)


class World:
    "Two models, and a judge with an empty store."

    def __init__(self, folder, method, prices=(), **options):
        self.method = method
        self.pair = [Plain(i, params=SIZE[i], prices=prices, **options) for i in (0, 1)]
        self.asked = PRM() if method == 'RSD' else self.pair[1]
        self.path = folder / f'{method}.db'
        record = Reward if method == 'RSD' else Choice
        self.store = Store(self.path, dict(of='toys'), record)
        self.judge = (Rewards if method == 'RSD' else Grades)(self.asked, self.store)
        self.models = *self.pair, self.judge

    def walks(self, problems, kappa, **ask):
        walks = [rewriting_walk(p, kappa, self.judge.payer, **ask) for p in problems]
        return [chain for chain, _ in run_walks(walks, self.models)]

    def close(self):
        self.store.close()
        for path in self.path.parent.glob(f'{self.path.name}*'):
            path.unlink()


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
    rsd, chain = world.method == 'RSD', []
    tokens, caches = np.zeros((3, 4), int), defaultdict(Cache)

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
        if rsd:
            prompt, known = caches['prm'].read(pieces(len(problem.question) // 2, whole, weight))
            tokens[2] += 0, prompt - known, prompt, 0
            return world.asked.value(problem, [step.text for step in whole])
        parts = [*pieces(len(problem.question), whole, size), ('ask', ASK)]
        prompt, known = caches[1].read(parts)
        tokens[1] += 1, prompt - known, prompt, prompt // 4 if world.asked.spec.price else 0
        p = world.asked.prob(score_messages(problem, whole), 10)
        return sum(digit * x for digit, x in enumerate(p)) / 9

    while len(chain) < max_steps:
        step = writes(0)
        if score(step) <= threshold:
            step = writes(1)
        chain.append(step)
        if step.finish != 'step' or 'boxed' in step.text:
            break
    return tuple(chain), tokens


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    tmp_path, method, threshold, salt, end, empty, max_steps, prices
):
    world = World(tmp_path, method, prices=prices, end=end, empty=empty)
    problems = toy_problems(5, salt)
    for p, chain in zip(problems, world.walks(problems, -threshold, max_steps=max_steps)):
        steps, tokens = by_hand(world, p, threshold, max_steps)
        assert chain.steps == steps
        assert chain.tokens.tolist() == tokens.tolist()
    world.close()


@pytest.mark.parametrize('method', ['RSD', 'SpecReason'])
def test_walks_at_all_settings_are_walks_at_each(tmp_path, method):
    "And the table of walks has their bills; the judge is asked once about every step."
    world, problems = World(tmp_path, method, prices=PRICES, end=0.15), toy_problems(20)
    o, chains, _ = drawn(world.pair, problems)
    scores = judged_chains(world.judge, problems, chains)
    kappas = walk_kappas(np.concatenate(scores))
    assert (np.diff(kappas) > 0).all() and len(kappas) > 30
    for p, chain, row in zip(problems, chains, scores):
        want = [by_hand_score(world, p, chain[: t + 1]) for t in range(len(chain))]
        np.testing.assert_allclose(row, want, rtol=1e-12)
    spec = world.asked.spec if method == 'RSD' else None
    walks = draw_walks(method, o, problems, world.models, kappas, spec, is_answer)
    assert walks.right.shape == (len(kappas), 20) and walks.tokens.shape == (len(kappas), 20, 3, 4)
    answers = world.asked.asked
    for s in (0, len(kappas) // 3, -1):
        for i, chain in enumerate(world.walks(problems, kappas[s])):
            assert (walks.tokens[s, i] == chain.tokens).all()
            answer = extract_boxed(chain.steps[-1].text)
            assert walks.right[s, i] == is_answer(problems[i], answer)
    assert world.asked.asked == answers, 'asked once, and kept'
    settings_of = [walk_settings(p, kappas, world.judge.payer) for p in problems]
    for row in run_walks(settings_of, world.models):
        assert len(row) == len(kappas)
    cost = replay_walks(walks, 'flops').cost
    want = (walks.tokens[..., 0] * 2 * np.array([*SIZE[:2], SIZE[2] * (method == 'RSD')])).sum(2)
    assert (cost == want).all()
    kept = [chain.steps for chain in world.walks(problems, kappas[-1])]
    assert kept == chains, 'the cheapest keeps every step'


def by_hand_score(world, problem, steps):
    if world.method == 'RSD':
        return world.asked.value(problem, [step.text for step in steps])
    p = world.asked.prob(score_messages(problem, steps), 10)
    return sum(digit * x for digit, x in enumerate(p)) / 9


def test_a_threshold_keeps_the_step_that_lies_on_it():
    kappas = walk_kappas(np.array([0.2, 0.9, 0.45]))
    cuts = -kappas[::-1]
    assert {*np.linspace(0, 1, 11).round(6)} <= {*cuts.round(6)}
    assert not (-0.45 >= kappas[np.isclose(kappas, -0.45)]).any(), (
        'a score on a cut is not rejected'
    )
