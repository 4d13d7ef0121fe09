"""Weights of attention that a recorded loop drops, and loops that use attention in other ways."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.comparison.loop_findings import ATTENTION_WEIGHTS, AttentionWeightsRow
from tests.measure.recorder.mixing import (
    HEADS,
    REPLACED,
    WIDTH,
    Mixing,
    Step,
    dropped,
    mixing,
    note,
    read_by_a_replaced_function,
    with_curvature,
)
from tests.measure.recorder.test_training import recorded


def rows(out: Path, step: Step) -> list[AttentionWeightsRow]:
    recorder = recorded(out, step)
    assert all(each.failure is None for each in recorder._observers._every)
    return list(ATTENTION_WEIGHTS.of(recorder.records[0].results))


def test_place_and_sizes_are_those_of_the_call(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, mixing(dropped))
    assert (row["module"], row["calls"], row["heads"]) == ("Mixing.attention", 1, HEADS)
    assert (row["scores"], row["function"]) == ("256 × 256", "dropped")
    assert row["place"] == f"mixing.py:{dropped.__code__.co_firstlineno + 1}"
    assert row["other_s"] < row["time_s"]


@pytest.mark.parametrize(("owner", "name"), REPLACED)
def test_function_that_a_program_replaces_may_read_them(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not rows(tmp_path, read_by_a_replaced_function(owner, name, monkeypatch))


def test_hook_on_all_modules_may_read_them(tmp_path: Path) -> None:
    step = mixing(dropped)
    with nn.modules.module.register_module_forward_hook(partial(note, Mixing(dropped))):
        assert not rows(tmp_path, step)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_that_are_differentiated_need_unfused_attention(tmp_path: Path) -> None:
    assert not rows(tmp_path, mixing(dropped, train=with_curvature))


def in_half_precision(model: Mixing, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        mixed = dropped(model, inputs)
    return mixed.float()


def in_checkpoints(model: Mixing, inputs: Tensor) -> Tensor:
    return checkpoint(dropped, model, inputs, use_reentrant=False)  # type: ignore[no-any-return]


def with_copies_of_the_model(model: Mixing, inputs: Tensor) -> Tensor:
    mixed, _ = pickle.loads(pickle.dumps(copy.deepcopy(model.attention)))(inputs, inputs, inputs)
    return dropped(model, inputs) + mixed.detach()  # type: ignore[no-any-return]


def in_a_thread(model: Mixing, inputs: Tensor) -> Tensor:
    results = list[Tensor]()
    thread = threading.Thread(target=lambda: results.append(dropped(model, inputs)))
    thread.start()
    thread.join()
    return results[0]


def of_one_sample(model: Mixing, inputs: Tensor) -> Tensor:
    rows = [model.attention(row, row, row)[0] for row in inputs.detach().requires_grad_()]
    return torch.stack(rows)


def with_masks_of_numbers(model: Mixing, inputs: Tensor) -> Tensor:
    bias = model.attention.out_proj.weight.mean() * torch.ones(256, 256)
    padding = torch.zeros(4, 256)
    mixed, _ = model.attention(inputs, inputs, inputs, padding, True, bias, False)
    return mixed  # type: ignore[no-any-return]


def scripted() -> nn.Module:
    return torch.jit.script(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))  # type: ignore[no-any-return]


def frozen_in_part(model: Mixing) -> None:
    model.attention.in_proj_weight.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "loop",
    [
        partial(mixing, in_half_precision),
        partial(mixing, in_checkpoints),
        partial(mixing, with_copies_of_the_model),
        partial(mixing, in_a_thread),
        partial(mixing, of_one_sample),
        partial(mixing, with_masks_of_numbers),
        partial(mixing, dropped, attention=scripted),
        partial(mixing, dropped, frozen_in_part),
        partial(
            mixing, dropped, attention=lambda: nn.MultiheadAttention(32, 4, 0.1, False, True, True, batch_first=True)
        ),
    ],
)
def test_recording_leaves_the_training_as_it_is(loop: partial[Step], tmp_path: Path) -> None:
    """The numbers of a recorded loop are the same as without a recording."""
    made = list[Mixing]()
    prepare = loop.args[1] if len(loop.args) > 1 else lambda _: None

    def noted(model: Mixing) -> None:
        prepare(model)
        made.append(model)

    loop = partial(mixing, loop.args[0], noted, **loop.keywords)
    step = loop()
    for _ in range(40):
        step()
    rows(tmp_path, loop())
    once, again = ([*model.attention.parameters()] for model in made)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_recorder_keeps_neither_the_attention_nor_its_inputs(tmp_path: Path) -> None:
    known = list[weakref.ref[Any]]()
    step = mixing(dropped, lambda model: known.append(weakref.ref(model.attention)))
    recorder = recorded(tmp_path, step)
    assert ATTENTION_WEIGHTS.of(recorder.records[0].results)
    del step
    gc.collect()
    assert [each() for each in known] == [None]
