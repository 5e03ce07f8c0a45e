"""Are the numbers the same on another processor? `python tests/bench/processor.py [--cpu Haswell]`

The script hashes the parts of a run whose last digits could differ: the draws of the micro models with their
confidences, policies trained by the exact and by the sampled gradient, and STEER's mixtures. It does so three times:
here, on a processor that QEMU imitates, and here without the settings that kernels of a run inherit (the first two have
them). QEMU is `qemu-x86_64` of the package qemu-user; `qemu-x86_64 -cpu help` lists processors. An imitated processor
takes some minutes."""
import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]

def hashed(*arrays): return hashlib.sha256(b''.join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:12]

def facts():
    "The hashes, by part."
    sys.path.insert(0, str(TESTS/'helpers'))
    from policies import toy_env

    from stepwise_routing.base.records import edge_seed
    from stepwise_routing.base.settings import Policy
    from stepwise_routing.base.tools import run_async
    from stepwise_routing.data.benchmarks import load_problems
    from stepwise_routing.method.routers import fit_mixture
    from stepwise_routing.method.training import train
    from stepwise_routing.models.hub import load_micro
    from stepwise_routing.models.interface import Request
    (p,), out = load_problems('micro-gsm', 'train', 1), {}
    for k, which in enumerate(('small', 'large')):
        seed = lambda i, k=k: edge_seed(p.benchmark, p.id, 0, str(k)*i, k)
        chain = run_async(load_micro(which).write(Request(p, (), seed, to_end=True)))
        out[f'draws, {which}'] = hashed(*(np.array(s.ids) for s in chain))
        out[f'confidences, {which}'] = hashed(*(np.array([s.prob, s.max_logit]) for s in chain))
    for estimator in ('exact', 'sampled'):
        trained = train(toy_env(), Policy(estimator=estimator, batch=50, steps=4), progress=False)
        out[f'policy, {estimator}'] = hashed(*(t.detach().numpy() for t in trained.policy.parameters()))
    mixture = fit_mixture(np.random.default_rng(0).normal(size=300))
    return out | {'mixture': hashed(np.array(mixture.mean), np.array(mixture.std))}

def measured(before=(), **settings):
    "The hashes of another process. `before`: the command that runs it, such as QEMU."
    env = {k: v for k, v in os.environ.items() if k not in settings} | settings
    command = [*before, sys.executable, __file__, '--facts']
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])

def main():
    from stepwise_routing.run.notebooks import KERNEL_SETTINGS, ONE_THREAD
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('--cpu', default='Haswell')
    args.add_argument('--facts', action='store_true', help='the hashes of this process alone')
    args = args.parse_args()
    if args.facts: return print(json.dumps(facts()))
    here, free = measured(**ONE_THREAD, **KERNEL_SETTINGS), measured(**ONE_THREAD)
    there = measured(['qemu-x86_64', '-cpu', args.cpu], **ONE_THREAD, **KERNEL_SETTINGS)
    print(f'| part | {args.cpu} as here | without the settings as with them |\n|---|---|---|')
    for part, value in here.items(): print(f'| {part} | {value == there[part]} | {value == free[part]} |')
    sys.exit(here != there)

if __name__ == '__main__': main()
