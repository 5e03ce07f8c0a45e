"""The grader of programs: right programs pass; nothing that a hostile program does is called right, or does harm."""
import json
import os
import platform
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from stepwise_routing.base.records import Problem
from stepwise_routing.data.benchmarks import REGISTERED, Benchmark, load_problems, register
from stepwise_routing.data.grading import is_right
from stepwise_routing.data.programs import code_of, defined_names, run_tests, why_not
from stepwise_routing.data.sandbox import ALLOWED, LIBRARY, MODULES, allowed_numbers

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

# ---- what a program can reach

READS = { # each is true if the program can do it
    'a file': 'open("SECRET").read()',
    'a file, as a number': 'os.open("SECRET", os.O_RDONLY)',
    'the size of a file': 'os.stat("SECRET").st_size',
    'whether a file exists': 'os.path.exists("SECRET")',
    'whether a file may be read': 'os.access("SECRET", os.R_OK)',
    'a folder': 'os.listdir("/")',
    'a link': 'os.readlink("/proc/self/exe")',
    'its own folder': 'os.getcwd()',
    'its own memory map': 'open("/proc/self/maps").read()',
    'the judge\'s descriptors': 'os.listdir(f"/proc/{os.getppid()}/fd")',
    'the judge\'s memory': 'open(f"/proc/{os.getppid()}/mem", "rb")',
    'the environment of another process': 'open("/proc/CALLER/environ").read()',
    'the name of the machine': 'os.uname().nodename',
    'a module that is a file': '__import__("json.tool")',
    'a module of the test run': '__import__("psutil")',
    'its own environment': 'set(os.environ) - {"LC_CTYPE"}', # Python sets this one
    'more descriptors than its own five': 'sum(is_open(n) for n in range(1000)) > 5',
}
OPEN = '''import os
def is_open(n):
    try: return bool(os.fstat(n))
    except OSError: return False
'''

@pytest.mark.parametrize('name', READS)
@pytest.mark.parametrize('place', ['def f(x): return bool({})', 'y = bool({})\ndef f(x): return y'])
def test_a_program_reads_nothing_from_outside(name, place, tmp_path):
    (tmp_path/'secret').write_text('secret')
    read = READS[name].replace('SECRET', str(tmp_path/'secret')).replace('CALLER', str(os.getpid()))
    assert not run_tests(OPEN + place.format(read), ['assert f(7)'], ['f']).right

def test_the_values_that_a_test_expects_cannot_be_read():
    program = '''import os, re
def f(x):
    judge = os.getppid()
    memory = open(f"/proc/{judge}/mem", "rb", 0)
    for line in open(f"/proc/{judge}/maps").read().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if "rw" not in line or last - first > 1 << 26: continue
        try:
            memory.seek(first)
            data = memory.read(last - first)
        except Exception: continue
        found = re.search(rb"assert f\\(%d\\) == (-?\\d+)" % x, data)
        if found: return int(found[1])'''
    verdict = run_tests(program, ['assert f(7) == 4711', 'assert f(8) == -99'], ['f'])
    assert verdict.reason == 'test 1: it raised PermissionError'

SIGNALS = { # each would kill the process TARGET
    'kill': 'os.kill(TARGET, 9)',
    'a signal for a thread': 'libc.tgkill(TARGET, TARGET, 9)',
    'a signal with a value': 'libc.sigqueue(TARGET, 9, None)',
    'a signal of a pipe': 'libc.fcntl(end, 8, TARGET), libc.fcntl(end, 10, 9), libc.fcntl(end, 4, 0o20000)',
    'a signal of a pipe, through ioctl': 'libc.ioctl(end, 0x8901, byref(c_int(TARGET))), libc.ioctl(end, 0x5452, one)',
}

@pytest.mark.parametrize('name', SIGNALS)
def test_no_signal_leaves_a_program(name):
    program = ('import os, sys\nfrom ctypes import CDLL, byref, c_int\nlibc, one = CDLL(None), byref(c_int(1))\n'
               'for end in map(int, sys.argv[-2:]):\n    try: CALL\n    except OSError: pass\n'
               'def f(x): return x + 1')
    with subprocess.Popen(['sleep', '60']) as target:
        verdict = run_tests(program.replace('CALL', SIGNALS[name]).replace('TARGET', str(target.pid)),
                            ['assert f(1) == 2', 'assert f(2) == 3'], ['f'])
        time.sleep(.3)
        ended = target.poll()
        target.kill()
    assert verdict.right and ended is None

