"""Attacks over HTTP that nobody had listed: a hostile client of our server, a hostile server of our client.

Each trial ends with the right answer, or with one line of an error."""
import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
import zlib
from fractions import Fraction

import psutil
import pytest
from asker import OPTIONS, ask
from faulty import Faulty
from test_faults import closing
from test_live import opened  # noqa: F401
from test_router_server import QUESTIONS, Served, user

from stepwise_routing.base.tools import one_line
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT, Ledger

pytestmark = pytest.mark.timeout(120)
GOOD = dict(model='mine', messages=user(QUESTIONS[0]), seed=0)
ANSWER = b'"choices"'

@pytest.fixture(scope='module')
def door(opened):  # noqa: F811
    with Served(opened[0], body=1 << 22) as served: yield served

HEAD = b'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n'

def exchange(port, raw, seconds=20):
    "What is answered to bytes, up to the end of the connection. TimeoutError: there is no end."
    said = b''
    with socket.create_connection(('127.0.0.1', port), timeout=seconds) as s:
        with contextlib.suppress(ConnectionError): s.sendall(raw) # it may have had enough
        with contextlib.suppress(ConnectionError):
            while part := s.recv(1 << 16): said += part
    return said

def memory(): return psutil.Process().memory_info().rss >> 20 # MiB

def statuses(said): return [int(part[:3]) for part in said.split(b'HTTP/1.1 ')[1:]]

def told(said): return json.loads(said.split(b'\r\n\r\n')[-1])['error']['message']

def posted(port, raw, *heads):
    head = b''.join(h + b'\r\n' for h in heads)
    return exchange(port, HEAD + head + b'Content-Length: %d\r\n\r\n' % len(raw) + raw)

# ---- a hostile client

@pytest.mark.parametrize('pair', [(b'wrong', b'key-0123456789'), (b'key-0123456789', b'wrong')])
def test_two_keys_are_no_key(opened, pair):  # noqa: F811
    from stepwise_routing.models.web import running
    with Served(opened[0]) as served, running(served.service, key='key-0123456789') as url:
        port = int(url.split(':')[2].split('/')[0])
        raw = json.dumps(GOOD).encode()
        said = posted(port, raw, *(b'Authorization: Bearer ' + key for key in pair))
        assert statuses(said) in ([400], [401]) and ANSWER not in said
        assert statuses(posted(port, raw, b'Authorization: Bearer key-0123456789')) == [200]

def chunked(raw, size=b'%x\r\n', end=b'0\r\n\r\n'):
    return HEAD + b'Transfer-Encoding: chunked\r\n\r\n' + size % len(raw) + raw + b'\r\n' + end

@pytest.mark.parametrize('parts', [
    dict(size=b'%x;name=value\r\n'), dict(size=b'%x;' + b'y'*200_000 + b'\r\n'), dict(end=b'0\r\nX: y\r\n\r\n'),
    dict(end=b'0\r\n' + b'X: y\r\n'*50_000 + b'\r\n'), dict(size=b'000000000000000000%x\r\n'), dict(size=b'%x\n')])
def test_extensions_and_trailers_of_chunks(door, parts):
    said = exchange(door.port, chunked(json.dumps(GOOD).encode(), **parts))
    assert not said or statuses(said)[0] in (200, 400, 413)
    assert door.ask().choices

def request_bytes(body):
    raw = json.dumps(body).encode()
    return HEAD.replace(b'Connection: close\r\n', b'') + b'Content-Length: %d\r\n\r\n' % len(raw) + raw

def test_requests_behind_each_other_are_answered_in_their_order(door):
    bodies = [GOOD | dict(seed=i, messages=user(QUESTIONS[i])) for i in range(20)]
    bodies[7] = dict(GOOD, model='nobody')
    said = exchange(door.port, b''.join(map(request_bytes, bodies)), 60)
    assert statuses(said) == [404 if i == 7 else 200 for i in range(20)]
    alone = [exchange(door.port, request_bytes(body)) for body in (bodies[3], bodies[19])]
    texts = [json.loads(part.split(b'\r\n\r\n')[1])['choices'][0]['message']['content'] for part in
             (said.split(b'HTTP/1.1 ')[4], said.split(b'HTTP/1.1 ')[20], *alone)]
    assert texts[:2] == texts[2:]

