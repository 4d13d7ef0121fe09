"""Memory of a training step by formula: the tensors alive at each moment that may be the peak.

Counted are the tensors that eager PyTorch holds and, on CUDA, what PyTorch's allocator counts besides them: cuBLAS's
workspaces, and the rest of a block that is too small to be split off (`rounding`). No constant in this module is fitted
to a measurement.

Left out are: fragmentation (reserved but free), the CUDA context, the unsplit rest of a reused block of another size
(up to 1 MiB per tensor: 4% of `small` at context 128), and the moment inside a norm, which is below the loss's unless
the vocabulary is smaller than d_model. The formula does not predict a compiled model, because the compiler decides what
to keep (6% less in the one that was measured). fp8 is counted as bf16 and needs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from cs_systems.config import Mode, Phase, RunConfig
from cs_systems.core.checkpoint_plan import Segment, items, segments
from cs_systems.formulas.cost import COMPUTE_BYTES, PARAMETER_BYTES, TARGET_BYTES, AttentionAlgorithm, parameter_count
from cs_systems.formulas.memory.allocator import CUBLAS_WORKSPACE_BYTES, rounding

Components = dict[str, int]


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes alive by component at each possible peak, and the largest single allocation (name, bytes)."""

    moments: dict[str, Components]
    largest_allocation: tuple[str, int]

    @property
    def peak_at(self) -> str:
        """Moment with the most bytes alive."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def components(self) -> Components:
        """Bytes alive at the peak, by component."""
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


_NOTHING = _Kept()


def step_memory(config: RunConfig, algorithm: AttentionAlgorithm) -> MemoryPrediction:
    """Return the memory of a step of `config` at its peak.

    The step is a training step of BasicTransformerLM, or its first phases.
    """
    step = _Step(config, algorithm)
    threads = 1 if config.mode is Mode.FORWARD else 2
    moments = {name: step.on_device(alive, threads) for name, alive in step.moments().items()}
    return MemoryPrediction(moments, step.largest_allocation())


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes alive at the end of a phase, by component, and the phase's peak.

    `step` counts from 1; step 0 has one phase, `built`.
    """

    step: int
    phase: str
    components: Components
    peak_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return sum(self.components.values())


def kept_by_a_block(config: RunConfig, algorithm: AttentionAlgorithm, checkpoint: Segment | None = None) -> int:
    """Return the bytes that a block, or a `checkpoint`, keeps for backward, copies of its weights included."""
    step = _Step(config, algorithm)
    kept = step.block if checkpoint is None else step._kept_by(checkpoint)
    return kept.activations + kept.scores + kept.copies


def phase_memory(config: RunConfig, algorithm: AttentionAlgorithm, steps: int = 2) -> list[PhaseMemory]:
    """Return the bytes alive after each phase of the first `steps` steps, and at its peak.

    AdamW allocates its state in its first step; backward's thread has a workspace from its first backward on.
    """
    step = _Step(config, algorithm)
    moments = step.moments()
    found = [PhaseMemory(0, "built", built := step.on_device(step.stateless, 0), sum(built.values()))]
    for number in range(1, steps + 1):
        for phase, ended in step.ends().items():
            within = {moment: alive for moment, alive in moments.items() if moment.split(":")[0] == phase}
            if number == 1 and phase != Phase.OPTIMIZER:
                within = {moment: step.without_state(alive) for moment, alive in within.items()}
                ended = step.without_state(ended)
            peak = max(
                sum(step.on_device(alive, _threads(config, number, moment)).values())
                for moment, alive in within.items()
            )
            components = step.on_device(ended, _threads(config, number, phase))
            found.append(PhaseMemory(number, phase, components, peak))
    return found


def _threads(config: RunConfig, step: int, moment: str) -> int:
    """Return the number of threads that have called cuBLAS by that moment.

    Backward's own thread calls it after the loss, whose backward has no matrix product.
    """
    begun = step > 1 or (moment.startswith(("backward", "optimizer")) and moment != "backward: loss")
    return 2 if begun and config.mode is not Mode.FORWARD else 1


