"""Worker: the process that uses torch and answers requests until the supervisor closes its pipe.

`python -m cs_systems.measure.runtime.worker REQUESTS REPLIES` takes the descriptors of its ends of two pipes; with a
third argument, SCRATCH, it is one of N ranks, which find each other through that private folder. Requests and replies
are the messages of `channel`, on separate pipes, so that a workload's prints cannot corrupt them. The first message is
`Ready`; each request is answered by its replies and a final `Done`.

With one argument, a `Run` request as JSON, it measures that and ends; this is for profilers started by hand.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # importing torch makes no garbage, but collection takes a quarter of the import time

import contextlib
import dataclasses
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from cs_systems.config import ConfigError, RunConfig
from cs_systems.formulas.memory.tables import PreflightRow
from cs_systems.machine import device as devices
from cs_systems.machine import process_group
from cs_systems.machine.device import DeviceUnavailable
from cs_systems.machine.environment import environment
from cs_systems.measure.profilers import rank_file
from cs_systems.measure.runtime import channel, doctor
from cs_systems.measure.runtime.channel import CellRecord, Done, Message, Ready, Visit
from cs_systems.measure.runtime.execute import preflight, run_cells
from cs_systems.measure.runtime.lifetime import die_with_parent, leave_no_core, stack_file, store_file
from cs_systems.measure.workloads import Cell, Unavailable

Send = Callable[[Message], object]


def serve(requests: Iterable[Message], send: Send, hello: Ready) -> None:
    """Answer requests until there are no more, or until this process must be replaced."""

    def reply(message: Message) -> None:
        if isinstance(message, Visit):  # later output belongs to this cell
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            message = dataclasses.replace(message, log_bytes=_log_bytes())
        send(message)

    send(hello)
    for request in requests:
        usable = answer(request, reply)
        send(Done(usable))
        if not usable:
            return


def answer(request: Message, send: Send) -> bool:
    """Execute the request and send its replies except `Done`; return whether this process is still usable."""
    if isinstance(request, channel.Run):
        _load(request.modules)
        out = rank_file(Path(request.out), process_group.rank()) if request.out else None
        usable = run_cells(
            request.configs, repeat=request.repeat, out=out, emit=send, experiments_s=request.experiments_s
        )
        if not any(config.sources or config.compile != "none" for config in request.configs):
            gc.freeze()  # freeze modules that the cells imported: otherwise each cell's collection takes 65 ms longer
        return usable
    if isinstance(request, channel.Preflight):
        for cell in request.cells:
            send(channel.Predicted({**_preflight_row(RunConfig.from_dict(cell))}))
    elif isinstance(request, channel.Forecast):
        from cs_systems.measure.runtime.forecast import forecast  # imports fake tensors

        for cell in request.cells:
            send(channel.Forecasted({**forecast(RunConfig.from_dict(cell))}))
    elif isinstance(request, channel.Describe):
        device = devices.resolve_or_cpu(request.device)
        send(channel.Described(dataclasses.asdict(environment(device))))
    elif isinstance(request, channel.CountDevices):
        send(channel.Counted(_too_few(request.device, request.world_size)))
    elif isinstance(request, channel.Join):
        device = devices.resolve(request.device)
        process_group.join(device, request.patience_s, _store)
        send(channel.Joined(str(device.torch)))
    elif isinstance(request, channel.Diagnose):
        send(channel.Diagnosed(doctor.checks()))
    return True


def _load(modules: Iterable[str]) -> None:
    """Import modules without garbage collection, which would take a fifth of the time.

    They are also excluded from later collections, each of which would take 70 ms of a cell.
    """
    if missing := [module for module in modules if module not in sys.modules]:
        gc.disable()
        for module in missing:
            importlib.import_module(module)
        gc.freeze()
        gc.enable()


_store: Path | None = None  # rendezvous file for ranks on one machine


def _preflight_row(config: RunConfig) -> PreflightRow:
    row: PreflightRow = {"reason": None, "predicted_peak_bytes": None, "device_memory_bytes": None}
    try:
        device = devices.resolve(config.device)
        of_device = device.total_memory_bytes() or devices.host_memory_bytes()
        row["device_memory_bytes"] = config.memory_limit_bytes or of_device
        row["reason"] = devices.too_few(config.device, config.world_size)
        row["predicted_peak_bytes"] = preflight(Cell(config), device)
    except (Unavailable, DeviceUnavailable, ConfigError) as error:
        row["reason"] = str(error)
    except Exception as error:  # an error while loading a user's file is recorded by its own cell
        row["reason"] = f"{type(error).__name__}: {error}"
    return row


def _too_few(device: str, world_size: int) -> str | None:
    try:
        return devices.too_few(device, world_size)
    except DeviceUnavailable as error:
        return str(error)


def _log_bytes() -> int:
    try:
        return os.fstat(2).st_size
    except OSError:
        return 0


def run_once(request: channel.Run) -> int:
    """Measure the cells of one request and print each outcome; return exit status 0 if all of them are ok."""
    outcomes = []

    def emit(message: Message) -> None:
        if isinstance(message, CellRecord):
            record = message.record
            outcomes.append(record["status"])
            print(": ".join(filter(None, (record["status"], record["reason"]))))  # noqa: T201

    run_cells(request.configs, repeat=request.repeat, out=Path(request.out) if request.out else None, emit=emit)
    return 0 if outcomes == ["ok"] * len(request.cells) else 1


def main() -> None:
    gc.freeze()  # imported objects are excluded from collection while cells run and at exit
    gc.enable()
    if len(sys.argv) == 2:
        request = channel.from_json(sys.argv[1])
        assert isinstance(request, channel.Run)
        sys.exit(run_once(request))
    die_with_parent()
    leave_no_core()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the supervisor handles Ctrl-C
    requests, sender = channel.requests(int(sys.argv[1])), channel.Sender(int(sys.argv[2]))
    if len(sys.argv) == 3:
        serve(requests, sender.send, Ready(os.getpid(), devices.resolve("auto").name))
    else:
        _serve_as_rank(requests, sender.send, Path(sys.argv[3]))


def _serve_as_rank(requests: Iterable[Message], send: Send, scratch: Path) -> None:
    global _store
    _store, rank = store_file(scratch), int(os.environ["RANK"])
    with stack_file(scratch, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # works even if no Python code is running
        serve(requests, send, Ready(os.getpid(), devices.resolve_or_cpu("auto").name, rank))
        faulthandler.unregister(signal.SIGUSR1)
    process_group.leave()


if __name__ == "__main__":
    main()
