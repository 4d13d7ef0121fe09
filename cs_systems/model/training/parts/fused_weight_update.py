"""Optimizer's update fused into the products that make the gradients of the blocks' weights, which are not stored.

A layer's backward computes the gradient of its input and keeps the gradient of its output. Once a block's backward is
done, one CUDA kernel for Hopper multiplies output gradients and inputs of all its weights, and updates each tile of a
weight from the sums on the chip (method: Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with
Limited Resources", section 3.1, moved into the product itself). The bytes of the update move while the tensor cores
compute.

It moves 24 bytes per element of a weight, instead of 28 with a stored gradient; the gradient is rounded to bfloat16 on
the chip, so the result equals an update after backward except for the order of the sums. Small models leave the last
wave of tiles half empty, so several blocks share a launch. On a CPU torch computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from cs_systems.config import CAPTURED_COMPILE_MODES, RunConfig
from cs_systems.core.parts import declared
from cs_systems.model.kernels.driver import multiprocessors
from cs_systems.model.kernels.prepared import PreparedPass
from cs_systems.model.training.hopper_operators import product_pass, products_unavailable
from cs_systems.model.training.master_adamw import MasterAdamW
from cs_systems.model.training.parts import Part, update_in_backward
from cs_systems.model.training.parts._deferred import Place, linear
from cs_systems.model.training.parts.fused_feed_forward import InterleavedLinear
from cs_systems.model.training.parts.joined_projections import JoinedLinear
from cs_systems.model.training.parts.update_in_backward import UpdateInBackward
from cs_systems.model.transformer import Linear

MOST_WEIGHTS = 16
"""Limit of weights per launch: each takes 312 bytes of kernel parameters, out of 32 KB since CUDA 12.1."""
MOST_BLOCKS = 4
"""Limit of blocks per launch, because their inputs and gradients of outputs are kept until then."""


class DeferringLinear(Linear):
    """Linear with a weight that the kernel updates: (..., in) → (..., out)."""

    place: Place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = linear(x, self.weight.detach(), place=self.place)
        return y


class DeferringJoinedLinear(JoinedLinear):
    """JoinedLinear with a weight that the kernel updates: (..., in) → the output of each layer, or all side by side."""

    place: Place

    def forward(self, x: Tensor, *, whole: bool = False, product: Any = linear) -> Any:
        y = product(x, self.weight.detach(), place=self.place)
        return y if whole else y.chunk(self.count, dim=-1)


DEFERRING: dict[type[nn.Module], type[nn.Module]] = {
    Linear: DeferringLinear,
    JoinedLinear: DeferringJoinedLinear,
    InterleavedLinear: InterleavedLinear,  # FusedFeedForward finds the place itself
}


@dataclass(frozen=True)
class Product:
    """Factors of the gradient of a weight: d_out (tokens, rows)ᵀ x (tokens, columns)."""

    weight: Tensor
    d_out: Tensor
    x: Tensor


class FusedWeightUpdate(UpdateInBackward):
    """Update of the blocks' linear weights in their products, and of other parameters as in UpdateInBackward.

    It replaces these layers of the model. Call `begin` before backward and `finish` after it.
    """

    def __init__(self, model: nn.Module, optimizer: MasterAdamW) -> None:
        blocks: Any = model.layers
        self.blocks = [_defer(block) for block in blocks.children()]
        weights = {id(layer.weight) for block in self.blocks for layer in block}
        in_blocks = [p for p in blocks.parameters() if p.requires_grad and id(p) not in weights]
        super().__init__(model, optimizer, [in_blocks, *update_in_backward.outside_blocks(model)])
        weight = self.blocks[0][0].weight
        on = multiprocessors(weight.get_device()) if weight.is_cuda else None
        self.together = blocks_together([layer.weight.shape for layer in self.blocks[0]], on)
        self.missing_layers = [len(block) for block in self.blocks]
        self.waiting: list[Product] = []
        self.waiting_blocks = 0
        self.uploaded: dict[int, tuple[tuple[float, ...], Tensor, Tensor]] = {}
        arrived = WeakMethod(self._layer_arrived)
        for number, block in enumerate(self.blocks):
            for layer in block:
                layer.place.token.register_post_accumulate_grad_hook(partial(update_in_backward.call, arrived, number))

    def finish(self) -> None:
        """Update the remaining weights, and let the current stream wait for all updates."""
        self._launch()
        super().finish()

    def _layer_arrived(self, number: int) -> None:
        """Count a layer of a block after its backward, and update the block's weights if it was the last one."""
        block = self.blocks[number]
        self.missing_layers[number] -= 1
        if self.missing_layers[number]:
            return
        self.missing_layers[number] = len(block)
        for layer in block:
            d_out, x = layer.place.taken()
            self.waiting.append(Product(layer.weight, d_out, x))
        self.waiting_blocks += 1
        if self.waiting_blocks >= self.together:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        products, self.waiting, self.waiting_blocks = self.waiting, [], 0
        for group in self.optimizer.param_groups:
            of_group = [p for p in products if self.settings[p.weight] is group]
            for first in range(0, len(of_group), MOST_WEIGHTS):
                self._update_together(of_group[first : first + MOST_WEIGHTS], group)

    def _update_together(self, products: Sequence[Product], group: dict[str, Any]) -> None:
        if not products[0].x.is_cuda:
            for product in products:
                product.weight.grad = product.d_out.T @ product.x
                self.optimizer.update([product.weight], group)
                product.weight.grad = None
            return
        tensors = [
            tensor
            for product in products
            for tensor in (product.d_out, product.x, *self.optimizer.tensors_of(product.weight))
        ]
        update_pass(len(products)).run([*tensors, self._uploaded_settings(group), group["progress"]], ())

    def _uploaded_settings(self, group: dict[str, Any]) -> Tensor:
        """Return the settings of a group on the device, after copying them there if they have changed."""
        beta1, beta2 = group["betas"]
        values = (group["lr"], 1 - beta1, 1 - beta2, group["eps"], group["weight_decay"])
        known, _, on_device = self.uploaded.get(id(group), (None, None, None))
        if on_device is None or known != values:
            pinned = torch.tensor(values, dtype=torch.float32).pin_memory()  # kept, because a graph may repeat the copy
            on_device = pinned.to(group["progress"].device, non_blocking=True)
            self.uploaded[id(group)] = values, pinned, on_device
        return on_device


