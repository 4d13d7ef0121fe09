"""Is a step after a remedy as long as was expected before it was tried? Pairs of before and after on one GPU.

    python3 scripts/benchmarks/expected_times.py --sizes small large --json pairs.json
    python3 scripts/benchmarks/expected_times.py --show pairs.json more.json    # the table; later files replace rows

For each model, in a small and in a large size, in fp32 with AdamW: the step is timed without a profiler, with the
time that the host takes to submit it and that the device takes with its launch queue filled ahead. Some steps are
recorded with torch.profiler. From these the expected duration after each remedy is written down; then the remedy is
followed and measured, in rounds of before and after that take turns, as the median of their ratios. A remedy of the
host (graph, no `.item()`, no input, no work of its own, copies ahead) is replayed. For TF32 the step's products are
timed alone in both ways, and replayed with this ratio. For bf16 and a fused attention the products and attention
calls are timed alone, and the difference is taken from the step, if the host does not limit it then. Of compile only
the bound of the diagnosis is known. The host of such a machine is some percent faster or slower from minute to
minute. What a remedy of the host removes does not change with it (a wait, a copy, work of fixed length), and what is
left does: where the step before takes longer in the turns than when the time was expected, the expected time is
longer by the same seconds. A graph leaves the time of the GPU, which does not drift.

Output: a table of all pairs, with expected and measured time and their ratio; the summary; the same as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cs_systems.analysis.attribution.profile import profile as profile_of
from cs_systems.analysis.diagnosis import apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence, of_profile
from cs_systems.analysis.diagnosis._measured import with_part
from cs_systems.analysis.diagnosis.unused_tensor_cores import AUTOCAST
from cs_systems.analysis.replay import (
    Change,
    Clean,
    CopiesOverlapped,
    FamilyScaled,
    HostScaled,
    InputRemoved,
    LaunchesFree,
    Refusal,
    SyncRemoved,
    replayed,
)
from cs_systems.core.experiments import EXPERIMENTS
from cs_systems.machine.device import resolve
from cs_systems.measure.runtime import experimenting
from cs_systems.readers import read
from cs_systems.record import Measurement, Sample

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.benchmarks import model_families as families

Row = dict[str, Any]
SIZES = {"small": (512, 6, 8, 128, 2), "large": (1024, 8, 16, 512, 8)}
MODELS = ("llama", "gpt2", "bert", "t5", "vit", "clip", "whisper", "resnet", "unet", "gan", "lstm")
TURNS, STEPS, RECORDED = 8, 4, 5
COMPILED = ("llama", "vit")
UNFUSED = ("llama", "gpt2", "bert", "vit", "clip", "whisper")  # transformers has both their attentions
EXPERIMENTS_S = 20.0
INPUT_S, OWN_S, ITEMS, COPIED_BYTES = 8e-3, 5e-3, 40, 1 << 26
SLEEP_CYCLES = 400_000_000  # about 0.25 s on an H100


class Step:
    """Training step with faults that are switched on by name: "item", "input", "own", "copy"."""

    def __init__(self, case: Any, faults: Sequence[str] = (), autocast: bool = False) -> None:
        self.case, self.faults, self.autocast = case, faults, autocast
        self.model = case.model.cuda().train()
        self.run: Callable[..., Any] = self.model
        self.inputs = {name: value.cuda() if torch.is_tensor(value) else value for name, value in case.inputs.items()}
        self.targets = self.inputs.pop("targets", None)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, capturable=True, fused=True)
        self.batch = torch.empty(COPIED_BYTES // 4) if "copy" in faults else None

    def __call__(self, faults: Sequence[str] | None = None) -> None:
        faults = self.faults if faults is None else faults
        with record_function("step"):
            if "input" in faults:
                with record_function("input"):
                    _work(INPUT_S)
            if self.batch is not None and "copy" in faults:
                with record_function("copy"):
                    self.batch.cuda()
            self.optimizer.zero_grad(set_to_none=True)
            with record_function("forward"), torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                output = self.run(**self.inputs)
                loss = (
                    self.case.loss_of(output)
                    if self.targets is None
                    else torch.nn.functional.cross_entropy(output.float(), self.targets)
                )
            if "own" in faults:
                with record_function("augment"):
                    _work(OWN_S)
            with record_function("backward"):
                loss.backward()
            if {"item", "norms"} & {*faults}:
                with record_function("norms"):
                    grads = [p.grad for p in self.model.parameters() if p.grad is not None][:ITEMS]
                    for grad in grads:
                        norm = grad.norm()
                        if "item" in faults:
                            norm.item()
            with record_function("optimizer"):
                self.optimizer.step()


def _work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def one_round_s(step: Callable[[], None]) -> float:
    """Return the duration in s of one step, from several steps in a row."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def submitted_s(step: Callable[[], None]) -> float:
    """Return the time in s that the host takes to submit a step to an idle device."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return median(times)


def device_s(step: Callable[[], None], launches: int) -> float | None:
    """Return the device's time in s of a step that is queued ahead; None if its launches do not fit the queue."""
    if launches > 900:
        return None
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return float(median(times))


