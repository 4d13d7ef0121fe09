"""Reader of memory snapshots: files that are refused, missing data, the choice of a device."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_systems.config import ConfigError
from cs_systems.readers import snapshot as module
from cs_systems.readers.snapshot import read

Write = Callable[..., Path]


class Calls:
    """Object that pickles as a call, which a plain unpickler would run."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def stack_global(module: str, name: str) -> bytes:
    """Return a pickle of protocol 4 that names a global by two texts on the stack, and calls it."""
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, "touch owned"))
    return b"\x80\x04" + texts[: -(2 + len("touch owned"))] + b"\x93" + texts[-(2 + len("touch owned")) :] + b"\x85R."


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pickle.dumps(Calls(os.system, "touch owned")), "posix.system"),
        (pickle.dumps({"segments": [], "device_traces": [[Calls(os.system, "touch owned")]]}), "posix.system"),
        (pickle.dumps({"segments": Calls(eval, "1")}, protocol=2), "__builtin__.eval"),
        (stack_global("os", "system"), "os.system"),
        (b"\x80\x02cos\nsystem\nX\x0b\x00\x00\x00touch owned\x85R.", "os.system"),
        (b"\x80\x02(X\x0b\x00\x00\x00touch ownedios\nsystem\n.", "os.system"),
        (b"\x80\x04\x8c\x09a file idQ.", r"a persistent id \('a file id'\)"),
        (stack_global("o\x1b[2Js", "system"), r"'o\\x1b\[2Js.system'"),
        (pickle.dumps(Path("x")), "pathlib.PosixPath"),  # harmless, but refused as well
    ],
)
def test_pickle_with_code_is_refused(data: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"was not loaded: it refers to {name}, and a memory .*; write one with"):
        read(path)
    assert not (tmp_path / "owned").exists()


def test_planted_code_runs_in_plain_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(stack_global("os", "system"))
    assert (tmp_path / "owned").exists()


