"""Process groups of a composition with tensor parallelism: ranks in two dimensions.

`tp_degree` neighbours, likely on one machine, divide the blocks. The ranks that hold the same part of the blocks, one
in each such set of neighbours, are data parallel. Every rank makes the same groups in the same order.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup


def tensor_group(tp_degree: int) -> ProcessGroup | None:
    """Return the group of neighbours that divide the blocks with this rank; None means all, as in torch."""
    ranks = range(dist.get_world_size())
    return None if tp_degree == len(ranks) else _own([ranks[i : i + tp_degree] for i in ranks[::tp_degree]])


def data_group(tp_degree: int) -> ProcessGroup | None:
    """Return the group of ranks that hold the same part of the blocks as this one; None means all, as in torch."""
    ranks = range(dist.get_world_size())
    return None if tp_degree == 1 else _own([ranks[i::tp_degree] for i in range(tp_degree)])


def _own(groups: list[range]) -> ProcessGroup | None:
    group: ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    return group
