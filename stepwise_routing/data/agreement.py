"""How far two graders agree: the share of equal verdicts and Cohen's kappa.

Here belongs the comparison of two graders. How one grader grades belongs in `data.grading`.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..util import resamples
from .grading import grade_pairs

UNKNOWN = math.nan, math.nan  # the interval of a number that cannot be estimated


@dataclass(frozen=True)
class Agreement:
    "How far two graders agree on distinct (problem, answer) pairs."

    numbers: dict  # `n` pairs, `share` that agrees, `kappa`, 95 % intervals, who alone says right
    rows: list  # the disagreements: problem, question, reference, answer and both verdicts

    def frame(self):
        "The numbers as a DataFrame of one row."
        import pandas as pd

        return pd.DataFrame([self.numbers])

    def disagreements(self):
        "The disagreements as a DataFrame."
        import pandas as pd

        columns = ['problem', 'question', 'reference', 'answer', 'first', 'second']
        return pd.DataFrame(self.rows, columns=columns)


def cohen_kappa(
    counts,  # [..., 4]: pairs called right by neither, only the second, only the first, both
):
    "Cohen's kappa: agreement beyond chance, 1 at most. nan if chance alone would give full agreement."
    none, second, first, both = np.moveaxis(np.asarray(counts, float), -1, 0)
    by_chance = (none + second) * (second + both) + (none + first) * (first + both)
    with np.errstate(invalid='ignore'):
        return 2 * (none * both - second * first) / by_chance


def kappa_interval(
    cells,  # per pair: 0 to 3, a column of `cohen_kappa`
    problems,  # per pair: the id of its problem
) -> tuple:
    "95 % bootstrap interval of kappa, over problems. (nan, nan) for fewer than two problems."
    ids, problem = np.unique(problems, return_inverse=True)
    if len(ids) < 2:
        return UNKNOWN
    counts = np.zeros((len(ids), 4))  # [problem, cell]
    np.add.at(counts, (problem, cells), 1)
    draws = resamples(len(ids))[1:]  # row 0 is the sample itself
    kappas = cohen_kappa(draws @ counts)
    kappas = kappas[np.isfinite(kappas)]
    if not len(kappas):
        return UNKNOWN
    return tuple(np.quantile(kappas, (0.025, 0.975)).tolist())


def agreement(
    problems,
    answers,  # one per problem; a None is left out
    first,  # graders: functions of (problem, answer)
    second,
) -> Agreement:
    "Compare two graders on answers to problems; each distinct (problem, answer) counts once."
    from scipy.stats import binomtest

    pairs = list(dict.fromkeys(zip(problems, answers, strict=True)))
    answered = [(p, answer) for p, answer in pairs if answer is not None and answer.strip()]
    first_says = dict(grade_pairs(first, answered))
    second_says = dict(grade_pairs(second, answered))
    cells = [2 * first_says[key] + second_says[key] for key in first_says]
    rows = []
    for problem, answer in answered:
        verdicts = first_says[problem.id, answer], second_says[problem.id, answer]
        if verdicts[0] != verdicts[1]:
            row = dict(
                problem=problem.id,
                question=problem.question,
                reference=problem.answer,
                answer=answer,
                first=verdicts[0],
                second=verdicts[1],
            )
            rows.append(row)
    n = len(answered)
    same = n - len(rows)
    low, high = binomtest(same, n).proportion_ci(method='wilson') if n else UNKNOWN
    counts = [cells.count(cell) for cell in range(4)]
    kappa_low, kappa_high = kappa_interval(cells, [problem.id for problem, _ in answered])
    numbers = dict(
        n=n,
        share=same / n if n else math.nan,
        share_low=low,
        share_high=high,
        kappa=float(cohen_kappa(counts)),
        kappa_low=kappa_low,
        kappa_high=kappa_high,
        only_first=counts[2],
        only_second=counts[1],
        unanswered=len(pairs) - n,
    )
    return Agreement(numbers, rows)
