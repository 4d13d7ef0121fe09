"""Tables of observations about a recorded loop other than its phases: own Python, slow steps, growth, padding, outcome.

A recorder fills them, and the rules of diagnosis read them.
"""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from cs_systems.analysis.comparison.loop_time import LoopTimeRow
from cs_systems.config import Phase
from cs_systems.core.tables import Column, Table

# Shown like functions: Python's collector, wherever it runs, and code around the calls that begin a phase, such as
# hooks.
COLLECTOR, CALLS = "garbage collector", "calls of phases"
OTHER, BETWEEN = "other", "between"  # phases for the time outside of every phase: inside a step, and between two steps
OTHER_PHASES = (OTHER, BETWEEN)
COPY, HOST_SYNC = "copy", "host_sync"
WAITING = frozenset({Phase.INPUT.value, COPY, HOST_SYNC, *OTHER_PHASES})  # phases that launch little work, or none
HOST_MEMORY = "host memory"  # quantity that grows
IN_NO_PHASE = "time in no phase"  # of a step, as a quantity that grows
RESULTS = "results of calls"  # kept by functools.lru_cache or functools.cache
WITHOUT_GRADIENTS = "forward without gradients"  # forward passes of evaluation and rollouts, in samples of the stack


class OwnPythonRow(TypedDict):
    """Function of the program's own code in the usual steps, from samples of the stack in steps after the timing."""

    phase: str
    function: str  # "" for the body of a script
    place: str  # the line with the most time: `train.py:12`
    calls: str | None  # the function called there, such as `time.sleep`; None if it calls none
    writes: bool  # the function also writes: it computes what it logs
    time_s: float  # per step
    share: float  # share of the phase's samples
    samples: int
    feeds_model: bool  # its result is an input of the model, or that of a forward without gradients one of the loss
    place_share: NotRequired[float]  # share of the function's time that `place` has
    polls: NotRequired[str]  # what a loop around a sleep looks at, such as `replies.empty()`
    reads: NotRequired[str]  # container or array with elements that the line reads all, and that gets longer
    reads_more: NotRequired[float]  # elements by which it gets longer with each step
    feeds_loss: NotRequired[bool]  # outside of the phases: the loss is computed from its result


class InnerLineRow(TypedDict):
    """Own line inside forward, loss or backward in the usual steps, by samples of the stack."""

    phase: str
    function: str
    place: str
    method: str | None  # the function that is called there, without what is before its last dot
    source: str
    is_plain: bool  # the line, or its whole function, uses no tensor
    time_s: float  # per step
    samples: int
    late_s: float | None  # of its function: median rest of the call in which a sample was requested; None off a CPU


class SlowStepsRow(TypedDict):
    """Kind of steps that are slower than the usual ones, and the own function that takes most of the extra time."""

    every: int | None
    steps: int
    median_s: float
    usual_s: float  # the median of the usual steps
    extra_s: float  # extra time of all these steps
    total_s: float  # time of the whole loop, without waits for a core
    function: str | None  # None if no such step was sampled
    place: str | None
    calls: str | None
    place_share: float | None  # share of the samples that are in this function
    without_gradients: bool  # forward passes without gradients take most of the extra time
    waits_for_batch: bool  # most of the extra time
    phase: str | None  # phase with most of the extra time
    sampled: int  # number of these steps that were sampled
    looks: NotRequired[int]  # samples of the extra time in `function`
    as_usual: NotRequired[bool]  # usual steps spend nearly as large a share in this place
    worked_share: NotRequired[float | None]  # extra CPU time of the process, as a share of extra_s; None if unknown
    makes_order: NotRequired[bool]  # a sampler's order of the samples takes the time, and not the loader or its workers


class CollectionRow(TypedDict):
    """Time of Python's garbage collector in the recorded steps, and the place where most collections began."""

    steps: int
    collections: int
    time_s: float  # time of all such steps together
    in_steps: int  # smallest number of steps that hold nine tenths of it
    longest_s: float
    total_s: float  # total time of the steps
    function: str | None
    place: str | None
    is_called: bool  # whether the program calls gc.collect there


