"""Search of levers against a modelled GPU: only the durations of its cells are made up, by a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cs_systems.advise.answer import command_words, errors
from cs_systems.advise.lever import Proposal, Situation, all_levers, proposals
from cs_systems.advise.numerics import Check
from cs_systems.advise.search import Nothing, Search
from cs_systems.config import Precision, RunConfig, preset
from cs_systems.core.experiments import ExperimentRow
from cs_systems.measure.runtime.experimenting import Spread, row
from cs_systems.record import Environment, Measurement, RunRecord, Sample

START = RunConfig(model=preset("small"), seq_len=512, steps=30, rounds=3)
GIB = 1 << 30


def machine(**others: object) -> Environment:
    known = dict.fromkeys(
        ("cs_systems", "code_version", "python", "torch", "platform", "cpu", "device", "device_name"), ""
    )
    known |= {"git_commit": None, "triton": None, "cuda": None, "cudnn": None, "cpu_threads": 1}
    return Environment(**{**known, **others})  # type: ignore[arg-type]


GPU = machine(
    device="cuda:0", device_name="NVIDIA H100 80GB HBM3", compute_capability="9.0", device_memory_bytes=80 * GIB
)
CPU = machine(device="cpu", device_name="a CPU")


def host_s(config: RunConfig) -> float:
    if config.graph == "step":
        return 0.0001
    return 0.026 if config.compile == "none" else 0.017


def parts_s(config: RunConfig) -> dict[str, float]:
    """Return the time of the device by part of the step."""
    products = {Precision.FP32: 0.033, Precision.TF32: 0.006}.get(config.precision, 0.004)
    attention = 0.005 if config.attention == "naive" else 0.001
    others = 0.009 if config.compile == "none" else 0.003
    return {"products": products, "attention": attention, "others": others}


def step_s(config: RunConfig) -> float:
    return max(host_s(config), sum(parts_s(config).values()) * config.batch_size / START.batch_size)


def experiments(config: RunConfig) -> list[ExperimentRow]:
    """Return the rows that the experiments of an eager step make."""
    if config.graph == "step" or config.compile != "none":
        return []
    now, found = parts_s(config), []
    bf16 = parts_s(replace(config, precision=Precision.BF16))
    if config.precision is Precision.FP32:
        found.append({**made("bf16", "products", bf16["products"], now["products"]), "experiment": "products"})
    if config.attention == "naive" and config.precision is Precision.BF16:
        found.append({**made("flash", "attention", 0.001, now["attention"]), "experiment": "attention"})
    found.append({**made("", "step", sum(now.values()), step_s(config)), "experiment": "device-only"})
    return found


def made(instead: str, of: str, then_s: float, now_s: float) -> ExperimentRow:
    return row(instead, of, Spread(then_s, then_s, then_s, 5), now_s, "")


class ModelledBench:
    """Bench whose cells take what the formula says, with a rest of the time that shrinks by a second per process."""

    def __init__(self, left: float = 1000.0, numbers: Callable[[RunConfig], bool] = lambda config: True) -> None:
        self.left, self.numbers, self.order = left, numbers, list[RunConfig]()

    def measure(self, config: RunConfig, number: int) -> RunRecord:
        self.left -= 1
        self.order.append(config)
        environment = GPU if config.device != "cpu" else CPU
        if config.attention in ("sdpa_cudnn", "flash_cuda"):
            return RunRecord("", config.to_dict(), "unavailable", number, "it is not installed; install it")
        noise = (1 + 0.001 * (n % 3) for n in range(config.steps))
        samples = tuple(
            Sample(n % config.rounds, False, step_s(config) * f, {"forward": 0.01}, {"forward": host_s(config)})
            for n, f in enumerate(noise)
        )
        peak = 4 * GIB * config.batch_size // START.batch_size
        measurement = Measurement("cuda_event", samples, 0.1, peak)
        results = {"experiments": experiments(config)}
        return RunRecord("", config.to_dict(), "ok", number, None, environment, measurement, results=results)

    def check(self, config: RunConfig) -> Check:
        return Check(self.numbers(config), "as the formula says")

    def left_s(self) -> float:
        return self.left

    def process_s(self) -> float:
        return 1.0


def searched(bench: ModelledBench, **situation: object) -> Search:
    search = Search(Situation(START, GPU, **situation), all_levers(), bench)  # type: ignore[arg-type]
    search.run()
    return search


def test_search_keeps_what_gains_in_the_order_of_expected_gains_and_proves_the_whole() -> None:
    bench = ModelledBench()
    answer = searched(bench).answer()
    kept = [(trial["lever"], trial["change"]) for trial in answer.kept]
    assert kept[:4] == [
        ("bf16", "precision bf16"),
        ("cuda_graph", "graph step"),
        ("attention_backend", "attention sdpa_flash"),
        ("compile", "compile default, compile-scope block"),
    ]
    assert answer.best.graph == "step"
    assert answer.best.precision is Precision.BF16
    expected = [trial["expected_s"] for trial in answer.kept]
    assert expected[:3] == pytest.approx([0.026, 0.018, 0.014], rel=0.01)
    assert expected[3] is None  # no experiment tells what a compiler makes
    assert max(errors(answer.trials)) < 0.01
    assert answer.whole is not None
    assert answer.whole.ratio == pytest.approx(0.008 / 0.047, rel=0.01)
    assert "5.87 (5.6" in answer.sentences()[0]
    reasons = {trial["change"]: trial["reason"] for trial in answer.others}
    assert reasons["attention flash_cuda"] == "unavailable: it is not installed; install it"
    assert answer.unfit  # levers with a reason why they do not apply


def test_candidates_alternate_with_the_best_cell_and_stop_when_a_gain_is_sure() -> None:
    bench = ModelledBench()
    searched(bench)
    assert bench.order[0] == START
    assert bench.order[1] == replace(START, precision=Precision.BF16)  # one process was enough
    weights = [c for c in bench.order if c.precision is Precision.BF16_PURE]
    at = bench.order.index(weights[0])
    without = replace(weights[0], precision=Precision.BF16, optimizer="default")
    pairs = bench.order[at - 1 : at + 5]
    assert [config == without for config in pairs] == [True, False, False, True, True, False]  # A B B A A B


def test_an_option_whose_numbers_change_too_much_is_rejected_with_what_was_seen() -> None:
    answer = searched(ModelledBench(numbers=lambda config: config.precision is Precision.FP32)).answer()
    assert answer.best.precision is Precision.FP32
    (row,) = [trial for trial in answer.trials if trial["lever"] == "bf16"]
    assert (row["status"], row["reason"]) == ("rejected", "the numbers change too much")
    assert row["numbers"] == "as the formula says"


def test_the_search_ends_with_its_time_and_names_what_it_did_not_try() -> None:
    answer = searched(ModelledBench(left=6.5)).answer()
    assert [trial["lever"] for trial in answer.kept] == ["bf16"]
    (graph,) = [trial for trial in answer.others if trial["change"] == "graph step"]
    assert graph["reason"] == "the search ended before it"


def test_a_larger_batch_is_compared_by_the_time_per_token() -> None:
    search = searched(ModelledBench(), changes_batch=True, memory_bytes=80 * GIB)
    batches = [trial for trial in search.answer().trials if trial["lever"] == "batch_size"]
    assert any(trial["status"] == "kept" for trial in batches) or batches[0]["reason"].startswith("expected")
    without = next(reason for reason in searched(ModelledBench()).answer().unfit if reason.startswith("batch_size"))
    assert "another batch is another training; allow it with --change-batch" in without


def test_a_candidate_above_the_memory_limit_fails() -> None:
    search = Search(Situation(START, GPU, memory_bytes=GIB), all_levers(), ModelledBench())
    search.run()
    assert any("more than 1.00 GiB" in trial["reason"] for trial in search.answer().others)


def test_a_start_without_a_number_is_refused() -> None:
    search = Search(Situation(replace(START, attention="flash_cuda"), GPU), all_levers(), ModelledBench())
    with pytest.raises(Nothing, match="it is not installed"):
        search.run()


@pytest.mark.parametrize("environment", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("goal", ["time", "memory"])
@pytest.mark.parametrize("name", all_levers())
def test_every_lever_gives_valid_cells_or_a_reason(name: str, goal: str, environment: Environment) -> None:
    lever = all_levers()[name]
    states = [
        START,
        replace(START, precision=Precision.BF16, attention="sdpa_flash"),
        replace(START, precision=Precision.BF16_PURE, optimizer="adamw_master", graph="step", compile="default"),
        RunConfig(workload="mine.py:factory"),
    ]
    for state in states:
        situation = Situation(state, environment, goal=goal, memory_bytes=80 * GIB, changes_batch=True)
        for found in proposals(situation, {name: lever}):
            if isinstance(found, Proposal):
                assert found.cell != state
                assert found.words
            else:
                assert found[1]
                assert not found[1].endswith(".")
    assert lever.lines


def test_the_command_of_a_cell_has_all_that_differs_from_the_defaults() -> None:
    config = replace(START, precision=Precision.BF16, parts=("fused_rmsnorm", "fused_rotary"), graph="step")
    words = " ".join(command_words(config))
    assert words.startswith("cs-systems time --size small --context-length 512")
    assert "--precision bf16" in words
    assert "--parts fused_rmsnorm fused_rotary" in words
    assert "--graph step" in words
