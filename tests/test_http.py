"""Attacks over HTTP that nobody had listed: a hostile server of our client.

Each trial ends with the right answer, or with one line of an error."""
import asyncio
import gzip
import json
import socket
import threading
import time
import zlib
from fractions import Fraction

import pytest
from asker import OPTIONS, ask
from faulty import Faulty
from test_faults import closing

from stepwise_routing.base.tools import one_line
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT, Ledger

pytestmark = pytest.mark.timeout(120)

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
