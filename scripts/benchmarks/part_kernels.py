"""Kernels of the training step's parts alone, beside the compiled plain modules and other libraries', on one GPU.

    python3 scripts/benchmarks/part_kernels.py --out runs/part_kernels

Question: at which share of the memory's rate does each kernel run, and is it faster than what torch.compile makes of
the plain module, or torch itself where the compiled step leaves the module alone, and than Liger, quack and torchao?
Method: forward and backward through autograd, in bfloat16, at batch 4. Each implementation is first compared with the
plain module in float64, values and gradients, within the tolerance of our kernels; one that is wrong is not measured. A
sample is a row of calls on different tensors, so that the L2 cache holds none of them, with the launches hidden. The
implementations are compiled first and then measured in rounds, one after the other. Bytes are those that the function
needs at least: each input read once, each output written once; matrix products have FLOPs instead. Beside a linear
layer in fp8, compiled is the one in bfloat16. Output: a page with medians and the middle 80%, and with --out also
table.md and rows.json there; --page writes the page again from the rows. What cannot run says why. Without quack, whose
products try all their configurations first, it takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from _part_cases import BATCH, CASES, ELEMENT_BYTES, Case, Function
from _part_peers import PEERS
from torch import Tensor
from torch._functorch import config as functorch

from cs_systems.config import ModelConfig, preset
from cs_systems.machine.device import Device, resolve
from cs_systems.measure.runtime.timing import measure
from cs_systems.measure.workloads import CallableWorkload
from cs_systems.report.tables.rows import render_rows

ROUNDS, SAMPLES, WARMUP = 4, 5, 2
SAMPLE_BYTES = 512 << 20  # that the calls of a sample move at least: ten times the L2 cache
MOST_CALLS = 32
PASSES = {"forward": "in forward", "backward": "in backward", "both": "in both together"}


class WrongResult(Exception):
    """An implementation that does not compute its case."""


class Calls(CallableWorkload):
    """Calls of one pass on different tensors, one after the other."""

    hides_launches = True

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        super().__init__(self._run)
        self.calls = calls

    def _run(self) -> None:
        for call in self.calls:
            call()


def results(function: Function, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs and the gradients of the inputs, for these gradients of the outputs."""
    outputs = outputs_of(function, inputs)
    weights = [x.to(y.dtype) for x, y in zip(upstream, outputs, strict=True)]
    return [y.detach() for y in outputs] + [*torch.autograd.grad(outputs, inputs, weights)]


