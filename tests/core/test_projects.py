"""Imports of a user's file from the project around it, as a student's repository has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cs_systems.config import ConfigError
from cs_systems.core import plugins, projects
from cs_systems.core.own_strategy import form_of

PROJECT = """
[project]
name = "my-systems"
[tool.uv.sources]
my-basics = { path = "./my-basics", editable = true }
elsewhere = [{ git = "https://example.org/elsewhere" }]
[tool.uv.workspace]
members = ["more/*"]
"""
FILES = {
    "pyproject.toml": PROJECT,
    "tests/adapters.py": (
        "from my_systems.ddp import get_ddp as get\n"
        "def get_attention():\n    from my_basics.model import attend\n    import my_third\n    return attend\n"
    ),
    "my_systems/ddp.py": "def get_ddp(module, size=1): ...\n",
    "my-basics/pyproject.toml": '[project]\nname = "my_basics"\n',
    "my-basics/my_basics/model.py": "def attend(q, k, v): ...\nclass Model: ...\n",
    "more/third/src/my_third.py": "three = 3\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_systems", "my_basics", "my_third", "my_basics.model", "my_systems.ddp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in FILES.items():
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_file_imports_from_its_project_also_when_called(project: Path) -> None:
    made = plugins.get("attention", f"{project}/tests/adapters.py:get_attention")
    assert made().__name__ == "attend"


def test_module_is_found_in_the_project_of_the_current_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert plugins.get("workloads", "my_basics.model:Model").__name__ == "Model"


def test_form_follows_an_import_within_the_project(project: Path) -> None:
    assert form_of(f"{project}/tests/adapters.py:get").options == {"size": False}


def test_hash_of_code_covers_the_files_that_it_imports(project: Path) -> None:
    """A student's adapters stay as they are, and the code behind them changes."""

    def digest() -> str:
        source = plugins.provenance(f"{project}/tests/adapters.py:get")
        assert source is not None
        return source["sha256"]

    before = digest()
    (project / "my_systems" / "ddp.py").write_text("def get_ddp(module, size=2): ...\nfrom . import more\n")
    assert (changed := digest()) != before
    (project / "my_systems" / "more.py").write_text("import torch\n")
    assert digest() not in (before, changed)
    (project / "my_systems" / "unused.py").write_text("import torch\n")
    (project / "my_systems" / "more.py").write_text("def (\n")  # is reported when it is imported
    assert digest() not in (before, changed)


def test_hash_covers_files_next_to_the_file_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file can put its own folder on sys.path."""
    (folder := tmp_path / "code").mkdir()
    (folder / "mine.py").write_text("from helper import f\n")
    (folder / "helper.py").write_text("def f(): ...\n")
    (tmp_path / "helper.py").write_text("def other(): ...\n")
    for current in (tmp_path, folder):
        monkeypatch.chdir(current)
        assert projects.imported_files(folder / "mine.py") == [folder / "helper.py"]


def test_relative_import_of_a_sibling_names_no_file_of_the_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "code").mkdir()
    for file in (tmp_path / "code.py", folder / "helper.py"):
        file.write_text("")
    (folder / "mine.py").write_text("from . import helper\n")
    assert projects.imported_files(folder / "mine.py") == [folder / "helper.py"]
    assert [*projects._files_of(".", Path("/mine.py"), [])] == []


def test_project_that_is_not_installed_has_the_command_as_remedy(project: Path) -> None:
    (project / "my_systems" / "__init__.py").write_text("import importlib.metadata as m\nm.version('my-systems')\n")
    with pytest.raises(
        ConfigError, match=rf"install your project: pip install --no-deps -e {re.escape(str(project))}$"
    ):
        plugins.get("parallel", f"{project}/tests/adapters.py:get")


@pytest.mark.parametrize("text", ["", "[tool", "[tool.uv]\nsources = 3", "[tool.uv.workspace]\nmembers = ['/x']"])
def test_unusual_project_file_leaves_the_root_importable(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert projects.import_folders(tmp_path / "mine.py") == [tmp_path.resolve()]
