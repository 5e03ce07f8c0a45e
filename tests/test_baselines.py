"STEER's mixtures and the regression on stakes, against definitions. Chance and the oracle: independent.py."

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from scipy.stats import norm
from toy import toy

from stepwise_routing.method import baselines
from stepwise_routing.method.rollouts import UNITS, exits, large_alone, thresholds

# ---- STEER
mixtures = st.builds(
    lambda w, mean, gap, a, b: baselines._Mixture(
        *map(np.array, ((w, 1 - w), (mean, mean + gap), (a, b)))
    ),
    st.floats(0.05, 0.95),
    st.floats(-50, 50),
    st.floats(0.01, 30),
    st.floats(0.05, 20),
    st.floats(0.05, 20),
)


@given(mixtures, st.floats(-60, 90))
def test_the_posterior_is_bayes_rule_up_to_the_turn(mixture, score):
    density = mixture.weight * norm.pdf(score, mixture.mean, mixture.std)
    assume(density.sum() > 1e-250)
    a, b = mixture.std**-2
    if not np.isclose(a, b):
        turn = (mixture.mean[0] * a - mixture.mean[1] * b) / (a - b)
        assume(score > turn if mixture.std[1] > mixture.std[0] else score < turn)
    assert np.isclose(mixture.sure(score), density[1] / density.sum(), rtol=1e-6, atol=1e-9)


def test_degenerate_fits_fall_back_on_the_pooled_one():
    "Two spikes, a component that is nearly empty, and an index that few chains reach."
    o = toy(200, split='train')
    logits = o.features['mean_logit'].copy()
    second, third = (np.flatnonzero(o.inside[:, j]) for j in (1, 2))
    logits[second, 1] = np.where(np.arange(len(second)) % 4, 20.0, 15.0)
    logits[third[:4], 2] += 50
    steer = baselines.fit_steer(replace(o, features=o.features | dict(mean_logit=logits)))
    assert [j for j, mixture in enumerate(steer.mixtures) if mixture is None] == [1, 2, 5]
    beyond = steer(dict(mean_logit=np.full((4, 9), 17.0)))
    mixtures = [mixture or steer.pooled for mixture in [*steer.mixtures, None, None, None]]
    assert np.allclose(beyond, [[-mixture.sure(17.0) for mixture in mixtures]] * 4)


# ---- the regression on stakes
def table_where(gains, n=600):
    """One step a chain, a column that is normal, and a large model that repairs where `gains(column)` says so;
    elsewhere both models are right."""
    rng = np.random.default_rng(0)
    o = toy(n, split='train')
    S = o.inside.shape[1]
    is_first = np.arange(S) == 0
    column, noise = rng.normal(size=n), rng.normal(size=n)
    features = dict(min_odds=column, mean_logit=noise, step=0 * noise, length=0 * noise + 9)
    right = np.ones_like(o.right)
    right[:, 1:] = ~gains(column)[:, None, None]
    small, large = np.zeros((n, S, 4), int), np.zeros((n, S + 1, 1, 4), int)
    small[:, 0] = 9
    large[:, 0] = 40
    return replace(
        o,
        features={k: np.where(is_first, x[:, None], np.nan) for k, x in features.items()},
        small=small,
        large=large,
        right=right,
        steps=np.ones(n, int),
        step_right=None,
    )


def test_a_threshold_is_taken_where_it_is_enough():
    router = baselines.fit_stakes(table_where(lambda x: x < -0.5), 'flops', 'continue')
    assert (router.rule, router.model) == ('min-prob', None)
    features = dict(min_odds=np.array([[1.0, -2.0]]), length=np.ones((1, 2)))
    assert router(features).tolist() == [[-1.0, 2.0]]


def test_a_curve_is_taken_where_a_threshold_is_not_enough():
    "It pays to hand over in the middle: neither a low nor a high value is a reason."
    o = table_where(lambda x: np.abs(x) < 0.6)
    router = baselines.fit_stakes(o, 'flops', 'continue')
    assert router.rule == 'curve'
    doubt = router(o.features)
    assert (np.isnan(doubt) == ~o.inside).all()
    column = np.abs(o.features['min_odds'][:, 0])
    assert doubt[column < 0.4, 0].min() > doubt[column > 1, 0].max()


def test_a_label_that_never_varies_gives_the_threshold():
    o = table_where(lambda x: x < 9)
    bill = baselines.bills(o, 'flops', 'continue')
    assert baselines.fit_rule('curve', o.features, bill, o.inside).rule == 'min-prob'


@pytest.mark.parametrize('unit', UNITS)
def test_at_the_price_of_a_mistake_both_models_alone_are_equally_good(unit):
    o = toy(400, split='train')
    bill, large = baselines.bills(o, unit, 'continue'), large_alone(o, unit)
    small = baselines.small_alone(o, unit)
    gap = large.right.mean() - small.right.mean()
    price = (1 - small.cost.mean() / large.cost.mean()) / gap
    assert gap > 0.1
    assert bill[:, -1].mean() == pytest.approx(1 + price * (1 - large.right).mean())
    right, cost = exits(o, unit, 'continue')
    np.testing.assert_allclose(bill, cost / large.cost.mean() + price * (1 - right))


def test_the_least_bill_is_that_of_a_threshold():
    "As low as at the best threshold, but for the few that lie between a hundred of them."
    o = toy(80, split='train')
    doubt, bill = -o.features['min_odds'], baselines.bills(o, 'flops', 'continue')
    every = []
    for kappa in [*thresholds(doubt), np.inf]:
        hands_over = doubt >= kappa
        exit = np.where(hands_over.any(1), hands_over.argmax(1), -1)
        every.append(bill[np.arange(80), exit].mean())
    best = baselines.least_bill(doubt, bill)
    assert min(every) <= best <= np.sort(every)[20] and np.isclose(every, best).any()


def test_what_the_past_says():
    nan = np.nan
    features = dict(min_odds=np.array([[2.0, 1, 3, nan]]), length=np.array([[5.0, 9, 7, nan]]))
    past = baselines.with_past(features)
    np.testing.assert_array_equal(past['worst'], [[2, 1, 1, nan]])
    np.testing.assert_array_equal(past['longest'], [[5, 9, 9, nan]])
    np.testing.assert_array_equal(past['first_odds'], [[2, 2, 2, nan]])
    np.testing.assert_array_equal(past['first_length'], [[5, 5, 5, nan]])
