"How Sphinx builds the site from what `.ci/site.py` has put together: nothing is executed, nothing is fetched."
import re

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

project, author = 'Stepwise model routing', 'The stepwise-routing authors'
extensions = ['myst_nb']
html_theme, html_title, html_copy_source = 'furo', project, False
myst_enable_extensions, myst_heading_anchors = ['dollarmath', 'amsmath'], 3
nb_execution_mode, nb_merge_streams = 'off', True
html_math_renderer = 'mathml'

def _visit(as_block):
    def visit(writer, node): # MathML stretches by itself
        latex = re.sub(r'\\[bB]ig(?![a-z])', '', node.astext()).replace(r'\dots', r'\ldots')
        writer.body.append(tex2mathml(latex, as_block=as_block))
        raise nodes.SkipNode
    return visit

def setup(app):
    "Formulas become MathML: browsers draw it themselves, without a script, a font or a network."
    app.add_html_math_renderer('mathml', inline_renderers=(_visit(False), None), block_renderers=(_visit(True), None))
