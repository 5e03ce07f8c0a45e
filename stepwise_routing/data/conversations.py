"""Conversations as questions.

Here belongs how chat messages become a `Problem`, and how a `Problem` becomes messages again. The
prompt of a benchmark belongs in `data.benchmarks`.
"""

import json
from dataclasses import replace

from ..base.records import Problem
from ..base.tools import digest
from .benchmarks import REGISTERED, find_benchmark, register
from .sources import make_problem

ROLES = ('system', 'user', 'assistant')


def read_conversation(question: str) -> list:
    "The messages of a conversation, from the question that `asked_problem` made of them."
    try:
        messages = json.loads(question)
    except ValueError:
        messages = None
    return messages if isinstance(messages, list) else [dict(role='user', content=question)]


def conversation_benchmark(name: str) -> str:
    "The name for a copy of this benchmark whose questions are conversations."
    chat_name = f'conversation-{digest(name)}'
    if chat_name not in REGISTERED:
        record = find_benchmark(name)
        register(replace(record, name=chat_name, source=None, prompt=read_conversation))
    return chat_name


def check_messages(messages) -> None:
    "ValueError unless these are chat messages and the last one is by the user."
    for message in messages:
        is_message = isinstance(message, dict) and message.get('role') in ROLES
        if not is_message or not isinstance(message.get('content'), str):
            raise ValueError(
                f'a message needs a role ({", ".join(ROLES)}) and a text as content, got {str(message)[:60]!r}'
            )
    if not messages or messages[-1]['role'] != 'user' or not messages[-1]['content'].strip():
        raise ValueError('the last message should be a question of the user')


def asked_problem(
    name: str,  # of the benchmark; its prompt comes first if the conversation has no system message
    question,  # a text, or the messages of a conversation
) -> Problem:
    "A question or a conversation as a `Problem`. ValueError if it is neither."
    if isinstance(question, str) and question.strip():
        return make_problem(name, question, '')
    if not isinstance(question, (list, tuple)):
        raise ValueError(
            f'a question should be text, or a list of messages, got {str(question)[:60]!r}'
        )
    check_messages(question)
    messages = [dict(role=m['role'], content=m['content']) for m in question]
    last = messages[-1]['content']
    prompt = find_benchmark(name).messages(last)
    if messages[0]['role'] != 'system':
        messages = [*prompt[:-1], *messages[:-1], prompt[-1]]
    if messages == prompt:
        return make_problem(name, last, '')
    return make_problem(conversation_benchmark(name), json.dumps(messages), '')
