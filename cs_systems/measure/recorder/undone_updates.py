"""Updates that the program undoes: after the optimizer's step it writes other values into the trained weights.

In a few steps, some elements of some weights are read before an update, after it, in the next call of the model, and
before the next backward pass. An update is undone if nearly nothing of it is left in both of the last. These are not:

- updates that a call of the model used first, such as a prediction after an adaptation to one sample;
- weights that return before backward, such as those of an average that is evaluated;
- updates that the program copied before, such as those of one client in a federation;
- weights that are those of another optimizer by then, such as a copy of which only the change is used;
- elements that are 0 afterwards, or have the same absolute value as many others: masks, and limits of weights.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.loop_findings import UNDONE_UPDATES, UndoneUpdatesRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.gradients import evenly, some_values
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import ModelCall, Period, Replacing
from cs_systems.measure.recorder.phases import OPTIMIZER
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of
from cs_systems.measure.recorder.tracker import Tracker

MOST_PARAMETERS = 8  # most observed parameters of an optimizer
FEWEST_PARAMETERS, FEWEST_VALUES = 2, 4  # with values that an update changed; of a weight that is judged
LEFT = 0.2  # largest share of an update that is left of an undone one
LEFT_OF_ONE = 0.5  # the same of one element, in most of them
MOST_ELEMENTS = 0.9
WRITERS = "copy_ lerp_ mul_ add_ sub_ set_ fill_"  # methods that write into a tensor
WRITERS_OF_MANY = "_foreach_copy_ _foreach_lerp_ _foreach_mul_ _foreach_add_ _foreach_sub_"
READERS = "clone __deepcopy__"  # methods that copy one
Values = tuple[float, ...]


class _Update(NamedTuple):
    """Update of an optimizer: some of its parameters, and some values of each before it and after it.

    seen: at each look since then, whether the update was undone.
    """

    parameters: Sequence[weakref.ref[Tensor]]
    before: Sequence[Values]
    after: Sequence[Values]
    seen: list[bool]

    def tensors(self) -> Iterator[Tensor]:
        return (each for reference in self.parameters if (each := reference()) is not None)


class _Judged(NamedTuple):
    """Result for one optimizer."""

    name: str
    steps: Counter[bool]  # whether the update was undone
    shares: list[float]  # that were undone


class UndoneUpdates(Replacing):
    """Observer of updates that the program undoes before the next step uses them.

    compilations: the number of compilations of this process so far.
    """

    def __init__(self, subject: Subject, tracker: Tracker, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._subject, self._tracker, self._compilations = subject, tracker, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._judged: weakref.WeakKeyDictionary[Optimizer, _Judged] = weakref.WeakKeyDictionary()
        self._writers = Counter[Line]()
        self._is_watched = self._is_known = False  # whether copies of the weights were seen, now or in some steps
        self._start()

    def _start(self) -> None:
        self._before: dict[int, tuple[list[weakref.ref[Tensor]], list[Values]]] = {}
        self._open: weakref.WeakKeyDictionary[Optimizer, _Update] = weakref.WeakKeyDictionary()
        self._places: set[int] = set()  # addresses of the weights that are looked at
        self._written: list[Line] = []
        self._is_copied = False

    def begins(self, period: Period) -> None:
        super().begins(period)
        self._is_watched = period is Period.WARMUP and not self._compilations()
        if self._is_watched:
            self._process = os.getpid()  # a worker of a data loader inherits the replaced functions
            self._installed = Observation()
            for name in (*WRITERS.split(), *READERS.split()):
                seen = self._copies if name in READERS.split() else self._writes
                self._installed.add(partial(_watched, Tensor, name, seen), is_guarded=True)
            for name in WRITERS_OF_MANY.split():
                self._installed.add(partial(_watched, torch, name, self._writes_many), is_guarded=True)
            self._installed.add(partial(_watched, nn.Module, "state_dict", self._copies_state), is_guarded=True)
            self._installed.add(partial(_data_watched, self._writes), is_guarded=True)

    def _observes(self) -> bool:
        return bool(self._places) and self._tracker.observes() and os.getpid() == self._process and not is_tracing()

    @as_guest
    def _writes(self, tensor: Any, *_: Any, **__: Any) -> None:
        if self._observes() and self._is_looked_at(tensor):
            self._note_writer()

    @as_guest
    def _writes_many(self, tensors: Any, *_: Any, **__: Any) -> None:
        if self._observes() and any(map(self._is_looked_at, tensors)):
            self._note_writer()

    @as_guest
    def _copies(self, tensor: Any, *_: Any, **__: Any) -> None:
        if self._observes() and not self._written and self._is_looked_at(tensor):
            self._is_copied = True

    @as_guest
    def _copies_state(self, module: Any, *_: Any, **__: Any) -> None:
        if self._observes() and not self._written and any(map(self._is_looked_at, module.parameters())):
            self._is_copied = True

    def _note_writer(self) -> None:
        if (line := own_lines(sys._getframe(1))[1]) is not None:
            self._written.append(line)

    def _is_looked_at(self, tensor: Any) -> bool:
        return _address(tensor) in self._places

    def look_before_update(self, optimizer: Optimizer) -> None:
        self._places.clear()
        some = evenly([p for p in parameters_of(optimizer) if p.grad is not None], MOST_PARAMETERS)
        self._before[id(optimizer)] = [weakref.ref(p) for p in some], [some_values(p) for p in some]

    def look_after_update(self, optimizer: Optimizer) -> None:
        parameters, before = self._before.pop(id(optimizer), ((), ()))
        every = [reference() for reference in parameters]
        after = [some_values(p) for p in every if p is not None]
        if len(after) < FEWEST_PARAMETERS or len(after) < len(every):
            return
        self._open[optimizer] = _Update([*parameters], [*before], after, [])
        self._places = {
            place for update in self._open.values() for p in update.tensors() if (place := _address(p)) is not None
        }
        self._written, self._is_copied = [], False

    def look_at_call(self, call: ModelCall) -> None:
        """Look at the weights of the model that is called, if no call since their update did."""
        if call.is_in_update or not any(not update.seen for update in self._open.values()):
            return
        called = {id(p) for p in call.arguments[0][0].parameters()}
        for optimizer, update in self._open.items():
            if not update.seen and any(id(p) in called for p in update.tensors()):
                update.seen.append(self._share(optimizer, update) is not None)

    def look_before_backward(self, roots: Any) -> None:
        if self._tracker.is_open(OPTIMIZER):
            return
        for optimizer, update in [*self._open.items()]:
            share = self._share(optimizer, update)
            is_undone = share is not None and all(update.seen) and not self._is_copied
            judged = self._judged.setdefault(optimizer, _Judged(type(optimizer).__name__, Counter(), []))
            judged.steps[is_undone] += 1
            self._is_known |= self._is_watched
            if is_undone and share is not None:
                judged.shares.append(share)
                self._writers.update({*self._written})
        self._open.clear()
        self._places.clear()

    def _share(self, optimizer: Optimizer, update: _Update) -> float | None:
        """Return the least share of the update that is undone in a weight; None if it is left in one of them."""
        tensors = [*update.tensors()]
        if len(tensors) < len(update.before):
            return None
        now = [some_values(each) for each in tensors]
        shares = [
            share
            for values in zip(update.before, update.after, now, strict=True)
            if (share := _undone(*values)) is not None
        ]
        if len(shares) < FEWEST_PARAMETERS or min(shares) < 1 - LEFT:
            return None
        others = {id(p): p for each in self._subject.optimizers if each is not optimizer for p in parameters_of(each)}
        own, shapes = {id(each) for each in tensors}, {each.shape for each in tensors}
        is_of_another = any(
            some_values(p) in now for which, p in others.items() if which not in own and p.shape in shapes
        )
        return None if is_of_another else min(shares)

    def end(self) -> None:
        self.keep(UNDONE_UPDATES, [*self._rows()])
        self._start()

    def _rows(self) -> Iterable[UndoneUpdatesRow]:
        most = self._writers.most_common(1)
        line = most[0][0] if most else None
        for each in self._judged.values():
            if self._is_known and each.steps[True]:
                yield {
                    "optimizer": each.name,
                    "steps": each.steps.total(),
                    "undone": each.steps[True],
                    "share": min(each.shares),
                    "function": None if line is None else function_of(line),
                    "place": None if line is None else place_of(line),
                }


def _undone(before: Values, after: Values, now: Values) -> float | None:
    """Return the share of the update of a weight that is undone; None if too few of its elements can be judged.

    0 if that holds for less than most of the elements, each by itself.
    """
    many = {size for size, number in Counter(map(abs, now)).items() if number > max(1, len(now) // 4)}
    changes = [
        (b - a, c - a) for a, b, c in zip(before, after, now, strict=True) if b != a and c and abs(c) not in many
    ]
    if len(changes) < FEWEST_VALUES:
        return None
    if sum(abs(left) <= LEFT_OF_ONE * abs(change) for change, left in changes) < MOST_ELEMENTS * len(changes):
        return 0.0
    left, all_of_it = sum(left**2 for _, left in changes), sum(change**2 for change, _ in changes)
    return max(0.0, 1 - (left / all_of_it) ** 0.5) if all_of_it else None


def _address(tensor: Any) -> int | None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.data_ptr() or None


def _watched(owner: Any, name: str, seen: Callable[..., Any]) -> Undo:
    """Replace a function by one that shows its arguments; return a function that restores it."""
    own = getattr(owner, name)

    @passed_through
    @functools.wraps(own)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen(*args[:1])
        return own(*args, **kwargs)

    return replaced(owner, name, watched)


def _data_watched(seen: Callable[..., Any]) -> Undo:
    """Replace `Tensor.data` by a property that shows tensors to which it is assigned."""
    own: Any = Tensor.data

    def assign(tensor: Tensor, value: Tensor) -> None:
        seen(tensor)
        own.__set__(tensor, value)

    watched: Any = property(own.__get__, assign)
    return replaced(Tensor, "data", watched)
