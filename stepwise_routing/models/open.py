"""Opens models by their names and options.

A name says where a model is: "micro-small" and "micro-large" (shipped), a folder, "org/model" or "org/model@COMMIT" on the
Hub, "vllm:" before any of these, "openai:NAME" behind an API. What a model does belongs in `local`, `vllm` and `api`.
"""

import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..settings import (
    Count,
    NotNegative,
    Positive,
    Section,
    Share,
    Text,
    Whole,
    read_yaml,
)
from ..store import Replies
from ..util import PACKAGE, bad_row, unknown_name

MICRO = ('micro-small', 'micro-large', 'micro-prm')


class ModelOptions(Section):
    "A model: its name, how it writes, and where it is."

    name: Text  # see the head of this module
    temperature: NotNegative = 0.7  # of sampling; 0 = greedy
    top_p: Share = 1.0  # sample from the likeliest tokens up to this mass
    max_tokens: Count = 512  # of a step
    max_reply: Count = 2048  # vLLM and API: of all steps up to the end
    context: Count | None = None  # tokens of prompt and chain; None: all, on vLLM at most 4,096
    chat_template_kwargs: dict | None = None  # such as {"enable_thinking": false}
    confidences: bool | None = None  # vLLM and API: ask for them; None: the smallest model alone
    batch: Count = 128  # here: chains in flight
    dtype: Text | None = None  # here and on vLLM, such as "bfloat16"; None: by the machine
    memory: Share = 0.45  # vLLM: share of the GPU's memory
    copies: Count = 1  # here and on vLLM: more than one are opened by Ray
    gpus: NotNegative = 0.0  # of each copy
    base_url: Text = 'https://api.openai.com/v1'  # API: the server
    key_env: Text = 'OPENAI_API_KEY'  # API: environment variable with the key
    # API: row of `PRICES`, "INPUT/CACHED/OUTPUT" in US dollars per million tokens, or "free"; None: by its name
    price: Text | None = None
    params: NotNegative = 0.0  # API: number of parameters, for FLOPs
    can_continue: bool = False  # API: can the server go on with an assistant's message? vLLM can
    concurrency: Count = 32  # API: calls in flight
    timeout: Positive = 600.0  # API: seconds for a call; a longer one is lost, and may be billed
    retries: Whole = 6  # API: of a call that failed

    @property
    def kind(self) -> str:
        kind, colon, _ = self.name.partition(':')
        return kind if colon and kind in ('vllm', 'openai') else 'here'

    @property
    def place(self) -> str:
        "Folder, name on the Hub, or name in the API."
        return self.name.removeprefix(f'{self.kind}:')

    def shows_confidences(self, index: int) -> bool:
        return index == 0 if self.confidences is None else self.confidences


def read_models(file) -> list:  # of `ModelOptions`, small to large
    "The models of a YAML file: a list with the fields of `ModelOptions`. FileNotFoundError or ValueError in one line."
    if not Path(file).is_file():
        raise FileNotFoundError(f'no file {file}: give two models or more, or a YAML file of them')
    rows = read_yaml(Path(file).read_text('utf-8'), str(file))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'{file} should be a list of models, each with "name: ..." and options')
    models = []
    for number, row in enumerate(rows, 1):
        try:
            models.append(ModelOptions(**row))
        except (ValueError, TypeError) as error:
            raise bad_row(file, number, error) from None
    return models


def is_api(model) -> bool:  # a name, `ModelOptions`, or an open model
    "Is this the name of a model behind an API?"
    return str(getattr(model, 'name', model)).startswith('openai:')


def short_name(place: str) -> str:
    "The name of a model without path and commit, for tables."
    return Path(place).name.partition('@')[0]


