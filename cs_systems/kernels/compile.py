"""Compile a Triton kernel for an architecture without having a GPU, and read what decides its speed from the machine code.

Needs the triton package only (its ptxas, cuobjdump and nvdisasm come with it), and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# What one block may ask for, from the CUDA C++ programming guide's table of compute capabilities.
SHARED_LIMIT_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@dataclass(frozen=True)
class KernelResources:
    """What a compiled kernel takes of a multiprocessor.

    registers: per thread. spills: local-memory instructions (STL, LDL) in the machine code, 0 if all values stay in registers.
    shared_bytes: per block. instructions: opcode without modifiers → how often it stands in the machine code ("HGMMA", "MUFU", …).
    """

    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    instructions: Mapping[str, int]


@contextmanager
def target(capability: int) -> Iterator[None]:
    """Make triton compile for `capability` (90 for 9.0) instead of the GPU of this machine, if any."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    offline = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: f"sm_{capability}",  # the key of triton's cache of compiled kernels
        get_current_stream=lambda device: 0,
    )
    driver.set_active(offline)  # type: ignore[arg-type]
    try:
        yield
    finally:
        driver.set_active(None)  # type: ignore[arg-type]  # the machine's own is looked up again on the next launch


def compile_for(
    capability: int, kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, int], grid: tuple[int, ...] = (1,)
) -> KernelResources:
    """Compile a `@triton.jit` kernel as the call `kernel[grid](**arguments, **options)` would; tensors may be on "meta".

    Raises RuntimeError under the interpreter, which has no compiled kernels; triton's own errors pass.
    """
    if not hasattr(kernel, "warmup") or not hasattr(kernel, "device_caches"):
        raise RuntimeError("TRITON_INTERPRET was set when triton was imported: compile in a process without it")
    with target(capability):
        compiled = kernel.warmup(grid=grid, **arguments, **options)
    usage, sass = _read_machine_code(compiled.asm["cubin"])
    return KernelResources(
        registers=int(usage["REG"]),
        spills=sass["STL"] + sass["LDL"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        instructions=sass,
    )


def _read_machine_code(cubin: bytes) -> tuple[dict[str, str], Counter[str]]:
    """cuobjdump's resource usage of the one kernel in `cubin`, and how often each opcode stands in it."""
    import triton.backends.nvidia

    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        assembly = _output(tools / "nvdisasm", file.name)
    # A line is `/*0420*/  @!P0 HGMMA.64x64x16.F32.BF16 R24, …`: the opcode comes after an optional predicate.
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", assembly, re.MULTILINE)
    return dict(re.findall(r"(\w+):(\d+)", usage)), Counter(opcodes)


def _output(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
