"""Tests of the values that fake tensors keep: a batch's values, and results computed only from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from cs_systems.config import RunConfig
from cs_systems.core.plugins import LIVE, holding
from cs_systems.formulas.memory.tables import ForecastRow
from cs_systems.instrument.known_values import RANDOM_CAVEAT, ValuedFakeMode
from cs_systems.measure.runtime.forecast import forecast


def test_integers_keep_values_but_activations_do_not() -> None:
    real = torch.tensor([[1, 1, 0], [1, 0, 0]])
    mode = ValuedFakeMode()
    mask = mode.from_batch(real)
    with mode:
        assert mask.sum(-1).tolist() == [2, 1]
        assert not mask.bool().all()
        assert mask.nonzero().shape == (3, 2)
        assert torch.ones_like(mask).sum() == 6
        assert torch.arange(5).max() == 4
        output = nn.Linear(3, 3)(mask.float())
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            bool(output.sum() > 0)
        mask.masked_fill_(mask == 0, -100)
    assert real.min() == 0  # the batch itself is as it was


def test_values_written_from_activations_are_unknown() -> None:
    mode = ValuedFakeMode()
    with mode:
        ids, chosen = torch.zeros(4, dtype=torch.long), nn.Linear(4, 4)(torch.randn(4, 4)).argmax(-1)
        ids.copy_(chosen)
        assert isinstance(ids, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            ids[0].item()


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                x = layer(x).relu()
        return x


class NodesOfEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[:, edges[0] != edges[1]]
        nodes = int(edges.max()) + 1
        messages = self.linear(x)[source]
        return torch.zeros(nodes, 8, dtype=messages.dtype).index_add(0, target, messages)


def _forecast(model: nn.Module, batch: object) -> ForecastRow:
    config = RunConfig(workload=f"{LIVE}known", device="cuda")
    with holding(config.workload, lambda: {"model": model, "batch": batch, "loss": lambda y: y.square().mean()}):
        return forecast(config)


def test_layers_that_are_dropped_at_random_are_predicted_as_kept() -> None:
    row = _forecast(LayerDrop(), torch.randn(64, 256))
    assert row["reason"] is None
    assert RANDOM_CAVEAT in row["caveats"]
    kept = _forecast(
        nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]), torch.ones(64, 256)
    )
    assert row["peak_bytes"] == pytest.approx(kept["peak_bytes"], rel=0.01)
    assert kept["caveats"] == []


def test_graph_is_predicted_from_its_edges() -> None:
    batch = {"x": torch.randn(50, 8), "edges": torch.randint(50, (2, 400))}
    assert _forecast(NodesOfEdges(), batch)["reason"] is None
