"""VLLMBackend on real vLLM, against the same models in our own engine. Not collected by pytest: run it where vLLM is
installed.

    python tests/gpu/vllm_backend.py compare                        # the shipped models: same steps? same confidences?
    python tests/gpu/vllm_backend.py compare --how vllm --dtype float32 --model small
    python tests/gpu/vllm_backend.py faults  # does it fail in one line, and leave nothing behind?
    python tests/gpu/vllm_backend.py bounds  # how far off are probabilities from 20 alternatives? (without vLLM)
    python tests/gpu/vllm_backend.py bounds --model FOLDER --store gsm8k.db --data FOLDER -n 8 # the chains of a store

Prints what it measured and ends with an error where something is not as it should be."""
import argparse, asyncio, json, os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepwise_routing.models.names import open_models
from stepwise_routing.confidence import logit_confidence, logprob_confidence
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.core import run_async
from stepwise_routing.models.transformers import load_micro, micro_path
from stepwise_routing.core import score_messages, verdict_messages
from stepwise_routing.models.base import Request, confidences
from stepwise_routing.models.transformers import load_model
from stepwise_routing.models.vllm import VLLMBackend, _family, _open_text, serve_vllm, shown_confidences

KW = dict(temperature=0., context=2048)

def gather(calls):
    async def every(): return await asyncio.gather(*calls)
    return run_async(every())

async def stepwise(b, p):
    steps = ()
    while not steps or not (steps[-1].final or len(steps) == 30): steps += await b.write(Request(p, steps, lambda i: 1))
    return steps

def spread(x): return {k: float(f'{v:.3g}') for k, v in dict(median=np.median(x), p99=np.quantile(x, .99),
                                                             largest=np.max(x)).items()}

def compare_one(how, dtype, model, n):
    "One row: greedy chains of one model, through vLLM and through our own engine."
    own = load_micro(model, **KW)
    problems = [p for b in ('micro-gsm', 'micro-math') for p in load_problems(b, 'test', n=n)]
    whole = lambda b: gather([b.write(Request(p, (), lambda i: 1, True)) for p in problems])
    reference = whole(own)
    with open_models([f'{how}:micro-{model}'], dtype=dtype, **KW) as (b,):
        start = time.monotonic()
        theirs, seconds = whole(b), time.monotonic() - start
        steps = gather([stepwise(b, p) for p in problems])
        cases = [(f(p, [c[0].text]), o) for p, c in zip(problems, reference) for f,
                 o in ((score_messages, list('0123456789')), (verdict_messages, ['correct', 'incorrect']))]
        options = [gather([x.choose(*case) for case in cases]) for x in (b, own)]
        scored = [gather([x.score(Request(p, c[:-1]), c[-1]) for p, c in zip(problems, reference)]) for x in (b, own)]
        prompts = [len(b.text.prompt(p.question)) == len(own.text.prompt(p.question))
                   and b.text.prompt(p.question) == own.text.prompt(p.question) for p in problems]
    pairs = [(x, y) for a, r in zip(theirs, reference) for x, y in zip(a, r) if x.ids == y.ids]
    assert all((x.text, x.ends, x.finish, x.prompt) == (y.text, y.ends, y.finish, y.prompt) for x,
               y in pairs) and all(prompts)
    gap = lambda f, pairs: spread([abs(f(x) - f(y)) for x, y in pairs])
    return dict(how=how, dtype=dtype, model=model, problems=len(problems), steps=sum(map(len, reference)),
                same_steps=len(pairs) / sum(map(len, reference)),
                same_chains=np.mean([[s.ids for s in a] == [s.ids for s in r] for a, r in zip(theirs, reference)]),
                stepwise_as_whole=np.mean([[s.ids for s in a] == [s.ids for s in r] for a, r in zip(steps, theirs)]),
                s_os=gap(logit_confidence, pairs), s_api=gap(logprob_confidence, pairs),
                score_s_os=gap(logit_confidence, zip(*scored)),
                choice=spread([np.abs(np.subtract(x.prob, y.prob)).max() for x, y in zip(*options)]),
                tokens_per_second=round(sum(s.generated for c in theirs for s in c) / seconds))

def compare(args):
    for how in args.how.split(','):
        for dtype in args.dtype.split(','):
            for model in args.model.split(','):
                row = compare_one(how, dtype, model, args.n)
                print(json.dumps(row, default=float), flush=True)
                exact = dtype == 'float32'
                assert row['same_steps'] == 1 if exact else row['same_steps'] > .95, 'other steps'
                assert row['s_os']['largest'] < (.001 if exact else .2), 'other confidences'
                assert row['s_api']['median'] < .02, 'other confidences'
                assert row['choice']['largest'] < (.001 if exact else .1), 'other choices'

def ended(pids, seconds=30):
    "Seconds until all of them are gone."
    start = time.monotonic()
    def alive(pid):
        try: return Path(f'/proc/{pid}/stat').read_text().rsplit(') ', 1)[1][0] != 'Z'
        except OSError: return False
    while any(map(alive, pids)):
        assert time.monotonic() - start < seconds, 'processes are left over'
        time.sleep(.1)
    return time.monotonic() - start

def said(make):
    "The one line of an error."
    try: make()
    except (RuntimeError, ValueError) as e:
        assert '\n' not in str(e)
        return f'{type(e).__name__}: {e}'
    raise AssertionError('no error')

