"""Tests of measuring cells in this process: real training steps of the tiny model on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cs_systems
from cs_systems.config import PRESETS, AttentionShape, ConfigError, Mode, Precision, RunConfig
from cs_systems.machine.device import Device, DeviceUnavailable, resolve
from cs_systems.measure.runtime.channel import CellRecord, Message, Visit
from cs_systems.measure.runtime.execute import _Cell, _cost_tables, run_cells
from cs_systems.measure.runtime.plain_rows import OWN_TABLES, plain_tables
from cs_systems.measure.workloads import CallableWorkload, Cell
from cs_systems.measure.workloads._foreign import FORMS
from cs_systems.record import RunRecord

TINY = RunConfig(model=PRESETS["tiny"], device="cpu", warmup=1, steps=3)
OF_WORKLOAD = {
    "train_step": replace(TINY, mode=Mode.FORWARD),
    "attention": RunConfig(workload="attention", mode=Mode.FORWARD, device="cpu", warmup=1, steps=3),
}
OWN = RunConfig(device="cpu", warmup=1, steps=3)  # for workloads that use no model


def run(config: RunConfig) -> RunRecord:
    return cs_systems.run(config, in_process=True)


def run_interleaved(*configs: RunConfig) -> tuple[list[RunRecord], list[int]]:
    """Run the cells interleaved; return their records and the order of the visits."""
    sent: list[Message] = []
    run_cells(configs, emit=sent.append)
    by_cell = {m.cell: RunRecord.from_dict(m.record) for m in sent if isinstance(m, CellRecord)}
    return [by_cell[i] for i in range(len(configs))], [
        m.cell for m in sent if isinstance(m, Visit) and m.round is not None
    ]


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        (Mode.FORWARD, ("forward",)),
        (Mode.FORWARD_BACKWARD, ("forward", "loss", "backward")),
        (Mode.TRAIN_STEP, ("forward", "loss", "backward", "optimizer")),
    ],
)
def test_mode_selects_the_phases(mode: Mode, phases: tuple[str, ...]) -> None:
    record = run(replace(TINY, mode=mode))
    assert record.status == "ok", record.reason
    measurement = record.measurement
    assert measurement is not None
    assert measurement.phase_names() == phases
    assert [s.warmup for s in measurement.samples] == [True, False, False, False]
    assert measurement.peak_allocated_bytes is None  # unknown on a CPU
    for sample in measurement.timed:
        assert 0 < sum(sample.phases_s.values()) <= sample.wall_s
    *parts, whole = record.results["cost"]
    assert [row["phase"] for row in parts] == list(phases)
    assert (whole["phase"], whole["model_flops"]) == ("step", sum(row["model_flops"] for row in parts))


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.TF32])
def test_every_precision_trains_with_finite_loss(precision: Precision) -> None:
    record = run(replace(TINY, precision=precision, batch_size=1, seq_len=16))  # a CPU multiplies in fp8 very slowly
    assert record.status == "ok", record.reason
    (ran,) = record.results["ran"]
    assert ran["optimizer"] == "adamw_fused"
    assert 0 < ran["loss"] < 10


def test_tf32_on_a_cpu_is_unavailable_with_a_remedy() -> None:
    record = run(replace(TINY, precision=Precision.TF32))
    assert (record.status, record.measurement) == ("unavailable", None)
    assert record.reason == "tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; use fp32"


def test_memory_limit_on_a_cpu_is_unavailable() -> None:
    record = run(replace(TINY, memory_limit_bytes=1 << 40))
    assert (record.status, record.reason) == (
        "unavailable",
        "a memory limit requires a CUDA device; leave out the memory limit, or use a GPU",
    )


def test_expandable_segments_on_a_cpu_are_unavailable() -> None:
    record = run(replace(TINY, allocator="expandable_segments"))
    assert (record.status, record.reason) == (
        "unavailable",
        "the allocator expandable_segments requires a CUDA device; leave out the allocator, or use a GPU",
    )


@pytest.mark.gpu
def test_allocator_of_a_cell_is_set_only_for_that_cell() -> None:
    seen: set[bool] = set()

    class Probe(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at = torch.empty(8 << 20, device=x.device).data_ptr()
            segments = [s for s in torch.cuda.memory_snapshot() if s["address"] <= at < s["address"] + s["total_size"]]
            seen.update(segment["is_expandable"] for segment in segments)
            return super().forward(x)

    for allocator, is_expandable in (("default", False), ("expandable_segments", True), ("default", False)):
        seen.clear()
        options = {"allocator": allocator, "device": "cuda", "mode": "forward", "warmup": 0, "steps": 1}
        record = cs_systems.run(model=Probe(4, 4), inputs=torch.ones(2, 4), **options)  # type: ignore[arg-type]
        assert record.status == "ok", record.reason
        assert seen == {is_expandable}


def test_ceiling_uses_the_compute_dtype_of_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "name", "NVIDIA H200")
    config = replace(TINY, strategy="fsdp", world_size=2, strategy_args=("compute_dtype=bf16",))
    (ceiling,) = _cost_tables(_Cell(0, Cell(config), CallableWorkload(lambda: None)), resolve("cpu"))["ceiling"]
    assert (ceiling["precision"], ceiling["peak_flops_per_s"]) == ("bf16", 989.5e12)


def test_same_seed_gives_the_same_loss() -> None:
    losses = [run(replace(TINY, seed=seed)).results["ran"][0]["loss"] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_interleaved_cells_are_visited_in_turn_and_stay_resident() -> None:
    config = replace(TINY, steps=5, rounds=2)
    records, visits = run_interleaved(config, replace(config, attention="sdpa_math"))
    assert visits == [0, 1, 0, 1]
    for record in records:
        assert record.measurement is not None
        assert record.results["ran"][0]["resident"] is True
        rounds = [s.round for s in record.measurement.timed]
        assert rounds == [0, 0, 0, 1, 1]


class Counter:
    """Counter of a device's allocated bytes and of their peak since the last reset."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Replace the device's memory counters."""
    counter = Counter()
    monkeypatch.setattr(Device, "allocated_bytes", lambda device: counter.now)
    monkeypatch.setattr(Device, "peak_allocated_bytes", lambda device: counter.most)
    monkeypatch.setattr(Device, "reset_peaks", lambda device: setattr(counter, "most", counter.now))
    monkeypatch.setattr("cs_systems.measure.runtime.execute.preflight", lambda cell, device: 0)
    return counter


def test_peak_excludes_memory_of_resident_cells(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        """Workload that keeps `kept` bytes and allocates `taken` more within a step."""

        def __init__(self, kept: int, taken: int) -> None:
            self.taken = taken
            counter.add(kept)

        def step(self) -> None:
            counter.add(self.taken)
            counter.add(-self.taken)

    sizes = {1: (100, 7), 2: (1000, 70), 3: (10, 700)}  # by seed
    monkeypatch.setattr(
        "cs_systems.measure.runtime.execute.build",
        lambda cell, device: CallableWorkload(Holder(*sizes[cell.config.seed]).step),
    )
    records, _ = run_interleaved(*(replace(TINY, seed=seed, steps=3, rounds=3) for seed in sizes))
    measured = [record.measurement for record in records if record.measurement]
    assert [m.peak_allocated_bytes for m in measured] == [107, 1070, 710]
    assert {m.peak_reserved_bytes for m in measured} == {None}, "cells share the allocator's cache"


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("fails_in", ["build", "step"])
def test_peak_of_oom_cell_excludes_other_cells(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, fails_in: str, rounds: int
) -> None:
    """Let the cell before it use more: 100 bytes between its visits, and 900 more within a step."""

    def allocate_and_free() -> None:
        counter.add(900)
        counter.add(-900)

    def run_out_of_memory() -> None:
        counter.add(40)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def build(cell: Cell, device: Device) -> CallableWorkload:
        if cell.config.seed == 0:
            counter.add(100)
            return CallableWorkload(allocate_and_free)
        if fails_in == "build":
            run_out_of_memory()
        return CallableWorkload(run_out_of_memory)

    monkeypatch.setattr("cs_systems.measure.runtime.execute.build", build)
    configs = [replace(TINY, seed=seed, steps=2, rounds=rounds) for seed in (0, 1)]
    records, _ = run_interleaved(*configs)
    failed = next(record for record in records if record.status == "oom")
    assert failed.results["memory"][0]["peak_allocated_bytes"] == 40


@pytest.mark.parametrize(
    "config",
    [
        replace(TINY, model=replace(PRESETS["2.7B"], context_length=1_000_000)),
        replace(TINY, model=PRESETS["2.7B"], batch_size=100_000),
        replace(OWN, workload="attention", shape=AttentionShape(1, 16, 10_000_000, 64), mode=Mode.FORWARD),
    ],
    ids=["context", "batch", "attention"],
)
def test_cell_larger_than_the_host_is_out_of_memory_before_it_is_built(config: RunConfig) -> None:
    (record,), _ = run_interleaved(config)
    assert (record.status, record.predicted, record.measurement) == ("oom", True, None)
    assert re.fullmatch(
        r"predicted peak [\d,]+ GiB exceeds the host's [\d.,]+ GiB, so the cell was not run; use a smaller batch, "
        "context or model",
        record.reason or "",
    )
    assert record.results["memory"][0]["predicted_peak_bytes"] > 2**40


def test_cell_is_run_if_its_prediction_is_close_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (record,), _ = run_interleaved(TINY)
    predicted = record.results["memory"][0]["predicted_peak_bytes"]
    for bytes, status in ((predicted // 1.1, "ok"), (predicted // 1.3, "oom")):
        monkeypatch.setattr("cs_systems.machine.device.host_memory_bytes", lambda bytes=bytes: int(bytes))
        assert run_interleaved(TINY)[0][0].status == status


@pytest.mark.gpu
def test_peak_with_resident_cells_equals_the_peak_alone_on_gpu() -> None:
    config = replace(TINY, model=PRESETS["small"], device="cuda", steps=4, rounds=2)
    cells = [config, replace(config, mode=Mode.FORWARD), replace(config, precision=Precision.BF16)]
    for cell, resident in zip(cells, run_interleaved(*cells)[0], strict=True):
        alone = run(replace(cell, rounds=1)).measurement
        assert alone is not None
        assert resident.measurement is not None
        assert resident.results["ran"][0]["resident"] is True
        off = (resident.measurement.peak_allocated_bytes or 0) - (alone.peak_allocated_bytes or 0)
        assert abs(off) < 80 << 20, "cuBLAS's workspaces and cached blocks"


def test_unavailable_cell_leaves_others_resident() -> None:
    config = replace(TINY, steps=2, rounds=2)
    (refused, measured), visits = run_interleaved(replace(config, precision=Precision.TF32), config)
    assert visits == [0, 1, 1]
    assert refused.status == "unavailable"
    assert measured.results["ran"][0]["resident"] is True


def test_cells_that_do_not_fit_together_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_systems.measure.runtime.execute.RESIDENT_SHARE", 1e-9)
    config = replace(TINY, steps=2, rounds=2)
    records, _ = run_interleaved(config, replace(config, seed=1))
    assert [r.results["ran"][0]["resident"] for r in records] == [False, False]
    assert all(len(r.measurement.samples) == 2 + 2 for r in records if r.measurement)  # each visit has a full warm-up


def test_unavailable_cell_fails_no_other_cell() -> None:
    records, _ = run_interleaved(TINY, replace(TINY, precision=Precision.TF32), replace(TINY, seed=2))
    assert [r.status for r in records] == ["ok", "unavailable", "ok"]


def test_cuda_cell_without_cuda_is_unavailable() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    record = run(replace(TINY, device="cuda"))
    assert record.status == "unavailable"
    why = "this torch is a build without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    assert f"no CUDA: {why}; see cs-systems doctor, or use device cpu" in (record.reason or "")


def test_local_rank_without_a_gpu_names_the_number_of_ranks_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(DeviceUnavailable, match="local rank 3 needs a GPU of its own, but torch sees 2 GPUs; start at"):
        resolve("auto")


@pytest.mark.slow
def test_recompiling_in_a_timed_step_is_a_caveat() -> None:
    record = run(replace(TINY, compile="aot_eager", warmup=0, steps=3))
    assert "recompiled" in [w.code for w in record.warnings]
    assert record.measurement is not None
    assert (record.measurement.samples[0].compile_s or 0) > 0
    record = run(replace(TINY, compile="aot_eager", warmup=2, steps=3))
    assert "recompiled" not in [w.code for w in record.warnings]


BROKEN = """
import torch

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            x = 2 * x
        torch._dynamo.graph_break()
        return self.linear(x).relu()

