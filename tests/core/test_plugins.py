"""Tests of errors for wrong names of code outside the package, with their remedies."""

import re
from pathlib import Path

import pytest

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py", r"'own.py' names a file, but no object in it; write own.py:name$"),
        ("own.py:mke", r"own.py has no 'mke'; did you mean make\?$"),
        ("own.py:zz", r"own.py has no 'zz'; correct the name after the colon$"),
        ("own.py:inside", r"own.py has no 'inside'; correct the name after the colon$"),
        ("own.py:Net.make", "must have a file or module before the colon, and one plain name after it; write path/to"),
        ("folder/own:make", "module 'folder/own' .* was not found; .*, or write path/to/file.py:make for a file$"),
        ("__main__:make", r"'__main__:make' exists in this process only; .* and write path/to/file\.py:make$"),
        ("json:dump5", r"json has no 'dump5'; did you mean dump or dumps\?$"),
    ],
)
def test_wrong_name_of_own_code_is_refused_with_the_right_form(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("raise RuntimeError('imported')\ndef make(config, device): inside = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        plugins.check("workloads", name)


@pytest.mark.parametrize(
    "text",
    [
        "if True:\n    def name(): ...",
        "try:\n    from json import loads as name\nexcept ImportError: pass",
        "import json.decoder as name",
        "first, (*name, last) = 1, (2, 3)",
        "for name in (1, 2): ...",
        "with open('x') as name: ...",
        "if (name := 1): ...",
        "match 1:\n    case name: ...",
        "name: int = 1",
        "def set_it():\n    global name\n    name = 1",
        "from json import *",
        "globals()['name'] = 1",
        "import sys\nsys.modules[__name__].name = 1",
        "class A:\n    def f(self):\n        global name\n        name = 1",
        "def __getattr__(name): return 1",
        "this is no Python",
    ],
)
def test_name_possibly_defined_by_a_file_is_not_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text + "\n")
    assert plugins.check("workloads", f"{tmp_path / 'own.py'}:name")


def test_module_that_cannot_be_imported_is_named_with_the_cause(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text("import nowhere_at_all\ndef make(): ...\n")
    with pytest.raises(ConfigError) as raised:
        plugins.get("workloads", f"{source}:make")
    assert str(raised.value) == (
        f"{source} cannot be imported: No module named 'nowhere_at_all'; correct the name or the import, or "
        "install the missing package"
    )


def test_module_next_to_a_file_needs_its_folder_on_pythonpath(tmp_path: Path) -> None:
    (source := tmp_path / "own.py").write_text("from my_layers import Block\n")
    (tmp_path / "my_layers.py").write_text("class Block: ...\n")
    with pytest.raises(ConfigError) as raised:
        plugins.get("workloads", f"{source}:Block")
    assert str(raised.value).endswith(f"; add the folder of my_layers to PYTHONPATH, {tmp_path}")
    with pytest.raises(ConfigError, match=rf"is a path without \.py; write {re.escape(str(source))}:Block"):
        plugins.check("workloads", f"{source.with_suffix('')}:Block")


def test_module_in_a_folder_above_a_file_needs_that_folder_on_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (source := tmp_path / "tests" / "adapters.py").write_text("from my_systems.ddp import DDP\n")
    (tmp_path / "my_systems").mkdir()
    with pytest.raises(ConfigError, match=rf"add the folder of my_systems to PYTHONPATH, {re.escape(str(tmp_path))}$"):
        plugins.get("parallel", f"{source}:DDP")


def test_file_with_relative_imports_is_named_as_a_module_of_its_package(tmp_path: Path) -> None:
    (folder := tmp_path / "any" / "my_basics" / "nn").mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (source := folder / "model.py").write_text("from .layers import Block\n")
    with pytest.raises(ConfigError, match=r"name it as a module of its package, my_basics\.nn\.model:name$"):
        plugins.get("workloads", f"{source}:Block")


def test_method_named_modules_does_not_hide_names_of_the_file(tmp_path: Path) -> None:
    (source := tmp_path / "own.py").write_text("def wrap(module):\n    return [*module.modules()]\n")
    with pytest.raises(ConfigError, match="has no 'warp'; did you mean wrap"):
        plugins.check("parallel", f"{source}:warp")


def test_names_of_a_package_include_its_modules() -> None:
    assert plugins.check("workloads", "json:decoder")


def test_literal_that_some_plug_ins_declare_is_read_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("a", "made(size=2)"), ("b", "made(kind=3)"), ("_c", "made(size=4)"), ("d", "made(size=5)")):
        (tmp_path / f"{name}.py").write_text(f"import nothing_of_this_name\n\nMADE = {text}  # size=\n")
    monkeypatch.setitem(plugins.KINDS, "of a test", plugins.Kind(str(tmp_path), "MADE", "made"))
    assert plugins.declaring("of a test", "size") == {"a": 2, "d": 5}
