"""Models that run here: what they write, score and choose, whoever shares the call; rewards; opening by name.

vLLM is not installed where these tests run: tests/gpu has scripts for it. An API has a file of its own.
"""

import json
import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

torch = pytest.importorskip('torch')
import transformers
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.data.steps import first_wrong
from stepwise_routing.models.base import (
    Request,
    StepTokenizer,
    draw_tokens,
    prompt_text,
    reply_steps,
)
from stepwise_routing.models.open import (
    ModelOptions,
    find_weights,
    open_model,
    open_models,
    open_reward,
    short_name,
)
from stepwise_routing.models.vllm import VLLMModel
from stepwise_routing.records import Problem, Step, chat_prompt, score_messages, verdict_messages

torch.set_num_threads(1)
SMALL, _ = find_weights('micro-small')
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(SMALL)
END = '<|im_end|>'  # ends a reply
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
)
TURNS = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'


@pytest.fixture(scope='module')
def model():
    return open_model(ModelOptions(name='micro-small', max_tokens=60))


@pytest.fixture(scope='module')
def problems():
    return [*load_problems('micro-gsm', 'test', 2), *load_problems('micro-omni', 'test', 3)]


@pytest.fixture(scope='module')
def chains(model, problems):
    "Per problem and sample, a chain that was written alone, one step a call."
    written = {}
    for problem in problems:
        for sample in range(2):
            steps = ()
            while not steps or not steps[-1].final:
                steps += model.write([Request(problem, steps, sample)])[0]
            written[problem, sample] = steps
    return written


def joined_ids(steps) -> list:
    return [i for step in steps for i in step.ids]


def assert_same(steps, expected):
    "Equal in all that is drawn. Rounding depends on the batch, so confidences are nearly equal."
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected):
        for name in ('text', 'model', 'finish', 'ids', 'ends', 'generated', 'prompt'):
            assert getattr(step, name) == getattr(other, name)
        assert_same_confidences(step, other)


def assert_same_confidences(step, other):
    if not step.ids:
        return
    for name in ('prob', 'max_logit', 'entropy'):
        np.testing.assert_allclose(getattr(step, name), getattr(other, name), rtol=1e-3, atol=1e-5)


# ---- writing


@pytest.mark.parametrize('batch', [1, 3, 32])
def test_a_step_does_not_depend_on_the_call_that_writes_it(model, chains, monkeypatch, batch):
    "From any place in a chain, one step or all, in lists in which some prompts begin others and some are asked twice."
    jobs = []
    for (problem, sample), chain in chains.items():
        for t in range(len(chain)):
            jobs.append((Request(problem, chain[:t], sample), chain[t : t + 1]))
            jobs.append((Request(problem, chain[:t], sample, to_end=True), chain[t:]))
    jobs = random.Random(batch).choices(jobs, k=8 + 2 * batch)
    monkeypatch.setattr(model, 'batch', batch)
    for (_, expected), steps in zip(jobs, model.write([request for request, _ in jobs])):
        assert_same(steps, expected)


def test_each_token_is_billed_once_and_samples_differ(chains):
    for chain in chains.values():
        for t, step in enumerate(chain):
            assert step.generated == len(step.ids) == len(step.ends) == len(step.prob)
            assert step.prompt == chain[0].prompt + len(joined_ids(chain[:t]))
    drawn = {(problem.id, *joined_ids(chain)) for (problem, _), chain in chains.items()}
    assert len(drawn) > len(chains) / 2


def test_a_chain_ends_where_the_context_is_full(model, chains, monkeypatch):
    (problem, sample), whole = next(iter(chains.items()))
    ids, prompt = joined_ids(whole), whole[0].prompt
    borders = {len(joined_ids(whole[:t])) for t in range(len(whole))}
    for room in sorted({*borders, *(border + 1 for border in borders), len(ids) - 1}):
        monkeypatch.setattr(model, 'context', prompt + room)
        (steps,) = model.write([Request(problem, (), sample, to_end=True)])
        *before, last = steps
        assert joined_ids(steps) == ids[:room]
        assert_same(before, whole[: len(before)])
        assert (last.finish, last.generated) == ('length', len(last.ids))
        assert (last.text == '') == (room in borders)
        assert_same(model.write([Request(problem, tuple(before), sample)])[0], (last,))
    (too_long,) = model.write([Request(problem, whole, sample)])
    assert [(step.text, step.finish, step.generated) for step in too_long] == [('', 'length', 0)]


