"""Scenarios of a rank with sharded models, equal on CPU and GPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs_systems.model.parallel._collectives import counting
from cs_systems.model.parallel.fsdp import FullyShardedDataParallel, gather_full_params, wrap
from cs_systems.model.parallel.fsdp.flat import parts
from cs_systems.model.transformer import RMSNorm
from tests.model.parallel.misuses import message

D, VOCABULARY = 16, 40


class StrictLayerNorm(nn.LayerNorm):
    """LayerNorm that refuses mixed dtypes without autocast on a CPU, as CUDA does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise RuntimeError(f"expected scalar type {x.dtype} but found {self.weight.dtype}")
        return super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = StrictLayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(input=torch.relu(self.up(self.norm(x))))


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class OpaqueBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


class Model(nn.Module):
    """Model of an embedding, a layer, three blocks and a head; `use` names its unusual property."""

    def __init__(self, use: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.embedding, self.mix = nn.Embedding(VOCABULARY, D), nn.Linear(D, D)
        kind = OpaqueBlock if use == "an opaque output" else Block
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        first, second, third = self.blocks
        if use == "tied":
            self.head.weight = self.embedding.weight
        if use == "shared by two blocks":
            first.up.weight = second.up.weight
        if use == "a module in two blocks":
            third.up = second.up
        if use == "a frozen block":
            second.requires_grad_(False)
        if use == "frozen but for some":
            self.requires_grad_(False)
            first.up.weight.requires_grad_(True)
            third.norm.weight.requires_grad_(True)
        if use == "a block twice":
            self.blocks = nn.ModuleList([first, second, first])
        if use == "a list in a list":
            self.blocks = nn.ModuleList([nn.ModuleList([first, second]), nn.ModuleList([third])])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.embedding(tokens))
        if self.use == "checkpoint around all blocks":
            x = checkpoint(self.run_blocks, x, use_reentrant=False)
        else:
            x = self.run_blocks(x)
        if self.use == "checkpoint around the head":
            return checkpoint(self.head, x, use_reentrant=False)
        return self.head(x)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.use in ("checkpoint", "reentrant checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.use != "checkpoint")
            elif self.use == "a list in a list":
                for inner in block:
                    x = inner(x)
            elif self.use == "an opaque output":
                x = block(x).x
            elif self.use == "parallel blocks":
                x = block(x) + self.blocks[0](x)
            else:
                x = block(x)
        return x


USES = [
    "",
    "tied",
    "shared by two blocks",
    "a module in two blocks",
    "a frozen block",
    "frozen but for some",
    "a block twice",
    "a list in a list",
    "parallel blocks",
    "an opaque output",
    "checkpoint",
    "reentrant checkpoint",
    "checkpoint around all blocks",
    "checkpoint around the head",
    "checkpoint around the model",
    "accumulated",
    "two forwards before backward",
    "evaluated in between",
    "a forward without backward",
    "autocast",
    "a forward that fails",
    "a backward that fails",
]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def backward(model: nn.Module, tokens: Tensor, use: str) -> None:
    if use == "accumulated":
        for half in tokens.chunk(2):
            (loss_of(model, half) / 2).backward()
    elif use == "two forwards before backward":
        losses = [loss_of(model, half) / 2 for half in tokens.chunk(2)]
        for loss in losses:
            loss.backward()
    elif use == "checkpoint around the model":
        nn.functional.cross_entropy(
            checkpoint(model, tokens, use_reentrant=False).flatten(0, 1), tokens.flatten()
        ).backward()
    else:
        if use.endswith("that fails"):
            fail_once(model, tokens, in_backward=use.startswith("a backward"))
        loss_of(model, tokens).backward()
    if use == "evaluated in between":
        with torch.no_grad():
            model(tokens)
    if use == "a forward without backward":
        model(tokens)


def fail_once(model: nn.Module, tokens: Tensor, in_backward: bool) -> None:
    """Fail once within the second block, then drop the gradients."""

    def fail(*_: Any) -> None:
        raise ValueError("planted failure")

    def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    up: nn.Module = getattr(model, "module", model).blocks[1].up
    hook = up.register_forward_hook(fail_in_backward if in_backward else fail)
    assert message(lambda: loss_of(model, tokens).backward()) == "planted failure"
    hook.remove()
    model.zero_grad()


def batches(rank: int, world_size: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the whole batch and this rank's rows, for each step."""
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (2 * world_size, 6), generator=torch.Generator().manual_seed(step))
        yield tokens.to(device), tokens.chunk(world_size)[rank].to(device)


def sharded_uses(rank: int, world_size: int, device: str) -> dict[str, tuple[float, int]]:
    """Return by use the largest difference from the parameters of one process, and the bytes gathered after a step."""
    found = {}
    for use in USES:
        alone = Model(use).to(device)
        sharded = FullyShardedDataParallel(copy.deepcopy(alone))
        optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (alone, sharded)]
        for whole, rows in batches(rank, world_size, device):
            autocast = torch.autocast(torch.device(device).type, torch.bfloat16) if use == "autocast" else nullcontext()
            for model, tokens, optimizer in ((alone, whole, optimizers[0]), (sharded, rows, optimizers[1])):
                optimizer.zero_grad()
                with autocast:
                    backward(model, tokens, use)
                if model is sharded:
                    sharded.finish_gradient_synchronization()
                optimizer.step()
        full = gather_full_params(sharded)
        off = max((p - full[name]).abs().max().item() for name, p in alone.named_parameters())
        found[use] = off, sharded.gathered_bytes()
    return found


