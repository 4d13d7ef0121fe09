"""Training step of BasicTransformerLM, or its first phases: forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs_systems.analysis.comparison.own_code import OwnCodeRow
from cs_systems.config import Mode, Phase, Precision, RunConfig
from cs_systems.core import recipes
from cs_systems.core.checkpoint_plan import segments
from cs_systems.core.optimizers import USUAL, optimizer
from cs_systems.core.plugins import is_foreign
from cs_systems.formulas import cost
from cs_systems.formulas.communication import Payload, payload, tensor_rank_cost
from cs_systems.formulas.cost import COMPUTE_BYTES, PARAMETER_BYTES
from cs_systems.formulas.memory import model as memory_model
from cs_systems.formulas.memory.ranks import step_memory_of_a_rank
from cs_systems.machine import process_group
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, _graph
from cs_systems.measure.workloads._calls import COMPUTE_DTYPES, check_backend, check_output
from cs_systems.measure.workloads._own_code import attention_row
from cs_systems.measure.workloads._training import Training, clip_unavailable, compile_blocks, compiled
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.training import checkpointing, fp8, parts, triton_operators
from cs_systems.model.training.data import random_batches
from cs_systems.model.training.losses import loss_function
from cs_systems.model.training.master_adamw import MasterAdamW
from cs_systems.model.training.parts import Update
from cs_systems.model.transformer import BasicTransformerLM
from cs_systems.record import Ran


class TrainStep(Training):
    """Training step on parameters, tokens and targets that come from `config.seed`.

    Each rank has tokens of its own, except that ranks that divide the blocks of one model among themselves share
    theirs.
    """

    def __init__(self, cell: Cell, device: Device) -> None:
        self.preflight(cell, device)
        config, self.backend = cell.config, cell.attention
        torch.manual_seed(config.seed)
        with device.torch:
            model = BasicTransformerLM(config.model, self.backend)
            shape = (config.batch_size, config.tokens_per_sequence)
            rank, divided = cell.strategy.part_of_batch(process_group.rank(), process_group.size())
            if rank:
                torch.manual_seed(config.seed + rank)
            self.tokens = torch.randint(config.model.vocab_size, shape)
            self.targets = torch.randint(config.model.vocab_size, shape)
        self.next_batch = None
        if config.data != "fixed":
            size = config.model.vocab_size
            self.next_batch = random_batches(config.data, size, shape, device.torch, config.seed, rank)
        chosen = cell.parts.values()
        parts.apply(chosen, model)
        self.head_loss = next((part.head_loss for part in chosen if part.head_loss), None)
        self.loss_function = loss_function(config.loss_function)
        self.update: Update | None = None
        if config.precision is Precision.BF16_PURE:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        # lm_head stays in higher precision, as usual, because fp8 would round the logits
        if config.precision is Precision.FP8:
            fp8.use_fp8(model.layers)
        # the compiler must see the operators with outputs that a selective checkpoint keeps
        in_block = config.compile_scope == "block" and config.checkpoint.startswith("selective")
        if not in_block:
            checkpointing.apply_checkpointing(model, config.checkpoint)
        self.world_tokens = divided * self.tokens.numel()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.clip_norm = config.clip
        super().__init__(cell, device, model)
        if begin := next((part.during_backward for part in chosen if part.during_backward), None):
            assert isinstance(self.optimizer, MasterAdamW)
            self.update = begin(model, self.optimizer)
        if in_block:
            plan = segments(config.checkpoint, config.model.num_layers)
            checkpointing.checkpoint_forwards(model.layers, plan)
        keeps = any(part.keeps_buffers for part in chosen)
        if config.compile_scope == "block":
            with_hooks = not config.is_distributed
            compile_blocks(model.layers.children(), config.compile, with_hooks=with_hooks, keeps_buffers=keeps)
            self.run_model: Any = self.wrapped
        else:
            self.run_model = compiled(self.wrapped, config.compile, keeps_buffers=keeps)
        self.output: Tensor | None = None  # output of run_model: the logits, or the input of head_loss
        if not isinstance(self.backend, AttentionBackend):
            self._check_attention()

    @staticmethod
    def preflight(cell: Cell, device: Device) -> int | None:
        config = cell.config
        recipe = recipes.of_hopper(config)
        if recipe and device.capability() != (9, 0):
            instead = ", ".join(f"{name} {value}" for name, value in recipes.RECIPES["compiled"].options.items())
            raise Unavailable(
                f"the options of recipe {recipe} require a Hopper GPU; use those of recipe compiled instead: {instead}"
            )
        call = _attention_call(config, device)
        backend = check_backend(cell, device, call)
        if reason := checkpointing.unavailable(config, backend):
            raise Unavailable(reason)
        for reason in (
            parts.unavailable(config, cell.parts),
            _graph.unavailable(config, device),
            _options_unavailable(cell),
        ):
            if reason:
                raise Unavailable(reason)
        if config.precision is Precision.FP8:
            sizes = {"d_model": config.model.d_model, "d_ff": config.model.d_ff}
            if reason := fp8.misfit(sizes | {"batch × context": config.batch_size * config.tokens_per_sequence}):
                raise Unavailable(reason)
        strategy = cell.strategy
        # no formula covers tensor-parallel blocks, parts other than the plain ones, a graph's own memory, or the user's
        # own code
        is_plain = not config.parts and config.graph == "none" and not {*config.own_code} - {"attention"}
        if backend is None or not is_plain or "features" in strategy.splits:
            return None
        known = replace(config, device=device.torch.type, precision=config.computes_in)
        return _predicted_bytes(known, backend.algorithm(call), strategy)

    def _check_attention(self) -> None:
        """Raise ConfigError if the user's own attention function returns no tensor of the shape of q."""
        c, call = self.config, _attention_call(self.config, self.device)
        shape = (c.batch_size, c.model.num_heads, c.tokens_per_sequence, c.model.d_head)
        dtype = getattr(torch, call.dtype)
        leaves = [torch.zeros(shape, dtype=dtype, device=self.device.torch, requires_grad=call.needs_backward)] * 3
        check_output(c.attention, partial(self.backend, causal=True), leaves, shape)

    def prepare(self) -> None:
        self.output = None
        super().prepare()

    def _phases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        if self.next_batch is not None:
            yield Phase.INPUT, self._fetch
        yield from super()._phases()

    def _fetch(self) -> None:
        assert self.next_batch is not None
        self.tokens, self.targets = self.next_batch()

    def _forward(self) -> None:
        with torch.set_grad_enabled(self._keeps_graph), self.device.autocast(self.config.precision):
            self.strategy.before_forward(self.wrapped)
            options = {} if self.head_loss is None else {"with_head": False}
            self.output = self.run_model(self.tokens, **options)

    def _compute_loss(self) -> None:
        assert self.output is not None
        with self.device.autocast(self.config.precision):
            if self.head_loss is None:
                self.loss = self.loss_function(self.output, self.targets)
            else:
                head: Any = self.model.lm_head
                weight = head.weight  # the whole parameter: a strategy that shards it sets this attribute
                self.loss = self.head_loss(self.output.flatten(0, -2), weight, self.targets.flatten())

    def _backward(self) -> None:
        if self.update:
            self.update.begin()
        super()._backward()

    def _update(self) -> None:
        if self.update:
            self.update.finish()
        else:
            super()._update()

    def _own_code(self) -> list[OwnCodeRow]:
        rows = super()._own_code()
        if isinstance(self.backend, AttentionBackend):
            return rows
        return [*rows, attention_row(self.config.attention, self.backend, _attention_call(self.config, self.device))]

    def payload(self) -> Payload:
        c = self.config
        return payload(c.model, self.tokens.numel(), PARAMETER_BYTES[c.precision], COMPUTE_BYTES[c.computes_in])

    def cost(self) -> Mapping[str, cost.PhaseCost] | None:
        if not isinstance(self.backend, AttentionBackend):
            return None
        c = self.config
        algorithm = self.backend.algorithm(_attention_call(c, self.device))
        tokens = c.tokens_per_sequence
        whole = cost.step_cost(
            c.model,
            c.batch_size,
            tokens,
            c.mode,
            algorithm,
            c.computes_in,
            c.checkpoint,
            head_in_loss=self.head_loss is not None,
            update_bytes=cost.bytes_of_update(c.optimizer, c.precision),
        )
        if is_foreign(c.optimizer) and Phase.OPTIMIZER in whole:
            whole[Phase.OPTIMIZER] = replace(whole[Phase.OPTIMIZER], bytes=None)
        if is_foreign(c.loss_function) and Phase.LOSS in whole:
            whole[Phase.LOSS] = replace(whole[Phase.LOSS], bytes=None)
        if self.update:
            updates = whole[Phase.OPTIMIZER]
            whole[Phase.BACKWARD] = cost.total([whole[Phase.BACKWARD], updates])
            whole[Phase.OPTIMIZER] = replace(updates, bytes=0)
        if c.graph != "none":
            return {Phase.GRAPH: cost.total(whole.values())}
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