def outputs_of(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = function(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else [*outputs]


class Check:
    """Comparison of implementations of a case with the plain function in float64, on one set of tensors."""

    def __init__(self, case: Case, model: ModelConfig, device: Device) -> None:
        self.tolerance = case.tolerance
        with device.torch:
            self.inputs, plain = case.inputs(model), case.plain(model)
        wide = [x.detach().double().requires_grad_() for x in self.inputs]
        self.upstream = [torch.randn_like(y).bfloat16() for y in outputs_of(plain, wide)]
        self.exact = results(plain, wide, self.upstream)

    def __call__(self, function: Function) -> None:
        """Raise WrongResult unless all outputs and gradients are right."""
        found = results(function, self.inputs, self.upstream)
        names = [
            f"{kind} {n + 1}"
            for kind, of in (("output", self.upstream), ("gradient", self.inputs))
            for n in range(len(of))
        ]
        for name, x, exact in zip(names, found, self.exact, strict=True):
            error = float((x.double() - exact).norm() / exact.norm())
            if not error <= self.tolerance:  # NaN is wrong, too
                raise WrongResult(f"{name} is off by {error:.2g} of its norm, the tolerance is {self.tolerance:g}")


def passes_of(
    function: Function, case: Case, model: ModelConfig, names: Iterable[str], count: int, device: Device
) -> dict[str, Calls]:
    """Return the calls of these passes, compiled, on `count` sets of tensors."""
    calls: dict[str, list[Callable[[], object]]] = {name: [] for name in names}
    for _ in range(count):
        with device.torch:
            inputs = case.inputs(model)
        outputs = outputs_of(function, inputs)
        upstream = [torch.randn_like(y) for y in outputs]
        runs: dict[str, Callable[[], object]] = {
            "forward": partial(function, *inputs),
            "backward": partial(torch.autograd.grad, outputs, inputs, upstream, retain_graph=True),
            "both": partial(results, function, inputs, upstream),
        }
        for name in calls:
            calls[name].append(runs[name])
    found = {name: Calls(of_pass) for name, of_pass in calls.items()}
    for each in found.values():
        each.calls[0]()
    return found


def implementations(name: str, model: ModelConfig) -> Iterator[tuple[str, Callable[[], Function]]]:
    """Yield the label of each implementation of a case, and what makes its function."""
    case = CASES[name]
    yield "ours", lambda: case.ours(model)
    yield "compiled", lambda: torch.compile(case.plain(model), dynamic=False)
    if case.has_eager:
        yield "eager", lambda: case.plain(model)
    for label, peer in PEERS.items():
        if name in peer.functions and peer.version() is not None:
            yield label, partial(peer.functions[name], model)


# The calls of a backward keep the graph, which torch.compile refuses once it has reused the graph's buffers.
@functorch.patch(donated_buffer=False)
def rows_of(name: str, model: ModelConfig, device: Device) -> list[dict[str, Any]]:
    """Return a row for each implementation and pass of a case, measured in rounds."""
    torch._dynamo.reset()
    case = CASES[name]
    unit, work = case.work(model)
    check = Check(case, model, device)
    least = work["forward"] if unit == "bytes" else sum(ELEMENT_BYTES * x.numel() for x in check.inputs)
    count = max(2, min(MOST_CALLS, -(-SAMPLE_BYTES // least)))
    head = {"case": name, "size": model.name, "context": model.context_length}
    rows, found = [], {}
    for label, make in implementations(name, model):
        try:
            with device.torch:
                function = make()
            check(function)
            found[label] = passes_of(function, case, model, work, count, device)
        except Exception as error:  # a peer's failure must not cost the other rows
            rows.append(head | {"implementation": label, "reason": f"{type(error).__name__}: {str(error)[:200]}"})
    times: dict[tuple[str, str], list[float]] = {(label, kind): [] for label in found for kind in work}
    for _ in range(ROUNDS):
        for label, kind in times:
            for sample in measure(found[label][kind], device, warmup=WARMUP, steps=SAMPLES):
                if not sample.warmup:
                    times[label, kind].append(sample.phases_s["call"] / count)
    for (label, kind), seconds in times.items():
        tenths = quantiles(seconds, n=10)
        spread = {"median_s": median(seconds), "p10_s": tenths[0], "p90_s": tenths[-1]}
        row = head | {"implementation": label, "pass": kind, **spread, unit: work[kind], "calls": count}
        rows.append(row | {f"{unit}_per_s": work[kind] / median(seconds)})
    return rows


def page(rows: Sequence[dict[str, Any]], machine: str, versions: Mapping[str, str | None]) -> str:
    """Return the page: the answer, what was measured, and the table.

    versions: package of each peer → its version; None: not installed.
    """
    measured = [r for r in rows if "reason" not in r]
    medians = {(_cell(r), r["implementation"]): r["median_s"] for r in measured}
    shown = []
    for r in measured:
        beside = medians.get((_cell(r), "compiled"))
        shown.append(
            {name: str(r[name]) for name in ("case", "size", "context", "pass", "implementation")}
            | {"us": f"{1e6 * r['median_s']:.1f}", "spread": f"{1e6 * r['p10_s']:.1f}–{1e6 * r['p90_s']:.1f}"}
            | {"mb": _shown(r, "bytes", 1e6, 1), "rate": _shown(r, "bytes_per_s", 1e12, 2)}
            | {"flops": _shown(r, "flops_per_s", 1e12, 0)}
            | {"ratio": f"{beside / r['median_s']:.2f}×" if beside else "–"}
        )
    found = [f"{package} {version}" for package, version in versions.items() if version]
    caption = ", ".join([machine, *found, f"bf16, batch {BATCH}; MB: each input read once, each output written once"])
    titles = {"us": "µs", "spread": "p10–p90", "mb": "MB", "rate": "TB/s", "flops": "TFLOP/s", "ratio": "over compiled"}
    notes = [f"{r['implementation']}, {r['case']}, {r['size']}: {r['reason']}" for r in rows if "reason" in r]
    notes += [
        f"{package} is not installed: pip install {package}" for package, version in versions.items() if not version
    ]
    names = {"compiled": "the compiled plain modules", "eager": "torch's own for the embedding"}
    names |= {label: f"{peer.title}'s" for label, peer in PEERS.items()}
    answers = [
        f"Beside {name} our kernels are {_speed_ups(medians, peer)}."
        for peer, name in names.items()
        if any(implementation == peer for _, implementation in medians)
    ]
    return "\n\n".join(
        [
            "# Kernels of the training step's parts alone",
            " ".join(answers),
            "    python3 scripts/benchmarks/part_kernels.py --out runs/part_kernels",
            render_rows(shown, "markdown", caption, [*dict.fromkeys(notes)], titles=titles).strip() + "\n",
        ]
    )


def _shown(row: Mapping[str, Any], name: str, unit: float, digits: int) -> str:
    return f"{row[name] / unit:.{digits}f}" if name in row else "–"


def _cell(row: dict[str, Any]) -> tuple[str, str, int, str]:
    return row["case"], row["size"], row["context"], row["pass"]


def _speed_ups(medians: Mapping[tuple[tuple[str, str, int, str], str], float], peer: str) -> str:
    """Return the range of our speed-ups over a peer in each pass, over the cells in which both were measured."""
    ratios: dict[str, list[float]] = {kind: [] for kind in PASSES}
    for (cell, implementation), seconds in medians.items():
        if implementation == "ours" and (cell, peer) in medians:
            ratios[cell[-1]].append(medians[cell, peer] / seconds)
    spans = {kind: [*dict.fromkeys((f"{min(r):.2f}", f"{max(r):.2f}"))] for kind, r in ratios.items() if r}
    return ", and ".join(f"{' to '.join(span)} times as fast {PASSES[kind]}" for kind, span in spans.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--sizes", nargs="+", default=["2.7B", "large", "small"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 512])
    parser.add_argument("--budget-s", type=float, default=50.0, help="start no case after this time (%(default)s s)")
    parser.add_argument("--out", type=Path, help="folder for table.md and rows.json; goes on with what is there")
    parser.add_argument("--page", type=Path, metavar="DIR", help="measure nothing; write table.md from DIR/rows.json")
    args = parser.parse_args()
    if args.page:
        found = json.loads((args.page / "rows.json").read_text())
        (args.page / "table.md").write_text(page(found["rows"], found["machine"], found.get("peers", {})))
        return
    device, began = resolve("cuda"), time.monotonic()
    machine = f"{device.name}, torch {torch.__version__}"
    versions = {peer.package: peer.version() for peer in PEERS.values()}
    kept = args.out / "rows.json" if args.out else None
    rows: list[dict[str, Any]] = json.loads(kept.read_text())["rows"] if kept and kept.exists() else []
    done = {(r["case"], r["size"], r["context"]) for r in rows}
    for tokens, size, name in product(args.contexts, args.sizes, args.cases):
        if (name, size, tokens) in done:
            continue
        if time.monotonic() - began > args.budget_s:
            print(f"{name}, {size}, {tokens}: left out, the time is spent", flush=True)
            continue
        rows += rows_of(name, preset(size, context_length=tokens), device)
        device.release_memory()
        print(f"{name}, {size}, {tokens}: measured after {time.monotonic() - began:.1f} s", flush=True)
        if kept:  # after each case: a run that is stopped keeps what it has measured
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({"machine": machine, "peers": versions, "rows": rows}, indent=1))
            kept.with_name("table.md").write_text(page(rows, machine, versions))
    print(page(rows, machine, versions))


if __name__ == "__main__":
    main()
