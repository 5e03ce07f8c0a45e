"""What the micro models learn from: endless documents, each a list of (text, learn) parts. Only learnt parts have a loss.

A case is (question, right lines, chain in the small model's style, index of its first wrong step or -1).
"""

import random
import re

from stepwise_routing.data.steps import check_line
from stepwise_routing.records import Problem, chat_prompt, score_messages, verdict_messages

from .drafts import micro_drafts
from .families import FAMILIES
from .programs import solve
from .slips import corrupt, wrong_value

CHAT_TEMPLATE = (  # Qwen2.5's for a system and a user turn, but it adds no system turn of its own
    '{% for m in messages %}'
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STOP = '<|im_end|>'
BACK = 3  # equations that the large model works out again when it takes over


def with_chat_template(messages) -> str:
    "What `CHAT_TEMPLATE` renders, without the template engine."
    turns = [f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in messages]
    return ''.join(turns) + '<|im_start|>assistant\n'


def prompt(question: str, rng) -> tuple:
    "Two documents of five have the system turn; it is always the same, so that saves compute."
    with_system = rng.random() < 0.4
    return with_chat_template(chat_prompt(question)[0 if with_system else 1 :]), False


def dotted(lines) -> list:
    "The small model ends a step with a full stop, the large one does not."
    return [line + '.' for line in lines]


def joined(steps) -> str:
    return ''.join(step + '\n\n' for step in steps)


# ---- solutions


def small_solution(draft, rng) -> list:
    "A problem and its worked solution as the small model writes it."
    return [prompt(draft.question, rng), ('\n\n'.join(dotted(solve(draft))) + STOP, True)]


def large_solution(draft, rng) -> list:
    "The same as the large model writes it."
    return [prompt(draft.question, rng), ('\n\n'.join(solve(draft)) + STOP, True)]


# ---- one model takes over from the other


def slipped_case(draft, rng) -> tuple:
    "A case, half of them with a slip."
    lines = solve(draft)
    if rng.random() < 0.5:
        return draft.question, lines, dotted(lines), -1
    wrong, at = corrupt(draft, rng)
    return draft.question, lines, dotted(wrong), at


def cut(case: tuple, rng) -> int:
    "Where a chain is taken over: anywhere while it is right, at most three steps after a mistake; 0 if nowhere."
    _, lines, chain, wrong = case
    last = next((i for i, step in enumerate(chain) if 'boxed' in step), len(chain))
    if wrong < 0:
        return rng.randint(1, min(last, len(lines) - 1))
    if wrong and rng.random() < 0.3:
        return rng.randint(1, min(wrong, last, len(lines) - 1))
    return min(wrong + rng.choice((1, 1, 1, 2, 2, 3)), last, len(lines) - 1)


def take_over_document(case: tuple, rng) -> list:
    "The large model goes on from a chain of the small one, which may have gone on from lines of the large one."
    question, lines, chain, wrong = case
    at = cut(case, rng)
    right = at if wrong < 0 else min(at, wrong)
    own = rng.randint(0, right - 1) if right > 1 and rng.random() < 0.25 else 0
    before = lines[:own] + list(chain[own:at])
    again = [check_line(lines, at, min(at - own, BACK))] + lines[at + 1 :]
    return [prompt(question, rng), (joined(before), False), ('\n\n'.join(again) + STOP, True)]


def handed_back_document(case: tuple, rng) -> list:
    "The small model goes on after a line of the large one."
    question, lines, chain, wrong = case
    at = cut(case, rng)
    own = rng.choice((0, 0, at - 1, at)) if wrong < 0 or at <= wrong else 0  # of the large model
    before = lines[:own] + list(chain[own:at]) + [check_line(lines, at, min(at - own, BACK))]
    rest = '\n\n'.join(dotted(lines[at + 1 :]))
    if not rest:
        return [prompt(question, rng), ('\n\n'.join(dotted(lines)) + STOP, True)]
    return [prompt(question, rng), (joined(before), False), (rest + STOP, True)]


# ---- the models take turns


def misread(line: str, rng) -> str:
    "A line with another last number."
    before, number, after = re.fullmatch(r'(.*?)(\d+)(\D*)', line, re.S).groups()
    return before + str(wrong_value(rng, int(number))) + after


def turns(case: tuple, rng, again: float = 0.0) -> list:
    "(step, by the large model, right) of lines on which the models take turns; with another slip, `again`, they end."
    _, lines, chain, wrong = case
    at = cut(case, rng)
    stay = rng.choice((0, 0, 0.5, 1))  # chance that the large model writes the next line, too
    entry = rng.choice((0, 0.15, 0.4, 0.7))  # chance that it writes a line after the small one
    last = -1  # line that it wrote last
    steps, large = [], False
    for i, line in enumerate(lines):
        large = i == at or rng.random() < (stay if large else entry)
        right = large or wrong < 0 or i < wrong or last >= min(at, wrong)
        if large:
            steps.append((check_line(lines, i, min(i - last - 1, BACK)), True, True))
            last = i
            continue
        steps.append((line + '.' if right else chain[i], False, right))
        if last >= 0 and rng.random() < again:
            return [*steps[:i], (misread(line, rng) + '.', False, False)]
    return steps


def turns_document(case: tuple, rng, by_large: bool) -> list:
    "A model learns its own lines; the small one only those that are right."
    steps = turns(case, rng)
    parts = []
    for i, (text, large, right) in enumerate(steps):
        end = '\n\n' if i < len(steps) - 1 else STOP
        parts.append((text + end, large == by_large and right))
    return [prompt(case[0], rng), *parts]


def small_turns_document(case: tuple, rng) -> list:
    return turns_document(case, rng, False)


def large_turns_document(case: tuple, rng) -> list:
    return turns_document(case, rng, True)


# ---- judging


def judged_steps(case: tuple, rng) -> tuple:  # (steps, grade of the last one)
    "A prefix and what its last step is: 9 right, 0 the first mistake, 3 a later step."
    _, lines, chain, wrong = case
    if wrong < 0:
        n = rng.randint(1, len(chain))
    else:
        n = min(len(chain), wrong + rng.choice((1, 1, 1, 2)))
    if wrong > 0 and rng.random() < 0.3:
        n = rng.randint(1, wrong)
    has_own = n > 1 and not 0 <= wrong < n and rng.random() < 0.2
    own = rng.randint(1, n - 1) if has_own else 0
    grade = 9 if wrong < 0 or n <= wrong else 0 if n == wrong + 1 else 3
    return lines[:own] + list(chain[own:n]), grade


def judged_turns(case: tuple, rng) -> tuple:  # (steps, grade of the last one)
    "The same where the models took turns; a step of the small model is judged."
    steps = turns(case, rng, again=0.25)
    theirs = [i for i, (_, large, _) in enumerate(steps) if not large] or [0]
    slipped = [i for i in theirs if not steps[i][2]]
    if slipped and rng.random() < 0.75:
        at = rng.choice([slipped[0], slipped[-1]])
    else:
        at = rng.choice([i for i in theirs if i not in slipped] or slipped)
    grade = 9 if steps[at][2] else 0 if not at or steps[at - 1][2] else 3
    return [text for text, _, _ in steps[: at + 1]], grade


def judge_document(case: tuple, rng, judged=judged_steps) -> list:
    "A judge prompt of either kind with the program's verdict."
    steps, grade = judged(case, rng)
    problem = Problem('', '', case[0], '')
    if rng.random() < 0.5:
        messages = verdict_messages(problem, steps)
        reply = 'correct' if grade == 9 else 'incorrect'
    else:
        messages = score_messages(problem, steps)[0 if rng.random() < 0.4 else 1 :]
        reply = str(grade)
    return [(with_chat_template(messages), False), (reply + STOP, True)]


def judge_turns_document(case: tuple, rng) -> list:
    return judge_document(case, rng, judged_turns)


# ---- drills


def drill(rng) -> tuple:  # (what is asked, the result)
    "One bare operation."

    def size():
        return rng.randint(1, rng.choice((9, 20, 50, 99, 300, 999)))

    a, b, op = size(), size(), rng.choice('++--***%%%/f')
    if op == '+':
        return f'{a}+{b}=', a + b
    if op == '-':
        return f'{max(a, b)}-{min(a, b)}=', abs(a - b)
    if op == '*':
        b = rng.randint(2, rng.choice((9, 9, 30)))
        return f'{a}*{b}=', a * b
    b = rng.randint(2, rng.choice((9, 20, 70)))
    if op == '%':
        a = rng.randint(0, rng.choice((9, 30)) * b)
        whole = a // b * b
        return f'{a} mod {b}: ', f'{a // b}*{b}={whole}, {a}-{whole}={a % b}'
    if op == '/':
        return f'{a * b}/{b}=', a
    return f'floor({a}/{b})=', a // b


def drill_document(rng) -> list:
    "Twelve bare operations, one a line; the results are learnt."
    parts = []
    for asked, value in (drill(rng) for _ in range(12)):
        parts += [(asked, False), (f'{value}', True), ('\n\n', False)]
    return parts


def equation_document(rng) -> list:
    "Bare equations, half of them wrong: practice for the judge. The verdicts are learnt."
    parts = []
    for asked, value in (drill(rng) for _ in range(10)):
        is_right = rng.random() < 0.5
        *work, result = str(value).split('=')
        if not is_right:
            result = str(wrong_value(rng, int(result)))
        verdict = ' correct' if is_right else ' incorrect'
        parts += [(asked + '='.join([*work, result]), False), (verdict, True), ('\n\n', False)]
    return parts


# ---- mixtures

MIXES = {  # share of the training documents by kind
    'small': {
        small_solution: 0.56,
        handed_back_document: 0.06,
        small_turns_document: 0.20,
        drill_document: 0.18,
    },
    'base': {  # the first round of the large model
        large_solution: 0.42,
        take_over_document: 0.26,
        judge_document: 0.12,
        drill_document: 0.14,
        equation_document: 0.06,
    },
    'large': {
        large_solution: 0.22,
        take_over_document: 0.22,
        large_turns_document: 0.22,
        judge_document: 0.06,
        judge_turns_document: 0.20,
        drill_document: 0.03,
        equation_document: 0.05,
    },
}
LM_LEVELS = (4, 4, 3, 2, 1, 0)  # weights of the levels 1 to 6 of the training problems
SHARES = {'micro-gsm': 0.28, 'micro-math': 0.34, 'micro-omni': 0.38}  # of the benchmarks


def documents(
    rng: random.Random,
    mix: dict,  # of `MIXES`
    pool: dict | None = None,  # benchmark -> cases of the small model: seven of ten come from there
):
    "Endless training documents, of questions that no router sees."
    streams = {benchmark: micro_drafts(benchmark, 'lm', rng, LM_LEVELS) for benchmark in FAMILIES}
    kinds, shares = list(mix), list(mix.values())
    while True:
        kind = rng.choices(kinds, shares)[0]
        benchmark = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind in (drill_document, equation_document):
            yield kind(rng)
        elif kind in (small_solution, large_solution):
            yield kind(next(streams[benchmark]), rng)
        elif pool and pool[benchmark] and rng.random() < 0.7:
            yield kind(rng.choice(pool[benchmark]), rng)
        else:
            yield kind(slipped_case(next(streams[benchmark]), rng), rng)
