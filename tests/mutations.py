"""Small faults put into a copy of the library, one at a time: do the tests notice?

    python tests/mutations.py [--jobs 2] [WORD ...]     only those whose file or text holds a word

Prints a line per fault and those that survived; ends with status 1 where more than one in ten did, or a text is
gone. Unclear: the tests did not end by themselves, or there were none."""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
STORE, GRADING, POLICY = 'tests/test_store.py', 'tests/test_grading.py', 'tests/test_policy.py'
SURVIVORS = 'tests/test_survivors.py' # of those below that no other test noticed
CONFIG, RUNS = (f'tests/test_reproduce.py -k "{words}"' for words in ('refused or profile', 'not kill and not ctrl_c'))
PAID = ('cap or ledger or disk or paid or kept or once or options or tried or records or closed or bills or waited or '
        'tokens')
LEDGER = f'tests/test_api.py tests/test_faults.py -k "({PAID}) and not test_a_fault and not test_a_soak and not stage"'
WALKS = 'tests/test_walks.py tests/test_tree.py'
CPO = 'tests/test_cpo.py -k "clipped or weighs"'
TRAINING = 'tests/test_training.py -k "temperature_falls or stays_below_one"'
CHOICE = ('tests/test_baselines.py tests/test_own.py -k "not collect and (class or nested or grid or chosen or shown '
          'or fitted or random or oracle or steer or trim or cheap or certain_setting or below_nought)"')
SWEEP = 'tests/test_sweep.py tests/test_training.py -k "sweep or planned or job or seed or ablation or paper or reach"'
CERTAIN = 'tests/test_certain.py tests/test_own.py -k "certain or enough or safe or loses or bound or problems_would"'
FAIR = 'tests/test_baselines.py -k "are_fitted_on or random_spends"'
OWN = ('tests/test_own.py -k "received or link or export or public or own_json or twice or ledger or fewer or says '
       'or question"')
