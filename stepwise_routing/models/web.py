"""An HTTP server for the OpenAI protocol: addresses, keys, limits, streams, errors.

We use Tornado because Jupyter installs it anyway. It tells a handler when its client hangs up, and it
waits for slow readers. Here belongs HTTP only. Reading a request belongs in `models.chat_request`. The
answers belong in `models.answers`.
"""

import asyncio
import contextlib
import hmac
import json
import time
from typing import Protocol
from urllib.parse import unquote

from ..base.background import LoopThread
from ..base.settings import Count, Positive, Section, Whole
from ..base.tools import one_line
from .address import is_loopback
from .metrics import Metrics

KNOWN = {  # path -> the method that it takes
    '/health': 'GET',
    '/metrics': 'GET',
    '/v1/models': 'GET',
    '/v1/chat/completions': 'POST',
}


class Refused(Exception):
    "An error for a client: HTTP status and one line. The server sends it instead of a reply."

    def __init__(self, status, line, param=None, code=None, headers=()):
        super().__init__(status, line)
        self.status = status
        self.line = one_line(line)  # a part of it may be the client's
        self.param = param and one_line(param)  # field that is wrong
        self.code = code  # as OpenAI has it
        self.headers = dict(headers)


class Limits(Section):
    "Limits of a server: what it accepts and how long it waits."

    body: Count = 1 << 22  # bytes of a request
    header: Count = 1 << 16  # bytes of its head
    at_once: Count = 256  # requests that are being answered
    waiting: Whole = 256  # requests that wait for their turn
    connections: Count = 4096  # open at once; fewer where the system allows fewer
    ping: Positive = 5.0  # seconds after which a stream shows that it is alive
    patience: Positive = 60.0  # seconds for a client to send its request, or to read on
    grace: Positive = 30.0  # seconds for calls under way, after the server was told to stop


class Service(Protocol):
    "What a server needs of the models or routers that it serves."

    def models(self) -> list:
        "The records of /v1/models."

    def read(self, raw: bytes):
        "Read and check a request; its `stream` decides the form of the answer. `Refused` for a bad one."

    async def complete(self, request) -> tuple:
        "Returns (the whole answer, headers)."

    def chunks(self, request):
        "An async generator of lists of chunks that go out together, the first one with the first step."


def error_body(refused: Refused) -> dict:
    "The body of an error reply, in OpenAI's form."
    kind = 'invalid_request_error' if refused.status < 500 else 'server_error'
    error = dict(message=refused.line, type=kind, param=refused.param, code=refused.code)
    return dict(error=error)


def as_refused(error: Exception) -> Refused:
    "Turn any error into one that a client may see."
    if isinstance(error, Refused):
        return error
    line = (str(error).splitlines() or [''])[0]
    if line.startswith('cap reached'):
        headers = {'x-should-retry': 'false'}
        return Refused(429, line, code='insufficient_quota', headers=headers)
    return Refused(500, f'{type(error).__name__}: {line}', code='server_error')


BUSY = Refused(
    429, 'too many requests: try again', code='rate_limit_exceeded', headers={'Retry-After': '1'}
)
STOPPING = Refused(
    503, 'the server is being shut down', code='shutting_down', headers={'Retry-After': '5'}
)


