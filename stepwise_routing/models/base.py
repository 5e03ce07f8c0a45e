"""The contract of all models on one page, and what they share: prompts, where a step ends, draws, confidences.

Every method takes a list, so that a model can work on many chains at once. Not here: how a model computes (`local`,
`vllm`, `api`), and which answer a box holds (`records.boxed`).
"""

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from os.path import commonprefix
from typing import Protocol

import numpy as np

from ..data.benchmarks import find_benchmark
from ..records import SEPARATOR, ModelSpec, Problem, Step, boxed, edge_seed

# ---- the contract


@dataclass(frozen=True)
class Request:
    "Write the next step of a chain, or all steps up to its end. Plain data: it travels to other processes."

    problem: Problem  # $x$
    steps: tuple = ()  # the prefix $y_{<t}$, by whichever models
    sample: int = 0  # which of the independent draws
    to_end: bool = False  # False: one step
    max_steps: int = 50  # longest chain, the prefix included

    @property
    def path(self) -> str:
        "Who wrote the prefix, a digit a step: at most ten models."
        return ''.join(str(step.model) for step in self.steps)

    @property
    def room(self) -> int:
        "How many steps may be written."
        return max(self.max_steps - len(self.steps), 1) if self.to_end else 1

    def seed(self, written: int, model: int) -> int:
        "The seed of the next step of `model`, which has written so many in this call."
        path = self.path + str(model) * written
        return edge_seed(self.problem.benchmark, self.problem.id, self.sample, path, model)


@dataclass(frozen=True)
class Preference:
    "How likely each option is as the next reply, and the tokens that the question cost."

    prob: tuple  # per option; they sum to 1
    prompt: int  # prompt tokens
    generated: int = 1
    cached: int = 0  # prompt tokens that the server says it read from its cache
    shared: int = 0  # prompt tokens before the last message, which an earlier call may have cached


@dataclass(frozen=True)
class Reward:
    "What a reward model says about the last step of a chain, and the tokens that it read."

    value: float  # in [0, 1]: how likely the step is right
    tokens: int  # prompt tokens: problem and all steps
    new: int  # of these, tokens of the last step


class Model(Protocol):
    "A language model $M_k$."

    spec: ModelSpec  # name, size, price
    index: int  # k, 0 = smallest
    has_step_seeds: bool  # True: one call a step draws the same chain as one call for all

    def settings(self) -> dict:
        "What its draws depend on, as JSON. A store refuses draws with other settings."

    def write(self, requests) -> list:
        "A tuple of `Step`s per request: one, or several if the request is `to_end`."

    def score(self, requests) -> list:
        "Per request, its last step with this model's confidences: it reads the step. Local and vLLM."

    def choose(self, conversations, options) -> list:
        "A `Preference` per conversation; None if it is longer than the context. Options differ in their first token."


# ---- prompts


def prompt_text(tokenizer, messages, **template) -> str:
    "Chat messages in the model's own template. What an assistant has begun to say, it is to continue."
    from jinja2 import TemplateError

    *turns, last = messages
    begun = last['content'] if last['role'] == 'assistant' else ''
    if not begun:
        turns.append(last)
    options = dict(tokenize=False, add_generation_prompt=True, **template)
    try:
        return tokenizer.apply_chat_template(turns, **options) + begun
    except TemplateError:  # Gemma, for one, has no system role
        if turns[0]['role'] != 'system':
            raise
    system, user, *rest = turns
    warnings.warn(
        "the model's chat template takes no system text: it goes in front of the question"
    )
    user = dict(user, content=system['content'] + '\n\n' + user['content'])
    return tokenizer.apply_chat_template([user, *rest], **options) + begun


# ---- where a step ends


def step_text(raw: str) -> tuple:
    "(First step of a text, blank characters before it, has it ended?): up to the first separator behind it."
    lead = len(raw) - len(raw.lstrip())
    body, end, _ = raw[lead:].partition(SEPARATOR)
    return body.rstrip(), lead, bool(end)


