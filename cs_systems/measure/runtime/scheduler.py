"""Scheduler of a sweep: groups cells that are measured together, and orders them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cs_systems.config import RunConfig
from cs_systems.measure.runtime.ranks import Kind


@dataclass(frozen=True)
class Batch:
    """Group of cells that the same processes measure, visited in turn; a cell under a profiler has its own group."""

    kind: Kind
    configs: tuple[RunConfig, ...]

    @property
    def is_profiled(self) -> bool:
        return self.configs[0].is_profiled


def shuffled(configs: Sequence[RunConfig], seed: int) -> list[RunConfig]:
    """Shuffle the cells by the seed."""
    return random.Random(seed).sample(configs, len(configs))


def batches(
    configs: Sequence[RunConfig], kind_of: Callable[[RunConfig], Kind], interleave: bool = False
) -> Iterator[Batch]:
    """Yield each cell as its own batch, in order; with `interleave`, batches of cells that can share processes.

    Cells that name different code from outside the package get different processes unless they are interleaved, so
    that changes made by importing that code apply only to its own cells.
    """
    together = [config for config in configs if interleave and not config.is_profiled]
    groups: dict[Kind, list[RunConfig]] = {}
    for config in together:
        groups.setdefault(replace(kind_of(config), sources=()), []).append(config)
    for kind, group in groups.items():
        sources = sorted({source for config in group for source in config.sources})
        yield Batch(replace(kind, sources=tuple(sources)), tuple(group))
    for config in configs:
        if not interleave or config.is_profiled:
            yield Batch(kind_of(config), (config,))
