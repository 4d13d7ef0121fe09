"""Input validation: ConfigError and the checks that raise it."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """Malformed input; the message names the remedy. The command line exits with status 2.

    fields: the configuration's fields that the message names; the command line writes its options in their place.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields

    def with_options(self) -> str:
        """Return the message with options in place of fields: `--batch-size is 0` for `batch_size is 0`."""
        names = "|".join(map(re.escape, self.fields))
        return re.sub(rf"\b({names})\b", lambda found: option(found[0]), str(self)) if names else str(self)


def option(field: str) -> str:
    """Return the option of the command line that sets a field: `batch_size` → `--batch-size`."""
    return f"--{field.replace('_', '-')}"


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is known.

    Raises:
        ConfigError: it is not; the message suggests the nearest valid names.
    """
    known = list(known)
    if value in known:
        return value
    near = nearest(value, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"unknown {what} {value!r}: {hint}known: {', '.join(known)}")


def nearest(value: str, known: Iterable[str]) -> list[str]:
    """Return up to three names that are spelled like `value`; if there are none, names that contain it."""
    known = list(known)
    containing = [name for name in known if len(value) > 2 and value in name]
    return difflib.get_close_matches(value, known, n=3, cutoff=0.5) or containing[:3]


def whole(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a whole number below 2^63 in magnitude."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number", name)
        if abs(value) >= 1 << 63:
            raise ConfigError(f"{name} is {value}; it must be below 2^63, the limit of torch and tables", name)


def number(config: Any, name: str) -> None:
    """Convert a field of `config` to float, so that 25 and 25.0 are equal.

    Raises:
        ConfigError: the field is not a finite number.
    """
    value = getattr(config, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}; it must be a number", name)
    object.__setattr__(config, name, float(value))


def counts(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a whole number of at least 1."""
    whole(config, *names)
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be at least 1", name)


def not_negative(config: Any, *names: str) -> None:
    """Raise ConfigError if a named field of `config`, which is a number, is below 0."""
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must not be negative", name)


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
