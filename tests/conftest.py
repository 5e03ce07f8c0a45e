"Tests import what they share from tests/helpers; a fixture of several files stands here."
import socket, sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent/'helpers'))

@pytest.fixture
def offline(monkeypatch):
    "Whoever opens a connection or asks for an address fails."
    def refused(*args, **kwargs): raise AssertionError('somebody was called')
    for name in ('create_connection', 'getaddrinfo'): monkeypatch.setattr(socket, name, refused)
    for name in ('connect', 'connect_ex', 'sendto'): monkeypatch.setattr(socket.socket, name, refused)