def factory(config, device):
    return Broken(), torch.ones(2, 4)
"""


@pytest.mark.slow
def test_graph_breaks_of_a_compiled_cell_are_recorded(tmp_path: Path) -> None:
    (file := tmp_path / "broken.py").write_text(BROKEN)
    cell = replace(OWN, workload=f"{file}:factory", warmup=2)
    record, whole, eager = cs_systems.sweep(
        [replace(cell, compile="aot_eager"), replace(TINY, compile="aot_eager", warmup=2), cell]
    )
    assert record.results["ran"][0]["graph_breaks"] == 2
    rows = record.results["graph_breaks"]
    assert rows[0] == {"reason": "branch on the value of a tensor", "place": "broken.py:10 in forward", "count": 1}
    assert rows[1]["reason"].startswith("Call to `torch._dynamo.graph_break()`")
    assert rows[1]["place"] == "broken.py:12 in forward"
    (caveat,) = (w for w in record.warnings if w.code == "graph-breaks")
    first = "first at broken.py:10 in forward: branch on the value of a tensor"
    assert caveat.message == f"torch.compile left the graph, {first}"
    assert "TORCH_LOGS=graph_breaks" in caveat.remedy
    assert whole.results["ran"][0]["graph_breaks"] == 0
    assert "graph_breaks" not in whole.results
    assert "graph_breaks" not in eager.results["ran"][0]


def test_foreign_attention_and_step_run(tmp_path: Any) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n"
        "def attend(q, k, v, *, causal=False, scale=None, align='upper_left'):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)\n"
        "def step():\n"
        "    torch.ones(8, 8) @ torch.ones(8, 8)\n"
    )
    record = run(replace(TINY, attention=f"{source}:attend"))
    assert record.status == "ok", record.reason
    (ran,) = record.results["ran"]
    assert ran["attention_path"] == str(source)
    assert len(ran["attention_sha256"]) == 64
    assert "cost" not in record.results  # no MFU, because nothing was declared
    record = run(replace(OWN, workload=f"{source}:step"))
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    assert record.measurement.phase_names() == ("call",)


@pytest.mark.parametrize("workload", ["attention", "train_step"])
@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (
            "def attend(q, k, v, causal=False): return v",
            "(q, k, v, causal=False) lacks scale, align; define it with the arguments",
        ),
        ("def attend(q, k): return q", "(q, k) lacks v, causal, scale, align; define it with the arguments"),
        (
            "def attend(q, k, v, bias, **rest): return v",
            "(q, k, v, bias, **rest) requires bias, which it is called without; define it with the arguments",
        ),
        (
            "def attend(q, k, v, causal, scale, align, /): return v",
            "(q, k, v, causal, scale, align, /) cannot be called as f(q, k, v, causal=…, scale=…, align=…); define it "
            "with the arguments",
        ),
        (
            "def attend(*, q, k, v, causal, scale, align): return v",
            "(*, q, k, v, causal, scale, align) cannot be called as f(q, k, v, causal=…, scale=…, align=…); define it "
            "with the arguments",
        ),
        ("attend = 7", " is of type int; give a function"),
    ],
)
def test_foreign_attention_with_wrong_signature_is_an_error(
    tmp_path: Any, written: str, problem: str, workload: str
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(written)
    record = run(replace(OF_WORKLOAD[workload], attention=f"{source}:attend"))
    signature = '(q, k, v, *, causal=False, scale=None, align="upper_left")'
    assert (record.status, record.reason) == ("error", f"{source}:attend{problem} {signature}")


@pytest.mark.parametrize("workload", ["attention", "train_step"])
@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("None", "None; return a tensor of the shape of q, {shape}"),
        ("q[:, :1]", "a tensor of the shape {wrong}; return one of the shape of q, {shape}"),
    ],
)
def test_output_of_foreign_attention_is_checked_before_the_steps(
    tmp_path: Any, result: str, problem: str, workload: str
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(f"def attend(q, k, v, *, causal=False, scale=None, align='upper_left'): return {result}")
    config = replace(OF_WORKLOAD[workload], attention=f"{source}:attend")
    record = run(config)
    shape = (8, 16, 1024, 64) if workload == "attention" else (config.batch_size, 4, config.tokens_per_sequence, 16)
    wrong = (shape[0], 1, *shape[2:])
    assert record.reason == f"{source}:attend returned {problem.format(shape=shape, wrong=wrong)}"


USER_CODE = """
import functools
def step(times=3, *, pause_s=0.0): return sum(range(times))
@functools.cache
def decorated(): return 1
class Step:
    def __call__(self, times=3): return times
    def method(self): return 1
