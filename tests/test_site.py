"The documentation: it builds without a warning, every link leads somewhere, every figure says what it shows."
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from stepwise_routing.method.results import headline
from stepwise_routing.report.points import drawn_methods, read_points
from stepwise_routing.report.slider import show_slider, slider, slider_page
from stepwise_routing.run.notebooks import notebook_cells

ROOT = Path(__file__).resolve().parents[1]
BOOKS = [p for p in sorted((ROOT/'nbs').rglob('*.ipynb')) if not re.search(r'/[._]', p.relative_to(ROOT).as_posix())]
PAGES = [ROOT/'README.md', ROOT/'CONTRIBUTING.md', ROOT/'CHANGELOG.md', *sorted((ROOT/'tables').rglob('*.md'))]

def texts():
    "(Path, Markdown) of everything that is read."
    yield from ((p, p.read_text('utf-8')) for p in PAGES)
    yield from ((p, c['source']) for p in BOOKS for c in notebook_cells(p) if c['cell_type'] == 'markdown')

def without_code(text): return re.sub(r'```.*?```|`[^`\n]*`|\$[^$\n]+\$', '', text, flags=re.S)

def test_every_link_of_pages_and_notebooks_leads_somewhere():
    links = [(p, m) for p, text in texts() for m in re.findall(r'\]\(([^)\s]+)\)', without_code(text))]
    inside = [(p, m.split('#')[0]) for p, m in links if not re.match(r'https?:|mailto:|#', m)]
    assert len(inside) > 50
    assert [(p.name, m) for p, m in inside if not (p.parent/m).exists()] == []

def test_every_picture_of_pages_and_notebooks_says_what_it_shows():
    alts = [(p.name, alt) for p, text in texts() for alt in re.findall(r'!\[([^\]]*)\]\(', text)]
    assert alts and [pair for pair in alts if len(pair[1]) < 20] == []

def test_the_readme_is_short(): assert len((ROOT/'README.md').read_bytes()) <= 10_240

def test_the_code_that_the_readme_names_is_there():
    "The last column of the map from the paper to the code."
    modules = '\n'.join(p.read_text('utf-8') for p in sorted((ROOT/'stepwise_routing').rglob('*.py')))
    rows = re.findall(r'^\|.*\| (`.*) \|$', (ROOT/'README.md').read_text('utf-8'), re.M)
    names = [n.split('.')[0] for row in rows for n in re.findall(r'`([\w.]+)`', row)]
    assert len(names) > 15
    assert [n for n in names if not re.search(rf'^(async )?(def|class) {n}\b', modules, re.M)] == []

@pytest.mark.parametrize('plotly', [True, False])
def test_the_slider_of_a_notebook_is_small_and_has_a_picture(plotly, monkeypatch, capsys):
    if plotly: pytest.importorskip('plotly')
    else: monkeypatch.setitem(sys.modules, 'plotly.subplots', None)
    shown = []
    monkeypatch.setattr('IPython.display.display', lambda data, raw: shown.append(data))
    show_slider(ROOT/'tables')
    bundle, = shown
    assert bundle['image/png'][1:4] == b'PNG' and len(bundle['image/png']) < 100_000
    assert ('application/vnd.plotly.v1+json' in bundle) == plotly
    assert len(json.dumps(bundle.get('application/vnd.plotly.v1+json', ''), default=str)) < 100_000

def test_the_slider_says_whose_kappa_it_is_and_starts_at_the_chosen_one(tmp_path):
    "Names, a legend that says each curve once, the value of kappa, colours for light and dark pages."
    pytest.importorskip('plotly')
    data = read_points(ROOT/'tables')
    row = drawn_methods(data['points'])[-1]
    fig = slider(data['points'], data['frontiers'], row)
    own = data['points'].query('method == @row[0] and on_escalate == @row[1] and chosen == 1')
    stars = [trace for trace in fig.data if trace.mode == 'markers']
    assert [trace.x[0] for trace in stars] == [round(100*share, 3) for share in own['cost_share']]
    assert all(f'{kappa:.4g}' in fig.layout.sliders[0].steps[fig.layout.sliders[0].active].label
               for kappa in own['kappa'])
    assert row[0] in fig.layout.title.text and fig.layout.annotations[0].text.startswith('<b>micro-gsm</b>')
    named = [trace.name for trace in fig.data if trace.showlegend]
    assert len(named) == len(set(named)) == 5 == len(fig.data)/3
    assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == 'rgba(0,0,0,0)'
    page = slider_page(ROOT/'tables', tmp_path/'slider.html').read_text('utf-8')
    assert 'name="color-scheme" content="light dark"' in page and 'width=device-width' in page

