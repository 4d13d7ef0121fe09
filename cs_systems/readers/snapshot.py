"""Reader of a CUDA memory snapshot file of PyTorch: `read(path) -> Snapshot`.

It reads the output of `torch.cuda.memory._dump_snapshot()`, or any pickle of `_snapshot()`, of any version. The file is
untrusted: `_unpickle` refuses every global, so that nothing in the file can run. Data that an older PyTorch
did not record is missing from the result, and `missing` lists it.

The program that takes the snapshot may write a JSON file next to the pickle, `FILE.json` for FILE, with data that the
snapshot lacks:

    {"schema_version": 1,
     "config": RunConfig.to_dict() or null,
     "max_allocated_bytes": torch.cuda.max_memory_allocated() since recording began, or null,
     "tensors": [{"kind": "parameter", "name": "layers.0.ffn.w1.weight", "address": 139838862917632, "bytes": 1048576,
                  "shape": [1024, 256], "dtype": "float32", "device": 0}, …]}

It has one entry for each tensor of the model that is alive when the snapshot is taken; `kind` is one of TENSOR_KINDS,
`address` the tensor's `data_ptr()`, `name` the parameter's name in the model (for optimizer state `name/exp_avg`).
Phases and layers are in the snapshot itself: `external_annotations` holds the `record_function` ranges if
`_record_memory_history` is called with `global_record_annotations`. `core.range_names` reads their names (`forward`,
`backward`, `block 3`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core.formats import PICKLE, Format
from cs_systems.core.validation import shown

SIDECAR_VERSION = 1
LONGEST_US = 1e15  # longest time in µs from the first to the last event, so that the page's ns fit into 63 bits
MOST_FRAMES = 2000  # longest stack; Python's own limit is 1,000
MOST_SIDECAR_BYTES = 1 << 24  # enough for a model with 60,000 tensors
TENSOR_KINDS = ("parameter", "gradient", "optimizer_state", "buffer", "input")
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "other")
# expandable segments grow and shrink by map and unmap, which count here as allocated and freed segments
_SAME_AS = {"segment_map": "segment_alloc", "segment_unmap": "segment_free", "free": "free_completed"}
_CODES = {name: ACTIONS.index(_SAME_AS.get(name, name)) for name in (*ACTIONS[:-1], *_SAME_AS)}
OTHER = ACTIONS.index("other")


class Frame(NamedTuple):
    """Line of a stack, in which the innermost frame comes first."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]


class Block(NamedTuple):
    """Piece of a segment; `bytes` is the allocated size and `requested_bytes` the requested one."""

    address: int
    bytes: int
    requested_bytes: int | None  # None: not recorded
    state: str  # "active_allocated", "active_pending_free" or "inactive"
    stack: int


class Segment(NamedTuple):
    """Memory that the allocator obtained from the device in one piece, with its blocks by address."""

    address: int
    bytes: int
    pool: str  # "small" or "large"
    stream: int
    private: bool  # whether it is in a separate memory pool, such as a CUDA graph's
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Events:
    """Events of the allocator, in order, as columns; `stack` indexes `Snapshot.stacks`."""

    action: array[int]  # index in ACTIONS
    address: array[int]
    bytes: array[int]  # the requested size; for a segment its size
    time_us: array[int]  # empty where not recorded
    stack: array[int]
    device_free_bytes: dict[int, int]  # event → free bytes of the device; only for `oom` events
    metadata: array[int]  # index in Snapshot.metadata of the text set by `_set_memory_metadata` at that time

    def __len__(self) -> int:
        return len(self.action)


class Settings(NamedTuple):
    """Allocator settings that decide the size of a block."""

    roundup_divisions: dict[int, int]  # power of two in bytes → number of divisions up to the next one
    max_split_bytes: int | None  # None: no limit
    expandable_segments: bool


class Annotation(NamedTuple):
    """Start or end of a named range, by the clock of the events."""

    time_us: int
    begins: bool
    name: str


class Tensor(NamedTuple):
    """Tensor named in the sidecar file."""

    kind: str
    name: str
    address: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Sidecar:
    """Contents of the JSON file next to a snapshot."""

    config: RunConfig | None
    max_allocated_bytes: int | None
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Snapshot:
    """Part of a snapshot that belongs to one device.

    `stacks[0]` is the empty stack: not recorded. `missing` lists the data that is unknown.
    """

    source: str
    device: int
    devices: tuple[int, ...]  # all devices in the file
    segments: tuple[Segment, ...]  # by address
    events: Events
    stacks: tuple[Stack, ...]
    metadata: tuple[str, ...]  # the first is the empty text
    annotations: tuple[Annotation, ...]
    settings: Settings
    sidecar: Sidecar | None
    missing: tuple[str, ...]