instance = Step()
bound = instance.method
def factory(config, device): return step
class Workload:
    def __init__(self, config, device=None): self.tokens = config.batch_size
    def prepare(self): pass
    def step(self): yield "forward", step
    def cost(self): return None
    def describe(self): return {"tokens": self.tokens}
def three(config, device, more): return step
def seven(config, device): return 7
def nothing(config, device): pass
from torch import nn, ones
pair = ones(2, 4), nn.Linear(4, 4)
def reversed_parts(config, device): return pair
def reversed_without_config(): return pair
def four(config, device): return pair[1], pair[0], 1, 2
def a_class(config, device): return nn.Linear, pair[0]
class NoStep:
    def __init__(self, config, device): pass
class OnlyStep:
    def step(self): return [("forward", int)]
class Callable:
    def __call__(self): return 1
class Own(OnlyStep):
    def __init__(self, width): self.width = width
    def prepare(self): pass
    def cost(self): return None
    def describe(self): return {}
def misspelt(config, device): return {"modle": pair[1], "batch": pair[0]}
number = 7
"""


@pytest.mark.parametrize(
    ("name", "phase", "takes_config"),
    [
        ("step", "call", False),
        ("decorated", "call", False),
        ("instance", "call", False),
        ("bound", "call", False),
        ("factory", "call", True),
        ("Workload", "forward", None),
    ],
)
def test_steps_and_factories_are_distinguished(tmp_path: Any, name: str, phase: str, takes_config: Any) -> None:
    source = tmp_path / "mine.py"
    source.write_text(USER_CODE)
    record = run(replace(OWN, workload=f"{source}:{name}"))
    assert (record.status, record.reason) == ("ok", None)
    assert record.measurement is not None
    assert record.measurement.phase_names() == (phase,)
    assert record.results["ran"][0].get("takes_config") is takes_config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "three",
            "(config, device, more) has other arguments than a factory or a step; give more with --set more=VALUE (in "
            "Python workload_args=['more=VALUE']), or write a factory that takes (config, device), or a step without",
        ),
        ("seven", f" returned 7; return {FORMS}"),
        ("nothing", f" returned nothing; return {FORMS}"),
        (
            "reversed_parts",
            " returned a tuple of (Tensor, Linear); return (model, batch) or (model, batch, loss), the module first",
        ),
        ("reversed_without_config", " returned a tuple of (Tensor, Linear); return (model, batch) or (model, batch, "),
        ("four", " returned a tuple of (Linear, Tensor, int, int); return (model, batch) or (model, batch, loss), the"),
        ("a_class", " returned a tuple of (the class Linear, Tensor); return (model, batch) or (model, batch, loss),"),
        (
            "misspelt",
            " returned a dict without the key 'model', its keys are modle, batch; return the key 'model', the key ",
        ),
        ("pair", " is a tuple of (Tensor, Linear); give (model, batch) or (model, batch, loss), the module first"),
        (
            "NoStep",
            " is a class without a method step or __call__; give it one, or use a function (config, device) that ",
        ),
        (
            "OnlyStep",
            ": an OnlyStep has a method step, but lacks prepare, cost, describe; add def prepare(self): pass, "
            "def cost(self): return None, def describe(self): return {}",
        ),
        ("number", " is an object of type int; name a factory (config, device), or a step without arguments"),
    ],
)
def test_object_other_than_a_step_or_factory_is_an_error(tmp_path: Any, name: str, text: str) -> None:
    source = tmp_path / "mine.py"
    source.write_text(USER_CODE)
    record = run(replace(OWN, workload=f"{source}:{name}"))
    assert record.status == "error"
    assert (record.reason or "").startswith(f"{source}:{name}{text}")


@pytest.mark.parametrize(("name", "own"), [("Callable", ()), ("Own", ("width=8",))])
def test_class_with_arguments_makes_the_workload(tmp_path: Any, name: str, own: tuple[str, ...]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(USER_CODE)
    record = run(replace(OWN, workload=f"{source}:{name}", workload_args=own))
    assert (record.status, record.reason) == ("ok", None)


def test_times_of_a_repeated_phase_are_summed(tmp_path: Any) -> None:
    source = tmp_path / "accumulate.py"
    source.write_text(
        "from __future__ import annotations\n"
        "import time\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Accumulate:\n"
        "    pause_s: float = 0.01\n"
        "    def prepare(self): pass\n"
        "    def step(self):\n"
        "        return [('forward', lambda: time.sleep(self.pause_s))] * 3\n"
        "    def cost(self): return None\n"
        "    def describe(self): return {'tokens': None}\n"
        "def factory(config, device):\n"
        "    return Accumulate()\n"
    )
    record = run(replace(OWN, workload=f"{source}:factory"))
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    for sample in record.measurement.timed:
        assert sample.phases_s["forward"] >= 0.03
        assert sample.phases_s["forward"] == pytest.approx(sample.wall_s, rel=0.1)


def test_rows_of_a_table_get_the_column_order_of_the_first_row() -> None:
    (rows,) = plain_tables({"losses": [{"a": 1, "b": 2}, {"b": 3, "a": 4}]}).values()
    assert [[*row.items()] for row in rows] == [[("a", 1), ("b", 2)], [("a", 4), ("b", 3)]]
    assert plain_tables({"losses": []}) == {"losses": []}
    with pytest.raises(ConfigError, match="rows 0 and 2 of table 'losses' differ in the column 'b'; give every row"):
        plain_tables({"losses": [{"a": 1}, {"a": 2}, {"a": 3, "b": 4}]})


def test_workload_table_with_a_reserved_name_is_refused() -> None:
    for name in OWN_TABLES:
        with pytest.raises(ConfigError, match=f"has a table '{name}', a name that cs_systems reserves"):
            plain_tables({name: [{"a": 1}]})
