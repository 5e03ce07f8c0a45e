"The trust-region step, against plane geometry, explicit matrices and slow expectations."
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tabular
import torch
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

from stepwise_routing.method import cpo
from stepwise_routing.method.cpo import *
from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.method.policy import ValueNet, log_threshold_probs, vtrace

torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def double(monkeypatch):
    "Network passes in double precision too, so that formulas can be compared to many digits."
    monkeypatch.setattr(cpo, 'PRECISION', torch.float64)

# --- the CPO step
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

def test_cpo_directions_satisfy_kkt():
    "The problem is convex, so these conditions prove the optimum; in case 0 the step restores all that it can."
    r = np.random.default_rng(2)
    for i in range(1500):
        case = i % 5
        g, b, c, H, delta = problem(r, case)
        got = direction(g, b, c, H, delta)
        y, lam, nu = got.y.numpy(), got.lam_star, got.nu_star
        reach = np.sqrt(2*delta*(b @ np.linalg.solve(H, b)))
        assert got.optim_case == case and y @ H @ y/2 <= delta*(1 + 1e-8), 'inside the ball'
        if case == 0:
            assert b @ y <= -reach*(1 - 1e-7)
            continue
        assert c + b @ y <= 1e-7*(reach + abs(c)), 'keeps the constraint'
        size = np.abs(g).max() + lam*np.abs(H @ y).max() + abs(nu)*np.abs(b).max()
        assert lam >= 0 and nu >= 0 and np.abs(g + lam*(H @ y) + nu*b).max() < 1e-7*size, 'stationary'
        assert abs(lam*(y @ H @ y/2 - delta)) < 1e-7*(lam*delta + 1e-12), 'the ball binds, or lam is 0'
        if nu > 1e-9*np.linalg.norm(g)/np.linalg.norm(b):
            assert abs(c + b @ y) < 1e-6*(abs(c) + np.abs(b) @ np.abs(y)), 'the constraint binds, or nu is 0'

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
both = pytest.mark.parametrize('n_models', [2, 3])

def curvature_case(n_models):
    r = np.random.default_rng(0)
    return tiny_policy(n_models), f64(r.normal(size=(5, 2))), f64(r.dirichlet(np.ones(5)))

def fisher(policy, x, weight):
    "(H written out, the pieces it is kept in)."
    weights, odds, inputs = network(policy, x)
    layers, blocks = jacobian(weights, inputs), fisher_blocks(odds, .25, .1, weight)
    J = gradient(layers, torch.eye(odds.numel(), dtype=odds.dtype).view(-1, *odds.shape)).view(*odds.shape, -1)
    return torch.einsum('aip,iab,biq->pq', J, blocks, J), layers, blocks, J

@both
def test_fisher_is_the_covariance_of_the_scores(n_models):
    "State by state and action by action, with a backward pass each."
    policy, x, weight = curvature_case(n_models)
    F = 0.
    for i in range(5):
        S = soft_set(policy(x[i:i + 1]).exp(), .25, .1)[0]
        for a in range(n_models):
            score = flat(torch.autograd.grad(S[a].log(), policy.parameters(), retain_graph=True))
            F = F + weight[i]*S[a].detach()*score[:, None]*score[None]
    H = fisher(policy, x, weight)[0]
    assert torch.isfinite(H).all() and torch.allclose(H, F, rtol=1e-9, atol=1e-12) and F.abs().max() > 1e-3

@both
def test_fisher_is_the_curvature_of_the_divergence(n_models):
    policy, x, weight = curvature_case(n_models)
    theta = flat(policy.parameters()).detach()
    old = soft_set(policy(x).exp(), .25, .1).detach()
    def divergence(theta):
        new = soft_set(with_parameters(policy, theta, x).exp(), .25, .1)
        gap = torch.where(old > 0, new.clamp_min(1e-300).log() - old.clamp_min(1e-300).log(), 0.)
        return (weight*(new*gap).sum(-1)).sum()
    H, mine = torch.autograd.functional.hessian(divergence, theta), fisher(policy, x, weight)[0]
    assert torch.isfinite(mine).all() and torch.allclose(mine, H, rtol=1e-7, atol=1e-10)

