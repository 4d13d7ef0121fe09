"""Chrome trace of a profile, for ui.perfetto.dev and chrome://tracing: `write(profile, answer, file)`.

The recorded kernels, copies, calls, ranges and operators have Kineto's categories, so that every reader of Kineto's
traces reads them, ours too. Steps, phases, layers, idle time and diagnoses are tracks of a process of their own, with a
category that such readers skip. Not written are waits with their cause, memory, and a graph's single calls.

Source: "Trace Event Format".
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from cs_systems.analysis.attribution.gaps import Gaps, causes
from cs_systems.config import ConfigError
from cs_systems.core.range_names import UNATTRIBUTED
from cs_systems.core.version import __version__
from cs_systems.readers.forms.columns import UNKNOWN, Floats, Ints, Spans, distinct, taken
from cs_systems.readers.forms.modules import HEADER, packed
from cs_systems.readers.forms.trace import steps_of
from cs_systems.report.files import writing

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.analysis.diagnosis import Answer
    from cs_systems.readers.forms.trace import Copies, Function, Kernels, Trace

Event = dict[str, Any]
SUFFIXES = (".json", ".json.gz")
CATEGORY = "cs-systems"  # of our own tracks; no reader of Kineto's traces keeps it
HOST, OURS = 1_000_000, 1_000_001  # processes of the host's threads and of our own tracks; a device has its number
ROWS = 1 << 14  # rows to make and to write at a time, so that no second copy of the trace is in memory
LEVEL = 4  # of compression: a higher one takes twice the time for some percent
_LAYER_TRACKS = ("phase", "layer")


def check(file: Path) -> None:
    """Raise ConfigError for a file with another ending."""
    if not file.name.endswith(SUFFIXES):
        raise ConfigError(f"--export {file} must end with {' or '.join(SUFFIXES)}; choose such a name")


def write(profile: Profile, answer: Answer, file: Path) -> None:
    """Write the whole trace of a profile, in parts."""
    from msgspec.json import encode

    with _opened(file) as stream:
        stream.write(encode(_header(profile.trace))[:-1] + b',"traceEvents":[\n')
        found, separator = _events(profile, answer), b""
        while some := [*islice(found, ROWS)]:
            stream.write(separator + b",\n".join(map(encode, some)))
            separator = b",\n"
        stream.write(b"\n]}\n")


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Yield a stream into the file, compressed if its name says so; equal traces give equal bytes."""
    with writing(file) as stream:
        if not file.name.endswith(".gz"):
            yield stream
            return
        with gzip.GzipFile("", "wb", LEVEL, stream, mtime=0) as compressed:
            yield compressed  # type: ignore[misc]


def _header(trace: Trace) -> Event:
    devices = [
        {"id": number, "name": name, "numSms": trace.multiprocessors.get(number, 0)}
        for number, name in sorted(trace.devices.items())
    ]
    found: Event = {"schemaVersion": 1, "displayTimeUnit": "ms", "deviceProperties": devices}
    found["cs_systems"] = {"version": __version__, "source": trace.source, "profiler": trace.profiler}
    if (job := trace.job) is not None:
        stated = {"rank": job.rank, "world_size": job.world_size}
        found["distributedInfo"] = {name: value for name, value in stated.items() if value is not None}
        found |= {} if job.host is None else {"host_name": job.host}
        found |= {} if job.began_s is None else {"baseTimeNanoseconds": round(job.began_s * 1e9)}
    if trace.modules is not None and trace.modules.how is None:
        found[HEADER] = packed(trace.modules.rows)
    return found


def _events(profile: Profile, answer: Answer) -> Iterator[Event]:
    trace = profile.trace
    number = _Threads(trace)
    yield from _names(profile, answer, number)
    yield from _host(trace, number)
    yield from _device(profile)
    yield from _own_tracks(profile, answer)


