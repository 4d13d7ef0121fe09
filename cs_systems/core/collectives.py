"""Collectives by name: bytes moved by one call, and its bandwidths by the definitions of nccl-tests.

The size of a call follows nccl-tests: the bytes of the largest buffer that a rank holds for it.

| collective | size_bytes is | input → output of a rank | bus factor |
| --- | --- | --- | --- |
| all_reduce | the buffer | size → size, in place | 2 (N−1)/N |
| all_gather | all that a rank receives, its own shard included | size/N → size | (N−1)/N |
| reduce_scatter | all that a rank contributes | size → size/N | (N−1)/N |
| broadcast | the buffer, from rank 0 | size → size, in place | 1 |
| all_to_all | all that a rank sends, its own share included | size → size | (N−1)/N |

algbw = size / time is the bandwidth that a program sees. busbw = algbw × bus factor is the bandwidth of one link, for
an algorithm with the least traffic. It can be compared with the rated bandwidth of the link for any N
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). A switch that reduces data itself may exceed it.
"""

from dataclasses import dataclass
from typing import Annotated

from cs_systems.core.fields import Field, check_values
from cs_systems.core.validation import ConfigError, fields_checked

BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
COLLECTIVES = tuple(BUS_FACTORS)
DIVIDED = ("all_gather", "reduce_scatter", "all_to_all")  # each rank has an equal share of the whole
ELEMENT_BYTES = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp64": 8,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
# Calls of one sample: a call shorter than its launch is timed repeatedly, as nccl-tests does; a large one, once.
MOST_CALLS = 20
BYTES_A_SAMPLE = 64 * 2**20


@fields_checked
@dataclass(frozen=True)
class CollectiveShape:
    """One collective call of `size_bytes` (defined above) in `dtype`; a sample times `calls` calls in a row."""

    collective: Annotated[str, Field(", ".join(COLLECTIVES), spoken=True, values=COLLECTIVES)] = "all_reduce"
    size_bytes: Annotated[
        int,
        Field(
            "bytes of one call", option="--size", heading="size",
            words=lambda value: readable_bytes(value), spoken=True, label="words", least=1,
        ),
    ] = 2**20  # fmt: skip
    dtype: Annotated[str, Field(", ".join(ELEMENT_BYTES), takes="many", spoken=True, values=tuple(ELEMENT_BYTES))] = (
        "fp32"
    )
    calls: Annotated[int, Field("consecutive calls per sample", spoken=True, counts="call", least=1)] = 1

    def __post_init__(self) -> None:
        check_values(self)

    def unit_bytes(self, world_size: int) -> int:
        """Return the unit of the size: one element, times the number of ranks if each has an equal share."""
        return ELEMENT_BYTES[self.dtype] * (world_size if self.collective in DIVIDED else 1)

    def check(self, world_size: int) -> None:
        """Raise ConfigError unless the size is a multiple of the unit."""
        unit = self.unit_bytes(world_size)
        if rest := self.size_bytes % unit:
            near = [size for size in (self.size_bytes - rest, self.size_bytes - rest + unit) if size]
            ranks = f" for each of {world_size} ranks" if self.collective in DIVIDED else ""
            raise ConfigError(
                f"{self.collective} of {self.size_bytes:,} bytes is not a whole number of {self.dtype} elements{ranks}"
                f"; give {' or '.join(f'{size}B' for size in near)}"
            )

    @property
    def elements(self) -> int:
        return self.size_bytes // ELEMENT_BYTES[self.dtype]

    def held_bytes(self, world_size: int) -> int:
        """Return the bytes of the tensors that a rank holds for the call."""
        if self.collective == "all_to_all":
            return 2 * self.size_bytes
        return self.size_bytes + (self.size_bytes // world_size if self.collective in DIVIDED else 0)

    def __str__(self) -> str:
        return f"{self.collective} {readable_bytes(self.size_bytes)} {self.dtype}"


def calls_for(size_bytes: int) -> int:
    """Return the number of calls in a sample, given the bytes of one call.

    The sample is then neither below the clock's resolution nor needlessly long.
    """
    return min(MOST_CALLS, max(1, BYTES_A_SAMPLE // max(1, size_bytes)))


def algbw(size_bytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth in bytes/s, as the program sees it."""
    return size_bytes / seconds


def busbw(collective: str, size_bytes: int, world_size: int, seconds: float) -> float | None:
    """Return the bus bandwidth of one link in bytes/s, by the convention of nccl-tests.

    None with one rank, because nothing crosses a link.
    """
    return algbw(size_bytes, seconds) * BUS_FACTORS[collective](world_size) if world_size > 1 else None


def readable_bytes(size_bytes: int) -> str:
    """Format a size in the largest unit that gives a whole number: `4 KiB`, `10 MB`, `1,020 B`."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (10**9, "GB"), (10**6, "MB"), (2**10, "KiB")):
        if size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes:,} B"
