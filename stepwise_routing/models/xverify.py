"""xVerify: a model that judges whether an answer means the same as the reference. Grading by rules: `data.grading`."""

import ast
import re
from pathlib import Path

from fastcore.net import urlread
from fastcore.xdg import xdg_cache_home

from ..util import digest, write_file

PROMPT_URL = 'https://raw.githubusercontent.com/IAAR-Shanghai/xVerify/main/src/xVerify/prompts/judge_prompt.py'
PROMPT_DIGEST = (
    '76a874ddae55d26b4798bb78b0c23744'  # of the words of the prompt that its weights know
)
VERDICTS = ('Correct', 'Incorrect')


def find_prompt(source: str) -> str:
    "xVerify's prompt among the texts of a Python file. ValueError if it is not there."
    for node in ast.walk(ast.parse(source)):
        text = getattr(node, 'value', None)
        if isinstance(text, str) and digest(' '.join(text.split()), size=16) == PROMPT_DIGEST:
            return text
    raise ValueError(f"{PROMPT_URL} no longer holds the prompt of xVerify's weights: give a prompt")


def xverify_prompt(file: Path | None = None) -> str:  # None: in the user's cache
    "The prompt that xVerify was trained with. It is not ours, so it is downloaded, once."
    file = file or xdg_cache_home() / 'stepwise-routing' / 'xverify_judge_prompt.py'
    if not file.is_file():
        write_file(file, urlread(PROMPT_URL, timeout=20))
    return find_prompt(file.read_text('utf-8'))


def xverify(
    model,  # of `models.open`, such as xVerify's weights on vLLM
    prompt: str
    | None = None,  # with {question}, {output} (the answer) and {answer} (the reference)
):  # grade(pairs) -> verdicts
    "A grader that asks a judge."
    prompt = prompt or xverify_prompt()

    def grade(pairs) -> list:  # (`Problem`, parsed answer) -> bool
        asked = [i for i, (_, answer) in enumerate(pairs) if answer]
        conversations = []
        for problem, answer in (pairs[i] for i in asked):
            values = dict(question=problem.question, answer=problem.answer, output=answer)
            text = re.sub(r'\{(question|answer|output)\}', lambda name: values[name[1]], prompt)
            conversations.append([dict(role='user', content=text)])
        verdicts = [False] * len(pairs)
        for i, found in zip(asked, model.choose(conversations, VERDICTS)):
            verdicts[i] = found is not None and found.prob[0] >= found.prob[1]
        return verdicts

    return grade
