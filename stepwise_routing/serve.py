"""A router behind the OpenAI protocol, streamed by step. The models stay synchronous and take lists.

Not here: text by token, stop strings, log-probabilities, TLS (put a proxy in front).
"""

import asyncio
import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field, ValidationError

from .live import answer_text, costs_of
from .method.rollouts import KINDS, Chain, tokens_of
from .models.api import ApiModel, is_loopback
from .records import SEPARATOR, Step

KEY_ENV = 'STEPWISE_ROUTING_KEY'  # environment variable; if it is set, requests must show its value
LONGEST = 1 << 20  # bytes of a request
GATHER = 0.01  # seconds in which requests of several clients come together


# ---- models and walks


def told(error: Exception, model) -> RuntimeError:
    "What clients are told. A bug or a full disk is printed here, with its place."
    if isinstance(error, RuntimeError):
        return error
    traceback.print_exception(error)
    return RuntimeError(f'{type(error).__name__} in {model.spec.name}')


class Collector:
    "Gathers what many clients ask of a model, and calls `write` with the list of it."

    def __init__(self, model):
        self.model = model
        self.asked = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def close(self) -> None:
        "End the thread, which holds the model. Nobody may wait for an answer."
        self.asked.put(None)

    def ask(self, request) -> Future:
        "The steps of a request, as soon as they are written."
        future = Future()
        self.asked.put((request, future))
        return future

    def work(self):
        while True:
            items = [self.asked.get()]
            time.sleep(GATHER)
            while not self.asked.empty():
                items.append(self.asked.get())
            if None in items:
                return
            items = [item for item in items if item[1].set_running_or_notify_cancel()]
            requests, futures = [request for request, _ in items], [future for _, future in items]
            try:
                for future, steps in zip(futures, self.model.write(requests), strict=True):
                    future.set_result(steps)
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(told(error, self.model))


class Caller:
    "The same for a model behind an API: each request is a call of its own, so a slow or refused one holds up no other."

    def __init__(self, model: ApiModel):
        self.model = model
        self.pool = ThreadPoolExecutor(model.concurrency)

    def close(self) -> None:
        "Calls under way end, and their replies are kept."
        self.pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, request) -> Future:
        "The steps of a request, as soon as they are written."
        return self.pool.submit(self.write, request)

    def write(self, request, on_step=None) -> tuple:
        try:
            if on_step:
                return self.model.stream(request, on_step)
            (steps,) = self.model.write([request])
            return steps
        except Exception as error:
            raise told(error, self.model) from None

    async def stream(self, request):
        "The text of each step but the last as soon as it has ended, and at last the steps."
        loop, texts = asyncio.get_running_loop(), asyncio.Queue()

        def put(text):
            loop.call_soon_threadsafe(texts.put_nowait, text)

        future = asyncio.wrap_future(self.pool.submit(self.write, request, put))
        future.add_done_callback(lambda _: texts.put_nowait(None))
        while text := await texts.get():
            yield text
        yield await future


class Written(NamedTuple):
    "A step, and whether the walk keeps it."

    step: Step
    is_kept: bool  # False: the walk threw it away, and its place is written again


async def arriving(collector, request):
    "The steps that answer a request, in tuples that arrive together. Before, the text of each that the model tells."
    if request.to_end and isinstance(collector, Caller):
        async for part in collector.stream(request):
            yield part
    elif request.to_end and collector.model.has_step_seeds:
        for _ in range(request.room):
            steps = await asyncio.wrap_future(collector.ask(replace(request, to_end=False)))
            yield steps
            request = replace(request, steps=request.steps + steps)
            if steps[-1].final:
                return
    else:
        yield await asyncio.wrap_future(collector.ask(request))


