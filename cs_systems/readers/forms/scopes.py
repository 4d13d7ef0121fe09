"""Common form of a profile of scopes: kernel time and declared work by the program's nested scopes."""

from __future__ import annotations

from dataclasses import dataclass

from cs_systems.core.rows import ScopeKernelRow, ScopeRow


@dataclass(frozen=True)
class Scopes:
    """Contents of a profile: a row for each scope and for each kernel."""

    source: str
    devices: tuple[str, ...]  # described
    scopes: list[ScopeRow]
    kernels: list[ScopeKernelRow]
    notes: tuple[str, ...]
