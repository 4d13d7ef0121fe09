"""Ranges in the code that Inductor generates; each kernel has one label, with its layer and its place in the layer.

Inductor writes a Python function that launches a graph's kernels one after another. Here it also writes `mark("block
3", "ffn")` before a kernel wherever the label changes; kernels, their order and their memory stay the same. A kernel
lists the operators that it was made of. Each operator lists the modules that called it and the `annotate` that was
open; an operator of backward lists the ranges of its forward operator.

The ranges of BasicTransformerLM have names of its own. In any other model a mark has one range: the path of the
innermost module, below the compiled one. The same code may run for several blocks that are compiled one by one, so
`annotate.mark` completes the path while the code runs. Up to the first number a path counts as a layer:
`encoder.layers.3`.

A kernel that is fused over several layers belongs to the layer with most of its operators; on a tie, to the later one.
The same rule gives the place within that layer. Views, and operators that depend on no input (a mask's indices), do not
count: the compiler shares them between layers. An inner range names the fused layers. An operator without a module (a
sum of gradients) belongs to the layer of its last input.

Marks work only in code that runs as Python: not in the replay of a CUDA graph, and not under `cpp_wrapper`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.codegen import common
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node

from cs_systems.instrument.annotate import TRACED, Label, tracing_names
from cs_systems.instrument.structure import WRAPPERS, is_own, range_name


@contextmanager
def marked_code() -> Iterator[None]:
    """Make Inductor mark the kernels that it compiles inside the block.

    Marked code bypasses the caches in both directions and is not used outside the block.
    """
    common.init_backend_registration()
    devices = {
        name: codegen for name, codegen in common.device_codegens.items()
        if codegen.wrapper_codegen is PythonWrapperCodegen
    }  # fmt: skip
    passes = {name: common.custom_backend_passes.get(name) for name in devices}
    torch._dynamo.reset()
    try:
        for name, codegen in devices.items():
            common.device_codegens[name] = replace(codegen, wrapper_codegen=MarkingWrapper)
            common.custom_backend_passes[name] = _NotForCaches()
        with tracing_names():
            yield
    finally:
        common.device_codegens.update(devices)
        common.custom_backend_passes.update(passes)
        torch._dynamo.reset()


class _NotForCaches(CustomGraphModulePass):
    """Graph pass that changes nothing and has no cache key, so that Inductor bypasses its caches."""

    def __call__(self, gm: GraphModule) -> None:
        return

    def uuid(self) -> Any:
        raise BypassFxGraphCache("the code has ranges for a profiler")


class MarkingWrapper(PythonWrapperCodegen):
    """Writer of a graph's Python function that adds marks."""

    def __init__(self) -> None:
        super().__init__()
        self._marked: Label = ()
        self._graph: LabelledGraph | None = None
        self.imports.writeline("from cs_systems.instrument.annotate import closing_marks, mark")

    @staticmethod
    def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> PythonWrapperCodegen:
        return PythonWrapperCodegen.create(is_subgraph, *args, **kwargs) if is_subgraph else MarkingWrapper()

    def generate_kernel_call(self, *args: Any, **kwargs: Any) -> None:
        self._mark()  # for a generated kernel
        super().generate_kernel_call(*args, **kwargs)

    def write_provenance_debug_handle(self, *args: Any, **kwargs: Any) -> None:
        self._mark()  # also for a library's kernel; Inductor passes only its name here
        super().write_provenance_debug_handle(*args, **kwargs)

    def generate_scatter_fallback(self, *args: Any, **kwargs: Any) -> None:
        self._mark()  # Inductor calls neither method above for this kernel and the next
        super().generate_scatter_fallback(*args, **kwargs)

    def generate_index_put_fallback(self, *args: Any, **kwargs: Any) -> None:
        self._mark()
        super().generate_index_put_fallback(*args, **kwargs)

    def generate_after_suffix(self, result: Any) -> None:
        super().generate_after_suffix(result)
        result.writeline("call = closing_marks(call)")

    def _mark(self) -> None:
        origins = _origins()
        if origins and self._graph is None:
            self._graph = LabelledGraph(origins[0].graph)
        label = self._graph.label(origins) if self._graph else ()
        if label != self._marked:
            self.writeline(f"mark{label if len(label) != 1 else f'({label[0]!r})'}")
            self._marked = label