async def drive(walk, collectors, book):
    """Yields each `Written` step as soon as it is decided, and at last the `Chain`. Closing it ends the walk.

    An API tells the text of a step before its bill; then the text comes first, and the `Written` step later.
    `book(who, tokens [kind])` is told what was written for each request, also if it is broken off."""
    with contextlib.closing(walk):
        undecided = None  # a step of the small model, which is kept if the next request has it
        place, answer = 0, None
        while True:
            try:
                who, request = walk.send(answer)
            except StopIteration as end:
                if undecided:
                    yield Written(undecided, True)
                yield end.value
                return
            if undecided:
                yield Written(undecided, len(request.steps) > place)
            undecided, place, answer = None, len(request.steps), ()
            try:
                async for part in arriving(collectors[who], request):
                    if isinstance(part, str):
                        yield part
                        continue
                    answer += part
                    for step in part if request.to_end else ():
                        yield Written(step, True)
            finally:
                if answer:
                    book(who, tokens_of(answer))
            if not request.to_end:
                (undecided,) = answer


# ---- the protocol


class Part(BaseModel):
    "A part of a message. Images and sound are refused."

    text: str


class Message(BaseModel):
    role: str
    content: str | list[Part]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return ''.join(part.text for part in self.content)


class StreamOptions(BaseModel):
    include_usage: bool = False


class Chat(BaseModel):
    "What a client asks: the last message is the question. Other fields of the protocol are ignored."

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None


def usage_of(tokens, specs, thrown: int) -> dict:
    "The bill of an answer: tokens of all calls, thrown steps included. `cost` is in US dollars."
    completion, _, prompt, _ = tokens.sum(0).tolist()
    cents = costs_of(tokens, specs, 'cents')
    by_model = {}
    for spec, (written, _, sent, _), cost in zip(specs, tokens.tolist(), cents):
        counts = dict(completion_tokens=written, prompt_tokens=sent)
        by_model[spec.name] = counts | dict(cost=cost / 100)
    return dict(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        completion_tokens_details=dict(rejected_prediction_tokens=thrown),
        cost=sum(cents) / 100,
        by_model=by_model,
    )


def finish_of(chain: Chain) -> str:
    "How an answer ended."
    return 'stop' if chain.steps[-1].finish == 'stop' else 'length'


async def read_chat(http: HttpRequest) -> Chat:
    "The request of a client. HTTPException for a bad one."
    kind = http.headers.get('content-type', '').split(';')[0]
    if kind != 'application/json':  # a web page of another origin cannot send that
        raise HTTPException(415, 'send application/json')
    body = b''
    async for part in http.stream():
        body += part
        if len(body) > LONGEST:
            raise HTTPException(413, f'a request has at most {LONGEST:,} bytes')
    try:
        chat = Chat.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = '.'.join(map(str, first['loc'])) or 'body'
        raise HTTPException(400, f'{where}: {first["msg"]}') from None
    last = chat.messages[-1]
    if last.role != 'user' or not last.text.strip():
        raise HTTPException(400, 'messages: the last one should be a question of the user')
    return chat


def server_key() -> str:
    "The key that requests must show; \"\": none."
    return os.environ.get(KEY_ENV, '').strip()


def check_key(http: HttpRequest) -> None:
    "HTTPException if the key is missing or wrong, or if without one a page of another name asks."
    key = server_key()
    if not key and not is_loopback(str(http.base_url)):  # a web page may give its name our address
        raise HTTPException(403, 'ask this server at its own address, such as 127.0.0.1')
    given = http.headers.get('authorization', '').removeprefix('Bearer ')
    if key and not secrets.compare_digest(given.encode(), key.encode()):
        raise HTTPException(401, 'the API key is missing or wrong')


