"The pieces of a policy, against Monte-Carlo returns, definitions and simulation; and its files."
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from policies import f64, fitted_policy, hard_set, one_line, soft_set, tiny_policy, toy_env

from stepwise_routing.base.settings import Policy
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import escalation_times, toy_table
from stepwise_routing.method.policy import *

torch.set_num_threads(1)

# --- V-trace
def slow_vtrace(values, rewards, rho, rho_bar, c_bar):
    "Espeholt et al. 2018, equation 1, term by term, for one trajectory; the state after the last one is worth nothing."
    T, after = len(values), np.r_[values, 0.]
    clip = lambda bar: np.minimum(rho, np.inf if bar is None else bar)
    def term(s, t):
        gap = rewards[t] + after[t + 1] - values[t]
        return np.prod(clip(c_bar)[s:t])*clip(rho_bar)[t]*gap
    return np.array([values[s] + sum(term(s, t) for t in range(s, T)) for s in range(T)])

@st.composite
def trajectories(draw):
    n, T = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    r = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = r.integers(1, T + 1, n)
    rho = np.exp(r.normal(0, 1.5, (n, T)))*(r.random((n, T)) < .85)
    return r.normal(0, 2, (n, T)), r.normal(0, 2, (n, T)), rho, np.arange(T) < length[:, None]

bars = st.sampled_from([.3, 1., 2.])

@given(trajectories(), bars, bars)
@settings(max_examples=150, deadline=None)
def test_vtrace_is_the_double_sum(trajectory, rho_bar, c_bar):
    values, rewards, rho, inside = trajectory
    vs, adv = vtrace(f64(values), f64(rewards), f64(rho), torch.as_tensor(inside), rho_bar, c_bar)
    for i, T in enumerate(inside.sum(1)):
        v, r, w = values[i, :T], rewards[i, :T], rho[i, :T]
        want = slow_vtrace(v, r, w, rho_bar, c_bar)
        assert np.allclose(vs[i, :T], want, rtol=1e-9, atol=1e-9)
        assert np.allclose(adv[i, :T], r + np.r_[want[1:], 0.] - v, rtol=1e-9, atol=1e-9)

def test_vtrace_by_hand():
    """Two steps: V = (1, 2), r = (3, 4), rho = (.5, 3): delta_1 = 1*(4 + 0 - 2) = 2, vs_1 = 4; delta_0 = .5*(3 +
    2 - 1) = 2, vs_0 = 1 + 2 + .5*(4 - 2) = 4."""
    vs, adv = vtrace(f64([[1, 2]]), f64([[3, 4]]), f64([[.5, 3]]), torch.ones(1, 2, dtype=bool))
    assert vs.tolist() == [[4., 4.]] and adv.tolist() == [[6., 2.]]

@given(trajectories(), st.sampled_from([float('nan'), 1e300, -7.]))
@settings(max_examples=50, deadline=None)
def test_vtrace_never_looks_past_the_end(trajectory, junk):
    values, rewards, rho, inside = trajectory
    fill = lambda x, y: f64(np.where(inside, x, y))
    clean = vtrace(fill(values, 0), fill(rewards, 0), fill(rho, 1), torch.as_tensor(inside))
    dirty = vtrace(fill(values, junk), fill(rewards, junk), fill(rho, abs(junk)), torch.as_tensor(inside))
    for a, b in zip(clean, dirty):
        assert (a[inside] == b[inside]).all()
        assert torch.isfinite(b).all(), 'finite everywhere: padding must not poison a sum'

def test_vtrace_off_policy_is_unbiased():
    """With unclipped ratios, vs at the start averages to the target's value, whatever the critic says; two
    steps, four paths, no sampling."""
    mu, target, critic = np.array([.3, .6]), np.array([.8, .1]), f64([[5., -2.]])
    r = np.random.default_rng(0).normal(size=(2, 2, 2)) # reward [step, action]: r[0, a0], r[1, a1] (+ a0)
    total = want = 0.
    for a in itertools.product((0, 1), repeat=2):
        prob = lambda p: [p[t] if a[t] else 1 - p[t] for t in range(2)]
        m, s, reward = prob(mu), prob(target), [r[0, 0, a[0]], r[1, a[0], a[1]]]
        vs, _ = vtrace(critic, f64([reward]), f64([np.divide(s, m)]), torch.ones(1, 2, dtype=bool), 1e12, 1e12)
        total += np.prod(m)*vs[0, 0].item(); want += np.prod(s)*sum(reward)
    assert np.isclose(total, want)

# --- sets and ratios
weights = st.integers(2, 4).flatmap(lambda k: st.lists(st.integers(0, 12), min_size=k, max_size=k)).filter(any)
probabilities = weights.map(lambda w: [x/sum(w) for x in w])

