"""A small network says how much it doubts a step; a threshold decides, and calibration chooses it"""

# %% imports
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from ..util import resamples, write_file
from .rollouts import Outcomes, Result


# %% network
DTYPE = torch.float64  # in float32 the last bit of a sum, and with it the processor, decides what is learnt


@dataclass(frozen=True)
class Network:
    "Linear layers with tanh between. Its weights are one vector theta: equation 4 treats a policy as a point."

    n_in: int
    n_out: int
    hidden: tuple = (64, 64)  # units; with the output three linear layers, as in the paper; (): a line

    @property
    def shapes(self) -> list:  # of (units, inputs)
        sizes = self.n_in, *self.hidden, self.n_out
        return list(zip(sizes[1:], sizes))

    def fresh(self, seed: int, last: float = 1.0) -> torch.Tensor:  # theta [parameter]
        "Random weights and no biases; `last` scales the last layer."
        generator = torch.Generator().manual_seed(seed)
        scales = [1.0] * len(self.hidden) + [last]
        parts = []
        for (units, inputs), scale in zip(self.shapes, scales):
            noise = torch.randn(units, inputs, generator=generator, dtype=DTYPE)
            parts += [(noise * scale / inputs**0.5).flatten(), torch.zeros(units, dtype=DTYPE)]
        return torch.cat(parts)

    def layers(self, theta) -> list:  # of (matrix [unit, input], bias [unit])
        sizes = [size for units, inputs in self.shapes for size in (units * inputs, units)]
        parts = theta.split(sizes)
        matrices = [part.view(shape) for part, shape in zip(parts[::2], self.shapes)]
        return list(zip(matrices, parts[1::2]))

    def __call__(self, theta, x):  # [..., feature] -> [..., n_out]
        *hidden, last = self.layers(theta)
        for matrix, bias in hidden:
            x = F.linear(x, matrix, bias).tanh()
        return F.linear(x, *last)


# %% fresh-policy
def fresh_policy(net: Network, seed: int, p_escalate: float = 0.1) -> torch.Tensor:  # theta
    "It hands over with probability 0.1, whatever it sees, or nearly so."
    theta = net.fresh(seed, last=0.1)
    larger = net.n_out - 1
    chances = [1 - p_escalate, *[p_escalate / larger] * larger]
    theta[-net.n_out :] = torch.tensor(chances, dtype=DTYPE).log()
    return theta


# %% choices
def log_odds(logits):  # [state, model] -> [state, k]
    "Of each larger model against the small one; at 0 both are equally likely."
    return logits[..., 1:] - logits[..., :1]


def log_pi(odds):  # [state, k] -> [state, model]
    "The base policy pi."
    return F.pad(odds, (1, 0)).log_softmax(-1)


def soft_choice(
    odds,  # [state, k]
    kappa: float,
    temperature: float,  # of the edge at kappa
):  # log S [state, model]
    "S: one of the models whose probability reaches kappa, by chance; with a soft edge, to learn from."
    return F.logsigmoid((log_pi(odds).exp() - kappa) / temperature).log_softmax(-1)


# %% router
def observed(features: dict, columns: tuple) -> np.ndarray:  # [problem, step, feature]
    return np.stack([features[name] for name in columns], -1)


@dataclass(frozen=True)
class Policy:
    "pi as a router: its doubt is the probability of each larger model."

    columns: tuple  # names of the features that it sees
    mean: np.ndarray  # [feature], of the training problems
    std: np.ndarray  # [feature]
    net: Network
    theta: torch.Tensor

    def states(self, features: dict) -> torch.Tensor:  # [problem, step, feature], 0 behind the end
        x = (observed(features, self.columns) - self.mean) / self.std
        return torch.as_tensor(np.nan_to_num(x), dtype=DTYPE)

    @torch.no_grad()
    def __call__(self, features: dict) -> np.ndarray:  # doubt [problem, step, k]
        x = self.states(features)
        odds = log_odds(self.net(self.theta, x.flatten(0, 1)))
        pi = log_pi(odds).exp()
        doubt = pi[:, 1:].reshape(*x.shape[:2], -1).numpy()
        behind_end = np.isnan(features[self.columns[0]])
        return np.where(behind_end[..., None], np.nan, doubt)


def fresh_router(features: dict, columns: tuple, n_models: int, hidden: tuple, seed: int) -> Policy:
    "A policy that has learned nothing but the scale of its features."
    x = observed(features, columns).reshape(-1, len(columns))
    std = np.nanstd(x, 0)
    net = Network(len(columns), n_models, tuple(hidden))
    theta = fresh_policy(net, seed)
    return Policy(tuple(columns), np.nanmean(x, 0), np.where(std > 0, std, 1), net, theta)


