"""Reader of Perfetto's binary traces, which rocprofv3, PyTorch and other programs write.

A trace is a protobuf message of packets; its events are slices of tracks. They are converted to a Chrome trace with the
categories of torch.profiler, which the Kineto reader reads. The file is untrusted: each length is checked.

Source: `protos/perfetto/trace` of Perfetto; generatePerfetto.cpp of rocprofiler-sdk. It was tested on a public
recording of rocprofv3 without kernels; no recording with kernels was available.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cs_systems.config import ConfigError
from cs_systems.core.formats import Unpacked
from cs_systems.core.units import counted
from cs_systems.readers.perfetto import SUFFIXES

if TYPE_CHECKING:
    from cs_systems.readers.forms.trace import Trace

LARGEST_PACKET = 1 << 26  # bytes
CHUNK = 1 << 20  # bytes read at a time
MOST_HEADER = 20  # bytes in front of a packet: two numbers
MOST_SLICES = 5_000_000  # about 5 GB of memory
MOST_PARENTS = 64  # most enclosing tracks of a track
DEEPEST = 8  # deepest nesting of lists and dictionaries in an annotation
REALTIME, MONOTONIC, BOOTTIME = 1, 3, 6
OWN_CLOCKS = range(64, 128)  # clocks that a sequence of packets defines for itself
# Fields of TracePacket.
CLOCKS, TIME, SEQUENCE, EVENT, INTERNED, FLAGS, CLEARED = 6, 8, 10, 11, 12, 13, 41
THREAD, COMPRESSED, CLOCK, DEFAULTS, TRACK = 44, 50, 58, 59, 60
ONLY_PACKETS = (CLOCKS, TIME, SEQUENCE, 33, 36, 43, COMPRESSED, DEFAULTS, TRACK, 89)
BEGIN, END = 1, 2  # types of an event
# category of rocprofv3 (of rocprof-sys with the prefix `rocm_`) → category of torch.profiler; None means left out
CATEGORIES = {
    "kernel_dispatch": "kernel",
    "memory_copy": "gpu_memcpy",
    "hip_api": "hip_runtime",
    "marker_api": "user_annotation",
    **dict.fromkeys(("hsa_api", "rccl_api", "rocdecode_api", "rocjpeg_api", "memory_allocation", "scratch_memory")),
}
_KINETO = re.compile(
    r"kernel|gpu_\w+|cpu_\w+|(cuda|hip|xpu|privateuse1)_(runtime|driver)|cuda_sync|user_annotation|python_function|overhead|Trace"
)
Fields = dict[int, list[Any]]  # number → values: int, or bytes


def read(path: Path, process: int | None = None) -> Trace:
    """Return the trace; raises ConfigError if it is damaged, too large, or has too little in it for any table."""
    from cs_systems import readers

    reader = _Reader(path)
    try:
        with closing(Unpacked(path)) as file:
            for packet in _packets(file):
                reader.take(packet)
    except ConfigError:
        raise
    except (EOFError, IndexError, TypeError, ValueError, struct.error, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is truncated or damaged ({error}); copy it again, or record it again") from None
    made = reader.chrome()
    if not any(event["cat"] in ("kernel", "user_annotation", "cpu_op") for event in made["traceEvents"]):
        raise ConfigError(
            f"{path} holds no kernel and no range, but {counted(len(reader.slices), 'other slice')}; record with "
            "rocprofv3 --runtime-trace while kernels run on the GPU"
        )
    with tempfile.TemporaryDirectory(prefix="cs-systems-") as folder:
        (chrome := Path(folder) / "trace.json").write_text(json.dumps(made), encoding="utf-8")
        try:
            trace = readers.read(chrome, process)
        except ConfigError as error:  # the file no longer exists when the message is read
            raise ConfigError(str(error).replace(str(chrome), str(path))) from None
    job = trace.job and (trace.job if REALTIME in reader.offsets else replace(trace.job, began_s=None))
    return replace(
        trace,
        source=str(path),
        profiler="perfetto",
        job=job,
        limitations=(*trace.limitations, *reader.limitations()),
        knows_operators=False,
    )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, of at most 10 bytes, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has over 10 bytes")


def _fields(data: bytes) -> Fields:
    """Return the fields of a message."""
    found: Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: int | bytes | None = None
        if kind == 0:
            value, at = _varint(data, at)
        elif kind in (1, 2, 5):
            size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
            value = data[at : at + size]
            at += size
        if value is None or not key >> 3 or at > len(data):
            raise ValueError("a message ends inside a field, or has an unknown one")
        found.setdefault(key >> 3, []).append(value)
    return found


def _packets(file: Unpacked) -> Iterator[Fields]:
    """Yield the packets of a trace, including those that are compressed together."""
    data, at, is_last = b"", 0, False
    while not is_last or at < len(data):
        if len(data) - at < MOST_HEADER and not is_last:
            more = file.read(CHUNK)
            data, at, is_last = data[at:] + more, 0, not more
            continue
        key, place = _varint(data, at)
        size, place = _varint(data, place)
        if key != 1 << 3 | 2 or size > LARGEST_PACKET:
            raise ValueError("a packet of another kind or size")
        while (missing := place + size - len(data)) > 0:
            if not (more := file.read(max(CHUNK, missing))):
                raise EOFError("it ends inside a packet")
            data += more
        packet, at = _fields(data[place : place + size]), place + size
        yield packet
        for some in packet.get(COMPRESSED, ()):
            yield from map(_fields, _fields(zlib.decompressobj().decompress(some, LARGEST_PACKET)).get(1, ()))


def _one(fields: Fields, number: int, default: Any = None) -> Any:
    return fields[number][-1] if number in fields else default


def _text(value: Any) -> str:
    return bytes(value).decode("utf-8", "replace")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class _Clock(NamedTuple):
    """Clock of a packet sequence: its first time, and the common time at that moment."""

    began: int
    common: int
    unit_ns: int
    is_incremental: bool


@dataclass
class _Sequence:
    """State of a packet sequence, to which each packet may refer."""

    texts: dict[int, dict[int, str]] = field(default_factory=dict)  # field of InternedData → number → text
    clocks: dict[int, _Clock] = field(default_factory=dict)
    # current time by clock, for clocks that count from the previous packet
    now: dict[int, int] = field(default_factory=dict)
    clock: int = BOOTTIME
    track: int = 0
    thread: tuple[int, int] | None = None  # for packets without tracks


class _Slice(NamedTuple):
    begin: int
    end: int | None
    track: int
    thread: tuple[int, int] | None
    category: str
    name: str
    args: dict[str, Any]


class _Reader:
    """Collector of the slices of all tracks, in ns of one clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sequences: dict[int, _Sequence] = {}
        self.offsets: dict[int, int] = {}  # clock → offset to add for the common time
        self.tracks: dict[int, tuple[str, int, tuple[int, int] | None]] = {}  # name, parent, (pid, tid or 0)
        self.open: dict[tuple[int, int], list[_Slice]] = {}
        self.slices: list[_Slice] = []
        self.untimed = 0

    def take(self, packet: Fields) -> None:
        number = _one(packet, SEQUENCE, 0)
        if _one(packet, FLAGS, 0) & 1 or _one(packet, CLEARED):
            self.sequences.pop(number, None)
        sequence = self.sequences.setdefault(number, _Sequence())
        for some in packet.get(INTERNED, ()):
            for kind, entries in _fields(some).items():
                known = sequence.texts.setdefault(kind, {})
                if kind in (1, 2, 3, 29):  # categories, names, names and texts of annotations
                    known.update((_one(one, 1, 0), _text(_one(one, 2, b""))) for one in map(_fields, entries))
        for some in packet.get(DEFAULTS, ()):
            defaults = _fields(some)
            sequence.clock = _one(defaults, CLOCK, sequence.clock)
            sequence.track = _one(_fields(_one(defaults, EVENT, b"")), 11, sequence.track)
        for some in packet.get(CLOCKS, ()):
            self._snapshot(sequence, _fields(some))
        for some in packet.get(TRACK, ()):
            self._track(_fields(some))
        for some in packet.get(THREAD, ()):
            thread = _fields(some)
            sequence.thread = _one(thread, 1, 0), _one(thread, 2, 0)
        if EVENT in packet and TIME in packet:
            time = self._time(sequence, _one(packet, TIME), _one(packet, CLOCK, sequence.clock))
            self._event(number, sequence, time, _fields(_one(packet, EVENT)))

    def _snapshot(self, sequence: _Sequence, snapshot: Fields) -> None:
        clocks = [_fields(one) for one in snapshot.get(1, ())]
        values = {_one(clock, 1, 0): _one(clock, 2, 0) for clock in clocks}
        base = next((clock for clock in (BOOTTIME, MONOTONIC, REALTIME) if clock in values), None)
        if base is None:
            return
        common = values[base] + self.offsets.setdefault(base, 0)
        for clock in clocks:
            number, unit_ns = _one(clock, 1, 0), _one(clock, 4, 1) or 1
            if number in OWN_CLOCKS:
                began = values[number] * unit_ns
                sequence.clocks[number] = _Clock(began, common, unit_ns, bool(_one(clock, 3)))
                sequence.now[number] = began
            else:
                self.offsets.setdefault(number, common - values[number])

    def _time(self, sequence: _Sequence, value: int, clock: int) -> int | None:
        """Return the common time in ns; None if the clock is not known."""
        if clock not in OWN_CLOCKS:
            return value + int(self.offsets.get(clock, 0))
        if (own := sequence.clocks.get(clock)) is None:
            return None
        now = value * own.unit_ns
        if own.is_incremental:
            now = sequence.now[clock] = sequence.now[clock] + now
        return own.common + now - own.began

    def _track(self, track: Fields) -> None:
        place = None
        if 4 in track:
            thread = _fields(_one(track, 4))
            place = _one(thread, 1, 0), _one(thread, 2, 0)
        elif 3 in track:
            place = _one(_fields(_one(track, 3)), 1, 0), 0
        name = _text(_one(track, 2, _one(track, 10, b"")))
        self.tracks[_one(track, 1, 0)] = name, _one(track, 5, 0), place

    def _event(self, number: int, sequence: _Sequence, time: int | None, event: Fields) -> None:
        track, kind = _one(event, 11, sequence.track), _one(event, 9)
        opened = self.open.setdefault((track, 0 if track else number), [])
        if time is None:
            self.untimed += 1
        elif kind == BEGIN:
            texts = sequence.texts
            names = [*map(_text, event.get(22, ())), *(texts.get(1, {}).get(one, "") for one in event.get(3, ()))]
            name = _text(event[23][-1]) if 23 in event else texts.get(2, {}).get(_one(event, 10), "?")
            args = dict(self._annotation(sequence, _fields(one), 0) for one in event.get(4, ()))
            category = names[0] if names else ""
            opened.append(_Slice(time, None, track, None if track else sequence.thread, category, name, args))
        elif kind == END and opened:
            self.slices.append(opened.pop()._replace(end=time))
            if len(self.slices) > MOST_SLICES:
                raise ConfigError(
                    f"{self.path} holds over {MOST_SLICES:,} slices, the most that are read; record fewer steps"
                )

    def _annotation(self, sequence: _Sequence, one: Fields, depth: int) -> tuple[str, Any]:
        """Return the name and the value of an annotation."""
        if depth > DEEPEST:
            raise ValueError(f"an annotation is nested over {DEEPEST} levels deep")
        name = _text(one[10][-1]) if 10 in one else sequence.texts.get(3, {}).get(_one(one, 1), "")
        inner = [self._annotation(sequence, _fields(some), depth + 1) for some in (*one.get(11, ()), *one.get(12, ()))]
        value: Any = [element for _, element in inner]  # an empty list has no fields
        if 11 in one:
            value = dict(inner)
        elif 2 in one:
            value = bool(_one(one, 2))
        elif 3 in one or 7 in one:
            value = _one(one, 3, _one(one, 7))
        elif 4 in one:
            value = _signed(_one(one, 4))
        elif 5 in one:
            (value,) = struct.unpack("<d", _one(one, 5))
        elif 6 in one:
            value = _text(_one(one, 6))
        elif 17 in one:
            value = sequence.texts.get(29, {}).get(_one(one, 17), "")
        return name, value

    def limitations(self) -> Iterator[str]:
        if self.untimed:
            yield f"left out: {counted(self.untimed, 'event')} of a clock that the file does not define"

    def chrome(self) -> dict[str, Any]:
        """Return the slices as a Chrome trace, ordered by their start."""
        slices = [*self.slices, *(one for opened in self.open.values() for one in opened)]
        slices.sort(key=lambda one: (one.begin, -(one.end or one.begin)))
        origin = slices[0].begin if slices else 0
        events = [event for one in slices if (event := self._chrome(one, origin))]
        return {"baseTimeNanoseconds": max(0, origin - self.offsets.get(REALTIME, 0)), "traceEvents": events}

    def _chrome(self, one: _Slice, origin: int) -> dict[str, Any] | None:
        """Return a slice as an event.

        None for slices that no table uses, such as slices of the device or inside a library.
        """
        label, place = self._place(one)
        plain = one.category.removeprefix("rocm_")
        args: Mapping[str, Any] = one.args
        category = CATEGORIES.get(plain, one.category)
        if plain in CATEGORIES:
            args = _as_kineto(category, args, label)
        elif not _KINETO.fullmatch(one.category):
            category = "user_annotation" if place and place[1] else None
        if category is None:
            return None
        pid, tid = place or (0, 0)
        timed = {} if one.end is None else {"dur": (one.end - one.begin) / 1000}
        return {
            "ph": "X" if timed else "B",
            "cat": category,
            "name": one.name,
            "pid": pid,
            "tid": one.args.get("tid", tid or one.track % (1 << 31)),
            "ts": (one.begin - origin) / 1000,
            "args": args,
            **timed,
        }

    def _place(self, one: _Slice) -> tuple[str, tuple[int, int] | None]:
        """Return the name of a slice's track, and the process and thread of the track or of an enclosing track."""
        if not one.track:
            return "", one.thread
        track, label = one.track, self.tracks.get(one.track, ("", 0, None))[0]
        for _ in range(MOST_PARENTS):
            _, parent, place = self.tracks.get(track, ("", 0, None))
            if place or not parent:
                return label, place
            track = parent
        return label, None


