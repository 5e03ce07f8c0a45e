"""Equation 4 and the loop: a step to a cheaper policy that keeps the constraint, then a step of the threshold"""

# %% imports
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch.func import jacrev, vmap
from torch.nn import functional as F

from ..settings import Training
from .policy import Network, Policy, fresh_router, log_odds, log_pi, soft_choice, update_threshold
from .rollouts import Outcomes, exits, large_alone


# %% problems
class _Problems(NamedTuple):
    "Training problems as tensors; costs are shares of the large model's mean cost."

    x: torch.Tensor  # [problem, step, feature], standardised
    inside: torch.Tensor  # bool [problem, step]
    right: torch.Tensor  # [problem, exit]
    cost: torch.Tensor  # [problem, exit]
    spent: torch.Tensor  # [problem, step], on the small steps so far
    large_right: torch.Tensor  # [problem]
    step_right: torch.Tensor  # bool [problem, step], of the verifier

    def take(self, rows):
        return _Problems(*(values[rows] for values in self))


def training_problems(outcomes: Outcomes, x, unit: str, reading: str) -> _Problems:
    large = large_alone(outcomes, unit)
    scale = large.cost.mean()
    right, cost = exits(outcomes, unit, reading)
    spent = (outcomes.small @ outcomes.prices(unit)[0]).cumsum(1)
    verdicts = outcomes.inside if outcomes.step_right is None else outcomes.step_right
    numbers = [right, cost / scale, spent / scale, large.right]
    right, cost, spent, large_right = (torch.as_tensor(a, dtype=x.dtype) for a in numbers)
    inside = torch.as_tensor(outcomes.inside)
    step_right = torch.as_tensor(verdicts, dtype=torch.bool)
    return _Problems(x, inside, right, cost, spent, large_right, step_right)


def on_grid(values, inside, fill=0.0):  # [state, ...] -> [problem, step, ...]
    grid = torch.full((*inside.shape, *values.shape[1:]), fill, dtype=values.dtype)
    grid[inside] = values
    return grid


# %% estimate
class _Estimate(NamedTuple):
    "What a batch says about a policy. Cost and loss can be differentiated with respect to log S."

    cost: torch.Tensor  # expected, a share of the large model's
    loss: torch.Tensor  # expected accuracy lost, or its surrogate
    lost: float  # the constraint: accuracy lost now
    visits: torch.Tensor  # [state], how often each state is seen; sums to 1


def exact(problems: _Problems):  # -> evaluate(log S [state, model])
    "The exact estimator: cost and loss, summed over every exit of every problem."
    n = len(problems.inside)

    def evaluate(log_S):
        stay = on_grid(log_S[:, 0], problems.inside).cumsum(1)
        stay = F.pad(stay, (1, 0))  # [problem, t], log chance that t steps stay small
        leave = on_grid(log_S[:, 1:].flip(-1), problems.inside, -torch.inf)  # [problem, step, k]
        leave = (stay[:, :-1, None] + leave).flatten(1)
        chance = torch.cat([leave, stay[:, -1:]], 1).exp()  # [problem, exit]
        cost = (chance * problems.cost).sum() / n
        lost = problems.large_right[:, None] - problems.right
        loss = (chance * lost).sum() / n
        visits = (stay[:, :-1].exp() * problems.inside).detach()
        return _Estimate(cost, loss, loss.item(), visits[problems.inside] / visits.sum())

    return evaluate


# %% fisher
STATES = 128  # of the Fisher matrix, at most


def fisher_of_choices(odds, kappa, temperature) -> torch.Tensor:  # [state, k, k]
    "The Fisher matrix of every state's S with respect to its log-odds."
    odds = odds.detach().requires_grad_()
    log_S = soft_choice(odds, kappa, temperature)
    # a sum over states will do, as the choice of each state depends on its own log-odds alone
    scores = [torch.autograd.grad(total, odds, retain_graph=True)[0] for total in log_S.sum(0)]
    scores = torch.stack(scores)  # [model, state, k]
    return torch.einsum('im,mib,mic->ibc', log_S.detach().exp(), scores, scores)


