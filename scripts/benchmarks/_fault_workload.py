"""Workload of the fault campaign, and the catalogue of its faults: each cell does one thing that must cost no other.

Each cell of a sweep is named by its batch size. The file that `FAULT_PLAN` names says what the cell does, and where: a
fault of the catalogue, or nothing. A cell that does nothing is a detector: it records what it saw of its process
(default dtype, threads, random numbers, directory, handlers, streams, limits, …), which a neighbour may have changed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import decimal
import errno
import fcntl
import gc
import json
import locale
import math
import os
import random
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs_systems.record import SCHEMA_VERSION

PREFLIGHT, BUILD, PREPARE, STEP, COST, DESCRIBE, TABLES, DELETE = PLACES = (
    "preflight", "build", "prepare", "step", "cost", "describe", "tables", "delete",
)  # fmt: skip
CALLS = PLACES[:-1]  # where the harness calls a workload and waits for what it returns
OK, ERROR, KILLED, OOM, TIMEOUT = "ok", "error", "killed", "oom", "timeout"
FORGED = "a forged record"
FORGED_S = 12345.0  # no step takes so long
LINGER_S = 300.0  # of what a fault leaves behind: longer than a sweep may take
KNOWN_SEED = 20_240_229  # of the faults that seed: an innocent cell knows it when it sees it


@dataclass(frozen=True)
class Fault:
    """Fault that a cell commits, with the records that it permits.

    variants: name → a regular expression that the reason of a failure must hold.
    """

    family: str
    name: str
    act: Callable[[random.Random, str], Any]
    statuses: frozenset[str]
    variants: Mapping[str, str]
    places: tuple[str, ...]
    needs_timeout: bool

    def allowed(self, place: str) -> frozenset[str]:
        """Statuses that the record of such a cell may have; a deleted cell has its record already."""
        return self.statuses | {OK} if place == DELETE else self.statuses


CATALOGUE: dict[str, Fault] = {}


def fault(
    family: str,
    *statuses: str,
    variants: Mapping[str, str] | None = None,
    places: tuple[str, ...] = CALLS,
    needs_timeout: bool = False,
) -> Callable[[Callable[[random.Random, str], Any]], Callable[[random.Random, str], Any]]:
    """Add a function to the catalogue: `act(rng, variant)`."""

    def register(act: Callable[[random.Random, str], Any]) -> Callable[[random.Random, str], Any]:
        name = act.__name__
        kinds = {"": ""} if variants is None else variants
        CATALOGUE[name] = Fault(family, name, act, frozenset(statuses), kinds, places, needs_timeout)
        return act

    return register


# ---------------------------------------------------------------------------------------------- processes

DEATHS = {
    **{name: name for name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTERM", "SIGHUP")},
    "abort": "SIGABRT",
    "null pointer": "SIGSEGV",
    "exit 0": "exited with status 0",
    "exit 7": "exited with status 7",
}
FEW_DEATHS = {name: DEATHS[name] for name in ("SIGKILL", "null pointer", "exit 0", "exit 7", "abort", "SIGTERM")}


def die(how: str) -> None:
    if how == "abort":
        os.abort()
    if how == "null pointer":
        ctypes.string_at(0)
    if how.startswith("exit"):
        os._exit(int(how.split()[1]))
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(LINGER_S)


def linger() -> None:
    """Keep running for longer than a sweep may take."""
    time.sleep(LINGER_S)
    os._exit(0)


def fork(act: Callable[[], Any]) -> int:
    """Run the function in a forked child, which then ends."""
    if pid := os.fork():
        return pid
    try:
        act()
    finally:
        os._exit(0)


def detach(act: Callable[[], Any]) -> None:
    """Run the function in a grandchild with a session of its own, whose parent has ended."""

    def between() -> None:
        os.setsid()
        fork(act)

    pid = fork(between)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    linger()


@fault("forks", OK, places=PLACES)
def child_exits(rng: random.Random, variant: str) -> None:
    fork(lambda: os._exit(rng.randrange(3)))


@fault("forks", OK, ERROR, places=PLACES)
def child_raises(rng: random.Random, variant: str) -> None:
    if os.fork() == 0:
        raise RuntimeError("raised by a forked child")


@fault("forks", OK, ERROR, places=PLACES)
def child_returns_into_the_loop(rng: random.Random, variant: str) -> None:
    os.fork()


@fault("forks", OK, ERROR)
def child_returns_into_the_loop_later(rng: random.Random, variant: str) -> None:
    if os.fork() == 0:
        time.sleep(rng.uniform(0.05, 0.6))


@fault("forks", OK, ERROR)
def child_leaves_by_sys_exit(rng: random.Random, variant: str) -> None:
    if os.fork() == 0:
        sys.exit(3)


@fault("forks", OK, places=PLACES)
def child_lingers(rng: random.Random, variant: str) -> None:
    fork(rng.choice([linger, deaf]))


@fault("forks", KILLED, variants=DEATHS, places=PLACES)
def child_lingers_while_worker_dies(rng: random.Random, how: str) -> None:
    fork(rng.choice([linger, deaf]))
    die(how)


@fault("forks", KILLED, variants=FEW_DEATHS)
def child_returns_while_worker_dies(rng: random.Random, how: str) -> None:
    if os.fork() != 0:
        die(how)
    time.sleep(rng.uniform(0, 0.4))


@fault("forks", OK, places=PLACES)
def detached_child_lingers(rng: random.Random, variant: str) -> None:
    detach(rng.choice([linger, deaf]))


@fault("forks", KILLED, variants=FEW_DEATHS)
def detached_child_lingers_while_worker_dies(rng: random.Random, how: str) -> None:
    detach(rng.choice([linger, deaf]))
    die(how)


def _program_of_no_environment(rng: random.Random) -> None:
    subprocess.Popen(
        ["/bin/sleep", str(LINGER_S)], env={}, start_new_session=rng.random() < 0.5, close_fds=False, cwd="/"
    )


@fault("forks", OK, places=PLACES)
def program_lingers(rng: random.Random, variant: str) -> None:
    _program_of_no_environment(rng)


@fault("forks", KILLED, variants=FEW_DEATHS)
def program_lingers_while_worker_dies(rng: random.Random, how: str) -> None:
    _program_of_no_environment(rng)
    die(how)


@fault("forks", OK)
def shell_leaves_a_program(rng: random.Random, variant: str) -> None:
    os.system(f"sleep {LINGER_S} & setsid sleep {LINGER_S} &")


@fault("forks", OK, variants={"fork": "", "fork daemon": "", "spawn": ""})
def multiprocessing_child_lingers(rng: random.Random, how: str) -> None:
    import multiprocessing

    context: Any = multiprocessing.get_context(how.split()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.Process(target=time.sleep, args=(LINGER_S,), daemon="daemon" in how).start()


@fault("forks", OK)
def many_children_linger(rng: random.Random, variant: str) -> None:
    for _ in range(rng.randrange(5, 15)):
        rng.choice([fork, detach])(linger)


@fault("forks", OK, ERROR, KILLED)
def child_kills_the_worker_later(rng: random.Random, variant: str) -> None:
    worker = os.getpid()

    def act() -> None:
        time.sleep(rng.uniform(0.05, 0.5))
        os.kill(worker, signal.SIGKILL)

    fork(act)


# ---------------------------------------------------------------------------------------------- channels


def descriptors(sockets_of_this_machine: bool = False) -> list[int]:
    """List open descriptors above 2; or those of them that are pipes or sockets of the local family."""
    found = []
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if sockets_of_this_machine and not stat.S_ISFIFO(mode) and not (stat.S_ISSOCK(mode) and _is_local(number)):
                continue
            if number > 2:
                found.append(number)
    return found


def _is_local(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as same:
        return same.family == socket.AF_UNIX


def pour(descriptor: int, data: bytes) -> None:
    """Write as much as the other end takes at once: a fault must not block its own cell."""
    while data:
        if not select.select([], [descriptor], [], 0.05)[1]:
            return
        data = data[os.write(descriptor, data[:4096]) :]


def _forged() -> bytes:
    """Return forged records of the first cells, in the form that a worker might send."""
    sample = {"round": 0, "warmup": False, "wall_s": FORGED_S, "phases_s": {"call": FORGED_S}, "submit_s": {}}
    record = {
        "key": "0" * 16, "config": {}, "status": "ok", "schema_version": SCHEMA_VERSION, "reason": None,
        "measurement": {"clock": "monotonic", "samples": [sample], "setup_s": 0.0},
        "results": {"saw": [{"cell": FORGED}]},
    }  # fmt: skip
    events = [{"event": "record", "cell": cell, "record": record, "of_peers": False} for cell in range(3)]
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


NOISES: dict[str, Callable[[random.Random], bytes]] = {
    "garbage": lambda rng: rng.randbytes(rng.randrange(1, 3000)),
    "garbage line": lambda rng: rng.randbytes(rng.randrange(1, 300)).replace(b"\n", b"") + b"\n",
    "empty lines": lambda rng: b"\n" * rng.randrange(1, 200),
    "words": lambda rng: b"Downloading weights: 100%\n" * rng.randrange(1, 20),
    "done": lambda rng: b'{"event": "done", "usable": true}\n' * rng.randrange(1, 4),
    "done alone": lambda rng: b'{"event": "done"}\n',
    "forged record": lambda rng: _forged(),
    "forged visit": lambda rng: b'{"event": "visit", "cell": %d}\n' % rng.choice([-1, 0, 1, 99, 10**30]),
    "empty record": lambda rng: b'{"event": "record", "cell": 0, "record": {}}\n',
    "array": lambda rng: b"[]\n",
    "null": lambda rng: b"null\n",
    "number": lambda rng: b"1e999\n",
    "object": lambda rng: b"{}\n",
    "half a line": lambda rng: b'{"event": "reco',
    "null bytes": lambda rng: b"\0" * rng.randrange(1, 5000),
    "huge line": lambda rng: b"x" * 2_000_000 + b"\n",
    "huge half line": lambda rng: b'{"event": "' + b"y" * 2_000_000,
    "huge length": lambda rng: rng.choice([b"\xff" * 4, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0" * 4]),
    "deep": lambda rng: b"[" * 60_000 + b"\n",
    "not UTF-8": lambda rng: b'{"event": "\xff\xfe"}\n',
    "request": lambda rng: b'{"op": "run", "cells": [], "repeat": 0, "out": null}\n',
}
NOISE = dict.fromkeys(NOISES, "")


def make_noise(rng: random.Random, noise: str, local: bool = False) -> None:
    data = NOISES[noise](rng)
    for descriptor in descriptors(local):
        with contextlib.suppress(OSError, ValueError):
            # It would wait for each read end in vain, and NVIDIA's driver opens some forty.
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                pour(descriptor, data)


@fault("channel", OK, ERROR, KILLED, variants=NOISE, places=PLACES)
def noise(rng: random.Random, what: str) -> None:
    make_noise(rng, what)


@fault("channel", OK, ERROR, KILLED, variants=NOISE)
def noise_of_a_child(rng: random.Random, what: str) -> None:
    os.waitpid(fork(lambda: make_noise(rng, what)), 0)


@fault("channel", OK, ERROR, KILLED, variants=NOISE)
def noise_of_a_child_later(rng: random.Random, what: str) -> None:
    def act() -> None:
        time.sleep(rng.uniform(0.02, 0.6))
        make_noise(rng, what)

    rng.choice([fork, detach])(act)


@fault("channel", OK, ERROR, KILLED, variants=NOISE)
def noise_of_a_thread_later(rng: random.Random, what: str) -> None:
    def act() -> None:
        time.sleep(rng.uniform(0.02, 0.4))
        make_noise(rng, what)

    threading.Thread(target=act, daemon=rng.random() < 0.5).start()


# The noise is read before the death is seen, or after it: either is the reason.
@fault("channel", KILLED, ERROR, variants={n: f"{DEATHS[n]}|worker's pipe" for n in ("SIGKILL", "exit 0", "abort")})
def noise_before_death(rng: random.Random, how: str) -> None:
    make_noise(rng, rng.choice(list(NOISES)))
    die(how)


@fault("channel", OK, ERROR, KILLED, places=PLACES)
def closes_all(rng: random.Random, variant: str) -> None:
    os.closerange(3, 4096)


@fault("channel", OK, ERROR, KILLED, places=PLACES)
def closes_one(rng: random.Random, variant: str) -> None:
    with contextlib.suppress(IndexError, OSError):
        os.close(rng.choice(descriptors()))


@fault("channel", ERROR, KILLED, TIMEOUT, needs_timeout=True)
def closes_all_and_hangs(rng: random.Random, variant: str) -> None:
    os.closerange(3, 4096)
    linger()


@fault("channel", OK, ERROR, KILLED)
def closes_all_and_opens_files(rng: random.Random, variant: str) -> None:
    os.closerange(3, 4096)
    for number in range(8):
        os.open(f"opened-{number}", os.O_RDWR | os.O_CREAT)


@fault("channel", OK, ERROR, KILLED, variants={"null": "", "another": "", "zero": ""}, places=PLACES)
def replaces_all(rng: random.Random, variant: str) -> None:
    found = descriptors()
    source = os.open("/dev/zero" if variant == "zero" else os.devnull, os.O_RDWR)
    for descriptor in found:
        with contextlib.suppress(OSError):
            os.dup2(rng.choice(found) if variant == "another" else source, descriptor)


@fault("channel", OK, ERROR, KILLED)
def makes_all_nonblocking(rng: random.Random, variant: str) -> None:
    for descriptor in descriptors():
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)


@fault("channel", OK, ERROR, KILLED, variants={"RD": "", "WR": "", "RDWR": ""})
def shuts_sockets(rng: random.Random, how: str) -> None:
    for descriptor in descriptors():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
            same.shutdown(getattr(socket, f"SHUT_{how}"))


@fault("channel", OK, ERROR, KILLED)
def child_takes_the_requests(rng: random.Random, variant: str) -> None:
    """Fork a child that reads from all descriptors, and so may take the next request."""

    def act() -> None:
        readable = descriptors()
        for descriptor in readable:
            os.set_blocking(descriptor, False)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for descriptor in readable:
                with contextlib.suppress(OSError):
                    os.read(descriptor, 4096)
            time.sleep(0.001)

    rng.choice([fork, detach])(act)


@fault("channel", OK, ERROR, KILLED)
def locks_all(rng: random.Random, variant: str) -> None:
    """Fork a child that keeps every descriptor open and locked."""

    def act() -> None:
        for descriptor in descriptors():
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        linger()

    fork(act)


# ---------------------------------------------------------------------------------------------- streams


class Unwritable:
    """Stream that refuses everything."""

    encoding, errors, closed = "utf-8", "strict", False

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "no stream")

    def flush(self) -> None:
        raise OSError(errno.EIO, "no stream")

    def fileno(self) -> int:
        raise OSError(errno.EIO, "no stream")

    def isatty(self) -> bool:
        raise OSError(errno.EIO, "no stream")


STREAMS = {"stdout": "", "stderr": "", "both": "", "stdin": "", "all": ""}
STREAM_NAMES = {"both": ("stdout", "stderr"), "all": ("stdin", "stdout", "stderr")}
NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}


def _streams(which: str) -> tuple[str, ...]:
    return STREAM_NAMES.get(which, (which,))


@fault("streams", OK, ERROR, variants=STREAMS, places=PLACES)
def closes_stream(rng: random.Random, which: str) -> None:
    for name in _streams(which):
        getattr(sys, name).close()


@fault("streams", OK, ERROR, KILLED, variants=STREAMS, places=PLACES)
def closes_descriptor(rng: random.Random, which: str) -> None:
    for name in _streams(which):
        os.close(NUMBERS[name])


@fault("streams", OK, variants=STREAMS, places=PLACES)
def sends_descriptor_to_null(rng: random.Random, which: str) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for name in _streams(which):
        os.dup2(null, NUMBERS[name])


@fault("streams", OK, variants=STREAMS, places=PLACES)
def sends_descriptor_to_a_file(rng: random.Random, which: str) -> None:
    file = os.open("somebody-s-file", os.O_RDWR | os.O_CREAT)
    for name in _streams(which):
        os.dup2(file, NUMBERS[name])


@fault("streams", OK, ERROR, KILLED, variants=STREAMS)
def sends_descriptor_to_a_broken_pipe(rng: random.Random, which: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for name in _streams(which):
        os.dup2(writing, NUMBERS[name])


@fault("streams", OK, ERROR, KILLED, variants=dict.fromkeys(("stdout", "stderr", "both"), ""))
def sends_descriptor_to_a_full_disk(rng: random.Random, which: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    for name in _streams(which):
        os.dup2(full, NUMBERS[name])


@fault("streams", OK, ERROR, variants=STREAMS, places=PLACES)
def replaces_stream(rng: random.Random, which: str) -> None:
    for name in _streams(which):
        setattr(sys, name, rng.choice([Unwritable(), None, object(), 3]))


@fault("streams", OK, ERROR, variants=dict.fromkeys(("stdout", "stderr", "both"), ""))
def replaces_stream_and_its_original(rng: random.Random, which: str) -> None:
    for name in _streams(which):
        setattr(sys, name, Unwritable())
        setattr(sys, f"__{name}__", None)


@fault("streams", OK, ERROR, variants=dict.fromkeys(("stdout", "stderr", "both"), ""))
def detaches_stream(rng: random.Random, which: str) -> None:
    for name in _streams(which):
        getattr(sys, name).detach()


@fault("streams", OK)
def redirects_stream_for_good(rng: random.Random, variant: str) -> None:
    """Redirect a stream and never restore it."""
    import io

    contextlib.redirect_stdout(io.StringIO()).__enter__()
    contextlib.redirect_stderr(io.StringIO()).__enter__()


@fault("streams", OK)
def prints_much(rng: random.Random, variant: str) -> None:
    for number in rng.sample((1, 2), 2):
        for text in (b'{"event": "done", "usable": true}\n' * 3000, b"\xff\xfe\0" * 3000, b"no end of line " * 3000):
            pour(number, text)
    print("\N{PILE OF POO}" * 1000, flush=True)


@fault("streams", KILLED, variants={name: DEATHS[name] for name in ("SIGKILL", "null pointer", "exit 7")})
def closes_streams_and_dies(rng: random.Random, how: str) -> None:
    for number in (1, 2):
        os.close(number)
    die(how)


@fault("streams", KILLED, variants={name: DEATHS[name] for name in ("SIGKILL", "exit 7", "abort")})
def says_much_and_dies(rng: random.Random, how: str) -> None:
    """Print much and die: the reason must be one line, not pieces of a traceback or a whole file."""
    try:
        raise ValueError("what was wrong\nin two lines\x1b[31m")
    except ValueError:
        import traceback

        traceback.print_exc()
    os.write(2, rng.choice([b"\n\n", b"\0" * 3000, b"\xff" * 3000, b"z" * 100_000]))
    die(how)


@fault("streams", ERROR, variants={"": "ZeroDivisionError"})
def replaces_streams_and_raises(rng: random.Random, variant: str) -> None:
    sys.stdout = sys.stderr = Unwritable()  # type: ignore[assignment]
    raise ZeroDivisionError("the numerator was fine")


# ---------------------------------------------------------------------------------------------- state


def _torch() -> Any:
    import torch

    return torch


def _lost_directory(rng: random.Random) -> None:
    folder = Path(f"lost-{rng.random()}").absolute()
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    had = resource.getrlimit(which)
    resource.setrlimit(which, (soft, had[1] if hard is None else hard))


def _set_environment(**variables: str | None) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


STATES: dict[str, Callable[[random.Random], Any]] = {
    "default dtype": lambda rng: _torch().set_default_dtype(getattr(_torch(), rng.choice(["float64", "bfloat16"]))),
    "threads": lambda rng: _torch().set_num_threads(rng.choice([1, 3])),
    "grad": lambda rng: _torch().set_grad_enabled(False),
    "deterministic": lambda rng: _torch().use_deterministic_algorithms(True, warn_only=rng.random() < 0.5),
    "anomaly": lambda rng: _torch().autograd.set_detect_anomaly(True),
    "autocast": lambda rng: _torch().autocast("cpu", dtype=_torch().bfloat16).__enter__(),
    "no_grad": lambda rng: _torch().no_grad().__enter__(),
    "inference mode": lambda rng: _torch().inference_mode().__enter__(),
    "mkldnn": lambda rng: _torch().backends.mkldnn.set_flags(False),
    "torch seed": lambda rng: _torch().manual_seed(KNOWN_SEED),
    "random seed": lambda rng: random.seed(KNOWN_SEED),
    "environment": lambda rng: _set_environment(CS_FAULT="1", OMP_NUM_THREADS="1", LANG="xx_XX"),
    "PATH": lambda rng: _set_environment(PATH=None, PYTHONPATH=None, HOME=None, TMPDIR=None),
    "no environment": lambda rng: os.environ.clear(),
    "directory": lambda rng: os.chdir("/"),
    "lost directory": _lost_directory,
    "handler of SIGTERM": lambda rng: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "handler of SIGINT": lambda rng: signal.signal(signal.SIGINT, signal.default_int_handler),
    "handler of SIGCHLD": lambda rng: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "handler of SIGPIPE": lambda rng: signal.signal(signal.SIGPIPE, signal.SIG_DFL),
    "handlers": lambda rng: [signal.signal(n, lambda *_: None) for n in (signal.SIGTERM, signal.SIGUSR1)],
    "blocked signals": lambda rng: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT}),
    "sys.path": lambda rng: sys.path.insert(0, "/nowhere"),
    "deep recursion": lambda rng: sys.setrecursionlimit(100_000),
    "gc": lambda rng: gc.disable(),
    "gc threshold": lambda rng: gc.set_threshold(1),
    "locale": lambda rng: locale.setlocale(locale.LC_ALL, "C"),
    "umask": lambda rng: os.umask(0o777),
    "decimal": lambda rng: setattr(decimal.getcontext(), "prec", 3),
    "excepthook": lambda rng: setattr(sys, "excepthook", lambda *_: os._exit(9)),
    "switch interval": lambda rng: sys.setswitchinterval(0.5),
    "nice": lambda rng: os.nice(5),
    "affinity": lambda rng: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "trace": lambda rng: sys.setprofile(lambda *_: None),
}
# Changes after which the harness itself may fail to record the cell that made them.
HARSH_STATES: dict[str, Callable[[random.Random], Any]] = {
    "default device": lambda rng: _torch().set_default_device("meta"),
    "matmul precision": lambda rng: _torch().set_float32_matmul_precision("medium"),
    "shallow recursion": lambda rng: sys.setrecursionlimit(len(_stack()) + 30),
    "warnings as errors": lambda rng: warnings.simplefilter("error"),
    "no files": lambda rng: _limit(resource.RLIMIT_NOFILE, 3, 3 if rng.random() < 0.5 else None),
    "no file sizes": lambda rng: _limit(resource.RLIMIT_FSIZE, 0),
    "no memory": lambda rng: _limit(resource.RLIMIT_AS, 1 << 28),
    "no processes": lambda rng: _limit(resource.RLIMIT_NPROC, 0),
    "alarm": lambda rng: signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.2, 0.6)),
    "no sys.path": lambda rng: sys.path.clear(),
    "stack limit": lambda rng: _limit(resource.RLIMIT_STACK, 1 << 20),
    "int digits": lambda rng: sys.set_int_max_str_digits(640),
}


def _stack() -> list[Any]:
    frame, frames = sys._getframe(), []
    while frame:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames


@fault("state", OK, variants=dict.fromkeys(STATES, ""), places=PLACES)
def changes(rng: random.Random, what: str) -> None:
    STATES[what](rng)


@fault("state", OK, ERROR, KILLED, OOM, variants=dict.fromkeys(HARSH_STATES, ""), places=PLACES)
def changes_harshly(rng: random.Random, what: str) -> None:
    HARSH_STATES[what](rng)


@fault("state", ERROR, variants=dict.fromkeys(STATES, "ZeroDivisionError"))
def changes_and_raises(rng: random.Random, what: str) -> None:
    STATES[what](rng)
    raise ZeroDivisionError("the numerator was fine")


# ---------------------------------------------------------------------------------------------- threads


@fault("threads", OK, variants={"daemon": "", "waited for": ""}, places=PLACES)
def thread_lingers(rng: random.Random, how: str) -> None:
    threading.Thread(target=time.sleep, args=(LINGER_S,), daemon=how == "daemon").start()


@fault("threads", OK)
def thread_spins(rng: random.Random, variant: str) -> None:
    def spin() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            math.sqrt(2)

    threading.Thread(target=spin, daemon=rng.random() < 0.5).start()


@fault("threads", OK)
def thread_raises(rng: random.Random, variant: str) -> None:
    def act() -> None:
        time.sleep(rng.uniform(0, 0.2))
        raise rng.choice([RuntimeError("raised by a thread"), SystemExit(3), MemoryError()])

    threading.Thread(target=act).start()


@fault("threads", OK, KILLED)
def thread_exits_later(rng: random.Random, variant: str) -> None:
    def act() -> None:
        time.sleep(rng.uniform(0.02, 0.4))
        die(rng.choice(["exit 0", "exit 7", "SIGKILL", "null pointer"]))

    threading.Thread(target=act, daemon=rng.random() < 0.5).start()


@fault("threads", OK)
def executor_lingers(rng: random.Random, variant: str) -> None:
    ThreadPoolExecutor(1).submit(time.sleep, LINGER_S)


@fault("threads", OK, variants={"hangs": "", "exits": "", "raises": "", "dies": ""})
def end_of_the_process(rng: random.Random, what: str) -> None:
    acts: dict[str, Callable[[], Any]] = {
        "hangs": lambda: time.sleep(LINGER_S),
        "exits": lambda: os._exit(5),
        "raises": lambda: 1 // 0,
        "dies": lambda: die("SIGSEGV"),
    }
    atexit.register(acts[what])


@fault("threads", KILLED, variants={name: DEATHS[name] for name in ("SIGKILL", "null pointer", "exit 7")})
def thread_lingers_while_worker_dies(rng: random.Random, how: str) -> None:
    threading.Thread(target=time.sleep, args=(LINGER_S,)).start()
    die(how)


# ---------------------------------------------------------------------------------------------- results


def _recursion() -> dict[str, Any]:
    row: dict[str, Any] = {}
    row["itself"] = row
    return row


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


class Unprintable:
    """Object that raises whatever it is asked."""

    def __repr__(self) -> str:
        raise RuntimeError("it has no repr")

    __str__ = __repr__

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("it has no attributes")


class LyingText(str):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class LyingInt(int):
    def __repr__(self) -> str:
        return "not a number"


class LyingDict(dict):
    def items(self) -> Any:
        raise RuntimeError("no items")

    def keys(self) -> Any:
        raise RuntimeError("no keys")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no keys")


# Values that no JSON holds.
NOT_JSON: dict[str, Callable[[], Any]] = {
    "set": lambda: {1, 2},
    "bytes": lambda: b"\xff",
    "tensor": lambda: _torch().ones(2),
    "dtype": lambda: _torch().float32,
    "object": object,
    "unprintable": Unprintable,
    "complex": lambda: 1j,
    "date": lambda: datetime.datetime(2024, 2, 29),
    "recursion": _recursion,
    "huge integer": lambda: 10**5000,
    "generator": lambda: (number for number in range(3)),
    "function": lambda: len,
    "key of a tuple": lambda: {(1, 2): 3},
    "depth": _deep,
    "decimal": lambda: decimal.Decimal("1.5"),
    "exception": lambda: ValueError("a value"),
}
# Values that JSON holds, or comes near to; a harness may take or refuse them.
ODD: dict[str, Callable[[], Any]] = {
    "not a number": lambda: math.nan,
    "infinity": lambda: -math.inf,
    "large integer": lambda: 10**4000,
    "number keys": lambda: {1: 2, None: 3, 1.5: 5},
    "huge text": lambda: "x" * 5_000_000,
    "lone surrogate": lambda: "\ud800",
    "control characters": lambda: "\0\n\r\x1b[2J\u2028\x85",
    "markup": lambda: "[red]x[/red] <script>alert(1)</script> | $x$ \\input{/etc/passwd} =cmd|' /C calc'!A0",
    "lying text": lambda: LyingText("lies"),
    "lying integer": lambda: LyingInt(3),
    "lying dict": lambda: LyingDict(a=1),
    "nested": lambda: {"a": [{"b": [[[1]]]}]},
    "huge float": lambda: 1.7e308,
    "empty text": lambda: "",
    "true": lambda: True,
}
# What is no row, and no tables, at all.
NO_ROW: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "number": lambda: 3,
    "text": lambda: "text",
    "unprintable": Unprintable,
    "generator": lambda: (number for number in range(3)),
    "tensor": lambda: _torch().ones(2),
    "class": lambda: dict,
}
FIELDS = ("x", "loss", "tokens", "rounds", "workload_path", "precision", "attention", "batch_size", "step", "")
NAMES = ("mine", "memory", "cost", "ran", "ranks", "kernels", "phases", "steps", "ceiling", "")


@fault("results", ERROR, variants=dict.fromkeys(NOT_JSON, ""), places=(DESCRIBE,))
def describes_with_no_json(rng: random.Random, what: str) -> Any:
    return {"tokens": None, rng.choice(FIELDS[:1]): NOT_JSON[what]()}


@fault("results", OK, ERROR, variants=dict.fromkeys(ODD, ""), places=(DESCRIBE,))
def describes_oddly(rng: random.Random, what: str) -> Any:
    return {"tokens": None, rng.choice(FIELDS): ODD[what]()}


@fault("results", ERROR, variants={**dict.fromkeys(NO_ROW, ""), "nothing": ""}, places=(DESCRIBE,))
def describes_with_no_row(rng: random.Random, what: str) -> Any:
    return None if what == "nothing" else NO_ROW[what]()


@fault("results", ERROR, variants=dict.fromkeys(NOT_JSON, ""), places=(TABLES,))
def tables_with_no_json(rng: random.Random, what: str) -> Any:
    return {rng.choice(NAMES[:1]): [{"a": 1, "b": NOT_JSON[what]()}]}


@fault("results", OK, ERROR, variants=dict.fromkeys(ODD, ""), places=(TABLES,))
def tables_oddly(rng: random.Random, what: str) -> Any:
    return {rng.choice(NAMES): [{rng.choice(FIELDS): ODD[what]()}]}


@fault("results", ERROR, variants=dict.fromkeys(NO_ROW, ""), places=(TABLES,))
def tables_with_no_table(rng: random.Random, what: str) -> Any:
    return NO_ROW[what]()


WRONG_TABLES: dict[str, Callable[[], Any]] = {
    "number": lambda: {"mine": 3},
    "text": lambda: {"mine": "text"},
    "list of numbers": lambda: {"mine": [1, 2]},
    "list of lists": lambda: {"mine": [[1], [2]]},
    "row alone": lambda: {"mine": {"a": 1}},
    "nothing": lambda: {"mine": None},
    "rows of nothing": lambda: {"mine": [None]},
    "name of a tuple": lambda: {("a", "b"): [{"a": 1}]},
}
ODD_TABLES: dict[str, Callable[[], Any]] = {
    "other columns": lambda: {"mine": [{"a": 1}, {"b": 2}, {}]},
    "no rows": lambda: {"mine": []},
    "other types": lambda: {"mine": [{"a": 1}, {"a": "x"}, {"a": None}, {"a": [1]}]},
    "name of a number": lambda: {3: [{"a": 1}]},
    "generator of rows": lambda: {"mine": ({"a": n} for n in range(3))},
    "tuple of rows": lambda: {"mine": ({"a": 1},)},
    "memory": lambda: {"memory": [{"peak_allocated_bytes": "many"}]},
    "ran": lambda: {"ran": [{"tokens": "many", "rounds": []}]},
    "cost": lambda: {"cost": [{"phase": "step", "flops": "many"}]},
    "ran with no rows": lambda: {"ran": []},
    "kernels": lambda: {"kernels": [{"name": 3}]},
    "many": lambda: {f"table{n}": [{"a": 1}] for n in range(2000)},
    "long": lambda: {"mine": [{"a": n} for n in range(50_000)]},
}


@fault("results", ERROR, variants=dict.fromkeys(WRONG_TABLES, ""), places=(TABLES,))
def tables_of_wrong_shape(rng: random.Random, what: str) -> Any:
    return WRONG_TABLES[what]()


@fault("results", OK, ERROR, variants=dict.fromkeys(ODD_TABLES, ""), places=(TABLES,))
def tables_of_odd_shape(rng: random.Random, what: str) -> Any:
    return ODD_TABLES[what]()


COSTS: dict[str, Callable[[], Any]] = {
    "number": lambda: 3,
    "list": lambda: [1],
    "dict of numbers": lambda: {"call": 3},
    "text": lambda: "text",
    "dict of dicts": lambda: {"call": {"flops": 1}},
}


@fault("results", ERROR, variants=dict.fromkeys(COSTS, ""), places=(COST,))
def costs_of_wrong_shape(rng: random.Random, what: str) -> Any:
    return COSTS[what]()


def _nothing() -> None:
    return


WRONG_STEPS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "number": lambda: 3,
    "name alone": lambda: ["call"],
    "one": lambda: [("call",)],
    "three": lambda: [("call", _nothing, 3)],
    "not callable": lambda: [("call", 3)],
    "no pair": lambda: [None],
    "name of a list": lambda: [(["call"], _nothing)],
}
ODD_STEPS: dict[str, Callable[[], Any]] = {
    "no phase": list,
    "name of nothing": lambda: [(None, _nothing)],
    "name of a number": lambda: [(3, _nothing)],
    "name of a tuple": lambda: [(("a", "b"), _nothing)],
    "step": lambda: [("step", _nothing)],
    "empty name": lambda: [("", _nothing)],
    "odd name": lambda: [("\0\n\ud800 [red]", _nothing)],
    "another phase": lambda: [(f"phase{time.monotonic_ns()}", _nothing)],
    "long name": lambda: [("x" * 100_000, _nothing)],
    "needs an argument": lambda: [("call", lambda needed: None)],
    "many phases": lambda: [(f"phase{n}", _nothing) for n in range(3000)],
}


@fault("results", ERROR, variants=dict.fromkeys(WRONG_STEPS, ""), places=("phases",))
def steps_of_wrong_shape(rng: random.Random, what: str) -> Any:
    return WRONG_STEPS[what]()


@fault("results", OK, ERROR, variants=dict.fromkeys(ODD_STEPS, ""), places=("phases",))
def steps_of_odd_shape(rng: random.Random, what: str) -> Any:
    return ODD_STEPS[what]()


@fault("results", TIMEOUT, places=("phases",), needs_timeout=True)
def steps_without_end(rng: random.Random, variant: str) -> Any:
    return iter(lambda: ("call", lambda: time.sleep(0.01)), None)


BUILT: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "number": lambda: 3,
    "pair": lambda: (1, 2),
    "module": lambda: _torch().nn.Linear(1, 1),
    "unprintable": Unprintable,
}


@fault("results", ERROR, variants=dict.fromkeys(BUILT, ""), places=("built",))
def builds_no_workload(rng: random.Random, what: str) -> Any:
    return BUILT[what]()


@fault(
    "results", ERROR, OK, variants={"text": "", "negative": "", "huge": "", "unprintable": ""}, places=("predicted",)
)
def predicts_oddly(rng: random.Random, what: str) -> Any:
    return {"text": "many", "negative": -5, "huge": 10**400, "unprintable": Unprintable()}[what]


# ---------------------------------------------------------------------------------------------- exceptions


class Rude(BaseException):
    """Exception that only a bare `except` catches."""


class Silent(Exception):
    """Exception whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)
        self.lock = threading.Lock()


