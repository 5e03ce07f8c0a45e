"What the tests of policies share: small policies, environments, and the definition of S."
import numpy as np
import torch

from stepwise_routing.base.settings import Policy
from stepwise_routing.method.confidence import Scaler
from stepwise_routing.method.cpo import TableEnv
from stepwise_routing.method.outcomes import toy_table
from stepwise_routing.method.policy import RoutingPolicy
from stepwise_routing.method.training import train

READINGS = 'append', 'regenerate'
QUICK = dict(steps=10, hidden=(8, 8))

def f64(x): return torch.as_tensor(np.asarray(x, float))

def quick(env, seed=0, verdicts=None, **settings):
    "A short training."
    return train(env, Policy(**(QUICK | settings)), seed, verdicts, progress=False)

def tiny_policy(n_models=2, seed=0, features=('score_logit', 'index'), hidden=(3,), spread=1.):
    "A policy of few parameters, none of them nought."
    scaler = Scaler(tuple(features), (0.,)*len(features), (1.,)*len(features))
    policy = RoutingPolicy(scaler, n_models, hidden, p_escalate=.4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters(): p.data += spread*torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return policy

def soft_set(pi, kappa, temp):
    "S with sigmoid((pi - kappa)/temp) for the indicator, as the definition has it."
    w = torch.sigmoid((pi - kappa)/temp)*(pi > 0)
    return w/w.sum(-1, keepdim=True)

def hard_set(pi, kappa):
    "S as the definition has it: uniform on the actions at or above the threshold, the first possible one if none is."
    allowed = (pi >= kappa) & (pi > 0)
    first = torch.nn.functional.one_hot((pi > 0).double().argmax(-1), pi.shape[-1]).bool()
    allowed = torch.where(allowed.any(-1, keepdim=True), allowed, first).double()
    return allowed/allowed.sum(-1, keepdim=True)

def flat(tensors): return torch.cat([t.reshape(-1) for t in tensors])

def with_parameters(policy, theta, x):
    out, i = {}, 0
    for k, p in policy.named_parameters(): out[k] = theta[i:i + p.numel()].view_as(p); i += p.numel()
    return torch.func.functional_call(policy, out, (x,))

def bits(trained):
    "Everything that a training leaves, to be compared."
    weights = [p.numpy().tobytes() for p in trained.policy.state_dict().values()]
    return weights + [trained.kappa] + [(k, v.tobytes()) for k, v in sorted(trained.log.items())]

def toy_env(n=60, split='train', seed=0, **kw):
    return TableEnv(toy_table(n, split, seed), ('score_logit', 'index', 'final'), **kw)

def fitted_policy(env, seed=0, spread=.7, hidden=(6,)):
    "An untrained policy that tells states apart."
    policy = RoutingPolicy(env.scaler, hidden=hidden, p_escalate=.3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters(): p.data += spread*torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return policy

def pi_escalate(policy, table):
    with torch.no_grad(): return policy(policy.encode(table.obs, table.features))[..., 1].exp().numpy()

def first(hits, T): return np.array([next((t for t in range(n) if h[t]), n) for h, n in zip(hits, T)])

def one_line(e):
    text = str(getattr(e, 'value', getattr(e, 'message', e)))
    assert text and '\n' not in text and len(text) < 300, text
    return text
