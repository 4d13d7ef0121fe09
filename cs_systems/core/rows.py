"""Rows of a record's tables, as it stores them: the columns of each table with their units, as types that mypy checks.

`Results` names every table of this package. A row is a plain dictionary, as JSON stores it. The name of a column holds
its unit: `_s` seconds, `_bytes`, `_flops`, `_share` a fraction of 1. None is a value that is unknown. A column that is
`NotRequired` was added later: records of older versions lack it.
"""

# No `from __future__ import annotations`: it would compile every annotation as a text when this file is imported.
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

# Row of any table, for code that treats every table alike: printing, choosing columns, merging. It is only read.
Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
SIDES = ("baseline", "candidate")  # of a comparison; columns are named `a` and `b`


class Ran(TypedDict, total=False):
    """Description of what really ran, in `ran`: one row, with the columns that apply to the workload.

    A user's own workload may add columns of its own.
    """

    tokens: int | None  # in a step, of this rank
    samples: int | None  # of a user's own batch, in a step, of this rank
    world_tokens: int | None  # in a step, of all ranks
    timed_tokens: int | None  # in all timed steps, of all ranks; only where their batches differ in size
    timed_samples: int | None
    parameters: int
    loss: float | None  # of the last step
    attention: str
    attention_version: str | None
    attention_path: str  # source file of a user's own attention, and its hash
    attention_sha256: str
    workload_path: str
    workload_sha256: str
    inputs_path: str
    inputs_sha256: str
    parts_path: str  # those of a user's own parts, with spaces between
    parts_sha256: str
    checkpoint: str
    optimizer: str | None
    rounds: int
    resident: bool | None  # whether the workload stayed in memory between rounds; None with one round
    takes_config: bool  # whether the configuration had an effect on a user's own workload
    graph_breaks: int | None  # of torch.compile; None where the cell compiled nothing itself
    uses: str  # fields of the configuration that a user's own workload read, or that applied to it; spaces between
    precision: str
    mode: str
    d_head: int
    l2: str
    launches_hidden: bool
    graph: str | None
    executed_d_head: int | None
    block_q: int | None
    block_k: int | None
    backend: str  # of collectives, with its version
    world_size: int
    calls: int  # collectives in one `transfer`
    sent_bytes: int  # size of a rank's buffer
    received_bytes: int


class GraphBreakRow(TypedDict):
    """Place where torch.compile left the graph, in `graph_breaks`; the first ones of a cell."""

    reason: str
    place: str | None  # innermost line of the user's code: `train.py:12 in forward`
    count: int


class PreflightRow(TypedDict):
    """Prediction for a cell before it runs; `reason` says why it cannot run here."""

    reason: str | None
    predicted_peak_bytes: int | None
    device_memory_bytes: int | None  # the limit of the memory, where one is set


class MemoryRow(TypedDict):
    """Memory of the whole cell, in `memory`; of a cell that `--skip-oom` left out, its `PreflightRow`."""

    predicted_peak_bytes: int | None
    peak_allocated_bytes: NotRequired[int | None]
    memory_limit_bytes: NotRequired[int | None]
    peak_reserved_bytes: NotRequired[int | None]
    failed_allocation_bytes: NotRequired[int | None]  # of a cell that ran out of memory
    reason: NotRequired[str | None]
    device_memory_bytes: NotRequired[int | None]


class CostRow(TypedDict):
    """Cost of a phase by formula, in `cost`; `step` is the sum of the phases."""

    phase: str
    model_flops: int | None
    hardware_flops: int | None
    bytes: int | None
    score_flops: NotRequired[int | None]  # of the matrix products over the attention scores
    score_bytes: NotRequired[int | None]


class CeilingRow(TypedDict):
    """Peak rates of the device, in `ceiling`; `source` names where they are from."""

    precision: str
    peak_flops_per_s: float
    peak_bytes_per_s: float | None
    source: str


