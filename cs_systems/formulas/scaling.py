"""How long a training step takes on N GPUs by strategy: a closed form, and a simulation of its streams.

A rank computes each block's forward and backward at the rate that one GPU reaches, and sends what `parallel_cost` says
of a step, block by block. A collective over r ranks takes α log₂ r + sent/β (Hockney 1994; latency as a tree's), β
being busbw: inside a node the link's, across nodes what a node's network leaves to each of the groups that use it at
the same time. Overlap is perfect: streams do not slow each other down.

- data parallel: each block's gradients are averaged behind the rest of backward.
- fully sharded: a block is gathered while the one before it computes (one ahead, as `fsdp` does), again in backward,
  where its gradients are reduce-scattered behind the next; embedding, norm and head are gathered once a step.
- tensor parallel (within each of them): attention and feed-forward wait for an all-reduce each, forward and backward.
  Embedding and head are computed whole on every rank.

The closed form is that of the roofline, phase by phase: max(computing, sending), with nothing lost where one must wait
for the other to begin (Austin et al. 2025, "How to Scale Your Model", give the same bounds by layer). The simulation
has these ends: the first gathering, the last reduction, and a link that is kept waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cs_systems.config import AttentionShape, ModelConfig
from cs_systems.formulas.communication import all_reduce_bytes, shard_bytes
from cs_systems.formulas.cost import block_parameter_count, credited_attention_flops
from cs_systems.formulas.streams import Timeline

COMPUTE, DATA, TENSOR = "compute", "data", "tensor"  # streams: one for each of the two communicators


class Sharing(StrEnum):
    """What the data-parallel ranks do with what each has: average gradients, or shard everything."""

    AVERAGED = "ddp"
    SHARDED = "fsdp"


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs.

    flops_per_s: model FLOPs over the time of forward and backward on one GPU.
    link_bytes_per_s: busbw between the GPUs of a node. network_bytes_per_s: of a node to all others, in one direction,
        its GPUs together. latency_s: of a collective between two ranks.
    """

    flops_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    latency_s: float
    gpus_per_node: int = 8

    def bandwidth_bytes_per_s(self, ranks: int, stride: int = 1) -> float:
        """busbw of a group of every `stride`-th GPU, of `stride` such groups that send at the same time."""
        if ranks * stride <= self.gpus_per_node:
            return self.link_bytes_per_s
        return min(self.link_bytes_per_s, self.network_bytes_per_s / min(stride, self.gpus_per_node))

    def collective_s(self, sent_bytes: float, ranks: int, stride: int = 1) -> float:
        """sent_bytes: by each rank, as `parallel_cost` counts them."""
        if ranks == 1:
            return 0.0
        return self.latency_s * math.log2(ranks) + sent_bytes / self.bandwidth_bytes_per_s(ranks, stride)


@dataclass(frozen=True)
class Layout:
    """dp × tp ranks; a tensor-parallel group is neighbours."""

    sharing: Sharing
    dp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        names = [self.sharing.value] * (self.dp > 1 or self.tp == 1) + ["tp"] * (self.tp > 1)
        return "+".join(names)


@dataclass(frozen=True)
class Step:
    """Seconds of the parts of one rank's step; 0 is a part that its layout does not have.

    block_s, head_s: computing of one block and of the head in forward; backward takes twice that.
    tensor_s: the all-reduces of one block in forward; as much in backward.
    gather_s, reduce_s: of the parameters and of the gradients of one block. gather_rest_s, reduce_rest_s: of what is in
        no block, once a step; of it reduce_head_s is sent as soon as the head's gradient is there.
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
        """Computing alone."""
        return self.blocks * self.block_s + self.head_s

    @property
    def sent_s(self) -> tuple[float, float]:
        """Of the data-parallel collectives in forward and in backward."""
        gather = self.blocks * self.gather_s
        reduce = self.blocks * self.reduce_s + self.reduce_head_s + self.reduce_rest_s
        return gather + self.gather_rest_s, gather + reduce

    def closed_form_s(self) -> float:
        """Of each phase the longer of computing and sending."""
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

    def _blocks(self, line: Timeline, phase: str, order: range, gather_after: int, compute_after: int) -> int:
        """The blocks of one phase, each gathered while the one before it computes; returns the task that ends them."""

        def gather(number: int, after: int) -> int:
            # What need not be gathered must not wait for its turn on the stream.
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
    """(one block's, the head's) model FLOPs of forward."""
    tokens, d = rows * seq_len, model.d_model
    attention = rows * credited_attention_flops(AttentionShape(1, model.num_heads, seq_len, model.d_head, causal=True))
    return 2 * tokens * (4 * d * d + 3 * d * model.d_ff) + attention, 2 * tokens * d * model.vocab_size


def one_gpu_s(model: ModelConfig, rows: float, seq_len: int, cluster: Cluster) -> float:
    """Forward and backward of so many rows on one GPU."""
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
    activation_bytes: int = 2,
    optimizer_s: float = 0.0,
) -> Step:
    """The step of a rank whose data-parallel part of the batch has so many rows.

    parameter_bytes, activation_bytes: of an element as it is sent. optimizer_s: of all parameters on one GPU.
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
    """Over how many data-parallel ranks `rows` rows in all are spread when sending takes as long as computing, in
    closed form: of groups over many nodes, (N−1)/N = 1 and no latency.

    The backward of a block has 2 F rows/(N tp) FLOPs and sends 2 Ψ/tp bytes, averaged or sharded, so that
    N = F rows β/(Ψ C); F: FLOPs of its forward a row, Ψ: bytes of its matrices, C: FLOP/s.
    """
    block_flops, _ = forward_flops(model, rows, seq_len)
    sent = parameter_bytes * (block_parameter_count(model) - 2 * model.d_model)
    bandwidth = cluster.bandwidth_bytes_per_s(cluster.gpus_per_node + 1, tp)
    return block_flops * bandwidth / (sent * cluster.flops_per_s)


def binding_tensor_ranks(
    model: ModelConfig, rows: float, seq_len: int, cluster: Cluster, activation_bytes: int = 2
) -> float:
    """Over how many ranks of one node the all-reduces of a block take as long as its computing: of N ranks computing is
    3 F/(N C), and 4 all-reduces of n bytes 8 n (N−1)/(N β), so that N = 1 + 3 F β/(8 n C). No batch is in it."""
    block_flops, _ = forward_flops(model, rows, seq_len)
    residual = activation_bytes * rows * seq_len * model.d_model
    return 1 + 3 * block_flops * cluster.link_bytes_per_s / (8 * residual * cluster.flops_per_s)
