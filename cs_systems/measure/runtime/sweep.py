"""Public entry points: run(config) → RunRecord; sweep(configs) → RunRecords as they are measured. Without torch.

Worker processes use torch. Records are appended and forced to disk one by one, so an interrupted sweep loses nothing,
and the same call measures the missing cells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cs_systems.config import FIELDS, INSTEAD, ConfigError, ModelConfig, RunConfig
from cs_systems.core import parts, plugins
from cs_systems.core.display import Displayed, report
from cs_systems.core.validation import arguments_checked, is_number, is_whole, shown, unknown_argument
from cs_systems.formulas.memory.tables import ForecastRow, PreflightRow
from cs_systems.measure.profilers import Profiler, ProfilerUnusable
from cs_systems.measure.runtime import allowance, observed, profiled, scheduler
from cs_systems.measure.runtime.channel import Experimenting, Timing, Visit
from cs_systems.measure.runtime.journal import FolderRefused, Journal
from cs_systems.measure.runtime.lifetime import torchrun_rank
from cs_systems.measure.runtime.supervisor import Progressed, Supervisor
from cs_systems.measure.workloads import Cell
from cs_systems.model import parallel
from cs_systems.record import DONE, Environment, RunRecord, make_key

_YEAR_S = 365 * 86400  # the largest timeout that the system's wait accepts


@dataclass(frozen=True)
class Progress:
    """Progress update: sent between measurements, during a warm-up, and every few seconds between timed steps."""

    done: int
    total: int
    config: RunConfig | None = None  # the cell that is being measured
    record: RunRecord | None = None  # the record that was just finished
    note: str | None = None
    round: int | None = None  # round of the cell, from 0
    warmup: tuple[int, int] | None = None  # finished warm-up steps of the cell, and their total
    timed: tuple[int, int] | None = None  # the same of its timed steps
    # number of the cell's experiments, and their approximate cost in s; sent before the first
    experiments: tuple[int, float] | None = None


OnProgress = Callable[[Progress], None]


class Cells(list[RunConfig]):
    """Cells that `check` accepted; they are not checked again."""


def _listed(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """Return the cells as a list. Raises ConfigError if they are anything but RunConfigs."""
    if isinstance(configs, Cells):
        return configs
    if isinstance(configs, RunConfig):
        raise ConfigError("configs is a single RunConfig; give a list, or measure it with run(config)")
    cells = list(configs) if isinstance(configs, Iterable) and not isinstance(configs, str) else [configs]
    for cell in cells:
        if not isinstance(cell, RunConfig):
            raise ConfigError(
                f"configs has {shown(cell)}; give a list of RunConfigs. Measure a model by run(model=…, inputs=…), a "
                f"step by run(workload=…), or {BY_NAME}"
            )
    return cells


def check(
    configs: Sequence[RunConfig], repeats: int = 1, timeout_s: float | None = None, *, runs_here: bool = True
) -> Cells:
    """Return the cells. Raises ConfigError for an invalid sweep before anything runs.

    Invalid are: unknown plug-in names, strategies that cannot be combined, a profiler that cannot work here (unless the
    cells run on another machine), and invalid options of the sweep itself. Cells are checked only once.
    """
    if not is_whole(repeats) or repeats < 1:
        raise ConfigError(f"repeats is {shown(repeats)}; it must be a whole number of at least 1", "repeats")
    if timeout_s is not None and not is_number(timeout_s):
        raise ConfigError(f"timeout_s is {shown(timeout_s)}; it must be a number of seconds", "timeout_s")
    if timeout_s is not None and not 0 < timeout_s <= _YEAR_S:
        raise ConfigError(f"timeout_s is {timeout_s:g}; it must be more than 0 s and at most a year", "timeout_s")
    if isinstance(configs, Cells):
        return configs
    for name in {c.profiler for c in configs}:
        profiler: Profiler = plugins.get("profilers", name)
        if runs_here and (reason := profiler.problem()):
            raise ProfilerUnusable(reason, profiler.instead)
        if profiler.is_launcher and any(c.is_distributed for c in configs if c.profiler == name):
            raise ConfigError(
                f"profiler {name} cannot record ranks, which a strategy, a collective or world_size above 1 requires; "
                "use profiler kineto"
            )
    for config in configs:
        if config.strategy != RunConfig.strategy:
            parallel.check_config(config)
    for field, name in dict.fromkeys((f, n) for c in configs for f, names in c.plugin_names.items() for n in names):
        plugins.check(FIELDS[field].field.plugin, name)
    for names in {c.parts for c in configs}:
        parts.check(names)
    return Cells(configs)


_FIELDS = tuple(f.name for f in fields(RunConfig))
# Arguments of `run` that are a field of RunConfig if they have this type, and otherwise a live object.
_LIVE_OR_FIELD = {"model": ModelConfig, "inputs": str, "optimizer": str, "workload": str}
_ARGUMENTS = (
    *("config", "name", "out", "in_process", "timeout_s", "experiments_s"),
    *("batches", "loss", "scheduler", "clip_norm", "accumulate", "forward"),  # parts of a TrainingSetup
    *_FIELDS,
)
BY_NAME = "name the object as RunConfig(workload='path/to/file.py:name')"


_INSTEAD = INSTEAD | {
    "repeats": "measure a RunConfig by sweep([config], repeats={value}), or call run() again with the same out",
    "lr": "give optimizer=lambda parameters: torch.optim.AdamW(parameters, lr={value})",
}


@arguments_checked
def run(
    config: RunConfig | None = None,
    *,
    model: Any = None,
    inputs: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    workload: Any = None,
    name: str | None = None,
    out: str | os.PathLike[str] | None = None,
    in_process: bool = False,
    timeout_s: float | None = None,
    experiments_s: float = 0.0,
    **options: Any,
) -> RunRecord:
    """Measure one cell: a configuration in a worker process, or an object of this process in this process.

    A live model is measured as it is and restored, also in mode "train-step": its weights, buffers, gradients, hooks,
    mode and device, the state of its optimizer and scheduler, and the random numbers and settings of the process. Two
    changes remain: batches taken from an iterator, and changes that a function makes by itself.

    Args:
        config: the configuration; by default RunConfig().
        model: an nn.Module to measure, or a ModelConfig for the field of RunConfig.
        inputs: for a live model: one batch (a tensor, mapping, tuple, list or dataclass), or a DataLoader of batches.
        loss: for a live model: `loss(outputs)` or `loss(outputs, batch)`.
        optimizer: for a live model: a class, a function of the parameters, or an optimizer; or the field, a text.
        workload: a live step (a function without arguments), factory, TrainingSetup, or tuple or mapping of its parts;
            or the field, a text.
        name: the name of a live object in tables; by default the name of its class or function.
        out: the folder of the record; by default none is written. A live object is measured again in each call; a
            configuration only if the folder does not hold it yet.
        in_process: measure a configuration in this process, for a debugger.
        timeout_s: for a configuration; see `sweep`.
        experiments_s: the time for experiments after the last step; see `sweep`.
        options: the other parts of a TrainingSetup, and every field of RunConfig, by name: `precision="bf16"`.

    Raises:
        ConfigError: malformed arguments. What fails while it is measured becomes the status of the record.
    """
    observed.refuse_inside("run")
    for argument in options:
        if argument not in _ARGUMENTS:
            raise unknown_argument("run", argument, options[argument], _ARGUMENTS, _INSTEAD)
    if config is not None and not isinstance(config, RunConfig):
        raise ConfigError(
            f"config is {shown(config)}; give a RunConfig, or call run(model=…) for a ModelConfig, "
            "run(model=…, inputs=…) for a module, run(workload=…) for a step"
        )
    named = {"model": model, "inputs": inputs, "loss": loss, "optimizer": optimizer, "workload": workload}
    given = options | {argument: value for argument, value in named.items() if value is not None}
    live = {argument: given.pop(argument) for argument in list(given) if _is_live(argument, given[argument])}
    _check_live(live, given)
    # a live model has its own blocks, so its checkpoint plan is checked later, when the configuration names the model
    plan = {"checkpoint": given.pop("checkpoint")} if live and "checkpoint" in given else {}
    config = replace(config or RunConfig(), **given)
    check([config], timeout_s=timeout_s)
    _check_options(out=out, in_process=in_process)
    allowance.check(experiments_s, [] if live else [config])
    if live:
        return _run_live(config, live, plan, name, out, timeout_s, experiments_s)
    if name is not None:
        raise ConfigError(
            "name= is only for a live object, such as an nn.Module or a step, and none is given; leave out name="
        )
    if not in_process:
        return _run_in_worker(config, out, timeout_s, experiments_s)
    if out is not None:
        raise ConfigError("in_process=True writes no folder of records, but out= is given; give only one of the two")
    if config.is_profiled:
        raise ConfigError(f"profiler {config.profiler} needs its own process; leave out in_process=True")
    if config.is_distributed:
        raise ConfigError("a distributed cell needs its own processes; leave out in_process=True")
    from cs_systems.measure.runtime.live import measured_here

    return measured_here(config, experiments_s=experiments_s).stamped()


def _is_live(argument: str, value: Any) -> bool:
    """Return True for an argument of `run` that is an object of this process, not a field of RunConfig."""
    if argument in _LIVE_OR_FIELD:
        return not isinstance(value, _LIVE_OR_FIELD[argument])
    return argument not in _FIELDS and value is not None


def _check_live(live: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Raise ConfigError for objects without a model, or for inputs that are a text although a model is given.

    live: the arguments that are objects. named: the others, which are fields of RunConfig.
    """
    if "model" in live and "inputs" in named:
        raise ConfigError(f"inputs is {shown(named['inputs'])}, a text; give a tensor, dict, tuple, list or DataLoader")
    if live and "workload" not in live and "model" not in live:
        first = next(iter(live))
        if "model" in named:
            raise ConfigError(
                f"{first}= requires an nn.Module as model=, got a ModelConfig; give a module, or leave out {first}="
            )
        raise ConfigError(
            f"{first}= requires an nn.Module as model=, and none is given; give both, or leave out {first}="
        )


