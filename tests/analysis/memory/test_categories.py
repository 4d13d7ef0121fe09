"""Categories of allocations: on the real snapshot, and rule by rule on made ones."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import Attribution, attribute
from cs_systems.analysis.memory.phases import phase_of_stack
from cs_systems.analysis.memory.sites import sites
from cs_systems.analysis.memory.tables import TABLES, at_peak, composition, differences, layers, where
from cs_systems.analysis.memory.tensor_names import TensorNames, parameter_shapes, tensor_names
from cs_systems.config import PRESETS, ConfigError, Precision, RunConfig, preset
from cs_systems.readers.snapshot import Frame, read
from tests.analysis.memory.caching_allocator import MIB, CachingAllocator

Write = Callable[..., Path]
Event = dict[str, Any]
UNNAMED = TensorNames({}, {}, "")
WORKSPACE_BYTES = (8_519_680, 33_554_432)
LAYERS, D = 4, 256  # of the recorded model; vocabulary 1000, batch 4, context 256, fp32


def frame(function: str, file: str = "train.py", line: int = 1) -> Event:
    return {"filename": file, "line": line, "name": function}


MAIN = (frame("<module>", line=99),)
FORWARD = (frame("forward", line=7), *MAIN)
LOSS = (frame("cross_entropy", "site-packages/torch/nn/functional.py"), *MAIN)
BACKWARD = (frame("_engine_run_backward", "site-packages/torch/autograd/graph.py"), *MAIN)
OPTIMIZER = (frame("_init_group", "site-packages/torch/optim/adam.py"), *MAIN)
SETUP = (frame("convert", "site-packages/torch/nn/modules/module.py"), *MAIN)


def found_in(data: Event, tmp_path: Path) -> Attribution:
    path = tmp_path / "made.pickle"
    path.write_bytes(pickle.dumps(data))
    return attribute(replay(read(path)))


@pytest.fixture(scope="module")
def real(snapshot_path: Path) -> Attribution:
    return attribute(replay(read(snapshot_path)))


def bytes_by(found: Attribution) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in composition(found, UNNAMED):
        counts[row["category"]] += row["bytes"]
    return counts


def test_real_peak_has_expected_categories(real: Attribution) -> None:
    """The peak holds parameters by formula, each with two moments, two workspaces, and token ids."""
    weights = 4 * (2 * 1000 * D + LAYERS * (3 * D * D + D * D + 2 * 4 * D * D + 2 * D))
    counts = bytes_by(real)
    assert 0 <= counts["parameters"] - weights <= 26 * 512  # rounded up, and the final norm
    assert counts["optimizer state"] == 2 * counts["parameters"]
    assert counts["workspaces"] == 2 * 32 * MIB
    assert counts["before recording"] == 4 * 256 * 8
    assert counts["unknown"] == 0
    assert sum(counts.values()) == real.replay.peak_bytes == 213_795_840


def test_real_layers_have_equal_bytes(real: Attribution) -> None:
    rows = {row["layer"]: row for row in layers(real, UNNAMED)}
    blocks = [rows[f"block {n}"] for n in range(LAYERS)]
    assert [row["allocations"] for row in blocks] == [14] * LAYERS
    assert len({row["bytes"] - row["rounding_bytes"] for row in blocks}) == 1
    assert rows["train.py:22 forward > embedding"]["bytes"] == 4 * 256 * D * 4
    assert sum(row["bytes"] for row in rows.values()) == bytes_by(real)["activations"]


def test_gradients_have_the_sizes_of_parameters(real: Attribution) -> None:
    made = Counter(a.allocation.requested_bytes for a in real.allocations if a.category == "gradients")
    there = Counter(a.allocation.requested_bytes for a in real.allocations if a.category == "parameters")
    assert made == Counter({size: 2 * count for size, count in there.items()})  # of two steps


def test_rows_of_each_table_have_equal_columns(real: Attribution) -> None:
    for name, table in TABLES.items():
        rows = table(real, UNNAMED)
        assert len({tuple(row) for row in rows}) == (name != "out_of_memory")  # no request failed


STEP = [
    # (key, bytes, stack of the allocation, key freed after it with which stack)
    ("weight", 4096, SETUP, None),
    ("activation", 2048, FORWARD, None),
    ("dropped", 512, FORWARD, ("dropped", FORWARD)),
    ("logits", 1536, LOSS, None),
    ("partial", 1024, BACKWARD, ("activation", BACKWARD)),
    ("gradient", 4096, BACKWARD, ("partial", BACKWARD)),
    ("moment", 4096, OPTIMIZER, ("logits", MAIN)),
    ("root", 2560, OPTIMIZER, ("root", OPTIMIZER)),
    ("next", 2048, FORWARD, ("gradient", MAIN)),
]


def test_phase_and_lifetime_decide_the_category(tmp_path: Path) -> None:
    allocator = CachingAllocator(recording=True)
    addresses: dict[str, int] = {}
    for key, size, stack, freed in STEP:
        addresses[key] = allocator.alloc(size, stack)
        if freed:
            allocator.free(addresses[freed[0]], freed[1])
    found = found_in(allocator.snapshot(), tmp_path)
    categories = [a.category for a in found.allocations]
    assert dict(zip([key for key, *_ in STEP], categories, strict=True)) == {
        "weight": "parameters",
        "activation": "activations",
        "dropped": "temporaries",
        "logits": "activations",
        "partial": "temporaries",
        "gradient": "gradients",
        "moment": "optimizer state",
        "root": "temporaries",
        "next": "activations",
    }


def test_gradients_are_found_without_an_optimizer(tmp_path: Path) -> None:
    """The loop itself frees the gradients, before the next forward."""
    allocator = CachingAllocator(recording=True)
    for _ in range(2):
        kept = allocator.alloc(512, FORWARD)
        gradient = allocator.alloc(1024, BACKWARD)
        allocator.free(kept, BACKWARD)
        allocator.free(gradient, MAIN)
    found = found_in(allocator.snapshot(), tmp_path)
    assert [a.category for a in found.allocations] == ["activations", "gradients"] * 2


def test_unmatched_allocations_are_unknown(tmp_path: Path) -> None:
    allocator = CachingAllocator(recording=True)
    allocator.alloc(700, MAIN)
    kept = allocator.alloc(900, MAIN)
    allocator.alloc(WORKSPACE_BYTES[0], FORWARD)
    gone = allocator.alloc(WORKSPACE_BYTES[1], FORWARD)
    allocator.free(kept, BACKWARD)
    allocator.free(gone, BACKWARD)
    allocator.alloc(WORKSPACE_BYTES[1], FORWARD)
    allocator.alloc(3000, BACKWARD)  # the recording ends within backward
    found = found_in(allocator.snapshot(), tmp_path)
    assert [a.category for a in found.allocations] == [
        "unknown",
        "activations",  # allocated in no known phase, freed in backward
        "workspaces",
        "activations",  # of a workspace's size, but freed again
        "activations",  # of a workspace's size, and of the last step
        "unknown",
    ]
    assert sum(bytes_by(found).values()) == allocator.peak


def test_stacks_categorize_blocks_from_before_recording(tmp_path: Path) -> None:
    """Their allocations are older than the oldest recorded event."""
    allocator = CachingAllocator()
    for size in (4096, 4096, 4096, 5120):
        allocator.alloc(size)
    allocator.alloc(WORKSPACE_BYTES[0])
    allocator.start()
    allocator.free(allocator.alloc(512))
    data = allocator.snapshot()
    alive = [b for s in data["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    for block, stack in zip(alive, (SETUP, OPTIMIZER, FORWARD, BACKWARD), strict=False):
        block["frames"] = list(stack)
    found = found_in(data, tmp_path)
    categories = sorted(a.category for a in found.allocations if a.allocation.start < 0)
    assert categories == ["before recording", "gradients", "optimizer state", "parameters", "workspaces"]


ZERO_GRAD = (frame("zero_grad", "site-packages/torch/optim/optimizer.py"), *MAIN)


def test_blocks_freed_by_zero_grad_are_gradients(tmp_path: Path) -> None:
    """Also those that were allocated before recording, or in no known phase."""
    allocator = CachingAllocator()
    old = allocator.alloc(4096)
    allocator.start()
    odd = allocator.alloc(2048, MAIN)
    allocator.free(old, ZERO_GRAD)
    allocator.free(odd, ZERO_GRAD)
    allocator.free(allocator.alloc(1024, ZERO_GRAD), ZERO_GRAD)
    found = found_in(allocator.snapshot(), tmp_path)
    assert [(a.allocation.requested_bytes, a.category) for a in found.allocations] == [
        (4096, "gradients"),
        (2048, "gradients"),
        (1024, "temporaries"),
    ]


def test_weight_of_a_workspace_size_is_a_parameter(tmp_path: Path) -> None:
    allocator = CachingAllocator(recording=True)
    allocator.alloc(WORKSPACE_BYTES[0], (frame("init_weight"), *MAIN))
    allocator.alloc(WORKSPACE_BYTES[0], FORWARD)
    for stack in (FORWARD, BACKWARD, FORWARD, BACKWARD):
        allocator.alloc(512, stack)
    found = found_in(allocator.snapshot(), tmp_path)
    assert [a.category for a in found.allocations[:2]] == ["parameters", "workspaces"]


@pytest.mark.parametrize(("weights", "category"), [(0, "workspaces"), (3, "gradients")])
def test_workspace_of_backward_is_a_gradient_only_if_parameters_have_its_size(
    tmp_path: Path, weights: int, category: str
) -> None:
    """The recording ends after one step, so no later forward tells that the block stays."""
    allocator = CachingAllocator()
    for size in (4096, 8192, *[WORKSPACE_BYTES[1]] * weights):
        allocator.alloc(size)
    allocator.start()
    allocator.free(allocator.alloc(512, FORWARD), BACKWARD)
    for size in (4096, *[WORKSPACE_BYTES[1]] * max(1, weights), 8192):
        allocator.alloc(size, BACKWARD)
    allocator.alloc(4096, OPTIMIZER)
    found = found_in(allocator.snapshot(), tmp_path)
    of_size = {(a.phase, a.category) for a in found.allocations if a.allocation.requested_bytes == WORKSPACE_BYTES[1]}
    assert of_size == {("backward", category)} | ({(None, "parameters")} if weights else set())
    assert sum(a.category == "parameters" for a in found.allocations) == 2 + weights


def test_snapshot_without_stacks_is_unknown(tmp_path: Path) -> None:
    allocator = CachingAllocator()
    allocator.alloc(512)
    allocator.start()
    allocator.alloc(512)
    counts = bytes_by(found_in(allocator.snapshot(), tmp_path))
    assert (counts["unknown"], counts["before recording"]) == (512, 512)


def test_ranges_give_phase_and_layer_for_every_thread(tmp_path: Path) -> None:
    """Ranges precede stacks, by time; allocations of autograd's thread have no stack."""
    allocator = CachingAllocator(recording=True)
    marks = []
    for name, ends in (
        ("forward", False),
        ("block 1", False),
        ("block 1", True),
        ("forward", True),
        ("backward", False),
    ):
        time_us = 1_000_000 + len(allocator.events) - ends  # an event in its last µs is inside
        marks.append({"stage": "END" if ends else "START", "name": name, "time_us": time_us})
        allocator.alloc(512, MAIN if not ends else ())
    data = allocator.snapshot() | {"external_annotations": [mark | {"device": 0} for mark in marks]}
    found = found_in(data, tmp_path)
    assert [(a.phase, a.layer) for a in found.allocations] == [
        ("forward", None),
        ("forward", "block 1"),
        ("forward", None),
        ("backward", None),
        ("backward", None),
    ]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([("linear", "nn/functional.py"), ("forward", "model.py"), ("main", "train.py")], "forward"),
        ([("forward", "m.py"), ("closure", "t.py"), ("step", "site-packages/torch/optim/adam.py")], "forward"),
        ([("forward", "m.py"), ("recompute_fn", "c.py"), ("backward", "torch/autograd/function.py")], "backward"),
        ([("zeros_like", "x.py"), ("step", "cs_systems/model/training/optimizers.py")], "optimizer"),
        ([("step", "train.py")], None),
        ([("cross_entropy", "torch/nn/functional.py"), ("forward", "loss.py")], "loss"),
        ([("at::native::mm", "??"), ("torch::autograd::Engine::evaluate_function(int)", "??")], "backward"),
        ([("convert", "torch/nn/modules/module.py"), ("_apply", "torch/nn/modules/module.py")], "setup"),
        ([], None),
    ],
)
def test_stack_gives_the_phase(frames: list[tuple[str, str]], phase: str | None) -> None:
    assert phase_of_stack(tuple(Frame(file, 1, function) for function, file in frames)) == phase