MUTATIONS = { # tests -> (file, old text, new text)
    STORE: [
        ('base/store.py', "self.write('IGNORE', dict(edge=rows))", "self.write('REPLACE', dict(edge=rows))"), # the last
        ('base/store.py', '            if is_new:', '            if True:'), # a second draw is remembered
        ('base/store.py', 'if len(self.recent) > REMEMBERED', 'if False'), # the memory of records never shrinks
        ('base/store.py', 'if crc != checksum(row)', 'if False'),
        ('base/store.py', 'if not readonly and not lent:', 'if False:'), # two writers
        ('base/store.py', 'if file_format != own_format:', 'if False:'),
        ('base/store.py', '        check_settings(self.path, self.settings, settings)\n', '        pass\n'),
        ('base/store.py', "            self.db.execute('BEGIN IMMEDIATE')\n", ''), # no transaction
        ('base/store.py', 'os.path.realpath(path)', 'os.path.abspath(path)'), # a link is another file
        ('base/store.py', 'except BaseException:\n            self.close()\n', 'except BaseException:\n'),
        ('base/store.py', "mode = 'ro' if readonly else 'rwc'", "mode = 'rwc'"),
        ('base/store.py', 'if self.lock:  # forgotten', 'if False:  # forgotten'),
        ('base/store.py', 'ORDER BY rowid', 'ORDER BY key'),
        ('base/store.py', 'tuple(value) if isinstance(value, list) else value', 'value'),
        ('base/store.py', 'if name in names:', 'if True:'), # a field of an older record is an error
        ('base/store.py', 'elif type(old) is type(new) and old == new', 'elif old == new'),
        ('base/store.py', 'journal_mode=WAL', 'journal_mode=DELETE')],
    LEDGER: [
        ('models/ledger.py', '+ sum(max_units for _, max_units in self.reserved.values())', ''), # reservations
        ('models/ledger.py', '        if self.closing.is_set():', '        if False:'),
        ('models/ledger.py', '    self.units += units\n', ''),
        ('models/ledger.py', 'max_units if units is None else units', '0 if units is None else units'), # is free
        ('models/ledger.py', 'ORDER BY call DESC', 'ORDER BY call'), # the first reply to a request counts
        ('models/ledger.py', 'await self.record(call, key, max_units, None, {})', 'pass'),
        ('models/ledger.py', 'reply=filter(None, replies)', 'reply=()'),
        ('models/ledger.py', 'if key not in self.pending:', 'if True:'), # one request, many calls
        ('models/ledger.py', "sync = 'FULL'", "sync = 'OFF'"),
        ('models/chat.py', 'min(float(after), 60.0)', 'min(float(after), 600.0)'), # Retry-After up to ten minutes
        ('models/chat.py', 'if units <= worst and not is_claimed:', 'if True:'), # billed above the worst case
        ('models/chat.py', 'claimed=outcome.claimed,', ''), # what a server claims is forgotten
        ('models/chat.py', 'if usage and not _is_possible(usage, body):', 'if False:'), # all that it counts is paid
        ('models/chat.py', '(prompt - cached, row.input)', '(prompt, row.input)'), # cached tokens are paid twice
        ('models/chat.py', '(cached, row.cached)', '(cached, row.input)'),
        ('models/chat.py', 'units = worst if outcome.units is None', 'units = 0 if outcome.units is None')],
    GRADING: [
        ('data/algebra.py', 'EQUAL_NUMBERS = 1e-6', 'EQUAL_NUMBERS = 1e-2'), # tolerance of the veto
        ('data/algebra.py', 'EQUAL_FORMULAS = 1e-12', 'EQUAL_FORMULAS = 1e-2'),
        ('data/algebra.py', "(('RLIMIT_AS', MEMORY), ", "("), # no limit on memory
        ('data/algebra.py', "('RLIMIT_FSIZE', 0), ", ''),
        ('data/algebra.py', '        sys.addaudithook(guard)\n', ''),
        ('data/algebra.py', "if event not in HARMLESS_EVENTS:", "if False:"),
        ('data/algebra.py', 'sympy.parsing.sympy_parser.parse_expr = read_literal', 'pass'),
        ('data/algebra.py', 'or abs(value).is_comparable', 'or True'), # nought has a size
        ('data/grading.py', ' or self.ask(reference, answer)', ''), # a killed process is not asked again
        ('data/grading.py', 'self.given_up.add((reference, answer))', 'pass'),
        ('data/grading.py', 'self.timeout = timeout', 'self.timeout = 99.'),
        ('data/answers.py', 'if not (a.unit <= b.unit or b.unit <= a.unit):', 'if False:'), # units are not compared
        ('data/answers.py', 'b.unit is None:\n        return False', 'b.unit is None:\n        return None'), # letters
        ('data/answers.py', 'not 0 < top < bottom', 'False'),
        ('data/answers.py', "match['after_comma'] and whole != '0'", 'False'),
        ('data/answers.py', 'ROUNDED = 6', 'ROUNDED = 2'),
        ('data/answers.py', 'if max(len(reference), len(answer)) > MAX_ANSWER', 'if False')],
    POLICY: [
        ('method/policy.py', 'return pi >= kappa', 'return pi > kappa'),
        ('method/policy.py', 'allowed[..., ::-1].argmax(-1)', 'allowed.argmax(-1)'), # the smallest model allowed
        ('method/policy.py', 'clamp(max=rho_bar)', 'clamp(max=2 * rho_bar)'),
        ('method/policy.py', "kappa + step if s.sign == 'printed' else kappa - step", 'kappa + step'),
        ('method/policy.py', 'k**-s.kappa_decay', 'k**s.kappa_decay'),
        ('method/policy.py', 'rho.clamp(max=s.c_bar) * inside', 'rho * inside'),
        ('method/policy.py', '1 - (1 - right) * large_right', 'right * large_right'),
        ('method/policy.py', '0 <= kappa <= 1 or kappa == LARGE_ONLY', 'True'),
        ('method/policy.py', 'not numbers.isfinite().all() or', ''),
        ('method/policy.py', 'min(scaler.std) <= 0', 'False'),
        ('method/policy.py', "config.get('weights', same := digest(weights.hex())) != same", 'False'),
        ('method/policy.py', "config.get('checksum', same := config_checksum(config)) != same", 'False'),
        ('method/policy.py', 'np.nan_to_num(', '(')], # padding is no number
    f'{SURVIVORS} {CERTAIN}': [
        ('method/certain.py', 'np.asarray(large_right, float) - np.asarray(right, float)',
         'np.asarray(right, float) - np.asarray(large_right, float)'),
        ('method/certain.py', 'loss.std(ddof=1)', 'loss.std()'),
        ('method/certain.py', 'loss.mean() + quantile(1 - delta)', 'loss.mean() + quantile(1 - 2 * delta)'),
        ('method/certain.py', 'if len(loss) < FEW:', 'if False:'), # few problems are tested as many
        ('method/certain.py', 'variance_before = np.roll(variance, 1, -1)', 'variance_before = variance'), # the future
        ('method/certain.py', '.max() >= 1 / delta', '.max() >= 0.5 / delta'),
        ('method/certain.py', 'limit = (alpha + 1) / 2', 'limit = (2 * alpha + 1) / 2'),
        ('method/certain.py', '            break\n', '            continue\n'), # a setting after one that is not safe
        ('method/certain.py', 'quantile(1 - delta) + quantile(power)', 'quantile(1 - delta)'),
        ('method/certain.py', 'if alpha - mean < FINEST:', 'if mean > 1:')],
    f'{SURVIVORS} tests/test_uncertainty.py': [
        ('method/uncertainty.py', 'resamples(len(calibration), n_boot, seed + 1)',
         'np.ones((1 + n_boot, len(calibration)))'), # calibration is not drawn again
        ('method/uncertainty.py', 'resamples(len(test), n_boot, seed)[:, place]', 'resamples(len(test), n_boot, seed)'),
        ('method/uncertainty.py', 'np.where(keeps, cost, np.inf).argmin(1)', 'cost.argmin(1)'),
        ('method/uncertainty.py', '* n / (n - 1)', ''),
        ('method/uncertainty.py', 'np.logical_and.accumulate(safe, axis=1)', 'safe'), # gaps are passed over
        ('method/uncertainty.py', '    goes_on[active] = passed == len(block)\n', '    pass\n'),
        ('method/uncertainty.py', "np.where(is_cheap, certain, n_settings)", 'certain'),
        ('method/uncertainty.py', 'seed_shares[:, k] * at_choice\n', 'at_choice / chosen.shape[1]\n'),
        ('method/uncertainty.py', 'seed_shares[:, k] * at_choice / cost[:, -1]', 'seed_shares[:, k] * at_choice'),
        ('method/uncertainty.py', 'columns[metric] = values[taken, resample]', 'columns[metric] = values[taken[0]]'),
        ('method/uncertainty.py', "missed=table.large_again * wrong", "missed=table.correct[:, 0] * wrong")],
    f'{SURVIVORS} tests/test_outcomes.py tests/test_core.py tests/test_independent.py': [
        ('method/outcomes.py', 'large_accuracy - alpha - _ROUNDING', 'large_accuracy - 2 * alpha'),
        ('method/outcomes.py', 'large_accuracy - alpha - _ROUNDING', 'large_accuracy - alpha + _ROUNDING'),
        ('method/outcomes.py', 'np.where(keeps_accuracy(accuracy, large_accuracy, alpha), cost, np.inf)', 'cost + 0.0'),
        ('method/outcomes.py', 'written = np.where(never, n_steps, t + 1)', 'written = tau'), # drafts are free
        ('method/outcomes.py', "(t == n_steps - 1) | (on_escalate == 'regenerate')", "(on_escalate == 'regenerate')"),
        ('method/outcomes.py', "charged['steps'] = tau + ", "charged['steps'] = written + "),
        ('method/outcomes.py', "charged['small_cents'] + charged['large_cents']", "charged['large_cents']"),
        ('method/outcomes.py', 'np.c_[self.correct[:, 0], self.large_redraws_right].mean(1)', 'self.correct[:, 0]'),
        ('method/outcomes.py', 'loss[order] < lowest_before', 'loss[order] <= lowest_before'),
        ('method/outcomes.py', 'call.prompt - call.cached for call', 'call.prompt for call'), # the cache is paid
        ('method/outcomes.py', 'hits = np.asarray(hits) & np.asarray(inside)', 'hits = np.asarray(hits)')],
    f'{SURVIVORS} tests/test_results.py tests/test_tables.py tests/test_report.py -k "not compile"': [
        ('method/results.py', '(1 - 0.975, 0.975)', '(1 - 0.95, 0.95)'), # an interval of 90 %
        ('method/results.py', 'np.quantile(draws[1:]', 'np.quantile(draws[:1]'),
        ('method/results.py', "missed=rows['large_again'] * wrong", "missed=rows['large_correct'] * wrong"),
        ('method/results.py', 'np.where(c[\'cost\'] == 0, np.nan, c[\'cost\'])', "c['cost'] + 1e-9"),
        ('method/results.py', "cost=grid['cost'] / large", "cost=grid['cost']"),
        ('method/results.py', 'if problems != first[1] or', 'if False and'), # methods on other problems
        ('report/gains.py', 'is_sure = p_cost < 0.05', 'is_sure = p_cost < 0.2'),
        ('report/gains.py', '>= -alpha - ROUNDING', '>= -2 * alpha - ROUNDING')],
    CHOICE: [
        ('method/policy.py', 'return self.policy.n_models - 1 if self.kappa < 0 else 0', 'return 0'),
        ('method/comparison.py', 'NEARLY = 0.05', 'NEARLY = 0.5'),
        ('method/comparison.py', 'if last is not None and shares[last] < 1:', 'if last is not None:'),
        ('method/comparison.py', "not_test(table, 'choosing a threshold')", 'pass'), # chosen on test
        ('method/comparison.py', 'pairs.append((method, by_cost(method, train, cost)))',
         'pairs.append((method, by_cost(method, calibration, cost)))'),
        ('method/comparison.py', 'cheapest_within(accuracy, costs, accuracy[-1], alpha)',
         'cheapest_within(accuracy, costs, max(accuracy), alpha)'),
        ('method/comparison.py', 'order = sorted(routers, reverse=True) if order', 'order = sorted(routers) if order'),
        ('method/comparison.py', "by_cost(trims, read['train']", "by_cost(trims, read['test']"),
        ('method/comparison.py', 'rows += outcome_rows(each[0], table, table.large_only(), LARGE)', 'pass'),
        ('method/comparison.py', 'grid.cost[grid.chosen] / grid.cost[-1] for grid', 'grid.cost[grid.chosen] for grid')],
    SWEEP: [
        ('run/sweep.py', 'env.scaler)\n    if tree:', ')\n    if tree:'), # calibration is scaled by itself
        ('run/sweep.py', 'steps=min(training.steps, config.sweep.most_steps)', 'steps=training.steps'),
        ('run/sweep.py', '[config.seed + i for i in range(sweep.seeds', '[config.seed for i in range(sweep.seeds'),
        ('run/sweep.py', 'asdict(job)),\n', "job.seed),\n"), # the key of a policy forgets how it is trained
        ('run/sweep.py', "config['least'] > config['alpha'] + 1e-9", 'False')],
    WALKS: [
        ('method/walks.py', 'len(current.steps) + 1 >= max_steps', 'len(current.steps) >= max_steps'),
        ('method/walks.py', "kind='draft'", "kind='step'"),
        ('method/walks.py', 'current.processed |= cached_without_step | {writer: step.prompt}', 'pass'),
        ('method/walks.py', '= first.prompt + generated', '= first.prompt'),
        ('method/walks.py', 'if lowest <= chosen_model <= self.largest_model:', 'if True:'),
        ('method/walks.py', '> writer and (regenerate or is_last)', '> writer and regenerate'),
        ('method/walks.py', 'not (accepted or nobody_larger)', 'not accepted'),
        ('method/walks.py', 'self.lowest_kept = min(self.lowest_kept, answer)', 'pass'),
        ('method/walks.py', 'self.lowest_kept = min(self.lowest_kept, answer)', 'self.lowest_kept = 2.'),
        ('method/walks.py', 'min(processed.get(first.model, 0), first.prompt)', 'processed.get(first.model, 0)')],
    TRAINING: [
        ('method/training.py', 'min(1.0, 2 * k / s.steps)', 'min(1.0, k / s.steps)'), # the temperature, over all steps
        ('method/training.py', 'high=1 / env.n_models', 'high=1.0')], # the upper end of kappa
    CPO: [
        ('method/cpo.py', 'ratio(log_s) * adv_miss', 'ratio(log_s, s.rho_bar) * adv_miss'), # misses clipped like costs
        ('method/cpo.py', 'reach[inside] / reach.sum()', 'torch.full_like(reach[inside], 1 / int(inside.sum()))'),
        ('method/cpo.py', 'rng.choice(len(x), MAX_STATES, p=(weight / weight.sum()).numpy())',
         'rng.choice(len(x), MAX_STATES)')], # states of the Fisher matrix, whether they are reached or not
    FAIR: [
        ('method/comparison.py', "fit_trim(read['train'], lam", "fit_trim(read['calibration'], lam"),
        ('run/stages.py', "fit_steer(case.tables['train'], 'next'", "fit_steer(case.tables['calibration'], 'next'"),
        ('method/comparison.py', 'min(grids[0].cost[grids[0].chosen]', 'min(grids[1].cost[grids[1].chosen]')], # random
    'tests/test_profiles.py -k section': [
        ('base/settings.py', 'return float(value)', 'return value'), # 1e-5 of YAML is text
        ('base/settings.py', ", extra='forbid'", '')], # an unknown name is taken for no name
    CONFIG: [
        ('base/settings.py', 'Annotated[Number, Field(gt=0, lt=1)]', 'Annotated[Number, Field(ge=0, le=1)]'),
        ('base/settings.py', 'Positive = Annotated[Number, Field(gt=0)]', 'Positive = Number'),
        ('base/settings.py', 'Count = Annotated[int, Field(ge=1, le=MOST)]', 'Count = int'),
        ('base/settings.py', 'strict=True, ', ''), # true is a number
        ('base/settings.py', 'allow_inf_nan=False', 'allow_inf_nan=True'),
        ('base/settings.py', "FROM_LIST = Strict(False)", "FROM_LIST = Strict(True)"), # no list for a tuple
        ('base/settings.py', "if get_origin(kind) is Literal else ''", "if False else ''"), # no nearest choice
        ('run/config.py', 'if len(names) not in (0, 2)', 'if False'),
        ('run/config.py', '    if name in KEYS:\n        return\n', '    return\n'),
        ('run/config.py', 'if path.parent != project.params or name != path.stem:', 'if False:'),
        ('run/config.py', 'except (yaml.YAMLError, ValueError, RecursionError)', 'except RecursionError')],
    RUNS: [
        ('run/publish.py', 'if name in past and name not in made', 'if name not in made'),
        ('run/publish.py', 'except (OSError, ValueError, KeyError, TypeError)', 'except OSError'),
        ('run/manifest.py', "path.is_absolute() or '..' in path.parts", 'path.is_absolute()'),
        ('run/manifest.py', "stage.get('status') != 'done' or fingerprint not in", 'fingerprint not in'),
        ('run/manifest.py', 'not path.is_file() or file_sha256(path) != sha256', 'not path.is_file()'),
        ('run/config.py', "text.replace(f'{Path.home()}/', '~/')", 'text'),
        ('run/config.py', '    if different:', '    if False:'), # a notebook runs with other settings than its folder
        ('run/fingerprints.py', 'settings_of(config),', ''),
        ('run/fingerprints.py', 'parts = [shared, previous, cells, code]', 'parts = [shared, cells, code]'),
        ('run/fingerprints.py', 'parts = [shared, previous, cells, code]', 'parts = [shared, previous, cells]'),
        ('base/code.py', "tree = without_docstrings(ast.parse(path.read_text('utf-8')))",
         "tree = ast.parse(path.read_text('utf-8'))"),
        ('base/code.py', 'waiting += read_module(files[name], name)[1]', 'pass'), # only what is imported directly
        ('run/runner.py', "return ['-p', f'{name}={text.strip()[1:-1]}']", 'return []'),
        ('run/runner.py', 'if is_of_a_stage and name not in kept:', 'if False:')],
    OWN: [
        ('own.py', 'sampling = Sampling(**values.pop(', 'sampling = dict(**values.pop('),
        ('own.py', 'models=[public_name(model) for model in given]', 'models=[str(model) for model in given]'),
        ('own.py', 'own.sampling, access, folder', 'Sampling(), access, folder'),
        ('own.py', 'check_questions(problems, backends)', 'pass'),
        ('base/tools.py', 'if path.is_symlink():', 'if False:')]}

