"""Score of our conclusions on programs with a planted fault and on healthy ones: the share with a named cause.

Question: do the first sentences name the true cause of a fault, and none on a healthy program?
Method: diagnosis_truth/faults/ holds programs with one planted fault each, and healthy ones. They were written before
anyone looked at the rules. A file declares what is true in its constant CASE. Scripts run under `cs-systems run`, those
of several ranks under torchrun; the other files write traces or snapshots, which `analyze` and `snapshot` read. The
answer is the first three sentences, with the code of each; caveats come after the sentences, never first. CODES
translates our codes into the causes of diagnosis_truth/causes.py; codes without a translation are listed.
A fault counts as top-1 if its cause is in the first sentence, and as top-3 if it is in one of the first three. A
healthy program counts as right if no cause is named, except those that its file allows. Sentences about the machine's
noise are no cause, but one in the first place is not the cause either.
Output: a markdown table with the case, the truth, our first sentence and the verdict, after a summary by kind of input.
Committed: profiles/diagnosis_truth/.

    python scripts/benchmarks/diagnosis_truth.py                       # all cases, about 20 minutes on two cores
    python scripts/benchmarks/diagnosis_truth.py --kinds traces snapshots --jobs 2
    python scripts/benchmarks/diagnosis_truth.py --cases small_batch 'healthy_*' --save outputs
    python scripts/benchmarks/diagnosis_truth.py --kinds gpu --jobs 1  # on two GPUs, 15 minutes
    python scripts/benchmarks/diagnosis_truth.py --recorded            # loops recorded on a GPU, judged again: gpu.md
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).with_suffix("")
RECORDED = ROOT / "tests" / "data" / "gpu_loops"  # records of loops on one H200
COMMITTED = ROOT / "profiles" / "diagnosis_truth" / "table.md"
sys.path.insert(0, str(FOLDER))
from causes import CAUSES  # noqa: E402

KINDS = ("traces", "snapshots", "loops", "ranks")
ON_A_GPU = "gpu"  # loops for one GPU, and for two; never among all cases, which need none
SAMPLE = (  # fast cases, for a test
    "small_batch",
    "loader_wait",
    "healthy_training",
    "softmax_only",
    "logits_dominate",
    "fragmented",
)
TOOL = ("-m", "cs_systems")

CODES: dict[str, tuple[str, ...]] = {
    "activation-formulas": ("elementwise-chain",),
    "anomaly-detection": ("anomaly-detection",),
    "attention-weights": ("unfused-attention",),
    "autotuning": ("autotuning",),
    "batch-preparation": ("data-loading", "host-python"),
    "blocking-copies": ("pageable-copies", "exposed-copies"),
    "blocking-launches": ("blocking-call",),
    "broadcast-sums": ("elementwise-chain",),
    "cached-memory": ("cached-memory",),
    "cpu-offload": ("cpu-offload",),
    "flat-operators": ("cut-gradients",),
    "copied-factors": ("needless-copies",),
    "cut-samples": ("cut-gradients",),
    "data-input": ("data-loading",),
    "decompositions": ("decompositions",),
    "dense-gradients": ("dense-gradient",),
    "device-allocation": ("device-allocation",),
    "divergence": ("divergence",),
    "double-softmax": ("double-softmax",),
    "double-precision": ("fp64-products",),
    "empty-clipping": ("divergence",),
    "evaluation-mode": ("wrong-mode",),
    "exposed-communication": ("exposed-communication",),
    "fragmentation": ("fragmentation",),
    "garbage-collection": ("garbage-collection",),
    "gradient-accumulation": ("no-sync-missing",),
    "gradients-not-cleared": ("gradients-not-cleared",),
    "gradients-not-reduced": ("gradients-not-reduced",),
    "growing-hooks": ("growth",),
    "growth": ("growth",),
    "graphs-recorded-whole": ("graph-recorded-whole",),
    "host-synchronisation": ("host-sync",),
    "distribution-checks": ("host-sync",),
    "host-time": ("host-python",),
    "imbalanced-experts": ("expert-imbalance",),
    "index-gradients": ("index-backward",),
    "input-gradients": ("unused-gradients",),
    "kept-activations": ("activations",),
    "kept-gradients": ("gradient-memory",),
    "layout-conversions": ("layout-conversion",),
    "launch-bound": ("launch-bound", "small-operators"),
    "leak": ("growth",),
    "loaded-weights": ("kept-by-reference",),
    "lonely-collectives": ("exposed-communication",),
    "loss-spike": ("logits",),
    "model-copies": ("model-copies",),
    "nan-loss": ("nan-loss",),
    "one-hot-products": ("dense-gradient", "slow-products"),
    "optimizer-state": ("optimizer-state",),
    "out-of-memory": ("out-of-memory",),
    "no-training": ("nan-loss", "skipped-steps"),
    "no-update": ("no-update",),
    "own-python": ("host-python",),
    "own-tools": ("own-profiler",),
    "padding": ("padding",),
    "paired-targets": ("broadcast-loss", "elementwise-chain"),
    "periodic-steps": ("periodic-pause",),
    "pinned-allocation": ("blocking-call",),
    "pipeline-bubbles": ("pipeline-bubble",),
    "product-order": ("slow-products", "unfused-attention"),
    "precision-casts": ("casts",),
    "python-in-forward": ("host-python",),
    "rate-as-factor": ("learning-rate-too-small",),
    "python-threads": ("host-python",),
    "recompilation": ("recompilation",),
    "recompiled": ("recompilation",),
    "rebuilt-tensors": ("needless-copies",),
    "recomputation": ("recomputation",),
    "recomputed": ("recomputation",),
    "remade-optimizers": ("lost-state",),
    "replaced-parameters": ("unused-gradients", "no-update"),
    "repeated-backward": ("repeated-backward",),
    "repeated-rows": ("index-backward",),
    "repeated-calls": ("duplicate-forward",),
    "returned-segments": ("device-allocation",),
    "rollouts": ("evaluation",),
    "same-randomness": ("same-randomness",),
    "samples-as-time": ("small-operators",),
    "score-matrices": ("score-matrices",),
    "short-warmup": ("start-up",),
    "single-elements": ("host-python", "small-operators"),
    "skipped-steps": ("skipped-steps",),
    "slow-settings": ("slow-precision", "slow-products"),
    "slow-products": ("slow-products",),
    "small-buckets": ("small-buckets",),
    "small-operators": ("small-operators",),
    "small-grids": ("low-occupancy",),
    "sparse-factors": ("slow-products",),
    "undone-updates": ("undone-update",),
    "unread-rows": ("unused-outputs",),
    "start-up": ("start-up",),
    "straggler": ("straggler",),
    "tensor-copies": ("needless-copies",),
    "too-many-threads": ("thread-oversubscription",),
    "unfused-attention": ("unfused-attention",),
    "unfused-elementwise": ("elementwise-chain",),
    "unfused-optimizer": ("unfused-optimizer",),
    "unregistered-parameters": ("unused-gradients", "no-update"),
    "unused-gradients": ("unused-gradients",),
    "unused-outputs": ("unused-outputs",),
    "unused-parameters": ("find-unused-parameters",),
    "unused-passes": ("skipped-steps",),
    "unused-tensor-cores": ("fp32-products",),
    "vanishing-rate": ("no-update", "learning-rate-too-small"),
    "value-checks": ("host-python",),
    "whole-jacobians": ("repeated-backward",),
    "written-tensors": ("logging",),
}
NAMES = {
    r"garbage|gc\.collect|\bcollect\b": "garbage-collection",
    r"checkpoint|torch\.save|\bsave(_\w+)?\(\)|state_dict": "checkpoint-writing",
    r"evaluat|validat|without gradients|\bgenerate\(\)": "evaluation",
    r"\blog(_\w+)?\(\)|\blog\b|\bprint\b|wandb|add_(scalar|histogram|figure)|savefig"
    r"|_?(stats|metrics?)\(\)|writes pictures|\b[Tt]racker\b": "logging",
    r"loads the next batch|fills a queue": "data-loading",
    r"compiles|dynamo|inductor": "recompilation",
    r"for a metric": "evaluation",
    r"decomposes matrices": "decompositions",
}
"""Names and words in a sentence about host work that show its cause, in addition to its code."""
OF_CODES = {
    "batch-preparation": {
        r"it is many small operators": "small-operators",
        r"reads all of \S+, which grows": "growth",
        r"\.(float|half|double|astype)\b.*take only the drawn rows": "casts",
    },
    "own-python": {r"reads all of \S+, which grows": "growth", r"copies a dataclass with": "needless-copies"},
    "data-input": {r"decompose matrices that are the same in each epoch": "decompositions"},
    # a log that is written whole in each step grows, and the sentence says that it is written
    "growth": {r"writes values as text|writes a file|fills a pandas table": "logging"},
    # the sentence says that a parametrization is computed again, and by which decomposition
    "repeated-calls": {r"by (a matrix exponential|solving a linear system|Householder)": "decompositions"},
}
"""The same of one code alone."""
OF_HOST = ("host-time", "own-python", "periodic-steps", "python-threads")

NEUTRAL = {"unstable-times", "unstable", "throttled-clock", "throttled", "few-samples", "nothing", "unknown"}
"""Codes that do not name a cause in the program."""

SENTENCES = {
    r"^none$": "nothing",
    r"^straggler: rank": "straggler",
    r"^(nothing (was )?found|no straggler)": "nothing",
    r"^cannot be told: .* CUDA graphs recorded as a whole": "graphs-recorded-whole",
    r"^(unknown|cannot be told)": "unknown",
}
"""Codes of sentences that no rule of diagnosis produces."""


@dataclass(frozen=True)
class Case:
    """One program and the truth about it."""

    kind: str
    name: str
    truth: str
    cause: str | None
    also: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    healthy: bool = False
    ranks: int = 1
    command: str = "run"  # for a script that measures itself: python
    requires: tuple[str, ...] = ()
    generation: int = 1  # cases of a later one were planted when the rules had been mended after those before
    place: tuple[str, ...] = ()  # text of the lines, of which a sentence should name one
    share: int | None = None  # percent of the loop's time that goes with the fault, as planted_shares.py measured
    remedy: str = ""
    without: tuple[tuple[str, str], ...] = ()  # replacements of the file's text that remove the fault

    @property
    def path(self) -> Path:
        """Return the file of the case."""
        return FOLDER / "faults" / self.kind / f"{self.name}.py"

    @property
    def places(self) -> tuple[str, ...]:
        """Return the file and number of each line that a sentence may name as the place of the fault."""
        text = self.path.read_text()
        head = text[: text.index("\n}\n", text.index("\nCASE = "))].count("\n") + 2  # CASE quotes these lines
        lines = enumerate(text.splitlines(), 1)
        return tuple(
            f"{self.name}.py:{number}" for number, line in lines if number > head and any(p in line for p in self.place)
        )


@dataclass(frozen=True)
class Answer:
    """Our sentences about a program, each with its code, and all that was printed."""

    sentences: tuple[str, ...]
    codes: tuple[str, ...]
    output: str
    failure: str = ""


@dataclass(frozen=True)
class Verdict:
    """Comparison of an answer with the truth."""

    word: str  # top-1, top-3, missed, wrong, right, false alarm, failed, skipped
    named: tuple[str, ...] = ()  # causes that must not be named, or on a healthy program any
    placed: bool | None = None  # the sentence with the cause names a line of the fault; None where none is declared


def cases(kinds: Iterable[str] = KINDS, patterns: Sequence[str] = ("*",)) -> list[Case]:
    """Return the cases of some kinds, by patterns of their names, as their files declare them."""
    found = []
    for kind in kinds:
        for path in sorted((FOLDER / "faults" / kind).glob("[a-z]*.py")):
            if any(fnmatch(path.stem, pattern) for pattern in patterns):
                found.append(Case(kind, path.stem, **declared(path)))
    return found


def declared(path: Path) -> dict:
    """Return the constant CASE of a file, which is read and not executed."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CASE":
            values = ast.literal_eval(node.value)
            values["without"] = [tuple(pair) for pair in values.get("without", [])]
            words = {*values["also"], *values["never"], *([values["cause"]] if values["cause"] else [])}
            if unknown := words - set(CAUSES):
                raise ValueError(f"{path}: unknown causes {sorted(unknown)}; use those of {FOLDER / 'causes.py'}")
            if values["healthy"] != (values["cause"] is None):
                raise ValueError(f"{path}: a healthy case has no cause, and a fault has one")
            return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    raise ValueError(f"{path}: no constant CASE; declare truth, cause, also, never and healthy")


