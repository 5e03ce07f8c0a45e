"""Builds the documentation site in _docs/html, or in the folder that is named, from notebooks with their stored outputs,
tables, figures and docments: `python .ci/site.py`. Needs the extra [docs] and no network; a warning of Sphinx is an
error."""
import inspect, json, re, shutil, subprocess, sys
from importlib import import_module
from pathlib import Path

from stepwise_routing.base.tools import write_file
from stepwise_routing.report.slider import slider_page
from stepwise_routing.base.tools import find_project

SIZE = 'width="100%" height="520" style="border: 0"'
PARTS = {'In short': 'pictures|method_on_one_page', 'Chapters': r'0\d|claims', 'Labs': 'labs/'}
RESULTS = ('table1', 'table2', 'claims', 'comparison', 'certain', 'classes', 'full', 'full_api', 'metrics', 'metrics_api',
           'cache_api')
WIDE = { # table -> the CSV file with all columns, and the columns that matter; a click on a heading sorts
    'full': ('evaluation', ('benchmark', 'method', 'threshold', 'kappa', 'accuracy', 'accuracy_vs_large', 'miss', 'cost',
                            'cost_share', 'large_share')),
    'metrics': ('metrics', ())} # all that the text has

def notebook(path):
    "A notebook as a reader sees it: without directives, hidden cells and escape codes."
    from nbdev.process import NBProcessor
    from nbdev.processors import filter_stream_, hide_, hide_line, strip_ansi
    processor = NBProcessor(path, procs=[hide_, hide_line, filter_stream_, strip_ansi], rm_directives=True)
    processor.process()
    cells = [c for c in processor.nb.cells if c.source.strip() and not c.source.startswith('#| default_exp')]
    names, above = ('id', 'cell_type', 'metadata', 'source', 'outputs', 'execution_count'), path.stem
    for cell in cells: # a picture's alternative text is what was said to see in it
        if cell.cell_type == 'markdown': above = re.sub(r'\]\([^)]*\)|[#>*`$\[\]\n]', ' ', cell.source)[-300:].strip()
        else:
            cell['metadata'] = dict(cell.metadata, mystnb=dict(image=dict(alt=told(cell) or above)))
            if cell.metadata.get('jupyter', {}).get('source_hidden'): # folded in JupyterLab, and so on the site
                cell['metadata']['tags'] = [*cell.metadata.get('tags', ()), 'hide-input']
        for output in cell.get('outputs', ()): # the slider of a notebook is the page of its own, which has the script
            if output.get('data', {}).pop('application/vnd.plotly.v1+json', None):
                up = '../'*len(path.relative_to(find_project().nbs).parts)
                output['data']['text/html'] = f'<iframe src="{up}slider.html" title="slider" {SIZE}></iframe>'
    return dict(processor.nb, cells=[{k: cell[k] for k in names if k in cell} for cell in cells])

def told(cell):
    "What a drawing of a cell says about itself, if there is one; on one line."
    texts = [o['data'].get('text/plain', '') for o in cell.get('outputs', ()) if 'image/svg+xml' in o.get('data', {})]
    return ' '.join(''.join(texts[0]).split()) if texts else ''

def mended(text, folder):
    "Links that lead to no page or file of the site, such as to folders, become text."
    def link(m):
        target = m[2].split('#')[0]
        if re.match('https?:|mailto:', m[2]) or not target or (folder/target).is_file(): return m[0]
        return m[1]
    return re.sub(r'(?<!!)\[([^\]]*)\]\(([^)\s]+)\)', link, text)

def narrowed(text, csv, columns):
    "A page whose first table has these columns alone, and a link to the file with all of them."
    lines = text.split('\n')
    rows = [i for i, line in enumerate(lines) if line.startswith('|')]
    heads = [cell.strip().lower() for cell in lines[rows[0]].strip('| ').split('|')]
    places = [heads.index(column) for column in columns] or range(len(heads))
    for i in rows:
        cells = lines[i].strip('| ').split(' | ')
        lines[i] = '| ' + ' | '.join(cells[place].strip() for place in places) + ' |'
    link = f'Click on a heading to sort. All columns: [{csv}]({csv}).'
    return '\n'.join([*lines[:rows[0]], ':::{container} sortable', *lines[rows[0]:rows[-1] + 1], ':::', '', link,
                      *lines[rows[-1] + 1:]])

def in_order(pages):
    "Results as a reader wants them: the paper's tables, verdicts, comparisons; then the others."
    ranks = {f'tables/{name}': i for i, name in enumerate(RESULTS)}
    return sorted(pages, key=lambda page: (ranks.get(page, len(ranks)), page.count('/'), page))

