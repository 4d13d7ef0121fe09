"""One all-reduce of all gradients in one tensor, after backward (Li et al. 2020, section 3.2.2, without overlap).

2 Ψ (N−1)/N bytes, all of them exposed, the latency of one collective, and a copy of Ψ bytes. Parameters of several
dtypes take a tensor each.
"""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from cs_systems.parallel import ParallelStrategy
from cs_systems.parallel._data_parallel import DataParallel, by_size, finish_gradients
from cs_systems.parallel._mesh import data_group
from cs_systems.parallel_cost import averaging_bytes


def wrap(model: nn.Module, tp_degree: int = 1) -> DataParallel:
    return DataParallel(model, partial(by_size, size_bytes=math.inf), overlap=False, group=data_group(tp_degree))


STRATEGY = ParallelStrategy(
    wrap=wrap, finish_gradients=finish_gradients, sent_bytes=averaging_bytes, options=("tp_degree",)
)