@pytest.mark.parametrize(
    ("frames", "site"),
    [
        (
            [("softmax", "site-packages/torch/nn/functional.py"), ("forward", "src/model.py")],
            "model.py:2 forward > softmax",
        ),
        (
            [("forward", "site-packages/torch/nn/modules/linear.py"), ("forward", "model.py")],
            "model.py:2 forward > linear",
        ),
        ([("main", "train.py")], "train.py:1 main"),
        ([("f", "site-packages/torch/optim/a.py"), ("g", "site-packages/torch/optim/b.py")], "a.py:1 f"),
        ([("at::empty", "??"), ("main", "train.py")], "train.py:2 main"),
        ([("at::empty", "??")], "at::empty"),
        ([("torch::unwind::unwind()", "??"), ("at::mm", "??")], "at::mm"),
        (
            [
                ("torch::unwind::unwind()", "??"),
                ("at::mm", "??"),
                ("torch::autograd::generated::MmBackward0::apply(std::vector&&)", "??"),
            ],
            "MmBackward0",
        ),
        ([], None),
    ],
)
def test_site_is_the_innermost_line_outside_torch(frames: list[tuple[str, str]], site: str | None) -> None:
    assert sites([tuple(Frame(file, n, function) for n, (function, file) in enumerate(frames, 1))]) == [site]


