"""Real clients of the OpenAI protocol against a server of the micro pair: what they get is what `route` answers.

litellm is in the extra [clients]. It has versions of its own, so it is best put into an environment of its
own: .clients in the clone (`make clients`)."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from micro_router import micro_router, micro_server

torch = pytest.importorskip('torch')
openai = pytest.importorskip('openai')
from stepwise_routing.data.benchmarks import load_problems

pytestmark = pytest.mark.slow
OWN = Path(__file__).resolve().parents[1]/'.clients'/'bin'/'python'
PYTHON = str(OWN) if OWN.exists() else sys.executable
PROBLEMS = load_problems('micro-gsm', 'test', n=50)
QUESTIONS = [p.question for p in PROBLEMS]

def run(code, *words, **options):
    "What another Python prints."
    command = [PYTHON, '-c', code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

def needs(package):
    done = subprocess.run([PYTHON, '-c', f'import {package}'], capture_output=True)
    if done.returncode: pytest.skip(f'{package} is not installed: make clients')

@pytest.fixture(scope='module')
def router():
    torch.set_num_threads(1)
    with micro_router() as router: yield router

@pytest.fixture(scope='module')
def url(router):
    with micro_server(router) as url: yield url

@pytest.fixture(scope='module')
def answers(router): return router.route(QUESTIONS)

def user(text): return [dict(role='user', content=text)]

def test_the_router_has_something_to_decide(answers): assert 0 < sum(len(set(a.models)) > 1 for a in answers) < len(answers)

def test_openai_sync_and_streaming(url, answers):
    with openai.OpenAI(base_url=url, api_key='x', max_retries=0) as c:
        for question, want in zip(QUESTIONS[:10], answers):
            asked = dict(model='mine', messages=user(question), seed=0)
            whole = c.chat.completions.create(**asked)
            chunks = [*c.chat.completions.create(**asked, stream=True, stream_options=dict(include_usage=True))]
            text = ''.join(k.choices[0].delta.content or '' for k in chunks if k.choices)
            assert whole.choices[0].message.content == text == want.text
            assert whole.usage == chunks[-1].usage and whole.usage.completion_tokens == sum(want.tokens)

LITELLM = '''
import asyncio, json, sys
import litellm
litellm.telemetry = False
url, questions = sys.argv[1], json.loads(sys.argv[2])
def asked(q): return dict(model='openai/mine', api_base=url, api_key='x', seed=0, num_retries=0,
                          messages=[dict(role='user', content=q)])
async def late(q): return await litellm.acompletion(**asked(q))
async def all_late(): return await asyncio.gather(*map(late, questions))
whole = [litellm.completion(**asked(q)) for q in questions]
def text(chunks): return ''.join(k.choices[0].delta.content or '' for k in chunks)
streamed = [text(litellm.completion(**asked(q), stream=True)) for q in questions]
at_once = [r.choices[0].message.content for r in asyncio.run(all_late())]
usage = [r.usage.completion_tokens for r in whole]
print(json.dumps([[r.choices[0].message.content for r in whole], streamed, at_once, usage]))
'''

def test_litellm(url, answers):
    needs('litellm')
    out = json.loads(run(LITELLM, url, json.dumps(QUESTIONS[:10])).splitlines()[-1])
    texts = [a.text for a in answers[:10]]
    assert out == [texts, texts, texts, [sum(a.tokens) for a in answers[:10]]]
