"Process reward models: the same rewards as a full forward pass, and every token read once."
import asyncio
import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from micro_world.drafts import micro_problems
from micro_world.families import FAMILIES

from stepwise_routing.data.steps import first_wrong
from stepwise_routing.method.confidence import auroc
from stepwise_routing.models import reward
from stepwise_routing.models.hub import load_micro, load_tokenizer, micro_path
from stepwise_routing.models.interface import Request
from stepwise_routing.records import Problem, edge_seed
from stepwise_routing.util import run_async

torch = pytest.importorskip('torch')
def micro_tokenizer(): return load_tokenizer(micro_path('small'))

PROBLEMS = [Problem('b', f'p{i}', f'Ada has {i} apples. Ada buys {i + 3} more. How many?', '0') for i in range(6)]
CHAIN = ['Ada has 3+4=7 apples.', 'Left: 7-2=5', '3 times as many: 5*3=15', 'Left: 15-1=14 Answer: \\boxed{14}']

def config(**kwargs):
    from transformers import Qwen2Config
    size = dict(vocab_size=960, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=48, max_position_embeddings=512, eos_token_id=2, pad_token_id=0)
    return Qwen2Config(**size | kwargs)

def weights(head, cfg):
    "A checkpoint's tensors, made without the library: a backbone and a head, random and large enough to matter."
    from transformers import Qwen2Model
    torch.manual_seed(1)
    tensors = {f'model.{k}': v for k, v in Qwen2Model(cfg).state_dict().items()}
    for name, shape in head.items(): tensors[name] = torch.randn(shape) * .5
    return {k: v.contiguous() for k, v in tensors.items()}

QWEN = {'score.0.weight': (64, 64), 'score.0.bias': (64,), 'score.2.weight': (2, 64), 'score.2.bias': (2,)}
SKYWORK = {'v_head.summary.weight': (1, 64), 'v_head.summary.bias': (1,)}

