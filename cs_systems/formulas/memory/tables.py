"""Tables of measured memory, with the predictions by the formulas of this folder."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from cs_systems.core.tables import Column, Table


class PreflightRow(TypedDict):
    """Prediction for a cell before it runs; `reason` says why it cannot run here."""

    reason: str | None
    predicted_peak_bytes: int | None
    device_memory_bytes: int | None  # memory limit, if one is set


class MemoryRow(TypedDict):
    """Memory of the whole cell, in `memory`; for a cell that `--skip-oom` skipped, its `PreflightRow`."""

    predicted_peak_bytes: int | None
    peak_allocated_bytes: NotRequired[int | None]
    memory_limit_bytes: NotRequired[int | None]
    peak_reserved_bytes: NotRequired[int | None]
    failed_allocation_bytes: NotRequired[int | None]  # only for a cell that ran out of memory
    reason: NotRequired[str | None]
    device_memory_bytes: NotRequired[int | None]


class PeaksRow(TypedDict):
    """Peaks of memory that a row contains; None if another row has them."""

    peak_allocated_bytes: Annotated[int | None, Column("peak")]
    peak_reserved_bytes: int | None


class MemoryInUse(TypedDict):
    """Memory in use on the device; for a CPU, on the host."""

    allocated_bytes: Annotated[int | None, Column("alloc.")]  # by tensors
    reserved_bytes: int | None  # by the allocator
    # by all processes
    device_used_bytes: Annotated[
        int | None, Column("device", "device: in use by all processes, the CUDA context included")
    ]
    # of this process on the host; None on a GPU, where it says nothing about the device
    resident_bytes: Annotated[int | None, Column("process", "process: resident memory, Python and torch included")]


class MemoryReading(MemoryInUse, PeaksRow):
    """Memory at the end of a phase, and the phase's peaks. Step 0 is what was built before the first step."""

    step: int
    phase: str


class MemoryPhaseRow(MemoryReading):
    """Memory reading with the closed form's bytes, in `memory_phases`."""

    predicted_allocated_bytes: Annotated[int | None, Column("predicted")]
    predicted_peak_bytes: Annotated[int | None, Column("predicted")]
    # measured peak minus predicted peak
    residual_bytes: Annotated[int | None, Column("off", "off: measured peak minus predicted peak", signed=True)]


class MemoryComponentRow(TypedDict):
    """Bytes of a component after a phase by the closed form, in `memory_components`."""

    step: int
    phase: str
    component: str
    bytes: int


class ForecastPhase(TypedDict):
    """Memory of one phase of a step on fake tensors: bytes by component at its end and at its peak."""

    step: int
    phase: str
    components: dict[str, int]
    peak_components: dict[str, int]


class ForecastComponentRow(TypedDict):
    """Component of `ForecastPhase`, in `memory_forecast`."""

    step: int
    phase: str
    component: str
    bytes: int
    peak_bytes: int


class UnpredictedRow(TypedDict):
    """Reason that no memory was predicted, and what to do, in `memory_unpredicted`."""

    reason: str


class ForecastRow(TypedDict):
    """Prediction of a training step by running it on fake tensors; `reason` says why it could not run."""

    reason: str | None
    peak_bytes: int | None
    reserved_bytes: int | None  # by the caching allocator; None on a CPU
    flops: int | None  # FLOPs of one step, including recomputation
    phases: list[ForecastPhase]
    reads: list[str]  # fields of the configuration that have an effect
    stacks: dict[str, int]  # path of each list of repeated blocks, and their number
    # assumptions about GPU libraries that may allocate more or less, with the direction of the error
    caveats: list[str]


class MemoryPartRow(TypedDict):
    """Memory in use on the device by owner, in `memory_parts`, from tensors up; a `total` row is the sum so far.

    tensors: as requested. cuBLAS workspaces: measured by freeing them. rounding: the bytes that the allocator counts in
    addition. cache: reserved and free, in whole blocks and in pieces of blocks that are in use. other processes: by
    NVML. context: the rest, which no allocator of this process provided.
    """

    part: Annotated[str, Column("owner")]
    bytes: Annotated[int | None, Column("size")]
    total: bool


