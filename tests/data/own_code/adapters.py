"""Functions by the names of a course's adapters, over code that they import when they are called."""

import torch


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    from student import DDP

    return DDP(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float) -> torch.nn.Module:
    from student import Bucketed

    return Bucketed(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    assert ddp_model.begun == 1, "the function before each forward was not called"
    ddp_model.begun = 0
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    assert callable(optimizer.step)
    ddp_model.begun = getattr(ddp_model, "begun", 0) + 1


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    from student import FSDP

    return FSDP(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return fsdp_model.gather_full_params()


def get_adamw_cls() -> type[torch.optim.Optimizer]:
    return torch.optim.AdamW


def run_cross_entropy(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(inputs, targets)


def get_sharded_optimizer(params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> torch.optim.Optimizer:
    from student import ShardedOptimizer

    return ShardedOptimizer(params, optimizer_cls, **kwargs)
