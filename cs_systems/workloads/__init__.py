"""What is measured. A workload is one new file that exports `WORKLOAD`, a factory `(RunConfig, Device) -> Workload`.

A workload holds no timing, printing or JSON: it says what a step consists of, and what that must cost by formula. A
factory may have `preflight(config, device) -> int | None`: it raises `Unavailable` for a cell that cannot run here,
without building it, and returns the bytes of device memory that the cell's peak should take. A workload whose kernels
are shorter than their launches may have `hides_launches = True`: see `timing`. One that is measured for the sake of one
of its phases may have `judged_phase`, its name: caveats are then of that one. One with a `model`, an `nn.Module`, has
its modules annotated under a profiler: see `instrument`. One that computes something to be looked at may have
`tables() -> dict[str, list[Row]]`: small plain tables that join its record's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cs_systems.formulas.cost import PhaseCost
    from cs_systems.record import Row


class Unavailable(Exception):
    """This machine or backend cannot run the cell; the message is the reason with its remedy."""


class Workload(Protocol):
    def prepare(self) -> None:
        """Untimed work before each step."""

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        """The parts of one step in the order in which they run; each is called once before the next is asked for."""

    def cost(self) -> Mapping[str, PhaseCost] | None:
        """Cost per phase by formula; None where nothing is declared."""

    def describe(self) -> Row:
        """What really runs (backend and its version, optimizer), and `tokens`, how many a step processes.

        Of a workload from outside the package, tables name those fields of the RunConfig that it says here, under their
        names (`attention`, `precision`, `batch_size`, …), and those that the records vary.
        """


class CallableWorkload:
    """Somebody's plain step function as a workload of one phase, `call`, with no declared cost.

    takes_config: whether what made the function was given the RunConfig; without it no field of it had an effect.
    """

    def __init__(self, function: Callable[[], Any], takes_config: bool = True) -> None:
        self.function, self.takes_config = function, takes_config

    def prepare(self) -> None:
        return

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        return (("call", self.function),)

    def cost(self) -> None:
        return None

    def describe(self) -> Row:
        return {"tokens": None, "takes_config": self.takes_config}
