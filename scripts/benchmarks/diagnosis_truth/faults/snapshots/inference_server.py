"""A language model that serves: bf16 weights and a cache of a fixed size."""

from _snapshot import GB, MB, Allocator

CASE = {
    "truth": "Weights and a preallocated cache fill the memory, as a server wants it; temporary tensors are small and reused.",
    "cause": None,
    "also": ["weights"],
    "never": ["fragmentation", "growth", "gradient-memory", "optimizer-state", "activations", "out-of-memory"],
    "healthy": True,
}

a = Allocator()
for layer in range(32):
    for size in (96, 32, 176, 88):
        a.alloc(size * MB, "site-packages/safetensors/torch.py:311:load_file", "serve.py:14:load")
cache = a.alloc(22 * GB, "serve.py:40:make_cache")
for _ in range(40):
    temporary = [a.alloc(s * MB, "serve.py:61:decode") for s in (4, 12, 8)]
    for block in temporary:
        a.free(block)
a.dump("server.pickle")
