"""Tasks of a systems course, read from course.toml: commands, sizes, good answers and common mistakes of each."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("course.toml")


@dataclass(frozen=True)
class Task:
    """Task of the course; course.toml explains the fields."""

    name: str
    asks: str
    gpus: int
    look: str
    good: str
    mistakes: tuple[str, ...]
    steps: tuple[str, ...] = ()
    full: Mapping[str, str] = field(default_factory=dict)
    tiny: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    folder: str = ""
    limits: tuple[str, ...] = ()
    ring: tuple[int, ...] = ()
    shows: tuple[int, ...] = (1,)
    answers: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()

    def commands(self, values: Mapping[str, str], out: str) -> list[list[str]]:
        """Return the words after `cs-systems` of each command, with these values and this folder of results."""
        return [shlex.split(step.format(**values, out=shlex.quote(out))) for step in self.steps]


@cache
def tasks() -> dict[str, Task]:
    """Return the tasks by their short names, in the order of the handout."""
    found = {}
    for name, facts in tomllib.loads(FILE.read_text(encoding="utf-8")).items():
        lists = {key: tuple(value) for key, value in facts.items() if isinstance(value, list)}
        found[name] = Task(name, **facts | lists)
    return found
