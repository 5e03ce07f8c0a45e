"""Runs the notebooks that are no stage of a run (lessons, index and labs), each in its own folder, and stores their
outputs in them: `python .ci/lessons.py` for all, `python .ci/lessons.py 00_records labs/01_micro_models` for some. One
that has cells flagged slow, gpu or api is left as it is."""

import re
import sys

from stepwise_routing.base.tools import find_project
from stepwise_routing.run.notebooks import execute, lesson_sources, sole_runner
from stepwise_routing.run.publish import write_back
from stepwise_routing.run.runner import choose

project = find_project()
sources = lesson_sources(project)
with sole_runner(project.runs / 'store' / 'lessons'):
    for name in choose(sys.argv[1:], list(sources)):
        source = sources[name]
        flag = re.search(r'#\| *(slow|gpu|api)\b', source.read_text('utf-8'))
        print(name, f'is left as it is: it has cells for {flag[1]}' if flag else '', flush=True)
        if flag:
            continue
        executed = project.runs / 'lessons' / f'{name.replace("/", "-")}.ipynb'
        executed.parent.mkdir(parents=True, exist_ok=True)
        execute(source, executed, source.parent)
        write_back(executed, source)
