"""Faults of a paid API: real processes ask a real server that fails. What survives, what is lost, what is paid twice?

    python tests/helpers/faults.py                  run the tests of helpers/areas.py, write counts to tables/faults.md
    python tests/helpers/faults.py --soak 2000 10   everything at once: API calls, kill -9s; its rows go there, too
"""
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

from areas import AREAS, COLUMNS, FIRST, NOTE, try_area
from asker import OPTIONS, request
from faulty import Faulty, chain

from stepwise_routing.base.tools import digest
from stepwise_routing.models import replies
from stepwise_routing.models.ledger import CENT, Ledger

FAULTS = { # what the server does, or what is done to the process; the line that ends a run, where one ends
    '429': '', '500': '', 'reset': '', 'closed': '', 'malformed': '', 'drip': '', 'gzip': '', 'nan': '', 'above': '',
    'surrogate': '', 'listed': '', 'overbilled': 'counts more tokens',
    'no-usage': 'no usage record',
    'no-logprobs': 'no log-probabilities', 'kill -9': '', 'disk full': 'full|disk I/O'}
SIGNALS = 'kill -9', 'disk full'
STAGES = 'training', 'tables' # they call nobody; rollouts and walks do: chains to their end, and step by step
ROOT = Path(__file__).resolve().parents[2]
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
        if fault == 'ok': self.good.append(k)
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

def run(server, path, n, kill=None, limit=LIMIT, **options):
    "One process: (texts of the chains, last line of its errors, exit status); None for one that hangs."
    values = dict(url=server.url, ledger=str(path), n=n, max_cents=50, concurrency=4) | options
    code = [sys.executable, str(Path(__file__).parent/'asker.py'), json.dumps(values)]
    child = subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        child.stdout.readline()
        end, there = time.monotonic() + limit, len(server.seen)
        while kill and len(server.seen) < there + kill and child.poll() is None and time.monotonic() < end:
            time.sleep(.001)
        if kill: child.kill()
        out, errors = child.communicate(timeout=limit)
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
            book.check(faults.good, ended=status >= 0 and not full and 'counts more' not in line)
            first, lines = {}, lines + [line] * bool(line)
            if status == 0: break
        good = [] if done is None else [c == wanted(k) for k, c in enumerate(chains)]
        over = max(float(server.cents) - book.units/CENT, 0.) # billed, and not in the book
    row |= dict(survived=sum(good), rollouts=sum(good[::2]), walks=sum(good[1::2]), hit=len(faults.hit), over=over)
    return row | dict(lost=book.lost, twice=book.twice, believed=faults.believed(), lines=lines)

def work(stage, folder, room=None, kill=None):
    "A process that does a stage, killed after `kill` seconds of work; its exit status, None for one that hangs."
    values = json.dumps(dict(stage=stage, folder=str(folder), room=room))
    child = subprocess.Popen([sys.executable, str(Path(__file__).parent/'stage.py'), values], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    try:
        child.stdout.readline()
        if kill is not None: time.sleep(kill); child.kill()
        child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired: return None
    finally: child.kill()
    return child.returncode

def files(folder):
    paths = (p for p in Path(folder).rglob('*') if p.is_file() and p.suffix != '.part') # of a write that was killed
    return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}

def try_stage(fault, stage, folder, n=2):
    "One row: a stage is killed or finds no room and is done again, n times; are its files those of a whole run?"
    folder, r = Path(folder), random.Random(f'{fault} {stage}')
    row = dict(fault=fault, stage=stage, tried=n, survived=0, hit=0, lost=0, hung=0)
    began = time.monotonic()
    assert work(stage, folder/'whole') == 0
    took, whole = time.monotonic() - began, files(folder/'whole')
    for i in range(n):
        disturbed = dict(room=r.randint(200, 1500)) if fault == 'disk full' else dict(kill=r.uniform(0, took/2))
        words = [work(stage, folder/str(i), **disturbed), work(stage, folder/str(i))]
        row['hit'] += words[0] not in (0, None)
        row['hung'] += words.count(None)
        row['survived'] += words[1] == 0 and files(folder/str(i)) == whole
        row['lost'] += sum(files(folder/str(i)).get(name) != sha for name, sha in whole.items())
    return row

