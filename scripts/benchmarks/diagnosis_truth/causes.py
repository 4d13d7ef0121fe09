"""Vocabulary of the planted causes: each word, and what it means.

Every case names one of them as its cause, or None if the program is healthy. The bench maps the codes of our answers
to them.
"""

CAUSES = {
    # time of the host
    "start-up": "the first steps or the first launch are slow; the others have nothing to mend",
    "launch-bound": "the GPU waits for kernel launches: kernels are too small for the time that a launch takes",
    "small-operators": "the CPU's time is the overhead of many small operators",
    "host-python": "the program's own Python code between or inside the phases",
    "data-loading": "the step waits for its next batch",
    "host-sync": "the host waits for the GPU in .item(), nonzero or a synchronisation, and launches late afterwards",
    "blocking-call": "a CUDA call that blocks: cudaHostAlloc, cudaFree, launches in blocking mode",
    "device-allocation": "memory is requested from CUDA and given back in every step",
    "pageable-copies": "copies from or to pageable memory block the host",
    "exposed-copies": "copies between host and device that no computation hides",
    "cpu-offload": "the update runs on the CPU, and gradients and weights travel for it",
    "evaluation": "evaluation or generation between training steps",
    "checkpoint-writing": "state is written or copied for a checkpoint",
    "logging": "metrics, histograms, figures or files are written for a log",
    "garbage-collection": "Python's garbage collector",
    "periodic-pause": "every n-th step has a pause outside the phases",
    "recompilation": "torch.compile compiles again and again",
    "autotuning": "kernels are benchmarked again in every step",
    "anomaly-detection": "autograd's anomaly mode is on",
    "thread-oversubscription": "operators use more threads than there are cores",
    "own-profiler": "a profiler that the script itself started",
    # change over the steps
    "growth": "time or memory grows with every step",
    "skipped-steps": "optimizer steps are skipped",
    "no-update": "the optimizer changes no parameter",
    "nan-loss": "the loss or the weights are NaN",
    "divergence": "the loss grows without bound",
    "gradients-not-cleared": "gradients of all steps add up, as zero_grad is missing",
    "padding": "most of each batch is padding",
    # work that is not needed
    "duplicate-forward": "the same forward pass runs twice in a step",
    "unused-gradients": "gradients are computed that no optimizer uses",
    "needless-copies": "tensors are cloned although nothing writes in place",
    "recomputation": "activation checkpointing computes the forward again",
    # kernels
    "elementwise-chain": "memory-bound elementwise kernels, not fused",
    "fp32-products": "matrix products in fp32 on hardware with tensor cores",
    "fp64-products": "the model computes in double precision",
    "slow-products": "matrix products far below the chip's rate, by their shape or alignment",
    "low-occupancy": "kernels with too few blocks to fill the GPU",
    "casts": "copies between precisions",
    "layout-conversion": "conversions between memory layouts",
    "index-backward": "the gradient of an index or embedding operation",
    "unfused-optimizer": "the optimizer launches kernels per parameter",
    "unfused-attention": "attention with its scores in memory",
    "graph-recorded-whole": "kernels inside CUDA graphs were not recorded one by one, so the cause is unknown",
    # ranks
    "straggler": "one rank is slower, and the others wait for it",
    "exposed-communication": "collectives that no computation hides",
    "no-sync-missing": "gradients are reduced in every micro-batch of an accumulation",
    "find-unused-parameters": "DDP searches for unused parameters in every step, and there are none",
    "small-buckets": "many small collectives, each at its latency",
    "pipeline-bubble": "stages of a pipeline wait for each other",
    "expert-imbalance": "one rank's experts get most of the tokens",
    # memory
    "fragmentation": "free memory is split into pieces that no request fits",
    "cached-memory": "memory is reserved that nothing uses, left from an earlier, larger need",
    "out-of-memory": "a request failed",
    "gradient-memory": "gradients stay allocated while the next forward needs the memory",
    "optimizer-state": "the optimizer's state is the largest part of the peak",
    "activations": "activations saved for backward are the largest part of the peak",
    "logits": "the logits and their gradient are the largest part of the peak",
    "score-matrices": "the scores of attention are the largest part of the peak",
    "model-copies": "further copies of the weights",
    "weights": "the weights are the largest part of the peak",
}
