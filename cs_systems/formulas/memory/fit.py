"""Batches and contexts that fit a device, and changes that make a config fit: a closed form without torch or device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cs_systems.config import ConfigError, Mode, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.core.fields import Subject
from cs_systems.formulas import sdpa
from cs_systems.formulas.cost import FULL_MATRIX, FULL_MATRIX_CUDA, AttentionAlgorithm, recomputed_flops
from cs_systems.formulas.memory.allocator import MIB
from cs_systems.formulas.memory.model import step_memory
from cs_systems.record import RunRecord

# The CUDA context of a process with its modules loaded: device memory outside every allocator. Measured
# on one H200 with CUDA 13.0 in each of seven cells: profiles/nvidia_smi_memory.
CONTEXT_BYTES = 751 * MIB
TILED = AttentionAlgorithm(block_q=128, block_k=128, backward_matmuls=5)
HALF = (Precision.BF16, Precision.FP16, Precision.BF16_PURE, Precision.FP8)
_STRAIGHT = 8  # most values to try, if memory grows linearly
MOST = 1 << 20  # upper limit of the search, for sequences of a batch and tokens of a context


def algorithm_of(config: RunConfig) -> AttentionAlgorithm:
    """Return the attention algorithm of the config's backend; valid for memory only, because its tiles are not real.

    Raises:
        ConfigError: code outside the package is used, which does not declare its memory.
    """
    if own := next(iter(config.own_code.items()), None):
        field, (code, *_) = own
        raise ConfigError(f"the memory that {field} {code} needs is unknown; use a built-in one to predict it")
    name, on_cpu = config.attention, config.device == "cpu"
    declared = plugins.declared("attention", name)
    if not declared.get("full_matrix"):
        tiled = replace(TILED, **declared.get("keeps", {}))
        return replace(tiled, dq_accumulator_bytes=0) if on_cpu else tiled  # which only kernels on a GPU have
    full = replace(FULL_MATRIX if on_cpu else FULL_MATRIX_CUDA, **declared.get("keeps", {}))
    if declared.get("rounds_scores") or config.precision not in HALF:
        return full
    forward, kept, backward = (2 * count for count in full.score_matrices)  # the scores are in float32
    return replace(full, score_matrices=(forward, kept, backward))


def _refusal(name: str, config: RunConfig) -> str | None:
    """Return the reason why the PyTorch kernel that the backend forces cannot run the model; None if it can."""
    if (kernel := plugins.declared("attention", name).get("torch_kernel")) is None:
        return None
    model, length = config.model, config.tokens_per_sequence
    shape = (config.batch_size, model.num_heads, length, model.d_head)
    dtype = {Precision.FP16: "float16"}.get(config.precision, "bfloat16") if config.precision in HALF else "float32"
    return sdpa.refusal(kernel, sdpa.SdpaCall((dtype, dtype, dtype), shape, shape, shape, is_causal=True), sdpa.Gpu())


def known_by_formula(record: RunRecord) -> tuple[RunConfig, AttentionAlgorithm] | None:
    """Return (the config on the record's device, its attention algorithm), or None if no formula is valid.

    No formula is valid for a user's own workload or attention, or for a compiled model, because the compiler decides
    which tensors are kept.
    """
    config = record.run_config
    if config.subject is not Subject.STEP or config.compile != "none" or record.environment is None:
        return None
    config = replace(config, device="cpu" if record.environment.device == "cpu" else "cuda")
    try:
        return config, algorithm_of(config)
    except ConfigError:
        return None


def needed_bytes(config: RunConfig) -> int:
    """Return the device memory that `config` needs: the predicted peak and the CUDA context, in bytes.

    Raises:
        ConfigError: the attention is a kernel of PyTorch that does not run the model's calls on a GPU, or unknown.
    """
    if config.device != "cpu" and (reason := _refusal(config.attention, config)):
        name = config.attention
        raise ConfigError(f"attention {name} cannot run this model on a GPU: {reason}; use flash_triton or naive")
    return step_memory(config, algorithm_of(config)).peak_bytes + CONTEXT_BYTES


@dataclass(frozen=True)
class Change:
    """Change of a config: a description (`what`), the memory needed afterwards, and the changed config."""

    what: str
    needed_bytes: int
    fits: bool
    config: RunConfig


@dataclass(frozen=True)
class Fit:
    """Prediction for a config and a device.

    `largest_batch` is for this context and `largest_context` for this batch; 0 if not even 1 fits.

    changes: alternatives, each with the memory it would need. The change that affects the result least comes first.
        Empty if the config fits unchanged.
    first: cumulative changes until the config fits, each with the memory that is needed after it. Empty if no
        combination fits.
    """

    needed_bytes: int
    device_bytes: int
    largest_batch: int
    largest_context: int
    changes: tuple[Change, ...] = ()
    first: tuple[Change, ...] = ()

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.device_bytes


def fits(config: RunConfig, device_bytes: int) -> Fit:
    """Return the prediction for a step of `config` on a device of that size, with changes if it does not fit."""
    fit = Fit(
        needed_bytes(config),
        device_bytes,
        largest(lambda n: needed_bytes(replace(config, batch_size=n)), device_bytes),
        largest(lambda n: needed_bytes(with_context(config, n)), device_bytes),
    )
    if fit.fits:
        return fit
    alone = tuple(change(config, device_bytes) for change in _CHANGES)
    changes = tuple(change for change in alone if change and change.needed_bytes < fit.needed_bytes)
    return replace(fit, changes=changes, first=_one_after_the_other(config, device_bytes))


def _one_after_the_other(config: RunConfig, device_bytes: int) -> tuple[Change, ...]:
    made: list[Change] = []
    for change in _CHANGES:
        found = change(config, device_bytes)
        if found and found.needed_bytes < needed_bytes(config):
            made.append(found)
            config = found.config
            if found.fits:
                return tuple(made)
    return ()


def largest(needed: Callable[[int], int], device_bytes: int, start: int = 1) -> int:
    """Return the largest n that needs at most `device_bytes`, 0 if none does; memory must grow with n.

    start: the first n to try. Memory is nearly linear in n, so few values of n are tried.
    """
    known: dict[int, int] = {}

    def fits(n: int) -> bool:
        known[n] = needed(n)
        return known[n] <= device_bytes

    low, high, n = 0, MOST + 1, start
    while high - low > 1:
        low, high = (n, high) if fits(n) else (low, n)
        n = _next(known, low, high, device_bytes)
    return low


def _next(known: dict[int, int], low: int, high: int, device_bytes: int) -> int:
    """Return the next n to try between `low`, which fits, and `high`, which does not."""
    if len(known) < 2:
        return min(2 * low, high - 1) if low else max(1, high // 2)
    first, last = sorted(known, key=lambda n: abs(known[n] - device_bytes))[:2]
    slope = (known[last] - known[first]) / (last - first)
    aim = first + int((device_bytes - known[first]) // slope) if slope > 0 else (low + high) // 2
    if len(known) > _STRAIGHT and len(known) % 2:
        aim = (low + high) // 2  # not linear here, so halve the interval
    return min(max(aim if aim > low else low + 1, low + 1), high - 1)


def cheapest_plan(config: RunConfig, budget_bytes: int) -> Change | None:
    """Return the checkpoint plan that fits with the fewest recomputed FLOPs, by prediction; None if none fits."""
    algorithm, tokens = algorithm_of(config), config.tokens_per_sequence

    def flops(plan: str) -> int:
        return recomputed_flops(config.model, config.batch_size, tokens, algorithm, plan)

    for plan in sorted(plans(config), key=flops):
        planned = replace(config, checkpoint=plan)
        if (needed := needed_bytes(planned)) <= budget_bytes:
            return Change(f"--checkpoint {plan}", needed, True, planned)
    return None


def plans(config: RunConfig) -> Iterator[str]:
    """Yield every form of checkpointing that is possible for the model.

    The forms are: the first n blocks, all blocks in groups, selective, and nested in two levels.
    """
    layers = config.model.num_layers
    yield "none"
    yield from (f"blocks:0-{n - 1}" for n in range(1, layers))
    yield from (f"every:{k}" for k in range(1, layers + 1))
    yield "selective:matmul"
    if plugins.declared("attention", config.attention).get("one_operator") == "always":
        yield "selective:attention"
    yield from (f"nested:{k}:{inner}" for k in range(2, layers + 1) for inner in range(1, k) if k % inner == 0)


def _change(what: str, config: RunConfig, device_bytes: int) -> Change:
    needed = needed_bytes(config)
    return Change(what, needed, needed <= device_bytes, config)


def _tiled_attention(config: RunConfig, device_bytes: int) -> Change | None:
    if algorithm_of(config).block_q is not None:
        return None
    name = "sdpa_flash" if config.precision in HALF else "flash_triton"
    return _change(f"--attention {name}", replace(config, attention=name), device_bytes)


def _half_precision(config: RunConfig, device_bytes: int) -> Change | None:
    if config.precision in HALF:
        return None
    return _change("--precision bf16", replace(config, precision=Precision.BF16), device_bytes)


def _checkpointing(config: RunConfig, device_bytes: int) -> Change | None:
    """Return the cheapest plan that fits; if none does, the one that needs the least memory."""
    if config.mode is Mode.FORWARD:
        return None
    if found := cheapest_plan(config, device_bytes):
        return found
    plan = min(plans(config), key=lambda plan: needed_bytes(replace(config, checkpoint=plan)))
    return _change(f"--checkpoint {plan}", replace(config, checkpoint=plan), device_bytes)


def _batch(config: RunConfig, device_bytes: int) -> Change | None:
    batch = max(1, largest(lambda n: needed_bytes(replace(config, batch_size=n)), device_bytes))
    return _change(f"--batch-size {batch}", replace(config, batch_size=batch), device_bytes)


def _context(config: RunConfig, device_bytes: int) -> Change | None:
    length = max(1, largest(lambda n: needed_bytes(with_context(config, n)), device_bytes))
    return _change(f"--context-length {length}", with_context(config, length), device_bytes)


# the least intrusive change comes first: identical results, then equal mathematics, then a different step
_CHANGES = (_tiled_attention, _checkpointing, _half_precision, _batch, _context)


def with_context(config: RunConfig, length: int) -> RunConfig:
    return replace(config, model=replace(config.model, context_length=length), seq_len=None)
