"""Files that keep every drawn step for good: one writer, any number of readers.

Here belong the SQLite file (`Database`), the settings that its content depends on, and the file of
drawn steps (`RolloutStore`). The ledger of paid calls is a `Database` too; it is in `models.ledger`.
"""

import contextlib
import json
import os
import sqlite3
import threading
import zlib
from dataclasses import asdict, fields
from pathlib import Path

from .records import Step
from .util import count_steps, one_line

FORMAT = 3  # of all files; files of another format are refused
TURN = 60  # seconds that a process waits for its turn to write to a file that was lent to it
REMEMBERED = 1 << 13  # records of a store that stay in memory

# ---- the file


@contextlib.contextmanager
def errors_in_one_line(path):
    "Turns SQLite's errors into OSError (the file cannot be used now) or ValueError (it never can)."
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise ValueError(f'{path}: {error}') from None
    except sqlite3.OperationalError as error:
        raise OSError(
            f'{path} cannot be used ({one_line(error)}): make room or give access; what it holds is safe'
        ) from None
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f'{path} is damaged or of another kind ({one_line(error)}): restore a copy, or take another file'
        ) from None


def one_writer(path) -> sqlite3.Connection:
    "A lock: the right to write a file, until it is closed. BlockingIOError if another process has it."
    file = os.path.realpath(path) + '.lock'
    lock = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute('BEGIN EXCLUSIVE')
    except sqlite3.OperationalError as error:
        if 'locked' not in str(error):
            raise
        raise BlockingIOError(
            f'{path} is already open for writing, here or in another process: close it there first'
        ) from None
    return lock


