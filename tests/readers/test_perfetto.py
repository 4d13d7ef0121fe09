"""Perfetto's binary traces, encoded here from traces of torch.profiler, and damaged ones."""

from __future__ import annotations

import gzip
import json
import random
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.core.formats import recognised
from cs_systems.readers import _perfetto, read

DATA = Path(__file__).parents[1] / "data"
BOOT_NS, REAL_NS = 5_000_000_000, 1_780_000_000_000_000_000  # time of the clock snapshot
PID, INCREMENTAL = 7, 64


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def message(*fields: tuple[int, Any]) -> bytes:
    """Encode (number, value): whole numbers, floats, texts, and messages as bytes."""
    made = []
    for number, value in fields:
        if isinstance(value, int):
            made.append(varint(number << 3) + varint(value))
        elif isinstance(value, float):
            made.append(varint(number << 3 | 1) + struct.pack("<d", value))
        else:
            raw = value.encode() if isinstance(value, str) else value
            made.append(varint(number << 3 | 2) + varint(len(raw)) + raw)
    return b"".join(made)


def annotation(value: Any, *name: tuple[int, Any]) -> bytes:
    if isinstance(value, bool):
        return message(*name, (2, int(value)))
    if isinstance(value, int):
        return message(*name, (4 if value < 0 else 3, value))
    if isinstance(value, float):
        return message(*name, (5, value))
    if isinstance(value, list):
        return message(*name, *((12, annotation(one)) for one in value))
    if isinstance(value, dict):
        return message(*name, *((11, annotation(one, (10, key))) for key, one in value.items()))
    return message(*name, (6, str(value)))


