"""torch.compile with static shapes sees a new length in each step: it compiles in each."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "torch.compile compiles anew in three of five steps (dynamo's and inductor's ranges), seconds against 20 ms.",
    "cause": "recompilation",
    "also": [],
    "never": ["launch-bound", "data-loading", "host-python", "start-up"],
    "healthy": False,
}

m = Machine(32)
for step, tokens in enumerate((4096, 3584, 4608, 4096, 5120)):
    model = Transformer(m, layers=6, d=1024, tokens=tokens)
    with m.step():
        if step in (1, 2, 4):
            with m.range("_compile.compile_inner (dynamo_timed)"):
                m.host(2.1e5)
                with m.range("OutputGraph.call_user_compiler (dynamo_timed)"):
                    m.host(3e4)
                    with m.range("compile_fx.<locals>.fw_compiler_base (dynamo_timed)"):
                        m.host(1.4e6)
        with m.range(f"Torch-Compiled Region: 0/{min(step, 3)}"):
            model.forward()
        model.loss()
        model.backward()
        model.optimizer()
write(m, "trace.json.gz", python=False)
