"""Configuration of a run: frozen, validated, pure data.

A `RunConfig` is the only input of a run. All of it is JSON. The same value goes from the command line to a worker
process, into the record, and into the key by which a sweep resumes.
"""

import dataclasses
import functools
import itertools
import json
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Self

from cs_systems.core import optimizers, parts, plugins
from cs_systems.core.checkpoint_plan import FORMS, segments
from cs_systems.core.collectives import CollectiveShape
from cs_systems.core.display import Displayed
from cs_systems.core.fields import EVERY, Field, Subject, applies, check_values, declared, leaves
from cs_systems.core.phases import Phase as Phase
from cs_systems.core.plugins import is_foreign
from cs_systems.core.shapes import ALIGNMENTS as ALIGNMENTS
from cs_systems.core.shapes import PRESETS as PRESETS
from cs_systems.core.shapes import AttentionShape as AttentionShape
from cs_systems.core.shapes import ModelConfig as ModelConfig
from cs_systems.core.shapes import edition as edition
from cs_systems.core.shapes import preset as preset
from cs_systems.core.validation import (
    OPTIONS,
    arguments_checked,
    did_you_mean,
    field_types,
    fields_checked,
    settings,
    shown,
)
from cs_systems.core.validation import ConfigError as ConfigError
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


STEP_MODES = (Mode.FORWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP)
COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "aot_eager")
SWITCHES = {
    **dict.fromkeys(("on", "true", "yes", "1", "inductor"), "default"),
    **dict.fromkeys(("off", "false", "no", "0"), "none"),
}
# modes in which Inductor launches kernels one by one, so that a trace can attribute them to layers
MARKED_COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
# modes in which it captures kernels in CUDA graphs, which the next step overwrites
CAPTURED_COMPILE_MODES = ("reduce-overhead", "max-autotune")
LOSSES, CLIP_FUNCTIONS, DATA = ("cross_entropy",), ("torch",), ("fixed", "windows")
OPTIMIZERS = (*optimizers.OPTIMIZERS,)
_MOST_BLOCKS = 4096  # most blocks of a model from outside the package, which shows their number only once it is built
_BUILT_IN = frozenset({Subject.STEP, Subject.CURVE, Subject.ERRORS})
_TRAINED = frozenset({Subject.STEP, Subject.CURVE})
_OWN = frozenset({Subject.OWN, Subject.MODEL})
_STEPS = _BUILT_IN | _OWN | {Subject.TOY}
_RANKS = frozenset({Subject.STEP, Subject.STRATEGY_ERROR}) | _OWN
_SIZED = _BUILT_IN | {Subject.OWN, Subject.STRATEGY_ERROR}
_NUMERIC = EVERY - {Subject.COLLECTIVE, Subject.LOOP}
CONFIGURED = (*sorted(_BUILT_IN), Subject.ATTENTION)  # their descriptions also mention defaults
# arguments that are often given to RunConfig or run, and what to write instead
INSTEAD = {
    **{name: f"write model=preset('small', {name}={{value}})" for name in declared(ModelConfig)},
    "size": "write model=preset({value})",
    "context_length": "use seq_len",
}


def _within(memory_bytes: int) -> str:
    from cs_systems.core.units import human

    return f"within {human(memory_bytes, 'bytes')}"


