"""A model on vLLM against the same model by transformers. Run it where vLLM is installed, on a GPU or on a CPU:

    python tests/gpu/vllm_model.py
    python tests/gpu/vllm_model.py Qwen/Qwen2.5-Math-1.5B-Instruct bfloat16 5

It prints what it measured. In float32 it ends with an error where something is not as it should be; what bfloat16 rounds
is printed only.
"""

import sys
from dataclasses import replace
from itertools import chain

import numpy as np

from stepwise_routing.data.benchmarks import MICRO, load_problems
from stepwise_routing.method.confidence import logit_confidence
from stepwise_routing.models.base import Request
from stepwise_routing.models.open import ModelOptions, open_model
from stepwise_routing.records import Problem, score_messages, verdict_messages

ASKS = (verdict_messages, ['correct', 'incorrect']), (score_messages, [*'0123456789'])


def step_by_step(model, request) -> tuple:
    "A chain that is written one step a call."
    steps = ()
    while not steps or not steps[-1].final:
        steps += model.write([replace(request, steps=steps, to_end=False)])[0]
    return steps


def share_alike(chains, others) -> float:
    "Of chains with the same tokens and the same steps."
    same = []
    for pair in zip(chains, others, strict=True):
        one, other = [[(s.ids, s.ends, s.finish, s.prompt) for s in steps] for steps in pair]
        same.append(one == other)
    return float(np.mean(same))


def largest_gap(number_of, some, others) -> float:
    gaps = [np.abs(np.subtract(number_of(x), number_of(y))).max() for x, y in zip(some, others)]
    return float(max(gaps))


def measured(model, local, problems):
    "(What, measured, as it should be) of a model that draws at its temperature, then greedily."
    drawn = [Request(p, sample=sample, to_end=True) for p in problems for sample in range(4)]
    yield 'drawn again alike', share_alike(model.write(drawn), model.write(drawn)), 1

    model.sampling['temperature'] = 0.0
    requests = [Request(problem, to_end=True) for problem in problems]
    whole = model.write(requests)
    by_steps = [step_by_step(model, request) for request in requests]
    yield 'whole = step by step', share_alike(whole, by_steps), 1
    yield 'same as transformers', share_alike(whole, local.write(requests)), 1

    steps = [*chain(*whole)]
    prefixes = []
    for request, written in zip(requests, whole):
        prefixes += [replace(request, steps=written[: t + 1]) for t in range(len(written))]
    scored, read = model.score(prefixes), local.score(prefixes)
    yield 'gap of S^os, score and drawn', largest_gap(logit_confidence, scored, steps), 0
    yield 'gap of S^os, transformers and drawn', largest_gap(logit_confidence, read, steps), 0
    yield 'gap of probabilities, score and drawn', largest_gap(lambda s: s.prob, scored, steps), 0
    for messages_of, options in ASKS:
        asked = [messages_of(r.problem, [s[0].text]) for r, s in zip(requests, whole)]
        found, expected = [m.choose(asked, options) for m in (model, local)]
        gap = largest_gap(lambda preference: preference.prob, found, expected)
        yield f'gap of choose among {len(options)}', gap, 0

    problem = Problem('toy', 'long', 'word ' * model.context, '')
    ((step,),) = model.write([Request(problem, to_end=True)])
    found = model.choose([verdict_messages(problem, ['so'])], ['correct', 'incorrect'])
    is_right = (step.finish, step.ids, found) == ('length', (), [None])
    yield 'a question longer than the context is right', is_right, True


def main(name='micro-small', dtype='float32', n=20):
    options = ModelOptions(name=f'vllm:{name}', dtype=dtype)
    model = open_model(options)
    local = open_model(replace(options, name=name, temperature=0.0))
    problems = [p for benchmark in MICRO for p in load_problems(benchmark, 'test', int(n))]
    faults = []
    for what, value, expected in measured(model, local, problems):
        print(f'{what}: {value:.2g}', flush=True)
        if abs(value - expected) >= 1e-3:
            faults.append(what)
    assert not faults or dtype != 'float32', f'not as it should be: {faults}'


if __name__ == '__main__':
    main(*sys.argv[1:])
