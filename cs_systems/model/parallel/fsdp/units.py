"""Units of a model, each a set of parameters that are gathered at once, and the uses of units in a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cs_systems.instrument.structure import blocks, named_modules
from cs_systems.model.parallel.fsdp.flat import FlatShard, Reduction
from cs_systems.model.parallel.fsdp.norms import casts

Places = list[tuple[nn.Module, str, nn.Parameter]]  # (module, the parameter's name in it, parameter)


class Unit:
    """Sharded parameters of one module. places: the modules and names under which the model has them.

    dtype: dtype of the weights in modules that cast; see `norms.casts`.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Places,
        dtype: torch.dtype | None,
        group: ProcessGroup | None,
        stream: Any,
    ) -> None:
        self.module = module
        self.cast = {p for m, _, p in places if dtype and p.is_floating_point() and casts(m)}
        alike: dict[Any, list[nn.Parameter]] = {}
        for p in dict.fromkeys(p for _, _, p in places):
            alike.setdefault((not p.requires_grad, p.device, p.dtype, p in self.cast), []).append(p)
        self.flats = [
            FlatShard(params, dtype if params[0] in self.cast else None, group, stream) for params in alike.values()
        ]
        self.flats.sort(key=lambda flat: not flat.trained)
        self.trained = [flat for flat in self.flats if flat.trained]
        number = {p: i for i, p in enumerate(p for flat in self.flats for p in flat.params)}
        self._places = [(module, name, number[p]) for module, name, p in places]
        self._recurrent = [m for m in dict.fromkeys(m for m, _, _ in places) if isinstance(m, nn.RNNBase)]
        # If a checkpoint replaces the module's forward, this runs again in backward without the module's hooks.
        self.recomputes = "forward" in module.__dict__
        self.call: Call | None = None  # last call
        self.is_attached = False
        self.needed_by: set[Call] = set()  # calls in backward that need it
        self.kept = False  # stays whole from forward to the end of backward

    def modules_of(self, types: tuple[type, ...]) -> set[nn.Module]:
        return {module for module, _, _ in self._places if isinstance(module, types)}

    def start(self) -> None:
        for flat in self.flats:
            flat.start()

    def wait(self) -> None:
        for flat in self.flats:
            flat.wait()

    def expire(self) -> None:
        for flat in self.flats:
            flat.expire()

    def free(self) -> None:
        self.kept = False
        self.detach()
        for flat in self.flats:
            flat.free()

    def gathered_bytes(self) -> int:
        return sum(flat.gathered_bytes() for flat in self.flats)

    def attach(self, trained: Sequence[Tensor]) -> None:
        """Set the weights as attributes of the modules, which take precedence over parameters.

        `parameters()` still gives the parts.
        """
        weights = [*trained, *(w for flat in self.flats[len(self.trained) :] for w in flat.weights)]
        for module, name, number in self._places:
            module.__dict__[name] = weights[number]
        self._list_recurrent_weights()
        self.is_attached = True

    def detach(self) -> None:
        if self.is_attached:
            for module, name, _ in self._places:
                del module.__dict__[name]
            self._list_recurrent_weights()
        self.is_attached = False

    def attach_again(self) -> None:
        """Attach the weights for the recomputation of a checkpoint; the first computation provides their gradients."""
        self.attach([w.detach().requires_grad_() for flat in self.trained for w in flat.weights])

    def _list_recurrent_weights(self) -> None:
        """Update the lists of weights that LSTM, GRU and RNN of torch keep in addition to their attributes."""
        for m in self._recurrent:
            m._flat_weights = [getattr(m, name) for name in m._flat_weights_names]

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Reduction]:
        """Start averaging the gradients of the trained weights, given in the order of the weights."""
        rest = list(grads)
        reductions = []
        for flat in self.trained:
            mine, rest = rest[: len(flat.params)], rest[len(flat.params) :]
            reductions.append(flat.reduce(mine))
        return reductions


@dataclass(eq=False)
class Call:
    """Call of a unit in a forward.

    `calls` are all calls in that forward in order, and `index` is this call's position.
    """

    unit: Unit
    calls: list[Call] = field(repr=False)
    index: int


def divide(module: nn.Module, shard_types: tuple[type, ...]) -> dict[nn.Module, Places]:
    """Return a map from the module of each unit to the places of the parameters that it gathers.

    The root unit comes first.

    All parameters of modules in `shard_types` are sharded, even if other modules share them, except parameters without
    dimensions, which cannot be divided.
    """
    theirs = (p for m in module.modules() if isinstance(m, shard_types) for p in m.parameters(recurse=False))
    sharded = {p for p in theirs if p.ndim}
    unit_of = dict.fromkeys(module.modules(), module)
    for child in units_in(module):
        for m in child.modules():
            unit_of[m] = child if unit_of[m] in (module, child) else module
    places = [(m, name, p) for m in module.modules() for name, p in m.named_parameters(recurse=False) if p in sharded]
    homes: dict[nn.Parameter, set[nn.Module]] = {}
    for m, _, p in places:
        homes.setdefault(p, set()).add(unit_of[m])
    units: dict[nn.Module, Places] = {module: []}
    for place in places:
        home, *others = homes[place[2]]
        units.setdefault(module if others else home, []).append(place)
    return units


def units_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: the children of lists, and the blocks found by structure.

    A child that holds several blocks is a stage; its blocks are the units.
    """
    named = named_modules(module)
    repeated = [named[block.path] for block in blocks(module)]
    in_lists: list[nn.Module] = []
    for child in dict.fromkeys(listed(module)):
        inside = {*child.modules()} - {child}
        stage = [block for block in repeated if block in inside]
        in_lists += stage if len(stage) > 1 else [child]
    known = {m for child in in_lists for m in child.modules()}
    return in_lists + [block for block in repeated if known.isdisjoint(block.modules())]


def listed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists, which run as a whole.

    A list of lists yields the children of the inner lists only.
    """
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from listed(child)