class GrowthRow(TypedDict):
    """Quantity that grows from step to step."""

    quantity: str  # "host memory", "device memory", "step time" or "time in no phase"
    steps: int
    first: float  # in bytes or seconds
    last: float
    per_step: float
    kept: str | None  # the name of a container that grows in step with it, such as `outs`
    kept_tensors: str | None  # its elements: "tensors with their graphs", "tensors in storages of 1 MiB", "objects" …
    place: str | None  # the line that appends to it
    phase: str | None  # for step time: the phase that grows most
    is_inference: NotRequired[bool]  # the loop ran only forward passes


class SlowStartRow(TypedDict):
    """First steps of a loop, which take much longer than all later ones."""

    steps: int
    timed: int  # number of these steps that were timed
    each_s: float  # median
    later_s: float  # median of the later steps
    extra_s: float  # extra time of all first steps
    total_s: float  # time of the whole loop, without waits for a core, compilation, and sampling
    phase: str | None  # phase with most of the extra time; None if no later step was timed


class LaterStepsRow(TypedDict):
    """Steps after the timed ones, if they usually take much longer, without waits for a core."""

    steps: int  # all steps of the loop
    timed: int
    timed_s: float  # median
    later_s: float  # median


class PaddingRow(TypedDict):
    """Share of the models' inputs that is padding."""

    share: float
    steps: int  # number of steps in which it was seen
    basis: str  # "tokens" given to step(), or "filler" at the ends of rows
    shape: str  # shape of the last input, such as `8 × 250`
    filler: Annotated[int | None, Column(signed=True)]


class OutcomeRow(TypedDict):
    """Outcome of the timed steps: the last loss, and the optimizer steps that a GradScaler skipped."""

    loss: Annotated[float | None, Column(signed=True)]  # None if it is unknown, or no finite number
    fault: str | None  # fault of the loss: "NaN" or "infinite"
    skipped_steps: int | None  # None without a GradScaler
    optimizer_steps: int | None
    first_scale: float | None
    last_scale: float | None
    losses: int  # number of losses in warm-up and timed steps; 0 if unknown
    early_loss: Annotated[float | None, Column(signed=True)]  # largest loss of the first quarter
    late_loss: Annotated[float | None, Column(signed=True)]  # smallest loss of the last quarter


class UpdatesRow(TypedDict):
    """Steps of an optimizer outside of the timing, the gradients that they used, and the weights that they changed."""

    optimizer: str
    parameters: int
    steps: int  # steps that were observed
    again: int  # of these, steps that follow another observed step
    stale: int  # of these, steps with gradients that an earlier step had used already
    cleared: int  # of these, steps with gradients that were cleared after their backward pass
    missing: int  # of these, steps without any gradient
    zero: int  # of these, steps with gradients that are all zero
    learning_rate: float | None  # largest of the parameter groups
    dtype: str | None  # dtype of the parameters, if all have the same
    compared_steps: int  # number of steps between two readings of the weights
    compared: int  # parameters that were compared
    changed: int


class NeverSteppedRow(TypedDict):
    """Backward passes of a script that ended without a step of an optimizer and without a change of its weights."""

    optimizer: str
    parameters: int  # with a gradient
    passes: int
    backward: str | None  # own line of the last pass that was looked at
    step: str | None  # own line around it that calls an optimizer's step()


class RemadeOptimizersRow(TypedDict):
    """Steps of an optimizer that was made anew since the step before, so that its state began anew too."""

    optimizer: str
    steps: int  # observed steps after another one of the same parameters
    made: int  # of these, steps of a new optimizer
    state: str | None  # what it keeps for a parameter, such as "exp_avg, exp_avg_sq"


class FusedUpdateRow(TypedDict):
    """Update of an optimizer on a CPU, tried on copies after the last step, as it is and fused."""

    optimizer: str
    parameters: int  # with a gradient
    tried: int  # of these, copied ones; all, unless they are too large
    updates: float  # per step
    time_s: float  # of one update as it is, for all parameters
    fused_share: float  # time of the fused update, as a share of that: the median of the rounds, and their quartiles
    low_share: float
    high_share: float
    rounds: int
    is_foreach: NotRequired[bool]  # the program asks for foreach=True, which excludes fused=True
    others: NotRequired[int]  # optimizers of the loop that were not tried


