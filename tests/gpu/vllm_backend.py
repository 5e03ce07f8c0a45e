"""VLLMBackend on real vLLM, against the same models in our own engine. Not collected by pytest: run it where vLLM is.

    python tests/gpu/vllm_backend.py                 # the shipped models: same steps? same confidences?
    python tests/gpu/vllm_backend.py --dtype float32 --model small -n 2

Prints what it measured and ends with an error where something is not as it should be."""
import argparse
import asyncio
import json
import time

import numpy as np

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.confidence import logit_confidence, logprob_confidence
from stepwise_routing.models.hub import load_micro
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models
from stepwise_routing.records import score_messages, verdict_messages
from stepwise_routing.util import run_async

KW = dict(temperature=0., context=2048)

def gather(calls):
    async def every(): return await asyncio.gather(*calls)
    return run_async(every())

async def stepwise(b, p):
    steps = ()
    while not steps or not (steps[-1].final or len(steps) == 30): steps += await b.write(Request(p, steps, lambda i: 1))
    return steps

def spread(x):
    numbers = dict(median=np.median(x), p99=np.quantile(x, .99), largest=np.max(x))
    return {k: float(f'{v:.3g}') for k, v in numbers.items()}

def compare_one(dtype, model, n):
    "One row: greedy chains of one model, through vLLM and through our own engine."
    own = load_micro(model, **KW)
    problems = [p for b in ('micro-gsm', 'micro-math') for p in load_problems(b, 'test', n=n)]
    whole = lambda b: gather([b.write(Request(p, (), lambda i: 1, True)) for p in problems])
    reference, started = whole(own), time.monotonic()
    with open_models([f'vllm:micro-{model}'], dtype=dtype, **KW) as (b,):
        ready = time.monotonic()
        theirs, written = whole(b), time.monotonic()
        steps = gather([stepwise(b, p) for p in problems])
        options = (score_messages, list('0123456789')), (verdict_messages, ['correct', 'incorrect'])
        cases = [(f(p, [c[0].text]), o) for p, c in zip(problems, reference) for f, o in options]
        choices = [gather([x.choose(*case) for case in cases]) for x in (b, own)]
        scored = [gather([x.score(Request(p, c[:-1]), c[-1]) for p, c in zip(problems, reference)]) for x in (b, own)]
    pairs = [(x, y) for a, r in zip(theirs, reference) for x, y in zip(a, r) if x.ids == y.ids]
    assert all((x.text, x.ends, x.finish, x.prompt) == (y.text, y.ends, y.finish, y.prompt) for x, y in pairs)
    gap = lambda f, pairs: spread([abs(f(x) - f(y)) for x, y in pairs])
    alike = lambda ours: np.mean([[s.ids for s in a] == [s.ids for s in r] for a, r in zip(ours, theirs)])
    return dict(dtype=dtype, model=model, problems=len(problems), steps=sum(map(len, reference)),
                same_steps=len(pairs) / sum(map(len, reference)), same_chains=alike(reference),
                stepwise_as_whole=alike(steps), s_os=gap(logit_confidence, pairs), s_api=gap(logprob_confidence, pairs),
                score_s_os=gap(logit_confidence, zip(*scored)),
                choice=spread([np.abs(np.subtract(x.prob, y.prob)).max() for x, y in zip(*choices)]),
                start_seconds=round(ready - started),
                tokens_per_second=round(sum(s.generated for c in theirs for s in c) / (written - ready)))

def compare(args):
    for dtype in args.dtype.split(','):
        for model in args.model.split(','):
            row, exact = compare_one(dtype, model, args.n), dtype == 'float32'
            print(json.dumps(row, default=float), flush=True)
            assert row['same_steps'] == 1 if exact else row['same_steps'] > .95, 'other steps'
            assert row['s_os']['largest'] < (.001 if exact else .2), 'other logits'
            assert row['s_api']['median'] < .02, 'other probabilities'
            assert row['choice']['largest'] < (.001 if exact else .1), 'other choices'

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dtype', default='float32,bfloat16')
    parser.add_argument('--model', default='small,large')
    parser.add_argument('-n', type=int, default=20, help='problems per benchmark')
    compare(parser.parse_args())
