"""List of figures in README and docs that were measured with code that has changed since.

Method: SOURCES maps each quoted file under profiles/ to the code on which its numbers depend. A figure counts as
measured in the last commit that touched its data: the records next to it, else the file itself. Every later commit
that touched a source counts, on merged branches too; what is not committed does not.
Output: a line for each figure: when it was measured, and which sources have changed since, in how many commits; of many
sources, those with most commits. A changed source does not prove the number wrong: it says what to measure again before
quoting it.

    python scripts/benchmarks/stale_figures.py            # or: make stale
    python scripts/benchmarks/stale_figures.py --check    # exit status 1 if any figure is stale
"""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_ANSWER = 2  # exit status if git or its history is missing
MOST_NAMED = 3  # sources of a figure, those with most commits
IGNORED = ".git-blame-ignore-revs"  # commits that change no behaviour, in the format of `git blame --ignore-revs-file`
# Name of a page → names of its data next to it. Predictions count from their freezing, not their measurement.
RECORDS = {"table": ("records.jsonl", "processes.jsonl", "h200.json"), "held_out": ("frozen.json",)}

CLOCK = ("cs_systems/measure/runtime/timing.py", "cs_systems/core/statistics.py")
MODEL = (
    "cs_systems/model/transformer.py",
    *(f"cs_systems/model/training/{name}.py" for name in ("losses", "optimizers", "adamw")),
)
STEP = (*CLOCK, *MODEL, "cs_systems/measure/workloads/train_step.py", "cs_systems/measure/workloads/_training.py")
CALL = (*CLOCK, "cs_systems/measure/workloads/attention.py", "cs_systems/measure/workloads/_calls.py")
GPU_KERNELS = (
    *("cs_systems/model/attention/flash_cuda.py",),
    *(
        "cs_systems/model/attention/flash_attn.py",
        "cs_systems/model/attention/_sdpa.py",
        "cs_systems/model/kernels/cuda/driver.py",
    ),
    "cs_systems/model/kernels/cuda/*",
    "cs_systems/model/kernels/layout.py",
    *("cs_systems/model/kernels/driver.py", "cs_systems/model/kernels/prepared.py"),
)
DATA_PARALLEL = (
    *(
        "cs_systems/model/parallel/ddp_*.py",
        "cs_systems/model/parallel/torch_ddp.py",
        "cs_systems/model/parallel/_data_parallel.py",
    ),
    *("cs_systems/model/parallel/_collectives.py", "cs_systems/model/parallel/_sender.py"),
)
SHARDED = (
    *("cs_systems/model/parallel/fsdp/*", "cs_systems/model/parallel/torch_fsdp2.py"),
    "cs_systems/model/parallel/_collectives.py",
)
FORECAST = (
    *(
        "cs_systems/measure/runtime/forecast.py",
        "cs_systems/instrument/like_cuda.py",
        "cs_systems/instrument/storages.py",
    ),
    *("cs_systems/instrument/convolutions.py", "cs_systems/instrument/recurrent.py"),
    *("cs_systems/instrument/known_values.py", "cs_systems/formulas/sdpa.py"),
    *("cs_systems/formulas/memory/allocator.py", "scripts/benchmarks/foreign_memory.py"),
)
PROFILE = ("cs_systems/readers/*", "cs_systems/analysis/attribution/*")
PUBLIC_SCRIPTS = (
    *("cs_systems/cli/_script.py", "cs_systems/measure/recorder/*"),
    *("scripts/benchmarks/public_scripts.py", "scripts/benchmarks/_script_observer.py"),
)
SNAPSHOT = ("cs_systems/readers/*snapshot*", "cs_systems/readers/_unpickle.py", "cs_systems/analysis/memory/*")
CHARTS = (
    "chart*",
    "columns.js",
    "details.js",
    "format.js",
    "keys.js",
    "palette.js",
    "tip.js",
    "page.css",
    "page.js",
    "_packing.py",
)
PAGES = tuple(f"cs_systems/report/pages/{name}" for name in CHARTS)
VERDICTS = (
    *CLOCK,
    "cs_systems/analysis/comparison/runs.py",
    "cs_systems/measure/runtime/execute.py",
    "scripts/benchmarks/verdicts.py",
)

