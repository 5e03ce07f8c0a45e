"""Serves a single model in the OpenAI protocol, so that the API setting can run without a key.

Here belong turning a request into tokens and tokens into a reply, and the server's process. HTTP is
in `models.web`, which serves routers too. How the model writes belongs in `models.hub`.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..base.records import Problem
from ..base.tools import digest, nearest
from .engine import answer_request
from .interface import Request
from .replies import CONTINUE
from .web import Refused, Server

_BEGIN = (
    "{% if messages|length > 1 and messages[-1]['content'] == "
    + json.dumps(CONTINUE)
    + " and messages[-2]['role'] == 'assistant' %}{% set begun = messages[-2]['content'] + '\\n\\n' %}"
    "{% set messages = messages[:-2] %}{% set add_generation_prompt = true %}"
    "{% else %}{% set begun = '' %}{% endif %}"
)


def continuing(template) -> str:
    "A chat template (Jinja) that lets a model continue after its last step. It works with `vllm serve` too."
    return _BEGIN + template + '{{ begun }}'


def _prompt_ids(backend, messages):
    "Token ids of a conversation. For a chain to be continued: the ids of its question and of each step."

    def render(messages):
        return backend.text.hf.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    parts = [render(messages)]
    longest = backend.context * backend.text.widths.max()
    if len(parts[0]) > longest:  # said without counting tokens, which would take long
        raise Refused(
            400,
            f'the prompt has {len(parts[0])} characters, the context only {backend.context} tokens',
        )
    if len(messages) > 2 and messages[-1]['content'] == CONTINUE:
        chain = messages[-2]['content'] + '\n\n'
        base = parts[0].removesuffix(chain)
        if base == render(messages[:-2]):
            parts = [base, *(s + '\n\n' for s in chain.split('\n\n')[:-1])]
    return [i for part in parts for i in backend.text.encode(part)]


@lru_cache(4)
def _vocabulary(text):
    "The bytes that each token of a `StepTokenizer` writes, computed once."
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    hf = text.hf
    byte = {c: b for b, c in bytes_to_unicode().items()}
    special = set(hf.all_special_ids)
    level = 'Ġ' in hf.get_vocab()
    n = min(text.vocab, len(hf))

    def written(i, piece):
        if i in special:
            return (piece or '').encode()
        if piece and level and all(c in byte for c in piece):
            return bytes(byte[c] for c in piece)
        return text.decode([i]).encode()

    return [*map(written, range(n), hf.convert_ids_to_tokens(range(n)))] + [b''] * (text.vocab - n)


_RANGES = dict(
    max_tokens=(1, 1 << 31),
    max_completion_tokens=(1, 1 << 31),
    temperature=(0.0, 2.0),
    top_p=(1e-9, 1.0),
    n=(1, 1),
    seed=(-1 << 63, 1 << 63),
    logprobs=(False, True),
    top_logprobs=(0, 20),
    stream=(False, True),
)

_FIELDS = ['model', 'messages', 'stop', 'stream_options', *_RANGES]


@dataclass(frozen=True)
class _Asked:
    "A checked request."

    body: dict  # its fields, without those that are null
    stream: bool
    include_usage: bool  # at the end of a stream


def _check_field(name, value):
    "`Refused` for an unknown field, or a number of the wrong type or out of range."
    if name not in _FIELDS:
        raise Refused(400, f'unknown field {name!r}{nearest(name, _FIELDS)}')
    low, high = _RANGES.get(name, (0, 0))
    fits = isinstance(value, (int, type(low))) and isinstance(value, bool) == isinstance(low, bool)
    if name not in _RANGES or fits and low <= value <= high:
        return
    raise Refused(400, f'{name}={value!s:.40}: the server takes {low} to {high}')


def _is_turn(m):
    roles = 'system', 'user', 'assistant'
    if (
        not isinstance(m, dict)
        or m.get('role') not in roles
        or not isinstance(m.get('content'), str)
    ):
        return False
    return not re.search('[\ud800-\udfff]', m['content'])  # half a character


def _checked(raw, name):
    "The fields of a request's body, without null ones. `Refused` names the first bad field."
    try:
        body = {k: v for k, v in json.loads(raw).items() if v is not None}
    except (ValueError, RecursionError, AttributeError):
        raise Refused(400, 'the body of the request is no JSON object') from None
    for k, v in body.items():
        _check_field(k, v)
    if body.get('stop', '\n\n') not in ('\n\n', ['\n\n']):
        raise Refused(400, r'stop: "\n\n" (one step) or none (to the end)')
    if 'top_logprobs' in body and not body.get('logprobs'):
        raise Refused(400, 'top_logprobs needs logprobs=true')
    if 'stream_options' in body and not body.get('stream'):
        raise Refused(400, 'stream_options: give it with stream=true alone')
    turns = body.get('messages')
    model = body.get('model')
    if not (isinstance(turns, list) and turns and all(map(_is_turn, turns))):
        raise Refused(
            400,
            'messages: each has a role, system, user or assistant, and a content: text only, without '
            'half characters',
        )
    if model == name:
        include_usage = body.get('stream_options') == dict(include_usage=True)
        return _Asked(body, body.get('stream', False), include_usage)
    raise Refused(404, f'no model {model!r} here{nearest(model, [name])}; this server has {name!r}')


def _decoded(text, ids):
    "The text of tokens, without an end token."
    return text.decode([i for i in ids if i not in text.eos])


async def _written(backend, body, ids, heard=None):
    "(ids of the reply, its text, why it ended, the stop string it met, log-probabilities of its tokens)."
    room = backend.context - len(ids)
    stop = 'stop' in body
    if room < 1:
        raise Refused(400, f'the prompt has {len(ids)} tokens, the context only {backend.context}')
    max_reply = min(room, body.get('max_completion_tokens', room), body.get('max_tokens', room))
    first = body.get('seed', secrets.randbits(62)) % (1 << 64)

    def seed(i):
        return int(digest('reply', first, i), 16) >> 1 if i else first  # of each step

    request = Request(Problem('', '', '', ''), seed=seed, to_end=not stop, max_steps=1 << 30)
    sampling = body.get('temperature', 1.0), body.get('top_p', 1.0)
    top = max(body.get('top_logprobs', 0), 1) if body.get('logprobs') else 0
    options = dict(max_reply=max_reply, sampling=sampling, top=top, heard=None if stop else heard)
    steps, alternatives = await answer_request(backend, ids, request=request, **options)
    reply = [i for s in steps for i in s.ids]
    text = _decoded(backend.text, reply)
    finish = 'length' if steps[-1].finish == 'length' else 'stop'
    token_probs = [p for s in steps for p in s.prob], alternatives
    if not stop or '\n\n' not in text:
        return reply, text, finish, None, token_probs
    while '\n\n' in _decoded(backend.text, reply[:-1]):
        reply.pop()  # one that begins with blank lines ends there
    return reply, text[: text.index('\n\n')], 'stop', '\n\n', token_probs


@lru_cache(4)
def _records(text):  # the part of a token's record that is always the same
    return [dict(token=b.decode(errors='replace'), bytes=[*b]) for b in _vocabulary(text)]


def _logprobs(
    text, reply, prob, alternatives, top
):  # a `StepTokenizer`; per token its id, its probability, `log_probs`
    "The protocol's record of each token of a reply: its log-probability, and the `top` likeliest alternatives."
    records = _records(text)
    logprobs = []

    def record(token, logprob, **more):
        return dict(records[token], logprob=max(logprob, -9999.0), **more)

    for token, p, (ids, logs) in zip(reply, prob, alternatives):
        near = dict(zip(ids.tolist(), logs.tolist()))
        own = near.get(
            token, float(np.log(max(p, 1e-300)))
        )  # the same to the last bit where it is shown
        logprobs.append(
            record(token, own, top_logprobs=[record(*pair) for pair in [*near.items()][:top]])
        )
    return logprobs


def cached_tokens(ids, beginnings):
    "Number of prompt tokens that count as cached. Adds the prompt's beginnings to the set of earlier ones."
    keys = {digest(*ids[:n]): n for n in range(1024, len(ids) + 1, 128)}
    cached = max((n for key, n in keys.items() if key in beginnings), default=0)
    beginnings.update(keys)
    return cached


class _Part:
    "The part of a reply that a stream has shown so far."

    def __init__(self, text, top):
        self.text = text  # a `StepTokenizer`
        self.top = top  # alternatives per token
        self.ids = []
        self.shown = ''

    def more(self, step, alternatives):
        "(The text of a further step that may be shown now, its tokens' log-probabilities)."
        self.ids += step.ids
        whole = _decoded(self.text, self.ids).rstrip('\ufffd')  # half a character waits
        new, self.shown = whole[len(self.shown) :], whole
        return new, _logprobs(self.text, step.ids, step.prob, alternatives, self.top)

    def rest(self, reply, text, token_probs):
        "The same for the rest of a finished reply."
        n = len(self.ids)
        probs = [values[n:] for values in token_probs]
        return text[len(self.shown) :], _logprobs(self.text, reply[n:], *probs, self.top)


class _Chat:
    "Serves a backend with a `continuing` template: a `Service` of `models.web`."

    def __init__(self, backend, name):
        self.backend = backend
        self.name = name
        self.beginnings = set()
        facts = {
            k: v
            for k, v in backend.settings().items()
            if k in ('weights', 'tokenizer', 'dtype', 'context')
        }
        template = digest(backend.text.hf.chat_template)
        self.facts = facts | dict(
            id=name, object='model', params=backend.spec.params, template=template
        )

    def models(self):
        return [self.facts]

    def read(self, raw):
        return _checked(raw, self.name)

    def head(self, kind):
        "The fields that each reply and each chunk begins with."
        name = f'chatcmpl-{secrets.token_hex(12)}'
        return dict(id=name, object=kind, created=int(time.time()), model=self.name)

    def usage(self, ids, reply):
        "Tokens of a prompt and of its reply."
        return dict(
            prompt_tokens=len(ids),
            completion_tokens=len(reply),
            total_tokens=len(ids) + len(reply),
            prompt_tokens_details=dict(cached_tokens=cached_tokens(ids, self.beginnings)),
        )

    async def complete(self, asked):
        "The reply to a checked request."
        body = asked.body
        ids = await asyncio.to_thread(_prompt_ids, self.backend, body['messages'])
        logprobs = None  # others go on
        reply, text, finish, stop, token_probs = await _written(self.backend, body, ids)
        if body.get('logprobs'):
            top = body.get('top_logprobs', 0)
            logprobs = dict(content=_logprobs(self.backend.text, reply, *token_probs, top))
        choice = dict(
            index=0,
            message=dict(role='assistant', content=text),
            finish_reason=finish,
            stop_reason=stop,
            logprobs=logprobs,
        )
        usage = self.usage(ids, reply)
        return self.head('chat.completion') | dict(choices=[choice], usage=usage)

    async def chunks(self, asked):
        "The reply in lists of chunks, a step each; a single step, which ends at a stop string, in one."
        body = asked.body
        head = self.head('chat.completion.chunk')
        if asked.include_usage:
            head['usage'] = None

        def chunk(delta, logprobs=(), finish=None, **more):
            choice = dict(index=0, delta=delta, finish_reason=finish, logprobs=None, **more)
            if body.get('logprobs') and logprobs:
                choice['logprobs'] = dict(content=logprobs)
            return head | dict(choices=[choice])

        ids = await asyncio.to_thread(_prompt_ids, self.backend, body['messages'])
        part = _Part(self.backend.text, body.get('top_logprobs', 0))
        steps = asyncio.Queue()  # and None at the end
        writing = asyncio.ensure_future(
            _written(self.backend, body, ids, lambda *step: steps.put_nowait(step))
        )
        writing.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            step = await steps.get()
            if step:
                yield [chunk(dict(role='assistant', content=''))]
            while step:
                text, logprobs = part.more(*step)
                yield [chunk(dict(content=text), logprobs)]
                step = await steps.get()
            reply, text, finish, stop, token_probs = await writing
        finally:
            writing.cancel()
            await asyncio.wait({writing})
        last = []
        if not part.ids:
            last.append(chunk(dict(role='assistant', content='')))
        text, logprobs = part.rest(reply, text, token_probs)
        if text or logprobs:
            last.append(chunk(dict(content=text), logprobs))
        last.append(chunk({}, finish=finish, stop_reason=stop))
        if asked.include_usage:
            last.append(head | dict(choices=[], usage=self.usage(ids, reply)))
        yield last


def _open_served(name, context):
    "Open the model to be served: a micro model by its name, or any that `TransformersBackend` opens."
    from .hub import TransformersBackend, load_micro

    micro = ['micro-small', 'micro-large']
    if (
        name not in micro
        and not Path(name).exists()
        and '/' not in name
        and (hint := nearest(name, micro))
    ):
        raise ValueError(
            f'unknown model {name!r}{hint}; give a micro model, a folder, or a name on the Hub'
        )
    options = dict(context=context or None, max_tokens=context or 4096)
    backend = (
        load_micro(name[6:], **options) if name in micro else TransformersBackend(name, **options)
    )
    hf = backend.text.hf
    if not hf.chat_template:
        raise ValueError(f'model {name!r} has no chat template, so a chat API cannot serve it')
    hf.chat_template = continuing(hf.chat_template)
    return backend


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


async def serve_forever(model, context):
    "Serve a model and print its address. The key comes from the environment."
    from tornado.netutil import bind_sockets

    chat = _Chat(_open_served(model, context), Path(model).name)
    sockets = bind_sockets(0, '127.0.0.1')
    Server(chat, sockets, os.environ['STEPWISE_ROUTING_KEY'])
    print(f'http://127.0.0.1:{sockets[0].getsockname()[1]}/v1', flush=True)
    for out in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # nobody reads on
    await asyncio.Event().wait()


@contextlib.contextmanager
def served(
    model: str = 'micro-large',  # micro-small, micro-large, a folder, or a name on the Hub
    key: str = '',  # what requests must show; "" asks for none
    context: int = 0,  # longest prompt and reply, in tokens; 0 takes the model's
):  # the server's base_url
    "A server process for a `with` block. RuntimeError, with its last line, if it does not start."
    code = (
        f'import asyncio, sys; sys.path[:] = {sys.path}; from stepwise_routing.models.serve import serve_forever; '
        f'asyncio.run(serve_forever({str(model)!r}, {context}))'
    )
    env = dict(os.environ, STEPWISE_ROUTING_KEY=key, OMP_NUM_THREADS='1')
    line = 'it said nothing'
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace')
    with watched([sys.executable, '-c', code], env=env, **output) as child:
        for line in filter(None, map(str.strip, child.stdout)):
            if line.startswith('http://'):
                break
        else:
            raise RuntimeError(f'the server of {model!r} did not start: {line}')
        yield line
