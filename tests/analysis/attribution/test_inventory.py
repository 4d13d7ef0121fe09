"""List of files: formats, and what a row says of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.analysis.attribution.inventory import format_of, row_of_profile
from cs_systems.core.sources import Source
from tests.analysis.attribution.made import PRODUCT, Made

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
SOURCE = Source(Path("a.json"), "a.json", Path("a.json"))


@pytest.mark.parametrize("text", ['{"data":[]}', "notes"], ids=["refused", "unknown"])
def test_file_that_no_command_reads_has_no_format(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "a.txt").write_text(text)
    assert format_of(Source(path, path.name, tmp_path)) is None


@pytest.mark.parametrize(
    ("kernels", "device", "ends_s", "holds"),
    [
        ([], None, 9.0, "ranges"),
        ([(PRODUCT, 8.75)], "NVIDIA H100 80GB HBM3", 9.5, "kernels, ranges"),
        ([(PRODUCT, 8.125), (PRODUCT, 8.75)], "NVIDIA H100 80GB HBM3", 9.5, "kernels, phases, layers, ranges"),
        ([(REDUCE, 8.5)], "NVIDIA H100 80GB HBM3", 9.25, "kernels, phases, overlap, ranges"),
    ],
)
def test_row_of_a_trace_has_its_device_duration_and_tables(
    kernels: list[tuple[str, float]], device: str | None, ends_s: float, holds: str
) -> None:
    made = Made()
    made.range("all", 8.0, 9.0)
    made.range("forward", 8.0, 8.625)
    made.range("block 0", 8.0, 8.25)
    for name, start_s in kernels:
        made.kernel(name, start_s, start_s + 0.75)
    row = row_of_profile(SOURCE, made.profile("all"))
    assert (row["device"], row["duration_s"], row["holds"]) == (device, ends_s - 8.0, holds)
