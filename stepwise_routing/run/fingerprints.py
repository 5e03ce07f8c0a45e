"""A hash of all that a stage of a run depends on: code, settings, data, models and packages

If the hash of a stage changes, its results may change, and it runs again. How code is compared
belongs in `base.code`.
"""

import ast
import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, requires, version

from ..base.code import code_fingerprint, imported_names
from ..data.benchmarks import OWN_FILE
from ..data.recorded import SUFFIX, recorded_file
from .config import settings_of
from .manifest import file_sha256, shipped_files
from .notebooks import notebook_code, stage_names

EXTRAS = ('gpu', 'ray', 'hub')  # extras of pyproject.toml that a run can use


def direct_packages() -> dict:  # name -> version; None if it is not installed
    "The packages that pyproject.toml names, without those that only developers need."
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
    """The files that a run reads, without its code: copies of public benchmarks, recorded benchmarks, and your own
    questions, benchmarks and prompt of a judge. A stage runs in nbs/, so their paths begin there."""
    files = [project.nbs / name for name in config.data.question_files]
    files.append(project.nbs / OWN_FILE)
    template = config.data.grader_template
    if '{' not in template:  # no prompt itself, so it is a path, or ''
        files.append(project.nbs / template)
    for name in config.data.benchmarks:
        if name.endswith(SUFFIX):
            files.append(recorded_file(name.removesuffix(SUFFIX)))
    if config.data.data_dir:
        files += sorted((project.nbs / config.data.data_dir).glob('*.jsonl'))
    return [file_sha256(path) for path in files if path.is_file()]


def imported_by(
    cells: list,  # sources of the code cells of a notebook
) -> list:  # full names, sorted
    "Full names of all modules and names that a notebook imports."
    python = [re.sub(r'^\s*[%!].*$', 'pass', source, flags=re.M) for source in cells]
    return sorted(imported_names(ast.parse('\n'.join(python))))


def stage_cells(
    project,  # `Project`
    name: str,  # of the stage
) -> list:  # of texts
    "The code cells of a stage, and of the notebooks in nbs/ that it runs with `%run`."
    cells = notebook_code(project.nbs / f'{name}.ipynb')
    for source in list(cells):
        for other in re.findall(r'^%run\b.*?(\w+\.ipynb)', source, re.M):
            cells += notebook_code(project.nbs / other)
    return cells


def stage_fingerprints(project, config) -> dict:  # notebook -> hash, in running order
    "The hash of every stage. It covers code, settings, data and models, and all stages before it."
    shared = [
        settings_of(config),
        shipped_files(),
        data_files(project, config),
        direct_packages(),
    ]
    fingerprints = {}
    previous = ''
    for name in stage_names(project):
        cells = stage_cells(project, name)
        code = code_fingerprint(*imported_by(cells))
        parts = [shared, previous, cells, code]
        previous = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        fingerprints[name] = previous
    return fingerprints