@both
@pytest.mark.parametrize('hidden', [(), (3,), (5, 4)])
def test_the_jacobian_is_that_of_autograd(n_models, hidden):
    policy, x = tiny_policy(n_models, hidden=hidden), curvature_case(n_models)[1]
    theta = flat(policy.parameters()).detach()
    def odds(theta):
        log_pi = with_parameters(policy, theta, x)
        return (log_pi[:, 1:] - log_pi[:, :1]).T
    weights, got, inputs = network(policy, x)
    J, layers = torch.autograd.functional.jacobian(odds, theta), jacobian(weights, inputs)
    r = np.random.default_rng(0)
    v, y = f64(r.normal(size=len(theta))), f64(r.normal(size=(3, *got.shape)))
    assert torch.allclose(got, odds(theta)) and torch.allclose(along(layers, weights_of(policy, v)), J @ v)
    assert torch.allclose(gradient(layers, y), torch.einsum('kai,aip->kp', y, J))

@both
@pytest.mark.parametrize('damping', [1e-4, .1, 10.])
def test_the_fisher_system_is_solved_as_a_dense_one(n_models, damping):
    policy, x, weight = curvature_case(n_models)
    H, layers, blocks, _ = fisher(policy, x, weight)
    solve, r = fisher_solver(policy, layers, blocks, damping), np.random.default_rng(1)
    for size in (1e-3, 1., 1e3):
        b = f64(r.normal(size=len(H))*size)
        want = torch.linalg.solve(H + damping*torch.eye(len(H)), b)
        assert (solve(b) - want).norm() < 1e-7*want.norm()
    assert not solve(0*b).any()

# --- gradients
def slow_value(table, policy, theta, kappa, temp, on_escalate, outcome):
    "Expected outcome of S, problem by problem and step by step; differentiable."
    x = policy.encode(table.obs, table.features)
    h = soft_set(with_parameters(policy, theta, x).exp(), kappa, temp)[..., 1]
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
    return dict(cost=lambda o: o[unit]/share, miss=lambda o: large - o['correct'])

@pytest.mark.parametrize('on_escalate', READINGS)
def test_exact_gradients_are_those_of_the_expectation(on_escalate):
    table = toy_table(25, 'train')
    env = TableEnv(table, ('score_logit', 'index', 'final'), on_escalate)
    policy = fitted_policy(env)
    theta = flat(policy.parameters()).detach().requires_grad_()
    estimate, wants = exact_estimate(policy, env, np.arange(25), .25, .1), outcomes_of(table)
    for name, gradient in (('cost', 'g'), ('miss', 'b')):
        J = slow_value(table, policy, theta, .25, .1, on_escalate, wants[name])
        assert np.isclose(getattr(estimate, name), J.item(), rtol=1e-10)
        assert torch.allclose(getattr(estimate, gradient), torch.autograd.grad(J, theta)[0], rtol=1e-8, atol=1e-12)
    moved = theta.detach() + .1
    kl, cost, miss = estimate.measure(moved)
    assert np.isclose(cost, slow_value(table, policy, moved, .25, .1, on_escalate, wants['cost']).item())
    assert np.isclose(miss, slow_value(table, policy, moved, .25, .1, on_escalate, wants['miss']).item()) and kl > 0
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
        estimate = exact_estimate(policy, env, np.arange(len(table)), .25, .1)
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
    h = soft_set(with_parameters(policy, theta, x).exp(), kappa, temp)[..., 1]
    fixed = h.detach().numpy()
    out = []
    for outcome in outcomes_of(table).values():
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

@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(cpo, 'RHO_BAR', 1e12)
    monkeypatch.setattr(cpo, 'vtrace', partial(vtrace, rho_bar=1e12, c_bar=1e12))