def test_limits_of_a_step_and_of_a_chain(model, chains, monkeypatch):
    (problem, sample), whole = next(iter(chains.items()))
    for kept in (0, 1):
        request = Request(problem, whole[:kept], sample, to_end=True, max_steps=3)
        assert_same(model.write([request])[0], whole[kept:3])
    monkeypatch.setattr(model, 'max_tokens', 5)
    (steps,) = model.write([Request(problem, (), sample, to_end=True)])
    assert [(step.ids, step.finish) for step in steps] == [(whole[0].ids[:5], 'length')]


# ---- other architectures


def tiny(kind: str, **more):
    "A configuration with two layers that fits the micro tokenizer."
    size = dict(vocab_size=960, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(intermediate_size=48, max_position_embeddings=512, eos_token_id=2)
    return getattr(transformers, kind + 'Config')(**size | more)


def save_random(folder, config):
    "A random model whose next token is seldom a matter of rounding."
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config)
    for weights in net.parameters():
        if weights.dim() > 1:
            weights.data *= 4
    net.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    'config',
    [
        None,  # micro-small
        tiny('Llama', num_key_value_heads=1),
        tiny('Qwen3', num_key_value_heads=2, head_dim=32),
        tiny('GPTNeoX'),  # no heads share keys
        tiny('Mistral', num_key_value_heads=2, sliding_window=4096),  # longer than its context
    ],
    ids=lambda config: config.model_type if config else 'micro',
)
def test_greedy_draws_are_those_of_transformers(tmp_path, config):
    folder = save_random(tmp_path, config) if config else SMALL
    model = open_model(ModelOptions(name=str(folder), temperature=0.0, max_tokens=40, batch=3))
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [Problem('toy', str(i), 'Add 2 and 3. ' * 4**i, '') for i in range(4)]
    for problem, steps in zip(asked, model.write([Request(p, to_end=True) for p in asked])):
        prompt = model.text.prefix_ids(problem, ())
        ids = joined_ids(steps)
        limit = dict(do_sample=False, max_new_tokens=len(ids))
        expected = net.generate(torch.tensor([prompt]), **limit)
        assert ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    'config',
    [
        tiny('Qwen2', use_sliding_window=True, sliding_window=16, max_window_layers=1),
        tiny('Mistral', sliding_window=16),  # its configuration lists no kinds of layers
        tiny('Gemma3Text', head_dim=16, sliding_window=16),
        tiny('GptOss', head_dim=16, sliding_window=4096, layer_types=['full_attention'] * 2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_would_be_computed_wrongly_is_refused(tmp_path, config):
    with pytest.raises(ValueError, match='full attention') as error:
        open_model(str(save_random(tmp_path / 'windowed', config)))
    assert 'windowed' in str(error.value)
    assert '\n' not in str(error.value)


# ---- draws


@pytest.mark.parametrize('temperature, top_p', [(1, 1), (0.7, 1), (0.7, 0.6), (2, 0.9)])
def test_draws_have_the_distribution_of_the_logits(temperature, top_p):
    "On a fine grid of random numbers, each token is drawn as often as its share says, give or take one."
    logits = np.array([-np.inf, 2, 1, 0, -1, 0.5, 1.9])
    share = np.exp(logits / temperature)
    order = np.argsort(-share)
    mass_before = np.cumsum(share[order]) - share[order]
    share[order[mass_before >= top_p * share.sum()]] = 0
    n = 10_000
    u = torch.arange(n, dtype=torch.float64) / n
    rows = torch.tensor(logits).float().expand(n, -1)
    drawn = np.bincount(draw_tokens(rows, u, temperature, top_p), minlength=len(logits))
    assert np.abs(drawn - n * share / share.sum()).max() <= 1
    assert not drawn[share == 0].any()
    assert set(draw_tokens(rows, u, 0.0, top_p).tolist()) == {1}


# ---- reading


def plain_logits(net, prompt, ids):
    "Logits that predict tokens, by one pass of a model of transformers."
    with torch.inference_mode():
        return net(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()


def test_confidences_are_those_of_a_plain_pass_and_score_finds_them_again(model, chains):
    net = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32)
    for (problem, sample), chain in chains.items():
        prefixes = [Request(problem, chain[: t + 1], sample) for t in range(len(chain))]
        for step, scored in zip(chain, model.score(prefixes)):
            prompt = model.text.prefix_ids(problem, chain[: chain.index(step)])
            logits = plain_logits(net, prompt, step.ids)
            probs = logits.softmax(-1)
            first = probs[0]
            plain = dict(
                prob=probs[range(len(step.ids)), step.ids],
                max_logit=logits.amax(-1),
                entropy=-torch.special.xlogy(first, first).sum(),
            )
            assert_same_confidences(step, Step('', 0, 'step', **plain))
            assert_same_confidences(scored, step)
            assert (scored.text, scored.ids, scored.ends) == (step.text, step.ids, step.ends)
            assert (scored.generated, scored.prompt) == (0, len(prompt) + len(step.ids))


def test_a_step_of_another_vocabulary_is_read_as_text(model, problems):
    for ids in ((), (10**6,), (5, 6)):
        step = Step('3+4=7', 1, 'step', ids=ids, prob=(0.5,) * len(ids))
        (scored,) = model.score([Request(problems[0], (step,))])
        assert scored.ids == tuple(TOKENIZER.encode('3+4=7\n\n'))
        assert (scored.text, scored.model, len(scored.prob)) == ('3+4=7', 1, len(scored.ids))


def test_choose_tells_how_likely_each_option_is(model, problems):
    net = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32)
    steps = ['3+4=7', 'Answer: 7']
    asks = [(verdict_messages, ['correct', 'incorrect'], ''), (score_messages, [*'0123'], steps[1])]
    for messages_of, options, before in asks:
        conversations = [messages_of(problem, steps) for problem in problems]
        too_long = messages_of(Problem('toy', '0', 'long ' * 3000, ''), steps)
        *found, last = model.choose([*conversations, too_long], options)
        assert last is None
        first = [TOKENIZER.encode(option)[0] for option in options]
        for messages, preference in zip(conversations, found):
            ids = TOKENIZER.encode(prompt_text(TOKENIZER, messages))
            prob = plain_logits(net, ids, [0])[0, first].softmax(-1)
            np.testing.assert_allclose(preference.prob, prob, rtol=1e-3)
            assert preference.prompt == len(ids)
            assert TOKENIZER.decode(ids[: preference.shared]).endswith(before)
            assert (preference.shared > 0) == (len(messages) > 1)


# ---- where a step ends

BOX_IN_QUESTION = r'Which number makes $3 \cdot \boxed{\phantom{2}} = 12$ or \boxed{5} true?'
REPLIES = [  # a reply; its steps. <|im_end|> ends it, else it is cut off
    ('a\n\nb' + END, ['a', 'b']),
    ('a.\n\n\n\nb.\nc \n\nd' + END, ['a.', 'b.\nc', 'd']),
    ('\n \n\n a\n\nb', ['a', 'b']),
    ('é 😀\n\n≤ b', ['é 😀', '≤ b']),
    ('a\n\nb\n\n', ['a', 'b']),
    (END, ['']),
    ('a\n\n\\boxed{7}.\n\nb\n\nc' + END, ['a', '\\boxed{7}.']),  # what follows an answer is dropped
    ('a\n\n\\boxed{7', ['a', '\\boxed{7']),
    (
        '3 \\boxed{\\phantom{2}} = 12\n\n\\boxed{4}\n\nb',
        ['3 \\boxed{\\phantom{2}} = 12', '\\boxed{4}'],
    ),
    ('So \\boxed{5}?\n\n\\boxed{6}\n\nb', ['So \\boxed{5}?', '\\boxed{6}']),
    (
        'I use \\boxed{}.\n\n\\boxed{ }\n\n\\boxed{4}\n\nb',
        ['I use \\boxed{}.', '\\boxed{ }', '\\boxed{4}'],
    ),
]
TEXTS = st.lists(
    st.sampled_from(['a', ' ', '\n', '\n\n', '.\n\n', 'é', '😀', '\\boxed{7}']), max_size=9
)


class WithoutEngine(VLLMModel):
    "It cannot draw, but finds the steps of tokens that were drawn."

    def __init__(self):
        self.index = 1
        self.text = StepTokenizer(TOKENIZER, [], 960)


WRITER = WithoutEngine()


def steps_of_tokens(request, ids, is_full):
    return WRITER.steps(request, [[i, 9.0, 0.5, 0.1] for i in ids], 100, is_full)


def tokens_of(text: str) -> list:  # (text, probability), as an API shows them
    return [(character, 0.5) for character in text]


@pytest.mark.parametrize('reply, expected', REPLIES)
def test_where_the_steps_of_a_reply_end(reply, expected):
    "The same for tokens, for a text with tokens, and for a text alone; however the text is cut into tokens."
    request = Request(Problem('toy', '1', BOX_IN_QUESTION, '7'), to_end=True)
    text = reply.removesuffix(END)
    is_cut = text == reply
    last = 'stop' if not is_cut or 'boxed{' in expected[-1] and '}' in expected[-1] else 'length'
    finishes = ['step'] * (len(expected) - 1) + [last]
    characters = [i for character in text for i in TOKENIZER.encode(character)]
    written = [
        steps_of_tokens(request, TOKENIZER.encode(reply), is_cut),
        steps_of_tokens(request, characters + ([] if is_cut else [2]), is_cut),
    ]
    for probs in ((), tokens_of(text)):
        usage = 100, 0, len(text) + 1
        finish = 'length' if is_cut else 'stop'
        written.append(reply_steps(request, 1, text, finish, usage, probs))
    for steps in written:
        assert [step.text for step in steps] == expected
        assert [step.finish for step in steps] == finishes
        assert steps[0].prompt == 100
        for step, following in zip(steps, steps[1:]):
            assert following.prompt == step.prompt + step.generated


@settings(max_examples=100)
@given(TEXTS)
def test_offsets_of_tokens_lie_in_the_text_of_their_step(pieces):
    ids = [i for piece in pieces for i in TOKENIZER.encode(piece)]
    whole = TOKENIZER.decode(ids)
    text, ends, ended = WRITER.text.parse(ids)
    first, *others = whole.lstrip().split('\n\n')
    assert (text, ended) == (first.rstrip(), bool(others))
    assert len(ends) == len(ids)
    assert list(ends) == sorted(ends)
    assert {*ends} <= {*range(len(text) + 1)}
    lead = len(whole) - len(whole.lstrip())
    for t, end in enumerate(ends):
        begun = TOKENIZER.decode(ids[: t + 1])[lead:][: len(text)]
        if '\ufffd' not in begun:  # no part of a character
            assert text[:end] == begun


@settings(max_examples=300)  # they are fast
@given(TEXTS, st.integers(1, 4), st.booleans())
def test_the_bill_of_a_reply_is_that_of_the_server(pieces, room, shows_tokens):
    "Whatever is dropped behind an answer or a limit."
    text = ''.join(pieces)
    probs = tokens_of(text) if shows_tokens else ()
    request = Request(Problem('toy', '1', '?', '7'), to_end=True, max_steps=room)
    steps = reply_steps(request, 1, text, 'stop', (100, 64, len(text) + 3), probs)
    assert 1 <= len(steps) <= room
    assert sum(step.generated for step in steps) == len(text) + 3
    assert [step.cached for step in steps] == [64] + [0] * (len(steps) - 1)
    for step, following in zip(steps, steps[1:]):
        assert following.prompt == step.prompt + step.generated
        if shows_tokens:  # one a character
            part = text[step.prompt - 100 : following.prompt - 100]
            assert part.endswith('\n\n')
            assert part.strip() == step.text
    for step in steps:
        assert len(step.ends) == len(step.prob) <= step.generated
        assert {*step.ends} <= {*range(len(step.text) + 1)}
        if shows_tokens and step.text:
            assert step.ends[-1] == len(step.text)


# ---- chat templates


def test_a_template_without_system_role_gets_it_in_front_of_the_question():
    plain, refusing = [PreTrainedTokenizerFast.from_pretrained(SMALL) for _ in range(2)]
    plain.chat_template, refusing.chat_template = TURNS, REFUSES_SYSTEM + TURNS
    system, user = chat_prompt('1+1?')
    begun = dict(role='assistant', content='So ')
    with pytest.warns(UserWarning, match='system') as warned:
        text = prompt_text(refusing, [system, user, begun])
    assert '\n' not in str(warned[0].message)
    both = dict(role='user', content=f'{system["content"]}\n\n1+1?')
    assert text == prompt_text(plain, [both, begun]) == prompt_text(plain, [both]) + 'So '
    assert prompt_text(refusing, [both]) == prompt_text(plain, [both])


def test_template_options_reach_the_template_and_the_settings(tmp_path):
    folder = shutil.copytree(SMALL, tmp_path / 'thinking')
    template = TURNS + '{% if enable_thinking is false %}<no thoughts>{% endif %}'
    (folder / 'chat_template.jinja').write_text(template)
    options = dict(enable_thinking=False)
    thinking, quiet = open_models([folder]), open_models([folder], chat_template_kwargs=options)
    for (model,), expected in ((thinking, False), (quiet, True)):
        text = TOKENIZER.decode(model.text.messages_ids(chat_prompt('1+1?')))
        assert text.endswith('<no thoughts>') == expected
    assert quiet[0].settings() == thinking[0].settings() | dict(template=options)


# ---- opening


def test_settings_are_what_draws_depend_on(model):
    same = ModelOptions(name='micro-small', max_tokens=60, batch=7)
    assert open_model(same).settings() == json.loads(json.dumps(model.settings()))
    for change in (dict(temperature=1.0), dict(top_p=0.9), dict(context=99), dict(dtype='float64')):
        other = ModelOptions(name='micro-small', **dict(max_tokens=60) | change)
        assert open_model(other).settings() != model.settings()


@pytest.mark.parametrize(
    'name, options, word',
    [
        ('micro-smal', {}, 'micro-small'),
        ('micro-small', dict(temprature=1.0), 'temperature'),
        ('micro-small', dict(top_p=0.0), 'top_p'),
        ('org/model@main', {}, 'org/model@main'),
        ('vllm:org/model@main', {}, 'org/model@main'),
        ('openai:gpt-4.1-mini', {}, 'replies'),
        ('EMPTY', {}, 'EMPTY'),
        ('nowhere/at/all', {}, 'nowhere/at/all'),
    ],
)
def test_a_bad_name_or_option_gives_one_line(tmp_path, monkeypatch, name, options, word):
    (tmp_path / 'EMPTY').mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=word) as error:
        open_models([name], **options)
    assert '\n' not in str(error.value)


