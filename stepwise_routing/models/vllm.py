"""A model behind a vLLM server, with the same token ids in its steps as the other backends.

Here belong starting a server and asking it. Where a step ends and how confident a model was belong
in `models.interface` and `models.engine`.
"""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np

from ..data.benchmarks import find_benchmark
from ..records import ModelSpec, Step
from ..util import install_line, run_async
from .address import plain_address, read_key
from .chat import api_client, transport
from .engine import new_step
from .hub import (
    LocalOptions,
    check_sampling,
    choose_reply,
    context_length,
    hub_folder,
    load_tokenizer,
    model_folder,
    prefix_ids,
    score_text,
    text_settings,
    total_log_probs,
    weights_sha256,
)
from .interface import StepTokenizer


def shown_confidences(
    tokens,  # per token: (its raw logit, logits of the likeliest tokens, its own among them)
) -> np.ndarray:  # [3, token]
    """Largest logit, probability and entropy of each token.

    The probability is too high, because the tokens that the server does not show count as impossible.
    """
    logits = np.array([logit for logit, _ in tokens])
    columns = zip_longest(*(likeliest for _, likeliest in tokens), fillvalue=-np.inf)
    likeliest = np.array([*columns])  # [place, token]
    best = likeliest.max(0)
    mass = np.exp(likeliest - best)
    total = mass.sum(0)
    below = np.maximum(likeliest - best, -1e4)  # a token that is not shown has no mass
    entropy = np.log(total) - (mass * below).sum(0) / total
    prob = np.exp(logits - best) / total
    return np.stack((best, prob, entropy))


@dataclass(frozen=True)
class VLLMOptions(LocalOptions):
    "How a model runs on vLLM and is asked. `LocalOptions` apply, except `prefix_mib`."

    top: int = 20  # likeliest tokens that are looked at; the vocabulary's size makes `prob` exact
    memory: float = 0.9  # share of the GPU's memory, weights included
    logits: bool = True  # show raw logits, as `VLLMBackend` needs; False: log-probabilities, for `OpenAIBackend`
    key_env: str = ''  # environment variable with the server's key
    timeout: float = 1800.0  # seconds for a reply, and for a server to start

    def __post_init__(self):
        super().__post_init__()
        check_sampling(self.temperature, self.top_p, top=self.top)


def _engine_flags(options: VLLMOptions, cpu: bool, **values) -> list:
    "Options and further values as vLLM's command line. `cpu`: for its build for CPUs."
    values |= dict(
        logprobs_mode='raw_logits' if options.logits else 'raw_logprobs',
        max_logprobs=options.top,
        max_num_seqs=options.batch_size,
        gpu_memory_utilization=options.memory,
        dtype=options.dtype or 'auto',
        generation_config='vllm',
    )
    if cpu:
        values |= dict(
            kv_cache_memory_bytes=2**30, max_num_batched_tokens=max(8192, values['max_model_len'])
        )
    flags = ['--enable-prefix-caching']
    if cpu:
        flags += ['--enforce-eager', '--no-enable-chunked-prefill']
    for name, value in values.items():
        flags += ['--' + name.replace('_', '-'), str(value)]
    return flags


def vllm_on_cpu() -> bool:
    "Is the installed vLLM the build for CPUs? RuntimeError in one line if vLLM is not installed."
    if not find_spec('vllm'):
        raise RuntimeError(f'vLLM is not installed: {install_line("gpu")}')
    return any(re.match('vllm(-cpu| .*cpu)', f'{d.name} {d.version}') for d in distributions())


def _last_words(log: str) -> str:
    "The line of a log that tells the error; its last line if no line does."
    echo = (
        '(Engine core|WorkerProc) initialization failed|EngineCore encountered an issue|cancelled'
    )
    errors = re.findall(r'(?:^|[\s.])(\w*(?:Error|Exception): \S.*)', log)
    lines = [e.strip() for e in errors if not re.search(echo, e)]
    if not lines:
        lines = log.strip().splitlines() or ['it wrote nothing']
    return lines[-1].replace('gpu_memory_utilization', 'memory')[:300]


@contextlib.contextmanager
def _reading(url: str):
    "In a `with` block: RuntimeError in one line if a server's reply does not look like vLLM's."
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise RuntimeError(
            f'the vLLM server at {url} sends a reply that cannot be read ({shorten(repr(e), 100)}): '
            'is it vLLM, and a recent one?'
        ) from None