def ask(case: Case, timeout_s: float = 240.0, keep: Path | None = None) -> Answer:
    """Run the case in a new folder, ask the tool, and return its answer.

    keep: folder for the records and the profile of a script.
    """
    with tempfile.TemporaryDirectory(prefix="diagnosis_truth_") as name:
        folder = Path(name)
        codes = folder / "codes.jsonl"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        paths = (str(FOLDER / "hook"), str(ROOT), os.environ.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DIAGNOSIS_CODES": str(codes)}
        work = folder / "work"
        work.mkdir()

        def python(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, *words]
            return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=timeout_s)

        try:
            if case.kind in ("traces", "snapshots"):
                written = python(str(case.path))
                if written.returncode:
                    return Answer((), (), written.stderr, "the case failed")
                files = sorted(p.name for p in work.iterdir())
                done = python(*TOOL, "analyze" if case.kind == "traces" else "snapshot", *files)
                output = done.stdout + done.stderr
            elif case.command == "python":
                done = python(str(case.path))
                output = done.stderr + done.stdout
                for records in sorted(work.glob("**/records.jsonl")):
                    output = python(*TOOL, "report", str(records.parent)).stdout + output
            else:
                words = [*TOOL, "run", "--out", str(folder / "run"), "--", str(case.path)]
                if case.ranks > 1:
                    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks)]
                    words = [*launcher, "--master-port", str(free_port()), *words]
                done = python(*words)
                output = done.stderr
        except subprocess.TimeoutExpired:
            return Answer((), (), "", f"no answer within {timeout_s:.0f} s")
        made = [json.loads(line) for line in codes.read_text().splitlines()] if codes.exists() else []
        failure = "" if done.returncode == 0 else f"exit status {done.returncode}"
        if keep is not None and (folder / "run").exists():
            shutil.copytree(folder / "run", keep, dirs_exist_ok=True)
        return read_answer(output, made, failure)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_answer(output: str, made: Sequence[dict[str, str]], failure: str = "") -> Answer:
    """Find the sentences in an output, and their codes by the texts of the diagnoses that were made."""
    numbered = re.findall(r"^\d+\. (.*(?:\n {2,}\S.*)*)", output, re.MULTILINE)
    sentences = [" ".join(text.split()) for text in numbered]
    if not sentences:
        paragraphs = re.split(r"\n(?=\S)", output)
        known = [p for p in paragraphs if any(re.search(pattern, p) for pattern in SENTENCES)]
        sentences = [" ".join(text.split()) for text in known] or ["none"]
    codes = [code_of(sentence, made) for sentence in sentences]
    for code, text in re.findall(r"^([a-z][a-z0-9-]+) \(\d+ cells?\): (.*(?:\n.*)?)", output, re.MULTILINE):
        if code not in NEUTRAL:
            sentences.append(f"caveat {code}: " + " ".join(text.split()))
            codes.append(code)
    return Answer(tuple(sentences), tuple(codes), output, failure)


