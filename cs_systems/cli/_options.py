"""Options shared by several commands, as frozen dataclasses that convert themselves to library arguments."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import chain, count, pairwise, product, takewhile
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar, get_args, get_origin, get_type_hints

from tyro.conf import Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from cs_systems.config import (
    FIELDS,
    LEAVES,
    PRESETS,
    STEP_MODES,
    AttentionShape,
    ConfigError,
    Mode,
    RunConfig,
    grid,
    one_of,
)
from cs_systems.core import plugins
from cs_systems.core.experiments import DEFAULT_S
from cs_systems.core.fields import Declared, Subject, applies
from cs_systems.core.recipes import RECIPES
from cs_systems.core.units import counted
from cs_systems.core.validation import option, shown

# tyro checks the defaults of these without typeguard. For a `tuple[int, ...]` or an `int | None` it imports typeguard,
# which is a third of the time that `--help` takes.
MaybeText = Optional[str]  # noqa: UP045
T = TypeVar("T")
L = TypeVar("L", bound=Sequence[Any])


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number; use one such as 8") from None


def _decimal(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number; use one such as 0.5") from None


def _path(word: str) -> Path:
    if not word:  # a Path would take it for the current folder
        raise ValueError("the path is empty; give a path, or leave the argument out")
    if word == "-":
        raise ValueError("'-' does not mean standard input or output here; give a path, or leave the argument out")
    return Path(word)


def _one(read: Callable[[str], Any], metavar: str, kinds: tuple[type, ...]) -> PrimitiveConstructorSpec[Any]:
    """Return the tyro spec of an option that takes one value; it replaces Python's `invalid literal for int()`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kinds),
        str_from_instance=lambda value: [str(value)],
    )


def _several(
    kind: type, read: Callable[[str], Any], metavar: str, commas: bool = True, empty: bool = False
) -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    """Return the tyro spec of an option that takes one word or more, with spaces or commas between them."""

    def values(words: list[str]) -> tuple[Any, ...]:
        if commas:
            words = [part.strip() for word in words for part in word.split(",") if part.strip()]
        if not words and not empty:
            raise ValueError("no value; give one, or leave out the option")
        return tuple(map(read, words))

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{metavar} [{metavar} ...]",
        instance_from_str=values,
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(v, kind) for v in value),
        str_from_instance=lambda values: [str(v) for v in values],
    )


def one_name(what: str, names: Collection[str]) -> PrimitiveConstructorSpec[Any]:
    """Return the tyro spec of an option that takes one of a few names; its error suggests the nearest."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(names)}}}",
        instance_from_str=lambda words: one_of(what, words[0], names),
        is_instance=lambda value: value is None or value in names,
        str_from_instance=lambda value: [str(value)],
    )


if TYPE_CHECKING:
    Int = int
    Float = float
    MaybeInt = int | None
    MaybeFloat = float | None
    MaybePath = Path | None
    Names = tuple[str, ...]
    Numbers = tuple[int, ...]
    Decimals = tuple[float, ...]
    Plans = tuple[str, ...]
    MaybeNames = tuple[str, ...]
    Repeated = tuple[str, ...]
    Paths = tuple[Path, ...]
else:
    Int = Annotated[object, _one(_whole, "INT", (int,))]
    Float = Annotated[object, _one(_decimal, "FLOAT", (int, float))]
    MaybeInt = Annotated[object, _one(_whole, "INT", (int, NoneType))]
    MaybeFloat = Annotated[object, _one(_decimal, "FLOAT", (int, float, NoneType))]
    MaybePath = Annotated[object, _one(_path, "PATH", (Path, NoneType))]
    Names = Annotated[object, _several(str, str, "STR")]
    Numbers = Annotated[object, _several(int, _whole, "INT")]
    Decimals = Annotated[object, _several(float, _decimal, "FLOAT")]
    Plans = Annotated[object, _several(str, str, "STR", commas=False)]  # a comma is part of blocks:0,2
    MaybeNames = Annotated[object, _several(str, str, "STR", empty=True)]  # the option may be given without a value
    Paths = Annotated[object, _several(Path, _path, "PATH", commas=False, empty=True)]
    # One word per occurrence of the option, because several words that start with -- cannot follow one another.
    Repeated = UseAppendAction[tuple]
_REPEATED, _POSITIONAL = (get_args(marked)[1] for marked in (UseAppendAction[tuple], Positional[tuple]))


def optional(metavar: str, help: str, default: str = "") -> Any:
    """Return the tyro argument of an option that may be absent, without tyro's `{None}|` and `(default: None)`."""
    return arg(metavar=metavar, help=help, help_behavior_hint=f"(default: {default})" if default else "")


