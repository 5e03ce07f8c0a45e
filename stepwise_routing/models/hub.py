"""Any causal language model on this machine as a backend.

Here belong opening a folder or a name on the Hub, and asking a model that runs here. The forward pass belongs in
`models.kernels`. Writing many chains at once belongs in `models.engine`.
"""

import asyncio
import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from itertools import permutations
from os.path import commonprefix
from pathlib import Path

import numpy as np

from ..data.benchmarks import find_benchmark
from ..records import ModelSpec, Step, chat_prompt
from ..util import PACKAGE, nearest, one_of
from .engine import Engine, answer_request
from .interface import Choice, NoRoom, StepTokenizer, check_finite, five_digits, prompt_text
from .kernels.padded import PaddedModel


@contextlib.contextmanager
def loading(failure):
    "In a `with` block: no progress bars, and an error becomes a FileNotFoundError in one line after `failure`."
    from safetensors import SafetensorError
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        lines = [*str(e).strip().splitlines(), type(e).__name__]  # some errors say nothing
        raise FileNotFoundError(f'{failure}: {lines[0][:150]}') from e
    finally:
        if bars:
            logging.enable_progress_bar()


_WEIGHTS = '*.safetensors', 'pytorch_model*.bin'


def model_folder(name) -> Path | None:
    "The folder of a local model; None for a name on the Hub. FileNotFoundError if the name is neither."
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / 'config.json').exists():
            raise FileNotFoundError(f'{path} is no model folder: it has no config.json')
        if any(any(path.glob(w)) for w in _WEIGHTS):
            return path
        raise FileNotFoundError(f'{path}: no weights ({" or ".join(_WEIGHTS)})')
    near = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    hint = nearest(path.name, near)
    local = str(name).count('/') > 1 or str(name).startswith(('.', '/', '~'))
    if path.is_file() or hint or local:
        raise FileNotFoundError(f'no model folder {str(path)!r}{hint}')


def load_model(name):
    "Load a causal language model from a folder or the Hub, in its stored precision. FileNotFoundError in one line."
    from transformers import AutoModelForCausalLM

    source = model_folder(name) or name
    with loading(
        f'model {str(name)!r} does not load, neither from a folder nor from the Hugging Face Hub'
    ):
        return AutoModelForCausalLM.from_pretrained(source, dtype='auto')


def hub_folder(name: str, revision: str | None = None) -> Path:  # named after the commit
    "Download a model from the Hub once, at a commit or the newest. FileNotFoundError if that fails."
    from huggingface_hub import snapshot_download

    at_revision = f' at revision {revision}' if revision else ''
    files = [*_WEIGHTS, '*.json', '*.jinja', '*.txt', '*.model']
    with loading(f'model {str(name)!r}{at_revision} does not come from the Hugging Face Hub'):
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=files))


def load_tokenizer(source):
    "The tokenizer in tokenizer.json, of a folder or of a name on the Hub."
    from transformers import PreTrainedTokenizerFast

    try:
        # transformers takes a folder whose config.json lacks "transformers_version" for one of Mistral's, and warns of
        # a wrong pattern. In all other folders the pattern is right, and the advice would put Mistral's in its place.
        configs = Path(source).glob('config.json')
        is_other = any('tral' not in file.read_text('utf-8').lower() for file in configs)
        options = dict(fix_mistral_regex=False) if is_other else {}
        return PreTrainedTokenizerFast.from_pretrained(source, **options)
    except Exception as e:
        raise FileNotFoundError(f'{source}: no tokenizer there, as tokenizer.json') from e


def weights_sha256(model) -> str:
    "Hash of the weights in a folder or of a Hugging Face model, hexadecimal."
    h = hashlib.sha256()
    if isinstance(model, (str, Path)):
        for file in sorted(f for w in _WEIGHTS for f in Path(model).glob(w)):
            h.update(np.memmap(file, mode='r'))
        return h.hexdigest()
    import torch

    for name, t in sorted(model.state_dict().items()):
        h.update(f'{name} {t.dtype} {tuple(t.shape)}'.encode())
        h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return h.hexdigest()


def check_sampling(temperature, top_p, **counts):
    "ValueError for a temperature, top_p or count out of range."
    if not 0 <= temperature < float('inf'):
        raise ValueError(f'temperature={temperature}: give a number from 0 up')
    if not 0 < top_p <= 1:
        raise ValueError(f'top_p={top_p}: give a number above 0, up to 1')
    for name, n in counts.items():
        if n < 1:
            raise ValueError(f'{name}={n}: give a number from 1 up')


@dataclass(frozen=True)
class LocalOptions:
    "How a model on this machine samples and runs. ValueError for a number out of range."

    temperature: float = 0.7  # of sampling; 0 = greedy
    top_p: float = 1.0  # sample from the likeliest tokens up to this mass
    max_tokens: int = 512  # longest step, in tokens
    context: int | None = None  # longest prompt and chain, in tokens; None = all the model has
    batch_size: int = 256  # rows in flight
    dtype: str | None = (
        None  # "float64", "float32", "bfloat16", "float16"; None = by device and size
    )
    prefix_mib: int = 256  # memory for prefixes that later calls may continue, in MiB

    def __post_init__(self):
        check_sampling(
            self.temperature, self.top_p, max_tokens=self.max_tokens, batch_size=self.batch_size
        )
        one_of('dtype', self.dtype, (None, 'float64', 'float32', 'bfloat16', 'float16'))


