"""Models that run here: what they write, score and choose, whoever shares the call; rewards; opening by name.

vLLM is not installed where these tests run: tests/gpu has a script for it. An API has a file of its own.
"""

import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from toy_own import refused

torch = pytest.importorskip('torch')
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models import base, open as opening, reward
from stepwise_routing.models.base import Request, prompt_text
from stepwise_routing.models.vllm import VLLMModel
from stepwise_routing.records import Problem, Step, chat_prompt, score_messages, verdict_messages
from stepwise_routing.util import PACKAGE

torch.set_num_threads(1)
SMALL = PACKAGE / 'micro_models' / 'small'
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(SMALL, bos_token='<|endoftext|>')
END = '<|im_end|>'  # ends a reply
PROBLEMS = [*load_problems('micro-gsm', 'test', 2), *load_problems('micro-omni', 'test', 3)]


def open_one(name, **options):
    (model,) = opening.open_models([name], **options)
    return model


@pytest.fixture(scope='module')
def model():
    return open_one('micro-small', max_tokens=60)


@pytest.fixture(scope='module')
def chains(model):
    "Per problem and sample, a chain that was written alone, one step a call."
    written = {}
    for problem in PROBLEMS:
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
    confidences = 'prob', 'max_logit', 'entropy'
    unread = dict.fromkeys(confidences)
    for step, other in zip(steps, expected, strict=True):
        assert replace(step, **unread) == replace(other, **unread)
        for name in confidences if step.ids else ():
            near = dict(rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(getattr(step, name), getattr(other, name), **near)


# ---- writing
@pytest.mark.parametrize('batch', [1, 3, 32])
def test_a_step_does_not_depend_on_the_call_that_writes_it(model, chains, monkeypatch, batch):
    "From any place in a chain, a step, two or all, in lists in which some prompts begin others and some are asked twice."
    jobs = []
    for (problem, sample), chain in chains.items():
        for t in range(len(chain)):
            request = Request(problem, chain[:t], sample)
            jobs += [(request, chain[t : t + 1]), (replace(request, to_end=True), chain[t:])]
            jobs.append((replace(request, to_end=True, max_steps=t + 2), chain[t : t + 2]))
    jobs = random.Random(batch).choices(jobs, k=8 + 2 * batch)
    monkeypatch.setattr(model, 'batch', batch)
    for (_, expected), steps in zip(jobs, model.write([request for request, _ in jobs])):
        assert_same(steps, expected)


def test_a_chain_ends_where_there_is_room_for_no_more_tokens(model, chains, monkeypatch):
    (problem, sample), whole = next(iter(chains.items()))
    request = Request(problem, (), sample, to_end=True)
    borders = {len(joined_ids(whole[:t])) for t in range(len(whole))}
    for room in borders | {border + 1 for border in borders}:
        monkeypatch.setattr(model, 'context', whole[0].prompt + room)
        (steps,) = model.write([request])
        *before, last = steps
        assert joined_ids(steps) == joined_ids(whole)[:room]
        assert_same(before, whole[: len(before)])
        assert (last.finish, last.generated) == ('length', len(last.ids))
        assert (last.text == '') == (room in borders)
        assert_same(model.write([Request(problem, tuple(before), sample)])[0], [last])
    ((too_long,),) = model.write([Request(problem, whole, sample)])
    assert (too_long.finish, too_long.ids) == ('length', ())
    monkeypatch.undo()
    monkeypatch.setattr(model, 'max_tokens', 5)
    ((step,),) = model.write([request])
    assert (step.finish, step.ids) == ('length', whole[0].ids[:5])


# ---- other architectures
def tiny(kind: str, **more):
    "A configuration with two layers that fits the micro tokenizer."
    size = dict(vocab_size=960, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(intermediate_size=48, max_position_embeddings=512, eos_token_id=2)
    return getattr(transformers, kind + 'Config')(**size | more)


def save_random(folder, config, new=AutoModelForCausalLM.from_config):
    "A random model whose next token is seldom a matter of rounding."
    torch.manual_seed(0)
    net = new(config)
    for weights in net.parameters():
        weights.data *= 4 if weights.dim() > 1 else 1
    net.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_greedy_draws_are_those_of_transformers(tmp_path):
    asked = [Problem('toy', str(i), 'Add 2 and 3. ' * 4**i, '') for i in range(4)]
    for config in (
        tiny('Llama', num_key_value_heads=1),
        tiny('Qwen3', num_key_value_heads=2, head_dim=32),
        tiny('GPTNeoX'),  # no heads share keys
        tiny('Mistral', num_key_value_heads=2, sliding_window=4096),  # longer than its context
    ):
        folder = save_random(tmp_path / config.model_type, config)
        model = open_one(folder, temperature=0.0, max_tokens=40, batch=3)
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for problem, steps in zip(asked, model.write([Request(p, to_end=True) for p in asked])):
            prompt, ids = model.text.prefix_ids(problem, ()), joined_ids(steps)
            limit = dict(do_sample=False, max_new_tokens=len(ids))
            assert [*prompt, *ids] == net.generate(torch.tensor([prompt]), **limit)[0].tolist()


def test_a_model_that_would_be_computed_wrongly_is_refused(tmp_path):
    for config in (
        tiny('Qwen2', use_sliding_window=True, sliding_window=16, max_window_layers=1),
        tiny('Mistral', sliding_window=16),  # its configuration lists no kinds of layers
        tiny('GptOss', head_dim=16, sliding_window=4096, layer_types=['full_attention'] * 2),
    ):
        folder = save_random(tmp_path / config.model_type, config)
        refused(f'{config.model_type}.*full attention', open_one, folder)


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
    drawn = np.bincount(base.draw_tokens(rows, u, temperature, top_p), minlength=len(logits))
    assert np.abs(drawn - n * share / share.sum()).max() <= 1
    assert not drawn[share == 0].any()
    assert set(base.draw_tokens(rows, u, 0.0, top_p).tolist()) == {1}


# ---- reading
def plain_logits(net, prompt, ids):
    "Logits that predict tokens, by one pass of a model of transformers."
    with torch.inference_mode():
        return net(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()


def test_confidences_are_those_of_a_plain_pass_and_score_finds_them_again(model, chains):
    net = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32)
    for (problem, sample), chain in chains.items():
        prefixes = [Request(problem, chain[: t + 1], sample) for t in range(len(chain))]
        for t, (step, scored) in enumerate(zip(chain, model.score(prefixes))):
            prompt = model.text.prefix_ids(problem, chain[:t])
            logits = plain_logits(net, prompt, step.ids)
            probs = logits.softmax(-1)
            plain = dict(
                prob=probs[range(len(step.ids)), step.ids],
                max_logit=logits.amax(-1),
                entropy=-torch.special.xlogy(probs[0], probs[0]).sum(),
            )
            drawn = dict(prompt=len(prompt), generated=len(step.ids))
            read = dict(prompt=len(prompt) + len(step.ids), generated=0)
            assert_same([step, scored], [replace(step, **plain, **bill) for bill in (drawn, read)])


def test_a_step_of_another_vocabulary_is_read_as_text(model):
    steps = [Step('3+4=7', 1, 'step', ids=ids) for ids in ((10**6,), (5, 6))]
    for scored in model.score([Request(PROBLEMS[0], (step,)) for step in steps]):
        assert (scored.text, scored.ids) == ('3+4=7', tuple(TOKENIZER.encode('3+4=7\n\n')))


def test_choose_tells_how_likely_each_option_is(model):
    net = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32)
    steps = ['3+4=7', 'Answer: 7']
    problems = [*PROBLEMS, Problem('toy', '0', 'too long ' * 3000, '')]
    asked = [ask(p, steps) for p in problems for ask in (verdict_messages, score_messages)]
    options = ['correct', 'incorrect', '0']
    first = [TOKENIZER.encode(option)[0] for option in options]
    *found, _, none = model.choose(asked, options)
    assert none is None
    for messages, preference in zip(asked, found):
        ids = TOKENIZER.encode(prompt_text(TOKENIZER, messages))
        prob = plain_logits(net, ids, [0])[0, first].softmax(-1)
        np.testing.assert_allclose(preference.prob, prob, rtol=1e-3)
        assert preference.prompt == len(ids)
        shared = TOKENIZER.decode(ids[: preference.shared])
        assert shared[-9:] == ('Answer: 7' if len(messages) > 1 else '')


# ---- where a step ends
QUESTION = r'Which number makes $3 \cdot \boxed{\phantom{2}} = 12$ or \boxed{5} true?'
ASKED = Request(Problem('toy', '1', QUESTION, '7'), to_end=True)
NO_ANSWERS = [r'3 \boxed{\phantom{2}} = 12', r'So \boxed{5}?', r'I use \boxed{}.', r'\boxed{ }']
REPLIES = [  # a reply; its steps; how the last one ends. <|im_end|> ends it, else it is cut off
    ('a\n\nb' + END, ['a', 'b'], 'stop'),
    ('a.\n\n\n\nb.\nc \n\nd' + END, ['a.', 'b.\nc', 'd'], 'stop'),
    ('\n \n\n a\n\nb', ['a', 'b'], 'length'),
    ('é 😀\n\n≤ b', ['é 😀', '≤ b'], 'length'),
    ('a\n\nb\n\n', ['a', 'b'], 'length'),
    (END, [''], 'stop'),
    ('a\n\n\\boxed{7}.\n\nb\n\nc', ['a', '\\boxed{7}.'], 'stop'),  # behind an answer all is dropped
    ('a\n\n\\boxed{7', ['a', '\\boxed{7'], 'length'),
    ('\n\n'.join([*NO_ANSWERS, '\\boxed{4}', 'b']), [*NO_ANSWERS, '\\boxed{4}'], 'stop'),
]
PIECES = st.sampled_from(['a', ' ', '\n', '\n\n', '.\n\n', 'é', '😀', '\\boxed{7}'])
TEXT = base.StepTokenizer(TOKENIZER, [], 960)


def steps_of_tokens(ids, is_full):
    without_engine, numbers = SimpleNamespace(index=1, text=TEXT), (9.0, 0.5, 0.1)
    return VLLMModel.steps(without_engine, ASKED, [[i, *numbers] for i in ids], 100, is_full)


def as_tokens(text: str) -> list:  # one a character, as an API shows them
    return [(character, 0.5) for character in text]


def assert_billed_in_turn(steps):
    "Each token of a reply behind a prompt of 100 tokens is generated once, then read."
    *billed, _ = np.cumsum([100, *(step.generated for step in steps)])
    assert [step.prompt for step in steps] == billed


@pytest.mark.parametrize('reply, expected, finish', REPLIES)
def test_where_the_steps_of_a_reply_end(reply, expected, finish):
    "The same for tokens, for a text with tokens, and for a text alone; however the text is cut into tokens."
    text = reply.removesuffix(END)
    is_cut = text == reply
    characters = [i for character in text for i in TOKENIZER.encode(character)]
    bill = 'length' if is_cut else 'stop', (100, 0, len(text) + 1)
    for steps in (
        steps_of_tokens(TOKENIZER.encode(reply), is_cut),
        steps_of_tokens(characters + ([] if is_cut else [2]), is_cut),
        base.reply_steps(ASKED, 1, text, *bill),
        base.reply_steps(ASKED, 1, text, *bill, as_tokens(text)),
    ):
        assert [step.text for step in steps] == expected
        assert [step.finish for step in steps] == ['step'] * (len(expected) - 1) + [finish]
        assert_billed_in_turn(steps)


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=9))
def test_offsets_of_tokens_lie_in_the_text_of_their_step(pieces):
    ids = [i for piece in pieces for i in TOKENIZER.encode(piece)]
    whole = TOKENIZER.decode(ids)
    text, ends, ended = TEXT.parse(ids)
    first, *others = whole.lstrip().split('\n\n')
    assert (text, ended) == (first.rstrip(), bool(others))
    assert list(ends) == sorted(min(end, len(text)) for end in ends)
    lead = len(whole) - len(whole.lstrip())
    for t, end in enumerate(ends):
        begun = TOKENIZER.decode(ids[: t + 1])[lead:][: len(text)]
        if '\ufffd' not in begun:  # no part of a character
            assert text[:end] == begun