class DenormalsRow(TypedDict):
    """Denormal numbers among some of those that an optimizer keeps for its parameters, after the recording."""

    optimizer: str
    state: str  # what of its state has such numbers, such as "exp_avg"
    share: float  # of all numbers
    step: int
    extra_s: NotRequired[float | None]  # of an update of copies, compared with zeros in place of such numbers


class DoubleSoftmaxRow(TypedDict):
    """Loss that applies a function to numbers that went through it already."""

    function: str  # "softmax" or "sigmoid"
    loss: str  # such as "cross_entropy"
    passes: int  # observed backward passes with it
    of_passes: int


class UnregisteredRow(TypedDict):
    """Parameters below the loss, in a Python list, tuple or dict of a module, that do not change."""

    holder: str  # such as `Net.layers`
    parameters: int
    elements: int
    largest: str  # shape of the largest one, such as `64 × 64`
    passes: int  # observed backward passes that reach each of them


class LearningRateRow(TypedDict):
    """Learning rates of an optimizer before the timed steps and after them; of several groups, the largest."""

    optimizer: str
    steps: int  # steps of the loop so far
    largest: float  # before the timed steps
    largest_after: float
    last: float
    observed_after: int  # steps
    scheduler: str | None
    scheduled: int | None  # how often the scheduler has stepped


class RateScheduleRow(TypedDict):
    """Learning rate of an optimizer over all steps of a script; of several groups, the largest."""

    optimizer: str
    steps: int  # of the optimizer
    largest: float
    last: float
    constant: int  # steps after the recording, up to the end, with the last rate
    levels: int  # different rates
    is_better: bool  # whether the number that ReduceLROnPlateau gets has become better since the recording
    scheduler: str | None
    planned: int | None  # steps of the scheduler for which it is laid out
    scheduled: int | None  # how often it has stepped


class LoadedWeightsRow(TypedDict):
    """Weights that a model loads although they are its own tensors, as `state_dict()` returned them, without a copy."""

    model: str
    steps: int  # of an optimizer since then
    parameters: int
    function: str
    place: str


class RandomDrawRow(TypedDict):
    """Random numbers that are the same in each observed step."""

    drawn: str  # such as "torch.randn" or "dropout"
    shape: str
    function: str
    place: str
    steps: int


class ManyDrawsRow(TypedDict):
    """Random numbers that one place of the program draws in many calls of each step."""

    drawn: str  # such as "torch.randn"
    function: str
    place: str
    calls: int  # the fewest of a step


class EvaluationModeRow(TypedDict):
    """Model that trains in evaluation mode since an evaluation."""

    model: str
    since: int  # number of the first such step
    steps: int  # until the end of what was looked at
    dropout: int  # modules with dropout
    statistics: int  # modules with running statistics
    function: str  # that calls eval()
    place: str


class CutSamplesRow(TypedDict):
    """Samples that send no gradient to what made their distribution, which only a divergence trains."""

    distribution: str  # its class
    function: str  # that calls sample()
    place: str
    module: str  # the innermost one with all parameters that only the divergence trains
    parameters: int
    user: str | None  # the layer that takes the sample
    steps: int


class FlatOperatorsRow(TypedDict):
    """Parameters that the loss reaches only through operators with a derivative of 0."""

    operators: str  # the last ones on the way from the parameters to the loss
    function: str  # that calls the operator; "" if it is not known
    place: str
    module: str  # the innermost one with all of these parameters
    parameters: int
    steps: int  # in which they got gradients of zeros


class CovariancesRow(TypedDict):
    """Multivariate normal distributions with diagonal matrices that one line makes."""

    given: str  # the argument, such as "covariance_matrix"
    rows: int  # of a matrix
    function: str
    place: str
    time_s: float  # of a step, with backward
    steps: int  # that were looked at


