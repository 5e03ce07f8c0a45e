"The engine against plain forward passes of the same model, whatever shares the batch; and every way a step can end."
import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

torch = pytest.importorskip('torch')
from stepwise_routing.data.benchmarks import load_problems
from stepwise_routing.models.hub import TransformersBackend, micro_path, weights_sha256
from stepwise_routing.models.interface import (
    Request,
    StepTokenizer,
    draw_tokens,
    five_digits,
    prompt_text,
    step_text,
)
from stepwise_routing.models.model_name import ModelName
from stepwise_routing.records import Problem, Step, chat_prompt, edge_seed
from stepwise_routing.util import run_async

torch.set_num_threads(1)
PROBLEM = Problem('toy', '1', 'How many?', '7')

# toy tokenizers and models

def bytes_tokenizer(*more, template=None):
    "One token a byte, and the given strings as tokens of their own; <end> ends a reply."
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    t.add_special_tokens(['<end>'])
    t.add_tokens([AddedToken(m, normalized=False) for m in more])
    hf = PreTrainedTokenizerFast(tokenizer_object=t, eos_token='<end>')
    hf.chat_template = template or '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}> '
    return hf

class Scripted(torch.nn.Module):
    "A language model whose logits depend on the position only: row p of a table."
    dtype, device, name_or_path = torch.float64, torch.device('cpu'), ''
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(torch.as_tensor(table, dtype=torch.float64))
        self.config = SimpleNamespace(vocab_size=self.table.shape[1], max_position_embeddings=len(table))
    base_model, generation_config = property(lambda self: self), SimpleNamespace(eos_token_id=None)
    def num_parameters(self): return self.table.numel()
    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=True):
        from transformers import DynamicCache
        if past_key_values is None:
            past_key_values, position_ids = DynamicCache(), torch.arange(input_ids.shape[1]).expand_as(input_ids)
        past_key_values.update(*[input_ids[:, None, :, None].double()] * 2, 0)
        return SimpleNamespace(logits=self.table[position_ids], past_key_values=past_key_values)

PIECES = ['.\n\n', '\n\n', 'a', ' ', '\n', r'\boxed{7}']

def scripted(*pieces, **kwargs):
    "A backend that writes these pieces one after another ('<end>' ends the reply), and its tokenizer."
    hf = bytes_tokenizer(*PIECES)
    start = len(hf.encode(prompt_text(hf, chat_prompt(PROBLEM.question)), add_special_tokens=False))
    table = np.zeros((start + 40, len(hf)))
    for i, piece in enumerate(pieces): table[start - 1 + i, hf.convert_tokens_to_ids(piece)] = 99
    table[start - 1 + len(pieces):, hf.convert_tokens_to_ids('a')] = 99
    return TransformersBackend(Scripted(table), hf, **kwargs), start

def tiny(kind, **more):
    "A random model of an architecture, and a byte tokenizer for it."
    import transformers as t
    torch.manual_seed(0)
    size = dict(vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                max_position_embeddings=512, **more)
    if kind == 'gpt2': config = t.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    else:
        kinds = dict(qwen2=t.Qwen2Config, llama=t.LlamaConfig, neox=t.GPTNeoXConfig, mistral=t.MistralConfig)
        config = kinds[kind](**size)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters(): p.data *= 3 # from nearly uniform to opinionated
    return model

def gather(*coroutines):
    async def all_(): return await asyncio.gather(*coroutines)
    return run_async(all_())

def plain(model, ids, tokens):
    "Largest logit and probability of each token, entropy before the first: one pass of a Hugging Face model."
    with torch.no_grad(): z = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids)-1:-1].double()
    p = z.softmax(-1)[torch.arange(len(tokens)), list(tokens)]
    first = z[0].softmax(-1)
    return z.amax(-1).tolist(), p.tolist(), float(-torch.special.xlogy(first, first).sum())

# the micro pair: as a reader of the package meets it

@pytest.fixture(scope='module')
def problems(): return load_problems('micro-gsm', 'test', 6)

@pytest.fixture(scope='module')
def engines():
    "The small model, with several batch sizes and memories for prefixes (the last one too small for most)."
    same = dict(name='small', max_tokens=60, context=400)
    made = [TransformersBackend(micro_path('small'), batch_size=n, prefix_mib=m, **same)
            for n, m in ((1, 0), (3, 64), (16, 1))]
    made[2].engine.prefixes.budget = 10**5
    return made

def seeds(problem, sample, n=0): return lambda i: edge_seed(problem.benchmark, problem.id, sample, '0' * (n + i), 0)

