"""Bench for cells: each process of a cell is a record in the folder of the search, and none is measured twice.

The cells that check the numbers run in the process of the trial, after it; nothing of theirs is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cs_systems.advise import numerics
from cs_systems.advise.budget import Budgeted
from cs_systems.advise.lever import Cell
from cs_systems.advise.numerics import Check
from cs_systems.config import ConfigError, Mode, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.measure.runtime.allowance import Allowance, refusal
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.supervisor import Supervisor
from cs_systems.measure.runtime.sweep import check, same_origin
from cs_systems.record import DONE, Environment, RunRecord

SEEDS = 3  # number of runs of the start; the spread of their loss curves is how much a lever may change the losses
EXPERIMENTS_S = 10.0  # time in s for the experiments of each cell


def machine(device: str) -> Environment:
    """Return the environment that a worker finds on this machine."""
    with Supervisor() as supervisor:
        return supervisor.environment(device)


@dataclass
class CellBench(Budgeted):
    """Bench that measures cells, each time in new processes.

    Attributes:
        journal: the folder of the records.
        start: the cell with the reference losses and errors.
        keep: how exactly the numbers must stay the same, "training" or "strict".
        train_steps: number of steps of each loss curve.
        budget_s: the time for the whole search.
        clock: returns seconds; for tests.
    """

    journal: Journal
    start: RunConfig
    keep: str = "training"
    train_steps: int = 40
    budget_s: float = 900.0
    clock: Callable[[], float] = time.monotonic
    _known: dict[tuple[str, int], RunRecord] = field(default_factory=dict)
    _supervisor: Supervisor | None = None  # of the latest process

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the folder, for the time of the search, and end the latest process after it."""
        with self.journal.locked():
            try:
                yield
            finally:
                self._end()

    def _end(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None

    def resume(self, now: Environment) -> None:
        """Read the records of an earlier search. Raises ConfigError if they are from another machine than `now`."""
        for record in self.journal.read()[0]:
            if record.environment is not None:
                same_origin(record.environment, now, self.journal)
            if record.status in DONE:
                self._known[record.run_config.key(), record.repeat] = record

    @property
    def recorded(self) -> int:
        """Number of processes that the folder holds."""
        return len(self._known)

    def measure(self, cell: Cell, number: int) -> RunRecord:
        assert isinstance(cell, RunConfig)
        self._end()
        return self._together([cell], number)[0]

    def _together(self, configs: Sequence[RunConfig], number: int = 0) -> list[RunRecord]:
        """Return the records of cells; measure those without a record together, in the latest process."""
        missing = [one for one in configs if (one.key(), number) not in self._known]
        if not missing:
            self.knows()
        else:
            began_s = self.clock()
            for record in self._measured(missing, number):
                self._known[record.run_config.key(), number] = record
            if all(self._known[one.key(), number].status != "timeout" for one in missing):
                self.took(self.clock() - began_s)
        return [self._known[one.key(), number] for one in configs]

    def _measured(self, configs: Sequence[RunConfig], number: int) -> Iterator[RunRecord]:
        try:
            cells = check(configs)
        except ConfigError as error:
            yield from (RunRecord("", one.to_dict(), "unavailable", number, str(error)) for one in configs)
            return
        has_experiments = number == 0 and all(refusal(cell) is None for cell in cells)
        if self._supervisor is None:
            allowed = Allowance(EXPERIMENTS_S if has_experiments else 0.0)
            self._supervisor = Supervisor(self.journal, self.timeout_s(), allowed)
        for record in self._supervisor.measure(cells, number, False, True, lambda *_: None):
            yield self.journal.append(record)

    def check(self, cell: Cell) -> Check:
        assert isinstance(cell, RunConfig)
        if self.keep == "strict":
            if cell.subject is not Subject.STEP:
                return Check(False, "not checked: the gradients of your own workload are unknown", False)
            judged, start = self._together([_errors(cell), _errors(self.start)])
            return numerics.strict(judged, start)
        seeds = [replace(self.start, seed=self.start.seed + n) for n in range(SEEDS)]
        *starts, judged = self._together([*map(self._trained, seeds), self._trained(cell)])
        return numerics.training([judged], starts)

    def _trained(self, config: RunConfig) -> RunConfig:
        """Return the cell for the training check: for the built-in model, one that keeps its losses."""
        if config.subject is not Subject.STEP:
            return config
        return replace(
            config, workload=Subject.CURVE, mode=Mode.TRAIN_STEP, steps=self.train_steps, steps_s=0.0, rounds=1
        )


def _errors(config: RunConfig) -> RunConfig:
    """Return the cell that compares one step with float64. It has no CUDA graph, because a graph changes no numbers."""
    return replace(
        config,
        workload=Subject.ERRORS,
        mode=Mode.FORWARD_BACKWARD,
        steps=1,
        steps_s=0.0,
        rounds=1,
        warmup=0,
        graph="none",
    )
