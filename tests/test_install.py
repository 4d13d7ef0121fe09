"""Package installed from a copy of its sources, where triton, flash-attn and nvtx cannot be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cs_systems.record import read_records

ROOT = Path(__file__).parent.parent

# An absent module can neither be imported nor be found by importlib.
WITHOUT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
absent = {"triton", "flash_attn", "flash_attn_interface", "nvtx"}
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in absent else find(name, *rest)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed package and a sitecustomize.py that hides the optional packages."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "cs_systems", source / "cs_systems", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--no-index", "--target", target, source], check=True)
    (target / "sitecustomize.py").write_text(WITHOUT)
    return target


def run(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_every_file_of_the_package_is_installed(installed: Path) -> None:
    def files(root: Path) -> set[Path]:
        return {p.relative_to(root) for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc"}

    assert files(ROOT / "cs_systems") == files(installed / "cs_systems")
    assert Path("py.typed") in files(installed / "cs_systems")
    assert (installed / "bin" / "cs-systems").is_file()


def test_time_and_report_work_without_optional_packages(installed: Path, tmp_path: Path) -> None:
    imports = "import cs_systems, importlib.util as u; print(cs_systems.__file__, u.find_spec('triton'))"
    assert run(installed, tmp_path, "-c", imports).stdout.split() == [f"{installed}/cs_systems/__init__.py", "None"]

    words = ["--size", "tiny", "--batch-size", "1", "--warmup", "1", "--steps", "3", "--device", "cpu", "--out", "out"]
    backends = ["--attention", "naive", "flash_triton", "flash_attn"]
    done = run(installed, tmp_path, "-m", "cs_systems", "time", *words, *backends)
    assert done.returncode == 0, done.stderr
    records, _ = read_records(tmp_path / "out")
    assert [r.status for r in records] == ["ok", "unavailable", "unavailable"]
    assert "pip install triton" in (records[1].reason or "")

    shown = run(installed, tmp_path, "-m", "cs_systems", "report", "out", "--format", "markdown")
    assert shown.returncode == 0, shown.stderr
    assert "naive" in shown.stdout
    page = run(installed, tmp_path, "-m", "cs_systems", "report", "out", "--format", "html", "--output", "page.html")
    assert page.returncode == 0, page.stderr
    assert "</html>" in (tmp_path / "page.html").read_text()
