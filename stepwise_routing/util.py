"""Small helpers that every folder uses: lines about bad input, files, a clone's folders.

Here belongs code that knows nothing about routing and imports nothing from the package. Settings,
stores and statistics have modules of their own.
"""

import difflib
import hashlib
import inspect
import io
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

# ---- names and lines about bad input


def digest(
    *parts,  # objects; `str` of each is hashed
    size: int = 8,  # bytes, two digits each
) -> str:
    "Hexadecimal blake2b of the parts, joined by the unit separator."
    text = '\x1f'.join(str(part) for part in parts)
    return hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=size).hexdigest()


def nearest(name: str, options) -> str:
    "A hint for an error line: \" (did you mean 'x'?)\", or \"\" if no option is like the name."
    close = difflib.get_close_matches(str(name), map(str, options), n=1)
    return f' (did you mean {close[0]!r}?)' if close else ''


def unknown_name(
    kind: str,  # of thing that is named, such as "benchmark"
    name,
    options,  # the names there are
    more: str = '',  # end of the line: other things that may be given
) -> str:
    "The error line about a name that is not among the options."
    choices = ', '.join(map(str, options))
    return f'unknown {kind} {name!r}{nearest(name, options)}; choose one of: {choices}{more}'


def one_of(
    kind: str,  # of thing that is named
    name,
    options,  # the names there are
) -> None:
    "ValueError, with the nearest option, if the name is not among the options."
    if name not in options:
        raise ValueError(unknown_name(kind, name, options))


def require_fields(
    row,  # of a file of JSON objects
    needed,  # names of fields
) -> None:
    "ValueError if a row is not an object or lacks a field; it names the nearest field."
    if not isinstance(row, dict):
        raise ValueError('not a JSON object')
    for name in needed:
        if name not in row:
            raise ValueError(f'no field {name!r}{nearest(name, row)}; needed: {", ".join(needed)}')


def bad_row(
    file,
    row,  # its number, from 1
    reason,  # text or an error
) -> ValueError:
    "The error about a row of a file. The caller raises it."
    return ValueError(f'{file}, row {row}: {reason}')


def install_line(extra: str) -> str:
    "The command that installs an extra in a clone, at the versions that were tested."
    constraints = 'constraints-gpu.txt' if extra == 'gpu' else 'constraints.txt'
    return f'pip install -e ".[{extra}]" -c {constraints} (in the clone)'


def one_line(text) -> str:
    "Text from elsewhere as one line for a terminal, without line ends and escape codes."
    return ''.join(character if character.isprintable() else ' ' for character in str(text))


def own_lines(
    text: str,  # from elsewhere, such as a model
    margin: str,  # before its second line and the following ones
) -> str:
    "The text for a terminal, indented so that no line looks like one of ours, without escape codes."
    return f'\n{margin}'.join(one_line(line) for line in str(text).splitlines())


def explain_parameters(thing):  # a function or class with comments on its parameters
    "Adds a line per parameter to the docstring, so that `help` shows the comments, once. Returns the thing."
    from fastcore.docments import docments

    if '\nParameters\n' in (thing.__doc__ or ''):
        return thing
    lines = []
    for name, comment in docments(thing).items():
        if comment and name != 'return':
            lines.append(f'{name}: {" ".join(comment.split())}')
    if lines:
        thing.__doc__ = '\n'.join([inspect.getdoc(thing) or '', '', 'Parameters', *lines])
    return thing


# ---- files


def write_file(
    path,
    data,  # text or bytes
) -> Path:
    "Write a whole file or nothing, and make its folders. A link in its place is replaced, not followed."
    path = Path(path)
    if path.is_dir():
        raise OSError(f'{path} is a folder where a file of ours belongs: move it away')
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f'{path.name}.{secrets.token_hex(8)}.part')  # nobody can lay a link there
    try:
        with open(part, 'xb') as f:
            f.write(data.encode('utf-8') if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as error:  # a full disk does not name the file
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        part.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class Project:
    "The folders of a clone."

    root: Path  # holds nbs/, runs/, tables/ and figures/

    @property
    def nbs(self) -> Path:
        return self.root / 'nbs'

    @property
    def params(self) -> Path:
        return self.nbs / 'params'

    @property
    def runs(self) -> Path:
        return self.root / 'runs'

    def short(self, path) -> str:
        "A path relative to the root, with slashes."
        return Path(path).relative_to(self.root).as_posix()


def find_project(
    start=None,  # folder of a clone; None: the one we are in, or the one of `pip install -e`
) -> Project:
    "The clone to work in. FileNotFoundError if there is none."
    if start:
        folders = [Path(start).resolve()]
    else:
        folders = [Path.cwd(), *Path.cwd().parents, PACKAGE.parent]
    for root in folders:
        if (root / 'nbs' / 'params').is_dir():
            return Project(root)
    raise FileNotFoundError(
        f'no nbs/params folder in {start or "this folder or above"}: work in a clone'
    )


# ---- arrays


def npz_bytes(
    arrays: dict,  # name -> array
) -> bytes:
    "An .npz file, compressed; the same bytes every time."
    import zipfile

    import numpy as np

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, 'w') as file:
        for name, array in arrays.items():
            column = io.BytesIO()
            np.save(column, array, allow_pickle=False)
            info = zipfile.ZipInfo(name + '.npy')
            file.writestr(info, column.getvalue(), zipfile.ZIP_LZMA)  # `np.load` reads it
    return archive.getvalue()


def resamples(
    n: int,  # problems
    n_boot: int = 1000,  # resamples
    seed: int = 0,  # of the draw
):  # float [1 + resample, problem]; the first row is the sample itself
    """Bootstrap counts: how often each problem counts in each resample.

    The counts are the same for every method with the same problems, so differences are paired.
    The mean of `x` in each resample is `resamples(len(x)) @ x / len(x)`.
    """
    import numpy as np

    sample_itself = np.ones((1, n))
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), n_boot)
    return np.r_[sample_itself, draws]
