"""Input validation: ConfigError and the checks that raise it."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C")
LONGEST_LIST, LIST_WIDTH = 200, 78  # characters of names in the line of a message, and in a line below it


class ConfigError(ValueError):
    """Malformed input; the message names the remedy. The command line exits with status 2.

    fields: the configuration fields that the message names; the command line replaces them by its options. paths: the
    same for a field that the message names by another word, such as `model="model.name"`.
    """

    def __init__(self, message: str, *fields: str, **paths: str) -> None:
        super().__init__(message)
        self.fields = {field: field for field in fields} | paths

    def with_options(self) -> str:
        """Return the message with options instead of fields: `--batch-size is 0` for `batch_size is 0`."""
        names = "|".join(map(re.escape, self.fields))
        whole = rf"(?<![\w./:'-])({names})(?![\w./:'-])"  # does not match `parts` in --parts, parts.py:make or 'parts'
        return re.sub(whole, lambda found: option(self.fields[found[0]]), str(self)) if names else str(self)


OPTIONS: dict[str, str] = {}  # option of the command line by field, if their names differ; filled by declarations


def option(field: str) -> str:
    """Return the option of the command line that sets a field: `batch_size` → `--batch-size`."""
    return OPTIONS.get(field) or f"--{field.rpartition('.')[2].replace('_', '-')}"


@functools.cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Return the annotated type of each field of a class."""
    return typing.get_type_hints(kind)


def arguments_checked(function: T, instead: Mapping[str, str] | None = None) -> T:
    """Decorate a function, or an `__init__`, so that wrong arguments raise a ConfigError that names the right ones.

    instead: see `unknown_argument`.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:  # binding first would double the time of making a RunConfig
            check(*args, **kwargs)
            raise

    def check(*args: Any, **kwargs: Any) -> None:
        signature = inspect.signature(function)
        of_class = function.__name__ == "__init__"
        name = function.__qualname__.split(".")[-2] if of_class else function.__name__
        named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        named = named[1:] if of_class else named
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        in_order = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][of_class:]
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            for given in [] if takes_any else [word for word in kwargs if word not in named]:
                raise unknown_argument(name, given, kwargs[given], named, instead) from None
            if "too many positional" in str(error):
                others = [each for each in named if each not in in_order]
                remedy = "give the others by name" if others or takes_any else "leave out the others"
                remedy += f", as in {name}({others[0]}=…)" if others else ""
                raise ConfigError(f"{name} takes only {', '.join(in_order)} by position; {remedy}") from None
            if missing := re.fullmatch(r"missing a required(?: keyword-only)? argument: '(\w+)'", str(error)):
                raise ConfigError(f"{name} requires {missing[1]}; its arguments are {', '.join(named)}") from None
            if twice := re.fullmatch(r"multiple values for argument '(\w+)'", str(error)):
                raise ConfigError(f"{name} has {twice[1]} twice, by position and by name; give it once") from None
            raise ConfigError(f"{name}: {error}; its arguments are {', '.join(named)}") from None

    return checked  # type: ignore[return-value]


def unknown_argument(
    function: str, given: str, value: object, known: Iterable[str], instead: Mapping[str, str] | None = None
) -> ConfigError:
    """Return the error for an argument that a function does not have; it suggests the nearest one.

    instead: remedies for common wrong names, in which {value} stands for the value.
    """
    if instead and given in instead:
        remedy = instead[given].format(value=shown(value))
    else:
        known = list(known)
        remedy = did_you_mean(given, known) or f"its arguments are {', '.join(known)}"
    return ConfigError(f"{function} has no argument {given!r}; {remedy}")


def fields_checked(cls: type[C], instead: Mapping[str, str] | None = None) -> type[C]:
    """Decorate a dataclass so that wrong arguments raise a ConfigError that names its fields.

    instead: see `unknown_argument`.
    """
    cls.__init__ = arguments_checked(cls.__init__, instead)  # type: ignore[method-assign]
    return cls


def one_of(what: str, value: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Return `value` if it is known.

    meant: common wrong words → the intended name.

    Raises:
        ConfigError: it is unknown; the message suggests the nearest valid names.
    """
    known = list(known)
    if not isinstance(value, str):
        raise ConfigError(f"{what} is {shown(value)}; {choices('', known)}")
    if value in known:
        return value
    name = (meant or {}).get(value.lower())
    hint = f"did you mean {name}?" if name else did_you_mean(value, known)
    raise ConfigError(f"unknown {what} {value!r}; {choices(hint, known)}")


