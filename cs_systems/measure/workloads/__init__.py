"""Workloads that a sweep can measure.

A workload is one new file that exports `WORKLOAD`, a factory `(RunConfig, Device) -> Workload`. It holds no timing,
printing or JSON: it defines the phases of a step and their cost by formula.

Optional attributes of a factory or workload:

- `preflight(config, device) -> int | None`, of the factory: raises `Unavailable` for a cell that cannot run here,
without building it, and returns the predicted peak of device memory in bytes.
- `hides_launches = True`: the kernels are shorter than their launches; see `timing`.
- `judged_phase`: the name of the one phase that caveats are computed for.
- `model`, an `nn.Module`: its modules are annotated under a profiler; see `instrument`.
- `tables() -> Mapping[str, Sequence[Row]]`: small plain tables that join the results of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cs_systems.core.tables import Row
    from cs_systems.formulas.cost import PhaseCost
    from cs_systems.record import Ran


class Unavailable(Exception):
    """Error for a cell that this machine or backend cannot run; the message holds the reason and the remedy."""


class Workload(Protocol):
    """Interface of a workload: the phases of a step, their cost by formula, and a description for the record."""

    def prepare(self) -> None:
        """Do the untimed work before each step."""

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        """Yield (name, function) per phase of a step in order; each is called once before the next is requested."""

    def cost(self) -> Mapping[str, PhaseCost] | None:
        """Return the cost of each phase by formula, or None where no cost is declared."""

    def describe(self) -> Row:
        """Return what really runs (backend with version, optimizer) and `tokens`, the number of tokens in a step.

        For a workload from outside the package, tables name the RunConfig fields that it returns here under their own
        names (`attention`, `precision`, `batch_size`, …), and the fields that vary between the records.
        """


class CallableWorkload:
    """Workload around a user's plain step function: one phase, `call`, with no declared cost.

    takes_config: the factory of the function received the RunConfig; without it no field of the config had an effect.
    """

    def __init__(self, function: Callable[[], Any], takes_config: bool = True) -> None:
        self.function, self.takes_config = function, takes_config

    def prepare(self) -> None:
        return

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        return (("call", self.function),)

    def cost(self) -> None:
        return None

    def describe(self) -> Ran:
        return {"tokens": None, "takes_config": self.takes_config}
