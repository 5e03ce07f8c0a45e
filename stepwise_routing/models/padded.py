"""A causal language model of Hugging Face, whatever its layers look like, with the keys and values of many rows"""

import numpy as np

from .interface import confidences, draw_rows


class SlotCache:
    "Keys and values [tensor, row, position, head, width] of many rows, passed to the model as `past_key_values`."

    def __init__(
        self, like, rows, columns=256
    ):  # a cache of the model's own, for its shapes; columns double as needed
        tensors = [t for layer in like.layers for t in (layer.keys, layer.values)]
        (shape,) = {(t.shape[1], t.shape[3]) for t in tensors}  # all layers alike, or ValueError
        self.kv = tensors[0].new_zeros(
            len(tensors), rows + 1, columns, *shape
        )  # one more row, for what padding writes

    def get_seq_length(self, *args):
        return self.columns

    def get_mask_sizes(self, *args):
        return self.columns, 0

    def window(self, rows, at, real):
        "Aim the next forward pass at `rows`, positions `at` [row, query]; `real` is False for padding."
        import torch

        self.rows = rows
        self.columns = int(at.max()) + 1
        while self.columns > self.kv.shape[2]:
            self.kv = torch.nn.functional.pad(self.kv, (0,) * 5 + (self.kv.shape[2],))
        spare = self.kv.shape[1] - 1
        width = self.kv.shape[2]
        places = np.where(real, np.arange(spare)[rows, None] * width + at, spare * width).ravel()
        self.places = torch.from_numpy(places).to(self.kv.device)

    def update(self, keys, values, layer, *args, **kwargs):
        "Called by each attention layer: store the new keys and values, return all that may be looked at."
        both = self.kv[2 * layer : 2 * layer + 2]
        for t, new in zip(both, (keys, values)):
            t.view(-1, *t.shape[2:])[self.places] = new.transpose(1, 2).flatten(0, 1)
        return [t[self.rows, : self.columns].transpose(1, 2) for t in both]


class PaddedModel:
    "A `Forward` for any Hugging Face causal language model: rows of one pass are padded to the longest."

    def __init__(self, model, rows):  # rows in flight at most
        import torch

        self.torch, self.model, self.hidden = torch, model, torch.finfo(model.dtype).min
        self.dtype = str(model.dtype).removeprefix('torch.')
        self.queue = []
        self.check(rows)

    def pass_over(
        self, tokens, at, rows, real=True, head=True
    ):  # without its head a model leaves keys and values only
        "Logits [row, query, vocabulary] of `tokens` at positions `at`, both [row, query], that see all before them."
        self.cache.window(rows, at, real)
        ids, at = self.torch.from_numpy(np.stack((tokens, at))).to(self.model.device)
        future = self.torch.arange(self.cache.columns, device=at.device) > at[:, None, :, None]
        mask = self.torch.zeros(future.shape, dtype=self.model.dtype, device=at.device)
        run = self.model if head else self.model.base_model
        out = run(
            input_ids=ids,
            position_ids=at,
            attention_mask=mask.masked_fill_(future, self.hidden),
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.logits if head else None

    def check(self, rows):
        "Make the cache of `rows` rows and return the error it makes; ValueError for a model whose logits it changes."
        model = self.model
        torch = self.torch
        why = None
        ids = np.arange(3, 15)[None] % model.config.vocab_size
        at = np.arange(12)[None]
        try:
            with torch.inference_mode():
                plain = model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=True)
                self.cache = SlotCache(plain.past_key_values, rows)
                self.pass_over(ids[:, :8], at[:, :8], [rows - 1], at[:, :8] < 6)
                change = (
                    (self.pass_over(ids[:, 6:], at[:, 6:], [rows - 1]) - plain.logits[:, 6:])
                    .abs()
                    .max()
                )
                change = change / (1 + plain.logits.abs().max())
        except Exception as e:
            change, why = 1.0, e
        if not change > torch.finfo(model.dtype).eps ** 0.5:
            return change  # nan, from logits of -inf, tells nothing
        raise ValueError(
            f'{type(model).__name__} cannot be batched here: its past is no key and value per token'
        ) from why

    def spread(self, places, tokens, starts, **more):
        "Logits of one pass over token lists of several lengths, each from its own start."
        at = np.arange(max(map(len, tokens)))[None].repeat(len(tokens), 0)
        real = at < np.array([len(t) for t in tokens])[:, None]
        ids = np.zeros(at.shape, int)
        ids[real] = np.concatenate(tokens)
        return self.pass_over(
            ids, (at + np.array(starts)[:, None]) * real, list(places), real, **more
        )

    def feed(self, place, tokens, start):
        if tokens:
            self.queue.append((place, tokens, start))

    def flush(self):  # compute what was fed
        queue = self.queue
        self.queue = []
        for batch in _batches([len(tokens) for _, tokens, _ in queue], 8192):
            self.spread(*zip(*(queue[i] for i in batch)), head=False)

    def logits(self, places, tokens, starts):
        self.flush()
        out = [None] * len(tokens)
        lengths = [len(t) for t in tokens]
        for batch in _batches(lengths, max(1, (1 << 24) // self.model.config.vocab_size)):
            z = self.spread(*([column[i] for i in batch] for column in (places, tokens, starts)))
            for i, row in zip(batch, z):
                out[i] = row[: lengths[i]]
        return self.torch.cat(out)

    def confidences(self, logits, tokens):  # [4, token]
        tokens = self.torch.as_tensor(tokens, device=logits.device)
        return confidences(logits.double(), tokens).cpu().numpy()

    def decode(self, tokens, at, u, temperature, top_p):
        self.flush()
        logits = self.pass_over(tokens[:, None], at[:, None], slice(0, len(tokens)))[:, -1]
        drawn = draw_rows(logits.double(), u, temperature, top_p)
        return np.vstack((drawn, self.confidences(logits, drawn))).T, logits

    def keep(self, place, n):  # keys and values of their own
        self.flush()
        return self.cache.kv[:, place, :n].clone()

    def load(self, place, kept, n):
        self.cache.kv[:, place, :n] = kept[:, :n]

    def move(self, place, to, n):
        self.cache.kv[:, to, :n] = self.cache.kv[:, place, :n]

    def clear(self, place):
        self.queue = [q for q in self.queue if q[0] != place]

    def drop(self, kept):
        pass  # memory frees itself


def _batches(lengths, most):
    "Cut rows into batches, lists of indices, of similar lengths: little padding, `most` tokens with it."
    order = np.argsort(lengths, kind='stable')[::-1].tolist()
    while order:
        longest = lengths[order[0]]
        batch = [i for i in order[: max(most // longest, 1)] if lengths[i] >= 0.7 * longest - 4]
        yield batch
        order = order[len(batch) :]