def fisher_solver(net: Network, theta, x, weight, kappa, temperature, damping):
    """A function v -> (H + damping I)^-1 v for H = J'FJ, a weighted sum over states.

    There are far fewer states than weights, so it solves one equation per log-odds (Woodbury's identity)."""

    def odds(theta, x):
        return log_odds(net(theta, x))

    J = vmap(jacrev(odds), (None, 0))(theta, x)  # [state, k, parameter]
    fisher = fisher_of_choices(odds(theta, x), kappa, temperature) * weight[:, None, None]
    FJ = (fisher @ J).flatten(0, 1)  # [state * k, parameter]
    J = J.flatten(0, 1)
    factors = torch.linalg.lu_factor(FJ @ J.T + damping * torch.eye(len(J), dtype=J.dtype))

    def solve(v):
        along = torch.linalg.lu_solve(*factors, (FJ @ v)[:, None])[:, 0]
        return (v - J.T @ along) / damping

    return solve


# %% best-step
def peak(top, bottom, low, high) -> tuple:  # (lam, value)
    "Where -(top/lam + bottom*lam)/2 is largest between low and high, and how large it is there."
    if high <= low:
        return low, -np.inf
    free = np.sqrt(top / bottom) if bottom > 0 else np.inf
    lam = min(max(free, low, 1e-300), high)
    return lam, -0.5 * (top / lam + bottom * lam)


def best_step(g, b, c, solve, delta) -> tuple:  # (step [parameter], does it repair the constraint?)
    "Minimise g.y subject to c + b.y <= 0 and y'Hy/2 <= delta (theorem 2 of CPO, Achiam et al., 2017)."
    v = solve(g)
    w = solve(b)
    q, r, s = float(g @ v), float(g @ w), float(b @ w)
    saves_most = -v * float(np.sqrt(2 * delta / max(q, 1e-300)))
    if np.sqrt(2 * delta * max(s, 0.0)) <= 1e-12 * abs(c):  # no step changes the loss
        return (saves_most, False) if c <= 0 else (0 * g, True)
    room = 2 * delta - c * c / s
    if room <= 1e-12 * delta:  # the plane does not cut the ball
        return (saves_most, False) if c < 0 else (-w * float(np.sqrt(2 * delta / s)), True)
    c = c or -1e-300
    below = (0.0, r / c)
    above = (max(r / c, 0.0), np.inf)
    with_price, without = (above, below) if c >= 0 else (below, above)
    lam_a, value_a = peak(max(q - r * r / s, 1e-16 * q), room, *with_price)
    lam_b, value_b = peak(q, 2 * delta, *without)
    lam_star = float(lam_a if value_a - r * c / s >= value_b else lam_b)
    nu_star = float(max(0.0, lam_star * c - r) / s)
    return -(v + nu_star * w) / lam_star, c >= 0


# %% policy-step
FRACTIONS = 0.5 ** np.arange(8)  # of a step, that are tried in turn


def policy_step(net: Network, theta, x, evaluate, kappa, temperature, s: Training, rng):  # -> theta
    "Equation 4: a step in the trust region, shortened until the new policy keeps all conditions."
    leaf = theta.clone().requires_grad_()
    log_S = soft_choice(log_odds(net(leaf, x)), kappa, temperature)
    now = evaluate(log_S)
    g, b = (torch.autograd.grad(v, leaf, retain_graph=True)[0] for v in (now.cost, now.loss))
    excess = now.lost - s.alpha

    seen, weight = x, now.visits
    if len(x) > STATES:
        chances = weight.numpy()
        seen = x[rng.choice(len(x), STATES, p=chances / chances.sum())]
        weight = torch.full((STATES,), 1 / STATES, dtype=x.dtype)
    solve = fisher_solver(net, theta, seen, weight, kappa, temperature, s.damping)
    step, repairs = best_step(g, b, excess, solve, s.delta)
    allowed = max(s.slack * s.alpha - excess, 0)
    with torch.no_grad():
        for fraction in FRACTIONS:
            new_theta = theta + float(fraction) * step
            new_S = soft_choice(log_odds(net(new_theta, x)), kappa, temperature)
            new = evaluate(new_S)
            moved = (now.visits * (new_S.exp() * (new_S - log_S)).sum(-1)).sum()
            is_cheaper = repairs or new.cost <= now.cost
            if moved <= s.delta and is_cheaper and new.loss - now.loss <= allowed:
                return new_theta
    return theta


