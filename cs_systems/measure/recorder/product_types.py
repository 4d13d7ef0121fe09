"""Type in which the products of a training loop compute, where autocast is entered inside the model's forward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from cs_systems.measure.recorder.graph_size import is_product, nodes_below
from cs_systems.measure.recorder.observers import Observer, Period

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class ProductTypes(Observer):
    """Observer of the products below the first backward pass of the warm-up that has any."""

    autocast: str | None = None  # precision of most products, if it is one of autocast's
    _is_known = False

    def begins(self, period: Period) -> None:
        self.is_looking = period in (Period.FIRST, Period.WARMUP, Period.LAST) and not self._is_known

    def look_before_backward(self, roots: Any) -> None:
        types = Counter(node._input_metadata[0].dtype for node in nodes_below(roots) if is_product(node))
        if types:
            ((most, _),) = types.most_common(1)
            self.autocast, self._is_known = NAMES.get(most), True
            self.stop_looking()
