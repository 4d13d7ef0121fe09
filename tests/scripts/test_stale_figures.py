"""Tests of finding figures that were measured with code that has changed since."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIGURE = "profiles/speed/table.md"
SOURCES = {FIGURE: ("code/*.py", "scripts/speed.py")}


@pytest.fixture(scope="module")
def stale(scripts_path: None) -> Any:
    return importlib.import_module("benchmarks.stale_figures")


class Repository:
    """Small git repository in which each write is a commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(self.root), *author, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def write(self, **texts: str) -> None:
        """Write and commit files; `code__a_py="x"` means code/a.py."""
        for name, text in texts.items():
            path = self.root / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.commit()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Return a repository with a figure that is newer than its code."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "made").mkdir()
    made = Repository(tmp_path / "made")
    made.write(code__a_py="1", code__b_py="1", scripts__speed_py="1", other_py="1")
    made.write(profiles__speed__table_md="1 s")
    return made


def changed(stale: Any, repository: Repository) -> dict[str, int]:
    (figure,) = stale.figures(repository.root, SOURCES)
    return dict(figure.changed)


def test_figure_newer_than_its_sources_is_fresh(stale: Any, repository: Repository) -> None:
    repository.write(other_py="2")
    assert changed(stale, repository) == {}


def test_commits_to_sources_after_measurement_are_counted(stale: Any, repository: Repository) -> None:
    repository.write(code__a_py="2", scripts__speed_py="2")
    repository.write(code__a_py="3")
    assert changed(stale, repository) == {"code/a.py": 2, "scripts/speed.py": 1}
    repository.write(profiles__speed__table_md="2 s")
    assert changed(stale, repository) == {}


def test_commits_that_only_move_or_rewrite_files_do_not_count(stale: Any, repository: Repository) -> None:
    """A change before the move still counts, under the present path."""
    repository.write(code__a_py="2")
    repository.git("mv", "code", "moved")
    repository.write(profiles__speed__table_md="1 s, in another form")
    moved = repository.git("rev-parse", "HEAD").strip()
    (repository.root / ".git-blame-ignore-revs").write_text(f"# Move\n{moved}\n")
    repository.commit()
    (figure,) = stale.figures(repository.root, {FIGURE: ("moved/*.py",)})
    assert dict(figure.changed) == {"moved/a.py": 1}
    repository.write(moved__b_py="2")
    (figure,) = stale.figures(repository.root, {FIGURE: ("moved/*.py",)})
    assert dict(figure.changed) == {"moved/a.py": 1, "moved/b.py": 1}


def test_merged_branch_forked_before_measurement_counts(stale: Any, repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    repository.write(code__b_py="2")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "--message", "a merge", "side")
    assert changed(stale, repository) == {"code/b.py": 1}


@pytest.mark.parametrize("records", ["records_jsonl", "processes_jsonl", "table_jsonl"])
def test_age_of_table_counts_from_its_records(stale: Any, repository: Repository, records: str) -> None:
    """A table can be rewritten without a new measurement."""
    repository.write(**{f"profiles__speed__{records}": "{}"})
    repository.write(code__a_py="2")
    repository.write(profiles__speed__table_md="1.0 s")
    assert changed(stale, repository) == {"code/a.py": 1}


def test_age_of_held_out_predictions_counts_from_their_freezing(stale: Any, repository: Repository) -> None:
    folder, page = repository.root / "profiles/speed", "profiles/speed/held_out.md"
    (folder / "frozen.json").write_text("{}")
    repository.commit()
    repository.write(code__a_py="2")
    (folder / "measured.jsonl").write_text("{}")
    (repository.root / page).write_text("1 MiB")
    repository.commit()
    (figure,) = stale.figures(repository.root, {page: SOURCES[FIGURE]})
    assert figure.changed == {"code/a.py": 1}


def test_moved_figure_keeps_its_age(stale: Any, repository: Repository) -> None:
    repository.write(code__a_py="2")
    repository.git("mv", "profiles/speed", "profiles/moved")
    repository.commit()
    (figure,) = stale.figures(repository.root, {"profiles/moved/table.md": SOURCES[FIGURE]})
    assert figure.changed == {"code/a.py": 1}


def test_file_without_sources_or_commit_is_not_stale(stale: Any, repository: Repository) -> None:
    repository.write(code__a_py="2")
    without_sources, missing = stale.figures(repository.root, {FIGURE: (), "profiles/none.md": ("code/*.py",)})
    assert (without_sources.changed, missing.commit, missing.changed) == ({}, None, {})
    assert "| profiles/none.md | not committed | none |" in stale.table([missing])


def test_table_names_the_sources_with_most_commits(stale: Any) -> None:
    changed = {"code/a.py": 1, "code/b.py": 7, "code/c.py": 3, "code/d.py": 5, "code/e.py": 2}
    figure = stale.Figure("profiles/a.md", "abc", "2026-01-01", changed)
    assert "| code/b.py (7), code/d.py (5), code/c.py (3), and 2 more |" in stale.table([figure])


def test_command_lists_stale_figures_and_check_option_fails(
    stale: Any, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stale.main(["--check"], repository.root, SOURCES) == 0
    assert "0 of 1 figures were measured with code that has changed since." in capsys.readouterr().out
    repository.write(code__a_py="2")
    assert stale.main([], repository.root, SOURCES) == 0
    assert "| code/a.py (1) |" in capsys.readouterr().out
    assert stale.main(["--check"], repository.root, SOURCES) == 1


def test_missing_git_history_names_remedy(
    stale: Any, repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.root}", str(clone))
    assert stale.main([], clone, SOURCES) == stale.NO_ANSWER
    assert "this clone is shallow" in (error := capsys.readouterr().err)
    assert error.endswith("run git fetch --unshallow\n")
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert stale.main([], tmp_path / "plain", SOURCES) == stale.NO_ANSWER
    assert "plain has no git history (fatal: not a git repository" in (error := capsys.readouterr().err)
    assert error.endswith("; run this in a clone\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stale.main([], repository.root, SOURCES) == stale.NO_ANSWER
    assert capsys.readouterr().err.startswith("git is not installed")


def test_quoted_finds_links_of_readme_and_docs(stale: Any, tmp_path: Path) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "README.md").write_text("[a](profiles/a/table.md) [a](profiles/a/table.md) [b](other.md)")
    (tmp_path / "docs" / "deep" / "page.md").write_text("![c](../../profiles/c.png) [d](../../profiles/d.md#part)")
    assert stale.quoted(tmp_path) == ["profiles/a/table.md", "profiles/c.png", "profiles/d.md"]


def test_every_quoted_figure_names_its_sources(stale: Any) -> None:
    assert sorted(stale.SOURCES) == sorted(stale.quoted(ROOT))


def test_every_figure_and_source_exists(stale: Any) -> None:
    paths = {*stale.SOURCES, *(source for sources in stale.SOURCES.values() for source in sources)}
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []
