"""What PyTorch's CUDA allocator counts as allocated beside the tensors that a program asked for."""

MIB = 2**20
# PyTorch gives cuBLAS so much for each thread that calls it on a GPU of compute capability 9.0 or newer, and 8.1 MiB on
# older ones (aten/src/ATen/cuda/CublasHandlePool.cpp). Forward and backward run in a thread each.
CUBLAS_WORKSPACE_BYTES = 32 * MIB


def rounding(size: int, count: int) -> int:
    """Bytes that the caching allocator counts beyond `count` tensors of `size` bytes, each in memory fresh from CUDA.

    c10/cuda/CUDACachingAllocator.cpp: from 10 MiB a tensor gets a block of its own, rounded up to 2 MiB; from 1 MiB
    tensors share blocks of 20 MiB; what is left of a block is split off if it is more than 1 MiB. Below that 512 bytes
    are the unit.
    """
    if size <= MIB:
        return -size % 512 * count
    shared = 20 * MIB // size if size < 10 * MIB else 1
    left = 20 * MIB - shared * size if size < 10 * MIB else -size % (2 * MIB)
    return left * (count // shared) if left <= MIB else 0