# %% rollouts
class _Rollouts(NamedTuple):
    "Trajectories whose actions were drawn from pi; zeros behind the last decision."

    inside: torch.Tensor  # bool [row, step], was there a decision?
    x: torch.Tensor  # [decision, feature]
    act: torch.Tensor  # [decision], the model that goes on
    mu: torch.Tensor  # [decision], its probability
    cost: torch.Tensor  # [row, step], of what the action brought about
    right: torch.Tensor  # [row]
    large_right: torch.Tensor  # [row]


@torch.no_grad()
def draw_rollouts(net: Network, theta, problems: _Problems, rng) -> _Rollouts:
    "Draw actions from pi until a larger model goes on, and read off the table what that comes to."
    shape = problems.inside.shape
    larger = net.n_out - 1
    pi = log_pi(log_odds(net(theta, problems.x.flatten(0, 1)))).exp().view(*shape, -1)
    at_least = pi.flip(-1).cumsum(-1).flip(-1)[..., 1:]  # probability of model k or a larger one
    uniform = torch.as_tensor(rng.random(shape))
    act = (uniform[..., None] < at_least).sum(-1) * problems.inside
    stop = F.pad(act > 0, (0, 1), value=True).int().argmax(1)  # [row], a larger model follows it
    seen = problems.inside & (torch.arange(shape[1]) <= stop[:, None])

    rows = torch.arange(len(stop))
    chosen = F.pad(act, (0, 1))[rows, stop]
    exit = torch.where(stop < shape[1], stop * larger + larger - chosen, shape[1] * larger)
    goes_on = F.pad(problems.spent.diff(dim=1), (0, 1)) * problems.inside
    leaves = problems.cost[rows, exit][:, None] - problems.spent
    cost = torch.where(act > 0, leaves, goes_on) * seen
    mu = pi.gather(2, act[..., None])[..., 0]
    ends = problems.right[rows, exit], problems.large_right
    return _Rollouts(seen, problems.x[seen], act[seen], mu[seen], cost, *ends)


# %% critics
class Critics:
    "Two networks: the cost, and the accuracy lost, that are still to come."

    def __init__(self, n_features: int, lr: float, seed: int):
        self.net = Network(n_features, 1)
        shifts = 10**6, 2 * 10**6
        self.thetas = [self.net.fresh(seed + shift).requires_grad_() for shift in shifts]
        self.optimiser = torch.optim.Adam(self.thetas, lr)

    def __call__(self, x):  # [decision, feature] -> [critic, decision]
        return torch.stack([self.net(theta, x)[:, 0] for theta in self.thetas])

    def learn(self, values, targets) -> None:  # [critic, decision] each
        self.optimiser.zero_grad()
        (values - targets).square().mean(1).sum().backward()
        self.optimiser.step()


# %% vtrace
@torch.no_grad()
def vtrace(values, rewards, rho, inside) -> tuple:  # [critic, row, step] -> vs, advantages
    "V-trace without discount (Espeholt et al., 2018); the ratios are clipped at 1; behind the end the value is 0."
    rho = rho.clamp(max=1.0) * inside  # [row, step]
    gap = rho * (rewards + F.pad(values[..., 1:], (0, 1)) - values)
    carry = torch.zeros(values.shape[:2], dtype=values.dtype)
    vs = []
    for t in reversed(range(values.shape[2])):
        carry = gap[..., t] + rho[:, t] * carry
        vs.insert(0, values[..., t] + carry)
    vs = torch.stack(vs, -1)
    advantages = rewards + F.pad(vs[..., 1:], (0, 1)) - values
    return vs * inside, advantages * inside


