"""Blocks and parts of each family, found from its module tree."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from cs_systems.config import PRESETS
from cs_systems.instrument.structure import RULES, Rule, blocks, named_modules, range_names, rows
from cs_systems.model import BasicTransformerLM
from tests.families.conftest import Made
from tests.families.models import ResNet


def test_blocks_are_the_repeated_children_of_lists(made: Made) -> None:
    found = blocks(made.model)
    assert Counter(block.stack for block in found) == made.family.stacks
    assert len({block.label for block in found}) == len(found)  # encoder and decoder, towers and stages apart


def test_parts_are_recognised_by_their_computation(made: Made) -> None:
    parts = {row.path: row.part for row in rows(made.model)}
    assert {path: parts[path] for path in made.family.parts} == dict(made.family.parts)


def test_each_module_with_parameters_has_a_part_and_each_row_a_range(made: Made) -> None:
    found = rows(made.model)
    assert [row.path for row in found] == list(named_modules(made.model))
    own = {path: list(module.parameters(recurse=False)) for path, module in named_modules(made.model).items()}
    without = [row.path for row in found if row.path and own[row.path] and row.part is None]
    assert without == []
    assert len({row.range for row in found}) == len(found)
    assert found[0].parameters == sum(p.numel() for p in made.model.parameters())


def test_own_model_keeps_its_names() -> None:
    found = {row.path: row for row in rows(BasicTransformerLM(PRESETS["tiny"]))}
    assert found["layers.1.attn.q_proj"].range == "projections"
    assert found["layers.1.attn.q_proj"].part == "attention.projections"
    assert found["layers.1.attn.output_proj"].part == "attention.output"
    assert found["layers.1.ffn.w2"].part == "ffn"
    assert (found["layers.1"].block, found["layers.1"].range) == ("block 1", "block 1")
    assert found["ln_final"].layer == "final norm"


def test_module_path_equal_to_a_phase_gets_another_range_name() -> None:
    assert range_names(["", "loss", "h.0"], "Net") == {"": "Net", "loss": "loss (module)", "h.0": "h.0"}


def test_stages_of_one_block_each_are_found() -> None:
    assert [block.path for block in blocks(ResNet(blocks=(1, 1, 1)))] == ["layer1.0", "layer2.0", "layer3.0"]


def test_stages_of_a_list_are_kept_apart() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.norm = nn.MultiheadAttention(4, 1), nn.LayerNorm(4)

    class Stage(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Layer() for _ in range(count)])
            self.downsample = nn.Linear(4, 4)

    class Swin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Stage(2), Stage(3)])

    found = blocks(Swin())
    assert Counter(block.stack for block in found) == {"layers.0.blocks": 2, "layers.1.blocks": 3}
    assert found[-1].label == "layers.1.blocks 2"


def test_norms_with_an_activation_inside_are_not_blocks() -> None:
    class NormAct(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(4)
            self.act = nn.SiLU()

    net = nn.ModuleDict({name: NormAct() for name in ("bn1", "bn2")})
    assert blocks(net) == []


def test_experts_are_not_blocks() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 1)
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 64), nn.GELU()) for _ in range(4)])

    net = nn.Sequential(Layer(), Layer())
    assert [block.path for block in blocks(net)] == ["0", "1"]
    assert {row.path: row.part for row in rows(net)}["1.experts.3.0"] == "ffn"


def test_absent_modules_of_a_list_are_skipped() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms, self.linear = nn.ModuleList([nn.LayerNorm(4), None]), nn.Linear(4, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.ModuleList([None, Layer()]), nn.ModuleList([Layer(), None])

    assert [block.path for block in blocks(nn.ModuleList([Layer(), Layer()]))] == ["0", "1"]
    assert [block.path for block in blocks(Net())] == ["down.1", "up.0"]


def test_a_user_adds_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sinkhorn(nn.Module):
        pass

    monkeypatch.setattr("cs_systems.instrument.structure.RULES", [Rule("matching", class_name="Sinkhorn"), *RULES])
    assert rows(nn.Sequential(Sinkhorn(), nn.ReLU()))[1].part == "matching"
