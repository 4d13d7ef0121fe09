"""Optimizer state sharded by whole parameters (Rajbhandari et al. 2020, ZeRO stage 1, P_os).

Each parameter has one owner; only the owner keeps its state and steps it, then broadcasts the result: Ψ (N−1)/N bytes
sent per rank on average, in addition to 2 Ψ (N−1)/N for averaging the gradients. Each rank has 1/N of the optimizer
state, as evenly as whole parameters allow. (Flat shards with reduce-scatter and all-gather need 2 Ψ in total.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_systems.formulas.communication import owners_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import broadcast


class ShardedOptimizer(torch.optim.Optimizer):
    """Optimizer that steps like `optimizer_cls(params, **kwargs)`, with the state of each parameter on only one rank.

    Gradients must be averaged before `step`. Every rank must make it with the same parameters in the same order, and
    call `step`, `add_param_group`, `state_dict` and `load_state_dict` together. `state` is this rank's part.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        **kwargs: Any,
    ) -> None:
        self._cls, self._options = optimizer_cls, kwargs
        self._owner: dict[nn.Parameter, int] = {}
        self._owned_bytes = [0] * dist.get_world_size()
        self._local: torch.optim.Optimizer | None = None
        super().__init__(params, dict(kwargs))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and assign an owner to each parameter.

        The largest parameters come first; the owner is the rank that owns the fewest bytes so far.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._assign(group["params"])
        local_group = {**group, "params": [part for p in group["params"] if (part := self._part(p)) is not None]}
        if self._local is None:
            self._local = self._cls([local_group], **self._options)
        else:
            self._local.add_param_group(local_group)
        self.state = self._local.state
        for key, value in self._local.param_groups[-1].items():
            group.setdefault(key, value)  # a scheduler reads the defaults of optimizer_cls here

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the owned parameters, then broadcast them to all ranks. Returns the result of `closure`, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._local is not None
        for group, local_group in zip(self.param_groups, self._local.param_groups, strict=True):
            local_group.update({key: value for key, value in group.items() if key != "params"})
        self._step_and_share(self._local)
        return loss

    def _step_and_share(self, local: torch.optim.Optimizer) -> None:
        local.step()
        self._share()

    def _assign(self, params: list[nn.Parameter]) -> None:
        """Assign an owner to each parameter."""
        for p in sorted(params, key=lambda p: -p.nbytes):  # a stable sort, so the same on every rank
            rank = self._owned_bytes.index(min(self._owned_bytes))
            self._owner[p] = rank
            self._owned_bytes[rank] += p.nbytes if p.requires_grad else 0  # a frozen parameter has no state

    def _part(self, p: nn.Parameter) -> Tensor | None:
        """Return the part of `p` that this rank steps."""
        return p if self._owner[p] == dist.get_rank() else None

    def _part_of_state(self, p: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the whole state of `p` that this rank keeps."""
        return state

    def _share(self) -> None:
        """Broadcast the stepped parameters to all ranks."""
        sent = []
        for p, owner in self._owner.items():
            if p.requires_grad and p.numel():
                dense = p.detach().contiguous()
                sent.append((broadcast(dense, owner), p, dense))
        for handle, p, dense in sent:
            handle.wait()
            if dense.data_ptr() != p.data_ptr():
                p.copy_(dense)

    def state_dict(self) -> dict[str, Any]:
        """Return the same state_dict as in one process, on every rank, in host memory. All ranks must call it."""
        params = [p for group in self.param_groups for p in group["params"]]
        number = {p: i for i, p in enumerate(params)}
        groups = [
            {key: value.cpu().clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            | {"params": [number[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        return {"state": dict(sorted(self._whole_state(params).items())), "param_groups": groups}

    def _whole_state(self, params: list[nn.Parameter]) -> dict[int, dict[str, Any]]:
        """Return a map from parameter number to its whole state, gathered from the ranks."""
        own = {i: self.state[p] for i, p in enumerate(params) if p in self.state}
        parts: list[dict[int, dict[str, Any]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, {i: {k: _small(v) for k, v in values.items()} for i, values in own.items()})
        state = {i: values for part in parts for i, values in part.items()}
        for i in sorted(state):
            for key, value in state[i].items():
                if isinstance(value, _Large):
                    tensor = own[i][key].contiguous() if i in own else value.empty(params[i].device)
                    broadcast(tensor, self._owner[params[i]]).wait()
                    state[i][key] = tensor.cpu().clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a state_dict of one process (or of any number of ranks).

        Raises ValueError if its groups differ from this optimizer's.
        """
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        if theirs != (ours := [len(group["params"]) for group in self.param_groups]):
            raise ValueError(
                f"the state_dict has parameter groups of the sizes {theirs}, but this optimizer has {ours}; make "
                "this optimizer with the same parameter groups as the one that was saved"
            )
        assert self._local is not None
        state, groups, count = {}, [], 0
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            start = count
            for index, p in zip(saved["params"], group["params"], strict=True):
                if self._part(p) is not None:
                    if index in state_dict["state"]:
                        state[count] = self._part_of_state(p, state_dict["state"][index])
                    count += 1
            groups.append({**saved, "params": list(range(start, count))})
        self._local.load_state_dict({"state": state, "param_groups": groups})
        self.state = self._local.state
        for group, local_group in zip(self.param_groups, self._local.param_groups, strict=True):
            group.update({key: value for key, value in local_group.items() if key != "params"})


class _Large:
    """Placeholder for a tensor that is broadcast separately, while the rest of the state is gathered as one object."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _small(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.cpu().clone() if value.numel() <= 1 else _Large(value)


STRATEGY = ParallelStrategy(
    splits=frozenset({"optimizer"}),
    make_optimizer=ShardedOptimizer,
    sent_bytes=owners_bytes,
)
