"""Parallel strategies and an FSDP in the forms that students write, right and wrong ones."""

import torch
import torch.distributed as dist
from torch import nn


class DDP(nn.Module):
    """Overlapped averaging with finish_gradient_synchronization()."""

    def __init__(self, module):
        super().__init__()
        self.module, self.handles = module, []
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.send)

    def send(self, p):
        self.handles.append((dist.all_reduce(p.grad, async_op=True), p))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for handle, p in self.handles:
            handle.wait()
            p.grad /= dist.get_world_size()
        self.handles.clear()


class Bucketed(DDP):
    def __init__(self, module, bucket_size_mb, verbose=False):
        super().__init__(module)
        self.bucket_size_mb = float(bucket_size_mb)


class Unsynchronized(DDP):
    def send(self, p):
        pass


class Summed(DDP):
    def finish_gradient_synchronization(self):
        for handle, _ in self.handles:
            handle.wait()
        self.handles.clear()


class Plain:
    """Object that calls the model, and is no module itself."""

    def __init__(self, module):
        self.module = module

    def __call__(self, *inputs):
        return self.module(*inputs)

    def __getattr__(self, name):
        return getattr(self.module, name)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def hooked(module):
    """Only registers hooks, and returns nothing."""

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(average)


def average_on_after_backward(model, optimizer):
    """Function of a step alone; it reads the parameters where the optimizer has them."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class ShardedOptimizer(torch.optim.Optimizer):
    """Each rank steps every N-th parameter, and sends it to the others."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.cls, self.options, self.owned = optimizer_cls, kwargs, None
        super().__init__(params, kwargs)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        mine = self.param_groups[-1]["params"][dist.get_rank() :: dist.get_world_size()]
        self.owned = self.cls(mine, **self.options)

    def step(self, closure=None):
        self.owned.step()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                dist.broadcast(p.data, i % dist.get_world_size())


class OwnGroups(torch.optim.Optimizer):
    """Its groups have a rank's own parameters alone, so that zero_grad() keeps the gradients of the others."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.all = [*params]
        super().__init__(self.all[dist.get_rank() :: dist.get_world_size()], kwargs)
        self.owned = optimizer_cls(self.param_groups, **kwargs)

    def step(self, closure=None):
        self.owned.step()
        for i, p in enumerate(self.all):
            dist.broadcast(p.data, i % dist.get_world_size())


class FSDP(nn.Module):
    """Rows of each matrix of the linear layers are divided; the hooks gather them around forward and backward."""

    divided = "Linear"

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.whole = module, {}
        n, rank = dist.get_world_size(), dist.get_rank()
        for p in module.parameters():
            dist.broadcast(p.data, 0)
        self.sharded = [(m, m.weight) for m in module.modules() if type(m).__name__ == self.divided]
        for m, p in self.sharded:
            p.data = p.data.chunk(n)[rank].clone()
            m.register_forward_pre_hook(lambda m, _: self.gather(m.weight))
            m.register_full_backward_pre_hook(lambda m, _: self.gather(m.weight))
            m.register_forward_hook(lambda m, *_: self.free(m.weight))
            p.register_post_accumulate_grad_hook(self.reduce)

    def gather(self, p):
        if p not in self.whole:
            parts = [torch.empty_like(p.data) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.data)
            self.whole[p] = p.data
            p.data = torch.cat(parts)

    def free(self, p):
        if p in self.whole:
            p.data = self.whole.pop(p)

    def reduce(self, p):
        grad, p.grad = p.grad, None
        self.free(p)
        dist.all_reduce(grad)
        p.grad = grad.chunk(dist.get_world_size())[dist.get_rank()].clone() / dist.get_world_size()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        sharded = {p for _, p in self.sharded}
        for p in self.module.parameters():
            if p not in sharded:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def gather_full_params(self):
        for _, p in self.sharded:
            self.gather(p)
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        for _, p in self.sharded:
            self.free(p)
        return state


class FSDPOfOthers(FSDP):
    """Looks for layers that the model does not have."""

    divided = "Dense"


class Quiet(FSDP):
    """An FSDP without a name that says so, and that gathers for itself alone."""

    gather_full_params = None


def crashes(module):
    raise RuntimeError("no rank has this")


def number(module):
    return 3


def three(a, b, c):
    return a


EMPTY = 3
made = type("Made", (DDP,), {})