class PeaksRow(TypedDict):
    """Peaks of memory that a row holds, or None where another row does."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None


class RankRow(PeaksRow):
    """Phase of one rank, in `ranks`: medians over the timed steps; the phase `step` holds the peaks."""

    rank: int
    phase: str
    median_s: float
    wait_s: float | None  # for the last rank to begin the phase; None for `step`


class SentRow(TypedDict):
    """Communication of a step by one rank, in `sent`.

    The first two are counted where our own strategies start the collectives, and None where torch starts some.
    """

    collectives: int | None
    sent_bytes: float | None
    formula_sent_bytes: float | None


class SetupRow(TypedDict):
    """Set-up of a process group, in `setup`: times of the slowest rank. All but the last are of its process."""

    start_s: float | None
    init_process_group_s: float | None
    new_group_s: float | None
    first_call_s: float | None  # of this cell


class LinkRow(TypedDict):
    """Ceiling of the rate between GPUs on one board, in `link`."""

    peak_bytes_per_s: float | None
    source: str | None


class PerStep(TypedDict):
    """Kernels of one step: the mean over the steps; the share is of all kernel time unless the table says otherwise."""

    calls_per_step: float
    time_s: float
    share: float


class StepRow(TypedDict):
    """Recorded step on one device, in `steps`.

    It compares the step's time on the host's clock (wall), between the device's events, and on the GPU.
    """

    step: int
    device: int
    kernels: int
    wall_s: float
    event_s: float | None
    gpu_span_s: float  # from the first kernel's start to the last one's end
    kernel_s: float  # summed over kernels
    busy_share: float | None  # of the wall time; overlapping kernels count once; None if kernels were not recorded
    residual_s: float  # wall_s less gpu_span_s
    residual_share: float


class KernelRow(PerStep):
    """Kernel by its full name, in `kernels`, with the launch configuration that took the most time."""

    kernel: str
    family: str
    mean_s: float  # of one call
    grid: str | None
    block: str | None
    registers: int | None  # per thread
    shared_bytes: int | None  # per block
    shapes: int  # number of launch configurations


class FamilyRow(PerStep):
    """Family of kernels, in `families`."""

    family: str


class RatesRow(TypedDict):
    """Rates of a phase's kernels, None where no cost is known."""

    flops: float | None
    achieved_flops_per_s: float | None
    bytes: float | None
    achieved_bytes_per_s: float | None
    ceiling: str | None  # "compute" or "memory": the one that limits
    ceiling_share: float | None  # of the limiting ceiling


class PhaseRow(PerStep, RatesRow):
    """Phase and family of kernels, in `phases`; each phase's family `all` comes first."""

    phase: str
    family: str


class PassesRow(PerStep):
    """Kernel time by pass of the step; None if no kernel of that pass is attributed to any name."""

    forward_s: float | None
    backward_s: float | None


class LayerRow(PassesRow):
    """Layer or named module, in `layers`, in the order of the model."""

    layer: str


class PartRow(PassesRow):
    """Part of the blocks, summed over blocks, in `parts`."""

    part: str


class AttentionRow(PerStep):
    """Phase, part and family inside attention, in `attention`; the share is of the phase's attention."""

    phase: str
    part: str
    family: str


class GapRow(TypedDict):
    """Time of a step without a kernel on a device by cause, in `gaps`; the share is of the step's wall time."""

    device: int
    cause: str
    gaps_per_step: float
    time_s: float
    share: float
    longest_s: float  # of all steps


class RangeRow(TypedDict):
    """Range of the host in a step, in `ranges`: wall time of the host, summed over threads."""

    phase: str | None  # None outside of every phase
    range: str
    calls_per_step: float
    total_s: float
    self_s: float  # without the ranges inside
    share: float  # of the steps' wall time


class RangeTreeRow(TypedDict):
    """Kernel time in a range of the program in one place, in `range_tree`; the share is of all kernel time."""

    range: str  # indented by its depth
    path: str  # names from the outermost range on
    calls_per_step: float  # kernels
    time_s: float
    self_s: float  # without the ranges inside
    share: float
    idle_s: float | None  # when it was open on the host and no kernel ran; None for several devices
    flops: float | None  # of the operators with a formula
    achieved_flops_per_s: float | None


