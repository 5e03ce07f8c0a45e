"""Reward models: how likely is it that a step is right?

Here belong opening the checkpoints of process reward models, and reading a chain with them. How routers use a reward
belongs in `method.routers`.
"""

import asyncio
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ..records import ModelSpec, chat_prompt, step_texts
from ..util import digest, one_of, run_async
from .engine import Engine, answer_request
from .hub import (
    LocalOptions,
    TransformersBackend,
    context_length,
    convert,
    hub_folder,
    kernel_model,
    load_tokenizer,
    loading,
    micro_path,
    model_folder,
    open_forward,
    room_left,
    tokenizer_sha256,
    weights_sha256,
)
from .interface import Reward, five_digits, prompt_text

# architecture of a checkpoint -> name of its head
LAYOUTS = dict(Qwen2ForProcessRewardModel='score', Qwen2ForPrmModel='v_head.summary')


def reward_head(layout, width):
    "The head of a layout, on hidden states of this width."
    from torch.nn import Linear, ReLU, Sequential

    if layout == 'Qwen2ForPrmModel':
        return Linear(width, 1)
    return Sequential(Linear(width, width), ReLU(), Linear(width, 2))


def read_head(head, hidden):  # [..., width] -> logits of "wrong" and "right" [..., 2]
    from torch import cat, zeros_like

    z = head(hidden.to(next(head.parameters()).dtype))
    return cat((zeros_like(z), z), -1) if z.shape[-1] == 1 else z


@lru_cache(None)
def reward_network(layout):
    "The torch module of a layout. Its logits, for each token, are those of \"wrong\" and \"right\"."
    from torch.nn import ModuleDict
    from transformers import Qwen2Model, Qwen2PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Network(Qwen2PreTrainedModel):
        _keys_to_ignore_on_load_unexpected = [r'^lm_head\.']
        _keep_in_fp32_modules_strict = {'v_head'}

        def __init__(self, config):
            super().__init__(config)
            self.model = Qwen2Model(config)
            head = reward_head(layout, config.hidden_size)
            name, *inner = LAYOUTS[layout].split('.')
            setattr(self, name, ModuleDict({inner[0]: head}) if inner else head)
            self.post_init()

        @property
        def head(self):
            return self.get_submodule(LAYOUTS[layout])

        def forward(self, input_ids=None, **kwargs):
            out = self.model(input_ids=input_ids, **kwargs)
            logits = read_head(self.head, out.last_hidden_state)
            return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    Network.__name__ = layout
    return Network


def _missing_tensors(names, layout):
    return ValueError(f'the weights lack {len(names)} tensors of {layout}, such as {names[0]!r}')


def _with_head(qwen, layout):
    "A `QwenFolder` with the head of a layout on its last hidden states. ValueError if tensors are missing."
    from .kernels.qwen import reader

    head = reward_head(layout, qwen.config.hidden_size)
    prefix = LAYOUTS[layout] + '.'
    tensors = {}
    for name, tensor in qwen.tensors.items():
        if name.startswith(prefix):
            tensors[name.removeprefix(prefix)] = tensor
    missing = [prefix + name for name in head.state_dict() if name not in tensors]
    if missing:
        raise _missing_tensors(missing, layout)
    head.load_state_dict(tensors)
    modules = [m for m in head.modules() if hasattr(m, 'bias')]
    *layers, last = [(m.weight.detach(), m.bias.detach()) for m in modules]
    if len(last[1]) == 1:
        last = [np.concatenate((0 * t, t)) for t in last]  # of "wrong", as `read_head` has it
    qwen.head = head
    qwen.read = reader(*layers, last)
    return qwen


def _open_reward(folder, layout, options):
    "(Hash of the weights, model as it will run). Its head has at least float32. ValueError if tensors are missing."
    import torch

    if qwen := kernel_model(folder, options.dtype):
        return weights_sha256(folder), _with_head(qwen, layout)
    with loading(f'reward model {str(folder)!r} does not load'):
        net, report = reward_network(layout).from_pretrained(
            folder, dtype='auto', output_loading_info=True
        )
    missing = sorted(report['missing_keys'])
    if missing:
        raise _missing_tensors(missing, layout)
    head = [p.data for p in net.head.parameters()]
    convert(net.eval(), options.dtype)
    dtype = torch.promote_types(net.dtype, torch.float32)
    for p, read in zip(net.head.parameters(), head):
        p.data = read.to(net.device, dtype)
    return weights_sha256(folder), net


