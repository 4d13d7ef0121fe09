"""Instants of a training step at which its memory may peak: the bytes alive at each, by component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cs_systems.config import Mode, Phase
from cs_systems.core.checkpoint_plan import Segment, items
from cs_systems.core.optimizers import Form, optimizer
from cs_systems.formulas.memory.prediction import Components
from cs_systems.formulas.memory.tensors import NOTHING, Kept, StepTensors

END_OF_BACKWARD = f"{Phase.BACKWARD}: embedding"
"""Name of the last instant of backward, at which all gradients exist."""


def instants(step: StepTensors) -> dict[str, Components]:
    """Return the bytes alive at each instant that may be the peak, in order; a name begins with its phase."""
    if step.config.mode is Mode.FORWARD and not step.config.keep_graph:
        found = _forward_without_graph(step)
    else:
        found = _forward_with_graph(step)
    if step.config.mode is not Mode.FORWARD:
        found |= {"loss": _loss(step)} | _backward(step)
    if step.config.mode is Mode.TRAIN_STEP:
        found["optimizer"] = _update(step)
    return found


def ends(step: StepTensors) -> dict[Phase, Components]:
    """Return the bytes alive at the end of each phase; the workload keeps the logits until the next step."""
    if step.config.mode is Mode.FORWARD and not step.config.keep_graph:
        return {Phase.FORWARD: step.always | {"logits_and_loss": step.logits}}
    at_end = {Phase.FORWARD: step.all_kept() | {"logits_and_loss": step.logits}}
    if step.config.mode is not Mode.FORWARD:
        at_end[Phase.LOSS] = step.all_kept() | {"logits_and_loss": step.logits + step.kept_by_loss}
        done = step.always | {"gradients": step.weights, "logits_and_loss": step.logits}
        at_end[Phase.BACKWARD] = done
        if step.config.mode is Mode.TRAIN_STEP:
            at_end[Phase.OPTIMIZER] = done
    return at_end


def without_state(alive: Components) -> Components:
    return {name: size for name, size in alive.items() if name != "optimizer_state"}


def _forward_without_graph(step: StepTensors) -> dict[str, Components]:
    """Return the instants of forward if only one layer's tensors and all weight copies are alive."""
    copies = step.copies(step.model.num_layers * step.layer_weights)
    return _alone(step, "forward", Kept(step.residual, 0, copies)) | {
        "forward: head": step.always
        | {
            "weight_copies": copies + step.copies(step.head_weight),
            "activations": 2 * step.residual + (step.hidden if step.autocast else 0),
            "logits_and_loss": step.logits,
        },
    }


def _forward_with_graph(step: StepTensors) -> dict[str, Components]:
    """Return the instants of forward if activations accumulate: the peak is in the last layer or at the end."""
    kept = step.kept_by_all()
    copies = step.copies(step.model.num_layers * step.layer_weights)
    if step.plan and step.plan[-1].stop == step.model.num_layers:
        in_last = _alone(step, "forward", replace(kept, copies=copies))
    else:
        in_last = {
            "forward: attention": step.always
            | {
                "weight_copies": copies - step.copies(step.feed_forward_weights),
                "activations": kept.activations - step.kept_by_feed_forward,
                "attention_scores": kept.scores - step.scores_kept + step.scores_in_forward,
            }
        }
    head = step.all_kept()
    cast = step.residual if step.autocast else 0  # the normalised input together with its copy for lm_head
    return in_last | {
        "forward: head": head
        | {
            "weight_copies": copies + step.copies(step.head_weight),
            "activations": head["activations"] + cast,
            "logits_and_loss": step.logits,
        }
    }


def _loss(step: StepTensors) -> Components:
    """Return the bytes alive in the loss: the log-softmax and the logits, which autocast on a CPU first widens."""
    widened = step.wide_logits if step.autocast and not step.widens_log_softmax else 0
    return step.all_kept() | {"logits_and_loss": step.logits + widened + step.kept_by_loss}


