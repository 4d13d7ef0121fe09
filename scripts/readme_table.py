"""Update the tables in README.md and docs/results.md from committed records.

Question: how far is the fast recipe on one H200 from a compiled Llama, and from the chip? What does a training step of
    each model size take with naive attention? How fast is our attention next to its peers, and a step on two GPUs?
Method: the rows of scripts/benchmarks/training_step.py, both sides in one run; of the records of
    scripts/studies/step_time.py, the presets' training steps at one context; those of
    scripts/benchmarks/attention_peers.py, medians of forward and backward together; what
    scripts/benchmarks/ddp_variants.py and fsdp_launches.py left of a model on two GPUs, each with its own `alone`.
Output: the part of README.md between the `headline` marks, and those of docs/results.md between the `headline`,
    `presets`, `attention` and `parallel` marks.

    python scripts/readme_table.py            # or: make readme
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs_systems.config import PRESETS, AttentionShape, Mode
from cs_systems.record import RunRecord, read_records
from cs_systems.report.tables.records import render
from cs_systems.report.tables.rows import render_rows

ROOT = Path(__file__).resolve().parent.parent
STUDY = "step_time"
PEERS = "attention_h100/peers"
COLUMNS = (
    *("size", "precision", "forward.median_ms", "backward.median_ms", "optimizer.median_ms", "median_ms"),
    *("tokens_per_s", "mfu", "peak_allocated_gib", "note"),
)
CONTEXT = 512
REPLICATED, SHARDED = "ddp_variants/2.7B", "fsdp_launches/h200/2.7B"
ON_TWO = (  # the rows left out are variants of rows in the first table
    *("alone", "torch_ddp", "torch_ddp 100 MB, view", "torch_ddp 1000 MB, view", "ddp_flat", "ddp_overlap"),
    *("ddp_bucketed 100 MB", "ddp_bucketed 1000 MB"),
)
BENCHMARK = "scripts/benchmarks/attention_peers.py"
TRAINING_STEP, AGAIN = "training_step/h200.json", "training_step/h100.json"
LLAMA = ("llama compiled", "llama cudagraphs")
FAST, LOW = "fast", "fast in fp8"
HOST_BOUND = 0.9  # from this share of a step on, launches keep the GPU waiting
DATE, AGAIN_DATE = "24 November 2026", "26 November 2026"  # of these records, which hold no date themselves
INTRODUCTION = f"""\
A bf16 training step on one H200 ({DATE}) at batch 4, medians in ms, both sides in one run. Llama: Hugging Face's of
equal shape, compiled, with CUDA graphs where they help. fp8: `--parts fp8_linear` in place of the fused products; it
changes the result. Floor: the arithmetic at the measured rate of a large bf16 product, plus the optimizer's bytes; fp8
can pass it. MFU: of fast. A Llama that waits for its host depends on the processor: `large` at 512 took 50 to 92 ms in
eight runs. Each part alone, and what did not help: [profiles/training_step](profiles/training_step/table.md).
"""
PRESETS_INTRODUCTION = f"""\
A training step of each preset on one H200, at batch 4 and context {CONTEXT}, with naive attention, in medians; the
other contexts, all samples and the conclusions are in [profiles/{STUDY}](profiles/{STUDY}/table.md).
"""
ATTENTION = f"""\
Forward and backward of one attention call on one H100, bf16, in ms: medians, all backends in one run, with the L2 cache
cleared and launches hidden; each pass is in [profiles/{PEERS}](profiles/{PEERS}/table.md).
"""
PARALLEL = f"""\
A step of 2.7B on two H200s, bf16, sdpa_flash, batch 4 a rank and context {CONTEXT}, in medians, visited in turn:
replicated and sharded in a run each, with the same step without communication (`alone`) in both. All variants are in
[profiles/ddp_variants](profiles/{REPLICATED}.md) (a second run, [with why](profiles/{REPLICATED}_why.md))
and [profiles/fsdp_launches](profiles/{SHARDED}.md).
"""


def headline(folder: Path) -> str:
    """Return the table of the fastest step and the fastest Llama.

    Raises ValueError with the remedy if there are no rows.
    """
    rows = _steps(folder / TRAINING_STEP)
    again = [row["times as fast"] for row in _steps(folder / AGAIN) if not row["note"]]
    range_ = f"{min(again):.2f} to {max(again):.2f}"
    later = (
        f"With later code, on one H100 ({AGAIN_DATE}), fast is {range_} times as fast as a Llama that does not wait."
    )
    return f"{INTRODUCTION}{later}\n\n{render_rows(rows, 'markdown', 'recipe fast beside a compiled Llama')}"


def _steps(file: Path) -> list[dict[str, Any]]:
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rows = []
    for size, context in dict.fromkeys((row["size"], row["context"]) for row in found):
        here = {row["variant"]: row for row in found if (row["size"], row["context"]) == (size, context)}
        llama = min((here[name] for name in LLAMA if name in here), key=lambda row: row["wall_s"], default=None)
        fast = here.get(FAST)
        if llama is None or fast is None:  # an incomplete run
            continue
        llama_s = llama["wall_s"]
        rows.append({
            "size": size, "context": context, "Llama, compiled": 1e3 * llama_s, "fast": 1e3 * fast["wall_s"],
            "times as fast": llama_s / fast["wall_s"], "fp8": 1e3 * here[LOW]["wall_s"] if LOW in here else None,
            "bf16 floor": 1e3 * fast["floor_s"], "MFU (%)": 100 * fast["mfu"],
            "note": "Llama waits for its host" if llama["submit_s"] > HOST_BOUND * llama_s else "",
        })  # fmt: skip
    if not rows:
        raise ValueError(
            f"{file} has no size with rows of both a compiled Llama and {FAST}; run python "
            f"scripts/benchmarks/training_step.py --json {file} on a GPU, or restore it with git checkout {file}"
        )
    return sorted(rows, key=lambda row: (list(PRESETS).index(row["size"]), row["context"]))


def presets(folder: Path) -> str:
    """Return introduction and table. Raises ValueError, with the remedy, if the folder has no such records."""
    records = read_records(folder)[0] if folder.exists() else []
    if not (chosen := [record for record in records if _belongs(record)]):
        raise ValueError(
            f"no records for the table of presets in {folder}; run python scripts/studies/{STUDY}.py --scale full on a "
            f"GPU, or restore the committed records with git checkout profiles/{STUDY}"
        )
    return f"{PRESETS_INTRODUCTION}\n{render(chosen, 'markdown', COLUMNS)}"


def _belongs(record: RunRecord) -> bool:
    config = record.run_config
    return (
        config.model.context_length == CONTEXT
        and config.model.label in PRESETS  # the unmodified preset
        and config.attention == "naive"
        and config.mode == Mode.TRAIN_STEP
        and config.profiler == "none"
        and record.repeat == 0
    )


def attention(folder: Path) -> str:
    """Return the table of both passes' milliseconds by problem and backend, in the order of the runs."""
    records = read_records(folder)[0] if folder.exists() else []
    rows: dict[AttentionShape, dict[str, object]] = {}
    for record in records:
        shape = record.run_config.shape
        if shape and record.measurement and (step_s := record.measurement.median_s()):
            sizes = f"{shape.batch} × {shape.heads} × {shape.seq:,} × {shape.d_head}"
            row = rows.setdefault(shape, {"problem": sizes, "causal": "yes" if shape.causal else "no"})
            row[record.run_config.attention] = 1e3 * step_s
    if not rows:
        raise ValueError(
            f"no records for the table of attention in {folder}; run python {BENCHMARK} --out {folder} on a GPU, or "
            f"restore it with git checkout {folder}"
        )
    names = dict.fromkeys(name for row in rows.values() for name in row)
    titles = {name: name for name in names} | {"problem": "batch × heads × length × d_head"}
    whole = [{name: row.get(name) for name in names} for row in rows.values()]
    return f"{ATTENTION}\n{render_rows(whole, 'markdown', 'ms of forward and backward together', titles=titles)}"


