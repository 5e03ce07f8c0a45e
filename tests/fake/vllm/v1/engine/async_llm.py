import asyncio
from types import SimpleNamespace as N
from vllm import Model, knob

class AsyncLLM:
    model_config = N(dtype='torch.float32')
    @classmethod
    def from_engine_args(cls, args):
        self = cls()
        self.args, self.alive, self.aborted = args, True, []
        self.model = Model(args['model'], args['max_model_len'], args['max_logprobs'], args['logprobs_mode'])
        return self

    async def generate(self, prompt, p, number):
        ids, finished = prompt['prompt_token_ids'], False
        logprob = lambda shown: shown and {t: N(logprob=z) for t, z in shown.items()}
        before = [logprob(s) for s in self.model.prompt(ids, p.prompt_logprobs)] if p.prompt_logprobs else None
        try:
            for token, shown, finish, reason in self.model.reply(ids, p):
                await asyncio.sleep(0)
                if not self.alive or knob('dead'): raise Exception('EngineCore encountered an issue. See stack trace (above).')
                yield N(outputs=[N(token_ids=[token], logprobs=[logprob(shown)], finish_reason=finish, stop_reason=reason)], prompt_logprobs=before)
            finished = True
        finally:
            if not finished: self.aborted.append(number)

    def shutdown(self): self.alive = False
