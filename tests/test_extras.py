"""Contract of the markers of extras: a test without one works on a machine that has none of them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import conftest, extras

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKERS = [line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]]
CI = (ROOT / ".ci" / "run").read_text()


def test_every_extra_is_a_marker() -> None:
    assert {*MARKERS} == {"slow", "gpu", "extra", *extras.EXTRAS}


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_marked_test_is_skipped_with_the_reason_where_its_extra_is_missing(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "missing", lambda name: f"no {name}; install it")
    request.node.add_marker(name)
    with pytest.raises(pytest.skip.Exception, match=f"no {name}; install it"):
        conftest.pytest_runtest_setup(request.node)
    conftest.pytest_collection_modifyitems([request.node])
    assert request.node.get_closest_marker("extra")


@pytest.mark.parametrize("markers", conftest.MARKED)
def test_marker_expression_leaves_out_files_that_name_no_such_marker(
    markers: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("others", *conftest.MARKED[markers]):
        (tmp_path / f"{name}.py").write_text(f"pytestmark = pytest.mark.{name}\n")
    files = [tmp_path, *tmp_path.iterdir()]
    assert [*map(conftest.pytest_ignore_collect, files, [request.config] * len(files))] == [None] * len(files)
    monkeypatch.setattr(request.config.option, "markexpr", markers)
    left_out = [file.stem for file in files if conftest.pytest_ignore_collect(file, request.config)]
    assert left_out == ["others"]


def test_test_whose_file_does_not_name_its_marker_is_refused(request: pytest.FixtureRequest) -> None:
    conftest.pytest_itemcollected(request.node)
    request.node.add_marker("ncu_report")
    with pytest.raises(pytest.UsageError, match=r"is marked ncu_report in another file; apply pytest\.mark here"):
        conftest.pytest_itemcollected(request.node)


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_reason_names_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    reason = extras.EXTRAS[name]()
    assert reason is None or re.search(r".; .*(install|use)", reason), reason


def test_page_is_opened_only_by_tests_marked_chromium(tmp_path: Path) -> None:
    from tests.report.browser import browse

    with pytest.raises(AssertionError, match=r"this test uses chromium; mark it @pytest\.mark\.chromium"):
        browse(tmp_path, "", "")


def functions(tree: ast.AST) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield each function with the names of its markers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found = re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, node.decorator_list)))
            yield node, frozenset(found)


def test_test_that_is_skipped_without_a_package_or_program_has_the_marker() -> None:
    groups = PYPROJECT["project"]["optional-dependencies"]
    listed = [*PYPROJECT["project"]["dependencies"], *groups["test"], *groups["dev"]]
    installed = {re.split(r"[>=\[]", line)[0].replace("-", "_") for line in listed}
    for file in ROOT.glob("tests/**/*.py"):
        text = file.read_text()
        for function, markers in functions(ast.parse(text)) if "importorskip" in text else ():
            sought = {*re.findall(r"importorskip\('(\w+)", ast.unparse(function))} - installed
            assert markers & extras.EXTRAS.keys() or not sought, f"{file}: mark the test that needs {sought}"
        if file.stem not in ("extras", "test_extras"):
            assert not re.search(r"which\(\"(nsys|ncu|nvcc|chromium|google|pdflatex)", text), (
                f"{file}: use tests/extras.py"
            )


def test_ci_hides_every_program_and_removes_every_package_of_an_extra() -> None:
    """All peers are compared on a GPU, where CI does not run."""
    (hidden,), (removed,) = (re.findall(rf"^{name}=\((.*)\)$", CI, re.MULTILINE) for name in ("PROGRAMS", "PACKAGES"))
    assert {"nsys", "ncu", "nvcc", "chromium", "chromium-browser", "google-chrome", "pdflatex"} <= {*hidden.split()}
    groups = PYPROJECT["project"]["optional-dependencies"]
    assert {*groups["gpu"], *groups["ncu"], *groups["flash-attn"], "typst"} <= {*removed.split()}
