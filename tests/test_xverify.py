"A language model as grader: what it is asked, and how its words become verdicts."

import pytest

from stepwise_routing.data.benchmarks import graded
from stepwise_routing.models import xverify as module
from stepwise_routing.models.base import Preference
from stepwise_routing.models.xverify import xverify, xverify_prompt
from stepwise_routing.records import Problem
from stepwise_routing.util import digest

PROMPT = 'Question: {question}\nOutput: {output}\nCorrect answer: {answer}\n'


class Judge:
    "Calls an answer correct that is as long as the reference. It cannot read a long question."

    asked = ()

    def choose(self, conversations, options):
        verdicts = []
        for (message,) in conversations:
            parts = [line.split(': ', 1)[1] for line in message['content'].splitlines()]
            self.asked += (parts,)
            prob = (0.6, 0.4) if len(parts[1]) == len(parts[2]) else (0.4, 0.6)
            verdicts.append(Preference(prob, prompt=9) if len(parts[0]) < 99 else None)
        return verdicts if options == ('Correct', 'Incorrect') else []


def test_each_answer_is_judged_once_and_what_is_not_judged_is_wrong():
    judge = Judge()
    problems = [Problem('toy', str(i), f'{i}' * 25 * i, 'x' * (i % 3 + 1)) for i in range(1, 6)]
    pairs = [(problem, 'y' * n or None) for problem in problems for n in (0, 1, 2, 3, 1)]
    verdicts = graded(xverify(judge, PROMPT), pairs)
    for problem, answer in pairs:
        is_read = answer is not None and len(problem.question) < 99
        assert verdicts[problem.id, answer] == (is_read and len(answer) == len(problem.answer))
    assert len(judge.asked) == 15 and sum(verdicts.values()) == 3


def test_a_prompt_holds_what_was_filled_in_and_nothing_else():
    judge = Judge()
    problem = Problem('toy', '1', r'Is it \text{answer} or {output}?', '{question} {output}')
    xverify(judge, PROMPT)([(problem, r'\boxed{answer}')])
    assert judge.asked == ([problem.question, r'\boxed{answer}', problem.answer],)


def test_the_prompt_of_the_weights_is_fetched_once_and_never_run(tmp_path, monkeypatch):
    source = f"raise SystemExit('run!')\nPROMPTS = dict(judge='''{PROMPT}''')\n"
    replies = iter([source])
    monkeypatch.setattr(module, 'urlread', lambda url, **_: next(replies))
    file = tmp_path / 'cache' / 'prompt.py'
    with pytest.raises(ValueError, match='no longer holds the prompt[^\n]*$'):
        xverify_prompt(file)
    monkeypatch.setattr(module, 'PROMPT_DIGEST', digest(' '.join(PROMPT.split()), size=16))
    assert [xverify_prompt(file) for _ in range(2)] == [PROMPT] * 2
