"""DDP with find_unused_parameters=True: it walks the graph after each forward and reduces a map of used parameters."""

from _kineto import write
from _machine import Machine, collective
from _model import Transformer

CASE = {
    "truth": "find_unused_parameters=True costs 6 ms of host time after each forward and a wait for the map of used parameters.",
    "cause": "find-unused-parameters",
    "also": ["exposed-communication", "host-sync", "host-python", "launch-bound"],
    "never": ["data-loading", "straggler"],
    "healthy": False,
}

m = Machine(66, rank=0, world=2)
model = Transformer(m, layers=6, d=1024, tokens=4096)
for _ in range(4):
    with m.step():
        with m.range("DistributedDataParallel.forward"):
            model.forward()
            with m.python("torch/nn/parallel/distributed.py(1601): _find_tensors"):
                m.host(1500.0)
            m.host(4500.0, "<built-in method prepare_for_backward of torch._C._distributed_c10d.Reducer>")
        model.loss()
        model.backward()
        m.copy("HtoD", 2400, pinned=False)
        collective([m], "all_reduce", 2400, 48.0, dtype="Int")
        for part in range(3):
            collective([m], "all_reduce", 5e7, 420.0, wait=part == 2)
        m.copy("DtoH", 2400, pinned=False)
        model.optimizer()
        m.item()
write(m, "rank0.json.gz")
