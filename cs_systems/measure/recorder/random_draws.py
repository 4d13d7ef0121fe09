"""Random numbers that are the same in each step, because a generator is seeded anew with the same number.

In a few warm-up steps, the functions of torch and NumPy that draw random numbers are replaced by ones that keep some of
the numbers. Draws at the same place of the program are compared between steps, never within one, where the same numbers
are usual: recomputed activations, antithetic noise.

Draws that are the same on purpose are left out: those without gradients (evaluation, initial weights), those between
reading and restoring the generator's state, such as inside torch.random.fork_rng, and those without a value for each
sample of the batch (fixed projections, permutations). So are those with probabilities or means for each element, which
may leave no choice. A process that compiles is not observed.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._device import _device_constructors

from cs_systems.analysis.comparison.loop_findings import MANY_DRAWS, RANDOM_DRAWS, ManyDrawsRow, RandomDrawRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Hidden, ModelCall, Period, Replacing, is_profiled
from cs_systems.measure.recorder.phases import BACKWARD, OPTIMIZER
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.tracker import Tracker
from cs_systems.measure.workloads._batches import tensors_in

MOST_STEPS, FEWEST_STEPS = 4, 3
MOST_DRAWS = 64  # of a step, with numbers that are kept
FEWEST_CALLS, MOST_CALLS = 20, 1000  # in each step at one place: the least that is told, and the most that is counted
MOST_VALUES = 256  # compared values of a draw
FEWEST_BITS = 40.0  # of a draw's values, so that equal ones are no coincidence
OF_TORCH = "rand randn randint rand_like randn_like randint_like"
OF_A_TENSOR = "normal_ uniform_ exponential_ random_ bernoulli_"
OF_NUMPY = "rand randn random random_sample randint standard_normal normal uniform choice"
_Key = tuple[str, Line, int]


class _Draw(NamedTuple):
    """Some values of a draw; for dropout, whether it dropped them."""

    values: Any
    shape: tuple[int, ...]


class RandomDraws(Replacing):
    """Observer of the random numbers that a program draws in a few warm-up steps.

    hidden: context for looks. compilations: the number of compilations of this process so far.
    """

    def __init__(self, tracker: Tracker, hidden: Hidden, compilations: Callable[[], int]) -> None:
        super().__init__()
        self._tracker, self._hidden, self._compilations = tracker, hidden, compilations
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[dict[_Key, tuple[Any, ...]]] = []
        self._shapes: dict[_Key, tuple[int, ...]] = {}
        self._calls_of_steps: list[Counter[tuple[str, Line]]] = []
        self._start()

    def _start(self) -> None:
        self._draws: dict[_Key, _Draw] = {}
        self._counts = Counter[tuple[str, Line]]()
        self._calls = Counter[tuple[str, Line]]()
        self._states: dict[str, int] = {}  # by library: the number of draws when the state of its generator was read
        self._rows: set[int] = set()
        self._is_updated = False

    def begins(self, period: Period) -> None:
        super().begins(period)
        self.is_looking = period is Period.WARMUP and not self._compilations() and len(self._steps) < MOST_STEPS
        if self.is_looking:
            self._start()
            _device_constructors()  # it keeps the functions that it finds at its first call
            self._process = os.getpid()  # a worker of a data loader inherits the replaced functions
            self._installed = Observation()
            for owner, name, seen in self._functions():
                self._installed.add(partial(_watched, owner, name, seen), is_guarded=True)

    def _functions(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield the functions to replace, each with the method that sees its calls."""
        yield from ((torch, name, partial(self._drawn, name=f"torch.{name}")) for name in OF_TORCH.split())
        yield from ((Tensor, name, partial(self._filled, name=name)) for name in OF_A_TENSOR.split())
        yield functional, "dropout", self._dropped
        yield torch, "get_rng_state", partial(self._state_read, of="torch")
        yield torch, "set_rng_state", partial(self._state_restored, of="torch")
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            yield from ((numpy, name, partial(self._drawn, name=f"np.random.{name}")) for name in OF_NUMPY.split())
            yield numpy, "get_state", partial(self._state_read, of="np")
            yield numpy, "set_state", partial(self._state_restored, of="np")

    def look_at_call(self, call: ModelCall) -> None:
        if call.is_recorded:
            self._rows |= {each.shape[0] for each in tensors_in(call.arguments) if each.dim()}

    def look_after_backward(self) -> None:
        self._is_updated = True

    def look_after_step(self) -> None:
        super().look_after_step()
        if self._is_updated:
            self._calls_of_steps.append(self._calls)
        if self._is_updated and self._rows:
            draws = {key: draw for key, draw in self._draws.items() if draw.shape[0] in self._rows}
            self._shapes |= {key: draw.shape for key, draw in draws.items()}
            self._steps.append({key: tuple(draw.values.tolist()) for key, draw in draws.items()})
        self._start()
        if len(self._steps) >= MOST_STEPS or self._compilations():
            self.stop_looking()

    def _observes(self) -> bool:
        if not (self.is_looking and torch.is_grad_enabled() and self._tracker.observes()):
            return False
        if len(self._draws) >= MOST_DRAWS or os.getpid() != self._process or is_tracing() or is_profiled():
            return False
        if self._tracker.is_open(BACKWARD, OPTIMIZER):
            return False
        return bool(torch._C._functorch.peek_interpreter_stack() is None)  # tensors of torch.func hide their elements

    def _keep(self, name: str, values: Callable[[], Any], shape: tuple[int, ...]) -> None:
        """Keep the values of a draw that may have one for each sample of a batch."""
        _, line = own_lines(sys._getframe(1))
        if line is None or not shape or shape[0] < 2 or math.prod(shape) == 0:
            return
        self._counts[name, line] += 1
        with self._hidden():
            self._draws[name, line, self._counts[name, line]] = _Draw(values(), shape)

    def _count(self, name: str) -> None:
        """Count a draw at its place, of whatever size."""
        if not (self.is_looking and self._tracker.observes()) or os.getpid() != self._process or is_tracing():
            return
        if self._calls.total() < MOST_CALLS and (line := own_lines(sys._getframe(1))[1]) is not None:
            self._calls[name, line] += 1

    @as_guest
    def _drawn(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
        self._count(name)
        is_array = name.startswith("np.")
        if not self._observes() or (is_array and not _is_free_choice(args, kwargs)):
            return
        if _is_plain(result):
            self._keep(name, lambda: _some(result).clone(), tuple(result.shape))
        elif is_array and hasattr(result, "shape") and result.dtype.kind in "fiub":
            self._keep(name, lambda: result.reshape(-1)[:MOST_VALUES].copy(), tuple(result.shape))

    @as_guest
    def _filled(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
        has_tensors = any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values()))
        if _is_plain(result) and not result.requires_grad and not has_tensors:
            self._drawn(result, args, kwargs, name=name)

    @as_guest
    def _dropped(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs: Any = args[0] if args else kwargs.get("input")
        if result is not inputs and _is_plain(result) and _is_plain(inputs) and self._observes():
            dropped = lambda: (_some(result) == 0) & (_some(inputs) != 0)  # noqa: E731
            self._keep("dropout", dropped, tuple(result.shape))

    @as_guest
    def _state_read(self, *_: Any, of: str) -> None:
        if self._tracker.observes():
            self._states[of] = len(self._draws)

    @as_guest
    def _state_restored(self, *_: Any, of: str) -> None:
        """Forget the draws since the state was read, which do not change the random numbers of the training."""
        if of in self._states and self._tracker.observes():
            for key in [*self._draws][self._states[of] :]:
                del self._draws[key]

    def end(self) -> None:
        rows = [row for key in self._shapes if (row := self._row(key))]
        self.keep(RANDOM_DRAWS, rows)
        if len(self._calls_of_steps) >= FEWEST_STEPS:
            self.keep(MANY_DRAWS, [*self._many()])
        self._steps.clear()
        self._calls_of_steps.clear()

    def _many(self) -> Iterator[ManyDrawsRow]:
        for name, line in self._calls_of_steps[0]:
            calls = min(step[name, line] for step in self._calls_of_steps)
            if calls >= FEWEST_CALLS:
                yield {"drawn": name, "function": function_of(line), "place": place_of(line), "calls": calls}

    def _row(self, key: _Key) -> RandomDrawRow | None:
        """Return the row of a draw that gave the same values in each step with it."""
        found = [step[key] for step in self._steps if key in step]
        if len(found) < FEWEST_STEPS or len(found) < len(self._steps) or len({*found}) > 1:
            return None
        if _bits(found[0]) < FEWEST_BITS:
            return None
        name, line, _ = key
        return {
            "drawn": name,
            "shape": " × ".join(map(str, self._shapes[key])),
            "function": function_of(line),
            "place": place_of(line),
            "steps": len(found),
        }


def _watched(owner: Any, name: str, seen: Callable[..., Any]) -> Undo:
    """Replace a function by one that shows its result and arguments; return a function that restores it."""
    own = getattr(owner, name)

    @passed_through
    @functools.wraps(own)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        seen(result, args, kwargs)
        return result

    return replaced(owner, name, watched)


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    is_tensor = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    return is_tensor and not (value.is_meta or value.is_quantized)


def _some(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:MOST_VALUES]


def _is_free_choice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether arguments of a function of NumPy are numbers, and leave it a choice."""
    values = [*args, *kwargs.values()]
    is_plain = all(isinstance(each, (int, float, str, type, tuple, list, type(None))) for each in values)
    return is_plain and kwargs.get("replace", True) is not False


def _bits(values: tuple[Any, ...]) -> float:
    """Return an estimate of the bits of chance in values, from how often each of them occurs."""
    counts = Counter(values)
    same = sum((count / len(values)) ** 2 for count in counts.values())
    return -len(values) * math.log2(same)
