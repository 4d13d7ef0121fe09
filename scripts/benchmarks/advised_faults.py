"""Searches of `cs-systems advise` in programs with a planted fault that a lever mends, and in healthy ones.

Question: is the lever that mends the fault kept, is its diff right, and is nothing claimed for a healthy program?
Method: LEVERS maps faults of diagnosis_truth/faults to the levers that mend them: loops and ranks on a CPU with one
thread per process, and those of gpu/ where a GPU is. Each program is searched with all levers, unedited, within the
same time. A fault counts as mended if one of its levers is kept and the gain of all kept levers, measured side by side
at the end, excludes 1. The diff counts as right if it changes the program, runs in a copy (`--apply-patch`) and no kept
lever with a patch is left to be written by hand; a lever that is a variable needs none. A healthy program counts as
right if nothing is kept, or if the interval of the whole gain excludes 1: a program without a fault may still become
faster.
Output: a markdown table: program, time and CPU cores of its search, kept levers, whole gain with its interval, gain of
the diff, verdict. Committed: profiles/diagnosis_truth/advised.md. For a quiet machine; about --budget for each program.
With --jobs, several searches run at once, each on cores of its own; --save keeps what each printed.

    python scripts/benchmarks/advised_faults.py
    python scripts/benchmarks/advised_faults.py --programs anomaly_mode healthy_plain --budget 60s --output table.md
    python scripts/benchmarks/advised_faults.py --jobs 14 --budget 200s --json a.json  # on 42 cores or more
    python scripts/benchmarks/advised_faults.py --show a.json b.json  # rows of later files replace earlier ones
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("diagnosis_truth") / "faults"
COMMITTED = ROOT / "profiles" / "diagnosis_truth" / "advised.md"
LEVERS = {
    "accumulation_reduces_each_time": ("no_sync",),
    "anomaly_mode": ("anomaly_detection",),
    "archive_opened_per_item": ("data_loader",),
    "checkpoint_not_reentrant": ("checkpointing",),
    "checkpoint_reentrant": ("checkpointing",),
    "compile_counter_in_module": ("dynamic_integers",),
    "compile_each_length": ("dynamic_shapes",),
    "decode_in_getitem": ("data_loader",),
    "gc_collect_each_step": ("called_collections",),
    "gc_every_fourth": ("called_collections",),
    "lists_in_collate": ("data_loader",),
    "loader_made_anew": ("persistent_workers",),
    "tokenize_in_collate": ("data_loader",),
    "too_many_threads": ("threads",),
    "two_slow_workers": ("more_workers",),
    "validation_builds_graphs": ("evaluation_without_gradients",),
    "searches_unused_parameters": ("searched_parameters", "static_graph"),
    "tiny_buckets": ("bucket_size",),
    "augment_in_main_process": ("data_loader",),
    "cache_emptied": ("called_collections",),
    "fp32_language_model": ("tf32", "bf16"),
    "lengths_compiled_anew": ("dynamic_shapes",),
    "own_norm_and_activation": ("compile",),
    "recomputes_with_room": ("checkpointing",),
    "small_layers_eager": ("reduce_overhead", "compile"),
    "workers_started_each_epoch": ("persistent_workers",),
}
HEALTHY = ("healthy_accumulation", "healthy_augmentations", "healthy_lstm", "healthy_plain", "healthy_two_optimizers")
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
BY_HAND = "write by hand, because the place was not found"
DIFF = re.compile(r"^the diff, in a copy of the folder: \D*([\d.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Searched:
    """Answer of the search in one program.

    budget, cores: the time of the search, and how many CPU cores it had. gain, low, high: of all kept levers. of_diff:
    of the diff alone. is_complete: whether the diff and the variables have all kept levers. error: the reason if there
    is no answer.
    """

    program: str
    budget: str
    cores: int
    kept: tuple[str, ...]
    gain: float | None
    low: float | None
    high: float | None
    of_diff: float | None
    is_complete: bool
    error: str = ""

    @property
    def verdict(self) -> str:
        mending = LEVERS.get(self.program)
        if self.error:
            return f"no answer: {self.error}"
        if mending is None:
            return "right" if not self.kept or (self.low or 0.0) > 1 else "a gain that is not sure"
        if not {*mending} & {*self.kept}:
            return f"not mended: {mending[0]} is not kept"
        if not self.is_complete:
            return "kept, but the diff is not right"
        return "mended" if (self.low or 0.0) > 1 else "kept, but the whole gain is not sure"


def place(program: str) -> Path:
    """Return the file of a program."""
    return next(file for kind in ("loops", "ranks", "gpu") if (file := FAULTS / kind / f"{program}.py").exists())


def copy_to(folder: str, original: Path) -> None:
    """Copy the file of a program, and the modules that it shares with others, into a folder."""
    for file in (original, *original.parent.glob("_*.py")):
        shutil.copy(file, folder)


def launcher_of(original: Path) -> list[str]:
    """Return the words that start the ranks of a program; none if it is one process."""
    return ["torchrun", "--standalone", "--nproc-per-node", "2"] if original.parent.name == "ranks" else []


def search(program: str, budget: str, cores: list[int], save: Path | None) -> Searched:
    """Search a program on these cores; keep in `save` what was printed."""
    original, core_count = place(program), len(cores) or len(os.sched_getaffinity(0))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        copy_to(folder, original)
        words = ["advise", "--budget", budget, "--warmup", "3", "--steps", "20", "--out", f"{folder}/out"]
        launcher = launcher_of(original)
        on_cores = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        of_kind = {} if original.parent.name == "gpu" else {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*on_cores, sys.executable, "-m", "cs_systems", *words, "--apply-patch", "--", *launcher, f"{program}.py"],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **of_kind, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        if save:
            (save / f"{program}.txt").write_text(done.stdout + done.stderr)
        file = Path(folder) / "out" / "advice.json"
        if not file.exists():
            reason = (done.stderr.splitlines() or [""])[-1]
            return Searched(program, budget, core_count, (), None, None, None, None, False, reason)
        advice = json.loads(file.read_text())
    whole = advice["whole"] or {}
    gain, low, high = (1 / end if (end := whole.get(name)) else None for name in ("ratio", "high", "low"))
    kept = tuple(row["lever"] for row in advice["waterfall"] if row["status"] == "kept")
    of_diff = DIFF.search(done.stdout)
    has_all = BY_HAND not in done.stdout and bool(of_diff or not advice["diff"])
    diff_gain = float(of_diff[1]) if of_diff else None
    return Searched(program, budget, core_count, kept, gain, low, high, diff_gain, has_all)


@contextmanager
def taken(free: SimpleQueue[list[int]]) -> Iterator[list[int]]:
    """Take cores while a search runs."""
    cores = free.get()
    try:
        yield cores
    finally:
        free.put(cores)


def programs() -> list[str]:
    """Return the names of all programs that can run on this machine."""
    import torch

    names = [*LEVERS, *HEALTHY]
    return names if torch.cuda.is_available() else [name for name in names if place(name).parent.name != "gpu"]


def table(found: list[Searched]) -> str:
    of_faults = [one for one in found if one.program in LEVERS]
    mended = sum(one.verdict == "mended" for one in of_faults)
    healthy = [one for one in found if one.program not in LEVERS]
    right = sum(one.verdict == "right" for one in healthy)
    lines = [
        "# Planted faults, searched by advise",
        "",
        f"{mended} of {len(of_faults)} faults are mended, of {len(LEVERS)} that have a lever; nothing unproved "
        f"is kept for {right} of {len(healthy)} healthy programs.",
        "",
        "| program | budget | cores | kept | whole gain | interval | the diff alone | verdict |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        interval = f"{one.low:.2f} … {one.high:.2f}" if one.low and one.high else ""
        gains = (f"{value:.2f}" if value else "" for value in (one.gain, one.of_diff))
        of_all, of_diff = gains
        kept = ", ".join(one.kept) or "nothing"
        cells = (one.program, one.budget, one.cores, kept, of_all, interval, of_diff, one.verdict)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", help="names of programs; by default all that can run here")
    parser.add_argument("--budget", default="80s", help="time of each search")
    parser.add_argument("--output", type=Path, default=COMMITTED)
    parser.add_argument("--jobs", type=int, default=1, help="searches at once, each on its own cores")
    parser.add_argument("--json", type=Path, help="file for the answers, from which --show makes the table")
    parser.add_argument("--show", type=Path, nargs="+", help="search nothing; make the table of these files")
    parser.add_argument("--save", type=Path, help="folder for what each search printed")
    args = parser.parse_args()
    if args.show:
        rows = {row["program"]: row for file in args.show for row in json.loads(file.read_text())}
        names = [name for name in dict.fromkeys((*LEVERS, *HEALTHY, *sorted(rows))) if name in rows]
        args.output.write_text(table([Searched(**rows[name] | {"kept": (*rows[name]["kept"],)}) for name in names]))
        return
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // args.jobs
    if not each:
        parser.error(f"--jobs {args.jobs} is more than the {len(usable)} usable cores")
    names = args.programs or programs()
    free: SimpleQueue[list[int]] = SimpleQueue()
    for job in range(args.jobs):
        free.put(usable[each * job : each * (job + 1)] if args.jobs > 1 else [])

    def searched(program: str) -> Searched:
        with taken(free) as cores:
            return search(program, args.budget, cores, args.save)

    found: dict[str, Searched] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed(pool.submit(searched, name) for name in names):
            one = found[done.result().program] = done.result()
            print(one, one.verdict, file=sys.stderr, flush=True)
            so_far = [found[name] for name in names if name in found]
            args.output.write_text(table(so_far))
            if args.json:
                args.json.write_text(json.dumps([asdict(one) for one in so_far], indent=1) + "\n")


if __name__ == "__main__":
    main()