def test_a_public_name_tells_no_place(tmp_path):
    names = {
        'micro-small': 'micro-small',
        'vllm:micro-large': 'micro-large',
        'org/model@' + 'a1' * 20: 'model',
        'vllm:org/model': 'model',
        '/home/me@work/model/': 'model',
        'openai:gpt-4.1-mini': 'gpt-4.1-mini',
    }
    assert {name: short_name(ModelOptions(name=name).place) for name in names} == names
    folder = shutil.copytree(SMALL, tmp_path / 'me@work' / 'mine')
    model = open_model(str(folder))
    assert model.spec.name == 'mine'
    assert str(tmp_path) not in json.dumps(model.settings())


# ---- rewards


@pytest.fixture(scope='module')
def one_value(tmp_path_factory):
    "A small checkpoint in the layout of Skywork-o1-Open-PRM: a value head on a whole language model."
    folder = tmp_path_factory.mktemp('one-value')
    config = tiny('Qwen2', num_key_value_heads=2, architectures=['Qwen2ForPrmModel'])
    config.save_pretrained(folder)
    torch.manual_seed(0)
    tensors = transformers.Qwen2Model(config).state_dict()
    tensors = {f'model.{name}': weights for name, weights in tensors.items()}
    tensors['v_head.summary.weight'] = torch.randn(1, 64)
    tensors['v_head.summary.bias'] = torch.randn(1)
    tensors['lm_head.weight'] = torch.randn(960, 64)
    save_file(tensors, folder / 'model.safetensors', metadata=dict(format='pt'))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SMALL, bos_token='<|endoftext|>')
    tokenizer.save_pretrained(folder)
    return folder


