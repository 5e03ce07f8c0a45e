"""Writes README.md from nbs/index.ipynb: paths that lead out of nbs/ become paths from the root."""

import json
import re

from stepwise_routing.util import find_project, write_file

project = find_project()
cells = json.loads((project.nbs / 'index.ipynb').read_text('utf-8'))['cells']
text = '\n\n'.join(''.join(cell['source']) for cell in cells)
text = re.sub(r'(?<=\()\.\./(nbs/)?', r'\1', text).strip() + '\n'
write_file(project.root / 'README.md', text)
