"""Arrangement of ranks that a parallel strategy needs, read from the strategy's file without importing it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from cs_systems.config import ConfigError
from cs_systems.core import plugins

Takes = str | tuple[str, ...]  # what an option must be


def splits_of(name: str) -> frozenset[str]:
    """What a rank has only a part of under a strategy or a composition, as its files say. No torch."""
    declared = [plugins.declared("parallel", part) for part in name.split("+")]
    return frozenset().union(*(said.get("splits", {"batch"}) for said in declared))


def data_ranks(config: Mapping[str, Any]) -> int:
    """How many ranks of a record's configuration take rows of their own: all that do not divide blocks."""
    ranks: int = config.get("world_size", 1)
    if ranks == 1 or "features" not in (splits := splits_of(config.get("strategy", "single"))):
        return ranks
    return ranks // check_layout(ranks, config.get("tp_degree"), splits)


def options_of(name: str) -> dict[str, Takes]:
    """What the parts of a strategy can be told, as their files say. No torch."""
    declared = [plugins.declared("parallel", part) for part in name.split("+")]
    return {option: takes for said in declared for option, takes in said.get("options", {}).items()}


def check_layout(world_size: int, tp_degree: int | None, splits: Collection[str]) -> int:
    """How many neighbouring ranks divide the blocks under a strategy that splits this. No torch.

    Raises ConfigError where the ranks cannot be arranged so: two dimensions need their sizes, one is all of them.
    """
    _check_degree_is_told(tp_degree, splits)
    degree = check_tp_degree(world_size, tp_degree)
    if "features" in splits and "batch" not in splits and degree != world_size:
        raise ConfigError(f"tp alone divides blocks over all {world_size} ranks: leave tp_degree out, or take fsdp+tp")
    return degree


def check_tp_degree(world_size: int, tp_degree: int | None) -> int:
    """How many ranks divide the blocks; None is all. ConfigError for what does not divide the ranks. No torch."""
    degree = world_size if tp_degree is None else tp_degree
    if degree < 1 or world_size % degree:
        fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(f"tp_degree {degree} does not divide {world_size} ranks: choose it among {fitting}")
    return degree


def check_division(num_heads: int, d_ff: int, tp_degree: int) -> None:
    """ConfigError where `tp_degree` ranks cannot have equal parts of heads and d_ff. No torch."""
    for what, count in (("num_heads", num_heads), ("d_ff", d_ff)):
        if count % tp_degree:
            common = math.gcd(num_heads, d_ff)
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ConfigError(
                f"{what} {count} does not divide over {tp_degree} ranks: "
                f"choose tp_degree, or the ranks of tp alone, among {fitting}"
            )


def _check_degree_is_told(tp_degree: int | None, splits: Collection[str]) -> None:
    if tp_degree is None and {"batch", "features"} <= set(splits):
        raise ConfigError("with another strategy tp needs tp_degree: how many neighbouring ranks divide a block")
