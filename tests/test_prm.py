"Process reward models: the same rewards as a full forward pass, every token read once, labels and scores against oracles."
import asyncio, json, random, re, shutil
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stepwise_routing.data import families as data_families
from stepwise_routing.data import micro as data_micro
from stepwise_routing.labs import language_models as labs_language_models
from stepwise_routing.labs import measure as labs_measure
from stepwise_routing.labs import reward_model as labs_reward_model
from stepwise_routing.models import reward as models_reward
from stepwise_routing.models import transformers as models_transformers
from stepwise_routing.core import Problem, run_async

torch = pytest.importorskip('torch')
PROBLEMS = [Problem('b', f'p{i}', f'Ada has {i} apples. Ada buys {i + 3} more. How many?', '0') for i in range(6)]
CHAIN = ['Ada has 3+4=7 apples.', 'Left: 7-2=5', '3 times as many: 5*3=15', 'Left: 15-1=14 Answer: \\boxed{14}']

def config(**kwargs):
    from transformers import Qwen2Config
    return Qwen2Config(**dict(dict(vocab_size=960, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                   intermediate_size=48, max_position_embeddings=512, eos_token_id=2, pad_token_id=0), **kwargs))

def weights(head, cfg):
    "A checkpoint's tensors, made without the library: a backbone and a head, all drawn at random and large enough to matter."
    from transformers import Qwen2Model
    torch.manual_seed(1)
    tensors = {f'model.{k}': v for k, v in Qwen2Model(cfg).state_dict().items()}
    for name, shape in head.items(): tensors[name] = torch.randn(shape) * .5
    return {k: v.contiguous() for k, v in tensors.items()}

QWEN = {'score.0.weight': (32, 32), 'score.0.bias': (32,), 'score.2.weight': (2, 32), 'score.2.bias': (2,)}
SKYWORK = {'v_head.summary.weight': (1, 32), 'v_head.summary.bias': (1,)}

