"""Turns a chain of steps into a conversation, and a server's reply into steps.

Here belongs how a server's reply is read and checked. Asking for it belongs in `models.chat`.
"""

import math
from bisect import bisect_left
from dataclasses import replace

import numpy as np

from ..data.benchmarks import MATHEMATICS, Benchmark, find_benchmark
from ..records import Step, extract_boxed
from ..util import one_line
from .interface import five_digits, leading

# llama.cpp shows no log-probabilities of as many tokens as the stop string has. The first of them may begin with the
# end of the text: of 'It is 7.' and the stop string '\n', the token '.\n' is hidden.
MOST_HIDDEN = 4
MOST_HIDDEN_CHARACTERS = 32  # of each of them
CONTINUE = 'Continue exactly after the last step. Do not repeat any step.'


def step_messages(request) -> list:
    "The conversation that asks for the next step of a `Request`."
    benchmark = find_benchmark(request.problem.benchmark)
    messages = benchmark.messages(request.problem.question)
    chain = benchmark.separator.join(s.text for s in request.steps)
    if not request.steps:
        return messages
    return [*messages, dict(role='assistant', content=chain), dict(role='user', content=CONTINUE)]


def read_usage(reply) -> dict | None:
    "The token counts in a server's reply: prompt, cached (part of prompt), generated. None if it has none."
    try:
        record = reply['usage']
        cached = (record.get('prompt_tokens_details') or {}).get('cached_tokens') or 0
        usage = dict(
            prompt=record['prompt_tokens'], generated=record['completion_tokens'], cached=cached
        )
        total = record.get('total_tokens')
    except (TypeError, KeyError, AttributeError):
        return None
    whole = all(type(n) is int and n >= 0 for n in usage.values())
    if not whole or cached > usage['prompt']:
        return None
    if type(total) is int:  # some servers count the tokens of thoughts here alone
        usage['generated'] = max(usage['generated'], total - usage['prompt'])
    return usage


def has_thoughts(reply) -> bool:
    "Did the model think apart from the text of a reply that `read_reply` can read?"
    message = reply['choices'][0]['message']
    details = reply['usage'].get('completion_tokens_details')
    counted = isinstance(details, dict) and details.get('reasoning_tokens')
    return bool(message.get('reasoning_content') or message.get('reasoning') or counted)


def is_cut(reply) -> bool:
    "Has a server's reply a text, but no end? Then its usage may be that of a part."
    try:
        return 'finish_reason' not in reply['choices'][0]
    except (LookupError, TypeError):
        return False


def _is_whole(usage, text, tokens) -> bool:
    "Does a bill count all that was sent and received? Some servers do not count the token that ends a reply."
    received = len(tokens['bytes']) - 1 if tokens else bool(text)
    return usage['prompt'] > 0 and usage['generated'] >= received


def _is_unspelled(gap: bytes) -> bool:
    "May this part of a text be missing in its tokens? Halves of a character spell nothing, and blanks may be cut off."
    return all(c.isspace() or not c.isascii() for c in gap.decode(errors='replace'))


def _token_ends(text, tokens):
    "The offset in `text` where each token ends. The last one is before its end if the tokens do not spell it all."
    raw = text.encode()
    position = 0
    ends = []
    unmatched = 0  # tokens in a row whose bytes are not in the text
    characters = np.cumsum(
        [b & 0xC0 != 0x80 for b in raw], dtype=int
    ).tolist()  # characters begun, per byte
    for token in tokens:
        b = token.encode('latin-1')
        if position == 0 and not raw.startswith(b):
            b = b.lstrip()  # some servers cut blanks off the beginning of a text
        found_at = -1
        if raw.startswith(b, position):
            found_at = position
        elif b and unmatched:
            found_at = raw.find(b, position, position + len(b) + 8 * unmatched)
            if not _is_unspelled(raw[position:found_at]):
                found_at = -1
        # the stop string is cut off from this token
        cut = raw[position:] and b.startswith(raw[position:])
        if found_at < 0 and not cut:
            unmatched += 1
            continue
        ends += [position if found_at < 0 else found_at] * unmatched
        position = len(raw) if found_at < 0 else found_at + len(b)
        unmatched = 0
        ends.append(position)
    if _is_unspelled(raw[position:]):
        position = len(raw)
    return [characters[e - 1] if e else 0 for e in ends + [position] * unmatched]