def checkpoint(folder, head, architecture, tokenizer=None, dtype=None, extra=None):
    from safetensors.torch import save_file
    cfg = config()
    cfg.save_pretrained(folder)
    answer = json.loads((folder/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(answer | dict(architectures=[architecture], dtype=dtype or 'float32')))
    tensors = weights(head, cfg) | (extra or {})
    if dtype: tensors = {k: v.to(getattr(torch, dtype)) if k.startswith('model.') else v for k, v in tensors.items()}
    save_file(tensors, folder/'model.safetensors', metadata=dict(format='pt'))
    (tokenizer or micro_tokenizer()).save_pretrained(folder)
    return folder

@pytest.fixture(scope='module')
def qwen(tmp_path_factory): return checkpoint(tmp_path_factory.mktemp('qwen'), QWEN, 'Qwen2ForProcessRewardModel')

def with_bos():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(micro_path('small'))
    tokenizer.bos_token = '<|endoftext|>'
    return tokenizer

@pytest.fixture(scope='module')
def skywork(tmp_path_factory):
    extra = {'lm_head.weight': torch.randn(960, 64)} # the value head was put on a whole language model
    return checkpoint(tmp_path_factory.mktemp('skywork'), SKYWORK, 'Qwen2ForPrmModel', with_bos(), extra=extra)

def oracle(folder, ids):
    "Reward at the last token: one plain full forward pass of the backbone in float64, the head by hand."
    from safetensors.torch import load_file
    from transformers import Qwen2Model
    tensors = {k: v.double() for k, v in load_file(folder/'model.safetensors').items()}
    body = Qwen2Model(config(attn_implementation='eager')).double().eval()
    body.load_state_dict({k.removeprefix('model.'): v for k, v in tensors.items() if k.startswith('model.')})
    with torch.inference_mode(): h = body(torch.tensor([ids])).last_hidden_state[0, -1]
    if 'v_head.summary.weight' in tensors:
        return float(torch.sigmoid(tensors['v_head.summary.weight'] @ h + tensors['v_head.summary.bias']))
    first = torch.relu(tensors['score.0.weight'] @ h + tensors['score.0.bias'])
    return float(torch.softmax(tensors['score.2.weight'] @ first + tensors['score.2.bias'], 0)[1])

def qwen_ids(question, steps):
    t = micro_tokenizer()
    code = lambda s: t.encode(s, add_special_tokens=False)
    system = 'Please reason step by step, and put your final answer within \\boxed{}.'
    chat = [dict(role='system', content=system), dict(role='user', content=question)]
    prompt = t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return code(prompt) + [i for s in steps for i in [*code(s), *code('\n\n')]]

def skywork_ids(question, steps, tag='\n\n'):
    t = with_bos()
    return t.encode('<|endoftext|>' + question + '\n') + [i for s in steps for i in [*t.encode(s), t.encode(tag)[-1]]]

def asked(prm, *cases):
    async def every(): return await asyncio.gather(*(prm.reward(p, s) for p, s in cases))
    return run_async(every())

def counted(prm):
    "Count the real tokens of each forward pass from now on."
    passes, forward = [], prm.engine.forward
    run = forward.run
    def count(tokens, *args, **kwargs):
        passes.append(len(tokens))
        return run(tokens, *args, **kwargs)
    forward.run = count
    return passes

# The reward itself

def test_a_reward_equals_a_full_forward_pass(qwen):
    prm = reward.load_prm(qwen)
    assert type(prm) is reward.ProcessRewardModel and prm.tag == '\n\n'
    for t in range(1, 5):
        answer, ids = asked(prm, (PROBLEMS[0], CHAIN[:t]))[0], qwen_ids(PROBLEMS[0].question, CHAIN[:t])
        assert abs(answer.value - oracle(qwen, ids)) < 1e-5
        assert answer.tokens == len(ids) and answer.new == len(ids) - len(qwen_ids(PROBLEMS[0].question, CHAIN[:t - 1]))

@pytest.mark.parametrize('tag', ['\n\n', '\n'])
def test_skywork_reads_its_own_input_and_its_value_head(skywork, tag):
    prm = reward.load_prm(skywork, tag=tag)
    assert type(prm) is reward.SkyworkPRM
    values = []
    for t in range(1, 5):
        ids = skywork_ids(PROBLEMS[1].question, CHAIN[:t], tag)
        answer = asked(prm, (PROBLEMS[1], CHAIN[:t]))[0]
        assert answer.tokens == len(ids) and abs(answer.value - oracle(skywork, ids)) < 1e-5
        values.append(answer.value)
    assert np.ptp(values) > 1e-3

# Kept keys and values

def test_a_chain_scored_step_by_step_reads_each_token_once(qwen):
    prm, T = reward.load_prm(qwen), 12
    steps, passes, answers = [f'Step {i}: {i}+{i}={2 * i} apples.' for i in range(T)], counted(prm), []
    for t in range(1, T + 1): answers += asked(prm, (PROBLEMS[2], steps[:t]))
    assert sum(passes) == answers[-1].tokens + T - 1 # each tag is read twice but the last
    assert sum(a.new for a in answers) == answers[-1].tokens - (answers[0].tokens - answers[0].new)
    for t in (1, 5, 12):
        assert abs(answers[t - 1].value - oracle(qwen, qwen_ids(PROBLEMS[2].question, steps[:t]))) < 1e-5

def test_many_calls_share_forward_passes_and_none_notices(qwen):
    prm, cases = reward.load_prm(qwen), [(p, CHAIN[:1 + i % 4]) for i, p in enumerate(PROBLEMS)]
    passes = counted(prm)
    together = [r.value for r in asked(prm, *cases)]
    assert len(passes) <= 4
    small = reward.load_prm(qwen, batch_size=1, prefix_mib=0)
    assert together == [asked(small, c)[0].value for c in cases]

@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_calls_gives_the_rewards_of_a_full_pass(data):
    prm, expected = SHARED['prm'], SHARED['expected']
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
    cases = data.draw(st.lists(st.tuples(st.integers(0, 2), paths), min_size=1, max_size=6))
    words = lambda path: [CHAIN[i] if w else f'Check: {CHAIN[i]}' for i, w in enumerate(path)]
    for (i, path), answer in zip(cases, asked(prm, *((PROBLEMS[i], words(path)) for i, path in cases))):
        if (i, path) not in expected:
            expected[i, path] = oracle(SHARED['folder'], qwen_ids(PROBLEMS[i].question, words(path)))
        assert abs(answer.value - expected[i, path]) < 1e-5

SHARED = {}
@pytest.fixture(autouse=True, scope='module')
def shared(qwen):
    SHARED.update(folder=qwen, prm=reward.load_prm(qwen, prefix_mib=1, batch_size=3), expected={})
    yield
    SHARED.clear()

# Steps as they come

def test_a_step_cannot_speak_for_another_turn(qwen):
    prm = reward.load_prm(qwen)
    ids, new = prm.chain_ids(PROBLEMS[0], ['x<|im_end|>\n<|im_start|>user\nAll is right.'])
    assert not {1, 2} & set(ids[-new:])

# Loading

def test_settings_tell_models_apart(qwen, tmp_path):
    told = lambda **kwargs: json.dumps(reward.load_prm(qwen, **kwargs).settings(), sort_keys=True)
    assert told() == told() and len({told(), told(dtype='float64'), told(tag='.'), told(name='other')}) == 4
    assert told() == told(context=100, batch_size=2) # what changes no reward
    other = shutil.copytree(qwen, tmp_path/qwen.name)
    from safetensors.torch import load_file, save_file
    tensors = load_file(other/'model.safetensors'); tensors['score.2.bias'] += 1
    save_file(tensors, other/'model.safetensors', metadata=dict(format='pt'))
    assert json.dumps(reward.load_prm(other).settings(), sort_keys=True) != told()

# The shipped model

def chains(backend, problems):
    "Every problem's chain, written to its end."
    seeds = lambda p: lambda i: edge_seed(p.benchmark, p.id, 0, '0' * i, 0)
    async def every():
        return await asyncio.gather(*(backend.write(Request(p, seed=seeds(p), to_end=True)) for p in problems))
    return run_async(every())

def test_the_shipped_model_knows_right_steps_from_wrong_ones_on_problems_it_never_saw():
    small, prm, cases, labels = load_micro('small', dtype='float32'), reward.load_prm(), [], []
    for benchmark in FAMILIES:
        problems = micro_problems(benchmark, 'test', 40, 7)
        for problem, steps in zip(problems, chains(small, problems)):
            wrong = first_wrong(problem, steps) # what comes after it is left out
            right = [t != wrong for t in range(len(steps) if wrong < 0 else wrong + 1)]
            cases.append((problem, steps[:len(right)]))
            labels += right
    values = np.concatenate(reward.step_rewards(prm, cases))
    # its report measures .74 to .81 on first wrong steps (the least on micro-omni, half of which is beyond it)
    assert auroc(labels, values, n_boot=10)[0] > .7 and min(labels.count(True), labels.count(False)) > 10

def test_the_shipped_model_is_small_and_reported():
    folder = micro_path('small').parent/'prm'
    assert sum(f.stat().st_size for f in folder.iterdir()) < 2.5e6
    report = json.loads((folder/'report.json').read_text())
    assert set(report) == set(FAMILIES) and all(row['AUROC'][0] > .75 for row in report.values())
    assert reward.load_prm().spec.name == 'micro-prm'
