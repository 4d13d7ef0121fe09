"""Bench of our conclusions: its fast cases, with their causes first, and how it reads a sentence."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmarks" / "diagnosis_truth.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagnosis_truth", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_fast_cases_have_their_cause_first_and_healthy_ones_none(bench: ModuleType) -> None:
    chosen = [case for case in bench.cases(("traces", "snapshots")) if case.name in bench.SAMPLE]
    assert {case.name for case in chosen} == {*bench.SAMPLE}
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(bench.ask, chosen)]
    verdicts = {case.name: bench.judge(case, one) for case, one in zip(chosen, answers, strict=True)}
    assert verdicts == {case.name: bench.Verdict("right" if case.healthy else "top-1") for case in chosen}


def test_recorded_loops_of_a_gpu_have_their_cause_first(bench: ModuleType) -> None:
    found = bench.recorded()
    assert len(found) > 20
    for case, answer in found:
        # recomputing takes a quarter of its step, and chains of small kernels more
        first = "top-3" if case.name == "recomputes_with_room" else "top-1"
        assert bench.judge(case, answer).word == ("right" if case.healthy else first), (case.name, answer.sentences)


@pytest.mark.parametrize(
    ("code", "sentence", "cause"),
    [
        (
            "own-python",
            "50% of the step is own Python: save() at a.py:9, torch.save",
            "checkpoint-writing",
        ),
        ("own-python", "50% of the step is the script's own Python: main() at evaluation.py:9", "host-python"),
        ("host-time", "the GPU is idle while the host writes a log, for up to 2 ms", "logging"),
        ("launch-bound", "the GPU waits for kernel launches in torch.save", "launch-bound"),
    ],
)
def test_cause_is_recognised_by_names_of_host_work_but_not_by_file_names(
    bench: ModuleType, code: str, sentence: str, cause: str
) -> None:
    assert bench.causes_of(code, sentence)[0] == cause


def test_later_cases_declare_lines_and_replacements_that_they_have(bench: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("planted_shares", SCRIPT.with_name("planted_shares.py"))
    assert spec is not None
    assert spec.loader is not None
    shares = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shares)
    chosen = [case for case in bench.cases() if case.generation > 1 and not case.healthy]
    assert len(chosen) == 166
    for case in chosen:
        assert case.places
        assert case.remedy
        compile(shares.replaced(case.path.read_text(), case.without), case.name, "exec")
