"""Rules about a recorded loop: each finds the fault that is planted for it, and is silent without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.comparison.loop_findings import COLLECTOR
from cs_systems.analysis.diagnosis import Answer, Diagnosis, apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import RunConfig
from cs_systems.record import Measurement, Sample

STEP_S = 0.1
PHASES = {"forward": 0.03, "loss": 0.002, "backward": 0.06, "optimizer": 0.006, "other": 0.002}
LOOP = RunConfig(workload="loop mine", device="cpu", warmup=0, steps=10)  # type: ignore[arg-type]


def loop(tables: Any = None, other: float = 0.002, optimizer: float = 0.006, **known: Any) -> Evidence:
    """Return the evidence of a recorded loop on a CPU, with these tables."""
    phases = PHASES | {"other": other, "optimizer": optimizer}
    sample = Sample(0, False, STEP_S, phases, phases)
    measurement = Measurement("monotonic", (sample,) * 10, 0.0)
    return Evidence(tables or {}, measurement, LOOP, judged="the step's time", **known)


def on_gpu(tables: Any) -> Evidence:
    """Return the evidence of a recorded loop on a GPU that has no work while the host waits for it, 30% of the step."""
    phases = {"forward": 0.04, "host_sync": 0.03, "backward": 0.03}
    sample = Sample(0, False, STEP_S, phases, phases, phases | {"host_sync": 0.0})
    return Evidence(tables, Measurement("cuda_event", (sample,) * 10, 0.0), LOOP, judged="the step's time")


def own(function: str, line: int, time_s: float, calls: str | None = None, phase: str = "other") -> dict[str, Any]:
    return {"phase": phase, "function": function, "place": f"train.py:{line}", "calls": calls, "time_s": time_s,
            "share": 0.5, "samples": 100, "place_share": 0.9}  # fmt: skip


def slow(**known: Any) -> dict[str, Any]:
    return {"every": 10, "steps": 4, "median_s": 1.1, "usual_s": 0.1, "extra_s": 4.0, "total_s": 8.0,
            "function": "evaluate", "place": "train.py:88", "calls": "model", "place_share": 0.9,
            "without_gradients": True, "sampled": 1} | known  # fmt: skip


def growing(quantity: str, first: float, last: float, **known: Any) -> dict[str, Any]:
    return {"quantity": quantity, "steps": 50, "first": first, "last": last, "per_step": (last - first) / 50,
            "kept": None, "kept_tensors": None, "place": None, "phase": None} | known  # fmt: skip


def collected(time_s: float, **known: Any) -> dict[str, Any]:
    return {"steps": 40, "collections": 4, "time_s": time_s, "in_steps": 4, "longest_s": time_s / 2, "total_s": 4.0,
            "function": "", "place": "train.py:9", "is_called": False} | known  # fmt: skip


def outcome(**known: Any) -> dict[str, Any]:
    row = {"loss": 2.0, "fault": None, "skipped_steps": None, "optimizer_steps": None, "first_scale": None}
    return row | {"last_scale": None} | known


def updates(**known: Any) -> dict[str, Any]:
    row = {"optimizer": "AdamW", "parameters": 4, "steps": 13, "again": 12, "stale": 0, "cleared": 0, "missing": 0}
    row |= {"zero": 0, "learning_rate": 1e-3, "dtype": "float32", "compared_steps": 24, "compared": 4, "changed": 4}
    return row | known


def repeated(**known: Any) -> dict[str, Any]:
    return {"model": "Net", "steps": 12, "of_steps": 12, "calls": 12, "used": 0, "of_calls": 24} | known


def repeated_modules(**known: Any) -> dict[str, Any]:
    return {"module": "Conv2d", "steps": 2, "of_steps": 2, "calls": 24, "time_s": 0.25, "share": 0.5,
            "recorded_share": 0.0, "place": "train.py:8"} | known  # fmt: skip


def hooked(**known: Any) -> dict[str, Any]:
    return {"steps": 20, "first": 4, "last": 24, "per_step": 1.0, "module": "Net.a", "place": "train.py:8"} | known


def under(**known: Any) -> dict[str, Any]:
    return {"tool": "torch.profiler", "steps": 20, "of_steps": 40, "with_s": 0.15, "without_s": 0.1, "extra_s": 1.5,
            "total_s": 6.0} | known  # fmt: skip


def in_double(**known: Any) -> dict[str, Any]:
    return {"parameters": 6, "of_parameters": 6, "flops": 6e8, "flops_per_s": 1e10, "float32_flops_per_s": 2e10} | known


def inner(function: str, line: int, time_s: float, **known: Any) -> dict[str, Any]:
    row = {"phase": "forward", "function": function, "place": f"train.py:{line}", "method": None, "source": "x = x + 1"}
    return row | {"is_plain": False, "time_s": time_s, "samples": 50, "late_s": 1e-3} | known


TABLE = {"parameter": "Net.items.weight", "rows": 150_000, "used": 2_000, "share": 0.9}
DROPPED = {"optimizer": "Adam", "parameters": 14, "first": "Generator.net.0.weight", "passes": 8, "of_passes": 16,
           "share": 0.4, "reduced_share": 0.0, "place": "train.py:30"}  # fmt: skip
UNREDUCED = {"model": "Net", "parameters": 8, "ranks": 2, "steps": 13, "function": "main", "place": "train.py:8"}
AGAIN = {"steps": 4, "of_steps": 4, "passes": 8.0, "share": 0.75, "place": "train.py:30"}
DERIVED = {"steps": 4, "of_steps": 4, "calls": 12.0, "again": 8.0, "share": 0.6, "place": "train.py:30"}
CHECKS = {"distribution": "Normal", "function": "Net.gaussian", "place": "train.py:8", "waits": 300, "time_s": 0.012,
          "step_waits": 350, "step_time_s": 0.024}  # fmt: skip
BROADCAST = {"shape": "192 × 192 × 128", "elements": 4_718_592, "from_elements": 49_152, "to_elements": 36_864}
NEVER = {"optimizer": "AdamW", "parameters": 8, "passes": 96, "backward": "train.py:8", "step": "train.py:10"}
REMADE = {"optimizer": "Adam", "steps": 11, "made": 11, "state": "exp_avg, exp_avg_sq"}
TWICE = {"function": "softmax", "loss": "cross_entropy", "passes": 10, "of_passes": 10}
UNREGISTERED = {"holder": "Net.layers", "parameters": 4, "elements": 8_320, "largest": "64 × 64", "passes": 10}
RATE = {"optimizer": "SGD", "steps": 36, "largest": 0.02, "largest_after": 2e-7, "last": 2e-9, "observed_after": 10,
        "scheduler": "StepLR", "scheduled": 36}  # fmt: skip
SCHEDULE = {"optimizer": "SGD", "steps": 1000, "largest": 0.02, "last": 0.0008, "constant": 90, "levels": 40,
            "is_better": False, "scheduler": "OneCycleLR", "planned": 1000, "scheduled": 10}  # fmt: skip
SHORT = SCHEDULE | {"scheduler": None, "planned": None, "scheduled": None, "constant": 700, "last": 2e-6}
PLATEAU = SCHEDULE | {"scheduler": "ReduceLROnPlateau", "planned": None, "last": 2e-8}
LOADED = {"model": "Net", "steps": 1200, "parameters": 8, "function": "test", "place": "train.py:8"}
FACTOR = {"optimizer": "AdamW", "initial": 1e-3, "factor": 9e-4, "largest_factor": 1e-3, "rate": 9e-7, "scheduled": 36}
MODE = {"model": "Net", "since": 12, "steps": 9, "dropout": 2, "statistics": 1, "function": "validate",
        "place": "train.py:8"}  # fmt: skip
CLIPPED = {"function": "clip_grad_norm_", "place": "train.py:8", "kind": "filter", "parameters": 9, "steps": 4,
           "of_steps": 4}  # fmt: skip
COVARIANCE = {"given": "covariance_matrix", "rows": 12, "function": "Agent.policy", "place": "train.py:8",
              "time_s": 0.05, "steps": 12}  # fmt: skip
CUT = {"distribution": "Normal", "function": "Net.forward", "place": "train.py:8", "module": "Net.encoder",
       "parameters": 4, "user": "Net.decoder.0", "steps": 6}  # fmt: skip
FLAT = {"operators": "round", "function": "Net.forward", "place": "train.py:8", "module": "Net.encoder",
        "parameters": 4, "steps": 6}  # fmt: skip
DRAWN = {"drawn": "torch.randn", "shape": "16 × 8", "function": "Noise.add", "place": "train.py:8", "steps": 4}
SETTING = {"setting": "fp16", "is_autocast": True, "layers": 8, "time_s": 0.05, "usual_s": 0.01}
SAME_ROWS = {"tensor": "Net.table", "shape": "225 × 12", "index": "16 × 64 × 64", "copies": 16, "lookups": 2,
             "steps": 3, "forward_s": 0.004, "backward_s": 0.016}  # fmt: skip
ORDER = {"batches": 4, "rows": 640, "inner": 12, "summed": 640, "width": 12, "products": 2, "steps": 3,
         "flops_share": 0.02, "time_s": 0.05, "other_s": 0.001}  # fmt: skip
FORMULA = {"activation": "F.gelu(x, approximate='tanh')", "operators": 8, "elements": 65_536, "calls": 2, "steps": 3,
           "time_s": 0.05, "one_s": 0.005}  # fmt: skip
UNREAD_WEIGHTS = {"module": "Net.0.attention", "function": "Block.forward", "place": "train.py:8", "calls": 2,
                  "steps": 3, "time_s": 0.05, "fused_s": 0.03}  # fmt: skip
COPIED = {"tensor": "Net.weights", "how": "stack", "copies": 16, "copied_bytes": 24 << 20, "is_first": True,
          "products": 1, "steps": 3, "time_s": 0.05, "shared_s": 0.005}  # fmt: skip
FUSED = {"optimizer": "AdamW", "parameters": 124, "tried": 124, "updates": 1.0, "time_s": 0.05, "fused_share": 0.2,
         "low_share": 0.18, "high_share": 0.25, "rounds": 15}  # fmt: skip
ZEROS = {"rows": 1300, "columns": 1300, "nonzeros": 11_634, "products": 3, "steps": 3, "time_s": 0.05,
         "sparse_s": 0.01}  # fmt: skip
UNREAD = {"layer": "Net.head", "rows": 1600, "read": 64, "products": 1, "steps": 3, "time_s": 0.05, "read_s": 0.01}
UNDONE = {"optimizer": "Adam", "parameters": 6, "compared": 6, "steps": 11, "left": 0.005, "place": "train.py:8"}
UNUSED = {"module": "Net.heads.3", "calls": 9, "steps": 2, "time_s": 0.05, "share": 0.5, "function": "Net.forward",
          "place": "train.py:8"}  # fmt: skip
ONE_HOT = {"module": "Net.first", "width": 3_000, "nonzeros": 1, "is_ones": True, "rows": 300, "steps": 3,
           "of_steps": 3, "time_s": 0.01, "share": 0.5, "backward_ratio": 1.5, "elements_share": 0.5,
           "function": "Net.forward", "place": "train.py:9"}  # fmt: skip
MADE = [inner("Net.forward", 8, 0.006, method="one_hot", source="x = F.one_hot(items, n).float()"),
        inner("Net.forward", 8, 0.004, method="float", source="x = F.one_hot(items, n).float()")]  # fmt: skip
WALK = {"module": "Net.gru", "kind": "GRU", "samples": 64, "length": 20, "width": 12,
        "evidence": "a shuffled data loader", "steps": 3, "of_steps": 3, "place": "train.py:8"}  # fmt: skip
PAIRED = {"steps": 6, "of_steps": 6, "predictions": 768, "shape": "768 × 1", "paired": "768 × 768"}
OF_INPUT = {"steps": 6, "of_steps": 6, "shape": "4 × 16 × 56 × 56", "share": 0.5, "place": "train.py:30"}
BUSY = {"function": "Batches.fill", "place": "train.py:8", "calls": "encode", "puts": True, "busy_share": 0.7,
        "waited_share": 0.6, "pool_queued_share": 0.5, "operator_threads": 1, "tries": 4,
        "held_share": 0.4}  # fmt: skip
PASSES = {"passes": 36, "unused": 24}
REPLACED = {"optimizer": "SGD", "parameters": 2, "first": "Net.head.weight", "replaced": 2}
ELEMENTS = {"function": "mask", "place": "train.py:8", "reads": 0, "writes": 2500, "time_s": 0.03}
UNHELD = {"parameters": 16, "elements": 999, "share": 0.5, "first": "Net.a.weight"}
ANOMALY = {"passes": 20, "with_detection": 20}
PADDED = {"share": 0.8, "steps": 20, "basis": "tokens", "shape": "8 × 250", "filler": None}
STARTED = {"steps": 14, "timed": 9, "each_s": 0.02, "later_s": 0.002, "extra_s": 0.252, "total_s": 0.4,
           "phase": "other"}  # fmt: skip
SKIPPED = outcome(skipped_steps=20, optimizer_steps=20, first_scale=2.0**127, last_scale=1e31)

# rule → its fault, the bound, and the sentence up to the numbers of its gain
PLANTED: dict[str, tuple[Evidence, float | None, str]] = {
    "own-python": (
        loop({"own_python": [own("augment", 8, 0.04), own("", 9, 0.02, "time.sleep")]}, other=0.06),
        0.036,
        "60% of the step is the script's own Python: augment() at train.py:8 (40%), train.py:9, time.sleep (20%): do "
        "it less often, make it faster, or, if it prepares data, move it into the workers of a data loader; not below "
        "36 ms, now 100 ms",
    ),
    "batch-preparation": (
        loop({"own_python": [own("batches", 8, 0.05, "torch.tensor") | {"feeds_model": True}]}, other=0.06),
        0.045,
        "50% of the step waits for the next batch, which the main process prepares: batches() at train.py:8, "
        "torch.tensor (50%): prepare batches in the workers of a data loader (num_workers, prefetch_factor), or once "
        "before the loop; not below 45 ms, now 100 ms",
    ),
    "periodic-steps": (
        loop({"slow_steps": [slow()]}),
        3.6,
        "50% of the loop is in every tenth step: evaluate() at train.py:88, forward passes without gradients: evaluate "
        "less often or on fewer batches; not below 3.6 s, now 8.0 s",
    ),
    "start-up": (
        loop({"slow_start": [STARTED]}),
        None,
        "each of the first 14 steps takes 20.0 ms where later ones take 2.00 ms: 63% of the loop is start-up, outside "
        "of the phases; 9 of them were timed: time later steps (cs-systems run --steps 19:29), and do before the loop, "
        "once for all runs, what the first steps prepare",
    ),
    "rollouts": (
        loop({"own_python": [own("act", 40, 0.02, "policy", "forward without gradients")]}),
        None,
        "20% of the step is forward passes without gradients: act() at train.py:40 (20%): do it less often, or in "
        "fewer and larger batches",
    ),
    "growth": (
        loop({"growth": [growing("host memory", 1e9, 3e9, kept="losses", kept_tensors="tensors with their graphs",
                                 place="train.py:11")]}),
        None,
        "host memory grows by 38.1 MiB a step: 1.86 GiB in 50 steps; tensors with their graphs are kept in losses at "
        "train.py:11: keep numbers in place of tensors with their graph: .item() or .detach()",
    ),
    "garbage-collection": (
        loop({"garbage_collection": [collected(2.0, is_called=True)]}),
        1.8,
        "50% of the loop is Python's garbage collector: 4 collections, the longest 1.00 s (train.py:9): leave out "
        "gc.collect(), or call it every 100th step; not below 1.8 s, now 4.0 s",
    ),
    "padding": (
        loop({"padding": [PADDED]}),
        None,
        "80% of each batch (8 × 250) is padding, by the tokens given to step(): put sequences of similar length into a "
        "batch and pad to the longest of each batch, or pack several into one row",
    ),
    "recomputation": (
        loop({"repeated_forward": [{"backward_share": 0.4}]}),
        0.0684,
        "24% of the step is forward passes that backward computes again (activation checkpoints): where memory allows, "
        "checkpoint fewer blocks, or none; not below 68 ms, now 100 ms",
    ),
    "small-operators": (
        loop({"forward_operators": [{"operators": 1500, "arithmetic_s": 0.001, "function": "RNN.forward",
                                     "place": "train.py:20"}]}),
        0.00655,
        "92% of the step is 1,500 small operators, 61.3 µs each with their backward: overhead, not arithmetic "
        "(RNN.forward() at train.py:20): compute more in one operator: a whole batch in place of one sample, nn.LSTM "
        "in place of a loop over cells; or compile (torch.compile); not below 6.6 ms, now 100 ms",
    ),
    "python-in-forward": (
        loop({"inner_lines": [inner("mask", 8, 0.02, is_plain=True), inner("Net.forward", 20, 0.01)]}),
        0.072,
        "20% of the step is Python inside the model, which computes without tensors: mask() at train.py:8 (20%): "
        "compute it by operators on whole tensors, or once: keep what does not change in a buffer (register_buffer); "
        "not below 72 ms, now 100 ms",
    ),
    "value-checks": (
        loop({"inner_lines": [inner("check", 8, 0.01, source="if torch.isnan(y).any():"), inner("check", 9, 0.01)]}),
        0.072,
        "20% of the step is checks for NaN or infinity inside the model: check() at train.py:8 (20%): remove the "
        "checks, look at the loss alone, or check every hundredth step; not below 72 ms, now 100 ms",
    ),
    "dense-gradients": (
        loop({"dense_gradients": [TABLE]}, optimizer=0.04),
        None,
        "40% of the step is the optimizer, with 90% of its elements in Net.items.weight, of which a step uses 2,000 of "
        "150,000 rows: nn.Embedding(sparse=True) with SparseAdam or SGD for this table, which update the used rows "
        "alone",
    ),
    "one-hot-products": (
        loop({"one_hot_products": [ONE_HOT], "inner_lines": MADE}, optimizer=0.02),
        None,
        "about 44% of the step goes into one-hot rows: Net.first (nn.Linear) multiplies rows of 3,000 numbers of which "
        "1 is not 0 (25%), they are made at train.py:8 (10%), and the optimizer updates the part of its weight that no "
        "row uses (9%) (train.py:9): look the rows of its weight up: nn.Embedding in place of nn.Linear, with the "
        "indices in place of the vectors; add its bias to the result; sparse=True, with SGD, Adagrad or SparseAdam, "
        "limits the gradient and the update to the used rows",
    ),
    "samples-as-time": (
        loop({"samples_as_time": [WALK]}),
        None,
        "Net.gru (nn.GRU) walks over the 64 samples of a batch as if they were steps of time, and mixes them: "
        "batch_first is False, and its input is 64 × 20 × 12 (train.py:8): nn.GRU(..., batch_first=True), or transpose "
        "its input and its result",
    ),
    "written-tensors": (
        loop({"inner_lines": [inner("Net.forward", 8, 0.02, source='log.debug(f"scores {w}")')]}),
        0.072,
        "20% of the step goes into logs and prints inside the model: Net.forward() at train.py:8 (20%): write less "
        "often; give the logger arguments in place of an f-string, which is made also where its level is off, and "
        "shapes or means in place of tensors; not below 72 ms, now 100 ms",
    ),
    "rebuilt-tensors": (
        loop({"inner_lines": [inner("Net.forward", 8, 0.02, method="cat", source="bank = torch.cat([bank[1:], x])")]}),
        None,
        "20% of the step is building bank anew for each change of some rows: Net.forward() at train.py:8 (20%): "
        "allocate it once, and write the new rows in place at a position that goes around",
    ),
    "tensor-copies": (
        loop({"inner_lines": [inner("Net.forward", 8, 0.015, method="clone"), inner("Net.forward", 9, 0.01)]}),
        0.0765,
        "15% of the step is copies of tensors in forward (clone, contiguous): Net.forward() at train.py:8 (15%): "
        "remove clone() where nothing writes in place, and contiguous() where the next operator takes any strides; "
        "reshape() copies only where it must; not below 77 ms, now 100 ms",
    ),
    "broadcast-sums": (
        loop({"inner_lines": [inner("distances", 8, 0.02, source="d = a[:, None] - b")], "broadcasts": [BROADCAST]}),
        0.072,
        "20% of the step goes into a tensor of 192 × 192 × 128 in forward, with 96 times the elements that it is made "
        "from, and into sums over it: distances() at train.py:8 (20%): write it as a matrix product: torch.cdist or "
        "|a|² + |b|² - 2 a·b for distances, einsum for sums of products; not below 72 ms, now 100 ms",
    ),
    "python-threads": (
        loop({"python_threads": [BUSY]}),
        None,
        "60% of the step the loop waits for the thread Batches.fill() at train.py:8, encode, which fills a queue: it "
        "holds Python's lock (GIL), without which no operator begins: do its work in other processes (a data loader "
        "with num_workers, multiprocessing), by operators on whole tensors, or once before the loop",
    ),
    "too-many-threads": (
        loop({"threads": [{"threads": 8, "cores": 2, "time_s": 0.004, "of_cores_s": 0.001}]}),
        None,
        "torch uses 8 threads on 2 cores: an elementwise operator takes 4 times as long as with 2, and operators are "
        "in 98% of the step: leave torch.set_num_threads and OMP_NUM_THREADS out, or set at most 2",
    ),
    "no-training": (
        loop({"outcome": [outcome(loss=None, fault="NaN")]}),
        None,
        "the loss is NaN after the timed steps, so that no time of this loop is that of a training: lower the learning "
        "rate, or use a precision with a larger range",
    ),
    "gradients-not-cleared": (
        loop({"updates": [updates(stale=12)]}),
        None,
        "the gradients are not cleared: in all 12 steps of AdamW that were looked at, those of earlier steps are still "
        "in them: call optimizer.zero_grad() once per update, before the first backward pass or after "
        "optimizer.step()",
    ),
    "remade-optimizers": (
        loop({"remade_optimizers": [REMADE]}),
        None,
        "the optimizer is made anew: in all 11 steps that were looked at, a new Adam begins without what the one "
        "before has kept (exp_avg, exp_avg_sq): make it once before the loop; to change its learning rate, set it in "
        "optimizer.param_groups or by a scheduler",
    ),
    "paired-targets": (
        loop({"paired_targets": [PAIRED]}),
        None,
        "the loss pairs each of 768 predictions with all 768 targets, which trains the model towards one value for all "
        "inputs: the shape of the predictions is 768 × 1, and in the loss it becomes 768 × 768: give the prediction "
        "and the target the same shape, such as by prediction.squeeze(-1)",
    ),
    "input-gradients": (
        loop({"input_gradients": [OF_INPUT]}),
        None,
        "backward also computes the gradient of the model's input (4 × 16 × 56 × 56), which nothing reads in the "
        "steps that were looked at: about 30% of the step (train.py:30): leave requires_grad off the input "
        "(.requires_grad_(), requires_grad=True), and compute a saliency map in a pass of its own where it is needed",
    ),
    "repeated-rows": (
        loop({"repeated_rows": [SAME_ROWS]}),
        None,
        "19% of the step is the backward of an index (80%) and its lookup: the same rows of Net.table (225 × 12) are "
        "looked up 16 times; 1 similar lookup: look the rows up once, with one of the equal parts of the index "
        "(16 × 64 × 64), and let the operators after it broadcast the result",
    ),
    "unfused-optimizer": (
        loop({"fused_updates": [FUSED]}, optimizer=0.06),
        None,
        "60% of the step is the optimizer, AdamW with several operators for each of 124 parameters; fused updates of "
        "copies took 20% of the time: pass fused=True to torch.optim.AdamW; measured: 52 ms (41 … 70) instead of "
        "100 ms",
    ),
    "unread-rows": (
        loop({"unread_rows": [UNREAD], "inner_lines": [inner("Net.forward", 8, 0.001, source="return self.head(x)")]}),
        None,
        "about 50% of the step is Net.head for 1,600 rows, of which the loss gives 64 a gradient; for these alone it "
        "takes 20% of the time (Net.forward() at train.py:8): pick these rows before Net.head instead of after it, "
        "unless something else uses the others",
    ),
    "undone-updates": (
        loop({"undone_updates": [UNDONE]}),
        None,
        "what Adam changes is undone before a model is called again (step() at train.py:8): in each of 11 steps that "
        "were looked at, at most 0.5% is left of the change of any of 6 compared parameters: find what writes to the "
        "trained parameters after step(), such as a soft update that copies the target network into the trained one, "
        "and not the other way round, or a clamp that is narrower than a step",
    ),
    "unused-outputs": (
        loop({"unused_outputs": [UNUSED]}),
        None,
        "16% of the step is 9 calls of modules with results that nothing reads, such as Net.heads.3 (Net.forward() at "
        "train.py:8): call only the modules with a result that the step needs",
    ),
    "sparse-factors": (
        loop({"sparse_factors": [ZEROS], "inner_lines": [inner("Layer.forward", 8, 0.001, source="return a @ x")]}),
        None,
        "about 50% of the step is 3 products with a constant matrix of 1,300 × 1,300, of which 0.7% of the numbers are "
        "not 0; sparse products take 20% of the time (Layer.forward() at train.py:8): make it a sparse tensor once "
        "(matrix.to_sparse().coalesce(), torch.sparse.mm), or gather and add along its entries (index_add)",
    ),
    "activation-formulas": (
        loop({"activation_formulas": [FORMULA],
              "inner_lines": [inner("Gelu.forward", 8, 0.001, source="return 0.5 * x * (1 + torch.tanh(y))")]}),
        None,
        "about 50% of the step is an activation as a formula of 8 operators, 2 times in a step; the single operator "
        "takes 10% of the time (Gelu.forward() at train.py:8): use F.gelu(x, approximate='tanh'), which gives the same "
        "but for rounding; in a configuration of transformers, gelu_pytorch_tanh in place of gelu_new or gelu_fast",
    ),
    "product-order": (
        loop({"product_orders": [ORDER], "inner_lines": [inner("Attention.forward", 8, 0.001, source="m = w @ v")]}),
        None,
        "about 50% of the step is products of three matrices in the costlier order: (640 × 12 by 12 × 640) by 640 × 12 "
        "makes a matrix of 640 × 640 for each of 4 batches, and 1 similar product; the other order makes one of "
        "12 × 12, and needs 2% of the arithmetic (Attention.forward() at train.py:8): if nothing else needs that "
        "matrix, multiply the last two first: a @ (b @ c) in place of (a @ b) @ c, for attention without softmax "
        "q @ (k.transpose(-2, -1) @ v), with sums over rows as q @ k.sum(-2).unsqueeze(-1); or torch.linalg.multi_dot",
    ),
    "decompositions": (
        loop({"inner_lines": [inner("nuclear", 8, 0.03, method="svdvals", source="s = torch.linalg.svdvals(h)")]}),
        None,
        "30% of the step is decompositions of matrices: nuclear() at train.py:8 (30%): decompose every few steps, or a "
        "smaller matrix; where one number is enough, compute it alone, such as the largest singular value by a power "
        "iteration (torch.nn.utils.parametrizations.spectral_norm); solve() in place of an inverse",
    ),
    "double-softmax": (
        loop({"double_softmax": [TWICE]}),
        None,
        "the loss applies softmax twice: cross_entropy takes logits, and its input went through softmax already, which "
        "makes the gradients small: give cross_entropy the logits: leave softmax out of what the model returns",
    ),
    "single-elements": (
        loop({"inner_lines": [inner("mask", 8, 0.02), inner("Net.forward", 20, 0.01)], "single_elements": [ELEMENTS]}),
        None,
        "20% of the step goes into 2,500 single elements of tensors, which Python reads or writes one by one: mask() "
        "at train.py:8 (20%): compute whole tensors by one operator, such as a comparison or torch.arange; what never "
        "changes, once: keep it in a buffer (register_buffer)",
    ),
    "replaced-parameters": (
        loop({"replaced_parameters": [REPLACED]}),
        None,
        "2 parameters of the model, such as Net.head.weight, get gradients and never change: SGD still holds 2 of a "
        "layer that is in no module any more: make the optimizer after the last change to the model, or give it the "
        "new ones by add_param_group()",
    ),
    "unregistered-parameters": (
        loop({"unregistered": [UNREGISTERED]}),
        None,
        "4 parameters in Net.layers, the largest 64 × 64, get gradients and do not change in the steps that were "
        "looked at: a module does not find the parameters in a Python list, tuple or dict: keep layers in "
        "nn.ModuleList or nn.ModuleDict, and single parameters in nn.ParameterList, and make the optimizer after that",
    ),
    "lonely-collectives": (
        loop({"own_python": [own("average", 8, 0.03, "dist.all_reduce"), own("train", 9, 0.008)]}, other=0.038),
        0.063,
        "30% of the step is collectives, although there is one process: average() at train.py:8, dist.all_reduce "
        "(30%): leave them out where torch.distributed.get_world_size() is 1; not below 63 ms, now 100 ms",
    ),
    "whole-jacobians": (
        loop({"inner_lines": [inner("trace", 8, 0.03, method="jacobian", source="full = jacobian(net, x)")]}),
        None,
        "30% of the step is Jacobians with a backward pass for each of their outputs: "
        "trace() at train.py:8 (30%): where the samples of a batch do not depend on each other, sum the outputs "
        "over the batch first, for one pass per output of a sample, or use torch.func.vmap(torch.func.jacrev(f))",
    ),
    "vanishing-rate": (
        loop({"learning_rates": [RATE]}),
        None,
        "the learning rate of SGD vanishes: from 0.02 to 2e-09 in 36 steps: StepLR has stepped 36 times: call "
        "scheduler.step() once per epoch, or give the scheduler the number of batches",
    ),
    "loaded-weights": (
        loop({"loaded_weights": [LOADED]}),
        None,
        "Net loads its own tensors (test() at train.py:8): state_dict() returned them without a copy, and 1,200 steps "
        "have changed them since, so that loading does nothing: keep a copy: copy.deepcopy(model.state_dict())",
    ),
    "rate-as-factor": (
        loop({"rate_factors": [FACTOR]}),
        None,
        "the learning rate of AdamW is 9e-07 instead of 0.001: LambdaLR multiplies it by what its function returns, "
        "now 0.0009, which seems to be the rate itself: return a factor from the function, 1 for the full rate",
    ),
    "same-randomness": (
        loop({"random_draws": [DRAWN, DRAWN | {"drawn": "dropout", "function": ""}, DRAWN | {"place": "train.py:9"}]}),
        None,
        "each step draws the same random numbers, as from a generator that is seeded anew: torch.randn (16 × 8) in "
        "Noise.add() at train.py:8, dropout (16 × 8) at train.py:8 and 1 more draw, equal in all 4 steps that were "
        "looked at: make and seed the generator once, before the loop; draw once what is to stay the same",
    ),
    "evaluation-mode": (
        loop({"evaluation_mode": [MODE]}),
        None,
        "Net trains in evaluation mode from step 12 on: validate() at train.py:8 calls eval(), and nothing calls "
        "train() after it, so that dropout is off and running statistics are fixed: call model.train() after each "
        "evaluation",
    ),
    "cut-samples": (
        loop({"cut_samples": [CUT]}),
        None,
        "Net.encoder gets no gradient through the sample of its Normal, which Net.decoder.0 takes, and learns from "
        "kl_divergence alone: Net.forward() at train.py:8 calls sample(), which cuts the gradient: draw with rsample() "
        "there, which keeps the gradient",
    ),
    "attention-weights": (
        loop({"attention_weights": [UNREAD_WEIGHTS]}),
        None,
        "about 50% of the step is 2 calls of nn.MultiheadAttention, such as Net.0.attention, with attention weights "
        "that nothing reads; without them the same calls take 60% of the time (Block.forward() at train.py:8): pass "
        "need_weights=False to the call, which gives the same first result but for rounding",
    ),
    "copied-factors": (
        loop({"copied_factors": [COPIED], "inner_lines": [
            inner("Net.forward", 8, 0.001, source="w = torch.stack([self.weights] * len(x))"),
            inner("Net.head", 9, 0.001, source="return a @ x"),
        ]}),
        None,
        "about 50% of the step is a product with 16 copies of Net.weights, 24.0 MiB in all, by torch.stack; with the "
        "tensor itself it takes 10% of the time (Net.forward() at train.py:8): multiply the tensor itself, w of k "
        'matrices, with n × k others, x: torch.einsum("kij,nkjm->nkim", w, x).contiguous(); expand() and the '
        "broadcasting of matmul make the same copies",
    ),
    "flat-operators": (
        loop({"flat_operators": [FLAT]}),
        None,
        "4 parameters in Net.encoder get gradients of zeros alone: the loss reaches them only through round() in "
        "Net.forward() at train.py:8, with a derivative of 0 everywhere: pass the gradient straight through it: "
        "x + (x.round() - x).detach() in place of x.round()",
    ),
    "gradients-not-reduced": (
        loop({"unreduced_gradients": [UNREDUCED]}),
        None,
        "each of the 2 ranks trains Net alone, as no gradient is averaged: its DistributedDataParallel is not called "
        "with gradients: main() at train.py:8 calls Net itself, and the weights of the ranks differ in all 13 steps "
        "that were looked at: call the wrapped model in place of its module (model.module) for each pass that is "
        "differentiated; give its forward an argument for what its other methods compute",
    ),
    "empty-clipping": (
        loop({"empty_clipping": [CLIPPED]}),
        None,
        "clip_grad_norm_ at train.py:8 clips nothing, while 9 parameters of the optimizer have gradients: it gets a "
        "filter that is used up already: pass a list of the parameters, or model.parameters() anew in each call",
    ),
    "slow-settings": (
        loop({"slow_settings": [SETTING, SETTING | {"setting": "no oneDNN", "time_s": 0.03}]}),
        None,
        "the model computes in fp16, for which this CPU is slow: computed again, the convolutions and matrix "
        "products of a step take 50.0 ms, and 10.0 ms in fp32: compute in fp32 here: leave torch.autocast out",
    ),
    "no-update": (
        loop({"updates": [updates(changed=0, cleared=13)]}),
        None,
        "AdamW changes no weight in 24 steps: the gradients are cleared between the backward pass and "
        "optimizer.step(): call optimizer.zero_grad() before the backward pass or after optimizer.step(), and not "
        "between the two",
    ),
    "unused-passes": (
        loop({"unused_passes": [PASSES]}),
        None,
        "24 of 36 backward passes that were looked at lead to no update: their gradients are cleared before an "
        "optimizer steps: where gradients accumulate, call zero_grad() only after optimizer.step(); else check the "
        "condition that skips the step, such as a limit of the gradients' norm (clip_grad_norm_ keeps the update); "
        "where gradients are only measured, use torch.autograd.grad",
    ),
    "divergence": (
        loop({"outcome": [outcome(losses=25, early_loss=2.0, late_loss=20.0)]}),
        None,
        "the training diverges: in the first 25 backward passes the loss grows from at most 2 to at least 20: lower "
        "the learning rate, warm it up (torch.optim.lr_scheduler.LinearLR), or clip the gradients "
        "(torch.nn.utils.clip_grad_norm_)",
    ),
    "unused-gradients": (
        loop({"unused_gradients": [UNHELD]}),
        None,
        "backward computes gradients of 16 parameters that no optimizer holds, such as Net.a.weight: 50.0% of all "
        "elements with gradients: call requires_grad_(False) on them, and run what is in front of the trained "
        "parameters under torch.no_grad(); or give them to the optimizer",
    ),
    "repeated-calls": (
        loop({"repeated_calls": [repeated()]}),
        None,
        "Net is called twice with the same input in a step, and backward uses only one of the results: take metrics "
        "from the output that the loss uses (output.detach()), or call the model under torch.no_grad()",
    ),
    "repeated-backward": (
        loop({"repeated_backward": [AGAIN]}),
        None,
        "8 backward passes of a step go through the same part of the graph: about 75% of their work is repeated, 45% "
        "of the step (train.py:30): add the losses and call backward once, without retain_graph: the gradients are the "
        "same, unless the program reads them between the passes",
    ),
    "distribution-checks": (
        on_gpu({"distribution_checks": [CHECKS, CHECKS | {"function": "loss", "place": "train.py:30", "waits": 50}]}),
        None,
        "the host waits for the GPU 350 times per step while torch.distributions checks parameters and samples, 24% of "
        "the step (Net.gaussian() at train.py:8, Normal (300), loss() at train.py:30, Normal (50)): leave them out "
        "once the program works: torch.distributions.Distribution.set_default_validate_args(False) before the loop, "
        "or validate_args=False for each distribution",
    ),
    "growing-hooks": (
        loop({"hooks": [hooked()]}),
        None,
        "the number of hooks grows by 1 a step, from 4 to 24 in 20 steps (the newest on Net.a, registered at "
        "train.py:8): register them once before the loop, or keep the handle and call handle.remove() in each step",
    ),
    "anomaly-detection": (
        loop({"anomaly_detection": [ANOMALY]}),
        None,
        "autograd's anomaly detection is on in all 20 timed backward passes: leave it off except to find a NaN: "
        "torch.autograd.set_detect_anomaly(False)",
    ),
    "own-tools": (
        loop({"own_tools": [under()]}),
        None,
        "25% of the loop is the program's own torch.profiler, active in 20 of 40 steps (175 ms each on average, "
        "without it 100 ms): train without it, or limit it to a few steps (torch.profiler.schedule)",
    ),
    "double-precision": (
        loop({"double_precision": [in_double()]}),
        None,
        "6 of 6 parameters are fp64, and at least 60% of the step is products with them, at 0.5 times the rate of "
        "fp32: compute in fp32 or bf16: convert the inputs and the model (.float(), model.to(torch.bfloat16)); arrays "
        "of NumPy are fp64",
    ),
}  # fmt: skip
TRIED = tuple(PLANTED)

# rule and limit → (tables without the fault by a hair, tables with it by a hair)
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradients-not-cleared: 3 steps": ({"updates": [updates(steps=3, again=2, stale=2)]},
                                       {"updates": [updates(steps=4, again=3, stale=3)]}),
    "gradients-not-cleared: more than half of the steps": (
        {"updates": [updates(stale=6)]}, {"updates": [updates(stale=7)]},
    ),
    "remade-optimizers: 3 times": (
        {"remade_optimizers": [REMADE | {"steps": 2, "made": 2}]},
        {"remade_optimizers": [REMADE | {"steps": 3, "made": 3}]},
    ),
    "remade-optimizers: more than half of the steps": (
        {"remade_optimizers": [REMADE | {"steps": 12, "made": 6}]},
        {"remade_optimizers": [REMADE | {"steps": 12, "made": 7}]},
    ),
    "remade-optimizers: with a state": (
        {"remade_optimizers": [REMADE | {"state": None}]}, {"remade_optimizers": [REMADE]},
    ),
    "paired-targets: 2 steps": (
        {"paired_targets": [PAIRED | {"steps": 1, "of_steps": 1}]},
        {"paired_targets": [PAIRED | {"steps": 2, "of_steps": 2}]},
    ),
    "paired-targets: more than half of the steps": (
        {"paired_targets": [PAIRED | {"steps": 3}]}, {"paired_targets": [PAIRED | {"steps": 4}]},
    ),
    "input-gradients: all steps": (
        {"input_gradients": [OF_INPUT | {"steps": 5}]}, {"input_gradients": [OF_INPUT]},
    ),
    "input-gradients: a tenth of the step": (
        {"input_gradients": [OF_INPUT | {"share": 0.16}]}, {"input_gradients": [OF_INPUT | {"share": 0.17}]},
    ),
    "repeated-rows: a tenth of the step": (
        {"repeated_rows": [SAME_ROWS | {"backward_s": 0.00666}]},
        {"repeated_rows": [SAME_ROWS | {"backward_s": 0.00667}]},
    ),
    "unread-rows: a tenth of the step": (
        {"unread_rows": [UNREAD | {"time_s": 0.0199}]}, {"unread_rows": [UNREAD | {"time_s": 0.0201}]},
    ),
    "unread-rows: hardly longer than the phases": (
        {"unread_rows": [UNREAD | {"time_s": 0.231}]}, {"unread_rows": [UNREAD | {"time_s": 0.229}]},
    ),
    "unread-rows: faster with the rows that are read": (
        {"unread_rows": [UNREAD | {"read_s": 0.05}, UNREAD | {"time_s": 0.0199}]},
        {"unread_rows": [UNREAD | {"read_s": 0.05}, UNREAD | {"time_s": 0.0201}]},
    ),
    "attention-weights: a tenth of the step": (
        {"attention_weights": [UNREAD_WEIGHTS | {"fused_s": 0.041}]},
        {"attention_weights": [UNREAD_WEIGHTS | {"fused_s": 0.039}]},
    ),
    "attention-weights: measured longer than the phases": (
        {"attention_weights": [UNREAD_WEIGHTS | {"time_s": 0.231}]},
        {"attention_weights": [UNREAD_WEIGHTS | {"time_s": 0.229}]},
    ),
    "copied-factors: a tenth of the step": (
        {"copied_factors": [COPIED | {"time_s": 0.0149}]}, {"copied_factors": [COPIED | {"time_s": 0.0151}]},
    ),
    "copied-factors: measured longer than the phases": (
        {"copied_factors": [COPIED | {"time_s": 0.231}]}, {"copied_factors": [COPIED | {"time_s": 0.229}]},
    ),
    "unused-outputs: a twentieth of the step": (
        {"unused_outputs": [UNUSED | {"time_s": 0.0049}]}, {"unused_outputs": [UNUSED | {"time_s": 0.0051}]},
    ),
    "sparse-factors: a tenth of the step": (
        {"sparse_factors": [ZEROS | {"time_s": 0.0199}]}, {"sparse_factors": [ZEROS | {"time_s": 0.0201}]},
    ),
    "sparse-factors: hardly longer than the phases": (
        {"sparse_factors": [ZEROS | {"time_s": 0.231}]}, {"sparse_factors": [ZEROS | {"time_s": 0.229}]},
    ),
    "sparse-factors: faster as sparse ones": (
        {"sparse_factors": [ZEROS | {"sparse_s": 0.05}, ZEROS | {"time_s": 0.0199}]},
        {"sparse_factors": [ZEROS | {"sparse_s": 0.05}, ZEROS | {"time_s": 0.0201}]},
    ),
    "activation-formulas: a tenth of the step": (
        {"activation_formulas": [FORMULA | {"time_s": 0.0149}]},
        {"activation_formulas": [FORMULA | {"time_s": 0.0151}]},
    ),
    "activation-formulas: hardly longer than the phases": (
        {"activation_formulas": [FORMULA | {"time_s": 0.231}]}, {"activation_formulas": [FORMULA | {"time_s": 0.229}]},
    ),
    "activation-formulas: faster as one operator": (
        {"activation_formulas": [FORMULA | {"one_s": 0.05}, FORMULA | {"time_s": 0.0149}]},
        {"activation_formulas": [FORMULA | {"one_s": 0.05}, FORMULA | {"time_s": 0.0151}]},
    ),
    "product-order: a tenth of the step": (
        {"product_orders": [ORDER | {"time_s": 0.0109}]}, {"product_orders": [ORDER | {"time_s": 0.0111}]},
    ),
    "product-order: hardly longer than the phases": (
        {"product_orders": [ORDER | {"time_s": 0.231}]}, {"product_orders": [ORDER | {"time_s": 0.229}]},
    ),
    "product-order: faster in the other order": (
        {"product_orders": [ORDER | {"other_s": 0.05}, ORDER | {"time_s": 0.0109}]},
        {"product_orders": [ORDER | {"other_s": 0.05}, ORDER | {"time_s": 0.0111}]},
    ),
    "repeated-rows: without the first copy": (
        {"repeated_rows": [SAME_ROWS | {"copies": 1}]}, {"repeated_rows": [SAME_ROWS | {"copies": 3}]},
    ),
    "decompositions: a fifth of the step": (
        {"inner_lines": [inner("nuclear", 8, 0.0199, method="svd", source="torch.svd(h)")]},
        {"inner_lines": [inner("nuclear", 8, 0.0201, method="svd", source="torch.svd(h)")]},
    ),
    "decompositions: diagonal matrices for a notable share of the step": (
        {"covariances": [COVARIANCE | {"time_s": 0.0149}]}, {"covariances": [COVARIANCE | {"time_s": 0.0151}]},
    ),
    "decompositions: the call itself": (
        {"inner_lines": [inner("forward", 8, 0.05, method="net", source="torch.linalg.inv(a) @ self.net(x)")]},
        {"inner_lines": [inner("forward", 8, 0.05, method="inv", source="torch.linalg.inv(a) @ self.net(x)")]},
    ),
    "decompositions: no control flow": (
        {"inner_lines": [inner("forward", 8, 0.05, method="cond", source="y = torch.cond(p, f, g, (x,))")]},
        {"inner_lines": [inner("forward", 8, 0.05, method="cond", source="k = torch.linalg.cond(a)")]},
    ),
    "whole-jacobians: of autograd": (
        {"inner_lines": [inner("f", 8, 0.05, method="jacobian", source="j = chain.jacobian(q)")]},
        {"inner_lines": [inner("f", 8, 0.05, method="jacobian", source="j = functional.jacobian(f, q)")]},
    ),
    "whole-jacobians: one pass for each output": (
        {"inner_lines": [inner("f", 8, 0.05, method="jacobian", source="j = jacobian(f, q, vectorize=True)")]},
        {"inner_lines": [inner("f", 8, 0.05, method="jacobian", source="j = jacobian(f, q)")]},
    ),
    "decompositions: by torch": (
        {"inner_lines": [inner("nuclear", 8, 0.05, method="inverse", source="x = self.flow.inverse(z)")]},
        {"inner_lines": [inner("nuclear", 8, 0.05, method="inverse", source="x = torch.inverse(z)")]},
    ),
    "decompositions: the nuclear norm": (
        {"inner_lines": [inner("nuclear", 8, 0.05, method="norm", source="h.norm(2)")]},
        {"inner_lines": [inner("nuclear", 8, 0.05, method="norm", source="torch.linalg.norm(h, ord='nuc')")]},
    ),
    "double-softmax: 2 passes": (
        {"double_softmax": [TWICE | {"passes": 1, "of_passes": 1}]},
        {"double_softmax": [TWICE | {"passes": 2, "of_passes": 2}]},
    ),
    "double-softmax: more than half of the passes": (
        {"double_softmax": [TWICE | {"passes": 5}]}, {"double_softmax": [TWICE | {"passes": 6}]},
    ),
    "single-elements: a twentieth of the step": (
        {"inner_lines": [inner("mask", 8, 0.0049)], "single_elements": [ELEMENTS]},
        {"inner_lines": [inner("mask", 8, 0.0051)], "single_elements": [ELEMENTS]},
    ),
    "single-elements: not a module of the same line": (
        {"inner_lines": [inner("mask", 8, 0.02, method="cell")], "single_elements": [ELEMENTS]},
        {"inner_lines": [inner("mask", 8, 0.02, method="cos")], "single_elements": [ELEMENTS]},
    ),
    "single-elements: of the same line": (
        {"inner_lines": [inner("mask", 9, 0.02)], "single_elements": [ELEMENTS]},
        {"inner_lines": [inner("mask", 8, 0.02)], "single_elements": [ELEMENTS]},
    ),
    "single-elements: the time of the elements alone": (
        {"inner_lines": [inner("mask", 8, 0.09)], "single_elements": [ELEMENTS | {"time_s": 0.0049}]},
        {"inner_lines": [inner("mask", 8, 0.09)], "single_elements": [ELEMENTS | {"time_s": 0.0051}]},
    ),
    "single-elements: not of backward": (
        {"inner_lines": [inner("mask", 8, 0.02, phase="backward")], "single_elements": [ELEMENTS]},
        {"inner_lines": [inner("mask", 8, 0.02, phase="loss")], "single_elements": [ELEMENTS]},
    ),
    "unregistered-parameters: 3 passes": (
        {"unregistered": [UNREGISTERED | {"passes": 2}]}, {"unregistered": [UNREGISTERED | {"passes": 3}]},
    ),
    "lonely-collectives: a tenth of the step": (
        {"own_python": [own("average", 8, 0.0099, "dist.all_reduce")]},
        {"own_python": [own("average", 8, 0.0101, "dist.all_reduce")]},
    ),
    "lonely-collectives: of torch.distributed": (
        {"own_python": [own("nearest", 8, 0.05, "dist.gather")]},
        {"own_python": [own("average", 8, 0.05, "torch.distributed.broadcast_object_list")]},
    ),
    "lonely-collectives: most of the function": (
        {"own_python": [own("train", 8, 0.05, "dist.all_reduce") | {"place_share": 0.49}]},
        {"own_python": [own("train", 8, 0.05, "dist.all_reduce") | {"place_share": 0.51}]},
    ),
    "whole-jacobians: a fifth of the step": (
        {"inner_lines": [inner("trace", 8, 0.0199, method="hessian", source="h = functional.hessian(f, x)")]},
        {"inner_lines": [inner("trace", 8, 0.0201, method="hessian", source="h = functional.hessian(f, x)")]},
    ),
    "vanishing-rate: 3 steps": (
        {"learning_rates": [RATE | {"observed_after": 2}]}, {"learning_rates": [RATE | {"observed_after": 3}]},
    ),
    "vanishing-rate: a thousandth": (
        {"learning_rates": [RATE | {"largest_after": 2e-5}]}, {"learning_rates": [RATE | {"largest_after": 1.9e-5}]},
    ),
    "vanishing-rate: 20 steps of a script": (
        {"rate_schedules": [SHORT | {"steps": 19, "constant": 10}]},
        {"rate_schedules": [SHORT | {"steps": 20, "constant": 10}]},
    ),
    "vanishing-rate: two fifths of a script": (
        {"rate_schedules": [SHORT | {"constant": 400}]}, {"rate_schedules": [SHORT | {"constant": 401}]},
    ),
    "vanishing-rate: a hundredth": (
        {"rate_schedules": [SHORT | {"last": 2e-4}]}, {"rate_schedules": [SHORT | {"last": 1.9e-4}]},
    ),
    "vanishing-rate: a schedule, not some stages": (
        {"rate_schedules": [SHORT | {"levels": 5}]}, {"rate_schedules": [SHORT | {"levels": 6}]},
    ),
    "vanishing-rate: a thousandth after cuts": (
        {"rate_schedules": [PLATEAU | {"last": 2.1e-5}]}, {"rate_schedules": [PLATEAU | {"last": 2e-5}]},
    ),
    "vanishing-rate: nothing better": (
        {"rate_schedules": [PLATEAU | {"is_better": True}]}, {"rate_schedules": [PLATEAU]},
    ),
    "vanishing-rate: as many steps as it is laid out for": (
        {"rate_schedules": [SCHEDULE | {"planned": 1021}]}, {"rate_schedules": [SCHEDULE | {"planned": 1020}]},
    ),
    "vanishing-rate: or one step more": (
        {"rate_schedules": [SCHEDULE | {"steps": 20, "constant": 2, "planned": 22, "scheduled": 2}]},
        {"rate_schedules": [SCHEDULE | {"steps": 20, "constant": 2, "planned": 21, "scheduled": 2}]},
    ),
    "vanishing-rate: a quarter of the steps": (
        {"rate_schedules": [SCHEDULE | {"scheduled": 251}]}, {"rate_schedules": [SCHEDULE | {"scheduled": 250}]},
    ),
    "rate-as-factor: a twentieth": (
        {"rate_factors": [FACTOR | {"initial": 0.04, "factor": 0.04, "largest_factor": 0.05}]},
        {"rate_factors": [FACTOR | {"initial": 0.04, "factor": 0.04, "largest_factor": 0.049}]},
    ),
    "rate-as-factor: a fifth of the rate": (
        {"rate_factors": [FACTOR | {"factor": 1.9e-4}]}, {"rate_factors": [FACTOR | {"factor": 2.1e-4}]},
    ),
    "rate-as-factor: twice the rate": (
        {"rate_factors": [FACTOR | {"largest_factor": 2.1e-3}]},
        {"rate_factors": [FACTOR | {"largest_factor": 1.9e-3}]},
    ),
    "evaluation-mode: 3 steps": (
        {"evaluation_mode": [MODE | {"steps": 2}]}, {"evaluation_mode": [MODE | {"steps": 3}]},
    ),
    "cut-samples: 3 steps": (
        {"cut_samples": [CUT | {"steps": 2}]}, {"cut_samples": [CUT | {"steps": 3}]},
    ),
    "flat-operators: 3 steps": (
        {"flat_operators": [FLAT | {"steps": 2}]}, {"flat_operators": [FLAT | {"steps": 3}]},
    ),
    "empty-clipping: 2 steps": (
        {"empty_clipping": [CLIPPED | {"steps": 1, "of_steps": 1}]},
        {"empty_clipping": [CLIPPED | {"steps": 2, "of_steps": 2}]},
    ),
    "empty-clipping: more than half of the steps": (
        {"empty_clipping": [CLIPPED | {"steps": 2}]}, {"empty_clipping": [CLIPPED | {"steps": 3}]},
    ),
    "same-randomness: 3 steps": (
        {"random_draws": [DRAWN | {"steps": 2}]}, {"random_draws": [DRAWN | {"steps": 3}]},
    ),
    "slow-settings: a tenth of the step": (
        {"slow_settings": [SETTING | {"time_s": 0.0199}]}, {"slow_settings": [SETTING | {"time_s": 0.0201}]},
    ),
    "slow-settings: no longer than the phases": (
        {"slow_settings": [SETTING | {"time_s": 0.1151}]}, {"slow_settings": [SETTING | {"time_s": 0.1149}]},
    ),
    "slow-settings: 1.4 times as slow": (
        {"slow_settings": [SETTING | {"time_s": 0.0699, "usual_s": 0.05}]},
        {"slow_settings": [SETTING | {"time_s": 0.0701, "usual_s": 0.05}]},
    ),
    "one-hot-products: a tenth of the step": (
        {"one_hot_products": [ONE_HOT | {"time_s": 0.0039, "elements_share": 0.0}]},
        {"one_hot_products": [ONE_HOT | {"time_s": 0.0041, "elements_share": 0.0}]},
    ),
    "one-hot-products: by the share of forward": (
        {"one_hot_products": [ONE_HOT | {"share": 0.1, "elements_share": 0.0}]},
        {"one_hot_products": [ONE_HOT | {"share": 0.13, "elements_share": 0.0}]},
    ),
    "one-hot-products: in each step": (
        {"one_hot_products": [ONE_HOT | {"of_steps": 4}]}, {"one_hot_products": [ONE_HOT]},
    ),
    "one-hot-products: 2 steps": (
        {"one_hot_products": [ONE_HOT | {"steps": 1, "of_steps": 1}]},
        {"one_hot_products": [ONE_HOT | {"steps": 2, "of_steps": 2}]},
    ),
    "one-hot-products: made in the function that calls the layer": (
        {"one_hot_products": [ONE_HOT | {"time_s": 0.002, "function": "other"}], "inner_lines": MADE},
        {"one_hot_products": [ONE_HOT | {"time_s": 0.002}], "inner_lines": MADE},
    ),
    "one-hot-products: made at one line": (
        {
            "one_hot_products": [ONE_HOT | {"time_s": 0.002}],
            "inner_lines": [MADE[0], MADE[1] | {"place": "train.py:7"}],
        },
        {"one_hot_products": [ONE_HOT | {"time_s": 0.002}], "inner_lines": MADE},
    ),
    "samples-as-time: 2 steps": (
        {"samples_as_time": [WALK | {"steps": 1, "of_steps": 1}]},
        {"samples_as_time": [WALK | {"steps": 2, "of_steps": 2}]},
    ),
    "samples-as-time: more than half of the steps": (
        {"samples_as_time": [WALK | {"steps": 2, "of_steps": 4}]},
        {"samples_as_time": [WALK | {"steps": 2, "of_steps": 3}]},
    ),
    "repeated-backward: half of the steps": (
        {"repeated_backward": [AGAIN | {"of_steps": 9}]}, {"repeated_backward": [AGAIN | {"of_steps": 8}]},
    ),
    "repeated-backward: derivatives in half of the steps": (
        {"same_derivatives": [DERIVED | {"of_steps": 9}]}, {"same_derivatives": [DERIVED | {"of_steps": 8}]},
    ),
    "no-update: no parameter": ({"updates": [updates(changed=1)]}, {"updates": [updates(changed=0)]}),
    "no-update: 10 passes without a step": (
        {"never_stepped": [NEVER | {"passes": 9}]}, {"never_stepped": [NEVER | {"passes": 10}]},
    ),
    "no-update: 3 steps": ({"updates": [updates(changed=0, compared_steps=2)]},
                           {"updates": [updates(changed=0, compared_steps=3)]}),
    "no-update: gradients cleared before each step": (
        {"updates": [updates(cleared=12)]}, {"updates": [updates(cleared=13)]},
    ),
    "no-update: one of two that has a reason": (
        {"updates": [updates(), updates(changed=0)]}, {"updates": [updates(), updates(changed=0, missing=13)]},
    ),
    "unused-passes: more than half": (
        {"unused_passes": [PASSES | {"unused": 18}]}, {"unused_passes": [PASSES | {"unused": 19}]},
    ),
    "unused-passes: 6 of them": (
        {"unused_passes": [{"passes": 5, "unused": 5}]}, {"unused_passes": [{"passes": 6, "unused": 6}]},
    ),
    "start-up: its time": (
        {"slow_start": [STARTED | {"extra_s": 0.049, "total_s": 0.2}]},
        {"slow_start": [STARTED | {"extra_s": 0.05, "total_s": 0.2}]},
    ),
    "start-up: a timed step": ({"slow_start": [STARTED | {"timed": 0}]}, {"slow_start": [STARTED | {"timed": 1}]}),
    "start-up: a tenth of the loop": (
        {"slow_start": [STARTED | {"total_s": 2.6}]}, {"slow_start": [STARTED | {"total_s": 2.5}]},
    ),
    "divergence: 10 times": (
        {"outcome": [outcome(losses=25, early_loss=2.0, late_loss=19.9)]},
        {"outcome": [outcome(losses=25, early_loss=2.0, late_loss=20.0)]},
    ),
    "repeated-calls: half of the steps": (
        {"repeated_calls": [repeated(steps=5)]}, {"repeated_calls": [repeated(steps=6)]},
    ),
    "repeated-calls: 2 steps": (
        {"repeated_calls": [repeated(steps=1, of_steps=1)]}, {"repeated_calls": [repeated(steps=2, of_steps=2)]},
    ),
    "growing-hooks: 10 more": ({"hooks": [hooked(last=13)]}, {"hooks": [hooked(last=14)]}),
    "anomaly-detection: more than half of the passes": (
        {"anomaly_detection": [ANOMALY | {"with_detection": 10}]},
        {"anomaly_detection": [ANOMALY | {"with_detection": 11}]},
    ),
    "python-threads: 0.15 of the step inside the phases of the model": (
        {"python_threads": [BUSY | {"waited_share": 0.169}]}, {"python_threads": [BUSY | {"waited_share": 0.171}]},
    ),
    "python-threads: 0.15 of the time in which the loop's thread has a core": (
        {"python_threads": [BUSY | {"waited_share": 0.079, "queued_share": 0.6}]},
        {"python_threads": [BUSY | {"waited_share": 0.081, "queued_share": 0.6}]},
    ),
    "python-threads: a core in a quarter of the time": (
        {"python_threads": [BUSY | {"waited_share": 0.2, "queued_share": 0.76}]},
        {"python_threads": [BUSY | {"waited_share": 0.2, "queued_share": 0.75}]},
    ),
    "python-threads: works for as long as the loop waits for it": (
        {"python_threads": [BUSY | {"ran_share": 0.07}]}, {"python_threads": [BUSY | {"ran_share": 0.071}]},
    ),
    "python-threads: half of the time of the waits": (
        {"python_threads": [BUSY | {"busy_share": 0.29}]}, {"python_threads": [BUSY | {"busy_share": 0.31}]},
    ),
    "python-threads: no thread of an operator waits for a core": (
        {"python_threads": [BUSY | {"operator_threads": 2, "pool_queued_share": 0.16}]},
        {"python_threads": [BUSY | {"operator_threads": 2, "pool_queued_share": 0.14}]},
    ),
    "python-threads: the lock was kept in half of the tries": (
        {"python_threads": [BUSY | {"operator_threads": 2, "held_share": 0.49}]},
        {"python_threads": [BUSY | {"operator_threads": 2, "held_share": 0.5}]},
    ),
    "python-threads: that hold the lock at a tenth of the looks": (
        {"python_threads": [BUSY | {"tries": 15, "held_share": 0.09}]},
        {"python_threads": [BUSY | {"tries": 15, "held_share": 0.1}]},
    ),
    "python-threads: 2 tries": (
        {"python_threads": [BUSY | {"operator_threads": 2, "held_share": 1.0, "tries": 1}]},
        {"python_threads": [BUSY | {"operator_threads": 2, "held_share": 1.0, "tries": 2}]},
    ),
    "double-precision: a tenth of the step": (
        {"double_precision": [in_double(flops=9.9e7)]}, {"double_precision": [in_double(flops=1.01e8)]},
    ),
    "double-precision: slower than fp32": (
        {"double_precision": [in_double(flops_per_s=1.7e10, flops=1e9)]},
        {"double_precision": [in_double(flops_per_s=1.6e10, flops=1e9)]},
    ),
}  # fmt: skip


def causes(evidence: Evidence) -> tuple[Diagnosis, ...]:
    return apply_rules(evidence).diagnoses


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_of_a_loop_is_the_only_cause_and_has_its_bound(fault: str) -> None:
    evidence, at_best, sentence = PLANTED[fault]
    (found,) = causes(evidence)
    assert (found.code, found.sentence) == (fault, sentence)
    assert found.at_best == (None if at_best is None else pytest.approx(at_best))
    assert found.evidence


def test_healthy_loop_has_no_cause() -> None:
    sound = {"outcome": [outcome()], "own_python": [own("augment", 8, 0.002)], "garbage_collection": [collected(0.01)],
             "padding": [PADDED | {"share": 0.1}], "updates": [updates()],
             "own_tools": [under(extra_s=0.1)]}  # fmt: skip
    answer = apply_rules(loop(sound))
    assert answer == Answer(judged="the step's time")
    assert answer.others == ["nothing found that would save more than 5% of the step's time"]


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_of_a_loop_gives_a_diagnosis_on_one_side_of_its_limit(limit: str) -> None:
    silent, speaking = LIMITS[limit]
    assert causes(loop(silent)) == ()
    assert [each.code for each in causes(loop(speaking))] == [limit.partition(":")[0]]


@pytest.mark.parametrize(
    ("known", "words"),
    [({"missing": 13}, "changes no weight in 24 steps: none of its 4 parameters gets a gradient: find what separates"),
     ({"zero": 13}, "changes no weight in 24 steps: all its gradients are 0: find what multiplies the loss by 0"),
     ({"learning_rate": 0.0}, "changes no weight in 24 steps: its learning rate is 0: set the lr"),
     ({"learning_rate": 1e-6, "dtype": "bfloat16"}, "changes no weight in 24 steps: updates by a learning rate of "
      "1e-06 are lost in bfloat16 weights: keep the weights in float32"),
     ({"learning_rate": None}, "changes no weight in 24 steps: find what restores the weights"),
     ({"changed": 4, "cleared": 13}, "no gradient comes to AdamW in 13 steps that were looked at: the gradients are")],
)  # fmt: skip
def test_cause_explains_why_weights_do_not_change(known: dict[str, Any], words: str) -> None:
    (found,) = causes(loop({"updates": [updates(**{"changed": 0} | known)]}))
    assert found.sentence.removeprefix("AdamW ").startswith(words)


def test_model_without_an_optimizer_is_named() -> None:
    tables = {"updates": [updates(changed=0, missing=13)], "unused_gradients": [UNHELD]}
    found = causes(loop(tables))
    assert [each.code for each in found] == ["no-update", "unused-gradients"]
    assert (
        "gets a gradient, but 16 parameters that no optimizer holds, such as Net.a.weight, do: make"
        in found[0].sentence
    )


@pytest.mark.parametrize(
    ("known", "where"),
    [
        ({}, " (backward at train.py:8, step() at train.py:10)"),
        ({"step": None}, " (backward at train.py:8)"),
        ({"step": None, "backward": None}, ""),
    ],
)
def test_script_without_any_step_of_an_optimizer_is_named(known: dict[str, Any], where: str) -> None:
    (found,) = apply_rules(Evidence({"never_stepped": [NEVER | known]}, None, LOOP, judged="the step")).diagnoses
    calls = "call" if known.get("step", NEVER["step"]) else "if this is a training, call"
    assert (found.code, found.sentence) == (
        "no-update",
        f"the optimizer never stepped: AdamW updates no weight in 96 backward passes{where}: {calls} optimizer.step() "
        "after the backward passes, also for the last, shorter accumulation",
    )


@pytest.mark.parametrize("known", [{"fault": "NaN"}, {"skipped_steps": 9, "optimizer_steps": 20}])
def test_weights_are_not_judged_after_a_nan_loss_or_skipped_steps(known: dict[str, Any]) -> None:
    tables = {"outcome": [outcome(**known)], "updates": [updates(changed=0)]}
    assert "no-update" not in [each.code for each in causes(loop(tables))]


@pytest.mark.parametrize("known", [{"fault": "NaN"}, {"losses": 25, "early_loss": 1.0, "late_loss": 1e6}])
def test_uncleared_gradients_come_before_their_consequences(known: dict[str, Any]) -> None:
    found = causes(loop({"outcome": [outcome(**known)], "updates": [updates(stale=12)]}))
    assert found[0].code == "gradients-not-cleared"
    assert len(found) == 2


def test_profiler_in_all_steps_has_an_unknown_cost() -> None:
    always = under(steps=40, without_s=None, extra_s=None)
    (found,) = causes(loop({"own_tools": [always]}))
    assert found.cause == "all 40 steps run under the program's own torch.profiler, which slows each operator"
    (counted,) = causes(loop({"own_tools": [always | {"tool": "FlopCounterMode"}]}))
    assert counted.cause == (
        "each of 40 steps uses the program's own FlopCounterMode, which slows each operator inside it"
    )
    assert counted.takes is not None
    assert found.takes is not None
    assert counted.takes < found.takes, "it may count forward alone"
    assert counted.remedy == "count the operations of one step, and train without it"
    assert causes(loop({"own_tools": [always | {"tool": "sys.settrace"}]})) == ()
    assert causes(loop({"own_tools": [under(extra_s=-0.1)]})) == ()


def test_tracing_of_allocations_comes_before_the_own_python_that_it_slows() -> None:
    row = under(tool="tracemalloc", steps=40, without_s=None, extra_s=None)
    first, second = causes(loop({"own_tools": [row], "own_python": [own("sample", 8, 0.04)]}, other=0.04))
    assert first.cause == (
        "all 40 steps run under the program's own tracemalloc, which slows each allocation of a Python object; 40% of "
        "the step is own Python"
    )
    assert second.code == "own-python"
    waits = loop({"own_tools": [row], "own_python": [own("wait", 8, 0.04, "time.sleep")]}, other=0.04)
    assert [each.code for each in causes(waits)] == ["own-python"]
    assert not causes(loop({"own_tools": [row]})), "nothing in the step makes many Python objects"


@pytest.mark.parametrize(
    ("known", "words", "remedy"),
    [({"nonzeros": 9}, "in the 3 steps that were looked at, at most 9 are not 0", "with the indices in place of the "
      "vectors"),
     ({"nonzeros": 9, "is_ones": False}, "at most 9 are not 0", "and their values as per_sample_weights"),
     ({"is_ones": False}, "at most 1 is not 0", "and their values as per_sample_weights")],
)  # fmt: skip
def test_rows_with_several_numbers_are_looked_up_in_an_embedding_bag(
    known: dict[str, Any], words: str, remedy: str
) -> None:
    (found,) = causes(loop({"one_hot_products": [ONE_HOT | {"elements_share": 0.0} | known]}))
    assert "goes into rows of zeros with a few other numbers: Net.first (nn.Linear) multiplies rows" in found.cause
    assert words in found.cause
    assert found.remedy.startswith('look the rows of its weight up: nn.EmbeddingBag(mode="sum")')
    assert found.remedy.endswith(f"{remedy}; add its bias to the result")


@pytest.mark.parametrize(
    ("layer", "sources", "where"),
    [
        ("Net.head", ["h = self.old_head(x)", "return self.head(h)"], "Net.forward() at train.py:9"),
        ("Net.head", ["return self.head(x)", "return self.head(x) + 1"], ""),
        ("Net.layers.2", ["h = self.layer2(x)"], ""),
    ],
)
def test_layer_with_unread_rows_is_placed_where_its_name_is_called(layer: str, sources: list[str], where: str) -> None:
    lines = [inner("Net.forward", number, 0.01, source=source) for number, source in enumerate(sources, 8)]
    (found,) = causes(loop({"unread_rows": [UNREAD | {"layer": layer}], "inner_lines": lines}))
    assert found.where == where


def test_further_layers_with_unread_rows_are_counted() -> None:
    (found,) = causes(loop({"unread_rows": [UNREAD | {"layer": "Net.other", "time_s": 0.02}, UNREAD]}))
    assert "is Net.head for 1,600 rows" in found.cause
    assert "a gradient; 1 more such layer; for" in found.cause
    assert found.where == ""


def test_further_constant_matrices_are_counted() -> None:
    (found,) = causes(loop({"sparse_factors": [ZEROS | {"time_s": 0.02}, ZEROS]}))
    assert "6 products with a constant matrix" in found.cause
    assert "not 0; 1 more such matrix; sparse" in found.cause


def test_products_of_two_functions_have_no_line() -> None:
    lines = [inner(name, 8, 0.001, source="m = w @ v") for name in ("A.forward", "B.forward")]
    (found,) = causes(loop({"product_orders": [ORDER], "inner_lines": lines}))
    assert found.where == ""


def test_outputs_that_are_differentiated_again_are_reported_with_the_line() -> None:
    (found,) = causes(loop({"same_derivatives": [DERIVED]}))
    assert found.sentence.startswith(
        "8 of the 12 calls of autograd.grad in a step differentiate the same outputs again: about 60% of the work of "
        "backward is repeated, 36% of the step (train.py:30): call it once for each output, with all inputs together, "
        "such as torch.autograd.grad(u.sum(), (x, t), create_graph=True), and take every derivative from its results"
    )


def test_one_call_that_differentiates_again_is_reported_in_the_singular() -> None:
    (found,) = causes(loop({"same_derivatives": [DERIVED | {"calls": 2.0, "again": 1.0}]}))
    assert "1 of the 2 calls of autograd.grad in a step differentiates the same outputs again" in found.cause


def test_repeated_call_with_a_used_result_is_reported_with_the_same_result() -> None:
    (found,) = causes(loop({"repeated_calls": [repeated(used=12)]}))
    assert found.sentence.startswith("Net is called twice with the same input in a step, with the same result: call it")


def test_repeated_call_in_evaluation_mode_is_not_asked_to_use_the_loss_output() -> None:
    (found,) = causes(loop({"repeated_calls": [repeated(evaluated=12)]}))
    assert found.sentence == (
        "Net runs again on the same input in evaluation mode in 12 of 12 observed steps, and backward does not use it: "
        "call it under torch.no_grad() there, and in fewer steps"
    )


SUMMED = {"operators": 1400, "time_s": 0.02, "samples": 50, "function": "squared", "place": "train.py:9",
          "calls": "sum"}  # fmt: skip
SMALL = {"operators": 2800, "arithmetic_s": 1.0, "function": "f", "place": "train.py:1", "has_recurrent": False}


@pytest.mark.parametrize(
    ("known", "of_graph", "share"),
    [
        ({}, SMALL, "40%"),  # backward as long as the loss
        ({"time_s": 0.04}, SMALL, "70%"),  # backward has half of its operators, thus half of its time
        ({}, None, "20%"),
        ({"time_s": 0.0101}, None, "10%"),
        ({"time_s": 0.0099}, None, None),
        ({"samples": 5}, None, "20%"),
        ({"samples": 4}, None, None),
    ],
)
def test_sums_over_elements_are_small_operators_with_at_most_as_much_backward(
    known: dict[str, Any], of_graph: dict[str, Any] | None, share: str | None
) -> None:
    tables = {"element_sums": [SUMMED | known]} | ({"forward_operators": [of_graph]} if of_graph else {})
    found = causes(loop(tables))
    assert [each.code for each in found] == ["small-operators"] * (share is not None)
    if share is not None:
        assert found[0].sentence.startswith(
            f"{share} of the step is 1,400 small operators that add up elements of a tensor one after the other, with "
            "their backward (squared() at train.py:9, sum): use one operator over the whole tensor, such as x.sum()"
        )
        assert found[0].at_best is None


def test_larger_share_of_small_operators_is_named() -> None:
    counted = SMALL | {"arithmetic_s": 0.001}
    (found,) = causes(loop({"element_sums": [SUMMED], "forward_operators": [counted]}))
    assert found.sentence.startswith("92% of the step is 2,800 small operators, ")


def test_repeated_parametrizations_are_cached() -> None:
    row = repeated_modules(time_s=0.02, share=1.0, module="_Orthogonal", parametrized="Net.layer.weight")
    (found,) = causes(loop({"repeated_modules": [row]}))
    assert found.sentence.startswith(
        "20% of the step is 24 repeated calls of _Orthogonal, with the same input and result, most of it at "
        "train.py:8; they compute Net.layer.weight anew at each use, and their backward may take longer than is "
        "counted: run the forward pass inside `with torch.nn.utils.parametrize.cached():`"
    )


@pytest.mark.parametrize(
    ("method", "words"),
    [("matrix_exp", " by a matrix exponential"), ("cayley", " by solving a linear system"), (None, "")],
)
def test_repeated_parametrization_says_how_it_makes_a_weight_orthogonal(method: str | None, words: str) -> None:
    row = repeated_modules(time_s=0.02, share=1.0, parametrized="Net.layer.weight", method=method)
    (found,) = causes(loop({"repeated_modules": [row]}))
    assert f"they compute Net.layer.weight{words} anew at each use" in found.sentence


def test_repeated_calls_of_a_models_layers_are_reported_with_their_line() -> None:
    (found,) = causes(loop({"repeated_modules": [repeated_modules(time_s=0.02, share=1.0)]}))
    assert found.sentence.startswith(
        "20% of the step is 24 repeated calls of modules such as Conv2d, with the same input and result, most of it at "
        "train.py:8: run them once, and keep the results that are needed again"
    )


@pytest.mark.parametrize(
    ("call", "remedy"),
    [("torch.save", "save less often"), ("picture.save", "write fewer or smaller ones"),
     ("time.sleep", "remove the pause"), ("print", "print less often"),
     ("loss.item", "read values less often"), ("self.log", "log less often"),
     ("json.dumps", "log fewer values"), ("os.fsync", "write it less often"),
     ("subprocess.run", "start them less often"), ("plt.plot", "log figures less often"),
     ("pbar.set_postfix", "update it less often"),
     ("accuracy_score", "compute them less often"), ("copy.deepcopy", "copy values into tensors that exist"),
     ("requests.post", "fetch in advance, or send"), ("pd.concat", "keep the values in a list"),
     (None, "do it less often")],
)  # fmt: skip
def test_remedy_of_own_python_depends_on_the_called_functions(call: str | None, remedy: str) -> None:
    (found,) = causes(loop({"own_python": [own("step", 8, 0.05, call)]}, other=0.06))
    assert found.remedy.startswith(remedy)
    (later,) = causes(loop({"slow_steps": [slow(calls=call, without_gradients=False)]}))
    assert later.remedy.startswith(remedy if call else "do this less often")


@pytest.mark.parametrize(
    ("call", "remedy"),
    [("rng.permutation", "draw only the indices of the batch"), ("torch.randn", "make the data once"),
     ("tokenizer", "tokenize it once"), ("Image.open", "decode them in a data loader's workers"),
     ("time.sleep", "remove the pause"), ("json.loads", "prepare batches in the workers"),
     ("subprocess.run", "prepare batches in the workers")],
)  # fmt: skip
def test_remedy_of_batch_preparation_depends_on_the_called_functions(call: str, remedy: str) -> None:
    row = own("get_batch", 8, 0.06, call) | {"feeds_model": True}
    (found,) = causes(loop({"own_python": [row]}, other=0.06))
    assert (found.code, found.remedy.startswith(remedy)) == ("batch-preparation", True)


@pytest.mark.parametrize(("line", "time_s", "is_named"), [(8, 0.0499, True), (8, 0.0501, False), (9, 0.0499, False)])
def test_many_short_draws_at_the_line_that_prepares_batches_are_small_operators(
    line: int, time_s: float, is_named: bool
) -> None:
    row = own("diffuse", 8, time_s, "torch.randn_like") | {"feeds_model": True}
    drawn = {"drawn": "torch.randn_like", "function": "diffuse", "place": f"train.py:{line}", "calls": 50}
    (found,) = causes(loop({"own_python": [row], "many_draws": [drawn]}, other=0.06))
    assert found.code == "batch-preparation"
    words = "; it is many small operators: torch.randn_like runs at least 50 times a step: compute it in one operator"
    assert (words in found.sentence) == is_named


@pytest.mark.parametrize(
    ("call", "time_s", "is_named"),
    [
        ("torch.randn", 0.0249, False),
        ("torch.randn", 0.0251, True),
        ("encode", 0.0099, False),
        ("encode", 0.0101, True),
    ],
)
def test_small_share_of_data_is_not_named(call: str, time_s: float, is_named: bool) -> None:
    """Random numbers stand for data in a test, and are named only from a quarter of the step."""
    row = own("", 8, time_s, call) | {"feeds_model": True}
    found = causes(loop({"own_python": [row]}, other=time_s))
    assert [each.code for each in found] == ["batch-preparation"] * is_named


@pytest.mark.parametrize(("share", "is_named"), [(0.08, False), (0.09, True)])
def test_recomputation_is_named_from_a_twentieth_of_the_step(share: float, is_named: bool) -> None:
    found = causes(loop({"repeated_forward": [{"backward_share": share}]}))
    assert [each.code for each in found] == ["recomputation"] * is_named


@pytest.mark.parametrize(
    ("operators", "arithmetic_s", "is_named"),
    [(299, 0.001, False), (300, 0.001, True), (300, 0.0076, True), (300, 0.0078, False)],
)
def test_operators_are_small_if_they_are_many_without_arithmetic(
    operators: int, arithmetic_s: float, is_named: bool
) -> None:
    row = {"operators": operators, "arithmetic_s": arithmetic_s, "function": None, "place": None}
    found = causes(loop({"forward_operators": [row]}))
    assert [each.code for each in found] == ["small-operators"] * is_named
    assert causes(loop({"forward_operators": [row | {"has_recurrent": True}]})) == (), "they are not the whole pass"


@pytest.mark.parametrize(
    ("function", "calls", "time_s", "is_named"),
    [("MyAdam.step", "v.sqrt", 0.011, True), ("MyAdam.step", "v.sqrt", 0.009, False),
     ("Trainer.fit", "self.optimizer.step", 0.05, False), ("", "optimizer.step", 0.05, False)],
)  # fmt: skip
def test_optimizer_in_own_python_is_named(function: str, calls: str, time_s: float, is_named: bool) -> None:
    phases = PHASES | {"optimizer": 0.05, "backward": 0.016}
    measurement = Measurement("monotonic", (Sample(0, False, STEP_S, phases, phases),) * 10, 0.0)
    rows = [own(function, 8, time_s, calls, "optimizer")]
    found = causes(replace(loop({"own_python": rows}), measurement=measurement))
    assert [each.code for each in found] == ["unfused-optimizer"] * is_named
    if is_named:
        assert found[0].cause == (
            "11% of the step is an optimizer in the script's own Python: MyAdam.step() at train.py:8, v.sqrt (11%)"
        )


@pytest.mark.parametrize(
    ("rows", "phase_s", "is_named"),
    [([FUSED | {"time_s": 0.0126}], 0.0126, True),
     ([FUSED | {"time_s": 0.0124}], 0.0124, False),  # saves less than a tenth of the step
     ([FUSED | {"time_s": 0.0084}], 0.06, True),
     ([FUSED | {"time_s": 0.0083}], 0.06, False),  # may save less than a twentieth of the step
     ([FUSED | {"time_s": 0.0042, "updates": 2.0}], 0.06, True),
     ([FUSED | {"time_s": 0.0042}] * 2, 0.06, True),
     ([FUSED | {"high_share": 0.87}], 0.06, True),
     ([FUSED | {"high_share": 0.88}], 0.06, False),
     ([FUSED | {"high_share": 1.0}], 0.06, False),
     ([FUSED | {"high_share": 0.27}], 0.0201, True),
     ([FUSED | {"high_share": 0.28}], 0.0201, False),  # a fused update may take most of the phase
     ([FUSED | {"fused_share": 0.0, "high_share": 0.01}], 0.0201, True),
     ([FUSED | {"fused_share": 0.0, "high_share": 0.01}], 0.0199, False)],  # such as of a compiled update
)  # fmt: skip
def test_update_is_named_if_fused_copies_took_less(rows: list[dict[str, Any]], phase_s: float, is_named: bool) -> None:
    found = causes(loop({"fused_updates": rows}, optimizer=phase_s))
    assert [each.code for each in found] == ["unfused-optimizer"] * is_named


def test_trial_that_is_longer_than_the_phase_saves_a_share_of_the_phase() -> None:
    (found,) = causes(loop({"fused_updates": [FUSED, FUSED | {"optimizer": "SGD"}]}, optimizer=0.06))
    assert found.cause.startswith(
        "60% of the step is the optimizer, AdamW and SGD with several operators for each of 248 parameters"
    )
    assert found.remedy == "pass fused=True to torch.optim.AdamW and torch.optim.SGD"
    assert found.expected is not None
    assert found.expected.value == pytest.approx(0.1 - 0.06 * 0.8)
    assert found.expected.low == pytest.approx(0.1 - 0.06), "no more than the phase"
    assert found.expected.high == pytest.approx(0.1 - (0.06 - 0.1 * 0.25) * 0.8), "fused updates as long as of copies"


@pytest.mark.parametrize(
    ("row", "phase_s", "how"),
    [({"time_s": 0.041}, 0.06, "measured"), ({"time_s": 0.039}, 0.06, "forecast"),
     ({"time_s": 0.05}, 0.034, "measured"), ({"time_s": 0.05}, 0.033, "forecast"),
     ({"tried": 123}, 0.05, "forecast"), ({"others": 1}, 0.05, "forecast")],
)  # fmt: skip
def test_gain_is_measured_only_if_the_trial_was_like_the_phase(row: dict[str, Any], phase_s: float, how: str) -> None:
    (found,) = causes(loop({"fused_updates": [FUSED | row]}, optimizer=phase_s))
    assert found.expected is not None
    assert found.expected.how == how


# trials that were shorter or longer than the phase, and the steps of the same programs with fused=True
TRUTHS = {
    "parameters in the caches in the trial alone": (0.0486, 0.0243, 0.0083, 0.40, 0.0245),
    "many parameters": (0.0209, 0.0083, 0.0044, 0.18, 0.0146),
    "some of the parameters were tried": (0.172, 0.117, 0.188, 0.145, 0.077),
    "a network of a guide": (0.035, 0.0178, 0.0104, 0.26, 0.0231),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_range_of_the_gain_has_the_step_that_was_measured(name: str) -> None:
    step_s, phase_s, time_s, share, truth_s = (each / TRUTHS[name][0] * STEP_S for each in TRUTHS[name])
    share = TRUTHS[name][3]
    row = FUSED | {"time_s": time_s, "fused_share": share, "low_share": 0.9 * share, "high_share": 1.3 * share}
    (found,) = causes(loop({"fused_updates": [row]}, optimizer=phase_s))
    assert found.expected is not None
    assert found.expected.low <= truth_s * 1.01
    assert truth_s <= found.expected.high
    assert found.expected.value == pytest.approx(step_s - phase_s * (1 - share))
    assert found.expected.how == "forecast"


def test_gain_next_to_an_optimizer_that_was_not_tried_is_that_of_the_trial() -> None:
    for rows in ([FUSED | {"time_s": 0.02, "others": 1}], [FUSED | {"time_s": 0.02}, FUSED | {"high_share": 1.0}]):
        (found,) = causes(loop({"fused_updates": rows}, optimizer=0.06))
        assert found.cause.startswith("20% of the step is the optimizer")
        assert found.expected is not None
        assert found.expected.value == pytest.approx(0.1 - 0.02 * 0.8)
        assert found.expected.low == pytest.approx(0.1 - 0.06)


def test_fused_update_takes_the_place_of_foreach() -> None:
    (found,) = causes(loop({"fused_updates": [FUSED | {"is_foreach": True}]}, optimizer=0.06))
    assert found.remedy == "pass fused=True in place of foreach=True to torch.optim.AdamW"


def test_forward_passes_of_a_loop_that_does_not_train_are_no_cause() -> None:
    phases = {"forward": 0.08, "other": 0.02}
    measurement = Measurement("monotonic", (Sample(0, False, STEP_S, phases, phases),) * 10, 0.0)
    rows = [own("act", 40, 0.08, "policy", "forward without gradients")]
    assert causes(replace(loop({"own_python": rows}), measurement=measurement)) == ()
    assert [each.code for each in causes(loop({"own_python": rows}))] == ["rollouts"]


@pytest.mark.parametrize(
    ("rows", "other", "is_named"),
    [([own("act", 8, 0.0049), own("observe", 20, 0.0049)], 0.012, False),
     ([own("act", 8, 0.0051), own("observe", 20, 0.0049)], 0.012, True),
     ([own("act", 8, 0.0049), own("observe", 20, 0.0049)], 0.021, True),
     ([own("learn", 8, 0.011) | {"place_share": 0.4}], 0.012, False),
     ([own("learn", 8, 0.011) | {"place_share": 0.5}], 0.012, True)],
)  # fmt: skip
def test_small_share_of_own_python_is_named_with_a_place_that_is_worth_a_change(
    rows: list[dict[str, Any]], other: float, is_named: bool
) -> None:
    of_loop = [own("learn", 40, 0.006, "optimizer.step", "optimizer")]
    found = causes(loop({"own_python": [*rows, *of_loop]}, other=other))
    assert [each.code for each in found] == ["own-python"] * is_named


def test_function_that_calls_no_phase_is_one_place() -> None:
    rows = [own("augment", 8, 0.011) | {"place_share": 0.1}]
    assert [each.code for each in causes(loop({"own_python": rows}, other=0.012))] == ["own-python"]


def test_prepared_batches_and_other_own_python_share_the_time() -> None:
    rows = [own("augment", 8, 0.04) | {"feeds_model": True}, own("metric", 9, 0.02, "time.sleep")]
    found = causes(loop({"own_python": rows}, other=0.06))
    assert [(each.code, each.share) for each in found] == [
        ("batch-preparation", pytest.approx(0.4)), ("own-python", pytest.approx(0.2))]  # fmt: skip


def test_kind_of_work_is_the_own_function_if_its_calls_do_not_show_it() -> None:
    (found,) = causes(loop({"own_python": [own("Trainer.update_metrics", 8, 0.05, "int")]}, other=0.06))
    assert found.sentence.startswith(
        "60% of the step is the script's own Python, which computes metrics: Trainer.update_metrics() at train.py:8, "
        "int (50%): compute them less often"
    )
    half = {"own_python": [own("update_metrics", 8, 0.029), own("augment", 9, 0.03)]}
    (found,) = causes(loop(half, other=0.06))
    assert "own Python: update_metrics() at" in found.sentence, "less than half of the time is no kind of all of it"


def test_unobserved_phases_are_a_question_where_nothing_is_found() -> None:
    """The times of phases alone do not show that nothing can be gained inside them."""
    why = {
        "unsampled": [{"reason": "--stop ended the script before its stack was sampled", "remedy": "leave out --stop"}]
    }
    answer = apply_rules(loop(why))
    assert answer.others == [
        "cannot be told: what takes 92% of the step inside the model's phases: --stop ended the script before its "
        "stack was sampled; leave out --stop"
    ]
    assert apply_rules(loop(why | {"anomaly_detection": [ANOMALY]})).unknowns == (), "there is a cause"
    assert apply_rules(replace(loop(why), measurement=None)).unknowns == ()
    inside = {"forward": 0.009, "other": 0.0}
    rest = {"optimizer": 0.091}
    sample = Sample(0, False, STEP_S, inside | rest, inside | rest)
    assert apply_rules(replace(loop(why), measurement=Measurement("monotonic", (sample,) * 10, 0.0))).unknowns == ()


def test_part_of_the_loss_is_not_done_less_often_whatever_its_name() -> None:
    row = own("Policy.evaluate", 8, 0.05, "MultivariateNormal")
    (named,) = causes(loop({"own_python": [row]}, other=0.06))
    assert "which evaluates" in named.sentence
    (found,) = causes(loop({"own_python": [row | {"feeds_loss": True}]}, other=0.06))
    assert found.sentence.startswith(
        "60% of the step is the script's own Python: Policy.evaluate() at train.py:8, MultivariateNormal (50%): make "
        "it faster, or, if it prepares data, move it into the workers of a data loader; the loss is computed from its"
    )


def test_part_of_the_loss_has_no_bound() -> None:
    """Other operators before the loss change its backward, too."""
    row = own("Policy.bound", 8, 0.025)
    (before,) = causes(loop({"own_python": [row]}, other=0.03))
    (of_loss,) = causes(loop({"own_python": [row | {"feeds_loss": True}]}, other=0.03))
    assert before.share == pytest.approx(of_loss.share)
    assert before.at_best is not None
    assert of_loss.at_best is None


def test_other_time_without_samples_is_unknown() -> None:
    """A share of the step that nothing explains is neither a cause nor nothing."""
    why = [{"reason": "--stop ended the script before its stack was sampled", "remedy": "leave out --stop"}]
    answer = apply_rules(loop({"unsampled": why}, other=0.06))
    assert answer.others == [
        "cannot be told: what runs in 60% of the step outside the model's phases: --stop ended the script before its "
        "stack was sampled; leave out --stop"
    ]
    few = own("augment", 8, 0.05) | {"samples": 2}
    assert apply_rules(loop({"own_python": [few]}, other=0.06)).others == [
        "cannot be told: what runs in 60% of the step outside the model's phases"
    ]


@pytest.mark.parametrize(("function", "at_best"), [("batches", 0.036), ("train", 0.054)])
def test_bound_of_a_preparation_leaves_out_the_collections_that_it_starts(function: str, at_best: float) -> None:
    made = own("batches", 8, 0.04, "torch.tensor") | {"feeds_model": True}
    tables = {"own_python": [made, own("garbage collector", 0, 0.02) | {"place": ""}],
              "garbage_collection": [collected(0.8, function=function, place="train.py:8")]}  # fmt: skip
    found = next(each for each in causes(loop(tables, other=0.07)) if each.code == "batch-preparation")
    assert found.at_best == pytest.approx(at_best)
    assert found.share == pytest.approx(0.4)


def test_penalty_on_all_rows_of_a_table_is_told() -> None:
    (found,) = causes(loop({"dense_gradients": [TABLE | {"is_penalised": True}]}, optimizer=0.04))
    assert "a step uses about 2,000 of 150,000 rows, apart from a penalty on all rows: penalise" in found.sentence


def test_bound_allows_for_a_short_rest_that_runs_in_cold_caches() -> None:
    """Phases of µs take a third of their recorded time in a step without other code."""
    phases = {"forward": 0.0006, "loss": 0.0004, "backward": 0.001, "optimizer": 0.0008, "other": 0.0122}
    measurement = Measurement("monotonic", (Sample(0, False, 0.015, phases, phases),) * 10, 0.0)
    tables = {"own_python": [own("batches", 32, 0.012, "float") | {"feeds_model": True}]}
    (found,) = causes(Evidence(tables, measurement, LOOP, judged="the step's time"))
    assert found.at_best == pytest.approx(0.001)


def test_forward_of_a_target_network_prepares_no_batch() -> None:
    """Without gradients the flow goes into the loss, and not into the model's input."""
    target = own("update", 32, 0.04) | {"feeds_model": True}
    (found,) = causes(loop({"own_python": [target]}, other=0.05))
    assert found.code == "batch-preparation"
    assert not causes(loop({"own_python": [target | {"phase": "forward without gradients"}]}, other=0.05))