class _Threads:
    """Small numbers of the host's threads: nsys's have 64 bits, more than a viewer keeps."""

    def __init__(self, trace: Trace) -> None:
        columns = [each.thread for each in (trace.calls, trace.ranges, trace.functions)]
        columns += [each.thread for each in (trace.operators, trace.ops) if each is not None]
        self.known: Ints = np.unique(np.concatenate(columns))

    def of(self, thread: Ints) -> Ints:
        return np.searchsorted(self.known, thread) + 1


def _us(time_s: Floats) -> list[float]:
    """Return times in µs, to the ns, which is the resolution of every profiler."""
    return np.round(time_s * 1e6, 3).tolist()  # type: ignore[no-any-return]


def _span(start_s: Floats, end_s: Floats) -> Iterator[dict[str, float]]:
    starts, ends = _us(start_s), _us(end_s)
    return ({"ts": start, "dur": round(end - start, 3)} for start, end in zip(starts, ends, strict=True))


def _parts(columns: Sized) -> Iterator[Ints]:
    """Yield the indices of all rows, some at a time."""
    return (np.arange(at, min(at + ROWS, len(columns))) for at in range(0, len(columns), ROWS))


def _host(trace: Trace, number: _Threads) -> Iterator[Event]:
    """Yield calls, ranges, operators and long Python functions."""
    for which in _parts(trace.calls):
        for index, event in zip(which.tolist(), _spans(trace.calls.take(which), "cuda_runtime", number), strict=True):
            yield event | {"args": {"correlation": index + 1}}
    for spans, category in ((trace.ranges, "user_annotation"), (trace.functions, "python_function")):
        for which in _parts(spans):
            yield from _spans(spans.take(which), category, number)
    yield from _operators(trace, number)
    for start_s, end_s in trace.overheads:
        (span,) = _span(np.array([start_s]), np.array([end_s]))
        yield {"ph": "X", "cat": "overhead", "name": "profiler overhead", "pid": HOST, "tid": 0, **span}


def _spans(spans: Spans, category: str, number: _Threads) -> Iterator[Event]:
    threads, times = number.of(spans.thread).tolist(), _span(spans.start_s, spans.end_s)
    for name, thread, span in zip(spans.name, threads, times, strict=True):
        yield {"ph": "X", "cat": category, "name": name, "pid": HOST, "tid": thread, **span}


def _operators(trace: Trace, number: _Threads) -> Iterator[Event]:
    """Yield all operators, with the shapes of their inputs and autograd's sequence numbers where these are known."""
    operators, ops = trace.operators, trace.ops
    if operators is None:
        return
    row = np.full(len(operators), UNKNOWN)
    if ops is not None and len(ops):
        columns = ((ops.thread, operators.thread), (ops.start_s, operators.start_s), (ops.end_s, operators.end_s))
        _, code = distinct(*(np.concatenate(pair).view(np.int64) for pair in columns))
        of_code = np.full(code.max() + 1, UNKNOWN)
        of_code[code[: len(ops)]] = np.arange(len(ops))
        row = of_code[code[len(ops) :]]
    for which in _parts(operators.start_s):
        known = zip(
            operators.signature.take(which),
            number.of(operators.thread[which]).tolist(),
            _span(operators.start_s[which], operators.end_s[which]),
            (taken(ops.sequence, row[which], UNKNOWN) if ops is not None else row[which]).tolist(),
            (taken(ops.forward_thread, row[which], UNKNOWN) if ops is not None else row[which]).tolist(),
            strict=True,
        )
        for signature, thread, span, sequence, forward in known:
            args: Event = {} if signature.shapes is None else {"Input Dims": signature.shapes}
            args |= {"Sequence number": sequence, "Fwd thread id": forward} if sequence != UNKNOWN else {}
            yield {"ph": "X", "cat": "cpu_op", "name": signature.name, "pid": HOST, "tid": thread, **span, "args": args}


