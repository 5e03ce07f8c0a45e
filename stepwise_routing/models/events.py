"""A reply that a server sends in pieces: its text so far, and the whole reply at its end.

Here belong the lines of such a stream. What a whole reply means belongs in `models.replies`; who asks
for a stream, and pays for it, in `models.chat`.
"""

import json

WANTED = dict(stream=True, stream_options=dict(include_usage=True))  # fields of a request
BROKEN = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)  # of chunks that are none


def chunk_of(line: str) -> dict | None:
    "The JSON of a line of a stream. None: the line holds none."
    kind, _, value = line.partition(':')
    value = value.strip()
    if kind != 'data' or value == '[DONE]':
        return None
    return json.loads(value)


def choices_of(chunk: dict) -> list:
    "Of the only reply; the chunk with the usage has none."
    return [choice for choice in chunk.get('choices') or () if choice.get('index', 0) == 0]


def whole_reply(text: str) -> str:
    "A stream as the JSON of a reply that came at once. Anything else stays as it is."
    lines = text.split('\n')
    if not any(line.startswith('data:') for line in lines):
        return text
    try:
        return json.dumps(_joined(lines))
    except BROKEN:
        return text


def _joined(lines) -> dict:
    parts = []
    tokens = []
    choice = {}
    reply = {}
    for line in lines:
        chunk = chunk_of(line)
        if chunk is None:
            continue
        for name in ('usage', 'error'):
            if chunk.get(name) is not None:
                reply[name] = chunk[name]
        for piece in choices_of(chunk):
            parts.append((piece.get('delta') or {}).get('content') or '')
            tokens += (piece.get('logprobs') or {}).get('content') or ()
            if piece.get('finish_reason') is not None:
                ends = 'finish_reason', 'stop_reason'
                choice |= {name: piece[name] for name in ends if name in piece}
    choice['message'] = dict(content=''.join(parts))
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
        self.rest = b''  # of a line
        self.text = ''

    def __call__(self, part: bytes) -> None:
        "More bytes have come. What is no chunk is left to whoever reads the whole reply."
        *lines, self.rest = (self.rest + part).split(b'\n')
        try:
            for line in lines:
                chunk = chunk_of(line.decode())
                for piece in choices_of(chunk or {}):
                    self.text += (piece.get('delta') or {}).get('content') or ''
        except BROKEN:
            return
        told = self.sure(self.text)
        if len(told) > len(self.told):
            self.told = told
            self.tell(told)
