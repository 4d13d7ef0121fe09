"""Settings that may make a CPU's layers slower: the layers are found with their sizes, and computed in both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import SLOW_SETTINGS, SlowSettingRow
from cs_systems.measure.recorder import slow_settings
from cs_systems.measure.recorder.slow_settings import Layer
from tests.measure.recorder.test_training import recorded
from tests.measure.recorder.trainings import update

HALVES = [(torch.bfloat16, "bf16"), (torch.float16, "fp16")]


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(32, 4))


def rows(out: Path, model: nn.Module, inputs: Tensor, autocast: torch.dtype | None = None) -> list[SlowSettingRow]:
    """Return the rows of a recorded loop that trains a model under autocast to this dtype."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = model(inputs).square().mean()
        update(optimizer, loss)

    recorder = recorded(out, step)
    assert all(each.failure is None for each in recorder._observers._every)
    return [*SLOW_SETTINGS.of(recorder.records[0].results)]


def layers(roots: Tensor) -> list[Layer]:
    return sorted(slow_settings._layers(roots), key=lambda layer: len(layer.inputs))


def test_layers_have_the_sizes_and_gradients_of_the_pass() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, (3, 5), stride=2, padding=1, dilation=2, groups=2), nn.Flatten(1))
    linear = nn.Linear(6 * 9 * 7, 8)
    product, convolution = layers(linear(model(torch.ones(2, 4, 19, 19))).sum())
    assert product == Layer(torch.float32, (2, 378), (378, 8), (), True, False)
    options = {"stride": (2, 2), "padding": (1, 1), "dilation": (2, 2), "groups": 2}
    assert convolution._replace(inputs=(2, 4, 19, 19)) == Layer(
        torch.float32, (2, 4, 19, 19), (6, 2, 3, 5), tuple(options.items()), False, False
    )
    assert model[0](torch.ones(convolution.inputs)).shape == (2, 6, 9, 7)


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 3, 3), nn.Conv3d(2, 3, 3)])
def test_convolutions_of_any_dimension_are_computed_again(layer: nn.Conv1d) -> None:
    inputs = torch.ones(2, 2, *(5 for _ in layer.weight.shape[2:]))
    (found,) = layers(layer(inputs).sum())
    assert (found.inputs, found.weights) == (inputs.shape, layer.weight.shape)
    assert found.measured_s(torch.float32) > 0


def test_transposed_convolutions_and_products_without_a_weight_are_left_out() -> None:
    scores = nn.Parameter(torch.ones(2, 3)) @ torch.ones(3, 4)
    assert layers(nn.ConvTranspose2d(2, 3, 3)(torch.ones(2, 2, 5, 5)).sum() + scores.sum()) == []


@pytest.mark.parametrize(("dtype", "name"), HALVES)
def test_layers_under_autocast_are_computed_in_both_precisions(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    (found,) = rows(tmp_path, net(), torch.randn(2, 1, 8, 8), dtype)
    assert (found["setting"], found["is_autocast"], found["layers"]) == (name, True, 3)
    assert found["time_s"] > 0
    assert found["usual_s"] > 0


def test_weights_in_half_precision_are_no_autocast(tmp_path: Path) -> None:
    (found,) = rows(tmp_path, net().bfloat16(), torch.randn(2, 1, 8, 8).bfloat16())
    assert (found["setting"], found["is_autocast"]) == ("bf16", False)


def test_onednn_is_tried_where_the_program_has_switched_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[bool]()
    compute = Layer.measured_s

    def seen(self: Layer, dtype: torch.dtype) -> float:
        used.append(torch._C._get_mkldnn_enabled())
        return compute(self, dtype)

    monkeypatch.setattr(Layer, "measured_s", seen)
    monkeypatch.setattr(slow_settings, "MOST_ROUNDS", 2)
    torch._C._set_mkldnn_enabled(False)
    try:
        (found,) = rows(tmp_path, net(), torch.randn(2, 1, 8, 8))
        assert not torch._C._get_mkldnn_enabled()
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert (found["setting"], found["layers"]) == ("no oneDNN", 3)
    assert used == [False, False, True, True] * 3


def test_largest_layers_come_first_and_time_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_settings, "MOST_S", 0.0)
    (found,) = rows(tmp_path, nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 64)), torch.randn(2, 8), torch.bfloat16)
    assert found["layers"] == 1


def test_usual_settings_have_no_row(tmp_path: Path) -> None:
    assert rows(tmp_path, net(), torch.randn(2, 1, 8, 8)) == []
