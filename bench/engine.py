"""How fast does the local model write? `python bench/engine.py [--problems 200]`

The job of notebook 02: small chains of micro problems, then the large model's continuations of all their prefixes, in
batches of 1, 16 and 128 chains. Prints tokens a second of processor time, and the ratio to a batch of one."""

import argparse
import asyncio
import time

import pandas as pd
import torch

from stepwise_routing.records import edge_seed
from stepwise_routing.util import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models


async def write(model, p, steps=()):
    k, path = model.index, '0' * len(steps)
    seed = lambda i: edge_seed(p.benchmark, p.id, 0, path + str(k) * i, k)
    return await model.write(Request(p, steps, seed, to_end=True))


async def draw(models, problems):
    "The tokens of the small chains and of the large model's continuations."

    async def one(p):
        chain = await write(models[0], p)
        return [
            chain,
            *await asyncio.gather(*(write(models[1], p, chain[:t]) for t in range(len(chain)))),
        ]

    every = await asyncio.gather(*map(one, problems))
    return sum(s.generated for chains in every for c in chains for s in c)


def job(batch_size, n):
    with open_models(['micro-small', 'micro-large'], batch_size=batch_size) as models:
        run_async(draw(models, load_problems('micro-math', 'train', 2)))  # compiles
        start = time.process_time()
        tokens = run_async(draw(models, load_problems('micro-math', 'test', n)))
        seconds = time.process_time() - start
    return dict(
        batch=batch_size, problems=n, tokens=tokens, seconds=seconds, tokens_per_s=tokens / seconds
    )


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--problems', type=int, default=200)
    n = parser.parse_args().problems
    torch.set_num_threads(1)
    table = pd.DataFrame([job(1, max(n // 10, 1)), job(16, n), job(128, n)])
    table['against_one'] = table.tokens_per_s / table.tokens_per_s[0]
    print(table.round(2).to_string(index=False))
