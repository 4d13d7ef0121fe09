"""Search of levers against a modelled GPU: only the durations of its cells are made up, by a formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cs_systems.advise.answer import Answer, command_words, errors, in_words, row_of
from cs_systems.advise.judge import FEW_PAIRS, GOALS, PROOF_LEVEL, Judgement, Seen, judge_time, level_after
from cs_systems.advise.lever import Proposal, ScriptPlan, Situation, all_levers, proposals
from cs_systems.advise.levers import fused_parts
from cs_systems.advise.numerics import Check
from cs_systems.advise.search import OWN_PAIRS, Search, Unmeasurable, _is_promising
from cs_systems.config import Precision, RunConfig, preset
from cs_systems.core.experiments import ExperimentRow
from cs_systems.core.tables import Tables
from cs_systems.formulas.energy import EnergyRow
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


# Milliseconds of a step of small at context 512, by profiles/training_step and profiles/advise; host: of the launches.
HOST = {"eager": 26.0, "compiled": 17.0, "graph": 0.1}
PRODUCTS = {Precision.FP32: 40.0, Precision.TF32: 6.0, Precision.BF16: 3.0, Precision.BF16_PURE: 2.2}
ATTENTION = {"naive": 4.0, "sdpa_efficient": 2.5, "sdpa_flash": 0.9, "sdpa_cudnn": 1.2, "flash_cuda": 0.5}
OTHERS = {"eager": 6.0, "eager with parts": 3.0, "compiled": 1.9, "compiled with parts": 1.15}
UPDATE = {"default": 1.1, "adamw_master": 0.8, "adamw_bf16_state": 0.65}
SAVED = {"fused_weight_update": 0.5, "update_in_backward": 0.1}  # of the update
PROCESS_S, COMPILER_S, CHECK_S = 6.0, 30.0, 3.0


def host_s(config: RunConfig) -> float:
    form = "graph" if config.graph == "step" else "eager" if config.compile == "none" else "compiled"
    return HOST[form] / 1e3


def parts_s(config: RunConfig) -> dict[str, float]:
    """Return the time of the device by part of the step."""
    form = ("eager" if config.compile == "none" else "compiled") + (" with parts" if config.parts else "")
    times = {
        "products": PRODUCTS[config.precision],
        "attention": ATTENTION[config.attention],
        "others": OTHERS[form],
        "update": UPDATE[config.optimizer] - sum(SAVED.get(part, 0.0) for part in config.parts),
    }
    return {name: ms / 1e3 for name, ms in times.items()}


def step_s(config: RunConfig) -> float:
    return max(host_s(config), sum(parts_s(config).values()) * config.batch_size / START.batch_size)


def experiments(config: RunConfig) -> list[ExperimentRow]:
    """Return the rows that the experiments of an eager step make."""
    if config.graph == "step" or config.compile != "none":
        return []
    now, found = parts_s(config), []
    if config.precision is Precision.FP32:
        bf16, plain = (PRODUCTS[each] / 1e3 for each in (Precision.BF16, Precision.BF16_PURE))
        spread = Spread(bf16, plain, bf16, 5)
        found.append({**row("bf16", "products", spread, now["products"], ""), "experiment": "products"})
    if config.attention == "naive" and config.precision is Precision.BF16:
        for name in ("flash", "cudnn"):
            time_s = ATTENTION[f"sdpa_{name}"] / 1e3
            found.append({**made(name, "attention", time_s, now["attention"]), "experiment": "attention"})
    found.append({**made("", "step", sum(now.values()), step_s(config)), "experiment": "device-only"})
    return found


def made(instead: str, of: str, then_s: float, now_s: float) -> ExperimentRow:
    return row(instead, of, Spread(then_s, then_s, then_s, 5), now_s, "")


class ModelledBench:
    """Bench with cells that take what the tables say, and a rest of the time that shrinks by what processes cost."""

    def __init__(
        self,
        left: float = 1000.0,
        numbers: Callable[[RunConfig], bool] = lambda config: True,
        missing: Sequence[str] = ("flash_cuda",),
        watts: float = 0.0,
    ) -> None:
        self.watts = watts
        self.budget = self.left = left
        self.numbers, self.missing, self.order = numbers, missing, list[RunConfig]()

    def measure(self, config: RunConfig, number: int) -> RunRecord:
        self.left -= PROCESS_S + COMPILER_S * (config.compile != "none" and config not in self.order)
        self.order.append(config)
        environment = GPU
        if config.attention in self.missing:
            reason = "it is not installed; install it"
            return RunRecord("", config.to_dict(), "unavailable", number, reason, environment)
        noise = (1 + 0.001 * (n % 3) for n in range(config.steps))
        samples = tuple(
            Sample(n % config.rounds, False, step_s(config) * f, {"forward": 0.01}, {"forward": host_s(config)})
            for n, f in enumerate(noise)
        )
        peak = 4 * GIB * config.batch_size // START.batch_size
        measurement = Measurement("cuda_event", samples, 0.1, peak)
        results: Tables = {"experiments": experiments(config), "ran": [{"tokens": 512 * config.batch_size}]}
        if self.watts:
            joules = self.watts * step_s(config) * config.steps * (1 + 0.001 * number)
            results |= {
                "energy": [EnergyRow(source="nvml", steps=config.steps, window_s=2.0, energy_j=joules, idle_w=None)]
            }
        return RunRecord("", config.to_dict(), "ok", number, None, environment, measurement, results=results)

    def sampled(self) -> None:
        return None

    def check(self, config: RunConfig) -> Check:
        self.left -= CHECK_S
        return Check(self.numbers(config), "as the tables say")

    def left_s(self) -> float:
        return self.left

    def spent_s(self) -> float:
        return self.budget - self.left

    def process_s(self) -> float:
        return PROCESS_S

    def proof_s(self, is_kept: bool) -> float:
        return 4 * PROCESS_S


def searched(bench: ModelledBench, **situation: object) -> Search:
    search = Search(Situation(START, GPU, **situation), all_levers(), bench)  # type: ignore[arg-type]
    search.run()
    return search


def test_search_keeps_changes_that_gain_in_order_of_gain_per_cost_and_proves_the_result() -> None:
    answer = searched(ModelledBench()).answer()
    kept = [(trial["lever"], trial["change"]) for trial in answer.kept]
    assert kept[:3] == [
        ("bf16 + cuda_graph", "precision bf16, graph step"),
        ("attention_backend", "attention sdpa_flash"),
        ("bf16_weights", "precision bf16-pure, optimizer adamw_master"),
    ]
    assert answer.best.graph == "step"
    assert answer.best.precision is Precision.BF16_PURE
    expected = [trial["expected_s"] for trial in answer.kept]
    assert expected[:3] == pytest.approx([0.0141, 0.0110, 0.0102], rel=0.01)
    compiled = next(trial for trial in answer.kept if trial["lever"] == "compile")
    assert compiled["expected_s"] is None  # no experiment tells what a compiler makes
    assert max(errors(answer.trials)) < 0.05
    assert answer.whole is not None
    assert answer.whole.ratio == pytest.approx(step_s(answer.best) / 0.0511, rel=0.01)
    reasons = {trial["change"]: trial["reason"] for trial in answer.others}
    assert reasons["attention flash_cuda"] == "unavailable: it is not installed; install it"
    assert answer.unfit  # levers with a reason why they do not apply


@pytest.mark.parametrize(("has_cuda_core", "gain"), [(True, 12.0), (False, 10.0)])
def test_search_of_four_minutes_makes_a_plain_step_ten_times_as_fast(
    has_cuda_core: bool, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_parts, "_has_cuda_core", lambda: has_cuda_core)
    bench = ModelledBench(left=240.0, missing=() if has_cuda_core else ("flash_cuda",))
    answer = searched(bench).answer()
    assert answer.whole is not None
    assert 1 / answer.whole.ratio > gain
    assert bench.left > 0
    with_expectation = [row for row in answer.kept if row["expected_s"]]
    assert 2 * len(with_expectation) >= len(answer.kept)
    assert max(errors(answer.trials)) < 0.25


def test_rejected_change_is_tried_again_after_a_cuda_graph_removes_the_launch_bound() -> None:
    levers = {name: lever for name, lever in all_levers().items() if name in ("fused_parts", "cuda_graph")}
    start = replace(START, precision=Precision.BF16, attention="sdpa_flash")
    bench = ModelledBench()
    search = Search(Situation(start, GPU), {**levers, "cuda_graph": replace(levers["cuda_graph"], cost=100.0)}, bench)
    search.run()
    trials = [(row["lever"], row["status"]) for row in search.answer().trials if row["change"]]
    assert trials == [("fused_parts", "rejected"), ("cuda_graph", "kept"), ("fused_parts", "kept")]


def test_clear_gain_is_kept_after_one_process_without_measuring_the_best_cell_again() -> None:
    bench = ModelledBench()
    answer = searched(bench).answer()
    assert bench.order[:2] == [START, replace(START, precision=Precision.BF16, graph="step")]
    assert [row["processes"] for row in answer.kept[:3]] == [1, 1, 1]


def test_option_without_gain_in_its_first_pair_is_not_measured_again() -> None:
    start = replace(START, precision=Precision.BF16, attention="sdpa_flash")
    bench = ModelledBench()
    search = Search(Situation(start, GPU), {"fused_parts": all_levers()["fused_parts"]}, bench)
    search.run()
    assert [config == start for config in bench.order] == [True, False]


def test_noise_of_a_host_may_hide_a_gain_from_the_first_pair() -> None:
    search = Search(Situation(START, CPU), all_levers(), ModelledBench())
    noisy, quiet = Judgement(None, 1.2, 0.5, 2.9), Judgement(None, 1.2, 1.1, 1.3)
    assert not search._is_hopeless(noisy)
    assert search._is_hopeless(quiet)
    assert Search(Situation(START, GPU), all_levers(), ModelledBench())._is_hopeless(noisy)


@pytest.mark.parametrize(
    ("pairs", "ratio", "high", "is_promising"),
    [
        (2, 1.1, 3.0, True),  # too few pairs to say
        (3, 0.9, 2.0, True),  # twelve pairs narrow 2.2 to 1.2, within twice the gain
        (3, 0.9, 3.0, False),
        (3, 0.98, 1.5, False),
        (3, 0.9, None, True),
        (9, 0.9, 1.15, True),
        (9, 0.9, 1.25, False),
    ],
)
def test_gain_is_promising_where_twelve_pairs_may_prove_it(
    pairs: int, ratio: float, high: float | None, is_promising: bool
) -> None:
    assert _is_promising(Judgement(None, ratio, 0.5, high), pairs) is is_promising


@pytest.mark.parametrize(("keeps", "pairs"), [(True, 6), (False, 12)])
def test_a_gain_that_more_pairs_hardly_prove_has_them_only_where_nothing_is_kept(
    keeps: bool, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time that is left goes to the proof of what is kept."""

    def judged(seen: Seen) -> Judgement:
        if seen.candidate[0].run_config.attention != START.attention:
            return Judgement(None, 0.9, 0.5, 1.8)
        return Judgement(keeps, 0.5, 0.45, 0.55)

    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=judged))
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    search = Search(Situation(START, CPU), levers, ModelledBench(5000.0, missing=()))
    search.run()
    (row,) = (row for row in search.answer().trials if row["change"] == "attention sdpa_flash")
    assert row["reason"].startswith(f"{pairs} pairs"), row
    assert row["reason"].endswith("; 12 pairs would hardly prove it") is keeps
    assert not search.answer().is_unfinished