class StateBytes(TypedDict):
    """Bytes of the storages of parameters, gradients and optimizer state, each counted once."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int


class NamedTensor(TypedDict):
    """Tensor of a training state that is alive on a GPU: a row of the file with the names of a snapshot's tensors."""

    kind: str  # "parameter", "gradient", "buffer" or "optimizer_state"
    name: str
    address: int
    bytes: int
    shape: list[int]
    dtype: str
    device: int


class StateReading(MemoryReading, StateBytes):
    """Memory reading with the bytes of the training state."""


class RankMemoryRow(TypedDict):
    """Component of one rank's memory after a stage of the step, in `rank_memory`.

    The component `allocated` has no expected bytes; only its parts do.
    """

    rank: int
    step: int
    stage: str
    component: str
    bytes: int | None
    expected_bytes: int | None


class ResidualRow(TypedDict):
    """Tensor that forward keeps for backward, in `residuals`; `layers.*` stands for every block."""

    module: str
    operation: str | None
    shape: str
    dtype: str
    bytes: int  # bytes of one tensor
    count: int
    total_bytes: Annotated[int, Column("kept")]  # bytes of distinct storages; 0 for a parameter
    share: Annotated[float, Column("of all")]  # share of all kept bytes except parameters
    parameter: bool
    of_block: NotRequired[  # share of the bytes that its blocks keep; None outside of blocks
        Annotated[float | None, Column("of one", "of one: share of what one block keeps")]
    ]


class KeptByBlock(TypedDict):
    """Bytes that a block keeps for backward, in distinct storages without parameters; outside of blocks, by module."""

    block: str
    bytes: Annotated[int, Column("kept")]
    checkpoint: bool  # whether a checkpoint begins with this block and keeps its input


class ResidualBlockRow(KeptByBlock):
    """Bytes that a block keeps, measured and by formula, in `residual_blocks`."""

    predicted_bytes: Annotated[int | None, Column("predicted", "predicted: by formula")]
    blocks: int  # number of blocks, from this one on, under one checkpoint


class BackwardChange(TypedDict):
    """Change of the allocated bytes by a block's backward in the first step.

    Its gradients are allocated, and the tensors that it kept are freed.
    """

    block: str
    change_bytes: Annotated[int, Column("allocated")]


class BackwardBlockRow(BackwardChange):
    """Change of memory by a block's backward, measured and by formula, in `backward_blocks`."""

    gradient_bytes: Annotated[int | None, Column("gradients")]
    predicted_bytes: Annotated[
        int | None,
        Column(
            "predicted", "predicted: gradients that a block's backward allocates, minus the tensors that the block kept"
        ),
    ]  # gradients minus the tensors kept by forward


class ResidualStreamRow(TypedDict):
    """Size of the tensor passed between blocks, in `residual_stream`."""

    bytes: int


MEMORY = Table("memory", MemoryRow, "peaks of the whole cell, and the memory that was predicted")
MEMORY_PHASES = Table(
    "memory_phases",
    MemoryPhaseRow,
    "memory after each phase, and its peak",
    "step phase allocated_bytes predicted_allocated_bytes peak_allocated_bytes predicted_peak_bytes residual_bytes "
    "reserved_bytes device_used_bytes resident_bytes",
)
MEMORY_COMPONENTS = Table(
    "memory_components",
    MemoryComponentRow,
    "predicted memory by component, after each phase of the second step",
)
MEMORY_FORECAST = Table("memory_forecast", ForecastComponentRow, "memory of a step on fake tensors, by component")
MEMORY_UNPREDICTED = Table("memory_unpredicted", UnpredictedRow, "reasons that no memory was predicted")
MEMORY_PARTS = Table(
    "memory_parts",
    MemoryPartRow,
    "device memory by owner, after the last step",
    "part bytes",
    notes=("=: sum of the rows above",),
)
RANK_MEMORY = Table("rank_memory", RankMemoryRow, "memory of each rank by component, after each stage of the step")
RESIDUALS = Table(
    "residuals",
    ResidualRow,
    "tensors that forward keeps for backward",
    "module operation shape dtype count total_bytes share of_block",
)
RESIDUAL_BLOCKS = Table(
    "residual_blocks", ResidualBlockRow, "kept for backward by each block", "block bytes predicted_bytes"
)
RESIDUAL_STREAM = Table("residual_stream", ResidualStreamRow, "size of the tensor between blocks")
BACKWARD_BLOCKS = Table("backward_blocks", BackwardBlockRow, "change of allocated memory during each block's backward")