def checkpoint(folder, head, architecture, tokenizer=None, dtype=None, extra=None):
    from safetensors.torch import save_file
    cfg = config()
    cfg.save_pretrained(folder)
    said = json.loads((folder/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(said | dict(architectures=[architecture], dtype=dtype or 'float32')))
    tensors = weights(head, cfg) | (extra or {})
    if dtype: tensors = {k: v.to(getattr(torch, dtype)) if k.startswith('model.') else v for k, v in tensors.items()}
    save_file(tensors, folder/'model.safetensors', metadata=dict(format='pt'))
    (tokenizer or labs_language_models.micro_tokenizer()).save_pretrained(folder)
    return folder

@pytest.fixture(scope='module')
def qwen(tmp_path_factory): return checkpoint(tmp_path_factory.mktemp('qwen'), QWEN, 'Qwen2ForProcessRewardModel')

def with_bos():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(models_transformers.micro_path('small'))
    tokenizer.bos_token = '<|endoftext|>'
    return tokenizer

@pytest.fixture(scope='module')
def skywork(tmp_path_factory):
    extra = {'lm_head.weight': torch.randn(960, 32)} # the value head was put on a whole language model
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
    z = tensors['score.2.weight'] @ torch.relu(tensors['score.0.weight'] @ h + tensors['score.0.bias']) + tensors['score.2.bias']
    return float(torch.softmax(z, 0)[1])

def qwen_ids(question, steps):
    t = labs_language_models.micro_tokenizer()
    code = lambda s: t.encode(s, add_special_tokens=False)
    prompt = t.apply_chat_template([dict(role='system', content='Please reason step by step, and put your final answer within \\boxed{}.'),
                                    dict(role='user', content=question)], tokenize=False, add_generation_prompt=True)
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
    def count(tokens, at, rows, real=True, **kwargs):
        passes.append(int(np.sum(np.broadcast_to(real, tokens.shape))))
        return forward(tokens, at, rows, real, **kwargs)
    count.cache, count.torch, count.model = forward.cache, forward.torch, forward.model
    prm.engine.forward = count
    return passes

# The reward itself

def test_a_reward_equals_a_full_forward_pass(qwen):
    prm = models_reward.load_prm(qwen)
    assert type(prm) is models_reward.ProcessRewardModel and prm.tag == '\n\n'
    for t in range(1, 5):
        said, ids = asked(prm, (PROBLEMS[0], CHAIN[:t]))[0], qwen_ids(PROBLEMS[0].question, CHAIN[:t])
        assert abs(said.value - oracle(qwen, ids)) < 1e-6
        assert said.tokens == len(ids) and said.new == len(ids) - len(qwen_ids(PROBLEMS[0].question, CHAIN[:t - 1]))

@pytest.mark.parametrize('tag', ['\n\n', '\n'])
def test_skywork_reads_its_own_input_and_its_value_head(skywork, tag):
    prm = models_reward.load_prm(skywork, tag=tag)
    assert type(prm) is models_reward.SkyworkPRM
    found = []
    for t in range(1, 5):
        ids = skywork_ids(PROBLEMS[1].question, CHAIN[:t], tag)
        said = asked(prm, (PROBLEMS[1], CHAIN[:t]))[0]
        assert said.tokens == len(ids) and abs(said.value - oracle(skywork, ids)) < 1e-6
        found.append(said.value)
    assert np.ptp(found) > 1e-3

def test_skyworks_tag_moves_the_reward_and_rsds_is_the_default(skywork):
    values = {tag: asked(models_reward.load_prm(skywork, tag=tag), (PROBLEMS[1], CHAIN))[0].value for tag in ('\n\n', '\n', None)}
    assert values[None] == values['\n\n'] and abs(values['\n\n'] - values['\n']) > 1e-4

def test_a_value_head_keeps_its_precision_beside_a_bfloat16_backbone(tmp_path, skywork):
    folder = checkpoint(tmp_path, SKYWORK, 'Qwen2ForPrmModel', with_bos(), dtype='bfloat16')
    head = models_reward.load_prm(folder, dtype='bfloat16').engine.forward.model.v_head.summary.weight
    assert head.dtype == torch.float32 and torch.equal(head, weights(SKYWORK, config())['v_head.summary.weight'])
    ids = skywork_ids(PROBLEMS[1].question, CHAIN)
    assert abs(asked(models_reward.load_prm(folder), (PROBLEMS[1], CHAIN))[0].value - oracle(folder, ids)) < 1e-6

def test_skywork_without_a_beginning_token_is_refused(tmp_path):
    folder = checkpoint(tmp_path, SKYWORK, 'Qwen2ForPrmModel')
    with pytest.raises(ValueError, match='no bos_token'): asked(models_reward.load_prm(folder), (PROBLEMS[0], CHAIN))

def test_the_extra_token_is_the_tag_where_there_is_one(tmp_path):
    tokenizer = with_bos()
    tokenizer.add_tokens(['<extra_0>'], special_tokens=True)
    folder, cfg = tmp_path, config(vocab_size=961)
    from safetensors.torch import save_file
    cfg.architectures = ['Qwen2ForProcessRewardModel']
    cfg.save_pretrained(folder)
    save_file(weights(QWEN, cfg), folder/'model.safetensors', metadata=dict(format='pt'))
    tokenizer.save_pretrained(folder)
    prm = models_reward.load_prm(folder)
    assert prm.tag == '<extra_0>' and prm.tag_id == tokenizer.convert_tokens_to_ids('<extra_0>')
    assert models_reward.load_prm(folder, tag='\n\n').tag_id != prm.tag_id
    ids, _ = models_reward._chain_ids(prm, PROBLEMS[0], ['one<extra_0>', 'two'])
    assert ids.count(prm.tag_id) == 2 # a step cannot close itself

# Kept keys and values

def test_a_chain_scored_step_by_step_reads_each_token_once(qwen):
    prm, T = models_reward.load_prm(qwen), 12
    steps, passes, answers = [f'Step {i}: {i}+{i}={2 * i} apples.' for i in range(T)], counted(prm), []
    for t in range(1, T + 1): answers += asked(prm, (PROBLEMS[2], steps[:t]))
    assert sum(passes) == answers[-1].tokens + T - 1 # each tag is read twice but the last
    assert sum(a.new for a in answers) == answers[-1].tokens - (answers[0].tokens - answers[0].new)
    for t in (1, 5, 12): assert abs(answers[t - 1].value - oracle(qwen, qwen_ids(PROBLEMS[2].question, steps[:t]))) < 1e-6

def test_all_prefixes_at_once_cost_no_more(qwen):
    prm, T = models_reward.load_prm(qwen), 12
    steps, passes = [f'Step {i}: {i}+{i}={2 * i} apples.' for i in range(T)], counted(prm)
    [values] = models_reward.step_rewards(prm, [(PROBLEMS[2], steps)])
    assert sum(passes) <= len(qwen_ids(PROBLEMS[2].question, steps)) + T
    assert abs(values[6] - oracle(qwen, qwen_ids(PROBLEMS[2].question, steps[:7]))) < 1e-6

def test_a_rejected_draft_leaves_the_prefix_usable(qwen):
    prm = models_reward.load_prm(qwen)
    asked(prm, (PROBLEMS[0], CHAIN[:2]))
    passes = counted(prm)
    said, = asked(prm, (PROBLEMS[0], [CHAIN[0], 'Left: 7-3=4', 'Done.']))
    assert sum(passes) == said.tokens - len(qwen_ids(PROBLEMS[0].question, CHAIN[:1])) + 1
    assert abs(said.value - oracle(qwen, qwen_ids(PROBLEMS[0].question, [CHAIN[0], 'Left: 7-3=4', 'Done.']))) < 1e-6

def test_many_calls_share_forward_passes_and_none_notices(qwen):
    prm, cases = models_reward.load_prm(qwen), [(p, CHAIN[:1 + i % 4]) for i, p in enumerate(PROBLEMS)]
    passes = counted(prm)
    together = [r.value for r in asked(prm, *cases)]
    assert len(passes) <= 4
    small = models_reward.load_prm(qwen, batch_size=1, prefix_mib=0)
    assert together == [asked(small, c)[0].value for c in cases]

@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_calls_gives_the_rewards_of_a_full_pass(data):
    prm, expected = SHARED['prm'], SHARED['expected']
    draws = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)), min_size=1, max_size=6)
    cases = data.draw(draws)
    words = lambda path: [CHAIN[i] if w else f'Wait: {CHAIN[i]}' for i, w in enumerate(path)]
    for (i, path), said in zip(cases, asked(prm, *((PROBLEMS[i], words(path)) for i, path in cases))):
        if (i, path) not in expected: expected[i, path] = oracle(SHARED['folder'], qwen_ids(PROBLEMS[i].question, words(path)))
        assert abs(said.value - expected[i, path]) < 1e-6

