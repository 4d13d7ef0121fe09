"""Mutants of a file: which places change, and that a changed function takes the place of the loaded one."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import pytest

SOURCE = '''"""Docstring with 1 < 2."""

LIMIT = 0.5  # of 3


@decorated(1)
def over(values: Literal[1], least: int = 4) -> bool:
    """Return 1."""
    assert len(values) > 1
    scale = min(values) * 1e6 - least
    return scale >= LIMIT and -values[0] != "1" + "2"
'''


@pytest.fixture
def mutate(scripts_path: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    import mutate

    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    return mutate


def test_numbers_units_and_comparisons_change_one_at_a_time(mutate: Any, tmp_path: Path) -> None:
    (path := tmp_path / "made.py").write_text(SOURCE)
    found = [(mutant.kind, mutant.change, mutant.function) for mutant, _ in mutate.mutants(path)]
    assert found == [
        ("number", "0.5 → 1.0", None),
        ("sign", "0.5 → -0.5", None),
        ("number", "4 → 8", None),
        ("sign", "4 → -4", None),
        ("one more", "4 → 5", None),
        ("arithmetic", "- → + in min(values) * 1000000.0 - least", "over"),
        ("extreme", "min → max in min(values)", "over"),
        ("unit", "1000000.0 → 1000.0", "over"),
        ("boolean", "scale >= LIMIT and -values[0] != '1' + '2' → scale >= LIMIT or -values[0] != '1' + '2'", "over"),
        ("comparison", "scale >= LIMIT → scale > LIMIT", "over"),
        ("comparison", "-values[0] != '1' + '2' → -values[0] == '1' + '2'", "over"),
        ("sign", "-values[0] → values[0]", "over"),
        ("number", "0 → 1", "over"),
    ]


def test_mutated_function_replaces_the_loaded_one(mutate: Any, tmp_path: Path) -> None:
    (path := tmp_path / "made.py").write_text("def low(x):\n    return x < 3\n")
    module = types.ModuleType("made")
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    low = module.low
    functions = {(str(path), "low", 1): [low]}
    answers = []
    for mutant, code in mutate.mutants(path):
        mutate._replace(functions, code, mutant)
        answers.append((mutant.change, low(3), low(-4)))
    assert answers == [
        ("x < 3 → x <= 3", True, True),
        ("3 → 6", True, True),
        ("3 → -3", False, True),
        ("3 → 4", True, True),
    ]


def test_fork_returns_an_answer_and_a_hanging_fork_is_killed(mutate: Any) -> None:
    assert mutate._forked(lambda: "name of a test", 30.0) == "name of a test"
    assert mutate._forked(lambda: "", 30.0) == ""
    assert mutate._forked(lambda: str(time.sleep(60)), 0.2) is None


def test_table_counts_surviving_mutants(mutate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path := tmp_path / "made.py").write_text("A = 1 < 2\n")
    (less, *others) = (mutant for mutant, _ in mutate.mutants(path))
    allowed = tmp_path / "equivalent.toml"
    allowed.write_text(
        f'[[equivalent]]\npath = "made.py"\nsource = "A = 1 < 2"\nchange = "{less.change}"\nreason = "why"\n'
    )
    monkeypatch.setattr(mutate, "EQUIVALENT", allowed)
    outcomes = [
        (less, mutate.SURVIVED),
        (others[0], mutate.SURVIVED),
        *((other, mutate.KILLED) for other in others[1:]),
    ]
    page, share = mutate.table(outcomes, "4 of 9 mutants")
    assert share == 1 / len(outcomes)
    assert f"| made.py | {len(outcomes)} | {len(outcomes) - 2} | 1 | 0 | 1 |" in page
    assert f"- made.py:1: `{less.change}`: why" in page
    assert f"- survived: made.py:1: `{others[0].change}`" in page
    assert f"4 of 9 mutants: {share:.1%} of {len(outcomes)} survived or are reached by no test." in page