def test_all_system_calls_but_the_listed_are_refused():
    """Those with a number of the other kind of program (x32), too. The program says which are not.

    Linux asks no filter about 335 and 336 (uretprobe, uprobe): they belong to its probes and end any other caller.
    """
    refused = set(range(1024)) - set(allowed_numbers(platform.machine())) - {335, 336}
    program = f'''import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def answers(n):
    return libc.syscall(n, -1, -1, -1, -1, -1, -1), ctypes.get_errno()
def f(): return [n for n in {sorted(refused)} if answers(n) != (-1, 1) or answers(n + (1 << 30)) != (-1, 1)]'''
    verdict = run_tests(program, ['assert f() == []'], ['f'])
    assert verdict.right, verdict.reason

def test_no_listed_system_call_takes_a_path_a_process_or_a_new_descriptor():
    harmless = ('read write close fstat lseek poll ppoll select pselect6 mmap mprotect munmap mremap brk futex '
                'sched_yield nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time getrandom '
                'getpid gettid getppid rt_sigaction rt_sigprocmask rt_sigreturn exit exit_group')
    assert [row.split()[0] for row in ALLOWED.split('\n') if row] == harmless.split()

LATE = { # what Python imports late, and what a test's modules need
    'a date': ('datetime.strptime("2020-02-01", "%Y-%m-%d").day', 1),
    'a character\'s name': ('len("\\N{BULLET}")', 1),
    'a cipher': ('codecs.encode("abc", "rot13")', 'nop'),
    'a large number': ('len(str(10**4000))', 4001),
    'an encoding': ('len("abc".encode("utf-16"))', 8),
    'a module inside of a module': ('urllib.parse.quote("a b")', 'a%20b'),
    'a module inside of a function': ('__import__("textwrap").fill("a b", 1)', 'a\nb'),
    'a short sleep': ('time.sleep(.01)', None),
    'random numbers': ('int(random.random())', 0),
    'no module of that name': ('has("psutil")', False),
}

@pytest.mark.parametrize('name', LATE)
def test_the_library_of_python_works_without_files(name):
    code, value = LATE[name]
    program = ('from __future__ import annotations\nimport codecs, random, time, urllib.parse\n'
               'from datetime import datetime\ndef has(name):\n'
               '    try: return bool(__import__(name))\n    except ImportError: return False\n'
               f'def f(): return {code}')
    verdict = run_tests(program, [f'assert f() == {value!r}'], ['f'])
    assert verdict.right, verdict.reason

def test_a_program_may_import_the_library():
    names = sorted({*MODULES, *LIBRARY.values()} - {'_pylong', 'tomllib'}) # these two are younger than Python 3.10
    program = f'# {" ".join(LIBRARY)}\n' + ''.join(f'import {name}\n' for name in names) + 'def f(): return 1'
    assert run_tests(program, ['assert f() == 1'], ['f']).right

# ---- the end of a grading, and what it says

NAMES = {
    'a name of its own': 'raise type("SECRET_42", (Exception,), {})',
    'a name of two lines': 'raise type("a\\nSECRET_42", (Exception,), {})',
    'a long name': 'raise type("SECRET_42"*10**6, (Exception,), {})',
    'a forged answer': 'import sys; sys.modules["__main__"].encode = lambda *a: 1/0; raise NameError("SECRET_42")',
    'no text': 'import sys; sys.modules["__main__"].send(int(sys.argv[-1]), ["error", {"SECRET_42": 1}])',
}

@pytest.mark.parametrize('name', NAMES)
def test_a_reason_is_in_words_of_ours(name):
    reason = run_tests(f'def f(x): {NAMES[name]}', ['assert f(7) == 1'], ['f']).reason
    assert reason in ('test 1: it raised an error of its own', 'test 1: it raised NameError')

def test_no_program_passes_no_tests():
    assert not run_tests('def f(x): return 0', [], ['f']).right

def test_judge_and_program_end_with_a_caller_that_is_killed():
    code = ('from stepwise_routing.data.programs import run_tests\n'
            'run_tests("import time\\ndef f(x): time.sleep(60)", ["assert f(1)"], ["f"])')
    with subprocess.Popen([sys.executable, '-c', code]) as caller:
        process = psutil.Process(caller.pid)
        while len(process.children(recursive=True)) < 2 and caller.poll() is None: time.sleep(.05)
        time.sleep(.5) # the judge begins, too
        both = process.children(recursive=True)
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    assert len(both) == 2
    ended, alive = psutil.wait_procs(both, 10)
    alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] # the first process may not collect them
    for p in alive: p.kill()
    assert not alive

