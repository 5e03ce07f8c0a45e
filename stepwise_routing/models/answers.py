"""A router's steps as an answer of the OpenAI protocol, whole or in chunks.

Here belong the fields of an answer: text, who wrote it, usage, finish, log-probabilities. How steps
are made belongs in `method.live`. The fields of a request belong in `models.chat_request`.

A whole answer has two headers: how often it was handed over, and who wrote its last step. The headers
of a stream are sent before this is known, so its last chunk holds both in `stepwise_summary`. The body
of a whole answer has this field too.
"""

import contextlib
import math
import secrets
import sys
import time
from dataclasses import dataclass, field

from ..base.records import api_cost
from ..base.tools import nearest, unfinished
from .chat_request import ChatRequest, read_request
from .metrics import Metrics
from .web import Refused

NEVER = -9999.0  # the protocol's log-probability of an impossible token
HANDED = ('hand_over', 'reject')  # decisions after which a larger model writes


@dataclass(frozen=True)
class Served:
    "A name that requests may ask for."

    name: str  # "my-router", "my-router@alpha=0.05", "small", "large"
    owner: object  # has stream(messages, router, **wish), check(messages), specs and separator
    router: object  # who decides, for `owner.stream`
    fingerprint: str  # two routers that answer alike have the same one
    points: dict = field(default_factory=dict)  # alpha -> `Served`; the same router at other points

    def at(self, alpha: float | None) -> 'Served':
        "The same router, calibrated for another alpha. `Refused` if it is not calibrated for that."
        if alpha is None:
            return self
        for known, served in self.points.items():
            if math.isclose(known, alpha):
                return served
        known = ', '.join(f'{a:g}' for a in self.points) or 'none'
        line = f'stepwise.alpha={alpha:g}: {self.name} is calibrated for: {known}'
        raise Refused(400, line, param='stepwise.alpha', code='invalid_value')


def usage_of(calls, specs) -> dict:
    "The bill of an answer: tokens of all calls, rejected drafts included. `cost` is in US dollars."
    prompt = sum(call.prompt for call in calls)
    completion = sum(call.generated for call in calls)
    cached = sum(call.billed if specs[call.model].price else call.cached for call in calls)
    rejected = sum(call.generated for call in calls if call.kind == 'draft')
    return dict(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=dict(cached_tokens=cached),
        completion_tokens_details=dict(rejected_prediction_tokens=rejected),
        cost=api_cost(calls, specs) / 100,
    )


def step_note(live) -> dict:
    "A dict for the client: who wrote a step, and what the router decided after it."
    return dict(
        model=live.model,
        tokens=live.step.generated,
        score=live.score,
        threshold=live.threshold,
        decision=live.decision,
        seconds=round(live.seconds, 6),
    )


def token_texts(step, lead: str) -> list:
    "(Text, probability) of each token of a step. `lead` is the text before the step."
    pairs = []
    before = 0
    for end, prob in zip(step.ends, step.prob):
        text = step.text[before:end]
        before = max(end, before)
        if not pairs:
            text = lead + text
        if text:
            pairs.append((text, prob))
    if pairs and before < len(step.text):
        text, prob = pairs[-1]
        pairs[-1] = text + step.text[before:], prob
    return pairs


def token_record(text: str, prob: float) -> dict:
    "One token's record of log-probabilities, in the protocol's form."
    logprob = max(math.log(prob), NEVER) if prob > 0 else NEVER
    return dict(token=text, bytes=list(text.encode()), logprob=logprob, top_logprobs=[])


class StopText:
    "Shows text up to the first stop string. Text that may begin a stop string is held back."

    def __init__(self, stops=()):
        self.stops = stops
        self.waiting = ''
        self.has_ended = False
        self.end = 0  # of all text that was taken; where a stop string was found, of that

    def feed(self, text: str) -> str:
        "Take more text; return the text that may be shown now."
        self.waiting += text
        self.end += len(text)
        places = [(self.waiting.find(stop), len(stop)) for stop in self.stops]
        found = [(place + size, place) for place, size in places if place >= 0]
        if found:
            end, place = min(found)  # the first to be complete: so the pieces do not matter
            self.has_ended = True
            self.end += end - len(self.waiting)
            shown, self.waiting = self.waiting[:place], ''
            return shown
        n = len(self.waiting) - unfinished(self.waiting, self.stops)
        shown, self.waiting = self.waiting[:n], self.waiting[n:]
        return shown

    def rest(self) -> str:
        "The text held back, to be shown at the end."
        shown, self.waiting = self.waiting, ''
        return shown