class Database:
    """A file with one writer and any number of readers; a context manager, for any thread.

    The writer may lend its right to write to other processes while it keeps the file open. Each of
    their writes is one transaction, and SQLite admits one transaction at a time. A subclass names
    its tables.
    """

    kind = ''  # of file, as its header says
    sync = 'NORMAL'  # when SQLite waits for the disk
    tables = {}  # name -> columns, as SQL
    indexes = {}  # name -> table and column, as SQL
    lock = None  # the right to write

    def __init__(
        self,
        path,  # made if there is none; None: in memory only
        settings,  # JSON for the header of a new file
        readonly: bool = False,  # read beside a writer
        lent: bool = False,  # write too, while the process that holds the right keeps the file open
    ):
        self.path = path
        self.readonly = readonly
        self.turn = threading.Lock()
        uri = 'file::memory:'
        with errors_in_one_line(path):
            if path is not None:
                mode = 'ro' if readonly else 'rwc'
                file = Path(path).resolve()
                uri = f'{file.as_uri()}?mode={mode}'
                file.parent.mkdir(parents=True, exist_ok=True)
                if file.is_file() and 0 < file.stat().st_size < 512:  # SQLite would begin a new one
                    raise sqlite3.DatabaseError('too small')
                if not readonly and not lent:
                    self.lock = one_writer(path)
            self.db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            if lent:
                self.db.execute(f'PRAGMA busy_timeout={1000 * TURN}')
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
        if self.lock:  # forgotten without being closed
            self.lock.close()

    def read(self, query: str, values=()) -> list:
        "The rows of a query."
        with errors_in_one_line(self.path):
            return self.db.execute(query, values).fetchall()

    def columns(self, table: str) -> str:
        "The names of a table's columns. Older files have one more, `crc`, which nobody reads."
        columns = self.tables.get(table, 'format, settings')
        return ', '.join(column.split()[0] for column in columns.split(','))

    def rows(
        self,
        table: str,
        where: str = '',  # more SQL
        values=(),  # of its question marks
    ) -> list:
        "Rows of a table."
        return self.read(f'SELECT {self.columns(table)} FROM {table} {where}', values)

    def write(
        self,
        how: str,  # if a key is there already: "IGNORE" the new row, or "REPLACE" the old one
        tables: dict,  # name -> rows
        first=(),  # SQL statements that run before
    ) -> list:  # per row: 1, or 0 if it was ignored
        "Put rows into tables, in one transaction."
        counts = []
        with self.turn, errors_in_one_line(self.path), self.db:
            self.db.execute('BEGIN IMMEDIATE')
            for statement in first:
                self.db.execute(statement)
            for table, rows in tables.items():
                for row in rows:
                    marks = ', '.join('?' * len(row))
                    insert = (
                        f'INSERT OR {how} INTO {table} ({self.columns(table)}) VALUES ({marks})'
                    )
                    counts.append(self.db.execute(insert, row).rowcount)
        return counts

    @property
    def format(self) -> str:
        "The kind and the version of the file, as its header has them."
        return f'stepwise-routing {self.kind} {FORMAT}'

    def begin(self, settings) -> None:
        "Read the file's header, or write one into a new file. ValueError if the file is of another kind."
        names = [name for (name,) in self.read('SELECT name FROM sqlite_master')]
        header = []
        if 'header' in names:
            with contextlib.suppress(OSError):  # another program's table of that name
                header = self.rows('header')
        if header:
            file_format, text = header[0]
        else:
            file_format = 'unknown' if names else self.format
            text = json.dumps(None if self.readonly else settings)
        if file_format != self.format:
            raise ValueError(
                f'{self.path} has format {file_format!r}, not {self.format!r}: take another file, '
                'or the version of stepwise-routing that wrote it'
            )
        self.settings = json.loads(text)
        if self.readonly:
            return
        self.read('PRAGMA journal_mode=WAL')
        self.read(f'PRAGMA synchronous={self.sync}')
        if header or settings is None:
            return
        self.write('IGNORE', dict(header=[(self.format, text)]), first=self.schema())

    def schema(self) -> list:  # SQL
        "What makes the tables and indexes of a new file."
        tables = dict(self.tables, header='format, settings')
        made = [f'CREATE TABLE {name} ({columns})' for name, columns in tables.items()]
        return made + [f'CREATE INDEX {name} ON {column}' for name, column in self.indexes.items()]

    def close(self) -> None:
        "Close the file. When the last reader has gone, all is in one plain file again."
        if self.lock:
            # a reader is left, or the disk is full: the log stays beside the file
            with contextlib.suppress(sqlite3.Error):
                self.db.execute('PRAGMA busy_timeout=0')
                self.db.execute('PRAGMA journal_mode=DELETE')
            self.lock.close()
        self.db.close()


# ---- the settings that its content depends on


def tree_settings(
    benchmark: str,
    backends,  # models, small to large
    draws=(),  # dict of what else they depend on, see `Benchmark.draws`
) -> dict:
    "All that the draws of a tree depend on, as JSON: the benchmark, and the settings of each model."
    models = [dict(spec=asdict(backend.spec), **backend.settings()) for backend in backends]
    return dict(benchmark=benchmark, models=models, **dict(draws))


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


def check_settings(
    path,  # for the error line
    old,  # settings that a store was made with; None: it is empty
    new,  # settings that it is to be used with; None: any
) -> None:
    "ValueError if a store was made with other settings than these, or is empty."
    if old is None:
        raise ValueError(f'{path} is empty: draw again, with collect or notebook 02')
    if new is None:
        return
    difference = settings_difference(old, new)
    if difference:
        where, there, here = [one_line(part)[:60] for part in difference]
        raise ValueError(
            f'{path} holds draws with other settings: {where} is {there} there and {here} here; '
            'use the same settings, or another store'
        )


# ---- the file of drawn steps