# %% save-policy
def save_policy(policy: Policy, folder, **facts) -> None:
    "Write policy.json and theta.safetensors. `facts`: what else is known, such as kappa."
    from safetensors.torch import save

    shape = dict(columns=policy.columns, hidden=policy.net.hidden, n_models=policy.net.n_out)
    scale = dict(mean=policy.mean.tolist(), std=policy.std.tolist())
    write_file(Path(folder) / 'theta.safetensors', save(dict(theta=policy.theta)))
    write_file(Path(folder) / 'policy.json', json.dumps(shape | scale | facts, indent=1) + '\n')


def load_policy(folder) -> tuple:  # (`Policy`, facts)
    "Read what `save_policy` wrote. FileNotFoundError: there is none."
    from safetensors.torch import load

    facts = json.loads((Path(folder) / 'policy.json').read_text())
    columns, hidden = tuple(facts.pop('columns')), tuple(facts.pop('hidden'))
    mean, std = (np.array(facts.pop(name)) for name in ('mean', 'std'))
    net = Network(len(columns), facts.pop('n_models'), hidden)
    theta = load((Path(folder) / 'theta.safetensors').read_bytes())['theta']
    return Policy(columns, mean, std, net, theta), facts


# %% equation-5
def update_threshold(
    kappa: float,
    lost: float,  # accuracy, against the large model
    alpha: float,  # accuracy that may be lost
    eta: float,  # size of the step
    highest: float,  # 1/K; above it no model need be allowed at all
    printed: bool = False,  # with the paper's sign, by which a loss raises kappa
) -> float:
    "Equation 5: after a loss kappa falls, and the router hands over more often."
    step = eta * (lost - alpha)
    return float(np.clip(kappa + step if printed else kappa - step, 0, highest))


# %% curve
class Curve(NamedTuple):
    "A router at all its thresholds. The first setting is the large model alone, or all there is."

    kappas: list  # [setting], from safe to cheap; None: nothing to choose
    calibration: Result  # [setting, problem]
    test: Result | None  # [setting, problem]


# %% tuned
ROUNDING = 1e-12  # two sums of the same numbers may differ by this much


def means(values, counts):  # [setting, problem], [resample, problem] -> [resample, setting]
    "Counts say how often each problem counts: once in the sample itself, or as drawn in a resample."
    return counts @ values.T / counts.shape[1]


def tuned(accuracy, cost, alpha: float) -> np.ndarray:  # [resample, setting] each -> [resample]
    "The cheapest setting that loses at most alpha on these problems. It promises nothing for new ones."
    keeps = accuracy >= accuracy[:, :1] - alpha - ROUNDING
    return np.where(keeps, cost, np.inf).argmin(1)


# %% safe
FEW = 300  # problems; below, or if alpha allows fewer losses than six, an exact test decides


def safe_by_normal(loss, counts, alpha: float, delta: float) -> np.ndarray:  # [resample, setting]
    "Is the upper bound of the mean loss within alpha? For many problems."
    mean = means(loss, counts)
    variance = np.maximum(means(loss**2, counts) - mean**2, 0) / (counts.shape[1] - 1)
    return mean + NormalDist().inv_cdf(1 - delta) * np.sqrt(variance) <= alpha


def capital(loss, alpha: float, delta: float) -> np.ndarray:  # [resample, problem]
    "What a bettor has after each problem: a fair game if the mean loss is alpha (Waudby-Smith and Ramdas, 2023)."
    outcome = (loss + 1) / 2
    limit = (alpha + 1) / 2
    seen = np.arange(1, loss.shape[1] + 1)
    mean = (0.5 + outcome.cumsum(1)) / (seen + 1)
    variance = (0.25 + ((outcome - mean) ** 2).cumsum(1)) / (seen + 1)
    before = np.c_[np.full(len(loss), 0.25), variance[:, :-1]]  # a stake knows the past alone
    stake = np.sqrt(2 * math.log(1 / delta) / (loss.shape[1] * before))
    return np.cumprod(1 + np.minimum(stake, 0.75 / (1 - limit)) * (limit - outcome), 1)


