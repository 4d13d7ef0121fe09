"""Parameters that the loss reaches only through operators with a derivative of 0, such as the codes of an autoencoder.

The graph below a backward pass shows them: each path from the loss to such a parameter has a node of torch's `round`,
`floor`, `ceil`, `trunc` or `sign`. A straight-through gradient, by a detached difference or a function of the program,
has a path without one. A parameter counts only if an optimizer that holds it steps with a gradient of zeros, since a
hook or another pass may give it one, and if no other step has moved it, such as every tenth step without rounding.

The graph has no lines. A place is told if the classes of the models have a single line that calls the operator, and
none that names it in another way, such as a default argument.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from torch import Tensor, float64, nn
from torch.optim import AdamW, Optimizer

from cs_systems.analysis.comparison.loop_findings import FLAT_OPERATORS, FlatOperatorsRow
from cs_systems.measure.recorder.graph_size import MOST_NODES, first_nodes, operator_of
from cs_systems.measure.recorder.observers import FewSteps
from cs_systems.measure.recorder.stacks import is_own
from cs_systems.measure.recorder.subject import Subject, module_with, parameters_of

MOST_STEPS = 3  # of each period
FLAT = {"Round": "round", "Floor": "floor", "Ceil": "ceil", "Trunc": "trunc", "Sign": "sign"}
ALIASES = {"trunc": {"trunc", "fix"}}
_NOT_OF_TENSORS = {"np", "numpy", "math"}


class FlatOperators(FewSteps):
    """Observer of the leaves of the graphs below the backward passes of a few steps."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = 0
        self._found = Counter[int]()  # steps by the `id` of a parameter
        self._operators: dict[int, set[str]] = {}
        self._others: set[int] = set()  # parameters with another path, or another gradient than zeros
        self._sums: dict[int, tuple[float, float]] = {}  # of a parameter's values, when it first got zeros
        self.step_failed()

    def step_failed(self) -> None:
        self._cut: set[int] = set()  # leaves of this step
        self._zeros: set[int] = set()  # of these, parameters that got zeros
        self._passes, self._is_unknown = 0, False

    def look_before_backward(self, roots: Any) -> None:
        self._passes += 1
        reached, flat = _reached(first_nodes(roots))
        self._is_unknown |= len(reached) >= MOST_NODES
        if not flat and not self._cut and not self._found:
            return
        self._others |= {id(leaf) for leaf in _leaves(reached)}
        for name in {operator_of(node) for node in flat}:
            below, _ = _reached([node for node in flat if operator_of(node) == name], frozenset())
            self._is_unknown |= len(below) >= MOST_NODES
            for leaf in _leaves(below):
                self._cut.add(id(leaf))
                self._operators.setdefault(id(leaf), set()).add(FLAT[name or ""])

    def look_before_update(self, optimizer: Optimizer) -> None:
        if not self._cut and not self._found:
            return
        for parameter in parameters_of(optimizer):
            which = id(parameter)
            if (which in self._cut or which in self._found) and parameter.grad is not None:
                if not _is_zero(parameter.grad):
                    self._others.add(which)
                elif which in self._cut:
                    self._zeros.add(which)
                    self._sums.setdefault(which, _sums(parameter))

    def look_after_step(self) -> None:
        super().look_after_step()
        if self._passes:
            self._steps += 1
            self._found.update(() if self._is_unknown else self._zeros)
        self.step_failed()
        if self._steps and self._steps % MOST_STEPS == 0:
            self.stop_looking()

    def end(self) -> None:
        row = self._row()
        self.keep(FLAT_OPERATORS, [row] if row else [])

    def _row(self) -> FlatOperatorsRow | None:
        told = self._found.keys() - self._others - self._moved()
        of = {which: name for which, name in self._subject.names().items() if which in told}
        if not of:
            return None
        operators = sorted({name for which in of for name in self._operators[which]})
        function, place = line_of_call(self._subject.models, operators[0]) if len(operators) == 1 else ("", "")
        return {
            "operators": ", ".join(operators),
            "function": function,
            "place": place,
            "module": module_with([*of.values()]),
            "parameters": len(of),
            "steps": min(self._found[which] for which in of),
        }

    def _moved(self) -> set[int]:
        """Return the parameters that a gradient has moved in a step that was not looked at."""
        moved = set[int]()
        for optimizer in self._subject.optimizers:
            for group in optimizer.param_groups:
                decays = bool(group.get("weight_decay", optimizer.defaults.get("weight_decay")))
                for parameter in group["params"]:
                    before = self._sums.get(id(parameter))
                    if before is None:
                        continue
                    if _got_gradient(optimizer, group, parameter) if decays else before != _sums(parameter):
                        moved.add(id(parameter))
        return moved


