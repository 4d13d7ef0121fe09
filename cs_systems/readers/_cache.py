"""Cache of read traces in the user's cache folder: an unchanged file is not parsed again.

An entry belongs to one state of a file (path, size, times, inode), one process and one version of the readers' code. It
holds arrays and JSON, no code, with checksums. An entry that does not fit or is damaged is removed and the file parsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cs_systems.readers.forms import columns, jobs, operators, trace
from cs_systems.readers.forms.columns import Categorical
from cs_systems.readers.forms.modules import Modules
from cs_systems.readers.forms.operators import Operators
from cs_systems.readers.forms.trace import Trace

LARGEST_BYTES = 2 << 30  # limit for the total size of the entries
WORTH_S = 1.0  # seconds; traces that are read faster are not cached
SETTLED_S = 2.0  # seconds; a file that was changed more recently could change again unnoticed
LONG = 64  # shorter lists are stored as JSON
Reader = Callable[..., Trace]
_READERS = Path(__file__).parent  # a change in any file of this folder or its subfolders changes the version
# Classes in a trace, by name. A trace with an object of any other class is not cached.
_CLASSES: dict[str, Any] = {
    name: value
    for module in (columns, trace, jobs, operators)
    for name, value in vars(module).items()
    if isinstance(value, type) and (is_dataclass(value) or hasattr(value, "_fields"))
}


def folder() -> Path:
    """Return the folder of the entries: `$XDG_CACHE_HOME/cs-systems/traces`, by default in `~/.cache`."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "cs-systems" / "traces"


def cached(path: Path, process: int | None, read: Reader) -> Trace:
    """Return the result of `read`, from the cache if the file is unchanged; store it if reading takes long."""
    key = _key(path, process)
    entry = None if key is None else folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.npz"
    if key is not None and entry is not None and (found := _load(entry, key)):
        return replace(found, source=str(path))
    began_s = time.monotonic()
    made = read(path, process)
    took_s = time.monotonic() - began_s
    if entry is not None and key is not None and took_s >= WORTH_S and key == _key(path, process):
        # no entry is written without disk space or permission, or for a class unknown to the cache
        with contextlib.suppress(OSError, TypeError, ValueError, OverflowError, MemoryError):
            _store(entry, key, made)
    return made


def _key(path: Path, process: int | None) -> str | None:
    """Return the key of a read; None if the path is not a plain file or changed just now."""
    try:
        path = path.resolve(strict=True)
        state = path.stat()
        version = _version()
    except OSError:
        return None
    if not path.is_file() or time.time() - max(state.st_mtime, state.st_ctime) < SETTLED_S:
        return None
    of_file = (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev)
    return json.dumps([str(path), *of_file, process, version])


@cache
def _version(readers: Path = _READERS) -> str:
    digest = hashlib.sha256(np.__version__.encode())
    for file in sorted(readers.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _load(entry: Path, key: str) -> Trace | None:
    """Return the trace of an entry, or None if there is none; delete a damaged entry."""
    try:
        if entry.stat().st_uid != os.getuid():
            return None
        with entry.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            stored, tree = json.loads(arrays["tree"].tobytes())
            found = _decoded(tree, [arrays[str(number)] for number in range(len(arrays.files) - 1)])
        if stored != key or not isinstance(found, Trace):
            raise ValueError("the entry is of another file")
        os.utime(entry)  # least recently used entries are removed first
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError, EOFError, RecursionError, zipfile.BadZipFile):
        with contextlib.suppress(OSError):
            entry.unlink()
        return None
    return found


def _store(entry: Path, key: str, made: Trace) -> None:
    """Write an entry atomically, and remove the least recently used entries if there are too many."""
    arrays: list[Any] = []
    tree = json.dumps([key, _encoded(made, arrays)]).encode()
    if sum(array.nbytes for array in arrays) + len(tree) > LARGEST_BYTES // 2:
        return
    entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = entry.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            numbered = {str(number): array for number, array in enumerate(arrays)}
            np.savez(file, tree=np.frombuffer(tree, np.uint8), **numbered)
        unfinished.replace(entry)
    finally:
        unfinished.unlink(missing_ok=True)
    _shrink(entry.parent)


