"""Data parallelism: a copy of the model on every rank, with averaged gradients (Li et al. 2020, PyTorch DDP).

The four `ddp_*` strategies are this class with different buckets, sent at different times. A bucket has the parameters
of one all-reduce. All strategies average Ψ bytes of gradients, 2 Ψ (N−1)/N sent by each rank, and one byte per
parameter that marks whether it had a gradient.

Deadlocks: Collectives match by order, and the ranks may use different parameters in a batch. So all ranks send buckets
in the same order: a ready bucket waits for those before it. Buckets that backward does not fill are sent after
backward, with zeros for missing gradients. A parameter without a gradient on any rank keeps `None`, as in one process,
so that the optimizer skips it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cs_systems.model.parallel._collectives import Averaging, broadcast, maximum
from cs_systems.model.parallel._sender import Sender

Bucket = list[nn.Parameter]


def one_each(params: Sequence[nn.Parameter]) -> list[Bucket]:
    """Return one bucket per parameter, the last registered first, because backward reaches it first."""
    return [[p] for p in reversed(params)]


def by_size(params: Sequence[nn.Parameter], size_bytes: float, last_bytes: float | None = None) -> list[Bucket]:
    """Return buckets of one dtype and device, closed by the parameter that fills them, the last registered first.

    last_bytes: the size at which the last bucket is closed, which is sent without overlap. Each bucket may be twice as
        large as the next one, up to size_bytes. None means that all have the same limit.
    """
    done: list[Bucket] = []
    open_buckets: dict[Any, Bucket] = {}
    full_at: dict[Any, float] = {}
    for p in reversed(params) if last_bytes is None else params:
        kind = p.dtype, p.device
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(p)
        limit = full_at.get(kind, size_bytes if last_bytes is None else last_bytes)
        if sum(q.nbytes for q in bucket) >= min(limit, size_bytes):
            done.append(open_buckets.pop(kind))
            full_at[kind] = 2 * limit
    done += open_buckets.values()
    return done if last_bytes is None else [bucket[::-1] for bucket in reversed(done)]


def refuse_unfrozen(frozen: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError if a parameter that was frozen when the model was wrapped requires a gradient now."""
    if unfrozen := [name for name, p in frozen.items() if p.requires_grad]:
        raise RuntimeError(
            f"parameter {unfrozen[0]} requires a gradient, but was frozen when the model was wrapped; unfreeze it "
            "before the model is wrapped"
        )