def low_precision(rank: int, world_size: int, device: str) -> dict[str, float]:
    """Return by compute dtype the relative difference from the parameters of one process that casts the weights."""
    return {str(dtype): _low_precision(dtype, rank, world_size, device) for dtype in (torch.float16, torch.bfloat16)}


def _low_precision(dtype: torch.dtype, rank: int, world_size: int, device: str) -> float:
    start, alone = Model().to(device), Model().to(device)
    sharded = FullyShardedDataParallel(Model().to(device), compute_dtype=dtype)
    assert {p.dtype for p in sharded.parameters()} == {torch.float32}
    given: set[torch.dtype] = set()
    sharded.module.blocks[0].up.register_forward_hook(  # type: ignore[union-attr]
        lambda m, inputs, output: given.update({inputs[0].dtype, m.weight.dtype, output.dtype})
    )
    sharded.module.blocks[0].norm.register_forward_hook(  # type: ignore[union-attr]
        lambda m, inputs, output: given.add(output.dtype)
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, sharded)]
    for whole, rows in batches(rank, world_size, device):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(Casting(alone, dtype), whole).backward()
        loss_of(sharded, rows).backward()
        sharded.finish_gradient_synchronization()
        assert {p.grad.dtype for p in sharded.parameters() if p.grad is not None} == {torch.float32}
        for optimizer in optimizers:
            optimizer.step()
    assert given == {dtype}
    full = gather_full_params(sharded)
    return max(
        ((full[name] - p).norm() / (p - start.get_parameter(name)).norm()).item()
        for name, p in alone.named_parameters()
    )


class Casting(nn.Module):
    """Wrapper that casts the weights and inputs of linear layers and embeddings, and computes norms in fp32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        cast = {
            f"{prefix}.{name}": p.to(self.dtype)
            for prefix, m in self.module.named_modules()
            if isinstance(m, (nn.Linear, nn.Embedding))
            for name, p in m.named_parameters()
        }
        linear = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        norms = [m for m in self.module.modules() if isinstance(m, nn.LayerNorm)]
        hooks = [
            *(m.register_forward_pre_hook(self.cast_inputs, with_kwargs=True) for m in linear),
            *(m.register_forward_pre_hook(lambda m, inputs: inputs[0].float()) for m in norms),
            *(m.register_forward_hook(lambda m, inputs, output: output.to(self.dtype)) for m in norms),
        ]
        try:
            out: Tensor = torch.func.functional_call(self.module, cast, (tokens,))
        finally:
            for hook in hooks:
                hook.remove()
        return out

    def cast_inputs(self, module: nn.Module, inputs: Any, options: Any) -> Any:
        return tuple(x.to(self.dtype) for x in inputs), {key: x.to(self.dtype) for key, x in options.items()}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(D),
    "GroupNorm": lambda: nn.GroupNorm(4, D),
    "torch's RMSNorm": lambda: nn.RMSNorm(D, eps=1e-5),
    "ours": lambda: RMSNorm(D),
}


def norms(rank: int, world_size: int, device: str) -> dict[str, dict[str, Any]]:
    """Return, by norm and input dtype, the dtypes of computation and output, and the difference from float64."""
    return {
        f"{name} given {dtype}": _norm(make, dtype, device)
        for name, make in NORMS.items()
        for dtype in (torch.bfloat16, torch.float32)
    }


def _norm(make: Callable[[], nn.Module], dtype: torch.dtype, device: str) -> dict[str, Any]:
    pair = nn.ModuleDict({"norm": make(), "linear": nn.Linear(D, D)}).to(device)
    norm = FullyShardedDataParallel(pair, compute_dtype=torch.bfloat16).module["norm"]  # type: ignore[operator,index]
    seen: list[torch.dtype] = []
    norm.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].dtype))
    x = torch.linspace(-1, 3, 4 * D, device=device).view(4, D).to(dtype).requires_grad_()
    output = norm(x)
    output.sum().backward()
    off = (output - make().to(device).double()(x.double())).abs().max().item()
    return {"computes in": str(seen[0]), "returns": str(output.dtype), "off": off}


def gathered_over_time(rank: int, world_size: int, device: str) -> dict[str, list[dict[str, Any]]]:
    """Return, by use and step, the units gathered during each block's forward and backward, and the collectives."""
    return {use: _gathered_over_time(use, rank, world_size, device) for use in ("", "a frozen block")}


