"""Rows that an index looks up again for each part of a batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from cs_systems.analysis.comparison.loop_findings import REPEATED_ROWS, RepeatedRowsRow
from cs_systems.core.tables import Tables
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import Step, update


def of_positions(
    index: Callable[[Tensor, int], Tensor], *, is_checkpointed: bool = False, is_embedding: bool = False
) -> Step:
    """Return a step with vectors of positions that are looked up by an index, made from one for a window."""
    torch.manual_seed(0)
    table = nn.Embedding(64, 8)
    optimizer, steps, window = AdamW(table.parameters()), count(), torch.randint(64, (48, 48))

    def forward(inputs: Tensor) -> Tensor:
        of = index(window, next(steps))
        rows = table(of) if is_embedding else table.weight[of]
        return ((inputs * rows).transpose(-1, -2).contiguous() - 1).square().mean()

    def step() -> None:
        inputs = torch.randn(16, 48, 1, 8)
        if is_checkpointed:
            update(optimizer, checkpoint(forward, inputs, use_reentrant=False))
        else:
            update(optimizer, forward(inputs))

    return step


def expanded(window: Tensor, _: int) -> Tensor:
    return window.expand(16, 48, 48)


def looked_up_once(window: Tensor, _: int) -> Tensor:
    return window[None]


def another_for_each_sample(window: Tensor, _: int) -> Tensor:
    return torch.stack([window.roll(i, 0) for i in range(16)])


def the_same_once_by_chance(window: Tensor, number: int) -> Tensor:
    return window.expand(16, 48, 48) if number == 2 else another_for_each_sample(window, number)


def over_edges() -> Step:
    """Return a step of a network on a graph, which looks up the nodes at the ends of its edges, many times each."""
    torch.manual_seed(0)
    nodes, ends = nn.Embedding(200, 16), torch.randint(200, (2, 6_000))
    layer = nn.Linear(16, 16)
    optimizer = AdamW([*nodes.parameters(), *layer.parameters()])

    def step() -> None:
        messages = layer(nodes.weight)[ends[0]]
        received = torch.zeros(200, 16).index_add(0, ends[1], messages) + nodes.weight
        update(optimizer, functional.mse_loss(received, torch.ones(200, 16)))

    return step


def tables(out: Path, step: Step) -> Tables:
    """Record the step, and return the tables of the timing."""
    recorder = recorded(out, step)
    assert all(each.failure is None for each in recorder._observers._every)
    return recorder.records[0].results


def rows(out: Path, step: Step) -> list[RepeatedRowsRow]:
    return [*REPEATED_ROWS.of(tables(out, step))]


def test_rows_that_are_the_same_for_each_sample_are_counted_and_timed(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, of_positions(expanded))
    assert (row["shape"], row["index"], row["copies"], row["lookups"]) == ("64 × 8", "16 × 48 × 48", 16, 1)
    assert row["backward_s"] > 0
    assert row["forward_s"] > 0


def test_same_positions_of_an_embedding_in_each_sample_are_found(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, of_positions(expanded, is_embedding=True))
    assert (row["shape"], row["index"], row["copies"]) == ("64 × 8", "16 × 48 × 48", 16)


@pytest.mark.parametrize(
    "step",
    [
        lambda: of_positions(looked_up_once),
        lambda: of_positions(another_for_each_sample),
        lambda: of_positions(another_for_each_sample, is_embedding=True),
        lambda: of_positions(the_same_once_by_chance),
        over_edges,
    ],
    ids=["looked up once", "other rows", "other tokens", "the same by chance", "edges"],
)
def test_other_lookups_have_no_row(step: Callable[[], Step], tmp_path: Path) -> None:
    assert not rows(tmp_path, step())


def test_checkpointed_forward_is_not_run_again_to_read_an_index(tmp_path: Path) -> None:
    calls = count()

    def counted(window: Tensor, number: int) -> Tensor:
        next(calls)
        return expanded(window, number)

    steps = 40
    assert not rows(tmp_path, of_positions(counted, is_checkpointed=True))
    assert next(calls) == 2 * steps


def test_hooks_that_pack_tensors_of_the_whole_training_are_not_called_again(tmp_path: Path) -> None:
    """Each tensor may be unpacked once, as by hooks that keep it in a file until then."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        kept[id(tensor)] = tensor
        return id(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):
        assert not rows(tmp_path, of_positions(expanded))


def test_replaced_function_is_restored(tmp_path: Path) -> None:
    before = torch.autograd.graph.saved_tensors_hooks.__enter__
    tables(tmp_path, of_positions(expanded))
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is before
