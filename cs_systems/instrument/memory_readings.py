"""Memory read at the boundaries of a step's phases, and device memory by owner.

The readings are `Ranges` for `annotate`: they receive the phases of any workload by name. They synchronise at each
boundary, so they never run together with timing.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cs_systems.formulas.memory.tables import (
    BackwardChange,
    MemoryPartRow,
    MemoryReading,
    NamedTensor,
    PeaksRow,
    StateBytes,
    StateReading,
)
from cs_systems.instrument.structure import blocks, named_modules
from cs_systems.machine.device import Device
from cs_systems.machine.environment import other_processes_bytes


class MemoryReadings:
    """Memory after each phase, with the phase's peaks, in `rows`."""

    def __init__(self, device: Device) -> None:
        self.device, self.rows, self.step = device, list[MemoryReading](), 0
        self._open: list[str] = []
        self._thread = threading.get_ident()
        self.read("built")

    def read(self, phase: str) -> None:
        self.device.synchronize()
        peak, reserved = self.device.peaks() if self.step else (None, None)
        peaks: PeaksRow = {"peak_allocated_bytes": peak, "peak_reserved_bytes": reserved}
        self.rows.append({"step": self.step, "phase": phase, **self.device.memory(), **peaks})

    def push(self, name: str) -> None:
        if threading.get_ident() != self._thread:  # called in autograd's thread, which recomputes a checkpoint
            return
        self._open.append(name)
        if len(self._open) == 1:
            self.step += 1
        elif len(self._open) == 2:
            self.device.synchronize()
            self.device.restart_peaks()

    def pop(self) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._open.pop()
        if len(self._open) == 1:
            self.read(name)


class StateReadings(MemoryReadings):
    """MemoryReadings with the bytes of parameters, gradients and optimizer state in each row."""

    def __init__(self, device: Device, model: torch.nn.Module | None) -> None:
        self._model, self._optimizers = model, _optimizers_alive()
        super().__init__(device)

    def read(self, phase: str) -> None:
        super().read(phase)
        state: StateReading = {**self.rows[-1], **state_bytes(self._model, self._optimizers)}
        self.rows[-1] = state


def state_bytes(model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> StateBytes:
    """Return the bytes of parameters, gradients and optimizer state.

    On one of several ranks, these are the bytes of its shards: an optimizer may update shards of parameters, which have
    their own gradients.
    """
    parameters = list(model.parameters()) if model is not None else []
    # a user's class around an optimizer may leave out Optimizer.__init__, and then has neither groups nor state
    whole = [found for found in optimizers if hasattr(found, "param_groups") and hasattr(found, "state")]
    parameters += [p for optimizer in whole for group in optimizer.param_groups for p in group["params"]]
    states = [value for optimizer in whole for of in optimizer.state.values() for value in of.values()]
    return {
        "parameters_bytes": _storage_bytes(parameters),
        "gradients_bytes": _storage_bytes([p.grad for p in parameters]),
        "optimizer_state_bytes": _storage_bytes(states),
    }


def _storage_bytes(tensors: Sequence[Any]) -> int:
    local = [getattr(x, "_local_tensor", x) for x in tensors if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def _optimizers_alive() -> list[torch.optim.Optimizer]:
    """Return all optimizers of this process, because a strategy's optimizer may wrap one that cannot be reached."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]


@contextmanager
def backward_of_blocks(
    model: torch.nn.Module | None, allocated: Callable[[], int | None]
) -> Iterator[list[BackwardChange]]:
    """Record the change of allocated bytes during each block's backward, in the first step.

    `allocated` is called as a block's backward begins and ends.
    """
    rows: list[BackwardChange] = []
    handles, before = [], dict[str, int]()

    def begins(block: str) -> None:
        if block not in before and (now := allocated()) is not None:
            before[block] = now

    def ends(block: str) -> None:
        if block in before and block not in [row["block"] for row in rows]:
            rows.append({"block": block, "change_bytes": (allocated() or 0) - before[block]})

    named = {} if model is None else named_modules(model)
    for found in [] if model is None else blocks(model):
        module, block = named[found.path], found.label
        handles.append(module.register_full_backward_pre_hook(lambda *_, block=block: begins(block)))
        handles.append(module.register_full_backward_hook(lambda *_, block=block: ends(block)))
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def named_tensors(model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> list[NamedTensor]:
    """Return the parameters, gradients, buffers and optimizer state that are alive on a GPU; empty without a model."""
    if model is None:
        return []
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: list[tuple[str, str, Any]] = [("parameter", name, parameter) for parameter, name in names.items()]
    found += [("gradient", name, p.grad) for p, name in names.items() if p.grad is not None]
    found += [("buffer", name, buffer) for name, buffer in model.named_buffers()]
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors = ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
            found += [("optimizer_state", f"{names.get(parameter, '?')}/{key}", value) for key, value in tensors]
    return [
        {
            "kind": kind,
            "name": name,
            "address": tensor.data_ptr(),
            "bytes": tensor.nbytes,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": tensor.device.index or 0,
        }
        for kind, name, tensor in found
        if tensor.device.type == "cuda"
    ]


def parts_of_used_memory(device: Device) -> list[MemoryPartRow]:
    """Return the memory in use on the device by owner; empty on a CPU."""
    if not device.is_cuda:
        return []
    device.synchronize()
    stats = torch.cuda.memory_stats(device.torch)
    before = device.memory()
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = (before["allocated_bytes"] or 0) - torch.cuda.memory_allocated(device.torch)
    requested, allocated = stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"]
    reserved, split = stats["reserved_bytes.all.current"], stats["inactive_split_bytes.all.current"]
    used, others = before["device_used_bytes"] or 0, other_processes_bytes(device)
    parts: list[tuple[str, int | None, bool]] = [
        ("tensors", requested - workspaces, False),
        ("cuBLAS workspaces", workspaces, False),
        ("rounding of the allocator", allocated - requested, False),
        ("memory_allocated", allocated, True),
        ("cache, in pieces of blocks in use", split, False),
        ("cache, whole blocks", reserved - allocated - split, False),
        ("memory_reserved", reserved, True),
        ("other processes", others, False),
        ("context and modules" if others is not None else "context, and other processes if any",
         used - reserved - (others or 0), False),
        ("in use by cudaMemGetInfo", used, True),
        ("in use by nvidia-smi", _nvidia_smi_bytes(device), True),
    ]  # fmt: skip
    return [{"part": part, "bytes": size, "total": total} for part, size, total in parts]


def _nvidia_smi_bytes(device: Device) -> int | None:
    """Return the memory in use that nvidia-smi shows for the whole device; None where it cannot be run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "-i", device.uuid(), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