def test_site_with_several_callers_includes_the_caller() -> None:
    linear, torch = Frame("m.py", 31, "forward"), Frame("torch/nn/functional.py", 9, "linear")
    callers = [Frame("m.py", 114, "forward"), Frame("src/other.py", 5, "forward")]
    stacks = [(torch, linear, caller, Frame("train.py", 1, "main")) for caller in callers]
    assert sites(stacks) == ["m.py:114 > 31 forward > linear", "other.py:5 > m.py:31 forward > linear"]
    assert sites(stacks[:1]) == ["m.py:31 forward > linear"]


def large_model(tmp_path: Path, element: int = 4) -> Attribution:
    allocator = CachingAllocator(recording=True)
    for shape in parameter_shapes(PRESETS["large"]).values():
        size = element
        for n in shape:
            size *= n
        allocator.alloc(size, SETUP)
    return found_in(allocator.snapshot(), tmp_path)


def test_tensors_are_named_from_a_preset(tmp_path: Path) -> None:
    found = large_model(tmp_path)
    guessed, given = tensor_names(found), tensor_names(found, "large")
    rows = at_peak(found, guessed)
    assert (rows[0]["bytes"], rows[0]["allocations"]) == (10_000 * 1280 * 4, 2)
    assert rows[0]["name"] == "token_embeddings or lm_head, 10,000 × 1280 × 4"
    assert at_peak(found, given) == rows
    assert (
        guessed.note
        == "names are guessed: the tensors have the sizes of the preset large; give --size to choose another"
    )
    assert given.note == "tensors are named by their size, from the preset large"
    with pytest.raises(
        ConfigError,
        match=r"size xl does not match device 0 of the snapshot, which lacks tensors of that preset; leave out size$",
    ):
        tensor_names(found, "xl")
    with pytest.raises(ConfigError, match="unknown size 'larg'; did you mean large"):
        tensor_names(found, "larg")
    assert "10,000 × 1280 × 2" in str(at_peak(large_model(tmp_path, 2), tensor_names(large_model(tmp_path, 2)))[0])


