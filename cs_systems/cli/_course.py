"""Plans of the course's tasks for this machine, their runs, and the state of a folder of results."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypedDict

from cs_systems.cli import EXIT_INTERRUPTED
from cs_systems.cli._document import is_wanted
from cs_systems.cli._output import print_table
from cs_systems.cli._tables import table_text
from cs_systems.config import PRESETS, ConfigError, Mode, Precision, RunConfig, preset
from cs_systems.core.course import Task
from cs_systems.core.printable import command_line, visible
from cs_systems.core.tables import Column, Table
from cs_systems.core.units import human

RANKS = (2, 4, 6)
SMALLER = ("xl-2026", "large", "medium", "small", "tiny")
BUCKETS_MB = {"tiny": ("0.1", "1"), "other": ("1", "10", "100", "1000")}
MEASURING = ("time", "profile", "memory", "parallel", "attention", "comm", "precision")


class TaskRow(TypedDict):
    """Task of the course with the GPUs that it needs at the handout's sizes, and its progress."""

    task: str
    gpus: Annotated[
        int, Column("GPUs", note="GPUs: at the handout's sizes; with fewer, a task runs smaller, and says so")
    ]
    state: str


class CommandRow(TypedDict):
    """Command of a task, with its exit status and time; null if it has not run."""

    task: str
    command: str
    status: int | None
    took_s: float | None


TASKS = Table("tasks", TaskRow, "tasks of the course")
COMMANDS = Table("task_commands", CommandRow, "commands of the tasks")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Machine:
    """Devices of this machine: number of GPUs, up to six, and the memory of one; 0 and None without a GPU."""

    gpus: int
    memory_bytes: int | None

    def __str__(self) -> str:
        if not self.gpus or self.memory_bytes is None:
            return "a CPU"
        memory = human(self.memory_bytes, "bytes")
        return f"a GPU of {memory}" if self.gpus == 1 else f"{self.gpus} GPUs of {memory}"


@dataclass(frozen=True)
class Plan:
    """Commands of a task for this machine; `size` is a sentence on the chosen size and the reason."""

    task: Task
    scale: str
    size: str
    commands: list[list[str]]
    out: Path
    machine: Machine


def machine() -> Machine:
    """Return the devices of this machine, as a worker process sees them."""
    from cs_systems.measure.runtime.sweep import preflight

    one = RunConfig(device="cuda")
    several = [replace(one, strategy="ddp_naive", world_size=ranks) for ranks in RANKS]
    first, *rest = preflight([one, *several])
    if first["reason"] is not None:
        return Machine(0, None)
    gpus = max((ranks for ranks, row in zip(RANKS, rest, strict=True) if row["reason"] is None), default=1)
    return Machine(gpus, first["device_memory_bytes"])


def planned(
    task: Task,
    machine: Machine,
    folder: Path,
    *,
    full: bool = False,
    sizes: Sequence[str] = (),
    contexts: Sequence[str] = (),
    code: str | None = None,
    model: str | None = None,
    renewed: set[str] | None = None,
) -> Plan:
    """Return the plan of a task. Raises ConfigError if --full asks for the handout's size and it cannot run here.

    sizes, contexts: of the model, instead of the task's. code, model: the user's own, as `path.py:name` or
    `module:name`. renewed: folders that earlier commands began anew, to which this plan's are added; None to
    continue recorded cells.
    """
    out = folder / (task.folder or task.name)
    if not task.steps:
        return Plan(task, "full", "by formula; nothing is measured", [], out, machine)
    if full and machine.gpus < task.gpus:
        raise ConfigError(f"the handout's size needs {_counted(task.gpus)}, and this is {machine}; leave out --full")
    for option, given in {"--size": sizes, "--context-length": contexts, "--model": model}.items():
        if given and "size" not in task.full:
            raise ConfigError(f"{task.name} has no model; leave out {option}")
    for name in sizes:
        preset(name)
    at_full = full or machine.gpus >= task.gpus
    values, sentence = dict(task.full if at_full else task.tiny), ""
    if code:
        values["code"] = f"{values['code']} {shlex.quote(task.code.format(code))}"
    if at_full and task.gpus:
        if "ranks" in values:
            values["ranks"] = " ".join(n for n in values["ranks"].split() if int(n) <= machine.gpus)
        if values.get("profiler") == "nsys" and not _has_nsys():
            values["profiler"], sentence = "kineto", "torch.profiler instead of nsys, which is not installed; "
    scale = "full" if at_full else "tiny"
    if sizes or contexts:
        _put(values, ("size", "cold"), ("largest",), sizes)
        _put(values, ("contexts",), ("context",), contexts)
        scale, sentence = "own", sentence + _as_given(task, values, sizes, contexts)
        sentence += "" if at_full else f"; the rest is tiny, because {_lack(task, machine)}"
    elif not at_full:
        sentence += f"at tiny size, because {_lack(task, machine)}"
    elif full or not task.gpus or "size" not in values:
        sentence += "at the handout's size"
    else:
        scale, words = _fit(task, values, machine)
        sentence += words
    commands = task.commands(values, str(out))
    if code:
        sizes_mb = BUCKETS_MB["tiny" if values.get("size") == "tiny" else "other"]
        commands = [
            [*words, "--bucket-size-mb", *sizes_mb] if _has_buckets(words, code) else words for words in commands
        ]
    if model:
        commands = [[*words, "--workload", model] if "--size" in words else words for words in commands]
    if machine.gpus and not at_full:
        commands = [[*words, "--device", "cpu"] if words[0] in MEASURING else words for words in commands]
    if at_full and not full and task.gpus:
        commands = [[*words, "--skip-oom"] if _can_skip(words) else words for words in commands]
    if renewed is not None:
        commands = [[*words, "--fresh"] if _begins(words, renewed) else words for words in commands]
    return Plan(task, scale, sentence, commands, out, machine)


