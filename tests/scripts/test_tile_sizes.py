"""Tests of the tile size backends and of the study that compares them."""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.measure.runtime.sweep import run
from cs_systems.model.attention import AttentionCall, flash_triton
from cs_systems.record import read_records
from tests.scripts.test_studies import explained, invented, study

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "profiles" / "triton_tile_sizes" / "cpu"
CALL = AttentionCall("cuda", "float32", 64, 2048, 2048, 1, 1, causal=True)
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")


@pytest.fixture(scope="module")
def tiles() -> Any:
    return importlib.import_module("_tiles")


def patch_resources(tiles: Any, monkeypatch: pytest.MonkeyPatch, **shared_bytes: int) -> None:
    """Pretend that the compiled kernels need this much shared memory."""

    def resources(capability: int, tile: Any, dtype: str, d_head: int, causal: bool, kernel: str) -> Any:
        return importlib.import_module("cs_systems.model.kernels.compile").KernelResources(
            255, 0, shared_bytes[kernel], tile.num_warps, {}, ()
        )

    monkeypatch.setattr(tiles, "resources", resources)


def test_tile_beyond_shared_memory_is_refused_with_numbers(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_resources(tiles, monkeypatch, forward=98_304, dq=107_008, dkdv=107_008)
    reason = tiles.too_large(86, 64, CALL)
    assert "the dq kernel's block needs 107,008 B of shared memory, and sm_86 gives a block 101,376 B" in reason
    assert "use a smaller tile, or fewer stages than 3" in reason
    assert tiles.too_large(86, 64, replace(CALL, needs_backward=False)) is None
    assert tiles.too_large(80, 64, CALL) is None
    assert tiles.too_large(90, 64, CALL) is None
    assert tiles.too_large(75, 64, CALL) is None


def test_availability_depends_on_installed_gpu(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_resources(tiles, monkeypatch, forward=107_008, dq=1, dkdv=1)
    monkeypatch.setattr(flash_triton, "unavailable", lambda call: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert "107,008 B" in tiles.tile_64.unavailable(CALL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert tiles.tile_64.unavailable(CALL) is None


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_tile_backend_has_its_tile_and_same_reasons_as_flash_triton(tiles: Any, size: int) -> None:
    backend = plugins.get("attention", f"scripts/_tiles.py:tile_{size}")
    assert (backend.algorithm(CALL).block_q, backend.algorithm(CALL).block_k) == (size, size)
    if find_spec("triton"):
        on_cpu = replace(CALL, device="cpu")
        assert backend.unavailable(on_cpu) == flash_triton.unavailable(on_cpu)
    assert backend.function.keywords["tiles"].dkdv.block_m == size


@TRITON
def test_resources_cell_records_compiler_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = next(
        c for c in study("triton_tile_sizes").small() if c.workload.endswith(":sm_86") and "16" in c.attention
    )
    record = run(config)
    assert record.status == "ok", record.reason
    rows = record.results["resources"]
    assert [row["kernel"] for row in rows] == ["forward", "dq", "dkdv"]
    for row in rows:
        assert row["limit_bytes"] == 99 * 1024
        assert 0 < row["shared_bytes"] < row["limit_bytes"]
        assert row["fits"]
        assert 0 < row["registers"] <= 255
    assert record.config["attention"] == "scripts/_tiles.py:tile_16"


@pytest.mark.gpu
@TRITON
def test_tile_backend_matches_flash_triton_on_gpu(tiles: Any) -> None:
    q, k, v = (torch.randn(1, 1, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if reason := tiles.tile_32.unavailable(replace(CALL, dtype="bfloat16")):
        pytest.skip(reason)
    out, tuned = tiles.tile_32(q, k, v, causal=True), flash_triton.BACKEND(q, k, v, causal=True)
    # Other tiles have other running maxima, and so other roundings of the probabilities to bf16.
    torch.testing.assert_close(out, tuned, rtol=0.016, atol=4e-3)


@pytest.mark.gpu
@TRITON
def test_predicted_shared_memory_matches_launch_error(tiles: Any) -> None:
    from triton.runtime.errors import OutOfResources

    from cs_systems.model.kernels.triton.configs import Tile, Tiles

    tile = Tile(128, 128, 8, 5)
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    major, minor = torch.cuda.get_device_capability()
    found = tiles.resources(10 * major + minor, tile, "bfloat16", 128, True, "forward")
    assert found.shared_bytes > limit
    assert limit == importlib.import_module("cs_systems.model.kernels.compile").SHARED_LIMIT_BYTES[10 * major + minor]
    q = torch.randn(1, 1, 2048, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(OutOfResources, match=rf"Required: {found.shared_bytes}"):
        flash_triton.attention(q, q, q, causal=True, tiles=Tiles(tile, tile, tile))


def test_study_names_architectures_that_fit(skeleton: Any) -> None:
    records, _ = read_records(RECORDED)
    explanation = explained(skeleton, "triton_tile_sizes", records)
    assert "sm_86, 101,376 B a block: " in explanation
    assert "a block of 107,008 B takes more than 101,376 B, the limit of sm_86; it fits sm_80 and sm_90" in explanation
    table = "\n".join(study("triton_tile_sizes").tables(skeleton.cells(records), "markdown"))
    assert "dq, dkdv" in table
    assert not list(
        skeleton._missing(study("triton_tile_sizes"), records)
    )  # the small size has all cells that it shares with the full one


def test_study_reports_memory_growth_with_length(skeleton: Any, builders: Any) -> None:
    explanation = explained(
        skeleton, "triton_tile_sizes", [invented(builders, config) for config in study("triton_tile_sizes").full()]
    )
    assert "bf16 d_head 128, length 32768: " in explanation
    assert "with any of 4 tiles" in explanation
    assert "memory grows as length^1.00 with tiles of any size, as length^1.9" in explanation


def test_unknown_tile_backend_is_rejected() -> None:
    with pytest.raises(ConfigError, match="has no 'tile_48'"):
        plugins.get("attention", f"{ROOT / 'scripts' / '_tiles.py'}:tile_48")


def test_figure_has_times_only_with_measured_calls(skeleton: Any, builders: Any) -> None:
    records, _ = read_records(RECORDED)
    shown = [axes.get_title() for axes in study("triton_tile_sizes").draw(skeleton.cells(records)).axes]
    assert shown == ["sm_80: 163 KiB", "sm_86: 99 KiB", "sm_90: 227 KiB"]
    measured = [
        invented(builders, config) for config in study("triton_tile_sizes").full() if config.workload == "attention"
    ]
    shown = [axes.get_title() for axes in study("triton_tile_sizes").draw(skeleton.cells([*records, *measured])).axes]
    assert shown[:2] == ["bf16 d_head 64", "bf16 d_head 128"]
    assert shown[-1] == "sm_90: 227 KiB"
