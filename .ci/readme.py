"""Writes README.md from nbs/index.ipynb: without hidden cells; `{{name}}` becomes that number of the tables
(`report.writer.numbers`), a line `<!-- include: ../tables/table1.md -->` that file, or its part up to a phrase, and
paths that lead out of nbs/ become paths from the root. Writes docs/method.svg, its first picture, too. Quarto, which nbdev's own generator needs, is not needed."""
import re

from stepwise_routing.base.tools import nearest, write_file
from stepwise_routing.report.writer import numbers
from stepwise_routing.base.tools import find_project
from stepwise_routing.run.notebooks import notebook_cells

def _markdown(path):
    "A notebook as Markdown, without its hidden cells."
    import nbformat
    from nbconvert import MarkdownExporter
    notebook = nbformat.read(path, 4)
    notebook.cells = [c for c in notebook.cells if not re.match(r'#\|\s*hide', c.source)]
    notebook.metadata['language_info'] = dict(name='python') # nbdev_clean drops it
    return MarkdownExporter().from_notebook_node(notebook)[0]

def readme(project):
    "The README, from nbs/index.ipynb. ValueError for a `{{name}}` that no table has."
    text, values = _markdown(project.nbs/'index.ipynb'), numbers(project.root/'tables')
    pattern = r'\{\{([A-Za-z][\w.-]*)\}\}'
    for name in set(re.findall(pattern, text)) - set(values):
        raise ValueError(f'nbs/index.ipynb asks for {name!r}, which is in no table{nearest(name, values)}')
    def include(m):
        path = project.nbs/m[1]
        if not path.is_file(): return f'*({m[1].removeprefix("../")} is not there yet)*'
        return path.read_text('utf-8').split(m[2] or '\0')[0].strip()
    text = re.sub(pattern, lambda m: values[m[1]], text)
    text = re.sub(r'<!-- include: (\S+)(?: up to: (.+?))? -->', include, text)
    return re.sub(r'(?<=[("\'])\.\./', '', text).strip() + '\n' # paths from nbs/ become paths from the root

def method_picture(project):
    "The picture of the method, as the notebook of pictures has drawn it."
    cell, = [c for c in notebook_cells(project.nbs/'pictures.ipynb') if c['id'] == 'method']
    return ''.join(cell['outputs'][0]['data']['image/svg+xml']).strip() + '\n'

if __name__ == '__main__':
    project = find_project()
    write_file(project.root/'docs'/'method.svg', method_picture(project))
    write_file(project.root/'README.md', readme(project))