def _recurse() -> None:
    _recurse()


def _raise(error: BaseException) -> None:
    raise error


def _chained() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ZeroDivisionError("second") from error


EXCEPTIONS: dict[str, tuple[str, Callable[[], Any]]] = {
    "ZeroDivisionError": ("ZeroDivisionError: the numerator", lambda: _raise(ZeroDivisionError("the numerator"))),
    "KeyError": ("KeyError", lambda: _raise(KeyError("x"))),
    "RecursionError": ("RecursionError", _recurse),
    "StopIteration": ("StopIteration", lambda: _raise(StopIteration("over"))),
    "StopAsyncIteration": ("StopAsyncIteration", lambda: _raise(StopAsyncIteration())),
    "AssertionError": ("AssertionError", lambda: _raise(AssertionError())),
    "silent": ("Silent", lambda: _raise(Silent())),
    "unpicklable": ("Unpicklable", lambda: _raise(Unpicklable(1, 2))),
    "group": ("ExceptionGroup", lambda: _raise(ExceptionGroup("several", [ValueError(1), KeyError(2)]))),
    "chained": ("ZeroDivisionError: second", _chained),
    "long": ("ValueError: x", lambda: _raise(ValueError("x" * 1_000_000))),
    "lines": ("ValueError", lambda: _raise(ValueError("\n\n\nfirst\nsecond\r\n\0\x1b[31m\ud800"))),
    "BrokenPipeError": ("BrokenPipeError", lambda: _raise(BrokenPipeError(errno.EPIPE, "Broken pipe"))),
    "EOFError": ("EOFError", lambda: _raise(EOFError())),
    "ConnectionResetError": ("reset by peer", lambda: _raise(ConnectionResetError(104, "Connection reset by peer"))),
    "TimeoutError": ("TimeoutError", lambda: _raise(TimeoutError("no answer within 5 s"))),
    "BlockingIOError": ("BlockingIOError", lambda: _raise(BlockingIOError())),
    "UnicodeDecodeError": ("UnicodeDecodeError", lambda: b"\xff".decode()),
    "JSONDecodeError": ("JSONDecodeError", lambda: json.loads("{")),
    "ChildProcessError": ("ChildProcessError", lambda: _raise(ChildProcessError())),
    "full disk": ("No space left", lambda: _raise(OSError(errno.ENOSPC, "No space left on device", "/mine"))),
    "disk in use": ("OSError", lambda: _raise(OSError(errno.EFBIG, "File too large"))),
    "warning": ("DeprecationWarning", lambda: _raise(DeprecationWarning("old"))),
    "SyntaxError": ("SyntaxError", lambda: compile("def (:", "x", "exec")),
    "ImportError": ("No module named 'nowhere'", lambda: __import__("nowhere")),
}
# Exceptions that a program may also take for a wish to end the process.
RUDE: dict[str, tuple[str, Callable[[], Any]]] = {
    "SystemExit 0": ("SystemExit|exited with status 0", lambda: _raise(SystemExit(0))),
    "SystemExit 7": ("SystemExit|exited with status 7", lambda: sys.exit(7)),
    "SystemExit text": ("SystemExit|exited with status 1", lambda: sys.exit("a text")),
    "KeyboardInterrupt": ("KeyboardInterrupt|exited|SIGINT", lambda: _raise(KeyboardInterrupt())),
    "GeneratorExit": ("GeneratorExit|exited", lambda: _raise(GeneratorExit())),
    "rude": ("Rude|exited", lambda: _raise(Rude("rude"))),
    "group": ("BaseExceptionGroup|exited", lambda: _raise(BaseExceptionGroup("all", [KeyboardInterrupt()]))),
}