class EmptyClippingRow(TypedDict):
    """Calls that clip no gradient, because they get an iterator of parameters that is used up."""

    function: str  # such as "clip_grad_norm_"
    place: str | None
    kind: str  # class of the iterator
    parameters: int  # those of the optimizers that have a gradient
    steps: int  # observed steps with such calls alone
    of_steps: int  # observed steps with calls that clip


class RateFactorRow(TypedDict):
    """Factor of a LambdaLR that began with the loop: the rate of the optimizer's group with the largest one."""

    optimizer: str
    initial: float  # the optimizer's rate, by which the factor is multiplied
    factor: float  # in the last observed step
    largest_factor: float  # of all groups and observed steps
    rate: float  # of the last observed step
    scheduled: int  # how often the scheduler has stepped


class PairedTargetsRow(TypedDict):
    """Loss that pairs each prediction of a batch with the targets of all others."""

    steps: int  # of those that were looked at, with such a loss
    of_steps: int
    predictions: int
    shape: str  # of the predictions
    paired: str  # shape of the pairs


class UnusedPassesRow(TypedDict):
    """Backward passes with gradients that were cleared before an optimizer used them."""

    passes: int  # observed passes with gradients for an optimizer
    unused: int


class UnusedGradientsRow(TypedDict):
    """Parameters that get gradients in most backward passes although no optimizer holds them."""

    parameters: int
    elements: int
    share: float  # share of all elements with gradients
    first: str  # name of the first parameter


class InputGradientsRow(TypedDict):
    """Gradients of a model's input, which the program does not read, and no optimizer holds."""

    steps: int  # of those that were looked at, with such gradients
    of_steps: int
    shape: str  # of the input
    share: float  # share of backward's arithmetic that is for them alone, estimated
    place: str | None  # of the backward pass


class DenseGradientsRow(TypedDict):
    """Table of an embedding of which a step uses few rows, while an optimizer updates all."""

    parameter: str  # its name
    rows: int
    used: int  # rows with a gradient of their own, in the step that was looked at
    share: float  # of the elements of all optimizers
    is_penalised: NotRequired[bool]  # the other rows' gradient is a multiple of their weights, not 0


class RepeatedCallsRow(TypedDict):
    """Repeated calls of a model with the same input in one step."""

    model: str
    steps: int  # number of steps with such a call
    of_steps: int  # observed steps
    calls: int  # calls that repeat another one
    used: int  # of these, calls with a result that backward uses
    evaluated: int  # of these, calls in evaluation mode of a model that trains in the other mode
    of_calls: int


class RepeatedModulesRow(TypedDict):
    """Repeated calls of any modules with the same inputs and the same result, in a step on average."""

    module: str  # class of the one that takes most of the time
    steps: int  # observed steps with such calls
    of_steps: int
    calls: int
    time_s: float
    share: float  # of the time in all modules
    recorded_share: float  # share of these calls in the time of forward that autograd records
    place: str | None  # the program's line with most of the time
    parametrized: NotRequired[str | None]  # weight that most of the time computes again, such as `Net.layer.weight`
    method: NotRequired[str | None]  # how it is made orthogonal: matrix_exp, cayley or householder


class OneHotRow(TypedDict):
    """Linear layer that multiplies rows of which hardly any number differs from 0, in a step on average."""

    module: str  # its name in the model, such as `Net.encoder.0`
    width: int  # numbers in a row
    nonzeros: int  # most numbers of a row that are not 0
    is_ones: bool  # they are all 1
    rows: int
    steps: int  # observed steps with such rows alone
    of_steps: int
    time_s: float  # forward
    share: float  # of the time in all modules
    backward_ratio: float  # time of the product that backward computes for the weight, in times of forward's
    elements_share: float  # share of the weight in the elements of all optimizers
    function: str | None  # own function that calls the layer
    place: str | None


class RepeatedRowsRow(TypedDict):
    """Index that looks up the same rows of a tensor for all parts of a batch, or of another dimension, on a CPU."""

    tensor: str | None  # its name, if it is a parameter
    shape: str  # of the tensor
    index: str  # shape of the index
    copies: int  # how often each row is looked up only because parts of the index are equal
    lookups: int  # in a step
    steps: int
    forward_s: float  # time of these lookups per step
    backward_s: float


