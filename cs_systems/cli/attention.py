"""Time attention alone: every combination of backends, shapes and precisions, forward, backward and both together.

Each row shows TFLOP/s and peak memory. Credited FLOPs follow the formula, with causal attention halved; executed
FLOPs include whole tiles, padding and recomputation.
On a GPU, kernels are timed without the launch overhead of the CPU, and the time of a step is the sum of its phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from cs_systems.cli._document import MoreColumns, PrintedFormat
from cs_systems.cli._options import (
    MaybeNames,
    Names,
    Steps,
    Sweep,
    axes_of,
    check_keep_graph,
    check_modes,
    derived,
    of_each,
    of_subject,
)
from cs_systems.config import ConfigError, Mode, RunConfig, grid, one_of
from cs_systems.core.fields import Subject

DTYPES = ("bf16", "fp16", "fp32", "tf32")
CAUSAL = {"false": (False,), "true": (True,), "both": (False, True)}


@dataclass(frozen=True)
@derived(*of_subject(Subject.ATTENTION))
class AttentionCells:
    """Attention calls to measure: every combination of the values given."""

    attention: Annotated[Names, arg(help="backends (cs-systems doctor lists them), or path.py:function")] = (
        "naive",
        "sdpa_flash",
    )
    precision: Annotated[Names, arg(aliases=["--dtype"], help=f"dtype of the tensors: {', '.join(DTYPES)}")] = ("bf16",)
    causal: Annotated[MaybeNames, arg(metavar="[false|true|both]", help="causal mask; without a value: true")] = (
        "false",
    )
    mode: Annotated[Names, arg(help="forward, backward (alone, over a retained graph), forward-backward")] = (
        "forward",
        "backward",
        "forward-backward",
    )

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

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
        causal = list(dict.fromkeys(value for word in words for value in CAUSAL[word]))
        base = steps.base(workload="attention", mode=Mode.FORWARD)
        return grid(base, **axes_of(self, Subject.ATTENTION) | {"causal": causal})


@dataclass(frozen=True)
class Attention:
    cells: AttentionCells = field(default_factory=AttentionCells)
    steps: Steps = field(default_factory=Steps)
    sweep: Sweep = field(default_factory=Sweep)
    columns: MoreColumns = ()
    format: PrintedFormat = "terminal"


ARGS = Attention


def run(args: Attention) -> int:
    from cs_systems.cli._sweep import run_and_report

    configs = of_each(args.steps, args.cells.configs)
    return run_and_report(configs, args.sweep, "attention", args.steps.seed, columns=args.columns)
