"Replies of real servers and of broken ones over HTTP: each call ends with the right answer, or with one line."
import asyncio
import gzip
import json
import socket
import threading
import time
from fractions import Fraction

import pytest
from asker import OPTIONS, ask
from faulty import Faulty

from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT

pytestmark = pytest.mark.timeout(120)
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

def test_client_a_reply_that_is_packed_as_asked_for_is_read():
    def answer(body): yield framed(gzip.compress(json.dumps(good_reply(body)).encode()), b'Content-Encoding: GZip')
    (steps,), units, _ = outcomes(answer)
    assert steps[0].text and units > 0

def test_client_a_head_byte_by_byte_ends_in_time():
    def answer(body):
        yield b'HTTP/1.1 200 OK\r\nX: '
        for _ in range(100):
            yield b'y'
            time.sleep(.1)
    (error,), units, _ = outcomes(answer, retries=1, timeout=1)
    assert is_line(error) and 'within 1 s' in str(error) and units > 0

TOKENS = ['1e999', '"5"', 'NaN', 'true', '0.5']

@pytest.mark.parametrize('number', TOKENS, ids=lambda n: n[:6])
def test_client_counts_that_are_none_are_booked_at_the_most(number):
    def answer(body):
        reply = good_reply(body)
        reply['usage']['completion_tokens'] = 'HERE'
        yield framed(json.dumps(reply).replace('"HERE"', number).encode())
    (out,), units, seen = outcomes(answer)
    assert units > 0 and is_line(out)

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
