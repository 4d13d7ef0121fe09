"""Bytes that PyTorch's CUDA allocator counts as allocated beyond the tensors that a program requested."""

MIB = 2**20
# PyTorch allocates this workspace for each thread that calls cuBLAS on a GPU of compute capability 9.0 or newer, and
# 8.1 MiB on older ones (aten/src/ATen/cuda/CublasHandlePool.cpp). Forward and backward run in a thread each.
CUBLAS_WORKSPACE_BYTES = 32 * MIB


def rounding(size: int, count: int) -> int:
    """Return the bytes that the caching allocator counts beyond `count` tensors of `size` bytes.

    Each tensor lies in memory newly allocated from CUDA. From 10 MiB on, a tensor gets its own block, rounded up to 2
    MiB. From 1 MiB on, tensors share blocks of 20 MiB. The rest of a block is split off if it is larger than 1 MiB.
    Below 1 MiB, sizes are rounded up to 512 bytes. Source: c10/cuda/CUDACachingAllocator.cpp.
    """
    if size <= MIB:
        return -size % 512 * count
    shared = 20 * MIB // size if size < 10 * MIB else 1
    left = 20 * MIB - shared * size if size < 10 * MIB else -size % (2 * MIB)
    return left * (count // shared) if left <= MIB else 0
