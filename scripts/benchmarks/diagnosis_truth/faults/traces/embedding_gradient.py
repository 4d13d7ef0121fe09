"""A recommender with a table of embeddings: the gradient of the lookup sorts its indices and adds row by row."""

from _kineto import write
from _machine import Machine

CASE = {
    "truth": "The backward of the embedding lookup (sort and indexing_backward_kernel) takes two thirds of the GPU's time.",
    "cause": "index-backward",
    "also": [],
    "never": ["launch-bound", "data-loading", "host-sync"],
    "healthy": False,
}

m = Machine(53)
for _ in range(5):
    with m.step():
        with m.range("forward"):
            m.kernel(
                "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(float*)",
                210.0,
                op="aten::index",
            )
            for _ in range(6):
                m.kernel("nvjet_tst_64x128_64x6_1x2_h_bz_TNT", 300.0, op="aten::addmm", dims=[[65536, 512], [512, 512]])
                m.kernel("void at::native::vectorized_elementwise_kernel<4, relu_functor>(int)", 55.0, op="aten::relu")
        with m.range("backward"), m.backward():
            for layer in range(6):
                with m.node("AddmmBackward0", 300 + layer):
                    m.kernel(
                        "nvjet_tst_64x128_64x6_1x2_h_bz_NTT", 290.0, op="aten::mm", dims=[[65536, 512], [512, 512]]
                    )
                    m.kernel(
                        "nvjet_tst_64x128_64x6_1x2_h_bz_NNT", 280.0, op="aten::mm", dims=[[512, 65536], [65536, 512]]
                    )
            with m.node("IndexBackward0", 299), m.op("aten::_index_put_impl_"):
                for _ in range(8):
                    m.kernel(
                        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900, long, long>(int)", 160.0
                    )
                m.kernel(
                    "void at::native::indexing_backward_kernel<float, 4, false>(long*, long*, float*)", 14e3, exact=True
                )
        with m.range("Optimizer.step#Adam.step"):
            m.kernel(
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)", 900.0
            )
        m.item()
write(m, "recsys.json.gz", python=False)
