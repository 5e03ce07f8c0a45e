"A router behind the OpenAI protocol: a real server on a real port, and OpenAI's own client."

import json
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import Mock

import asking
import openai
import pytest
from asking import NAMES, QUESTION, ask, body_of, client_of, post, stats_of, text_of, user
from fake_api import PRICE, PROBLEMS, FakeAPI, open_fake
from toy_models import ToyModel, toy_models, toy_problems
from toy_own import Calling, with_threshold

from stepwise_routing import serve
from stepwise_routing.own import serving
from stepwise_routing.records import SEPARATOR
from stepwise_routing.store import Replies

QUESTIONS = [QUESTION, *(problem.question for problem in toy_problems(39, seed=9))]
KEY = 'sesame-street-123'


@pytest.fixture(scope='module')
def router():
    promised = dict(reading='rewrite', unit='cents', large_cost=0.01)
    return with_threshold(toy_models(prices=(None, PRICE)), **promised)


@pytest.fixture(scope='module')
def client(router):
    with client_of(router) as client:
        yield client


@pytest.mark.parametrize('reading', ['continue', 'rewrite'])
@pytest.mark.parametrize('seeded', [True, False])
def test_streamed_is_whole_is_route(reading, seeded):
    "Usage is what the models wrote, and the notes say who wrote which step, and what was thrown away."
    models = toy_models(has_step_seeds=seeded)
    router, thrown = with_threshold(models, reading=reading), 0
    with client_of(router) as client:
        for question, want in zip(QUESTIONS[:25], router.route(QUESTIONS[:25])):
            written = sum(len(model.written) for model in models)
            whole = ask(client, question)
            notes, usage, finish = whole.stepwise, whole.usage, whole.choices[0].finish_reason
            assert sum(len(model.written) for model in models) == written + len(notes)
            options = dict(stream=True, stream_options=dict(include_usage=True))
            *chunks, last = ask(client, question, **options)
            assert text_of(whole) == text_of(chunks) == want.text
            assert chunks[0].choices[0].delta.role == 'assistant'
            assert not last.choices and last.usage == usage
            assert {c.choices[0].finish_reason for c in chunks} == {None, finish}
            assert (finish == 'stop') == (want.answer is not None)
            assert [n for c in chunks for n in getattr(c, 'stepwise', None) or ()] == notes
            assert [note['model'] for note in notes if note['kept']] == [*want.models]
            tokens = sum(note['tokens'] for note in notes)
            assert usage.completion_tokens == sum(want.tokens) == tokens
            of_thrown = [note['tokens'] for note in notes if not note['kept']]
            assert usage.completion_tokens_details.rejected_prediction_tokens == sum(of_thrown)
            thrown += sum(of_thrown)
        assert thrown > 0 and all(chunk.choices for chunk in ask(client, stream=True))


