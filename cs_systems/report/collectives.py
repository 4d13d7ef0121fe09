"""Collectives in reports: columns of the frame, fits over message sizes, and set-up times."""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, TypedDict

from cs_systems.core.collectives import BUS_FACTORS, algbw, busbw
from cs_systems.core.tables import Column, table
from cs_systems.formulas.communication import LINK, SETUP, SetupRow
from cs_systems.formulas.latency_bandwidth import Fit, fit
from cs_systems.record import RAN, RunRecord
from cs_systems.report.series import CellColumn

TRANSFER = "transfer"
# columns of the table of cells that have a note of their own for one phase
OF_PHASE = {
    "skew.median_s": CellColumn(note="skew: longest time that a rank waited for the others before the calls"),
}


class CellColumns(TypedDict):
    """Columns of a collective's cell in the table of cells, besides its fields."""

    backend: str | None
    link_bytes_per_s: float | None
    link_source: str | None
    start_s: float | None
    init_process_group_s: float | None
    new_group_s: float | None
    first_call_s: float | None


class StepColumns(TypedDict):
    """Columns of a collective's step in the table of cells."""

    call_s: Annotated[
        float,
        Column("per call", "per call: median time of one call on the slowest rank, after all ranks are ready"),
    ]
    algbw_bytes_per_s: Annotated[
        float | None,
        Column(
            "algbw",
            "algbw: message size / time; busbw: algbw × 2(n−1)/n for all_reduce, × 1 for broadcast, × (n−1)/n for the "
            "others",
        ),
    ]
    busbw_bytes_per_s: Annotated[float | None, Column("busbw")]
    link_share: Annotated[
        float | None,
        CellColumn(
            "of the link",
            "of the link: busbw as a share of the peak bandwidth of a GPU's links in one direction",
            peak=("link_bytes_per_s", "link_source"),
        ),
    ]


class Line(NamedTuple):
    """Key of one fit: the calls of one collective and dtype on a number of ranks, over message sizes."""

    collective: str
    dtype: str
    world_size: int


class LineColumns(TypedDict):
    """Columns that identify a line."""

    collective: str
    dtype: str
    world_size: Annotated[int, Column("ranks")]


class FitRow(LineColumns):
    """Fit of t(n) = α + n/β to the calls of a line."""

    sizes: int
    latency_s: Annotated[float, Column("α")]
    algbw_bytes_per_s: Annotated[float | None, Column("β")]
    busbw_bytes_per_s: Annotated[float | None, Column("β as busbw")]
    half_bandwidth_bytes: Annotated[float | None, Column("α β")]
    r_squared: Annotated[float | None, Column("R²")]
    worst_residual_share: float | None


class LineSetupRow(LineColumns, SetupRow):
    """Set-up of a line's process, with the first call of the smallest size and a later one."""

    size_bytes: int
    call_s: Annotated[float | None, Column("per call")]


def cell(record: RunRecord) -> CellColumns | None:
    """Return the columns of a collective's cell; None if the record is of another workload."""
    if not record.config.get("collective"):
        return None
    link, setup = LINK.first_or_empty(record.results), SETUP.first_or_empty(record.results)
    return {
        "backend": RAN.first_or_empty(record.results).get("backend"),
        "link_bytes_per_s": link.get("peak_bytes_per_s"),
        "link_source": link.get("source"),
        "start_s": setup.get("start_s"),
        "init_process_group_s": setup.get("init_process_group_s"),
        "new_group_s": setup.get("new_group_s"),
        "first_call_s": setup.get("first_call_s"),
    }


def step(record: RunRecord) -> StepColumns | None:
    """Return the columns of a collective's step; None if the record has not measured a collective."""
    found, seconds = cell(record), call_s(record)
    if not found or not seconds:
        return None
    bus = busbw(record.config["collective"]["collective"], size_bytes(record), world_size(record), seconds)
    link = found["link_bytes_per_s"]
    return {
        "call_s": seconds,
        "algbw_bytes_per_s": algbw(size_bytes(record), seconds) if bus else None,
        "busbw_bytes_per_s": bus,
        "link_share": bus / link if bus and link else None,
    }


