"""Memory of a step by the lifetimes of its tensors' storages: allocated bytes by phase and category, and peaks.

Every operation's results pass through a dispatch mode. A storage counts from its first tensor until its last one dies.
This works for real tensors on any device, and for fake tensors, which have sizes and no memory. Memory that a library
allocates inside an operation is seen only where LIBRARY_BYTES or `convolutions` gives its size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cs_systems.config import Phase
from cs_systems.formulas.memory.allocator import CUBLAS_WORKSPACE_BYTES, Block, CachingAllocator
from cs_systems.formulas.memory.tables import ForecastPhase
from cs_systems.instrument import convolutions
from cs_systems.instrument.flop_counter import executed_flops

BUILT = "built"
PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "buffers", "gradients", "optimizer_state"
BATCH, ACTIVATIONS, WORKSPACE = "batch", "activations", "workspace"
# category of a phase's allocations, until their tensors turn out to be parameters, gradients or optimizer state
_MADE_IN = {BUILT: BATCH, Phase.INPUT: BATCH, Phase.FORWARD: ACTIVATIONS, Phase.LOSS: ACTIVATIONS}
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "linear")


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    if name == "_grouped_mm" and isinstance(args[0], FakeTensor):
        # the fake form accepts only bf16, unlike the kernels
        low = [a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return func(*low, **kwargs).to(args[0].dtype)
    if name in _ATTENTION and not any(isinstance(a, FakeTensor) or (isinstance(a, Tensor) and a.is_cuda) for a in args):
        # a CPU has no such kernel: zeros of the same sizes replace its results
        sizes = func(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
        return tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), sizes)
    return func(*args, **kwargs)


def _padded_rows(query: Tensor, multiple: int = 128) -> int:
    batch, heads, length = query.shape[:3]
    return batch * heads * (length + -length % multiple)


def _repeated_gradients(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes of the gradients of key and value for every query head, before summing over a group."""
    if query.shape[1] == key.shape[1]:
        return 0
    return (key.nbytes + value.nbytes) * query.shape[1] // key.shape[1]