def test_where_a_program_cannot_be_confined_none_is_run():
    "A machine whose kernel refuses the filter: prctl(PR_SET_SECCOMP) fails here with EINVAL."
    code = '''import ctypes, os
from stepwise_routing.data import sandbox
from stepwise_routing.data.programs import run_tests
prctl = dict(x86_64=157, aarch64=167)[os.uname().machine]
rows = [(32, 0, 0, 0), (21, 0, 3, prctl), (32, 0, 0, 16), (21, 0, 1, 22), (6, 0, 0, 0x50016), (6, 0, 0, 0x7fff0000)]
code = (sandbox.Instruction*len(rows))(*(sandbox.Instruction(*row) for row in rows))
sandbox.control(38, 1)
sandbox.control(22, 2, ctypes.byref(sandbox.Program(len(rows), code)))
try: print(run_tests('def f(x): return x', ['assert f(1) == 1'], ['f']))
except RuntimeError as e: print('refused:', e)
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith('refused:') and 'cannot confine a program (seccomp)' in done.stdout, done

# ---- who says what is right

@pytest.mark.parametrize('change, said', [
    (dict(test_list=[]), 'no test in'), (dict(test_list=['', 'assert True']), 'no test in'),
    (dict(test_list='assert f(1) == 1'), 'not a list of texts'), (dict(test_list=None), 'not a list of texts'),
    (dict(test_list=[1]), 'not a list of texts'), (dict(code='def f('), 'not Python'),
    (dict(code='def f(x): return 1\0'), 'not Python')])
def test_a_row_that_tests_no_program_is_refused(change, said, tmp_path):
    row = dict(text='One.', code='def f(x):\n  return 1', task_id=20, test_list=['assert f(1) == 1'])
    (tmp_path/'mbpp.jsonl').write_text(json.dumps(row) + '\n' + json.dumps(row | change) + '\n')
    with pytest.raises(ValueError, match=f'row 2: .*{said}') as e: load_problems('mbpp', 'test', data_dir=tmp_path)
    assert '\n' not in str(e.value)

class Given:
    "A source with these problems in each split."
    licence, is_public = 'mine', False
    def __init__(self, problems): self.given = problems
    def problems(self, split, data_dir=None): return self.given

@pytest.fixture
def mine():
    "Registers a benchmark named mine for one test."
    yield lambda given=(), **fields: register(Benchmark('mine', Given(given), **fields))
    REGISTERED.pop('mine', None)

@pytest.mark.parametrize('verdict', ['False', 5, None, [], np.array([True, False]), 1.])
def test_only_true_and_false_are_verdicts(verdict, mine):
    mine(right=lambda problem, answer: verdict)
    with pytest.raises(ValueError, match="'mine': right.* return True or False") as e:
        is_right(Problem('mine', '1', 'q', '1'), '7')
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('verdict', [True, False, np.True_, np.False_])
def test_a_verdict_of_numpy_is_one(verdict, mine):
    mine(right=lambda problem, answer: verdict)
    assert is_right(Problem('mine', '1', 'q', '1'), '7') is bool(verdict)

@pytest.mark.parametrize('said', ['no', 0, None])
def test_only_true_and_false_end_a_chain(said, mine):
    with pytest.raises(ValueError, match="'mine': is_last.* return True or False"): mine(is_last=lambda text: said)

ONE = Problem('mine', '1', 'q', '1')

@pytest.mark.parametrize('given, said', [
    ([ONE, Problem('mine', '1', 'r', '2')], "two problems with the id '1'"),
    ([dict(question='q')], 'a dict in place of'),
    ([Problem('gsm8k', '1', 'q', '1')], "a problem of 'gsm8k'"), (None, 'a NoneType: return a list'),
    ('text', 'a str: return a list'), (iter([ONE]), 'return a list')])
def test_a_source_gives_problems_of_its_benchmark(given, said, mine):
    mine(given)
    with pytest.raises(ValueError, match=said) as e: load_problems('mine', 'test')
    assert '\n' not in str(e.value)

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
    'a name with letters of other languages': ('def f(x):\n    größe = x\n    return größe',
                                               ['assert f(2) == 2'], ''),
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
    ('```\na = 1\n```\ntext\n```py\nb = 2', 'a = 1\nb = 2'),
    ('Sure:\r\n```py\r\na = 1\r\n\r\nb = 2\r\n```\r\nDone.', 'a = 1\r\n\r\nb = 2'), ('```\r\na = 1', 'a = 1'),
    ('```python3.11\na = 1\n```', 'a = 1'), ('```Python3.8 \r\na = 1\n```', 'a = 1'),
    *((f'```{word}\na = 1\n```',)*2 for word in ('python3.', 'python.11', 'py3.11', 'python3.11.2', 'pythonic', 'c'))])
def test_the_code_of_a_reply(text, code): assert code_of(text) == code

def test_a_right_program_may_come_with_line_ends_of_windows():
    code = code_of('```py\r\ndef f(x):\r\n    return x + 1\r\n```\r\n')
    assert run_tests(code, ['assert f(1) == 2'], ['f']).right