def _finite(logits) -> list:
    "Logits as numbers. ValueError if one is not a finite number, for example after an overflow of float16."
    numbers = np.array(list(logits), float)
    if not np.isfinite(numbers).all():
        raise ValueError('a logit is not finite')
    return numbers.tolist()


async def _ask(call, url: str):  # call() -> awaitable
    """Call a server and return its answer. RuntimeError in one line if that fails.

    A server closes idle connections, sometimes just when we use one again. Then we ask a second time. The seed is
    the same, so the draw is the same.
    """
    from openai import APITimeoutError

    for last in (False, True):
        try:
            with _reading(url):
                return await call()
        except Exception as e:
            if not (transport(e) or hasattr(e, 'status_code')):
                raise
            if not last and transport(e) and not isinstance(e, (APITimeoutError, TimeoutError)):
                continue
            raise RuntimeError(f'the vLLM server at {url}: {shorten(str(e), 300)}') from None


async def first_model(url: str, key: str = '') -> dict:
    "A server's facts about its first model: id, root (folder or name on the Hub), max_model_len (tokens)."
    async with api_client(key, url, timeout=5.0) as client:
        reply = await _ask(lambda: client.get('/models', cast_to=object), url)
    with _reading(url):
        model = reply['data'][0]
        return dict(model, id=model['id'])


def _wait_until_ready(server, log, name: str, url: str, timeout: float):
    "Wait until a server is ready. RuntimeError, with a line of its log, if it ends or takes over `timeout` s."
    end = time.monotonic() + timeout
    while server.poll() is None and time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            if run_async(first_model(url))['id'] == name:
                return
        time.sleep(0.5)
    log.seek(0)
    problem = 'did not start'
    if server.poll() is None:
        problem = f'was not ready after {timeout:g} s (raise timeout=)'
    reason = _last_words(log.read().decode(errors='replace'))
    raise RuntimeError(f'the vLLM server of {name!r} {problem}: {reason}')


_WATCH = """
import os, signal, subprocess, sys, threading, time
def end():
    sys.stdin.read()
    server.terminate() # asks first
    time.sleep(8)
    os.killpg(0, signal.SIGKILL)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=end, daemon=True).start()
server.wait()
os.killpg(0, signal.SIGKILL)
"""


def watched(command, **kwargs):  # its watcher, for a `with` block
    "Run a command during a `with` block. It ends when the block or this process ends."
    command = [sys.executable, '-c', _WATCH, *map(str, command)]
    return subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, **kwargs)


@contextlib.contextmanager
def serve_vllm(
    model,  # folder or name on the Hub
    name: str | None = None,  # in the API; None: the last part of `model`
    revision: str | None = None,  # of a model on the Hub, its commit; None: its newest
    **kwargs,  # of `VLLMOptions`; context: at most 4096 unless given
):  # the server's base_url
    "A vLLM server on this machine, for a `with` block. RuntimeError in one line if it does not start."
    from transformers import AutoConfig

    options = VLLMOptions(**kwargs)
    name = name or Path(str(model)).name
    folder = model_folder(model) or hub_folder(model, revision)
    cpu = vllm_on_cpu()
    config = AutoConfig.from_pretrained(folder)
    wanted = options.context or min(context_length(config, None), 4096)
    context = context_length(config, wanted)
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    flags = _engine_flags(
        options,
        cpu,
        model=folder,
        served_model_name=name,
        host='127.0.0.1',
        port=port,
        max_model_len=context,
    )
    command = [sys.executable, '-m', 'vllm.entrypoints.openai.api_server', *flags]
    defaults = dict(
        VLLM_LOGGING_LEVEL='ERROR',
        VLLM_NO_USAGE_STATS='1',
        VLLM_CPU_OMP_THREADS_BIND='nobind',
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE='3600',
    )
    env = defaults | os.environ
    url = f'http://127.0.0.1:{port}/v1'
    with (
        tempfile.TemporaryFile() as log,
        watched(command, stdout=log, stderr=log, env=env) as server,
    ):
        _wait_until_ready(server, log, name, url, options.timeout)
        yield url