def faults(args):
    small, (p,) = micro_path('small'), load_problems('micro-gsm', 'test', n=1)
    for bad in (dict(kv_gib=1e-6), dict(dtype='float99'),
                dict(context=10**6)): print(said(lambda: VLLMBackend(small, **{**KW, **bad})))
    b = VLLMBackend(small, **KW)
    family = _family(os.getpid()) - {os.getpid()}
    async def murder():
        tasks = [asyncio.ensure_future(b.write(Request(p, (), lambda i: 1, True))) for _ in range(64)]
        await asyncio.sleep(.1)
        for pid in family:
            if 'VLLM' in Path(f'/proc/{pid}/comm').read_text(): os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)
    print({str(e) for e in run_async(murder()) if isinstance(e, Exception)})
    print(said(lambda: run_async(b.write(Request(p)))))
    run_async(b.close())
    left(args)

def left(args):
    "Nothing is left of a server after its block, nor of what a process had when it is killed, also while it starts."
    before = _family(os.getpid())
    with serve_vllm(micro_path('small'), context=2048, logits=False) as url:
        print(said(lambda: VLLMBackend(micro_path('small'), base_url=url, **KW)))
        family = _family(os.getpid()) - before
    print(f'nothing left {ended(family):.1f} s after a server')
    for how in ('hold', 'hold-server', 'hold-on'):
        child = subprocess.Popen([sys.executable, __file__, how.replace('-on', '')], stdout=subprocess.PIPE, text=True)
        while how == 'hold-on' and not any('VLLM' in Path(f'/proc/{p}/comm').read_text()
                                           for p in _family(child.pid)): time.sleep(.1) # it starts
        if how != 'hold-on': assert child.stdout.readline().strip() == 'ready'
        family = _family(child.pid)
        child.kill()
        child.wait()
        print(f'nothing left {ended(family):.1f} s after a process that had {how} was killed')

def hold(args):
    b = VLLMBackend(micro_path('small'), **KW)
    print('ready', flush=True)
    time.sleep(600)

def hold_server(args):
    with serve_vllm(micro_path('small'), context=2048): print('ready', flush=True); time.sleep(600)

def chains_of(args):
    "Problems, chains, and the prompts they continue: drawn here, or those of the model that a store has."
    if not args.store:
        own = load_micro('large', temperature=.7, context=2048)
        problems = [p for n in ('micro-gsm', 'micro-math') for p in load_problems(n, 'test', n=args.n)]
        return problems, gather([own.write(Request(p, (), lambda i: 1 + i, True))
                                 for p in problems]), own.text, micro_path('large')
    from stepwise_routing.run.store import RolloutStore
    from stepwise_routing.rollouts import RoutingTree
    from stepwise_routing.outcomes import _stored
    problems = load_problems(Path(args.store).stem, 'test', n=args.n, data_dir=args.data)
    with RolloutStore(args.store, readonly=True) as store:
        chains = [_stored(RoutingTree(None, store, max_steps=args.steps), p, '', args.index) for p in problems]
    return problems, chains, _open_text(args.model, None, None)[2], args.model

def bounds(args):
    "Every token's probability, exact and from the likeliest few; and what a store has of the same tokens."
    import torch
    problems, chains, text, folder = chains_of(args)
    net, tops = load_model(folder), (5, 20, 100)
    prob, gaps, s_os = {t: [] for t in tops}, {t: [] for t in tops}, []
    for p, chain in zip(problems, chains):
        ids, new = list(text.prompt(p.question)), [i for s in chain for i in s.ids]
        with torch.inference_mode(): logits = net(torch.tensor([ids + new])).logits[0, len(ids) - 1:-1].double()
        best, exact, _ = confidences(logits, torch.tensor(new)).numpy()
        values = [list(zip(*(x.tolist() for x in logits.topk(t)))) for t in tops]
        for t, rows in zip(tops, values):
            bound = shown_confidences([(row[i].item(), l if i in those else [row[i].item(), *l]) for row, i,
                                       (l, those) in zip(logits, new, rows)])[1]
            prob[t] += (bound / exact - 1).tolist()
            for s, at in zip(chain, np.cumsum([0, *(len(s.ids) for s in chain)])):
                if not s.text: continue
                own = [replace(s, prob=tuple(x[at:at + len(s.ids)])) for x in (bound, exact)]
                gaps[t].append(abs(logprob_confidence(own[0]) - logprob_confidence(own[1])))
                here = replace(s, max_logit=tuple(best[at:at + len(s.ids)]))
                if t == 20: s_os.append(abs(logit_confidence(s) - logit_confidence(here)))
    for t in tops: print(json.dumps(dict(top=t, tokens=len(prob[t]), prob=spread(prob[t]), steps=len(gaps[t]),
                                         s_api=spread(gaps[t]))))
    print(json.dumps(dict(s_os_as_drawn_and_as_computed_here=spread(s_os))))

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['compare', 'faults', 'left', 'bounds', 'hold', 'hold-server'])
    parser.add_argument('--how', default='vllm,vllm-server')
    parser.add_argument('--dtype', default='float32,bfloat16')
    parser.add_argument('--model', default='small,large')
    parser.add_argument('--store', help='of bounds: a store of rollouts, one of whose models is --model')
    parser.add_argument('--steps', type=int, default=12, help='of bounds: the longest chain of the store')
    parser.add_argument('--index', type=int, default=1, help='of bounds: place of --model among those of the store')
    parser.add_argument('--data', help='of bounds: the folder with the benchmark of the store')
    parser.add_argument('-n', type=int, default=20, help='problems per benchmark')
    args = parser.parse_args()
    dict(compare=compare, faults=faults, left=left, bounds=bounds, hold=hold,
         **{'hold-server': hold_server})[args.what](args)
