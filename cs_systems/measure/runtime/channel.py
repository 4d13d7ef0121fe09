"""Channel between a supervisor and its workers: typed messages in checksummed frames.

A frame is a header (magic, the writer's PID, the message's number, the length of the body, a checksum of these and one
of the body) and a body of JSON. A reader accepts only the frames of one writer, in order. Anything else raises
ChannelError, such as output of user code that writes to descriptors it did not open, or of a child that it forks. Only
the cell in which the error happens fails.

The same messages go through pipes (`Sender`, `Receiver`) and through the store of a job that torchrun started
(`encode`, `decode`).
"""

from __future__ import annotations

import json
import os
import struct
import sys
import types
import typing
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from cs_systems.config import Mode, RunConfig
from cs_systems.core.fields import Subject

_MAGIC = b"\x1eCS1"
_HEADER = struct.Struct(">4sIIIII")
_LONGEST_BYTES = 1 << 30
EXIT_FORKED, EXIT_LOST = 81, 82
OPTIMIZER_MODULES = ["torch._dynamo"]  # torch's optimizers import this
# Remedy for a worker with messages that this process cannot read.
BUG = "measure again, and if it recurs, report this as a bug of cs-systems"


class ChannelError(RuntimeError):
    """Error for invalid data on the channel; its text becomes the reason in the cell's record."""


@dataclass(frozen=True)
class Message:
    """Request or reply; its fields are plain JSON values."""


@dataclass(frozen=True)
class Run(Message):
    """Request to measure cells together; replies: `Visit`, `Warming`, `Timing`, `Experimenting`, `CellRecord`, `Done`.

    out: the path prefix of a profiler's files. experiments_s: the time for experiments after the last steps.
    """

    cells: list
    repeat: int = 0
    out: str | None = None
    experiments_s: float = 0.0

    @property
    def configs(self) -> list[RunConfig]:
        return [RunConfig.from_dict(cell) for cell in self.cells]

    @property
    def modules(self) -> list[str]:
        """Modules that the cells import while they are built; importing them earlier saves 1 s."""
        trains = any(Subject.of(c["workload"]) is Subject.STEP and c["mode"] == Mode.TRAIN_STEP for c in self.cells)
        return OPTIMIZER_MODULES if trains else []


@dataclass(frozen=True)
class Preflight(Message):
    """Request to predict cells without running them; replies: one `Predicted` each."""

    cells: list


@dataclass(frozen=True)
class Forecast(Message):
    """Request to run cells of a user's own model on fake tensors; replies: one `Forecasted` each."""

    cells: list


@dataclass(frozen=True)
class Describe(Message):
    """Request for a description of machine and software; reply: `Described`."""

    device: str


@dataclass(frozen=True)
class CountDevices(Message):
    """Request to check that this many ranks can have a device each; reply: `Counted`."""

    device: str
    world_size: int


@dataclass(frozen=True)
class Join(Message):
    """Request to join the process group of all ranks; reply: `Joined`."""

    device: str
    patience_s: float


@dataclass(frozen=True)
class Diagnose(Message):
    """Request to check what works on this machine; reply: `Diagnosed`."""


@dataclass(frozen=True)
class Ready(Message):
    """First message of a worker: its PID, its rank, its host, and the device that `auto` selects there."""

    pid: int
    device: str
    rank: int = 0
    host: str = ""


@dataclass(frozen=True)
class Visit(Message):
    """Start of a visit to a cell; `log_bytes` is the size of the worker's log at that moment."""

    cell: int
    round: int | None = None
    log_bytes: int = 0


@dataclass(frozen=True)
class Warming(Message):
    """Progress of the warm-up of the visited cell: finished steps and their total.

    It is sent before a warm-up step, at most twice a second, and never before or between timed steps.
    """

    cell: int
    step: int
    steps: int


@dataclass(frozen=True)
class Timing(Message):
    """Progress of the timed steps of the visited cell: finished steps and their total.

    It is sent between two timed steps every few seconds, and the next one begins when it has been shown.
    """

    cell: int
    step: int
    steps: int