def averaged(env, policy, critics, batches=60, size=2500):
    "Sampled gradients (batch by batch) with nothing clipped, and the estimate of the miss rate."
    rng, out = np.random.default_rng(0), []
    for _ in range(batches):
        rollouts = env.sample(policy, rng.integers(0, len(env), size), rng)
        e, _ = sampled_estimate(policy, critics, rollouts, .25, .1)
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
def test_sampled_gradients_average_to_the_surrogates(unclipped, on_escalate):
    table = tabular.take(toy_table(40, 'train'), np.arange(12))
    env = TableEnv(table, ('score_logit', 'index', 'final'), on_escalate)
    policy, critics = fitted_policy(env), [ValueNet(3, (4,), seed) for seed in (1, 2)]
    g, b, miss = averaged(env, policy, critics)
    want_g, want_b = surrogate_gradients(table, policy, .25, .1, on_escalate)
    assert agree(g, want_g) and agree(b, want_b)
    J = exact_estimate(policy, env, np.arange(12), .25, .1).miss
    assert abs(miss.mean() - J) < 4.5*miss.std(ddof=1)/np.sqrt(len(miss))

def one_decision(table):
    "The table's problems, decided once: after the first step, which is made the last."
    cut = {k: getattr(table, k)[:, :1] for k in ('obs', 'small_tokens', 'small_prompt')}
    large = 'large_tokens', 'large_prompt', 'large_steps'
    cut |= {k: np.c_[getattr(table, k)[:, :1], 0*getattr(table, k)[:, :1]] for k in large}
    last = table.correct[np.arange(len(table)), table.n_steps]
    return replace(table, n_steps=np.ones(len(table), int), correct=np.c_[table.correct[:, 0], last], **cut)

def test_with_one_decision_the_two_estimators_are_one(unclipped):
    """Where nothing depends on how a state was reached, the surrogate's gradient is the gradient, whatever the
    critics say."""
    table = one_decision(toy_table(40, 'train'))
    env = TableEnv(table, ('score_logit', 'index'))
    policy = fitted_policy(env)
    exact = exact_estimate(policy, env, np.arange(40), .25, .1)
    g, b, _ = averaged(env, policy, [ValueNet(2, (4,), seed) for seed in (3, 4)], batches=40)
    assert agree(g, exact.g) and exact.g.norm() > 1e-3
    assert exact.b.norm() < 1e-12 or agree(b, exact.b)

@pytest.mark.parametrize('kappa', [.02, .25])
def test_the_level_of_the_constraint_is_that_of_the_expectation(kappa):
    "Also where kappa is small and most ratios are clipped in the gradients: the level has the same mean as exactly."
    env = toy_env(50)
    policy, rng = fitted_policy(env), np.random.default_rng(0)
    critics = [ValueNet(3, (4,), seed) for seed in (1, 2)]
    drawn = [env.sample(policy, rng.integers(0, 50, 4000), rng) for _ in range(20)]
    levels = [sampled_estimate(policy, critics, r, kappa, .1)[0].miss for r in drawn]
    want = exact_estimate(policy, env, np.arange(50), kappa, .1).miss
    assert abs(np.mean(levels) - want) < 4.5*np.std(levels)/np.sqrt(19)

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
def test_misses_are_not_clipped_as_costs_are(monkeypatch):
    env = toy_env(40)
    policy, critics = fitted_policy(env), [ValueNet(3, (4,), i) for i in (0, 1)]
    rollouts = env.sample(policy, np.arange(40), np.random.default_rng(0))
    def at(clip):
        monkeypatch.setattr(cpo, 'RHO_BAR', clip)
        return sampled_estimate(policy, critics, rollouts, .25, .1)[0]
    clipped, free = at(.3), at(1e9)
    assert torch.equal(clipped.b, free.b) and not torch.allclose(clipped.g, free.g)

def reached(env, policy, rows, kappa, temp):
    "Chance that nobody has escalated before a state, one state after the other."
    out = []
    for row in rows:
        left = 1.
        for x in env.x[row][env.inside[row]]:
            out.append(left)
            left *= float(log_threshold_probs(policy(x[None]), kappa, temp)[0, 0].detach().exp())
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
