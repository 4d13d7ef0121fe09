"""Dtypes observed in a step: parameters, inputs and outputs of modules, gradients, and the loss.

PyTorch's own global hooks observe every module call, so any step can be observed without access to its model. Tensors
that cross no module boundary (inside a functional attention, for example) are not seen, nor are modules inside code
that torch.compile generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from cs_systems.formulas.rounding import AutocastContext, ModuleDtypes
from cs_systems.instrument.parameters import own_parameters

DEVICES = ("cpu", "cuda")
PARTS = ("parameters", "inputs", "outputs", "output_gradients", "parameter_gradients")


class DtypeReadings:
    """Dtypes of one step, by module.

    `rows`: one per module in the order of the first calls, dtypes as sorted lists of names. `loss`: dtypes of the
    tensors that backward was called on (after a gradient scaler's multiplication, if there is one). `contexts`: the
    autocast contexts that were entered.
    """

    def __init__(self) -> None:
        self.loss: list[str] = []
        self.contexts: list[AutocastContext] = []
        self._rows: dict[int, dict[str, Any]] = {}
        self._modules: list[nn.Module] = []  # keeps modules alive, so that a new module never gets the id of a dead one
        self._names: dict[int, str] = {}
        self._depth = 0
        self._handles: list[Any] = []

    @property
    def rows(self) -> list[ModuleDtypes]:
        return [
            cast(ModuleDtypes, {name: sorted(v) if isinstance(v, set) else v for name, v in row.items()})
            for row in self._rows.values()
        ]

    def read_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record a module before it runs: its position in the order, and the autocast context of the call."""
        if self._depth == 0 and id(module) not in self._names:
            self._read_root(module)
        self._depth += 1
        if (row := self._rows.get(id(module))) is None:
            row = self._rows[id(module)] = self._new_row(module)
        row["calls"] += 1
        row["autocast"].update(_autocast() or ["off"])

    def read_result(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._depth -= 1
        if (row := self._rows.get(id(module))) is None:  # the call began before the reading
            return
        if not row["parameters"]:
            self._read_parameters(module, row)
        for part, values in (("inputs", (args, kwargs)), ("outputs", output)):
            for tensor in _tensors(values):
                row[part].add(_name(tensor))
                row["devices"].add(tensor.device.type)
                if part == "outputs" and tensor.requires_grad:
                    self._handles.append(tensor.register_hook(_adder(row["output_gradients"])))

    def read_loss(self, tensors: Any) -> None:
        self.loss = sorted({*self.loss, *map(_name, _tensors(tensors))})

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._modules = [], []

    def _new_row(self, module: nn.Module) -> dict[str, Any]:
        self._modules.append(module)
        return {
            "module": self._names.get(id(module), type(module).__name__),
            "type": type(module).__name__,
            "leaf": next(module.children(), None) is None,
            "root": self._depth == 1,
            "calls": 0,
            **{part: set() for part in PARTS},
            "autocast": set(),
            "devices": set(),
        }

    def _read_parameters(self, module: nn.Module, row: dict[str, Any]) -> None:
        """Read the parameters of a module after it has run, because a lazy module has none before."""
        for parameter in own_parameters(module):
            row["parameters"].add(_name(parameter))
            row["devices"].add(parameter.device.type)
            if parameter.requires_grad and parameter.is_leaf:
                add = _adder(row["parameter_gradients"])
                self._handles.append(parameter.register_post_accumulate_grad_hook(lambda p, add=add: add(p.grad)))

    def _read_root(self, root: nn.Module) -> None:
        """Name a module that no other module called, and all modules inside it.

        Names in a second such module begin with its type.
        """
        prefix = f"{type(root).__name__}." if self._names else ""
        for path, module in root.named_modules():
            self._names.setdefault(id(module), prefix + path if path else type(root).__name__)


@contextmanager
def reading(readings: DtypeReadings) -> Iterator[None]:
    """Read every module call, every backward and every autocast context inside."""
    enter, backward = torch.autocast.__enter__, torch.autograd.backward

    def recording_enter(self: Any) -> Any:
        context: AutocastContext = {
            "device": self.device,
            "dtype": _short(self.fast_dtype),
            "enabled": bool(self._enabled),
        }
        if context not in readings.contexts:
            readings.contexts.append(context)
        return enter(self)

    def recording_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        readings.read_loss(tensors)
        return backward(tensors, *args, **kwargs)

    with ExitStack() as undo:
        undo.callback(readings.close)
        undo.callback(hooks.register_module_forward_pre_hook(readings.read_call).remove)
        result = hooks.register_module_forward_hook(readings.read_result, with_kwargs=True)
        undo.callback(result.remove)
        # the handle leaves this entry, and torch.compile would then warn about global module hooks
        undo.callback(hooks._global_forward_hooks_with_kwargs.pop, result.id, None)
        undo.callback(setattr, torch.autograd, "backward", backward)
        undo.callback(setattr, torch.autocast, "__enter__", enter)
        torch.autograd.backward = recording_backward
        torch.autocast.__enter__ = recording_enter  # type: ignore[method-assign]
        yield


def _autocast() -> list[str]:
    """Return an entry such as `cpu bfloat16` for each device with autocast on at the moment."""
    return [f"{d} {_short(torch.get_autocast_dtype(d))}" for d in DEVICES if torch.is_autocast_enabled(d)]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _name(tensor: Tensor) -> str:
    return _short(tensor.dtype)


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _adder(found: set[str]) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        found.add(_name(gradient))

    return add
