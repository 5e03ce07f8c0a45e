"""Tokenizer, models, batches and the training loop of the micro models."""

import copy
import json
import os
import random
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import trange
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from stepwise_routing.util import write_file

from .documents import CHAT_TEMPLATE, MIXES, documents

# ---- the tokenizer


def train_tokenizer(texts, vocab: int = 960) -> Qwen2Tokenizer:
    """Byte-level BPE with Qwen2's own normaliser, splitting rule and decoder.

    `AutoTokenizer` puts these in place of saved ones wherever config.json says "qwen2". A tokenizer that was trained
    with another rule would break without a message."""
    from tokenizers import pre_tokenizers, trainers

    special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    bpe = Qwen2Tokenizer()._tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, **options))
    model = json.loads(bpe.to_str())['model']
    return Qwen2Tokenizer(
        vocab=model['vocab'],
        merges=[tuple(merge) for merge in model['merges']],
        additional_special_tokens=special[1:],
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


@lru_cache
def micro_tokenizer() -> Qwen2Tokenizer:
    "The tokenizer that all micro models share, trained on 6,000 documents."
    stream = documents(random.Random('tokenizer/0'), MIXES['base'])

    def plain(document):
        text = ''.join(text for text, _ in document)
        return text.replace('<|im_start|>', '').replace('<|im_end|>', '')

    return train_tokenizer(plain(next(stream)) for _ in range(6000))


# ---- models

SHAPES = {  # hidden size, layers, heads, key-value heads, size of the inner layer
    'small': (64, 3, 2, 1, 192),
    'base': (128, 4, 4, 2, 384),  # the first round of the large one
    'large': (128, 4, 4, 2, 384),
}


def new_model(shape: tuple, tokenizer, seed: int = 0) -> Qwen2ForCausalLM:
    "A Qwen2 language model from scratch; the embedding is shared with the output layer."
    hidden, layers, heads, kv, inner = shape
    stop, pad = (tokenizer.convert_tokens_to_ids(t) for t in ('<|im_end|>', '<|endoftext|>'))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=inner,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
        use_sliding_window=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = stop
    model.generation_config.pad_token_id = pad
    return model


def save_micro(model, tokenizer, folder) -> None:
    "A self-contained folder in bfloat16, which transformers and vLLM load by path."
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in Path(folder).iterdir():
        file.chmod(0o644)


# ---- batches

WIDTHS = (64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)


def encode_documents(tokenizer, docs: list) -> list:  # (ids, labels) of each document
    "Parts end where the tokenizer splits anyway, so they are encoded apart."
    texts = [text for doc in docs for text, _ in doc]
    coded = iter(tokenizer._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    rows = []
    for doc in docs:
        ids, labels = [], []
        for _, learn in doc:
            new = next(coded).ids
            ids += new
            labels += new if learn else [-100] * len(new)
        rows.append((ids, labels))
    return rows


def batches(
    rows,  # (ids, labels) of each document, equally long lists
    tokens: int,  # of a batch, padding included
    rng: random.Random,  # of the order
) -> list:  # (ids, labels), each int64 [row, width]
    "Batches in a few fixed shapes, which are faster than ever-changing ones; a short rest is left out."
    filed, full = {width: [] for width in WIDTHS if width <= tokens}, []
    for ids, labels in rows:
        width = next((width for width in filed if width >= len(ids)), None)
        if width is None:
            continue
        filed[width].append((ids, labels))
        if len(filed[width]) < tokens // width:
            continue
        x = np.zeros((len(filed[width]), width), np.int64)
        y = np.full(x.shape, -100, np.int64)
        for i, (ids, labels) in enumerate(filed[width]):
            x[i, : len(ids)] = ids
            y[i, : len(ids)] = labels
        full.append((x, y))
        filed[width] = []
    rng.shuffle(full)
    return full


# ---- training


def masked_loss(model, ids, labels):
    "Mean cross entropy of the learnt tokens."
    ids, labels = torch.from_numpy(ids), torch.from_numpy(labels)[:, 1:]
    learnt = labels != -100
    with torch.autocast('cpu', torch.bfloat16):
        hidden = model.model(ids).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[learnt])
    return torch.nn.functional.cross_entropy(logits.float(), labels[learnt])


class Trainer:
    "Model, optimisers and the place in the stream of batches: all that a checkpoint holds."

    def __init__(
        self,
        run: dict,  # settings, kept in training.json: a folder keeps to them
        folder,  # of training.json and checkpoint.pt
        model,  # with a backbone `model` and an output layer `lm_head`
        draw,  # chunk number -> batches
    ):
        self.run, self.draw = run, draw
        self.path = Path(folder) / 'checkpoint.pt'
        keep_settings(run, folder)
        model.set_attn_implementation('eager')  # its backward pass is faster at these lengths
        self.model = model.train()
        hidden, others = [], []
        for name, weights in model.named_parameters():
            is_matrix = weights.ndim == 2 and 'embed' not in name
            (hidden if is_matrix else others).append(weights)
        decay = run['weight_decay']
        self.optimizers = [
            torch.optim.Muon(hidden, lr=run['muon_lr'], weight_decay=decay, ns_steps=4),
            torch.optim.AdamW(others, lr=run['adam_lr'], weight_decay=0.0, betas=(0.9, 0.98)),
        ]
        self.step = self.chunk = self.at = 0
        self.data = None
        if self.path.exists():
            self.load(torch.load(self.path, weights_only=True))

    def load(self, state: dict) -> None:
        self.step, self.chunk, self.at = state['step'], state['chunk'], state['at']
        self.model.load_state_dict(state['model'])
        for optimizer, values in zip(self.optimizers, state['optimizers']):
            optimizer.load_state_dict(values)

    def save(self) -> None:
        "The new checkpoint replaces the old one in one move."
        state = dict(step=self.step, chunk=self.chunk, at=self.at, model=self.model.state_dict())
        state['optimizers'] = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(state, f'{self.path}.tmp')
        os.replace(f'{self.path}.tmp', self.path)

    def next_batch(self) -> tuple:
        while self.data is None or self.at >= len(self.data):
            if self.data is not None:
                self.chunk, self.at = self.chunk + 1, 0
            self.data = self.draw(self.chunk)
        self.at += 1
        return self.data[self.at - 1]

    def train_step(self) -> float:
        "One optimiser step; returns the loss. The rate rises in the beginning, then falls to zero."
        total = self.run['steps']
        rate = min((self.step + 1) / self.run['warmup'], (total - self.step) / total)
        for optimizer, lr in zip(self.optimizers, (self.run['muon_lr'], self.run['adam_lr'])):
            for group in optimizer.param_groups:
                group['lr'] = lr * rate
        loss = masked_loss(self.model, *self.next_batch())
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()


def keep_settings(run: dict, folder) -> None:
    "Write down the settings of a training. ValueError if the folder holds other ones."
    file = Path(folder) / 'training.json'
    kept = json.loads(file.read_text()) if file.exists() else run
    if kept != run:
        raise ValueError(f'{folder} holds a training with other settings: use another folder')
    write_file(file, json.dumps(run, indent=1) + '\n')


def train(trainer: Trainer) -> None:
    "Train to the end. A checkpoint is never older than a minute."
    saved = time.monotonic()
    name = trainer.path.parent.name
    bar = trange(trainer.step, trainer.run['steps'], desc=name, disable=None)
    for step in bar:
        loss = trainer.train_step()
        if step % 50 == 0:
            bar.set_postfix(loss=f'{loss:.3f}')
        if time.monotonic() - saved > 60:
            trainer.save()
            saved = time.monotonic()
    trainer.save()
