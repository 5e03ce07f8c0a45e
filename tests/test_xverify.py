"A language model as grader: what it is asked, and how its words become verdicts."

import pytest

from stepwise_routing.data.benchmarks import graded
from stepwise_routing.models import xverify as module
from stepwise_routing.models.base import Preference
from stepwise_routing.records import Problem
from stepwise_routing.util import digest

PROMPT = '{question} | {output} | {answer}'


class Judge:
    "Calls an answer correct that is as long as the reference. It cannot read a long question."

    def choose(self, conversations, options):
        assert options == ('Correct', 'Incorrect')
        self.asked = [message['content'].split(' | ') for (message,) in conversations]
        found = []
        for question, answer, reference in self.asked:
            prob = (0.6, 0.4) if len(answer) == len(reference) else (0.4, 0.6)
            found.append(Preference(prob, 9) if len(question) < 99 else None)
        return found


def test_each_answer_is_judged_once_and_what_is_not_judged_is_wrong():
    judge = Judge()
    problems = {str(i): Problem('toy', str(i), 'q' * 40 * i, 'x' * i) for i in range(1, 4)}
    pairs = [(problem, 'y' * n or None) for problem in problems.values() for n in (0, 1, 2, 3, 1)]
    verdicts = graded(module.xverify(judge, PROMPT), pairs)
    right = [key for key, is_right in verdicts.items() if is_right]
    assert right == [('1', 'y'), ('2', 'yy')]
    assert len(judge.asked) == 9


def test_a_prompt_holds_what_was_filled_in_and_nothing_else():
    judge = Judge()
    problem = Problem('toy', '1', r'Is it \text{answer} or {output}?', '{question} {output}')
    module.xverify(judge, PROMPT)([(problem, r'\boxed{answer}')])
    assert judge.asked == [[problem.question, r'\boxed{answer}', problem.answer]]


def test_the_prompt_of_the_weights_is_fetched_once_and_never_run(tmp_path, monkeypatch):
    replies = iter([f"raise SystemExit('run!')\nPROMPTS = dict(judge='''{PROMPT}''')\n"])
    monkeypatch.setattr(module, 'urlread', lambda url, **_: next(replies))
    file = tmp_path / 'cache' / 'prompt.py'
    with pytest.raises(ValueError, match='no longer holds the prompt[^\n]*$'):
        module.xverify_prompt(file)
    monkeypatch.setattr(module, 'PROMPT_DIGEST', digest(' '.join(PROMPT.split()), size=16))
    assert [module.xverify_prompt(file) for _ in range(2)] == [PROMPT] * 2
