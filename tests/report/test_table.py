"""Tables of records: their columns at each width, formats, notes and pivots."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pandas as pd
import pytest

from cs_systems.config import ConfigError, RunConfig, preset
from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.core.fields import LOOP
from cs_systems.core.tables import Column, Table
from cs_systems.record import RunRecord, read_records
from cs_systems.report.tables import columns
from cs_systems.report.tables import records as table
from cs_systems.report.tables.fitting import with_short_code
from cs_systems.report.tables.formats import FORMATS
from cs_systems.report.tables.records import counted_caveats, render, summarized, tables
from cs_systems.report.tables.rows import render_rows, render_table
from cs_systems.report.tables.short import letters
from cs_systems.report.tables.table import Table as TextTable
from tests.report.conftest import LAUNCH_BOUND, UNSTABLE, Build, attention_config, train_config

PROFILES = Path(__file__).parents[2] / "profiles"
CLEAN_AND_PROFILED = [("none", 4, 0.01), ("nsys", 4, 0.03), ("none", 8, 0.02)]  # profiler, batch, seconds
SPECIAL_CHARACTERS = 'a|b & 50% $x_1^2$ #set {y} ~z \\end <b>*c* `d` [e](f) @g "h"\n\x1b[31mred'


def test_training_table_fits_80_columns(train_records: list[RunRecord]) -> None:
    text = render(train_records, width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("train_step on NVIDIA H200; constant: batch 4, precision fp32, mode train-step")
    heading = next(line for line in lines if line.startswith("size"))
    assert heading.split() == ["size", "ctx", "attention", "ms", "ms", "ms", "%", "%", "GiB", "note"]
    (oom,) = (line for line in lines if "oom: 151 GiB" in line)
    assert oom.split() == ["large", "1024", "naive", "–", "–", "–", "–", "–", "–", "oom:", "151", "GiB"]
    assert "bytes after oom: predicted peak memory" in lines
    assert "hidden columns: loss (ms), model (TFLOP/s), optimizer (ms), tokens/s; " in text.replace("\n", " ")
    assert "widen the terminal or choose columns with cs-systems report DIR --columns" in text.replace("\n", " ")


def test_added_columns_stand_after_the_times(train_records: list[RunRecord]) -> None:
    lines = render(train_records, width=100, added=["mean", "std"]).splitlines()
    heading = next(n for n, line in enumerate(lines) if line.startswith("size"))
    named = " ".join(lines[heading - 1].split())
    assert "step mean std" in named
    assert "spread" in named


def test_column_is_found_by_its_heading(train_records: list[RunRecord]) -> None:
    asked = ["size", "ranks", "forward", "mean", "backward.std"]
    names = ["size", "world_size", "forward.median_s", "mean_s", "backward.std_s"]
    assert render(train_records, columns=asked) == render(train_records, columns=names)


def test_column_is_found_by_the_short_heading_of_a_phase(train_records: list[RunRecord]) -> None:
    names = ["size", "forward.median_s", "backward.median_s", "optimizer.median_s"]
    assert render(train_records, columns=["size", "fwd", "bwd", "opt"]) == render(train_records, columns=names)


@pytest.mark.parametrize("shown", ["batch", "median", "median_ms", "step", "step.median", "forward", "fwd", "note"])
def test_added_column_that_the_table_has_is_not_repeated(shown: str, train_records: list[RunRecord]) -> None:
    (plain,), (table,) = tables(train_records), tables(train_records, added=[shown])
    extra = ["batch"] if shown == "batch" else []
    assert sorted(c.title for c in table.columns) == sorted([*extra, *(c.title for c in plain.columns)])
    assert not any(column.is_empty for column in table.columns)
    assert ("batch 4" in table.caption) == (not extra)


def test_added_column_with_two_names_is_shown_once(train_records: list[RunRecord]) -> None:
    (table,) = tables(train_records, added=["mean", "mean_s", "step.mean_ms"])
    assert [c.title for c in table.columns].count("mean") == 1


def test_requested_memory_without_a_value_has_a_note(train_records: list[RunRecord]) -> None:
    asked = ["size", "before_backward_bytes", "peak_allocated_gib"]
    assert "\nbefore bwd: measured by cs-systems attention\n" in render(train_records, columns=asked)
    on_cpu = [replace(r, environment=r.environment and replace(r.environment, device="cpu")) for r in train_records]
    assert "\nbefore bwd: measured on a GPU only\n" in render(on_cpu, columns=asked)
    assert "measured on a GPU" not in render(train_records, columns=["size", "peak_allocated_gib"])


def test_caption_shortens_a_script_with_many_arguments_and_tells_two_apart(build: Build) -> None:
    words = "train --data /data/path/to/somewhere --epochs 10 --weight-decay 0.1"
    names = [f"{LOOP}{words} --lr {rate}" for rate in ("3e-4", "1e-3")]
    records = [build(RunConfig(workload=name), 0.02, 1e12, 10**9) for name in names]
    captions = [made.caption.partition(" on ")[0] for made in tables(records)]
    assert captions == [
        "loop train --data /data/…ght-decay 0.1 --lr 3e-4",
        "loop train --data /data/…ght-decay 0.1 --lr 1e-3",
    ]


def test_output_without_a_terminal_drops_no_column(
    train_records: list[RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = render(train_records)
    assert "hidden columns" not in whole
    assert {"loss", "MFU", "peak", "tokens/s"} <= {*whole.split()}
    text = "aten::convolution_backward in a block of the model, and once in its head"
    assert f"{text}      5" in render_rows([{"operator": text, "calls": 5}]).splitlines(), "a row is one line"
    monkeypatch.setenv("COLUMNS", "80")
    assert "hidden columns" in render(train_records)


def test_table_of_ranks_fits_80_columns_and_explains_rates() -> None:
    profiled = [r for r in read_records(PROFILES / "data_parallel_variants")[0] if r.config["workload"] == "train_step"]
    records = [r for r in profiled if r.config["profiler"] == "none" and r.config["bucket_size_mb"] is None]
    divided = {"strategy": "fsdp+tp", "tp_degree": 2, "world_size": 4}
    records += [replace(records[-1], config=records[-1].config | divided, warnings=())]
    assert max(map(len, render(records, width=80).splitlines())) <= 80
    wide = render(records, width=300)
    assert "\ntokens/s: sum over all ranks\n" in wide
    assert "\nmodel FLOP/s: FLOPs by formula / time; causal attention counts half; for one rank\n" in wide


def test_note_on_counted_flops_does_not_mention_a_formula(train_records: list[RunRecord]) -> None:
    own = [replace(r, config=r.config | {"workload": "mine.py:factory"}) for r in train_records]
    text = render(own, columns=["step.model_flops_per_s"])
    assert "FLOPs as counted" in text
    assert "by formula" not in text
    assert "by formula" in render(train_records, columns=["step.model_flops_per_s"])


def test_attention_table_fits_80_columns(attention_records: list[RunRecord]) -> None:
    text = render(attention_records, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "(device clock, launches queued ahead)" in text.replace("\n", " ")
    assert "unavailable (4 cells): flash_attn: the package is not installed" in text


def test_wide_terminal_shows_every_default_column(train_records: list[RunRecord]) -> None:
    text = render(train_records, width=200)
    assert "hidden columns" not in text
    assert "MFU: model FLOP/s as a share of the device's peak at that precision, 67.0 TFLOP/s (NVIDIA H200" in text


def test_color_appears_only_when_requested(train_records: list[RunRecord]) -> None:
    assert "\x1b[" not in render(train_records)
    assert "\x1b[33m" in render(train_records, color=True)


def test_rows_are_sorted_by_size_and_context(train_records: list[RunRecord]) -> None:
    (table,) = tables(train_records[::-1])
    keys = list(zip(*(table.columns[i].values for i in (0, 1)), strict=True))
    assert [k for k, _ in keys] == ["small"] * 4 + ["medium"] * 4 + ["large"] * 4
    assert [v for _, v in keys] == [256, 256, 1024, 1024] * 3


def test_record_without_size_sorts_last() -> None:
    """An unavailable cell of a custom workload has no size."""
    sizes = pd.Series([float("nan"), "xl", "small+num_layers=2", "small"], name="size")
    assert table._sort_key(sizes).tolist() == [3, 2, 1, 0]


def test_caveat_is_noted_once_with_count_and_remedy(train_records: list[RunRecord]) -> None:
    (table,) = tables(train_records)
    caveat = f"launch-bound (2 cells): the device waited for the host in: forward → {REMEDIES['launch-bound']}"
    assert caveat in table.notes
    assert sum(note.startswith("unstable (4 cells)") for note in table.notes) == 1


def test_numbers_of_merged_caveats_become_ranges() -> None:
    messages = ["the steps span 13%", "the steps span 8,997%; the halves differ by -2.5%", "the steps span 40%"]
    assert summarized(messages) == "the steps span 13 to 8,997%; the halves differ by -2.5%"
    assert summarized(["at a", "at b", "at c", "at d"]) == "e.g. at a"


def test_places_of_merged_caveats_are_listed_once() -> None:
    messages = ["it waited in: loss", "it waited in: loss, backward; it took 3 s", "it waited in: a", "it waited in: b"]
    assert summarized(messages) == "it waited in: loss, backward, a, b; it took 3 s"


def test_narrow_terminal_shortens_sizes_and_caveats_before_it_drops_time(build: Build) -> None:
    layers = preset("large", num_layers=32, vocab_size=32_000)
    records = [
        replace(build(train_config(size, attention=attention), 0.1, 1e12, 10**9), warnings=caveats)
        for size, attention, caveats in (
            ("small", "naive", (LAUNCH_BOUND,)),
            ("small", "flash_triton", (UNSTABLE, LAUNCH_BOUND)),
            ("large", "naive", ()),
        )
    ]
    changed = train_config("large", attention="flash_triton")
    records.append(build(replace(changed, model=replace(layers, context_length=512)), 0.1, 1e12, 10**9))
    text = render(records, width=80)
    rows = [line.split() for line in text.splitlines()]
    assert ["large+L32+V32000", "flash_triton"] in [row[:2] for row in rows]
    assert ["small", "flash_triton"] in [row[:2] for row in rows if row[-2:] == ["a", "b"]]
    assert "large+L32+V32000: large+num_layers=32+vocab_size=32000" in text.replace("\n", " ")
    assert f"a launch-bound (2 cells): {LAUNCH_BOUND.message} →" in text.replace("\n", " ")
    assert "b unstable (1 cell): " in text
    for width in range(30, 80, 5):
        heading = next(line for line in render(records, width=width).splitlines() if "fwd" in line)
        assert "step" in heading.split()
    whole = render(records, width=200)
    assert "large+num_layers=32+vocab_size=32000" in whole
    assert "\nlaunch-bound (2 cells)" in whole
    for format in ("csv", "markdown"):
        assert "unstable; launch-bound" in render(records, format)
    for format, row in {"latex": "& a b", "typst": '"a b",'}.items():  # a column of a paper is narrow too
        assert row in render(records, format)


def test_least_important_columns_are_hidden_first(build: Build) -> None:
    record = build(train_config("small"), 0.1, 1e12, 10**9)
    order = ["loss", "model", "optimizer", "tokens/s", "peak", "MFU", "spread"]
    hidden = []
    made = tables([record])
    for width in range(120, 20, -1):
        text = FORMATS["terminal"](made, width, False).replace("\n", " ")
        line = text.partition("hidden columns: ")[2].partition("; widen")[0]
        hidden.append([name.partition(" (")[0] for name in line.split(", ")] if line else [])
    assert all(names == order[: len(names)] for names in hidden)
    assert hidden[-1] == order


def test_letters_of_caveats_differ_however_many_there_are() -> None:
    marks = letters(f"code {i % 60}" for i in range(80))
    assert len({*marks.values()}) == 60
    assert [*marks.values()][24:28] == ["y", "z", "a2", "b2"]


def test_caveats_with_different_messages_are_merged(train_records: list[RunRecord]) -> None:
    doubt = train_records[0].warnings[0]
    other = replace(train_records[1], warnings=(replace(doubt, message="another message"),))
    (table,) = tables([train_records[0], other])
    assert table.notes == (f"launch-bound (2 cells): {doubt.message}; another message → {REMEDIES[doubt.code]}",)


def test_different_reasons_of_one_status_are_numbered(broken_records: list[RunRecord]) -> None:
    error = broken_records[0]
    other = replace(error, key="other", reason="ValueError: another")
    (table,) = tables([error, other])
    assert table.columns[-1].cells == ("error [1]", "error [2]")
    assert table.notes[1] == "error [2] (1 cell): ValueError: another"


def test_columns_option_selects_phase_and_unit(train_records: list[RunRecord]) -> None:
    names = ["size", "backward.median_us", "median_s", "range_s", "peak_allocated_mib"]
    (table,) = tables(train_records, columns=names)
    assert [c.heading for c in table.columns] == ["size", "backward (µs)", "step (ms)", "p10 … p90 (ms)", "peak (MiB)"]
    backward, step = table.columns[1].values[0], table.columns[2].values[0]
    assert 0.5 < backward / 1e6 / step < 0.7


def test_only_times_of_a_phase_have_its_short_heading() -> None:
    rows = [{"optimizer": "adamw", "forward_s": 1.0}, {"optimizer": "adamw_fused", "forward_s": 2.0}]
    assert render_rows(rows).split()[:3] == ["fwd", "optimizer", "s"]


def test_numbers_are_never_broken_next_to_wrapping_texts() -> None:
    rows = [
        {"operator": "aten::_foreach_addcdiv_", "shapes": "[1000×256, 256, … 26 tensors], [4×256×256]", "calls": 1234,
         "time_s": 0.0352, "rate": 26.7},
        {"operator": "aten::mm and more", "shapes": "1024×1024, 1024×256", "calls": 5, "time_s": 0.7, "rate": 2.5},
    ]  # fmt: skip
    for width in range(20, 140):
        lines = render_rows(rows, width=width).splitlines()
        assert all(
            word in " ".join(lines).split() for word in ("calls", "rate", "1,234", "35.2", "26.7", "700", "2.50")
        )
        assert max(map(len, lines)) <= max(width, 78)


@pytest.mark.parametrize(
    ("walls", "shown"),
    [((0.00229, 0.259), "2.29 … 259"), ((0.01, 0.0101), "10.0 … 10.1"), ((0.823, 4.002), "823 … 4,002")],
)
def test_both_ends_of_a_range_have_three_digits(walls: tuple[float, float], shown: str) -> None:
    spec = columns.parse("range_ms", [])
    assert columns.text(walls, spec.unit) == shown


def test_table_of_a_loop_states_its_ranks(build: Build) -> None:
    captions = []
    for ranks in (1, 2):
        (table,) = tables([build(RunConfig(workload=f"{LOOP}train.py", world_size=ranks), 0.02, 1e12, 10**9)])
        captions.append(table.caption)
    assert "ranks" not in captions[0]
    assert "ranks 2" in captions[1]


def test_columns_share_a_unit_unless_a_value_would_vanish(build: Build) -> None:
    names = ["median_s", "loss.median_s", "wall_minus_phases_s"]
    (table,) = tables([build(RunConfig(), 0.01, 1e12, 10**9)], columns=names[:2])
    assert [c.unit for c in table.columns] == ["ms", "ms"]
    (table,) = tables([build(RunConfig(), 2.0, 1e12, 10**9)], columns=names[::2])
    assert [c.unit for c in table.columns] == ["s", "µs"]


def test_zeros_do_not_set_a_unit(build: Build) -> None:
    def compiling(config: RunConfig, seconds: float) -> RunRecord:
        record = build(config, 0.01, 1e12, 10**9)
        assert record.measurement is not None
        first, *rest = record.measurement.samples
        samples = (replace(first, compile_s=seconds), *(replace(sample, compile_s=0.0) for sample in rest))
        return replace(record, measurement=replace(record.measurement, samples=samples))

    spent = zip((1, 2, 3), (0.0, 0.0, 4.365293864), strict=True)
    records = [compiling(RunConfig(batch_size=batch), seconds) for batch, seconds in spent]
    (table,) = tables(records, columns=["batch_size", "median_ms", "compile_s"])
    assert (table.columns[2].unit, table.columns[2].cells) == ("s", ("0", "0", "4.37"))


def test_several_phases_become_rows(train_records: list[RunRecord]) -> None:
    (table,) = tables(train_records[:2], phases=["forward", "backward"])
    assert next(c for c in table.columns if c.name == "phase").cells == ("forward", "backward") * 2


def test_pivot_has_column_for_each_value(train_records: list[RunRecord]) -> None:
    (table,) = tables(train_records, pivot="size,context_length:attention:median_ms")
    assert [c.heading for c in table.columns] == ["size", "ctx", "naive (ms)", "sdpa_flash (ms)"]
    assert table.columns[2].cells[-1] == "oom"
    assert len(table.columns[0].cells) == 6
    assert table.caption.startswith("step median of train_step")


def test_cells_that_differ_in_the_parts_of_a_step_differ_in_the_table(build: Build) -> None:
    plain = train_config("small", compile="default")
    changes: list[dict[str, Any]] = [{}, {"compile_scope": "block"}, {"graph": "step"}, {"parts": ("a", "b")}]
    records = [build(replace(plain, **change), 1e-2, 1e9, 10**8) for change in changes]
    (table,) = tables(records)
    found = {column.heading: column.cells for column in table.columns}
    rows = {*zip(found["compiled"], found["graph"], found["parts"], strict=True)}
    assert rows == {
        ("model", "none", "none"),
        ("block", "none", "none"),
        ("model", "step", "none"),
        ("model", "none", "a+b"),
    }
    (same,) = tables(records[:1])
    assert not {"compiled", "graph", "parts"} & {column.heading for column in same.columns}
    assert "graph" not in same.caption


def test_table_wider_than_terminal_is_not_truncated(train_records: list[RunRecord]) -> None:
    lines = render(train_records, pivot="size:context_length,attention:median_ms", width=40).splitlines()
    heading = next(line for line in lines if "sdpa_flash" in line)
    assert heading.split("  ")[-1].strip() == "1024, sdpa_flash"
    row = next(line for line in lines if line.startswith("small")).split()
    (table,) = tables(train_records, pivot="size:context_length,attention:median_ms")
    assert row == [column.cells[0] for column in table.columns]


def test_narrow_attention_table_hides_phases_before_rate(build: Build) -> None:
    modes = ("forward", "backward", "forward-backward")
    records = [build(attention_config("sdpa_flash", 256, mode=m), 1e-4, 1e9, 10**8) for m in modes]
    text = render(records, width=80)
    assert "TFLOP/s" in text.split("hidden columns")[0]
    assert "forward-backward" in text
    assert max(map(len, text.splitlines())) <= 80


def test_plain_rows_label_rates_and_counts() -> None:
    output = render_rows([{"tokens": 512, "tokens_per_s": 17123.0, "sent_bytes_per_s": 2e9}], "markdown")
    assert output.splitlines()[2] == "|   tokens |   tokens/s |   sent (GB/s) |"


def test_pivot_caption_and_note_explain_value(train_records: list[RunRecord]) -> None:
    output = render(train_records, "markdown", pivot="size,context_length:attention:model_tflops_per_s")
    assert output.startswith("**step model FLOP/s of train_step on NVIDIA H200")
    assert output.count("- model FLOP/s: FLOPs by formula / time; causal attention counts half\n") == 1


def test_pivot_takes_median_of_repeats(build: Build) -> None:
    records = [build(train_config("small"), s, 1e12, 10**9, repeat=i) for i, s in enumerate((0.01, 0.9, 0.02))]
    (table,) = tables(records, pivot="size:attention:median_ms")
    assert table.columns[1].values[0] == pytest.approx(0.02, rel=0.05)


def test_pivot_that_would_merge_different_cells_is_rejected(train_records: list[RunRecord]) -> None:
    with pytest.raises(
        ConfigError, match="would merge cells that differ in context_length; add context_length to ROWS or COLUMNS"
    ):
        tables(train_records, pivot="size:attention:median_ms")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"format": "markdwon"}, "unknown format 'markdwon'; did you mean markdown"),
        ({"columns": ["medain_ms"]}, "did you mean median"),
        ({"columns": ["forwrd.median_s"]}, "unknown phase 'forwrd'; did you mean forward"),
        ({"phases": ["bakward"]}, "unknown phase 'bakward'; did you mean backward"),
        (
            {"pivot": "size:attention"},
            "must be ROWS:COLUMNS:VALUE, got 'size:attention'; for example size,context_length:",
        ),
    ],
)
def test_malformed_table_option_is_rejected_with_remedy(
    train_records: list[RunRecord], request_: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(train_records, **request_)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_shows_all_kinds_of_records(
    format: str,
    train_records: list[RunRecord],
    attention_records: list[RunRecord],
    broken_records: list[RunRecord],
) -> None:
    text = render([*train_records, *attention_records, *broken_records], format)
    for word in ("sdpa", "unavailable", "oom", "16384", "killed"):
        assert word in text
    assert "\x1b" not in text


def test_markdown_escapes_markup_but_not_names(broken_records: list[RunRecord]) -> None:
    text = render(
        [replace(broken_records[0], reason=SPECIAL_CHARACTERS)], "markdown", columns=["size", "reason", "attention"]
    )
    row = next(line for line in text.splitlines() if line.startswith("| small"))
    assert row.count("|") - row.count(r"\|") == 4
    assert r"a\|b &amp; 50% \$x_1^2\$ \#set" in row
    assert r"&lt;b&gt;\*c\* \`d\` \[e\](f)" in row
    assert "sdpa_flash" in render([broken_records[3]], "markdown")


def test_latex_escapes_special_characters(broken_records: list[RunRecord]) -> None:
    text = render([replace(broken_records[0], reason=SPECIAL_CHARACTERS)], "latex", columns=["size", "reason"])
    assert r"\toprule" in text
    assert r"50\% \$x\_1\textasciicircum{}2\$ \#set \{y\} \textasciitilde{}z \textbackslash{}end" in text
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    assert body.count(" & ") == 1


def test_typst_writes_text_as_string_literals(broken_records: list[RunRecord]) -> None:
    text = render([replace(broken_records[0], reason=SPECIAL_CHARACTERS)], "typst", columns=["size", "reason"])
    row = next(line.strip() for line in text.splitlines() if line.strip().startswith('"small"'))
    first, second = json.loads(f"[{row.rstrip(',')}]")  # such a literal has the escapes of JSON
    assert (first, second[:14]) == ("small", "a|b & 50% $x_1")
    assert second.endswith('"h" [31mred')


def test_csv_has_frame_rows_in_base_units(train_records: list[RunRecord]) -> None:
    rows = list(csv.DictReader(io.StringIO(render(train_records, "csv"))))
    assert len(rows) == 11 * 5 + 1
    assert rows[0]["phase"] == "forward"
    assert float(rows[0]["median_s"]) < 0.1
    assert rows[-6]["status"] == "oom"
    assert rows[-6]["median_s"] == ""


def test_csv_columns_use_unit_of_their_name(train_records: list[RunRecord]) -> None:
    text = render(train_records, "csv", columns=["size", "median_s", "median_ms", "range_s"])
    first = next(csv.DictReader(io.StringIO(text)))
    assert list(first) == ["size", "median_s", "median_ms", "p10_s", "p90_s"]
    assert float(first["median_ms"]) == pytest.approx(1e3 * float(first["median_s"]))
    assert float(first["p10_s"]) <= float(first["median_s"]) <= float(first["p90_s"])


def test_csv_ranges_keep_both_ends_in_their_unit_and_phase(train_records: list[RunRecord]) -> None:
    text = render(train_records, "csv", columns=["size", "range_s", "range_ms", "backward.range_ms", "backward.p90_s"])
    first = next(csv.DictReader(io.StringIO(text)))
    ranges = ["p10_s", "p90_s", "p10_ms", "p90_ms", "backward.p10_ms", "backward.p90_ms"]
    assert list(first) == ["size", *ranges, "backward.p90_s"]
    assert float(first["p90_ms"]) == pytest.approx(1e3 * float(first["p90_s"]))
    assert float(first["backward.p90_ms"]) == pytest.approx(1e3 * float(first["backward.p90_s"]))


def test_changed_preset_sorts_after_its_preset(build: Build) -> None:
    models = [preset("xl"), preset("large", num_layers=32), preset("large"), preset("small")]
    (table,) = tables([build(RunConfig(model=model), 0.1, 1e12, 10**9) for model in models], columns=["size"])
    assert table.columns[0].cells == ("small", "large", "large+num_layers=32", "xl")


@pytest.mark.parametrize("width", [None, 40])
def test_plain_rows_keep_all_columns_in_narrow_terminal(width: int | None) -> None:
    names = [f"column_number_{i}_s" for i in range(12)]
    text = render_rows([dict.fromkeys(names, 1.0), dict.fromkeys(names, 2.5)], width=width)
    assert all(f"column number {i}" in text for i in range(12))
    assert text.count("2.50") == 12


def test_caption_of_custom_workload_omits_unused_fields(build: Build) -> None:
    record = build(RunConfig(workload="mine.py:step"), 0.01, 1e12, 10**9)
    plain = replace(record, results={"ran": [{"tokens": None, "takes_config": False}]})
    (table,) = tables([plain])
    where, how = "mine.py:step on NVIDIA H200", "medians of 10 steps (wall clock)"
    assert table.caption == f"{where}; constant: torch 2.11.0+cu130; {how}"
    assert "naive" not in render([plain])
    assert table.columns[0].cells == ("mine.py:step",)


def test_cells_of_workload_without_config_are_noted_as_same_step(build: Build) -> None:
    def made(takes_config: bool, **fields: int) -> RunRecord:
        record = build(RunConfig(workload="mine.py:step", **fields), 0.01, 1e12, 10**9)
        return replace(record, results={"ran": [{"tokens": None, "takes_config": takes_config}]})

    output = "mine.py:step takes no configuration, so 2 cells ran the same step; to vary sizes, pass a"
    twice = [made(False, batch_size=n) for n in (4, 8)]
    assert output in " ".join(tables(twice)[0].notes)
    others = [
        [made(True, batch_size=n) for n in (4, 8)],
        [made(False, seed=n) for n in (0, 1)],
        [replace(twice[0], repeat=n) for n in (0, 1)],
    ]
    for records in others:
        assert "the same step" not in " ".join(tables(records)[0].notes)


@pytest.mark.parametrize("format", ["terminal", "markdown", "csv"])
def test_profiled_records_have_a_separate_table(build: Build, format: str) -> None:
    records = [build(RunConfig(profiler=name, batch_size=n), s, 1e12, 10**9) for name, n, s in CLEAN_AND_PROFILED]
    if format == "csv":
        assert "profiler" in render(records, format).splitlines()[0].split(",")
        return
    clean, profiled = tables(records)
    assert (len(clean.statuses), len(profiled.statuses)) == (2, 1)
    assert "nsys" not in clean.caption
    assert "under nsys, times include its overhead" in profiled.caption
    assert "under nsys" in render(records, format)


def test_phases_keep_order_of_a_step() -> None:
    found = pd.DataFrame({"phase": ["forward", "optimizer", "step", "forward", "synchronize", "optimizer", "step"]})
    assert columns.phases_of(found) == ["forward", "synchronize", "optimizer", "step"]
    assert columns.phases_of(pd.DataFrame({"phase": ["skew", "transfer", "step"]})) == ["skew", "transfer", "step"]


def test_thousands_are_separated_in_counts_but_not_in_names_and_options(train_records: list[RunRecord]) -> None:
    row = {"step": 1000, "rank": 1000, "kernels": 1000, "calls": 1000, "context_length": 1024, "time_s": 1234.5}
    assert render_rows([row], "terminal").split()[-6:] == ["1000", "1000", "1,000", "1,000", "1024", "1,234"]
    (made,) = tables(train_records[:1], columns=["context_length", "tokens"])
    assert [column.cells[0] for column in made.columns[:2]] == ["256", "1,024"]


def test_counts_per_step_have_decimals_only_as_means() -> None:
    rows = [{"kernel": "a", "calls_per_step": 13.0}, {"kernel": "b", "calls_per_step": 1024.0}]
    assert [line.split() for line in render_rows(rows).splitlines()[-2:]] == [["a", "13"], ["b", "1,024"]]
    text = render_rows(
        [*rows, {"kernel": "c", "calls_per_step": 1 / 3}], titles={"kernel": "", "calls_per_step": "calls"}
    )
    assert "mean calls" in text
    assert [line.split()[-1] for line in text.splitlines()[-3:]] == ["13.0", "1,024", "0.333"]
    assert render_rows(rows, "csv") == "kernel,calls_per_step\na,13.0\nb,1024.0\n"


def test_values_of_very_different_magnitude_have_their_own_unit(build: Build) -> None:
    rows = [{"size_bytes": 2**20 * n, "time_s": 1e-3} for n in (1, 3)] + [{"size_bytes": 512, "time_s": 2e-3}]
    lines = [line.split() for line in render_rows(rows).splitlines()[-3:]]
    assert lines == [["1.00", "MiB", "1.00"], ["3.00", "MiB", "1.00"], ["512", "B", "2.00"]]
    assert render_rows(rows, "csv").endswith("512,0.002\n")
    records = [
        build(train_config(size), 0.01, 1e12, n) for size, n in (("small", 2**30), ("large", 2**30), ("xl", 2**18))
    ]
    (table,) = tables(records, columns=["size", "peak_allocated_bytes", "peak_allocated_gib"])
    assert [c.cells for c in table.columns[1:]] == [("1.00 GiB", "1.00 GiB", "256 KiB"), ("1.00", "1.00", "0.000244")]


class Sides(TypedDict):
    what: str
    a_bytes: Annotated[int, Column("baseline", own_unit=True)]
    b_bytes: Annotated[int | None, Column("candidate", own_unit=True)]


def test_cells_with_own_units_are_readable_side_by_side() -> None:
    rows = [{"what": "weights", "a_bytes": 3 * 2**30, "b_bytes": 512}, {"what": "loss", "a_bytes": 0, "b_bytes": None}]
    lines = render_table(Table("sides", Sides, "two sides"), rows).splitlines()
    assert [line.split() for line in lines[-2:]] == [["weights", "3.00", "GiB", "512", "B"], ["loss", "0", "–"]]


def test_bytes_below_one_kib_are_counted() -> None:
    rows = [{"what": "loss", "size_bytes": 16}, {"what": "norm", "size_bytes": 5120}, {"what": "w", "size_bytes": 4096}]
    assert [line.split()[1:] for line in render_rows(rows).splitlines()[-3:]] == [
        ["16", "B"],
        ["5.00", "KiB"],
        ["4.00", "KiB"],
    ]
    assert [line.split()[1:] for line in render_rows(rows[:1]).splitlines()[-1:]] == [["16"]]


def test_caveats_of_a_loop_name_remedies_for_a_loop(build: Build) -> None:
    record = build(train_config("small"), 0.01, 1e12, 2**30)
    record = replace(record, warnings=(Caveat("unstable", "the steps span 13%", "an earlier wording"),))
    (caveat,) = counted_caveats([record])
    assert "--rounds" in caveat.remedy
    (caveat,) = counted_caveats([replace(record, config=record.config | {"workload": "loop mine"})])
    assert caveat.remedy.endswith("cs-systems run --steps 20:70, or Recorder(warmup=20, steps=50)")


def test_shortest_phases_of_a_loop_are_hidden_first_in_a_narrow_terminal(build: Build) -> None:
    record = build(train_config("small"), 0.1, 1e12, 2**30)
    assert record.measurement is not None
    phases = {"input": 0.002, "forward": 0.03, "clip": 0.001, "backward": 0.06, "zero_grad": 0.003, "host_sync": 0.004}
    samples = tuple(replace(s, phases_s=phases, submit_s=phases, lag_s=None) for s in record.measurement.samples)
    measured = replace(record.measurement, samples=samples)
    loop = replace(record, config=record.config | {"workload": "loop mine"}, measurement=measured)
    for width, hidden in ((60, "clip (ms)"), (45, "clip (ms), input (ms), zero_grad (ms)")):
        text = render([loop], width=width)
        assert max(map(len, text.splitlines())) <= width
        assert f"{hidden}; widen the terminal" in text.replace("\n", " ")
    assert "fwd" in text


def test_narrow_terminal_shortens_options_of_strategies(build: Build) -> None:
    strategies = {"ddp_flat": (), "torch_ddp": ("gradient_as_bucket_view=true",), "fsdp": ("compute_dtype=bf16",)}
    records = [
        build(replace(train_config("small"), strategy=name, strategy_args=args, world_size=2), 0.1, 1e12, 10**9)
        for name, args in strategies.items()
    ]
    text = render(records, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "torch_ddp:gabv=true: torch_ddp:gradient_as_bucket_view=true" in text.replace("\n", " ")
    assert "\ntorch_ddp:gabv=true  " in text
    assert "\nfsdp:cd=bf16  " in text
    assert "torch_ddp:gradient_as_bucket_view=true  " in render(records, width=200)


def test_warmup_is_a_column_only_where_cells_differ_in_nothing_else(build: Build) -> None:
    records = [
        build(replace(train_config(size), warmup=warmup), 0.1, 1e12, 10**9)
        for size in ("small", "medium")
        for warmup in (0, 5)
    ]
    shown = [{column.name for column in tables(chosen)[0].columns} for chosen in (records, records[1:3])]
    assert ["warmup" in names for names in shown] == [True, False]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("my_basics.model:MyTransformerLM", "my_basics.mode…TransformerLM"),
        ("aten::native_layer_norm_backward_x", "aten::native_layer_norm_backward_x"),
        ("x: a text of more than 28 characters", "x: a text of more than 28 characters"),
    ],
)
def test_only_the_name_of_own_code_is_shortened(name: str, shown: str) -> None:
    column = columns.Column("code", "code", "", (name,), (name,), numeric=False)
    (short,) = with_short_code(TextTable("", (column,), (), ("ok",))).columns
    assert short.cells == (shown,)


def test_name_of_own_code_is_shortened_before_a_column_is_dropped() -> None:
    name = "tests/adapters.py:get_flashattention_autograd_function_pytorch"
    rows = [{"attention": each, "forward_s": 0.1, "backward_s": 0.2, "step_s": 0.3} for each in ("naive", name)]
    narrow = render_rows(rows, width=60)
    assert "tests/adapters…ction_pytorch" in narrow
    assert "hidden columns" not in narrow
    assert name in render_rows(rows, width=200)
