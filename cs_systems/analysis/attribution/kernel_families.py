"""Family of a kernel by its name: the rules are data, and the first match counts.

The names come from CUDA libraries and compilers from Ampere to Blackwell, and from ROCm's libraries. The family gives
a kernel's purpose, which decides what limits it. A kernel that fuses several families belongs to the one that takes
most of its time.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from cs_systems.core.printable import INDENT
from cs_systems.readers.forms.columns import Bools
from cs_systems.readers.forms.jobs import COLLECTIVE
from cs_systems.readers.forms.trace import Kernels

FAMILIES = (
    "matmul", "attention", "softmax", "elementwise", "reduction", "norm", "copy", "collective", "optimizer", "other",
)  # fmt: skip

_NORM = r"layer_?norm|rms_?norm|group_?norm|batch_?norm|instance_?norm"
RULES: tuple[tuple[str, str], ...] = (
    ("collective", COLLECTIVE.pattern),
    ("copy", r"^\[?(cuda )?mem(cpy|set)\b|rocclr_(copy|fill)Buffer"),
    # Inductor puts the fused operators into a name, so rules for its prefixes precede those for words anywhere.
    ("optimizer", r"^triton_for_"),
    ("attention", r"^triton_tem_.*(attention|sdpa)"),
    ("matmul", r"^triton_tem_|^triton_(mm|bmm|addmm)"),
    ("copy", r"^triton_poi_fused_(_?(clone|to_copy|cat|transpose|permute|view|unsafe_view|copy|stack|slice)_)+\d+$"),
    ("elementwise", r"^triton_poi_"),
    ("softmax", r"^triton_(red|per)_.*softmax"),
    ("norm", rf"^triton_(red|per)_.*({_NORM}|rsqrt)"),
    ("reduction", r"^triton_(red|per|split_scan)_"),
    ("optimizer", r"multi_tensor_apply|multi_?tensor|adam|adagrad|lamb_|\bsgd|muon|FusedOptimizer"),
    ("norm", rf"{_NORM}|GammaBeta|RowwiseMoments|\bln_(fwd|bwd|parallel)|\bbn_(fw|bw)|norm_(fwd|bwd|fprop|bprop)"),
    ("attention", r"flash|fmha|sdpa|attention|attn|\bmha_|mha_fwd|mha_bwd|paged_kv"),
    # Kernels of this package that no other rule knows.
    ("attention", r"^attend(_forward|_backward|_prepare|_finish)?$"),
    ("matmul", r"^gated_(forward|backward)$|^update_weights$"),
    ("norm", r"^norm_sum_rows_kernel"),
    ("reduction", r"^embedding_(gradient|pieces|list|sort)_kernel"),
    ("softmax", r"softmax"),
    ("matmul", r"gemm|gemv|nvjet|xmma|cutlass|cublas|split_?k|matmul|wgmma|mma_|conv(olve|olution|2d)"),
    # AMD's AOTriton, Tensile, MIOpen, Composable Kernel, AITER and rocBLAS, and cuDNN's convolutions.
    ("attention", r"^bwd_(preprocess|kernel_(dk_dv|dq|fuse))|^sage_fwd"),
    ("matmul", r"Cijk_|^igemm_|miopenSp3AsmConv|MIOpenConv|_conv_(fwd|bwd|wrw)|fused_?moe|fmoe_"),
    ("matmul", r"[dw]grad(2d|\w*_engine)|winograd|_[sh]cudnn_\d|\bfft[12]d_[rc]2[rc]_"),
    ("matmul", r"(^|_)b?mm_|\bdot_kernel"),
    ("copy", r"CatArray|copy_kernel|_copy_|transpose|permute|gather|index_?select|index_elementwise|roll_|pad_"),
    ("copy", r"nchwToNhwc|nhwcToNchw"),
    ("reduction", r"reduce|nll_loss|cross_entropy|embedding_(backward|bag)|scatter|scan|arg(max|min)|cumsum"),
    ("reduction", r"embedding_codegen|(max|avg)_pool"),
    ("elementwise", r"elementwise|pointwise|dropout|masked_fill|tri[ul]_|arange|fill|silu|gelu|swiglu|cast"),
    ("reduction", r"rocblas_\w*(dot|nrm2|asum)"),
    ("elementwise", r"rotary|rope|distribution_|rocblas_\w*(axpy|scal)|scalePackedTensor|SubTensorOp|Op\dd?Tensor"),
    ("elementwise", r"^(quantize|multiply)_kernel"),  # kernels of this package
)  # fmt: skip


@functools.cache
def _compiled() -> list[tuple[str, re.Pattern[str]]]:
    return [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in RULES]


@functools.lru_cache(maxsize=65536)
def family(name: str) -> str:
    """Return the family of a kernel by its (demangled) name; `other` where no rule matches."""
    return next((family for family, pattern in _compiled() if pattern.search(name)), "other")


def is_collective(kernels: Kernels) -> Bools:
    """Return for each kernel whether it communicates."""
    return kernels.function.codes_where(lambda function: family(function.name) == "collective")


# families next to a softmax that show what it belongs to
_AROUND = ("matmul", "attention", "norm", "optimizer", "collective")


_LOSS = re.compile(r"LogSoftMax|nll_loss|cross_?entropy", re.IGNORECASE)
AS_LARGE = 0.25  # fraction of the time of the attention's softmax; a shorter kernel accesses a smaller tensor


def scores_of_attention(kernels: Kernels) -> Bools:
    """Return for each kernel whether it accesses the scores of unfused attention: a softmax between two products.

    The elementwise kernels and copies between the same products that take about as long access these scores too: scale,
    mask, dropout, cast. A softmax that is not between products, such as a loss's, does not count.
    """
    functions = kernels.function.values
    names = [family(function.name) for function in functions]
    of_loss = np.array([_LOSS.search(function.name) is not None for function in functions], bool)[
        kernels.function.codes
    ]
    code = np.array([_AROUND.index(name) if name in _AROUND else -1 for name in names], np.int64)[
        kernels.function.codes
    ]
    softmax = np.array([name == "softmax" for name in names], bool)[kernels.function.codes]
    beside = np.array([name in ("elementwise", "copy") for name in names], bool)[kernels.function.codes]
    lasted = kernels.end_s - kernels.start_s
    found = np.zeros(len(kernels), bool)
    for stream in np.unique(kernels.stream[softmax]).tolist():
        mine = np.flatnonzero(kernels.stream == stream)
        known = np.flatnonzero(code[mine] >= 0)
        after = np.unique(np.searchsorted(known, np.flatnonzero(softmax[mine])))
        for first, last in ((known[n - 1], known[n]) for n in after.tolist() if 0 < n < len(known)):
            between = mine[first + 1 : last]
            if code[mine[first]] or code[mine[last]] or of_loss[between].any():
                continue
            least_s = AS_LARGE * lasted[between[softmax[between]]].min()
            found[between] = softmax[between] | (beside[between] & (lasted[between] >= least_s))
    return found


# Generic kernel → replacement for its name; the functor among its template arguments gives the operation.
_GENERIC = {
    "elementwise_kernel": "elementwise", "reduce_kernel": "reduce", "multi_tensor_apply_kernel": "foreach",
    "Kernel": "", "Kernel2": "", "device_kernel": "", "kentry": "",
}  # fmt: skip
_OPERATION = re.compile(
    r"\w*(?:Functor|Ops|_kernel)(?:_\w+)?\b|cutlass_\w{6,}|Flash\w+|\w*Gemm\w+|Fmha\w+|\w+norm2d\w+"
)
_NO_OPERATION = re.compile(r"elementwise_kernel|gpu_kernel_impl|reduce_kernel|^(Binary|AUnary|BUnary|Unary)Functor$")
_ENDS = re.compile(r"_cuda$|_impl$|_kernel$|Functor$|List$|Ops$")
# cuBLAS puts types, stages and alignments between the parts of a name that distinguish matrix products.
_XMMA = re.compile(
    r"(?P<kernel>sm\d+_xmma_\w*?gemm)_.*?_(?P<layout>[tn]{2})_[tn]_tilesize(?P<tile>[\dx]+)"
    r".*?(?P<split>split_k|segment_k)?(_off)?_kernel"
)
# Tensile, of AMD's BLAS libraries, encodes every setting of a product; layouts, types and tile are kept.
_TENSILE = re.compile(r"(?:Custom_)?(?P<kernel>Cijk_[A-Za-z]+_[A-Za-z]+_[A-Z\d]+)_(?:\w*?_)?MT(?P<tile>\d+x\d+x\d+)")

_LENGTH = re.compile(r"\d{1,3}")
# Parts of a mangled name with digits that are no length: values, references to other parts, types such as `DF16b`.
_NO_LENGTH = re.compile(r"L[a-z]n?\d+E|[ST][0-9A-Z]*_|DF\d+[b_x]?")


def demangled(name: str) -> str:
    """Return the identifiers of a mangled C++ name, as `outer::kernel<arguments>`; another name as it is.

    Types and numbers among the arguments, which short names do not show, are left out. Source: Itanium C++ ABI.
    """
    if not name.startswith("_Z"):
        return name
    path, arguments = list[str](), list[str]()
    at = 3 if (nested := name.startswith("_ZN")) else 2
    while (length := _LENGTH.match(name, at)) and (nested or not path):
        at = length.end() + int(length[0])
        path.append(name[length.end() : at])
    while at < len(name):
        if length := _LENGTH.match(name, at):
            at = length.end() + int(length[0])
            arguments.append(name[length.end() : at])
        else:
            other = _NO_LENGTH.match(name, at)
            at = other.end() if other else at + 1
    return f"{'::'.join(path)}<{', '.join(arguments)}>" if path else name


@functools.lru_cache(maxsize=65536)
def short_name(name: str) -> str:
    """Return a kernel's name without namespaces, template arguments and parameters.

    For a generic kernel the operation is included: `elementwise direct_copy`, `sm80_xmma_gemm tn 64x64x8`.
    """
    plain = demangled(name).replace("(anonymous namespace)", "").replace("<unnamed>", "").removeprefix("void ")
    head = re.split(r"[<(]", plain, maxsplit=1)[0]
    base = head.split("::")[-1].strip() or plain
    if gemm := _XMMA.match(base):
        return " ".join(filter(None, (gemm["kernel"], gemm["layout"], gemm["tile"], gemm["split"])))
    if product := _TENSILE.match(base):
        return f"{product['kernel']} {product['tile']}"
    generic = next((g for g in _GENERIC if base == g or (g.islower() and base.endswith(f"_{g}"))), None)
    operation = next((w for w in _OPERATION.findall(plain[len(head) :]) if not _NO_OPERATION.search(w)), None)
    return f"{_GENERIC[generic]} {_operation_of(operation)}".strip() if generic and operation else base


def short_scope(scope: str) -> str:
    """Shorten one indented row of a tree of scopes: a kernel with a mangled name gets its short name."""
    begin = scope.find("_Z")
    return scope[:begin] + short_name(scope[begin:]) if begin >= 0 and not scope[:begin].strip(INDENT) else scope


def _operation_of(word: str) -> str:
    """Return a functor's operation: `CUDAFunctor_add` → `add`, `direct_copy_kernel_cuda` → `direct_copy`."""
    if word.startswith("CUDAFunctor_"):
        return word.removeprefix("CUDAFunctor_")
    while (shorter := _ENDS.sub("", word)) not in ("", word):
        word = shorter
    return word