class OperatorRow(TypedDict):
    """Operator with the shapes of its inputs, in `operators`.

    Columns of kernels are None in a trace without kernels. Self time is without the operators inside.
    """

    operator: str
    shapes: str | None  # None where they were not recorded
    calls_per_step: float
    host_s: float
    host_self_s: float
    host_share: float  # self time, of the step's wall time
    kernels_per_step: float | None  # launched by the operator itself
    device_s: float | None  # of the kernels launched in it
    device_self_s: float | None
    share: float | None  # self time, of all kernel time
    flops: float | None  # None where no formula is known
    formula: str | None
    achieved_flops_per_s: float | None  # by the kernels' time; without kernels, by the host's
    caller: str | None  # innermost range around it that takes the most of its time
    callers: int


class ScopeRow(TypedDict):
    """Scope or kernel of a profile of Triton's Proton, with all that is inside it."""

    scope: str  # indented by its depth
    path: str  # names from the outermost scope on
    device: str | None  # of a kernel
    calls: int | None  # launches of kernels
    time_s: float | None  # on the device
    self_s: float | None  # without the nodes inside
    share: float | None  # of the profile's time
    cpu_s: float | None  # of the host, where the program timed the scope
    flops: float | None  # as the program declared
    flops_per_s: float | None
    bytes: float | None  # as the program declared
    bytes_per_s: float | None
    cycles: int | None  # of a scope inside a kernel
    samples: int | None  # of the program counter
    stalled_share: float | None  # of the samples


class ScopeKernelRow(TypedDict):
    """Kernel of a profile of Triton's Proton, summed over all scopes."""

    kernel: str
    device: str
    calls: int | None
    time_s: float | None
    mean_s: float | None
    share: float | None
    flops_per_s: float | None
    bytes_per_s: float | None


class RatioRow(TypedDict):
    """Ratio of backward to forward in a step, in `ratio`, by one measure of time."""

    measure: str
    forward_s: float
    backward_s: float
    backward_to_forward: float


class StreamTimes(TypedDict):
    """Times of one step of a rank's communication and computation."""

    step_s: float
    compute_s: float
    communication_s: float
    hidden_s: float  # communication during computation
    exposed_s: float  # communication alone
    idle_s: float
    collectives: int


class SkewRow(TypedDict):
    """Collectives of one rank in a step; None where the ranks' traces do not fit together."""

    rank: int
    transfer_s: float | None
    waiting_s: float | None  # for the other ranks


class RankOverlapRow(StreamTimes, SkewRow):
    """Median step of one rank, in `overlap` of the profiler `overlap`."""


class FileRow(TypedDict):
    """File in a list of several; None is a value that the file does not have."""

    file: str
    format: str
    device: str | None
    rank: int | None
    duration_s: float | None
    kernels: int | None
    steps: int | None
    cell: str | None  # of the run that wrote the file
    holds: str | None  # tables with data
    command: str | None  # that reads the file


class SnapshotFileRow(TypedDict):
    """Memory snapshot in a list of several."""

    file: str
    device: int
    events: int
    duration_s: float | None
    peak_bytes: int | None
    reserved_bytes: int | None  # at the peak
    category: str | None  # the largest at the peak
    category_share: float | None  # of the peak
    out_of_memory: int  # failed allocations


class JobRankRow(TypedDict):
    """Rank of a job, from the traces of its ranks; times are of one step."""

    rank: int
    steps: int
    step_s: float
    busy_share: float | None  # of the step
    compute_s: float
    communication_s: float
    exposed_s: float  # communication alone
    idle_s: float
    waiting_s: float | None  # for the last rank to arrive at each collective
    transfer_s: float | None  # from the arrival of the last rank
    late_s: float | None  # behind the first rank to arrive, mean of a collective
    last_share: float | None  # of the collectives, where the rank was the last to arrive
    host: str | None
    file: str


class CollectiveRow(TypedDict):
    """Collectives of one kind, group and size in the traces of a job's ranks; times are means of one call."""

    collective: str
    group: str | None
    ranks: int
    size_bytes: int | None  # by the definition of `core.collectives`
    calls_per_step: float
    time_s: float
    waiting_s: float
    transfer_s: float
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    hidden_share: float | None  # of the time
    beside: str | None  # phase and family of the kernels that ran the longest meanwhile