def _run_live(
    config: RunConfig,
    live: dict[str, Any],
    plan: Mapping[str, Any],
    name: str | None,
    out: str | os.PathLike[str] | None,
    timeout_s: float | None,
    experiments_s: float,
) -> RunRecord:
    """Measure a live object. Raises ConfigError if the objects are incomplete, or an option needs another process."""
    if config.workload != RunConfig.workload:
        names = ", ".join(f"{argument}=" for argument in live)
        raise ConfigError(
            f"workload {config.workload} cannot be combined with {names}; leave out that workload, or leave out {names}"
        )
    if "workload" in live and len(live) > 1:
        other = next(argument for argument in live if argument != "workload")
        raise ConfigError(
            f"workload= and {other}= exclude each other; leave out {other}=, or give all parts as "
            "workload=TrainingSetup(model, batch, …)"
        )
    reasons = {
        "timeout_s": timeout_s is not None,
        f"profiler {config.profiler}": Cell(config).profiler.is_launcher,
        f"strategy {config.strategy} on world_size {config.world_size}": config.is_distributed,
    }
    if needs := [what for what, is_asked in reasons.items() if is_asked]:
        raise ConfigError(
            f"{needs[0]} requires a worker process, which cannot receive an object of this process; leave out "
            f"{needs[0]}, or {BY_NAME}"
        )
    from cs_systems.measure.runtime import live as here

    if "workload" in live:
        return here.run_live(live["workload"], config, plan, name=name, out=out, experiments_s=experiments_s)
    setup = here.setup_of(live.pop("model"), live.pop("inputs", None), live)
    return here.run_live(setup, config, plan, name=name, out=out, experiments_s=experiments_s)


