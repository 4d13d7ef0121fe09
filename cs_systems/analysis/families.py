"""Which family a kernel is of, by its name: rules as data, the first that matches counts. Floor 0.

The names are those of CUDA libraries and compilers from Ampere to Blackwell. A family says what a kernel is for, which
decides what limits it; a kernel that fuses several is of the family that takes its time.
"""

from __future__ import annotations

import functools
import re

FAMILIES = (
    "matmul", "attention", "softmax", "elementwise", "reduction", "norm", "copy", "collective", "optimizer", "other",
)  # fmt: skip

_NORM = r"layer_?norm|rms_?norm|group_?norm|batch_?norm|instance_?norm"
RULES: tuple[tuple[str, str], ...] = (
    ("collective", r"nccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem|symm_mem"),
    ("copy", r"^\[?(cuda )?mem(cpy|set)\b"),
    # Inductor writes into a name what was fused, so its prefix goes before words that occur anywhere.
    ("optimizer", r"^triton_for_"),
    ("attention", r"^triton_tem_.*(attention|sdpa)"),
    ("matmul", r"^triton_tem_|^triton_(mm|bmm|addmm)"),
    ("copy", r"^triton_poi_fused_(_?(clone|to_copy|cat|transpose|permute|view|unsafe_view|copy|stack|slice)_)+\d+$"),
    ("elementwise", r"^triton_poi_"),
    ("softmax", r"^triton_(red|per)_.*softmax"),
    ("norm", rf"^triton_(red|per)_.*({_NORM}|rsqrt)"),
    ("reduction", r"^triton_(red|per|split_scan)_"),
    ("optimizer", r"multi_tensor_apply|multi_?tensor|adam|adagrad|lamb_|\bsgd|muon|FusedOptimizer"),
    ("attention", r"flash|fmha|sdpa|attention|attn|\bmha_|mha_fwd|mha_bwd|paged_kv"),
    ("attention", r"^(forward_kernel|dq_kernel|dkdv_kernel)$"),  # this project's own Triton kernels
    ("softmax", r"softmax"),
    ("norm", rf"{_NORM}|GammaBeta|RowwiseMoments|\bln_(fwd|bwd|parallel)|\bbn_(fw|bw)|norm_(fwd|bwd|fprop|bprop)"),
    ("matmul", r"gemm|gemv|nvjet|xmma|cutlass|cublas|split_?k|matmul|wgmma|mma_|conv(olve|olution|2d)|(^|_)b?mm_|\bdot_kernel"),
    ("copy", r"CatArray|copy_kernel|_copy_|transpose|permute|gather|index_?select|index_elementwise|roll_|pad_"),
    ("reduction", r"reduce|nll_loss|cross_entropy|embedding_backward|embedding_bag|scatter|scan|arg(max|min)|cumsum|prefix_sum"),
    ("elementwise", r"elementwise|pointwise|dropout|masked_fill|tri[ul]_|arange|fill|silu|gelu|swiglu|rotary|rope|distribution_|cast"),
)  # fmt: skip
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in RULES)


@functools.lru_cache(maxsize=65536)
def family(name: str) -> str:
    """The family of a kernel with this (demangled) name; `other` where no rule knows it."""
    return next((family for family, pattern in _COMPILED if pattern.search(name)), "other")


# A generic kernel is told by the functor among its template arguments. What they share says nothing.
_GENERIC = re.compile(r"elementwise_kernel|reduce_kernel|multi_tensor_apply|^Kernel2?$|^device_kernel$|^enable_sm|_with_index$")
_SAYS = re.compile(
    r"(\w*(?:Functor\w*|Ops|_kernel_cuda|_kernel_impl|_kernel|(?:^|_)s?gemm\w*)|cutlass_\w{6,}|Flash\w+|\w*Gemm\w+|func_wrapper_t)"
)
_SAYS_NOTHING = re.compile(
    r"elementwise_kernel|gpu_kernel_impl|^(Binary|AUnary|BUnary|Unary)Functor$|func_wrapper_t|reduce_kernel|^cutlass_kernel"
)
# cuBLAS writes types, stages and alignments between what tells one product from another.
_XMMA = re.compile(r"(?P<kernel>sm\d+_xmma_\w*?gemm)_.*?_(?P<layout>[tn]{2})_[tn]_tilesize(?P<tile>[\dx]+).*?(?P<split>split_k|segment_k)?(_off)?_kernel")
_ENDS = re.compile(r"_cuda$|_kernel(_cuda|_impl)?$|Functor(_\w+)?$|Ops$|ListFunctor$")


@functools.lru_cache(maxsize=65536)
def short_name(name: str) -> str:
    """The kernel's own name without namespaces, template arguments and parameters; of a generic kernel also what it
    does: `vectorized_elementwise_kernel add`."""
    plain = name.replace("(anonymous namespace)", "").replace("<unnamed>", "").removeprefix("void ")
    head = re.split(r"[<(]", plain, maxsplit=1)[0]
    base = head.split("::")[-1].strip() or plain
    if gemm := _XMMA.match(base):
        return " ".join(filter(None, (gemm["kernel"], gemm["layout"], gemm["tile"], gemm["split"])))
    if not _GENERIC.search(base) or len(plain) == len(head):
        return base
    words = [w for w in _SAYS.findall(plain[len(head) :]) if not _SAYS_NOTHING.search(w)]
    return f"{base} {_what(words[0])}" if words else base


def _what(word: str) -> str:
    """`CUDAFunctor_add` → `add`, `direct_copy_kernel_cuda` → `direct_copy`."""
    if word.startswith("CUDAFunctor_"):
        return word.removeprefix("CUDAFunctor_")
    while (shorter := _ENDS.sub("", word)) not in ("", word):
        word = shorter
    return word