def _device(profile: Profile) -> Iterator[Event]:
    """Yield kernels and copies, on the tracks of their streams."""
    trace, kernels = profile.trace, profile.trace.kernels
    arguments = [_launch(one) for one in kernels.function.values]
    for which in _parts(kernels):
        columns = [getattr(kernels, name)[which].tolist() for name in ("device", "stream", "call", "in_graph")]
        known = zip(
            kernels.function.codes[which].tolist(),
            profile.places.take(which),
            _span(kernels.start_s[which], kernels.end_s[which]),
            which.tolist(),
            *columns,
            strict=True,
        )
        for code, place, span, index, device, stream, call, in_graph in known:
            args = {**arguments[code], **_where(device, stream, call)}
            args |= {name: getattr(place, name) for name in _LAYER_TRACKS if getattr(place, name) != UNATTRIBUTED}
            args |= {"graph node id": 1} if in_graph else {}
            args |= _message(trace, index)
            name = kernels.function.values[code].name
            yield {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, **span, "args": args}
    copies = trace.copies
    for which in _parts(copies):
        columns = [getattr(copies, name)[which].tolist() for name in ("device", "stream", "call", "bytes")]
        names = zip(copies.kind.take(which), copies.name.take(which), strict=True)
        for (kind, name), span, device, stream, call, size in zip(
            names, _span(copies.start_s[which], copies.end_s[which]), *columns, strict=True
        ):
            args = _where(device, stream, call) | ({} if size == UNKNOWN else {"bytes": size})
            title = f"{kind.title()} {name}".strip()
            yield {"ph": "X", "cat": f"gpu_{kind}", "name": title, "pid": device, "tid": stream, **span, "args": args}


def _where(device: int, stream: int, call: int) -> Event:
    return {"device": device, "stream": stream} | ({} if call == UNKNOWN else {"correlation": call + 1})


def _launch(function: Function) -> Event:
    numbers = {"registers per thread": function.registers, "shared memory": function.shared_bytes}
    sizes = {"grid": function.grid, "block": function.block}
    return {name: value for name, value in (numbers | sizes).items() if value is not None}


def _message(trace: Trace, kernel: int) -> Event:
    """Return what torch.distributed says of a collective's kernel."""
    if (message := trace.messages.get(kernel)) is None:
        return {}
    told = {
        "Collective name": message.name,
        "Process Group Name": message.group or None,
        "Group size": message.ranks,
        "Seq": message.sequence,
        "In msg nelems": message.in_elements,
        "Out msg nelems": message.out_elements,
        "dtype": message.dtype,
    }
    return {name: value for name, value in told.items() if value is not None}


def _own_tracks(profile: Profile, answer: Answer) -> Iterator[Event]:
    """Yield steps, phases, layers, idle time and diagnoses."""
    steps = profile.steps
    starts, ends = (np.array([getattr(step, name) for step in steps], np.float64) for name in ("start_s", "end_s"))
    yield from _slices(_STEPS, [f"step {step.number}" for step in steps], starts, ends)
    for at, device in enumerate(profile.devices):
        for kind, track in zip(_LAYER_TRACKS, _tracks(at), strict=False):
            yield from _of_kernels(profile, device, kind, track)
        gaps = profile.gaps.get(device)
        if gaps is not None:
            yield from _idle(profile.trace, device, gaps, _tracks(at)[-1])
    for at, row in enumerate(_diagnoses(answer)):
        yield from _slices(_DIAGNOSES + at, [row["cause"]] * len(steps), starts, ends, row)


_STEPS, _DIAGNOSES = 1, 1_000  # numbers of tracks


def _tracks(at: int) -> tuple[int, int, int]:
    """Return the tracks of phases, layers and idle time of a device."""
    return 10 * at + 10, 10 * at + 11, 10 * at + 12


