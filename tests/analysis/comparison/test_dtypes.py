"""Tests of the dtype table and of the reasons for a step that ran in another precision than requested."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.analysis.comparison.dtypes import collapsed, contradiction, dtypes
from cs_systems.config import Precision


def module(name: str = "Net", autocast: str = "off", parameters: str = "float32", **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"module": name, "type": "Linear", "leaf": True, "root": True, "calls": 1}
    dtypes = {part: ["float32"] for part in ("inputs", "outputs", "output_gradients", "parameter_gradients")}
    row |= {**dtypes, "parameters": [parameters], "autocast": [autocast], "devices": ["cpu"]}
    return row | changes


def context(device: str, dtype: str = "bfloat16", enabled: bool = True) -> dict[str, Any]:
    return {"device": device, "dtype": dtype, "enabled": enabled}


FIX = '; call Net inside torch.autocast("cpu", torch.bfloat16)'


@pytest.mark.parametrize(
    ("precision", "modules", "contexts", "cause"),
    [
        ("bf16", [module(autocast="cpu bfloat16")], [context("cpu")], None),
        ("fp32", [module()], [], None),
        ("bf16-pure", [module(parameters="bfloat16")], [], None),
        ("bf16", [module()], [], "requested bfloat16, but the step enters no autocast, so that Net ran in its" + FIX),
        ("bf16", [module()], [context("cpu")], "autocast was entered for cpu, but Net was called outside of it" + FIX),
        ("bf16", [module()], [context("cpu", enabled=False)], "entered for cpu with enabled=False" + FIX),
        ("bf16", [module()], [context("cuda")], "autocast was entered for cuda, but Net's tensors are on cpu" + FIX),
        ("bf16", [module()], [context("cuda", enabled=False)], "(and switched off by torch, with a warning)" + FIX),
        ("bf16", [module(autocast="cuda bfloat16")], [context("cuda")], "on for cuda, but Net's tensors are on" + FIX),
        ("bf16", [module(autocast="cuda bfloat16", devices=["cpu", "cuda"])], [context("cuda")], None),
        ("bf16", [module(autocast="cpu bfloat16", devices=["cpu", "cuda"])], [], "autocast is on for cpu, but Net's"),
        ("bf16", [module(autocast="cpu float16")], [], "requested bfloat16, but autocast runs in float16" + FIX),
        (
            "fp32",
            [module(autocast="cpu bfloat16")],
            [],
            "but the step ran under autocast in bfloat16; use precision bf16, or remove autocast",
        ),
        ("bf16-pure", [module()], [], "there are parameters in float32; use model.bfloat16()"),
    ],
)
def test_contradiction_names_cause_and_remedy(
    precision: str, modules: list[dict[str, Any]], contexts: list[dict[str, Any]], cause: str | None
) -> None:
    found = contradiction(Precision(precision), modules, contexts)
    if cause is None:
        assert found is None
    else:
        problem, _, remedy = cause.partition("; call ")
        assert found is not None
        assert problem in found
        assert remedy in found


def test_autocast_inside_forward_is_no_contradiction() -> None:
    """The forward that enters autocast is itself called outside of it; the modules that it calls run inside."""
    inner = module("fc1", "cpu bfloat16", root=False)
    assert contradiction(Precision.BF16, [module(), inner], [context("cpu")]) is None


def test_collapsed_merges_equal_blocks_and_keeps_order() -> None:
    paths = ["Net", *(f"layers.{n}.{part}" for n in range(3) for part in ("q", "k")), "head.0", "head.1", "head.2"]
    rows = dtypes([module(path) for path in paths], ["float32"])
    rows[7]["inputs"] = "int64"
    rows[8]["outputs"] = "bfloat16"  # head.0 and head.2 are equal, but head.1 between them is not
    shown = [row["what"] for row in collapsed(rows)]
    assert shown == ["Net", "layers.0–2.q", "layers.0–2.k", "head.0", "head.1", "head.2", "logits", "loss"]


def test_cast_is_reported_for_leaf_with_other_output_width() -> None:
    low, both = ["bfloat16"], ["bfloat16", "float32"]
    modules = [
        module("net", outputs=low, leaf=False),
        module("down", outputs=low),
        module("up", inputs=low),
        module("kept", inputs=low, outputs=low),
        module("mixed", inputs=both, outputs=low),
        module("ids", inputs=["int64"]),
    ]
    rows = {row["what"]: row for row in dtypes(modules, ["float32"])}
    assert [rows[name]["cast"] for name in ("net", "down", "up", "kept", "mixed", "ids")] == [
        None, "down", "up", None, None, None,
    ]  # fmt: skip
    assert rows["logits"]["outputs"] == "bfloat16"
    assert rows["mixed"]["inputs"] == "bfloat16, float32"
    assert rows["loss"] == dict.fromkeys(rows["net"]) | {"what": "loss", "outputs": "float32"}


def test_merged_blocks_take_the_place_of_the_first() -> None:
    rows: Any = [{"what": what, "dtype": "float32"} for what in ("layers.0.attn", "head", "layers.1.attn", "tail")]
    assert [row["what"] for row in collapsed(rows)] == ["layers.0–1.attn", "head", "tail"]


def test_numbers_of_merged_blocks_may_have_another_length() -> None:
    rows: Any = [{"what": f"layers.{number}.attn"} for number in (9, 10, 11)]
    assert [row["what"] for row in collapsed(rows)] == ["layers.9–11.attn"]


@pytest.mark.parametrize(("layer", "is_fp8"), [("Linear", False), ("Fp8Linear", True)])
def test_step_in_fp8_needs_a_layer_that_computes_in_it(layer: str, is_fp8: bool) -> None:
    found = contradiction(Precision.FP8, [module(autocast="cpu bfloat16", type=layer)], [context("cpu")])
    assert (found is None) is is_fp8
    assert found is None or found.startswith("requested fp8, but no layer computes in it; call ")
