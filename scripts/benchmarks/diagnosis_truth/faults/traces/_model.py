"""Models as the sequence of operators that PyTorch runs, with durations as an H100 would take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from _machine import Machine

TFLOPS = {"bf16": 620.0, "tf32": 330.0, "fp32": 47.0, "fp64": 52.0}
BYTES_PER_US = 2.55e6
GEMM = {
    "bf16": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
    "tf32": "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x8_kernel",
    "fp32": "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4"
    "_execute_kernel__5x_cublas",
    "fp64": "sm80_xmma_gemm_f64f64_f64f64_f64_tn_n_tilesize64x64x16_stage4_warpsize2x2x1_tensor8x8x4_execute_kernel",
}
SIZE = {"bf16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
POINTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{}<c10::BFloat16>, std::array<char*, 3ul> >(int)"
)
FLASH = "void flash::flash_{}_kernel<Flash_{}_kernel_traits<128, 128, 128, 4, false, false, cutlass::bfloat16_t> >()"
FUSED_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >()"
)


def moved(size: float) -> float:
    """Return the time to move bytes from and to the GPU's memory."""
    return size / BYTES_PER_US + 1.5


@dataclass
class Transformer:
    """A decoder-only language model on one machine."""

    machine: Machine
    layers: int = 8
    d: int = 2048
    tokens: int = 8192
    heads: int = 16
    sequence: int = 2048
    vocabulary: int = 32000
    dtype: str = "bf16"
    attention: str = "flash"
    names: bool = True  # ranges forward, backward, optimizer
    shapes: bool = True
    rate: float = 1.0  # rate of the products, relative to the usual rate
    pointwise_kernels: int = 1  # per activation function or norm
    tape: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def product(self, m: int, n: int, k: int, sequence: int | None = None, op: str = "aten::mm") -> None:
        us = 2 * m * n * k / TFLOPS[self.dtype] / 1e6 / self.rate + 2.5
        dims = [[m, k], [k, n]] if self.shapes else None
        grid = (max(m // 128, 1) * max(n // 256, 1), 1, 1)
        self.machine.kernel(GEMM[self.dtype], us, op=op, dims=dims, sequence=sequence, grid=grid, block=(384, 1, 1))

    def pointwise(self, op: str, functor: str, tensors: int, sequence: int | None = None, width: int | None = None):
        size = tensors * self.tokens * (width or self.d) * SIZE[self.dtype]
        dims = [[self.tokens, width or self.d]] if self.shapes else None
        grid = (max(self.tokens * (width or self.d) // 1024, 1), 1, 1)
        name = POINTWISE.format(functor)
        self.machine.kernel(name, moved(size), op=op, dims=dims, sequence=sequence, grid=grid)

    def norm(self, forward: bool, sequence: int | None = None) -> None:
        name = "vectorized_layer_norm_kernel" if forward else "layer_norm_grad_input_kernel_vectorized"
        op = "aten::native_layer_norm" if forward else "aten::native_layer_norm_backward"
        size = (2 if forward else 3) * self.tokens * self.d * SIZE[self.dtype]
        kernel = f"void at::native::(anonymous namespace)::{name}<c10::BFloat16, float>(int)"
        self.machine.kernel(kernel, moved(size), op=op, sequence=sequence, grid=(self.tokens, 1, 1), block=(32, 4, 1))

    def scores(self, backward: bool, sequence: int | None = None) -> None:
        """Run attention: fused, or by products, a mask and a softmax that writes its scores to memory."""
        m = self.machine
        flops = 2 * 2 * self.tokens * self.sequence * self.d * (2.5 if backward else 1)
        if self.attention == "flash":
            us = flops / 2 / TFLOPS["bf16"] / 1e6 * 1.25 + 4
            op = "aten::_flash_attention_backward" if backward else "aten::_flash_attention_forward"
            name = FLASH.format("bwd" if backward else "fwd", "bwd" if backward else "fwd")
            m.kernel(name, us, op=op, sequence=sequence, grid=(self.sequence // 128, self.heads, 4), block=(128, 1, 1))
            return
        batch = self.tokens // self.sequence * self.heads
        head = self.d // self.heads
        size = self.tokens * self.sequence * self.heads * SIZE[self.dtype]
        dims = [[batch, self.sequence, head], [batch, head, self.sequence]] if self.shapes else None
        us = flops / (5 if backward else 2) / TFLOPS[self.dtype] / 1e6 * 2
        grid = (self.sequence // 128, self.sequence // 128, batch)

        def bmm() -> None:
            m.kernel(GEMM[self.dtype], us, op="aten::bmm", dims=dims, sequence=sequence, grid=grid, block=(384, 1, 1))

        def along(op: str, name: str, tensors: int) -> None:
            kernel = f"void at::native::{name}<c10::BFloat16, float>(int)"
            m.kernel(kernel, moved(tensors * size), op=op, sequence=sequence, grid=(batch * self.sequence, 1, 1))

        if backward:
            bmm()
            bmm()
            along("aten::_softmax_backward_data", "(anonymous namespace)::cunn_SoftMaxBackward", 3)
            along("aten::masked_fill", "elementwise_kernel<128, 4, masked_fill_kernel>", 2)
            along("aten::div", "vectorized_elementwise_kernel<4, BUnaryFunctor_div>", 2)
            bmm()
            bmm()
        else:
            bmm()
            along("aten::div", "vectorized_elementwise_kernel<4, BUnaryFunctor_div>", 2)
            along("aten::masked_fill", "elementwise_kernel<128, 4, masked_fill_kernel>", 2)
            along("aten::_softmax", "(anonymous namespace)::cunn_SoftMaxForward", 2)
            bmm()

    def _range(self, name: str):
        from contextlib import nullcontext

        return self.machine.range(name) if self.names else nullcontext()

    def next(self) -> int:
        self.machine.sequence += 1
        return self.machine.sequence

    def linear(self, m: int, n: int, k: int) -> None:
        sequence = self.next()
        self.product(m, n, k, sequence)
        self.tape.append(("linear", (m, n, k), sequence))

    def activation(self, op: str, width: int) -> None:
        for _ in range(self.pointwise_kernels):
            sequence = self.next()
            self.pointwise(op, "GeluCUDAKernelImpl", 2, sequence, width)
            self.tape.append(("activation", (width,), sequence))

    def block(self) -> None:
        """Run one layer forward."""
        t, d = self.tokens, self.d
        for part in ("attention", "mlp"):
            sequence = self.next()
            self.norm(True, sequence)
            self.tape.append(("norm", (), sequence))
            if part == "attention":
                self.linear(t, 3 * d, d)
                sequence = self.next()
                self.scores(False, sequence)
                self.tape.append(("scores", (), sequence))
                self.linear(t, d, d)
            else:
                self.linear(t, 4 * d, d)
                self.activation("aten::gelu", 4 * d)
                self.linear(t, d, 4 * d)
            sequence = self.next()
            self.pointwise("aten::add", "CUDAFunctor_add", 3, sequence)

    def forward(self, between: Callable[[int], None] | None = None, head: bool = True) -> None:
        """Run the model forward; `between` is called after each layer."""
        self.tape = []
        with self._range("forward"):
            name = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)"
            us = moved(2 * self.tokens * self.d * SIZE[self.dtype])
            self.machine.kernel(name, us, op="aten::embedding", sequence=self.next())
            for layer in range(self.layers):
                self.block()
                if between:
                    between(layer)
            if head:
                self.linear(self.tokens, self.vocabulary, self.d)

    def loss(self) -> None:
        with self._range("loss"):
            name = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float>(int)"
            us = moved(2 * self.tokens * self.vocabulary * SIZE[self.dtype])
            self.machine.kernel(name, us, op="aten::_log_softmax", sequence=self.next(), grid=(self.tokens, 1, 1))
            name = "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)"
            self.machine.kernel(name, 6.0, op="aten::nll_loss_forward", sequence=self.next(), grid=(1, 1, 1))

    def backward(self, after_layer: Callable[[int], None] | None = None, before_layer=None) -> None:
        """Run autograd's nodes in reverse, in autograd's thread; `after_layer` is called when a layer's gradients exist."""
        machine = self.machine
        with self._range("backward"), machine.backward():
            with machine.node("LogSoftmaxBackward0", machine.sequence):
                name = "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, float, c10::BFloat16>(int)"
                us = moved(3 * self.tokens * self.vocabulary * SIZE[self.dtype])
                machine.kernel(name, us, op="aten::_log_softmax_backward_data", grid=(self.tokens, 1, 1))
            norms = 0
            layer = self.layers
            opened = False
            for kind, sizes, sequence in reversed(self.tape):
                inside = not (kind == "linear" and sizes[1] == self.vocabulary)
                if inside and not opened:
                    opened, layer = True, layer - 1
                    if before_layer:
                        before_layer(layer)
                node = {"linear": "MmBackward0", "norm": "NativeLayerNormBackward0", "activation": "GeluBackward0"}
                with machine.node(node.get(kind, "ScaledDotProductFlashAttentionBackward0"), sequence):
                    if kind == "linear":
                        m, n, k = sizes
                        self.product(m, k, n)
                        self.product(k, n, m)
                    elif kind == "norm":
                        self.norm(False)
                    elif kind == "activation":
                        self.pointwise("aten::gelu_backward", "GeluBackwardCUDAKernelImpl", 3, None, sizes[0])
                    else:
                        self.scores(True)
                if kind == "norm":
                    norms += 1
                    if norms % 2 == 0:
                        opened = False
                        if after_layer:
                            after_layer(layer)

    @property
    def parameters(self) -> int:
        return self.layers * 12 * self.d**2 + self.vocabulary * self.d

    def optimizer(self, kind: str = "fused") -> None:
        """Update the weights: "fused" is one kernel per chunk of tensors, "loop" twelve kernels per tensor."""
        machine = self.machine
        size = self.parameters * 28
        with machine.range("Optimizer.step#AdamW.step"):
            if kind == "fused":
                chunks = max(self.layers // 2, 1)
                for _ in range(chunks):
                    machine.kernel(FUSED_ADAM, moved(size / chunks), op="aten::_fused_adamw_", block=(512, 1, 1))
            else:
                tensors = self.layers * 12 + 2
                for _ in range(tensors):
                    for op in ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_"):
                        name = (
                            f"void at::native::vectorized_elementwise_kernel<4, at::native::{op}_functor<float> >(int)"
                        )
                        machine.kernel(name, moved(size / tensors / 5), op=f"aten::{op}")
        with machine.range("Optimizer.zero_grad#AdamW.zero_grad"):
            machine.host(30.0)

    def train(self) -> None:
        """Run one plain training step."""
        self.forward()
        self.loss()
        self.backward()
        self.optimizer()