@given(probabilities, st.one_of(st.floats(0, 1), st.sampled_from([.25, .5, 1/3])), st.booleans(), st.data())
@settings(max_examples=300, deadline=None)
def test_sets_as_the_definition_has_them(pi, kappa, tie, data):
    if tie: kappa = data.draw(st.sampled_from(pi)) # a model exactly at the threshold belongs to the set
    at = data.draw(st.integers(0, len(pi) - 1))
    chosen = [a for a, p in enumerate(pi) if p >= kappa and p > 0]
    assert escalate(pi, kappa, at) == (max(chosen) if chosen else at)

@given(st.integers(2, 4), st.floats(.02, .5), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_soft_set_hardens(k, kappa, seed):
    pi = f64(np.random.default_rng(seed).dirichlet(np.ones(k), 20))
    away = ((pi - kappa).abs() > .01).all(-1) & (pi >= kappa).any(-1)
    hard, gaps = hard_set(pi, kappa), []
    for temp in (.1, .01, .001, .0001):
        soft = log_threshold_probs(pi.log(), kappa, temp).exp()
        assert torch.allclose(soft.sum(-1), torch.ones(20).double())
        assert (temp < .001 or torch.allclose(soft, soft_set(pi, kappa, temp), rtol=1e-6, atol=1e-9))
        gaps.append(float((soft - hard)[away].abs().max()) if away.any() else 0.)
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 1e-9

# --- kappa
def miss_curve(kappa): return .12/(1 + np.exp(-(kappa - .3)/.06)) # rises with kappa: who escalates less, misses more

def stream(seed, n=24_000):
    "Kappa and misses of a stream of problems, one at a time."
    draws, kappa, kappas, misses = np.random.default_rng(seed).random(n), .1, np.zeros(n), np.zeros(n)
    for k, u in enumerate(draws):
        misses[k] = u < miss_curve(kappa)
        kappa = kappas[k] = update_threshold(kappa, misses[k], k + 1)
    return kappas, misses

@pytest.mark.parametrize('seed', range(2))
def test_kappa_settles_where_the_misses_are_alpha(seed):
    kappas, misses = stream(seed)
    star = .3 - .06*np.log(.12/.02 - 1)
    assert abs(misses[8000:].mean() - .02) < .005 and abs(kappas[8000:].mean() - star) < .02
    assert abs(miss_curve(kappas[8000:]).mean() - .02) < .005, 'not only these draws: the chance of a miss'

@pytest.mark.parametrize('start', [.1, .4])
def test_the_printed_sign_runs_away(start, seed=0):
    "A miss raises kappa, and a higher kappa misses more: one wall or the other, never alpha."
    draws, kappa, tail = np.random.default_rng(seed).random(24_000), start, []
    for k, u in enumerate(draws, 1):
        tail.append(u < miss_curve(kappa))
        kappa = update_threshold(kappa, tail[-1], k, Policy(sign='printed'))
    assert min(kappa, .5 - kappa) < .1 and abs(np.mean(tail[8000:]) - .02) > .01

@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.floats(.1, .6),
       st.sampled_from(['corrected', 'printed']))
@settings(max_examples=100, deadline=None)
def test_kappa_keeps_its_bounds_and_moves_the_right_way(misses, high, sign):
    kappa = high/2
    for k, miss in enumerate(misses, 1):
        new = update_threshold(kappa, miss, k, Policy(alpha=.1, kappa_step=1., sign=sign), high)
        assert isinstance(new, float) and 0 <= new <= high
        assert (new - kappa)*(miss - .1)*(1 if sign == 'printed' else -1) >= 0
        kappa = new

def test_kappa_by_hand():
    assert np.isclose(update_threshold(.25, 1, 1), .25 - .1*.98)
    assert np.isclose(update_threshold(.25, 0, 32), .25 + .1/8*.02)
    assert np.isclose(update_threshold(.25, .4, 100, Policy(kappa_decay=0.)), .25 - .1*.38)

# --- files
def saved(folder, **kw):
    env = toy_env()
    policy = fitted_policy(env)
    save_policy(folder, policy, .1 + .2, models=env.models, alpha=.02, **kw)
    return policy, env

def test_a_saved_policy_comes_back_bit_by_bit(tmp_path):
    policy, env = saved(tmp_path/'a', note='x')
    back = load_policy(tmp_path/'a', models=env.models)
    assert all(torch.equal(a, b) for a, b in zip(policy.state_dict().values(), back.state_dict().values()))
    assert torch.equal(policy(env.x), back(env.x)) and back.kappa == .1 + .2
    assert (back.features, back.scaler) == (policy.features, policy.scaler)
    assert (back.n_models, back.hidden) == (2, (6,))
    assert back.config['note'] == 'x' and tuple(back.config['models']) == env.models
    table = toy_table(20)
    assert np.array_equal(*(PolicyRouter(p, .3).decide(table.obs[:, 0]) for p in (policy, back)))
    save_policy(tmp_path/'b', back, back.kappa, models=env.models, alpha=.02, note='x')
    for name in ('model.safetensors', 'config.json'):
        assert (tmp_path/'a'/name).read_bytes() == (tmp_path/'b'/name).read_bytes()
    assert sorted(p.name for p in (tmp_path/'a').iterdir()) == ['config.json', 'model.safetensors']

