"""Tests of --recipe: which options a cell then has, and that its own options win."""

from __future__ import annotations

import pytest

from cs_systems.cli import main
from cs_systems.cli._options import ModelCells
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.recipes import RECIPES
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads.train_step import TrainStep


def cells(**options: object) -> list[RunConfig]:
    return ModelCells(**options).configs(RunConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", ["small", "large", "2.7B", "8B"])
def test_recipe_gives_a_valid_cell_that_holds_each_option(name: str, size: str) -> None:
    (cell,) = cells(recipe=(name,), size=(size,))
    for option, value in RECIPES[name].options.items():
        assert option == "parts" or getattr(cell, option) == value
    assert {*cell.parts} <= {*plugins.names("training.parts")}
    assert cell.attention in plugins.names("attention")


def test_fast_updates_weights_in_backward_only_where_a_step_updates_them() -> None:
    fused = {"fused_embedding_gradient", "fused_feed_forward", "fused_rmsnorm", "fused_rotary", "joined_projections"}
    whole, part = (cell.parts for cell in cells(recipe=("fast",), mode=("train-step", "forward-backward")))
    assert fused <= {*part}
    assert {*whole} == {*part, "fused_weight_update"}


def test_given_option_replaces_the_one_of_the_recipe() -> None:
    (cell,) = cells(recipe=("fast",), optimizer=("adamw_bf16_state",), attention=("sdpa_cudnn",))
    assert (cell.optimizer, cell.attention, cell.graph) == ("adamw_bf16_state", "sdpa_cudnn", "step")


def test_each_recipe_is_a_cell_of_its_own() -> None:
    found = cells(recipe=("eager", "compiled"), size=("small", "medium"))
    assert [(c.model.name, c.compile) for c in found] == [
        ("small", "none"), ("small", "default"), ("medium", "none"), ("medium", "default"),
    ]  # fmt: skip


def test_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown recipe 'fats'; did you mean fast"):
        cells(recipe=("fats",))


def test_recipe_that_needs_a_hopper_gpu_is_unavailable_by_name() -> None:
    for mode in ("train-step", "forward-backward"):
        (cell,) = cells(recipe=("fast",), mode=(mode,))
        with pytest.raises(
            Unavailable, match=r"the options of recipe fast require a Hopper GPU; use those of recipe compiled instead"
        ):
            TrainStep.preflight(Cell(cell), resolve("cpu"))
    (cell,) = cells(recipe=("fast",), attention=("sdpa_cudnn",))
    with pytest.raises(Unavailable, match=r"^(?!.*recipe fast)"):
        TrainStep.preflight(Cell(cell), resolve("cpu"))


def test_block_scope_needs_a_compiled_cell() -> None:
    with pytest.raises(ConfigError, match="--compile-scope block has no effect without --compile"):
        cells(compile_scope="block")
    with pytest.raises(ConfigError, match="--compile-scope block has no effect without --compile"):
        cells(compile_scope="block", recipe=("eager",))
    (given,) = cells(compile_scope="block", recipe=("compiled",))
    assert (given.compile, given.compile_scope) == ("default", "block")
    both = cells(compile_scope="block", compile=("none", "default"))
    assert [(c.compile, c.compile_scope) for c in both] == [("none", "model"), ("default", "block")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "sdpa_flash · bf16"),
        (["--attention", "naive"], "naive · bf16"),
        (["--precision=fp32"], "sdpa_flash · fp32"),
    ],
)
def test_typed_default_replaces_the_option_of_the_recipe(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", "--device", "cpu", "--size", "tiny", "--recipe", "eager", *words, "--dry-run"]) == 0
    assert expected in capsys.readouterr().out
