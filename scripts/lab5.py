"""Time and memory of one attention call: PyTorch's plain attention against FlashAttention-2.

Method: q, k and v are one packed fp16 tensor (batch, seq, 3, heads, emb / heads), no dropout. A step is forward, then
backward; after warm-up `repeats` steps are timed, each phase by the device's clock with the launches hidden, and their
means are reported. FLOPs by convention: forward 4·B·S²·H·d, halved when causal; backward 2.5 times that; together 3.5
times that over the sum of both means: flash-attention's benchmark, unlike the model FLOPs of cs_systems, credits the
scores that backward computes again. Memory: the allocator's peak from before qkv is made, in MiB; null where unknown.
Output: a JSON file; next to the numbers stand the inputs, all samples, the environment and the predicted memory. What
does not fit the device gives nulls and the status "oom". Exit status 2 where the call cannot be measured here.

    python scripts/lab5.py --batch_size 32 --seq_len 1024 --num_heads 32 --emb_dim 2048 --impl Flash2 --causal \\
        --repeats 30 --output benchmark_result.json

`--impl` is Pytorch (the backend naive), Flash2 (FlashAttention-2 of the flash-attn package), or any attention backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cs_systems.cli._options import parse_bytes
from cs_systems.config import AttentionShape, ConfigError, Mode, Precision, RunConfig, one_of
from cs_systems.core import plugins
from cs_systems.core.validation import shown
from cs_systems.formulas.cost import AttentionAlgorithm, credited_attention_flops
from cs_systems.measure.runtime.sweep import run
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.record import RunRecord
from cs_systems.report.files import is_same_file, write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cs_systems.machine.device import Device
    from cs_systems.measure.workloads.attention import Attention

HERE = os.path.relpath(__file__)
IMPLS = {"Pytorch": "naive", "Flash2": f"{HERE}:FLASH2"}
BACKWARD, FORWARD_BACKWARD = 2.5, 3.5  # times the FLOPs of forward
KEYS = ("forward", "backward", "forward_backward", "peak_memory_usage(MB)")


def main() -> int:
    args = _parser().parse_args()
    try:
        record = run(_config(args))
        if record.status not in ("ok", "oom"):
            raise RuntimeError(record.reason)
        result = report(record) | {"inputs": vars(args)}
        print(json.dumps({key: result[key] for key in KEYS}, indent=2))
        if record.status == "oom":
            print(f"{record.reason}; predicted peak {result['predicted_peak_memory(MB)']} MB", file=sys.stderr)
        write_file(Path(args.output), (json.dumps(result, indent=2) + "\n").encode())
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"lab5: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=_count, default=32)
    parser.add_argument("--seq_len", type=_count, default=1024)
    parser.add_argument("--num_heads", type=_count, default=32)
    parser.add_argument("--emb_dim", type=_count, default=2048)
    parser.add_argument("--impl", default="Flash2", help="Pytorch, Flash2 or an attention backend (default: Flash2)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=_count, default=30, help="timed steps (default: 30)")
    parser.add_argument("--output", default="benchmark_result.json")
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps before them (default: 5)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--memory_limit", metavar="SIZE", help="emulate a smaller card: 8GiB")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; give a whole number of at least 1")
    return int(text)


def _config(args: argparse.Namespace) -> RunConfig:
    if args.emb_dim % args.num_heads:
        raise ConfigError(f"emb_dim {args.emb_dim} is not divisible by num_heads {args.num_heads}; change one of them")
    if not plugins.is_foreign(args.impl):
        one_of("impl", args.impl, [*IMPLS, *plugins.names("attention")])
    if not Path(args.output).resolve().parent.is_dir():
        folder = Path(args.output).parent
        raise ConfigError(f"--output {args.output} is in no existing folder; make {folder} first, or name another file")
    if is_same_file(Path(args.output), Path(args.impl.rpartition(":")[0])):
        raise ConfigError(f"--output {args.output} would overwrite --impl {args.impl}; name another file")
    return RunConfig(
        workload=f"{HERE}:{'packed_flash2' if args.impl == 'Flash2' else 'packed'}",
        attention=IMPLS.get(args.impl, args.impl),
        shape=AttentionShape(
            args.batch_size, args.num_heads, args.seq_len, args.emb_dim // args.num_heads, args.causal
        ),
        mode=Mode.FORWARD_BACKWARD,
        precision=Precision.FP16,
        warmup=args.warmup,
        steps=args.repeats,
        device=args.device,
        memory_limit_bytes=args.memory_limit and parse_bytes(args.memory_limit, "--memory_limit"),
    )


def report(record: RunRecord) -> dict[str, Any]:
    """Return the file's content without the inputs; the numbers of a cell that did not fit are null."""
    shape, (memory,), measurement = record.run_config.shape, record.results["memory"], record.measurement
    assert shape is not None
    flops = credited_attention_flops(shape)
    forward, backward = (measurement.durations_s(p) if measurement else [] for p in ("forward", "backward"))
    forward_s, backward_s = (fmean(samples) if samples else None for samples in (forward, backward))
    both_s = None if forward_s is None or backward_s is None else forward_s + backward_s
    return {
        "forward": _rate(forward_s, flops),
        "backward": _rate(backward_s, BACKWARD * flops),
        "forward_backward": _rate(both_s, FORWARD_BACKWARD * flops),
        "peak_memory_usage(MB)": _mib(measurement.peak_allocated_bytes if measurement else None),
        "predicted_peak_memory(MB)": _mib(memory["predicted_peak_bytes"]),
        "failed_allocation(MB)": _mib(memory.get("failed_allocation_bytes")),
        "status": record.status,
        "reason": record.reason,
        "warnings": [f"{w.code}: {w.message}" for w in record.warnings],
        "ran": record.results.get("ran"),
        "samples": {"forward(s)": forward, "backward(s)": backward},
        "environment": record.environment and dataclasses.asdict(record.environment),
    }