class ProductOrderRow(TypedDict):
    """Product of three matrices, (left right) other; its other order needs much less arithmetic, on a CPU.

    The left one is batches × rows × inner, the right one inner × summed, and the other one summed × width.
    """

    batches: int
    rows: int
    inner: int
    summed: int
    width: int  # of the widest, if several use the matrix in the middle
    products: int  # such products in a step
    steps: int
    flops_share: float  # share of the arithmetic, forward and backward, that the other order needs
    time_s: float  # of these products per step, measured apart from the loop
    other_s: float  # in the other order


class UnreadRowsRow(TypedDict):
    """Linear layer with a result of which few rows get a gradient, on a CPU."""

    layer: str  # its name
    rows: int
    read: int  # of these rows, at most: those with a gradient
    products: int  # such products in a step
    steps: int
    time_s: float  # of these products per step, measured apart from the loop
    read_s: float  # with the rows that are read


class AttentionWeightsRow(TypedDict):
    """Calls of an nn.MultiheadAttention with weights that the program does not read, on a CPU."""

    module: str
    function: str  # that calls it
    place: str
    calls: int  # in a step
    steps: int
    time_s: float  # of these calls per step, forward and backward, measured apart from the loop
    fused_s: float  # with need_weights=False


class CopiedFactorRow(TypedDict):
    """Copies of one tensor that a batched product multiplies, on a CPU."""

    tensor: str | None  # the name of the parameter; None of another tensor
    how: str  # the function that makes the copies
    copies: int
    copied_bytes: int  # of all copies
    is_first: bool  # the copies are the first factor
    products: int  # such products in a step
    steps: int
    time_s: float  # of these products per step with the copies, measured apart from the loop
    shared_s: float  # with the tensor itself


class UndoneUpdatesRow(TypedDict):
    """Optimizer with steps of which hardly anything is left when a model is called again."""

    optimizer: str
    parameters: int
    compared: int  # of them
    steps: int  # compared ones
    left: float  # of the change of each compared parameter in a step, at most
    place: str | None  # of step()


class UnusedOutputsRow(TypedDict):
    """Calls of modules in forward with results that nothing reads, with or without a gradient, on a CPU."""

    module: str  # the one with the longest such call
    calls: int  # in a step, on average
    steps: int  # with such calls, which are all that were looked at
    time_s: float  # of these calls per step
    share: float  # of the modules' time
    function: str | None
    place: str | None


class ActivationFormulaRow(TypedDict):
    """Activation that is computed by a formula of several operators where torch has one, on a CPU."""

    activation: str  # torch's operator, as a call
    operators: int  # of the formula
    elements: int  # of the tensor
    calls: int  # in a step
    steps: int
    time_s: float  # of these formulas per step, forward and backward, measured apart from the loop
    one_s: float  # with torch's operator


class SparseFactorRow(TypedDict):
    """Constant factor of products of which hardly any number differs from 0, as a dense matrix, on a CPU."""

    rows: int
    columns: int
    nonzeros: int  # numbers that are not 0
    products: int  # with it in a step
    steps: int
    time_s: float  # of these products per step, forward and backward, measured apart from the loop
    sparse_s: float  # with a sparse matrix


class SamplesAsTimeRow(TypedDict):
    """Recurrent layer without batch_first that gets the samples of the batch where it expects steps of time."""

    module: str  # its name in the model, such as `Net.gru`
    kind: str  # its class
    samples: int
    length: int
    width: int
    evidence: str  # "a shuffled data loader" or "the last state along dimension 1"
    steps: int
    of_steps: int
    place: str | None


class DroppedGradientsRow(TypedDict):
    """Gradients of an optimizer that backward passes for another one compute, and that are cleared before its step.

    share: of the arithmetic of all backward passes, by the sizes of results, what leads to these gradients alone.
    reduced_share: of the elements that DistributedDataParallel reduces in all backward passes, those of these
    gradients. Then they are of weights on the way to the other optimizer's; 0 if they are of what comes before those.
    """

    optimizer: str
    parameters: int
    first: str  # its name
    passes: int
    of_passes: int
    share: float
    reduced_share: float
    place: str | None  # of the backward pass


