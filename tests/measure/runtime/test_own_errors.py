"""Reasons of cells that fail in a user's code."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.measure.runtime.own_errors import described

KERNEL = (
    "def attend(q, k, v):\n    assert q == 'cuda'\n"
    "def late(q, k, v):\n    import nowhere_at_all\n"
    "def plain(q, k, v):\n    raise ValueError('no')\n"
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("attend", "AssertionError: assert q == 'cuda' (kernel.py:2)"),
        (
            "late",
            "ModuleNotFoundError: No module named 'nowhere_at_all' (kernel.py:4); correct the name or the import, or "
            "install the missing package",
        ),
        ("plain", "ValueError: no (kernel.py:6)"),
    ],
)
def test_reason_has_the_line_of_the_project_s_file(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "kernel.py").write_text(KERNEL)
    (adapters := tmp_path / "tests" / "adapters.py").write_text("def get(): ...\n")
    config = RunConfig(attention=f"{adapters}:get")
    with pytest.raises((AssertionError, ImportError, RuntimeError, ValueError)) as raised:
        plugins.get("attention", f"{tmp_path}/kernel.py:{name}")("cpu", 0, 0)
    assert described(raised.value, config) == reason
