"""Check of the parts of the training step that a cell names, from their files, without importing them or torch."""

from __future__ import annotations

from collections.abc import Iterable

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError

PACKAGE = "training.parts"


def check(names: Iterable[str]) -> None:
    """Raise ConfigError for an unknown part, and for two parts that replace the same thing."""
    replaced: dict[str, str] = {}
    for name in names:
        thing = plugins.declared(PACKAGE, name)["replaces"]
        if other := replaced.get(thing):
            raise ConfigError(f"parts {other} and {name} both replace the {thing}; leave out one of them")
        replaced[thing] = name
