"""Names of changes, and answers of a replay that a record keeps."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.replay import Change, CopiesOverlapped, Expected, Refusal, replayed
from cs_systems.analysis.replay.clean import Clean
from cs_systems.analysis.replay.what_ifs import Cleanly, Recalled, change, together
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