def test_bound_leaves_out_the_hooks_around_calls_of_phases() -> None:
    rows = [own("batches", 32, 0.04) | {"feeds_model": True}, own("calls of phases", 0, 0.01) | {"place": ""}]
    (found,) = causes(loop({"own_python": rows}, other=0.05))
    assert found.at_best == pytest.approx(0.9 * 0.05)


def test_garbage_collection_between_phases_does_not_count_as_own_python() -> None:
    collector = own("garbage collector", 0, 0.045) | {"place": ""}
    tables = {"own_python": [collector, own("augment", 8, 0.01)], "garbage_collection": [collected(2.0)]}
    found = causes(loop(tables, other=0.06))
    assert [each.code for each in found] == ["garbage-collection", "own-python"]
    assert found[1].sentence.startswith("15% of the step is the script's own Python: augment() at train.py:8 (10%): ")
    assert found[1].at_best == pytest.approx(0.0765)


@pytest.mark.parametrize(
    ("own_s", "function", "known", "codes"),
    [(0.03, "update", {}, ["own-python"]), (0.024, "update", {}, ["garbage-collection", "own-python"]),
     (0.03, "other", {}, ["garbage-collection", "own-python"]),
     (0.03, "update", {"is_called": True}, ["garbage-collection", "own-python"])],
)  # fmt: skip
def test_collections_that_a_function_starts_belong_to_it(
    own_s: float, function: str, known: dict[str, Any], codes: list[str]
) -> None:
    """Half of the loop is in the collector; without the function that makes the objects, it would not run."""
    collections = collected(2.0, function=function, place="train.py:8", **known)
    tables = {"own_python": [own("update", 8, own_s, "int")], "garbage_collection": [collections]}
    found = causes(loop(tables, other=own_s))
    assert [each.code for each in found] == codes
    if codes == ["own-python"]:
        assert found[0].sentence.startswith(
            "30% of the step is the script's own Python: update() at train.py:8, int (30%); objects made there also "
            "start Python's garbage collector, 50% of the loop: "
        )


