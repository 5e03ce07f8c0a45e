"An OpenAI-compatible server that fails when it is told to, and keeps its own book of what it puts on the bill."
import asyncio
import hashlib
import json
import random
import re
import socket
import struct
import threading
from fractions import Fraction

PER_MILLION = dict(input=Fraction('0.40'), cached=Fraction('0.10'), output=Fraction('1.60')) # dollars, GPT-4.1 mini
FREE = '429', '500', '503', 'refused' # nothing is billed for these
HIDDEN = 'hidden', 'one-token' # the token before the stop string has no log-probability
RETRIED = (*FREE, 'reset', 'closed', 'stall', 'malformed', 'no-choices')

def cents(prompt, cached, generated):
    p = PER_MILLION
    return ((prompt - cached)*p['input'] + cached*p['cached'] + generated*p['output']) / 10**4

def schedule(seed, share=.3, kinds=RETRIED):
    "A fault for a share of the requests, at random."
    r, lock = random.Random(seed), threading.Lock()
    def draw(body):
        with lock: return r.choice(kinds) if r.random() < share else 'ok'
    return draw

def words(text): return re.findall(r'\s*\S+|\s+$', text)

def chain(body):
    "The steps that this model writes for a conversation, and for nothing else."
    r = random.Random(json.dumps([body['messages'], body.get('seed')]))
    steps, total = [], r.randint(1, 9)
    for _ in range(r.randint(1, 4)):
        more = r.randint(1, 9)
        steps.append(f'Next, {total} + {more} = {total + more} √.')
        total += more
    return [*steps, rf'So the answer is \boxed{{{total}}}.']