def recorded(step: Callable[[], None]) -> Any:
    """Return the profile of steps recorded with torch.profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(RECORDED):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return profile_of(read(path))


def expected(seen: Any, change: Change, clean: Clean) -> Row:
    """Return what the replay expects after a change, with and without the clean step, or why it does not."""
    replay = replayed(seen)
    answer, foreign = replay.what_if(change, clean=clean), replay.what_if(change)
    row: Row = {"replay_error": replay.error, "unexplained": replay.unexplained}
    if isinstance(answer, Refusal):
        return row | {"refused": answer.reason}
    row |= {"expected_s": answer.value, "expected_low_s": answer.low, "expected_high_s": answer.high}
    if not isinstance(foreign, Refusal):
        row |= {"foreign_s": foreign.value, "foreign_low_s": foreign.low, "foreign_high_s": foreign.high}
    return row


def graphed(step: Step) -> Callable[[], None]:
    """Return the step captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    step.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()

    def run() -> None:
        graph.replay()

    run.step = step  # type: ignore[attr-defined]  # its tensors must live as long as the graph
    return run


def made(name: str, size: str) -> Any:
    families.SIZES["here"] = SIZES[size]
    families.VOCABULARY["here"] = 8192
    torch.manual_seed(0)
    with torch.device("cuda"):
        return families.FAMILIES[name][0]("here", SIZES[size][-1])


def warmed(step: Callable[[], None], count: int = 4) -> None:
    for _ in range(count):
        step()
    torch.cuda.synchronize()


@contextmanager
def cleared() -> Iterator[None]:
    try:
        yield
    finally:
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def base(step: Step) -> tuple[Row, Any, Clean]:
    """Return the clean times of a step, its recorded steps, and both as the replay takes them.

    The clean times are taken last, close to the turns of before and after.
    """
    warmed(step)
    seen = recorded(step)
    warmed(step, 2)
    step_s = median(one_round_s(step) for _ in range(TURNS))
    host = submitted_s(step)
    kernels = sum(each.calls for each in seen.by_step.values()) / len(seen.steps)
    waits = {"item", "copy"} & {*step.faults}
    device = None if waits else device_s(step, int(kernels))
    clean = Clean(step_s, {"step": min(host, step_s)}, {} if device is None else {"step": device})
    return {"step_s": step_s, "host_s": host, "device_s": device, "kernels": kernels}, seen, clean


HOST_FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Change]] = {
    "no .item()": (("item",), ("norms",), SyncRemoved()),
    "no input": (("input",), (), InputRemoved()),
    "no own work": (("own",), (), HostScaled(0.0, "augment")),
    "copies ahead": (("copy",), (), CopiesOverlapped()),
}
OF_KERNELS = ("bf16", "TF32", "compile")
REMEDIES = (*HOST_FAULTS, "CUDA graph", *OF_KERNELS, "attention")


def of_model(name: str, size: str, remedies: Collection[str]) -> Iterator[Row]:
    """Yield a row for each of these remedies that the model has."""
    for remedy, (faulty, mended, change) in HOST_FAULTS.items():
        if remedy not in remedies:
            continue
        with cleared():
            step = Step(made(name, size), faulty)
            row, seen, clean = base(step)
            row |= expected(seen, change, clean)
            yield {"remedy": remedy, **row, **_compared(partial(step, faulty), partial(step, mended))}
    if {"CUDA graph", *OF_KERNELS} & {*remedies}:
        with cleared():
            step = Step(made(name, size))
            row, seen, clean = base(step)
            if "CUDA graph" in remedies:
                told = row | expected(seen, LaunchesFree(), clean)
                yield {"remedy": "CUDA graph", **_with_graph(name, size, step, told)}
            yield from of_kernels(name, size, step, row, seen, clean, remedies)
    if "attention" in remedies and name in UNFUSED:
        with cleared():
            yield {"remedy": "attention", **of_attention(name, size)}