def _flash_backward(gradients: Any, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    """Return the bytes of the query's gradient in fp32, and of one factor per row."""
    d_head = query.shape[3] + -query.shape[3] % 32
    return _padded_rows(query) * 4 * (d_head + 1) + _repeated_gradients(query, key, value)


def _cudnn_backward(gradients: Any, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    """Return the bytes of cuDNN's backward, which needs neither padding; from the peaks in profiles/attention_h100."""
    return query.numel() * 4 + _padded_rows(query, 1) * 4 + _repeated_gradients(query, key, value)


def _efficient_backward(gradients: Any, output_gradient: Tensor, query: Tensor, *_: Any) -> int:
    """Return the bytes of one factor per row and, in low precision, of the query's fp32 gradient in tiles of 64."""
    accumulated = (
        0 if query.dtype == torch.float32 else _padded_rows(query, 64) * (query.shape[3] + -query.shape[3] % 64)
    )
    return 4 * (_padded_rows(query, 1) + accumulated)


def _safe_softmax(result: Tensor, *_: Any) -> int:
    """Return the bytes of the softmax before its hidden rows are set to 0, and of a mask for that."""
    return result.nbytes + result.numel()


def _softmax_backward(result: Tensor, gradient: Tensor, *_: Any) -> int:
    """Return the bytes of gradient × weights, which CUDA computes first."""
    return gradient.nbytes


# Name of an operation → function from its result and arguments to the bytes that CUDA's kernels allocate inside it, in
# addition to its result.
LIBRARY_BYTES: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
}
_ATTENTION = {
    f"_scaled_dot_product_{kernel}_attention{suffix}"
    for kernel in ("flash", "cudnn", "efficient")
    for suffix in ("", "_backward")
}


class StorageTracker(TorchDispatchMode):
    """Tracker of the live storages on one type of device; `rows` has a row for each phase that has ended.

    `flops` counts the FLOPs of all operations; `caveats` lists the assumptions behind the bytes of libraries.

    Args:
        device: Type of the device with the storages to count.
        like_cuda: Count as CUDA does: by its caching allocator, with the workspaces of cuBLAS, cuDNN and attention.
        tf32: cuDNN may use TF32 for tensors in fp32.
    """

    def __init__(self, device: str, like_cuda: bool, tf32: bool = False) -> None:
        super().__init__()
        self.rows: list[ForecastPhase] = []
        self.flops = 0
        self.allocator = CachingAllocator() if like_cuda else None
        self._device, self._phase, self._step = device, BUILT, 0
        self._live: dict[int, tuple[str, int, Block | None]] = {}
        self._bytes: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._cublas_threads: set[bool] = set()
        self.caveats: set[str] = set()
        self._library_bytes = LIBRARY_BYTES | convolutions.library_bytes(tf32=tf32, caveats=self.caveats)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = _run(func, args, kwargs or {})
        self.flops += executed_flops(func, args, kwargs or {}, result)
        results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        for tensor in results:
            self.add(tensor)
        if self.allocator is not None and any(tensor.device.type == self._device for tensor in results):
            self._count_libraries(self.allocator, func.overloadpacket.__name__, result, args)
        return result

    @property
    def allocated_bytes(self) -> int:
        return self._bytes.total()

    @property
    def reserved_bytes(self) -> int | None:
        return None if self.allocator is None else self.allocator.reserved

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted or on another device."""
        if tensor.device.type != self._device or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or not size:
            return
        block = self.allocator.alloc(size) if self.allocator else None
        self._live[key] = (category := _MADE_IN.get(self._phase, WORKSPACE), block.size if block else size, block)
        self._bytes[category] += self._live[key][1]
        self._note_peak()
        weakref.finalize(storage, self._gone, key).atexit = False

    def name(self, tensors: Iterable[Any], category: str) -> None:
        """Put the storages of tensors into a category."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self.add(tensor)
                if found := self._live.get(tensor.untyped_storage()._cdata):
                    before, size, block = found
                    self._live[tensor.untyped_storage()._cdata] = category, size, block
                    self._bytes[before] -= size
                    self._bytes[category] += size

    def built(self, model: nn.Module, inputs: Iterable[Any]) -> None:
        """Count a model and the inputs that exist before the first step; name its gradients from now on."""
        self.name(model.parameters(), PARAMETERS)
        self.name(model.buffers(), BUFFERS)
        self.name(inputs, BATCH)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.name([p.grad], GRADIENTS))
        self._end()

    @contextmanager
    def phase(self, step: int, name: str, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Attribute the operations inside the block to this phase of this step; steps are counted from 1."""
        self._step, self._phase = step, name
        self._peak = Counter(self._bytes)
        yield
        if optimizer is not None:
            self.name((value for state in optimizer.state.values() for value in state.values()), OPTIMIZER_STATE)
        self._end()

    def _end(self) -> None:
        self.rows.append(
            {
                "step": self._step,
                "phase": self._phase,
                "components": {name: size for name, size in self._bytes.items() if size},
                "peak_components": {name: size for name, size in self._peak.items() if size},
            }
        )

    def _gone(self, key: int) -> None:
        category, size, block = self._live.pop(key)
        self._bytes[category] -= size
        if self.allocator is not None and block is not None:
            self.allocator.free(block)

    def _note_peak(self) -> None:
        if self._bytes.total() > self._peak.total():
            self._peak = Counter(self._bytes)

    def _count_libraries(self, allocator: CachingAllocator, name: str, result: Any, args: tuple[Any, ...]) -> None:
        """Count a workspace for each thread that calls cuBLAS, and what an operation allocates inside."""
        in_backward = self._phase == Phase.BACKWARD
        if name in _MATMULS and self._phase != BUILT and in_backward not in self._cublas_threads:
            self._cublas_threads.add(in_backward)
            self._bytes[WORKSPACE] += allocator.alloc(CUBLAS_WORKSPACE_BYTES).size
            self._note_peak()
        if size := self._library_bytes[name](result, *args) if name in self._library_bytes else 0:
            block = allocator.alloc(size)
            self._bytes[WORKSPACE] += block.size
            self._note_peak()
            self._bytes[WORKSPACE] -= block.size
            allocator.free(block)
