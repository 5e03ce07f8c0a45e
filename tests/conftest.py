"""Tests import what they share from tests/helpers; a fixture of several files stands here.

Property tests take the same 25 examples each time (profile `dev`). `HYPOTHESIS_PROFILE=ci` takes 200 at random."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault('OMP_NUM_THREADS', '1')  # two processes test side by side
sys.path.insert(0, str(Path(__file__).parent / 'helpers'))
sys.path.insert(0, str(Path(__file__).parents[1] / 'nbs' / 'labs'))  # generators of micro problems

settings.register_profile('dev', max_examples=25, derandomize=True, database=None, deadline=None)
settings.register_profile('ci', max_examples=200, deadline=None, print_blob=True)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'dev'))


@pytest.fixture(scope='module')
def opened(tmp_path_factory):
    "An open router of a toy pair, and its folder."
    from toy_models import toy_models
    from toy_own import ready

    from stepwise_routing.own import open_router

    folder = tmp_path_factory.mktemp('routers') / 'mine'
    ready(folder)
    return open_router(folder, toy_models()), folder


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker('slow') and not item.get_closest_marker('timeout'):
            item.add_marker(pytest.mark.timeout(600))