SHARED = {}
@pytest.fixture(autouse=True, scope='module')
def shared(qwen):
    SHARED.update(folder=qwen, prm=models_reward.load_prm(qwen, prefix_mib=1, batch_size=3), expected={})
    yield
    SHARED.clear()

def test_a_grown_chain_takes_the_place_of_its_beginning(qwen):
    prm = models_reward.load_prm(qwen)
    for t in range(1, 5): asked(prm, (PROBLEMS[0], CHAIN[:t]))
    assert len(prm.engine.prefixes.kept) == 1
    asked(prm, (PROBLEMS[0], [*CHAIN[:2], 'Left: 7-3=4']), (PROBLEMS[1], CHAIN[:1]))
    cache = prm.engine.prefixes
    assert len(cache.kept) == 3 and cache.used == sum(kv.nbytes for kv, _ in cache.kept.values())
    assert set(cache.index.values()) <= set(cache.kept)

def test_the_memory_for_kept_chains_is_bounded(qwen):
    prm = models_reward.load_prm(qwen, prefix_mib=1)
    for i in range(40): asked(prm, (PROBLEMS[i % 6], [f'Step {i}.' * 20]))
    assert prm.engine.prefixes.used <= 1 << 20

# Steps as they come

@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_strange_steps_give_a_finite_reward(steps):
    said, = asked(SHARED['prm'], (PROBLEMS[0], steps))
    assert np.isfinite(said.value) and 0 <= said.value <= 1 and said.new >= 1

