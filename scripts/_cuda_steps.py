"""FlashAttention's forward pass in CUDA C++ for teaching: each step adds one technique, to measure its effect.

    reference.c → naive → shared → padded → coalesced → registers → unrolled → async → tensor_cores → copies on streams

Each .cu file of cuda_steps/ is complete and exports `attend`; `diff shared.cu padded.cu` shows the code for padding.
NVRTC compiles them on first use, through cuda-core, NVIDIA's own Python interface to it; the C compiler compiles
reference.c. The last step, copying batch by batch on several streams while others compute, is not a kernel:
`attend_from_host`.

Each step is an attention backend, `--attention scripts/_cuda_steps.py:padded`, on one head: (batch, heads, n, d) is a
batch of batch × heads. Not causal, forward only; the output is always fp32. The copies are workloads.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs_systems.config import AttentionShape, ConfigError, RunConfig, one_of
from cs_systems.machine.device import Device
from cs_systems.model.kernels.cuda.driver import compiler
from cs_systems.model.kernels.driver import succeed

FOLDER = Path(__file__).parent / "cuda_steps"


@dataclass(frozen=True)
class Step:
    """Step of the series.

    source: the .cu file's name. switches: its macros besides D; those that count rows and keys size the launch. dtype:
    of q, k and v; the output is always fp32.
    """

    source: str
    switches: Mapping[str, int]
    dtype: torch.dtype = torch.float32

    def macros(self, d_head: int) -> dict[str, int]:
        """Return the macros for compiling the file.

        Steps with one row per thread keep 16 KiB each of queries and output.
        """
        sizes = {"ROWS": 4096 // d_head, "KEYS": 1024 // d_head} if self.source in _ROW_BY_THREAD else {}
        return {"D": d_head, **sizes, **self.switches}

    def launch(self, d_head: int) -> tuple[int, tuple[int, int], int]:
        """Return the block's rows, its threads as (x, y) and its bytes of shared memory, as in the table above."""
        has = self.macros(d_head)
        if self.source == "naive":
            return 128, (128, 1), 0
        if self.source in _ROW_BY_THREAD:
            stride = d_head + (self.source != "shared")
            return has["ROWS"], (has["ROWS"], 1), 4 * (2 * has["ROWS"] * stride + 2 * has["KEYS"] * d_head)
        if self.source == "tensor_cores":
            return 64, (128, 1), 2 * (64 + 4 * has["KEYS"]) * (d_head + 8)
        rows, keys = 16 * has["ROW_PATCH"], 16 * has["KEY_PATCH"]
        if self.source == "async":
            stride, buffers = d_head + has["PADDING"], 1 + has["ASYNC"]
            return rows, (16, 16), 4 * (rows * stride + 2 * buffers * keys * stride + rows * (keys + 1))
        return rows, (16, 16), 4 * ((rows + keys) * (d_head + 1) + keys * d_head + rows * (keys + 1))


