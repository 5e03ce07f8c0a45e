"Small faults that no other test notices: in bounds and resampled choices."
import numpy as np
import pytest

from stepwise_routing.method.certain import normal_bound, quantile
from stepwise_routing.method.outcomes import take_rows, toy_table
from stepwise_routing.method.uncertainty import (METRICS, Candidates, Point, calibration_cost, draw_samples,
                                                 mixed_point)

def test_the_bound_divides_by_one_problem_less():
    loss = np.array([0., 1, 0, 0])
    assert normal_bound(loss) == pytest.approx(.25 + quantile(.9)*np.sqrt(.75/3/4))

def test_the_large_models_share_counts_its_redraws():
    table = toy_table(50)
    draws = np.c_[table.correct[:, 0], table.large_redraws_right]
    assert (table.large_share == draws.mean(1)).all() and (table.large_share != table.correct[:, 0]).any()

def test_resamples_of_test_problems_are_in_the_order_of_their_ids():
    table = toy_table(30)
    turned = np.random.default_rng(0).permutation(30)
    plain, other = (draw_samples(table, t, 5, 0).test for t in (table, take_rows(table, turned)))
    assert (other == plain[:, turned]).all() and (other != plain).any()

def test_a_cost_on_calibration_is_a_share_of_the_large_models():
    ones = np.ones((1, 2, 3))
    c = Candidates([1., 2.], ones, ones*[[2.], [4.]], np.ones(3), np.ones(3), np.full(3, 8.))
    assert calibration_cost(c, np.array([[0], [1], [2]]), np.ones((3, 3)), np.ones((3, 1))).tolist() == [.25, .5, 1]

def test_a_method_that_is_one_of_others_is_another_in_each_resample():
    columns = [{m: np.arange(3.) + 10*i for m in METRICS} for i in range(2)]
    points = [Point(name, 'append', 'accuracy', 1., own) for name, own in zip('ab', columns)]
    assert mixed_point(points, np.array([0, 1, 0]), 'x').columns['correct'].tolist() == [0, 11, 2]