def _with_graph(name: str, size: str, before: Step, told: Row) -> Row:
    try:
        replay = graphed(Step(made(name, size)))
    except Exception as error:
        return told | {"failed": f"{type(error).__name__}: {error!s:.80}"}
    return told | _compared(before, replay)


def of_kernels(
    name: str, size: str, before: Step, row: Row, seen: Any, clean: Clean, remedies: Collection[str]
) -> Iterator[Row]:
    """Yield a row for each remedy of the kernels: with the expectation by experiments, or the bound of a diagnosis."""
    evidence = experimented(before, row, seen)
    bounds = {one.code: one.at_best for one in apply_rules(evidence).diagnoses}
    row = {"step_s": row["step_s"]}
    products = row | {"bound_s": bounds.get("unused-tensor-cores")}
    if "bf16" in remedies:  # the casts of autocast make other kernels and launches, which no replay holds
        after = Step(made(name, size), autocast=True)
        yield {
            "remedy": "bf16",
            **products,
            **_told(evidence, "products", "bf16", AUTOCAST),
            **_compared(before, after),
        }
        del after

    def in_tf32() -> None:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        before()
        torch.backends.cuda.matmul.fp32_precision = "ieee"

    if "TF32" in remedies:
        told = _in_tf32(evidence, seen, clean)
        yield {"remedy": "TF32", **products, **told, **_compared(before, in_tf32)}
    if "compile" in remedies and name in COMPILED:
        least = min(filter(None, (bounds.get(code) for code in ("launch-bound", "unfused-elementwise"))), default=None)
        after = Step(made(name, size))
        after.run = torch.compile(after.model)
        yield {"remedy": "compile", **row, "bound_s": least, **_compared(before, after)}


def of_attention(name: str, size: str) -> Row:
    """Return the row of attention in one kernel instead of operator by operator."""
    before, after = Step(made(name, size)), Step(made(name, size))
    before.model.set_attn_implementation("eager")
    after.model.set_attn_implementation("sdpa")
    row, seen, _ = base(before)
    evidence = experimented(before, row, seen)
    bound = next((one.at_best for one in apply_rules(evidence).diagnoses if one.code == "unfused-attention"), None)
    return {"step_s": row["step_s"], "bound_s": bound, **_told(evidence, "attention"), **_compared(before, after)}


def experimented(step: Step, row: Row, seen: Any) -> Evidence:
    """Return the evidence of recorded steps, with the clean step and the experiments that the tool makes after it."""
    clean = Measurement(
        "monotonic", (Sample(0, False, row["step_s"], {"step": row["step_s"]}, {"step": row["host_s"]}),), 0.0
    )
    of = experimenting.Step(resolve("cuda"), clean, lambda: [("step", step)], precision="fp32", waits=False)
    evidence = of_profile(seen)
    rows = experimenting.run_all(of, EXPERIMENTS_S).rows
    return replace(evidence, measurement=clean, tables={**evidence.tables, EXPERIMENTS.name: rows})


def _in_tf32(evidence: Evidence, seen: Any, clean: Clean) -> Row:
    """Return what the replay expects with the products in the time that an experiment measured in TF32."""
    row = evidence.experiment("products", "tf32")
    if row is None or row["time_s"] is None or not row["baseline_s"]:
        return _told(evidence, "products", "tf32")
    return expected(seen, FamilyScaled("matmul", row["time_s"] / row["baseline_s"]), clean)


def _told(evidence: Evidence, experiment: str, instead: str | None = None, host_factor: float = 1.0) -> Row:
    """Return the duration to expect by an experiment, or why there is none."""
    told = with_part(evidence, experiment, instead, host_factor)
    if told is not None:
        return {"expected_s": told.value, "expected_low_s": told.low, "expected_high_s": told.high}
    if evidence.is_host_bound:
        return {"refused": "the step waits for the host"}
    if evidence.experiment(experiment, instead) is not None:
        return {"refused": "the step would then wait for the host"}
    rows = [row for row in EXPERIMENTS.of(evidence.tables) if row["experiment"] == experiment]
    return {"refused": next((row["skipped"] for row in rows if row["skipped"]), "the parts overlap, or were not found")}


def _compared(before: Callable[[], None], after: Callable[[], None]) -> Row:
    """Return the times in s before and after, in alternating rounds, so that a slow minute affects both."""
    warmed(before, 2)
    warmed(after, 2)
    sides: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(TURNS):
        for name, step in (("before", before), ("after", after)):
            sides[name].append(one_round_s(step))
    ratios = sorted(b / a for a, b in zip(sides["before"], sides["after"], strict=True))
    return {"before_median_s": median(sides["before"]), "after_median_s": median(sides["before"]) * median(ratios)} | {
        "ratio": median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]
    }  # fmt: skip