class NoisyBench(ModelledBench):
    """Bench with processes that differ by more than the gain of an option."""

    FACTORS = (1.05, 0.96, 1.0, 1.02, 0.975, 1.03, 0.965, 1.01, 0.99)

    def measure(self, config: RunConfig, number: int) -> RunRecord:
        record = super().measure(config, number)
        if record.measurement is None:
            return record
        factor = self.FACTORS[(number + 4 * (config != START)) % len(self.FACTORS)]
        samples = tuple(replace(each, wall_s=factor * each.wall_s) for each in record.measurement.samples)
        return replace(record, measurement=replace(record.measurement, samples=samples))


@pytest.mark.parametrize(("left", "status"), [(5000.0, "kept"), (12 * PROCESS_S, "rejected")])
def test_search_comes_back_to_a_gain_that_few_pairs_cannot_prove_if_time_is_left(left: float, status: str) -> None:
    bench = NoisyBench(left)
    search = Search(Situation(START, CPU), {"attention_backend": all_levers()["attention_backend"]}, bench)
    search.run()
    (row,) = (row for row in search.answer().trials if row["change"] == "attention sdpa_flash")
    assert row["status"] == status, row
    assert (row["processes"] > 2 * FEW_PAIRS + 1) == (status == "kept")  # one is of the start alone
    assert row["gain"] == pytest.approx(step_s(START) / step_s(replace(START, attention="sdpa_flash")), rel=0.05)


