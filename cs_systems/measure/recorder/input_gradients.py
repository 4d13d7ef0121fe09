"""Observer of gradients of a model's input that nothing reads, such as those left from a saliency map.

A gradient that the program has read, in the loop or in a hook, has an object in Python by then. So this observer looks
for that object at the end of the step, before it reads the gradient itself.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from cs_systems.analysis.comparison.loop_findings import INPUT_GRADIENTS
from cs_systems.measure.recorder.graph_size import MOST_NODES, backward_costs, leading_to, leaves_below, nodes_below
from cs_systems.measure.recorder.observers import FewSteps, ModelCall
from cs_systems.measure.recorder.stacks import own_lines, place_of
from cs_systems.measure.recorder.subject import Subject
from cs_systems.measure.workloads._batches import tensors_in

MOST_STEPS = 4  # of each period; the first one only shows whether the program keeps its input


class Looked(NamedTuple):
    """Leaves of a step that are no parameters, and the share of backward's arithmetic that serves them alone.

    share: 0 if their gradients may serve the program.
    """

    leaves: list[Tensor]
    share: float


class InputGradients(FewSteps):
    """Observer of the leaves below a loss that are neither parameters nor held by an optimizer, in a few steps.

    The program may read a gradient after the update, so that a step is judged in the next one.
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._judged = self._steps = 0
        self._shares: list[float] = []
        self._shape = ""
        self._place: str | None = None
        self._own: list[weakref.ref[Tensor]] = []  # gradients that were read here
        self._forget()

    def _forget(self) -> None:
        self._last: Looked | None = None  # of the step before
        self._before: list[weakref.ref[Tensor]] = []  # the leaves of the step before that one
        self._begin()

    def _begin(self) -> None:
        self._calls = self._passes = 0
        self._inputs: list[Tensor] = []
        self._now = Looked([], 0.0)

    def look_at_call(self, call: ModelCall) -> None:
        if call.is_recorded:
            self._calls += 1
            self._inputs = [each for each in tensors_in(call.arguments) if each.requires_grad]

    def look_before_backward(self, roots: Any) -> None:
        if not self._passes:
            self._judge()
        if not self.is_looking:
            return
        self._passes += 1
        if self._inputs and self._calls == self._passes == 1 and self._subject.world_size == 1:
            held = self._subject.parameters()
            unheld = [each for each in leaves_below(roots) if id(each) not in held]
            inputs = {id(each) for each in (*leaves_below(self._inputs), *self._inputs)}
            if unheld and all(id(each) in inputs and not _has_hooks(each) for each in unheld):
                self._now = Looked(unheld, _share(roots, unheld))
                line = own_lines(sys._getframe(1))[1]
                self._place = place_of(line) if line else None

    def look_after_step(self) -> None:
        if self._passes:
            is_alone = self._calls == self._passes == 1
            self._last = self._now if is_alone else Looked([], 0.0)
        self._begin()
        super().look_after_step()

    def _judge(self) -> None:
        """Judge the step before, by what its gradients are now."""
        last, self._last = self._last, None
        if last is None:
            return
        self._judged += 1
        if self._before and not self._keeps(last.leaves):
            self._steps += 1
            if last.share and self._is_unread(last.leaves):
                self._shares.append(last.share)
                self._shape = " × ".join(map(str, last.leaves[0].shape))
        self._before = [weakref.ref(each) for each in last.leaves]
        if self._judged % MOST_STEPS == 0:
            self.stop_looking()

    def _keeps(self, leaves: list[Tensor]) -> bool:
        """Return whether other leaves of the step before still exist: the program may look at them later.

        Nothing is known then; the sampling of the stack may keep them for a moment, too.
        """
        now = {id(each) for each in leaves}
        return any((before := each()) is not None and id(before) not in now for each in self._before)

    def _is_unread(self, leaves: list[Tensor]) -> bool:
        """Return whether leaves have gradients that nothing has read."""
        every = gc.get_objects()  # no other object has the address of one of these as long as they are held
        known = {id(each) for each in every if issubclass(type(each), Tensor)}
        known -= {id(own) for each in self._own if (own := each()) is not None}
        gradients = [each.grad for each in leaves]
        self._own = [weakref.ref(each) for each in gradients if each is not None]
        return all(each is not None and id(each) not in known for each in gradients)

    def stop_looking(self) -> None:
        super().stop_looking()
        self._forget()

    def end(self) -> None:
        if self._shares:
            row = {
                "steps": len(self._shares),
                "of_steps": self._steps,
                "shape": self._shape,
                "share": sum(self._shares) / len(self._shares),
                "place": self._place,
            }
            self.keep(INPUT_GRADIENTS, [row])


def _share(roots: Any, leaves: list[Tensor]) -> float:
    """Return the share of backward's arithmetic that serves some leaves alone; 0 if they may serve the program.

    Functions of the program, and those of checkpoints and hooks, may need that their input has a gradient.
    """
    if any(isinstance(node, BackwardCFunction) for node, _ in leading_to(roots, leaves)):
        return 0.0
    alone_s, total_s = backward_costs(roots, leaves)
    return alone_s / total_s if total_s and len(nodes_below(roots)) < MOST_NODES else 0.0


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)
