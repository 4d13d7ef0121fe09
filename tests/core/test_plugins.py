"""Names of code outside the package: what is wrong with one, and what to write instead."""

from pathlib import Path

import pytest

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py", r"'own.py' names a file without an object; write own.py:name$"),
        ("own.py:mke", r"own.py has no 'mke'; did you mean make\?$"),
        ("own.py:zz", r"own.py has no 'zz'; correct the name after the colon$"),
    ],
)
def test_wrong_name_of_own_code_is_refused_with_the_right_form(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def make(config, device): ...\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        plugins.get("workloads", name)
