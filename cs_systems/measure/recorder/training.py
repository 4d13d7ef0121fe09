"""Observer of what a loop trains: weights that do not change, and gradients that nothing uses."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cs_systems.analysis.comparison import loop_findings as found
from cs_systems.instrument.parameters import own_parameters
from cs_systems.measure.recorder.gradients import Gradients, Updates
from cs_systems.measure.recorder.graph_size import costs_by_owners, multiplied, weight_costs
from cs_systems.measure.recorder.observers import FewSteps, Hidden, ModelCall, is_profiled
from cs_systems.measure.recorder.phases import Timeline
from cs_systems.measure.recorder.stacks import own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, parameters_of
from cs_systems.measure.recorder.weights import Weights
from cs_systems.measure.workloads._batches import tensors_in

FEW_ROWS = 0.1  # largest share of a table's rows with a gradient of their own
FEWEST_ROWS, FEWEST_ELEMENTS = 1_000, 500_000  # of a table; a smaller one costs little
SAMPLED_ROWS, SAMPLED_COLUMNS = 1_000, 64  # of a table; the columns evenly spaced
Known = dict[int, tuple[str, Tensor]]  # parameters by their identity, with their names


class Reduced(NamedTuple):
    """Backward pass in which DistributedDataParallel reduces gradients.

    costs, total_s: see `weight_costs`. elements: those that it reduces, by the optimizer that holds them. place: the
    line of the pass.
    """

    costs: Mapping[tuple[int, frozenset[int]], float]
    total_s: float
    elements: Counter[int]
    place: str | None


class Training(FewSteps):
    """Observer of the gradients and the weights of a loop.

    subject: the loop. hidden: context for looks outside of observed steps.
    """

    def __init__(self, subject: Subject, hidden: Hidden) -> None:
        super().__init__()
        self._subject, self._hidden = subject, hidden
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._gradients = Gradients()
        self._weights: Weights | None = None
        self._steps = self._first_step = self._compared_steps = 0
        self._needs_input_gradients = False
        self._costs: dict[int, tuple[Mapping[frozenset[int], float], str | None]] = {}
        self._reduced: dict[int, Reduced] = {}
        self._called: list[DistributedDataParallel] = []  # since the last backward pass
        self._used_rows: dict[Optimizer, dict[int, UsedRows]] = {}
        self._multiplied: set[int] = set()

    def step_recorded(self, number: int, timeline: Timeline) -> None:
        """Count a step, and look at the weights when the models are known."""
        self._steps += 1
        if self._weights is None and (self._subject.models or self._steps > 1):
            self._weights, self._first_step = Weights(()), self._steps
            if not is_profiled():
                with self._hidden():
                    self._weights = Weights([p for _, p in self._parameters().values()])

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Compare the weights."""
        self._compared_steps = self._steps - self._first_step
        if self._weights is not None:
            self._weights.compare()

    def stop_looking(self) -> None:
        super().stop_looking()
        self._gradients.forget()
        self._called.clear()

    def look_at_call(self, call: ModelCall) -> None:
        if not call.is_in_update:
            inputs = tensors_in(call.arguments)
            self._needs_input_gradients |= call.is_recorded and any(t.is_leaf and t.requires_grad for t in inputs)
            model = call.arguments[0][0]
            if call.is_recorded and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
                self._called += [model] if model.process_group.size() > 1 else []

    def look_before_backward(self, roots: Any) -> None:
        self._gradients.backward_begins(self._subject.optimizers, [p for _, p in self._parameters().values()])
        if not self._used_rows:
            self._multiplied |= multiplied(roots)
        if len(self._subject.optimizers) > 1:
            of = [(id(self._gradients.of(each)), parameters_of(each)) for each in self._subject.optimizers]
            owners = {id(p): which for which, parameters in of for p in parameters}
            line = own_lines(sys._getframe(1))[1]
            place = place_of(line) if line else None
            self._costs[self._gradients.passes] = costs_by_owners(roots, owners), place
            if self._called:
                reduced = {p for model in self._called for p in model.module.parameters() if p.requires_grad}
                elements = Counter[int]()
                for parameter in reduced:
                    elements[owners.get(id(parameter), 0)] += parameter.numel()
                self._reduced[self._gradients.passes] = Reduced(*weight_costs(roots, owners), elements, place)

    def look_after_backward(self) -> None:
        self._called.clear()
        self._gradients.backward_ends(is_for_inputs=self._needs_input_gradients)
        self._needs_input_gradients = False

    def look_before_update(self, optimizer: Optimizer) -> None:
        self._gradients.step_begins(optimizer)
        if optimizer not in self._used_rows:
            tables = self._tables()
            held = [p for p in parameters_of(optimizer) if id(p) in tables and is_large(p)]
            self._used_rows[optimizer] = {id(p): used_rows(p) for p in held}

    def look_after_update(self, optimizer: Optimizer) -> None:
        self._gradients.step_ends(optimizer)

    def look_at_skip(self, optimizer: Optimizer) -> None:
        self._gradients.step_was_skipped(optimizer)

    def end(self) -> None:
        rows = [
            self._updates(optimizer)
            for optimizer in dict.fromkeys((*self._subject.optimizers, *self._gradients.updates))
        ]
        self.keep(found.UPDATES, [row for row in rows if row["steps"] or row["compared"]])
        used, unused = self._gradients.used, self._gradients.unused
        if unused and not any(each.is_own for each in self._gradients.updates.values()):
            self.keep(found.UNUSED_PASSES, [{"passes": used + unused, "unused": unused}])
        unheld = self._held_by_none()
        self.keep(found.UNUSED_GRADIENTS, self._unused(unheld))
        self.keep(found.REPLACED_PARAMETERS, [*self._replaced(unheld)])
        self.keep(found.DROPPED_GRADIENTS, [*self._dropped()] or [*self._reduced_in_vain()])
        self.keep(found.DENSE_GRADIENTS, [*self._dense()])
        self._gradients, self._used_rows, self._multiplied = Gradients(), {}, set()

    def _parameters(self) -> Known:
        """Return the parameters of all models, then those that only an optimizer holds."""
        known: Known = {}
        for wrapped in self._subject.models:
            model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
            for name, parameter in model.named_parameters():
                known.setdefault(id(parameter), (f"{type(model).__name__}.{name}", parameter))
        for optimizer in self._subject.optimizers:
            for held in parameters_of(optimizer):
                known.setdefault(id(held), (type(optimizer).__name__, held))
        return known

    def _tables(self) -> set[int]:
        """Return the identities of the weights of embeddings, which alone may have sparse gradients.

        Those of which another module or a product uses all rows are left out.
        """
        embedded, others = set[int](), set[int]()
        for module in (module for model in self._subject.models for module in model.modules()):
            of = embedded if isinstance(module, nn.Embedding | nn.EmbeddingBag) else others
            of.update(id(parameter) for parameter in own_parameters(module))
        return embedded - others - self._multiplied

    def _updates(self, optimizer: Optimizer) -> found.UpdatesRow:
        of = self._gradients.updates.get(optimizer) or Updates(optimizer)
        parameters = parameters_of(optimizer)
        changed = self._weights.changed if self._weights is not None else {}
        compared = [changed[id(p)] for p in parameters if id(p) in changed]
        dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters}
        return {
            "optimizer": type(optimizer).__name__,
            "parameters": len(parameters),
            "steps": of.steps,
            "again": of.again,
            "stale": of.stale,
            "cleared": of.cleared,
            "missing": of.missing,
            "zero": of.zero,
            "learning_rate": max((float(g["lr"]) for g in optimizer.param_groups if "lr" in g), default=None),
            "dtype": dtypes.pop() if len(dtypes) == 1 else None,
            "compared_steps": self._compared_steps,
            "compared": len(compared),
            "changed": sum(compared),
        }

    def _dropped(self) -> Iterator[found.DroppedGradientsRow]:
        """Yield a row for each optimizer with gradients that are cleared after passes that another one uses."""
        total = sum(sum(costs.values()) for costs, _ in self._costs.values())
        for optimizer in self._subject.optimizers:
            which = id(self._gradients.of(optimizer))
            dropped, places = 0.0, list[str | None]()
            for number, (costs, place) in self._costs.items():
                fates = self._gradients.fates.get(number, {})
                used = {each for each, is_used in fates.items() if is_used}
                of_pass = sum(cost for owners, cost in costs.items() if which in owners and not owners & used)
                if used and fates.get(which) is False and of_pass:
                    dropped += of_pass
                    places.append(place)
            if dropped and 2 * len(places) >= len(self._costs) / len(self._subject.optimizers):
                yield self._dropped_row(optimizer, places, dropped / total, 0.0)

    def _reduced_in_vain(self) -> Iterator[found.DroppedGradientsRow]:
        """Yield a row for each optimizer with gradients that the ranks reduce in passes for another, and then clear.

        They are of weights between the loss and those that the pass is for, such as a critic's.
        """
        total_s = sum(each.total_s for each in self._reduced.values())
        total = sum(each.elements.total() for each in self._reduced.values())
        for optimizer in self._subject.optimizers:
            which = id(self._gradients.of(optimizer))
            dropped_s, dropped, places = 0.0, 0, list[str | None]()
            for number, reduced in self._reduced.items():
                fates = self._gradients.fates.get(number, {})
                used = {each for each, is_used in fates.items() if is_used}
                of_pass = sum(cost_s for (of, others), cost_s in reduced.costs.items() if of == which and others & used)
                if used and fates.get(which) is False and of_pass and reduced.elements[which]:
                    dropped_s, dropped = dropped_s + of_pass, dropped + reduced.elements[which]
                    places.append(reduced.place)
            if places and 2 * len(places) >= len(self._reduced) / len(self._subject.optimizers):
                yield self._dropped_row(optimizer, places, dropped_s / total_s, dropped / total)

    def _dropped_row(
        self, optimizer: Optimizer, places: Sequence[str | None], share: float, reduced_share: float
    ) -> found.DroppedGradientsRow:
        known, held = self._parameters(), parameters_of(optimizer)
        name = next((known[id(p)][0] for p in held if id(p) in known), type(optimizer).__name__)
        return {"optimizer": type(optimizer).__name__, "parameters": len(held), "first": name, "passes": len(places),
                "of_passes": len(self._costs), "share": share, "reduced_share": reduced_share,
                "place": places[-1]}  # fmt: skip

    def _dense(self) -> Iterator[found.DenseGradientsRow]:
        """Yield a row for each large table of which few rows have a gradient of their own."""
        known = self._parameters()
        elements = _elements(p for optimizer in self._used_rows for p in parameters_of(optimizer))
        for which, used in ((which, used) for of in self._used_rows.values() for which, used in of.items()):
            if which in known and 0 < used.number <= FEW_ROWS * len(known[which][1]):
                name, table = known[which]
                share = table.numel() / elements
                yield {"parameter": name, "rows": len(table), "used": used.number, "share": share,
                       "is_penalised": used.is_penalised}  # fmt: skip

    def _held_by_none(self) -> Known:
        """Return the parameters with gradients in most passes that neither an optimizer nor the program itself uses."""
        known, often = self._parameters(), self._often()
        if not often:
            return {}
        optimizers = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
        held = {id(p): p for each in optimizers for p in parameters_of(each)}
        changed = self._weights.changed if self._weights is not None else {}
        unheld = {
            which: each for which, each in known.items() if which in often - held.keys() and not changed.get(which)
        }
        elements, dtypes = _elements(p for _, p in unheld.values()), {p.dtype for _, p in unheld.values()}
        # the optimizer may hold copies in another precision, from which the program writes the weights
        is_copied = _elements(p for p in held.values() if p.dtype not in dtypes) >= elements
        return {} if is_copied else unheld

    def _often(self) -> set[int]:
        gradients = self._gradients
        return {which for which, passes in gradients.held_by_none.items() if 2 * passes > gradients.passes}

    def _unused(self, unheld: Known) -> list[found.UnusedGradientsRow]:
        """Return the row of parameters with gradients that nothing uses."""
        if not unheld:
            return []
        often = self._often()
        with_gradient = [p for which, (_, p) in self._parameters().items() if which in often or p.grad is not None]
        elements, (first, _) = _elements(p for _, p in unheld.values()), next(iter(unheld.values()))
        return [{"parameters": len(unheld), "elements": elements, "share": elements / _elements(with_gradient),
                 "first": first}]  # fmt: skip

    def _replaced(self, unheld: Known) -> Iterator[found.ReplacedParametersRow]:
        """Yield a row for an optimizer that trains a model, but holds parameters in no module in place of some of its.

        They are as many, and have another number of outputs, which is why a layer is replaced; inputs are the same.
        """
        changed = self._weights.changed if self._weights is not None else {}
        if not unheld or not changed:
            return
        modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
        inside = {id(p) for module in modules for p in own_parameters(module)}
        for model in self._subject.models:
            of_model = {id(p) for p in model.parameters()}
            new = [each for which, each in unheld.items() if which in of_model]
            for optimizer in self._subject.optimizers:
                held = parameters_of(optimizer)
                old = [p for p in held if changed.get(id(p)) is False and p.grad is None and id(p) not in inside]
                trains = any(changed.get(id(p)) for p in held if id(p) in of_model)
                if trains and new and _have_other_outputs(old, [p for _, p in new]):
                    yield {"optimizer": type(optimizer).__name__, "parameters": len(new), "first": new[0][0],
                           "replaced": len(old)}  # fmt: skip


