"""Every drawn step is kept for ever, by one writer"""

import contextlib
import json
import os
import sqlite3
import threading
import zlib
from dataclasses import asdict
from pathlib import Path

from .records import Step


@contextlib.contextmanager
def _one_line(path):
    "SQLite's errors. OSError: the file cannot be used now; ValueError: it is damaged, of another kind, or closed."
    try:
        yield
    except sqlite3.ProgrammingError as e:
        raise ValueError(f'{path}: {e}') from None
    except sqlite3.OperationalError as e:
        raise OSError(
            f'{path} cannot be used ({e}): make room or give access; what it holds is safe'
        ) from None
    except sqlite3.DatabaseError as e:
        raise ValueError(
            f'{path} is damaged or of another kind ({e}): restore a copy, or take another file'
        ) from None


def one_writer(path):
    "The right to write a file, until it is closed. BlockingIOError: somebody has it."
    lock = sqlite3.connect(
        os.path.realpath(path) + '.lock', 0, isolation_level=None, check_same_thread=False
    )
    try:
        lock.execute('BEGIN EXCLUSIVE')
    except sqlite3.OperationalError as e:
        if 'locked' not in str(e):
            raise
        raise BlockingIOError(
            f'{path} is already open for writing, here or in another process: close it'
        ) from None
    return lock


def _checksum(row):
    return zlib.crc32(repr(tuple(row)).encode())  # of the values and their types


class Database:
    "A file with one writer and any number of readers beside it; the store and the ledger are such files."

    kind = ''
    sync = 'NORMAL'
    tables = {}
    lock = None  # what it holds; columns by table

    def __init__(
        self,
        path,  # made where there is none; None = in memory only
        settings,  # JSON for the header of a new file
        readonly: bool = False,  # read beside a writer
    ):
        self.path = path
        self.readonly = readonly
        self.turn = threading.Lock()
        uri = 'file::memory:'
        with _one_line(path):
            if path is not None:
                uri = f'{Path(path).resolve().as_uri()}?mode={"ro" if readonly else "rwc"}'
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                if not readonly:
                    self.lock = one_writer(path)
            self.db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        self.db.text_factory = lambda b: b.decode(
            errors='replace'
        )  # damaged text is told by its checksum
        try:
            self.begin(settings)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        self.lock and self.lock.close()  # forgotten without being closed

    def read(self, query, values=()):  # rows, unchecked
        with _one_line(self.path):
            return self.db.execute(query, values).fetchall()

    def rows(self, table, where='', values=()):
        "Rows of a table without their checksums. ValueError naming file and row where one is damaged."
        rows = self.read(f'SELECT rowid, * FROM {table} {where}', values)
        damaged = [n for n, *row, crc in rows if crc != _checksum(row)]
        if damaged:
            raise ValueError(
                f'{self.path}, row {damaged[0]} of {table}: damaged; restore a copy of the file'
            )
        return [row[1:-1] for row in rows]

    def write(self, how, *first, **tables) -> list:  # per row: 1, or 0 where it was ignored
        "Put rows into tables in one transaction; `how` (IGNORE, REPLACE) says what to do where a key is there already."

        def put(table, row):
            sql = f'INSERT OR {how} INTO {table} VALUES ({"?," * len(row)}?)'
            return self.db.execute(sql, (*row, _checksum(row))).rowcount

        with self.turn, _one_line(self.path), self.db:
            for sql in ('BEGIN IMMEDIATE', *first):
                self.db.execute(sql)
            return [put(table, row) for table, rows in tables.items() for row in rows]

    def begin(self, settings):
        "Read the header of a file; write it where the file is empty. ValueError: a file of another kind."
        mine = f'stepwise-routing {self.kind} 3'
        names = [name for (name,) in self.read('SELECT name FROM sqlite_master')]
        header = self.rows('header') if 'header' in names else []
        ((theirs, text),) = header or [('unknown' if names else mine, json.dumps(settings))]
        if theirs != mine:
            raise ValueError(
                f'{self.path} has format {theirs!r}, not {mine!r}: choose another file'
            )
        self.settings = json.loads(text)
        if self.readonly:
            return
        for pragma in ('journal_mode=WAL', f'synchronous={self.sync}'):
            self.read(f'PRAGMA {pragma}')
        if header or settings is None:
            return
        create = dict(self.tables, header='format, settings').items()
        self.write(
            'IGNORE',
            *(f'CREATE TABLE {name} ({columns}, crc)' for name, columns in create),
            header=[(mine, text)],
        )

    def close(self):
        "Let go of the file; where nobody else reads it, it is one plain file again."
        if self.lock:
            with contextlib.suppress(
                sqlite3.Error
            ):  # a reader is left, or the disk is full: the log stays beside the file
                for pragma in ('busy_timeout=0', 'journal_mode=DELETE'):
                    self.db.execute(f'PRAGMA {pragma}')
            self.lock.close()
        self.db.close()


