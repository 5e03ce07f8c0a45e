"""xVerify: a model that judges whether an answer means the same as the reference. Its verdicts are kept.

Here belong the judge's prompt, its replies, and where it runs. Grading by rules belongs in `data.grading`.
"""

import ast
import contextlib
import re
import warnings
from pathlib import Path
from textwrap import shorten

from fastcore.net import urlread
from fastcore.xdg import xdg_cache_home

from ..data.answers import MAX_ANSWER
from ..data.grading import given_up, is_right
from ..util import digest, nearest, run_async, write_file
from .address import is_loopback, plain_address
from .chat import ApiOptions, OpenAIBackend
from .hub import hub_folder, model_folder, weights_sha256
from .model_name import ModelName
from .vllm import serve_vllm

_PROMPT_URL = 'https://raw.githubusercontent.com/IAAR-Shanghai/xVerify/main/src/xVerify/prompts/judge_prompt.py'

_PROMPT_DIGEST = '76a874ddae55d26b4798bb78b0c23744'  # of its words


def _words(text):
    return digest(' '.join(text.split()), size=16)


def _find_template(source):
    "Find xVerify's prompt: a string literal of a Python file, or the text itself. None if it is not there."
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        nodes = []
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return next((t for t in (*texts, source) if _words(t) == _PROMPT_DIGEST), None)


def _xverify_template():
    "The prompt that xVerify was trained with, downloaded once. RuntimeError in one line if that fails."
    file = xdg_cache_home() / 'stepwise-routing' / 'xverify_judge_prompt.py'
    cached = file.is_file()
    hint = 'or give a template'
    try:
        text = file.read_text('utf-8', 'replace') if cached else urlread(_PROMPT_URL, timeout=20)
    except (OSError, ValueError) as e:
        raise RuntimeError(
            f"xVerify's prompt does not come from GitHub ({shorten(str(e), 100)}): "
            f'save {_PROMPT_URL} as {file}, {hint}'
        ) from None
    template = _find_template(text)
    where = file if cached else _PROMPT_URL
    if not template:
        raise RuntimeError(
            f"{where} does not hold the prompt of xVerify's weights: remove it, {hint}"
        )
    if not cached:
        write_file(file, text)
    return template


_FIELDS = (
    '{question}',
    '{output}',
    '{answer}',
)  # of a prompt; the second is the answer to grade, the third the reference


def _template(source):
    "The prompt: a text with the fields, or a file with such a text. None: xVerify's own prompt."
    if source is None:
        return _xverify_template()
    text = str(source)
    if '{' not in text:  # no fields, so it is a path
        try:
            text = Path(text).read_text('utf-8', 'replace')
        except OSError:
            raise FileNotFoundError(
                f'template {text[:80]!r} is neither a file nor a text with {_FIELDS[0]}'
            ) from None
        text = _find_template(text) or text
    missing = [f for f in _FIELDS if f not in text]
    if missing:
        raise ValueError(f'template has no {missing[0]}; it needs {", ".join(_FIELDS)}')
    return text


def _fill(template, problem, answer):
    "The prompt for one answer, as text that can be sent."
    values = dict(question=problem.question, output=answer, answer=problem.answer)
    text = re.sub(r'\{(question|output|answer)\}', lambda m: values[m[1]], template)
    return text.encode('utf-8', 'replace').decode()


def read_verdict(reply: str) -> bool | None:
    "Read a judge's reply, Correct or Incorrect; brackets and case do not matter. None if it is neither."
    if re.search(r'(?<![a-z])incorrect(?![a-z])', reply, re.I):
        return False
    return True if re.match(r'[\W_]*(?:judge?ment[\W_]*)?correct(?![a-z])', reply, re.I) else None


def _check_remote(base_url=ApiOptions.base_url, price=None, max_cents=None, **_):
    "ValueError if a judge on another machine is asked without https, or without a price and a cap."
    if is_loopback(base_url):
        return
    if not base_url.startswith('https://'):
        raise ValueError(f'{plain_address(base_url)} is on another machine: ask it over https')
    if price == 'free' or max_cents is None:
        raise ValueError(
            f'{plain_address(base_url)} is on another machine: pass price=, a row of PRICES, and max_cents='
        )


