"""Does vLLM give the rewards of the shipped reward model? Not collected by pytest; needs an environment that has vLLM:

    VLLM_CPU_KVCACHE_SPACE=1 python tests/gpu/vllm_prm.py

Prints what it measured and ends with an error unless every reward agrees within what bfloat16 allows."""
import random
import sys
from pathlib import Path

import numpy as np
from micro_world.drafts import as_problem, micro_drafts
from micro_world.families import FAMILIES
from micro_world.programs import solve
from micro_world.slips import corrupt

from stepwise_routing.models.hub import micro_path
from stepwise_routing.models.reward import load_prm, step_rewards

sys.path.insert(0, str(Path(__file__).parents[1]/'helpers'))

TOLERANCE = .05  # of a reward; bfloat16 keeps 8 bits of every activation

def cases(n=60, seed=0):
    "Right and corrupted solutions of test problems."
    rng, out = random.Random(seed), []
    for b in FAMILIES:
        stream = micro_drafts(b, 'test', rng)
        for i in range(n // len(FAMILIES)):
            draft = next(stream)
            steps = corrupt(draft, rng)[0] if i % 2 else solve(draft)
            out.append((as_problem(b, draft), steps))
    return out

def by_vllm(folder, prompts, tag):
    "Probability of label 1 at every tag, per prompt."
    from vllm import LLM
    from vllm.config import PoolerConfig
    llm = LLM(model=str(folder), runner='pooling', dtype='bfloat16', max_model_len=1024, enforce_eager=True,
              pooler_config=PoolerConfig(step_tag_id=tag))
    replies = llm.encode([dict(prompt_token_ids=ids) for ids in prompts], pooling_task='token_classify', use_tqdm=False)
    return [f.outputs.data.float().numpy()[:, 1] for f in replies]

def main(folder=None):
    folder = Path(folder) if folder else micro_path('small').parent/'prm'
    prm, chains = load_prm(folder, dtype='float64'), cases()
    ours = step_rewards(prm, chains)
    coarse = step_rewards(load_prm(folder, dtype='bfloat16'), chains)
    theirs = by_vllm(folder, [prm.chain_ids(*case)[0] for case in chains], prm.tag_id)
    assert [len(r) for r in theirs] == [len(r) for r in ours], 'vLLM found another number of tags'
    a, b, c = map(np.concatenate, (ours, theirs, coarse))
    print(f'{len(chains)} chains, {len(a)} steps: |vLLM - float64| mean {np.abs(a - b).mean():.4f}, '
          f'largest {np.abs(a - b).max():.4f}; |our bfloat16 - float64| largest {np.abs(a - c).max():.4f}; '
          f'same side of one half: {((a > .5) == (b > .5)).mean():.4f}')
    assert np.abs(a - b).max() < TOLERANCE, 'the rewards differ by more than bfloat16 explains'

if __name__ == '__main__': main(*sys.argv[1:])