def _run_in_worker(
    config: RunConfig, out: str | os.PathLike[str] | None, timeout_s: float | None, experiments_s: float
) -> RunRecord:
    """Measure a config, or return its record from the folder."""
    for record in _measured([config], out=out, timeout_s=timeout_s, experiments_s=experiments_s):
        return record
    assert out is not None
    return [record for record in Journal(Path(out)).read()[0] if record.run_config == config][-1]


@arguments_checked
def preflight(configs: Iterable[RunConfig], *, timeout_s: float | None = None) -> list[PreflightRow]:
    """Return one row per config: the predicted memory, and why it cannot run here.

    timeout_s: for each config; two minutes by default.
    """
    cells = check(_listed(configs), timeout_s=timeout_s)
    with Supervisor(timeout_s=timeout_s) as supervisor:
        return supervisor.preflight(cells)


@contextmanager
def forecasting(timeout_s: float | None = None) -> Iterator[Callable[[RunConfig], ForecastRow]]:
    """Yield a function that predicts the memory of a cell of a user's own model by fake tensors.

    timeout_s: for each prediction; two minutes by default.
    """
    with Supervisor(timeout_s=timeout_s) as supervisor:
        yield supervisor.forecast


def profiler_commands(configs: Sequence[RunConfig], folder: Path) -> list[list[str]]:
    """Return for each cell a command that measures it under its profiler as a sweep would.

    The `folder` must exist when the commands run. The profiler need not be on this machine.
    """
    configs = check(configs, runs_here=False)
    with Supervisor() as supervisor:
        folder = folder.absolute()
        return [
            profiled.command(Cell(c), profiled.prefix(folder, c, 0), on_cuda=supervisor.on_cuda(c)) for c in configs
        ]


