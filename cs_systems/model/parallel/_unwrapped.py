"""State of a model under the names that it has without its wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def unwrapped_state(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the whole parameters and buffers by their names without the wrapper."""
    state: Mapping[str, Tensor] = getattr(model, "module", model).state_dict()
    return state
