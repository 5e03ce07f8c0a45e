"The pictures of the ideas: legible on light and dark ground, told to who cannot see them, the same bytes every time."
import base64
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from stepwise_routing.report import pictures
from stepwise_routing.report.example import real_example, running_example, watched_training
from stepwise_routing.report.pictures import ON_COLOUR, WIDTH, cut, short

GROUNDS = '#ffffff', '#131416', '#111111', '#0d1117' # a page, and the dark themes of the site, JupyterLab and GitHub
DRAWINGS = 'method', 'tree', 'outcomes', 'unsure_step', 'threshold', 'cpo'

@pytest.fixture(scope='module')
def shown():
    "What is drawn, from the models and records that are shipped."
    example = running_example()
    return dict.fromkeys(DRAWINGS, (example,)) | dict(threshold=(watched_training(rounds=10),), cpo=())

@pytest.fixture(params=DRAWINGS)
def drawing(request, shown):
    "A function that draws one picture."
    return lambda: getattr(pictures, f'draw_{request.param}')(*shown[request.param])

def luminance(color):
    parts = [int(to_hex(color)[i:i+2], 16)/255 for i in (1, 3, 5)]
    linear = [part/12.92 if part <= .04045 else ((part + .055)/1.055)**2.4 for part in parts]
    return .2126*linear[0] + .7152*linear[1] + .0722*linear[2]

def contrast(one, other):
    "As WCAG 2 defines it."
    low, high = sorted((luminance(one), luminance(other)))
    return (high + .05)/(low + .05)

def texts(figure):
    "The texts that one sees, and where they are on the page."
    figure.draw_without_rendering()
    seen = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    places = [(text, text.get_window_extent()) for text in seen]
    hidden = [tick for axes in figure.axes if not axes.axison for axis in (axes.xaxis, axes.yaxis)
              for tick in axis.get_ticklabels()]
    return [(text, place) for text, place in places if text not in hidden]

def test_it_has_a_drawing_and_an_alternative_text(drawing):
    picture = drawing()
    bundle = picture._repr_mimebundle_()
    root = ElementTree.fromstring(bundle['image/svg+xml'])
    assert len(root.findall('.//{*}path')) > 20
    assert root.get('role') == 'img' and root.get('aria-label') == picture.alt == bundle['text/plain']
    assert 100 < len(picture.alt) < 700 and picture.alt.endswith('.')

def test_the_same_numbers_give_the_same_bytes(drawing):
    one, other = drawing().svg, drawing().svg
    assert one == other and b'date' not in one and len(one) < 70_000

def test_pixels_stand_beside_the_vectors_for_notebooks_that_are_not_trusted(drawing):
    picture = drawing()
    pixels = base64.b64decode(picture._repr_mimebundle_()['image/png'])
    assert pixels == drawing().png and pixels[1:4] == b'PNG' and len(pixels) < 60_000

def test_letters_are_large_enough_in_print(drawing):
    figure = drawing().figure
    assert figure.get_size_inches()[0] == WIDTH == 5.5
    assert min(text.get_fontsize() for text, _ in texts(figure)) >= 6.5

def test_texts_are_inside_and_cover_no_other(drawing): assert_texts_have_room(drawing().figure)

def assert_texts_have_room(figure):
    placed = texts(figure)
    outside = [text.get_text() for text, place in placed if place.x0 < 0 or place.y0 < 0
               or place.x1 > figure.bbox.x1 or place.y1 > figure.bbox.y1]
    assert outside == []
    covered = [(a.get_text(), b.get_text()) for i, (a, one) in enumerate(placed) for b, other in placed[:i]
               if one.overlaps(other)]
    assert covered == []

def test_letters_can_be_read_on_a_light_and_on_a_dark_ground(drawing):
    "At least 4, not WCAG's 4.5: no colour has that on white and on these dark grounds at once. In boxes at least 4.4."
    figure = drawing().figure
    filled = [patch for patch in figure.findobj(Rectangle) if patch.get_fill()]
    boxes = [patch for patch in filled if to_hex(patch.get_fc()) != '#ffffff']
    for text, place in texts(figure):
        if to_hex(text.get_color()) != ON_COLOUR:
            assert min(contrast(text.get_color(), ground) for ground in GROUNDS) >= 4, text.get_text()
            continue
        under = [box for box in boxes if box.get_window_extent().containsx(place.x0)
                 and box.get_window_extent().containsx(place.x1) and box.get_window_extent().containsy(place.y0)]
        assert under and all(contrast(ON_COLOUR, box.get_fc()) >= 4.4 for box in under), text.get_text()

def test_the_ground_is_left_out(drawing):
    figure = re.search(rb'<g id="patch_1">\s*<path [^>]*style="fill: none', drawing().svg)
    assert figure

def test_the_example_is_that_of_the_readme(shown):
    (example,) = shown['method']
    assert example.steps[example.hand_over] == 'Left over: 54-48=8.' and not example.right[-1]
    assert example.rests[example.hand_over][-1] == r'Answer: \boxed{6}' and example.right[example.hand_over]
    assert len(example.right) == len(example.steps) + 1 == len(example.cost) and example.cost[-1] < .3
    doubted = min(token.prob for token in example.tokens[example.hand_over] if token.is_math)
    assert example.doubts[example.hand_over] == pytest.approx(1 - doubted)

def test_a_threshold_is_watched_in_every_round(shown):
    (watched,) = shown['threshold']
    assert len(watched.kappas) == len(watched.chances) == 10 and watched.kappas[0] == .25
    assert all((chances[1:] >= chances[:-1]).all() and 0 <= chances[0] <= chances[-1] <= 1
               for chances in watched.chances)

def test_a_polygon_is_cut_by_a_line():
    square = [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert cut(square, (1, 0), -.5) == [(0, 0), (.5, 0), (.5, 1), (0, 1)]
    assert cut(square, (1, 0), -2) == square and cut(square, (1, 0), 2) == []

def test_a_step_is_told_in_short():
    assert [short(step) for step in ('Left over: 54-48=8.', r'Answer: \boxed{6}', 'Check: 2*3=6; 30+12=42', 'So we go')
            ] == ['54-48=8', 'answer 6', '30+12=42', 'So we go']

def test_a_real_problem_whose_wrong_step_is_not_doubted_enough():
    example = real_example()
    assert 'Megan' in example.question and example.right == (True, True, False, False, False, False)
    assert max(example.doubts) < .5 and example.hand_over == len(example.steps) == 5
    picture = pictures.draw_outcomes(example)
    assert 'step 3: wrong at 95 %' in picture.alt and picture.alt.endswith('the router never hands over.')
    label, = [text for text, place in texts(picture.figure) if text.get_text() == 'the router never hands over']
    assert label.get_window_extent().x1 <= picture.figure.bbox.x1

@pytest.fixture(params=['micro', 'real'])
def never(request, shown):
    "A problem that is never handed over: Sam's without doubts above the threshold, and Megan's."
    (sam,) = shown['method']
    return real_example() if request.param == 'real' else replace(sam, doubts=tuple(d/2 for d in sam.doubts))

@pytest.mark.parametrize('name', ['method', 'tree', 'unsure_step'])
def test_a_problem_that_is_never_handed_over_is_drawn(name, never):
    picture = getattr(pictures, f'draw_{name}')(never)
    assert never.hand_over == len(never.steps)
    assert 'never hand' in picture.alt and 'takes over' not in picture.alt and len(picture.alt) < 700
    if name != 'tree': assert any('never handed over' in text.get_text() for text, _ in texts(picture.figure))
    assert_texts_have_room(picture.figure)