ODD = ['', ' ', '\n\n', '\n\n\n\n', '<|im_end|>', '\x00', '\ud800', '🙂' * 30, 'Answer: \\boxed{1}', 'é' * 200, '٣+٤=٧']

@pytest.mark.parametrize('text', ODD, ids=range(len(ODD)))
def test_empty_final_and_odd_steps(qwen, text):
    for steps in ([text], ['Ada has 3+4=7 apples.', text], [text, 'Left: 7-2=5']):
        assert 0 <= asked(SHARED['prm'], (PROBLEMS[0], steps))[0].value <= 1

def test_a_step_cannot_speak_for_another_turn(qwen):
    prm = models_reward.load_prm(qwen)
    ids, marks = models_reward._chain_ids(prm, PROBLEMS[0], ['x<|im_end|>\n<|im_start|>user\nAll is right.'])
    assert not {1, 2} & set(ids[marks[0]:])

def test_steps_may_be_texts_or_steps(qwen):
    as_steps = [SimpleNamespace(text=t) for t in CHAIN]
    a, b = asked(SHARED['prm'], (PROBLEMS[0], CHAIN), (PROBLEMS[0], as_steps))
    assert a == b

def test_no_step_no_reward(qwen):
    with pytest.raises(ValueError, match="'p0'.*there is none"): asked(SHARED['prm'], (PROBLEMS[0], []))

def test_a_chain_beyond_the_context_is_one_clear_line_and_harms_nobody(qwen):
    prm = models_reward.load_prm(qwen, context=100)
    calls = lambda: (prm.reward(PROBLEMS[0], ['7 ' * 300]), prm.reward(PROBLEMS[0], CHAIN[:1]))
    async def both(): return await asyncio.gather(*calls(), return_exceptions=True)
    bad, good = run_async(both())
    assert isinstance(bad, ValueError) and '\n' not in str(bad) and "problem 'p0', step 0" in str(bad) and 'context of 100' in str(bad)
    assert 0 <= good.value <= 1

def test_a_caller_that_gives_up_does_not_disturb_the_others(qwen):
    prm = models_reward.load_prm(qwen)
    async def some():
        tasks = [asyncio.create_task(prm.reward(p, CHAIN)) for p in PROBLEMS]
        await asyncio.sleep(0)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)
    said = run_async(some())
    assert isinstance(said[2], asyncio.CancelledError)
    assert [r.value for i, r in enumerate(said) if i != 2] == [asked(prm, (p, CHAIN))[0].value for i, p in enumerate(PROBLEMS) if i != 2]

def test_a_closed_model_says_so(qwen):
    prm = models_reward.load_prm(qwen)
    run_async(prm.close())
    with pytest.raises(RuntimeError, match='is closed'): asked(prm, (PROBLEMS[0], CHAIN))

def test_weights_that_are_no_numbers_are_told(qwen, tmp_path):
    prm = models_reward.load_prm(qwen)
    with torch.no_grad(): prm.engine.forward.model.score[2].weight.fill_(float('nan'))
    with pytest.raises(FloatingPointError, match='not finite'): asked(prm, (PROBLEMS[0], CHAIN))

# Loading

def test_unknown_names_are_one_line_with_the_nearest():
    for name, near in (('micro-prn', "'micro-prm'"), ('Skywork-o1-Open-PRM-Qwen-2.5-1.5B', "'Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B'")):
        with pytest.raises(ValueError, match=f'unknown reward model.*did you mean {re.escape(near)}') as e: models_reward.load_prm(name)
        assert '\n' not in str(e.value)

def test_a_language_model_is_not_a_reward_model():
    with pytest.raises(ValueError, match='no reward model of a known layout.*Qwen2ForCausalLM'): models_reward.load_prm(models_transformers.micro_path('small'))

def test_a_folder_is_known_by_its_tensors_where_its_architecture_is_not(skywork, qwen, tmp_path):
    for folder, kind in ((skywork, models_reward.SkyworkPRM), (qwen, models_reward.ProcessRewardModel)):
        to = shutil.copytree(folder, tmp_path/folder.name)
        said = json.loads((to/'config.json').read_text())
        (to/'config.json').write_text(json.dumps(said | dict(architectures=['Other'])))
        assert type(models_reward.load_prm(to)) is kind