@dataclass(frozen=True)
class Experimenting(Message):
    """Progress after the last step of the visited cell: the number of experiments, and their approximate total time."""

    cell: int
    count: int
    cost_s: float


@dataclass(frozen=True)
class CellRecord(Message):
    """Record of a finished cell; `of_peers`: it failed only because another rank was lost or did not arrive."""

    cell: int
    record: dict
    of_peers: bool = False

    @property
    def failed(self) -> bool:
        return self.record["status"] not in ("ok", "unavailable")


@dataclass(frozen=True)
class Predicted(Message):
    """Reply with the prediction for one cell: a `PreflightRow`."""

    row: dict


@dataclass(frozen=True)
class Forecasted(Message):
    """Reply with the prediction for one cell by fake tensors: a `ForecastRow`."""

    row: dict


@dataclass(frozen=True)
class Described(Message):
    """Reply that describes machine and software: an `Environment` as a mapping."""

    environment: dict


@dataclass(frozen=True)
class Counted(Message):
    """Reply to `CountDevices`; `reason` says why there are too few devices for the ranks, None if there are enough."""

    reason: str | None


@dataclass(frozen=True)
class Joined(Message):
    """Reply to `Join`: the device of this rank."""

    device: str


@dataclass(frozen=True)
class Diagnosed(Message):
    """Reply to `Diagnose`: rows of type `Diagnostic`."""

    rows: list


@dataclass(frozen=True)
class Done(Message):
    """Last reply to a request; `usable`: the worker can take another one."""

    usable: bool


_TYPES = {kind.__name__: kind for kind in Message.__subclasses__()}


def _field_types(kind: type[Message]) -> dict[str, tuple[type, ...]]:
    """Return the types that each field accepts: all members of a union, and int as well as float for a float."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        found[name] = (*options, int) if float in options else options
    return found


_FIELDS = {kind: _field_types(kind) for kind in Message.__subclasses__()}
REPLIES: dict[type[Message], tuple[type[Message], ...]] = {
    Run: (Visit, Warming, Timing, Experimenting, CellRecord),
    Preflight: (Predicted,),
    Forecast: (Forecasted,),
    Describe: (Described,),
    CountDevices: (Counted,),
    Join: (Joined,),
    Diagnose: (Diagnosed,),
}


def run_request(
    configs: typing.Sequence[RunConfig], repeat: int = 0, out: object = None, experiments_s: float = 0.0
) -> Run:
    """Build the request that measures these cells; see `Run`."""
    return Run([c.to_dict() for c in configs], repeat, None if out is None else str(out), experiments_s)


def to_json(message: Message) -> str:
    return json.dumps({"type": type(message).__name__, **vars(message)})


def from_json(text: str | bytes) -> Message:
    """Parse a message. Raises ChannelError if it is malformed or a field's value has the wrong type."""
    try:
        fields = json.loads(text)
        kind = _TYPES[fields.pop("type")]
        message = kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChannelError(f"a message of the worker cannot be read ({type(error).__name__}); {BUG}") from error
    for name, allowed in _FIELDS[kind].items():
        if not isinstance(getattr(message, name), allowed):
            what = f"{kind.__name__}.{name} has the wrong type"
            raise ChannelError(f"a message of the worker cannot be read ({what}); {BUG}")
    return message


def encode(message: Message, pid: int, number: int) -> bytes:
    """Encode a message as a frame."""
    body = to_json(message).encode()
    start = struct.pack(">4sIII", _MAGIC, pid, number, len(body))
    return start + struct.pack(">II", zlib.crc32(start), zlib.crc32(body)) + body


def decode(frame: bytes, pid: int | None, number: int) -> Message:
    """Decode one whole frame with this writer and number. Raises ChannelError for any other frame."""
    data = bytearray(frame)
    message = _take(data, pid, number)
    if message is None or data:
        raise ChannelError(f"a message of the worker is truncated or too long; {BUG}")
    return message


