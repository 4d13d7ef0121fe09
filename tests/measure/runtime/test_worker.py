"""Start-up of a worker: what it imports, and when."""

import subprocess
import sys

FIRST_CELLS = """
import gc, sys
from dataclasses import replace
from cs_systems.config import PRESETS, Mode, RunConfig
from cs_systems.measure.runtime import worker
from cs_systems.measure.runtime.channel import Visit, run_request

def loaded_at_visit(config):
    sent, loaded = [], []
    def send(message):
        sent.append(message)
        if isinstance(message, Visit):
            loaded.append("torch._dynamo" in sys.modules)
    assert worker.answer(run_request([config]), send)
    assert sent[-1].record["status"] == "ok", sent[-1].record["reason"]
    return loaded

tiny = RunConfig(model=PRESETS["tiny"], batch_size=1, warmup=0, steps=1, device="cpu", mode=Mode.FORWARD_BACKWARD)
assert loaded_at_visit(tiny) == [False]
heavy = {"torch._dynamo", "torch._inductor", "sympy", "triton", "pandas", "matplotlib", "transformers"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
assert loaded_at_visit(replace(tiny, mode=Mode.TRAIN_STEP)) == [True]
assert gc.isenabled()
"""


def test_only_cells_with_an_optimizer_load_the_compiler_and_before_their_set_up() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CELLS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
