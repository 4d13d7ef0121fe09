"""Predicted memory of one attention call: the tensors alive at each instant that may be the peak."""

from __future__ import annotations

from operator import itemgetter

from cs_systems.config import AttentionShape, Mode
from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.formulas.memory.allocator import CUBLAS_WORKSPACE_BYTES
from cs_systems.formulas.memory.model import MemoryPrediction


def attention_memory(
    shape: AttentionShape,
    mode: Mode,
    dtype_bytes: int,
    algorithm: AttentionAlgorithm,
    *,
    packed: bool = False,
    cuda: bool = False,
) -> MemoryPrediction:
    """Return the memory of one attention call at its peak, inputs included, outside autocast.

    Args:
        shape: shape of the call.
        mode: `forward` keeps no graph; `backward` runs over a graph that it retains.
        dtype_bytes: bytes of one element.
        algorithm: the attention implementation.
        packed: q, k and v are views of one (batch, seq, 3, heads, d_head) tensor. Products over a full matrix copy
            them, and their gradients are gathered into one tensor at the end.
        cuda: include the workspaces of cuBLAS if the algorithm calls it: one in forward and one in backward's thread,
            each held from its first call on.
    """
    rows = shape.batch * shape.heads * shape.seq
    q = rows * shape.d_head * dtype_bytes
    k = shape.batch * shape.kv_heads * shape.key_length * shape.d_head * dtype_bytes
    inputs, tiled = q + 2 * k, algorithm.block_q is not None
    k_copy = k * shape.heads // shape.kv_heads if not tiled and (packed or shape.kv_heads < shape.heads) else 0
    mask = shape.seq * shape.key_length if not tiled and shape.causal else 0
    matrix = rows * shape.key_length * dtype_bytes
    in_forward, kept, in_backward = (round(count * matrix) + mask for count in algorithm.score_matrices)

    saved = 4 * rows if tiled else q + k_copy  # the log-sum-exp, or the scaled query and the copy of the key
    graph = mode is not Mode.FORWARD
    queries = shape.batch * shape.heads, shape.seq
    tiled_workspace = 4 * algorithm.padded_rows(*queries) + algorithm.dq_accumulator(*queries, shape.d_head)
    if algorithm.copies_by_head and shape.heads > 1 and not packed:
        tiled_workspace += 2 * q
    retained = k_copy if mode is Mode.BACKWARD else 0  # the copy of the value
    instants = {
        "forward": {
            "inputs": inputs,
            "output": q,
            "saved": (saved if graph or tiled else 0) + k_copy,
            "attention_scores": in_forward,
        }
    }
    if graph:
        outputs = {"inputs": inputs, "output": 2 * q}  # the output and its gradient
        instants["backward"] = outputs | {
            "saved": saved + retained,
            "attention_scores": in_backward,
            "gradients": inputs if tiled else k_copy or k,
            "workspace": tiled_workspace if tiled else 0,
        }
        instants["backward: end"] = outputs | {
            "saved": saved + retained if mode is Mode.BACKWARD else 0,
            "attention_scores": kept if mode is Mode.BACKWARD else 0,
            "gradients": inputs,
            "workspace": max(inputs if packed else 0, 0 if tiled else q + matrix),  # or the scaled query's gradient
        }
    if cuda and algorithm.torch_matmul:
        for name, instant in instants.items():
            instant["cublas_workspaces"] = (1 if name == "forward" else 2) * CUBLAS_WORKSPACE_BYTES
    candidates = {"attention scores": 0 if tiled else matrix, "qkv" if packed else "q": inputs if packed else q}
    return MemoryPrediction(instants, max(candidates.items(), key=itemgetter(1)))
