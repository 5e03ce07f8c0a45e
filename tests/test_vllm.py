"VLLMBackend without vLLM: `tests/fake` has a package of that name, whose server runs the micro model."
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models import vllm as models_vllm
from stepwise_routing.models.hub import load_micro, micro_path
from stepwise_routing.models.interface import Request
from stepwise_routing.models.names import open_models
from stepwise_routing.models.vllm import VLLMBackend, serve_vllm, shown_confidences
from stepwise_routing.records import Step, score_messages, verdict_messages
from stepwise_routing.util import run_async

FAKE, SMALL = str(Path(__file__).parent/'fake'), micro_path('small')
PROBLEMS = load_problems('micro-gsm', 'test', n=2) + load_problems('micro-math', 'test', n=1)
KW = dict(temperature=0., context=512)

@contextlib.contextmanager
def fake(**knobs):
    "The fake vLLM for the time of a block, here and in processes started here."
    mine = {f'FAKE_VLLM_{k.upper()}': v for k, v in knobs.items()}
    before = {k: os.environ.get(k) for k in (*mine, 'PYTHONPATH')}
    package = str(Path(models_vllm.__file__).parents[2])
    os.environ.update(mine, PYTHONPATH=os.pathsep.join(filter(None, (FAKE, package, before['PYTHONPATH']))))
    sys.path.insert(0, FAKE)
    try: yield
    finally:
        sys.path.remove(FAKE)
        for k, v in before.items(): os.environ.pop(k) if v is None else os.environ.update({k: v})
        for name in [m for m in sys.modules if m == 'vllm' or m.startswith('vllm.')]: del sys.modules[name]

SERVER = {}

@pytest.fixture(scope='module', autouse=True)
def server():
    "One server for all tests."
    with fake(), serve_vllm(SMALL, context=KW['context'], top=10**6, timeout=300) as SERVER['url']: yield

def ask(page, data=None):
    return urllib.request.urlopen(urllib.request.Request(SERVER['url'].removesuffix('/v1') + page, data)).read()

def turn(**knobs): ask('/knobs', json.dumps({f'FAKE_VLLM_{k.upper()}': v for k, v in knobs.items()}).encode())

@contextlib.contextmanager
def opened(knobs={}, **kwargs):
    "A VLLMBackend on the server, whose knobs are turned for the time of the block."
    turn(**knobs)
    try:
        backend = VLLMBackend(SMALL, SERVER['url'], **{**KW, **kwargs})
        try: yield backend
        finally: run_async(backend.close())
    finally: turn(**dict.fromkeys(knobs, ''))

@pytest.fixture(scope='module')
def local():
    b = load_micro('small', dtype='float64', **KW)
    yield b
    run_async(b.close())

@pytest.fixture(scope='module')
def backend():
    with opened() as b: yield b

def whole(b, problems=PROBLEMS, **kwargs):
    async def every():
        return await asyncio.gather(*(b.write(Request(p, (), lambda i: 7 + i, True, **kwargs)) for p in problems))
    return run_async(every())

async def stepwise(b, p, most=30):
    steps = ()
    while not steps or not (steps[-1].final or len(steps) == most):
        steps += await b.write(Request(p, steps, lambda i, n=len(steps): 7 + n + i))
    return steps

def alike(mine, theirs, tail=.02):
    "The same steps; logits may differ by rounding, probabilities by what is not shown."
    facts = lambda s: (s.text, s.finish, s.ids, s.ends, s.model, s.generated, s.prompt, s.cached)
    assert list(map(facts, mine)) == list(map(facts, theirs))
    for a, b in zip(mine, theirs):
        if not a.ids: assert a == b; continue
        assert np.allclose(a.max_logit, b.max_logit, atol=1e-3)
        assert np.all(np.subtract(a.prob, b.prob) > -2e-5) and np.all(np.subtract(a.prob, b.prob) < tail)

# What is shown of a token

logits = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12, unique=True)

@settings(deadline=None, max_examples=50)
@given(logits, st.integers(0, 99), st.integers(1, 12))
def test_fewer_alternatives_are_an_upper_bound(row, i, k):
    z = row[i % len(row)]
    top, prob, _ = shown_confidences([(z, list({z, *sorted(row, reverse=True)[:k]}))])
    exact, = shown_confidences([(z, row)])[1]
    assert top == max(row) and prob[0] >= exact * (1 - 1e-12) and prob[0] <= 1

# The same steps as our own engine

def test_whole_chains(backend, local):
    for mine, theirs in zip(whole(backend), whole(local)): alike(mine, theirs)

def test_step_by_step(backend, local):
    for p, theirs in zip(PROBLEMS, whole(local)): alike(run_async(stepwise(backend, p)), theirs)

def test_vocabulary_makes_prob_exact(local):
    with opened(top=10**6) as b:
        assert b.top == b.text.vocab
        for mine, theirs in zip(whole(b), whole(local)): alike(mine, theirs, tail=2e-5)

def test_score(backend, local):
    p, steps = PROBLEMS[0], whole(local, PROBLEMS[:1])[0]
    wrong = Step('The cups cost 1+1=3 dollars.', 1, 'step') # by another vocabulary: without ids
    for prefix, step in (((), steps[0]), (steps[:2], steps[2]), (steps[:1], wrong)):
        mine, theirs = (run_async(b.score(Request(p, prefix), step)) for b in (backend, local))
        assert (mine.ids, mine.ends, mine.prompt, mine.generated) == (theirs.ids, theirs.ends, theirs.prompt, 0)
        assert np.allclose(mine.max_logit, theirs.max_logit, atol=1e-3)
        likely = np.array(theirs.prob) > 1e-4
        assert np.allclose(np.array(mine.prob)[likely], np.array(theirs.prob)[likely], atol=.02)

