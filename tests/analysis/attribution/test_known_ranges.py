"""Ranges that a user maps to phases, and those of known frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.known_ranges import MEANINGS, built_in, read_habits, with_habits
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers import read
from cs_systems.readers.forms.modules import Modules
from tests.analysis.attribution.made import Made
from tests.analysis.attribution.test_foreign import AUTOGRAD, event, kernel, marked

WriteTrace = Callable[[Sequence[dict[str, Any]]], Path]


def program(forward: str, backward: str, *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        marked("ProfilerStep#1", 0, 100), marked(forward, 0, 30), marked(backward, 30, 90), *more,
        *kernel("gemm", 110, 120, launched=10), *kernel("gemm", 130, 160, launched=40, thread=AUTOGRAD),
        *kernel("gemm", 170, 175, launched=95),
    ]  # fmt: skip


def made(path: Path, *options: str, file: Path | None = None) -> Profile:
    ((trace, notes),) = with_habits([read(path)], options, file)
    return profile(trace, also=notes)


def phases(of: Profile) -> list[str]:
    return [place.phase for place in of.places]


@pytest.mark.parametrize(
    "options",
    [
        ("forward=## fwd [1] ##", "backward=bwd"),  # brackets are literal where a range has the very name
        ("forward=*fwd*", "backward=b?d"),
        ("forward=*fwd*", "backward=b?d", "optimizer=ProfilerStep#*"),
    ],
)
def test_user_maps_names_to_phases(write_trace: WriteTrace, options: Sequence[str]) -> None:
    found = phases(made(write_trace(program("## fwd [1] ##", "bwd")), *options))
    rest = "optimizer" if len(options) == 3 else "unattributed"
    assert found == ["forward", "backward", rest]


def test_mapped_name_is_shown_with_its_phase(write_trace: WriteTrace, tmp_path: Path) -> None:
    path, out = write_trace(program("fwd", "bwd")), tmp_path / "out.txt"
    words = ["--table", "ranges", "ratio", "--phase", "forward=fwd", "--phase", "backward=bwd", "--output", str(out)]
    assert main(["analyze", str(path), *words]) == 0
    assert "fwd → forward" in out.read_text()
    assert "3.00" in out.read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "forward=my_fvd",
            "--phase forward='my_fvd' matches no range of the trace (operators and modules do not count); did you "
            "mean 'my_fwd'? The names are 'ProfilerStep#*', 'bwd', 'my_fwd'",
        ),
        ("foward=my_fwd", "unknown phase 'foward'; did you mean forward?"),
        ("forward", "--phase 'forward' is not of the form PHASE=NAME; write --phase forward='my range', with"),
        ("forward=", "--phase 'forward=' is not of the form PHASE=NAME"),
    ],
)
def test_wrong_mapping_is_refused(write_trace: WriteTrace, option: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(write_trace(program("my_fwd", "bwd")), option)
    assert message in str(error.value)


def test_name_of_one_of_two_traces_is_enough(write_trace: WriteTrace) -> None:
    traces = [read(write_trace(program(name, "backward"))) for name in ("mine", "yours")]
    found = with_habits(traces, ["forward=mine", "forward=yours"])
    assert ["mine → forward" in trace.ranges.name.values for trace, _ in found] == [True, False]


@pytest.mark.parametrize(
    ("source", "forward", "backward"),
    [
        (
            "Lightning",
            "[pl][profile][Strategy]DDPStrategy.training_step",
            "[pl][profile][Strategy]DDPStrategy.backward",
        ),
        ("DeepSpeed", "DeepSpeedEngine.forward", "DeepSpeedEngine.backward"),
        ("PyTorch pipelining", "Forward 3", "Backward 0"),
        ("PyTorch pipelining", "PP:0F3", "PP:1B0"),
        ("PyTorch pipelining", "PP:0F12", "PP:1I0"),
        ("PyTorch pipelining", "PP:3F0", "PP:1W11"),
    ],
)
def test_frameworks_are_known(write_trace: WriteTrace, source: str, forward: str, backward: str) -> None:
    found = made(write_trace(program(forward, backward)))
    assert phases(found)[:2] == ["forward", "backward"]
    assert f"ranges of {source} count as forward, backward" in found.notes


@pytest.mark.parametrize(
    ("source", "name", "means"),
    [
        ("PyTorch FSDP", "FullyShardedDataParallel.forward", "forward"),
        ("PyTorch pipelining", "PP:1SEND_F0", "communication"),
        ("PyTorch pipelining", "PP:0RECV_B3", "communication"),
        ("PyTorch pipelining", "PP:0UNSHARD", "communication"),
        ("PyTorch pipelining", "PP:2REDUCE_GRAD", "communication"),
        ("TorchRec", "## next_batch ##", "input"),
        ("vLLM", "gpu_model_runner: preprocess", "input"),
        ("SGLang", "step[DECODE bs=63]", "forward"),
        ("SGLang", "step[EXTEND bs=17 toks=8192]", "forward"),
        ("SGLang", "scheduler.process_input_requests", "input"),
        (None, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "input"),
    ],
)
def test_names_of_a_phase_are_known(write_trace: WriteTrace, source: str | None, name: str, means: str) -> None:
    events = [marked("ProfilerStep#1", 0, 100), marked(name, 0, 60), *kernel("gemm", 110, 120, launched=10)]
    found = made(write_trace(events))
    assert phases(found) == [means]
    assert any(f"ranges of {source} count as {means}" in note for note in found.notes) == (source is not None)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("vLLM", "execute_new_{}_cached_7"),
        ("vLLM", "execute_context_{}(128)_generation_3(3)"),
        ("vLLM", "execute_{}_context_3(sq128sk256)_generation_0(sq0sk0)"),
        ("SGLang", "scheduler.run_batch"),
    ],
)
def test_steps_of_inference_engines_are_known(write_trace: WriteTrace, source: str, name: str) -> None:
    events = [
        marked(name.format(1), 0, 50), marked(name.format(2), 60, 100), marked("inside", 61, 90),
        *kernel("gemm", 110, 120, launched=10), *kernel("gemm", 130, 140, launched=70),
    ]  # fmt: skip
    found = made(write_trace(events))
    assert [round(step.start_s * 1e6) for step in found.steps] == [0, 60]
    assert f"ranges of {source} count as step" in found.notes


def test_marks_come_before_known_names(write_trace: WriteTrace) -> None:
    events = program("forward", "backward", marked("DeepSpeedEngine.forward", 35, 80))
    found = made(write_trace(events))
    assert phases(found)[:2] == ["forward", "backward"]
    assert not any("DeepSpeed" in note for note in found.notes)


def test_forward_alone_does_not_hide_inferred_backward(write_trace: WriteTrace) -> None:
    """DDP names its forward; operators tell backward."""
    backward = event("cpu_op", "MmBackward0", 35, 80, AUTOGRAD, **{"Sequence number": 1, "Fwd thread id": 1})
    found = made(write_trace(program("DistributedDataParallel.forward", "mine", backward)))
    assert phases(found)[:2] == ["forward", "backward"]
    assert any(note.startswith("no range marks forward or backward") for note in found.notes)


def test_parts_of_attention_are_known(write_trace: WriteTrace) -> None:
    events = program("forward", "backward", marked("computing softmax", 5, 20))
    assert made(write_trace(events)).places[0].part == "attention.softmax"


def test_own_file_of_names_extends_the_known_ones(write_trace: WriteTrace, tmp_path: Path) -> None:
    own = tmp_path / "names.toml"
    own.write_text('["our trainer"]\nforward = ["fp_*"]\nbackward = ["bp"]\n')
    found = made(write_trace(program("fp_1", "bp")), file=own)
    assert phases(found)[:2] == ["forward", "backward"]
    assert "ranges of our trainer count as forward, backward" in found.notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", r"names.toml is not valid TOML: .* \(at .*\); correct the file there$"),
        ("forward = 3", "has forward outside of a table; write a line such as"),
        ('[a]\nfoward = ["x"]', "did you mean forward"),
        ("[a]\nfwd = ['x']", "has the unknown meaning 'fwd' in .a.; did you mean forward"),
        (
            '[a.b]\nforward = ["x"]',
            "has 'b' as a part of a name, because TOML splits a name without quotes at its dots",
        ),
        ('[a]\nforward.x = ["y"]', "has 'forward' as a part of a name"),
        ('[a]\nattention.scores = ["x"]', "has 'attention' as a part of a name"),
        ('attention.scores = ["x"]', "has 'scores' as a part of a name"),
        ("[a.b]", "has 'b' as a part of a name"),
        ('[a]\n"attention.scores" = "x"', 'write "attention.scores" = '),
        ("[a]\nforward = [3]", "forward in .a. is not a list of names; write forward = "),
    ],
)
def test_damaged_file_of_names_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "names.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_habits(file)


def test_missing_file_of_names_is_refused_with_its_path(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nosuch.toml", "does not exist; give a TOML file"),
        (tmp_path, "is a folder; give a TOML file"),
    ):
        with pytest.raises(ConfigError) as raised:
            read_habits(path)
        assert str(raised.value) == f"--range-names {path} {message}"
    (latin := tmp_path / "latin.toml").write_bytes("x = 'é'".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.toml is not a text in UTF-8; save it as UTF-8"):
        read_habits(latin)


def test_known_names_have_meanings() -> None:
    assert {habit.means for habit in built_in()} <= {*MEANINGS}


@pytest.mark.parametrize("name", ["aten::mm", "layers.0"])
def test_operators_and_modules_are_no_ranges_of_a_phase(name: str) -> None:
    found = Made()
    for each in ("fwd", "aten::mm", "layers.0"):
        found.range(each, 0.0, 1.0)
    trace = found.trace(modules=Modules([{"path": "layers.0", "range": "layers.0"}]))
    with pytest.raises(ConfigError, match=r"matches no range of the trace \(operators and modules do not count\)"):
        with_habits([trace], [f"forward={name}"])