def test_missing_tensors_and_files_are_told(qwen, tmp_path):
    from safetensors.torch import load_file, save_file
    lost = shutil.copytree(qwen, tmp_path/'lost')
    tensors = load_file(lost/'model.safetensors')
    save_file({k: v for k, v in tensors.items() if k != 'score.2.bias'}, lost/'model.safetensors', metadata=dict(format='pt'))
    with pytest.raises(ValueError, match="lack 1 tensors.*'score.2.bias'"): models_reward.load_prm(lost)
    cut = shutil.copytree(qwen, tmp_path/'cut')
    (cut/'model.safetensors').write_bytes((cut/'model.safetensors').read_bytes()[:5000])
    with pytest.raises(FileNotFoundError, match='does not load') as e: models_reward.load_prm(cut)
    assert '\n' not in str(e.value)
    (tmp_path/'empty').mkdir()
    with pytest.raises(FileNotFoundError, match='no config.json'): models_reward.load_prm(tmp_path/'empty')
    with pytest.raises(ValueError, match='tokens of this tokenizer'): models_reward.load_prm(qwen, tag='the end')
    with pytest.raises(ValueError, match='batch_size=0'): models_reward.load_prm(qwen, batch_size=0)

def test_settings_tell_models_apart(qwen, tmp_path):
    told = lambda **kwargs: json.dumps(models_reward.load_prm(qwen, **kwargs).settings(), sort_keys=True)
    assert told() == told() and len({told(), told(dtype='float32'), told(tag='.'), told(name='other')}) == 4
    assert told() == told(context=100, batch_size=2) # what changes no reward
    other = shutil.copytree(qwen, tmp_path/qwen.name)
    from safetensors.torch import load_file, save_file
    tensors = load_file(other/'model.safetensors'); tensors['score.2.bias'] += 1
    save_file(tensors, other/'model.safetensors', metadata=dict(format='pt'))
    assert json.dumps(models_reward.load_prm(other).settings(), sort_keys=True) != told()

# Labels

EVERY = [(b, f) for b, fs in data_families.FAMILIES.items() for f in fs]

