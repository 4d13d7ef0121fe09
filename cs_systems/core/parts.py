"""Check of a cell's parts of the training step that reads their files without importing them or torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError

PACKAGE = "training.parts"


def check(names: Iterable[str]) -> None:
    """Raise ConfigError for an unknown part, and for two parts that replace the same thing.

    A part in a user's file without a literal keyword `replaces` is checked later, by `one_of_each`.
    """
    one_of_each(declared(names, "replaces"))


def declared(names: Iterable[str], field: str) -> dict[str, str]:
    """Return the value that each part's file declares in a field, by name of the part.

    Parts without one are left out.
    """
    found = {name: plugins.declared(PACKAGE, name).get(field) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def one_of_each(replaced: Mapping[str, str]) -> None:
    """Raise ConfigError if two parts replace the same thing, given a map from part to the thing it replaces."""
    first: dict[str, str] = {}
    for name, thing in replaced.items():
        if other := first.get(thing):
            raise ConfigError(f"parts {other} and {name} both replace the {thing}; leave out one of them")
        first[thing] = name
