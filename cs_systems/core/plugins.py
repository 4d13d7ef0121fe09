"""Plug-ins, found by file name and imported only when requested.

`names("attention")` lists the files of `cs_systems/model/attention/`; `get("attention", "naive")` imports that one file
and returns the constant it exports. Files that begin with `_` are helpers. `path.py:object` and
`package.module:object` name code outside the package and are accepted wherever a built-in name is.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from cs_systems.core import projects
from cs_systems.core.defined_names import defined_names
from cs_systems.core.printable import command_line
from cs_systems.core.validation import ConfigError, did_you_mean, one_of, shown


@dataclass(frozen=True)
class Kind:
    """Kind of plug-in.

    Attributes:
        folder: the folder of its files in `cs_systems/`; "" if the field that names them lists the built-in ones.
        constant: the name of the constant that each file exports.
        words: its name in messages.
        foreign: whether code from outside the package is accepted.
    """

    folder: str
    constant: str
    words: str
    foreign: bool = True

    @property
    def path(self) -> Path:
        return Path(__file__).parents[1] / self.folder

    def file(self, name: str) -> Path:
        """Return the file that exports the constant of a built-in plug-in: a module, or a package's __init__."""
        return file if (file := self.path / f"{name}.py").is_file() else self.path / name / "__init__.py"


KINDS = {
    "attention": Kind("model/attention", "BACKEND", "attention backend"),
    "workloads": Kind("measure/workloads", "WORKLOAD", "workload"),
    "profilers": Kind("measure/profilers", "PROFILER", "profiler"),
    "parallel": Kind("model/parallel", "STRATEGY", "parallel strategy"),
    "training.optimizers": Kind("", "", "optimizer"),
    "training.losses": Kind("", "", "loss"),
    "training.clipping": Kind("", "", "clip function"),
    "training.data": Kind("", "", "data"),
    "training.parts": Kind("model/training/parts", "PART", "part of the training step"),
    "experiments": Kind("measure/experiments", "EXPERIMENT", "experiment", foreign=False),
    "diagnosis": Kind("analysis/diagnosis", "RULE", "rule"),
    "levers": Kind("advise/levers", "LEVER", "lever", foreign=False),
    "readers": Kind("readers", "FORMAT", "format", foreign=False),
}

LIVE = "live "  # prefix of the name of an object in this process
_held: dict[str, Any] = {}


@functools.cache
def names(package: str) -> tuple[str, ...]:
    """Return the plug-ins of a kind, a key of KINDS, sorted, without importing any."""
    kind = KINDS[package]
    if not kind.folder:
        return ()
    inits = (init for init in kind.path.glob("*/__init__.py") if kind.constant in init.read_text(encoding="utf-8"))
    files = [*kind.path.glob("*.py"), *(init.parent for init in inits)]
    return tuple(sorted(p.stem for p in files if not p.stem.startswith("_")))


def summary(package: str, name: str) -> str:
    """Return the first sentence of a built-in plug-in's file, without references and full stop."""
    with KINDS[package].file(name).open(encoding="utf-8") as stream:
        line = stream.readline()
    return line.strip().strip('"').partition(" (")[0].partition(". ")[0].rstrip(".")


def is_foreign(name: str) -> bool:
    """Return True if `name` refers to code outside the package.

    That is `path.py:object`, `package.module:object`, or `live NAME`.
    """
    return ":" in name or name.startswith(LIVE)


@contextmanager
def holding(name: str, made: Any) -> Iterator[None]:
    """Register an object of this process as `live NAME`, so that `get` finds it inside the context."""
    _held[name] = made
    try:
        yield
    finally:
        del _held[name]