class ProcessRewardModel:
    "A Qwen2 process reward model with two labels, such as Qwen2.5-Math-PRM or the micro one."

    layout = 'Qwen2ForProcessRewardModel'
    close = TransformersBackend.close

    def __init__(
        self,
        folder,  # of a checkpoint of the layout, with its tokenizer
        tag: str
        | None = None,  # token that ends each step; the reward is read there; None = the layout's own
        name: str | None = None,  # for tables and settings; None = the folder's name
        **options,  # of `LocalOptions`: context, dtype, batch_size=64, prefix_mib=512
    ):
        options = LocalOptions(**dict(batch_size=64, prefix_mib=512) | options)
        self.weights, hf = _open_reward(folder, self.layout, options)
        self.hf = load_tokenizer(folder)
        self.tag = self.default_tag() if tag is None else tag
        self.tag_id = self.read_tag()
        self.context = context_length(hf.config, options.context)
        self.prompt = lru_cache(4096)(self.prompt)
        self.encode = lru_cache(1 << 16)(self.encode)
        self.spec = ModelSpec(name or Path(folder).name, hf.num_parameters())
        forward = open_forward(hf, options.batch_size, self.context)
        options = replace(options, max_tokens=1, context=self.context)
        self.engine = Engine(self.spec.name, forward, SimpleNamespace(vocab=2), options)

    def default_tag(self):
        return '<extra_0>' if '<extra_0>' in self.hf.get_vocab() else '\n\n'

    def read_tag(self):  # its token id
        ids = self.hf.encode(self.tag, add_special_tokens=False)
        if len(ids) == 1:
            return ids[0]
        raise ValueError(
            f'tag {self.tag!r} is {len(ids)} tokens of this tokenizer: pass tag=<a single token>'
        )

    def prompt(self, question):  # token ids
        return tuple(
            self.hf.encode(prompt_text(self.hf, chat_prompt(question)), add_special_tokens=False)
        )

    def encode(self, text):  # token ids of a text in which no special token is recognised
        text = text.encode('utf-8', 'replace').decode()
        return tuple(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def chain_ids(self, problem, steps):
        "(Token ids of prompt and steps, number of ids of the last step)."
        if not steps:
            raise ValueError(
                f'problem {problem.id!r}: the chain has no step, so there is nothing to reward'
            )
        parts = [[*self.encode(text), self.tag_id] for text in step_texts(steps)]
        return sum(parts, list(self.prompt(problem.question))), len(parts[-1])

    async def reward(self, problem, steps):
        "The `Reward` of the last step. `NoRoom` if the chain is longer than the context."
        ids, new = self.chain_ids(problem, steps)
        room_left(self, ids[:-new], new, f'problem {problem.id!r}, step {len(steps) - 1}')
        scores = await answer_request(self, ids, answers=(1,))  # token 1, "right", as the next one
        return Reward(float(five_digits(scores[1])[0]), len(ids), new)

    def settings(self):
        "What the rewards depend on, as JSON."
        return dict(
            reward_model=self.layout,
            name=self.spec.name,
            weights=self.weights,
            tag=self.tag,
            dtype=self.engine.forward.dtype,
            forward=type(self.engine.forward).__name__,
            tokenizer=tokenizer_sha256(self.hf),
            prompt=digest(*self.prompt('?')),
        )


class SkyworkPRM(ProcessRewardModel):
    "Skywork-o1-Open-PRM. It has one value per token, read at the last token of the tag."

    layout = 'Qwen2ForPrmModel'

    def read_tag(self):
        ids = self.hf.encode(self.tag, add_special_tokens=False)
        if not ids:
            raise ValueError(f'tag {self.tag!r} has no token: pass tag="\\n\\n" (as RSD) or "\\n"')
        return ids[-1]

    def prompt(self, question):
        start = self.hf.bos_token
        name = self.spec.name
        if not start:
            raise ValueError(
                f'the tokenizer of {name} has no bos_token, with which its input begins'
            )
        return tuple(self.hf.encode(f'{start}{question}\n', add_special_tokens=False))


_PRMS = 'micro-prm', 'Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B', 'Qwen/Qwen2.5-Math-PRM-7B'


def _kind_of(folder):
    "The class for a checkpoint. ValueError if it has neither of the two layouts."
    architectures = json.loads((folder / 'config.json').read_text()).get('architectures') or []
    for kind in (ProcessRewardModel, SkyworkPRM):
        if kind.layout in architectures:
            return kind
    raise ValueError(
        f'{folder}: no reward model of a known layout ({" or ".join(LAYOUTS)}), but {architectures}'
    )


def load_prm(
    model='micro-prm',  # "micro-prm" (shipped), a folder, or a name on the Hub
    **options,  # of `ProcessRewardModel`: tag, dtype, batch_size, ...
) -> ProcessRewardModel:
    "Open a reward model. ValueError for an unknown layout, FileNotFoundError for a missing folder."
    shipped = model == 'micro-prm'
    if not shipped and '/' not in str(model) and not Path(model).exists():
        one_of('reward model', str(model), _PRMS)
    if shipped:
        folder = micro_path('small').parent / 'prm'
    else:
        folder = model_folder(model) or hub_folder(model)
    return _kind_of(folder)(folder, **dict(name=Path(model).name) | options)


def step_rewards(prm, cases) -> list:  # float array [step] per case
    "Rewards of all steps of many chains at once. `cases` are (problem, steps) pairs."

    async def read_chain(problem, steps):
        prefixes = [steps[: i + 1] for i in range(len(steps))]
        return await asyncio.gather(*(prm.reward(problem, prefix) for prefix in prefixes))

    async def read_all():
        return await asyncio.gather(*(read_chain(p, steps) for p, steps in cases))

    return [np.array([r.value for r in rewards]) for rewards in run_async(read_all())]
