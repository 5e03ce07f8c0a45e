"The trust-region step, against plane geometry, explicit matrices and slow expectations."
from dataclasses import replace

import numpy as np
import pytest
import tabular
import torch
from hypothesis import given, settings, strategies as st
from policies import (
    READINGS,
    f64,
    fitted_policy,
    flat,
    pi_escalate,
    soft_set,
    tiny_policy,
    toy_env,
    with_parameters,
)

from stepwise_routing.base.settings import Policy
from stepwise_routing.method import cpo
from stepwise_routing.method.cpo import *
from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.method.policy import ValueNet, log_threshold_probs

torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def double(monkeypatch):
    "Network passes in double precision too, so that formulas can be compared to many digits."
    monkeypatch.setattr(cpo, 'PRECISION', torch.float64)

# --- the CPO step
def root(H):
    "H^(-1/2), so that steps y = H^(-1/2) z have length |z|^2/2 = y'Hy/2."
    w, Q = np.linalg.eigh(H)
    return Q @ np.diag(w**-.5) @ Q.T

def best_step(g, b, c, H, delta):
    """Minimise g.y subject to c + b.y <= 0 and y'Hy/2 <= delta by plane geometry: in z = H^(1/2) y the trust region is
    a ball and the answer lies in the plane of two vectors. Either the ball's best point is allowed, or the best point
    of the circle where the constraint plane cuts the ball."""
    R, X = np.sqrt(2*delta), root(H)
    gz, bz = X @ g, X @ b
    size, beta = np.linalg.norm(gz), np.linalg.norm(bz)
    z = -R*gz/size if size > 0 else 0*gz
    if c + bz @ z <= 0: return X @ z
    if beta*R < c: return X @ (-R*bz/beta) # no point of the ball is allowed: as far towards it as the ball goes
    along, foot = gz - (gz @ bz)/beta**2*bz, -c*bz/beta**2
    rest = np.sqrt(max(R**2 - foot @ foot, 0.))
    return X @ (foot - rest*along/max(np.linalg.norm(along), 1e-300))

def problem(r, case):
    "A random problem of one of CPO's five cases: (g, b, c, H, delta)."
    d = r.integers(2, 9)
    A = r.normal(size=(d, d))
    H = A @ A.T/d + np.diag(10**r.uniform(-2, 1, d))
    g, b = (r.normal(size=d)*10**r.uniform(-2, 2) for _ in range(2))
    delta = 10**r.uniform(-4, 0)
    if r.random() < .1: g = b*r.normal() + 1e-3*r.normal(size=d)*np.linalg.norm(b) # nearly parallel
    # largest change of the constraint within the ball
    reach = np.sqrt(2*delta*(b @ np.linalg.solve(H, b)))
    if case == 4: return g, b, -reach*10**(12.1 + 4*r.random() + 4*r.random()), H, delta
    near, far = 10**r.uniform(-3, -1e-3), 1 + 10**r.uniform(-3, 1)
    return g, b, {0: far, 1: near, 2: -near, 3: -far}[case]*reach, H, delta

def direction(g, b, c, H, delta):
    L = torch.linalg.cholesky(f64(H))
    return cpo_direction(f64(g), f64(b), float(c), lambda x: torch.cholesky_solve(x[:, None], L)[:, 0], delta)

def flaws(y, g, b, c, H, delta):
    "What is wrong with a step, in words; none for the best one."
    best, scale = best_step(g, b, c, H, delta), np.sqrt(2*delta*(g @ np.linalg.solve(H, g)))
    reach = np.sqrt(2*delta*(b @ np.linalg.solve(H, b)))
    out = []
    if not np.isfinite(y).all(): return ['not finite']
    if y @ H @ y/2 > delta*(1 + 1e-8): out.append('outside the trust region')
    if c <= reach:
        if c + b @ y > 1e-7*(reach + abs(c)): out.append('violates the constraint')
        if g @ y > g @ best + 1e-6*scale: out.append('not the best')
    elif b @ y > -reach*(1 - 1e-7): out.append('does not restore all it can')
    return out