SOME, NONE = Judgement(None, 1 / 1.08, 1 / 1.15, 1 / 1.01, False), Judgement(None, 1.3, 0.7, 1.9)
LEFT_OUT = "; the search ended before further pairs"


@pytest.mark.parametrize(
    ("judged", "machine", "left", "reason"),
    {
        "deferred, then no time": (SOME, CPU, 7, f"1 pair of processes cannot prove a gain of 8%{LEFT_OUT}"),
        "loss deferred, then no time": (NONE, CPU, 7, f"no gain of 1% shown by 1 pair of processes{LEFT_OUT}"),
        "no time in the second trial": (SOME, CPU, 11, f"3 pairs of processes cannot prove a gain of 8%{LEFT_OUT}"),
        "few pairs with a loss": (NONE, CPU, 900, "no gain of 1% shown by 3 pairs of processes"),
        "all pairs with a gain": (SOME, CPU, 900, "12 pairs of processes cannot prove a gain of 8%"),
        "gain without proof on a GPU": (SOME, GPU, 900, "12 pairs of processes cannot prove a gain of 8%"),
        "first pair without a gain on a GPU": (NONE, GPU, 900, "no gain of 1% shown by 1 pair of processes"),
        "large gain excluded": (
            Judgement(None, 1.05, 0.95, 1.2), CPU, 900, "no gain of 1% shown by 1 pair of processes",
        ),
        "gain excluded": (Judgement(False, 1.05, 1.02, 1.2), CPU, 900, "no gain of 1% or more"),
    }.values(),
)  # fmt: skip
def test_reason_of_a_rejected_option_says_what_its_pairs_showed_and_why_there_are_no_more(
    judged: Judgement, machine: Environment, left: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=lambda seen: judged))
    levers = {"attention_backend": all_levers()["attention_backend"]}
    start = replace(START, precision=Precision.BF16)
    search = Search(Situation(start, machine), levers, ModelledBench(left * PROCESS_S, missing=()))
    search.run()
    reasons = {row["change"]: row["reason"] for row in search.answer().others}
    assert reasons["attention flash_cuda" if machine is GPU else "attention sdpa_flash"] == reason


