"""Fields of a configuration, each declared once: `steps: Annotated[int, Field("timed steps", least=1)] = 10`.

Checks, options, columns, headings, descriptions and keys derive from the declaration.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, Literal

from cs_systems.core.plugins import is_foreign
from cs_systems.core.validation import ConfigError, flags, number, of_type, one_of, shown, whole

LOOP = "loop "  # prefix of the workload of a record that a Recorder made: `loop NAME`


class Subject(StrEnum):
    """Thing that a cell measures: a built-in workload of that name, or a kind of workload.

    Fields apply to subjects. A built-in workload without a subject of its own is a STUDY, which needs no edit here.
    """

    STEP = "train_step"
    CURVE = "training_curve"
    ERRORS = "precision_error"
    STRATEGY_ERROR = "strategy_error"
    TOY = "toy"
    ATTENTION = "attention"
    COLLECTIVE = "collective"
    STUDY = "study of numerics"
    OWN = "own workload"  # code from outside the package, which may read the configuration
    MODEL = "own model"  # a model from such code: the package makes its step, and applies some fields
    LOOP = "recorded loop"

    @property
    def words(self) -> str:
        """Name of the subject in a message."""
        return "a workload of your own, path.py:name" if self is Subject.OWN else self.value

    @property
    def is_timed(self) -> bool:
        """Flag of a subject with a meaningful step time; the others only make tables."""
        return self not in (Subject.CURVE, Subject.ERRORS, Subject.STRATEGY_ERROR, Subject.STUDY)

    @classmethod
    def of(cls, workload: str) -> Subject:
        """Return the subject of the workload of that name."""
        if workload.startswith(LOOP):
            return cls.LOOP
        if is_foreign(workload):
            return cls.OWN
        return next((subject for subject in cls if subject == workload), cls.STUDY)


EVERY = frozenset(Subject)
MOST_NAMED = 4  # most subjects that a message lists


@dataclass(frozen=True, eq=False)
class Field:
    """Declaration of a field.

    Attributes:
        meaning: what it is, in a phrase: the help of its option.
        subjects: the subjects to which it applies; on others it must keep its default.
        option: the option of the command line, if its name differs.
        aliases: other names of the option.
        takes: the values of its option: "one"; "many", where each value is measured; or "many words", where a comma is
            part of a word. None means that no option derives from it in the commands that measure this subject.
        usual: the default as text, for the help.
        heading: the heading of its column, if it differs from its name.
        column: whether the frame has a column for it.
        identity: whether it distinguishes cells. Fields that only say how a cell is measured do not.
        is_measurement: whether it says where or how a cell is measured, instead of what.
        part_of: the field that it is an option of; it has no effect while that field has its default.
        like: the field from which it takes its value if it is None.
        words: the form of its value in a description of a cell.
        spoken: whether descriptions also mention its default.
        label: how a figure shows its value: alone, after its heading, or as in a description. Sizes have their heading.
        counts: the noun of what a number counts, "rank", which labels of figures show with it.
        axis: its place among the sizes that a curve may run along, 1 for the first choice; 0 if none does.
        short: the abbreviation in the name of a size, for a field of a model.
        values: the allowed values in addition to the default. meant: wrong words that are often given for one of them.
        called: its name in messages about `values`.
        least, above: limits of a number.
        example: an example of a text, or a phrase for the required value.
        joined, empty: how a tuple is written as text.
        plugin: the kind of plug-ins that it names; if it also has `values`, only the user's own code is a plug-in.
        separator: the character between several names of plug-ins in a text.
    """

    meaning: str
    subjects: frozenset[Subject] = EVERY
    _: KW_ONLY
    option: str = ""
    aliases: tuple[str, ...] = ()
    takes: Literal["one", "many", "many words"] | None = None
    usual: str = ""
    heading: str = ""
    column: bool = True
    identity: bool = True
    is_measurement: bool = False
    part_of: str = ""
    like: str = ""
    words: str | Callable[[Any], str] = "{}"
    spoken: bool = False
    label: Literal["value", "heading", "words"] = "value"
    counts: str = ""
    axis: int = 0
    short: str = ""
    values: Sequence[str] = ()
    meant: Mapping[str, str] | None = None
    called: str = ""
    least: int | None = None
    above: int | None = None
    example: str = ""
    joined: str = " "
    empty: str | None = None
    plugin: str = ""
    separator: str = ""


@dataclass(frozen=True, eq=False)
class Declared:
    """Field of a configuration as declared; `path` is `model.d_model` for a field of a part.

    kind: its type without None.
    """

    path: str
    kind: Any
    is_optional: bool
    default: Any
    field: Field
    subjects: frozenset[Subject]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def always(self) -> bool:
        """Flag of a field that affects every workload from outside the package, whichever fields its code reads."""
        return self.field.is_measurement or "workload" in (self.name, self.field.part_of)

    @property
    def option(self) -> str:
        return self.field.option or f"--{self.name.replace('_', '-')}"

    def text(self, value: Any) -> Any:
        """Return the value, a tuple as text."""
        return (self.field.joined.join(value) or self.field.empty) if self.kind is tuple else value

    def words(self, value: Any) -> str:
        """Return the phrase for a value in a description; "" for a default that is not mentioned."""
        is_silent = value is None or (value == self.default and not self.field.spoken)
        return "" if is_silent else self.phrase(value)

    def phrase(self, value: Any) -> str:
        """Return the phrase for a value, also for a default."""
        words = self.field.words
        return words(value) if callable(words) else words.format(self.text(value))

    def of(self, config: Mapping[str, Any]) -> Any:
        """Return the value in a configuration as JSON, which need not have every field; None if the part is missing."""
        value: Any = config
        for name in self.path.split("."):
            if value is None:
                return None
            value = value.get(name, self.default)
        return value

    def plugin_names(self, value: Any) -> tuple[str, ...]:
        """Return the names of plug-ins in a value, without words in `values` and defaults next to them."""
        if not self.field.plugin or not value or (self.field.values and value in (self.default, *self.field.values)):
            return ()
        if isinstance(value, tuple):
            return value
        return tuple(value.split(self.field.separator)) if self.field.separator else (value,)

    def check(self, config: Any) -> None:
        """Raise ConfigError for a wrong value; convert values that JSON or a program may write in another form."""
        name, field = self.name, self.field
        value = getattr(config, name)
        if value is self.default or (value is None and self.is_optional):
            return
        if self.kind is tuple:
            self._check_texts(config, value)
        elif isinstance(self.kind, type) and issubclass(self.kind, StrEnum):
            if not isinstance(value, self.kind):
                object.__setattr__(config, name, self.kind(one_of(name, value, self.kind)))
        elif field.values:
            if not (isinstance(value, str) and (value == self.default or self._names_a_file(value))):
                one_of(field.called or name.replace("_", " "), value, field.values, field.meant)
        elif self.kind is bool:
            flags(config, name)
        elif self.kind in (int, float):
            (whole if self.kind is int else number)(config, name)
            self._check_limits(getattr(config, name))
        else:
            of_type(config, self.kind, field.example or "a text", name)

    def _names_a_file(self, text: str) -> bool:
        """Return whether a text names the user's own code, which is only looked up when a cell is measured."""
        return bool(self.field.plugin) and (is_foreign(text) or text.endswith(".py"))

    def _check_limits(self, value: float) -> None:
        least, above = self.field.least, self.field.above
        if least is not None and value < least:
            limit = "not be negative" if least == 0 else f"be at least {least}"
            raise ConfigError(f"{self.name} is {value}; it must {limit}", self.name)
        if above is not None and value <= above:
            raise ConfigError(f"{self.name} is {value}; it must be above {above}", self.name)

    def _check_texts(self, config: Any, words: Any) -> None:
        name, example = self.name, self.field.example
        if not isinstance(words, list | tuple):
            raise ConfigError(
                f"{name} is {shown(words)}; give a tuple of texts, such as ({example!r},), or a list of such tuples to "
                "grid"
            )
        if (wrong := next((word for word in words if not isinstance(word, str)), "")) != "":
            raise ConfigError(f"{name} has the element {shown(wrong)}; each must be a text, such as {example!r}")
        object.__setattr__(config, name, tuple(words))  # JSON turns tuples into lists