@settings(max_examples=300)  # they are fast
@given(st.lists(PIECES, max_size=9), st.integers(1, 4), st.booleans())
def test_the_bill_of_a_reply_is_that_of_the_server(pieces, room, shows_tokens):
    "Whatever is dropped behind an answer or a limit."
    text = ''.join(pieces)
    probs = as_tokens(text) if shows_tokens else ()
    request = replace(ASKED, max_steps=room)
    steps = base.reply_steps(request, 1, text, 'stop', (100, 64, len(text) + 3), probs)
    assert 1 <= len(steps) <= room
    assert [step.cached for step in steps] == [64] + [0] * (len(steps) - 1)
    assert_billed_in_turn(steps)
    assert sum(step.generated for step in steps) == len(text) + 3
    for step in steps:
        assert len(step.ends) == len(step.prob) <= step.generated
        assert list(step.ends) == sorted(min(end, len(step.text)) for end in step.ends)
        if shows_tokens and step is not steps[-1]:
            assert text[step.prompt - 100 :][: step.generated].strip() == step.text


# ---- chat templates
TURNS = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
THINKS = '{% if enable_thinking is false %}<no thoughts>{% endif %}'


def test_a_template_without_system_role_gets_it_in_front_of_the_question():
    plain, refusing = [PreTrainedTokenizerFast.from_pretrained(SMALL) for _ in range(2)]
    plain.chat_template, refusing.chat_template = TURNS, REFUSES + TURNS
    system, user = chat_prompt('1+1?')
    begun = dict(role='assistant', content='So ')
    with pytest.warns(UserWarning, match='system'):
        text = prompt_text(refusing, [system, user, begun])
    both = dict(role='user', content=f'{system["content"]}\n\n1+1?')
    assert text == prompt_text(plain, [both, begun]) == prompt_text(plain, [both]) + 'So '
    assert prompt_text(refusing, [both]) == prompt_text(plain, [both])