def lines(mutation): return ' -> '.join(part.strip()[:60] for part in mutation[1:])

def outcome(root, tests, mutation):
    "Does a copy of the project with this fault pass the tests? Noticed, survived, gone (no such text), unclear."
    file, old, new = mutation
    path = root/'stepwise_routing'/file
    whole = path.read_text('utf-8')
    if old not in whole: return 'gone'
    path.write_text(whole.replace(old, new), 'utf-8')
    command = f'{sys.executable} -m pytest -q -x -p no:cacheprovider --timeout 120 {tests}'
    environment = os.environ | dict(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE='1')
    try: done = subprocess.run(command, shell=True, cwd=root, env=environment, capture_output=True, timeout=600)
    except subprocess.TimeoutExpired: return 'unclear'
    finally: path.write_text(whole, 'utf-8')
    return {0: 'survived', 1: 'noticed'}.get(done.returncode, 'unclear')

def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('words', nargs='*')
    parser.add_argument('--jobs', type=int, default=1)
    args = parser.parse_args()
    work = [(tests, m) for tests, every in MUTATIONS.items() for m in every
            if not args.words or any(word in ' '.join(m) for word in args.words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = Queue()
        for i in range(args.jobs):
            skip = shutil.ignore_patterns('.git', '.venv', 'runs', '__pycache__')
            copies.put(Path(shutil.copytree(ROOT, Path(folder)/str(i), ignore=skip)))
        def tried(tests, mutation):
            copy = copies.get()
            try: word = outcome(copy, tests, mutation)
            finally: copies.put(copy)
            print(f'{word:9}{mutation[0]}: {lines(mutation)}', flush=True)
            return word
        words = list(pool.map(lambda pair: tried(*pair), work))
    survived = [m for (_, m), word in zip(work, words) if word == 'survived']
    print(', '.join(f'{words.count(word)} {word}' for word in ('noticed', 'survived', 'gone', 'unclear')))
    return len(survived) > .1*len(work) or 'gone' in words

if __name__ == '__main__': sys.exit(main())
