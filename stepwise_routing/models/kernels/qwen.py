"""A Qwen2 at the speed of one core, with the same bits for a token whatever is computed beside it.

Here belongs the checkpoint of a Qwen2 and its forward pass, a `Forward` of the engine. Other models run in
`kernels.padded`.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

from ..interface import draw_rows
from .blocks import Blocks
from .lanes import LANES, linear, panels, product
from .layers import BLOCK, attention, draw, gated, normed, rotate, token_confidences

_F = np.float32


def fits(config: dict) -> bool:  # of config.json
    "Is this a Qwen2 that the kernels compute?"
    rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
    plain = config.get('hidden_act') == 'silu' and rope.get('rope_type', 'default') == 'default'
    if config.get('model_type') != 'qwen2' or config.get('use_sliding_window') or not plain:
        return False
    widths = config['hidden_size'] // config['num_attention_heads'], config['intermediate_size']
    return not any(n % LANES for n in widths)


def _read_json(file):
    "A JSON file as a dict; {} if there is none."
    return json.loads(file.read_text('utf-8')) if file.is_file() else {}


class QwenFolder:
    """A Qwen2 checkpoint as plain tensors in float32.

    It has the attributes of a Hugging Face model that the backends read. Importing the modelling code for them would
    take seconds.
    """

    dtype = torch.float32
    device = torch.device('cpu')

    def __init__(self, folder):
        self.name_or_path = str(folder)
        self.settings = _read_json(folder / 'config.json')
        config = dict(sliding_window=None, max_position_embeddings=32768)
        config |= self.settings
        config['layer_types'] = ()
        self.config = SimpleNamespace(**config)
        generation = dict(eos_token_id=None) | _read_json(folder / 'generation_config.json')
        self.generation_config = SimpleNamespace(**generation)
        self.tensors = {}
        for file in folder.glob('*.safetensors'):
            for name, tensor in load_file(file).items():
                self.tensors[name] = tensor.float()

    def num_parameters(self):
        return sum(t.numel() for t in self.tensors.values())


_ATTENTION = [f'self_attn.{k}_proj' for k in 'qkvo']
_MLP = [f'mlp.{k}_proj' for k in ('gate', 'up', 'down')]
_NAMES = [
    *(f'{name}.weight' for name in _ATTENTION + _MLP),
    *(f'{name}.bias' for name in _ATTENTION[:3]),
    'input_layernorm.weight',
    'post_attention_layernorm.weight',
]


@dataclass(frozen=True)
class Layer:
    "The arrays of one layer, as `lanes.product` reads them."

    norm: np.ndarray  # before attention [hidden]
    qkv: np.ndarray  # `panels` of queries (scaled), keys and values
    qkv_bias: np.ndarray  # [1, output]
    out: np.ndarray  # `panels` behind attention
    mlp_norm: np.ndarray  # before the feed-forward part [hidden]
    gate_up: np.ndarray  # `panels` of gate and up
    no_bias: np.ndarray  # zeros [1, output], for gate and up
    down: np.ndarray  # `panels`


def _layer(tensors, i, heads):
    "The `Layer` number i of a checkpoint."
    arrays = [tensors[f'model.layers.{i}.{name}'].float().numpy() for name in _NAMES]
    q, k, v, out, gate, up, down, q_bias, k_bias, v_bias, norm, mlp_norm = arrays
    qkv = np.concatenate([q, k, v])
    bias = np.concatenate([q_bias, k_bias, v_bias])
    width = len(q) // heads
    for queries in (qkv[: len(q)], bias[: len(q)]):
        queries *= _F(width**-0.5)
    gate_up = np.concatenate([gate, up])
    no_bias = np.zeros((1, len(gate_up)), _F)
    return Layer(
        norm,
        panels(qkv),
        bias[None],
        panels(out),
        mlp_norm,
        panels(gate_up),
        no_bias,
        panels(down),
    )


def _layers(tensors, n, heads):
    "The `Layer`s of a checkpoint. ValueError if a tensor is missing."
    needed = [f'model.layers.{i}.{name}' for i in range(n) for name in _NAMES]
    needed += ['model.embed_tokens.weight', 'model.norm.weight']
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ValueError(
            f'the weights lack {len(missing)} tensors of a Qwen2, such as {missing[0]!r}'
        )
    return [_layer(tensors, i, heads) for i in range(n)]


def reader(*layers):  # weights [N, K] and bias [N] each
    "Linear layers with ReLU between them, as a function of rows: [row, K] -> [row, N]."
    prepared = []
    for weights, bias in layers:
        padded = np.pad(bias, (0, -len(bias) % LANES)).astype(_F)
        prepared.append((panels(weights), padded[None], len(bias)))

    def read(x):
        for i, (weights, bias, n) in enumerate(prepared):
            if i:
                x = np.maximum(x, 0)
            x = linear(x, weights, bias)[:, :n]
        return x

    return read


class QwenModel:
    "A `Forward` for a Qwen2 that `fits`. A row gets the same bits whatever is computed beside it."

    dtype = 'float32'

    def __init__(
        self,
        config: dict,  # of config.json
        tensors: dict,  # name -> tensor of the checkpoint
        rows: int,  # chains in flight at most
        context: int,  # positions of a chain at most
        read=None,  # last hidden states [row, hidden] -> logits; None: the model's own head
    ):
        n_layers = config['num_hidden_layers']
        groups = config['num_key_value_heads']
        self.heads = config['num_attention_heads']
        self.width = config['hidden_size'] // self.heads
        self.eps = _F(config.get('rms_norm_eps', 1e-6))
        self.queue = []
        self.layers = _layers(tensors, n_layers, self.heads)
        self.embed = tensors['model.embed_tokens.weight'].float().numpy()
        self.last_norm = tensors['model.norm.weight'].float().numpy()
        head = tensors.get('lm_head.weight', self.embed)
        self.read = read or reader((head, np.zeros(len(head))))
        self._turn(config, context)
        self.attend = attention(self.width)
        self.blocks = Blocks(n_layers, groups, self.width, rows, context)
        self.scores = np.zeros((2, -(-context // BLOCK) * BLOCK), np.float32)
        self.mass = np.zeros(len(self.embed) + LANES, np.float32)
        self.spare = np.zeros(LANES, np.float32)

    def _turn(self, config, context):
        "Cosines and sines of the rotary positions, [position, width/2]."
        rope = config.get('rope_parameters') or config
        frequencies = rope.get('rope_theta', 1e4) ** -np.arange(0, 1, 2 / self.width)
        angle = np.outer(np.arange(context), frequencies)
        self.cos = np.cos(angle).astype(np.float32)
        self.sin = np.sin(angle).astype(np.float32)

    def norm(self, x, weight):
        out = np.empty_like(x)
        normed(x, weight, self.eps, self.spare, out)
        return out

    def run(self, tokens, slots, positions, skip=0):  # all [token]
        "Last hidden states of the tokens from `skip` on; None: keep keys and values only."
        blocks = self.blocks
        x = self.embed[tokens]
        q = np.empty((len(x), self.heads, self.width), np.float32)
        written = blocks.table[slots, positions // BLOCK]
        used = positions.max() // BLOCK + 1
        order = np.lexsort(blocks.table[slots, :used].T[::-1])
        for i, layer in enumerate(self.layers):
            K = blocks.K[i]
            V = blocks.V[i]
            qkv = linear(self.norm(x, layer.norm), layer.qkv, layer.qkv_bias)
            rotate(qkv, positions, self.cos, self.sin, written, q, K, V)
            if i == len(self.layers) - 1:  # only the tokens that were asked for go on
                if skip is None:
                    return
                x = x[skip:]
                q = q[skip:]
                slots = slots[skip:]
                positions = positions[skip:]
                order = order[order >= skip] - skip
            o = np.empty_like(q)
            lengths = positions + 1
            self.attend(q, K, V, blocks.table, slots, lengths, order, self.scores, self.spare, o)
            product(o.reshape(len(o), -1), layer.out, x, x)
            inner = np.empty((len(x), layer.down.shape[1]), np.float32)
            gated(linear(self.norm(x, layer.mlp_norm), layer.gate_up, layer.no_bias), inner)
            product(inner, layer.down, x, x)
        return self.norm(x, self.last_norm)

    def feed(self, slot, tokens, start):
        self.blocks.reserve(slot, start + len(tokens))
        if tokens:
            self.queue.append((slot, tokens, start))

    def flush(self, size=512, rest=0):
        "Compute the fed tokens, `size` in a pass; at most `rest` tokens are left, and returned."
        columns = _flat(self.queue)
        self.queue = []
        while len(columns[0]) > rest:
            self.run(*(column[:size] for column in columns), skip=None)
            columns = [column[size:] for column in columns]
        return columns

    def is_queued(self, block):
        "Is a fed token still to be written to this block?"
        for slot, tokens, start in self.queue:
            last = start + len(tokens) - 1
            if block in self.blocks.table[slot, start // BLOCK : last // BLOCK + 1]:
                return True
        return False

    def keep(self, slot, n):
        return self.blocks.keep(slot, n)

    def drop(self, handle):
        self.blocks.release(handle.blocks)

    def move(self, slot, to, n):
        self.blocks.move(slot, to)

    def load(self, slot, handle, n):
        if n % BLOCK and self.is_queued(handle.blocks[n // BLOCK]):
            self.flush()  # the block is copied now
        self.blocks.load(slot, handle, n)

    def clear(self, slot):
        self.queue = [fed for fed in self.queue if fed[0] != slot]
        self.blocks.clear(slot)

    def logits(self, slots, tokens, starts):
        self.flush()
        for slot, new, start in zip(slots, tokens, starts):
            self.blocks.reserve(slot, start + len(new))
        columns = _flat(list(zip(slots, tokens, starts)))
        parts = []
        for first in range(0, len(columns[0]), 2048):
            hidden = self.run(*(column[first : first + 2048] for column in columns))
            parts.append(self.read(hidden))
        return torch.from_numpy(np.concatenate(parts))

    def confidences(self, logits, tokens):  # [3, token]
        out = np.empty((3, len(logits)))
        token_confidences(logits.numpy(), np.asarray(tokens), self.mass, self.spare, out)
        return out

    def decode(self, tokens, positions, u, temperature, top_p):
        n = len(tokens)
        for slot in np.flatnonzero(positions >= self.blocks.used[:n] * BLOCK):
            self.blocks.reserve(slot, positions[slot] + 1)
        fed = self.flush(rest=512)
        columns = [np.concatenate(pair) for pair in zip(fed, (tokens, np.arange(n), positions))]
        hidden = self.run(*columns, skip=len(fed[0]))
        logits = torch.from_numpy(self.read(hidden))
        if (top_p == 1).all():
            drawn = np.empty(n, int)
            draw(logits.numpy(), u, temperature, self.mass, self.spare, drawn)
        else:
            drawn = draw_rows(logits.double(), u, temperature, top_p)
        return np.vstack((drawn, self.confidences(logits, drawn))).T, logits


def _flat(queue):  # (slot, tokens, start) each
    "Tokens, slots and positions [token] of fed tokens, one after the other."
    tokens = []
    slots = []
    positions = []
    for slot, new, start in queue:
        tokens += new
        slots += [slot] * len(new)
        positions += range(start, start + len(new))
    return [np.array(column, int) for column in (tokens, slots, positions)]