@arguments_checked
def sweep(
    configs: Iterable[RunConfig],
    *,
    out: str | os.PathLike[str] | None = None,
    repeats: int = 1,
    timeout_s: float | None = None,
    fresh: bool = False,
    skip_oom: bool = False,
    interleave: bool = False,
    shuffle_seed: int | None = None,
    record_host: bool = False,
    experiments_s: float = 0.0,
    on_progress: OnProgress = lambda progress: None,
) -> Records:
    """Return an iterator that measures every config and yields each record as soon as it is on disk.

    out: folder of records.jsonl; cells that it already holds as ok, oom or unavailable are skipped.
    repeats: number of measurements of each cell, each in a new process, so that the variance between processes shows.
    timeout_s: for one visit to a cell (building, warm-up and the steps of one round).
    fresh: rename the folder's records and start over.
    skip_oom: a cell with a predicted peak above the device's memory becomes an oom record without being run; the
        same sweep without it runs the cell.
    interleave: visit all cells in turn, `rounds` times, instead of finishing one after the other.
    shuffle_seed: shuffle the order of the cells, anew in each repeat.
    record_host: write the name of this host into the records, next to the date and the command.
    experiments_s: the total time for experiments after the last steps of all cells.

    In a job that torchrun started, rank 0 measures here and the others end with it: see `torchrun`.

    Raises ConfigError for malformed input, and OSError for a folder that cannot be written, before the first cell runs.
    """
    observed.refuse_inside("sweep")
    cells = check(_listed(configs), repeats, timeout_s)
    _check_options(out=out, fresh=fresh, skip_oom=skip_oom, interleave=interleave, record_host=record_host)
    if shuffle_seed is not None and not is_whole(shuffle_seed):
        raise ConfigError(f"shuffle_seed is {shown(shuffle_seed)}; it must be a whole number")
    allowance.check(experiments_s, cells)
    if not callable(on_progress):
        raise ConfigError(
            f"on_progress is {shown(on_progress)}; give a function that takes a Progress, or leave it out"
        )
    if not cells:
        raise ConfigError("configs is empty; give at least one RunConfig")
    cells = Cells(dict.fromkeys(cells))
    measured = _measured(
        cells,
        out=out,
        repeats=repeats,
        timeout_s=timeout_s,
        fresh=fresh,
        skip_oom=skip_oom,
        interleave=interleave,
        shuffle_seed=shuffle_seed,
        record_host=record_host,
        experiments_s=experiments_s,
        on_progress=on_progress,
    )
    return Records(len(cells) * repeats, measured)


# hints of an iterator of records about cells that it has not yielded
TO_MEASURE = "iterate over it, or call .finish(), to measure the others"
RECORDED = "the others were recorded before, and cs_systems.load(out) reads all"
INTERRUPTED = "it was interrupted; call sweep() again to measure the others"


class Records(Displayed, Iterator[RunRecord]):
    """Iterator of the records of a sweep, which measures as it goes; a notebook shows the records so far as a table.

    Attributes:
        total: number of cells, including repeats.
        records: the records that this iterator has yielded.
    """

    def __init__(self, total: int, measured: Iterator[RunRecord]) -> None:
        self.total, self.records, self._measured = total, list[RunRecord](), measured
        self._others = TO_MEASURE

    def __next__(self) -> RunRecord:
        try:
            record = next(self._measured)
        except StopIteration:
            if self._others == TO_MEASURE:
                self._others = RECORDED
            raise
        except BaseException:
            self._others = INTERRUPTED
            raise
        self.records.append(record)
        return record

    def _displayed(self) -> tuple[str, list[RunRecord]]:
        done = len(self.records)
        others = "" if done == self.total else f"; {self._others}"
        return f"{done} of {self.total} cells measured in this sweep{others}", self.records

    def finish(self) -> Records:
        """Measure the remaining cells, and return this iterator."""
        for _ in self:
            pass
        return self

    def frame(self) -> Any:
        """Return the records so far as a pandas DataFrame, one row per phase."""
        return report("frame").frame(self.records)


