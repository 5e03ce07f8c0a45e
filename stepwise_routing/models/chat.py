"""A model that is paid by the token. No reply is paid for twice, and no paid reply is lost.

Here belongs asking OpenAI or a similar server: the client, the calls in flight, their errors. Reading a reply
belongs in `models.replies`. The book of payments belongs in `models.ledger`.
"""

import asyncio
import contextlib
import json
import math
import random
import re
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from ..data.benchmarks import find_benchmark
from ..records import PRICES, ModelSpec, chat_prompt, find_price, undated
from ..util import digest, nearest, one_line
from . import replies
from .address import is_loopback, plain_address, read_key
from .hub import check_sampling
from .interface import Choice
from .ledger import CENT, Ledger


@dataclass(frozen=True)
class ApiOptions:
    "Where a model is served, who pays, how it samples and how hard it is asked. ValueError for a value out of range."

    base_url: str = 'https://api.openai.com/v1'  # of the server
    key_env: str = 'OPENAI_API_KEY'  # environment variable with the key
    price: str | None = None  # row of `PRICES`, or "free"; None = the row of the model's name
    identity: dict | None = None  # what stands for the server, e.g. a hash; None = its address
    name: str | None = None  # for tables and settings; None = the model's
    params: float = 0.0  # number of parameters, where known
    temperature: float = 0.7  # of sampling; 0 = greedy
    top_p: float = 1.0  # sample from the likeliest tokens up to this mass
    max_tokens: int = 512  # longest step, in tokens
    max_reply: int = 2048  # longest rest of a chain, in tokens
    top_logprobs: int = 5  # alternatives per token, 1 to 20; 0 asks for no log-probabilities
    concurrency: int = 32  # calls in flight
    timeout: float = 60.0  # seconds for one reply
    retries: int = 6  # attempts
    pause: float = 0.5  # seconds; pauses are drawn from 0 up to this, doubled at each attempt
    max_cents: float | None = (
        None  # never spend more, earlier runs with the same ledger included; None = no cap
    )

    def __post_init__(self):
        top = self.top_logprobs
        if self.price not in ('free', None):
            find_price(self.price)
        plain_address(self.base_url)
        if not 0 <= top <= 20:
            raise ValueError(f'top_logprobs={top}: give a number from 0 (none) to 20')
        if not self.timeout > 0:
            raise ValueError(f'timeout={self.timeout}: give seconds above 0')
        counts = {
            k: getattr(self, k) for k in ('max_tokens', 'max_reply', 'concurrency', 'retries')
        }
        check_sampling(self.temperature, self.top_p, **counts)
        for k in ('temperature', 'top_p'):
            object.__setattr__(self, k, float(getattr(self, k)))  # 1 and 1. are one


def price_row(model: str, price: str | None, must: bool) -> str | None:
    "The row of `PRICES` for a model; None for a free model. ValueError if none is known and there `must` be one."
    family = undated(model)
    if price == 'free':
        return None
    if price or family in PRICES:
        return price or family
    if not must:
        return None
    raise ValueError(
        f'no price is known for {model!r}: pass price=, a row of PRICES ({", ".join(PRICES)}), '
        'your own as "INPUT/CACHED/OUTPUT" in US dollars per million tokens, or price="free"'
    )


_ON_SEND = ContextVar(
    'on_send', default=None
)  # called where a request leaves, before its first byte


@lru_cache(None)
def _http_client():  # OpenAI's, as a class
    import openai

    class Client(openai.DefaultAsyncHttpxClient):
        async def send(self, request, **options):
            on_send = _ON_SEND.get()
            body = bytearray()

            async def trace(event, facts):
                post = (
                    event.endswith('send_request_headers.started')
                    and facts['request'].method == b'POST'
                )
                if post and on_send:
                    await on_send()

            request.extensions['trace'] = trace
            reply = await super().send(request, **options | dict(stream=True))
            try:
                async for part in reply.aiter_bytes():
                    body += part
            finally:
                await reply.aclose()
            after = reply.headers.get('retry-after', '').encode('ascii', 'ignore')
            head = {b'content-type': b'application/json', b'retry-after': after}
            return type(reply)(
                reply.status_code, headers=head, content=bytes(body), request=request
            )

    return Client


