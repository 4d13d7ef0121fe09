"""Comparison of an attribution with the independent one by autograd's sequence numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from cs_systems.analysis.attribution.places import Place, place_of
from cs_systems.analysis.attribution.sequence_numbers import SequenceRoute
from cs_systems.config import ConfigError, Phase
from cs_systems.core.range_names import COMMUNICATION, UNATTRIBUTED
from cs_systems.readers.forms.trace import Trace


class Disagreement(TypedDict):
    """Kernels for which the two attributions disagree."""

    attributed: str
    by_sequence_number: str
    kernels: int
    time_s: float


@dataclass(frozen=True)
class Agreement:
    """Result of the comparison.

    `checked_*` covers the kernels that sequence numbers classify.
    """

    checked_kernels: int
    checked_s: float
    wrong_s: float
    rows: list[Disagreement]

    @property
    def wrong_share(self) -> float | None:
        return self.wrong_s / self.checked_s if self.checked_s else None


def check(trace: Trace, places: Sequence[Place]) -> Agreement:
    """Compare places with sequence numbers: on whether a kernel belongs to backward, and on its layer there.

    Layers are compared where both are known.

    Raises:
        ConfigError: The trace has no sequence numbers.
    """
    if not trace.ops:
        raise ConfigError(
            f"{trace.source} has no sequence numbers; record with torch.profiler, with "
            "ProfilerActivity.CPU among its activities"
        )
    route = SequenceRoute(trace)
    checked, checked_s, wrong_s = 0, 0.0, 0.0
    wrong: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel, place in zip(trace.kernels, places, strict=True):
        backward = route.is_backward(kernel)
        if backward is None:
            continue
        duration = kernel.end_s - kernel.start_s
        checked, checked_s = checked + 1, checked_s + duration
        layer = place_of(route.forward_ranges(kernel), modules=trace.modules).layer if backward else UNATTRIBUTED
        other_layer = not {UNATTRIBUTED, COMMUNICATION} & {layer, place.layer} and layer != place.layer
        if backward != (place.phase == Phase.BACKWARD) or other_layer:
            wrong_s += duration
            truth = f"backward, {layer}" if backward else "not backward"
            wrong[f"{place.phase}, {place.layer}", truth].append(duration)
    rows: list[Disagreement] = [
        {"attributed": attributed, "by_sequence_number": truth, "kernels": len(times), "time_s": sum(times)}
        for (attributed, truth), times in sorted(wrong.items(), key=lambda item: -sum(item[1]))
    ]
    return Agreement(checked, checked_s, wrong_s, rows)
