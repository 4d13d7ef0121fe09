"""Evidence for rules: the numbers of one step, from records of one cell, from a trace, or from a snapshot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING, Any, cast

from cs_systems.analysis.attribution.gaps import COPY, HOST, LAUNCH, MALLOC, PROFILER, SYNC, idle_by_cause
from cs_systems.analysis.attribution.overlap import RANK_OVERLAP
from cs_systems.analysis.attribution.tables import KernelRow, gaps, kernels, ranges, steps
from cs_systems.analysis.attribution.tables import phases as phase_rows
from cs_systems.analysis.attribution.usual_steps import START_UP
from cs_systems.analysis.comparison.loop_findings import EMPTY_CLIPPING, NEVER_STEPPED, OUTCOME, SLOW_STEPS
from cs_systems.analysis.diagnosis._memory_use import HISTORY, MemoryUse, memory_of_record, memory_of_snapshot
from cs_systems.analysis.diagnosis._sound import Sound
from cs_systems.analysis.replay.clean import Clean
from cs_systems.analysis.replay.what_ifs import Recalled, what_if
from cs_systems.analysis.timing_caveats import launch_bound_phases
from cs_systems.config import CONFIGURED, Phase, RunConfig
from cs_systems.core.caveats import LOOP_REMEDIES, REMEDIES, SHARED, UNEVEN, beyond
from cs_systems.core.experiments import EXPERIMENTS, ExperimentRow
from cs_systems.core.fields import Subject
from cs_systems.core.range_names import LOADER
from cs_systems.core.tables import Row, Tables, first_row
from cs_systems.core.tracers import tracer
from cs_systems.core.units import counted, human
from cs_systems.formulas.cost import COST
from cs_systems.formulas.peaks import CEILING, peak_flops
from cs_systems.readers._stalls import Kind, kind
from cs_systems.readers.forms.trace import steps_of
from cs_systems.record import Measurement, RunRecord, measured_by

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.distribution import Distribution
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.analysis.attribution.usual_steps import Usual
    from cs_systems.analysis.comparison.ranks import Merged
    from cs_systems.analysis.memory.categories import Attribution
    from cs_systems.analysis.memory.out_of_memory import Failure
    from cs_systems.analysis.memory.tensor_names import TensorNames
    from cs_systems.analysis.replay.what_ifs import Answering

OF_HOST = (LAUNCH, HOST, SYNC, MALLOC)  # causes of idle time for which the host is late
HOST_BOUND = 0.3  # share of the step; above it, the host and not the kernels determines the step's duration
FEWEST_KERNELS = 20  # fewest kernels in a pass that does not repeat; with fewer it is set-up, or a test
ON_CPU = "on a CPU no GPU is idle and no kernel is slow; measure on a GPU"
OF_TORCH = re.compile(r"at::native|^triton_(poi|red|per|tem|for|spl|split_scan)_")  # its compiler's too
OF_HOST_MEMORY = re.compile(r"(cuda|hip)(Host(Alloc|Malloc|Register|Free|Unregister)|FreeHost|MallocHost)|cuMemHost")
MOSTLY = 0.5  # share of a time or size; more than this counts as most of it
LEAST_OF_LOOP = 0.1  # share of the step for which most rules look where only a loop's phases and samples are known
TABLES = (
    "steps",
    "gaps",
    "host_gaps",
    "waits",
    "cpu_updates",
    "fusable",
    "scores",
    "phases",
    "families",
    "kernels",
    "attention",
    "overlap",
    "ranges",
)


@dataclass(frozen=True)
class Evidence:
    """Numbers of one step; unrecorded tables are missing, and unknown values are None.

    Attributes:
        tables: the tables of the records or of the trace.
        measurement: the steps without a profiler, all of them timed.
        config: the configuration; None for a trace of any program.
        device_name: the GPU; None without one.
        device_bytes: the memory that the step may use.
        memory: the memory at the peak.
        has_mixed_steps: the steps are of several kinds or sizes, so that their spread is not noise.
        shares_device: other processes used the device, which makes the program's kernels wait.
        usual: the usual steps of a trace, and those set apart from them.
        only_device_s: time of the kernels, if the step is judged as if nothing else took time.
        failure: the last request of a snapshot that failed.
        job: all ranks of the program; the other numbers are then of the rank that the others wait for.
        distribution: the division of a trace's program among ranks; None for one rank alone.
        subject: the steps that the tables are about, such as "steps 3–14 of 15"; "" for all.
        judged: what the rules judge, in words; "" if they have nothing to judge.
        least: the least share that the rules look for; None for that of `Answer`.
        not_judged: why they have nothing to judge, and the remedy.
        unknowns: questions that the data cannot answer, and how to record the missing data.
        known_replay: replay of the steps without a profiler; None to replay the usual steps of the trace.
    """

    tables: Tables = field(default_factory=dict)
    measurement: Measurement | None = None
    config: RunConfig | None = None
    device_name: str | None = None
    device_bytes: int | None = None
    memory: MemoryUse | None = None
    has_mixed_steps: bool = False
    shares_device: bool = False
    usual: Usual | None = None
    only_device_s: float | None = None
    failure: Failure | None = None
    job: Merged | None = None
    distribution: Distribution | None = None
    subject: str = ""
    judged: str = "the step"
    least: float | None = None
    not_judged: str = ""
    unknowns: tuple[str, ...] = ()
    known_replay: Answering | None = None

    @property
    def is_empty(self) -> bool:
        """Flag for evidence without a timed step, kernels, a peak, a request that failed, or a loop's outcome."""
        if self.usual is not None or not {OUTCOME.name, NEVER_STEPPED.name}.isdisjoint(self.tables):
            return False
        has_times = self.measurement is not None or {"steps", "overlap"} & {*self.tables} or self.job is not None
        return self.memory is None and self.failure is None and not (has_times and self.step_s)

    @property
    def is_loop(self) -> bool:
        """Flag of a user's own loop, which has no options of `cs-systems time`."""
        return self.config is not None and self.config.subject is Subject.LOOP

    def remedy(self, caveat: str) -> str:
        """Return the remedy of a caveat, by its code."""
        if self.config is None or not self.is_loop:
            return REMEDIES[caveat]
        timed = len(self.measurement.timed) if self.measurement else None
        return beyond(LOOP_REMEDIES[caveat], self.config.warmup, self.config.steps, timed)

    @cached_property
    def clean_s(self) -> float | None:
        """Duration of a step without a profiler: measured in such a run, else before the profiler began."""
        if self.measurement is not None and self.measurement.timed:
            return self.measurement.median_s()
        before: float | None = first_row(self.tables, "overhead").get("not_recorded_s")
        return before

    @cached_property
    def submit_s(self) -> float | None:
        """Time that the host takes to submit a step without a profiler, its waits included; None if unknown."""
        clean = Clean.of(self.measurement) if self.measurement is not None else None
        return sum(clean.host_s.values()) if clean is not None and clean.host_s else None

    @property
    def usual_share(self) -> float:
        """Share of a loop's or recording's time that its steps would take if all were usual; 1 if that is unknown."""
        if self.usual is not None and self.usual.total_s:
            slow_s = sum(one.beyond_s for one in self.usual.apart if one.kind != START_UP)
            return max(0.0, 1 - slow_s / self.usual.total_s)
        rows = SLOW_STEPS.of(self.tables)
        slow = sum(row["extra_s"] / row["total_s"] for row in rows if row["total_s"])
        return max(0.0, 1 - slow) * (1 - self.compiling_share)

    @property
    def compiling_share(self) -> float:
        """Share of the timed steps' time in which code is compiled."""
        samples = self.measurement.timed if self.measurement else ()
        whole_s = sum(sample.wall_s for sample in samples)
        return min(1.0, sum(sample.compile_s or 0.0 for sample in samples) / whole_s) if whole_s else 0.0

    @cached_property
    def step_s(self) -> float | None:
        """Duration of a step, above 0: without a profiler if known, else under a profiler."""
        if self.only_device_s is not None:
            return self.only_device_s
        if self.clean_s is not None:
            return self.clean_s or None
        if self.job is not None:
            return self.job.step_s or None
        if self.usual is not None:
            return self.usual.step_s or None
        recorded, streams = steps.of(self.tables), RANK_OVERLAP.of(self.tables)
        if recorded:
            return (
                mean(row["wall_s"] for row in recorded if row["device"] == recorded[0]["device"]) or None
            )  # as in tables
        return max((row["step_s"] for row in streams if row.get("step_s")), default=None)

    @cached_property
    def idle_s(self) -> dict[str, float]:
        """Time of a step without a kernel, by cause; time of the profiler itself is left out."""
        return {cause: time_s for cause, time_s in self._all_idle_s.items() if cause != PROFILER}

    @cached_property
    def _all_idle_s(self) -> dict[str, float]:
        """Time of a step without a kernel, by cause.

        In a loop, the GPU waits for the host at most during the timed phases that it ended as soon as they were
        submitted. Under a profiler it waits longer, because each launch is slower and each step begins with an empty
        launch queue.
        """
        lasted = idle_by_cause(self.tables, self.clean_s)
        late = *OF_HOST, PROFILER
        waited_s = sum(lasted.get(cause, 0.0) for cause in late)
        if not (self.is_loop and waited_s and self.measurement and all(each.lag_s for each in self.measurement.timed)):
            return lasted
        part = min(1.0, self.launch_bound_s / waited_s)
        scaled = {cause: time_s * part if cause in late else time_s for cause, time_s in lasted.items()}
        return {cause: time_s for cause, time_s in scaled.items() if time_s}

    @cached_property
    def busy_s(self) -> float | None:
        """Time of a step in which the first device does not wait, by `idle_s`; None without a trace."""
        if self.step_s is None or ("gaps" not in self.tables and "steps" not in self.tables):
            return None
        return max(0.0, self.step_s - sum(self._all_idle_s.values()))

    @cached_property
    def host_bound_s(self) -> float:
        """Time of a step in which the GPU waits for the host: for its launches, its waits, or its own work."""
        return sum(self.idle_s.get(cause, 0.0) for cause in OF_HOST)

    @property
    def is_host_bound(self) -> bool:
        """Flag of a step that ends when the host's work is done, so that shorter kernels gain little."""
        if self.step_s is None:
            return False
        if "gaps" not in self.tables:
            return self.launch_bound_share > HOST_BOUND
        return self.host_bound_s > HOST_BOUND * self.step_s

    @cached_property
    def launch_bound_s(self) -> float:
        """Time of the timed step in phases that the device finished as soon as the host had submitted them."""
        return self.phases_s(*launch_bound_phases(self.measurement)) if self.measurement is not None else 0.0

    @property
    def launch_bound_share(self) -> float:
        """Share of the timed step in these phases."""
        return self.launch_bound_s / self.step_s if self.step_s else 0.0

    @cached_property
    def of_device(self) -> Evidence | None:
        """Evidence of the step reduced to its kernels, as if the GPU never waited; None if their time is unknown."""
        if not self.busy_s:
            return None
        idle_free: Tables = {**self.tables, "gaps": []}
        return replace(self, tables=idle_free, only_device_s=self.busy_s)

    @cached_property
    def unprofiled_s(self) -> tuple[float, float] | None:
        """Shortest and longest duration of the recorded step without the profiler.

        None if it was measured, or is unknown.

        The profiler slows down the host where it launches: the time of launches is divided by the usual factors.
        """
        if self.usual is None or self.clean_s is not None or self.step_s is None:
            return None
        factors = tracer(self.usual.profile.trace.profiler).slower
        if factors is None:
            return None
        waited_s = self.idle_s.get(LAUNCH, 0.0)
        launching_s = self.step_s - sum(time_s for cause, time_s in self.idle_s.items() if cause != LAUNCH)
        low, high = (self.step_s - min(waited_s, launching_s * (1 - 1 / each)) for each in reversed(factors))
        return low, high

    @cached_property
    def replay(self) -> Answering | None:
        """Replay of the steps, from which changes can be predicted; None without one."""
        if self.known_replay is not None:
            return self.known_replay
        if rows := what_if.of(self.tables):
            return Recalled(rows)
        if self.usual is None or self.usual.is_cold or not self.tables:
            return None
        from cs_systems.analysis.replay import replayed

        made = replayed(self.usual.profile)
        return made if made.why_not is None else None

    @cached_property
    def pinned_share(self) -> float:
        """Share of the time in allocating calls of the usual steps that pins the host's memory; 0 without a trace."""
        if self.usual is None:
            return 0.0
        calls = self.usual.profile.trace.calls.where(lambda name: kind(name) == Kind.ALLOCATION)
        calls = calls.take(steps_of(calls.start_s, self.usual.profile.steps)[1])
        lasted = calls.end_s - calls.start_s
        whole_s = float(lasted.sum())
        return float(lasted[calls.name.codes_where(OF_HOST_MEMORY.search)].sum()) / whole_s if whole_s else 0.0

    @cached_property
    def blocking_share(self) -> float:
        """Share of the usual steps' kernels with a launch that lasts until the kernel ends; 0 without a trace."""
        if self.usual is None:
            return 0.0
        kernels = self.usual.profile.trace.kernels
        known = steps_of(kernels.launched_s, self.usual.profile.steps)[1] & (kernels.launch_end_s > 0)
        return float((kernels.launch_end_s >= kernels.end_s)[known].mean()) if known.sum() >= FEWEST_KERNELS else 0.0

    @property
    def silent_s(self) -> float:
        """Idle time of a step in which the host made no CUDA call for over a millisecond."""
        return self.idle_s.get(HOST, 0.0)

    @cached_property
    def uses_torch(self) -> bool:
        """Flag of a trace with kernels or operators of PyTorch; True if the program is unknown."""
        if self.usual is None:
            return True
        trace = self.usual.profile.trace
        return bool(trace.operators) or any(OF_TORCH.search(row["kernel"]) for row in self.kernels())

    def mostly_torch(self, families: Iterable[str]) -> bool:
        """Return whether PyTorch's own kernels take most of these families' time; True where no kernel is known.

        Kernels of cuDNN, which every framework calls, do not count if PyTorch's own kernels run too.
        """
        of_family = [row for row in self.kernels() if row["family"] in {*families}]
        own_s = sum(row["time_s"] for row in of_family if "at::native" in row["kernel"])
        whole_s = sum(row["time_s"] for row in of_family if not own_s or "cudnn" not in row["kernel"])
        return own_s >= MOSTLY * whole_s

    @cached_property
    def input_s(self) -> float:
        """Time that the host waits for the step's batch, limited to the GPU's idle time if that is known.

        Without a marked phase `input`, a data loader's range counts.
        """
        if self.measurement is not None and self.measurement.timed:
            return self.phase_s(Phase.INPUT) or 0.0
        of_host = ranges.of(self.tables)
        marked = [row["total_s"] for row in of_host if row["range"] == Phase.INPUT.value]
        loaded = [row["total_s"] for row in of_host if row["range"].startswith(LOADER)]
        waited = sum(marked or loaded)
        return min(waited, sum(self.idle_s.values())) if self.idle_s else waited

    def phase_s(self, phase: str) -> float | None:
        """Return the median duration of a phase without a profiler, or None if it was not measured."""
        return self.measurement.median_s(phase) if self.measurement else None

    def phases_s(self, *phases: str) -> float:
        """Return the sum of the median durations of these phases, 0 for those that were not measured."""
        return sum(self.phase_s(phase) or 0.0 for phase in phases)

    def gaps_by(self, cause: str) -> tuple[Row, ...]:
        """Return the rows of `gaps` with this cause."""
        return tuple(cast(Row, row) for row in gaps.of(self.tables) if row["cause"] == cause)

    def rows_of(self, *families: str, phases: Iterable[str] | None = None, without: Iterable[str] = ()) -> list[Row]:
        """Return the rows of `phases` for these kernel families, in these phases or in all except `without`."""
        of = phase_rows.of(self.tables)
        wanted = None if phases is None else {*phases}
        return [
            cast(Row, row)
            for row in of
            if row["family"] in families
            and (wanted is None or row["phase"] in wanted)
            and row["phase"] not in {*without}
        ]

    def experiment(self, name: str, instead: str | None = None) -> ExperimentRow | None:
        """Return the row of an experiment; None if it was not made.

        instead: the variant, such as a precision; None for the fastest of all.
        """
        made = [
            row
            for row in EXPERIMENTS.of(self.tables)
            if row["experiment"] == name and row["time_s"] is not None and instead in (None, row["instead"])
        ]
        return min(made, key=lambda row: cast(float, row["time_s"]), default=None)

    def kernels(self) -> Sequence[KernelRow]:
        return kernels.of(self.tables)

    def kernels_named(self, pattern: re.Pattern[str], families: Collection[str] = ()) -> tuple[tuple[Row, ...], float]:
        """Return the kernels of these families (none: all) with matching names, and their time per step in s.

        Kernels of several streams run at once, so their sum is bounded by the step.
        """
        rows: tuple[Row, ...] = tuple(
            {**row}
            for row in self.kernels()
            if pattern.search(row["kernel"]) and (not families or row["family"] in families)
        )
        return rows, min(self.step_s or 0.0, sum(row["time_s"] for row in rows))

    @property
    def has_compiled_kernels(self) -> bool:
        """Flag for a step that a compiler fused, by its configuration or its kernels; else by the process's graphs."""
        if self.setting("compile") not in (None, "none"):
            return True
        if kernels := self.kernels():
            return any(row["kernel"].startswith("triton_") for row in kernels)
        return bool(first_row(self.tables, "ran").get("compiled_graphs"))

    def setting(self, name: str) -> Any:
        """Return a field of the configuration if it describes the step that ran, else the record's value, or None."""
        ran = first_row(self.tables, "ran")
        if ran.get(name) is not None:
            return ran[name]
        if self.config is None:
            return None
        used = self.config.workload in CONFIGURED or name in str(ran.get("uses") or "").split()
        return getattr(self.config, name) if used else None

    def peak_flops_per_s(self, precision: str) -> float | None:
        """Return the peak of this device in a precision by its data sheet, or None."""
        peak = peak_flops(self.device_name, precision) if self.device_name else None
        return peak.per_s if peak else None

    def floor_s(self, phase: str) -> float | None:
        """Return the least time of a phase by its cost and the device's ceilings, or None where one is unknown."""
        costs, ceilings = COST.of(self.tables), CEILING.of(self.tables)
        cost = next((row for row in costs if row["phase"] == phase), None)
        flops = cost.get("hardware_flops") if cost else None
        if cost is None or flops is None or not ceilings or not ceilings[0]["peak_flops_per_s"]:
            return None
        rate, moved = ceilings[0].get("peak_bytes_per_s"), cost.get("bytes")
        return max(flops / ceilings[0]["peak_flops_per_s"], moved / rate if moved is not None and rate else 0.0)


