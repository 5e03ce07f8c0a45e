"""A calibrated router in words: which one, why, at what cost, and what it promises.

Here belong the texts. Choosing a router belongs in `own`.
"""

import math
from dataclasses import asdict, dataclass

from ..method.certain import Calibration

CLASSES = dict(  # of routers, from the simplest to the largest
    score_prob='a threshold on score_prob',
    score_logit='a threshold on score_logit',
    paper="a policy on the paper's features",
    full='a policy on all features',
)
LARGE_ALONE = 'large alone'
HARDLY = 0.9  # share of the large model's cost; a router above this is hardly worth its trouble
PROMISES = dict(
    certain='We are 90 % sure: on questions like the {n} calibration questions, the accuracy is at most {points:g} '
    "points below the large model's alone. So of 100 questions, on average at most {points:g} "
    'fewer are right. The 90 % is for one router; that the cheapest of several was taken on the '
    'same questions is not counted in it.',
    accuracy='On the {n} calibration questions, the accuracy is at most {points:g} points below the large '
    "model's alone. Nothing is promised for new questions.",
    miss='On questions like the {n} calibration questions, on average at most {points:g} of 100 are right with the '
    'large model and wrong with the router. That is proven where misses never fall from one '
    'threshold to the next, cheaper one.',
)
ALONE = 'The large model answers everything, so nothing is lost against it and nothing is saved.'


def promise(
    calibration: dict,  # fields of a `Calibration`
) -> str:
    "The promise of a calibrated router, in words."
    if calibration['kappa'] < 0:
        return ALONE
    text = PROMISES[calibration['target']]
    return text.format(n=calibration['n'], points=100 * calibration['alpha'])


def router_words(
    model_class: str,  # one of `CLASSES`, or `LARGE_ALONE`
) -> str:
    "The kind of a router, in words."
    if model_class == LARGE_ALONE:
        return 'The large model alone: no router saved cost and kept the promise'
    words = CLASSES[model_class]
    return words[0].upper() + words[1:]


def percent(share: float) -> str:
    return f'{100 * share:.1f} %'


@dataclass(frozen=True)
class Choice:
    "The router that was chosen for a target, and why. `print` tells both in words."

    model_class: str  # one of `CLASSES`, or `LARGE_ALONE`
    seed: int  # of the policy
    calibration: Calibration  # kappa, whether the target is met, and the shares on these problems
    costs: dict  # class -> share of the large model's cost; None: the class misses the target
    needed: int | None = None  # calibration problems that would be enough, if no router saves cost
    share: float = 0.4  # share of all problems that is set aside for calibration

    @property
    def reason(self) -> str:
        "Why this class was chosen, as a sentence."
        if self.model_class != LARGE_ALONE:
            return 'It is the simplest class that costs at most 5 % more than the cheapest one.'
        said = f'On {self.calibration.n} calibration problems, no router saves cost and keeps the'
        if self.needed is None:
            return f'{said} promise; a larger alpha may help.'
        problems = math.ceil(self.needed / self.share)
        return (
            f'{said} promise; about {self.needed} of them would do (collect {problems} problems), '
            'or a larger alpha.'
        )

    @property
    def notes(self) -> list:
        "Notes that a reader should not overlook."
        cost = self.calibration.cost
        if HARDLY < cost < 1:
            saved = percent(1 - cost)
            return [f"Note: this router saves only {saved} of the large model's cost."]
        return []

    def row(self) -> dict:
        "A row of a curve over alpha."
        result = self.calibration
        return {
            'alpha': result.alpha,
            'class': self.model_class,
            'cost': result.cost,
            'accuracy': result.accuracy,
            'large': result.large,
            'n': result.n,
            'needed': self.needed,
        }

    def class_line(self, name) -> str:
        "A line with the cost of a class."
        cost = self.costs[name]
        if cost is None:
            return f'  {CLASSES[name]}: left out, its bound is not met'
        return f'  {CLASSES[name]}: {percent(cost)}'

    def __str__(self):
        result = self.calibration
        right, large = percent(result.accuracy), percent(result.large)
        lines = [
            f'{router_words(self.model_class)} (kappa = {result.kappa:.4g}).',
            self.reason,
            "Share of the large model's cost on the calibration problems:",
            *[self.class_line(name) for name in self.costs],
            f'Right there: {right}; the large model alone: {large}.',
            f'Promise: {promise(asdict(result))}',
            *self.notes,
        ]
        return '\n'.join(lines)


def curve_words(
    choices,  # of several alphas on the same problems
) -> str:
    "One line: the smallest alpha that these problems can promise and that saves cost."
    n = choices[0].calibration.n
    possible = [c.calibration.alpha for c in choices if c.model_class != LARGE_ALONE]
    if not possible:
        return f'On {n} calibration problems, no router saves cost at any of these alphas.'
    least = min(possible)
    return f'On {n} calibration problems, {least:g} is the least alpha here that saves cost.'


def median_seed(
    results,  # (seed, `Calibration`) pairs of one class
) -> tuple:  # the pair with the median cost; of an even number, the more expensive middle one
    "The seed that represents a class. A result that misses the target counts as the most expensive."
    ordered = sorted(results, key=lambda pair: (not pair[1].met, pair[1].cost, pair[0]))
    return ordered[len(ordered) // 2]


def simplest_class(
    costs: dict,  # class -> share of the large model's cost, simplest class first; None: target missed
) -> str | None:
    "The simplest class that costs at most 5 % more than the cheapest one. None if no class saves cost."
    from ..method import comparison

    saving = {name: cost for name, cost in costs.items() if cost is not None and cost < 1}
    if not saving:
        return None
    return list(saving)[comparison.simplest_class(list(saving.values()))]
