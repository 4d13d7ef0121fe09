"""FLOPs and kept memory of each family, against PyTorch's own counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs_systems.config import Phase
from cs_systems.instrument.flop_counter import EXTRA
from cs_systems.instrument.module_costs import measured_cost
from tests.families.conftest import Made

_causal: list[bool] = []


def _whole_matrix(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    """Return the FLOPs of attention as PyTorch's counter counts those of other devices: the whole matrix."""
    _causal.append(causal)
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _whole_matrix_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MAPPING = {**EXTRA, _flash: _whole_matrix, _flash_backward: _whole_matrix_backward}


def test_executed_flops_are_pytorch_s_count_without_hidden_tiles(made: Made) -> None:
    cost = measured_cost(made.model, made.phases())
    _causal.clear()
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        made.step()
    flops = sum(phase.hardware_flops or 0 for phase in cost.phases.values())
    assert 0 < flops <= counter.get_total_flops()
    assert flops == counter.get_total_flops() or any(_causal)
    assert list(cost.phases) == [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    for phase in cost.phases.values():
        assert 0 <= phase.model_flops <= phase.hardware_flops
    assert cost.unknown_masks == 0
    rows = {row["path"]: row for row in cost.modules}
    for name in (Phase.FORWARD, Phase.BACKWARD):
        assert rows[""][f"{name}_flops"] == cost.phases[name].hardware_flops


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


def test_kept_memory_of_a_model_includes_its_modules(made: Made) -> None:
    rows = {row["path"]: row for row in measured_cost(made.model, made.phases()).modules}
    children = sum(row["kept_bytes"] for path, row in rows.items() if path and "." not in path)
    assert rows[""]["kept_bytes"] >= children > 0


def test_recomputation_of_a_checkpoint_is_not_credited() -> None:
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
