"""A router behind the OpenAI protocol: a real server on a real port, OpenAI's own client, and clients that misbehave.
Crashed 0, hung 0, wrong bill 0."""
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from faulty import Faulty
from test_live import opened  # noqa: F401
from test_own import PAIR, Adder, pair_module, ready
from toy import toy_problems

openai = pytest.importorskip('openai')
from stepwise_routing.base.tools import run_async
from stepwise_routing.method.offers import offers
from stepwise_routing.models.answers import RouterService, StopText
from stepwise_routing.models.bills import Bills, Purse, set_caps
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT
from stepwise_routing.models.metrics import Metrics
from stepwise_routing.models.web import KEY_ENV, Limits, running
from stepwise_routing.own import drift, open_router, own_table, report, serving
from stepwise_routing.report.own_report import cache_rows
from stepwise_routing.report.own_router import OwnRouter
from stepwise_routing.report.traffic import Recorder

QUESTIONS = [p.question for p in toy_problems(60, seed=9)]
KEY = 'sesame-street-123'
SMALL = dict(body=20_000, ping=.05, patience=1., grace=2.)

class Served:
    "A router's server, with what a test wants to look at."
    def __init__(self, router, **limits):
        self.metrics = Metrics()
        points = {.05: router.router, .1: router.router.at(0.)}
        self.service = RouterService(offers('mine', router, points), self.metrics)
        self.limits = Limits(**SMALL | limits)
    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.url = self.stack.enter_context(running(self.service, limits=self.limits, metrics=self.metrics))
        self.port = int(self.url.split(':')[2].split('/')[0])
        return self
    def __exit__(self, *exc): self.stack.close()
    def ask(self, question=QUESTIONS[0], **body):
        with openai.OpenAI(base_url=self.url, api_key='x', max_retries=0) as c:
            options = dict(model='mine', messages=[dict(role='user', content=question)], seed=0) | body
            got = c.chat.completions.create(**options)
            return [*got] if body.get('stream') else got
    def count(self, name, **labels): return self.metrics.counts.get((name, tuple(sorted(labels.items()))), 0)

@pytest.fixture(scope='module')
def served(opened):
    with Served(opened[0]) as served: yield served

def text(chunks): return ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)

def post(url, body, path='/chat/completions', method='POST', **head):
    "Status, body and head of the answer to a request that is sent as it is."
    asked = urllib.request.Request(url + path, body, {name.replace('_', '-'): v for name, v in head.items()},
        method=method)
    try: reply = urllib.request.urlopen(asked, timeout=30)
    except urllib.error.HTTPError as e: reply = e
    with reply: return reply.status, reply.read(), reply.headers

def user(text): return [dict(role='user', content=text)]

async def hang_up(served, body, seconds, ready=lambda: True):
    "Ask, wait for the first byte of a stream, then a little, and be gone."
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection('127.0.0.1', served.port)
    head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n\r\n'
    writer.write(head.encode() + raw)
    if body['stream']: await reader.read(1)
    while not ready(): await asyncio.sleep(.01)
    with contextlib.suppress(asyncio.TimeoutError): await asyncio.wait_for(reader.read(), seconds)
    writer.transport.abort()

def eventually(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end: time.sleep(.02)
    return holds()

# ---- what is answered

def test_the_list_of_models(served):
    with openai.OpenAI(base_url=served.url, api_key='x') as c:
        names = [m.id for m in c.models.list().data]
        assert names == ['mine', 'mine@alpha=0.05', 'mine@alpha=0.1', 'small', 'large']
        assert c.models.retrieve('mine@alpha=0.1').owned_by == 'stepwise-routing'

def test_a_name_that_is_listed_can_be_asked_for(opened):
    with Served(opened[0]) as served, openai.OpenAI(base_url=served.url, api_key='x') as c:
        served.service.served |= {'mein Röuter': None, 'a%41': None}
        for model in c.models.list().data: assert c.models.retrieve(model.id).id == model.id

def test_streamed_is_whole_is_route(served, opened):
    router = opened[0]
    for question, want in zip(QUESTIONS[:25], router.route(QUESTIONS[:25])):
        whole = served.ask(question)
        chunks = served.ask(question, stream=True, stream_options=dict(include_usage=True))
        assert whole.choices[0].message.content == text(chunks) == want.text
        assert chunks[0].choices[0].delta.role == 'assistant'
        assert [c.choices for c in chunks if not c.choices] == [[]] and chunks[-1].usage == whole.usage
        finish, = {c.choices[0].finish_reason for c in chunks if c.choices} - {None}
        assert finish == whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason
        assert whole.usage.completion_tokens == sum(want.tokens) == sum(s['tokens'] for s in whole.stepwise)
        thrown = sum(s['tokens'] for s in whole.stepwise if s['decision'] == 'reject')
        assert whole.usage.completion_tokens_details.rejected_prediction_tokens == thrown
        assert [s['model'] for s in whole.stepwise if s['decision'] != 'reject'] == list(want.models)
        told = [s for c in chunks for s in getattr(c, 'stepwise', None) or ()]
        plain = [{k: v for k, v in s.items() if k != 'seconds'} for s in told]
        assert plain == [{k: v for k, v in s.items() if k != 'seconds'} for s in whole.stepwise]
        assert whole.system_fingerprint == chunks[0].system_fingerprint and whole.usage.cost == 0

def test_no_usage_chunk_unless_asked_for(served): assert all(c.choices for c in served.ask(stream=True))

def test_headers_say_who_wrote(served):
    body = json.dumps(dict(model='large', messages=user('What is 3 + 4?'))).encode()
    status, _, head = post(served.url, body)
    assert (status, head['X-Stepwise-Handovers'], head['X-Stepwise-Last-Model']) == (200, '0', 'toy-1')

def test_the_end_of_a_stream_says_what_its_head_cannot_know(served):
    body = dict(model='mine', seed=0)
    for question in QUESTIONS[:12]:
        _, _, head = post(served.url, json.dumps(body | dict(messages=user(question))).encode())
        whole, chunks = served.ask(question), served.ask(question, stream=True)
        said = [c.stepwise_summary for c in chunks if getattr(c, 'stepwise_summary', None)]
        assert said == [chunks[-1].stepwise_summary] == [whole.stepwise_summary]
        assert said[0] == dict(handovers=int(head['X-Stepwise-Handovers']), last_model=head['X-Stepwise-Last-Model'])
    status, raw, head = post(served.url, json.dumps(body | dict(messages=user('?'), stream=True)).encode())
    assert status == 200 and not [name for name in head if name.startswith('X-Stepwise')]

def test_an_earlier_turn_without_content_is_taken(served):
    "openai-python gives an assistant's refusal back like this."
    turns = [*user('What is 3 + 4?'), dict(role='assistant', content=None, refusal='No.'), *user('And 3 + 5?')]
    assert served.ask(messages=turns).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match=r'messages\[0\].content should be a text'):
        served.ask(messages=[dict(role='user', content=None), *turns])

