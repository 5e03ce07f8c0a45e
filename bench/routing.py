"""Does routing slow down generation?
`python bench/routing.py [--engine transformers|vllm] [--problems 256] [--repeats 3]`

The micro pair answers problems. Each ratio is one of tokens/s, of two runs measured in turns in one process: the median
and range of the repeats. No cache of steps is kept between runs. A routed run includes store, confidences and grading.
- Whole chains: each model writes whole solutions, about as many tokens as in the routed run, all at once.
- Same steps: the steps of the routed run are written again, each stretch of steps by one model as one request with its
  prefix given, all at once. So it is the same reading and writing without waiting for decisions."""

import argparse
import asyncio
import os
import statistics
import time
import urllib.request
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import numpy as np
import torch

from stepwise_routing.records import edge_seed
from stepwise_routing.store import RolloutStore, tree_settings
from stepwise_routing.util import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.confidence import logit_confidence
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.method.walks import walk
from stepwise_routing.models.hub import micro_path
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models


@dataclass(frozen=True)
class Confidence:
    "A threshold on S^os of the last step."

    threshold: float
    name: str = 'Confidence'
    mode: str = 'absorbing'
    on_escalate: str = 'append'
    start: int = 0

    def escalates(self, states):
        return np.array([logit_confidence(s.steps[-1]) < self.threshold for s in states])


def forget(models):
    "Empty the caches of prefixes."
    for m in models:
        if hasattr(m, 'engine'):
            for number in list(m.engine.prefixes.entries):
                m.engine.prefixes.remove(number)
        else:
            urllib.request.urlopen(
                m.base_url.removesuffix('/v1') + '/reset_prefix_cache', data=b''
            ).read()


async def chains(models, jobs):
    "Write whole chains, one per (model, problem), all at once."
    seed = lambda p, m: lambda i: edge_seed(p.benchmark, p.id, 0, str(m) * i, m)
    return await asyncio.gather(
        *(models[m].write(Request(p, (), seed(p, m), True)) for m, p in jobs)
    )


async def stretches(models, jobs):
    "Write stretches of steps, one per (model, problem, path, prefix, steps), all at once."
    seed = lambda p, path, m: lambda i: edge_seed(p.benchmark, p.id, 0, path + str(m) * i, m)
    requests = [
        (m, Request(p, prefix, seed(p, path, m), True, len(prefix) + n))
        for m, p, path, prefix, n in jobs
    ]
    return await asyncio.gather(*(models[m].write(request) for m, request in requests))


def tokens_of(drawn):
    return sum(s.generated for steps in drawn for s in steps)


def first_chains(jobs, lengths, tokens):
    "The first chains that together have about this number of tokens."
    upto = np.cumsum(lengths)
    assert upto[-1] >= tokens, (
        f'{upto[-1]} tokens of plain chains, the routed run has {tokens}: draw more'
    )
    return jobs[: int(np.abs(upto - tokens).argmin()) + 1]


def as_stretches(problems, edges):
    "The edges of a run as jobs of `stretches`: a job is a stretch of steps by one model."
    by_id, jobs = {p.id: p for p in problems}, []
    for p, path, m in edges:
        if path.endswith(str(m)) and (p, path[:-1], m) in edges:
            continue
        n = 1
        while (p, path + str(m) * n, m) in edges:
            n += 1
        jobs.append(
            (m, by_id[p], path, tuple(edges[p, path[:i], int(k)] for i, k in enumerate(path)), n)
        )
    return jobs


def routed(models, problems, router):
    "A routed run with a new store: its seconds, and the steps that were written, by (problem, path, model)."
    forget(models)
    settings = tree_settings(problems[0].benchmark, models)
    with TemporaryDirectory() as tmp, RolloutStore(f'{tmp}/draws.db', settings) as store:
        start = time.perf_counter()
        walk(problems, router, RoutingTree(models, store))
        return time.perf_counter() - start, {
            (key[0], *key[2:]): store.get(*key) for key in store.keys()
        }


def timed(models, work, tokens):
    "Seconds of a coroutine that draws about `tokens` tokens, scaled to exactly that number."
    forget(models)
    start = time.perf_counter()
    drawn = run_async(work)
    return (time.perf_counter() - start) * tokens / tokens_of(drawn)


def compare(models, benchmark, n, repeats):
    problems = load_problems(benchmark, 'test', n)
    jobs = [[(m, p) for p in problems] for m in (0, 1)]
    drawn = [
        run_async(chains(models, some)) for some in jobs
    ]  # not timed: lengths, and confidences
    scores = [logit_confidence(s) for chain in drawn[0] for s in chain]
    router, ratios = (
        Confidence(float(np.nanquantile(scores, 0.15))),
        {'whole chains': [], 'same steps': []},
    )
    for _ in range(repeats):
        mine, edges = routed(models, problems, router)
        wrote = [sum(s.generated for (_, _, k), s in edges.items() if k == m) for m in (0, 1)]
        plain = [
            job
            for m in (0, 1)
            for job in first_chains(jobs[m], [tokens_of([c]) for c in drawn[m]], wrote[m])
        ]
        ratios['whole chains'].append(timed(models, chains(models, plain), sum(wrote)) / mine)
        again = stretches(models, as_stretches(problems, edges))
        ratios['same steps'].append(timed(models, again, sum(wrote)) / mine)
    print(
        f'{benchmark}: {sum(wrote) / mine:.0f} tokens/s routed, {wrote[1] / sum(wrote):.0%} by the large model'
    )
    for baseline, r in ratios.items():
        print(
            f'  against {baseline}: {statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})',
            flush=True,
        )


if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--engine', choices=('transformers', 'vllm'), default='transformers')
    parser.add_argument('--problems', type=int, default=256)
    parser.add_argument('--repeats', type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ['VLLM_SERVER_DEV_MODE'] = '1'  # lets `forget` empty a server's cache
    names = [
        f'vllm:{micro_path(s)}' if args.engine == 'vllm' else f'micro-{s}'
        for s in ('small', 'large')
    ]
    with open_models(names, batch_size=128) as models:
        for benchmark in ('micro-gsm', 'micro-math'):
            compare(models, benchmark, args.problems, args.repeats)
