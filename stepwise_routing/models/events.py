"""A reply that a server sends in pieces: its text so far, and the whole reply at its end.

Here belong the lines of such a stream. What a whole reply means belongs in `models.replies`; who asks
for a stream, and pays for it, in `models.chat`.
"""

import codecs
import io
import json
import re

WANTED = dict(stream=True, stream_options=dict(include_usage=True))  # fields of a request
BROKEN = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)  # of chunks that are none


def chunks_of(event: str) -> list:
    """The JSON of an event: what stands between two blank lines of a stream.

    A chunk may have several lines. Some servers send no blank lines: then each line is a chunk."""
    fields = [line[5:].strip() for line in event.split('\n') if line.startswith('data:')]
    values = [value for value in fields if value not in ('', 'null', '[DONE]')]
    try:
        return [json.loads('\n'.join(values))] if values else []
    except ValueError:
        return [json.loads(value) for value in values]


def choices_of(chunk: dict) -> list:
    "Of the only reply; the chunk with the usage has none."
    return [choice for choice in chunk.get('choices') or () if choice.get('index', 0) == 0]


def whole_reply(text: str) -> str:
    "A stream as the JSON of a reply that came at once. Anything else stays as it is, without a byte-order mark."
    text = text.removeprefix('\ufeff')
    plain = re.sub('\r\n?', '\n', text)
    if not any(line.startswith('data:') for line in plain.split('\n')):
        return text
    try:
        chunks = [chunk for event in plain.split('\n\n') for chunk in chunks_of(event)]
        return json.dumps(_joined(chunks))
    except BROKEN:
        return text


def _joined(chunks) -> dict:
    parts = []
    thoughts = None  # the first piece of them
    tokens = []
    choice = {}
    reply = {}
    for chunk in chunks:
        for name in ('usage', 'error'):
            if chunk.get(name) is not None:
                reply[name] = chunk[name]
        for piece in choices_of(chunk):
            delta = piece.get('delta') or {}
            parts.append(delta.get('content') or '')
            thoughts = thoughts or delta.get('reasoning_content') or delta.get('reasoning')
            tokens += (piece.get('logprobs') or {}).get('content') or ()
            if piece.get('finish_reason') is not None:
                ends = 'finish_reason', 'stop_reason', 'error'
                choice |= {name: piece[name] for name in ends if name in piece}
    choice['message'] = dict(content=''.join(parts))
    if thoughts:
        choice['message']['reasoning'] = thoughts
    if tokens:
        choice['logprobs'] = dict(content=tokens)
    return reply | dict(choices=[choice])


class Listener:
    "Tells somebody the text of a reply while its bytes arrive."

    def __init__(
        self,
        tell,  # called with all text so far that will stay, each time that there is more
        sure,  # all text so far -> the part of it that will stay
    ):
        self.tell = tell
        self.sure = sure
        self.told = ''
        self.begin()

    def begin(self) -> None:
        "A reply begins; the one before broke off with nothing told."
        decoder = codecs.getincrementaldecoder('utf-8-sig')('replace')  # as the whole reply is read
        self.decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self.rest = ''  # of an event
        self.text = ''

    def __call__(self, part: bytes) -> None:
        "More bytes have come. What is no chunk is left to whoever reads the whole reply."
        *events, self.rest = (self.rest + self.decoder.decode(part)).split('\n\n')
        try:
            for chunk in [chunk for event in events for chunk in chunks_of(event)]:
                for piece in choices_of(chunk):
                    self.text += (piece.get('delta') or {}).get('content') or ''
        except BROKEN:
            return
        # two chunks may hold half a character each: JSON joins them, and a half alone waits
        joined = json.loads(json.dumps(self.text))
        whole, *_ = re.split('[\ud800-\udfff]', joined, maxsplit=1)
        told = self.sure(whole)
        if len(told) > len(self.told):
            self.told = told
            self.tell(told)
