"""What was fixed before the first result: shares, targets, sizes, seeds and methods of the twelve cells.

Here belong the plan, the names of the cells and the folders. How problems are drawn belongs in `pools`, how the score
is made noisy in `noise`, what is measured in `cells`.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path

from stepwise_routing.base.settings import Policy
from stepwise_routing.base.tools import find_project
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.run.config import read_run

BENCHMARK = 'micro-omni'
MODELS = ('micro-small', 'micro-large')
HOPELESS = 6  # the level that is beyond both models
SOLVABLE = (1, 2, 3, 4, 5)  # levels, each as likely as the others


@dataclass(frozen=True)
class Plan:
    "All settings of the lab. The defaults are those of the committed tables."

    sizes: tuple = (300, 2000, 1000)  # problems of a cell to train, to calibrate, to test
    shares: tuple = (Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))  # hopeless ones
    aurocs: tuple = (0.75, 0.85, 0.95)  # of the score
    redraws: int = 2  # further draws of the large model, on calibration and test problems
    policies: int = 5  # training seeds of a class
    policy_steps: int | None = None  # of a training; None: as in nbs/params/micro.yaml
    alpha: float = 0.02  # accuracy that may be lost
    problem_seed: int = 28  # of the generator
    noise_seed: int = 28
    noise_draws: int = 20  # over which the AUROC is averaged where its chance of noise is sought
    n_boot: int = 2000  # resamples of the test problems

    def size(self, split: str) -> int:
        "Problems of a cell."
        return self.sizes[SPLITS.index(split)]

    def hopeless(self, split: str, share) -> int:
        "How many of a cell's problems are hopeless. ValueError unless that is a whole number."
        count = Fraction(share) * self.size(split)
        if count.denominator != 1:
            raise ValueError(f'{share} of {self.size(split)} {split} problems is no whole number')
        return int(count)

    def pool_sizes(self, split: str) -> tuple:
        "Hopeless and solvable problems that are drawn once, for all cells."
        counts = [self.hopeless(split, share) for share in self.shares]
        return max(counts), self.size(split) - min(counts)

    @property
    def cells(self) -> list:  # of `Cell`s, in the order of the table
        return [Cell(*pair) for pair in product(self.shares, self.aurocs)]

    @property
    def training(self) -> Policy:
        "How policies are trained: as in the micro profile, with at most all problems in a batch."
        policy = read_run('micro').config.policy
        policy = replace(policy, batch=min(policy.batch, self.size('train')), alpha=self.alpha)
        return policy if self.policy_steps is None else replace(policy, steps=self.policy_steps)


@dataclass(frozen=True)
class Cell:
    "A share of hopeless problems, and a noise of the score."

    share: Fraction
    auroc: float

    @property
    def name(self) -> str:
        "For files: hopeless50-auroc85."
        return f'hopeless{100 * float(self.share):.0f}-auroc{100 * self.auroc:.0f}'


@dataclass(frozen=True)
class Folders:
    "Where things are kept; all is read again where it is there."

    root: Path

    @property
    def draws(self) -> Path:
        "The store of what the models wrote."
        return self.root / 'draws.db'

    def table(self, split: str) -> Path:
        "The outcomes of the pools of a split."
        return self.root / 'pools' / f'{split}.npz'

    def first_wrong(self, split: str) -> Path:
        "The first wrong step of each of their small chains."
        return self.root / 'pools' / f'{split}-first-wrong.npy'

    def policies(self, cell: Cell) -> Path:
        return self.root / 'policies' / cell.name

    def result(self, cell: Cell, part: str) -> Path:
        "A file of a finished cell: rows or curves."
        return self.root / 'cells' / f'{cell.name}-{part}.csv'


def folders_of(
    root='',  # folder of stores, policies and results; '': runs/worth of this clone
) -> Folders:
    return Folders(Path(root) if root else find_project().runs / 'worth')
