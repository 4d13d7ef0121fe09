"""Compilation of a Triton kernel for an architecture without its GPU, and analysis of the machine code.

Needs the triton package only (its ptxas, cuobjdump and nvdisasm come with it), and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cs_systems.core.validation import shown

SHARED_LIMIT_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Compute capability → largest shared memory of one block (CUDA C++ programming guide, technical specifications)."""


@dataclass(frozen=True)
class KernelResources:
    """Resources of a multiprocessor that a compiled kernel uses.

    Attributes:
        registers: per thread.
        spills: instructions in the machine code that access local memory (STL, LDL); 0: every value stays in a
            register.
        shared_bytes: per block.
        instructions: opcode without modifiers ("HGMMA") → its number of occurrences in the machine code.
        parameter_bytes: bytes of each parameter, in order.
    """

    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    instructions: Mapping[str, int]
    parameter_bytes: Sequence[int]


def compile_for(
    capability: int, kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, int]
) -> KernelResources:
    """Compile with `compiled_for`, and return the kernel's use of a multiprocessor's resources."""
    compiled = compiled_for(capability, kernel, arguments, options)
    usage, opcodes = read_machine_code(compiled.asm["cubin"])
    return KernelResources(
        registers=int(usage["REG"]),
        spills=opcodes["STL"] + opcodes["LDL"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        instructions=opcodes,
        parameter_bytes=parameter_bytes(compiled.asm["cubin"], compiled.metadata.name),
    )


def compiled_for(capability: int, kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, int]) -> Any:
    """Compile a `@triton.jit` kernel for `capability` (90 is 9.0), specialized like a call with these arguments.

    Tensors may be on torch's "meta" device: only dtype, alignment and the other arguments' values matter. Raises
    RuntimeError for anything else, such as a kernel of a process that interprets its kernels; triton's errors pass
    through (CompilationError, OutOfResources).
    """
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        wrong = f"the kernel is {shown(kernel)}, not a JITFunction"
        raise RuntimeError(f"{wrong}; decorate it with triton.jit alone, in a process without TRITON_INTERPRET")
    with _target(capability):
        return kernel.warmup(grid=(1,), **arguments, **options)


@contextmanager
def _target(capability: int) -> Iterator[None]:
    """Replace Triton's driver, which compilation queries only for the architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    stand_in: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: f"sm_{capability}",  # the key of triton's cache of compiled kernels
        get_current_stream=lambda device: 0,
    )
    driver.set_active(stand_in)
    try:
        yield
    finally:
        nothing: Any = None
        driver.set_active(nothing)  # the next launch looks up the machine's driver again


def read_machine_code(cubin: bytes) -> tuple[dict[str, str], Counter[str]]:
    """Return cuobjdump's resource usage of the one kernel in `cubin`, and the number of occurrences of each opcode."""
    usage = _inspected(cubin, "cuobjdump", "-res-usage")
    # only code sections, without the data-flow analysis, which only adds comments: a third faster
    assembly = _inspected(cubin, "nvdisasm", "--print-code", "--no-dataflow")
    # A line is `/*0420*/  @!P0 HGMMA.64x64x16.F32.BF16 R24, …`: the opcode comes after an optional predicate.
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", assembly, re.MULTILINE)
    return dict(re.findall(r"(\w+):(\d+)", usage)), Counter(opcodes)


def parameter_bytes(cubin: bytes, kernel: str) -> list[int]:
    """Return the bytes of each parameter of a kernel, in order."""
    sections = re.split(r"^(?=\.(?:section|nv|text))", _inspected(cubin, "cuobjdump", "-elf"), flags=re.MULTILINE)
    info = next(section for section in sections if section.startswith(f".nv.info.{kernel}\n"))
    entries = re.findall(r"Ordinal : 0x(\w+)\s+Offset\s+: 0x\w+\s+Size\s+: 0x(\w+)", info)
    return [size for _, size in sorted((int(ordinal, 16), int(size, 16)) for ordinal, size in entries)]


def _inspected(cubin: bytes, tool: str, *options: str) -> str:
    """Return the output of a tool that comes with triton."""
    import triton.backends.nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _output(Path(triton.backends.nvidia.__file__).parent / "bin" / tool, *options, file.name)


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