def test_models_alone_and_other_points(served):
    notes = {name: served.ask(QUESTIONS[3], model=name).stepwise for name in ('small', 'large', 'mine@alpha=0.1')}
    assert {s['model'] for s in notes['small']} == {'toy-0'} and {s['model'] for s in notes['large']} == {'toy-1'}
    # at threshold 0 the first step is handed over
    assert notes['mine@alpha=0.1'][0]['decision'] in ('reject', 'hand_over')
    asked = served.ask(QUESTIONS[3], extra_body=dict(stepwise=dict(alpha=.1)))
    assert asked.model == 'mine@alpha=0.1' and asked.stepwise[0]['decision'] == notes['mine@alpha=0.1'][0]['decision']
    prints = {served.ask(model=name).system_fingerprint for name in ('small', 'large', 'mine', 'mine@alpha=0.1')}
    assert len(prints) == 4

def test_seeds(served):
    same = [served.ask(seed=7).choices[0].message.content for _ in range(2)]
    others = {served.ask(seed=s).choices[0].message.content for s in range(8)}
    free = {served.ask(seed=None).choices[0].message.content for _ in range(8)}
    assert same[0] == same[1] and len(others) > 2 and len(free) > 2

@pytest.mark.parametrize('n', [40])
def test_many_at_once_are_what_they_are_alone(served, opened, n):
    want = [opened[0].route(q, sample=i) for i, q in enumerate(QUESTIONS[:n])]
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=served.url, api_key='x', max_retries=0) as c:
            async def one(i):
                options = dict(model='mine', messages=user(QUESTIONS[i]), seed=i)
                if i % 2: return (await c.chat.completions.create(**options)).choices[0].message.content
                return text([chunk async for chunk in await c.chat.completions.create(stream=True, **options)])
            return await asyncio.gather(*map(one, range(n)))
    assert run_async(all_at_once()) == [w.text for w in want]

def test_stop_strings(served, opened):
    for question in QUESTIONS[:12]:
        whole = opened[0].route(question).text
        for stop in (['+ 1'], '\n\n', ['never there'], ['x', '=', '. The', '\n']):
            want = min((whole[:i] for s in ([stop] if isinstance(stop, str) else stop) if (i := whole.find(s)) >= 0),
                       key=len, default=whole)
            reply = served.ask(question, stop=stop)
            assert reply.choices[0].message.content == want == text(served.ask(question, stop=stop, stream=True))
            if want != whole: assert reply.choices[0].finish_reason == 'stop'

@pytest.mark.parametrize('seed', range(30))
def test_a_stop_string_is_found_across_pieces(seed):
    r = random.Random(seed)
    pieces = [''.join(r.choice('ab') for _ in range(r.randint(0, 4))) for _ in range(6)]
    stops = [''.join(r.choice('ab') for _ in range(r.randint(1, 4))) for _ in range(r.randint(0, 3))]
    stop, shown, whole = StopText(stops), '', ''.join(pieces)
    for piece in pieces:
        if stop.has_ended: break
        shown += stop.feed(piece)
        assert (shown + stop.waiting).startswith(shown) and not any(s in shown for s in stops)
    shown += stop.rest()
    ends = [whole.find(s) for s in stops if s in whole]
    assert stop.has_ended == bool(ends)
    if not ends: assert shown == whole
    else: assert whole.startswith(shown) and len(shown) >= min(ends) - 0 and not any(s in shown for s in stops)
    if ends: assert stop.end == min(whole.find(s) + len(s) for s in stops if s in whole)
    alone = StopText(stops)
    assert alone.feed(whole) + alone.rest() == shown # the pieces do not matter

def test_log_probabilities_spell_the_answer(served):
    reply = served.ask(QUESTIONS[2], logprobs=True)
    shown = reply.choices[0].logprobs.content
    assert ''.join(t.token for t in shown) == reply.choices[0].message.content
    assert all(t.logprob <= 0 and bytes(t.bytes).decode() == t.token for t in shown)
    chunks = served.ask(QUESTIONS[2], logprobs=True, stream=True)
    assert [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content] == shown
    assert served.ask(QUESTIONS[2]).choices[0].logprobs is None

def test_an_answer_ends_at_its_limit(served):
    reply = served.ask(QUESTIONS[4], max_tokens=10_000, max_completion_tokens=1)
    whole = served.ask(QUESTIONS[4])
    assert reply.choices[0].finish_reason == 'length' and whole.choices[0].finish_reason in ('stop', 'length')
    assert reply.usage.completion_tokens < whole.usage.completion_tokens
    assert whole.choices[0].message.content.startswith(reply.choices[0].message.content)