def test_preset_is_not_guessed_if_most_parameters_do_not_fit(tmp_path: Path) -> None:
    """Another model may have tensors of every size of a preset."""
    allocator = CachingAllocator(recording=True)
    for shape in parameter_shapes(PRESETS["tiny"]).values():
        allocator.alloc(4 * prod(shape), SETUP)
    assert "the preset tiny" in tensor_names(found_in(allocator.snapshot(), tmp_path)).note
    allocator.alloc(64 * MIB, SETUP)
    found = found_in(allocator.snapshot(), tmp_path)
    assert tensor_names(found) == UNNAMED
    assert tensor_names(found, "tiny").note.endswith("from the preset tiny")


def test_unknown_model_has_no_names(real: Attribution) -> None:
    assert tensor_names(real) == UNNAMED


@pytest.mark.parametrize("workload", ["mine.py:factory", "loop train"])
def test_users_own_model_never_gets_tensor_names_of_a_preset(workload: str, tmp_path: Path) -> None:
    assert tensor_names(large_model(tmp_path, 4)).note.startswith("names are guessed")
    config = RunConfig().to_dict() | {"workload": workload}
    data = {"schema_version": 1, "config": config, "max_allocated_bytes": None, "tensors": []}
    (tmp_path / "made.pickle.json").write_text(json.dumps(data))
    assert tensor_names(large_model(tmp_path, 4)) == UNNAMED


