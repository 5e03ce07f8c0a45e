"""A model behind an API on loopback that is paid, slow, or at fault. It keeps its own book of what it was asked.

`python fake_api.py FILE URL CENTS` asks it for all chains in a process of its own. It writes as vLLM, OpenAI or llama.cpp do: they differ in which tokens they show, and in what they say of the end.
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
STATUS = {'429': 429, '500': 500, '401': 401}
PROBABILITIES = (0.9, 0.5, 0.75, 1.0)  # of the tokens of a reply, again and again
FIRST_TOKENS = {' Correct': 0.3, 'correct': 0.2, 'in': 0.1, 'c': 0.1, '': 0.1, 'The': 0.05}


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


def events(reply: dict) -> bytes:
    "A reply as a stream: a chunk for each four characters, its end, and what it costs."
    (choice,) = reply.pop('choices')
    usage, head = reply.pop('usage', None), reply | dict(object='chat.completion.chunk')
    text = choice.pop('message')['content'] or ''
    shown = (choice.pop('logprobs', None) or {}).get('content', [])
    pieces = [text[first : first + 4] for first in range(0, len(text), 4)]
    deltas = [dict(delta=dict(content=piece), finish_reason=None) for piece in pieces]
    for first, delta in enumerate(deltas if shown else ()):  # the last one has those that are left
        end = None if delta is deltas[-1] else first + 1
        delta['logprobs'] = dict(content=shown[first:end])
    chunks = [[dict(index=0) | delta] for delta in [*deltas, choice | dict(delta={})]]
    lines = [json.dumps(dict(head, choices=choices)) for choices in chunks]
    lines += [json.dumps(dict(head, choices=[], usage=usage)), '[DONE]']
    return ''.join(f'data: {line}\n\n' for line in lines).encode()


class FakeAPI:
    "The server, for the time of a `with` block."

    def __init__(
        self,
        problems=(),  # that it can solve
        fault: str = '',  # what a request meets; with "first": each question only once
        delay: float = 0.0,  # seconds, of a call
        kind: str = 'openai',  # or "vllm", "llama.cpp"
    ):
        self.chains = {}
        for problem in problems:
            question = find_benchmark(problem.benchmark).prompt(problem.question)[-1]['content']
            self.chains[question] = chain_of(problem)
        self.fault = fault
        self.delay = delay
        self.kind = kind
        self.bodies = []  # of all requests
        self.paid = Counter()  # questions -> calls
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

    # ---- what it says

    def reply(self, body: dict, fault: str) -> dict:
        "The whole rest of a chain, or the next step if there is a stop string."
        choice = dict(index=0, finish_reason='stop')
        if body.get('top_logprobs'):
            text, ended_by = 'correct', None
        else:
            text, ended_by = self.text(body)
        if fault == 'blank' and 'stop' in body:
            text, ended_by = '', SEPARATOR
        tokens = tokens_of(text + (ended_by or ''))
        if self.kind == 'llama.cpp' and ended_by:
            shown = tokens_of(text)[:-1]
        elif self.kind == 'vllm':
            choice['stop_reason'] = ended_by
            shown = tokens if ended_by else [*tokens, b'<end>']
        else:
            shown = tokens_of(text)
        if fault in ('thoughts', 'thoughts alone'):
            text = text if fault == 'thoughts' else None
            shown = [b'He ', b'asks', *(shown if text else [])]
        choice['message'] = dict(role='assistant', content=text)
        if body.get('logprobs') and fault != 'no log-probabilities':
            choice['logprobs'] = dict(content=[self.token(*pair) for pair in enumerate(shown)])
        prompt = sum(len(message['content']) for message in body['messages'])
        usage = dict(prompt_tokens=prompt, completion_tokens=len(tokens) + (not ended_by))
        usage['prompt_tokens_details'] = dict(cached_tokens=prompt // 32 * 32)
        head = dict(id='1', object='chat.completion', created=1, model=body['model'])
        reply = dict(head, choices=[choice], usage=usage)
        if body.get('return_prompt_text') and self.kind == 'vllm':
            prompt = body['messages'][-1]['content']
            reply['prompt_text'] = prompt.strip() if fault == 'trim' else prompt
        return reply

    def text(self, body: dict) -> tuple:
        "(Text, the stop string that ended it)."
        question = next(m['content'] for m in body['messages'] if m['content'] in self.chains)
        begun = [m['content'] for m in body['messages'] if m['role'] == 'assistant']
        rest = self.chains[question][''.join(begun).count(SEPARATOR) :]
        if body.get('stop') and len(rest) > 1:
            return rest[0], SEPARATOR
        return SEPARATOR.join(rest), None

    def token(self, i: int, raw: bytes) -> dict:
        logprob = math.log(PROBABILITIES[i % len(PROBABILITIES)])
        top = []
        for text, prob in FIRST_TOKENS.items():
            top.append(dict(token=text, logprob=math.log(prob), bytes=None))
        token = raw.decode(errors='replace')
        return dict(token=token, bytes=list(raw), logprob=logprob, top_logprobs=top)

    def book(self, name: str, usage: dict) -> None:
        cached = usage['prompt_tokens_details']['cached_tokens']
        prompt, generated = usage['prompt_tokens'], usage['completion_tokens']
        with self.lock:
            self.paid[name] += 1
            self.cents += ((prompt - cached) * 0.4 + cached * 0.1 + generated * 1.6) / 1e4


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def send(self, data: bytes, status: int = 200, missing: int = 0, kind='application/json'):
        self.send_response(status)
        self.send_header('content-type', kind)
        self.send_header('content-length', str(len(data)))
        self.send_header('retry-after-ms', '10')
        self.end_headers()
        self.wfile.write(data[: len(data) - missing])
        self.close_connection = missing > 0

    def do_POST(self):
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        name = json.dumps(body, sort_keys=True)
        with fake.lock:
            fault = fake.fault.removesuffix(' first')
            if fault != fake.fault and body in fake.bodies:
                fault = ''
            fake.bodies.append(body)
        if fault in STATUS:
            said = dict(message=f'not with\n{self.headers["authorization"]}')
            return self.send(json.dumps(dict(error=said)).encode(), STATUS[fault])
        if fault == 'hang':
            time.sleep(2)
            return
        time.sleep(fake.delay)
        reply = fake.reply(body, fault)
        fake.book(name, reply['usage'])
        if fault == 'no usage':
            del reply['usage']
        if fault == 'no choices':
            reply['choices'] = []
        data = json.dumps(reply).encode()
        if body.get('stream') and reply.get('choices'):
            return self.send(events(reply), kind='text/event-stream')
        if fault == 'html':
            return self.send(b'<html>Welcome</html>', kind='text/html')
        if fault == 'torn':
            return self.send(data, missing=40)
        self.send(data[:60] if fault == 'cut' else data)


if __name__ == '__main__':
    path, url, cents = sys.argv[1:]
    chains = open_fake(url, Replies(path, float(cents))).write(WHOLE)
    print(len(chains), 'chains')