class DeviceOverlapRow(TypedDict):
    """Communication of one device in a step, in `overlap` of the profilers of kernels."""

    device: int
    collectives_per_step: float
    communication_s: float
    hidden_s: float
    exposed_s: float
    hidden_share: float | None  # of the communication; None where there is none
    share: float  # of exposed communication, of the step


class OverlapRow(TypedDict, total=False):
    """Row of `overlap` by any profiler: the columns of `RankOverlapRow` or of `DeviceOverlapRow`."""

    rank: int
    step_s: float
    compute_s: float
    communication_s: float
    hidden_s: float
    exposed_s: float
    idle_s: float
    collectives: int
    transfer_s: float | None
    waiting_s: float | None
    device: int
    collectives_per_step: float
    hidden_share: float | None
    share: float


class Interval(TypedDict):
    """Interval to draw of one step's streams, from the step's start."""

    stream: str  # "compute" or "communication"
    phase: str | None  # that launched the computation
    start_s: float
    end_s: float


class StreamRow(Interval):
    """Interval of one rank, in `streams`."""

    rank: int


class OverheadRow(TypedDict):
    """Cost of profiling, in `overhead`: medians of the wall time of steps; None without enough warm-up."""

    recorded_s: float
    not_recorded_s: float | None  # the last steps of the warm-up
    recorded_to_not_recorded: float | None


class CoverageRow(TypedDict):
    """Extent of a trace, in `coverage`: shares are of the kernel time."""

    profiler: str
    steps: int
    kernels: int
    kernel_s: float
    phase_coverage: float
    layer_coverage: float
    fused_share: NotRequired[float]  # in kernels fused over several layers


class NoteRow(TypedDict):
    """Remark that a table needs, in `notes`; of the whole profile where the table is None."""

    table: str | None
    note: str


class CounterRow(TypedDict):
    """Hardware counters of one launch, in `counters`. `traces.ncu.METRICS` names the metric of each column.

    A share is of the peak that the chip can sustain.
    """

    kernel: str
    ranges: str  # open NVTX ranges, outermost first
    grid: str | None
    block: str | None
    time_s: float | None
    registers: int | None  # per thread
    shared_bytes: int | None  # per block, including the driver's share
    waves: float | None
    occupancy_share: float | None
    highest_occupancy_share: float | None
    sm_efficiency_share: float | None
    sm_share: float | None
    memory_share: float | None
    dram_share: float | None
    dram_read_bytes_per_s: float | None
    dram_write_bytes_per_s: float | None
    load_bytes_per_s: float | None
    store_bytes_per_s: float | None
    shared_load_bytes_per_s: float | None
    shared_store_bytes_per_s: float | None
    shared_load_conflicts: int | None
    shared_store_conflicts: int | None
    warp_efficiency_share: float | None


class MemoryInUse(TypedDict):
    """Memory in use on a device, or on the host where that is the device."""

    allocated_bytes: int | None  # by tensors
    reserved_bytes: int | None  # by the allocator
    device_used_bytes: int | None  # by all processes
    resident_bytes: int | None  # of this process on the host; None on a GPU, where it has no relation to the device


class MemoryReading(MemoryInUse, PeaksRow):
    """Memory at the end of a phase, and the phase's peaks. Step 0 is what was built before the first step."""

    step: int
    phase: str


class MemoryPhaseRow(MemoryReading):
    """Memory reading with the closed form's bytes, in `memory_phases`."""

    predicted_allocated_bytes: int | None
    predicted_peak_bytes: int | None
    residual_bytes: int | None  # the measured peak less the predicted one


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
    flops: int | None  # of one step, recomputation included
    phases: list[ForecastPhase]
    reads: list[str]  # fields of the configuration that have an effect
    stacks: dict[str, int]  # path of each list of repeated blocks, and their number
    caveats: list[str]  # where the libraries of a GPU may allocate more or less, and in which direction the peak errs


