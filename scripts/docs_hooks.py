"""Hooks of MkDocs: tables of options, files and tables, links out of docs/, and a check that pages need no network.

`<!-- options: time -->` in a page becomes the tables of the options of `cs-systems time`, from its parser, and
`<!-- files: cs_systems -->` those of the files of a folder, from their first lines; `<!-- formats -->` becomes the
table of the formats that are read, `<!-- rules -->` that of the rules of diagnosis, from their docstrings, and
`<!-- tables: MODULE:NAME -->` that of the declared tables which NAME of a module holds, with their captions, notes and
headings. `<!-- schema -->` becomes the tables of a JSON document, from its schema. They are made at each build and
stored nowhere, so that they are never out of date.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

from cs_systems.core import formats as known
from cs_systems.core import plugins
from cs_systems.core.tables import Table
from scripts import files as sources

ROOT = Path(__file__).resolve().parents[1]
_OPTIONS = re.compile(r"<!-- options: (\w+) -->")
_FILES = re.compile(r"<!-- files: (\w+) -->")
_TABLES = re.compile(r"<!-- tables: ([\w.]+):(\w+) -->")
_FORMATS, _RULES, _SCHEMA = "<!-- formats -->", "<!-- rules -->", "<!-- schema -->"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_FROM_NETWORK = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
_STYLE_FROM_NETWORK = re.compile(r"""(?:url\(|@import )["']?(?:https?:)?//[^)"']*""")


def parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's options."""
    import tyro

    arguments = importlib.import_module(f"cs_systems.cli.{command}").ARGS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro has no other way to list its options
        return tyro.extras.get_parser(arguments, config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff))


def options(command: str) -> str:
    """Return the tables of a command's options in Markdown, one for each group."""
    parts = []
    for group in parser(command)._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        if not actions:
            continue
        title = {"options": "This command", "positional arguments": "Files"}.get(str(group.title), str(group.title))
        title = title.removesuffix(" options").capitalize()
        head = [f"### {title}", "", *([group.description, ""] if group.description else [])]
        rows = [f"| {_cell(f'`{_spelled(a)}`')} | {_cell(str(a.help or ''))} |" for a in actions]
        parts.append("\n".join([*head, "| option | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def formats() -> str:
    """Return the table of readable formats."""
    rows = [
        f"| {_cell(', '.join((f'{one.title}:', *(f'`{end}`' for end in one.suffixes))).replace(':,', ':'))} "
        f"| {_cell(one.record)} | {_cell(one.lacks)} | `{one.command}` |"
        for one in sorted(known.formats(), key=lambda one: one.name)
        if one.read
    ]
    return "\n".join(["| file | how to record one | what it lacks | command |", "| --- | --- | --- | --- |", *rows])


def rules() -> str:
    """Return the table of the rules of diagnosis: each one's code, cause, and how it is found."""
    rows = []
    for name in plugins.names("diagnosis"):
        cause = str(importlib.import_module(f"cs_systems.analysis.diagnosis.{name}").__doc__).partition("\n")[0]
        found = str(plugins.get("diagnosis", name).find.__doc__).partition("\n")[0]
        rows.append(f"| `{name.replace('_', '-')}` | {_cell(cause.removeprefix('Rule for '))} | {_cell(found)} |")
    return "\n".join(["| code | cause | rule |", "| --- | --- | --- |", *rows])


def tables(module: str, name: str) -> str:
    """Return the table of the declared tables that a module holds by their names."""
    declared: dict[str, Table[Any]] = getattr(importlib.import_module(module), name)
    rows = []
    for key, one in declared.items():
        notes = [one.caption, *one.notes, *(column.note for column in one.columns.values() if column.note)]
        rows.append(f"| `{key}` | {_cell('; '.join(notes))} | {_cell(', '.join(one.titles.values()))} |")
    return "\n".join(["| table | shows | columns |", "| --- | --- | --- |", *rows])


def schema() -> str:
    """Return the tables of a JSON document, each with the types, units and meanings of its columns."""
    from cs_systems.cli.schema import DOCUMENT
    from cs_systems.cli.schema import schema as made

    parts = []
    for name, found in made(DOCUMENT)["$defs"].items():
        parts += [f"### {name}", ""]
        for one in found.get("anyOf", [found]):
            parts += [
                f"{_cell(one['description'])}",
                "",
                "| column | type | unit | meaning |",
                "| --- | --- | --- | --- |",
            ]
            for column, each in one["properties"].items():
                kinds = each["type"] if isinstance(each["type"], list) else [each["type"]]
                meaning = each.get("description") or each["title"]
                parts.append(f"| `{column}` | {' or '.join(kinds)} | {each.get('unit', '')} | {_cell(meaning)} |")
            parts.append("")
    return "\n".join(parts)


def _spelled(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return " ".join(filter(None, [names, re.sub(r"^(\S+) \[\1 \.\.\.\]$", r"\1 ...", metavar)]))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def link(found: re.Match[str], page: str) -> str:
    """Return a link that stays inside docs/ unchanged, and one that leaves it as text that names the file."""
    _, text, target, _ = found.groups()
    path = _path(target, page)
    if ":" in target or path.startswith("docs/"):
        return found[0]
    if not (ROOT / path).exists():
        raise ValueError(f"docs/{page} links to {target}, and {path} does not exist; correct the link")
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def _path(target: str, page: str) -> str:
    """Return the path below the repository of a link's target."""
    return os.path.normpath(PurePosixPath("docs", page).parent / target)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.file.src_uri
    markdown = _OPTIONS.sub(lambda found: options(found[1]), markdown)
    markdown = _TABLES.sub(lambda found: tables(found[1], found[2]), markdown)
    markdown = _FILES.sub(lambda found: sources.markdown(found[1]), markdown).replace(_FORMATS, formats())
    markdown = markdown.replace(_RULES, rules()) if _RULES in markdown else markdown
    markdown = markdown.replace(_SCHEMA, schema()) if _SCHEMA in markdown else markdown

    def linked(found: re.Match[str]) -> str:
        return _picture(found, source, config, files) if found[1] else link(found, source)

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(linked, part) for part in parts[::2]]
    return "".join(parts)


def _picture(found: re.Match[str], page: str, config: Any, files: Any) -> str:
    """Copy a picture of profiles/ into the site, and return the image that shows it."""
    from mkdocs.structure.files import File

    path = _path(found[3], page)
    if path.startswith("docs/"):
        return found[0]
    copy = "assets/" + path.removeprefix("profiles/").replace("/", "-")
    if files.get_file_from_path(copy) is None:
        files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return f"![{found[2]}]({os.path.relpath(copy, PurePosixPath(page).parent)})"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Raise PluginError if a page would fetch anything from a network."""
    _refuse(_FROM_NETWORK.findall(output), page.file.src_uri)
    return output


def on_post_build(config: Any) -> None:
    for style in Path(config.site_dir).rglob("*.css"):
        _refuse(_STYLE_FROM_NETWORK.findall(style.read_text()), style.name)


def _refuse(found: list[str], where: str) -> None:
    from mkdocs.exceptions import PluginError

    if found := [tag for tag in found if 'rel="canonical"' not in tag]:
        raise PluginError(
            f"{where} would fetch from a network by {found[0]}; store the file in docs/, and refer to it there"
        )
