"""Tensors that forward keeps for backward: every tensor that autograd saves, with its operation and module.

Hooks on saved tensors find them. When a tensor is saved, its node has just been made. Nodes are numbered, and after
forward the graph gives the operation of each number. A checkpoint saves only its input: the operation is then
`checkpoint`, and the module is the first one that the checkpoint runs. Tensors that a selective checkpoint keeps in
addition are not saved tensors, and are not seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from cs_systems.formulas.memory.tables import KeptByBlock, ResidualRow
from cs_systems.instrument.hooks import BackwardRoots, nodes_below
from cs_systems.instrument.structure import Block, block_of_modules

CHECKPOINT = "checkpoint"
COMPILED = "CompiledFunctionBackward"  # node of a function that torch.compile made
_NEAR = 4  # frames between torch's checkpoint and the hook that receives its input


@dataclass
class SavedTensor:
    """Tensor that forward keeps for backward."""

    operation: str | None  # None until a backward has begun
    module: str  # path of the module; "" outside the model
    shape: list[int]
    dtype: str
    bytes: int  # bytes of the whole storage behind the tensor
    parameter: str | None  # name of the parameter; None for other tensors
    again: bool  # whether the same storage was saved before, so that it needs no more memory
    block: Block | None = None  # the repeated block that the module is in


class SavedTensors:
    """Saved tensors in `rows`, which is complete once a backward has begun."""

    def __init__(self, model: nn.Module | None, *, compiled: bool = False) -> None:
        self.rows: list[SavedTensor] = []
        self.compiled = compiled
        self._parameters = {} if model is None else _storages(model)
        self._blocks = {} if model is None else block_of_modules(model)
        self._open: list[str] = []
        self._done = False
        self._numbers: list[int] = []
        self._inputs: list[SavedTensor] = []  # rows of a checkpoint that has begun, until one of its modules begins
        self._alive: dict[int, Tensor] = {}  # keeps saved tensors alive with the graph, so that no address is reused

    def pack(self, tensor: Tensor) -> Tensor:
        if self._done:
            return tensor
        storage, checkpoint = tensor.untyped_storage(), _saved_by_a_checkpoint()
        if checkpoint and not storage.nbytes():  # PyTorch 2.11 also saves an empty tensor of its own
            return tensor
        address = storage.data_ptr() if storage.nbytes() else 0
        self._numbers.append(torch.autograd._get_sequence_nr() - 1)  # type: ignore[attr-defined]
        row = SavedTensor(
            operation=CHECKPOINT if checkpoint else None,
            module=self._open[-1] if self._open else "",
            shape=list(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=storage.nbytes(),
            parameter=self._parameters.get(address),
            again=address in self._alive,
            block=self._blocks.get(self._open[-1]) if self._open else None,
        )
        self.rows.append(row)
        self._inputs = [*self._inputs, row] if checkpoint else []
        self._alive[address] = tensor
        return tensor

    def name_operations(self, roots: Iterable[Node]) -> list[RemovableHandle]:
        names = {number: node.name() for number, node in nodes_below(roots)}
        for row, number in zip(self.rows, self._numbers, strict=True):
            row.operation = row.operation or names.get(number)
        if self.compiled:
            self._name_compiled_blocks()
        self._alive.clear()
        self._done = True
        return []

    def _name_compiled_blocks(self) -> None:
        """Name the blocks of a compiled model, if there are as many compiled functions with kept tensors as blocks."""
        compiled = [(n, row) for n, row in zip(self._numbers, self.rows, strict=True) if row.operation == COMPILED]
        numbers = sorted({number for number, _ in compiled})
        found = [*dict.fromkeys(self._blocks.values())]
        if len(numbers) != len(found):
            return
        block = dict(zip(numbers, found, strict=True))
        for number, row in compiled:
            row.module, row.block = block[number].path, block[number]

    def hooks(self, model: nn.Module) -> list[RemovableHandle]:
        handles = []
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(self._enters(path)))
                handles.append(module.register_forward_hook(lambda *_: self._open.pop() and None, always_call=True))
        return handles

    def _enters(self, path: str) -> Callable[..., None]:
        def entered(*_: Any) -> None:
            self._open.append(path)
            for row in self._inputs:
                row.module, row.block = path, self._blocks.get(path)
            self._inputs = []

        return entered


@contextmanager
def saved_tensors(model: nn.Module | None = None, *, compiled: bool = False) -> Iterator[SavedTensors]:
    """List the tensors that forward keeps inside the block, until a backward begins.

    model: the source of the names of modules and parameters. compiled: the model is compiled, so that its modules must
    not get hooks; one compiled function is one node.
    """
    found = SavedTensors(model, compiled=compiled)
    with ExitStack() as stack:
        for handle in found.hooks(model) if model is not None and not compiled else []:
            stack.callback(handle.remove)
        stack.callback(BackwardRoots(found.name_operations, lambda: None).install())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(found.pack, lambda tensor: tensor))
        yield found


def summed(rows: Iterable[SavedTensor]) -> list[ResidualRow]:
    """Return the rows with equal tensors of all blocks summed in one row, the largest first."""
    groups: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        block = row.block
        module = row.module if block is None else f"{block.stack}.*{row.module.removeprefix(block.path)}"
        shape = "×".join(map(str, row.shape)) or "scalar"
        key = (
            module,
            block is not None,
            row.operation,
            shape,
            row.dtype,
            row.bytes,
            row.parameter is not None,
            row.again,
        )
        groups[key] += 1
    totals = [0 if parameter or again else size * count for (*_, size, parameter, again), count in groups.items()]
    everything = sum(totals)
    in_blocks = sum(total for (_, in_block, *_), total in zip(groups, totals, strict=True) if in_block)
    made: list[ResidualRow] = [
        {
            "module": module,
            "operation": operation,
            "shape": shape,
            "dtype": dtype,
            "bytes": size,
            "count": count,
            "total_bytes": total,
            "parameter": parameter,
            "share": total / everything if everything else 0.0,
            "of_block": total / in_blocks if in_block and in_blocks else None,
        }
        for ((module, in_block, operation, shape, dtype, size, parameter, _), count), total in zip(
            groups.items(), totals, strict=True
        )
    ]
    return sorted(made, key=lambda row: -row["total_bytes"])


def by_block(rows: Iterable[SavedTensor]) -> list[KeptByBlock]:
    """Return the bytes that each block keeps."""
    kept: Counter[str] = Counter()
    checkpointed: dict[str, bool] = {}
    for row in rows:
        if row.parameter is None and (row.operation == CHECKPOINT or not row.again):
            block = row.block.label if row.block else row.module or "outside of modules"
            kept[block] += 0 if row.again else row.bytes
            checkpointed[block] = checkpointed.get(block, True) and row.operation == CHECKPOINT
    return [{"block": block, "bytes": size, "checkpoint": checkpointed[block]} for block, size in kept.items()]


def _saved_by_a_checkpoint() -> bool:
    """Return whether a checkpoint saves this tensor, which is then the checkpoint's input.

    A checkpoint saves only its input, from torch's own code. A reentrant one is an ordinary autograd function: it saves
    its input after everything has run, under its own name.
    """
    frame = sys._getframe(2)
    for _ in range(_NEAR):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return frame.f_code.co_name != torch.utils.checkpoint.checkpoint.__name__
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _storages(model: nn.Module) -> dict[int, str]:
    return {t.untyped_storage().data_ptr(): name for name, t in (*model.named_parameters(), *model.named_buffers())}