def test_fields_that_say_nothing_are_taken(served):
    plain = served.ask().choices[0].message.content
    more = dict(user='me', metadata=dict(a='b'), store=False, service_tier='auto', n=1, frequency_penalty=0,
                presence_penalty=0., top_logprobs=0, temperature=None, tools=[], tool_choice='none', logit_bias={},
                response_format=dict(type='text'), modalities=['text'], prompt_cache_key='a', safety_identifier='b')
    assert served.ask(**more).choices[0].message.content == plain

def test_a_conversation_goes_on(served):
    first = served.ask().choices[0].message
    turns = [*user(QUESTIONS[0]), first.model_dump(), dict(role='user', content=[dict(type='text', text='And now?')])]
    with openai.OpenAI(base_url=served.url, api_key='x') as c:
        reply = c.chat.completions.create(model='mine', messages=turns, seed=1)
    assert reply.choices[0].message.content and reply.usage.prompt_tokens > 0

def test_metrics(opened):
    with Served(opened[0]) as served:
        replies = [served.ask(q) for q in QUESTIONS[:5]] + [served.ask(q, stream=True) for q in QUESTIONS[:5]]
        status, raw, _ = post(served.url.removesuffix('/v1'), None, '/metrics', 'GET')
        lines = raw.decode().splitlines()
        tokens = 2*sum(r.usage.completion_tokens for r in replies[:5])
        assert status == 200 and f'stepwise_routing_tokens_total{{kind="completion"}} {tokens}' in lines
        assert 'stepwise_routing_requests_total 10' in lines and 'stepwise_routing_first_step_seconds_count 10' in lines
        status, raw, _ = post(served.url.removesuffix('/v1'), None, '/health', 'GET')
        assert (status, json.loads(raw)) == (200, dict(status='ok'))

# ---- what is refused

LONG = [dict(role='user', content='x')] * 3
WRONG = [ # change of a request, the field that is named, a part of the line
    (dict(model=None), 'model', 'missing'), (dict(messages=None), 'messages', 'missing'),
    (dict(model=3), 'model', 'model'),
    (dict(model=''), 'model', 'no model'), (dict(model='mime'), 'model', "did you mean 'mine'?"),
    (dict(model='mine@alpha=0.07'), 'model', 'no model'), (dict(model=['mine']), 'model', 'model is'),
    (dict(messages='hi'), 'messages', 'list'), (dict(messages=[]), 'messages', 'list'),
    (dict(messages={}), 'messages', 'list'),
    (dict(messages=['hi']), 'messages[0]', 'a JSON object'), (dict(messages=[{}]), 'messages[0]', 'role is None'),
    (dict(messages=[dict(role='uzer', content='x')]), 'messages[0]', "did you mean 'user'?"),
    (dict(messages=[dict(role='user')]), 'messages[0]', 'content'),
    (dict(messages=[dict(role='user', content=3)]), 'messages[0]', 'content'),
    (dict(messages=[dict(role='user', content=[])]), 'messages', 'the last one'),
    (dict(messages=[dict(role='user', content=' \n')]), 'messages', 'the last one'),
    (dict(messages=[dict(role='user', content=[dict(type='image_url', image_url={})])]), 'messages[0]',
     'parts of type'),
    (dict(messages=[dict(role='user', content=[dict(type='text', text=3)])]), 'messages[0]', 'content'),
    (dict(messages=[dict(role='user', content=['x'])]), 'messages[0]', 'content'),
    (dict(messages=[*user('x'), dict(role='assistant', content='y')]), 'messages', 'the last one'),
    (dict(messages=[dict(role='tool', content='x', tool_call_id='1')]), 'messages[0]', 'role'),
    (dict(messages=[dict(role=['user'], content='x')]), 'messages[0]', 'role'),
    (dict(messages=[*user('x'), dict(role='assistant', content='', tool_calls=[{}]), *user('x')]), 'messages[1]',
        'tool_calls'),
    (dict(messages=[dict(role='user', content='a \ud800 b')]), 'messages[0]', 'half a character'),
    (dict(messages=[dict(role='user', content='x', **{'a\nb': 1})]), 'messages[0]', 'a b: routers do not support it'),
    ({'a\x1b\ud800': 1}, 'a  ', 'unknown field'),
    (dict(temperature=3), 'temperature', 'temperature is 3'),
    (dict(temperature=-1), 'temperature', 'temperature is -1'),
    (dict(temperature='1'), 'temperature', 'temperature is'), (dict(temperature=True), 'temperature', 'temperature is'),
    (dict(temperature=[1]), 'temperature', 'temperature is'), (dict(top_p=0), 'top_p', 'top_p is 0'),
    (dict(top_p=1.1), 'top_p', 'top_p is'), (dict(top_p={}), 'top_p', 'top_p is'), (dict(n=2), 'n', 'n is 2'),
    (dict(n=0), 'n', 'n is 0'), (dict(n='1'), 'n', 'n is'), (dict(max_tokens=0), 'max_tokens', 'max_tokens is 0'),
    (dict(max_tokens=1.5), 'max_tokens', 'max_tokens is'), (dict(max_tokens=-3), 'max_tokens', 'max_tokens is'),
    (dict(max_completion_tokens='x'), 'max_completion_tokens', 'max_completion_tokens is'),
    (dict(seed=1.5), 'seed', 'seed is'), (dict(seed='x'), 'seed', 'seed is'), (dict(seed=1 << 63), 'seed', 'seed is'),
    (dict(stream='yes'), 'stream', 'stream is'), (dict(stream=1), 'stream', 'stream is'),
    (dict(stream_options=dict(include_usage=True)), 'stream_options', 'stream=true'),
    (dict(stream=True, stream_options=3), 'stream_options', 'a JSON object'),
    (dict(stream=True, stream_options=dict(include_usag=True)), 'stream_options', "did you mean 'include_usage'?"),
    (dict(stream=True, stream_options=dict(include_usage=1)), 'stream_options.include_usage', 'include_usage is 1'),
    (dict(stop=3), 'stop', 'stop:'), (dict(stop=''), 'stop', 'stop:'), (dict(stop=['a', '']), 'stop', 'stop:'),
    (dict(stop=[*'abcde']), 'stop', 'up to 4'), (dict(stop=[3]), 'stop', 'stop:'), (dict(stop={}), 'stop', 'stop:'),
    (dict(logprobs=1), 'logprobs', 'logprobs is'), (dict(top_logprobs=21), 'top_logprobs', 'top_logprobs is'),
    (dict(logprobs=True, top_logprobs=2), 'top_logprobs', 'the drawn tokens only'),
    (dict(frequency_penalty=.5), 'frequency_penalty', 'frequency_penalty is'),
    (dict(presence_penalty=-1), 'presence_penalty', 'presence_penalty is'),
    (dict(tools=[{}]), 'tools', 'do not support'),
    (dict(tool_choice='auto'), 'tool_choice', 'do not support'), (dict(response_format=dict(type='json_object')),
    'response_format', 'do not support'), (dict(logit_bias={'1': 2}), 'logit_bias', 'do not support'),
    (dict(functions=[]), 'functions', 'do not support'), (dict(modalities=['audio']), 'modalities', 'do not support'),
    (dict(reasoning_effort='low'), 'reasoning_effort', 'do not support'),
    (dict(sede=1), 'sede', "did you mean 'seed'?"),
    (dict(max_token=1), 'max_token', "did you mean 'max_tokens'?"), (dict(zzz=1), 'zzz', 'unknown field'),
    (dict(stepwise=3), 'stepwise', 'a JSON object'),
    (dict(stepwise=dict(alpa=.1)), 'stepwise', "did you mean 'alpha'?"),
    (dict(stepwise=dict(alpha=.07)), 'stepwise.alpha', 'is calibrated for: 0.05, 0.1'),
    (dict(stepwise=dict(alpha=0)), 'stepwise.alpha', 'alpha is 0'),
    (dict(stepwise=dict(alpha='x')), 'stepwise.alpha', 'alpha is'),
    (dict(stepwise=dict(max_cents=-1)), 'stepwise.max_cents', 'max_cents is'),
    (dict(model='small', stepwise=dict(alpha=.05)), 'stepwise.alpha', 'none')]