def _lack(task: Task, machine: Machine) -> str:
    return f"the handout's needs {_counted(task.gpus)} and this is {machine}"


def _counted(gpus: int) -> str:
    return "a GPU" if gpus == 1 else f"{gpus} GPUs"


def _can_skip(words: Sequence[str]) -> bool:
    return words[0] in MEASURING and "--out" in words and words[0] != "comm"


def _begins(words: Sequence[str], renewed: set[str]) -> bool:
    """Return whether a command measures into a folder that none before it began anew, and note the folder."""
    out = _values(words, "--out", "")[0]
    if words[0] not in MEASURING or out in renewed:
        return False
    renewed.add(out)
    return True


def _has_buckets(words: Sequence[str], code: str) -> bool:
    """Return whether a command measures a user's own strategy that takes a bucket size."""
    from cs_systems.formulas.rank_layout import options_of

    return words[0] == "parallel" and "bucket_size_mb" in options_of(code)


def _put(values: dict[str, str], several: Sequence[str], one: Sequence[str], given: Sequence[str]) -> None:
    """Replace the task's values by the given ones; an option with a single value gets the last of them."""
    if given:
        values.update({name: " ".join(given) for name in several if name in values})
        values.update({name: given[-1] for name in one if name in values})


def _as_given(task: Task, values: dict[str, str], sizes: Sequence[str], contexts: Sequence[str]) -> str:
    """Return a sentence on the size and the context, with the handout's context where another one is taken."""
    chosen = {"size": " ".join(sizes), "context": " ".join(contexts)}
    text = " and ".join(f"{name} {words}" for name, words in chosen.items() if words) + ", as given"
    if contexts:
        return text
    name = "contexts" if "contexts" in values else "context"
    differs = name in values and values[name] != task.full[name]
    return text + (
        f"; context {values[name]}, the handout's is {task.full[name]} (--context-length)" if differs else ""
    )


def _fit(task: Task, values: dict[str, str], machine: Machine) -> tuple[str, str]:
    """Leave out sizes that are predicted not to fit the GPU; return the scale, and a sentence on it.

    A size fits if its smallest cell fits; --skip-oom leaves out the cells that do not.
    """
    wanted = values["size"].split()
    words = task.commands(values, "out")[0]
    if not _is_predicted(words):
        return "full", "at the handout's size, whose memory is not predicted"
    needed = {name: _least_bytes(name, words) for name in wanted}
    memory = machine.memory_bytes or 0
    fitting = [name for name in wanted if needed[name] <= memory]
    if fitting == wanted:
        return "full", f"at the handout's size, which fits {machine} by prediction"
    if not fitting:
        fitting = [next((name for name in SMALLER if _least_bytes(name, words) <= memory), SMALLER[-1])]
    _put(values, ("size", "cold"), ("largest",), fitting)
    over = ", ".join(f"{name} needs {human(needed[name], 'bytes')}" for name in wanted if name not in fitting)
    return "fitting", f"at size {' '.join(fitting)}, which fits {machine} by prediction; {over}"


def _least_bytes(size: str, words: Sequence[str]) -> int:
    """Return the predicted memory of the smallest cell of a size in a command."""
    from cs_systems.formulas.memory.fit import needed_bytes

    cells = [
        RunConfig(
            model=preset(size, context_length=int(context)),
            batch_size=int(batch),  # --global-batch-size gives the whole batch, and a rank's share is smaller
            mode=Mode(mode),
            precision=Precision(precision),
            attention=attention,
            checkpoint=checkpoint,
            device="cuda",
        )
        for context in _values(words, "--context-length", "512")
        for batch in _values(words, "--batch-size", "4")
        for mode in _values(words, "--mode", "train-step")
        for precision in _values(words, "--precision", "fp32")
        for attention in _values(words, "--attention", "naive")
        for checkpoint in _values(words, "--checkpoint", "none")
    ]
    return min(map(needed_bytes, cells))


def _values(words: Sequence[str], option: str, *default: str) -> list[str]:
    """Return the values of an option in a command."""
    if option not in words:
        return [*default]
    return [*takewhile(lambda word: not word.startswith("--"), words[words.index(option) + 1 :])]


