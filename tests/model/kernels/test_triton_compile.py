"""Tests that the kernels in Triton compile for their architectures without a GPU and fit a multiprocessor.

Compiling needs a process without TRITON_INTERPRET. One process for each architecture runs this file, which prints a
JSON object, kernel → resources.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from cs_systems.model.kernels.compile import SHARED_LIMIT_BYTES, compile_for, compiled_for
from cs_systems.model.kernels.driver import parameter_bytes
from cs_systems.model.kernels.triton.configs import tiles_for
from tests import forks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton"),
]

# capability → (dtype, d_head): the sizes of the presets, a padded size and the largest.
SIZES = {
    80: [("bfloat16", 64), ("bfloat16", 128), ("float32", 64)],
    90: [("bfloat16", 64), ("bfloat16", 80), ("bfloat16", 128), ("bfloat16", 256), ("float32", 64)],
    100: [("bfloat16", 64), ("bfloat16", 128)],
}
KERNELS = ("forward", "dq", "dkdv")
CASES = [(c, dtype, d, kernel) for c, sizes in SIZES.items() for dtype, d in sizes for kernel in KERNELS]
KNOWN_SPILLS: dict[tuple[Any, ...], int] = {
    (90, "bfloat16", 256, "dkdv"): 10,  # 2 × 64 × 256 accumulators on 256 threads take half of the registers
    (100, "bfloat16", 64, "forward"): 6,  # triton 3.6 limits it to 128 registers; 3.7 does not spill
    (100, "part add norm backward 0"): 5,  # measured with triton 3.7; not tried with 3.6
}
"""Limits of local-memory instructions, the larger of triton 3.6 and 3.7. Kernels not listed may have none."""
LONG_TIMEOUT = pytest.mark.timeout(300)  # a kernel compiles in a second or two, or ten on a busy machine


def compile_all(capability: int) -> dict[str, dict[str, Any]]:
    """Return the resources of every size and of the parts, and on Hopper of the other masks and of few keys."""
    found = {
        f"{dtype} {d_head} {name}": resources(capability, launch)
        for dtype, d_head in SIZES.get(capability, ())
        for name, launch in launches(capability, dtype, d_head, 4096, 4096).items()
    }
    found |= {f"part {name}": resources(capability, launch) for name, launch in part_launches(capability).items()}
    if capability != 90:
        return found
    found |= {
        f"{mask} {name}": resources(capability, launch)
        for mask, options in (("window", {"window": 1024}), ("packed", {"packed": True}))
        for name, launch in launches(capability, "bfloat16", 64, 4096, 4096, **options).items()
    }
    return found | {
        f"keys {keys}": resources(capability, launches(capability, "bfloat16", 64, 5, keys)["forward"])
        for keys in (1, 3)
    }


def part_launches(capability: int) -> dict[str, Any]:
    """Return the launches of the step's parts, at 2.7B: d_model 2560, d_ff 10240, d_head 80."""
    from cs_systems.model.kernels.triton import embedding, quantize, rms_norm, rotary, swiglu

    rms_norm.multiprocessors = lambda device: 132  # a GPU that is not present

    def tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    x, weight, scale = tensor(4, 2048, 2560), tensor(2560), tensor(4, 2048, dtype=torch.float32)
    gate, value = tensor(4, 2048, 2 * 10240).chunk(2, dim=-1)
    wide = tensor(4, 2048, 10240)
    q, k, v = tensor(4, 2048, 3 * 2560).unflatten(-1, (3, 32, 80)).permute(2, 0, 3, 1, 4).unbind(0)
    table, tokens = tensor(2048, 40, dtype=torch.float32), tensor(2048, dtype=torch.int64)
    passes = {
        "swiglu": swiglu.forward(0, gate, value, wide)[0],
        "swiglu backward": swiglu.backward(0, gate, value, wide, gate, value)[0],
        "norm": rms_norm.forward(0, x, weight, x, scale, 1e-5)[0],
        "add norm": rms_norm.add_forward(0, x, weight, x, x, x, scale, 1e-5)[0],
        "norm backward": rms_norm.backward(0, x, weight, scale, x, x, weight)[0],
        "add norm backward": rms_norm.add_backward(0, x, weight, scale, x, x, x, weight)[0],
        "rotation": rotary.rotate(0, q, k, table, table, q, k, False)[0],
        "embedding backward": embedding.gradient(0, x[0], tokens, tensor(10_000, 2560), 10_000)[0],
        "rotation backward": rotary.rotate_and_copy(0, q, k, v, table, table, q, k, v, True)[0],
    }
    if capability >= 89:  # the first with fp8
        low = (tensor(*size, dtype=torch.float8_e4m3fn) for size in ((2048, 2560), (2560, 2048)))
        passes["quantization"] = quantize.quantize(0, x[0], tensor(1, dtype=torch.float32), *low)[0]
    return {f"{name} {n}": launch for name, of_pass in passes.items() for n, launch in enumerate(of_pass)}


def resources(capability: int, launch: Any) -> dict[str, Any]:
    """Return the resources, and the bytes of each parameter that the launch prepares."""
    from cs_systems.model.kernels.triton.launch import parameters_of

    found = compile_for(capability, launch.kernel, launch.arguments, launch.options)
    compiled = compiled_for(capability, launch.kernel, launch.arguments, launch.options)
    return {**vars(found), "prepared_bytes": [*map(parameter_bytes, parameters_of(compiled, launch.arguments))]}