# Study with a page that the course's guide quotes → its sources in addition to its own file.
STUDIES: dict[str, tuple[str, ...]] = {
    "activation_checkpointing": (*STEP, "cs_systems/core/checkpoint_plan.py"),
    "all_reduce": (*CLOCK, "cs_systems/measure/workloads/collective.py"),
    **dict.fromkeys(
        (
            *("attention_causal_mask", "attention_embedding", "attention_heads", "attention_out_of_memory"),
            *("attention_sequence_length", "flash_attention_advantage"),
        ),
        (*CALL, "cs_systems/model/attention/flash_triton.py", "cs_systems/model/attention/_sdpa.py"),
    ),
    "attention_memory": (*CALL, "cs_systems/formulas/memory/attention.py"),
    "autocast_dtypes": ("cs_systems/instrument/dtype_readings.py", "cs_systems/instrument/cuda_autocast.py"),
    "cuda_kernel_ablation": (*CALL, "scripts/_cuda_steps.py", "scripts/cuda_steps/*"),
    "data_parallel_variants": (*STEP, *DATA_PARALLEL),
    "flash_attention_lengths": (*CALL, "cs_systems/model/attention/flash_triton.py"),
    "forward_backward_ratio": (*STEP, *PROFILE),
    "fully_sharded": (*STEP, *DATA_PARALLEL, *SHARDED),
    "low_precision_sums": (
        *("cs_systems/measure/workloads/accumulation.py", "cs_systems/measure/workloads/_sums.py"),
        "cs_systems/analysis/comparison/numerics.py",
    ),
    "memory_peaks": (*MODEL, "cs_systems/instrument/memory_readings.py"),
    "nsys_and_clock": (*STEP, *PROFILE),
    "nvidia_smi_memory": STEP,
    "precision_speed": STEP,
    "saved_for_backward": MODEL,
    "scaling_limits": (
        *("cs_systems/formulas/scaling.py", "scripts/studies/_simulated_step.py"),
        "cs_systems/formulas/peaks.py",
    ),
    "sharded_optimizer": (*STEP, *DATA_PARALLEL, "cs_systems/model/parallel/zero1*.py"),
    "softmax_and_matmul": (*STEP, *PROFILE),
    "top_kernels": (*STEP, *PROFILE),
    "torch_compile": (*STEP, *CALL),
    "triton_tile_sizes": (*CALL, "cs_systems/model/kernels/triton/*"),
    "warmup_steps": STEP,
    "zero_stage_1": (*STEP, *DATA_PARALLEL, "cs_systems/model/parallel/zero1*.py"),
}