def safe_by_bets(loss, counts, alpha: float, delta: float) -> np.ndarray:  # [resample, setting]
    "Does the bettor win 1/delta times the capital? An exact test, for any number of problems."
    problems = np.arange(counts.shape[1])
    drawn = np.array([np.repeat(problems, row.astype(int)) for row in counts])
    is_safe = np.zeros((len(counts), len(loss)), bool)
    for setting, losses in enumerate(loss):
        is_safe[:, setting] = capital(losses[drawn], alpha, delta).max(1) >= 1 / delta
        if setting and not is_safe[:, setting].any():
            break
    return is_safe


# %% guaranteed
def guaranteed(loss, cost, counts, alpha: float, delta: float) -> np.ndarray:  # [resample]
    """The last setting before the first that may lose more than alpha on new problems, with probability 1 - delta.

    Fixed sequence testing (Angelopoulos et al., Learn then Test, 2021): to go too far, it must pass the first unsafe
    setting, which happens with probability delta at most. If nothing is saved, it is the large model alone."""
    n = counts.shape[1]
    is_few = n < FEW or n * alpha < 6
    test = safe_by_bets if is_few else safe_by_normal
    is_safe = test(loss, counts, alpha, delta)
    is_safe[:, 0] = True
    last = np.logical_and.accumulate(is_safe, 1).sum(1) - 1
    saves = np.take_along_axis(cost, last[:, None], 1)[:, 0] < cost[:, 0]
    return np.where(saves, last, 0)


# %% rules
DELTA = 0.1  # how often a guarantee may fail
CLASSES = 3  # of *chosen features*; each is calibrated with its share of delta
RULES = ('tuned', 'guaranteed', 'guaranteed, one of three')


def settings_of(curve: Curve, counts, alpha: float) -> dict:  # rule -> setting [resample]
    "What each rule chooses, on calibration problems alone."
    accuracy, cost = (means(values, counts) for values in curve.calibration)
    loss = curve.calibration.right[0] - curve.calibration.right
    rest = loss, cost, counts, alpha
    chosen = tuned(accuracy, cost, alpha), guaranteed(*rest, DELTA), guaranteed(*rest, DELTA / CLASSES)
    return dict(zip(RULES, chosen))


# %% choice
class Choice(NamedTuple):
    "What a rule chooses, and what that comes to: in the sample itself, and in every resample."

    accuracy: np.ndarray  # [1 + resample], on test problems
    cost: np.ndarray  # [1 + resample]
    calibration_cost: np.ndarray  # [1 + resample], a share of the large model's
    by_seed: list  # (kappa, accuracy, cost) of the sample; kappa None: the large model alone


def at(values, counts, setting):  # [setting, problem], [resample, problem], [resample] -> [resample]
    "Means at one setting a resample."
    used, place = np.unique(setting, return_inverse=True)
    return np.take_along_axis(means(values[used], counts), place.reshape(-1, 1), 1)[:, 0]


def choose(
    curves: list,  # a `Curve` per seed
    counts: tuple,  # of calibration and of test problems [1 + resample, problem], see `resamples`
    alpha: float,  # accuracy that may be lost against the large model
    seed: int = 0,  # of the draws of seeds
) -> dict:  # rule -> `Choice`
    "Every seed of a method chooses for itself; a result is the mean over its seeds."
    calibration, test = counts
    shares = resamples(len(curves), len(test) - 1, seed) / len(curves)  # seeds are drawn again, too
    total = {rule: np.zeros((3, len(test))) for rule in RULES}
    by_seed = {rule: [] for rule in RULES}
    for curve, share in zip(curves, shares.T):
        cost = means(curve.calibration.cost, calibration)
        for rule, setting in settings_of(curve, calibration, alpha).items():
            on_test = [at(values, test, setting) for values in curve.test]
            chosen_cost = np.take_along_axis(cost, setting[:, None], 1)[:, 0]
            relative = chosen_cost / np.maximum(cost[:, 0], 1e-300)  # the small model may be free
            total[rule] += share * np.array([*on_test, relative])
            kappa = curve.kappas[setting[0]]
            by_seed[rule].append((kappa, *(float(values[0]) for values in on_test)))
    return {rule: Choice(*total[rule], by_seed[rule]) for rule in RULES}


# %% simplest
NEARLY = 0.05  # more than the cheapest, for something simpler


def simplest(choices: list) -> Choice:  # of methods, the simplest first
    "In each resample the simplest method that costs at most 5 % more than the cheapest on calibration."
    cost = np.array([choice.calibration_cost for choice in choices])
    taken = (cost <= (1 + NEARLY) * cost.min(0)).argmax(0)  # [1 + resample]
    resample = np.arange(len(taken))
    columns = [np.array(column)[taken, resample] for column in list(zip(*choices))[:3]]
    return Choice(*columns, choices[taken[0]].by_seed)
