"""Time attention alone: every combination of backends, shapes and precisions, forward, backward and both together.

Each row shows TFLOP/s and peak memory. Credited FLOPs are those of the formula, with causal attention halved; executed
FLOPs include whole tiles, padding and recomputation.
On a GPU, kernels are timed without the launch overhead of the CPU, and the time of a step is the sum of its phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import arg

from cs_systems.cli._options import (
    MaybeNames,
    Names,
    Numbers,
    Steps,
    Sweep,
    check_keep_graph,
    check_modes,
    flag,
)
from cs_systems.config import ConfigError, Mode, RunConfig, grid, one_of

DTYPES = ("bf16", "fp16", "fp32", "tf32")
CAUSAL = {"false": (False,), "true": (True,), "both": (False, True)}


@dataclass(frozen=True)
class AttentionCells:
    """Attention calls to measure: every combination of the values given."""

    attention: Annotated[Names, arg(help="backends (cs-systems doctor lists them), or path.py:function")] = (
        "naive",
        "sdpa_flash",
    )
    batch: Annotated[Numbers, arg(aliases=["--batch-size"], help="sequences per call")] = (8,)
    heads: Annotated[Numbers, arg(help="query heads")] = (16,)
    heads_kv: Annotated[
        Numbers, arg(help="key and value heads", help_behavior_hint="(default: as many as --heads)")
    ] = ()
    seq: Annotated[Numbers, arg(aliases=["--context-length"], help="queries per sequence")] = (1024,)
    seq_k: Annotated[Numbers, arg(help="keys per sequence", help_behavior_hint="(default: as many as queries)")] = ()
    d_head: Annotated[Numbers, arg(help="dimension of one head")] = (64,)
    precision: Annotated[Names, arg(aliases=["--dtype"], help=f"dtype of the tensors: {', '.join(DTYPES)}")] = ("bf16",)
    causal: Annotated[MaybeNames, arg(metavar="[false|true|both]", help="causal mask; without a value: true")] = (
        "false",
    )
    align: Annotated[
        str, arg(help="corner of the causal mask if --seq and --seq-k differ: upper_left, lower_right")
    ] = "upper_left"
    window: Annotated[
        Numbers,
        arg(help="keys that a causal query sees, up to its own", help_behavior_hint="(default: all)"),
    ] = ()
    mode: Annotated[Names, arg(help="forward, backward (alone, over a retained graph), forward-backward")] = (
        "forward",
        "backward",
        "forward-backward",
    )
    keep_graph: Annotated[bool, flag("in mode forward, record the graph for backward (not with no_grad)")] = False
    l2: Annotated[str, arg(help="L2 cache before each step: warm, clear")] = "warm"

    def configs(self, steps: Steps) -> list[RunConfig]:
        words = [one_of("value of --causal", word.lower(), CAUSAL) for word in self.causal or ("true",)]
        check_modes(self.mode, AttentionCells.mode)
        check_keep_graph(self.keep_graph, self.mode)
        masks = {value for word in words for value in CAUSAL[word]}
        if self.align == "lower_right" and True not in masks:
            raise ConfigError("--align lower_right requires a causal mask; use --causal true, or leave out --align")
        if self.window and False in masks:
            got = " ".join(words)
            raise ConfigError(
                f"--window requires a causal mask in every cell, got --causal {got}; use --causal true, or leave out "
                "--window"
            )
        for word in self.precision:
            one_of("dtype", word, DTYPES)
        axes: dict[str, Sequence[Any]] = {}
        causal = list(dict.fromkeys(value for word in words for value in CAUSAL[word]))
        for name in ("batch", "heads", "heads_kv", "seq", "seq_k", "d_head"):
            if values := getattr(self, name):
                axes[name] = values
        axes |= {"causal": causal} | ({"window": self.window} if self.window else {})
        axes |= {
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