def plain_rewards(folder):
    "(question, texts of steps) -> (value of the last one, tokens), with plain torch."
    config = transformers.AutoConfig.from_pretrained(folder)
    body = transformers.Qwen2Model(config).float()
    tensors = {k: v.float() for k, v in load_file(folder / 'model.safetensors').items()}
    inner = [name for name in tensors if name.startswith('model.')]
    body.load_state_dict({name.removeprefix('model.'): tensors[name] for name in inner})

    def linear(name, x):
        return tensors[f'{name}.weight'] @ x + tensors[f'{name}.bias']

    def reward(question, texts):
        has_value = 'v_head.summary.weight' in tensors
        prompt = prompt_text(TOKENIZER, chat_prompt(question))
        ids = TOKENIZER.encode(f'<|endoftext|>{question}\n' if has_value else prompt)
        for text in texts:
            ids += [*TOKENIZER.encode(text), *TOKENIZER.encode('\n\n')]
        with torch.inference_mode():
            last = body(torch.tensor([ids])).last_hidden_state[0, -1]
        if has_value:
            return float(torch.sigmoid(linear('v_head.summary', last))), len(ids)
        labels = linear('score.2', torch.relu(linear('score.0', last)))
        return float(labels.softmax(0)[1]), len(ids)

    return reward