def test_geometry_agrees_with_a_general_solver():
    "The oracle itself, against scipy's SLSQP."
    from scipy.optimize import minimize
    r = np.random.default_rng(0)
    for i in range(60):
        g, b, c, H, delta = problem(r, 1 + i % 4)
        X, R = root(H), np.sqrt(2*delta)
        gz, bz = X @ g, X @ b
        gz, bz, k = gz/np.linalg.norm(gz), bz/np.linalg.norm(bz), c/np.linalg.norm(bz)/R # in units of the ball
        cons = [dict(type='ineq', fun=lambda z: -(k + bz @ z), jac=lambda z: -bz),
                dict(type='ineq', fun=lambda z: (1 - z @ z)/2, jac=lambda z: -z)]
        runs = [minimize(lambda z: gz @ z, z0, jac=lambda z: gz, constraints=cons, method='SLSQP',
                         options=dict(ftol=1e-14, maxiter=500))
                for z0 in (0*gz, -bz*.9, -gz*.9)]
        best = min((s.fun for s in runs if k + bz @ s.x < 1e-7 and s.x @ s.x < 1 + 1e-7), default=None)
        assert best is not None and abs(best - g @ best_step(g, b, c, H, delta)/np.linalg.norm(X @ g)/R) < 1e-5

def test_cpo_direction_solves_random_problems():
    r, seen = np.random.default_rng(1), np.zeros(5, int)
    for i in range(2500):
        g, b, c, H, delta = problem(r, i % 5)
        got = direction(g, b, c, H, delta)
        assert got.optim_case == i % 5
        assert not flaws(got.y.numpy(), g, b, c, H, delta), (i, flaws(got.y.numpy(), g, b, c, H, delta))
        seen[got.optim_case] += 1
    assert (seen >= 100).all()

