"""A search for inputs that break five areas: replies, grading, settings, stores, requests. Its properties are those of
tests/test_fuzz.py.

    python tests/helpers/fuzz.py MINUTES [SEED]

Round after round with another seed, until the time is over. Without a seed it begins at one that was never used; with
the seed of a round that failed, the same examples are tried again."""
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMES = '10' # as many examples as `make test` takes

def search(minutes, seed):
    "The seeds of rounds that found something, and the number of rounds."
    end, found, rounds = time.monotonic() + 60*minutes, [], 0
    while time.monotonic() < end:
        command = [sys.executable, '-m', 'pytest', '-q', '--tb=short', '--maxfail=20', '-p', 'no:cacheprovider',
                   f'--hypothesis-seed={seed}', str(ROOT/'tests'/'test_fuzz.py')]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(STEPWISE_FUZZ=TIMES))
        left = max(end - time.monotonic(), 0)/60
        print(f'seed {seed}: {"nothing" if done.returncode == 0 else "FOUND"}; {left:.0f} min left', flush=True)
        if done.returncode: found.append(seed)
        seed, rounds = seed + 1, rounds + 1
    return found, rounds

if __name__ == '__main__':
    found, rounds = search(float(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else int(time.time()))
    print(f'{rounds} rounds; found something with the seeds {found}' if found else f'{rounds} rounds; found nothing')
    sys.exit(bool(found))