class RepeatedBackwardRow(TypedDict):
    """Backward passes before one update that go through the same operators, so that their gradients add up."""

    steps: int  # observed steps with such passes
    of_steps: int
    passes: float  # in such a step, on average
    share: float  # of the arithmetic of all passes, by the sizes of results
    place: str | None  # of a repeating pass


class SameDerivativesRow(TypedDict):
    """Calls of autograd.grad that differentiate outputs which earlier calls of the step have differentiated."""

    steps: int  # observed steps with such calls
    of_steps: int
    calls: float  # of autograd.grad in such a step, on average
    again: float  # of these, calls that differentiate the same outputs again
    share: float  # of the arithmetic of all passes, by the sizes of results
    place: str | None  # of a repeating call


class DistributionChecksRow(TypedDict):
    """Checks of torch.distributions, by the own line that makes or uses the distribution."""

    distribution: str
    function: str
    place: str
    waits: int  # for the GPU in a step
    time_s: float  # of the host in a step
    step_waits: int  # at all lines, of which the table has those with most waits
    step_time_s: float  # at all lines


class BroadcastRow(TypedDict):
    """Largest tensor that a forward pass makes by broadcasting smaller ones, and sums up again."""

    shape: str  # such as `192 × 192 × 128`
    elements: int
    from_elements: int
    to_elements: int


class ThreadsRow(TypedDict):
    """Threads of torch's operators, if there are more than cores, and the time of an operator with each number."""

    threads: int
    cores: int
    time_s: float
    of_cores_s: float


class PythonThreadRow(TypedDict):
    """Thread of the program's own Python next to the loop's."""

    function: str  # that the thread runs, the outermost of the program's own
    place: str  # its line at most looks
    calls: str | None
    puts: bool  # the function puts something into a queue
    busy_share: float  # share of the timed steps in which it ran, or waited for a core; it may keep Python's lock then
    ran_share: NotRequired[float]  # share of them in which it ran
    waited_share: float  # share of them in which the loop's thread neither ran nor waited for a core
    queued_share: NotRequired[float]  # share of them in which the loop's thread waited for a core
    pool_queued_share: float  # largest share in which a thread without Python, as of an operator, waited for a core
    operator_threads: int  # number of threads of torch's operators
    tries: int  # how often the loop gave Python's lock away while the thread ran in the program's own Python
    held_share: float  # share of these tries in which it got the lock back late


class HooksRow(TypedDict):
    """Growth of the number of hooks on the modules of the models."""

    steps: int
    first: int
    last: int
    per_step: float
    module: str  # module with the newest hook
    place: str | None  # first line of the newest hook's function


class AnomalyRow(TypedDict):
    """Backward passes of the timed steps under autograd's anomaly detection."""

    passes: int
    with_detection: int


class DoubleRow(TypedDict):
    """Weights of the models in double precision, and the rates of products on this device."""

    parameters: int
    of_parameters: int
    flops: int  # lower bound of the FLOPs of products with these weights in a step
    flops_per_s: float
    float32_flops_per_s: float


class SlowSettingRow(TypedDict):
    """Convolutions and matrix products of a step with a setting and without it, each with its gradients."""

    setting: str  # "bf16", "fp16", or "no oneDNN"
    is_autocast: bool
    layers: int  # number of those that were computed again
    time_s: float
    usual_s: float


class OwnToolRow(TypedDict):
    """Steps under a profiler or tracer that the program itself started."""

    tool: str
    steps: int
    of_steps: int
    with_s: float  # median
    without_s: float | None  # median; None if all steps are under it
    extra_s: float | None  # extra time of these steps compared with as many others
    total_s: float


class IteratorsRow(TypedDict):
    """Timed steps in which a data loader began an iterator.

    started: steps in which it also started worker processes. collated: steps with a batch that it put together from
    single rows of a TensorDataset.
    """

    steps: int
    with_new: int
    started: NotRequired[int]
    collated: NotRequired[int]