class _Step:
    """Sizes of one step's tensors in bytes, and the moments at which they are alive.

    Autocast leaves the parameters, the residual stream and the norms in fp32. A linear layer keeps its input cast to
    the compute dtype, once for each layer that reads it. A weight is cast once, and the copy is kept until its
    backward. A checkpoint keeps its input (one residual) until backward recomputes the rest; the copies of its weights
    are freed at the end of forward, when autocast clears its cache, and are made again.
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
        self.matrices = (  # (bytes, how many)
            (self.head_weight, 2),
            (self.feed_forward_weights // 3, 3 * model.num_layers),
            (model.d_model**2 * self.parameter, 4 * model.num_layers),
        )
        self.layer_weights = self.feed_forward_weights + 4 * model.d_model**2 * self.parameter
        self.block = _Kept(
            self.kept_by_attention + self.kept_by_feed_forward, self.scores_kept, self._copies(self.layer_weights)
        )
        self.plan = segments(config.checkpoint, model.num_layers)
        inputs = tokens * TARGET_BYTES * 2
        rotary = 4 * model.context_length * model.d_head
        self.stateless = {"parameters": self.weights, "inputs": inputs + rotary}
        state = {"optimizer_state": 2 * self.weights} if config.mode is Mode.TRAIN_STEP else {}
        self.always = self.stateless | state

    def moments(self) -> dict[str, Components]:
        """Return the bytes alive at each moment that may be the peak, in order; a name begins with its phase."""
        if self.config.mode is Mode.FORWARD and not self.config.keep_graph:
            moments = self.forward_without_graph()
        else:
            moments = self.forward_with_graph()
        if self.config.mode is not Mode.FORWARD:
            moments |= {"loss": self.loss()} | self.backward()
        if self.config.mode is Mode.TRAIN_STEP:
            moments["optimizer"] = self.update()
        return moments

    def ends(self) -> dict[Phase, Components]:
        """Return the bytes alive at the end of each phase; the workload keeps the logits until the next step."""
        if self.config.mode is Mode.FORWARD and not self.config.keep_graph:
            return {Phase.FORWARD: self.always | {"logits_and_loss": self.logits}}
        ends = {Phase.FORWARD: self._all_kept() | {"logits_and_loss": self.logits}}
        if self.config.mode is not Mode.FORWARD:
            ends[Phase.LOSS] = self._all_kept() | {"logits_and_loss": self.logits + self.kept_by_loss}
            done = self.always | {"gradients": self.weights, "logits_and_loss": self.logits}
            ends[Phase.BACKWARD] = done
            if self.config.mode is Mode.TRAIN_STEP:
                ends[Phase.OPTIMIZER] = done
        return ends

    def without_state(self, alive: Components) -> Components:
        return {name: size for name, size in alive.items() if name != "optimizer_state"}

    def on_device(self, alive: Components, threads: int) -> Components:
        """Return `alive` with the allocator's overhead, after `threads` threads have called cuBLAS.

        Parameters lie in fresh memory. Later tensors reuse cached blocks where activations have left blocks that are
        large enough, each of which can be split.
        """
        if self.config.device == "cpu":
            return alive
        later = (alive.get("gradients", 0) + alive.get("optimizer_state", 0)) / self.weights
        cached = max(self.wide, self.score_matrix, self._copies(self.feed_forward_weights // 3))
        beside = sum(
            round(rounding(size, count) * (1 + (later if size > cached else 0))) for size, count in self.matrices
        )
        return {
            "cublas_workspaces": threads * CUBLAS_WORKSPACE_BYTES,
            "rounding": beside,
            **alive,
        }

    def forward_without_graph(self) -> dict[str, Components]:
        """Return the moments of forward if only one layer's tensors and all weight copies are alive."""
        copies = self._copies(self.model.num_layers * self.layer_weights)
        return self._alone("forward", _Kept(self.residual, 0, copies)) | {
            "forward: head": self.always
            | {
                "weight_copies": copies + self._copies(self.head_weight),
                "activations": 2 * self.residual + (self.hidden if self.autocast else 0),
                "logits_and_loss": self.logits,
            },
        }

    def forward_with_graph(self) -> dict[str, Components]:
        """Return the moments of forward if activations accumulate: the peak is in the last layer or at the end."""
        kept = self._kept_by_all()
        copies = self._copies(self.model.num_layers * self.layer_weights)
        if self.plan and self.plan[-1].stop == self.model.num_layers:
            in_last = self._alone("forward", replace(kept, copies=copies))
        else:
            before_rotation = 2 * self.hidden
            in_last = {
                "forward: attention": self.always
                | {
                    "weight_copies": copies - self._copies(self.feed_forward_weights),
                    "activations": kept.activations - self.kept_by_feed_forward + before_rotation,
                    "attention_scores": kept.scores - self.scores_kept + self.scores_in_forward,
                }
            }
        head = self._all_kept()
        cast = self.residual if self.autocast else 0  # the normalised input beside its copy for lm_head
        return in_last | {
            "forward: head": head
            | {
                "weight_copies": copies + self._copies(self.head_weight),
                "activations": head["activations"] + cast,
                "logits_and_loss": self.logits,
            }
        }

    def loss(self) -> Components:
        """Return the bytes alive in the loss: the log-softmax and the logits, which autocast on a CPU first widens."""
        widened = self.wide_logits if self.autocast and not self.widens_log_softmax else 0
        return self._all_kept() | {"logits_and_loss": self.logits + widened + self.kept_by_loss}

    def backward(self) -> dict[str, Components]:
        """Return the moments of backward: activations are freed while gradients are allocated.

        Each block's checkpoint has been recomputed when its backward begins. The moment in the loss holds what the loss
        kept, the gradient of the log-softmax and, where that needs no cast, the gradient of the logits.
        """
        gradients = (1 if self.widens_log_softmax else 2) * self.wide_logits
        loss = self._all_kept() | {"logits_and_loss": self.logits + self.kept_by_loss + gradients}
        moments = {
            "backward: loss": loss,
            "backward: embedding": self.always
            | {"gradients": self.weights, "logits_and_loss": self.logits, "workspace": self.residual},
        }
        for layer, kept in self._backward_order(items(0, self.model.num_layers, self.plan)):
            moments[f"backward: feed-forward of block {layer}"] = self._feed_forward_backward(layer, kept)
            moments[f"backward: attention of block {layer}"] = self._attention_backward(layer, kept)
        return moments

    def update(self) -> Components:
        """Return the bytes alive in AdamW's step.

        torch's foreach holds a root of the second moment for all parameters at once; the package's own for one at a
        time.
        """
        workspace = {"adamw_foreach": self.weights, "adamw": max(self.head_weight, self.feed_forward_weights // 3)}
        return self.always | {
            "gradients": self.weights,
            "logits_and_loss": self.logits,
            "workspace": workspace.get(self.config.optimizer, 0),
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

    def _alone(self, phase: str, before: _Kept) -> dict[str, Components]:
        """Return the moments of a block that keeps nothing for backward; `before` is alive, its input included."""
        # q, k, v, and rotated q and k; then the output and, over a full matrix, a copy of v with the heads outermost.
        # Where autocast widens the softmax, the score matrices peak before that.
        beside_rotated = 1 if self.tiled else 0 if self.widens_scores else 2
        rotated_and_output = (5 + beside_rotated) * self.hidden + self.log_sum_exp
        return {
            f"{phase}: attention": self.always
            | {
                "weight_copies": before.copies - self._copies(self.feed_forward_weights),
                "activations": before.activations + self.residual + rotated_and_output,
                "attention_scores": before.scores + self.scores_in_forward,
            },
            f"{phase}: feed-forward": self.always
            | {
                "weight_copies": before.copies - self._copies(self.feed_forward_weights // 3),  # w2 comes later
                "activations": before.activations + 2 * self.residual + 3 * self.wide,
                "attention_scores": before.scores,
            },
        }

    def _feed_forward_backward(self, layer: int, kept: _Kept) -> Components:
        """Return the bytes alive in the backward of a feed-forward layer, after the product and w2's copy are freed.

        They include the gradients of the residual, of both factors of the product, and of the product.
        """
        later = self.model.num_layers - 1 - layer
        return self.always | {
            "weight_copies": kept.copies + self.block.copies - self._copies(self.feed_forward_weights // 3),
            "gradients": self.head_weight + later * self.layer_weights + self.feed_forward_weights // 3,
            "activations": kept.activations + self.block.activations,
            "attention_scores": kept.scores + self.scores_kept,
            "logits_and_loss": self.logits,
            "workspace": 2 * self.wide + self.residual,
        }

    def _attention_backward(self, layer: int, kept: _Kept) -> Components:
        """Return the bytes alive in the backward of attention.

        Besides the scores, they are the gradients of the residual and those that attention has produced so far. Over a
        full matrix that is the value's gradient, and the saved value and output are freed. A tiled backward holds all
        that it saved, the output's gradient (in the place of the copy that output_proj read, if any), and three new
        gradients.
        """
        later = self.model.num_layers - 1 - layer
        hidden = (3 if self.copies_output else 4) if self.tiled else -1
        return self.always | {
            "weight_copies": kept.copies + self._copies(self.layer_weights - self.feed_forward_weights),
            "gradients": self.head_weight + later * self.layer_weights + self.feed_forward_weights,
            "activations": kept.activations + self.kept_by_attention,
            "attention_scores": kept.scores + self.scores_in_backward,
            "logits_and_loss": self.logits,
            "workspace": self.residual + hidden * self.hidden + self.dq_accumulator,
        }

    def _backward_order(self, run: Iterable[int | Segment], kept: _Kept = _NOTHING) -> Iterator[tuple[int, _Kept]]:
        """Yield each block in backward order, with the bytes that earlier blocks still keep when its backward begins.

        Checkpoints around the block have been recomputed.
        """
        for item in run:
            if isinstance(item, int):
                yield item, kept
                kept += self.block
            else:
                yield from self._backward_order(items(item.first, item.stop, item.inner), kept)
                kept += self._kept_by(item)

    def _kept_by_all(self) -> _Kept:
        run = items(0, self.model.num_layers, self.plan)
        return sum((self.block if isinstance(item, int) else self._kept_by(item) for item in run), _NOTHING)

    def _kept_by(self, segment: Segment) -> _Kept:
        """Return what a checkpoint keeps: its input, and the kept outputs of each block.

        These are the output of attention, or those of the linear layers.
        """
        attention = self.hidden + self.log_sum_exp
        beside = {None: 0, "attention": attention, "matmul": 5 * self.hidden + 2 * self.wide}[segment.keeps]
        return _Kept(self.residual + segment.blocks * beside)

    def _copies(self, weights: int) -> int:
        """Return the bytes of the copies that autocast makes of fp32 `weights` (bytes)."""
        return weights // 2 if self.autocast else 0

    def _all_kept(self) -> Components:
        """Return the bytes alive at the end of forward, without the logits."""
        kept = self._kept_by_all()
        return self.always | {
            "weight_copies": kept.copies + self._copies(self.head_weight),
            "activations": kept.activations + self.kept_by_head,
            "attention_scores": kept.scores,
        }
