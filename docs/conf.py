"How Sphinx builds the site from what `.ci/site.py` has put together: nothing is executed, nothing is fetched."
import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project, author = 'Stepwise model routing', 'The stepwise-routing authors'
extensions = ['myst_nb']
html_theme, html_title, html_copy_source = 'furo', project, False
myst_enable_extensions, myst_heading_anchors = ['dollarmath', 'amsmath', 'colon_fence'], 3
nb_execution_mode, nb_merge_streams = 'off', True
nb_render_markdown_format = 'myst' # of outputs; its default, 'commonmark', knows no tables
html_math_renderer = 'mathml'
html_static_path, html_css_files, html_js_files = ['site.css', 'site.js'], ['site.css'], ['site.js']

ACCENTED = re.compile(r'\\(?:bar|hat|tilde|vec|dot)\b\s*(?:\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z])')

def _prepared(latex):
    "A formula as docutils draws it rightly: it would put the index of an accented letter underneath."
    latex = re.sub(r'\\[bB]ig(?![a-z])', '', latex).replace(r'\dots', r'\ldots') # MathML stretches by itself
    return ACCENTED.sub(r'{\g<0>{}}', latex)

def _visit(as_block):
    def visit(writer, node):
        writer.body.append(tex2mathml(_prepared(node.astext()), as_block=as_block))
        raise nodes.SkipNode
    return visit

def setup(app):
    "Formulas become MathML: browsers draw it themselves, without a script, a font or a network."
    app.add_html_math_renderer('mathml', inline_renderers=(_visit(False), None), block_renderers=(_visit(True), None))