def check(package: str, name: str) -> str:
    """Return `name` if it can be looked up, without importing it.

    Raises:
        ConfigError: no such plug-in, file, module or object; the message suggests the nearest names.
    """
    kind = KINDS[package]
    if not is_foreign(name) or not kind.foreign:
        if name.endswith(".py") and kind.foreign:
            raise ConfigError(f"{name!r} names a file, but no object in it; write {name}:name")
        return one_of(kind.words, name, names(package))
    if name.startswith(LIVE):
        if name in _held:
            return name
        raise ConfigError(
            f"{name!r} was an object of the process that measured it; measure it again with cs_systems.run(model=…), "
            "or name it as path/to/file.py:name"
        )
    source, _, attribute = name.rpartition(":")
    if not source or not attribute.isidentifier():
        raise ConfigError(
            f"{name!r} must have a file or module before the colon, and one plain name after it; "
            "write path/to/file.py:name or package.module:name"
        )
    if source == "__main__":  # given by a process other than the worker
        raise ConfigError(
            f"{name!r} exists in this process only; put it into a file, and write path/to/file.py:{attribute}"
        )
    if not source.endswith(".py") and "/" in source and Path(f"{source}.py").is_file():
        raise ConfigError(f"{source!r} (from {name!r}) is a path without .py; write {source}.py:{attribute}")
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(f"file {source!r} (from {name!r}) does not exist; correct the path")
    package = source.partition(".")[0]
    if not source.endswith(".py") and not source_file(source) and not importlib.util.find_spec(package):
        raise ConfigError(
            f"module {source!r} (from {name!r}) was not found; correct its name, add the folder that contains it to "
            f"PYTHONPATH, or write path/to/file.py:{attribute} for a file"
        )
    file = source_file(source)
    known = defined_names(file) if file and not attribute.startswith("__") else None
    if known is not None and attribute not in known:
        raise ConfigError(_lacks(source, attribute, known))
    return name


def _lacks(source: str, attribute: str, known: Iterable[str]) -> str:
    """Return an error message that a file or module does not define a name, with a remedy."""
    public = sorted(name for name in known if not name.startswith("_"))
    return f"{source} has no {attribute!r}; {did_you_mean(attribute, public) or 'correct the name after the colon'}"


def import_remedy(source: str, error: ImportError) -> str:
    """Return the remedy for a failed import; Python does not look for modules in the folder of a file given by path."""
    from importlib.metadata import PackageNotFoundError  # its import takes longer than a command's help may

    missing = (error.name or "").partition(".")[0]
    if source.endswith(".py") and "relative import" in str(error):
        return f"name it as a module of its package, {_module_name(Path(source).resolve())}:name"
    if isinstance(error, PackageNotFoundError) and (root := projects.root_with_name(_file_or_here(source), missing)):
        return f"install your project: {command_line('pip', 'install', '--no-deps', '-e', str(root))}"
    for folder in Path(source).resolve().parents if source.endswith(".py") and missing else ():
        if (folder / f"{missing}.py").is_file() or (folder / missing).is_dir():
            return f"add the folder of {missing} to PYTHONPATH, {folder}"
    return "correct the name or the import, or install the missing package"


def _module_name(file: Path) -> str:
    """Return the name of a file's module in its package, a tree of folders with an __init__.py."""
    package = takewhile(lambda folder: (folder / "__init__.py").is_file(), file.parents)
    return ".".join([*reversed([folder.name for folder in package]), file.stem])


def get(package: str, name: str) -> Any:
    """Import the one file that holds plug-in `name` and return the object it exports."""
    check(package, name)
    if not is_foreign(name):
        kind = KINDS[package]
        return getattr(importlib.import_module(f"cs_systems.{kind.folder.replace('/', '.')}.{name}"), kind.constant)
    if name in _held:
        return _held[name]
    source, _, attribute = name.rpartition(":")
    try:
        module = _module(source)
    except ImportError as error:
        raise ConfigError(f"{source} cannot be imported: {error}; {import_remedy(source, error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(_lacks(source, attribute, vars(module)))
    return getattr(module, attribute)


def own_function(package: str, name: str, arguments: str, form: str) -> Any:
    """Return a user's own function. Raises ConfigError unless it accepts this many positional arguments.

    arguments: their names, with commas. form: what to name instead.
    """
    made = get(package, name)
    if not callable(made):
        raise ConfigError(f"{KINDS[package].words} {name} is {shown(made)}; name {form}")
    if not takes(made, *arguments.split(",")):
        words = f"{KINDS[package].words} {name}{signature(made)}"
        raise ConfigError(f"{words} cannot be called with ({arguments}); name {form}")
    return made


def sibling(name: str, attribute: str) -> Any:
    """Return another object from the imported file or module of foreign code; None if it has none of that name."""
    source, _, _ = name.rpartition(":")
    return getattr(_module(source), attribute, None)


def _module(source: str) -> Any:
    """Import a file or module; its project's folders stay on sys.path, because functions may import when called."""
    known = {*map(os.path.realpath, sys.path)}
    sys.path += [str(folder) for folder in projects.import_folders(_file_or_here(source)) if str(folder) not in known]
    return _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)


