"""Writes README.md from nbs/index.ipynb: paths that lead out of nbs/ become paths from the root. Writes docs/method.svg,
its first picture, too. Quarto, which nbdev's own generator needs, is not needed."""

import re

from stepwise_routing.base.tools import find_project, write_file
from stepwise_routing.run.notebooks import notebook_cells


def readme(project):
    "The README, from nbs/index.ipynb."
    cells = notebook_cells(project.nbs / 'index.ipynb')
    text = '\n\n'.join(''.join(cell['source']) for cell in cells)
    return re.sub(r'(?<=\()\.\./(nbs/)?', r'\1', text).strip() + '\n'


def method_picture(project):
    "The picture of the method, as the notebook of pictures has drawn it."
    cells = notebook_cells(project.nbs / 'pictures.ipynb')
    (cell,) = [c for c in cells if c['id'] == 'method']
    return ''.join(cell['outputs'][0]['data']['image/svg+xml']).strip() + '\n'


if __name__ == '__main__':
    project = find_project()
    write_file(project.root / 'docs' / 'method.svg', method_picture(project))
    write_file(project.root / 'README.md', readme(project))
