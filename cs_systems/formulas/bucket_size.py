"""How large the buckets of data parallelism should be, by formula.

The gradients of a backward of T seconds, Ψ bytes of them, come evenly by bytes, and are averaged in k all-reduces one
after the other, each as soon as its bucket is full. An all-reduce of n bytes takes c(n) = α + n/β (Hockney 1994), β
being what nccl-tests calls algbw: the bytes of the tensor over the time, busbw · N / (2 (N − 1)).

Where the host binds, backward waits for each all-reduce to be started, h seconds, and takes T + k h; where the device
does, h is nothing, for the host is ahead.

Bucket i is full and started at r_i and done at f_i = max(f_(i−1), r_i) + c(n_i). Unrolled, f_k = max over j of r_j +
c(n_j) + … + c(n_k): from some bucket on the link never rests. By so much a step is longer than without: f_k − T.

For k equal buckets r_j = j (T/k + h), so that the expression is linear in j, and its maximum at one of the ends:

    E(k) = max(α + Ψ/(kβ) + kh,  T/k + h + kα + Ψ/β − T)

The first: the link keeps up, and the last bucket is exposed. The second: it never rests after the first bucket. Both
are convex, so that E is least where one of them is, at √(Ψ/(βh)) or √(T/α), or where they meet beside k = 1, at
(T − Ψ/β)/(α − h).

If the link is slower than backward (Ψ/β ≥ T), k* = √(T/α): the balance of waiting for the first bucket against one more
latency a bucket (as in Shi et al. 2019, MG-WFBP). If it is faster and the device binds, k* is the number of latencies
that fit into the time that the link rests; if the host binds, the balance of the last bucket against starting one more.

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
    """A fit of all-reduces: c(n) = latency_s + n / algorithm_bytes_per_s; start_s: h, where the host binds."""

    latency_s: float
    algorithm_bytes_per_s: float
    start_s: float = 0.0

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.algorithm_bytes_per_s


def exposed_s(buckets: Sequence[float], backward_s: float, link: Link) -> float:
    """How much longer backward is with the all-reduces of buckets of so many bytes, in the order in which they fill."""
    whole, full, done = sum(buckets), 0.0, 0.0
    for started, size in enumerate(buckets, 1):
        full += size
        done = max(done, backward_s * full / whole + started * link.start_s) + link.time_s(size)
    return done - backward_s


def exposed_of_equal_s(count: float, gradient_bytes: float, backward_s: float, link: Link) -> float:
    """E(k), the closed form for `count` equal buckets."""
    transfer_s = gradient_bytes / link.algorithm_bytes_per_s
    keeps_up = link.latency_s + transfer_s / count + count * link.start_s
    never_rests = backward_s / count + link.start_s + count * link.latency_s + transfer_s - backward_s
    return max(keeps_up, never_rests)


def best_count(gradient_bytes: float, backward_s: float, link: Link) -> float:
    """k*, not rounded and at least 1: the number of equal buckets that exposes least."""
    transfer_s = gradient_bytes / link.algorithm_bytes_per_s
    candidates = [1.0, math.sqrt(backward_s / link.latency_s)]
    if link.start_s:
        candidates.append(math.sqrt(transfer_s / link.start_s))
    if link.start_s != link.latency_s:
        candidates.append((backward_s - transfer_s) / (link.latency_s - link.start_s))
    possible = [count for count in candidates if count >= 1]
    return min(possible, key=lambda count: exposed_of_equal_s(count, gradient_bytes, backward_s, link))


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
