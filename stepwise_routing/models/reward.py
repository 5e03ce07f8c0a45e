"""Process reward models: how likely is it that the last step of a chain is right?

Two kinds of checkpoints are read: Qwen2.5-Math-PRM (two labels, at a tag behind each step) and Skywork-o1-Open-PRM (one
value a token). How a router uses a reward belongs in `method.baselines`.
"""

from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2Model, Qwen2PreTrainedModel

from ..records import SEPARATOR, ModelSpec, chat_prompt
from .base import Reward, five_digits, prompt_text

BATCH = 32  # chains that are read in one pass
TAG = '<extra_0>'  # stands behind each step of Qwen2.5-Math-PRM


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):
    "Qwen2.5-Math-PRM and the shipped micro-prm. The second label is \"right\"."

    _keep_in_fp32_modules_strict = {'score'}

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.model = Qwen2Model(config)
        layers = torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        self.score = torch.nn.Sequential(*layers)
        self.post_init()

    def forward(self, ids):  # [chain, token] -> probability of "right" [chain, token]
        hidden = self.model(ids).last_hidden_state
        return self.score(hidden.float()).softmax(-1)[..., 1]

    @staticmethod
    def prompt(tokenizer, question: str) -> str:
        return prompt_text(tokenizer, chat_prompt(question))

    @staticmethod
    def tag(tokenizer) -> int:
        has_tag = TAG in tokenizer.get_vocab()
        (tag,) = tokenizer.encode(TAG if has_tag else SEPARATOR, add_special_tokens=False)
        return tag


class Qwen2ForPrmModel(Qwen2PreTrainedModel):
    "Skywork-o1-Open-PRM. Its value is read at a blank line, as RSD does."

    _keep_in_fp32_modules_strict = {'v_head'}
    _keys_to_ignore_on_load_unexpected = [r'^lm_head\.']

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.v_head = torch.nn.ModuleDict(dict(summary=torch.nn.Linear(config.hidden_size, 1)))
        self.post_init()

    def forward(self, ids):
        hidden = self.model(ids).last_hidden_state
        return self.v_head['summary'](hidden.float())[..., 0].sigmoid()

    @staticmethod
    def prompt(tokenizer, question: str) -> str:
        return f'{tokenizer.bos_token}{question}\n'

    @staticmethod
    def tag(tokenizer) -> int:
        return tokenizer.encode(SEPARATOR, add_special_tokens=False)[-1]


KINDS = {kind.__name__: kind for kind in (Qwen2ForProcessRewardModel, Qwen2ForPrmModel)}


class RewardModel:
    "A process reward model."

    def __init__(
        self,
        model,  # folder, or name on the Hub
        revision: str | None = None,  # commit on the Hub
        name: str | None = None,  # for tables; None: that of the folder
        dtype: str | None = None,  # None: bfloat16 on a GPU, float32 on a CPU; its head has float32
    ):
        has_gpu = torch.cuda.is_available()
        dtype = dtype or ('bfloat16' if has_gpu else 'float32')
        (architecture,) = AutoConfig.from_pretrained(model, revision=revision).architectures
        if architecture not in KINDS:
            kinds = ' or '.join(KINDS)
            raise ValueError(f'{model} is a {architecture}: a reward model is a {kinds}')
        self.kind = KINDS[architecture]
        net, report = self.kind.from_pretrained(
            model, revision=revision, dtype=dtype, output_loading_info=True
        )
        if report['missing_keys']:
            raise ValueError(f'{model} lacks the weights {sorted(report["missing_keys"])[0]}')
        self.net = net.eval().to('cuda' if has_gpu else 'cpu')
        self.hf = PreTrainedTokenizerFast.from_pretrained(model, revision=revision)
        self.tag = self.kind.tag(self.hf)
        self.context = net.config.max_position_embeddings
        self.spec = ModelSpec(name or Path(str(model)).name, net.num_parameters())
        self.revision = revision
        self.question_ids = lru_cache(1 << 14)(self.question_ids)

    def settings(self) -> dict:
        "What the rewards depend on, as JSON."
        kind = self.kind.__name__
        return dict(reward_model=kind, commit=self.revision, dtype=str(self.net.dtype))

    def question_ids(self, question: str) -> tuple:
        return tuple(self.hf.encode(self.kind.prompt(self.hf, question), add_special_tokens=False))

    def step_ids(self, text: str) -> list:
        "A step writes no special token: a tag in its text is text."
        words = self.hf.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [*words, self.tag]

    @torch.inference_mode()
    def reward(self, requests) -> list:
        "The `Reward` of the last step of each request; None if its chain is longer than the context."
        chains, rewards = [], []
        for request in requests:
            steps = [self.step_ids(step.text) for step in request.steps]
            ids = sum(steps, list(self.question_ids(request.problem.question)))
            chains.append(tuple(ids))
            fits = len(ids) <= self.context
            rewards.append((len(ids), len(steps[-1])) if fits else None)
        fitting = {ids for ids in chains if len(ids) <= self.context}
        values = self.values(sorted(fitting, reverse=True))
        return [bill and Reward(values[ids], *bill) for ids, bill in zip(chains, rewards)]

    def values(self, chains: list) -> dict:  # token ids -> value at the last one
        "A chain comes before its beginnings, which are not read again."
        whole = []
        for ids in chains:
            if not whole or whole[-1][: len(ids)] != ids:
                whole.append(ids)
        read = {}
        for first in range(0, len(whole), BATCH):
            part = whole[first : first + BATCH]
            width = max(map(len, part))
            rows = [[*ids, *[0] * (width - len(ids))] for ids in part]
            right = self.net(torch.tensor(rows, device=self.net.device)).cpu()
            read |= zip(part, five_digits(right).tolist())
        values = {}
        for ids in chains:
            if ids in read:
                longest = read[ids]
            values[ids] = longest[len(ids) - 1]
        return values
