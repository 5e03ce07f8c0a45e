"""Draws SpecReason's walks at every digit: `python -m recorded_pair.judge --help`, in nbs/labs.

The large model grades each draft with a digit from 0 to 9. SpecReason keeps a draft whose digit is high enough. Steps
that are recorded are not drawn again. A walk that throws every draft away is not drawn: it is the large model alone.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from stepwise_routing.data.recorded import read_recorded
from stepwise_routing.method.judges import Grades, draw_walks, judged_chains
from stepwise_routing.method.rollouts import padded, save, shipped_outcomes, take
from stepwise_routing.models.base import Preference, Request
from stepwise_routing.store import Store, draw_settings
from stepwise_routing.util import npz_bytes, write_file

from .draw import ASK, new_parser, open_pair

FOLDER = Path(__file__).parent / 'judged'
DIGITS = range(9, -1, -1)  # a draft below the digit is thrown away: from safe to cheap
KAPPAS = np.array([(1 - digit) / 9 for digit in DIGITS])  # doubt is minus a ninth of the digit


class LikeliestDigit(Grades):
    "The score is the likeliest digit, as in the authors' code, not the mean."

    def verdict(self, digits, request):
        digit = int(np.argmax(digits.prob))
        return super().verdict(digits, request)._replace(score=digit / 9)


def write_judged(split: str, small, large, grades: Store, n: int | None, folder: Path) -> None:
    "The digits of the small chains, and the walks, on the first n problems of a split."
    problems = read_recorded('gsm8k').problems[split][:n]
    problems = [replace(problem, benchmark='gsm8k') for problem in problems]  # answers are graded
    judge = LikeliestDigit(large.model, grades)
    chains = small.write([Request(problem, **ASK) for problem in problems])
    digits = [np.rint(9 * np.array(row)) for row in judged_chains(judge, problems, chains)]
    arrays = dict(problem=np.array([problem.id for problem in problems]))
    arrays['digit'] = padded(digits, max(map(len, chains)), np.nan).astype(np.float32)
    write_file(folder / f'gsm8k-{split}.npz', npz_bytes(arrays))
    outcomes = take(shipped_outcomes('gsm8k')[split], slice(n))
    models = small, large, judge
    walks = draw_walks('SpecReason', outcomes, problems, models, KAPPAS, max_steps=ASK['max_steps'])
    save(walks, folder / f'gsm8k-{split}-SpecReason.npz')


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument('grades', help='file of the grades')
    parser.add_argument('--problems', type=int, help='the first ones of a split; all')
    parser.add_argument('--out', type=Path, default=FOLDER, help='folder of the tables')
    args = parser.parse_args()
    with open_pair(args) as (small, large):
        small.store.put_many(read_recorded('gsm8k').edges)
        settings = draw_settings('gsm8k', [large.model])
        with Store(args.grades, settings, record=Preference) as grades:
            for split in ('calibration', 'test'):
                write_judged(split, small, large, grades, args.problems, args.out)


if __name__ == '__main__':
    main()