def _shrink(folder: Path) -> None:
    entries = [(file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir() if file.is_file()]
    total = 0
    for _, size, file in sorted(entries, reverse=True):
        total += size
        if total > LARGEST_BYTES:
            file.unlink(missing_ok=True)


def _encoded(value: Any, arrays: list[Any]) -> Any:
    """Return the value as JSON, with its arrays and long lists moved into `arrays`. Raises TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is np.ndarray and value.dtype.kind in "bif":
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if kind in (list, tuple):
        return {kind.__name__: _listed(value, arrays)}
    if kind is dict:
        return {"dict": [_listed([*value], arrays), _listed([*value.values()], arrays)]}
    if kind is Categorical:
        return {"categorical": [_listed(value.values, arrays), _encoded(value.codes, arrays)]}
    if kind is Modules:
        return {"modules": [value.rows, value.how]}
    if kind is Operators:
        return {"operators": [[*vars(value)], [_encoded(one, arrays) for one in vars(value).values()]]}
    if _CLASSES.get(kind.__name__) is kind:
        names = getattr(value, "_fields", None) or [one.name for one in fields(value)]
        return {"object": kind.__name__, "fields": [_encoded(getattr(value, name), arrays) for name in names]}
    raise TypeError(f"the cache does not know {kind.__name__}")


def _listed(values: Sequence[Any], arrays: list[Any]) -> Any:
    """Return the encoded list; a long list is stored by columns, or by its distinct values."""
    kinds = {type(value) for value in values}
    if len(values) >= LONG and len(kinds) == 1:
        (kind,) = kinds
        if kind in (int, float):
            return _encoded(np.array(values, np.int64 if kind is int else np.float64), arrays)
        if issubclass(kind, tuple) and _CLASSES.get(kind.__name__) is kind:
            return {"rows": kind.__name__, "columns": [_listed(column, arrays) for column in zip(*values, strict=True)]}
    if len(values) >= LONG and kinds <= {str, int, type(None)}:
        distinct = Categorical.of(values)
        if len(distinct.values) < len(values) // 2:
            return {"distinct": [_listed(distinct.values, arrays), _encoded(distinct.codes, arrays)]}
    return [_encoded(value, arrays) for value in values]


def _decoded(tree: Any, arrays: Sequence[Any]) -> Any:
    if not isinstance(tree, dict):
        return tree
    kind: str = next(iter(tree))
    content: Any = tree[kind]
    match kind:
        case "array":
            return arrays[content]
        case "list":
            return _entries(content, arrays)
        case "tuple":
            return tuple(_entries(content, arrays))
        case "dict":
            return dict(zip(*(_entries(part, arrays) for part in content), strict=True))
        case "categorical":
            return Categorical(_entries(content[0], arrays), _decoded(content[1], arrays))
        case "modules":
            return Modules(*content)
        case "operators":  # stored with their order and tree, to avoid computing these again
            found = Operators.__new__(Operators)
            vars(found).update(zip(content[0], (_decoded(one, arrays) for one in content[1]), strict=True))
            return found
    return _CLASSES[content](*(_decoded(one, arrays) for one in tree["fields"]))


def _entries(content: Any, arrays: Sequence[Any]) -> list[Any]:
    if isinstance(content, list):
        return [_decoded(one, arrays) for one in content]
    if "array" in content:
        return list(arrays[content["array"]].tolist())
    if "distinct" in content:
        values, codes = content["distinct"]
        return list(Categorical(_entries(values, arrays), _decoded(codes, arrays)))
    columns = (_entries(column, arrays) for column in content["columns"])
    return list(map(_CLASSES[content["rows"]], *columns))
