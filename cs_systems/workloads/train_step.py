"""Training step of BasicTransformerLM, or its first phases: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cs_systems.attention import AttentionBackend, AttentionCall
from cs_systems.config import Mode, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.core.rows import Ran
from cs_systems.formulas import cost
from cs_systems.formulas.communication import Payload, payload, tensor_rank_cost
from cs_systems.formulas.cost import COMPUTE_BYTES, PARAMETER_BYTES
from cs_systems.formulas.memory import model as memory_model
from cs_systems.formulas.memory.ranks import step_memory_of_a_rank
from cs_systems.machine import process_group
from cs_systems.machine.device import Device
from cs_systems.model import BasicTransformerLM
from cs_systems.parallel import ParallelStrategy
from cs_systems.training import checkpointing, fp8
from cs_systems.training.losses import cross_entropy
from cs_systems.workloads import Unavailable
from cs_systems.workloads._calls import COMPUTE_DTYPES, check_backend
from cs_systems.workloads._training import Training, compiled, strategy_of


class TrainStep(Training):
    """Training step on parameters, tokens and targets that come from `config.seed`.

    Each rank has tokens of its own, except that ranks that divide the blocks of one model among themselves share
    theirs.
    """

    def __init__(self, config: RunConfig, device: Device) -> None:
        self.preflight(config, device)
        self.backend = plugins.get("attention", config.attention)
        torch.manual_seed(config.seed)
        with device.torch:
            model = BasicTransformerLM(config.model, self.backend)
            shape = (config.batch_size, config.tokens_per_sequence)
            part, parts = strategy_of(config).part_of_batch(process_group.rank(), process_group.size())
            if part:
                torch.manual_seed(config.seed + part)
            self.tokens = torch.randint(config.model.vocab_size, shape)
            self.targets = torch.randint(config.model.vocab_size, shape)
        if config.precision is Precision.BF16_PURE:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        if config.precision is Precision.FP8:  # not lm_head, as is common: it would round the logits
            fp8.use_fp8(model.layers)
        checkpointing.apply_checkpointing(model, config.checkpoint)
        self.world_tokens = parts * self.tokens.numel()
        self.parameters = sum(p.numel() for p in model.parameters())
        super().__init__(config, device, model)
        self.run_model = compiled(self.wrapped, config.compile)
        self.logits: Tensor | None = None

    @staticmethod
    def preflight(config: RunConfig, device: Device) -> int | None:
        call = _attention_call(config, device)
        backend = check_backend(config, device, call)
        if reason := checkpointing.unavailable(config):
            raise Unavailable(reason)
        if config.precision is Precision.FP8:
            sizes = {"d_model": config.model.d_model, "d_ff": config.model.d_ff}
            if reason := fp8.misfit(sizes | {"batch × context": config.batch_size * config.tokens_per_sequence}):
                raise Unavailable(reason)
        strategy = strategy_of(config)
        if backend is None or "features" in strategy.splits:  # no formula covers tensor-parallel blocks
            return None
        known = replace(config, device=device.torch.type, precision=config.computes_in)
        return _predicted_bytes(known, backend.algorithm(call), strategy)

    def prepare(self) -> None:
        self.logits = None
        super().prepare()

    def _forward(self) -> None:
        with torch.set_grad_enabled(self._keeps_graph), self.device.autocast(self.config.precision):
            self.logits = self.run_model(self.tokens)

    def _compute_loss(self) -> None:
        assert self.logits is not None
        with self.device.autocast(self.config.precision):
            self.loss = cross_entropy(self.logits, self.targets)

    def payload(self) -> Payload:
        c = self.config
        return payload(c.model, self.tokens.numel(), PARAMETER_BYTES[c.precision], COMPUTE_BYTES[c.computes_in])

    def cost(self) -> Mapping[str, cost.PhaseCost] | None:
        if not isinstance(self.backend, AttentionBackend):
            return None
        c = self.config
        algorithm = self.backend.algorithm(_attention_call(c, self.device))
        tokens = c.tokens_per_sequence
        whole = cost.step_cost(c.model, c.batch_size, tokens, c.mode, algorithm, c.computes_in, c.checkpoint)
        if (degree := self.strategy.tp_degree or c.world_size) == 1:
            return whole
        return tensor_rank_cost(whole, c.model, c.batch_size * tokens, degree)

    def describe(self) -> Ran:
        version = self.backend.describe() if isinstance(self.backend, AttentionBackend) else None
        return {
            "attention": self.config.attention,
            "attention_version": version,
            "checkpoint": self.config.checkpoint,
            "optimizer": self.optimizer_name,
            "tokens": self.tokens.numel(),
            "world_tokens": self.world_tokens,
            "parameters": self.parameters,
            "loss": None if self.loss is None else float(self.loss.detach()),
        }


def _attention_call(config: RunConfig, device: Device) -> AttentionCall:
    length, heads = config.tokens_per_sequence, config.model.num_heads
    return AttentionCall(
        device.torch.type,
        COMPUTE_DTYPES[config.computes_in],
        config.model.d_head,
        length,
        length,
        heads,
        heads,
        causal=True,
        needs_backward=config.keep_graph or config.mode is not Mode.FORWARD,
    )


def _predicted_bytes(config: RunConfig, algorithm: cost.AttentionAlgorithm, strategy: ParallelStrategy) -> int:
    """Return the predicted peak of device memory of one rank of `config`, in bytes."""
    return step_memory_of_a_rank(
        memory_model.step_memory(config, algorithm),
        strategy.splits,
        config.world_size,
        strategy.buckets,
        gradients_in_buckets=strategy.bucket_view is not None,
    ).peak_bytes


WORKLOAD = TrainStep
