"""Device memory at the peak of a step, from the records of a cell or from a snapshot, for rules about memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from cs_systems.analysis.diagnosis._sound import Sound
from cs_systems.config import Phase
from cs_systems.core.optimizers import Form, optimizer
from cs_systems.core.tables import Row
from cs_systems.formulas.memory.forecast import Forecast
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.analysis.memory.categories import Attribution
    from cs_systems.analysis.memory.graphs import KeptOutput, UnusedGraphs
    from cs_systems.analysis.memory.leaks import Leak
    from cs_systems.analysis.memory.model_copies import ModelCopies
    from cs_systems.analysis.memory.out_of_memory import Returned
    from cs_systems.analysis.memory.tensor_names import TensorNames

EACH_BLOCK = "every:1"  # plan of checkpoints
LOGITS, SCORES, FOREACH = "logits", "attention scores", "foreach temporaries"
ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE = "activations", "gradients", "optimizer state"
PARAMETERS = "parameters"
EARLIER_GRADIENTS, IN_BLOCKS, WEIGHT_COPIES = "earlier gradients", "activations in blocks", "weight copies"
MODEL_COPIES, UPDATE = "model copies", "update temporaries"
HISTORY = "call torch.cuda.memory._record_memory_history() before the steps, and _dump_snapshot(FILE) after them"
# Components of the formulas and of fake tensors → their category.
_CATEGORIES = {
    "logits_and_loss": LOGITS,
    "attention_scores": SCORES,
    "optimizer_state": OPTIMIZER_STATE,
    "weight_copies": WEIGHT_COPIES,
}


@dataclass(frozen=True)
class MemoryUse:
    """Device memory at the peak of a step, or of a snapshot.

    Attributes:
        peak_bytes: allocated at the peak.
        reserved_bytes: reserved by the allocator at that time; None if unknown.
        phase: the phase of the peak.
        categories: bytes at the peak, by category; `logits` may be part of others.
        rows: the rows that these numbers come from.
        unusable_bytes: reserved at the peak between blocks in use; None if unknown.
        lasting_bytes: of these, bytes that do not disappear together with logits and attention scores; None if unknown.
        is_expandable: the allocator's segments are expandable.
        without: the peak of a snapshot's events without the allocations of a category.
        forecast: the peak by formula with other fields of the cell; None without a formula.
        leak: allocations that each step leaves; in no category.
        graphs: autograd graphs that no backward uses; in no category.
        output: an output of the last pass that is alive in the next.
        returned: memory that was returned to the driver and requested again.
        models: further copies of the weights.
        phases: the phases of a snapshot's events; empty if unknown.
        earlier_pass_bytes: tensors of a forward pass before the recording that are alive in the recorded one.
    """

    peak_bytes: int
    reserved_bytes: int | None
    phase: str | None
    categories: Mapping[str, int]
    rows: tuple[Row, ...] = ()
    unusable_bytes: int | None = None
    lasting_bytes: int | None = None
    is_expandable: bool = False
    without: Callable[..., int] | None = None
    forecast: Forecast | None = None
    leak: Leak | None = None
    graphs: UnusedGraphs | None = None
    output: KeptOutput | None = None
    returned: Returned | None = None
    models: ModelCopies | None = None
    phases: frozenset[str] = frozenset()
    earlier_pass_bytes: int = 0

    def of(self, *categories: str) -> int:
        return sum(self.categories.get(category, 0) for category in categories)

    def at_best(self, category: str, phases: Collection[str] | None = None) -> int:
        """Return a lower bound of the peak without a category, by the snapshot's events or the other memory.

        phases: the phases in which the category is gone; None for all.
        """
        return self.peak_bytes - self.of(category) if self.without is None else self.without(category, phases)


def memory_of_snapshot(found: Attribution, names: TensorNames) -> MemoryUse:
    """Return the memory at the peak of a snapshot that has one."""
    from cs_systems.analysis.memory.allocations import BEFORE
    from cs_systems.analysis.memory.counterfactual import peak_without
    from cs_systems.analysis.memory.graphs import kept_output, unused_graphs
    from cs_systems.analysis.memory.groups import earlier_pass, groups
    from cs_systems.analysis.memory.leaks import leak
    from cs_systems.analysis.memory.model_copies import model_copies
    from cs_systems.analysis.memory.out_of_memory import between_blocks, returned
    from cs_systems.analysis.memory.tables import composition

    replay, peak = found.replay, found.replay.peak_event
    sidecar = replay.snapshot.sidecar
    cell = replace(sidecar.config, device="cuda") if sidecar and sidecar.config else None
    leaked, graphs = leak(found), unused_graphs(found)
    apart = [one for group in (leaked, graphs) if group for one in group.allocations]
    of = groups(found, apart)
    return MemoryUse(
        replay.peak_bytes,
        replay.reserved_at(peak),
        found.places[peak].phase if peak > BEFORE else None,
        {name: sum(a.bytes for a, *_ in group if a.is_alive(peak)) for name, group in of.items()},
        tuple(cast(Row, row) for row in composition(found, names)),
        between_blocks(found, peak),
        between_blocks(found, peak, (*of.get(LOGITS, ()), *of.get(SCORES, ()))),
        replay.snapshot.settings.expandable_segments,
        lambda category, phases=None: peak_without(found, of.get(category, ()), phases),
        Forecast(cell, replay.peak_bytes) if cell else None,
        leaked,
        graphs,
        None if graphs or leaked else kept_output(found),
        returned(found),
        model_copies(found),
        frozenset(place.phase for place in found.places if place.phase),
        sum(one.allocation.bytes for one in earlier_pass(found)),
    )


def memory_of_record(record: RunRecord) -> MemoryUse | None:
    """Return the peak measured by profiler `memory`, split by the prediction; None for other records."""
    phases = Sound(record.results).get("memory_phases")
    if not phases:
        return None
    number, reached = max(enumerate(phases), key=lambda row: (row[1].get("peak_allocated_bytes") or 0, row[0]))
    peak = reached.get("peak_allocated_bytes")
    if not peak:
        return None
    from cs_systems.formulas.memory.fit import known_by_formula  # few records have measured memory
    from cs_systems.formulas.memory.model import step_memory

    known = known_by_formula(record)
    components = _components(record) if known is None else step_memory(*known).components
    categories = {_CATEGORIES.get(name, name): size for name, size in components.items()}
    if reached["phase"] == Phase.OPTIMIZER and optimizer(record.run_config.optimizer).form is Form.FOREACH:
        categories[FOREACH] = categories.get("workspace", 0)
    # If reserved memory changed during the phase, only its maximum is known, perhaps from another moment.
    around = {row.get("reserved_bytes") for row in phases[max(number - 1, 0) : number + 1]}
    reserved = reached.get("peak_reserved_bytes") if around == {reached.get("peak_reserved_bytes")} else None
    rows: tuple[Row, ...] = (reached, cast(Row, categories))
    made = MemoryUse(peak, reserved, reached["phase"], categories, rows)
    return made if known is None else replace(made, forecast=Forecast(known[0], peak))


def _components(record: RunRecord) -> Mapping[str, int]:
    """Return the bytes by component at the peak of the step on fake tensors; empty if it was not run."""
    moments: dict[tuple[int, str], dict[str, int]] = {}
    for row in Sound(record.results).get("memory_forecast", ()):
        moments.setdefault((row["step"], row["phase"]), {})[row["component"]] = row["peak_bytes"]
    return max(moments.values(), key=lambda sizes: sum(sizes.values()), default={})
