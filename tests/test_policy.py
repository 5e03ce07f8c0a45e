"The network, the two thresholds of the paper, and the choice on calibration with its promise."

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import norm
from toy import quick_methods, toy, toy_benchmark

from stepwise_routing.method.policy import (
    DTYPE,
    FEW,
    RISK,
    RULES,
    Curve,
    Network,
    capital,
    fresh_policy,
    fresh_router,
    guaranteed,
    log_odds,
    log_pi,
    passes_normal,
    soft_choice,
    tuned,
    update_threshold,
)
from stepwise_routing.method.results import Choice, choose, simplest
from stepwise_routing.method.rollouts import Result
from stepwise_routing.own import load_policy, save_policy
from stepwise_routing.util import resamples

COLUMNS = ('min_odds', 'step', 'final')
both = pytest.mark.parametrize('models', [2, 3])


# ---- the network
@pytest.mark.parametrize('hidden', [(), (4,), (5, 3)])
def test_a_network_is_linear_layers_with_tanh_between(hidden):
    net = Network(3, 2, hidden)
    theta, x = net.fresh(0), torch.randn(7, 3, dtype=DTYPE)
    sizes, layers, start = (3, *hidden, 2), [], 0
    for inputs, units in zip(sizes, sizes[1:]):
        layer = torch.nn.Linear(inputs, units, dtype=DTYPE)
        n = inputs * units
        layer.weight.data = theta[start : start + n].view(units, inputs)
        layer.bias.data = theta[start + n : start + n + units]
        start += n + units
        layers += [layer, torch.nn.Tanh()]
    assert start == len(theta)
    assert torch.allclose(net(theta, x), torch.nn.Sequential(*layers[:-1])(x), rtol=1e-12)


@both
def test_a_fresh_policy_hands_over_now_and_then(models):
    net = Network(3, models)
    theta = fresh_policy(net, 0)
    x = torch.randn(100, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    pi = log_pi(log_odds(net(theta, x))).exp()
    np.testing.assert_allclose(pi.sum(-1), 1)
    np.testing.assert_allclose(pi[:, 1:].mean(0), 0.1 / (models - 1), rtol=0.3)
    assert torch.equal(theta, fresh_policy(net, 0))
    assert not torch.equal(theta, fresh_policy(net, 1))


# ---- the soft choice
probabilities = st.integers(2, 4).flatmap(
    lambda k: st.lists(st.integers(1, 12), min_size=k, max_size=k)
)


@given(probabilities, st.floats(0, 0.5), st.sampled_from([0.1, 0.03]))
def test_s_is_as_the_definition_has_it(weights, kappa, temperature):
    pi = torch.tensor(weights, dtype=DTYPE)
    pi = pi / pi.sum()
    odds = log_odds(pi.log()[None])
    assert torch.allclose(log_pi(odds).exp()[0], pi, rtol=1e-12)
    allowed = torch.sigmoid((pi - kappa) / temperature)
    S = soft_choice(odds, kappa, temperature).exp()[0]
    assert torch.allclose(S, allowed / allowed.sum(), rtol=1e-9)


# ---- equation 5


def lost_at(kappa):
    "A router loses more at a higher kappa, as it hands over less often."
    return 0.12 / (1 + math.exp(-(kappa - 0.3) / 0.06))


@pytest.mark.parametrize('start', [0.1, 0.45])
def test_kappa_settles_where_the_loss_is_alpha_and_runs_away_with_the_printed_sign(start):
    ends = []
    for printed in (False, True):
        kappa = start
        for k in range(1, 3000):
            kappa = update_threshold(kappa, lost_at(kappa), 0.02, 2 * k**-0.6, 0.5, printed)
        ends.append(kappa)
    assert lost_at(ends[0]) == pytest.approx(0.02, abs=1e-4)
    assert ends[1] in (0, 0.5)


# ---- a policy as a router
@both
def test_a_policy_doubts_as_much_as_pi_hands_over(models):
    o = toy(30, models)
    policy = fresh_router(o.features, COLUMNS, models, (4,), 0)
    policy = replace(policy, theta=3 * policy.theta)
    doubt = policy(o.features)
    assert doubt.shape == (*o.inside.shape, models - 1)
    assert (np.isnan(doubt) == ~o.inside[..., None]).all()
    raw = {name: o.features[name][o.inside] for name in COLUMNS}
    x = np.stack([(values - values.mean()) / values.std() for values in raw.values()], -1)
    logits = policy.net(policy.theta, torch.tensor(x))
    np.testing.assert_allclose(doubt[o.inside], logits.softmax(-1)[:, 1:].numpy(), atol=1e-9)
    for i in range(30):  # alone and step by step, as at work: the same to the last bit
        for T in range(1, o.steps[i] + 1):
            seen = {name: values[i : i + 1, :T] for name, values in o.features.items()}
            assert (policy(seen)[0] == doubt[i, :T]).all()


@both
def test_a_saved_policy_comes_back_bit_by_bit(models, tmp_path):
    o = toy(20, models)
    policy = fresh_router(o.features, COLUMNS, models, (6, 2), 0)
    save_policy(policy, tmp_path / 'a', kappa=0.1 + 0.2, note='x')
    back, facts = load_policy(tmp_path / 'a')
    assert facts == dict(kappa=0.1 + 0.2, note='x')
    assert back.theta.dtype == DTYPE
    assert (back.columns, back.net) == (policy.columns, policy.net)
    assert back(o.features).tobytes() == policy(o.features).tobytes()
    save_policy(back, tmp_path / 'b', **facts)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in 'ab']
    assert files[0] == files[1]
    assert set(files[0]) == {'policy.json', 'theta.safetensors'}


