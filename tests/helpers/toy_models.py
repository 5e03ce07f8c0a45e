"""Toy models in pure Python: every draw follows from its seed and its prefix alone, so walks and tables can be
checked exactly."""

import hashlib
import random
import re

import numpy as np

from stepwise_routing.records import ModelSpec, Problem, Step


def random_of(*key):
    text = '\x1f'.join(map(str, key))
    return random.Random(hashlib.blake2b(text.encode(), digest_size=8).digest())


def toy_problems(n, seed=0, benchmark='toy'):
    "n problems `a + b`, each with its own difficulty (how often a step goes wrong)."
    r, problems = random.Random(f'{benchmark}-{seed}'), []
    for i in range(n):
        a, b = r.randint(2, 99), r.randint(2, 99)
        question = f'What is {a} + {b}? ({i})'
        difficulty = round(r.random(), 2)
        name = f'{benchmark}-{seed}-{i}'
        problems.append(Problem(benchmark, name, question, str(a + b), difficulty))
    return problems


class ToyModel:
    """A model that writes short steps. A wrong step says so ("slip"), and the chain stays wrong until a step repairs
    it ("check"). Nobody tells it the answer: it adds what stands in the question."""

    def __init__(
        self,
        index=0,
        slip=None,  # chance of a wrong step, times the difficulty
        repair=None,  # chance of noticing
        end=0.25,  # chance that a step is the last
        cut=0.03,  # chance that a step is cut off by a limit
        empty=0.05,  # chance of an empty step
        has_logits=True,
        has_step_seeds=True,
        params=None,
        prices=(),  # by model; a model with a price reports cached tokens
    ):
        self.index = index
        self.slip = 0.4 / (1 + 2 * index) if slip is None else slip
        self.repair = 0.1 + 0.5 * (index > 0) if repair is None else repair
        self.end, self.cut, self.empty = end, cut, empty
        self.has_logits = has_logits
        self.has_step_seeds = has_step_seeds
        price = prices[index] if index < len(prices) else None
        self.spec = ModelSpec(f'toy-{index}', params or 10**6 * 5**index, price)
        self.written = []  # (problem id, sample, path, model) of each drawn step

    def settings(self):
        chances = self.slip, self.repair, self.end, self.cut, self.empty, self.has_logits
        return dict(weights=str(chances), temperature=0.7)

    # ---- writing

    def write(self, requests):
        return [self.write_one(request) for request in requests]

    def write_one(self, request):
        steps = ()
        while len(steps) < request.room and not (steps and steps[-1].final):
            seed = request.seed(len(steps), self.index)
            if not self.has_step_seeds:  # one seed for the whole reply
                seed = request.seed(0, self.index), len(steps)
            path = request.path + str(self.index) * len(steps)
            self.written.append((request.problem.id, request.sample, path, self.index))
            steps += (self.step(request.problem, request.steps + steps, seed),)
        return steps

    def step(self, problem, before, seed):
        r = random_of(seed, self.index, problem.question, *(step.text for step in before))
        checks = [i for i, step in enumerate(before) if 'check' in step.text]
        is_wrong = any('slip' in step.text for step in before[max(checks, default=0) :])
        text, finish = '', 'step'
        if is_wrong and r.random() < self.repair:
            text, is_wrong = f'Let me check $x_{len(before)}$ again. ', False
        slips = r.random() < self.slip * (0.5 + (problem.difficulty or 0))
        value = r.randint(2, 99)
        text += f'So {value} + 1 = {value + 1 + slips}' + ' slip' * slips
        if r.random() < self.empty:
            text, slips = '', False
        if r.random() < self.cut:
            text, finish = text[: r.randint(0, len(text))], 'length'
        elif r.random() < self.end:
            answer = sum(map(int, re.findall(r'\d+', problem.question)[:2]))
            answer += r.choice([-1, 1]) * (is_wrong or slips)
            text, finish = text + rf' The answer is \boxed{{{answer}}}', 'stop'
        return self.with_tokens(r, text.strip(), finish, before, problem, not slips)

    def with_tokens(self, r, text, finish, before, problem, is_right):
        "The step with tokens of one to four characters, and the separator as the last one."
        ends = []
        while not ends or ends[-1] < len(text):
            ends.append(min(len(text), sum(ends[-1:]) + r.randint(1, 4)))
        ends.append(len(text))
        is_sure = is_right and r.random() < 0.8
        prob = [min(1.0, max(1e-4, r.gauss(0.9 if is_sure else 0.6, 0.1))) for _ in ends]
        logit = [r.gauss(20 if is_sure else 15, 2) for _ in ends]
        prob, logit = (tuple(np.float32(x).tolist()) for x in (prob, logit))  # as files keep them
        return self.billed(problem, before, text, finish, ends, prob, logit)

    def billed(self, problem, before, text, finish, ends, prob, logit):
        prompt = len(problem.question) + sum(len(step.ends) for step in before)
        return Step(
            text,
            self.index,
            finish,
            ids=tuple(range(len(ends))),
            ends=tuple(ends),
            prob=prob,
            max_logit=logit if self.has_logits else None,
            generated=len(ends),
            prompt=prompt,
            cached=prompt // 3 if self.spec.price else 0,
        )


def toy_models(k=2, **options):
    return [ToyModel(i, **options) for i in range(k)]