class ForwardOperatorsRow(TypedDict):
    """Operators of a step's forward passes on a CPU, and the own function with most of their time."""

    operators: int
    arithmetic_s: float  # upper bound, by the sizes of their results
    has_recurrent: bool  # recurrent modules over sequences, and what is between them, are left out of both
    function: str | None
    place: str | None


class ElementSumsRow(TypedDict):
    """Running totals over elements of a tensor in a step on a CPU, one operator or more for each element."""

    operators: int  # of forward and the loss
    time_s: float  # of the own function with most of them, without backward
    samples: int
    function: str
    place: str
    calls: str | None


class SingleElementsRow(TypedDict):
    """Own line that uses single elements of tensors, which autograd does not record, many times in each step."""

    function: str
    place: str
    reads: int  # in each step that was looked at, as numbers of Python
    writes: int
    time_s: NotRequired[float]  # of as many uses of elements of a small tensor; the line may do other work too


class ReplacedParametersRow(TypedDict):
    """Parameters of a model in no optimizer, while the one that trains it holds others that are in no module."""

    optimizer: str
    parameters: int
    first: str  # name of the first parameter
    replaced: int  # parameters in no module


class RepeatedForwardRow(TypedDict):
    """Recomputation of forward inside backward, for torch.utils.checkpoint."""

    backward_share: float


class UnsampledRow(TypedDict):
    """Reason why the own Python of the usual steps was not sampled."""

    reason: str
    remedy: str


