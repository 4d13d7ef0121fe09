"""FLOPs and kept memory of each family, against PyTorch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs_systems.config import Phase
from cs_systems.instrument.module_costs import EXTRA, measured_cost
from tests.families.conftest import Made


def test_flops_equal_those_of_the_counter(made: Made) -> None:
    cost = measured_cost(made.model, made.phases())
    with FlopCounterMode(display=False, custom_mapping=EXTRA) as counter:
        made.step()
    flops = sum(phase.hardware_flops or 0 for phase in cost.phases.values())
    assert flops == counter.get_total_flops() > 0
    assert list(cost.phases) == [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    assert all(phase.model_flops == phase.hardware_flops for phase in cost.phases.values())  # nothing runs again
    rows = {row["path"]: row for row in cost.modules}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert rows[""][f"{phase}_flops"] == cost.phases[phase].hardware_flops


def test_flops_of_linear_layers_follow_from_their_shapes(made: Made) -> None:
    seen: dict[str, int] = {}
    modules = {path: m for path, m in made.model.named_modules() if type(m) is nn.Linear}

    def count(path: str, output: torch.Tensor) -> None:
        seen[path] = seen.get(path, 0) + 2 * output.numel() * modules[path].in_features

    handles = [m.register_forward_hook(lambda *a, path=path: count(path, a[2])) for path, m in modules.items()]
    try:
        rows = {row["path"]: row for row in measured_cost(made.model, made.phases()).modules}
    finally:
        for handle in handles:
            handle.remove()
    for path, flops in seen.items():
        assert rows[path]["forward_flops"] == flops
        if modules[path].weight.requires_grad:
            assert flops <= rows[path]["backward_flops"] <= 2 * flops


def test_kept_memory_is_that_of_modules(made: Made) -> None:
    rows = {row["path"]: row for row in measured_cost(made.model, made.phases()).modules}
    children = sum(row["kept_bytes"] for path, row in rows.items() if path and "." not in path)
    assert rows[""]["kept_bytes"] >= children > 0


def test_what_a_checkpoint_computes_again_is_not_credited() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    net, x, found = Net(), torch.randn(4, 8, requires_grad=True), dict[str, Any]()
    cost = measured_cost(
        net,
        [
            (Phase.FORWARD, lambda: found.update(loss=net(x).sum())),
            (Phase.BACKWARD, lambda: found["loss"].backward()),
        ],
    )
    forward, backward = cost.phases[Phase.FORWARD], cost.phases[Phase.BACKWARD]
    assert forward.model_flops == forward.hardware_flops == 2 * 2 * 4 * 8 * 8
    assert backward.model_flops == 2 * forward.model_flops
    assert backward.hardware_flops == pytest.approx(3 * forward.model_flops)


def test_a_compiled_module_is_counted_too() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].compile(backend="aot_eager")
    x = torch.randn(4, 8)
    net(x).sum().backward()
    cost = measured_cost(net, [(Phase.FORWARD, lambda: net(x))])
    assert [row["forward_flops"] for row in cost.modules] == [1024, 512, 512]
    assert cost.modules[0]["backward_flops"] is None
