"""Configuration of a run: frozen, validated, pure data.

A `RunConfig` is the only input of a run. All of it is JSON. The same value goes from the command line to a worker
process, into the record, and into the key by which a sweep resumes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cs_systems.core.checkpoint_plan import segments
from cs_systems.core.collectives import CollectiveShape
from cs_systems.core.display import Displayed
from cs_systems.core.phases import Phase as Phase
from cs_systems.core.plugins import is_foreign
from cs_systems.core.shapes import ALIGNMENTS as ALIGNMENTS
from cs_systems.core.shapes import PRESETS as PRESETS
from cs_systems.core.shapes import AttentionShape as AttentionShape
from cs_systems.core.shapes import ModelConfig as ModelConfig
from cs_systems.core.shapes import preset as preset
from cs_systems.core.validation import ConfigError as ConfigError
from cs_systems.core.validation import (
    arguments_checked,
    counts,
    did_you_mean,
    field_types,
    fields_checked,
    flags,
    not_negative,
    number,
    of_type,
    settings,
    shown,
    whole,
)
from cs_systems.core.validation import one_of as one_of


class Mode(StrEnum):
    """Extent of a step; `BACKWARD` alone, over a retained graph, exists only for the attention workload."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_BACKWARD = "forward-backward"
    TRAIN_STEP = "train-step"


