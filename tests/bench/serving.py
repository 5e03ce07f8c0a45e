"""How long does a user wait for a step when 200 streams run at once?
`python tests/bench/serving.py [--streams 200] [--repeats 3] [--benchmark micro-gsm]`

A server in this process serves the micro pair, with a bare threshold as its router. The clients are in another
process and read raw streams. Three things are measured in turns: `route` on the list of questions, all streams of the
router at once, and all streams of the small model alone at once. The table has medians over the repeats: seconds to
the first step and between steps (p50, p95), their ratios to the small model alone, and the server's throughput as a
share of that of `route`. Every streamed text is compared with `route`'s. The script ends if a text differs, or after
an error. Other work on the machine disturbs the seconds more than the ratios."""
import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]/'helpers'))

# ---- the clients' process

async def stream(port, model, question):
    "(Text, when each step came) of a streamed answer."
    body = dict(model=model, stream=True, seed=0, messages=[dict(role='user', content=question)])
    raw = json.dumps(body).encode()
    words = 'POST /v1/chat/completions HTTP/1.1', 'Host: 127.0.0.1', 'Connection: close', f'Content-Length: {len(raw)}'
    head = '\r\n'.join(words) + '\r\n\r\n'
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    writer.write(head.encode() + raw)
    text, times, has_ended = '', [], False
    async for line in reader:
        if line.startswith(b'data: [DONE]'): has_ended = True
        elif line.startswith(b'data: '):
            choices = json.loads(line[6:])['choices'] # KeyError: an error
            piece = choices[0]['delta'].get('content') if choices else None
            if piece:
                text += piece
                times.append(time.perf_counter() - began)
    writer.close()
    assert has_ended, 'a stream broke off'
    return text, times

async def all_streams(port, model, questions):
    began = time.perf_counter()
    answers = await asyncio.gather(*(stream(port, model, q) for q in questions))
    return dict(seconds=time.perf_counter() - began, texts=[t for t, _ in answers], times=[t for _, t in answers])

def client(port, model): print(json.dumps(asyncio.run(all_streams(port, model, json.load(sys.stdin)))))

def asked(url, model, questions):
    "Run the clients' process. Returns the texts and times that it saw."
    command = [sys.executable, __file__, '--client', url.split(':')[2].split('/')[0], model]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True)
    if done.returncode: sys.exit(done.stderr)
    return json.loads(done.stdout)

# ---- what is measured

def waits(seen):
    "p50 and p95 of the time to the first step and between steps."
    first = [t[0] for t in seen['times'] if t]
    between = np.concatenate([np.diff(t) for t in seen['times']])
    return [float(np.quantile(values, q)) for values in (first, between) for q in (.5, .95)]

def main():
    parser = argparse.ArgumentParser(description='Waiting times and throughput of a server under load.')
    parser.add_argument('--streams', type=int, default=200)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--benchmark', default='micro-gsm')
    parser.add_argument('--client', nargs=2, metavar=('PORT', 'MODEL'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client: return client(*args.client)
    import torch
    from micro_router import micro_router, micro_server

    from stepwise_routing.data.benchmarks import load_problems
    torch.set_num_threads(1)
    questions = [p.question for p in load_problems(args.benchmark, 'test', args.streams)]
    routed, small, shares, work = [], [], [], []
    with TemporaryDirectory() as tmp, micro_router(Path(tmp)/'policy') as router, micro_server(router) as url:
        router.route(questions[:8]) # warms up
        for _ in range(args.repeats):
            began, cpu = time.perf_counter(), time.process_time()
            answers = router.route(questions)
            alone, cpu_alone = time.perf_counter() - began, time.process_time() - cpu
            cpu = time.process_time()
            seen = asked(url, 'mine', questions)
            work.append(cpu_alone/(time.process_time() - cpu))
            assert seen['texts'] == [a.text for a in answers], 'a streamed text is not what route answers'
            routed.append(waits(seen))
            small.append(waits(asked(url, 'small', questions)))
            shares.append(alone/seen['seconds'])
    handed = sum('1' in a.path for a in answers)
    print(f'{len(questions)} streams at once, {args.benchmark}, {handed} handed over, {args.repeats} repeats; '
          'no error, every text as of route')
    print('| | first step, p50 | p95 | between steps, p50 | p95 |\n|---|--:|--:|--:|--:|')
    rows = [[statistics.median(column) for column in zip(*table)] for table in (routed, small)]
    for name, row in zip(('router, s', 'small model alone, s'), rows):
        print(f'| {name} |', *(f'{x:.3f} |' for x in row))
    ratios = [statistics.median(a/b for a, b in zip(*pair)) for pair in zip(zip(*routed), zip(*small))]
    print('| ratio |', *(f'{x:.2f} |' for x in ratios))
    for what, values in (('by the clock', shares), ("by this process' processor time", work)):
        print(f"throughput as a share of route's, {what}: {statistics.median(values):.2f} "
              f'({min(values):.2f} to {max(values):.2f})')

if __name__ == '__main__': main()