def test_model_checkpoint_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"holds tensors, as a checkpoint of torch.save does; give a memory snapshot"):
        read(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: the snapshot was never written"),
        (b'{"segments": []}', "is not a pickle file, as every memory snapshot of PyTorch is; write one with"),
        (b"PK\x03\x04 torch.save", "is not a pickle file, as every memory snapshot of PyTorch is"),
        (
            pickle.dumps({"segments": [], "device_traces": [[], []]}),
            "no memory of a CUDA device; record on a GPU",
        ),
        (pickle.dumps([1, 2, 3])[:-1], "is truncated; copy it again, or dump it again"),
        (pickle.dumps({"weights": [1]}), "is a pickle, but not a memory snapshot"),
        (pickle.dumps(7), "is a pickle, but not a memory snapshot"),
        (b"\x80\x04]\x94(e}u.", "is a damaged pickle"),
        (gzip.compress(pickle.dumps([1, 2, 3]), mtime=0)[:-12], "is truncated"),
        (
            pickle.dumps({"segments": [{"device": 0}], "device_traces": []}),
            "PyTorch wrote: an entry lacks 'address'; write one with",
        ),
        (pickle.dumps({"segments": [{"address": 0, "blocks": [{"size": -1}]}]}), "-1 is not a size, address or stream"),
        (pickle.dumps({"segments": [{"address": "0x1"}]}), "'0x1' is not a size, address or stream"),
        (
            pickle.dumps({"segments": [{"address": 0, "blocks": [{"size": 512, "state": "lost"}]}]}),
            "'lost' is an unknown state of a block",
        ),
        (
            pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 0, "size": -1}]]}),
            "a size or an address is negative",
        ),
        (
            pickle.dumps({"device_traces": [[{"action": "oom"}]], "allocator_settings": {"max_split_size": "all"}}),
            "PyTorch wrote: invalid literal",
        ),
        (pickle.dumps([1, 2]), "is a pickle, but not a memory snapshot; write one with torch.cuda.memory"),
        (
            pickle.dumps({"segments": 3, "device_traces": []}),
            "is not a snapshot that PyTorch wrote: a value has another type",
        ),
        (
            pickle.dumps({"segments": [{"blocks": []}], "device_traces": [[{"action": "alloc"}]]}),
            "is not a snapshot that PyTorch wrote: an entry lacks '[a-z_]+'; write one with torch.cuda.memory",
        ),
        (pickle.dumps({"segments": [], "device_traces": [["alloc"]]}), "is not a snapshot that PyTorch wrote"),
        (
            pickle.dumps({"device_traces": [[{"action": "alloc", "frames": [{}] * 2001}]]}),
            r"file.pickle has a stack of 2001 frames, over the limit of 2000; record with less recursion, or with con",
        ),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 70, "size": 1}]]}),
            "a value has another type or size",
        ),
    ],
)
def test_invalid_snapshot_is_refused_with_remedy(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pickle"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; give a snapshot file"):
        read(tmp_path / "missing.pickle")
    with pytest.raises(ConfigError, match=r"is a folder; give a snapshot file$"):
        read(tmp_path)
    for name in ("a.pickle.gz", "b.pkl", "c.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"is a folder; give one of\n  \S+/a\.pickle\.gz\n  \S+/b\.pkl$"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="/dev/null is not a plain file; give a snapshot file"):
        read(Path("/dev/null"))


def test_file_beyond_memory_is_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "huge.pickle"
    path.write_bytes(b"\x80\x04")
    os.truncate(path, 1 << 42)  # a sparse file: 4 TiB that take no disk space
    with pytest.raises(ConfigError, match=r"4096.0 GiB and needs about .* record fewer events \(max_entries of"):
        read(path)


def test_pickle_that_requests_all_memory_is_refused(tmp_path: Path) -> None:
    """A few bytes request 2³² entries in the unpickler's memo."""
    path = tmp_path / "greedy.pickle"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    with pytest.raises(ConfigError, match="needs more memory than is free, or is damaged"):
        read(path)


def test_truncated_snapshot_is_refused(snapshot_path: Path, tmp_path: Path) -> None:
    whole = gzip.decompress(snapshot_path.read_bytes())
    path = tmp_path / "cut.pickle"
    for length in range(1, len(whole), len(whole) // 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"is truncated|is a damaged pickle"):
            read(path)


def test_real_snapshot_is_read(snapshot_path: Path) -> None:
    found = read(snapshot_path)
    assert (found.device, found.devices, found.missing) == (0, (0,), ())
    assert (len(found.events), len(found.segments), len(found.annotations)) == (1356, 47, 8)
    assert sum(s.bytes for s in found.segments) == 236_978_176
    first = found.stacks[found.events.stack[0]]
    assert (first[0].function, first[4].file, first[4].line) == ("embedding", "train.py", 22)


def test_device_option_selects_one_of_two(write_snapshot: Write) -> None:
    segment = {"address": 4096, "total_size": 512, "blocks": [{"size": 512, "state": "active_allocated"}]}
    path = write_snapshot(
        {"segments": [segment | {"device": 2}], "device_traces": [[{"action": "oom", "size": 9}], []]}
    )
    with pytest.raises(ConfigError, match="holds 2 devices; choose device 0 or 2"):
        read(path)
    with pytest.raises(ConfigError, match="holds no data of GPU 1; choose device 0 or 2"):
        read(path, device=1)
    assert len(read(path, device=0).events) == 1
    assert len(read(path, device=2).segments) == 1


def test_snapshot_of_older_pytorch_lists_missing_data(write_snapshot: Write) -> None:
    """PyTorch 2.0 writes sizes in a history, and no block addresses, times, annotations or settings."""
    frames = [{"filename": "a.py", "line": 3, "name": "f"}]
    blocks = [
        {"size": 1024, "state": "active_allocated", "history": [{"addr": 4096, "real_size": 1000, "frames": frames}]},
        {"size": 512, "state": "active_awaiting_free", "history": [{"addr": 5120, "real_size": 5, "frames": frames}]},
    ]
    found = read(write_snapshot({"segments": [{"address": 4096, "total_size": 1536, "blocks": blocks}]}))
    first, second = found.segments[0].blocks
    assert (first.address, first.requested_bytes, found.stacks[first.stack][0].line) == (4096, 1000, 3)
    assert (second.address, second.state) == (5120, "active_pending_free")
    missing = "\n".join(found.missing)
    assert "no events: the peak and the timeline are unknown" in missing
    assert "no annotations" in missing


def test_list_of_segments_is_read_without_events(write_snapshot: Write) -> None:
    found = read(write_snapshot([{"address": 4096, "total_size": 512, "blocks": [{"size": 512, "state": "inactive"}]}]))
    assert len(found.segments) == 1
    assert any("no requested sizes of blocks" in message for message in found.missing)
    assert any("no stacks" in message for message in found.missing)


def test_events_without_segments_list_missing_data(write_snapshot: Write) -> None:
    found = read(write_snapshot({"device_traces": [[{"action": "alloc", "addr": 4096, "size": 100}]]}))
    assert any("no segments: memory allocated before recording" in message for message in found.missing)
    assert any("no times of events" in message for message in found.missing)


def test_sidecar_is_read_and_checked(snapshot_path: Path, tmp_path: Path) -> None:
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
        (
            data | {"schema_version": 2},
            "has schema_version 2, but this version of cs-systems reads 1; use the version that wrote it, or rename",
        ),
        (
            data | {"config": {"batch_size": 2, "of_later": 1}},
            rf"{beside}, which is read because .*, has a config that this version of cs-systems cannot read "
            r"\(RunConfig has no field 'of_later'\); use the version that wrote it, or rename that file",
        ),
        (
            data | {"tensors": [tensor | {"kind": "cache"}]},
            "has a tensor of the unknown kind 'cache'; use one of parameter, gradient, .*, or rename that file",
        ),
        (
            data | {"tensors": [{"kind": "parameter"}]},
            "does not have the form that cs-systems reads .an entry lacks 'name'.; rename that file",
        ),
        ([], "does not have the form that cs-systems reads .a value has another type or size.; rename"),
    ):
        beside.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_equal_stacks_are_shared(snapshot_path: Path) -> None:
    """Equal frames, and frames that are one object, become one stack."""
    frame = {"filename": "a.py", "line": 1, "name": "f"}
    stacks = module._Stacks(Path())
    shared = [frame, frame]
    assert [stacks.number(s) for s in (shared, [dict(frame), dict(frame)], [frame], [])] == [1, 1, 2, 0]
    assert len(read(snapshot_path).stacks) == 22
