"""Searches of `cs-systems advise` in public training scripts, unedited.

Question: what does advise keep in loops that others wrote, how much faster are they, and how sure is that?
Method: each script of advised_scripts.toml is searched by `advise --budget`, in its folder, which is
a git repository. Afterwards `git status` must be empty, and the diff must apply. --grid measures instead each
combination of levers that ran in the search (those that it kept, then the most promising ones, 4 at most),
and compares the best combination with the one that the search found: both in the same processes. Of the search's trials
those of these levers count.
Output: one JSON file per script in --output, and table.md there, made of all these files.

    python scripts/benchmarks/advised_scripts.py --root checkouts --prepare          # writes the data
    python scripts/benchmarks/advised_scripts.py --root checkouts --cuda-device 0 --budget 180s
    python scripts/benchmarks/advised_scripts.py --root checkouts --tiny --only minGPT --budget 60s  # on a CPU
    python scripts/benchmarks/advised_scripts.py --root checkouts --grid --only minGPT --budget 500s
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _script_data
from public_scripts import Script, listed

from cs_systems.advise.judge import step_s
from cs_systems.advise.lever import ScriptPlan, all_levers
from cs_systems.advise.scripts import ScriptBench
from cs_systems.advise.sources import sources
from cs_systems.cli._advise_script import MAY_FORK
from cs_systems.cli._options import parse_seconds
from cs_systems.config import ConfigError
from cs_systems.measure.runtime.program import script_command

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".toml")
MOST_LEVERS = 4  # of a grid, which has 16 cells then
AGAIN = 2  # further processes of the best cells of a grid
TINY_STEPS = "3:13"
Row = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """Place where scripts run, one after the other: the folder of their checkouts, and a GPU."""

    root: Path
    variables: Mapping[str, str]
    cuda_device: str | None
    is_tiny: bool

    def words(self, script: Script) -> list[str]:
        return [self._placed(word) for word in (*script.command, *(script.tiny if self.is_tiny else ()))]

    def environment(self, script: Script) -> dict[str, str]:
        own = {name: self._placed(value) for name, value in {**self.variables, **script.env}.items()}
        paths = [own.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
        device = "" if self.is_tiny else self.cuda_device
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        path = os.pathsep.join(filter(None, paths))
        return {**os.environ, **own, **visible, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"}

    def steps(self, script: Script) -> tuple[int, int]:
        """Return how many steps of a script are warm-up, and how many are timed."""
        first, last = map(int, (TINY_STEPS if self.is_tiny else script.steps).split(":"))
        return first, last - first

    def _placed(self, text: str) -> str:
        return text.replace("{root}", str(self.root))


def search(script: Script, lane: Lane, budget: str) -> Row:
    """Search one script, and return its answer with the state of its folder."""
    place = lane.root / script.folder
    warmup, timed = lane.steps(script)
    before = state(place)
    with tempfile.TemporaryDirectory() as out:

        def placeless(text: str) -> str:
            return text.replace(out, "OUT").replace(str(lane.root), "ROOT")

        options = ["--budget", budget, "--warmup", str(warmup), "--steps", str(timed), "--out", out]
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "cs_systems", "advise", *options, "--", *lane.words(script)],
            cwd=place,
            env=lane.environment(script),
            capture_output=True,
            text=True,
        )
        took_s = time.monotonic() - began_s
        file, patch = Path(out) / "advice.json", Path(out) / "advice.diff"
        answer = json.loads(placeless(file.read_text())) if file.exists() else {}
        applies = None  # no diff, or no git
        if patch.exists() and shutil.which("git"):
            check = ["git", "apply", "--check", str(patch)]
            applies = subprocess.run(check, cwd=place, capture_output=True).returncode == 0
        log = Path(out) / "start-0" / "log.txt"
        tail = "" if answer or not log.exists() else log.read_text(errors="replace")[-2000:]

    return {
        "script": script.name,
        "repository": script.repository,
        "commit": script.commit,
        "about": script.about,
        "command": list(script.command),
        "budget": budget,
        "took_s": round(took_s, 1),
        "status": done.returncode,
        "changed_files": sorted({file for file, _ in before.items() ^ state(place).items()}),
        "diff_applies": applies,
        **answer,
        "printed": placeless(done.stdout if answer else done.stdout + done.stderr[-2000:] + tail),
        "progress": placeless(done.stderr[-6000:]),
    }


def warm(script: Script, lane: Lane) -> float:
    """Run a script once up to its last timed step, and return the time in s."""
    warmup, timed = lane.steps(script)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        options = {"name": "warm", "stop": True, "profile": "none", "warmup": warmup, "steps": timed, "out": out}
        command = script_command(options, lane.words(script))
        subprocess.run(command, cwd=lane.root / script.folder, env=lane.environment(script), check=True)
    return time.monotonic() - began_s


def state(folder: Path) -> dict[str, str]:
    """Return the size and the time of each file below a folder, with the changes that git reports there."""
    found = {
        str(file.relative_to(folder)): f"{file.stat().st_size} {file.stat().st_mtime_ns}"
        for file in folder.rglob("*")
        if file.is_file() and ".git" not in file.parts
    }
    if shutil.which("git"):
        done = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True)
        found |= dict.fromkeys(done.stdout.splitlines(), "git status")
    return found


def grid(script: Script, lane: Lane, answer: Row, budget_s: float) -> Row:
    """Measure each combination of the first levers of a search, and compare the best with what the search found.

    Raises ConfigError if the unchanged script cannot be measured.
    """
    words, (warmup, timed) = lane.words(script), lane.steps(script)
    kept = tuple(answer["best"]["levers"])
    ran = [row["lever"] for row in answer["trials"] if row["processes"] and row["step_s"]]
    names = tuple(dict.fromkeys([*kept, *ran]))[:MOST_LEVERS]
    options = {"name": Path(words[0]).name, "stop": True, "profile": "none", "warmup": warmup, "steps": timed}
    with tempfile.TemporaryDirectory() as out:
        files = sources(Path(words[0]))
        bench = ScriptBench(
            words, all_levers(), Path(out), script_command, options, budget_s, sources=files, may_fork=MAY_FORK
        )
        times: dict[tuple[str, ...], list[float]] = {}
        for cell in cells(names, kept):
            if times and bench.left_s() < (1 + 2 * AGAIN) * bench.process_s():
                break
            record = bench.measure(ScriptPlan(cell), 0)
            times[cell] = [found_s] if (found_s := step_s(record)) else []
            print(cell, times[cell] or record.reason, file=sys.stderr, flush=True)
            if not times[()]:
                raise ConfigError(f"{script.name} as it comes was not measured: {record.reason}; see that it runs")
        measured = {cell: found for cell, found in times.items() if found}
        closest = dict.fromkeys([*sorted(measured, key=lambda cell: measured[cell])[:2], *({kept} & {*measured})])
        for number, cell in itertools.product(range(1, AGAIN + 1), closest):
            if found_s := step_s(bench.measure(ScriptPlan(cell), number)):
                measured[cell].append(found_s)
        spent_s = bench.spent_s()
    typical = {cell: median(found) for cell, found in measured.items()}
    best = min(closest, key=lambda cell: typical[cell])
    return {
        "script": script.name,
        "levers": list(names),
        "cells": [{"levers": list(cell), "steps_s": times[cell]} for cell in times],
        "not_measured": 2 ** len(names) - len(times),
        "best": list(best),
        "best_s": typical[best],
        "advised": list(kept),
        "advised_s": typical.get(kept),
        "share_of_best_speed": typical[best] / typical[kept] if kept in typical else None,
        "trials_of_grid": len(times),
        "trials_of_search": sum(row["processes"] > 0 and row["lever"] in names for row in answer["trials"]),
        "took_s": round(spent_s, 1),
    }


@contextmanager
def placed(script: Script, lane: Lane) -> Iterator[None]:
    """Let this process work in a script's folder, with the script's environment variables."""
    before = dict(os.environ)
    os.environ.update(lane.environment(script))
    try:
        with chdir(lane.root / script.folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def answer_of(script: Script, folder: Path) -> Row:
    """Return what a search found for a script. Raises ConfigError if there is no answer."""
    file = folder / "answers" / f"{file_name(script)}.json"
    answer: Row = json.loads(file.read_text()) if file.exists() else {}
    if "best" not in answer:
        why = "holds no answer of a search" if file.exists() else "does not exist"
        raise ConfigError(f"{file} {why}; search {script.name} without --grid first")
    return answer


def file_name(script: Script) -> str:
    return re.sub(r"\W+", "_", script.name).strip("_")


def cells(names: Sequence[str], kept: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each combination of levers; first the start and what the search kept."""
    every = [found for size in range(len(names) + 1) for found in itertools.combinations(names, size)]
    yield from dict.fromkeys([(), tuple(kept), *every])


