"""The grader of programs: right programs pass; nothing that a hostile program does is called right, or does harm."""
import os
import time

import psutil
import pytest

from stepwise_routing.data.programs import code_of, defined_names, run_tests, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or 'programs are run on Linux alone')
TESTS = ['assert f(2) == 5', 'assert sorted(f(3)) == [1, 2, 3]', 'assert set(f(4)) == {1, 4}'] # no program below can
WRONG = 'def f(x): return x\n'

HOSTILE = { # each would pass a careless grader, or harm it
    'exit 0': 'import os\nos._exit(0)',
    'exit by exception': 'raise SystemExit(0)',
    'sys.exit in the function': 'import sys\ndef f(x): sys.exit(0)',
    'os._exit in the function': 'import os\ndef f(x): os._exit(0)',
    'interrupt': 'def f(x): raise KeyboardInterrupt',
    'abort': 'import os\nos.abort()',
    'a segmentation fault': 'import ctypes\nctypes.string_at(0)',
    'kill the parent': 'import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n' + WRONG,
    'kill the group': 'import os, signal\nos.killpg(0, signal.SIGKILL)\n' + WRONG,
    'kill everybody': 'import os\nos.kill(-1, 9)\n' + WRONG,
    'kill itself': 'import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n' + WRONG,
    'a fork bomb': 'import os\nwhile True: os.fork()',
    'one fork that answers': 'import os\nif os.fork() == 0: os._exit(0)\n' + WRONG,
    'threads without end': 'import threading\nwhile True: threading.Thread(target=print).start()',
    'a process': 'import subprocess\nsubprocess.run(["true"])\n' + WRONG,
    'os.system': 'import os\nassert os.system("true") == 0\n' + WRONG,
    'exec': 'import os, sys\nos.execv("/bin/true", ["true"])',
    'memory': 'x = "a"*(1 << 40)',
    'memory, slowly': 'x = []\nwhile True: x.append("a"*(1 << 24))',
    'an endless loop': 'while True: pass',
    'an endless loop in the function': 'def f(x):\n    while True: pass',
    'a huge power': 'def f(x): return 10**10**10',
    'endless recursion': 'def f(x): return f(x)',
    'huge output': 'while True: print("x"*10**6)',
    'output of a verdict': 'print(\'{"passed": 3, "reason": ""}\')\n' + WRONG,
    'a verdict to every descriptor': '''import os
for n in range(64):
    try: os.write(n, b'{"passed": 3, "reason": ""}')
    except OSError: pass
''' + WRONG,
    'answers ahead of their questions': '''import os, json, struct
data = json.dumps(["value", True]).encode()
for n in range(3, 10):
    try: os.write(n, (struct.pack(">I", len(data)) + data)*20)
    except OSError: pass
''' + WRONG,
    'always equal': '''class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __iter__(self): return iter([Same()]*3)
    def __lt__(self, other): return True
def f(x): return Same()''',
    'an equal number': '''class Same(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Same(x)''',
    'an equal list': '''class Same(list):
    def __eq__(self, other): return True
def f(x): return Same([x])''',
    'its own sorted and set': 'sorted = set = lambda x: 1\n' + WRONG,
    'builtins': '''import builtins
builtins.sorted = builtins.set = lambda x: 1
builtins.AssertionError = type("Never", (BaseException,), {})
''' + WRONG,
    'the json module': 'import json\njson.dumps = lambda x: \'["value", true]\'\n' + WRONG,
    'os.write': 'import os\nos.write = lambda *a: len(a[-1])\n' + WRONG,
    'sys.modules': 'import sys\nsys.modules.clear()\n' + WRONG,
    'the main module': '''import sys
main = sys.modules['__main__']
main.encode = lambda *a: True
main.answer = lambda *a: True
''' + WRONG,
    'frames': '''import sys
frame = sys._getframe()
while frame:
    frame.f_locals.update(passed=3, reason="")
    frame = frame.f_back
''' + WRONG,
    'a trace function': 'import sys\nsys.settrace(lambda *a: None)\n' + WRONG,
    'python -O': 'import sys\nsys.flags = type("F", (), {"optimize": 2})\n' + WRONG,
    'a socket': '''import socket
try: socket.create_connection(("127.0.0.1", 22), 1)
except OSError: pass
''' + WRONG,
    'a socket pair': 'import socket\nsocket.socketpair()\n' + WRONG,
    'a name server': 'import socket\nsocket.gethostbyname("example.org")\n' + WRONG,
    'a file': 'open("MARK", "w").write("x")\n' + WRONG,
    'an appended file': 'open("MARK", "a").write("x")\n' + WRONG,
    'a low-level file': 'import os\nos.open("MARK", os.O_RDWR | os.O_CREAT)\n' + WRONG,
    'a file without a name': 'import os\nos.open("/tmp", 0o20200000 | os.O_WRONLY)\n' + WRONG,
    'a removed file': 'import os\nos.remove("MARK")\n' + WRONG,
    'a renamed file': 'import os\nos.rename("MARK", "MARK.2")\n' + WRONG,
    'a link': 'import os\nos.symlink("MARK", "MARK.3")\n' + WRONG,
    'a folder': 'import os\nos.mkdir("MARK.4")\n' + WRONG,
    'other rights': 'import os\nos.chmod("MARK", 0)\n' + WRONG,
    'limits taken back': '''import resource
resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))
while True: pass''',
    'the parent\'s memory': 'import os\nopen(f"/proc/{os.getppid()}/mem", "r+b")\n' + WRONG,
    'a signal handler': 'import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass',
    'an alarm': 'import signal\nsignal.alarm(1)\n' + WRONG,
    'deep data': 'def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y',
    'endless data': 'def f(x):\n    y = []\n    y.append(y)\n    return y',
    'large data': 'def f(x): return "x"*(1 << 25)',
    'an endless generator': 'def f(x):\n    while True: yield 1',
    'no function': 'x = 1',
    'no Python': 'def f(x) return x',
    'null bytes': 'def f(x): return "\\0"\n\0',
    'half a character': 'x = "\\ud800"\ndef f(x): return "\\ud800"',
    'an error that cannot be shown': '''class E(Exception):
    def __str__(self): raise self
def f(x): raise E''',
    'nothing': '',
}

