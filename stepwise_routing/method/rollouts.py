"""Every step that a router could ask for is drawn once and kept; a table of outcomes says what each hand-over comes to"""

# %% imports
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.benchmarks import find_benchmark
from ..data.grading import grade_pairs, is_right
from ..models.base import Request
from ..records import find_price
from ..util import npz_bytes, write_file
from .confidence import chain_features

# %% kinds
UNITS = ('flops', 'full_flops', 'cents')  # of cost
READINGS = ('continue', 'rewrite')  # the larger model goes on after the step, or writes it again
KINDS = ('written', 'read', 'sent', 'cached')  # of tokens
# generated; prompt that no cache of the walk held; prompt as billed; of it, billed at the lower price


# %% tokens
@dataclass(frozen=True)
class _Table:
    "What all tables have: for which problems, who writes, and what a token costs."

    benchmark: np.ndarray  # []
    split: np.ndarray  # [], "train", "calibration" or "test"
    models: np.ndarray  # [model], names, small to large
    params: np.ndarray  # [model], N
    dollars: np.ndarray  # [model, 3], a million prompt, cached and generated tokens; 0: free
    problem: np.ndarray  # [problem], ids

    def __len__(self):
        return len(self.problem)

    def prices(self, unit: str) -> np.ndarray:  # [model, kind]
        "FLOPs or US cents of a token of each kind."
        flops = 2 * self.params
        free = 0 * flops
        prompt, cached, written = self.dollars.T / 1e4
        of_unit = {
            'flops': (flops, free, free, free),  # the paper's reading
            'full_flops': (flops, flops, free, free),
            'cents': (written, free, prompt, cached - prompt),
        }
        return np.stack(of_unit[unit], -1)


# %% outcomes
@dataclass(frozen=True)
class Outcomes(_Table):
    "Every hand-over of every problem. T: steps of a small chain; S: steps of the longest one."

    features: dict  # name -> [problem, step], what a router may see; nan behind the end
    small: np.ndarray  # [problem, step, kind], tokens of the small model
    large: np.ndarray  # [problem, t, k, kind], tokens of larger model k behind t small steps
    right: np.ndarray  # [problem, t, k], 0 or 1; from t = T on that of the small chain
    steps: np.ndarray  # [problem], T
    cut: np.ndarray  # bool [problem, model], did a limit end the chain that this model writes alone?
    step_right: np.ndarray | None = None  # bool [problem, step], does a verifier accept the step?

    @property
    def inside(self) -> np.ndarray:  # bool [problem, step]
        return np.arange(self.small.shape[1]) < self.steps[:, None]


# %% walks
@dataclass(frozen=True)
class Walks(_Table):
    "Recorded walks of a router that may return to the small model, at each of its thresholds."

    method: np.ndarray  # []
    kappas: np.ndarray  # [setting], from safe to cheap
    tokens: np.ndarray  # [setting, problem, model, kind]; a reward model is the last model
    right: np.ndarray  # [setting, problem], 0 or 1


# %% save
def save(table: Outcomes | Walks, path) -> None:
    "Write an .npz file of plain arrays; features under their own names."
    arrays = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if field.name == 'features':
            arrays |= {f'feature {name}': values for name, values in value.items()}
        elif value is not None:
            arrays[field.name] = value
    write_file(path, npz_bytes(arrays))


def load(path) -> Outcomes | Walks:
    "Read a table. FileNotFoundError: there is none."
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    names = [name for name in arrays if name.startswith('feature ')]
    if not names:
        return Walks(**arrays)
    features = {name.removeprefix('feature '): arrays.pop(name).astype(float) for name in names}
    return Outcomes(features=features, **arrays)


def take(outcomes: Outcomes, rows) -> Outcomes:
    "Some problems of a table, or some of them twice."
    arrays = {}
    for name in ('problem', 'small', 'large', 'right', 'steps', 'cut', 'step_right'):
        values = getattr(outcomes, name)
        arrays[name] = None if values is None else values[rows]
    features = {name: values[rows] for name, values in outcomes.features.items()}
    return replace(outcomes, features=features, **arrays)


