"""Command that started this process, and the code of the script that it runs, in the form for records."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cs_systems.core.printable import command_line

_given: list[str] = []  # commands named by `by`; the innermost is last
_code: dict[str, str] = {}


@contextmanager
def by(command: str | None) -> Iterator[None]:
    """Name the command that makes the records inside this context; None means the process's own arguments."""
    if command is None:
        yield
        return
    _given.append(command)
    try:
        yield
    finally:
        _given.remove(command)


@contextmanager
def of_code(code: Mapping[str, str]) -> Iterator[None]:
    """Name the code that the records inside this context measure: path and hash, as columns of `ran`."""
    _code.update(code)
    try:
        yield
    finally:
        _code.clear()


def code() -> dict[str, str]:
    """Return the path and the hash of the script that this process runs; empty if it runs none."""
    return {**_code}


def command() -> str | None:
    """Return the command line that started this process; None at a prompt, in a notebook and for `python -c`."""
    if _given:
        return _given[-1]
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        module = spec.name.removesuffix(".__main__")
        return None if module.startswith("ipykernel") else command_line("python", "-m", module, *sys.argv[1:])
    if getattr(main, "__file__", None) is None:
        return None
    program = [] if not sys.argv[0].endswith(".py") else ["python"]
    name = sys.argv[0] if program else Path(sys.argv[0]).name  # an installed program can be called by its name
    return command_line(*program, name, *sys.argv[1:])
