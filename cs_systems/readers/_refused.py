"""Known formats that no command reads; the error message names the format and says what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

from cs_systems.core.formats import SQLITE_MAGIC, Format, begins

_NSYS = "export the report again with nsys export -t sqlite"
_ROCPROF = "record again with rocprofv3 --runtime-trace --output-format json"
_JAX = "run the program under nsys profile --trace=cuda,nvtx, and give the report"


def _is_ascend(head: bytes, path: Path) -> bool:
    if head.startswith(SQLITE_MAGIC):
        from cs_systems.readers import _sqlite as sqlite  # a help lists the formats without opening a file

        return "CANN_API" in sqlite.tables(path)
    return re.match(rb'\s*[\[{].*"(Ascend Hardware|CANN)"', head, re.DOTALL) is not None


REFUSED = (
    Format(
        title="an export of nsys in another format than SQLite, which cs-systems cannot read",
        matches=begins(rb'\{"data":\["|data: "|\x89HDF\r\n|PAR1|ARROW1|\xff{4}.{,99}table_name'),
        instead=_NSYS,
    ),
    Format(
        title="a folder of Parquet files, which cs-systems cannot read",
        matches=lambda head, path: path.is_dir() and next(path.glob("*.parquet"), None),
        instead=f"if nsys wrote them, {_NSYS}",
    ),
    Format(
        title="a table of rocprof in CSV, which cs-systems cannot read",
        matches=begins(rb'"?(Kind"?,"?(Agent_Id|Operation)|Domain"?,"?Function|Index"?,"?KernelName)\b'),
        instead=_ROCPROF,
    ),
    Format(
        title="a trace of rocprof before version 3, which cs-systems cannot read",
        matches=begins(rb'\s*\{\s*"traceEvents"\s*:\s*\[\s*\{\s*\}'),
        instead=_ROCPROF,
    ),
    Format(
        title="a profile of the CPU's stacks for speedscope, which holds no kernels",
        matches=begins(rb'\s*\{\s*"\$schema"\s*:\s*"https://www\.speedscope'),
        instead="give a trace of torch.profiler",
    ),
    Format(
        title="a recording of Linux perf or eBPF, which holds no kernels of a GPU",
        matches=begins(rb"PERFILE2|Attaching \d+ probes?\.\.\."),
        instead="give a trace of torch.profiler or nsys of the same program",
    ),
    Format(
        title="an execution trace of PyTorch, which has no times",
        matches=begins(rb'\s*\{[^\[{]*"schema"\s*:\s*"[\d.]+'),
        instead="give the trace that torch.profiler's export_chrome_trace wrote",
    ),
    Format(
        title="a memory timeline of export_memory_timeline, which cs-systems cannot read",
        matches=begins(rb"\s*\[\s*\[|<html>\s*<head>.{,99}<title>GPU Memory Timeline"),
        instead="call torch.cuda.memory._record_memory_history() before and torch.cuda.memory._dump_snapshot(FILE) "
        "after the steps, and give FILE to cs-systems snapshot",
    ),
    Format(
        title="a list of stacks of export_stacks, which has no single kernels",
        matches=begins(rb"[ -:<-z|~]+;[ -z|~]* \d+\n"),
        instead="give the trace that export_chrome_trace wrote",
    ),
    Format(
        title="a profile of JAX or TensorFlow (XPlane), which cs-systems cannot read",
        matches=begins(rb"\n.{1,5}(\x08.)?\x12./(host|device):"),
        suffixes=(".xplane.pb",),
        instead=_JAX,
    ),
    Format(
        title="a trace of JAX or TensorFlow, which does not tell kernels from their launches",
        matches=begins(rb'\s*\{.{,99}"highres-ticks"'),
        instead=_JAX,
    ),
    Format(
        title="a recording of Ascend's profiler, and kernels of NPUs are not read",
        matches=_is_ascend,
        instead="open it in MindStudio Insight",
    ),
)
