"""Ranges in compiled code by real path, of the whole model and of blocks that are compiled one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.config import Phase
from cs_systems.instrument.annotate import annotate
from cs_systems.instrument.compiled_ranges import LabelledGraph, marked_code
from cs_systems.instrument.hooks import annotated
from cs_systems.instrument.structure import named_modules, rows
from tests.families.conftest import _made
from tests.families.models import FAMILIES
from tests.instrument.test_hooks import Journal

# PyTorch's own warning, raised while its compiler looks at the input of a graph.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "whisper", "resnet", "unet"])
def test_operators_of_a_traced_model_have_real_paths(name: str) -> None:
    if FAMILIES[name].is_missing:
        pytest.skip(f"needs the package {FAMILIES[name].needs}")
    made = _made(name)
    graphs: list[LabelledGraph] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(LabelledGraph(graph.graph))
        return graph.forward

    made.model.compile(backend=backend)
    try:
        made.forward()
    finally:
        made.model._compiled_call_impl = None
    found = {label[0].removeprefix(".") for graph in graphs for label in graph.labels.values() if label}
    paths = named_modules(made.model)
    assert found <= paths.keys()
    called = {path for path, module in paths.items() if isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm))}
    used = {path for path in called if "pooler" not in path}
    assert used <= found


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x + self.mlp(self.norm(x))}


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.trunk = nn.ModuleList([Block(width), Block(width)])
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.trunk:
            x = block(x)["x"]
        y: Tensor = self.out(x)
        return y


def _events(net: nn.Module, watched: nn.Module) -> tuple[list[str], list[str]]:
    """Return the ranges that open in forward and in backward of a step of compiled code."""
    journal, x = Journal(), torch.randn(3, 16)
    with marked_code():
        net(x).sum().backward()
        with annotated(journal, watched):
            with annotate(Phase.FORWARD):
                loss = net(x).sum()
            with annotate(Phase.BACKWARD):
                loss.backward()
    assert journal.all_closed
    opened = [name for name in journal.events if not name.startswith("/")]
    at = opened.index(Phase.BACKWARD)
    return opened[1:at], opened[at + 1 :]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["whole", "wrapped", "blocks", "wrapped blocks"])
def test_compiled_kernels_are_marked_with_real_paths(how: str) -> None:
    torch.manual_seed(0)
    net = Net()
    run: Any = net
    watched: Any = net
    if how == "whole":
        net.compile()
    elif how == "wrapped":
        run = watched = torch.compile(net)
    elif how == "blocks":
        for block in net.trunk:
            block.compile()
    else:
        for number, block in enumerate(net.trunk):
            net.trunk[number] = torch.compile(block)  # type: ignore[assignment]
    forward, backward = _events(run, watched)
    linear = {"stem", "trunk.0.mlp.0", "trunk.0.mlp.2", "trunk.1.mlp.0", "trunk.1.mlp.2", "out"}
    known = {row.range for row in rows(watched)}
    for opened in (forward, backward):
        assert linear <= {*opened}
        assert {name for name in opened if not name.startswith("fused (")} <= known
    assert [row.path for row in rows(watched)] == [row.path for row in rows(Net())]


class BrokenNet(Net):
    """Net with code in its middle that torch.compile cannot take."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        torch._dynamo.graph_break()
        y: Tensor = self.out(self.trunk[1](self.trunk[0](x)["x"])["x"])
        return y


class RecurrentNet(Net):
    """Net with an LSTM, for which torch.compile leaves the whole forward to eager mode."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.trunk = nn.ModuleList([nn.LSTM(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.trunk[0](self.stem(x))[0])
        return y


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [BrokenNet, RecurrentNet])
def test_modules_have_ranges_on_both_sides_of_a_graph_break(kind: type[Net]) -> None:
    torch.manual_seed(0)
    net = torch.compile(kind())
    forward, backward = _events(net, net)
    modules = [name for name in (row.path for row in rows(kind())) if name in ("stem", "out", "trunk.0", "trunk.1")]
    for opened in (forward, backward):
        found = {name for name in opened if not name.startswith("fused (")}
        assert all(any(name == path or name.startswith(f"{path}.") for name in found) for path in modules)
