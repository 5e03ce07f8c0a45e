"""The two processes that judge a program: one runs the tests, the other runs the program and can do nothing else.

This file is started as a script by `data.programs` and imports nothing of the package. The *judge* evaluates the tests.
Whenever a test calls a function of the program, the judge sends the arguments to the *candidate*, a process that can
compute and answer, but cannot open any file or folder, start a process, send a signal or reach the network (Linux
seccomp). What a program imports is imported before it starts. Answers travel as plain data, so no object of the
program, with its own idea of equality, is ever compared.
"""

import ast
import builtins
import ctypes
import json
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction

CPU_SECONDS = 15  # of the program; the slowest reference of MBPP takes 4
MEMORY = 1 << 30  # bytes of address space
MESSAGE = 8 << 20  # bytes of a message at most
DEPTH = 60  # of nested data
WAIT = 60.0  # seconds for an answer, on a busy machine
MODULES = frozenset(
    'array bisect cmath collections copy datetime decimal fractions functools heapq itertools math operator '
    'random re statistics string sys typing'.split()
)

# Modules that a program can import, if its text names them. To import one does nothing else.
LIBRARY = {
    name: name
    for name in (
        '__future__ _pylong abc argparse array ast asyncio atexit base64 binascii bisect builtins bz2 calendar cmath '
        'codecs collections colorsys configparser contextlib contextvars copy copyreg cProfile csv ctypes '
        'dataclasses datetime decimal difflib dis doctest enum errno fcntl fnmatch fractions functools gc getpass '
        'glob graphlib gzip hashlib heapq hmac html importlib inspect io ipaddress itertools json keyword linecache '
        'locale logging lzma marshal math mmap multiprocessing numbers operator optparse os pathlib pickle platform '
        'pprint queue random re reprlib resource sched secrets select shlex shutil signal socket stat statistics '
        'string struct subprocess sys tempfile textwrap threading time timeit token tokenize tomllib traceback '
        'tracemalloc types typing unicodedata unittest uuid warnings weakref zlib zoneinfo'
    ).split()
} | dict(  # modules behind other words
    urllib='urllib.parse',
    concurrent='concurrent.futures.thread',
    xml='xml.etree.ElementTree',
    strptime='_strptime',
    N='unicodedata',  # "\N{BULLET}"
    rot13='encodings.rot_13',
    rot_13='encodings.rot_13',
)
# Python 3.12 reads large numbers with _pylong, and names such as größe with unicodedata.
ALWAYS = (*MODULES, '_pylong', 'unicodedata')

TYPES = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, dict)}

# ---- data that travels


