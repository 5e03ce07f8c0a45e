"""A pair (or more) of toy models in pure Python: every draw follows from its seed and its prefix alone, so walks and
tables can be checked exactly."""
import asyncio
import hashlib
import random
import struct

from stepwise_routing.models.interface import Choice
from stepwise_routing.records import ModelSpec, Problem, Step


def f32(x): return struct.unpack('<f', struct.pack('<f', x))[0]

def toy_problems(n, seed=0, benchmark='toy'):
    "n problems `a + b`, each with its own difficulty (how often a step goes wrong)."
    r, out = random.Random(f'{benchmark}-{seed}'), []
    for i in range(n):
        a, b = r.randint(2, 99), r.randint(2, 99)
        out.append(Problem(benchmark, f'{benchmark}-{seed}-{i}', f'What is {a} + {b}?', str(a + b),
                           difficulty=round(r.random(), 2)))
    return out

class ToyBackend:
    """A toy model that writes short steps. A wrong step says so (`slip`), and the chain stays wrong until a step
    repairs it (`check`).
    slip: chance of a wrong step (scaled by the difficulty); repair: chance of noticing; end: chance that a step is
    the last;
    cut: chance that the chain is cut off by length; empty: chance of an empty step; shy: largest number of loop
    turns before it answers; prices: rows of the price table by model, which then reports cached tokens."""
    def __init__(self, index=0, slip=None, repair=None, end=.25, cut=.03, empty=.05, shy=3, has_logits=True,
                 params=None, prices=()):
        self.index, self.has_logits, self.end, self.cut, self.empty, self.shy = index, has_logits, end, cut, empty, shy
        self.slip, self.repair = slip if slip is not None else .4/(1 +
            2*index), repair if repair is not None else .1 + .5*(index > 0)
        self.spec = ModelSpec(f'toy-{index}', params or 10**6 * 5**index,
                              prices[index] if index < len(prices) else None)
        self.calls, self.steps_written = 0, 0

    def settings(self):
        return dict(name=self.spec.name, weights=f'toy:{self.slip}:{self.repair}:{self.end}:{self.cut}:{self.empty}',
                    temperature=0.7)

    def _random(self, *key):
        return random.Random(hashlib.blake2b('\x1f'.join(map(str, key)).encode(), digest_size=8).digest())

    def _tokens(self, r, text, confident):
        "Fake tokens of 1 to 4 characters, the last one the separator."
        ends, end = [], 0
        while end < len(text):
            end = min(len(text), end + r.randint(1, 4))
            ends.append(end)
        ends.append(len(text))
        n = len(ends)
        prob = tuple(f32(min(1., max(1e-4, r.gauss(.9 if confident else .6, .1)))) for _ in range(n))
        logit = tuple(f32(r.gauss(20 if confident else 15, 2)) for _ in range(n)) if self.has_logits else None
        return dict(ids=tuple(r.randrange(50_000) for _ in range(n)), ends=tuple(ends), prob=prob, max_logit=logit)

    def _prompt(self, problem, prefix): return len(problem.question) + sum(len(s.ids) for s in prefix)

    def _step(self, problem, prefix, seed, last):
        r = self._random(seed, self.index, problem.question, *(s.text for s in prefix))
        wrong = any('slip' in s.text for s in prefix[self._checked(prefix):])
        finish, text = 'step', ''
        if wrong and r.random() < self.repair: text, wrong = f'Let me check $x_{len(prefix)}$ again. ', False
        slipped = r.random() < self.slip*(.5 + (problem.difficulty or 0))
        wrong = wrong or slipped
        v = r.randint(2, 99)
        text += f'So {v} + 1 = {v + 1 + slipped}' + (' slip' if slipped else '')
        if r.random() < self.empty: text, slipped = '', False
        if r.random() < self.cut: finish, text = 'length', text[:r.randint(0, len(text))]
        elif r.random() < self.end:
            finish = r.choice(['step', 'stop'])
            answer = int(problem.answer) + (r.choice([-1, 1]) if wrong else 0)
            text += rf' The answer is \boxed{{{answer}}}'
        tokens = self._tokens(r, text, not slipped and r.random() < .8)
        return Step(text.strip(), self.index, finish, generated=len(tokens['ids']),
                    prompt=self._prompt(problem, prefix),
                    cached=self._prompt(problem, prefix)//3 if self.spec.price else 0,
                    **{**tokens, 'ends': tuple(min(e, len(text.strip())) for e in tokens['ends'])})

    def _checked(self, prefix): return max([i for i, s in enumerate(prefix) if 'check' in s.text], default=0)

    async def write(self, request):
        self.calls += 1
        for _ in range(random.Random(request.seed(0)).randint(0, self.shy)): await asyncio.sleep(0)
        prefix, out = list(request.steps), []
        while True:
            step = self._step(request.problem, prefix, request.seed(len(out)), len(prefix) + 1 >= request.max_steps)
            out.append(step); prefix.append(step); self.steps_written += 1
            if not request.to_end or step.final or len(prefix) >= request.max_steps: return tuple(out)

    async def score(self, request, step):
        r = self._random('score', self.index, request.problem.question, *(s.text for s in request.steps), step.text)
        n, tokens = len(step.ids), self._tokens(r, step.text, 'slip' not in step.text)
        pad = lambda xs: tuple((xs*n)[:n]) if xs else xs
        return Step(step.text, step.model, step.finish, step.ids, step.ends, pad(tokens['prob']),
                    pad(tokens['max_logit']), generated=0, prompt=self._prompt(request.problem, request.steps) + n)

    async def choose(self, messages, options):
        r = self._random('choose', self.index, str(messages))
        p = [r.random() + .01 for _ in options]
        read = [len(m['content']) for m in messages]
        return Choice(tuple(x/sum(p) for x in p), sum(read), 1, shared=sum(read[:-1]))

    async def close(self): pass

def toy_backends(k=2, **kwargs): return [ToyBackend(i, **kwargs) for i in range(k)]


class ToyModel(ToyBackend):
    "The same behind the contract of `models.base`: it takes lists."

    def write(self, requests):
        self.calls += len(requests)
        return [self.write_one(request) for request in requests]

    def write_one(self, request):
        prefix, out = list(request.steps), []
        while True:
            last = len(prefix) + 1 >= request.max_steps
            step = self._step(request.problem, prefix, request.seed(len(out), self.index), last)
            out.append(step)
            prefix.append(step)
            if not request.to_end or step.final or last:
                self.steps_written += len(out)
                return tuple(out)


def toy_models(k=2, **options):
    return [ToyModel(i, **options) for i in range(k)]