def read(path: Path, device: int | None = None) -> Snapshot:
    """Return the snapshot in a file, gzipped or not.

    Args:
        path: The snapshot.
        device: The device to read; required where the file holds several.

    Raises:
        ConfigError: The file is not a usable snapshot; the message gives the cause and the remedy.
    """
    (found,) = _read(path, lambda devices: [_chosen(path, devices, device)])
    return found


def read_all(path: Path) -> list[Snapshot]:
    """Return the snapshots of all devices in a file. Raises ConfigError like `read`."""
    return _read(path, lambda devices: devices)


def _read(path: Path, choose: Callable[[list[int]], list[int]]) -> list[Snapshot]:
    from cs_systems.readers._unpickle import load

    data = load(path, _HOW)
    if isinstance(data, list) and all(isinstance(segment, dict) for segment in data):  # torch.cuda.memory_snapshot()
        data = {"segments": data}
    if not isinstance(data, dict) or not {"segments", "device_traces"} & {*data}:
        raise ConfigError(f"{path} is a pickle, but not a memory snapshot; write one with {_HOW}")
    try:
        devices = _devices(path, data)
        return [_snapshot(path, data, device, devices) for device in choose(devices)]
    except RecursionError:
        raise ConfigError(
            f"{path} is not a snapshot that PyTorch wrote: values are nested too deep; write one with {_HOW}"
        ) from None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is not a snapshot that PyTorch wrote: {_cause(error)}; write one with {_HOW}"
        ) from None


def _cause(error: Exception) -> str:
    """Return a readable description of an error in a file's data, without Python's internal messages."""
    if isinstance(error, KeyError):
        return f"an entry lacks {error}"
    return str(error) if isinstance(error, ValueError) else "a value has another type or size"


_RENAME = "rename that file, which only adds details"
_BESIDE = "which is read because it is next to the snapshot,"
_HOW = "torch.cuda.memory._record_memory_history() before and torch.cuda.memory._dump_snapshot(FILE) after the steps"


def _devices(path: Path, data: dict[str, Any]) -> list[int]:
    """Return the devices that have memory or events, in order."""
    segments, traces = data.get("segments") or [], data.get("device_traces") or []
    _refuse_repeated("segment", segments)
    _refuse_repeated("list of blocks", [s["blocks"] for s in segments if "blocks" in s])
    _refuse_repeated("list of events", traces)
    # PyTorch 2.4 puts all annotations among the events of device 0
    recorded = {n for n, trace in enumerate(traces) if any(event["action"] != "user_defined" for event in trace)}
    devices = sorted({_count(s.get("device", 0)) for s in segments} | recorded)
    if not devices:
        raise ConfigError(f"{path} holds no memory of a CUDA device; record on a GPU, and call {_HOW}")
    return devices


def _chosen(path: Path, devices: Sequence[int], device: int | None) -> int:
    if device is None and len(devices) > 1:
        raise ConfigError(f"{path} holds {len(devices)} devices; choose device {_listed(devices)}", "device")
    if device is not None and device not in devices:
        raise ConfigError(f"{path} holds no data of GPU {device}; choose device {_listed(devices)}", "device")
    return devices[0] if device is None else device


def _snapshot(path: Path, data: dict[str, Any], device: int, devices: Sequence[int]) -> Snapshot:
    segments, traces = data.get("segments") or [], data.get("device_traces") or []
    stacks = _Stacks(path)
    own = [s for s in segments if s.get("device", 0) == device]
    made = tuple(_segment(s, stacks) for s in own)
    trace = traces[device] if device < len(traces) else []
    settings = _settings(data.get("allocator_settings") or {}, _is_expandable(own, trace))
    events, metadata = _events(trace, stacks)
    annotations = data.get("external_annotations") or []
    return Snapshot(
        source=str(path),
        device=device,
        devices=tuple(devices),
        segments=tuple(sorted(made)),
        events=events,
        stacks=tuple(stacks.known),
        metadata=metadata,
        annotations=tuple(sorted(map(_annotation, _of_device(annotations, device)), key=lambda a: a.time_us)),
        settings=settings,
        sidecar=_sidecar(Path(f"{path}.json"), device, devices),
        missing=tuple(_missing(data, own, events, len(stacks.known) > 1)),
    )


