"""Runs the notebooks that `stepwise-routing reproduce` does not run, and stores their outputs in them.

`python .ci/lessons.py` for all, with names for some, `--check` for the chapters alone, and nothing is stored.
"""

import os
import sys
import tempfile
from pathlib import Path

from stepwise_routing.run.reproduce import ROUNDING, run_chapter, write_back
from stepwise_routing.util import find_project

CHAPTERS = ['00_one_page', '06_your_own_models']
nbs = find_project().nbs
labs = [f'labs/{path.stem}' for path in sorted(nbs.glob('labs/*.ipynb'))]
is_check = '--check' in sys.argv
names = [word for word in sys.argv[1:] if word != '--check'] or CHAPTERS + ([] if is_check else labs)
os.environ.update(ROUNDING | os.environ)
with tempfile.TemporaryDirectory() as folder:
    for name in names:
        source = nbs / f'{name}.ipynb'
        run_chapter(source.parent, source.stem, Path(folder), {})
        if not is_check:
            write_back(Path(folder) / source.name, source)