@pytest.mark.parametrize('change, param, line', WRONG, ids=lambda x: str(x)[:40])
def test_a_wrong_field_is_named(served, change, param, line):
    body = {k: v for k, v in (dict(model='mine', messages=user('?')) | change).items() if v is not None}
    status, raw, _ = post(served.url, json.dumps(body).encode())
    error = json.loads(raw)['error']
    assert status == (404 if 'no model' in error['message'] else 400) and error['type'] == 'invalid_request_error'
    assert line in error['message'] and error['param'] == param and '\n' not in error['message'] and error['code']

@pytest.mark.parametrize('raw', [b'', b'{', b'[1]', b'null', b'3', b'"x"', b'[' * 9999, b'\xff\xfe', b'{"a": NaN}',
    b'{"model": "mine"}',
                                 b'{"model": "mine", "messages": [{"role": "user", "content": "\\ud800"}]}'],
                         ids=lambda raw: str(raw)[:20])
def test_junk_is_refused(served, raw):
    status, reply, _ = post(served.url, raw)
    assert status == 400 and json.loads(reply)['error']['message']

def test_a_number_that_is_too_long_is_not_called_another_thing(served):
    status, raw, _ = post(served.url, b'{"seed": %s}' % (b'1'*5000))
    assert status == 400 and 'a number of thousands of digits' in json.loads(raw)['error']['message']

@pytest.mark.parametrize('path, method, status', [
    ('/nothing', 'GET', 404), ('/chat/completions', 'GET', 405), ('/models', 'POST', 405), ('/embeddings', 'POST', 404),
    ('/models/none', 'GET', 404), ('/chat/completions/', 'POST', 404), ('/chat/completions', 'DELETE', 405)])
def test_other_addresses(served, path, method, status):
    got, raw, _ = post(served.url, b'{}' if method == 'POST' else None, path, method)
    assert got == status
    if status == 405: assert f'/v1{path} takes' in json.loads(raw)['error']['message']

def test_too_much_is_refused(served):
    body = json.dumps(dict(model='mine', messages=user('x' * 30_000))).encode()
    status, raw, _ = post(served.url, body)
    assert status == 413 and json.loads(raw)['error']['code'] == 'request_too_large'
    chunks = b''.join(b'%x\r\n%s\r\n' % (9000, b'x' * 9000) for _ in range(5)) + b'0\r\n\r\n'
    assert raw_exchange(served, b'Transfer-Encoding: chunked\r\n\r\n' + chunks).startswith(b'HTTP/1.1 413')
    assert b' 200 ' not in raw_exchange(served, b'X: ' + b'y' * 200_000 + b'\r\n\r\n')
    assert b' 200 ' not in raw_exchange(served, b'Content-Length: -5\r\n\r\n')
    assert b' 200 ' not in raw_exchange(served, b'Content-Length: 5\r\nContent-Length: 7\r\n\r\nhello')
    assert served.ask().choices

def raw_exchange(served, rest, seconds=10):
    "What is answered to bytes behind the first lines of a request; the connection may be cut."
    head = b'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n'
    with socket.create_connection(('127.0.0.1', served.port), timeout=seconds) as s:
        with contextlib.suppress(ConnectionError): s.sendall(head + rest)
        with contextlib.suppress(ConnectionError, TimeoutError): return s.recv(1 << 16)
    return b''

