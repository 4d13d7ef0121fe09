"""Common form of a profile of scopes: kernel time and declared work, by the program's nested scopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypedDict

from cs_systems.core.tables import Column, Table


class ScopeRow(TypedDict):
    """Scope or kernel in a profile of Triton's Proton, including everything inside it."""

    scope: Annotated[str, Column(beside=45)]  # indented by its depth
    path: str  # names from the outermost scope on
    device: str | None  # device of a kernel
    calls: Annotated[int | None, Column("kernels")]  # launches of kernels
    time_s: float | None  # on the device
    self_s: float | None  # without nested nodes
    share: Annotated[float | None, Column("share of time", drop=9)]  # share of the profile's time
    cpu_s: Annotated[float | None, Column("CPU time")]  # host time, if the program timed the scope
    flops: float | None  # as the program declared
    flops_per_s: Annotated[float | None, Column("rate")]
    bytes: float | None  # as the program declared
    bytes_per_s: Annotated[float | None, Column("traffic")]
    cycles: int | None  # cycles of a scope inside a kernel
    samples: int | None  # samples of the program counter
    stalled_share: float | None  # share of the samples


class ScopeKernelRow(TypedDict):
    """Kernel of a profile of Triton's Proton, summed over all scopes."""

    kernel: Annotated[str, Column(beside=52)]
    device: str
    calls: int | None
    time_s: float | None
    mean_s: Annotated[float | None, Column(drop=3)]
    share: Annotated[float | None, Column(drop=9)]
    flops_per_s: Annotated[float | None, Column("rate")]
    bytes_per_s: Annotated[float | None, Column("traffic")]


SCOPES = Table(
    "scopes",
    ScopeRow,
    "scopes and their kernels, nested",
    "scope calls time_s share cpu_s flops_per_s bytes_per_s cycles samples stalled_share",
    most=30,
)
KERNELS = Table(
    "kernels",
    ScopeKernelRow,
    "kernels by time",
    "kernel device calls time_s mean_s share flops_per_s bytes_per_s",
    most=10,
)


@dataclass(frozen=True)
class Scopes:
    """Contents of a profile: a row for each scope and for each kernel."""

    source: str
    devices: tuple[str, ...]  # descriptions of the devices
    scopes: list[ScopeRow]
    kernels: list[ScopeKernelRow]
    notes: tuple[str, ...]
