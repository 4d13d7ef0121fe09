"""Input validation: ConfigError and the checks that raise it."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C")


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


@functools.cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Return the annotated type of each field of a class."""
    return typing.get_type_hints(kind)


def arguments_checked(function: T) -> T:
    """Decorate a function, or an `__init__`, so that wrong arguments are a ConfigError that names the right ones."""
    signature = inspect.signature(function)
    of_class = function.__name__ == "__init__"
    name = function.__qualname__.split(".")[-2] if of_class else function.__name__
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = named[1:] if of_class else named
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:  # binding first would double the time of making a RunConfig
            check(*args, **kwargs)
            raise

    def check(*args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            for given in kwargs if not takes_any else ():
                one_of(f"argument of {name}", given, named)
            raise ConfigError(f"{name}: {error}; its arguments are {', '.join(named)}") from None

    return checked  # type: ignore[return-value]


def fields_checked(cls: type[C]) -> type[C]:
    """Decorate a dataclass so that wrong arguments are a ConfigError that names its fields."""
    cls.__init__ = arguments_checked(cls.__init__)  # type: ignore[method-assign]
    return cls


def one_of(what: str, value: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Return `value` if it is known.

    meant: words that are often given in place of a name.

    Raises:
        ConfigError: it is not; the message suggests the nearest valid names.
    """
    known = list(known)
    is_text = isinstance(value, str)
    if is_text and value in known:
        return value
    hint = ""
    if is_text:
        name = (meant or {}).get(value.lower())
        hint = f"did you mean {name}?" if name else did_you_mean(value, known)
    raise ConfigError(f"unknown {what} {value!r}: {hint and hint + ' '}known: {', '.join(known)}")


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return the question that suggests the nearest names; empty if none is near."""
    near = nearest(value, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


def nearest(value: str, known: Iterable[str]) -> list[str]:
    """Return up to three names: those that begin with `value`, then those spelled like it; if none, those with it."""
    known = list(known)
    is_word = len(value) > 2
    beginning = [name for name in known if is_word and name.startswith(value)]
    alike = difflib.get_close_matches(value, known, n=3, cutoff=0.5)
    containing = [name for name in known if is_word and value in name]
    return [*dict.fromkeys([*beginning, *alike])][:3] or containing[:3]


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number, NaN and infinity included; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a whole number below 2^63 in magnitude."""
    for name in names:
        value = getattr(config, name)
        if not is_whole(value):
            raise ConfigError(f"{name} is {shown(value)}; it must be a whole number", name)
        if abs(value) >= 1 << 63:
            raise ConfigError(f"{name} is {value}; it must be below 2^63, the limit of torch and tables", name)


def number(config: Any, name: str) -> None:
    """Convert a field of `config` to float, so that 25 and 25.0 are equal.

    Raises:
        ConfigError: the field is not a finite number.
    """
    value = getattr(config, name)
    if not is_number(value) or not math.isfinite(value):
        raise ConfigError(f"{name} is {shown(value)}; it must be a number", name)
    object.__setattr__(config, name, float(value))


def of_type(config: Any, kind: type | types.UnionType, what: str, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is of a type; `what` says in words what it must be."""
    for name in names:
        if not isinstance(value := getattr(config, name), kind):
            raise ConfigError(f"{name} is {shown(value)}; it must be {what}")


def texts(config: Any, *names: str) -> None:
    of_type(config, str, "a text", *names)


def flags(config: Any, *names: str) -> None:
    of_type(config, bool, "True or False", *names)


def short_name(what: str, name: Any) -> str:
    """Return the name of a loop or an object, as tables show it. Raises ConfigError if it is unfit for that."""
    if not isinstance(name, str) or not name or ":" in name or not name.isprintable():
        raise ConfigError(f"{what} is {shown(name)}; give a short text without a colon")
    return name


def shown(value: Any) -> str:
    """Return a wrong value as text for a message: cut short, and only the type of a container.

    A structure that refers to itself many times, or a number of many digits, would take very long to format in full.
    """
    if isinstance(value, str):
        text = value[:80] + ("…" if len(value) > 80 else "")
        return repr(text) if text.isprintable() else ascii(text)
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"a {type(value).__name__}"


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