class Answer:
    "An answer that grows step by step."

    def __init__(self, request: ChatRequest, served: Served):
        self.request = request
        self.served = served
        self.id = f'chatcmpl-{secrets.token_hex(12)}'
        self.created = int(time.time())
        self.stop = StopText(request.stop)
        self.notes = []  # of all steps
        self.calls = ()
        self.text = ''  # of the steps that were kept
        self.fed = 0  # how much of it, and of what is still being written, was taken up
        self.last = None  # the last step that was kept
        self.tokens = []  # (where it ends in the text, its record), not shown yet
        self.shown = 0  # of the text

    def take(self, live) -> str:
        "Take a further step; return the text that may be shown now."
        self.notes.append(step_note(live))
        self.calls = live.calls
        if not live.kept:
            return ''
        self.last = live
        text = live.step.text
        if not text:
            return ''
        lead = self.lead
        if self.request.logprobs:
            place = len(self.text)
            for token, prob in token_texts(live.step, lead):
                place += len(token)
                self.tokens.append((place, token_record(token, prob)))
        self.text += lead + text
        return self.feed(self.text)

    def hear(self, text: str) -> str:
        "Steps that are being written: all of their text so far; the text that may be shown now."
        return self.feed(self.text + self.lead + text)

    @property
    def lead(self) -> str:
        "What stands before the next step."
        return self.served.owner.separator if self.text else ''

    def feed(self, text: str) -> str:
        "The answer so far; the text that may be shown now."
        new, self.fed = text[self.fed :], max(self.fed, len(text))
        if self.stop.has_ended:
            return ''
        return self.visible(self.stop.feed(new))

    def visible(self, text: str) -> str:
        self.shown += len(text)
        return text

    def rest(self) -> str:
        "The text that was held back until the end."
        return self.visible(self.stop.rest())

    def logprobs(self) -> dict | None:
        "Log-probabilities of the tokens shown since the last call."
        if not self.request.logprobs:
            return None
        ready = [record for place, record in self.tokens if place <= self.shown]
        self.tokens = [pair for pair in self.tokens if pair[0] > self.shown]
        return dict(content=ready)

    @property
    def finish(self) -> str:
        if self.stop.has_ended:
            return 'stop'
        step = self.last.step
        return 'length' if step.finish == 'length' or not step.final else 'stop'

    @property
    def handovers(self) -> int:
        return sum(note['decision'] in HANDED for note in self.notes)

    @property
    def summary(self) -> dict:
        "Facts that are known only at the end."
        return dict(handovers=self.handovers, last_model=self.last.model)

    @property
    def usage(self) -> dict:
        return usage_of(self.calls, self.served.owner.specs)

    def head(self, kind: str) -> dict:
        return dict(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.served.name,
            system_fingerprint=self.served.fingerprint,
        )

    def chunk(self, delta, notes=(), finish=None) -> dict:
        "A part of a stream."
        choice = dict(index=0, delta=delta, finish_reason=finish, logprobs=None)
        if 'content' in delta and delta['content']:
            choice['logprobs'] = self.logprobs()
        chunk = self.head('chat.completion.chunk') | dict(choices=[choice])
        if notes:
            chunk['stepwise'] = list(notes)
        if self.request.include_usage:
            chunk['usage'] = None
        return chunk

    def usage_chunk(self) -> dict:
        return self.head('chat.completion.chunk') | dict(choices=[], usage=self.usage)

    def body(self, text: str) -> dict:
        "The whole answer."
        choice = dict(
            index=0,
            message=dict(role='assistant', content=text, refusal=None),
            finish_reason=self.finish,
            logprobs=self.logprobs(),
        )
        body = self.head('chat.completion') | dict(choices=[choice], usage=self.usage)
        return body | dict(stepwise=self.notes, stepwise_summary=self.summary)


