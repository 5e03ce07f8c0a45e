"""Does grading by a judge on a vLLM server work? Not collected by pytest; needs an environment that has vLLM:

    python tests/gpu/vllm_xverify.py MODEL ROWS.jsonl [ROWS.jsonl ...] [--n 60] [--template FILE ...] [--ledger FILE]

MODEL is a folder or a Hub name (NAME@REVISION), ROWS hold question (or problem), gold, pred and label (1: same answer).
Any instruction model can stand in for xVerify's weights: then the numbers say that the path works, and nothing about
xVerify. Half of the rows of each file are right by their label. Prints, for each prompt, agreement with Math-Verify and
with the labels; ends with an error where a second run asks anything. On a busy CPU also set
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3000: past it (300 s) the engine gives up."""
import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1]/'helpers')]

from judging import JUDGE_TEMPLATE
from stepwise_routing.data.grading import grade_pairs, is_right
from stepwise_routing.models.xverify import XVerify, open_grader
from stepwise_routing.records import Problem

SLOW = dict(timeout=3000, workers=2) # a CPU that others use as well

def rows(path, n, seed=0):
    "n rows of a file, half of them right, as (problem, answer, label)."
    name, every = Path(path).stem, [json.loads(line) for line in Path(path).read_text().splitlines()]
    random.Random(seed).shuffle(every)
    chosen = [r for label in (0, 1) for r in [r for r in every if r['label'] == label and r['pred']][:n // 2]]
    problem = lambda i, r: Problem(name, f'{name}-{i}', r.get('question') or r['problem'], r['gold'])
    return [(problem(i, r), r['pred'], bool(r['label'])) for i, r in enumerate(chosen)]

def tell(title, problems, answers, first, second):
    pairs = [(bool(first(p, a)), bool(second(p, a))) for p, a in zip(problems, answers)]
    same, only = sum(x == y for x, y in pairs), [sum(pair == (x, not x) for pair in pairs) for x in (True, False)]
    print(f'{title}: {same / len(pairs):.3f} of {len(pairs)}; '
          f'only the first says right {only[0]}, only the second {only[1]}')

def grade_all(grade, triples, files):
    "Grade, compare and print; the verdicts."
    start, before = time.perf_counter(), grade.judge.ledger.calls
    verdicts = dict(grade_pairs(grade, [r[:2] for r in triples]))
    calls, seconds = grade.judge.ledger.calls - before, time.perf_counter() - start
    print(f'\n{grade.template[:60]!r}...\n{len(triples)} answers graded in {seconds:.0f} s, {calls} calls; '
          f'{len(grade.unread)} replies are no verdict: {list(grade.unread.values())[:3]}')
    labels = {(p.id, a): label for p, a, label in triples}
    def judge(problem, answer): return verdicts[problem.id, answer]
    def label(problem, answer): return labels[problem.id, answer]
    for f in [None, *files]:
        of = [r[:2] for r in triples if f is None or r[0].benchmark == Path(f).stem]
        (problems, answers), where = zip(*of), 'all' if f is None else Path(f).stem
        tell(f'{where}: judge and Math-Verify', problems, answers, judge, is_right)
        tell(f'{where}: judge and label', problems, answers, judge, label)
        tell(f'{where}: Math-Verify and label', problems, answers, is_right, label)
    for problem, answer, _ in triples:
        if judge(problem, answer) != is_right(problem, answer):
            print(f'differ: reference {problem.answer[:50]!r}, answer {answer[:50]!r}, judge {judge(problem, answer)}')
    return verdicts

def main(model, files, n, templates, ledger):
    triples = [row for f in files for row in rows(f, n // len(files))]
    with tempfile.TemporaryDirectory() as folder:
        ledger, start, first = Path(ledger or Path(folder)/'verdicts.db'), time.perf_counter(), {}
        with open_grader(f'xverify:{model}', template=templates[0], ledger=ledger, **SLOW) as grade:
            print(f'server ready after {time.perf_counter() - start:.0f} s')
            judge, url = grade.judge, str(grade.judge.client.base_url)
            for t in templates:
                with XVerify(judge.model, base_url=url, template=t, ledger=judge.ledger,
                             identity=judge.options.identity, **SLOW) as g:
                    first[t] = grade_all(g, triples, files)
        for t in templates: # the server is gone
            with XVerify(judge.model, base_url=url, template=t, ledger=ledger, identity=judge.options.identity,
                         retries=1) as again:
                assert dict(grade_pairs(again,
                                        [r[:2] for r in triples])) == first[t], 'a second run gives other verdicts'
    print('\na second run, without a server, gives the same verdicts')

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model'); parser.add_argument('files', nargs='+'); parser.add_argument('--n', type=int,
        default=60)
    parser.add_argument('--template', nargs='+', default=[JUDGE_TEMPLATE],
                        help='files; "xverify" is xVerify\'s own prompt, "own" this project\'s')
    parser.add_argument('--ledger', help='file of verdicts, to go on after an interruption')
    args = parser.parse_args()
    main(args.model, args.files, args.n, [dict(xverify=None, own=JUDGE_TEMPLATE).get(t, t) for t in args.template],
         args.ledger)
