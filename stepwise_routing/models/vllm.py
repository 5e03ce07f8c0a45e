"""A model on vLLM, in this process. It shows raw logits, which S^os needs.

A call has one seed, and a draw also depends on the batch, by rounding: chains that are asked for whole differ from those
of one call a step. A script needs `if __name__ == '__main__':`, or VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

from dataclasses import replace
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from ..records import SEPARATOR, ModelSpec, Step
from ..util import install_line
from .base import Preference, Request, StepTokenizer, five_digits

UNBROKEN_PROMPT = 8192  # tokens


def seen(
    logits: dict | None,  # token id -> vLLM's entry: its `logprob` is a raw logit
    token: int,
) -> tuple:
    "Largest logit, probability and entropy of a token, from the logits of the likeliest and its own."
    if not logits:
        return np.nan, np.nan, np.nan
    z = np.array([entry.logprob for entry in logits.values()])
    mass = np.exp(z - z.max())
    share = mass / mass.sum()
    entropy = -(share * np.log(np.maximum(share, 1e-300))).sum()
    own = np.exp(logits[token].logprob - z.max())
    return z.max(), own / mass.sum(), entropy


def parameters(config) -> int:
    "The number of parameters, counted without loading them."
    from transformers import AutoModelForCausalLM

    with torch.device('meta'):
        return AutoModelForCausalLM.from_config(config).num_parameters()


class VLLMModel:
    "A language model $M_k$ on vLLM."

    has_step_seeds = False

    def __init__(
        self,
        model,  # folder, or name on the Hub
        index: int = 0,  # place among the models
        name: str | None = None,  # for tables; None: the last part of `model`
        revision: str | None = None,  # commit on the Hub
        temperature: float = 0.7,  # of sampling; 0 = greedy
        top_p: float = 1.0,
        max_tokens: int = 512,  # of a step
        max_reply: int = 2048,  # of all steps up to the end
        context: int | None = None,  # tokens of prompt and chain; None: all it has, at most 4,096
        top: int = 20,  # likeliest tokens that are looked at; 0: no confidences, and twice as fast
        memory: float = 0.45,  # share of the GPU's memory
        template: dict | None = None,  # of the chat template, such as enable_thinking=False
        **options,  # of `vllm.LLM`
    ):
        from transformers import AutoConfig

        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError(f'vLLM is not installed: {install_line("gpu")}') from error

        if context is None:
            config = AutoConfig.from_pretrained(model, revision=revision).get_text_config()
            context = min(config.max_position_embeddings, 4096)
        if not torch.cuda.is_available():  # its random numbers cannot go back behind a cut prompt
            longest = max(UNBROKEN_PROMPT, context)
            options = dict(enable_chunked_prefill=False, max_num_batched_tokens=longest) | options
            options = dict(enforce_eager=True) | options
        self.llm = LLM(
            str(model),
            revision=revision,
            max_model_len=context,
            gpu_memory_utilization=memory,
            enable_prefix_caching=True,
            logprobs_mode='raw_logits',
            max_logprobs=max(top, 1),
            **options,
        )
        config = self.llm.model_config.hf_config
        eos = self.llm.model_config.try_get_generation_config().get('eos_token_id')
        tokenizer = self.llm.get_tokenizer()
        self.text = StepTokenizer(tokenizer, eos, config.vocab_size, **(template or {}))
        self.spec = ModelSpec(name or Path(str(model)).name, parameters(config))
        self.index = index
        self.revision = revision
        self.max_tokens = max_tokens
        self.max_reply = max_reply
        self.sampling = dict(temperature=temperature, top_p=top_p, logprobs=top or None)
        self.context = context

    def settings(self) -> dict:
        "What the draws depend on, as JSON."
        return dict(
            backend='vllm',
            commit=self.revision,
            max_tokens=self.max_tokens,
            max_reply=self.max_reply,
            context=self.context,
            template=self.text.template,
            **self.sampling,
        )

    def generate(self, prompts, params) -> list:
        prompts = [dict(prompt_token_ids=ids) for ids in prompts]
        return self.llm.generate(prompts, params, use_tqdm=False)

    # ---- writing

    def write(self, requests) -> list:
        "A tuple of `Step`s per request: one, or several if the request is `to_end`."
        prompts = [self.text.prefix_ids(r.problem, r.steps) for r in requests]
        drawn = [[] for _ in requests]  # [token, logit, prob, entropy] each
        written = [self.no_room(ids) for ids in prompts]
        unwritten = [i for i, steps in enumerate(written) if not steps]
        while unwritten:
            inputs = [prompts[i] + [token for token, *_ in drawn[i]] for i in unwritten]
            rows = zip(unwritten, inputs)
            params = [self.params(requests[i], ids, drawn[i]) for i, ids in rows]
            for i, reply in zip(unwritten, self.generate(inputs, params)):
                (out,) = reply.outputs
                rows = zip(out.token_ids, out.logprobs or repeat(None))
                drawn[i] += [[token, *seen(row, token)] for token, row in rows]
                is_full = out.finish_reason == 'length'
                written[i] = self.steps(requests[i], drawn[i], len(prompts[i]), is_full)
            unwritten = [i for i in unwritten if not written[i]]  # only a blank line so far
        return written

    def no_room(self, ids: list) -> tuple:
        "The empty step that ends a chain whose prompt fills the context."
        is_full = len(ids) >= self.context
        return (Step('', self.index, 'length', prompt=len(ids)),) if is_full else ()

    def params(self, request: Request, ids: list, drawn: list):
        "How the next tokens of a request are drawn."
        from vllm import SamplingParams

        limit = self.max_reply if request.to_end else self.max_tokens
        room = min(limit - len(drawn), self.context - len(ids))
        seed = (request.seed(0, self.index) + len(drawn)) % 2**62
        stop = dict(stop=SEPARATOR, include_stop_str_in_output=True)
        return SamplingParams(
            **self.sampling,
            **({} if request.to_end else stop),
            max_tokens=max(room, 1),
            stop_token_ids=list(self.text.eos),
            seed=seed,
        )

    def steps(self, request: Request, drawn: list, prompt: int, is_full: bool) -> tuple:
        "The steps of drawn tokens. Those behind a boxed answer are dropped."
        steps = []
        first = 0
        for i, (token, *_) in enumerate(drawn, 1):
            is_end = i == len(drawn)
            if not self.text.closing[token] and not is_end:
                continue
            ids, *numbers = zip(*drawn[first:i])
            parts = request, self.index, ids, numbers, prompt + first, is_full and is_end
            step = self.text.step(*parts)
            if step is None:
                continue
            steps.append(step)
            first = i
            if step.finish != 'step' or len(steps) == request.room:
                break
        else:
            if is_full:  # the last token ended a step
                steps[-1] = replace(steps[-1], finish='length')
        return tuple(steps)

    # ---- reading

    def read(self, pairs) -> list:  # [3, token] each
        "Confidences in the tokens of each reply, of (prompt, reply) token ids."
        from vllm import SamplingParams

        looked_at = self.sampling['logprobs'] or 1
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=looked_at)
        replies = self.generate([[*prompt, *reply] for prompt, reply in pairs], params)
        numbers = []
        for (prompt, reply), out in zip(pairs, replies):
            rows = out.prompt_logprobs[len(prompt) :]
            numbers.append(np.transpose([seen(row, token) for row, token in zip(rows, reply)]))
        return numbers

    def score(self, requests) -> list:
        "Per request, its last step with this model's confidences."
        pairs = [self.text.last_step_ids(request) for request in requests]
        rows = zip(requests, pairs, self.read(pairs))
        return [self.text.scored(r.steps[-1], *pair, numbers) for r, pair, numbers in rows]

    def choose(self, conversations, options) -> list:
        "A `Preference` per conversation: how likely each option is as the reply, by its first token."
        from vllm import SamplingParams

        first = [self.text.encode(option)[0] for option in options]
        forced = [  # vLLM always shows the logit of the token that it draws
            SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, allowed_token_ids=[token])
            for token in first
        ]
        prompts = [self.text.messages_ids(messages) for messages in conversations]
        fitting = [ids for ids in prompts if len(ids) < self.context]
        inputs = [ids for ids in fitting for _ in first]
        replies = iter(self.generate(inputs, forced * len(fitting)))
        preferences = []
        for messages, ids in zip(conversations, prompts):
            if len(ids) >= self.context:
                preferences.append(None)
                continue
            rows = [next(replies).outputs[0].logprobs[0] for _ in first]
            z = np.array([row[token].logprob for row, token in zip(rows, first)])
            mass = np.exp(z - z.max())
            prob = tuple(five_digits(mass / mass.sum()).tolist())
            shared = self.text.shared(messages, ids)
            preferences.append(Preference(prob, len(ids), shared=shared))
        return preferences