def api_client(
    key: str,  # "" = none
    base_url: str,  # of the server; proxies are for addresses elsewhere
    timeout,  # seconds
):
    """OpenAI's client, without its retries.

    Each request opens a connection of its own. On one that is kept, a server or a proxy that replies
    twice would answer the next request with the second reply to this one."""
    import openai

    try:
        http = _http_client()(trust_env=not is_loopback(base_url), follow_redirects=False)
    except Exception as error:  # its text may hold a password
        raise ValueError(
            f'the proxy in the environment cannot be used ({type(error).__name__}): check '
            'HTTP_PROXY, HTTPS_PROXY and ALL_PROXY'
        ) from None
    options = dict(timeout=timeout, max_retries=0, http_client=http)
    head = {'Connection': 'close'}
    return openai.AsyncOpenAI(
        api_key=key or 'none', base_url=base_url, default_headers=head, **options
    )


class OpenAIBackend:
    "A model behind an OpenAI-compatible API. RuntimeError if it cannot go on, ValueError for a bad argument."

    def __init__(
        self,
        model: str,  # name in the API
        index: int = 1,  # place among the models of a tree
        ledger=None,  # path of the book of paid replies, or a `Ledger` that several models share
        **options,  # of `ApiOptions`
    ):
        o = self.options = ApiOptions(**options)
        local = is_loopback(o.base_url)
        capped = o.max_cents is not None or getattr(ledger, 'cap', math.inf) < math.inf
        price = price_row(model, o.price, must=capped or not local)
        self.model, self.index, self.spec = (
            model,
            index,
            ModelSpec(o.name or model, o.params, price),
        )
        self.host = urlsplit(o.base_url).netloc
        self.server_id = o.identity or plain_address(o.base_url)  # tells replies apart
        self.where = o.identity or ('loopback' if local else self.server_id)
        self.key = read_key(o.key_env, o.base_url)
        self.slots = asyncio.Semaphore(o.concurrency)
        self.client = api_client(self.key, o.base_url, o.timeout)
        self.owner = not isinstance(ledger, Ledger)
        self.ledger = Ledger(ledger, o.max_cents) if self.owner else ledger
        self.ledger.clients.append(self.client)

    def settings(self):
        "What the draws depend on, as JSON."
        prompt = digest(json.dumps(chat_prompt('?')), replies.CONTINUE)
        names = 'temperature', 'top_p', 'max_tokens', 'max_reply', 'top_logprobs'
        sampling = {k: getattr(self.options, k) for k in names}
        return dict(
            backend='openai', server=self.where, prompt=prompt, model=self.model, **sampling
        )

    async def score(self, request, step):
        raise RuntimeError(f'{self.spec.name}: an API does not score a step that others wrote')

    async def close(self):  # waits for calls in flight; a book that others share stays open
        if self.owner:
            await asyncio.to_thread(self.ledger.close)

    def masked(self, text):
        "Text without the API key."
        return text.replace(self.key, '*' * len(self.key)) if len(self.key) > 7 else text

    async def _refusal(self, error):
        "What an HTTP error means: an `_Outcome` with the reason, and whether to try again."
        status = error.status_code
        env = self.options.key_env
        wait = None
        reason = self.masked(replies.error_reason(error.body) or 'no reason')[:200]
        line = f'{self.model}: the server refuses the request ({status}): {reason}'
        if status == 401:
            line = f'{self.host} refuses the key (401): put a valid one into the environment variable {env}'
        elif status == 403:
            line = f'{self.host} refuses the request, or the key in {env} (403): {reason}'
        elif status < 400:
            line = (
                f'{self.host} sends requests to another address ({status}): give that as base_url'
            )
        elif status == 429 and 'quota' in str(error.code):
            line = f'{self.host}: the quota of the key in {env} is used up'
        elif status in (408, 409, 429) or status >= 500:
            line = f'the server answered {status} ({reason})'
            after = error.response.headers.get('retry-after', '')
            wait = min(float(after), 60.0) if re.fullmatch(r'\d+(\.\d*)?', after) else 0
        elif status == 404:
            names = []
            with contextlib.suppress(Exception):
                listed = await self.client.get('/models', cast_to=str, options=dict(timeout=10))
                listed = json.loads(listed)['data'][:1000]
                names = [self.masked(one_line(m['id']))[:60] for m in listed]
            hint = nearest(self.model, names)
            there = f'it lists: {", ".join(names[:5])}'
            if not names:
                there = 'it lists no models; is base_url right? Most end with /v1'
            line = f'{self.host} has no model {self.model!r}{hint}; {there}'
        return _Outcome(line, units=0, wait=wait)

    def _read(self, text, body):
        "Read the body of an answer: an `_Outcome` with the reply, or with the reason why it is none."
        text = self.masked(text)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return _Outcome('a reply that is not JSON', answer=text)
        usage = replies.read_usage(answer)
        units = usage and _units(self.spec.price, **usage)
        if reason := replies.error_reason(replies.error_in(answer)):
            line = f'the server answers with an error: {reason[:200]}'
            return _Outcome(line, units=units, answer=text)
        try:
            reply = replies.read_reply(answer, 'stop' in body)
        except ValueError as e:
            if usage and (not usage['prompt'] or replies.is_cut(answer)):
                units = None  # it has cost more, or may have
            return _Outcome(str(e), units=units, answer=text)
        lacks = ''
        if reply['usage'] is None:
            units = None
            lacks = (
                'usage record that counts all its tokens, so its cost is unknown; use a server '
                'that sends one'
            )
        elif 'logprobs' in body and reply['tokens'] is None:
            lacks = 'log-probabilities; pass top_logprobs=0 to do without (and without S^API)'
        elif (reply['tokens'] or not reply['text']) and replies.has_thoughts(answer):
            lacks = (
                'text alone: the model thinks first, apart from it, and its steps cannot be told from '
                'its thoughts; switch thinking off, or start the server without a reasoning parser'
            )
        if lacks:
            return _Outcome(f'{self.model}: the reply has no {lacks}', None, units, None, text)
        return _Outcome(reply=reply, units=units)

    async def _attempt(self, body):
        "Ask once."
        import openai

        limit = self.options.timeout
        call = self.client.post('/chat/completions', cast_to=str, body=body)
        try:
            return self._read(await asyncio.wait_for(call, limit), body)
        except openai.APIStatusError as e:
            return await self._refusal(e)
        except Exception as e:
            if not transport(e):
                raise
            late = isinstance(e, (openai.APITimeoutError, asyncio.TimeoutError))
            why = f'no reply within {limit:g} s' if late else 'the connection broke off'
            return _Outcome(str(e) if type(e) is ConnectionError else why)  # our own says more

    async def _billed(self, key, body):
        "One attempt, put down in the ledger: before it at the most it can cost, after it at what it did cost."
        worst = _units(self.spec.price, _most_prompt(body), body['max_tokens'])
        outcome = _Outcome('interrupted')
        call = await self.ledger.reserve(key, worst)
        sent = []

        async def on_send():
            await self.ledger.send(call)
            sent.append(call)

        _ON_SEND.set(on_send)
        try:
            outcome = await self._attempt(body)
            outcome = outcome._replace(why=self.masked(outcome.why)[:500])
        finally:
            if not sent and outcome.units is None:
                outcome = _Outcome(f'no connection to {self.host}', units=0)
            units = worst if outcome.units is None else outcome.units
            await self.ledger.settle(
                call,
                units,
                outcome.reply,
                why=outcome.why,
                answer=outcome.answer[: 1 << 16],
                uncertain=outcome.units is None,
            )
        if units <= worst:
            return outcome
        line = (
            f'{self.model}: the server bills more than {worst / CENT:.4f} cents for a call that '
            'could cost no more; no new call is made, those in flight end and are kept'
        )
        self.ledger.stop(RuntimeError(line))
        raise self.ledger.broken

    async def _reply_with_retries(self, key, body):
        "A reply that is in the ledger; RuntimeError where there is none to be had."
        closing = self.ledger.closing
        retries = self.options.retries
        async with self.slots:
            for attempt in range(retries):
                if closing.is_set():
                    raise RuntimeError(f'{self.model}: closed before it answered')
                outcome = await self._billed(key, body)
                why = outcome.why
                if outcome.reply:
                    return outcome.reply
                if outcome.wait is None:
                    raise RuntimeError(why)
                if attempt + 1 == retries:
                    break
                pause = outcome.wait + random.uniform(0, min(self.options.pause * 2**attempt, 30))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(closing.wait(), pause)
            raise RuntimeError(
                f'{self.model}: no reply after {retries} attempts; the last one: {why}'
            )

    async def ask(
        self,
        messages,  # of the chat
        max_tokens: int,  # of the reply
        seed: int,  # of the draw
        **more,  # other fields of the request: stop, temperature, top_logprobs
    ) -> dict:  # of `read_reply`
        "The reply to a conversation, from the ledger or the server. RuntimeError if there is no reply."
        o = self.options
        top = more.pop('top_logprobs', self.options.top_logprobs)
        body = (
            dict(
                model=self.model,
                messages=messages,
                max_tokens=max_tokens,
                seed=seed,
                temperature=o.temperature,
                top_p=o.top_p,
            )
            | more
        )
        if top:
            body |= dict(logprobs=True, top_logprobs=top)
        key = digest(json.dumps(dict(at=self.server_id, body=body), sort_keys=True), size=16)
        return await self.ledger.run(
            self.ledger.once(key, lambda: self._reply_with_retries(key, body))
        )

    async def write(self, request) -> tuple:
        "The steps of a reply to a `Request`, its guards included."
        seed = int(request.seed(0))
        max_tokens = self.options.max_tokens
        max_steps = 1
        benchmark = find_benchmark(request.problem.benchmark)
        stop = dict(stop=benchmark.separator)
        if request.to_end:
            max_tokens = self.options.max_reply
            max_steps = max(1, request.max_steps - len(request.steps))
            stop = {}

        async def ask_for_steps(seed, **stop):
            messages = replies.step_messages(request)
            reply = await self.ask(messages, max_tokens, seed, **stop)
            return replies.reply_steps(reply, self.index, max_steps, bool(stop), benchmark)

        steps = await ask_for_steps(seed, **stop)
        hidden = self.options.top_logprobs and not steps[0].prob  # see `replies.MOST_HIDDEN`
        if (hidden or not steps[0].text) and steps[0].finish == 'step':
            steps = (replies.add_bill(*await ask_for_steps(seed), *steps),)
        fresh = replies.drop_repeats(steps, request.steps)
        if fresh or not request.steps:
            return fresh
        first, *rest = await ask_for_steps(int(digest('another', seed), 16) >> 1, **stop)
        return replies.add_bill(first, *steps), *rest

    async def choose(self, messages, options) -> Choice:
        "How likely each option is as the next reply."
        top = 20 if self.options.top_logprobs else 0
        reply = await self.ask(list(messages), 1, 0, temperature=0.0, top_logprobs=top)
        first = reply['tokens']['first'] if top else [(reply['text'], 0.0)]
        return Choice(replies.option_probs(first, options), **reply['usage'])