def of_records(records: Sequence[RunRecord]) -> Evidence:
    """Return the evidence in all records of one cell: timed, profiled, and with its memory recorded.

    If several records have the same profiler, the last one counts; if several have the same table, the one without a
    profiler. Tables of profilers that change the step are left out, such as the one that measures waits of ranks.
    """
    has_times = Subject.of(records[0].config["workload"]).is_timed
    timed = [r for r in records if has_times and not r.is_profiled and r.is_timing]
    profiled = [r for r in records if has_times and r.is_profiled and measured_by(r.config["profiler"]) == "time"]
    tables: Tables = {}
    for record in (*profiled, *timed):
        tables = {**tables, **record.results}
    for record in records:  # a loop's tables are in the record of its last stage, with whichever profiler that ran
        if rows := EXPERIMENTS.of(record.results):
            tables = {**tables, **EXPERIMENTS.filled(rows)}
    if not timed:  # a loop with a loss that is NaN has no times, and one without a step of an optimizer has none
        for name in (OUTCOME.name, EMPTY_CLIPPING.name, NEVER_STEPPED.name):
            kept = next((record.results[name] for record in records if record.results.get(name)), None)
            tables = {**tables, name: kept} if kept else tables
    last = records[-1]
    environment = next((r.environment for r in reversed(records) if r.environment), None)
    on_gpu = environment is not None and environment.device != "cpu"
    memory = next((found for r in reversed(records) if (found := memory_of_record(r))), None)
    judged = "the step" if "gaps" in tables else "the step, judged by its timed phases alone" if timed else "the peak"
    is_observed = last.is_loop and not on_gpu and bool(timed) and "gaps" not in tables
    if is_observed:
        judged = "the step, if all that it computes is needed"
    config = last.run_config
    return Evidence(
        tables=Sound(tables),
        measurement=next((clean for r in reversed([*profiled, *timed]) if (clean := r.clean)), None),
        config=config,
        device_name=environment.device_name if environment and on_gpu else None,
        device_bytes=config.memory_limit_bytes or (environment.device_memory_bytes if environment else None),
        memory=memory,
        judged=judged if on_gpu or memory or last.is_loop else "",
        least=LEAST_OF_LOOP if is_observed else None,
        not_judged="" if on_gpu or memory or not (timed or profiled) else ON_CPU,
        has_mixed_steps=any(caveat.code in UNEVEN for r in timed for caveat in r.warnings),
        shares_device=any(caveat.code == SHARED for r in records for caveat in r.warnings),
    )


