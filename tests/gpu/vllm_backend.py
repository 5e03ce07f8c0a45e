"""VLLMBackend on real vLLM, against the same models in our own engine. Not collected by pytest: run it where vLLM is.

    python tests/gpu/vllm_backend.py compare                # the shipped models: same steps? same confidences?
    python tests/gpu/vllm_backend.py compare --dtype float32 --model small -n 2
    python tests/gpu/vllm_backend.py faults                 # does it fail in one line, and leave nothing behind?

Prints what it measured and ends with an error where something is not as it should be."""
import argparse
import asyncio
import json
import subprocess
import sys
import time

import numpy as np
import psutil

from stepwise_routing.base.records import score_messages, verdict_messages
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.confidence import logit_confidence, logprob_confidence
from stepwise_routing.models.hub import load_micro, micro_path
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models
from stepwise_routing.models.vllm import VLLMBackend, serve_vllm

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

def one_line(make):
    "The one line of an error."
    try: make()
    except (RuntimeError, ValueError) as e:
        assert '\n' not in str(e)
        return f'{type(e).__name__}: {e}'
    raise AssertionError('no error')

def ended(processes, seconds=30):
    "Seconds until all of them are gone."
    start = time.monotonic()
    assert not psutil.wait_procs(processes, seconds)[1], 'processes are left over'
    return f'{time.monotonic() - start:.1f} s'

def faults(args):
    "A server that does not start, one that shows too little, and what is left of servers and of killed processes."
    folder = micro_path('small')
    for bad in (dict(dtype='float99'), dict(context=10**6)):
        print(one_line(lambda: serve_vllm(folder, **bad).__enter__()))
    with serve_vllm(folder, context=2048, logits=False) as url:
        print(one_line(lambda: VLLMBackend(folder, url, **KW)))
        started = psutil.Process().children(recursive=True)
    print('nothing left', ended(started), 'after a server')
    child = subprocess.Popen([sys.executable, __file__, 'hold'], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline().strip() == 'ready'
    started = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    print('nothing left', ended(started), 'after a process with a server was killed')

def hold(args):
    with serve_vllm(micro_path('small'), context=2048):
        print('ready', flush=True)
        time.sleep(600)

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['compare', 'faults', 'hold'])
    parser.add_argument('--dtype', default='float32,bfloat16')
    parser.add_argument('--model', default='small,large')
    parser.add_argument('-n', type=int, default=20, help='problems per benchmark')
    args = parser.parse_args()
    dict(compare=compare, faults=faults, hold=hold)[args.what](args)
