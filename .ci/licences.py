"""Writes LICENCES.md: `python .ci/licences.py`. It lists the licences of all direct dependencies, from their own metadata,
and the licences of all that is shipped. A package that is not installed here keeps its old line."""
import re, tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Licences

Written by `.ci/licences.py`.

## Direct dependencies

| Package | Needed | Licence |
|---|---|---|"""
SHIPPED = """
## What is shipped

| What | Where | Licence |
|---|---|---|
| Code, notebooks, tables, figures | everywhere | Apache-2.0, this project |
| Weights and tokenisers of the micro models | `stepwise_routing/micro_models` | Apache-2.0, this project: trained from nothing by `nbs/labs`, on problems that `data/families` generates |
| Test problems of GSM8K, MATH-500, Omni-MATH | `tests/data` | of their authors, see [tests/data/README.md](tests/data/README.md); twenty records each, all MIT |

If a profile names other models or benchmarks, a run downloads them from their publishers, under the publishers' terms. None of them is part of this repository.

## What is checked

Every direct dependency is pinned to an exact version in `constraints.txt`. The extras `[gpu]` and `[clients]` have `constraints-gpu.txt` and `constraints-clients.txt`. `tests/test_sync.py` checks the pins. No check here looks for known vulnerabilities, because that needs a network: run `pip-audit -r constraints.txt` on a machine that has one.
"""

def direct():
    "Name of every direct dependency -> extras that need it ('' for all users), in the order of pyproject.toml."
    project, out = tomllib.loads((ROOT/'pyproject.toml').read_text('utf-8'))['project'], {}
    for extra, requirements in {'': project['dependencies'], **project['optional-dependencies']}.items():
        for r in requirements: out.setdefault(re.match(r'[\w.-]+', r)[0], []).append(extra)
    return out

def licence(package):
    "The licence in a package's metadata. PackageNotFoundError if the package is not installed."
    about = metadata(package)
    classes = [c.split(' :: ')[-1] for c in about.get_all('Classifier', []) if c.startswith('License ::')]
    return about['License-Expression'] or '; '.join(classes) or (about['License'] or 'not said').split('\n')[0]

def row(package, extras, old):
    try: text = licence(package)
    except PackageNotFoundError: text = old.get(package, 'not installed here')
    return f'| {package} | {", ".join(f"[{e}]" for e in extras if e) or "always"} | {text} |'

def page(old=''):
    "LICENCES.md; `old`: its text so far."
    past = {m[1]: m[2] for m in re.finditer(r'^\| ([\w.-]+) \| [^|]+ \| ([^|]+) \|$', old, re.M)}
    rows = [row(package, extras, past) for package, extras in direct().items()]
    return '\n'.join([HEAD, *rows, SHIPPED])

if __name__ == '__main__':
    path = ROOT/'LICENCES.md'
    path.write_text(page(path.read_text('utf-8') if path.is_file() else ''), 'utf-8')