@fault("raising", ERROR, variants={name: reason for name, (reason, _) in EXCEPTIONS.items()}, places=PLACES)
def raises(rng: random.Random, what: str) -> None:
    EXCEPTIONS[what][1]()


@fault("raising", ERROR, KILLED, variants={name: reason for name, (reason, _) in RUDE.items()}, places=PLACES)
def raises_rudely(rng: random.Random, what: str) -> None:
    RUDE[what][1]()


# ---------------------------------------------------------------------------------------------- memory


def _map(size: int) -> None:
    import mmap

    mmap.mmap(-1, size)


MEMORY: dict[str, tuple[str, Callable[[], Any]]] = {
    "MemoryError": ("", lambda: _raise(MemoryError())),
    "MemoryError with a text": ("no room", lambda: _raise(MemoryError("no room"))),
    "bytearray": ("", lambda: bytearray(1 << 55)),
    "list": ("", lambda: [0] * (1 << 58)),
    "torch.empty": ("can't allocate memory", lambda: _torch().empty(1 << 56, dtype=_torch().int8)),
    "torch.zeros": ("can't allocate memory", lambda: _torch().zeros(1 << 45)),
    "torch product": ("can't allocate memory", lambda: _torch().ones(1 << 23, 1) @ _torch().ones(1, 1 << 23)),
    "numpy": ("", lambda: __import__("numpy").ones(1 << 55)),
}