def code_of(sentence: str, made: Sequence[dict[str, str]]) -> str:
    """Return the code of the diagnosis with a cause in the sentence, or the code of a known sentence."""
    found = [d for d in made if d["code"] and " ".join(d["cause"].split()) in sentence]
    if found:
        return max(found, key=lambda d: len(d["cause"]))["code"].replace("_", "-")
    for pattern, code in SENTENCES.items():
        if re.search(pattern, sentence):
            return code
    return "unmapped"


def causes_of(code: str, sentence: str) -> tuple[str, ...]:
    """Return the causes that a sentence with this code names.

    Causes found by names come first; they are more specific.
    """
    text = re.sub(r"\S+\.py:\d+", "", sentence)  # a file is named after its case
    named = [word for pattern, word in NAMES.items() if code in OF_HOST and re.search(pattern, text)]
    named += [word for pattern, word in OF_CODES.get(code, {}).items() if re.search(pattern, text)]
    return (*named, *CODES.get(code, ()))


def judge(case: Case, answer: Answer) -> Verdict:
    """Compare the first three sentences with the truth."""
    if answer.failure and set(answer.codes) <= {"nothing"}:
        return Verdict("failed")
    named = [causes_of(*pair) for pair in zip(answer.codes[:3], answer.sentences, strict=False)]
    if case.healthy:
        alarms = [causes[0] for causes in named if causes and not set(causes) & set(case.also)]
        return Verdict("false alarm", tuple(alarms)) if alarms else Verdict("right")
    forbidden = tuple(causes[0] for causes in named if causes and set(causes) <= set(case.never))
    for number, causes in enumerate(named):
        if case.cause in causes:
            ends = [re.escape(place) + r"(?!\d)" for place in case.places]
            placed = any(re.search(end, answer.sentences[number]) for end in ends) if ends else None
            return Verdict("top-3" if number else "top-1", forbidden, placed)
    return Verdict("wrong" if forbidden else "missed", forbidden)