def test_own_python_is_judged_only_for_loops() -> None:
    evidence = PLANTED["own-python"][0]
    assert causes(replace(evidence, config=RunConfig())) == ()


@pytest.mark.parametrize(
    ("every", "words"),
    [(2, "every second step"), (10, "every tenth step"), (21, "every 21st step"), (112, "every 112th step"),
     (None, "4 slow steps")],
)  # fmt: skip
def test_slow_steps_are_named_by_their_distance(every: int | None, words: str) -> None:
    (found,) = causes(loop({"slow_steps": [slow(every=every)]}))
    assert f"50% of the loop is in {words}: evaluate() at" in found.sentence


def test_slow_steps_that_were_not_sampled_have_no_place() -> None:
    (found,) = causes(loop({"slow_steps": [slow(place=None, function=None, calls=None, sampled=0)]}))
    assert found.sentence.startswith("50% of the loop is in every tenth step: see what the loop does there")


def test_single_slow_step_comes_after_causes_in_the_usual_steps() -> None:
    """A step that is slow once, such as the first evaluation, is no cause in a training that lasts."""
    tables = {"slow_steps": [slow(steps=1, every=None, extra_s=7.0)], "own_python": [own("augment", 8, 0.02)]}
    assert [each.code for each in causes(loop(tables, other=0.03))] == ["own-python", "periodic-steps"]