@fault("memory", OOM, variants={name: reason for name, (reason, _) in MEMORY.items()})
def runs_out_of_memory(rng: random.Random, what: str) -> None:
    MEMORY[what][1]()


@fault("memory", OOM, variants={"torch": "can't allocate memory", "Python": ""})
def reaches_a_limit(rng: random.Random, what: str) -> None:
    """Reach a resource limit of the process, which stays in force."""
    used = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    _limit(resource.RLIMIT_AS, used + (64 << 20))
    if what == "torch":
        _torch().ones(1 << 28)
    else:
        bytearray(1 << 30)


@fault("memory", OOM, ERROR)
def maps_too_much(rng: random.Random, variant: str) -> None:
    _map(1 << 55)


# ---------------------------------------------------------------------------------------------- hangs


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _spin() -> None:
    while True:
        math.sqrt(2)


def _sleep_behind_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(LINGER_S)


def _sleep_in_c() -> None:
    """Sleep in a C function that keeps Python's global lock."""
    ctypes.PyDLL(None).sleep(int(LINGER_S))


def _swallow() -> None:
    end = time.monotonic() + LINGER_S
    while time.monotonic() < end:
        with contextlib.suppress(BaseException):
            time.sleep(1)


HANGS: dict[str, Callable[[], Any]] = {
    "sleep": lambda: time.sleep(LINGER_S),
    "spin": _spin,
    "regular expression": lambda: re.match(r"(a|aa|a+)+$", "a" * 80 + "b"),
    "deadlock": _deadlock,
    "blocked signals": _sleep_behind_signals,
    "library": _sleep_in_c,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "swallows exceptions": _swallow,
    "waits for a child": lambda: os.waitpid(fork(linger), 0),
    "reads an empty pipe": lambda: os.read(os.pipe()[0], 1),
}