@pytest.mark.parametrize('head', [dict(Host='evil.example'), dict(Origin='http://evil.example'), dict(Origin='null'),
                                  dict(Host='127.0.0.1.evil.example'), dict(Host='')])
def test_a_web_page_is_refused(served, head):
    body = json.dumps(dict(model='mine', messages=user('?'))).encode()
    assert post(served.url, body, **head)[0] in (400, 403)
    assert post(served.url, body, Origin='http://localhost:8888')[0] == 200

def test_the_key(opened, monkeypatch, capfd):
    _, folder = opened
    monkeypatch.setenv(KEY_ENV, f'{KEY}\n') # as a file of it ends
    with serving(folder, PAIR) as url:
        body = json.dumps(dict(model='mine', messages=user('?'))).encode()
        for given in ({}, dict(Authorization='Bearer wrong'), dict(Authorization=KEY[:-1]),
            dict(Authorization='Basic ö')):
            head = {k: v.encode('latin-1').decode('latin-1') for k, v in given.items()}
            status, raw, _ = post(url, body, **head)
            assert status == 401 and KEY not in raw.decode()
        assert post(url, body, Authorization=f'Bearer {KEY}')[0] == 200
        assert post(url, None, '/models', 'GET')[0] == 401
        assert post(url.removesuffix('/v1'), None, '/metrics', 'GET')[0] == 401
        assert post(url.removesuffix('/v1'), None, '/health', 'GET')[0] == 200
    assert KEY not in ''.join(capfd.readouterr())

def test_another_address_takes_a_key(opened, monkeypatch):
    monkeypatch.delenv(KEY_ENV, raising=False)
    with pytest.raises(ValueError, match=f'can be reached from elsewhere: put a key.*{KEY_ENV}') as e:
        with serving(opened[1], PAIR, host='0.0.0.0'): pass
    assert '\n' not in str(e.value)
    with socket.create_server(('127.0.0.1', 0)) as s, pytest.raises(OSError, match='cannot be used') as e:
        with serving(opened[1], PAIR, port=s.getsockname()[1]): pass
    assert '\n' not in str(e.value)

# ---- clients and models that misbehave

class Slow(Adder):
    "Takes its time, and counts the calls that are under way."
    busy = 0
    delay = .1
    async def write(self, request):
        type(self).busy += 1
        try:
            await asyncio.sleep(self.delay)
            return await super().write(request)
        finally: type(self).busy -= 1

@contextlib.contextmanager
def other_models(router, *models):
    before, router.backends = router.backends, list(models)
    try: yield
    finally: router.backends = before

def test_steps_come_as_they_are_decided_and_pings_between(opened):
    with other_models(opened[0], Slow(0), Slow(1)), Served(opened[0], ping=.03) as served:
        body = json.dumps(dict(model='mine', stream=True, seed=0, messages=user(QUESTIONS[1]))).encode()
        asked = urllib.request.Request(f'{served.url}/chat/completions', body)
        with urllib.request.urlopen(asked, timeout=30) as reply:
            assert reply.headers['Content-Type'] == 'text/event-stream'
            lines = [(time.monotonic(), line) for line in reply]
    pings = [t for t, line in lines if line.startswith(b': ping')]
    data = [(t, line) for t, line in lines if line.startswith(b'data: ')]
    assert pings and data[-1][1].strip() == b'data: [DONE]' and pings[0] < data[0][0]
    steps = [t for t, line in data if b'"content"' in line][1:]
    assert len(steps) < 2 or steps[-1] - steps[0] > .05 * (len(steps) - 1)

def test_clients_that_hang_up_stop_the_models(opened):
    "Streams and whole answers, closed at random moments: nothing runs on, and the server answers the next one."
    with other_models(opened[0], Slow(0), Slow(1)), Served(opened[0]) as served:
        r = random.Random(0)
        def body(i): return dict(model='mine', stream=bool(i % 3), messages=user(QUESTIONS[i % 60]))
        async def all_of_them(): await asyncio.gather(*(hang_up(served, body(i), r.random()*.2) for i in range(100)))
        run_async(all_of_them())
        assert eventually(lambda: Slow.busy == 0)
        assert served.count('errors', reason='hung_up') > 20
        assert set(k[1][0][1] for k in served.metrics.counts if k[0] == 'errors') == {'hung_up'}
        Slow.delay = 0
        assert served.ask().choices and Slow.busy == 0
        Slow.delay = .1

def test_a_slow_reader_is_cut_off_and_hinders_nobody(opened):
    class Wordy(Adder):
        def _step(self, *args):
            step = super()._step(*args)
            return type(step)(**vars(step) | dict(text='x' * 500_000 + step.text, ends=(), prob=(), ids=()))
    router = opened[0]
    with other_models(router, Wordy(0, end=0, cut=0), Wordy(1, end=0, cut=0)), Served(router, patience=.5) as served:
        body = json.dumps(dict(model='large', stream=True, seed=0, messages=user(QUESTIONS[1]))).encode()
        head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n'
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.connect(('127.0.0.1', served.port))
            s.sendall(head.encode() + body)
            assert eventually(lambda: served.count('errors', reason='hung_up') == 1)
            assert post(served.url.removesuffix('/v1'), None, '/health', 'GET')[0] == 200

def test_a_slow_sender_is_cut_off(served):
    with socket.create_connection(('127.0.0.1', served.port), timeout=20) as s:
        s.sendall(b'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{')
        assert b' 200 ' not in s.recv(1 << 16) # it does not wait for ever
    with socket.create_connection(('127.0.0.1', served.port), timeout=20) as s:
        s.sendall(b'POST /v1')
        assert s.recv(1 << 16) == b''
    assert served.ask().choices