def call_s(record: RunRecord) -> float | None:
    """Return the median duration of one call, if a sample holds several calls."""
    measurement, shape = record.measurement, record.config.get("collective")
    if measurement is None or not shape or (transfer_s := measurement.median_s(TRANSFER)) is None:
        return None
    return transfer_s / int(shape["calls"])


def world_size(record: RunRecord) -> int:
    return int(record.config.get("world_size", 1))


def size_bytes(record: RunRecord) -> int:
    return int(record.config["collective"]["size_bytes"])


def lines(records: Iterable[RunRecord]) -> dict[Line, list[RunRecord]]:
    """Return the measured clean records of each line, sorted by size."""
    found: dict[Line, list[RunRecord]] = {}
    for record in records:
        if call_s(record) and not record.is_profiled:
            shape = record.config["collective"]
            found.setdefault(Line(shape["collective"], shape["dtype"], world_size(record)), []).append(record)
    return {line: sorted(of, key=size_bytes) for line, of in found.items()}


def fitted(records: Sequence[RunRecord]) -> Fit | None:
    """Fit t(n) = α + n/β to the calls of one line; None for fewer than 3 sizes, or one rank, which sends nothing."""
    if world_size(records[0]) == 1:
        return None
    return fit([size_bytes(record) for record in records], [call_s(record) or 0.0 for record in records])


@table(
    "fit of time by size: t(n) = α + n/β",
    "collective dtype world_size latency_s algbw_bytes_per_s busbw_bytes_per_s half_bandwidth_bytes r_squared "
    "worst_residual_share",
    notes=(
        "α: latency; β: the algbw that large sizes approach; α β: the size at which half of β is reached",
        "the fit minimizes relative residuals, so that all sizes have equal weight; R² is computed from them",
        "a worst residual above about 10% means that one line does not describe all sizes",
    ),
)
def fits(records: Iterable[RunRecord]) -> list[FitRow]:
    """Return one row per line that has a fit."""
    rows: list[FitRow] = []
    for line, found in lines(records).items():
        if (through := fitted(found)) is None:
            continue
        bandwidth = through.bandwidth_bytes_per_s
        factor = BUS_FACTORS[line.collective](line.world_size)
        rows.append(
            {
                "collective": line.collective,
                "dtype": line.dtype,
                "world_size": line.world_size,
                "sizes": through.sizes,
                "latency_s": through.latency_s,
                "algbw_bytes_per_s": bandwidth,
                "busbw_bytes_per_s": bandwidth * factor if bandwidth else None,
                "half_bandwidth_bytes": through.half_bandwidth_bytes,
                "r_squared": through.r_squared,
                "worst_residual_share": through.worst_relative_residual,
            }
        )
    return rows


@table(
    "set-up, before the first sample",
    "collective dtype world_size start_s init_process_group_s new_group_s size_bytes first_call_s call_s",
    notes=(
        "start: from the start of a rank's process until it joins the others; init: init_process_group, on GPUs with "
        "the creation of the communicator; new group: a second group of the same ranks",
        "of the slowest rank, once per process, and not part of the times above",
    ),
)
def setups(records: Iterable[RunRecord]) -> list[LineSetupRow]:
    """Return one row per line with its set-up times."""
    rows: list[LineSetupRow] = []
    for line, found in lines(records).items():
        if (first := cell(found[0])) is None:
            continue
        rows.append(
            {
                "collective": line.collective,
                "dtype": line.dtype,
                "world_size": line.world_size,
                "size_bytes": size_bytes(found[0]),
                "start_s": first["start_s"],
                "init_process_group_s": first["init_process_group_s"],
                "new_group_s": first["new_group_s"],
                "first_call_s": first["first_call_s"],
                "call_s": call_s(found[0]),
            }
        )
    return rows