def test_reason_of_an_option_that_was_left_when_another_was_kept_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host, attention waits after its first pair; bf16 is kept, and leaves no time to try attention again."""
    gain = Judgement(True, 0.5, 0.45, 0.55)

    def judged(seen: Seen) -> Judgement:
        return SOME if seen.candidate[0].run_config.attention != START.attention else gain

    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=judged))
    lines: list[str] = []
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    levers["attention_backend"] = replace(levers["attention_backend"], usual=0.9)
    bench = ModelledBench(7 * PROCESS_S)
    search = Search(Situation(START, CPU), levers, bench, lines.append)
    search.run()
    reasons = {row["change"]: row["reason"] for row in search.answer().trials}
    assert reasons["precision bf16"] == ""
    assert "1 pair of processes cannot prove a gain of 8%; not tried again on what was kept later" in reasons.values()
    assert any(
        line.startswith("  kept, ") and "2.00 (1.82 … 2.22) times as fast, side by side" in line for line in lines
    )


def test_line_before_a_trial_has_the_latest_step_of_the_best_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(ModelledBench):
        """Bench of a host that was busy when the search began."""

        def measure(self, config: RunConfig, number: int) -> RunRecord:
            record = super().measure(config, number)
            assert record.measurement is not None
            if len(self.order) > 1:
                return record
            samples = tuple(replace(each, wall_s=3 * each.wall_s) for each in record.measurement.samples)
            return replace(record, measurement=replace(record.measurement, samples=samples))

    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=lambda seen: NONE))
    lines: list[str] = []
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    search = Search(Situation(START, CPU), levers, Loaded(), lines.append)
    search.run()
    shown = [line.partition(", now ")[2] for line in lines if line.startswith("trying ")]
    assert (shown[0], shown[-1]) == ("153 ms", "51.2 ms")


def test_an_option_without_a_large_gain_in_its_first_pair_waits_for_the_others() -> None:
    """On a host, attention gains little and is usual; bf16 gains much: it is proved before attention is decided."""
    lines: list[str] = []
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    levers["attention_backend"] = replace(levers["attention_backend"], usual=0.9)
    search = Search(Situation(START, CPU), levers, NoisyBench(5000.0), lines.append)
    search.run()
    tried = [line.split(":")[0].removeprefix("trying ") for line in lines if line.startswith("trying")]
    rows = {row["change"]: row for row in search.answer().trials}
    assert tried[0] == "attention_backend"
    assert tried.index("bf16") < len(tried) - 1 - tried[::-1].index("attention_backend")
    assert rows["precision bf16"]["status"] == "kept"


def test_a_large_gain_in_noise_is_proved_before_options_of_less_promise_are_tried() -> None:
    class Noisier(NoisyBench):
        """Bench with processes that differ by as much as torch.compile gains."""

        FACTORS = (1.5, 0.8, 1.0, 1.2, 0.7, 1.3, 0.75, 1.1, 0.9)

    lines: list[str] = []
    start = replace(START, precision=Precision.BF16)
    search = Search(Situation(start, CPU), {"compile": all_levers()["compile"]}, Noisier(1000.0), lines.append)
    search.run()
    tried = [line.partition(", now")[0] for line in lines if line.startswith("trying")]
    assert len({*tried}) == 1 < len(tried), tried
    assert search.answer().kept


def test_a_gain_near_the_noise_is_measured_in_pairs_that_alternate() -> None:
    bench = ModelledBench()
    start = replace(START, precision=Precision.BF16_PURE, optimizer="adamw_master", graph="step")
    search = Search(Situation(start, GPU), {"bf16_moments": all_levers()["bf16_moments"]}, bench)
    search.run()
    assert [config == start for config in bench.order[:5]] == [True, False, False, True, True]  # A B, B A, A B


def test_option_that_changes_losses_too_much_is_rejected_with_the_difference() -> None:
    answer = searched(ModelledBench(numbers=lambda config: config.precision is Precision.FP32)).answer()
    assert answer.best.precision is Precision.FP32
    trials = [trial for trial in answer.trials if trial["lever"].startswith("bf16") and trial["status"] == "rejected"]
    assert {trial["reason"] for trial in trials} == {"the numbers change too much"}
    assert trials[0]["numbers"] == "as the tables say"


def test_search_ends_when_its_time_is_up_and_names_changes_not_tried() -> None:
    answer = searched(ModelledBench(left=40.0)).answer()
    assert [trial["lever"] for trial in answer.kept] == ["bf16 + cuda_graph"]
    (weights,) = [trial for trial in answer.others if trial["lever"] == "bf16_weights"]
    assert weights["reason"] == "the search ended before it"


def test_proof_of_the_whole_gain_has_the_level_of_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[float] = []

    def judged(seen: Seen) -> Judgement:
        levels.append(seen.confidence)
        return judge_time(seen)

    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=judged))
    answer = searched(ModelledBench(left=60.0)).answer()
    assert answer.whole is not None
    assert levels[0] == level_after(1)
    assert levels[-1] == PROOF_LEVEL


def test_width_ends_the_proof_only_where_its_own_pairs_show_the_variation() -> None:
    bench = ModelledBench()
    search = searched(bench)
    proof = bench.order[-2 * OWN_PAIRS :]
    assert Counter(proof) == {START: OWN_PAIRS, search.best: OWN_PAIRS}


def test_options_wait_once_the_time_left_is_that_of_the_proof() -> None:
    class Careful(ModelledBench):
        """Bench that wants nearly all the time for the proof, once an option is kept."""

        def proof_s(self, is_kept: bool) -> float:
            return self.budget - 20.0 if is_kept else super().proof_s(is_kept)

    answer = searched(Careful(left=100.0)).answer()
    assert [trial["lever"] for trial in answer.kept] == ["bf16 + cuda_graph"]
    assert len(searched(ModelledBench(left=100.0)).answer().kept) > 1


def test_a_slow_first_process_is_measured_again_before_the_time_is_called_too_short() -> None:
    class Cold(ModelledBench):
        """Bench with a first process that reads its libraries from a slow disk."""

        def measure(self, config: RunConfig, number: int) -> RunRecord:
            self.left -= 0.0 if self.order else 40.0
            return super().measure(config, number)

        def process_s(self) -> float:
            return PROCESS_S + (0.0 if len(self.order) > 1 else 40.0)

    answer = searched(Cold(left=100.0)).answer()
    assert answer.kept
    assert searched(Cold(left=50.0)).answer().sentences() == [
        "nothing was tried: a trial and its proof take longer than the time left; give a longer --budget"
    ]


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


@pytest.mark.parametrize("goal", ["energy", "tokens-per-joule"])
def test_energy_is_a_goal_only_with_a_counter_and_is_refused_with_the_reason_without(goal: str) -> None:
    answer = searched(ModelledBench(watts=500.0), goal=goal).answer()
    assert "times as energy-efficient as the start" in answer.sentences()[0]
    first, *kept = answer.waterfall
    assert first["step_j"] == pytest.approx(500 * 0.0511, rel=0.01)
    assert first["tokens_per_j"] == pytest.approx(2048 / first["step_j"])
    assert kept[0]["lever"] == "bf16 + cuda_graph"
    assert kept[0]["gain"] == pytest.approx(51.1 / 14.1, rel=0.01)
    with pytest.raises(Unmeasurable, match="no counter of joules can be read here"):
        searched(ModelledBench(), goal=goal)


def test_search_without_time_for_a_trial_says_how_long_one_takes() -> None:
    lines: list[str] = []
    Search(Situation(START, GPU), all_levers(), ModelledBench(left=20.0), lines.append).run()
    told = "the budget leaves 8.00 s, and one trial with its proof takes 30.0 s; give a longer --budget"
    again = "measuring the start again, because a first process also reads its libraries and compiles"
    assert lines == [again, told]


@pytest.mark.parametrize(
    ("status", "why"), [("failed", "each option that was tried failed"), ("rejected", "no option")]
)
def test_answer_tells_options_that_failed_from_those_without_a_gain(status: str, why: str) -> None:
    row = row_of("bf16", "precision bf16", status) | {"processes": 2}
    assert why in Answer(START, START, (), (row,), "time").sentences()[0]


class Interrupting(ModelledBench):
    """Bench of a user who presses Ctrl-C while a process runs, counted from 1."""

    def __init__(self, process: int) -> None:
        super().__init__(missing=())
        self.process = process

    def measure(self, config: RunConfig, number: int) -> RunRecord:
        if len(self.order) + 1 == self.process:
            raise KeyboardInterrupt
        return super().measure(config, number)


GO_ON = "to go on, repeat the command with --out and this folder"


@pytest.mark.parametrize(
    ("process", "sentences"),
    [
        (2, [f"nothing was tried: the search was interrupted before its first trial ended; {GO_ON}"]),
        (
            4,  # the start, the first trial, and the start again
            [
                "nothing was kept so far: no option showed a sure gain",
                f"1 of 2 options was tried; the search was interrupted before the other and before further pairs of "
                f"1 option; {GO_ON}",
            ],
        ),
    ],
)
def test_answer_after_ctrl_c_counts_the_options_that_were_tried_and_says_how_to_go_on(
    process: int, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=lambda seen: SOME))
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    search = Search(Situation(START, CPU), levers, Interrupting(process))
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert search.answer().sentences()[:2] == sentences


def test_ctrl_c_in_a_trial_that_compares_an_option_anew_leaves_one_row_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host, attention waits after its first pair; bf16 is kept, and attention is tried on it again."""

    class InSecondTrial(ModelledBench):
        def measure(self, config: RunConfig, number: int) -> RunRecord:
            if (config.attention, config.precision) == ("sdpa_flash", Precision.BF16):
                raise KeyboardInterrupt
            return super().measure(config, number)

    def judged(seen: Seen) -> Judgement:
        return SOME if seen.candidate[0].run_config.attention != START.attention else Judgement(True, 0.5, 0.45, 0.55)

    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=judged))
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    levers["attention_backend"] = replace(levers["attention_backend"], usual=0.9)
    search = Search(Situation(START, CPU), levers, InSecondTrial())
    with pytest.raises(KeyboardInterrupt):
        search.run()
    (row,) = [row for row in search.answer().trials if row["change"] == "attention sdpa_flash"]
    assert row["reason"] == "1 pair of processes cannot prove a gain of 8%; not tried again on what was kept later"
    assert search.answer().sentences()[1] == (f"the search was interrupted before further pairs of 1 option; {GO_ON}")


