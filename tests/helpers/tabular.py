"""A routing problem whose optimal router is known: a Markov chain of confidence levels, laid out path by path in an
outcome table, and the linear program of its best (randomised) router."""
import itertools
from dataclasses import fields, replace

import numpy as np
from scipy.optimize import linprog

from stepwise_routing.method.outcomes import OutcomeTable

LEVELS, STEPS, COPIES = 7, 3, 10 # confidence levels, steps of a chain at most, rows a path
FEATURES = 'score_logit', 'index', 'final'
SMALL, LARGE = 1e6, 5e6 # parameters
# of the copies of a path: problems that the large model does not solve either, so nobody can miss them
UNSOLVED = 1
# by kept steps tau and the level of step tau: copies that the large model misses from there
MISSES = {1: (2, 1, 1, 0, 0, 0, 0), 2: (3, 2, 1, 1, 0, 0, 0)}
# by the level of the last step: copies that the small model misses
NEVER = 9, 8, 6, 4, 2, 1, 0

def next_levels(l): return max(l - 1, 0), min(l + 1, LEVELS - 1)   # equally likely
# full confidence at the second step ends the chain
def is_final(t, l): return t == STEPS - 1 or t == 1 and l == LEVELS - 1
def small_tokens(t, l): return 12 - l + 2*t
def large_tokens(tau): return 11*(STEPS - tau) + 3

STATES = list(itertools.product(range(STEPS), range(LEVELS)))

# ---- the chain, laid out in rows
def paths():
    """Every path of levels, as often as the chain takes it (every step has two equally likely successors), so
    that frequencies are probabilities."""
    for first in range(LEVELS):
        for turns in itertools.product((0, 1), repeat=STEPS - 1):
            path = [first]
            while not is_final(len(path) - 1, path[-1]): path.append(next_levels(path[-1])[turns[len(path) - 1]])
            yield path

def chain_table(split='train'):
    "The chain as an `OutcomeTable`: every path COPIES times."
    every = [(p, copy) for p in paths() for copy in range(COPIES)]
    n, nan = len(every), np.nan
    obs, correct, T = np.full((n, STEPS, 3), nan), np.full((n, STEPS + 1), nan), np.array([len(p) for p, _ in every])
    large, small = np.zeros((n, STEPS + 1), int), np.zeros((n, STEPS), int)
    for i, (path, copy) in enumerate(every):
        for t, l in enumerate(path):
            obs[i, t], small[i, t] = (14 + 2*l, t, t == T[i] - 1), small_tokens(t, l)
            correct[i, t], large[i, t] = t == 0 or copy >= MISSES[t][l], large_tokens(t)
        correct[i, T[i]] = copy >= NEVER[path[-1]]
        if copy >= COPIES - UNSOLVED: correct[i, :T[i] + 1] = 0
    z = np.zeros_like
    return OutcomeTable('chain', split, ('chain small', 'chain large'), (SMALL, LARGE), FEATURES,
                        np.array([f'chain-{i:04d}' for i in range(n)]),
                        np.zeros(n, int), T, correct, large, z(large), (large > 0)*1, small, z(small),
                        np.zeros((n, 0)), obs, 0.*small, 0.*large)

def take(table, rows, split=None):
    "Some rows of a table, or the same one several times, renumbered."
    arrays = {f.name: getattr(table, f.name) for f in fields(table)}
    per_row = {k: v[rows] for k, v in arrays.items() if isinstance(v, np.ndarray)}
    per_row['problem_id'] = np.array([f'row-{i:05d}' for i in range(len(per_row['n_steps']))])
    return replace(table, split=split or table.split, **per_row)

# ---- the chain, as a linear program
def escalation_miss(t, l, on_escalate):
    "Chance of a miss for who escalates after step t at level l."
    share = lambda tau, l: MISSES[tau][l]/COPIES if tau else 0.
    if is_final(t, l) or on_escalate == 'regenerate': return share(t, l)
    return np.mean([share(t + 1, l2) for l2 in next_levels(l)])

def chain_model(on_escalate='append'):
    """Per state of STATES: running cost of the step (FLOPs), cost and miss of escalating, miss of ending there
    (nan where the chain goes on), successors."""
    at = {s: i for i, s in enumerate(STATES)}
    run = np.array([2*SMALL*small_tokens(*s) for s in STATES])
    kept = [t + (on_escalate == 'append' and not is_final(t, l)) for t, l in STATES]
    price = np.array([2*LARGE*large_tokens(tau) for tau in kept], float)
    miss = np.array([escalation_miss(*s, on_escalate) for s in STATES])
    end = np.array([NEVER[l]/COPIES if is_final(t, l) else np.nan for t, l in STATES])
    P, start = np.zeros((len(STATES),)*2), np.array([(t == 0)/LEVELS for t, _ in STATES])
    for (t, l), i in at.items():
        if not is_final(t, l):
            for l2 in next_levels(l): P[i, at[t + 1, l2]] += .5
    return run, price, miss, end, P, start