def _as_kineto(category: str | None, args: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return rocprofv3's arguments of an event under torch.profiler's names. Grid dimensions are unknown."""
    found: dict[str, Any] = {"correlation": args.get("corr_id", 0)}
    if category in ("kernel", "gpu_memcpy"):
        agents = [re.search(r"\d+$", str(args.get(name))) for name in ("agent", "dst_agent", "src_agent")]
        if "(CPU)" in label:  # a copy to the host belongs to the device that it comes from
            agents.reverse()
        where: dict[str, str] = dict(re.findall(r"(AGENT|STREAM|QUEUE) \[(\d+)\]", label))
        number = next((int(one[0]) for one in agents if one), int(where.get("AGENT", "0")))
        stream = args.get("stream_ID", int(where.get("STREAM") or where.get("QUEUE", "0")))
        found |= {"device": number, "stream": stream}
        found |= {"shared memory": args.get("group_segment_size"), "bytes": args.get("copy_bytes")}
    return found


def matches(head: bytes, path: Path) -> bool:
    """Return whether the first packet has fields that only packets have, or the file has the name of such a trace."""
    if path.name.endswith(SUFFIXES):
        return True
    try:
        key, at = _varint(head, 0)
        size, at = _varint(head, at)
        # if a packet is longer than the head, only its first field is known
        numbers = _fields(head[at : at + size]).keys() if at + size <= len(head) else {_varint(head, at)[0] >> 3}
        return key == 1 << 3 | 2 and size <= LARGEST_PACKET and not numbers.isdisjoint(ONLY_PACKETS)
    except (IndexError, ValueError):
        return False