class Gate:
    "Decides which requests are let in, and how many at once."

    def __init__(self, limits: Limits, key: str, is_local: bool):
        self.limits = limits
        self.key = key
        self.is_local = is_local  # does the server listen on this machine alone?
        self.slots = asyncio.Semaphore(limits.at_once)
        self.inside = 0  # requests that are answered or wait
        self.tasks = set()  # that answer
        self.stopping = False

    def check_origin(self, headers) -> None:
        "`Refused` if a web page asks, or if the Host header has another name for this machine."
        host = headers.get('Host', '')
        origin = headers.get('Origin')
        known = is_loopback(f'http://{host}') or not self.is_local
        if origin is not None and not is_loopback(origin):
            known = known and not self.is_local and origin.partition('://')[2] == host
        if not known:
            line = 'this server answers no web pages: call it from a program, at its own address'
            raise Refused(403, line, code='forbidden')

    def check_key(self, headers) -> None:
        "`Refused` if the key is missing or wrong."
        given = headers.get('Authorization', '').removeprefix('Bearer ').encode()
        if self.key and not hmac.compare_digest(given, self.key.encode()):
            line = 'the API key is missing or wrong: send the key of this server'
            raise Refused(401, line, code='invalid_api_key')

    @contextlib.asynccontextmanager
    async def place(self):
        "A place for a request, for a `with` block. `Refused` if all are taken, or the server stops."
        if self.stopping:
            raise STOPPING
        if self.inside >= self.limits.at_once + self.limits.waiting:
            raise BUSY
        self.inside += 1
        try:
            async with self.slots:
                yield
        finally:
            self.inside -= 1


def make_application(service: Service, gate: Gate, metrics: Metrics):
    "A Tornado application."
    from tornado.web import Application

    shared = dict(service=service, gate=gate, metrics=metrics)
    return Application([('.*', handler_class(), shared)], log_function=lambda handler: None)


