"""Flat layout: every element belongs to one rank, aligned and with little padding."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.model.parallel._flat_layout import ALIGNMENT, FlatLayout

layouts = st.tuples(
    st.lists(st.integers(0, 200), min_size=1, max_size=8),
    st.integers(1, 9),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)


@given(layouts)
def test_every_element_belongs_to_one_rank(case: tuple[list[int], int, torch.dtype]) -> None:
    counts, world_size, dtype = case
    layout = FlatLayout.of(counts, world_size, dtype)
    numbers = torch.arange(1, sum(counts) + 1, dtype=torch.float64).split(counts)
    whole = layout.lined_up(numbers)
    assert len(whole) == world_size * layout.part
    ranks = [(whole[r * layout.part : (r + 1) * layout.part], layout.held(r)) for r in range(world_size)]
    for i, tensor in enumerate(numbers):
        assert torch.equal(whole[layout.starts[i] : layout.starts[i] + counts[i]], tensor)
        found = []
        for part, held in ranks:
            start, stop, in_part = held[i]
            found.append(part[in_part : in_part + stop - start])
            assert torch.equal(found[-1], tensor[start:stop])
        assert torch.equal(torch.cat(found), tensor)


@given(layouts)
def test_parameters_and_parts_are_aligned_with_little_padding(case: tuple[list[int], int, torch.dtype]) -> None:
    counts, world_size, dtype = case
    layout = FlatLayout.of(counts, world_size, dtype)
    unit = ALIGNMENT // dtype.itemsize
    assert all(at % unit == 0 for at in [*layout.starts, layout.part])
    assert 0 <= sum(layout.gaps) <= (len(counts) + world_size) * (unit - 1) + world_size