def test_a_model_that_dies(opened):
    "Before the first step there is a status, after it an event; the stream ends, and the next request is answered."
    class Dying(Adder):
        lives = 0
        async def write(self, request):
            Dying.lives -= 1
            if Dying.lives < 0: raise RuntimeError('the server is away')
            return await super().write(request)
    router = opened[0]
    with other_models(router, Dying(0, end=.01, cut=0), Dying(1, end=.01, cut=0)), Served(router) as served:
        for stream in (False, True):
            Dying.lives = 0
            with pytest.raises(openai.InternalServerError,
                match='RuntimeError: the server is away'): served.ask(stream=stream)
        for lives in (1, 2, 3):
            Dying.lives = lives
            body = json.dumps(dict(model='small', stream=True, seed=0, messages=user('What is 3 + 4?'))).encode()
            status, raw, _ = post(served.url, body)
            *_, last = [line for line in raw.decode().split('\n') if line.startswith('data: ')]
            assert status == 200 and 'the server is away' in json.loads(last[6:])['error']['message']
            Dying.lives = lives
            with pytest.raises(openai.APIError, match='is away'): served.ask(model='small', stream=True)
        Dying.lives = 10**6
        assert served.ask().choices

def test_too_many_at_once_wait_or_are_told_when_to_come_again(opened):
    with other_models(opened[0], Slow(0), Slow(1)), Served(opened[0], at_once=2, waiting=2) as served:
        async def all_at_once():
            async with openai.AsyncOpenAI(base_url=served.url, api_key='x', max_retries=0) as c:
                asked = [c.chat.completions.create(model='mine', messages=user(q), seed=0) for q in QUESTIONS[:12]]
                return await asyncio.gather(*asked, return_exceptions=True)
        got = run_async(all_at_once())
        refused = [e for e in got if isinstance(e, openai.RateLimitError)]
        assert len(refused) == 8 and {e.response.headers['retry-after'] for e in refused} == {'1'}
        assert sum(hasattr(reply, 'choices') for reply in got) == 4

def test_shut_down_under_load(opened):
    "Whoever is being answered gets an end or an error, new ones are refused, and it does not take for ever."
    with other_models(opened[0], Slow(0), Slow(1)):
        ends = []
        async def all_at_once(served):
            async def one(i):
                body = json.dumps(dict(model='mine', stream=True, seed=i, messages=user(QUESTIONS[i]))).encode()
                head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n'
                reader, writer = await asyncio.open_connection('127.0.0.1', served.port)
                writer.write(head.encode() + body)
                try: ends.append(await asyncio.wait_for(reader.read(), 30))
                finally: writer.close()
            tasks = [asyncio.ensure_future(one(i)) for i in range(20)]
            await asyncio.sleep(.25)
            await asyncio.to_thread(served.__exit__, None, None, None)
            await asyncio.gather(*tasks)
        run_async(all_at_once(Served(opened[0], grace=.1).__enter__()))
        told = [b'data: [DONE]' in end or b'being shut down' in end for end in ends]
        assert len(ends) == 20 and all(told) and Slow.busy == 0
        assert any(b'being shut down' in end for end in ends)

# ---- money

@contextlib.contextmanager
def paid(router, faults=(), delay=0., **options):
    "The router with a large model that is paid: (the server behind it, the book)."
    with Faulty(faults, delay=delay) as server, Bills() as book:
        large = OpenAIBackend('toy-model', 1, book, base_url=server.url, key_env='', price='gpt-4.1-mini', pause=.01,
                              timeout=5., **options)
        before = router.specs
        with other_models(router, Adder(0), large):
            router.specs = [backend.spec for backend in router.backends]
            try: yield server, book
            finally: router.specs = before