class _Outcome(NamedTuple):
    "The result of one attempt."

    why: str = ''  # reason why there is no reply
    reply: object = None  # of `read_reply`
    units: int | None = None  # of its bill; None = unknown
    wait: float | None = (
        0.0  # seconds the server asked to wait, at most a minute; None: another attempt has no point
    )
    answer: str = ''  # text that was paid for and is not a reply, kept as evidence


def _most_prompt(body) -> int:
    "The most tokens that a request's prompt can have: one per byte, and a few per message for the template."
    texts = [message['content'].encode('utf-8', 'surrogatepass') for message in body['messages']]
    return 64 + sum(len(text) + 16 for text in texts)


def _units(price, prompt, generated, cached=0):
    "The cost of a call in units (10^-10 cents): input, cached input and output have their own prices."
    if price is None:
        return 0
    row = find_price(price)
    pairs = (prompt - cached, row.input), (cached, row.cached), (generated, row.output)
    return sum(tokens * round(dollars * 1e6) for tokens, dollars in pairs)


def transport(error) -> bool:
    "Did the connection fail, and not our own code?"
    import openai

    below = type(error).__module__.startswith(
        ('httpx', 'httpcore', 'h11')
    )  # what the client library lets through
    return below or isinstance(error, (openai.APIConnectionError, OSError, asyncio.TimeoutError))