# ---- tuned
numbers = st.integers(0, 6).map(lambda i: i / 20)
settings_list = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9)


@given(st.lists(settings_list, min_size=1, max_size=3), st.sampled_from([0.0, 0.05, 0.1]))
def test_tuned_is_the_cheapest_setting_that_keeps_the_accuracy(rows, alpha):
    width = min(len(row) for row in rows)
    accuracy, cost = np.moveaxis(np.array([row[:width] for row in rows]), 2, 0)
    for r, setting in enumerate(tuned(accuracy, cost, alpha)):
        good = [i for i in range(width) if accuracy[r, i] > accuracy[r, 0] - alpha - 1e-9]
        assert setting == min(good, key=lambda i: (cost[r, i], i))


# ---- guaranteed
def safe(loss, alpha, delta=RISK):
    "Does `guaranteed` take a setting with these losses?"
    n = len(loss)
    two = np.stack([np.zeros(n), loss])
    return bool(guaranteed(two, np.array([[1.0, 0.5]]), np.ones((1, n)), alpha, delta)[0])


@pytest.mark.parametrize('n, alpha', [(100, 0.03), (300, 0.03), (600, 0.03), (600, 0.005)])
def test_an_unsafe_setting_is_rarely_taken(n, alpha):
    "2,000 simulated calibrations of a setting that loses alpha, and a little more."
    rng = np.random.default_rng(n)
    outcomes, chances = [1.0, 0.0, -1.0], [alpha + 0.031, 0.939 - alpha, 0.03]
    if alpha < 0.01:
        outcomes, chances = [1.0, 0.0], [alpha * 1.01, 1 - alpha * 1.01]
    taken = [safe(rng.choice(outcomes, n, p=chances), alpha) for _ in range(2000)]
    assert np.mean(taken) <= RISK


def test_the_walk_stops_at_the_first_setting_that_may_lose_too_much():
    n = 1000
    good, bad, counts = np.zeros(n), np.ones(n), np.ones((1, n))

    def taken(losses, cost):
        return guaranteed(np.stack(losses), np.array([cost]), counts, 0.02, RISK)[0]

    assert taken([good, good, good, bad, good], [5, 4, 3, 2, 1]) == 2
    assert taken([good, bad, good], [3, 2, 1]) == 0
    assert taken([good, good], [3, 3]) == 0, 'nothing is saved: the large model alone'


def test_the_normal_bound_by_hand():
    loss = np.array([[0.0, 1, 0, 0]])
    bound = 0.25 + norm.ppf(0.9) * math.sqrt(0.75 / 3 / 4)
    assert passes_normal(loss, np.ones((1, 4)), bound + 1e-9, 0.1)
    assert not passes_normal(loss, np.ones((1, 4)), bound - 1e-9, 0.1)


@pytest.mark.parametrize('n, alpha', [(1, 0.3), (4, 0.1), (8, 0.02), (8, 0.3)])
def test_the_bet_is_fair_by_counting_every_course_of_the_game(n, alpha):
    "A loss of 1, 0 or -1, and of alpha in the mean: all 3^n courses, with their probabilities."
    chance = {1.0: 0.25 + alpha / 2, -1.0: 0.25 - alpha / 2, 0.0: 0.5}
    courses = np.array([*product(chance, repeat=n)])
    probability = np.prod([[chance[x] for x in course] for course in courses], 1)
    money = capital(courses, alpha, RISK)
    assert (money > 0).all() and probability @ money[:, -1] == pytest.approx(1)
    assert probability @ (money.max(1) >= 1 / RISK) <= RISK


def test_few_problems_or_few_allowed_losses_are_tested_exactly():
    "Nothing was lost on a few problems: that is no proof, whatever the normal bound says."
    assert not safe(np.zeros(20), 0.02) and safe(np.zeros(FEW), 0.02)
    assert not safe(np.zeros(60), 0.05) and safe(np.zeros(100), 0.05)
    cases = product((20, 299, 300, 600, 3000), (1e-4, 0.002, 0.005, 0.01, 0.02, 0.05))
    proofs = [(1 - alpha) ** n for n, alpha in cases if safe(np.zeros(n), alpha)]
    assert proofs and max(proofs) <= RISK


