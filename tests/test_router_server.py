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
from micro_router import with_threshold
from toy_models import toy_problems
from toy_own import PAIR, Adder

openai = pytest.importorskip('openai')
import stepwise_routing.models.web as web
from stepwise_routing.models.answers import RouterService
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT, Ledger
from stepwise_routing.own import min_prob, serving
from stepwise_routing.util import run_async

QUESTIONS = [p.question for p in toy_problems(60, seed=9)]
KEY = 'sesame-street-123'


class Served:
    "A router's server, and what a test wants to look at."

    def __init__(self, router):
        names = dict(small='small', large='large', mine='router')
        self.service = RouterService(router, names)

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.url = self.stack.enter_context(web.running(self.service))
        self.port = int(self.url.split(':')[2].split('/')[0])
        return self

    def __exit__(self, *exc):
        self.stack.close()

    def ask(self, question=QUESTIONS[0], **body):
        options = dict(model='mine', messages=user(question), seed=0) | body
        with openai.OpenAI(base_url=self.url, api_key='x', max_retries=0) as client:
            got = client.chat.completions.create(**options)
            return [*got] if body.get('stream') else got


def user(text):
    return [dict(role='user', content=text)]


def toy_router(*backends, reading='rewrite'):
    return with_threshold(min_prob, list(backends), -0.5, reading=reading)


@pytest.fixture(scope='module')
def router():
    with toy_router(Adder(0), Adder(1)) as router:
        yield router


@pytest.fixture(scope='module')
def served(router):
    with Served(router) as served:
        yield served


def text(chunks):
    return ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)


def post(url, body, path='/chat/completions', method='POST', **head):
    "Status and body of the answer to a request that is sent as it is."
    asked = urllib.request.Request(url + path, body, head, method=method)
    try:
        reply = urllib.request.urlopen(asked, timeout=30)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        return reply.status, reply.read()


async def raw_post(port, **body):
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    head = f'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(raw)}\r\n\r\n'
    writer.write(head.encode() + raw)
    return reader, writer


async def hang_up(served, seconds, **body):
    "Ask, wait a little, and be gone."
    reader, writer = await raw_post(served.port, **body)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(reader.read(), seconds)
    writer.transport.abort()


def eventually(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


# ---- what is answered


def test_streamed_is_whole_is_route(served, router):
    "Also: usage counts the tokens of all steps, and the notes say who wrote which, and what was thrown away."
    all_thrown = 0
    for question, want in zip(QUESTIONS[:25], router.route(QUESTIONS[:25])):
        whole = served.ask(question)
        chunks = served.ask(question, stream=True, stream_options=dict(include_usage=True))
        assert whole.choices[0].message.content == text(chunks) == want.text
        assert chunks[0].choices[0].delta.role == 'assistant' and not chunks[-1].choices
        assert chunks[-1].usage == whole.usage
        (finish,) = {c.choices[0].finish_reason for c in chunks if c.choices} - {None}
        assert finish == whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason
        notes = whole.stepwise
        assert [n for c in chunks for n in getattr(c, 'stepwise', None) or ()] == notes
        assert whole.usage.completion_tokens == sum(want.tokens) == sum(n['tokens'] for n in notes)
        thrown = sum(n['tokens'] for n in notes if not n['kept'])
        assert whole.usage.completion_tokens_details.rejected_prediction_tokens == thrown
        assert [n['model'] for n in notes if n['kept']] == list(want.models)
        all_thrown += thrown
    assert all_thrown > 0 and all(c.choices for c in served.ask(stream=True))


def test_names_seeds_and_health(served):
    with openai.OpenAI(base_url=served.url, api_key='x') as client:
        assert [m.id for m in client.models.list().data] == ['small', 'large', 'mine']
    assert json.loads(post(served.url[:-3], None, '/health', 'GET')[1]) == dict(status='ok')
    for name, model in (('small', 'toy-0'), ('large', 'toy-1')):
        assert {note['model'] for note in served.ask(model=name).stepwise} == {model}
    same = {served.ask(seed=7).choices[0].message.content for _ in range(2)}
    free = {served.ask(seed=None).choices[0].message.content for _ in range(8)}
    assert len(same) == 1 and len(free) > 2


def test_the_last_message_is_the_question(served):
    want = served.ask(QUESTIONS[1]).choices[0].message.content
    for content in (QUESTIONS[1], [dict(type='text', text=QUESTIONS[1])]):
        turns = [dict(role='assistant', content=None), dict(role='user', content=content)]
        reply = served.ask(messages=[*user(QUESTIONS[0]), *turns], temperature=0.1, stop=['x'])
        assert reply.choices[0].message.content == want


def test_many_at_once_are_what_they_are_alone(served, router):
    want = [router.route(q, sample=i).text for i, q in enumerate(QUESTIONS[:40])]

    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=served.url, api_key='x', max_retries=0) as client:

            async def one(i):
                ask = dict(model='mine', messages=user(QUESTIONS[i]), seed=i)
                if i % 2:
                    return (await client.chat.completions.create(**ask)).choices[0].message.content
                stream = await client.chat.completions.create(stream=True, **ask)
                return text([chunk async for chunk in stream])

            return await asyncio.gather(*map(one, range(40)))

    assert run_async(all_at_once()) == want