def _check_spelling(text, tokens, hidden):
    "ValueError if the tokens do not spell the text, except for its end in a few hidden tokens."
    ends = _token_ends(text, tokens)
    position = ends[-1] if ends else 0
    rest = text[position:]
    is_hidden = hidden <= MOST_HIDDEN and len(rest) <= hidden * MOST_HIDDEN_CHARACTERS
    if rest.strip() and not is_hidden:
        rest = rest[:20]
        raise ValueError(f'the log-probabilities do not spell the reply (from {rest!r} on)')


def _token_bytes(token) -> bytes:
    "The bytes of a token in a server's reply."
    numbers = token.get('bytes')
    return token['token'].encode() if numbers is None else bytes(numbers)


def _tokens(content):
    "Per token: bytes (as Latin-1 text) and log-probability. And the alternatives to the first token."
    alternatives = [t.get('top_logprobs') or [] for t in content]
    if not all(-math.inf < t['logprob'] <= 1e-3 for row in (content, *alternatives) for t in row):
        raise ValueError
    raw = [_token_bytes(t) for t in content]
    first = (alternatives[0] or [content[0]]) if content else []
    return dict(
        bytes=[b.decode('latin-1') for b in raw],
        logs=[min(float(t['logprob']), 0.0) for t in content],
        first=[[a['token'], float(a['logprob'])] for a in first],
    )


ENDED = 'eos', 'eos_token', 'end_turn', 'complete'  # the model ended its reply
STOPPED = 'stop_sequence'  # a stop string did
CUT = 'length', 'max_tokens', 'model_length', None


def is_refused(choice) -> bool:
    "Did the model, or a filter of the server, refuse an answer? Then the reply has no log-probabilities."
    return choice['finish_reason'] == 'content_filter' or bool(choice['message'].get('refusal'))


def _ending(choice) -> tuple:
    "How a reply ended: 'stop' or 'length', and `ends` of `read_reply`. Other servers have other words than OpenAI."
    reason = choice['finish_reason']
    if is_refused(choice):
        return 'stop', True
    if reason == 'stop':
        # vLLM's stop_reason: the stop string, the number of the token that ended the reply, or None
        ends = not isinstance(choice['stop_reason'], str) if 'stop_reason' in choice else None
        return 'stop', ends
    if reason in ENDED or reason == STOPPED:
        return 'stop', reason != STOPPED
    if reason in CUT:
        return 'length', None
    raise ValueError


def read_reply(
    reply,  # JSON of a server
    stopped: bool = False,  # was it asked for with a stop string?
) -> dict:
    """Text, finish, usage, tokens, and `ends` (does the server tell what stopped it?). ValueError for a bad reply.

    The usage is None if there is none, or if it counts less than was sent and received."""
    usage = read_usage(reply)
    try:
        choice = reply['choices'][0]
        content = (choice.get('logprobs') or {}).get('content')
        text = choice['message'].get('content') or ''
        finish, ends = _ending(choice)
        text.encode()  # it is text, and every character whole
        some_hidden = stopped and usage and finish == 'stop'
        if content is None and is_refused(choice):
            text = ''
            content = ()
        elif content is None and some_hidden and usage['generated'] <= MOST_HIDDEN:
            content = ()  # all its tokens are hidden
        tokens = None if content is None else _tokens(content)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        raise ValueError(
            'the reply has no choices, or its text, end or log-probabilities cannot be read'
        ) from None
    if tokens:
        hidden = usage['generated'] - len(tokens['bytes']) if some_hidden else 0
        _check_spelling(text, tokens['bytes'], hidden)
    if usage and not _is_whole(usage, text, tokens):
        usage = None
    return dict(text=text, finish=finish, usage=usage, ends=ends, tokens=tokens)


def error_in(reply):
    "The error in a server's reply, or in its first choice; None if there is none."
    try:
        return reply.get('error') or reply['choices'][0].get('error')
    except (LookupError, TypeError, AttributeError):
        return None


