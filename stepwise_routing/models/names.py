"""Opens any model by its name: micro, Transformers, vLLM or an API.

Here belongs which class opens a name, and which options the class gets. How a name is written belongs in
`models.model_name`. How a model is asked belongs in `models.hub`, `models.vllm` and `models.chat`.
"""

import contextlib
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path

from ..records import find_price
from ..util import nearest, one_of, run_async
from .chat import ApiOptions, OpenAIBackend
from .hub import LocalOptions, TransformersBackend, hub_folder, micro_path
from .ledger import Ledger
from .model_name import ModelName
from .ray import ray_models
from .vllm import VLLMBackend, VLLMOptions, serve_vllm

_MICRO = 'micro-small', 'micro-large'


def check_shares(
    names,  # of the models
    shares=(),  # of the GPU's memory, per model; a missing one is None; (): equal shares, .9 in all
) -> list:  # the share of each model; None for a model that needs no vLLM server
    "The share of the GPU's memory for each model. ValueError if the shares do not fit."
    starts = [ModelName.parse(n).kind == 'vllm' for n in names]
    shares = shares or [0.9 / max(sum(starts), 1)] * len(names)
    if len(shares) > len(names):
        raise ValueError(f'memory_shares={shares}: give at most one per model, {len(names)} in all')
    out = [share if start else None for start, share in zip_longest(starts, shares)]
    used = [share or 0 for start, share in zip(starts, out) if start]
    if min(used, default=1) > 0 and sum(used) <= 1:
        return out
    raise ValueError(
        f'memory_shares={out}: give shares above 0 that sum to at most 1; these sum to {sum(used):g}'
    )


def _fitting(options, kind):
    return {f.name: options[f.name] for f in fields(kind) if f.name in options}


def _check_options(options):
    "ValueError for an option that no kind of model knows."
    names = {f.name for kind in (LocalOptions, VLLMOptions, ApiOptions) for f in fields(kind)}
    names |= {'ledger', 'memory_shares', 'each'}  # of all models together
    for k in options:
        one_of('option', k, sorted(names - {'name', 'identity', 'params', 'memory', 'logits'}))
    if options.get('price') not in ('free', None):
        find_price(options['price'])


def _check_own_options(model: ModelName, own):
    "ValueError for an option that was given to this model alone, and that its kind does not use."
    kind = LocalOptions
    if model.is_paid:
        kind = ApiOptions
    elif model.kind.startswith('vllm'):
        kind = VLLMOptions
    used = {f.name for f in fields(kind)}
    for name in own:
        if name not in used:
            raise ValueError(f'{model} does not use {name}: leave {name} out')


def _open_one(model: ModelName, index, stack, options):
    """Open one backend. A server that it starts is put on the stack.

    ValueError for a name that looks like a misspelt name of a micro model.
    """
    if model.is_paid:
        own = _fitting(options, ApiOptions)
        return OpenAIBackend(model.name, index, options['ledger'], **own)
    local = _fitting(options, LocalOptions)
    vllm = _fitting(options, VLLMOptions)
    if model.kind == 'vllm-server':
        return VLLMBackend(model.name or None, model.url, index=index, **vllm)
    source = model.name
    if source in _MICRO:
        source = micro_path(source.removeprefix('micro-'))
    short = Path(model.name).name  # also of a micro model
    revision = model.revision or None
    if model.kind == 'vllm':
        url = stack.enter_context(serve_vllm(source, revision=revision, **vllm))
        return VLLMBackend(source, url, short, index, revision, **vllm | dict(key_env=''))
    hint = nearest(model.name, _MICRO)
    if '/' not in model.name and not Path(source).exists() and hint:
        raise ValueError(f'unknown model {model.name!r}{hint}')
    folder = hub_folder(model.name, revision) if revision else source
    return TransformersBackend(folder, name=short, index=index, **local)


@contextlib.contextmanager
def _open_here(names, options):
    "Open backends in this process."
    shares = check_shares(names, options.get('memory_shares'))
    each = options.pop('each', None)  # options of each model alone
    models = [ModelName.parse(name) for name in names]
    with (
        contextlib.ExitStack() as servers,
        contextlib.ExitStack() as stack,
    ):  # servers end after the calls in flight
        if any(model.is_paid for model in models):
            options['ledger'] = stack.enter_context(
                Ledger(options.get('ledger'), options.get('max_cents'))
            )
        backends = []
        for i, model in enumerate(models):
            own = each[i] if each else {}
            _check_own_options(models[i], own)
            backends.append(_open_one(model, i, servers, options | own | dict(memory=shares[i])))
            stack.callback(lambda b=backends[-1]: run_async(b.close()))  # the last one first
        yield backends


def open_models(
    names,  # small to large
    engine: str = 'local',  # "ray" opens them on workers of Ray
    **options,  # temperature, max_tokens, context, price, ledger, max_cents, memory_shares, ...
):  # list of backends, index 0 up
    "Open models by name, for a `with` block. ValueError for an unknown name or option."
    one_of('engine', engine, ('local', 'ray'))
    names = [names] if isinstance(names, str) else [str(n) for n in names]
    if engine == 'ray':
        return ray_models(names, opener=open_models, **options)
    _check_options(options)
    return _open_here(names, options)
