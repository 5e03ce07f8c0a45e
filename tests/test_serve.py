"The server's protocol, as OpenAI's own client sees it."
import asyncio
import json
import math
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

torch = pytest.importorskip('torch')
openai = pytest.importorskip('openai')
from stepwise_routing.base.records import Step, chat_prompt
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models import serve as models_serve
from stepwise_routing.models.hub import load_micro, micro_path, weights_sha256
from stepwise_routing.models.interface import Request
from stepwise_routing.models.replies import CONTINUE, step_messages

torch.set_num_threads(1)
CHAT_TEMPLATE = (micro_path('small')/'chat_template.jinja').read_text()
KEY = 'sesame-street-123'
PROBLEMS = load_problems('micro-gsm', 'test', n=6)

@pytest.fixture(scope='module')
def url():
    with models_serve.served('micro-small', key=KEY, context=700) as url: yield url

@pytest.fixture(scope='module')
def local():
    backend = load_micro('small', context=700, max_tokens=700)
    backend.text.hf.chat_template = models_serve.continuing(CHAT_TEMPLATE)
    return backend

def client(url, key=KEY): return openai.OpenAI(base_url=url, api_key=key, max_retries=0)
def ask(url, messages=None, model='micro-small', key=KEY, **kwargs):
    messages = messages or chat_prompt(PROBLEMS[0].question)
    with client(url, key) as c:
        reply = c.chat.completions.create(model=model, messages=messages, **kwargs)
        return [*reply] if kwargs.get('stream') else reply

def test_the_model_and_its_weights(url):
    with client(url) as c: model, = c.models.list().data
    assert model.id == 'micro-small' and model.object == 'model' and model.params > 1e5
    assert model.weights == weights_sha256(micro_path('small'))

def test_a_reply_has_every_field(url, local):
    reply = ask(url, seed=5, temperature=.7, stop='\n\n', logprobs=True, top_logprobs=4)
    choice, usage = reply.choices[0], reply.usage
    step, = run_async(local.write(Request(PROBLEMS[0], seed=lambda i: 5)))
    assert (choice.message.content, choice.message.role) == (step.text, 'assistant')
    assert (choice.finish_reason, choice.index, reply.object) == ('stop', 0, 'chat.completion')
    assert (usage.prompt_tokens, usage.completion_tokens) == (step.prompt, step.generated)
    assert usage.total_tokens == step.prompt + step.generated and usage.prompt_tokens_details.cached_tokens == 0
    shown = choice.logprobs.content
    assert b''.join(bytes(t.bytes) for t in shown).decode() == step.text + '\n\n'
    assert all(len(t.top_logprobs) == 4 for t in shown)
    np.testing.assert_allclose([math.exp(t.logprob) for t in shown], step.prob, atol=1.01e-5)
    for t in shown:
        logs = [a.logprob for a in t.top_logprobs]
        assert logs == sorted(logs, reverse=True)
        assert t.logprob in logs or t.logprob < min(logs)

def test_the_same_seed_writes_the_same_whatever_shares_the_batch(url):
    async def many():
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as c:
            def draw(i):
                messages = chat_prompt(PROBLEMS[i % 6].question)
                options = dict(temperature=i % 3, top_p=1 - i % 2/4, max_tokens=60)
                return c.chat.completions.create(model='micro-small', messages=messages, seed=i, **options)
            return [r.choices[0].message.content for r in await asyncio.gather(*map(draw, range(24)))]
    first = run_async(many())
    assert run_async(many()) == first and len(set(first)) > 6
    alone = ask(url, chat_prompt(PROBLEMS[1].question), seed=7, temperature=1, top_p=.75, max_tokens=60)
    assert alone.choices[0].message.content == first[7]

@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 99))
@example(which=4, n=1, seed=0) # the reply begins with a blank
@settings(max_examples=10, deadline=None)
def test_a_prefix_is_continued_token_by_token(url, local, which, n, seed):
    p = PROBLEMS[which]
    chain = run_async(local.write(Request(p, seed=lambda i: i, to_end=True)))
    prefix = tuple(Step(s.text, 1, s.finish) for s in chain[:-1][:n])
    request = Request(p, prefix, lambda i: seed)
    step, = run_async(local.write(request))
    reply = ask(url, step_messages(request), seed=seed, temperature=.7, stop='\n\n')
    assert reply.choices[0].message.content.strip() == step.text # a `Step` has no blanks around its text
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (step.prompt, step.generated)

def test_the_template_opens_the_last_turn_and_no_other():
    import jinja2
    render = jinja2.Template(models_serve.continuing(CHAT_TEMPLATE)).render
    turns = [*chat_prompt('q'), dict(role='assistant', content='a\n\nb')]
    again = [*turns, dict(role='user', content=CONTINUE)]
    opened = render(messages=chat_prompt('q'), add_generation_prompt=True) + 'a\n\nb\n\n'
    assert render(messages=again, add_generation_prompt=True) == render(messages=again) == opened
    plain = jinja2.Template(CHAT_TEMPLATE).render
    for other in ([*turns, dict(role='user', content='Score it.')], chat_prompt(CONTINUE),
                  [dict(role='user', content=CONTINUE)], turns, [*again, turns[-1]]):
        for begin in (True, False):
            options = dict(messages=other, add_generation_prompt=begin)
            assert render(**options) == plain(**options)

TEXTS = st.text('ab 1=√½\n.', min_size=1, max_size=12).map(str.strip).filter(lambda s: s and '\n\n' not in s)

