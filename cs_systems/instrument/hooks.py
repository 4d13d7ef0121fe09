"""Ranges around the modules of a model in forward and backward, opened by hooks.

Forward: hooks of the modules open and close ranges. Backward: autograd runs the nodes of a graph in a thread of its own
(on CUDA), where ranges of the main thread do not apply. Each node therefore gets the ranges that were open when forward
made it: nodes are numbered in the order in which they are made, and the open ranges are stored by that number. Autograd
runs the nodes of one thread in falling order of their numbers, so a hook is needed only where the ranges change. Work
between two nodes (sums of gradients, parameters' gradients) belongs to the node before it.

A model under torch.compile is one function with one node: hooks on its modules would be compiled into it or break its
graph. Its ranges are written into the code that is generated for it: see `compiled_ranges`. Its modules have hooks too:
compiled code ignores them, and code that torch.compile leaves to eager mode, after a graph break, runs them. In an
observed user's program these modules have no hooks, because hooks would change how torch.compile compiles that code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from cs_systems.config import Phase
from cs_systems.instrument import compiler
from cs_systems.instrument.annotate import STEP, Label, OpenLabel, Ranges, listening
from cs_systems.instrument.structure import WRAPPERS, range_names

# these ranges surround forward and do not identify an operation of backward, unlike `loss`
_NOT_OF_BACKWARD = {STEP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
MOST_RANGES = 20_000  # limit of modules with a range; deeper ones belong to the module around them
_ACCUMULATES = 1 << 63  # autograd's numbers for nodes that accumulate a parameter's gradient begin here


class Annotations:
    """Handle of the hooks on a model, with a method `remove`."""

    def __init__(self, handles: Sequence[RemovableHandle | _CompiledCall]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __len__(self) -> int:
        return len(self._handles)


def annotate_model(
    model: nn.Module, ranges: Ranges, depth: int | None = None, names: Mapping[str, str] | None = None
) -> Annotations:
    """Install hooks that open a range around the forward of every module and close it even if forward raises.

    A range has the name that `structure.range_names` gives: the module's path, or the own model's vocabulary. Lists,
    which are never called, and modules that return their input get no range. Inside a module under torch.compile, the
    ranges come from `compiled_ranges`, and from hooks only where its code runs in eager mode.

    depth: the number of words of the longest path with a range; None for as many as MOST_RANGES allows. names: path →
    range, instead of those names, for every module.
    """
    found = list(_boundaries(model))
    named: Mapping[str, str | None] = names or range_names([path for path, *_ in found], type(model).__name__)
    if depth is None:
        depth = _deepest([path for path, *_ in found if named[path]])
    handles: list[RemovableHandle | _CompiledCall] = []
    for path, module, is_compiled in found:
        name = named[path]
        if name is None or _depth(path) > depth:
            continue
        if is_compiled and isinstance(ranges, BackwardRanges):
            ranges.regions[name] = path
        if is_compiled and module._compiled_call_impl is not None:
            handles.append(_CompiledCall(module, ranges, name))
            continue
        # opened last and closed first, because a range must end inside the ranges that other hooks have opened
        opens, closes = (
            ModuleHook(functools.partial(_open, ranges, name)),
            ModuleHook(functools.partial(_close, ranges)),
        )
        handles.append(module.register_forward_pre_hook(opens))
        handles.append(module.register_forward_hook(closes, always_call=True, prepend=True))
    return Annotations(handles)


def _boundaries(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (path, module, whether torch.compile compiles it as one function) for the modules that get hooks."""
    done: set[str] = set()
    spared: set[nn.Module] = set()
    for raw, module in model.named_modules():
        if module in spared:
            continue
        path = ".".join(word for word in raw.split(".") if word not in WRAPPERS)
        if path not in done and not _does_nothing(module):
            done.add(path)
            is_compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            if is_compiled and compiler.is_observed():
                spared |= {*module.modules()} - {module}
            yield path, module, is_compiled


