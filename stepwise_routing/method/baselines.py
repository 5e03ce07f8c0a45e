"""Other routers: a threshold on a column, STEER, a regression on stakes, SpecReason and RSD; random and oracle"""

# %% imports
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..data.benchmarks import find_benchmark
from ..data.grading import grade_pairs, is_right
from ..models.base import Request
from ..records import score_messages
from .policy import observed
from .rollouts import (
    KINDS,
    Chain,
    Outcomes,
    Result,
    Walks,
    exits,
    highest_so_far,
    large_alone,
    run_walks,
    tokens_of,
)


# %% thresholds
def low(column: str):  # -> router
    "A threshold on one column: the lower, the more doubt."
    return lambda features: -features[column]


def high(column: str):  # -> router
    "The higher, the more doubt."
    return lambda features: features[column]


# %% mixture
@dataclass(frozen=True)
class _Mixture:
    "Two normal components of a score, the unsure one first."

    weight: np.ndarray  # [2]
    mean: np.ndarray  # [2], ascending
    std: np.ndarray  # [2]

    def sure(self, score):  # [...], P(sure component | score)
        "It never falls with the score: behind the turn of the log-odds it stays as at the turn."
        precision = self.std**-2
        if not np.isclose(*precision):
            turn = (self.mean * precision) @ [1, -1] / (precision @ [1, -1])
            score = (np.maximum if self.std[1] > self.std[0] else np.minimum)(score, turn)
        z = (np.asarray(score)[..., None] - self.mean) / self.std
        odds = (np.log(self.weight / self.std) - z**2 / 2) @ [-1, 1]
        with np.errstate(over='ignore'):
            return 1 / (1 + np.exp(-odds))

    def is_degenerate(self, scores) -> bool:
        "Is a component nearly empty, a spike, or on top of the other one?"
        spread = scores.std()
        is_spike = self.std.min() < 0.01 * spread
        return bool(self.weight.min() < 0.05 or is_spike or np.ptp(self.mean) < 0.1 * spread)


# %% fit-mixture
def fit_mixture(scores, seed: int = 0) -> _Mixture:  # [step]
    "Two components by EM (scikit-learn)."
    from sklearn.mixture import GaussianMixture

    centre, scale = scores.mean(), scores.std()
    em = GaussianMixture(
        2, n_init=5, random_state=seed, tol=1e-5, max_iter=1000, init_params='k-means++'
    )
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of steps that did not converge
        em.fit(((scores - centre) / scale)[:, None])
    order = em.means_[:, 0].argsort()
    mean = em.means_[order, 0] * scale + centre
    std = np.sqrt(em.covariances_[order, 0, 0]) * scale
    return _Mixture(em.weights_[order], mean, std)


# %% steer
@dataclass(frozen=True)
class Steer:
    "STEER's doubt: how little a step looks like the sure component, by the mixture of its index."

    mixtures: list  # per step index; None: the pooled one serves
    pooled: _Mixture

    def __call__(self, features: dict) -> np.ndarray:  # doubt [problem, step]
        logits = features['mean_logit'].T  # [step, problem]
        mixtures = self.mixtures + [None] * (len(logits) - len(self.mixtures))
        sure = [(mixture or self.pooled).sure(x) for mixture, x in zip(mixtures, logits)]
        return -np.stack(sure, 1)  # one minus it would lose its digits near 1


LEAST = 50  # steps with an index, for a mixture of their own


def fit_steer(train: Outcomes, seed: int = 0) -> Steer:
    "Stepwise Gaussian mixtures of the small chains, fitted without labels (STEER, Lee et al., 2025)."

    def at_index(scores):
        scores = scores[np.isfinite(scores)]
        if len(scores) < LEAST:
            return None
        mixture = fit_mixture(scores, seed)
        return None if mixture.is_degenerate(scores) else mixture

    logits = train.features['mean_logit']
    pooled = fit_mixture(logits[train.inside], seed)
    return Steer([at_index(scores) for scores in logits.T], pooled)


# %% stakes-seen
STAKE_RULES = {  # rule -> columns that it sees of a step, the simplest rule first
    'min-prob': ('min_odds',),
    'mean-logit': ('mean_logit',),
    'curve': ('min_odds', 'step', 'length', 'worst', 'longest', 'first_odds', 'first_length'),
}


