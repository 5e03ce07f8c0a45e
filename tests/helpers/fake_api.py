"""A model behind an API on loopback that is paid, slow, or at fault. It keeps its own book of what it was asked.

`python fake_api.py FILE URL` asks it for all chains in a process of its own. It writes as vLLM, OpenAI or llama.cpp do: they differ in which tokens they show, and in what they say of the end.
"""

import json
import math
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stepwise_routing.data.benchmarks import find_benchmark
from stepwise_routing.models.api import ApiModel
from stepwise_routing.models.base import Request
from stepwise_routing.records import SEPARATOR, Problem
from stepwise_routing.store import Replies

PRICE = '0.4/0.1/1.6'
IN_FLIGHT = 8
PROBLEMS = [Problem('own', str(i), f'What is the number {i}?', str(i)) for i in range(100)]
WHOLE = [Request(problem, to_end=True) for problem in PROBLEMS]
PROBABILITIES = (0.9, 0.5, 0.75, 1.0)  # of the tokens of a reply, again and again
FIRST_TOKENS = {' Correct': 0.3, 'correct': 0.2, 'in': 0.1, 'c': 0.1, '': 0.1, 'The': 0.05}
ODD_USAGE = {  # faults
    'tokens null': dict(completion_tokens=None),
    'tokens below 0': dict(completion_tokens=-1),
    'tokens endless': dict(completion_tokens=10**30),
    'tokens none': dict(completion_tokens=0),
    'all cached': dict(prompt_tokens_details=dict(cached_tokens=10**6)),
}


def open_fake(url: str, replies: Replies, **options) -> ApiModel:
    options = dict(price=PRICE, concurrency=IN_FLIGHT, timeout=5, retries=2) | options
    return ApiModel('fake', replies, base_url=url, **options)


def chain_of(problem) -> list:
    "The steps that this model writes for a problem: between 2 and 5, with an answer at last."
    n = int(problem.id) % 4 + 1
    return [*(f'Step {i}: √{i}.' for i in range(n)), rf'Answer: \boxed{{{problem.id}}}.']


def tokens_of(text: str) -> list:
    "The bytes of each token: four characters each. The root is two tokens, and belongs to the second."
    tokens = []
    for first in range(0, len(text), 4):
        raw = text[first : first + 4].encode()
        at = raw.find(b'\xe2') + 1
        tokens += [part for part in (raw[:at], raw[at:]) if part]
    return tokens


def shown_token(i: int, raw: bytes) -> dict:
    "The i-th token of a reply with its log-probability."
    logs = {text: math.log(prob) for text, prob in FIRST_TOKENS.items()}
    top = [dict(token=text, logprob=log) for text, log in logs.items()]
    token = dict(token=raw.decode(errors='replace'), bytes=list(raw), top_logprobs=top)
    return token | dict(logprob=math.log(PROBABILITIES[i % 4]))


def events(reply: dict) -> bytes:
    "A reply as a stream: a chunk for each four characters, its end, and what it costs."
    (choice,) = reply['choices']
    text = choice.pop('message')['content']
    shown = choice.pop('logprobs', dict(content=[]))['content']
    deltas = []
    for first in range(0, len(text), 4):
        tokens = dict(content=[shown.pop(0)] if shown else [])
        deltas.append(dict(delta=dict(content=text[first : first + 4]), logprobs=tokens))
    deltas[-1]['logprobs']['content'] += shown  # those that are left
    chunks = [dict(choices=[dict(index=0) | delta]) for delta in deltas]
    chunks += [dict(choices=[choice | dict(delta={})]), dict(choices=[], usage=reply['usage'])]
    lines = [*map(json.dumps, chunks), '[DONE]']
    return ''.join(f'data: {line}\n\n' for line in lines).encode()


