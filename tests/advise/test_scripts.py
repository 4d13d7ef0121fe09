"""Levers of unedited scripts: edits of their text, hooks in their process, and a search with its diff."""

import ast
import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.advise import edits, in_script, scripts
from cs_systems.advise.answer import Answer, row_of
from cs_systems.advise.judge import GOALS, Judgement
from cs_systems.advise.lever import CODE, Changes, Lever, Proposal, ScriptPlan, Situation, all_levers, proposals
from cs_systems.advise.levers import more_workers, no_sync
from cs_systems.advise.levers.data_loader import WORKERS
from cs_systems.advise.numerics import Check
from cs_systems.advise.ranks import split
from cs_systems.advise.scripts import ScriptBench, changed_files, git_status
from cs_systems.advise.search import Search
from cs_systems.advise.sources import Source, diff, shown_name, sources
from cs_systems.analysis.diagnosis import Answer as DiagnosisAnswer
from cs_systems.analysis.diagnosis import Diagnosis
from cs_systems.cli import _advise_script, main
from cs_systems.cli._advice import try_after_trace, try_command
from cs_systems.cli._advise_script import left
from cs_systems.cli._script import as_started
from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins
from cs_systems.core.caveats import Caveat, recomputed
from cs_systems.measure.runtime.program import script_command
from cs_systems.record import Measurement, Origin, RunRecord, Sample, append_record, read_records
from tests import forked_python, forks
from tests.advise.test_search import CPU, GPU

GPU_LOOPS = Path(__file__).parents[1] / "data" / "gpu_loops"
SCRIPT = '''"""Training as it is often written first."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = DataLoader(
    TensorDataset(torch.randn(512, 8), torch.randint(4, (512,))),
    batch_size=8,
)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
if True:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    for batch, target in data:
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
print("trained to the end")
'''


def forked(options: Any, words: Any) -> list[str]:
    """Return the command that records a script, in a fork: the start of Python takes longer than the script."""
    return script_command(options, words, forked_python.executable())


def bench(tmp_path: Path) -> ScriptBench:
    files = (Source(Path("train.py"), SCRIPT),)
    return ScriptBench(["train.py"], all_levers(), tmp_path, lambda options, words: [], {}, sources=files)


def test_every_edit_gives_a_script_that_compiles_and_has_the_change(tmp_path: Path) -> None:
    applying = (one for one in proposals(Situation(ScriptPlan(), GPU, texts=(SCRIPT,)), all_levers()))
    names = tuple(one.lever for one in applying if not isinstance(one, tuple))
    texts, missing = bench(tmp_path).patched(ScriptPlan(names))
    (text,) = texts.values()
    ast.parse(text)
    assert missing == []
    for line in (
        'torch.set_float32_matmul_precision("high")\n',
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)\n",
        "    model.compile()\n",
        "    batch_size=8, num_workers=",
        "optimizer.zero_grad(set_to_none=True)\n",
        "import gc\n",
        "gc.freeze()\n",
    ):
        assert line in text


def test_edits_do_not_change_calls_that_already_set_the_option() -> None:
    edit = edits.in_calls(("AdamW",), {"fused": "True"}, ("foreach",))
    assert edit("AdamW(p, foreach=True)\n") is None
    assert edit("AdamW(p, **options)\n") is None
    assert edit("AdamW()\n") == "AdamW(fused=True)\n"
    assert edit("x = 'é', AdamW(p,)\n") == "x = 'é', AdamW(p, fused=True)\n"
    assert edits.before_optimizer("{model}.compile()")("optimizer = AdamW(groups)\n") is None
    assert edits.after_imports("gc.freeze()", needs="gc")("x = 1\n") is None


def test_a_model_may_make_its_own_optimizer() -> None:
    edit, line = edits.before_optimizer("{model}.compile()"), "self.optimizer = model.configure_optimizers(config)\n"
    assert edit(f"{line}loss = model(x)\n") == f"model.compile()\n{line}loss = model(x)\n"
    assert edit(line) is None  # perhaps no model, because nothing calls it
    assert edit("from nets import GPT\nmodel = GPT()\nopt = GPT.configure_optimizers(model)\n") is None