class MemoryPartRow(TypedDict):
    """Memory in use on the device by owner, in `memory_parts`, from tensors up; a `total` row is the sum so far.

    tensors: as requested. cuBLAS workspaces: measured by freeing them. rounding: the bytes that the allocator counts in
    addition. cache: reserved and free, in whole blocks and in pieces of blocks that are in use. other processes: by
    NVML. context: the rest, which no allocator of this process gave out.
    """

    part: str
    bytes: int | None
    total: bool


class MemoryRange(TypedDict):
    """Device memory that a phase and layer allocate and free in a step: means over the steps."""

    phase: str
    layer: str
    allocations: float
    allocated_bytes: float
    freed_bytes: float
    change_bytes: float
    most_bytes: int  # in use meanwhile, above that in use when the step began; the largest of all steps


class MemoryRangeRow(MemoryRange):
    """Memory of a range with a block's prediction, in `memory_ranges`.

    Predicted: the bytes kept by a block's forward, and by which its backward changes the bytes in use. None in other
    rows, and where the closed form of eager code without checkpoints does not hold.
    """

    predicted_bytes: int | None


class MemoryRangesOf(TypedDict):
    """Subject of `memory_ranges`, in `memory_ranges_of`: tensors, or the caching allocator's requests."""

    sees: str


class StateBytes(TypedDict):
    """Bytes of the storages of parameters, gradients and optimizer state, each counted once."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int


class NamedTensor(TypedDict):
    """Tensor of a training state that is alive on a GPU: a row of the file that names a snapshot's tensors."""

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

    The component `allocated` has no expected bytes of its own, only its parts have.
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
    bytes: int  # of one
    count: int
    total_bytes: int  # each memory counted once; 0 for a parameter
    share: float  # of all that is kept and no parameter
    parameter: bool


class KeptByBlock(TypedDict):
    """Bytes that a block keeps for backward: each memory once, no parameters. Outside of blocks, by module."""

    block: str
    bytes: int
    checkpoint: NotRequired[bool]  # whether a checkpoint begins with this block and keeps its input


class ResidualBlockRow(KeptByBlock):
    """Bytes that a block keeps, measured and by formula, in `residual_blocks`."""

    predicted_bytes: int | None
    blocks: NotRequired[int]  # how many blocks from this one on are under one checkpoint


class BackwardChange(TypedDict):
    """Change of the allocated bytes by a block's backward in the first step.

    Its gradients are allocated, and the tensors that it kept are freed.
    """

    block: str
    change_bytes: int


class BackwardBlockRow(BackwardChange):
    """Change of memory by a block's backward, measured and by formula, in `backward_blocks`."""

    gradient_bytes: int | None
    predicted_bytes: int | None  # gradients less what forward kept


class ResidualStreamRow(TypedDict):
    """Size of the tensor passed between blocks, in `residual_stream`."""

    bytes: int


class ModuleDtypes(TypedDict):
    """Module of a step with the dtypes of its tensors, in the order of the first calls; names are sorted."""

    module: str
    type: str
    leaf: bool  # whether it has no child modules
    root: bool  # whether no other module called it
    calls: int
    parameters: list[str]
    inputs: list[str]
    outputs: list[str]
    output_gradients: list[str]
    parameter_gradients: list[str]
    autocast: list[str]  # contexts in which it was called, such as `cpu bfloat16` and `off`
    devices: list[str]


class DtypeRow(TypedDict):
    """Dtypes of a module's tensors, of the logits or of the loss, in `dtypes`; names joined by commas.

    `cast` describes a leaf module: `down` (fp32 in, low precision out), `up`, or None if it kept the dtype.
    """

    what: str
    type: str | None
    calls: int | None
    parameters: str | None
    inputs: str | None
    outputs: str | None
    output_gradients: str | None
    parameter_gradients: str | None
    autocast: str | None
    cast: str | None


class AutocastContext(TypedDict):
    """Autocast context that was entered, in `autocast_contexts`; `enabled` is torch's own result, not the argument."""

    device: str
    dtype: str
    enabled: bool


class AccumulationRow(TypedDict):
    """Sum of one number added `count` times, in `accumulation`."""

    variant: str
    accumulator: str  # its dtype
    addend: str
    count: int
    exact: float
    sum: float
    error: float


