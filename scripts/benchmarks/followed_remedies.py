"""Time of programs with a planted fault, before and after the remedy that our first sentence names was followed.

Question: does a loop become as fast as its first sentence predicts when its remedy is followed? Method: for faults of
diagnosis_truth/faults/loops, EDITS holds the change that the sentence asks for, at the line that it names. `cs-systems
run` makes the sentence of the unchanged program. Then both programs run in turns, each time in a fresh process on one
thread without a GPU, because they are programs for a CPU. A run's time is the mean of its steps after the first ones,
with all work between two steps of the optimizer. The verdict uses the ratios after / before of the pairs: the sentence
is refuted if the median ratio is no gain by more than the spread of the ratios, or if the time after it is below what
"not below" allows by more than 3% and the spread. Output: a markdown table: fault, sentence, the bound, before, after,
spread of the ratios, verdict. Committed: profiles/diagnosis_truth/followed.md. It needs a quiet machine; about 25
minutes on two cores.

    python scripts/benchmarks/followed_remedies.py
    python scripts/benchmarks/followed_remedies.py --faults pause_every_fifth anomaly_mode --pairs 2 --output table.md
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("diagnosis_truth") / "faults" / "loops"
COMMITTED = ROOT / "profiles" / "diagnosis_truth" / "followed.md"
sys.path.insert(0, str(ROOT))
FIRST_STEPS = 3  # steps left out of the mean: they hold the work that each process does once
TOLERANCE = 0.03
TIMEOUT_S = 300.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}

TIMED = """
import runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
times = []
register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
script, first = sys.argv[1], int(sys.argv[2])
sys.argv = [script]
sys.path.insert(0, sys.path.pop(0) and script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
print("TIMED", (times[-1] - times[first]) / (len(times) - 1 - first), file=sys.stderr)
"""
"""Source of a program that runs a script and prints the mean time of its steps."""

# fault → (the lines of its file that the remedy changes, the new lines)
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "accuracy_on_train_set": (
        ("    history.append(accuracy())", "    if i % 10 == 9:\n        history.append(accuracy())"),
    ),
    "anomaly_mode": (("set_detect_anomaly(True)", "set_detect_anomaly(False)"),),
    "backbone_with_gradients": (("optimizer = torch", "backbone.requires_grad_(False)\noptimizer = torch"),),
    "best_checkpoint_each_step": (("    if loss.item() < best:", "    if epoch % 10 == 9 and loss.item() < best:"),),
    "checkpoint_not_reentrant": (("ckpt=True", "ckpt=False"),),
    "checkpoint_reentrant": (("checkpoint(block, x, use_reentrant=True)", "block(x)"),),
    "csv_generator": (
        (
            "    source = batches(path, 600)",
            "    made = batches(path, 600)\n    ready = [next(made) for _ in range(5)]",
        ),
        ("    for _ in range(steps):", "    for step in range(steps):"),
        ("        rows = next(source)", "        rows = ready[step % 5]"),
    ),
    "decode_in_getitem": (("shuffle=True)", "shuffle=True, num_workers=2, prefetch_factor=4)"),),
    "double_from_numpy": (
        ("rng.normal(size=(4096, 784))", "rng.normal(size=(4096, 784)).astype(np.float32)"),
        (".double()", ""),
    ),
    "evaluation_every_tenth": (("    if i % 10 == 9:", "    if i % 50 == 49:"),),
    "forward_twice": (
        ("    return F.cross_entropy(net(batch[0]), batch[1])", "    return F.cross_entropy(net, batch[1])"),
        ("(net(batch[0]).argmax(1)", "(net.argmax(1)"),
        ("    loss = compute_loss(net, batch)", "    output = net(batch[0])\n    loss = compute_loss(output, batch)"),
        ("compute_accuracy(net, batch)\n", "compute_accuracy(output.detach(), batch)\n"),
    ),
    "gc_collect_each_step": (("    gc.collect()\n", ""),),
    "gc_every_fourth": (("if step % 4 == 0:", "if step % 100 == 0:"),),
    "gradient_histograms": (("    for name, p in model", "    for name, p in () if step % 10 else model"),),
    "json_log_of_gradients": (
        (
            '            record = {"step"',
            '            if step % 10:\n                continue\n            record = {"step"',
        ),
    ),
    "loader_made_anew": (
        ("num_workers=1)", "num_workers=1)\nendless = (batch for _ in range(9) for batch in loader)"),
        ("next(iter(loader))", "next(endless)"),
    ),
    "own_adam": (("opt = MyAdam(net.parameters())", "opt = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)"),),
    "pause_every_fifth": (("        time.sleep(0.2)", "        pass"),),
    "permutation_per_batch": (("rng.permutation(N)[:size]", "rng.integers(0, N, size)"),),
    "system_metrics": (("**system_stats()})", "**({} if step % 10 else system_stats())})"),),
    "target_network_copy": (
        (
            "    for _ in range(3):\n        target = copy.deepcopy(q)",
            "    with torch.no_grad():\n"
            "        for new, old in zip(target.parameters(), q.parameters(), strict=True):\n"
            "            new.copy_(old)",
        ),
    ),
}


@dataclass(frozen=True)
class Followed:
    """Fault with a remedy that was followed, with the mean steps of each pair of runs, in seconds."""

    fault: str
    sentence: str
    pairs: tuple[tuple[float, float], ...]

    @property
    def ratios(self) -> list[float]:
        return sorted(after / before for before, after in self.pairs)

    @property
    def least(self) -> float | None:
        """Least share of the time that stays after the remedy, by the bound or expectation in the sentence."""
        return bound(self.sentence)

    @property
    def verdict(self) -> str:
        ratios = self.ratios
        spread, middle = ratios[-1] - ratios[0], median(ratios)
        if middle + spread / 2 >= 1:
            return "refuted: no gain" if middle >= 1 else "not told: within the spread"
        if self.least is not None and middle + spread / 2 < self.least * (1 - TOLERANCE):
            return f"refuted: below {self.least:.2f} of the time"
        return "holds"


def bound(sentence: str) -> float | None:
    """Return the share of the time that stays, by "not below A, now B" in the sentence; None without these words."""
    found = re.search(r"not below ([\d.,]+) (\S+), now ([\d.,]+) (\S+?)(?:$|[;.,)])", sentence)
    if found is None or found[2] != found[4]:
        return None
    return float(found[1].replace(",", "")) / float(found[3].replace(",", ""))


def mended(fault: str) -> str:
    """Return the source of a fault's program after the remedy.

    Raises ValueError if a line does not occur exactly once.
    """
    text = (FAULTS / f"{fault}.py").read_text()
    head, end, body = text.partition("\n}\n")  # CASE holds the truth about the fault, so it stays unchanged
    for old, new in EDITS[fault]:
        if body.count(old) != 1:
            raise ValueError(f"{fault}.py has {body.count(old)} times {old!r}; correct EDITS")
        body = body.replace(old, new)
    return head + end + body


def first_sentence(script: Path) -> str:
    """Return the first cause that `cs-systems run` names."""
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.record import read_records

    with tempfile.TemporaryDirectory() as folder:
        done = run_python(script.parent, "-m", "cs_systems", "run", "--out", f"{folder}/run", "--", str(script))
        if done.returncode:
            raise RuntimeError(f"cs-systems run of {script.name} failed: {done.stderr[-500:]}")
        return next(iter(diagnose(read_records(Path(folder) / "run")[0]).causes), "none")


def step_s(script: Path) -> float:
    """Return the mean step of a program in a fresh process."""
    done = run_python(script.parent, "-c", TIMED, str(script), str(FIRST_STEPS))
    found = re.search(r"^TIMED ([\d.e-]+)$", done.stderr, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{script.name} was not timed: {done.stderr[-500:]}")
    return float(found[1])


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the sources of this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def follow(fault: str, pairs: int) -> Followed:
    """Run the program and its mended twin in turns; the order changes with each pair."""
    with tempfile.TemporaryDirectory() as name:
        before, after = Path(name) / "before" / f"{fault}.py", Path(name) / "after" / f"{fault}.py"
        for script, text in ((before, (FAULTS / f"{fault}.py").read_text()), (after, mended(fault))):
            script.parent.mkdir()
            script.write_text(text)
            for helper in FAULTS.glob("_*.py"):
                (script.parent / helper.name).write_text(helper.read_text())
        sentence = first_sentence(before)
        times: list[tuple[float, float]] = []
        for number in range(pairs):
            order = (before, after) if number % 2 == 0 else (after, before)
            taken = {script: step_s(script) for script in order}
            times.append((taken[before], taken[after]))
    return Followed(fault, sentence, tuple(times))


def page(found: list[Followed]) -> str:
    """Return the output in markdown."""
    refuted = sum(each.verdict.startswith("refuted") for each in found)
    lines = ["# Is the first sentence true when it is followed?", ""]
    lines += [f"Of {len(found)} sentences whose remedy was followed, {refuted} refuted.", ""]
    lines += ["| fault | sentence | not below | before, ms | after, ms | after / before | verdict |"]
    lines += ["| --- | --- | --: | --: | --: | --: | --- |"]
    for each in found:
        before, after = (median(times) * 1e3 for times in zip(*each.pairs, strict=True))
        ratios = each.ratios
        least = "" if each.least is None else f"{each.least:.2f}"
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})"
        sentence = each.sentence.replace("|", "\\|")
        lines.append(
            f"| {each.fault} | {sentence} | {least} | {before:.3g} | {after:.3g} | {spread} | {each.verdict} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--faults", nargs="+", choices=EDITS, default=list(EDITS), metavar="NAME", help="default: all")
    parser.add_argument("--pairs", type=int, default=7, help="runs of each of the two programs (default: 7)")
    parser.add_argument("--output", type=Path, help="file of the page (default, if all faults run: in profiles/)")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error(f"--pairs must be at least 2, got {options.pairs}")
    if options.output is None and options.faults == list(EDITS):
        options.output = COMMITTED
    found: list[Followed] = []
    for fault in options.faults:
        found.append(follow(fault, options.pairs))
        print(f"{len(found)}/{len(options.faults)} {fault}: {found[-1].verdict}", file=sys.stderr, flush=True)
        if options.output:
            options.output.write_text(page(found))
    if not options.output:
        print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
