"""What a server of routers survives: clients that vanish, crowds, floods, malformed requests, models that die in the
middle of a stream, and the end of its own process. Crashed 0, hung 0, wrong bill 0."""
import asyncio
import contextlib
import json
import random
import resource
import socket
import subprocess
import sys
import time

import psutil
import pytest
from faulty import Faulty
from micro_router import micro_router, micro_server
from test_live import opened  # noqa: F401
from test_router_server import QUESTIONS, Served, Slow, eventually, hang_up, other_models, user

openai = pytest.importorskip('openai')
from stepwise_routing.base.tools import run_async
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models import serve as models_serve
from stepwise_routing.models.bills import Bills
from stepwise_routing.models.chat import OpenAIBackend
from stepwise_routing.models.ledger import CENT
from stepwise_routing.models.web import SPARE, Limits, most_connections, running
from stepwise_routing.own import export

HEAD = b'POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n'
GET = b'GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n'

def request_bytes(body, head=b''):
    raw = json.dumps(body).encode()
    return HEAD + head + b'Content-Length: %d\r\n\r\n' % len(raw) + raw

def exchange(port, parts, seconds=20):
    "What is answered to bytes, up to the end of the connection. TimeoutError: there is no end."
    said = b''
    with socket.create_connection(('127.0.0.1', port), timeout=seconds) as s:
        try:
            for part in parts: s.sendall(part)
            s.shutdown(socket.SHUT_WR)
        except (ConnectionError, OSError): pass # the server has had enough
        with contextlib.suppress(ConnectionError):
            while part := s.recv(1 << 16): said += part
    return said

async def whole_stream(port, body, seconds=120):
    "All bytes of an answer; b'' where the connection was refused."
    try: reader, writer = await asyncio.open_connection('127.0.0.1', port)
    except ConnectionError: return b''
    said = b''
    try:
        writer.write(request_bytes(body, b'Connection: close\r\n'))
        while part := await asyncio.wait_for(reader.read(1 << 16), seconds): said += part
    except ConnectionError: pass
    finally: writer.close()
    return said

def is_told(said): return b'data: [DONE]' in said or b'"error"' in said

# ---- floods

