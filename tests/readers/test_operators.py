"""Tests of a trace's operators: their tree, launched kernels, FLOPs and callers, by name and shapes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.operator_table import OperatorRow, notes, operators
from cs_systems.analysis.attribution.profile import profile
from cs_systems.cli import main
from cs_systems.readers import read
from cs_systems.readers.forms.columns import UNKNOWN
from cs_systems.readers.forms.operators import nested
from tests.analysis.attribution.test_foreign import AUTOGRAD, event, kernel, marked

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]
Key = tuple[str, str | None]


def op(name: str, start: float, end: float, *shapes: list[int], thread: int = 1, **args: object) -> Event:
    dims = {"Input Dims": [*shapes]} if shapes else {}
    return event("cpu_op", name, start, end, thread, **dims, **args)


def by_key(path: Path) -> dict[Key, OperatorRow]:
    return {(row["operator"], row["shapes"]): row for row in operators(profile(read(path)))}


def linear_step() -> list[Event]:
    """Return a step with a linear layer that is called twice, and its backward in another thread; times in µs."""
    forward = [
        marked("ProfilerStep#1", 0, 100), marked("forward", 0, 30), marked("mlp", 5, 28), marked("backward", 40, 90),
        op("aten::linear", 6, 14, [8, 16], [32, 16]),
        op("aten::addmm", 7, 13, [32], [8, 16], [16, 32], []),
        op("aten::linear", 16, 24, [8, 16], [32, 16]),
        op("aten::addmm", 17, 20, [32], [8, 16], [16, 32], []),
        op("aten::gelu", 25, 27, [8, 32]),
        *kernel("gemm", 110, 120, launched=8), *kernel("gemm", 120, 132, launched=18),
        *kernel("split", 132, 133, launched=22), *kernel("gelu", 140, 141, launched=26),
    ]  # fmt: skip
    return [
        *forward,
        op("MmBackward0", 50, 60, thread=AUTOGRAD), op("aten::mm", 51, 59, [8, 32], [32, 16], thread=AUTOGRAD),
        *kernel("gemm", 150, 170, launched=52, thread=AUTOGRAD), *kernel("mine", 180, 182, launched=95),
    ]  # fmt: skip


@pytest.mark.parametrize("longest", [4, 30])
def test_enclosing_operator_is_the_last_open_one(longest: int) -> None:
    """Random intervals nest or overlap, last 0 s, and begin or end together."""
    random = np.random.default_rng(longest)
    for count in random.integers(1, 40, 300).tolist():
        start, thread = random.integers(0, 30, count).astype(float), random.integers(0, 2, count)
        end = start + random.integers(0, longest, count)
        if count % 2:  # repeated halves nest
            start, end = (start // 4) * 4, (start // 4) * 4 + 4 * 0.5 ** random.integers(0, 5, count)
        order = np.lexsort((-end, start, thread))
        start, end, thread = start[order], end[order], thread[order]
        parent, depth = nested(start, end, thread)
        for i in range(count):
            still = [j for j in range(i) if thread[j] == thread[i] and end[j] > start[i]]
            assert parent[i] == (still[-1] if still else UNKNOWN)
            assert depth[i] == (depth[still[-1]] + 1 if still else 0)


def test_row_sums_calls_times_and_flops(write_trace: WriteTrace) -> None:
    rows = by_key(write_trace(linear_step()))
    linear, addmm = rows["aten::linear", "8×16, 32×16"], rows["aten::addmm", "32, 8×16, 16×32"]
    us = pytest.approx
    assert (linear["calls_per_step"], linear["kernels_per_step"]) == (2, 1)
    assert [linear[c] * 1e6 for c in ("host_s", "host_self_s", "device_s", "device_self_s")] == us([16, 7, 23, 1])
    assert [addmm[c] * 1e6 for c in ("host_s", "host_self_s", "device_s", "device_self_s")] == us([9, 9, 22, 22])
    assert (addmm["flops"], addmm["formula"]) == (2 * 2 * 8 * 16 * 32, "2·m·k·n")
    assert addmm["achieved_flops_per_s"] == us(2 * 2 * 8 * 16 * 32 / 22e-6)
    assert rows["aten::gelu", "8×32"]["flops"] is None
    assert (addmm["caller"], addmm["callers"]) == ("mlp", 1)
    assert rows["aten::mm", "8×32, 32×16"]["caller"] == "backward"
    assert rows["MmBackward0", None]["device_s"] == us(20e-6)
    assert sum(row["share"] for row in rows.values()) == us(44 / 46)


def simple_sums(path: Path, steps: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """Return name → [calls, kernels, their time in µs], each kernel to the shortest operator around its launch."""
    events = json.loads(path.read_text())["traceEvents"]
    ops = [e for e in events if e.get("cat") == "cpu_op" and any(a <= e["ts"] <= b for a, b in steps)]
    launches = {e["args"]["correlation"]: e for e in events if str(e.get("cat")).startswith("cuda_") and "args" in e}
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for one in ops:
        found[one["name"]][0] += 1
    for run in (e for e in events if e.get("cat") == "kernel"):
        call = launches[run["args"]["correlation"]]
        around = [o for o in ops if o["tid"] == call["tid"] and o["ts"] <= call["ts"] <= o["ts"] + o["dur"]]
        if around:
            shortest = min(around, key=lambda o: o["dur"])
            found[shortest["name"]][1] += 1
            found[shortest["name"]][2] += run["dur"]
    return found


def test_real_trace_agrees_with_simple_reader(kineto_events: list[Event], write_trace: WriteTrace) -> None:
    path = write_trace(kineto_events)
    made = profile(read(path), "forward")
    forwards = [e for e in kineto_events if e.get("cat") == "user_annotation" and e["name"] == "forward"]
    expected = simple_sums(path, [(e["ts"], e["ts"] + e["dur"]) for e in forwards])
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for row in operators(made):
        for column, name in enumerate(("calls_per_step", "kernels_per_step", "device_self_s")):
            found[row["operator"]][column] += row[name] * len(made.steps) * (1e6 if column == 2 else 1)
    assert found == {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()}
    assert Counter(name for name, values in found.items() if values[1])["aten::bmm"] == 1


def test_flops_of_a_recorded_step_equal_those_of_pytorch(tmp_path: Path) -> None:
    """Convolutions, matrix products and their backward, recorded here; nested operators count once."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from cs_systems.analysis.attribution.operator_table import flops_of_outermost

    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, (3, 1)),
        torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 8, 10),
    )  # fmt: skip
    x = torch.randn(2, 3, 16, 16)

    def step() -> None:
        y = net(x)
        (y @ y.T).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    with torch.profiler.profile(record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    trace = read(path)
    assert trace.operators is not None
    assert flops_of_outermost(trace.operators).sum() == counter.get_total_flops()
    assert main(["analyze", str(path), "--table", "operators", "--output", str(tmp_path / "out.txt")]) == 0
    text = (tmp_path / "out.txt").read_text()
    assert "aten::addmm" in text
    assert "rates are by the host's time" in text


@pytest.mark.parametrize("masked", [False, True])
def test_model_flops_of_a_recorded_attention_follow_its_causality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], masked: bool
) -> None:
    import torch

    from cs_systems.analysis.attribution.operator_table import flops_of_outermost

    q, mask = torch.randn(1, 2, 8, 4, requires_grad=True), torch.ones(8, 8, dtype=torch.bool).tril()
    with torch.profiler.profile(record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(q, q, q, **({"attn_mask": mask} if masked else {"is_causal": True})).sum().backward()
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    trace = read(path)
    assert trace.operators is not None
    whole = 3 * 4 * 2 * 8 * 8 * 4
    assert flops_of_outermost(trace.operators).sum() == (whole if masked else whole / 2)
    capsys.readouterr()
    assert main(["analyze", str(path), "--table", "operators"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "FLOPs: model FLOPs by input shapes; causal attention counts half; unfused scores count in full" in text
    assert ("attention counts in full where the trace does not hold what its mask hides" in text) == masked


def test_operators_without_kernels_and_ranges_are_a_step(write_trace: WriteTrace) -> None:
    """The rate is unknown on a machine with a GPU, because the host's time there is launch time."""
    path = write_trace(
        [op("aten::linear", 6, 14, [8, 16], [32, 16]), op("aten::addmm", 7, 13, [32], [8, 16], [16, 32])]
    )
    rows = by_key(path)
    addmm = rows["aten::addmm", "32, 8×16, 16×32"]
    assert (addmm["device_s"], addmm["share"], addmm["achieved_flops_per_s"]) == (None, None, None)
    assert addmm["host_share"] == pytest.approx(6 / 8)
    path.write_text(json.dumps({"deviceProperties": [], "traceEvents": json.loads(path.read_text())["traceEvents"]}))
    rate = by_key(path)["aten::addmm", "32, 8×16, 16×32"]["achieved_flops_per_s"]
    assert rate == pytest.approx(2 * 8 * 16 * 32 / 6e-6)


def test_operator_outside_of_every_range_has_no_caller(
    write_trace: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace([marked("mine", 0, 10), op("aten::mm", 1, 5), op("aten::add", 20, 30)])
    assert main(["analyze", str(path), "--table", "operators"]) == 0
    rows = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if "aten::" in line}
    assert rows == {"aten::mm": "mine", "aten::add": "–"}


def test_recursion_is_not_counted_twice(write_trace: WriteTrace) -> None:
    rows = by_key(write_trace([op("mine", 0, 10), op("mine", 2, 8), op("other", 3, 4)]))
    assert rows["mine", None]["calls_per_step"] == 2
    assert rows["mine", None]["host_s"] == pytest.approx(10e-6)
    assert rows["mine", None]["host_self_s"] == pytest.approx(9e-6)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([[[4, 4], [4], [2, 2]], []], "[4×4, 4, … 3 tensors]"),
        ([[[4, 4], [4]], [3]], "[4×4, 4], 3"),
        ([[], []], ""),
        ([[4, "x"]], None),
        ("4", None),
        ([4], None),
        ([[[4, [2]]]], None),
    ],
)
def test_shapes_are_shown_or_unknown(write_trace: WriteTrace, shapes: object, text: str | None) -> None:
    assert [*by_key(write_trace([event("cpu_op", "mine", 0, 1, **{"Input Dims": shapes})]))] == [("mine", text)]


def test_notes_name_what_the_trace_lacks(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace([op("mine", 0, 10), *kernel("gemm", 20, 30, launched=5)])))
    said = notes(made, operators(made))
    assert "record with torch.profiler.profile(record_shapes=True)" in said[-1]
    made = profile(read(write_trace([marked("step", 0, 10), *kernel("gemm", 20, 30, launched=5)])))
    assert notes(made, operators(made))[0].startswith("the trace holds no operators; record with activities=")


def test_ranges_of_emit_nvtx_are_operators(write_trace: WriteTrace) -> None:
    """The ranges of Kineto's file stand in for those of nsys, which become the same columns."""
    path = write_trace(
        [
            marked("aten::linear, op_id = 7, sizes = [[8, 16], [32, 16]]", 0, 9),
            marked(
                "aten::addmm, seq = 3, op_id = 8, sizes = [[32], [8, 16], [16, 32], []], input_op_ids = [(7,0)]", 1, 8
            ),
            marked("aten::view, op_id = 9", 8, 9),
            *kernel("gemm", 20, 30, launched=5),
        ]
    )
    rows = by_key(path)
    assert {*rows} == {("aten::addmm", "32, 8×16, 16×32"), ("aten::linear", "8×16, 32×16"), ("aten::view", None)}
    assert rows["aten::addmm", "32, 8×16, 16×32"]["achieved_flops_per_s"] == pytest.approx(2 * 8 * 16 * 32 / 10e-6)
