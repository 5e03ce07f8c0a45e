"""Real clients of the OpenAI protocol against a server of the micro pair: what they get is what `route` answers.

litellm and lm-eval are in the extra [clients]. It has versions of its own, so it is best put into an environment of its
own: .clients in the clone (`make clients`)."""
import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from micro_router import micro_router, micro_server

torch = pytest.importorskip('torch')
openai = pytest.importorskip('openai')
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.grading import is_equiv

pytestmark = pytest.mark.slow
OWN = Path(__file__).resolve().parents[1]/'.clients'/'bin'/'python'
PYTHON = str(OWN) if OWN.exists() else sys.executable
PROBLEMS = load_problems('micro-gsm', 'test', n=50)
QUESTIONS = [p.question for p in PROBLEMS]
TEMPERATURE = .7 # as the router was asked by `route`

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
def router(tmp_path_factory):
    torch.set_num_threads(1)
    with micro_router(tmp_path_factory.mktemp('policy')/'p') as router: yield router

@pytest.fixture(scope='module')
def url(router):
    with micro_server(router) as (url, _): yield url

@pytest.fixture(scope='module')
def answers(router): return router.route(QUESTIONS)

def user(text): return [dict(role='user', content=text)]

def test_the_router_has_something_to_decide(answers): assert 0 < sum('1' in a.path for a in answers) < len(answers)

def test_openai_sync_and_streaming(url, answers):
    with openai.OpenAI(base_url=url, api_key='x', max_retries=0) as c:
        for question, want in zip(QUESTIONS[:10], answers):
            asked = dict(model='mine', messages=user(question), seed=0)
            whole = c.chat.completions.create(**asked)
            chunks = [*c.chat.completions.create(**asked, stream=True, stream_options=dict(include_usage=True))]
            text = ''.join(k.choices[0].delta.content or '' for k in chunks if k.choices)
            assert whole.choices[0].message.content == text == want.text
            assert whole.usage == chunks[-1].usage and whole.usage.completion_tokens == sum(want.tokens)
            with c.chat.completions.with_streaming_response.create(**asked) as raw:
                assert raw.headers['x-stepwise-handovers'] == str(int('1' in want.path))

def test_openai_async_and_early_close(url, router, answers):
    "Streams that are left after one chunk stop, beside others that go on."
    async def one(c, i):
        stream = await c.chat.completions.create(model='mine', messages=user(QUESTIONS[i]), seed=0, stream=True)
        text = ''
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ''
                if i % 2 and text: break
        return text
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=url, api_key='x', max_retries=0) as c:
            return await asyncio.gather(*(one(c, i) for i in range(40)))
    for i, (got, want) in enumerate(zip(run_async(all_at_once()), answers)):
        assert got == (want.steps[0] if i % 2 else want.text)
    async def alone(): # nothing runs on: the next question has the models to itself
        async with aclosing(router.stream(QUESTIONS[0])) as steps: return [s async for s in steps]
    assert run_async(alone()) and not any(b.engine.rows for b in router.backends)

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

TASK = r'''
task: micro_gsm
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], do_sample: true, temperature: {temperature}, max_gen_toks: 4096}}
filter_list:
  - {{name: boxed, filter: [{{function: regex, regex_pattern: '\\boxed\{{([^{{}}]*)\}}', group_select: -1}},
                          {{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
'''

def test_lm_eval(url, answers, tmp_path):
    "lm-eval's `local-chat-completions` finds the accuracy of `route`."
    needs('lm_eval')
    file, tasks = tmp_path/'problems.jsonl', tmp_path/'tasks'
    file.write_text('\n'.join(json.dumps(dict(question=p.question, answer=p.answer)) for p in PROBLEMS))
    tasks.mkdir()
    (tasks/'micro_gsm.yaml').write_text(TASK.format(file=file, temperature=TEMPERATURE))
    args = f'model=mine,base_url={url}/chat/completions,num_concurrent=8,seed=0,tokenizer_backend=None,max_retries=1'
    words = ['run', '--model', 'local-chat-completions', '--model_args', args, '--tasks', 'micro_gsm', '--include_path',
             tasks, '--apply_chat_template', '--output_path', tmp_path/'out', '--log_samples']
    code = 'import sys; from lm_eval.__main__ import cli_evaluate; sys.argv[0] = "lm_eval"; cli_evaluate()'
    env = dict(PATH='', HOME=str(tmp_path), HF_HOME=str(tmp_path/'hf'), HF_HUB_OFFLINE='1', OPENAI_API_KEY='x')
    run(code, *words, env=env)
    result, = (tmp_path/'out').rglob('results_*.json')
    found = json.loads(result.read_text())['results']['micro_gsm']
    right = [is_equiv(p.answer, a.answer) for p, a in zip(PROBLEMS, answers)]
    accuracy, = [v for k, v in found.items() if k.startswith('exact_match,')]
    assert accuracy == sum(right)/len(right) and 0 < sum(right) < 50
    samples, = (tmp_path/'out').rglob('samples_*.jsonl')
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {r['doc']['question']: r['resps'][0][0] for r in rows} == {a.question: a.text for a in answers}