def _listed(devices: Sequence[int]) -> str:
    return " or ".join(map(str, devices))


def _refuse_repeated(what: str, values: Iterable[Any]) -> None:
    """Raise ValueError if one object occurs in several places.

    A few bytes could otherwise require any amount of work.
    """
    values = list(values)
    if len({*map(id, values)}) < len(values):
        raise ValueError(f"the same {what} occurs twice")


class _Stacks:
    """Map from each distinct stack to a number.

    PyTorch shares the frames' dictionaries between stacks, so that most stacks are recognised by identity.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: list[Stack] = [()]
        self._by_content: dict[Stack, int] = {(): 0}
        self._by_identity: dict[tuple[int, ...], int] = {(): 0}
        self._kept: list[Any] = []  # keeps identified objects alive, so that no id is reused

    def number(self, frames: Sequence[Mapping[str, Any]]) -> int:
        if len(frames) > MOST_FRAMES:
            raise ConfigError(
                f"{self._path} has a stack of {len(frames)} frames, over the limit of {MOST_FRAMES}; record with less "
                "recursion, or with context=None in _record_memory_history"
            )
        identity = tuple(map(id, frames))
        number = self._by_identity.get(identity)
        if number is None:
            stack = tuple(Frame(_text(f["filename"]), int(f["line"]), _text(f["name"])) for f in frames)
            number = self._by_content.get(stack)
            if number is None:
                number = self._by_content[stack] = len(self.known)
                self.known.append(stack)
            self._by_identity[identity] = number
            self._kept.append(frames)
        return number


def _segment(segment: Mapping[str, Any], stacks: _Stacks) -> Segment:
    blocks, at = [], _count(segment["address"])
    for block in segment["blocks"]:
        history = block.get("history") or [{}]  # written by PyTorch 2.0
        frames = block.get("frames") or history[0].get("frames") or ()
        requested = block.get("requested_size", history[0].get("real_size"))
        size, address = _count(block["size"]), _count(block.get("address", at))
        asked = None if requested is None else _count(requested)
        blocks.append(Block(address, size, asked, _state(block["state"]), stacks.number(frames)))
        at += size
    return Segment(
        address=_count(segment["address"]),
        bytes=_count(segment["total_size"]),
        pool=_text(segment.get("segment_type", "large")),
        stream=_count(segment.get("stream", 0)),
        private=tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0),
        blocks=tuple(blocks),
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{shown(value)} is not a size, address or stream")
    return int(value)


def _state(value: Any) -> str:
    state = "active_pending_free" if value == "active_awaiting_free" else value
    if not isinstance(state, str) or state not in ("active_allocated", "active_pending_free", "inactive"):
        raise ValueError(f"{shown(value)} is an unknown state of a block")
    return state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not text")
    return value


def _is_expandable(segments: Iterable[Mapping[str, Any]], trace: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether segments are expandable, by their traits: PyTorch versions differ in the settings they write."""
    if any(segment.get("is_expandable") for segment in segments):
        return True
    return any(event["action"] in ("segment_map", "segment_unmap") for event in trace)


def _settings(settings: Mapping[str, Any], expandable: bool) -> Settings:
    divisions = settings.get("roundup_power2_divisions") or {}
    limit = int(settings.get("max_split_size") or -1)
    return Settings(
        roundup_divisions={int(megabytes) * 2**20: int(count) for megabytes, count in divisions.items() if count},
        max_split_bytes=limit if limit > 0 else None,
        expandable_segments=expandable or bool(settings.get("expandable_segments", False)),
    )


def _events(trace: list[Any], stacks: _Stacks) -> tuple[Events, tuple[str, ...]]:
    """Return the events as columns, and the texts that `metadata` indexes.

    Each event is released once read, for there may be millions.
    """
    action, stack, metadata = array("b"), array("i"), array("i")
    texts = {"": 0}
    address, size, time_us = array("q"), array("q"), array("q")
    device_free_bytes: dict[int, int] = {}
    number = stacks.number
    timed = bool(trace) and all("time_us" in event for event in (trace[0], trace[-1]))
    for index, event in enumerate(trace):
        action.append(_CODES.get(event.pop("action"), OTHER))  # pop, so that no event is counted twice
        address.append(event.get("addr", 0))
        size.append(event.get("size", 0))
        stack.append(number(event.get("frames") or ()))
        metadata.append(texts.setdefault(str(event.get("user_metadata") or ""), len(texts)))
        if timed:
            time_us.append(event["time_us"])
        if "device_free" in event:
            device_free_bytes[index] = _count(event["device_free"])
        trace[index] = None
    if any(min(column, default=0) < 0 for column in (address, size)):
        raise ValueError("a size or an address is negative")
    if max(time_us, default=0) - min(time_us, default=0) > LONGEST_US:
        raise ValueError("the times of two events are over 30 years apart")
    return Events(action, address, size, time_us, stack, device_free_bytes, metadata), tuple(texts)


