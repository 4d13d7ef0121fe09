"""Metrics are logged in every step, and the logger spends 14 ms on them."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "wandb.log takes 14 ms in every step after the loss was read; the GPU idles meanwhile.",
    "cause": "logging",
    "also": ["host-python", "host-sync"],
    "never": ["launch-bound", "data-loading"],
    "healthy": False,
}

m = Machine(31)
model = Transformer(m, layers=4, d=1024, tokens=8192)
for _ in range(6):
    with m.step():
        model.train()
        m.item()
        with m.python("wandb/sdk/wandb_run.py(1713): log"):
            m.host(14e3, "wandb/sdk/wandb_run.py(1502): _log")
write(m, "trace.json.gz")
