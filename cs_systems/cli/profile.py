"""Profile training steps: kernel time by phase, family and layer, and the time the GPU was idle.

Runs the same steps as `time` under nsys, ncu or torch.profiler. The trace excludes the warm-up, and is kept for the
profiler's own viewer.

Times under a profiler show shares and causes; to know how long a step takes, use `cs-systems time`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from cs_systems.cli._counters import counters_text
from cs_systems.cli._document import PrintedFormat, is_wanted
from cs_systems.cli._memory_text import say
from cs_systems.cli._options import (
    Experiments,
    MaybeText,
    ModelCells,
    Repeated,
    Steps,
    Sweep,
    Workloads,
    flag,
    given,
    one_name,
    optional,
    refuse,
)
from cs_systems.cli._tables import table_text
from cs_systems.config import ConfigError, describe
from cs_systems.core.printable import command_line, visible
from cs_systems.core.units import counted
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.timeline import OverheadRow

PRINTED = ("steps", "ratio", "phases", "families", "kernels", "operators", "parts", "attention", "gaps")
WITH = ("nsys", "kineto", "ncu")
OF_MODULES = ("tree", "blocks", "classes")
IN_DOCUMENT = ("overhead", *PRINTED, *OF_MODULES, "counters", "notes")
TOP = 10  # printed rows of kernels and operators


@dataclass(frozen=True)
class Profile:
    with_: Annotated[
        str,
        one_name("value of --with", WITH),
        arg(name="with", help="nsys; kineto (torch.profiler); ncu (hardware counters of kernels)"),
    ]
    cells: ModelCells = field(default_factory=ModelCells)
    steps: Steps = field(default_factory=lambda: Steps(steps=3))
    sweep: Sweep = field(default_factory=Sweep)
    step: Workloads = field(default_factory=Workloads)
    experiments: Experiments = field(default_factory=Experiments)
    show_command: Annotated[bool, flag("print the shell commands that profile the cells, and run nothing")] = False
    nsys_arg: Annotated[
        Repeated, optional("OPTION", "additional option of nsys profile: --nsys-arg=--gpu-metrics-device=0")
    ] = ()
    kernel: Annotated[MaybeText, optional("REGEX", "for ncu: only kernels whose function name matches")] = None
    range: Annotated[MaybeText, optional("NAME", "for ncu: only kernels inside this range: block 0/*/scores")] = None
    ncu_arg: Annotated[Repeated, optional("OPTION", "additional option of ncu: --ncu-arg=--launch-count=50")] = ()
    format: PrintedFormat = "terminal"


ARGS = Profile


def run(args: Profile) -> int:
    from cs_systems.cli._sweep import run_and_report
    from cs_systems.measure.runtime.sweep import profiler_commands

    options = _options(args)
    configs = [
        replace(config, profiler=args.with_, profiler_args=options)
        for config in args.cells.configs(args.steps.base(), args.step)
    ]
    if args.show_command:
        refuse(
            [n for n in (*given(args.sweep), *given(args.experiments)) if n not in ("out", "part")],
            "--show-command prints the commands and runs nothing",
        )
        folder = args.sweep.folder("profile").absolute()
        for command in profiler_commands(args.sweep.of_share(configs), folder):
            print(f"{command_line('mkdir', '-p', folder)} && {command_line(*command)}")
        return 0
    limit_s = args.experiments.limit_s(configs)
    show = None if is_wanted() else print_profile
    return run_and_report(configs, args.sweep, "profile", args.steps.seed, show, limit_s, IN_DOCUMENT)


def _options(args: Profile) -> tuple[str, ...]:
    """Return the profiler's options. Raises ConfigError for options that the profiler does not take."""
    given = {
        "--nsys-arg": ("nsys", args.nsys_arg),
        "--show-command": ("nsys ncu", args.show_command),
        "--kernel": ("ncu", args.kernel),
        "--range": ("ncu", args.range),
        "--ncu-arg": ("ncu", args.ncu_arg),
    }
    for option, (profilers, value) in given.items():
        if value not in (None, (), False) and args.with_ not in profilers.split():
            raise ConfigError(
                f"{option} requires --with {' or '.join(profilers.split())}, got --with "
                f"{args.with_}; leave out {option}"
            )
    if args.with_ != "ncu":
        return args.nsys_arg
    from cs_systems.measure.profilers.ncu import chosen

    return (*chosen(args.kernel, args.range), *args.ncu_arg)


def print_profile(record: RunRecord, folder: Path) -> None:
    """Print the tables of one record of that folder, each with its notes, and the path of the trace."""
    from cs_systems.analysis.attribution.timeline import DECLARED, NOTES, OVERHEAD

    results = record.results
    if "counters" in results:
        print(*counters_text(describe(record.run_config), results["counters"]), sep="\n")
        _print_artifacts(record, folder)
        return
    for row in OVERHEAD.of(results):
        say(overhead(record, row))
    if "coverage" not in results:  # a caveat of the record explains why
        print_of_host(record)
        _print_artifacts(record, folder)
        return
    noted = NOTES.of(results)
    print(*(visible(note["note"]) for note in noted if note["table"] is None), sep="\n")
    for name in PRINTED:
        rows = results.get(name, [])
        notes = [note["note"] for note in noted if note["table"] == name]
        if not rows and not notes:
            continue
        if name == "kernels" and rows[TOP:]:
            rest = sum(row["share"] for row in rows[TOP:])
            notes.append(f"{rest:.1%} of the time is in {counted(len(rows) - TOP, 'more kernel')}; the record has all")
        shown = rows[:TOP] if name in ("kernels", "operators") else rows
        print(table_text(DECLARED[name], shown, notes))
    for name in (n for n in OF_MODULES if results.get(n)):
        notes = [note["note"] for note in noted if note["table"] == name]
        print(table_text(DECLARED[name], results[name], notes))
    _print_artifacts(record, folder)


def print_of_host(record: RunRecord) -> None:
    """Print the host's ranges and operators if the record's trace has no kernels."""
    from cs_systems.analysis.attribution.timeline import DECLARED

    of_host = [n for n in ("ranges", "operators") if n in record.results and "coverage" not in record.results]
    if of_host and (steps := len(record.measurement.timed) if record.measurement else 0) > 1:
        print(f"The tables are means over all {steps} steps")
    for name in of_host:
        print(table_text(DECLARED[name], record.results[name][:TOP]))


def _print_artifacts(record: RunRecord, folder: Path) -> None:
    from cs_systems.analysis.attribution.tables import drawn_step, steps

    one = drawn_step(steps.of(record.results))
    for what, file in record.artifacts.items():
        print(visible(f"{what}: {folder / file}" + (f" ({one})" if one and what == "page" else "")))


def overhead(record: RunRecord, row: OverheadRow) -> str:
    """Return one line with the cell and its slowdown under the profiler."""
    from cs_systems.core.units import human

    cell, recorded = describe(record.run_config), human(row["recorded_s"], "s")
    before_s, ratio = row["not_recorded_s"], row["recorded_to_not_recorded"]
    if before_s is None or ratio is None:
        return f"{cell}: median step {recorded} while profiled; the overhead is unknown with fewer than 3 warm-up steps"
    return f"{cell}: median step {recorded} while profiled, {human(before_s, 's')} before: {ratio - 1:+.1%}"
