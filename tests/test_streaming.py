"""Text of a paid model by token: what is shown early is what stands in the answer, and the bill is exact however a
stream ends. Real servers on real ports, one of which fails on purpose."""
import asyncio
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from faulty import Faulty
from test_live import opened  # noqa: F401
from test_own import Adder
from test_router_server import QUESTIONS, Served, eventually, hang_up, other_models, text, user

openai = pytest.importorskip('openai')
from stepwise_routing.base.records import Problem, Step
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import MATHEMATICS, find_benchmark
from stepwise_routing.method.live import LiveText
from stepwise_routing.method.walks import LargeOnly
from stepwise_routing.models.bills import Bills, Purse
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.events import Listener, whole_reply
from stepwise_routing.models.interface import Request
from stepwise_routing.models.ledger import CENT
from stepwise_routing.models.replies import drop_repeats, reply_steps, sure_text

KEY = 'sk-0123456789-abcdefghij'

class Paid:
    "A server, a book and a backend, and the router of a test with it as its large model."
    def __init__(self, router, faults=(), between=None, key=None, wire=None, **options):
        self.router, self.before = router, router.specs
        self.server, self.book = Faulty(faults, key=key, between=between, wire=wire), Bills()
        self.options = dict(key_env='', price='gpt-4.1-mini', pause=.01, timeout=20.) | options
    def __enter__(self):
        self.server.__enter__()
        self.large = OpenAIBackend('toy-model', 1, self.book, base_url=self.server.url, **self.options)
        self.swap = other_models(self.router, Adder(0), self.large)
        self.swap.__enter__()
        self.router.specs = [backend.spec for backend in self.router.backends]
        self.served = Served(self.router).__enter__()
        return self
    def __exit__(self, *exc):
        self.served.__exit__(*exc)
        self.router.specs = self.before
        self.swap.__exit__(*exc)
        self.book.close()
        self.server.__exit__(*exc)
    def ask(self, question=QUESTIONS[0], model='large', **more):
        options = dict(stream=True, stream_options=dict(include_usage=True)) if more.pop('stream', True) else {}
        return self.served.ask(question, model=model, **options | more)

def contents(chunks): return [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]

# ---- what is sure

def kept(whole, prefix, max_steps, benchmark):
    reply = dict(text=whole, finish='stop', ends=True, tokens=None, usage=dict(prompt=1, generated=9, cached=0))
    steps = drop_repeats(reply_steps(reply, 1, max_steps, benchmark=benchmark), prefix)
    return benchmark.separator.join(step.text for step in steps if step.text)

@pytest.mark.parametrize('seed', range(40))
@pytest.mark.parametrize('separator', ['\n\n', '\n'])
def test_what_is_sure_stays(seed, separator):
    "At every character of a reply: a beginning of what is kept in the end, and never less than before."
    r = random.Random(seed)
    benchmark = MATHEMATICS if separator == '\n\n' else find_benchmark('mbpp')
    assert benchmark.separator == separator
    lines = ['a', 'ab', 'a  b', 'b', r'so \boxed{7}', '  c', 'a\tb ']
    for _ in range(20):
        prefix = [Step(r.choice(lines[:4]), 0, 'step') for _ in range(r.randint(0, 3))]
        parts = [r.choice(lines) for _ in range(r.randint(1, 5))]
        if prefix and r.random() < .6: parts[:0] = [s.text for s in prefix[-r.randint(1, len(prefix)):]]
        whole = r.choice(['', '\n', separator]) + ''.join(p + r.choice([separator, separator + '\n']) for p in parts)
        if r.random() < .5: whole = whole.rstrip()
        max_steps = r.randint(1, 6)
        end, last = kept(whole, prefix, max_steps, benchmark), ''
        for i in range(len(whole) + 1):
            sure = sure_text(whole[:i], prefix, max_steps, benchmark)
            assert end.startswith(sure) and sure.startswith(last), (whole, i, prefix)
            last = sure
        if not prefix: assert last == end

