"""Faults of a paid API: real processes ask a real server that fails. What survives, what is lost, what is paid twice?
`run_faults()` returns the table as rows; `soak()` goes on for longer, with everything at once."""
import json, random, subprocess, sys, time
from collections import Counter
from pathlib import Path

from asker import OPTIONS, request
from faulty import Faulty, chain
from stepwise_routing.core import digest
from stepwise_routing.models import replies
from stepwise_routing.models.ledger import CENT, Ledger

FAULTS = { # what the server does, or what is done to the process; the line that ends a run, where one ends
    '429': '', '500': '', 'reset': '', 'closed': '', 'malformed': '', 'drip': '', 'gzip': '', 'nan': '', 'above': '',
    'surrogate': '', 'listed': '', 'overbilled': 'for a call that could cost', 'no-usage': 'no usage record',
    'no-logprobs': 'no log-probabilities', 'kill -9': '', 'disk full': 'full|disk I/O'}
SIGNALS = 'kill -9', 'disk full'
LIMIT = 60 # seconds for a process

def wanted(k): return chain(dict(messages=replies.step_messages(request(k)), seed=1000*k))[:None if k % 2 == 0 else 1]

def key(body): return digest(json.dumps(dict(at=OPTIONS['identity'], body=body), sort_keys=True), size=16)

class Once:
    "A fault for the first attempt of a share of the requests; good replies are noted."
    def __init__(self, pick): # body, its number -> name of a fault or 'ok'
        self.pick, self.hit, self.good, self.answered = pick, {}, [], set()
    def __call__(self, body):
        k = key(body)
        fault = 'ok' if k in self.hit else self.pick(body, len(self.hit))
        if fault != 'ok': self.hit[k] = fault
        if fault in ('ok', 'overbilled'): self.good.append(k)
        self.answered.update(self.good)
        return fault
    def believed(self): return len(self.hit.keys() - self.answered) # bad replies that were taken for good ones

class Book:
    "The ledger between two processes: no reply may leave it, and none that is in it may be asked for again."
    def __init__(self, path): self.path, self.keys, self.lost, self.twice, self.units = path, set(), 0, 0, 0
    def check(self, good, ended): # requests answered in this run; did it end by itself?
        with Ledger(self.path) as book:
            there = {k for k, in book.read('SELECT DISTINCT key FROM reply')}
            self.units, answered = book.units, Counter(good)
        self.lost += len(self.keys - there) + (len(answered.keys() - there) if ended else 0)
        self.twice += len(self.keys & answered.keys()) + (sum(answered.values()) - len(answered) if ended else 0)
        self.keys = there

def run(server, path, n, kill=None, **options):
    "One process: (texts of the chains, last line of its errors, exit status); None for one that hangs."
    values = dict(url=server.url, ledger=str(path), n=n, max_cents=50, concurrency=4) | options
    code = [sys.executable, str(Path(__file__).parent/'asker.py'), json.dumps(values)]
    child = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        child.stdout.readline()
        end, there = time.monotonic() + LIMIT, len(server.seen)
        while kill and len(server.seen) < there + kill and child.poll() is None and time.monotonic() < end:
            time.sleep(.001)
        if kill: child.kill()
        out, errors = child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired: return None
    finally: child.kill()
    assert 'Traceback' not in errors, errors
    return json.loads(out or '[]'), errors.strip().rpartition('\n')[2], child.returncode

def try_fault(fault, folder, n=12):
    "One row: a process meets the fault, others go on until all chains are there."
    pick = lambda body, hits: fault if fault not in SIGNALS and hits < (1 if fault == 'overbilled' else n//3) else 'ok'
    first = dict(kill=n//2) if fault == 'kill -9' else dict(room=120_000) if fault == 'disk full' else {}
    faults, book, lines = Once(pick), Book(Path(folder)/'ledger.db'), []
    row = dict(fault=fault, tried=n, survived=0, hit=0, lost=0, twice=0, hung=0, runs=0, over=0.)
    with Faulty(faults, delay=.01) as server:
        for _ in range(4):
            faults.good.clear()
            done = run(server, book.path, n, **first, timeout=2 if fault == 'drip' else 30)
            row['runs'], row['hung'], full = row['runs'] + 1, row['hung'] + (done is None), 'room' in first
            if done is None: break
            chains, line, status = done
            book.check(faults.good, ended=status >= 0 and not full and 'for a call' not in line)
            first, lines = {}, lines + [line] * bool(line)
            if status == 0: break
        good = 0 if done is None else sum(c == wanted(k) for k, c in enumerate(chains))
        over = max(float(server.cents) - book.units/CENT, 0.) # billed, and not in the book
    return row | dict(survived=good, hit=len(faults.hit), lost=book.lost, twice=book.twice, over=over,
                      believed=faults.believed(), lines=lines)

def run_faults(folder, names=FAULTS): # rows of the table
    return [try_fault(f, Path(folder)/f'fault-{i}') for i, f in enumerate(names)]

def soak(folder, calls=60, kills=2, seed=0):
    "Many calls through a server that fails in every way, with kill -9s and a full disk in between; one row."
    r, kinds = random.Random(seed), ('429', '500', 'reset', 'malformed', 'drip', 'overbilled')
    pick = lambda body, hits: r.choice(kinds) if r.random() < .05*len(kinds) else 'ok'
    faults, book, runs = Once(pick), Book(Path(folder)/'ledger.db'), 0
    plan = [dict(kill=r.randint(2, max(calls//(2*kills), 3))) for _ in range(kills)] + [dict(room=300_000)]
    with Faulty(faults, delay=.002) as server:
        while True:
            faults.good.clear()
            first, runs = plan.pop() if plan else {}, runs + 1
            done = run(server, book.path, calls, **first, timeout=2, max_cents=500)
            if done is None: break
            book.check(faults.good, ended=done[2] >= 0 and not first and 'for a call' not in done[1])
            if done[2] == 0 and not plan: break
        good = 0 if done is None else sum(c == wanted(k) for k, c in enumerate(done[0]))
        over = max(float(server.cents) - book.units/CENT, 0.)
    return dict(fault='soak', tried=calls, survived=good, hit=len(faults.hit), lost=book.lost, twice=book.twice,
                hung=int(done is None), runs=runs, over=over, believed=faults.believed())
