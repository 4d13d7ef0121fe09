"""One all-reduce per parameter, started as soon as backward has its gradient (Li et al. 2020, section 3.2.3).

Each rank sends 2 Ψ (N−1)/N bytes, most of them overlapped with the rest of backward, with one collective's latency for
each parameter. Nothing is copied.

In a CPU-bound step the launches of so many collectives are not hidden: `ddp_bucketed` launches fewer
(profiles/fsdp_launches/h200/host_per_parameter.md).
"""

from __future__ import annotations

from torch import nn

from cs_systems.formulas.communication import averaging_bytes
from cs_systems.model.parallel import ParallelStrategy
from cs_systems.model.parallel._collectives import communicator
from cs_systems.model.parallel._data_parallel import DataParallel, finish_gradients, one_each
from cs_systems.model.parallel._mesh import data_group


def wrap(
    model: nn.Module,
    max_ctas: int | None = None,
    high_priority: bool = False,
    tp_degree: int = 1,
    send_thread: bool = True,
) -> DataParallel:
    """Return the model wrapped in DataParallel with one bucket per parameter.

    max_ctas, high_priority: as in `communicator`.
    send_thread: as in `DataParallel`; not with tp, which sends during backward too.
    """
    group = communicator(data_group(tp_degree), max_ctas, high_priority)
    return DataParallel(model, one_each, overlap=True, group=group, send_thread=send_thread and tp_degree == 1)


STRATEGY = ParallelStrategy(
    overlaps=True,
    wrap=wrap,
    finish_gradients=finish_gradients,
    sent_bytes=averaging_bytes,
    options={
        "max_ctas": "count for NCCL",
        "high_priority": "flag for NCCL",
        "tp_degree": "count",
        "send_thread": "flag",
    },
    compared=3,
)
