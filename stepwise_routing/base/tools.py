"""Small helpers that every room uses: names, files, coroutines, the folders of a clone"""

import asyncio
import contextlib
import difflib
import hashlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path


def digest(*parts, size=8):
    "Hexadecimal blake2b of the parts, joined by the unit separator."
    return hashlib.blake2b(
        '\x1f'.join(map(str, parts)).encode('utf-8', 'surrogatepass'), digest_size=size
    ).hexdigest()


def nearest(name: str, options) -> str:
    "A hint for an error message: \" (did you mean 'x'?)\", or \"\" where no option is like `name`."
    close = difflib.get_close_matches(str(name), [str(o) for o in options], n=1)
    return f' (did you mean {close[0]!r}?)' if close else ''


def one_of(what: str, name, options) -> None:
    "ValueError naming the nearest option unless `name` is one of them; `what` it is, for the message."
    if name in options:
        return
    choices = ', '.join(map(str, options))
    raise ValueError(f'unknown {what} {name!r}{nearest(name, options)}; choose one of: {choices}')


def write_file(path, data) -> Path:
    "Write text or bytes to a file, all or nothing; folders are made."
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    with open(part, 'wb') as f:
        f.write(data.encode('utf-8') if isinstance(data, str) else data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    return path


def run_async(coro):
    "What a coroutine returns, also where an event loop is already running (Jupyter); an interrupt stops it in both."
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coro)
    from anyio.from_thread import start_blocking_portal

    with start_blocking_portal() as portal:
        return portal.call(lambda: coro)


def note_progress(text):
    "Leave word for whoever watches: in the folder STEPWISE_PROGRESS, a file per process."
    folder = os.environ.get('STEPWISE_PROGRESS')
    with contextlib.suppress(OSError):  # nobody watches any more
        if folder:
            Path(folder, str(os.getpid())).write_text(text, 'utf-8')


async def gather_progress(
    coros, desc: str, progress=None
) -> list:  # what the coroutines return, in their order
    "Wait for all coroutines, with a bar: shown (True), hidden (False), or shown where someone is looking (None)."
    from tqdm.auto import tqdm

    tasks = [asyncio.ensure_future(c) for c in coros]
    hidden = None if progress is None else not progress
    done = itertools.count(1)
    often = 1 + len(tasks) // 100
    with tqdm(total=len(tasks), desc=desc, unit='problem', disable=hidden) as bar:

        def ended(_):
            bar.update()
            if (n := next(done)) % often == 0:
                note_progress(f'{desc}: {n:,} of {len(tasks):,}')

        for t in tasks:
            t.add_done_callback(ended)
        return await asyncio.gather(*tasks)


@dataclass(frozen=True)
class Project:
    "The folders of a clone."

    root: Path  # holds nbs/, runs/, tables/ and figures/
    nbs = property(lambda self: self.root / 'nbs')
    params = property(lambda self: self.root / 'nbs' / 'params')
    runs = property(lambda self: self.root / 'runs')

    def short(self, path):
        return Path(path).relative_to(self.root).as_posix()


PACKAGE = Path(__file__).resolve().parents[1]


def find_project(start=None) -> Project:
    "The clone at `start`, else the one we are in, else the one this package was installed from (`pip install -e`)."
    folders = (
        [Path(start).resolve()] if start else [Path.cwd(), *Path.cwd().parents, PACKAGE.parent]
    )
    for root in folders:
        if (root / 'nbs' / 'params').is_dir():
            return Project(root)
    raise FileNotFoundError(
        f'no nbs/params folder in {start or "this folder or above"}: '
        'work in a clone, or make a folder with stepwise-routing init DIR'
    )


def install_line(extra: str) -> str:
    "The command that installs an extra in a clone, at the versions tried."
    return f'pip install -e ".[{extra}]" -c constraints{"-gpu" if extra == "gpu" else ""}.txt (in the clone)'


def explain_parameters(thing):  # a function or class with comments on its parameters
    "The same thing; its docstring has a line per parameter now, so that `help` shows the comments."
    from fastcore.docments import docments

    meaning = {k: text for k, text in docments(thing).items() if text and k != 'return'}
    lines = [f'{name}: {" ".join(text.split())}' for name, text in meaning.items()]
    if lines:
        thing.__doc__ = '\n'.join([thing.__doc__ or '', '', 'Parameters', *lines])
    return thing