def _of_kernels(profile: Profile, device: int, kind: str, track: int) -> Iterator[Event]:
    """Yield a slice for each run of kernels of a step with the same phase, or with the same layer."""
    kernels, places = profile.trace.kernels, profile.places
    step, inside = steps_of(kernels.launched_s, profile.steps)
    own = np.flatnonzero(inside & (kernels.device == device))
    if not len(own):
        return
    names = [place.phase if kind == "phase" else f"{place.phase}: {place.layer}" for place in places.values]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    code = np.array([numbers[name] for name in names], np.int64)[places.codes[own]]
    first = np.flatnonzero(np.diff(code, prepend=-1) | np.diff(step[own], prepend=-1))
    start = kernels.start_s[own][first]
    end = np.maximum.reduceat(kernels.end_s[own], first)
    end[:-1] = np.minimum(end[:-1], start[1:])  # slices of one track may not overlap
    shown = [*numbers]
    kept = np.array([UNATTRIBUTED not in (name, name.partition(": ")[2]) for name in shown])[code[first]]
    titles = [shown[number] for number in code[first][kept].tolist()]
    yield from _slices(track, titles, start[kept], end[kept])


def _idle(trace: Trace, device: int, gaps: Gaps, track: int) -> Iterator[Event]:
    """Yield a slice for each gap, named by the cause of most of its time; the arguments are the times of its causes."""
    times = causes(trace, device, gaps)
    slices = _slices(track, ["idle"] * len(gaps.step), gaps.start_s, gaps.end_s)
    for index, event in enumerate(slices):
        found = {cause: float(lasted[index]) for cause, lasted in times.items() if lasted[index]}
        if found:
            event["name"] = f"idle: {max(found, key=lambda cause: found[cause])}"
            event["args"] = {f"{cause} (µs)": round(time_s * 1e6, 3) for cause, time_s in found.items()}
        yield event


def _slices(
    track: int, names: Iterable[str], start_s: Floats, end_s: Floats, args: Mapping[str, Any] | None = None
) -> Iterator[Event]:
    more = {} if args is None else {"args": args}
    for name, span in zip(names, _span(start_s, end_s), strict=True):
        yield {"ph": "X", "cat": CATEGORY, "name": name, "pid": OURS, "tid": track, **span, **more}


def _diagnoses(answer: Answer) -> list[Event]:
    """Return the rows of the diagnoses, without their evidence."""
    rows = [{**one.row(), "evidence": None} for one in answer.diagnoses]
    return [{name: value for name, value in row.items() if value not in (None, "")} for row in rows]


def _names(profile: Profile, answer: Answer, number: _Threads) -> Iterator[Event]:
    """Yield the names of processes and tracks, ours at the top."""
    trace = profile.trace
    devices = {device for device, _ in _streams(trace.kernels) | _streams(trace.copies)}
    processes = {OURS: "cs-systems", HOST: f"host, by {trace.profiler}"}
    processes |= {device: f"GPU {device} {trace.devices.get(device, '')}".strip() for device in sorted(devices)}
    for order, (process, name) in enumerate(processes.items()):
        yield _meta("process_name", process, 0, name=name)
        yield _meta("process_sort_index", process, 0, sort_index=order)
    tracks = {_STEPS: "steps"}
    for at, device in enumerate(profile.devices):
        tracks |= {t: f"GPU {device} {what}" for t, what in zip(_tracks(at), ("phases", "layers", "idle"), strict=True)}
    tracks |= {_DIAGNOSES + at: f"{at + 1}. {row['cause']}" for at, row in enumerate(_diagnoses(answer))}
    for track, name in tracks.items():
        yield _meta("thread_name", OURS, track, name=name)
        yield _meta("thread_sort_index", OURS, track, sort_index=track)
    for thread in number.of(number.known).tolist():
        yield _meta("thread_name", HOST, thread, name=f"thread {thread}")
    for device, stream in sorted(_streams(trace.kernels) | _streams(trace.copies)):
        yield _meta("thread_name", device, stream, name=f"stream {stream}")


def _streams(work: Kernels | Copies) -> set[tuple[int, int]]:
    """Return the streams that have work, with their devices."""
    if not len(work):
        return set()
    first, _ = distinct(work.device, work.stream)
    return {*zip(work.device[first].tolist(), work.stream[first].tolist(), strict=True)}


def _meta(kind: str, process: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}