def test_sidecar_names_tensors(tmp_path: Path) -> None:
    """Tensors are named by the block that holds them, activations by the configuration."""
    config = RunConfig(model=preset("small", context_length=256), batch_size=2, precision=Precision.BF16)
    allocator = CachingAllocator(recording=True)
    first = allocator.alloc(3000, MAIN)
    allocator.alloc(5000, FORWARD)
    allocator.alloc(2 * 256 * 768 * 4, FORWARD)
    allocator.alloc(3072 * 768 * 2, FORWARD)
    tensor = {"kind": "gradient", "name": "w.grad", "address": first + 100, "bytes": 40, "shape": [10]}
    stray = tensor | {"address": 1, "name": "elsewhere"}
    data = {"schema_version": 1, "config": config.to_dict(), "max_allocated_bytes": None}
    data["tensors"] = [stray, tensor | {"dtype": "float32"}]
    stray["dtype"] = "float32"
    (tmp_path / "made.pickle.json").write_text(json.dumps(data))
    found = found_in(allocator.snapshot(), tmp_path)
    names = tensor_names(found)
    assert found.notes == ("1 allocations are identified by the tensors in the JSON file next to the snapshot",)
    assert [a.category for a in found.allocations] == ["gradients", "activations", "activations", "activations"]
    assert [names.name(a) for a in found.allocations] == [
        "w.grad, 10 float32",
        None,
        "residual stream or a projection, 2 × 256 × 768 × 4",
        "autocast's copy of w1, w3 or w2, 3072 × 768 × 2",
    ]


def test_differences_of_two_peaks_add_up(real: Attribution, tmp_path: Path) -> None:
    allocator = CachingAllocator(recording=True)
    allocator.alloc(1024, FORWARD)
    small = found_in(allocator.snapshot(), tmp_path)
    rows = {row["what"]: row for row in differences(real, small, lambda _, a: a.category)}
    assert rows["activations"]["b_bytes"] == 1024
    assert rows["workspaces"]["difference_bytes"] == -64 * MIB
    assert sum(row["difference_bytes"] for row in rows.values()) == 1024 - real.replay.peak_bytes
    assert {row["difference_bytes"] for row in differences(real, real, where)} == {0}


