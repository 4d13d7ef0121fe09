"""Phase and layer of each kernel: on real traces, and compared with autograd's sequence numbers."""

from __future__ import annotations

import gzip
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.places import NOWHERE, Place, attribute
from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.sequence_numbers import SequenceRoute, route_of
from cs_systems.core.range_names import meaning
from cs_systems.readers import read
from cs_systems.readers.forms.columns import UNKNOWN, Categorical
from cs_systems.readers.forms.trace import Op, Ops, Trace
from tests.recorded import AUTOGRAD, DATA, MAIN

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]


def placed(trace: Trace) -> Categorical[Place]:
    return attribute(trace, route_of(trace))


def by_nsys_rule(path: Path, name: str) -> int:
    """Return the number of kernels that nsys projects onto a range: launched by the range's thread, fully inside it."""
    query = """
        SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k
        JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
        JOIN NVTX_EVENTS n ON n.globalTid = r.globalTid AND n.start <= r.start AND n.end >= r.end
        WHERE n.text = ?"""
    database = sqlite3.connect(path)
    count = database.execute(query, (name,)).fetchone()[0]
    database.close()
    return int(count)


def test_real_export_attributes_every_kernel_to_one_place(nsys_trace: Trace, nsys_path: Path) -> None:
    places = placed(nsys_trace)
    phases = Counter(place.phase for place in places)
    assert phases == {"forward": 264, "backward": 426, "optimizer": 24}
    assert sum(phases.values()) == 714
    for phase in ("forward", "optimizer"):
        assert phases[phase] == by_nsys_rule(nsys_path, phase)
    # In backward, nsys's rule covers only the main thread's kernel, the gradient of the loss: one a step.
    assert by_nsys_rule(nsys_path, "backward") == 3


@pytest.mark.parametrize("name", ["block 0", "block 3", "attention", "scores", "softmax", "value", "ffn"])
def test_forward_layers_and_parts_match_nsys_projection(nsys_trace: Trace, nsys_path: Path, name: str) -> None:
    places = placed(nsys_trace)
    if name.startswith("block"):
        found = sum(place.layer == name for place in places)
    elif name == "attention":
        found = sum(bool(place.part) and str(place.part).startswith(name) for place in places)
    else:
        found = sum(place.part in (name, f"attention.{name}") for place in places)
    assert found == by_nsys_rule(nsys_path, name) > 0


@pytest.mark.parametrize("step", ["step", "small2"])
def test_nsys_and_kineto_attribute_alike(step: str, tmp_path: Path) -> None:
    """One program was recorded twice: compare kernels of each steady step, and the phases' shares of their time.

    step: an external training loop; small2: two layers of `small` in bf16 by `cs-systems profile`.
    """
    export = tmp_path / "export.sqlite"
    export.write_bytes(gzip.decompress((DATA / f"nsys_h200_{step}.sqlite.gz").read_bytes()))
    a, b = profile(read(export)), profile(read(DATA / f"kineto_h200_{step}.json.gz"))
    assert [s.calls for s in a.by_step.values()] == [s.calls for s in b.by_step.values()]
    shares = [
        {
            phase: sum(t.time_s for (_, place), t in p.groups.items() if place.phase == phase) / p.time_s
            for phase in PHASES
        }
        for p in (a, b)
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)
    assert min(shares[0].values()) > 0.05
    if step == "small2":
        assert min(p.phase_coverage for p in (a, b)) == 1
        assert min(p.layer_coverage for p in (a, b)) > 0.98


PHASES = ("forward", "backward", "optimizer")


def test_backward_layers_follow_sequence_numbers(with_blocks: list[Event], write_trace: WriteTrace) -> None:
    """All blocks are equal, and so are their backward passes; the trace has ranges in forward only."""
    trace = read(write_trace(with_blocks))
    places = placed(trace)
    backward = Counter(place.layer for place in places if place.phase == "backward")
    forward = Counter(place.layer for place in places if place.phase == "forward")
    assert forward["block 0"] == forward["block 1"] == forward["block 2"] == forward["block 3"] > 0
    assert backward["block 0"] == backward["block 1"] == backward["block 2"] == backward["block 3"]
    assert backward["block 1"] > forward["block 1"]
    assert profile(trace).layer_coverage > 0.85