def find_weights(place: str) -> tuple:  # (folder or name on the Hub, commit)
    "Where a model is. ValueError for a revision that is not a commit, or a name that nothing has."
    if place in MICRO:
        return PACKAGE / 'micro_models' / place.removeprefix('micro-'), None
    if Path(place).expanduser().is_dir():
        return Path(place).expanduser(), None
    name, _, commit = place.partition('@')
    if commit and not re.fullmatch('[0-9a-f]{40}', commit):
        raise ValueError(f'model {place!r}: after @ comes a commit, 40 hexadecimal digits')
    if name.count('/') != 1 or name.startswith(('.', '/', '~')):
        other = ', a folder, ORGANISATION/NAME on the Hugging Face Hub, or openai:NAME for an API'
        raise ValueError(unknown_name('model', place, MICRO, other))
    return name, commit or None


def open_weights(kind, place: str, **options):
    "Open a model of a folder or of the Hub. FileNotFoundError, in one line, if it cannot be loaded."
    from transformers.utils import logging

    source, commit = find_weights(place)
    logging.disable_progress_bar()  # of loading; a download shows its own
    try:
        return kind(source, revision=commit, name=short_name(place), **options)
    except OSError as error:  # of transformers, with many lines
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f'model {place!r} does not load: {reason[:200]}') from error


def open_here(o: ModelOptions, index: int):
    "Open a model in this process: transformers, or vLLM."
    writing = dict(temperature=o.temperature, top_p=o.top_p, max_tokens=o.max_tokens)
    writing |= dict(index=index, template=o.chat_template_kwargs)
    if o.kind == 'vllm':
        from .vllm import VLLMModel

        writing |= dict(max_reply=o.max_reply, memory=o.memory)
        writing['top'] = 20 if o.shows_confidences(index) else 0
        if o.dtype:
            writing['dtype'] = o.dtype
        return open_weights(VLLMModel, o.place, context=o.context, **writing)
    from .local import LocalModel

    writing |= dict(batch=o.batch, dtype=o.dtype, context=o.context)
    return open_weights(LocalModel, o.place, **writing)


def open_api(o: ModelOptions, index: int, replies: Replies | None):
    "A model behind an API."
    from .api import ApiModel

    if replies is None:
        raise ValueError(
            f'{o.name}: replies are paid, so say where they are kept: replies=Replies(FILE)'
        )
    names = 'base_url', 'key_env', 'price', 'params', 'temperature', 'max_tokens', 'max_reply'
    names += 'can_continue', 'concurrency', 'timeout', 'retries', 'top_p'
    given = {name: value for name, value in asdict(o).items() if name in names}
    if o.chat_template_kwargs:
        given['extra_body'] = dict(chat_template_kwargs=o.chat_template_kwargs)
    given['logprobs'] = o.shows_confidences(index)
    return ApiModel(o.place, replies, index, **given)


def open_model(
    model,  # a name or `ModelOptions`
    index: int = 0,  # place among the models, 0 = smallest
    replies: Replies | None = None,  # where paid replies are kept; an API needs it
):
    "Open a model. ValueError or FileNotFoundError in one line for a bad name or option."
    o = model if isinstance(model, ModelOptions) else ModelOptions(name=str(model))
    if o.kind == 'openai':
        return open_api(o, index, replies)
    if o.copies > 1:
        from .cluster import Cluster

        return Cluster(partial(open_here, o, index), o.copies, num_gpus=o.gpus)
    return open_here(o, index)


def open_models(
    models,  # small to large, each a name or `ModelOptions`
    replies: Replies | None = None,  # where paid replies are kept
    **options,  # of `ModelOptions`, for those that are given by name
) -> list:
    "Open models. ValueError or FileNotFoundError in one line for a bad name or option."
    records = []
    for model in models:
        is_name = not isinstance(model, ModelOptions)
        records.append(ModelOptions(name=str(model), **options) if is_name else model)
    return [open_model(record, index, replies) for index, record in enumerate(records)]


def open_reward(model: str):
    "Open a process reward model: \"micro-prm\" (shipped), a folder, or a name on the Hub."
    from .reward import RewardModel

    return open_weights(RewardModel, model)