class StepTokenizer:
    "Turns prompts and steps into token ids, and finds where a step ends."

    def __init__(
        self,
        tokenizer,  # of Hugging Face
        eos,  # ids that end a reply, besides the tokenizer's own
        vocab: int,  # rows of the model's embedding
        **template,  # of the chat template, such as enable_thinking=False
    ):
        self.hf = tokenizer
        self.vocab = vocab
        self.template = template
        ends = [tokenizer.eos_token_id, *np.ravel(eos).tolist()]
        self.eos = {i for i in ends if i is not None}
        self.pieces = [self.decode([i]) for i in range(vocab)]
        can_end = ['\n' in piece or i in self.eos for i, piece in enumerate(self.pieces)]
        self.closing = np.array(can_end)  # no other token can end a step
        self.question_ids = lru_cache(1 << 14)(self.question_ids)

    def encode(self, text: str) -> list:
        return self.hf.encode(text, add_special_tokens=False)

    def decode(self, ids) -> str:
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def messages_ids(self, messages) -> list:
        return self.encode(prompt_text(self.hf, messages, **self.template))

    def question_ids(self, question: str, benchmark: str) -> tuple:
        return tuple(self.messages_ids(find_benchmark(benchmark).prompt(question)))

    def prefix_ids(self, problem: Problem, steps) -> list:
        "Token ids of the question and the steps so far."
        ids = list(self.question_ids(problem.question, problem.benchmark))
        for step in steps:
            ids += self.step_ids(step)
        return ids

    def step_ids(self, step: Step) -> list:
        "Token ids of a step: as they were drawn, or new ones if another vocabulary wrote it."
        if step.ids and max(step.ids) < self.vocab and self.parse(step.ids)[0] == step.text:
            return list(step.ids)
        return self.encode(step.text + SEPARATOR)

    def shared(self, messages, ids) -> int:
        "How many tokens of a conversation stand before its last message."
        if len(messages) < 2:
            return 0
        return len(commonprefix([ids, self.messages_ids(messages[:-1])]))

    def last_step_ids(self, request: Request) -> tuple:
        "Token ids (of what stands before the last step, of the step)."
        *before, step = request.steps
        return self.prefix_ids(request.problem, before), self.step_ids(step)

    def scored(self, step: Step, prompt, ids, numbers) -> Step:
        "A step with the confidences [3, token] of a model that has read it as these token ids."
        bill = dict(generated=0, prompt=len(prompt) + len(ids), cached=0)
        own = dict(ids=tuple(ids), ends=self.parse(ids)[1], **shown(numbers))
        return replace(step, **own, **bill)

    def parse(self, ids) -> tuple:
        "(Text of the first step in these tokens, offset in it where each token ends, has it ended?)."
        words = [i for i in ids if i not in self.eos]
        raw = self.decode(words)
        text, lead, ended = step_text(raw)
        ends = np.cumsum([len(self.pieces[i]) for i in words], dtype=int).tolist()
        if words and ends[-1] != len(raw):  # characters split between tokens
            ends = [len(self.decode(words[: i + 1])) for i in range(len(words))]
        ends += [len(raw)] * (len(ids) - len(words))
        return text, tuple(min(max(end - lead, 0), len(text)) for end in ends), ended

    def step(
        self,
        request: Request,
        model: int,  # index of the writer
        ids,  # tokens that were drawn
        numbers,  # their confidences [3, token]
        prompt: int,  # tokens before them
        full: bool,  # no further token may be drawn
    ) -> Step | None:
        "The step of drawn tokens; None if it goes on."
        text, ends, ended = self.parse(ids)
        finish = 'length' if full else None
        if ended:
            finish = 'step'
        if ids[-1] in self.eos or ended and boxed(text, request.problem.question) is not None:
            finish = 'stop'
        if finish is None:
            return None
        bill = dict(generated=len(ids), prompt=prompt)
        return Step(text, model, finish, tuple(ids), ends, **shown(numbers), **bill)


