"""Small models at the speed of one core, with the same bits for a token whatever is computed beside it"""

import json
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch
from numba import njit
from safetensors.torch import load_file

from ..interface import draw_rows
from .lanes import (
    KERNEL,
    LANES,
    every,
    exp,
    exponentials,
    fetch,
    fma,
    linear,
    load,
    panels,
    product,
    spread,
    store,
    total,
)

BLOCK = LANES  # positions that are kept together

_F = np.float32


@njit(**KERNEL)
def _normed(x, weight, eps, spare, out):  # RMSNorm of rows
    n = x.shape[1]
    for i in range(len(x)):
        squares = every(_F(0.0))
        for d in range(i * n, (i + 1) * n, LANES):
            squares = fma(load(x, d), load(x, d), squares)
        scale = every(_F(1.0) / np.sqrt(total(squares, spare) / _F(n) + eps))
        for d in range(0, n, LANES):
            store(out, i * n + d, load(x, i * n + d) * scale * load(weight, d))


@njit(**KERNEL)
def _gated(
    x, out
):  # x [token, 2n]: gates, and what goes through them -> silu(gate) times it [token, n]
    n = out.shape[1]
    one = every(_F(1.0))
    for i in range(len(x)):
        for d in range(0, n, LANES):
            gate = load(x, 2 * i * n + d)
            store(
                out,
                i * n + d,
                gate / (one + exp(every(_F(0.0)) - gate)) * load(x, (2 * i + 1) * n + d),
            )


@njit(inline='always', **KERNEL)
def _near(x, first, n):  # to be read soon: n numbers from x.flat[first] on
    for j in range(first, first + n, LANES):
        fetch(x, j)


@njit(**KERNEL)
def _rotate(
    x, at, cos, sin, blocks, q, K, V
):  # x [token, all heads * width], at [token], blocks [token]
    "Rotary position: queries into q [token, head, width], keys and values into their blocks."
    H = q.shape[1]
    D = q.shape[2]
    G = K.shape[1]
    half = q.shape[2] // 2
    for i in range(len(x)):
        c = cos[at[i]]
        s = sin[at[i]]
        block = blocks[i]
        j = at[i] % BLOCK
        if i + 1 < len(x):
            _near(K, blocks[i + 1] * K[0].size, K[0].size)
        for h in range(H):
            for d in range(half):
                a = x[i, h * D + d]
                b = x[i, h * D + half + d]
                q[i, h, d], q[i, h, half + d] = a * c[d] - b * s[d], b * c[d] + a * s[d]
        for g in range(G):
            k = (H + g) * D
            v = (H + G + g) * D
            for d in range(half):
                a = x[i, k + d]
                b = x[i, k + half + d]
                K[block, g, d, j], K[block, g, half + d, j] = (
                    a * c[d] - b * s[d],
                    b * c[d] + a * s[d],
                )
            for d in range(D):
                V[block, g, j, d] = x[i, v + d]


