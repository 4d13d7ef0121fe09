"""Passes of attention and of parts of the step, with kernel calls prepared once for each layout of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from cs_systems.model.kernels.driver import CallSequence

MOST_LAYOUTS = 4096
"""Limit of layouts that a pass keeps prepared, about 10 KiB each; it then drops all."""
SCRATCH_ALIGNMENT = 512  # alignment in bytes, like torch's allocations
INTERPRETER = -1
"""Device index that stands for the CPU, where Triton's interpreter runs."""


Launches = Callable[..., tuple[Sequence[Any], Mapping[str, Tensor]]]
"""(device, *tensors, *options) → the launches on these tensors, and the scratch tensors made for them, by name.

device: the index of the GPU, or INTERPRETER.
"""


class PreparedPass:
    """Pass of a backend, with its kernel calls for each layout so far.

    For a new layout it calls `launches` with tensors on the meta device, so that a prepared layout holds no memory. A
    later call on tensors of that layout sets addresses and launches.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        launches: Launches,
        accepts: Callable[[Tensor], bool],
        check: Callable[..., None],
    ) -> None:
        """Describe the pass.

        Args:
            inputs: operands that the kernels read, by the kernels' names for them.
            outputs: operands that the kernels write; their layouts follow from the inputs' layouts.
            launches: as in `Launches`.
            accepts: returns True if the kernels support the layout of a tensor. Other inputs are copied, and other
                outputs are written to a copy. Tensors with fewer dimensions must be contiguous.
            check: raises ValueError for inputs that the backend rejects. Called for each new layout.
        """
        self._names = (*inputs, *outputs)
        self._launches, self._accepts, self._check = launches, accepts, check
        self._prepared: dict[Any, tuple[_Runnable, list[bool] | None]] = {}

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *options: Any) -> None:
        """Run the pass on the current stream of the inputs' device."""
        key = (options, *[(x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15) for x in inputs])
        found = self._prepared.get(key)
        if found is None:
            self._check(*inputs)
            if len(self._prepared) >= MOST_LAYOUTS:
                self._prepared.clear()
            found = self._prepared[key] = self._prepare([*inputs, *outputs], options)
        calls, accepted = found
        if accepted is None:
            calls.run([*inputs, *outputs])
        else:
            self._run_on_copies(calls, accepted, inputs, outputs)

    def _prepare(self, tensors: list[Tensor], options: tuple[Any, ...]) -> tuple[_Runnable, list[bool] | None]:
        """Return the calls for tensors of this layout, and the tensors that they accept; None: all."""
        accepted = [x.is_contiguous() if x.ndim < tensors[0].ndim else self._accepts(x) for x in tensors]
        device, rejects = tensors[0].get_device(), not all(accepted)
        if device == INTERPRETER:
            return _Interpreted(self._launches, options), accepted if rejects else None
        stand_ins = [stand_in(x) if ok else contiguous(stand_in(x)) for x, ok in zip(tensors, accepted, strict=True)]
        with torch.cuda.device(device):
            launches, scratch = self._launches(device, *stand_ins, *options)
            calls = [launch.load(device) for launch in launches]
        sequence = CallSequence(device, (*self._names, *scratch), calls)
        return _Compiled(sequence, tensors[0].device, scratch), accepted if rejects else None

    @staticmethod
    def _run_on_copies(
        calls: _Runnable, accepted: Sequence[bool], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        read = [x if ok else contiguous(x) for x, ok in zip(inputs, accepted, strict=False)]
        written = [
            x if ok else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x, ok in zip(outputs, accepted[len(inputs) :], strict=True)
        ]
        calls.run([*read, *written])
        for x, source in zip(outputs, written, strict=True):
            if source is not x:
                x.copy_(source)


class _Runnable(Protocol):
    def run(self, tensors: Sequence[Tensor]) -> None: ...


class _Interpreted:
    def __init__(self, launches: Launches, options: tuple[Any, ...]) -> None:
        self._launches, self._options = launches, options

    def run(self, tensors: Sequence[Tensor]) -> None:
        for launch in self._launches(INTERPRETER, *tensors, *self._options)[0]:
            launch.run()


class _Compiled:
    """Prepared calls, with the offsets of their scratch tensors in one allocation."""

    def __init__(self, sequence: CallSequence, device: torch.device, scratch: Mapping[str, Tensor]) -> None:
        self._run = sequence.run
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)  # its new_empty makes the scratch memory
        self._offsets, self._scratch_bytes = list[int](), 0
        for tensor in scratch.values():
            self._offsets.append(self._scratch_bytes)
            self._scratch_bytes += -(-tensor.nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT

    def run(self, tensors: Sequence[Tensor]) -> None:
        addresses = [x.data_ptr() for x in tensors]
        if self._offsets:
            scratch = self._bytes.new_empty(self._scratch_bytes)
            base = scratch.data_ptr()
            addresses += [base + offset for offset in self._offsets]
        self._run(addresses)


def empty_rows(q: Tensor) -> Tensor:
    """Return an uninitialised float32 tensor with one number per row of `q`."""
    return _no_numbers(q.device).new_empty(q.shape[:-1])


@cache
def _no_numbers(device: torch.device) -> Tensor:
    """Return an empty tensor, on which `new_empty` costs a third of `torch.empty` with dtype and device."""
    return torch.empty(0, device=device, dtype=torch.float32)


def stand_in(x: Tensor) -> Tensor:
    """Return a tensor on the meta device with the layout and the alignment of `x`."""
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True) if size)
    first = (x.data_ptr() & 15) // x.element_size()
    return torch.empty(first + span, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), first)


def contiguous(x: Tensor) -> Tensor:
    """Return a contiguous, aligned copy, even if `x` is contiguous but not aligned."""
    return x.clone(memory_format=torch.contiguous_format)