def test_a_stream_is_a_reply():
    def line(**chunk): return f'data: {json.dumps(chunk)}\n\n'
    def piece(content, finish=None, **more):
        return dict(index=0, delta=dict(content=content), finish_reason=finish, **more)
    token = dict(token='a', logprob=-.5)
    stream = ': ping\n\n' + line(choices=[piece(None)]) + line(choices=[piece('a', logprobs=dict(content=[token]))]) + (
        line(choices=[dict(piece('x'), index=1), piece('√b', 'stop', stop_reason=None)]) +
        line(choices=[], usage=dict(prompt_tokens=3)) + 'data: [DONE]\n\n')
    got = json.loads(whole_reply(stream))
    assert got == dict(usage=dict(prompt_tokens=3), choices=[dict(finish_reason='stop', stop_reason=None,
                       message=dict(content='a√b'), logprobs=dict(content=[token]))])
    for plain in ('{"choices": []}', '', 'data: {', 'data: 7\n', 'data: {"choices": [7]}', 'data: {"choices": 7}',
                  'data: {"choices": [{"delta": {"content": 7}}]}'):
        assert whole_reply(plain) == plain
    told = []
    listener = Listener(told.append, lambda text: text)
    raw = stream.encode()
    for i in range(len(raw)): listener(raw[i:i + 1]) # also in the middle of a character
    assert told == ['a', 'a√b']

# ---- on the wire

def halves(data): # of one character, in two pieces
    if rb'\u221a.' not in data: return data
    return data.replace(rb'\u221a.', rb'\ud83d') + data.replace(rb' \u221a.', rb'\ude00.')

def lines(end): # of a chunk: each of its fields on one
    def wire(data): return data.replace(b', "', b',\ndata: "').replace(b'\n', end)
    return wire

WIRES = dict(byte=(lambda data: data.replace(rb'\u221a', b'\xff'), '\ufffd'), halves=(halves, '\U0001f600'),
             mark=(lambda data: b'\xef\xbb\xbf' + data if b'"Next' in data else data, '√'),
             single=(lambda data: data.replace(b'\n\n', b'\n'), '√'), empty=(lambda data: b'data:\n\n' + data, '√'),
             lf=(lines(b'\n'), '√'), cr=(lines(b'\r'), '√'), crlf=(lines(b'\r\n'), '√'))

@pytest.mark.parametrize('name', WIRES)
def test_what_a_stream_may_be_made_of(opened, name):
    "It is read at the first attempt, and told as it is in the end."
    wire, sign = WIRES[name]
    with Paid(opened[0], wire=wire, top_logprobs=0) as paid:
        chunks, plain = paid.ask(), paid.ask(stream=False)
        assert text(chunks) == plain.choices[0].message.content.replace('√', sign) != sign
        assert len(paid.server.seen) == 2 and paid.book.units == paid.server.cents*CENT

@pytest.mark.parametrize('name', WIRES)
def test_a_listener_tells_what_the_reply_says(name):
    "Byte by byte, up to its last event."
    wire, sign = WIRES[name]
    pieces = [dict(choices=[dict(index=0, delta=dict(content=t))]) for t in ('Next', ' √.', ' End')]
    data = b''.join(wire(f'data: {json.dumps(piece)}\n\n'.encode()) for piece in pieces) + b'\n\n'
    told = []
    listener = Listener(told.append, lambda text: text)
    for i in range(len(data)): listener(data[i:i + 1])
    message = json.loads(whole_reply(data.decode(errors='replace')))['choices'][0]['message']
    assert message['content'] == told[-1] == f'Next {sign}. End'
    assert not any('\ud800' <= c <= '\udfff' for t in told for c in t)

# ---- by token

def test_a_text_comes_before_the_reply_ends(opened):
    "The server waits with the rest until the client has read the beginning."
    seen = threading.Event()
    async def between(i):
        while i == 2 and not seen.is_set(): await asyncio.sleep(.01)
    with Paid(opened[0], between=between) as paid, openai.OpenAI(base_url=paid.served.url, api_key='x') as c:
        chunks = []
        for chunk in c.chat.completions.create(model='large', messages=user(QUESTIONS[0]), seed=0, stream=True):
            chunks.append(chunk)
            if contents([chunk]): seen.set()
        assert len(paid.server.seen) == 1 and paid.server.seen[0]['stream_options'] == dict(include_usage=True)
        assert 0 < len(contents(chunks)[0].split()) <= 3, 'it came with the pieces before the gate'
        whole = paid.ask(stream=False)
        assert 'stream' not in paid.server.seen[1] and text(chunks) == whole.choices[0].message.content

