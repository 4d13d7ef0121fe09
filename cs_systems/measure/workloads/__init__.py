"""Workloads that a sweep can measure.

A workload is one new file that exports `WORKLOAD`, a factory `(Cell, Device) -> Workload`. It holds no timing, printing
or JSON: it defines the phases of a step and their cost by formula. A user's own factory gets the cell's `RunConfig`.

Optional attributes of a factory or workload:

- `preflight(cell, device) -> int | None`, of the factory: raises `Unavailable` for a cell that cannot run here, without
building it, and returns the predicted peak of device memory in bytes. A user's own gets the `RunConfig` here too.
- `hides_launches = True`: the kernels are shorter than their launches; see `timing`.
- `judged_phase`: the name of the one phase that caveats are computed for.
- `model`, an `nn.Module`: its modules are annotated under a profiler; see `instrument`.
- `tables() -> Mapping[str, Sequence[Row]]`: small plain tables that join the results of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from cs_systems.config import Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.core.fields import Subject
from cs_systems.formulas.rank_layout import options_of
from cs_systems.measure.profilers import Profiler
from cs_systems.measure.profilers import Unavailable as Unavailable
from cs_systems.model.parallel import ParallelStrategy, compose

if TYPE_CHECKING:
    from cs_systems.core.tables import Row
    from cs_systems.formulas.cost import PhaseCost
    from cs_systems.model.training.parts import Part
    from cs_systems.record import Ran


@dataclass(frozen=True)
class Cell:
    """Configuration of a cell with the plug-ins that it names.

    Each name is looked up once, when its plug-in is first needed. That raises ConfigError, or whatever the import of a
    user's code raises. The parent of the workers looks up only the profiler, which imports no torch.
    """

    config: RunConfig

    @property
    def is_own(self) -> bool:
        """Flag for a workload from outside the package."""
        return self.config.subject is Subject.OWN

    @cached_property
    def workload(self) -> Any:
        """Factory of the workload; for a workload from outside the package, any of its forms."""
        return plugins.get("workloads", self.config.workload)

    @cached_property
    def inputs(self) -> Any:
        """Batch of a user's own model, or a function that makes it."""
        assert self.config.inputs is not None
        return plugins.get("workloads", self.config.inputs)

    @cached_property
    def profiler(self) -> Profiler:
        profiler: Profiler = plugins.get("profilers", self.config.profiler)
        return profiler

    @cached_property
    def attention(self) -> Any:
        """AttentionBackend, or a user's own function with the same arguments."""
        from cs_systems.model.attention._own import as_backend  # needs torch, which the parent does not import

        name = self.config.attention
        made = plugins.get("attention", name)
        return as_backend(name, made) if plugins.is_foreign(name) else made

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Parts of the training step by name."""
        from cs_systems.model.training.parts import chosen  # imports torch

        return chosen(self.config.parts)

    @cached_property
    def strategy(self) -> ParallelStrategy:
        """Strategy with its options: the user's, and under autocast the compute dtype if it accepts one."""
        config, options = self.config, self.config.strategy_options
        if config.precision.is_autocast and "compute_dtype" in options_of(config.strategy):
            low = Precision.BF16 if config.precision is Precision.FP8 else config.precision  # fp8 is made from bf16
            options = {"compute_dtype": low.value} | options
        return compose(config.strategy, **options)


class Workload(Protocol):
    """Interface of a workload: the phases of a step, their cost by formula, and a description for the record."""

    def prepare(self) -> None:
        """Do the untimed work before each step: none, unless a workload says otherwise."""
        return

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        """Yield (name, function) per phase of a step in order; each is called once before the next is requested."""

    def cost(self) -> Mapping[str, PhaseCost] | None:
        """Return the cost of each phase by formula, or None if no cost is declared."""
        return None

    def describe(self) -> Row:
        """Return what really runs (backend with version, optimizer), and `tokens`, the number of tokens in a step.

        For a workload from outside the package, tables name the RunConfig fields that it returns here under their own
        names (`attention`, `precision`, `batch_size`, …), and the fields that vary between the records.
        """


class CallableWorkload(Workload):
    """Workload around a user's plain step function: one phase, `call`, with no declared cost.

    takes_config: the factory of the function received the RunConfig; without it no field of the config had an effect.
    """

    def __init__(self, function: Callable[[], Any], takes_config: bool = True) -> None:
        self.function, self.takes_config = function, takes_config

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        return (("call", self.function),)

    def describe(self) -> Ran:
        return {"tokens": None, "takes_config": self.takes_config}
