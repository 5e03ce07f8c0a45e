"""A routing problem whose optimal router is known: a Markov chain of confidence levels, laid out path by path in a
table of outcomes, and the linear program of its best (randomised) router, for two models or three."""

import itertools

import numpy as np
from scipy.optimize import linprog

from stepwise_routing.method.rollouts import Outcomes

LEVELS, STEPS, COPIES = 7, 3, 10  # confidence levels, steps of a chain at most, rows a path
COLUMNS = 'mean_logit', 'step', 'final'
PARAMS = 1e6, 2e6, 5e6  # of the small, a middle and the large model
UNSOLVED = 1  # of the copies of a path: problems that no model solves, so nobody can lose them
# by kept steps and the level of the step behind them: copies that a model loses from there
LOST = [
    {1: (5, 4, 2, 1, 1, 0, 0), 2: (6, 5, 3, 2, 1, 1, 0)},  # the middle model
    {1: (2, 1, 1, 0, 0, 0, 0), 2: (3, 2, 1, 1, 0, 0, 0)},  # the large one
]
NEVER = 9, 8, 6, 4, 2, 1, 0  # by the level of the last step: copies that the small model loses


def next_levels(level):  # equally likely
    return max(level - 1, 0), min(level + 1, LEVELS - 1)


def is_final(t, level):  # full confidence at the second step ends the chain
    return t == STEPS - 1 or (t == 1 and level == LEVELS - 1)


def small_tokens(t, level):
    return 12 - level + 2 * t


def large_tokens(kept):
    return 11 * (STEPS - kept) + 3


STATES = list(itertools.product(range(STEPS), range(LEVELS)))


# ---- the chain, laid out in rows
def paths():
    "Every path of levels, as often as the chain takes it, so that frequencies are probabilities."
    for first in range(LEVELS):
        for turns in itertools.product((0, 1), repeat=STEPS - 1):
            path = [first]
            while not is_final(len(path) - 1, path[-1]):
                path.append(next_levels(path[-1])[turns[len(path) - 1]])
            yield path


def chain_table(models: int = 2) -> Outcomes:
    "Every path COPIES times. With two models the middle one is left out."
    every = [(path, copy) for path in paths() for copy in range(COPIES)]
    n, larger, lost = len(every), models - 1, LOST[-(models - 1) :]
    steps = np.array([len(path) for path, _ in every])
    seen = np.full((n, STEPS, 3), np.nan)
    small, large = np.zeros((n, STEPS, 4), int), np.zeros((n, STEPS + 1, larger, 4), int)
    right = np.zeros((n, STEPS + 1, larger), np.uint8)
    for i, (path, copy) in enumerate(every):
        T = steps[i]
        for t, level in enumerate(path):
            seen[i, t] = 14 + 2 * level, t, t == T - 1
            small[i, t, 0], large[i, t, :, 0] = small_tokens(t, level), large_tokens(t)
            for k in range(larger):
                right[i, t, k] = t == 0 or copy >= lost[k][t][path[t]]
        right[i, T:] = copy >= NEVER[path[-1]]
        if copy >= COPIES - UNSOLVED:
            right[i] = 0
    params = np.array(PARAMS)[[0, *range(3 - larger, 3)]]
    return Outcomes(
        benchmark=np.array('chain'),
        split=np.array('train'),
        models=np.array([f'chain-{i}' for i in range(models)]),
        params=params,
        dollars=np.zeros((models, 3)),
        problem=np.array([f'chain-{i}' for i in range(n)]),
        features=dict(zip(COLUMNS, np.moveaxis(seen, 2, 0))),
        small=small,
        large=large,
        right=right,
        steps=steps,
        cut=np.zeros((n, models), bool),
    )


# ---- the chain, as a linear program
def chain_model(models: int = 2) -> tuple:
    """Per state: the step's cost, cost and loss of each hand-over, loss of ending here, successors, first states.

    Means over the rows of the table that come through the state."""
    o, at = chain_table(models), {state: i for i, state in enumerate(STATES)}
    n, larger = len(STATES), models - 1
    seen, never, start = np.zeros(n), np.zeros(n), np.zeros(n)
    price, loss, follows = np.zeros((n, larger)), np.zeros((n, larger)), np.zeros((n, n))
    for path, right, T in zip(o.features['mean_logit'], o.right.astype(float), o.steps):
        states = [at[t, int((x - 14) / 2)] for t, x in enumerate(path[:T])]
        start[states[0]] += 1 / len(o)
        for t, state in enumerate(states):
            kept = t + (t < T - 1)
            seen[state] += 1
            price[state] += 2 * o.params[1:] * large_tokens(kept)
            loss[state] += right[0, -1] - right[kept]
            if t < T - 1:
                follows[state, states[t + 1]] += 1
            else:
                never[state] += right[0, -1] - right[T, -1]
    seen = np.maximum(seen, 1)[:, None]
    run = np.array([2 * PARAMS[0] * small_tokens(*state) for state in STATES])
    return run, price / seen, loss / seen, never / seen[:, 0], follows / seen, start


def optimum(alpha: float, models: int = 2) -> tuple:
    "The cheapest router that loses at most alpha: (FLOPs a problem, chances of each model per state)."
    run, price, loss, never, follows, start = chain_model(models)
    n, larger = price.shape
    # occupancy of (state, stay), then of (state, model k), k by k
    costs = np.r_[run, (run[:, None] + price).T.ravel()]
    losses = np.r_[never, loss.T.ravel()]
    flow = np.hstack([np.eye(n) - follows.T, *[np.eye(n)] * larger])
    found = linprog(costs, A_ub=[losses], b_ub=[alpha], A_eq=flow, b_eq=start, method='highs')
    assert found.status == 0, f'no router loses as little as {alpha}'
    occupancy = found.x.reshape(larger + 1, n).T
    total = occupancy.sum(1, keepdims=True)
    return found.fun, occupancy / np.where(total > 1e-12, total, np.inf)


def evaluate(chances, models: int = 2) -> tuple:  # [state, model]
    "Cost and loss of a router that takes each model with these chances."
    run, price, loss, never, follows, start = chain_model(models)
    cost_at, loss_at = np.zeros(len(run)), np.zeros(len(run))
    for i in reversed(range(len(run))):  # successors come later
        stay, leave = chances[i, 0], chances[i, 1:]
        cost_at[i] = run[i] + leave @ price[i] + stay * (follows[i] @ cost_at)
        loss_at[i] = leave @ loss[i] + stay * (follows[i] @ loss_at + never[i])
    return cost_at @ start, loss_at @ start
