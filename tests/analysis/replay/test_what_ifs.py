"""Names of changes, and answers of a replay that a record keeps."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.replay import Change, CopiesOverlapped, Expected, Refusal, replayed
from cs_systems.analysis.replay.clean import Clean
from cs_systems.analysis.replay.what_ifs import Cleanly, Recalled, change, together
from cs_systems.config import ConfigError
from cs_systems.readers import read

NAMES = ("launches=free", "host:augment=0.5", "host=0", "input=0", "sync=0", "sync:log=0", "family:matmul=0.5",
         "copies=overlapped")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_change_is_written_in_the_form_that_is_read(name: str) -> None:
    assert str(change(name)) == name


def test_stored_answers_equal_the_replay(kineto_path: Path) -> None:
    replay = replayed(profile(read(kineto_path)))
    clean = Cleanly(replay, Clean(replay.step_s / 2, {"step": replay.step_s / 2}))
    changes: list[Change] = [change("host=0.5"), change("host:backward=0"), change("launches=free")]
    kept = Recalled(together(clean, [*reversed(changes), CopiesOverlapped()]))
    assert kept.step_s == replay.step_s
    for size in (1, 2, 3):
        for chosen in combinations(changes, size):
            told, recalled = clean.what_if(*chosen), kept.what_if(*reversed(chosen))
            assert isinstance(told, Expected)
            assert isinstance(recalled, Expected)
            assert (recalled.value, recalled.low, recalled.high, recalled.now) == (
                told.value, told.low, told.high, clean.clean.step_s
            )  # fmt: skip
    assert isinstance(kept.what_if(CopiesOverlapped()), Refusal)
    assert isinstance(kept.what_if(change("input=0")), Refusal)


def test_factor_is_a_number_from_zero() -> None:
    assert str(change("host=0")) == "host=0"
    for text in ("inf", "-0.5", "nan", "fast"):
        with pytest.raises(ConfigError, match=f"'{text}' is not a factor; write a number from 0"):
            change(f"host={text}")


class Fixed:
    """Answers that are known: a step of 4 s that each change makes 1 s shorter."""

    step_s = 4.0

    def what_if(self, *changes: Change) -> Expected | Refusal:
        return Expected(4.0 - len(changes), 0.0, 4.0, 4.0)


@pytest.mark.parametrize(("worth", "saved"), [(0.25, [0.25, 0.25, 0.5]), (0.26, [0.25, 0.25])])
def test_changes_worth_their_effort_are_combined(worth: float, saved: list[float]) -> None:
    rows = together(Fixed(), [change("input=0"), change("sync=0")], worth)
    assert [row["saved_share"] for row in rows] == saved