def markdown(rows: list[Row]) -> str:
    heads = (
        "model",
        "size",
        "remedy",
        "before",
        "expected",
        "range",
        "measured",
        "expected ÷ measured",
        "bound",
        "note",
    )
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        after, bound, drift_s = row.get("after_median_s"), row.get("bound_s"), _drift_s(row)
        told = [
            row[key] + drift_s for key in ("expected_s", "expected_low_s", "expected_high_s") if row.get("expected_s")
        ]
        cells = (
            row["model"], row["size"], row.get("remedy", ""), _ms(row.get("before_median_s") or row.get("step_s")),
            _ms(told[0]) if told else "", f"{_ms(told[1])} … {_ms(told[2])}" if told else "", _ms(after),
            f"{told[0] / after:.3f}" if told and after else "", _ms(bound),
            row.get("refused") or row.get("failed") or "",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _drift_s(row: Row) -> float:
    """Return by how many seconds the step before took longer in the rounds than when its time was predicted."""
    if row.get("remedy") == "CUDA graph" or not row.get("before_median_s"):
        return 0.0
    return float(row["before_median_s"] - row["step_s"])


def summary(rows: list[Row]) -> str:
    measured = [row for row in rows if row.get("after_median_s")]
    told = [(row["expected_s"] + _drift_s(row)) / row["after_median_s"] for row in measured if row.get("expected_s")]
    off = sorted(abs(ratio - 1) for ratio in told)
    held = [row for row in measured if row.get("bound_s")]
    broken = [row for row in held if row["after_median_s"] < 0.97 * row["bound_s"]]
    near = sum(each <= 0.1 for each in off)
    return (
        f"{len(measured)} pairs; {len(told)} with an expected time: {near} within 10% of the measured one, the median "
        f"off by {median(off) if off else 0:.1%}; {len(held)} bounds, of which {len(broken)} are broken by over 3%"
    )


def merged(files: Sequence[Path]) -> list[Row]:
    """Return the rows of saved pairs; of the same pair, the last."""
    rows = (row for file in files for row in json.loads(file.read_text())["rows"])
    return [*{(row["model"], row["size"], row.get("remedy")): row for row in rows}.values()]


def device_of(files: Sequence[Path]) -> str:
    return ", ".join(dict.fromkeys(json.loads(file.read_text())["device"] for file in files))


def by_remedy(rows: list[Row]) -> str:
    """Return a table of the remedies with an expected time, and how close they come."""
    lines = [
        "| remedy | pairs | with an expected time | within 10% | median of expected ÷ measured |",
        "| --- " + "| --: " * 4 + "|",
    ]
    for remedy in REMEDIES:
        of = [row for row in rows if row.get("remedy") == remedy and row.get("after_median_s")]
        ratios = [(row["expected_s"] + _drift_s(row)) / row["after_median_s"] for row in of if row.get("expected_s")]
        near = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
        lines.append(f"| {remedy} | {len(of)} | {len(ratios)} | {near} | {f'{median(ratios):.3f}' if ratios else ''} |")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*families.FAMILIES])
    parser.add_argument("--sizes", nargs="*", default=["small"], choices=[*SIZES])
    parser.add_argument("--remedies", nargs="*", default=[*REMEDIES], choices=[*REMEDIES])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further model after this time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--show", type=Path, nargs="*", help="print the table of saved pairs")
    given = parser.parse_args()
    if given.show:
        rows = merged(given.show)
        if given.json:
            given.json.write_text(json.dumps({"device": device_of(given.show), "rows": rows}, indent=1))
        print(f"{device_of(given.show)}\n\n{summary(rows)}\n\n{by_remedy(rows)}\n\n{markdown(rows)}")
        return
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    gc.disable()
    rows, began = list[Row](), time.perf_counter()
    for size in given.sizes:
        for name in given.models:
            if time.perf_counter() - began > given.seconds:
                print(f"{name} {size} is left out: the time is over", file=sys.stderr)
                continue
            try:
                for row in of_model(name, size, given.remedies):
                    rows.append({"model": name, "size": size, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            except Exception as error:
                traceback.print_exc()
                rows.append({"model": name, "size": size, "failed": f"{type(error).__name__}: {error!s:.100}"})
            if given.json:  # written after each model, so that results remain if the next model ends the process
                given.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, fp32, AdamW"
    text = f"{title}\n\n{summary(rows)}\n\n{markdown(rows)}\n"
    print(text)
    if given.table:
        given.table.write_text(text)


if __name__ == "__main__":
    main()