def test_options_of_a_template_reach_it(tmp_path):
    folder = shutil.copytree(SMALL, tmp_path / 'thinking')
    (folder / 'chat_template.jinja').write_text(TURNS + THINKS)
    for is_given in (False, True):
        options = dict(chat_template_kwargs=dict(enable_thinking=False)) if is_given else {}
        ids = open_one(folder, **options).text.messages_ids(chat_prompt('1+1?'))
        assert TOKENIZER.decode(ids).endswith('<no thoughts>') == is_given


# ---- opening
def test_settings_are_what_draws_depend_on(model):
    same = open_one('micro-small', max_tokens=60, batch=7).settings()
    assert json.loads(json.dumps(model.settings())) == same
    changes = dict(temperature=1.0, top_p=0.9, max_tokens=9, context=99, dtype='float64')
    changes['chat_template_kwargs'] = dict(enable_thinking=False)
    for name, value in changes.items():
        other = open_one('micro-small', **dict(max_tokens=60) | {name: value})
        assert other.settings() != same


def test_a_bad_name_or_option_gives_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'EMPTY').mkdir()
    for name in ('org/model@main', 'vllm:org/model@main', 'EMPTY', 'nowhere/at/all'):
        refused(name.removeprefix('vllm:'), open_one, name)
    refused('micro-small', open_one, 'micro-smal')
    refused('replies', open_one, 'openai:gpt-4.1-mini')
    refused('temperature', open_one, 'micro-small', temprature=1.0)
    refused('top_p', open_one, 'micro-small', top_p=0.0)