def test_streamed_is_whole_and_the_bill_is_exact(opened):
    "With a router, with stop strings, and with log-probabilities, which come with whole steps."
    with Paid(opened[0]) as paid:
        dollars = 0.
        for i, question in enumerate(QUESTIONS[:24]):
            model = 'mine' if i % 2 else 'large'
            more = dict(stop=['= ']) if i % 3 == 0 else dict(logprobs=True) if i % 3 == 1 else {}
            before = len(paid.server.seen)
            chunks, whole = paid.ask(question, model, **more), paid.ask(question, model, stream=False, **more)
            asked = paid.server.seen[before:]
            assert text(chunks) == whole.choices[0].message.content and chunks[-1].usage == whole.usage
            reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
            assert reasons[-1] == whole.choices[0].finish_reason
            told = [s for c in chunks for s in getattr(c, 'stepwise', None) or ()]
            assert [(s['model'], s['tokens']) for s in told] == [(s['model'], s['tokens']) for s in whole.stepwise]
            dollars += whole.usage.cost + chunks[-1].usage.cost
            assert sum('stream' in body for body in asked) == (len(asked)/2 if 'logprobs' not in more else 0)
        assert dollars*100 == pytest.approx(float(paid.server.cents))
        assert paid.book.units == paid.server.cents*CENT

def test_a_repetition_is_never_shown(opened):
    "A reply that begins with the last step again is shown from its first new step on."
    repeated = 0
    with Paid(opened[0], faults=lambda body: 'repeat' if len(body['messages']) > 2 else 'ok') as paid:
        for question in QUESTIONS[:30]:
            chunks, whole = paid.ask(question, 'mine'), paid.ask(question, 'mine', stream=False)
            assert text(chunks) == whole.choices[0].message.content
            repeated += any(len(body['messages']) > 2 for body in paid.server.seen[-2:])
        assert repeated > 3 and paid.book.units == paid.server.cents*CENT

def test_streams_that_are_left_are_booked(opened):
    "The reply comes to its end and is booked at what it costs, and nothing runs on."
    async def between(i): await asyncio.sleep(.02)
    with Paid(opened[0], between=between) as paid:
        async def all_of_them():
            body = [dict(model='large', stream=True, messages=user(q)) for q in QUESTIONS[:30]]
            r = random.Random(1)
            await asyncio.gather(*(hang_up(paid.served, b, r.random()*.15) for b in body))
        run_async(all_of_them())
        assert eventually(lambda: not paid.book.pending and not paid.server.busy and not paid.book.reserved)
        assert paid.book.units == paid.server.cents*CENT > 0 and len(paid.server.seen) == 30
        assert eventually(lambda: not asyncio.all_tasks(opened[0].loop.loop))

@pytest.mark.parametrize('kind', ['cap', 'purse'])
def test_who_left_while_waiting_for_room_is_not_asked_for(opened, kind):
    "There is room for one call. When it ends, nobody wants the second one any more."
    gate, reserved = threading.Event(), []
    async def between(i):
        while not gate.is_set(): await asyncio.sleep(.01)
    with Paid(opened[0], between=between) as paid:
        if kind == 'cap': paid.book.allow(.5)
        else: paid.book.purse = Purse(.5)
        reserve = paid.book.reserve
        def counted(*args):
            reserved.append(args)
            return reserve(*args)
        paid.book.reserve = counted
        body = dict(model='large', stream=True, messages=user(QUESTIONS[1]))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(paid.ask)
            assert eventually(lambda: paid.server.seen)
            run_async(hang_up(paid.served, body, 0, lambda: len(reserved) == 2))
            assert eventually(lambda: paid.book.unwanted)
            gate.set()
            assert text(first.result())
        assert eventually(lambda: not paid.book.pending and not paid.book.reserved)
        assert len(paid.server.seen) == 1 and paid.book.units == paid.server.cents*CENT
        assert kind == 'cap' or paid.book.purse.left == paid.book.purse.cap - paid.book.units
        assert text(paid.ask()) and not paid.book.unwanted

def test_a_stop_string_in_a_later_step_leaves_the_notes_of_the_steps_before(opened):
    with Paid(opened[0]) as paid:
        for stop in ('So the', '.\n\nSo', '\n\n', 'x', 'Next'):
            chunks, whole = paid.ask(stop=stop), paid.ask(stop=stop, stream=False)
            told = [s for c in chunks for s in getattr(c, 'stepwise', None) or ()]
            assert text(chunks) == whole.choices[0].message.content and chunks[-1].usage == whole.usage
            assert [(s['model'], s['tokens']) for s in told] == [(s['model'], s['tokens']) for s in whole.stepwise]

