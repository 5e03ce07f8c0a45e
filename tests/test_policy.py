"The pieces of threshold-constrained policy optimisation, against Monte-Carlo returns, plane geometry, explicit matrices, simulation and a linear program."
import itertools, json, subprocess, sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import tabular
from stepwise_routing import confidence as confidence_module
from stepwise_routing import cpo as cpo_module
from stepwise_routing.models import verifier as models_verifier
from stepwise_routing import policy as policy_module
from stepwise_routing import training as training_module
from stepwise_routing.baselines import SmallOnly
from stepwise_routing.outcomes import escalation_times, replay, toy_table, walk_outcome
from stepwise_routing.confidence import Scaler, fit_scaler

torch.set_num_threads(1)
READINGS = 'append', 'regenerate'
f64 = lambda x: torch.as_tensor(np.asarray(x, float))

# ---- V-trace --------------------------------------------------------------------------------------------------------------------------
def slow_vtrace(values, rewards, rho, rho_bar, c_bar, gamma):
    "Espeholt et al. 2018, equation 1, term by term, for one trajectory; the state after the last one is worth nothing."
    T, after = len(values), np.r_[values, 0.]
    clip = lambda bar: np.minimum(rho, np.inf if bar is None else bar)
    vs = [values[s] + sum(gamma**(t - s)*np.prod(clip(c_bar)[s:t])*clip(rho_bar)[t]*(rewards[t] + gamma*after[t + 1] - values[t]) for t in range(s, T))
          for s in range(T)]
    return np.array(vs)

@st.composite
def trajectories(draw):
    n, T = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = r.integers(1, T + 1, n)
    rho = np.exp(r.normal(0, 1.5, (n, T)))*(r.random((n, T)) < .85)
    return r.normal(0, 2, (n, T)), r.normal(0, 2, (n, T)), rho, np.arange(T) < length[:, None]

bars = st.sampled_from([.3, 1., 2.])

@given(trajectories(), bars, bars, st.sampled_from([1., .9, .5, 0.]))
@settings(max_examples=150, deadline=None)
def test_vtrace_is_the_double_sum(trajectory, rho_bar, c_bar, gamma):
    values, rewards, rho, inside = trajectory
    vs, adv = policy_module.vtrace(f64(values), f64(rewards), f64(rho), torch.as_tensor(inside), rho_bar, c_bar, gamma)
    for i, T in enumerate(inside.sum(1)):
        v, r, w = values[i, :T], rewards[i, :T], rho[i, :T]
        want = slow_vtrace(v, r, w, rho_bar, c_bar, gamma)
        assert np.allclose(vs[i, :T], want, rtol=1e-9, atol=1e-9)
        assert np.allclose(adv[i, :T], r + gamma*np.r_[want[1:], 0.] - v, rtol=1e-9, atol=1e-9)

@given(trajectories())
@settings(max_examples=100, deadline=None)
def test_on_policy_vtrace_is_the_return_to_go(trajectory):
    values, rewards, _, inside = trajectory
    vs, adv = policy_module.vtrace(f64(values), f64(rewards), torch.ones(values.shape, dtype=torch.float64), torch.as_tensor(inside))
    to_go = np.cumsum((rewards*inside)[:, ::-1], 1)[:, ::-1]
    assert np.allclose(vs.numpy()[inside], to_go[inside]) and np.allclose(adv.numpy()[inside], (to_go - values)[inside])

def test_vtrace_by_hand():
    "Two steps: V = (1, 2), r = (3, 4), rho = (.5, 3): delta_1 = 1*(4 + 0 - 2) = 2, vs_1 = 4; delta_0 = .5*(3 + 2 - 1) = 2, vs_0 = 1 + 2 + .5*(4 - 2) = 4."
    vs, adv = policy_module.vtrace(f64([[1, 2]]), f64([[3, 4]]), f64([[.5, 3]]), torch.ones(1, 2, dtype=bool))
    assert vs.tolist() == [[4., 4.]] and adv.tolist() == [[6., 2.]]

@given(trajectories(), st.sampled_from([float('nan'), 1e300, -7.]))
@settings(max_examples=50, deadline=None)
def test_vtrace_never_looks_past_the_end(trajectory, junk):
    values, rewards, rho, inside = trajectory
    fill = lambda x, y: f64(np.where(inside, x, y))
    clean = policy_module.vtrace(fill(values, 0), fill(rewards, 0), fill(rho, 1), torch.as_tensor(inside))
    dirty = policy_module.vtrace(fill(values, junk), fill(rewards, junk), fill(rho, abs(junk)), torch.as_tensor(inside))
    for a, b in zip(clean, dirty): assert (a[inside] == b[inside]).all() and torch.isfinite(b).all(), 'finite everywhere: padding must not poison a sum'

