"""Does routing slow down the engine?
`python tests/bench/routing.py [--engine transformers|vllm] [--problems 256] [--repeats 3]`

The micro pair answers micro-gsm and micro-math. Every comparison is a ratio of tokens/s of two runs, measured in
turns in one process. The table has the median and range of the repeats, by the clock and by the processor time of
this process and its children (other work on the machine disturbs it less). No cache is kept between runs. The time of
a routed run includes store, confidences and grading. The baselines are:
- Whole chains. Each model writes whole solutions, about as many tokens as it wrote in the routed run, with all
  requests of both models at once. In a routed chain each model also reads the other one's steps; here it does not.
- Same steps. The steps of the routed run are written again, token for token. Each stretch of steps by one model is
  one request with its prefix given, all at once. So it is the same reading and writing without waiting for decisions.
- Rounds. RSD in its authors' loop, against RSD as a walk. The loop has three barriers per round: all chains draft,
  all drafts are scored, the target rewrites the rejected ones. Both have the same models, caches and seeds, and their
  chains are compared.
Passes are forward passes of all models, with any number of rows. They are the cost on an accelerator that is not
full."""
import argparse
import asyncio
import os
import statistics
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from stepwise_routing.base.records import edge_seed
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.confidence import logit_confidence
from stepwise_routing.method.routers import RSD, asking_settings
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.method.walks import walk
from stepwise_routing.models.hub import micro_path
from stepwise_routing.models.interface import Request, Reward
from stepwise_routing.models.names import open_models
from stepwise_routing.models.reward import load_prm


@dataclass(frozen=True)
class Confidence:
    "A threshold on S^os of the last step. Per step, the small model also reads the large one's steps, as for a policy."
    mode: str
    threshold: float
    name: str = 'Confidence'
    on_escalate: str = 'append'
    start: int = 0
    @property
    def rescore(self): return self.mode == 'per_step'
    def escalates(self, states): return np.array([logit_confidence(s.steps[-1]) < self.threshold for s in states])

# --- measuring

def cpu_seconds():
    "Processor seconds of this process and its children."
    below, stats = {os.getpid()}, {}
    for p in Path('/proc').iterdir():
        if p.name.isdigit():
            try: stats[int(p.name)] = (p/'stat').read_text().rpartition(')')[2].split()
            except OSError: pass
    while more := {pid for pid, s in stats.items() if int(s[1]) in below} - below: below |= more
    return sum(int(x) for pid in below for x in stats[pid][11:15])/os.sysconf('SC_CLK_TCK')

class Clock:
    "Wall-clock and processor seconds and forward passes of a `with` block."
    def __init__(self, models): self.models = models
    def passes(self): # vLLM does not tell
        return sum(m.engine.stats['passes'] for m in self.models if hasattr(m, 'engine'))
    def __enter__(self):
        self.made, self.wall, self.cpu = -self.passes(), -time.perf_counter(), -cpu_seconds()
        return self
    def __exit__(self, *exc):
        self.wall += time.perf_counter()
        self.cpu += cpu_seconds()
        self.made += self.passes()

def forget(models):
    "Empty the caches of the models."
    for m in models:
        if hasattr(m, 'engine'):
            cache = m.engine.prefixes
            for handle, *_ in cache.entries.values(): cache.forget(handle)
            cache.entries.clear(), cache.index.clear()
            cache.used = 0
        else: urllib.request.urlopen(m.base_url.removesuffix('/v1') + '/reset_prefix_cache', data=b'').read()

def row(name, baseline, tokens, pairs, note):
    "Print a line of the table, from (baseline, contender) clocks of the same number of tokens."
    cells = [f'{tokens/statistics.median(c.wall for c in clocks):.0f}' for clocks in zip(*pairs)]
    for what in ('wall', 'cpu'):
        r = sorted(getattr(a, what)/getattr(b, what) for a, b in pairs)
        cells.append(f'{statistics.median(r):.2f} ({r[0]:.2f} to {r[-1]:.2f})')
    made = [round(statistics.median(c.made for c in clocks)) for clocks in zip(*pairs)]
    print(f'| {name} | {baseline} | {" | ".join(cells)} | {made[0]} / {made[1]} | {note} |' if made[1] else
          f'| {name} | {baseline} | {" | ".join(cells)} | - | {note} |', flush=True)

