"""Identity of a trace in a distributed job: its rank, and what the profiler recorded of each collective call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cs_systems.core.collectives import BUS_FACTORS

_RANK = re.compile(r"(?<![a-z])rank[-_. =:#]?(\d{1,6})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
# word in a name of torch.distributed, NCCL, RCCL or gloo → the collective; the first match counts
_KINDS = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send_recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
# Pattern of the name of a kernel that communicates.
COLLECTIVE = re.compile(
    r"nccl|rccl|nvshmem|msccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem|symm_mem|"
    r"cross_device_reduce",
    re.IGNORECASE,
)
PAIRWISE = ("send_recv", "send", "recv")  # between two ranks, without the rest of the group
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # end on all ranks at once
FROM_ONE = ("broadcast", "scatter")  # the source may go on before the others have received
ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "complexfloat"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("byte", "char", "bool"), 1),
}


@dataclass(frozen=True)
class Job:
    """Identity of a traced process in its job; a field is None if the file lacks it."""

    rank: int | None = None
    world_size: int | None = None
    host: str | None = None
    began_s: float | None = None  # host time of the trace's origin, in seconds since 1970


class Message(NamedTuple):
    """Call of a collective as described by torch.distributed; a field is None if the file lacks it."""

    name: str
    group: str  # name and ranks of the process group; "" if unknown
    ranks: int | None  # number of ranks in the group
    sequence: int | None  # number of the call in its group
    in_elements: int | None
    out_elements: int | None
    dtype: str | None

    @property
    def size_bytes(self) -> int | None:
        """Size as defined in `core.collectives`, from the part of the buffer that each rank holds."""
        name, each = kind(self.name), _element_bytes(self.dtype)
        shard = {"all_gather": self.in_elements, "reduce_scatter": self.out_elements}
        if name in shard:
            part, times = shard[name], self.ranks
        else:
            part, times = (self.in_elements or self.out_elements), 1
        return part * times * each if name in BUS_FACTORS and part and times and each else None


def kind(name: str) -> str:
    """Return the collective of a kernel, range or call of torch.distributed, by its name; `other` if unknown."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((known for word, known in _KINDS.items() if word in plain), "other")


def _element_bytes(dtype: str | None) -> int | None:
    name = (dtype or "").lower().removeprefix("c10::")
    return 1 if name.startswith("float8") else ELEMENT_BYTES.get(name)


def message(args: Mapping[str, Any]) -> Message | None:
    """Return the message in a kernel's arguments; None if they describe none."""
    name = args.get("Collective name")
    if not isinstance(name, str) or not name:
        return None
    group = [str(args[field]) for field in ("Process Group Name", "Process Group Ranks") if field in args]
    ranks, number, into, out = (
        _count(args.get(field)) for field in ("Group size", "Seq", "In msg nelems", "Out msg nelems")
    )
    dtype = args.get("dtype")
    return Message(name, " ".join(group), ranks, number, into, out, dtype if isinstance(dtype, str) else None)


def called(name: str, args: Mapping[str, Any]) -> Message | None:
    """Return the message in the range that torch.distributed opens around a collective's launch: `nccl:all_to_all`.

    Profilers before PyTorch 2.2 record no arguments at the kernel, and its name is the same for each kind of exchange.
    """
    if not name.startswith("nccl:") or kind(name) == "other":
        return None
    shapes, dtypes = args.get("Input Dims"), args.get("Input type")
    shape = shapes[0] if isinstance(shapes, list) and len(shapes) == 1 and isinstance(shapes[0], list) else []
    lengths = [length for length in shape if _count(length) is not None]
    dtype = dtypes[0] if isinstance(dtypes, list) and len(dtypes) == 1 and isinstance(dtypes[0], str) else None
    return Message(name, "", None, None, math.prod(lengths) if lengths and lengths == shape else None, None, dtype)


def job(header: Mapping[str, Any], origin_us: float | None = None) -> Job:
    """Return the identity in the job, from the header of a Kineto trace."""
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    host, base = header.get("host_name"), _count(header.get("baseTimeNanoseconds")) or 0
    return Job(
        _count(info.get("rank")),
        _count(info.get("world_size")),
        host if isinstance(host, str) else None,
        None if origin_us is None else origin_us * 1e-6 + base * 1e-9,
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def ranks_by_name(paths: Iterable[Path], only_by_word: bool) -> dict[Path, int]:
    """Return the rank in each file's name: `rank3`, or the only number in which the names differ."""
    paths = list(paths)
    stated = {path: int(found[-1]) for path in paths if (found := _RANK.findall(path.name))}
    if only_by_word or len(stated) == len(paths) or len({_NUMBER.sub("#", path.name) for path in paths}) > 1:
        return stated
    numbers = zip(*(_NUMBER.findall(path.name) for path in paths), strict=True)
    differing = [column for column in numbers if len({*column}) > 1]
    return dict(zip(paths, map(int, differing[0]), strict=True)) if len(differing) == 1 else stated
