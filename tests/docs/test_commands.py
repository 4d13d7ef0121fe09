"""The commands that docs/ and README show: those that a CPU can run are run, and the others name options that exist."""

import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from cs_systems.cli import COMMANDS, _dispatch, main
from cs_systems.config import ConfigError, one_of
from tests.nsys_lock import alone_with_nsys

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import docs_commands as docs

TEXTS = {str(page.relative_to(docs.ROOT)): page.read_text() for page in docs.PAGES}
RUN_HERE = [page for page, text in TEXTS.items() if any(block.needs is None for block in docs.blocks(text))]
README = (docs.ROOT / "README.md").read_text()
SHOWN = [
    *((page, command) for page, text in TEXTS.items() for block in docs.blocks(text) for command in block.commands),
    *(("README.md", line) for line in README.splitlines() if line.startswith("cs-systems ")),
]


Run = Callable[[str, Path, dict[str, str]], str]


@pytest.mark.parametrize("page", TEXTS)
def test_page_has_a_heading_and_a_text(page: str) -> None:
    assert TEXTS[page].startswith("# ")
    assert len(TEXTS[page].split()) > 50


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return `docs.run` that runs cs-systems and Python's files in this process, the rest of a pipe in a shell."""

    def run(command: str, folder: Path, environment: dict[str, str]) -> str:
        with alone_with_nsys() if "doctor" in command else nullcontext():
            return run_alone(command, folder, environment)

    def run_alone(command: str, folder: Path, environment: dict[str, str]) -> str:
        own, _, filters = command.partition(" | ")
        program, *words = shlex.split(own)
        if program not in ("cs-systems", "python") or {*own} & {*"|&;<>$"}:
            return docs.run(command, folder, environment)
        status = 0
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name in ("COLUMNS", "NO_COLOR", "CUDA_VISIBLE_DEVICES"):
                patch.setenv(name, environment[name])
            if program == "python":
                patch.setattr(sys, "argv", words)
                try:
                    runpy.run_path(words[0], run_name="__main__")
                except SystemExit as stop:
                    status = int(stop.code or 0)
            else:
                status = main(words)
        out, err = capsys.readouterr()
        assert status == 0, f"{command}\n{err}"
        if filters:
            (folder / ".printed").write_text(out)
            return docs.run(f"< .printed {filters}", folder, environment)
        return out if out.strip() else err

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN_HERE)
def test_commands_of_page_run_on_a_cpu(page: str, run_here: Run) -> None:
    for block, printed in docs.outputs(TEXTS[page], run_here):
        assert len(printed) == len(block.commands)
        assert "Traceback" not in "".join(printed)
        for command, shown, now in zip(block.commands, block.shown, printed, strict=True):
            if docs.is_reproducible(command):
                same = [line.rstrip() for line in now.splitlines()] == shown.splitlines()
                assert same, f"{command} prints something else: run python scripts/docs_commands.py --reproducible"


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_shown_command_has_only_known_options(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (words := docs.own_words(command)) is None:
        assert "cs-systems" not in command, f"{page}: {command} is not parsed"
        return
    name, *rest = words
    if name.startswith("-"):
        return
    module = __import__(f"cs_systems.cli.{one_of('command', name, COMMANDS)}", fromlist=["ARGS"])
    monkeypatch.setattr(module, "run", lambda args: 0)
    try:
        assert _dispatch(name, rest) == 0
    except SystemExit as stop:
        pytest.fail(f"{page}: {command}: {stop}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page_with_examples_and_options(command: str) -> None:
    text = TEXTS[f"docs/commands/{command}.md"]
    shown = [words for block in docs.blocks(text) for c in block.commands if (words := docs.own_words(c))]
    assert sum(words[0] == command for words in shown) >= 2
    assert f"<!-- options: {command} -->" in text


def test_output_shown_is_real() -> None:
    """A block that is run shows something below its last command."""
    silent = [
        (page, block.commands[-1])
        for page, text in TEXTS.items()
        for block in docs.blocks(text)
        if block.needs is None and block.text.rstrip().splitlines()[-1].startswith(("$ ", "    --"))
    ]
    assert silent == []


def test_blocks_are_read_with_continued_lines_and_needs() -> None:
    page = "```console\n# needs a GPU\n$ cs-systems time --size \\\n    small | head\nout\n$ ls\n```\n"
    (block,) = docs.blocks(page)
    assert (block.needs, block.commands) == ("a GPU", ["cs-systems time --size small | head", "ls"])
    assert docs.own_words(block.commands[0]) == ["time", "--size", "small"]
    assert docs.own_words("ls") is None


def test_commands_that_read_committed_files_or_predict_are_reproducible() -> None:
    alike = ["analyze t.json", "snapshot s.pickle", "compare profiles/a profiles/b", "memory --size xl --fits 24GiB"]
    alike += ["compare tests/data/a.json tests/data/b.json"]
    other = ["time --size tiny", "report runs/first", "compare runs/a runs/b", "memory --size tiny"]
    assert [docs.is_reproducible(f"cs-systems {words}") for words in alike + other] == [True] * 5 + [False] * 4
    (block,) = docs.blocks("```console\n$ cs-systems doctor \\\n    --json\nout\nmore\n$ ls\n```\n")
    assert block.shown == ["out\nmore\n", ""]


def test_command_that_fails_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(RuntimeError, match="' failed with exit status 2; "):
        docs.run("cs-systems tine", Path(folder), docs.prepare(Path(folder)))


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown option --no-such-option"):
        _dispatch("time", ["--no-such-option", "3"])