def test_a_stream_that_is_torn_is_an_error_and_is_booked(opened):
    "Part of it was shown, so no other reply may follow; nobody knows the bill, so the most that it can be is booked."
    with Paid(opened[0], faults=['torn'], retries=4) as paid:
        with pytest.raises(openai.APIError, match='the connection broke off'): paid.ask()
        assert len(paid.server.seen) == 1 and paid.book.units >= paid.server.cents*CENT > 0
        assert not paid.book.pending and paid.ask()[-1].usage.cost > 0

def test_nobody_falls_back_behind_a_text_that_was_shown(opened):
    opened[0].fall_back = True
    try:
        with Paid(opened[0], faults=lambda body: 'torn', retries=2) as paid:
            with pytest.raises(openai.APIError, match='broke off'): paid.ask()
        with Paid(opened[0], faults=lambda body: 'reset', retries=2) as paid:
            assert {s['model'] for c in paid.ask() for s in getattr(c, 'stepwise', None) or ()} == {'toy-0'}
    finally: opened[0].fall_back = False

@pytest.mark.parametrize('fault', ['reset', '500', 'malformed', 'no-choices'])
def test_a_stream_that_was_not_begun_is_asked_for_again(opened, fault):
    with Paid(opened[0], faults=[fault, 'ok'], retries=3) as paid:
        assert text(paid.ask()) and len(paid.server.seen) == 2

def test_a_server_without_streams(opened):
    "It refuses, or sends the whole reply at once; both are known from then on, or do no harm."
    with Paid(opened[0], faults=lambda body: 'no-stream') as paid:
        first = paid.ask()
        assert ['stream' in body for body in paid.server.seen] == [True, False] and not paid.large.streams
        assert text(first) == text(paid.ask()) and len(paid.server.seen) == 3
        assert paid.book.units == paid.server.cents*CENT
    with Paid(opened[0], faults=lambda body: 'whole') as paid:
        assert text(paid.ask()) == text(first) and paid.book.units == paid.server.cents*CENT
    with Paid(opened[0], faults=lambda body: 'no-usage' if 'stream' in body else 'ok') as paid:
        with pytest.raises(openai.APIError, match='has no usage record'): paid.ask()
        assert not paid.large.streams and text(paid.ask()) == text(first)
        assert paid.book.units >= paid.server.cents*CENT
    with Paid(opened[0], faults=lambda body: 'bad') as paid: # it is not the stream that is refused
        with pytest.raises(openai.APIError, match='refuses the request'): paid.ask()
        assert paid.large.streams and paid.book.units == 0

def test_the_key_is_in_no_piece(opened, monkeypatch):
    monkeypatch.setenv('MINE', KEY)
    with Paid(opened[0], faults=lambda body: 'echo', key=KEY, key_env='MINE', top_logprobs=0) as paid:
        chunks = paid.ask()
        assert text(chunks).startswith('*'*len(KEY))
        assert not any(KEY[:6] in piece for piece in contents(chunks))

def test_a_stream_in_python(opened):
    "`stream` tells texts to those who ask for them."
    with Paid(opened[0]) as paid:
        async def told(**wish): return [s async for s in paid.router.stream(QUESTIONS[0], LargeOnly(), **wish)]
        with_texts, without = run_async(told(by_token=True)), run_async(told())
        texts = [s.text for s in with_texts if isinstance(s, LiveText)]
        steps = [s.step.text for s in with_texts if s.step]
        assert steps == [s.step.text for s in without] and all(s.step for s in without)
        assert texts == sorted(texts, key=len) and texts[-1] == '\n\n'.join(steps) and len(steps) > 1

def test_a_reply_from_our_own_server_in_pieces():
    "A micro model behind `models.serve`, which streams by step."
    pytest.importorskip('torch')
    from stepwise_routing.models.serve import served
    problem = Problem('micro-gsm', 'x', 'Tom has 3 apples and buys 4 more. How many apples does he have?', '7')
    request = Request(problem, seed=lambda i: 5, to_end=True)
    with served('micro-small') as url, Bills() as book:
        backend = OpenAIBackend('micro-small', 0, book, base_url=url, key_env='', price='free')
        told = []
        steps, again = run_async(backend.write(request, told.append)), run_async(backend.write(request))
        assert steps == again and told and told == sorted(told, key=len)
        assert '\n\n'.join(s.text for s in steps) == told[-1]
