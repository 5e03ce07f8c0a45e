"""The judges of SpecReason and RSD, and their walks at all thresholds

The walk itself is `baselines.rewriting_walk` (chapter 04). A judge has `write(requests)`, as a model has: what it says
about the last step of each request is asked once, and kept.
"""

from typing import NamedTuple

import numpy as np

from ..data.benchmarks import find_benchmark, grade_by_rules, graded
from ..models.base import Request
from ..models.kept import BLOCK
from ..records import score_messages
from .baselines import JUDGE, rewriting_walk
from .rollouts import Outcomes, Walks, run_walks

# ---- judges


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
        self.store = store  # `Store` of `Preference`s
        self.payer = model.index  # row of the bill

    def key(self, request) -> tuple:
        return request.problem.id, request.sample, request.path, 'grade'

    def ask(self, requests) -> list:
        prompts = []
        for request in requests:
            prompt = find_benchmark(request.problem.benchmark).prompt
            prompts.append(score_messages(request.problem, request.steps, prompt))
        return self.model.choose(prompts, list('0123456789'))

    def verdict(self, digits, request) -> _Verdict:
        score = float(np.dot(digits.prob, np.arange(10))) / 9
        written = request.steps[-1].generated
        before = max(digits.shared - written, 0)
        tokens = digits.generated, digits.prompt, digits.cached
        return _Verdict(score, tokens, before, before + written)

    def write(self, requests) -> list:  # of `_Verdict`s
        "What the judge says, asked once and kept."
        answers = {i: self.store.get(*self.key(request)) for i, request in enumerate(requests)}
        missing = [i for i, answer in answers.items() if answer is None]
        for first in range(0, len(missing), BLOCK):
            block = missing[first : first + BLOCK]
            asked = zip(block, self.ask([requests[i] for i in block]))
            new = {i: answer for i, answer in asked if answer is not None}
            self.store.put_many([(self.key(requests[i]), answer) for i, answer in new.items()])
            answers |= new
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


# ---- walks


def judged_chains(judge, problems, chains) -> list:  # [problem][step], scores
    "What a judge says about every step of the small chains."
    requests = []
    for problem, chain in zip(problems, chains):
        requests += [Request(problem, chain[: t + 1]) for t in range(len(chain))]
    verdicts = iter(judge.write(requests))
    return [[next(verdicts).score for _ in chain] for chain in chains]


def walk_kappas(
    scores,  # of calibration steps [step]
) -> np.ndarray:  # [setting], from safe to cheap
    "Thresholds at 41 quantiles, and at 1, .9, ..., 0."
    quantiles = np.quantile(scores, np.linspace(0, 1, 41))
    cuts = np.unique(np.r_[quantiles, np.linspace(0, 1, 11)])
    return np.nextafter(-cuts[::-1], np.inf)  # a step at a cut is kept


def walk_settings(problem, kappas, payer: int, **ask):
    "Walks at all thresholds, given from safe to cheap: `Chain`s [setting]. A walk that nothing changes is taken once."
    chains, highest_kept = [], np.inf
    for kappa in reversed(kappas):
        if kappa <= highest_kept:  # a step that was kept is rejected now
            chain, highest_kept = yield from rewriting_walk(problem, kappa, payer, **ask)
        chains.append(chain)
    return chains[::-1]


AT_ONCE = 1000  # problems that walk together


def draw_walks(
    name: str,  # of the method
    outcomes: Outcomes,  # of the same problems
    problems,
    models,  # small, large and judge
    kappas,  # [setting], from safe to cheap
    judge_spec=None,  # `ModelSpec` of a reward model, which pays for itself
    grade=grade_by_rules,  # (`Problem`, parsed answer) pairs -> verdicts
    **ask,  # of `Request`
) -> Walks:
    "Walks of SpecReason or RSD at all thresholds."
    chains = []
    for first in range(0, len(problems), AT_ONCE):
        part = problems[first : first + AT_ONCE]
        walks = [walk_settings(problem, kappas, models[JUDGE].payer, **ask) for problem in part]
        chains += run_walks(walks, models)
    read = find_benchmark(problems[0].benchmark).answer
    answers = [(p, read(p, chain.steps)) for p, row in zip(problems, chains) for chain in row]
    verdicts = graded(grade, answers)
    right = [verdicts[problem.id, answer] for problem, answer in answers]
    shape = len(problems), len(kappas)
    judge = (
        ('no judge of its own', 0.0) if judge_spec is None else (judge_spec.name, judge_spec.params)
    )
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