class VLLMBackend:
    "A Hugging Face causal language model behind a vLLM server."

    step_by_step = True

    def __init__(
        self,
        model,  # folder or name on the Hub; None: the one that the server names
        base_url: str,  # of a vLLM server that has this model: "http://HOST:8000/v1"
        name: str | None = None,  # for tables and settings; None: the last part of `model`
        index: int = 0,  # place among the models of a tree
        revision: str | None = None,  # of a model on the Hub, its commit; None: its newest
        **kwargs,  # of `VLLMOptions`; context: the server's unless given
    ):
        self.base_url = base_url
        plain_address(self.base_url)
        self.options = VLLMOptions(**kwargs)
        self.index = index
        self.clients = WeakKeyDictionary()
        self.key = self.options.key_env and read_key(self.options.key_env, self.base_url)
        facts = run_async(first_model(self.base_url, self.key))
        self.served_name, self.context = facts['id'], _context(facts, self.options.context)
        self.open_text(model or facts['root'], name, revision)
        run_async(self.check_server())

    @property
    def client(self):
        "OpenAI's client for the running event loop."
        loop = asyncio.get_running_loop()
        if self.clients is None:
            raise RuntimeError(f'{self.spec.name} is closed')
        if loop not in self.clients:
            self.clients[loop] = api_client(self.key, self.base_url, self.options.timeout)
        return self.clients[loop]

    async def close(self):
        "Close the connections. Callers that still wait get an error."
        clients = self.clients or {}
        self.clients = None
        if client := clients.get(asyncio.get_running_loop()):
            await client.close()

    def open_text(self, model, name, revision):
        "Read tokenizer, size and hash of a model. Only the server loads the weights."
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        local = model_folder(model)
        folder = local or hub_folder(model, revision)
        self.weights = weights_sha256(folder) if local else f'{model}@{Path(folder).name}'
        with torch.device('meta'):
            net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        with contextlib.suppress(OSError):
            net.generation_config = GenerationConfig.from_pretrained(folder)
        hf = load_tokenizer(str(folder))
        self.text = StepTokenizer(hf, net.generation_config.eos_token_id, net.config.vocab_size)
        self.spec = ModelSpec(name or Path(model).name, net.num_parameters())
        self.top = min(self.options.top, self.text.vocab)

    def settings(self):
        "What this model's draws depend on, as JSON. They also depend on the other requests in vLLM's batch."
        o = self.options
        return dict(
            backend='vllm',
            name=self.spec.name,
            weights=self.weights,
            **text_settings(self.text.hf),
            temperature=float(o.temperature),
            top_p=float(o.top_p),
            max_tokens=o.max_tokens,
            context=self.context,
            top=self.top,
            dtype=str(o.dtype or 'as served').removeprefix('torch.'),
            vllm=self.version,
            draws='vllm, a seed per step',
        )

    async def complete(self, prompt, max_tokens: int, **more) -> tuple:
        "(The server's choice after `prompt`, per token (id, logit, logits of the likeliest and of itself))."
        body = dict(
            model=self.served_name,
            prompt=list(prompt),
            max_tokens=max_tokens,
            logprobs=self.top,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            stop_token_ids=list(self.text.eos),
            include_stop_str_in_output=True,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        )
        try:
            reply = await _ask(
                lambda: self.client.post('/completions', body=body | more, cast_to=object),
                self.base_url,
            )
        except RuntimeError:
            self.client  # says so if it was closed meanwhile
            raise
        with _reading(self.base_url):
            (choice,) = reply['choices']
            ids = choice.get('token_ids') or ['no token ids']
            strange = [i for i in ids if type(i) is not int or not 0 <= i < self.text.vocab]
            if strange or not 1 <= len(ids) <= max_tokens:
                raise ValueError(f'{len(ids)} tokens, strange: {strange[:3]}')
            logs = choice['logprobs']
            logits = _finite(logs['token_logprobs'])
            likeliest = [_finite(top.values()) for top in logs['top_logprobs']]
            return choice, list(zip(ids, logits, likeliest, strict=True))

    async def forced_logits(self, ids, tokens) -> list:
        "Per given token after the prompt `ids`: (its raw logit, logits of the likeliest tokens)."
        tokens = list(tokens)
        choice, last = await self.complete(
            [*ids, *tokens[:-1]],
            1,
            temperature=0.0,
            allowed_token_ids=tokens[-1:],
            prompt_logprobs=self.top if tokens[1:] else None,
        )
        rows_shown = []
        rows = (choice.get('prompt_logprobs') or [])[len(ids) :]
        with _reading(self.base_url):
            for token, row in zip(tokens[:-1], rows, strict=True):
                (logit,) = _finite([row[str(token)]['logprob']])
                rows_shown.append((logit, _finite(v['logprob'] for v in row.values())))
        return rows_shown + [(logit, likeliest) for _, logit, likeliest in last]

    async def next_logits(self, ids, tokens: list):  # [token]
        "The raw logit of each token after the prompt `ids`. One request, and one more for each that it does not show."
        choice, _ = await self.complete(ids, 1, temperature=0.0, allowed_token_ids=tokens)
        shown = choice['logprobs']['top_logprobs'][0]  # `complete` has read it

        async def logit_of(token):
            name = f'token_id:{token}'
            if name not in shown:
                ((shown[name], _),) = await self.forced_logits(ids, [token])
            return shown[name]

        return np.array(await asyncio.gather(*map(logit_of, tokens)), float)

    async def check_server(self):
        "Ask the server for its version and a few logits. RuntimeError if it shows no logits."
        root = self.base_url.rstrip('/').removesuffix('/v1')
        async with self.client as client:
            version = await _ask(
                lambda: client.get(f'{root}/version', cast_to=object), self.base_url
            )
            ids = list(self.text.prompt('?'))
            logits = [z for _, top in await self.forced_logits(ids[:1], ids[1:]) for z in top]
        with _reading(self.base_url):
            self.version = str(version.get('version', 'unknown'))[:80]
        if max(logits) > 0 and min(logits) > -9999:
            return
        raise RuntimeError(
            f'{self.spec.name}: vLLM shows no raw logits; start the server with --logprobs-mode raw_logits'
        )

    async def write_step(self, request, ids, seed: int) -> Step:
        "Write the next step after the prompt `ids`. It is cut at `max_tokens` or `context` tokens."
        separator = find_benchmark(request.problem.benchmark).separator
        tokens = []
        room = min(self.options.max_tokens, self.context - len(ids))
        if room <= 0:
            return Step('', self.index, 'length', prompt=len(ids))
        o = self.options
        draw = dict(temperature=o.temperature, top_p=o.top_p, stop=separator)
        while True:
            prompt = [*ids, *(token for token, *_ in tokens)]
            draw['seed'] = (seed + len(tokens)) % 2**63
            choice, new = await self.complete(prompt, room - len(tokens), **draw)
            for token in new:
                tokens.append(token)
                if len(tokens) < room and not self.text.closing[token[0]]:
                    continue
                numbers = shown_confidences([logits for _, *logits in tokens])
                drawn = np.column_stack(([token for token, *_ in tokens], numbers.T))
                row = SimpleNamespace(ids=ids, request=request)
                step = new_step(self, row, drawn, len(tokens) == room)
                if step:
                    return step
            if choice.get('stop_reason') != separator:
                raise RuntimeError(f'{self.spec.name}: vLLM ended a reply too early')

    async def write(self, request):
        "The `Step`s that the model writes."
        steps = []
        ids = prefix_ids(self, request)
        while True:
            step = await self.write_step(request, ids, int(request.seed(len(steps))))
            steps.append(step)
            ids = [*ids, *step.ids]
            written = len(request.steps) + len(steps)
            if not request.to_end or step.final or written >= request.max_steps:
                return tuple(steps)

    async def score(self, request, step):
        "`step`, which another model wrote, with this model's confidences."

        async def confidences(backend, ids, answers):
            return shown_confidences(await self.forced_logits(ids, answers))

        return await score_text(self, request, step, confidences)

    async def choose(self, messages, options):
        "How likely each option is as the next reply."

        async def log_probs(backend, ids, replies):
            if max(map(len, replies)) == 1:
                return await self.next_logits(ids, [token for (token,) in replies])
            rows = await asyncio.gather(*(self.forced_logits(ids, r) for r in replies))
            return total_log_probs(map(shown_confidences, rows))

        return await choose_reply(self, messages, options, log_probs)


def _context(facts, wanted):  # of `first_model`; tokens or None
    "The most tokens of prompt and chain. RuntimeError if the server takes fewer than are wanted."
    limit = facts.get('max_model_len')
    model = facts['id']
    if not limit:
        raise RuntimeError(f'the server of {model} is no vLLM server: it has no max_model_len')
    if limit >= (wanted or limit):
        return wanted or limit
    raise RuntimeError(
        f'the server of {model} takes {limit} tokens: pass context={limit}, or start it with more'
    )