# --- what is measured

async def chains(models, jobs):
    "Write whole chains, one per (model, problem, sample), all at once."
    seed = lambda p, s, m: lambda i: edge_seed(p.benchmark, p.id, s, str(m)*i, m)
    return await asyncio.gather(*(models[m].write(Request(p, (), seed(p, s, m), True)) for m, p, s in jobs))

async def stretches(models, jobs):
    "Write stretches of steps, one per (model, problem, path, prefix, steps), all at once."
    seed = lambda p, path, m: lambda i: edge_seed(p.benchmark, p.id, 0, path + str(m)*i, m)
    requests = [(m, Request(p, prefix, seed(p, path, m), True, len(prefix) + n)) for m, p, path, prefix, n in jobs]
    return await asyncio.gather(*(models[m].write(request) for m, request in requests))

def tokens_of(drawn): return sum(s.generated for steps in drawn for s in steps)

def edges_of(store):
    "Steps that were written, by (problem, path, model)."
    return {(key[0], *key[2:]): store.get(*key) for key in store.keys() if isinstance(key[3], int)}

def routed(models, problems, router):
    "A routed run with a new store: its walks, the steps that were written, and its clock."
    settings = tree_settings(problems[0].benchmark, models)
    with TemporaryDirectory() as tmp, RolloutStore(f'{tmp}/draws.db', settings) as store:
        with Clock(models) as clock: walks = walk(problems, router, RoutingTree(models, store))
        return walks, edges_of(store), clock

def rsd_walk(models, prm, problems, threshold):
    "RSD as a walk: its chains, the steps that were written, and its clock."
    benchmark = problems[0].benchmark
    with (TemporaryDirectory() as tmp, RolloutStore(f'{tmp}/draws.db', tree_settings(benchmark, models)) as store,
          RolloutStore(f'{tmp}/rewards.db', asking_settings(benchmark, prm), record=Reward) as rewards):
        with Clock([*models, prm]) as clock:
            walks = walk(problems, RSD(rewards, prm, threshold), RoutingTree(models, store))
        return [w.steps for w in walks], edges_of(store), clock

async def rounds(models, prm, problems, threshold, max_steps=30):
    "RSD in rounds: its chains."
    done, live = {}, [(p, ()) for p in problems]
    def ask(m, p, steps):
        path = ''.join(str(s.model) for s in steps)
        return models[m].write(Request(p, steps, lambda i: edge_seed(p.benchmark, p.id, 0, path, m)))
    while live:
        new = [s for s, in await asyncio.gather(*(ask(0, *chain) for chain in live))]
        rewards = await asyncio.gather(*(prm.reward(p, (*steps, s)) for (p, steps), s in zip(live, new)))
        low = [i for i, r in enumerate(rewards) if r.value < threshold]
        for i, (s,) in zip(low, await asyncio.gather(*(ask(1, *live[i]) for i in low))): new[i] = s
        grown = [(p, (*steps, s)) for (p, steps), s in zip(live, new)]
        done |= {p.id: steps for p, steps in grown}
        live = [(p, steps) for p, steps in grown if not steps[-1].final and len(steps) < max_steps]
    return [done[p.id] for p in problems]

# --- comparisons

def first_chains(jobs, lengths, tokens):
    "The first chains that together have about this number of tokens."
    upto = np.cumsum(lengths)
    assert upto[-1] >= tokens, f'{upto[-1]} tokens of plain chains, the routed run has {tokens}: draw more'
    return jobs[:int(np.abs(upto - tokens).argmin()) + 1]

def as_stretches(problems, edges):
    "The edges of a run as jobs of `stretches`: a job is a stretch of steps by one model."
    by_id, jobs = {p.id: p for p in problems}, []
    for p, path, m in edges:
        if path.endswith(str(m)) and (p, path[:-1], m) in edges: continue
        n = 1
        while (p, path + str(m)*n, m) in edges: n += 1
        jobs.append((m, by_id[p], path, tuple(edges[p, path[:i], int(k)] for i, k in enumerate(path)), n))
    return jobs

def timed(models, work, tokens):
    "(Clock of a coroutine that draws about `tokens` tokens, scaled to exactly that number; its draws)."
    forget(models)
    with Clock(models) as clock: drawn = run_async(work)
    share = tokens/tokens_of(drawn)
    clock.wall, clock.cpu, clock.made = clock.wall*share, clock.cpu*share, clock.made*share
    return clock, drawn