class RouterService:
    "Serves routers in the protocol, each under several names."

    def __init__(self, served, metrics: Metrics, record=None):
        self.served = {}
        if not served:
            raise ValueError('there is no router to serve: name one folder or more')
        for one in served:
            if one.name in self.served:
                raise ValueError(f'two routers are named {one.name!r}: rename one of the folders')
            self.served[one.name] = one
        self.metrics = metrics
        self.record = record  # (`Served`, question, `LiveStep`s) -> None; None: nothing is kept
        self.created = int(time.time())

    def models(self) -> list:
        return [
            dict(id=name, object='model', created=self.created, owned_by='stepwise-routing')
            for name in self.served
        ]

    def read(self, raw: bytes) -> ChatRequest:
        request = read_request(raw)
        served = self.find(request)
        try:
            served.owner.check(request.messages)
        except ValueError as error:
            code = 'context_length_exceeded'
            raise Refused(400, str(error), param='messages', code=code) from None
        return request

    def find(self, request: ChatRequest) -> Served:
        "The router or model that a request names. `Refused` if it is not served here."
        served = self.served.get(request.model)
        if served is None:
            hint = nearest(request.model[:60], self.served)
            names = ', '.join(list(self.served)[:10])
            line = f'no model {request.model[:60]!r} here{hint}; this server has: {names}'
            raise Refused(404, line, param='model', code='model_not_found')
        return served.at(request.alpha)

    def stream(self, served: Served, request: ChatRequest):
        "The steps of an answer, and of a stream without log-probabilities also what is being written."
        seed = secrets.randbits(62) if request.seed is None else request.seed
        return served.owner.stream(
            request.messages,
            served.router,
            sample=seed,
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            max_cents=request.max_cents,
            by_token=request.stream and not request.logprobs,
        )

    @contextlib.asynccontextmanager
    async def answering(self, request: ChatRequest):
        "Yields (`Answer`, its steps) to a `with` block. At its end the answer is counted in the metrics."
        served = self.find(request)
        answer = Answer(request, served)
        steps = []

        async def noted(source):
            began = time.monotonic()
            is_first = True
            async for live in source:
                if is_first:
                    self.metrics.first_step(time.monotonic() - began)
                is_first = False
                if live.step:
                    steps.append(live)
                yield live

        try:
            async with contextlib.aclosing(self.stream(served, request)) as source:
                yield answer, noted(source)
        finally:
            self.count(answer, steps)
        if self.record:
            self.keep(served, request.messages, steps)

    def keep(self, served: Served, messages, steps) -> None:
        "Record an answer. If that fails, the answer is sent all the same, and the metrics count the loss."
        try:
            self.record(served, messages, steps)
        except Exception as error:
            self.metrics.error('not_recorded')
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            with contextlib.suppress(OSError):  # nobody may read our lines
                print(f'an answer was not recorded: {reason}', file=sys.stderr, flush=True)

    def count(self, answer: Answer, steps) -> None:
        "Count an answer in the metrics, also one that was broken off."
        for live in steps:
            if live.kept:
                self.metrics.count('steps', model=live.model)
        self.metrics.count('handovers', answer.handovers)
        usage = answer.usage
        numbers = dict(
            prompt=usage['prompt_tokens'],
            cached=usage['prompt_tokens_details']['cached_tokens'],
            completion=usage['completion_tokens'],
            rejected=usage['completion_tokens_details']['rejected_prediction_tokens'],
        )
        for kind, n in numbers.items():
            self.metrics.count('tokens', n, kind=kind)

    async def complete(self, request: ChatRequest) -> tuple:  # (body, headers)
        "The whole answer."
        text = ''
        async with self.answering(request) as (answer, steps):
            async for live in steps:
                text += answer.take(live)
                if answer.stop.has_ended:
                    break
        text += answer.rest()
        headers = {
            'X-Stepwise-Handovers': str(answer.summary['handovers']),
            'X-Stepwise-Last-Model': header_text(answer.summary['last_model']),
        }
        return answer.body(text), headers

    async def chunks(self, request: ChatRequest):
        "Lists of chunks, each as soon as its step is decided."
        told = 0  # notes that a chunk has carried
        async with self.answering(request) as (answer, steps):
            has_begun = False
            async for live in steps:
                ready = []
                if not has_begun:
                    ready.append(answer.chunk(dict(role='assistant', content='')))
                has_begun = True
                text = answer.take(live) if live.step else answer.hear(live.text)
                if text:
                    ready.append(answer.chunk(dict(content=text), answer.notes[told:]))
                    told = len(answer.notes)
                if ready:
                    yield ready
                # the bill and the notes come with the steps, and the text before them
                if answer.stop.has_ended and len(answer.text) >= answer.stop.end:
                    break
        last = []
        text = answer.rest()
        if text:
            last.append(answer.chunk(dict(content=text)))
        end = answer.chunk({}, answer.notes[told:], answer.finish)
        last.append(end | dict(stepwise_summary=answer.summary))
        if request.include_usage:
            last.append(answer.usage_chunk())
        yield last


def header_text(name: str) -> str:
    "A name in the characters that a header may hold."
    return name.encode('ascii', 'replace').decode()
