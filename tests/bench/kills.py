"""Kills runs at random moments, continues them, and checks the results.

    python tests/bench/kills.py [--profile smoke recorded] [--moments 15] [--seed 0]

A run is started, ended by a signal, continued with --resume, ended again, and so on. At last it may finish. Three
things must hold: its tables equal those of an undisturbed run, no reply is in a ledger twice, and no process is left
after 10 s."""
import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from stepwise_routing.models.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
MARK = 'STEPWISE_KILLS' # variable in the environment of every process of a run
KINDS = dict(kill=(signal.SIGKILL, False), term=(signal.SIGTERM, False), hup=(signal.SIGHUP, False),
             ctrl_c=(signal.SIGINT, True), term_all=(signal.SIGTERM, True), hup_all=(signal.SIGHUP, True))
PATIENCE = 10 # seconds for processes to end

def begin(project, profile, mark):
    "Start `reproduce` in a process group of its own, as a shell does."
    code = 'from stepwise_routing.run.cli import main; main()'
    words = ['reproduce', '--project', str(project), '--profile', profile, '--run-id', 'tried', '--resume']
    environment = os.environ | {MARK: mark, 'PYTHONPATH': str(ROOT)}
    return subprocess.Popen([sys.executable, '-c', code, *words], env=environment, start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def alive(mark):
    "The processes of a run."
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE: found.append(process)
        except psutil.Error: pass
    return found

def seconds_until_none(mark, limit):
    "The seconds until all processes of a run have ended. At the limit, the rest are killed."
    start = time.monotonic()
    while left := alive(mark):
        if time.monotonic() - start > limit:
            names = [' '.join(process.cmdline())[-80:] for process in left]
            for process in left: process.kill()
            return limit, names
        time.sleep(.1)
    return time.monotonic() - start, []

def tables(project):
    "The bytes of the tables and of the outcomes of a run."
    folder = project/'runs'/'tried'
    files = [p for part in ('tables', 'api/outcomes', 'outcomes') for p in (folder/part).rglob('*') if p.is_file()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

def paid_twice(project):
    "The number of requests with more than one reply in a ledger."
    total = 0
    for path in (project/'runs'/'store').rglob('ledger.db'):
        with Ledger(path) as book:
            total += len(book.read('SELECT key FROM reply GROUP BY key HAVING count(*) > 1'))
    return total

def new_project(folder):
    shutil.copytree(ROOT/'nbs', folder/'nbs')
    return folder

def ended(project, profile, kind, wait):
    "End a run after `wait` seconds. Returns a row of observations, or None if it had finished before."
    mark = f'{os.getpid()}-{time.monotonic()}'
    child = begin(project, profile, mark)
    try:
        child.wait(wait)
        child.communicate()
        return None
    except subprocess.TimeoutExpired: pass
    number, to_all = KINDS[kind]
    (os.killpg if to_all else os.kill)(child.pid, number)
    seconds, left = seconds_until_none(mark, PATIENCE)
    return dict(kind=kind, after=round(wait, 1), seconds=round(seconds, 1), left=left, status=child.wait(),
                said=child.communicate()[1].strip().split('\n')[-1][-160:])

def trial(profile, moments, seed=0, longest=25., say=print):
    "(Rows of all moments, True if tables, ledgers and processes are as they should be)."
    r, rows = random.Random(f'{profile} {seed}'), []
    with tempfile.TemporaryDirectory() as tmp:
        whole, tried = (new_project(Path(tmp)/name) for name in ('whole', 'tried'))
        child = begin(whole, profile, 'whole')
        errors = child.communicate()[1]
        assert child.returncode == 0, errors
        wanted, kinds = tables(whole), list(KINDS)
        while len(rows) < moments:
            row = ended(tried, profile, kinds[len(rows) % len(kinds)], r.uniform(.5, longest))
            if row is None: # it has finished: look at it, then begin anew
                assert tables(tried) == wanted and not paid_twice(tried)
                shutil.rmtree(tried/'runs')
                continue
            rows.append(row)
            say(row)
        child = begin(tried, profile, 'tried')
        errors = child.communicate()[1]
        assert child.returncode == 0, errors
        return rows, dict(identical=tables(tried) == wanted, files=len(wanted), twice=paid_twice(tried),
                          left=sum(bool(row['left']) for row in rows))

def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--profile', nargs='+', default=['smoke', 'recorded'])
    parser.add_argument('--moments', type=int, default=15)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    bad = 0
    for profile in args.profile:
        _, found = trial(profile, args.moments, args.seed, say=lambda row: print(row, flush=True))
        print(profile, found, flush=True)
        bad += not found['identical'] or found['twice'] > 0 or found['left'] > 0
    return bad

if __name__ == '__main__': sys.exit(main())