def handler_class():
    "The handler class for all addresses. It is made on demand, because Tornado is imported then."
    from tornado.iostream import StreamClosedError
    from tornado.web import RequestHandler, stream_request_body

    @stream_request_body
    class Handler(RequestHandler):
        task = None  # that answers

        def initialize(self, service, gate, metrics):
            self.service = service
            self.gate = gate
            self.metrics = metrics
            self.parts = []
            self.size = 0
            self.is_streaming = False

        def set_default_headers(self):
            self.clear_header('Server')

        def prepare(self):
            self.request.connection.set_max_body_size(1 << 62)  # we say ourselves what is too much
            length = self.request.headers.get('Content-Length', '0')
            length = length[:20]  # more digits say nothing more: it is too much
            try:
                self.gate.check_origin(self.request.headers)
                if self.request.path != '/health':
                    self.gate.check_key(self.request.headers)
                self.check_size(int(length) if length.isdecimal() else 0)
            except Refused as refused:
                self.refuse(refused)

        def check_size(self, size):
            if size > self.gate.limits.body:
                line = f'the request has {size} bytes, this server takes {self.gate.limits.body}'
                raise Refused(413, line, code='request_too_large')

        def data_received(self, chunk):
            self.size += len(chunk)
            if self._finished:
                return
            try:
                self.check_size(self.size)
            except Refused as refused:
                self.refuse(refused)
            else:
                self.parts.append(chunk)

        def write_error(self, status_code, **_):
            "Answer to what Tornado itself refuses, such as an unknown method."
            line = f'the server does not answer this: {self.request.method[:20]}, {self._reason}'
            self.refuse(Refused(status_code, line, code='not_served'))

        def refuse(self, refused):
            "Answer with an error, once."
            self.metrics.error(refused.code or str(refused.status))
            self.parts.clear()
            if self._finished:
                return
            self.clear()
            self.set_status(refused.status)
            for name, value in refused.headers.items():
                self.set_header(name, value)
            if refused.status in (401, 403, 413, 503):
                self.set_header('Connection', 'close')
            self.finish(error_body(refused))

        async def answer(self):
            if self._finished:
                return
            self.task = asyncio.current_task()
            self.gate.tasks.add(self.task)
            try:
                await self.answer_at(self.request.method, self.request.path)
            except asyncio.CancelledError:
                self.metrics.error('hung_up' if not self.gate.stopping else 'shutting_down')
                if self.gate.stopping:
                    await self.fail(STOPPING)
            except (StreamClosedError, asyncio.TimeoutError):
                self.metrics.error('hung_up')
                self.close_connection()
            except Exception as error:
                await self.fail(as_refused(error))
            finally:
                self.gate.tasks.discard(self.task)
                self.task = None

        get = post = put = delete = patch = options = head = answer

        async def answer_at(self, method, path):
            takes = 'GET' if path.startswith('/v1/models/') else KNOWN.get(path)
            if not takes:
                raise Refused(404, f'nothing is served at {path[:100]}', code='not_found')
            if method != takes:
                raise Refused(405, f'{path[:100]} takes {takes} alone', code='method_not_allowed')
            if path == '/v1/chat/completions':
                return await self.chat()
            if path == '/health':
                self.finish(dict(status='stopping' if self.gate.stopping else 'ok'))
            elif path == '/metrics':
                self.set_header('Content-Type', 'text/plain; version=0.0.4')
                self.finish(self.metrics.text())
            elif path == '/v1/models':
                self.finish(dict(object='list', data=self.service.models()))
            else:
                self.finish(self.one_model(unquote(path.removeprefix('/v1/models/'))))

        def one_model(self, name):
            for model in self.service.models():
                if model['id'] == name:
                    return model
            raise Refused(404, f'no model {name[:100]!r} here', code='model_not_found')

        async def chat(self):
            self.metrics.count('requests')
            request = self.service.read(b''.join(self.parts))
            self.parts.clear()
            async with self.gate.place():
                if getattr(request, 'stream', False):
                    async with contextlib.aclosing(self.service.chunks(request)) as chunks:
                        return await self.send_stream(chunks)
                body, headers = await self.service.complete(request)
            for name, value in headers.items():
                self.set_header(name, value)
            self.finish(body)

        async def send_stream(self, chunks):
            "Chunks as soon as they are there; meanwhile a sign of life."
            pinging = asyncio.ensure_future(self.ping())
            try:
                async for together in chunks:
                    await self.send(''.join(map(event, together)))
            finally:
                pinging.cancel()
            self.write('data: [DONE]\n\n')
            await self.taken(self.finish())

        async def ping(self):
            "A comment now and then, while nothing else is sent."
            pause = self.gate.limits.ping
            self.sent_at = time.monotonic()
            while True:
                quiet = time.monotonic() - self.sent_at
                await asyncio.sleep(max(pause - quiet, 0) or pause)
                stream = self.request.connection.stream
                is_quiet = time.monotonic() - self.sent_at >= pause
                if is_quiet and stream and not stream.writing():
                    self.emit(': ping\n\n')  # nobody waits for it: who sends a chunk waits for both

        async def send(self, text):
            "Write a part of a stream. TimeoutError: the client reads too slowly."
            await self.taken(self.emit(text))

        async def taken(self, future):
            "Wait until the client has taken what was written. Mostly it has by now."
            stream = self.request.connection.stream
            if stream is None or stream.closed() or stream.writing():
                await asyncio.wait_for(future, self.gate.limits.patience)

        def emit(self, text):
            "Write a part of a stream; a future of when the client has taken it."
            self.sent_at = time.monotonic()
            if not self.is_streaming:
                self.is_streaming = True
                self.set_header('Content-Type', 'text/event-stream')
                self.set_header('Cache-Control', 'no-cache')
                self.set_header('X-Accel-Buffering', 'no')
            self.write(text)
            return self.flush()

        async def fail(self, refused):
            "Send an error: as an HTTP status before the first byte, later as an event that ends the stream."
            if not self.is_streaming:
                return self.refuse(refused)
            self.metrics.error(refused.code or str(refused.status))
            with contextlib.suppress(StreamClosedError, asyncio.TimeoutError):
                await self.send(event(error_body(refused)))
                await self.finish()
            self.close_connection()

        def close_connection(self):
            stream = self.request.connection.stream
            if stream:
                stream.close()

        def on_connection_close(self):
            if self.task:
                self.task.cancel()

        def log_exception(self, *error):
            "Logs nothing: a log could hold questions. The metrics count the error."

    return Handler


SPARE = 128  # files that a process needs besides its connections
FULL = Refused(503, 'too many open connections: try again', code='too_many_connections')


