"A router behind the OpenAI protocol: a real server on a real port, and OpenAI's own client."

import asyncio
import contextlib
import gc
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref

import openai
import pytest
from toy_models import ToyModel, toy_models, toy_problems
from toy_own import with_threshold

from stepwise_routing import serve
from stepwise_routing.own import serving

QUESTIONS = [problem.question for problem in toy_problems(40, seed=9)]
NAMES = dict(mine='router', small='small', large='large')
KEY = 'sesame-street-123'


def toy_router(*models, reading='rewrite'):
    return with_threshold(models, -0.7, reading=reading)


@contextlib.contextmanager
def client_of(router):
    with serve.running(serve.Service(router, NAMES)) as url:
        with openai.OpenAI(base_url=url, api_key='x', max_retries=0) as client:
            yield client


@pytest.fixture(scope='module')
def router():
    return toy_router(*toy_models(prices=(None, '0.4/0.1/1.6')))


@pytest.fixture(scope='module')
def client(router):
    with client_of(router) as client:
        yield client


def user(text):
    return [dict(role='user', content=text)]


def ask(client, question=QUESTIONS[0], **body):
    body = dict(model='mine', messages=user(question), seed=0) | body
    return client.chat.completions.create(**body)


def text(chunks):
    return ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)


def stats_of(client):
    return json.loads(post(client, None, '../stats')[1])


def post(client, body, path='chat/completions', **head):
    "Status and body of the answer to a request that is sent as it is; without a body, GET."
    head = {'content-type': 'application/json'} | head
    asked = urllib.request.Request(f'{client.base_url}{path}'.replace('v1/../', ''), body, head)
    try:
        reply = urllib.request.urlopen(asked, timeout=30)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        return reply.status, reply.read()


# ---- what is answered


@pytest.mark.parametrize('reading', ['continue', 'rewrite'])
@pytest.mark.parametrize('seeded', [True, False])
def test_streamed_is_whole_is_route(reading, seeded):
    "Usage is what the models wrote, and the notes say who wrote which step, and what was thrown away."
    models = toy_models(has_step_seeds=seeded)
    router, all_thrown = toy_router(*models, reading=reading), 0
    with client_of(router) as client:
        for question, want in zip(QUESTIONS[:25], router.route(QUESTIONS[:25])):
            for model in models:
                model.written.clear()
            whole = ask(client, question)
            assert sum(len(model.written) for model in models) == len(whole.stepwise)
            options = dict(stream=True, stream_options=dict(include_usage=True))
            chunks = [*ask(client, question, **options)]
            assert whole.choices[0].message.content == text(chunks) == want.text
            assert chunks[0].choices[0].delta.role == 'assistant' and not chunks[-1].choices
            assert chunks[-1].usage == whole.usage
            (finish,) = {c.choices[0].finish_reason for c in chunks if c.choices} - {None}
            assert finish == whole.choices[0].finish_reason
            assert (finish == 'stop') == (want.answer is not None)
            notes = whole.stepwise
            assert [n for c in chunks for n in getattr(c, 'stepwise', None) or ()] == notes
            thrown = [note for note in notes if not note['kept']]
            assert [note['model'] for note in notes if note['kept']] == list(want.models)
            assert {note['model'] for note in thrown} <= {'toy-0'}
            usage, tokens = whole.usage, sum(note['tokens'] for note in notes)
            assert usage.completion_tokens == sum(want.tokens) == tokens
            thrown = sum(note['tokens'] for note in thrown)
            assert usage.completion_tokens_details.rejected_prediction_tokens == thrown
            all_thrown += thrown
        assert all_thrown > 0 and all(chunk.choices for chunk in ask(client, stream=True))


