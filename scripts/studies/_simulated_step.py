"""Duration of a training step on N GPUs by strategy: a closed form, and a simulation of the streams.

A rank computes each block's forward and backward at the rate of one GPU, and sends the bytes of `communication`, block
by block. A collective over r ranks takes α log₂ r + sent/β (Hockney 1994, with the latency of a tree). β is the busbw:
inside a node, of the link; across nodes, a node's network divided by the number of groups that use it at the same time.
Overlap is perfect: streams do not slow each other down.

- data parallel: each block's gradients are averaged during the rest of backward.
- fully sharded: a block is gathered while the previous one computes (one ahead, as in `fsdp`), and again in backward,
  where its gradients are reduce-scattered during the next one; embedding, norm and head are gathered once per step.
- tensor parallel (within each of them): attention and feed-forward each wait for an all-reduce, in forward and in
  backward. Every rank computes the whole embedding and head.

The closed form is the roofline of each phase: max(computing, sending), without losses while one waits for the other to
begin (Austin et al. 2025, "How to Scale Your Model", give the same bounds by layer). The simulation includes these
losses: the first all-gather, the last reduction, and idle time of the link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from cs_systems.config import AttentionShape, ModelConfig
from cs_systems.formulas.communication import all_reduce_bytes, shard_bytes
from cs_systems.formulas.cost import block_parameter_count, credited_attention_flops
from cs_systems.formulas.scaling import LOW_BYTES

COMPUTE, DATA, TENSOR = "compute", "data", "tensor"  # names of streams; each of the two communicators has its own


class Sharing(StrEnum):
    """Data-parallel scheme of the ranks: average gradients, or shard everything."""

    AVERAGED = "ddp"
    SHARDED = "fsdp"


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs.

    flops_per_s: model FLOPs over the time of forward and backward on one GPU. link_bytes_per_s: busbw between the GPUs
    of a node. network_bytes_per_s: from a node to all others, in one direction, for all its GPUs together. latency_s:
    latency of a collective between two ranks.
    """

    flops_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    latency_s: float
    gpus_per_node: int = 8

    def bandwidth_bytes_per_s(self, ranks: int, stride: int = 1) -> float:
        """Return the busbw of a group of every `stride`-th GPU.

        `stride` such groups send at the same time.
        """
        if ranks * stride <= self.gpus_per_node:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, self.network_bytes_per_s / min(stride, self.gpus_per_node))

    def collective_s(self, sent_bytes: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a collective in which each rank sends `sent_bytes`, as in `communication`."""
        if ranks == 1:
            return 0.0
        return self.latency_s * math.log2(ranks) + sent_bytes / self.bandwidth_bytes_per_s(ranks, stride)


@dataclass(frozen=True)
class Layout:
    """Layout of dp × tp ranks; a tensor-parallel group consists of neighbouring ranks."""

    sharing: Sharing
    dp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        names = [self.sharing.value] * (self.dp > 1 or self.tp == 1) + ["tp"] * (self.tp > 1)
        return "+".join(names)


@dataclass
class Timeline:
    """Tasks on several streams, simulated: a stream runs its tasks in the order in which they were added.

    ends_s: name of a task → seconds from the first start. busy_s: stream → seconds of its tasks.
    """

    ends_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    _free_s: dict[str, float] = field(default_factory=dict)

    def add(self, stream: str, name: str, seconds: float, *after: str) -> str:
        """Add a task that waits for the earlier tasks `after`; return its name."""
        begin = max(self._free_s.get(stream, 0.0), *(self.ends_s[earlier] for earlier in after), 0.0)
        self.ends_s[name] = self._free_s[stream] = begin + seconds
        self.busy_s[stream] = self.busy_s.get(stream, 0.0) + seconds
        return name

    @property
    def makespan_s(self) -> float:
        return max(self.ends_s.values())


@dataclass(frozen=True)
class Step:
    """Seconds of each component of one rank's step; 0 where the layout has no such component.

    block_s, head_s: computation of one block and of the head in forward; backward takes twice that. tensor_s: the
    all-reduces of one block in forward; backward takes the same. gather_s, reduce_s: all-gather of the parameters, and
    reduction of the gradients, of one block. gather_rest_s, reduce_rest_s: the same for parameters outside the blocks,
    once per step. reduce_head_s: the head's share of that reduction, which starts as soon as the head's gradient is
    ready.
    """

    blocks: int
    block_s: float
    head_s: float
    tensor_s: float = 0.0
    gather_s: float = 0.0
    gather_rest_s: float = 0.0
    reduce_s: float = 0.0
    reduce_head_s: float = 0.0
    reduce_rest_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def forward_s(self) -> float:
        """Seconds of computation in forward."""
        return self.blocks * self.block_s + self.head_s

    @property
    def sent_s(self) -> tuple[float, float]:
        """Seconds of the data-parallel collectives in forward and in backward."""
        gather = self.blocks * self.gather_s
        reduce = self.blocks * self.reduce_s + self.reduce_head_s + self.reduce_rest_s
        return gather + self.gather_rest_s, gather + reduce

    def closed_form_s(self) -> float:
        """Return the seconds of the step: in each phase, the longer of computing and sending."""
        tensor = self.blocks * self.tensor_s
        forward, backward = self.sent_s
        return max(self.forward_s + tensor, forward) + max(2 * self.forward_s + tensor, backward) + self.optimizer_s

    def simulate(self) -> Timeline:
        line = Timeline()
        begin = line.add(DATA, "gather rest", self.gather_rest_s)
        end = self._blocks(line, "forward", range(self.blocks), begin, begin)
        end = line.add(COMPUTE, "forward head", self.head_s, end)
        head = line.add(COMPUTE, "backward head", 2 * self.head_s, end)
        sent = line.add(DATA, "reduce head", self.reduce_head_s, head) if self.reduce_head_s else end
        end = self._blocks(line, "backward", range(self.blocks)[::-1], end, head)
        sent = line.add(DATA, "reduce rest", self.reduce_rest_s, end)
        line.add(COMPUTE, "optimizer", self.optimizer_s, end, sent)
        return line

    def _blocks(self, line: Timeline, phase: str, order: range, gather_after: str, compute_after: str) -> str:
        """Add the blocks of one phase to the timeline and return the task that ends them.

        Each block is gathered while the previous one computes.
        """

        def gather(number: int, after: str) -> str:
            # even a task of 0 s would wait for earlier tasks on the stream
            return line.add(DATA, f"gather {number} for {phase}", self.gather_s, after) if self.gather_s else after

        gathered, end = gather(order[0], gather_after), compute_after
        for index, number in enumerate(order):
            needed = gathered
            if index + 1 < len(order):
                gathered = gather(order[index + 1], end)
            computing = self.block_s if phase == "forward" else 2 * self.block_s
            end = line.add(COMPUTE, f"{phase} {number}", computing, end, needed)
            if self.tensor_s:
                end = line.add(TENSOR, f"sum {phase} {number}", self.tensor_s, end)
            if phase == "backward" and self.reduce_s:
                line.add(DATA, f"reduce {number}", self.reduce_s, end)
        return end


def forward_flops(model: ModelConfig, rows: float, seq_len: int) -> tuple[float, float]:
    """Return the model FLOPs of forward: (one block, the head)."""
    tokens, d = rows * seq_len, model.d_model
    attention = rows * credited_attention_flops(AttentionShape(1, model.num_heads, seq_len, model.d_head, causal=True))
    return 2 * tokens * (4 * d * d + 3 * d * model.d_ff) + attention, 2 * tokens * d * model.vocab_size


def one_gpu_s(model: ModelConfig, rows: float, seq_len: int, cluster: Cluster) -> float:
    """Return the seconds of forward and backward of `rows` rows on one GPU."""
    block, head = forward_flops(model, rows, seq_len)
    return 3 * (model.num_layers * block + head) / cluster.flops_per_s


def step(
    model: ModelConfig,
    layout: Layout,
    rows: float,
    seq_len: int,
    cluster: Cluster,
    *,
    parameter_bytes: int,
    activation_bytes: int = LOW_BYTES,
    optimizer_s: float = 0.0,
) -> Step:
    """Return the step of a rank with `rows` rows in its data-parallel share of the batch.

    Args:
        model: the model.
        layout: the layout of the ranks.
        rows: rows of the batch of a data-parallel rank.
        seq_len: tokens of a row.
        cluster: the hardware.
        parameter_bytes: bytes of a parameter or gradient element as sent.
        activation_bytes: bytes of an activation element as sent.
        optimizer_s: seconds of the optimizer step of all parameters on one GPU.
    """
    block_flops, head_flops = forward_flops(model, rows, seq_len)
    norms, head = 2 * model.d_model, model.vocab_size * model.d_model
    matrices = block_parameter_count(model) - norms
    rest = 2 * head + model.d_model  # embedding, head and the last norm
    block = matrices / layout.tp + norms
    owned = (model.num_layers * block + rest) / (model.num_layers * (matrices + norms) + rest)
    residual_bytes = activation_bytes * rows * seq_len * model.d_model
    sharded = layout.sharing is Sharing.SHARDED

    def shared_s(elements: float, volume: Callable[[float, int], float]) -> float:
        return cluster.collective_s(volume(parameter_bytes * elements, layout.dp), layout.dp, layout.tp)

    return Step(
        model.num_layers,
        block_flops / layout.tp / cluster.flops_per_s,
        head_flops / cluster.flops_per_s,
        tensor_s=2 * cluster.collective_s(all_reduce_bytes(residual_bytes, layout.tp), layout.tp),
        gather_s=shared_s(block, shard_bytes) if sharded else 0.0,
        gather_rest_s=shared_s(rest, shard_bytes) if sharded else 0.0,
        reduce_s=shared_s(block, shard_bytes if sharded else all_reduce_bytes),
        reduce_head_s=0.0 if sharded else shared_s(head, all_reduce_bytes),
        reduce_rest_s=shared_s(rest, shard_bytes) if sharded else shared_s(rest - head, all_reduce_bytes),
        optimizer_s=optimizer_s * owned / (layout.dp if sharded else 1),
    )


def binding_ranks(
    model: ModelConfig, tp: int, rows: float, seq_len: int, cluster: Cluster, *, parameter_bytes: int
) -> float:
    """Return the number of data-parallel ranks at which sending takes as long as computing.

    `rows` is the whole batch, divided over the ranks. This is a closed form for groups over many nodes, where
    (N−1)/N = 1 and latency is negligible.

    The backward of a block has 2 F rows/(N tp) FLOPs and sends 2 Ψ/tp bytes, averaged or sharded, so that
    N = F rows β/(Ψ C). F is the FLOPs of its forward per row, Ψ the bytes of its matrices, and C the FLOP/s.
    """
    block_flops, _ = forward_flops(model, rows, seq_len)
    sent = parameter_bytes * (block_parameter_count(model) - 2 * model.d_model)
    bandwidth = cluster.bandwidth_bytes_per_s(cluster.gpus_per_node + 1, tp)
    return block_flops * bandwidth / (sent * cluster.flops_per_s)


def binding_tensor_ranks(model: ModelConfig, rows: float, seq_len: int, cluster: Cluster) -> float:
    """Return the number of ranks of one node at which a block's all-reduces take as long as its computation.

    On N ranks, computing takes 3 F/(N C), and 4 all-reduces of n bytes take 8 n (N−1)/(N β), so that
    N = 1 + 3 F β/(8 n C). The result does not depend on the batch.
    """
    block_flops, _ = forward_flops(model, rows, seq_len)
    residual = LOW_BYTES * rows * seq_len * model.d_model
    return 1 + 3 * block_flops * cluster.link_bytes_per_s / (8 * residual * cluster.flops_per_s)
