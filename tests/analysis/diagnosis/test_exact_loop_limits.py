"""Limits and exact numbers of the newer rules about a recorded loop, where both sides of a limit meet."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.analysis.diagnosis import python_threads, rate_as_factor, slow_settings, vanishing_rate
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._longest import NOTABLE, longest_line
from tests.analysis.diagnosis.test_loop_rules import (
    BUSY,
    COVARIANCE,
    DRAWN,
    FACTOR,
    LOOP,
    OF_INPUT,
    ONE_HOT,
    PAIRED,
    RATE,
    REMADE,
    SAME_ROWS,
    SETTING,
    SHORT,
    TWICE,
    UNREGISTERED,
    inner,
    own,
)
from tests.analysis.diagnosis.test_rule_limits import at_limit, check_numbers, step


def lonely(time_s: float, line: int = 8, **known: Any) -> dict[str, Any]:
    return own("average", line, time_s, "dist.all_reduce") | known


def one_hot(
    *times_s: float, made_s: float = 0.0, samples: int = 5, forward: float = 1.0, optimizer: float = 0.0
) -> Evidence:
    """Return a step with layers that multiply one-hot rows, half of which no row uses, in forward alone."""
    layer = ONE_HOT | {"rows": 1_500, "share": 1.0, "backward_ratio": 0.0}
    layers = [layer | {"module": f"Net.{n}", "time_s": time_s} for n, time_s in enumerate(times_s)]
    made = inner("Net.forward", 8, made_s, method="one_hot", source="x = F.one_hot(i, n)", samples=samples)
    tables = {"one_hot_products": layers, "inner_lines": [made] if made_s else []}
    return step(tables, forward=forward, optimizer=optimizer)


def busy(own_python: Any = (), **known: Any) -> Evidence:
    return step({"python_threads": [BUSY | {"waited_share": 0.5} | known], "own_python": [*own_python]})


def factor(**known: float) -> Evidence:
    return step({"rate_factors": [FACTOR | {"initial": INITIAL} | known]})


def settings(*rows: dict[str, Any]) -> Evidence:
    return step({"slow_settings": [SETTING | known for known in rows]}, forward=0.5)


def paired(*lines: tuple[str, int, float]) -> Evidence:
    return step({"paired_targets": [PAIRED], "inner_lines": [inner(*line, phase="loss") for line in lines]})


def same_rows(*lookups: tuple[str, float]) -> list[dict[str, Any]]:
    return [SAME_ROWS | {"tensor": of, "copies": 2, "forward_s": s, "backward_s": s} for of, s in lookups]


def many(table: str, row: dict[str, Any], *known: dict[str, Any]) -> Evidence:
    return step({table: [row | each for each in known]})


INITIAL = 1e-3  # learning rate
DELAY = python_threads.DELAYED * 0.5
PLATEAU = SHORT | {"scheduler": vanishing_rate.PLATEAU, "last": 2e-5}
A_TENTH = same_rows(("Net.table", 0.1))  # half of the time is that of the second copy

# rule: limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "decompositions: 15% of the step for diagonal matrices": (
        many("covariances", COVARIANCE, {"time_s": 0.1499}), many("covariances", COVARIANCE, {"time_s": 0.15}),
    ),
    "decompositions: diagonal matrices in a step whose time is known": (
        Evidence({"covariances": [COVARIANCE]}, config=LOOP), many("covariances", COVARIANCE, {"time_s": 0.5}),
    ),
    "input_gradients: a tenth of the step": (
        step({"input_gradients": [OF_INPUT]}, backward=0.1999), step({"input_gradients": [OF_INPUT]}, backward=0.2),
    ),
    "input_gradients: of a backward whose time is known": (
        step({"input_gradients": [OF_INPUT]}), step({"input_gradients": [OF_INPUT]}, backward=0.5),
    ),
    "lonely_collectives: 3 samples": (
        step({"own_python": [lonely(0.5, samples=2)]}), step({"own_python": [lonely(0.5, samples=3)]}),
    ),
    "lonely_collectives: a tenth of the step": (
        step({"own_python": [lonely(0.0999)]}), step({"own_python": [lonely(0.1)]}),
    ),
    "one_hot_products: a tenth of the step": (one_hot(0.0999), one_hot(0.1)),
    "one_hot_products: 5 samples of the line that makes them": (
        one_hot(0.0625, made_s=0.0625, samples=4), one_hot(0.0625, made_s=0.0625, samples=5),
    ),
    "python_threads: a quarter of the waits for a core": (
        busy(operator_threads=2, pool_queued_share=DELAY + 1e-4), busy(operator_threads=2, pool_queued_share=DELAY),
    ),
    "python_threads: 5 tries at which the lock was free": (
        busy(tries=5, held_share=0.0), busy(tries=4, held_share=0.0),
    ),
    "python_threads: 15% of the step": (busy(waited_share=0.1499), busy(waited_share=0.15)),
    "python_threads: half of the time of the waits": (busy(busy_share=0.2499), busy(busy_share=0.25)),
    "rate_as_factor: a fifth of the rate": (
        factor(factor=0.1999 * INITIAL), factor(factor=rate_as_factor.LEAST_RATIO * INITIAL),
    ),
    "rate_as_factor: twice the rate": (
        factor(largest_factor=2.0001 * INITIAL), factor(largest_factor=rate_as_factor.MOST_RATIO * INITIAL),
    ),
    "repeated_rows: a tenth of the step": (
        step({"repeated_rows": same_rows(("Net.table", 0.0999))}), step({"repeated_rows": A_TENTH}),
    ),
    "repeated_rows: of a step whose time is known": (
        Evidence({"repeated_rows": A_TENTH}, config=LOOP), step({"repeated_rows": A_TENTH}),
    ),
    "slow_settings: 1.4 times as slow": (
        settings({"time_s": slow_settings.SLOWER * 0.375, "usual_s": 0.375}),
        settings({"time_s": slow_settings.SLOWER * 0.375 + 1e-4, "usual_s": 0.375}),
    ),
    "slow_settings: 1.25 times the phases": (
        settings({"time_s": slow_settings.LONGEST * 0.5 + 1e-4}), settings({"time_s": slow_settings.LONGEST * 0.5}),
    ),
    "slow_settings: a tenth of the step": (
        settings({"time_s": 0.1999, "usual_s": 0.1}), settings({"time_s": 0.2, "usual_s": 0.1}),
    ),
    "vanishing_rate: a rate above 0": (
        step({"learning_rates": [RATE | {"largest_after": 0.0}]}),
        step({"learning_rates": [RATE | {"largest_after": 1e-12}]}),
    ),
}  # fmt: skip

# rule: case → (evidence, share, least that is left, words of the sentence)
NUMBERS: dict[str, tuple[Evidence, float, float | None, str]] = {
    "decompositions: diagonal matrices, by the longest": (
        many("covariances", COVARIANCE, {"time_s": 0.75}, {"time_s": 1.25, "rows": 99}), 1.0, None,
        "100% of the step is MultivariateNormal with its backward, which factorises matrices and solves triangular "
        "systems, although its covariance_matrix of 99 × 99",
    ),
    "decompositions: of diagonal matrices, if these take longer": (
        step({"covariances": [COVARIANCE | {"time_s": 0.5}],
              "inner_lines": [inner("f", 8, 0.25, method="svd", source="torch.svd(x)")]}), 0.5, None,
        "50% of the step is MultivariateNormal",
    ),
    "double_softmax: the loss with most passes": (
        many("double_softmax", TWICE, {"passes": 6}, {"function": "sigmoid"}), 1.0, None,
        "the loss applies sigmoid twice",
    ),
    "lonely_collectives: the longest line first": (
        step({"own_python": [lonely(0.25), lonely(0.5, 9)]}), 0.75, 0.25,
        "one process: average() at train.py:9, dist.all_reduce (50%), average() at train.py:8, dist.all_reduce (25%): ",
    ),
    "one_hot_products: no more than the step": (one_hot(1.5, forward=2.0), 1.0, None, "about 100% of the step goes"),
    "one_hot_products: of one layer": (one_hot(0.25), 0.25, None, "of which 1 is not 0 (25%) (train.py:9): "),
    "one_hot_products: of two layers, with the name of the longest": (
        one_hot(0.25, 0.5), 0.75, None,
        "Net.1 (nn.Linear) multiplies rows of 3,000 numbers of which 1 is not 0, as one more layer does (75%)",
    ),
    "one_hot_products: of three layers": (
        one_hot(0.25, 0.25, 0.25), 0.75, None, "of which 1 is not 0, as 2 more layers do (75%)",
    ),
    "one_hot_products: parts from half a percent on": (
        one_hot(0.25, made_s=0.005, optimizer=0.02), 0.26, None,
        "(25%), they are made at train.py:8 (0%), and the optimizer updates the part of its weight that no row uses "
        "(0%)",
    ),
    "paired_targets: half of the loss's time": (
        paired(("huber", 8, 0.25), ("other", 9, 0.25)), 1.0, None, "of the loss's time is in huber() at train.py:8",
    ),
    "paired_targets: the longest line of the function": (
        paired(("huber", 8, 0.125), ("huber", 9, 0.25)), 1.0, None, "is in huber() at train.py:9",
    ),
    "python_threads: without own sleep of 3 samples": (
        busy([own("f", 8, 0.25, "time.sleep") | {"samples": 3}, own("g", 9, 0.125, "time.sleep") | {"samples": 2}]),
        0.25, None, "25% of the step the loop waits",
    ),
    "rebuilt_tensors: the whole step": (
        step({"inner_lines": [inner("f", 8, 1.0, method="cat", source="x = cat([x, y])")]}, forward=1.0), 1.0, None,
        "100% of the step is building x anew",
    ),
    "remade_optimizers: the one that is made most often": (
        many("remade_optimizers", REMADE, {"made": 6}, {"optimizer": "SGD"}), 1.0, None, "in all 11 steps that were",
    ),
    "repeated_rows: the longest lookup is named": (
        step({"repeated_rows": same_rows(("a", 0.125), ("b", 0.25))}), 0.375, None, "the same rows of b (225 × 12)",
    ),
    "same_randomness: two draws": (
        many("random_draws", DRAWN, {"steps": 9}, {"place": "train.py:9"}), 1.0, None,
        "(16 × 8) in Noise.add() at train.py:9, equal in all 4 steps",
    ),
    "slow_settings: the one that costs most": (
        settings({"time_s": 0.5, "usual_s": 0.3125}, {"setting": "bf16", "time_s": 0.375, "usual_s": 0.125}),
        0.25, None, "the model computes in bf16",
    ),
    "unregistered_parameters: one": (
        step({"unregistered": [UNREGISTERED | {"parameters": 1}]}), 1.0, None,
        "1 parameter in Net.layers, the largest 64 × 64, gets gradients and does not change",
    ),
    "vanishing_rate: of a scheduler whose steps are unknown": (
        step({"learning_rates": [RATE | {"scheduled": None}]}), 1.0, None, "in 36 steps: call scheduler.step() once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_gives_a_diagnosis_from_its_limit_on(limit: str) -> None:
    assert at_limit(limit, *LIMITS[limit]) == (None, True)


@pytest.mark.parametrize("case", NUMBERS)
def test_share_and_bound_of_a_rule_are_exact(case: str) -> None:
    check_numbers(case, *NUMBERS[case])


@pytest.mark.parametrize(("time_s", "line"), [(NOTABLE, "20% of the step is f() at train.py:8, gru()"), (0.1999, "")])
def test_line_is_named_from_a_fifth_of_the_step_on(time_s: float, line: str) -> None:
    assert longest_line(step({"inner_lines": [inner("f", 8, time_s, method="gru")]})) == line


@pytest.mark.parametrize(
    ("update_s", "line"),
    [(0.3, "30% of the step is the optimizer"), (0.2499, "25% of the step is f() at train.py:8, gru()"), (0.1999, "")],
)
def test_optimizer_is_named_if_it_takes_longer_than_each_line(update_s: float, line: str) -> None:
    longest_s = 0.25 if update_s > 0.2 else 0.1
    rows = {"inner_lines": [inner("f", 8, longest_s, method="gru")]}
    assert longest_line(step(rows, optimizer=update_s)) == line


@pytest.mark.parametrize(
    ("others_s", "named"),
    [((0.02, 0.01), "model()"), ((0.02, 0.1), "most of it model()"), ((0.4, 0.01), "most of it pow()")],
)
def test_call_with_most_time_is_named_in_a_line_with_several(others_s: tuple[float, float], named: str) -> None:
    lines = [
        inner("f", 8, 0.3, method="model"),
        *(
            inner("f", 8, time_s, method=method, phase="loss")
            for time_s, method in zip(others_s, ("pow", "mean"), strict=True)
        ),
    ]
    line = longest_line(step({"inner_lines": sorted(lines, key=lambda row: -row["time_s"])}))
    assert line == f"{0.3 + sum(others_s):.0%} of the step is f() at train.py:8, {named}"
