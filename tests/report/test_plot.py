"""Figures of records: the kinds, labels, axes and texts that must be legible."""

import re
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from cs_systems.config import AttentionShape, ConfigError, Precision, RunConfig, preset
from cs_systems.record import RunRecord, read_records
from cs_systems.report import palette
from cs_systems.report.figures import plot
from cs_systems.report.figures.labels import labels
from cs_systems.report.figures.ratios import ratios
from cs_systems.report.figures.warmup import causes
from cs_systems.report.frame import frame
from scripts.studies._legible import problems
from tests.report.conftest import Build, attention_config, failed


def texts_of(drawn: Figure) -> list[str]:
    drawn.draw_without_rendering()
    return [text.get_text() for text in drawn.findobj(Text)]


def test_figure_kinds_depend_on_workload(
    train_records: list[RunRecord], attention_records: list[RunRecord], broken_records: list[RunRecord]
) -> None:
    assert plot.kinds(train_records) == ["phases", "rate", "time", "memory", "warmup"]
    assert plot.kinds(attention_records) == ["rate", "time", "memory", "warmup"]
    assert plot.kinds(broken_records[:4]) == []


def test_same_records_give_identical_files(tmp_path: Path, attention_records: list[RunRecord]) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        plot.save(attention_records, tmp_path / name)
    for ending in ("svg", "png"):
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_labels_of_a_comparison_leave_out_what_all_cells_share() -> None:
    row = {"phase": "step", "ratio": 1.0, "ratio_low": 0.9, "ratio_high": 1.1, "verdict": "no difference"}
    rows: Any = [{**row, "cell": f"small ctx {length} · naive · train-step"} for length in (128, 256)]
    (axes,) = ratios(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["small ctx 128", "small ctx 256"]
    (axes,) = ratios(rows[:1]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["small ctx 128 · naive · train-step"]


@pytest.mark.parametrize("kind", ["phases", "rate", "time", "memory", "warmup"])
def test_figure_has_title_axis_label_and_annotations(kind: str, train_records: list[RunRecord]) -> None:
    drawn = plot.figure(train_records, kind)
    (axes,) = drawn.axes
    assert drawn.get_suptitle().endswith("train_step on NVIDIA H200")
    assert axes.get_xlabel()
    words = " ".join(text.get_text() for of in (axes, *drawn.legends) for text in of.findobj(Text))
    expected = {
        "phases": "oom: predicted 151 GiB",
        "rate": "fp32 ceiling, 67.0 TFLOP/s (NVIDIA H200 data sheet, SXM, dense)",
        "warmup": "compiling",
    }
    assert expected.get(kind, "") in words


def test_figure_omits_profiled_records_when_clean_ones_exist(build: Build) -> None:
    configs = [RunConfig(profiler=name, batch_size=n) for name in ("nsys", "none") for n in (1, 2)]
    records = [build(c, 0.01 * c.batch_size, 1e12, 10**9) for c in configs]
    (axes,) = plot.figure(records, "phases").axes
    assert len(axes.get_yticklabels()) == 2


@pytest.mark.parametrize(("size", "dtype"), [(80, "Int64"), (80.0, "float64"), (80, "object")])
def test_label_omits_fields_that_a_cell_does_not_have(size: float, dtype: str) -> None:
    """A cell that could not run has no size that its kernel computes."""
    data = pd.DataFrame({"attention": ["a", "b"], "executed_d_head": pd.Series([size, None], dtype=dtype)})
    first, second = labels(data, ["attention", "executed_d_head"])
    assert first.startswith("a · padded d_head 80")
    assert second == "b"


def test_families_figure_shows_shares_of_kernel_time(build: Build) -> None:
    times = ({"matmul": 3e-3, "copy": 1e-3}, {"matmul": 1e-3, "copy": 0.96e-3, "optimizer": 0.04e-3})
    records = [build(RunConfig(profiler="kineto", batch_size=n), 0.01, 1e12, 10**9) for n in (1, 2, 4)]
    with_families = [
        replace(r, results=r.results | {"families": [{"family": name, "time_s": t} for name, t in one.items()]})
        for r, one in zip(records, times, strict=False)
    ]
    assert plot.kinds(records)[0] == "phases", "families need the table of families"
    assert plot.kinds(with_families)[0] == "families"
    (axes,) = plot.figure([*with_families, records[2]], "families").axes
    assert [text.get_text() for text in axes.texts] == ["75%", "50%", "25%", "48%", "4.00 ms", "2.00 ms"]
    assert axes.get_legend_handles_labels()[1] == ["matmul", "copy", "optimizer"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["batch 1", "batch 2"]


def test_curves_use_size_as_x_axis_when_sizes_vary(build: Build) -> None:
    """d_head and the presets' contexts follow from the size, so neither is the x axis."""
    for lengths in ((64, 64, 64), (64, 512, 512)):
        cells = zip(("tiny", "small", "medium"), lengths, (1e-3, 0.02, 0.06), strict=True)
        records = [
            build(RunConfig(model=preset(size, context_length=n), attention=name), t * share, 1e12 * t, 10**9)
            for size, n, t in cells
            for name, share in (("naive", 1.0), ("sdpa_flash", 0.8))
        ]
        for kind in ("time", "rate", "memory"):
            drawn = plot.figure(records, kind)
            (axes,) = drawn.axes
            assert axes.get_xlabel() == ("size" if len({*lengths}) == 1 else "size (ctx varies too)")
            assert [text.get_text() for text in axes.get_xticklabels()] == ["tiny", "small", "medium"]
            assert [text.get_text() for text in drawn.legends[0].get_texts()][:2] == ["naive", "sdpa_flash"]


def test_curves_use_field_that_varies_within_a_size_as_x_axis(build: Build) -> None:
    sizes = ("small", "medium")
    configs = [RunConfig(model=preset(size), batch_size=n) for size in sizes for n in (1, 2, 4)]
    records = [build(config, 0.01 * config.batch_size, 1e12, 10**9) for config in configs]
    drawn = plot.figure(records, "time")
    assert drawn.axes[0].get_xlabel() == "batch"
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == list(sizes)


def test_each_mode_has_panel_with_shared_scale(build: Build) -> None:
    modes = ("forward", "forward-backward")
    records = [build(attention_config("naive", s, mode=m), s * 1e-6, 1e9, 10**8) for s in (128, 256) for m in modes]
    panels = plot.figure(records, "time").axes
    assert [axes.get_title() for axes in panels] == list(modes)
    assert panels[0].get_ylim() == panels[1].get_ylim()


def test_dependent_field_does_not_split_curves(build: Build) -> None:
    """heads × d_head is constant, and the padded d_head of a kernel follows from d_head."""
    records = []
    for name in ("naive", "sdpa_flash"):
        for heads in (1, 2, 4):
            config = replace(attention_config(name, 128), shape=AttentionShape(4, heads, 128, 32 // heads))
            record = build(config, heads * 1e-5, 1e9, 10**8)
            ran = {**record.results["ran"][0], "executed_d_head": 32 if name == "sdpa_flash" else 32 // heads}
            records.append(replace(record, results={**record.results, "ran": [ran]}))
    (axes,) = plot.figure(records, "time").axes
    assert [line.get_label() for line in axes.get_lines()] == ["naive", "sdpa_flash"]
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[1, 2, 4]] * 2
    assert axes.get_xlabel() == "heads (d_head varies too)"


def test_attention_phases_are_drawn_only_without_separate_modes(build: Build) -> None:
    both, forward = (
        build(attention_config("naive", 128, mode=mode), 1e-4, 1e9, 10**8) for mode in ("forward-backward", "forward")
    )
    assert plot.kinds([both])[0] == "phases"
    assert "phases" not in plot.kinds([both, forward])


def test_memory_figure_shows_prediction_for_oom_cell(build: Build) -> None:
    fits, long = (attention_config("naive", seq) for seq in (128, 256))
    died = failed(long, "oom", "CUDA out of memory", predicted=4 * 2**30)
    memory = {"predicted_peak_bytes": 4 * 2**30, "peak_allocated_bytes": 2**20}
    died = replace(died, results={**died.results, "memory": [memory]})
    (axes,) = plot.figure([build(fits, 1e-4, 1e9, 2**30), died], "memory").axes
    measured, predicted, missing = ([*line.get_ydata()] for line in axes.get_lines())
    assert isnan(measured[1])
    assert predicted[1] == missing[1] == 4 * measured[0]
    assert isnan(missing[0])


def test_memory_figure_draws_cells_without_timed_steps(build: Build) -> None:
    records = [build(attention_config("naive", seq), 1e-4, 1e9, seq * 2**20) for seq in (128, 256)]
    untimed = [replace(r, measurement=replace(r.measurement, samples=())) for r in records if r.measurement]
    (axes,) = plot.figure(untimed, "memory").axes
    assert [*axes.get_lines()[0].get_ydata()] == [128, 256]


@pytest.mark.parametrize("kind", ["phases", "rate", "time", "memory", "warmup"])
def test_no_text_is_cut_or_overlaps(kind: str, train_records: list[RunRecord]) -> None:
    assert problems(plot.figure(train_records, kind)) == []


def test_cut_and_overlapping_texts_are_found(train_records: list[RunRecord]) -> None:
    drawn = plot.figure(train_records, "time")
    axes = drawn.axes[0]
    for text in ("one", "two"):
        axes.text(0.5, 0.5, text, transform=axes.transAxes)
    drawn.text(0.95, 0.4, "too far to the right")
    assert {"'one' and 'two' overlap", "'too far to the right' is cut"} <= {*problems(drawn)}


def test_warmup_causes_come_only_from_sample_fields(build: Build) -> None:
    measurement = build(RunConfig(), 0.1, 1e12, 10**9).measurement
    assert measurement is not None
    first, *_, last = measurement.samples
    assert causes(first, 1.98e9) == ["compiling 500 ms", "40 cudaMalloc", "clock at 1.20 GHz"]
    assert causes(last, 1.98e9) == []
    assert causes(replace(last, device_mallocs=1165), None) == ["1,165 cudaMalloc"]
    assert causes(replace(last, sm_clock_hz=None), None) == []


def test_page_svg_uses_current_color_and_unique_ids(train_records: list[RunRecord]) -> None:
    one, two = plot.svg(train_records, "time", "a-"), plot.svg(train_records, "time", "b-")
    assert "currentColor" in one
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, two)]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', one)) <= ids[0]


def test_svg_escapes_markup_in_names(build: Build) -> None:
    config = RunConfig(attention="my--><script>alert(1)</script>$x_1$.py:f", rounds=5)
    slow = [build(replace(config, batch_size=n), 0.01 * n, 1e12, 10**9) for n in (1, 2)]
    fast = [replace(r, key=r.key + "x", config={**r.config, "attention": "naive"}) for r in slow]
    assert "<script" not in plot.svg([*slow, *fast], "time")


def test_phases_figure_thins_out_cells_that_do_not_fit_and_counts_them(build: Build) -> None:
    records = [build(RunConfig(batch_size=n), 0.01, 1e12, 10**9) for n in range(1, 91)]
    drawn = plot.figure(records, "phases")
    assert "78 more cells in the table" in " ".join(drawn.axes[0].get_xlabel().split())
    names = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert len(names) == 12
    assert (names[0], names[-1]) == ("batch 1", "batch 90")
    assert problems(drawn) == []


def test_phases_are_drawn_to_scale_next_to_a_mark_of_the_step(build: Build) -> None:
    record = build(RunConfig(), 0.1, 1e12, 10**9)
    assert record.measurement is not None
    samples = [
        replace(s, phases_s={p: t * (2 if (i + list(s.phases_s).index(p)) % 2 else 0.5) for p, t in s.phases_s.items()})
        for i, s in enumerate(record.measurement.samples)
    ]
    record = replace(record, measurement=replace(record.measurement, samples=tuple(samples)))
    (axes,) = plot.figure([record], "phases").axes
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    label = axes.texts[0].get_text()
    assert axes.texts[0].get_position()[0] > max(ends)
    assert "bar: medians of the phases; mark: of the step" in axes.get_xlabel()
    step = frame([record]).set_index("phase")["median_s"]
    assert label == f"{1e3 * step['step']:.0f} ms"
    widths = {container.get_label(): container[0].get_width() for container in axes.containers}
    assert widths["backward"] == pytest.approx(1e3 * step["backward"])
    (mark,) = [line for line in axes.lines if line.get_marker() == "|"]
    assert list(mark.get_xdata()) == pytest.approx([1e3 * step["step"]])


def test_bars_of_steps_that_differ_too_much_show_the_shares_of_the_phases(build: Build) -> None:
    records = [build(RunConfig(batch_size=n), time_s, 1e12, 10**9) for n, time_s in ((1, 0.0001), (2, 0.1))]
    (axes,) = plot.figure(records, "phases").axes
    assert axes.get_xlabel().startswith("% of the step")
    ends = [sum(bar[y].get_width() for bar in axes.containers) for y in (0, 1)]
    assert ends == pytest.approx([100, 100], rel=0.1)
    assert [text.get_text() for text in axes.texts] == ["120 µs", "100 ms"]


def test_legend_of_many_short_phases_is_not_cut(build: Build) -> None:
    """A script's own phases have short names: all of them in one row are wider than the figure."""
    record = build(RunConfig(), 0.1, 1e12, 10**9)
    assert record.measurement is not None
    names = ("input", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "other")
    samples = [replace(s, phases_s=dict.fromkeys(names, s.wall_s / 8)) for s in record.measurement.samples]
    record = replace(record, measurement=replace(record.measurement, samples=tuple(samples)))
    drawn = plot.figure([record], "phases")
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [*names]
    assert problems(drawn) == []


def test_log_axes_have_plain_numbers(train_records: list[RunRecord], attention_records: list[RunRecord]) -> None:
    for records in (train_records, attention_records):
        for kind in ("time", "rate", "memory", "warmup"):
            assert [text for text in texts_of(plot.figure(records, kind)) if "$" in text] == []


def test_curves_beyond_the_colors_stay_visible_and_named(build: Build) -> None:
    sizes = ("tiny", "small", "medium", "large", "xl", "2.7B")
    records = [
        build(RunConfig(model=preset(size), precision=precision, batch_size=n), 0.01 * n * (1 + i), 1e12, 10**9)
        for i, size in enumerate(sizes)
        for precision in (Precision.FP32, Precision.BF16)
        for n in (1, 2)
    ]
    drawn = plot.figure(records, "time")
    assert [text.get_text().split()[0] for text in drawn.legends[0].get_texts()] == [s for s in sizes for _ in range(2)]
    looks = {(line.get_color(), line.get_linestyle()) for line in drawn.axes[0].lines}
    assert len(looks) == 12
    warmup = plot.figure(records, "warmup")
    assert len([line for line in warmup.axes[0].lines if len(line.get_xdata())]) == len(records)
    assert "16 more cells, with a smaller slowest step" in texts_of(warmup)


def test_titles_distinguish_profiled_figures_from_timed_ones(build: Build) -> None:
    records = [build(RunConfig(profiler=name), 0.01, 1e12, 10**9) for name in ("none", "nsys")]
    titles = [plot.figure([record], "phases").get_suptitle() for record in records]
    assert titles[0] != titles[1]
    assert "under nsys" in titles[1]


def test_figure_of_streams_names_the_median_step_that_it_shows() -> None:
    studied = read_records(Path(__file__).parents[2] / "profiles" / "data_parallel_variants")[0]
    drawn = plot.figure([r for r in studied if r.results.get("streams")], "streams")
    assert "in one step of rank 0" in drawn.get_suptitle()
    assert "one profiled step of rank 0, its median one" in drawn.axes[0].get_xlabel().replace("\n", " ")
    assert "step 203 ms\nmedian 210 ms\nexposed 59.1 ms\nhidden 0 s" in texts_of(drawn)
    assert problems(drawn) == []


def test_figure_in_a_page_takes_the_colors_of_the_page(train_records: list[RunRecord]) -> None:
    drawn = plot.svg(train_records, "phases")
    assert "var(--teal)" in drawn
    assert not {shade.light for shade in palette.SHADES.values()} & set(re.findall("#[0-9a-f]{6}", drawn))


def test_undrawable_figure_is_rejected_with_remedy(
    tmp_path: Path, attention_records: list[RunRecord], broken_records: list[RunRecord]
) -> None:
    with pytest.raises(ConfigError, match=r"its name must end in \.svg, \.png or \.pdf"):
        plot.save(attention_records, tmp_path / "figure.bmp")
    with pytest.raises(ConfigError, match="no data for the figure 'phases'; choose rate or time or memory or warmup"):
        plot.figure(attention_records, "phases")
    with pytest.raises(ConfigError, match="unknown figure 'tiem'; did you mean time"):
        plot.figure(attention_records, "tiem")
    with pytest.raises(ConfigError, match="these records have no data for a figure; choose records"):
        plot.figure(broken_records[:4])


def test_labels_name_numbers_and_omit_missing_fields(build: Build) -> None:
    configs = [
        RunConfig(),
        RunConfig(world_size=2, strategy="ddp_flat"),
        RunConfig(world_size=2, strategy="ddp_bucketed", bucket_size_mb=100.0),
    ]
    (axes,) = plot.figure([build(config, 0.1, 1e12, 10**9) for config in configs], "phases").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "single · 1 rank",
        "ddp_flat · 2 ranks",
        "ddp_bucketed · buckets of 100 MB · 2 ranks",
    ]


def test_pdf_is_as_wide_as_a_column_of_a_paper_and_embeds_its_fonts(
    train_records: list[RunRecord], tmp_path: Path
) -> None:
    plot.save(train_records, tmp_path / "figure.pdf", "phases")
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert re.search(rb"/MediaBox \[ ?0 0 234 ", pdf)
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf


def test_caption_says_device_versions_steps_and_spread(train_records: list[RunRecord]) -> None:
    caption = plot.caption(train_records, "phases")
    assert caption.startswith("step time by phase: train_step on NVIDIA H200; constant: ")
    assert "torch 2.11.0+cu130" in caption
    assert re.search(
        r"medians of \d+ steps \(wall clock\); p10 to p90 spans [\d.]+( to [\d.]+)?% of the median$", caption
    )


@pytest.mark.parametrize(("lengths", "warmups", "best"), [(6, 1, "phases"), (7, 1, "time"), (1, 2, "warmup")])
def test_figure_without_a_kind_shows_what_varies(
    train_records: list[RunRecord], lengths: int, warmups: int, best: str
) -> None:
    cells = [
        replace(record, config=replace(record.run_config, seq_len=2**length, warmup=warmup).to_dict())
        for record in train_records[:2]
        for length in range(2, 2 + lengths)
        for warmup in range(1, 1 + warmups)
    ]
    assert plot.best(cells) == plot.best([replace(cell, repeat=n) for cell in cells for n in range(3)]) == best
    assert plot.best([]) is None