def test_a_lever_takes_the_place_of_another() -> None:
    compiled, graphs = ScriptPlan(("tf32", "compile")), ScriptPlan(("tf32", "reduce_overhead"))
    to_graphs, to_compile = (
        {one[0] if isinstance(one, tuple) else one.lever: one for one in proposals(situation, all_levers())}
        for situation in (Situation(cell, GPU, texts=(SCRIPT,)) for cell in (compiled, graphs))
    )
    assert to_compile["compile"] == ("compile", "reduce_overhead compiles the model already")
    assert isinstance(option := to_graphs["reduce_overhead"], Proposal)
    assert option.cell == graphs


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "loaded\nTraceback …\nValueError: no data\ncs-systems: nothing was recorded, because …",
            "ValueError: no data",
        ),
        (
            "usage: train.py [-h]\ntrain.py: error: --name is required\n"
            "cs-systems: nothing was recorded, because the script ended with exit status 2 before its first backward "
            "pass; correct its error\n",
            "the script ended with exit status 2 before its first backward pass; "
            "its last line is: train.py: error: --name is required",
        ),
        (
            "42\ncs-systems: nothing was recorded, because the script ran no backward pass",
            "the script ran no backward pass",
        ),
        ("", "it ended and printed nothing"),
    ],
)
def test_reason_of_a_script_that_cannot_be_measured_is_its_own_error(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(log)
    assert scripts._why_missing(tmp_path) == reason


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ('RuntimeError: from user code: File "{here}/sub/train.py", line 198', 'File "sub/train.py", line 198'),
        ('cs-systems: nothing was recorded, because File "{here}/train.py"', 'File "train.py"'),
        ('RuntimeError: File "{here}-other/train.py"', 'File "{here}-other/train.py"'),
    ],
)
def test_paths_of_a_reason_are_relative_to_the_current_folder(
    log: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text(log.format(here=tmp_path))
    assert scripts._why_missing(tmp_path).endswith(reason.format(here=tmp_path))


@pytest.mark.parametrize("of_record", ["", scripts.SAMPLED])
def test_reason_in_the_record_of_a_process_is_told(of_record: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").touch()
    (folder := tmp_path / of_record).mkdir(exist_ok=True)
    append_record(folder, RunRecord("k", RunConfig().to_dict(), "error", reason="the loop ended; give --steps 1:3"))
    assert scripts._why_missing(tmp_path) == "the loop ended; give --warmup 1 --steps 2"


SHORT = """import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_ends_in_its_warm_up_says_so_and_names_the_options_that_measure_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SHORT)
    monkeypatch.chdir(tmp_path)
    options = {"name": "train", "warmup": 5, "steps": 30, "stop": True, "profile": "none"}
    made = ScriptBench(["train.py"], all_levers(), tmp_path / "out", forked, options)
    reason = (
        "the loop ended after 3 of 5 warm-up steps; let it run for at least 35 steps, or time fewer steps: "
        "--warmup 1 --steps 2"
    )
    assert made.measure(ScriptPlan(), 0).reason == reason
    made = replace(made, options=options | {"warmup": 1, "steps": 2}, folder=tmp_path / "again")
    assert made.measure(ScriptPlan(), 0).status == "ok"


def test_status_of_git_leaves_out_the_folder_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_status(Path("out")) is None
    subprocess.run(["git", "init", "-q"], check=True)
    Path("train.py").touch()
    before = git_status(Path("out"))
    for name in ("out/records.jsonl", "new.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    for records in (Path("out"), tmp_path / "out"):
        assert git_status(records) == {"?? train.py", "?? new.txt"}
    assert before == {"?? train.py"}
    assert git_status(tmp_path.parent) == {"?? train.py", "?? new.txt", "?? out/"}


def test_new_and_deleted_and_edited_files_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    for name in ("kept.txt", "deleted.txt", "staged.txt"):
        Path(name).write_text("before")
    subprocess.run(["git", "add", "staged.txt"], check=True)
    before = git_status(Path("out"))
    assert changed_files(before, git_status(Path("out"))) == []
    Path("new file.txt").touch()
    Path("staged.txt").write_text("after")
    Path("deleted.txt").unlink()
    changed = changed_files(before, git_status(Path("out")))
    assert changed == ['"new file.txt"', "deleted.txt", "staged.txt"]
    assert changed_files(None, before) == changed_files(before, None) == []


def test_a_diff_can_be_applied(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("a = 1\nb = 2")
    text = diff("train.py", "a = 1\nb = 2", "a = 1\nb = 3")
    subprocess.run(["git", "apply", "-"], input=text.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == "a = 1\nb = 3"


def test_command_tries_the_first_remedy_that_has_a_lever() -> None:
    unknown = Diagnosis("c", "r", 1.0, code="straggler")
    answer = DiagnosisAnswer((unknown, Diagnosis("c", "r", 1.0, code="unfused-optimizer")))
    words = try_command(answer, script=["train.py", "--lr", "1"])
    assert words == ["cs-systems", "advise", "--levers", "fused_optimizer", "--", "train.py", "--lr", "1"]
    memory = DiagnosisAnswer((Diagnosis("c", "r", 1.0, unit="bytes", code="kept-activations"),))
    assert try_command(memory, ["--size", "small"])[2:6] == ["--size", "small", "--goal", "memory"]
    assert try_command(DiagnosisAnswer((unknown,))) == []
    codes = {name.replace("_", "-") for name in plugins.names("diagnosis")}
    assert {code for lever in all_levers().values() for code in lever.remedies} <= codes


EVALUATION = """import torch

def validate(model, batches):
    for batch in batches:
        model(batch)
"""


@pytest.mark.parametrize(("text", "levers"), [("plt.pause(0.1)\n", []), (EVALUATION, ["evaluation_without_gradients"])])
def test_command_after_a_script_has_only_levers_that_apply_to_it(
    text: str, levers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = DiagnosisAnswer((Diagnosis("c", "r", 1.0, code="periodic-steps"),))
    record = RunRecord("", RunConfig(workload="loop train").to_dict(), "ok", environment=CPU)
    words = ["cs-systems", "advise", "--levers", "evaluation_without_gradients", "--", "train.py"]
    assert try_command(answer, script=["train.py"], record=record) == words, "its text cannot be read"
    Path("train.py").write_text(text)
    assert try_command(answer, script=["train.py"], record=record) == (words if levers else [])


@pytest.mark.parametrize(
    ("here", "words"), [("2", ["torchrun", "--nproc-per-node", "2", "train.py"]), ("1", []), (None, [])]
)
def test_command_after_a_job_of_ranks_starts_the_ranks(
    here: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_started(["train.py"]) == ["train.py"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert as_started(["train.py"]) == words
    answer = DiagnosisAnswer((Diagnosis("c", "r", 1.0, code="small-buckets"),))
    assert try_command(answer, script=words)[4:] == (["--", *words] if words else [])


def test_command_after_a_trace_names_its_cell_or_its_script() -> None:
    answer = DiagnosisAnswer((Diagnosis("c", "r", 1.0, code="launch-bound"),))
    start = ["cs-systems", "advise"]
    assert try_after_trace(answer, None) == [*start, "--levers", "compile", "reduce_overhead", "--", "YOUR_SCRIPT.py"]
    cell = RunRecord("", RunConfig(profiler="kineto").to_dict(), "ok")
    words = try_after_trace(answer, cell)
    assert words[2:4] == ["--size", "small"]
    assert words[-3:] == ["--levers", "compile", "cuda_graph"]
    loop, levers = replace(cell, config=RunConfig(workload="loop train").to_dict()), ("compile", "reduce_overhead")
    for given, script in (("-- train.py --lr 1", ["--", "train.py", "--lr", "1"]), ("-- -m train", [])):
        recorded = replace(loop, origin=Origin(1.0, f"cs-systems run --steps 2:8 {given}"))
        assert try_after_trace(answer, recorded) == ([*start, "--levers", *levers, *script] if script else [])
    assert try_after_trace(answer, loop) == []


NO_MODELS = "import re as r\nfrom re import compile as c\nr.compile(TEXT)\nc(TEXT)\ntemplates.compile(f'{TEXT}')\n"


@pytest.mark.parametrize("environment", [GPU, CPU], ids=["gpu", "cpu"])
def test_levers_of_a_script_apply_or_have_a_reason(environment: object) -> None:
    situation = Situation(ScriptPlan(), environment, texts=(SCRIPT,))  # type: ignore[arg-type]
    found = [*proposals(situation, all_levers())]
    reasons = {one[0]: one[1] for one in found if isinstance(one, tuple)}
    applying = {one.lever for one in found if not isinstance(one, tuple)}
    other = Situation(ScriptPlan(), environment, texts=(SCRIPT, NO_MODELS))  # type: ignore[arg-type]
    assert "compile" in {one.lever for one in proposals(other, all_levers()) if not isinstance(one, tuple)}
    assert {"fused_optimizer", "data_loader", "compile", "zero_grad", "garbage_collection"} <= applying
    assert reasons["channels_last"] == "the script names no model of images"
    assert ("tf32" in applying) == (environment is GPU)
    assert reasons["batch_size"] == "it cannot be applied to a script from outside"


@pytest.mark.parametrize(("name", "waits"), [("small_layers_eager", 0.93), ("fp32_language_model", 0.0)])
def test_levers_that_only_shorten_kernels_come_last_where_the_step_waits_for_launches(
    name: str, waits: float, tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_bytes(gzip.decompress((GPU_LOOPS / f"{name}.jsonl.gz").read_bytes()))
    timed = read_records(tmp_path)[0][0]
    found = [*proposals(Situation(ScriptPlan(), GPU, (timed,), texts=(SCRIPT,)), all_levers())]
    usual = {one.lever: one.usual for one in found if not isinstance(one, tuple)}
    for lever in ("bf16", "tf32"):
        assert usual[lever] == pytest.approx((1 - waits) * all_levers()[lever].usual, rel=0.1)
    assert usual["fused_optimizer"] == all_levers()["fused_optimizer"].usual


IN_STEPS = {
    "fused_optimizer": "the optimizer takes 0.5% of the step",
    "data_loader": "waiting for a batch or its copy takes 0.0% of the step",
    "garbage_collection": "collections take 0.4% of the steps",
    "persistent_workers": "no timed step starts the workers again",
    "called_collections": "collections take 0.4% of the steps, and no timed step calls cudaMalloc",
    "allocator": "no timed step calls cudaMalloc",
}
WITH_WORKERS = "import gc\ngc.collect()\nDataLoader(data, num_workers=2)\n"


@pytest.mark.parametrize("takes_part", [True, False])
@pytest.mark.parametrize("name", IN_STEPS)
def test_lever_of_a_part_that_takes_no_time_is_not_tried(name: str, takes_part: bool) -> None:
    """Before the start is measured each of them applies; then it depends on what the steps did."""
    source = WITH_WORKERS if name in ("persistent_workers", "called_collections") else SCRIPT
    lever = all_levers()[name].script
    assert lever is not None
    assert lever.unfit(Situation(ScriptPlan(), GPU, texts=(source,))) is None
    phases = {"input": 0.02, "optimizer": 0.01} if takes_part else {"input": 0.0, "optimizer": 0.0005}
    samples = [Sample(0, False, 0.1, phases, phases) for _ in range(4)]
    row: Any = {"steps": 4, "collections": 1, "time_s": 0.4 if takes_part else 0.0016, "in_steps": 1}
    row |= {"longest_s": 0.1, "total_s": 0.4, "function": None, "place": None, "is_called": takes_part}
    results: Any = {"garbage_collection": [row]}
    results |= {"iterators": [{"steps": 4, "with_new": 1}]} if takes_part else {}
    warnings = (Caveat("cudaMalloc", "3 calls", "raise --warmup"),) if takes_part else ()
    measurement = Measurement("cuda_event", samples, 0.1)
    config = RunConfig(workload="loop train").to_dict()
    record = RunRecord("", config, "ok", measurement=measurement, results=results, warnings=warnings)
    situation = Situation(ScriptPlan(), GPU, (record,), texts=(source,))
    assert lever.unfit(situation) == (None if takes_part else IN_STEPS[name])


DDP_OF_NET = "from torch.nn.parallel import DistributedDataParallel as DDP\nself.net = DDP(self.net)\n"
EDITS = {
    "anomaly_detection": (
        "torch.autograd.set_detect_anomaly(True)\nwith torch.autograd.detect_anomaly():\n"
        "    fit(detect_anomaly=True)\n",
        "torch.autograd.set_detect_anomaly(False)\nwith torch.autograd.set_detect_anomaly(False):\n"
        "    fit(detect_anomaly=False)\n",
    ),
    "called_collections": (
        "for x in loader:\n    step(x)\n    gc.collect()\n    if big:\n        torch.cuda.empty_cache()\n"
        "x = 1; gc.collect()\n",
        "for x in loader:\n    step(x)\n    if big:\n        pass\nx = 1; pass\n",
    ),
    "checkpointing": (
        "from torch.utils import checkpoint as c\n"
        "y = c.checkpoint(a, c.checkpoint(b, x, use_reentrant=False), mask=m)\n"
        "Arguments(gradient_checkpointing=True)\n",
        "from torch.utils import checkpoint as c\ny = a(b(x), mask=m)\nArguments(gradient_checkpointing=False)\n",
    ),
    "data_loader": (
        "DataLoader(data, num_workers=0)\nDataLoader(data, 4, True, None, None, 2)\nDataLoader(*parts)\n",
        f"DataLoader(data, num_workers={WORKERS})\nDataLoader(data, 4, True, None, None, 2)\nDataLoader(*parts)\n",
    ),
    "more_workers": (
        "DataLoader(data, num_workers=3)\nDataLoader(data, num_workers=True)\n",
        f"DataLoader(data, num_workers={more_workers.more_than(3)})\nDataLoader(data, num_workers=True)\n",
    ),
    "persistent_workers": (
        "DataLoader(a, num_workers=n)\nDataLoader(b, num_workers=0)\nDataLoader(c, num_workers=2 if n else 0)\n",
        "DataLoader(a, num_workers=n, persistent_workers=n > 0)\nDataLoader(b, num_workers=0)\n"
        "DataLoader(c, num_workers=2 if n else 0, persistent_workers=(2 if n else 0) > 0)\n",
    ),
    "dynamic_shapes": (
        "a = torch.compile(a, dynamic=False)\nb = torch.compile(b)\nre.compile('x')\n",
        "a = torch.compile(a, dynamic=True)\nb = torch.compile(b, dynamic=True)\nre.compile('x')\n",
    ),
    "evaluation_without_gradients": (
        "import torch\nclass T:\n    def validate(self, x):\n        return self.net(x).item()\n"
        "@torch.no_grad()\ndef evaluate(x):\n    return net(x)\ndef train(x):\n    net.eval()\n    net(x).backward()\n",
        "import torch\nclass T:\n    @torch.no_grad()\n    def validate(self, x):\n        return self.net(x).item()\n"
        "@torch.no_grad()\ndef evaluate(x):\n    return net(x)\ndef train(x):\n    net.eval()\n    net(x).backward()\n",
    ),
    "no_sync": (
        DDP_OF_NET + "for _ in range(n + 1):\n    self.net(x).backward()\nopt.step()\n"
        "for i, x in enumerate(data):\n    self.net(x).backward()\n    if (i + 1) % 4 == 0:\n        opt.step()\n",
        DDP_OF_NET + "for micro_step in range(n + 1):\n"
        "    self.net.require_backward_grad_sync = micro_step == (n + 1) - 1\n    self.net(x).backward()\nopt.step()\n"
        "for i, x in enumerate(data):\n    self.net.require_backward_grad_sync = (i + 1) % 4 == 0\n"
        "    self.net(x).backward()\n    if (i + 1) % 4 == 0:\n        opt.step()\n",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_patch_changes_only_the_places_that_it_is_for(name: str) -> None:
    before, after = EDITS[name]
    script = all_levers()[name].script
    assert script is not None
    assert script.patch is not None
    assert script.patch(before) == after
    assert script.patch("import torch\nfor batch in data:\n    train(batch)\n") is None


HARMLESS = {
    "anomaly_detection": "def detect_anomaly(series): ...\ndetect_anomaly(x)\n",
    "called_collections": "collect = gc.collect\nx = gc.collect()\n",
    "checkpointing": "import torch.utils.data\ncheckpoint(model, 'a.pt')\nself.checkpoint(epoch)\n",
    "evaluation_without_gradients": (
        "import torch\ndef metric_loss(a, b):\n    return a - b\ndef train(m):\n    m(1).backward()\n"
        "def main():\n    model.eval()\n    train(model)\n"
        "class Average:\n    def __init__(self, model):\n        self.net = copy(model).eval()\n"
        "        for p in self.net.parameters():\n            p.requires_grad_(False)\n"
        "def get_eval_model(net):\n    while net.is_wrapped:\n        net = net.module\n    return net.eval()\n"
        "def validate_range(low, high):\n    if low > high:\n        raise ValueError(low)\n"
        "def test_resnet(**options):\n    return build('test_resnet', **options)\n"
        "def kernel_valid(sizes):\n    for size in sizes:\n        assert size % 2\n"
    ),
    "no_sync": DDP_OF_NET + "for i in range(9):\n    self.net(x).backward()\n    opt.step()\n"
    "for k in range(3):\n    other(x).backward()\nopt.step()\n",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_patch_leaves_what_only_looks_alike(name: str) -> None:
    script = all_levers()[name].script
    assert script is not None
    assert script.patch is not None
    assert script.patch(HARMLESS[name]) is None


OTHER_LAST_PASS = [  # bodies of `for i in …` with self.net(x).backward()
    ("enumerate(data)", "opt.step()\nif i % 100 == 0: scheduler.step()", ""),
    ("enumerate(data)", "scaler.step(opt)\nif (i + 1) % 4 == 0: prof.step()", ""),
    ("enumerate(data)", "if (i + 1) % 4 == 0 and rank == 0: opt.step()", ""),
    ("enumerate(data)", "if (i + 1) % 4 == 0: opt.step()", "opt.step()"),
    ("enumerate(data)", "if (i + 1) % 4 == 0: opt.step()\nelse: opt.step()", ""),
    ("enumerate(data)", "i += 1\nif i % 4 == 0: opt.step()", ""),
    ("enumerate(data)", "for y in x: n += 1\nif n % 4 == 0: opt.step()", ""),
    ("enumerate(data)", "if (n := n + 1) % 4 == 0: opt.step()", ""),
    ("enumerate(data)", "if done: break\nif (i + 1) % 4 == 0: opt.step()", ""),
    ("range(1000)", "update(opt)", ""),
    ("range(9)", "opt.zero_grad()", "opt.step()"),
    ("range(9)", "if late: break", "opt.step()"),
    ("range(*bounds)", "pass", "opt.step()"),
    ("range(n)", "n -= 1", "opt.step()"),
    ("range(draw())", "pass", "opt.step()"),
]


@pytest.mark.parametrize(("over", "body", "after"), OTHER_LAST_PASS)
def test_loop_whose_last_pass_is_not_known_keeps_all_its_averages(over: str, body: str, after: str) -> None:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    source = f"{DDP_OF_NET}for i in {over}:\n    self.net(x).backward()\n{lines}{after}\n"
    assert no_sync.patch(source) is None


@pytest.mark.parametrize(
    ("loop", "is_last"),
    [
        ("for i in range(n or 4):\n    self.net(x).backward()\nscaler.step(self.opt)\n", "i == (n or 4) - 1"),
        (
            "for i, x in data:\n    self.net(x).backward()\n    if not (i + 1) % n: opt.step(); scheduler.step()\n",
            "not (i + 1) % n",
        ),
    ],
)
def test_last_pass_is_the_one_before_the_update(loop: str, is_last: str) -> None:
    text = no_sync.patch(DDP_OF_NET + loop)
    assert text is not None
    assert f"    self.net.require_backward_grad_sync = {is_last}\n" in text


def test_loops_without_room_for_a_line_are_left() -> None:
    named = "for _ in range(4):\n    self.net(x).backward()\n    print(_)\nopt.step()\n"
    decorated = "for i in range(4):\n    @once\n    def f(): ...\n    self.net(x).backward()\nopt.step()\n"
    for loop in (named, decorated, "for i in range(4): self.net(x).backward()\nopt.step()\n"):
        assert no_sync.patch(DDP_OF_NET + loop) is None


def test_patches_keep_what_shares_a_line_and_the_script_s_own_names() -> None:
    levers = {name: lever.script for name, lever in all_levers().items() if lever.script}
    anomaly, collections, checkpoint, evaluation, _ = (levers[name].patch or str for name in HARMLESS)
    assert collections("gc.collect(); model.train()\n") == "pass; model.train()\n"
    assert collections("gc.collect(); torch.cuda.empty_cache()\n") == "pass; pass\n"
    assert collections("a = '\\x0c'  # \x0c\ngc.collect()  # now\ny = 2\n") == "a = '\\x0c'  # \x0c\ny = 2\n"
    autograd = "from torch import autograd\nautograd.set_detect_anomaly({})\n"
    assert anomaly(autograd.format(True)) == autograd.format(False)
    direct = "from torch.utils.checkpoint import checkpoint as again\ny = {}\n"
    assert checkpoint(direct.format("again(block, x, use_reentrant=False)")) == direct.format("block(x)")
    assert checkpoint(direct.format("again(*parts)")) is None
    assert evaluation("import torch\nclass T:\n\tdef test(self): ...\n") == (
        "import torch\nclass T:\n\t@torch.no_grad()\n\tdef test(self): ...\n"
    )
    assert evaluation("import torch as th\ndef test(): ...\n") is None
    called = "import torch\ndef test(m):\n    m(1)\nwith torch.no_grad():\n    test(m)\n"
    assert evaluation(called) is None
    assert evaluation(called + "test(m)\n") is not None
    assert evaluation("import torch\ndef load(m):\n    m.eval()\ndef eval_text(x):\n    return eval(x)\n") is None


def test_keywords_are_added_before_a_comment_and_with_the_line_ends_of_the_file() -> None:
    edit = edits.in_calls(("AdamW",), {"fused": "True"})
    assert edit("o = AdamW(\n    p,\n    lr=1,  # rate\n)\n") == "o = AdamW(\n    p,\n    lr=1, fused=True  # rate\n)\n"
    assert edit("o = AdamW(\n    p  # all\n)\n") == "o = AdamW(\n    p, fused=True  # all\n)\n"
    assert edits.after_imports("x = 1")("import gc\r\ny = 2\r\n") == "import gc\r\n\r\nx = 1\r\ny = 2\r\n"


def test_search_reads_the_own_modules_of_a_script_and_patches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "project/train.py": "import torch\nfrom parts import model\nfrom parts.data import load\nimport lib\n",
        "project/parts/__init__.py": "",
        "project/parts/model.py": "import torch\n\ndef make(p):\n    return torch.optim.AdamW(p)\r\n",
        "project/parts/data.py": "from . import text\n\ndef evaluate(model):\n    return model(1)\n",
        "project/parts/text.py": "import torch\n\ndef evaluate(model):\n    return model(1)\n",
        "project/parts/unused.py": "",
        "lib.py": "optimizer = AdamW(p)\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = sources(Path("train.py"))
    assert [each.path.name for each in found] == ["train.py", "__init__.py", "model.py", "data.py", "text.py"]
    made = ScriptBench(["train.py"], all_levers(), tmp_path, lambda options, words: [], {}, sources=found)
    plan = ScriptPlan(("garbage_collection", "fused_optimizer", "evaluation_without_gradients"))
    changed, missing = made.patched(plan)
    assert ([file.name for file in changed], missing) == (["train.py", "model.py", "text.py"], [])
    texts_before = {each.path: each.text for each in found}
    patch = "".join(diff(shown_name(file), texts_before[file], text) for file, text in changed.items())
    subprocess.run(["git", "apply", "-"], input=patch.encode(), check=True)  # below the repository's top
    assert {file.read_bytes().decode() for file in changed} == {*changed.values()}


MODULE = "import torch\n\ndef evaluate():\n    return torch.is_grad_enabled()\n"


def test_text_of_a_module_is_changed_where_no_hook_applies_the_lever(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(MODULE)
    program = (
        "from cs_systems.advise import in_script\n"
        f"in_script.edit_modules(['evaluation_without_gradients'], [{str(tmp_path / 'checks.py')!r}])\n"
        "import checks\nassert not checks.evaluate()\n"
    )
    done = forks.python("-c", f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + program)
    assert done.returncode == 0, done.stderr


def test_ranks_are_started_by_the_launcher_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, words = split(["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "1"])
    assert launcher == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert words == ["train.py", "--lr", "1"]
    assert split(["python3", "-m", "torch.distributed.run", "--standalone", "train.py"])[0][3:] == ["--standalone"]
    assert split(["train.py", "torchrun"]) == ([], ["train.py", "torchrun"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="inside of a job of ranks, and starts the ranks itself; write cs-systems advise --"
    ):
        split(["train.py"])


RANKED = """from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(
    net,
    find_unused_parameters=True,  # as before
)
"""


def test_levers_of_ranks_change_the_options_of_the_wrapper() -> None:
    names = ("bucket_size", "gradient_views", "searched_parameters", "static_graph")
    situation = Situation(ScriptPlan(), CPU, texts=(RANKED,), has_ranks=True)
    assert {*names} <= {one.lever for one in proposals(situation, all_levers()) if not isinstance(one, tuple)}
    files = (Source(Path("train.py"), RANKED),)
    made = ScriptBench(["train.py"], all_levers(), Path(), lambda options, words: [], {}, sources=files)
    (text,) = made.patched(ScriptPlan(names))[0].values()
    added = (
        "find_unused_parameters=False, bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True  # as before"
    )
    assert text == RANKED.replace("find_unused_parameters=True,  # as before", added)
    alone = [*proposals(replace(situation, has_ranks=False), all_levers())]
    assert {one[1] for one in alone if isinstance(one, tuple) and one[0] in names} == {"the script runs as one process"}
    small = "DistributedDataParallel(net, bucket_cap_mb=args.size)\n"
    lever = all_levers()["bucket_size"].script
    assert lever is not None
    assert lever.patch is not None
    assert lever.patch(small) == small.replace("args.size", "100")
    assert lever.unfit(replace(situation, texts=(small,))) is None
    assert lever.unfit(replace(situation, texts=(lever.patch(small),))) == "the buckets are as large already"
    averaged = replace(situation, texts=(RANKED + "model.no_sync()\n",))
    (reason,) = [one[1] for one in proposals(averaged, all_levers()) if isinstance(one, tuple) and one[0] == names[3]]
    assert reason == "the script leaves out the average in some passes, so that the graph is not the same"


def test_memory_is_reduced_by_few_levers_of_a_script() -> None:
    situation = Situation(ScriptPlan(), GPU, texts=(SCRIPT,), goal="memory")
    applying = {one.lever for one in proposals(situation, all_levers()) if not isinstance(one, tuple)}
    assert applying == {"bf16", "compile", "fused_optimizer", "zero_grad"}


def test_lines_of_an_edited_script_keep_their_numbers() -> None:
    source = "import torch\n\ndef evaluate():\n    return 1 / 0\n\nevaluate()\n"
    code = in_script.compiled(["evaluation_without_gradients"], source, "train.py")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(code, {})
    lines = [entry.lineno + 1 for entry in caught.traceback if str(entry.path).endswith("train.py")]
    assert lines == [6, 4]


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("anomaly_detection", "", "the script does not switch anomaly detection on"),
        ("called_collections", "gc.freeze()", "the script calls no gc.collect()"),
        ("checkpointing", "", "the script recomputes nothing"),
        ("data_loader", "DataLoader(data, num_workers=4)", "the script sets num_workers itself"),
        ("compile", "from torch import compile as c\nmodel = c(model)", "the script calls torch.compile itself"),
        ("compile", "self.net.compile(mode='default')", "the script calls torch.compile itself"),
        (
            "more_workers",
            "class Stream(IterableDataset): ...\nDataLoader(Stream(), num_workers=2)",
            "each worker would read the whole IterableDataset, unless it is divided among them",
        ),
        ("fused_optimizer", "AdamW(p, foreach=True)", "the script sets foreach=True itself"),
        (
            "fused_optimizer",
            "Adam(p, lr, foreach=args.foreach)\nopt.SGD(q, foreach=False, differentiable=True)\nSGD(r, foreach=False)",
            "the script sets foreach=args.foreach and foreach=False and differentiable=True itself",
        ),
        ("persistent_workers", "DataLoader(data, num_workers=0)", "the script has no workers"),
        ("more_workers", "DataLoader(data)", "the script has no workers"),
        ("dynamic_shapes", "re.compile('x')", "the script compiles no model"),
        ("evaluation_without_gradients", "import torch", "no function evaluates with gradients"),
        ("threads", "torch.set_num_threads(8)", "the number of threads is set already"),
    ],
)
def test_lever_that_has_nothing_to_change_says_so(name: str, source: str, reason: str) -> None:
    situation = Situation(ScriptPlan(), CPU, texts=(source,))
    assert dict(one for one in proposals(situation, all_levers()) if isinstance(one, tuple))[name] == reason


@pytest.mark.parametrize("waited_s", [0.5, 0.95])
def test_levers_of_the_computation_wait_for_those_of_the_loader(waited_s: float) -> None:
    """Order the options of a loop by the share of its step that each may shorten, and leave out those of a tenth."""
    phases_s = {"input": waited_s, "forward": 1 - waited_s}
    measured = Measurement("monotonic", (Sample(0, False, 1.0, phases_s, phases_s),) * 10, 0.0)
    config = RunConfig(workload="loop mine", device="cpu", warmup=0, steps=10).to_dict()
    record = RunRecord("", config, "ok", measurement=measured)
    sampled = replace(record, results={"ran": [{"precision": "fp32"}]})
    texts = ("model = torch.nn.Linear(2, 2)\nDataLoader(data)\nAdamW(model.parameters())",)
    found = list(proposals(Situation(ScriptPlan(), GPU, (record,), sampled=sampled, texts=texts), all_levers()))
    usual = {one.lever: one.usual for one in found if isinstance(one, Proposal)}
    reasons = dict(one for one in found if isinstance(one, tuple))
    if waited_s == 0.5:
        assert usual["data_loader"] > usual["bf16"] == 0.2
    else:
        assert usual["data_loader"] > 0.9
        assert reasons["bf16"] == reasons["compile"] == "the step waits for its batches 95% of the time"


def test_levers_of_named_causes_and_of_steps_that_seldom_wait_are_tried() -> None:
    usual, waiting = ({"input": waited_s, "forward": 0.1} for waited_s in (0.01, 1.2))
    config = RunConfig(workload="loop mine", device="cpu", warmup=0, steps=10).to_dict()
    results: Any = {"anomaly_detection": [{"passes": 10, "with_detection": 10}]}

    def reasons(waits: int) -> dict[str, str]:
        phases = [waiting] * waits + [usual] * (10 - waits)
        samples = tuple(Sample(0, False, sum(each.values()), each, each) for each in phases)
        record = RunRecord("", config, "ok", measurement=Measurement("monotonic", samples, 0.0), results=results)
        texts = ("torch.autograd.set_detect_anomaly(True)\nmodel = torch.nn.Linear(2, 2)",)
        found = proposals(Situation(ScriptPlan(), GPU, (record,), texts=texts), all_levers())
        return dict(one for one in found if isinstance(one, tuple))

    assert not {"compile", "anomaly_detection"} & reasons(1).keys(), "one long wait is none of a usual step"
    assert "compile" in reasons(9)
    assert "anomaly_detection" not in reasons(9), "the diagnosis names it"


@pytest.mark.parametrize(
    ("name", "source", "ran"),
    [
        ("compile", "if args.compile: model = torch.compile(model)", {"precision": "fp32"}),
        ("bf16", "parser.add_argument('--dtype', choices=['float32', 'bfloat16'])", {"precision": "tf32"}),
        ("tf32", "if args.fast: torch.backends.cuda.matmul.allow_tf32 = True", {"precision": "fp32"}),
    ],
)
def test_lever_that_the_script_names_and_does_not_use_is_tried(name: str, source: str, ran: dict[str, Any]) -> None:
    used = {"precision": "bf16", "compiled_graphs": 1}
    tried = []
    for row in (ran, used):
        record = RunRecord("", RunConfig().to_dict(), "ok", results={"ran": [row]})
        found = proposals(Situation(ScriptPlan(), GPU, texts=(source,), history=(record,)), all_levers())
        tried.append(name in {one.lever for one in found if not isinstance(one, tuple)})
    assert tried == [True, False]


@pytest.mark.parametrize(
    ("warnings", "compiled", "is_tried"), [((), 0, False), ((recomputed(0.3),), 0, True), ((), 1, True)]
)
def test_checkpoints_are_taken_away_only_where_backward_repeats_forward(
    warnings: tuple[Caveat, ...], compiled: int, is_tried: bool
) -> None:
    """Believe the measured steps: a library names checkpoints that only an option switches on."""
    results = {"ran": [{"compiled_graphs": compiled}]}
    record = RunRecord("", RunConfig().to_dict(), "ok", results=results, warnings=warnings)
    texts = ("from torch.utils.checkpoint import checkpoint\nif self.saves: x = checkpoint(block, x)",)
    found = proposals(Situation(ScriptPlan(), GPU, texts=texts, history=(record,)), all_levers())
    assert ("checkpointing" in {one.lever for one in found if isinstance(one, Proposal)}) == is_tried


def test_fused_optimizer_is_tried_where_one_optimizer_has_no_other_form() -> None:
    source = "AdamW(p, foreach=True)\nSGD(q)\n"
    (found,) = proposals(
        Situation(ScriptPlan(), CPU, texts=(source,)), {"fused_optimizer": all_levers()["fused_optimizer"]}
    )
    assert isinstance(found, Proposal)
    script = all_levers()["fused_optimizer"].script
    assert script is not None
    assert script.patch is not None
    assert script.patch(source) == "AdamW(p, foreach=True)\nSGD(q, fused=True)\n"


def test_text_with_a_lever_that_has_no_hook_is_what_runs() -> None:
    before, after = EDITS["evaluation_without_gradients"]
    assert in_script.edited(["evaluation_without_gradients", "anomaly_detection"], before) == after
    assert in_script.edited(["anomaly_detection"], EDITS["anomaly_detection"][0]) == EDITS["anomaly_detection"][0]


HOOKS = """
import gc, torch
from torch import nn
from torch.utils.data import DataLoader
from cs_systems.advise import in_script
from cs_systems.advise.levers.more_workers import more_than
told = in_script.apply(["fused_optimizer", "data_loader", "zero_grad", "garbage_collection", "channels_last",
    "anomaly_detection", "called_collections", "checkpointing", "dynamic_shapes", "threads"], 5)
torch.autograd.set_detect_anomaly(True)
assert not torch.is_anomaly_enabled() and gc.collect() == 0
from torch.utils.checkpoint import checkpoint
assert checkpoint(max, 1, 2, use_reentrant=False) == 2
threads = torch.get_num_threads()
torch.set_num_threads(threads + 1)
assert torch.get_num_threads() == threads
assert torch.compile(backend="eager")(nn.Linear(2, 2)).dynamo_ctx._dynamic is True
model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
plain = torch.optim.SGD(model.parameters(), foreach=True)
assert optimizer.defaults["fused"] is True and plain.defaults["fused"] is None
assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
assert DataLoader(range(4)).num_workers > 0 and DataLoader(range(4), num_workers=3).num_workers == 3
more = in_script.apply(["more_workers", "persistent_workers"], 0)["more_workers"]
loader = DataLoader(range(4), num_workers=3)
assert DataLoader(range(4), num_workers=True).num_workers == 1
assert loader.num_workers == more_than(3) and loader.persistent_workers
DataLoader(range(4), num_workers=3), DataLoader(range(4), num_workers=5), DataLoader(range(4), num_workers=0)
assert [*more.lines] == [f"DataLoader(…, num_workers={more_than(n)})  # {n} now" for n in (3, 5)]
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): ...
assert DataLoader(Stream()).num_workers == DataLoader(range(4), 2, False, None, None, 0).num_workers == 0
assert told["data_loader"]() and told["data_loader"].left == 1
first, *others = told["data_loader"].lines
assert first.endswith(f"persistent_workers=True, pin_memory={torch.cuda.is_available()})")
assert [line.count("=") for line in others] == [1]  # of the loader that sets 0 workers
model[1].weight.grad = torch.ones(4, 4)
optimizer.zero_grad(set_to_none=False)
assert model[1].weight.grad is None
assert gc.get_threshold() != (700, 10, 10)
torch.manual_seed(1)
first = torch.rand(1)
torch.random.default_generator.manual_seed(6)
assert torch.equal(first, torch.rand(1))
"""


@pytest.mark.parametrize(
    ("cores", "number", "more"), [(2, 1, 2), (2, 4, 8), (12, 1, 4), (12, 2, 8), (12, 4, 11), (12, 8, 16)]
)
def test_workers_become_up_to_four_times_as_many_if_cores_are_free(
    cores: int, number: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(more_workers, "usable_cores", lambda: cores)
    assert more_workers.more_than(number) == more


def test_hooks_change_the_objects_that_the_script_makes() -> None:
    done = forks.python("-c", HOOKS)
    assert done.returncode == 0, done.stderr


def test_a_lever_that_left_some_loaders_as_they_are_is_not_in_the_diff(tmp_path: Path) -> None:
    made, plan = bench(tmp_path), ScriptPlan(("data_loader",))
    assert [*made.patched(plan)[0].values()] != []
    folder = tmp_path / "data_loader-0"
    folder.mkdir()
    in_script.leave_changes({"data_loader": Changes(made=1, left=1)}, folder)
    assert [file.name for file in folder.iterdir()] == ["partly.json"]
    assert made.patched(plan) == ({}, ["data_loader"])


def test_files_behind_links_out_of_the_folder_and_the_library_are_not_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    texts = {
        "project/train.py": "import json\nimport lib.shared\nimport near.mine\nimport odd.kept\n",
        "project/parts/mine.py": "import json.decoder\n",
        "project/runs/kept.py": "a = 1\n",
        "lib/shared.py": "a = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, target in {"lib": "../lib", "near": "parts", "odd": "runs"}.items():
        (project / name).symlink_to(target)
    monkeypatch.chdir(project)
    found = sources(Path("train.py"))
    assert [each.path for each in found] == [project / "train.py", project / "parts" / "mine.py"]
    made = ScriptBench(["train.py"], all_levers(), tmp_path, lambda options, words: [], {}, sources=found)
    made.copied({found[1].path: "b = 2\n"}, copy := tmp_path / "copy")
    assert (copy / "near" / "mine.py").read_text() == "b = 2\n"
    for number, (name, message) in enumerate({"lib/shared.py": "outside", "odd/kept.py": "behind a link"}.items()):
        with pytest.raises(ConfigError, match=message):
            made.copied({project / name: "b = 2\n"}, tmp_path / f"copy{number}")
    made.words = ["../lib/shared.py"]
    with pytest.raises(ConfigError, match=r"shared\.py is outside the current folder; run the"):
        made.copied({found[1].path: "b = 2\n"}, tmp_path / "last")
    assert {name: (tmp_path / name).read_text() for name in texts} == texts
    monkeypatch.chdir("/")
    assert {file.path.name for file in sources(project / "train.py")} == {"train.py", "shared.py", "mine.py"}


def test_a_process_records_the_script_with_a_lever_and_leaves_its_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    options = {"name": "train", "warmup": 2, "steps": 8, "stop": True}
    made = ScriptBench(["train.py"], all_levers(), tmp_path / "out", script_command, options)  # in a new process
    record = made.measure(ScriptPlan(("zero_grad",)), 0)
    assert (record.status, len(record.measurement.timed if record.measurement else ())) == ("ok", 8)
    assert "trained to the end" not in (tmp_path / "out" / "zero_grad-0" / "log.txt").read_text()
    assert made.measure(ScriptPlan(("zero_grad",)), 0).key == record.key  # read again, not measured
    assert [file.name for file in folder.iterdir()] == ["train.py"]
    copy = tmp_path / "copy"
    made.copied({folder / "train.py": SCRIPT.replace("lr=1e-3", "lr=1e-2")}, copy)
    assert "lr=1e-2" in (copy / "train.py").read_text()
    assert (folder / "train.py").read_text() == SCRIPT


OWN_RECORDER = """import torch
from torch import nn
from cs_systems import Recorder

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
with Recorder(model, optimizer, out="runs/mine", steps=3) as recorder:
    for _ in range(40):
        with recorder.step(), recorder.phase("mine"):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
"""


def test_a_loop_with_its_own_recorder_is_recorded_once_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(OWN_RECORDER)
    monkeypatch.chdir(folder)
    options = {"name": "train", "warmup": 2, "steps": 8, "stop": True}
    made = ScriptBench(["train.py"], all_levers(), tmp_path / "out", forked, options)
    record = made.measure(ScriptPlan(), 0)
    assert (record.status, len(record.measurement.timed if record.measurement else ())) == ("ok", 8), record.reason
    assert [file.name for file in folder.iterdir()] == ["train.py"]
    failed = made.measure(ScriptPlan(("data_loader",)), 0)
    assert failed.reason == "data_loader found nothing to change in this run"
    options_elsewhere = OWN_RECORDER.replace("parameters())", "parameters(), **{'foreach': True})")
    (folder / "train.py").write_text(options_elsewhere)
    failed = made.measure(ScriptPlan(("fused_optimizer",)), 0)
    because = "(its AdamW is made with foreach=True)"
    assert failed.reason == f"fused_optimizer {because} found nothing to change in this run"


LOADERS = SCRIPT.replace("model = ", "validation = DataLoader(data.dataset, **{'num_workers': 1})\nmodel = ")


def test_record_and_answer_have_the_number_of_workers_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The diff cannot have it, because the script's text does not show how many workers there are."""
    (tmp_path / "train.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    options = {"name": "train", "warmup": 1, "steps": 2, "stop": True}
    files = (Source(Path("train.py"), LOADERS),)
    made = ScriptBench(["train.py"], all_levers(), tmp_path / "out", forked, options, sources=files)
    plan, code = ScriptPlan(("more_workers",)), f"DataLoader(…, num_workers={more_workers.more_than(1)})  # 1 now"
    record = made.measure(plan, 0)
    assert record.status == "ok", record.reason
    assert CODE.of(record.results) == [{"lever": "more_workers", "code": code}]
    start = replace(record, results={})
    monkeypatch.setattr(made, "measure", lambda cell, number: record if cell.levers else start)
    monkeypatch.setattr(made, "check", lambda cell: Check(True, ""))
    gain = replace(GOALS["time"], judge=lambda seen: Judgement(True, 0.5, 0.45, 0.55))
    monkeypatch.setitem(GOALS, "time", gain)
    search = Search(Situation(ScriptPlan(), CPU, texts=(LOADERS,)), {"more_workers": on_any_step()}, made)
    search.run()
    assert [row["code"] for row in search.answer().kept] == [code]
    _advise_script._deliver(search, made, tmp_path / "out", ["train.py"])
    printed = " ".join(capsys.readouterr().out.split())
    shown = code.replace("  ", " ")
    assert f"in your own program: {shown}" in printed
    assert f"write by hand, because the place was not found: {shown}" in printed


def on_any_step() -> Lever:
    """Return the lever of workers for steps that do not wait for data, too."""
    lever = all_levers()["more_workers"]
    assert lever.script is not None
    return replace(lever, script=replace(lever.script, unfit=lambda situation: None))


@pytest.mark.parametrize("processes", [0, 2])
def test_causes_are_left_for_the_user_with_the_levers_that_did_not_help(processes: int) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "other": 0.01}
    measured = Measurement("monotonic", (Sample(0, False, 0.1, phases, phases),) * 10, 0.0)
    config = RunConfig(workload="loop mine", device="cpu", warmup=0, steps=10).to_dict()
    results: Any = {"anomaly_detection": [{"passes": 10, "with_detection": 10}]}
    record = RunRecord("", config, "ok", measurement=measured, results=results)
    row = row_of("anomaly_detection", "anomaly detection off") | {"processes": processes}
    now = Situation(ScriptPlan(), CPU, history=(record,))
    answer = Answer(ScriptPlan(), ScriptPlan(), now.history, (row,), "time", diagnoses=tuple(now.diagnoses))
    (found,) = left(answer)
    assert "leave it off except to find a NaN" in found
    assert ("(tried, but not kept: anomaly_detection)" in found) == bool(processes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_search_of_a_script_leaves_its_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "project", tmp_path / "out"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("cs_systems.measure.runtime.program.script_command", forked)
    words = ["--levers", "zero_grad", "--steps", "12", "--warmup", "2", "--budget", "10m", "--out", str(out)]
    assert main(["advise", *words, "--", "train.py"]) == 0
    printed = capsys.readouterr()
    assert "to try: zero_grad (gradients set to None)" in printed.err
    advice = json.loads((out / "advice.json").read_text())
    (row,) = advice["trials"]
    assert row["status"] in ("kept", "rejected"), row
    assert ("set_to_none=True" in advice["diff"]) == (row["status"] == "kept")
    assert [file.name for file in folder.iterdir()] == ["train.py"]
    assert (folder / "train.py").read_text() == SCRIPT


def test_diff_has_a_fifth_of_the_budget_and_the_answer_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted while it tries the diff, the command has printed its answer already."""
    seen: list[tuple[str, int]] = []

    def run(search: Any) -> None:
        seen.append(("search", round(search.bench.left_s())))
        search.situation = replace(search.situation, history=("a record",))

    def tried(search: Any, bench: ScriptBench) -> None:
        seen.append(("diff", round(bench.left_s())))
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", run)
    monkeypatch.setattr(_advise_script, "_deliver", lambda *_: seen.append(("answer", 0)))
    monkeypatch.setattr(_advise_script, "_try_patch", tried)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["advise", "--budget", "500s", "--apply-patch", "--out", "out", "--", "train.py"]) == 130
    assert seen == [("search", 400), ("answer", 0), ("diff", 500)]
    assert "at most 500s (20% for the diff)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "tiny", "--", "train.py"], "the script decides what is trained, and where; leave out --size"),
        (["--keep", "strict", "--", "train.py"], "a script has no such option; leave out --keep"),
        (["--goal", "memory", "--", "train.py"], "--goal memory requires a GPU"),
        (["--memory", "1GiB", "--", "train.py"], "--memory requires a GPU, because the memory of a CPU's step"),
        (["--", "torchrun", "--nnodes=2", "train.py"], "--nnodes is 2, and advise starts ranks on one machine"),
        (["--", "torchrun", "-m", "train"], "torchrun is given no file of a script"),
        (["--", "srun", "train.py"], "advise starts ranks with torchrun, not with srun; write cs-systems advise --"),
        (["--", "-m", "json"], "advise takes a script, not a module"),
        (["--", "missing.py"], "script 'missing.py' does not exist"),
        (["--", "broken.py"], "broken.py cannot be read as Python"),
        (["--apply-patch"], "--apply-patch requires a script after --"),
        (["--train-steps", "20", "--", "train.py"], "a script has no such option; leave out --train-steps"),
        (
            ["--", "python", "train.py"],
            "'python' is not a script, and cs-systems advise starts Python itself; write cs-systems advise -- train.py",
        ),
        (["--", "--lr", "1"], "write the script first, as in cs-systems advise -- train.py"),
        (["--", "ls"], "'ls' is a program, but a Python script is needed; write cs-systems advise -- train.py"),
        (["--", ""], "no script is given; write it after --, as in cs-systems advise -- train.py --lr 1e-3"),
    ],
)
def test_wrong_input_for_a_script_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    assert main(["advise", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