def test_a_public_name_tells_no_place(tmp_path):
    for name in ('vllm:org/model@' + 'a1' * 20, '/home/me@work/model/'):
        assert opening.short_name(opening.ModelOptions(name=name).place) == 'model'
    model = open_one(shutil.copytree(SMALL, tmp_path / 'me@work' / 'mine'))
    assert model.spec.name == 'mine'
    assert str(tmp_path) not in json.dumps(model.settings())


# ---- rewards
def plain_rewards(folder):
    "(question, texts of steps) -> (value of the last one, tokens), with plain torch."
    body = transformers.Qwen2Model.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / 'model.safetensors')
    has_value = 'v_head.summary.weight' in tensors  # as in Skywork-o1-Open-PRM

    def linear(name, x):
        return tensors[f'{name}.weight'].float() @ x + tensors[f'{name}.bias'].float()

    def value(question, texts):
        prompt = prompt_text(TOKENIZER, chat_prompt(question))
        ids = TOKENIZER.encode(f'<|endoftext|>{question}\n' if has_value else prompt)
        for text in texts:
            ids += [*TOKENIZER.encode(text), *TOKENIZER.encode('\n\n')]
        with torch.inference_mode():
            last = body(torch.tensor([ids])).last_hidden_state[0, -1]
        if has_value:
            return linear('v_head.summary', last).sigmoid().item(), len(ids)
        labels = linear('score.2', linear('score.0', last).relu())
        return labels.softmax(0)[1].item(), len(ids)

    return value