def malformed():
    "100 kinds of requests that are none."
    good = json.dumps(dict(model='mine', messages=user('?'))).encode()
    size = b'Content-Length: %d\r\n' % len(good)
    lines = [b'', b'\0', b'POST', b'POST /', b'POST  / HTTP/1.1', b'POST / HTTP/9.9', b'POST / HTTP', b'POST / SPDY/1',
             b'/ POST HTTP/1.1', b'P\0ST / HTTP/1.1', b'POST /\x01 HTTP/1.1', b'POST / HTTP/1.1 x', b'\xff\xfe\xfd',
             b'GET', b'GET /../../etc/passwd HTTP/1.1', b'TRACE / HTTP/1.1', b'CONNECT a:1 HTTP/1.1', b'{}',
             b'PRI * HTTP/2.0', b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03']
    for line in lines: yield line + b'\r\nHost: 127.0.0.1\r\n' + size + b'\r\n' + good
    heads = [b'Content-Length: -1', b'Content-Length: x', b'Content-Length: 1e3', b'Content-Length: ' + b'9'*20,
             b'Content-Length: 5\r\nContent-Length: 6', b'Content-Length: 5, 6', b'Content-Length: +5',
             b'Content-Length:',
             b'Transfer-Encoding: gzip', b'Transfer-Encoding: chunked, chunked', b'Transfer-Encoding: x',
             b'Content-Length: 5\r\nTransfer-Encoding: chunked', b': x', b'x', b' x: y', b'a b: c', b'x\0: y', b'x: \0',
             b'Host: a\r\nHost: b', b'Host: 127.0.0.1:x', b'Host: evil.example', b'Host:', b'Expect: x', b'\t',
             b'x: ' + b'y'*70_000, b'Content-Encoding: gzip', b'Content-Type: \xff', b'Origin: null',
             b'Authorization: ' + b'x'*70_000]
    for head in heads: yield HEAD + head + b'\r\n\r\n' + b'{"a": '
    for size_line in (b'x', b'-1', b'fffffffffffffffffff', b'5;', b'5 ', b'', b'\0', b'+5', b'0x5'):
        yield HEAD + b'Transfer-Encoding: chunked\r\n\r\n' + size_line + b'\r\nhello\r\n0\r\n\r\n'
    for n in range(0, len(good), 3): # cut off
        yield HEAD + size + b'\r\n' + good[:n]
    r = random.Random(0)
    for _ in range(40): # damaged
        raw = bytearray(good)
        for _ in range(3): raw[r.randrange(len(raw))] = r.choice(b'\0\xff{}[]"\\,:')
        yield HEAD + size + b'\r\n' + bytes(raw)

@pytest.mark.slow
def test_a_hundred_kinds_of_malformed_requests(opened):
    kinds = [*malformed()]
    assert len(set(kinds)) == len(kinds) >= 100
    with Served(opened[0]) as served:
        for raw in kinds:
            said = exchange(served.port, [raw])
            assert b'"choices"' not in said and (not said or said.startswith(b'HTTP/1.1 ')), raw[:200]
            assert b' 500 ' not in said.split(b'\r\n')[0], (raw[:200], said[:300])
        assert served.ask().choices

@pytest.mark.slow
@pytest.mark.parametrize('how', ['length', 'chunked', 'header', 'line'])
def test_a_flood_is_cut_off(opened, how):
    "A body of 1 GB and a header of 1 MB are refused, and are not kept."
    part = b'x' * (1 << 20)
    heads = dict(length=b'Content-Length: %d\r\n\r\n' % (1 << 30), chunked=b'Transfer-Encoding: chunked\r\n\r\n',
                 header=b'X: ', line=b'')
    pieces = [HEAD + heads[how]] if how != 'line' else [b'POST /']
    n = 1024 if how in ('length', 'chunked') else 1
    def flood():
        yield from pieces
        for _ in range(n): yield b'100000\r\n' + part + b'\r\n' if how == 'chunked' else part
    with Served(opened[0]) as served:
        before = psutil.Process().memory_info().rss
        said = exchange(served.port, flood(), 60)
        assert b' 200 ' not in said and b'"choices"' not in said
        assert psutil.Process().memory_info().rss - before < 200 << 20
        assert served.ask().choices

@pytest.mark.slow
def test_ten_thousand_connections(opened):
    "As many as the system allows up to 10,000: those that are let in are served, the others are told to come again."
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    n, room = min(10_000, (files - 1000)//2 + 500), 2000 # the test holds both ends of those that are let in
    n = min(n, files - room - 500)
    sockets = []
    try:
        with Served(opened[0], connections=room, patience=600.) as served:
            for _ in range(n):
                sockets.append(socket.create_connection(('127.0.0.1', served.port), timeout=30))
            assert eventually(lambda: served.count('errors', reason='too_many_connections') == n - room, 60)
            told = [s.recv(1 << 12) for s in sockets[room:]]
            assert all(t.startswith(b'HTTP/1.1 503 ') and b'Retry-After: 1' in t and b'too many' in t for t in told)
            sockets[7].sendall(GET)
            assert sockets[7].recv(1 << 12).startswith(b'HTTP/1.1 200 ')
            for s in sockets: s.close()
            def answers():
                with contextlib.suppress(openai.APIError): return served.ask().choices
            assert eventually(answers, 60)
    finally:
        for s in sockets: s.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert n > room

@pytest.mark.parametrize('files, room', [(1024, 1024 - SPARE), (10**6, 4096), (9, 1), (resource.RLIM_INFINITY, 4096)])
def test_a_process_keeps_files_for_itself(monkeypatch, files, room):
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (files, files))
    assert most_connections(Limits()) == room

def test_a_connection_too_many_is_told_to_come_again(opened):
    with Served(opened[0], connections=2) as served:
        inside = [socket.create_connection(('127.0.0.1', served.port), timeout=20) for _ in range(2)]
        time.sleep(.1)
        with pytest.raises(openai.InternalServerError, match='too many open connections'): served.ask()
        for s in inside: s.close()
        time.sleep(.1)
        assert served.ask().choices and served.count('errors', reason='too_many_connections') >= 1

# ---- a model that dies

@pytest.mark.slow
def test_a_model_server_that_is_killed_in_the_middle_of_streams(opened):
    "Whoever is being answered gets an end or an error; then the small model alone still answers."
    router = opened[0]
    server = Faulty(delay=.05)
    with Bills() as book:
        server.__enter__()
        large = OpenAIBackend('toy-model', 1, book, base_url=server.url, key_env='', price='gpt-4.1-mini', pause=.01,
                              timeout=5., retries=2)
        with other_models(router, Slow(0), large), Served(router) as served:
            async def all_of_them():
                bodies = [dict(model='mine', stream=True, seed=i, messages=user(QUESTIONS[i])) for i in range(30)]
                asked = [asyncio.ensure_future(whole_stream(served.port, b)) for b in bodies]
                assert await asyncio.to_thread(eventually, lambda: len(server.seen) > 4)
                await asyncio.to_thread(server.__exit__)
                return await asyncio.gather(*asked)
            said = run_async(all_of_them())
            assert all(map(is_told, said)) and any(b'"error"' in s for s in said)
            assert eventually(lambda: not book.pending and not book.reserved)
            assert book.units >= server.cents*CENT and served.ask(model='small').choices

# ---- money

PRICE = '1/0.5/4'

class Counted(models_serve._Chat):
    "A micro model behind the protocol, which keeps its own book."
    def __init__(self, *args):
        super().__init__(*args)
        self.usages, self.busy = [], 0
    async def complete(self, asked):
        self.busy += 1
        try: reply, head = await super().complete(asked)
        finally: self.busy -= 1
        self.usages.append(reply['usage'])
        return reply, head
    async def chunks(self, asked):
        self.busy += 1
        try:
            async with contextlib.aclosing(super().chunks(asked)) as source:
                async for together in source:
                    self.usages += [c['usage'] for c in together if c.get('usage')]
                    yield together
        finally: self.busy -= 1
    @property
    def units(self): return sum(
        (u['prompt_tokens'] - u['prompt_tokens_details']['cached_tokens'])*1_000_000
        + u['prompt_tokens_details']['cached_tokens']*500_000 + u['completion_tokens']*4_000_000 for u in self.usages)

@contextlib.contextmanager
def paid_micro(folder):
    "A router on two micro models behind servers, with prices: (router, servers, book)."
    with contextlib.ExitStack() as stack:
        book = stack.enter_context(Bills())
        chats, models = [], []
        for i, name in enumerate(('micro-small', 'micro-large')):
            chat = Counted(models_serve._open_served(name, 0), name)
            url = stack.enter_context(running(chat, limits=Limits(at_once=4096, patience=600.)))
            options = dict(base_url=url, key_env='', price=PRICE, concurrency=32, timeout=250.)
            models.append(OpenAIBackend(name, i, book, **options))
            chats.append(chat)
        yield stack.enter_context(micro_router(folder, models)), chats, book

@pytest.mark.slow
@pytest.mark.parametrize('n', [100])
def test_streams_of_micro_models_closed_at_random(tmp_path, n):
    "Nothing runs on, and the ledger is exact: what the servers of the models have counted."
    questions = [p.question for p in load_problems('micro-gsm', 'test', n)]
    r = random.Random(7)
    with paid_micro(tmp_path/'p') as (router, chats, book), micro_server(router) as (url, metrics):
        class Place: port = int(url.split(':')[2].split('/')[0])
        async def one(i):
            await asyncio.sleep(r.random()*2)
            await hang_up(Place, dict(model='mine', stream=True, seed=i, messages=user(questions[i])), r.random()*2)
        async def all_of_them(): await asyncio.gather(*map(one, range(n)))
        run_async(all_of_them())
        assert eventually(lambda: not book.pending and not book.reserved and not any(c.busy for c in chats), 120)
        assert book.units == sum(c.units for c in chats) > 0
        assert not any(json.loads(notes).get('uncertain') for *_, notes in book.rows('call'))
        asked = sum(len(c.usages) for c in chats)
        time.sleep(1)
        assert asked == sum(len(c.usages) for c in chats) # nothing runs on
        assert metrics.counts['errors', (('reason', 'hung_up'),)] > 0
        with openai.OpenAI(base_url=url, api_key='x', max_retries=0) as c:
            before = book.units
            reply = c.chat.completions.create(model='mine', messages=user(questions[0]), seed=0)
        assert reply.usage.cost*100*CENT == pytest.approx(book.units - before)

SERVER = '''
import sys
sys.path[:0] = {path!r}
import contextlib
from test_own import Adder, pair_module
from stepwise_routing.models.bills import Bills
from stepwise_routing.models.chat import OpenAIBackend
@contextlib.contextmanager
def open_pair(names, **options):
    with Bills({ledger!r}) as book:
        yield [Adder(0), OpenAIBackend('toy-model', 1, book, base_url={url!r}, key_env='', price='gpt-4.1-mini')]
pair_module.open_models = open_pair
from stepwise_routing.run.cli import main
main(['serve', {folder!r}, '--models', 'toy-0', 'toy-1', '--port', '0'])
'''

@pytest.mark.slow
def test_a_process_that_is_told_to_stop_under_load(opened, tmp_path):
    "SIGTERM: every client gets an end or an error, the book is the server's, and nothing is paid twice."
    export(opened[1], tmp_path/'mine')
    ledger = str(tmp_path/'ledger.db')
    with Faulty(delay=.3) as server:
        code = SERVER.format(path=sys.path, folder=str(tmp_path/'mine'), url=server.url, ledger=ledger)
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with subprocess.Popen([sys.executable, '-c', code], **options) as process:
            port = int(process.stdout.readline().split(':')[2].split('/')[0])
            async def all_of_them():
                def body(i): return dict(model='large', stream=i % 3 > 0, seed=i, messages=user(QUESTIONS[i % 60]))
                bodies = [body(i) for i in range(80)]
                asked = [asyncio.ensure_future(whole_stream(port, b)) for b in bodies[:60]]
                assert await asyncio.to_thread(eventually, lambda: len(server.seen) > 10)
                process.terminate()
                late = []
                for b in bodies[60:]:
                    late.append(asyncio.ensure_future(whole_stream(port, b)))
                    await asyncio.sleep(.02)
                return await asyncio.gather(*asked), await asyncio.gather(*late)
            early, late = run_async(all_of_them())
            out, errors = process.communicate(timeout=60)
        assert (process.returncode, out, errors) == (0, '', '')
        assert len(early) == 60 and all(is_told(s) or b'"choices"' in s for s in early) # an empty one is nothing told
        assert all(not s or is_told(s) or b'"choices"' in s for s in late)
        with Bills(ledger) as book: assert book.units == server.cents*CENT > 0
        bodies = [json.dumps(b, sort_keys=True) for b in server.seen]
        assert len(set(bodies)) == len(bodies)