def test_a_client_that_asks_much_and_reads_nothing_is_waited_for(door):
    before = memory()
    get = b'GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n'
    with socket.create_connection(('127.0.0.1', door.port), timeout=5) as s:
        s.settimeout(.5)
        try:
            for _ in range(2000): s.sendall(get*100)
        except OSError: pass # it reads no more
        assert memory() - before < 100 and door.ask().choices

@pytest.mark.parametrize('length', [b'\xb2', b'\xd9\xa3', b'0x10', b'1_0', b' 5 5', b'5\x0b'])
def test_a_length_that_python_alone_takes_for_a_number(door, length):
    said = exchange(door.port, HEAD + b'Content-Length: ' + length + b'\r\n\r\n{"a":')
    assert not said or statuses(said) == [400], said
    assert door.ask().choices

@pytest.mark.parametrize('first, status', [
    (b'POST /v1/chat/completions HTTP/1.1\r\nContent-Length: ' + b'9'*5000, 413), (b'CONNECT x:443 HTTP/1.1', 405),
    (b'TRACE /health HTTP/1.1', 405), (b'FOO /health HTTP/1.1', 405)], ids=lambda x: str(x)[:20])
def test_what_tornado_refuses_is_an_error_of_the_protocol(door, first, status):
    said = exchange(door.port, first + b'\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n')
    assert statuses(said)[:1] == [status] and b'<html>' not in said
    error = json.loads(said.split(b'\r\n\r\n')[1].split(b'HTTP/1.1')[0])['error']
    assert error['message'] and error['type'] == 'invalid_request_error' and error['code']

def test_a_packed_request_is_not_unpacked(door):
    before = memory()
    said = posted(door.port, gzip.compress(b' ' * (1 << 26)), b'Content-Encoding: gzip')
    assert statuses(said) == [400] and memory() - before < 60

NUMBERS = ['1e999', '-1e999', 'NaN', 'Infinity', '1' + '0'*4000, '1' + '0'*5000, '-' + '9'*4299, '1e-999',
           '0.' + '1'*4000, 'true']
FIELDS = 'seed', 'temperature', 'top_p', 'max_tokens', 'n', 'frequency_penalty', 'top_logprobs'

@pytest.mark.parametrize('field', FIELDS)
def test_numbers_that_are_none(door, field):
    for number in NUMBERS:
        raw = json.dumps(GOOD | {field: 0}).replace(f'"{field}": 0', f'"{field}": {number}').encode()
        said = posted(door.port, raw)
        (status,) = statuses(said)
        assert status in (200, 400), (number, said[:300])
        if status == 400: assert len(told(said)) < 400
    for number in NUMBERS[:7]:
        raw = json.dumps(GOOD).replace('{', '{"stepwise": {"max_cents": %s}, ' % number, 1).encode()
        assert statuses(posted(door.port, raw)) == [400], number

STRANGE = ['a\0b', '\ud800', '\r\nX: y', '\x1b[2J', '../../etc/passwd', '\u202e', 'x'*100_000, '{{', '%s%n', '']

@pytest.mark.parametrize('text', STRANGE, ids=ascii)
def test_strange_texts_in_every_field(door, text):
    changes = [dict(model=text), dict(stop=[text]), dict(user=text), dict(metadata={text: text}), {text: 1},
               dict(messages=user(text)), dict(messages=[dict(role=text, content='x')]), dict(stepwise={text: 1}),
               dict(messages=[dict(role='user', content='x', **{text or 'name': text})]), dict(seed=text),
               dict(stream=True, stream_options={text: text}), dict(stream=True, stop=[text])]
    for change in changes:
        said = posted(door.port, json.dumps(GOOD | change).encode())
        assert statuses(said)[0] in (200, 400, 404), (change, said[:300])
        head = said.split(b'\r\n\r\n')[0]
        assert b'\r\nX: y' not in head and b'Traceback' not in said
        if statuses(said) != [200]: assert '\n' not in told(said) and len(told(said)) < 500

