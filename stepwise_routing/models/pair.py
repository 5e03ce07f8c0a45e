"""A small and a large model of one's own: how they write, and where they are.

A router's folder keeps how they write (`Sampling`) and their public names. Where they are and whose
key is used (`Access`) is an argument of each call and never kept, so that a folder that somebody
sent cannot choose it. How a model is opened by its name belongs in `models.names`.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from ..base.settings import FROM_LIST, Count, NotNegative, Positive, Section, Share, Whole
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


def two_names(models) -> list:
    "The names of a small and a large model. ValueError: not two."
    names = [models] if isinstance(models, str) else [str(name) for name in models]
    if len(names) != 2:
        raise ValueError(f'a small and a large model are needed, got {len(names)}')
    return names


def public_name(
    name: str,  # of a model, as for `open_models`
) -> str:
    "The name of a model without its path or host."
    model = ModelName.parse(name)
    plain = model.name
    if model.url:
        plain = plain or 'a model behind a server'
    if plain.startswith(('/', '~', '.')) or Path(plain).is_dir():
        plain = Path(plain).resolve().name
    return str(replace(model, name=plain, url=''))


def open_pair(
    names: list,  # of `two_names`
    sampling: Sampling,
    access: Access,
    ledger,  # path of the book of paid replies
    max_cents: float | None = None,  # never spend more, earlier calls with this ledger included
    keep_replies: bool = True,  # False: a book of amounts alone, and a cap for this call alone
):  # list of two backends
    "Open the two models for the time of a `with` block. ValueError as of `open_models`."
    if not isinstance(access, Access):
        raise ValueError(
            f'access is {access!r}: it should be Access(base_url=..., key_env=..., ...)'
        )
    given = {name: value for name, value in asdict(access).items() if value is not None}
    options = asdict(sampling) | given
    if not keep_replies:
        options['keep_replies'] = False
    return open_models(names, ledger=ledger, max_cents=max_cents, **options)