# %% exits
class Result(NamedTuple):
    "Right answers and costs, in one shape from here to the tables."

    right: np.ndarray  # [..., problem], 0 or 1
    cost: np.ndarray  # [..., problem]


def large_alone(outcomes: Outcomes, unit: str) -> Result:  # [problem]
    "The largest model writes everything."
    tokens = outcomes.large[:, 0, -1]
    return Result(outcomes.right[:, 0, -1].astype(float), tokens @ outcomes.prices(unit)[-1])


def exits(
    outcomes: Outcomes,
    unit: str,  # one of `UNITS`
    reading: str,  # one of `READINGS`
    thrown: int = 0,  # further small tokens that a hand-over throws away
) -> Result:  # [problem, exit]
    "All ways to leave the small chain: after each step to each larger model, the largest first; at last, never."
    problem = np.arange(len(outcomes))[:, None]
    T = outcomes.steps[:, None].astype(int)
    written = np.minimum(np.arange(outcomes.small.shape[1]) + 1, T)  # [problem, step], small steps
    rewrites = (written == T) | (reading == 'rewrite')  # nothing comes after the last step
    kept = written - rewrites  # [problem, step], the small steps that the larger model goes on from

    small_price, *larger_prices = outcomes.prices(unit)  # [kind] each
    spent = np.pad((outcomes.small @ small_price).cumsum(1), ((0, 0), (1, 0)))  # [problem, t]
    charged = np.einsum('ptkx,kx->ptk', outcomes.large, np.array(larger_prices))
    extra = thrown * small_price[0] * (written < T)  # nothing is begun behind the last step
    cost = (spent[problem, written] + extra)[..., None] + charged[problem, kept]  # [problem, step, k]
    right = outcomes.right[problem, kept].astype(float)

    def in_order(of_step, of_never):
        return np.c_[of_step[..., ::-1].reshape(len(outcomes), -1), of_never]

    never_right, never_cost = outcomes.right[problem, T, -1], spent[problem, T]
    return Result(in_order(right, never_right), in_order(cost, never_cost))


# %% doubt
def highest_so_far(doubt, larger: int = 1) -> np.ndarray:  # [problem, step(, k)] -> [problem, exit]
    "The highest doubt up to each exit. Behind its end a chain doubts nothing."
    if np.ndim(doubt) == 2:  # it asks for the largest model alone
        others = np.full((*doubt.shape, larger - 1), np.nan)
        doubt = np.concatenate([others, doubt[..., None]], 2)
    in_order = doubt[..., ::-1].reshape(len(doubt), -1)  # the largest model is asked for first
    return np.maximum.accumulate(np.where(np.isnan(in_order), -np.inf, in_order), 1)


def thresholds(doubt, most: int | None = None) -> np.ndarray:  # [setting]
    "Kappas that make a difference to these chains, `most` at most: from safe (hand over at once) to cheap (never)."
    doubts = np.unique(highest_so_far(doubt))
    doubts = doubts[np.isfinite(doubts)]
    if most and len(doubts) > most:
        doubts = doubts[np.linspace(0, len(doubts) - 1, most).round().astype(int)]
    return np.r_[doubts[0], np.nextafter(doubts, np.inf)]


# %% replay
def replay(
    outcomes: Outcomes,
    doubt,  # [problem, step(, k)], of a router
    kappas,  # [setting]
    unit: str,  # one of `UNITS`
    reading: str,  # one of `READINGS`
    thrown: int = 0,  # further small tokens that a hand-over throws away
) -> Result:  # [setting, problem]
    "Equation 6, read off the table: each chain is left at the first doubt that reaches kappa."
    highest = highest_so_far(doubt, len(outcomes.models) - 1)
    exit = np.stack([(highest < kappa).sum(1) for kappa in kappas])  # [setting, problem]
    right, cost = exits(outcomes, unit, reading, thrown)
    problem = np.arange(len(outcomes))
    return Result(right[problem, exit], cost[problem, exit])


def replay_walks(walks: Walks, unit: str) -> Result:  # [setting, problem]
    "The same for recorded walks."
    cost = np.einsum('spmx,mx->sp', walks.tokens, walks.prices(unit))
    return Result(walks.right.astype(float), cost)
