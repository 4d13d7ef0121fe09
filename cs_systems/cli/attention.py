"""Time attention alone: every combination of backends, shapes and precisions, forward, backward and both.

Each row has its TFLOP/s, credited (causal halved) and executed (tiles, padding, recomputation), and its peak memory.
On a GPU launches are hidden: kernels are timed without the host's overhead, and a step is the sum of its phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import MaybeNames, Names, Numbers, Steps, Sweep, check_keep_graph, flag, refuse
from cs_systems.config import Mode, RunConfig, grid, one_of

CAUSAL = {"false": (False,), "true": (True,), "both": (False, True)}


@dataclass(frozen=True)
class AttentionCells:
    """Which attention calls: every combination of what is given."""

    attention: Annotated[Names, arg(help="backends, or path.py:function")] = ("naive", "sdpa_flash")
    batch: Annotated[Numbers, arg(aliases=["--batch-size"], help="sequences")] = (8,)
    heads: Annotated[Numbers, arg(help="query heads")] = (16,)
    heads_kv: Annotated[Numbers, arg(help="key and value heads", help_behavior_hint="(default: as many)")] = ()
    seq: Annotated[Numbers, arg(aliases=["--context-length"], help="queries a sequence")] = (1024,)
    seq_k: Annotated[Numbers, arg(help="keys a sequence", help_behavior_hint="(default: as many)")] = ()
    d_head: Annotated[Numbers, arg(help="size of a head")] = (64,)
    precision: Annotated[Names, arg(aliases=["--dtype"], help="the tensors' dtype: bf16, fp16, fp32, tf32")] = ("bf16",)
    causal: Annotated[MaybeNames, arg(metavar="[false|true|both]", help="alone, it means true")] = ("false",)
    align: Annotated[str, arg(help="of the causal mask where seq and seq-k differ: upper_left, lower_right")] = (
        "upper_left"
    )
    mode: Annotated[Names, arg(help="forward, backward (alone, its graph retained), forward-backward")] = (
        "forward",
        "backward",
        "forward-backward",
    )
    keep_graph: Annotated[bool, flag("let mode forward record the graph for backward")] = False
    l2: Annotated[str, arg(help="clear the L2 cache before each step, or leave it warm")] = "warm"

    def configs(self, steps: Steps) -> list[RunConfig]:
        words = [one_of("value of --causal", word.lower(), CAUSAL) for word in self.causal or ("true",)]
        check_keep_graph(self.keep_graph, self.mode)
        if self.align == "lower_right" and True not in {v for word in words for v in CAUSAL[word]}:
            refuse(["align"], "without --causal there is no mask to align")
        axes: dict[str, Sequence[Any]] = {}
        for name in ("batch", "heads", "heads_kv", "seq", "seq_k", "d_head"):
            if values := getattr(self, name):
                axes[name] = values
        axes |= {
            "causal": list(dict.fromkeys(value for word in words for value in CAUSAL[word])),
            "align": [self.align],
            "precision": self.precision,
            "attention": self.attention,
            "mode": self.mode,
        }
        base = steps.base(workload="attention", mode=Mode.FORWARD, keep_graph=self.keep_graph, l2=self.l2)
        return grid(base, **axes)


@dataclass(frozen=True)
class Attention:
    cells: AttentionCells = field(default_factory=AttentionCells)
    steps: Steps = field(default_factory=Steps)
    sweep: Sweep = field(default_factory=Sweep)


ARGS = Attention


def run(args: Attention) -> int:
    from cs_systems.cli._sweep import run_and_report

    return run_and_report(args.cells.configs(args.steps), args.sweep, "attention", args.steps.seed)