WHOLE_LOOP = Table("whole_loop", LoopTimeRow, "time of the whole loop by kind of step")
OWN_PYTHON = Table("own_python", OwnPythonRow, "the script's own Python, per step")
INNER_LINES = Table("inner_lines", InnerLineRow, "own lines inside the model's phases, per step")
SLOW_STEPS = Table("slow_steps", SlowStepsRow, "steps that take longer than the usual ones")
COLLECTIONS = Table("garbage_collection", CollectionRow, "garbage collection")
GROWTH = Table("growth", GrowthRow, "growth from step to step")
SLOW_START = Table("slow_start", SlowStartRow, "slow begin of the loop")
LATER_STEPS = Table("later_steps", LaterStepsRow, "steps after the timed ones")
PADDING = Table("padding", PaddingRow, "padding of the batches")
ITERATORS = Table("iterators", IteratorsRow, "iterators of data loaders")
FORWARD_OPERATORS = Table("forward_operators", ForwardOperatorsRow, "operators of forward")
ELEMENT_SUMS = Table("element_sums", ElementSumsRow, "running totals over elements")
SINGLE_ELEMENTS = Table("single_elements", SingleElementsRow, "lines that use single elements of tensors")
REPEATED_FORWARD = Table("repeated_forward", RepeatedForwardRow, "forward repeated in backward")
OUTCOME = Table("outcome", OutcomeRow, "outcome of the timed steps")
UPDATES = Table("updates", UpdatesRow, "steps of the optimizers that were looked at")
NEVER_STEPPED = Table("never_stepped", NeverSteppedRow, "backward passes without any step of an optimizer")
REMADE_OPTIMIZERS = Table("remade_optimizers", RemadeOptimizersRow, "optimizers that were made anew")
FUSED_UPDATES = Table("fused_updates", FusedUpdateRow, "updates tried as fused ones")
DENORMALS = Table("denormals", DenormalsRow, "denormal numbers in optimizers")
DOUBLE_SOFTMAX = Table("double_softmax", DoubleSoftmaxRow, "softmax that is applied twice")
UNREGISTERED = Table("unregistered", UnregisteredRow, "parameters in Python lists")
LEARNING_RATES = Table("learning_rates", LearningRateRow, "learning rates")
RATE_SCHEDULES = Table("rate_schedules", RateScheduleRow, "learning rates over all steps")
LOADED_WEIGHTS = Table("loaded_weights", LoadedWeightsRow, "weights that a model loads from itself")
RATE_FACTORS = Table("rate_factors", RateFactorRow, "factors of the learning rates that are small")
RANDOM_DRAWS = Table("random_draws", RandomDrawRow, "random numbers that are the same in each step")
MANY_DRAWS = Table("many_draws", ManyDrawsRow, "random numbers that many calls draw")
EVALUATION_MODE = Table("evaluation_mode", EvaluationModeRow, "models that train in evaluation mode")
FLAT_OPERATORS = Table("flat_operators", FlatOperatorsRow, "parameters with gradients of zeros")
CUT_SAMPLES = Table("cut_samples", CutSamplesRow, "samples that cut a gradient")
COVARIANCES = Table("covariances", CovariancesRow, "normal distributions with diagonal matrices")
EMPTY_CLIPPING = Table("empty_clipping", EmptyClippingRow, "calls that clip no gradient")
PAIRED_TARGETS = Table("paired_targets", PairedTargetsRow, "losses that pair each prediction with all targets")
UNUSED_PASSES = Table("unused_passes", UnusedPassesRow, "backward passes without an optimizer step")
UNUSED_GRADIENTS = Table("unused_gradients", UnusedGradientsRow, "gradients that no optimizer uses")
REPLACED_PARAMETERS = Table(
    "replaced_parameters", ReplacedParametersRow, "parameters that took the place of an optimizer's"
)
INPUT_GRADIENTS = Table("input_gradients", InputGradientsRow, "gradients of inputs that nothing reads")
DENSE_GRADIENTS = Table("dense_gradients", DenseGradientsRow, "tables of which a step uses few rows")
REPEATED_CALLS = Table("repeated_calls", RepeatedCallsRow, "calls of a model with the same input")
REPEATED_MODULES = Table("repeated_modules", RepeatedModulesRow, "calls of modules that compute a result again")
ONE_HOT = Table("one_hot_products", OneHotRow, "linear layers that multiply one-hot rows")
REPEATED_ROWS = Table("repeated_rows", RepeatedRowsRow, "rows that are looked up for each part of a batch")
PRODUCT_ORDERS = Table("product_orders", ProductOrderRow, "products of three matrices in the costlier order")
UNREAD_ROWS = Table("unread_rows", UnreadRowsRow, "rows of layers' results without a gradient")
ATTENTION_WEIGHTS = Table("attention_weights", AttentionWeightsRow, "attention weights that nothing reads")
COPIED_FACTORS = Table("copied_factors", CopiedFactorRow, "products with copies of one tensor")
UNDONE_UPDATES = Table("undone_updates", UndoneUpdatesRow, "steps of optimizers that something undoes")
UNUSED_OUTPUTS = Table("unused_outputs", UnusedOutputsRow, "calls of modules with results that nothing reads")
ACTIVATION_FORMULAS = Table("activation_formulas", ActivationFormulaRow, "activations that are written as formulas")
SPARSE_FACTORS = Table("sparse_factors", SparseFactorRow, "constant matrices of zeros that products multiply")
SAMPLES_AS_TIME = Table("samples_as_time", SamplesAsTimeRow, "recurrent layers that walk over the samples of a batch")
DROPPED_GRADIENTS = Table(
    "dropped_gradients", DroppedGradientsRow, "gradients that are cleared before their optimizer's step"
)
REPEATED_BACKWARD = Table("repeated_backward", RepeatedBackwardRow, "operators that backward computes again")
SAME_DERIVATIVES = Table("same_derivatives", SameDerivativesRow, "outputs that are differentiated again")
DISTRIBUTION_CHECKS = Table("distribution_checks", DistributionChecksRow, "checks of torch.distributions")
BROADCASTS = Table("broadcasts", BroadcastRow, "tensors made by broadcasting and summed up again")
PYTHON_THREADS = Table("python_threads", PythonThreadRow, "threads of the program's own Python next to the loop's")
THREADS = Table("threads", ThreadsRow, "threads of operators")
HOOKS = Table("hooks", HooksRow, "growing number of hooks")
ANOMALY = Table("anomaly_detection", AnomalyRow, "backward passes under anomaly detection")
DOUBLE = Table("double_precision", DoubleRow, "weights in double precision")
SLOW_SETTINGS = Table("slow_settings", SlowSettingRow, "layers with a setting and without it")
OWN_TOOLS = Table("own_tools", OwnToolRow, "steps under the program's own tools")
UNSAMPLED = Table("unsampled", UnsampledRow, "why own Python was not sampled")
