"""The memory that a step or an attention call needs, by formula: what is alive at each moment at which it may peak.

Counts the tensors that eager PyTorch holds: no fragmentation, no rounding of the allocator (512 bytes each), no cuBLAS
workspace (8 or 32 MiB a handle and stream), no CUDA context, and nothing for the moment inside a norm, which is below
the loss's unless the vocabulary is smaller than the model is wide. torch.compile keeps less than is predicted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

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


def step_memory(config: RunConfig, algorithm: AttentionAlgorithm) -> MemoryPrediction:
    """What a step of `config` (a training step of BasicTransformerLM, or its first phases) needs at its peak."""
    step = _Step(config, algorithm)
    if config.mode is Mode.FORWARD and not config.keep_graph:
        moments = step.forward_without_graph()
    else:
        moments = step.forward_with_graph()
    if config.mode is not Mode.FORWARD:
        moments |= step.backward()
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
    the compute dtype, once for each layer that reads it; a weight is cast once, and kept until its backward.
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
        inputs = tokens * TARGET_BYTES * 2
        rotary = 4 * model.context_length * model.d_head
        self.always = {"parameters": self.weights, "inputs": inputs + rotary}
        if config.mode is Mode.TRAIN_STEP:
            self.always["optimizer_state"] = 2 * self.weights

    def forward_without_graph(self) -> dict[str, Components]:
        """Only what one layer works on is alive, and under autocast the copies of all weights."""
        copies = self._copies(self.model.num_layers * self.layer_weights)
        # q, k, v, both rotated; then the output and, over a full matrix, a copy of v with the heads outermost.
        rotated_and_output = (6 if self.tiled else 7) * self.hidden + self.log_sum_exp
        return {
            "forward: attention": self.always
            | {
                "weight_copies": copies - self._copies(self.feed_forward_weights),
                "activations": 2 * self.residual + rotated_and_output,
                "attention_scores": self.scores_in_forward,
            },
            "forward: feed-forward": self.always
            | {"weight_copies": copies, "activations": 3 * self.residual + 3 * self.wide},
            "forward: head": self.always
            | {
                "weight_copies": copies + self._copies(self.head_weight),
                "activations": 2 * self.residual,
                "logits_and_loss": self.logits,
            },
        }

    def forward_with_graph(self) -> dict[str, Components]:
        """Activations pile up: the peak is in the last layer's attention or at the end."""
        layers, before_rotation = self.model.num_layers, 2 * self.hidden
        copies = self._copies(layers * self.layer_weights)
        return {
            "forward: attention": self.always
            | {
                "weight_copies": copies - self._copies(self.feed_forward_weights),
                "activations": self._kept(layers) - self.kept_by_feed_forward + before_rotation,
                "attention_scores": (layers - 1) * self.scores_kept + self.scores_in_forward,
            },
            "forward: head": self._all_kept() | {"logits_and_loss": self.logits},
        }

    def backward(self) -> dict[str, Components]:
        """Activations go while gradients come, by the same amounts in each layer: the peak is at one end."""
        last = self.model.num_layers - 1
        return {
            "backward: loss": self._all_kept() | {"logits_and_loss": self.logits + 3 * self.log_softmax},
            "backward: last feed-forward": self._feed_forward_backward(last),
            "backward: last attention": self._attention_backward(last),
            "backward: first feed-forward": self._feed_forward_backward(0),
            "backward: first attention": self._attention_backward(0),
            "backward: embedding": self.always
            | {"gradients": self.weights, "logits_and_loss": self.logits, "workspace": self.residual},
        }

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

    def _feed_forward_backward(self, layer: int) -> Components:
        """The gradients of w3's and w1's outputs and of their product, once its saved copy is gone."""
        later = self.model.num_layers - 1 - layer
        return self.always | {
            "weight_copies": self._copies((layer + 1) * self.layer_weights),
            "gradients": self.head_weight + later * self.layer_weights + self.feed_forward_weights // 3,
            "activations": self._kept(layer + 1),
            "attention_scores": (layer + 1) * self.scores_kept,
            "logits_and_loss": self.logits,
            "workspace": 2 * self.wide + 2 * self.residual,
        }

    def _attention_backward(self, layer: int) -> Components:
        """Beside the scores: the gradients of the residual and of what attention has given back by then.

        Over a full matrix that is the value's, and the saved value and output are gone; a tiled backward holds all that
        it saved, the output's gradient and three new ones.
        """
        later = self.model.num_layers - 1 - layer
        return self.always | {
            "weight_copies": self._copies((layer + 1) * self.layer_weights),
            "gradients": self.head_weight + later * self.layer_weights + self.feed_forward_weights,
            "activations": self._kept(layer + 1) - self.kept_by_feed_forward,
            "attention_scores": layer * self.scores_kept + self.scores_in_backward,
            "logits_and_loss": self.logits,
            "workspace": self.residual + (3 if self.tiled else -1) * self.hidden + self.dq_accumulator,
        }

    def _kept(self, layers: int) -> int:
        return layers * (self.kept_by_attention + self.kept_by_feed_forward)

    def _copies(self, weights: int) -> int:
        """Bytes of the copies that autocast makes of fp32 `weights` (bytes)."""
        return weights // 2 if self.autocast else 0

    def _all_kept(self) -> Components:
        """At the end of forward, but for the logits."""
        layers = self.model.num_layers
        return self.always | {
            "weight_copies": self._copies(layers * self.layer_weights + self.head_weight),
            "activations": self._kept(layers) + self.kept_by_head,
            "attention_scores": layers * self.scores_kept,
        }
