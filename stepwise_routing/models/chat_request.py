"""Reads a client's request to a router in the OpenAI protocol.

The last message of the user is the question. Earlier messages, and fields that are not here, such as
temperature, max_tokens, stop or tools, are not looked at. The answer belongs in `models.answers`,
HTTP in `models.web`.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from .web import Refused


class Part(BaseModel):
    "A part of a message. Images and sound are refused."

    type: Literal['text']
    text: str


class Message(BaseModel):
    role: str
    content: str | list[Part] | None = None


class StreamOptions(BaseModel):
    include_usage: bool = False


class Body(BaseModel, strict=True):
    "The fields of a body that are read."

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None


@dataclass(frozen=True)
class ChatRequest:
    "A request to a router."

    model: str
    question: str
    stream: bool = False
    include_usage: bool = False
    seed: int | None = None


def read_request(raw: bytes) -> ChatRequest:
    "A request for a router. `Refused` names the first bad field."
    try:
        body = Body.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        param = '.'.join(map(str, first['loc'])) or None
        line = f'{param or "the body of the request"}: {first["msg"]}'
        raise Refused(400, line[:300], param=param, code='invalid_value') from None
    last = body.messages[-1]
    content = last.content or ''
    question = content if isinstance(content, str) else ''.join(part.text for part in content)
    if last.role != 'user' or not question.strip():
        line = 'messages: the last one should be a question of the user'
        raise Refused(400, line, param='messages', code='invalid_value')
    options = body.stream_options or StreamOptions()
    return ChatRequest(body.model, question, bool(body.stream), options.include_usage, body.seed)