class SummationRow(TypedDict):
    """Error of a sum of uniform random numbers against float64, in `summation`."""

    method: str
    length: int
    median_relative_error: float
    largest_relative_error: float
    unit_roundoff: float


class NormalizationError(TypedDict):
    """Error of an operation of which some steps are in low precision."""

    error: float | None  # median relative error of the finite rows; None if there are none
    finite: float  # share of rows without inf or NaN
    unit_roundoff: float


class NormalizationRow(NormalizationError):
    """Step of an operation in low precision, in `normalization`."""

    operation: str
    case: str
    step: str


class NormalizationLimits(TypedDict):
    """Sizes of the input from which on, and up to which, a low step gives a wrong result; None if none does."""

    breaks_from: float | None
    breaks_up_to: float | None
    overflows: bool


class NormalizationRangeRow(NormalizationLimits):
    """Sizes at which a step in low precision gives wrong results, in `normalization_range`."""

    operation: str
    step: str


class PrecisionErrorRow(TypedDict):
    """Relative errors of a step in low precision, in `precision_error`; None where an overflow made it infinite."""

    reference: str  # dtype of the reference
    loss_scale: float | None  # factor of the loss before backward; None without scaling
    logits_error: float | None
    loss_error: float | None
    gradient_error: float | None
    worst_parameter: str | None
    worst_parameter_error: float | None
    underflow_share: float | None  # of the gradient's elements that are not 0 in the reference
    nonfinite_share: float | None  # of the gradient's elements


class TrainingCurveRow(TypedDict):
    """Training step, in `training_curve`."""

    step: int
    loss: float  # before the step's update
    loss_scale: float | None  # of that step's loss, for fp16
    skipped: bool  # whether the update was skipped because a gradient overflowed


class Results(TypedDict, total=False):
    """Tables of a record by name. A user's own workload may add tables of any other name."""

    ran: list[Ran]
    memory: list[MemoryRow]
    cost: list[CostRow]
    ceiling: list[CeilingRow]
    graph_breaks: list[GraphBreakRow]
    ranks: list[RankRow]
    sent: list[SentRow]
    setup: list[SetupRow]
    link: list[LinkRow]
    steps: list[StepRow]
    ratio: list[RatioRow]
    phases: list[PhaseRow]
    families: list[FamilyRow]
    kernels: list[KernelRow]
    layers: list[LayerRow]
    parts: list[PartRow]
    attention: list[AttentionRow]
    gaps: list[GapRow]
    overlap: list[OverlapRow]
    ranges: list[RangeRow]
    operators: list[OperatorRow]
    streams: list[StreamRow]
    notes: list[NoteRow]
    overhead: list[OverheadRow]
    coverage: list[CoverageRow]
    counters: list[CounterRow]
    memory_phases: list[MemoryPhaseRow]
    memory_components: list[MemoryComponentRow]
    memory_forecast: list[ForecastComponentRow]
    memory_unpredicted: list[UnpredictedRow]
    memory_parts: list[MemoryPartRow]
    memory_ranges: list[MemoryRangeRow]
    memory_ranges_of: list[MemoryRangesOf]
    rank_memory: list[RankMemoryRow]
    residuals: list[ResidualRow]
    residual_blocks: list[ResidualBlockRow]
    residual_stream: list[ResidualStreamRow]
    backward_blocks: list[BackwardBlockRow]
    dtypes: list[DtypeRow]
    autocast_contexts: list[AutocastContext]
    accumulation: list[AccumulationRow]
    summation: list[SummationRow]
    normalization: list[NormalizationRow]
    normalization_range: list[NormalizationRangeRow]
    precision_error: list[PrecisionErrorRow]
    training_curve: list[TrainingCurveRow]
    modules: Sequence[Row]  # of any model: path, class, block, part, parameters, FLOPs, bytes kept for backward
    tree: Sequence[Row]  # the modules with their times, from a trace
    blocks: Sequence[Row]
    classes: Sequence[Row]


def as_tables(results: Results) -> Tables:
    """Return the same tables for code that looks them up by any name."""
    return cast(Tables, results)


def first_row(results: Results, table: str) -> Row:
    """Return the first row of a table; empty where there is none."""
    return next(iter(as_tables(results).get(table, ())), {})