def _check_options(*, out: Any, **flags: Any) -> None:
    """Raise ConfigError for an option of the wrong type."""
    if out is not None and (not isinstance(out, str | os.PathLike) or not os.fspath(out)):
        raise ConfigError(f"out is {shown(out)}; give the folder of the records")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {shown(value)}; give True or False")


def _measured(
    configs: list[RunConfig],
    *,
    out: str | os.PathLike[str] | None,
    repeats: int = 1,
    timeout_s: float | None,
    fresh: bool | None = None,
    skip_oom: bool = False,
    interleave: bool = False,
    shuffle_seed: int | None = None,
    record_host: bool = False,
    experiments_s: float = 0.0,
    on_progress: OnProgress = lambda progress: None,
) -> Iterator[RunRecord]:
    """Measure the cells of a sweep with checked options. `fresh` is None for `run`, which has no such option."""
    _follow_in_job()
    journal = None if out is None else Journal.prepare(out, fresh=fresh, record_host=record_host)
    done, total = 0, len(configs) * repeats

    def report(**news: Any) -> None:
        on_progress(Progress(done, total, **news))

    def visited(config: RunConfig, message: Progressed) -> None:
        if isinstance(message, Visit):
            report(config=config, round=message.round)
        elif isinstance(message, Experimenting):
            report(config=config, experiments=(message.count, message.cost_s))
        elif isinstance(message, Timing):
            report(config=config, timed=(message.step, message.steps))
        else:
            report(config=config, warmup=(message.step, message.steps))

    experiments = allowance.Allowance(experiments_s)
    with journal.locked() if journal else nullcontext():
        for repeat in range(repeats):
            with Supervisor(journal, timeout_s, experiments) as supervisor:
                missing = configs
                if journal is not None:
                    supervisor.record_lost(configs)
                    missing = _missing(journal, supervisor, configs, repeat, skip_oom, lambda note: report(note=note))
                recorded = len(configs) - len(missing)
                done += recorded
                if shuffle_seed is not None:
                    missing = scheduler.shuffled(missing, shuffle_seed + repeat)
                if recorded:
                    report(note=f"{recorded} {'cell is' if recorded == 1 else 'cells are'} already recorded")
                for record in supervisor.measure(missing, repeat, interleave, skip_oom, visited):
                    stamped = record.stamped(record_host=record_host) if journal is None else journal.append(record)
                    done += 1
                    report(record=stamped)
                    yield stamped


def _missing(
    journal: Journal,
    supervisor: Supervisor,
    configs: list[RunConfig],
    repeat: int,
    skip_oom: bool,
    on_note: Callable[[str], None],
) -> list[RunConfig]:
    """Return the cells that the journal does not hold yet; those that failed before come last.

    Raises ConfigError if the folder was measured elsewhere or by other code.
    """
    records, complaints = journal.read()
    for complaint in complaints:
        on_note(complaint)
    if not records:
        return configs
    for record in records:
        if record.environment is not None:
            same_origin(record.environment, supervisor.environment(record.run_config.device), journal)
    status = {record.key: record.status for record in records if skip_oom or not record.predicted}
    found = {c: status.get(make_key(c, repeat, supervisor.environment(c.device))) for c in configs}
    unavailable = [c for c in configs if found[c] == "unavailable"]
    rows = supervisor.preflight(unavailable) if unavailable else []
    remedied = {c for c, row in zip(unavailable, rows, strict=True) if row["reason"] is None}
    missing = [c for c in configs if found[c] not in DONE or c in remedied]
    return sorted(missing, key=lambda c: found[c] is not None)


def same_origin(recorded: Environment, now: Environment, journal: Journal) -> None:
    """Raise ConfigError if a folder's records come from another torch, device or version of this code."""
    for how, name in (
        ("with torch {}, not {}", "torch"),
        ("on {}, not {}", "device_name"),
        ("by another version of the code ({}, now {})", "code_version"),
    ):
        before, after = getattr(recorded, name), getattr(now, name)
        if before != after:
            problem = f"the records of {journal.folder} were measured {how.format(before, after)}, and do not compare"
            raise FolderRefused(problem, journal.remedy_for_other_records)


def _follow_in_job() -> None:
    """Answer rank 0 and end with it, like every other rank of a job of torchrun."""
    if torchrun_rank():
        from cs_systems.measure.runtime.torchrun import follow

        sys.exit(follow())