def test_usage_and_stats_are_the_bill(router):
    "By model, and in sum. What was saved is about the answers of the router alone."
    with client_of(router) as client:
        usages = [ask(client, q, model=name).usage for name in NAMES for q in QUESTIONS[:6]]
        stats = stats_of(client)
    for kind in ('completion_tokens', 'prompt_tokens', 'cost'):
        for usage in usages:
            total = sum(part[kind] for part in usage.by_model.values())
            assert total == pytest.approx(getattr(usage, kind))
        for name, counts in stats['models'].items():
            total = sum(usage.by_model[name][kind] for usage in usages)
            count = counts['cents'] / 100 if kind == 'cost' else counts[kind]
            assert count == pytest.approx(total)
    prompt, written = usage.prompt_tokens, usage.completion_tokens  # of the large model alone
    cents = ((prompt - prompt // 3) * 0.4 + prompt // 3 * 0.1 + written * 1.6) / 1e4
    assert usage.by_model['toy-0']['completion_tokens'] == 0
    assert 100 * usage.cost == pytest.approx(cents)
    assert (stats['requests'], stats['open']) == (18, 0)
    cost = 100 * sum(usage.cost for usage in usages[:6])
    routed = dict(answers=6, unit='cents', cost=cost, large_alone=0.06, saved=0.06 - cost)
    assert stats['router'] == pytest.approx(routed) and cost > 0


def test_names_seeds_and_turns(client, router):
    assert [model.id for model in client.models.list()] == [*NAMES]
    for name, model in (('small', 'toy-0'), ('large', 'toy-1')):
        assert {note['model'] for note in ask(client, model=name).stepwise} == {model}
    assert text_of(ask(client, seed=7)) == router.route(QUESTION, sample=7).text
    assert len({text_of(ask(client, seed=None)) for _ in range(8)}) > 2
    turns = [*user(QUESTIONS[1]), dict(role='assistant', content='7')]
    turns += user([dict(type='text', text=QUESTION)])
    reply = ask(client, messages=turns, temperature=0.1, stop=['x'])
    assert text_of(reply) == router.route(QUESTION).text


def test_many_at_once_are_what_they_are_alone(client, router, monkeypatch):
    "Streams and whole answers; models get lists."
    want = [router.route(question, sample=i).text for i, question in enumerate(QUESTIONS)]
    small = router.models[0]
    write = Mock(side_effect=small.write)
    monkeypatch.setattr(small, 'write', write)
    bodies = [body_of(q, seed=i, stream=i % 2 == 0) for i, q in enumerate(QUESTIONS)]
    assert asking.ask_at_once(client, bodies) == want
    assert max(len(call.args[0]) for call in write.call_args_list) > 4


def test_a_refused_request_of_an_api_fails_alone(tmp_path):
    "Others that are asked at the same time get their answers, whole or as a stream, of each name."
    replies = Replies(tmp_path / 'replies.db')
    with FakeAPI(PROBLEMS[:12]) as fake:
        [*fake.chains.values()][-1][-1] = 'No answer.'
        small = open_fake(fake.url, replies, index=0, retries=0, logprobs=True, name='little')
        large = open_fake(fake.url, replies, index=1, retries=0)
        with client_of(with_threshold([small, large], unit='cents')) as client:
            asked = [(p.question, [*NAMES][i % 3], i % 2 == 0) for i, p in enumerate(PROBLEMS[:15])]
            got = asking.ask_at_once(client, [body_of(q, model=m, stream=s) for q, m, s in asked])
            models, paid = stats_of(client)['models'].values(), fake.cents
            assert ask(client, PROBLEMS[11].question).choices[0].finish_reason == 'stop'
    assert got[:12] == [SEPARATOR.join(chain) for chain in fake.chains.values()]
    assert all('no reply of ' in str(error) for error in got[12:])
    assert sum(model['cents'] for model in models) == pytest.approx(paid) and paid > 0


PICTURE = dict(role='user', content=[dict(type='image_url', image_url=dict(url='x'))])
LISTS = [], user(' '), [PICTURE], [*user('x'), dict(role='assistant', content='y')], None
WRONG = [('model', None), ('model', 'mime'), ('stream', 'maybe'), ('seed', 'x')]


@pytest.mark.parametrize('name, value', [*WRONG, *(('messages', turns) for turns in LISTS)])
def test_a_wrong_field_is_named(client, name, value):
    body = {name: value for name, value in body_of(**{name: value}).items() if value is not None}
    status, raw = post(client, json.dumps(body).encode())
    error = json.loads(raw)['error']
    assert status == (404 if value == 'mime' else 400) and error['type'] == 'invalid_request_error'
    assert name in error['message'] and '\n' not in error['message']


def test_junk_long_requests_and_web_pages_are_refused(client):
    for raw in (b'', b'[1]', b'[' * 9999, b'\xff\xfe'):
        status, reply = post(client, raw)
        assert status == 400 and json.loads(reply)['error']['message']
    body = json.dumps(body_of()).encode()
    for kind in ('text/plain', 'application/x-www-form-urlencoded', ''):
        assert post(client, body, **{'content-type': kind})[0] == 415
    assert post(client, body, **{'content-type': 'application/json; charset=utf-8'})[0] == 200
    assert post(client, body + b' ' * (2 << 20))[0] == 413
    assert post(client, body, host='a-page.example')[0] == 403  # its name may lead to this machine


def test_the_key(opened, monkeypatch, capfd):
    router, folder = opened
    monkeypatch.setenv(serve.KEY_ENV, f'{KEY}\n')  # as a file of it ends
    with serving(folder, router.models, host='0.0.0.0') as url:
        with openai.OpenAI(base_url=url.replace('0.0.0.0', '127.0.0.1'), api_key=KEY) as client:
            assert text_of(ask(client)) == router.route(QUESTION).text
        for given in ({}, dict(Authorization='Bearer wrong'), dict(Authorization=KEY[:-1])):
            for path, body in (('chat/completions', b'{}'), ('models', None), ('../stats', None)):
                status, raw = post(client, body, path, **given)
                assert status == 401 and KEY not in raw.decode()
        assert post(client, None, '../health') == (200, b'{"status":"ok"}')
    assert KEY not in ''.join(capfd.readouterr())


def test_another_address_takes_a_key_and_a_taken_port_is_an_error(router, monkeypatch):
    for key in ('', ' \n'):
        monkeypatch.setenv(serve.KEY_ENV, key)
        for host in ('0.0.0.0', '192.168.1.2', 'example.org', '::'):
            with pytest.raises(ValueError, match=f'reached from elsewhere: .*{serve.KEY_ENV}'):
                serve.listen(0, host)
    with socket.create_server(('127.0.0.1', 0)) as taken:
        with pytest.raises(OSError, match='in use'):
            serve.serve(serve.Service(router, NAMES), taken.getsockname()[1])


@pytest.mark.parametrize('stream', [True, False])
def test_a_client_that_goes_ends_its_walk(stream):
    "Within a step; what was written until then is counted. A stream has its first step long before the last one."
    small, large = (Calling(i, lambda: time.sleep(0.05), end=0, cut=0) for i in range(2))
    with client_of(with_threshold([small, large])) as client:
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
        written, stats = len(large.written), stats_of(client)
        assert stats['models']['toy-1']['completion_tokens'] > 0 == stats['router']['answers']
        assert 0 < written < 30 and ask(client, model='small').choices
        assert len(large.written) == written


@pytest.mark.parametrize('error', [RuntimeError('the server is away'), OSError('disk full')])
@pytest.mark.parametrize('stream', [True, False])
def test_an_error_of_a_model_is_told_and_the_next_request_is_answered(error, stream):
    "As a status where an answer is whole, as an event where it is streamed."
    kind = openai.APIError if stream else openai.InternalServerError
    dying = Calling(0, None, end=0, cut=0)
    with client_of(with_threshold([dying, ToyModel(1)])) as client:
        for lives in (0, 2):
            dying.function = Mock(side_effect=[*[None] * lives, error])
            with pytest.raises(kind, match='the server is away|OSError in toy-0'):
                text_of(ask(client, model='small', stream=stream))
        dying.function = Mock()
        assert ask(client).choices and stats_of(client)['open'] == 0


@pytest.mark.parametrize('cost, said', [(0.5, 'at 50% of the cost: On these'), (0.97, 'hardly')])
def test_a_server_says_first_what_it_promises(monkeypatch, capsys, cost, said):
    monkeypatch.setattr(serve, 'new_server', Mock())
    router = with_threshold(toy_models(), costs={'min-prob threshold': cost})
    serve.serve(serve.Service(router, NAMES), port=0)
    first, second = capsys.readouterr().out.splitlines()
    assert said in first and second.startswith('serving http://127.0.0.1:')


SERVER = """
from toy_models import toy_models
from stepwise_routing import own
from stepwise_routing.run.cli import main
own.open_models = lambda given, *_, **__: toy_models(len(given))
main(['serve', {folder!r}, 'toy-0', 'toy-1', '--port', '0'])
"""


@pytest.mark.slow
@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_stop(opened, how):
    router, folder = opened
    code = f'import sys\nsys.path[:0] = {sys.path}' + SERVER.format(folder=str(folder))
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, '-c', code], **options) as server:
        try:
            _, line = server.stdout.readline(), server.stdout.readline()
            reply = ask(openai.OpenAI(base_url=line.split()[-1], api_key='x'))
        finally:
            server.send_signal(how)
        errors = server.communicate(timeout=60)[1]
    assert text_of(reply) == router.route(QUESTION).text
    assert server.returncode in (0, -signal.SIGTERM) and errors == ''