def test_layer_numbers_restart_in_every_forward(tmp_path: Path) -> None:
    """This holds also if a loop's first stack is the first of all, and if a head loops within a layer."""
    allocator = CachingAllocator(recording=True)
    kept = []
    for _ in range(2):
        for _ in range(3):
            kept.append(allocator.alloc(512, (frame("norm", line=3), frame("forward", line=7), *MAIN)))
            for _ in range(2):
                for line in (4, 5):
                    inner = (frame("head", line=line), frame("forward", line=8), frame("forward", line=7), *MAIN)
                    kept.append(allocator.alloc(512, inner))
        allocator.alloc(512, BACKWARD)
    found = found_in(allocator.snapshot(), tmp_path)
    in_forward = [a.layer for a in found.allocations if a.phase == "forward"]
    assert in_forward == [f"block {n}" for _ in range(2) for n in range(3) for _ in range(5)]
    assert found.notes[0] == "blocks are numbered by the iterations of the loop at train.py:7, which the stacks show"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("forward", [f"block {n} (train.py:{call})" for call in (20, 21) for n in range(3)]),
        ("evaluate", ["block 0", "block 1", "block 2"] * 2),  # the same model, called in two places
    ],
)
def test_encoder_and_decoder_with_the_same_code_stay_apart(tmp_path: Path, function: str, expected: list[str]) -> None:
    allocator = CachingAllocator(recording=True)
    kept = []
    for call in (20, 21):
        for _ in range(3):
            for line in (3, 4):
                stack = (frame("norm", line=line), frame("forward", line=7), frame(function, line=call), *MAIN)
                kept.append(allocator.alloc(512, stack))
    found = found_in(allocator.snapshot(), tmp_path)
    assert [a.layer for a in found.allocations][::2] == expected


def test_paths_of_windows_are_shortened() -> None:
    own = Frame(r"C:\work\train.py", 12, "step")
    torch = Frame(r"C:\env\Lib\site-packages\torch\nn\functional.py", 9, "softmax")
    assert sites([(torch, own)]) == ["train.py:12 step > softmax"]


def test_blocks_are_found_among_frames_of_the_interpreter(tmp_path: Path) -> None:
    """PyTorch's default `stacks="all"` adds C++ frames; their number varies between passes of the loop."""
    allocator = CachingAllocator(recording=True)
    for number in range(3):
        for line in (3, 4):
            native = [frame("_PyEval_EvalFrameDefault", "??")] * (number + line)
            allocator.alloc(512, (frame("at::empty", "??"), frame("norm", line=line), *native, *FORWARD))
    allocator.alloc(512, BACKWARD)
    found = found_in(allocator.snapshot(), tmp_path)
    assert [a.layer for a in found.allocations[:6]] == [f"block {n}" for n in range(3) for _ in range(2)]


def test_blocks_that_the_optimizer_frees_are_its_state_and_no_parameters(tmp_path: Path) -> None:
    """An optimizer that makes its state anew in each step frees the old state, which has the parameters' sizes."""
    allocator = CachingAllocator()
    state = [allocator.alloc(3 * MIB) for _ in range(2)]
    weights = [allocator.alloc(3 * MIB) for _ in range(2)]
    allocator.start()
    for _ in range(2):
        allocator.alloc(3 * MIB, BACKWARD)
    for address in state:
        allocator.alloc(3 * MIB, OPTIMIZER)
        allocator.free(address, OPTIMIZER)
    of = {one.allocation.address: one.category for one in found_in(allocator.snapshot(), tmp_path).allocations[:4]}
    assert [of[address] for address in (*state, *weights)] == ["optimizer state"] * 2 + ["parameters"] * 2


def test_short_answer_shows_the_categories_of_most_memory(tmp_path: Path) -> None:
    allocator = CachingAllocator()
    allocator.alloc(2 * MIB)
    allocator.start()
    for size, stack in ((5, SETUP), (6, OPTIMIZER), (7, FORWARD), (8, LOSS), (9, BACKWARD), (20, BACKWARD)):
        allocator.alloc(size * MIB, stack)
    brief = TABLES["composition"].brief
    rows = composition(found_in(allocator.snapshot(), tmp_path), UNNAMED)
    assert brief is not None
    shown = brief(rows)
    assert len(shown) == 5 < len(rows)
    assert min(row["bytes"] for row in shown) >= max(row["bytes"] for row in rows if row not in shown)
    assert [rows.index(row) for row in shown] == sorted(rows.index(row) for row in shown)