@pytest.mark.parametrize('depth', [100, 300, 900, 940, 960, 970, 980, 985, 990, 995, 2000, 100_000])
def test_deep_values_in_every_field(door, depth):
    "They may be read and still be too deep to be shown."
    deep = '['*depth + ']'*depth
    for field in ('model', 'stop', 'seed', 'metadata', 'messages', 'stepwise', 'n', 'unknown', 'stream_options'):
        raw = json.dumps({k: v for k, v in GOOD.items() if k != field})[:-1] + f', "{field}": {deep}}}'
        said = posted(door.port, raw.encode())
        assert statuses(said)[0] in (200, 400, 404), (field, said[-300:])
    for field in ('role', 'content', 'name', 'tool_calls'):
        message = '{"role": "user", "content": "x", "%s": %s}' % (field, deep)
        raw = '{"model": "mine", "messages": [%s]}' % message
        said = posted(door.port, raw.encode())
        assert statuses(said)[0] in (200, 400), (field, said[-300:])

def test_of_a_field_that_stands_twice_the_last_one_counts(door):
    "As OpenAI has it: it is checked, answered and named as that one."
    raw = json.dumps(GOOD)[:-1].encode()
    said = posted(door.port, raw + b', "model": "small"}')
    assert statuses(said) == [200] and json.loads(said.split(b'\r\n\r\n')[1])['model'] == 'small'
    assert statuses(posted(door.port, raw + b', "seed": "x"}')) == [400]
    assert statuses(posted(door.port, raw + b', "model": "nobody"}')) == [404]

@pytest.mark.parametrize('head, pause', [(HEAD, .05), (b'', .05)])
def test_a_byte_now_and_then_is_waited_for_as_long_as_a_request_may_take(door, head, pause):
    "`patience` is one second here: it is for the whole head, not for each byte."
    with socket.create_connection(('127.0.0.1', door.port), timeout=20) as s:
        s.sendall(head)
        with pytest.raises(OSError): # it is closed
            for _ in range(2000):
                s.sendall(b'X')
                time.sleep(pause)
    assert door.ask().choices

@pytest.mark.parametrize('line', [
    b'GET http://evil.example/v1/models HTTP/1.1', b'GET /v1/models/%0d%0aX:%20y HTTP/1.1', b'HEAD /v1/models HTTP/1.1',
    b'OPTIONS * HTTP/1.1', b'GET /v1/models/' + b'%2e%2e%2f'*20 + b' HTTP/1.1', b'GET //127.0.0.1/v1/models HTTP/1.1',
    b'GET /v1/models?x=' + b'y'*50_000 + b' HTTP/1.1', b'GET /v1/models HTTP/1.0', b'GET /v1/models#x HTTP/1.1'])
def test_other_spellings_of_an_address(door, line):
    said = exchange(door.port, line + b'\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n')
    assert not said or statuses(said)[0] in (200, 400, 404, 405), said[:300]
    assert b'\r\nX: y' not in said and b'Traceback' not in said

@pytest.mark.parametrize('head', [
    b'Host: 127.0.0.1:80@evil.example', b'Host: evil.example:80#@127.0.0.1', b'Host: 127.0.0.1.nip.io',
    b'Host: 127.0.0.1,evil.example', b'Host: 127.0.0.1\r\nOrigin: http://evil.example#127.0.0.1',
    b'Host: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\nOrigin: http://evil.example',
    b'Host: 127.0.0.1\r\nOrigin: file://',
    b'Host: 127.0.0.1\r\nOrigin: http://127.0.0.1@evil.example'])