def test_a_policy_for_others_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match='trained for the models toy small and toy large, not for a and b') as e:
        load_policy(tmp_path, models=('a', 'b'))
    one_line(e)

def rewrite(change):
    def damage(folder):
        config = json.loads((folder/'config.json').read_text())
        del config['checksum'] # as policies had it before: what it says is looked at
        (folder/'config.json').write_text(json.dumps(change(config)))
    return damage

def cut(name, share):
    def damage(folder):
        whole = (folder/name).read_bytes()
        (folder/name).write_bytes(whole[:int(len(whole)*share)])
    return damage

def write(name, data): return lambda folder: (folder/name).write_bytes(data)
def without(key): return rewrite(lambda c: {k: v for k, v in c.items() if k != key})

DAMAGE = dict(half=cut('model.safetensors', .5), half_config=cut('config.json', .5),
              noise=write('model.safetensors', b'\xff'*100), array=write('config.json', b'[1, 2]'),
              no_kappa=without('kappa'), other_layers=rewrite(lambda c: c | dict(hidden=[7])),
              kappa_nan=rewrite(lambda c: c | dict(kappa=float('nan'))),
              std_0=rewrite(lambda c: c | dict(std=[0.]*len(c['std']))),
              unknown_feature=rewrite(lambda c: c | dict(features=['age']*len(c['features']))))

def broken_weights(folder): # with the digest that belongs to them
    policy = load_policy(folder)
    next(policy.parameters()).data.view(-1)[0] = float('nan')
    save_policy(folder, policy, .3)

DAMAGE |= dict(weight_nan=broken_weights)

@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_policy_says_so_in_one_line(tmp_path, damage):
    saved(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(ValueError) as e: load_policy(tmp_path)
    assert str(tmp_path) in one_line(e)

@pytest.mark.parametrize('name', ['model.safetensors', 'config.json'])
def test_a_missing_file_says_so_in_one_line(tmp_path, name):
    saved(tmp_path)
    (tmp_path/name).unlink()
    with pytest.raises(FileNotFoundError, match=name) as e: load_policy(tmp_path)
    one_line(e)

def test_encoding_standardises_own_features_in_their_order():
    table = toy_table(30, 'train')
    env = TableEnv(table, ('final', 'score_logit'))
    policy = fitted_policy(env)
    x = policy.encode(table.obs, table.features).numpy()
    inside = np.arange(table.obs.shape[1]) < table.n_steps[:, None]
    assert x.dtype == np.float64 and (x[~inside] == 0).all()
    assert np.allclose(x[inside].mean(0), 0) and np.allclose(x[inside].std(0), 1)
    shuffled = table.obs[..., [2, 0, 1]]
    assert (policy.encode(shuffled, [table.features[i] for i in (2, 0, 1)]).numpy() == x).all()
    score = table.obs[..., 0][inside]
    assert np.allclose(x[inside][:, 1], (score - score.mean())/score.std())

@pytest.mark.parametrize('logit', [-60., -40., 40., 60.])
def test_a_policy_that_is_very_sure_still_obeys_the_ends(logit):
    "kappa = 0 escalates at once, however small pi is."
    table = toy_table(10)
    policy = fitted_policy(TableEnv(toy_table(60, 'train'), table.features))
    policy.net[-1].weight.data.zero_()
    policy.net[-1].bias.data = f64([0., logit])
    router = PolicyRouter(policy, 0.)
    assert (escalate(policy(policy.encode(table.obs, table.features)).exp().detach().numpy(), 0.) == 1).all()
    assert (escalation_times(router, table) == 0).all()

def test_local_verdicts_by_hand():
    "Verified: every step after which the walk went on was judged correct."
    verdicts = np.array([[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    went_on = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    assert locally_verified(verdicts, went_on).tolist() == [True, True, False, True]

@pytest.mark.parametrize('p, seen', [(0., 1e-4), (.001, .001), (.5, .5), (.9995, .9995), (1., 1 - 1e-4)])
def test_a_probability_is_seen_as_log_odds_between_one_in_ten_thousand_and_its_complement(p, seen):
    assert np.allclose(policy_inputs([[p, 3.]], ('score_prob', 'index'), ('index', 'score_prob')),
                       [[3., np.log(seen/(1 - seen))]])

def test_a_walk_escalates_at_the_threshold_as_the_table_does(monkeypatch):
    table, policy = toy_table(20), tiny_policy()
    x = policy_inputs(table.obs[:, 0], table.features, policy.features)
    monkeypatch.setattr(PolicyRouter, 'inputs', lambda self, states: x[states]) # of the first steps
    router = PolicyRouter(policy, 0.)
    pi = router.decide(x)[:, 1]
    for i in range(20): assert router.at(pi[i]).escalates([i]).all() and router.at(pi[i]).table_escalates(table)[i, 0]
    assert not any(router.at(np.nextafter(pi[i], 1)).escalates([i]).any() for i in range(20))
