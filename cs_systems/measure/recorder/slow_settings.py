"""Cost of settings that make a CPU's layers slower: half precision without instructions for it, and no oneDNN.

The convolutions and matrix products of one step are read off the graph of its backward pass, by their sizes alone: the
tensors that they keep may be packed by the program. After the timed steps they are computed again on ones, with the
setting and without it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cs_systems.analysis.comparison.loop_findings import SLOW_SETTINGS, SlowSettingRow
from cs_systems.measure.recorder.graph_size import nodes_below
from cs_systems.measure.recorder.observers import FewSteps
from cs_systems.measure.recorder.subject import Subject

HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NO_ONEDNN = "no oneDNN"
MOST_S = 1.5  # of computing the layers again; the largest come first, and the others are left out
FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 2, 10, 0.05  # of a layer; the fastest counts
_CONVOLUTIONS = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}  # by the dimensions of a weight


class Layer(NamedTuple):
    """Convolution or matrix product, with what its backward pass computes.

    options: a convolution's; empty for a product.
    """

    dtype: torch.dtype
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    has_input_gradient: bool
    is_autocast: bool

    @property
    def elements(self) -> int:
        return math.prod(self.inputs) + math.prod(self.weights)

    def measured_s(self, dtype: torch.dtype) -> float:
        """Return the time of the layer and its gradients in this precision."""
        inputs = torch.ones(self.inputs, dtype=dtype, requires_grad=self.has_input_gradient)
        weights = torch.ones(self.weights, dtype=dtype, requires_grad=True)
        function: Callable[..., Tensor] = _CONVOLUTIONS[len(self.weights)] if self.options else torch.mm
        begin_s = time.perf_counter()
        result = function(inputs, weights, **dict(self.options))
        torch.autograd.grad(result, [each for each in (inputs, weights) if each.requires_grad], torch.ones_like(result))
        return time.perf_counter() - begin_s


class SlowSettings(FewSteps):
    """Observer of the layers in the first backward pass that is looked at, on a CPU."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._layers: Counter[Layer] | None = None

    def look_before_backward(self, roots: Any) -> None:
        if self._layers is None and not self._subject.device.is_cuda:
            layers = Counter(_layers(roots))
            is_slow = not _has_onednn() or any(each.dtype in HALF for each in layers)
            self._layers = layers if is_slow else Counter()

    def end(self) -> None:
        """Compute the layers again, after the last observed step, so that what stays in memory looks like no growth."""
        layers = self._layers or Counter()
        half = Counter({each: count for each, count in layers.items() if each.dtype in HALF})
        found = [_half_row(half)] if half else []
        if not _has_onednn():
            found.append(_row(NO_ONEDNN, layers, onednn))
        self.keep(SLOW_SETTINGS, [row for row in found if row is not None])


@contextmanager
def onednn() -> Iterator[None]:
    """Return a context with oneDNN; torch's own sets other flags too, and warns of one of them."""
    before = _has_onednn()
    torch._C._set_mkldnn_enabled(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _has_onednn() -> bool:
    return bool(torch._C._get_mkldnn_enabled())


def _half_row(layers: Counter[Layer]) -> SlowSettingRow | None:
    (first, _), *_ = layers.most_common(1)
    return _row(HALF[first.dtype], layers, nullcontext, usual=torch.float32)


def _row(
    setting: str,
    layers: Counter[Layer],
    without: Callable[[], AbstractContextManager[Any]],
    usual: torch.dtype | None = None,
) -> SlowSettingRow | None:
    """Return the time of layers with a setting and without it, in the usual precision if that is the setting."""
    time_s = usual_s = 0.0
    count, begin_s = 0, time.perf_counter()
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        for layer in sorted(layers, key=lambda each: -each.elements):
            if count and time.perf_counter() - begin_s > MOST_S:
                break
            times_s = layers[layer] * _fastest_s(layer, layer.dtype)
            with without():
                usual_s += layers[layer] * _fastest_s(layer, usual or layer.dtype)
            time_s += times_s
            count += layers[layer]
    if not count:
        return None
    is_autocast = any(layer.is_autocast for layer in layers)
    return {"setting": setting, "is_autocast": is_autocast, "layers": count, "time_s": time_s, "usual_s": usual_s}


def _fastest_s(layer: Layer, dtype: torch.dtype) -> float:
    """Return the shortest of a few times; the first one also prepares kernels."""
    times_s = [layer.measured_s(dtype) for _ in range(FEWEST_ROUNDS)]
    while len(times_s) < MOST_ROUNDS and sum(times_s) < ROUNDS_S:
        times_s.append(layer.measured_s(dtype))
    return min(times_s)


def _layers(roots: Any) -> Iterator[Layer]:
    """Yield the convolutions and matrix products of known sizes below the roots of a backward pass."""
    for node in nodes_below(roots):
        name, following = node.name(), [each for each, _ in node.next_functions]
        if name.startswith("ConvolutionBackward") and len(following) > 1 and not node._saved_transposed:
            yield from _convolution(node, following)
        elif name.startswith(("AddmmBackward", "MmBackward")) and None not in following[-1:]:
            result, weights = node._input_metadata[0], following[-1]._input_metadata[0].shape
            if len(weights) == 2 and weights[1] == result.shape[1]:
                inputs = (result.shape[0], weights[0])
                yield Layer(
                    result.dtype, inputs, tuple(weights), (), following[-2] is not None, _is_cast(following[-1])
                )


def _convolution(node: Any, following: Sequence[Any]) -> Iterator[Layer]:
    result, weight = node._input_metadata[0], following[1]
    if weight is None or len(weights := tuple(weight._input_metadata[0].shape)) not in _CONVOLUTIONS:
        return
    stride, padding, dilation = node._saved_stride, node._saved_padding, node._saved_dilation
    sizes = [
        (size - 1) * step - 2 * beside + apart * (width - 1) + 1
        for size, step, beside, apart, width in zip(
            result.shape[2:], stride, padding, dilation, weights[2:], strict=True
        )
    ]
    inputs = (result.shape[0], weights[1] * node._saved_groups, *sizes)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": node._saved_groups}
    yield Layer(result.dtype, inputs, weights, tuple(options.items()), following[0] is not None, _is_cast(weight))


def _is_cast(weight: Any) -> bool:
    """Return whether a weight in half precision is a cast one, as under autocast."""
    while weight is not None and not hasattr(weight, "variable"):
        if weight.name().startswith("ToCopyBackward"):
            return True
        weight = next((each for each, _ in weight.next_functions), None)
    return False
