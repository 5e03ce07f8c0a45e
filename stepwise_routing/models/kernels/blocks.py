"""Where the keys and values of many chains are kept: blocks of sixteen positions, shared by equal beginnings.

Here belongs who owns which block. What is computed with keys and values belongs in `kernels.layers`.
"""

from dataclasses import dataclass

import numpy as np

from .layers import BLOCK


@dataclass(frozen=True)
class KeptPrefix:
    "A handle to the first positions of a row."

    blocks: np.ndarray
    nbytes: int


class Blocks:
    "Keys and values in blocks of sixteen positions; rows and handles that begin alike share theirs."

    def __init__(
        self,
        layers: int,
        groups: int,  # heads of keys and values
        width: int,  # of a head
        rows: int,  # chains in flight at most
        context: int,  # positions of a chain at most
    ):
        block_size = layers * groups * width * BLOCK
        n = max(8 * rows, (1 << 26) // block_size)  # at first; memory is taken when it is written
        self.K = np.zeros((layers, n, groups, width, BLOCK), np.float32)
        self.V = np.zeros((layers, n, groups, BLOCK, width), np.float32)
        self.table = np.zeros((rows, context // BLOCK + 1), np.int64)  # blocks [slot, place]
        self.used = np.zeros(rows, int)  # blocks of each slot
        self.owners = np.zeros(n, int)  # slots and handles that use a block
        self.free = list(range(n))

    def reserve(self, slot, n):
        "Room for n positions."
        while self.used[slot] * BLOCK < n:
            if not self.free:
                self.grow()
            block = self.free.pop()
            self.owners[block] = 1
            self.table[slot, self.used[slot]] = block
            self.used[slot] += 1

    def grow(self):
        "Twice as many blocks."
        n = len(self.owners)
        self.K = np.concatenate((self.K, np.zeros_like(self.K)), 1)
        self.V = np.concatenate((self.V, np.zeros_like(self.V)), 1)
        self.owners = np.concatenate((self.owners, np.zeros(n, int)))
        self.free += range(n, 2 * n)

    def release(self, blocks):
        self.owners[blocks] -= 1
        self.free += blocks[self.owners[blocks] == 0].tolist()

    def keep(self, slot, n):
        blocks = self.table[slot, : -(-n // BLOCK)].copy()
        self.owners[blocks] += 1
        return KeptPrefix(blocks, len(blocks) * 2 * self.K[:, 0].nbytes)

    def load(self, slot, handle, n):
        "Take over n positions: whole blocks are shared, the rest is copied."
        whole = n // BLOCK
        self.table[slot, :whole] = handle.blocks[:whole]
        self.used[slot] = whole
        self.owners[handle.blocks[:whole]] += 1
        self.reserve(slot, n)
        if n % BLOCK:
            for t in (self.K, self.V):
                t[:, self.table[slot, whole]] = t[:, handle.blocks[whole]]

    def clear(self, slot):
        self.release(self.table[slot, : self.used[slot]])
        self.used[slot] = 0

    def move(self, slot, to):
        "Move all blocks to a slot that is clear."
        self.table[to] = self.table[slot]
        self.used[to] = self.used[slot]
        self.used[slot] = 0