def _take(data: bytearray, pid: int | None, number: int) -> Message | None:
    """Remove the first message from `data` and return it; return None while it is incomplete.

    pid: the writer's; None accepts any. Raises ChannelError.
    """
    if not _MAGIC.startswith(begin := bytes(data[: len(_MAGIC)])) and begin != _MAGIC:
        raise _foreign(data)
    if len(data) < _HEADER.size:
        return None
    _, writer, counted, length, header_sum, body_sum = _HEADER.unpack_from(data)
    if zlib.crc32(data[: _HEADER.size - 8]) != header_sum or length > _LONGEST_BYTES:
        raise _foreign(data)
    if len(data) < (end := _HEADER.size + length):
        return None
    body = bytes(data[_HEADER.size : end])
    if zlib.crc32(body) != body_sum:
        raise _foreign(data)
    if pid not in (None, writer):
        raise ChannelError(
            f"process {writer}, forked by the step, replied in place of the worker; end a forked child with os._exit"
        )
    if counted != number:
        raise ChannelError(
            f"the step probably wrote to the worker's pipe (message {counted} came in place of message {number}); "
            "write only to descriptors that the step opened"
        )
    del data[:end]
    return from_json(body)


def _foreign(data: bytearray) -> ChannelError:
    return ChannelError(
        f"the step wrote to the worker's pipe ({bytes(data[:20])!r}…); write only to descriptors that the step opened"
    )


class Receiver:
    """Reading end of a pipe, which collects the messages of one writer.

    closed: the writer has closed its end. The first message must be `Ready`; it sets the writer's PID.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.closed = descriptor, False
        self._pid: int | None = None
        self._number, self._data = 0, bytearray()
        os.set_blocking(descriptor, False)

    def messages(self) -> Iterator[Message]:
        """Yield the messages since the last call. Raises ChannelError at invalid data, after the messages before it."""
        while not self.closed:
            try:
                chunk = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            self.closed = not chunk
            self._data += chunk
            while self._data and (message := _take(self._data, self._pid, self._number)) is not None:
                if self._pid is None:
                    if not isinstance(message, Ready):
                        raise ChannelError(
                            f"the first message of the worker was {type(message).__name__} in place of Ready; {BUG}"
                        )
                    self._pid = message.pid
                self._number += 1
                yield message


class Sender:
    """Writing end of a pipe, in a worker; it ends the process if the process no longer owns the pipe.

    A child that the worker forks closes its copy, so that the pipe closes when the worker ends. Such a child exits when
    it tries to send a message, because it has returned into the worker's loop.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid, self._number = descriptor, os.getpid(), 0
        self._identity = _identity(descriptor)
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        if _identity(self._descriptor) == self._identity:
            os.close(self._descriptor)

    def send(self, message: Message) -> None:
        if os.getpid() != self._pid:
            os._exit(EXIT_FORKED)
        frame = memoryview(encode(message, self._pid, self._number))
        self._number += 1
        if _identity(self._descriptor) != self._identity:
            _end("the step closed or replaced the worker's pipe")
        try:
            os.set_blocking(self._descriptor, True)  # user code may have made all descriptors non-blocking
            while frame:
                frame = frame[os.write(self._descriptor, frame) :]
        except OSError as error:
            _end(f"the supervisor has ended: {error}")


def _end(reason: str) -> NoReturn:
    try:
        os.write(2, f"{reason}\n".encode())
    finally:
        os._exit(EXIT_LOST)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def requests(descriptor: int) -> typing.Iterator[Message]:
    """Yield the requests that arrive in a worker until the supervisor closes the pipe.

    Reject frames of other writers.
    """
    os.set_inheritable(descriptor, False)
    data, number = bytearray(), 0
    while True:
        while data and (message := _take(data, None, number)) is not None:
            number += 1
            yield message
        try:
            chunk = os.read(descriptor, 1 << 16)
        except OSError:  # the user's step closed it
            sys.exit(EXIT_LOST)
        if not chunk:
            return
        data += chunk