def of_trace(tables: Tables, device_name: str | None) -> Evidence:
    """Return the evidence of a trace: its tables and its GPU."""
    return Evidence(tables=tables, device_name=device_name)


def of_profile(profile: Profile) -> Evidence:
    """Return the evidence of a foreign trace: the tables of its usual steps, and the questions that it leaves open."""
    from cs_systems.analysis.attribution.distribution import distribution
    from cs_systems.analysis.attribution.tables import NO_COSTS
    from cs_systems.analysis.attribution.tables import TABLES as MADE
    from cs_systems.analysis.attribution.usual_steps import usual_steps, whole_graph_share
    from cs_systems.analysis.diagnosis._without_kernels import why_not_judged

    if not profile.trace.kernels:
        return Evidence(judged="", not_judged=why_not_judged(profile))
    if profile.incomplete and profile.trace.lacks_kernels:
        return Evidence(judged="")
    usual = usual_steps(profile)
    if usual.is_cold:
        return Evidence(usual=usual, judged="", not_judged="")
    unknowns = list[str]()
    if (share := whole_graph_share(usual.profile)) > MOSTLY:
        from cs_systems.readers._nsys import NODES

        unknowns.append(f"{share:.0%} of the kernels' time is in CUDA graphs recorded as a whole; record with {NODES}")
    tables: Tables = {name: MADE[name](usual.profile, NO_COSTS) for name in TABLES}
    found = replace(
        of_trace(tables, profile.trace.devices.get(profile.devices[0])),
        usual=usual,
        distribution=distribution(usual.profile),
        subject=usual.name,
        judged=usual.name or "the step",
        unknowns=tuple(unknowns),
    )
    told_s = (found.busy_s or 0.0) + found.idle_s.get(COPY, 0.0) + found.silent_s
    are_few = _kernels_of(usual) < FEWEST_KERNELS
    if not unknowns and usual.is_once and are_few and told_s < MOSTLY * usual.step_s:
        return Evidence(usual=usual, judged="", unknowns=(_too_little(usual),))
    return found


