"""Tables and figures reach the top level, and outputs the notebooks, all from one run"""

import contextlib
import csv
import json
import math
from itertools import zip_longest

from .. import __version__
from ..base.tools import write_file
from .runner import file_sha256, files_in, settings_of, shipped_models

PUBLISHED = {
    'micro': '',
    'micro-ablations': 'ablations',
}  # profile -> folder of its committed tables and figures


def published(plan, kind):
    return plan.project.root / kind / PUBLISHED.get(plan.run.profile, '')  # "tables", "figures"


def publish(plan):
    "Copy a run's tables and figures to the top level, for the paper and the README; returns their paths in the clone."
    run = plan.run
    written = []
    facts = dict(
        profile=run.profile,
        parameters=settings_of(run.config),
        version=__version__,
        models=shipped_models(),
    )
    for target, made in (
        (published(plan, kind), files_in(run.folder / kind)) for kind in ('tables', 'figures')
    ):
        if not made:
            continue
        receipt = target / 'provenance.json'
        past = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # else all files stay
            past = [*json.loads(receipt.read_text('utf-8'))['files']]
        for name, path in files_in(target).items():
            if name in past and name not in made:
                path.unlink()
        for name, path in made.items():
            write_file(target / name, path.read_bytes())
        files = {name: file_sha256(path) for name, path in made.items()}
        write_file(receipt, json.dumps(facts | dict(files=files), indent=1, sort_keys=True) + '\n')
        written += [plan.project.short(target / name) for name in made]
    return written


def _columns(path):  # heading -> texts from top to bottom; none where there is no file
    if not path.is_file():
        return {}
    with open(path, newline='', encoding='utf-8') as f:
        columns = zip_longest(*csv.reader(f), fillvalue='')
    return {head: texts for head, *texts in columns}


def _number(text):  # nan where it is none
    try:
        return float(text)
    except ValueError:
        return math.nan


def _differences(
    made, committed
):  # texts of a column -> (row, made, committed) of those beyond the last digits
    largest = max((abs(x) for x in map(_number, committed) if math.isfinite(x)), default=0)
    for row, (a, b) in enumerate(zip_longest(made, committed, fillvalue='nothing'), 1):
        near = math.isclose(_number(a), _number(b), rel_tol=1e-3, abs_tol=1e-3 * min(1, largest))
        if a != b and not near:
            yield row, a, b


def table_differences(made, committed) -> list:  # of lines
    "Numbers and texts of two folders of .csv tables that are not equal to the last digits, with file, row and column."
    names = sorted({path.name for folder in (made, committed) for path in folder.glob('*.csv')})
    pairs = [(name, _columns(made / name), _columns(committed / name)) for name in names]
    return [
        f'{name}, row {row}, {head}: {here} here, {there} committed'
        for name, mine, theirs in pairs
        for head in {**theirs, **mine}
        for row, here, there in _differences(mine.get(head, ()), theirs.get(head, ()))
    ]


_OTHERS = 'provenance.json', 'faults.md'  # of no run


def compared(made, committed) -> str:
    "In one line, how the tables in a folder compare with those in another."
    mine, theirs = (
        {
            name: file_sha256(path)
            for name, path in files_in(folder).items()
            if '/' not in name and name not in _OTHERS
        }
        for folder in (made, committed)
    )
    if not theirs:
        return 'no committed tables to compare with'
    if mine == theirs:
        return 'identical to the committed tables'
    if not (lines := table_differences(made, committed)):
        return 'equal to the committed tables to the last digits'
    more = f'; {len(lines) - 3} more' if lines[3:] else ''
    return f'different from the committed tables: {"; ".join(lines[:3])}{more}'


def _readable(output):
    "An output without counters; None where it is noise."
    noisy = output['output_type'] == 'stream' and (
        output['name'] == 'stderr' or '\r' in ''.join(output['text'])
    )
    if noisy or 'application/vnd.jupyter.widget-view+json' in output.get('data', {}):
        return None
    return {k: dict(metadata={}, execution_count=None).get(k, v) for k, v in output.items()}


def write_back(executed, source):
    "Copy the outputs of an executed notebook into its source. ValueError where a cell has changed since."
    import nbformat

    ran = {c.id: c for c in nbformat.read(executed, 4).cells}
    notebook = nbformat.read(source, 4)
    for cell in (c for c in notebook.cells if c.cell_type == 'code'):
        if cell.id not in ran or ran[cell.id].source != cell.source:
            raise ValueError(
                f'{source.name}, cell {cell.id}: changed since it was executed: run it again first'
            )
        cell.outputs = [nbformat.from_dict(o) for o in map(_readable, ran[cell.id].outputs) if o]
        cell.execution_count = None
    write_file(source, nbformat.writes(notebook) + '\n')
