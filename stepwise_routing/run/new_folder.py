"""Makes a folder to work in from an installed wheel: `stepwise-routing init DIR`

Here belong the files that the folder gets, and mending their links. The words of the command belong in
`run.cli`.
"""

import json
import re
from pathlib import Path

from ..base.tools import write_file

SHARED = 'share/stepwise-routing/'  # in the wheel, see [tool.setuptools.data-files]
LINK = re.compile(r'(?<!!)\[([^\]]*)\]\(([^)\s]+)\)')


def shared_files() -> dict:  # relative path -> path
    "The files in the wheel that a new folder gets."
    from importlib.metadata import files

    shared = {}
    for file in files('stepwise-routing'):
        inside = file.as_posix().partition(SHARED)[2]
        if inside and '__pycache__' not in file.parts:
            path = Path(file.locate())
            if not path.is_file():
                raise FileNotFoundError(
                    f'{path}, a file of the wheel, is missing: install the wheel in a virtual '
                    'environment, without --target'
                )
            shared[inside] = path
    return shared


def without_dead_links(
    text: str,  # Markdown
    folder: Path,  # folder of the text's file
) -> str:
    "Replace links to missing files, such as the package's code, by their text."

    def link(match):
        target = match[2].split('#')[0]
        is_outside = re.match('https?:|mailto:', match[2])
        if is_outside or not target or (folder / target).exists():
            return match[0]
        return match[1]

    return LINK.sub(link, text)


def _mend_notebook(path):
    notebook = json.loads(path.read_text('utf-8'))
    for cell in notebook['cells']:
        if cell['cell_type'] == 'markdown':
            text = without_dead_links(''.join(cell['source']), path.parent)
            cell['source'] = text.splitlines(True)
    write_file(path, json.dumps(notebook, indent=1, ensure_ascii=False) + '\n')


def make_folder(
    out: Path,  # a new folder, or one without nbs
    files: dict,  # relative path -> path, of `shared_files`
) -> None:
    "Copy files into a folder, then replace the links that lead nowhere there."
    for name, path in files.items():
        write_file(out / name, path.read_bytes())
    for name in files:
        path = out / name
        if path.suffix == '.ipynb':
            _mend_notebook(path)
        elif path.suffix == '.md':
            write_file(path, without_dead_links(path.read_text('utf-8'), path.parent))
