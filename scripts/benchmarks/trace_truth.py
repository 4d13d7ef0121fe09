"""Show where the first sentence about a public recording differs from the one that profiles/trace_truth judged.

Method: each file of the table is taken out of a clone of its repository, by commit and path, or from the history where
the hash is another. Reports of nsys are exported by the nsys on the PATH. The first cause, else the first other
sentence, is compared with the sentence in the table. A verdict is a judgement: the script changes none.
Output: for each changed row its truth, verdict, and both sentences; then the verdicts by number of files, and the rows
without a file.

    python scripts/benchmarks/trace_truth.py CLONES [--rows 268 289]

CLONES holds a clone per repository, bare or not, named OWNER+NAME or OWNER+NAME/repo.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cs_systems.cli import main as run

TABLE = Path(__file__).resolve().parents[2] / "profiles" / "trace_truth" / "table.md"
SNAPSHOTS = (".pickle", ".pkl")
NAME = re.compile(r"^\S+ (?=holds no|is damaged)")  # an error begins with the file's path
DOUBTS = (
    "history cut",
    "incomplete trace",
    "peak unknown",
)  # about the recording; a conclusion follows, if there is one
CUT = " …"


class Row(NamedTuple):
    """Row of the table."""

    number: str
    repository: str
    commit: str
    path: str
    sha256: str
    kind: str
    cause: str
    truth: str
    sentence: str
    verdict: str


def rows() -> list[Row]:
    """Return the rows of the table in order."""
    lines = (line for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d{3} \|", line))
    return [Row(*(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])) for line in lines]


def content(clones: Path, row: Row) -> bytes | None:
    """Return the content of the row's file; None if no clone has it."""
    clone = clones / row.repository.replace("/", "+")
    clone = clone / "repo" if (clone / "repo").is_dir() else clone
    if not clone.is_dir():
        return None

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", clone, *words], capture_output=True).stdout

    def versions() -> Iterator[str]:
        yield row.commit
        yield from git("log", "--all", "--format=%H", "--", row.path).decode().split()

    found = (git("cat-file", "blob", f"{commit}:{row.path}") for commit in versions())
    return next((each for each in found if hashlib.sha256(each).hexdigest().startswith(row.sha256)), None)


def first_sentence(path: Path) -> str:
    """Return the first cause about a file, else its first sentence; the error of a refused file."""
    command = "snapshot" if path.suffix in SNAPSHOTS else "analyze"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run([command, str(path), "--format", "markdown"])
    if status:
        return NAME.sub("error: ", err.getvalue().removeprefix("cs-systems: ").strip())
    said = [
        line for line in out.getvalue().partition("\n**")[0].splitlines() if line.strip()
    ]  # a table's caption ends it
    first = next((line for line in said if not line.startswith(DOUBTS)), said[0] if said else "")
    return html.unescape(re.sub(r"\\(\W|_)", r"\1", first.removeprefix("1. ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clones", type=Path, help="folder of the clones")
    parser.add_argument("--rows", nargs="+", metavar="NUMBER", help="numbers of rows (default: all)")
    args = parser.parse_args()
    wanted = [row for row in rows() if not args.rows or row.number in args.rows]
    verdicts, missing = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for row in wanted:
            if (found := content(args.clones, row)) is None:
                missing.append(row.number)
                continue
            path = Path(folder) / f"{row.number}_{Path(row.path).name}"
            path.write_bytes(found)
            now, then = first_sentence(path), NAME.sub("error: ", row.sentence.replace("\\|", "|").removesuffix(CUT))
            path.unlink()
            verdicts[row.verdict] += 1
            if not now.startswith(then):
                print(f"{row.number} {row.verdict}\n  truth: {row.truth}\n  then: {row.sentence}\n  now: {now}")
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) or "no file was read")
    print("without a file:", ", ".join(missing) or "none")


if __name__ == "__main__":
    main()