def with_past(features: dict) -> dict:
    "Features, and what the steps up to each one were at worst and at first."
    odds, length = features['min_odds'], features['length']
    past = dict(
        worst=np.minimum.accumulate(odds, 1),
        longest=np.maximum.accumulate(length, 1),
        first_odds=odds[:, :1] + 0 * odds,
        first_length=length[:, :1] + 0 * length,
    )
    return features | past


@dataclass(frozen=True)
class StakeRouter:
    "A rule of `STAKE_RULES` as a router."

    rule: str
    model: object = None  # of scikit-learn; None: minus the column itself

    def __call__(self, features: dict) -> np.ndarray:  # doubt [problem, step]
        x = observed(with_past(features), STAKE_RULES[self.rule])
        if self.model is None:
            return -x[..., 0]
        inside = ~np.isnan(x).any(-1)
        doubt = np.full(x.shape[:2], np.nan)
        doubt[inside] = self.model.decision_function(x[inside])
        return doubt


# %% stakes-loss
def losses(outcomes: Outcomes, unit: str, reading: str) -> np.ndarray:  # [problem, exit]
    "Cost and mistakes of every exit, at the price of a mistake at which both models alone are equally good."
    right, cost = exits(outcomes, unit, reading)
    large = large_alone(outcomes, unit)
    cost = cost / large.cost.mean()
    gap = large.right.mean() - right[:, -1].mean()
    price = (1 - cost[:, -1].mean()) / max(gap, 1 / len(right))
    return cost + price * (1 - right)


def least_loss(doubt, loss) -> float:
    "The mean loss at the best of a hundred thresholds."
    highest = highest_so_far(doubt)
    cuts = np.quantile(highest[np.isfinite(doubt)], np.linspace(0, 1, 100), method='nearest')
    rows = np.arange(len(loss))
    return min(loss[rows, (highest < cut).sum(1)].mean() for cut in [*np.unique(cuts), np.inf])


# %% stakes-fit
def fit_rule(rule: str, features: dict, loss, inside) -> StakeRouter:
    "Predict whether a hand-over here pays, weighted by what is at stake: its loss against never."
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    columns = STAKE_RULES[rule]
    stake = (loss[:, -1:] - loss[:, :-1])[inside]
    if len(columns) == 1 or len(np.unique(stake > 0)) == 1:
        return StakeRouter(rule if len(columns) == 1 else 'min-prob')
    steps = inside.sum(1)
    weight = np.abs(stake) / np.repeat(steps, steps)  # a long chain counts as much as a short one
    products = PolynomialFeatures(2, include_bias=False)
    logistic = LogisticRegression(C=0.1, max_iter=300)
    model = make_pipeline(StandardScaler(), products, StandardScaler(), logistic)
    x = observed(with_past(features), columns)[inside]
    weights = dict(logisticregression__sample_weight=weight * len(steps) / weight.sum())
    return StakeRouter(rule, model.fit(x, stake > 0, **weights))


def fit_stakes(
    train: Outcomes,  # of two models
    unit: str,
    reading: str,
    seed: int = 0,  # of the folds
    folds: int = 5,
) -> StakeRouter:
    "The rule with the least cross-validated loss on training problems; of equal ones the simplest."
    loss, inside = losses(train, unit, reading), train.inside
    fold = np.random.default_rng(seed).permutation(len(train)) % folds

    def part(rows):
        return {name: values[rows] for name, values in train.features.items()}

    risks = {}
    for rule in STAKE_RULES:
        doubt = np.full(inside.shape, np.nan)
        for k in range(folds):
            own, other = fold == k, fold != k
            doubt[own] = fit_rule(rule, part(other), loss[other], inside[other])(part(own))
        risks[rule] = least_loss(doubt, loss)
    return fit_rule(min(risks, key=risks.get), train.features, loss, inside)


# %% random
def small_alone(outcomes: Outcomes, unit: str) -> Result:  # [problem]
    "Never hand over."
    return Result(*(values[:, -1] for values in exits(outcomes, unit, 'continue')))


