"""Detection of child processes that a script starts: they are not recorded, so a message warns if they may train."""

from __future__ import annotations

import functools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cs_systems.core.printable import plain
from cs_systems.core.units import counted

_PYTHON = re.compile(r"(python[\d.]*|torchrun|accelerate|deepspeed)")
_LONGEST = 60  # longest shown command, in characters


class Children:
    """Python processes that this process has started, grouped by their program.

    Workers of a DataLoader are left out.
    """

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.commands: Counter[str] = Counter()

    def watch(self) -> None:
        """Count the processes that are started from now on, by multiprocessing and by subprocess."""
        import multiprocessing.process
        import subprocess

        before(multiprocessing.process.BaseProcess, "start", self._starts)
        before(subprocess.Popen, "__init__", self._runs)

    def _starts(self, process: Any, *_: Any, **__: Any) -> None:
        target, arguments = getattr(process, "_target", None), getattr(process, "_args", ())
        if getattr(target, "__module__", "") == "torch.multiprocessing.spawn" and arguments:
            target = arguments[0]  # the function given to torch.multiprocessing.spawn
        if not str(getattr(target, "__module__", "")).startswith("torch.utils.data"):
            self.functions[plain(str(getattr(target, "__name__", type(process).__name__)))] += 1

    def _runs(self, _: Any, args: Any = (), *__: Any, **___: Any) -> None:
        words = args.split() if isinstance(args, str) else [*map(str, _listed(args))]
        compiles = any("torch/_inductor" in word for word in words)
        if words and _PYTHON.fullmatch(Path(words[0]).name) and not compiles:
            self.commands[plain(shlex.join(words[1:]))[:_LONGEST]] += 1

    def remedy(self) -> str | None:
        """Return what was started and how to record its training; None if nothing was started."""
        if self.functions:
            (name, count), number = self.functions.most_common(1)[0], self.functions.total()
            return (
                f"it started {counted(number, 'child process', 'child processes')} of {', '.join(self.functions)}, "
                f"not recorded; if they train, call {name} in the script itself, with the rank and world size of "
                f"torchrun's environment: torchrun --nproc-per-node {count} -m cs_systems run -- train.py"
            )
        if self.commands:
            command, number = next(iter(self.commands)), self.commands.total()
            return (
                f"it started {counted(number, 'child process', 'child processes')} of Python, not recorded; if they "
                f"train, record one by cs-systems run -- {command}, or ranks by torchrun --nproc-per-node 2 -m "
                "cs_systems run -- train.py"
            )
        return None


def _listed(args: Any) -> Sequence[Any]:
    return args if isinstance(args, (list, tuple)) else [args]


def before(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Call `then` with the arguments before each call of a function of a class or module."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def preceded(*args: Any, **kwargs: Any) -> Any:
        then(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, preceded)