def most_connections(limits: Limits) -> int:
    "The most open connections that leave the process enough files to open."
    try:
        import resource
    except ImportError:  # Windows
        return limits.connections
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.connections
    return max(1, min(limits.connections, files - SPARE))


def raw_reply(refused: Refused) -> bytes:
    "An error reply as bytes, for a connection without a handler."
    body = json.dumps(error_body(refused)).encode()
    head = (
        f'HTTP/1.1 {refused.status} Service Unavailable\r\nContent-Type: application/json\r\n'
        f'Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n'
    )
    return head.encode() + body


def door_class():
    "An HTTP server that turns connections away when too many are open."
    from tornado.httpserver import HTTPServer
    from tornado.iostream import StreamClosedError

    class Door(HTTPServer):
        room = 1  # open connections
        inside = 0  # of these, open now
        metrics = None

        def handle_stream(self, stream, address):
            if self.inside >= self.room:
                self.metrics.error(FULL.code)
                return self.turn_away(stream)
            self.inside += 1
            super().handle_stream(stream, address)

        def on_close(self, connection):
            super().on_close(connection)
            self.inside -= 1

        async def turn_away(self, stream):
            with contextlib.suppress(StreamClosedError):
                await stream.write(raw_reply(FULL))
            stream.close()

    return Door


def event(value: dict) -> str:
    return f'data: {json.dumps(value)}\n\n'


class Server:
    "A server that listens. Create it in the event loop that it runs in."

    def __init__(self, service, sockets, key='', limits=Limits(), is_local=True, metrics=None):
        self.limits = limits
        self.gate = Gate(limits, key, is_local)
        self.metrics = metrics or Metrics()
        self.application = make_application(service, self.gate, self.metrics)
        self.http = door_class()(
            self.application,
            max_body_size=1 << 62,
            max_header_size=limits.header,
            idle_connection_timeout=limits.patience,
            body_timeout=limits.patience,
        )
        self.http.room = most_connections(limits)
        self.http.metrics = self.metrics
        self.http.add_sockets(sockets)

    async def stop(self) -> None:
        "Take no new request, let calls under way end, and after `grace` seconds end them with an error."
        self.gate.stopping = True
        self.http.stop()
        end = time.monotonic() + self.limits.grace
        while self.gate.inside and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for task in list(self.gate.tasks):
            task.cancel()
        end = time.monotonic() + 5
        while self.gate.inside and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self.http.close_all_connections()


KEY_ENV = 'STEPWISE_ROUTING_KEY'  # environment variable with the key that requests must show


def listen(host: str, port: int) -> list:
    "Sockets at an address. OSError in one line, ValueError for a number that no port has."
    from tornado.netutil import bind_sockets

    if not 0 <= port < 2**16:
        raise ValueError(
            f'port {port} does not exist: give one from 1 to 65535, or 0 for any free one'
        )
    try:
        return bind_sockets(port, host)
    except OSError as error:
        raise OSError(f'{host}, port {port}, cannot be used: {error.strerror or error}') from None


@contextlib.contextmanager
def running(
    service: Service,
    port: int = 0,  # 0: any that is free
    host: str = '127.0.0.1',  # another one than this machine takes a key
    key: str = '',  # that every request must show; '': none
    limits: Limits = Limits(),
    metrics: Metrics | None = None,
):  # base_url
    "A server in a thread of its own, for a `with` block. ValueError if others can reach it without a key."
    is_local = is_loopback(f'http://{host}')
    if not is_local and not key:
        raise ValueError(
            f'host {host!r} can be reached from elsewhere: put a key into the environment variable '
            f'{KEY_ENV}, or listen on 127.0.0.1'
        )
    sockets = listen(host, port)
    loop = LoopThread('server')

    async def start():
        return Server(service, sockets, key, limits, is_local, metrics)

    try:
        server = loop.result(start())
        try:
            yield f'http://{host}:{sockets[0].getsockname()[1]}/v1'
        finally:
            loop.result(server.stop())
    finally:
        loop.close()
