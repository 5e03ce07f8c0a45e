"STEER's mixtures, the regression on stakes, chance and the oracle: against other code and simulation."

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from scipy.stats import norm
from sklearn.mixture import GaussianMixture
from toy import quick_methods, toy, toy_benchmark

from stepwise_routing.method.baselines import (
    LEAST,
    STAKE_RULES,
    _Mixture,
    _Steer,
    bills,
    fit_mixture,
    fit_rule,
    fit_stakes,
    fit_steer,
    high,
    least_bill,
    low,
    oracle,
    random_problem,
    random_step,
    small_alone,
    with_past,
)
from stepwise_routing.method.rollouts import READINGS, UNITS, exits, large_alone, thresholds

both = pytest.mark.parametrize('models', [2, 3])


# ---- STEER
mixtures = st.builds(
    lambda w, mean, gap, a, b: _Mixture(*map(np.array, ((w, 1 - w), (mean, mean + gap), (a, b)))),
    st.floats(0.05, 0.95),
    st.floats(-50, 50),
    st.floats(0.01, 30),
    st.floats(0.05, 20),
    st.floats(0.05, 20),
)


@given(mixtures, st.lists(st.floats(-200, 200), min_size=2, max_size=40))
def test_the_posterior_is_a_probability_that_never_falls(mixture, scores):
    sure = mixture.sure(np.sort(scores))
    assert ((0 <= sure) & (sure <= 1)).all() and (np.diff(sure) >= -1e-12).all()


@given(mixtures, st.floats(-60, 90))
def test_the_posterior_is_bayes_rule_up_to_the_turn(mixture, score):
    density = mixture.weight * norm.pdf(score, mixture.mean, mixture.std)
    assume(density.sum() > 1e-250)
    a, b = mixture.std**-2
    if not np.isclose(a, b):
        turn = (mixture.mean[0] * a - mixture.mean[1] * b) / (a - b)
        assume(score > turn if mixture.std[1] > mixture.std[0] else score < turn)
    assert np.isclose(mixture.sure(score), density[1] / density.sum(), rtol=1e-6, atol=1e-9)


def test_the_posterior_is_that_of_scikit_learn():
    r = np.random.default_rng(1)
    scores = np.r_[r.normal(12, 2, 300), r.normal(19, 2, 500)]
    other = GaussianMixture(2, n_init=5, random_state=7, tol=1e-9, max_iter=5000).fit(
        scores[:, None]
    )
    want = other.predict_proba(scores[:, None])[:, other.means_[:, 0].argmax()]
    middle = (scores > 10) & (scores < 21)
    assert np.allclose(fit_mixture(scores).sure(scores)[middle], want[middle], atol=0.01)
    assert fit_mixture(scores).mean.tolist() == sorted(fit_mixture(scores).mean)


def test_degenerate_fits_fall_back_on_the_pooled_one():
    "Two spikes, a component that is nearly empty, and an index that few chains reach."
    o = toy(200, split='train')
    logits = o.features['mean_logit'].copy()
    second, third = (np.flatnonzero(o.inside[:, j]) for j in (1, 2))
    last = o.inside.shape[1] - 1
    assert o.inside[:, last].sum() < LEAST
    logits[second, 1] = np.where(np.arange(len(second)) % 4, 20.0, 15.0)
    logits[third[:4], 2] += 50
    steer = fit_steer(replace(o, features=o.features | dict(mean_logit=logits)))
    assert [mixture is None for mixture in steer.mixtures] == [
        False,
        True,
        True,
        False,
        False,
        True,
    ]
    beyond = _Steer(steer.mixtures, steer.pooled)(dict(mean_logit=np.full((4, 9), 17.0)))
    mixtures = [mixture or steer.pooled for mixture in [*steer.mixtures, None, None, None]]
    assert np.allclose(beyond, [[-mixture.sure(17.0) for mixture in mixtures]] * 4)


