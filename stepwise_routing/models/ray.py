"""Models on Ray workers. Tree, seeds and store stay in one process.

So a draw does not depend on the worker that made it. Here belong calls to other processes and machines. What a model
does there belongs in the backends.
"""

import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from ..store import settings_difference
from ..util import digest, install_line
from .interface import Request
from .model_name import ModelName


def _pack_request(request: Request) -> Request:
    "A request with its seeds as numbers, so that another process can read it."
    n = max(request.max_steps - len(request.steps), 1) if request.to_end else 1
    return replace(request, seed=tuple(request.seed(i) for i in range(n)).__getitem__)


class Worker:
    "The models of a tree in a process of their own; Ray makes an actor of it."

    def __init__(self, names, opener, options):
        self.stack = contextlib.ExitStack()
        self.error = None
        try:
            self.models = self.stack.enter_context(opener(names, **options))
        except Exception as e:
            self.error = e

    async def describe(self):
        "Per model, the facts that a tree needs of a backend."
        if self.error:
            raise self.error
        return [(m.spec, m.settings()) for m in self.models]

    async def call(self, index, method, *args):
        "Call a method of a model and return its result."
        if self.error:
            os._exit(1)
        return await getattr(self.models[index], method)(*args)

    async def close(self):
        self.stack.close()


def _start_ray(cpus):
    "Join the cluster at `RAY_ADDRESS`, or start one here. False if Ray runs already. ConnectionError in one line."
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    try:
        import ray
    except ImportError:
        raise ImportError(f'engine="ray" needs Ray: {install_line("ray")}') from None
    if ray.is_initialized():
        return False
    address = os.environ.get('RAY_ADDRESS') or 'local'
    options = dict(log_to_driver=False, logging_level='ERROR')
    if address == 'local':
        options |= dict(num_cpus=cpus, include_dashboard=False, object_store_memory=128 << 20)
    host, _, port = address.rpartition(':')
    try:
        if host:
            # Ray itself would try for minutes
            socket.create_connection((host, int(port)), 10).close()
        ray.init(address, **options)
    except Exception as e:
        raise ConnectionError(
            f'no Ray at RAY_ADDRESS={address!r} ("auto" or HOST:PORT): {shorten(str(e), 200)}'
        ) from None
    return True


def _reserve(workers, needs, timeout):
    "Reserve room for all workers, a placement group of Ray. RuntimeError if there is none in `timeout` seconds."
    import ray

    room = ray.util.placement_group([needs] * workers, strategy='SPREAD')
    if room.wait(timeout):
        return room
    ray.util.remove_placement_group(room)

    def listed(resources):
        return ', '.join(f'{resources.get(k, 0):g} {k}' for k in needs)

    available = listed(ray.cluster_resources())
    raise RuntimeError(
        f'no room for {workers} workers with {listed(needs)} each in {timeout:g} s: Ray has {available}, and others '
        'may use them; lower workers, num_gpus or num_cpus'
    )


def _worker_error(error, task):  # without Ray's report around it
    if isinstance(getattr(error, 'cause', None), Exception):
        return error.cause
    return RuntimeError(
        f'workers died while they {task}, most often since memory is too small (fewer workers on a '
        f'machine, or a smaller batch_size or context): {shorten(str(error), 200)}'
    )


class RayModel:
    "A model on workers: a `Backend` that sends each call to a worker."

    def __init__(
        self,
        actors,  # Ray's handles of the workers
        index: int,  # of the model in a tree
        facts,  # of the model, from `Worker.describe`
    ):
        self.actors = actors
        self.index = index
        self.facts = facts
        self.spec, _ = facts

    async def send(self, key, *call):
        "The result of a call. `key` decides which worker gets it."
        from ray.exceptions import RayError

        actor = self.actors[int(digest(key), 16) % len(self.actors)]
        try:
            return await actor.call.remote(self.index, *call)
        except RayError as e:
            raise _worker_error(e, f'drew {key!r:.60}') from None

    def settings(self):
        return self.facts[1]

    async def write(self, request):
        return await self.send(request.problem.id, 'write', _pack_request(request))

    async def score(self, request, step):
        return await self.send(request.problem.id, 'score', _pack_request(request), step)

    async def choose(self, messages, options):
        return await self.send(str(messages), 'choose', messages, options)

    async def close(self):
        "Does nothing: the workers end with their `with` block."


def _describe_all(actors):
    "Wait until all workers have loaded the models; return their facts. ValueError if workers differ."
    import ray

    try:
        first, *others = ray.get([a.describe.remote() for a in actors])
    except ray.exceptions.RayError as e:
        raise _worker_error(e, 'loaded the models') from None
    for other in others:
        settings = [[settings for *_, settings in facts] for facts in (first, other)]
        difference = settings_difference(*settings, 'models')
        if difference:
            where, here, there = difference
            raise ValueError(
                f'the workers hold different models: {where} is {here!s:.60} on one '
                f'and {there!s:.60} on another'
            )
    return first


@contextlib.contextmanager
def ray_models(
    names,  # as for `opener`: small to large
    opener,  # `open_models`, for the workers
    workers: int = 2,  # processes that each hold all of these models
    num_gpus: float = 0.0,  # GPUs of each worker; .5 lets two share one
    num_cpus: float = 1.0,  # CPUs that Ray reserves for each, and threads of torch
    timeout: float = 20.0,  # seconds that finding room for the workers may take
    **options,  # of `opener`; paid models are refused
):  # list of `RayModel`, index 0 up
    "Open models on Ray workers, for a `with` block. ValueError or RuntimeError: no room, or a model does not load."
    names = [str(Path(n).resolve()) if Path(n).is_dir() else n for n in names]
    paid = any(ModelName.parse(n).kind == 'openai' for n in names) and not options.get('base_url')
    if paid or any(options.get(k) is not None for k in ('price', 'ledger', 'max_cents')):
        raise ValueError(
            'paid models are not drawn on Ray, as ledger and cap need one process: use engine="local"'
        )
    with contextlib.ExitStack() as stack:
        started = _start_ray(max(os.cpu_count() or 1, int(workers * num_cpus + 1)))
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as inside

        if started:
            stack.callback(ray.shutdown)
        needs = {name: n for name, n in dict(CPU=num_cpus, GPU=num_gpus).items() if n}
        room = _reserve(workers, needs, timeout)
        stack.callback(ray.util.remove_placement_group, room)  # and its workers
        kind = ray.remote(Worker).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            scheduling_strategy=inside(room),
            max_restarts=10,
            max_task_retries=3,
        )
        actors = [kind.remote(names, opener, options) for _ in range(workers)]

        def close_workers():
            closing = [actor.close.remote() for actor in actors]
            ray.wait(closing, num_returns=workers, timeout=20)

        stack.callback(close_workers)
        yield [RayModel(actors, i, facts) for i, facts in enumerate(_describe_all(actors))]
