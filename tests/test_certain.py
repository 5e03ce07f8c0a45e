"The target `certain`: is the promise kept as often as it says, for any number of problems?"
from itertools import product
from math import prod

import numpy as np
import pytest
from scipy.stats import norm

from stepwise_routing.method.certain import (
    FEW,
    capital,
    certain_setting,
    is_safe,
    losses,
    normal_bound,
    problems_for,
    problems_needed,
)


@pytest.mark.parametrize('n, alpha', [(1, .3), (4, .1), (8, .02), (8, .3)])
def test_the_bet_is_fair_by_counting_every_course_of_the_game(n, alpha):
    "An unsafe router: its loss is 1, 0 or -1, and alpha in the mean. All 3^n courses, with their probabilities."
    lost, gained = (.5 + alpha)/2, (.5 - alpha)/2
    chance = {1: lost, -1: gained, 0: 1 - lost - gained}
    believed = end = 0
    for course in product(chance, repeat=n):
        p = prod(chance[x] for x in course)
        money = capital(np.array(course, float), alpha)
        assert (money > 0).all()
        believed += p*(money.max() >= 10)
        end += p*money[-1]
    assert believed <= .1 and end == pytest.approx(1), 'a fair game keeps its mean'

def test_a_stake_knows_the_past_alone():
    one, other = np.zeros(20), np.r_[np.zeros(15), np.ones(5)]
    assert np.array_equal(capital(one, .05)[:15], capital(other, .05)[:15])

@pytest.mark.parametrize('n', [100, 300, 600])
def test_an_unsafe_setting_is_rarely_taken(n):
    "2,000 simulated calibrations of a walk whose second setting loses alpha and a little more."
    r, alpha, taken = np.random.default_rng(n), .03, 0
    for _ in range(2000):
        safe, unsafe = (r.choice([1, 0, -1], n, p=[.05 + shift, .9, .05 - shift]) for shift in (-.03, .016))
        taken += certain_setting([safe, unsafe], alpha) == 1
    assert taken/2000 <= .1

def test_the_walk_stops_at_the_first_failure():
    good, bad = np.zeros(1000), np.ones(1000)
    assert certain_setting([good, good, bad, good], .02) == 1
    assert certain_setting([bad, good], .02) is None and certain_setting([good]*3, .02) == 2

def test_where_the_test_changes_its_kind():
    "Nothing was lost on a few problems: that is no proof, whatever the normal bound says."
    few = np.zeros(20)
    assert normal_bound(few) == 0 and not is_safe(few, .02) and is_safe(np.zeros(FEW), .02)
    assert 9 < capital(np.zeros(60), .05)[-1] < 10 # 60 problems without a loss do not promise 5 points
    loss = np.r_[np.ones(4), -np.ones(2), np.zeros(FEW - 6)]
    assert is_safe(loss, .02) == (normal_bound(loss) <= .02)
    assert normal_bound(loss, .5) == pytest.approx(loss.mean())

def test_a_gain_never_hurts_and_a_loss_never_helps():
    r = np.random.default_rng(0)
    for n in (50, 400):
        loss = r.choice([1, 0, -1], n, p=[.03, .92, .05]).astype(float)
        better, worse = loss - (loss == 1), np.where(loss == 0, 1, loss)
        assert is_safe(better, .05) >= is_safe(loss, .05) >= is_safe(worse, .05)

def test_problems_needed_is_the_number_that_finds_a_setting_four_times_in_five():
    n, alpha, differ = problems_needed(.04, differ=.06), .04, .06
    r = np.random.default_rng(1)
    found = [normal_bound(r.choice([1, 0, -1], n, p=[differ/2, 1 - differ, differ/2])) <= alpha for _ in range(3000)]
    assert np.mean(found) == pytest.approx(.8, abs=.03)
    z = norm.ppf(.9) + norm.ppf(.8)
    assert n == pytest.approx(differ*(z/alpha)**2, abs=1)
    assert problems_needed(.02) == 564
    with pytest.raises(ValueError, match='cannot keep a promise of 0.02'): problems_needed(.02, loss=.03)

def test_losses_are_means_over_the_draws():
    assert losses([1, 2/3, 0], [[1, 0, 1], [0, 1, 0]]) == pytest.approx(np.array([[0, 2/3, -1], [1, -1/3, 0]]))

def test_the_number_that_would_do_is_more_than_the_number_that_did_not():
    "And enough for a loss of nothing, by whichever test decides there."
    for n in (20, 60, 299, 300, 1000):
        for differ in (0, 1, n//10):
            loss = np.zeros(n); loss[:differ] = np.tile([1, -1], n)[:differ]
            for alpha in (.01, .02, .05):
                needed = problems_for(loss, alpha)
                if loss.mean() >= alpha: assert needed is None
                else: assert needed > n and is_safe(np.zeros(needed), alpha)

def test_nothing_lost_proves_no_more_than_chance_allows():
    "A router that loses a share alpha of all problems loses none of n with the probability (1 - alpha)^n."
    for n, alpha in product((20, 299, 300, 400, 600, 3000), (1e-4, .001, .002, .005, .01, .02, .05)):
        if is_safe(np.zeros(n), alpha): assert (1 - alpha)**n <= .1, (n, alpha)

@pytest.mark.parametrize('n, alpha', [(300, .005), (300, .01), (390, .01), (600, .002), (600, .005)])
def test_few_allowed_losses_are_tested_exactly(n, alpha):
    "Of routers that lose exactly alpha, at most one in ten is called safe; the normal bound called 20 to 30 of 100 so."
    r = np.random.default_rng(2)
    safe = [is_safe((r.random(n) < alpha).astype(float), alpha) for _ in range(2000)]
    assert np.mean(safe) <= .1
