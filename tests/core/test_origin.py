"""Commands of processes, as records name them."""

import subprocess
import sys
from pathlib import Path

import pytest

SHOW = "from cs_systems.core import origin; print(origin.command())"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train.py", "--name", "a b"], "python train.py --name 'a b'"),
        (["-m", "package.train", "--lr", "1"], "python -m package.train --lr 1"),
        (["-m", "package"], "python -m package"),
        (["bin/program", "-x"], "program -x"),
        (["-c", SHOW, "secret"], "None"),
    ],
)
def test_command_of_a_process_equals_the_typed_one(words: list[str], command: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "package").mkdir()
    for name in ("train.py", "bin/program", "package/train.py", "package/__main__.py"):
        (tmp_path / name).write_text(SHOW)
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{command}\n"