def test_steps_slowed_by_garbage_collection_have_a_rule() -> None:
    tables = {"slow_steps": [slow()], "garbage_collection": [collected(3.0)]}
    assert [each.code for each in causes(loop(tables))] == ["garbage-collection"]
    once = {"slow_steps": [slow()], "garbage_collection": [collected(3.0, in_steps=1)]}
    assert [each.code for each in causes(loop(once))] == ["periodic-steps"]


def test_calls_of_phases_do_not_count_as_own_python() -> None:
    around = own("calls of phases", 0, 0.055) | {"place": ""}
    assert causes(loop({"own_python": [around]}, other=0.06)) == ()


def test_usual_steps_count_for_their_share_of_the_loop() -> None:
    """Rank 60% of a usual step as 24% of a loop in which slow steps take 60%."""
    tables = {"slow_steps": [slow(extra_s=4.8)], "own_python": [own("augment", 8, 0.06)]}
    assert [each.code for each in causes(loop(tables, other=0.06))] == ["periodic-steps", "own-python"]


@pytest.mark.parametrize(
    ("device", "phase", "names"),
    [("cpu", None, True), ("cpu", "backward", True), ("cuda", "backward", False), ("cpu", "other", False)],
)
def test_steps_that_grow_for_an_unknown_reason_may_fade_to_denormals_on_a_cpu(
    device: Any, phase: str | None, names: bool
) -> None:
    evidence = loop({"growth": [growing("step time", 0.02, 0.07, phase=phase)]})
    (found,) = causes(replace(evidence, config=replace(LOOP, device=device)))
    assert ("torch.set_flush_denormal(True)" in found.remedy) is names


