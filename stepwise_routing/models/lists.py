"""Today's asynchronous models behind the contract of `models.base`: they take lists and give lists."""

import asyncio

from ..util import run_async
from . import interface
from .base import Request


def old_request(request: Request, model: int) -> interface.Request:
    def seed(written):
        return request.seed(written, model)

    parts = request.problem, request.steps, seed, request.to_end, request.max_steps
    return interface.Request(*parts)


async def all_of(coroutines) -> list:
    return await asyncio.gather(*coroutines)


class Listed:
    "A model that takes lists."

    def __init__(self, backend):
        self.backend = backend
        self.spec = backend.spec
        self.index = backend.index
        self.settings = backend.settings

    async def write_one(self, request: Request) -> tuple:
        return tuple(await self.backend.write(old_request(request, self.index)))

    def write(self, requests) -> list:
        "A tuple of `Step`s per request."
        return run_async(all_of([self.write_one(request) for request in requests]))

    def choose(self, conversations, options) -> list:
        "A `Choice` per conversation; None if it does not fit into the context."

        async def choice(messages):
            try:
                return await self.backend.choose(messages, options)
            except interface.NoRoom:
                return None

        return run_async(all_of([choice(messages) for messages in conversations]))


class ListedRewards:
    "A reward model that takes lists."

    def __init__(self, prm):
        self.prm = prm
        self.spec = prm.spec
        self.settings = prm.settings

    def reward(self, requests) -> list:
        "The `Reward` of the last step of each request; None if the chain does not fit into the context."

        async def reward(request):
            try:
                return await self.prm.reward(request.problem, request.steps)
            except interface.NoRoom:
                return None

        return run_async(all_of([reward(request) for request in requests]))