def api(module):
    "The public names of a module with their docments."
    from fastcore.docments import docments
    made = import_module(module)
    lines = [f'# {module}', '', inspect.getdoc(made) or '', '']
    names = getattr(made, '__all__', None) or [n for n in vars(made) if not n.startswith('_')]
    for name in names:
        thing = getattr(made, name)
        if not callable(thing) or inspect.getmodule(thing) is not made: continue
        lines += [f'## {name}', '', '```text', f'{name}{_signature(thing)}', '```', '', inspect.getdoc(thing) or '', '']
        notes = {k: v for k, v in docments(thing).items() if v and k != 'self'}
        if notes: lines += ['| | |', '|---|---|', *(f'| `{k}` | {_cell(v)} |' for k, v in notes.items()), '']
    return '\n'.join(lines)

def _signature(thing):
    try: return re.sub(r' at 0x\w+', '', str(inspect.signature(thing)))
    except (TypeError, ValueError): return '(...)'

def _cell(text): return ' '.join(text.split()).replace('|', r'\|').replace('<', '&lt;')

def toctree(caption, pages):
    return '\n'.join(['```{toctree}', f':caption: {caption}', ':maxdepth: 1', '', *pages, '```', ''])

def source(project, out):
    "Everything that Sphinx reads, laid out as in the clone."
    root = project.root
    shutil.copytree(root/'tables', out/'tables', ignore=shutil.ignore_patterns('*.json', 'README.md'))
    shutil.copytree(root/'figures', out/'figures', ignore=shutil.ignore_patterns('*.json', '*.md'))
    for path in (out/'tables').rglob('*.md'): # they have no title of their own
        text, wide = path.read_text('utf-8'), WIDE.get(path.stem.removesuffix('_api'))
        if wide and path.parent == out/'tables':
            text = narrowed(text, f'{wide[0]}{"_api" if path.stem.endswith("_api") else ""}.csv', wide[1])
        kind = '' if path.parent == out/'tables' else f' ({path.parent.name})'
        write_file(path, f'# {path.stem}{kind}\n\n' + text)
    pages = 'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'CITATION.cff', 'LICENSE'
    (out/'docs').mkdir()
    shutil.copy(root/'docs'/'method.svg', out/'docs')
    for name in (*pages, 'docs/conf.py', 'docs/site.css', 'docs/site.js'):
        shutil.copy(root/name, out/Path(name).name)
    books = {p.relative_to(project.nbs).with_suffix('').as_posix(): p for p in sorted(project.nbs.rglob('*.ipynb'))
             if not re.search(r'(^|/)[._]', p.relative_to(project.nbs).as_posix()) and p.stem != 'index'}
    for path in books.values():
        nb = {k: v for k, v in notebook(path).items() if not k.endswith('_')}
        write_file(out/path.relative_to(root), json.dumps(nb))
    for path in project.params.glob('*.yaml'): write_file(out/path.relative_to(root), path.read_text('utf-8'))
    modules = [p for p in sorted((root/'stepwise_routing').rglob('*.py')) if not p.name.startswith('_')]
    names = ['.'.join(p.relative_to(root).with_suffix('').parts) for p in modules]
    for name in names: write_file(out/'api'/f'{name}.md', api(name))
    slider_page(root/'tables', out/'slider.html')
    groups = {k: [b for one in v.split('|') for b in books if re.match(one, b)] for k, v in PARTS.items()}
    tables = [p.relative_to(out).with_suffix('').as_posix() for p in sorted((out/'tables').rglob('*.md'))]
    parts = [toctree(k, [f'nbs/{b}' for b in v]) for k, v in groups.items()]
    parts += [toctree('Results', in_order(tables)), toctree('API', [f'api/{n}' for n in names])]
    parts += [toctree('Project', ['CHANGELOG', 'CONTRIBUTING'])]
    text = (root/'README.md').read_text('utf-8')
    write_file(out/'index.md', text + '\nMove along kappa: <a href="slider.html">slider</a>.\n\n' + '\n'.join(parts))
    (out/'README.md').unlink()

def mend(out):
    "Links of all pages, after all of them are there."
    for path in out.rglob('*.md'): write_file(path, mended(path.read_text('utf-8'), path.parent))
    for path in out.rglob('*.ipynb'):
        nb = json.loads(path.read_text('utf-8'))
        for c in nb['cells']:
            if c['cell_type'] == 'markdown': c['source'] = mended(''.join(c['source']), path.parent)
        write_file(path, json.dumps(nb))

if __name__ == '__main__':
    project = find_project()
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else project.root/'_docs'
    for part in ('source', 'html'): shutil.rmtree(folder/part, ignore_errors=True) # whatever else is there stays
    source(project, folder/'source')
    mend(folder/'source')
    sphinx = [sys.executable, '-m', 'sphinx', '-W', '--keep-going', '-q', '-b', 'html']
    done = subprocess.run([*sphinx, folder/'source', folder/'html'])
    for name in ('slider.html', 'plotly.min.js'): shutil.copy(folder/'source'/name, folder/'html'/name)
    sys.exit(done.returncode)
