"""How sure we are of a chosen setting: every resample chooses again, on its own calibration problems.

An interval must show what would change if everything were drawn again: the test problems, the
calibration problems on which a setting was chosen, and the seeds of training. Here belongs that
choice. What a setting costs belongs in `method.comparison`, how intervals are shown in `report`.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..base.statistics import resamples
from ..base.tools import write_file
from .certain import capital, is_few, losses, quantile
from .outcomes import keeps_accuracy, npz_bytes, replay

METRICS = (
    'correct',
    'covered',
    'missed',
    'paper_flops',
    'full_flops',
    'cents',
    'small_tokens',
    'large_tokens',
    'steps',
    'large_steps',
)
CHOICES = ('certain', 'accuracy')  # of the points that tables show, the headline first
BLOCK = 64  # settings that are tested at a time


@dataclass(frozen=True)
class Samples:
    "Resamples of all that a result rests on; the first row of each is the sample itself."

    calibration: np.ndarray  # [1 + resample, problem], how often a problem counts
    test: np.ndarray  # [1 + resample, problem]
    n_boot: int
    seed: int

    def seeds(self, n: int) -> np.ndarray:  # [1 + resample, seed]
        "How often each of n policies counts, as a share."
        return resamples(n, self.n_boot, self.seed + 2) / n


def draw_samples(
    calibration,  # `OutcomeTable`
    test,  # `OutcomeTable`
    n_boot: int,  # resamples
    seed: int,
) -> Samples:
    "Resamples of two tables. Those of test problems are in the order of their ids, as in the results."
    place = np.argsort(np.argsort(test.problem_id, kind='stable'))
    return Samples(
        resamples(len(calibration), n_boot, seed + 1),
        resamples(len(test), n_boot, seed)[:, place],
        n_boot,
        seed,
    )


@dataclass(frozen=True)
class Point:
    "A method at the setting that a target chooses; in the resamples, at the one chosen there."

    method: str
    on_escalate: str
    target: str  # one of `CHOICES`
    threshold: float  # of the sample itself
    columns: dict  # of `METRICS` -> means [1 + resample]


# ---- the choice in each resample


def chosen_within(
    accuracy,  # [resample, setting]
    cost,  # [resample, setting]
    large_accuracy,  # [resample]
    alpha: float,  # accuracy that may be lost
) -> np.ndarray:  # int [resample]
    "The cheapest setting that keeps the accuracy, as `cheapest_within` of each resample."
    keeps = keeps_accuracy(accuracy, large_accuracy[:, None], alpha)
    return np.where(keeps, cost, np.inf).argmin(1)


def safe_in_resamples(
    loss,  # [setting, problem], see `losses`
    counts,  # [resample, problem]
    alpha: float,  # what may be lost
    delta: float = 0.1,  # how often the answer may be wrong
) -> np.ndarray:  # bool [resample, setting]
    "`is_safe` of each resample."
    n = counts.shape[1]
    if is_few(n, alpha):
        drawn = np.array([np.repeat(np.arange(n), row.astype(int)) for row in counts])
        return np.stack([capital(x[drawn], alpha, delta).max(-1) >= 1 / delta for x in loss], 1)
    mean = counts @ loss.T / n
    square = counts @ (loss**2).T / n
    variance = np.maximum(square - mean**2, 0) * n / (n - 1)
    return mean + quantile(1 - delta) * np.sqrt(variance / n) <= alpha


def last_safe(
    loss,  # [setting, problem], from safe to cheap
    counts,  # [resample, problem]
    alpha: float,
) -> np.ndarray:  # int [resample]; -1: the large model alone
    "`certain_setting` of each resample."
    last = np.full(len(counts), -1)
    goes_on = np.ones(len(counts), bool)
    for start in range(0, len(loss), BLOCK):
        active = np.flatnonzero(goes_on)
        if not len(active):
            break
        block = loss[start : start + BLOCK]
        safe = safe_in_resamples(block, counts[active], alpha)
        passed = np.logical_and.accumulate(safe, axis=1).sum(1)
        last[active] += passed
        goes_on[active] = passed == len(block)
    return last


# ---- the points of a method


@dataclass(frozen=True)
class Candidates:
    "A method on calibration problems: what its settings come to, for each seed of training."

    thresholds: list  # of its settings
    correct: np.ndarray  # [seed, setting, problem]
    cost: np.ndarray  # [seed, setting, problem]
    large_share: np.ndarray  # [problem], how often the large model is right
    large_correct: np.ndarray  # [problem]
    large_cost: np.ndarray  # [problem]


def count_seeds(routers: dict) -> int:
    "How many policies a setting has; 1 where only the large model is left."
    return len(next(iter(routers.values()), [None]))


def candidates_of(
    routers: dict,  # threshold -> the `Router` of each seed
    table,  # `OutcomeTable` of calibration problems
    cost: str,  # one of `UNITS`
    run=replay,
) -> Candidates:
    "What all settings of a method come to on calibration problems."
    outcomes = [[run(router, table) for router in each] for each in routers.values()]
    shape = len(routers), count_seeds(routers), len(table)

    def gathered(column):
        values = [[outcome[column] for outcome in each] for each in outcomes]
        return np.array(values, float).reshape(shape).swapaxes(0, 1)

    large = table.large_only()
    return Candidates(
        list(routers),
        gathered('correct'),
        gathered(cost),
        table.large_share,
        large['correct'].astype(float),
        large[cost].astype(float),
    )


def _means(counts, values, large):  # [setting, problem], [problem] -> [resample, setting + 1]
    "Means over problems, the large model's last."
    return counts @ np.vstack([values, large]).T / counts.shape[1]


def choices(
    candidates: Candidates,
    counts,  # [1 + resample, problem], of calibration problems
    seed_shares,  # [1 + resample, seed]
    alpha: float,
    order: list,  # thresholds from safe to cheap
    by_seed: bool = False,  # for the target "accuracy": does each seed choose for itself?
) -> dict:  # of `CHOICES` -> int [1 + resample, seed]; the number of settings: the large model
    "What each resample chooses."
    c = candidates
    n_settings = len(c.thresholds)
    by_safety = np.array([c.thresholds.index(x) for x in order] + [n_settings])
    shape = seed_shares.shape
    chosen = {target: np.empty(shape, int) for target in CHOICES}
    large_accuracy = counts @ c.large_correct / counts.shape[1]
    if by_seed:
        for k in range(shape[1]):
            accuracy = _means(counts, c.correct[k], c.large_correct)
            cost = _means(counts, c.cost[k], c.large_cost)
            chosen['accuracy'][:, k] = chosen_within(accuracy, cost, large_accuracy, alpha)
    kinds, kind_of = np.unique(seed_shares, axis=0, return_inverse=True)
    for i, shares in enumerate(kinds):  # resamples with the same seeds
        rows = np.flatnonzero(kind_of.ravel() == i)
        correct = np.tensordot(shares, c.correct, 1)
        cost = _means(counts[rows], np.tensordot(shares, c.cost, 1), c.large_cost)
        if not by_seed:
            accuracy = _means(counts[rows], correct, c.large_correct)
            within = chosen_within(accuracy, cost, large_accuracy[rows], alpha)
            chosen['accuracy'][rows] = within[:, None]
        loss = losses(c.large_share, correct[by_safety[:-1]])
        last = last_safe(loss, counts[rows], alpha)
        certain = by_safety[last]  # -1: the large model, which stands last
        is_cheap = np.take_along_axis(cost, certain[:, None], 1)[:, 0] < cost[:, -1]
        chosen['certain'][rows] = np.where(is_cheap, certain, n_settings)[:, None]
    return chosen


def test_columns(outcome: dict, table) -> dict:  # of `METRICS` -> [problem]
    "The columns of an outcome on test problems, as `resampled` has them."
    wrong = 1 - outcome['correct']
    extra = dict(covered=1 - table.correct[:, 0] * wrong, missed=table.large_again * wrong)
    return {metric: (outcome | extra)[metric] for metric in METRICS}


def point_columns(
    routers: dict,  # threshold -> the `Router` of each seed
    chosen,  # int [1 + resample, seed], of `choices`
    seed_shares,  # [1 + resample, seed]
    counts,  # [1 + resample, problem], of test problems
    table,  # `OutcomeTable` of test problems
    run=replay,
) -> dict:  # of `METRICS` -> [1 + resample]
    "What the chosen settings come to on test problems."
    settings = list(routers.values())
    columns = dict.fromkeys(METRICS, 0.0)
    for k in range(chosen.shape[1]):
        used, place = np.unique(chosen[:, k], return_inverse=True)
        outcomes = []
        for i in used:
            is_large = i == len(settings)
            outcome = table.large_only() if is_large else run(settings[i][k], table)
            outcomes.append(test_columns(outcome, table))
        for metric in METRICS:
            values = np.array([o[metric] for o in outcomes], float)
            means = counts @ values.T / counts.shape[1]
            at_choice = np.take_along_axis(means, place.reshape(-1, 1), 1)[:, 0]
            columns[metric] = columns[metric] + seed_shares[:, k] * at_choice
    return columns


def points_of(
    routers: dict,  # of a method: threshold -> the `Router` of each seed
    grid,  # its `Grid`
    tables: dict,  # split -> `OutcomeTable`
    samples: Samples,
    run=replay,
    shown=None,  # thresholds that test problems may be asked about; None: all
    fixed: bool = False,  # is its threshold for "accuracy" that of each policy, chosen seed by seed?
) -> tuple:  # (`Point`s, cost on calibration [1 + resample], a share of the large model's)
    "A method at its chosen and at its certain setting, chosen again in every resample."
    if shown is not None:
        routers = {x: each for x, each in routers.items() if x in shown}
    candidates = candidates_of(routers, tables['calibration'], grid.unit, run)
    seed_shares = samples.seeds(count_seeds(routers))
    order = [x for x in grid.order if x in routers]
    chosen = choices(candidates, samples.calibration, seed_shares, grid.alpha, order, fixed)
    thresholds = [*routers, math.inf]  # the large model alone
    of_sample = dict(accuracy=grid.threshold, certain=grid.certain)
    points = []
    for target in CHOICES:
        # sums in another order may break a tie elsewhere: the sample's own choice is known
        chosen[target][0] = thresholds.index(of_sample[target])
        columns = point_columns(
            routers, chosen[target], seed_shares, samples.test, tables['test'], run
        )
        points.append(
            Point(grid.method, grid.on_escalate, target, of_sample[target], columns)
        )
    cost = calibration_cost(candidates, chosen['accuracy'], samples.calibration, seed_shares)
    return points, cost


def calibration_cost(candidates, chosen, counts, seed_shares) -> np.ndarray:  # [1 + resample]
    "The cost of the chosen settings on calibration problems, as a share of the large model's."
    total = 0.0
    for k in range(chosen.shape[1]):
        cost = _means(counts, candidates.cost[k], candidates.large_cost)
        at_choice = np.take_along_axis(cost, chosen[:, [k]], 1)[:, 0]
        total = total + seed_shares[:, k] * at_choice / cost[:, -1]
    return total


def mixed_point(
    points,  # `Point`s of one target, a method each
    taken,  # int [1 + resample], which of them each resample takes
    name: str,  # of the method that takes one of them
) -> Point:
    "The point of a method that is one of several others."
    resample = np.arange(len(taken))
    columns = {}
    for metric in METRICS:
        values = np.array([point.columns[metric] for point in points])
        columns[metric] = values[taken, resample]
    own = points[taken[0]]
    return Point(name, own.on_escalate, own.target, own.threshold, columns)


# ---- their file


def save_points(path, points) -> None:
    "Write points as an .npz file with the same bytes every time."
    arrays = dict(
        names=np.array([(p.method, p.on_escalate, p.target) for p in points], str).reshape(-1, 3),
        thresholds=np.array([p.threshold for p in points], float),
    )
    for metric in METRICS:
        arrays[metric] = np.array([p.columns[metric] for p in points], float)
    write_file(path, npz_bytes(arrays))


def read_points(path, n_boot: int) -> dict:  # (method, on_escalate, target) -> `Point`
    "The points of a file; none if there is no file. ValueError if it has another number of resamples."
    if not path.is_file():
        return {}
    points = {}
    with np.load(path, allow_pickle=False) as arrays:
        columns = {metric: arrays[metric] for metric in METRICS}
        if arrays['names'].size and columns['correct'].shape[1] != 1 + n_boot:
            raise ValueError(
                f'{path} has {columns["correct"].shape[1] - 1} resamples, not {n_boot}: '
                'run nbs/04b_comparison.ipynb again'
            )
        for i, (name, threshold) in enumerate(zip(arrays['names'], arrays['thresholds'])):
            key = tuple(map(str, name))
            own = {metric: values[i] for metric, values in columns.items()}
            points[key] = Point(*key, float(threshold), own)
    return points
