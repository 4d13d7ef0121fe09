"""Lever (the constant of each file in `advise/levers/`), and the situation for which it returns its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, TypedDict

from cs_systems.analysis.comparison.loop_findings import COLLECTIONS
from cs_systems.analysis.diagnosis import Diagnosis, Expected
from cs_systems.config import FIELDS, ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.experiments import EXPERIMENTS, ExperimentRow
from cs_systems.core.fields import Subject
from cs_systems.core.phases import Phase
from cs_systems.core.statistics import MINIMUM_EFFECT
from cs_systems.core.tables import Table, first_row
from cs_systems.formulas.memory.forecast import Forecast
from cs_systems.record import Environment, RunRecord, Sample

PACKAGE = "levers"
HOST_BOUND = 0.9  # share of the step that the host takes to submit it; above it, the device waits
LEAST_COMPUTED = 0.1  # share of a script's step outside the wait for batches, from which levers of it are tried
TOGETHER = " + "  # between the names of levers that are tried as one


@dataclass(frozen=True)
class ScriptPlan:
    """Unedited script with levers applied from outside, or a patched copy of it.

    Attributes:
        levers: their names, in the order in which they were kept.
        seed: number added to every seed that the script sets.
        is_patched: whether the script is the copy with the diff, instead of the original with hooks.
    """

    levers: tuple[str, ...] = ()
    seed: int = 0
    is_patched: bool = False


class CodeRow(TypedDict):
    """Code of a lever with the values of one run of a script."""

    lever: str
    code: str


CODE = Table("lever_code", CodeRow, "code of levers with the values of a run")
Cell = RunConfig | ScriptPlan
NotHere = str  # reason why a lever does not apply


def batch_of(cell: Cell) -> int:
    """Return the batch size of a cell, so that steps are compared per token.

    1 for a script, because its batch never changes.
    """
    return cell.batch_size if isinstance(cell, RunConfig) else 1


@dataclass(frozen=True)
class Situation:
    """Present state of a search, which each lever judges.

    Attributes:
        cell: the best cell or plan of a script so far.
        texts: the text of the script, then of its own modules; empty for a cell.
        has_ranks: whether the script runs as several ranks, started by torchrun.
        environment: the machine.
        history: one record of each kept cell, the best one's last; empty before the first measurement.
        seen: records of cells that were measured for their experiments only.
        sampled: record of a script's start in which the stack was sampled, if there is one.
        goal: a name of judge.GOALS.
        memory_bytes: the memory that a step may take; None if unknown.
        changes_batch: whether a lever may change the batch.
    """

    cell: Cell
    environment: Environment
    history: tuple[RunRecord, ...] = ()
    seen: tuple[RunRecord, ...] = ()
    sampled: RunRecord | None = None
    goal: str = "time"
    memory_bytes: int | None = None
    changes_batch: bool = False
    texts: tuple[str, ...] = ()
    has_ranks: bool = False

    @cached_property
    def source(self) -> str:
        """All texts of the script as one."""
        return "\n".join(self.texts)

    @property
    def config(self) -> RunConfig:
        """Configuration of the best cell; only for cells."""
        assert isinstance(self.cell, RunConfig)
        return self.cell

    @property
    def on_gpu(self) -> bool:
        return self.environment.device != "cpu"

    @property
    def is_hopper(self) -> bool:
        return self.environment.compute_capability == "9.0"

    @property
    def record(self) -> RunRecord | None:
        return self.history[-1] if self.history else None

    @property
    def allocates(self) -> bool | None:
        """Flag of timed steps that call cudaMalloc; None before a measurement."""
        if self.record is None or self.record.measurement is None:
            return None
        of_loop = any(caveat.code == "cudaMalloc" for caveat in self.record.warnings)
        return of_loop or any(sample.device_mallocs for sample in self.record.measurement.timed)

    @property
    def collected_share(self) -> float | None:
        """Share of the steps that garbage collections take; None without a row of them."""
        row = COLLECTIONS.first(self.record.results) if self.record else None
        return row["time_s"] / row["total_s"] if row and row["total_s"] else None

    @property
    def step_s(self) -> float | None:
        """Median step of the best cell."""
        measurement = self.record.measurement if self.record else None
        return measurement.median_s() if measurement else None

    @property
    def peak_bytes(self) -> int | None:
        measurement = self.record.measurement if self.record else None
        return measurement.peak_allocated_bytes if measurement else None

    @property
    def is_captured(self) -> bool:
        """Flag of a step that is one launch, so that the device never waits for the host."""
        return isinstance(self.cell, RunConfig) and self.cell.graph == "step"

    @cached_property
    def ran(self) -> Mapping[str, Any]:
        """Row of what the recorder saw in the script without levers; empty before the first measurement."""
        return first_row(self.history[0].results, "ran") if self.history else {}

    @cached_property
    def diagnoses(self) -> Sequence[Diagnosis]:
        """Causes that the diagnosis names for the present step, the largest first; () before the first measurement."""
        from cs_systems.analysis.diagnosis import diagnose

        is_start = len(self.history) == 1
        return diagnose([self.sampled] if is_start and self.sampled else self.history[-1:]).diagnoses

    @property
    def causes(self) -> Mapping[str, float]:
        """Codes of these causes, with the share of the step."""
        return {one.code: one.share for one in self.diagnoses}

    @property
    def computed_share(self) -> float:
        """Share of a usual step outside the wait for its batch; 1 if that was not timed."""
        waits = [sample.phases_s.get(Phase.INPUT, 0.0) / sample.wall_s for sample in self._timed if sample.wall_s]
        return 1 - median(waits) if waits else 1.0

    @property
    def _timed(self) -> Sequence[Sample]:
        """Timed steps of the best cell; () before a measurement."""
        return self.record.measurement.timed if self.record and self.record.measurement else ()

    def too_short(self, *phases: str, what: str) -> NotHere | None:
        """Return that phases of the present step are too short for a gain; None if they are not, or were not timed."""
        times_s = [sample.phases_s[phase] for sample in self._timed for phase in phases if phase in sample.phases_s]
        if not times_s:
            return None
        share = sum(times_s) / sum(sample.wall_s for sample in self._timed)
        return None if share >= MINIMUM_EFFECT else f"{what} takes {share:.1%} of the step"

    @cached_property
    def host_s(self) -> float:
        """Time in which the host submits a step; 0 where the host is the device, or launches a CUDA graph."""
        if self.record is None or not self.on_gpu or self.is_captured:
            return 0.0
        return submit_s(self.record)

    @cached_property
    def device_s(self) -> float | None:
        """Time of a step on the device alone; None if it takes an experiment that was not made."""
        step_s, record = self.step_s, self.record
        if self.is_captured and record and _is_of(record, self.config):
            return step_s
        if (row := self._row("device-only")) and row["time_s"]:
            return row["time_s"]
        return None if step_s is None or record is None or is_launch_bound(record) else step_s

    def after_experiment(self, experiment: str, instead: str = "") -> Expected | None:
        """Return the duration of the step if a part of it takes the time that an experiment measured.

        It is at least the host's time to submit the step.
        """
        row, device_s = self._row(experiment, instead), self.device_s
        if row is None or row["time_s"] is None or device_s is None:
            return None
        rest_s = 0.0 if row["of"] == "step" else device_s - (row["baseline_s"] or 0.0)
        if rest_s < 0 or (row["of"] != "step" and row["baseline_s"] is None):  # the parts overlap
            return None
        ends = (row["time_s"] if end is None else end for end in (row["low_s"], row["high_s"]))
        host_s = 0.0 if row["of"] == "step" else self.host_s
        value, low, high = (max(rest_s + part_s, host_s) for part_s in (row["time_s"], *ends))
        return Expected(value, low, high, "measured")

    def forecast(self, **changes: Any) -> Expected | None:
        """Return the peak memory with these fields changed, by formula; None where no formula is valid."""
        if self.peak_bytes is None or not isinstance(self.cell, RunConfig):
            return None
        peak = Forecast(self.config, self.peak_bytes).peak(**changes)
        return None if peak is None else Expected(peak.value, peak.low, peak.high, "forecast")

    def casts_s(self) -> float | None:
        """Return the time of the casts to bf16 in forward, by the newest experiment on products; None without one."""
        for _, row in self._rows("products", "bf16"):
            if row["time_s"] is not None and row["low_s"] is not None:
                return row["time_s"] - row["low_s"]
        return None

    def _row(self, experiment: str, instead: str = "") -> ExperimentRow | None:
        """Return the newest row of an experiment on the present step, or on an equal part of an earlier step."""
        now = self.config.of_any_measurement
        for made, row in self._rows(experiment, instead):
            if experiment == "device-only":  # a graph launches the same kernels
                made = replace(made, graph=now.graph)
            elif row["of"] != "step":
                made = replace(made, graph=now.graph, optimizer=now.optimizer)
            if made == now:
                return row
        return None

    def _rows(self, experiment: str, instead: str) -> Iterator[tuple[RunConfig, ExperimentRow]]:
        """Yield the rows of an experiment with their cells, kept or seen, the newest first."""
        for record in (*reversed(self.seen), *reversed(self.history)):
            for row in EXPERIMENTS.of(record.results):
                if (row["experiment"], row["instead"]) == (experiment, instead):
                    yield record.run_config.of_any_measurement, row


def submit_s(record: RunRecord) -> float:
    """Return the time in which the host submits a step; 0 without samples."""
    samples = record.measurement.timed if record.measurement else ()
    return median(sum(sample.submit_s.values()) for sample in samples) if samples else 0.0


def is_launch_bound(record: RunRecord) -> bool:
    """Return whether the host takes nearly the whole step to submit it, so that the device may wait for it."""
    step_s = record.measurement.median_s() if record.measurement else None
    return step_s is not None and submit_s(record) > HOST_BOUND * step_s


def _is_of(record: RunRecord, config: RunConfig) -> bool:
    return record.run_config.of_any_measurement == config.of_any_measurement


@dataclass(frozen=True)
class Option:
    """One way to apply a lever: fields of the cell, with the values that replace theirs.

    Attributes:
        fields: field of RunConfig → value.
        expected: the expected step in s (with `--goal memory` the peak in bytes); None if only a trial can measure it.
    """

    fields: Mapping[str, Any]
    expected: Expected | None = None


@dataclass
class Changes:
    """Objects that a hook changed, and others of their kind that it left, where a diff cannot tell them apart.

    Calling it returns whether the hook changed anything so far.

    lines: the code that makes the changed objects with the values of this run, each line once.
    why: why an object stayed as it is; "" if no reason is known.
    """

    made: int = 0
    left: int = 0
    lines: dict[str, None] = field(default_factory=dict)
    why: str = ""

    def __call__(self) -> bool:
        return self.made > 0


@dataclass(frozen=True)
class ScriptChange:
    """One way to apply a lever to an unedited script.

    Attributes:
        what: the change in words: "TF32 in matrix products".
        unfit: returns why it does not apply to a script, or None.
        environment: variables of the script's process.
        hook: changes PyTorch in the script's process, right after its import; it returns a function that tells whether
            it changed anything so far, or None if it always does. No hook if the variables are enough, or if only a
            patch expresses the change: then a trial runs the patched text, which is written to no file.
        patch: returns the text of a file with the change written into it; None if it does not find the place.
        in_script_alone: whether the patch belongs into the script, and into none of its modules.
        replaces: levers that it takes the place of, each with the reason why it does not apply then.
    """

    what: str
    unfit: Callable[[Situation], NotHere | None]
    environment: Mapping[str, str] = field(default_factory=dict)
    hook: Callable[[], Callable[[], bool] | None] | None = None
    patch: Callable[[str], str | None] | None = None
    in_script_alone: bool = False
    replaces: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lever:
    """Change that may make a step faster or smaller.

    Attributes:
        numbers: how it may change the numerical results, as text; "" if it does not, so that nothing is checked.
        options: returns the ways to apply it to a cell, or the reason why there is none; None for a lever of scripts.
        lines: the code to write in the user's own program.
        usual: share of the step that it usually saves, by profiles/training_step. It only orders options without an
            expectation, and is never shown.
        script: how it is applied to a script; None for a lever of cells.
        remedies: codes of the causes, as rules of diagnosis name them, for which it is a remedy.
        cost: how many processes a trial of it is worth; it only orders options, by their gain per cost.
        frees_host: whether it ends the device's wait for launches, which hides what other options gain.
        experiment: name of the experiment that predicts its options; it needs a step that the host launches.
        saves_memory: whether it may reduce the peak memory of a script.
        shortens_kernels: whether it only makes kernels faster, and gains nothing while the step waits for launches.
        shortens_input: whether it may also shorten the wait for batches.
    """

    numbers: str
    options: Callable[[Situation], Sequence[Option] | NotHere] | None
    lines: str
    usual: float = 0.05
    script: ScriptChange | None = None
    remedies: tuple[str, ...] = ()
    cost: float = 1.0
    frees_host: bool = False
    experiment: str = ""
    saves_memory: bool = False
    shortens_kernels: bool = False
    shortens_input: bool = False


@dataclass(frozen=True)
class Proposal:
    """Option of a lever, or of two together, as a cell to compare with the best one.

    Attributes:
        lever: its name, or two with TOGETHER between them.
        words: the options that carry it out: `precision bf16`.
        fields: the changed fields of a cell.
        numbers: see `Lever`.
        times: batch size of the cell divided by the best cell's.
        cost: see `Lever`.
    """

    lever: str
    cell: Cell
    words: str
    numbers: str
    usual: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    expected: Expected | None = None
    times: float = 1.0
    cost: float = 1.0

    @property
    def levers(self) -> tuple[str, ...]:
        return tuple(self.lever.split(TOGETHER))

    @property
    def key(self) -> tuple[str, str]:
        """Name of the option; it does not depend on the best cell."""
        return self.lever, self.words

    def gain(self, now: float) -> float:
        """Return the expected share of the step that is saved, else the usual share."""
        return self.usual if self.expected is None else 1 - self.expected.value / self.times / now


def all_levers() -> dict[str, Lever]:
    return {name: plugins.get(PACKAGE, name) for name in plugins.names(PACKAGE)}


def proposals(situation: Situation, levers: Mapping[str, Lever]) -> Iterator[Proposal | tuple[str, NotHere]]:
    """Yield the options of all levers, and (lever, reason) for a lever that has none here."""
    of_one = _of_cell if isinstance(situation.cell, RunConfig) else _of_script
    for name, lever in levers.items():
        yield from of_one(situation, name, lever)


def _of_cell(situation: Situation, name: str, lever: Lever) -> Iterator[Proposal | tuple[str, NotHere]]:
    found = lever.options(situation) if lever.options else "it is a lever of scripts"
    if isinstance(found, str):
        yield name, found
        return
    for option in found:
        try:
            config = replace(situation.config, **option.fields)
        except ConfigError as error:
            yield name, str(error)
            continue
        times = config.batch_size / situation.config.batch_size
        yield Proposal(
            name,
            config,
            _words(option.fields),
            lever.numbers,
            lever.usual,
            option.fields,
            option.expected,
            times,
            lever.cost,
        )


def together(situation: Situation, levers: Mapping[str, Lever]) -> Iterator[Proposal]:
    """Yield each option that launches would hide, together with a lever that frees the host.

    An option that makes only the device faster shows no gain while the step waits for launches, and a CUDA graph shows
    none while the step waits for the device.
    """
    if not isinstance(situation.cell, RunConfig) or situation.goal == "memory":
        return
    for name, freeing in levers.items():
        if not freeing.frees_host:
            continue
        others = {other: lever for other, lever in levers.items() if other != name}
        for first in _of_cell(situation, name, freeing):
            if not isinstance(first, Proposal):
                continue
            for second in proposals(replace(situation, cell=first.cell), others):
                if isinstance(second, Proposal) and second.expected and second.expected.value < situation.host_s:
                    yield replace(
                        second,
                        lever=f"{second.lever}{TOGETHER}{name}",
                        words=f"{second.words}, {first.words}",
                        fields={**second.fields, **first.fields},
                        cost=max(first.cost, second.cost),
                    )


def _words(fields: Mapping[str, Any]) -> str:
    named = (FIELDS[name] for name in fields)
    return ", ".join(f"{each.option.removeprefix('--')} {each.text(fields[each.name])}" for each in named)


def _of_script(situation: Situation, name: str, lever: Lever) -> Iterator[Proposal | tuple[str, NotHere]]:
    assert isinstance(situation.cell, ScriptPlan)
    if name in situation.cell.levers:
        return
    if lever.script is None:
        yield name, "it cannot be applied to a script from outside"
    elif situation.goal == "memory" and not lever.saves_memory:
        yield name, "it does not reduce the peak memory of a script"
    elif reason := _replaced(situation.cell, name) or lever.script.unfit(situation) or _hidden(situation, lever):
        yield name, reason
    else:
        others = (each for each in situation.cell.levers if each not in lever.script.replaces)
        plan = replace(situation.cell, levers=(*others, name))
        usual = max(lever.usual, *(situation.causes.get(code, 0.0) for code in lever.remedies), 0.0)
        if lever.shortens_kernels:
            usual *= 1 - situation.causes.get("launch-bound", 0.0)
        if not lever.shortens_input:
            usual *= situation.computed_share
        yield Proposal(name, plan, lever.script.what, lever.numbers, usual, cost=lever.cost)


def _hidden(situation: Situation, lever: Lever) -> NotHere | None:
    """Return why a lever of the computation gains nothing where the step waits for its batches; None if it may gain."""
    share = situation.computed_share
    if lever.shortens_input or situation.goal == "memory" or share >= LEAST_COMPUTED:
        return None
    if not situation.causes.keys().isdisjoint(lever.remedies):
        return None
    return f"the step waits for its batches {1 - share:.0%} of the time"


def _replaced(plan: ScriptPlan, name: str) -> NotHere | None:
    """Return why a lever does not apply where a lever of the plan takes its place."""
    scripts = (plugins.get(PACKAGE, each).script for each in plan.levers)
    return next((script.replaces[name] for script in scripts if script and name in script.replaces), None)


def only_built_in(situation: Situation) -> str | None:
    """Return why a lever of the built-in model does not apply to this workload; None if it does."""
    if situation.config.subject is Subject.STEP:
        return None
    return "it is an option of the built-in model only"
