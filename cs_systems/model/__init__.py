"""Model that is measured by default: attention, kernels, parts of the training step, parallel strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cs_systems.model.transformer import BasicTransformerLM

__all__ = ["BasicTransformerLM"]


def __getattr__(name: str) -> Any:
    """Import the transformer, and with it torch, at the first access."""
    if name in __all__:
        from cs_systems.model import transformer

        return getattr(transformer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