def convert(hf, dtype=None):
    "Move a model to the GPU, if there is one, and to a precision. Its default depends on device and size."
    import torch

    gpu = torch.cuda.is_available()
    if dtype is None and gpu:
        dtype = 'bfloat16'
    elif dtype is None:
        dtype = 'float64' if hf.num_parameters() <= 20e6 else 'float32'
    hf.to('cuda' if gpu else 'cpu')
    for p in hf.parameters():
        p.data = p.data.to(getattr(torch, dtype))  # not the buffers: rotary frequencies


def open_forward(hf, rows, context):
    "The `Forward` of a model of `open_model`."
    if not hasattr(hf, 'tensors'):
        return PaddedModel(hf, rows)
    from .kernels.qwen import QwenModel

    return QwenModel(hf.settings, hf.tensors, rows, context, getattr(hf, 'read', None))


def kernel_model(folder, dtype=None):  # a `QwenFolder`
    "The checkpoint of a folder, if `kernels.qwen` can compute it here in this precision. Else None."
    import torch

    from .kernels.qwen import QwenFolder, fits

    if not folder or dtype not in (None, 'float32') or torch.cuda.is_available():
        return None
    with loading(f'model {str(folder)!r} does not load'):
        folder = Path(folder)
        config = json.loads((folder / 'config.json').read_text('utf-8'))
        if fits(config) and any(folder.glob('*.safetensors')):
            return QwenFolder(folder)


def open_model(model, tokenizer, options):
    "(Hash of the weights, model as it will run, tokenizer: the one given, or the model's own)."
    import torch

    has_name = isinstance(model, (str, Path))
    if not has_name and tokenizer is None:
        raise ValueError('this model is an object, so give its tokenizer too: tokenizer=...')
    folder = model_folder(model) if has_name else None
    hf = kernel_model(folder, options.dtype)
    if hf is None:
        hf = load_model(model) if has_name else model
        hf.eval()
    weights = weights_sha256(folder or hf)
    if isinstance(hf, torch.nn.Module):
        convert(hf, options.dtype)
    if tokenizer is None:
        tokenizer = load_tokenizer(model)
    return weights, hf, tokenizer


def context_length(config, context):
    "The most tokens of a prompt and chain. ValueError if the model takes fewer than are wanted."
    limit = getattr(config, 'max_position_embeddings', None) or context or 4096
    window = getattr(config, 'sliding_window', None)
    layers = getattr(config, 'layer_types', None)
    if window and (layers is None or 'sliding_attention' in layers) and window < (context or limit):
        raise ValueError(
            f'this model looks back {window} tokens only: pass context={window} or less'
        )
    if context is None or 1 < context <= limit:
        return context or limit
    raise ValueError(f'context={context}: the model takes 2 to {limit} tokens')


def prefix_ids(backend, request):
    "Token ids of the prompt and all prefix steps. `NoRoom` if the question leaves no room for a reply."
    problem = request.problem
    benchmark = find_benchmark(problem.benchmark)
    ids = list(backend.text.prompt(problem.question, problem.benchmark))
    room_left(backend, ids, 1, f'the question {problem.question[:60]!r} ({problem.id})')
    for step in request.steps:
        ids += backend.text.step_ids(tuple(step.ids), step.text, step.finish, benchmark.separator)
    return ids


def room_left(backend, ids, more, where):
    "`NoRoom` unless `more` tokens fit into the context after `ids`."
    if len(ids) + more <= backend.context:
        return
    raise NoRoom(
        f'{where}: {len(ids)} prompt tokens and {more} more exceed the context of {backend.context} '
        f'of {backend.spec.name}'
    )


async def score_text(backend, request, step, answer=answer_request):
    "`step` with a backend's confidences in place of its own. `answer` asks the backend's engine."
    ids = prefix_ids(backend, request)
    separator = find_benchmark(request.problem.benchmark).separator
    own_ids = tuple(step.ids)
    tokens = tuple(backend.text.step_ids(own_ids, step.text, step.finish, separator))
    room_left(
        backend, ids, len(tokens), f'problem {request.problem.id!r}, step {len(request.steps)}'
    )
    scores = await answer(backend, ids, answers=tokens) if tokens else np.zeros((3, 0))
    check_finite(backend.spec.name, scores)
    logit, prob = five_digits(scores[:2]).tolist()
    ends = backend.text.parse(tokens, separator)[2]
    entropy = float(five_digits(scores[2, 0])) if tokens else None
    return replace(
        step,
        ids=tokens,
        ends=ends,
        prob=tuple(prob),
        max_logit=tuple(logit),
        entropy=entropy,
        generated=0,
        prompt=len(ids) + len(tokens),
        cached=0,
    )