def _sums(parameter: Tensor) -> tuple[float, float]:
    values = getattr(parameter, "_local_tensor", parameter).detach()
    return values.sum(dtype=float64).item(), values.abs().sum(dtype=float64).item()


def _got_gradient(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> bool:
    """Return whether averages of gradients show one; not if the optimizer adds the decay of weights to gradients."""
    if not (isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay")):
        return False
    state = optimizer.state.get(parameter, {})
    return any(isinstance(state.get(name), Tensor) and not _is_zero(state[name]) for name in ("exp_avg", "exp_avg_sq"))


def _reached(nodes: Sequence[Any], ends: Container[object] = FLAT) -> tuple[set[Any], list[Any]]:
    """Return the nodes on all paths from these nodes, and those of the operators at which the paths end."""
    waiting, ending = [*nodes], list[Any]()
    seen = {*waiting}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if operator_of(node) in ends:
            ending.append(node)
            continue
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        waiting += new
    return seen, ending


def _leaves(nodes: Iterable[Any]) -> Iterator[Tensor]:
    return (node.variable for node in nodes if hasattr(node, "variable"))


def _is_zero(gradient: Tensor) -> bool:
    local = getattr(gradient, "_local_tensor", gradient)  # for a DTensor, its local tensor
    values = local.coalesce().values() if local.is_sparse else local
    return not bool(values.any())


def line_of_call(models: Iterable[nn.Module], operator: str) -> tuple[str, str]:
    """Return the method and the place of the single line that calls an operator in the files of the models' classes.

    Empty texts if there are several lines or none, such as one more in another file of the program, or if a class of a
    library might call it.
    """
    codes = [*_methods(models)]
    if any(code is None for code in codes):
        return "", ""
    own = [code for code in codes if code is not None]
    files = {code.co_filename for code in own} | {*_own_modules()} if own else set[str]()
    lines = [(file, line) for file in files for line in _calls(file, operator)]
    if len(lines) != 1:
        return "", ""
    file, line = lines[0]
    numbers = ((code, [each for *_, each in code.co_lines() if each]) for code in own if code.co_filename == file)
    around = [code for code, known in numbers if min(known) <= line <= max(known)]
    return (around[0].co_qualname.replace("<locals>.", ""), f"{Path(file).name}:{line}") if around else ("", "")


def _own_modules() -> Iterator[str]:
    """Yield the files of the imported modules outside of libraries, which may call it for a model."""
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_own(file):
            yield file


def _methods(models: Iterable[nn.Module]) -> Iterator[CodeType | None]:
    """Yield the methods of the classes of all modules outside of torch; None for a class of a library."""
    kinds = {kind for model in models for module in model.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for member in vars(kind).values():
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function):
                yield function.__code__ if is_own(function.__code__.co_filename) else None


def _calls(file: str, operator: str) -> Iterator[int]:
    """Yield the lines of a file with this name of an operator, such as `torch.round` and `x.round_`."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # such as a cell of a notebook with commands
        return
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and each.attr.rstrip("_") in ALIASES.get(operator, {operator}):
            is_other = isinstance(each.value, ast.Name) and each.value.id in _NOT_OF_TENSORS
            if not is_other and each.end_lineno is not None:
                yield each.end_lineno