def test_the_best_row_of_the_readme_is_the_one_that_the_rule_chose():
    "The rule may choose another variant with other numbers; then nbs/index.ipynb is to name that one."
    source = '\n'.join(c['source'] for c in notebook_cells(ROOT/'nbs/index.ipynb'))
    for suffix in ('', '_api'):
        rows = headline(read_points(ROOT/'tables', suffix)['points'])
        pairs = [rows['Ours, best'], *([] if suffix else [rows['Bare threshold (probability)']])]
        for method, on_escalate in pairs:
            slug = '_'.join(re.findall(r'[a-z]+', method.lower()))
            asked = set(re.findall(rf'{{{{evaluation{suffix}\.\w+\.{slug}\.(\w+)\.', source))
            assert asked == {on_escalate}, (method, suffix)

def site_script():
    spec = importlib.util.spec_from_file_location('site_script', ROOT/'.ci'/'site.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script

def test_a_wide_table_has_the_columns_that_matter_and_a_link_to_all():
    script = site_script()
    file, columns = script.WIDE['full']
    for end in ('', '_api'):
        text = (ROOT/'tables'/f'full{end}.md').read_text('utf-8')
        page = script.narrowed(text, f'{file}{end}.csv', columns)
        heads, *rows = [line.strip('| ').split(' | ') for line in page.split('\n') if line.startswith('|')]
        assert heads == list(columns) and len(heads) == 10 and {len(row) for row in rows} == {10}
        assert len(rows) == sum(line.startswith('|') for line in text.split('\n')) - 1
        assert f']({file}{end}.csv)' in page and (ROOT/'tables'/f'{file}{end}.csv').is_file()
        large = next(row for row in rows if row[1] == 'Large only')
        assert large[heads.index('cost_share')].startswith('1.00<br>')

def test_cells_that_are_folded_in_jupyterlab_are_folded_on_the_site():
    path = ROOT/'nbs'/'03_policy.ipynb'
    folded = {c['id'] for c in notebook_cells(path) if c['metadata'].get('jupyter', {}).get('source_hidden')}
    shown = {c['id']: c['metadata'].get('tags', []) for c in site_script().notebook(path)['cells']}
    assert {'imports', 'picture'} <= folded
    assert {id for id, tags in shown.items() if 'hide-input' in tags} == folded & set(shown) != set(shown)

def test_results_are_in_the_readers_order():
    pages = ['tables/ablations/table1', 'tables/certain', 'tables/levels', 'tables/table1', 'tables/claims']
    assert site_script().in_order(pages) == ['tables/table1', 'tables/claims', 'tables/certain', 'tables/levels',
                                             'tables/ablations/table1']

@pytest.mark.skipif(not shutil.which('node'), reason='no node here')
def test_numbers_are_sorted_before_words():
    check = """
      const cell = text => ({cells: [{textContent: text}]})
      const texts = ['9.5[9, 10]', '-', '-1.0', '10.2', 'large only']
      const sorted = texts.map(cell).sort((a, b) => compare(value(a, 0), value(b, 0)))
      console.log(sorted.map(row => row.cells[0].textContent).join('|'))"""
    script = (ROOT/'docs'/'site.js').read_text('utf-8').partition('addEventListener(')[0]
    done = subprocess.run(['node', '-e', script + check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '-1.0|9.5[9, 10]|10.2|-|large only'

# ---- built

class Page(HTMLParser):
    "Addresses and pictures of a page."
    def __init__(self, path):
        super().__init__()
        self.addresses, self.alts, self.names = [], [], set()
        self.feed(path.read_text('utf-8'))
    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        if tag == 'img': self.alts.append(a.get('alt') or '')
        self.names.add(a.get('id'))
        self.addresses += [a[k] for k in ('href', 'src') if a.get(k) and a.get('rel') not in ('canonical',)]

class Rendered(HTMLParser):
    "What a browser draws of a page: text outside of code, tables in outputs, formulas as (tag, text) trees."
    SILENT = {'pre', 'code', 'script', 'style', 'title'}
    EMPTY = {'img', 'input', 'br', 'meta', 'link', 'hr', 'col', 'source', 'use', 'path', 'line', 'polyline', 'circle'}

    def __init__(self, path):
        super().__init__()
        self.open, self.text, self.output_tables, self.formulas = [], [], 0, []
        self.feed(path.read_text('utf-8'))

    def handle_starttag(self, tag, attributes):
        if tag in self.EMPTY: return
        classes = dict(attributes).get('class') or ''
        in_output = 'cell_output' in classes or any(element.get('output') for element in self.open)
        self.output_tables += tag == 'table' and in_output
        node = dict(tag=tag, text='', parts=[], output=in_output)
        if tag == 'math': self.formulas.append(node)
        elif self.open: self.open[-1]['parts'].append(node)
        self.open.append(node)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()['tag'] != tag: pass

    def handle_data(self, data):
        if not self.open: return
        self.open[-1]['text'] += data.strip()
        if not self.SILENT & {element['tag'] for element in self.open}: self.text.append(data)

def below(node):
    "A node of a page and all that it holds."
    yield node
    for part in node['parts']: yield from below(part)

def accented(node):
    "Is this a letter with an accent over it?"
    parts = [part['tag'] for part in node['parts']]
    return node['tag'] == 'mover' and parts == ['mi', 'mo']

def markdown_tables(path):
    "How many outputs of a notebook are a Markdown table."
    outputs = [output for cell in notebook_cells(path) for output in cell.get('outputs', ())]
    texts = [''.join(output.get('data', {}).get('text/markdown', '')) for output in outputs]
    return sum(bool(re.search(r'^\|[ :|-]+\|$', text, re.M)) for text in texts)

@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "The site in a folder of this worker: two may build it at the same time."
    for package in ('sphinx', 'myst_nb', 'furo', 'plotly', 'nbdev'): pytest.importorskip(package)
    folder = tmp_path_factory.mktemp('site')
    done = subprocess.run([sys.executable, '.ci/site.py', folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:] # a warning is an error
    return folder/'html'

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_address_of_the_site_is_in_the_site(site):
    "Scripts and styles, too: it works from a folder, without a network."
    pages, missing = {path: Page(path) for path in sorted(site.rglob('*.html'))}, []
    for path, page in pages.items():
        for address in page.addresses:
            if re.match(r'(https?:|mailto:|data:)', address): continue
            file, _, place = address.partition('#')
            target = (path.parent/file.split('?')[0]).resolve() if file else path
            there = target.exists() and (not place or target not in pages or unquote(place) in pages[target].names)
            if not there: missing.append((path.name, address))
        outside = r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]+)'
        assert re.findall(outside, path.read_text('utf-8')) == [], path
        assert [alt for alt in page.alts if len(alt) < 5] == [], path
    assert len(pages) > 80 and missing == []
    full = (site/'tables'/'full.html').read_text('utf-8')
    assert re.search(r'class="[^"]*sortable', full) and 'site.js' in full and (site/'_static'/'site.js').is_file()

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_table_of_an_output_is_a_table_on_the_site(site):
    "MyST-NB's own renderer of outputs knows no tables: a reader would see raw pipes."
    raw = {}
    for path in sorted(site.rglob('*.html')):
        page = Rendered(path)
        rows = re.findall(r'^\s*\|.*\|\s*$', ''.join(page.text), re.M)
        if rows: raw[path.name] = rows[:2]
    assert raw == {}
    wanted = {book: markdown_tables(book) for book in BOOKS if book.stem != 'index'}
    assert sum(wanted.values()) > 10
    for book, tables in wanted.items():
        page = Rendered((site/book.relative_to(ROOT)).with_suffix('.html'))
        assert page.output_tables >= tables, book.name

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_index_of_an_accented_letter_is_beside_it(site):
    "Equation 4 of the site holds the letters J with a bar and A with a hat; docutils put their indices underneath."
    for path in sorted(site.rglob('*.html')):
        nodes = [node for formula in Rendered(path).formulas for node in below(formula)]
        under = [n for n in nodes if n['tag'] in ('munder', 'munderover') and n['parts'][0]['tag'] == 'mi']
        assert under == [], path.name
    formulas = Rendered(site/'nbs'/'03a_cpo.html').formulas
    indexed = [n['parts'] for f in formulas for n in below(f) if n['tag'] in ('msub', 'msubsup')]
    letters = {(base['parts'][0]['parts'][0]['text'], index['text'])
               for base, index, *_ in indexed if base['parts'] and accented(base['parts'][0])}
    assert {('J', 'C'), ('A', 't')} <= letters

def in_browser(page, probe, folder):
    "What a script finds out about a page in a headless browser that reaches no network."
    text = page.read_text('utf-8')
    find = f'document.body.dataset.told = JSON.stringify({probe})'
    script = f'<script>addEventListener("load", () => {{ {find} }})</script>'
    copy = page.with_name(f'probe-{page.name}')
    copy.write_text((script + '</body>').join(text.rsplit('</body>', 1)), 'utf-8')
    command = ['chromium', '--headless', '--no-sandbox', '--disable-gpu', f'--user-data-dir={folder}/u',
               '--host-resolver-rules=MAP * ~NOTFOUND', '--virtual-time-budget=5000',
               '--allow-file-access-from-files', '--dump-dom', copy.as_uri()]
    try: done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    finally: copy.unlink()
    told = re.search(r'data-told="([^"]+)"', done.stdout)
    assert told, done.stderr[-2000:]
    return json.loads(told[1].replace('&quot;', '"'))

@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which('chromium'), reason='no chromium here')
def test_a_browser_draws_tables_and_equation_4(site, tmp_path):
    "Boxes on the screen: a table has height, the index C stands to the lower right of J with a bar."
    heights = in_browser(site/'nbs'/'05_results.html', """
      [...document.querySelectorAll('.cell_output table')].map(t => t.getBoundingClientRect().height)""", tmp_path)
    assert len(heights) >= 10 and min(heights) > 20
    boxes = in_browser(site/'nbs'/'03a_cpo.html', """
      [...document.querySelectorAll('msub, msubsup')]
        .filter(m => m.children[0].querySelector('mover') && m.children[0].textContent.includes('J'))
        .map(m => [m.children[0], m.children[1]].map(e => e.getBoundingClientRect()))""", tmp_path)
    assert len(boxes) >= 2
    heights = in_browser(site/'nbs'/'03a_cpo.html', """
      [...document.querySelectorAll('.math-wrapper')].map(e => [e.scrollHeight, e.clientHeight])""", tmp_path)
    assert heights and [pair for pair in heights if pair[0] > pair[1]] == [] # nothing is cut off
    for letter, index in boxes:
        assert index['left'] >= letter['right'] - 1 and index['top'] > letter['top']

def test_the_value_of_the_slider_can_be_seen():
    data = read_points(ROOT/'tables')
    pytest.importorskip('plotly')
    bar, = slider(data['points'], data['frontiers'], drawn_methods(data['points'])[-1]).layout.sliders
    assert bar.currentvalue.font.color not in (None, bar.font.color)
    assert 'kappa' in bar.steps[bar.active].label and bar.font.color == 'rgba(0,0,0,0)'

@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which('chromium'), reason='no chromium here')
def test_the_slider_is_not_cropped_on_a_narrow_screen(site, tmp_path):
    "In a frame of 390 pixels, all text is inside."
    page = tmp_path/'narrow.html'
    for name in ('slider.html', 'plotly.min.js'): shutil.copy(site/name, tmp_path/name)
    page.write_text('<body><iframe id="f" src="slider.html" width="390" height="520"></iframe></body>', 'utf-8')
    boxes = in_browser(page, """[...document.getElementById('f').contentDocument.querySelectorAll('svg text')]
      .map(t => t.getBoundingClientRect()).filter(b => b.width).map(b => [b.left, b.right])""", tmp_path)
    assert len(boxes) > 20 and min(b[0] for b in boxes) >= 0 and max(b[1] for b in boxes) <= 390

