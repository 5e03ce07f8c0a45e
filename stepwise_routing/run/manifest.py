"""The receipt of a run: its inputs, its outputs, and the machine

Here belong manifest.json, reading it, and the facts about files and machine that it records. Whether
a stage has to run again belongs in `run.runner` and `run.fingerprints`.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

from ..base.tools import PACKAGE, write_file

SHIPPED = ('micro_models', 'micro_problems')  # folders of the package


def files_in(folder: Path) -> dict:  # relative path -> path
    "All files below a folder."
    paths = [path for path in sorted(folder.rglob('*')) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def file_sha256(path: Path) -> str:
    "SHA-256 of a file's bytes, hexadecimal."
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shipped_files(
    *folders: str,  # folders of the package; no argument: all of `SHIPPED`
) -> dict:  # path in the package -> SHA-256
    "The hashes of the micro models and problems, which the package ships."
    hashes = {}
    for folder in folders or SHIPPED:
        for name, path in files_in(PACKAGE / folder).items():
            hashes[f'{folder}/{name}'] = file_sha256(path)
    return hashes


@lru_cache
def _skip(file):
    print(f'{file} is damaged or of another version: skipped', file=sys.stderr)
    return {}


def _is_receipt(data) -> bool:
    "Does this receipt have all that the runner reads, with paths inside the run folder only?"
    for name in ('profile', 'started', 'status'):
        if not isinstance(data[name], str):
            return False
    for stage in data['notebooks'].values():
        if stage['status'] == 'done':
            paths = [Path(file) for file in stage['artefacts']]
            if any(path.is_absolute() or '..' in path.parts for path in paths):
                return False
    return True


def read_receipt(file: Path) -> dict:
    "The content of a manifest. {} if there is none, or if it cannot be read: then a line is printed, once."
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text('utf-8'))
        if _is_receipt(data):
            return data
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return _skip(file)


class Manifest:
    "The receipt of a run, `runs/<id>/manifest.json`. It is empty if there is no file."

    def __init__(self, folder):
        self.folder = Path(folder)
        self.data = read_receipt(self.folder / 'manifest.json')

    def __getitem__(self, key):
        return self.data[key]

    def stage(self, name: str) -> dict:
        "The entry of a notebook; {} if it has none."
        return self.data.get('notebooks', {}).get(name, {})

    def record(self, name: str, **facts) -> None:
        "Replace the entry of a notebook."
        self.update(notebooks={**self.data.get('notebooks', {}), name: facts})

    def update(self, **facts) -> None:
        "Change some entries, and write the file."
        self.data |= facts
        write_file(self.folder / 'manifest.json', json.dumps(self.data, indent=1) + '\n')

    def is_finished(
        self,
        name: str,  # of a notebook
        fingerprint: str | None = None,  # that it must have; None: any
    ) -> bool:
        "Has this notebook finished in this run? Are its files all there and unchanged?"
        stage = self.stage(name)
        if stage.get('status') != 'done' or fingerprint not in (None, stage.get('fingerprint')):
            return False
        if not (self.folder / f'{name}.ipynb').is_file():
            return False
        for file, sha256 in stage['artefacts'].items():
            path = self.folder / file
            if not path.is_file() or file_sha256(path) != sha256:
                return False
        return True


def command_output(
    *command: str,
    cwd=None,  # folder; None: the current one
) -> str | None:
    "The output of a command. None if the command is missing or fails."
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()


def _cpu_name():
    info = Path('/proc/cpuinfo')
    if info.is_file():
        names = re.findall(r'model name\s*: (.+)', info.read_text())
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def hardware() -> dict:
    "The machine: processor, memory in GiB, GPUs and system."
    import psutil

    gpus = command_output('nvidia-smi', '--query-gpu=name', '--format=csv,noheader') or ''
    return dict(
        cpus=os.cpu_count(),
        cpu=_cpu_name(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=gpus.splitlines(),
        system=f'{platform.system()} {platform.machine()}',
    )


def installed_packages() -> dict:  # name -> version
    "All installed packages, sorted by name."
    return dict(sorted((d.metadata['Name'], d.version) for d in distributions()))


def git_state(root: Path) -> str | None:
    "The commit of a clone, with -dirty if files have changed. None outside a clone."
    return command_output(
        'git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*', cwd=root
    )


def made_by(
    run,  # `Run`
):  # Markdown that a notebook shows
    "A line for readers of a chapter: the command, the commit and the seconds behind what it shows."
    from IPython.display import Markdown

    receipt = Manifest(run.folder)
    if not receipt.data:
        return Markdown(
            'From the committed results, or run by hand. For a run of your own: `stepwise-routing reproduce`.'
        )
    seconds = sum(stage.get('seconds', 0) for stage in receipt['notebooks'].values())
    git = receipt['git'] or 'unknown'
    commit = git[:9] + git[40:]  # 40 digits, and -dirty if files have changed
    command = f'stepwise-routing reproduce --profile {run.profile}'
    return Markdown(
        f'Made by `{command}`, commit {commit}. The stages before took {seconds:.0f} s.'
    )