def error_reason(error) -> str:
    "What a server's error says, in one line; empty if it says nothing."
    if isinstance(error, dict):
        error = error.get('message') or error.get('detail')
    return ' '.join(one_line(error).split()) if error else ''


def _pieces(text, finish, max_steps, benchmark):
    "Of each step of a reply: (text, start, end with the blank characters after it, finish)."
    separator = benchmark.separator
    pieces = []
    position = 0
    while True:
        start = position + leading(text[position:], separator)
        step, goes_on, _ = text[start:].partition(separator)
        position = start + len(step) + len(separator) if goes_on else len(text)
        step = step.rstrip()
        ends_here = goes_on and benchmark.ends_with(step)
        step_finish = 'stop' if ends_here else 'step' if goes_on else finish
        pieces.append((step, start, position, step_finish))
        is_last = ends_here or extract_boxed(step) is not None
        if not goes_on or is_last or len(pieces) == max_steps:
            return pieces


def reply_steps(
    reply,  # of `read_reply`
    index: int = 1,  # of the model
    max_steps: int = 30,  # keep at most so many steps, the first ones
    stopped: bool = False,  # was the separator its stop string?
    benchmark: Benchmark = MATHEMATICS,
) -> tuple:
    "The `Step`s of a reply, each with its tokens and costs."
    text = reply['text']
    usage = reply['usage']
    tokens = reply['tokens']
    finish = reply['finish']
    if finish != 'stop':
        finish = 'length'
    elif stopped and not reply['ends']:
        finish = 'step'
    pieces = _pieces(text, finish, max_steps, benchmark)
    ends = tokens and _token_ends(text, tokens['bytes'])
    steps = []
    first = 0
    billed_before = 0
    for i, (step, start, end, finish) in enumerate(pieces):
        last = i == len(pieces) - 1
        record = {}
        if not tokens:
            n = round(usage['generated'] * end / max(len(text), 1))
        elif last and end == len(text):
            n = len(ends)
        else:
            n = min(bisect_left(ends, end, first) + 1, len(ends))
        if tokens:  # ends are clipped to the step
            record = dict(
                ends=tuple(min(max(e - start, 0), len(step)) for e in ends[first:n]),
                prob=tuple(five_digits(np.exp(tokens['logs'][first:n])).tolist()),
            )
        billed = usage['generated'] if last else min(n, usage['generated'])
        bill = dict(
            generated=billed - billed_before,
            prompt=usage['prompt'] + billed_before,
            cached=0 if i else usage['cached'],
        )
        steps.append(Step(step, index, finish, **record, **bill))
        first = n
        billed_before = max(billed, billed_before)
    return tuple(steps)


def add_bill(step, *others):
    "A step whose bill also includes other calls."
    total = {
        k: sum(getattr(s, k) for s in (step, *others)) for k in ('generated', 'prompt', 'cached')
    }
    return replace(step, **total)


def drop_repeats(steps, prefix):
    "Drop the first steps of a reply if they repeat the end of the prefix."
    new = [s.text for s in steps]
    old = [s.text for s in prefix]
    k = max((k for k in range(1, min(len(new), len(old)) + 1) if new[:k] == old[-k:]), default=0)
    if k in (0, len(steps)):
        return steps[k:]
    generated = sum(s.generated for s in steps[: k + 1])
    return replace(
        steps[k], generated=generated, prompt=steps[0].prompt, cached=steps[0].cached
    ), *steps[k + 1 :]


def option_probs(first, options) -> tuple:
    """Probabilities of options, from (token, log-probability) pairs: a token counts for the option it begins.

    All 0 if no token begins an option.
    """
    mass = np.zeros(len(options))
    names = [o.strip().casefold() for o in options]
    for token, log in first:
        t = token.strip().casefold()
        begins = [i for i, name in enumerate(names) if t and name.startswith(t)]
        if len(begins) == 1:
            mass[begins[0]] += math.exp(log)
    return tuple(five_digits(mass / (mass.sum() or 1.0)).tolist())
