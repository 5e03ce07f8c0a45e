"Equation 4 and the loop: against definitions, brute force over exits, autograd and a linear program."

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tabular
import torch
from hypothesis import given, strategies as st
from scipy.optimize import nnls
from toy import toy

from stepwise_routing.method import training
from stepwise_routing.method.policy import DTYPE, Network, fresh_router, log_odds, soft_choice
from stepwise_routing.method.rollouts import exits, large_alone, replay, take
from stepwise_routing.method.training import (
    Critics,
    best_step,
    deploy,
    draw_rollouts,
    exact,
    fisher_solver,
    policy_step,
    sampled,
    train,
    training_problems,
    vtrace,
)
from stepwise_routing.settings import Training, as_printed

COLUMNS = ('min_odds', 'step', 'final')
QUICK = dict(steps=8, hidden=(8,), batch=60)
both = pytest.mark.parametrize('models', [2, 3])


def f64(x):
    return torch.as_tensor(np.array(x, float))


def router_of(o, seed=0, spread=0.7, hidden=(6,), columns=COLUMNS):
    "An untrained policy that tells states apart."
    router = fresh_router(o.features, columns, len(o.models), hidden, seed)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(router.theta.shape, generator=generator, dtype=DTYPE)
    return replace(router, theta=router.theta + spread * noise)


def problems_of(o, router, unit='flops', reading='continue'):
    return training_problems(o, router.states(o.features), unit, reading)


# ---- V-trace
@st.composite
def trajectories(draw):
    n, T = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = r.integers(1, T + 1, n)
    rho = np.exp(r.normal(0, 1.5, (n, T))) * (r.random((n, T)) < 0.85)
    return r.normal(0, 2, (2, n, T)), r.normal(0, 2, (2, n, T)), rho, np.arange(T) < length[:, None]


def double_sum(values, rewards, rho):
    "Espeholt et al. 2018, equation 1, term by term, for one trajectory; the state behind its end is worth nothing."
    T, after, clipped = len(values), np.r_[values, 0.0], np.minimum(rho, 1)
    gaps = [clipped[t] * (rewards[t] + after[t + 1] - values[t]) for t in range(T)]
    terms = [[np.prod(clipped[s:t]) * gaps[t] for t in range(s, T)] for s in range(T)]
    return np.array([values[s] + sum(terms[s]) for s in range(T)])


@given(trajectories())
def test_vtrace_is_the_double_sum(trajectory):
    values, rewards, rho, inside = trajectory
    clean = [f64(np.where(inside, x, 0)) for x in (values, rewards)]
    vs, advantages = vtrace(*clean, f64(rho), torch.as_tensor(inside))  # any ratios behind the end
    assert not vs[:, ~torch.as_tensor(inside)].any()
    assert not advantages[:, ~torch.as_tensor(inside)].any()
    for critic in (0, 1):
        for i, T in enumerate(inside.sum(1)):
            v, r = values[critic, i, :T], rewards[critic, i, :T]
            want = double_sum(v, r, rho[i, :T])
            assert np.allclose(vs[critic, i, :T], want, rtol=1e-9, atol=1e-9)
            assert np.allclose(advantages[critic, i, :T], r + np.r_[want[1:], 0.0] - v, atol=1e-9)


