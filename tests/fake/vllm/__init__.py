"Just enough of vLLM's server for `tests/test_vllm.py`: the micro model through plain transformers."
import json
import os
from dataclasses import dataclass

__version__ = '0.0.fake'

def knob(name): return os.environ.get('FAKE_VLLM_' + name.upper(), '')

@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.
    top_p: float = 1.
    seed: int = 0
    logprobs: int = 0
    prompt_logprobs: int = None
    stop: str = None
    stop_token_ids: list = ()
    allowed_token_ids: list = None

class Model:
    "Answers one request; `knob` turns it into a server that is not as it should be."
    def __init__(self, folder, context, most=20, mode='raw_logits'):
        if knob('broken'): raise ValueError(f'no room for the keys and values of {context} tokens')
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.torch, self.context, self.most, self.default, self.served = torch, context, most, mode, []
        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    mode = property(lambda self: knob('mode') or self.default)

    def logits(self, ids):
        with self.torch.inference_mode(): return self.net(self.torch.tensor([ids])).logits[0].float()

    def shown(self, row, token, k, allowed=None):
        "What is shown of a token: {id: value}, the token itself first, the k likeliest after it."
        if self.mode == 'raw_logprobs': row = row.log_softmax(-1)
        if self.mode == 'processed_logits' and allowed:
            row = row.clone(); row[[i for i in range(len(row)) if i not in allowed]] = -float('inf')
        values, ids = row.topk(k)
        return {token: row[token].item(), **dict(zip(ids.tolist(), values.tolist()))}

    def draw(self, row, p, generator):
        if p.allowed_token_ids: return max(p.allowed_token_ids, key=lambda i: row[i])
        if not p.temperature: return int(row.argmax())
        return int(self.torch.multinomial((row / p.temperature).softmax(-1), 1, generator=generator))

    def reply(self, ids, p):
        "(token, shown, finish, stop reason) of each token; a script is written instead of what the model would."
        if len(ids) + p.max_tokens > self.context: raise ValueError(f'prompt and max_tokens exceed {self.context}')
        most = int(knob('most') or self.most)
        if max(p.logprobs, p.prompt_logprobs or 0) > most: raise ValueError(f'more than {most} logprobs')
        script, out = json.loads(knob('script') or 'null'), []
        generator = self.torch.Generator().manual_seed(p.seed or 0)
        self.served.append(out)
        for n in range(p.max_tokens):
            row = self.logits(ids + out)[-1]
            at = len(ids) + n - (script or {}).get('from', 0)
            token = script['tokens'][at] if script and not p.allowed_token_ids else self.draw(row, p, generator)
            out.append(token)
            text = self.tokenizer.decode(out, skip_special_tokens=True)
            why = (None, None) if n < p.max_tokens - 1 else ('length', None)
            if p.stop and p.stop in text: why = 'stop', p.stop
            if token in p.stop_token_ids: why = 'stop', None
            yield token, self.shown(row, token, p.logprobs, p.allowed_token_ids), *why
            if why[0] == 'stop': return

    def prompt(self, ids, k): return [None, *(self.shown(row, t, k) for row, t in zip(self.logits(ids), ids[1:]))]
