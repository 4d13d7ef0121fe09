"""Reading a memory snapshot: what is refused, what is missing, what is chosen. The real one comes from one H200."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import ConfigError
from cs_systems.snapshots import snapshot as module
from cs_systems.snapshots.snapshot import read

Write = Callable[..., Path]


class Calls:
    """Pickles as a call: what unpickling it without care would run."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def stack_global(module: str, name: str) -> bytes:
    """A pickle of protocol 4 whose global is named by two texts of the stack, and then called."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, "touch owned"))
    return b"\x80\x04" + texts[: -(2 + len("touch owned"))] + b"\x93" + texts[-(2 + len("touch owned")) :] + b"\x85R."


@pytest.mark.parametrize(
    ("data", "asked"),
    [
        (pickle.dumps(Calls(os.system, "touch owned")), "posix.system"),
        (pickle.dumps({"segments": [], "device_traces": [[Calls(os.system, "touch owned")]]}), "posix.system"),
        (pickle.dumps({"segments": Calls(eval, "1")}, protocol=2), "__builtin__.eval"),
        (stack_global("os", "system"), "os.system"),
        (b"\x80\x02cos\nsystem\nX\x0b\x00\x00\x00touch owned\x85R.", "os.system"),
        (b"\x80\x02(X\x0b\x00\x00\x00touch ownedios\nsystem\n.", "os.system"),
        (b"\x80\x04\x8c\x09a file idQ.", r"a persistent id \('a file id'\)"),
        (stack_global("o\x1b[2Js", "system"), r"'o\\x1b\[2Js.system'"),
        (pickle.dumps(Path("x")), "pathlib.PosixPath"),  # harmless, and refused as well
    ],
)
def test_a_pickle_with_code_is_refused(
    data: bytes, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"was refused: it asks for {asked}, .*nothing of it was run"):
        read(path)
    assert not (tmp_path / "owned").exists()


def test_the_planted_code_would_run_without_care(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(stack_global("os", "system"))
    assert (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: the snapshot was not written"),
        (b'{"segments": []}', "is not a pickle: write a memory snapshot with"),
        (b"PK\x03\x04 torch.save", "is not a pickle"),
        (pickle.dumps({"segments": [], "device_traces": [[], []]}), "holds no memory of a CUDA device: on a CPU"),
        (pickle.dumps([1, 2, 3])[:-1], "is cut off: dump it again"),
        (pickle.dumps({"weights": [1]}), "is a pickle, but no memory snapshot"),
        (pickle.dumps(7), "is a pickle, but no memory snapshot"),
        (b"\x80\x04]\x94(e}u.", "is a damaged pickle"),
        (gzip.compress(pickle.dumps([1, 2, 3]), mtime=0)[:-12], "is cut off"),
        (pickle.dumps({"segments": [{"device": 0}], "device_traces": []}), "KeyError: 'address'"),
        (pickle.dumps({"segments": [{"address": 0, "blocks": [{"size": -1}]}]}), "-1 is no size, address or stream"),
        (pickle.dumps({"segments": [{"address": "0x1"}]}), "'0x1' is no size, address or stream"),
        (
            pickle.dumps({"segments": [{"address": 0, "blocks": [{"size": 512, "state": "lost"}]}]}),
            "'lost' is no state of a block",
        ),
        (
            pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 0, "size": -1}]]}),
            "a size or an address is negative",
        ),
        (
            pickle.dumps({"device_traces": [[{"action": "oom"}]], "allocator_settings": {"max_split_size": "all"}}),
            "ValueError: invalid literal",
        ),
        (pickle.dumps([1, 2]), "is a pickle, but no memory snapshot: write one with torch.cuda.memory"),
        (pickle.dumps({"segments": 3, "device_traces": []}), "is no snapshot as PyTorch writes it: TypeError"),
        (pickle.dumps({"segments": [], "device_traces": [["alloc"]]}), "is no snapshot as PyTorch writes it"),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 70, "size": 1}]]}),
            "OverflowError",
        ),
    ],
)
def test_what_is_no_snapshot_is_said(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pickle"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there: give the file of a snapshot"):
        read(tmp_path / "missing.pickle")
    with pytest.raises(ConfigError, match="is a folder"):
        read(tmp_path)


def test_more_than_memory_holds_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.pickle"
    path.write_bytes(b"\x80\x04")
    os.truncate(path, 1 << 42)  # sparse: 4 TiB on no disk
    with pytest.raises(ConfigError, match=r"4096.0 GiB and would need about .* record fewer events \(max_entries\)"):
        read(path)


def test_a_pickle_that_asks_for_all_memory_gets_none(tmp_path: Path) -> None:
    """A few bytes that make the unpickler's memo of 2³² entries."""
    path = tmp_path / "greedy.pickle"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    with pytest.raises(ConfigError, match="asks for more memory than this machine has, or than a snapshot"):
        read(path)