@pytest.mark.parametrize(
    ("share", "extra_s", "known", "is_named"),
    [(0.01, 0.07, {}, True), (0.0099, 0.07, {}, False), (0.2, 0.07, {"phase": "optimizer"}, True),
     (0.2, 0.07, {"phase": "other"}, False), (0.2, 0.07, {"phase": "input"}, False),
     (0.2, 0.04, {}, False), (0.2, None, {"phase": "optimizer"}, False)],
)  # fmt: skip
def test_steps_that_grow_with_denormal_numbers_in_the_optimizer_are_told_so(
    share: float, extra_s: float | None, known: dict[str, Any], is_named: bool
) -> None:
    faded = {"optimizer": "Adam", "state": "exp_avg", "share": share, "step": 1750, "extra_s": extra_s}
    rows = {"growth": [growing("step time", 0.1, 0.2, **known)], "denormals": [faded]}
    (found,) = causes(loop(rows))
    assert ("has faded to denormal numbers" in found.cause) is is_named
    if is_named:
        assert found.cause.endswith(
            f"200 ms after 50 steps; at step 1,750, {share:.0%} of what Adam keeps (exp_avg) has faded to denormal "
            "numbers, with which a CPU is slow"
        )
        assert found.remedy == "torch.set_flush_denormal(True) before the loop"