async def one_by_one(backend, problem, sample, pauses=iter(int, 1), steps=(), most=8):
    steps = tuple(steps)
    while len(steps) < most and not (steps and steps[-1].final):
        for _ in range(next(pauses)): await asyncio.sleep(0)
        steps += await backend.write(Request(problem, steps, seeds(problem, sample, len(steps))))
    return steps

@pytest.fixture(scope='module')
def alone(engines, problems):
    "Every chain written alone, one step a call, nothing remembered."
    return {(p.id, s): run_async(one_by_one(engines[0], p, s)) for p in problems for s in range(2)}

def test_confidences_are_those_of_a_plain_forward_pass(alone, problems, engines):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(micro_path('small')).double().eval()
    scale = lambda m, x: (x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).sqrt()
    for m in model.modules(): # RMSNorm as written, but in float64
        if type(m).__name__ == 'Qwen2RMSNorm': m.forward = lambda x, m=m: m.weight * x / scale(m, x)
    checked = 0
    for p in problems:
        ids = list(engines[0].text.prompt(p.question))
        for step in alone[p.id, 0]:
            top, prob, entropy = plain(model, ids, step.ids)
            np.testing.assert_allclose(step.max_logit, top, rtol=1e-4)
            np.testing.assert_allclose(step.prob, prob, rtol=1e-4)
            np.testing.assert_allclose(step.entropy, entropy, rtol=1e-4, atol=1e-6)
            assert (step.prompt, step.generated) == (len(ids), len(step.ids))
            ids += step.ids
            checked += len(step.ids)
    assert checked > 100

@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_a_step_does_not_depend_on_what_shares_its_batch(engines, problems, alone, data):
    backend = engines[data.draw(st.integers(0, 2), label='engine')]
    kinds = st.sampled_from(['end', 'steps', 'middle', 'score'])
    job = st.tuples(st.integers(0, 5), st.integers(0, 1), kinds)
    jobs = data.draw(st.lists(job, min_size=1, max_size=10), label='jobs')
    r = data.draw(st.randoms(use_true_random=False))
    async def job(i, sample, kind):
        p, known = problems[i], alone[problems[i].id, sample]
        for _ in range(r.randrange(9)): await asyncio.sleep(0)
        at = r.randrange(len(known))
        if kind == 'steps': return await one_by_one(backend, p, sample, iter(lambda: r.randrange(4), -1)) == known
        if kind == 'score':
            s, y = await backend.score(Request(p, known[:at]), known[at]), known[at]
            expected = y.ids, y.ends, y.prob, y.max_logit, 0
            return (s.ids, s.ends, s.prob, s.max_logit, s.generated) == expected
        at *= kind == 'middle'
        rest = await backend.write(Request(p, known[:at], seeds(p, sample, at), to_end=True, max_steps=8))
        return known[:at] + rest == known
    assert all(gather(*(job(*j) for j in jobs)))
    assert not backend.engine.rows and not backend.engine.waiting

# the engine with other architectures

@pytest.mark.parametrize('kind', ['qwen2', 'llama', 'neox', 'gpt2'])
def test_any_architecture_with_keys_and_values(kind):
    heads = dict(num_key_value_heads=2) if kind in ('qwen2', 'llama') else {}
    model, hf, oracle = tiny(kind, **heads), bytes_tokenizer(), tiny(kind, **heads).double()
    backend = TransformersBackend(model, hf, max_tokens=9, batch_size=3)
    asked = [Problem('toy', str(i), 'x' * (1 + 7 * i), '') for i in range(5)]
    steps = gather(*(backend.write(Request(p, seed=lambda i, p=p: int(p.id))) for p in asked))
    for p, (step,) in zip(asked, steps):
        top, prob, _ = plain(oracle, backend.text.prompt(p.question), step.ids)
        np.testing.assert_allclose(step.max_logit, top, rtol=1e-4)
        np.testing.assert_allclose(step.prob, prob, rtol=1e-4)

