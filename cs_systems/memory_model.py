"""The memory that a step or an attention call needs, by formula: what is alive at each moment at which it may peak.

Counts the tensors that eager PyTorch holds: no fragmentation, no rounding of the allocator (512 bytes each), no cuBLAS
workspace (8 or 32 MiB a handle and stream), no CUDA context, and nothing for the moment inside a norm, which is below
the loss's unless the vocabulary is smaller than the model is wide. torch.compile keeps less than is predicted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

from cs_systems.checkpoint_plan import Segment, items, segments
from cs_systems.config import AttentionShape, Mode, Precision, RunConfig
from cs_systems.cost import (
    COMPUTE_BYTES,
    PARAMETER_BYTES,
    TARGET_BYTES,
    AttentionAlgorithm,
    parameter_count,
)

Components = dict[str, int]


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes alive by component at each moment that may be the peak; the largest single allocation (name, bytes)."""

    moments: dict[str, Components]
    largest_allocation: tuple[str, int]

    @property
    def peak_at(self) -> str:
        """The moment at which most is alive."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def components(self) -> Components:
        """What is alive at the peak."""
        return self.moments[self.peak_at]

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True)
class _Kept:
    """Bytes that are kept for backward."""

    activations: int = 0
    scores: int = 0
    copies: int = 0  # of weights, under autocast

    def __add__(self, other: _Kept) -> _Kept:
        return _Kept(self.activations + other.activations, self.scores + other.scores, self.copies + other.copies)


def step_memory(config: RunConfig, algorithm: AttentionAlgorithm) -> MemoryPrediction:
    """What a step of `config` (a training step of BasicTransformerLM, or its first phases) needs at its peak."""
    step = _Step(config, algorithm)
    if config.mode is Mode.FORWARD and not config.keep_graph:
        moments = step.forward_without_graph()
    else:
        moments = step.forward_with_graph()
    if config.mode is not Mode.FORWARD:
        moments |= {"loss": step.loss()} | step.backward()
    if config.mode is Mode.TRAIN_STEP:
        moments["optimizer"] = step.update()
    return MemoryPrediction(moments, step.largest_allocation())


def attention_memory(
    shape: AttentionShape, mode: Mode, dtype_bytes: int, algorithm: AttentionAlgorithm, *, packed: bool = False
) -> MemoryPrediction:
    """What one attention call needs at its peak, its inputs included, outside autocast.

    mode: `forward` keeps no graph; `backward` runs over a graph that it retains.
    packed: q, k and v are views of one (batch, seq, 3, heads, d_head) tensor: products over a full matrix copy them,
        and their gradients are gathered into one tensor at the end.
    """
    rows = shape.batch * shape.heads * shape.seq
    q = rows * shape.d_head * dtype_bytes
    k = shape.batch * shape.kv_heads * shape.key_length * shape.d_head * dtype_bytes
    inputs, tiled = q + 2 * k, algorithm.block_q is not None
    k_copy = k * shape.heads // shape.kv_heads if not tiled and (packed or shape.kv_heads < shape.heads) else 0
    mask = shape.seq * shape.key_length if not tiled and shape.causal else 0
    matrix = rows * shape.key_length * dtype_bytes
    in_forward, kept, in_backward = (round(count * matrix) + mask for count in algorithm.score_matrices)

    saved = 4 * rows if tiled else q + k_copy  # the log-sum-exp; or the scaled query and the key's copy
    graph = mode is not Mode.FORWARD
    tiled_workspace = 4 * rows + rows * shape.d_head * algorithm.dq_accumulator_bytes
    retained = k_copy if mode is Mode.BACKWARD else 0  # the value's copy
    moments = {
        "forward": {
            "inputs": inputs,
            "output": q,
            "saved": (saved if graph or tiled else 0) + k_copy,
            "attention_scores": in_forward,
        }
    }
    if graph:
        outputs = {"inputs": inputs, "output": 2 * q}  # with its gradient
        moments["backward"] = outputs | {
            "saved": saved + retained,
            "attention_scores": in_backward,
            "gradients": inputs if tiled else k_copy or k,
            "workspace": tiled_workspace if tiled else 0,
        }
        moments["backward: end"] = outputs | {
            "saved": saved + retained if mode is Mode.BACKWARD else 0,
            "attention_scores": kept if mode is Mode.BACKWARD else 0,
            "gradients": inputs,
            "workspace": max(inputs if packed else 0, 0 if tiled else q + matrix),  # or the scaled query's gradient
        }
    candidates = {"attention scores": 0 if tiled else matrix, "qkv" if packed else "q": inputs if packed else q}
    return MemoryPrediction(moments, max(candidates.items(), key=itemgetter(1)))


class _Step:
    """The sizes of one step's tensors in bytes, and which are alive when.

    Autocast leaves the parameters, the residual stream and the norms in fp32. A linear layer keeps its input cast to
    the compute dtype, once for each layer that reads it; a weight is cast once, and kept until its backward. What is
    under a checkpoint keeps the checkpoint's input (one residual) until backward computes it again; the copies of its
    weights go with the end of forward, when autocast forgets them, and are made again.
    """

    def __init__(self, config: RunConfig, algorithm: AttentionAlgorithm) -> None:
        model, precision, length = config.model, config.precision, config.tokens_per_sequence
        self.config, self.model = config, model
        self.autocast = precision in (Precision.BF16, Precision.FP16)
        element, self.parameter = COMPUTE_BYTES[precision], PARAMETER_BYTES[precision]
        tokens = config.batch_size * length

        self.hidden = tokens * model.d_model * element  # the output of a projection
        self.residual = tokens * model.d_model * self.parameter
        self.wide = tokens * model.d_ff * element  # the output of w1
        self.logits = tokens * model.vocab_size * element
        self.log_softmax = tokens * model.vocab_size * (4 if self.autocast else element)

        counts, widened = algorithm.score_matrices, algorithm.autocast_score_matrices
        if self.autocast and config.device != "cpu" and widened:
            counts = widened
        matrix = config.batch_size * model.num_heads * length**2 * element
        mask = length**2 if any(counts) else 0
        widest = 4 if counts is widened else element
        self.score_matrix = matrix // element * widest if any(counts) else 0
        self.scores_in_forward, self.scores_kept, self.scores_in_backward = (
            round(count * matrix) + mask for count in counts
        )
        self.tiled = algorithm.block_q is not None
        self.log_sum_exp = 4 * tokens * model.num_heads if self.tiled else 0
        self.dq_accumulator = tokens * model.d_model * algorithm.dq_accumulator_bytes

        # A norm keeps its input and the normalised input in fp32, and a factor for each token.
        norm = tokens * (8 * model.d_model + 4)
        readers = (3, 2) if self.autocast else (1, 1)  # of the two norms, each with a cast of its own
        # q, k, v and the input of output_proj; a tiled attention keeps its output too, which is laid out by heads.
        qkv_and_output = (5 if self.tiled else 4) * self.hidden
        self.kept_by_attention = norm + readers[0] * self.hidden + qkv_and_output + self.log_sum_exp
        self.kept_by_feed_forward = norm + readers[1] * self.hidden + 4 * self.wide
        self.kept_by_head = norm + self.hidden

        self.weights = parameter_count(model) * self.parameter
        self.head_weight = model.vocab_size * model.d_model * self.parameter
        self.feed_forward_weights = 3 * model.d_model * model.d_ff * self.parameter
        self.layer_weights = self.feed_forward_weights + 4 * model.d_model**2 * self.parameter
        self.block = _Kept(
            self.kept_by_attention + self.kept_by_feed_forward, self.scores_kept, self._copies(self.layer_weights)
        )
        self.plan = segments(config.checkpoint, model.num_layers)
        inputs = tokens * TARGET_BYTES * 2
        rotary = 4 * model.context_length * model.d_head
        self.always = {"parameters": self.weights, "inputs": inputs + rotary}
        if config.mode is Mode.TRAIN_STEP:
            self.always["optimizer_state"] = 2 * self.weights

    def forward_without_graph(self) -> dict[str, Components]:
        """Only what one layer works on is alive, and under autocast the copies of all weights."""
        copies = self._copies(self.model.num_layers * self.layer_weights)
        return self._alone("forward", _Kept(self.residual, 0, copies)) | {
            "forward: head": self.always
            | {
                "weight_copies": copies + self._copies(self.head_weight),
                "activations": 2 * self.residual,
                "logits_and_loss": self.logits,
            },
        }

    def forward_with_graph(self) -> dict[str, Components]:
        """Activations pile up: the peak is in the last layer or at the end."""
        last = self.model.num_layers - 1
        copies = self._copies(self.model.num_layers * self.layer_weights)
        if self.plan and self.plan[-1].stop > last:
            before = self._kept_before(last, items(0, last + 1, self.plan), recomputed=False)
            in_last = self._alone("forward", replace(before, copies=copies))
        else:
            kept = self._kept_before(last, items(0, last + 1, self.plan), recomputed=False)
            before_rotation = 2 * self.hidden
            in_last = {
                "forward: attention": self.always
                | {
                    "weight_copies": copies - self._copies(self.feed_forward_weights),
                    "activations": kept.activations + self.kept_by_attention + before_rotation,
                    "attention_scores": kept.scores + self.scores_in_forward,
                }
            }
        head = self._all_kept() | {"logits_and_loss": self.logits}
        return in_last | {"forward: head": head | {"weight_copies": copies + self._copies(self.head_weight)}}

    def loss(self) -> Components:
        """The log-softmax beside the logits, which under autocast are widened for it first."""
        widened = self.log_softmax if self.autocast else 0
        return self._all_kept() | {"logits_and_loss": self.logits + widened + self.log_softmax}

    def backward(self) -> dict[str, Components]:
        """Activations go while gradients come; each block's checkpoint has been computed again when its turn comes."""
        moments = {
            "backward: loss": self._all_kept() | {"logits_and_loss": self.logits + 3 * self.log_softmax},
            "backward: embedding": self.always
            | {"gradients": self.weights, "logits_and_loss": self.logits, "workspace": self.residual},
        }
        for layer in range(self.model.num_layers):
            kept = self._kept_before(layer, items(0, self.model.num_layers, self.plan), recomputed=True)
            moments[f"backward: feed-forward of block {layer}"] = self._feed_forward_backward(layer, kept)
            moments[f"backward: attention of block {layer}"] = self._attention_backward(layer, kept)
        return moments

    def update(self) -> Components:
        """AdamW: torch's foreach holds a root of the second moment for all parameters, ours for one at a time."""
        workspace = {"adamw_foreach": self.weights, "adamw": max(self.head_weight, self.feed_forward_weights // 3)}
        return self.always | {
            "gradients": self.weights,
            "logits_and_loss": self.logits,
            "workspace": workspace.get(self.config.optimizer, 0),
        }

    def largest_allocation(self) -> tuple[str, int]:
        """The largest single tensor: (its name, bytes)."""
        candidates = {
            "token_embeddings.weight": self.head_weight,
            "ffn.w1.weight": self.feed_forward_weights // 3,
            "ffn.w1 output": self.wide,
            "attention scores": self.score_matrix,
            "logits": max(self.logits, self.log_softmax if self.config.mode is not Mode.FORWARD else 0),
        }
        return max(candidates.items(), key=itemgetter(1))

    def _alone(self, phase: str, before: _Kept) -> dict[str, Components]:
        """A block that keeps nothing for backward, with `before` (its own input in it) alive."""
        # q, k, v, both rotated; then the output and, over a full matrix, a copy of v with the heads outermost.
        rotated_and_output = (6 if self.tiled else 7) * self.hidden + self.log_sum_exp
        return {
            f"{phase}: attention": self.always
            | {
                "weight_copies": before.copies - self._copies(self.feed_forward_weights),
                "activations": before.activations + self.residual + rotated_and_output,
                "attention_scores": before.scores + self.scores_in_forward,
            },
            f"{phase}: feed-forward": self.always
            | {
                "weight_copies": before.copies,
                "activations": before.activations + 2 * self.residual + 3 * self.wide,
                "attention_scores": before.scores,
            },
        }

    def _feed_forward_backward(self, layer: int, kept: _Kept) -> Components:
        """The gradients of w3's and w1's outputs and of their product, once its saved copy is gone."""
        later = self.model.num_layers - 1 - layer
        return self.always | {
            "weight_copies": kept.copies + self.block.copies,
            "gradients": self.head_weight + later * self.layer_weights + self.feed_forward_weights // 3,
            "activations": kept.activations + self.block.activations,
            "attention_scores": kept.scores + self.scores_kept,
            "logits_and_loss": self.logits,
            "workspace": 2 * self.wide + 2 * self.residual,
        }

    def _attention_backward(self, layer: int, kept: _Kept) -> Components:
        """Beside the scores: the gradients of the residual and of what attention has given back by then.

        Over a full matrix that is the value's, and the saved value and output are gone; a tiled backward holds all that
        it saved, the output's gradient and three new ones.
        """
        later = self.model.num_layers - 1 - layer
        return self.always | {
            "weight_copies": kept.copies + self.block.copies,
            "gradients": self.head_weight + later * self.layer_weights + self.feed_forward_weights,
            "activations": kept.activations + self.kept_by_attention,
            "attention_scores": kept.scores + self.scores_in_backward,
            "logits_and_loss": self.logits,
            "workspace": self.residual + (3 if self.tiled else -1) * self.hidden + self.dq_accumulator,
        }

    def _kept_before(self, layer: int, run: Iterable[int | Segment], *, recomputed: bool) -> _Kept:
        """What the blocks before `layer` keep. A checkpoint around it has been computed again, or keeps its input."""
        kept = _Kept()
        for item in run:
            if isinstance(item, int):
                if item >= layer:
                    break
                kept += self.block
            elif item.stop <= layer:
                kept += self._kept_by(item)
            else:
                if item.first <= layer:
                    inside = items(item.first, item.stop, item.inner)
                    kept += self._kept_before(layer, inside, recomputed=True) if recomputed else self._kept_by(item)
                break
        return kept

    def _kept_by(self, segment: Segment) -> _Kept:
        """The checkpoint's input, and of each block what it keeps beside: attention's output, or the linear layers'."""
        attention = self.hidden + self.log_sum_exp
        beside = {None: 0, "attention": attention, "matmul": 5 * self.hidden + 2 * self.wide}[segment.keeps]
        return _Kept(self.residual + segment.blocks * beside)

    def _copies(self, weights: int) -> int:
        """Bytes of the copies that autocast makes of fp32 `weights` (bytes)."""
        return weights // 2 if self.autocast else 0

    def _all_kept(self) -> Components:
        """At the end of forward, but for the logits."""
        layers = self.model.num_layers
        kept = self._kept_before(layers, items(0, layers, self.plan), recomputed=False)
        return self.always | {
            "weight_copies": kept.copies + self._copies(self.head_weight),
            "activations": kept.activations + self.kept_by_head,
            "attention_scores": kept.scores,
        }
