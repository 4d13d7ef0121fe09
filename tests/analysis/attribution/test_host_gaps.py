"""Work of the host while no kernel runs, and its calls that wait, in traces made by hand."""

from __future__ import annotations

import pytest

from cs_systems.analysis.attribution.gaps import gaps_in
from cs_systems.analysis.attribution.host_gaps import (
    NO_CALL,
    HostGapRow,
    host_gap_rows,
    launching_thread,
    own_names,
    wait_rows,
    written_names,
)
from cs_systems.analysis.attribution.host_work import host_work
from cs_systems.readers.forms.trace import Step
from tests.analysis.attribution.made import ADD, MAIN, Made

STEPS = [Step("step", 1.0, 6.0), Step("step", 6.0, 11.0)]


def idle_twice() -> Made:
    """Return kernels that leave the device idle from 2 to 6 and from 8 to 10; the host launches at 1, 6, 7 and 10."""
    made = Made()
    for begin in (1.0, 6.0, 7.0, 10.0):
        made.kernel(ADD, begin, begin + 1)
    return made


def rows_of(made: Made, **known: object) -> dict[str, HostGapRow]:
    trace = made.trace(**known)
    rows = host_gap_rows(trace, gaps_in(trace.kernels, STEPS)[0], STEPS)
    assert [row["time_s"] for row in rows] == sorted((row["time_s"] for row in rows), reverse=True)
    return {row["host"]: row for row in rows}


def test_work_of_the_host_is_looked_up_at_nine_times_of_each_stretch() -> None:
    made = idle_twice()
    made.function("train.py(88): evaluate", 2.0, 4.05)  # five of nine times from 2 to 6
    made.function("torch/nn/modules/module.py(5): _call_impl", 2.0, 4.0)
    made.function("train.py(3): save", 7.0, 8.6)  # five of nine times from 7 to 10, of which 2 s are idle
    rows = rows_of(made)
    expected = {
        "evaluate() at train.py:88": (0.5, 20 / 9 / 2, 20 / 9 / 10, 20 / 9),
        "save() at train.py:3": (0.5, 10 / 9 / 2, 10 / 9 / 10, 10 / 9),
        NO_CALL: (1.0, 24 / 9 / 2, 24 / 9 / 10, 16 / 9),
    }
    for name, (stretches, time_s, share, longest_s) in expected.items():
        row = rows.pop(name)
        assert (row["stretches_per_step"], row["time_s"]) == (stretches, pytest.approx(time_s, rel=1e-5))
        assert (row["share"], row["longest_s"]) == pytest.approx((share, longest_s), rel=1e-5)
    assert rows == {}


@pytest.mark.parametrize("range_name", [None, "forward", "evaluate"])
def test_operator_that_works_for_long_is_named_after_the_range(range_name: str | None) -> None:
    """A range with a known kind of work keeps its name; an operator that only launches has no name of its own."""
    made = idle_twice()
    made.operator("aten::scaled_dot_product_attention", 2.1, 5.9)
    made.operator("aten::_cudnn_attention_forward", 2.15, 5.85)
    made.operator("aten::linear", 8.1, 9.9)
    if range_name:
        made.range(range_name, 1.5, 9.95)
    prepared, launched = {
        None: ("aten::scaled_dot_product_attention, aten::_cudnn_attention_forward", "aten::linear"),
        "forward": ("forward, aten::_cudnn_attention_forward", "forward"),
        "evaluate": ("evaluate", "evaluate"),
    }[range_name]
    rows = rows_of(made)
    assert {prepared, launched} <= {*rows}
    assert ("aten::_cudnn_attention_forward" in str(host_work(prepared) and prepared)) is (range_name != "evaluate")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            "writes a log",
            (
                "self.log",
                "logger.log",
                "wandb.log",
                "run.log",
                "get_run().log",
                "pl_module.log",
                "train_log.log",
                "log_metrics",
                "log",
            ),
        ),
        ("collects garbage", ("gc.collect", "gc_collect")),
        ("draws figures", ("plot", "plot_samples", "draw_figure", "draw_loss_curves", "plt.plot")),
        ("evaluates", ("evaluate", "validate", "Trainer.evaluate", "evaluate_model", "validation_step")),
        (
            None,
            (
                "torch.log",
                "math.log",
                "np.log",
                "probs.log",
                "self.alpha.log",
                "F.softmax(x).log",
                "logits.log",
                "geometric.log",
            ),
        ),
        (None, ("collect", "agent.collect", "collect_rollout", "draw", "draw_samples", "draw_graphs", "draw_images")),
        (None, ("evaluate_actions", "evaluate_position", "evaluate_candidates", "validate_args", "validate_inputs")),
    ],
)
def test_name_of_a_function_gives_the_kind_of_work_only_where_it_is_clear(
    words: str | None, names: tuple[str, ...]
) -> None:
    """A logarithm writes no log, and a sample or a position of a game is not drawn or evaluated less often."""
    found = {name: host_work(name) for name in names}
    assert {name: work.words if work else None for name, work in found.items()} == dict.fromkeys(names, words)