class RolloutStore(Database):
    """A file of steps, one per edge of a routing tree. An edge is (problem, sample, path, model).

    The record is a `Step`, or any other dataclass of numbers, texts and tuples. ValueError for other
    settings, or other records. BlockingIOError for a second writer.
    """

    kind = 'rollout store'
    tables = dict(edge='key TEXT PRIMARY KEY, step')
    record = Step

    def __init__(
        self,
        path,  # made if there is none
        settings=None,  # what the draws depend on, see `tree_settings`; None: those of the file
        readonly: bool = False,  # read beside a writer
        record: type = Step,  # class of its records
        lent: bool = False,  # write too, while the process that holds the right keeps the file open
    ):
        self.recent = {}  # the records put or read last
        self.record = record
        if (readonly or settings is None) and not Path(path).exists():
            raise FileNotFoundError(
                f'no store at {path}; run notebook 02 first, or all stages: '
                'stepwise-routing reproduce'
            )
        as_in_file = json.loads(json.dumps(settings))
        super().__init__(Path(path), as_in_file, readonly, lent)

    def begin(self, settings):
        super().begin(settings)
        is_other = settings is not None and settings != self.settings
        if self.lock and is_other and not len(self):
            self.rebind(settings)
        check_settings(self.path, self.settings, settings)

    def rebind(self, settings) -> None:
        "Take other settings: nothing was drawn with those of the file."
        header = [(self.format, json.dumps(settings))]
        self.write('IGNORE', dict(header=header), first=['DELETE FROM header'])
        self.settings = settings

    def packed(self, record) -> bytes:
        "A record as the file keeps it."
        text = json.dumps(vars(record), default=lambda numbers: numbers.tolist())
        return zlib.compress(text.encode())

    def unpacked(self, data: bytes):
        "A record as it was. ValueError if fields are missing, as in a file of an older version."
        values = {}
        names = [field.name for field in fields(self.record)]
        for name, value in json.loads(zlib.decompress(data)).items():
            if name in names:
                values[name] = tuple(value) if isinstance(value, list) else value
        try:
            return self.record(**values)
        except TypeError as error:
            raise ValueError(
                f'{self.path} holds records of another version ({error}): take another file, '
                'or the version of stepwise-routing that wrote it'
            ) from None

    def remember(self, key, record) -> None:
        "Keep a record in memory, as long as there is room."
        with self.turn:  # threads share a store
            self.recent[key] = record
            if len(self.recent) > REMEMBERED:
                oldest = next(iter(self.recent))
                del self.recent[oldest]

    def put_many(
        self,
        edges,  # (key, record) pairs; a record that the file has already is not replaced
    ) -> None:
        "Store the records of several edges, in one transaction."
        edges = list(edges)
        rows = ((json.dumps(key), self.packed(record)) for key, record in edges)
        counts = self.write('IGNORE', dict(edge=rows))
        if self.record is Step:
            count_steps(sum(counts))
        for (key, record), is_new in zip(edges, counts):
            if is_new:
                self.remember(key, record)

    def put(self, problem_id, sample, path, model, record) -> None:
        "Store the record of an edge, unless the file has one already."
        self.put_many([((problem_id, sample, path, model), record)])

    def __len__(self):
        ((count,),) = self.read('SELECT count(*) FROM edge')
        return count

    def __contains__(self, key):
        return bool(self.read('SELECT 1 FROM edge WHERE key = ?', [json.dumps(key)]))

    def keys(self) -> list:
        "The keys of all edges, in the order in which they were drawn."
        keys = self.read('SELECT key FROM edge ORDER BY rowid')
        return [tuple(json.loads(key)) for (key,) in keys]

    def get(self, problem_id, sample, path, model):
        "The record of an edge, None if it has not been drawn."
        key = problem_id, sample, path, model
        if key in self.recent:
            return self.recent[key]
        for _, data in self.rows('edge', 'WHERE key = ?', [json.dumps(key)]):
            record = self.unpacked(data)
            self.remember(key, record)
            return record
        return None


def is_unused(
    path,  # of a `RolloutStore`
) -> bool:
    """Is there a store without draws, as after a call with a wrong address? Then other settings are welcome.

    An emptied file is none: it may have had draws."""
    if not Path(path).is_file() or os.path.getsize(path) == 0:
        return False
    with RolloutStore(path, readonly=True) as store:
        return not len(store)