def reply_steps(
    request: Request,
    model: int,  # index of the writer
    text: str,  # of a whole reply
    finish: str,  # "stop", "length", or "step": a stop string ended it
    usage: tuple,  # tokens of the prompt, of these cached, of the reply
    probs=(),  # per token, (its text, its probability); () if they are not known
) -> tuple:
    "The `Step`s of a reply. Behind an answer they are dropped, and billed. Without `probs` characters share the bill."
    prompt, cached, generated = usage
    borders = np.cumsum([len(piece) for piece, _ in probs], dtype=int)
    steps = []
    start, billed, first_token = 0, 0, 0
    while True:
        body, lead, ended = step_text(text[start:])
        offset = start + lead
        start = text.index(SEPARATOR, offset) + len(SEPARATOR) if ended else len(text)
        is_answer = boxed(body, request.problem.question) is not None
        goes_on = bool(text[start:].strip())
        kind = 'stop' if is_answer else 'step' if goes_on else finish
        is_last = kind != 'step' or not goes_on or len(steps) + 1 == request.room

        last_token = len(borders)
        if start < len(text):
            last_token = int(np.searchsorted(borders, start)) + 1
        written = generated  # tokens up to the end of this step
        if not is_last:
            written = last_token if probs else round(generated * start / len(text))
        own = probs[first_token:last_token]
        ends = np.clip(borders[first_token:last_token] - offset, 0, len(body))
        step = Step(
            body,
            model,
            kind,
            ends=tuple(ends.tolist()),
            prob=tuple(five_digits([prob for _, prob in own]).tolist()),
            generated=written - billed,
            prompt=prompt + billed,
            cached=0 if steps else cached,
        )
        steps.append(step)
        if is_last:
            return tuple(steps)
        billed, first_token = written, last_token


# ---- draws and confidences


def uniforms(seed: int, n: int) -> np.ndarray:  # [token] in [0, 1)
    "Random numbers for a step of up to n tokens: Philox (Salmon et al. 2011), keyed by the step's seed."
    return np.random.Generator(np.random.Philox(key=seed)).random(n)


def draw_tokens(
    logits,  # raw logits $z$ [row, vocabulary], a torch tensor
    u,  # uniform numbers [row]
    temperature: float = 1.0,  # 0 = greedy
    top_p: float = 1.0,  # keep the likeliest tokens up to this mass
):  # token ids [row]
    "Sample a token in each row by inverse transform, from one uniform number per row."
    import torch

    top, best = logits.max(-1, keepdim=True)
    if temperature == 0:
        return best[:, 0]
    mass = ((logits - top).double() / temperature).exp()
    if top_p < 1:
        ordered, order = mass.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= top_p * ordered.sum(-1, keepdim=True)] = 0
        mass = mass.scatter(-1, order, ordered)
    total = mass.cumsum(-1)
    drawn = torch.searchsorted(total, u[:, None] * total[:, -1:], right=True)[:, 0]
    return drawn.clamp(max=logits.shape[-1] - 1)


def confidences(logits, tokens):  # raw logits [..., vocabulary], drawn token ids [...] -> [3, ...]
    "How sure the model was: largest logit, the token's probability, entropy (nats)."
    import torch

    top = logits.amax(-1)
    log_prob = logits.log_softmax(-1)
    own = log_prob.gather(-1, tokens[..., None])[..., 0]
    entropy = -(log_prob.exp() * log_prob.clamp(min=-1e4)).sum(-1)  # a logit of -inf has no mass
    return torch.stack((top, own.exp(), entropy))


def shown(numbers) -> dict:  # confidences [3, token]; nan where they were not asked for
    "The confidences of a `Step`."
    logit, prob, entropy = five_digits(numbers).tolist()
    if not logit or np.isnan(logit[0]):
        return {}
    return dict(prob=tuple(prob), max_logit=tuple(logit), entropy=entropy[0])


def five_digits(x) -> np.ndarray:
    "Numbers with five significant digits, as float32 holds them, so that files do not depend on the processor."
    x = np.asarray(x, float)
    size = np.maximum(np.abs(x), 1e-37)
    scale = 10.0 ** (4 - np.floor(np.log10(size)))
    return (np.round(x * scale) / scale).astype(np.float32).astype(float)