# ---- what is refused


@pytest.mark.parametrize(
    'change, param',
    [
        (dict(model=None), 'model'),
        (dict(model='mime'), 'model'),
        (dict(messages=[]), 'messages'),
        (dict(messages=user(' ')), 'messages'),
        (dict(messages=[dict(role='user', content=[dict(type='image_url')])]), 'messages'),
        (dict(messages=[*user('x'), dict(role='assistant', content='y')]), 'messages'),
        (dict(stream='yes'), 'stream'),
        (dict(seed='x'), 'seed'),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(served, change, param):
    body = dict(model='mine', messages=user('?')) | change
    body = {name: value for name, value in body.items() if value is not None}
    status, raw = post(served.url, json.dumps(body).encode())
    error = json.loads(raw)['error']
    assert status == (404 if change == dict(model='mime') else 400)
    assert error['type'] == 'invalid_request_error' and error['param'].startswith(param)
    assert error['message'] and '\n' not in error['message']


def test_junk_other_addresses_and_web_pages_are_refused(served):
    for raw in (b'', b'[1]', b'[' * 9999, b'\xff\xfe'):
        status, reply = post(served.url, raw)
        assert status == 400 and json.loads(reply)['error']['message']
    for path, method in (('/nothing', 'GET'), ('/chat/completions', 'GET'), ('/models', 'POST')):
        assert post(served.url, b'{}' if method == 'POST' else None, path, method)[0] == 404
    with contextlib.suppress(OSError):
        assert post(served.url, b' ' * (web.BODY + 1))[0] == 400
    body = json.dumps(dict(model='mine', messages=user('?'))).encode()
    for head in (
        dict(Host='evil.example'),
        dict(Origin='http://evil.example'),
        dict(Origin='null'),
    ):
        assert post(served.url, body, **head)[0] == 403
    assert post(served.url, body, Origin='http://localhost:8888')[0] == 200


def test_the_key(opened, monkeypatch, capfd):
    monkeypatch.setenv(web.KEY_ENV, f'{KEY}\n')  # as a file of it ends
    with serving(opened[1], PAIR) as url:
        body = json.dumps(dict(model='mine', messages=user('?'))).encode()
        for given in ({}, dict(Authorization='Bearer wrong'), dict(Authorization=KEY[:-1])):
            status, raw = post(url, body, **given)
            assert status == 401 and KEY not in raw.decode()
        assert post(url, body, Authorization=f'Bearer {KEY}')[0] == 200
        assert post(url, None, '/models', 'GET')[0] == 401
        assert post(url[:-3], None, '/health', 'GET')[0] == 200
    assert KEY not in ''.join(capfd.readouterr())


def test_another_address_takes_a_key(opened, monkeypatch):
    monkeypatch.delenv(web.KEY_ENV, raising=False)
    with pytest.raises(ValueError, match=f'can be reached from elsewhere: .*{web.KEY_ENV}'):
        with serving(opened[1], PAIR, host='0.0.0.0'):
            pass
    with socket.create_server(('127.0.0.1', 0)) as taken:
        with pytest.raises(OSError, match='cannot be used'):
            with serving(opened[1], PAIR, port=taken.getsockname()[1]):
                pass


# ---- clients that go, models that fail


class Slow(Adder):
    "Takes its time, and counts the calls that are under way."

    busy, seen = 0, set()

    async def write(self, request):
        Slow.busy += 1
        Slow.seen.add(request.problem.question)
        try:
            await asyncio.sleep(0.1)
            return await super().write(request)
        finally:
            Slow.busy -= 1


def test_clients_that_hang_up_stop_the_models():
    "Streams and whole answers, closed at random moments: nothing runs on, and the next one is answered."
    with toy_router(Slow(0), Slow(1)) as router, Served(router) as served:
        r = random.Random(0)

        async def all_of_them():
            bodies = [
                dict(stream=bool(i % 3), messages=user(QUESTIONS[i % 60])) for i in range(100)
            ]
            gone = [hang_up(served, r.random() * 0.2, model='mine', **body) for body in bodies]
            await asyncio.gather(*gone)

        run_async(all_of_them())
        assert eventually(lambda: Slow.busy == 0)
        assert served.ask().choices and Slow.busy == 0


def test_a_model_that_dies():
    "Before the first step there is a status, after it an event; the next request is answered."

    class Dying(Adder):
        lives = 0
        step_by_step = True

        async def write(self, request):
            Dying.lives -= 1
            if Dying.lives < 0:
                raise RuntimeError('the server is away')
            return await super().write(request)

    with toy_router(Dying(0, end=0.01, cut=0), Dying(1)) as router, Served(router) as served:
        for stream in (False, True):
            Dying.lives = 0
            with pytest.raises(
                openai.InternalServerError, match='RuntimeError: the server is away'
            ):
                served.ask(stream=stream)
        Dying.lives = 2
        with pytest.raises(openai.APIError, match='is away'):
            served.ask(model='small', stream=True)
        Dying.lives = 10**6
        assert served.ask().choices


def test_shut_down_under_load(monkeypatch):
    "Whoever is being answered gets an end or an error, and it does not take for ever."
    monkeypatch.setattr(web, 'GRACE', 0.1)
    Slow.seen.clear()
    ends = []

    async def all_at_once(served):
        async def one(i):
            body = dict(model='mine', stream=True, seed=i, messages=user(QUESTIONS[i]))
            reader, writer = await raw_post(served.port, **body)
            ends.append(await asyncio.wait_for(reader.read(), 30))
            writer.close()

        tasks = [asyncio.ensure_future(one(i)) for i in range(20)]
        while not Slow.seen >= set(QUESTIONS[:20]):  # all are being answered
            await asyncio.sleep(0.01)
        await asyncio.to_thread(served.__exit__)
        await asyncio.gather(*tasks)

    with toy_router(Slow(0, end=0.05, cut=0), Slow(1)) as router:
        run_async(all_at_once(Served(router).__enter__()))
    assert all(b'data: [DONE]' in end or b'being shut down' in end for end in ends)
    assert any(b'being shut down' in end for end in ends) and Slow.busy == 0


# ---- money


@contextlib.contextmanager
def paid(max_cents=None, **options):
    "A router with a large model that is paid: (its server, the server behind it, the book)."
    with Faulty(**options) as server, Ledger(None, max_cents) as book:
        address = dict(base_url=server.url, key_env='', price='gpt-4.1-mini', timeout=5.0)
        large = OpenAIBackend('toy-model', 1, book, **address)
        with toy_router(Adder(0), large) as router, Served(router) as served:
            yield served, server, book


def test_usage_is_what_the_ledger_says():
    with paid() as (served, server, book):
        dollars = 0.0
        for i, question in enumerate(QUESTIONS[:30]):
            options = dict(stream=True, stream_options=dict(include_usage=True)) if i % 2 else {}
            got = served.ask(question, **options)
            dollars += (got[-1].usage if i % 2 else got.usage).cost
        assert book.units == server.cents * CENT > 0
        assert dollars * 100 == pytest.approx(float(server.cents))


def test_streams_closed_at_random_are_booked():
    "What was asked of a paid model comes to its end and is booked."
    with paid(delay=0.1) as (served, server, book):
        r = random.Random(1)

        async def all_of_them():
            bodies = [dict(stream=True, messages=user(QUESTIONS[i])) for i in range(60)]
            gone = [hang_up(served, r.random() * 0.2, model='large', **body) for body in bodies]
            await asyncio.gather(*gone)

        run_async(all_of_them())
        assert eventually(lambda: not book.pending and not server.busy and not book.reserved)
        assert book.units == server.cents * CENT > 0


def test_the_cap():
    with paid(max_cents=0.4) as (served, server, book):
        with pytest.raises(openai.RateLimitError, match='cap reached') as error:
            for i in range(400):
                served.ask(QUESTIONS[i % 60], model='large', seed=i)
        assert error.value.body['code'] == 'insufficient_quota' and 0 < book.units <= 0.4 * CENT


# ---- the command

SERVER = """
import sys
sys.path[:0] = {path!r}
from toy_own import open_toys, pair_module
pair_module.open_models = open_toys
from stepwise_routing.run.cli import main
main(['serve', {folder!r}, '--models', 'toy-0', 'toy-1', '--port', '0'])
"""


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(opened):
    code = SERVER.format(path=sys.path, folder=str(opened[1]))
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, '-c', code], **options) as server:
        url = server.stdout.readline().split()[-1]
        with openai.OpenAI(base_url=url, api_key='x') as client:
            ask = dict(model='mine', messages=user(QUESTIONS[0]), seed=0)
            reply = client.chat.completions.create(**ask)
        server.terminate()
        out, errors = server.communicate(timeout=60)
    assert reply.choices[0].message.content == opened[0].route(QUESTIONS[0]).text
    assert (server.returncode, out, errors) == (0, '', '')