@lru_cache(None)
def attention(D):  # width of a head, known when the kernel is compiled
    "The attention of one token after the other, each over the blocks of its own row."

    @njit(**KERNEL)
    def attend(q, K, V, table, rows, lengths, order, s, spare, out):  # s [2, position]
        H = q.shape[1]
        G = K.shape[1]
        half = s.shape[1]
        zero = every(_F(0.0))
        pair = 2 - H // G % 2
        weights = s.ravel()  # heads that go together
        for o, i in enumerate(order):
            before = table[rows[order[max(o - 1, 0)]]]
            after = table[rows[order[min(o + 1, len(order) - 1)]]]
            n = lengths[i]
            own = table[rows[i]]
            used = (lengths[i] + BLOCK - 1) // BLOCK
            for h in range(0, H, pair):
                x = (i * H + h) * D
                y = (i * H + h + pair - 1) * D
                for b in range(used):  # s = x K
                    k = (own[b] * G + h * G // H) * D * BLOCK
                    a = zero
                    a1 = zero
                    c = zero
                    c1 = zero
                    if own[b] != before[b]:
                        _near(V, k, D * BLOCK)
                    for d in range(0, D, 2):
                        keys = load(K, k + d * BLOCK)
                        more = load(K, k + (d + 1) * BLOCK)
                        a = fma(spread(q, x + d), keys, a)
                        a1 = fma(spread(q, x + d + 1), more, a1)
                        c = fma(spread(q, y + d), keys, c)
                        c1 = fma(spread(q, y + d + 1), more, c1)
                    store(weights, b * BLOCK, a + a1)
                    store(weights, half + b * BLOCK, c + c1)
                sums = (
                    exponentials(weights, 0, n, _F(1.0), spare)[1],
                    exponentials(weights, half, n, _F(1.0), spare)[1],
                )
                for d in range(0, D, LANES):  # out = s V
                    a = zero
                    a1 = zero
                    c = zero
                    c1 = zero
                    for b in range(used):
                        v = (own[b] * G + h * G // H) * D * BLOCK + d
                        w = half + b * BLOCK
                        if d == 0 and own[b] != after[b]:
                            _near(K, (after[b] * G + h * G // H) * D * BLOCK, D * BLOCK)
                        for j in range(0, BLOCK, 2):
                            values = load(V, v + j * D)
                            more = load(V, v + (j + 1) * D)
                            a = fma(spread(s, w - half + j), values, a)
                            a1 = fma(spread(s, w - half + j + 1), more, a1)
                            c = fma(spread(s, w + j), values, c)
                            c1 = fma(spread(s, w + j + 1), more, c1)
                    store(out, x + d, (a + a1) / every(sums[0]))
                    store(out, y + d, (c + c1) / every(sums[1]))

    return attend


@njit(**KERNEL)
def _draw(
    z, u, temperature, mass, spare, tokens
):  # z [row, vocabulary]; numbers [row] -> tokens [row]
    "Sample by inverse transform, one uniform number a row; temperature 0 is greedy."
    for i in range(len(z)):
        n = z.shape[1]
        if temperature[i] == 0:
            tokens[i] = z[i].argmax()
        else:
            for j in range(n):
                mass[j] = z[i, j]
            exponentials(mass, 0, n, _F(1 / temperature[i]), spare)
            whole = 0.0
            run = 0.0
            for j in range(n):
                whole += mass[j]
            for j in range(n):
                run += mass[j]
                tokens[i] = j
                if run > u[i] * whole:
                    break


@njit(**KERNEL)
def _confidences(z, tokens, mass, spare, out):  # z [row, vocabulary], tokens [row] -> out [4, row]
    "Largest logit, probability of the token, its rank, entropy of the distribution."
    for i in range(len(z)):
        row = z[i]
        n = z.shape[1]
        rank = 1
        spread = _F(0.0)
        for j in range(n):
            mass[j] = row[j]
        top, whole = exponentials(mass, 0, n, _F(1.0), spare)
        for j in range(n):
            spread += mass[j] * (row[j] - top)
        for j in range(n):
            rank += row[j] > row[tokens[i]]
        out[0, i], out[1, i], out[2, i], out[3, i] = (
            top,
            mass[tokens[i]] / whole,
            rank,
            np.log(whole) - spread / whole,
        )


def fits(config: dict) -> bool:  # of config.json
    "Is this a Qwen2 that the kernels compute?"
    rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
    plain = config.get('hidden_act') == 'silu' and rope.get('rope_type', 'default') == 'default'
    if config.get('model_type') != 'qwen2' or config.get('use_sliding_window') or not plain:
        return False
    widths = config['hidden_size'] // config['num_attention_heads'], config['intermediate_size']
    return not any(n % LANES for n in widths)


class QwenFolder:
    "A Qwen2 checkpoint as plain tensors in float32: importing the modelling code for it would take seconds."

    dtype = torch.float32
    device = torch.device('cpu')
    generation_config = SimpleNamespace(eos_token_id=None)

    def __init__(self, folder):
        read = lambda name: (
            json.loads((folder / name).read_text('utf-8')) if (folder / name).is_file() else {}
        )
        self.name_or_path = str(folder)
        self.settings = read('config.json')
        defaults = dict(sliding_window=None, max_position_embeddings=32768)
        self.config = SimpleNamespace(**defaults | self.settings | dict(layer_types=()))
        self.generation_config = SimpleNamespace(
            **dict(eos_token_id=None) | read('generation_config.json')
        )
        self.tensors = {
            k: t.float()
            for file in folder.glob('*.safetensors')
            for k, t in load_file(file).items()
        }

    def num_parameters(self):
        return sum(t.numel() for t in self.tensors.values())


_MATRICES = [f'self_attn.{k}_proj' for k in 'qkvo'] + [
    f'mlp.{k}_proj' for k in ('gate', 'up', 'down')
]

_NAMES = [
    *(f'{m}.weight' for m in _MATRICES),
    *(f'{m}.bias' for m in _MATRICES[:3]),
    'input_layernorm.weight',
    'post_attention_layernorm.weight',
]


def _layers(tensors, n, heads):
    "Per layer its eight arrays; queries (scaled), keys and values are one, and so are gate and up."
    due = [f'model.layers.{i}.{name}' for i in range(n) for name in _NAMES]
    due += ['model.embed_tokens.weight', 'model.norm.weight']
    lost = [k for k in due if k not in tensors]
    if lost:
        raise ValueError(f'the weights lack {len(lost)} tensors of a Qwen2, such as {lost[0]!r}')
    for i in range(n):
        *w, q, k, v, norm, norm_2 = (
            tensors[f'model.layers.{i}.{name}'].float().numpy() for name in _NAMES
        )
        qkv = np.concatenate(w[:3])
        bias = np.concatenate([q, k, v])
        for t in (qkv, bias):
            t[: len(q)] *= _F((len(q) // heads) ** -0.5)
        up = np.concatenate(w[4:6])
        yield (
            norm,
            panels(qkv),
            bias[None],
            panels(w[3]),
            norm_2,
            panels(up),
            np.zeros((1, len(up)), _F),
            panels(w[6]),
        )


def reader(*layers):  # weights [N, K] and bias [N] each
    "Linear layers with ReLU between them, as a function of rows: [row, K] -> [row, N]."
    layers = [
        (panels(w), np.pad(b, (0, -len(b) % LANES)).astype(_F)[None], len(b)) for w, b in layers
    ]

    def read(x):
        for i, (w, bias, n) in enumerate(layers):
            x = linear(np.maximum(x, 0) if i else x, w, bias)[:, :n]
        return x

    return read


@dataclass(frozen=True)
class _Kept:
    blocks: np.ndarray
    nbytes: int


class Blocks:
    "Keys and values in blocks of sixteen positions; rows and handles that begin alike share theirs."

    def __init__(self, layers, groups, width, rows, context):
        n = max(
            8 * rows, (1 << 26) // (layers * groups * width * BLOCK)
        )  # at first; memory is taken when it is written
        self.K, self.V = (
            np.zeros((layers, n, groups, *s), np.float32) for s in ((width, BLOCK), (BLOCK, width))
        )
        self.table = np.zeros((rows, context // BLOCK + 1), np.int64)
        self.used = np.zeros(rows, int)  # blocks of each row
        self.owners = np.zeros(n, int)
        self.free = list(range(n))

    def reserve(self, place, n):  # room for n positions
        while self.used[place] * BLOCK < n:
            if not self.free:
                self.grow()
            block = self.free.pop()
            self.owners[block] = 1
            self.table[place, self.used[place]] = block
            self.used[place] += 1

    def grow(self):  # twice as many
        n = len(self.owners)
        self.K, self.V = (np.concatenate((t, np.zeros_like(t)), 1) for t in (self.K, self.V))
        self.owners = np.concatenate((self.owners, np.zeros(n, int)))
        self.free += range(n, 2 * n)

    def release(self, blocks):
        self.owners[blocks] -= 1
        self.free += blocks[self.owners[blocks] == 0].tolist()

    def keep(self, place, n):
        blocks = self.table[place, : -(-n // BLOCK)].copy()
        self.owners[blocks] += 1
        return _Kept(blocks, len(blocks) * 2 * self.K[:, 0].nbytes)

    def load(self, place, kept, n):  # whole blocks are shared, the rest is copied
        whole = n // BLOCK
        self.table[place, :whole], self.used[place] = kept.blocks[:whole], whole
        self.owners[kept.blocks[:whole]] += 1
        self.reserve(place, n)
        if n % BLOCK:
            for t in (self.K, self.V):
                t[:, self.table[place, whole]] = t[:, kept.blocks[whole]]

    def clear(self, place):
        self.release(self.table[place, : self.used[place]])
        self.used[place] = 0

    def move(self, place, to):  # to a place that is clear
        self.table[to], self.used[to], self.used[place] = self.table[place], self.used[place], 0


class QwenModel:
    "A `Forward` for a Qwen2 that `fits`. What a row comes to has the same bits whatever is computed beside it."

    dtype = 'float32'

    def __init__(
        self, config, tensors, rows, context, read=None
    ):  # config.json; rows and their positions, at most
        n = config['num_hidden_layers']
        self.heads = config['num_attention_heads']
        self.queue = []
        self.width = config['hidden_size'] // self.heads
        self.eps = _F(config.get('rms_norm_eps', 1e-6))
        self.layers = list(_layers(tensors, n, self.heads))
        self.embed, self.last_norm = (
            tensors[f'model.{k}.weight'].float().numpy() for k in ('embed_tokens', 'norm')
        )
        head = tensors.get('lm_head.weight', self.embed)
        self.read = read or reader((head, np.zeros(len(head))))  # last hidden states -> logits
        rope = config.get('rope_parameters') or config
        angle = np.outer(
            np.arange(context), rope.get('rope_theta', 1e4) ** -np.arange(0, 1, 2 / self.width)
        )
        self.cos = np.cos(angle).astype(np.float32)
        self.sin = np.sin(angle).astype(np.float32)
        self.attend = attention(self.width)
        groups = config['num_key_value_heads']
        self.blocks = Blocks(n, groups, self.width, rows, context)
        shapes = (2, -(-context // BLOCK) * BLOCK), len(self.embed) + LANES, LANES
        self.scores, self.mass, self.spare = (np.zeros(shape, np.float32) for shape in shapes)

    def norm(self, x, weight):
        out = np.empty_like(x)
        _normed(x, weight, self.eps, self.spare, out)
        return out

    def keep(self, place, n):
        return self.blocks.keep(place, n)

    def drop(self, kept):
        self.blocks.release(kept.blocks)

    def move(self, place, to, n):
        self.blocks.move(place, to)

    def run(self, tokens, places, at, skip=0):  # all [token]
        "Last hidden states of the tokens from `skip` on; None skips all: keys and values only."
        b = self.blocks
        x = self.embed[tokens]
        q = np.empty((len(x), self.heads, self.width), np.float32)
        blocks = b.table[places, at // BLOCK]
        order = np.lexsort(b.table[places, : at.max() // BLOCK + 1].T[::-1])
        for i, (norm, qkv, bias, out, norm_2, up, none, down) in enumerate(self.layers):
            _rotate(
                linear(self.norm(x, norm), qkv, bias),
                at,
                self.cos,
                self.sin,
                blocks,
                q,
                b.K[i],
                b.V[i],
            )
            if i == len(self.layers) - 1:  # only the asked-for go on
                if skip is None:
                    return
                x = x[skip:]
                q = q[skip:]
                places = places[skip:]
                at = at[skip:]
                order = order[order >= skip] - skip
            o = np.empty_like(q)
            self.attend(
                q, b.K[i], b.V[i], b.table, places, at + 1, order, self.scores, self.spare, o
            )
            product(o.reshape(len(o), -1), out, x, x)
            gated = np.empty((len(x), down.shape[1]), np.float32)
            _gated(linear(self.norm(x, norm_2), up, none), gated)
            product(gated, down, x, x)
        return self.norm(x, self.last_norm)

    def feed(self, place, tokens, start):
        self.blocks.reserve(place, start + len(tokens))
        if tokens:
            self.queue.append((place, tokens, start))

    def flush(self, most=512, rest=0):  # tokens of a pass
        "Compute what was fed, but for at most `rest` tokens: these are returned."
        flat = _flat(self.queue)
        self.queue = []
        while len(flat[0]) > rest:
            self.run(*(a[:most] for a in flat), skip=None)
            flat = [a[most:] for a in flat]
        return flat

    def awaited(self, block):  # is something that was fed still to be written there?
        return any(
            block in self.blocks.table[p, start // BLOCK : (start + len(tokens) - 1) // BLOCK + 1]
            for p, tokens, start in self.queue
        )

    def load(self, place, kept, n):
        if n % BLOCK and self.awaited(kept.blocks[n // BLOCK]):
            self.flush()  # it is copied now
        self.blocks.load(place, kept, n)

    def clear(self, place):
        self.queue = [q for q in self.queue if q[0] != place]
        self.blocks.clear(place)

    def logits(self, places, tokens, starts):
        self.flush()
        for p, t, s in zip(places, tokens, starts):
            self.blocks.reserve(p, s + len(t))
        flat = _flat(list(zip(places, tokens, starts)))
        parts = [slice(i, i + 2048) for i in range(0, len(flat[0]), 2048)]
        return torch.from_numpy(
            np.concatenate([self.read(self.run(*(a[part] for a in flat))) for part in parts])
        )

    def confidences(self, logits, tokens):  # [4, token]
        out = np.empty((4, len(logits)))
        _confidences(logits.numpy(), np.asarray(tokens), self.mass, self.spare, out)
        return out

    def decode(self, tokens, at, u, temperature, top_p):
        n = len(tokens)
        for place in np.flatnonzero(at >= self.blocks.used[:n] * BLOCK):
            self.blocks.reserve(place, at[place] + 1)
        fed = self.flush(rest=512)
        joined = [np.concatenate(pair) for pair in zip(fed, (tokens, np.arange(n), at))]
        logits = torch.from_numpy(self.read(self.run(*joined, skip=len(fed[0]))))
        drawn = np.empty(n, int)
        if (top_p == 1).all():
            _draw(logits.numpy(), u, temperature, self.mass, self.spare, drawn)
        else:
            drawn = draw_rows(logits.double(), u, temperature, top_p)
        return np.vstack((drawn, self.confidences(logits, drawn))).T, logits


def _flat(queue):  # (place, tokens, start) each -> tokens, places, positions [token]
    n = [len(tokens) for _, tokens, _ in queue]
    at = np.concatenate(
        [np.arange(start, start + k) for (_, _, start), k in zip(queue, n)] or [np.zeros(0, int)]
    )
    tokens = np.concatenate([[], *(tokens for _, tokens, _ in queue)]).astype(int)
    return tokens, np.repeat([place for place, *_ in queue], n).astype(int), at
