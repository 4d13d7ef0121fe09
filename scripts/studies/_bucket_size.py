"""Optimal bucket size of data parallelism, by formula.

Model: a backward of T seconds produces Ψ bytes of gradients at a constant rate. They are averaged in k all-reduces,
one after the other, each as soon as its bucket is full. An all-reduce of n bytes takes c(n) = α + n/β (Hockney 1994).
β is the algbw of nccl-tests: the bytes of the tensor over the time, busbw · N / (2 (N − 1)).

If the host is the bottleneck, backward waits h seconds for the start of each all-reduce and takes T + k h. If the
device is the bottleneck, h = 0, because the host runs ahead.

Bucket i is full and started at r_i and done at f_i = max(f_(i−1), r_i) + c(n_i). Unrolled, f_k = max over j of r_j +
c(n_j) + … + c(n_k): from some bucket on the link is never idle. The exposed communication is f_k − T.

For k equal buckets r_j = j (T/k + h), so that the expression is linear in j, and its maximum is at one of the ends:

    E(k) = max(α + Ψ/(kβ) + kh,  T/k + h + kα + Ψ/β − T)

First term: the link keeps up, and only the last bucket is exposed. Second term: the link is never idle after the first
bucket. Both are convex, so E has its minimum where one of them does, at √(Ψ/(βh)) or √(T/α), or where they intersect
besides k = 1, at (T − Ψ/β)/(α − h).

If the link is slower than backward (Ψ/β ≥ T), k* = √(T/α): the balance between the wait for the first bucket and one
more latency per bucket (as in Shi et al. 2019, MG-WFBP). If it is faster and the device is the bottleneck, k* is the
number of latencies that fit into the link's idle time. If the host is the bottleneck, k* balances the exposed last
bucket against the start of one more all-reduce.

Left out: a collective slows computation down while it runs, because it takes multiprocessors and memory bandwidth. The
measured exposure is therefore larger. The formula tells which size to use;
`attribution.overlap` measures what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cs_systems.config import ModelConfig


@dataclass(frozen=True)
class Link:
    """Fit of all-reduce times: c(n) = latency_s + n / algorithm_bytes_per_s.

    `start_s` is h, the host's time to start one; 0 where the device is the bottleneck.
    """

    latency_s: float
    algorithm_bytes_per_s: float
    start_s: float = 0.0

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.algorithm_bytes_per_s


def exposed_s(buckets: Sequence[float], backward_s: float, link: Link) -> float:
    """Return the seconds of exposed communication of a backward.

    `buckets` are the buckets' bytes, in the order in which they fill.
    """
    whole, full, done = sum(buckets), 0.0, 0.0
    for started, size in enumerate(buckets, 1):
        full += size
        done = max(done, backward_s * full / whole + started * link.start_s) + link.time_s(size)
    return done - backward_s


def exposed_of_equal_s(count: float, gradient_bytes: float, backward_s: float, link: Link) -> float:
    """Return E(k) in seconds, the closed form for `count` equal buckets."""
    transfer_s = gradient_bytes / link.algorithm_bytes_per_s
    keeps_up = link.latency_s + transfer_s / count + count * link.start_s
    never_rests = backward_s / count + link.start_s + count * link.latency_s + transfer_s - backward_s
    return max(keeps_up, never_rests)


def best_count(gradient_bytes: float, backward_s: float, link: Link) -> float:
    """Return k*, the unrounded number (at least 1) of equal buckets with the least exposed communication."""
    transfer_s = gradient_bytes / link.algorithm_bytes_per_s
    candidates = [1.0, math.sqrt(backward_s / link.latency_s)]
    if link.start_s:
        candidates.append(math.sqrt(transfer_s / link.start_s))
    if link.start_s != link.latency_s:
        candidates.append((backward_s - transfer_s) / (link.latency_s - link.start_s))
    possible = [count for count in candidates if count >= 1]
    return min(possible, key=lambda count: exposed_of_equal_s(count, gradient_bytes, backward_s, link))


def best_size_bytes(gradient_bytes: float, backward_s: float, link: Link) -> float:
    """Return Ψ / k*, the bucket size in bytes with the least exposed communication."""
    return gradient_bytes / best_count(gradient_bytes, backward_s, link)


def parameter_sizes(model: ModelConfig, element_bytes: int = 4) -> list[int]:
    """Return the bytes of each parameter of a BasicTransformerLM, in the order of registration."""
    d, head = model.d_model, model.vocab_size * model.d_model
    block = [d, *[d * d] * 4, d, *[d * model.d_ff] * 3]
    return [size * element_bytes for size in (head, *block * model.num_layers, d, head)]


def buckets_of(sizes: Iterable[int], bucket_bytes: float) -> list[int]:
    """Return the bytes of the buckets that `ddp_bucketed` makes of these parameters, in the order of filling.

    A parameter is not split; the one that reaches `bucket_bytes` closes the bucket.
    """
    done, size = [], 0
    for one in reversed(list(sizes)):
        size += one
        if size >= bucket_bytes:
            done.append(size)
            size = 0
    return [*done, size] if size else done
