"""How large the buckets of data parallelism should be, by formula. Floor 0: no torch.

The gradients of a backward of T seconds, Ψ bytes of them, come evenly by bytes, and are averaged in k all-reduces one
after the other, each as soon as its bucket is full. An all-reduce of n bytes takes c(n) = α + n/β (Hockney 1994), β
being what nccl-tests calls algbw: the bytes of the tensor over the time, busbw · N / (2 (N − 1)).

Bucket i is full at r_i and done at f_i = max(f_(i−1), r_i) + c(n_i). Unrolled, f_k = max over j of r_j + c(n_j) + … +
c(n_k): from some bucket on the link never rests. What backward does not hide is f_k − T.

For k equal buckets r_j = j T/k, so that the expression is linear in j, and its maximum at one of the ends:

    E(k) = max(α + Ψ/(kβ),  T/k + kα + Ψ/β − T)

The first: the link keeps up, and only the last bucket is exposed. The second: it never rests after the first bucket.
The first falls with k. The second falls until k = √(T/α) and rises from there. They meet at k = 1, and again where
k = (T − Ψ/β)/α: below it the first is the greater, above it the second. So E is least at

    k* = max(√(T/α), (T − Ψ/β)/α)

If the link is slower than backward (Ψ/β ≥ T), k* = √(T/α): the balance of waiting for the first bucket against one more
latency a bucket (as in Shi et al. 2019, MG-WFBP). If it is faster, k* is the number of latencies that fit into the time
that the link rests.

Left out: computing is slower while a collective runs (it takes multiprocessors and memory bandwidth), so that what is
measured is exposed more than this; the formula says which size to take, `analysis.overlap` what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cs_systems.config import ModelConfig


@dataclass(frozen=True)
class Link:
    """The fit of measured all-reduces: c(n) = latency_s + n / algorithm_bytes_per_s."""

    latency_s: float
    algorithm_bytes_per_s: float

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.algorithm_bytes_per_s


def exposed_s(buckets: Sequence[float], backward_s: float, link: Link) -> float:
    """What backward does not hide of the all-reduces of buckets of so many bytes, in the order in which they fill."""
    whole, full, done = sum(buckets), 0.0, 0.0
    for size in buckets:
        full += size
        done = max(done, backward_s * full / whole) + link.time_s(size)
    return done - backward_s


def exposed_of_equal_s(count: float, gradient_bytes: float, backward_s: float, link: Link) -> float:
    """E(k), the closed form for `count` equal buckets."""
    transfer_s = gradient_bytes / link.algorithm_bytes_per_s
    keeps_up = link.latency_s + transfer_s / count
    never_rests = backward_s / count + count * link.latency_s + transfer_s - backward_s
    return max(keeps_up, never_rests)


def best_count(gradient_bytes: float, backward_s: float, link: Link) -> float:
    """k*, not rounded and at least 1: the number of equal buckets that exposes least."""
    balance = math.sqrt(backward_s / link.latency_s)
    fitting = (backward_s - gradient_bytes / link.algorithm_bytes_per_s) / link.latency_s
    return max(1.0, balance, fitting)


def best_size_bytes(gradient_bytes: float, backward_s: float, link: Link) -> float:
    """Ψ / k*: the size of a bucket that exposes least."""
    return gradient_bytes / best_count(gradient_bytes, backward_s, link)


def parameter_sizes(model: ModelConfig, element_bytes: int = 4) -> list[int]:
    """Bytes of each parameter of a BasicTransformerLM in the order of registration."""
    d, head = model.d_model, model.vocab_size * model.d_model
    block = [d, *[d * d] * 4, d, *[d * model.d_ff] * 3]
    return [size * element_bytes for size in (head, *block * model.num_layers, d, head)]


def buckets_of(sizes: Iterable[int], bucket_bytes: float) -> list[int]:
    """Bytes of the buckets that `ddp_bucketed` makes of parameters of these sizes, in the order in which they fill: a
    parameter is not split, and the one that reaches `bucket_bytes` closes the bucket."""
    done, size = [], 0
    for one in reversed(list(sizes)):
        size += one
        if size >= bucket_bytes:
            done.append(size)
            size = 0
    return [*done, size] if size else done