def test_autograd_thread_ranges_give_the_layer(export: Callable[..., Path]) -> None:
    path = export(
        ranges=[
            ("step", 0, 1000, MAIN), ("forward", 10, 400, MAIN), ("block 0", 20, 300, MAIN),
            ("attention", 30, 200, MAIN), ("scores", 40, 100, MAIN), ("backward", 500, 900, MAIN),
            ("loss", 510, 520, AUTOGRAD), ("block 0", 550, 700, AUTOGRAD), ("ffn", 560, 600, AUTOGRAD),
            ("block 0", 910, 950, AUTOGRAD),
        ],
        launches=[
            (50, 55, MAIN, 1), (150, 155, MAIN, 2), (250, 255, MAIN, 3), (350, 355, MAIN, 4), (515, 516, AUTOGRAD, 5),
            (570, 575, AUTOGRAD, 6), (650, 655, AUTOGRAD, 7), (800, 805, AUTOGRAD, 8), (920, 925, AUTOGRAD, 9),
            (450, 455, MAIN, 10),
        ],
        kernels=[("gemm", 2000 + 10 * n, 2005 + 10 * n, n) for n in range(1, 11)],
    )  # fmt: skip
    assert list(placed(read(path))) == [
        Place("forward", "block 0", "attention.scores"),
        Place("forward", "block 0", "attention"),
        Place("forward", "block 0", None),
        Place("forward", "unattributed", None),
        Place("backward", "loss", None),
        Place("backward", "block 0", "ffn"),
        Place("backward", "block 0", None),
        Place("backward", "unattributed", None),
        Place("unattributed", "block 0", None),
        NOWHERE,
    ]


def test_fused_kernel_belongs_to_one_layer_and_counts_as_fused(export: Callable[..., Path]) -> None:
    path = export(
        ranges=[
            ("step", 0, 900, MAIN), ("forward", 10, 800, MAIN), ("block 1", 20, 500, MAIN), ("norm", 30, 400, MAIN),
            ("fused (block 0 + block 1)", 40, 200, MAIN),
        ],
        launches=[(50, 55, MAIN, 1), (250, 255, MAIN, 2)],
        kernels=[("triton_per_fused", 1000, 1030, 1), ("gemm", 2000, 2010, 2)],
    )  # fmt: skip
    seen = profile(read(path))
    assert list(seen.places) == [Place("forward", "block 1", "norm", fused=True), Place("forward", "block 1", "norm")]
    assert seen.fused_share == pytest.approx(0.75)
    assert (seen.phase_coverage, seen.layer_coverage) == (1, 1)


def test_module_paths_are_valid_range_names(export: Callable[..., Path]) -> None:
    """Ranges may be made from `named_modules`."""
    path = export(
        ranges=[
            ("step", 0, 900, MAIN), ("forward", 10, 800, MAIN), ("layers.3", 20, 500, MAIN),
            ("layers.3.attn", 30, 300, MAIN), ("layers.3.attn.q_proj", 40, 100, MAIN),
            ("layers.3.attn.inner", 110, 150, MAIN), ("layers.3.ffn", 300, 400, MAIN),
        ],
        launches=[(50, 55, MAIN, 1), (120, 125, MAIN, 2), (350, 355, MAIN, 3), (450, 455, MAIN, 4)],
        kernels=[("gemm", 2000 + 10 * n, 2005 + 10 * n, n) for n in range(1, 5)],
    )  # fmt: skip
    parts = ["attention.projections", "attention", "ffn", None]
    assert list(placed(read(path))) == [Place("forward", "block 3", part) for part in parts]


