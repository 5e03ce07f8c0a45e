"""The large model reads what the small one wrote: `python -m recorded_pair.read_along LARGE`, in nbs/labs.

One pass over prompt and chain says how likely the large model would have written each token, too.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepwise_routing.data.recorded import MAX_STEPS, read_recorded
from stepwise_routing.data.sources import SPLITS
from stepwise_routing.method.rollouts import padded
from stepwise_routing.models.base import Request
from stepwise_routing.records import chat_prompt
from stepwise_routing.util import npz_bytes, write_file

FOLDER = Path(__file__).parent / 'large_reads'
COLUMNS = ('mean_logprob', 'least_logprob', 'mean_top_logit', 'mean_entropy')  # of a step's tokens
BATCH = 8  # chains a pass; another size moves the digits a little in bfloat16


def prompt_ids(tokenizer, problem) -> list:
    messages = chat_prompt(problem.question)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def of_steps(
    logits, ids, lengths
) -> np.ndarray:  # [token, vocabulary], [token], [step] -> [step, column]
    "What the logits before each token say about each step."
    log_p = logits.log_softmax(-1)
    written = log_p.gather(1, ids[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    rows = []
    tokens = (values.split(lengths) for values in (written, logits.amax(-1), entropy))
    for of_step in zip(*tokens):
        mean, top, mean_entropy = (values.mean() for values in of_step)
        rows.append([mean, of_step[0].min(), top, mean_entropy])
    return np.array(rows, np.float32)


@torch.no_grad()
def read(model, tokenizer, problems, chains) -> list:  # [problem] of [step, column]
    "One pass over some chains of the small model, padded to the right."
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    steps = [[list(step.ids) for step in chain] for chain in chains]
    texts = [torch.tensor(prompt + sum(of_chain, [])) for prompt, of_chain in zip(prompts, steps)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    logits = model(input_ids=ids, attention_mask=mask.long()).logits
    rows = []
    for prompt, text, of_chain, of_text in zip(prompts, texts, steps, logits):
        before = of_text[len(prompt) - 1 : len(text) - 1].float()
        rows.append(of_steps(before, text[len(prompt) :], [len(step) for step in of_chain]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('large', help='folder of the large model')
    parser.add_argument('--problems', type=int, help='the first ones of a split; all')
    parser.add_argument('--out', type=Path, default=FOLDER, help='folder of the columns')
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.large)
    model = AutoModelForCausalLM.from_pretrained(args.large, dtype=torch.bfloat16).eval()
    recorded = read_recorded('gsm8k')
    ask = dict(to_end=True, max_steps=MAX_STEPS['gsm8k'])
    for split in SPLITS:
        problems = recorded.problems[split][: args.problems]
        chains = recorded.models[0].write([Request(problem, **ask) for problem in problems])
        rows = []
        for first in range(0, len(problems), BATCH):
            part = slice(first, first + BATCH)
            rows += read(model, tokenizer, problems[part], chains[part])
        table = padded(rows, max(map(len, rows)), np.nan)
        arrays = dict(problem=np.array([problem.id for problem in problems]))
        arrays |= dict(zip(COLUMNS, np.moveaxis(table, 2, 0)))
        write_file(args.out / f'gsm8k-{split}.npz', npz_bytes(arrays))


if __name__ == '__main__':
    main()