def recorded() -> list[tuple[Case, Answer]]:
    """Return the cases with kept records of a GPU, and the sentences that they give now."""
    import gzip

    sys.path.insert(0, str(ROOT))
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.record import read_records

    made = []
    for path in sorted(RECORDED.glob("*.jsonl.gz")):
        (case,) = cases((ON_A_GPU,), (path.name.partition(".")[0],))
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            file.write(gzip.decompress(path.read_bytes()))
            file.flush()
            found = diagnose(read_records(file.name)[0]).diagnoses
        made.append((case, Answer(tuple(d.sentence for d in found) or ("none",), tuple(d.code for d in found), "")))
    return made


def run_all(
    chosen: Sequence[Case], jobs: int, done: Callable[[Case, Answer, Verdict], None], save: Path | None = None
) -> None:
    """Run the cases, some at once, and report each when it is done. save: folder for what the scripts left."""

    def one(case: Case) -> tuple[Case, Answer, Verdict]:
        if missing := [need for need in case.requires if not is_here(need)]:
            return case, Answer((), (), "", f"without {', '.join(missing)}"), Verdict("skipped")
        answer = ask(case, keep=save and save / f"{case.kind}-{case.name}")
        return case, answer, judge(case, answer)

    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(one, chosen):
            done(*result)


