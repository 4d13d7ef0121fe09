"""Files of a script: its own text, and the modules below the current folder that it imports."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs_systems.advise.edits import lines_of

SKIPPED = frozenset(
    {".git", ".venv", "venv", "site-packages", "dist-packages", "node_modules", "__pycache__", "runs", "wandb"}
)
LIBRARY = ("stdlib", "platstdlib", "purelib", "platlib")  # the interpreter's own folders; its prefix may be the project
MOST_FILES = 300  # modules of one script; more are not read


@dataclass(frozen=True)
class Source:
    """Text of one file, with its line ends as they are.

    Attributes:
        path: the resolved path.
    """

    path: Path
    text: str


def read(path: Path) -> str:
    """Return the text of a Python file without changing its line ends."""
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def sources(script: Path) -> tuple[Source, ...]:
    """Return the script first, then the modules below the current folder that it imports, directly or not.

    Modules are looked for where the script's process looks: in the script's folder, then in the paths of this process.
    Links are followed, so that a module behind a link out of the current folder is left out, as are the interpreter's
    library and files that cannot be read as Python, except the script itself.
    """
    first = script.resolve()
    paths = [first.parent, *(Path(each).resolve() for each in sys.path[1:] if each)]
    found, open_ = {first: read(script)}, [(first, first)]
    while open_ and len(found) < MOST_FILES:
        file, path = open_.pop(0)
        for module in _imported(file, found[path], paths):
            resolved = module.resolve()
            if resolved in found or not _is_own(resolved):
                continue
            try:
                text = read(resolved)
                ast.parse(text)
            except (OSError, SyntaxError, ValueError):
                continue
            found[resolved] = text
            open_.append((module, resolved))
    return tuple(Source(path, text) for path, text in found.items())


def _is_own(module: Path) -> bool:
    """Return whether a file is below the current folder, and in no folder of libraries."""
    here = Path.cwd().resolve()
    if not module.is_relative_to(here) or SKIPPED & {*module.relative_to(here).parts}:
        return False
    library = (Path(sysconfig.get_path(name)).resolve() for name in LIBRARY)
    return not any(module.is_relative_to(folder) for folder in library)


def _imported(file: Path, text: str, paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of the modules that a file imports, packages included."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                for each in names:
                    yield from _files(paths, each.name.split("."))
            case ast.ImportFrom(module=module, names=names, level=level):
                roots = [file.parents[level - 1]] if level and level <= len(file.parents) else paths
                package = module.split(".") if module else []
                for each in names:
                    yield from _files(roots, [*package, each.name])


def _files(roots: Sequence[Path], parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files of a module and of its packages, in the first folder that has the outermost of them."""
    for root in roots:
        found, folder = list[Path](), root
        for part in parts:
            folder = folder / part
            found += [each for each in (folder / "__init__.py", folder.with_suffix(".py")) if each.is_file()]
        if found or (root / parts[0]).is_dir():
            yield from found
            return


def shown_name(path: Path) -> str:
    """Return the name of a file in a diff: below the repository's top, or below the current folder outside of one.

    `git apply` reads names below the top, also in a folder below it.
    """
    top = top_of(path.parent)
    for folder in filter(None, (top, Path.cwd().resolve())):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.as_posix().removeprefix("/")


def top_of(folder: Path) -> Path | None:
    """Return the top folder of the git repository around a folder; None outside of one, or without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--show-toplevel"], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return Path(done.stdout.strip()).resolve() if done.returncode == 0 else None


def diff(name: str, before: str, after: str) -> str:
    """Return the unified diff of a file, in the form that `git apply` and `patch -p1` read."""
    import difflib

    lines = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
