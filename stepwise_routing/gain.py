"""Can a router between these models pay? What they do alone, and what the small one's confidences say about the gain.

A *gain* is a question that only the largest model answers rightly. Drawing the tables belongs in `own`.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .method.baselines import curved_logistic
from .method.confidence import auroc
from .method.policy import RISK, passes_bets
from .method.rollouts import Outcomes
from .records import token_cents

ALPHA = 0.05  # accuracy that may be lost, as in `own.calibrate`
USELESS = 0.35, 0.65  # an AUROC between these is worth nothing
HOPELESS = 0.25  # an AUROC of the gain among wrong chains, from which on unsure ones are given up
WIDE = 0.12  # an interval that reaches further to one side says nothing
COSTLY = 0.95  # cost of the small model, of the largest one's, from which on nothing is saved
FEW_GAINS = 5  # gains, or questions without one; with fewer we say nothing
CHANCE = 0.25  # saving for which nobody needs to know anything
LEARNABLE = 200  # questions to learn from; with fewer, policies are worse than a threshold
IF_WRONG = 'gain, if it is wrong'
LEARNT = 'learnt'
GO, STOP, MORE = 'Go on.', 'Stop.', 'Ask more.'
UNMATCHED = (
    'No answer of the large model counts as right. Compare your known answers with what it writes: '
    'for example "629" matches \\boxed{629}, and "The answer is 629" does not.'
)


# ---- what a chain shows


def gain_inputs(
    outcomes: Outcomes,
) -> tuple:  # wrong, gain bool [problem]; scores [problem, number]
    """Is the small chain wrong; is only the large model right; seven numbers about the small chain.

    A chain that does not show a number has the highest one: no threshold hands it over."""
    problem = np.arange(len(outcomes))
    small_right = outcomes.right[problem, outcomes.steps.astype(int), -1] == 1
    large_right = outcomes.right[:, 0, -1] == 1
    logit, length = outcomes.features['mean_logit'], outcomes.features['length']
    numbers = (
        np.nanmin(outcomes.features['min_odds'], 1),
        np.nanmin(logit, 1),
        np.nanmean(logit, 1),
        logit[:, 0],
        np.nansum(length, 1),
        length[:, 0],
        outcomes.steps,
    )
    numbers = np.stack(numbers, 1)
    surest = np.where(np.isnan(numbers), np.nanmax(numbers, 0), numbers)
    return ~small_right, large_right & ~small_right, surest


def learnt(label, inputs) -> np.ndarray:  # [problem]
    "Ten-fold predictions of a logistic regression on the numbers and their products."
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    model = curved_logistic(2000)
    folds = StratifiedKFold(10, shuffle=True, random_state=0)
    return cross_val_predict(model, inputs, label, cv=folds, method='predict_proba')[:, 1]


def gain_frame(benchmarks: dict) -> pd.DataFrame:  # as of `compare`
    "Can routing pay? How often each model alone fails, and how well the small model's numbers tell it, all splits."
    table = []
    for name, splits in benchmarks.items():
        parts = [gain_inputs(splits[split]) for split in ('train', 'calibration', 'test')]
        wrong, gain, inputs = (np.concatenate(part) for part in zip(*parts))
        line = dict(benchmark=name, problems=len(wrong), wrong=wrong.mean(), gain=gain.mean())
        scores = {
            'wrong by min-prob': (wrong, -inputs[:, 0]),
            'wrong by S^os': (wrong, -inputs[:, 1]),
            'gain by min-prob': (gain, -inputs[:, 0]),
            'gain by S^os': (gain, -inputs[:, 1]),
            'gain learnt': (gain, learnt(gain, inputs)),
        }
        for title, (label, score) in scores.items():
            area = auroc(label, score)
            line |= dict(zip((title, f'{title}, low', f'{title}, high'), area))
        table.append(line)
    return pd.DataFrame(table)


# ---- the verdict


def chance_saving(
    lost: float,  # accuracy of the largest model, minus that of the small one
    share: float,  # cost of the small model, of the largest one's
) -> float:
    "Share of the cost that is saved if so many random questions go to the small model that `ALPHA` is lost."
    return ALPHA / max(lost, ALPHA) * (1 - share)


def questions_needed(
    sizes,  # how far the intervals reach to one side
    gains: int,
    n: int,
) -> int:
    "With so many the interval of an AUROC reaches `WIDE` to each side, or nearly so."
    if min(gains, n - gains) >= FEW_GAINS:
        return max(math.ceil(1.1 * n * (max(sizes) / WIDE) ** 2), n + 1)
    least = min(1 / n, 0.5)
    p = np.clip(gains / n, least, 1 - least)
    return math.ceil(1.1 * 1.96**2 / (12 * p * (1 - p) * WIDE**2))  # the error of an AUROC near .5


def judge(
    lost,  # [problem], 1: only the largest model is right; -1: only the small one is
    areas: pd.DataFrame,  # score x what it should tell -> (AUROC, low, high)
    share: float,  # cost of the small model, of the largest one's
    enough: int,  # questions in all with which a policy can learn
) -> tuple:  # (`GO`, `STOP` or `MORE`; why)
    "Can a router pay, if `ALPHA` of the accuracy may be lost?"
    n, gains = len(lost), int((lost == 1).sum())
    low_end, high_end = USELESS
    saving = chance_saving(lost.mean(), share)
    if passes_bets(lost[None], np.ones((1, n)), ALPHA, RISK)[0, 0]:
        reason = 'The small model alone loses at most 5 of 100 answers (90 % sure): use it alone.'
        return STOP, reason
    if share > COSTLY:
        return (
            STOP,
            f'The small model costs {share:.0%} of the large one: there is nothing to save.',
        )
    is_enough = min(gains, n - gains) >= FEW_GAINS
    if is_enough:
        for name, (area, low, _) in areas['gain'].items():
            if area >= high_end and low > 0.5 and name != LEARNT:
                return GO, f'The {name} tells who gains: a threshold on it may be enough.'
        area, low, _ = areas['gain'].get(LEARNT, (0, 0, 0))
        is_learnt = area >= high_end and low > 0.5
        is_hopeless = IF_WRONG in areas and areas[IF_WRONG].iloc[0][0] <= HOPELESS
        knows_better = LEARNT in areas.index
        if is_hopeless and (is_learnt or not knows_better):
            return GO, (
                'A threshold will fail: the less sure a wrong chain is, the less the large model can mend it. '
                f'A policy that learns this may win; it needs {enough} questions or more.'
            )
        if is_learnt:
            return GO, (
                'No single confidence tells who gains, but seven numbers together do (learnt): a policy may '
                f'win; it needs {enough} questions or more.'
            )
    if saving >= CHANCE:
        unknown = 'too few to tell which'
        if is_enough:
            unknown = f'nothing tells which, as far as {n} questions show'
        return GO, (
            f'{gains} of {n} questions gain: {unknown}. But even chance pays: if the small model answers '
            f'random questions, {saving:.0%} are saved at 5 points.'
        )
    sizes = [max(area - low, high - area) for area, low, high in areas['gain']]
    if is_enough and max(sizes, default=0) <= WIDE:
        return STOP, (
            'Nothing that the small model shows tells who gains: a router is no better than chance, which '
            f'saves {saving:.0%} at 5 points.'
        )
    needed = questions_needed(sizes, gains, n)
    reason = (
        f'{gains} of {n} questions gain: too few to tell which. Probe about {needed} questions.'
    )
    return MORE, reason


# ---- what is shown


@dataclass(frozen=True, repr=False)
class Probe:
    "The models alone, and whether a router between them can pay."

    n: int  # questions
    right: dict  # model -> share of right answers, small to large
    gain: float  # share of the questions that only the largest model answers rightly
    loss: float  # that only the small one does
    share: float  # cost of the small model, of the largest one's
    steps: float  # of a small chain, mean
    cut: dict  # model -> chains that a limit cut
    seconds: dict  # model -> seconds a question; empty if nobody has measured it
    areas: pd.DataFrame  # score x what it should tell: AUROC with its 95 % interval
    verdict: str  # `GO`, `STOP` or `MORE`
    reason: str
    agreement: bool  # no answers are known: right is what the largest model says

    def __repr__(self):
        small, *_, large = self.right
        right = ', '.join(f'{name} {share:.0%}' for name, share in self.right.items())
        cut = ', '.join(f'{count} of {name}' for name, count in self.cut.items())
        seconds = ', '.join(f'{name} {value:.2g}' for name, value in self.seconds.items())
        areas = self.areas.map('{0[0]:.2f} [{0[1]:.2f}, {0[2]:.2f}]'.format)
        shown = [
            'how well a confidence tells (AUROC: 1 is perfect, .5 is chance), with 95 % intervals:'
        ]
        shown.append('the small model shows none' if areas.empty else areas.to_string())
        what = f'the same answer as {large}' if self.agreement else 'right'
        lines = [
            f'{self.n} questions, {what}: {right}',
            f'only {large} (the gain): {self.gain:.0%}; only {small}: {self.loss:.0%}',
            f'cost of {small}: {self.share:.0%} of {large}; {self.steps:.1f} steps a question',
            f'chains that a limit cut: {cut}',
            *([f'seconds a question: {seconds}'] if seconds else []),
            *shown,
            f'{self.verdict} {self.reason}',
        ]
        return '\n'.join(lines)


def alone_tokens(table: Outcomes) -> np.ndarray:  # [problem, model, kind]
    "What each model writes, reads and is sent if it answers alone, in one call."
    small = table.small[:, 0].astype(int)
    small[:, 0] = table.small[..., 0].sum(1)
    return np.concatenate([small[:, None], table.large[:, 0]], 1)


def unit_of(table: Outcomes) -> str:
    "Cost is counted in cents if the largest model has a price."
    return 'cents' if table.dollars[-1].any() else 'flops'


def unsure(numbers, gain) -> dict:  # name -> [problem], high where a chain is unsure
    "One number a chain: its least sure token, its lowest mean logit; and a mixture of seven numbers, if there are enough."
    found = {'least sure token': -numbers[:, 0], 'mean logit': -numbers[:, 1]}
    seen = ~np.isnan(numbers).any(0)  # by any chain; an API shows no logits
    if len(gain) >= LEARNABLE and min(gain.sum(), (~gain).sum()) >= 2 * FEW_GAINS:
        found[LEARNT] = learnt(gain, numbers[:, seen])
    return {name: score for name, score in found.items() if not np.isnan(score).any()}


def look(
    table: Outcomes,  # of which only the ends are read: hand over at once, and never
    agreement: bool,  # no answers are known
    speeds: dict,  # model -> tokens a second
    enough: int,  # questions in all with which a policy can learn
) -> Probe:
    "What a table says."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # minima of columns that an interface hides
        wrong, gain, numbers = gain_inputs(table)
    larger_right = table.right[:, 0].astype(float)  # [problem, k]
    lost = larger_right[:, -1] - ~wrong
    tokens = alone_tokens(table).mean(0)  # [model, kind]
    costs = (tokens * table.prices(unit_of(table))).sum(1)
    share = float(costs[0] / costs[-1])
    scores = unsure(numbers, gain)
    areas = {'small model wrong': {}, 'gain': {}}
    for name, score in scores.items():
        areas['small model wrong'][name] = auroc(wrong, score)
        areas['gain'][name] = auroc(gain, score)
        if min(gain.sum(), (wrong & ~gain).sum()) >= FEW_GAINS:
            areas.setdefault(IF_WRONG, {})[name] = auroc(gain[wrong], score[wrong])
    areas = pd.DataFrame(areas)
    verdict, reason = STOP, UNMATCHED
    if larger_right[:, -1].any():
        verdict, reason = judge(lost, areas, share, enough)
    names = table.models.tolist()
    seconds = {n: float(w / speeds[n]) for n, w in zip(names, tokens[:, 0]) if n in speeds}
    return Probe(
        n=len(gain),
        right=dict(zip(names, [float(1 - wrong.mean()), *larger_right.mean(0).tolist()])),
        gain=float(gain.mean()),
        loss=float((lost < 0).mean()),
        share=share,
        steps=float(table.steps.mean()),
        cut=dict(zip(names, table.cut.sum(0).tolist())),
        seconds=seconds,
        areas=areas,
        verdict=verdict,
        reason=reason,
        agreement=agreement,
    )


# ---- the price


def price_of(
    table: Outcomes,  # of a probe
    specs,  # of the models, small to large
    speeds: dict,  # model -> tokens a second
) -> np.ndarray:  # [cents or seconds, at least or at most]
    """US cents and seconds that all hand-overs of a question will need; nan if nobody has measured the time.

    Behind t of T small steps a larger model writes at least 1 - t/T of what it writes alone, and at most all of it."""
    T = table.steps.astype(int)
    small = table.small[..., 0].astype(int)  # [problem, step]
    behind = np.maximum(T[:, None] - 1 - np.arange(small.shape[1]), 0)  # hand-overs after a step
    repeated = (small * behind).sum(1)  # tokens of small steps in the prompts of all hand-overs
    alone = alone_tokens(table)
    cents, seconds = np.zeros(2), np.zeros(2)
    for k, spec in enumerate(specs):
        written, _, sent, _ = alone[:, k].T
        writes = np.array([written, written])  # [at least or at most, problem]
        if k:
            writes, sent = written * [(T + 1) / 2, T], sent * T + repeated
        if spec.price:
            cents += token_cents(spec.price, sent.mean(), 0, writes.mean(1))
        seconds += writes.mean(1) / speeds.get(spec.name, np.nan)
    return np.array([cents, seconds])