HOW_RECORDED = """\
Loops on one H200 (two for ranks), by `cs-systems run`, with the sentences that their records give now:
`scripts/benchmarks/diagnosis_truth.py --recorded`.

The 27 programs and their truths were committed before a rule ran on them. First run, when `run` recorded no kernels on
a GPU unless it was asked to: of 18 faults (3 took too long) 4 had their cause first and 8 among three; of 6 healthy
programs 4 had a cause named, in one of them a true one (its updates were lost in bf16; it computes under autocast now).
With a profile by default 9 of the 15 faults that ran again had their cause first. The rules were then made from these
records.

All 27 programs ran again on other machines when the rules had been made, 20 on two hosts and 7 on two others, some next
to other programs: of 21 faults 17 had their cause first and 19 among three, and none of the 6 healthy programs had
one. Missed or second: adam_on_the_host (copies compared by time; by bytes it is found, also on a third machine),
ranks_accumulation_reduces (all-reduces that wait for the other rank's launches filled the gaps), lengths_compiled_anew
(the share of a step outweighed the compilations between the steps), recomputes_with_room. The first three are mended;
the table shows what these records give now. The answers of these runs were not kept.

In recomputes_with_room the recomputation is second: compiling saves more. Its truth only says that it takes a quarter.
In small_layers_eager the third sentence is of the kernels' time, after the step no longer waits for launches. In
average_of_weights_by_name the line of copy.deepcopy is named, which is not among the lines of the truth.

Three truths were wrong, as the replay and the timings show, and were changed: 255 `.item()` calls a step cost by their
own Python, their waits are 3%; 48 synchronisations of a step that waits for launches anyway are 1%; reductions in each
micro-batch take less than 10% between two H200, and the step waits for launches.
torch.compile made healthy_large_products 0.7% slower than its faster and 0.7% faster than its slower run without it
(30.4 ms, 30.3 and 30.7), so that it has nothing to mend."""
GPUS = {"cuda": 1, "two GPUs": 2}


def is_here(need: str) -> bool:
    """Return whether a package is installed, or the GPUs are there."""
    from importlib.util import find_spec

    if need in GPUS:
        import torch

        return torch.cuda.device_count() >= GPUS[need]
    return find_spec(need) is not None


