"""Options of the Gluon FlashAttention kernels, as a table.

They are the winners on one H200, in bf16, from scripts/benchmarks/gluon_tune.py. A table, not an autotuner: two
processes must run the same kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cs_systems.model.kernels.layout import padded_d_head


@dataclass(frozen=True)
class ForwardOptions:
    """Options of the forward kernel.

    Attributes:
        consumers: warpgroups of 64 queries each (2 or 3).
        block_n: keys per tile.
        stages: tiles of k and v in flight.
        persistent: one program per multiprocessor, each with several tiles.
        overlap: the exponentials run beside the product with v within a warpgroup too, which takes registers.
        ping_pong: the warpgroups take turns to issue products.
    """

    consumers: int
    block_n: int
    stages: int
    persistent: bool = True
    overlap: bool = False
    ping_pong: bool = False


@dataclass(frozen=True)
class BackwardOptions:
    """Options of the backward kernel.

    Attributes:
        block_m: queries per tile, 64 where d_head is 128 and 128 where it is 64.
        stages: tiles of q and do in flight.
        late: a tile's product with k is computed beside the next tile, so that the warpgroups wait less for each other.
        l2_bytes: causal heads are processed together as long as their queries fit in it; 0: one by one.
    """

    block_m: int
    stages: int
    late: bool
    l2_bytes: int


# (padded d_head, causal) → (longest seq_q, options): the first entry that is long enough is taken.
FORWARD: dict[tuple[int, bool], tuple[tuple[float, ForwardOptions], ...]] = {
    (64, True): (
        (1024, ForwardOptions(2, 128, 4, overlap=True)),
        (math.inf, ForwardOptions(3, 128, 3, ping_pong=True)),
    ),
    (64, False): ((math.inf, ForwardOptions(3, 128, 3, ping_pong=True)),),
    (128, True): ((math.inf, ForwardOptions(2, 128, 2, persistent=False)),),
    (128, False): ((math.inf, ForwardOptions(2, 128, 2)),),
}
# padded d_head → options
BACKWARD = {
    64: BackwardOptions(128, 2, late=False, l2_bytes=40 << 20),
    128: BackwardOptions(64, 2, late=True, l2_bytes=20 << 20),
}


def forward_options(d_head: int, causal: bool, seq_q: int) -> ForwardOptions:
    return next(options for longest, options in FORWARD[padded_d_head(d_head), causal] if seq_q <= longest)
