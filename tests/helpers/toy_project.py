"A clone with the real profiles and three chapters that take no time."

import shutil
from pathlib import Path

from nbformat import v4, write

from stepwise_routing.util import PACKAGE, Project

PARAMETERS = "profile, folder, changes, draw = '', '', {}, 0"
LESSON = "import sys\nprint('noise', file=sys.stderr)\nprint('half\\rdone')\n6 * 7"
ASKED = """import json, os
asked = dict(profile=profile, changes=changes, draw=draw, rounding=os.environ.get('MKL_CBWR'))
json.dump(asked, open(folder + '/asked.json', 'w'))"""
RESULTS = """from pathlib import Path
for name in 'tables/table1.md', 'tables/a.csv', 'tables/provenance.json', 'figures/b.png':
    Path(folder, name).parent.mkdir(exist_ok=True)
    Path(folder, name).write_text(name)"""
LATER = {'02_rollouts': [PARAMETERS, ASKED], '05_results': [PARAMETERS, RESULTS]}
CHAPTERS = {'01_lesson': [LESSON]} | LATER


def write_chapter(path: Path, *sources) -> None:
    cells = [v4.new_code_cell(source) for source in sources]
    cells[0].metadata['tags'] = ['parameters'] if sources[0] == PARAMETERS else []
    kernel = dict(name='python3', language='python', display_name='python3')
    write(v4.new_notebook(cells=cells, metadata=dict(kernelspec=kernel)), path)


def toy_project(root: Path) -> Project:
    shutil.copytree(PACKAGE.parent / 'nbs' / 'params', root / 'nbs' / 'params')
    for name, sources in CHAPTERS.items():
        write_chapter(root / 'nbs' / f'{name}.ipynb', *sources)
    (root / 'tables').mkdir()
    return Project(root.resolve())