# quoted file → its sources, as paths of git (`*` fits any name). () marks a diary: dated notes, which never expire.
SOURCES: dict[str, tuple[str, ...]] = {
    "profiles/advise/figure.svg": ("cs_systems/report/figures/waterfall.py",),
    "profiles/advised_scripts/forked_trials.md": (
        "cs_systems/measure/runtime/script_forks.py",
        "cs_systems/cli/_script_forks.py",
        "scripts/benchmarks/forked_trials.py",
    ),
    "profiles/advised_scripts/simulated.md": (
        "cs_systems/advise/search.py",
        "cs_systems/advise/judge.py",
        "cs_systems/advise/budget.py",
        "scripts/benchmarks/simulated_searches.py",
    ),
    "profiles/advised_scripts/table.md": ("cs_systems/advise/*.py", "cs_systems/advise/levers/*.py"),
    "profiles/advise/table.md": ("cs_systems/advise/*.py", "cs_systems/advise/levers/*.py"),
    "profiles/training_step/figure.svg": ("scripts/benchmarks/training_step_page.py",),
    "profiles/training_step/gains.svg": ("scripts/benchmarks/_training_step_ablation.py",),
    "profiles/training_step/table.md": (
        *STEP,
        "cs_systems/model/training/parts/*",
        "cs_systems/model/training/master_adamw.py",
        *(
            f"cs_systems/model/kernels/triton/{name}.py"
            for name in (*("adamw", "cross_entropy", "embedding", "quantize", "rms_norm", "rotary", "rows", "swiglu"),)
        ),
        *(
            f"cs_systems/model/kernels/cuda/{name}"
            for name in ("product.cuh", "weight_update.cu", "gated_*.cu", "launch_product.py", "launch_update.py")
        ),
        "cs_systems/model/kernels/cuda/launch_gated.py",
        "cs_systems/model/training/fp8.py",
        "cs_systems/model/training/hopper_operators.py",
        "cs_systems/model/training/triton_operators.py",
        "cs_systems/measure/workloads/_graph.py",
        "scripts/benchmarks/training_step.py",
    ),
    "profiles/long_context/table.md": (
        *(
            *STEP,
            *SHARDED,
            "cs_systems/model/training/parts/fused_cross_entropy.py",
            "scripts/benchmarks/long_context_step.py",
        ),
    ),
    "profiles/step_time/table.md": (*STEP, "cs_systems/model/attention/naive.py", "scripts/studies/step_time.py"),
    "profiles/attention_h200/table.md": (
        *CALL,
        *(
            "cs_systems/model/attention/flash_triton.py",
            "cs_systems/model/attention/_sdpa.py",
            "cs_systems/model/kernels/triton/*",
        ),
    ),
    "profiles/attention_h100/peers/table.md": (*CALL, *GPU_KERNELS, "scripts/benchmarks/attention_peers.py"),
    "profiles/attention_h200/log.md": (),
    "profiles/attention_h200/gluon.md": (),
    "profiles/ddp_variants/2.7B.md": (*STEP, *DATA_PARALLEL, "scripts/benchmarks/ddp_variants.py"),
    "profiles/ddp_variants/2.7B_why.md": (
        *(*STEP, *DATA_PARALLEL, "cs_systems/analysis/attribution/overlap.py", "scripts/benchmarks/ddp_variants.py"),
    ),
    "profiles/ddp_variants/2.7B_last_bucket.md": (*STEP, *DATA_PARALLEL, "scripts/benchmarks/ddp_variants.py"),
    "profiles/fsdp_launches/h200/2.7B.md": (*STEP, *SHARDED, "scripts/benchmarks/fsdp_launches.py"),
    "profiles/fsdp_launches/h200/host_per_parameter.md": (
        *(*STEP, *DATA_PARALLEL, *SHARDED, "scripts/benchmarks/fsdp_launches.py"),
    ),
    "profiles/profile_page/page.png": (
        *PAGES,
        "cs_systems/report/pages/profile*",
        "cs_systems/analysis/attribution/timeline.py",
    ),
    "profiles/profile_page/speed.md": (
        *(
            *PAGES,
            "cs_systems/report/pages/profile*",
            "cs_systems/analysis/attribution/timeline.py",
            "scripts/benchmarks/profile_page.py",
        ),
    ),
    "profiles/overhead/h200.md": (*STEP, "scripts/benchmarks/harness_overhead.py"),
    "profiles/overhead/cpu.md": (*STEP, "scripts/benchmarks/harness_overhead.py"),
    "profiles/overhead/recorder.md": ("cs_systems/measure/recorder/*", "scripts/benchmarks/recorder_overhead.py"),
    "profiles/overhead/startup.md": (
        *("cs_systems/__init__.py", "cs_systems/__main__.py", "cs_systems/cli/*", "cs_systems/config.py"),
        "cs_systems/measure/runtime/*",
        "scripts/benchmarks/startup.py",
    ),
    "profiles/analyze_speed/cpu.md": (*PROFILE, "cs_systems/cli/analyze.py", "scripts/benchmarks/analyze_speed.py"),
    "profiles/trace_corpus/table.md": (*PROFILE, "scripts/benchmarks/trace_corpus.py"),
    "profiles/model_families/table.md": (
        *(*PROFILE, "cs_systems/instrument/*"),
        *("scripts/benchmarks/model_families.py", "tests/families/models.py"),
    ),
    "profiles/public_scripts/cpu.md": PUBLIC_SCRIPTS,
    "profiles/public_scripts/h100.md": PUBLIC_SCRIPTS,
    "profiles/expected_times/table.md": ("cs_systems/analysis/replay/*.py", "scripts/benchmarks/expected_times.py"),
    "profiles/foreign_memory/held_out.md": (*FORECAST, "scripts/benchmarks/_held_out_families.py"),
    "profiles/foreign_memory/table.md": FORECAST,
    "profiles/memory_prediction/speed.md": (
        *("cs_systems/formulas/memory/*", "cs_systems/core/checkpoint_plan.py"),
        "scripts/benchmarks/prediction_speed.py",
    ),
    "profiles/snapshot_speed/cpu.md": (
        *(*SNAPSHOT, *PAGES, "cs_systems/report/pages/snapshot*", "cs_systems/cli/snapshot.py"),
        "scripts/benchmarks/snapshot_speed.py",
    ),
    "profiles/verdicts/h200/table.md": VERDICTS,
    "profiles/verdicts/h200_short_steps/table.md": VERDICTS,
    "profiles/verdicts/h200_disturbed/table.md": VERDICTS,
    "profiles/verdicts/shared_cpu/table.md": VERDICTS,
    **{f"profiles/{name}/table.md": (*sources, f"scripts/studies/{name}.py") for name, sources in STUDIES.items()},
}


class NoHistory(Exception):
    """Error for a Git history that does not show when a figure was measured."""