@pytest.mark.parametrize('kind', ['two labels', 'one value'])
def test_rewards_in_a_list_are_those_of_a_plain_pass_each(tmp_path, chains, kind):
    folder = PACKAGE / 'micro_models' / 'prm'
    if kind == 'one value':
        config = tiny('Qwen2', num_key_value_heads=2)
        folder = save_random(tmp_path, config, reward.Qwen2ForPrmModel)
    requests = []
    for (problem, _), chain in chains.items():
        requests += [Request(problem, chain[: t + 1]) for t in range(len(chain))]
    random.Random(0).shuffle(requests)
    rewards = opening.open_reward(str(folder)).reward(requests)
    assert np.ptp([reward.value for reward in rewards]) > 0.05
    by_hand = plain_rewards(folder)
    for request, found in zip(requests, rewards):
        question, texts = request.problem.question, [step.text for step in request.steps]
        value, tokens = by_hand(question, texts)
        assert abs(found.value - value) < 1e-4
        assert (found.tokens, found.new) == (tokens, tokens - by_hand(question, texts[:-1])[1])


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    folder = shutil.copytree(PACKAGE / 'micro_models' / 'prm', tmp_path / 'headless')
    tensors = load_file(folder / 'model.safetensors')
    del tensors['score.2.bias']
    save_file(tensors, folder / 'model.safetensors', metadata=dict(format='pt'))
    with pytest.raises(ValueError, match='score.2.bias'):
        opening.open_reward(str(folder))


def test_a_chain_beyond_the_context_has_no_reward_and_a_step_cannot_end_its_turn():
    texts = ('3+4=7', f'3+4=7{END}', '3+4=7 ' * 1000, '3+4=7')
    requests = [Request(PROBLEMS[0], (Step(text, 0, 'step'),)) for text in texts]
    plain, sly, too_long, again = opening.open_reward('micro-prm').reward(requests)
    assert too_long is None
    assert again == plain
    assert sly.new > plain.new + 1  # the mark is many tokens, none of which ends a turn


# ---- many machines
@pytest.mark.slow
def test_two_workers_of_ray_draw_what_one_process_draws(model, chains):
    ray = pytest.importorskip('ray')
    cluster = open_one('micro-small', max_tokens=60, copies=2)
    cluster.part = 3  # so that both work
    try:
        assert (cluster.spec, cluster.settings()) == (model.spec, model.settings())
        requests = [Request(problem, (), sample, to_end=True) for problem, sample in chains]
        for steps, expected in zip(cluster.write(requests), chains.values(), strict=True):
            assert_same(steps, expected)
        asked = [verdict_messages(problem, ['3+4=7']) for problem in PROBLEMS], ['correct', 'in']
        bills = [[found.prompt for found in m.choose(*asked)] for m in (cluster, model)]
        assert bills[0] == bills[1]
    finally:
        ray.shutdown()
