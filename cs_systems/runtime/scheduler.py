"""Scheduler of a sweep: which cells are measured together, and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cs_systems.config import RunConfig
from cs_systems.runtime.ranks import Kind


@dataclass(frozen=True)
class Batch:
    """Cells that the same processes measure, visited in turn; one under a profiler comes alone."""

    kind: Kind
    configs: tuple[RunConfig, ...]

    @property
    def is_profiled(self) -> bool:
        return self.configs[0].profiler != "none"


def shuffled(configs: Sequence[RunConfig], seed: int) -> list[RunConfig]:
    """Put the cells into an order that the seed decides."""
    return random.Random(seed).sample(configs, len(configs))


def batches(
    configs: Sequence[RunConfig], kind_of: Callable[[RunConfig], Kind], interleave: bool = False
) -> Iterator[Batch]:
    """Yield each cell by itself, in order; first, with `interleave`, all that the same processes can measure together.

    Cells that name different code from outside the package are measured by different processes, unless they are
    interleaved: what that code changes by being imported holds for its own cells alone.
    """
    together = [config for config in configs if interleave and config.profiler == "none"]
    groups: dict[Kind, list[RunConfig]] = {}
    for config in together:
        groups.setdefault(replace(kind_of(config), sources=()), []).append(config)
    for kind, group in groups.items():
        sources = sorted({source for config in group for source in config.sources})
        yield Batch(replace(kind, sources=tuple(sources)), tuple(group))
    for config in configs:
        if not interleave or config.profiler != "none":
            yield Batch(kind_of(config), (config,))