@fault("hangs", TIMEOUT, variants=dict.fromkeys(HANGS, "8 s"), places=PLACES,
       needs_timeout=True)  # fmt: skip
def hangs(rng: random.Random, what: str) -> None:
    HANGS[what]()


# ---------------------------------------------------------------------------------------------- ranks

BLAMED = "rank {rank}"
RANK_DEATHS = {name: f"{BLAMED}.*{reason}" for name, reason in DEATHS.items()}
RANK_PLACES = (BUILD, STEP, PREPARE)
NCCL = "[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:29500"
RANK_ERRORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "ZeroDivisionError": ("ZeroDivisionError", lambda: _raise(ZeroDivisionError("the numerator was fine"))),
    "reset": ("Connection reset by peer", lambda: _raise(ConnectionResetError(104, "Connection reset by peer"))),
    "gloo": ("Connection closed by peer", lambda: _raise(RuntimeError(GLOO))),
    "text of a reset": ("Connection reset by peer", lambda: _raise(RuntimeError("Connection reset by peer"))),
    "Application timeout": ("pair closure", lambda: _raise(RuntimeError("Application timeout caused pair closure"))),
    "RecursionError": ("RecursionError", _recurse),
}


@fault("ranks", KILLED, variants=RANK_DEATHS, places=RANK_PLACES)
def rank_dies(rng: random.Random, how: str) -> None:
    die(how)