class Precision(StrEnum):
    """Precision of the computation.

    `FP32` has TF32 off. `BF16` and `FP16` are autocast over fp32 parameters; `BF16_PURE` has bf16 parameters.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16_PURE = "bf16-pure"
    FP8 = "fp8"  # BF16, with the linear layers of the blocks in fp8

    @property
    def is_autocast(self) -> bool:
        return self in (Precision.BF16, Precision.FP16, Precision.FP8)


COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "aot_eager")
SWITCHES = {
    **dict.fromkeys(("on", "true", "yes", "1", "inductor"), "default"),
    **dict.fromkeys(("off", "false", "no", "0"), "none"),
}
# Modes in which Inductor launches kernels one by one, so that a trace attributes them to layers.
MARKED_COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
OPTIMIZERS = ("default", "adamw", "adamw_foreach", "adamw_fused", "adamw_master", "adamw_bf16_state")
COMPILE_SCOPES = ("model", "block")
GRAPHS = ("none", "step")
_MOST_BLOCKS = 4096  # of a model from outside the package, whose own number is known once it is built
L2_STATES = ("clear", "warm")
ALLOCATORS = ("default", "expandable_segments")
# These workloads use every field that describes the computation; any other workload may ignore some.
CONFIGURED = ("train_step", "attention", "precision_error", "training_curve")
_BUILT_IN_STEPS = ("train_step", "training_curve")
BUILT_IN_ONLY = ("compile_scope", "graph", "parts")  # fields that apply to those steps alone
STRATEGY_FIELDS = ("bucket_size_mb", "tp_degree")  # options of strategies that are fields of their own
# Tuples of texts, with an example of one.
_TUPLES = {
    "strategy_args": "comm_dtype=bf16", "profiler_args": "--option", "workload_args": "width=128",
    "parts": "fused_rmsnorm",
}  # fmt: skip
# Arguments that are often given to RunConfig or run, and what to write instead.
INSTEAD = {
    **{f.name: f"write model=preset('small', {f.name}={{value}})" for f in dataclasses.fields(ModelConfig)},
    "size": "write model=preset({value})",
    "context_length": "use seq_len",
}
_UNNAMED = ("train_step", "attention", "collective")  # the rest of a cell's description identifies these


@functools.partial(fields_checked, instead=INSTEAD)
@dataclass(frozen=True)
class RunConfig:
    """Configuration of one cell of a sweep.

    `train_step` measures `model`, `attention` measures `shape`, and `collective` measures `collective`. `batch_size` is
    the batch of one rank for any `world_size`: weak scaling.
    """

    workload: str = "train_step"
    model: ModelConfig = PRESETS["small"]
    shape: AttentionShape | None = None
    collective: CollectiveShape | None = None
    batch_size: int = 4
    seq_len: int | None = None  # tokens; None: the model's context length
    mode: Mode = Mode.TRAIN_STEP
    attention: str = "naive"
    precision: Precision = Precision.FP32
    compile: str = "none"
    compile_scope: str = "model"  # "block": each block, so that compile time does not grow with depth
    graph: str = "none"  # "step": the whole step as one CUDA graph
    parts: tuple[str, ...] = ()  # plug-ins of training/parts
    optimizer: str = "default"
    checkpoint: str = "none"  # a plan of `checkpoint_plan`
    keep_graph: bool = False
    device: str = "auto"
    warmup: int = 5  # steps
    warmup_s: float = 0.0  # minimum duration of the warm-up, beside `warmup` steps
    steps: int = 10
    rounds: int = 1  # number of measurement rounds; the steps are divided among them
    l2: str = "warm"
    memory_limit_bytes: int | None = None
    allocator: str = "default"  # settings of the caching allocator beside those of PYTORCH_CUDA_ALLOC_CONF
    seed: int = 0
    world_size: int = 1  # ranks, each with its own device
    strategy: str = "single"  # strategy of `parallel`; several are joined by +
    bucket_size_mb: float | None = None  # 2²⁰ bytes, for a strategy with buckets; None: its default
    tp_degree: int | None = None  # ranks that divide each block (tensor parallelism); None: all
    strategy_args: tuple[str, ...] = ()  # further options of the strategy: ("max_ctas=16", "comm_dtype=bf16")
    profiler: str = "none"
    profiler_args: tuple[str, ...] = ()  # further options of the profiler's own command
    workload_args: tuple[str, ...] = ()  # arguments of a foreign workload's factory: ("width=128", "lr=3e-4")
    inputs: str | None = None  # path.py:batch or package.module:batch, if the workload names a model

    def __post_init__(self) -> None:
        _check_types(self)
        for name, kind in (("mode", Mode), ("precision", Precision)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                one_of(name, value, kind)
                object.__setattr__(self, name, kind(value))
        counts(self, "batch_size", "steps", "rounds")
        whole(self, "warmup", "seed")
        number(self, "warmup_s")
        not_negative(self, "warmup", "warmup_s")
        _check_step(self)
        try:
            segments(self.checkpoint, _MOST_BLOCKS if is_foreign(self.workload) else self.model.num_layers)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        one_of("l2 state", self.l2, L2_STATES)
        one_of("allocator", self.allocator, ALLOCATORS)
        if self.steps < self.rounds:
            raise ConfigError(
                f"steps is {self.steps}, less than rounds {self.rounds}; give at least one step for each round",
                "steps",
                "rounds",
            )
        if self.profiler != "none" and self.rounds > 1:
            raise ConfigError(f"rounds is {self.rounds}, but a profile covers one round; leave out rounds", "rounds")
        if self.seq_len is not None:
            counts(self, "seq_len")
            if self.seq_len > self.model.context_length:
                raise ConfigError(
                    f"seq_len is {self.seq_len}, more than context_length {self.model.context_length} of the "
                    f"ModelConfig; lower seq_len, or give a ModelConfig with context_length {self.seq_len}"
                )
        if self.memory_limit_bytes is not None:
            counts(self, "memory_limit_bytes")
        if self.workload == "attention" and self.shape is None:
            object.__setattr__(self, "shape", AttentionShape())
        if self.workload == "collective" and self.collective is None:
            object.__setattr__(self, "collective", CollectiveShape())
        if self.workload != "attention" and ":" not in self.workload and self.mode is Mode.BACKWARD:
            raise ConfigError("mode backward requires workload attention; use mode forward-backward")
        if self.workload == "attention" and self.checkpoint != "none":
            raise ConfigError(
                "checkpoint requires a model, and workload attention has none; leave out checkpoint", "checkpoint"
            )
        if self.workload == "attention" and self.mode is Mode.TRAIN_STEP:
            raise ConfigError(
                "mode is train-step, which workload attention does not have; set mode to forward, backward or "
                "forward-backward",
                "mode",
            )
        _check_foreign(self)
        _check_ranks(self)
        numbered = self.device.startswith("cuda:") and self.device[5:].isdigit()
        if self.device not in ("auto", "cpu", "cuda") and not numbered:
            raise ConfigError(f"unknown device {self.device!r}; use auto, cpu, cuda or cuda:N")

    @property
    def is_distributed(self) -> bool:
        """Flag of a cell that runs on ranks; a cell on one rank may be the baseline of several."""
        return self.world_size > 1 or self.strategy != "single" or self.collective is not None

    @property
    def own_code(self) -> dict[str, tuple[str, ...]]:
        """Names of code outside the package, by the field that has them; fields without any are left out."""
        named = {
            "attention": (self.attention,), "workload": (self.workload,), "inputs": (self.inputs or "",),
            "parts": self.parts,
        }  # fmt: skip
        found = {field: tuple(filter(is_foreign, names)) for field, names in named.items()}
        return {field: names for field, names in found.items() if names}

    @property
    def sources(self) -> tuple[str, ...]:
        """Files and modules outside the package that the config names, sorted."""
        named = (name.rpartition(":")[0] for names in self.own_code.values() for name in names if ":" in name)
        return tuple(sorted({*named}))

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Options of the strategy that are set."""
        options = {name: getattr(self, name) for name in STRATEGY_FIELDS}
        return {name: value for name, value in options.items() if value is not None} | settings(self, "strategy_args")

    @property
    def computes_in(self) -> Precision:
        """Precision of the matrix products.

        Without autocast it is the strategy's `compute_dtype` if that is bf16 or fp16, and else `precision`; the part
        fp8_linear computes in fp8 whatever the parameters' dtype is.
        """
        if "fp8_linear" in self.parts:
            return Precision.FP8
        compute_dtype = self.strategy_options.get("compute_dtype")
        if self.precision.is_autocast or compute_dtype not in (Precision.BF16, Precision.FP16):
            return self.precision
        return Precision(compute_dtype)

    @property
    def tokens_per_sequence(self) -> int:
        return self.model.context_length if self.seq_len is None else self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict that survives a JSON round trip: tuples become lists."""
        lists = {name: list(getattr(self, name)) for name in _TUPLES}
        return dataclasses.asdict(self) | lists

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunConfig:
        config: RunConfig = _build(cls, data)
        return config

    def key(self) -> str:
        """Return a hash of the fields that differ from their defaults, so that a new field keeps old keys."""
        text = json.dumps(_without_defaults(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_types(config: RunConfig) -> None:
    """Raise ConfigError for a field of the wrong type, unless it is a number or an enumeration; make lists tuples."""
    of_type(config, ModelConfig, "a ModelConfig, such as preset('small')", "model")
    of_type(config, AttentionShape | None, "an AttentionShape", "shape")
    of_type(config, CollectiveShape | None, "a CollectiveShape", "collective")
    of_type(config, str | None, "a text, path/to/file.py:name", "inputs")
    if isinstance(config.workload, ModelConfig):
        raise ConfigError("workload is a ModelConfig; write RunConfig(model=preset('small'))", "workload")
    if not isinstance(config.workload, str):
        remedy = "give its name, 'path/to/file.py:name', or measure the object itself with run(model=…, inputs=…)"
        raise ConfigError(f"workload is {shown(config.workload)}; {remedy}")
    if not isinstance(device := config.device, str):
        is_torch = (type(device).__module__, type(device).__name__) == ("torch", "device")  # without an import of it
        given = f"torch.device('{device}')" if is_torch else shown(device)
        usable = is_torch and device.type in ("cpu", "cuda")
        remedy = f"'{device}'" if usable else "'auto', 'cpu', 'cuda' or 'cuda:N'"
        raise ConfigError(f"device is {given}; write {remedy}", "device")
    of_type(config, str, "a text, such as 'naive' or 'sdpa_flash'", "attention")
    of_type(config, str, "a text, such as 'single' or 'ddp_bucketed'", "strategy")
    of_type(config, str, "a text, such as 'none' or 'kineto'", "profiler")
    of_type(config, str, "the text 'none', or a plan such as 'every:1'", "checkpoint")
    flags(config, "keep_graph")
    for name, example in _TUPLES.items():
        words = getattr(config, name)
        if not isinstance(words, list | tuple):
            raise ConfigError(
                f"{name} is {shown(words)}; give a tuple of texts, such as ({example!r},), or a list of such tuples to "
                "grid"
            )
        if (wrong := next((word for word in words if not isinstance(word, str)), "")) != "":
            raise ConfigError(f"{name} has the element {shown(wrong)}; each must be a text, such as {example!r}")
        object.__setattr__(config, name, tuple(words))  # JSON turns tuples into lists


def _check_step(config: RunConfig) -> None:
    """Raise ConfigError for an unknown way to compute a training step, or one that would not be applied."""
    one_of("compile mode", config.compile, COMPILE_MODES, SWITCHES)
    one_of("compile scope", config.compile_scope, COMPILE_SCOPES)
    if config.compile_scope != "model" and config.compile == "none":
        raise ConfigError(
            f"compile_scope {config.compile_scope} has no effect while compile is none; set compile to a mode such as "
            "default, or leave out compile_scope",
            "compile",
            "compile_scope",
        )
    one_of("graph", config.graph, GRAPHS)
    if config.optimizer != RunConfig.optimizer:
        one_of("optimizer", config.optimizer, OPTIMIZERS[1:])
    if twice := next((name for name in config.parts if config.parts.count(name) > 1), None):
        raise ConfigError(f"parts names {twice} twice; name each part once", "parts")
    if config.workload not in _BUILT_IN_STEPS:
        for name in BUILT_IN_ONLY:
            if getattr(config, name) != getattr(RunConfig, name):
                raise ConfigError(f"{built_in_only(name, config.workload)}; leave out {name}", name)


def built_in_only(what: str, workload: str) -> str:
    """Return why an option, which changes how the built-in model computes, cannot be applied to a workload."""
    return f"{what} applies to the built-in model only, and the workload is {workload}"


def _check_foreign(config: RunConfig) -> None:
    """Raise ConfigError if options for workloads from outside the package are malformed or lack such a workload."""
    settings(config, "workload_args")
    for needing in ("workload_args", "inputs"):
        if getattr(config, needing) and ":" not in config.workload:
            raise ConfigError(
                f"{needing} requires a workload of your own, path.py:name, and the workload is {config.workload}; "
                f"leave out {needing}",
                needing,
            )
    if config.inputs is not None and ":" not in config.inputs:
        raise ConfigError(
            f"inputs is {shown(config.inputs)}; write path/to/file.py:name or package.module:name", "inputs"
        )


def _check_ranks(config: RunConfig) -> None:
    """Raise ConfigError if the options for ranks contradict each other.

    `parallel.check` checks that the strategy exists and accepts its options.
    """
    counts(config, "world_size")
    if doubled := (given := settings(config, "strategy_args")).keys() & {*STRATEGY_FIELDS}:
        name = min(doubled)
        raise ConfigError(
            f"strategy_args sets '{name}', which must be set separately; leave it out there, and use "
            f"{name}={given[name]}",
            "strategy_args",
            name,
        )
    if config.collective is not None:
        if config.workload != "collective" and ":" not in config.workload:
            raise ConfigError(
                f"workload {config.workload} runs no collective, but collective "
                f"{config.collective.collective} is given; use workload collective"
            )
        config.collective.check(config.world_size)
    if config.bucket_size_mb is not None:
        number(config, "bucket_size_mb")
        if config.bucket_size_mb <= 0:
            raise ConfigError(f"bucket_size_mb is {config.bucket_size_mb}; it must be above 0", "bucket_size_mb")
    if config.tp_degree is not None:
        counts(config, "tp_degree")
    if config.strategy == "single" and config.world_size > 1 and config.workload == "train_step":
        remedy = "use a strategy such as ddp_bucketed, or world_size 1"
        raise ConfigError(
            f"strategy single trains on one process, got world_size {config.world_size}; {remedy}", "world_size"
        )
    if config.strategy != "single" and config.workload != "train_step" and ":" not in config.workload:
        raise ConfigError(
            f"strategy {config.strategy} applies to workload train_step or one of your own, path.py:name, and the "
            f"workload is {config.workload}; use such a workload, or leave out strategy"
        )
    if config.is_distributed and config.device.startswith("cuda:"):
        raise ConfigError(f"device {config.device} is a single GPU, but each rank needs its own; use device cuda")


def _without_defaults(config: Any) -> dict[str, Any]:
    result = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value != f.default:
            result[f.name] = _without_defaults(value) if dataclasses.is_dataclass(value) else value
    return result


def _build(cls: type, data: Mapping[str, Any]) -> Any:
    hints = field_types(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(data) - known):
        newer = "a newer version wrote this configuration"
        near = did_you_mean(unknown[0], known)
        remedy = f"{near} If {newer}, upgrade cs-systems" if near else f"leave it out, or upgrade cs-systems if {newer}"
        raise ConfigError(f"{cls.__name__} has no field {unknown[0]!r}; {remedy}")
    values = {}
    for name, value in data.items():
        kind = hints[name]
        options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        nested = next((o for o in options if dataclasses.is_dataclass(o)), None)
        values[name] = _build(typing.cast(type, nested), value) if nested and isinstance(value, Mapping) else value
    return cls(**values)


class Grid(Displayed, list[RunConfig]):
    """List of the cells of a sweep, which a notebook shows as a table of what varies."""

    def _displayed(self) -> tuple[str, list[RunConfig]]:
        return "" if self else "no cell", list(self)


@arguments_checked
def grid(base: RunConfig | None = None, **axes: Iterable[Any]) -> Grid:
    """Return every combination of the axes over `base`, the last axis varying fastest.

    An axis is a RunConfig field, `size` (preset names), or a field of the model or (for attention) of the shape:
    `grid(size=["small", "medium"], context_length=[128, 256], attention=["naive", "sdpa_flash"])`.
    """
    base = RunConfig() if base is None else base
    if not isinstance(base, RunConfig):
        raise ConfigError(f"base is {shown(base)}; give a RunConfig, and the axes by name: grid(size=['small'])")
    model_fields = {f.name for f in dataclasses.fields(ModelConfig)} - {"name"}
    shape_fields = {f.name for f in dataclasses.fields(AttentionShape)}
    run_fields = {f.name for f in dataclasses.fields(RunConfig)}
    listed: dict[str, list[Any]] = {}
    for axis, values in axes.items():
        one_of("axis", axis, sorted(run_fields | model_fields | shape_fields | {"size"}))
        if isinstance(values, str) or not isinstance(values, Iterable):
            example = f", such as {axis}=[{shown(values)}]" if isinstance(values, str | int | float) else ""
            raise ConfigError(f"{axis} is {shown(values)}; give a list of values{example}")
        listed[axis] = [*values]
        if not listed[axis]:
            raise ConfigError(f"{axis} has no value; give at least one")
    cells: list[RunConfig] = []
    for values in itertools.product(*listed.values()):
        cell = dict(zip(listed, values, strict=True))
        run = {k: cell.pop(k) for k in list(cell) if k in run_fields}
        model = preset(cell.pop("size")) if "size" in cell else run.pop("model", base.model)
        if not isinstance(model, ModelConfig):
            raise ConfigError(f"model is {shown(model)}; it must be a ModelConfig, such as preset('small')")
        if shape := {k: cell.pop(k) for k in list(cell) if k in shape_fields}:
            if (workload := run.get("workload", base.workload)) in _BUILT_IN_STEPS:
                axis = next(iter(shape))
                meant = {"batch": "batch_size", "seq": "seq_len", "heads": "num_heads"}.get(axis)
                remedy = f"use {meant}" if meant else f"leave out {axis}"
                raise ConfigError(
                    f"{axis} is a setting of an attention call, but the workload is {workload}; {remedy}, or give "
                    "RunConfig(workload='attention', mode='forward') as base"
                )
            run["shape"] = replace(replace(base, **run).shape or AttentionShape(), **shape)
        cells.append(replace(base, **{**run, "model": replace(model, **cell)}))
    return Grid(cells)


def describe(config: RunConfig, without: Collection[str] = ()) -> str:
    """Return one line that identifies this cell in progress output, errors and tables.

    Args:
        config: the cell.
        without: fields to leave out. Fields of the model and the shape are written `model.context_length`, `shape.seq`.

    For a workload that is not CONFIGURED, only fields that differ from their defaults appear, because it is unknown
    whether it uses the others.
    """
    silent = {*without}
    if config.workload not in CONFIGURED:
        default = RunConfig()
        silent |= _same(config, default) | {f"model.{name}" for name in _same(config.model, default.model)}
        silent -= {"seq_len"} - {*without}  # None is the model's context length, which is compared separately
    if config.workload in _UNNAMED:
        silent.add("workload")
    parts = {
        "workload": config.workload,
        "workload_args": " ".join(config.workload_args),
        "": _words(config, silent),
        "attention": config.attention,
        "precision": config.precision.value,
        "mode": config.mode.value,
        "compile": "" if config.compile == "none" else f"compile={config.compile}",
        "compile_scope": "" if config.compile_scope == "model" else f"by {config.compile_scope}",
        "graph": "" if config.graph == "none" else f"graph of the {config.graph}",
        "parts": "+".join(config.parts),
        "optimizer": "" if config.optimizer == "default" else config.optimizer,
        "checkpoint": "" if config.checkpoint == "none" else f"checkpoint={config.checkpoint}",
        "strategy": "" if config.strategy == "single" else ":".join([config.strategy, *config.strategy_args]),
        "bucket_size_mb": "" if config.bucket_size_mb is None else f"buckets of {config.bucket_size_mb:g} MB",
        "tp_degree": "" if config.tp_degree is None else f"tp_degree={config.tp_degree}",
        "world_size": "" if config.world_size == 1 else f"{config.world_size} ranks",
        "allocator": "" if config.allocator == "default" else config.allocator,
        "profiler": "" if config.profiler == "none" else f"under {config.profiler}",
    }
    return " · ".join(text for name, text in parts.items() if text and name not in silent)


def same_fields(configs: Sequence[RunConfig]) -> set[str]:
    """Return the fields that are equal in all cells, as `describe` leaves them out: also `model.x` and `shape.x`."""
    found = set[str]()
    for name in ("", "model", "shape"):
        parts = [getattr(c, name) if name else c for c in configs]
        if all(part is not None for part in parts):
            alike = set.intersection(*(_same(parts[0], part) for part in parts))
            found |= {f"{name}.{field}" for field in alike} if name else alike
    if "model.context_length" not in found:
        found.discard("seq_len")  # None is the model's context length
    return found | {"model.name"} if "model" in found else found


def _same(a: Any, b: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(a) if getattr(a, f.name) == getattr(b, f.name)}


def _words(config: RunConfig, silent: Collection[str]) -> str:
    if config.collective:
        return str(config.collective)
    return _shape_words(config.shape, silent) if config.shape else _model_words(config, silent)


def _model_words(config: RunConfig, silent: Collection[str]) -> str:
    name = [] if "model.name" in silent else [config.model.name]
    changes = (f"{k}={v}" for k, v in config.model.changed().items() if f"model.{k}" not in silent)
    words = ["+".join([*name, *changes])]
    length = "model.context_length" if config.seq_len is None else "seq_len"
    if not {length, "seq_len"} & {*silent}:
        words.append(f"ctx {config.tokens_per_sequence}")
    if "batch_size" not in silent:
        words.append(f"batch {config.batch_size}")
    return " ".join(filter(None, words))


def _shape_words(shape: AttentionShape, silent: Collection[str]) -> str:
    sizes = {name: getattr(shape, name) for name in ("batch", "heads", "seq", "d_head")}
    shown = {name: size for name, size in sizes.items() if f"shape.{name}" not in silent}
    whole = len(shown) == len(sizes)
    words = ["×".join(map(str, sizes.values()))] if whole else [f"{name} {size}" for name, size in shown.items()]
    if shape.causal and "shape.causal" not in silent:
        words.append("causal")
    if shape.window is not None and "shape.window" not in silent:
        words.append(f"window {shape.window}")
    return " ".join(words)
