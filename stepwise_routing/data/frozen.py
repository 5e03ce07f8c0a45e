"""The receipt of the held-out problems: everything was fixed at a commit, then they were drawn.

Here belongs how the receipt is read and put into a sentence. nbs/labs/micro_world/freeze.py makes it.
"""

import json
from dataclasses import dataclass

from ..util import PACKAGE

RECEIPT = PACKAGE / 'micro_problems' / 'frozen.json'


@dataclass(frozen=True)
class Frozen:
    "What was fixed, and when."

    commit: str  # code, settings and claims were fixed at this commit
    date: str  # of the draw
    test_seed: int  # seed of the generator
    earlier: list  # earlier receipts

    @property
    def sentence(self) -> str:
        "The receipt as a sentence, for the notes under a table."
        return (
            f'Micro problems: drawn on {self.date} with seed {self.test_seed}, after commit {self.commit[:9]} had fixed '
            'models, settings, rules and rows.'
        )


def read_frozen() -> Frozen | None:
    "The receipt of the shipped problems. None if there is no receipt yet."
    if not RECEIPT.is_file():
        return None
    return Frozen(**json.loads(RECEIPT.read_text('utf-8')))