@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which('chromium'), reason='no chromium here')
def test_the_slider_moves_in_a_browser(site, tmp_path):
    "A headless browser that reaches no network drags the slider: marker and numbers follow, the console is silent."
    for name in ('slider.html', 'plotly.min.js'): shutil.copy(site/name, tmp_path/name)
    drag = """<script>addEventListener('load', () => { let before; const timer = setInterval(() => {
      const plot = document.getElementById('slider'), touch = document.querySelector('.slider-rail-touch-rect')
      if (!touch) return // not drawn yet
      const now = [plot.layout.annotations[0].text, plot._fullData[4].x[0]], rail = touch.getBoundingClientRect()
      before = before || now
      document.body.dataset.told = JSON.stringify([before, now])
      if (now[0] !== before[0]) return clearInterval(timer)
      const at = share => ({clientX: rail.left + share*rail.width, clientY: rail.top + rail.height/2, bubbles: true})
      touch.dispatchEvent(new MouseEvent('mousedown', at(.5)))
      plot.dispatchEvent(new MouseEvent('mousemove', at(.9)))
      plot.dispatchEvent(new MouseEvent('mouseup', at(.9)))
    }, 500) })</script></body>"""
    page = (tmp_path/'slider.html').read_text('utf-8')
    (tmp_path/'slider.html').write_text(drag.join(page.rsplit('</body>', 1)), 'utf-8')
    command = ['chromium', '--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr',
               f'--user-data-dir={tmp_path}/u',
               '--host-resolver-rules=MAP * ~NOTFOUND', '--virtual-time-budget=20000', '--dump-dom']
    done = subprocess.run([*command, (tmp_path/'slider.html').as_uri()], capture_output=True, text=True, timeout=240)
    told = re.search(r'data-told="([^"]+)"', done.stdout)
    assert told, done.stderr[-2000:]
    (title, place), (title_after, place_after) = json.loads(told[1].replace('&quot;', '"'))
    assert title != title_after and place != place_after
    assert 'CONSOLE' not in done.stderr