def encode(value, handles: list, depth: int = 0):
    "A value as JSON. An object that is not plain data becomes the number of its handle."
    if depth > DEPTH:
        raise ValueError('the data is nested too deeply')

    def each(values):
        return [encode(x, handles, depth + 1) for x in values]

    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {'int': hex(value)}
    if isinstance(value, float):
        return {'float': value.hex()}
    if isinstance(value, complex):
        return {'complex': [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {'bytes': value.hex()}
    if isinstance(value, (Decimal, Fraction)):
        return {type(value).__name__: str(value)}
    if isinstance(value, type) and value in TYPES.values():
        return {'type': value.__name__}
    if isinstance(value, range):
        return {'range': [value.start, value.stop, value.step]}
    for kind in (list, tuple, set, frozenset, deque):
        if isinstance(value, kind):
            return {kind.__name__: each(value)}
    for kind in (Counter, OrderedDict, dict):
        if isinstance(value, kind):
            return {kind.__name__: [each(pair) for pair in value.items()]}
    if isinstance(value, Remote):
        return {'handle': value.number}
    handles.append(value)
    return {'handle': len(handles) - 1}


def decode(data, handle, depth: int = 0):
    "A value from JSON. `handle` turns the number of a handle into an object. ValueError for other JSON."
    if depth > DEPTH:
        raise ValueError('the data is nested too deeply')

    def each(values):
        return [decode(x, handle, depth + 1) for x in values]

    if data is None or isinstance(data, (bool, str)):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError('not a value')
    ((kind, content),) = data.items()
    if kind == 'int':
        return int(content, 16)
    if kind == 'float':
        return float.fromhex(content)
    if kind == 'complex':
        return complex(*map(float.fromhex, content))
    if kind == 'bytes':
        return bytes.fromhex(content)
    if kind == 'handle':
        return handle(int(content))
    if kind == 'type':
        return TYPES[content]
    if kind == 'range':
        return range(*map(int, content))
    simple = dict(Decimal=Decimal, Fraction=Fraction)
    if kind in simple:
        return simple[kind](str(content))
    sequences = dict(list=list, tuple=tuple, set=set, frozenset=frozenset, deque=deque)
    if kind in sequences:
        return sequences[kind](each(content))
    mappings = dict(dict=dict, Counter=Counter, OrderedDict=OrderedDict)
    if kind in mappings:
        return mappings[kind](dict(each(pair) for pair in content))
    raise ValueError('not a value')


def send(descriptor: int, message) -> None:
    "Write a message: its length, then JSON."
    data = json.dumps(message).encode()
    if len(data) > MESSAGE:
        raise ValueError('the data is too large')
    data = struct.pack('>I', len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int, seconds: float | None = None):
    "Read a message. EOFError at the end, TimeoutError after `seconds`, ValueError for bad data."

    def take(n):
        parts = []
        while n:
            if seconds is not None and not select.select([descriptor], [], [], seconds)[0]:
                raise TimeoutError('no answer')
            part = os.read(descriptor, min(n, 1 << 16))
            if not part:
                raise EOFError('the program ended')
            parts.append(part)
            n -= len(part)
        return b''.join(parts)

    (length,) = struct.unpack('>I', take(4))
    if length > MESSAGE:
        raise ValueError('the data is too large')
    return json.loads(take(length))


# ---- the candidate: what it may ask of the kernel

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
MACHINES = dict(x86_64=0xC000003E, aarch64=0xC00000B7)  # as a filter sees them
# All system calls of a program: name, number on each of the machines. They read and write what is open already, and
# manage memory, time, handlers of own signals, and the end. Nothing here takes a path, or the id of a process.
# Leave out fcntl: it sends signals to any process (F_SETOWN, F_SETSIG), and locks files.
ALLOWED = """
read 0 63
write 1 64
close 3 57
fstat 5 80
lseek 8 62
poll 7 -
ppoll 271 73
select 23 -
pselect6 270 72
mmap 9 222
mprotect 10 226
munmap 11 215
mremap 25 216
brk 12 214
futex 202 98
sched_yield 24 124
nanosleep 35 101
clock_nanosleep 230 115
clock_gettime 228 113
clock_getres 229 114
gettimeofday 96 169
time 201 -
getrandom 318 278
getpid 39 172
gettid 186 178
getppid 110 173
rt_sigaction 13 134
rt_sigprocmask 14 135
rt_sigreturn 15 139
exit 60 93
exit_group 231 94
"""


def allowed_numbers(machine: str) -> list:
    "The numbers of the allowed system calls."
    column = 1 + list(MACHINES).index(machine)
    numbers = [row.split()[column] for row in ALLOWED.split('\n') if row]
    return [int(number) for number in numbers if number != '-']


class Instruction(ctypes.Structure):
    "One instruction of a filter: code, jumps if true and if false, value."

    _fields_ = [
        ('code', ctypes.c_uint16),
        ('jump_true', ctypes.c_uint8),
        ('jump_false', ctypes.c_uint8),
        ('value', ctypes.c_uint32),
    ]


class Program(ctypes.Structure):
    "A filter as the kernel takes it."

    _fields_ = [('length', ctypes.c_uint16), ('instructions', ctypes.POINTER(Instruction))]


LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: EPERM


def filter_of(machine: str) -> list:
    "The filter's instructions. They allow the listed system calls and refuse all others."
    code = [
        Instruction(LOAD, 0, 0, 4),  # the architecture
        Instruction(EQUAL, 1, 0, MACHINES[machine]),
        Instruction(RETURN, 0, 0, KILL),
        Instruction(LOAD, 0, 0, 0),  # the number of the call
    ]
    for number in allowed_numbers(machine):
        code.append(Instruction(EQUAL, 0, 1, number))
        code.append(Instruction(RETURN, 0, 0, ALLOW))
    code.append(Instruction(RETURN, 0, 0, REFUSE))
    return code


def control(*call) -> None:
    "Ask the kernel to treat this process in another way (prctl). OSError if it cannot do that."
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*call, *(0,) * (5 - len(call))) != 0:
        raise OSError(ctypes.get_errno(), 'this kernel cannot confine a program (seccomp)')


def end_with(parent: int) -> None:
    "From now on, this process ends with its parent."
    control(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the first line
        os._exit(1)


def confine() -> None:
    "Give up all rights that a computation does not need. OSError if the kernel cannot do that."
    for what, limit in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
    ):
        resource.setrlimit(what, (limit, limit))
    code = filter_of(os.uname().machine)
    array = (Instruction * len(code))(*code)
    program = Program(len(code), array)
    control(PR_SET_DUMPABLE, 0)
    control(PR_SET_NO_NEW_PRIVS, 1)
    control(PR_SET_SECCOMP, 2, ctypes.byref(program))


def import_words(source: str) -> None:
    "Import each module of Python that a program's text names, as the program itself can read no file."
    words = {*ALWAYS, *re.findall(r'\w+', source)}
    for word in sorted(words & LIBRARY.keys()):
        try:
            __import__(LIBRARY[word])
        except ImportError:  # this Python was built without it
            pass


def answer(request, names: dict, handles: list):
    "The reply to one request: a call, an attribute to read or set, or the elements of an object."
    kind, target, *rest = request
    thing = names[target] if isinstance(target, str) else handles[target]
    if kind == 'call':
        arguments, named = (decode(part, handles.__getitem__) for part in rest)
        return thing(*arguments, **named)
    if kind == 'attribute':
        return getattr(thing, rest[0])
    if kind == 'set':
        return setattr(thing, rest[0], decode(rest[1], handles.__getitem__))
    elements = []
    for element in thing:
        elements.append(element)
        if len(elements) > 100_000:
            raise ValueError('too many elements')
    return elements


def candidate(judge: int, requests: int, answers: int) -> None:
    "Read and run the program, then answer requests until they end."
    end_with(judge)
    source = receive(requests)
    import_words(source)
    try:
        confine()
    except OSError as e:
        send(answers, ['unconfined', str(e)])
        return
    send(answers, ['confined', ''])
    names = {'__name__': 'program'}
    handles = []
    sys.setrecursionlimit(5000)
    try:
        exec(compile(source, 'program', 'exec'), names)
        defined = [name for name in names if isinstance(name, str) and not name.startswith('__')]
        send(answers, ['ready', defined[:10_000]])
    except BaseException as e:
        send(answers, ['error', type(e).__name__[:80]])
        return
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        try:
            value = encode(answer(request, names, handles), handles)
            send(answers, ['value', value])
        except BaseException as e:
            send(answers, ['error', type(e).__name__[:80]])


# ---- the judge


class ProgramError(Exception):
    "The program raised an error, or gave no answer."


def error_named(name) -> ProgramError:
    "The error for an error of the program. A name that Python does not know is not told: the program chose it."
    known = isinstance(name, str) and isinstance(getattr(builtins, name, None), type)
    return ProgramError(f'it raised {name if known else "an error of its own"}')


class Remote:
    "Stands in for an object of the program. Calls, attributes and elements are asked of the candidate."

    def __init__(self, ask, target, number=None):
        own = self.__dict__
        own['ask'] = ask
        own['target'] = target
        own['number'] = number  # of a handle; None: a name

    def __call__(self, *arguments, **named):
        sent = [encode(list(arguments), []), encode(named, [])]
        return self.ask(['call', self.target, *sent])

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return self.ask(['attribute', self.target, name])

    def __setattr__(self, name, value):
        self.ask(['set', self.target, name, encode(value, [])])

    def __iter__(self):
        return iter(self.ask(['elements', self.target]))

    __hash__ = object.__hash__


def asker(requests: int, answers: int):
    "A function that sends a request to the candidate and returns its answer, or raises ProgramError."

    def ask(request):
        try:
            send(requests, request)
            reply = receive(answers, WAIT)
            kind, content = reply
            if kind == 'value':
                return decode(content, lambda n: Remote(ask, n, n))
        except (OSError, EOFError, TimeoutError, ValueError, TypeError, RecursionError) as e:
            raise ProgramError(f'no answer: {type(e).__name__}') from None
        raise error_named(content)

    return ask


def world(job: dict, defined, ask) -> dict:
    """The names that a test sees: Python's built-ins, modules, the functions under test, the test's set-up.

    Of the program's names only the functions under test are seen. Otherwise a program could replace `sorted` or a
    module, and so judge itself.
    """
    values = {'__name__': 'tests', '__builtins__': builtins}
    for name in defined:
        if name in job['functions']:
            values[name] = Remote(ask, name)
        elif name in MODULES:
            values[name] = __import__(name)
    exec(compile(job['setup'], 'set-up', 'exec'), values)
    return values


def start_candidate() -> tuple:
    "Start the process of the program. Returns it, and the descriptors for requests and answers."
    to_program, requests = os.pipe()
    answers, from_program = os.pipe()
    numbers = [str(n) for n in (os.getpid(), to_program, from_program)]
    child = subprocess.Popen(
        [sys.executable, '-I', '-S', __file__, 'candidate', *numbers],
        pass_fds=(to_program, from_program),
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_program)
    os.close(from_program)
    return child, requests, answers


def judge(caller: int) -> None:
    "Read a job from standard input. Write the verdict to standard output: tests passed, and the failure."
    end_with(caller)
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (2 * CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY,) * 2)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    child, requests, answers = start_candidate()
    control(PR_SET_DUMPABLE, 0)  # no process of this user can read the tests in memory
    passed = 0
    reason = ''
    unconfined = ''
    try:
        send(requests, job['program'])
        kind, content = receive(answers, WAIT)  # said before the program begins
        if kind == 'unconfined':
            unconfined = content
        kind, content = receive(answers, WAIT)
        if kind != 'ready':
            raise error_named(content)
        for test in job['tests']:
            ast.parse(test)
            values = world(job, content, asker(requests, answers))
            exec(compile(test, 'test', 'exec'), values)
            passed += 1
    except AssertionError:
        reason = f'test {passed + 1} fails'
    except BaseException as e:
        detail = str(e) if isinstance(e, ProgramError) else type(e).__name__
        reason = f'test {passed + 1}: {detail}'[:200]
    finally:
        child.kill()
        child.wait()
    json.dump(dict(passed=passed, reason=reason, unconfined=unconfined), sys.stdout)


if __name__ == '__main__':
    role, *numbers = sys.argv[1:]
    run = judge if role == 'judge' else candidate
    run(*map(int, numbers))