def against_plain(name, models, problems, router, plain, repeats):
    "Compare a routed run with both kinds of plain generation."
    pairs = {'whole chains': [], 'same steps': []}
    for _ in range(repeats):
        forget(models)
        walks, edges, mine = routed(models, problems, router)
        wrote = [sum(s.generated for (_, _, k), s in edges.items() if k == m) for m in (0, 1)]
        jobs = [job for m in (0, 1) for job in first_chains(*plain[m], wrote[m])]
        pairs['whole chains'].append((timed(models, chains(models, jobs), sum(wrote))[0], mine))
        clock, drawn = timed(models, stretches(models, as_stretches(problems, edges)), sum(wrote))
        pairs['same steps'].append((clock, mine))
    mixed, same = sum(len(set(w.path)) > 1 for w in walks), tokens_of(drawn) == sum(wrote)
    share = f'{sum(wrote)} tokens, {100*wrote[1]/sum(wrote):.0f} % by the large model'
    note = f'{share}; {mixed} of {len(walks)} chains by both'
    for baseline, some in pairs.items(): row(name, baseline, sum(wrote), some, note)
    if not same: print(f'(the same steps have {tokens_of(drawn)} tokens: draws depend on the batch here)')

def against_rounds(name, models, prm, problems, threshold, repeats):
    "Compare RSD as a walk with RSD in rounds. They take turns in going first."
    pairs, every = [], [*models, prm]
    for i in range(repeats):
        def in_rounds():
            forget(every)
            with Clock(every) as clock: return run_async(rounds(models, prm, problems, threshold)), clock
        if i % 2: theirs, clock = in_rounds()
        forget(every)
        mine, edges, walked = rsd_walk(models, prm, problems, threshold)
        if i % 2 == 0: theirs, clock = in_rounds()
        pairs.append((clock, walked))
    same = sum([s.text for s in a] == [s.text for s in b] for a, b in zip(mine, theirs))
    tokens = sum(s.generated for s in edges.values())
    note = (f'{tokens} tokens, {sum(m for *_, m in edges)} of {len(edges)} steps by the large model; '
            f'{same} of {len(mine)} chains equal')
    row(name, 'rounds', tokens, pairs, note)

def main():
    about = 'Ratios of tokens/s: routed against plain generation, and RSD as a walk against RSD in rounds.'
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument('--engine', choices=('transformers', 'vllm'), default='transformers')
    parser.add_argument('--benchmarks', default='micro-gsm,micro-math')
    parser.add_argument('--problems', type=int, default=256)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--batch-size', type=int, default=128, help='rows in flight per model')
    parser.add_argument('--threads', type=int, default=1, help='of torch in this process')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [f'vllm:{micro_path(s)}' if args.engine == 'vllm' else f'micro-{s}' for s in ('small', 'large')]
    os.environ['VLLM_SERVER_DEV_MODE'] = '1' # lets `forget` empty a server's cache
    prm = load_prm()
    with open_models(names, batch_size=args.batch_size) as models:
        print('| run | baseline | baseline, tokens/s | tokens/s | ratio, by the clock | ratio, by processor time '
              '| passes | |\n|---|---|---|---|---|---|---|---|')
        for benchmark in args.benchmarks.split(','):
            problems = load_problems(benchmark, 'test', args.problems)
            jobs = [[(m, p, 0) for p in problems] for m in (0, 1)]
            drawn = [run_async(chains(models, some)) for some in jobs] # not timed: lengths, and confidences
            plain = [(some, [tokens_of([chain]) for chain in out]) for some, out in zip(jobs, drawn)]
            scores = [logit_confidence(s) for chain in drawn[0][:len(problems)] for s in chain]
            for mode, share in dict(absorbing=.15, per_step=.4).items():
                threshold = float(np.nanquantile(scores, share))
                against_plain(f'{benchmark}, {mode}', models, problems, Confidence(mode, threshold), plain,
                              args.repeats)
            against_rounds(f'{benchmark}, RSD', models, prm, problems, .7, args.repeats)
    run_async(prm.close())

if __name__ == '__main__': main()