def random_step(outcomes: Outcomes, p: float, unit: str, reading='continue') -> Result:  # [problem]
    "Expected results of handing over to the largest model after each step with probability p."
    t = np.arange(outcomes.small.shape[1])
    T = outcomes.steps[:, None].astype(int)
    larger = outcomes.right.shape[2]
    leave = np.where(t < T, p * (1 - p) ** t, 0)  # [problem, step]
    weight = np.c_[np.repeat(leave, larger, 1), (1 - p) ** T]
    weight[:, :-1] *= np.arange(weight.shape[1] - 1) % larger == 0
    return Result(*((weight * values).sum(1) for values in exits(outcomes, unit, reading)))


def random_problem(outcomes: Outcomes, p: float, unit: str) -> Result:  # [problem]
    "Expected results of giving whole problems to the largest model with probability p."
    both = zip(large_alone(outcomes, unit), small_alone(outcomes, unit))
    return Result(*(p * large + (1 - p) * small for large, small in both))


# %% oracle
def oracle(outcomes: Outcomes, unit: str, reading='continue') -> Result:  # [problem]
    "The cheapest exit that is right; the small chain where none is."
    right, cost = exits(outcomes, unit, reading)
    price = np.where(right == 1, cost, np.inf)
    best = np.where(right.any(1), price.argmin(1), right.shape[1] - 1)
    rows = np.arange(len(best))
    return Result(right[rows, best], cost[rows, best])


# %% verdict
class _Verdict(NamedTuple):
    "What a judge says about the last step of a chain, and what the question cost."

    score: float  # in [0, 1]
    tokens: tuple  # generated, prompt, cached by the server's own account
    before: int  # prompt tokens of the chain without its last step: an earlier question may have cached them
    after: int  # of the chain with it: they stay in the cache


UNREAD = _Verdict(0.0, (0, 0, 0), 0, 0)  # of a chain that does not fit into the judge's context


class Grades:
    "SpecReason's judge: the large model rates a step from 0 to 9; the score is the expected digit over 9."

    def __init__(self, model, store):
        self.model = model  # the large one
        self.store = store  # `Store` of `Choice`s
        self.payer = model.index  # row of the bill

    def key(self, request) -> tuple:
        return request.problem.id, request.sample, request.path, 'grade'

    def ask(self, requests) -> list:
        prompts = []
        for request in requests:
            benchmark = find_benchmark(request.problem.benchmark)
            shape = benchmark.messages, benchmark.separator
            prompts.append(score_messages(request.problem, request.steps, *shape))
        return self.model.choose(prompts, list('0123456789'))

    def verdict(self, choice, request) -> _Verdict:
        score = float(np.dot(choice.prob, np.arange(10))) / 9
        written = request.steps[-1].generated
        before = max(choice.shared - written, 0)
        tokens = choice.generated, choice.prompt, choice.cached
        return _Verdict(score, tokens, before, before + written)

    def write(self, requests) -> list:  # of `_Verdict`s
        "What the judge says, asked once and kept."
        answers = {i: self.store.get(*self.key(request)) for i, request in enumerate(requests)}
        missing = [i for i, answer in answers.items() if answer is None]
        asked = self.ask([requests[i] for i in missing])
        answers |= dict(zip(missing, asked))
        new = [(self.key(requests[i]), answers[i]) for i in missing if answers[i] is not None]
        self.store.put_many(new)
        pairs = zip(answers.values(), requests)
        return [UNREAD if answer is None else self.verdict(answer, r) for answer, r in pairs]


class Rewards(Grades):
    "RSD's judge: a process reward model. It writes nothing, and pays for what it reads in a row of its own."

    def __init__(self, model, store):
        self.model = model  # has `reward(requests)`
        self.store = store  # `Store` of `Reward`s
        self.payer = 2

    def key(self, request) -> tuple:
        return request.problem.id, request.sample, request.path, 'reward'

    def ask(self, requests) -> list:
        return self.model.reward(requests)

    def verdict(self, reward, request) -> _Verdict:
        before = reward.tokens - reward.new
        return _Verdict(reward.value, (0, reward.tokens, 0), before, reward.tokens)


# %% rewriting-walk
SMALL, LARGE, JUDGE = range(3)  # who is asked