def _reply_ids(backend, ids, options):
    "Token ids of each option. ValueError if one begins another, `NoRoom` if one does not fit after the prompt."
    replies = [backend.text.encode(o) for o in options]
    room_left(backend, ids, max(map(len, replies)), f'options {options}')
    for (o, a), (p, b) in permutations(zip(options, replies), 2):
        if b[: len(a)] == a:
            raise ValueError(f'option {o!r} begins option {p!r}: a reply could be either')
    return replies


def total_log_probs(scores):  # [reply]
    "The log-probability of each reply, from the confidences [3, token] of its tokens."
    with np.errstate(divide='ignore'):
        return np.array([np.log(prob).sum() for _, prob, _ in scores])


async def _reply_log_probs(backend, ids, replies):
    "Log-probability of each reply."
    if max(map(len, replies)) == 1:  # one look at the whole vocabulary
        top = backend.text.vocab
        _, tokens, logs = await answer_request(backend, ids, answers=replies[0], top=top)
        places = [(tokens[0] == reply[0]).argmax() for reply in replies]
        return logs[0, places]
    asked = (answer_request(backend, ids, answers=reply) for reply in replies)
    return total_log_probs(await asyncio.gather(*asked))


async def choose_reply(backend, messages, options, log_probs=_reply_log_probs):
    "How likely a backend finds each option as the next reply, as a `Choice`."
    text = backend.text
    ids = text.encode(prompt_text(text.hf, messages))
    replies = _reply_ids(backend, ids, options)
    earlier = ()
    if len(messages) > 1:
        earlier = text.encode(prompt_text(text.hf, messages[:-1]))
    shared = len(commonprefix([ids, earlier]))
    logs = await log_probs(backend, ids, replies)
    check_finite(backend.spec.name, np.maximum(logs, -1e4))  # -inf: it cannot be
    odds = np.ones(len(logs))
    if np.isfinite(logs.max()):
        odds = np.exp(logs - logs.max())
    prob = five_digits(odds / odds.sum()).tolist()
    generated = max(map(len, replies))
    return Choice(tuple(prob), prompt=len(ids), generated=generated, shared=shared)


def tokenizer_sha256(hf):
    return hashlib.sha256(hf.backend_tokenizer.to_str().encode()).hexdigest()


def text_settings(hf):
    "Hashes of a tokenizer and of the prompt that it makes."
    prompt = prompt_text(hf, chat_prompt('?'))
    return dict(tokenizer=tokenizer_sha256(hf), prompt=hashlib.sha256(prompt.encode()).hexdigest())


class TransformersBackend:
    "A Hugging Face causal language model on this machine's CPU or GPU."

    score = score_text
    choose = choose_reply
    step_by_step = True

    def __init__(
        self,
        model,  # folder, name on the Hub, or a model (converted in place)
        tokenizer=None,  # of Hugging Face; None = the one that is kept with the model
        *,
        name: str | None = None,  # for tables and settings; None = the folder's name
        index: int = 0,  # place among the models of a tree
        **kwargs,  # of `LocalOptions`
    ):
        options = LocalOptions(**kwargs)
        self.weights, hf, tokenizer = open_model(model, tokenizer, options)
        source = hf.name_or_path or type(hf).__name__
        self.spec = ModelSpec(name or Path(source).name, hf.num_parameters())
        self.index = index
        self.context = context_length(hf.config, options.context)
        eos = hf.generation_config.eos_token_id
        self.text = StepTokenizer(tokenizer, eos, hf.config.vocab_size)
        forward = open_forward(hf, options.batch_size, self.context)
        options = replace(options, context=self.context)
        self.engine = Engine(self.spec.name, forward, self.text, options, index)

    async def close(self):
        "Give the memory back. Callers that still wait get an error."
        if self.engine:
            self.engine.fail(RuntimeError(f'{self.spec.name} was closed'))
        self.engine = None

    async def write(self, request):  # the `Step`s
        ids = prefix_ids(self, request)
        if len(ids) < self.context:
            return await answer_request(self, ids, request=request)
        return (Step('', self.index, 'length', prompt=len(ids)),)

    def settings(self):
        "What this model's draws depend on, as JSON."
        e = self.engine
        temperature, top_p = map(float, e.sampling)
        return dict(
            backend='transformers',
            name=self.spec.name,
            weights=self.weights,
            **text_settings(self.text.hf),
            temperature=temperature,
            top_p=top_p,
            max_tokens=e.max_tokens,
            context=e.context,
            dtype=e.forward.dtype,
            draws=f'philox, inverse transform, {type(e.forward).__name__}',
        )


def micro_path(which: str) -> Path:
    "Folder of a shipped micro model, \"small\" or \"large\"."
    one_of('micro model', which, ('small', 'large'))
    return PACKAGE / 'micro_models' / which


def load_micro(which: str, **options) -> TransformersBackend:
    "A shipped micro model, ready to write steps. The small one has index 0. `options` of `TransformersBackend`."
    return TransformersBackend(
        micro_path(which), **dict(index=int(which == 'large'), name=f'micro-{which}') | options
    )
