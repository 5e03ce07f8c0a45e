"""The commit that fixed everything before the test problems of the micro benchmarks were drawn.

Here belongs how that receipt is read and told. How it is made, and what it covers, is in
nbs/labs/micro_world/freeze.py.
"""

import json
from dataclasses import dataclass

from ..base.tools import PACKAGE

RECEIPT = PACKAGE / 'micro_problems' / 'frozen.json'


@dataclass(frozen=True)
class Frozen:
    "What was fixed, and when."

    commit: str  # everything that decides is as it was there
    date: str  # of the draw of the test problems
    test_seed: int  # of the generator, for the test problems alone
    decides: dict  # what decides a result -> its digest
    earlier: list  # receipts of earlier test problems, without their digests

    @property
    def sentence(self) -> str:
        "For the notes under a table."
        return (
            f'Test problems: drawn on {self.date} with seed {self.test_seed}, after commit '
            f'{self.commit[:9]} had fixed problems, models, settings, rules and claims of the profile micro.'
        )


def read_frozen() -> Frozen | None:
    "The receipt of the shipped test problems; None before the first one."
    if not RECEIPT.is_file():
        return None
    return Frozen(**json.loads(RECEIPT.read_text('utf-8')))
