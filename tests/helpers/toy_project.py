"""A project with two small notebooks, for the runner's tests and lessons: one counts, slowly if asked to, into a store;
the next makes a table of it."""
import json
from pathlib import Path

from stepwise_routing.util import Project

PARAMETERS = '''profile: str = "smoke"  # name of a file in nbs/params, or a .yaml file of yours
run_dir: str = ""  # folder of the run; "" is the newest run of the profile
changes: dict = {}  # settings to change, e.g. {"policy.alpha": 0.05}'''
OPEN = '''from stepwise_routing.run.config import open_run
run = open_run(profile, run_dir, changes)'''
COUNT = '''import json, os, time
n, seed, pause = run.config.data.n_test, run.config.seed, float(os.environ.get('TOY_PAUSE', 0))
store = run.store/'numbers.jsonl'
store.parent.mkdir(parents=True, exist_ok=True)
done = store.read_text().splitlines() if store.exists() else []
with store.open('a') as f:
    for i in range(len(done), n): time.sleep(pause); print(i * i + seed, file=f, flush=True)
(run.folder/'numbers.json').write_text(json.dumps([json.loads(l) for l in store.open()][:n]))'''
TABLE = '''import json
numbers, decimals = json.loads((run.folder/'numbers.json').read_text()), run.config.results.n_boot
run.tables.mkdir(exist_ok=True)
(run.tables/'mean.md').write_text(f'mean of {len(numbers)} numbers: {sum(numbers)/len(numbers):.{decimals}f}')'''
TOY = {'01_count': (OPEN, COUNT), '05_table': (OPEN, TABLE)}

def toy_project(
    root,         # folder to make it in
    notebooks=TOY, # name -> sources of the cells after the parameters
    **profiles    # profile name -> its YAML, as a dict; `toy` if none is given
)->Project:
    "The folders of a clone, with these notebooks and profiles."
    import nbformat.v4 as v4
    import yaml
    project = Project(Path(root).resolve())
    project.params.mkdir(parents=True)
    for name, sources in notebooks.items():
        cells = [v4.new_code_cell(s, id=f'cell-{i}') for i, s in enumerate((PARAMETERS, *sources))]
        cells[0].metadata['tags'] = ['parameters']
        (project.nbs/f'{name}.ipynb').write_text(json.dumps(v4.new_notebook(cells=cells)), 'utf-8')
    for name, values in (profiles or dict(toy=dict(data=dict(n_test=4), results=dict(n_boot=1)))).items():
        (project.params/f'{name}.yaml').write_text(yaml.safe_dump(values))
    return project
