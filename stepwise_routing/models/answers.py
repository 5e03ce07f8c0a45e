"""A router's steps as an answer of the OpenAI protocol, whole or in chunks of a step.

Here belong the fields of an answer: text, who wrote it, usage, finish. How steps are made belongs in
`method.live`. The fields of a request belong in `models.chat_request`. Not here: text by token, stop
strings, log-probabilities.
"""

import contextlib
import secrets
import time

from ..records import api_cost
from ..util import nearest
from .chat_request import ChatRequest, read_request
from .web import Refused


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
    "Who wrote a step, how many tokens it has, and whether it was kept or thrown away."
    return dict(model=live.model, tokens=live.step.generated, kept=live.kept)


def finish_of(step) -> str:
    "How an answer with this last step ended."
    return 'length' if step.finish == 'length' or not step.final else 'stop'


class RouterService:
    "Serves a router in the protocol, under several names."

    def __init__(
        self,
        owner,  # has stream(question, router, sample), check(question), specs and separator
        routers: dict,  # name -> who decides, for `owner.stream`
    ):
        self.owner = owner
        self.routers = routers
        self.created = int(time.time())

    def models(self) -> list:
        return [
            dict(id=name, object='model', created=self.created, owned_by='stepwise-routing')
            for name in self.routers
        ]

    def read(self, raw: bytes) -> ChatRequest:
        "Read and check a request. `Refused` for a bad one."
        request = read_request(raw)
        if request.model not in self.routers:
            hint = nearest(request.model[:60], self.routers)
            names = ', '.join(self.routers)
            line = f'no model {request.model[:60]!r} here{hint}; this server has: {names}'
            raise Refused(404, line, param='model', code='model_not_found')
        try:
            self.owner.check(request.question)
        except ValueError as error:
            raise Refused(400, str(error), param='messages', code='invalid_value') from None
        return request

    def steps(self, request: ChatRequest):
        "The steps of an answer, as a context."
        seed = secrets.randbits(62) if request.seed is None else request.seed
        router = self.routers[request.model]
        return contextlib.aclosing(self.owner.stream(request.question, router, seed))

    def head(self, kind: str, request: ChatRequest) -> dict:
        name = f'chatcmpl-{secrets.token_hex(12)}'
        return dict(id=name, object=kind, created=int(time.time()), model=request.model)

    async def complete(self, request: ChatRequest) -> dict:
        "The whole answer."
        async with self.steps(request) as source:
            steps = [live async for live in source]
        kept = [live.step for live in steps if live.kept]
        text = self.owner.separator.join(step.text for step in kept if step.text)
        message = dict(role='assistant', content=text, refusal=None)
        choice = dict(index=0, message=message, finish_reason=finish_of(kept[-1]), logprobs=None)
        return self.head('chat.completion', request) | dict(
            choices=[choice],
            usage=usage_of(steps[-1].calls, self.owner.specs),
            stepwise=[step_note(live) for live in steps],
        )

    async def chunks(self, request: ChatRequest):
        "Lists of chunks, each as soon as its step is decided."
        head = self.head('chat.completion.chunk', request)
        if request.include_usage:
            head['usage'] = None

        def chunk(delta, finish=None, **more):
            choice = dict(index=0, delta=delta, finish_reason=finish, logprobs=None)
            return head | dict(choices=[choice]) | more

        last = None  # the last step that was kept
        lead = ''  # what stands before the next text
        begin = [chunk(dict(role='assistant', content=''))]
        async with self.steps(request) as steps:
            async for live in steps:
                delta = {}
                if live.kept:
                    last = live
                    if live.step.text:
                        delta = dict(content=lead + live.step.text)
                        lead = self.owner.separator
                yield [*begin, chunk(delta, stepwise=[step_note(live)])]
                begin = []
        end = [chunk({}, finish_of(last.step))]
        if request.include_usage:
            end.append(head | dict(choices=[], usage=usage_of(last.calls, self.owner.specs)))
        yield end
