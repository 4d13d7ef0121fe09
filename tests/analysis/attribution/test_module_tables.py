"""Tables of a made model with two blocks of unlike last modules, compared with sums by hand.

In forward the net and its modules take 1 to 128 µs, each a power of two, and in backward twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution import module_tables, tables
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.tables import Ceilings, Costs
from cs_systems.readers import read
from cs_systems.readers.forms.modules import Modules
from tests.analysis.attribution.made import Made
from tests.analysis.attribution.test_foreign import kernel, marked

WriteTrace = Callable[[Sequence[dict[str, Any]]], Path]
OWN_US = {"embed": 1, "layers.0.up": 2, "layers.0.last": 4, "layers.0": 8, "layers.1.up": 16, "layers.1.last": 32,
          "layers.1": 64, "": 128}  # fmt: skip
SPANS = {"": (0, 90), "embed": (1, 10), "layers.0": (10, 40), "layers.0.up": (12, 20), "layers.0.last": (20, 30),
         "layers.1": (40, 70), "layers.1.up": (42, 50), "layers.1.last": (50, 60)}  # fmt: skip
LAUNCHED = {"": 80, "embed": 5, "layers.0": 35, "layers.0.up": 15, "layers.0.last": 25, "layers.1": 65,
            "layers.1.up": 45, "layers.1.last": 55}  # fmt: skip


def module(path: str, of: str, parameters: int, block: int | None = None) -> dict[str, Any]:
    name = None if block is None else f"block {block}"
    return {"path": path, "class": of, "range": path or "Net", "stack": name and "layers", "block": name,
            "layer": name or path or "Net", "part": None, "parameters": parameters}  # fmt: skip


MODULES = [
    module("", "Net", 100), module("embed", "Embedding", 10),
    module("layers.0", "Block", 45, 0), module("layers.0.up", "Linear", 40, 0), module("layers.0.last", "Norm", 5, 0),
    module("layers.1", "Block", 45, 1), module("layers.1.up", "Linear", 40, 1), module("layers.1.last", "Linear", 5, 1),
]  # fmt: skip


def made(
    write_trace: WriteTrace, halves: int = 2, launched: bool = True, modules: Sequence[dict[str, Any]] = MODULES
) -> Profile:
    """Return the profile of two steps with forward, and backward where there are two halves."""
    events: list[dict[str, Any]] = []
    for step in (0, 1000):
        events += [marked("step", step, step + 1000)]
        events += [
            marked(("forward", "backward")[half], step + 100 * half, step + 100 * (half + 1)) for half in range(halves)
        ]
        end = step + 200
        for half in range(halves):
            at = step + 100 * half
            events += [marked(path or "Net", at + start, at + stop) for path, (start, stop) in SPANS.items()]
            for path, own_us in OWN_US.items():
                events += kernel("gemm", end, end + own_us * (1 + half), at + (LAUNCHED[path] if launched else 95))
                end += own_us * (1 + half)
    return profile(replace(read(write_trace(events)), modules=Modules(modules)))


COSTS = Costs(
    modules={
        "": {"forward_flops": 1000, "backward_flops": 2000, "kept_bytes": 7},
        "layers.0": {"forward_flops": 300, "backward_flops": 600, "kept_bytes": 5},
        "layers.0.up": {"forward_flops": 100, "backward_flops": 200},
        "layers.1": {"forward_flops": 300, "backward_flops": None, "kept_bytes": 6},
    },
    ceilings=Ceilings(1e12, 1e12),
)


def us(*times: float) -> list[Any]:
    return [pytest.approx(time * 1e-6) for time in times]


def inside(path: str) -> int:
    return sum(own_us for below, own_us in OWN_US.items() if not path or f"{below}.".startswith(f"{path}."))


def test_total_time_of_a_module_includes_submodules_and_own_time_does_not(write_trace: WriteTrace) -> None:
    for row in module_tables.modules(made(write_trace), COSTS):
        path, whole = row["path"], inside(row["path"])
        assert [row["forward_s"], row["backward_s"]] == us(whole, 2 * whole), path
        assert [row["time_s"], row["own_s"]] == us(3 * whole, 3 * OWN_US[path]), path
        assert row["share"] == pytest.approx(whole / 255), path
        assert row["calls_per_step"] == 2 * sum(not path or f"{below}.".startswith(f"{path}.") for below in OWN_US)


def test_own_flops_of_a_module_exclude_submodules(write_trace: WriteTrace) -> None:
    rows = {row["path"]: row for row in module_tables.modules(made(write_trace), COSTS)}
    assert {path: (row["flops"], row["own_flops"]) for path, row in rows.items()} == {
        "": (3000, 3000 - 900 - 300), "embed": (None, None),
        "layers.0": (900, 900 - 300), "layers.0.up": (300, 300), "layers.0.last": (None, None),
        "layers.1": (300, 300), "layers.1.up": (None, None), "layers.1.last": (None, None),
    }  # fmt: skip
    assert rows[""]["achieved_flops_per_s"] == pytest.approx(3000 / (3 * 255e-6))
    assert rows[""]["ceiling_share"] == pytest.approx(3000 / (3 * 255e-6) / 1e12)
    assert (rows["embed"]["achieved_flops_per_s"], rows["embed"]["ceiling_share"]) == (None, None)
    without = module_tables.modules(made(write_trace), replace(COSTS, ceilings=None))
    assert {row["ceiling_share"] for row in without} == {None}


def test_blocks_of_a_list_are_summed_and_different_classes_are_named(write_trace: WriteTrace) -> None:
    rows = module_tables.tree(made(write_trace), COSTS)
    assert [(row["module"], row["class"], row["modules"], row["parameters"]) for row in rows] == [
        ("Net", "Net", 1, 100), ("embed", "Embedding", 1, 10), ("layers.*", "Block", 2, 90),
        ("layers.*.up", "Linear", 2, 80), ("layers.*.last", "several", 2, 10),
    ]  # fmt: skip
    assert [row["time_s"] for row in rows] == us(*(3 * time for time in (255, 1, 14 + 112, 18, 36)))
    assert [row["own_s"] for row in rows] == us(*(3 * time for time in (128, 1, 72, 18, 36)))
    assert [row["backward_s"] for row in rows] == us(*(2 * time for time in (255, 1, 14 + 112, 18, 36)))
    assert [row["share"] for row in rows] == pytest.approx([time / 255 for time in (255, 1, 14 + 112, 18, 36)])
    assert [row["kept_bytes"] for row in rows[:3]] == [7, None, 11]
    assert [row["flops"] for row in rows[:3]] == [3000, None, 1200]
    assert rows[2]["achieved_flops_per_s"] == pytest.approx(1200 / (3 * 126e-6))


def test_classes_have_the_own_time_of_their_modules_the_longest_first(write_trace: WriteTrace) -> None:
    rows = module_tables.classes(made(write_trace), COSTS)
    assert [(row["class"], row["modules"]) for row in rows] == [
        ("Net", 1), ("Block", 2), ("Linear", 3), ("Norm", 1), ("Embedding", 1),
    ]  # fmt: skip
    own = (128, 72, 50, 4, 1)
    assert [row["time_s"] for row in rows] == us(*(3 * time for time in own))
    assert [row["forward_s"] for row in rows] == us(*own)
    assert [row["backward_s"] for row in rows] == us(*(2 * time for time in own))
    assert [row["share"] for row in rows] == pytest.approx([time / 255 for time in own])
    assert [row["flops"] for row in rows] == [1800, 900, None, None, None], "that of two Linear is unknown"
    assert rows[1]["achieved_flops_per_s"] == pytest.approx(900 / (3 * 72e-6))


def test_only_members_of_the_module_list_are_blocks(write_trace: WriteTrace) -> None:
    rows = module_tables.blocks(made(write_trace), COSTS)
    assert [(row["block"], row["path"], row["parameters"]) for row in rows] == [
        ("block 0", "layers.0", 45), ("block 1", "layers.1", 45),
    ]  # fmt: skip
    assert [row["time_s"] for row in rows] == us(3 * 14, 3 * 112)


def test_time_of_a_phase_that_no_module_ran_in_is_unknown(write_trace: WriteTrace) -> None:
    forward = made(write_trace, halves=1)
    for rows in (module_tables.modules(forward), module_tables.tree(forward), module_tables.classes(forward)):
        assert {row["backward_s"] for row in rows} == {None}
        assert all(row["forward_s"] == pytest.approx(row["time_s"]) for row in rows)
    assert module_tables.notes("modules", forward, module_tables.modules(forward))[0].startswith("100.0% of the kernel")
    assert not any("FLOPs" in note for note in module_tables.notes("tree", forward, module_tables.tree(forward)))
    with_flops = module_tables.notes("tree", forward, module_tables.tree(forward, COSTS))
    assert "FLOPs are those that were executed" in with_flops[-1]


def test_reason_without_module_times_names_kernels_outside_of_all_modules(write_trace: WriteTrace) -> None:
    outside = made(write_trace, launched=False)
    assert module_tables.why_nothing(made(write_trace)) is None
    assert str(module_tables.why_nothing(outside)).endswith("kernels are launched outside of the ranges of modules")
    assert {row["time_s"] for row in module_tables.modules(outside)} == {0.0}
    assert [row["module"] for row in module_tables.tree(outside)] == [
        "Net", "embed", "layers.*", "layers.*.up", "layers.*.last",
    ]  # fmt: skip
    assert module_tables.classes(outside) == []
    assert module_tables.notes("classes", outside, [{}])[0].startswith("0.0% of the kernel time")


def test_parts_of_blocks_have_rows_and_the_rest_counts_as_block(write_trace: WriteTrace) -> None:
    named = [one | {"part": "ffn" if one["path"].endswith(".up") else None} for one in MODULES]
    rows = tables.parts(made(write_trace, modules=named))
    assert [(row["part"], row["time_s"]) for row in rows] == [
        ("ffn", pytest.approx(3 * 18e-6)), ("block", pytest.approx(3 * 108e-6)),
    ]  # fmt: skip
    assert tables.parts(made(write_trace)) == [], "nothing tells the parts apart"


def test_layers_are_in_the_order_of_the_model(write_trace: WriteTrace) -> None:
    rows = tables.layers(made(write_trace))
    assert [row["layer"] for row in rows] == ["Net", "embed", "block 0", "block 1"]
    assert [row["time_s"] for row in rows] == us(*(3 * time for time in (128, 1, 14, 112)))
    backwards = tables.layers(made(write_trace, modules=[*reversed(MODULES)]))
    assert [row["layer"] for row in backwards] == ["block 1", "block 0", "embed", "Net"]


def test_equal_steps_have_no_note_of_kinds(write_trace: WriteTrace) -> None:
    equal = made(write_trace)
    assert len(equal.kinds) == 1
    for name in ("ratio", "phases", "layers", "families"):
        said = tables.notes(name, equal, tables.TABLES[name](equal) if name in tables.TABLES else [])
        assert not any("different kinds" in note or "not included" in note for note in said), name


def test_without_kernels_no_module_has_a_time(write_trace: WriteTrace) -> None:
    events = [marked("step", 0, 1000), *(marked(path or "Net", *span) for path, span in SPANS.items())]
    found = profile(replace(read(write_trace(events)), modules=Modules(MODULES)))
    assert not found.trace.kernels
    assert module_tables.modules(found) == module_tables.tree(found) == []


def test_notes_of_an_empty_table_say_what_is_missing() -> None:
    made = Made()
    made.range("forward", 0.0, 1.0)
    made.kernel("gemm", 0.25, 0.5)
    assert module_tables.notes("tree", made.profile(), []) == [module_tables.why_nothing(made.profile())]
    made.range("block 0", 0.0, 1.0)
    assert module_tables.notes("tree", made.profile(), []) == ["the trace has no table of modules"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("classes", ["the time of a class is that of its modules without the modules inside them"]),
        ("tree", ["the time of a module includes the modules inside it; its own time does not"]),
        ("modules", ["the time of a module includes the modules inside it; its own time does not"]),
        ("blocks", []),
    ],
)
def test_notes_say_what_a_module_s_time_includes(name: str, said: list[str]) -> None:
    made = Made()
    made.range("forward", 0.0, 1.0)
    assert module_tables.notes(name, made.profile(), [{}]) == ["0.0% of the kernel time belongs to a module", *said]