def test_names_seeds_turns_and_the_bill(client, router):
    assert [model.id for model in client.models.list()] == [*NAMES]
    assert post(client, None, '../health') == (200, b'{"status":"ok"}')
    before = stats_of(client)
    for name, model in (('small', 'toy-0'), ('large', 'toy-1')):
        reply = ask(client, model=name)
        assert {note['model'] for note in reply.stepwise} == {model}
        before['tokens'][model] += reply.usage.completion_tokens
    after = stats_of(client)
    prompt, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
    cached = prompt // 3
    cents = ((prompt - cached) * 0.4 + cached * 0.1 + written * 1.6) / 1e4
    assert cents == pytest.approx(100 * reply.usage.cost)
    assert after.pop('cents') == pytest.approx(before.pop('cents') + cents)
    assert after == before | dict(requests=before['requests'] + 2, open=0)

    same = {ask(client, seed=7).choices[0].message.content for _ in range(2)}
    assert same == {router.route(QUESTIONS[0], sample=7).text}
    assert len({ask(client, seed=None).choices[0].message.content for _ in range(8)}) > 2
    turns = [*user(QUESTIONS[1]), dict(role='assistant', content='7')]
    last = user([dict(type='text', text=QUESTIONS[0])])
    reply = ask(client, messages=turns + last, temperature=0.1, stop=['x'])
    assert reply.choices[0].message.content == router.route(QUESTIONS[0]).text


def test_many_at_once_are_what_they_are_alone(client, router):
    "Streams and whole answers; models get lists."
    want = [router.route(question, sample=i).text for i, question in enumerate(QUESTIONS)]
    sizes, write = [], router.models[0].write
    router.models[0].write = lambda requests: sizes.append(len(requests)) or write(requests)

    async def all_at_once():
        url = str(client.base_url)
        async with openai.AsyncOpenAI(base_url=url, api_key='x', max_retries=0) as many:

            async def one(i):
                body = dict(model='mine', messages=user(QUESTIONS[i]), seed=i)
                if i % 2:
                    return (await many.chat.completions.create(**body)).choices[0].message.content
                stream = await many.chat.completions.create(stream=True, **body)
                return text([chunk async for chunk in stream])

            return await asyncio.gather(*map(one, range(len(QUESTIONS))))

    assert asyncio.run(all_at_once()) == want
    router.models[0].write = write
    assert max(sizes) > 4


# ---- what is refused


PICTURE = dict(role='user', content=[dict(type='image_url', image_url=dict(url='x'))])