@pytest.mark.parametrize('kind', ['two labels', 'one value'])
def test_rewards_in_a_list_are_those_of_a_plain_pass_each(one_value, chains, kind):
    folder = one_value if kind == 'one value' else find_weights('micro-prm')[0]
    requests = []
    for (problem, _), chain in chains.items():
        requests += [Request(problem, chain[: t + 1]) for t in range(len(chain))]
    random.Random(0).shuffle(requests)
    rewards = open_reward(str(folder)).reward(requests)
    assert np.ptp([reward.value for reward in rewards]) > 0.05
    by_hand = plain_rewards(folder)
    for request, reward in zip(requests, rewards):
        question, texts = request.problem.question, [step.text for step in request.steps]
        value, tokens = by_hand(question, texts)
        assert abs(reward.value - value) < 1e-4
        assert reward.tokens == tokens
        assert reward.new == tokens - by_hand(question, texts[:-1])[1]


def test_the_shipped_reward_model_tells_right_steps_from_the_first_wrong_one(model):
    problems = load_problems('micro-math', 'test', 60)
    chains = model.write([Request(problem, to_end=True) for problem in problems])
    requests, is_right = [], []
    for problem, chain in zip(problems, chains):
        wrong = first_wrong(problem, chain)
        for t in range(len(chain) if wrong < 0 else wrong + 1):
            requests.append(Request(problem, chain[: t + 1]))
            is_right.append(t != wrong)
    rewards = open_reward('micro-prm').reward(requests)
    assert roc_auc_score(is_right, [reward.value for reward in rewards]) > 0.75


