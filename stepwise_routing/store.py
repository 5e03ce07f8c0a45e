"""A file that keeps every drawn step for good, so that no run draws, or pays for, a step twice.

Any number of processes may read and write it: SQLite admits one transaction at a time.
"""

import json
import sqlite3
import threading
import zlib
from dataclasses import asdict
from pathlib import Path

from .records import Step
from .util import one_line


def draw_settings(
    benchmark: str,
    models,  # small to large
    **more,  # what else the draws depend on, such as prompt
) -> dict:
    "All that drawn steps depend on, as JSON: the benchmark, and the settings of each model."
    settings = []
    for model in models:
        spec = dict(spec=asdict(model.spec), has_step_seeds=model.has_step_seeds)
        settings.append(spec | model.settings())
    return dict(benchmark=benchmark, models=settings, **more)


def settings_difference(
    old,  # values of JSON
    new,
    where: str = 'settings',  # the name of both values, for the error line
) -> tuple | None:  # (where, old, new)
    "The first place at which two values differ; None if they are equal."
    if type(old) is type(new) is dict:
        parts = []
        for name in dict.fromkeys([*old, *new]):
            parts.append((f'{where}.{name}', old.get(name, 'missing'), new.get(name, 'missing')))
    elif type(old) is type(new) is list and len(old) == len(new):
        parts = []
        for i, (old_value, new_value) in enumerate(zip(old, new)):
            parts.append((f'{where}[{i}]', old_value, new_value))
    elif type(old) is type(new) and old == new:
        return None
    else:
        return where, old, new
    for name, old_value, new_value in parts:
        difference = settings_difference(old_value, new_value, name)
        if difference:
            return difference
    return None


class Store:
    """A file of steps. A key is (problem id, sample, path, model): `model` writes the step after `path`.

    A record is a `Step`, or of another dataclass of numbers, texts and tuples. ValueError if the file holds steps
    that were drawn with other settings.
    """

    def __init__(
        self,
        path,  # made if there is none
        settings=None,  # what the steps depend on, see `draw_settings`; None: those of the file
        record: type = Step,  # class of its records
    ):
        self.path = Path(path)
        self.record = record
        if settings is None and not self.path.exists():
            raise FileNotFoundError(f'no store at {path}: draw steps first')
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self.db.execute('PRAGMA journal_mode=WAL')
        self.db.execute('CREATE TABLE IF NOT EXISTS header (settings TEXT)')
        self.db.execute('CREATE TABLE IF NOT EXISTS edge (key TEXT PRIMARY KEY, step BLOB)')
        self.settings = self.checked(settings)

    def checked(self, settings):
        "The settings of the file. A file without steps takes new ones."
        row = self.db.execute('SELECT settings FROM header').fetchone()
        if settings is None:
            return row and json.loads(row[0])
        text = json.dumps(settings)
        settings = json.loads(text)
        if row is None or not len(self):
            self.db.execute('DELETE FROM header')
            self.db.execute('INSERT INTO header VALUES (?)', [text])
            return settings
        difference = settings_difference(json.loads(row[0]), settings)
        if difference:
            self.close()
            where, there, here = [one_line(part)[:60] for part in difference]
            raise ValueError(
                f'{self.path} holds draws with other settings: {where} is {there} there and {here} here; '
                'use the same settings, or another folder'
            )
        return settings

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self) -> None:
        self.db.close()

    def __len__(self):
        return self.db.execute('SELECT count(*) FROM edge').fetchone()[0]

    def keys(self) -> list:
        "The keys of all steps, in the order in which they were drawn."
        rows = self.db.execute('SELECT key FROM edge ORDER BY rowid')
        return [tuple(json.loads(key)) for (key,) in rows]

    def get(self, *key):
        "The record under a key; None if it has not been drawn."
        row = self.db.execute('SELECT step FROM edge WHERE key = ?', [json.dumps(key)]).fetchone()
        if row is None:
            return None
        values = json.loads(zlib.decompress(row[0]))
        as_tuples = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return self.record(**as_tuples)

    def put_many(
        self,
        records,  # (key, record) pairs; a key that is there already keeps its record
    ) -> None:
        "Keep several records, in one transaction."
        rows = []
        for key, record in records:
            text = json.dumps(vars(record), default=lambda numbers: numbers.tolist())
            rows.append((json.dumps(key), zlib.compress(text.encode())))
        with self.db:
            self.db.execute('BEGIN IMMEDIATE')
            self.db.executemany('INSERT OR IGNORE INTO edge VALUES (?, ?)', rows)


class Replies:
    """A file of paid replies and what they cost, for many models, threads and processes. One cap for all of it.

    The cap counts kept replies. What a killed run had in flight, and what came after a timeout, is paid and not counted.
    """

    def __init__(
        self,
        path,  # made if there is none
        max_cents: float = 100.0,  # no call begins when so much is spent, earlier runs included
    ):
        self.path = Path(path)
        self.max_cents = max_cents
        self.lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self.db.execute('PRAGMA journal_mode=WAL')
        columns = 'key TEXT PRIMARY KEY, value TEXT, cents REAL'
        self.db.execute(f'CREATE TABLE IF NOT EXISTS reply ({columns})')

    def run(self, sql: str, *values):
        with self.lock:
            return self.db.execute(sql, values).fetchone()

    def get(self, key: str):
        "The reply under a key; None if there is none."
        row = self.run('SELECT value FROM reply WHERE key = ?', key)
        return row and json.loads(row[0])

    def put(self, key: str, reply: dict, cents: float) -> None:
        self.run('INSERT OR IGNORE INTO reply VALUES (?, ?, ?)', key, json.dumps(reply), cents)

    def __len__(self):
        return self.run('SELECT count(*) FROM reply')[0]

    @property
    def spent(self) -> float:
        "US cents."
        return self.run('SELECT total(cents) FROM reply')[0]

    def check_cap(self) -> None:
        "RuntimeError if nothing more may be spent."
        spent = self.spent
        if spent >= self.max_cents:
            raise RuntimeError(
                f'the cap of {self.max_cents:g} cents is reached: {spent:.2f} are spent, and all replies '
                f'are kept in {self.path.name}; raise max_cents to go on'
            )