def test_growing_step_names_its_phase() -> None:
    (found,) = causes(loop({"growth": [growing("step time", 0.02, 0.07, phase="other")]}))
    assert found.sentence.startswith(
        "a step takes 1.00 ms longer with each step: 20.0 ms at first, 70.0 ms after 50 steps, most of it outside of "
        "the model: "
    )
    rows = {"growth": [growing("step time", 0.02, 0.07)], "own_python": [own("mean", 8, 0.06, "sum")]}
    assert "after 50 steps (mean() at train.py:8, sum): find" in causes(loop(rows, other=0.06))[0].sentence
    rows["own_python"] = [own("mean", 8, 0.01, "sum")]
    assert "after 50 steps: find" in causes(loop(rows))[0].sentence, "it is not what grows"


@pytest.mark.parametrize(
    ("what", "remedy"),
    [("tensors with their graphs", "keep numbers in place of tensors with their graph"),
     ("tensors in storages of 768 KiB", "keep numbers (.item()) or copies (.clone()) in place of"),
     ("objects", "keep fewer of them")],
)  # fmt: skip
def test_remedy_of_growth_depends_on_the_kept_objects(what: str, remedy: str) -> None:
    (found,) = causes(loop({"growth": [growing("host memory", 1e9, 3e9, kept="losses", kept_tensors=what)]}))
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize(("wait_s", "is_named"), [(0.0245, False), (0.0255, True)])
def test_wait_for_a_batch_is_named_if_the_rest_of_the_step_varies_less(wait_s: float, is_named: bool) -> None:
    """A machine that other programs keep busy slows down a loader's workers, too."""
    rests_s = [0.1 + 0.05 * number / 8 for number in range(-1, 10)]  # the middle 80% within 50 ms
    samples = [
        Sample(0, False, rest + wait_s, phases := {"input": wait_s, "forward": rest}, phases) for rest in rests_s
    ]
    evidence = replace(loop(), measurement=Measurement("monotonic", tuple(samples), 0.0))
    assert [each.code for each in causes(evidence)] == ["data-input"] * is_named


@pytest.mark.parametrize(("begun", "is_anew"), [(4, False), (5, True)])
def test_loader_that_is_restarted_in_each_step_is_named(begun: int, is_anew: bool) -> None:
    phases = {"input": 0.05, "forward": 0.05}
    measurement = Measurement("monotonic", (Sample(0, False, 0.1, phases, phases),) * 10, 0.0)
    iterators = [{"steps": 10, "with_new": begun}]
    (found,) = causes(replace(loop({"iterators": iterators}), measurement=measurement))
    assert found.code == "data-input"
    assert ("whose iterator is made anew in each step" in found.cause) is is_anew
    assert found.remedy.startswith("make the loader and its iterator once" if is_anew else "raise the data loader's")


@pytest.mark.parametrize(("collated", "is_named"), [(4, False), (5, True)])
def test_rows_in_memory_that_a_loader_puts_together_have_a_remedy_of_their_own(collated: int, is_named: bool) -> None:
    phases = {"input": 0.05, "forward": 0.05}
    measurement = Measurement("monotonic", (Sample(0, False, 0.1, phases, phases),) * 10, 0.0)
    tables = {"iterators": [{"steps": 10, "with_new": 0, "collated": collated}]}
    (found,) = causes(replace(loop(tables), measurement=measurement))
    assert found.remedy.startswith("the data are tensors in memory" if is_named else "raise the data loader's")


def test_collections_while_the_main_process_loads_belong_to_the_wait() -> None:
    phases = {"input": 0.05, "forward": 0.05}
    measurement = Measurement("monotonic", (Sample(0, False, 0.1, phases, phases),) * 10, 0.0)
    tables = {"garbage_collection": [collected(1.6, function="train", place="train.py:8")],
              "own_python": [own("train", 8, 0.04, phase="input")]}  # fmt: skip
    (found,) = causes(replace(loop(tables), measurement=measurement))
    assert found.code == "data-input"
    assert "for which Python's garbage collector runs too (40% of the loop)" in found.cause


def test_end_of_an_iterator_made_for_one_step_belongs_to_the_wait() -> None:
    phases = {"input": 0.05, "forward": 0.03, "other": 0.02}
    measurement = Measurement("monotonic", (Sample(0, False, 0.1, phases, phases),) * 10, 0.0)
    rows = [own("", 8, 0.02, "next") | {"feeds_model": True}]
    tables = {"iterators": [{"steps": 10, "with_new": 10}], "own_python": rows}
    (found,) = causes(replace(loop(tables), measurement=measurement))
    assert found.cause.startswith("70% of the step waits for the next batch, from a data loader whose iterator is made")


