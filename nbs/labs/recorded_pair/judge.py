"""Draws what SpecReason writes and asks, at every digit: `python -m recorded_pair.judge --help`, in nbs/labs.

The large model grades each draft with a digit from 0 to 9. SpecReason keeps a draft whose digit is high enough, so it
takes at most eleven different walks. With `--digits 0` only the first one is drawn. It keeps every draft, so each step
of the small model's own chain gets a grade. Steps of the walks go into the store of the rollouts, grades into a store
of their own. Steps that were drawn before, by whatever engine, are taken from pieces. Answers are not graded here.
"""

from stepwise_routing.store import RolloutStore
from stepwise_routing.method.outcomes import walk_outcomes
from stepwise_routing.method.routers import Grade, SpecReason, asking_settings

from .draw import drawing_parser, open_drawing
from .pieces import read_piece

DIGITS = range(11)  # a draft below this digit is thrown away: 0 keeps every draft, 10 keeps none


def judged_problems(turns: list) -> list:
    "The calibration and test problems of some turns. SpecReason is not trained."
    return [problem for turn in turns for split, problem in turn if split != 'train']


def not_graded(problem, answer) -> bool:
    return False


class LikeliestDigit(SpecReason):
    "The score is the likeliest digit, as in the authors' code, not the mean."

    def judged(self, grade, state):
        _, call = super().judged(grade, state)
        return grade.prob.index(max(grade.prob)) / 9, call


def main() -> None:
    parser = drawing_parser(__doc__)
    parser.add_argument('grades', help='file of the grades')
    parser.add_argument('--digits', type=int, nargs='+', default=DIGITS, help='0 to 10; all')
    parser.add_argument('--block', type=int, default=4, help='turns that are walked at once')
    parser.add_argument(
        '--taken',
        nargs='*',
        default=[],
        metavar='PIECE',
        help='pieces whose steps are not drawn again',
    )
    args = parser.parse_args()
    thresholds = [digit / 9 for digit in args.digits]
    with open_drawing(args) as (tree, turns):
        for piece in args.taken:
            _, edges = read_piece(piece)
            tree.store.put_many(edges)
        tree.grade = not_graded
        judge = tree.backends[1]
        settings = asking_settings(args.benchmark, judge)
        with RolloutStore(args.grades, settings, record=Grade) as grades:
            specreason = LikeliestDigit(grades, judge)
            for start in range(0, len(turns), args.block):
                problems = judged_problems(turns[start : start + args.block])
                wanted = [(specreason.at(threshold), problems) for threshold in thresholds]
                walk_outcomes(wanted, tree)
                done = min(start + args.block, len(turns))
                print(
                    f'{tree.drawn} edges, {tree.tokens} tokens, {done} of {len(turns)} turns, '
                    f'{len(grades)} grades',
                    flush=True,
                )


if __name__ == '__main__':
    main()
