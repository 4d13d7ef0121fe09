"""Ranges of each family by real path, and the tables that are made of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from cs_systems.analysis.attribution import module_tables
from cs_systems.analysis.attribution.tables import layers, parts, phases
from cs_systems.analysis.attribution.timeline import results
from cs_systems.config import Phase
from cs_systems.core import plugins
from cs_systems.core.range_names import UNATTRIBUTED
from cs_systems.instrument.hooks import annotated
from cs_systems.instrument.structure import named_modules
from cs_systems.readers.forms.modules import modules_file, read_beside, unpacked
from tests.families.conftest import Made
from tests.families.recording import recorded
from tests.instrument.test_hooks import Journal


def test_each_module_that_is_called_gets_a_range(made: Made) -> None:
    called: Counter[str] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda *_, path=path: called.update([path]))
        for path, module in named_modules(made.model).items()
        if not isinstance(module, nn.Identity) and not (isinstance(module, nn.Dropout) and module.p == 0)
    ]
    journal = Journal()
    try:
        with annotated(journal, made.model):
            made.step()
    finally:
        for handle in handles:
            handle.remove()
    assert journal.all_closed
    forward = journal.events[: journal.events.index(f"/{Phase.FORWARD}")]
    root = type(made.model).__name__
    opened = Counter(name for name in forward if not name.startswith("/") and name not in ("step", Phase.FORWARD))
    assert opened == {path or root: count for path, count in called.items()}
    backward = set(journal.events[journal.events.index(Phase.BACKWARD) :])
    own = {path for path, m in named_modules(made.model).items() if any(p.requires_grad for p in m.parameters(False))}
    missing = {path for path in own & called.keys() if (path or root) not in backward}
    assert missing == set()


def test_depth_limits_the_ranges(made: Made) -> None:
    journal = Journal()
    with annotated(journal, made.model, depth=1):
        made.step()
    assert not [name for name in journal.events if "." in name]
    assert type(made.model).__name__ in journal.events


def test_time_belongs_to_modules_and_adds_up(made: Made, tmp_path: Path) -> None:
    """The operators of a CPU stand for the kernels of a GPU."""
    seen = recorded(made, tmp_path / "cell")
    modules = seen.trace.modules
    assert modules is not None
    assert modules.are_paths
    rows = {row["path"]: row for row in module_tables.modules(seen)}
    times = {row["phase"]: row["time_s"] for row in phases(seen) if row["family"] == "all"}
    outside = [(f, p) for f, p in seen.groups if p.module is None and p.phase in times.keys() - {"loss"}]
    # Apart from the gradient of the loss, only the first gradient is made outside of modules.
    first_gradient = {"aten::empty_strided", "aten::empty", "aten::fill_"}
    assert {f.name for f, p in outside if p.layer != "loss"} <= first_gradient
    assert {f.name for f, p in seen.groups if p.layer == UNATTRIBUTED} <= first_gradient
    for phase in ("forward", "backward"):
        assert rows[""][f"{phase}_s"] == pytest.approx(
            sum(t.time_s for (_, p), t in seen.groups.items() if p.module is not None and p.phase == phase)
        )
    assert sum(row["own_s"] for row in rows.values()) == pytest.approx(rows[""]["time_s"])
    assert sum(row["time_s"] for row in module_tables.classes(seen)) == pytest.approx(rows[""]["time_s"])
    made_blocks = module_tables.blocks(seen)
    assert Counter(row["path"] for row in made_blocks) == {row["path"]: 1 for row in made_blocks}
    assert len(made_blocks) == sum(made.family.stacks.values())
    assert all(row["time_s"] > 0 for row in made_blocks)
    in_layers = {row["layer"]: row["time_s"] for row in layers(seen)}
    for row in made_blocks:
        assert in_layers[row["block"]] == pytest.approx(row["time_s"])
    assert {row["part"] for row in parts(seen)} >= ({"attention"} if "ffn" in made.family.parts.values() else set())
    assert module_tables.why_nothing(seen) is None
    json.dumps(results(seen))


def test_tree_sums_the_blocks_of_a_list(made: Made, tmp_path: Path) -> None:
    seen = recorded(made, tmp_path / "cell")
    tree = {row["module"]: row for row in module_tables.tree(seen)}
    for stack, count in made.family.stacks.items():
        blocks = [row for row in module_tables.modules(seen) if row["stack"] == stack and row["block"]]
        star = f"{stack}*" if stack in ("down", "up") else f"{stack}.*"
        assert tree[star]["modules"] == count
        whole = [row for row in blocks if row["path"].removeprefix(stack).strip(".").isdigit()]
        assert tree[star]["time_s"] == pytest.approx(sum(row["time_s"] for row in whole))


@pytest.mark.parametrize("suffix", plugins.get("readers", "nsys").suffixes)
def test_modules_lie_beside_a_report_with_any_suffix_of_nsys(suffix: str, tmp_path: Path) -> None:
    assert modules_file(tmp_path / f"a{suffix}") == tmp_path / "a.modules.json"
    assert modules_file(tmp_path / "a.nsys-rep.sqlite") == tmp_path / "a.modules.json"


def test_a_table_of_modules_from_outside_is_checked(tmp_path: Path) -> None:
    for text in (None, 3, "", "not base64!", "eJw="):
        assert unpacked(text) is None
    file = modules_file(tmp_path / "a.sqlite")
    for content in ("", "[", "{}", "[]", "[3]", '[{"path": 3}]', '[{"path": "a", "class": "b", "range": "c"}]'):
        file.write_text(content)
        assert read_beside(tmp_path / "a.sqlite") is None


def test_shared_and_failing_modules_get_ranges() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    shared = nn.Linear(2, 2)
    net = nn.ModuleDict({"a": nn.Sequential(shared, shared, Fails())})
    journal = Journal()
    with annotated(journal, net), pytest.raises(ArithmeticError):
        net["a"](torch.ones(1, 2))
    assert journal.events == ["a", "a.0", "/a.0", "a.0", "/a.0", "a.2", "/a.2", "/a"]
