"""One all-reduce per parameter, after backward (the naive scheme of Li et al. 2020, section 3.2.1).

Each rank sends 2 Ψ (N−1)/N bytes, all of them exposed, with one collective's latency for each parameter.
"""

from __future__ import annotations

from torch import nn

from cs_systems.formulas.communication import averaging_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._data_parallel import DataParallel, finish_gradients, one_each
from cs_systems.model.parallel._mesh import data_group


def wrap(model: nn.Module, tp_degree: int = 1) -> DataParallel:
    return DataParallel(model, one_each, overlap=False, group=data_group(tp_degree))


STRATEGY = ParallelStrategy(
    wrap=wrap,
    finish_gradients=finish_gradients,
    sent_bytes=averaging_bytes,
    options={"tp_degree": "count"},
    compared=1,
)