# These let the compiler reorder sums. -ffast-math would also link code that flushes subnormals in the whole process.
_FLAGS = ("-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
_ROW_BY_THREAD = ("shared", "padded", "coalesced")
_PATCH = {"ROW_PATCH": 4, "KEY_PATCH": 4}
_ASYNC = {**_PATCH, "UNROLL": 8, "SHARED": 1, "PADDING": 4, "COALESCED": 1, "ASYNC": 1}
# Each step builds on the previous one.
STEPS: dict[str, Step] = {
    "naive": Step("naive", {}),
    "shared": Step("shared", {}),
    "padded": Step("padded", {}),
    "coalesced": Step("coalesced", {}),
    "registers": Step("registers", _PATCH),
    "unrolled": Step("unrolled", {**_PATCH, "UNROLL": 8}),
    "async": Step("async", _ASYNC),
    "tensor_cores": Step("tensor_cores", {"KEYS": 64}, torch.float16),
}
# Variants of the last fp32 step, each without one of its techniques.
LEFT_OUT: dict[str, Step] = {
    "without_shared": Step("async", {**_ASYNC, "SHARED": 0}),
    "without_padding": Step("async", {**_ASYNC, "PADDING": 0}),
    "without_coalescing": Step("async", {**_ASYNC, "COALESCED": 0}),
    "without_registers": Step("async", {**_ASYNC, "ROW_PATCH": 1, "KEY_PATCH": 1}),
    "without_unrolling": Step("async", {**_ASYNC, "UNROLL": 1}),
    "without_async": Step("async", {**_ASYNC, "ASYNC": 0}),
}


def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(q kᵀ / √d) v by the step `name` in STEPS or LEFT_OUT.

    q, k, v: (batch, n, d) on a CUDA device, contiguous, of the step's dtype; n a multiple of the
        rows of a block (`Step.launch`; 64 or 128, as there is no code for edges), d one of 32, 64, 128.
    Returns fp32 of the same shape. Raises ConfigError for other inputs, RuntimeError where cuda-core is absent.
    """
    step = step_named(name)
    _check(step, q, k, v)
    out = torch.empty_like(q, dtype=torch.float32)
    _launch(step, torch.cuda.current_stream(q.device), q, k, v, out)
    return out


def attend_from_host(name: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, streams: int) -> None:
    """Compute `attend` on tensors in pinned host memory, into `out` there, batch by batch on `streams` streams in turn.

    A single stream copies in, computes and copies out in sequence; with more streams, one batch's copies overlap
    another's kernel. Returns when `out` is complete.
    """
    step, current = step_named(name), torch.cuda.current_stream()
    ready = torch.cuda.Event()
    ready.record(current)
    side = [torch.cuda.Stream() for _ in range(streams)]
    for i in range(q.shape[0]):
        stream = side[i % streams]
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            here = [tensor[i : i + 1].to("cuda", non_blocking=True) for tensor in (q, k, v)]
            _check(step, *here)
            made = torch.empty_like(here[0], dtype=torch.float32)
            _launch(step, stream, *here, made)
            out[i : i + 1].copy_(made, non_blocking=True)
    for stream in side:
        stream.synchronize()


def attend_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run the sequential C program on one core: (batch, n, d) on a CPU. Raises RuntimeError without a C compiler."""
    q, k, v = (tensor.float().contiguous() for tensor in (q, k, v))
    out, scores = torch.empty_like(q), torch.empty(q.shape[1])
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (q, k, v, out, scores))
    _reference().attend(*pointers, *map(ctypes.c_long, q.shape))
    return out


def compile_step(step: Step, d_head: int, architecture: str) -> Any:
    """Compile a step to machine code, as cuda-core's ObjectCode, for e.g. "sm_90a"; needs no GPU."""
    Program, ProgramOptions = compiler()
    macros: Any = [(macro, str(value)) for macro, value in step.macros(d_head).items()]
    options = ProgramOptions(name=f"{step.source}.cu", arch=architecture, define_macro=macros)
    return Program((FOLDER / f"{step.source}.cu").read_text(), "c++", options).compile("cubin")


def step_named(name: str) -> Step:
    """Return the step of that name. Raises ConfigError with the nearest names."""
    return (STEPS | LEFT_OUT)[one_of("kernel step", name, [*STEPS, *LEFT_OUT])]


def _check(step: Step, q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.is_cuda or not q.device == k.device == v.device:
        devices = ", ".join(str(tensor.device) for tensor in (q, k, v))
        raise ConfigError(
            f"q, k and v are on {devices}; move all three to one GPU, or call attend_reference with tensors on the CPU"
        )
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, v))
        raise ConfigError(f"q, k and v have shapes {shapes}; pass one shape (batch, n, d) for all three")
    n, d = q.shape[1:]
    if d not in (32, 64, 128):
        raise ConfigError(f"the last dimension of q, k and v is {d}; make it 32, 64 or 128")
    rows, _, _ = step.launch(d)
    if n % rows:
        raise ConfigError(f"the second dimension of q, k and v is {n}; make it a multiple of {rows} for this step")
    if any(tensor.dtype != step.dtype or not tensor.is_contiguous() for tensor in (q, k, v)):
        kinds = ", ".join(f"{x.dtype}{'' if x.is_contiguous() else ' (not contiguous)'}" for x in (q, k, v))
        remedy = f"pass contiguous tensors of {step.dtype} to this step"
        raise ConfigError(f"q, k and v are {kinds}; {remedy}, made by to({step.dtype}) and contiguous()")