def _backward(step: StepTensors) -> dict[str, Components]:
    """Return the instants of backward: activations are freed while gradients are allocated.

    Each block's checkpoint has been recomputed when its backward begins. The instant in the loss holds what the loss
    kept, the gradient of the log-softmax and, where that needs no cast, the gradient of the logits.
    """
    gradients = (1 if step.widens_log_softmax else 2) * step.wide_logits
    loss = step.all_kept() | {"logits_and_loss": step.logits + step.kept_by_loss + gradients}
    instants = {
        "backward: loss": loss,
        END_OF_BACKWARD: step.always
        | {"gradients": step.weights, "logits_and_loss": step.logits, "workspace": step.residual},
    }
    for layer, kept in _backward_order(step, items(0, step.model.num_layers, step.plan)):
        instants[f"backward: feed-forward of block {layer}"] = _feed_forward_backward(step, layer, kept)
        instants[f"backward: attention of block {layer}"] = _attention_backward(step, layer, kept)
    return instants


def _update(step: StepTensors) -> Components:
    """Return the bytes alive in AdamW's step.

    torch's foreach AdamW holds the roots of the second moment for all parameters at once; this package's own AdamW
    for one parameter at a time.
    """
    workspace = {Form.FOREACH: step.weights, Form.EACH: max(step.head_weight, step.feed_forward_weights // 3)}
    form = optimizer(step.config.optimizer).form
    return step.always | {
        "gradients": step.weights,
        "logits_and_loss": step.logits,
        "workspace": workspace.get(form, 0) if form else 0,
    }


def _alone(step: StepTensors, phase: str, before: Kept) -> dict[str, Components]:
    """Return the instants of a block that keeps nothing for backward; `before` is alive and includes its input."""
    # Rotated q and k, and v; then the output and, over a full matrix, a copy of v with the heads outermost. Where
    # autocast widens the softmax, the score matrices peak before that.
    beside_rotated = 1 if step.tiled else 0 if step.widens_scores else 2
    rotated_and_output = (3 + beside_rotated) * step.hidden + step.log_sum_exp
    return {
        f"{phase}: attention": step.always
        | {
            "weight_copies": before.copies - step.copies(step.feed_forward_weights),
            "activations": before.activations + step.residual + rotated_and_output,
            "attention_scores": before.scores + step.scores_in_forward,
        },
        f"{phase}: feed-forward": step.always
        | {
            "weight_copies": before.copies - step.copies(step.feed_forward_weights // 3),  # w2 runs later
            "activations": before.activations + 2 * step.residual + 3 * step.wide,
            "attention_scores": before.scores,
        },
    }


def _feed_forward_backward(step: StepTensors, layer: int, kept: Kept) -> Components:
    """Return the bytes alive in the backward of a feed-forward layer, after the product and w2's copy are freed.

    They include the gradients of the residual, of both factors of the product, and of the product.
    """
    later = step.model.num_layers - 1 - layer
    return step.always | {
        "weight_copies": kept.copies + step.block.copies - step.copies(step.feed_forward_weights // 3),
        "gradients": step.head_weight + later * step.layer_weights + step.feed_forward_weights // 3,
        "activations": kept.activations + step.block.activations,
        "attention_scores": kept.scores + step.scores_kept,
        "logits_and_loss": step.logits,
        "workspace": 2 * step.wide + step.residual,
    }


def _attention_backward(step: StepTensors, layer: int, kept: Kept) -> Components:
    """Return the bytes alive in the backward of attention.

    Besides the scores, they are the gradient of the residual and the gradients that attention has produced so far.
    Over a full matrix that is the value's gradient, and the saved value and output are freed. A tiled backward holds
    all that it saved, the output's gradient (in the place of the copy that output_proj read, if any), and three new
    gradients.
    """
    later = step.model.num_layers - 1 - layer
    hidden = (3 if step.copies_output else 4) if step.tiled else -1
    return step.always | {
        "weight_copies": kept.copies + step.copies(step.layer_weights - step.feed_forward_weights),
        "gradients": step.head_weight + later * step.layer_weights + step.feed_forward_weights,
        "activations": kept.activations + step.kept_by_attention,
        "attention_scores": kept.scores + step.scores_in_backward,
        "logits_and_loss": step.logits,
        "workspace": step.residual + hidden * step.hidden + step.dq_accumulator,
    }


def _backward_order(
    step: StepTensors, blocks: Iterable[int | Segment], kept: Kept = NOTHING
) -> Iterator[tuple[int, Kept]]:
    """Yield each block in backward order, with the bytes that earlier blocks still keep when its backward begins.

    Checkpoints around the block have been recomputed.
    """
    for item in blocks:
        if isinstance(item, int):
            yield item, kept
            kept += step.block
        else:
            yield from _backward_order(step, items(item.first, item.stop, item.inner), kept)
            kept += step.kept_by(item)
