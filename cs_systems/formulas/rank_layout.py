"""Arrangement of ranks that a parallel strategy needs, read from the strategy's file without importing it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from cs_systems.config import ConfigError
from cs_systems.core.own_strategy import declared
from cs_systems.core.plugins import is_foreign
from cs_systems.core.units import counted

Takes = str | tuple[str, ...]  # valid values of an option


def splits_of(name: str) -> frozenset[str]:
    """Return the objects that a strategy or a composition of strategies divides among the ranks, without torch.

    The strategies' files declare them: batch, features, parameters, and so on.
    """
    return frozenset().union(*(entry.get("splits", {"batch"}) for entry in _declared(name)))


def overlaps(name: str) -> bool:
    """Return whether a strategy, or one of a composition, sends gradients while backward computes, without torch."""
    return any(entry.get("overlaps", False) for entry in _declared(name))


def averages_after_backward(name: str) -> bool:
    """Return whether all averaging that backward does not hide comes after backward, without torch.

    False if parameters or features are sent too, or if torch's own wrapper waits inside backward.
    """
    is_torchs = any(not entry.get("counted", True) for entry in _declared(name))
    return not is_torchs and "batch" in splits_of(name) and not {"parameters", "features"} & splits_of(name)


def data_ranks(config: Mapping[str, Any]) -> int:
    """Return the number of ranks with different rows of the batch in a record's configuration.

    Ranks that divide blocks among each other share their rows.
    """
    ranks: int = config.get("world_size", 1)
    if ranks == 1 or "features" not in (splits := splits_of(config.get("strategy", "single"))):
        return ranks
    return ranks // check_layout(ranks, config.get("tp_degree"), splits)


def options_of(name: str) -> dict[str, Takes]:
    """Return the options of a strategy's components with their types, read from their files without torch."""
    return {option: takes for entry in _declared(name) for option, takes in entry.get("options", {}).items()}


def _declared(name: str) -> list[dict[str, Any]]:
    return [_declared_by(part) for part in name.split("+")]


def _declared_by(part: str) -> dict[str, Any]:
    try:
        return declared(part)
    except ConfigError:
        if not is_foreign(part):
            raise
        return {}  # a record may outlive the user's file that it names


def check_layout(world_size: int, tp_degree: int | None, splits: Collection[str]) -> int:
    """Return the number of neighbouring ranks that divide the blocks, without torch.

    `splits` are the objects that the strategy divides.

    Raises:
        ConfigError: the ranks have no such layout. Two dimensions need their sizes; one dimension takes all ranks.
    """
    require_tp_degree(tp_degree, splits)
    if "features" in splits and "batch" not in splits and tp_degree not in (None, world_size):
        raise ConfigError(
            f"tp_degree {tp_degree} is not possible with tp alone, which divides each block "
            f"over all {counted(world_size, 'rank')}; leave out tp_degree, or use fsdp+tp",
            "tp_degree",
        )
    return check_tp_degree(world_size, tp_degree)


def check_tp_degree(world_size: int, tp_degree: int | None) -> int:
    """Return the number of ranks that divide the blocks, all of them for None, without torch.

    Raises:
        ConfigError: the degree does not divide the number of ranks.
    """
    degree = world_size if tp_degree is None else tp_degree
    if degree < 1 or world_size % degree:
        fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"tp_degree {degree} does not divide {counted(world_size, 'rank')}; choose tp_degree among {fitting}, "
            f"or a world size that is a multiple of {degree}",
            "tp_degree",
        )
    return degree


def check_division(num_heads: int, d_ff: int, world_size: int, tp_degree: int | None) -> None:
    """Raise ConfigError unless the ranks that share a block divide the number of heads and d_ff. No torch.

    tp_degree: the number of these ranks; None: all ranks, for tp alone.
    """
    common = math.gcd(num_heads, d_ff)
    if tp_degree is None:
        by, choice = f"world_size {world_size}, over which tp divides each block", "world_size"
    else:
        by, choice, common = f"tp_degree {tp_degree}", "tp_degree", math.gcd(common, world_size)
    for what, count in (("num_heads", num_heads), ("d_ff", d_ff)):
        if count % (tp_degree or world_size):
            fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            fitting += "; with tp alone, start only that many ranks" if tp_degree == world_size else ""
            raise ConfigError(
                f"{what} {count} is not divisible by {by}; choose {choice} among {fitting}",
                what,
                "tp_degree",
                "world_size",
            )


def require_tp_degree(tp_degree: int | None, splits: Collection[str]) -> None:
    """Raise ConfigError for two dimensions of ranks without `tp_degree`, because only it determines their sizes."""
    if tp_degree is None and {"batch", "features"} <= set(splits):
        raise ConfigError(
            "tp with another strategy requires tp_degree; set it to the number of ranks that share one block",
            "tp_degree",
        )