def declared(package: str, name: str) -> dict[str, Any]:
    """Return the literal keyword arguments of a plug-in's constant, without importing its file.

    Example: `options={"size": "count"}`, `splits=frozenset({"batch"})`. Empty for foreign code if its file cannot be
    read, or does not assign a call to the name.
    """
    check(package, name)
    file: Path | None = KINDS[package].file(name)
    constant = KINDS[package].constant
    if is_foreign(name):
        source, _, constant = name.rpartition(":")
        file = source_file(source) if source else None
    try:
        return dict(_declared(file, constant, file.stat().st_mtime_ns)) if file else {}
    except (OSError, SyntaxError, ValueError, RecursionError):  # reported when the file is imported
        return {}


@functools.cache
def declaring(package: str, keyword: str) -> dict[str, Any]:
    """Return the literal that each built-in plug-in declares with a keyword; those without it are left out.

    Only files with the keyword in their text are parsed, so that a help text may ask.
    """
    texts = {name: KINDS[package].file(name).read_text(encoding="utf-8") for name in names(package)}
    found = {name: declared(package, name) for name, text in texts.items() if f"{keyword}=" in text}
    return {name: literals[keyword] for name, literals in found.items() if keyword in literals}


@functools.lru_cache(maxsize=64)  # called for each record of several ranks
def _declared(file: Path, constant: str, modified_ns: int) -> dict[str, Any]:
    found = {}
    for node in ast.parse(file.read_bytes()).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Call(keywords=keywords)) if name == constant:
                for keyword in keywords:
                    with suppress(ValueError):  # a computed value is known only after an import
                        found[str(keyword.arg)] = _literal(keyword.value)
    return found


def _literal(value: ast.expr) -> Any:
    match value:
        case ast.Call(func=ast.Name("frozenset"), args=members):
            return frozenset().union(*map(ast.literal_eval, members))
    return ast.literal_eval(value)


def provenance(name: str) -> dict[str, str] | None:
    """Return the name, path and SHA-256 of foreign code, for the record; None for a built-in.

    The hash covers the file, and the files next to it and of its project that it imports.
    """
    if not is_foreign(name) or name.startswith(LIVE):
        return None
    source, _, _ = name.rpartition(":")
    path = source_file(source)
    return {"name": name, "path": source, "sha256": code_sha256(path) if path else ""}


def code_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, and of the files next to it and of its project that it imports."""
    digests = [_sha256(each.read_bytes()) for each in (path, *projects.imported_files(path))]
    return digests[0] if len(digests) == 1 else _sha256("".join(digests).encode())


def _sha256(data: bytes) -> str:
    import hashlib  # takes 2 ms, which no help needs

    return hashlib.sha256(data).hexdigest()


def takes(function: Any, *arguments: Any, **named: Any) -> bool:
    """Return True if the function accepts these arguments.

    A function without an inspectable signature (C code) is assumed to accept them.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def takes_a_class(argument: str) -> bool:
    """Return whether an argument's name means an optimizer class, as in (params, optimizer_cls, **kwargs)."""
    word = argument.lower()
    return word == "cls" or ("opt" in word and word.endswith(("cls", "class", "type")))


def signature(function: Any) -> str:
    """Return a function's parameters without their types, "(config, device)", or "" if they are not known."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def source_file(source: str, importer: Path | None = None) -> Path | None:
    """Return the file of `path.py` or `package.module` without importing anything; None if there is none.

    importer: the file that imports the module, if it is not named on the command line.
    """
    if source.endswith(".py"):
        return path if (path := Path(source)).is_file() else None
    parts = source.replace(".", "/")
    folders = [Path.cwd(), *map(Path, sys.path), *projects.import_folders(importer or _file_or_here(source))]
    candidates = (folder / f"{parts}{end}" for folder in folders for end in (".py", "/__init__.py"))
    return next((c for c in candidates if c.is_file()), None)


def _file_or_here(source: str) -> Path:
    """Return the file of `path.py`; for a module, a path in the current folder."""
    return Path(source) if source.endswith(".py") else Path.cwd() / source


def _load_file(path: Path) -> Any:
    """Return the module of a file, executed once per process and kept in sys.modules, which dataclasses need."""
    unique = f"{path.stem}_{_sha256(str(path.resolve()).encode())[:12]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    sys.modules[unique] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module
