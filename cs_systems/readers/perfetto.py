"""Format of the binary traces that Perfetto, rocprofv3, PyTorch and other programs write."""

from __future__ import annotations

from cs_systems.core.formats import Format, imported

SUFFIXES = (".pftrace", ".perfetto-trace")
FORMAT = Format(
    title="a binary trace of Perfetto",
    matches=imported("cs_systems.readers._perfetto", "matches"),
    suffixes=SUFFIXES,
    read=imported("cs_systems.readers._perfetto"),
    record="`rocprofv3 --runtime-trace --output-format pftrace -- python train.py`",
    lacks="grids and the device's name. Kernels follow the writer of rocprofv3: no recording that has them was at hand",
)