def test_usage_is_what_the_ledger_says(opened):
    with paid(opened[0]) as (server, book), Served(opened[0]) as served:
        dollars = 0.
        for i, question in enumerate(QUESTIONS[:30]):
            options = dict(stream=True, stream_options=dict(include_usage=True)) if i % 2 else {}
            if i % 5 == 0: options |= dict(stop=['So'])
            got = served.ask(question, seed=i // 3, **options)
            usage = got[-1].usage if i % 2 else got.usage
            dollars += usage.cost
        assert book.units == server.cents*CENT and dollars*100 == pytest.approx(float(server.cents)) and dollars > 0
        assert book.rows('reply') == [] and {key for _, key, *_ in book.rows('call')} <= {''}

def test_the_same_question_is_paid_each_time(opened):
    with paid(opened[0]) as (server, book), Served(opened[0]) as served:
        costs = [served.ask(QUESTIONS[0], model='large', seed=1).usage.cost for _ in range(3)]
        assert costs[0] == costs[1] == costs[2] > 0 and sum(costs)*100 == pytest.approx(float(server.cents))

def test_streams_closed_at_random_are_booked(opened):
    "What was asked of a paid model comes to its end and is booked; what waits for its turn is never asked."
    with paid(opened[0], delay=.1, concurrency=8) as (server, book), Served(opened[0]) as served:
        r = random.Random(1)
        def body(i): return dict(model='large', stream=True, messages=user(QUESTIONS[i % 60]))
        def ready(): return len(server.seen) > 8
        async def all_of_them():
            await asyncio.gather(*(hang_up(served, body(i), r.random()*.1, ready) for i in range(60)))
        run_async(all_of_them())
        assert eventually(lambda: not book.pending and not server.busy and not book.reserved)
        assert book.units == server.cents*CENT > 0 and len(server.seen) < 60 and not book.unwanted

@pytest.mark.parametrize('fault', ['500', 'reset', 'closed', 'malformed', 'no-choices', '429'])
def test_a_paid_model_that_fails_now_and_then(opened, fault):
    with paid(opened[0], faults=[fault, 'ok'] * 6, retries=3) as (server, book), Served(opened[0]) as served:
        replies = [served.ask(q, model='large', seed=1, stream=True) for q in QUESTIONS[:4]]
        assert all(text(chunks) for chunks in replies) and book.units >= server.cents*CENT

def test_the_cap_of_the_process(opened):
    with paid(opened[0]) as (server, book), Served(opened[0]) as served:
        book.allow(.02)
        with pytest.raises(openai.RateLimitError, match='cap reached') as e:
            for i in range(400): served.ask(QUESTIONS[i % 60], model='large', seed=i, max_tokens=40)
        assert e.value.body['code'] == 'insufficient_quota' and book.units <= .02*CENT

def test_routers_share_the_cap_of_the_process(opened):
    "Two paid routers, asked at once: together they stay below the cap, and each below its own."
    router = opened[0]
    other = OwnRouter([*router.backends], router.router.policy, router.own)
    def ask(served, i):
        with contextlib.suppress(openai.RateLimitError):
            return served.ask(QUESTIONS[i % 60], model='large', seed=i, max_tokens=40).usage.cost*100
        return 0.
    for together, each in ((.03, None), (.03, .02), (None, .02)):
        with paid(router) as (s, book), paid(other) as (s2, book2), Served(router) as a, Served(other) as b:
            set_caps([book, book2], together, each)
            costs = [ask(a, 0), ask(b, 1)] # each of them once: the rest may all go to the faster one
            with ThreadPoolExecutor(8) as pool:
                costs += pool.map(lambda i: ask((a, b)[i % 2], i), range(160))
            for one, server in ((book, s), (book2, s2)):
                assert one.units == server.cents*CENT > 0 and (each is None or one.units <= each*CENT)
            spent = book.units + book2.units
            assert sum(costs)*CENT <= spent*1.000001 and (together is None or spent <= together*CENT)
            assert book.purse is book2.purse and (together is None) == (book.purse is None)
            if together: assert book.purse.reserved == 0 and book.purse.left == book.purse.cap - spent
            with pytest.raises(openai.RateLimitError, match='cap reached'): # whoever is asked now hears why
                for i in range(160): a.ask(QUESTIONS[i % 60], model='large', seed=i, max_tokens=40)
    other.close()

def test_a_purse_waits_for_calls_under_way():
    purse = Purse('.001')
    async def two():
        await purse.take(purse.cap)
        second = asyncio.ensure_future(purse.take(purse.cap // 2))
        await asyncio.sleep(.1)
        assert not second.done()
        purse.settle(purse.cap, purse.cap // 2)
        await second
        purse.settle(purse.cap // 2, purse.cap // 2)
        with pytest.raises(RuntimeError, match='cap reached: 0.0010 of 0.0010 cents are spent'): await purse.take(2)
    run_async(two())

def test_two_processes_with_one_book(tmp_path):
    "The second one is refused in one line, and the first one goes on."
    code = 'import sys; from stepwise_routing.models.bills import Bills; Bills(sys.argv[1])'
    with Bills(tmp_path/'ledger.db', 1.) as book:
        done = subprocess.run([sys.executable, '-c', code, tmp_path/'ledger.db'], capture_output=True, text=True)
        said = 'ledger.db: a router that is open here or in another process books paid calls there'
        assert done.returncode and said in done.stderr.splitlines()[-1]
        call = asyncio.run_coroutine_threadsafe(book.reserve('', 5), book.loop).result(10)
        asyncio.run_coroutine_threadsafe(book.settle(call, 3), book.loop).result(10)
    with Bills(tmp_path/'ledger.db') as book: assert book.units == 3

def test_the_cap_of_a_request(opened):
    with paid(opened[0]) as (server, book), Served(opened[0]) as served:
        for cap in (0, .001, .004, .02, .1, 1e308):
            before = server.cents
            reply = served.ask(QUESTIONS[0], model='large', extra_body=dict(stepwise=dict(max_cents=cap)))
            assert float(server.cents - before) <= cap and reply.usage.cost*100 <= cap
            if cap == 0: assert reply.choices[0].finish_reason == 'length' and not reply.choices[0].message.content
        assert server.cents > 0

# ---- what is recorded

def test_recorded_traffic_and_drift(opened, tmp_path, capsys):
    router, folder = opened
    file = tmp_path/'seen.jsonl'
    likely = [row['question'] for row in map(json.loads, (folder/'problems.jsonl').read_text().splitlines())][:40]
    with serving(folder, PAIR, record=file) as url:
        with openai.OpenAI(base_url=url, api_key='x') as c:
            ask = lambda q: c.chat.completions.create(model='mine', messages=user(q), seed=0)
            with pytest.raises(FileNotFoundError, match='is not a file'): drift(folder, tmp_path/'none.jsonl', PAIR)
            replies = [ask(q) for q in likely]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r['question'] for r in rows] == likely and 'answer' not in rows[0]
    assert ['\n\n'.join(s['text'] for s in r['steps'] if s['text']) for r in rows] == [
        r.choices[0].message.content for r in replies]
    found = drift(folder, file, PAIR)
    assert found.recorded == 40 and found.stands and 'nothing speaks against' in capsys.readouterr().out
    for row in rows: row['scores'] = [.999 * (s < .5) for s in row['scores']] # the router sees another world
    file.write_text('\n'.join(map(json.dumps, rows)))
    assert drift(folder, file, PAIR).stands is False
    file.write_text('\n'.join(map(json.dumps, rows[:9])))
    assert drift(folder, file, PAIR).stands is None
    file.write_text('[1]')
    with pytest.raises(ValueError, match='row 1: not a row'): drift(folder, file, PAIR)

@pytest.mark.parametrize('stream', [False, True])
def test_an_answer_that_cannot_be_recorded_is_sent_and_paid_once(opened, tmp_path, capsys, stream):
    file = tmp_path/'seen.jsonl'
    with serving(opened[1], PAIR, record=file) as url, openai.OpenAI(base_url=url, api_key='x') as c:
        ask = lambda: c.chat.completions.create(model='mine', messages=user(QUESTIONS[0]), seed=0, stream=stream)
        file.unlink()
        file.mkdir() # from now on nothing can be written
        answer = ask()
        said = text(answer) if stream else answer.choices[0].message.content
        lines = post(url.removesuffix('/v1'), None, '/metrics', 'GET')[1].decode().splitlines()
    assert said == opened[0].route(QUESTIONS[0]).text
    assert capsys.readouterr().err == 'an answer was not recorded: Is a directory\n'
    assert {'stepwise_routing_requests_total 1', 'stepwise_routing_errors_total{reason="not_recorded"} 1'} <= {*lines}

@pytest.mark.parametrize('place', ['', 'missing/seen.jsonl'])
def test_a_file_that_cannot_be_written_is_refused_before_serving(opened, tmp_path, place):
    with pytest.raises(OSError, match='cannot be written .*: record answers in another file') as e:
        with serving(opened[1], PAIR, record=tmp_path/place): pass
    assert '\n' not in str(e.value)

def test_of_a_row_that_fills_the_disk_nothing_stays(tmp_path):
    import resource
    file = tmp_path/'seen.jsonl'
    recorder = Recorder(file)
    recorder.append(b'{"row": 1}\n')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
        with pytest.raises(OSError): recorder.append(b'{"row": 2, "text": "%s"}\n' % (b'x'*99))
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    recorder.append(b'{"row": 3}\n')
    assert file.read_text() == '{"row": 1}\n{"row": 3}\n'

@pytest.mark.parametrize('options, line', [
    (dict(port=99_999), 'port 99999 does not exist'), (dict(port=-1), 'port -1 does not exist'),
    (dict(max_cents=float('nan')), 'max_cents is nan: it should be'),
    (dict(max_cents=-1), 'max_cents is -1: it should'),
    (dict(max_cents_each=float('inf')), 'max_cents_each is inf: it should be'),
    (dict(key='pässwört'), f'{KEY_ENV} holds no'),
    (dict(folders=[]), 'no router to serve')], ids=str)
def test_what_no_server_can_have_is_one_line(opened, monkeypatch, options, line):
    monkeypatch.setenv(KEY_ENV, options.pop('key', ''))
    with pytest.raises(ValueError, match=line) as e, serving(options.pop('folders', opened[1]), PAIR, **options): pass
    assert '\n' not in str(e.value)

def test_two_folders_of_one_name(opened):
    with pytest.raises(ValueError, match="two routers are named 'mine'"), serving([opened[1]] * 2, PAIR): pass

# ---- the command

SERVER = '''
import sys
sys.path[:0] = {path!r}
import contextlib
from test_own import Adder, pair_module
@contextlib.contextmanager
def open_toys(names, **options): yield [Adder(i) for i in range(len(names))]
pair_module.open_models = open_toys
from stepwise_routing.run.cli import main
main(['serve', {folder!r}, '--models', 'toy-0', 'toy-1', '--port', '0'])
'''

@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(opened):
    code = SERVER.format(path=sys.path, folder=str(opened[1]))
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, '-c', code], **options) as server:
        url = server.stdout.readline().split()[-1]
        with openai.OpenAI(base_url=url, api_key='x') as c:
            reply = c.chat.completions.create(model='mine', messages=user(QUESTIONS[0]), seed=0)
        server.terminate()
        out, errors = server.communicate(timeout=60)
    assert reply.choices[0].message.content == opened[0].route(QUESTIONS[0]).text
    assert (server.returncode, out, errors) == (0, '', '')

def test_the_command_says_what_is_wrong(capsys):
    from stepwise_routing.run.cli import main
    for words, said in ((['serve'], 'FOLDER'), (['serve', 'x', '--models', 'a'], '--models'),
                        (['serve', 'nowhere', '--models', 'a', 'b', '--port', '0'], 'holds no router'),
                        (['serve', 'x', '--models', 'a', 'b', '--prot', '1'], "did you mean '--port'?")):
        with pytest.raises(SystemExit) as e: main(words)
        line = capsys.readouterr().err
        assert e.value.code == 2 and said in line and line.count('\n') == 1

# ---- the report

def test_a_report_says_what_the_router_costs(opened, tmp_path):
    router, folder = opened
    before = {p: p.read_bytes() for p in (folder/'policy').iterdir()}
    files = report(folder, tmp_path/'out', price='1/0.5/4')
    assert files == ['README.md', 'accuracy_cost.md', 'accuracy_cost.pdf', 'accuracy_cost.png']
    text = (tmp_path/'out'/'README.md').read_text()
    for part in ('# A router: toy-0', '| alpha |', '| 0.05 |', 'large model alone', 'write the step again', '1/0.5/4',
                 '`collect` draws no such chains'):
        assert part in text
    rows = cache_rows(own_table(folder, 'calibration'), router.router, '1/0.5/4')
    cents = [(float(r['all cached, cents']), float(r['cold, cents'])) for r in rows]
    assert all(0 < warm < cold for warm, cold in cents) and [r['hand-overs per problem'] for r in rows][0] == '-'
    same = cache_rows(own_table(folder, 'calibration'), router.router, '1/1/4')
    assert all(r['all cached, cents'] == r['cold, cents'] for r in same)
    assert {p: p.read_bytes() for p in (folder/'policy').iterdir()} == before
    report(folder, tmp_path/'plain')
    assert 'no price of the large model was given' in (tmp_path/'plain'/'README.md').read_text()
    with pytest.raises(ValueError, match='is not empty'): report(folder, tmp_path/'out')
    with pytest.raises(ValueError, match='price'): report(folder, tmp_path/'other', price='gtp')
