"""What a server offers of a router: itself, its calibrated points, and its models alone.

Here belongs under which names a router is served and what identifies it. How a request is answered
belongs in `models.answers`.
"""

import json

from ..base.tools import digest
from ..data.benchmarks import find_benchmark
from ..models.answers import Served
from ..models.interface import prompt_text
from ..models.pair import places
from .walks import LargeOnly, SmallOnly


def fingerprint(owner, router) -> str:
    "A hash of models, prompt and router: what answers equally, from equal seeds, has the same."
    prompt = find_benchmark(owner.own.name).messages('?')
    facts = [backend.settings() for backend in owner.backends]
    parts = [json.dumps(facts, sort_keys=True), json.dumps(prompt), router.name]
    if 0 < router.start < len(facts) - 1:
        parts.append(router.start)
    if hasattr(router, 'kappa'):
        parts += [router.kappa, router.on_escalate, router.policy.config['weights']]
    return f'fp_{digest(*parts)}'


def offers(
    name: str,  # of the router, such as its folder's
    owner,  # an `OwnRouter`
    points: dict,  # alpha -> the same router calibrated for it
    prefix: str = '',  # of the names of its models alone
) -> list:  # of `Served`
    "Everything that requests may ask of a router."
    served_points = {}
    for alpha, router in points.items():
        point = f'{name}@alpha={alpha:g}'
        served_points[alpha] = Served(point, owner, router, fingerprint(owner, router))
    deployed = Served(name, owner, owner.router, fingerprint(owner, owner.router), served_points)
    models = []
    for start, model in enumerate(places(len(owner.backends))):
        router = LargeOnly(start) if start else SmallOnly()
        models.append(Served(prefix + model, owner, router, fingerprint(owner, router)))
    return [deployed, *served_points.values(), *models]


def check_prompt(
    problem,
    backends,  # those that read tokens here are asked
) -> None:
    "ValueError: a prompt leaves no room for an answer."
    messages = find_benchmark(problem.benchmark).messages(problem.question)
    for backend in backends:
        text = getattr(backend, 'text', None)
        if text is None:
            continue
        prompt = prompt_text(text.hf, messages)
        if len(prompt.encode('utf-8', 'replace')) < backend.context:
            continue  # no token is shorter than a byte
        longest = backend.context * text.widths.max()
        if len(prompt) > longest:  # said without counting tokens, which would take long
            size = f'{len(prompt)} characters'
        else:
            ids = text.prompt(problem.question, problem.benchmark)  # the engine finds it again
            size = f'{len(ids)} tokens'
        if len(prompt) > longest or int(size.split()[0]) >= backend.context:
            raise ValueError(
                f'the prompt has {size}, the context of {backend.spec.name} only '
                f'{backend.context} tokens'
            )
