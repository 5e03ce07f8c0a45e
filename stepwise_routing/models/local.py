"""Any causal language model of Hugging Face on this machine, many chains at once.

A step's random numbers come from its seed, so its draw does not depend on the chains beside it.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedTokenizerFast

from ..records import ModelSpec, Step
from .base import (
    Preference,
    Request,
    StepTokenizer,
    confidences,
    draw_tokens,
    five_digits,
    uniforms,
)

PROMPTS = 16  # computed in one pass


def attend(module, query, key, value, mask, scaling=None, **_):
    "Attention that does not copy keys and values for the heads that share them, as transformers' own does."
    shape = query.shape  # [row, head, query, width]
    if shape[2] == 1:  # heads that share keys become queries of one head
        query = query.view(shape[0], key.shape[1], -1, shape[3])
        out = scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    else:
        is_causal = mask is None
        options = dict(scale=scaling, enable_gqa=True, is_causal=is_causal)
        out = scaled_dot_product_attention(query, key, value, mask, **options)
    return out.view(shape).transpose(1, 2), None


AttentionInterface.register('attend', attend)


class Slots:
    "Keys and values [layer, 2, slot, head, position, width] of many chains; a model takes it for its cache."

    def __init__(self, cache, rows: int):  # a cache of the model, for its shapes
        keys = cache.layers[0].keys
        self.kv = keys.new_zeros(len(cache.layers), 2, rows, keys.shape[1], 256, keys.shape[3])

    def aim(self, positions):
        "The next pass writes one token in each of the first slots, at `positions` [slot]. Returns its mask."
        self.cells = torch.arange(len(positions), device=positions.device), positions
        self.reach(int(positions.max()) + 1)
        seen = torch.arange(self.columns, device=positions.device) <= positions[:, None]
        return self.kv.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None, None]

    def reach(self, columns: int):
        "Make room for so many positions."
        self.columns = columns
        while columns > self.kv.shape[4]:
            self.kv = torch.cat((self.kv, torch.zeros_like(self.kv)), 4)

    def update(self, keys, values, layer, *_, **__):
        "Each layer stores what is new, and gets all."
        rows, positions = self.cells
        self.kv[layer, 0, rows, :, positions] = keys[:, :, 0]
        self.kv[layer, 1, rows, :, positions] = values[:, :, 0]
        return self.kv[layer, :, : len(rows), :, : self.columns]

    def load(self, first: int, cache, rows: list):
        "Copy rows of a model's own cache into the slots from `first` on."
        n = cache.get_seq_length()
        self.reach(n)
        for kv, layer in zip(self.kv[:, :, first : first + len(rows), :, :n], cache.layers):
            kv[0], kv[1] = layer.keys[rows], layer.values[rows]

    def move(self, source: int, target: int):
        self.kv[:, :, target] = self.kv[:, :, source]

    def get_seq_length(self, *_):
        return self.columns

    def get_mask_sizes(self, *_):
        return self.columns, 0


@dataclass(eq=False)
class Draft:
    "A chain that is being written."

    request: Request
    ids: list  # prompt and finished steps
    steps: list = field(default_factory=list)
    drawn: list = field(default_factory=list)  # of this step: [token, logit, prob, entropy] each
    u: list = ()  # random numbers of this step; as many as it may have tokens

    @property
    def is_full(self) -> bool:
        return len(self.drawn) == len(self.u)

    @property
    def last_token(self) -> int:
        return self.drawn[-1][0] if self.drawn else self.ids[-1]


class LocalModel:
    "A language model $M_k$ on this machine's CPU or GPU."

    has_step_seeds = True
    on_step = None  # called with (request, its steps so far) after each step, if somebody sets it

    def __init__(
        self,
        model,  # folder, or name on the Hub
        index: int = 0,  # place among the models
        name: str | None = None,  # for tables; None: that of the folder
        revision: str | None = None,  # commit on the Hub
        temperature: float = 0.7,  # of sampling; 0 = greedy
        top_p: float = 1.0,
        max_tokens: int = 512,  # of a step
        context: int | None = None,  # tokens of prompt and chain; None: all the model has
        batch: int = 128,  # chains in flight
        dtype: str | None = None,  # None: bfloat16 on a GPU, float32 on a CPU
        template: dict | None = None,  # of the chat template, such as enable_thinking=False
    ):
        has_gpu = torch.cuda.is_available()
        dtype = dtype or ('bfloat16' if has_gpu else 'float32')
        net = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=dtype)
        self.context = context or getattr(net.config, 'max_position_embeddings', 0)
        layers = {*getattr(net.config, 'layer_types', ())} - {'full_attention'}
        window = getattr(net.config, 'sliding_window', None) or self.context
        if layers or window < self.context or not net._supports_sdpa:
            raise ValueError(
                f'{model}: only models with full attention in all layers run here; use vLLM'
            )
        self.net = net.eval().to('cuda' if has_gpu else 'cpu')
        self.net.set_attn_implementation('attend')
        self.spec = ModelSpec(name or Path(str(model)).name, net.num_parameters())
        self.index = index
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model, revision=revision)
        eos = net.generation_config.eos_token_id
        self.text = StepTokenizer(tokenizer, eos, net.config.vocab_size, **(template or {}))
        self.sampling = temperature, top_p
        self.max_tokens = max_tokens
        self.batch = batch
        self.slots = None
        self.drafts = []  # the first slots hold them, in this order

    def settings(self) -> dict:
        "What the draws depend on, as JSON."
        temperature, top_p = self.sampling
        return dict(
            backend='transformers',
            commit=getattr(self.net.config, '_commit_hash', None),
            dtype=str(self.net.dtype),
            temperature=temperature,
            top_p=top_p,
            max_tokens=self.max_tokens,
            context=self.context,
            template=self.text.template,
        )

    def tensor(self, rows):
        return torch.tensor(rows, device=self.net.device)

    def padded(self, rows):
        "Token ids of different lengths as one tensor. What stands behind the end of a row changes nothing in it."
        width = max(map(len, rows))
        return self.tensor([[*ids, *[0] * (width - len(ids))] for ids in rows])

    # ---- writing

    @torch.inference_mode()
    def write(self, requests) -> list:
        "A tuple of `Step`s per request: one, or several if the request is `to_end`."
        drafts = [Draft(r, self.text.prefix_ids(r.problem, r.steps)) for r in requests]
        waiting = [draft for draft in drafts if self.begin(draft)]
        waiting.sort(key=lambda draft: draft.ids, reverse=True)  # a prompt before its beginnings
        try:
            while waiting or self.drafts:
                free = self.batch - len(self.drafts)
                if waiting and free >= min(max(self.batch // 8, 1), len(waiting)):
                    self.enter(waiting[:free])
                    del waiting[:free]
                self.turn()
        finally:
            self.drafts, self.slots = [], None
        return [tuple(draft.steps) for draft in drafts]

    def begin(self, draft: Draft) -> bool:
        "Start the next step of a draft; False if there is no room for it."
        room = min(self.max_tokens, self.context - len(draft.ids))
        if room <= 0:
            draft.steps.append(Step('', self.index, 'length', prompt=len(draft.ids)))
            return False
        seed = draft.request.seed(len(draft.steps), self.index)
        draft.drawn = []
        draft.u = uniforms(seed, room).tolist()
        return True

    def enter(self, new: list):
        "Compute the prompts of drafts. One that begins the prompt before it is not computed again."
        for first in range(0, len(new), PROMPTS):
            drafts = new[first : first + PROMPTS]
            prompts, sources = [], []
            for draft in drafts:
                if not prompts or prompts[-1][: len(draft.ids)] != draft.ids:
                    prompts.append(draft.ids)
                sources.append(len(prompts) - 1)
            cache = self.net.base_model(self.padded(prompts), use_cache=True).past_key_values
            if self.slots is None:
                self.slots = Slots(cache, self.batch)
            self.slots.load(len(self.drafts), cache, sources)
            self.drafts += drafts

    def turn(self):
        "Write one token in each draft, then settle those whose step may have ended."
        drafts = self.drafts
        positions = self.tensor([len(draft.ids) + len(draft.drawn) - 1 for draft in drafts])
        out = self.net(
            input_ids=self.tensor([[draft.last_token] for draft in drafts]),
            position_ids=positions[:, None],
            attention_mask=self.slots.aim(positions),
            past_key_values=self.slots,
            use_cache=True,
        )
        logits = out.logits[:, -1].float()
        u = [draft.u[len(draft.drawn)] for draft in drafts]
        u = torch.tensor(u, dtype=torch.float64, device=logits.device)
        tokens = draw_tokens(logits, u, *self.sampling)
        numbers = confidences(logits, tokens).T.tolist()
        may_end = self.text.closing[tokens.cpu().numpy()]
        tokens = tokens.tolist()
        for slot in reversed(range(len(drafts))):
            draft = drafts[slot]
            draft.drawn.append([tokens[slot], *numbers[slot]])
            if may_end[slot] or draft.is_full:
                self.settle(slot)

    def settle(self, slot: int):
        "If a draft's step has ended, keep it; then begin the next step, or give the slot to the last draft."
        draft = self.drafts[slot]
        ids, *numbers = zip(*draft.drawn)
        parts = draft.request, self.index, ids, numbers, len(draft.ids), draft.is_full
        step = self.text.step(*parts)
        if step is None:
            return
        draft.steps.append(step)
        if self.on_step:
            self.on_step(draft.request, tuple(draft.steps))
        draft.ids += step.ids
        goes_on = step.finish == 'step' and len(draft.steps) < draft.request.room
        if goes_on and self.begin(draft):
            return
        last = self.drafts.pop()
        if last is not draft:
            self.slots.move(len(self.drafts), slot)
            self.drafts[slot] = last

    # ---- reading

    def read(self, prompt, reply):
        "Logits [token, vocabulary] with which the tokens of a reply are predicted, of token ids."
        ids = self.tensor([[*prompt, *reply[:-1]]])
        return self.net(ids, logits_to_keep=len(reply)).logits[0].float()

    @torch.inference_mode()
    def score(self, requests) -> list:
        "Per request, its last step with this model's confidences."
        scored = []
        for request in requests:
            prompt, ids = self.text.last_step_ids(request)
            numbers = confidences(self.read(prompt, ids), self.tensor(ids)).cpu()
            scored.append(self.text.scored(request.steps[-1], prompt, ids, numbers))
        return scored

    @torch.inference_mode()
    def choose(self, conversations, options) -> list:
        "A `Preference` per conversation: how likely each option is as the reply, by its first token."
        options = [self.text.encode(option)[0] for option in options]
        prompts = [self.text.messages_ids(messages) for messages in conversations]
        fitting = [i for i, ids in enumerate(prompts) if len(ids) < self.context]
        preferences = [None] * len(prompts)
        for first in range(0, len(fitting), PROMPTS):
            part = fitting[first : first + PROMPTS]
            ends = [len(prompts[i]) - 1 for i in part]
            kept = sorted(set(ends))
            ids = self.padded([prompts[i] for i in part])
            logits = self.net(ids, logits_to_keep=self.tensor(kept)).logits.float()
            for row, (i, end) in enumerate(zip(part, ends)):
                prob = logits[row, kept.index(end), options].softmax(-1).cpu()
                shared = self.text.shared(conversations[i], prompts[i])
                prob = tuple(five_digits(prob).tolist())
                preferences[i] = Preference(prob, len(prompts[i]), shared=shared)
        return preferences