def _rate(seconds: float | None, flops: float) -> dict[str, float | None]:
    return {"time(s)": seconds, "FLOPS(TFLOPs/s)": flops / seconds / 1e12 if seconds else None}


def _mib(amount: int | None) -> float | None:
    return None if amount is None else amount / 1024**2


# The worker process, which imports torch, looks up everything below by name.


def packed(config: RunConfig, device: Device) -> Attention:
    """Return the workload of a backend on q, k and v that are views of one packed tensor."""
    from torch import Tensor

    backend, shape = plugins.get("attention", config.attention), config.shape

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = backend(q, k, v, causal=shape is not None and shape.causal)
        if not isinstance(out, Tensor) or out.shape != q.shape:
            found = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else shown(out)
            raise ConfigError(f"{config.attention} returned {found}; return a tensor of q's shape, {tuple(q.shape)}")
        return out.transpose(1, 2)

    return _workload(config, device, attend)


def packed_flash2(config: RunConfig, device: Device) -> Attention:
    """Return the workload of FLASH2, which takes the packed tensor and returns its gradient as one tensor."""
    causal = config.shape is not None and config.shape.causal
    return _workload(config, device, partial(FLASH2.function, causal=causal))


def _workload(config: RunConfig, device: Device, attend: Callable[[Tensor], Tensor]) -> Attention:
    from cs_systems.measure.workloads import Cell
    from cs_systems.measure.workloads.attention import Attention, Problem, random_leaves, shape_of

    shape = shape_of(config)
    out_shape = (shape.batch, shape.seq, shape.heads, shape.d_head)
    leaves = random_leaves(config, device, (shape.batch, shape.seq, 3, shape.heads, shape.d_head))
    return Attention(Cell(config), device, Problem(attend, leaves, out_shape))


def _preflight(config: RunConfig, device: Device, gathers: bool) -> int | None:
    """Return the predicted bytes; with `gathers`, backward makes the packed gradient out of three others."""
    from cs_systems.measure.workloads import Cell
    from cs_systems.measure.workloads.attention import Attention

    return Attention.preflight(Cell(config), device, packed=gathers)


packed.preflight = partial(_preflight, gathers=True)  # type: ignore[attr-defined]
packed_flash2.preflight = partial(_preflight, gathers=False)  # type: ignore[attr-defined]


def _flash2_function() -> Callable[..., Tensor]:
    """Return flash-attn's function; AttributeError if only flash-attn-4 is installed: its `flash_attn` is empty."""
    function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_qkvpacked_func
    return function


def _flash2(qkv: Tensor, causal: bool) -> Tensor:
    return _flash2_function()(qkv, dropout_p=0.0, causal=causal)


def _flash2_unavailable(call: AttentionCall) -> str | None:
    try:
        _flash2_function()
    except (ImportError, AttributeError) as error:
        install = "on a machine with CUDA run pip install --no-build-isolation 'cs-systems[flash-attn]', or"
        why = f"FlashAttention-2 is not installed ({error}); {install}"
    else:
        if call.device == "cuda" and call.d_head <= 256:
            return None
        why = f"FlashAttention-2 runs on CUDA with d_head up to 256, this is {call.device} with d_head {call.d_head};"
    backends = (name for name in plugins.names("attention") if plugins.get("attention", name).unavailable(call) is None)
    return f"{why} name a backend that takes this call here: --impl {', '.join(('Pytorch', *backends))}"


def _flash2_version() -> str:
    return f"flash-attn {importlib.metadata.version('flash-attn')} (FlashAttention-2, packed)"


FLASH2 = AttentionBackend(
    _flash2,
    unavailable=_flash2_unavailable,
    algorithm=lambda call: AttentionAlgorithm(128, 128, backward_matmuls=5, dq_accumulator_bytes=4),
    describe=_flash2_version,
)


if __name__ == "__main__":
    sys.exit(main())