@pytest.mark.parametrize('target', [(0.3, 0.6), (0.8, 0.1)])
def test_vtrace_finds_the_value_of_the_target_policy(target):
    """Two steps, two actions, the second state after the first action. Actions are drawn by mu, and the critic takes
    the expected target, by all four paths, again and again. It ends at the value of the policy min(mu, target)."""
    mu = np.array([0.3, 0.6])
    chance = np.array([1 - mu, mu]), np.array([1 - np.array(target), target])  # [action, step]
    reward = np.random.default_rng(0).normal(size=(2, 2))  # of the first action, then of the second
    second = np.random.default_rng(1).normal(size=(2, 2))  # [first action, action]
    clipped = np.minimum(*chance)
    clipped = clipped / clipped.sum(0)  # the policy that V-trace values, equation 5 of its paper
    later = (second * clipped[:, 1]).sum(1)
    want = clipped[:, 0] @ (reward[0] + later)

    first, after = 5.0, np.array([-2.0, 3.0])  # the critic
    ones = torch.ones(1, 2, dtype=bool)
    for _ in range(200):
        new_first, new_after = 0.0, np.zeros(2)
        for a, b in itertools.product((0, 1), repeat=2):
            rho = [chance[1][x, t] / chance[0][x, t] for t, x in enumerate((a, b))]
            path = f64([[[first, after[a]]]]), f64([[[reward[0, a], second[a, b]]]]), f64([rho])
            vs = vtrace(*path, ones)[0][0, 0]
            new_first += chance[0][a, 0] * chance[0][b, 1] * float(vs[0])
            new_after[a] += chance[0][b, 1] * float(vs[1])
        first, after = new_first, new_after
    assert np.allclose(after, later) and np.isclose(first, want)
    if target == (0.3, 0.6):
        assert np.isclose(want, chance[0][:, 0] @ (reward[0] + second @ chance[0][:, 1]))


# ---- the best step of equation 4
def step_problem(r, case):
    "A random problem of one of CPO's five cases: (g, b, c, H, delta)."
    d = r.integers(2, 9)
    A = r.normal(size=(d, d))
    H = A @ A.T / d + np.diag(10 ** r.uniform(-2, 1, d))
    g, b = (r.normal(size=d) * 10 ** r.uniform(-2, 2) for _ in range(2))
    delta = 10 ** r.uniform(-4, 0)
    reach = np.sqrt(2 * delta * (b @ np.linalg.solve(H, b)))  # the most that the loss can change
    near, far = 10 ** r.uniform(-3, -1e-3), 1 + 10 ** r.uniform(-3, 1)
    c = dict(nothing_helps=far, repair=near, binds=-near, all_allowed=-far, flat=-(10**13.0))
    return g, b, c[case] * reach, H, delta


CASES = 'nothing_helps', 'repair', 'binds', 'all_allowed', 'flat'


def best(g, b, c, H, delta):
    factor = torch.linalg.cholesky(f64(H))

    def solve(v):
        return torch.cholesky_solve(v[:, None], factor)[:, 0]

    step, repairs = best_step(f64(g), f64(b), float(c), solve, delta)
    return step.numpy(), repairs


@pytest.mark.parametrize('case', CASES)
def test_best_steps_satisfy_the_kkt_conditions(case):
    "The problem is convex, so these conditions prove the optimum. Where nothing helps, the step repairs all it can."
    r = np.random.default_rng(CASES.index(case))
    for _ in range(150):
        g, b, c, H, delta = step_problem(r, case)
        y, repairs = best(g, b, c, H, delta)
        assert repairs == (c > 0)
        size = y @ H @ y / 2
        assert size <= delta * (1 + 1e-8), 'inside the trust region'
        reach = np.sqrt(2 * delta * (b @ np.linalg.solve(H, b)))
        if case == 'nothing_helps':
            assert b @ y <= -reach * (1 - 1e-7)
            continue
        assert c + b @ y <= 1e-7 * (reach + abs(c)), 'keeps the constraint'
        active = []  # gradients of the conditions that bind; the step is stationary with prices of 0 or more
        if size >= delta * (1 - 1e-6):
            active.append(H @ y)
        if abs(c + b @ y) <= 1e-6 * (reach + abs(c)) and case != 'flat':
            active.append(b)
        scales = [np.abs(gradient).max() for gradient in active]
        columns = np.stack([gradient / scale for gradient, scale in zip(active, scales)], 1)
        assert nnls(columns, -g)[1] < 1e-5 * np.linalg.norm(g), 'stationary'