def test_a_web_page_in_disguise_is_refused(door, head):
    raw = json.dumps(GOOD).encode()
    line = b'POST /v1/chat/completions HTTP/1.1\r\n'
    said = exchange(door.port, line + head + b'\r\nContent-Length: %d\r\n\r\n' % len(raw) + raw)
    assert statuses(said)[0] in (400, 403) and ANSWER not in said

def test_many_small_parts_are_read(door):
    "As much as a body may hold: messages, parts of a message, unknown fields."
    for body in (GOOD | dict(messages=user('x')*20_000), GOOD | {f'f{i}': i for i in range(20_000)},
                 GOOD | dict(messages=[dict(role='user', content=[dict(type='text', text='x')]*20_000)]),
                 GOOD | dict(stop=['x'*900_000]*4), GOOD | dict(metadata={str(i): i for i in range(20_000)})):
        said = posted(door.port, json.dumps(body).encode())
        assert statuses(said)[0] in (200, 400), said[:300]

# ---- a hostile server

class Raw:
    "A server that answers each request with bytes of its own choice; for the time of a `with` block."
    def __init__(self, answer): # body of a request -> pieces of bytes
        self.answer, self.seen, self.heads = answer, [], []
    def __enter__(self):
        self.door = socket.create_server(('127.0.0.1', 0))
        self.url = f'http://127.0.0.1:{self.door.getsockname()[1]}/v1'
        threading.Thread(target=self.listen, daemon=True).start()
        return self
    def __exit__(self, *exc): self.door.close()
    def listen(self):
        try:
            while True: threading.Thread(target=self.talk, args=[self.door.accept()[0]], daemon=True).start()
        except OSError: pass # closed
    def talk(self, connection):
        with connection, connection.makefile('rb') as stream:
            try:
                while line := stream.readline():
                    size = 0
                    while (head := stream.readline()).strip():
                        self.heads.append(head)
                        if head.lower().startswith(b'content-length:'): size = int(head.split(b':')[1])
                    body = json.loads(stream.read(size) or 'null')
                    self.seen.append(body or line)
                    for piece in self.answer(body): connection.sendall(piece)
            except OSError: pass # the client has had enough

def good_reply(body): return Faulty()._reply('ok', body, '')

def framed(raw, *heads, status=b'200 OK'):
    lines = [b'HTTP/1.1 ' + status, b'Content-Type: application/json', b'Content-Length: %d' % len(raw), *heads]
    return b'\r\n'.join(lines) + b'\r\n\r\n' + raw

def changed(**values):
    def answer(body):
        reply = good_reply(body)
        reply['choices'][0].update(values)
        yield framed(json.dumps(reply).encode())
    return answer

def outcomes(answer, n=1, **options):
    "What comes of n requests, one after the other, and the amount in the book."
    with Raw(answer) as server:
        backend = OpenAIBackend('toy-model', **OPTIONS | dict(base_url=server.url, retries=2, timeout=3) | options)
        async def every():
            out = []
            for k in range(n): out += await asyncio.gather(backend.write(ask(k)), return_exceptions=True)
            await backend.close()
            return out
        return asyncio.run(every()), backend.ledger.units, server.seen

def is_line(error):
    return isinstance(error, RuntimeError) and '\n' not in str(error) and len(str(error)) < 500

PACKED = [['gzip', 'gzip'], ['gzip']*3, ['deflate', 'gzip'], ['deflate'], ['br'], ['zstd'], ['\x1b[31m']]

@pytest.mark.parametrize('names', PACKED)
def test_client_a_reply_that_is_packed_twice_is_not_unpacked(names):
    "A part of 64 kB of it could grow to 64 GB before anybody counts."
    def answer(body):
        raw = json.dumps(good_reply(body)).encode()
        for name in names: raw = zlib.compress(raw) if name == 'deflate' else gzip.compress(raw)
        yield framed(raw, b'Content-Encoding: ' + ', '.join(names).encode())
    (error,), units, _ = outcomes(answer)
    assert is_line(error) and f'a reply that is packed as {one_line(", ".join(names))}' in str(error)
    assert units > 0