def rewriting_walk(problem, kappa: float, payer: int, **ask):
    """SpecReason and RSD: a step whose doubt reaches kappa is written again by the large model, which then hands back.

    A generator as `rollouts.walk`: it returns (`Chain`, the highest doubt of a step that was kept)."""
    tokens = np.zeros((3, len(KINDS)), int)
    held = [0, 0, 0]  # tokens of the chain in the cache of each
    steps, highest = (), -np.inf

    def bill(who, step):
        tokens[who] += tokens_of([step], held[who])
        held[who] = step.prompt + step.generated

    while True:
        request = Request(problem, steps, **ask)
        (step,) = yield SMALL, request
        bill(SMALL, step)
        verdict = yield JUDGE, replace(request, steps=(*steps, step))
        written, prompt, cached = verdict.tokens
        read_before = min(held[payer], verdict.before)
        tokens[payer] += written, prompt - read_before, prompt, cached
        is_rejected = -verdict.score >= kappa
        if verdict.before:
            held[payer] = verdict.before if is_rejected else verdict.after
        if is_rejected:
            held[SMALL] = step.prompt
            (step,) = yield LARGE, request
            bill(LARGE, step)
        else:
            highest = max(highest, -verdict.score)
        steps += (step,)
        if step.final or len(steps) >= request.max_steps:
            return Chain(steps, tokens), highest


# %% walk-settings
def walk_settings(problem, kappas, payer: int, **ask):
    "Walks at all thresholds, given from safe to cheap: `Chain`s [setting]. A walk that nothing changes is taken once."
    chains, highest_kept = [], np.inf
    for kappa in reversed(kappas):
        if kappa <= highest_kept:  # a step that was kept is rejected now
            chain, highest_kept = yield from rewriting_walk(problem, kappa, payer, **ask)
        chains.append(chain)
    return chains[::-1]


# %% draw-walks
AT_ONCE = 200  # problems that walk together


def walk_kappas(scores) -> np.ndarray:  # scores of calibration steps [step] -> [setting], from safe to cheap
    "Thresholds at 41 quantiles, and at 1, .9, ..., 0."
    quantiles = np.quantile(scores, np.linspace(0, 1, 41))
    cuts = np.unique(np.r_[quantiles, np.linspace(0, 1, 11)])
    return np.nextafter(-cuts[::-1], np.inf)  # a step at a cut is kept


def draw_walks(
    name: str,  # of the method
    outcomes: Outcomes,  # of the same problems
    problems,
    models,  # small, large and judge
    kappas,  # [setting], from safe to cheap
    judge_spec=None,  # `ModelSpec` of a reward model, which pays for itself
    grade=is_right,  # (`Problem`, parsed answer) -> bool
    **ask,  # of `Request`
) -> Walks:
    "Walks of SpecReason or RSD at all thresholds."
    chains = []
    for first in range(0, len(problems), AT_ONCE):
        part = problems[first : first + AT_ONCE]
        walks = [walk_settings(problem, kappas, models[JUDGE].payer, **ask) for problem in part]
        chains += run_walks(walks, models)
    read = find_benchmark(problems[0].benchmark).read_answer
    answers = [(p, read(chain.steps)) for p, row in zip(problems, chains) for chain in row]
    verdicts = dict(grade_pairs(grade, answers))
    right = [verdicts[problem.id, answer] for problem, answer in answers]
    shape = len(problems), len(kappas)
    judge = ('no judge of its own', 0.0) if judge_spec is None else (judge_spec.name, judge_spec.params)
    return Walks(
        benchmark=outcomes.benchmark,
        split=outcomes.split,
        models=np.append(outcomes.models, judge[0]),
        params=np.append(outcomes.params, float(judge[1])),
        dollars=np.vstack([outcomes.dollars, np.zeros(3)]),
        problem=outcomes.problem,
        method=np.array(name),
        kappas=np.asarray(kappas),
        tokens=np.array([[chain.tokens for chain in row] for row in chains]).swapaxes(0, 1),
        right=np.array(right, np.uint8).reshape(shape).T,
    )


def judged_chains(judge, problems, chains) -> list:  # [problem][step], scores
    "What a judge says about every step of the small chains."
    requests = []
    for problem, chain in zip(problems, chains):
        requests += [Request(problem, chain[: t + 1]) for t in range(len(chain))]
    verdicts = iter(judge.write(requests))
    return [[next(verdicts).score for _ in chain] for chain in chains]
