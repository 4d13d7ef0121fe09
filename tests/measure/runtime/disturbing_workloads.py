"""User workloads, named as `path.py:name`: each disturbs its process in a way that must not affect another cell."""

from __future__ import annotations

import decimal
import locale
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class ReportsState:
    """Workload that computes nothing and reports the state of its process."""

    def __init__(self, config: Any, device: Any) -> None:
        pass

    def prepare(self) -> None:
        pass

    def step(self) -> tuple[tuple[str, Callable[[], None]], ...]:
        return (("report", lambda: print("reported")),)

    def cost(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "tokens": None,
            "dtype": str(torch.get_default_dtype()),
            "default_device": str(torch.ones(1).device),
            "grad": torch.is_grad_enabled(),
            "threads": torch.get_num_threads(),
            "tf32": torch.backends.cudnn.rnn.fp32_precision,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "torch_random": float(torch.rand(1, dtype=torch.float64, device="cpu")),
            "random": random.random(),
            "path": os.environ.get("PATH"),
            "marker": os.environ.get("CS_TEST_MARKER"),
            "directory": str(Path.cwd()),
            "umask": _umask(),
            "sigterm": str(signal.getsignal(signal.SIGTERM)),
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "timer": signal.getitimer(signal.ITIMER_REAL)[0],
            "original": sys.__stderr__ is sys.stderr,
            "stream": str((sys.stdout.line_buffering, sys.stdout.errors)),
            "recursion": sys.getrecursionlimit(),
            "decimal": decimal.getcontext().prec,
            "switch": sys.getswitchinterval(),
            "filters": len(warnings.filters),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "locale": locale.setlocale(locale.LC_ALL),
            "pid": os.getpid(),
        }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def changes_restorable_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.rnn.fp32_precision = "ieee"
    torch.manual_seed(7)
    random.seed(7)
    os.environ.clear()
    os.environ["CS_TEST_MARKER"] = "left"
    os.chdir("/")
    os.umask(0o777)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.setitimer(signal.ITIMER_REAL, 300)
    decimal.getcontext().prec = 3
    sys.setrecursionlimit(5000)
    sys.setswitchinterval(0.5)
    sys.path.clear()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.__stdout__.reconfigure(line_buffering=not sys.__stdout__.line_buffering, errors="replace")
    sys.stdout = sys.stderr = sys.__stderr__ = None


def closes_its_streams() -> None:
    sys.stdout.close()
    os.closerange(1, 3)


def detaches_its_stream() -> None:
    with suppress(ValueError):  # it is detached already
        sys.stdout.detach()


def replaces_its_streams() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(300,)).start()


def leaves_a_process() -> None:
    subprocess.Popen(["sleep", "300"], close_fds=False)


def leaves_a_detached_process() -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
    os.wait()


def dies_while_its_child_lives() -> None:
    if os.fork() == 0:
        time.sleep(300)
    os.kill(os.getpid(), signal.SIGKILL)


def has_a_child_that_returns() -> None:
    os.fork()


def has_a_child_that_raises() -> None:
    if os.fork() == 0:
        raise ValueError("raised in the child")


def _other_descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if int(entry.name) > 2]


def writes_to_every_descriptor() -> None:
    for descriptor in _other_descriptors():
        try:
            os.write(descriptor, b'{"type": "Done", "usable": true}\n')
        except OSError:
            continue


def closes_the_descriptor_of_its_requests() -> None:
    if int(sys.argv[1]) in _other_descriptors():
        os.close(int(sys.argv[1]))


def makes_every_descriptor_nonblocking() -> None:
    for descriptor in _other_descriptors():
        with suppress(OSError):
            os.set_blocking(descriptor, False)


def closes_every_descriptor() -> None:
    os.closerange(3, 256)


def puts_a_file_in_every_descriptor() -> None:
    file = os.open("file", os.O_RDWR | os.O_CREAT)
    for descriptor in _other_descriptors():
        os.dup2(file, descriptor)


def raises_unprintable_exception() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Silent


class HasInvalidTable(ReportsState):
    """Workload with a table that holds a set instead of a value."""

    def tables(self) -> Any:
        return {"mine": [{"x": {1, 2}}]}


class HasReservedTable(ReportsState):
    """Workload with a table that has a reserved name of the package."""

    def tables(self) -> Any:
        return {"kernels": [{"x": 1}]}


class DescribesATensor(ReportsState):
    """Workload that describes itself with a tensor instead of a number."""

    def describe(self) -> Any:
        return {"tokens": torch.ones(1)}


class DescribesAFraction(ReportsState):
    """Workload that describes itself with a fraction of a token."""

    def describe(self) -> Any:
        return {"tokens": 1023.5}


class DescribesTooMuch(ReportsState):
    """Workload that describes itself with a number that no table can hold."""

    def describe(self) -> Any:
        return {"tokens": 10**400}


def raises_lost_peer_error() -> None:
    if os.environ["RANK"] == "0":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    torch.distributed.barrier()


def predicts_a_text(config: Any, device: Any) -> Callable[[], None]:
    return leaves_a_thread


predicts_a_text.preflight = lambda config, device: "many"  # type: ignore[attr-defined]


def predicts_too_much(config: Any, device: Any) -> Callable[[], None]:
    return leaves_a_thread


predicts_too_much.preflight = lambda config, device: 10**400  # type: ignore[attr-defined]


def prints_like_nccl_and_dies() -> None:
    """Print a line of NCCL's watchdog on rank 0 and abort, while the other rank waits."""
    if os.environ["RANK"] == "0":
        print("[E] [Rank 0] Watchdog caught collective operation timeout", file=sys.stderr, flush=True)
        os.abort()
    torch.distributed.barrier()


def prints_like_nccl_and_continues() -> None:
    """Print a line of NCCL's watchdog on rank 0 and continue, while the other rank waits."""
    if os.environ["RANK"] == "0":
        print("[E] [Rank 0] Watchdog caught collective operation timeout", file=sys.stderr, flush=True)
        time.sleep(2.5)
    torch.distributed.barrier()


def listens(config: Any, device: Any) -> Callable[[], None]:
    """Write the addresses at which this rank listens to a file in its folder, while all ranks run."""

    def step() -> None:
        torch.distributed.all_reduce(torch.ones(8, device=device.torch))
        Path(os.environ["RANK"]).write_text("\n".join(listening_addresses()))

    return step


def listening_addresses() -> list[str]:
    """Return the addresses at which this process listens, as /proc writes them in hexadecimal."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(entry.readlink()))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.append(words[1].partition(":")[0])
    return found
