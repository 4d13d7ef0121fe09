"""Fake tensors that keep a batch's integer and boolean values, and values computed only from these.

Code reads such values to choose how it runs: whether a mask hides anything, how many nodes the edges of a graph name.
Activations have no values, so what depends on parameters cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

RANDOM_CAVEAT = (
    "the model draws single random numbers, as layer drop does; every layer is predicted as kept, and the peak may be "
    "lower"
)
_MOST = 2**22  # largest number of elements with kept values
_CREATORS = {
    "arange", "eye", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "rand", "randint",
    "randint_like", "randperm", "tril_indices", "triu_indices", "zeros", "zeros_like",
}  # fmt: skip


class ValuedFakeMode(FakeTensorMode):
    """Mode that makes fake tensors, with values if these follow from the batch alone.

    `draws`: whether a single random number was drawn.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.draws = False

    def may_turn_const(self, t: Tensor) -> bool:
        is_small = t.numel() <= 1 or (not t.is_floating_point() and t.numel() <= _MOST)
        return is_small and t.layout is torch.strided and not self.is_our_fake(t) and t.device.type == "cpu"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if not name.startswith("lift"):  # torch.tensor calls these with a real tensor
            args, kwargs = tree_map_only(Tensor, self._known, (tuple(args), kwargs))
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if name not in _CREATORS or not isinstance(made, FakeTensor) or made.constant is not None:
            return made
        if made.numel() > (1 if made.is_floating_point() else _MOST) or made.device.type != "cpu":
            return made
        with _disable_current_modes():
            real = func(*tree_map_only(FakeTensor, _blank, args), **tree_map_only(FakeTensor, _blank, kwargs))
            if name == "rand":
                self.draws = True
                real.fill_(1.0)
        return self._with_values(made, real)

    def from_batch(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor for a real one, with a copy of its values if they are kept."""
        fake = self.from_tensor(tensor)
        if fake.constant is None and self.may_turn_const(tensor):
            with _disable_current_modes():
                self._with_values(fake, tensor.detach().clone())
        return fake

    def _known(self, tensor: Tensor) -> Tensor:
        return self.from_batch(tensor) if type(tensor) is Tensor and self.may_turn_const(tensor) else tensor

    def _with_values(self, fake: FakeTensor, real: Tensor) -> FakeTensor:
        fake.constant = real
        self.fake_tensor_converter.add_constant_storage_mapping(fake)
        self.fake_tensor_converter.set_tensor_memo(real, fake)
        return fake


def _blank(fake: FakeTensor) -> Tensor:
    """Return a tensor of the same size and dtype, for a function that reads only size and dtype."""
    return torch.empty(fake.shape, dtype=fake.dtype)


@contextmanager
def masks_are_read() -> Iterator[None]:
    """Let transformers drop a mask with known values that hides nothing, as it does for a real mask."""
    if (module := sys.modules.get("transformers.utils.import_utils")) is None or not hasattr(module, "is_fake_tensor"):
        yield
        return
    with patch.object(module, "is_fake_tensor", lambda x: isinstance(x, FakeTensor) and x.constant is None):
        yield