def test_a_qwen2_in_a_folder_is_computed_by_kernels_as_its_own_code_would(tmp_path):
    for heads in (4, 2, 1): # query heads a key head: 1, 2, 4
        model = tiny('qwen2', num_key_value_heads=heads)
        model.save_pretrained(tmp_path/str(heads))
        backend = TransformersBackend(tmp_path/str(heads), bytes_tokenizer(), max_tokens=40, batch_size=3)
        assert type(backend.engine.forward).__name__ == 'QwenModel' and backend.spec.params == model.num_parameters()
        asked = [Problem('toy', str(n), 'x' * n, '') for n in (1, 9, 40, 70)]
        for p, (step,) in zip(asked, gather(*(backend.write(Request(p)) for p in asked))):
            top, prob, _ = plain(model.double(), backend.text.prompt(p.question), step.ids)
            np.testing.assert_allclose(step.max_logit, top, rtol=1e-4)
            np.testing.assert_allclose(step.prob, prob, rtol=1e-4)

@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 20), depth=st.integers(1, 70), width=st.integers(1, 50), seed=st.integers(0, 99))
def test_a_product_is_that_of_numpy_and_no_row_changes_another(rows, depth, width, seed):
    from stepwise_routing.models.kernels.lanes import linear, panels, product
    r = np.random.default_rng(seed)
    x, w, bias = (r.normal(size=s).astype(np.float32) for s in ((rows, depth), (width, depth), (1, -(-width//16)*16)))
    y = linear(x, panels(w), bias)
    exact = bias[:, :width] + x.astype(float) @ w.T.astype(float)
    assert np.allclose(y[:, :width], exact, atol=1e-4) and (y[:, width:] == bias[:, width:]).all()
    for i in range(rows): assert (linear(x[i:i + 1], panels(w), bias) == y[i]).all() # to the bit
    product(x, panels(w), start := y.copy(), start) # in place
    assert (start[-1:] == linear(x[-1:], panels(w), y[-1:])).all()

# how a step ends

@pytest.mark.parametrize('pieces, text, finish, n', [
    (('a', '.\n\n'), 'a.', 'step', 2),                        # the blank line is swallowed by a token
    (('a', '\n\n'), 'a', 'step', 2),
    (('a', '\n', '\n'), 'a', 'step', 3),                      # or made of two
    (('a', '\n', 'a', '\n\n'), 'a\na', 'step', 4),            # one line break ends nothing
    (('\n\n', '\n', ' ', 'a', '.\n\n'), 'a.', 'step', 5),     # nor do leading blank lines
    (('<end>',), '', 'stop', 1),
    (('\n\n', '<end>'), '', 'stop', 2),
    (('a', ' ', '<end>'), 'a', 'stop', 3),
    (('a', ' ', 'a'), 'a aaaaaa', 'length', 8),
    (('a',) * 7 + ('.\n\n',), 'aaaaaaa.', 'step', 8),         # the last token allowed ends it
    (('Ã', '©', 'a', '\n\n'), 'éa', 'step', 4),              # a character of two tokens
])
def test_where_a_step_ends(pieces, text, finish, n):
    backend, start = scripted(*pieces, max_tokens=8, temperature=0)
    step, = run_async(backend.write(Request(PROBLEM)))
    assert (step.text, step.finish, step.generated, step.prompt) == (text, finish, n, start)
    assert [len(x) for x in (step.ids, step.ends, step.prob, step.max_logit)] == [n]*4
    assert all(a <= b for a, b in zip(step.ends, step.ends[1:])) and step.ends[-1] == len(text)

def test_a_boxed_answer_ends_the_chain_and_nothing_else_does():
    backend, start = scripted('a', '\n\n', 'a', r'\boxed{7}', '\n\n', 'a', '<end>', temperature=0)
    steps = run_async(backend.write(Request(PROBLEM, to_end=True)))
    assert [s.text for s in steps] == ['a', r'a\boxed{7}'] and steps[-1].finish == 'step'
    assert [s.prompt for s in steps] == [start, start + 2]
    backend, _ = scripted(*['a', '\n\n'] * 9, temperature=0)
    assert len(run_async(backend.write(Request(PROBLEM, to_end=True, max_steps=3)))) == 3
    assert len(run_async(backend.write(Request(PROBLEM, steps[:1], to_end=True, max_steps=3)))) == 2 # the prefix counts

def test_a_full_context_ends_the_chain():
    backend, start = scripted(*['a', '\n\n'] * 9, temperature=0)
    backend.context = backend.engine.context = start + 5
    steps = run_async(backend.write(Request(PROBLEM, to_end=True)))
    assert [(s.text, s.finish) for s in steps] == [('a', 'step'), ('a', 'step'), ('a', 'length')]
    backend.context = backend.engine.context = start + 4
    steps = run_async(backend.write(Request(PROBLEM, to_end=True)))
    assert [(s.text, s.finish, s.generated) for s in steps] == [('a', 'step', 2), ('a', 'step', 2), ('', 'length', 0)]
    assert run_async(backend.write(Request(PROBLEM, steps[:2]))) == steps[2:]

@given(st.text(st.sampled_from('a\n .é'), max_size=12))
def test_step_text_is_the_first_segment_between_blank_lines(raw):
    text, ended = step_text(raw)
    segments = [s.strip() for s in raw.lstrip().split('\n\n')]
    assert text == segments[0] and ended == (len(segments) > 1)

# prompts and token ids

def test_prompts_come_from_the_chat_template_or_chatml():
    hf = bytes_tokenizer()
    assert prompt_text(hf, chat_prompt('1+1?')).endswith('user: 1+1?\n> ')
    assert prompt_text(hf, [dict(role='user', content='q'), dict(role='assistant', content='so ')]) == 'user: q\n> so '
    hf.chat_template = None
    assert prompt_text(hf, [dict(role='user', content='q')]) == '<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'

def test_ids_are_kept_when_they_are_this_vocabularys_and_made_when_not():
    text = StepTokenizer(bytes_tokenizer('.\n\n', 'ab'), [256], 259)
    spelled = tuple(text.encode('a')) + tuple(text.encode('b')) + tuple(text.encode('.\n\n'))
    assert spelled != tuple(text.encode('ab.\n\n')) and text.step_ids(spelled, 'ab.', 'step') == spelled
    assert text.step_ids((1, 2, 3), 'ab.', 'step') == tuple(text.encode('ab.\n\n')) # ids of another vocabulary
    assert text.step_ids((10**6,), 'ab.', 'step') == text.step_ids((), 'ab.', 'step') == tuple(text.encode('ab.\n\n'))
    assert text.step_ids((), 'ab', 'stop') == (*text.encode('ab'), 256)
    assert text.step_ids((), 'ab', 'length') == tuple(text.encode('ab'))

# sampling

def test_draws_follow_the_model_at_its_temperature():
    z = np.array([2., 1., 0., -1., .5])
    hf = bytes_tokenizer()
    start = len(hf.encode(prompt_text(hf, chat_prompt(PROBLEM.question))))
    table = np.full((start + 2, len(hf)), -np.inf)
    table[:, 65:70] = z
    for temperature, top_p, likely in ((1., 1., 5), (.7, 1., 5), (.7, .8, 2)):
        backend = TransformersBackend(Scripted(table), hf, temperature=temperature, top_p=top_p, max_tokens=1)
        drawn = gather(*(backend.write(Request(PROBLEM, seed=lambda i, k=k: k)) for k in range(2000)))
        tokens = [s.ids[0] - 65 for s, in drawn]
        p = np.exp(z / temperature) / np.exp(z / temperature).sum()
        keep = np.argsort(-p)[:likely]
        expected = np.array([p[i] * (i in keep) for i in range(5)]) / p[keep].sum() * len(tokens)
        seen = np.bincount(tokens, minlength=5)
        chi_square = ((seen - expected)[expected > 0]**2 / expected[expected > 0]).sum()
        assert chi_square < {5: 18.5, 2: 10.9}[likely] # its 0.1 % point, 4 and 1 degrees of freedom
        assert not seen[expected == 0].any()
        raw = np.exp(z) / np.exp(z).sum() # confidences are at temperature 1, whatever was sampled
        for (s,), t in zip(drawn, tokens):
            assert np.isclose(s.prob[0], raw[t], rtol=1e-4)
            assert s.max_logit[0] == 2

@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=8), st.floats(0, 1, exclude_max=True), st.floats(.05, 3),
       st.floats(.01, 1))
def test_a_draw_is_the_inverse_of_the_distribution(z, u, temperature, top_p):
    z = np.array(z)
    token = int(draw_tokens(torch.tensor(z)[None], torch.tensor([u], dtype=torch.float64), temperature, top_p)[0])
    p = np.exp((z - z.max()) / temperature)
    order = np.argsort(-p, kind='stable')
    before = (np.cumsum(p[order]) - p[order]) / p.sum() # mass of the likelier ones
    assume(np.abs(before - top_p).min() > 1e-9) # where it is top_p itself, rounding decides
    p[order[before >= top_p]] = 0
    edges = np.cumsum(p) / p.sum()
    assert (edges[token-1] if token else 0) - 1e-6 <= u <= edges[token] + 1e-6
    assert int(draw_tokens(torch.tensor(z)[None], torch.tensor([u]), 0)[0]) == int(np.argmax(z))

@given(st.floats(-1e30, 1e30))
def test_five_digits_are_stable_and_close(x):
    y = float(five_digits(x))
    assert np.float32(y) == y and abs(y - x) <= 6e-5 * abs(x) + 1.1e-37 and float(five_digits(y)) == y

# choosing

def test_choose_is_the_product_over_tokens_renormalised():
    backend = TransformersBackend(tiny('qwen2', num_key_value_heads=1), bytes_tokenizer())
    oracle = tiny('qwen2', num_key_value_heads=1).double()
    ids = backend.text.encode(prompt_text(backend.text.hf, chat_prompt('?')))
    for options in (['correct', 'incorrect'], list('0123456789'), ['yes', 'no', 'perhaps']):
        brute = np.array([np.prod(plain(oracle, ids, backend.text.encode(o))[1]) for o in options])
        choice = run_async(backend.choose(chat_prompt('?'), options))
        np.testing.assert_allclose(choice.prob, brute / brute.sum(), rtol=1e-4)
        assert (choice.prompt, choice.generated) == (len(ids), max(len(backend.text.encode(o)) for o in options))
    assert backend.engine.stats['cached'] > 0 # the prompt was computed once
    with pytest.raises(ValueError, match="option '1' begins option '10'"):
        run_async(backend.choose(chat_prompt('?'), ['1', '10']))

def test_a_step_from_another_vocabulary_is_scored_as_text():
    backend, oracle = TransformersBackend(tiny('llama'), bytes_tokenizer()), tiny('llama').double()
    step = Step('3+4=7', 1, 'step', ids=(9999, 3), prob=(.5, .5), generated=2)
    s = run_async(backend.score(Request(PROBLEM, (Step('so', 1, 'step'),)), step))
    ids = [*backend.text.prompt(PROBLEM.question), *backend.text.encode('so\n\n')]
    assert s.ids == tuple(backend.text.encode('3+4=7\n\n'))
    assert (s.text, s.model, s.finish, s.generated) == ('3+4=7', 1, 'step', 0)
    assert s.prompt == len(ids) + len(s.ids)
    np.testing.assert_allclose(s.prob, plain(oracle, ids, s.ids)[1], rtol=1e-4)

# what goes wrong

def test_settings_name_what_draws_depend_on_and_nothing_else(engines):
    small = lambda **options: TransformersBackend(micro_path('small'), name='small', **options).settings()
    a, b = small(batch_size=2, prefix_mib=1), small(batch_size=9)
    assert a == b and 'batch_size' not in a and len(a['weights']) == 64
    for change in (dict(temperature=1), dict(top_p=.9), dict(max_tokens=9), dict(context=300), dict(dtype='float64')):
        assert small(**change) != a
    model = tiny('llama')
    sha = weights_sha256(model)
    model.lm_head.weight.data[0, 0] += 1
    assert weights_sha256(model) != sha
    assert TransformersBackend(micro_path('large')).settings()['weights'] != a['weights']

# by name

def test_shares_of_the_gpu_are_one_per_model():
    from stepwise_routing.models.names import check_shares
    assert check_shares(['vllm:a/b', 'openai:gpt-4.1-mini'], (.6,)) == [.6, None]
    assert check_shares(['micro-small', 'vllm:a/b'], ()) == [None, .9]
    cases = (['vllm:a/b'], (.5, .5), r'one per model, 1 in all'), (['vllm:a/b', 'vllm:a/c'], (.5,), 'above 0')
    for names, shares, words in cases:
        with pytest.raises(ValueError, match=words): check_shares(names, shares)

def test_a_models_name_has_a_kind_and_perhaps_a_commit(tmp_path):
    commit = 'a1'*20
    names = {f'org/name@{commit}': ('', 'org/name', commit), 'micro-small': ('', 'micro-small'),
             'vllm-server:http://u@h/v1': ('vllm-server', '', '', 'http://u@h/v1'),
             'vllm-server:http://h/v1#a': ('vllm-server', 'a', '', 'http://h/v1'),
             f'vllm:a/b@{commit}': ('vllm', 'a/b', commit), 'openai:a@b': ('openai', 'a@b'),
             'C:folder': ('', 'C:folder')}
    for text, parts in names.items():
        assert ModelName.parse(text) == ModelName(*parts) and str(ModelName(*parts)) == text
    with pytest.raises(ValueError, match='a folder has no revision'): ModelName.parse(f'{tmp_path}@{commit}')
    with pytest.raises(ValueError, match='40 hexadecimal digits'): ModelName.parse('org/name@main')
