"""Ranges that a step emits and how they nest, recorded through NVTX's injection interface without a profiler.

The worker runs as it does under nsys; a library of a few lines takes the place of nsys.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.config import PRESETS, Mode, RunConfig
from cs_systems.measure.profilers._nsys import CAPTURE
from cs_systems.measure.runtime.channel import run_request, to_json
from cs_systems.measure.runtime.processes import worker_command
from tests import forks

SOURCE = Path(__file__).with_name("nvtx_injection.c")
TINY = RunConfig(model=PRESETS["tiny"], batch_size=2, device="cpu", warmup=1, steps=2, profiler="nsys")
BLOCKS = [f"block {number}" for number in range(TINY.model.num_layers)]
ATTENTION = [*["projections"] * 3, *["rope"] * 2, "scores", "softmax", "value", "output"]
Span = tuple[str, ...]  # the names of the ranges that are open, outermost first


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvtx", reason="nsys without a GPU requires the package nvtx")
    built = tmp_path_factory.mktemp("nvtx") / "injection.so"
    language = ["-x", "c", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type"]
    subprocess.run(["g++", *language, "-o", built, SOURCE], check=True)
    return built


def ranges_of(config: RunConfig, library: Path, folder: Path) -> list[Span]:
    """Return each range that measuring the cell opened, in order; each is closed in its own thread."""
    log = folder / "nvtx.log"
    surroundings = os.environ | {"NVTX_INJECTION64_PATH": str(library), "NVTX_LOG": str(log)}
    _, *words = worker_command(to_json(run_request([config], 0, folder / "cell")))
    done = forks.python(*words, environment=surroundings)
    assert done.stdout == "ok\n", done.stderr
    spans: list[Span] = []
    open_in: dict[str, list[str]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        action, thread, *name = line.split(" ", 2)
        stack = open_in.setdefault(thread, [])
        if action == "-":
            stack.pop()
            continue
        stack += name
        spans.append(tuple(stack))
    assert not any(open_in.values())
    return spans


def below(spans: list[Span], *outer: str) -> list[str]:
    """Return the names of the ranges directly inside the first range `outer`, in order."""
    start = spans.index(outer) + 1
    inside: list[str] = []
    for span in spans[start:]:
        if span[: len(outer)] != outer or span == outer:
            break
        if len(span) == len(outer) + 1:
            inside.append(span[-1])
    return inside


@pytest.fixture(scope="module")
def spans(library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    return ranges_of(TINY, library, tmp_path_factory.mktemp("step"))


def test_warm_up_emits_no_range(spans: list[Span]) -> None:
    assert spans[0] == (CAPTURE,)
    assert spans.count((CAPTURE,)) == 1
    assert spans.count((CAPTURE, "step")) == TINY.steps


def test_each_step_emits_the_same_ranges(spans: list[Span]) -> None:
    first, second = (i for i, span in enumerate(spans) if span == (CAPTURE, "step"))
    assert spans[first:second] == spans[second:]


def test_step_contains_phases_and_forward_contains_modules(spans: list[Span]) -> None:
    step = (CAPTURE, "step")
    forward = (*step, "forward")
    assert below(spans, *step) == ["forward", "loss", "backward", "optimizer"]
    assert below(spans, *forward) == ["embedding", *BLOCKS, "final norm", "lm_head"]
    for block in BLOCKS:
        assert below(spans, *forward, block) == ["norm", "attention", "norm", "ffn"]
        assert below(spans, *forward, block, "attention") == ATTENTION
    assert below(spans, *step, "optimizer") == []


def test_backward_reopens_forward_ranges_in_reverse(spans: list[Span]) -> None:
    backward = (CAPTURE, "step", "backward")
    assert below(spans, *backward) == ["loss", "lm_head", "final norm", *reversed(BLOCKS), "embedding"]
    for block in BLOCKS:
        assert below(spans, *backward, block) == ["ffn", "norm", "attention", "norm"]
        again = below(spans, *backward, block, "attention")
        assert list(dict.fromkeys(again)) == list(dict.fromkeys(reversed(ATTENTION)))


def test_fused_attention_has_no_inner_ranges(library: Path, tmp_path: Path) -> None:
    config = replace(TINY, attention="sdpa_math", mode=Mode.FORWARD, steps=1, warmup=0)
    inside = below(ranges_of(config, library, tmp_path), CAPTURE, "step", "forward", "block 0", "attention")
    assert inside == ["projections", "projections", "projections", "rope", "rope", "output"]


def test_no_range_is_emitted_without_a_profiler(library: Path, tmp_path: Path) -> None:
    assert ranges_of(replace(TINY, profiler="none"), library, tmp_path) == []
