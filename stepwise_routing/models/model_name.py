"""The name of a model and its parts: engine, folder or model, commit, server.

Here belongs how a name is read and written. Opening the model belongs in `models.names`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

KINDS = ('openai', 'vllm', 'vllm-server', 'recorded')


@dataclass(frozen=True)
class ModelName:
    'A name such as "org/model@COMMIT", "vllm:org/model", "openai:gpt" or "vllm-server:http://HOST/v1#MODEL".'

    kind: str  # one of `KINDS`; '': our own engine; "recorded": its steps are replayed, it is never opened
    name: str  # folder, name on the Hub, or name in the API; '': the only model of a server
    revision: str = ''  # commit on the Hub; '': the newest
    url: str = ''  # address of a server that runs already

    @classmethod
    def parse(cls, text: str) -> 'ModelName':
        "Read a name. ValueError for a revision that is not a commit."
        kind, _, rest = text.partition(':')
        if kind not in KINDS:
            kind, rest = '', text
        if kind == 'vllm-server':
            url, _, name = rest.partition('#')
            return cls(kind, name, url=url)
        if kind == 'openai' or '@' not in rest or Path(rest).exists():
            return cls(kind, rest)
        name, _, revision = rest.rpartition('@')
        if not re.fullmatch('[0-9a-f]{40}', revision):
            raise ValueError(
                f'model {text!r}: after @ comes the commit of a model on the Hub, '
                '40 hexadecimal digits'
            )
        if Path(name).exists():
            raise ValueError(
                f'model {text!r}: a folder has no revision; leave out @{revision[:7]}...'
            )
        return cls(kind, name, revision)

    def __str__(self):
        text = self.name
        if self.url:
            text = f'{self.url}#{self.name}' if self.name else self.url
        if self.revision:
            text += f'@{self.revision}'
        return f'{self.kind}:{text}' if self.kind else text

    @property
    def is_here(self) -> bool:
        "Does this machine load the model's weights?"
        return self.kind in ('', 'vllm')

    @property
    def is_paid(self) -> bool:
        "Is the model behind an API that bills by the token?"
        return self.kind == 'openai'
