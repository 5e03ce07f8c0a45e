"The pictures of the ideas: legible on light and dark ground, told to who cannot see them, the same bytes every time."
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from stepwise_routing.report import pictures
from stepwise_routing.report.example import real_example, running_example, watched_training

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

def test_a_real_problem_whose_wrong_step_is_not_doubted_enough():
    example = real_example()
    assert 'Megan' in example.question and example.right == (True, True, False, False, False, False)
    assert max(example.doubts) < .5 and example.hand_over == len(example.steps) == 5
    picture = pictures.draw_outcomes(example)
    assert 'step 3: wrong at 95 %' in picture.alt and picture.alt.endswith('the router never hands over.')

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