def _kernels_of(usual: Usual) -> int:
    return sum(each.calls for each in usual.profile.by_step.values())


def _too_little(usual: Usual) -> str:
    """Return why a recording of one pass with only a few kernels is not enough to judge a step."""
    count = _kernels_of(usual)
    time_s, of_s = human(usual.profile.time_s, "s"), human(usual.step_s, "s")
    return (
        f"what limits a step: {counted(count, 'kernel')} in {of_s} ({time_s} of kernels), and nothing repeats; mark it "
        "(ProfilerStep, or a range named step), and record several after a warm-up"
    )


def of_job(job: Merged, rank: int, profile: Profile) -> Evidence:
    """Return the evidence of a job's traces: all ranks, and details of the rank that the others wait for."""
    from cs_systems.analysis.attribution.distribution import distribution

    own = of_profile(profile)
    if own.is_empty:
        own = Evidence(distribution=distribution(profile), unknowns=own.unknowns)
    subject = f"rank {rank}{f', {own.subject}' if own.subject else ''}"
    return replace(own, job=job, subject=subject, judged="the step")


def of_snapshot(found: Attribution, names: TensorNames) -> Evidence:
    """Return the evidence of a memory snapshot: what was allocated at its peak, and the request that failed."""
    from cs_systems.analysis.memory.out_of_memory import last_failure

    replay, failure = found.replay, last_failure(found)
    if (count := len(replay.snapshot.events)) < 2 and not failure:
        has = "no events" if not count else "one event alone"
        return Evidence(judged="", unknowns=(f"the peak, because the snapshot has {has}{_at_end(found)}; {HISTORY}",))
    if not replay.has_peak or not replay.peak_bytes:
        return Evidence(failure=failure, judged="")
    memory = memory_of_snapshot(found, names)
    return Evidence(memory=memory, failure=failure, judged="the peak")


def _at_end(found: Attribution) -> str:
    """Return a clause on the line that made most of what is allocated at the end; empty if no line did."""
    replay = found.replay
    end = len(replay.snapshot.events)
    sizes = Counter[str]()
    for each in found.allocations:
        if each.allocation.end == end and (site := found.sites[each.allocation.stack]):
            sizes[site] += each.allocation.bytes
    (line, size), *_ = sizes.most_common(1) or [("", 0)]
    if size < MOSTLY * replay.end_bytes or not size:
        return ""
    return f" ({human(size, 'bytes')} of the {human(replay.end_bytes, 'bytes')} at its end are from {line})"