def test_vtrace_lets_no_gradient_through():
    values, rho = (torch.rand(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for x in policy_module.vtrace(values, torch.rand(2, 3, dtype=torch.float64), rho, torch.ones(2, 3, dtype=bool)): assert not x.requires_grad

def test_vtrace_off_policy_is_unbiased():
    "With unclipped ratios, vs at the start averages to the target's value, whatever the critic says; two steps, four paths, no sampling."
    mu, target, critic = np.array([.3, .6]), np.array([.8, .1]), f64([[5., -2.]])
    r = np.random.default_rng(0).normal(size=(2, 2, 2)) # reward [step, action]: r[0, a0], r[1, a1] (+ a0)
    total = want = 0.
    for a in itertools.product((0, 1), repeat=2):
        prob = lambda p: [p[t] if a[t] else 1 - p[t] for t in range(2)]
        m, s, reward = prob(mu), prob(target), [r[0, 0, a[0]], r[1, a[0], a[1]]]
        vs, _ = policy_module.vtrace(critic, f64([reward]), f64([np.divide(s, m)]), torch.ones(1, 2, dtype=bool), rho_bar=np.inf, c_bar=np.inf)
        total += np.prod(m)*vs[0, 0].item(); want += np.prod(s)*sum(reward)
    assert np.isclose(total, want)

# ---- the CPO step ---------------------------------------------------------------------------------------------------------------------
def root(H):
    "H^(-1/2), so that steps y = H^(-1/2) z have length |z|^2/2 = y'Hy/2."
    w, Q = np.linalg.eigh(H)
    return Q @ np.diag(w**-.5) @ Q.T

def best_step(g, b, c, H, delta):
    """Minimise g.y subject to c + b.y <= 0 and y'Hy/2 <= delta by plane geometry: in z = H^(1/2) y the trust region is a ball and the answer lies in the
    plane of two vectors. Either the ball's best point is allowed, or the best point of the circle where the constraint plane cuts the ball."""
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
    H, g, b = A @ A.T/d + np.diag(10**r.uniform(-2, 1, d)), r.normal(size=d)*10**r.uniform(-2, 2), r.normal(size=d)*10**r.uniform(-2, 2)
    delta = 10**r.uniform(-4, 0)
    if r.random() < .1: g = b*r.normal() + 1e-3*r.normal(size=d)*np.linalg.norm(b) # nearly parallel
    if case == 4: return g, b*1e-9/np.linalg.norm(b)*r.random(), -r.random(), H, delta
    reach = np.sqrt(2*delta*(b @ np.linalg.solve(H, b)))                # largest change of the constraint within the ball
    near, far = 10**r.uniform(-3, -1e-3), 1 + 10**r.uniform(-3, 1)
    return g, b, {0: far, 1: near, 2: -near, 3: -far}[case]*reach, H, delta

def direction(g, b, c, H, delta):
    L = torch.linalg.cholesky(f64(H))
    return cpo_module.cpo_direction(f64(g), f64(b), float(c), lambda x: torch.cholesky_solve(x[:, None], L)[:, 0], delta)

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
        cons = [dict(type='ineq', fun=lambda z: -(k + bz @ z), jac=lambda z: -bz), dict(type='ineq', fun=lambda z: (1 - z @ z)/2, jac=lambda z: -z)]
        runs = [minimize(lambda z: gz @ z, z0, jac=lambda z: gz, constraints=cons, method='SLSQP', options=dict(ftol=1e-14, maxiter=500))
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
        if nu > 1e-9*np.linalg.norm(g)/np.linalg.norm(b): assert abs(c + b @ y) < 1e-6*(abs(c) + np.abs(b) @ np.abs(y)), 'the constraint binds, or nu is 0'

def other_convention(g, b, c, H, delta):
    "The step with g.H^-1 b of the opposite sign, as where g is an ascent direction and the dual is the minimiser's (OmniSafe, SafePO)."
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
    ([0, 0], [0, 1], -.1), ([0, 0], [0, 1], .5), ([0, 0], [0, 0], -.1), ([0, 0], [0, 0], .1), ([1, 0], [0, 0], .1), ([1, 0], [0, 0], 0.),
    ([0, 0], [0, 1], 0.), ([1, 0], [2, 0], 0.), ([1, 0], [-2, 0], 0.), ([1, 0], [-1, 0], 1.), ([1, 0], [1, 0], -1.)])
def test_cpo_without_a_direction_stays_finite_and_inside(g, b, c):
    "A gradient that is nought, or nothing left to choose: whatever the step is, it is one."
    got = direction(np.array(g, float), np.array(b, float), c, **ball)
    assert torch.isfinite(got.y).all() and np.isfinite([got.lam_star, got.nu_star]).all() and (got.y @ got.y)/2 <= .5 + 1e-9
    if abs(c) < 1 and any(b): assert c + np.dot(b, got.y.numpy()) <= 1e-6

# ---- curvature ------------------------------------------------------------------------------------------------------------------------
def tiny_policy(n_models=2, mode='absorbing', seed=0, features=('score_logit', 'index'), hidden=(3,), spread=1.):
    "A policy of few parameters, none of them nought."
    scaler = Scaler(tuple(features), (0.,)*len(features), (1.,)*len(features))
    policy = policy_module.RoutingPolicy(features, scaler, n_models, hidden, p_escalate=.4, mode=mode, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters(): p.data += spread*torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return policy

def soft_set(pi, kappa, temp):
    "S with sigmoid((pi - kappa)/temp) for the indicator, as the definition has it."
    w = torch.sigmoid((pi - kappa)/temp)*(pi > 0)
    return w/w.sum(-1, keepdim=True)

def flat(tensors): return torch.cat([t.reshape(-1) for t in tensors])

def with_parameters(policy, theta, x, at):
    out, i = {}, 0
    for k, p in policy.named_parameters(): out[k] = theta[i:i + p.numel()].view_as(p); i += p.numel()
    return torch.func.functional_call(policy, out, (x, at))

curvatures = [(2, 'absorbing', False), (3, 'absorbing', False), (3, 'absorbing', True), (3, 'per_step', False)]

def curvature_case(n_models, mode, moved):
    policy, r = tiny_policy(n_models, mode), np.random.default_rng(0)
    x, weight = f64(r.normal(size=(5, 2))), f64(r.dirichlet(np.ones(5)))
    return policy, x, weight, torch.tensor([0, 1, 0, 2, 1]) if moved else torch.zeros(5, dtype=torch.long)

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
    rows = cpo_module.fisher_rows(policy, x, .25, .1, weight, at)
    assert torch.isfinite(rows).all() and not rows.requires_grad
    assert torch.allclose(rows.T @ rows, F, rtol=1e-9, atol=1e-12) and F.abs().max() > 1e-3
    v = torch.randn(len(F), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for damping in (0., .1): assert torch.allclose(cpo_module.fisher_vector_product(rows, v, damping), F @ v + damping*v, rtol=1e-9, atol=1e-12)

@pytest.mark.parametrize('n_models, mode, moved', curvatures)
def test_fisher_is_the_curvature_of_the_divergence(n_models, mode, moved):
    policy, x, weight, at = curvature_case(n_models, mode, moved)
    theta = flat(policy.parameters()).detach()
    old = soft_set(policy(x, at).exp(), .25, .1).detach()
    def divergence(theta):
        new = soft_set(with_parameters(policy, theta, x, at).exp(), .25, .1)
        gap = torch.where(old > 0, new.clamp_min(1e-300).log() - old.clamp_min(1e-300).log(), 0.)
        return (weight*(new*gap).sum(-1)).sum()
    H, rows = torch.autograd.functional.hessian(divergence, theta), cpo_module.fisher_rows(policy, x, .25, .1, weight, at)
    assert torch.isfinite(H).all() and torch.allclose(rows.T @ rows, H, rtol=1e-7, atol=1e-10)

def test_fisher_at_the_start_is_where_everyone_is():
    policy, x, weight, _ = curvature_case(3, 'absorbing', False)
    assert torch.equal(cpo_module.fisher_rows(policy, x, .25, .1, weight), cpo_module.fisher_rows(policy, x, .25, .1, weight, torch.zeros(5, dtype=torch.long)))

@given(st.integers(1, 30), st.floats(-3, 3), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_conjugate_gradients_solve(n, size, seed):
    r = np.random.default_rng(seed)
    A = r.normal(size=(n, n))
    H, b = f64(A @ A.T/n + .1*np.eye(n)), f64(r.normal(size=n)*10**size)
    x = cpo_module.conjugate_gradients(lambda v: H @ v, b, iters=5*n + 10)
    assert torch.allclose(x, torch.linalg.solve(H, b), rtol=1e-6, atol=1e-7*10**size)

def test_conjugate_gradients_need_a_step_per_eigenvalue():
    "Three different eigenvalues: exact after three products; nought stays nought."
    Q = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    H, b, calls = Q @ torch.diag(f64([.1]*20 + [1.]*15 + [7.]*5)) @ Q.T, f64(np.ones(40)), []
    x = cpo_module.conjugate_gradients(lambda v: (calls.append(1), H @ v)[1], b, iters=3)
    assert torch.allclose(H @ x, b, atol=1e-9) and len(calls) == 3
    assert not cpo_module.conjugate_gradients(lambda v: H @ v, 0*b).any()

# ---- sets and ratios ------------------------------------------------------------------------------------------------------------------
def test_an_importance_ratio_by_hand():
    target, behaviour = f64([.5, 0., 1., .5, .3]), f64([.25, .5, .1, .5, .6])
    assert policy_module.importance_ratio(target, behaviour).tolist() == [2., 0., 2., 1., .5]
    assert np.allclose(policy_module.importance_ratio(target, behaviour, None), [2., 0., 10., 1., .5])
    assert np.allclose(policy_module.importance_ratio(target, behaviour, 1.), [1., 0., 1., 1., .5])

def test_importance_ratios_average_to_one():
    pi = f64(np.random.default_rng(0).dirichlet(np.ones(3), 50))
    S = policy_module.threshold_probs(pi.log(), .3)
    assert torch.allclose((pi*policy_module.importance_ratio(S, pi, None)).sum(-1), torch.ones(50).double())

probabilities = st.integers(2, 4).flatmap(lambda k: st.lists(st.integers(0, 12), min_size=k, max_size=k)).filter(any).map(lambda w: [x/sum(w) for x in w])

@given(probabilities, st.one_of(st.floats(0, 1), st.sampled_from([.25, .5, 1/3])), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_sets_as_the_definition_has_them(pi, kappa, tie, data):
    if tie: kappa = data.draw(st.sampled_from(pi)) # a model exactly at the threshold belongs to the set
    at = data.draw(st.integers(0, len(pi) - 1))
    chosen = [a for a, p in enumerate(pi) if p >= kappa and p > 0]
    assert policy_module.escalate(pi, kappa, at) == (max(chosen) if chosen else at)
    log_pi = f64(pi).log() # compare with the very numbers that exp gives back, or a tie is decided by rounding
    inside = [a for a, p in enumerate(log_pi.exp().tolist()) if p >= kappa and pi[a] > 0] or [next(a for a, p in enumerate(pi) if p > 0)]
    assert policy_module.threshold_probs(log_pi, kappa).tolist() == [(a in inside)/len(inside) for a in range(len(pi))]

def test_many_states_at_once():
    pi = np.random.default_rng(0).dirichlet(np.ones(3), (4, 5))
    at = np.random.default_rng(1).integers(0, 3, (4, 5))
    assert policy_module.escalate(pi, .6, at).tolist() == [[int(policy_module.escalate(p, .6, a)) for p, a in zip(*row)] for row in zip(pi, at)]
    assert (policy_module.escalate(pi, 0.) == 2).all() and (policy_module.escalate(pi, 1.1, at) == at).all()

def test_two_models_and_the_papers_last_equation():
    p = np.linspace(0, 1, 101)
    for kappa in (.01, .2, .5, .5001, .9): assert (policy_module.escalate(np.c_[1 - p, p], kappa) == (p >= kappa)).all()

@given(st.integers(2, 4), st.floats(.02, .5), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_soft_set_hardens(k, kappa, seed):
    pi = f64(np.random.default_rng(seed).dirichlet(np.ones(k), 20))
    away = ((pi - kappa).abs() > .01).all(-1) & (pi >= kappa).any(-1)
    hard, gaps = policy_module.threshold_probs(pi.log(), kappa), []
    for temp in (.1, .01, .001, .0001):
        soft = policy_module.threshold_probs(pi.log(), kappa, temp)
        assert torch.allclose(soft.sum(-1), torch.ones(20).double()) and (temp < .001 or torch.allclose(soft, soft_set(pi, kappa, temp), rtol=1e-6, atol=1e-9))
        gaps.append(float((soft - hard)[away].abs().max()) if away.any() else 0.)
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 1e-9

def test_a_model_that_may_not_be_chosen_stays_out():
    log_pi = f64([[0., .7, .3], [0., 0., 1.]]).log()
    for temp in (0., .01, .1):
        for kappa in (0., .2, .5, .9):
            S = policy_module.threshold_probs(log_pi, kappa, temp)
            assert (S[:, 0] == 0).all() and S[1].tolist() == [0, 0, 1] and torch.isfinite(S).all()
    assert policy_module.threshold_probs(log_pi, .9)[0].tolist() == [0, 1, 0], 'an empty set: the current model, the first that may be chosen'

# ---- kappa ----------------------------------------------------------------------------------------------------------------------------
def miss_curve(kappa): return .12/(1 + np.exp(-(kappa - .3)/.06)) # rises with kappa: who escalates less, misses more

def stream(seed, n=24_000, alpha=.02, **kw):
    "Kappa and misses of a stream of problems, one at a time."
    draws, kappa, kappas, misses = np.random.default_rng(seed).random(n), .1, np.zeros(n), np.zeros(n)
    for k, u in enumerate(draws):
        misses[k] = u < miss_curve(kappa)
        kappa = kappas[k] = policy_module.update_threshold(kappa, misses[k], k + 1, alpha, **kw)
    return kappas, misses

@pytest.mark.parametrize('seed', range(5))
def test_kappa_settles_where_the_misses_are_alpha(seed):
    kappas, misses = stream(seed)
    star = .3 - .06*np.log(.12/.02 - 1)
    assert abs(misses[8000:].mean() - .02) < .005 and abs(kappas[8000:].mean() - star) < .02
    assert abs(miss_curve(kappas[8000:]).mean() - .02) < .005, 'not only these draws: the chance of a miss'

@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('start', [.1, .4])
def test_the_printed_sign_runs_away(seed, start):
    "A miss raises kappa, and a higher kappa misses more: one wall or the other, never alpha."
    draws, kappa, tail = np.random.default_rng(seed).random(24_000), start, []
    for k, u in enumerate(draws, 1):
        tail.append(u < miss_curve(kappa))
        kappa = policy_module.update_threshold(kappa, tail[-1], k, sign='printed')
    assert min(kappa, .5 - kappa) < .1 and abs(np.mean(tail[8000:]) - .02) > .01

@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(0, .4), st.floats(.1, .6), st.sampled_from(['corrected', 'printed']))
@settings(max_examples=100, deadline=None)
def test_kappa_keeps_its_bounds_and_moves_the_right_way(misses, low, width, sign):
    kappa = low + width/2
    for k, miss in enumerate(misses, 1):
        new = policy_module.update_threshold(kappa, miss, k, alpha=.1, eta=1., sign=sign, low=low, high=low + width)
        assert isinstance(new, float) and low <= new <= low + width
        assert (new - kappa)*(miss - .1)*(1 if sign == 'printed' else -1) >= 0
        kappa = new

def test_kappa_by_hand():
    assert np.isclose(policy_module.update_threshold(.25, 1, 1), .25 - .1*.98) and np.isclose(policy_module.update_threshold(.25, 0, 32), .25 + .1/8*.02)
    assert np.isclose(policy_module.update_threshold(.25, .4, 100, decay=0.), .25 - .1*.38)
    with pytest.raises(ValueError, match="unknown sign 'print'.*did you mean 'printed'"): policy_module.update_threshold(.25, 0, 1, sign='print')

QUICK = dict(steps=10, hidden=(8, 8), progress=False)

def bits(trained):
    return [p.numpy().tobytes() for p in trained.policy.state_dict().values()] + [trained.kappa] + [(k, v.tobytes()) for k, v in sorted(trained.log.items())]

# ---- environments ---------------------------------------------------------------------------------------------------------------------
def toy_env(n=60, split='train', seed=0, **kw): return training_module.TableEnv(toy_table(n, split, seed), ('score_logit', 'index', 'final'), **kw)

def fitted_policy(env, seed=0, spread=.7, hidden=(6,)):
    "An untrained policy that tells states apart."
    policy = policy_module.RoutingPolicy(env.features, env.scaler, env.n_models, hidden, p_escalate=.3, mode=env.mode, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters(): p.data += spread*torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return policy

def pi_escalate(policy, table):
    with torch.no_grad(): return policy(policy.encode(table.obs, table.features))[..., 1].exp().numpy()

def first(hits, T): return np.array([next((t for t in range(n) if h[t]), n) for h, n in zip(hits, T)])

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('unit', ['paper_flops', 'full_flops'])
def test_deploying_is_escalating_step_by_step(on_escalate, unit):
    table = toy_table(80, 'train')
    env = training_module.TableEnv(table, ('score_logit', 'index', 'final'), on_escalate, unit)
    policy = fitted_policy(env)
    pi, share = pi_escalate(policy, table), table.large_only()[unit].mean()
    assert len(env) == 80 and env.models == table.models and (env.mode, env.n_models, env.on_escalate) == ('absorbing', 2, on_escalate)
    for kappa in (0., .1, .25, .5, .9, 1.):
        stop = first([[policy_module.escalate([1 - p, p], kappa) == 1 for p in row] for row in np.nan_to_num(pi)], table.n_steps)
        want, got = table.outcome(stop, on_escalate), env.deploy(policy, kappa)
        assert np.allclose(got['cost'], want[unit]/share, rtol=1e-12) and (got['right'] == want['correct']).all()
        assert (got['miss'] == ((want['correct'] == 0) & (table.correct[:, 0] == 1))).all()
        rows = np.array([5, 5, 70, 0])
        some = env.deploy(policy, kappa, rows)
        assert all((some[k] == got[k][rows]).all() for k in ('cost', 'right', 'miss'))

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('unit', ['paper_flops', 'full_flops'])
def test_rollouts_are_walks_whose_costs_add_up(on_escalate, unit):
    table = toy_table(80, 'train')
    env = training_module.TableEnv(table, ('score_logit', 'index', 'final'), on_escalate, unit)
    policy, rows = fitted_policy(env), np.random.default_rng(0).integers(0, 80, 3000)
    r, pi = env.sample(policy, rows, np.random.default_rng(1)), pi_escalate(policy, table)[rows]
    T, inside, act = table.n_steps[rows], r.inside.numpy(), r.act.numpy()
    stop = first(act == 1, T)
    assert (inside == (np.arange(inside.shape[1]) <= np.minimum(stop, T - 1)[:, None])).all() and not act[~inside].any()
    assert np.allclose(r.mu.numpy()[inside], np.where(act == 1, pi, 1 - pi)[inside])
    outcomes = [{k: v[i] for k, v in table.outcome(np.minimum(t, table.n_steps), on_escalate).items()} for i, t in zip(rows, stop)]
    share = table.large_only()[unit].mean()
    assert np.allclose((r.fixed + r.cost.sum(1)).numpy(), [o[unit]/share for o in outcomes])
    assert not r.cost.numpy()[~inside].any() and (r.cost.numpy()[inside] >= 0).all() and (r.fixed > 0).all()
    right, large = np.array([o['correct'] for o in outcomes]), table.correct[rows, 0]
    assert (r.right.numpy() == right).all() and (r.large_right.numpy() == large).all() and (r.miss.numpy() == (1 - right)*large).all()
    known = r.x.numpy()[inside]
    assert np.allclose(known, policy.encode(table.obs[rows], table.features).numpy()[inside])

def test_actions_are_drawn_from_pi():
    table = toy_table(6, 'train', seed=3)
    env = training_module.TableEnv(table, ('score_logit', 'index', 'final'))
    policy = fitted_policy(env)
    pi, rows = np.nan_to_num(pi_escalate(policy, table)), np.repeat(np.arange(6), 20_000)
    r = env.sample(policy, rows, np.random.default_rng(0))
    stop = first(r.act.numpy() == 1, table.n_steps[rows])
    for i, T in enumerate(table.n_steps):
        want = np.array([pi[i, t]*np.prod(1 - pi[i, :t]) for t in range(T)] + [np.prod(1 - pi[i, :T])])
        seen = np.bincount(stop[rows == i], minlength=T + 1)/20_000
        assert (np.abs(seen - want) < 5*np.sqrt(want*(1 - want)/20_000) + 1e-9).all()

def test_encoding_standardises_own_features_in_their_order():
    table = toy_table(30, 'train')
    env = training_module.TableEnv(table, ('final', 'score_logit'))
    policy = fitted_policy(env)
    x = policy.encode(table.obs, table.features).numpy()
    inside = np.arange(table.obs.shape[1]) < table.n_steps[:, None]
    assert x.dtype == np.float64 and (x[~inside] == 0).all()
    assert np.allclose(x[inside].mean(0), 0) and np.allclose(x[inside].std(0), 1)
    shuffled = table.obs[..., [2, 0, 1]]
    assert (policy.encode(shuffled, [table.features[i] for i in (2, 0, 1)]).numpy() == x).all()
    score = table.obs[..., 0][inside]
    assert np.allclose(x[inside][:, 1], (score - score.mean())/score.std())

# ---- gradients ------------------------------------------------------------------------------------------------------------------------
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
    return dict(cost=lambda o: o[unit]/share, joint=lambda o: (o['correct'] == 0)*large, union=lambda o: large - o['correct'])

@pytest.mark.parametrize('on_escalate, constraint', [('append', 'joint'), ('regenerate', 'union')])
def test_exact_gradients_are_those_of_the_expectation(on_escalate, constraint):
    table = toy_table(25, 'train')
    env = training_module.TableEnv(table, ('score_logit', 'index', 'final'), on_escalate)
    policy = fitted_policy(env)
    theta = flat(policy.parameters()).detach().requires_grad_()
    estimate, wants = cpo_module.exact_estimate(policy, env, np.arange(25), .25, .1, constraint), outcomes_of(table)
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
        env = training_module.TableEnv(table, tabular.FEATURES, on_escalate)
        policy = fitted_policy(env)
        with torch.no_grad(): S = policy_module.threshold_probs(policy(policy.encode(tabular.observations(), tabular.FEATURES)), .25, .1)[:, 1].numpy()
        cost, miss = tabular.evaluate(S, on_escalate)
        estimate = cpo_module.exact_estimate(policy, env, np.arange(len(table)), .25, .1)
        assert np.isclose(estimate.cost*table.large_only()['paper_flops'].mean(), cost) and np.isclose(estimate.miss, miss)
        deployed = env.deploy(policy, .25)
        got = deployed['cost'].mean()*table.large_only()['paper_flops'].mean(), deployed['miss'].mean()
        assert np.allclose(got, tabular.evaluate(tabular.policy_hazards(policy, .25)[0], on_escalate))

def surrogate_gradients(table, policy, kappa, temp, on_escalate):
    "What the sampled surrogates average to: states as pi visits them, actions and action values of S. By rows and steps, from the table."
    x, theta = policy.encode(table.obs, table.features), flat(policy.parameters()).detach().requires_grad_()
    pi = pi_escalate(policy, table)
    h = soft_set(with_parameters(policy, theta, x, None).exp(), kappa, temp)[..., 1]
    fixed = h.detach().numpy()
    out = []
    for outcome in (outcomes_of(table)['cost'], outcomes_of(table)['joint']):
        columns = np.stack([outcome(table.outcome(np.minimum(t, table.n_steps), on_escalate)) for t in range(table.obs.shape[1] + 1)], 1)
        total = 0.
        for i, T in enumerate(table.n_steps):
            to_go = columns[i, T]
            for t in reversed(range(T)):
                visit = np.prod(1 - pi[i, :t])
                total = total + visit*h[i, t]*float(columns[i, t] - to_go) # the value of staying does not depend on the action taken
                to_go = fixed[i, t]*columns[i, t] + (1 - fixed[i, t])*to_go
        out.append(torch.autograd.grad(total/len(table), theta, retain_graph=True)[0])
    return out

UNCLIPPED = dict(rho_bar=1e12, v_rho_bar=1e12, c_bar=1e12)

def averaged(env, policy, critics, batches=60, size=2500):
    "Sampled gradients (batch by batch) with nothing clipped, and the estimate of the miss rate."
    rng, out = np.random.default_rng(0), []
    for _ in range(batches):
        e, _ = cpo_module.sampled_estimate(policy, critics, env.sample(policy, rng.integers(0, len(env), size), rng), .25, .1, **UNCLIPPED)
        out.append((e.g, e.b, e.miss))
    return [torch.stack([o[i] for o in out]) for i in (0, 1)] + [np.array([o[2] for o in out])]

def agree(samples, want):
    "Do the batches average to this vector? In its own direction and in ten random ones, up to 4.5 standard errors; and almost parallel."
    ways = torch.cat([want[None], torch.randn(10, len(want), generator=torch.Generator().manual_seed(0), dtype=torch.float64)])
    along, goal = (samples @ ways.T).numpy(), (want @ ways.T).numpy()
    error = along.std(0, ddof=1)/np.sqrt(len(along))
    mean = samples.mean(0)
    return (np.abs(along.mean(0) - goal) < 4.5*error).all() and float(mean @ want/mean.norm()/want.norm()) > .97

@pytest.mark.parametrize('on_escalate', READINGS)
def test_sampled_gradients_average_to_the_surrogates(on_escalate):
    table = tabular.take(toy_table(40, 'train'), np.arange(12))
    env = training_module.TableEnv(table, ('score_logit', 'index', 'final'), on_escalate)
    policy, critics = fitted_policy(env), [policy_module.ValueNet(3, (4,), seed) for seed in (1, 2)]
    (g, b, miss), (want_g, want_b) = averaged(env, policy, critics), surrogate_gradients(table, policy, .25, .1, on_escalate)
    assert agree(g, want_g) and agree(b, want_b)
    J = cpo_module.exact_estimate(policy, env, np.arange(12), .25, .1).miss
    assert abs(miss.mean() - J) < 4.5*miss.std(ddof=1)/np.sqrt(len(miss))

def one_decision(table):
    "The table's problems, decided once: after the first step, which is made the last."
    cut = {k: getattr(table, k)[:, :1] for k in ('obs', 'small_tokens', 'small_prompt')}
    cut |= {k: np.c_[getattr(table, k)[:, :1], 0*getattr(table, k)[:, :1]] for k in ('large_tokens', 'large_prompt', 'large_steps')}
    last = table.correct[np.arange(len(table)), table.n_steps]
    return replace(table, n_steps=np.ones(len(table), int), correct=np.c_[table.correct[:, 0], last], **cut)

def test_with_one_decision_the_two_estimators_are_one():
    "Where nothing depends on how a state was reached, the surrogate's gradient is the gradient, whatever the critics say."
    table = one_decision(toy_table(40, 'train'))
    env = training_module.TableEnv(table, ('score_logit', 'index'))
    policy = fitted_policy(env)
    exact = cpo_module.exact_estimate(policy, env, np.arange(40), .25, .1)
    g, b, _ = averaged(env, policy, [policy_module.ValueNet(2, (4,), seed) for seed in (3, 4)], batches=40)
    assert agree(g, exact.g) and exact.g.norm() > 1e-3
    assert exact.b.norm() < 1e-12 or agree(b, exact.b)

def test_union_counts_accuracy_instead_of_misses():
    env = toy_env(50)
    policy, rng = fitted_policy(env), np.random.default_rng(0)
    critics = [policy_module.ValueNet(3, (4,), seed) for seed in (1, 2)]
    levels = [cpo_module.sampled_estimate(policy, critics, env.sample(policy, rng.integers(0, 50, 4000), rng), .25, .1, 'union', **UNCLIPPED)[0].miss for _ in range(20)]
    want = cpo_module.exact_estimate(policy, env, np.arange(50), .25, .1, 'union').miss
    assert abs(np.mean(levels) - want) < 4.5*np.std(levels)/np.sqrt(19)
    assert want <= cpo_module.exact_estimate(policy, env, np.arange(50), .25, .1, 'joint').miss, 'P(R=1) + P(R_M=0) is at least P(R=1 or R_M=0)'

# ---- line search ----------------------------------------------------------------------------------------------------------------------
def step_to(y, case): return cpo_module.Direction(f64(y), 1., 0., case)

@pytest.mark.parametrize('case, c, slack, cost, miss, fraction', [
    (2, -.1, 0., lambda x: -x, lambda x: 0.*x, .8**3),        # the divergence x^2 <= .3 needs x <= .548
    (2, -.1, 0., lambda x: x, lambda x: 0.*x, 0.),            # never cheaper
    (1, .1, 0., lambda x: x, lambda x: -x, .8**3),            # a recovery may cost more
    (2, -.1, 0., lambda x: -x, lambda x: .5*x, .8**8),        # no more misses than there was room for: x <= .2
    (0, .1, 0., lambda x: x, lambda x: x, 0.),                # infeasible and no better
    (2, 0., .25, lambda x: -x, lambda x: .5*x, .8**4)])       # slack: x <= .5
def test_line_search_takes_the_longest_step_allowed(case, c, slack, cost, miss, fraction):
    measure = lambda theta: ((theta[0].item() - 3)**2, cost(theta[0].item() - 3), miss(theta[0].item() - 3))
    theta, accepted, kl = cpo_module.line_search(f64([3.]), step_to([1.], case), measure, c, delta=.3, slack=slack)
    assert np.isclose(accepted, fraction) and np.isclose(theta[0].item(), 3 + fraction) and np.isclose(kl, fraction**2)

def test_line_search_distrusts_nan():
    bad = lambda theta: (float('nan'), 0., 0.) if theta[0] > 3.6 else ((theta[0].item() - 3)**2, 0., 0.)
    assert np.isclose(cpo_module.line_search(f64([3.]), step_to([1.], 2), bad, -1., delta=1.)[1], .8**3)
    for bad in ((0., float('nan'), 0.), (0., 0., float('nan'))):
        assert cpo_module.line_search(f64([3.]), step_to([1.], 2), lambda theta: bad if theta[0] > 3 else (0., 0., 0.), -1.)[1] == 0.

@pytest.mark.parametrize('seed', range(4))
def test_a_policy_step_stays_in_the_trust_region_and_helps(seed):
    env = toy_env(60)
    policy, rows = fitted_policy(env, seed), np.arange(60)
    before = cpo_module.exact_estimate(policy, env, rows, .25, .1)
    for alpha, recovers in ((before.miss/2, True), (before.miss*2, False)):
        start = [p.detach().clone() for p in policy.parameters()]
        info = cpo_module.policy_step(policy, cpo_module.exact_estimate(policy, env, rows, .25, .1), before.miss - alpha, .25, .1, rng=np.random.default_rng(0))
        after = cpo_module.exact_estimate(policy, env, rows, .25, .1)
        assert info['accepted'] > 0 and 0 < info['kl'] <= .01 and (info['optim_case'] <= 1) == recovers
        if recovers: assert after.miss < before.miss
        else: assert after.cost < before.cost and after.miss <= alpha + 1e-12
        for p, old in zip(policy.parameters(), start): p.data.copy_(old)

# ---- the chain whose optimum is known -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('on_escalate', READINGS)
def test_the_table_is_the_chain(on_escalate):
    "Any router that only looks at states costs and misses the same in the rows as in the chain."
    table, r = tabular.chain_table(), np.random.default_rng(0)
    for chances in (r.random(len(tabular.STATES)), np.zeros(len(tabular.STATES)), np.ones(len(tabular.STATES)), tabular.optimum(.1, on_escalate)[2]):
        assert np.allclose(tabular.replay_hazard(table, tabular.state_hazard(table, chances), on_escalate), tabular.evaluate(chances, on_escalate), rtol=1e-12)

def lagrangian(price, on_escalate):
    "The least cost + price*miss of any router, by backward induction: cost and miss of the one that has it."
    run, leave, miss, end, P, start = tabular.chain_model(on_escalate)
    stop, value, h = np.nan_to_num(end), np.zeros(len(run)), np.zeros(len(run))
    for i in reversed(range(len(run))):
        stay, go = P[i] @ value + price*stop[i], leave[i] + price*miss[i]
        value[i], h[i] = run[i] + min(stay, go), go < stay
    return start @ value, tabular.evaluate(h, on_escalate)

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('alpha', [.08, .11, .2])
def test_the_linear_program_is_the_best_router(on_escalate, alpha):
    "Strong duality: the largest lower bound of any price of a miss is the optimum; and the router it names does cost and miss that."
    cost, miss, chances = tabular.optimum(alpha, on_escalate)
    low, high, bound = 0., 5e10, lambda price: lagrangian(price, on_escalate)[0] - price*alpha
    for _ in range(80): # concave in the price
        a, b = low + (high - low)/3, high - (high - low)/3
        low, high = (a, high) if bound(a) < bound(b) else (low, b)
    assert np.isclose(bound(low), cost, rtol=1e-9)
    assert np.allclose(tabular.evaluate(chances, on_escalate), (cost, miss)) and miss <= alpha + 1e-12
    assert ((chances > 1e-9) & (chances < 1 - 1e-9)).sum() <= 1, 'one constraint, one state with a coin'

def test_training_finds_the_optimum():
    "Twenty seeds with exact gradients: as deployed, and as S, within 3 % of the least cost, and misses within a standard error of alpha."
    alpha, n = .11, len(tabular.chain_table())
    found = np.array([tabular.train(seed, alpha, **tabular.RUNS['exact, all rows']) for seed in range(20)]) # [seed, reading, number]
    cost, miss, own = np.median(found, 0).T
    assert (cost <= .03).all() and (miss <= alpha + np.sqrt(alpha*(1 - alpha)/n)).all(), found
    assert (own <= .01).all(), 'nor is there a better router with as many misses'

# ---- calibration ----------------------------------------------------------------------------------------------------------------------
def chain_env(rows=None, on_escalate='regenerate'):
    table = tabular.chain_table('calibration')
    return training_module.TableEnv(table if rows is None else tabular.take(table, rows), tabular.FEATURES, on_escalate, scaler=CHAIN_SCALER)

CHAIN_SCALER = fit_scaler(tabular.chain_table().obs, tabular.FEATURES)

def chain_policy(seed=0, spread=.7):
    policy = policy_module.RoutingPolicy(tabular.FEATURES, CHAIN_SCALER, hidden=(6,), p_escalate=.3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters(): p.data += spread*torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return policy

def true_miss(policy, kappas):
    "Miss rates of Gamma on the chain itself."
    with torch.no_grad(): pi = policy(policy.encode(tabular.observations(), tabular.FEATURES))[:, 1].exp().numpy()
    return tabular.evaluate(pi >= np.reshape(kappas, (-1, 1)), 'regenerate')[1]

@pytest.mark.parametrize('alpha, n, seed', [(.1, 60, 0), (.05, 120, 1)])
@pytest.mark.parametrize('learnt', [False, True])
def test_calibrated_misses_stay_below_alpha_on_average(alpha, n, seed, learnt):
    "Conformal risk control: over calibration sets and problems, the next problem is missed with probability at most alpha."
    r, policy = np.random.default_rng(seed), chain_policy(seed)
    path = training_module.threshold_path(policy, chain_env()) if learnt else None
    found = [training_module.calibrate_threshold(policy, chain_env(r.integers(0, len(tabular.chain_table()), n)), alpha, path=path) for _ in range(1000)]
    miss = true_miss(policy, [c.kappa for c in found])
    assert all(c.met and c.n == n for c in found)
    assert alpha/4 < miss.mean() <= alpha + 3*miss.std()/np.sqrt(1000), 'and the bound is not bought by escalating everything'

def test_calibration_takes_the_largest_threshold_with_only_safe_ones_below():
    for seed in range(6):
        policy, env = chain_policy(seed, 1.5), chain_env(np.random.default_rng(seed).integers(0, 200, 90))
        c = training_module.calibrate_threshold(policy, env, .08)
        grid = np.linspace(0, 1, 2001)
        bound = np.array([(90*env.deploy(policy, k)['miss'].mean() + 1)/91 for k in grid])
        unsafe = grid[bound > .08]
        assert c.met and c.bound <= .08 and np.isclose(c.bound, (90*c.miss + 1)/91)
        assert not len(unsafe) or c.kappa < unsafe[0] + 1e-12, 'no smaller threshold is unsafe'
        mine = {k: v.mean() for k, v in env.deploy(policy, c.kappa).items()  if k != 'stop'}
        assert np.isclose(mine['miss'], c.miss) and np.isclose(mine['right'], c.accuracy) and np.isclose(mine['cost'], c.cost)
        safe = grid[grid < (unsafe[0] if len(unsafe) else 2.)]
        assert np.isclose(env.deploy(policy, safe[-1])['miss'].mean(), c.miss), 'nor is there a larger one'

def test_calibration_does_not_jump_over_unsafe_thresholds():
    "Here escalating after the second step goes wrong, after the first or the third one it does not: safe, unsafe, safe. Only the first stretch counts."
    table = tabular.chain_table('calibration')
    table = tabular.take(table, np.flatnonzero((table.n_steps == 3) & (table.correct[:, 0] == 1))[:120])
    env = training_module.TableEnv(replace(table, correct=np.tile([1., 0., 1., 0.], (120, 1))), ('index',), 'regenerate')
    policy = fitted_policy(env, hidden=())
    policy.net[0].weight.data, policy.net[0].bias.data = f64([[0.], [1.2]]), f64([0., 0.]) # pi(escalate) rises with the index: .19, .5, .81
    miss = [env.deploy(policy, kappa)['miss'].mean() for kappa in (.1, .3, .7, .9)]
    c = training_module.calibrate_threshold(policy, env, .1)
    assert miss == [0, 1, 0, 1] and c.met and c.kappa < .19 and c.miss == 0

def one_line(e):
    text = str(getattr(e, 'value', getattr(e, 'message', e)))
    assert text and '\n' not in text and len(text) < 300, text
    return text

def test_too_few_problems_to_calibrate():
    with pytest.warns(UserWarning, match=r'no threshold keeps the bound within 0.02 on 40 problems.*use more calibration problems') as seen:
        c = training_module.calibrate_threshold(chain_policy(), chain_env(np.arange(0, 280, 7)), .02)
    assert len(seen) == 1 and one_line(seen[0]) and not c.met and c.miss == 0 and c.bound > .02, 'the safest, and not a promise'
    for alpha in (0, 1, 1.5, -1, float('nan')):
        with pytest.raises(ValueError, match='alpha=') as e: training_module.calibrate_threshold(chain_policy(), chain_env(), alpha)
        one_line(e)

def test_a_higher_accuracy_is_a_lower_threshold():
    env, policy = chain_env(), chain_policy(2)
    ends = env.deploy(policy, 1.)['right'].mean(), env.deploy(policy, 0.)['right'].mean()
    found = [training_module.calibrate_threshold(policy, env, target_accuracy=a) for a in np.linspace(ends[0], ends[1] - .01, 12)]
    assert all(c.met and c.accuracy >= a - 1e-12 for c, a in zip(found, np.linspace(ends[0], ends[1] - .01, 12)))
    kappas, cost = [c.kappa for c in found], [c.cost for c in found]
    assert kappas == sorted(kappas, reverse=True) and len(set(kappas)) > 3 and cost == sorted(cost)
    for bad in (0, 1, 1.2, 93):
        with pytest.raises(ValueError, match='target_accuracy=') as e: training_module.calibrate_threshold(policy, env, target_accuracy=bad)
        one_line(e)

@pytest.mark.parametrize('seed, n', [(0, 77), (0, 101), (0, 280), *((s, n) for s in range(1, 6) for n in range(40, 160, 3))])
def test_thresholds_fall_between_states(seed, n):
    "And never between two roundings of the same state, where the last bit of a sum would decide who escalates."
    policy, rows = policy_module.RoutingPolicy(tabular.FEATURES, CHAIN_SCALER, p_escalate=.3, seed=seed), np.random.default_rng(n).integers(0, 280, n)
    with torch.no_grad(): pi = policy(policy.encode(tabular.observations(), tabular.FEATURES))[:, 1].exp().numpy()
    kappas, env = training_module._thresholds(policy, chain_env(rows)), chain_env(rows)
    assert len(kappas) <= len(tabular.STATES) + 1 and np.abs(kappas[:, None] - pi).min() > 1e-12
    for kappa in kappas: assert (escalation_times(training_module.PolicyRouter(policy, 'regenerate'), env.table, 1 - kappa) == stopped(env, policy, kappa)).all()

def stopped(env, policy, kappa): return np.minimum(env.deploy(policy, kappa)['stop'].numpy(), env.table.n_steps)

# ---- at work --------------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def world(tmp_path_factory):
    "Toy problems, their outcome table and the tree they came from."
    from toy import toy_backends, toy_problems
    from stepwise_routing.run.store import RolloutStore, tree_settings
    from stepwise_routing.rollouts import RoutingTree, collect_rollouts
    from stepwise_routing.outcomes import outcome_table
    problems, backends = toy_problems(40), toy_backends(end=.15)
    with RolloutStore(tmp_path_factory.mktemp('store')/'toy.jsonl', tree_settings('toy', backends)) as store:
        tree = RoutingTree(backends, store)
        collect_rollouts(problems, tree)
        yield problems, outcome_table(problems, tree, 'train'), tree

def chain_states(problem, tree):
    "What a router sees of a problem's small chain, step by step."
    from stepwise_routing.rollouts import State
    steps = []
    while not steps or not (steps[-1].final or len(steps) >= tree.max_steps):
        steps.append(tree.kept(problem, '0'*len(steps), 0))
        yield State(problem, 0, tuple(steps), '0'*len(steps), 2)

@pytest.mark.parametrize('features', [policy_module.PAPER_FEATURES, policy_module.FULL_FEATURES, ('index',), ('final', 'model', 'score_prob')])
def test_router_scores_states_and_tables_alike(world, features):
    problems, table, tree = world
    env = training_module.TableEnv(table, features)
    policy = fitted_policy(env, spread=.4)
    router, pi = training_module.PolicyRouter(policy), pi_escalate(policy, table)
    scores = router.table_score(table)
    assert scores.shape == table.obs.shape[:2] and (np.isnan(scores) == (np.arange(scores.shape[1]) >= table.n_steps[:, None])).all()
    known = ~np.isnan(scores)
    assert np.abs(1 - pi[known] - scores[known]).max() < 1e-12 and (router.name, router.mode, router.start) == ('Ours', 'absorbing', 0)
    for i, problem in enumerate(problems):
        states = list(chain_states(problem, tree))
        assert np.abs(router.score(states) - scores[i, :len(states)]).max() < 1e-12 and len(states) == table.n_steps[i]
        assert [router.score([s])[0] for s in states[:2]] == pytest.approx(scores[i, :2][known[i, :2]].tolist(), abs=1e-12)

@pytest.mark.parametrize('on_escalate', READINGS)
def test_replayed_times_are_gamma_step_by_step(world, on_escalate):
    from stepwise_routing.rollouts import walk
    problems, table, tree = world
    env = training_module.TableEnv(table, on_escalate=on_escalate)
    policy = fitted_policy(env, spread=.4)
    router, pi = training_module.PolicyRouter(policy, on_escalate), np.nan_to_num(pi_escalate(policy, table))
    for kappa in (0., .1, .2, .3, .5, .7, 1.):
        want = first([[policy_module.escalate([1 - p, p], kappa) == 1 for p in row] for row in pi], table.n_steps)
        assert (escalation_times(router, table, 1 - kappa) == want).all()
        got, walked = replay(router, table, 1 - kappa), walk_outcome(walk(problems, router, 1 - kappa, tree), tree.specs)
        assert all((got[k] == walked[k]).all() for k in walked)
        assert np.allclose(got['paper_flops']/table.large_only()['paper_flops'].mean(), env.deploy(policy, kappa)['cost'])

# ---- walks ----------------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def three(tmp_path_factory):
    "Toy problems on a tree of three models, and observations to standardise on."
    from toy import toy_backends, toy_problems
    from stepwise_routing.confidence import observe
    from stepwise_routing.run.store import RolloutStore, tree_settings
    from stepwise_routing.rollouts import RoutingTree, walk
    problems, backends = toy_problems(12), toy_backends(3, end=.2)
    with RolloutStore(tmp_path_factory.mktemp('three')/'toy.jsonl', tree_settings('toy', backends)) as store:
        tree = RoutingTree(backends, store)
        obs = [observe(w.steps) for w in walk(problems, SmallOnly(), 0., tree)]
        yield problems, tree, fit_scaler(policy_module.policy_inputs(np.concatenate(obs), confidence_module.FEATURES, policy_module.PAPER_FEATURES), policy_module.PAPER_FEATURES)

@pytest.mark.parametrize('on_escalate', READINGS)
@pytest.mark.parametrize('unit', ['paper_flops', 'full_flops'])
def test_walking_is_reading_the_table(world, on_escalate, unit):
    "Absorbing, two models: live walks and the outcome table are one environment."
    problems, table, tree = world
    read = training_module.TableEnv(table, on_escalate=on_escalate, unit=unit)
    env, policy = training_module.TreeEnv(problems, tree, read.features, read.scaler, 'absorbing', on_escalate, unit=unit), fitted_policy(read, spread=.4)
    assert len(env) == 40 and env.models == read.models and env.n_models == 2 and np.isclose(env.share, table.large_only()[unit].mean())
    for kappa in (0., .15, .3, .6, 1.):
        got, want = env.deploy(policy, kappa), read.deploy(policy, kappa)
        assert np.allclose(got['cost'], want['cost']) and (got['right'] == want['right']).all() and (got['miss'] == want['miss']).all()
    rows = np.random.default_rng(0).integers(0, 40, 60)
    r = env.sample(policy, rows, np.random.default_rng(1))
    inside, act = r.inside.numpy(), r.act.numpy()
    stop, T = np.where(act.any(1), act.argmax(1), table.n_steps[rows]), table.n_steps[rows]
    assert (inside.sum(1) == np.minimum(stop + 1, T)).all() and act.any() and not act.all(1).all()
    outcomes = [table.outcome(np.minimum(t, table.n_steps), on_escalate) for t in range(table.obs.shape[1] + 1)]
    assert np.allclose((r.fixed + r.cost.sum(1)).numpy(), [outcomes[t][unit][i]/env.share for i, t in zip(rows, stop)])
    assert (r.large_right.numpy() == table.correct[rows, 0]).all() and not r.cost.numpy()[~inside].any() and not r.at.any()
    assert (r.right.numpy() == [outcomes[t]['correct'][i] for i, t in zip(rows, stop)]).all()
    assert np.allclose(r.x.numpy()[inside], read.x[rows][:, :inside.shape[1]].numpy()[inside])
    check_behaviour(policy, r)

def check_behaviour(policy, r):
    "mu is what pi gave to the action; where nothing was decided, nothing is divided by nought."
    with torch.no_grad(): pi = policy(r.x, r.at).exp().gather(-1, r.act[..., None])[..., 0]
    assert torch.allclose(r.mu[r.inside], pi[r.inside]) and (r.mu[~r.inside] == 1).all()

@pytest.mark.parametrize('n_models', [2, 3])
@pytest.mark.parametrize('mode', ['per_step', 'absorbing'])
@pytest.mark.parametrize('on_escalate', READINGS)
def test_deployed_walks_are_those_of_the_router(world, three, n_models, mode, on_escalate):
    from stepwise_routing.rollouts import walk
    problems, tree = (world[0][:12], world[2]) if n_models == 2 else three[:2]
    env = training_module.TreeEnv(problems, tree, policy_module.PAPER_FEATURES, three[2], mode, on_escalate, unit='full_flops')
    policy = fitted_policy(env, 1, .3)
    router = training_module.PolicyRouter(policy, on_escalate)
    paths = set()
    for kappa in (0., .1, .2, .35, .6, 1.):
        walks, got = walk(problems, router, 1 - kappa, tree), env.deploy(policy, kappa)
        assert np.allclose(got['cost'], walk_outcome(walks, tree.specs)['full_flops']/env.share)
        assert got['right'].tolist() == [w.correct for w in walks] and (got['miss'] == (1 - got['right'])*env.large_right).all()
        if mode == 'absorbing': assert all(list(w.path) == sorted(w.path) for w in walks)
        paths |= {m for w in walks for m in w.path}
    assert {'0', str(n_models - 1)} <= paths

@pytest.mark.parametrize('mode', ['per_step', 'absorbing'])
@pytest.mark.parametrize('on_escalate', READINGS)
def test_drawn_walks_of_three_models(three, mode, on_escalate):
    problems, tree, scaler = three
    env = training_module.TreeEnv(problems, tree, policy_module.PAPER_FEATURES, scaler, mode, on_escalate)
    policy = fitted_policy(env, 1, .3)
    rows = np.repeat(np.arange(12), 8)
    r = env.sample(policy, rows, np.random.default_rng(0))
    check_behaviour(policy, r)
    at, act = r.at.numpy()[r.inside], r.act.numpy()[r.inside]
    assert set(act) == {0, 1, 2} and (r.cost >= 0).all() and (r.fixed > 0).all() and r.inside.any(1).all()
    if mode == 'absorbing': assert (act >= at).all() and (at < 2).all(), 'no decision after the last model took over'
    elif on_escalate == 'append': assert (act < at).any()
    else: assert not at.any(), 'a step written again is not asked about; the small model writes the next one'
    again = env.sample(policy, rows, np.random.default_rng(0))
    assert all(torch.equal(getattr(r, k), getattr(again, k)) for k in ('x', 'at', 'act', 'mu', 'cost', 'right'))

def test_first_actions_are_drawn_from_pi(three):
    problems, tree, scaler = three
    env = training_module.TreeEnv(problems[:1], tree, policy_module.PAPER_FEATURES, scaler, 'absorbing')
    policy = fitted_policy(env, 1, .3)
    r = env.sample(policy, np.zeros(1500, int), np.random.default_rng(0))
    with torch.no_grad(): pi = policy(r.x[0, 0]).exp().numpy()
    seen = np.bincount(r.act[:, 0].numpy(), minlength=3)/1500
    assert (np.abs(seen - pi) < 5*np.sqrt(pi*(1 - pi)/1500)).all()

@pytest.mark.parametrize('n_models, mode', [(2, 'per_step'), (3, 'per_step'), (3, 'absorbing')])
def test_training_on_walks(world, three, n_models, mode):
    problems, tree = (world[0][:12], world[2]) if n_models == 2 else three[:2]
    env = training_module.TreeEnv(problems, tree, policy_module.PAPER_FEATURES, three[2], mode)
    once, again = (training_module.train_policy(env, alpha=.1, batch=4, **QUICK) for _ in range(2))
    assert bits(once) == bits(again) and all(torch.isfinite(p).all() for p in once.policy.parameters())
    assert once.policy.n_models == n_models and once.policy.mode == mode
    with pytest.raises(ValueError, match='exact.*needs the outcome table') as e: training_module.train_policy(env, estimator='exact', batch=4, **QUICK)
    one_line(e)

@pytest.mark.parametrize('logit', [-60., -40., 40., 60.])
def test_a_policy_that_is_very_sure_still_obeys_the_ends(logit):
    "kappa = 0 escalates at once, however small pi is."
    table = toy_table(10)
    policy = fitted_policy(training_module.TableEnv(toy_table(60, 'train'), table.features))
    policy.net[-1].weight.data.zero_()
    policy.net[-1].bias.data = f64([0., logit])
    router = training_module.PolicyRouter(policy)
    assert (policy_module.escalate(policy(policy.encode(table.obs, table.features)).exp().detach().numpy(), 0.) == 1).all()
    assert (escalation_times(router, table, 1. - 0.) == 0).all()

# ---- files ----------------------------------------------------------------------------------------------------------------------------
def saved(folder, **kw):
    env = toy_env()
    policy = fitted_policy(env)
    policy.save_pretrained(folder, .1 + .2, models=env.models, alpha=.02, **kw)
    return policy, env

def test_a_saved_policy_comes_back_bit_by_bit(tmp_path):
    policy, env = saved(tmp_path/'a', note='x')
    back = policy_module.RoutingPolicy.from_pretrained(tmp_path/'a', features=env.features, models=env.models)
    assert all(torch.equal(a, b) for a, b in zip(policy.state_dict().values(), back.state_dict().values()))
    assert torch.equal(policy(env.x), back(env.x)) and back.kappa == .1 + .2
    assert (back.features, back.scaler, back.n_models, back.hidden, back.mode) == (policy.features, policy.scaler, 2, (6,), 'absorbing')
    assert back.config['note'] == 'x' and tuple(back.config['models']) == env.models
    table = toy_table(20)
    a, b = (training_module.PolicyRouter(p).table_score(table) for p in (policy, back))
    assert np.array_equal(a, b, equal_nan=True)
    back.save_pretrained(tmp_path/'b', back.kappa, models=env.models, alpha=.02, note='x')
    for name in ('model.safetensors', 'config.json'): assert (tmp_path/'a'/name).read_bytes() == (tmp_path/'b'/name).read_bytes()
    assert sorted(p.name for p in (tmp_path/'a').iterdir()) == ['config.json', 'model.safetensors']

def test_a_per_step_policy_of_three_models_comes_back(tmp_path):
    policy = tiny_policy(3, 'per_step')
    policy.save_pretrained(tmp_path, .25)
    back = policy_module.RoutingPolicy.from_pretrained(tmp_path)
    assert (back.mode, back.n_models) == ('per_step', 3) and torch.equal(back(torch.ones(2, 2).double()), policy(torch.ones(2, 2).double()))

def test_a_policy_for_others_is_refused(tmp_path):
    saved(tmp_path)
    for error, kw in (("looks at 'score_logit'", dict(features=('index', 'final'))),
                      ('trained for the models toy small and toy large', dict(models=('a', 'b')))):
        with pytest.raises(ValueError, match=error) as e: policy_module.RoutingPolicy.from_pretrained(tmp_path, **kw)
        one_line(e)

def rewrite(change):
    def damage(folder):
        config = json.loads((folder/'config.json').read_text())
        (folder/'config.json').write_text(json.dumps(change(config)))
    return damage

def cut(name, share):
    def damage(folder):
        whole = (folder/name).read_bytes()
        (folder/name).write_bytes(whole[:int(len(whole)*share)])
    return damage

def write(name, data): return lambda folder: (folder/name).write_bytes(data)
def without(key): return rewrite(lambda c: {k: v for k, v in c.items() if k != key})

DAMAGE = dict(half=cut('model.safetensors', .5), tail=cut('model.safetensors', .99), head=cut('model.safetensors', .01), empty=cut('model.safetensors', 0),
              half_config=cut('config.json', .5), empty_config=cut('config.json', 0), noise=write('model.safetensors', b'\xff'*100),
              encoding=write('config.json', b'\xff\xfe{}'), array=write('config.json', b'[1, 2]'), null=write('config.json', b'null'),
              no_kappa=without('kappa'), no_features=without('features'), no_format=without('format')) | {
    f'other_{k}': rewrite(lambda c, k=k, v=v: c | {k: v})
    for k, v in dict(format='something else', hidden=[7], mode='absorbed', kappa='high', mean=[0.], std=[1.]*4).items()}

@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_policy_says_so_in_one_line(tmp_path, damage):
    saved(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(ValueError) as e: policy_module.RoutingPolicy.from_pretrained(tmp_path)
    assert str(tmp_path) in one_line(e)

@pytest.mark.parametrize('name', ['model.safetensors', 'config.json'])
def test_a_missing_file_says_so_in_one_line(tmp_path, name):
    saved(tmp_path)
    (tmp_path/name).unlink()
    with pytest.raises(FileNotFoundError, match=name) as e: policy_module.RoutingPolicy.from_pretrained(tmp_path)
    one_line(e)

def test_no_pickle(tmp_path, monkeypatch):
    import pickle
    touched = tmp_path/'touched'
    class Evil:
        def __reduce__(self): return touched.write_text, ('x',)
    saved(tmp_path/'a')
    (tmp_path/'a'/'model.safetensors').write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError): policy_module.RoutingPolicy.from_pretrained(tmp_path/'a')
    assert not touched.exists()
    def never(*a, **kw): raise AssertionError('pickle')
    for where, names in ((pickle, ('load', 'loads', 'dump', 'dumps', 'Unpickler')), (torch, ('load', 'save'))):
        for name in names: monkeypatch.setattr(where, name, never)
    saved(tmp_path/'b')
    policy_module.RoutingPolicy.from_pretrained(tmp_path/'b')

# ---- training -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('options', [dict(), dict(estimator='exact', batch=None), dict(estimator='exact', batch=20), dict(batch=20, constraint='union')])
def test_same_seed_same_bits(options):
    env = toy_env(400 if options.get('batch', 5) is None else 60) # more states than the Fisher matrix takes: some are drawn
    once = bits(training_module.train_policy(env, seed=3, **QUICK, **options))
    torch.manual_seed(99); np.random.seed(99)
    assert bits(training_module.train_policy(env, seed=3, **QUICK, **options)) == once, 'whatever the state of the global generators'
    assert len({str(bits(training_module.train_policy(env, seed=s, **QUICK, **options))) for s in range(5)}) == 5

def test_training_leaves_the_global_generators_alone():
    torch.manual_seed(99); np.random.seed(99)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    training_module.train_policy(toy_env(), **QUICK)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()

def test_training_is_not_changed_by_the_number_of_threads():
    env, before = toy_env(200), torch.get_num_threads()
    once = bits(training_module.train_policy(env, estimator='exact', batch=None, **QUICK))
    try:
        torch.set_num_threads(2)
        assert bits(training_module.train_policy(env, estimator='exact', batch=None, **QUICK)) == once and torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)

def test_training_in_another_process_gives_the_same_bits():
    code = ('import sys; sys.path.insert(0, "tests"); from test_policy import *; import hashlib; '
            'print(hashlib.sha256(str(bits(training_module.train_policy(toy_env(), **QUICK))).encode()).hexdigest())')
    import hashlib, pathlib
    root = pathlib.Path(__file__).parents[1]
    there = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=root).stdout.strip()
    assert there == hashlib.sha256(str(bits(training_module.train_policy(toy_env(), **QUICK))).encode()).hexdigest()

@pytest.mark.parametrize('estimator', ['sampled', 'exact'])
@pytest.mark.parametrize('constraint', ['joint', 'union'])
@pytest.mark.parametrize('judged', [False, True])
def test_every_estimator_and_constraint_runs(estimator, constraint, judged):
    env = toy_env()
    verdicts = np.random.default_rng(0).random(env.inside.shape) < .7 if judged else None
    trained = training_module.train_policy(env, estimator=estimator, constraint=constraint, verdicts=verdicts, batch=10, **QUICK)
    assert 0 <= trained.kappa <= .5 and trained.settings['constraint'] == constraint
    assert all(len(v) == 10 and np.isfinite(np.asarray(v, float)).all() for v in trained.log.values())
    assert {'coverage', 'cost', 'accuracy', 'kappa', 'kl', 'lam_star', 'nu_star', 'optim_case', 'accepted'} <= set(trained.log)
    assert (trained.log['kl'] <= .01 + 1e-12).all() and set(trained.log['optim_case']) <= set(range(5))
    assert all(torch.isfinite(p).all() for p in trained.policy.parameters())

@pytest.mark.parametrize('on_escalate, unit', [('regenerate', 'paper_flops'), ('append', 'full_flops')])
def test_every_reading_trains(on_escalate, unit):
    for estimator in ('sampled', 'exact'): training_module.train_policy(toy_env(on_escalate=on_escalate, unit=unit), estimator=estimator, **QUICK)

def test_training_leaves_the_environment_as_it_was():
    env = toy_env()
    before = {k: v.clone() for k, v in vars(env).items() if torch.is_tensor(v)}
    training_module.train_policy(env, **QUICK)
    assert len(before) > 3 and all(torch.equal(v, vars(env)[k]) for k, v in before.items())

def test_local_verdicts_by_hand():
    "Verified: every step that the walk saw was judged correct, or escalating was in the set there."
    verdicts, allowed = np.array([[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]], bool), np.array([[0, 0, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1]], bool)
    inside = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)
    assert models_verifier.locally_verified(verdicts, allowed, inside).tolist() == [True, True, False, True]

def test_verdicts_only_excuse_misses():
    "All verified: no miss counts, so kappa only rises. None verified: as without a verifier, unless the walk escalated where it could."
    env = toy_env()
    free, none = (training_module.train_policy(env, verdicts=np.full(env.inside.shape, v), batch=20, **QUICK) for v in (True, False))
    plain = training_module.train_policy(env, batch=20, **QUICK)
    assert (free.log['missed'] == 0).all() and free.kappa > .25 and (none.log['missed'] <= 1 - none.log['coverage'] + 1e-12).all()
    assert np.allclose(plain.log['missed'], 1 - plain.log['coverage'])

def table_where(**change):
    table = toy_table(60, 'train')
    return replace(table, **{k: f(getattr(table, k).copy(), table) for k, f in change.items()})

def put(index, value):
    def change(x, table): x[index] = value; return x
    return change

def always(x, table, value=1.):
    x[np.arange(len(x)), table.n_steps] = value
    return x

@pytest.mark.parametrize('table, error', [
    (lambda: table_where(obs=put((3, 0, 0), np.nan)), "'score_logit' is nan at some steps"),
    (lambda: tabular.take(toy_table(10, 'train'), np.arange(0)), 'no problems'),
    (lambda: table_where(correct=put((slice(None), 0), 0.)), 'large model solves none of the 60'),
    (lambda: table_where(correct=always), 'small model solves all')])
def test_a_table_that_teaches_nothing_is_refused(table, error):
    with pytest.raises(ValueError, match=error) as e: training_module.TableEnv(table(), ('score_logit', 'index', 'final'))
    assert 'toy train' in one_line(e)

def test_a_feature_that_nobody_looks_at_may_be_nan():
    training_module.train_policy(training_module.TableEnv(table_where(obs=put((slice(None), slice(None), 0), np.nan)), ('index', 'final')), **QUICK)

BAD = [(dict(alpha=0), 'alpha=0'), (dict(alpha=1), 'alpha=1'), (dict(alpha=1.5), 'alpha=1.5'), (dict(alpha=-.1), 'alpha=-0.1'),
       (dict(alpha=float('nan')), 'alpha=nan'), (dict(estimator='exat'), "unknown estimator 'exat'.*did you mean 'exact'"),
       (dict(estimator='sample'), "did you mean 'sampled'"), (dict(constraint='Union'), "unknown constraint 'Union'.*did you mean 'union'"),
       (dict(sign='print'), "did you mean 'printed'"), (dict(batch=0), 'batch=0'), (dict(batch=61), 'batch=61.*1 to 60'), (dict(steps=0), 'steps=0'),
       (dict(delta=0.), 'delta=0.0'), (dict(p_escalate=0.), 'p_escalate=0.0'), (dict(kappa=.7), 'kappa=0.7'), (dict(temp=(0., 0.)), 'temp='),
       (dict(damping=-1.), 'damping='), (dict(verdicts=np.ones((60, 2), bool)), r'verdicts of shape \(60, 2\)')]

@pytest.mark.parametrize('options, error', BAD, ids=[' '.join(f'{k}={v}' for k, v in o.items() if k != 'verdicts') or 'verdicts' for o, _ in BAD])
def test_bad_settings_say_so_in_one_line(options, error):
    with pytest.raises(ValueError, match=error) as e: training_module.train_policy(toy_env(), **{**QUICK, **options})
    one_line(e)

def test_unknown_names_come_with_the_nearest_one():
    table = toy_table(30, 'train')
    for make, error in ((lambda: training_module.TableEnv(table, ('score_logits',)), "did you mean 'score_logit'"),
                        (lambda: training_module.TableEnv(table, table.features, 'regenerat'), "did you mean 'regenerate'"),
                        (lambda: training_module.TableEnv(table, table.features, unit='paper_flop'), "did you mean 'paper_flops'"),
                        (lambda: tiny_policy(mode='per-step'), "did you mean 'per_step'")):
        with pytest.raises(ValueError, match=error) as e: make()
        one_line(e)

def test_import_loads_no_heavy_package():
    code = 'import sys, stepwise_routing.policy; print([m for m in ("sklearn", "matplotlib", "pandas", "transformers") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
