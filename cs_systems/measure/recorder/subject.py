"""Description of a recorded loop: its models and optimizers as they are known now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.config import RunConfig
from cs_systems.core.fields import LOOP
from cs_systems.machine.device import Device
from cs_systems.record import Row


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters that optimizers hold."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def module_with(names: Sequence[str]) -> str:
    """Return the innermost module with all of these parameters, by their names."""
    parts = [name.split(".")[:-1] for name in names]
    first = parts[0]
    same = next((i for i, part in enumerate(first) if any(each[i : i + 1] != [part] for each in parts)), len(first))
    return ".".join(first[: max(1, same)])


@dataclass
class Subject:
    """Description of the measured loop.

    Attributes:
        models, optimizers: those known so far; an unedited script reveals them only while it runs.
    """

    name: str
    device: Device
    models: list[nn.Module]
    optimizers: list[Optimizer]
    tokens: int | None
    world_size: int

    def config(self, *, warmup: int, steps: int, profiler: str = "none") -> RunConfig:
        return RunConfig(
            workload=f"{LOOP}{self.name}",
            device=self.device.torch.type,
            warmup=warmup,
            steps=steps,
            world_size=self.world_size,
            profiler=profiler,
        )

    def ran(self) -> Row:
        """Return the known properties of the loop: classes, parameters, precision, and tokens per step."""
        parameters = {p for model in self.models for p in model.parameters()}
        optimizers = [type(o).__name__ for o in self.optimizers]
        return {
            "models": " + ".join(type(model).__name__ for model in self.models) or None,
            "parameters": sum(p.numel() for p in parameters) if parameters else None,
            **({"optimizer": " + ".join(optimizers)} if optimizers else {}),
            "tokens": self.tokens,
        }

    def parameters(self) -> set[int]:
        """Return the identities of the parameters that the models and the optimizers hold."""
        of_models = {id(p) for model in self.models for p in model.parameters()}
        return of_models | {id(p) for p in parameters_of(*self.optimizers)}

    def name_of(self, parameter: Tensor) -> str | None:
        """Return a parameter's name in the first model that has it, such as `Net.head.weight`; None for others."""
        return next((name for name, each in self._named() if each is parameter), None)

    def names(self) -> dict[int, str]:
        """Return the same names of all parameters of the models, by the parameter's `id`."""
        return {id(parameter): name for name, parameter in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for model in self.models:
            for name, parameter in model.named_parameters():
                yield f"{type(model).__name__}.{name}", parameter

    def forget(self) -> None:
        """Forget the program's objects, because the program may delete them from now on."""
        self.models, self.optimizers = [], []
