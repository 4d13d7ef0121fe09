"""Tests of marks in generated code against the weights that its kernels read and the gradients that they write."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import cs_systems
from cs_systems.config import PRESETS, RunConfig
from cs_systems.core.range_names import meaning
from cs_systems.instrument.annotate import TRACED, Label, RecordFunctionRanges, closing_marks, listening, mark
from cs_systems.instrument.compiled_ranges import LabelledGraph, MarkingWrapper, marked_code
from cs_systems.instrument.hooks import annotated
from cs_systems.model import BasicTransformerLM
from tests.instrument.test_hooks import Journal, holds, layer, train_step

# The compiler takes 20 s, or minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONFIG = replace(PRESETS["tiny"], num_layers=2)
MARK = re.compile(r" *mark\(.*\)|from cs_systems\.instrument\.annotate import .*|call = closing_marks\(call\)")
SERIAL = re.compile(r"# AOT ID: .*")  # counts the compilations of this process


def test_code_compiled_later_has_no_marks() -> None:
    """This test precedes those that compile inside `marked_code`."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    journal, x = Journal(), torch.ones(3)
    with marked_code():
        from torch._inductor.codegen.common import device_codegens

        inside = device_codegens["cpu"].wrapper_codegen
    assert device_codegens["cpu"].wrapper_codegen is not inside
    with listening(journal):
        assert torch.equal(torch.compile(double)(x), x * 2)
    assert journal.events == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the test compares fp32, without TF32
def test_marks_change_no_kernel_on_gpu() -> None:
    """This test also precedes those that compile inside `marked_code`."""
    from torch._inductor.codegen.common import device_codegens, init_backend_registration
    from torch.profiler import ProfilerActivity

    init_backend_registration()
    assert device_codegens["cuda"].wrapper_codegen is not MarkingWrapper
    kernels = []
    for around in (lambda: torch._inductor.config.patch({}), marked_code):
        torch.manual_seed(0)
        model = BasicTransformerLM(CONFIG, "naive").cuda()
        tokens = torch.randint(CONFIG.vocab_size, (2, 32), device="cuda")
        with around():
            run = torch.compile(model)
            for _ in range(3):
                run(tokens).sum().backward()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run(tokens).sum().backward()
                torch.cuda.synchronize()
        kernels.append(Counter(e.name for e in profiler.events() if e.device_type.name == "CUDA"))
    assert kernels[0] == kernels[1]
    assert kernels[0].total() > 20


@dataclass
class Compiled:
    """One model, compiled without marks and then with them; its first block has naive attention, its second sdpa."""

    model: BasicTransformerLM
    run: Callable[..., Tensor]
    plain: list[str]  # generated code of forward and backward
    marked: list[str]
    counts: Counter[str]  # the compiler's counters after it wrote the marked code


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model, other = (BasicTransformerLM(CONFIG, attention) for attention in ("naive", "sdpa_math"))
    model.layers[1] = other.layers[1]
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        plain = run_and_get_code(train_step, torch.compile(model))[1]
    with marked_code():
        counters.clear()
        run = torch.compile(model)
        marked = run_and_get_code(train_step, run)[1]
        counts = Counter({name: n for stage in ("inductor", "aot_autograd") for name, n in counters[stage].items()})
        yield Compiled(model, run, plain, marked, counts)
    torch._dynamo.reset()


def test_code_differs_only_by_marks(compiled: Compiled) -> None:
    assert len(compiled.plain) == len(compiled.marked) == 2
    for plain, marked in zip(compiled.plain, compiled.marked, strict=True):
        assert without(MARK, SERIAL, code=marked) == without(SERIAL, code=plain)
        assert len(re.findall(r"^ *mark\(", marked, re.MULTILINE)) > 10
        assert "mark(" not in plain


def without(*patterns: re.Pattern[str], code: str) -> list[str]:
    return [line for line in code.splitlines() if not any(pattern.fullmatch(line) for pattern in patterns)]


def test_marked_code_is_not_cached(compiled: Compiled) -> None:
    assert (compiled.counts["fxgraph_cache_bypass"], compiled.counts["autograd_cache_bypass"]) == (2, 1)
    used = [name for name in compiled.counts if "cache" in name and "bypass" not in name]
    assert [name for name in used if compiled.counts[name]] == []