@pytest.mark.parametrize(
    ("left", "sentence"),
    [
        (
            6,
            "1 of 2 options was tried; the budget ended before the other and before further pairs of 1 option; "
            f"{GO_ON}, or also a longer --budget",
        ),
        (11, f"the budget ended before further pairs of 2 options; {GO_ON}, or also a longer --budget"),
        (900, ""),
    ],
)
def test_answer_says_what_the_budget_left(left: int, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GOALS, "time", replace(GOALS["time"], judge=lambda seen: SOME))
    levers = {name: all_levers()[name] for name in ("attention_backend", "bf16")}
    search = Search(Situation(START, CPU), levers, ModelledBench(left * PROCESS_S, missing=()))
    search.run()
    result, *others = search.answer().sentences()
    assert [each for each in others if not each.startswith("expected against")] == [sentence] * bool(sentence)
    assert result == f"nothing was kept{' so far' if sentence else ''}: no option showed a sure gain"


def test_answer_tells_a_gain_whose_numbers_failed_from_no_gain() -> None:
    levers = {"bf16": all_levers()["bf16"]}
    search = Search(Situation(START, GPU), levers, ModelledBench(numbers=lambda config: False))
    search.run()
    because = "no option showed a sure gain and passed the check of the numbers"
    assert search.answer().sentences()[0] == f"nothing was kept: {because}"


