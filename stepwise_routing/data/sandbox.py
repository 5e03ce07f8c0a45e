"""The two processes that judge a program: one runs the tests, the other runs the program and can do nothing else.

This file is started as a script by `data.programs` and imports nothing of the package. The *judge* evaluates the tests.
Whenever a test calls a function of the program, the judge sends the arguments to the *candidate*, a process that can
compute and answer, but cannot open a file for writing, start a process, send a signal or reach the network (Linux
seccomp). Answers travel as plain data, so no object of the program, with its own idea of equality, is ever compared.
"""

import ast
import builtins
import ctypes
import json
import os
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

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
AUDIT_ARCH = dict(x86_64=0xC000003E, aarch64=0xC00000B7)
# read, write, memory, time, its own signals' handlers, reading of files and folders, the end
ALLOWED = dict(
    x86_64=(
        '0 1 3 4 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 23 24 25 28 35 39 60 63 72 79 89 96 97 102 104 107 '
        '108 110 131 158 186 201 202 217 218 228 229 230 231 262 267 270 271 273 318 324 332 334 439'
    ),
    aarch64=(
        '17 25 48 57 61 62 63 64 65 66 67 72 73 78 79 80 93 94 96 98 99 101 113 114 115 124 132 134 135 139 160 '
        '163 169 172 173 174 175 176 177 178 214 215 216 222 226 233 278 283 291 293 439'
    ),
)
OPEN = dict(x86_64={2: 1, 257: 2}, aarch64={56: 2})  # number of an open call -> index of its flags
WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (0x400000)
)  # and O_TMPFILE


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


LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: EPERM


def filter_of(machine: str) -> list:
    "The filter's instructions. They allow the listed system calls, and opening files for reading."
    load_call = Instruction(LOAD, 0, 0, 0)
    code = [
        Instruction(LOAD, 0, 0, 4),  # the architecture
        Instruction(EQUAL, 1, 0, AUDIT_ARCH[machine]),
        Instruction(RETURN, 0, 0, KILL),
        load_call,
    ]
    for number in map(int, ALLOWED[machine].split()):
        code.append(Instruction(EQUAL, 0, 1, number))
        code.append(Instruction(RETURN, 0, 0, ALLOW))
    for number, position in OPEN[machine].items():
        code.append(Instruction(EQUAL, 0, 4, number))
        code.append(Instruction(LOAD, 0, 0, 16 + 8 * position))  # its flags
        code.append(Instruction(ANY_BIT, 0, 1, WRITING))
        code.append(Instruction(RETURN, 0, 0, REFUSE))
        code.append(Instruction(RETURN, 0, 0, ALLOW))
    code.append(Instruction(RETURN, 0, 0, REFUSE))
    return code


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
    libc = ctypes.CDLL(None, use_errno=True)
    code = filter_of(os.uname().machine)
    array = (Instruction * len(code))(*code)
    program = Program(len(code), array)
    for call in (
        (PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), 'this kernel cannot confine a program (seccomp)')


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


def candidate(requests: int, answers: int) -> None:
    "Read and run the program, then answer requests until they end."
    source = receive(requests)
    for name in sorted(MODULES):
        __import__(name)
    parent = os.getppid()
    confine()
    if os.getppid() != parent:
        return
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
        raise ProgramError(f'it raised {content!s:.80}')

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


def judge() -> None:
    "Read a job from standard input. Write the verdict to standard output: tests passed, and the failure."
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (2 * CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY,) * 2)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    to_program, requests = os.pipe()
    answers, from_program = os.pipe()
    child = subprocess.Popen(
        [sys.executable, '-I', '-S', __file__, 'candidate', str(to_program), str(from_program)],
        pass_fds=(to_program, from_program),
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_program)
    os.close(from_program)
    passed = 0
    reason = ''
    try:
        send(requests, job['program'])
        kind, content = receive(answers, WAIT)
        if kind != 'ready':
            raise ProgramError(f'it raised {content!s:.80}')
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
    json.dump(dict(passed=passed, reason=reason), sys.stdout)


if __name__ == '__main__':
    if sys.argv[1] == 'judge':
        judge()
    else:
        candidate(int(sys.argv[2]), int(sys.argv[3]))
