"""Fully sharded data parallelism: each rank keeps 1/N of parameters, gradients and optimizer state.

Source: Rajbhandari et al. 2020, ZeRO stage 3; Zhao et al. 2023, PyTorch FSDP.

A unit is the set of parameters that are gathered at once: each child of an outermost `nn.ModuleList` or
`nn.Sequential`, and each block that `instrument.structure` finds. Parameters outside of these, or shared by several,
form the root unit. Forward gathers a unit before it runs and frees it after. Backward gathers it again, frees it, and
sends its gradients. While one unit computes, the next one is gathered: in forward the unit that followed in the last
forward, in backward the unit that preceded it. The root unit stays from forward to the end of backward. So a step sends
3 Ψ (N−1)/N bytes less one gathering of the root unit, and at most two units and the root are whole at a time.

All ranks must run the same units in the same order. A parameter that a batch leaves without a gradient on some ranks
gets the mean over all, zeros counted; one that has none on any rank keeps None, so that the optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from cs_systems.formulas.communication import fully_sharded_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import Averaging, dtype_of, maximum
from cs_systems.model.parallel._data_parallel import (
    broadcast_from_rank_0,
    by_size,
    check_same_parameters,
    refuse_assigning,
    refuse_unfrozen,
)
from cs_systems.model.parallel._mesh import data_group
from cs_systems.model.parallel.fsdp.flat import Reduction
from cs_systems.model.parallel.fsdp.norms import cast, casts, take_any_dtype
from cs_systems.model.parallel.fsdp.state import gather_into, make_optimizer, take_parts, whole_parameters
from cs_systems.model.parallel.fsdp.units import Call, Unit, divide
from cs_systems.model.transformer import BasicTransformerLM, Embedding, Linear

EVERY_MODULE = (nn.Module,)
SHARD_TYPES = (nn.Linear, nn.Embedding, Linear, Embedding)
REPLICATED_BUCKET_BYTES = 25 * 2**20
_NONE = -1  # a number that autograd never gives to a backward pass


class FullyShardedDataParallel(nn.Module):
    """Wrapper that shards a module's parameters over the ranks.

    Every rank creates it, and then calls the same methods in the same order.

    compute_dtype: dtype of weights, gradients and inputs, for sending and computing, in sharded modules for which
        `norms.casts` is true; parts and their gradients are then fp32. None: all in the dtypes of the parameters.
    shard_types: types of modules with sharded parameters, except parameters without dimensions. EVERY_MODULE: all.
        Other parameters are on every rank, in their own dtype, with averaged gradients. With a compute dtype,
        LayerNorm, GroupNorm and RMSNorm of torch.nn compute in their weights' dtype and return their input's dtype;
        other modules that do not cast must accept any input dtype. If one module computes with the weights of another,
        as nn.MultiheadAttention does with a Linear's, both belong in shard_types.
    group: the ranks that share the parameters; all by default.

    Make the optimizer from `parameters()` of this wrapper: they hold this rank's parts, so a norm over them, as in
    clip_grad_norm_, covers only these. Whole parameters are attributes of their modules while those run.
    Raises ValueError if the ranks have different models.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        shard_types: tuple[type, ...] = SHARD_TYPES,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_same_parameters(module, group)
        broadcast_from_rank_0(module, group)
        refuse_assigning(module)
        self.module = module
        self._group = group
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        with torch.no_grad():
            self._units = [
                Unit(m, places, compute_dtype, group, stream) for m, places in divide(module, shard_types).items()
            ]
        self._root, *blocks = self._units
        for unit in blocks:
            unit.module.register_forward_pre_hook(partial(self._enter, unit), prepend=True)
            unit.module.register_forward_hook(partial(self._leave, unit), always_call=True)
        for unit in self._units:
            for m in unit.modules_of(shard_types):
                dtype = compute_dtype if casts(m) else None
                m.register_forward_pre_hook(partial(self._prepare, unit, dtype), with_kwargs=True)
        sharded = {p for unit in self._units for flat in unit.flats for p in flat.params}
        if compute_dtype:
            take_any_dtype(module, {p for unit in self._units for p in unit.cast})
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        replicated = [p for p in self._trained if p not in sharded]
        self._buckets = by_size(replicated, REPLICATED_BUCKET_BYTES)
        self._average = Averaging(group, device)
        self._everything = torch.ones(len(self._trained), dtype=torch.uint8, device=device)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)  # makes the weights part of the graph
        self._calls: list[Call] = []  # calls in this forward, or in the last one
        self._plan: list[Unit] = []  # calls in the order of the previous forward
        self._backward = _NONE  # autograd's number of the last backward
        self._open: dict[Call, Sequence[Tensor | None]] = {}  # in backward: gradients that have not been sent yet
        self._reducing: list[Reduction] = []
        self._absent: set[nn.Parameter] = set()  # parameters without a gradient on this rank
        module.register_state_dict_post_hook(gather_into)
        module.register_load_state_dict_pre_hook(take_parts)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not _in_backward():
            self._begin()
        self._enter(self._root, self.module, inputs)
        output = None
        try:
            output = self.module(*inputs, **options)
        finally:
            self._leave(self._root, self.module, inputs, output)
        return output

    def _begin(self) -> None:
        """Reset the state of the last forward, because shards may have changed and its backward may have failed."""
        if self._backward != _NONE:
            for reduction in self._reducing:
                reduction.handle.wait()
            self._reducing.clear()
            self._open.clear()
        self._backward = _NONE
        self._plan, self._calls = [call.unit for call in self._calls], []
        for unit in self._units:
            unit.needed_by.clear()
            unit.expire()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        """Wait for the weights of the unit, and start gathering the next unit."""
        recomputing = _in_backward()
        calls: list[Call] = [] if recomputing else self._calls
        call = unit.call = Call(unit, calls, len(calls))
        calls.append(call)
        unit.start()
        unit.wait()
        if not recomputing:
            upcoming = self._plan[call.index : call.index + 2]
            if upcoming[1:] and upcoming[0] is unit:
                upcoming[1].start()
        trained: Sequence[Tensor] = [w for flat in unit.trained for w in flat.weights]
        if torch.is_grad_enabled():
            if unit.trained:
                trained = _Unshard.apply(self._anchor, self, call)
            elif unit is not self._root and not recomputing:
                for x in _leaves(inputs):
                    if isinstance(x, Tensor) and x.requires_grad:
                        x.register_hook(lambda grad: self._release(call))
        unit.attach(trained)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
        """Free the unit; if backward may follow, register the hooks that gather it again."""
        call = unit.call
        assert call is not None
        if unit is not self._root:
            unit.detach()
        if torch.is_grad_enabled() and output is not None:
            leaves = _leaves(output)
            for x in leaves:
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(lambda grad: self._before_backward(call))
            # The root is attached until backward ends, because checkpoints may recompute code outside of units.
            # If torch finds no tensor in the output, no hook runs before backward, so the unit is kept.
            unit.kept = unit is self._root or not any(isinstance(x, Tensor) for x in leaves)
        for other in self._units if unit is self._root else [unit]:
            if not other.kept and not other.needed_by:
                other.free()

    def _prepare(
        self, unit: Unit, dtype: torch.dtype | None, module: nn.Module, inputs: Any, options: Any
    ) -> tuple[Any, Any] | None:
        """Cast the inputs of a sharded module to `dtype`; None leaves them unchanged."""
        if not unit.is_attached:
            whole = type(unit.module).__name__
            inside = "" if unit is self._root else f", and inside it each {whole} as a whole"
            raise RuntimeError(
                f"{type(module).__name__} was called while the weights of {whole} were not gathered; call the wrapper "
                f"of the model{inside}"
            )
        return None if dtype is None else cast(dtype, inputs, options)

    def _before_backward(self, call: Call) -> None:
        """Wait for the weights of a unit before its backward, and start gathering the previous unit."""
        if self._backward == _NONE:  # not for a nested backward, as in reentrant checkpoints
            self._backward = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._end_backward)
        unit = call.unit
        if call in unit.needed_by:
            return
        for later in [other for other in self._open if other.calls is call.calls and other.index > call.index > 0]:
            self._reduce(later)  # this rank did not use the unit's weights, but other ranks may have used them
        unit.needed_by.add(call)
        if unit.trained:
            self._open.setdefault(call, [None] * sum(len(flat.params) for flat in unit.trained))
        unit.start()
        unit.wait()
        if unit.recomputes:
            unit.attach_again()
        call.calls[call.index - 1].unit.start()  # the root is first; index −1 then means the last unit

    def _gradients(self, call: Call, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of a unit's weights.

        The root's gradients wait until backward ends, because some ranks may have none.
        """
        self._open[call] = grads
        if call.unit is not self._root:
            self._reduce(call)

    def _reduce(self, call: Call) -> None:
        self._release(call)
        self._settle()
        self._reducing += call.unit.reduce(self._open.pop(call))

    def _release(self, call: Call) -> None:
        call.unit.needed_by.discard(call)
        if not call.unit.needed_by:
            call.unit.free()

    def _settle(self) -> None:
        for reduction in self._reducing:
            reduction.settle(self._absent)
        self._reducing.clear()

    def _end_backward(self) -> None:
        self._backward = _NONE
        for call in list(self._open):
            self._reduce(call)
        for unit in self._units:
            unit.needed_by.clear()
            unit.free()

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait for the gradients of the parts, and average the gradients of unsharded parameters.

        Raises RuntimeError if a parameter that was frozen when the model was wrapped requires a gradient now.
        """
        refuse_unfrozen(self._frozen)
        if self._open:
            raise RuntimeError(
                "backward has not ended, or has failed; call zero_grad(), because a failed backward leaves the "
                "gradients of some parameters, then run forward and backward again"
            )
        self._settle()
        handles = []
        for bucket in self._buckets:
            self._absent.update(p for p in bucket if p.grad is None)
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = grad.view(p.shape)
            handles.append(self._average([flat]))
        self._forget_unused()
        for handle in handles:
            handle.wait()

    def _forget_unused(self) -> None:
        """Remove the gradients of parameters that no rank used."""
        if not self._trained:
            return
        present = self._everything
        if self._absent:
            present = present.new_tensor([p not in self._absent for p in self._trained])
        maximum(present, self._group).wait()
        if self._absent:  # only a rank that lacks a gradient reads the result, because reading waits for the device
            for p, used in zip(self._trained, present.tolist(), strict=True):
                if not used:
                    p.grad = None
        self._absent.clear()

    def gathered_bytes(self) -> int:
        """Return the bytes of whole weights that are on this rank now."""
        return sum(unit.gathered_bytes() for unit in self._units)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = [p.data_ptr() for p in self.parameters()]
        super()._apply(fn, recurse)
        if before != [p.data_ptr() for p in self.parameters()]:
            raise RuntimeError("a sharded model cannot be moved or cast; do that before it is wrapped")
        return self


class _Unshard(torch.autograd.Function):
    """Autograd function with a unit's weights as outputs, so that its backward gets all their gradients at once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, owner: FullyShardedDataParallel, call: Call) -> tuple[Tensor, ...]:
        ctx.owner, ctx.call = owner, call
        ctx.set_materialize_grads(False)
        return tuple(weight.data for flat in call.unit.trained for weight in flat.weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.owner._gradients(ctx.call, grads)
        return None, None, None


def _in_backward() -> bool:
    """Return whether autograd runs in this thread, so that a forward is the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != _NONE


def _leaves(tree: Any) -> list[Any]:
    return [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree)


def gather_full_params(model: nn.Module) -> dict[str, Tensor]:
    """Return a map from name in the wrapped module to a copy of the whole parameter (fp32 if the parts are).

    All ranks must call it. A tied parameter is included under each of its names.
    """
    assert isinstance(model, FullyShardedDataParallel)
    whole = dict(whole_parameters(model.module))
    return {
        name: whole[p] if p in whole else p.detach().clone()
        for name, p in model.module.named_parameters(remove_duplicate=False)
    }


def wrap(
    model: nn.Module, compute_dtype: str | torch.dtype | None = None, tp_degree: int = 1
) -> FullyShardedDataParallel:
    """Return the model wrapped in FullyShardedDataParallel.

    The norms of BasicTransformerLM, a thousandth of its parameters, are whole on every rank; in other models every
    parameter with a dimension is sharded.

    compute_dtype: a torch.dtype, bf16 or fp16.
    """
    is_own = any(isinstance(m, BasicTransformerLM) for m in model.modules())
    types = SHARD_TYPES if is_own else EVERY_MODULE
    return FullyShardedDataParallel(model, dtype_of("compute_dtype", compute_dtype), types, data_group(tp_degree))


def finish_gradients(model: nn.Module) -> None:
    assert isinstance(model, FullyShardedDataParallel)
    model.finish_gradient_synchronization()


STRATEGY = ParallelStrategy(
    splits=frozenset({"batch", "optimizer", "gradients", "parameters"}),
    overlaps=True,
    wrap=wrap,
    finish_gradients=finish_gradients,
    make_optimizer=make_optimizer,
    sent_bytes=fully_sharded_bytes,
    options={"compute_dtype": ("bf16", "fp16"), "tp_degree": "count"},
)
