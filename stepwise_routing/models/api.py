"""A model behind an OpenAI-compatible API: OpenAI, a vLLM or llama.cpp server, Ollama.

A reply is on disk before it is used. Retries, timeouts and types are those of the `openai` client. An API shows no
logits: S^os needs a local model or vLLM; S^API needs `logprobs=True`.
"""

import hashlib
import json
import math
import os
import re
from codecs import getincrementaldecoder
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from urllib.parse import urlsplit

from tqdm import tqdm

from ..data.benchmarks import find_benchmark
from ..records import PRICES, SEPARATOR, ModelSpec, boxed, find_price, token_cents, undated
from ..store import Replies
from .base import Preference, Request, reply_steps, step_text

CONTINUE = 'Continue exactly after the last step. Do not repeat any step.'
TOP = 20  # likeliest tokens that a server shows
MOST_TOKENS = 10**9  # of a reply; more is no count
LOST = '\ufffd'  # stands for bytes that are no character
# a token such as <|im_start|>, which vLLM leaves out of the text
SPECIAL = re.compile(r'<[^<>\s]+>')


def is_loopback(base_url: str) -> bool:
    "Is this the address of a server on this machine?"
    host = urlsplit(base_url).hostname or ''
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def read_key(key_env: str, base_url: str) -> str:
    "The key in an environment variable. ValueError if there is none, for a server on another machine."
    key = os.environ.get(key_env, '').strip()
    if not key and not is_loopback(base_url):
        host = urlsplit(base_url).hostname
        raise ValueError(
            f'no API key: put the one for {host} into the environment variable {key_env}'
        )
    return key or 'no-key'


def price_of(model: str, price: str | None, base_url: str) -> str | None:
    "The price of a model: the one given, or the row of `PRICES` with its name. None: free, as unknown ones here are."
    if price == 'free':
        return None
    family = undated(model)
    if price is None and family not in PRICES:
        if is_loopback(base_url):
            return None
        form = 'pass price="INPUT/CACHED/OUTPUT" in US dollars per million tokens, or price="free"'
        raise ValueError(f'no price is known for {model!r}: {form}')
    find_price(price or family)
    return price or family


def token_probs(tokens, text: str) -> list:
    "(Text, probability) of each token of a reply. A character of several tokens belongs to its last one."
    characters = getincrementaldecoder('utf-8')('ignore')
    probs, end = [], 0
    for token in tokens:
        piece = characters.decode(bytes(token.get('bytes') or token['token'].encode()))
        piece = piece.replace(LOST, '')
        if SPECIAL.fullmatch(piece) and not text.startswith(piece, end):
            piece = ''
        end += len(piece)
        probs.append((piece, math.exp(min(token['logprob'], 0.0))))
    return probs


def spell(probs, text: str, generated: int) -> bool:
    "Do tokens spell a text? vLLM adds the one that ended it; llama.cpp drops those with the stop string."
    pieces = [piece for piece, _ in probs]
    whole = ''.join(pieces)
    inner = ''.join(pieces[:-1]).rstrip()
    is_longer = whole.startswith(text) and text.startswith(inner)
    return is_longer or text.startswith(whole) and generated - len(pieces) <= 2


def check_prompt(prompt: str | None) -> None:
    "ValueError if a prompt that goes on with a chain, as vLLM tells it, has lost the blank line behind the chain."
    if prompt is not None and not prompt.endswith(SEPARATOR):
        raise ValueError(
            "its chat template cuts the blank line behind a step: start the server with --chat-template FILE, "
            'a copy without "trim"'
        )


def read_usage(usage: dict) -> tuple:  # (prompt, cached, generated) tokens
    "What a reply costs, in tokens. ValueError where nobody can know."
    details = usage.get('prompt_tokens_details') or {}
    cached = details.get('cached_tokens') or 0
    counts = usage['prompt_tokens'], cached, usage['completion_tokens']
    is_known = all(type(count) is int and 0 <= count < MOST_TOKENS for count in counts)
    if not is_known or cached > counts[0]:
        raise ValueError(f'its usage says {counts} tokens of prompt, cached and written')
    return counts