def test_option_whose_numbers_cannot_be_compared_is_rejected_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelledBench, "check", lambda bench, cell: Check(False, "its loss is NaN or infinite", False))
    search = Search(Situation(START, GPU), {"bf16": all_levers()["bf16"]}, ModelledBench())
    search.run()
    assert {row["reason"] for row in search.answer().others} == {"its loss is NaN or infinite"}


def test_answer_without_a_lever_that_applies_says_so() -> None:
    search = Search(Situation(START, CPU), {"tf32": all_levers()["tf32"]}, ModelledBench())
    search.run()
    assert search.answer().sentences() == ["nothing was tried, because no lever applies"]


def test_a_start_without_a_number_is_refused() -> None:
    search = Search(Situation(replace(START, attention="flash_cuda"), GPU), all_levers(), ModelledBench())
    with pytest.raises(Unmeasurable, match="it is not installed"):
        search.run()


@pytest.mark.parametrize("environment", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("goal", ["time", "memory", "energy"])
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


def test_command_of_a_cell_has_every_option_that_differs_from_the_default() -> None:
    config = replace(START, precision=Precision.BF16, parts=("fused_rmsnorm", "fused_rotary"), graph="step")
    words = " ".join(command_words(config))
    assert words.startswith("cs-systems time --size small --context-length 512")
    assert "--precision bf16" in words
    assert "--parts fused_rmsnorm fused_rotary" in words
    assert "--graph step" in words


@pytest.mark.parametrize(("machine", "why"), [(GPU, "nothing measured predicts"), (CPU, "expectations require a GPU")])
def test_kept_options_without_an_expectation_have_their_reason(machine: Environment, why: str) -> None:
    record = replace(ModelledBench().measure(START, 0), environment=machine)
    answer = Answer(START, START, (record, record), (row_of("allocator", "expandable segments", "kept"),), "time")
    assert why in answer.sentences()[-1]


def of_script(*levers: str) -> Proposal:
    return Proposal(levers[-1], ScriptPlan(levers), levers[-1], "", 0.1)


def test_a_lever_that_another_replaces_is_a_step_of_the_waterfall_and_not_kept() -> None:
    record = ModelledBench().measure(START, 0)
    search = Search(Situation(ScriptPlan(), GPU, history=(record,)), {}, ModelledBench())
    for option in (of_script("compile"), of_script("reduce_overhead")):
        search.rows.append(row_of(option.lever, option.words, "kept"))
        search._keep(option, record)
    answer = search.answer()
    assert [row["lever"] for row in answer.kept] == ["reduce_overhead"]
    steps = [(row["lever"], row["change"]) for row in answer.waterfall]
    assert steps[1:] == [("compile", "compile, replaced below"), ("reduce_overhead", "reduce_overhead")]
    assert answer.others == []


def test_records_that_are_not_compared_show_how_processes_vary() -> None:
    search = Search(Situation(START, GPU), {}, ModelledBench())
    first, second = (search._measure(START) for _ in range(2))
    other = search._measure(replace(START, precision=Precision.BF16))
    assert search._others(first) == [[second], [other]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Judgement(True, 0.5, 0.4, 0.625), "2.00 (1.60 … 2.50) times as fast"),
        (Judgement(None, 0.8, 0.4, 1.6), "no sure gain: 1.25 (0.62 … 2.50) times as fast"),
        (Judgement(False, 1.25, 1.1, 1.6), "a loss: 0.80 (0.62 … 0.91) times as fast"),
        (
            Judgement(None, 0.8, 0.7, 0.9, is_sure=False),
            "no sure gain: in too few processes for an interval, 1.25 times as fast",
        ),
    ],
)
def test_words_of_a_judgement_do_not_contradict_its_interval(found: Judgement, words: str) -> None:
    assert in_words(found) == words
