"""Format of AMD's rocprofv3: its results as JSON."""

from cs_systems.core.formats import Format, begins, imported

FORMAT = Format(
    title="a result of rocprofv3 in JSON",
    matches=begins(rb'\s*\{\s*"rocprofiler-sdk-tool"'),
    suffixes=(".json", ".json.gz"),
    read=imported("cs_systems.readers._rocprof"),
    record="`rocprofv3 --runtime-trace --output-format json -- python train.py`",
    lacks="operators; with `--kernel-trace` alone also phases. Copies and ranges of roctx follow AMD's schema: no "
    "recording that has them was at hand",
)
