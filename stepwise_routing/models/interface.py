"""The interface of all backends: write steps, score a step, choose a reply.

Here belong the parts that all backends share: requests, prompts and steps as token ids, sampling, confidences of a
token. How a model is opened belongs in `models.hub`, `models.vllm` and `models.chat`.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Protocol

import numpy as np

from ..data.benchmarks import find_benchmark
from ..records import ModelSpec, Problem, Step


@dataclass(frozen=True)
class Request:
    "A request to write the next step of a chain, or all steps up to the first final one."

    problem: Problem  # $x$
    steps: tuple = ()  # the prefix $y_{<t}$, by whichever models
    # i -> seed of the i-th step of this call; a server that takes one seed gets seed(0)
    seed: Callable = int
    to_end: bool = False  # False: write one step; True: write on to the first final step
    max_steps: int = 30  # longest chain, the prefix included; ends a `to_end` call


@dataclass(frozen=True)
class Choice:
    "How likely each option is as the next reply, and the tokens that the question cost."

    prob: tuple  # per option, renormalised over the options; all 0 if the model shows none of them
    prompt: int  # prompt tokens
    generated: int  # tokens generated (billed) for the reply: 1 if options are single tokens
    cached: int = 0  # prompt tokens that the server says it read from its cache
    # prompt tokens before the last message: an earlier call may have cached them; 0: unknown
    shared: int = 0


@dataclass(frozen=True)
class Reward:
    "A reward model's verdict on the last step of a chain, and the tokens it read for that."

    value: float  # in [0, 1]: how likely the step is right
    tokens: int  # prompt tokens read: problem and all steps
    new: int  # tokens of the last step among them, its tag included


class NoRoom(ValueError):
    "What a model is to read is longer than its context."


class Backend(Protocol):
    "A language model $M_k$, as the routing tree sees it."

    spec: ModelSpec  # name, size, price
    index: int  # k, its place among the models of a tree, 0 = smallest

    def settings(self) -> dict:
        "JSON that identifies its draws, together with `spec`. A store refuses draws with other settings."

    async def write(self, request: Request) -> tuple:
        "Write steps. Returns exactly one `Step`, or several if the request is `to_end`."

    # A class with `step_by_step = True` writes the same steps in one call as with one call per step.

    async def score(self, request: Request, step: Step) -> Step:
        "`step` with this model's confidences: the model reads the step's tokens instead of drawing."

    async def choose(self, messages, options) -> Choice:
        "Probability of each option as the next reply. `NoRoom` if they do not fit into its context."

    async def close(self):
        "Give back memory and connections."


def prompt_text(tokenizer, messages) -> str:
    """Chat messages as text, in the model's own template or ChatML.

    If the last message is by the assistant, the model is to continue it. ValueError if the template cannot be computed.
    """
    *turns, last = messages
    beginning = ''
    if last['role'] == 'assistant':
        beginning = last['content']
    else:
        turns.append(last)
    if getattr(tokenizer, 'chat_template', None):
        try:
            prompt = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except ArithmeticError as error:  # such as a loop that is too long
            raise ValueError(f"the model's chat template fails: {error}") from None
    else:
        chat = [f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in turns]
        prompt = ''.join(chat) + '<|im_start|>assistant\n'
    return prompt + beginning


def leading(raw: str, separator: str = '\n\n') -> int:
    "Number of blank characters before the first step of a text. Before a line, only blank lines count."
    if separator == '\n':
        return re.match(r'(?:[^\S\n]*\n)*', raw).end()
    return len(raw) - len(raw.lstrip())


def step_text(
    raw: str,
    separator: str = '\n\n',  # of the steps; '\n' keeps the indentation of a line
) -> tuple:  # (the step's text, True if a separator ended it)
    "The first step of a text. It ends at the first separator after its content."
    body = raw[leading(raw, separator) :]
    end = body.find(separator)
    return (body if end < 0 else body[:end]).rstrip(), end >= 0


class StepTokenizer:
    "Turns prompts and steps into token ids, and finds where a step ends."

    def __init__(
        self,
        tokenizer,  # of Hugging Face
        eos,  # ids that end a reply, besides the tokenizer's own
        vocab: int,  # rows of the model's embedding
    ):
        self.hf = tokenizer
        self.vocab = vocab
        eos = [tokenizer.eos_token_id, *np.ravel(eos).tolist()]
        self.eos = tuple(dict.fromkeys(i for i in eos if i is not None))
        pieces = [self.decode([i]) for i in range(vocab)]
        self.widths = np.array([len(p) for p in pieces])
        can_end = ['\n' in p or i in eos for i, p in enumerate(pieces)]
        self.closing = np.array(can_end)  # no other token can end a step
        self.prompt = lru_cache(4096)(self.prompt)
        self.step_ids = lru_cache(1 << 16)(self.step_ids)
        self.encode = lru_cache(4096)(self.encode)

    def encode(self, text):
        return tuple(self.hf.encode(text, add_special_tokens=False))

    def decode(self, ids):
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def prompt(self, question, benchmark=''):
        messages = find_benchmark(benchmark).messages(question)
        return self.encode(prompt_text(self.hf, messages))

    def step_ids(self, ids, text, finish, separator='\n\n'):
        "Token ids of a step with this text: its own ids, or new ones if another vocabulary wrote it."
        if ids and max(ids) < self.vocab and self.parse(ids, separator)[0] == text:
            return ids
        if finish == 'step':
            return self.encode(text + separator)
        ids = self.encode(text)
        return (*ids, self.eos[0]) if finish == 'stop' and self.eos else ids

    def parse(self, ids, separator='\n\n'):
        "(Text of generated tokens, True if a separator ended it, offset in it where each token ends)."
        words = [i for i in ids if i not in self.eos]
        raw = self.decode(words)
        text, ended = step_text(raw, separator)
        ends = self.widths[words].cumsum().tolist()
        if sum(ends[-1:]) != len(raw):  # characters split between tokens
            ends = [len(self.decode(words[: i + 1])) for i in range(len(words))]
        ends += [len(raw)] * (len(ids) - len(words))
        lead = leading(raw, separator)
        return text, ended, tuple(min(max(end - lead, 0), len(text)) for end in ends)


def uniforms(seed: int, n: int) -> np.ndarray:  # [token] in [0, 1)
    "Random numbers for a step of up to n tokens: Philox (Salmon et al. 2011), keyed by the step's seed."
    return np.random.Generator(np.random.Philox(key=seed)).random(n)


def draw_tokens(
    logits,  # raw logits $z$ [row, vocabulary], a torch tensor
    u,  # uniform numbers [row]
    temperature: float = 1.0,  # of sampling; 0 = greedy
    top_p: float = 1.0,  # keep the likeliest tokens up to this mass
):  # token ids [row]
    "Sample a token in each row by inverse transform, from one uniform number per row."
    import torch

    top, best = logits.max(-1, keepdim=True)
    if temperature == 0:
        return best[:, 0]
    mass = ((logits - top) / temperature).exp_()
    if top_p < 1:
        ordered, order = mass.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        unlikely = before >= top_p * ordered.sum(-1, keepdim=True)
        mass = mass.scatter(-1, order, ordered.masked_fill(unlikely, 0))
    total = mass.cumsum_(-1)
    drawn = torch.searchsorted(total, u[:, None] * total[:, -1:], right=True)[:, 0]
    return drawn.clamp_(max=logits.shape[-1] - 1)


def draw_rows(
    logits,  # [row, vocabulary]
    u,  # uniform numbers [row]
    temperature,  # [row]
    top_p,  # [row]
):  # token ids [row]
    "`draw_tokens` for rows that each have their own temperature and top_p."
    import torch

    sampling = np.stack((temperature, top_p))
    tokens = np.zeros(len(u), int)
    for t, p in np.unique(sampling, axis=1).T:
        rows = np.flatnonzero((sampling.T == (t, p)).all(1))
        drawn = draw_tokens(logits[rows], torch.from_numpy(u[rows]).to(logits.device), t, p)
        tokens[rows] = drawn.cpu().numpy()
    return tokens


def confidences(logits, tokens):  # raw logits [..., vocabulary], sampled token ids [...]
    "How sure the model was: largest logit, the token's probability, entropy (nats), as [3, ...]."
    import torch

    z = logits.gather(-1, tokens[..., None])
    top = logits.amax(-1)
    below = logits - top[..., None]
    mass = below.exp()
    total = mass.sum(-1)
    finite = below.clamp(min=-1e4)  # a logit of -inf has no mass
    entropy = total.log() - (mass * finite).sum(-1) / total
    prob = (z[..., 0] - top).exp_() / total
    return torch.stack((top, prob, entropy))


def check_finite(
    name: str,  # of the model
    numbers,  # logits or probabilities of its tokens
) -> None:
    "RuntimeError if a number is not finite. Otherwise a store would keep it for good."
    if not np.isfinite(numbers).all():
        raise RuntimeError(
            f'{name}: a logit is not finite; if float16 overflows, take another dtype'
        )


def five_digits(x) -> np.ndarray:  # float64, each exactly representable in float32
    "Round numbers to five significant digits, then to float32."
    x = np.asarray(x, float)
    tiny = np.abs(x) < 9.999987e-38  # float32 has too few digits below 1e-37
    x = np.where(tiny, 0, x)
    magnitude = np.log10(np.abs(x), out=np.zeros_like(x), where=x != 0)
    scale = 10.0 ** (4 - np.floor(magnitude))
    return (np.round(x * scale) / scale).astype(np.float32).astype(float)
