"""Fork server of a search: imports what the script used of torch, and forks a process for each trial.

    python -m cs_systems.cli._script_forks PARENT

PARENT is the PID of the client, `measure.runtime.script_forks`, which describes the messages. The server computes
nothing, starts no thread and queries no device. It imports modules of torch alone, because the script may import any
other module in a way of its own, and because hooks of levers change what later modules take from torch.
"""

from __future__ import annotations

import os
import signal
import sys

from cs_systems.measure.runtime.guardian import PR_SET_PDEATHSIG, prctl

if __name__ == "__main__":
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)

import importlib
import json
import random
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import IO, Any, NoReturn

from cs_systems.measure.runtime.forking import has_opened_a_gpu, run_and_exit
from cs_systems.measure.runtime.script_forks import TORCH

NEEDED = (TORCH, "cs_systems.measure.recorder.unedited", "cs_systems.advise.in_script")
FIXED_SEED = 67280421310721  # of torch's generator in each new process, in versions that do not draw it


def refusal(folder: str, modules: Iterable[str], file: str) -> str | None:
    """Import modules as a script in a folder would, and return why this process cannot fork a trial; None if it can.

    file: the file of torch in the script's own process.
    """
    sys.path[0] = folder
    for name in modules:
        with suppress(Exception):  # made by the script's process in another way
            importlib.import_module(name)
    for name in NEEDED:
        importlib.import_module(name)
    if sys.modules[TORCH].__file__ != file:
        return "the script imports another torch"
    if has_opened_a_gpu():
        return "an imported module has opened a GPU"
    if threading.active_count() > 1:
        return "an imported module has started a thread"
    return None


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Fork a process for each request, one at a time, until the requests end."""
    for line in requests:
        if (pid := os.fork()) == 0:
            _become_trial(json.loads(line), [requests.fileno(), answers.fileno()])
        _answer(answers, {"pid": pid})
        _answer(answers, {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def _become_trial(request: Mapping[str, Any], of_server: Iterable[int]) -> NoReturn:
    """Become the process that `python -m cs_systems.cli._script` would be."""
    from cs_systems.cli import _script

    torch: Any = sys.modules[TORCH]
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        for descriptor in (log, *of_server):
            os.close(descriptor)
        random.seed()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if torch.initial_seed() != FIXED_SEED:
            torch.default_generator.seed()
        sys.argv = [_script.__file__, *request["argv"]]
    except BaseException:
        os._exit(1)
    run_and_exit(_script.main)


def _answer(answers: IO[str], message: Mapping[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def main() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a module reads or prints while it is imported is not a message
        os.dup2(nothing, stream)
    os.close(nothing)
    reason = refusal(**json.loads(requests.readline()))
    _answer(answers, {"refusal": reason})
    if reason is None:
        serve(requests, answers)


if __name__ == "__main__":
    main()
