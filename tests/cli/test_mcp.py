"""Server of `cs-systems mcp`: a client of the official SDK asks it the questions of tests/agents, in few calls.

The script that answers them knows no field of a document. It looks for a column whose heading, meaning, table and unit,
all from the schema, fit the words of the question best, and for the row that has the values the question names.
"""

import json
import os
import re
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli import main
from cs_systems.cli.mcp import Reader
from tests.cli.test_json import ROOT

QUESTIONS = tomllib.loads((ROOT / "tests" / "agents" / "questions.toml").read_text())["question"]
MOST_CALLS = 3
Document = dict[str, Any]
Call = Callable[[str, dict[str, Any]], Awaitable[Document]]
ORDER = ("first", "second", "third")
PATHS = {"report": ("path",), "compare": ("baseline", "candidate"), "runs": ("path",)}
NOT_SOUGHT = {
    "a",
    "an",
    "and",
    "at",
    "by",
    "for",
    "if",
    "in",
    "is",
    "it",
    "of",
    "on",
    "or",
    "per",
    "that",
    "the",
    "with",
}


def stems(text: str) -> set[str]:
    """Return the words of a text without their endings: "families" and "family" are the same."""
    found = {*re.findall(r"[a-z0-9]+", text.lower())} - NOT_SOUGHT
    return {re.sub(r"y$", "i", re.sub(r"(ing|ed|es|e|s)$", "", word)) if len(word) > 3 else word for word in found}


def arguments(question: dict[str, Any], **further: Any) -> dict[str, Any]:
    names = PATHS.get(question["tool"])
    return (dict(zip(names, question["paths"], strict=True)) if names else {"paths": question["paths"]}) | further