@fault("ranks", KILLED, variants={name: RANK_DEATHS[name] for name in FEW_DEATHS}, places=RANK_PLACES)
def rank_dies_and_leaves_a_child(rng: random.Random, how: str) -> None:
    rng.choice([fork, detach])(linger)
    die(how)


@fault("ranks", ERROR, variants={name: f"{BLAMED}.*{reason}" for name, (reason, _) in RANK_ERRORS.items()},
       places=RANK_PLACES)  # fmt: skip
def rank_raises(rng: random.Random, what: str) -> None:
    RANK_ERRORS[what][1]()


@fault("ranks", OOM, variants={"torch.empty": BLAMED, "MemoryError": BLAMED}, places=RANK_PLACES)
def rank_runs_out_of_memory(rng: random.Random, what: str) -> None:
    MEMORY[what][1]()


@fault("ranks", TIMEOUT, variants=dict.fromkeys(("sleep", "SIGSTOP", "library"), BLAMED), places=(STEP,),
       needs_timeout=True)  # fmt: skip
def rank_hangs(rng: random.Random, what: str) -> None:
    HANGS[what]()


@fault("ranks", OK, ERROR, places=(STEP,))
def rank_child_returns(rng: random.Random, variant: str) -> None:
    if os.fork() == 0:
        raise RuntimeError("raised by a forked child")


