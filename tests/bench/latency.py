"""How long does a user wait for a routed answer?
`python tests/bench/latency.py [--engine transformers|vllm] [--problems 100] [--out tables/latency]`

The micro pair answers one problem at a time, on a machine that does nothing else. The table has the seconds until the
first step is accepted, between accepted steps, and in all. It shows medians and 95th percentiles over problems
(between steps: over steps). A step is accepted when the next step is asked for, or when the chain ends. So the time
of a judge or a reward model counts. A model that goes on to the end is asked step by step, as a server that streams
would do. The bare threshold on the least sure token escalates after a given share of the small model's steps. It
represents STEER and our policies too, because their networks take far less time than a step. SpecReason and RSD use a
threshold of one half. Nothing is cached from one problem to the next. The table holds for one machine, and no run
publishes it."""
import argparse
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from routing import forget

from stepwise_routing.base.records import Step
from stepwise_routing.base.store import RolloutStore, tree_settings
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.method.confidence import FEATURES, observe
from stepwise_routing.method.routers import RSD, Grade, ScoreRouter, SpecReason, asking_settings
from stepwise_routing.method.tree import RoutingTree
from stepwise_routing.method.walks import LargeOnly, SmallOnly, walk
from stepwise_routing.models.hub import micro_path
from stepwise_routing.models.interface import Reward
from stepwise_routing.models.names import open_models
from stepwise_routing.models.reward import load_prm


class Stamped:
    "A model that writes one step per call, and notes when each step was first asked for."
    def __init__(self, model, asked): self.model, self.asked = model, asked
    def __getattr__(self, name): return getattr(self.model, name)
    async def write(self, request):
        steps, prefix = (), ()
        while not steps or request.to_end and not (steps[-1].final or len(prefix) + 1 >= request.max_steps):
            prefix = (*request.steps, *steps)
            self.asked.setdefault(len(prefix), time.perf_counter())
            seed = lambda i, n=len(steps): request.seed(n + i)
            steps += tuple(await self.model.write(replace(request, steps=prefix, seed=seed, to_end=False)))
        return steps

def timed(models, problem, method, prm=None):
    "Seconds from the question until each step was accepted. `method(stores, models)` makes the router."
    forget([m for m in (*models, prm) if m])
    asked = {}
    with TemporaryDirectory() as tmp, ExitStack() as stack:
        def store(settings, record=Step):
            path = f'{tmp}/{record.__name__}.db'
            return stack.enter_context(RolloutStore(path, settings, record=record))
        draws = store(tree_settings(problem.benchmark, models))
        tree = RoutingTree([Stamped(m, asked) for m in models], draws)
        def answers(record, model): return store(asking_settings(problem.benchmark, model), record)
        router = method(answers, models)
        start = time.perf_counter()
        walked, = walk([problem], router, tree)
        end = time.perf_counter()
    return np.array([asked.get(i, end) for i in range(1, len(walked.steps))] + [end]) - start

def threshold_at(models, problems, share):
    "The probability below which this share of the small model's steps is."
    settings = tree_settings(problems[0].benchmark, models)
    with TemporaryDirectory() as tmp, RolloutStore(f'{tmp}/draws.db', settings) as store:
        steps = [w.steps for w in walk(problems, SmallOnly(), RoutingTree(models, store))]
    return float(np.nanquantile(np.concatenate([observe(s)[:, FEATURES.index('score_prob')] for s in steps]), share))

def row(name, benchmark, waits):
    parts = [[w[0] for w in waits], np.concatenate([np.diff(w) for w in waits]), [w[-1] for w in waits]]
    cells = [f'{1e3*np.quantile(p, q):.1f}' for p in parts for q in (.5, .95)]
    return f'| {benchmark} | {name} | {" | ".join(cells)} |'

def main():
    parser = argparse.ArgumentParser(description='Latency of routed answers of the micro pair.')
    parser.add_argument('--engine', choices=('transformers', 'vllm'), default='transformers')
    parser.add_argument('--benchmarks', default='micro-gsm,micro-math,micro-omni')
    parser.add_argument('--problems', type=int, default=100)
    parser.add_argument('--share', type=float, default=.1, help='share of the small steps that escalate')
    parser.add_argument('--out', default='tables/latency')
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [f'vllm:{micro_path(s)}' if args.engine == 'vllm' else f'micro-{s}' for s in ('small', 'large')]
    prm, lines = load_prm(), []
    with open_models(names) as models:
        for benchmark in args.benchmarks.split(','):
            problems = load_problems(benchmark, 'test', args.problems + 1)
            bare = ScoreRouter('score_prob', threshold=threshold_at(models, problems, args.share))
            methods = {'Small only': lambda *_: SmallOnly(), 'Large only': lambda *_: LargeOnly(),
                       'Bare threshold': lambda *_: bare,
                       'Bare threshold, regenerate': lambda *_: replace(bare, on_escalate='regenerate'),
                       'SpecReason': lambda store, models: SpecReason(store(Grade, models[1]), models[1]),
                       'RSD': lambda store, _: RSD(store(Reward, prm), prm)}
            waits = {name: [timed(models, p, method, prm) for p in problems] for name, method in methods.items()}
            lines += [row(name, benchmark, w[1:]) for name, w in waits.items()] # the first one warms up
    run_async(prm.close())
    heads = [f'{part}, {p}' for part in ('first step', 'between steps', 'total') for p in ('p50', 'p95')]
    head = ['| Benchmark | Method | ' + ' | '.join(heads) + ' |', '| --- | --- |' + ' --: |'*6]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else 'one CPU thread'
    note = (f'Milliseconds, medians (p50) and 95th percentiles; {args.problems} problems, one at a time; '
            f'{args.engine}, {where}; tests/bench/latency.py. First step: until it is accepted; between steps: from '
            "one accepted step to the next. *Bare threshold*: on the least sure token's probability; it stands in for "
            'STEER and for our policies, whose networks are far smaller than a step. SpecReason and RSD at their '
            'threshold of one half.')
    Path(args.out).mkdir(parents=True, exist_ok=True)
    Path(args.out, 'latency.md').write_text('\n'.join([*head, *lines, '', note, '']))
    print('\n'.join([*head, *lines, '', note]))

if __name__ == '__main__': main()