def _options_unavailable(cell: Cell) -> str | None:
    config = cell.config
    has_master_weights = optimizer(config.optimizer).has_master_weights
    if has_master_weights and config.precision is not Precision.BF16_PURE:
        return (
            f"optimizer {config.optimizer} keeps master weights of bf16 parameters; use precision bf16-pure, or "
            f"optimizer {USUAL}"
        )
    if has_master_weights and (reason := triton_operators.unavailable_on_gpu(config, f"use {USUAL}")):
        return f"optimizer {config.optimizer}: {reason}"
    if is_foreign(config.loss_function) and (own := [name for name, part in cell.parts.items() if part.head_loss]):
        return f"part {own[0]} computes the loss itself; leave out {own[0]}, or loss_function"
    if config.clip is not None and (reason := _clip_unavailable(cell)):
        return reason
    if config.compile_scope == "block" and config.is_distributed and "features" in cell.strategy.splits:
        return (
            f"strategy {config.strategy} divides each block over ranks, which compile_scope block does not support; "
            "use compile_scope model"
        )
    return None


def _clip_unavailable(cell: Cell) -> str | None:
    if early := [name for name, part in cell.parts.items() if part.during_backward]:
        return f"clip requires all gradients before the update, but {early[0]} updates in backward; leave out one"
    return clip_unavailable("clip", cell)


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
        gradient_copies=strategy.gradient_copies,
    ).peak_bytes


WORKLOAD = TrainStep