class ApiModel:
    "A language model $M_k$ behind an API."

    has_step_seeds = False

    def __init__(
        self,
        model: str,  # its name there
        replies: Replies,  # shared by all models with one cap
        index: int = 1,  # place among the models
        base_url: str = 'https://api.openai.com/v1',
        key_env: str = 'OPENAI_API_KEY',  # environment variable with the key
        # row of `PRICES`, "INPUT/CACHED/OUTPUT" in US dollars per million tokens, or "free"; None: by its name
        price: str | None = None,
        params: float = 0.0,  # number of parameters, for FLOPs
        name: str | None = None,  # for tables; None: `model`
        temperature: float = 0.7,  # of sampling; 0 = greedy
        max_tokens: int = 512,  # of a step
        max_reply: int = 2048,  # of all steps up to the end
        logprobs: bool = False,  # only a small model needs them
        can_continue: bool = False,  # can the server go on with an assistant's message? vLLM can, OpenAI cannot
        concurrency: int = 32,  # calls in flight
        timeout: float = 600.0,  # seconds for a call; a longer one is lost, and may be billed
        retries: int = 6,  # of 429, 5xx, timeouts and broken connections
        **body,  # other fields of each request, such as top_p or extra_body
    ):
        import openai

        key = read_key(key_env, base_url)
        self.client = openai.OpenAI(
            base_url=base_url, api_key=key, timeout=timeout, max_retries=retries
        )
        self.url = base_url
        self.model = model
        self.index = index
        self.spec = ModelSpec(name or model, params, price_of(model, price, base_url))
        self.replies = replies
        self.max_tokens = max_tokens
        self.max_reply = max_reply
        self.body = dict(model=model, temperature=temperature, **body)
        self.logprobs = logprobs
        self.can_continue = can_continue
        self.concurrency = concurrency
        if self.spec.price:
            spent = f'{replies.spent:.2f} spent so far'
            print(f'{model}: at most {replies.max_cents:g} US cents, {spent}')

    def settings(self) -> dict:
        "What the draws depend on, as JSON. A server on this machine may move."
        server = 'loopback' if is_loopback(self.url) else self.url
        return dict(
            backend='openai',
            server=server,
            logprobs=self.logprobs,
            can_continue=self.can_continue,
            max_tokens=self.max_tokens,
            max_reply=self.max_reply,
            **self.body,
        )

    # ---- paying

    def ask(self, bodies: list, on_text=None) -> list:
        "The replies to requests, as JSON: kept ones, or paid for now. RuntimeError in one line if there is none."
        texts = [json.dumps(self.body | body, sort_keys=True) for body in bodies]
        keys = [hashlib.sha256((self.url + text).encode()).hexdigest() for text in texts]
        found = {key: self.replies.get(key) for key in keys}
        new = {key: body for key, body in zip(keys, bodies) if found[key] is None}
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            paid = pool.map(lambda key: self.pay(key, new[key], on_text), new)
            bar = dict(desc=self.spec.name, total=len(new), leave=False, disable=len(new) < 2)
            found |= zip(new, tqdm(paid, **bar))
        finally:  # calls in flight are waited for and kept; others do not begin
            pool.shutdown(cancel_futures=True)
        return [found[key] for key in keys]

    def pay(self, key: str, body: dict, on_text) -> dict:
        import openai

        self.replies.check_cap()
        try:
            if on_text:
                reply = self.streamed(body, on_text)
            else:
                reply = self.client.chat.completions.create(**self.body | body)
                if isinstance(reply, str):
                    raise ValueError('a page, and no reply; most base_urls end with /v1')
                reply = reply.to_dict() if reply else {}
            if reply.get('error') or not reply.get('choices'):
                raise ValueError(f'it has no choices: {reply.get("error", "")}')
            if not reply.get('usage'):
                raise ValueError('its usage is missing, so nobody knows what it costs')
            text, _, usage, probs = self.read(reply)
            check_prompt(reply.pop('prompt_text', None))
            if body.get('logprobs') and not spell(probs, text, usage[2]):
                raise ValueError('its log-probabilities are missing, or do not spell its text')
            cents = self.cents(usage)
        except (openai.OpenAIError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = ' '.join(f'{type(error).__name__}: {error}'.split())
            reason = reason.replace(self.client.api_key, '***')
            if isinstance(error, openai.NotFoundError):
                reason += '; most base_urls end with /v1, and NAME in openai:NAME is the one there'
            line = f'no reply of {self.model} at {self.url}: {reason[:400]}'
            raise RuntimeError(line) from None
        self.replies.put(key, reply, cents)
        return reply

    def streamed(self, body: dict, on_text) -> dict:
        "A reply as JSON. `on_text` is told the text so far, whenever it grows."
        more = dict(stream=True, stream_options=dict(include_usage=True))
        text, choice, usage, tokens = '', {}, None, []
        for chunk in self.client.chat.completions.create(**self.body | body | more):
            for part in chunk.choices:
                text += part.delta.content or ''
                choice |= part.to_dict()
                tokens += (choice.pop('logprobs', None) or {}).get('content') or []
            if chunk.usage:
                usage = chunk.usage.to_dict()
            on_text(text)
        choice |= dict(message=dict(content=text), logprobs=dict(content=tokens))
        return dict(choices=[choice], usage=usage)

    def cents(self, usage: tuple) -> float:
        return token_cents(self.spec.price, *usage) if self.spec.price else 0.0

    def read(self, reply: dict) -> tuple:
        """Text, finish, usage (prompt, cached, generated tokens), and (token, probability) pairs of a reply.

        The finish is "step" if the stop string may have ended it.
        """
        choice = reply['choices'][0]
        usage = read_usage(reply['usage'])
        text = (choice['message'].get('content') or '').replace(LOST, '')
        ended_by = choice.get('stop_reason', SEPARATOR)  # OpenAI does not tell, vLLM does
        finish = 'step' if ended_by == SEPARATOR else 'stop'
        if choice['finish_reason'] == 'length':
            finish = 'length'
        probs = token_probs((choice.get('logprobs') or {}).get('content') or (), text)
        if text and not usage[2]:
            raise ValueError('its usage says that nothing was written')
        return text, finish, usage, probs

    # ---- writing

    def request_body(self, request: Request) -> dict:
        "The fields of a call."
        messages = find_benchmark(request.problem.benchmark).prompt(request.problem.question)
        body = dict(
            max_tokens=self.max_reply if request.to_end else self.max_tokens,
            seed=request.seed(0, self.index) % 2**31,
        )
        if request.steps:
            chain = ''.join(step.text + SEPARATOR for step in request.steps)
            messages = [*messages, dict(role='assistant', content=chain)]
            if self.can_continue:
                more = dict(add_generation_prompt=False, continue_final_message=True)
                more['return_prompt_text'] = True  # for `check_prompt`
                body['extra_body'] = self.body.get('extra_body', {}) | more
            else:
                messages.append(dict(role='user', content=CONTINUE))
        if not request.to_end:
            body['stop'] = SEPARATOR
        if self.logprobs:
            body['logprobs'] = True
        return body | dict(messages=messages)

    def write(self, requests) -> list:
        "A tuple of `Step`s per request: one, or several if the request is `to_end`."
        bodies = [self.request_body(request) for request in requests]
        for body, reply in zip(bodies, self.ask(bodies)):
            text, finish, *_ = self.read(reply)
            if finish == 'step' and not text.strip():
                body.pop('stop', None)  # a blank line before the step was taken for its end
        written = []
        for request, body, reply in zip(requests, bodies, self.ask(bodies)):
            text, finish, usage, probs = self.read(reply)
            if finish == 'step' and 'stop' not in body:
                finish = 'stop'
            written.append(reply_steps(request, self.index, text, finish, usage, probs))
        return written

    def stream(self, request: Request, on_step) -> tuple:  # of `Step`s
        "As `write` of one request to its end. `on_step` is told the text of each step but the last, as soon as it ends."
        start = told = 0

        def on_text(text):
            nonlocal start, told
            while told < request.room - 1:
                body, lead, ended = step_text(text[start:])
                if not ended or boxed(body, request.problem.question) is not None:
                    return
                on_step(body)
                told += 1
                start = text.index(SEPARATOR, start + lead) + len(SEPARATOR)

        (reply,) = self.ask([self.request_body(request)], on_text)
        text, finish, usage, probs = self.read(reply)
        finish = 'stop' if finish == 'step' else finish  # there was no stop string
        return reply_steps(request, self.index, text, finish, usage, probs)

    def score(self, requests):
        raise TypeError(f'{self.model}: an API shows no confidences in steps that others wrote')

    def choose(self, conversations, options) -> list:
        "A `Preference` per conversation, from the likeliest first tokens of the reply."
        body = dict(max_tokens=1, temperature=0.0, logprobs=True, top_logprobs=TOP)
        preferences = []
        for reply in self.ask([dict(body, messages=messages) for messages in conversations]):
            mass = dict.fromkeys(options, 1e-30)
            for token in reply['choices'][0]['logprobs']['content'][0]['top_logprobs']:
                text = token['token'].strip().lower()
                begun = [option for option in options if text and option.lower().startswith(text)]
                if len(begun) == 1:
                    mass[begun[0]] += math.exp(token['logprob'])
            total = sum(mass.values())
            prob = tuple(part / total for part in mass.values())
            prompt, cached, generated = self.read(reply)[2]
            preferences.append(Preference(prob, prompt, generated, cached))
        return preferences