@functools.cache
def declared(kind: type) -> dict[str, Declared]:
    """Return the fields of a class by name.

    The file of the class has no `from __future__ import annotations`: evaluating texts would cost each start 3 ms.
    """
    hints, found = typing.get_type_hints(kind, include_extras=True), {}
    for each in dataclasses.fields(kind):
        annotated, field = typing.get_args(hints[each.name])
        options = typing.get_args(annotated) if isinstance(annotated, types.UnionType) else (annotated,)
        first = next(option for option in options if option is not types.NoneType)
        found[each.name] = Declared(
            each.name, typing.get_origin(first) or first, types.NoneType in options, each.default, field, field.subjects
        )
    return found


@functools.cache
def leaves(kind: type) -> dict[str, Declared]:
    """Return the fields of a class and of its parts by path; fields of a part apply to the subjects of the part."""
    found = {}
    for name, each in declared(kind).items():
        if not dataclasses.is_dataclass(each.kind):
            found[name] = each
            continue
        for path, leaf in declared(typing.cast(type, each.kind)).items():
            default = leaf.default if each.default is None else getattr(each.default, path)
            path = f"{name}.{path}"
            found[path] = dataclasses.replace(leaf, path=path, default=default, subjects=each.subjects)
    return found


def check_values(config: Any) -> None:
    """Raise ConfigError for a field of a wrong type, or with a value that its declaration excludes."""
    kind: type = type(config)
    for each in declared(kind).values():
        each.check(config)


def applies(what: str, subjects: Iterable[Subject], workload: str) -> str:
    """Return why something cannot be applied to a workload."""
    unnamed = {Subject.MODEL, Subject.STRATEGY_ERROR}  # subjects that users do not name
    names = [subject.words for subject in Subject if subject in {*subjects} - unnamed]
    if len(names) > MOST_NAMED:
        return f"{what} does not apply to workload {workload}"
    only = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return f"{what} applies only to {only}, and the workload is {workload}"
