"""Fork server of a search: imports what the script imports of torch and of libraries without torch, and forks trials.

    python -m cs_systems.cli._script_forks PARENT MODULES_AS_JSON

PARENT is the PID of the client, `measure.runtime.script_forks`, which tells what MODULES are, and the messages. The
server computes nothing, starts no thread and queries no device, so that a fork equals a new process whose imports took
no time. Its modules are imported before the hooks of levers are applied; modules that hold something of torch are not
among them, because a hook would not change what they hold.
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
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import IO, Any, NoReturn

from cs_systems.measure.runtime.forking import has_opened_a_gpu, run_and_exit


def refusal(modules: Iterable[str], bound: Collection[str]) -> str | None:
    """Import modules, and return why this process cannot fork a trial now; None if it can."""
    for name in modules:
        with suppress(Exception):  # the script imports it in another way, such as under another path
            importlib.import_module(name)
    if has_opened_a_gpu():
        return "an imported module has opened a GPU"
    if threading.active_count() > 1:
        return "an imported module has started a thread"
    if loaded := {name.partition(".")[0] for name in sys.modules} & {*bound}:
        return f"{', '.join(sorted(loaded))} was imported, which holds something of torch"
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

    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        for descriptor in (log, *of_server):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        random.seed()
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        sys.argv = [_script.__file__, *request["argv"]]
    except BaseException:
        os._exit(1)
    run_and_exit(_script.main)


def _answer(answers: IO[str], message: Mapping[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def main() -> None:
    asked = json.loads(sys.argv[2])
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a module reads or prints while it is imported is no message
        os.dup2(nothing, stream)
    os.close(nothing)
    reason = refusal(asked["modules"], asked["bound"])
    _answer(answers, {"refusal": reason})
    if reason is None:
        serve(requests, answers)


if __name__ == "__main__":
    main()
