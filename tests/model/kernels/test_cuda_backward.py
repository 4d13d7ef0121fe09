"""Tests of the choice of tiles in flash_cuda's backward; they need no GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention.flash_cuda import algorithm
from cs_systems.model.kernels.cuda.launch import BACKWARD_TILES, BackwardTile, backward_tile

EVERY_TILE = [tile for tiles in BACKWARD_TILES.values() for tile in tiles]


@given(
    tile=st.sampled_from(EVERY_TILE),
    seq_q=st.integers(1, 700),
    seq_k=st.integers(1, 700),
    offset=st.integers(-300, 300),
)
def test_visited_tiles_are_the_visible_ones_of_the_mask(
    tile: BackwardTile, seq_q: int, seq_k: int, offset: int
) -> None:
    """A block computes every tile from the first that sees one of its keys on; if none does, only the last tile."""
    tiles = -(-seq_q // tile.queries)
    seen = 0
    for key in range(0, seq_k, tile.keys):
        sees = [n for n in range(tiles) if (n + 1) * tile.queries - 1 + offset >= key]
        seen += tiles - (sees[0] if sees else tiles - 1)
    assert tile.visited(seq_q, seq_k, offset) == seen
    assert tile.visited(seq_q, seq_k, None) == tiles * -(-seq_k // tile.keys)


# As measured on one H100, each tile compared with the other.
@pytest.mark.parametrize(
    ("d_head", "seq", "causal", "queries"),
    [
        *((128, 512, True, 64), (128, 1024, True, 64), (128, 4096, True, 80)),
        *((128, 512, False, 64), (128, 1024, False, 80), (128, 4096, False, 80)),
        *((80, 512, True, 64), (80, 2048, True, 80), (80, 512, False, 64), (80, 2048, False, 80), (96, 1024, True, 64)),
    ],
)
def test_small_tile_is_chosen_if_it_is_faster(d_head: int, seq: int, causal: bool, queries: int) -> None:
    assert backward_tile(d_head, seq, seq, 0 if causal else None).queries == queries
    call = AttentionCall("cuda", "bfloat16", d_head, seq, seq, 16, 16, causal=causal)
    assert algorithm(call).padded_queries == queries  # so that its memory is predicted
