"""An HTTP server for the OpenAI protocol: addresses, keys, streams, errors.

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

from ..util import one_line
from .address import is_loopback
from .background import LoopThread

BODY = 1 << 22  # bytes of a request at most
PATIENCE = 60.0  # seconds for a client to send its request
GRACE = 30.0  # seconds for calls under way, after the server was told to stop
KEY_ENV = 'STEPWISE_ROUTING_KEY'  # environment variable with the key that requests must show


class Refused(Exception):
    "An error for a client: HTTP status and one line. The server sends it instead of a reply."

    def __init__(self, status, line, param=None, code=None, headers=()):
        super().__init__(status, line)
        self.status = status
        self.line = one_line(line)  # a part of it may be the client's
        self.param = param and one_line(param)  # field that is wrong
        self.code = code  # as OpenAI has it
        self.headers = dict(headers)


class Service(Protocol):
    "What a server needs of the models or routers that it serves."

    def models(self) -> list:
        "The records of /v1/models."

    def read(self, raw: bytes):
        "Read and check a request; its `stream` decides the form of the answer. `Refused` for a bad one."

    async def complete(self, request) -> dict:
        "Returns the whole answer."

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


STOPPING = Refused(503, 'the server is being shut down', code='shutting_down')


def event(value: dict) -> str:
    return f'data: {json.dumps(value)}\n\n'


def handler_class():
    "The handler class for all addresses. It is made on demand, because Tornado is imported then."
    from tornado.iostream import StreamClosedError
    from tornado.web import RequestHandler

    class Handler(RequestHandler):
        task = None  # that answers
        is_streaming = False

        def initialize(self, server):
            self.server = server

        def set_default_headers(self):
            self.clear_header('Server')

        def check_origin(self):
            "`Refused` if a web page asks, or if the Host header has another name for this machine."
            host = self.request.headers.get('Host', '')
            origin = self.request.headers.get('Origin')
            is_local = self.server.is_local
            known = is_loopback(f'http://{host}') or not is_local
            if origin is not None and not is_loopback(origin):
                known = known and not is_local and origin.partition('://')[2] == host
            if not known:
                line = (
                    'this server answers no web pages: call it from a program, at its own address'
                )
                raise Refused(403, line, code='forbidden')

        def check_key(self):
            "`Refused` if the key is missing or wrong."
            key = self.server.key.encode()
            given = self.request.headers.get('Authorization', '').removeprefix('Bearer ').encode()
            if key and not hmac.compare_digest(given, key):
                line = 'the API key is missing or wrong: send the key of this server'
                raise Refused(401, line, code='invalid_api_key')

        def write_error(self, status_code, **_):
            "Answer to what Tornado itself refuses, such as an unknown method."
            line = f'the server does not answer this: {self.request.method[:20]}, {self._reason}'
            self.refuse(Refused(status_code, line, code='not_served'))

        def refuse(self, refused):
            "Answer with an error."
            self.clear()
            self.set_status(refused.status)
            for name, value in refused.headers.items():
                self.set_header(name, value)
            self.finish(error_body(refused))

        async def answer(self):
            self.task = asyncio.current_task()
            self.server.tasks.add(self.task)
            try:
                self.check_origin()
                await self.answer_at(self.request.method, self.request.path)
            except asyncio.CancelledError:  # the client has gone, or the server ends
                if self.server.is_stopping:
                    await self.fail(STOPPING)
            except StreamClosedError:
                pass
            except Exception as error:
                await self.fail(as_refused(error))
            finally:
                self.server.tasks.discard(self.task)
                self.task = None

        get = post = put = delete = patch = options = head = answer

        async def answer_at(self, method, path):
            if (method, path) == ('GET', '/health'):
                self.finish(dict(status='stopping' if self.server.is_stopping else 'ok'))
                return
            self.check_key()
            if (method, path) == ('GET', '/v1/models'):
                self.finish(dict(object='list', data=self.server.service.models()))
            elif (method, path) == ('POST', '/v1/chat/completions'):
                await self.chat()
            else:
                line = f'nothing is served at {method} {path[:100]}'
                raise Refused(404, line, code='not_found')

        async def chat(self):
            service = self.server.service
            if self.server.is_stopping:
                raise STOPPING
            request = service.read(self.request.body)
            if not request.stream:
                self.finish(await service.complete(request))
                return
            async with contextlib.aclosing(service.chunks(request)) as chunks:
                async for together in chunks:
                    await self.send(''.join(map(event, together)))
            await self.send('data: [DONE]\n\n')
            await self.finish()

        async def send(self, text):
            "Write a part of a stream, and wait until the client has taken it."
            if not self.is_streaming:
                self.is_streaming = True
                self.set_header('Content-Type', 'text/event-stream')
                self.set_header('Cache-Control', 'no-cache')
                self.set_header('X-Accel-Buffering', 'no')
            self.write(text)
            await self.flush()

        async def fail(self, refused):
            "Send an error: as an HTTP status before the first byte, later as an event that ends the stream."
            if not self.is_streaming:
                return self.refuse(refused)
            with contextlib.suppress(StreamClosedError):
                await self.send(event(error_body(refused)))
                await self.finish()

        def on_connection_close(self):
            if self.task:
                self.task.cancel()

        def log_exception(self, *error):
            "Logs nothing: a log could hold questions."

    return Handler


class Server:
    "A server that listens. Create it in the event loop that it runs in."

    def __init__(
        self,
        service: Service,
        sockets,
        key: str = '',  # that every request must show; '': none
        is_local: bool = True,  # does it listen on this machine alone?
    ):
        from tornado.httpserver import HTTPServer
        from tornado.web import Application

        self.service = service
        self.key = key
        self.is_local = is_local
        self.is_stopping = False
        self.tasks = set()  # that answer
        application = Application(
            [('.*', handler_class(), dict(server=self))], log_function=lambda handler: None
        )
        self.http = HTTPServer(application, max_body_size=BODY, body_timeout=PATIENCE)
        self.http.add_sockets(sockets)

    async def stop(self) -> None:
        "Take no new request, let calls under way end, and after `GRACE` seconds end them with an error."
        self.is_stopping = True
        self.http.stop()
        await self.until_idle(GRACE)
        for task in list(self.tasks):
            task.cancel()
        await self.until_idle(5)
        await self.http.close_all_connections()

    async def until_idle(self, seconds) -> None:
        end = time.monotonic() + seconds
        while self.tasks and time.monotonic() < end:
            await asyncio.sleep(0.02)


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
        return Server(service, sockets, key, is_local)

    try:
        server = loop.result(start())
        try:
            yield f'http://{host}:{sockets[0].getsockname()[1]}/v1'
        finally:
            loop.result(server.stop())
    finally:
        loop.close()
