"""A noisier score: some steps show the confidences of another step.

Here belong the noise, how well the score then tells right steps from wrong ones, and the chance of noise that meets an
AUROC.
"""

from dataclasses import replace

import numpy as np

from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.confidence import auroc
from stepwise_routing.method.outcomes import OutcomeTable

CONFIDENCES = ('score_prob', 'score_logit', 'first_entropy')  # those of one step stay together
HALVINGS = 12  # of the interval that holds the chance


def with_noise(
    table: OutcomeTable,
    chance: float,  # of a small step to show the confidences of another one
    seed: tuple,  # of the draw, whole numbers; a higher chance hits the same steps and more
) -> OutcomeTable:
    "The same outcomes with a noisier score. Other steps are those of the same table."
    rng = np.random.default_rng([*seed, SPLITS.index(table.split)])
    problems, steps = np.nonzero(table.inside)
    n = len(steps)
    is_hit = rng.random(n) < chance
    others = (np.arange(n) + rng.integers(1, n, n)) % n
    shown = np.where(is_hit, others, np.arange(n))
    obs = table.obs.copy()
    for column in [table.features.index(name) for name in CONFIDENCES if name in table.features]:
        obs[problems, steps, column] = table.obs[problems[shown], steps[shown], column]
    return replace(table, obs=obs)


def step_auroc(
    table: OutcomeTable,
    first_wrong: np.ndarray,  # int [problem]; -1: no step is wrong
) -> float:
    "Chapter 01's AUROC of the least token probability: right steps should score higher than wrong ones."
    step = np.arange(table.obs.shape[1])
    last = np.where(first_wrong < 0, table.n_steps, first_wrong)[:, None]
    is_labelled = table.inside & (step <= last)
    scores = table.obs[..., table.features.index('score_prob')]
    is_right = step != first_wrong[:, None]
    area, _, _ = auroc(scores[is_labelled], is_right[is_labelled], n_boot=1)
    return area


def mean_auroc(
    table: OutcomeTable, first_wrong: np.ndarray, chance: float, seed: int, draws: int
) -> float:
    "The AUROC with noise, a mean over draws of the noise that no cell uses."
    noisy = [with_noise(table, chance, (seed, 1, draw)) for draw in range(draws)]
    return float(np.mean([step_auroc(each, first_wrong) for each in noisy]))


def find_chance(
    table: OutcomeTable,  # of training problems
    first_wrong: np.ndarray,
    target: float,  # AUROC
    seed: int,
    draws: int,  # of the noise
) -> float:  # 0 where the score is below the target without noise
    "The chance of noise that meets an AUROC, by bisection."
    if step_auroc(table, first_wrong) <= target:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if mean_auroc(table, first_wrong, middle, seed, draws) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2
