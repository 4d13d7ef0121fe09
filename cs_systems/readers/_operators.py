"""Collector of the operators in a Kineto trace: columns, and each distinct signature once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from cs_systems.formulas.operator_flops import takes_arguments
from cs_systems.readers._chrome_trace import NOTHING, Arguments, plain
from cs_systems.readers.forms.columns import Categorical, Floats
from cs_systems.readers.forms.operators import Operators, Signature
from cs_systems.readers.forms.trace import Ops


class OperatorReader:
    """Collector of the operators of one process while a trace is read."""

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self._numbers: dict[tuple[str, str], int] = {}
        # Signature by the undecoded text of name, shapes and arguments, so that repeated ones are not decoded again.
        self._written: dict[tuple[str, bytes], int] = {}
        self._code, self._thread, self._start_s, self._end_s = array("q"), array("q"), array("d"), array("d")
        # for operators with a sequence number of autograd: index, sequence number, thread of the forward operator
        self._which, self._sequence, self._forward = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._code)

    @property
    def weight(self) -> int:
        """Memory of the operators, as the number of other events that take as much."""
        return (len(self._code) + len(self._which)) // 4

    def add(self, name: str, start_s: float, end_s: float, thread: int, args: Arguments) -> None:
        """Keep one operator from its event and the event's arguments.

        Raises:
            TypeError, ValueError, OverflowError: One of its numbers is not valid; it is not kept.
        """
        numbered = []
        if args.sequence is not UNSET:
            forward = 0 if args.forward is UNSET else int(args.forward)
            numbered = [(len(self), wrapped(int(args.sequence)), wrapped(forward))]
        columns = _columns(numbered)
        own = array("d", [start_s]), array("d", [end_s]), array("q", [thread])
        self._extend([self._code_of(name, args)], *own, columns)

    def extend(
        self, names: Sequence[Any], start_s: Floats, end_s: Floats, thread: array[int], arguments: Sequence[Arguments]
    ) -> bool:
        """Keep operators and return True; return False and keep none if one of them is irregular.

        Raises:
            AttributeError, TypeError, ValueError, OverflowError: One of them is irregular.
        """
        numbered = [
            (index, args.sequence, 0 if args.forward is UNSET else args.forward)
            for index, args in enumerate(arguments, len(self))
            if args.sequence is not UNSET
        ]
        columns = _columns(numbered)
        shapes = map(b"".join, zip([args.shapes for args in arguments]))  # the fastest way to hashable bytes
        codes = [*map(self._written.get, zip(names, shapes, strict=True))]
        new = [at for at, code in enumerate(codes) if code is None]
        if any(type(names[at]) is not str or "#" in names[at] for at in new):
            return False
        if any(args.old_shapes is not NOTHING for args in arguments):
            return False
        for at in new:
            codes[at] = self._code_of(names[at], arguments[at])
        self._extend(codes, start_s, end_s, thread, columns)
        return True

    def _extend(
        self,
        codes: Iterable[Any],
        start_s: Floats | array[float],
        end_s: Floats | array[float],
        thread: array[int],
        columns: Sequence[array[int]],
    ) -> None:
        for kept, more in zip((self._which, self._sequence, self._forward), columns, strict=True):
            kept.extend(more)
        self._code.extend(codes)
        self._start_s.frombytes(start_s.tobytes())
        self._end_s.frombytes(end_s.tobytes())
        self._thread.extend(thread)

    def _code_of(self, name: str, args: Arguments) -> int:
        """Return the number of an operator's signature."""
        by_values = takes_arguments(name)
        written = name, b"|".join((args.shapes, args.values)) if by_values else bytes(args.shapes)
        is_old = args.old_shapes is not NOTHING
        if not is_old and (known := self._written.get(written)) is not None:
            return known
        shapes = plain(args.old_shapes if args.shapes is NOTHING else args.shapes)
        values = plain(args.values) if by_values else None
        code = self._numbers.setdefault((name, repr((shapes, values))), len(self.signatures))
        if code == len(self.signatures):
            texts = tuple(map(str, values)) if isinstance(values, list) else ()
            self.signatures.append(Signature(name, _shapes(shapes), texts))
        if not is_old:
            self._written[written] = code
        return code

    def read(self) -> Operators | None:
        """Return the operators that were kept; None if there are none."""
        if not self._code:
            return None
        signature = Categorical(self.signatures, np.array(self._code, np.int64))
        times = np.array(self._start_s), np.array(self._end_s)
        return Operators(signature, *times, np.array(self._thread, np.int64))

    def numbered(self) -> Ops | None:
        """Return the operators with a sequence number of autograd, in file order; None if there are none."""
        if not self._which:
            return None
        names: dict[str, int] = {}
        of_signature = np.array([names.setdefault(one.name, len(names)) for one in self.signatures], np.int64)
        which = np.array(self._which)
        return Ops(
            name=Categorical([*names], of_signature[np.array(self._code)[which]]),
            start_s=np.array(self._start_s)[which],
            end_s=np.array(self._end_s)[which],
            thread=np.array(self._thread)[which],
            sequence=np.array(self._sequence),
            forward_thread=np.array(self._forward),
        )


def wrapped(number: int) -> int:
    """Return an identifying number wrapped to a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _columns(rows: list[tuple[int, Any, Any]]) -> list[array[int]]:
    return [array("q", column) for column in zip(*rows, strict=True)] or [array("q")] * 3


def _shapes(value: object) -> tuple[Any, ...] | None:
    """Return recorded shapes as tuples; None if they do not have the profiler's form."""
    if not isinstance(value, list):
        return None
    shapes = [_shape(one) for one in value]
    return None if None in shapes else tuple(shapes)


def _shape(value: object) -> tuple[Any, ...] | None:
    """Return the shape of a tensor, or the shapes of a list of tensors."""
    if not isinstance(value, list):
        return None
    if all(type(size) is int for size in value):
        return tuple(value)
    return _shapes(value) if all(isinstance(one, list) and all(type(n) is int for n in one) for one in value) else None