def choices(hint: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the hint, if there is one, and the valid names."""
    return listed(f"{hint} The names are" if hint else "choose among", known)


def listed(before: str, names: Iterable[str]) -> str:
    """Return text that ends with names.

    A message is one line except on a terminal, so that it can be searched for; a long list is wrapped below it.
    """
    text = ", ".join(names)
    if len(text) <= LONGEST_LIST:
        return f"{before} {text}"
    lines = textwrap.wrap(text, LIST_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n  ".join([before, *lines])


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return the question that suggests the nearest names; empty if none is near."""
    near = nearest(value, known)
    return f"did you mean {' or '.join(near)}?" if near else ""


def nearest(value: str, known: Iterable[str]) -> list[str]:
    """Return up to three names that begin with `value`, then similarly spelled ones; if none, names that contain it.

    Case is ignored. Less similar names must begin with the same letter: `fast` does not suggest `default`, but `fp8`
    suggests `fp16`.
    """
    names, word, is_word = {name.lower(): name for name in known}, value.lower(), len(value) > 2
    beginning = [name for name in names if is_word and name.startswith(word)]
    import difflib  # imported only for unknown words, which are rare

    alike = difflib.get_close_matches(word, names, n=len(names) or 1, cutoff=0.5)
    closely = difflib.get_close_matches(word, alike, n=len(alike) or 1, cutoff=0.6)
    spelled = [name for name in alike if name in closely or (is_word and name[:1] == word[:1])]
    containing = [name for name in names if is_word and word in name]
    found = [*dict.fromkeys([*beginning, *spelled])][:3] or containing[:3]
    return [names[name] for name in found]


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; bools do not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number, including NaN and infinity; bools do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(config: Any, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` is a whole number below 2^63 in magnitude."""
    for name in names:
        value = getattr(config, name)
        if not is_whole(value):
            raise ConfigError(f"{name} is {shown(value)}; it must be a whole number of type int", name)
        if abs(value) >= 1 << 63:
            limits = "it must be above -2^63 and below 2^63, because torch stores it in 64 bits"
            raise ConfigError(f"{name} is {shown(value)}; {limits}", name)


def number(config: Any, name: str) -> None:
    """Convert a field of `config` to float, so that 25 and 25.0 are equal.

    Raises:
        ConfigError: the field is not a finite number.
    """
    value = getattr(config, name)
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{name} is {shown(value)}; it must be a finite number of type int or float", name)
    object.__setattr__(config, name, float(value))


def of_type(config: Any, kind: type | types.UnionType, what: str, *names: str) -> None:
    """Raise ConfigError unless each named field of `config` has a type; `what` is the phrase for it."""
    for name in names:
        if not isinstance(value := getattr(config, name), kind):
            raise ConfigError(f"{name} is {shown(value)}; it must be {what}")


def flags(config: Any, *names: str) -> None:
    of_type(config, bool, "Python's True or False", *names)


def short_name(what: str, name: Any) -> str:
    """Return the name of a loop or an object for tables. Raises ConfigError if it is not printable on one line."""
    if not isinstance(name, str) or not name or ":" in name or not name.isprintable():
        raise ConfigError(f"{what} is {shown(name)}; give one or more printable characters, without a colon")
    return name


def shown(value: Any) -> str:
    """Return a wrong value as text for a message: shortened; for a container only its type.

    A structure that refers to itself many times, or a number with many digits, would take very long to format in full.
    """
    if isinstance(value, str):
        text = value[:80] + ("…" if len(value) > 80 else "")
        return repr(text) if text.isprintable() else ascii(text)
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 128):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return _with_article(f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOUaeio' else 'a'} {noun}"


def settings(config: Any, field: str) -> dict[str, Any]:
    """Parse the `name=value` words of a field into a dict; JSON values are decoded, other values stay text.

    Example: `("max_ctas=16", "comm_dtype=bf16", "high_priority=true")`.

    Raises:
        ConfigError: a word has no name or value, or a name is set twice.
    """
    found: dict[str, Any] = {}
    for word in getattr(config, field):
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            form = f"{name}=VALUE" if name.isidentifier() else "name=value"
            raise ConfigError(f"{field} has {shown(word)}, which is not of the form name=value; write {form}", field)
        if name in found:
            raise ConfigError(f"{field} sets {name} twice; set it once", field)
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
