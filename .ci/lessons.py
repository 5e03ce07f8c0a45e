"""Runs the notebooks that are no stage, each in its own folder, and stores their outputs in them:
`python .ci/lessons.py` for all, `python .ci/lessons.py 00_core data/families` for some. One that has cells flagged
slow, gpu or api is left as it is."""
import re, sys

from stepwise_routing.base.tools import find_project
from stepwise_routing.run.publish import write_back
from stepwise_routing.run.runner import choose, declared, execute, files_in, sole_runner

project = find_project()
sources = {name.removesuffix('.ipynb'): path for name, path in files_in(project.nbs).items()
           if name.endswith('.ipynb') and not re.search(r'(^|/)[._]', name) and not declared(path)}
with sole_runner(project.runs/'store'/'lessons'):
    for name in choose(sys.argv[1:], list(sources)):
        source, executed = sources[name], project.runs/'lessons'/f'{name.replace("/", "-")}.ipynb'
        flagged = re.search(r'#\| *(slow|gpu|api)\b', source.read_text('utf-8'))
        print(name, f'is left as it is: it has cells for {flagged[1]}' if flagged else '', flush=True)
        if flagged: continue
        executed.parent.mkdir(parents=True, exist_ok=True)
        execute(source, executed, source.parent)
        write_back(executed, source)