def _does_nothing(module: nn.Module) -> bool:
    """Return whether a module launches no kernel of its own: a list, an identity, a dropout with p = 0."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity)):
        return True
    return isinstance(module, torch.nn.modules.dropout._DropoutNd) and (module.p == 0 or not module.training)


def _deepest(paths: Sequence[str]) -> int:
    """Return the largest depth, at least 1, down to which the model has at most MOST_RANGES modules."""
    depths = sorted(map(_depth, paths))
    return max(1, depths[-1] if len(depths) <= MOST_RANGES else depths[MOST_RANGES] - 1) if depths else 1


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


class _CompiledCall:
    """Range around a module compiled by `module.compile()`; hooks on it would become part of the compiled code."""

    def __init__(self, module: nn.Module, ranges: Ranges, name: str) -> None:
        self._module, self._before = module, module._compiled_call_impl
        before: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            ranges.push(name)
            try:
                return before(*args, **kwargs)
            finally:
                ranges.pop()

        module._compiled_call_impl = call

    def remove(self) -> None:
        self._module._compiled_call_impl = self._before


class ModuleHook:
    """Hook on one module only, not on its copies; a pickled module with the hook loads without this package."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @compiler.untraced
    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # a built-in function that accepts any arguments and does nothing


def _open(ranges: Ranges, name: str, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        ranges.push(name)


def _close(ranges: Ranges, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        ranges.pop()


@contextmanager
def annotated(
    ranges: Ranges,
    model: nn.Module | None = None,
    depth: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Send annotations inside the block to `ranges`, with a range for each module of `model` (see `annotate_model`).

    Backward opens the ranges of forward again.
    """
    reopening = BackwardRanges(ranges)
    installs: list[Callable[[], compiler.Undo]] = [reopening.roots.install]
    if model is not None:
        installs.append(lambda: annotate_model(model, reopening, depth, names).remove)
    with ExitStack() as hooks, listening(reopening):
        if compiler.is_observed():
            observation = compiler.Observation()
            hooks.callback(observation.close)
            for install in installs:
                observation.add(install)
        else:
            for install in installs:
                hooks.callback(install())
        yield


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[str, Label]] = []  # opened by annotate and module hooks: (name, its label)
        self.backward = OpenLabel()  # opened by the hooks of nodes
        # Nodes that this thread makes from number `numbers[i]` on belong to `labels[i]`.
        self.numbers: list[int] = []
        self.labels: list[Label] = []


def _remember(thread: _OfThread, label: Label) -> None:
    """Assign the nodes that the thread makes from now on to `label`."""
    number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # of the next node
    if thread.numbers and thread.numbers[-1] == number:  # no node was made in between
        thread.labels[-1] = label
        return
    thread.numbers.append(number)
    thread.labels.append(label)


class BackwardRanges:
    """Ranges that are opened again in backward, around the nodes that forward made inside them."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self.regions: dict[str, str] = {}  # range of a compiled module → the module's path
        self._thread = _OfThread()
        self.roots = BackwardRoots(self._attach, self._close)

    def push(self, name: str) -> None:
        thread = self._thread
        if name == STEP or (name == Phase.FORWARD and all(each != STEP for each, _ in thread.open)):  # a new graph
            thread.numbers.clear()
            thread.labels.clear()
        self._ranges.push(name)
        before = thread.open[-1][1] if thread.open else ()
        label = before if name in _NOT_OF_BACKWARD else (*before, name)
        thread.open.append((name, label))
        _remember(thread, label)

    def pop(self) -> None:
        thread = self._thread
        thread.open.pop()
        self._ranges.pop()
        _remember(thread, thread.open[-1][1] if thread.open else ())

    def region(self) -> tuple[str, bool]:
        """Return the path of the compiled module running in this thread ("" for the model), and if it has a range."""
        thread = self._thread
        for name in reversed([*(name for name, _ in thread.open), *thread.backward.now]):
            if name in self.regions:
                return self.regions[name], True
        return "", False

    def _attach(self, roots: Iterable[Node]) -> list[RemovableHandle]:
        """Install hooks at the nodes where the ranges change, in the order in which autograd will run them."""
        numbers, labels = self._thread.numbers, self._thread.labels
        handles: list[RemovableHandle] = []
        before: Label = ()
        at = len(numbers) - 1
        for number, node in nodes_below(roots):
            while at >= 0 and numbers[at] > number:
                at -= 1
            label = labels[at] if at >= 0 else ()
            if label != before:
                handles.append(node.register_prehook(self._switching(label)))
                before = label
        return handles

    def _switching(self, label: Label) -> Callable[..., None]:
        return lambda *_: self._switch(label)

    def _switch(self, label: Label) -> None:
        """Make `label` the open ranges of this thread: close other ranges, and open the missing ones."""
        open_here = self._thread.backward
        if label and not open_here.now:  # the opening of the first range registers the closing of the last
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._switch(()))
        open_here.switch(label, self._ranges)

    def _close(self) -> None:
        """Close the ranges that a failed backward pass left open, because autograd drops the callback."""
        self._switch(())
        if torch.cuda.is_initialized():  # ranges can only be closed in autograd's thread, which opened them
            with suppress(RuntimeError):  # raised if the device is lost
                _run_in_backward(lambda: self._switch(()), "cuda")


class BackwardRoots:
    """Observer that calls `attach` with the root nodes before a backward pass, because no module receives the loss."""

    def __init__(self, attach: Callable[[Iterable[Node]], list[RemovableHandle]], on_error: Callable[[], None]) -> None:
        self._attach, self._on_error = attach, on_error
        self._runs = False  # a backward pass is running; a nested one, such as a checkpoint's, belongs to it

    def install(self) -> compiler.Undo:
        """Begin to observe, and return a function that ends it."""
        autograd: Any = torch.autograd
        engine = autograd._engine_run_backward

        @compiler.passed_through
        @functools.wraps(engine)
        def observed(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if self._runs or compiler.is_tracing():
                return engine(outputs, *args, **kwargs)
            handles = self._begins(outputs)
            try:
                return engine(outputs, *args, **kwargs)
            except BaseException:
                self._fails()
                raise
            finally:
                self._ends(handles)

        return compiler.replaced(autograd, "_engine_run_backward", observed)

    @compiler.untraced
    def _begins(self, outputs: Sequence[Any]) -> list[RemovableHandle]:
        self._runs = True
        return self._attach(node for out in outputs if (node := _made_by(out)) is not None)

    @compiler.untraced
    def _fails(self) -> None:
        self._on_error()

    @compiler.untraced
    def _ends(self, handles: Iterable[RemovableHandle]) -> None:
        self._runs = False
        for handle in handles:  # a retained graph may run again
            handle.remove()


def _made_by(output: Any) -> Node | None:
    """Return the node of a tensor, or of a `torch.autograd.graph.GradientEdge`."""
    node: Node | None = output.grad_fn if isinstance(output, Tensor) else output.node
    return node


def nodes_below(roots: Iterable[Node]) -> list[tuple[int, Node]]:
    """Return every node below the roots with its number, the last made first.

    Nodes that only accumulate a parameter's gradient are left out.
    """
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    numbered = [(node._sequence_nr(), node) for node in seen]
    return sorted((made for made in numbered if made[0] < _ACCUMULATES), key=itemgetter(0), reverse=True)


class _InBackward(torch.autograd.Function):
    """Identity function with a backward that calls a function and passes on no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def _run_in_backward(run: Callable[[], None], device: str) -> None:
    """Run a function in the thread in which autograd runs the device's nodes, without launching a kernel."""
    with torch.enable_grad():
        nothing = _InBackward.apply(torch.empty(0, device=device, requires_grad=True), run)
    torch.autograd.backward(nothing, torch.empty(0, device=device))