def _is_predicted(words: Sequence[str]) -> bool:
    """Return whether the memory of a command's cells has a formula, which compiled models and fused parts lack."""
    return {*_values(words, "--compile", "none"), *_values(words, "--parts")} == {"none"}


def _has_nsys() -> bool:
    from cs_systems.measure.profilers import _nsys

    return _nsys.check()["state"] == "ok"


class _Tee(io.TextIOBase):
    """Standard output that is also written, without colours, into a file."""

    def __init__(self, shown: Any, file: Any) -> None:
        self._shown, self._file = shown, file

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._shown.encoding)

    def write(self, text: str) -> int:
        self._file.write(_COLOURS.sub("", text))
        self._shown.write(text)
        return len(text)

    def flush(self) -> None:
        self._file.flush()
        self._shown.flush()

    def isatty(self) -> bool:
        return bool(self._shown.isatty())

    def fileno(self) -> int:
        return int(self._shown.fileno())


def carried_out(plan: Plan, deadline: float | None = None) -> int:
    """Run the commands of a plan in order, even after one fails; return the highest exit status.

    The folder keeps what they printed, and the state of the task. The steps that the task `shows` are printed too.

    deadline: reading of time.monotonic() after which no command that measures begins; reports of records do.
    """
    plan.out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    with (plan.out / f"{plan.task.name}.txt").open("w", encoding="utf-8") as file:
        for made, rows in _by_formula(plan.task):
            file.write(table_text(made, rows))
            print_table(made, rows)
        for number, words in enumerate(plan.commands, 1):
            began, line = time.monotonic(), visible(command_line("cs-systems", *words))
            print(f"$ {line}", file=file)
            if deadline is not None and began > deadline and words[0] in MEASURING:
                done.append({"command": words, "status": None, "seconds": 0.0})
                continue
            print(f"    {line}", flush=True)
            is_shown = number in plan.task.shows and not is_wanted()
            with redirect_stdout(_Tee(sys.stdout, file) if is_shown else file):
                status = _status(words)
            done.append({"command": words, "status": status, "seconds": round(time.monotonic() - began, 1)})
            _write_state(plan, done)
            if status == EXIT_INTERRUPTED:
                return status
    _write_state(plan, done)
    return max((step["status"] or 0 for step in done), default=0)


def _by_formula(task: Task) -> Iterator[tuple[Table[Any], Sequence[Any]]]:
    """Yield the tables of a task that formulas fill, each with its rows."""
    from cs_systems.formulas.scaling import layer_limits, ring_times

    if task.limits:
        yield layer_limits, layer_limits(task.limits)
    if task.ring:
        yield ring_times, ring_times(task.ring)


def _status(words: list[str]) -> int:
    """Return the exit status of a command that runs in this process; 1 if it raises an error."""
    from cs_systems.cli import main

    try:
        return main(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:
        traceback.print_exc()
        return 1


def command_rows(plan: Plan) -> list[CommandRow]:
    """Return the commands of a plan, with what the folder says of those that have run."""
    ran = dict[tuple[str, ...], Any]()
    with suppress(OSError, ValueError, KeyError, TypeError):
        steps = json.loads(state_file(plan.task, plan.out).read_text(encoding="utf-8"))["steps"]
        ran = {_measured_by(step["command"]): step for step in steps}
    return [
        {
            "task": plan.task.name,
            "command": command_line("cs-systems", *words),
            "status": step.get("status"),
            "took_s": step.get("seconds"),
        }
        for words in plan.commands
        for step in [ran.get(_measured_by(words), {})]
    ]


def _measured_by(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command except the options that choose what to repeat, leave out or print."""
    return tuple(word for word in words if word not in ("--fresh", "--skip-oom", "--all"))


def state_file(task: Task, out: Path) -> Path:
    return out / f"{task.name}.json"  # several tasks may share the folder


def _write_state(plan: Plan, done: Sequence[dict[str, Any]]) -> None:
    state = {"scale": plan.scale, "machine": str(plan.machine), "planned": len(plan.commands), "steps": list(done)}
    state_file(plan.task, plan.out).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def state(task: Task, folder: Path) -> str:
    """Return the state of a task in a folder of results, in a few words."""
    file = state_file(task, folder / (task.folder or task.name))
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        ended = sum(step["status"] == 0 for step in found["steps"])
        where, scale, planned = f"on {found['machine']}", found["scale"], found["planned"]
    except FileNotFoundError:
        return "not begun"
    except (OSError, ValueError, KeyError, TypeError):
        return f"unknown: {file} is damaged; run the task again"
    if ended < planned:
        return f"{ended} of {planned} commands done {where}"
    words = {"full": "done at the handout's size", "fitting": "run at the sizes that fit", "own": "run at own sizes"}
    return f"{words.get(scale, f'run at {scale} size')}, {where}"


assert {*SMALLER} <= {*PRESETS}
