"""num_workers=0: the images are decoded in the main process, in the loader's __next__, between steps that are otherwise full."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "A quarter of each step is the single-process data loader, which decodes in the main thread.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["launch-bound", "host-sync"],
    "healthy": False,
}

m = Machine(15)
model = Transformer(m, layers=8, d=2048, tokens=8192)
for _ in range(5):
    with m.step():
        with m.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            for _ in range(16):
                with m.python("PIL/Image.py(2213): resize"):
                    m.host(900.0)
        m.copy("HtoD", 2e6)
        model.train()
        m.synchronize()
write(m, "trace.json.gz")
