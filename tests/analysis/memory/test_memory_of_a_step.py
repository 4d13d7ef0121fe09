"""Categories of real training steps of the toolkit's model, compared with its tensors.

There is no CUDA allocator here. The simulated one allocates each operator's new storage, with the real Python stack,
and frees it when PyTorch does.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.config import preset
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training import optimizers
from cs_systems.readers.snapshot import read
from tests.analysis.memory.caching_allocator import CachingAllocator

STEPS = 2
Frames = tuple[dict[str, Any], ...]
CONFIG = preset("tiny", num_layers=3)
OF_THE_TEST = ("torch/_ops.py", "torch/utils/_python_dispatch.py", "torch/_compile.py", "torch/_dynamo/")


def stack() -> Frames:
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in OF_THE_TEST):
            frames.append({"filename": file, "line": frame.f_lineno, "name": frame.f_code.co_name})
        frame = frame.f_back
    return tuple(f for f in frames if "pytest" not in f["filename"] and "pluggy" not in f["filename"])


class Recorded(TorchDispatchMode):
    """Recorded steps; `addresses` maps the data_ptr of each live storage to its simulated address."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator(recording=True)
        self.addresses: dict[int, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._frames: Frames = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        result = func(*args, **(kwargs or {}))
        self._frames = stack()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        pointer = storage.data_ptr()
        if pointer in self._alive and self._alive[pointer].expired():  # an operator freed it, and was given its memory
            self._free(pointer)
        if storage.nbytes() and pointer not in self.addresses:
            self.addresses[pointer] = self.allocator.alloc(storage.nbytes(), self._frames)
            self._alive[pointer] = StorageWeakRef(storage)

    def sweep(self) -> None:
        """Free the storages that PyTorch freed since the operator before."""
        for pointer in [p for p, storage in self._alive.items() if storage.expired()]:
            self._free(pointer)

    def _free(self, pointer: int) -> None:
        del self._alive[pointer]
        self.allocator.free(self.addresses.pop(pointer), self._frames)

    def of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        return {self.addresses[t.untyped_storage().data_ptr()] for t in tensors}


Truth = dict[str, set[int]]  # category → the addresses of its tensors, after the last step


def train(
    make: Callable[..., torch.optim.Optimizer], wrap: Callable[[torch.nn.Module], None]
) -> tuple[Recorded, Truth]:
    torch.manual_seed(0)
    with Recorded() as recorded:
        model = BasicTransformerLM(CONFIG)
        wrap(model)
        optimizer = make(model.parameters())
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
        recorded.sweep()
        state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        truth = {
            "parameters": recorded.of([*model.parameters(), *model.buffers()]),
            "gradients": recorded.of(gradients),
            "optimizer state": recorded.of(state),
        }
    return recorded, truth


def recompute(model: torch.nn.Module) -> None:
    """Checkpoint each block."""
    for block in model.layers:  # type: ignore[union-attr]
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def keep(model: torch.nn.Module) -> None: ...


def torch_adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


@pytest.fixture(
    scope="module",
    params=[(torch_adamw, keep), (optimizers.AdamW, keep), (torch_adamw, recompute)],
    ids=["torch's AdamW", "our AdamW", "recomputed"],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Attribution, Truth]:
    recorded, truth = train(*request.param)
    path = tmp_path_factory.mktemp("step") / "made.pickle"
    path.write_bytes(pickle.dumps(recorded.allocator.snapshot()))
    found = attribute(replay(read(path)))
    assert found.replay.peak_bytes == recorded.allocator.peak
    return found, truth


def test_categories_match_the_model_tensors(trained: tuple[Attribution, Truth]) -> None:
    found, truth = trained
    last = found.alive_at(len(found.replay.snapshot.events) - 1)
    for category, addresses in truth.items():
        categorized = {a.allocation.address for a in last if a.category == category}
        scalars = {a.allocation.address for a in last if a.allocation.requested_bytes <= 8}  # step counters
        assert categorized - scalars == addresses - scalars, category


def test_each_step_has_all_gradients(trained: tuple[Attribution, Truth]) -> None:
    found, truth = trained
    made = [a for a in found.allocations if a.category == "gradients"]
    assert len(made) == STEPS * len(truth["gradients"])


def test_each_layer_keeps_the_same_bytes(trained: tuple[Attribution, Truth]) -> None:
    found, _ = trained
    kept: Counter[str | None] = Counter()
    for a in found.allocations:
        if a.category == "activations" and a.phase == "forward":
            kept[a.layer] += a.allocation.bytes
    blocks = [f"block {n}" for n in range(CONFIG.num_layers)]
    assert {*kept} == {None, *blocks}  # embedding, final norm and head are in none
    assert len({kept[block] for block in blocks}) == 1


def test_only_the_batch_is_unknown_at_the_peak(trained: tuple[Attribution, Truth]) -> None:
    found, _ = trained
    unknown = [a for a in found.alive_at(found.replay.peak_event) if a.category == "unknown"]
    assert [a.allocation.requested_bytes for a in unknown] == [2 * 32 * 8]
    phases = Counter(a.phase for a in found.allocations)
    assert {*phases} >= {"setup", "forward", "loss", "backward", "optimizer"}