def test_client_a_reply_that_is_packed_as_asked_for_is_read():
    def answer(body): yield framed(gzip.compress(json.dumps(good_reply(body)).encode()), b'Content-Encoding: GZip')
    (steps,), units, _ = outcomes(answer)
    assert steps[0].text and units > 0

def test_client_a_reply_in_chunks_with_extensions_and_trailers_is_read():
    def answer(body):
        raw = json.dumps(good_reply(body)).encode()
        yield b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n'
        for at in range(0, len(raw), 50): yield b'%x;a="b"\r\n%b\r\n' % (len(raw[at:at + 50]), raw[at:at + 50])
        yield b'0\r\nX: y\r\n\r\n'
    (steps,), units, seen = outcomes(answer)
    assert steps[0].text and units > 0 and len(seen) == 1

@pytest.mark.parametrize('head', [
    b'Content-Length: 5', b'Content-Length: 9' + b'9'*30, b'Transfer-Encoding: chunked', b'Content-Length: -1',
    b'X: \r\n' + b'Y: z\r\n'*60_000,
    b'X: ' + b'y'*2_000_000, b'Transfer-Encoding: gzip', b': x', b'X\0: y', b'Upgrade: h2c\r\nConnection: upgrade'])
def test_client_heads_that_contradict_themselves(head):
    (out,), units, _ = outcomes(lambda body: [framed(json.dumps(good_reply(body)).encode(), head)])
    assert units > 0 and (is_line(out) or out[0].text)

@pytest.mark.parametrize('piece', [b'HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n', b'HTTP/1.1 100 Continue\r\n\r\n'])
def test_client_replies_that_only_announce_one_end_in_time(piece):
    def answer(body):
        end = time.monotonic() + 20
        while time.monotonic() < end: yield piece*10
    (error,), units, _ = outcomes(answer, retries=1, timeout=1)
    assert is_line(error) and units > 0

def test_client_a_head_byte_by_byte_ends_in_time():
    def answer(body):
        yield b'HTTP/1.1 200 OK\r\nX: '
        for _ in range(100):
            yield b'y'
            time.sleep(.1)
    (error,), units, _ = outcomes(answer, retries=1, timeout=1)
    assert is_line(error) and 'within 1 s' in str(error) and units > 0

@pytest.mark.parametrize('status', [b'101 Switching Protocols', b'204 No Content', b'206 Partial', b'304 Not Modified',
                                    b'999 X', b'99 X', b'600 X', b'200', b'418 x\x80', b'-1 X'])
def test_client_a_status_that_is_none_of_ours(status):
    (out,), units, seen = outcomes(lambda body: [framed(json.dumps(good_reply(body)).encode(), status=status)])
    assert is_line(out) or out[0].text
    if not isinstance(out, Exception): assert units > 0

TOKENS = ['1' + '0'*5000, '1e999', '1e3', '-0', '1' + '0'*400, '"5"', '[5]', 'NaN', 'true', '0.5']

@pytest.mark.parametrize('number', TOKENS, ids=lambda n: n[:6])
def test_client_counts_that_are_none_are_booked_at_the_most(number):
    def answer(body):
        reply = good_reply(body)
        reply['usage']['completion_tokens'] = 'HERE'
        yield framed(json.dumps(reply).replace('"HERE"', number).encode())
    (out,), units, seen = outcomes(answer)
    assert units > 0 or number == '-0'
    assert is_line(out) or number == '-0'

@pytest.mark.parametrize('depth', [500, 900, 950, 970, 980, 985, 990, 995, 5000, 200_000])
@pytest.mark.parametrize('place', ['finish_reason', 'stop_reason', 'other'])
def test_client_deep_values_lose_no_reply(depth, place, tmp_path):
    deep = '['*depth + ']'*depth
    def answer(body):
        reply = good_reply(body)
        reply['choices'][0][place] = 'HERE'
        yield framed(json.dumps(reply).replace('"HERE"', deep).encode())
    (out,), units, _ = outcomes(answer, ledger=tmp_path/'l')
    assert units > 0 and (is_line(out) or out[0].text)
    with Ledger(tmp_path/'l') as book: assert book.units == units

