"""Any causal language model of Hugging Face: rows of one pass are padded to the longest.

Here belongs the `Forward` of every model that `kernels.qwen` cannot compute, on a CPU or a GPU. Who is computed next
belongs in `models.engine`.
"""

import numpy as np

from ..interface import confidences, draw_rows


class SlotCache:
    "Keys and values [tensor, row, position, head, width] of many rows, passed to the model as `past_key_values`."

    def __init__(
        self,
        like,  # a cache of the model's own, for its shapes
        rows: int,  # slots
        columns: int = 256,  # positions; they double as needed
    ):
        tensors = []
        for layer in like.layers:
            tensors += [layer.keys, layer.values]
        (shape,) = {(t.shape[1], t.shape[3]) for t in tensors}  # all layers alike, or ValueError
        # one more row, for the padding
        self.kv = tensors[0].new_zeros(len(tensors), rows + 1, columns, *shape)

    def get_seq_length(self, *args):
        return self.columns

    def get_mask_sizes(self, *args):
        return self.columns, 0

    def window(self, slots, positions, real):
        "Aim the next forward pass at `slots`, `positions` [row, query]; `real` is False for padding."
        import torch

        self.slots = slots
        self.columns = int(positions.max()) + 1
        while self.columns > self.kv.shape[2]:
            self.kv = torch.nn.functional.pad(self.kv, (0,) * 5 + (self.kv.shape[2],))
        spare = self.kv.shape[1] - 1
        width = self.kv.shape[2]
        first_cells = np.arange(spare)[slots, None] * width
        cells = np.where(real, first_cells + positions, spare * width)
        self.cells = torch.from_numpy(cells.ravel()).to(self.kv.device)

    def update(self, keys, values, layer, *args, **kwargs):
        "Called by each attention layer: store the new keys and values, return all that may be looked at."
        both = self.kv[2 * layer : 2 * layer + 2]
        for cache, new in zip(both, (keys, values)):
            flat = cache.view(-1, *cache.shape[2:])
            flat[self.cells] = new.transpose(1, 2).flatten(0, 1)
        return [cache[self.slots, : self.columns].transpose(1, 2) for cache in both]


class PaddedModel:
    "A `Forward` for any Hugging Face causal language model: rows of one pass are padded to the longest."

    def __init__(self, model, rows):  # rows in flight at most
        import torch

        self.torch = torch
        self.model = model
        self.hidden = torch.finfo(model.dtype).min
        self.dtype = str(model.dtype).removeprefix('torch.')
        self.queue = []
        self.check(rows)

    def pass_over(self, tokens, positions, slots, real=True, head=True):
        """Logits [row, query, vocabulary] of `tokens` at `positions`, both [row, query], that see all before them.

        Without its `head` a model leaves keys and values only.
        """
        self.cache.window(slots, positions, real)
        both = self.torch.from_numpy(np.stack((tokens, positions)))
        ids, positions = both.to(self.model.device)
        columns = self.torch.arange(self.cache.columns, device=positions.device)
        future = columns > positions[:, None, :, None]
        mask = self.torch.zeros(future.shape, dtype=self.model.dtype, device=positions.device)
        run = self.model if head else self.model.base_model
        out = run(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask.masked_fill_(future, self.hidden),
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.logits if head else None

    def check(self, rows):
        "Make the cache and return the error it makes; ValueError for a model whose logits it changes."
        torch = self.torch
        model = self.model
        ids = np.arange(3, 15)[None] % model.config.vocab_size
        cause = None
        try:
            with torch.inference_mode():
                plain = model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=True)
                self.cache = SlotCache(plain.past_key_values, rows)
                change = self._change(ids, plain.logits, rows - 1)
        except Exception as e:
            change = 1.0
            cause = e
        if not change > torch.finfo(model.dtype).eps ** 0.5:
            return change  # nan, from logits of -inf, tells nothing
        raise ValueError(
            f'{type(model).__name__} cannot be batched here: its past is no key and value per token'
        ) from cause

    def _change(self, ids, plain, slot):
        "How far the logits of twelve tokens in two passes are from those of one pass, relative to the largest."
        positions = np.arange(12)[None]
        first = positions[:, :8]
        self.pass_over(ids[:, :8], first, [slot], first < 6)
        logits = self.pass_over(ids[:, 6:], positions[:, 6:], [slot])
        change = (logits - plain[:, 6:]).abs().max()
        return change / (1 + plain.abs().max())

    def spread(self, slots, tokens, starts, head=True):
        "Logits of one pass over token lists of several lengths, each from its own start."
        lengths = np.array([len(t) for t in tokens])
        offsets = np.arange(lengths.max())[None].repeat(len(tokens), 0)
        real = offsets < lengths[:, None]
        ids = np.zeros(offsets.shape, int)
        ids[real] = np.concatenate(tokens)
        positions = (offsets + np.array(starts)[:, None]) * real
        return self.pass_over(ids, positions, list(slots), real, head)

    def feed(self, slot, tokens, start):
        if tokens:
            self.queue.append((slot, tokens, start))

    def flush(self):
        "Compute the fed tokens."
        queue = self.queue
        self.queue = []
        for batch in _batches([len(tokens) for _, tokens, _ in queue], 8192):
            slots, tokens, starts = zip(*(queue[i] for i in batch))
            self.spread(slots, tokens, starts, head=False)

    def logits(self, slots, tokens, starts):
        self.flush()
        out = [None] * len(tokens)
        lengths = [len(t) for t in tokens]
        size = max(1, (1 << 24) // self.model.config.vocab_size)
        for batch in _batches(lengths, size):
            columns = ([column[i] for i in batch] for column in (slots, tokens, starts))
            for i, row in zip(batch, self.spread(*columns)):
                out[i] = row[: lengths[i]]
        return self.torch.cat(out)

    def confidences(self, logits, tokens):  # [3, token]
        tokens = self.torch.as_tensor(tokens, device=logits.device)
        return confidences(logits.double(), tokens).cpu().numpy()

    def decode(self, tokens, positions, u, temperature, top_p):
        self.flush()
        rows = slice(0, len(tokens))
        logits = self.pass_over(tokens[:, None], positions[:, None], rows)[:, -1]
        drawn = draw_rows(logits.double(), u, temperature, top_p)
        return np.vstack((drawn, self.confidences(logits, drawn))).T, logits

    def keep(self, slot, n):  # keys and values of their own
        self.flush()
        return self.cache.kv[:, slot, :n].clone()

    def load(self, slot, keys_and_values, n):
        self.cache.kv[:, slot, :n] = keys_and_values[:, :n]

    def move(self, slot, to, n):
        self.cache.kv[:, to, :n] = self.cache.kv[:, slot, :n]

    def clear(self, slot):
        self.queue = [q for q in self.queue if q[0] != slot]

    def drop(self, keys_and_values):
        pass  # memory frees itself


def _batches(lengths, size):
    "Cut rows into batches, lists of indices, of similar lengths: `size` tokens at most, padding included."
    order = np.argsort(lengths, kind='stable')[::-1].tolist()
    while order:
        longest = lengths[order[0]]
        batch = order[: max(size // longest, 1)]
        batch = [i for i in batch if lengths[i] >= 0.7 * longest - 4]
        yield batch
        order = order[len(batch) :]
