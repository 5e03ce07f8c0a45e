"A clone with the real profiles and three chapters that take no time."

import json
import shutil
from pathlib import Path

from stepwise_routing.util import PACKAGE, Project

PARAMETERS = "profile, folder, changes, draw = '', '', {}, 0"
LESSON = "import sys\nprint('noise', file=sys.stderr)\nprint('half\\rdone')\n6 * 7"
ASKED = """import json, os
asked = dict(profile=profile, changes=changes, draw=draw, rounding=os.environ['MKL_CBWR'])
json.dump(asked, open(folder + '/asked.json', 'w'))"""
RESULTS = """from pathlib import Path
assert Path(folder, 'asked.json').is_file()
for name, text in {'tables/table1.md': 'one', 'tables/a.csv': 'a', 'figures/b.png': 'b'}.items():
    Path(folder, name).parent.mkdir(exist_ok=True)
    Path(folder, name).write_text(text)"""
CHAPTERS = {
    '01_lesson': [LESSON],
    '02_rollouts': [PARAMETERS, ASKED],
    '05_results': [PARAMETERS, RESULTS],
}


def notebook(*sources) -> str:
    cells = []
    for i, source in enumerate(sources):
        tags = dict(tags=['parameters']) if source == PARAMETERS else {}
        cell = dict(cell_type='code', id=f'cell-{i}', source=source, metadata=tags)
        cells.append(cell | dict(outputs=[], execution_count=None))
    about = dict(kernelspec=dict(name='python3', language='python', display_name='python3'))
    return json.dumps(dict(cells=cells, metadata=about, nbformat=4, nbformat_minor=5))


def toy_project(root: Path) -> Project:
    project = Project(root.resolve())
    shutil.copytree(PACKAGE.parent / 'nbs' / 'params', project.params)
    for name, sources in CHAPTERS.items():
        (project.nbs / f'{name}.ipynb').write_text(notebook(*sources))
    (project.root / 'tables').mkdir()
    return project
