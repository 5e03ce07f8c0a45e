"""The candidates among which a router is chosen: nested classes, and what each comes to.

Here belongs what one candidate is, costs and can promise. Which candidate is taken, and where
candidates are kept, is in `own`.
"""

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..base.tools import read_file
from .certain import Calibration, problems_for
from .comparison import WORTH
from .confidence import FEATURES
from .cpo import TableEnv
from .outcomes import OutcomeTable
from .policy import (
    ESCALATE,
    FULL_FEATURES,
    LARGE_ONLY,
    PAPER_FEATURES,
    RoutingPolicy,
    covered,
    kept_config,
    load_policy,
    save_policy,
    threshold_policy,
)
from .training import calibrate, candidate_thresholds, lost_at, threshold_path


def shown_features(table: OutcomeTable) -> tuple:
    "The features that the models' interfaces give: no step lacks them."
    is_missing = np.isnan(table.obs[table.inside]).any(0)
    return tuple(name for name in FULL_FEATURES if not is_missing[FEATURES.index(name)])


def nested_classes(
    features,  # that the models' interfaces give, in the order of `FULL_FEATURES`
) -> dict:  # class -> its features, the simplest class first
    "A threshold on each score, a policy on the paper's features, a policy on all features."
    scores = [name for name in ('score_prob', 'score_logit') if name in features]
    classes = {name: (name,) for name in scores}
    paper = tuple(name for name in features if name in PAPER_FEATURES)
    if scores == ['score_prob']:  # an API gives one score; it takes the place of the other
        paper = tuple(features)
    classes['paper'] = paper
    if paper != tuple(features):
        classes['full'] = tuple(features)
    return classes


def save_threshold(
    env: TableEnv,  # of training problems and a single feature
    folder,  # where the policy goes
    key: str,  # what identifies it
    unit: str,  # of cost
) -> None:
    "A bare threshold as a candidate: nothing to train, and kappa is chosen in calibration."
    if kept_config(folder).get('key') == key:
        return
    facts = dict(on_escalate=env.on_escalate, models=env.models, n_train=len(env), seed=0)
    save_policy(folder, threshold_policy(env.scaler), 0.5, key=key, unit=unit, **facts)


class HeldOut(TableEnv):
    "Calibration problems of one policy: its network runs once, not anew for every threshold."

    def __init__(self, policy: RoutingPolicy, *table_and_options):
        import torch

        super().__init__(*table_and_options)
        self.policy = policy
        with torch.no_grad():
            self.chances = policy(self.x[self.inside])[..., ESCALATE].exp()

    def deploy(self, policy, kappa, rows=None, pi=None):
        "As that of `TableEnv`."
        if policy is self.policy and rows is None:
            pi = self.chances
        return super().deploy(policy, kappa, rows, pi)


@dataclass(frozen=True)
class Candidate:
    "A trained router, with its problems."

    model_class: str  # a key of `nested_classes`
    seed: int
    policy: RoutingPolicy
    training: TableEnv  # training problems
    held_out: HeldOut  # calibration problems


def candidate_folder(folder, model_class: str, seed: int) -> Path:
    "Where the policy of a candidate is."
    return Path(folder) / 'candidates' / model_class / f'seed{seed}'


def read_candidates(
    folder,  # of `own.train`
    training: OutcomeTable,  # the training problems
    held_out: OutcomeTable,  # the calibration problems
) -> list:
    "All candidates. FileNotFoundError: nothing is trained yet."
    file = Path(folder) / 'candidates.json'
    if not file.is_file():
        raise FileNotFoundError(f'{folder}: nothing is trained yet; call train')
    found = []
    for model_class, seed in json.loads(read_file(file)):
        policy = load_policy(candidate_folder(folder, model_class, seed))
        config = policy.config
        options = policy.features, config['on_escalate'], config['unit'], policy.scaler
        env = TableEnv(training, *options)
        found.append(Candidate(model_class, seed, policy, env, HeldOut(policy, held_out, *options)))
    return found


def training_row(model_class: str, seed: int, result: Calibration) -> dict:
    "What a candidate comes to on the training problems, in %."
    shares = dict(right=result.accuracy, missed=result.miss)
    shares["of the large model's cost"] = result.cost
    percents = {name: round(100 * share, 1) for name, share in shares.items()}
    return {'class': model_class, 'seed': seed} | percents


def calibrated(candidate: Candidate, target: str, alpha: float) -> Calibration:
    "The threshold of a candidate. A bound that is not met says so in the result alone."
    path = None
    if target == 'miss':
        path = threshold_path(candidate.policy, candidate.training)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return calibrate(candidate.policy, candidate.held_out, target, alpha, path)


def large_alone(
    env: TableEnv,  # calibration problems
    target: str,
    alpha: float,
) -> Calibration:
    "What the large model alone comes to."
    n = len(env)
    large = float(env.large_right.mean())
    miss = float((1 - covered(env.large_right, env.large_again)).mean())
    bound = (n * miss + 1) / (n + 1)
    is_met = target != 'miss' or bound <= alpha + 1e-12
    return Calibration(LARGE_ONLY, target, alpha, is_met, n, large, large, miss, bound, 1.0)


def problems_for_bound(
    alpha: float,  # misses that are allowed
) -> int:
    "Calibration problems below which no bound on misses is as low as alpha."
    return math.ceil(1 / max(alpha, 1e-18) - 1 - 1e-9)


def check_enough(
    folder,  # for the message
    n: int,  # calibration problems
    target: str,
    alpha: float,
) -> None:
    "ValueError: a bound on misses cannot be as low as alpha on so few problems."
    if target != 'miss' or not 0 < alpha < 1:
        return
    needed = problems_for_bound(alpha)
    if n < needed:
        raise ValueError(
            f'{folder}: {n} calibration problems are too few for {alpha:.4g}, which takes '
            f'at least {needed}; collect more problems, or allow more'
        )


def problems_worth(
    candidate: Candidate,
    alpha: float,  # accuracy that may be lost
) -> int | None:  # None: no number would do
    """How many calibration problems let a candidate save a tenth of the cost, about.

    The first threshold, from safe to cheap, that saves so much is asked, see `problems_for`.
    """
    env = candidate.held_out
    kappas = candidate_thresholds(candidate.policy, env)
    is_worth = env.risk_curve(candidate.policy, kappas)['cost'] <= 1 - WORTH
    if not is_worth.any():
        return None
    return problems_for(lost_at(candidate.policy, env, kappas[is_worth.argmax()]), alpha)


def problems_for_any(
    candidates,
    target: str,
    alpha: float,
) -> int | None:  # None: not known, or no number would do
    "How many calibration problems would do, where those at hand do not."
    if target == 'miss':
        needed = problems_for_bound(alpha)
        return needed if needed > len(candidates[0].held_out) else None
    if target == 'accuracy':
        return None
    numbers = [problems_worth(candidate, alpha) for candidate in candidates]
    return min((n for n in numbers if n is not None), default=None)