def test_choose(backend, local):
    p, steps = PROBLEMS[0], ['The pens cost 1+1=2 dollars.']
    cases = (score_messages(p, steps), list('0123456789')), (verdict_messages(p, steps), ['correct', 'incorrect'])
    for messages, options in cases:
        mine, theirs = (run_async(b.choose(messages, options)) for b in (backend, local))
        assert np.allclose(mine.prob, theirs.prob, atol=1e-3)
        assert (mine.prompt, mine.generated, mine.shared) == (theirs.prompt, theirs.generated, theirs.shared)
    with pytest.raises(ValueError, match='begins option'):
        run_async(backend.choose(score_messages(p, steps), ['1', '12']))

@pytest.mark.parametrize('limits', [dict(context=100), dict(max_tokens=5), dict(max_tokens=11, context=100)])
def test_limits(limits):
    "A chain that reaches the context, and a step that is too long, end as they do in our own engine."
    own = load_micro('small', dtype='float64', **{**KW, **limits})
    with opened(**limits) as b:
        assert 'length' in [c[-1].finish for c in whole(own)]
        for p, mine, theirs in zip(PROBLEMS, whole(b), whole(own)):
            alike(mine, theirs)
            alike(run_async(stepwise(b, p)), theirs)
    run_async(own.close())

# Where a step ends

# Requests that nobody waits for any more

# Settings

def test_settings(backend, local):
    mine, theirs = backend.settings(), local.settings()
    assert json.loads(json.dumps(mine)) == mine and mine['vllm'] == '0.0.fake' and mine['top'] == 20
    assert {k: mine[k] for k in ('weights', 'tokenizer', 'prompt', 'temperature', 'context')} == \
           {k: theirs[k] for k in ('weights', 'tokenizer', 'prompt', 'temperature', 'context')}
    assert backend.spec.params == local.spec.params

@pytest.mark.parametrize('model', ['', f'#{SMALL}'])
def test_a_server_that_is_there(local, model):
    "It says which model it has; another name can be given, for a folder that lies elsewhere here."
    with open_models([f'vllm-server:{SERVER["url"]}{model}'], **KW) as (b,):
        alike(whole(b, PROBLEMS[:1])[0], whole(local, PROBLEMS[:1])[0])
        assert b.spec.name == 'small' and b.settings()['weights'] == local.settings()['weights']

# One line where something is wrong

def one_line(knobs={}, **kwargs):
    with pytest.raises((RuntimeError, ValueError)) as e:
        with opened(knobs, **kwargs) as b: run_async(b.write(Request(PROBLEMS[0], (), int, True)))
    assert '\n' not in str(e.value) and 'Traceback' not in str(e.value)
    return str(e.value)

def test_failures(monkeypatch):
    with pytest.raises(RuntimeError) as e, fake(broken='1'), serve_vllm(SMALL, context=512): pass
    line = "the vLLM server of 'small' did not start: ValueError: no room for the keys and values of 512 tokens"
    assert str(e.value) == line
    assert 'no token ids' in one_line(dict(old='1'))
    assert 'is no vLLM server' in one_line(dict(other='1'))
    assert '--logprobs-mode raw_logits' in one_line(dict(mode='raw_logprobs'))
    with pytest.raises(RuntimeError, match='Connection error'): VLLMBackend(SMALL, 'http://127.0.0.1:9/v1')
    monkeypatch.setitem(sys.modules, 'vllm', None)
    with pytest.raises(RuntimeError, match=r'pip install -e "\.\[gpu\]" -c constraints-gpu'), serve_vllm(SMALL): pass

# Processes

def gone(processes, seconds=15): return not psutil.wait_procs(processes, seconds)[1]

@pytest.mark.slow
def test_a_server_ends_with_its_block():
    with fake():
        with serve_vllm(SMALL, name='small-2', context=256) as url:
            family = [p for p in psutil.Process().children(recursive=True) if 'small-2' in p.cmdline()]
            assert len(family) == 2 # the server and who watches over it
            b = VLLMBackend(SMALL, url, context=200)
            knob = urllib.request.Request(url.removesuffix('/v1') + '/knobs', b'{"FAKE_VLLM_DEAD": "1"}')
            urllib.request.urlopen(knob).read()
            for to_end in (False, True): # it dies, then is dead
                with pytest.raises(RuntimeError, match='the vLLM server at .* Connection error'):
                    run_async(b.write(Request(PROBLEMS[0], (), int, to_end)))
            run_async(b.close())
        assert gone(family)

@pytest.mark.slow
def test_nothing_outlives_a_killed_parent():
    "A watched command and what it started, but nothing else."
    sleeper = '[sys.executable, "-c", "import time; time.sleep(600)"]'
    starter = '[sys.executable, "-c", "import subprocess, sys, time; subprocess.Popen(%s); time.sleep(600)"]' % \
        sleeper.replace('"', "'")
    lines = ['import subprocess, sys, time', 'from stepwise_routing.models.vllm import watched',
             f'other = subprocess.Popen({sleeper})', f'watch = watched({starter})', 'child = watch.__enter__()',
             'time.sleep(1)', 'print(other.pid, child.pid, flush=True)', 'time.sleep(600)']
    parent = subprocess.Popen([sys.executable, '-c', '\n'.join(lines)], stdout=subprocess.PIPE, text=True)
    other, watcher = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    try:
        family = [watcher, *watcher.children(recursive=True)]
        assert len(family) == 3 and all(p.is_running() for p in [other, *family])
        parent.kill()
        parent.wait()
        assert gone(family) and other.is_running()
    finally:
        other.kill()
        parent.stdout.close()