def check_same_parameters(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank if one has other parameters or buffers than rank 0.

    The message names the first difference.

    group: the ranks to compare; all by default. The message gives their ranks in the whole job.
    """
    mine = [
        f"{kind} {name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        f"{' frozen' if kind == 'parameter' and not x.requires_grad else ''}"
        for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, x in named
    ]
    all_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(all_ranks, mine, group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for rank, theirs in zip(ranks, all_ranks, strict=True):
        for here, there in zip_longest(all_ranks[0], theirs, fillvalue="nothing"):
            if here != there:
                raise ValueError(
                    f"rank {rank} has a different model from rank {ranks[0]}: {there} instead of {here} "
                    f"({len(theirs)} and {len(all_ranks[0])} tensors in all); build the same "
                    "model, in the same order, on every rank"
                )


def refuse_assigning(module: nn.Module) -> None:
    """Make load_state_dict(assign=True) raise RuntimeError, for the module and each module inside it.

    Wrappers send and shard the current parameters; newly assigned ones would stay different on each rank.
    """
    for m in module.modules():
        m.register_load_state_dict_pre_hook(_refuse_assigned)


def _refuse_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "load_state_dict(assign=True) would replace the wrapped parameters; load without assign, or before "
            "the model is wrapped"
        )


@torch.no_grad()
def broadcast_from_rank_0(module: nn.Module, group: ProcessGroup | None = None) -> None:
    """Copy the parameters and buffers of rank 0 to every rank."""
    for x in [*module.parameters(), *module.buffers()]:
        dense = x.detach().contiguous()
        broadcast(dense, 0, group).wait()
        if dense.data_ptr() != x.data_ptr():
            x.copy_(dense)


class DataParallel(nn.Module):
    """Wrapper that averages a module's gradients over the ranks.

    Every rank creates it, and then calls the same methods in the same order.

    buckets: function that divides the trainable parameters into buckets, one per all-reduce, in sending order.
    overlap: send a bucket as soon as backward has filled it, instead of all after backward.
    group: the ranks that average; all by default.
    send_thread: a separate thread starts the collectives of backward, all of them before backward ends. Do not use it
        if the model itself (synchronised batch norm) or another group of ranks also sends during backward: the order
        of the two would differ from rank to rank, and they may then deadlock, or receive each other's data.

    The first backward on rank 0 decides the order in which later steps send buckets. Raises ValueError if the ranks
    have different models.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Callable[[Sequence[nn.Parameter]], list[Bucket]],
        *,
        overlap: bool,
        group: ProcessGroup | None = None,
        send_thread: bool = False,
    ) -> None:
        super().__init__()
        check_same_parameters(module, group)
        broadcast_from_rank_0(module, group)
        refuse_assigning(module)
        self._group = group
        self.module = module
        self._params = [p for p in module.parameters() if p.requires_grad]
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._buckets = buckets(self._params)
        averaging = {device: Averaging(group, device) for device in {p.device for p in self._params}}
        self._average = [averaging[bucket[0].device] for bucket in self._buckets]
        self._order = list(range(len(self._buckets)))
        self._order_is_learned = not overlap
        self._syncing = True
        self._everything = torch.ones(len(self._params), dtype=torch.uint8, device=self._device())
        self._sender = Sender(self._device()) if send_thread and overlap else None
        self._forget()
        if overlap:
            for index, bucket in enumerate(self._buckets):
                for p in bucket:
                    p.register_post_accumulate_grad_hook(partial(_gradient_is_ready, weakref.ref(self), index))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank: backward inside the block adds to local gradients and sends nothing."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Send the remaining buckets and wait, so that `.grad` of every parameter is the mean over the ranks.

        Raises RuntimeError if a parameter that was frozen when the model was wrapped requires a gradient now.
        """
        refuse_unfrozen(self._frozen)
        self._wait_for_sender()
        while self._unsent:
            self._send(self._unsent.popleft())
        present = self._presence()
        # last on every rank, because a rank that used all parameters sent its buckets during backward
        presence = maximum(present, self._group) if len(present) else None
        for handle, _ in self._in_flight:
            handle.wait()
        if presence is not None:
            presence.wait()
        if self._absent:  # only ranks that lack a gradient read the result, because reading waits for the device
            used = dict(zip(self._params, present.tolist(), strict=True))
            for p in self._absent:
                if not used[p]:
                    self._drop(p)
        if not self._order_is_learned:
            self._learn_order()
        self._forget()

    def _wait_for_sender(self) -> None:
        """Wait for the sender's jobs of a backward that has failed."""
        if self._sender is not None and self._sender.in_backward:
            self._sender.finish()

    def _device(self) -> torch.device:
        return next((p.device for p in self._params), torch.device("cpu"))

    def _presence(self) -> Tensor:
        """Return (parameters,) uint8: 1 for parameters with a gradient on this rank.

        A tensor of ones stays the same under a maximum, so it is kept and reused.
        """
        if not self._absent:
            return self._everything
        missing = set(self._absent)
        return torch.tensor([p not in missing for p in self._params], dtype=torch.uint8, device=self._device())

    def _forget(self) -> None:
        self._pending = [len(bucket) for bucket in self._buckets]
        self._ready: list[int] = []
        self._unsent = deque(self._order)
        self._absent: list[nn.Parameter] = []  # parameters with zeros sent instead of a gradient
        self._in_flight: list[tuple[Any, Any]] = []

    def _send(self, index: int) -> None:
        grads = []
        for p in self._buckets[index]:
            grad = p.grad
            if grad is None:
                self._absent.append(p)
                grad = p.grad = torch.zeros_like(p, memory_format=torch.contiguous_format)
            elif not grad.is_contiguous() or _is_shared(grad):
                grad = p.grad = grad.clone(memory_format=torch.contiguous_format)
            grads.append(grad)
        self._in_flight.append(self._start(index, grads))

    def _start(self, index: int, grads: list[Tensor]) -> tuple[Any, Any]:
        """Start averaging one bucket in place; return (handle, tensors that must live until it has ended).

        grads: the contiguous gradients of its parameters.
        """
        return self._average[index](grads), grads

    def _drop(self, p: nn.Parameter) -> None:
        """Remove the gradient of a parameter that no rank used."""
        p.grad = None

    def _learn_order(self) -> None:
        late = [index for index in self._order if index not in set(self._ready)]
        order = torch.tensor(self._ready + late, device=self._device())
        broadcast(order, 0, self._group).wait()
        self._order = order.tolist()
        self._order_is_learned = True


def _gradient_is_ready(wrapper: Callable[[], DataParallel | None], index: int, p: nn.Parameter) -> None:
    """Count one gradient of a bucket, and send the complete buckets.

    This hook runs for each parameter in each backward. The device may wait for the host meanwhile, so the hook sets no
    attribute of the wrapper, because in `nn.Module` that takes longer than everything else here. It has only a weak
    reference to the wrapper: the garbage collector does not see references from a tensor's hooks, and would never free
    a model to which its own hooks refer.
    """
    of = wrapper()
    if of is None or not of._syncing:
        return
    pending, unsent = of._pending, of._unsent
    pending[index] -= 1
    if pending[index] < 0:
        of._wait_for_sender()  # code that runs after the error may also send
        raise RuntimeError(
            "a parameter got a second gradient before finish_gradient_synchronization(); call "
            "finish_gradient_synchronization() after each backward. To accumulate gradients, run every backward but "
            "the last under no_sync(). After a backward that failed on all ranks, call "
            "finish_gradient_synchronization() and zero_grad() first. If a single backward did this, use checkpoints "
            "with use_reentrant=False"
        )
    if pending[index] == 0:
        of._ready.append(index)
    sender = of._sender
    while unsent and pending[unsent[0]] == 0:
        if sender is None:
            of._send(unsent.popleft())
        else:
            if not sender.in_backward:
                sender.join_backward()
            sender.put(of._send, unsent.popleft())


def _is_shared(grad: Tensor) -> bool:
    """Return whether another tensor shares the memory of `grad`, which is averaged in place.

    Autograd gives the same gradient tensor to two parameters if they are added in views of the same shape.
    """
    storage = grad.untyped_storage()
    its_own = 2  # references that the gradient and `storage` hold themselves
    return storage.nbytes() == grad.nbytes and torch._C._storage_Use_Count(storage._cdata) > its_own


def finish_gradients(model: nn.Module) -> None:
    """Finish the gradient synchronization of the model; a hook for ParallelStrategy."""
    assert isinstance(model, DataParallel)
    model.finish_gradient_synchronization()