def _have_other_outputs(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """Return whether tensors agree with others in all dimensions but the first, in which none does."""
    if sorted(tuple(p.shape[1:]) for p in old) != sorted(tuple(p.shape[1:]) for p in new):
        return False
    return all(p.dim() for p in old) and not {len(p) for p in old} & {len(p) for p in new}


def is_large(parameter: Tensor) -> bool:
    """Return whether a parameter is a large matrix on this rank, with a dense gradient."""
    gradient = parameter.grad
    is_plain = gradient is not None and type(gradient) is Tensor and gradient.layout is torch.strided
    return is_plain and parameter.dim() == 2 and len(parameter) >= FEWEST_ROWS and parameter.numel() >= FEWEST_ELEMENTS


class UsedRows(NamedTuple):
    """Rows of a table with a gradient of their own, which is neither 0 nor a penalty's."""

    number: int
    is_penalised: bool


def used_rows(table: Tensor) -> UsedRows:
    """Return the rows that a step used, counted, or estimated from a sample if a penalty gives all rows a gradient.

    A penalty on all rows, such as the sum of their squares, gives the others the same multiple of their weights.
    """
    if table.grad is None:
        return UsedRows(0, False)
    weights, gradient = table.detach(), table.grad.detach()
    count, few = int(gradient.any(1).sum()), FEW_ROWS * len(table)
    penalised = _penalised_rows(weights, gradient) if count > few else 0.0
    used = round((1 - penalised) * len(table))
    return UsedRows(used, True) if penalised and used <= few else UsedRows(count, False)


def _penalised_rows(table: Tensor, gradient: Tensor) -> float:
    """Return the share of a table's rows with a gradient of one multiple of their weights, to float32's rounding.

    0 if the weights hardly differ: then each gradient that is the same for all is such a multiple.
    """
    if table.dtype not in (torch.float32, torch.float64):
        return 0.0
    drawn = sorted(random.Random(0).sample(range(len(table)), min(SAMPLED_ROWS, len(table))))
    rows, every = torch.tensor(drawn, device=table.device), -(-table.shape[1] // SAMPLED_COLUMNS)
    some, weights = (each[:, ::every][rows].double() for each in (gradient, table))
    if weights.max() - weights.min() < weights.abs().max() / 2:
        return 0.0
    exact = 64 * torch.finfo(table.dtype).eps  # the gradients of a softmax over all rows are small, but larger
    follows = torch.isclose(some, weights * (some / weights).nanmedian(), rtol=exact, atol=0.0)
    return float(follows.all(1).double().mean())


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
