"""Helper for torch.compile of functions that are measured at many shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# torch stops compiling a function after 8 compilations: it raises with fullgraph, else silently runs eagerly. A sweep
# has more shapes than that.
_SHAPES = 512


def compile_each_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call with each new shape, for exactly that shape.

    It becomes one graph, or compilation fails.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _SHAPES)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _SHAPES)
        return torch.compile(function, dynamic=False, fullgraph=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        # If the caller is being compiled, it inlines the function and fuses it with its own code.
        return function(*args, **kwargs) if torch.compiler.is_compiling() else compiled()(*args, **kwargs)

    return call