def _defer(block: nn.Module) -> list[Any]:
    """Replace the linear layers of a block, and return them."""
    layers: list[Any] = [module for module in block.modules() if type(module) in DEFERRING]
    for layer in layers:
        layer.__class__ = DEFERRING[type(layer)]
        layer.place = Place.of(layer.weight)
    return layers


def blocks_together(shapes: Iterable[Sequence[int]], processors: int | None) -> int:
    """Return the number of blocks that one launch should update to fill its last wave of tiles.

    A launch for more blocks keeps more tensors, so it must save at least 3% of the waves. shapes: shapes of a block's
    weights; processors: number of multiprocessors of the device, None on a CPU.
    """
    if processors is None:
        return 1
    from cs_systems.model.kernels.cuda.launch_update import waves

    shapes = list(shapes)
    best, shortest = 1, float(waves(shapes, processors))
    for blocks in range(2, min(MOST_BLOCKS, MOST_WEIGHTS // len(shapes)) + 1):
        if (each := waves(blocks * shapes, processors) / blocks) < 0.97 * shortest:
            best, shortest = blocks, each
    return best


@cache
def update_pass(weights: int) -> PreparedPass:
    """Return the pass that updates this many weights."""
    from cs_systems.model.kernels.cuda.launch_update import OPERANDS, names, update_weights

    def launches(device: int, *tensors: Tensor) -> Any:
        return [update_weights(tensors, multiprocessors(device))], {}

    def check(*tensors: Tensor) -> None:
        for i in range(0, len(tensors) - 2, len(OPERANDS)):
            for x in tensors[i + 2 : i + len(OPERANDS)]:  # these are changed in place, so a copy does not work
                if not x.is_contiguous() or x.data_ptr() % 16:
                    raise ValueError(
                        f"a weight or optimizer state of shape {tuple(x.shape)} is not contiguous or not aligned to "
                        "16 bytes; store x.clone(memory_format=torch.contiguous_format) in its place"
                    )

    return product_pass(names(weights), (), launches, check)


def unavailable(config: RunConfig) -> str | None:
    if reason := update_in_backward.unavailable(config):
        return reason
    if config.compile in CAPTURED_COMPILE_MODES:
        return (
            f"compile {config.compile} replays backward in a CUDA graph, where the update cannot "
            "run; use compile default and graph step"
        )
    if others := [*declared(config.parts, "computes_in")]:
        return f"{others[0]} replaces the same layers; leave one of them out of parts"
    return products_unavailable(config, "update_in_backward")


PART = Part(replaces="update", during_backward=FusedWeightUpdate, unavailable=unavailable, keeps_buffers=True)