def _gathered_over_time(use: str, rank: int, world_size: int, device: str) -> list[dict[str, Any]]:
    model = FullyShardedDataParallel(Model(use).to(device))
    seen: list[tuple[str, list[int]]] = []

    def note(event: str) -> None:
        seen.append((event, [i for i, unit in enumerate(model._units) if unit.gathered_bytes()]))

    for number, block in enumerate(model.module.blocks):  # type: ignore[arg-type]
        block.up.register_forward_hook(lambda *_, n=number: note(f"forward {n}"))
        block.up.register_full_backward_pre_hook(lambda *_, n=number: note(f"backward {n}"))
    steps = []
    for _, rows in batches(rank, world_size, device):
        seen.clear()
        with counting() as calls:
            loss_of(model, rows).backward()
            after = model.gathered_bytes()
            model.finish_gradient_synchronization()
        steps.append({"seen": list(seen), "after": after, "calls": calls})
    return steps


def kept_parts(rank: int, world_size: int, device: str) -> dict[str, Any]:
    """Return the shapes of a rank's parts, whole parameters by name, and the parts left after the model is deleted."""
    gc.collect()
    before = len(parts)
    model = FullyShardedDataParallel(Model("tied").to(device), shard_types=(nn.Linear, nn.Embedding))
    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters(remove_duplicate=False)}
    full = {name: p.cpu() for name, p in gather_full_params(model).items()}
    saved = model.state_dict()
    alone = Model("tied")
    alone.load_state_dict({name.removeprefix("module."): x for name, x in saved.items()})
    for p in alone.parameters():
        p.data.add_(1)
    model.module.load_state_dict(alone.state_dict())
    loaded = {name: p.cpu() for name, p in gather_full_params(model).items()}
    made = len(parts) - before
    del model
    gc.collect()
    return {"shapes": shapes, "full": full, "loaded": loaded, "made": made, "left": len(parts) - before}


def sharded_misuses(rank: int, world_size: int, device: str) -> dict[str, str]:
    """Return the error messages of misuses of a sharded model."""

    def outside() -> None:
        FullyShardedDataParallel(Model().to(device)).module.head(torch.ones(1, D, device=device))  # type: ignore[operator]

    def parts_of_a_block() -> None:
        model = FullyShardedDataParallel(nn.ModuleDict({"blocks": nn.ModuleList([Block()])}).to(device))
        model.module.blocks[0].up(torch.ones(1, D, device=device))  # type: ignore[operator,index]

    def moved() -> None:
        FullyShardedDataParallel(Model().to(device)).double()

    def unfrozen() -> None:
        model = FullyShardedDataParallel(Model("a frozen block").to(device))
        model.requires_grad_(True)
        model.finish_gradient_synchronization()

    def backward_that_failed() -> None:
        model = FullyShardedDataParallel(Model().to(device))
        fail_once(model, torch.zeros(1, 2, dtype=torch.int64, device=device), in_backward=True)
        model.finish_gradient_synchronization()

    def unknown_dtype() -> None:
        wrap(Model(), compute_dtype="fp8")

    misuses: list[Callable[[], None]] = [
        unknown_dtype,
        outside,
        parts_of_a_block,
        moved,
        unfrozen,
        backward_that_failed,
    ]
    return {misuse.__name__: message(misuse) for misuse in misuses}


FSDP_SCENARIOS = [sharded_uses, low_precision, norms, gathered_over_time, kept_parts, sharded_misuses]
