"""Index of profiles/: each study and benchmark with its question, its answer in a sentence, its figure and its page.

A study's question and answer are those of its page, which the study writes from its `Study` and its records. A
benchmark's question stands in BENCHMARKS; its answer is made here, from the rows of its table or records, unless the
result is dated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "profiles"
INDEX = PROFILES / "README.md"
INTRODUCTION = """\
# Measurements

Each folder holds the records of one study or benchmark, its tables and its figure. A page gives the answer first, then
the tables that it was computed from. This index is made by `python scripts/studies/_study.py --index`.
"""


@dataclass(frozen=True)
class Entry:
    """Row of the index.

    page: file that the row links to, relative to profiles/. figure: the image's file, relative to profiles/; None if
    there is no useful image or none is committed.
    """

    question: str
    answer: str
    page: str
    figure: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """Benchmark of profiles/.

    answer: computes the answer; a text if the script that measured it was removed, so that the result is dated. page,
    figure: as in Entry, relative to the benchmark's folder.
    """

    question: str
    answer: Callable[[Path], str] | str
    page: str
    figure: str | None = None


def table(path: Path, number: int = 0) -> list[dict[str, str]]:
    """Return the rows of the numbered Markdown table of a page, each as a dict from heading to cell."""
    blocks: list[list[list[str]]] = [[]]
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            blocks[-1].append([value.strip() for value in line.strip().strip("|").split("|")])
        elif blocks[-1]:
            blocks.append([])
    headings, _, *rows = [block for block in blocks if block][number]
    return [dict(zip(headings, row, strict=True)) for row in rows]


def row_of(rows: Sequence[dict[str, str]], column: str, value: str) -> dict[str, str]:
    """Return the first row with this value. Raises StopIteration if there is none."""
    return next(row for row in rows if row[column] == value)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _analyze_speed(folder: Path) -> str:
    rows = table(folder / "cpu.md")

    def cost(row: dict[str, str]) -> str:
        return f"{row['of it on a processor s']} s of a processor and {row['peak MB']} MB"

    texts = []
    for row in (row for row in rows if row["tool"] == "analyze"):
        others = [f"{r['tool']}: {cost(r)}" for r in rows if r["recording"] == row["recording"] and r is not row]
        of = f"{row['recording'].partition(',')[0]}'s {row['kernels']} kernels"
        texts.append(f"{cost(row)} for {of}" + (f" ({', '.join(others)})" if others else ""))
    return f"On two CPU cores, every table takes {'; '.join(texts)}."


def _attention_host_cost(folder: Path) -> str:
    name = "forward + backward: host µs"
    cost = {row["attention"]: row[name] for row in table(folder / "table.md")}
    ours = ", ".join(f"{name} {cost[name]}" for name in ("flash_cuda", "flash_triton"))
    whole = f"{ours}; cuDNN {cost['sdpa_cudnn']}"
    return f"Forward and backward of a small call take, in µs of the host of one H200: {whole}."


def _first_sentence(folder: Path) -> str:
    return (folder / "table.md").read_text(encoding="utf-8").splitlines()[2].partition(". ")[0].removesuffix(".") + "."


def _model_families(folder: Path) -> str:
    rows = table(folder / "table.md")
    text = " and ".join(
        f"{min((row['in modules'] for row in rows if row['how'] == how), key=_percent)} {how}"
        for how in ("eager", "compiled")
    )
    families = len({row["family"] for row in rows})
    return f"On one NVIDIA H200, {families} families: at least {text} of the kernel time belongs to a module."


def _percent(text: str) -> float:
    return float(text.rstrip("%"))


def _foreign_memory(folder: Path) -> str:
    rows = table(folder / "held_out.md")
    families = {row["family"] for row in rows if row["kind"] == "held out"}
    held_out, mended = (
        _within_5_percent([abs(_percent(row["error"] or "inf")) for row in rows if row["kind"] == kind])
        for kind in ("held out", "mended before")
    )
    ratios = [float(row["predicted / measured"]) for row in table(folder / "table.md")]
    earlier = _within_5_percent([100 * abs(ratio - 1) for ratio in ratios])
    return (
        f"On one NVIDIA H100, of the peaks predicted before they were measured, {held_out}, in {len(families)} "
        f"held-out families, and {mended}, in families with mended rules; on one NVIDIA H200, {earlier}, "
        "in earlier families, most with mended rules."
    )


def _within_5_percent(errors: Sequence[float]) -> str:
    close = sum(error <= 5 for error in errors)
    return f"{close} of {len(errors)} are within 5%, at worst {max(errors):.1f}%"


def _public_scripts(folder: Path) -> str:
    rows = json.loads((folder / "cpu.json").read_text(encoding="utf-8"))["scripts"]
    equal = sum(not any(row["differs"].values()) for row in rows)
    phases = [
        one["within_spread"] for row in rows for one in row["phases"].values() if one["within_spread"] is not None
    ]
    return (
        f"On a CPU, {equal} of {len(rows)} scripts ran under `cs-systems run --with kineto` as they ran alone, bit for "
        f"bit; {sum(phases)} of {len(phases)} phase times are within the spread of the runs alone."
    )


PROBLEM = "batch,heads,seq,d_head"  # a heading of attention_peers.py; its other columns are backends


def _both_passes(row: dict[str, str]) -> dict[str, str]:
    return {name: times.split()[-1] for name, times in row.items() if name != PROBLEM}


def _attention_peers(folder: Path) -> str:
    rows = table(folder / "peers" / "table.md")
    row = row_of(rows, PROBLEM, "4,16,4096,128 causal")
    text = ", ".join(f"{time} ms ({name})" for name, time in _both_passes(row).items())
    return f"On one NVIDIA H100, forward and backward of 4 × 16 heads × 4,096 × 128, causal, bf16, take {text}."


def _attention_lengths(folder: Path) -> str:
    both = [_both_passes(row) for row in table(folder / "lengths" / "table.md")]
    fastest = sum(float(row["flash_cuda"]) <= min(map(float, row.values())) for row in both)
    short, long = (both[n]["flash_cuda"] for n in (-6, -1))
    return (
        "On one NVIDIA H200, forward and backward of 16,384 tokens, causal, d_head 128, bf16, take flash_cuda "
        f"{short} ms as 32 sequences of 512 and {long} ms as one; no peer takes less in {fastest} of {len(both)} rows."
    )


def _comm(folder: Path) -> str:
    lines = (folder / "table.txt").read_text(encoding="utf-8").splitlines()
    values = next(line.split() for line in lines if line.startswith("all_reduce") and " 1 GiB " in line)
    return (
        f"On two NVIDIA H200, an all-reduce of 1 GiB in fp32 takes {values[3]} µs: a bus bandwidth of "
        f"{values[5]} GB/s, {values[6]}% of the link."
    )


def _ddp_variants(folder: Path) -> str:
    rows = {str(row["variant"]): row for row in _lines(folder / "2.7B_last_bucket.jsonl")}
    own = min((r for n, r in rows.items() if n.startswith("ddp_")), key=lambda row: float(row["step_s"]))
    torchs = min((r for n, r in rows.items() if n.startswith("torch_")), key=lambda row: float(row["step_s"]))
    text = " and ".join(
        f"{1e3 * float(row['step_s']):.0f} ms with {row['variant']}, {float(row['exposed_share']):.1%} of it exposed"
        for row in (own, torchs)
    )
    alone = 1e3 * float(rows["alone"]["step_s"])
    return f"On two NVIDIA H200, a step of 2.7B takes {alone:.0f} ms without communication, {text}."


def _fsdp_launches(folder: Path) -> str:
    rows = {str(row["variant"]): row for row in _lines(folder / "h200" / "2.7B.jsonl")}
    text = ", ".join(
        f"{1e3 * float(row['step_s']):.0f} ms with a peak of {float(row['peak_bytes']) / 2**30:.1f} GiB ({name})"
        for name, row in rows.items()
    )
    host = ", ".join(f"{row['host (ms)']} ms ({row['variant']})" for row in table(folder / "h200" / "launches.md"))
    return (
        f"On two NVIDIA H200, forward and backward of 24 tiny blocks take this time of the host: {host}; a step of "
        f"2.7B takes {text}."
    )


def _memory_prediction(folder: Path) -> str:
    text = (folder / "table.md").read_text(encoding="utf-8")
    held_out = re.search(r"^- held out: (\d+ of \d+ cells within \S+),", text, re.MULTILINE)
    oom = re.search(r"^- (\d+) cells ended in an observed oom, (\d+) of them", text, re.MULTILINE)
    if not held_out or not oom:
        raise ValueError(f"{folder / 'table.md'} does not state how many predictions were right")
    return (
        f"On one NVIDIA H200, the predicted peak is right for {held_out[1]} that were held out, and "
        f"{oom[2]} of {oom[1]} cells that ran out of memory were predicted to."
    )


def _overhead(folder: Path) -> str:
    rows = table(folder / "h200.md") + table(folder / "h200.md", 1)
    text = ", ".join(f"{row['harness / bare']} ({row['size']}, {row['interval']})" for row in rows)
    return f"On one NVIDIA H200, a step under the harness takes this multiple of a bare loop's: {text}."


def _profile_page(folder: Path) -> str:
    row = max(table(folder / "speed.md"), key=lambda row: float(row["page MB"]))
    return (
        f"In headless Chromium on a CPU, the page of {row['kernels']} kernels and {row['operators drawn']} operators "
        f"has {row['page MB']} MB and takes {row['on a processor ms']} ms of a processor until it can be used, and "
        f"{row['frame ms, median']} ms for a frame, at the slowest zoom {row['frame ms, slowest zoom']} ms; "
        f"while zooming it shows {row['frames a second']} of at most 60 frames a second."
    )


def _snapshot_speed(folder: Path) -> str:
    rows = {row["what"]: row for row in table(folder / "cpu.md")}
    whole, page, opened = rows["every table"], rows["the page"], table(folder / "cpu.md", 1)[0]
    return (
        f"On two CPU cores, a snapshot of a million events takes {whole['wall s']} s and {whole['peak MB']} MB for "
        f"every table, {page['wall s']} s for the page, which can be used {opened['ready ms']} ms after it is opened."
    )


def _diagnosis_truth(folder: Path) -> str:
    first, last = (row_of(table(folder / name), "input", "all") for name in ("first.md", "table.md"))

    def score(row: dict[str, str]) -> str:
        alarms = f"and a cause is named on {row['with a cause named']} of {row['healthy']} healthy ones"
        return f"{row['top-1']} of {row['faults']} programs, one of the first three that of {row['top-3']}, {alarms}"

    return (
        f"The first sentence names the planted cause of {score(last)}; with the first rules, of {score(first)}. "
        "Rules of traces and snapshots were mended after their misses had been seen."
    )


def _verdicts(folder: Path) -> str:
    row = table(folder / "h200" / "table.md")[0]
    return (
        f"On one NVIDIA H200 with one process a side, equal runs gave no difference in "
        f"{row['A/A: no difference']} comparisons, and a 5% slowdown was found in {row['A/B: slower']}."
    )


def _zero1(folder: Path) -> str:
    rows = table(folder / "table.md")
    text = ", ".join(
        f"{row['step (ms)']} ms with a peak of {row['peak (GiB)']} GiB ({row['strategy']})" for row in rows
    )
    return f"On two NVIDIA H200, and one (single), a step of 2.7B takes {text}."


def _precision(folder: Path) -> str:
    lines = (folder / "table.txt").read_text(encoding="utf-8").splitlines()
    gains = {}
    for line in lines:
        if (values := line.split()) and values[0] in ("bf16", "fp8") and len(values) > 6:
            gains.setdefault(values[0], (values[6], values[7]))
    text = ", ".join(f"{name} {gain} as fast as fp32 (95% interval {spread})" for name, (gain, spread) in gains.items())
    training = next(number for number, line in enumerate(lines) if line.startswith("precision  steps"))
    losses = {row[0]: row[3] for line in lines[training:] if len(row := line.split()) > 3}
    ends = ", ".join(f"{losses[name]} ({name})" for name in ("fp32", *gains))
    return (
        f"On one NVIDIA H200, a training step of small at context 256 is in {text}; trained on the same data, the loss "
        f"over the last 10% of 200 steps is {ends}."
    )


def _checkpoint(folder: Path) -> str:
    lines = [line for line in (folder / "table.txt").read_text(encoding="utf-8").splitlines() if line]
    found = re.search(r"--checkpoint (\S+): (.*) by prediction, (.*)$", lines[1])
    failed = re.search(r"oom: .* Tried to allocate (.*)$", lines[2])
    if not found or not failed:
        raise ValueError(f"{folder / 'table.txt'} does not state the checkpoint and how its run ended")
    return (
        f"On one NVIDIA H200 with a budget of 40 GiB, {found[1]} is the cheapest checkpoint of xl: {found[2]} "
        f"predicted, {found[3]}, but the run was out of memory at an allocation of {failed[1]}."
    )


def _counters(folder: Path) -> str:
    rows = [row for row in table(folder / "table.md") if row["kernel"].startswith("flash_")]
    named = {row["kernel"]: f"{row['kernel']} {row['occupancy (%)']}% of {row['at most (%)']}%" for row in rows}
    text = ", ".join(named.values())
    return f"On one NVIDIA H200, the occupancy, beside the most that a kernel's resources allow, is {text}."


def _trace_corpus(folder: Path) -> str:
    rows = table(folder / "table.md")
    holding = [row for row in rows if row["kernels"]]
    equal = sum(row["equal"] == "yes" for row in holding)
    return (
        f"Of {len(rows)} public files, {len(holding)} hold kernels; {equal} of these are read with the number and the "
        "time of kernels that an independent reader counts."
    )


def _expected_times(folder: Path) -> str:
    text = next(line for line in (folder / "table.md").read_text().splitlines() if "with an expected time" in line)
    return f"On NVIDIA H200, {text.rstrip('.')}."


def _advise(folder: Path) -> str:
    text = next(line for line in (folder / "table.md").read_text().splitlines() if line.startswith("One "))
    return f"On one NVIDIA H200, in five minutes: {text.partition('`. ')[2]}"


def _advised_scripts(folder: Path) -> str:
    rows = table(folder / "table.md")
    texts = [
        f"{row['script']} {row['gain']} times as fast ({row['interval']}{', no sure gain' if _holds_1(row) else ''})"
        for row in rows
        if row["gain"]
    ]
    without = [row["script"] for row in rows if not row["gain"]]
    nothing = f"; nothing was kept in {', '.join(without)}" if without else ""
    least, most = (end(float(row["time (s)"]) for row in rows) / 60 for end in (min, max))
    return f"On NVIDIA H200, in {least:.0f} to {most:.0f} minutes each: {', '.join(texts)}{nothing}."


def _holds_1(row: dict[str, str]) -> bool:
    return float(row["interval"].partition(" ")[0] or 0.0) <= 1


def _energy_peer(folder: Path) -> str:
    lines = (folder / "table.md").read_text().splitlines()
    text = next(line for line in lines if line.startswith("The package's meter"))
    return f"On one NVIDIA H200, t{text.partition('. ')[0][1:]}."


def _ab_rates(folder: Path) -> str:
    same, slower, live, live_slower = table(folder / "h200/table.md")
    (_, earlier), (on_cpu, slower_on_cpu) = (table(folder / f"{name}/table.md") for name in ("h200_26_pairs", "cpu"))
    host, slower_on_host = table(folder / "h200_host/table.md")
    found = [f"{_wrong(row)} of {row['number']}" for row in (live, live_slower, host, slower_on_host)]
    return (
        f"On one NVIDIA H200, replayed from 99 recorded pairs: {same['error']} (95% limit {same['upper limit']}); of "
        f"steps with 3% more products, in truth 3.1% slower, {slower['error']} ({slower['upper limit']}); from 26 "
        f"pairs on another H200, in truth 2.9% slower, {earlier['error']}. Live there: false alarms {found[0]}, not "
        f"found {found[1]}. On two shared cores, from 100 pairs: {on_cpu['error']} ({on_cpu['upper limit']}); of steps "
        f"with 10% more products, {slower_on_cpu['error']}. Live, on two cores of the H200's host beside other "
        f"programs: false alarms {found[2]}, not found {found[3]} (undecided after 100 pairs)."
    )


def _wrong(row: dict[str, str]) -> int:
    share = float(row["error"].rpartition(" ")[2].rstrip("%")) / 100
    return round(share * int(row["number"]))


def _course(folder: Path) -> str:
    rows = [line.split(" | ") for line in (folder / "table.md").read_text().splitlines() if line.count(" | ") > 4]
    done = [row for row in rows if "GPU" in row[2]]
    return f"{len(done)} tasks ran at the handout's sizes on NVIDIA H200; README.md of the folder says what did not."


def _trace_truth(folder: Path) -> str:
    counts = {row["first sentences"]: row for row in table(folder / "table.md")}
    held_out = counts["of the fifth held-out files with kernels, before any mend was made from them"]
    sets = ("first", *(f"{each} held-out" for each in ("second", "third", "fourth", "fifth", "sixth")))
    since = [counts[f"of the {files} files with kernels"] for files in sets]
    since.append(counts["of the first held-out files"])
    true, files = (sum(int(row[column]) for row in since) for column in ("true", "files"))
    return (
        f"The first sentence of the analysis was true of {held_out['true']} of {held_out['files']} public files with "
        f"kernels that no mend had been made from, half true of {held_out['half']} and false of {held_out['false']}; "
        f"since mends were made from all files, it is true of {true} of {files} with kernels."
    )


# Folder of profiles/ → its benchmark.
BENCHMARKS = {
    "analyze_speed": Benchmark(
        "How long does `cs-systems analyze` take for a large trace, and how much memory?", _analyze_speed, "cpu.md"
    ),
    "annotation_cost": Benchmark(
        "What do annotations cost, off and on?",
        "On one NVIDIA H200, a range costs 0.331 µs while nothing records it and 0.953 µs with NVTX; hooks "
        "take a step of small from 51.715 ms to 53.716 ms.",
        "h200.md",
    ),
    "attention_h100": Benchmark(
        "How fast is the toolkit's attention beside its peers, call for call?", _attention_peers, "peers/table.md"
    ),
    "attention_h200": Benchmark(
        "How does attention beside its peers depend on the length, at the same number of tokens?",
        _attention_lengths,
        "lengths/table.md",
        "lengths/d128_causal.svg",
    ),
    "busbw": Benchmark(
        "Is the bus bandwidth of `cs-systems comm` that of nccl-tests' method?",
        "On two NVIDIA H200, at 1,024 MiB the bus bandwidth is 0.9976 times that of nccl-tests' method "
        "(interval 0.9937 … 1.0019).",
        "busbw.jsonl",
    ),
    "comm": Benchmark("What do the collectives of two GPUs take, by size and dtype?", _comm, "table.txt", "figure.svg"),
    "counters_flash_triton": Benchmark(
        "How well do the FlashAttention kernels in Triton fill the multiprocessors, by counters of Nsight Compute?",
        _counters,
        "table.md",
    ),
    "ddp_variants": Benchmark(
        "Which options make a data-parallel step of one model fast, each measured in turn in one group of processes?",
        _ddp_variants,
        "2.7B_last_bucket.md",
    ),
    "flash_triton_tune": Benchmark(
        "Which tiles make the FlashAttention-2 Triton kernels fastest on this GPU?",
        "On one NVIDIA H200, the fastest causal forward at length 4,096 and head size 128 takes 0.612 ms with "
        "tiles of 64 × 64, 4 warps and 3 stages.",
        "h200.jsonl",
    ),
    "foreign_memory": Benchmark(
        "How far is the predicted peak memory of other people's models from the one that a GPU measures?",
        _foreign_memory,
        "held_out.md",
    ),
    "fsdp_launches": Benchmark(
        "What do strategies cost the host, and what does sharding cost, against the model alone in one group of ranks?",
        _fsdp_launches,
        "h200/2.7B.md",
    ),
    "memory_best_checkpoint": Benchmark(
        "Which is the cheapest checkpoint of xl at context 2048 under a memory budget, and does it fit?",
        _checkpoint,
        "table.txt",
    ),
    "memory_prediction": Benchmark(
        "How far is the predicted peak memory from the one that a GPU measures, and is it known what does not fit?",
        _memory_prediction,
        "table.md",
    ),
    "diagnosis_truth": Benchmark(
        "Do our conclusions name the true cause of a planted fault, and none on a healthy program?",
        _diagnosis_truth,
        "table.md",
    ),
    "model_families": Benchmark(
        "Of how much kernel time does a profile name the module, in models of many families?",
        _model_families,
        "table.md",
    ),
    "overhead": Benchmark("How much does the harness add to a step?", _overhead, "h200.md"),
    "precision": Benchmark(
        "What does each precision gain on small, and does it train as well?", _precision, "table.txt", "training.svg"
    ),
    "training_step": Benchmark(
        "How far is each recipe of the training step from a compiled Llama, and what does each part gain?",
        _first_sentence,
        "table.md",
        "figure.svg",
    ),
    "long_context": Benchmark(
        "How long does a step of 8B at 32,768 tokens take on two GPUs, and what does the plan predict?",
        _first_sentence,
        "table.md",
    ),
    "part_kernels": Benchmark(
        "How fast are the fused kernels of the training step alone, beside the compiled modules?",
        "On one NVIDIA H200, 2.7B at context 2048, as fast as the compiled module: swiglu 1.00×, swiglu, joined "
        "1.40×, norm 1.85×, addition and norm 1.37×, rotation 1.53×, linear in fp8 1.42×, embedding 1.68×, "
        "feed-forward 1.02×.",
        "table.md",
    ),
    "attention_host_cost": Benchmark(
        "What does a small attention call cost the host, for each backend?", _attention_host_cost, "table.md"
    ),
    "profile_coverage": Benchmark(
        "What share of kernel time is given to a phase and to a layer, and do both profilers agree?",
        "On one NVIDIA H200, at least 100.00% of the kernel time of small has a phase and 99.99% a layer, in 8 "
        "profiles by nsys and torch.profiler; both count the same kernels in 4 of 4 cells.",
        "small.md",
    ),
    "profile_page": Benchmark(
        "How large is the page of 100,000 kernels, how long until one can use it, and how long does a frame take?",
        _profile_page,
        "speed.md",
        "page.png",
    ),
    "public_scripts": Benchmark(
        "Do public training scripts run under `cs-systems run` as they run alone, and are their phase times right?",
        _public_scripts,
        "cpu.md",
    ),
    "snapshot_speed": Benchmark(
        "How much time and memory does `cs-systems snapshot` take for a large file, and how soon can its page be used?",
        _snapshot_speed,
        "cpu.md",
    ),
    "trace_corpus": Benchmark(
        "Which public traces does `cs-systems analyze` read, how, and what stays unknown?", _trace_corpus, "table.md"
    ),
    "expected_times": Benchmark(
        "Is a step after a remedy as long as was expected before it was tried?", _expected_times, "table.md"
    ),
    "advise": Benchmark(
        "Does advise make a plain step 10 times as fast by itself, and do its expectations hold?", _advise, "table.md"
    ),
    "advised_scripts": Benchmark(
        "How much faster do public training scripts get by advise, unedited?", _advised_scripts, "table.md"
    ),
    "energy_peer": Benchmark("Do the joules of a step agree with Zeus?", _energy_peer, "table.md"),
    "ab_rates": Benchmark(
        "How often does `ab` call equal programs different, or miss a planted slowdown?", _ab_rates, "h200/table.md"
    ),
    "course": Benchmark(
        "Does every task of a systems course give its table at the handout's size?", _course, "table.md"
    ),
    "trace_truth": Benchmark(
        "What is the main cause of lost time in public traces, judged by hand?", _trace_truth, "table.md"
    ),
    "verdicts": Benchmark(
        "Can the verdicts of `compare` be trusted, on runs of equal steps and on runs with a planted 5% slowdown?",
        _verdicts,
        "h200/table.md",
    ),
    "zero1_against_torch": Benchmark(
        "How does this package's ZeRO stage 1 compare with PyTorch's on two GPUs?", _zero1, "table.md"
    ),
}


def of_study(name: str, page: str, figure: str) -> Entry:
    """Return the row of a study, from its committed page. Raises ValueError if the page gives no answer."""
    title, _, answer, *_ = (PROFILES / name / page).read_text(encoding="utf-8").splitlines()
    if not title.startswith("# ") or answer.startswith(("|", "*", "!")):
        raise ValueError(f"profiles/{name}/{page} does not begin with a question and an answer; make it again")
    drawn = f"{name}/{figure}" if (PROFILES / name / figure).is_file() else None
    return Entry(title.removeprefix("# "), first_sentence(answer), f"{name}/{page}", drawn)


def of_benchmark(name: str, benchmark: Benchmark) -> Entry:
    """Return the row of a benchmark, with its answer computed from what its folder holds."""
    figure = f"{name}/{benchmark.figure}" if benchmark.figure else None
    answer = benchmark.answer if isinstance(benchmark.answer, str) else benchmark.answer(PROFILES / name)
    return Entry(benchmark.question, answer, f"{name}/{benchmark.page}", figure)


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop before a capital letter."""
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def index_page(studies: Sequence[str], page: str, figure: str) -> str:
    """Return profiles/README.md. `studies`: their names, in the order of the table."""
    of_studies = [of_study(name, page, figure) for name in studies]
    of_benchmarks = [of_benchmark(name, benchmark) for name, benchmark in BENCHMARKS.items()]
    sections = [INTRODUCTION, "## Studies\n", _rows(of_studies), "## Benchmarks\n", _rows(of_benchmarks)]
    return "\n".join(sections)


def _rows(entries: Sequence[Entry]) -> str:
    lines = ["| question | answer | figure |", "| --- | --- | --- |"]
    for entry in entries:
        figure = f"[figure]({entry.figure})" if entry.figure else ""
        question, answer = (text.replace("|", "\\|") for text in (entry.question, entry.answer))
        lines.append(f"| [{question}]({entry.page}) | {answer} | {figure} |")
    return "\n".join(lines) + "\n"