def test_bets_on_a_resample_are_those_on_its_problems():
    rng = np.random.default_rng(3)
    loss = (rng.random((12, 200)) < 0.02).cumsum(0).clip(0, 1).astype(float)
    loss[0] = 0
    counts, cost = resamples(200, 8), np.linspace(1, 0.1, 12)
    got = guaranteed(loss, np.tile(cost, (9, 1)), counts, 0.15, RISK)
    for r, row in enumerate(counts):
        drawn = np.repeat(np.arange(200), row.astype(int))
        wanted = 0
        while wanted < 11 and safe(loss[wanted + 1, drawn], 0.15):
            wanted += 1
        assert got[r] == wanted
    assert len({*got}) > 2


# ---- the choice, again in each resample
def random_curve(seed, n=310, settings=12):
    "Settings from safe to cheap: each loses a few problems more."
    rng = np.random.default_rng(seed)

    def split(n):
        right = (rng.random((settings, n)) < np.linspace(0.9, 0.8, settings)[:, None]).astype(float)
        return Result(right, rng.random((settings, n)) * np.linspace(2, 0.5, settings)[:, None])

    return Curve([None, *range(1, settings)], split(n), split(n - 20))


def slow_choice(curve, counts, alpha, delta=None):
    "A loop over the problems of one resample. delta None: tuned."
    drawn = np.repeat(np.arange(len(counts)), counts.astype(int))
    right, cost = (values[:, drawn] for values in curve.calibration)
    best = 0
    for setting in range(1, len(right)):
        loss = right[0] - right[setting]
        if delta is None:
            keeps = right[setting].mean() >= right[0].mean() - alpha - 1e-12
            if keeps and cost[setting].mean() < cost[best].mean():
                best = setting
            continue
        if loss.mean() + norm.ppf(1 - delta) * loss.std(ddof=1) / math.sqrt(len(loss)) > alpha:
            break
        best = setting
    return best if cost[best].mean() < cost[0].mean() else 0


def test_every_resample_and_every_seed_chooses_for_itself():
    curves, alpha = [random_curve(seed) for seed in (0, 1, 2)], 0.09
    counts = resamples(310, 30, seed=5), resamples(290, 30, seed=6)
    found = choose(curves, counts, alpha, seed=7)
    shares = resamples(3, 30, seed=7) / 3
    deltas = dict(zip(RULES, (None, RISK, RISK / 3)))
    used = set()
    for rule, delta in deltas.items():
        for r in range(31):
            want = np.zeros(3)
            for curve, share in zip(curves, shares[r]):
                at = slow_choice(curve, counts[0][r], alpha, delta)
                used.add((rule, at))
                cost = curve.calibration.cost @ counts[0][r]
                on_test = [values[at] @ counts[1][r] / 290 for values in curve.test]
                want += share * np.array([*on_test, cost[at] / cost[0]])
            choice = found[rule]
            got = choice.accuracy[r], choice.cost[r], choice.calibration_cost[r]
            np.testing.assert_allclose(got, want, rtol=1e-12)
        for curve, (kappa, accuracy, cost) in zip(curves, choice.by_seed):
            at = slow_choice(curve, np.ones(310), alpha, delta)
            assert kappa == curve.kappas[at]
            np.testing.assert_allclose((accuracy, cost), [v[at].mean() for v in curve.test])
    assert len(used) > 10


def test_other_test_problems_change_no_threshold_and_no_choice():
    "All methods at once: fitted, swept and chosen the same, whatever the test split is."
    splits, other = toy_benchmark(80), toy_benchmark(80, seed=9)
    of_test = 'test', ('SpecReason', 'test'), ('RSD', 'test')
    swapped = splits | {key: other[key] for key in of_test}
    counts = resamples(80, 3), resamples(80, 3)
    for method in quick_methods():
        found = []
        for case in (splits, swapped):
            curve = method.curves(case, ('flops', 'cents'), method.reading, 0)['cents']
            kappas = [choice.by_seed[0][0] for choice in choose([curve], counts, 0.05).values()]
            found.append((curve, kappas))
        (one, chosen), (two, again) = found
        assert [*one.kappas] == [*two.kappas] and chosen == again, method.name
        for a, b in zip(one.calibration, two.calibration):
            assert (a == b).all(), method.name
        assert (one.test.right != two.test.right).any(), method.name


# ---- the simplest of several
@given(st.lists(st.lists(st.integers(1, 8), min_size=4, max_size=4), min_size=1, max_size=4))
def test_the_simplest_that_is_nearly_the_cheapest_is_taken(costs):
    costs = np.array(costs) / 8 * np.array([1, 1.04, 1.06, 1])[: len(costs), None]
    rows, choices = np.arange(4.0), []
    for i, cost in enumerate(costs):
        choices.append(Choice(10 * i + rows, 100 * i + rows, cost, [(i, 0.0, 0.0)]))
    found = simplest(choices)
    wanted = [next(i for i, c in enumerate(row) if c <= 1.05 * row.min()) for row in costs.T]
    assert found.accuracy.tolist() == [10 * i + r for r, i in enumerate(wanted)]
    assert found.cost.tolist() == [100 * i + r for r, i in enumerate(wanted)]
    assert found.calibration_cost.tolist() == [costs[i, r] for r, i in enumerate(wanted)]
    assert found.by_seed == [(wanted[0], 0.0, 0.0)]
