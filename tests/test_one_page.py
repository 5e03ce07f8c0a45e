"The method on one page: on its own, and equal to the library to the last bit."
import ast
from pathlib import Path

import pytest

from stepwise_routing.run.notebooks import notebook_cells

PAGE = Path(__file__).resolve().parents[1]/'nbs'/'method_on_one_page.ipynb'
CELLS = notebook_cells(PAGE)
CODE = [cell['source'] for cell in CELLS if cell['cell_type'] == 'code']

def imported(source):
    "The modules that a piece of code imports."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom): yield node.module

def run(code):
    names = {}
    for source in code: exec(compile(source, 'method_on_one_page', 'exec'), names)
    return names

def test_only_the_last_cell_imports_the_method():
    *page, _ = CODE
    own = [name for source in page for name in imported(source) if name.startswith('stepwise_routing')]
    assert sorted(own) == ['stepwise_routing.data.benchmarks', 'stepwise_routing.data.recorded']

@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_trains_the_policy_of_the_library(capsys):
    "Also on more problems, whose states no longer fit into one block."
    for problems in ("recorded.problems['train']", 'sum(recorded.problems.values(), [])'):
        names = run(source.replace("recorded.problems['train']", problems) for source in CODE)
        assert 'equal to the last bit' in capsys.readouterr().out and len(names['problems']) == len(names['x'])
