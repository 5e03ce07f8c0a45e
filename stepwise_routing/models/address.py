"""Where a server is: its address in one spelling, whether it is this machine, and the key for it.

Here belongs all that an address alone says. Asking a server belongs in `models.chat` and `models.vllm`.
"""

import contextlib
import os
import re
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(base_url) -> bool:
    "Is this the address of a server on this machine?"
    try:
        host = urlsplit(base_url).hostname
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == 'localhost'


def plain_address(base_url: str) -> str:
    "A server's address in a standard spelling. ValueError for a bad one, a password in it, or a query."
    if '@' in base_url or '?' in base_url:
        raise ValueError(
            'base_url: leave out user, password and query; put the key into an environment variable'
        )
    try:
        url = urlsplit(base_url)
        port = url.port
    except ValueError:  # of a port or an IPv6 address that is none
        url = None
    is_plain = base_url.isprintable() and ' ' not in base_url
    if not url or not is_plain or url.scheme not in ('http', 'https') or not url.hostname:
        raise ValueError(f'base_url={base_url!r}: give an address like http://127.0.0.1:8000/v1')
    host = url.hostname
    usual = dict(http=80, https=443)[url.scheme]
    if is_loopback(base_url):
        host = '127.0.0.1'
    port = '' if port in (None, usual) else f':{port}'
    return f'{url.scheme}://{host}{port}{url.path.rstrip("/")}'


def plain_key(key_env) -> str:
    "The API key in an environment variable, '' without one. ValueError for a key that no header can hold."
    if not re.fullmatch('(?:[A-Za-z_][A-Za-z0-9_]*)?', key_env):  # perhaps the key itself
        raise ValueError(
            'key_env is no name of an environment variable: give a name such as MY_API_KEY'
        )
    key = os.environ.get(key_env, '').strip()
    if re.search('[^!-~]', key):
        raise ValueError(f'{key_env} holds no API key: it has a blank or an unusual character')
    return key


def read_key(key_env, base_url) -> str:
    "The API key in an environment variable. Without one: '' for a server on this machine, else ValueError."
    key = plain_key(key_env)
    host = urlsplit(base_url).hostname
    if key or is_loopback(base_url):
        return key
    raise ValueError(f'no API key: set the environment variable {key_env} to one for {host}')