@pytest.mark.parametrize(
    'change, status, word',
    [
        (dict(model=None), 400, 'model'),
        (dict(model='mime'), 404, "no model 'mime' here; there are: mine"),
        (dict(messages=None), 400, 'messages'),
        (dict(messages=[]), 400, 'messages'),
        (dict(messages=user(' ')), 400, 'messages'),
        (dict(messages=[PICTURE]), 400, 'messages'),
        (dict(messages=[*user('x'), dict(role='assistant', content='y')]), 400, 'messages'),
        (dict(stream='maybe'), 400, 'stream'),
        (dict(seed='x'), 400, 'seed'),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(client, change, status, word):
    body = dict(model='mine', messages=user('?')) | change
    body = {name: value for name, value in body.items() if value is not None}
    got, raw = post(client, json.dumps(body).encode())
    error = json.loads(raw)['error']
    assert got == status and error['type'] == 'invalid_request_error'
    assert word in error['message'] and '\n' not in error['message']


def test_junk_long_requests_and_web_pages_are_refused(client):
    for raw in (b'', b'[1]', b'[' * 9999, b'\xff\xfe'):
        status, reply = post(client, raw)
        assert status == 400 and json.loads(reply)['error']['message']
    body = json.dumps(dict(model='mine', messages=user('?'))).encode()
    for kind in ('text/plain', 'application/x-www-form-urlencoded', ''):
        assert post(client, body, **{'content-type': kind})[0] == 415
    assert post(client, body, **{'content-type': 'application/json; charset=utf-8'})[0] == 200
    assert post(client, body + b' ' * (2 << 20))[0] == 413
    assert post(client, body, host='a-page.example')[0] == 403  # its name may lead to this machine
    assert post(client, body)[0] == 200


def test_the_key(opened, monkeypatch, capfd):
    router, folder = opened
    monkeypatch.setenv(serve.KEY_ENV, f'{KEY}\n')  # as a file of it ends
    with serving(folder, router.models, host='0.0.0.0') as url:
        url = url.replace('0.0.0.0', '127.0.0.1')
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            want = router.route(QUESTIONS[0]).text
            assert ask(client).choices[0].message.content == want
            assert len([*client.models.list()]) == 3
        for given in ({}, dict(Authorization='Bearer wrong'), dict(Authorization=KEY[:-1])):
            for path, body in (('chat/completions', b'{}'), ('models', None), ('../stats', None)):
                status, raw = post(client, body, path, **given)
                assert status == 401 and KEY not in raw.decode()
        assert post(client, None, '../health')[0] == 200
    assert KEY not in ''.join(capfd.readouterr())


def test_another_address_takes_a_key_and_a_taken_port_is_an_error(router, monkeypatch):
    def start(**options):
        with serve.running(serve.Service(router, NAMES), **options):
            pass

    for key in ('', ' \n'):
        monkeypatch.setenv(serve.KEY_ENV, key)
        for host in ('0.0.0.0', '192.168.1.2', 'example.org', '::'):
            with pytest.raises(ValueError, match=f'reached from elsewhere: .*{serve.KEY_ENV}'):
                start(host=host)
    with socket.create_server(('127.0.0.1', 0)) as taken:
        with pytest.raises(OSError, match='in use'):
            start(port=taken.getsockname()[1])


# ---- clients that go, models that fail


class Slow(ToyModel):
    def write(self, requests):
        time.sleep(0.05)
        return super().write(requests)


@pytest.mark.parametrize('stream', [True, False])
def test_a_client_that_goes_ends_its_walk(stream):
    "Within a step. A stream has its first step long before the last one is drawn."
    models = Slow(0, end=0, cut=0), Slow(1, end=0, cut=0)
    with client_of(toy_router(*models)) as client:
        if stream:
            with ask(client, model='large', stream=True) as chunks:
                next(chunk for chunk in chunks if chunk.choices[0].delta.content)
                assert stats_of(client)['open'] == 1
        else:
            with pytest.raises(openai.APITimeoutError):
                ask(client.with_options(timeout=0.4), model='large')
        while stats_of(client)['open']:
            time.sleep(0.02)
        time.sleep(0.2)
        written = len(models[1].written)
        assert 0 < written < 30 and ask(client, model='small').choices
        assert len(models[1].written) == written


class Dying(ToyModel):
    lives, error = 0, None

    def write(self, requests):
        Dying.lives -= 1
        if Dying.lives < 0:
            raise Dying.error
        return super().write(requests)


@pytest.mark.parametrize('error', [RuntimeError('the server is away'), OSError('disk full')])
def test_an_error_of_a_model_is_told_and_the_next_request_is_answered(error):
    "As a status where an answer is whole, as an event where it is streamed."
    Dying.error, said = error, 'the server is away|OSError in toy-0'
    with client_of(toy_router(Dying(0, end=0, cut=0), ToyModel(1))) as client:
        for Dying.lives in (0, 2):
            with pytest.raises(openai.InternalServerError, match=said) as caught:
                ask(client, model='small')
            assert caught.value.status_code == 503
        for Dying.lives in (0, 2):
            with pytest.raises(openai.APIError, match=said):
                [*ask(client, model='small', stream=True)]
        Dying.lives = 10**6
        assert ask(client).choices and stats_of(client)['open'] == 0


def test_a_server_that_has_ended_holds_no_model():
    router = toy_router(*toy_models())
    model = weakref.ref(router.models[0])
    with client_of(router) as client:
        ask(client)
    del router
    end = time.monotonic() + 10
    while model() and time.monotonic() < end:
        gc.collect()
    assert model() is None


# ---- the command

SERVER = """
import sys
sys.path[:0] = {path!r}
from toy_models import toy_models
from stepwise_routing import own
from stepwise_routing.run.cli import main
own.open_models = lambda given, *_, **__: toy_models(len(given))
main(['serve', {folder!r}, '--models', 'toy-0', 'toy-1', '--port', '0'])
"""


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(opened):
    router, folder = opened
    code = SERVER.format(path=sys.path, folder=str(folder))
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for ended, signals in ((signal.SIGINT, {0}), (signal.SIGTERM, {0, -signal.SIGTERM})):
        with subprocess.Popen([sys.executable, '-c', code], **options) as server:
            try:
                url = server.stdout.readline().split()[-1]
                with openai.OpenAI(base_url=url, api_key='x', max_retries=0) as client:
                    reply = ask(client)
            finally:
                server.send_signal(ended)
            errors = server.communicate(timeout=60)[1]
        assert reply.choices[0].message.content == router.route(QUESTIONS[0]).text
        assert server.returncode in signals and errors == ''
