"""Tests import what they share from tests/helpers; a fixture of several files stands here.

`make test` gives the same result every time: property tests take the same examples on every machine. `make fuzz` and
`make properties` look for new ones (STEPWISE_FUZZ times as many, at random). STEPWISE_ORDER=N puts the tests in the
N-th random order."""
import os
import random
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
sys.path.insert(0, str(Path(__file__).parents[1]/'nbs'/'labs')) # the generators of the micro problems

FUZZ = int(os.environ.get('STEPWISE_FUZZ', 0))
settings.register_profile('fixed', derandomize=True, database=None, deadline=None)
settings.register_profile('fuzz', max_examples=100*FUZZ or 100, deadline=None, print_blob=True,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.load_profile('fuzz' if FUZZ else 'fixed')

def pytest_collection_modifyitems(items):
    if order := os.environ.get('STEPWISE_ORDER'): random.Random(order).shuffle(items)

@pytest.fixture
def offline(monkeypatch):
    "Whoever opens a connection or asks for an address fails."
    def refused(*args, **kwargs): raise AssertionError('somebody was called')
    for name in ('create_connection', 'getaddrinfo'): monkeypatch.setattr(socket, name, refused)
    for name in ('connect', 'connect_ex', 'sendto'): monkeypatch.setattr(socket.socket, name, refused)
