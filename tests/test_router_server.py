"A router behind the OpenAI protocol: a real server on a real port, and OpenAI's own client."
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

import pytest
from faulty import Faulty
from toy_models import toy_problems
from toy_own import PAIR, Adder

openai = pytest.importorskip('openai')
import stepwise_routing.models.web as web
from stepwise_routing.util import run_async
from stepwise_routing.method.walks import LargeOnly, SmallOnly
from stepwise_routing.models.answers import RouterService
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT, Ledger
from stepwise_routing.own import serving
from stepwise_routing.run.serve_command import serve_parser, with_options

QUESTIONS = [p.question for p in toy_problems(60, seed=9)]
KEY = 'sesame-street-123'

class Served:
    "A router's server, with what a test wants to look at."
    def __init__(self, router):
        self.service = RouterService(router, dict(small=SmallOnly(), large=LargeOnly(), mine=router.router))
    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.url = self.stack.enter_context(web.running(self.service))
        self.port = int(self.url.split(':')[2].split('/')[0])
        return self
    def __exit__(self, *exc): self.stack.close()
    def ask(self, question=QUESTIONS[0], **body):
        with openai.OpenAI(base_url=self.url, api_key='x', max_retries=0) as c:
            options = dict(model='mine', messages=user(question), seed=0) | body
            got = c.chat.completions.create(**options)
            return [*got] if body.get('stream') else got

@pytest.fixture(scope='module')
def served(opened):
    with Served(opened[0]) as served: yield served

def user(text): return [dict(role='user', content=text)]

def text(chunks): return ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)

def post(url, body, path='/chat/completions', method='POST', **head):
    "Status and body of the answer to a request that is sent as it is."
    asked = urllib.request.Request(url + path, body, head, method=method)
    try: reply = urllib.request.urlopen(asked, timeout=30)
    except urllib.error.HTTPError as e: reply = e
    with reply: return reply.status, reply.read()

async def hang_up(served, body, seconds):
    "Ask, wait a little, and be gone."
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection('127.0.0.1', served.port)
    head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n\r\n'
    writer.write(head.encode() + raw)
    with contextlib.suppress(asyncio.TimeoutError): await asyncio.wait_for(reader.read(), seconds)
    writer.transport.abort()

def eventually(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end: time.sleep(.02)
    return holds()

# ---- what is answered

def test_the_list_of_models_and_health(served):
    with openai.OpenAI(base_url=served.url, api_key='x') as c:
        assert [m.id for m in c.models.list().data] == ['small', 'large', 'mine']
    assert json.loads(post(served.url[:-3], None, '/health', 'GET')[1]) == dict(status='ok')

def test_streamed_is_whole_is_route(served, opened):
    router = opened[0]
    for question, want in zip(QUESTIONS[:25], router.route(QUESTIONS[:25])):
        whole = served.ask(question)
        chunks = served.ask(question, stream=True, stream_options=dict(include_usage=True))
        assert whole.choices[0].message.content == text(chunks) == want.text
        assert chunks[0].choices[0].delta.role == 'assistant' and not chunks[-1].choices
        assert chunks[-1].usage == whole.usage
        finish, = {c.choices[0].finish_reason for c in chunks if c.choices} - {None}
        assert finish == whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason
        assert whole.usage.completion_tokens == sum(want.tokens) == sum(s['tokens'] for s in whole.stepwise)
        thrown = sum(s['tokens'] for s in whole.stepwise if not s['kept'])
        assert whole.usage.completion_tokens_details.rejected_prediction_tokens == thrown
        assert [s['model'] for s in whole.stepwise if s['kept']] == list(want.models)
        assert [s for c in chunks for s in getattr(c, 'stepwise', None) or ()] == whole.stepwise
    assert all(c.choices for c in served.ask(stream=True))

def test_models_alone_and_seeds(served):
    for name, model in ('small', 'toy-0'), ('large', 'toy-1'):
        assert {s['model'] for s in served.ask(model=name).stepwise} == {model}
    same = {served.ask(seed=7).choices[0].message.content for _ in range(2)}
    free = {served.ask(seed=None).choices[0].message.content for _ in range(8)}
    assert len(same) == 1 and len(free) > 2

def test_the_last_message_is_the_question(served):
    want = served.ask(QUESTIONS[1]).choices[0].message.content
    for content in QUESTIONS[1], [dict(type='text', text=QUESTIONS[1])]:
        turns = [*user(QUESTIONS[0]), dict(role='assistant', content=None), dict(role='user', content=content)]
        reply = served.ask(messages=turns, temperature=.1, max_tokens=1, stop=['x'], user='me')
        assert reply.choices[0].message.content == want

def test_many_at_once_are_what_they_are_alone(served, opened):
    want = [opened[0].route(q, sample=i) for i, q in enumerate(QUESTIONS[:40])]
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=served.url, api_key='x', max_retries=0) as c:
            async def one(i):
                options = dict(model='mine', messages=user(QUESTIONS[i]), seed=i)
                if i % 2: return (await c.chat.completions.create(**options)).choices[0].message.content
                return text([chunk async for chunk in await c.chat.completions.create(stream=True, **options)])
            return await asyncio.gather(*map(one, range(40)))
    assert run_async(all_at_once()) == [w.text for w in want]