def _origins() -> list[Node]:
    """Return the operators of the kernel that is being written."""
    scheduler: Any = V.graph.scheduler
    node = scheduler.current_node
    device = node.get_device()
    group = getattr(scheduler.get_backend(device), "kernel_group", None) if device is not None else None
    # The C++ backend groups kernels and writes them as one.
    nodes = group.scheduled_nodes if group is not None and group.scheduled_nodes else node.get_nodes()
    found: dict[Node, None] = {}
    for made in (n.node for n in nodes if n.node is not None):
        exact = node.is_extern() and made.origin_node is not None
        found |= dict.fromkeys([made.origin_node] if exact else made.origins)
    return list(found)


class LabelledGraph:
    """Labels of the operators in a forward or backward graph."""

    def __init__(self, graph: Graph) -> None:
        self.labels: dict[Node, Label] = {}
        paths = {path for node in graph.nodes for path in _paths(node)}
        label_of = _own_label if is_own(paths) else _path_label
        self._layer_of = _first if is_own(paths) else _layer_in(paths)
        self._position: dict[Node, int] = {}
        self._shared: set[Node] = set()
        constant: set[Node] = set()
        for position, node in enumerate(graph.nodes):
            inputs = node.all_input_nodes
            if node.op != "placeholder" and all(before in constant for before in inputs):
                constant.add(node)
            if node in constant or getattr(node.target, "is_view", False):
                self._shared.add(node)
            self._position[node] = position
            known = [n for n in inputs if self.labels[n] and n not in constant]
            last = max(known, key=self._position.__getitem__, default=None)
            self.labels[node] = label_of(node) or (self.labels[last] if last is not None else ())

    def label(self, origins: Iterable[Node]) -> Label:
        """Return the label of a kernel made of these operators, by the rule above; () if none has a module."""
        nodes = sorted((n for n in origins if self.labels.get(n)), key=self._position.__getitem__)
        labels = [self.labels[n] for n in nodes if n not in self._shared] or [self.labels[n] for n in nodes]
        if not labels:
            return ()
        layers = dict.fromkeys(map(self._layer_of, labels))
        layer = _most(map(self._layer_of, labels))
        label = _most(label for label in labels if self._layer_of(label) == layer)
        return label if len(layers) == 1 else (*label, f"fused ({' + '.join(layers)})")


def _most(values: Iterable[Any]) -> Any:
    """Return the most frequent value; on a tie, the last one."""
    values = list(values)
    counts = Counter(values)
    return max(reversed(values), key=counts.__getitem__)


def _paths(node: Node) -> list[str]:
    """Return the paths of the modules around the operator or its forward operator, relative to the compiled module.

    The outermost comes first.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [_path(path) for path, _ in stack.values()]


def _path(source: str) -> str:
    """Return the module path in dynamo's name of a module: `L['self'].layers.0.attn` or `L['self'].layers[0].attn`."""
    words = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", source.partition("]")[2] if source.startswith("L[") else source)
    return ".".join(w for w in words.split(".")[1:] if w not in WRAPPERS and w != "_modules")


def _annotated(node: Node) -> Label:
    name = (node.meta.get("custom") or {}).get(TRACED)
    return (name,) if name else ()


def _own_label(node: Node) -> Label:
    """Return the ranges around the operator or its forward operator: first of its modules, then from `annotate`."""
    return (*(name for path in _paths(node) if (name := range_name(path))), *_annotated(node))


def _path_label(node: Node) -> Label:
    paths = _paths(node)
    return (f".{paths[-1]}", *_annotated(node)) if paths else _annotated(node)


def _first(label: Label) -> str:
    return label[0]


def _layer_in(paths: Iterable[str]) -> Callable[[Label], str]:
    """Return a function from a label to its layer. If no path has a number, the graph is one layer."""
    if not any(re.search(r"(^|\.)\d+(\.|$)", path) for path in paths):
        return lambda label: ""
    return lambda label: re.sub(r"((^|\.)\d+)\..*", r"\1", label[0].removeprefix("."))
