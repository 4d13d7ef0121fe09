"""Time forward, backward and optimizer of transformer language models, for every combination of the values given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from cs_systems.cli._document import MoreColumns, PrintedFormat
from cs_systems.cli._options import Experiments, ModelCells, Steps, Sweep, Workloads, flag, of_each


@dataclass(frozen=True)
class Time:
    cells: ModelCells = field(default_factory=ModelCells)
    steps: Steps = field(default_factory=Steps)
    sweep: Sweep = field(default_factory=Sweep)
    step: Workloads = field(default_factory=Workloads)
    experiments: Experiments = field(default_factory=Experiments)
    warmup_study: Annotated[bool, flag("print every step, warm-up included, with the causes of slow ones")] = False
    columns: MoreColumns = ()
    format: PrintedFormat = "terminal"


ARGS = Time


def run(args: Time) -> int:
    from cs_systems.cli._sweep import print_warmup, run_and_report

    configs = of_each(args.steps, lambda steps: args.cells.configs(steps.base(), args.step))
    show = print_warmup if args.warmup_study else None
    limit_s = args.experiments.limit_s(configs)
    return run_and_report(
        configs, args.sweep, "time", args.steps.seed, show, experiments_s=limit_s, columns=args.columns
    )