def test_loss_and_optimizer_are_layers(export: Callable[..., Path]) -> None:
    path = export(
        ranges=[("step", 0, 900, MAIN), ("loss", 10, 100, MAIN), ("Optimizer.step#AdamW.step", 200, 300, MAIN)],
        launches=[(20, 25, MAIN, 1), (220, 225, MAIN, 2)],
        kernels=[("nll_loss", 400, 405, 1), ("adam", 410, 415, 2)],
    )
    assert list(placed(read(path))) == [Place("loss", "loss", None), Place("optimizer", "optimizer", None)]


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("forward", ("forward", None, None)),
        ("Backward pass", ("backward", None, None)),
        ("loss", ("loss", "loss", None)),
        ("block 12", (None, "block 12", None)),
        ("layers.3", (None, "block 3", None)),
        ("model.layers.3", (None, "block 3", None)),
        ("h.7", (None, "block 7", None)),
        ("h100", (None, None, None)),
        ("token_embeddings", (None, "embedding", None)),
        ("embedding", (None, "embedding", None)),
        ("final norm", (None, "final norm", None)),
        ("ln_final", (None, "final norm", None)),
        ("lm_head", (None, "lm_head", None)),
        ("projections", (None, None, "attention.projections")),
        ("rope", (None, None, "attention.rope")),
        ("output", (None, None, "attention.output")),
        ("ffn", (None, None, "ffn")),
        ("ln1", (None, None, "norm")),
        ("layers.3.attn.q_proj", (None, "block 3", "attention.projections")),
        ("layers.3.attn", (None, "block 3", "attention")),
        ("layers.3.attn.output_proj", (None, "block 3", "attention.output")),
        ("layers.3.ln1", (None, "block 3", "norm")),
        ("layers.11.ffn.w1", (None, "block 11", "ffn")),
        ("layers.3.dropout", (None, "block 3", None)),
        ("model.layers.0.self_attn.rotary_emb", (None, "block 0", "attention.rope")),
        ("model.layers.0.self_attn.k_norm", (None, "block 0", "attention")),
        ("model.layers.0.post_attention_layernorm", (None, "block 0", "norm")),
        ("transformer.h.7.mlp.c_fc", (None, "block 7", "ffn")),
        ("transformer.ln_f", (None, "final norm", None)),
        ("model.norm", (None, "final norm", None)),
        ("model.lm_head", (None, "lm_head", None)),
        ("model.embed_tokens", (None, "embedding", None)),
        ("attn.softmax", (None, None, "attention.softmax")),
        ("version 3.5", (None, None, None)),
        ("forward hook", (None, None, None)),
        ("## forward ##", ("forward", None, None)),
        ("Optimizer.zero_grad#AdamW.zero_grad", (None, None, None)),
    ],
)
def test_range_name_gives_phase_layer_and_part(name: str, means: tuple[str | None, str | None, str | None]) -> None:
    assert meaning(name) == means


def test_innermost_operator_is_the_last_open_one_of_the_thread(kineto_trace: Trace) -> None:
    """Operators by chance around the launches of a real trace, which overlap, too."""
    random, kernels = np.random.default_rng(0), kineto_trace.kernels
    launches = [*zip(kernels.launch_start_s.tolist(), kernels.thread.tolist(), strict=True)]
    threads = [*{thread for _, thread in launches}]
    for count in (1, 10, 200):
        spans = np.sort(random.choice(kernels.launch_start_s, (count, 2)), axis=1) + random.choice(
            [0, 1e-7], (count, 2)
        )
        backward, thread = random.integers(0, 2, count), random.choice(threads, count)
        numbers = zip(thread.tolist(), range(count), backward.tolist(), strict=True)
        rows = [Op("aten::mm", *span, *number) for span, number in zip(spans.tolist(), numbers, strict=True)]
        route = SequenceRoute(kineto_trace, Ops.of(rows))
        for i, (time, of_thread) in enumerate(launches):
            around = [op for op in rows if op.thread == of_thread and op.start_s <= time < op.end_s]
            around.sort(key=lambda op: (op.start_s, -op.end_s))
            of_backward = [op.sequence for op in around if op.forward_thread]
            assert route.innermost[i] == (around[-1].sequence if around else UNKNOWN)
            assert route.backward[i] == (of_backward[-1] if of_backward else UNKNOWN)