def tree_settings(benchmark, backends) -> dict:
    "What the draws of a tree depend on, as JSON: its benchmark and, per model, price row, size, what its backend adds."
    return dict(
        benchmark=benchmark, models=[dict(spec=asdict(b.spec), **b.settings()) for b in backends]
    )


def settings_difference(old, new, where='settings') -> tuple | None:
    "The first place where two JSON values differ, as (where, old, new); None where they are equal."
    if type(old) is type(new) is dict:
        pairs = [
            (f'{where}.{k}', old.get(k, 'missing'), new.get(k, 'missing'))
            for k in dict.fromkeys([*old, *new])
        ]
    elif type(old) is type(new) is list and len(old) == len(new):
        pairs = [(f'{where}[{i}]', *pair) for i, pair in enumerate(zip(old, new))]
    else:
        return None if old == new and type(old) is type(new) else (where, old, new)
    return next((d for w, a, b in pairs if (d := settings_difference(a, b, w))), None)


def check_settings(path, old, new):
    "ValueError unless a store with settings `old` (None: it is empty) may be used with `new` (None: any)."
    if old is None:
        raise ValueError(f'{path} is empty; run notebook 02 first')
    if new is None or not (difference := settings_difference(old, new)):
        return
    where, there, here = [str(part)[:60] for part in difference]
    raise ValueError(
        f'{path} holds draws with other settings: {where} is {there} there and {here} here; '
        'use the same settings, or another store'
    )


_RECENT = 1 << 13  # steps that stay in memory


def _pack(step):
    return zlib.compress(json.dumps(vars(step), default=lambda numbers: numbers.tolist()).encode())


class RolloutStore(Database):
    "The file of drawn edges. ValueError: other settings, or a damaged file; BlockingIOError: a second writer."

    kind = 'rollout store'
    tables = dict(edge='key TEXT PRIMARY KEY, step')

    def __init__(
        self,
        path,  # made where there is none
        settings=None,  # what the draws depend on, see `tree_settings`; None takes what the file says
        readonly: bool = False,  # read beside a writer
    ):
        self.recent = {}  # the steps put or read last
        if (readonly or settings is None) and not Path(path).exists():
            raise FileNotFoundError(f'no store at {path}; run notebook 02 first')
        super().__init__(Path(path), json.loads(json.dumps(settings)), readonly)

    def begin(self, settings):
        super().begin(settings)
        check_settings(self.path, self.settings, settings)

    def remember(self, key, step):
        with self.turn:  # threads share a store
            self.recent[key] = step
            if len(self.recent) > _RECENT:
                del self.recent[next(iter(self.recent))]

    def put_many(self, edges):  # (key, Step) pairs; those that are there already stay as they are
        edges = list(edges)
        new = self.write('IGNORE', edge=((json.dumps(key), _pack(step)) for key, step in edges))
        for (key, step), put in zip(edges, new):
            put and self.remember(key, step)

    def put(self, problem_id, sample, path, model, step):
        self.put_many([((problem_id, sample, path, model), step)])

    def __len__(self):
        return self.read('SELECT count(*) FROM edge')[0][0]

    def __contains__(self, key):
        return bool(self.read('SELECT 1 FROM edge WHERE key = ?', [json.dumps(key)]))

    def keys(self):  # of all edges, in the order in which they were drawn
        return [
            tuple(json.loads(key)) for (key,) in self.read('SELECT key FROM edge ORDER BY rowid')
        ]

    def get(self, problem_id, sample, path, model):
        "The Step of an edge, None where it has not been drawn."
        key = problem_id, sample, path, model
        if key in self.recent:
            return self.recent[key]
        for _, data in self.rows('edge', 'WHERE key = ?', [json.dumps(key)]):
            values = json.loads(zlib.decompress(data)).items()
            self.remember(
                key, Step(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})
            )
        return self.recent.get(key)