def table(folder: Path) -> str:
    rows = [json.loads(file.read_text()) for file in sorted((folder / "answers").glob("*.json"))]
    grids = [json.loads(file.read_text()) for file in sorted((folder / "grids").glob("*.json"))]
    device = next((row["device"] for row in rows if row.get("device")), "a CPU")
    lines = [
        "# What does advise keep in public training scripts, and how much faster are they?",
        "",
        f"On {device}, by `scripts/benchmarks/advised_scripts.py`: {len(rows)} of the {len(listed(LIST, None)[0])} "
        "scripts of `scripts/benchmarks/advised_scripts.toml`, unedited, with generated data.",
        "",
        "| script | commit | start (ms) | best (ms) | gain | interval | ± | trials | time (s) | folder | diff |",
        "| --- | --- | --: | --: | --: | --- | --: | --: | --: | --- | --- |",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
    ]
    for row in rows:
        lines += [
            "",
            f"## {row['script']}",
            "",
            f"{row['about']}. {'; '.join(row.get('sentences', ()))}",
            "",
            *_trials(row),
        ]
    if grids:
        lines += [
            "",
            "## Compared with every combination",
            "",
            "| script | levers | cells | best (ms) | advised (ms) | share of best speed | trials | share of trials |",
            "| --- | --- | --: | --: | --: | --: | --: | --: |",
            *(f"| {' | '.join(_grid_cells(row))} |" for row in grids),
        ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    whole = row.get("whole") or {}
    gain = interval = half = ""
    if whole:
        gain = f"{1 / whole['ratio']:.2f}"
        if whole["low"] and whole["high"]:
            interval = f"{1 / whole['high']:.2f} … {1 / whole['low']:.2f}"
            half = f"{(whole['high'] - whole['low']) / 2 / whole['ratio']:.1%}"
    tried = sum(each["processes"] > 0 for each in row.get("trials", ()))
    commit = f"{row['repository']}@{row['commit'][:10]}"
    diff = {None: "not tried" if row.get("diff") else "none", True: "applies", False: "does not apply"}[
        row["diff_applies"]
    ]
    folder = "as before" if not row["changed_files"] else f"changed: {len(row['changed_files'])} files"
    return [
        *(row["script"], commit, _ms(row.get("start_s")), _ms(row.get("best_s")), gain, interval, half),
        *(str(tried), f"{row['took_s']:.0f}", folder, diff),
    ]


def _trials(row: Row) -> list[str]:
    tried = [each for each in row.get("trials", ()) if each["processes"]]
    if not tried:
        return []
    lines = [
        "| lever | expected (ms) | step (ms) | gain | interval | kept | why |",
        "| --- | --: | --: | --: | --- | --- | --- |",
    ]
    for each in tried:
        interval = f"{each['gain_low']:.2f} … {each['gain_high']:.2f}" if each["gain_low"] and each["gain_high"] else ""
        gain = f"{each['gain']:.2f}" if each["gain"] else ""
        is_kept = "yes" if each["status"] == "kept" else "no"
        why = each["numbers"] if is_kept == "yes" else f"{each['reason']} {each['numbers']}".strip()
        times = _ms(each["expected_s"]), _ms(each["step_s"])
        lines.append(f"| {' | '.join([each['lever'], *times, gain, interval, is_kept, why.replace('|', '/')])} |")
    return lines


def _grid_cells(row: Row) -> list[str]:
    share = f"{row['share_of_best_speed']:.1%}" if row["share_of_best_speed"] else ""
    trials = f"{row['trials_of_search']} of {row['trials_of_grid']}"
    return [
        *(row["script"], ", ".join(row["levers"]), str(row["trials_of_grid"]), _ms(row["best_s"])),
        *(_ms(row["advised_s"]), share, trials, f"{row['trials_of_search'] / row['trials_of_grid']:.0%}"),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, default=LIST, help="TOML file of the scripts")
    parser.add_argument("--root", type=Path, required=True, help="folder that holds their folders")
    parser.add_argument("--prepare", action="store_true", help="write the data that the scripts read, and end")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to try everything")
    parser.add_argument("--only", nargs="+", help="words in the names of the scripts to run")
    parser.add_argument("--cuda-device", help="the GPU to use, such as 0")
    parser.add_argument("--budget", default="180s", help="time for each script")
    parser.add_argument("--warm", action="store_true", help="only run each script once, to fill the compiler's caches")
    parser.add_argument("--grid", action="store_true", help="measure every combination of levers")
    parser.add_argument("--output", type=Path, default=Path("runs/advised_scripts"), help="folder of the results")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except ConfigError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> None:
    root = options.root.resolve()
    scripts, variables = listed(options.list, options.only)
    if options.prepare:
        _script_data.prepare(root, [script.folder for script in scripts], tiny=options.tiny)
        return
    budget_s = parse_seconds(options.budget, "--budget")
    lane = Lane(root, variables, options.cuda_device, options.tiny)
    output = options.output.resolve()
    found = {script.name: answer_of(script, output) for script in scripts} if options.grid and not options.warm else {}
    for script in scripts:
        if options.warm:
            print(f"{script.name}: {warm(script, lane):.0f} s to its last timed step")
            continue
        of_kind = output / ("grids" if options.grid else "answers")
        of_kind.mkdir(parents=True, exist_ok=True)
        if options.grid:
            with placed(script, lane):
                row = grid(script, lane, found[script.name], budget_s)
        else:
            row = search(script, lane, options.budget)
        (of_kind / f"{file_name(script)}.json").write_text(json.dumps(row, indent=1) + "\n")
        (output / "table.md").write_text(table(output))
        print(f"{script.name}: {row['took_s']} s, {' '.join(row.get('sentences', ()))}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
