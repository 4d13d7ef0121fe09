"""Client of the fork server of a search, which starts a trial of a script without the seconds that imports take.

The first process of the script is a new one. It leaves `Imports`: the modules of torch that it had imported in the
end, or why a fork would differ from a new process.

A message is a line of JSON. The first one has the script's `folder`, the `modules` and the `file` of torch, and its
answer a `refusal` or null. A request has `argv` (of `cli._script`) and the file of the `log`; its answers are the
`pid`, and later the exit `status`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from cs_systems.measure.runtime.program import end_tree

TORCH = "torch"
ENDED = "the fork server ended"
START_S = 120.0  # most time that a server may take to import everything
# Variables that torch's modules or their libraries read, except those that torch sets itself.
_READ = re.compile(
    "(PY)?TORCH\\w*|OMP_\\w+|KMP_\\w+|MKL_\\w+|(ONE)?DNN\\w*|OPENBLAS_\\w+|CUDA_\\w+|CUBLAS\\w*|CUDNN_\\w+|NVIDIA_\\w+"
    "|TRITON_\\w+|NCCL_\\w+|GLOO_\\w+"
)
_SET_BY_TORCH = re.compile("TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|TORCH_NCCL_\\w+|_\\w+")


@dataclass(frozen=True)
class Imports:
    """Modules of torch in a script's process.

    Attributes:
        modules: their names, in the order in which they were imported.
        file: the file of torch.
        refusal: why no other process may import them before the script runs; None if it may.
    """

    modules: tuple[str, ...] = ()
    file: str = ""
    refusal: str | None = None

    @classmethod
    def read(cls, path: Path) -> Imports | None:
        """Return the imports in a file; None if it is missing or incomplete."""
        try:
            found = json.loads(path.read_text())
            return cls(tuple(found["modules"]), found["file"], found["refusal"])
        except (OSError, ValueError, KeyError):
            return None


class Look:
    """Look at a script's process, from before the script begins: what it sets for torch, and what it imports.

    path: the file for what is found.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._variables, self._cores = dict(os.environ), _cores()
        self._refusal: str | None = None

    def torch_is_imported(self) -> None:
        """Compare variables and cores with those at the begin; libraries read them while they are imported."""
        if dict(os.environ) != self._variables:
            self._refusal = "the script sets environment variables before it imports torch"
        elif _cores() != self._cores:
            self._refusal = "the script sets its cores before it imports torch"

    def found(self) -> Imports:
        """Return the modules so far."""
        changed = {name for name, _ in os.environ.items() ^ self._variables.items()}
        read = sorted(name for name in changed if _READ.fullmatch(name) and not _SET_BY_TORCH.fullmatch(name))
        refusal = self._refusal or (f"the script sets {', '.join(read)}" if read else None)
        modules = tuple(name for name in sys.modules if name.partition(".")[0] == TORCH)
        return Imports(modules, str(getattr(sys.modules.get(TORCH), "__file__", "")), refusal)

    def leave(self) -> None:
        """Write the modules so far into the file."""
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self.found())))
        unfinished.rename(self._path)


def _cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


class NoForks(RuntimeError):
    """Error for a server that cannot fork; the message is the reason."""


class ScriptForks:
    """Running server. Its processes end with it."""

    def __init__(self, script: Path, imports: Imports, environment: Mapping[str, str], within_s: float) -> None:
        """Start it with these variables; it may take `within_s`. Raises NoForks."""
        if imports.refusal:
            raise NoForks(imports.refusal)
        self._read = b""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "cs_systems.cli._script_forks", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment},
            start_new_session=True,
        )
        folder = str(Path(os.path.realpath(script)).parent)
        try:
            self._send({"folder": folder, "modules": imports.modules, "file": imports.file})
            answer = self._answer(min(START_S, within_s))
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self.close()
            raise NoForks("the fork server did not start") from error
        if answer["refusal"]:
            self.close()
            raise NoForks(answer["refusal"])

    def run(self, argv: Sequence[str], log: Path, timeout_s: float) -> None:
        """Run a trial with the arguments of `cli._script`; what it left running is ended too.

        Raises TimeoutError if it was ended, and NoForks if the server has ended.
        """
        if self._server.poll() is not None:
            raise NoForks(ENDED)
        pid, has_ended = None, False
        try:
            self._send({"argv": [*argv], "log": str(log.absolute())})
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
        """End the server, and what its imports started."""
        end_tree(self._server.pid, is_running=self._server.poll() is None)
        self._server.wait()
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{json.dumps(message)}\n".encode())
        self._server.stdin.flush()

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