IN_THE_DISC = [
    ([1, 0], [0, 1], -2.0, [-1, 0]),  # the whole disc is allowed
    ([1, 0], [0, 1], 2.0, [0, -1]),  # none of it
    ([1, 0], [0, 1], 0.6, [-0.8, -0.6]),  # repair
    ([1, 0], [-1, 0], -0.5, [-0.5, None]),  # the constraint stops the best step
    ([1, 0], [0, 1], 0.0, [-1, 0]),  # on the boundary, gradients orthogonal
    ([1, 0], [-1, 1], 0.0, [-(0.5**0.5), -(0.5**0.5)]),  # on the boundary, gradients opposed
    ([1, 0], [1, 0], 0.5, [-1, 0]),  # parallel: both ways down
    ([1, 0], [0, 0], -0.5, [-1, 0]),  # a constraint without a gradient
    ([1, 0], [0, 0], 0.5, [0, 0]),  # the same, and it is broken: nothing to do
    ([0, 0], [0, 1], 0.5, [0, -0.5]),  # nothing costs less: repair, and no more
]


@pytest.mark.parametrize('g, b, c, want', IN_THE_DISC)
def test_best_steps_in_the_unit_disc(g, b, c, want):
    y, _ = best(np.array(g, float), np.array(b, float), c, np.eye(2), 0.5)
    assert all(w is None or abs(x - w) < 1e-6 for x, w in zip(y, want)), y


# ---- curvature
@both
@pytest.mark.parametrize('hidden', [(), (4,)])
@pytest.mark.parametrize('damping', [1e-3, 0.1])
def test_the_fisher_system_is_that_of_the_divergence(models, hidden, damping):
    "H is the Hessian of the divergence of S, by autograd; the solver gives (H + damping I)^-1 v."
    r = np.random.default_rng(0)
    net, x, weight = Network(2, models, hidden), f64(r.normal(size=(5, 2))), f64(r.random(5) / 2.5)
    theta = net.fresh(1)

    def log_S(theta):
        return soft_choice(log_odds(net(theta, x)), 0.25, 0.1)

    old = log_S(theta).detach()

    def divergence(theta):
        return (weight * (old.exp() * (old - log_S(theta))).sum(-1)).sum()

    H = torch.autograd.functional.hessian(divergence, theta)
    assert H.abs().max() > 1e-2
    solve = fisher_solver(net, theta, x, weight, 0.25, 0.1, damping)
    for scale in (1e-3, 1e3):
        v = f64(r.normal(size=len(theta)) * scale)
        want = torch.linalg.solve(H + damping * torch.eye(len(H)), v)
        assert (solve(v) - want).norm() < 1e-7 * want.norm()


# ---- the exact estimator
def brute(o, S, unit, reading):
    "Cost, loss and visits of S [problem, step, model], exit by exit; differentiable."
    (right, cost), large, K = exits(o, unit, reading), large_alone(o, unit), len(o.models)
    total_cost, total_loss, visits = 0.0, 0.0, []
    for i, T in enumerate(o.steps):
        left = 1.0
        for t in range(T):
            visits.append(float(torch.as_tensor(left).detach()))
            for place, k in enumerate(range(K - 1, 0, -1)):
                exit = t * (K - 1) + place
                chance = left * S[i, t, k]
                total_cost = total_cost + chance * cost[i, exit] / large.cost.mean()
                total_loss = total_loss + chance * (large.right[i] - right[i, exit])
            left = left * S[i, t, 0]
        total_cost = total_cost + left * cost[i, -1] / large.cost.mean()
        total_loss = total_loss + left * (large.right[i] - right[i, -1])
    return total_cost / len(o), total_loss / len(o), np.array(visits) / sum(visits)


