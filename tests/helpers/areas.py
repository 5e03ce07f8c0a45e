"""The tests of what strangers may send, hand over or break, by area: how many there are, and what came of them.

`stepwise-routing test --faults` runs each area and puts the counts into tables/faults.md."""
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = 'Faults and stages' # its tests measure the rows of another table, too
AREAS = { # area -> file of tests -> words in their names; '' = all of the file
    FIRST: {'test_faults': 'test_a_fault or test_a_stage'},
    'Hostile replies': {
        'test_faults': 'token or as_billed or reply or replies or header or redirect or escape or bills or waited',
        'test_api': 'junk or usage_record or refusal or attempts or stall or lack or empty or repeated or cut_reply',
        'test_http': 'test_client', 'test_vllm': 'reply or logits or shows_less', 'test_fuzz': 'replies',
        'test_xverify': 'read_by or any_text or faults_change or no_verdict or refusals'},
    'Damaged files': {
        'test_store': '', 'test_faults': 'damaged or durable',
        'test_api': 'damage or kept or kill or full_disk or twice',
        'test_policy': 'damaged or bit or pickle', 'test_outcomes': 'damaged', 'test_fuzz': 'stores',
        'test_attacks': 'row or score or no_file or no_run or acts or record or ledger or terminal or journal or '
                        'beside or header'},
    'Received folders': {
        'test_own': 'received or link or own_json',
        'test_attacks': 'entry', 'test_reproduce': 'receipt or publishing or manifest_that'},
    'Settings': {
        'test_profiles': 'refused or refuses or cannot_work or somebody_else or any_name',
        'test_reproduce': 'refused_in or bad_profile or braces or no_text', 'test_attacks': 'address or proxy',
        'test_faults': 'secret or loopback or key_is_read or price', 'test_fuzz': 'settings'},
    'Answers to grade': {'test_grading': '', 'test_fuzz': 'grading'},
    'Requests over HTTP': {
        'test_router_server': 'refused or wrong_field or hang_up or dies or cap or random'}}
COLUMNS = dict(Area='area', Trials='trials', Mended='mended', Crashed='crashed', Hung='hung') | {'Wrong bill': 'bill'}
MONEY = re.compile(r'\b(units|cents|spent|cost|most|billed|usage)\b')
NOTE = """
A trial is a test that ran; many of them try dozens of inputs. Mended are those that ended as they should: a right
answer, or one line that says what is wrong. Hung are those that did not end in time, wrong bills those that failed
where amounts are compared, crashed all others that failed.
"""

def verdict(case):
    "What came of a test, from its entry in pytest's report: '' for one that was left out."
    if case.find('skipped') is not None: return ''
    failed = case.find('failure') if case.find('failure') is not None else case.find('error')
    if failed is None: return 'mended'
    if 'Timeout' in failed.get('message', ''): return 'hung'
    lines = [line for line in (failed.text or '').split('\n') if line.startswith('>')] # the line that failed
    return 'bill' if lines and 'assert' in lines[-1] and MONEY.search(lines[-1]) else 'crashed'

def count(area, report):
    "The row of an area, from pytest's report of its tests."
    words = [verdict(case) for case in ET.parse(report).iter('testcase')]
    row = dict(area=area, trials=sum(map(bool, words)))
    return row | {kind: words.count(kind) for kind in ('mended', 'crashed', 'hung', 'bill')}

def of_area(name, words):
    "The arguments of pytest for an area; of a file that is not asked for all its tests, those of some words."
    chosen = []
    for file, some in words.items():
        chosen.append(f'{file} and ({some})' if some else file)
    files = [str(ROOT/'tests'/f'{file}.py') for file in words]
    return [*files, '-k', ' or '.join(f'({one})' for one in chosen)]

def try_area(area, more=()):
    "Run the tests of an area: its row. RuntimeError: pytest could not."
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)/'report.xml'
        command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', f'--junitxml={report}', *more]
        done = subprocess.run([*command, *of_area(area, AREAS[area])], cwd=ROOT, env=os.environ)
        if done.returncode > 1 or not report.is_file(): raise RuntimeError(f'pytest ended with {done.returncode}')
        return count(area, report)
