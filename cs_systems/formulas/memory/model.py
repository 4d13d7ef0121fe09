"""The memory that a training step needs, by formula: what is alive at each moment at which it may peak.

Counts the tensors that eager PyTorch holds, and of a step on CUDA what PyTorch's allocator counts beside them: cuBLAS's
workspaces, and the rest of a block that is too small to be split off (`rounding`). No constant in here is fitted to a
measurement. Left out: fragmentation (reserved but free), the CUDA context, what is not split off a cached block of
another size (up to 1 MiB a tensor: 4% of `small` at context 128), and the moment inside a norm, which is below the
loss's unless the vocabulary is smaller than the model is wide. Of a compiled model this is no prediction, for its
compiler decides what it keeps (6% less in the one that was measured); fp8 is counted as bf16 and needs less.
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


_NOTHING = _Kept()


def step_memory(config: RunConfig, algorithm: AttentionAlgorithm) -> MemoryPrediction:
    """What a step of `config` (a training step of BasicTransformerLM, or its first phases) needs at its peak."""
    step = _Step(config, algorithm)
    threads = 1 if config.mode is Mode.FORWARD else 2
    moments = {name: step.on_device(alive, threads) for name, alive in step.moments().items()}
    return MemoryPrediction(moments, step.largest_allocation())


@dataclass(frozen=True)
class PhaseMemory:
    """`step` counts from 1; step 0 has one phase, `built`. Bytes alive when the phase ends, by component; its peak."""

    step: int
    phase: str
    components: Components
    peak_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return sum(self.components.values())


def kept_by_a_block(config: RunConfig, algorithm: AttentionAlgorithm, checkpoint: Segment | None = None) -> int:
    """What a block keeps for its backward, copies of its weights included; or what a `checkpoint` does. Bytes."""
    step = _Step(config, algorithm)
    kept = step.block if checkpoint is None else step._kept_by(checkpoint)
    return kept.activations + kept.scores + kept.copies


def phase_memory(config: RunConfig, algorithm: AttentionAlgorithm, steps: int = 2) -> list[PhaseMemory]:
    """What is alive after each phase of the first `steps` steps, and at its peak.

    AdamW makes its state in its first step; backward's thread has a workspace from its first backward on.
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
    """How many have called cuBLAS by then: backward's own does so after the loss, in which it multiplies nothing."""
    begun = step > 1 or (moment.startswith(("backward", "optimizer")) and moment != "backward: loss")
    return 2 if begun and config.mode is not Mode.FORWARD else 1


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
        self.autocast = precision.is_autocast
        element, self.parameter = COMPUTE_BYTES[precision], PARAMETER_BYTES[precision]
        tokens = config.batch_size * length

        self.hidden = tokens * model.d_model * element  # the output of a projection
        self.residual = tokens * model.d_model * self.parameter
        self.wide = tokens * model.d_ff * element  # the output of w1
        self.logits = tokens * model.vocab_size * element
        self.wide_logits = tokens * model.vocab_size * (4 if self.autocast else element)
        # CUDA's autocast leaves the log-softmax in the dtype of the logits, for cross_entropy names it, and widens a
        # copy of it for nll_loss: both are kept for backward. The CPU's widens the logits.
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
        readers = (3, 2) if self.autocast else (1, 1)  # of the two norms, each with a cast of its own
        # q, k, v and the input of output_proj; a tiled attention keeps its output too, unless that is the same tensor.
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
        """What is alive at each moment that may be the peak, in order; the name begins with the phase."""
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
        """What is alive when each phase has ended; the logits stay with the workload until the next step."""
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
        """`alive` with what the allocator counts beside tensors; `threads` have called cuBLAS by now.

        Parameters lie in fresh memory. What comes later is served from the cache where activations have left blocks
        that are large enough, each of which can be split.
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
        """Only what one layer works on is alive, and under autocast the copies of all weights."""
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
        """Activations pile up: the peak is in the last layer or at the end."""
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
        """The log-softmax beside the logits, which the CPU's autocast widens for it first."""
        widened = self.wide_logits if self.autocast and not self.widens_log_softmax else 0
        return self._all_kept() | {"logits_and_loss": self.logits + widened + self.kept_by_loss}

    def backward(self) -> dict[str, Components]:
        """Activations go while gradients come; each block's checkpoint has been computed again when its turn comes.

        In the loss: what it kept, the gradient of the log-softmax, and where that needs no cast the one of the logits.
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
            "logits": max(self.logits, self.wide_logits if self.config.mode is not Mode.FORWARD else 0),
        }
        return max(candidates.items(), key=itemgetter(1))

    def _alone(self, phase: str, before: _Kept) -> dict[str, Components]:
        """A block that keeps nothing for backward, with `before` (its own input in it) alive."""
        # q, k, v, both rotated; then the output and, over a full matrix, a copy of v with the heads outermost; where
        # autocast widens the softmax, most scores are alive before that.
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
        """The gradients of the residual, of both factors of the product, and of the product, once that is gone, with
        w2's copy."""
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
        """Beside the scores: the gradients of the residual and of what attention has given back by then.

        Over a full matrix that is the value's, and the saved value and output are gone; a tiled backward holds all that
        it saved, the output's gradient (in the place of the copy that output_proj read, if any) and three new ones.
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
        """Each block, with what those before it keep when its backward begins: checkpoints around it computed again."""
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
        """The checkpoint's input, and of each block what it keeps beside: attention's output, or the linear layers'."""
        attention = self.hidden + self.log_sum_exp
        beside = {None: 0, "attention": attention, "matmul": 5 * self.hidden + 2 * self.wide}[segment.keeps]
        return _Kept(self.residual + segment.blocks * beside)

    def _copies(self, weights: int) -> int:
        """Bytes of the copies that autocast makes of fp32 `weights` (bytes)."""
        return weights // 2 if self.autocast else 0

    def _all_kept(self) -> Components:
        """At the end of forward, but for the logits."""
        kept = self._kept_by_all()
        return self.always | {
            "weight_copies": kept.copies + self._copies(self.head_weight),
            "activations": kept.activations + self.kept_by_head,
            "attention_scores": kept.scores,
        }
