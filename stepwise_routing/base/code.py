"""Fingerprints of code: syntax trees without comments, docstrings and positions

Here belongs how today's code is compared with the code that made an earlier result. Which code a
stage of a run uses belongs in `run.fingerprints`.
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
    """All modules of a package, without nbdev's index and the package's own `__init__`: neither
    holds a method."""
    files = {}
    for path in sorted(package.rglob('*.py')):
        parts = path.relative_to(package.parent).with_suffix('').parts
        if parts[-1] == '__init__':
            parts = parts[:-1]
        if len(parts) > 1 and parts[-1] != '_modidx':
            files['.'.join(parts)] = path
    return files


def statements(tree: ast.Module):  # the tree itself and all its statements
    """All nodes that can hold an import or a docstring. Expressions are left out: they hold neither,
    and they are most of a tree."""
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
    package: str = '',  # the package that relative imports start from; '': there are none
) -> set:  # full names; of `from a import b` both "a" and "a.b", since b may be a module
    "The modules and names that code imports, inside of functions too."
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
    "The syntax tree of a module as text, without docstrings, and the names that it imports."
    tree = without_docstrings(ast.parse(path.read_text('utf-8')))
    package = name if path.name == '__init__.py' else name.rpartition('.')[0]
    return ast.dump(tree), imported_names(tree, package)


def reachable_modules(
    names,  # full names of what is imported
    files: dict,  # of `module_files`
) -> list:  # full names of modules, sorted
    """All modules of the package that these imports can reach. An import of the package itself
    reaches every module."""
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
    "A digest of the code of some modules and of all modules of the package that they import."
    files = module_files(package)
    modules = reachable_modules(names, files)
    return digest(*(f'{name} {read_module(files[name], name)[0]}' for name in modules))
