"""Check that training scripts run under `cs-systems run` as they run alone, with correct phase times.

Method: each script of a list runs alone (--alone times), alone with clocks placed by hand (--clocked times), under
`cs-systems run` with each profiler of --with, and once under both `run` and the clocks. Every run begins in a new
folder of links to the script's files, with the same seeds. _script_observer.py, which shares no code with the package,
writes the state at exit of each process. These must be equal to the first run alone: standard output with times
masked, exit status, checksums of parameters and buffers, of gradients and of the optimizers' state, random state, the
modes of the modules, the compiler's frames, graphs and graph breaks, and which functions of torch are replaced at exit.
The other runs alone show whether the script repeats itself.
A phase is right if the record's median step is no further from the median of the clocked runs than these are apart,
and if, in the run under both, the record's median is the clocks' median of the same steps.
Output: two markdown tables on standard output, and with --json all values. Committed: profiles/public_scripts/.

The list is a TOML file, of programs that the user has checked out below --root:

    [env]                                   # of all scripts; {root} stands for --root
    WANDB_MODE = "disabled"
    [[script]]
    name = "nanoGPT train.py"
    folder = "nanoGPT"                      # the working directory, below --root
    command = ["train.py", "config/x.py"]   # what follows `python`
    clocks = {forward = ["model:GPT.forward"]}  # clocks in addition to backward, optimizer and input
    mask = ['loss time \\S+']               # also masked in standard output
    ranks = 2                               # started by torchrun
    env = {SOME = "value"}

    python scripts/benchmarks/public_scripts.py scripts.toml --root checkouts --json table.json
    python3 scripts/benchmarks/public_scripts.py scripts.toml --root checkouts --deterministic --alone 2 --clocked 0 \\
        --with kineto memory                # on a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cs_systems.record import RunRecord, read_records

ROOT = Path(__file__).parents[2]
OBSERVER = Path(__file__).with_name("_script_observer.py")
PHASES = ("input", "forward", "backward", "optimizer", "step")
TIMES = (
    r"\b\d+(\.\d+)?(e[-+]\d+)? ?(ns|us|µs|ms|s|sec|secs|seconds|m|min|minutes|h|it/s|s/it)\b",
    r"\b\d+:\d\d(:\d\d)?(\.\d+)?\b",
    r"\b\d{4}-\d\d-\d\d\b",
    r"0x[0-9a-f]{6,}",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Script:
    """Training program of the list."""

    name: str
    folder: str
    command: tuple[str, ...]
    clocks: dict[str, list[str]] = field(default_factory=dict)
    ranks: int = 1
    mask: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    steps: str = ""
    repository: str = ""
    commit: str = ""
    about: str = ""
    tiny: tuple[str, ...] = ()  # added to the command for a first try on a CPU

    def masked(self, text: str) -> str:
        for pattern in (*self.mask, *TIMES):
            text = re.sub(pattern, "…", text)
        return text


@dataclass(frozen=True)
class Run:
    """Result of one run of a script."""

    status: int
    stdout: str
    stderr: str
    ranks: dict[str, Row]  # output of the observer, by rank
    records: tuple[RunRecord, ...]
    wall_s: float

    def compared(self) -> Row:
        """Return the values that must be equal with and without a recorder, by rank if they belong to a rank."""
        parts = next(iter(self.ranks.values()), {"state": {}})["state"]
        state = {name: {rank: one["state"][name] for rank, one in self.ranks.items()} for name in parts}
        return {"output": self.stdout, "status": self.status, **state}

    def steps(self) -> list[dict[str, float]]:
        """Return the clocked steps of the slowest rank."""
        of_ranks = [one["steps"] or [] for one in self.ranks.values()]
        return max(of_ranks, key=lambda steps: sum(step["step"] for step in steps), default=[])


def listed(file: Path, only: Sequence[str] | None) -> tuple[list[Script], dict[str, str]]:
    """Return the programs of a list, those with a word of `only` in their names if given, and common variables."""
    given = tomllib.loads(file.read_text())
    scripts = [
        Script(**{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()}) for each in given["script"]
    ]
    chosen = [script for script in scripts if not only or any(word in script.name for word in only)]
    return chosen, given.get("env", {})


class Bench:
    def __init__(self, options: argparse.Namespace, env: dict[str, str], folder: Path) -> None:
        self.options, self.folder = options, folder
        self.env = {name: self._placed(value) for name, value in env.items()}
        self.site = folder / "site"
        self.site.mkdir()
        shutil.copy(OBSERVER, self.site / "sitecustomize.py")

    def _placed(self, text: str) -> str:
        return text.replace("{root}", str(self.options.root))

    def run(self, script: Script, kind: str, *, profiler: str | None = None, clocked: bool = False) -> Run:
        """Run the script once, under `cs-systems run --with` a profiler or without.

        A kept run without a profiler is used again.
        """
        kept = self.options.keep / re.sub(r"\W+", "_", script.name) / kind if self.options.keep else None
        if kept is not None and profiler is None and (kept / "run.json").exists():
            run = Run(**json.loads((kept / "run.json").read_text()))
            return replace(run, stdout=script.masked(run.stdout))
        run = self._run(script, profiler, clocked)
        why = f": {run.stderr.strip()[-200:]}" if run.status else ""
        print(f"{script.name}, {kind}: status {run.status}, {run.wall_s:.0f} s{why}", file=sys.stderr, flush=True)
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            (kept / "run.json").write_text(json.dumps(asdict(replace(run, records=())), indent=1))
            if run.records:
                shutil.copytree(self.folder / "out", kept / "records")
        return run

    def _run(self, script: Script, profiler: str | None, clocked: bool) -> Run:
        work, seen, out = (self.folder / name for name in ("work", "seen", "out"))
        for each in (work, seen, out):
            shutil.rmtree(each, ignore_errors=True)
        shutil.copytree(self.options.root / script.folder, work, copy_function=os.symlink, symlinks=True)
        seen.mkdir()
        steps = script.steps or self.options.steps
        words = [self._placed(word) for word in script.command]
        if profiler is not None:
            words = ["-m", "cs_systems", "run", "--steps", steps, "--with", profiler, "--out", str(out), "--", *words]
        if script.ranks > 1:
            launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}"]
            words = ["-m", *launch, "--redirects=1", f"--log-dir={seen}", *words]
        observe: Row = {"out": str(seen), "deterministic": self.options.deterministic}
        if clocked:
            observe["clocks"] = script.clocks
        env = os.environ | {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | self.env
        env |= {name: self._placed(value) for name, value in script.env.items()}
        asked, own = env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")
        path = dict.fromkeys([str(self.site), str(ROOT), *filter(None, [asked, own])])
        env |= {"OBSERVE": json.dumps(observe), "PYTHONPATH": os.pathsep.join(path)}
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=work,
                env=env,
                text=True,
                capture_output=True,
                timeout=self.options.timeout_s,
            )
            status, stdout, stderr = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            status, stdout, stderr = 124, _text(late.stdout), _text(late.stderr)
        ranks = {f.name.partition("-")[0]: json.loads(f.read_text()) for f in sorted(seen.glob("*.json"))}
        records = tuple(read_records(out)[0]) if (out / "records.jsonl").exists() else ()
        stdout += "".join(file.read_text() for file in sorted(seen.glob("*/*/*/stdout.log")))  # one file per rank
        stdout = script.masked(stdout.replace(str(self.folder), "…"))
        return Run(status, stdout, stderr, ranks, records, time.perf_counter() - begin)

    def row(self, script: Script) -> Row:
        """Return the table row of one script, with all results."""
        alone, *again = (self.run(script, f"alone-{i}") for i in range(self.options.alone))
        clocked: list[Run] = []
        recorded: dict[str, Run] = {}
        # in turn, because the machine's load changes
        for i in range(max(self.options.clocked, len(self.options.with_))):
            if i < self.options.clocked:
                clocked.append(self.run(script, f"clocked-{i}", clocked=True))
            if i < len(self.options.with_):
                profiler = self.options.with_[i]
                recorded[profiler] = self.run(script, profiler, profiler=profiler)
        both = None
        if clocked and recorded:
            both = self.run(script, "both", profiler=self.options.with_[0], clocked=True)
        first, last = map(int, (script.steps or self.options.steps).split(":"))
        return {
            "script": script.name,
            "ranks": script.ranks,
            "wall_s": round(alone.wall_s, 1),
            "tensors": {rank: one["tensors"] for rank, one in alone.ranks.items()},
            "counters": {rank: one["state"]["counters"] for rank, one in alone.ranks.items()},
            "repeats itself": [
                *(differences(alone, run) for run in again),
                *(differences(alone, run, without=("counters", "hooks")) for run in clocked),
            ],
            "differs": {profiler: differences(alone, run) for profiler, run in recorded.items()},
            "phases": phases(clocked, next(iter(recorded.values())), both, first, last) if recorded else {},
            "covered": {profiler: covered(run) for profiler, run in recorded.items()},
            "caveats": {profiler: caveats(run) for profiler, run in recorded.items()},
        }


def _text(stream: Any) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


def differences(alone: Run, other: Run, without: Sequence[str] = ()) -> dict[str, str]:
    """Return the names of values that differ between two runs, each with its first difference."""
    mine, theirs = alone.compared(), other.compared()
    found = {}
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        if name in without or a == b:
            continue
        if name == "output":
            lines = zip([*a.splitlines(), ""], [*b.splitlines(), ""], strict=False)
            a, b = next(((x, y) for x, y in lines if x != y), ("", f"{len(b.splitlines())} lines"))
        found[name] = f"{a} → {b}"[:2000]
    if not mine.get("parameters"):
        found["parameters"] = "no process wrote its state"
    return found


def timed(run: Run) -> RunRecord | None:
    """Return the record of the timing that `run` printed first."""
    return next((r for r in run.records if r.status == "ok" and r.config["profiler"] == "none"), None)


def phases(clocked: Sequence[Run], recorded: Run, both: Run | None, first: int, last: int) -> dict[str, Row]:
    """Return for each phase the median step of each clocked run, of the record, and of both in one run, in seconds."""
    found = {}
    for phase in PHASES:
        medians = [each for run in clocked if (each := _clocked_s(run, phase, first, last)) is not None]
        same = {"clocked": _clocked_s(both, phase, first, last), "recorded": _recorded_s(both, phase)} if both else {}
        if not any([*medians, same.get("clocked")]):
            continue
        row: Row = {"clocked_s": medians, "recorded_s": _recorded_s(recorded, phase), "within_spread": None}
        if len(medians) > 1 and row["recorded_s"] is not None:
            spread = max(medians) - min(medians)
            row["within_spread"] = abs(row["recorded_s"] - median(medians)) <= spread
        found[phase] = row | ({"same_steps_s": same} if both is not None else {})
    return found


def _clocked_s(run: Run, phase: str, first: int, last: int) -> float | None:
    times = [step.get(phase, 0.0) for step in run.steps()[first:last]]
    return round(median(times), 9) if times else None


def _recorded_s(run: Run, phase: str) -> float | None:
    record = timed(run)
    if record is None or record.measurement is None:
        return None
    samples = record.measurement.timed
    times = [s.wall_s if phase == "step" else s.phases_s.get(phase, 0.0) for s in samples]
    return round(median(times), 9) if times else None


def covered(run: Run) -> float | None:
    """Return the share of the timed steps that belongs to a phase."""
    record = timed(run)
    if record is None or record.measurement is None:
        return None
    samples = record.measurement.timed
    whole = sum(sample.wall_s for sample in samples)
    return round(1 - sum(sample.phases_s.get("other", 0.0) for sample in samples) / whole, 4) if whole else None


def caveats(run: Run) -> list[str]:
    return [
        f"{r.config['profiler']} {r.status}: {r.reason or ', '.join(w.code for w in r.warnings)}" for r in run.records
    ]


def tables(rows: Sequence[Row]) -> str:
    lines = [
        "| script | equal to the run alone | repeats itself | differs | share in phases |",
        "| --- | --- | --- | --- | --: |",
    ]
    for row in rows:
        of = {p: ", ".join(found) or "nothing" for p, found in row["differs"].items()}
        repeats = sum(not each for each in row["repeats itself"])
        equal = "yes" if not any(row["differs"].values()) else "no"
        share = next((f"{each:.1%}" for each in row["covered"].values() if each is not None), "")
        differs = "; ".join(f"{p}: {what}" for p, what in of.items())
        cells = [row["script"], equal, f"{repeats} of {len(row['repeats itself'])}", differs, share]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| script | phase | clocks, median (ms) | of all runs (ms) | record (ms) | within | same steps |",
        "| --- | --- | --: | --: | --: | --- | --: |",
    ]
    for row in rows:
        for phase, one in row["phases"].items():
            times_ms = [1e3 * each for each in one["clocked_s"]]
            recorded = "" if one["recorded_s"] is None else f"{1e3 * one['recorded_s']:.2f}"
            spread = f"{min(times_ms):.2f} … {max(times_ms):.2f}" if times_ms else ""
            middle = f"{median(times_ms):.2f}" if times_ms else ""
            within = {True: "yes", False: "no", None: ""}[one["within_spread"]]
            same = one.get("same_steps_s", {})
            ratio = f"{same['recorded'] / same['clocked']:.3f}" if same.get("clocked") and same.get("recorded") else ""
            cells = [row["script"], phase, middle, spread, recorded, within, ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="TOML file of the scripts")
    parser.add_argument("--root", type=Path, required=True, help="folder that holds their folders")
    parser.add_argument("--only", nargs="+", help="words in the names of the scripts to run")
    parser.add_argument("--with", nargs="*", dest="with_", default=["kineto"])
    parser.add_argument("--alone", type=int, default=1, help="runs of the script alone; more show whether it repeats")
    parser.add_argument("--clocked", type=int, default=5, help="runs with clocks placed by hand")
    parser.add_argument("--steps", default="3:23", help="the steps that are timed")
    parser.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms in each run")
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--keep", type=Path, help="folder of the runs; those in it without the recorder stay")
    parser.add_argument("--json", type=Path, help="file for all values; scripts in it that are not run again stay")
    options = parser.parse_args(arguments)
    options.root = options.root.resolve()
    scripts, variables = listed(options.list, None)
    chosen, _ = listed(options.list, options.only)
    rows: dict[str, Row] = {}
    if options.json and options.json.exists():
        rows = {row["script"]: row for row in json.loads(options.json.read_text())["scripts"]}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, variables, Path(folder))
        for script in chosen:
            rows[script.name] = bench.row(script)
            ordered = [rows[s.name] for s in scripts if s.name in rows]
            if options.json:
                device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
                setting = {"device": device, "torch": torch.__version__, "steps": options.steps}
                setting |= {"deterministic": options.deterministic, "python": sys.version.split()[0]}
                options.json.write_text(json.dumps({**setting, "scripts": ordered}, indent=1) + "\n")
    print(tables([rows[s.name] for s in scripts if s.name in rows]))


if __name__ == "__main__":
    main()