def columns(schema: Document, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each column of a table, with its schema and the caption; "" for a column that a phase begins."""
    known = schema["$defs"].get(name, {})
    for one in known.get("anyOf", [known]):
        for column, each in one.get("properties", {}).items():
            yield column, each, one["description"]
        for each in one.get("patternProperties", {}).values():
            yield "", each, one["description"]


def fit(question: dict[str, Any], name: str, column: str, each: dict[str, Any], caption: str) -> float:
    """Return how well a column fits the words of a question; 0 if its unit or its type is another."""
    if (each.get("unit") or "fraction") != question.get("unit", "fraction"):
        return 0
    if question["want"].startswith("number") and "string" in each["type"]:
        return 0
    wanted, title = stems(question["want"]), stems(each.get("title", ""))
    own = stems(f"{column} {each.get('title', '')} {each.get('description', '')}")
    first = next((1 / (2 + at) for at, word in enumerate(question["want"].split()) if stems(word) & title), 0)
    of_table = 2 * len(wanted & stems(name.replace("_", " "))) + len(wanted & stems(caption))
    return 3 * len(wanted & title) + 2 * len(wanted & own) + of_table + first - len(title - wanted)


def matches(each: Any, value: Any) -> bool:
    """Return whether a value of a row is the named one; a name may be a word of a text, a number is never."""
    if not isinstance(value, str):
        return type(each) is type(value) and each == value
    return each == value or (
        isinstance(each, str) and bool(re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w+])", each))
    )


def has(row: dict[str, Any], value: Any, ask: str) -> bool:
    """Return whether a row has a value: a number in a column that the words before it in the question name, if any."""
    near = re.search(rf"((?:\w+ )?\w+) {value}\b(?: (\w+))?", ask) if type(value) is int else None
    beside = stems(f"{near[1]} {near[2] or ''}") if near else set()
    named = [n for n, each in row.items() if stems(n.replace("_", " ")) & beside and isinstance(each, int | float)]
    return any(matches(row[name], value) for name in named or row)


def found_in(question: dict[str, Any], rows: list[dict[str, Any]], column: str) -> Any:
    """Return the value of the row that has what the question names, the row with most exact values first."""
    named = question.get("where", [])
    fitting = [row for row in rows if all(has(row, value, question["ask"]) for value in named)]
    fitting.sort(key=lambda row: -sum(value in row.values() for value in named))
    if not column:
        names = (name for row in fitting for name in row if "." in name)
        column = next((name for name in names if stems(name.partition(".")[0]) & stems(question["want"])), "")
    return next((row[column] for row in fitting if row.get(column) is not None), None)


async def answer(question: dict[str, Any], schema: Document, call: Call) -> Any:
    """Return the answer that the documents give, after at most MOST_CALLS calls."""
    tool, wanted = question["tool"], question["want"].split()
    document = await call(tool, arguments(question))
    if "error" in document:
        return document["error"]["message"]
    if "diagnosis" in wanted:
        order = next(place for place, word in enumerate(ORDER) if word in wanted)
        diagnosis = document["answer"]["diagnoses"][order]
        known = schema["properties"]["answer"]["properties"]["diagnoses"]["items"]["properties"]
        scores = {name: fit(question, "", name, each, "") for name, each in known.items() if name in diagnosis}
        return diagnosis[max(scores, key=lambda name: scores[name])]
    shown = {table["name"]: table["rows"] for table in document["tables"]}
    more, left = document["more"], MOST_CALLS - 1
    candidates = [
        (fit(question, name, *each), name, each[0]) for name in {**shown, **more} for each in columns(schema, name)
    ]
    for score, name, column in sorted(candidates, key=lambda one: -one[0]):
        if score <= 0:
            break
        if name in more:
            if not left:
                continue
            left -= 1
            del more[name]
            whole = await call(
                tool, arguments(question, **({"all": True} if tool == "compare" else {"tables": [name]}))
            )
            shown[name] = [row for table in whole["tables"] if table["name"] == name for row in table["rows"]]
        if (value := found_in(question, shown[name], column)) is not None:
            return value
    return None


def is_right(question: dict[str, Any], value: Any) -> bool:
    expected = question["answer"]
    if isinstance(expected, str):
        return expected in str(value)
    return isinstance(value, int | float) and abs(value - expected) <= question.get("within", 1e-6) * abs(expected)


@pytest.mark.mcp
@pytest.mark.timeout(300)
def test_questions_are_answered_in_three_calls_by_a_client_that_knows_only_the_schema() -> None:
    import anyio
    from mcp import StdioServerParameters
    from mcp.client import Client
    from mcp.client.stdio import stdio_client

    given = ["-m", "cs_systems", "mcp", "profiles", "tests"]
    started = StdioServerParameters(command=sys.executable, args=given, cwd=ROOT, env={**os.environ})
    wrong, calls = {}, {}

    async def ask() -> None:
        async with Client(stdio_client(started)) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            assert tools == {"analyze", "snapshot", "report", "compare", "runs", "schema"}

            async def read(uri: str) -> str:
                return (await client.read_resource(uri, cache_mode="bypass")).contents[0].text

            async def call(tool: str, words: dict[str, Any]) -> Document:
                done = await client.call_tool(tool, words)
                return json.loads(done.content[0].text)

            schema = json.loads(await read("cs-systems://schema"))
            for question in QUESTIONS:
                before = int(await read("cs-systems://calls"))
                value = await answer(question, schema, call)
                calls[question["ask"]] = int(await read("cs-systems://calls")) - before
                if not is_right(question, value):
                    wrong[question["ask"]] = (value, question["answer"])

    anyio.run(ask)
    assert not wrong
    assert len(calls) == 50
    assert 1 <= max(calls.values()) <= MOST_CALLS


def test_paths_and_links_outside_of_the_roots_are_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    secret = outside / "records.jsonl"
    secret.write_text("{}\n")
    (inside / "run").mkdir()
    (inside / "run" / "records.jsonl").symlink_to(secret)
    reader = Reader([inside.resolve()])
    for path in (outside, inside / ".." / "outside", secret):
        error = json.loads(reader.command("report", [str(path)]))["error"]
        assert error["message"].startswith(f"{path} is outside of the folders that may be read; give a path below")
    assert "leads outside" in json.loads(reader.command("report", [str(inside / "run")]))["error"]["message"]
    assert reader.runs(None) == []
    assert reader.calls == 4


def test_link_next_to_a_file_that_leads_outside_is_refused(tmp_path: Path) -> None:
    inside, secret = tmp_path / "inside", tmp_path / "secret.json"
    inside.mkdir()
    secret.write_text("[]")
    (inside / "step.sqlite").touch()
    (inside / "step.modules.json").symlink_to(secret)
    message = json.loads(Reader([inside]).command("analyze", [str(inside / "step.sqlite")]))["error"]["message"]
    assert message.startswith(f"{inside / 'step.modules.json'} leads outside of the folders that may be read")


def test_runs_lists_each_folder_once_and_refuses_what_is_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "records.jsonl").write_text("{}\n")
    reader = Reader([tmp_path, folder])
    assert [row["records"] for row in reader.runs(None)] == [1]
    for path, message in {str(tmp_path / "typo"): "is not a folder", "a\0b": "contains a NUL character"}.items():
        error = json.loads(reader.counted(lambda path=path: str(reader.runs(path))))["error"]  # type: ignore[misc]
        assert message in error["message"]


def test_unreadable_file_is_an_error_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    reader = Reader([tmp_path])
    error = json.loads(reader.counted(lambda: str(reader.runs(None))))["error"]
    assert error == {"message": f"{tmp_path / 'records.jsonl'}: Is a directory", "status": 2}


def test_words_of_a_call_never_become_options(tmp_path: Path) -> None:
    (tmp_path / "--open").mkdir()
    reader = Reader([tmp_path.resolve()])
    message = json.loads(reader.command("report", [str(tmp_path / "--open")], ["--output"]))["error"]["message"]
    assert message == "unknown table '--output'; give names of tables, such as kernels"


def test_missing_package_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["mcp", "."]) == 2
    assert "requires the package mcp; pip install 'cs-systems[mcp]'" in " ".join(capsys.readouterr().err.split())


def test_folder_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "no_such_folder"]) == 2
    assert "no_such_folder is not a folder" in capsys.readouterr().err or find_spec("mcp") is None
