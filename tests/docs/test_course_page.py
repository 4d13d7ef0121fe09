"""The tasks on the page of the course are those of the declaration, with the outputs in profiles/course."""

import sys
from pathlib import Path

import pytest

from cs_systems.core.course import tasks

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import course_page


def test_course_page_equals_the_generated_page() -> None:
    text = course_page.PAGE.read_text()
    assert text == course_page.page(text), "run python scripts/course_page.py"
    assert all(f"\n## {name}\n" in text for name in tasks())


def test_studies_of_a_task_have_their_page() -> None:
    names = {name for task in tasks().values() for name in task.studies}
    assert [name for name in names if not (course_page.ROOT / "profiles" / name / "table.md").is_file()] == []


def test_excerpt_is_the_output_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course_page, "RESULTS", tmp_path)
    task = tasks()["gradient_checkpointing"]
    assert course_page.excerpt(task, 2) == ""
    (tmp_path / task.name).mkdir()
    long = "".join(f"line {n}\n" for n in range(60))
    (tmp_path / task.name / f"{task.name}.txt").write_text(f"$ cs-systems memory\n{long}$ cs-systems report x\none\n")
    assert course_page.excerpt(task, 1).splitlines()[-2:] == ["line 23", "…"]
    assert course_page.excerpt(task, 2) == "one"


def test_output_of_a_command_that_measured_other_cells_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course_page, "RESULTS", tmp_path)
    task = tasks()["gradient_checkpointing"]
    (tmp_path / task.name).mkdir()
    file = tmp_path / task.name / f"{task.name}.txt"
    file.write_text("$ cs-systems memory --skip-oom --checkpoint every:1 none\none\n")
    assert course_page.excerpt(task, 1) == "one"
    file.write_text("$ cs-systems memory --checkpoint every:3\none\n")
    assert course_page.excerpt(task, 1) == ""


def test_tables_that_answer_a_task_are_in_its_output() -> None:
    answered = [task for task in tasks().values() if task.answers]
    found = {task.name: "\n".join(course_page.excerpt(task, number) for number in task.shows) for task in answered}
    shown = {name: " ".join(text.split()) for name, text in found.items() if text}
    assert shown
    missing = {name: [a for a in tasks()[name].answers if a not in text] for name, text in shown.items()}
    assert not any(missing.values()), missing
