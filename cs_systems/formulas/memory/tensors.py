"""Sizes of one process's tensors in a training step, including optimizer state, and the bytes kept for backward."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from cs_systems.config import Mode, RunConfig
from cs_systems.core.checkpoint_plan import Segment, items, segments
from cs_systems.core.optimizers import optimizer
from cs_systems.formulas.cost import COMPUTE_BYTES, PARAMETER_BYTES, TARGET_BYTES, AttentionAlgorithm, parameter_count
from cs_systems.formulas.memory.allocator import CUBLAS_WORKSPACE_BYTES, rounding
from cs_systems.formulas.memory.prediction import Components


@dataclass(frozen=True)
class Kept:
    """Bytes that are kept for backward."""

    activations: int = 0
    scores: int = 0
    copies: int = 0  # copies of weights under autocast

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.activations + other.activations, self.scores + other.scores, self.copies + other.copies)


NOTHING = Kept()


class StepTensors:
    """Sizes of one step's tensors in bytes.

    Autocast leaves the parameters, the residual stream and the norms in fp32. A linear layer keeps its input cast to
    the compute dtype, once for each layer that reads it. A weight is cast once, and the copy is kept until its
    backward. A checkpoint keeps its input (one residual) until backward recomputes the rest; the copies of its weights
    are freed at the end of forward, when autocast clears its cache, and made again in backward.
    """

    def __init__(self, config: RunConfig, algorithm: AttentionAlgorithm) -> None:
        model, precision, length = config.model, config.precision, config.tokens_per_sequence
        self.config, self.model = config, model
        self.autocast = precision.is_autocast
        element, self.parameter = COMPUTE_BYTES[precision], PARAMETER_BYTES[precision]
        tokens = config.batch_size * length

        self.hidden = tokens * model.d_model * element  # the output of a projection
        self.residual = tokens * model.d_model * self.parameter
        self.wide = tokens * model.d_ff * element  # the output of w1
        self.logits = tokens * model.vocab_size * element
        self.wide_logits = tokens * model.vocab_size * (4 if self.autocast else element)
        # CUDA's autocast leaves cross_entropy's log-softmax in the dtype of the logits and widens a copy for nll_loss:
        # both are kept for backward. The CPU's autocast widens the logits.
        self.widens_log_softmax = self.autocast and config.device != "cpu"
        self.kept_by_loss = self.wide_logits + (self.logits if self.widens_log_softmax else 0)

        counts, widened = algorithm.score_matrices, algorithm.autocast_score_matrices
        self.widens_scores = self.autocast and config.device != "cpu" and widened is not None
        if self.widens_scores and widened:
            counts = widened
        matrix = config.batch_size * model.num_heads * length**2 * element
        mask = length**2 if any(counts) else 0
        widest = 4 if self.widens_scores else element
        self.score_matrix = matrix // element * widest if any(counts) else 0
        self.scores_in_forward, self.scores_kept, self.scores_in_backward = (
            round(count * matrix) + mask for count in counts
        )
        self.tiled = algorithm.block_q is not None
        self.log_sum_exp = 4 * tokens * model.num_heads if self.tiled else 0
        self.dq_accumulator = algorithm.dq_accumulator(config.batch_size * model.num_heads, length, model.d_head)

        # A norm keeps its input and the normalised input in fp32, and a factor for each token.
        norm = tokens * (8 * model.d_model + 4)
        readers = (3, 2) if self.autocast else (1, 1)  # layers that read each norm's output, each with its own cast
        # q, k, v and the input of output_proj; tiled attention also keeps its output, unless that is the same tensor.
        self.copies_output = self.tiled and not algorithm.output_by_position
        qkv_and_output = (5 if self.copies_output else 4) * self.hidden
        self.kept_by_attention = norm + readers[0] * self.hidden + qkv_and_output + self.log_sum_exp
        self.kept_by_feed_forward = norm + readers[1] * self.hidden + 4 * self.wide
        self.kept_by_head = norm + self.hidden

        self.weights = parameter_count(model) * self.parameter
        self.head_weight = model.vocab_size * model.d_model * self.parameter
        self.feed_forward_weights = 3 * model.d_model * model.d_ff * self.parameter
        self.matrices = (  # (bytes, count)
            (self.head_weight, 2),
            (self.feed_forward_weights // 3, 3 * model.num_layers),
            (model.d_model**2 * self.parameter, 4 * model.num_layers),
        )
        self.layer_weights = self.feed_forward_weights + 4 * model.d_model**2 * self.parameter
        self.block = Kept(
            self.kept_by_attention + self.kept_by_feed_forward, self.scores_kept, self.copies(self.layer_weights)
        )
        self.plan = segments(config.checkpoint, model.num_layers)
        inputs = tokens * TARGET_BYTES * 2
        rotary = 4 * model.context_length * model.d_head
        self.stateless = {"parameters": self.weights, "inputs": inputs + rotary}
        state = {"optimizer_state": self._state_bytes()} if config.mode is Mode.TRAIN_STEP else {}
        self.always = self.stateless | state

    def _state_bytes(self) -> int:
        """Return the bytes of the optimizer's state."""
        return parameter_count(self.model) * optimizer(self.config.optimizer).state_bytes(self.parameter)

    def on_device(self, alive: Components, threads: int) -> Components:
        """Return `alive` with the allocator's overhead, after `threads` threads have called cuBLAS.

        Parameters are in newly allocated memory. Later tensors reuse cached blocks that activations left, if these are
        large enough; each can be split.
        """
        if self.config.device == "cpu":
            return alive
        later = (alive.get("gradients", 0) + alive.get("optimizer_state", 0)) / self.weights
        cached = max(self.wide, self.score_matrix, self.copies(self.feed_forward_weights // 3))
        rounded = sum(
            round(rounding(size, count) * (1 + (later if size > cached else 0))) for size, count in self.matrices
        )
        return {
            "cublas_workspaces": threads * CUBLAS_WORKSPACE_BYTES,
            "rounding": rounded,
            **alive,
        }

    def largest_allocation(self) -> tuple[str, int]:
        """Return the largest single tensor: (its name, bytes)."""
        candidates = {
            "token_embeddings.weight": self.head_weight,
            "ffn.w1.weight": self.feed_forward_weights // 3,
            "ffn.w1 output": self.wide,
            "attention scores": self.score_matrix,
            "logits": max(self.logits, self.wide_logits if self.config.mode is not Mode.FORWARD else 0),
        }
        return max(candidates.items(), key=itemgetter(1))

    def kept_by_all(self) -> Kept:
        run = items(0, self.model.num_layers, self.plan)
        return sum((self.block if isinstance(item, int) else self.kept_by(item) for item in run), NOTHING)

    def kept_by(self, segment: Segment) -> Kept:
        """Return the tensors that a checkpoint keeps: its input, and the kept outputs of each block.

        These are the output of attention, the outputs of the linear layers, or both.
        """
        attention, linear = self.hidden + self.log_sum_exp, 5 * self.hidden + 2 * self.wide
        outputs = {None: 0, "attention": attention, "matmul": linear, "products": attention + linear}[segment.keeps]
        return Kept(self.residual + segment.blocks * outputs)

    def copies(self, weights: int) -> int:
        """Return the bytes of the copies that autocast makes of fp32 `weights` (bytes)."""
        return weights // 2 if self.autocast else 0

    def all_kept(self) -> Components:
        """Return the bytes alive at the end of forward, without the logits."""
        kept = self.kept_by_all()
        return self.always | {
            "weight_copies": kept.copies + self.copies(self.head_weight),
            "activations": kept.activations + self.kept_by_head,
            "attention_scores": kept.scores,
        }
