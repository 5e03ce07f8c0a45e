"""The running examples: Sam's apples by the micro models, Megan's wages by the recorded real pair.

Here belongs the content of the pictures: one problem with all its outcomes, and one training with its rounds. How they
are drawn belongs in `report.pictures`.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import numpy as np

from ..records import Problem
from ..settings import Policy
from ..store import RolloutStore, tree_settings
from ..util import run_async
from ..data.benchmarks import find_benchmark, load_problems
from ..data.recorded import MAX_STEPS, SUFFIX, read_recorded
from ..method.confidence import logprob_confidence, math_token_mask
from ..method.outcomes import outcome_table
from ..method.tree import RoutingTree, collect_rollouts
from ..models.names import open_models

BENCHMARK = 'micro-gsm'
PROBLEM = Problem(  # its id decides what the models write; it was a test problem of an earlier draw
    BENCHMARK,
    'shop-2-be09edf19d',
    'Sam buys 6 apples at 5 dollars each, 4 books at 3 dollars each and 2 rings at 3 dollars each. '
    'Sam pays with 54 dollars. How many dollars does Sam have left?',
    '6',
    2,
)
REAL_BENCHMARK = 'gsm8k'
LESSON = 68  # recorded training problems that a chapter uses, so that a cell takes a second
REAL_PROBLEM = (
    'gsm8k-00d3850eebca'  # Megan's wages, a training problem that only the large model solves
)
THRESHOLD = 0.5  # of the simplest router, as in the README


@dataclass(frozen=True)
class Token:
    "One token of a step."

    text: str
    prob: float  # the probability that the model gave it
    is_math: bool  # does it count for the score?


@dataclass(frozen=True)
class Example:
    "One problem: the small model's chain, and the outcome of each possible hand-over."

    question: str
    steps: tuple  # texts of the small model's steps
    tokens: tuple  # `Token`s of each step
    doubts: tuple  # per step: 1 minus the probability of its least sure token that counts
    rests: tuple  # per hand-over, the large model's texts: this step again, and the rest
    right: tuple  # bool per hand-over, is the answer right? The last one is "never handed over"
    small_cost: tuple  # per hand-over, the small model's cost as a share of the large model alone
    large_cost: tuple  # per hand-over, the large model's cost as a share of the large model alone

    @property
    def cost(self) -> tuple:
        "Per hand-over, the whole cost as a share of the large model alone."
        return tuple(small + large for small, large in zip(self.small_cost, self.large_cost))

    @property
    def hand_over(self) -> int:
        """Index of the first step that the simplest router doubts: it hands over there.

        The number of steps if it doubts none, so never hands over.
        """
        doubted = np.array(self.doubts) >= THRESHOLD
        return int(np.argmax(doubted)) if doubted.any() else len(self.steps)


def read_tokens(step) -> tuple:  # a `Step` with tokens
    "The `Token`s of a step. The token that ends it has no text and is left out."
    counts = math_token_mask(step.text, step.ends)
    starts = (0, *step.ends)
    tokens = []
    for start, end, prob, is_math in zip(starts, step.ends, step.prob, counts):
        if end > start:
            tokens.append(Token(step.text[start:end], float(prob), bool(is_math)))
    return tuple(tokens)


def read_example(
    problem,  # of the tree's benchmark; all its rollouts are drawn
    tree,  # its `RoutingTree`
) -> Example:
    "A problem with all its outcomes. LookupError if a step was not drawn and the tree has no models."
    chain, rests = run_async(tree.rollouts(problem))
    table = outcome_table([problem], tree, 'test')
    outcomes = {name: values[0] for name, values in table.grid('regenerate').items()}
    small, large = table.params
    alone = table.large_only()['paper_flops'][0]
    return Example(
        question=problem.question,
        steps=tuple(step.text for step in chain),
        tokens=tuple(read_tokens(step) for step in chain),
        doubts=tuple(1 - logprob_confidence(step) for step in chain),
        rests=tuple(tuple(step.text for step in rest) for rest in rests),
        right=tuple(bool(right) for right in outcomes['correct']),
        small_cost=tuple((2 * small * outcomes['small_tokens'] / alone).tolist()),
        large_cost=tuple((2 * large * outcomes['large_tokens'] / alone).tolist()),
    )


@contextmanager
def running_tree(n: int = 0):  # number of training problems besides Sam's
    "(The first n training problems and Sam's, the `RoutingTree` of the micro models with all their outcomes)."
    problems = [*(load_problems(BENCHMARK, 'train', n) if n else []), PROBLEM]
    with TemporaryDirectory() as folder, open_models(['micro-small', 'micro-large']) as models:
        settings = tree_settings(BENCHMARK, models)
        with RolloutStore(f'{folder}/draws.db', settings) as store:
            tree = RoutingTree(models, store)
            collect_rollouts(problems, tree)
            yield problems, tree


def running_example() -> Example:
    "Sam's apples with all outcomes, written by the shipped micro models. It takes some seconds."
    with running_tree() as (_, tree):
        return read_example(PROBLEM, tree)


@contextmanager
def recorded_tree(benchmark: str):  # a recorded one
    "(The first training problems of a recorded benchmark, the `RoutingTree` that replays them). Needs no models."
    whole = read_recorded(benchmark)
    problems = whole.problems['train'][:LESSON]
    ids = {problem.id for problem in problems}
    recorded = replace(whole, edges=tuple(edge for edge in whole.edges if edge[0][0] in ids))
    with TemporaryDirectory() as folder:
        recorded.fill(f'{folder}/draws.db')
        with RolloutStore(f'{folder}/draws.db', readonly=True) as store:
            right = find_benchmark(benchmark + SUFFIX).right
            tree = RoutingTree(None, store, max_steps=MAX_STEPS[benchmark], grade=right)
            yield problems, tree


def real_example() -> Example:
    "Megan's wages, a problem of GSM8K, as Qwen2.5-Coder 0.5B and 1.5B solved it. Needs no models."
    with recorded_tree(REAL_BENCHMARK) as (problems, tree):
        problem = next(p for p in problems if p.id == REAL_PROBLEM)
        return read_example(problem, tree)


@dataclass(frozen=True)
class Watched:
    "A training, round by round."

    benchmark: str
    kappas: tuple  # threshold of each round
    chances: tuple  # per round: pi(escalate) of all small steps, ascending


def watched_training(
    benchmark: str = REAL_BENCHMARK,  # a recorded one
    rounds: int = 80,  # steps of the policy
) -> Watched:
    "Train one policy on the first recorded training problems. Keep kappa and pi of each round. It takes some seconds."
    from ..method.cpo import TableEnv
    from ..method.training import train

    with recorded_tree(benchmark) as (problems, tree):
        table = outcome_table(problems, tree, 'train')
    kappas = []
    chances = []

    class Watch(TableEnv):
        def deploy(self, policy, kappa, rows=None, pi=None):
            kappas.append(kappa)
            chances.append(np.sort(pi.numpy()))
            return super().deploy(policy, kappa, rows, pi)

    settings = Policy(estimator='exact', batch=None, steps=rounds)
    train(Watch(table, on_escalate='regenerate'), settings, progress=False)
    return Watched(benchmark, tuple(kappas), tuple(chances))