def of_parameter(name: str) -> str:
    """Return the layer of a parameter: `layers.1.ffn.w1.weight` → `block 1`."""
    found = re.match(r"layers\.(\d+)", name)
    named = {"token_embeddings": "embedding", "ln_final": "final norm", "lm_head": "lm_head"}
    return f"block {found[1]}" if found else named[name.split(".")[0]]


def test_matmul_runs_in_the_layer_of_its_weight(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.select_algorithm import extern_kernels

    journal, mm = Journal(), extern_kernels.mm
    ran: list[tuple[tuple[str, ...], set[int], Tensor]] = []  # ranges, addresses of the inputs, the output's values

    def recording(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        mm(a, b, out=out)
        ran.append((journal.here(), {t.untyped_storage().data_ptr() for t in (a, b)}, out.clone()))

    monkeypatch.setattr(extern_kernels, "mm", recording)
    compiled.model.zero_grad(set_to_none=True)
    with annotated(journal):
        train_step(compiled.run)
    assert journal.all_closed
    matmuls = 0
    for name, parameter in compiled.model.named_parameters():
        address, grad = parameter.untyped_storage().data_ptr(), parameter.grad
        assert grad is not None
        reads = [stack for stack, inputs, _ in ran if address in inputs]
        writes = [stack for stack, _, out in ran if out.shape == grad.shape and torch.equal(out, grad)]
        assert ["backward" in stack for stack in (*reads, *writes)] in ([], [False, True, True])
        assert [stack for stack in (*reads, *writes) if of_parameter(name) not in stack] == []
        matmuls += len(reads + writes)
    assert matmuls == len(ran) == 3 * (7 * CONFIG.num_layers + 1)


def test_kineto_trace_has_each_matmul_in_its_block_and_part(compiled: Compiled, tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler, annotated(RecordFunctionRanges()):
        train_step(compiled.run)
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    matmuls = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in ("aten::mm", "aten::bmm")]
    found: Counter[tuple[str, str | None, str | None]] = Counter()
    for op in matmuls:
        inside = [r["name"] for r in ranges if holds(r, op)]
        parts = [part for name in inside if (part := meaning(name).part)]
        phase = "backward" if "backward" in inside else "forward"
        found[phase, layer(ranges, op), max(parts, key=len, default=None)] += 1
    expected = Counter({("forward", "lm_head", None): 1, ("backward", "lm_head", None): 2})
    for block, attention in enumerate(({"attention.scores": 1, "attention.value": 1}, {"attention": 2})):
        for part, times in {"attention.projections": 3, "attention.output": 1, "ffn": 3, **attention}.items():
            expected |= {("forward", f"block {block}", part): times, ("backward", f"block {block}", part): 2 * times}
    assert found == expected


# ---- the rule ----


def graph(*operators: tuple[str, Any, tuple[str, ...], str]) -> dict[str, fx.Node]:
    """Return FX nodes by name, made from (name, function, names of inputs, path of the module)."""
    made, whole = {}, fx.Graph()
    for name in "xy":
        made[name] = whole.placeholder(name)
    for name, function, inputs, path in operators:
        made[name] = node = whole.call_function(function, tuple(made[i] for i in inputs))
        if path:
            node.meta["nn_module_stack"] = {p: (f"L['self'].{p}", object) for p in prefixes(path)}
    return made


def prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


add, view, iota = torch.ops.aten.add.Tensor, torch.ops.aten.permute.default, torch.ops.prims.iota.default
ONE, TWO = "layers.0.ffn", "layers.1.ln1"
BOTH = "fused (block 0 + block 1)"


@pytest.mark.parametrize(
    ("operators", "label"),
    [
        ([("a", add, "xy", "layers.0.attn.q_proj")], ("block 0", "attention", "projections")),
        ([("a", add, "xy", "layers.0.ffn.w1")], ("block 0", "ffn")),
        ([("a", add, "xy", "somewhere.else")], (".somewhere.else",)),  # a path of another model
        ([("a", add, "xy", "")], ()),
        # The layer with most operators counts; on a tie, the later one.
        ([("a", add, "xy", ONE), ("b", add, "ax", TWO), ("c", add, "bx", TWO)], ("block 1", "norm", BOTH)),
        ([("a", add, "xy", ONE), ("b", add, "ax", ONE), ("c", add, "bx", TWO)], ("block 0", "ffn", BOTH)),
        ([("a", add, "xy", ONE), ("c", add, "ax", TWO)], ("block 1", "norm", BOTH)),
        ([("a", add, "xy", "layers.0"), ("b", add, "ax", "layers.0.ffn")], ("block 0", "ffn")),
        # Views and constants count only if there is nothing else.
        ([("a", view, "x", ONE), ("b", view, "a", ONE), ("c", add, "bx", TWO)], ("block 1", "norm")),
        ([("a", iota, "", ONE), ("b", add, "a", ONE), ("c", add, "xb", TWO)], ("block 1", "norm")),
        ([("a", view, "x", ONE)], ("block 0", "ffn")),
        # An operator without a module belongs to the layer of its last input that is not constant.
        ([("a", add, "xy", ONE), ("b", add, "xa", "")], ("block 0", "ffn")),
        ([("a", add, "xy", ONE), ("i", iota, "", TWO), ("b", add, "ai", "")], ("block 0", "ffn")),
    ],
)  # fmt: skip
def test_fused_kernel_belongs_to_layer_of_most_operators(
    operators: list[tuple[str, Any, str, str]], label: Label
) -> None:
    made = graph(*((name, function, tuple(inputs), path) for name, function, inputs, path in operators))
    kernel = [made[name] for name, *_ in operators]
    assert LabelledGraph(kernel[0].graph).label(reversed(kernel)) == label


def test_backward_operator_has_module_of_forward_operator() -> None:
    made = graph(("a", add, ("x", "y"), ""))
    made["a"].meta["fwd_nn_module_stack"] = {"": ("L['self']", object), "n": ("L['self'].ln_final", object)}
    assert LabelledGraph(made["a"].graph).label([made["a"]]) == ("final norm",)


def test_fused_range_has_no_other_meaning() -> None:
    for layers in ("embedding + block 0", "block 0 + final norm", "block 1 + block 0"):
        assert not any(meaning(f"fused ({layers})"))


def test_operator_has_its_annotated_name() -> None:
    made = graph(("a", add, ("x", "y"), "layers.0.attn"))
    made["a"].meta["custom"] = {TRACED: "softmax", "another tool's": 1}
    assert LabelledGraph(made["a"].graph).label([made["a"]]) == ("block 0", "attention", "softmax")


def test_marks_switch_and_last_mark_ends_with_the_code() -> None:
    journal = Journal()

    def call(fail: bool) -> None:
        mark("block 0", "ffn")
        mark("block 0", "norm")
        if fail:
            raise ValueError("a kernel failed")
        mark("lm_head")

    run = closing_marks(call)
    run(False)
    assert journal.events == []  # no listener is set
    with listening(journal):
        run(False)
        assert journal.events == ["block 0", "ffn", "/ffn", "norm", "/norm", "/block 0", "lm_head", "/lm_head"]
        with pytest.raises(ValueError, match="kernel"):
            run(True)
    assert journal.events[-2:] == ["/norm", "/block 0"]
    assert journal.all_closed


# ---- from outside ----


@pytest.mark.parametrize(("compile", "blocks"), [("default", 2), ("aot_eager", 0)])
def test_profiled_cell_has_layers_in_marked_compile_modes(compile: str, blocks: int, tmp_path: Path) -> None:
    config = RunConfig(
        model=CONFIG, batch_size=2, seq_len=32, warmup=1, steps=1, compile=compile, profiler="kineto", device="cpu"
    )
    (record,) = cs_systems.sweep([config], out=tmp_path)
    assert record.status == "ok", record.reason
    events = json.loads(gzip.decompress((tmp_path / record.artifacts["trace"]).read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert len([name for name in names if name.startswith("block")]) == blocks
    assert {"forward", "loss", "backward", "optimizer"} <= names


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
def test_over_nine_tenths_of_kernel_time_has_a_layer_on_gpu(attention: str, tmp_path: Path) -> None:
    config = RunConfig(
        model=replace(PRESETS["small"], num_layers=2, context_length=256), steps=2, warmup=3, compile="default",
        precision="bf16", attention=attention, profiler="kineto", device="cuda",
    )  # type: ignore[arg-type]  # fmt: skip
    (record,) = cs_systems.sweep([config], out=tmp_path)
    assert record.status == "ok", record.reason
    (coverage,) = record.results["coverage"]
    assert coverage["phase_coverage"] > 0.98
    assert coverage["layer_coverage"] > 0.9