LONG = ['x'*1_300_000, '\0', 'a\0b', '\n\n'*100_000, '\x1b[2J', '\\boxed{'*20_000]

@pytest.mark.parametrize('text', LONG, ids=lambda text: ascii(text[:4]))
def test_client_texts_that_no_model_writes(text, tmp_path):
    "What would be sent back as the next prompt is no longer than its tokens can be."
    change = changed(message=dict(role='assistant', content=text), logprobs=None)
    (out,), units, _ = outcomes(change, top_logprobs=0, ledger=tmp_path/'l', timeout=20)
    assert units > 0 and (is_line(out) or len(out[0].text) <= 256*(512 + 4096))
    with Ledger(tmp_path/'l') as book: assert book.units == units

def test_client_of_a_long_list_of_models_the_first_thousand_are_looked_at():
    "To compare a name with half a million others took minutes."
    def answer(body, after):
        if body: yield framed(b'{"error": {"message": "The model does not exist"}}', status=b'404 Not Found')
        else:
            names = [*map(str, range(after)), 'toy-model-2']
            yield framed(json.dumps(dict(data=[dict(id=name) for name in names])).encode())
    for after, is_seen in ((0, True), (998, True), (1000, False)):
        (error,), units, _ = outcomes(lambda body: answer(body, after), retries=1)
        assert is_line(error) and units == 0 and ("did you mean 'toy-model-2'?" in str(error)) == is_seen

def test_client_cookies_are_not_kept():
    "A server would fill the heads of all later requests with them."
    def answer(body): yield framed(json.dumps(good_reply(body)).encode(), b'Set-Cookie: a=b')
    with Raw(answer) as server:
        backend = OpenAIBackend('toy-model', **OPTIONS | dict(base_url=server.url, concurrency=1))
        assert all(steps[0].text for steps in closing(backend, ask(1), ask(2)))
    assert len(server.seen) == 2 and not any(head.lower().startswith(b'cookie') for head in server.heads)

def test_client_a_second_reply_to_a_request_is_not_the_answer_to_the_next():
    "On a kept connection each question would get the answer to the one before."
    def whole(body): return framed(json.dumps(good_reply(body)).encode())
    once, *_ = outcomes(lambda body: [whole(body)], n=3)
    twice, *_ = outcomes(lambda body: [whole(body)*2], n=3)
    assert [steps[0].text for steps in twice] == [steps[0].text for steps in once]
    assert len({steps[0].text for steps in once}) > 1

KEY = 'sk-test-0123456789'
ESCAPED = ''.join(f'\\u{ord(c):04x}' for c in KEY)

def with_key(place):
    "A reply that spells the key in escapes of JSON, at one place."
    def answer(body):
        reply = good_reply(body)
        choice = reply['choices'][0]
        if place == 'text': choice['message']['content'] = 'The key is KEY. \\boxed{1}'
        elif place == 'finish': choice['finish_reason'] = 'KEY'
        else: choice['logprobs']['content'][0]['top_logprobs'][0]['token'] = 'KEY'
        yield framed(json.dumps(reply).replace('KEY', ESCAPED).encode())
    return answer

@pytest.mark.parametrize('place', ['text', 'finish', 'token'])
def test_client_a_key_in_escapes_reaches_neither_file_nor_caller(place, monkeypatch, tmp_path):
    monkeypatch.setenv('OPENAI_API_KEY', KEY)
    options = dict(key_env='OPENAI_API_KEY') | (dict(top_logprobs=0) if place == 'text' else {})
    found = outcomes(with_key(place), **options, ledger=tmp_path/'l')
    assert found[2] and KEY not in repr(found[:2])
    assert KEY.encode() not in b''.join(file.read_bytes() for file in tmp_path.iterdir())

