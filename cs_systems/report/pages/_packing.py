"""Compact form of a page's data: `packed(data)` encodes each long list of whole numbers, and columns.js decodes it.

A number becomes one to ten bytes of seven bits, lowest first; the highest bit of a byte marks that more follow, and the
number's lowest bit is its sign. If it is shorter, the differences between neighbours are stored instead: the times of
100,000 kernels then take a fifth of their size as decimal text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 16  # least length of a list to encode
_GROUPS = np.arange(10, dtype=np.uint64)


def packed(data: Any) -> Any:
    """Return the data with each list of at least LEAST whole numbers, or None among them, as an object.

    The object has `numbers` or `differences` in base64, or one number `same` with a `count`; and `none`: the indices of
    the values that are None.
    """
    if isinstance(data, Mapping):
        return {name: packed(value) for name, value in data.items()}
    if not isinstance(data, (list, tuple)):
        return data
    if len(data) >= LEAST and {*map(type, data)} <= {int, type(None)}:
        return _column(data)
    return [packed(value) for value in data]


def _column(values: Sequence[int | None]) -> dict[str, Any]:
    absent = [index for index, value in enumerate(values) if value is None]
    column = np.array([0 if value is None else value for value in values] if absent else values, np.int64)
    if absent:  # the previous number stands in place of None
        last = np.arange(len(values))
        last[absent] = 0
        column = column[np.maximum.accumulate(last)]
    if len(values) > LEAST and (column == column[0]).all():
        return {"same": int(column[0]), "count": len(values), "none": absent}
    ways = {"numbers": _unsigned(column), "differences": _unsigned(np.diff(column, prepend=0))}
    name = min(ways, key=lambda way: _size(ways[way]))
    return {name: base64.b64encode(_bytes(ways[name])).decode(), "none": absent}


def _unsigned(column: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the numbers with the sign in the lowest bit."""
    return ((column << 1) ^ (column >> 63)).astype(np.uint64)


def _size(unsigned: NDArray[np.uint64]) -> int:
    """Return the length of `_bytes`."""
    return len(unsigned) + sum(int(np.count_nonzero(unsigned >> (7 * group))) for group in _GROUPS[1:])


def _bytes(unsigned: NDArray[np.uint64]) -> bytes:
    groups = unsigned[:, None] >> (7 * _GROUPS)
    used = (groups > 0) | (_GROUPS == 0)
    more = np.zeros_like(used)
    more[:, :-1] = used[:, 1:]
    taken: NDArray[np.uint64] = (groups & 127) | (more.astype(np.uint64) << 7)
    packed_bytes: bytes = taken[used].astype(np.uint8).tobytes()
    return packed_bytes
