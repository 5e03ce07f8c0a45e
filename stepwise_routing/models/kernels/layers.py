"""The layers of a Qwen2 as compiled loops: norms, gates, rotary positions, attention, sampling.

Here belongs arithmetic on float32 arrays, in an order that never depends on the number of rows. Who calls the layers
belongs in `kernels.qwen`; where keys and values are kept, in `kernels.blocks`.
"""

from functools import lru_cache

import numpy as np
from numba import njit

from .lanes import KERNEL, LANES, every, exp, exponentials, fetch, fma, load, spread, store, total

BLOCK = LANES  # positions whose keys and values are kept together

_F = np.float32


@njit(**KERNEL)
def normed(x, weight, eps, spare, out):
    "RMSNorm of rows."
    n = x.shape[1]
    for i in range(len(x)):
        squares = every(_F(0.0))
        for d in range(i * n, (i + 1) * n, LANES):
            squares = fma(load(x, d), load(x, d), squares)
        scale = every(_F(1.0) / np.sqrt(total(squares, spare) / _F(n) + eps))
        for d in range(0, n, LANES):
            store(out, i * n + d, load(x, i * n + d) * scale * load(weight, d))


@njit(**KERNEL)
def gated(x, out):
    "x [token, 2n], gates and the values that go through them -> silu(gate) times value, out [token, n]."
    n = out.shape[1]
    zero = every(_F(0.0))
    one = every(_F(1.0))
    for i in range(len(x)):
        for d in range(0, n, LANES):
            gate = load(x, 2 * i * n + d)
            value = load(x, (2 * i + 1) * n + d)
            store(out, i * n + d, gate / (one + exp(zero - gate)) * value)


@njit(inline='always', **KERNEL)
def fetch_soon(x, first, n):
    "n numbers from x.flat[first] on are read soon."
    for j in range(first, first + n, LANES):
        fetch(x, j)


@njit(**KERNEL)
def rotate(x, positions, cos, sin, blocks, q, K, V):
    """Rotary position: queries into q [token, head, width], keys and values into their blocks.

    x [token, all heads * width], positions [token], blocks [token].
    """
    H = q.shape[1]
    D = q.shape[2]
    G = K.shape[1]
    half = D // 2
    for i in range(len(x)):
        c = cos[positions[i]]
        s = sin[positions[i]]
        block = blocks[i]
        j = positions[i] % BLOCK
        if i + 1 < len(x):
            fetch_soon(K, blocks[i + 1] * K[0].size, K[0].size)
        for h in range(H):
            for d in range(half):
                a = x[i, h * D + d]
                b = x[i, h * D + half + d]
                q[i, h, d] = a * c[d] - b * s[d]
                q[i, h, half + d] = b * c[d] + a * s[d]
        for g in range(G):
            k = (H + g) * D
            v = (H + G + g) * D
            for d in range(half):
                a = x[i, k + d]
                b = x[i, k + half + d]
                K[block, g, d, j] = a * c[d] - b * s[d]
                K[block, g, half + d, j] = b * c[d] + a * s[d]
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
                        fetch_soon(V, k, D * BLOCK)
                    for d in range(0, D, 2):
                        keys = load(K, k + d * BLOCK)
                        more = load(K, k + (d + 1) * BLOCK)
                        a = fma(spread(q, x + d), keys, a)
                        a1 = fma(spread(q, x + d + 1), more, a1)
                        c = fma(spread(q, y + d), keys, c)
                        c1 = fma(spread(q, y + d + 1), more, c1)
                    store(weights, b * BLOCK, a + a1)
                    store(weights, half + b * BLOCK, c + c1)
                sum_x = exponentials(weights, 0, n, _F(1.0), spare)[1]
                sum_y = exponentials(weights, half, n, _F(1.0), spare)[1]
                for d in range(0, D, LANES):  # out = s V
                    a = zero
                    a1 = zero
                    c = zero
                    c1 = zero
                    for b in range(used):
                        v = (own[b] * G + h * G // H) * D * BLOCK + d
                        w = half + b * BLOCK
                        if d == 0 and own[b] != after[b]:
                            fetch_soon(K, (after[b] * G + h * G // H) * D * BLOCK, D * BLOCK)
                        for j in range(0, BLOCK, 2):
                            values = load(V, v + j * D)
                            more = load(V, v + (j + 1) * D)
                            a = fma(spread(s, w - half + j), values, a)
                            a1 = fma(spread(s, w - half + j + 1), more, a1)
                            c = fma(spread(s, w + j), values, c)
                            c1 = fma(spread(s, w + j + 1), more, c1)
                    store(out, x + d, (a + a1) / every(sum_x))
                    store(out, y + d, (c + c1) / every(sum_y))

    return attend


@njit(**KERNEL)
def draw(z, u, temperature, mass, spare, tokens):
    """Sample by inverse transform; temperature 0 is greedy.

    z [row, vocabulary], uniform numbers u [row] -> tokens [row].
    """
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
def token_confidences(z, tokens, mass, spare, out):
    """Largest logit, probability and entropy.

    z [row, vocabulary], tokens [row] -> out [3, row].
    """
    for i in range(len(z)):
        row = z[i]
        n = z.shape[1]
        weighted = _F(0.0)
        for j in range(n):
            mass[j] = row[j]
        top, whole = exponentials(mass, 0, n, _F(1.0), spare)
        for j in range(n):
            weighted += mass[j] * (row[j] - top)
        out[0, i] = top
        out[1, i] = mass[tokens[i]] / whole
        out[2, i] = np.log(whole) - weighted / whole
