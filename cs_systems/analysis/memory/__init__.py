"""Readers of CUDA memory snapshots of PyTorch: a pickle in, plain rows out. No torch.

- files: `snapshot` (the file's data), `unpickle` (an unpickler that refuses every global)
- allocations: `allocations` (the events replayed), `phases` (phase and layer of each), `sites` (line of code of each),
  `categories` (parameter, gradient, activation, …), `tensor_names` (a name for a size)
- tables: `tables`, `timeline` (data of the page)
"""
