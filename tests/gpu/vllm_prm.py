"""Does vLLM give the rewards of the shipped reward model? Not collected by pytest; needs an environment that has vLLM:

    VLLM_CPU_KVCACHE_SPACE=1 python tests/gpu/vllm_prm.py

Prints what it measured and ends with an error unless every reward agrees within what bfloat16 allows."""
import random, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from stepwise_routing.data import families as data_families
from stepwise_routing.data import micro as data_micro
from stepwise_routing.models import reward as models_reward
from stepwise_routing.models import transformers as models_transformers

TOLERANCE = .05  # of a reward; bfloat16 keeps 8 bits of every activation

def cases(n=60, seed=0):
    "Right and corrupted solutions of test problems."
    rng, out = random.Random(seed), []
    for b in data_families.FAMILIES:
        stream = data_micro.micro_drafts(b, 'test', rng)
        for i in range(n // len(data_families.FAMILIES)):
            draft = next(stream)
            out.append((data_micro.as_problem(b, draft), data_micro.corrupt(draft, rng)[0] if i % 2
                        else data_families.solve(draft)))
    return out

def by_vllm(folder, prompts, tag):
    "Probability of label 1 at every tag, per prompt."
    from vllm import LLM
    from vllm.config import PoolerConfig
    llm = LLM(model=str(folder), runner='pooling', dtype='bfloat16', max_model_len=1024, enforce_eager=True,
              pooler_config=PoolerConfig(step_tag_id=tag))
    found = llm.encode([dict(prompt_token_ids=ids) for ids in prompts], pooling_task='token_classify', use_tqdm=False)
    return [f.outputs.data.float().numpy()[:, 1] for f in found]

def main(folder=None):
    folder = Path(folder) if folder else models_transformers.micro_path('small').parent/'prm'
    prm, some = models_reward.load_prm(folder, dtype='float64'), cases()
    ours = models_reward.step_rewards(prm, some)
    coarse = models_reward.step_rewards(models_reward.load_prm(folder, dtype='bfloat16'), some)
    theirs = by_vllm(folder, [prm.chain_ids(*case)[0] for case in some], prm.tag_id)
    assert [len(r) for r in theirs] == [len(r) for r in ours], 'vLLM found another number of tags'
    a, b, c = map(np.concatenate, (ours, theirs, coarse))
    print(f'{len(some)} chains, {len(a)} steps: '
          f'|vLLM - float64| mean {np.abs(a - b).mean():.4f}, largest {np.abs(a - b).max():.4f}; '
          f'|our bfloat16 - float64| largest {np.abs(a - c).max():.4f}; '
          f'same side of one half: {((a > .5) == (b > .5)).mean():.4f}')
    assert np.abs(a - b).max() < TOLERANCE, 'the rewards differ by more than bfloat16 explains'

if __name__ == '__main__': main(*sys.argv[1:])
