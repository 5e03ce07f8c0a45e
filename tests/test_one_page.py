"The method on one page: short, on its own, in the paper's order, and equal to the library to the last bit."
import ast
import re
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

def changed(old, new):
    "The code of the page with one change."
    assert sum(source.count(old) for source in CODE) == 1
    return [source.replace(old, new) for source in CODE]

def test_it_has_at_most_200_lines_of_code():
    "Blank lines, comments and docstrings are for the reader."
    lines = 0
    for source in CODE:
        texts = [node.body[0] for node in ast.walk(ast.parse(source))
                 if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
        silent = {i for text in texts for i in range(text.lineno, text.end_lineno + 1)}
        told = [line for i, line in enumerate(source.split('\n'), 1) if i not in silent]
        lines += sum(bool(re.match(r'\s*[^\s#]', line)) for line in told)
    assert 150 < lines <= 200

def test_only_the_last_cell_imports_the_method():
    *page, comparison = CODE
    own = [name for source in page for name in imported(source) if name.startswith('stepwise_routing')]
    assert sorted(own) == ['stepwise_routing.data.benchmarks', 'stepwise_routing.data.recorded']
    assert {name.split('.')[0] for source in page for name in imported(source)} == {
        're', 'numpy', 'torch', 'stepwise_routing'}
    assert 'stepwise_routing.method' in set(imported(comparison))

def test_the_equations_stand_in_the_papers_order_each_before_its_code():
    headings = [(int(m[1]), CELLS[i + 1]['cell_type']) for i, cell in enumerate(CELLS)
                if (m := re.match(r'## Equation (\d)', cell['source']))]
    assert headings == [(number, 'code') for number in range(1, 7)]

@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('problems', ["recorded.problems['train']", 'sum(recorded.problems.values(), [])'])
def test_it_trains_the_policy_of_the_library(problems, capsys):
    "Also on more problems, whose states no longer fit into one block."
    names = run(changed("recorded.problems['train']", problems))
    assert 'equal to the last bit' in capsys.readouterr().out and len(names['problems']) == len(names['x'])

@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize('change', [('k**-0.6', 'k**-0.7'), ('1e-12 * DELTA', '1e9 * DELTA')])
def test_another_method_trains_another_policy(change):
    with pytest.raises(AssertionError): run(changed(*change))
