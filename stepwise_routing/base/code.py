"""Fingerprints of code: syntax trees without comments, docstrings and positions

Here belongs how code is compared with the code that made something earlier. Which stage of a run is
made of which code belongs in `run.fingerprints`.
"""

import ast
from functools import lru_cache
from pathlib import Path

from .tools import PACKAGE, digest

BLOCKS = ('body', 'orelse', 'finalbody', 'handlers', 'cases')  # where statements hold statements
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@lru_cache
def module_files(
    package: Path = PACKAGE,  # folder of the package
) -> dict:  # full name of the module -> its file
    """All modules of a package, but for nbdev's index and the package's own `__init__`, which hold
    no method."""
    files = {}
    for path in sorted(package.rglob('*.py')):
        parts = path.relative_to(package.parent).with_suffix('').parts
        if parts[-1] == '__init__':
            parts = parts[:-1]
        if len(parts) > 1 and parts[-1] != '_modidx':
            files['.'.join(parts)] = path
    return files


def statements(tree: ast.Module):  # the tree itself and all its statements
    """Everything that can hold an import or a docstring; expressions, which are most of a tree, are
    left out."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in BLOCKS:
            waiting += getattr(node, block, [])


def without_docstrings(
    tree: ast.Module,  # changed in place
) -> ast.Module:
    "The tree without the docstrings of modules, classes and functions."
    for node in statements(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def imported_names(
    tree: ast.Module,  # of a module, or of a notebook's code
    package: str = '',  # the package that relative imports start from; '' where there are none
) -> set:  # full names; of `from a import b` both "a" and "a.b", since b may be a module
    "What code imports, also inside of functions."
    names = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split('.')
            above = above[: len(above) + 1 - node.level] if node.level else []
            source = '.'.join([*above, node.module] if node.module else above)
            for alias in node.names:
                if alias.name != '__version__':
                    names.update([source, f'{source}.{alias.name}'])
    return names


@lru_cache
def read_module(path: Path, name: str) -> tuple:  # (text of its syntax tree, names it imports)
    "The syntax tree of a module, and what it imports."
    tree = without_docstrings(ast.parse(path.read_text('utf-8')))
    package = name if path.name == '__init__.py' else name.rpartition('.')[0]
    return ast.dump(tree), imported_names(tree, package)


def reachable_modules(
    names,  # full names of what is imported
    files: dict,  # of `module_files`
) -> list:  # full names of modules, sorted
    """All modules of the package that these imports can reach; whoever imports the package itself
    reaches everything."""
    top = next(iter(files), '').partition('.')[0]
    reached = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name == top:
            return sorted(files)
        if name in files and name not in reached:
            reached.add(name)
            waiting += read_module(files[name], name)[1]
    return sorted(reached)


@lru_cache
def code_fingerprint(
    *names: str,  # full names of modules, such as "stepwise_routing.method.training"
    package: Path = PACKAGE,
) -> str:
    "What identifies the code of some modules and of all that they import from the package."
    files = module_files(package)
    modules = reachable_modules(names, files)
    return digest(*(f'{name} {read_module(files[name], name)[0]}' for name in modules))