@given(st.integers(0, 4), st.floats(-60, 60), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_the_unit_of_the_constraint_does_not_matter(case, power, seed):
    "Gradient and level a thousand times smaller are the same constraint: the same case, the same step."
    g, b, c, H, delta = problem(np.random.default_rng(seed), case)
    one, scaled = direction(g, b, c, H, delta), direction(g, 10**power*b, 10**power*c, H, delta)
    assert one.optim_case == scaled.optim_case == case
    assert (one.y - scaled.y).norm() <= 1e-5*one.y.norm() and one.y.any()

def test_cpo_multipliers_satisfy_kkt():
    r = np.random.default_rng(2)
    for i in range(800):
        g, b, c, H, delta = problem(r, 1 + i % 4)
        got = direction(g, b, c, H, delta)
        y, lam, nu = got.y.numpy(), got.lam_star, got.nu_star
        size = np.abs(g).max() + lam*np.abs(H @ y).max() + abs(nu)*np.abs(b).max()
        assert lam >= 0 and nu >= 0 and isinstance(lam, float) and isinstance(nu, float)
        assert np.abs(g + lam*(H @ y) + nu*b).max() < 1e-7*size, 'stationary'
        assert abs(lam*(y @ H @ y/2 - delta)) < 1e-7*(lam*delta + 1e-12), 'the ball binds, or lam is 0'
        if nu > 1e-9*np.linalg.norm(g)/np.linalg.norm(b):
            assert abs(c + b @ y) < 1e-6*(abs(c) + np.abs(b) @ np.abs(y)), 'the constraint binds, or nu is 0'

def other_convention(g, b, c, H, delta):
    """The step with g.H^-1 b of the opposite sign, as where g is an ascent direction and the dual is the
    minimiser's (OmniSafe, SafePO)."""
    v, w = np.linalg.solve(H, g), np.linalg.solve(H, b)
    q, r, s = g @ v, -g @ w, b @ w
    A, B = q - r*r/s, 2*delta - c*c/s
    La, Lb = ((0, r/c), (r/c, np.inf)) if c < 0 else ((r/c, np.inf), (0, r/c))
    clip = lambda x, to: max(to[0], min(to[1], x))
    la, lb = clip(np.sqrt(A/B), La), clip(np.sqrt(q/(2*delta)), Lb)
    fa, fb = (-(A/la + B*la)/2 - r*c/s if la > 0 else -np.inf), (-(q/lb + 2*delta*lb)/2 if lb > 0 else -np.inf)
    lam = max(la if fa >= fb else lb, 1e-12)
    return -(v + max(0, lam*c - r)/s*w)/lam

def test_the_other_sign_convention_fails_these_problems():
    r, failed = np.random.default_rng(3), {1: 0, 2: 0}
    for i in range(400):
        case = 1 + i % 2
        p = problem(r, case)
        failed[case] += bool(flaws(other_convention(*p), *p))
    assert failed[1] > 150 and failed[2] > 80

ball = dict(H=np.eye(2), delta=.5) # the unit disc
@pytest.mark.parametrize('g, b, c, want', [
    ([1, 0], [0, 1], -2., [-1, 0]),                                  # whole disc allowed
    ([1, 0], [0, 1], 2., [0, -1]),                                   # none of it
    ([1, 0], [0, 1], .6, [-.8, -.6]),                                # recovery
    ([1, 0], [-1, 0], -.5, [-.5, None]),                             # the constraint stops the best step
    ([1, 0], [0, 1], 0., [-1, 0]),                                   # on the boundary, gradients orthogonal
    ([1, 0], [-1, 1], 0., [-np.sqrt(.5), -np.sqrt(.5)]),             # on the boundary, gradients opposed
    ([1, 0], [1, 0], .5, [-1, 0]),                                   # parallel: both ways down
    ([1, 0], [0, 0], -.5, [-1, 0])])                                 # a constraint without a gradient
def test_cpo_by_hand(g, b, c, want):
    y = direction(np.array(g, float), np.array(b, float), c, **ball).y.numpy()
    assert all(w is None or abs(x - w) < 1e-6 for x, w in zip(y, want)), y

@pytest.mark.parametrize('g, b, c', [
    ([0, 0], [0, 1], -.1), ([0, 0], [0, 1], .5), ([0, 0], [0, 0], -.1), ([0, 0], [0, 0], .1), ([1, 0], [0, 0], .1),
    ([1, 0], [0, 0], 0.), ([0, 0], [0, 1], 0.), ([1, 0], [2, 0], 0.),
    ([1, 0], [-2, 0], 0.), ([1, 0], [-1, 0], 1.), ([1, 0], [1, 0], -1.)])
def test_cpo_without_a_direction_stays_finite_and_inside(g, b, c):
    "A gradient that is nought, or nothing left to choose: whatever the step is, it is one."
    got = direction(np.array(g, float), np.array(b, float), c, **ball)
    assert torch.isfinite(got.y).all() and np.isfinite([got.lam_star, got.nu_star]).all()
    assert (got.y @ got.y)/2 <= .5 + 1e-9
    if abs(c) < 1 and any(b): assert c + np.dot(b, got.y.numpy()) <= 1e-6

# --- curvature
curvatures = [(2, 'absorbing', False), (3, 'absorbing', False), (3, 'absorbing', True), (3, 'per_step', False)]

def curvature_case(n_models, mode, moved):
    policy, r = tiny_policy(n_models, mode), np.random.default_rng(0)
    x, weight = f64(r.normal(size=(5, 2))), f64(r.dirichlet(np.ones(5)))
    return policy, x, weight, torch.tensor([0, 1, 0, 2, 1]) if moved else torch.zeros(5, dtype=torch.long)

def fisher(policy, x, weight, at):
    "(H written out, the pieces it is kept in)."
    weights, odds, inputs = network(policy, x)
    layers, blocks = jacobian(weights, inputs), fisher_blocks(policy, odds, at, .25, .1, weight)
    J = gradient(layers, torch.eye(odds.numel(), dtype=odds.dtype).view(-1, *odds.shape)).view(*odds.shape, -1)
    return torch.einsum('aip,iab,biq->pq', J, blocks, J), layers, blocks, J

@pytest.mark.parametrize('n_models, mode, moved', curvatures)
def test_fisher_is_the_covariance_of_the_scores(n_models, mode, moved):
    "State by state and action by action, with a backward pass each."
    policy, x, weight, at = curvature_case(n_models, mode, moved)
    F = 0.
    for i in range(5):
        S = soft_set(policy(x[i:i + 1], at[i:i + 1]).exp(), .25, .1)[0]
        for a in range(at[i] if mode == 'absorbing' else 0, n_models):
            score = flat(torch.autograd.grad(S[a].log(), policy.parameters(), retain_graph=True))
            F = F + weight[i]*S[a].detach()*score[:, None]*score[None]
    H = fisher(policy, x, weight, at)[0]
    assert torch.isfinite(H).all() and torch.allclose(H, F, rtol=1e-9, atol=1e-12) and F.abs().max() > 1e-3

@pytest.mark.parametrize('n_models, mode, moved', curvatures)
def test_fisher_is_the_curvature_of_the_divergence(n_models, mode, moved):
    policy, x, weight, at = curvature_case(n_models, mode, moved)
    theta = flat(policy.parameters()).detach()
    old = soft_set(policy(x, at).exp(), .25, .1).detach()
    def divergence(theta):
        new = soft_set(with_parameters(policy, theta, x, at).exp(), .25, .1)
        gap = torch.where(old > 0, new.clamp_min(1e-300).log() - old.clamp_min(1e-300).log(), 0.)
        return (weight*(new*gap).sum(-1)).sum()
    H, mine = torch.autograd.functional.hessian(divergence, theta), fisher(policy, x, weight, at)[0]
    assert torch.isfinite(mine).all() and torch.allclose(mine, H, rtol=1e-7, atol=1e-10)

@pytest.mark.parametrize('n_models, mode, moved', curvatures)
@pytest.mark.parametrize('hidden', [(), (3,), (5, 4)])
def test_the_jacobian_is_that_of_autograd(n_models, mode, moved, hidden):
    policy, x = tiny_policy(n_models, mode, hidden=hidden), curvature_case(n_models, mode, moved)[1]
    theta = flat(policy.parameters()).detach()
    def odds(theta):
        log_pi = with_parameters(policy, theta, x, None)
        return (log_pi[:, 1:] - log_pi[:, :1]).T
    weights, got, inputs = network(policy, x)
    J, layers = torch.autograd.functional.jacobian(odds, theta), jacobian(weights, inputs)
    r = np.random.default_rng(0)
    v, y = f64(r.normal(size=len(theta))), f64(r.normal(size=(3, *got.shape)))
    assert torch.allclose(got, odds(theta)) and torch.allclose(along(layers, weights_of(policy, v)), J @ v)
    assert torch.allclose(gradient(layers, y), torch.einsum('kai,aip->kp', y, J))

@pytest.mark.parametrize('n_models, mode, moved', curvatures)
@pytest.mark.parametrize('damping', [1e-4, .1, 10.])
def test_the_fisher_system_is_solved_as_a_dense_one(n_models, mode, moved, damping):
    policy, x, weight, at = curvature_case(n_models, mode, moved)
    H, layers, blocks, _ = fisher(policy, x, weight, at)
    solve, r = fisher_solver(policy, layers, blocks, damping), np.random.default_rng(1)
    for size in (1e-3, 1., 1e3):
        b = f64(r.normal(size=len(H))*size)
        want = torch.linalg.solve(H + damping*torch.eye(len(H)), b)
        assert (solve(b) - want).norm() < 1e-7*want.norm()
    assert not solve(0*b).any()

def test_single_precision_changes_little(monkeypatch):
    env = toy_env(60)
    policy, rows = fitted_policy(env, hidden=(64, 64), spread=.05), np.arange(60)
    exact = exact_estimate(policy, env, rows, .25, .1)
    monkeypatch.setattr(cpo, 'PRECISION', torch.float32)
    single, moved = exact_estimate(policy, env, rows, .25, .1), flat(policy.parameters()).detach() + .01
    for name in ('g', 'b'):
        a, b = getattr(exact, name), getattr(single, name)
        assert b.dtype == torch.float64 and (a - b).norm() < 1e-5*a.norm()
    assert np.allclose(exact.measure(moved), single.measure(moved), rtol=1e-4, atol=1e-7)

# --- gradients
def slow_value(table, policy, theta, kappa, temp, on_escalate, outcome):
    "Expected outcome of S, problem by problem and step by step; differentiable."
    x = policy.encode(table.obs, table.features)
    h = soft_set(with_parameters(policy, theta, x, None).exp(), kappa, temp)[..., 1]
    columns = [outcome(table.outcome(np.minimum(t, table.n_steps), on_escalate)) for t in range(table.obs.shape[1] + 1)]
    total = 0.
    for i, T in enumerate(table.n_steps):
        left = 1.
        for t in range(T):
            total = total + left*h[i, t]*float(columns[t][i])
            left = left*(1 - h[i, t])
        total = total + left*float(columns[T][i])
    return total/len(table)

def outcomes_of(table, unit='paper_flops'):
    share, large = table.large_only()[unit].mean(), table.correct[:, 0]
    return dict(cost=lambda o: o[unit]/share, joint=lambda o: (o['correct'] == 0)*table.large_again,
                gap=lambda o: large - o['correct'])

@pytest.mark.parametrize('on_escalate, constraint', [('append', 'joint'), ('regenerate', 'gap')])
def test_exact_gradients_are_those_of_the_expectation(on_escalate, constraint):
    table = toy_table(25, 'train')
    env = TableEnv(table, ('score_logit', 'index', 'final'), on_escalate)
    policy = fitted_policy(env)
    theta = flat(policy.parameters()).detach().requires_grad_()
    estimate, wants = exact_estimate(policy, env, np.arange(25), .25, .1, constraint), outcomes_of(table)
    for name, gradient, outcome in (('cost', 'g', 'cost'), ('miss', 'b', constraint)):
        J = slow_value(table, policy, theta, .25, .1, on_escalate, wants[outcome])
        assert np.isclose(getattr(estimate, name), J.item(), rtol=1e-10)
        assert torch.allclose(getattr(estimate, gradient), torch.autograd.grad(J, theta)[0], rtol=1e-8, atol=1e-12)
    moved = theta.detach() + .1
    kl, cost, miss = estimate.measure(moved)
    assert np.isclose(cost, slow_value(table, policy, moved, .25, .1, on_escalate, wants['cost']).item())
    assert np.isclose(miss, slow_value(table, policy, moved, .25, .1, on_escalate, wants[constraint]).item()) and kl > 0
    assert abs(estimate.measure(theta.detach())[0]) < 1e-12

def test_exact_values_on_the_chain():
    "The same expectation from the chain's own matrices, and from the table row by row."
    table = tabular.chain_table()
    for on_escalate in READINGS:
        env = TableEnv(table, tabular.FEATURES, on_escalate)
        policy = fitted_policy(env)
        with torch.no_grad():
            log_pi = policy(policy.encode(tabular.observations(), tabular.FEATURES))
            S = log_threshold_probs(log_pi, .25, .1)[:, 1].exp().numpy()
        cost, miss = tabular.evaluate(S, on_escalate)
        estimate = exact_estimate(policy, env, np.arange(len(table)), .25, .1, 'joint')
        assert np.isclose(estimate.cost*table.large_only()['paper_flops'].mean(), cost)
        assert np.isclose(estimate.miss, miss)
        deployed = env.deploy(policy, .25)
        got = deployed['cost'].mean()*table.large_only()['paper_flops'].mean(), deployed['miss'].mean()
        assert np.allclose(got, tabular.evaluate(tabular.policy_hazards(policy, .25)[0], on_escalate))

def surrogate_gradients(table, policy, kappa, temp, on_escalate):
    """What the sampled surrogates average to: states as pi visits them, actions and action values of S. By rows
    and steps, from the table."""
    x, theta = policy.encode(table.obs, table.features), flat(policy.parameters()).detach().requires_grad_()
    pi = pi_escalate(policy, table)
    h = soft_set(with_parameters(policy, theta, x, None).exp(), kappa, temp)[..., 1]
    fixed = h.detach().numpy()
    out = []
    for outcome in (outcomes_of(table)['cost'], outcomes_of(table)['joint']):
        every = [table.outcome(np.minimum(t, table.n_steps), on_escalate) for t in range(table.obs.shape[1] + 1)]
        columns = np.stack([outcome(o) for o in every], 1)
        total = 0.
        for i, T in enumerate(table.n_steps):
            to_go = columns[i, T]
            for t in reversed(range(T)):
                visit = np.prod(1 - pi[i, :t])
                # the value of staying does not depend on the action taken
                total = total + visit*h[i, t]*float(columns[i, t] - to_go)
                to_go = fixed[i, t]*columns[i, t] + (1 - fixed[i, t])*to_go
        out.append(torch.autograd.grad(total/len(table), theta, retain_graph=True)[0])
    return out

UNCLIPPED = Policy(rho_bar=1e12, v_rho_bar=1e12, c_bar=1e12, constraint='joint')

def averaged(env, policy, critics, batches=60, size=2500):
    "Sampled gradients (batch by batch) with nothing clipped, and the estimate of the miss rate."
    rng, out = np.random.default_rng(0), []
    for _ in range(batches):
        rollouts = env.sample(policy, rng.integers(0, len(env), size), rng)
        e, _ = sampled_estimate(policy, critics, rollouts, .25, .1, UNCLIPPED)
        out.append((e.g, e.b, e.miss))
    return [torch.stack([o[i] for o in out]) for i in (0, 1)] + [np.array([o[2] for o in out])]

def agree(samples, want):
    """Do the batches average to this vector? In its own direction and in ten random ones, up to 4.5 standard
    errors; and almost parallel."""
    ways = torch.cat([want[None],
                      torch.randn(10, len(want), generator=torch.Generator().manual_seed(0), dtype=torch.float64)])
    along, goal = (samples @ ways.T).numpy(), (want @ ways.T).numpy()
    error = along.std(0, ddof=1)/np.sqrt(len(along))
    mean = samples.mean(0)
    return (np.abs(along.mean(0) - goal) < 4.5*error).all() and float(mean @ want/mean.norm()/want.norm()) > .97

@pytest.mark.parametrize('on_escalate', READINGS)
def test_sampled_gradients_average_to_the_surrogates(on_escalate):
    table = tabular.take(toy_table(40, 'train'), np.arange(12))
    env = TableEnv(table, ('score_logit', 'index', 'final'), on_escalate)
    policy, critics = fitted_policy(env), [ValueNet(3, (4,), seed) for seed in (1, 2)]
    g, b, miss = averaged(env, policy, critics)
    want_g, want_b = surrogate_gradients(table, policy, .25, .1, on_escalate)
    assert agree(g, want_g) and agree(b, want_b)
    J = exact_estimate(policy, env, np.arange(12), .25, .1, 'joint').miss
    assert abs(miss.mean() - J) < 4.5*miss.std(ddof=1)/np.sqrt(len(miss))

def one_decision(table):
    "The table's problems, decided once: after the first step, which is made the last."
    cut = {k: getattr(table, k)[:, :1] for k in ('obs', 'small_tokens', 'small_prompt')}
    large = 'large_tokens', 'large_prompt', 'large_steps'
    cut |= {k: np.c_[getattr(table, k)[:, :1], 0*getattr(table, k)[:, :1]] for k in large}
    last = table.correct[np.arange(len(table)), table.n_steps]
    return replace(table, n_steps=np.ones(len(table), int), correct=np.c_[table.correct[:, 0], last], **cut)

def test_with_one_decision_the_two_estimators_are_one():
    """Where nothing depends on how a state was reached, the surrogate's gradient is the gradient, whatever the
    critics say."""
    table = one_decision(toy_table(40, 'train'))
    env = TableEnv(table, ('score_logit', 'index'))
    policy = fitted_policy(env)
    exact = exact_estimate(policy, env, np.arange(40), .25, .1, 'joint')
    g, b, _ = averaged(env, policy, [ValueNet(2, (4,), seed) for seed in (3, 4)], batches=40)
    assert agree(g, exact.g) and exact.g.norm() > 1e-3
    assert exact.b.norm() < 1e-12 or agree(b, exact.b)

@pytest.mark.parametrize('kappa', [.02, .25])
@pytest.mark.parametrize('constraint', ['gap', 'joint'])
def test_the_level_of_the_constraint_is_that_of_the_expectation(kappa, constraint):
    "Also where kappa is small and most ratios are clipped in the gradients: the level has the same mean as exactly."
    env = toy_env(50)
    policy, rng = fitted_policy(env), np.random.default_rng(0)
    critics = [ValueNet(3, (4,), seed) for seed in (1, 2)]
    drawn = [env.sample(policy, rng.integers(0, 50, 4000), rng) for _ in range(20)]
    levels = [sampled_estimate(policy, critics, r, kappa, .1, Policy(constraint=constraint))[0].miss for r in drawn]
    want, joint = (exact_estimate(policy, env, np.arange(50), kappa, .1, c).miss for c in (constraint, 'joint'))
    assert abs(np.mean(levels) - want) < 4.5*np.std(levels)/np.sqrt(19)
    assert want <= joint, 'P(R=1) + P(R_M=0) is at least P(R=1 or R_M=0)'

def test_misses_are_counted_against_other_draws_where_there_are_any():
    table, again = toy_table(300), (np.random.default_rng(0).random((300, 3)) < .8).astype(float)
    tables = (replace(table, large_redraws_right=draws) for draws in (again[:, :0], again))
    shared, other = (TableEnv(t, table.features, 'regenerate') for t in tables)
    assert not shared.miss[:, 0].any() and (other.large_right == shared.large_right).all()
    for t in range(table.obs.shape[1] + 1):
        right = table.outcome(np.minimum(t, table.n_steps), 'regenerate')['correct']
        want = np.mean([(right == 0) & (draw == 1) for draw in again.T], 0)
        assert np.allclose(other.miss[:, t], want) and (t or want.any())

# --- line search
@pytest.mark.parametrize('rho_bar', [.01, .3])
def test_misses_are_not_clipped_as_costs_are(rho_bar):
    env = toy_env(40)
    policy, critics = fitted_policy(env), [ValueNet(3, (4,), i) for i in (0, 1)]
    rollouts = env.sample(policy, np.arange(40), np.random.default_rng(0))
    clipped, free = (sampled_estimate(policy, critics, rollouts, .25, .1, Policy(rho_bar=x))[0] for x in (rho_bar, 1e9))
    assert torch.equal(clipped.b, free.b) and not torch.allclose(clipped.g, free.g)

def reached(env, policy, rows, kappa, temp):
    "Chance that nobody has escalated before a state, one state after the other."
    out = []
    for row in rows:
        left = 1.
        for x in env.x[row][env.inside[row]]:
            out.append(left)
            now = torch.zeros(1, dtype=int)
            left *= float(log_threshold_probs(policy(x[None], now), kappa, temp)[0, 0].detach().exp())
    return np.array(out)

def test_a_state_weighs_as_much_as_it_is_likely():
    "In the divergence, and in the Fisher matrix, which takes some of them at random where there are many."
    env, picked = toy_env(60), []
    policy, rows = fitted_policy(env), np.arange(60)
    estimate, want = exact_estimate(policy, env, rows, .25, .1), reached(env, policy, rows, .25, .1)
    np.testing.assert_allclose(estimate.weight.numpy(), want/want.sum(), rtol=1e-6)
    assert want.min() < .5 and len(want) > cpo.MAX_STATES
    class Random:
        def choice(self, n, size, p=None): picked.append(p); return np.arange(size)
    policy_step(policy, estimate, -.01, rng=Random())
    np.testing.assert_allclose(picked[0], want/want.sum(), rtol=1e-6)

def step_to(y, case): return Direction(f64(y), 1., 0., case)

@pytest.mark.parametrize('case, c, cost, miss, fraction', [
    (2, -.1, lambda x: -x, lambda x: 0.*x, .8**3),        # the divergence x^2 <= .3 needs x <= .548
    (2, -.1, lambda x: x, lambda x: 0.*x, 0.),            # never cheaper
    (1, .1, lambda x: x, lambda x: -x, .8**3),            # a recovery may cost more
    (2, -.1, lambda x: -x, lambda x: .5*x, .8**8),        # no more misses than there was room for: x <= .2
    (0, .1, lambda x: x, lambda x: x, 0.)])               # infeasible and no better
def test_line_search_takes_the_longest_step_allowed(case, c, cost, miss, fraction):
    measure = lambda theta: ((theta[0].item() - 3)**2, cost(theta[0].item() - 3), miss(theta[0].item() - 3))
    theta, accepted, kl = line_search(f64([3.]), step_to([1.], case), measure, c, delta=.3)
    assert np.isclose(accepted, fraction) and np.isclose(theta[0].item(), 3 + fraction) and np.isclose(kl, fraction**2)

def test_a_step_of_no_length_is_no_step():
    theta, accepted, kl = line_search(f64([3.]), step_to([0.], 0), lambda theta: (0., 0., 0.), .1)
    assert (theta.tolist(), accepted, kl) == ([3.], 0., 0.)

def test_line_search_distrusts_nan():
    bad = lambda theta: (float('nan'), 0., 0.) if theta[0] > 3.6 else ((theta[0].item() - 3)**2, 0., 0.)
    assert np.isclose(line_search(f64([3.]), step_to([1.], 2), bad, -1., delta=1.)[1], .8**3)
    for bad in ((0., float('nan'), 0.), (0., 0., float('nan'))):
        assert line_search(f64([3.]), step_to([1.], 2), lambda theta: bad if theta[0] > 3 else (0., 0., 0.),
                           -1.)[1] == 0.

@pytest.mark.parametrize('slack, moves', [(0., False), (.01, True)])
def test_on_the_boundary_of_a_curved_constraint_only_slack_lets_a_step_pass(slack, moves):
    curved = lambda theta: (0., -theta[0].item(), theta[0].item()**2/100)
    assert (line_search(f64([0.]), step_to([.1], 2), curved, 0., slack=slack)[1] > 0) == moves

def test_chances_after_a_step_are_those_of_the_policy():
    env = toy_env(60)
    policy = fitted_policy(env)
    estimate = exact_estimate(policy, env, np.arange(60), .25, .1)
    assert policy_step(policy, estimate, .1, rng=np.random.default_rng(0))['accepted']
    want = policy(env.x[env.inside])[:, 1].exp().detach()
    assert torch.allclose(chances_now(policy, estimate), want, atol=1e-5)

@pytest.mark.parametrize('seed', range(4))
def test_a_policy_step_stays_in_the_trust_region_and_helps(seed):
    env = toy_env(60)
    policy, rows = fitted_policy(env, seed), np.arange(60)
    before = exact_estimate(policy, env, rows, .25, .1)
    for alpha, recovers in ((before.miss - .02, True), (before.miss + .02, False)):
        start = [p.detach().clone() for p in policy.parameters()]
        now = exact_estimate(policy, env, rows, .25, .1)
        info = policy_step(policy, now, before.miss - alpha, rng=np.random.default_rng(0))
        after = exact_estimate(policy, env, rows, .25, .1)
        assert info['accepted'] > 0 and 0 < info['kl'] <= .01 and (info['optim_case'] <= 1) == recovers
        if recovers: assert after.miss < before.miss
        else: assert after.cost < before.cost and after.miss <= alpha + 1e-12
        for p, old in zip(policy.parameters(), start): p.data.copy_(old)