@settings(max_examples=150, deadline=None)
@given(pick=st.sampled_from(EVERY), level=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_a_chain_is_sound_until_a_slip_and_from_its_repair_on(pick, level, seed):
    rng = random.Random(seed)
    draft = pick[1](rng, level)
    problem, right = data_micro.as_problem(pick[0], draft), data_families.solve(draft)
    assert labs_reward_model.right_steps(problem, right) == [True] * len(right)
    wrong, at = data_micro.corrupt(draft, rng)
    labels = labs_reward_model.right_steps(problem, wrong)
    assert labels == [i < at for i in range(len(wrong))] and labels[:at] == [True] * at
    repaired = wrong[:at + 1] + [data_micro.REPAIR + right[at]] + right[at + 1:]
    assert labs_reward_model.right_steps(problem, repaired) == [True] * at + [False] + [True] * (len(right) - at)
    if at: # an earlier step again repairs nothing
        assert labs_reward_model.right_steps(problem, wrong[:at + 1] + [data_micro.REPAIR + right[at - 1]])[at + 1:] == [False]
    assert labs_reward_model.right_steps(problem, wrong[:at + 1] + [right[at]])[at + 1:] == [False] # nor does a step that does not say that it does

def test_slips_carry_their_own_labels():
    kinds = set()
    for question, steps, right in labs_reward_model.slips(random.Random(3), 300):
        assert len(steps) == len(right) and not all(right) and data_micro.micro_split(question) == 'lm'
        first = right.index(False)
        sound = [i for i in range(first, len(right)) if right[i]]
        assert sound == list(range(sound[0], len(right))) and steps[sound[0]].startswith(data_micro.REPAIR) if sound else True
        kinds.add(bool(sound))
    assert kinds == {True, False}

@pytest.fixture(scope='module')
def pair(): return {which: models_transformers.load_micro(which, dtype='float32') for which in ('small', 'large')}

def test_chains_come_from_the_language_models_pool_and_from_the_seed(pair):
    rows = labs_reward_model.reward_chains(0, 12, 5, pair)
    assert rows == labs_reward_model.reward_chains(0, 12, 5, pair) and rows != labs_reward_model.reward_chains(1, 12, 5, pair)
    assert {data_micro.micro_split(q) for q, _, _ in rows} == {'lm'} and all(len(s) == len(r) for _, s, r in rows)
    assert len(rows) >= 24 and {r for _, _, right in rows for r in right} == {True, False}

# Training

RUN = dict(init='small', steps=6, chunks=2, problems=30, batch_tokens=512, warmup=2)

@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp('trained')
    labs_reward_model.train_prm(out, **RUN)
    return out

def test_training_goes_on_where_it_stopped(trained, tmp_path):
    assert labs_reward_model.train_prm(tmp_path, **RUN, stop_after=3) is None
    labs_reward_model.train_prm(tmp_path, **RUN)
    for name in ('chains-000.jsonl', 'chains-001.jsonl', 'model.safetensors', 'config.json', 'training.json'):
        assert (tmp_path/name).read_bytes() == (trained/name).read_bytes(), name

def test_a_folder_keeps_to_its_settings(trained):
    with pytest.raises(ValueError, match='holds a training with.*seed=0.*another folder'): labs_reward_model.train_prm(trained, **RUN, seed=1)
    with pytest.raises(ValueError, match="unknown micro model 'smal'"): labs_reward_model.train_prm(trained/'x', init='smal')

def test_what_was_trained_is_what_vllm_expects_and_loads(trained):
    from safetensors.torch import load_file
    tensors = load_file(trained/'model.safetensors')
    head = {k for k in tensors if not k.startswith('model.')}
    assert head == {'score.0.weight', 'score.0.bias', 'score.2.weight', 'score.2.bias'} and tensors['score.2.weight'].shape == (2, 64)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert json.loads((trained/'config.json').read_text())['architectures'] == ['Qwen2ForProcessRewardModel']
    assert 0 <= asked(models_reward.load_prm(trained), (PROBLEMS[0], CHAIN))[0].value <= 1

def test_too_few_chains_are_told():
    with pytest.raises(ValueError, match='fill no batch'): labs_reward_model.reward_batches(labs_language_models.micro_tokenizer(), [('q', ['a'], [True])], random.Random(0))

# The shipped model

def test_the_shipped_model_knows_right_steps_from_wrong_ones_on_problems_it_never_saw(pair):
    prm, values, labels = models_reward.load_prm(), [], []
    for b in data_families.FAMILIES:
        problems = data_micro.micro_problems(b, 'test', 40, 7)
        chains = labs_measure.micro_chains(pair['small'], problems)
        values += [v for r in models_reward.step_rewards(prm, list(zip(problems, chains))) for v in r]
        labels += [r for p, c in zip(problems, chains) for r in labs_reward_model.right_steps(p, c)]
    above = np.subtract.outer(np.array(values)[np.array(labels)], np.array(values)[~np.array(labels)])
    assert ((above > 0) + .5 * (above == 0)).mean() > .85

def test_the_shipped_model_is_small_and_reported():
    folder = models_transformers.micro_path('small').parent/'prm'
    assert sum(f.stat().st_size for f in folder.iterdir()) < 2.5e6
    report = json.loads((folder/'report.json').read_text())
    assert set(report['benchmarks']) == set(data_families.FAMILIES) and report['split'] == 'test'
    assert models_reward.load_prm().spec.name == 'micro-prm' and models_reward.load_prm().spec.params == report['parameters']

# ProcessBench

def row(**kwargs): return dict(dict(id='gsm8k-0', problem='1+1?', steps=['1+1=2', 'So 2.'], label=-1, final_answer_correct=True), **kwargs)

def write(path, rows):
    path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
    return path

def test_rows_are_read(tmp_path):
    rows = labs_reward_model.load_processbench(write(tmp_path/'a.jsonl', [row(), row(id='gsm8k-1', label=1, final_answer_correct=False)]))
    assert [(m.problem.id, m.problem.question, m.steps, m.label, m.final_correct) for m in rows] == [
        ('gsm8k-0', '1+1?', ('1+1=2', 'So 2.'), -1, True), ('gsm8k-1', '1+1?', ('1+1=2', 'So 2.'), 1, False)]

@pytest.mark.parametrize('bad, why', [
    ({k: v for k, v in row().items() if k != 'label'}, "no field 'label'"),
    ({('step' if k == 'steps' else k): v for k, v in row().items()}, "no field 'steps' \\(did you mean 'step'\\?\\)"),
    (row(label='1'), "field 'label' is str"), (row(label=True), "field 'label' is bool"), (row(label=2), 'label 2 is no step of 2'),
    (row(label=-2), 'label -2'), (row(steps=[]), 'not a list of texts'), (row(steps=['a', 3]), 'not a list of texts'),
    (row(steps='a'), "field 'steps' is str"), (row(problem=None), "field 'problem' is NoneType"), ([1], 'not a JSON object')])
def test_a_bad_row_is_named(tmp_path, bad, why):
    path = write(tmp_path/'b.jsonl', [row(), bad])
    with pytest.raises(ValueError, match=f'b.jsonl, row 2: .*{why}') as e: labs_reward_model.load_processbench(path)
    assert '\n' not in str(e.value)

def test_a_bad_file_is_named(tmp_path):
    path = write(tmp_path/'c.jsonl', [row(), row()])
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match='c.jsonl, row 2: .*cut off'): labs_reward_model.load_processbench(path)
    with pytest.raises(FileNotFoundError, match="did you mean 'c.jsonl'"): labs_reward_model.load_processbench(tmp_path/'d.jsonl')
    (tmp_path/'empty.jsonl').write_text('')
    with pytest.raises(ValueError, match='no rows'): labs_reward_model.load_processbench(tmp_path/'empty.jsonl')