class Faulty:
    "The server, in a thread of its own, for the time of a `with` block."
    def __init__(self, faults=(), key=None, models=('toy-model',), delay=0.):
        self.faults = faults if callable(faults) else list(faults)
        self.key, self.models, self.delay = key, models, delay
        self.book, self.seen = [], []    # (digest of the request, cents); bodies
        self.busy, self.busiest = 0, 0   # calls in flight

    @property
    def cents(self): return sum((c for _, c in self.book), Fraction(0))
    @property
    def url(self): return f'http://127.0.0.1:{self.port}/v1'

    def __enter__(self):
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        async def start():
            self.server = await asyncio.start_server(self._talk, '127.0.0.1', 0)
            self.port = self.server.sockets[0].getsockname()[1]
            ready.set()
        def serve(): self.loop.run_until_complete(start()); self.loop.run_forever()
        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *exc):
        async def end():
            self.server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}: task.cancel()
            await asyncio.sleep(0)
        asyncio.run_coroutine_threadsafe(end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    async def _talk(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b'\r\n\r\n')).decode()
                size = re.search(r'(?im)^content-length:\s*(\d+)', head)
                raw = await reader.readexactly(int(size[1])) if size else b''
                shown = re.search(r'(?im)^authorization: bearer (.*?)\r?$', head)
                if not await self._answer(head.split()[1], shown and shown[1], raw, writer): break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError): pass
        finally: writer.close()

    async def _send(self, writer, status, body, *more, cut=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = [f'HTTP/1.1 {status} X', 'Content-Type: application/json', f'Content-Length: {len(data)}', *more]
        writer.write('\r\n'.join(head).encode() + b'\r\n\r\n' + data[:cut])
        await writer.drain()
        return cut is None

    def _reset(self, writer):
        writer.get_extra_info('socket').setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        writer.transport.abort()
        return False

    async def _answer(self, path, shown, raw, writer):
        error = lambda line, **more: dict(error=dict(message=line, **more))
        if self.key and shown != self.key:
            return await self._send(writer, 401, error(f'Incorrect API key provided: {shown}'))
        if path.endswith('/models'):
            data = [dict(id=m, object='model', created=0, owned_by='x') for m in self.models]
            return await self._send(writer, 200, dict(object='list', data=data))
        body = json.loads(raw)
        if body['model'] not in self.models: return await self._send(writer, 404, error('The model does not exist'))
        self.seen.append(body)
        fault = self.faults(body) if callable(self.faults) else self.faults.pop(0) if self.faults else 'ok'
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await asyncio.sleep(self.delay)
            return await self._fault(fault, body, shown, writer, error)
        finally: self.busy -= 1

    async def _fault(self, fault, body, shown, writer, error):
        if fault in ('429', '500', '503'):
            return await self._send(writer, int(fault), error('Slow down, ' + str(shown)), 'Retry-After: 0')
        if fault in ('301', '403'): return await self._send(writer, int(fault), error('No'))
        if fault == 'refused': return await self._send(writer, 409, error('Conflict'))
        if fault == 'quota': return await self._send(writer, 429, error('No money', code='insufficient_quota'))
        if fault == 'bad': return await self._send(writer, 400, error(f'seed: not\nthis one, {shown}'))
        reply = self._reply(fault, body, shown)
        usage, name = reply['usage'], hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        cached = usage['prompt_tokens_details']['cached_tokens']
        self.book.append((name, cents(usage['prompt_tokens'], cached, usage['completion_tokens'])))
        if fault == 'stall': await asyncio.sleep(30); return False
        if fault == 'closed': return False
        if fault == 'no-usage': del reply['usage']
        if fault in ('no-choices', 'uncounted'): reply['choices'] = []
        if fault == 'no-finish': del reply['choices'][0]['finish_reason']
        if fault in ('uncounted', 'no-finish'): reply['usage'] = dict(prompt_tokens=0, completion_tokens=0)
        if fault == 'malformed': return await self._send(writer, 200, json.dumps(reply).encode()[:-40])
        if fault == 'reset': await self._send(writer, 200, reply, cut=60); return self._reset(writer)
        return await self._send(writer, 200, reply)

    def _reply(self, fault, body, shown):
        steps, finish = chain(body), 'stop'
        if fault == 'repeat': steps = [body['messages'][-2]['content'].split('\n\n')[-1], *steps]
        text = steps[0] if body.get('stop') else '\n\n'.join(steps)
        if fault == 'echo': text = f'{shown} ' + text
        pieces = words('' if fault == 'empty' else text)
        if fault == 'blank' and not body.get('stop'): pieces = words('\n\n' + text)
        if fault == 'blank' and body.get('stop'): pieces = []
        if fault == 'one-token' and body.get('stop'): pieces = pieces[:1]
        if len(pieces) > body['max_tokens'] or fault == 'length':
            pieces, finish = pieces[:max(1, min(body['max_tokens'], len(pieces) // 2))], 'length'
        content = None
        if body.get('logprobs') and fault != 'no-logprobs':
            top = range(body['top_logprobs'])
            beside = lambda i: [dict(token=f' w{j}', logprob=-.5 - j - i/100, bytes=None) for j in top]
            content = [dict(token=p, bytes=list(p.encode()), logprob=-.2 - i/50, top_logprobs=beside(i))
                       for i, p in enumerate(pieces)]
            if body.get('stop') and fault in HIDDEN: del content[-1:]
        prompt = sum(len(m['content'].encode()) // 3 + 5 for m in body['messages'])
        ended = finish == 'stop' and len(pieces) < body['max_tokens']
        usage = dict(prompt_tokens=prompt, completion_tokens=len(pieces) + ended,
                     prompt_tokens_details=dict(cached_tokens=prompt // 128 * 128 if prompt >= 1024 else 0))
        usage['total_tokens'] = prompt + usage['completion_tokens']
        choice = dict(index=0, message=dict(role='assistant', content=''.join(pieces)), finish_reason=finish,
                      logprobs=dict(content=content) if content or content == [] and fault not in HIDDEN else None)
        return dict(id='x', object='chat.completion', created=0, model=body['model'], choices=[choice], usage=usage)