# ---- what is refused

WRONG = [ # change of a request, the field that is named
    (dict(model=None), 'model'), (dict(messages=None), 'messages'), (dict(messages=[]), 'messages'),
    (dict(model='mime'), 'model'), (dict(messages=user(' ')), 'messages'), (dict(stream='yes'), 'stream'),
    (dict(messages=[dict(role='user', content=[dict(type='image_url')])]), 'messages'), (dict(seed='x'), 'seed'),
    (dict(messages=[*user('x'), dict(role='assistant', content='y')]), 'messages')]

@pytest.mark.parametrize('change, param', WRONG, ids=str)
def test_a_wrong_field_is_named(served, change, param):
    body = {k: v for k, v in (dict(model='mine', messages=user('?')) | change).items() if v is not None}
    status, raw = post(served.url, json.dumps(body).encode())
    error = json.loads(raw)['error']
    assert status == (404 if param == 'model' and 'model' in body and change['model'] else 400)
    assert error['type'] == 'invalid_request_error' and error['param'].startswith(param) and error['code']
    assert error['message'] and '\n' not in error['message']

def test_junk_other_addresses_and_too_much_are_refused(served):
    for raw in b'', b'[1]', b'[' * 9999, b'\xff\xfe':
        status, reply = post(served.url, raw)
        assert status == 400 and json.loads(reply)['error']['message']
    for path, method in ('/nothing', 'GET'), ('/chat/completions', 'GET'), ('/models', 'POST'):
        assert post(served.url, b'{}' if method == 'POST' else None, path, method)[0] == 404
    with contextlib.suppress(OSError):
        assert post(served.url, b' ' * (web.BODY + 1))[0] == 400
    assert served.ask().choices

@pytest.mark.parametrize('head', [dict(Host='evil.example'), dict(Origin='http://evil.example'), dict(Origin='null')])
def test_a_web_page_is_refused(served, head):
    body = json.dumps(dict(model='mine', messages=user('?'))).encode()
    assert post(served.url, body, **head)[0] == 403
    assert post(served.url, body, Origin='http://localhost:8888')[0] == 200

def test_the_key(opened, monkeypatch, capfd):
    monkeypatch.setenv(web.KEY_ENV, f'{KEY}\n') # as a file of it ends
    with serving(opened[1], PAIR) as url:
        body = json.dumps(dict(model='mine', messages=user('?'))).encode()
        for given in {}, dict(Authorization='Bearer wrong'), dict(Authorization=KEY[:-1]):
            status, raw = post(url, body, **given)
            assert status == 401 and KEY not in raw.decode()
        assert post(url, body, Authorization=f'Bearer {KEY}')[0] == 200
        assert post(url, None, '/models', 'GET')[0] == 401
        assert post(url[:-3], None, '/health', 'GET')[0] == 200
    assert KEY not in ''.join(capfd.readouterr())

def test_another_address_takes_a_key(opened, monkeypatch):
    monkeypatch.delenv(web.KEY_ENV, raising=False)
    with pytest.raises(ValueError, match=f'can be reached from elsewhere: put a key.*{web.KEY_ENV}'):
        with serving(opened[1], PAIR, host='0.0.0.0'): pass
    with socket.create_server(('127.0.0.1', 0)) as s, pytest.raises(OSError, match='cannot be used'):
        with serving(opened[1], PAIR, port=s.getsockname()[1]): pass

def test_the_command_takes_an_option_for_both_models_or_one_for_each():
    words = serve_parser().parse_args(['mine', '--models', 'a', 'b', '--price', '1/1/1', 'free', '--key-env', 'KEY'])
    models, access = with_options(words.models, dict(price=words.price, key_env=words.key_env, base_url=None))
    assert [m.options for m in models] == [dict(price='1/1/1'), dict(price='free')] and access.key_env == 'KEY'
    with pytest.raises(ValueError, match='--price takes one value'): with_options(['a', 'b'], dict(price=[1, 2, 3]))

# ---- clients that go, models that fail

class Slow(Adder):
    "Takes its time, and counts the calls that are under way."
    busy = 0
    async def write(self, request):
        type(self).busy += 1
        try:
            await asyncio.sleep(.1)
            return await super().write(request)
        finally: type(self).busy -= 1