@given(st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_prompt_is_the_same_tokens_whole_or_in_parts(local, steps):
    messages = step_messages(Request(PROBLEMS[0], tuple(Step(s, 0, 'step') for s in steps)))
    ids, question, text = *(models_serve._prompt_ids(local, m) for m in (messages, messages[:-2])), local.text
    assert ids[:len(question)] == question
    assert text.decode(ids) == text.decode(text.encode(text.hf.apply_chat_template(messages, tokenize=False)))
    raw = b''.join(models_serve._vocabulary(local.text)[i] for i in ids[len(question):])
    assert raw.decode() == ''.join(s + '\n\n' for s in steps)

def user(text): return [dict(role='user', content=text)]

@pytest.mark.parametrize('change, status, line', [
    (dict(n=2), 400, 'n=2'), (dict(stop='.'), 400, 'stop'), (dict(model='micro-smal'), 404, "did you mean 'micro-small'?"),
    (dict(key='wrong'), 401, 'API key'), (dict(messages=user('a ' * 900)), 400, 'the context only 700')])
def test_a_request_that_cannot_be_served_is_refused(url, change, status, line):
    with pytest.raises(openai.APIStatusError) as e: ask(url, **change)
    assert e.value.status_code == status and line in e.value.body['message'] and KEY not in str(e.value)

def streamed(url, **options):
    chunks = ask(url, stream=True, stream_options=dict(include_usage=True), **options)
    choices = [c.choices[0] for c in chunks[:-1]]
    assert len({c.id for c in chunks}) == 1 and choices[0].delta.role == 'assistant' and not chunks[-1].choices
    assert [c.finish_reason for c in choices[:-1]] == [None] * (len(choices) - 1)
    return chunks, choices

@pytest.mark.parametrize('options', [{}, dict(max_tokens=9), dict(logprobs=True, stop='\n\n')], ids=str)
def test_a_stream_says_what_the_whole_reply_says(url, options):
    steps = []
    for seed in range(6):
        messages = chat_prompt(PROBLEMS[seed].question)
        whole = ask(url, messages, seed=seed, **options)
        steps.append(whole.choices[0].message.content.count('\n\n') + 1)
        chunks, choices = streamed(url, messages=messages, seed=seed, **options)
        want = whole.choices[0]
        assert ''.join(c.delta.content or '' for c in choices) == want.message.content
        assert choices[-1].finish_reason == want.finish_reason and choices[-1].stop_reason == want.stop_reason
        shown = [t for c in choices if c.logprobs for t in c.logprobs.content]
        assert shown == (want.logprobs.content if options.get('logprobs') else [])
        names = 'prompt_tokens', 'completion_tokens', 'total_tokens'
        assert [getattr(chunks[-1].usage, n) for n in names] == [getattr(whole.usage, n) for n in names]
        texts = [c.delta.content for c in choices if c.delta.content]
        if not options: assert len(texts) == steps[-1]
    if not options: assert max(steps) > 1

def test_streams_that_are_left_stop(local):
    "Closed after a step, a stream leaves the engine; what others are writing goes on."
    chat = models_serve._Chat(local, 'micro-small')
    def asked(seed, **more):
        body = dict(model='micro-small', messages=chat_prompt(PROBLEMS[0].question), stream=True, seed=seed, **more)
        return chat.read(json.dumps(body).encode())
    async def part(seed, n):
        text = ''
        async with aclosing(chat.chunks(asked(seed))) as chunks:
            async for together in chunks:
                text += ''.join(c['choices'][0]['delta'].get('content', '') for c in together)
                n -= bool(text)
                if not n: break
        return text
    async def all_at_once():
        texts = await asyncio.gather(*(part(i, 1 if i % 2 else -1) for i in range(16)))
        for _ in range(20): await asyncio.sleep(0)
        return texts, len(local.engine.rows), len(local.engine.waiting)
    texts, *left = run_async(all_at_once())
    assert left == [0, 0]
    for i, text in enumerate(texts):
        reply = run_async(chat.complete(asked(i)))
        whole = reply['choices'][0]['message']['content']
        assert whole.startswith(text) and (text == whole) == (not i % 2) and text

@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000)), max_size=12))
@settings(max_examples=40, deadline=None)
def test_cached_tokens_follow_the_rule(prompts):
    beginnings, before = set(), []
    for which, n in prompts:
        ids = [which] * n
        common = max((min(n, len(b)) for b in before if b[:1] == ids[:1]), default=0)
        cached = 0 if common < 1024 else 1024 + (common - 1024) // 128 * 128
        assert models_serve.cached_tokens(ids, beginnings) == cached
        before.append(ids)

# the process

def alive(pid):
    try: return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError): return False

OWNER = '''
import psutil, sys
from stepwise_routing.models import serve
with serve.served("micro-small"):
    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.readline()
'''

@pytest.mark.parametrize('how', ['end', 'kill'])
@pytest.mark.slow
def test_a_server_never_outlives_its_owner(how):
    owner = subprocess.Popen([sys.executable, '-c', OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    family = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(family) == 2 and all(map(alive, family)) # the server and who watches over it
    if how == 'kill': owner.kill()
    owner.communicate('\n' if how == 'end' else None)
    for _ in range(1000):
        if not any(map(alive, family)): break
        time.sleep(.02)
    assert not any(map(alive, family))

@pytest.mark.slow
def test_a_server_that_cannot_start_says_why():
    for options, line in ((dict(model='micro-larg'), r"unknown model 'micro-larg' \(did you mean 'micro-large'\?\)"),
                          (dict(model='/no/such/folder'), 'no model folder'),
                          (dict(model='micro-small', context=99999), 'context=99999')):
        with pytest.raises(RuntimeError, match=line) as e:
            with models_serve.served(**options): pass
        assert '\n' not in str(e.value)