@both
@pytest.mark.parametrize('reading', ['continue', 'rewrite'])
def test_the_exact_estimator_sums_over_all_exits(models, reading):
    "Values, visits and gradients, for a choice S near that of the policy, too."
    o = toy(25, models, 'train')
    router = router_of(o)
    problems = problems_of(o, router, 'full_flops', reading)
    net, evaluate = router.net, exact(problems)
    for moved in (0.0, 0.3):
        theta = (router.theta + moved).requires_grad_()
        now = evaluate(soft_choice(log_odds(net(theta, problems.x[problems.inside])), 0.25, 0.1))
        S = soft_choice(log_odds(net(theta, problems.x.flatten(0, 1))), 0.25, 0.1).exp()
        cost, loss, visits = brute(o, S.view(*problems.inside.shape, -1), 'full_flops', reading)
        assert np.isclose(now.cost.item(), cost.item(), rtol=1e-12)
        assert np.isclose(now.loss.item(), loss.item(), rtol=1e-12) and now.lost == now.loss.item()
        np.testing.assert_allclose(now.visits.numpy(), visits, rtol=1e-10)
        for mine, slow in ((now.cost, cost), (now.loss, loss)):
            gradients = [torch.autograd.grad(v, theta, retain_graph=True)[0] for v in (mine, slow)]
            assert torch.allclose(*gradients, rtol=1e-9, atol=1e-14) and gradients[0].norm() > 1e-4


