"""A walk that is asked now: each step goes out as soon as the walk has decided about it.

Here belongs driving one walk against models that write asynchronously. How a walk goes belongs in
`method.rollouts`; who asks, and from which thread, in `live`.
"""

import contextlib
from dataclasses import replace
from typing import NamedTuple

from ..records import Step
from .base import Request


class LiveStep(NamedTuple):
    "A step, and whether the walk keeps it."

    step: Step
    kept: bool  # False: the walk threw it away, and its place is written again


async def arriving(
    model,  # a `Listed`
    request: Request,  # `to_end`
):
    "The rest of a chain, in tuples of steps that arrive together."
    if not getattr(model.backend, 'step_by_step', False):
        yield await model.write_one(request)
        return
    while True:
        steps = await model.write_one(replace(request, to_end=False))
        yield steps
        request = replace(request, steps=request.steps + steps)
        if steps[-1].final or len(request.steps) >= request.max_steps:
            return


async def live_steps(
    walk,  # a generator, such as `method.rollouts.walk`
    models,  # small to large, each a `Listed`
):  # `LiveStep`s; the last item is what the walk returns
    "Drive a walk. A step that a small model wrote is known to be kept when the walk asks for the next one."
    undecided, place, answer = None, 0, None
    with contextlib.closing(walk):
        while True:
            try:
                who, request = walk.send(answer)
            except StopIteration as end:
                if undecided:
                    yield LiveStep(undecided, True)
                yield end.value
                return
            if undecided:
                yield LiveStep(undecided, len(request.steps) > place)
            undecided, place = None, len(request.steps)
            answer = ()
            if request.to_end:
                async with contextlib.aclosing(arriving(models[who], request)) as parts:
                    async for steps in parts:
                        answer += steps
                        for step in steps:
                            yield LiveStep(step, True)
            else:
                answer = await models[who].write_one(request)
                (undecided,) = answer