def soak(folder, calls=60, kills=2, seed=0, honest=False):
    """Many calls through a server that fails in every way, with kill -9s and a full disk in between; one row. The cap
    is low, and raised each time it is reached; `over`: cents due above it at the worst moment, `window`: what the
    calls in flight can be due."""
    r, kinds = random.Random(seed), ('429', '500', 'reset', 'malformed', 'drip', *['overbilled']*(not honest))
    pick = lambda body, hits: r.choice(kinds) if r.random() < .05*len(kinds) else 'ok'
    faults, book, runs, cap, over, ends = Once(pick), Book(Path(folder)/'ledger.db'), 0, 1, 0., Counter()
    plan = [dict(kill=r.randint(2, 20)) for _ in range(kills)]
    plan.insert(kills//2, dict(room=120_000 + 100*calls)) # bytes: less than is needed
    with Faulty(faults, delay=.002) as server:
        while True:
            faults.good.clear()
            first, runs = plan[0] if plan else {}, runs + 1
            done = run(server, book.path, calls, **first, limit=600, timeout=4, max_cents=cap)
            over = max(over, float(server.cents) - cap)
            if done is None: break
            book.check(faults.good, ended=done[2] >= 0 and not first and 'counts more' not in done[1])
            if 'cap reached' in done[1]: cap += 4 if honest else 20
            end = 'kill' if done[2] == -9 else 'full' if 'disk' in done[1] else ''
            ends[end] += 1
            if end or done[2] == 0: plan[:1] = [] # it was met, or there is nothing left to meet it
            if done[2] == 0 and not plan: break
        good = 0 if done is None else sum(c == wanted(k) for k, c in enumerate(done[0]))
        window = 4*float(max((c for _, c in server.book), default=0))
    return dict(fault='soak', honest=honest, tried=calls, survived=good, hit=len(faults.hit), lost=book.lost,
                twice=book.twice, hung=int(done is None), runs=runs, kills=ends['kill'], full=ends['full'], cap=cap,
                over=over, window=window, attempts=len(server.seen), believed=faults.believed())

# ---- the table

def note(row):
    "Put a row where the command below finds it, if that runs the tests."
    if path := os.environ.get('FAULTS_ROWS'):
        with open(path, 'a', encoding='utf-8') as f: f.write(json.dumps(row) + '\n')

def by_stage(row): # a row of `try_fault` is two of the table
    if 'stage' in row: return [row]
    half = row['tried']//2
    return [row | dict(stage=stage, tried=half, survived=row[stage]) for stage in ('rollouts', 'walks')]

def table(rows, columns):
    lines = ['| ' + ' | '.join(columns) + ' |', '|---|---|' + '--:|'*(len(columns) - 2)]
    cells = [[str(row.get(c, '–')) for c in columns.values()] for row in rows]
    return '\n'.join([*lines, *('| ' + ' | '.join(row) + ' |' for row in cells)])

def stamp():
    command = ['git', 'describe', '--always', '--dirty', '--exclude=*']
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return f'{date.today()}, commit {git.stdout.strip() or "unknown"}'

PARTS = '**Areas**', f'**{FIRST}**', '**Soak**'
SUITE = """
One process meets the fault; new ones go on until all is stored. Rollouts and walks are what these stages ask of an API:
whole chains, and single steps; the fault meets the first attempt of some requests. Survived are those that end as an
undisturbed server would have answered; lost and paid twice are replies of both stages. Training and tables call nobody
and are those of a toy run; survived are repetitions after which every file has the bytes of an undisturbed run.
"""
SOAK = """
The first attempt of each request meets each of 429, 500, reset, bad JSON, a slow drip and (but for the honest server)
overbilling with probability 5 %; in between kill -9s and a full disk. Survived are the chains that an undisturbed
server gives: a table is a function of them. The cap begins at one cent and is raised each time it is reached, up to
what is under Cap; Over: cents due above the cap of that time, at the worst moment; Window: what four calls in flight
can be due. What the server claims beyond what it was asked for is not due. All three are US cents.
"""
def write(part, when, text):
    "Put a part of tables/faults.md in its place; the others stay."
    path, parts = ROOT/'tables'/'faults.md', {}
    for piece in (path.read_text('utf-8') if path.is_file() else '').split('\n\n\n'):
        parts |= {name: piece.strip() for name in PARTS if piece.startswith(name)}
    parts[part] = f'{part}, {when}\n\n{text}'.strip()
    print(parts[part])
    path.write_text('\n\n\n'.join(parts[name] for name in PARTS if name in parts) + '\n', 'utf-8')

def write_areas(areas, when):
    "The table of areas, with its sum."
    numbers = [name for name in COLUMNS.values() if name != 'area']
    total = dict(area='All') | {name: sum(row[name] for row in areas) for name in numbers}
    write(PARTS[0], when, table([*areas, total], COLUMNS) + '\n' + NOTE)

def suite():
    "Run the tests of every area, then write what they measured; 1 if one of them failed."
    when = stamp()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder)/'rows'
        os.environ['FAULTS_ROWS'] = str(rows)
        areas = []
        for area in AREAS: # a run that is ended early leaves what it has measured
            areas.append(try_area(area))
            write_areas(areas, when)
        measured = [json.loads(line) for line in rows.read_text('utf-8').splitlines()]
    columns = dict(Fault='fault', Stage='stage', Tried='tried', Survived='survived', Lost='lost') | {
        'Paid twice': 'twice', 'Hung': 'hung'}
    write(PARTS[1], when, table([x for row in measured for x in by_stage(row)], columns) + '\n' + SUITE)
    return int(any(row['mended'] < row['trials'] for row in areas))

def long_soak(calls, kills):
    when, rows = stamp(), []
    for honest in (True, False):
        with tempfile.TemporaryDirectory() as folder: row = soak(folder, calls, kills, honest=honest)
        row |= dict(server='honest' if honest else 'overbills')
        print(row, flush=True)
        rows.append(row | {k: f'{row[k]:.3g}' for k in ('over', 'window')})
    columns = dict(Server='server', Processes='runs', Tried='tried', Attempts='attempts', Faults='hit') | {
        'kill -9': 'kills', 'Full disks': 'full', 'Survived': 'survived', 'Lost': 'lost',
        'Paid twice': 'twice', 'Hung': 'hung', 'Cap': 'cap', 'Over': 'over', 'Window': 'window'}
    write(PARTS[2], when, table(rows, columns) + '\n' + SOAK)
    return any(row['survived'] != calls or row['lost'] or row['twice'] or row['hung'] for row in rows)

if __name__ == '__main__':
    sys.exit(long_soak(*map(int, sys.argv[2:])) if sys.argv[1:2] == ['--soak'] else suite())
