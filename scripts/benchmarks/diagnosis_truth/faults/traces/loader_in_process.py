"""num_workers=0: the images are decoded in the main process, in the loader's __next__, for longer than the step itself."""

from _kineto import write
from _machine import Machine
from _model import Transformer

CASE = {
    "truth": "The single-process data loader decodes in the main thread for 67 ms per step, longer than the GPU computes.",
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
                    m.host(4200.0)
        m.copy("HtoD", 2e6)
        model.train()
        m.synchronize()
write(m, "trace.json.gz")
