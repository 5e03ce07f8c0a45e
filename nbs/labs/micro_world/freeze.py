"""Draws new problems when everything else is fixed: `python -m micro_world.freeze`, in nbs/labs.

A result is fair if nothing was chosen after the test problems had been seen. So the order is this:
commit everything, run this module, draw the outcomes, commit the tables. It takes problems from a seed
of the generator that was never used, leaves out the questions of all earlier sets, and writes a
receipt: the commit, which fixes all that decides, the date and the seed.
"""

import json
import subprocess
from dataclasses import asdict
from datetime import date

from stepwise_routing.data.frozen import RECEIPT, Frozen, read_frozen
from stepwise_routing.util import write_file

from .ship import main as ship


def git(*words) -> str:
    done = subprocess.run(['git', *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def freeze() -> Frozen:
    "Write the receipt and the new problems. SystemExit if something is not committed."
    if git('status', '--porcelain', '--untracked-files=no'):
        raise SystemExit('commit everything first: the receipt names the commit')
    last = read_frozen()
    before = dict(commit=last.commit, date=last.date, test_seed=last.test_seed)
    commit, today = git('rev-parse', 'HEAD'), str(date.today())
    frozen = Frozen(commit, today, last.test_seed + 1, [*last.earlier, before])
    write_file(RECEIPT, json.dumps(asdict(frozen), indent=1) + '\n')
    ship()
    return frozen


if __name__ == '__main__':
    print(freeze().sentence)
