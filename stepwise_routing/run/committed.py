"""The outcome tables of the committed run, so that chapters 02b and 03b can be run in a fresh clone.

Here belong packing and unpacking them. What a run itself makes belongs in `stages`.
"""

import json
import zipfile
from pathlib import Path

from ..base.tools import find_project, write_file
from ..data.sources import SPLITS
from .config import Run, settings_of

PROFILE = 'micro'  # whose outcomes are committed
OUTCOMES = 'outcomes/micro.zip'  # in tables/
DRAWN_WITH = 'data.', 'open.', 'api.'  # sections of the settings that outcomes depend on


def outcome_files(run: Run) -> dict:  # name in the archive -> path in the run
    "The outcome tables of a run, whether they exist or not."
    paths = [
        setting.files.outcomes(benchmark, split)
        for setting in run.settings
        for benchmark in setting.benchmarks
        for split in SPLITS
    ]
    return {path.relative_to(run.folder).as_posix(): path for path in paths}


def pack_outcomes(
    run: Run,  # with outcome tables
) -> Path:
    "Write all outcome tables of a run to one compressed file in its folder."
    path = run.folder / 'outcomes.zip'
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_LZMA) as archive:
        for name, table in outcome_files(run).items():
            entry = zipfile.ZipInfo(name)  # without a date: the same tables give the same bytes
            archive.writestr(entry, table.read_bytes(), zipfile.ZIP_LZMA)
    return path


def _is_drawn_alike(run, tables):
    "Would this run draw what the committed run has drawn?"
    committed = json.loads((tables / 'provenance.json').read_text('utf-8'))['parameters']
    current = json.loads(json.dumps(settings_of(run.config)))
    return all(
        committed.get(name) == value
        for name, value in current.items()
        if name.startswith(DRAWN_WITH)
    )


def fill_outcomes(
    run: Run,  # of any profile
) -> bool:
    """Give a run without draws the committed outcome tables, if it would draw the same ones.

    Returns False, and writes nothing, for a run that has draws or other settings."""
    tables = find_project().root / 'tables'
    if run.has_draws or not (tables / OUTCOMES).is_file() or not _is_drawn_alike(run, tables):
        return False
    with zipfile.ZipFile(tables / OUTCOMES) as archive:
        for name, path in outcome_files(run).items():
            if not path.is_file():
                write_file(path, archive.read(name))
    return True


def committed_outcomes(
    run: Run,  # without draws
) -> dict:  # (setting, benchmark) -> ({split: `OutcomeTable`}, None), as of `read_all`
    "The committed outcome tables of a run. FileNotFoundError in one line if it needs draws of its own."
    from .stages import read_table  # heavy

    fill_outcomes(run)
    read = {}
    for setting in run.settings:
        for benchmark in setting.benchmarks:
            tables = {split: read_table(setting, benchmark, split) for split in SPLITS}
            read[setting.name, benchmark] = tables, None
    return read
