"""Division of parameters into buckets: complete, in sending order, of one dtype and of the given size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cs_systems.model.parallel._data_parallel import by_size

PARAMETERS = st.lists(st.tuples(st.integers(1, 50), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1)


def parameters(sizes: list[tuple[int, torch.dtype]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(count, dtype=dtype)) for count, dtype in sizes]


def size_of(bucket: list[nn.Parameter]) -> int:
    return sum(p.nbytes for p in bucket)


@given(PARAMETERS, st.floats(1, 1000), st.none() | st.floats(1, 1000))
def test_buckets_hold_each_parameter_once_in_reverse_order(
    sizes: list[tuple[int, torch.dtype]], size_bytes: float, last_bytes: float | None
) -> None:
    params = parameters(sizes)
    buckets = by_size(params, size_bytes, last_bytes)
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)
    for dtype in (torch.float32, torch.bfloat16):
        sent = [id(p) for bucket in buckets for p in bucket if p.dtype is dtype]
        assert sent == [id(p) for p in reversed(params) if p.dtype is dtype]


@given(PARAMETERS, st.floats(1, 1000), st.floats(1, 1000))
def test_bucket_sizes_double_from_the_last_to_the_first(
    sizes: list[tuple[int, torch.dtype]], size_bytes: float, last_bytes: float
) -> None:
    params = parameters([(count, torch.float32) for count, _ in sizes])
    buckets = by_size(params, size_bytes, last_bytes)[::-1]
    for place, bucket in enumerate(buckets):
        limit = min(size_bytes, last_bytes * 2**place)
        assert size_of(bucket[1:]) < limit, "a bucket closes with the parameter that fills it"
        assert size_of(bucket) >= limit or place == len(buckets) - 1