@dataclass(frozen=True)
class Figure:
    """Quoted file, the commit that measured it (None: never committed), and the later commits of its sources."""

    path: str
    commit: str | None
    date: str | None
    changed: dict[str, int]


def quoted(root: Path) -> list[str]:
    """Return the files under profiles/ that README and docs link to, in their order."""
    pages = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    links = [link for page in pages for link in re.findall(r"\]\((?:\.\./)*(profiles/[^)#\s]+)", page.read_text())]
    return list(dict.fromkeys(links))


def measured_file(root: Path, figure: str) -> str:
    """Return the file that a new measurement changes: the figure's records if it has some, else the file itself."""
    path = Path(figure)
    beside = [path.with_name(name) for name in RECORDS.get(path.stem, ())]
    return next((str(p) for p in (path.with_suffix(".jsonl"), *beside) if (root / p).is_file()), figure)


def figures(root: Path, sources: dict[str, tuple[str, ...]]) -> list[Figure]:
    """Return a Figure for each of the sources' keys. Raises NoHistory."""
    check_history(root)
    return [_figure(root, path, specs) for path, specs in sources.items()]


def check_history(root: Path) -> None:
    """Raise NoHistory unless git has every commit of the folder."""
    try:
        shallow = git(root, "rev-parse", "--is-shallow-repository").strip()
    except FileNotFoundError:
        raise NoHistory("git is not installed, and the history says when figures were measured; install git") from None
    except subprocess.CalledProcessError as error:
        message = (error.stderr or "").strip().partition("\n")[0]
        raise NoHistory(f"{root} has no git history ({message}); run this in a clone") from None
    if shallow == "true":
        raise NoHistory("this clone is shallow: it lacks the commits that measured; run git fetch --unshallow")


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return done.stdout


def _figure(root: Path, path: str, specs: tuple[str, ...]) -> Figure:
    ignored, former = _set_aside(root)
    # A move of a file is not a new measurement.
    history = git(root, "log", "--follow", "--diff-filter=AM", "--format=%H %h %cs", "--", measured_file(root, path))
    last = next((line.split() for line in history.splitlines() if line.split()[0] not in ignored), None)
    if last is None:
        return Figure(path, None, None, {})
    _, commit, date = last
    changed: Counter[str] = Counter()
    if specs:
        for text in git(root, "log", "--format=%x00%H", "--name-only", f"{commit}..HEAD").split("\0")[1:]:
            number, *files = text.split()
            if number not in ignored:
                now = {former.get(file, file) for file in files}
                changed.update(file for file in now if any(fnmatch(file, spec) for spec in specs))
    return Figure(path, commit, date, dict(changed.most_common()))


@functools.cache
def _set_aside(root: Path) -> tuple[frozenset[str], dict[str, str]]:
    """Return the commits that only move or rewrite files, listed in IGNORED, and former paths with the present ones."""
    listed = root / IGNORED
    lines = listed.read_text().splitlines() if listed.is_file() else []
    commits = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    former: dict[str, str] = {}
    for commit in commits:  # the earliest first
        names = git(root, "show", "--format=", "--name-status", "--find-renames=40%", "-l0", "--diff-filter=R", commit)
        moved = dict(line.split("\t")[1:] for line in names.splitlines())
        former = {old: moved.get(new, new) for old, new in former.items()} | moved
    return frozenset(commits), former


def table(found: list[Figure]) -> str:
    """Return the figures as Markdown, stale ones first."""
    lines = ["| figure | measured | sources changed since (commits) |", "| --- | --- | --- |"]
    for figure in sorted(found, key=lambda figure: not figure.changed):
        measured = f"{figure.commit}, {figure.date}" if figure.commit else "not committed"
        most = sorted(figure.changed.items(), key=lambda each: -each[1])[:MOST_NAMED]
        others = len(figure.changed) - len(most)
        named = [f"{path} ({count})" for path, count in most] + [f"and {others} more"] * bool(others)
        since = ", ".join(named) or "none"
        lines.append(f"| {figure.path} | {measured} | {since} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, root: Path = ROOT, sources: dict[str, tuple[str, ...]] = SOURCES) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 if any figure is stale")
    args = parser.parse_args(arguments)
    try:
        found = figures(root, sources)
    except NoHistory as error:
        print(error, file=sys.stderr)
        return NO_ANSWER
    stale = sum(bool(figure.changed) for figure in found)
    print(f"{table(found)}\n\n{stale} of {len(found)} figures were measured with code that has changed since.")
    return int(args.check and stale > 0)


if __name__ == "__main__":
    raise SystemExit(main())
