"""A small and a large model of one's own: how they write, and where they are.

A router's folder keeps how the models write (`Sampling`) and their public names. Where they are and
which key is used (`Access`) is an argument of each call. It is never kept, so a folder from somebody
else cannot choose it. How a model is opened by its name belongs in `models.names`.
"""

import contextlib
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from ..records import find_price
from ..settings import (
    FROM_LIST,
    Cents,
    Count,
    NotNegative,
    Positive,
    Section,
    Share,
    Whole,
    checked,
)
from ..util import told_to_end
from .hub import prefix_ids
from .interface import Request
from .model_name import ModelName
from .names import open_models


class Sampling(Section):
    "How the models write: what a router depends on, and what its folder keeps."

    temperature: NotNegative = 0.7  # of sampling; 0: greedy
    top_p: Share = 1.0  # sample from the likeliest tokens up to this mass
    max_tokens: Count = 512  # longest step, in tokens
    max_reply: Count = 2048  # API: longest rest of a chain, in tokens
    context: Count | None = None  # longest prompt and chain, in tokens; None: all the model has
    top: Count = 20  # vLLM: likeliest tokens that are looked at
    top_logprobs: Whole = 5  # API: alternatives per token, 1 to 20; 0: no log-probabilities


class Access(Section):
    "Where the models are, what they cost and how they run here. None: what each kind of model has."

    base_url: str | None = None  # API: of the server
    key_env: str | None = None  # environment variable with the key of a server
    price: str | None = None  # API: row of `PRICES`, or "free"; None: the row of the model's name
    concurrency: Count | None = None  # API: calls in flight
    timeout: Positive | None = None  # seconds for one reply
    retries: Count | None = None  # API: attempts of a call
    pause: NotNegative | None = None  # API: seconds between attempts, at first
    dtype: str | None = None  # "float64", "float32", "bfloat16" or "float16"
    batch_size: Count | None = None  # rows in flight
    prefix_mib: Whole | None = None  # memory for prefixes that later calls may continue, in MiB
    memory_shares: Annotated[tuple[Share, ...], FROM_LIST] = ()  # vLLM: of the GPU, per model


class Model:
    "A model with options of its own. Options that it leaves out are those of the call's `Access`."

    def __init__(
        self,
        name: str,  # as for `open_models`, such as "openai:NAME"
        params: float | None = None,  # number of parameters, if name and files do not tell it
        **access,  # of `Access`, such as base_url, key_env or price
    ):
        self.name = str(name)
        given = asdict(Access(**access))
        self.options = {name: value for name, value in given.items() if name in access}
        if params is not None:
            self.options['params'] = checked('params', params, Positive)
        if 'memory_shares' in access:
            raise ValueError('memory_shares are of all models: give them in the Access of the call')

    def __str__(self):
        return self.name


def two_models(
    models,  # the small and the large one, each a name, a `Model` or a backend
) -> list:
    "The models as a list. ValueError: not two, the same one twice, or names and backends mixed."
    if not hasattr(models, '__iter__'):
        raise ValueError(f'models is {models!r:.80}: it should be a list, small and large')
    given = [models] if isinstance(models, str) else list(models)
    if len(given) != 2:
        raise ValueError(f'a small and a large model are needed, got {len(given)}')
    if hasattr(given[0], 'write') != hasattr(given[1], 'write'):
        raise ValueError('give names of models, or backends, but not both')
    if given[0] == given[1]:
        raise ValueError(f'the model {public_name(given[0])} is given twice')
    return given


def public_name(
    name,  # of a model, as for `open_models`; a `Model`, or a backend
) -> str:
    "The name of a model without its path or host."
    if hasattr(name, 'write'):
        return name.spec.name
    model = ModelName.parse(str(name))
    plain = model.name
    if model.url:
        plain = plain or 'a model behind a server'
    if plain.startswith(('/', '~', '.')) or Path(plain).is_dir():
        plain = Path(plain).resolve().name
    return str(replace(model, name=plain, url=''))


def _interrupt(*_):
    "Do what Ctrl-C does, also where Ctrl-C itself is ignored, as in the background of a script."
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _until_replies_are_kept(opened):
    "Open the models. SIGTERM and SIGHUP do what Ctrl-C does: replies under way are kept, then the caller ends."
    with told_to_end(_interrupt), opened as backends:
        yield backends


def open_two(
    models: list,  # of `two_models`
    sampling: Sampling,
    access: Access,
    ledger,  # path of the book of paid replies
    max_cents: float | None = None,  # never spend more, earlier calls with this ledger included
):  # list of backends
    "Open the models for the time of a `with` block. ValueError as of `open_models`."
    if hasattr(models[0], 'write'):  # whoever made them closes them
        return contextlib.nullcontext(models)
    checked('max_cents', max_cents, Cents | None)
    if not isinstance(access, Access):
        raise ValueError(
            f'access is {access!r}: it should be Access(base_url=..., key_env=..., ...)'
        )
    given = {name: value for name, value in asdict(access).items() if value is not None}
    options = asdict(sampling) | given
    each = [getattr(model, 'options', {}) for model in models]
    if any(each):
        options['each'] = each
    names = [str(model) for model in models]
    opened = open_models(names, ledger=ledger, max_cents=max_cents, **options)
    return _until_replies_are_kept(opened)


def check_questions(problems, backends) -> None:
    "`NoRoom` if a question leaves a model no room to reply. Servers' limits are not known."
    for backend in backends:
        if not hasattr(backend, 'text'):
            continue
        for problem in problems:
            prefix_ids(backend, Request(problem))


def check_cost(backends) -> None:
    "ValueError unless the costs of all models can be compared; called before anything is drawn."
    specs = [backend.spec for backend in backends]
    large = specs[-1]
    if large.price is not None and find_price(large.price).output == 0:
        raise ValueError(
            f'the large model {large.name} has the price 0 for output, so no cost can be compared: if it '
            'is free, give price="free" and its number of parameters, params=7e9'
        )
    for which, spec in zip(('small', 'large'), specs):
        is_needed = spec is large or large.price is None
        if is_needed and spec.price is None and not spec.params:
            raise ValueError(
                f'nothing says what the {which} model {spec.name} costs: give it a price, '
                'Model(NAME, price="gpt-4.1-mini") or "INPUT/CACHED/OUTPUT" in US dollars per million '
                'tokens, or its number of parameters, Model(NAME, params=7e9)'
            )
        if spec.price is not None and large.price is None:
            raise ValueError(
                f'the {which} model {spec.name} has a price and the large model {large.name} has none: '
                'give both a price, or neither'
            )