def test_steer_doubts_where_the_logit_is_low_and_nothing_behind_the_end():
    o = toy(300, split='train')
    doubt = fit_steer(o)(o.features)
    assert (np.isnan(doubt) == ~o.inside).all() and np.nanmin(doubt) >= -1 and np.nanmax(doubt) <= 0
    for j in range(3):
        rows = np.flatnonzero(o.inside[:, j])
        order = rows[o.features['mean_logit'][rows, j].argsort()]
        assert (np.diff(doubt[order, j]) <= 1e-12).all()


def test_thresholds_on_a_column():
    features = dict(a=np.array([[0.1, 0.7]]))
    assert low('a')(features).tolist() == [[-0.1, -0.7]] and high('a')(features) is features['a']


# ---- the regression on stakes
def table_where(gains, n=600, seed=0):
    """One step a chain, a column that is uniform, and a large model that repairs where `gains(column)` says so;
    elsewhere both models are right."""
    rng = np.random.default_rng(seed)
    o = toy(n, split='train')
    column = rng.normal(size=n)
    small_right = ~gains(column)
    S = o.inside.shape[1]
    first = np.arange(S) == 0

    def only_first(values):
        return np.where(first, values[:, None], np.nan)

    zeros, noise = np.zeros(n), rng.normal(size=n)
    features = dict(
        min_odds=column, mean_logit=noise, step=zeros, length=zeros + 9, final=zeros + 1
    )
    right = np.ones_like(o.right)
    right[:, 1:] = small_right[:, None, None]
    return replace(
        o,
        features={name: only_first(values) for name, values in features.items()},
        small=np.where(first[:, None], 9, 0) * np.ones((n, S, 4), int),
        large=np.where(np.arange(S + 1) == 0, 40, 0)[:, None, None]
        * np.ones((n, S + 1, 1, 4), int),
        right=right,
        steps=np.ones(n, int),
        step_right=None,
    )


def test_a_threshold_is_taken_where_it_is_enough():
    router = fit_stakes(table_where(lambda x: x < -0.5), 'flops', 'continue')
    assert (router.rule, router.model) == ('min-prob', None)
    features = dict(min_odds=np.array([[1.0, -2.0]]), length=np.ones((1, 2)))
    assert router(features).tolist() == [[-1.0, 2.0]]


def test_a_curve_is_taken_where_a_threshold_is_not_enough():
    "It pays to hand over in the middle: neither a low nor a high value is a reason."
    o = table_where(lambda x: np.abs(x) < 0.6)
    router = fit_stakes(o, 'flops', 'continue')
    assert router.rule == 'curve'
    doubt = router(o.features)
    assert (np.isnan(doubt) == ~o.inside).all()
    column = o.features['min_odds'][:, 0]
    assert doubt[np.abs(column) < 0.4, 0].min() > doubt[np.abs(column) > 1, 0].max()


def test_a_label_that_never_varies_gives_the_threshold():
    o = table_where(lambda x: x < 9)
    loss = bills(o, 'flops', 'continue')
    assert fit_rule('curve', o.features, loss, o.inside).rule == 'min-prob'
    assert list(STAKE_RULES)[0] == 'min-prob', (
        'the simplest rule stands first, and wins where rules are equal'
    )


@pytest.mark.parametrize('unit', UNITS)
def test_at_the_price_of_a_mistake_both_models_alone_are_equally_good(unit):
    o = toy(400, split='train')
    loss, large = bills(o, unit, 'continue'), large_alone(o, unit)
    gap = large.right.mean() - small_alone(o, unit).right.mean()
    price = (1 - small_alone(o, unit).cost.mean() / large.cost.mean()) / gap
    assert gap > 0.1
    assert loss[:, -1].mean() == pytest.approx(1 + price * (1 - large.right).mean())
    right, cost = exits(o, unit, 'continue')
    np.testing.assert_allclose(loss, cost / large.cost.mean() + price * (1 - right))


