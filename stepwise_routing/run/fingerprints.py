"""What a stage of a run is made of, as a hash: code, settings, data, models and packages

Here belongs what decides that a stage would come out different. How code is compared belongs in `base.code`.
"""

import ast
import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, requires, version

from ..base.code import code_fingerprint, imported_names
from .manifest import file_sha256, settings_of, shipped_files
from .notebooks import notebook_code, stage_names

EXTRAS = ('gpu', 'ray', 'hub')  # those of pyproject.toml that a run can use


def direct_packages() -> dict:  # name -> version; None if it is not installed
    "The packages that pyproject.toml names, but for those that only developers need."
    versions = {}
    for requirement in requires('stepwise-routing'):
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        name = re.match(r'[\w.-]+', requirement)[0]
        if extra is None or extra[1] in EXTRAS:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = None
    return versions


def data_files(project, config) -> list:  # SHA-256 of each
    "The copies of public benchmarks that a run reads, if any."
    if not config.data.data_dir:
        return []
    folder = project.nbs / config.data.data_dir
    return [file_sha256(path) for path in sorted(folder.glob('*.jsonl'))]


def imported_by(
    cells: list,  # sources of the code cells of a notebook
) -> list:  # full names, sorted
    "What a notebook imports."
    python = [re.sub(r'^\s*[%!].*$', 'pass', source, flags=re.M) for source in cells]
    return sorted(imported_names(ast.parse('\n'.join(python))))


def stage_fingerprints(project, config) -> dict:  # notebook -> hash, in running order
    "What every stage is made of: everything below, and all stages before it."
    shared = [
        settings_of(config),
        shipped_files(),
        data_files(project, config),
        direct_packages(),
    ]
    fingerprints = {}
    previous = ''
    for name in stage_names(project):
        cells = notebook_code(project.nbs / f'{name}.ipynb')
        code = code_fingerprint(*imported_by(cells))
        parts = [shared, previous, cells, code]
        previous = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        fingerprints[name] = previous
    return fingerprints
