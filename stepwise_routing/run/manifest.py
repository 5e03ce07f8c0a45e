"""The receipt of a run: profile, settings, commit, package versions, seconds of each stage

Here belong manifest.json and reading it. Whether a stage has to run belongs in `run.runner`.
"""

import contextlib
import json
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path

from ..util import write_file


class Manifest:
    "The receipt of a run, `runs/<id>/manifest.json`. It is empty if there is no file."

    def __init__(self, folder):
        self.folder = Path(folder)
        file = self.folder / 'manifest.json'
        self.data = json.loads(file.read_text('utf-8')) if file.is_file() else {}

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

    def is_finished(self, name: str) -> bool:
        "Has this notebook finished in this run?"
        return self.stage(name).get('status') == 'done'


def installed_packages() -> dict:  # name -> version
    "Python and all installed packages, sorted by name."
    packages = dict(sorted((d.metadata['Name'], d.version) for d in distributions()))
    return dict(python=platform.python_version()) | packages


def git_state(root: Path) -> str | None:
    "The commit of a clone, with -dirty if files have changed. None outside a clone."
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()


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
