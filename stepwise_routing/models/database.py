"""The file of the ledger of paid calls: one writer, any number of readers."""

import contextlib
import json
import os
import sqlite3
import threading
from pathlib import Path

from ..util import one_line

FORMAT = 3  # of all files; files of another format are refused
TURN = 60  # seconds that a process waits for its turn to write to a file that was lent to it

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