def launches(
    capability: int, dtype: str, d_head: int, seq_q: int, seq_k: int, window: int = 0, packed: bool = False
) -> dict[str, Any]:
    from cs_systems.model.kernels.triton.launch import Packing, Problem

    def tensor(seq: int) -> torch.Tensor:
        return torch.empty(4, 16, seq, d_head, dtype=getattr(torch, dtype), device="meta")

    (q, o, do, dq), (k, v, dk, dv) = (tuple(tensor(seq) for _ in range(4)) for seq in (seq_q, seq_k))
    lse, lse_log2, delta = (torch.empty(4, 16, seq_q, device="meta") for _ in range(3))
    tiles = tiles_for((capability // 10, capability % 10), q.element_size(), d_head)
    packing = None
    if packed:
        starts, tiles = torch.empty(5, dtype=torch.int32, device="meta"), tiles.without_descriptors()
        packing = Packing(starts, starts, 4 * seq_q, lower_right=True)
    problem = Problem(q, k, v, True, 0, d_head**-0.5, tiles, window, packing)
    return {
        "forward": problem.forward(o, lse),
        "dq": problem.dq(o, lse, do, lse_log2, delta, dq),
        "dkdv": problem.dkdv(do, lse_log2, delta, dk, dv),
    }


@functools.cache
def compiled(capability: int) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forks.python(__file__, str(capability), environment=environment, timeout_s=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@LONG_TIMEOUT
@pytest.mark.parametrize(("capability", "dtype", "d_head", "kernel"), CASES)
def test_kernel_fits_multiprocessor_without_new_spills(capability: int, dtype: str, d_head: int, kernel: str) -> None:
    resources = compiled(capability)[f"{dtype} {d_head} {kernel}"]
    assert 0 < resources["shared_bytes"] <= SHARED_LIMIT_BYTES[capability]
    assert resources["registers"] * 32 * resources["num_warps"] <= 65_536
    assert resources["spills"] <= KNOWN_SPILLS.get((capability, dtype, d_head, kernel), 0)


@LONG_TIMEOUT
@pytest.mark.parametrize(("capability", "dtype", "d_head", "kernel"), CASES)
def test_prepared_parameters_have_sizes_of_compiled_kernel(
    capability: int, dtype: str, d_head: int, kernel: str
) -> None:
    resources = compiled(capability)[f"{dtype} {d_head} {kernel}"]
    assert resources["prepared_bytes"] == resources["parameter_bytes"]


@LONG_TIMEOUT
@pytest.mark.parametrize(
    ("capability", "product"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")], ids=["mma", "wgmma", "tcgen05"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bf16_products_use_tensor_cores_of_architecture(capability: int, product: str, kernel: str) -> None:
    assert compiled(capability)[f"bfloat16 64 {kernel}"]["instructions"].get(product, 0) > 0


@LONG_TIMEOUT
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_products_are_not_rounded_to_tf32(kernel: str) -> None:
    instructions = compiled(90)[f"float32 64 {kernel}"]["instructions"]
    assert instructions["FFMA"] > 0
    assert not {"HMMA", "HGMMA"} & instructions.keys()


@LONG_TIMEOUT
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", ["window", "packed"])
def test_kernel_with_other_mask_does_not_spill(mask: str, kernel: str) -> None:
    resources = compiled(90)[f"{mask} {kernel}"]
    assert resources["spills"] == 0
    assert resources["prepared_bytes"] == resources["parameter_bytes"]


@LONG_TIMEOUT
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_of_parts_fit_multiprocessor_without_new_spills(capability: int) -> None:
    found = {name: of for name, of in compiled(capability).items() if name.startswith("part ")}
    assert len(found) == (14 if capability < 89 else 15)  # backward of a norm has two, of the embedding four
    for name, resources in found.items():
        assert resources["spills"] <= KNOWN_SPILLS.get((capability, name), 0), name
        assert resources["registers"] * 32 * resources["num_warps"] <= 65_536 // 2, name
        assert resources["shared_bytes"] <= 64 << 10, name
        assert resources["prepared_bytes"] == resources["parameter_bytes"], name


@LONG_TIMEOUT
def test_elementwise_kernels_of_parts_access_eight_elements_at_once() -> None:
    """A thread has 8 elements of each tensor: one access each, and one for each table, of 4 in float32."""
    found = compiled(90)
    accesses = {"swiglu 0": (2, 1), "swiglu backward 0": (3, 2), "rotation 0": (4, 2), "rotation backward 0": (5, 3)}
    for name, (loads, stores) in accesses.items():
        instructions = found[f"part {name}"]["instructions"]
        assert (instructions["LDG"], instructions["STG"]) == (loads, stores), name


@LONG_TIMEOUT
def test_one_key_is_not_specialized_as_a_constant() -> None:
    """With a constant length of 1, ptxas of triton 3.6 crashed on 10 of 363 random calls."""
    found = compiled(90)
    assert found["keys 1"] == found["keys 3"]


def test_compiling_interpreted_kernel_is_rejected() -> None:
    program = (
        "from cs_systems.model.kernels.compile import compile_for\n"
        "from cs_systems.model.kernels.triton.forward import flash_forward_kernel\n"
        "compile_for(90, flash_forward_kernel, {}, {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert "the kernel is an InterpretedFunction, not a JITFunction; " in done.stderr
    assert "in a process without TRITON_INTERPRET" in done.stderr


if __name__ == "__main__":
    json.dump(compile_all(int(sys.argv[1])), sys.stdout)
