"""Reads a client's request to a router in the OpenAI protocol, field by field.

Here belong reading a request and the errors about it. The answer belongs in `models.answers`, HTTP
in `models.web`.
"""

import json
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..base.settings import AtLeastOne, NotNegative, checked
from ..base.tools import nearest
from .web import Refused

NUMBER = Annotated[float, Field(ge=0, le=2)]
KINDS = dict(  # field that is served -> type of its value
    model=str,
    stream=bool,
    max_completion_tokens=AtLeastOne,
    max_tokens=AtLeastOne,
    temperature=NUMBER,
    top_p=Annotated[float, Field(gt=0, le=1)],
    seed=Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)],
    logprobs=bool,
    top_logprobs=Annotated[int, Field(ge=0, le=20)],
    n=Annotated[int, Field(ge=1, le=1)],
    frequency_penalty=Annotated[float, Field(ge=0, le=0)],
    presence_penalty=Annotated[float, Field(ge=0, le=0)],
)
OTHERS = ('messages', 'stop', 'stream_options', 'stepwise')  # served too; functions here read them
IGNORED = (
    'user',
    'safety_identifier',
    'metadata',
    'store',
    'service_tier',
    'prompt_cache_key',
    'parallel_tool_calls',  # no tools are served
)
NEUTRAL = dict(  # values that ask for nothing
    tools=[],
    tool_choice='none',
    logit_bias={},
    response_format=dict(type='text'),
    modalities=['text'],
)
STREAM_OPTIONS = dict(include_usage=bool, include_obfuscation=bool)
STEPWISE = dict(alpha=Annotated[float, Field(gt=0, lt=1)], max_cents=NotNegative)
ROLES = dict(system='system', developer='system', user='user', assistant='assistant')
EMPTY = (None, [], '')  # values of an empty field of a message
SILENT = (
    'name',
    'annotations',
    'refusal',
    'reasoning_content',
)  # of a message, not shown to models
STOPS = 4  # strings at most
HALF = re.compile('[\ud800-\udfff]')  # half a character


@dataclass(frozen=True)
class ChatRequest:
    "A request to a router. None in a field: the router's own setting is used."

    model: str
    messages: list
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    stop: tuple = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logprobs: bool = False
    alpha: float | None = None
    max_cents: float | None = None


def openai_fields() -> set:
    "Every field of the protocol."
    from openai.types.chat import completion_create_params as params

    return set(params.CompletionCreateParamsNonStreaming.__annotations__) | set(
        params.CompletionCreateParamsBase.__annotations__
    )


def read_body(raw: bytes) -> dict:
    "The fields of a body, without null ones. `Refused` if the body is not a JSON object."
    try:
        body = json.loads(raw)
        return {name: value for name, value in body.items() if value is not None}
    except (ValueError, RecursionError, AttributeError) as error:
        line = 'the body of the request is no JSON object'
        if type(error) is ValueError:  # about digits; those of json have kinds
            line = 'the request holds a number of thousands of digits: send a shorter one'
        raise Refused(400, line, code='invalid_json') from None


def bad_field(param: str, line: str, code: str = 'invalid_value') -> Refused:
    "The error about a field of a request. The caller raises it."
    return Refused(400, line, param=param, code=code)


def check_name(name: str) -> None:
    "`Refused` for a field that is not served. For an unknown field, it names the nearest one."
    served = [*KINDS, *OTHERS, *IGNORED]
    if name in served:
        return
    if name in openai_fields():
        raise bad_field(
            name,
            f'field {name!r}: routers do not support it; leave it out',
            'unsupported_parameter',
        )
    raise bad_field(
        name[:60], f'unknown field {name[:60]!r}{nearest(name[:60], served)}', 'unknown_parameter'
    )


def read_value(name: str, value, kind, where: str = ''):
    "Check a value against its type. `Refused`, in one line, for a wrong value."
    try:
        return checked(where + name, value, kind)
    except (ValueError, TypeError) as error:
        raise bad_field(where + name, str(error).splitlines()[0][:300]) from None


