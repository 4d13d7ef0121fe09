"""Hooks of MkDocs on a page: options from the parsers, declared tables, and links that end in the repository."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from cs_systems.cli import COMMANDS, main
from cs_systems.core import plugins
from cs_systems.core.caveats import LOOP_REMEDIES, REMEDIES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import docs_hooks as hooks

TABLES = [
    ("analyze.md", "cs_systems.analysis.attribution.timeline", "DECLARED"),
    ("analyze.md", "cs_systems.analysis.comparison.ranks", "TABLES"),
    ("snapshot.md", "cs_systems.analysis.memory.tables", "TABLES"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_options_table_lists_every_option_of_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    helped = {*re.findall(r"│ (--[a-z0-9-]+)", capsys.readouterr().out)}
    listed = {*re.findall(r"--[a-z0-9-]+", " ".join(re.findall(r"^\| (`.*?`) \|", hooks.options(command), re.M)))}
    assert helped <= listed | {"--help"}


def test_options_table_has_groups_values_and_defaults() -> None:
    table = hooks.options("time")
    about = "Measurement of each cell. A cell is one combination of the values above."
    assert f"### Steps\n\n{about}\n\n| option | meaning |" in table
    assert re.search(r"^\| `--steps INT` \| timed steps \(default: 10\) \|$", table, re.M)
    assert "| `--size STR ...` |" in table
    assert "--help" not in table
    assert r"`--causal [false\|true\|both]`" in hooks.options("attention")


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[Concepts](../concepts.md#verdicts)", "[Concepts](../concepts.md#verdicts)"),
        ("[a site](https://example.org/)", "[a site](https://example.org/)"),
        ("[CONTRIBUTING.md](../../CONTRIBUTING.md)", "`CONTRIBUTING.md`"),
        ("[the log](../../profiles/attention_h200/log.md)", "the log (`profiles/attention_h200/log.md`)"),
    ],
)
def test_links_out_of_docs_become_paths(link: str, shown: str) -> None:
    found = hooks._LINK.fullmatch(link)
    assert found
    assert hooks.link(found, "commands/time.md") == shown


def test_link_to_missing_file_is_an_error() -> None:
    found = hooks._LINK.fullmatch("[x](../profiles/no_such_file.md)")
    assert found
    with pytest.raises(ValueError, match=r"no_such_file\.md does not exist; correct the link"):
        hooks.link(found, "results.md")


def test_tags_that_fetch_from_a_network_are_found() -> None:
    assert hooks._FROM_NETWORK.search('<script src="https://cdn.example/x.js"></script>')
    assert hooks._FROM_NETWORK.search('<link rel="stylesheet" href="//fonts.example/x.css">')
    assert hooks._STYLE_FROM_NETWORK.search("@import url(https://fonts.example/x.css)")
    assert not hooks._FROM_NETWORK.search('<script src="assets/x.js"></script><a href="https://example.org/">x</a>')


def test_formats_are_a_table_in_their_page() -> None:
    table = hooks.formats()
    assert "| a report of nsys or its SQLite export: `.sqlite`, `.nsys-rep`, `.qdrep` | `nsys profile" in table
    assert hooks._FORMATS in (hooks.ROOT / "docs" / "commands" / "analyze.md").read_text()


@pytest.mark.parametrize(("page", "module", "name"), TABLES)
def test_declared_tables_are_a_table_in_their_page(page: str, module: str, name: str) -> None:
    assert f"<!-- tables: {module}:{name} -->" in (hooks.ROOT / "docs" / "commands" / page).read_text()
    declared = getattr(importlib.import_module(module), name)
    listed = [
        re.fullmatch(r"\| `(\w+)` \| (.+) \| (.+) \|", row) for row in hooks.tables(module, name).splitlines()[2:]
    ]
    for (key, table), row in zip(declared.items(), listed, strict=True):
        assert row
        assert row[1] == key
        assert row[2].startswith(table.caption)
        assert row[3].split(", ") == [*table.titles.values()]


def codes_in(section: str) -> list[str]:
    """Return the codes in the first column of the table of a section of concepts.md."""
    text = (hooks.ROOT / "docs" / "concepts.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [code for cell in re.findall(r"^\| (`.*?) \|", text, re.M) for code in re.findall(r"`([\w-]+)`", cell)]


def test_every_caveat_has_one_line_in_concepts() -> None:
    assert sorted(codes_in("Caveats")) == sorted({*REMEDIES, *LOOP_REMEDIES})


def test_every_rule_of_diagnosis_is_in_its_table() -> None:
    rows = [re.fullmatch(r"\| `([\w-]+)` \| .+ \| Find .+ \|", row) for row in hooks.rules().splitlines()[2:]]
    assert [row and row[1].replace("-", "_") for row in rows] == [*plugins.names("diagnosis")]
    assert hooks._RULES in (hooks.ROOT / "docs" / "concepts.md").read_text()