def test_client_a_key_in_a_head_or_a_list_reaches_no_error(monkeypatch, tmp_path):
    "A name is cut to 60 characters only after the key is masked: a part of a long key is a secret, too."
    key = KEY*10
    monkeypatch.setenv('OPENAI_API_KEY', key)
    def packed(body): yield framed(b'{}', b'Content-Encoding: ' + key.encode())
    def missing(body):
        if body: yield framed(b'{}', status=b'404 Not Found')
        else: yield framed(json.dumps(dict(data=[dict(id=f'toy-{key}')])).encode())
    for i, answer in enumerate((packed, missing)):
        (error,), _, seen = outcomes(answer, key_env='OPENAI_API_KEY', ledger=tmp_path/str(i))
        assert seen and is_line(error) and KEY not in str(error) and '***' in str(error)
        assert KEY.encode() not in (tmp_path/str(i)).read_bytes()

def test_client_tokens_that_the_total_alone_counts_are_paid_for():
    "xAI and Gemini leave the tokens of thoughts out of completion_tokens."
    bills = []
    for hidden in (0, 100):
        def answer(body):
            reply = good_reply(body)
            reply['usage']['total_tokens'] += hidden
            yield framed(json.dumps(reply).encode())
        (steps,), units, _ = outcomes(answer)
        bills.append((steps[0].generated, units))
    (few, cheap), (many, dear) = bills
    assert many == few + 100 and dear - cheap == 100*Fraction(160, 10**6)*CENT

@pytest.mark.parametrize('details', [7, 'many', [1], None, {}])
def test_client_details_of_the_usage_that_are_none_lose_no_reply(details):
    def answer(body):
        reply = good_reply(body)
        reply['usage']['completion_tokens_details'] = details
        yield framed(json.dumps(reply).encode())
    (steps,), *_ = outcomes(answer)
    assert steps[0].text

@pytest.mark.parametrize('finish, stopped', [('stop', 'step'), ('stop_sequence', 'step'), ('eos_token', 'stop'),
                                             ('end_turn', 'stop'), ('model_length', 'length')])
def test_client_other_words_for_how_a_reply_ended(finish, stopped):
    "Text Generation Inference says stop_sequence where a stop string was met: the chain goes on."
    (steps,), *_ = outcomes(changed(finish_reason=finish))
    assert steps[0].finish == stopped

@pytest.mark.parametrize('number, finish', [(None, 'stop'), (106, 'stop'), ('\n\n', 'step')])
def test_client_what_vllm_says_of_the_end(number, finish):
    "The stop string that was met, or the number of the token that ended the reply."
    (steps,), *_ = outcomes(changed(stop_reason=number))
    assert steps[0].finish == finish

@pytest.mark.parametrize('values', [dict(finish_reason='content_filter', message=dict(content=''), logprobs=None),
                                    dict(message=dict(content=None, refusal='No.'), logprobs=dict(content=None))])
def test_client_a_refused_answer_is_an_empty_last_step(values):
    "One such question of hundreds must not keep `collect` from its end."
    (steps,), units, seen = outcomes(changed(**values))
    assert [(s.text, s.finish) for s in steps] == [('', 'stop')] and len(seen) == 1 and units > 0

def test_client_a_403_tells_the_reason():
    def answer(_): yield framed(b'{"error": {"message": "Input flagged"}}', status=b'403 Forbidden')
    (error,), *_ = outcomes(answer)
    assert is_line(error) and 'Input flagged' in str(error)

def test_client_a_key_in_the_place_of_its_name_is_not_shown():
    with pytest.raises(ValueError, match='key_env is no name') as e:
        OpenAIBackend('toy-model', **OPTIONS | dict(base_url='https://no.invalid/v1', key_env='sk-proj-SECRET12345'))
    assert 'SECRET' not in str(e.value)

@pytest.mark.parametrize('change', [dict(finish_reason='error', error=dict(code=502, message='Provider error')),
                                    dict(finish_reason='insufficient_system_resource')])