def optimum(alpha, on_escalate='append'):
    """The cheapest router at a miss rate of at most alpha: (cost in FLOPs a problem, miss rate, chance of
    escalating per state)."""
    run, price, miss, end, P, start = chain_model(on_escalate)
    n, stop = len(STATES), np.nan_to_num(end)
    flow = np.hstack([np.eye(n) - P.T, np.eye(n)])    # occupancy of (state, stay), then of (state, escalate)
    lp = linprog(np.r_[run, run + price], A_ub=[np.r_[stop, miss]], b_ub=[alpha], A_eq=flow, b_eq=start, method='highs')
    if lp.status: raise ValueError(f'no router has a miss rate of {alpha}')
    stay, leave = lp.x[:n], lp.x[n:]
    occupancy = stay + leave
    chances = np.divide(leave, occupancy, out=np.zeros(n), where=occupancy > 1e-12)
    return lp.fun, float(np.r_[stop, miss] @ lp.x), chances

def evaluate(hazard, on_escalate='append'):
    "Cost and miss rate of routers that escalate with these chances: hazard [..., state]."
    run, price, miss, end, P, start = chain_model(on_escalate)
    stop, h = np.nan_to_num(end), np.asarray(hazard, float)
    value_cost, value_miss = np.zeros(h.shape), np.zeros(h.shape)
    for i in reversed(range(len(STATES))): # successors come later
        value_cost[..., i] = run[i] + h[..., i]*price[i] + (1 - h[..., i])*(value_cost @ P[i])
        value_miss[..., i] = h[..., i]*miss[i] + (1 - h[..., i])*(value_miss @ P[i] + stop[i])
    return value_cost @ start, value_miss @ start

def replay_hazard(table, hazard, on_escalate='append', cost='paper_flops'):
    """Cost and miss rate of escalating with chance hazard [problem, step], row by row over the table: no chain,
    no matrices."""
    total_cost, total_miss = np.zeros(len(table)), np.zeros(len(table))
    left = np.ones(len(table))
    for t in range(table.obs.shape[1] + 1):
        never = t >= table.n_steps
        leave = np.where(never, left, left*np.nan_to_num(hazard[:, min(t, table.obs.shape[1] - 1)]))
        o = table.outcome(np.minimum(t, table.n_steps), on_escalate)
        total_cost += leave*o[cost]
        total_miss += leave*((o['correct'] == 0) & (table.correct[:, 0] == 1))
        left = left - leave
    return total_cost.mean(), total_miss.mean()

def state_hazard(table, chances):
    "Chances per state as hazard [problem, step] of a chain table."
    t, l = table.obs[..., 1], (table.obs[..., 0] - 14)/2
    known = ~np.isnan(t)
    out = np.full(t.shape, np.nan)
    out[known] = np.asarray(chances)[(t[known]*LEVELS + l[known]).astype(int)]
    return out

# ---- a trained policy on the chain
def observations(): return np.array([(14 + 2*l, t, is_final(t, l)) for t, l in STATES], float)

def policy_hazards(policy, kappa):
    "Chances of escalating per state: as deployed (Gamma), and of the thresholded policy S."
    import torch
    from policies import hard_set
    with torch.no_grad(): log_pi = policy(policy.encode(observations(), FEATURES))
    return (log_pi[:, 1].exp().numpy() >= kappa) + 0., hard_set(log_pi.exp(), kappa)[:, 1].numpy()

def distance(policy, kappa, alpha, on_escalate='append'):
    """Per reading of the policy (Gamma, S): (cost above the optimum at alpha, miss rate, cost above the optimum
    at this very miss rate), costs as shares."""
    best, least = optimum(alpha, on_escalate)[0], evaluate(np.ones(len(STATES)), on_escalate)[1]
    out = []
    for hazard in policy_hazards(policy, kappa):
        cost, miss = evaluate(hazard, on_escalate)
        own = optimum(max(miss, least) + 1e-9, on_escalate)[0]
        out.append((cost/best - 1, miss, cost/own - 1))
    return np.array(out)

def train(seed, alpha=.11, on_escalate='append', **options):
    from stepwise_routing.base.settings import Policy
    from stepwise_routing.method import training
    from stepwise_routing.method.cpo import TableEnv
    env = TableEnv(chain_table(), FEATURES, on_escalate)
    trained = training.train(env, Policy(alpha=alpha, **options), seed, progress=False)
    return distance(trained.policy, trained.kappa, alpha, on_escalate)

RUNS = {'exact, all rows': dict(estimator='exact', batch=None, steps=150, hidden=(16, 16))}
