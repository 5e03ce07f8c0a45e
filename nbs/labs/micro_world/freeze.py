"""Draws new held-out problems when everything else is fixed: `python -m micro_world.freeze`, in nbs/labs.

A result is fair if nothing was chosen after the test problems had been seen. So the order is this:
commit everything, run this module, run `make reproduce`, commit the tables. It takes calibration and
test problems from a seed of the generator that was never used, leaves out all held-out problems of the
earlier seeds, and writes a receipt: the commit, the date, the seed, and a digest of all that decides.
`python -m micro_world.freeze tables` keeps a digest of the tables that came out.

tests/test_frozen.py recomputes the digests. Code that decides may be changed without new test
problems only if the tables stay the same to the last byte.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from hashlib import sha256

from stepwise_routing.base.code import module_files, read_module
from stepwise_routing.base.tools import digest, find_project, write_file
from stepwise_routing.data.frozen import RECEIPT, Frozen, read_frozen
from stepwise_routing.run.config import read_run, settings_of
from stepwise_routing.run.fingerprints import stage_cells
from stepwise_routing.run.manifest import shipped_files

from .families import FAMILIES
from .ship import drawn_problems, main as ship, problem_line

PROFILE = 'micro'
DECIDING = (  # modules, or packages of modules
    'stepwise_routing.method',
    'stepwise_routing.data.algebra',
    'stepwise_routing.data.answers',
    'stepwise_routing.data.grading',
    'stepwise_routing.data.sources',
    'stepwise_routing.data.steps',
    'stepwise_routing.data.tidy',
    'stepwise_routing.base.statistics',
    'stepwise_routing.run.stages',
    'stepwise_routing.run.sweep',
    'stepwise_routing.report.gains',
)
SECTIONS = 'data', 'open', 'api', 'policy', 'sweep', 'baselines', 'results'  # of the settings
MACHINE = 'sweep.workers', 'api.concurrency', 'api.max_cents'  # no result depends on these
TABLES = (
    'evaluation.csv',
    'evaluation_api.csv',
    'comparison.csv',
    'comparison_api.csv',
    'claims.csv',
)


def decides(module: str) -> bool:
    return any(module == name or module.startswith(f'{name}.') for name in DECIDING)


def deciding() -> dict:  # name -> digest
    "Everything that decides a result of the micro profile, but the held-out problems."
    project = find_project()
    digests = {}
    for benchmark in FAMILIES:
        lines = [problem_line('train', p) for p in drawn_problems(benchmark, 'train')]
        digests[f'problems: {benchmark}, train'] = digest(*lines)
    for name, sha in shipped_files('micro_models').items():
        digests[f'models: {name}'] = sha[:16]
    settings = {}
    for name, value in settings_of(read_run(PROFILE, project=project).config).items():
        if name.partition('.')[0] in SECTIONS and name not in MACHINE:
            settings[name] = value
    digests['settings'] = digest(json.dumps(settings, sort_keys=True, default=str))
    for name, path in module_files().items():
        if decides(name):
            digests[f'rules: {name}'] = digest(read_module(path, name)[0])
    digests['claims'] = digest(*stage_cells(project, 'claims'))
    return digests


def tables_digest(tables) -> str:
    "A digest of the tables that a change must not touch."
    return sha256(b''.join((tables / name).read_bytes() for name in TABLES)).hexdigest()


def git(*words) -> str:
    done = subprocess.run(['git', *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def freeze() -> Frozen:
    "Write the receipt and the new held-out problems. SystemExit if something is not committed."
    if git('status', '--porcelain', '--untracked-files=no'):
        raise SystemExit('commit everything first: the receipt names the commit')
    last = read_frozen()
    earlier = []
    if last:
        earlier = [
            *last.earlier,
            dict(commit=last.commit, date=last.date, test_seed=last.test_seed),
        ]
    seed = last.test_seed + 1 if last else 1
    frozen = Frozen(git('rev-parse', 'HEAD'), str(date.today()), seed, deciding(), earlier)
    write_file(RECEIPT, json.dumps(asdict(frozen), indent=1) + '\n')
    ship()
    return frozen


def main() -> None:
    project = find_project()
    kept = project.root / 'tests' / 'data' / 'frozen_tables.txt'
    if sys.argv[1:] == ['tables']:
        write_file(kept, tables_digest(project.root / 'tables') + '\n')
        print(f'{kept.name}: the tables as they are')
        return
    print(freeze().sentence)


if __name__ == '__main__':
    main()