class Service:
    "A router and its models under their names."

    def __init__(
        self,
        router,  # `live.OwnRouter`
        names: dict,  # name in the protocol -> who decides: "router", "small" or "large"
    ):
        self.router = router
        self.names = names
        self.collectors = []
        for model in router.models:
            kind = Caller if isinstance(model, ApiModel) else Collector
            self.collectors.append(kind(model))
        self.requests = self.open = self.routed = 0
        self.tokens = np.zeros((len(router.models), len(KINDS)), int)  # of all answers
        self.routed_cost = 0.0  # of the answers of the router, in the unit of its promise

    def close(self) -> None:
        "End the threads and let go of the models: FastAPI keeps the functions that it calls."
        for collector in self.collectors:
            collector.close()
        self.router = self.collectors = None

    @property
    def model_names(self) -> list:
        return [spec.name for spec in self.router.specs]

    async def items(self, chat: Chat):
        "As `drive`."
        seed = secrets.randbits(62) if chat.seed is None else chat.seed
        problem = self.router.problem(chat.messages[-1].text)
        who = self.names[chat.model]
        walk = self.router.walk(problem, who, seed)
        self.requests += 1
        self.open += 1
        try:
            async with contextlib.aclosing(drive(walk, self.collectors, self.book)) as items:
                async for item in items:
                    if isinstance(item, Chain) and who == 'router':
                        self.routed += 1
                        unit = self.router.promise.unit
                        self.routed_cost += sum(costs_of(item.tokens, self.router.specs, unit))
                    yield item
        finally:
            self.open -= 1

    def book(self, who: int, tokens: tuple) -> None:
        self.tokens[who] += tokens

    def stats(self) -> dict:
        "What was asked and paid for so far, and what the router has saved against the large model alone."
        promise, specs = self.router.promise, self.router.specs
        cents = costs_of(self.tokens, specs, 'cents')
        models = {}
        for spec, (written, _, sent, _), cost in zip(specs, self.tokens.tolist(), cents):
            counts = dict(completion_tokens=written, prompt_tokens=sent)
            models[spec.name] = counts | dict(cents=cost)
        alone = self.routed * promise.large_cost
        router = dict(answers=self.routed, unit=promise.unit, cost=self.routed_cost)
        router |= dict(large_alone=alone, saved=alone - self.routed_cost)
        return dict(requests=self.requests, open=self.open, models=models, router=router)

    def note(self, item: Written) -> dict:
        "Who wrote a step, how many tokens it has, and whether it was kept."
        name = self.model_names[item.step.model]
        return dict(model=name, tokens=item.step.generated, kept=item.is_kept)

    def head(self, chat: Chat) -> dict:
        name = f'chatcmpl-{secrets.token_hex(12)}'
        return dict(id=name, created=int(time.time()), model=chat.model)

    def usage(self, chain: Chain, steps) -> dict:
        thrown = sum(item.step.generated for item in steps if not item.is_kept)
        return usage_of(chain.tokens, self.router.specs, thrown)

    async def complete(self, chat: Chat, has_gone) -> dict:
        "The whole answer."
        steps, chain = [], None
        async with contextlib.aclosing(self.items(chat)) as items:
            async for item in items:
                if isinstance(item, Chain):
                    chain = item
                    break
                if isinstance(item, Written):
                    steps.append(item)
                if await has_gone():
                    raise HTTPException(499, 'the client has gone')
        text = answer_text(step.text for step in chain.steps)
        message = dict(role='assistant', content=text)
        return ChatCompletion(
            **self.head(chat),
            object='chat.completion',
            choices=[dict(index=0, finish_reason=finish_of(chain), message=message)],
            usage=self.usage(chain, steps),
            stepwise=[self.note(item) for item in steps],
        ).model_dump(exclude_none=True)

    async def events(self, chat: Chat):
        "The answer as server-sent events: a chunk for each step."
        head = self.head(chat)

        def chunk(delta, finish=None, **more):
            choices = [dict(index=0, delta=delta, finish_reason=finish)]
            more = dict(object='chat.completion.chunk', choices=choices) | more
            part = ChatCompletionChunk(**head, **more)
            return f'data: {part.model_dump_json(exclude_none=True)}\n\n'

        steps, lead, early = [], '', 0  # `early`: texts whose step is still to come
        try:
            yield chunk(dict(role='assistant', content=''))
            async with contextlib.aclosing(self.items(chat)) as items:
                async for item in items:
                    if isinstance(item, Chain):
                        yield chunk({}, finish_of(item))
                        options = chat.stream_options
                        if options and options.include_usage:
                            yield chunk({}, choices=[], usage=self.usage(item, steps))
                        break
                    is_text = isinstance(item, str)
                    text, more = item, {}
                    if not is_text:
                        steps.append(item)
                        text = item.step.text if item.is_kept and not early else ''
                        more = dict(stepwise=[self.note(item)])
                    early = early + 1 if is_text else max(early - 1, 0)
                    delta = dict(content=lead + text) if text else {}
                    lead = SEPARATOR if text else lead
                    yield chunk(delta, **more)
        except RuntimeError as error:  # of a model: a cap is reached, a server is gone
            yield f'data: {json.dumps(dict(error=dict(message=str(error))))}\n\n'
        yield 'data: [DONE]\n\n'


