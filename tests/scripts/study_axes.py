"""AXES: the values that the full size of each study must cover."""

from __future__ import annotations

from typing import Any

CHECKPOINTS = {"none", *(f"every:{k}" for k in (1, 2, 4, 8)), "nested:8:2", "nested:16:4"}
CHECKPOINTS |= {"selective:attention", "selective:matmul"}
EMBEDDINGS = {32, 64, 128, 256, 512, 1024, 2048}
SIZES = {"small", "medium", "large+num_layers=32", "large", "xl", "2.7B"}

# study → field of a cell → the values that must all occur
AXES: dict[str, dict[str, set[Any]]] = {
    "warmup_steps": {"size": {"small", "medium", "large"}, "ctx": {256}, "warmup": {0, 2, 5}, "steps": {10}},
    "step_time": {"size": SIZES, "ctx": {128, 256, 512, 1024}, "precision": {"fp32", "bf16"}, "mode": {"train-step"}},
    "nsys_and_clock": {
        "size": {"small", "medium", "large+num_layers=32", "large"},
        "ctx": {128, 256},
        "precision": {"fp32", "bf16"},
        "profiler": {"none", "nsys"},
        "mode": {"train-step"},
    },
    "top_kernels": {
        "size": {"large+num_layers=32", "large"},
        "ctx": {256},
        "precision": {"fp32", "bf16"},
        "mode": {"forward", "forward-backward", "train-step"},
        "profiler": {"none", "kineto"},
    },
    "softmax_and_matmul": {
        "size": {"large+num_layers=32"},
        "ctx": {256, 1024},
        "precision": {"fp32", "bf16"},
        "attention": {"naive"},
        "profiler": {"none", "kineto"},
    },
    "torch_compile": {
        "attention": {"naive", "compiled", "sdpa_flash", "flash_triton"},
        "seq": {256, 1024, 4096, 8192, 16384},
        "d_head": {16, 32, 64, 128},
        "batch": {8},
        "heads": {1},
        "compile": {"none", "default"},
    },
    "memory_peaks": {
        "size": {"large+num_layers=32", "large", "xl", "2.7B"},
        "ctx": {128, 256, 512, 2048},
        "precision": {"fp32", "bf16"},
        "mode": {"forward", "train-step"},
    },
    "attention_memory": {
        "seq": {256, 1024, 4096, 8192, 16384},
        "d_head": {16, 32, 64, 128},
        "batch": {8},
        "attention": {"naive"},
    },
    "triton_tile_sizes": {
        "seq": {2**n for n in range(7, 16)},
        "d_head": {16, 32, 64, 128},
        "precision": {"bf16", "fp32"},
        "attention": {"naive", *(f"scripts/_tiles.py:tile_{size}" for size in (16, 32, 64, 128))},
        "workload": {"attention", *(f"scripts/_tiles.py:sm_{c}" for c in (80, 86, 90))},
        "batch": {1},
        "causal": {True},
        "mode": {"forward-backward"},
    },
    "nvidia_smi_memory": {
        "size": {"small", "medium", "large", "xl"},
        "profiler": {"memory"},
        "precision": {"fp32", "bf16"},
    },
    "saved_for_backward": {
        "compile": {"none", "default"},
        "attention": {"naive", "sdpa_flash"},
        "profiler": {"residuals"},
    },
    "activation_checkpointing": {"size": {"xl", "2.7B"}, "ctx": {2048}, "checkpoint": CHECKPOINTS},
    "low_precision_sums": {"workload": {"accumulation"}, "precision": {"fp32", "fp16", "bf16"}},
    "autocast_dtypes": {
        "workload": {"toy", "train_step", "normalization"}
        | {f"scripts/_autocast_mistakes.py:{name}" for name in ("other_device", "outside", "no_context")},
        "precision": {"fp32", "fp16", "bf16", "bf16-pure"},
    },
    "precision_speed": {
        "size": {"small", "medium", "large", "xl", "2.7B", "8B"},
        "ctx": {256},
        "precision": {"fp32", "bf16", "fp8"},
        "profiler": {"none", "kineto"},
        "mode": {"train-step"},
    },
    "all_reduce": {
        "collective": {"all_reduce"},
        "size_bytes": {4**k * 2**20 for k in range(6)},
        "dtype": {"fp32"},
        "world_size": {1, 2, 4, 6},
    },
    "data_parallel_variants": {
        "strategy": {"single", "ddp_naive", "ddp_flat", "ddp_overlap", "ddp_bucketed", "torch_ddp"},
        "bucket_size_mb": {1.0, 10.0, 100.0, 1000.0},
        "strategy_args": {(), ("gradient_as_bucket_view=true",)},
        "world_size": {1, 2},
        "profiler": {"none", "overlap"},
    },
    "sharded_optimizer": {
        "size": {"medium", "xl"},
        "strategy": {"single", "ddp_bucketed", "ddp_bucketed+zero1", "zero1_flat", "ddp_bucketed+torch_zero"},
        "world_size": {1, 2},
        "profiler": {"none", "rank_memory"},
    },
    "zero_stage_1": {
        "size": {"medium"},
        "strategy": {"single", "ddp_bucketed", "ddp_bucketed+zero1", "zero1_flat"},
        "world_size": {1, 2, 4},
        "profiler": {"none", "rank_memory"},
    },
    "fully_sharded": {
        "size": {"2.7B"},
        "strategy": {"single", "ddp_bucketed", "zero1_flat", "fsdp", "torch_fsdp2"},
        "world_size": {1, 2},
        "profiler": {"none", "overlap", "rank_memory"},
        "precision": {"bf16"},
    },
    "forward_backward_ratio": {"size": SIZES, "mode": {"forward-backward"}},
    "attention_sequence_length": {
        "seq": {8, 16, 32, 64, 128, 256, 512},
        "batch": {32},
        "heads": {32},
        "d_head": {64},
        "causal": {True},
    },
    "attention_causal_mask": {"seq": {8, 16, 32, 64, 128, 256, 512, 2048}, "causal": {True, False}},
    "attention_embedding": {"embedding": EMBEDDINGS, "heads": {32}, "seq": {1024}, "batch": {32}, "causal": {True}},
    "attention_heads": {"heads": {1, 2, 4, 8, 16}, "embedding": {32}, "seq": {1024}, "batch": {32}},
    "attention_out_of_memory": {"seq": {512, 1024, 2048, 4096}, "memory_limit_bytes": {8 * 2**30, 24 * 2**30}},
    "flash_attention_advantage": {
        "batch": {4, 8, 16, 32, 64},
        "seq": {256, 512, 1024, 2048, 4096},
        "heads": {8, 16, 32, 64, 128},
    },
    "attention_sample_run": {"batch": {32}, "seq": {1024}, "heads": {32}, "embedding": {2048}, "causal": {True, False}},
    "scaling_limits": {
        "size": {"medium", "2.7B"},
        "world_size": {1, 2},
        "strategy": {"single", "ddp_bucketed", "fsdp", "tp"},
    },
    "flash_attention_lengths": {
        "seq": {2**n for n in range(7, 17)},
        "d_head": {16, 32, 64, 128},
        "precision": {"bf16", "fp32"},
        "attention": {"flash_triton", "naive", "sdpa_flash"},
        "batch": {1},
        "causal": {True},
    },
}