# ---- sampled rollouts, all of them
class Every:
    "Instead of chance: all combinations of `cells` equally likely numbers, step by step."

    def __init__(self, cells):
        self.cells = cells

    def random(self, shape):
        n, steps = shape
        numbers = (np.arange(self.cells) + 0.5) / self.cells
        every = np.array([*itertools.product(numbers, repeat=steps)])
        return np.tile(every, (n // len(every), 1))


def constant(net, pi):
    "A theta whose pi is the same in every state, and whose gradient is not nought."
    theta = torch.zeros_like(net.fresh(0))
    theta[-net.n_out :] = torch.tensor(pi, dtype=DTYPE).log()
    return theta


CHANCES = {2: (4, (0.75, 0.25)), 3: (4, (0.5, 0.25, 0.25))}  # models: (cells, pi)


def all_rollouts(o, cells, pi):
    "Every course of every problem, as often as a constant pi takes it: no chance is left."
    router = fresh_router(o.features, COLUMNS, len(o.models), (), 0)
    problems, theta = problems_of(o, router), constant(router.net, pi)
    steps = problems.inside.shape[1]
    copies = problems.take(np.repeat(np.arange(len(o)), cells**steps))
    drawn = draw_rollouts(router.net, theta, copies, Every(cells))
    return router.net, theta, problems, copies, drawn


def short(models, steps, n=3):
    "Problems of so many steps at most."
    o = toy(300, models, 'train', seed=2)
    rows = np.flatnonzero(o.steps <= steps)[:n]
    o = take(o, rows)
    S = o.steps.max()
    features = {name: values[:, :S] for name, values in o.features.items()}
    cut = dict(small=o.small[:, :S], large=o.large[:, : S + 1], right=o.right[:, : S + 1])
    return replace(o, features=features, step_right=None, **cut)


def once(models, n=20):
    "Problems that are decided once: after the first step, which is made the last."
    o = toy(n, models, 'train')
    last = o.right[np.arange(n), o.steps]
    features = {name: values[:, :1] for name, values in o.features.items()}
    right = np.stack([o.right[:, 0], last], 1)
    large = np.stack([o.large[:, 0], 0 * o.large[:, 0]], 1)
    one = dict(features=features, small=o.small[:, :1], large=large, right=right)
    return replace(o, steps=np.ones(n, int), step_right=None, **one)


UNCLIPPED = Training(rho_bar=1e12)


def estimates(o, cells, pi, kappa, temperature):
    "The sampled estimate over all courses, and the exact one, with their gradients."
    net, theta, problems, _, r = all_rollouts(o, cells, pi)
    critics = Critics(len(COLUMNS), 1e-3, 0)
    by_sample = r.x, sampled(net, theta, r, critics, kappa, temperature, UNCLIPPED)
    found = []
    for x, evaluate in (by_sample, (problems.x[problems.inside], exact(problems))):
        leaf = theta.clone().requires_grad_()
        now = evaluate(soft_choice(log_odds(net(leaf, x)), kappa, temperature))
        gradients = [torch.autograd.grad(v, leaf, retain_graph=True)[0] for v in now[:2]]
        found.append((now.lost, *gradients))
    return found


@both
@pytest.mark.parametrize('case', ['one decision, off policy', 'on policy'])
def test_the_sampled_gradient_averages_to_the_exact_one(models, case):
    "With one decision S need not be pi; over several steps it is, where both are even. Whatever the critics say."
    if case == 'on policy':
        mine, want = estimates(short(models, 3), models, (1 / models,) * models, 0.2, 0.1)
    else:
        mine, want = estimates(once(models), *CHANCES[models], 0.3, 0.1)
    assert mine[0] == pytest.approx(want[0], rel=1e-9)
    for got, gradient in zip(mine[1:], want[1:]):
        assert torch.allclose(got, gradient, rtol=1e-9, atol=1e-12) and gradient.norm() > 1e-3


@both
def test_the_level_of_the_constraint_averages_to_the_expectation(models):
    "Off policy over several steps, if the ratios are not clipped."
    mine, want = estimates(short(models, 3), *CHANCES[models], 0.3, 0.1)
    assert mine[0] == pytest.approx(want[0], rel=1e-9)


# ---- the step of the policy
@both
@pytest.mark.parametrize('seed', range(3))
def test_a_policy_step_stays_in_the_trust_region_and_helps(models, seed):
    o = toy(60, models, 'train')
    router = router_of(o, seed)
    problems = problems_of(o, router)
    x, evaluate, net = problems.x[problems.inside], exact(problems), router.net

    def at(theta):
        log_S = soft_choice(log_odds(net(theta, x)), 0.25, 0.1).detach()
        return log_S, evaluate(log_S)

    log_S, before = at(router.theta)
    for alpha, repairs in ((before.lost - 0.02, True), (before.lost + 0.02, False)):
        s = Training(alpha=max(alpha, 1e-4))
        theta = policy_step(net, router.theta, x, evaluate, 0.25, 0.1, s, np.random.default_rng(0))
        new_S, after = at(theta)
        moved = float((before.visits * (new_S.exp() * (new_S - log_S)).sum(-1)).sum())
        assert 0 < moved <= s.delta
        if before.lost > s.alpha:
            assert after.lost <= before.lost + s.slack * s.alpha
        else:
            assert after.cost < before.cost and after.lost <= s.alpha * (1 + s.slack) + 1e-12
        if repairs and alpha > 1e-4:
            assert after.lost < before.lost


def test_a_step_that_keeps_no_condition_is_not_taken():
    o = toy(60, split='train')
    router = router_of(o)
    problems = problems_of(o, router)
    inner = exact(problems)
    calls = []

    def worse_wherever_it_goes(log_S):
        now = inner(log_S)
        calls.append(now)
        return now if len(calls) == 1 else now._replace(cost=now.cost + 1, loss=now.loss + 1)

    x = problems.x[problems.inside]
    rest = 0.25, 0.1, Training(), np.random.default_rng(0)
    theta = policy_step(router.net, router.theta, x, worse_wherever_it_goes, *rest)
    assert torch.equal(theta, router.theta) and len(calls) == 1 + len(training.FRACTIONS)


# ---- at work
@both
def test_deploying_is_replaying_at_kappa(models):
    o = toy(80, models, 'train')
    router = router_of(o)
    problems, large = problems_of(o, router, 'flops', 'rewrite'), large_alone(o, 'flops')
    for kappa in (0.0, 0.2, 0.4, 1.1):
        want = replay(o, router(o.features), [kappa], 'flops', 'rewrite')
        cost, lost = deploy(router.net, router.theta, kappa, problems)
        assert cost == pytest.approx(want.cost.mean() / large.cost.mean(), rel=1e-12)
        assert lost == pytest.approx((large.right - want.right[0]).mean(), abs=1e-12)


def test_a_verifier_excuses_what_was_lost_without_a_wrong_step():
    "A miss counts if the large model is right, the router is wrong, and a step that was kept is wrong."
    o = toy(200, split='train')
    router = router_of(o)
    (right, _), large = exits(o, 'flops', 'continue'), large_alone(o, 'flops')
    doubt = router(o.features)[..., 0]
    for kappa in (0.1, 0.3, 0.5):
        count = 0
        for i, T in enumerate(o.steps):
            stop = next((t for t in range(T) if doubt[i, t] >= kappa), None)
            kept = range(T if stop is None else stop)
            is_right = right[i, -1 if stop is None else stop]
            count += large.right[i] and not is_right and not all(o.step_right[i, t] for t in kept)
        got = deploy(router.net, router.theta, kappa, problems_of(o, router), verifier=True)[1]
        assert got == pytest.approx(count / 200) and (count or kappa < 0.2)


# ---- training
@both
def test_the_table_is_the_chain(models):
    "Any router that looks at states alone costs and loses the same in the rows as in the chain."
    o = tabular.chain_table(models)
    router = fresh_router(o.features, tabular.COLUMNS, models, (), 0)
    problems = problems_of(o, router)
    states = o.features['step'] * tabular.LEVELS + (o.features['mean_logit'] - 14) / 2
    states = states[o.inside].astype(int)
    rng = np.random.default_rng(0)
    scale = large_alone(o, 'flops').cost.mean()
    routers = rng.dirichlet(np.ones(models), (3, len(tabular.STATES)))
    for chances in (*routers, tabular.optimum(0.1, models)[1]):
        now = exact(problems)(torch.as_tensor(chances[states].clip(1e-300)).log())
        want = tabular.evaluate(chances, models)
        np.testing.assert_allclose((now.cost * scale, now.loss), want, rtol=1e-9)


@both
def test_training_finds_the_optimum_of_the_linear_program(models):
    "With exact gradients, as deployed and as S: near the least cost, and little more is lost than alpha."
    alpha, o = 0.11, tabular.chain_table(models)
    best, _ = tabular.optimum(alpha, models)
    s = Training(alpha=alpha, steps=150, hidden=(16, 16))
    policy, kappa, _ = train(o, tabular.COLUMNS, s)
    problems, scale = problems_of(o, policy), large_alone(o, 'flops').cost.mean()
    odds = log_odds(policy.net(policy.theta, problems.x[problems.inside]))
    soft = exact(problems)(soft_choice(odds, kappa, 0.03))
    hard = deploy(policy.net, policy.theta, kappa, problems)
    for cost, lost in (hard, (soft.cost.item(), soft.lost)):
        assert lost <= alpha + np.sqrt(alpha * (1 - alpha) / len(o))
        assert cost * scale <= 1.04 * best
        assert cost * scale <= 1.03 * tabular.optimum(lost + 1e-9, models)[0]


def bits(trained):
    policy, kappa, log = trained
    return policy.theta.numpy().tobytes(), kappa, str(log)


@pytest.mark.parametrize('estimator', ['exact', 'sampled'])
def test_same_seed_same_bits(estimator):
    o = toy(150, 3, 'train')
    s = Training(estimator=estimator, **QUICK)
    first = bits(train(o, COLUMNS, s, seed=3))
    torch.manual_seed(99)
    np.random.seed(99)
    assert bits(train(o, COLUMNS, s, seed=3)) == first, 'whatever the global generators'
    assert len({bits(train(o, COLUMNS, s, seed=seed))[0] for seed in range(4)}) == 4


@pytest.mark.parametrize('printed', [False, True])
def test_the_threshold_moves_by_equation_5(printed):
    "From each row of the log to the next: by a falling step, or by a constant one as printed."
    s = replace(as_printed(Training()), steps=30) if printed else Training(alpha=0.05, **QUICK)
    _, kappa, log = train(toy(200, split='train'), COLUMNS, s)
    kappas = [row[2] for row in log] + [kappa]
    assert kappas[0] == s.kappa and len({*kappas}) > 3
    for k, (_, lost, now) in enumerate(log, 1):
        eta = 0.1 if printed else 0.1 * k**-0.6
        assert kappas[k] == pytest.approx(np.clip(now - eta * (lost - s.alpha), 0, 0.5), abs=1e-12)
