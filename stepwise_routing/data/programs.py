"""Grades the program in a model's reply by its tests.

Here belongs the caller's side: finding the code in a reply, the job, the time limit, the verdict. The
two processes that run the tests and the program are in `data.sandbox`.
"""

import ast
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# for all tests of a program, on a busy machine; processor time has a limit of its own
SECONDS = 120.0
LARGEST = 1 << 20  # characters of a program
RISK = (
    'it runs programs that a language model wrote, on this machine, in a process without network, files or other '
    'processes; set data.run_code to true if you accept that'
)


@dataclass(frozen=True)
class Verdict:
    "Did a program pass its tests? If not, why?"

    right: bool
    reason: str  # "" if it is right


def why_not() -> str:  # "" if programs can be run here
    "The reason why this machine cannot run programs safely."
    if platform.system() != 'Linux':
        return f'programs can be run on Linux only, and this is {platform.system()}'
    if platform.machine() not in ('x86_64', 'aarch64'):
        return f'programs can be run on x86_64 and aarch64 only, and this is {platform.machine()}'
    return ''


def code_of(text: str) -> str:
    "The Python code in a reply: all its fenced blocks in order, or the whole reply if it has none."
    begin = r'```(?:[Pp]ython(?:3(?:\.\d+)?)?|py)?[ \t]*\r?\n'
    end = r'(?:\r?\n[ \t]*```|\Z)'
    blocks = re.findall(f'{begin}(.*?){end}', text, re.S)
    return '\n'.join(blocks) if blocks else text


def defined_names(reference: str) -> list:
    "Names of the functions and classes that a reference program defines. These are under test."
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(reference).body if isinstance(node, kinds)]


def run_tests(
    program: str,  # source code
    tests,  # statements, such as "assert f(2) == 4"
    functions,  # names in the program that the tests may use, see `defined_names`
    setup: str = '',  # code that runs before the tests
    seconds: float = SECONDS,  # for all tests together
) -> Verdict:
    "Run tests on a program in a confined process. RuntimeError if this machine cannot confine it."
    problem = why_not()
    if problem:
        raise RuntimeError(problem)
    if len(program) > LARGEST:
        return Verdict(False, 'the program is too long')
    job = dict(program=program, tests=list(tests), functions=list(functions), setup=setup)
    if not job['tests']:
        return Verdict(False, 'there are no tests')
    data = json.dumps(job).encode()
    script = Path(__file__).with_name('sandbox.py')
    with tempfile.TemporaryDirectory() as folder:
        judge = subprocess.Popen(
            [sys.executable, '-I', '-S', str(script), 'judge', str(os.getpid())],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            out, _ = judge.communicate(data, timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict(False, f'no verdict after {seconds:g} s')
        finally:
            _end(judge)
    try:
        said = json.loads(out)
    except ValueError:
        return Verdict(False, 'the judge ended early')
    if said['unconfined']:
        raise RuntimeError(said['unconfined'])
    right = said['passed'] == len(job['tests']) and not said['reason']
    return Verdict(right, said['reason'])


def _end(judge) -> None:
    "Kill the judge and its program, whatever they are doing."
    try:
        os.killpg(judge.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    judge.wait()
    for stream in (judge.stdin, judge.stdout):
        stream.close()