def test_time_of_the_profiler_is_no_work_of_the_host() -> None:
    overheads = [(0.5, 0.75), (1.5, 2.5), (5.5, 6.5), (6.25, 6.5), (8.5, 9.0)]
    (row,) = rows_of(idle_twice(), overheads=overheads).values()
    assert row["time_s"] == pytest.approx((6 - 0.5 - 0.5) / 2, rel=1e-5)
    assert row["longest_s"] == pytest.approx(4 - 0.5, rel=1e-5)


def test_names_of_the_user_are_functions_and_ranges_of_the_program() -> None:
    made = Made()
    made.kernel(ADD, 0.0, 1.0)
    trace = made.trace()
    frames = ["<built-in method item of Tensor>", "torch/nn/modules/module.py(5): _call_impl", "train.py(1): <module>",
              "/home/me/train.py(7): main"]  # fmt: skip
    assert written_names(trace, frames) == ["main() at train.py:7"]
    assert own_names(trace, ["aten::add", "ProfilerStep#3", "clip"]) == ["clip"]


def test_launching_thread_launched_the_first_kernel() -> None:
    made = Made()
    made.kernel(ADD, 0.0, 1.0, thread=7)
    made.kernel(ADD, 1.0, 2.0, thread=MAIN)
    assert launching_thread(made.trace()) == 7


def test_waits_are_counted_by_call_and_by_the_operator_and_range_around_it() -> None:
    made = idle_twice()
    made.operator("aten::item", 2.5, 4.5)
    made.operator("aten::_local_scalar_dense", 2.75, 4.25)
    made.operator("aten::last", 9.5, 9.75)
    made.range("outer", 2.0, 5.0)
    made.range("clip", 2.25, 4.75)
    made.range("wait", 7.0, 9.5)
    made.function("train.py(9): log", 5.0, 6.0)
    made.function("train.py(12): format", 5.125, 5.875)
    for name, begin, end in (
        ("cudaStreamSynchronize", 3.0, 4.0),
        ("cudaStreamSynchronize", 4.125, 4.1875),
        ("cudaStreamSynchronize", 5.25, 5.75),
        ("cudaDeviceSynchronize", 7.25, 9.25),
        ("cudaMalloc", 9.3, 9.4),
        ("cudaEventSynchronize", 10.5, 10.625),
        ("cudaDeviceSynchronize", 11.5, 12.0),  # outside of the steps
    ):
        made.call(name, begin, end)
    rows = [
        (row["call"], row["within"], row["calls_per_step"], row["time_s"]) for row in wait_rows(made.trace(), STEPS)
    ]
    assert rows == [
        ("cudaDeviceSynchronize", "wait", 0.5, 1.0),
        ("cudaStreamSynchronize", "aten::item in clip", 1.0, 1.0625 / 2),
        ("cudaStreamSynchronize", "format() at train.py:12", 0.5, 0.25),
        ("cudaEventSynchronize", "", 0.5, 0.0625),
    ]