@fault("ranks", OK, places=RANK_PLACES)
def rank_leaves_a_child(rng: random.Random, variant: str) -> None:
    rng.choice([fork, detach])(linger)


@fault("ranks", OK, ERROR, KILLED, variants=NOISE, places=(STEP,))
def rank_makes_noise(rng: random.Random, what: str) -> None:
    make_noise(rng, what, local=True)


@fault("ranks", ERROR, KILLED, OK, places=(STEP,))
def rank_closes_its_channel(rng: random.Random, variant: str) -> None:
    for descriptor in descriptors(sockets_of_this_machine=True):
        os.close(descriptor)


@fault("ranks", OK, variants={"stderr": "", "stdout": ""}, places=(STEP,))
def rank_prints_like_nccl(rng: random.Random, where: str) -> None:
    print(NCCL, file=getattr(sys, where), flush=True)
    time.sleep(1.6)


@fault("ranks", KILLED, variants={"": f"{BLAMED}.*SIGABRT"}, places=(STEP,))
def rank_prints_like_nccl_and_aborts(rng: random.Random, variant: str) -> None:
    print(NCCL, file=sys.stderr, flush=True)
    os.abort()


@fault("ranks", OK, places=(STEP,))
def rank_is_late(rng: random.Random, variant: str) -> None:
    time.sleep(rng.uniform(0.5, 2.5))


@fault("ranks", OK, variants=dict.fromkeys(("default dtype", "threads", "grad", "directory", "torch seed"), ""),
       places=RANK_PLACES)  # fmt: skip
def rank_changes(rng: random.Random, what: str) -> None:
    STATES[what](rng)


@fault("ranks", OK, variants={"daemon": "", "waited for": ""}, places=(STEP,))
def rank_thread_lingers(rng: random.Random, how: str) -> None:
    thread_lingers(rng, how)


@fault("ranks", ERROR, KILLED, variants={"SystemExit 7": BLAMED, "KeyboardInterrupt": BLAMED, "rude": BLAMED},
       places=(STEP,))  # fmt: skip
def rank_raises_rudely(rng: random.Random, what: str) -> None:
    RUDE[what][1]()


# ---------------------------------------------------------------------------------------------- the parent


@fault("parent", OK, variants=dict.fromkeys(("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"), ""), places=(STEP,))
def kills_the_parent(rng: random.Random, how: str) -> None:
    """Kill the process that the user started, whose pid is in a file."""
    os.kill(int((_FOLDER / "parent.pid").read_text()), getattr(signal, how))
    time.sleep(2.0)


# ---------------------------------------------------------------------------------------------- the workload

_NOT_COMPARED = re.compile(
    "PET_|TORCHELASTIC_|TORCHINDUCTOR_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|GROUP_|ROLE_|TORCH_|NCCL_"
)
_SIGNALS = ("INT", "TERM", "HUP", "CHLD", "ALRM", "USR2", "PIPE", "SEGV", "QUIT")
_LIMITS = ("AS", "CORE", "FSIZE", "NOFILE", "NPROC", "STACK", "CPU", "DATA")


def _plan() -> dict[str, Any]:
    return json.loads(Path(os.environ["FAULT_PLAN"]).read_text()) if "FAULT_PLAN" in os.environ else {"cells": []}


_FOLDER = Path(os.environ.get("FAULT_PLAN", "plan.json")).absolute().parent
_PLAN = _plan()  # read as the file is loaded: later a cell may have taken the directory and the environment


def _name(handler: Any) -> str:
    return handler.name if isinstance(handler, signal.Handlers) else getattr(handler, "__qualname__", repr(handler))