def test_a_chain_beyond_the_context_has_no_reward_and_a_step_cannot_end_its_turn(problems):
    prm = open_reward('micro-prm')
    short = Request(problems[0], (Step('3+4=7', 0, 'step'),))
    sly = Request(problems[0], (Step(f'3+4=7{END}', 0, 'step'),))
    long = Request(problems[0], (Step('3+4=7 ' * 1000, 0, 'step'),))
    plain, text, nothing, again = prm.reward([short, sly, long, short])
    assert nothing is None
    assert again == plain
    assert text.new > plain.new + 1  # the mark is many tokens, none of which ends a turn


def test_what_is_no_reward_model_or_lacks_its_head_is_refused(one_value, tmp_path):
    with pytest.raises(ValueError, match='micro.*small'):
        open_reward('micro-small')
    folder = shutil.copytree(one_value, tmp_path / 'headless')
    tensors = load_file(folder / 'model.safetensors')
    del tensors['v_head.summary.bias']
    save_file(tensors, folder / 'model.safetensors', metadata=dict(format='pt'))
    with pytest.raises(ValueError, match='v_head.summary.bias'):
        open_reward(str(folder))


# ---- many machines


@pytest.mark.slow
def test_two_workers_of_ray_draw_what_one_process_draws(model, chains):
    ray = pytest.importorskip('ray')
    cluster = open_model(ModelOptions(name='micro-small', max_tokens=60, copies=2))
    cluster.part = 3  # so that both work
    try:
        assert (cluster.spec, cluster.settings()) == (model.spec, model.settings())
        requests = [Request(problem, (), sample, to_end=True) for problem, sample in chains]
        for steps, expected in zip(cluster.write(requests), chains.values()):
            assert_same(steps, expected)
        scored = [Request(problem, chain) for (problem, _), chain in chains.items()]
        for step, expected in zip(cluster.score(scored), model.score(scored)):
            assert_same([step], [expected])
        asked = [verdict_messages(problem, ['3+4=7']) for problem, _ in chains]
        verdicts = 'correct', 'incorrect'
        for found, expected in zip(cluster.choose(asked, verdicts), model.choose(asked, verdicts)):
            np.testing.assert_allclose(found.prob, expected.prob, rtol=1e-4)
    finally:
        ray.shutdown()
