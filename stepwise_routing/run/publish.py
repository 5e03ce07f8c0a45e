"""Publishes a run: its tables and figures at the top level, its outputs in the notebooks

Here belong copying results to the places where readers look, and comparing them with the results
there. The content of tables belongs in `report/`.
"""

import csv
import json
import math
from itertools import zip_longest
from pathlib import Path

from .. import __version__
from ..util import write_file
from .config import settings_of

PUBLISHED = {  # profile -> folder of its committed tables and figures
    'micro': '',
    'micro-many': 'many',
    'recorded': 'recorded',
}

RECEIPT = 'provenance.json'
RELATIVE = 1e-3  # numbers up to this relative difference count as "equal to the last digits"


def files_in(folder: Path) -> dict:  # relative path -> path
    "All files below a folder."
    paths = [path for path in sorted(folder.rglob('*')) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def published(
    plan,  # `Plan`
    kind: str,  # "tables" or "figures"
):
    "The folder at the top level for a run's tables or figures."
    return plan.project.root / kind / PUBLISHED.get(plan.run.profile, '')


def _publish_folder(made, target, facts):  # relative path -> path, folder, entries of the receipt
    receipt = target / RECEIPT
    past = json.loads(receipt.read_text('utf-8'))['files'] if receipt.is_file() else ()
    for name, path in files_in(target).items():
        if name in past and name not in made:
            path.unlink()
    for name, path in made.items():
        write_file(target / name, path.read_bytes())
    facts = facts | dict(files=list(made))
    write_file(receipt, json.dumps(facts, indent=1, sort_keys=True) + '\n')


def publish(
    plan,  # `Plan` of a run that has finished
) -> list:  # the paths in the clone
    "Copy a run's tables and figures to the top level, for the paper and the README."
    run = plan.run
    facts = dict(profile=run.profile, parameters=settings_of(run.config), version=__version__)
    written = []
    for kind in ('tables', 'figures'):
        made = files_in(run.folder / kind)
        if made:
            target = published(plan, kind)
            _publish_folder(made, target, facts)
            written += [plan.project.short(target / name) for name in made]
    return written


def _columns(path) -> dict:  # heading -> texts from top to bottom; none if there is no file
    if not path.is_file():
        return {}
    with open(path, newline='', encoding='utf-8') as f:
        columns = zip_longest(*csv.reader(f), fillvalue='')
    return {head: texts for head, *texts in columns}


def _number(text) -> float:  # nan if it is none
    try:
        return float(text)
    except ValueError:
        return math.nan


def _column_differences(made, committed) -> list:  # (row, made, committed)
    "The entries of two columns that differ by more than the last digits."
    sizes = [abs(_number(text)) for text in committed]
    largest = max([size for size in sizes if math.isfinite(size)], default=0)
    nearly_zero = RELATIVE * min(1, largest)
    differences = []
    pairs = zip_longest(made, committed, fillvalue='nothing')
    for row, (here, there) in enumerate(pairs, 1):
        is_near = math.isclose(_number(here), _number(there), rel_tol=RELATIVE, abs_tol=nearly_zero)
        if here != there and not is_near:
            differences.append((row, here, there))
    return differences


def table_differences(
    made,  # folder of .csv tables
    committed,  # folder of those to compare with
) -> list:  # of lines
    "A line, with file, row and column, for each number or text that differs by more than the last digits."
    names = {path.name for folder in (made, committed) for path in folder.glob('*.csv')}
    lines = []
    for name in sorted(names):
        mine = _columns(made / name)
        theirs = _columns(committed / name)
        for head in theirs | mine:
            for row, here, there in _column_differences(mine.get(head, ()), theirs.get(head, ())):
                lines.append(f'{name}, row {row}, {head}: {here} here, {there} committed')
    return lines


def _compared_files(folder) -> dict:  # name -> bytes
    paths = [path for path in sorted(folder.glob('*.*')) if path.is_file()]
    return {path.name: path.read_bytes() for path in paths if path.name != RECEIPT}


def compared(
    made,  # folder of tables
    committed,  # folder of those to compare with
) -> str:
    "One line: how the tables in one folder compare with those in another."
    theirs = _compared_files(committed)
    if not theirs:
        return 'no committed tables to compare with'
    if _compared_files(made) == theirs:
        return 'identical to the committed tables'
    lines = table_differences(made, committed)
    if not lines:
        return 'equal to the committed tables to the last digits'
    more = f'; {len(lines) - 3} more' if len(lines) > 3 else ''
    return f'different from the committed tables: {"; ".join(lines[:3])}{more}'


def _readable(output):
    "An output without execution counters. None if it is noise."
    if output['output_type'] == 'stream':
        is_progress = '\r' in ''.join(output['text'])
        if output['name'] == 'stderr' or is_progress:
            return None
    if 'application/vnd.jupyter.widget-view+json' in output.get('data', {}):
        return None
    readable = dict(output)
    if 'metadata' in readable:
        readable['metadata'] = {}
    if 'execution_count' in readable:
        readable['execution_count'] = None
    return readable


def write_back(
    executed,  # executed copy of a notebook
    source,  # the notebook itself
) -> None:
    """Copy the outputs of an executed notebook into its source. ValueError if a cell of the source has
    changed since."""
    import nbformat

    executed_cells = {cell.id: cell for cell in nbformat.read(executed, 4).cells}
    notebook = nbformat.read(source, 4)
    for cell in notebook.cells:
        if cell.cell_type != 'code':
            continue
        ran = executed_cells.get(cell.id)
        if ran is None or ran.source != cell.source:
            raise ValueError(
                f'{source.name}, cell {cell.id} has changed since it was executed: run it again first'
            )
        readable = [_readable(output) for output in ran.outputs]
        cell.outputs = [nbformat.from_dict(output) for output in readable if output]
        cell.execution_count = None
    write_file(source, nbformat.writes(notebook) + '\n')