class FakeAPI:
    """The server, for the time of a `with` block. `fault`: what a request meets; with "first", each one only once.

    `delay`: seconds of a call; `kind`: "openai", "vllm" or "llama.cpp"."""

    def __init__(self, problems, fault='', delay=0.0, kind='openai'):
        prompt = find_benchmark('own').prompt
        self.chains = {prompt(p.question)[-1]['content']: chain_of(p) for p in problems}
        self.fault, self.delay, self.kind = fault, delay, kind
        self.bodies = []  # of all requests
        self.paid = Counter()  # requests -> calls
        self.cents = 0.0  # of them all, at `PRICE`
        self.lock = threading.Lock()

    def __enter__(self):
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.server.fake = self
        self.server.handle_error = lambda *_: None  # clients are killed on purpose
        self.url = f'http://127.0.0.1:{self.server.server_port}/v1'
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()

    def text(self, body: dict) -> tuple:
        "(The whole rest of a chain, None); if there is a stop string, (the next step, what ended it)."
        if body.get('top_logprobs'):
            return 'correct', None
        question = next(m['content'] for m in body['messages'] if m['content'] in self.chains)
        begun = [m['content'] for m in body['messages'] if m['role'] == 'assistant']
        rest = self.chains[question][''.join(begun).count(SEPARATOR) :]
        if 'stop' in body and len(rest) > 1:
            return rest[0], SEPARATOR
        return SEPARATOR.join(rest), None

    def reply(self, body: dict, fault: str) -> dict:
        choice = dict(index=0, finish_reason='length' if fault == 'limit' else 'stop')
        text, ended_by = self.text(body)
        if fault == 'blank' and 'stop' in body:
            text, ended_by = '', SEPARATOR
        tokens = tokens_of(text + (ended_by or ''))
        shown = tokens_of(text)
        if self.kind == 'llama.cpp' and ended_by:
            shown = shown[:-1]
        elif self.kind == 'vllm':
            choice['stop_reason'] = ended_by
            shown = tokens if ended_by else [*tokens, b'<end>']
        if fault == 'thoughts':
            shown = [b'He ', b'asks', *shown]
        elif fault == 'thoughts alone':
            text, shown = None, [b'He ', b'asks']
        choice['message'] = dict(role='assistant', content=text)
        if body.get('logprobs') and fault != 'no log-probabilities':
            choice['logprobs'] = dict(content=[*map(shown_token, range(len(shown)), shown)])
        prompt = sum(len(message['content']) for message in body['messages'])
        usage = dict(prompt_tokens=prompt, completion_tokens=len(tokens) + (not ended_by))
        usage['prompt_tokens_details'] = dict(cached_tokens=prompt // 32 * 32)
        reply = dict(object='chat.completion', choices=[choice], usage=usage)
        if body.get('return_prompt_text') and self.kind == 'vllm':
            last = body['messages'][-1]['content']
            reply['prompt_text'] = last.strip() if fault == 'trim' else last
        return reply

    def book(self, name: str, usage: dict) -> None:
        cached = usage['prompt_tokens_details']['cached_tokens']
        new, generated = usage['prompt_tokens'] - cached, usage['completion_tokens']
        with self.lock:
            self.paid[name] += 1
            self.cents += (new * 0.4 + cached * 0.1 + generated * 1.6) / 1e4


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, data: bytes, status: int = 200, missing: int = 0, kind='application/json'):
        self.send_response(status)
        self.send_header('content-type', kind)
        self.send_header('content-length', str(len(data)))
        self.send_header('retry-after-ms', '10')
        self.end_headers()
        self.wfile.write(data[: len(data) - missing])

    def do_POST(self):
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        with fake.lock:
            fault = fake.fault.removesuffix(' first')
            if fault != fake.fault and body in fake.bodies:
                fault = ''
            fake.bodies.append(body)
        if fault.isdigit():
            said = dict(message=f'not with\n{self.headers["authorization"]}')
            return self.send(json.dumps(dict(error=said)).encode(), int(fault))
        if fault == 'hang':
            return time.sleep(2)
        time.sleep(fake.delay)
        reply = fake.reply(body, fault)
        fake.book(json.dumps(body, sort_keys=True), reply['usage'])
        if body.get('stream'):
            return self.send(events(reply), kind='text/event-stream')
        if fault == 'html':
            return self.send(b'<html>Welcome</html>', kind='text/html')
        if fault == 'no usage':
            del reply['usage']
        if fault in ODD_USAGE:
            reply['usage'] |= ODD_USAGE[fault]
        if fault == 'no choices':
            reply['choices'] = []
        data = json.dumps(reply).encode()
        self.send(data[:60] if fault == 'cut' else data, missing=40 * (fault == 'torn'))


if __name__ == '__main__':
    open_fake(sys.argv[2], Replies(sys.argv[1])).write(WHOLE)