# %% sampled
def sampled(net: Network, theta, r: _Rollouts, critics: Critics, kappa, temperature, s: Training):
    "The paper's estimator: evaluate(log S); on the way the critics learn their V-trace targets."
    inside = r.inside
    lost = r.large_right - r.right

    def ratio(log_S):  # rho [decision], S(a | o) / pi(a | o)
        return log_S.gather(1, r.act[:, None])[:, 0].exp() / r.mu

    with torch.no_grad():
        rho = ratio(soft_choice(log_odds(net(theta, r.x)), kappa, temperature))
    is_last = inside & ~F.pad(inside[:, 1:], (0, 1))
    rewards = torch.stack([r.cost, is_last * lost[:, None]])
    values = critics(r.x)
    on_rows = torch.stack([on_grid(v, inside) for v in values.detach()])
    vs, advantages = vtrace(on_rows, rewards, on_grid(rho, inside, 1.0), inside)
    critics.learn(values, vs[:, inside])
    adv_cost, adv_loss = advantages[:, inside]

    weight = on_grid(rho.clamp(max=s.rho_bar), inside, 1.0).prod(1)  # [row]
    lost_now = float(r.large_right.mean() - (weight * r.right).mean())  # 1 minus the bound on J_C
    visits = torch.full((len(r.x),), 1 / len(r.x), dtype=r.x.dtype)

    def evaluate(log_S):
        rho = ratio(log_S)
        cost = (rho.clamp(max=s.rho_bar) * adv_cost).sum() / len(inside)
        loss = (rho * adv_loss).sum() / len(inside)
        return _Estimate(cost, loss, lost_now, visits)

    return evaluate


# %% deploy
@torch.no_grad()
def deploy(net: Network, theta, kappa, problems: _Problems, verifier=False) -> tuple:
    "(Mean cost, accuracy lost) of the router at work: it hands over at the first pi that reaches kappa."
    pi = log_pi(log_odds(net(theta, problems.x[problems.inside]))).exp()
    reached = on_grid(pi[:, 1:].flip(-1) >= kappa, problems.inside, False).flatten(1)
    exit = F.pad(reached, (0, 1), value=True).int().argmax(1)
    rows = torch.arange(len(exit))
    right = problems.right[rows, exit]
    lost = problems.large_right - right
    if verifier:  # a miss counts if a kept step is wrong
        went_on = torch.arange(problems.inside.shape[1]) < exit[:, None] // (net.n_out - 1)
        wrong_step = (went_on & problems.inside & ~problems.step_right).any(1)
        lost = problems.large_right * (1 - right) * wrong_step
    return float(problems.cost[rows, exit].mean()), float(lost.mean())


# %% cooled
def cooled(temperature: tuple, progress: float) -> float:
    "From the first to the last within half of the steps; below some temperature nothing is near kappa."
    first, last = temperature
    return first * (last / first) ** min(1.0, 2 * progress)


# %% train
def train(
    outcomes: Outcomes,  # of the training problems
    columns: tuple,  # features that the policy sees
    s: Training = Training(),
    unit: str = 'flops',  # of cost
    reading: str = 'continue',
    seed: int = 0,  # of weights, batches and actions
) -> tuple:  # (`Policy`, kappa, log); log: (cost, accuracy lost, kappa) of each step
    "Alternate a step of the policy (equation 4) and of its threshold (equation 5)."
    start = fresh_router(outcomes.features, columns, len(outcomes.models), s.hidden, seed)
    problems = training_problems(outcomes, start.states(outcomes.features), unit, reading)
    critics = Critics(len(columns), s.lr, seed)
    rng = np.random.default_rng(seed)
    net, theta, kappa, log = start.net, start.theta, s.kappa, []
    verifier = s.verifier and outcomes.step_right is not None
    n = len(outcomes)
    for k in range(1, s.steps + 1):
        batch = problems.take(rng.choice(n, min(s.batch, n), replace=False))
        temperature = cooled(s.temperature, k / s.steps)
        # section 4.1: cost and loss under S, and under policies near it; then a step to a cheaper one
        if s.estimator == 'exact':
            x, evaluate = batch.x[batch.inside], exact(batch)
        else:
            rollouts = draw_rollouts(net, theta, batch, rng)  # under pi
            x = rollouts.x
            evaluate = sampled(net, theta, rollouts, critics, kappa, temperature, s)  # V-trace
        theta = policy_step(net, theta, x, evaluate, kappa, temperature, s, rng)  # equation 4
        # section 4.2: the threshold, by what the router loses at work
        cost, lost = deploy(net, theta, kappa, batch, verifier)  # equation 6
        log.append((cost, lost, kappa))
        eta = s.eta * k**-s.decay
        kappa = update_threshold(kappa, lost, s.alpha, eta, 1 / net.n_out, s.printed_sign)  # eq. 5
    return replace(start, theta=theta), kappa, log
