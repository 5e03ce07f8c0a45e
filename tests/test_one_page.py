"The method on one page: on its own, and equal to the library to the last bit."

import ast
from pathlib import Path

import nbformat

PAGE = Path(__file__).parents[1] / 'nbs' / '00_one_page.ipynb'
CELLS = [cell for cell in nbformat.read(PAGE, as_version=4).cells if cell.cell_type == 'code']


def imported(source: str):
    "The modules that a piece of code imports."
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module


def test_one_cell_alone_imports_the_method():
    for cell in CELLS:
        is_used = any(name.startswith('stepwise_routing.method') for name in imported(cell.source))
        assert is_used == (cell.id == 'compare')


def test_it_trains_the_policy_of_the_library(monkeypatch, capsys):
    "The cell `compare` asserts that all weights and the threshold are equal."
    monkeypatch.chdir(PAGE.parent)
    names = {}
    for cell in CELLS:
        exec(compile(cell.source, cell.id, 'exec'), names)
    assert 'equal to the last bit' in capsys.readouterr().out
