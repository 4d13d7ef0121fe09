# mypy: allow-untyped-defs, allow-incomplete-defs
"""What the Gluon kernels for Hopper share: rings of barriers, TMA's addition, exp2 on two kinds of units."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers, each of which completes a phase with so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring of buffers, and the parity of the phase of its barriers."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@builtin
def async_atomic_add(desc, coord, src, _semantic=None):
    """Add shared memory to global memory by the copy engine. Triton 3.6 has the operation, but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.constexpr_function
def _program(share):
    """PTX for 8 numbers, the first `share` of them by polynomial: 2ˣ = 2ⁿ · 2ᶠ with n = round(x), |f| ≤ 1/2.

    n comes out of the low bits of x + 1.5 · 2²³ and goes into the exponent by an integer addition. The polynomial is
    the minimax one of degree 3 for the relative error, which is 1.0e-4.
    """
    lines = ["{", ".reg .f32 x, r, f, y;", ".reg .b32 n, m;"]
    for i in range(8):
        if i >= share:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${8 + i};")
            continue
        lines += [
            f"max.ftz.f32 x, ${8 + i}, 0fC2FC0000;",  # −126
            "add.rn.ftz.f32 r, x, 0f4B400000;",
            "sub.rn.ftz.f32 f, r, 0f4B400000;",
            "sub.rn.ftz.f32 f, x, f;",
            "fma.rn.ftz.f32 y, f, 0f3D61FBB0, 0f3E786F0D;",
            "fma.rn.ftz.f32 y, y, f, 0f3F31798D;",
            "fma.rn.ftz.f32 y, y, f, 0f3F7FFB49;",
            "mov.b32 n, r;",
            "shl.b32 n, n, 23;",
            "mov.b32 m, y;",
            f"add.s32 ${i}, n, m;",
        ]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _constraints():
    return ",".join(["=r"] * 8 + ["r"] * 8)


@gluon.jit
def exp2_shared(x, SHARE: gl.constexpr):
    """2ˣ for x ≤ 0 (float32); SHARE of every 8 numbers by a polynomial on the FMA units, not below 2⁻¹²⁶."""
    if SHARE == 0:
        return gl.exp2(x)
    return gl.inline_asm_elementwise(_program(SHARE), _constraints(), [x], dtype=gl.float32, is_pure=True, pack=8)
