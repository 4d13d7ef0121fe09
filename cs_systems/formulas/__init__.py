"""What must come out by formula, before anything is measured. Floor 0: no torch; each formula with its source.

- one step, one call: `cost` (FLOPs and bytes), `peaks` (what a device can do at most), `checkpoint_plan` (what is
  computed again), `memory_model` and `attention_memory` (peak bytes), `cuda_allocator` (what CUDA's allocator adds),
  `memory_fit` (what fits a device, and what to change first)
- one message: `collectives` (sizes and rates as nccl-tests counts them), `latency_bandwidth` (the line through measured
  times), `bucket_size` (the best one for gradients)
- N ranks: `parallel_cost` (bytes that each sends), `parallel_memory` (bytes that each holds), `scaling` (how long a
  step takes), `streams` (when work on several streams ends)
"""