def flag(help: str) -> Any:
    """Return the tyro argument of a switch or list that is off by default, without a useless `(default: False)`."""
    return arg(help=help, help_behavior_hint="")


RecordHost = Annotated[bool, flag("write the name of this host into the records, next to date and command")]

_typed: ContextVar[frozenset[str]] = ContextVar("_typed", default=frozenset())


@contextmanager
def typed(words: Sequence[str]) -> Iterator[None]:
    """Record which options are on the command line, so that `given` also finds those given with their default value."""
    options = takewhile(lambda word: word != "--", words)
    names = {word[2:].partition("=")[0].replace("-", "_") for word in options if word.startswith("--")}
    token = _typed.set(frozenset(names))
    try:
        yield
    finally:
        _typed.reset(token)


def given(args: Any, default: Any = None) -> list[str]:
    """Return the names of a command's options, nested ones included, that were typed or differ from their defaults."""
    default = type(args)() if default is None else default
    words = _typed.get()
    pairs = [(f.name, getattr(args, f.name), getattr(default, f.name)) for f in fields(args)]
    return [
        name
        for field, value, usual in pairs
        for name in (
            given(value, usual) if is_dataclass(value) else [field] * (value != usual or field.rstrip("_") in words)
        )
    ]


def sizes_of(args: Any) -> Iterator[str]:
    """Yield the sizes that a command's options name, also in nested options."""
    for each in fields(args):
        value = getattr(args, each.name)
        if is_dataclass(value):
            yield from sizes_of(value)
        elif each.name in ("size", "model") and value:
            yield from [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Option:
    """One option or positional argument of a command.

    names: without dashes in front, aliases included. takes: "nothing", a switch; "one" value; "several" values; or "one
    each time", where the option may be repeated.
    """

    names: tuple[str, ...]
    takes: str
    is_positional: bool


@cache
def described(kind: type) -> tuple[Option, ...]:
    """Return the options of a command's dataclass, nested ones included."""
    return tuple(_described(kind))


def _described(kind: type) -> Iterator[Option]:
    types, hints = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        nested = None if field.default_factory is MISSING else field.default_factory()
        if is_dataclass(nested) and not isinstance(nested, type):
            yield from described(type(nested))
            continue
        extras = getattr(hints[field.name], "__metadata__", ())
        aliases = [name for extra in extras for name in getattr(extra, "aliases", None) or ()]
        names = [option(field.name.rstrip("_")), *aliases]
        if types[field.name] is bool:
            takes = "nothing"
        elif _REPEATED in extras:
            takes = "one each time"
        else:
            several = get_origin(types[field.name]) is tuple or any(
                extra.nargs == "*" for extra in extras if isinstance(extra, PrimitiveConstructorSpec)
            )
            takes = "several" if several else "one"
        yield Option(tuple(name.removeprefix("--") for name in names), takes, _POSITIONAL in extras)


def check_words(words: Sequence[str], kind: type) -> None:
    """Raise ConfigError for words that the parser would misread or refuse with an unclear message.

    These are: an option without its value, followed by another option; an option of several values given twice, where
    the first values would be ignored; and too many positional arguments.
    """
    known = described(kind)
    named = {name: each for each in known if not each.is_positional for name in each.names}
    before = [*takewhile(lambda word: word != "--", words)]
    found: dict[Option, str] = {}
    for word, following in pairwise([*before, "--"]):
        name = named_option(word)
        if name is None or name not in named:
            continue
        each = named[name]
        ends = following == "--" or named_option(following) in named
        if ends and "=" not in word and each.takes in ("one", "one each time"):
            raise ConfigError(f"--{name} has no value; give one, or leave out --{name}")
        if f"{name}-function" in named and ":" in following:
            raise ConfigError(
                f"--{name} takes numbers, got {following}; write --{name} 1.0 --{name}-function {following}"
            )
        if each in found and each.takes == "several":
            mistake = "is given twice" if name == found[each] else f"and --{found[each]} are the same option"
            raise ConfigError(f"--{name} {mistake}; write all its values after a single --{name}")
        found[each] = name
    paths = [each for each in known if each.is_positional]
    if not any(each.takes == "several" for each in paths):
        leading = [*takewhile(lambda word: not word.startswith("-"), before)]
        if extra := leading[len(paths) :]:
            takes = f"takes {counted(len(paths), 'path')}" if paths else "takes only options"
            is_own = ":" in extra[0] and "workload" in named
            before_it = "leave it out" if paths else "write the name of an option before it, or leave it out"
            remedy = f"write --workload {extra[0]}" if is_own else before_it
            raise ConfigError(f"unexpected argument {extra[0]!r}, because the command {takes}; {remedy}")


def named_option(word: str) -> str | None:
    """Return the option that a word names, without leading dashes: `--warmup_s=3` → `warmup-s`.

    None if it is not an option.
    """
    return word[2:].partition("=")[0].replace("_", "-") if word.startswith("--") else None


def refuse(names: Collection[str], why: str) -> None:
    """Raise ConfigError if any of the names is an option that would be silently ignored."""
    if names:
        options = " ".join(map(option, names))
        raise ConfigError(f"{why}; leave out {options}")


def check_modes(modes: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError with the modes of this command for an unknown mode."""
    for mode in modes:
        if mode not in {*Mode}:
            one_of("mode", mode, known)


def check_keep_graph(keep_graph: bool, modes: Collection[str]) -> None:
    """Raise ConfigError if --keep-graph would change nothing."""
    if keep_graph and Mode.FORWARD not in modes:
        refuse(["keep_graph"], "--keep-graph requires mode forward, because the other modes always keep the graph")


def derived(*fields: Declared) -> Callable[[type[T]], type[T]]:
    """Decorate a class of options, before it becomes a dataclass: add the options that its fields declare.

    An option that the class defines itself is kept.
    """

    def decorate(cls: type[T]) -> type[T]:
        own, cls.__annotations__ = cls.__annotations__, {}
        for each in fields:
            name = attribute(each)
            if name not in own:
                own[name], default = _option(each)
                setattr(cls, name, default)
            cls.__annotations__[name] = own.pop(name)
        cls.__annotations__ |= own
        return cls

    return decorate


def attribute(each: Declared) -> str:
    """Return the name of a field's option as an attribute."""
    return each.option.removeprefix("--").replace("-", "_")


def _option(each: Declared) -> tuple[Any, Any]:
    """Return the annotation and the default of a field's option."""
    field, word = each.field, "FLOAT" if each.kind is float else "INT" if each.kind is int else "STR"
    is_part = each.path.startswith("model.") and each.name != "name"
    usual = "the preset's" if is_part else field.usual
    if each.name.endswith("_bytes"):
        return Annotated[MaybeText, optional("SIZE", field.meaning)], None
    if field.takes == "one":
        if each.kind is bool:
            return Annotated[bool, flag(field.meaning)], False
        if each.kind is tuple:
            return Annotated[MaybeNames, flag(field.meaning)], ()
        if is_part or each.is_optional:
            kind: Any = {int: MaybeInt, float: MaybeFloat}.get(each.kind, MaybeText)
            return Annotated[kind, optional("PATH:NAME" if field.plugin else word, field.meaning, usual)], None
        kind = {int: Int, float: Float}.get(each.kind, str)
        if usual:
            return Annotated[kind, optional(word, field.meaning, usual)], each.default
        return Annotated[kind, arg(help=field.meaning, aliases=field.aliases or None)], each.default
    kind = {int: Numbers, float: Decimals}.get(each.kind, Plans if field.takes == "many words" else Names)
    hint = f"(default: {usual})" if usual else None
    default = () if is_part or each.is_optional else (each.default,)
    return Annotated[kind, arg(help=field.meaning, aliases=field.aliases or None, help_behavior_hint=hint)], default


def of_subject(subject: Subject) -> list[Declared]:
    """Return the fields of a subject that have an option."""
    return [each for each in LEAVES.values() if each.field.takes and subject in each.subjects and not each.always]


def of_own_code() -> list[Declared]:
    """Return the fields that can name the user's own code in a training step, and the fields that such code needs."""
    named = [each for each in of_subject(Subject.STEP) if each.field.plugin.startswith("training.")]
    named = [each for each in named if each.kind is str]
    return [FIELDS[each.field.part_of] for each in named if each.field.part_of] + named


def axes_of(args: Any, subject: Subject) -> dict[str, Sequence[Any]]:
    """Return the values that the options give to the fields of a subject, by field name."""
    axes = {}
    for each in of_subject(subject):
        value = getattr(args, attribute(each))
        values = [value] * (value is not None) if each.field.takes == "one" else value
        if values:
            axes[each.name] = values
    return axes


@dataclass(frozen=True)
@derived(*(each for name, each in FIELDS.items() if "workload" in (name, each.field.part_of)))
class Workloads:
    """Step to measure: the built-in language model's, or your own."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def base(self, base: RunConfig) -> RunConfig:
        """Return the base with this workload.

        Raises ConfigError if a file is given without the name of an object in it.
        """
        if (name := self.workload[0]).endswith(".py"):
            plugins.check("workloads", name)
        return replace(base, workload=self.workload[0], inputs=self.inputs, workload_args=self.set)


@dataclass(frozen=True)
@derived(*of_subject(Subject.STEP))
class ModelCells:
    """Training steps to measure: every combination of the values given."""

    size: Annotated[Names, arg(help=f"presets: {', '.join(PRESETS)}")] = ("small",)
    recipe: Annotated[
        MaybeNames,
        flag(f"named sets of the options above: {', '.join(RECIPES)}; an option that is given replaces the recipe's"),
    ] = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def configs(self, base: RunConfig, workloads: Workloads | None = None) -> list[RunConfig]:
        if _is_call(workloads) and self.mode == (RunConfig.mode,) and "mode" not in given(self):
            mode: dict[str, Any] = {"mode": (Mode.FORWARD_BACKWARD,)}
            return replace(self, **mode).configs(base, workloads)
        check_modes(self.mode, STEP_MODES)
        check_keep_graph(self.keep_graph, self.mode)
        if {*self.optimizer} != {RunConfig.optimizer} and Mode.TRAIN_STEP not in self.mode:
            refuse(["optimizer"], f"--optimizer requires mode train-step, got {' and '.join(self.mode)}")
        if {*self.loss} != {RunConfig.loss_function} and {*self.mode} == {Mode.FORWARD}:
            refuse(["loss"], "--loss has no effect in mode forward, which computes none")
        if {*self.checkpoint} != {"none"} and {*self.mode} == {Mode.FORWARD} and not self.keep_graph:
            raise ConfigError(
                "--checkpoint has no effect in mode forward, which runs no backward; leave out "
                "--checkpoint, choose another "
                "--mode, or add --keep-graph"
            )
        axes = axes_of(self, Subject.STEP)
        axes = {"size": axes.pop("name"), **axes}
        axes.pop("compile_scope")  # applies only to compiled cells
        if _is_call(workloads):
            sizes = {attribute(each) for path, each in LEAVES.items() if path.startswith("model.")}
            used = {attribute(LEAVES[f"model.{name}"]) for name in ("name", "d_model", "num_heads", "context_length")}
            refuse(sizes.intersection(given(self)) - used, "--workload attention is one call, of heads and their size")
            return [_call_of_a_layer(config) for config in grid(base, **axes)]
        if workloads is not None:
            base, axes = workloads.base(base), {"workload": workloads.workload, **axes}
        return self._scoped(self._with_recipes(grid(base, **axes)))

    def _scoped(self, configs: list[RunConfig]) -> list[RunConfig]:
        """Return the cells, with --compile-scope set in the compiled ones.

        Raises ConfigError if no cell is compiled.
        """
        if self.compile_scope == RunConfig.compile_scope:
            return configs
        if all(c.compile == "none" for c in configs):
            raise ConfigError(
                f"--compile-scope {self.compile_scope} has no effect without --compile; add --compile default, or "
                "leave out --compile-scope"
            )
        return [c if c.compile == "none" else replace(c, compile_scope=self.compile_scope) for c in configs]

    def _with_recipes(self, configs: list[RunConfig]) -> list[RunConfig]:
        """Return each cell with each recipe; an option that is given replaces the recipe's."""
        if not self.recipe:
            return configs
        own = {name for name in given(self) if name != "recipe"}
        cells = []
        for config, name in product(configs, self.recipe):
            recipe = RECIPES[one_of("recipe", name, RECIPES)]
            options = recipe.of(config.mode)
            options = {k: v for k, v in options.items() if k not in own}
            _check_recipe(name, options, config)
            cells.append(replace(config, **options))
        return cells


def _is_call(workloads: Workloads | None) -> bool:
    return workloads is not None and workloads.workload == (Subject.ATTENTION,)


def _call_of_a_layer(config: RunConfig) -> RunConfig:
    """Return the causal attention call of one layer of a cell's model.

    Raises ConfigError for options that the call does not use.
    """
    shape = AttentionShape(
        config.batch_size, config.model.num_heads, config.tokens_per_sequence, config.model.d_head, causal=True
    )
    taken = {
        name: getattr(config, name) for name, each in FIELDS.items() if name not in ("model", "batch_size", "seq_len")
    }
    return RunConfig(**taken | {"workload": Subject.ATTENTION, "shape": shape})


def _check_recipe(name: str, options: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if the options that a recipe adds to a cell contradict it.

    The message names the recipe, not the options.
    """
    if unfit := [FIELDS[option] for option in options if config.subject not in FIELDS[option].subjects]:
        raise ConfigError(f"{applies(f'--recipe {name}', unfit[0].subjects, config.workload)}; leave out --recipe")
    if "compile_scope" in options and options.get("compile", config.compile) == "none":
        raise ConfigError(
            f"--recipe {name} compiles each block, and --compile none forbids it; leave out --compile, or use "
            "--recipe eager"
        )


def of_each(steps: Steps, configs: Callable[[Steps], list[RunConfig]]) -> list[RunConfig]:
    """Return the cells for each way to measure, grouped so that the variants of one cell are neighbours.

    configs: returns the cells for one way to measure.
    """
    several = [attribute(each) for each in _MEASUREMENT if isinstance(getattr(steps, attribute(each)), tuple)]
    values = product(*(getattr(steps, name) for name in several))
    ways = [replace(steps, **{name: (value,) for name, value in zip(several, way, strict=True)}) for way in values]
    return [config for same in zip(*map(configs, ways), strict=True) for config in same]


_MEASUREMENT = [each for each in FIELDS.values() if each.field.takes and each.field.is_measurement]


@dataclass(frozen=True)
@derived(*_MEASUREMENT)
class Steps:
    """Measurement of each cell. A cell is one combination of the values above."""

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def base(self, **rest: Any) -> RunConfig:
        """Return a configuration with these options. Raises ConfigError if an option has several values."""
        given = {each: getattr(self, attribute(each)) for each in _MEASUREMENT}
        for each, value in given.items():
            if isinstance(value, tuple):
                if len(value) > 1:
                    got = " ".join(map(str, value))
                    raise ConfigError(f"{each.option} takes one value in this command, got {got}; give one of them")
                given[each] = value[0]
        values: dict[str, Any] = {
            each.name: parse_bytes(value, each.option) if isinstance(value, str) and each.kind is int else value
            for each, value in given.items()
        }
        return RunConfig(**values | rest)


@dataclass(frozen=True)
class Sweep:
    """Order and repetition of the cells, and the folder of their records."""

    out: Annotated[
        MaybePath, optional("DIR", "folder for the records; if it has records, the run is resumed", "runs/TIME-COMMAND")
    ] = None
    fresh: Annotated[bool, flag("rename the folder's old records, and measure every cell again")] = False
    repeats: Annotated[Int, arg(help="times that each cell is measured, each in a new process")] = 1
    interleave: Annotated[bool, flag("measure one round of each cell in turn, instead of one cell after the other")] = (
        False
    )
    shuffle: Annotated[bool, flag("run the cells in random order, seeded by --seed")] = False
    timeout_s: Annotated[MaybeFloat, optional("SECONDS", "stop a cell if one of its rounds takes longer")] = None
    skip_oom: Annotated[bool, flag("skip cells whose predicted memory exceeds the device's")] = False
    record_host: RecordHost = False
    dry_run: Annotated[bool, flag("list the cells with their predicted memory, and run nothing")] = False
    part: Annotated[
        MaybeText,
        optional("K/N", "run share K of N of the sweep (K from 0): cells K, K+N, …, for N jobs", "all cells"),
    ] = None

    def of_share(self, cells: L) -> L:
        """Return the cells of this job. Raises ConfigError."""
        if self.part is None:
            return cells
        match = re.fullmatch(r"(\d+)/(\d+)", self.part)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(
                f"--part must be K/N with K below N, got {self.part!r}; for four jobs, use 0/4, 1/4, 2/4 and 3/4"
            )
        if not (mine := cells[int(match[1]) :: int(match[2])]):
            raise ConfigError(
                f"--part {self.part} selects no cell, because the sweep has only {counted(len(cells), 'cell')}; use "
                f"K/N with N at most {len(cells)}, such as 0/{len(cells)}"
            )
        return type(cells)(mine)  # type: ignore[call-arg]

    def folder(self, command: str) -> Path:
        return self.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{command}"

    def claim(self, command: str) -> Path:
        """Return --out, or create a new folder for this command, also if several commands start at once.

        Raises OSError if none can be created.
        """
        first = self.folder(command)
        if self.out:
            return first
        for folder in chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2))):
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                if not (isinstance(error, FileExistsError) and os.path.lexists(folder)):
                    raise OSError(
                        f"cannot create {folder}: {error.strerror}; choose another folder with --out"
                    ) from error
            else:
                return folder
        raise AssertionError("unreachable: count() never ends")


@dataclass(frozen=True)
class Experiments:
    """Experiments after the last step of each cell: the step is repeated with a change that a remedy would make."""

    no_experiments: Annotated[bool, flag("make no experiments")] = False
    experiments_s: Annotated[Float, arg(metavar="SECONDS", help="time for all experiments of the command")] = DEFAULT_S

    def limit_s(self, configs: Sequence[RunConfig]) -> float:
        """Return the time for the experiments of these cells. Raises ConfigError for options that have no effect."""
        from cs_systems.measure.runtime.allowance import refusal

        if not self.experiments_s > 0:
            raise ConfigError(
                f"--experiments-s must be more than 0 s, got {self.experiments_s:g}; for none, use --no-experiments"
            )
        chosen = given(self)
        if len(chosen) > 1:
            raise ConfigError("--no-experiments and --experiments-s exclude each other; leave out one of them")
        reasons = [refusal(config) for config in configs]
        if reasons and None not in reasons:
            refuse(chosen, f"there are no experiments here, because {reasons[0]}")
            return 0.0
        return 0.0 if self.no_experiments else self.experiments_s


_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_seconds(text: str, given_by: str) -> float:
    """Parse a time: `90s` → 90.0, `10m` → 600.0. Raises ConfigError, also for a number without a unit.

    given_by: the option that has the text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"{given_by} is {shown(text)}; write a time such as 90s, 10m or 1h")
    return float(found[1]) * _UNITS_S[found[2]]


def parse_bytes(text: str, given_by: str) -> int:
    """Parse bytes: `8GiB` → 8589934592, `512B` → 512.

    Raises ConfigError for other text, such as a number without a unit.

    given_by: the option or argument that the text comes from.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?i?)(b?)", text.strip().lower())
    try:
        assert match is not None
        size = int(float(match[1]) * _UNITS[match[2]])
    except (AssertionError, KeyError, ValueError, OverflowError):
        raise ConfigError(f"{given_by} {shown(text)} is not a size in bytes; use a form such as 8GiB or 512B") from None
    if float(match[1]) and not match[2] and not match[3]:
        raise ConfigError(f"{given_by} {shown(text)} has no unit; use {text}GiB, {text}GB, or {text}B for bytes")
    if not size:
        raise ConfigError(f"{given_by} {shown(text)} is less than 1 byte; use a form such as 8GiB or 512B")
    return size