# beginnings of names: these wait for limits
WAITING = 'os.write', 'huge output', 'a huge power', 'a signal handler', 'an endless loop'
CASES = [pytest.param(name, marks=pytest.mark.slow) if name.startswith(WAITING) else name for name in HOSTILE]

@pytest.mark.timeout(240)
@pytest.mark.parametrize('name', CASES)
def test_a_hostile_program_is_wrong_and_does_no_harm(name, tmp_path):
    mark = tmp_path/'MARK'
    mark.write_text('whole')
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    verdict = run_tests(HOSTILE[name].replace('MARK', str(mark)), TESTS, ['f'])
    assert not verdict.right and verdict.reason
    assert [p.name for p in tmp_path.iterdir()] == ['MARK'] and mark.read_text() == 'whole'
    assert os.access(mark, os.W_OK)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    psutil.wait_procs(left, 10)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

def test_there_are_at_least_forty_hostile_programs(): assert len(HOSTILE) >= 40

RIGHT = {
    'plain': ('def f(x): return x + 3', ['assert f(2) == 5'], ''),
    'containers': ('def f(x): return {1: [x, (2.5, None)], "k": {x}}',
                   ['assert f(3) == {1: [3, (2.5, None)], "k": {3}}'], ''),
    'a module of the program': ('import math\ndef f(x): return x/3', ['assert math.isclose(f(1), 1/3)'], ''),
    'a class of the program': ('class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n'
                               'def f(pairs): return sum(p.a*p.b for p in pairs)',
                               ['assert f([Pair(1, 2), Pair(3, 4)]) == 14'], ''),
    'a tree that the set-up makes': ('class Node:\n    def __init__(self, x): self.x, self.left = x, None\n'
                                     'def f(n): return n.x if n.left is None else f(n.left)',
                                     ['assert f(root) == 2', 'assert root.left.x == 2'],
                                     'root = Node(1)\nroot.left = Node(2)'),
    'a generator': ('def f(n):\n    for i in range(n): yield i', ['assert list(f(3)) == [0, 1, 2]'], ''),
    'a type': ('def f(xs, kind): return [x for x in xs if not isinstance(x, kind)]',
               ['assert f((1, "a"), str) == [1]'], ''),
    'a name of Python\'s own': ('def sum(a, b): return a + b', ['assert sum(1, 2) == 3'], ''),
    'an error that is expected': ('def f(x): return 1/x',
                                 ['try:\n    f(0)\nexcept Exception: ok = True\nassert ok'], ''),
}

@pytest.mark.parametrize('name', RIGHT)
def test_a_right_program_is_right(name):
    program, tests, setup = RIGHT[name]
    verdict = run_tests(program, tests, defined_names(program), setup)
    assert verdict.right, verdict.reason

def test_a_wrong_test_is_named():
    assert run_tests('def f(x): return x', ['assert f(1) == 1', 'assert f(2) == 1'], ['f']).reason == 'test 2 fails'

def test_a_program_that_hangs_ends_in_time():
    begin = time.monotonic()
    assert run_tests('while True: pass', ['assert True'], [], seconds=1.).reason == 'no verdict after 1 s'
    assert time.monotonic() - begin < 20

@pytest.mark.parametrize('text, code', [
    ('Sure:\n```python\ndef f(): pass\n```\nDone.', 'def f(): pass'), ('def f(): pass', 'def f(): pass'),
    ('```\na = 1\n```\ntext\n```py\nb = 2', 'a = 1\nb = 2')])
def test_the_code_of_a_reply(text, code): assert code_of(text) == code
