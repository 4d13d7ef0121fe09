"""First lines of files, from which `make files` and the page `Every file` are made, and the paths in CONTRIBUTING."""

import re
from pathlib import Path

import pytest

from scripts import docs_hooks as hooks
from scripts import files

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"`([\w./]+?(?:/|\.(?:py|js|cuh|cu|md|toml|css)))(?::(\w+))?`")


@pytest.mark.parametrize("tree", files.TREES)
def test_every_file_has_a_first_line_that_states_its_purpose(tree: str) -> None:
    silent = [f"{folder}/{name}" for folder, found in files.listed(tree) for name, line in found if len(line) < 10]
    assert silent == [], "begin these files with a docstring or a comment that says what they are for"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", '"""Sum of two numbers.\n\nMore."""\n', "Sum of two numbers."),
        ("a.cu", "// Sum of two\n// numbers. Method: addition.\n#include <x>\n", "Sum of two numbers."),
        ("a.css", "/* Style of a sum. */\n#sum { margin: 0; }\n", "Style of a sum."),
        ("a.css", "#sum { margin: 0; }\n", ""),
        ("a.html.jinja", "{#- Page of a sum. -#}\n{% extends 'b' %}\n", "Page of a sum."),
        ("a.sh", "#!/bin/sh\n# Sum of two numbers.\n#\n#     sh a.sh\nset -e\n", "Sum of two numbers."),
    ],
)
def test_first_line_is_docstring_or_first_sentence_of_comment(name: str, text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert files.first_line(tmp_path / name) == line


def test_files_of_some_folders_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert files.main(["readers/kin", "core/units", "core/test_units"]) == 0
    printed = re.findall(r"^(\S+): ", capsys.readouterr().out, re.M)
    assert printed == ["cs_systems/core/units.py", "cs_systems/readers/kineto.py", "tests/core/test_units.py"]


def test_page_has_a_table_for_each_folder() -> None:
    page = hooks._FILES.sub(lambda found: files.markdown(found[1]), (ROOT / "docs" / "files.md").read_text())
    assert "### cs_systems/report/pages/\n\n| file | what it is for |" in page
    assert re.search(r"^\| `sweep.py` \| Public entry points: .*without torch\. \|$", page, re.M | re.I)
    assert hooks._FILES.search(page) is None


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_paths_in_guides_to_the_code_exist(page: str) -> None:
    """A path is relative to the repository, or to a folder that the text around it names; `path.py:name` is defined."""
    trees = (*files.TREES, "docs", "profiles")
    found = [*ROOT.iterdir(), *(path for tree in trees for path in (ROOT / tree).rglob("*"))]
    known = {f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}": path for path in found}
    outputs = {"runs/TIME-bench/report.html", "dist/"}
    missing = []
    for path, name in sorted({*PATH.findall((ROOT / page).read_text())}):
        there = [file for end, file in known.items() if end.endswith(f"/{path}")]
        if name:
            there = [file for file in there if re.search(rf"^(?:def |class )?{name}\b", file.read_text(), re.M)]
        if not there and path not in outputs and not re.search(r"NAME|_N\.", path):
            missing.append(f"{path}:{name}" if name else path)
    assert missing == []
