"""One all-reduce a parameter, started as soon as backward has its gradient (Li et al. 2020, section 3.2.3).

2 Ψ (N−1)/N bytes, most of them behind the rest of backward; the latency of a collective as often as there are
parameters. Nothing is copied.
"""

from __future__ import annotations

from torch import nn

from cs_systems.parallel import ParallelStrategy
from cs_systems.parallel._data_parallel import DataParallel, finish_gradients, one_each, sent_bytes


def wrap(model: nn.Module) -> DataParallel:
    return DataParallel(model, one_each, overlap=True)


STRATEGY = ParallelStrategy(wrap=wrap, finish_gradients=finish_gradients, sent_bytes=sent_bytes)