def test_cut_off_anywhere_is_an_error_and_never_an_answer(snapshot_path: Path, tmp_path: Path) -> None:
    whole = gzip.decompress(snapshot_path.read_bytes())
    path = tmp_path / "cut.pickle"
    for length in range(1, len(whole), len(whole) // 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"is cut off|is a damaged pickle"):
            read(path)


def test_the_real_snapshot(snapshot_path: Path) -> None:
    found = read(snapshot_path)
    assert (found.device, found.devices, found.missing) == (0, (0,), ())
    assert (len(found.events), len(found.segments), len(found.annotations)) == (1356, 47, 8)
    assert sum(s.bytes for s in found.segments) == 236_978_176
    first = found.stacks[found.events.stack[0]]
    assert (first[0].function, first[4].file, first[4].line) == ("embedding", "train.py", 22)


def test_several_devices_are_told_apart(write_snapshot: Write) -> None:
    segment = {"address": 4096, "total_size": 512, "blocks": [{"size": 512, "state": "active_allocated"}]}
    path = write_snapshot(
        {"segments": [segment | {"device": 2}], "device_traces": [[{"action": "oom", "size": 9}], []]}
    )
    with pytest.raises(ConfigError, match="holds 2 devices: choose one with --device 0 or 2"):
        read(path)
    with pytest.raises(ConfigError, match="holds no device 1: choose --device 0 or 2"):
        read(path, device=1)
    assert len(read(path, device=0).events) == 1
    assert len(read(path, device=2).segments) == 1


def test_an_older_pytorch_gives_what_it_has(write_snapshot: Write) -> None:
    """PyTorch 2.0: sizes in a history, no addresses of blocks, no times, no annotations, no settings."""
    frames = [{"filename": "a.py", "line": 3, "name": "f"}]
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": [{"addr": 4096, "real_size": 1000, "frames": frames}]},
        {"size": 512, "state": "active_awaiting_free", "history": [{"addr": 5120, "real_size": 5, "frames": frames}]},
    ]
    found = read(write_snapshot({"segments": [{"address": 4096, "total_size": 1536, "blocks": blocks}]}))
    first, second = found.segments[0].blocks
    assert (first.address, first.requested_bytes, found.stacks[first.stack][0].line) == (4096, 1000, 3)
    assert (second.address, second.state) == (5120, "active_pending_free")
    said = "\n".join(found.missing)
    assert "no events: the peak and the timeline are not known" in said
    assert "no annotations" in said


def test_a_list_of_segments_is_a_snapshot_without_events(write_snapshot: Write) -> None:
    found = read(write_snapshot([{"address": 4096, "total_size": 512, "blocks": [{"size": 512, "state": "inactive"}]}]))
    assert len(found.segments) == 1
    assert any("no requested sizes of blocks" in said for said in found.missing)
    assert any("no stacks" in said for said in found.missing)


def test_events_without_segments_say_what_is_missing(write_snapshot: Write) -> None:
    found = read(write_snapshot({"device_traces": [[{"action": "alloc", "addr": 4096, "size": 100}]]}))
    assert any("no segments: what was allocated before recording" in said for said in found.missing)
    assert any("no times of events" in said for said in found.missing)


def test_a_recorder_can_leave_more_beside_it(snapshot_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    path.write_bytes(snapshot_path.read_bytes())
    tensor = {"kind": "parameter", "name": "w", "address": 5, "bytes": 4, "shape": [1], "dtype": "float32", "device": 0}
    beside = Path(f"{path}.json")
    data = {"schema_version": 1, "config": {"batch_size": 2}, "max_allocated_bytes": 7, "tensors": [tensor]}
    beside.write_text(json.dumps(data))
    sidecar = read(path).sidecar
    assert sidecar is not None
    assert (sidecar.tensors[0].name, sidecar.max_allocated_bytes) == ("w", 7)
    assert sidecar.config is not None
    assert sidecar.config.batch_size == 2
    for wrong, message in (
        (data | {"schema_version": 2}, "has version 2, this reads 1"),
        (
            data | {"tensors": [tensor | {"kind": "cache"}]},
            "names a tensor's kind 'cache': known are parameter, gradient",
        ),
        (data | {"tensors": [{"kind": "parameter"}]}, "is not what a recorder leaves beside a snapshot: remove it"),
        ([], "is not what a recorder leaves"),
    ):
        beside.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_stacks_are_shared(snapshot_path: Path) -> None:
    """Frames that are equal, and frames that are one object, become one stack."""
    frame = {"filename": "a.py", "line": 1, "name": "f"}
    stacks = module._Stacks()
    shared = [frame, frame]
    assert [stacks.number(s) for s in (shared, [dict(frame), dict(frame)], [frame], [])] == [1, 1, 2, 0]
    assert len(read(snapshot_path).stacks) == 22