def marked(label, n=4): return labs_reward_model.Marked(Problem('processbench', 'x', 'q', ''), ('s',) * n, label)

@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), min_size=2, max_size=30))
def test_f1_is_the_harmonic_mean_of_two_accuracies(pairs):
    labels, said = zip(*pairs)
    error, correct = [s == l for l, s in pairs if l != -1], [s == l for l, s in pairs if l == -1]
    rows = [marked(l) for l in labels]
    if not error or not correct:
        with pytest.raises(ValueError, match='with and without'): labs_reward_model.processbench_f1(said, rows)
        return
    a, b = sum(error) / len(error), sum(correct) / len(correct)
    told = labs_reward_model.processbench_f1(said, rows)
    assert told['f1'] == pytest.approx(0 if not a or not b else 2 / (1 / a + 1 / b))
    assert (told['error'], told['correct'], told['n_error'], told['n_correct']) == (a, b, len(error), len(correct))

class Scripted:
    "A reward model that says what it is told, by the number of steps."
    def __init__(self, values): self.values = values
    async def reward(self, problem, steps): return models_reward.Reward(self.values[len(steps) - 1], 1, 1)

def test_a_model_predicts_the_first_step_below_the_threshold():
    rows = [marked(-1), marked(1), marked(2)]
    assert labs_reward_model.first_below([.9, .5, .49, .1]) == 2 and labs_reward_model.first_below([.9, .5]) == -1 and labs_reward_model.first_below([]) == -1
    told = labs_reward_model.processbench_f1(Scripted([.9, .4, .3, .9]), rows)
    assert (told['error'], told['correct']) == (.5, 0) and told['f1'] == 0
    assert labs_reward_model.processbench_f1(Scripted([.9, .4, .3, .9]), rows, threshold=.35)['error'] == .5
    assert labs_reward_model.processbench_f1(Scripted([.9, .4, .3, .9]), rows, threshold=.2)['correct'] == 1

def test_predictions_must_match_the_rows():
    with pytest.raises(ValueError, match='1 predictions for 2 rows'): labs_reward_model.processbench_f1([0], [marked(-1), marked(0)])
