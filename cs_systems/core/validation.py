"""Input validation: ConfigError and the checks that raise it."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """Malformed input; the message names the remedy. The command line exits with status 2."""


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is known.

    Raises:
        ConfigError: it is not; the message suggests the nearest valid names.
    """
    known = list(known)
    if value in known:
        return value
    near = difflib.get_close_matches(value, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"unknown {what} {value!r}: {hint}known: {', '.join(known)}")


def whole(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a whole number below 2^63 in magnitude."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number")
        if abs(value) >= 1 << 63:
            raise ConfigError(f"{name} is {value}; it must be below 2^63, the limit of torch and tables")


def number(config: Any, name: str) -> None:
    """Convert a field of `config` to float, so that 25 and 25.0 are equal.

    Raises:
        ConfigError: the field is not a finite number.
    """
    value = getattr(config, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a number")
    object.__setattr__(config, name, float(value))


def counts(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a whole number of at least 1."""
    whole(config, *names)
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1")


def settings(words: Iterable[str]) -> dict[str, Any]:
    """Parse `name=value` words into a dict; a value that is JSON gets its JSON type, any other stays text.

    Example: `("max_ctas=16", "comm_dtype=bf16", "high_priority=true")`.

    Raises:
        ConfigError: a word has no name or value, or a name is set twice.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise ConfigError(f"{word!r} is not of the form name=value; write it like size=16")
        if name in found:
            raise ConfigError(f"{name} is set twice; set it once")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