@contextlib.contextmanager
def other_models(router, *models):
    before, router.backends = router.backends, list(models)
    router.specs = [model.spec for model in models]
    try: yield
    finally: router.backends, router.specs = before, [model.spec for model in before]

def test_clients_that_hang_up_stop_the_models(opened):
    "Streams and whole answers, closed at random moments: nothing runs on, and the server answers the next one."
    with other_models(opened[0], Slow(0), Slow(1)), Served(opened[0]) as served:
        r = random.Random(0)
        def body(i): return dict(model='mine', stream=bool(i % 3), messages=user(QUESTIONS[i % 60]))
        async def all_of_them(): await asyncio.gather(*(hang_up(served, body(i), r.random()*.2) for i in range(100)))
        run_async(all_of_them())
        assert eventually(lambda: Slow.busy == 0)
        assert served.ask().choices and Slow.busy == 0

def test_a_model_that_dies(opened):
    "Before the first step there is a status, after it an event; the next request is answered."
    class Dying(Adder):
        lives = 0
        async def write(self, request):
            Dying.lives -= 1
            if Dying.lives < 0: raise RuntimeError('the server is away')
            return await super().write(request)
    router = opened[0]
    with other_models(router, Dying(0, end=.01, cut=0), Dying(1)), Served(router) as served:
        for stream in (False, True):
            Dying.lives = 0
            with pytest.raises(openai.InternalServerError, match='RuntimeError: the server is away'):
                served.ask(stream=stream)
        Dying.lives = 2
        with pytest.raises(openai.APIError, match='is away'): served.ask(model='small', stream=True)
        Dying.lives = 10**6
        assert served.ask().choices

def test_shut_down_under_load(opened, monkeypatch):
    "Whoever is being answered gets an end or an error, and it does not take for ever."
    monkeypatch.setattr(web, 'GRACE', .1)
    ends = []
    async def all_at_once(served):
        async def one(i):
            raw = json.dumps(dict(model='mine', stream=True, seed=i, messages=user(QUESTIONS[i]))).encode()
            reader, writer = await asyncio.open_connection('127.0.0.1', served.port)
            head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n\r\n'
            writer.write(head.encode() + raw)
            ends.append(await asyncio.wait_for(reader.read(), 30))
            writer.close()
        tasks = [asyncio.ensure_future(one(i)) for i in range(20)]
        await asyncio.sleep(.25)
        await asyncio.to_thread(served.__exit__, None, None, None)
        await asyncio.gather(*tasks)
    with other_models(opened[0], Slow(0), Slow(1)): run_async(all_at_once(Served(opened[0]).__enter__()))
    assert all(b'data: [DONE]' in end or b'being shut down' in end for end in ends) and Slow.busy == 0
    assert any(b'being shut down' in end for end in ends)

# ---- money

@contextlib.contextmanager
def paid(router, max_cents=None, **options):
    "The router with a large model that is paid: (the server behind it, the book)."
    with Faulty(**options) as server, Ledger(None, max_cents) as book:
        large = OpenAIBackend('toy-model', 1, book, base_url=server.url, key_env='', price='gpt-4.1-mini', timeout=5.)
        with other_models(router, Adder(0), large): yield server, book

def test_usage_is_what_the_ledger_says(opened):
    with paid(opened[0]) as (server, book), Served(opened[0]) as served:
        dollars = 0.
        for i, question in enumerate(QUESTIONS[:30]):
            options = dict(stream=True, stream_options=dict(include_usage=True)) if i % 2 else {}
            got = served.ask(question, **options)
            dollars += (got[-1].usage if i % 2 else got.usage).cost
        assert book.units == server.cents*CENT and dollars*100 == pytest.approx(float(server.cents)) and dollars > 0

def test_streams_closed_at_random_are_booked(opened):
    "What was asked of a paid model comes to its end and is booked."
    with paid(opened[0], delay=.1) as (server, book), Served(opened[0]) as served:
        r = random.Random(1)
        def body(i): return dict(model='large', stream=True, messages=user(QUESTIONS[i % 60]))
        async def all_of_them(): await asyncio.gather(*(hang_up(served, body(i), r.random()*.2) for i in range(60)))
        run_async(all_of_them())
        assert eventually(lambda: not book.pending and not server.busy and not book.reserved)
        assert book.units == server.cents*CENT > 0

def test_the_cap_of_the_folder(opened):
    with paid(opened[0], max_cents=.02) as (server, book), Served(opened[0]) as served:
        with pytest.raises(openai.RateLimitError, match='cap reached') as e:
            for i in range(400): served.ask(QUESTIONS[i % 60], model='large', seed=i)
        assert e.value.body['code'] == 'insufficient_quota' and book.units <= .02*CENT

# ---- the command

SERVER = '''
import sys
sys.path[:0] = {path!r}
from toy_own import open_toys, pair_module
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