def summary(results: Sequence[tuple[Case, Answer, Verdict]]) -> list[str]:
    """Return the lines of the table by kind of input."""
    lines = ["| input | faults | top-1 | top-3 | forbidden cause named | healthy | with a cause named |"]
    lines.append("| --- | --: | --: | --: | --: | --: | --: |")
    later = sorted({c.generation for c, _, _ in results} - {1})
    for kind in (*KINDS, ON_A_GPU, "all", *(f"generation {number}" for number in later)):
        of_kind = [(c, v) for c, _, v in results if kind in ("all", c.kind, f"generation {c.generation}")]
        of_kind = [(c, v) for c, v in of_kind if v.word != "skipped"]
        faults = [v for c, v in of_kind if not c.healthy]
        healthy = [v for c, v in of_kind if c.healthy]
        first = sum(v.word == "top-1" for v in faults)
        third = first + sum(v.word == "top-3" for v in faults)
        alarms = sum(v.word != "right" for v in healthy)
        if of_kind:
            forbidden = sum(bool(v.named) for v in faults)
            lines.append(f"| {kind} | {len(faults)} | {first} | {third} | {forbidden} | {len(healthy)} | {alarms} |")
    placed = [v.placed for _, _, v in results if v.placed is not None]
    if placed:
        lines += ["", f"The line of the fault stands in {sum(placed)} of {len(placed)} sentences with the true cause."]
    return lines


def page(results: Sequence[tuple[Case, Answer, Verdict]], note: str = "") -> str:
    """Return the whole output in markdown."""
    lines = ["# Do our conclusions name the true cause?", "", *([note, ""] if note else []), *summary(results), ""]
    skipped = [f"{c.name} ({a.failure})" for c, a, v in results if v.word == "skipped"]
    if skipped:
        lines += [f"Skipped: {', '.join(skipped)}.", ""]
    seen = Counter(code for _, answer, _ in results for code in answer.codes[:3])
    unmapped = [f"{code} ({n})" for code, n in seen.most_common() if code not in CODES and code not in NEUTRAL]
    if unmapped:
        lines += [f"Codes without a translation: {', '.join(unmapped)}.", ""]
    for kind in (*KINDS, ON_A_GPU):
        rows = [r for r in results if r[0].kind == kind]
        if rows:
            lines += [f"## {kind}", "", "| case | cause | truth | first sentence | codes | verdict |"]
            lines.append("| --- | --- | --- | --- | --- | --- |")
        for case, answer, verdict in rows:
            first = answer.sentences[0] if answer.sentences else answer.failure or "none"
            word = verdict.word + (f": {', '.join(verdict.named)}" if verdict.named else "")
            word += ", without its line" if verdict.placed is False else ""
            cells = [
                case.name,
                case.cause or "healthy",
                case.truth + (f" Measured: {case.share}%." if case.share is not None else ""),
                shortened(first),
                ", ".join(answer.codes[:3]),
                word,
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def shortened(text: str, length: int = 160) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, ON_A_GPU), default=list(KINDS), help="kinds of input")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="NAME", help="names of cases, or patterns")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once (default: 2)")
    parser.add_argument("--output", type=Path, help="file of the page (default, if all cases run: in profiles/)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep all that the tool printed, and the records")
    parser.add_argument("--recorded", action="store_true", help="judge the kept records of loops on a GPU; run nothing")
    options = parser.parse_args()
    if options.recorded:
        path = options.output or COMMITTED.with_name("gpu.md")
        path.write_text(page([(case, answer, judge(case, answer)) for case, answer in recorded()], HOW_RECORDED))
        print(f"written: {path}")
        return 0
    chosen = cases(options.kinds, options.cases)
    if not chosen:
        parser.error(f"no case matches {' '.join(options.cases)}; cases are named like the files below {FOLDER}")
    if options.output is None and chosen == cases():
        options.output = COMMITTED
    results: list[tuple[Case, Answer, Verdict]] = []

    def done(case: Case, answer: Answer, verdict: Verdict) -> None:
        results.append((case, answer, verdict))
        print(f"{len(results)}/{len(chosen)} {case.kind}/{case.name}: {verdict.word}", file=sys.stderr, flush=True)
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            (options.save / f"{case.kind}-{case.name}.txt").write_text(answer.output)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(page(results))

    run_all(chosen, options.jobs, done, options.save)
    print("\n".join(summary(results)) if options.output else page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