def test_answer_without_a_cause_ends_with_the_line_of_most_time() -> None:
    lines = [
        inner("forward", 8, 0.015, method="gru"),
        inner("forward", 8, 0.01, method="gru", phase="backward"),
        inner("forward", 9, 0.02, method="linear"),
        inner("", 20, 0.05, method="backward", phase="backward"),
    ]
    nothing = "nothing found that would save more than 5% of the step, judged by its timed phases alone"
    answer = apply_rules(replace(loop({"inner_lines": lines}), judged="the step, judged by its timed phases alone"))
    assert answer.nothing == f"{nothing}; 25% of the step is forward() at train.py:8, gru()"
    short = [{**each, "time_s": 0.7 * each["time_s"]} for each in lines]
    assert apply_rules(loop({"inner_lines": short})).longest == ""
    assert apply_rules(loop({"inner_lines": [lines[0] | {"time_s": 0.03, "samples": 4}]})).longest == ""
    assert apply_rules(loop({"inner_lines": [lines[0] | {"time_s": 0.03, "samples": 5, "function": ""}]})).longest == (
        "30% of the step is train.py:8, gru()"
    )


def test_growth_without_a_name_has_a_general_remedy() -> None:
    (found,) = causes(loop({"growth": [growing("device memory", 1e9, 3e9)]}))
    assert "device memory grows by 38.1 MiB a step: 1.86 GiB in 50 steps: find what is kept" in found.sentence


@pytest.mark.parametrize(
    ("skipped", "words"),
    [(20, "the GradScaler skips all 20 optimizer steps (scale 1.70e+38 at first, 1.00e+31 at last), so that the loop "),
     (15, "the GradScaler skips 15 of 20 optimizer steps (scale 1.70e+38 at first, 1.00e+31 at last): set a lower"),
     (9, None)],
)  # fmt: skip
def test_skipped_optimizer_steps_come_before_all_times(skipped: int, words: str | None) -> None:
    tables = {"outcome": [SKIPPED | {"skipped_steps": skipped}], "slow_steps": [slow(extra_s=7.9)]}
    first, *others = causes(loop(tables))
    if words is None:
        assert (first.code, others) == ("periodic-steps", [])
    else:
        assert first.sentence.startswith(words)
        assert [each.code for each in others] == ["periodic-steps"]


def test_nan_loss_of_a_loop_is_named_without_times() -> None:
    evidence = replace(loop({"outcome": [outcome(loss=None, fault="infinite")]}), measurement=None)
    (found,) = causes(evidence)
    assert found.sentence.startswith("the loss is infinite after the timed steps")


def test_gradients_for_another_optimizer_are_named_with_the_backward_pass() -> None:
    (found,) = causes(loop({"dropped_gradients": [DROPPED]}))
    assert found.sentence == (
        "8 of 16 backward passes also compute gradients of 14 parameters of another optimizer (Adam), such as "
        "Generator.net.0.weight, and zero_grad clears them before it steps (train.py:30): detach what comes from the "
        "other model (.detach()), or make it under torch.no_grad()"
    )
    assert not causes(loop({"dropped_gradients": [DROPPED | {"share": 0.01}]}))


def test_gradients_that_ranks_reduce_in_vain_are_named_with_the_model_to_freeze() -> None:
    reduced = DROPPED | {"share": 0.0, "reduced_share": 0.5}
    sent = {"share": 0.2, "are_gradients": True}
    (found,) = causes(loop({"dropped_gradients": [reduced], "loop_collectives": [sent]}))
    assert found.sentence == (
        "8 of 16 backward passes also compute and reduce gradients of 14 parameters of another optimizer (Adam), such "
        "as Generator.net.0.weight, and zero_grad clears them before it steps (train.py:30): for the forward and "
        "backward of these passes call requires_grad_(False) on that model, and call the module inside "
        "DistributedDataParallel (model.module)"
    )
    assert found.takes == pytest.approx(0.01), "half of the reductions"
    assert not causes(loop({"dropped_gradients": [reduced], "loop_collectives": [sent | {"are_gradients": False}]}))


def test_small_shares_inside_the_model_are_no_cause() -> None:
    rows = [inner("mask", 8, 0.005, is_plain=True), inner("check", 9, 0.005, source="assert not x.isnan().any()")]
    rows += [inner("Net.forward", 10, 0.005, method="contiguous"), inner("Net.forward", 11, 0.02, source="y = x[None]")]
    assert not causes(loop({"inner_lines": rows}))


def test_growing_time_outside_of_the_model_is_named_with_its_function() -> None:
    row = growing("time in no phase", 0.005, 0.06, phase="other")
    found = causes(loop({"growth": [row], "own_python": [own("auc", 8, 0.03, "scores.argsort")]}, other=0.03))
    assert found[0].sentence.startswith(
        "the step's time outside of the model grows by 1.10 ms with each step, from 5.00 ms to 60.0 ms in 50 steps, "
        "most of it in auc() at train.py:8, scores.argsort: find what each step does"
    )


@pytest.mark.parametrize("beside", [own("auc", 8, 0.002), own("calls of phases", 8, 0.002)])
def test_growing_time_of_the_collector_is_left_to_its_own_rule(beside: dict[str, Any]) -> None:
    row = growing("time in no phase", 0.0155, 0.0969, phase="other")
    of_collector = own("garbage collector", 8, 0.05) | {"place": ""}
    found = causes(loop({"growth": [row], "own_python": [of_collector, beside]}, other=0.06))
    assert not any("grows" in diagnosis.sentence for diagnosis in found)


def test_results_that_a_cache_keeps_are_named() -> None:
    row = growing("host memory", 1e9, 2e9, kept="distances", kept_tensors="results of calls", place="train.py:3")
    (found,) = causes(loop({"growth": [row]}))
    assert "results of calls are kept in distances at train.py:3: leave lru_cache out" in found.sentence


def test_function_that_also_writes_computes_for_a_log() -> None:
    (found,) = causes(
        loop({"own_python": [own("Watcher.on_step_end", 8, 0.05, "p.sort") | {"writes": True}]}, other=0.06)
    )
    assert "which computes what it writes to a log: Watcher.on_step_end() at train.py:8" in found.sentence
    assert "log less often, or fewer values" in found.sentence


@pytest.mark.parametrize("feeds_model", [False, True])
def test_loop_that_sleeps_between_two_looks_is_told_to_wait_without_a_pause(feeds_model: bool) -> None:
    row = own("fetch", 8, 0.05, "time.sleep") | {"polls": "replies.empty()", "feeds_model": feeds_model}
    (found,) = causes(loop({"own_python": [row]}, other=0.06))
    assert found.code == ("batch-preparation" if feeds_model else "own-python")
    assert "sleeps between two looks at replies.empty(): fetch() at train.py:8, time.sleep" in found.sentence
    assert "wait for it without a pause: get() of a queue with a timeout" in found.sentence


@pytest.mark.parametrize(
    ("time_s", "more", "words"),
    [
        (0.05, 4301.0, "train.py:8 reads all of auc.scores, which grows by about 4,300 elements a step: keep a run"),
        (0.05, 1.0, "train.py:8 reads all of auc.scores, which grows from step to step: keep a running result"),
        (0.004, 4301.0, ""),
    ],
)
@pytest.mark.parametrize("feeds_model", [False, True])
def test_line_that_reads_what_grows_is_named_with_it(time_s: float, more: float, words: str, feeds_model: bool) -> None:
    read = own("area", 8, time_s, "argsort") | {"reads": "auc.scores", "reads_more": more, "feeds_model": feeds_model}
    rows = [own("main", 5, 0.04, "f") | {"feeds_model": feeds_model}, read]
    (found,) = causes(loop({"own_python": rows}, other=0.09))
    assert (words in found.sentence) if words else ("reads all" not in found.sentence)


@pytest.mark.parametrize(("calls", "share"), [("time.sleep", "40%"), ("self.ready.get", "60%")])
def test_time_in_which_a_line_sleeps_is_no_wait_for_another_thread(calls: str, share: str) -> None:
    rows = {"python_threads": [BUSY], "own_python": [own("pace", 9, 0.02, calls)]}
    found = causes(loop(rows, other=0.022))
    assert found[0].cause.startswith(f"{share} of the step the loop waits for the thread")


@pytest.mark.parametrize(("known", "is_found"), [({"held_share": 0.5}, True), ({"held_share": 0.4}, False),
                                                 ({"held_share": 0.5, "puts": False}, False)])  # fmt: skip
def test_loop_waits_outside_of_the_phases_for_a_thread_that_keeps_the_lock_and_fills_a_queue(
    known: dict[str, Any], is_found: bool
) -> None:
    found = causes(loop({"python_threads": [BUSY | known]}, other=0.05))
    assert ("python-threads" in {each.code for each in found}) == is_found


def test_waits_for_a_thread_are_judged_by_means_of_steps_that_differ() -> None:
    evidence = loop({"python_threads": [BUSY]})
    waits = [PHASES | {"other": 0.06 if number < 6 else 0.002} for number in range(10)]
    samples = tuple(Sample(0, False, STEP_S, phases, phases) for phases in waits)
    found = causes(replace(evidence, measurement=Measurement("monotonic", samples, 0.0)))
    assert found[0].code == "python-threads"


@pytest.mark.parametrize(("calls", "puts", "who"), [("self.queue.get", True, "thread Batches.fill() at train.py:8"),
                                                    ("self.queue.get", False, "main process"),
                                                    ("encode", True, "main process")])  # fmt: skip
def test_batches_from_a_queue_are_prepared_by_the_thread_that_fills_it(calls: str, puts: bool, who: str) -> None:
    row = own("batches", 9, 0.05, calls) | {"feeds_model": True}
    found = causes(
        loop({"python_threads": [BUSY | {"held_share": 0.0, "puts": puts}], "own_python": [row]}, other=0.06)
    )
    assert found[0].cause.startswith(f"50% of the step waits for the next batch, which the {who} prepares: batches()")


@pytest.mark.parametrize(("device", "ranks"), [("cuda:0", 1), ("cpu", 2)])
def test_waits_for_a_gpu_or_for_other_ranks_are_no_waits_for_a_thread(device: str, ranks: int) -> None:
    evidence = loop({"python_threads": [BUSY]})
    config = replace(LOOP, device=device, world_size=ranks)
    assert "python-threads" not in {each.code for each in causes(replace(evidence, config=config))}


@pytest.mark.parametrize(
    ("waited_s", "step_s", "is_told"), [(0.0014, 0.023, False), (0.0024, 0.023, True), (0.0014, 0.013, True)]
)
def test_time_in_which_a_ready_batch_is_taken_is_no_wait(waited_s: float, step_s: float, is_told: bool) -> None:
    """Two workers with batches in their queue cost a step of 23 ms 1.4 ms, which more workers would not save."""
    phases = {"input": waited_s, "forward": step_s - waited_s}
    measured = Measurement("monotonic", (Sample(0, False, step_s, phases, phases),) * 10, 0.0)
    found = causes(Evidence({}, measured, LOOP, judged="the step's time"))
    assert ("data-input" in {each.code for each in found}) == is_told


@pytest.mark.parametrize("function", ["symmetric_graph", "recalled_memory", "parametric"])
def test_names_that_only_contain_a_metric_name_sort_for_something_else(function: str) -> None:
    (found,) = causes(loop({"own_python": [own(function, 8, 0.05, "np.argsort")]}, other=0.06))
    assert "for a metric" not in found.sentence


@pytest.mark.parametrize(
    ("calls", "is_of_device"), [("torch.cuda.empty_cache", True), ("self.memo.empty_cache", False)]
)
def test_own_cache_is_not_that_of_the_device(calls: str, is_of_device: bool) -> None:
    (found,) = causes(loop({"own_python": [own("step", 8, 0.05, calls)]}, other=0.06))
    assert ("which gives the device's memory back" in found.sentence) == is_of_device


@pytest.mark.parametrize("function", ["Recall.add", "update_ndcg", "mean_auc", "Metrics.compute"])
def test_who_sorts_for_a_metric_is_told_to_compute_it_less_often(function: str) -> None:
    (found,) = causes(loop({"own_python": [own(function, 8, 0.05, "scores.argsort")]}, other=0.06))
    assert f"which sorts for a metric: {function}() at train.py:8" in found.sentence
    assert "(Tensor.topk, heapq); or compute the metric every few steps" in found.sentence


@pytest.mark.parametrize("function", ["map_tokens", "shuffle", "AucklandLoader.order"])
def test_who_sorts_for_something_else_is_told_of_no_metric(function: str) -> None:
    (found,) = causes(loop({"own_python": [own(function, 8, 0.05, "scores.argsort")]}, other=0.06))
    assert "metric" not in found.sentence


@pytest.mark.parametrize("call", ["scores.argsort", "torch.sort", "sorted"])
def test_who_sorts_is_told_to_take_the_largest_ones_alone(call: str) -> None:
    (found,) = causes(loop({"own_python": [own("Order.add", 8, 0.05, call)]}, other=0.06))
    assert "which sorts: Order.add() at train.py:8" in found.sentence
    assert "take these alone (Tensor.topk, heapq)" in found.sentence


def test_plain_python_after_the_model_says_where_it_is() -> None:
    (found,) = apply_rules(loop({"inner_lines": [inner("augment", 8, 0.03, phase="loss", is_plain=True)]})).diagnoses
    assert found.cause == (
        "30% of the step is Python between the model and backward, which computes without tensors: "
        "augment() at train.py:8 (30%)"
    )
    (found,) = apply_rules(
        loop(
            {
                "inner_lines": [
                    inner("mask", 8, 0.03, is_plain=True),
                    inner("augment", 9, 0.01, phase="loss", is_plain=True),
                ]
            }
        )
    ).diagnoses
    assert "is Python inside the model" in found.cause


def test_a_state_that_is_copied_before_backward_is_no_loop_over_small_operators() -> None:
    row = inner("rollback", 8, 0.03, phase="loss", method="deepcopy", late_s=8e-5, samples=90)
    (found,) = causes(loop({"inner_lines": [row]}))
    assert found.sentence.startswith(
        "30% of the step is Python between the model and backward, which copies objects: rollback() at train.py:8 "
        "(30%): copy values into tensors that exist"
    )
    (found,) = causes(loop({"inner_lines": [row, inner("mask", 9, 0.02, is_plain=True)]}))
    assert "30% of the step is Python between the model and backward, which copies objects" in found.sentence
    (found,) = causes(loop({"inner_lines": [row | {"method": "log", "phase": "forward", "time_s": 0.05}]}))
    assert found.code == "small-operators"


@pytest.mark.parametrize(
    ("share", "named"), [(0.7, " (after the timed steps mostly log() at train.py:8, logger.info)"), (0.5, "")]
)
def test_growing_steps_name_the_line_that_took_most_of_the_phase_when_sampled(share: float, named: str) -> None:
    row = growing("step time", 0.005, 0.025, phase="other")
    found = causes(loop({"growth": [row], "own_python": [own("log", 8, 0.001, "logger.info") | {"share": share}]}))
    assert f"most of it outside of the model{named}: find what each step does" in found[0].sentence


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("self.table.to_csv", ", which writes values as text): write only what is new in each step"),
        ("file.write", ", which writes a file): write only what is new in each step"),
        ("pd.concat", ", which fills a pandas table): keep the values in a list, and make the table after the loop"),
        ("sum", "): find what each step does for all steps before it"),
    ],
)
def test_growing_steps_that_write_all_again_are_told_to_write_what_is_new(calls: str, words: str) -> None:
    rows = {"growth": [growing("step time", 0.02, 0.07)], "own_python": [own("Table.add", 8, 0.06, calls)]}
    assert f"Table.add() at train.py:8, {calls}{words}" in causes(loop(rows, other=0.06))[0].sentence


def on_gpu(lags: dict[str, float], **tables: Any) -> Evidence:
    sample = Sample(0, False, STEP_S, PHASES, PHASES, lags)
    return replace(loop(tables), measurement=Measurement("cuda_event", (sample,) * 10, 0.0), device_name="NVIDIA H200")


def test_loop_whose_gpu_waits_for_launches_says_so_without_a_bound() -> None:
    late = {"forward": 0.0, "loss": 0.0, "backward": 0.001, "optimizer": 0.006, "other": 0.002}
    (found,) = apply_rules(on_gpu(late)).diagnoses
    assert found.code == "launch-bound"
    assert found.cause == "for 92% of the step (forward, loss, backward) the GPU keeps waiting for kernel launches"
    assert found.at_best is None
    assert "not below" not in found.sentence
    assert apply_rules(on_gpu(PHASES)).diagnoses == ()


def test_plain_python_is_no_wait_for_launches() -> None:
    late = {"forward": 0.0, "loss": 0.002, "backward": 0.06, "optimizer": 0.006, "other": 0.002}
    (found,) = apply_rules(on_gpu(late, inner_lines=[inner("mask", 8, 0.029, is_plain=True)])).diagnoses
    assert found.code == "python-in-forward"


def test_single_slow_step_of_unknown_cause_is_not_named() -> None:
    row = slow(steps=1, every=None, extra_s=2.0)
    assert [one.code for one in apply_rules(loop({"slow_steps": [row]})).diagnoses] == ["periodic-steps"]
    other = slow(extra_s=1.0)
    (found,) = causes(loop({"slow_steps": [row | {"place": None}, other]}))
    assert found.evidence == (other,), "they do not hide what is known of others"
    unknown = row | {"function": None, "place": None, "calls": None}
    assert apply_rules(loop({"slow_steps": [unknown]})).diagnoses == ()