def test_client_half_a_reply_of_a_server_that_failed_is_asked_for_again(change):
    "OpenRouter tells an error of a provider inside a choice."
    failing = iter([True, False])
    def answer(body):
        reply = good_reply(body)
        if next(failing): reply['choices'][0] |= change
        yield framed(json.dumps(reply).encode())
    (steps,), units, seen = outcomes(answer, retries=2)
    assert steps[0].finish == 'step' and len(seen) == 2
    (error,), *_ = outcomes(changed(**change), retries=1)
    assert is_line(error) and ('Provider error' in str(error) or 'its text, end' in str(error))

@pytest.mark.parametrize('name', ['reasoning_content', 'reasoning'])
@pytest.mark.parametrize('text, top', [('It is 7.', 5), ('', 0)])
def test_client_thoughts_apart_from_the_text_are_no_steps(name, text, top):
    "Their log-probabilities stand before those of the text, or they use up all tokens of a step."
    message = {'role': 'assistant', 'content': text or None, name: 'The user asks.'}
    tokens = [dict(token=t, logprob=-2, top_logprobs=[]) for t in ('The', ' user', ' asks.', 'It', ' is', ' 7.')]
    logprobs = dict(content=tokens) if top else None
    change = changed(message=message, logprobs=logprobs, finish_reason='stop' if text else 'length')
    (error,), units, seen = outcomes(change, top_logprobs=top)
    assert is_line(error) and 'switch thinking off' in str(error) and len(seen) == 1 and units > 0
    (steps,), *_ = outcomes(changed(message=message | dict(content='It is 7.'), logprobs=None), top_logprobs=0)
    assert steps[0].text == 'It is 7.'

@pytest.mark.parametrize('body, said', [
    ({'detail': 'logprobs is not supported'}, 'logprobs is not supported'),
    ({'detail': [{'loc': ['body', 'seed'], 'msg': 'Extra inputs'}]}, 'Extra inputs')])
def test_client_the_reason_of_other_error_bodies_is_told(body, said):
    def answer(_): yield framed(json.dumps(body).encode(), status=b'422 Unprocessable')
    (error,), *_ = outcomes(answer, retries=1)
    assert is_line(error) and said in str(error)

def test_client_an_address_without_v1_is_told():
    def answer(_): yield framed(b'404 page not found', status=b'404 Not Found')
    (error,), *_ = outcomes(answer, retries=1)
    assert is_line(error) and 'it lists no models; is base_url right? Most end with /v1' in str(error)

@pytest.mark.parametrize('usage', [dict(prompt_tokens=0, completion_tokens=0), dict(prompt_tokens=0),
                                   dict(completion_tokens=1)])
def test_client_a_bill_of_less_than_was_received_is_none(usage):
    "Cap, costs and the router's training would take a paid reply for a free one."
    def answer(body):
        reply = good_reply(body)
        reply['usage'] |= usage
        del reply['usage']['total_tokens']
        yield framed(json.dumps(reply).encode())
    (error,), units, _ = outcomes(answer)
    assert is_line(error) and 'no usage record that counts all its tokens' in str(error) and units > 0

def test_client_an_error_with_a_status_of_200_tells_its_reason():
    (error,), _, _ = outcomes(lambda body: [framed(b'{"error": {"message": "the model sleeps\\n"}}')])
    assert is_line(error) and 'the server answers with an error: the model sleeps' in str(error)

def test_client_a_key_that_stands_twice_in_a_bill_counts_once():
    "Servers and proxies may read another one than we do; ours is booked and never above what was asked for."
    def answer(body):
        raw = json.dumps(good_reply(body))
        yield framed((raw[:-1] + ', "usage": {"prompt_tokens": 1000000000, "completion_tokens": 1}}').encode())
    (error,), units, _ = outcomes(answer)
    assert is_line(error) and 'counts more tokens' in str(error) and 0 < units < CENT