class XVerify:
    "Grades by a judge behind a chat API; any thread may call it. RuntimeError in one line if it does not reply."

    def __init__(self, model: str, template=None, ledger=None, workers: int = 16, **options):
        """`template`: see `open_grader`. `ledger`: file that keeps the verdicts. `options`: of `OpenAIBackend`.

        A judge on another machine is asked over https only. It needs a price and `max_cents`.
        """
        limits = dict(
            key_env='XVERIFY_API_KEY', price='free', temperature=0.0, max_tokens=8, top_logprobs=0
        )
        _check_remote(**limits | options)
        self.template = _template(template)
        self.workers = workers
        self.unread = {}  # replies that are no verdict, by (problem id, answer)
        self.judge = OpenAIBackend(
            model, ledger=ledger, concurrency=workers, **limits | dict(timeout=120.0) | options
        )

    def __call__(self, problem, answer):
        "Is the answer right?"
        if answer is None or not answer.strip():
            return False
        if len(answer) > MAX_ANSWER:
            return answer.strip() == problem.answer.strip()
        messages = [dict(role='user', content=_fill(self.template, problem, answer))]
        reply = run_async(self.judge.ask(messages, self.judge.options.max_tokens, 0))['text']
        verdict = read_verdict(reply)
        if verdict is None:
            self.unread[problem.id, answer] = reply
        return verdict is True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        run_async(self.judge.close())


@contextlib.contextmanager
def _judge_options(judge, memory):
    "The options of `XVerify` for a judge: its address, or a vLLM server that is started for it."
    if judge.startswith(('http://', 'https://')):
        model = ModelName.parse(f'vllm-server:{judge}')
        plain_address(model.url)
        if not model.name:
            raise ValueError(f'grader {judge!r} names no model: write xverify:{model.url}#MODEL')
        yield dict(model=model.name, base_url=model.url)
        return
    source = ModelName.parse(judge)
    folder = model_folder(source.name) or hub_folder(source.name, source.revision or None)
    model = Path(source.name).name
    with serve_vllm(str(folder), name=model, memory=memory, context=4096, logits=False) as url:
        yield dict(
            model=model, base_url=url, identity=dict(weights=weights_sha256(folder)), key_env=''
        )


_GRADERS = (
    'math-verify',
    'xverify:NAME',
    'xverify:NAME@REVISION',
    'xverify:http://127.0.0.1:PORT/v1#MODEL',
)


@contextlib.contextmanager
def open_grader(
    name: str = 'math-verify',  # "math-verify" or another of `_GRADERS`
    memory: float = 0.15,  # share of the GPU's memory for a server that is started here
    template=None,  # prompt with {question}, {output}, {answer}, or a file with it; None = xVerify's own
    **options,  # of `XVerify`: ledger, workers, timeout, ...
):  # grade(problem, answer) -> bool
    "Open a grader by name, for a `with` block. ValueError for an unknown name. Warns of replies without a verdict."
    kind, _, judge = str(name).partition(':')
    if name == 'math-verify':
        yield is_right
        return
    if kind != 'xverify' or not judge:
        raise ValueError(
            f'unknown grader {name!r}{nearest(name, _GRADERS)}; choose one of: {", ".join(_GRADERS)}'
        )
    template = _template(template)  # before anything is started
    with (
        _judge_options(judge, memory) as judge_options,
        XVerify(template=template, **judge_options | options) as grade,
    ):
        yield grade
    if not grade.unread:
        return
    given_up().update(grade.unread)
    count = len(grade.unread)
    reply = next(iter(grade.unread.values()))
    warnings.warn(
        f'{name}: no verdict in {count} replies, e.g. {reply[:40]!r}: graded as wrong', stacklevel=3
    )