def _stream(name: str) -> str:
    stream = getattr(sys, name)
    if name != "stdin":
        print("an innocent cell says this", file=stream, flush=True)
    target = Path(f"/proc/self/fd/{NUMBERS[name]}").readlink()
    return f"{type(stream).__name__} {stream.fileno()} {stream is getattr(sys, f'__{name}__')} {target}"


def _children() -> int:
    """Return the living children of this process."""
    alive = 0
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            with contextlib.suppress(OSError):
                alive += Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return alive


def _drawn_after_seeding() -> list[float]:
    torch = _torch()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    drawn = [float(torch.rand(())), float(torch.randn(()))]
    torch.set_rng_state(state)
    return drawn


def _is_seeded() -> bool:
    """Return True where Python's own numbers are those that a fault has asked for."""
    known = random.Random(KNOWN_SEED)
    return random.random() in {known.random() for _ in range(300)}


SEEN: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: str(_torch().get_default_dtype()),
    "dtype of ones": lambda: str(_torch().ones(1).dtype),
    "default device": lambda: str(_torch().get_default_device()),
    "device of ones": lambda: str(_torch().ones(1).device),
    "threads": lambda: _torch().get_num_threads(),
    "interop threads": lambda: _torch().get_num_interop_threads(),
    "grad": lambda: _torch().is_grad_enabled(),
    "inference mode": lambda: _torch().is_inference_mode_enabled(),
    "autocast": lambda: _torch().is_autocast_enabled("cpu"),
    "deterministic": lambda: _torch().are_deterministic_algorithms_enabled(),
    "deterministic warns": lambda: _torch().is_deterministic_algorithms_warn_only_enabled(),
    "anomaly": lambda: _torch().is_anomaly_enabled(),
    "mkldnn": lambda: _torch().backends.mkldnn.enabled,
    "torch is seeded": lambda: _torch().initial_seed() == KNOWN_SEED,
    "drawn after seeding": _drawn_after_seeding,
    "Python is seeded": _is_seeded,
    "directory": os.getcwd,
    "environment": lambda: {
        name: value[:200] for name, value in sorted(os.environ.items())[:100] if not _NOT_COMPARED.match(name)
    },
    "handlers": lambda: {name: _name(signal.getsignal(getattr(signal, f"SIG{name}"))) for name in _SIGNALS},
    "blocked signals": lambda: sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "alarm": lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    "stdin": lambda: _stream("stdin"),
    "stdout": lambda: _stream("stdout"),
    "stderr": lambda: _stream("stderr"),
    "sys.path": lambda: sys.path,
    "recursion limit": sys.getrecursionlimit,
    "gc": gc.get_threshold,
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "limits": lambda: {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in _LIMITS},
    "umask": lambda: re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text()),
    "nice": lambda: os.nice(0),
    "affinity": lambda: sorted(os.sched_getaffinity(0)),
    "decimal": lambda: decimal.getcontext().prec,
    "excepthook": lambda: _name(sys.excepthook),
    "profile": lambda: _name(sys.getprofile()),
    "switch interval": sys.getswitchinterval,
    "digits of an integer": sys.get_int_max_str_digits,
    "errors of warnings": lambda: sum(f[0] == "error" for f in warnings.filters),
    "Python's threads": lambda: len(threading.enumerate()),
    "child processes": _children,
}
_OF_STEPS = {"gc enabled": gc.isenabled}  # while a step is timed the harness may have its own way


def saw(place: str) -> dict[str, Any]:
    """Return the state of this process that a fault may change."""
    seen: dict[str, Any] = {}
    looks = SEEN if place == STEP else SEEN | _OF_STEPS
    for name, look in looks.items():
        try:
            seen[name] = look()
        except Exception as error:
            seen[name] = f"raised {type(error).__name__}: {error}"
    return seen


class Cell:
    """Workload that commits the planned fault, or only reports the state of its process."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.plan, self.calls, self.seen = plan, 0, {}
        if "nap_s" in plan:
            (_FOLDER / "worker.pid").write_text(str(os.getpid()))
        if plan.get("fault") is None:
            self.seen[BUILD] = saw(BUILD)

    def hit(self, place: str, otherwise: Any = None) -> Any:
        """Commit the fault if this is the planned place; return its result if it is a fault of results."""
        plan = self.plan
        if plan.get("fault") is None or plan["place"] != place or not _is_rank(plan):
            return otherwise
        if (once := plan.get("once")) is not None:
            if (_FOLDER / once).exists():
                return otherwise
            (_FOLDER / once).touch()
        fault = CATALOGUE[plan["fault"]]
        given = fault.act(random.Random(plan["seed"]), plan["variant"])
        return given if fault.family == "results" else otherwise

    def prepare(self) -> None:
        self.hit(PREPARE)

    def step(self) -> Any:
        return self.hit("phases", (("call", self.call),))

    def call(self) -> None:
        time.sleep(self.plan.get("nap_s", 0.0))
        if self.calls == self.plan.get("call", 0):
            self.hit(STEP)
        self.calls += 1
        _torch().ones(8).sum()
        if self.plan.get("fault") is None:
            self.seen[STEP] = saw(STEP)
        if "RANK" in os.environ and _torch().distributed.is_initialized():
            self._look_around()

    def _look_around(self) -> None:
        """Send the observations of the other ranks to rank 0, which makes the record."""
        dist = _torch().distributed
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, self.seen)
        self.seen |= {f"{place} of rank {rank}": at for rank, of in enumerate(seen[1:], 1) for place, at in of.items()
                      if "rank" not in place}  # fmt: skip

    def cost(self) -> Any:
        return self.hit(COST)

    def describe(self) -> Any:
        return self.hit(DESCRIBE, {"tokens": None})

    def tables(self) -> Any:
        if self.plan.get("fault") is None:
            self.seen[TABLES] = saw(TABLES)
        mine = {
            "saw": [
                {"cell": self.plan["cell"], "place": place, "name": name, "value": json.dumps(value)}
                for place, seen in self.seen.items()
                for name, value in seen.items()
            ],
            "fat": [{"text": "x" * 1000} for _ in range(self.plan.get("fat_kb", 0))],
        }
        return self.hit(TABLES, mine)

    def __del__(self) -> None:
        self.hit(DELETE)


def _is_rank(plan: Mapping[str, Any]) -> bool:
    return plan.get("rank") is None or os.environ.get("RANK") == str(plan["rank"])


def _cell(config: Any) -> dict[str, Any]:
    return next(plan for plan in _PLAN["cells"] if plan["cell"] == config.batch_size)


def factory(config: Any, device: Any) -> Any:
    """Return the cell that the batch size selects."""
    cell = Cell(_cell(config))
    cell.hit(BUILD)
    return cell.hit("built", cell)


def _preflight(config: Any, device: Any) -> Any:
    plan = _cell(config)
    looks = Cell.__new__(Cell)
    looks.plan = {**plan, "place": None} if plan.get("place") == DELETE else plan
    looks.hit(PREFLIGHT)
    return looks.hit("predicted")


factory.preflight = _preflight  # type: ignore[attr-defined]