def test_the_least_loss_is_that_of_a_threshold():
    "As low as at the best threshold, but for the few that lie between a hundred of them."
    o = toy(80, split='train')
    doubt, loss = low('min_odds')(o.features), bills(o, 'flops', 'continue')
    every = []
    for kappa in [*thresholds(doubt), np.inf]:
        exit = [
            next((t for t in range(T) if row[t] >= kappa), -1) for row, T in zip(doubt, o.steps)
        ]
        every.append(loss[np.arange(80), exit].mean())
    best = least_bill(doubt, loss)
    assert min(every) <= best <= np.sort(every)[20] and np.isclose(every, best).any()


def test_what_the_past_says():
    nan = np.nan
    features = dict(min_odds=np.array([[2.0, 1, 3, nan]]), length=np.array([[5.0, 9, 7, nan]]))
    past = with_past(features)
    want = dict(
        worst=[2, 1, 1, nan],
        longest=[5, 9, 9, nan],
        first_odds=[2, 2, 2, nan],
        first_length=[5, 5, 5, nan],
    )
    for name, values in want.items():
        np.testing.assert_array_equal(past[name], [values])


# ---- chance and the oracle
@both
@pytest.mark.parametrize('reading', READINGS)
def test_chance_is_the_mean_of_many_drawn_walks(models, reading):
    o, rng = toy(60, models), np.random.default_rng(0)
    right, cost = exits(o, 'flops', reading)
    rows, larger = np.arange(60), models - 1
    for p in (0.0, 0.3, 1.0):
        total = np.zeros((2, 60))
        for _ in range(3000):
            hands_over = (rng.random(o.inside.shape) < p) & o.inside
            exit = np.where(hands_over.any(1), hands_over.argmax(1) * larger, right.shape[1] - 1)
            total += right[rows, exit], cost[rows, exit]
        got = random_step(o, p, 'flops', reading)
        drawn_right, drawn_cost = total / 3000
        assert abs(got.right - drawn_right).max() < 0.04
        assert abs(got.cost / drawn_cost - 1).max() < 0.05
        assert got.cost.sum() == pytest.approx(drawn_cost.sum(), rel=0.004)
        assert got.right.sum() == pytest.approx(drawn_right.sum(), rel=0.004)


@both
def test_random_problems_lie_between_both_models_alone(models):
    o = toy(50, models)
    large, small = large_alone(o, 'cents'), small_alone(o, 'cents')
    problem = np.arange(50)
    assert (small.right == o.right[problem, o.steps, 0]).all() and not small.cost.any()
    for p in (0.0, 0.25, 1.0):
        for got, a, b in zip(random_problem(o, p, 'cents'), large, small):
            np.testing.assert_allclose(got, p * a + (1 - p) * b)


@both
@pytest.mark.parametrize('reading', READINGS)
def test_the_oracle_is_the_cheapest_exit_that_is_right(models, reading):
    o = toy(60, models, seed=5)
    for unit in UNITS:
        right, cost = exits(o, unit, reading)
        got = oracle(o, unit, reading)
        for i in range(60):
            good = [c for c, is_right in zip(cost[i], right[i]) if is_right]
            assert got.right[i] == bool(good)
            assert got.cost[i] == (min(good) if good else cost[i, -1])


def test_nothing_beats_the_oracle():
    "Who is right pays as much as the oracle, at least, and the oracle is right, too: at any threshold."
    splits, compared = toy_benchmark(100), 0
    best = oracle(splits['test'], 'flops')
    for method in quick_methods():
        if method.reading == 'continue' and method.name not in (
            'Large only',
            'Random step',
            'Random problem',
        ):
            curve = method.curves(splits, ('flops',), 'continue', 0)['flops']
            is_large_alone = len(curve.kappas) > 1  # the first setting
            right, cost = (values[is_large_alone:] for values in curve.test)
            assert (right <= best.right).all(), method.name
            assert (np.where(right == 1, cost - best.cost, 0) >= -1e-6).all(), method.name
            compared += right.sum()
    assert compared > 1000