def read_parts(name: str, value, kinds: dict) -> dict:
    "Read an object with known fields, without null ones. `Refused` for an unknown field."
    if not isinstance(value, dict):
        raise bad_field(name, f'{name} should be a JSON object')
    parts = {}
    for part, given in value.items():
        if part not in kinds:
            raise bad_field(
                name,
                f'unknown field {name}.{part[:60]}{nearest(part[:60], kinds)}',
                'unknown_parameter',
            )
        if given is not None:
            parts[part] = read_value(part, given, kinds[part], f'{name}.')
    return parts


def read_stop(value) -> tuple:
    "The strings that end an answer. `Refused` for other values than texts."
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) <= STOPS:
        if all(isinstance(stop, str) and stop for stop in stops):
            return tuple(stops)
    raise bad_field('stop', f'stop: give a text, or up to {STOPS} texts')


def text_of(content, where: str) -> str:
    "The text of a message's content."
    parts = content
    if isinstance(content, str):
        parts = [dict(type='text', text=content)]
    texts = []
    for part in parts if isinstance(parts, list) else [None]:
        is_text = isinstance(part, dict) and part.get('type') == 'text'
        if not is_text or not isinstance(part.get('text'), str):
            raise bad_field(where, f'{where}.content should be a text, or parts of type "text"')
        texts.append(part['text'])
    text = ''.join(texts)
    if HALF.search(text):
        raise bad_field(
            where,
            f'{where}.content holds half a character (a lone surrogate): send whole characters',
        )
    return text


def read_message(message, where: str) -> dict:
    "Role and text of a message."
    if not isinstance(message, dict):
        raise bad_field(where, f'{where} should be a JSON object')
    role = message.get('role')
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(str(role)[:60], ROLES)
        raise bad_field(
            where, f'{where}.role is {role!r:.60}{hint}: it should be one of {", ".join(ROLES)}'
        )
    for name, value in message.items():
        if name not in ('role', 'content', *SILENT) and value not in EMPTY:
            raise bad_field(
                where,
                f'{where}.{name[:60]}: routers do not support it; leave it out',
                'unsupported_parameter',
            )
    content = message.get('content')
    if role == 'assistant' and content is None:  # what clients send back after a refusal
        content = ''
    return dict(role=ROLES[role], content=text_of(content, where))


def read_messages(value) -> list:
    "The messages of the conversation. `Refused` unless the last one is by the user."
    if not isinstance(value, list) or not value:
        raise bad_field('messages', 'messages: give a list of messages')
    messages = [read_message(message, f'messages[{i}]') for i, message in enumerate(value)]
    last = messages[-1]
    if last['role'] != 'user' or not last['content'].strip():
        raise bad_field('messages', 'messages: the last one should be a question of the user')
    return messages


def read_request(raw: bytes) -> ChatRequest:
    "A request for a router. `Refused` names the first bad field."
    body = read_body(raw)
    for name, value in body.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            check_name(name)
    for name in ('model', 'messages'):
        if name not in body:
            raise bad_field(name, f'field {name!r} is missing: add it', 'missing_parameter')
    values = {name: read_value(name, body[name], KINDS[name]) for name in KINDS if name in body}
    if values.get('top_logprobs'):
        line = (
            'top_logprobs: a router keeps the probabilities of the drawn tokens only; leave it out: '
            'logprobs=true shows those of the drawn tokens'
        )
        raise bad_field('top_logprobs', line, 'unsupported_parameter')
    options = read_parts('stream_options', body.get('stream_options', {}), STREAM_OPTIONS)
    if options and not values.get('stream'):
        raise bad_field('stream_options', 'stream_options is allowed with stream=true only')
    parts = read_parts('stepwise', body.get('stepwise', {}), STEPWISE)
    return ChatRequest(
        model=values['model'],
        messages=read_messages(body['messages']),
        stream=values.get('stream', False),
        include_usage=options.get('include_usage', False),
        max_tokens=values.get('max_completion_tokens', values.get('max_tokens')),
        stop=read_stop(body.get('stop', [])),
        temperature=values.get('temperature'),
        top_p=values.get('top_p'),
        seed=values.get('seed'),
        logprobs=values.get('logprobs', False),
        alpha=parts.get('alpha'),
        max_cents=parts.get('max_cents'),
    )