def parallel(root: Path) -> str:
    """Return the table of exposed communication on two GPUs, beside PyTorch's, with the peaks of sharded strategies."""
    rows = []
    for run, chosen in ((REPLICATED, ON_TWO), (SHARDED, None)):
        file = root / f"{run}.jsonl"
        if not file.exists():
            raise ValueError(f"{file}, for the table of two GPUs, does not exist; restore it with git checkout {file}")
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if chosen is None or row["variant"] in chosen:
                names = ("variant", "step_s", "p10_s", "p90_s", "exposed_s", "peak_bytes")
                rows.append({name: row.get(name) for name in names})
    return f"{PARALLEL}\n{render_rows(rows, 'markdown', '2.7B on two H200s: steps')}"


PAGES = {"README.md": ("headline",), "docs/results.md": ("headline", "presets", "attention", "parallel")}


def filled(page: str, name: str) -> str:
    """Return a page's text with updated tables. `name`: its name in PAGES."""
    profiles = ROOT / "profiles"
    makers = {
        "headline": lambda: headline(profiles),
        "presets": lambda: presets(profiles / STUDY),
        "attention": lambda: attention(profiles / PEERS),
        "parallel": lambda: parallel(profiles),
    }
    above = "../" * name.count("/")
    for mark in PAGES[name]:
        text = makers[mark]().replace("](profiles/", f"]({above}profiles/")
        head, begin, rest = page.partition(f"<!-- {mark}")
        comment, _, tail = rest.partition("\n")
        page = f"{head}{begin}{comment}\n{text}{tail[tail.index(f'<!-- /{mark} -->') :]}"
    return page


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    try:
        for name in PAGES:
            file = ROOT / name
            file.write_text(filled(file.read_text(encoding="utf-8"), name), encoding="utf-8")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