def make_app(service: Service) -> FastAPI:
    "An app that serves a router."
    app = FastAPI(openapi_url=None)  # no page that shows the routes

    @app.exception_handler(HTTPException)
    async def refuse(http, error):
        kind = 'invalid_request_error' if error.status_code < 500 else 'server_error'
        return JSONResponse(dict(error=dict(message=error.detail, type=kind)), error.status_code)

    @app.exception_handler(RuntimeError)  # of a model: a cap is reached, a server is gone
    async def fail(http, error):
        return JSONResponse(dict(error=dict(message=str(error), type='server_error')), 503)

    @app.get('/health')
    async def health():
        return dict(status='ok')

    @app.get('/stats')
    async def stats(http: HttpRequest):
        check_key(http)
        return service.stats()

    @app.get('/v1/models')
    async def models(http: HttpRequest):
        check_key(http)
        of_all = dict(object='model', created=0, owned_by='stepwise-routing')
        return dict(object='list', data=[dict(id=name, **of_all) for name in service.names])

    @app.post('/v1/chat/completions')
    async def complete(http: HttpRequest):
        check_key(http)
        chat = await read_chat(http)
        if chat.model not in service.names:
            names = ', '.join(service.names)
            raise HTTPException(404, f'no model {chat.model[:60]!r} here; there are: {names}')
        if chat.stream:
            return StreamingResponse(service.events(chat), media_type='text/event-stream')
        return await service.complete(chat, http.is_disconnected)

    return app


def listen(port: int, host: str) -> socket.socket:
    "A socket that listens. ValueError if other machines could connect without a key; OSError: the port is taken."
    if not is_loopback(f'http://{host}') and not server_key():
        raise ValueError(f'host {host!r} can be reached from elsewhere: put a key into {KEY_ENV}')
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def url_of(listener: socket.socket) -> str:
    "The base_url of a server."
    host, port, *_ = listener.getsockname()
    return f'http://[{host}]:{port}/v1' if ':' in host else f'http://{host}:{port}/v1'


def new_server(service: Service) -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(make_app(service), log_level='warning'))


@contextlib.contextmanager
def running(service: Service, port: int = 0, host: str = '127.0.0.1'):  # base_url
    "A server in a thread of its own, for a `with` block; port 0: any that is free."
    server = new_server(service)
    with listen(port, host) as listener:
        thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def serve(service: Service, port: int = 8000, host: str = '127.0.0.1') -> None:
    "Serve until Ctrl-C or SIGTERM."
    with listen(port, host) as listener, contextlib.suppress(KeyboardInterrupt):
        promise = service.router.promise
        print(promise.warning or f'at {promise.cost:.0%} of the cost: {promise.words}')
        print(f'serving {url_of(listener)}', flush=True)
        new_server(service).run([listener])
