"""Backends of flash_triton with one square tile for its three kernels, and the resources that they use.

Backends, as in `--attention scripts/_tiles.py:tile_64`: Triton's default of 3 stages, and 4 warps, for 128 × 128 twice
that. Before anything is launched its kernels are compiled, and a call with a block that needs more than the GPU has is
refused with the two numbers.

Workloads, as in `--workload scripts/_tiles.py:sm_86`: those kernels for the call of the config, compiled for that
architecture, which takes no GPU. Table `resources`: a kernel's shared memory, registers, and spilling instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from cs_systems.config import AttentionShape, RunConfig
from cs_systems.core import plugins
from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.machine.device import Device
from cs_systems.measure.workloads._calls import COMPUTE_DTYPES
from cs_systems.model.attention import AttentionBackend, AttentionCall, flash_triton
from cs_systems.model.kernels.compile import SHARED_LIMIT_BYTES, KernelResources, compile_for
from cs_systems.model.kernels.triton.configs import Tile, Tiles

STAGES = 3
SIZES = (16, 32, 64, 128)
ARCHITECTURES = (80, 86, 90)
FORWARD, BACKWARD = ("forward",), ("forward", "dq", "dkdv")


def tile_of(size: int) -> Tile:
    return Tile(size, size, 8 if size == 128 else 4, STAGES)


@cache
def resources(capability: int, tile: Tile, dtype: str, d_head: int, causal: bool, kernel: str) -> KernelResources:
    """Return a kernel's resources for one head of queries and one of keys, with lengths divisible by 16."""
    from cs_systems.model.kernels.triton.launch import Problem  # needs triton

    shape = (1, 1, 2048, d_head)
    q, k, v, o, do, dq, dk, dv = (torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for _ in range(8))
    lse, lse_log2, delta = (torch.empty(shape[:3], device="meta") for _ in range(3))
    problem = Problem(q, k, v, causal, 0, d_head**-0.5, Tiles(tile, tile, tile))
    launch = {
        "forward": lambda: problem.forward(o, lse),
        "dq": lambda: problem.dq(o, lse, do, lse_log2, delta, dq),
        "dkdv": lambda: problem.dkdv(do, lse_log2, delta, dk, dv),
    }[kernel]()
    return compile_for(capability, launch.kernel, launch.arguments, launch.options)


def too_large(capability: int, size: int, call: AttentionCall) -> str | None:
    """Return the reason why a block of the call's kernels does not fit a multiprocessor, with the remedy, or None.

    None also if the architecture's limit is unknown.
    """
    limit = SHARED_LIMIT_BYTES.get(capability)
    for kernel in (BACKWARD if call.needs_backward else FORWARD) if limit else ():
        needs = resources(capability, tile_of(size), call.dtype, call.d_head, call.causal, kernel).shared_bytes
        if needs > limit:
            return (
                f"the {kernel} kernel's block needs {needs:,} B of shared memory, and sm_{capability} gives a block "
                f"{limit:,} B: use a smaller tile, or fewer stages than {STAGES}"
            )
    return None


def _unavailable(call: AttentionCall, *, size: int) -> str | None:
    if reason := flash_triton.unavailable(call):
        return reason
    if call.device != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability()
    return too_large(10 * major + minor, size, call)


def _algorithm(call: AttentionCall, *, size: int) -> AttentionAlgorithm:
    return replace(flash_triton.algorithm(call), block_q=size, block_k=size)


def _backend(size: int) -> AttentionBackend:
    tile = tile_of(size)
    return AttentionBackend(
        partial(flash_triton.attention, tiles=Tiles(tile, tile, tile)),
        unavailable=partial(_unavailable, size=size),
        algorithm=partial(_algorithm, size=size),
        describe=flash_triton.describe,
    )


class Limits:
    """Workload with a step that compiles the kernels of one of these backends for an architecture."""

    def __init__(self, capability: int, config: RunConfig) -> None:
        self.capability, self.config, self._rows = capability, config, list[dict[str, Any]]()
        backend = plugins.get("attention", config.attention)
        self.tile: Tile = backend.function.keywords["tiles"].forward

    def prepare(self) -> None:
        self._rows.clear()

    def step(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for kernel in BACKWARD:
            yield f"compile_{kernel}", partial(self._compile, kernel)

    def _compile(self, kernel: str) -> None:
        shape, precision = self.config.shape or AttentionShape(), self.config.precision
        dtype = COMPUTE_DTYPES[precision]
        found = resources(self.capability, self.tile, dtype, shape.d_head, shape.causal, kernel)
        limit = SHARED_LIMIT_BYTES[self.capability]
        self._rows.append(
            {
                "architecture": f"sm_{self.capability}",
                "precision": precision.value,
                "d_head": shape.d_head,
                "tile": self.tile.block_m,
                "kernel": kernel,
                "registers": found.registers,
                "threads": 32 * found.num_warps,
                "spills": found.spills,
                "shared_bytes": found.shared_bytes,
                "limit_bytes": limit,
                "fits": found.shared_bytes <= limit,
            }
        )

    def cost(self) -> None:
        return None

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        return {"resources": self._rows}

    def describe(self) -> dict[str, Any]:
        shape = self.config.shape or AttentionShape()
        named = {"attention": self.config.attention, "precision": self.config.precision.value, "d_head": shape.d_head}
        return {"tokens": None, **named}


def _limits(capability: int) -> Callable[[RunConfig, Device], Limits]:
    return lambda config, device: Limits(capability, config)


globals().update({f"tile_{size}": _backend(size) for size in SIZES})
globals().update({f"sm_{capability}": _limits(capability) for capability in ARCHITECTURES})