@functools.partial(fields_checked, instead=INSTEAD)
@dataclass(frozen=True)
class RunConfig:
    """Configuration of one cell of a sweep.

    `train_step` measures `model`, `attention` measures `shape`, and `collective` measures `collective`. `batch_size` is
    the batch of one rank for any `world_size`: weak scaling.
    """

    workload: Annotated[
        str,
        Field(
            "train_step, or your own, path.py:name: a step(), or a factory (config, device) of (model, batch)",
            takes="many",
            spoken=True,
            plugin="workloads",
        ),
    ] = "train_step"
    workload_args: Annotated[
        tuple[str, ...],
        Field(
            "arguments of your workload's factory: lr=3e-4 width=128", frozenset({Subject.OWN, Subject.STRATEGY_ERROR}),
            option="--set", takes="one", heading="set", part_of="workload", example="width=128",
        ),
    ] = ()  # fmt: skip
    inputs: Annotated[
        str | None,
        Field(
            "batch or batches, if --workload names a model", frozenset({Subject.OWN}),
            takes="one", part_of="workload", words="inputs {}", example="a text, path/to/file.py:name",
            plugin="workloads",
        ),
    ] = None  # fmt: skip
    model: Annotated[
        ModelConfig,
        Field("sizes of the language model", _SIZED, example="a ModelConfig, such as preset('small')"),
    ] = PRESETS["small"]
    seq_len: Annotated[
        int | None,
        Field(
            "tokens per sequence", _SIZED,
            option="--context-length", heading="seq", like="model.context_length", axis=1, least=1,
        ),
    ] = None  # fmt: skip
    batch_size: Annotated[
        int, Field("sequences per step", _SIZED, takes="many", heading="batch", spoken=True, axis=2, least=1)
    ] = 4
    shape: Annotated[
        AttentionShape | None,
        Field("shape of the call", frozenset({Subject.ATTENTION, Subject.OWN}), example="an AttentionShape"),
    ] = None
    attention: Annotated[
        str,
        Field(
            "backends (cs-systems doctor lists them), or path.py:function",
            _BUILT_IN | {Subject.ATTENTION, Subject.OWN},
            takes="many", spoken=True, example="a text, such as 'naive' or 'sdpa_flash'", plugin="attention",
        ),
    ] = "naive"  # fmt: skip
    precision: Annotated[
        Precision,
        Field(
            "fp32 (TF32 off), tf32, bf16 and fp16 (autocast), bf16-pure (no autocast), fp8", _NUMERIC,
            takes="many", spoken=True,
        ),
    ] = Precision.FP32  # fmt: skip
    mode: Annotated[
        Mode,
        Field(", ".join(STEP_MODES), _OWN | {Subject.STEP, Subject.TOY, Subject.ATTENTION}, takes="many", spoken=True),
    ] = Mode.TRAIN_STEP
    compile: Annotated[
        str,
        Field(
            f"torch.compile: {', '.join(COMPILE_MODES)}", _STEPS,
            takes="many", words="compile={}", values=COMPILE_MODES, meant=SWITCHES, called="compile mode",
        ),
    ] = "none"  # fmt: skip
    compile_scope: Annotated[
        str,
        Field(
            "model, or block: compile time does not grow with depth", _TRAINED,
            takes="one", heading="compiled", part_of="compile", words="by {}", values=("model", "block"),
        ),
    ] = "model"  # fmt: skip
    graph: Annotated[
        str,
        Field(
            "none, or step: the whole step as one CUDA graph", _TRAINED,
            takes="one", words="graph of the {}", values=("none", "step"),
        ),
    ] = "none"  # fmt: skip
    parts: Annotated[
        tuple[str, ...],
        Field(
            f"computed in another way: {', '.join(plugins.names('training.parts'))}", _TRAINED,
            takes="one", example="fused_rmsnorm", joined="+", empty="none", plugin="training.parts",
        ),
    ] = ()  # fmt: skip
    checkpoint: Annotated[
        str,
        Field(
            f"activation checkpointing: {', '.join(FORMS)}", _STEPS,
            takes="many words", words="checkpoint={}", example="the text 'none', or a plan such as 'every:1'",
        ),
    ] = "none"  # fmt: skip
    optimizer: Annotated[
        str,
        Field(
            f"{', '.join(OPTIMIZERS)}, or path.py:class", _TRAINED | _OWN | {Subject.TOY},
            takes="many", usual=optimizers.USUAL, values=OPTIMIZERS, plugin="training.optimizers",
        ),
    ] = optimizers.DEFAULT  # fmt: skip
    clip: Annotated[
        float | None,
        Field(
            "largest norm of all gradients together", _TRAINED | _OWN,
            takes="many", usual="none", heading="clip norm", words="clip {:g}", above=0,
        ),
    ] = None  # fmt: skip
    clip_function: Annotated[
        str,
        Field(
            "with --clip: torch, or path.py:function of (parameters, max_norm)", _TRAINED | _OWN,
            takes="many", heading="clip by", part_of="clip", words="clip by {}",
            values=CLIP_FUNCTIONS, plugin="training.clipping",
        ),
    ] = "torch"  # fmt: skip
    loss_function: Annotated[
        str,
        Field(
            "cross_entropy, or path.py:function of (logits, targets)", _BUILT_IN | {Subject.OWN},
            option="--loss", takes="many", heading="loss by", words="loss {}",
            values=LOSSES, plugin="training.losses",
        ),
    ] = "cross_entropy"  # fmt: skip
    data: Annotated[
        str,
        Field(
            "batches: fixed; windows of random tokens; path.py:function of (dataset, batch_size, context_length, "
            "device)", frozenset({Subject.STEP, Subject.OWN}),
            takes="many", words="data {}", values=DATA, plugin="training.data",
        ),
    ] = "fixed"  # fmt: skip
    strategy: Annotated[
        str,
        Field(
            "strategies, joined by +: ddp_bucketed+zero1; options after a colon: ddp_bucketed:comm_dtype=bf16", _RANKS,
            example="a text, such as 'single' or 'ddp_bucketed'", plugin="parallel", separator="+",
        ),
    ] = "single"  # fmt: skip
    strategy_args: Annotated[
        tuple[str, ...],
        Field(
            "further options of the strategy", _RANKS,
            option="--strategy", column=False, part_of="strategy", example="comm_dtype=bf16", joined=":",
        ),
    ] = ()  # fmt: skip
    bucket_size_mb: Annotated[
        float | None,
        Field(
            "bucket size in MiB, for strategies with buckets", _RANKS,
            heading="bucket MB", part_of="strategy", words="buckets of {:g} MB", label="words", above=0,
        ),
    ] = None  # fmt: skip
    tp_degree: Annotated[
        int | None,
        Field(
            "neighbouring ranks that divide each block", _RANKS,
            part_of="strategy", words="tp_degree={}", label="heading", least=1,
        ),
    ] = None  # fmt: skip
    world_size: Annotated[
        int,
        Field(
            "number of ranks; if there are GPUs, each rank needs its own", _RANKS | {Subject.COLLECTIVE, Subject.LOOP},
            heading="ranks", is_measurement=True, words="{} ranks", counts="rank", least=1,
        ),
    ] = 1  # fmt: skip
    collective: Annotated[
        CollectiveShape | None,
        Field("collective call", frozenset({Subject.COLLECTIVE, Subject.OWN}), example="a CollectiveShape"),
    ] = None
    keep_graph: Annotated[
        bool,
        Field(
            "in mode forward, record the graph for backward (not with no_grad)",
            _OWN | {Subject.STEP, Subject.TOY, Subject.ATTENTION}, takes="one", words="graph kept",
        ),
    ] = False  # fmt: skip
    l2: Annotated[
        str,
        Field(
            "L2 cache before each step: warm, clear", frozenset({Subject.ATTENTION, Subject.OWN}),
            takes="one", words=lambda value: "" if value == "warm" else f"L2 {value}", spoken=True,
            values=("clear", "warm"), called="l2 state",
        ),
    ] = "warm"  # fmt: skip
    warmup: Annotated[
        int,
        Field("untimed steps before the timed ones", takes="many", identity=False, is_measurement=True, least=0),
    ] = 5
    warmup_s: Annotated[
        float,
        Field(
            "shortest warm-up in seconds, with more steps if needed", EVERY - {Subject.LOOP},
            takes="one", identity=False, is_measurement=True, least=0,
        ),
    ] = 0.0  # fmt: skip
    steps: Annotated[int, Field("timed steps", takes="one", identity=False, is_measurement=True, least=1)] = 10
    steps_s: Annotated[
        float,
        Field(
            "shortest time of the timed steps in seconds, with more steps if needed",
            frozenset(subject for subject in EVERY if subject.is_timed) - {Subject.LOOP},
            takes="one", identity=False, is_measurement=True, least=0,
        ),
    ] = 0.0  # fmt: skip
    rounds: Annotated[
        int,
        Field(
            "measurement rounds; the steps are divided among them", EVERY - {Subject.LOOP},
            takes="one", identity=False, is_measurement=True, least=1,
        ),
    ] = 1  # fmt: skip
    seed: Annotated[
        int,
        Field(
            "random seed of parameters and data", _NUMERIC,
            takes="one", identity=False, is_measurement=True, label="heading",
        ),
    ] = 0  # fmt: skip
    device: Annotated[str, Field("auto, cpu, cuda or cuda:N", takes="one", is_measurement=True, words="")] = "auto"
    memory_limit_bytes: Annotated[
        int | None,
        Field(
            "emulate a GPU with less memory: 8GiB, 24GB",
            option="--memory-limit", takes="one", heading="memory limit", is_measurement=True,
            words=_within, least=1,
        ),
    ] = None  # fmt: skip
    allocator: Annotated[
        str,
        Field(
            "default, or expandable_segments: fewer gaps in a GPU's memory", EVERY - {Subject.LOOP},
            takes="one", is_measurement=True, values=("default", "expandable_segments"),
        ),
    ] = "default"  # fmt: skip
    profiler: Annotated[
        str,
        Field(
            "profiler of the timed steps", identity=False, is_measurement=True,
            words="under {}", example="a text, such as 'none' or 'kineto'", plugin="profilers",
        ),
    ] = "none"  # fmt: skip
    profiler_args: Annotated[
        tuple[str, ...],
        Field(
            "further options of the profiler's own command", column=False, identity=False, is_measurement=True,
            part_of="profiler", words="", example="--option",
        ),
    ] = ()  # fmt: skip

    def __post_init__(self) -> None:
        _check_types(self)
        check_values(self)
        _check_subject(self)
        _check_step(self)
        if self.steps < self.rounds:
            raise ConfigError(
                f"steps is {self.steps}, less than rounds {self.rounds}; give at least one step for each round",
                "steps",
                "rounds",
            )
        if self.is_profiled and self.steps_s:
            raise ConfigError(f"steps_s is {self.steps_s:g}, but a profile has a number of steps; use steps", "steps_s")
        if self.is_profiled and self.rounds > 1:
            raise ConfigError(f"rounds is {self.rounds}, but a profile covers one round; leave out rounds", "rounds")
        if self.seq_len is not None and self.seq_len > self.model.context_length:
            raise ConfigError(
                f"seq_len is {self.seq_len}, more than context_length {self.model.context_length} of the "
                f"ModelConfig; lower seq_len, or give a ModelConfig with context_length {self.seq_len}"
            )
        settings(self, "workload_args")
        if self.inputs is not None and ":" not in self.inputs:
            raise ConfigError(
                f"inputs is {shown(self.inputs)}; write path/to/file.py:name or package.module:name", "inputs"
            )
        _check_ranks(self)
        numbered = self.device.startswith("cuda:") and self.device[5:].isdigit()
        if self.device not in ("auto", "cpu", "cuda") and not numbered:
            raise ConfigError(f"unknown device {self.device!r}; use auto, cpu, cuda or cuda:N")

    @property
    def subject(self) -> Subject:
        """Subject of the cell, which determines the fields that apply."""
        return Subject.of(self.workload)

    @property
    def of_any_measurement(self) -> Self:
        """Cell with defaults in all fields that only say how it is measured."""
        return replace(self, **{name: each.default for name, each in FIELDS.items() if not each.field.identity})

    @property
    def is_distributed(self) -> bool:
        """Flag of a cell that runs on ranks; a cell on one rank may be the baseline of several."""
        return self.world_size > 1 or self.strategy != RunConfig.strategy or self.collective is not None

    @property
    def is_profiled(self) -> bool:
        return self.profiler != RunConfig.profiler

    @property
    def own_code(self) -> dict[str, tuple[str, ...]]:
        """Names of code outside the package, by the field that contains them; other fields are left out."""
        found = {field: tuple(filter(is_foreign, names)) for field, names in self.plugin_names.items()}
        return {field: names for field, names in found.items() if names}

    @property
    def plugin_names(self) -> dict[str, tuple[str, ...]]:
        """Names of plug-ins, by the field that has them."""
        return {name: each.plugin_names(getattr(self, name)) for name, each in FIELDS.items() if each.field.plugin}

    @property
    def sources(self) -> tuple[str, ...]:
        """Files and modules outside the package that the config names, sorted."""
        named = (name.rpartition(":")[0] for names in self.own_code.values() for name in names if ":" in name)
        return tuple(sorted({*named}))

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Options of the strategy that are set."""
        options = {name: getattr(self, name) for name in STRATEGY_OPTIONS if name != "strategy_args"}
        return {name: value for name, value in options.items() if value is not None} | settings(self, "strategy_args")

    @property
    def computes_in(self) -> Precision:
        """Precision of the matrix products.

        Without autocast it is the strategy's `compute_dtype` if that is bf16 or fp16, else `precision`. A part may
        compute in another precision.
        """
        known = [name for name in self.parts if name in plugins.names(parts.PACKAGE)]
        if declared := parts.declared(known, "computes_in"):
            return Precision(next(iter(declared.values())))
        compute_dtype = self.strategy_options.get("compute_dtype")
        if self.precision.is_autocast or compute_dtype not in (Precision.BF16, Precision.FP16):
            return self.precision
        return Precision(compute_dtype)

    @property
    def tokens_per_sequence(self) -> int:
        return self.model.context_length if self.seq_len is None else self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict that survives a JSON round trip: tuples become lists."""
        lists = {name: list(getattr(self, name)) for name, each in FIELDS.items() if each.kind is tuple}
        return dataclasses.asdict(self) | lists

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        config: Self = _build(cls, data)
        return config

    def key(self) -> str:
        """Return a hash of the fields that differ from their defaults, so that new fields do not change old keys."""
        import hashlib  # takes 2 ms, which a help text need not spend

        text = json.dumps(_without_defaults(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


FIELDS = declared(RunConfig)
LEAVES = leaves(RunConfig)  # by path, such as model.d_model
OPTIONS.update((path if each.name == "name" else each.name, each.option) for path, each in LEAVES.items())
STRATEGY_OPTIONS: dict[str, Any] = {
    name: each.default for name, each in FIELDS.items() if each.field.part_of == "strategy"
}


def _check_types(config: RunConfig) -> None:
    """Raise ConfigError for a workload or a device that is an object instead of its name."""
    if isinstance(config.workload, ModelConfig):
        raise ConfigError("workload is a ModelConfig; write RunConfig(model=preset('small'))", "workload")
    if not isinstance(config.workload, str):
        remedy = "give its name, 'path/to/file.py:name', or measure the object itself with run(model=…, inputs=…)"
        raise ConfigError(f"workload is {shown(config.workload)}; {remedy}")
    if not isinstance(device := config.device, str):
        # checked without importing torch
        is_torch = (type(device).__module__, type(device).__name__) == ("torch", "device")
        given = f"torch.device('{device}')" if is_torch else shown(device)
        usable = is_torch and device.type in ("cpu", "cuda")
        remedy = f"'{device}'" if usable else "'auto', 'cpu', 'cuda' or 'cuda:N'"
        raise ConfigError(f"device is {given}; write {remedy}", "device")


def _changed(name: str, value: Any) -> list[str]:
    """Return the paths of a part's fields that differ from their defaults; empty if the field is not a part."""
    parts = {path: path.removeprefix(f"{name}.") for path in LEAVES if path.startswith(f"{name}.")}
    return [path for path, part in parts.items() if getattr(value, part) != LEAVES[path].default]


def _check_subject(config: RunConfig) -> None:
    """Raise ConfigError for a field that would have no effect; set a call's default shape."""
    subject = config.subject
    if subject is Subject.ATTENTION and config.shape is None:
        object.__setattr__(config, "shape", AttentionShape())
    if subject is Subject.COLLECTIVE and config.collective is None:
        object.__setattr__(config, "collective", CollectiveShape())
    kind: type = type(config)
    for name, each in declared(kind).items():
        value, owner = getattr(config, name), each.field.part_of
        if value == each.default:
            continue
        if subject not in each.subjects:
            path = next(iter(_changed(name, value)), name)
            # in Python the whole model is set; with --size only its name
            word = name if path == f"{name}.name" else path
            raise ConfigError(f"{applies(word, each.subjects, config.workload)}; leave out {word}", **{word: path})
        if owner and getattr(config, owner) == FIELDS[owner].default:
            words = f"{name} {each.text(value)} has no effect while {owner} is {FIELDS[owner].default}"
            raise ConfigError(f"{words}; set {owner}, or leave out {name}", owner, name)


def _check_step(config: RunConfig) -> None:
    """Raise ConfigError for a mode, checkpoint plan or parts that the workload does not support."""
    if config.subject is Subject.ATTENTION and config.mode is Mode.TRAIN_STEP:
        raise ConfigError(
            "mode is train-step, which workload attention does not have; set mode to forward, backward or "
            "forward-backward",
            "mode",
        )
    if config.subject not in (Subject.ATTENTION, Subject.OWN) and config.mode is Mode.BACKWARD:
        raise ConfigError("mode backward requires workload attention; use mode forward-backward")
    try:
        segments(config.checkpoint, _MOST_BLOCKS if config.subject is Subject.OWN else config.model.num_layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if twice := next((name for name in config.parts if config.parts.count(name) > 1), None):
        raise ConfigError(f"parts names {twice} twice; name each part once", "parts")


def _check_ranks(config: RunConfig) -> None:
    """Raise ConfigError if the options for ranks contradict each other.

    `parallel.check` checks that the strategy exists and accepts its options.
    """
    if doubled := (given := settings(config, "strategy_args")).keys() & STRATEGY_OPTIONS.keys():
        name = min(doubled)
        raise ConfigError(
            f"strategy_args sets '{name}', which must be set separately; leave it out there, and use "
            f"{name}={given[name]}",
            "strategy_args",
            name,
        )
    if config.collective is not None:
        config.collective.check(config.world_size)
    if config.strategy == RunConfig.strategy and config.world_size > 1 and config.subject is Subject.STEP:
        remedy = "use a strategy such as ddp_bucketed, or world_size 1"
        raise ConfigError(
            f"strategy single trains on one process, got world_size {config.world_size}; {remedy}", "world_size"
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
    known = declared(cls)
    if unknown := sorted(data.keys() - known):
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
    """List of the cells of a sweep; a notebook shows it as a table of the fields that vary."""

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
    model_fields, shape_fields, run_fields = declared(ModelConfig).keys() - {"name"}, declared(AttentionShape), FIELDS
    listed: dict[str, list[Any]] = {}
    for axis, values in axes.items():
        one_of("axis", axis, sorted({*run_fields, *model_fields, *shape_fields, "size"}))
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
            if Subject.of(workload := run.get("workload", base.workload)) in _TRAINED:
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
    silent, subject = {*without}, config.subject
    if subject not in CONFIGURED:
        default = RunConfig()
        silent |= _same(config, default) | {f"model.{name}" for name in _same(config.model, default.model)}
        silent -= {"seq_len"} - {*without}  # None is the model's context length, which is compared separately
    if subject in (Subject.STEP, Subject.ATTENTION, Subject.COLLECTIVE):
        silent.add("workload")  # the rest of the description already identifies these workloads
    texts = []
    for name, each in FIELDS.items():
        if name == "model":
            texts.append(_words(config, silent))
        elif name in silent or subject not in each.subjects or not (each.field.identity or name == "profiler"):
            continue
        elif each.field.column and not dataclasses.is_dataclass(each.kind) and name not in ("seq_len", "batch_size"):
            options = config.strategy_args if name == "strategy" else ()
            texts.append(":".join([each.words(getattr(config, name)), *options]))
    return " · ".join(filter(None, texts))


def same_fields(configs: Sequence[RunConfig]) -> set[str]:
    """Return the fields that are equal in all cells, as `describe` takes them: also `model.x` and `shape.x`."""
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
    values = {each: getattr(shape, name) for name, each in declared(AttentionShape).items()}
    sizes = {each.name: value for each, value in values.items() if each.field.spoken and each.kind is int}
    shown = {name: size for name, size in sizes.items() if f"shape.{name}" not in silent}
    whole = len(shown) == len(sizes)
    words = ["×".join(map(str, sizes.values()))] if whole else [f"{name} {size}" for name, size in shown.items()]
    words += [
        each.words(value)
        for each, value in values.items()
        if f"shape.{each.name}" not in {*silent, *(f"shape.{n}" for n in sizes)}
    ]
    return " ".join(filter(None, words))