@pytest.mark.parametrize(
    ("known", "is_found"),
    [
        ({}, True),
        ({"looks": 2}, False),
        ({"worked_share": 0.49}, False),
        ({"worked_share": None}, False),
        ({"calls": "len"}, False),
        ({"calls": "torch.save", "looks": 1, "worked_share": 0.0}, True),
        ({"without_gradients": True, "looks": 1, "worked_share": 0.0}, True),
        ({"steps": 2, "looks": 1, "worked_share": 0.0}, True),
    ],
)
def test_single_slow_step_is_named_only_if_the_program_worked_in_one_function_or_its_work_is_known(
    known: dict[str, Any], is_found: bool
) -> None:
    alone = slow(steps=1, every=None, without_gradients=False, function="mine", calls="pairs", looks=3)
    row = alone | {"worked_share": 0.5} | known
    assert (causes(loop({"slow_steps": [row]})) != ()) == is_found


def test_call_that_cannot_take_long_is_not_named_as_what_makes_steps_slow() -> None:
    for calls in ("len", "rows.append", "isinstance"):
        (found,) = causes(loop({"slow_steps": [slow(calls=calls, without_gradients=False)]}))
        assert "evaluate() at train.py:88: do this less often" in found.sentence


def test_squeezed_predictions_are_paired_by_the_target() -> None:
    (found,) = causes(loop({"paired_targets": [PAIRED | {"shape": "768"}]}))
    assert found.remedy.endswith("such as by target.squeeze(-1)")


@pytest.mark.parametrize(
    ("samples", "where"),
    [(9, ""), (10, "most of the loss's time is in huber() at train.py:8")],
)
def test_pairs_are_placed_in_the_function_with_most_of_the_loss(samples: int, where: str) -> None:
    lines = [
        inner("huber", 8, 0.002, phase="loss", samples=samples),
        inner("main", 9, 0.001, phase="loss", samples=0),
        inner("main", 10, 0.03, phase="loss", samples=50, method="backward"),
    ]
    (found, *_) = causes(loop({"paired_targets": [PAIRED], "inner_lines": lines}))
    assert found.where == where


def test_operator_that_takes_no_time_on_the_cores_shows_nothing_of_threads() -> None:
    assert causes(loop({"threads": [{"threads": 8, "cores": 2, "time_s": 0.004, "of_cores_s": 0.0}]})) == ()


def test_wrong_training_comes_before_a_slow_start() -> None:
    tables = {"slow_start": [STARTED], "updates": [updates(again=0, cleared=0, changed=0)]}
    assert [one.code for one in apply_rules(loop(tables)).diagnoses] == ["no-update", "start-up"]


@pytest.mark.parametrize(("timed", "first"), [(5, "start-up"), (6, "own-python")])
def test_causes_of_timed_steps_that_are_the_slow_ones_come_first(timed: int, first: str) -> None:
    tables = {"slow_start": [STARTED | {"timed": timed}], "own_python": [own("augment", 8, 0.07)]}
    evidence = loop(tables, other=0.075)
    assert next(one.code for one in apply_rules(evidence).diagnoses) == first


def test_slow_steps_that_come_again_precede_a_slow_start() -> None:
    tables = {"slow_start": [STARTED], "slow_steps": [slow()]}
    assert [one.code for one in apply_rules(loop(tables)).diagnoses] == ["periodic-steps", "start-up"]


def test_slow_steps_that_wait_for_a_batch_are_the_inputs() -> None:
    waiting = {"slow_steps": [slow(every=2, waits_for_batch=True)]}
    sample = Sample(0, False, STEP_S, PHASES | {"input": 0.03}, PHASES)
    with_input = replace(loop(waiting), measurement=Measurement("monotonic", (sample,) * 10, 0.0))
    assert [one.code for one in apply_rules(with_input).diagnoses] == ["data-input"]
    assert [one.code for one in apply_rules(loop(waiting)).diagnoses] == ["periodic-steps"]


@pytest.mark.parametrize(("with_new", "extra_s", "first"), [(3, 2.5, "periodic-steps"), (3, 2.4, "data-input"),
                                                           (9, 2.5, "data-input")])  # fmt: skip
def test_workers_started_for_each_epoch_precede_a_shorter_wait_of_usual_steps(
    with_new: int, extra_s: float, first: str
) -> None:
    tables = {"slow_steps": [slow(every=10, waits_for_batch=True, extra_s=extra_s, without_gradients=False)],
              "iterators": [{"steps": 30, "with_new": with_new}]}  # fmt: skip
    sample = Sample(0, False, STEP_S, PHASES | {"input": 0.03}, PHASES)
    evidence = replace(loop(tables), measurement=Measurement("monotonic", (sample,) * 10, 0.0))
    assert apply_rules(evidence).diagnoses[0].code == first


@pytest.mark.parametrize(("started", "says", "remedy"), [(3, "starts the workers", "persistent_workers=True"),
                                                        (0, "begins an iterator", "num_workers")])  # fmt: skip
def test_only_workers_that_are_started_again_are_to_be_kept(started: int, says: str, remedy: str) -> None:
    tables = {"slow_steps": [slow(every=10, waits_for_batch=True, without_gradients=False)],
              "iterators": [{"steps": 30, "with_new": 3, "started": started}]}  # fmt: skip
    (found,) = apply_rules(loop(tables)).diagnoses
    assert f"which {says}" in found.cause
    assert remedy in found.remedy
    assert ("persistent" in found.remedy) == bool(started)


def test_order_that_a_sampler_makes_is_no_start_of_workers() -> None:
    found_of = slow(every=10, waits_for_batch=True, makes_order=True, without_gradients=False)
    tables = {"slow_steps": [found_of], "iterators": [{"steps": 30, "with_new": 3, "started": 3}]}
    (found,) = apply_rules(loop(tables)).diagnoses
    assert "workers" not in found.cause + found.remedy


@pytest.mark.parametrize("again", [[], [inner("Net.forward", 9, 0.002, source="y = torch.stack(parts)")]])
def test_copies_have_a_place_if_one_line_alone_may_make_them(again: list[Any]) -> None:
    line = inner("Net.forward", 8, 0.001, source="w = torch.stack([self.weights] * len(x))")
    (found,) = causes(loop({"copied_factors": [COPIED], "inner_lines": [line, *again]}))
    assert found.where == ("" if again else "Net.forward() at train.py:8")


@pytest.mark.parametrize(
    ("source", "tensor"),
    [
        ("self.queue = torch.cat([self.queue[len(k):], k.detach()])", "self.queue"),
        ("keys = torch.roll(keys, 1, 0)", "keys"),
        ('memory["x"] = torch.cat((memory["x"], x))', 'memory["x"]'),
        ("x = torch.cat([x1, x2])", ""),
        ("self.x = torch.cat([x, self.x_before])", ""),
        ("x == torch.cat([x])", ""),
        ("return torch.cat([x, y])", ""),
    ],
)
def test_tensor_made_from_itself_and_other_rows_is_rebuilt(source: str, tensor: str) -> None:
    rows = [inner("Net.forward", 8, 0.02, method="cat", source=source)]
    found = causes(loop({"inner_lines": rows}))
    assert [each.cause.partition(": ")[0] for each in found] == (
        [f"20% of the step is building {tensor} anew for each change of some rows"] if tensor else []
    )
    assert [(each.at_best, each.share) for each in found] == ([(None, pytest.approx(0.2))] if tensor else [])


@pytest.mark.parametrize(
    ("known", "is_found"),
    [
        ({"late_s": 5e-5}, True),
        ({"late_s": 2e-4}, False),  # half of a call that computes for 0.4 ms, or a busy machine
        ({"late_s": None}, False),  # not on a CPU
        ({"late_s": 5e-5, "samples": 10}, False),
        ({"late_s": 5e-5, "phase": "backward"}, False),
    ],
)
def test_function_of_many_short_calls_is_a_loop_over_small_operators(known: Any, is_found: bool) -> None:
    row = inner("advantages", 8, 0.02, **known)
    found = apply_rules(loop({"inner_lines": [row, inner("Net.forward", 20, 0.01)]})).diagnoses
    assert [one.sentence[:80] for one in found] == [
        "20% of the step is a loop over small operators: advantages() at train.py:8 (20%)"
    ] * is_found
    assert not causes(loop({"inner_lines": [row | {"time_s": 0.015}]}))


@pytest.mark.parametrize(
    ("operators", "function", "is_found"), [(800, "advantages", True), (799, "advantages", False), (800, "f", False)]
)
def test_operators_are_small_if_a_forward_pass_has_many_for_its_time(
    operators: int, function: str, is_found: bool
) -> None:
    """A busy machine makes the calls that are seen longer, and the fastest of the steps hardly."""
    counted = {"operators": operators, "arithmetic_s": 1.0, "function": function, "place": "train.py:8"}
    row = inner("advantages", 8, 0.02, late_s=2e-4)
    assert len(causes(loop({"inner_lines": [row], "forward_operators": [counted]}))) == is_found


def test_outputs_of_a_teacher_are_no_rollouts() -> None:
    row = own("train", 40, 0.03, "teacher", "forward without gradients")
    assert not causes(loop({"own_python": [row | {"feeds_model": True}]}))


def test_single_slow_steps_in_a_phase_of_each_step_are_no_cause() -> None:
    row = slow(every=None, calls="clip_grad_norm_", without_gradients=False)
    for known, count in (({"phase": "clip"}, 0), ({"phase": "other"}, 1), ({"phase": "clip", "every": 10}, 1)):
        assert len(causes(loop({"slow_steps": [row | known]}))) == count


def test_steps_that_wait_in_a_collective_are_left_to_the_rules_of_ranks() -> None:
    for calls, count in (("dist.all_reduce", 0), ("dist.barrier", 0), ("evaluate", 1)):
        assert len(causes(loop({"slow_steps": [slow(calls=calls, without_gradients=False)]}))) == count
    calls_reduce = {"slow_steps": [slow(calls="functools.reduce", without_gradients=False)]}
    assert len(causes(loop(calls_reduce))) == 1
    alone = {"slow_steps": [slow(calls="reduce", without_gradients=False)]}
    assert len(causes(loop(alone))) == 1
    several = replace(LOOP, world_size=2)
    assert causes(replace(loop(alone), config=several)) == ()


@pytest.mark.parametrize("longer", [{"every": None, "phase": "forward"}, {"calls": "dist.barrier"}])
def test_slow_steps_that_are_no_cause_hide_no_other_slow_steps(longer: dict[str, Any]) -> None:
    rows = [slow(extra_s=5.0, without_gradients=False, **longer), slow(extra_s=1.0)]
    (found,) = causes(loop({"slow_steps": rows}))
    assert "12% of the loop is in every tenth step: evaluate() at train.py:88" in found.sentence


def test_print_of_plain_values_is_plain_python() -> None:
    (found,) = causes(loop({"inner_lines": [inner("mask", 8, 0.02, source="print(i)", is_plain=True)]}))
    assert found.code == "python-in-forward"


@pytest.mark.parametrize(
    ("forward_s", "loss_s", "backward_s", "where"),
    [
        (0.03, 0.0, 0.001, "inside the model"),
        (0.02, 0.0, 0.01, "inside forward and backward"),
        (0.0, 0.0, 0.03, "inside backward"),
        (0.0, 0.03, 0.001, "between the model and backward"),
        (0.0, 0.03, 0.02, "between the model and backward, and inside backward"),
    ],
)
def test_plain_python_names_phases_with_a_notable_share(
    forward_s: float, loss_s: float, backward_s: float, where: str
) -> None:
    times_s = {"forward": forward_s, "loss": loss_s, "backward": backward_s}
    rows = [inner("f", 8, time_s, phase=phase, is_plain=True) for phase, time_s in times_s.items() if time_s]
    (found,) = causes(loop({"inner_lines": rows}))
    assert f"is Python {where}, which" in found.sentence


def test_diagonal_matrices_of_a_normal_distribution_are_named_with_their_share() -> None:
    made = loop({"covariances": [COVARIANCE, COVARIANCE | {"time_s": 0.01, "place": "train.py:9"}]})
    (found,) = causes(made)
    assert found.sentence.startswith(
        "60% of the step is MultivariateNormal with its backward, which factorises matrices and solves triangular "
        "systems, although its covariance_matrix of 12 × 12 elements was diagonal (Agent.policy() at train.py:8): if "
        "it stays diagonal, use Independent(Normal(mean, std), 1)"
    )
    factors = loop({"covariances": [COVARIANCE | {"given": "scale_tril"}]})
    (found,) = causes(factors)
    assert "which solves triangular systems, although its scale_tril of 12 × 12 elements was diagonal" in found.sentence


LATER = {"steps": 206, "timed": 10, "timed_s": 0.1, "later_s": 0.2}


def test_later_steps_slower_than_the_timed_ones_are_an_open_question() -> None:
    found = apply_rules(loop({"later_steps": [LATER]}))
    assert found.nothing == ""
    assert found.others == [
        "cannot be told: why later steps take 200 ms, where the timed ones took 100 ms; time these (cs-systems run "
        "--steps 138:148)"
    ]


def test_later_steps_of_a_known_growth_are_no_question() -> None:
    tables = {"later_steps": [LATER], "growth": [growing("step time", 0.1, 0.3)]}
    assert apply_rules(loop(tables)).unknowns == ()


@pytest.mark.parametrize(("every", "steps", "count"), [(None, 4, 0), (10, 4, 1), (54, 3, 0)])
def test_irregular_slow_steps_that_do_what_usual_ones_do_are_no_cause(
    every: int | None, steps: int, count: int
) -> None:
    assert len(causes(loop({"slow_steps": [slow(every=every, steps=steps, as_usual=True)]}))) == count


def test_memory_and_time_that_grow_together_are_both_told() -> None:
    rows = [growing("host memory", 1e9, 3e9, kept="scores", kept_tensors="arrays"), growing("step time", 0.02, 0.07)]
    (found,) = causes(loop({"growth": rows}))
    assert found.cause.endswith(
        "; a step takes 1.00 ms longer with each step: 20.0 ms at first, 70.0 ms after 50 steps"
    )
    assert found.remedy.endswith("find what each step does for all steps before it, such as reading a list that grows")


@pytest.mark.parametrize(
    ("function", "is_replay"),
    [("PrioritizedReplay.sample", True), ("RolloutBuffer.get", True), ("Memory.draw", True), ("batches", False),
     ("ShuffleBuffer.take", False), ("decode_buffer", False), ("PrefetchBuffer.next", False), ("shuffle_buffer", False),
     ("from_memory_map", False)],
)  # fmt: skip
def test_batches_of_a_replay_buffer_are_not_sent_to_a_data_loader(function: str, is_replay: bool) -> None:
    row = own(function, 8, 0.05, "weights.sum") | {"feeds_model": True}
    (found,) = causes(loop({"own_python": [row]}, other=0.06))
    assert ("do not see what the loop adds" in found.remedy) == is_replay


def test_decompositions_of_a_dataset_are_to_be_made_once() -> None:
    rows = [own("Molecules.__getitem__", 8, 0.05, "torch.linalg.eigh", phase="input")]
    phases = {"input": 0.05, "forward": 0.03, "backward": 0.02}
    measurement = Measurement("monotonic", (Sample(0, False, STEP_S, phases, phases),) * 10, 0.0)
    (found,) = causes(replace(loop({"own_python": rows}), measurement=measurement))
    assert found.remedy.startswith(
        "decompose matrices that are the same in each epoch once, before the loop; else raise"
    )


@pytest.mark.parametrize(("fastest_s", "is_small"), [(0.04, True), (0.019, False)])
def test_short_calls_are_counted_as_in_the_fastest_step(fastest_s: float, is_small: bool) -> None:
    """On a busy machine the time of forward is twice as long, and holds as many short calls only by this."""
    every = [PHASES | {"forward": time_s, "loss": 0.0} for time_s in (fastest_s, *[0.04] * 9)]
    samples = tuple(Sample(0, False, STEP_S, phases, phases) for phases in every)
    evidence = loop({"inner_lines": [inner("step", 8, 0.03, late_s=1e-4)]})
    found = causes(replace(evidence, measurement=Measurement("monotonic", samples, 0.0)))
    assert [one.code for one in found] == (["small-operators"] if is_small else [])


def test_garbage_collections_in_an_optimizer_are_no_optimizer_of_the_script() -> None:
    row = own(COLLECTOR, 8, 0.05, phase="optimizer") | {"place": ""}
    assert causes(loop({"own_python": [row]}, optimizer=0.06)) == ()


def test_single_parameter_behind_several_flat_operators_has_no_place() -> None:
    row = FLAT | {"operators": "floor, round", "place": "", "function": "", "parameters": 1}
    (found,) = causes(loop({"flat_operators": [row]}))
    assert found.sentence.startswith(
        "1 parameter in Net.encoder gets gradients of zeros alone: the loss reaches it only through floor() or "
        "round(), with a derivative"
    )


def test_further_products_of_copies_are_counted() -> None:
    others = {"tensor": None, "how": "expand", "is_first": False, "time_s": 0.02}
    (found,) = causes(loop({"copied_factors": [COPIED | {"products": 2}, COPIED | others]}))
    assert ", and 2 similar products; with" in found.sentence
    (found,) = causes(loop({"copied_factors": [COPIED | others]}))
    assert "16 copies of one tensor, 24.0 MiB in all, by expand() or the broadcasting of matmul; with" in found.sentence
    assert 'torch.einsum("nkmi,kij->nkmj", x, w)' in found.sentence


def test_attention_weights_of_several_lines_have_no_place() -> None:
    rows = [UNREAD_WEIGHTS | {"time_s": 0.02, "fused_s": 0.01}, UNREAD_WEIGHTS | {"place": "train.py:9"}]
    (found,) = causes(loop({"attention_weights": rows}))
    assert "is 4 calls of" in found.sentence
    assert "train.py" not in found.sentence
