"""A router's steps as an answer of the OpenAI protocol, whole or in chunks of a step.

Here belong the fields of an answer: text, who wrote it, usage, finish. How steps are made belongs in
`models.streams`. The fields of a request belong in `models.chat_request`. Not here: text by token, stop
strings, log-probabilities.
"""

import contextlib
import secrets
import time

from ..records import token_cents
from ..util import nearest
from .chat_request import ChatRequest, read_request
from .streams import LiveStep
from .web import Refused


def cents_of(
    tokens,  # [model, kind], see `method.rollouts.KINDS`
    specs,  # of the models
) -> float:
    "What tokens cost in US cents. Open models are free."
    cents = 0.0
    for spec, (written, _, sent, cached) in zip(specs, tokens.tolist()):
        if spec.price is not None:
            cents += token_cents(spec.price, sent, cached, written)
    return cents


def usage_of(
    tokens,  # [model, kind]
    specs,
    thrown: int = 0,  # tokens of steps that were thrown away
) -> dict:
    "The bill of an answer: tokens of all calls, thrown steps included. `cost` is in US dollars."
    completion, _, prompt, _ = tokens.sum(0).tolist()
    cached = 0
    for spec, (_, read, sent, billed) in zip(specs, tokens.tolist()):
        cached += billed if spec.price else sent - read
    return dict(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=dict(cached_tokens=cached),
        completion_tokens_details=dict(rejected_prediction_tokens=thrown),
        cost=cents_of(tokens, specs) / 100,
    )


def step_note(live: LiveStep, specs) -> dict:
    "Who wrote a step, how many tokens it has, and whether it was kept or thrown away."
    step = live.step
    return dict(model=specs[step.model].name, tokens=step.generated, kept=live.kept)


def thrown_tokens(steps) -> int:
    "Tokens of the `LiveStep`s that were thrown away."
    return sum(live.step.generated for live in steps if not live.kept)


def finish_of(step) -> str:
    "How an answer with this last step ended."
    return 'length' if step.finish == 'length' or not step.final else 'stop'


class RouterService:
    "Serves a router in the protocol, under several names."

    def __init__(
        self,
        owner,  # has stream(question, who, sample), check(question), specs and separator
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
            *steps, chain = [item async for item in source]
        text = self.owner.separator.join(step.text for step in chain.steps if step.text)
        message = dict(role='assistant', content=text, refusal=None)
        choice = dict(
            index=0, message=message, finish_reason=finish_of(chain.steps[-1]), logprobs=None
        )
        return self.head('chat.completion', request) | dict(
            choices=[choice],
            usage=usage_of(chain.tokens, self.owner.specs, thrown_tokens(steps)),
            stepwise=[step_note(live, self.owner.specs) for live in steps],
        )

    async def chunks(self, request: ChatRequest):
        "Lists of chunks, each as soon as its step is decided."
        head = self.head('chat.completion.chunk', request)
        if request.include_usage:
            head['usage'] = None

        def chunk(delta, finish=None, **more):
            choice = dict(index=0, delta=delta, finish_reason=finish, logprobs=None)
            return head | dict(choices=[choice]) | more

        steps = []
        lead = ''  # what stands before the next text
        begin = [chunk(dict(role='assistant', content=''))]
        async with self.steps(request) as source:
            async for item in source:
                if not isinstance(item, LiveStep):
                    chain = item
                    break
                steps.append(item)
                delta = {}
                if item.kept and item.step.text:
                    delta = dict(content=lead + item.step.text)
                    lead = self.owner.separator
                yield [*begin, chunk(delta, stepwise=[step_note(item, self.owner.specs)])]
                begin = []
        end = [chunk({}, finish_of(chain.steps[-1]))]
        if request.include_usage:
            usage = usage_of(chain.tokens, self.owner.specs, thrown_tokens(steps))
            end.append(head | dict(choices=[], usage=usage))
        yield end
