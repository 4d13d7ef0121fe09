"""Client of the fork server of a search, which starts a trial of a script without the seconds that imports take.

The server imports what the first process of the script had imported in the end, as far as that may be done before the
script runs: `Imports`. A request is a line of JSON with `argv` (of `cli._script`), `environment` and `log`; the
answers are the PID, and later the exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from cs_systems.measure.runtime.program import end_tree

TORCH = "torch"
OURS = "cs_systems"
LIBRARIES = frozenset({"site-packages", "dist-packages"})
ENDED = "the fork server ended"
START_S = 120.0  # time that a server may take to import everything
NEEDED = (TORCH, "cs_systems.cli._script", "cs_systems.measure.recorder.unedited", "cs_systems.advise.in_script")


@dataclass(frozen=True)
class Imports:
    """Modules that a server imports before it forks.

    Attributes:
        modules: their names, in the order in which the script imported them.
        bound: packages that hold something of torch, which must not be imported before the script runs.
    """

    modules: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls) -> Imports:
        """Return the libraries of this process, without modules below the current folder, which are the user's."""
        files = {
            name: file
            for name, module in [*sys.modules.items()]
            if isinstance(module, ModuleType) and isinstance(file := vars(module).get("__file__"), str)
        }
        bound = {name.partition(".")[0] for name in files if _holds_torch(sys.modules[name])} - {TORCH, OURS}
        here = f"{Path.cwd().resolve()}{os.sep}"
        return cls(
            tuple(
                name
                for name, file in files.items()
                if not name.startswith("__")
                and name.partition(".")[0] not in (OURS, *bound)
                and (not file.startswith(here) or LIBRARIES & {*Path(file).parts})
            ),
            tuple(sorted(bound)),
        )

    @classmethod
    def of_torch(cls, others: Imports) -> Imports:
        """Return only torch's own modules among others."""
        return cls(tuple(name for name in others.modules if name.partition(".")[0] == TORCH))


def _holds_torch(module: ModuleType) -> bool:
    """Return whether a global of a module is a module, class or function of torch."""
    for value in [*vars(module).values()]:
        if isinstance(value, ModuleType):
            name = value.__name__
        elif isinstance(value, type | FunctionType | BuiltinFunctionType):
            name = value.__module__
        else:
            continue
        if isinstance(name, str) and name.partition(".")[0] == TORCH:
            return True
    return False


class NoForks(RuntimeError):
    """Error for a server that cannot fork; the message is the reason."""


class ScriptForks:
    """Running server. Its processes end with it."""

    def __init__(self, imports: Imports, environment: Mapping[str, str]) -> None:
        """Start it with these variables, which a library may read while it is imported. Raises NoForks."""
        self._read = b""
        told = asdict(Imports((*NEEDED, *imports.modules), imports.bound))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "cs_systems.cli._script_forks", str(os.getpid()), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment},
            start_new_session=True,
        )
        try:
            answer = self._answer(START_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise NoForks("the fork server did not start") from error
        if answer["refusal"]:
            self.close()
            raise NoForks(answer["refusal"])

    def run(self, argv: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float) -> None:
        """Run a trial with the arguments of `cli._script`; what it left running is ended too.

        Raises TimeoutError if it was ended, and NoForks if the server has ended.
        """
        request = {"argv": [*argv], "environment": {**environment}, "log": str(log.absolute())}
        if self._server.poll() is not None:
            raise NoForks(ENDED)
        assert self._server.stdin is not None
        pid, has_ended = None, False
        try:
            self._server.stdin.write(f"{json.dumps(request)}\n".encode())
            self._server.stdin.flush()
            pid = self._answer(START_S)["pid"]
            try:
                self._answer(timeout_s)
            except TimeoutError:
                end_tree(pid)
                self._answer(START_S)
                has_ended = True
                raise
            has_ended = True
        except (EOFError, BrokenPipeError) as error:
            raise NoForks(ENDED) from error
        finally:
            if pid is not None:
                end_tree(pid, is_running=not has_ended)
            if not has_ended:  # an answer may still come
                self.close()

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError, and EOFError if the server has ended."""
        assert self._server.stdout is not None
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            if not wait([self._server.stdout.fileno()], max(0.0, until_s - time.monotonic())):
                raise TimeoutError
            if not (read := os.read(self._server.stdout.fileno(), 1 << 16)):
                raise EOFError
            self._read += read
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
