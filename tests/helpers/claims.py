"The names of nbs/claims.ipynb, which exports nothing: as if it were a module."
from pathlib import Path
from types import SimpleNamespace

from stepwise_routing.run.notebooks import notebook_code


def run_claims_notebook()->SimpleNamespace:
    "Runs all code cells in one namespace, as `%run` of stage 05 does."
    names = SimpleNamespace()
    for source in notebook_code(Path(__file__).resolve().parents[2]/'nbs'/'claims.ipynb'): exec(source, vars(names))
    return names
