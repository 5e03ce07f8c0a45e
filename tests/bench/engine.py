"""How fast does the CPU engine write? `python tests/bench/engine.py [--problems 200]`

The script prints three tables of ratios. The two sides of a ratio are measured in turns, in one process. Times are
processor times of one thread, the best of all repeats.
- A pass of 1, 16, 64 and 256 rows, 100 tokens into a chain. It compares the kernels of models/qwen in float32 with the
  general engine (models/padded, float64), and with torch's matrix products of the pass alone.
- The job of notebook 02: the small chains of some problems, and the large model's continuations from all prefixes.
- API calls through a local server: milliseconds per call, with 1 and with 32 calls in flight."""
import argparse
import asyncio
import time

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from stepwise_routing.base.records import edge_seed
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.hub import TransformersBackend, micro_path
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models

KINDS = dict(kernels=None, general='float64')

torch.set_num_threads(1)

def flat(panels): return panels.transpose(0, 2, 1).reshape(-1, panels.shape[1]).copy() # [N, K]
def backend(which, dtype): return TransformersBackend(micro_path(which), index=int(which == 'large'), dtype=dtype)

def best(call, repeats):
    "The smallest processor time of a call, in seconds, over the repeats."
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)

def passes(repeats=20):
    rows = []
    for which in ('small', 'large'):
        models = {name: backend(which, dtype).engine.forward for name, dtype in KINDS.items()}
        panels = [w for layer in models['kernels'].layers for w in layer if w.ndim == 3]
        weights = [torch.from_numpy(w) for w in (*map(flat, panels), models['kernels'].embed)]
        for n in (1, 16, 64, 256):
            tokens, at, u, one = np.arange(n) % 900 + 5, np.full(n, 100), np.full(n, .5), np.ones(n)
            prefix = (np.arange(100) % 900 + 5).tolist()
            for m in models.values():
                for place in range(n): m.feed(place, prefix, 0)
                m.decode(tokens, at, u, .7*one, one)
            inputs = [torch.randn(n, w.shape[1]) for w in weights]
            calls = {name: lambda m=m: m.decode(tokens, at, u, .7*one, one) for name, m in models.items()}
            calls['products'] = lambda: [F.linear(x, w) for x, w in zip(inputs, weights)]
            ms = {name: 1e3*best(call, repeats) for name, call in calls.items()}
            rows.append(dict(model=which, rows=n, **{f'{k}, ms': v for k, v in ms.items()},
                             tokens_per_s=1e3*n/ms['kernels'], against_general=ms['general']/ms['kernels'],
                             share_of_limit=ms['products']/ms['kernels']))
            for m in models.values():
                for place in range(n): m.clear(place)
    return pd.DataFrame(rows).round(2)

async def write(model, p, steps=()):
    k, path = model.index, '0'*len(steps)
    seed = lambda i: edge_seed(p.benchmark, p.id, 0, path + str(k)*i, k)
    return await model.write(Request(p, steps, seed, to_end=True))

async def draw(models, problems):
    "The tokens of the small chains and of the large model's continuations."
    async def one(p):
        chain = await write(models[0], p)
        return [chain, *await asyncio.gather(*(write(models[1], p, chain[:t]) for t in range(len(chain))))]
    every = await asyncio.gather(*map(one, problems))
    return sum(s.generated for chains in every for c in chains for s in c)

def job(n):
    problems, rows = load_problems('micro-math', 'train', n), []
    for name, dtype in KINDS.items():
        models = [backend(which, dtype) for which in ('small', 'large')]
        start = time.process_time()
        tokens = run_async(draw(models, problems))
        seconds = time.process_time() - start
        rows.append(dict(engine=name, problems=n, tokens=tokens, seconds=seconds, tokens_per_s=tokens/seconds))
    rows[0]['against_general'] = rows[1]['seconds']/rows[0]['seconds']
    return pd.DataFrame(rows).round(2)

def calls(n=200):
    rows = []
    with open_models(['micro-small', 'served:micro-large'], price='gpt-4.1-mini', max_cents=1e6) as (_, large):
        for flight, split, size in ((1, 'test', 20), (32, 'train', n)):
            part = load_problems('micro-math', split, size)
            async def every():
                slots = asyncio.Semaphore(flight)
                async def one(p):
                    async with slots: return await write(large, p)
                return await asyncio.gather(*map(one, part))
            start = time.perf_counter()
            chains = run_async(every())
            seconds = time.perf_counter() - start
            tokens = sum(s.generated for c in chains for s in c)
            rows.append(dict(in_flight=flight, calls=len(part), tokens=tokens, ms_per_call=1e3*seconds/len(part)))
    return pd.DataFrame(rows).round(1)

if __name__ == '__main__':
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--problems', type=int, default=200)
    with torch.inference_mode():
        print(passes().to_string(index=False), end='\n\n')
        print(job(args.parse_args().problems).to_string(index=False), end='\n\n')
        print(calls().to_string(index=False))