@cache
def _kernel(name: str, switches: tuple[tuple[str, int], ...], d_head: int, device: int) -> Any:
    """Return the driver's function, loaded into torch's context on that device and allowed its shared memory."""
    from cuda.bindings import driver

    step = Step(name, dict(switches))
    major, minor = torch.cuda.get_device_capability(device)
    machine_code = compile_step(step, d_head, f"sm_{major}{minor}" + ("a" if major == 9 else "")).code
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # torch makes its context on first use
        [module] = _succeed(driver.cuModuleLoadData(bytes(machine_code)))
    [function] = _succeed(driver.cuModuleGetFunction(module, b"attend"))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _succeed(driver.cuFuncSetAttribute(function, limit, step.launch(d_head)[2]))
    return function


def _launch(step: Step, stream: torch.cuda.Stream, *tensors: Tensor) -> None:
    """Launch the step on `stream`; `tensors` are q, k, v and the output."""
    from cuda.bindings import driver

    batch, n, d = tensors[0].shape
    rows, (x, y), shared_bytes = step.launch(d)
    function = _kernel(step.source, tuple(step.switches.items()), d, tensors[0].device.index)
    arguments = ((*(tensor.data_ptr() for tensor in tensors), n), (*[ctypes.c_void_p] * 4, ctypes.c_int))
    _succeed(
        driver.cuLaunchKernel(function, n // rows, batch, 1, x, y, 1, shared_bytes, stream.cuda_stream, arguments, 0)
    )


def _succeed(result: tuple[Any, ...]) -> list[Any]:
    """Return the values that follow the status of a driver call.

    Raises RuntimeError with the driver's message for a failure.
    """
    status, *values = result
    succeed(int(status))
    return values


@cache
def _reference() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "reference.so"
        command = ["cc", *_FLAGS, "-o", str(library), str(FOLDER / "reference.c"), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            raise RuntimeError(
                f"cc, the C compiler, failed ({reason}); install gcc, and make sure that its command cc is on PATH"
            ) from error
        return ctypes.CDLL(str(library))


COPIED = "tensor_cores"  # the step that computes between the copies


def _backend(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **_: Any) -> Tensor:
        if causal:
            raise ConfigError(
                "the kernels of scripts/_cuda_steps.py have no causal mask; use them in workload attention with "
                "causal false"
            )
        flat = (tensor.flatten(0, 1).contiguous() for tensor in (q, k, v))
        return function(*flat).unflatten(0, q.shape[:2])

    return call


reference = _backend(attend_reference)
globals().update({name: _backend(partial(attend, name)) for name in (*STEPS, *LEFT_OUT)})


def _from_host(config: RunConfig, device: Device, streams: int) -> Callable[[], None]:
    if not device.is_cuda:
        raise ConfigError(
            f"one_stream and four_streams copy to a GPU, and the device is {device.torch}; use device cuda"
        )
    shape, dtype = config.shape or AttentionShape(), step_named(COPIED).dtype
    size = (shape.batch * shape.heads, shape.seq, shape.d_head)
    q, k, v = (torch.randn(size, dtype=dtype).pin_memory() for _ in range(3))
    out = torch.empty(size).pin_memory()
    return lambda: attend_from_host(COPIED, q, k, v, out, streams)


def one_stream(config: RunConfig, device: Device) -> Callable[[], None]:
    """Copy in, compute and copy out, one batch after the other."""
    return _from_host(config, device, 1)


def four_streams(config: RunConfig, device: Device) -> Callable[[], None]:
    """Copy in, compute and copy out, with the batches on four streams in turn."""
    return _from_host(config, device, 4)
