"""The process that touches torch: configs in on one pipe, records out on another, until the parent closes it. Floor 3.

Requests and replies are lines of JSON on pipes of their own, so that whatever a workload prints cannot break them.
First comes {"event": "ready", "device": what `auto` means here}; then, for each request, its events, and at last
{"event": "done", "usable": bool}:

    {"op": "run", "cells": [RunConfig…], "repeat": 0, "out": what a profiler's files begin with, or null}
        → {"event": "visit", "cell": 0}… {"event": "record", "cell": 0, "record": …}…
    {"op": "preflight", "cells": [RunConfig…]}
        → {"event": "preflight", "row": {"reason", "predicted_peak_bytes", "device_memory_bytes"}}…
    {"op": "environment", "device": "auto"}
        → {"event": "environment", "environment": …}
    {"op": "fits", "device": "auto", "world_size": 2}
        → {"event": "fits", "reason": why so many ranks cannot have a device each, or null}
    {"op": "doctor"}
        → {"event": "doctor", "rows": [{"check", "state", "found", "remedy"}…]}

As one of N ranks, which torch's launcher starts, it takes the path of a socket instead of pipes, and of a log, beside
which is its own. "ready" says which rank it is, and its pid; every rank gets the same requests and answers each. The
first is

    {"op": "join", "device": "auto", "patience_s": 25}
        → {"event": "joined", "device": "cuda:1"}

Without pipes it takes one `run` request as its argument, for a profiler that a person starts by hand:
`python -m cs_systems.worker '{"op": "run", …}'`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # importing torch makes no garbage: looking for it takes a quarter of the import

import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from cs_systems import device as devices
from cs_systems import doctor, world
from cs_systems.config import ConfigError, RunConfig
from cs_systems.device import DeviceUnavailable
from cs_systems.environment import environment
from cs_systems.execute import Emit, preflight, run_cells
from cs_systems.lifeline import die_with_parent, leave_no_core, rank_log, stack_file
from cs_systems.profilers import rank_file
from cs_systems.record import Row
from cs_systems.workloads import Unavailable


def _preflight_row(config: RunConfig) -> Row:
    row: Row = {"reason": None, "predicted_peak_bytes": None, "device_memory_bytes": None}
    try:
        device = devices.resolve(config.device)
        of_device = device.total_memory_bytes() or devices.host_memory_bytes()
        row["device_memory_bytes"] = config.memory_limit_bytes or of_device
        row["reason"] = devices.too_few(config.device, config.world_size)
        row["predicted_peak_bytes"] = preflight(config, device)
    except (Unavailable, DeviceUnavailable, ConfigError) as error:
        row["reason"] = str(error)
    except Exception as error:  # whatever somebody's file raises when it is loaded: its own cell's matter
        row["reason"] = f"{type(error).__name__}: {error}"
    return row


def _too_few(device: str, world_size: int) -> str | None:
    try:
        return devices.too_few(device, world_size)
    except DeviceUnavailable as error:
        return str(error)


class Replies(Protocol):
    """Where lines go."""

    def write(self, line: str, /) -> object: ...

    def flush(self) -> None: ...


def serve(requests: Iterable[str], replies: Replies, introduction: dict[str, Any]) -> None:
    """Answer requests until there are no more, or until CUDA is lost in this process."""

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "visit":  # what is logged from here on is this cell's
            sys.stdout.flush()
            event["log_bytes"] = os.fstat(sys.stderr.fileno()).st_size
        replies.write(json.dumps(event) + "\n")
        replies.flush()

    emit({"event": "ready", **introduction})
    for line in requests:
        usable = answer(json.loads(line), emit)
        emit({"event": "done", "usable": usable})
        if not usable:
            return


def answer(request: dict[str, Any], emit: Emit) -> bool:
    """Do what is asked and tell its events but for `done`; whether this process is of further use."""
    configs = [RunConfig.from_dict(cell) for cell in request.get("cells", ())]
    if request["op"] == "run":
        out = rank_file(Path(request["out"]), world.rank()) if request.get("out") else None
        return run_cells(configs, repeat=request["repeat"], out=out, emit=emit)
    if request["op"] == "preflight":
        for config in configs:
            emit({"event": "preflight", "row": _preflight_row(config)})
    elif request["op"] == "environment":
        device = devices.resolve_or_cpu(request["device"])
        emit({"event": "environment", "environment": dataclasses.asdict(environment(device))})
    elif request["op"] == "fits":
        emit({"event": "fits", "reason": _too_few(request["device"], request["world_size"])})
    elif request["op"] == "join":
        device = devices.resolve(request["device"])
        world.join(device, request["patience_s"])
        emit({"event": "joined", "device": str(device.torch)})
    elif request["op"] == "doctor":
        emit({"event": "doctor", "rows": doctor.checks()})
    return True


def run_once(request: dict[str, Any]) -> int:
    """Measure the cells of one request and print what became of each; the exit status is 0 if all of them are ok."""
    outcomes = []

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "record":
            record = event["record"]
            outcomes.append(record["status"])
            print(": ".join(filter(None, (record["status"], record["reason"]))))  # noqa: T201

    configs = [RunConfig.from_dict(cell) for cell in request["cells"]]
    run_cells(configs, repeat=request["repeat"], out=request["out"] and Path(request["out"]), emit=emit)
    return 0 if outcomes == ["ok"] * len(configs) else 1


def main() -> None:
    gc.freeze()  # nor is it looked for in what was imported while cells run, or when the process ends
    gc.enable()
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        sys.exit(run_once(json.loads(sys.argv[1])))
    die_with_parent()
    leave_no_core()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    if not sys.argv[1].isdigit():
        _serve_as_rank(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    request_fd, reply_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(request_fd) as requests, os.fdopen(reply_fd, "w") as replies:
        serve(requests, replies, {"device": devices.resolve("auto").name})


def _serve_as_rank(address: Path, log: Path) -> None:
    rank = int(os.environ["RANK"])
    with rank_log(log, rank).open("ab") as stream:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(stream.fileno(), descriptor)
    with socket.socket(socket.AF_UNIX) as channel, stack_file(address, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # answers even where no Python runs
        channel.connect(str(address))
        with channel.makefile("r") as requests, channel.makefile("w") as replies:
            introduction = {"rank": rank, "pid": os.getpid(), "device": devices.resolve_or_cpu("auto").name}
            serve(requests, replies, introduction)
        faulthandler.unregister(signal.SIGUSR1)
    world.leave()


if __name__ == "__main__":
    main()