class Writer:
    """Writer of one sequence, with interned texts and a clock that counts from the previous packet."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.texts: dict[tuple[int, str], int] = {}
        self.tracks: dict[tuple[Any, ...], int] = {}
        self.begin()

    def begin(self) -> None:
        """Clear the state of the sequence and define its clocks."""
        self.texts.clear()
        self.now = BOOT_NS
        clocks = [
            message((1, 6), (2, BOOT_NS)),
            message((1, 1), (2, REAL_NS)),
            message((1, INCREMENTAL), (2, 0), (3, 1)),
        ]
        self.add((6, message(*((1, clock) for clock in clocks), (2, 6))), (13, 1))
        self.add((59, message((58, INCREMENTAL))))

    def add(self, *fields: tuple[int, Any]) -> None:
        self.packets.append(message((10, 1), *fields))

    def track(self, key: tuple[Any, ...], *fields: tuple[int, Any]) -> int:
        if key not in self.tracks:
            self.tracks[key] = len(self.tracks) + 1
            self.add((60, message((1, self.tracks[key]), *fields)))
        return self.tracks[key]

    def event(self, time_ns: int, track: int, kind: int, category: str = "", name: str = "", **args: Any) -> None:
        interned = []

        def number(kind: int, text: str) -> int:
            if (kind, text) not in self.texts:
                self.texts[kind, text] = len(self.texts) + 1
                interned.append((kind, message((1, self.texts[kind, text]), (2, text))))
            return self.texts[kind, text]

        fields: list[tuple[int, Any]] = [(9, kind), (11, track)]
        if kind == 1:
            fields += [(3, number(1, category)), (10, number(2, name))]
            fields += [(4, annotation(value, (1, number(3, key)))) for key, value in args.items()]
        self.add((8, time_ns - self.now), (11, message(*fields)), *([(12, message(*interned))] if interned else []))
        self.now = time_ns

    def bytes(self) -> bytes:
        return message(*((1, packet) for packet in self.packets))


def encoded(events: Iterable[dict[str, Any]]) -> Writer:
    """Return the complete events of a Chrome trace as slices, which must nest on their track."""
    complete = [event for event in events if event.get("ph") == "X"]
    origin = min(event["ts"] for event in complete)
    writer, edges = Writer(), []
    process = writer.track(("process",), (3, message((1, PID), (6, "python"))))
    for number, event in enumerate(complete):
        event["lane"] = number % 8 if event["cat"] == "kernel" else 0  # kernels on a stream may overlap
        begin = BOOT_NS + round((event["ts"] - origin) * 1000)
        end = begin + round(event["dur"] * 1000)
        edges += [(begin, 1, begin - end, event), (end, 0, -begin, event)]
    for number, (time_ns, begins, _, event) in enumerate(sorted(edges, key=lambda edge: edge[:3])):
        if number == len(edges) // 2:
            writer.begin()  # as after lost packets
            writer.now = BOOT_NS
        thread = (4, message((1, event["pid"]), (2, event["tid"]))) if isinstance(event["pid"], int) else (5, process)
        track = writer.track((event["pid"], event["tid"], event["cat"], event["lane"]), thread, (2, str(event["tid"])))
        kind = 1 if begins else 2
        writer.event(time_ns, track, kind, event["cat"], event["name"], **event.get("args", {}))
    return writer


def untimed(rows: Iterable[Any] | None) -> list[Any]:
    return sorted((row._replace(start_s=0, end_s=0) for row in rows or ()), key=str)


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("kineto_h200_step.json.gz", "plain"),
        ("kineto_h200_small2.json.gz", "gzip"),
        ("kineto_h200_small2.json.gz", "compressed packets"),
    ],
)
def test_perfetto_trace_equals_the_same_events_in_json(name: str, packed: str, tmp_path: Path) -> None:
    whole = json.loads(gzip.decompress((DATA / name).read_bytes()))
    content = encoded(whole["traceEvents"]).bytes()
    if packed == "compressed packets":
        content = message((1, message((50, zlib.compress(content)))))
    path = tmp_path / "trace.dat"
    path.write_bytes(gzip.compress(content) if packed == "gzip" else content)
    assert (found := recognised(path))
    assert found.name == "perfetto"
    want, got = read(DATA / name), read(path)
    assert (got.profiler, got.knows_operators) == ("perfetto", False)
    # Kernels of two streams may begin in the same nanosecond.
    both = got.kernels, want.kernels
    order, wanted = (np.lexsort((k.stream, np.round((k.start_s - k.start_s[0]) * 1e9))) for k in both)
    assert [*got.kernels.function.take(order)] == [*want.kernels.function.take(wanted)]
    later = want.kernels.start_s[0] - got.kernels.start_s[0]
    for column in ("start_s", "end_s", "launch_start_s", "launch_end_s"):
        shifted = getattr(got.kernels, column)[order] + later
        np.testing.assert_allclose(shifted, getattr(want.kernels, column)[wanted], rtol=0, atol=2e-9)
    for column in ("device", "stream", "thread", "in_graph"):
        np.testing.assert_array_equal(getattr(got.kernels, column)[order], getattr(want.kernels, column)[wanted])
    for part in ("ranges", "copies", "calls", "ops"):
        assert untimed(getattr(got, part)) == untimed(getattr(want, part))
    assert got.operators is not None
    assert want.operators is not None
    assert [*got.operators.signature] == [*want.operators.signature]
    assert (got.limitations, {*got.messages.values()}) == (want.limitations, {*want.messages.values()})
    assert got.job
    assert got.job.began_s
    assert abs(got.job.began_s - REAL_NS * 1e-9) < 0.1


def rocprofv3() -> Writer:
    """Return a step with a kernel, two copies and a range, under the names that rocprofv3 writes."""
    writer = Writer()
    process = writer.track(("process",), (3, message((1, PID))))
    thread = writer.track(("thread",), (5, process))
    compute, copies, back = (
        writer.track((name,), (2, name), (5, process))
        for name in (
            "COMPUTE AGENT [4] STREAM [2] (GPU)", "COPY to AGENT [4] STREAM [1] (GPU)",
            "COPY to AGENT [0] STREAM [1] (CPU)",
        )
    )  # fmt: skip

    def slice(begin_us: int, end_us: int, track: int, category: str, name: str, **args: Any) -> None:
        edges.append((begin_us, 1, track, category, name, args))
        edges.append((end_us, 2, track, category, name, args))

    edges: list[tuple[int, int, int, str, str, dict[str, Any]]] = []
    sizes = {"workgroup_size": 256, "grid_size": 4096, "group_segment_size": 512, "kernel_id": 3, "queue": 1}
    slice(0, 100, thread, "marker_api", "step", corr_id=9, tid=12)
    slice(10, 15, thread, "hip_api", "hipLaunchKernel", corr_id=1, tid=12)
    slice(11, 14, thread, "hsa_api", "hsa_signal_store", corr_id=5, tid=12)
    slice(20, 40, compute, "kernel_dispatch", "gemm", corr_id=1, agent="GPU-4", tid=12, **sizes)
    slice(42, 43, copies, "memory_copy", "H2D", corr_id=2, dst_agent="4", src_agent="0", copy_bytes=64, tid=12)
    slice(44, 45, back, "memory_copy", "D2H", corr_id=3, dst_agent="0", src_agent="4", copy_bytes=32, tid=12)
    for time_us, kind, track, category, name, args in sorted(edges, key=lambda edge: (edge[0], -edge[1])):
        writer.event(BOOT_NS + time_us * 1000, track, kind, category, name, **args)
    return writer


def test_trace_of_rocprofv3_has_launches_streams_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "1_results.pftrace").write_bytes(rocprofv3().bytes())
    trace = read(path)
    (kernel,) = trace.kernels
    assert (kernel.function.name, kernel.function.grid, kernel.function.shared_bytes) == ("gemm", None, 512)
    assert (kernel.device, kernel.stream, kernel.thread) == (4, 2, 12)
    assert kernel.end_s - kernel.start_s == pytest.approx(20e-6)
    assert kernel.start_s - (kernel.launch_start_s or 0) == pytest.approx(10e-6)
    assert [(copy.device, copy.stream, copy.bytes) for copy in trace.copies] == [(4, 1, 64), (4, 1, 32)]
    assert [one.name for one in trace.ranges] == ["step"]
    assert main(["analyze", str(path), "--table", "kernels"]) == 0
    assert "· perfetto · GPU 4 · 1 step of 1 kernels" in " ".join(capsys.readouterr().out.split())


def test_trace_without_kernels_and_ranges_is_refused_with_the_remedy(tmp_path: Path) -> None:
    writer = Writer()
    track = writer.track(("thread",), (4, message((1, PID), (2, 12))))
    writer.event(BOOT_NS, track, 1, "hip_api", "hipInit", corr_id=1)
    writer.event(BOOT_NS + 5, track, 2)
    (path := tmp_path / "a.pftrace").write_bytes(writer.bytes())
    with pytest.raises(ConfigError, match="holds no kernel and no range, but 1 other slice; record with"):
        read(path)


def test_slices_without_end_and_events_of_unknown_clocks_are_reported(tmp_path: Path) -> None:
    writer = rocprofv3()
    track = writer.track(("other",), (4, message((1, PID), (2, 13))))
    writer.event(BOOT_NS + 200_000, track, 1, "user", "never ends")
    writer.add((8, 5), (58, 99), (11, message((9, 1), (11, track), (23, "lost"))))
    (path := tmp_path / "a.pftrace").write_bytes(writer.bytes())
    said = " · ".join(read(path).limitations)
    assert "left out: 1 event without an end ('never ends' …)" in said
    assert "left out: 1 event of a clock that the file does not define" in said


def test_threads_of_sequences_without_tracks_are_known(tmp_path: Path) -> None:
    writer = Writer()
    writer.add((44, message((1, PID), (2, 12))))
    writer.event(BOOT_NS, 0, 1, "user", "step")
    writer.event(BOOT_NS + 5000, 0, 2)
    (path := tmp_path / "a.pftrace").write_bytes(writer.bytes())
    (only,) = read(path).ranges
    assert (only.name, only.thread) == ("step", 12)


NESTED = message((4, annotation(1, (10, "x"))))
for _ in range(30):
    NESTED = message((12, NESTED))


@pytest.mark.parametrize(
    ("content", "message_"),
    [
        (rocprofv3().bytes()[:-3], r"is truncated or damaged \(it ends inside a packet\)"),
        (message((1, b"\x08")), "is truncated or damaged"),
        (b"\x0a" + b"\xff" * 20, r"is truncated or damaged \(a number has over 10 bytes\)"),
        (b"\x0a" + varint(1 << 40), r"is truncated or damaged \(a packet of another kind or size\)"),
        (message((1, message((8, 5), (10, 1), (11, 5)))), "is truncated or damaged"),
        (message((1, message((8, 5), (11, message((9, 1), (4, NESTED)))))), "is nested over 8 levels deep"),
        (b"", "is empty: the trace was never written"),
    ],
)
def test_damaged_trace_is_refused(content: bytes, message_: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.pftrace").write_bytes(content)
    with pytest.raises(ConfigError, match=message_):
        read(path)


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    whole, draw = rocprofv3().bytes(), random.Random(0)
    path = tmp_path / "a.pftrace"
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed)
        said = ""
        try:
            read(path)
        except ConfigError as error:
            said = str(error)
        assert not said or said.startswith(f"{path} ")


def test_cyclic_parents_of_tracks_do_not_hang_the_reader(tmp_path: Path) -> None:
    writer = rocprofv3()
    writer.add((60, message((1, 50), (5, 51))))
    writer.add((60, message((1, 51), (5, 50))))
    writer.event(BOOT_NS + 200_000, 50, 1, "user", "a")
    writer.event(BOOT_NS + 201_000, 50, 2)
    (path := tmp_path / "a.pftrace").write_bytes(writer.bytes())
    assert [one.name for one in read(path).ranges] == ["step"]


def test_too_many_slices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_perfetto, "MOST_SLICES", 3)
    (path := tmp_path / "a.pftrace").write_bytes(rocprofv3().bytes())
    with pytest.raises(ConfigError, match="holds over 3 slices, the most that are read; record fewer steps"):
        read(path)
