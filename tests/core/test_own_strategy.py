"""Forms of strategies of the user's own, read from the text of their file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cs_systems.config import ConfigError
from cs_systems.core.own_strategy import declared, form_of

OWN = Path(__file__).parents[1] / "data" / "own_code"
WHOLE = {"batch", "optimizer", "gradients", "parameters"}


@pytest.mark.parametrize(
    ("name", "kind", "splits", "options"),
    [
        ("student.py:DDP", "module", {"batch"}, {}),
        ("student.py:Bucketed", "module", {"batch"}, {"bucket_size_mb": True, "verbose": False}),
        ("student.py:Summed", "module", {"batch"}, {}),
        ("student.py:hooked", "module", {"batch"}, {}),
        ("student.py:average_on_after_backward", "functions", {"batch"}, {}),
        ("student.py:ShardedOptimizer", "optimizer", {"optimizer"}, {}),
        ("student.py:FSDP", "module", WHOLE, {"compute_dtype": False}),
        ("adapters.py:get_ddp", "module", {"batch"}, {}),
        ("adapters.py:get_ddp_bucketed", "module", {"batch"}, {"bucket_size_mb": True}),
        ("adapters.py:get_fsdp", "module", WHOLE, {"compute_dtype": False}),
        ("adapters.py:get_sharded_optimizer", "optimizer", {"optimizer"}, {}),
    ],
)
def test_form_of_a_strategy_is_inferred_from_arguments_and_names(
    name: str, kind: str, splits: set[str], options: dict[str, bool]
) -> None:
    form = form_of(f"{OWN}/{name}")
    assert (form.kind, form.splits, form.options) == (kind, splits, options)


def test_imported_and_renamed_classes_are_followed(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("class Own:\n    def __init__(self, module, size=1): ...\n")
    (tmp_path / "mine.py").write_text("from .deep import Own as Other\nAlias = Other\n")
    assert form_of(f"{tmp_path}/mine.py:Alias").options == {"size": False}


def test_strategy_of_the_package_s_own_class_declares_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from cs_systems.model.parallel import ParallelStrategy\n"
        "MINE = ParallelStrategy(splits=frozenset({'batch'}), options={'size': 'count'})\n"
    )
    assert declared(f"{tmp_path}/mine.py:MINE")["options"] == {"size": "count"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("student.py:made", "does not show what made is; define it there, as a class or function, such as def wrap"),
        ("student.py:EMPTY", "does not show what EMPTY is"),
        ("student.py:DPD", "has no 'DPD'; did you mean DDP?"),
        ("student.py:", "must have a file or module before the colon"),
        ("none.py:DDP", "does not exist; correct the path"),
    ],
)
def test_object_without_a_known_form_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        declared(f"{OWN}/{name}")
