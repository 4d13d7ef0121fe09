# mypy: allow-untyped-defs, allow-incomplete-defs
"""Code shared by the Gluon kernels for Hopper: rings of barriers, addition by TMA."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER barriers, each of which completes a phase after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of a ring of buffers, and the parity of the phase of its barriers."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@builtin
def async_atomic_add(desc, coord, src, _semantic=None):
    """Add shared memory to global memory by TMA. Triton 3.6 and 3.7 have no name for this."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