def _of_device(annotations: Iterable[Mapping[str, Any]], device: int) -> Iterable[Mapping[str, Any]]:
    return (a for a in annotations if a.get("device", device) in (device, -1))


def _annotation(annotation: Mapping[str, Any]) -> Annotation:
    return Annotation(int(annotation["time_us"]), annotation["stage"] == "START", _text(annotation["name"]))


def _missing(data: Mapping[str, Any], segments: Sequence[Any], events: Events, stacks: bool) -> Iterable[str]:
    if not segments:
        yield "no segments: memory allocated before recording began is not counted, and fragmentation is unknown"
    elif not all("requested_size" in b or "history" in b for s in segments for b in s["blocks"]):
        yield "no requested sizes of blocks (an older PyTorch): the memory lost by rounding is unknown"
    if not len(events):
        yield f"no events: the peak and the timeline are unknown, only the memory at the end is known; call {_HOW}"
    elif not events.time_us:
        yield "no times of events (an older PyTorch): the timeline counts events"
    if not stacks:
        yield "no stacks (context=None, or an older PyTorch): the code that allocated memory is unknown"
    if "external_annotations" not in data:
        yield "no annotations (an older PyTorch): phases are inferred from stacks alone"


def _sidecar(path: Path, device: int, devices: Sequence[int]) -> Sidecar | None:
    if not path.is_file():
        return None
    if path.stat().st_size > MOST_SIDECAR_BYTES:
        raise ConfigError(
            f"{path}, {_BESIDE} has {path.stat().st_size:,} bytes, over the limit of {MOST_SIDECAR_BYTES:,}; {_RENAME}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] != SIDECAR_VERSION:
            version = shown(data["schema_version"])
            raise ConfigError(
                f"{path}, {_BESIDE} has schema_version {version}, but this version of cs-systems reads "
                f"{SIDECAR_VERSION}; use the version that wrote it, or {_RENAME}"
            )
        tensors = tuple(_tensor(t) for t in data["tensors"] if t.get("device", 0) == device)
        if unknown := {t.kind for t in tensors} - {*TENSOR_KINDS}:
            raise ConfigError(
                f"{path}, {_BESIDE} has a tensor of the unknown kind {shown(unknown.pop())}; use one of "
                f"{', '.join(TENSOR_KINDS)}, or {_RENAME}"
            )
        try:
            config = RunConfig.from_dict(data["config"]) if data.get("config") else None
        except ConfigError as error:
            what, _, _ = str(error).partition("; ")  # omit its remedy, which is for a config that the user wrote
            raise ConfigError(
                f"{path}, {_BESIDE} has a config that this version of cs-systems cannot read ({what}); use the version "
                f"that wrote it, or {_RENAME}"
            ) from None
        # the sidecar does not say which device this is for
        most = data.get("max_allocated_bytes") if len(devices) == 1 else None
        return Sidecar(config, None if most is None else _count(most), tensors)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}, {_BESIDE} does not have the form that cs-systems reads ({_cause(error)}); {_RENAME}"
        ) from None


def _tensor(fields: Mapping[str, Any]) -> Tensor:
    kind, name, dtype = (_text(fields[field]) for field in ("kind", "name", "dtype"))
    return Tensor(
        kind, name, _count(fields["address"]), _count(fields["bytes"]), (*map(_count, fields["shape"]),), dtype
    )


FORMAT = Format(
    title="a pickle, the format of memory snapshots",
    matches=lambda head, path: PICKLE.match(head),
    suffixes=(".pickle", ".pickle.gz", ".pkl", ".pkl.gz"),
    command="snapshot",
    holds="memory",
    read=read_all,
    record="`torch.cuda.memory._record_memory_history()` before and `torch.cuda.memory._dump_snapshot(FILE)` after the "
    "steps",
    lacks="what was allocated before recording began, but for its size",
)
