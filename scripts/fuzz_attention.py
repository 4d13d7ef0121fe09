"""Fuzz test of an attention backend against float64.

Method: case K of a seed is one call, the same each time: odd lengths and lengths around the edges of tiles, q shorter
    or longer than k, both alignments, grouped heads, strides, now and then more than 65,535 heads; fp16 and bf16; its
    output and gradients are held against `naive` in float64. Norms must agree within the backend's tolerance, and each
    row (a query's or key's d_head numbers) within twice that: one wrong row among many is found. To the tolerance of a
    backend that `rounds_scores` comes the unit roundoff times the largest score.
    What a kernel is compiled for (dtype, d_head, mask, grouping, layout) is drawn from --kinds combinations, since
    each compiles anew; lengths and numbers of heads differ in every case.
Output: each failing case with the command that runs it again; refused calls by reason; the largest errors. With
    --against, over all cases that both take, the root mean square of the errors must be at most 1.2 times the other's.
    Exit status 0: none failed; 1: some did; 2: malformed; 3: no call was served.

    python scripts/fuzz_attention.py flash_triton --cases 10000 --budget-s 500
    python scripts/fuzz_attention.py flash_cuda --against flash_attn
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.machine.device import DeviceUnavailable, resolve
from cs_systems.model.attention import AttentionBackend, AttentionCall

EXIT_FAILED, EXIT_MALFORMED, EXIT_NOTHING = 1, 2, 3
DTYPES, D_HEADS = ("float16", "bfloat16"), (32, 64, 80, 96, 128, 256)
RESULTS = ("out", "dq", "dk", "dv")
ROW_FACTOR, AGAINST_FACTOR = 2, 1.2
MOST_FAILURES = 10
# the reference needs about six matrices of this many float64 numbers at its peak
SCORES = {"cpu": 2**14, "cuda": 2**23}
MANY_HEADS = 65_536
ONE_ROW_LONGEST = 4096


@dataclass(frozen=True)
class Kind:
    """Combination of properties for which a kernel is compiled.

    lengths: length of the keys compared with the queries'. layout: memory layout of q, k and v. even_q, even_k:
    16 divides the length; Triton compiles such lengths separately, as it does a length or number of 1.
    """

    dtype: str
    d_head: int
    causal: bool
    align: str
    group: int  # query heads per key head
    lengths: str  # equal, shorter (q than k), longer; rounding may change that
    even_q: bool
    even_k: bool
    several_heads: bool
    layout: str  # contiguous; transposed: (batch, seq, heads, d_head); sliced: a part of wider rows
    gradient: str  # contiguous, transposed, expanded (one number)
    scale: float | None


@dataclass(frozen=True)
class Case:
    kind: Kind
    batch: int
    heads_kv: int
    seq_q: int
    seq_k: int

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.kind.group

    def call(self, device: str, needs_backward: bool = True) -> AttentionCall:
        kind = self.kind
        return AttentionCall(
            device, kind.dtype, kind.d_head, self.seq_q, self.seq_k, self.heads_q, self.heads_kv,
            kind.causal, kind.align, needs_backward,
        )  # fmt: skip

    def __str__(self) -> str:
        kind = self.kind
        mask = f"causal {kind.align}" if kind.causal else "not causal"
        return (
            f"{kind.dtype}, q ({self.batch}, {self.heads_q}, {self.seq_q}, {kind.d_head}), k ({self.batch}, "
            f"{self.heads_kv}, {self.seq_k}, {kind.d_head}), {mask}, scale {kind.scale or 'default'}, {kind.layout}, "
            f"gradient {kind.gradient}"
        )


def kinds(seed: int, count: int) -> list[Kind]:
    """Return kinds: each dtype with each d_head in turn, the other properties at random."""
    draw = random.Random(f"kinds of {seed}")
    made = []
    for i in range(count):
        lengths = draw.choice(("equal", "shorter", "longer"))
        causal, even = draw.random() < 0.7, draw.random() < 0.3
        made.append(
            Kind(
                dtype=DTYPES[i % 2],
                d_head=D_HEADS[i // 2 % len(D_HEADS)],
                causal=causal,
                align=draw.choice(("upper_left", "lower_right")) if causal else "upper_left",
                group=draw.choice((1, 1, 2, 3, 5)),
                lengths=lengths,
                even_q=even,
                even_k=even if lengths == "equal" else draw.random() < 0.3,
                several_heads=draw.random() < 0.8,
                layout=draw.choice(("contiguous", "transposed", "sliced")),
                gradient=draw.choice(("contiguous", "transposed", "expanded")),
                scale=draw.choice((None, None, None, 0.3, -0.2)),
            )
        )
    return made


def drawn(seed: int, number: int, kinds: Sequence[Kind], scores: int) -> Case:
    """Return test case `number` of a seed, with at most `scores` scores (batch · heads · seq_q · seq_k)."""
    draw = random.Random(f"case {number} of {seed}")
    kind = draw.choice(kinds)
    if draw.random() < 0.01 and not (kind.even_q or kind.even_k) and scores >= 64 * (MANY_HEADS + 64):
        seq_q, seq_k = draw.randint(2, 8), draw.randint(2, 8)
        heads_kv = draw.randint(2, 4) if kind.several_heads else 1
        return Case(kind, -(-MANY_HEADS // (heads_kv * kind.group)), heads_kv, seq_q, seq_k)
    seq_q, seq_k = _lengths(draw, kind, math.isqrt(scores // (kind.group * (1 + kind.several_heads))))
    if kind.lengths != "equal" and draw.random() < 0.1:  # one query, as in decoding, or one key
        alone, many = 1, draw.randint(1, min(scores // (2 * kind.group), ONE_ROW_LONGEST))
        seq_q, seq_k = (alone, many) if kind.lengths == "shorter" else (many, alone)
    room = scores // (kind.group * max(seq_q, kind.d_head) * max(seq_k, kind.d_head))
    heads_kv = draw.randint(2, max(2, min(room, 6))) if kind.several_heads else 1
    return Case(kind, draw.randint(1, max(1, min(room // heads_kv, 4))), heads_kv, seq_q, seq_k)


def _lengths(draw: random.Random, kind: Kind, longest: int) -> tuple[int, int]:
    one, other = sorted((_length(draw, longest), _length(draw, longest)))
    seq_q, seq_k = {"equal": (one, one), "shorter": (one, other), "longer": (other, one)}[kind.lengths]
    return _rounded(seq_q, kind.even_q, longest), _rounded(seq_k, kind.even_k, longest)


def _length(draw: random.Random, longest: int) -> int:
    """Return a random length, short as often as long; a third of the lengths lie at an edge of a tile."""
    length = round(math.exp(draw.uniform(0, math.log(longest))))
    if draw.random() < 1 / 3:
        length = 64 * max(1, round(length / 64)) + draw.choice((-1, 0, 1))
    return max(1, min(length, longest))


def _rounded(length: int, even: bool, longest: int) -> int:
    """Return the length rounded to a multiple of 16 if `even`, else to any other length."""
    if even and longest >= 16:
        return max(16, length // 16 * 16)
    return length - (length % 16 == 0)


def tensors(case: Case, seed: int, number: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of the output in the case's memory layout."""
    kind = case.kind
    generator = torch.Generator(device).manual_seed(random.Random(f"numbers {number} of {seed}").getrandbits(63))

    def made(layout: str, heads: int, seq: int) -> Tensor:
        wider = 16 if layout == "sliced" else 0
        sizes = (case.batch, seq, heads) if layout == "transposed" else (case.batch, heads, seq)
        whole = torch.randn(*sizes, kind.d_head + wider, device=device, generator=generator)
        part = whole.to(getattr(torch, kind.dtype))[..., wider:]
        return part.transpose(1, 2) if layout == "transposed" else part

    q, k, v = (
        made(kind.layout, *of) for of in ((case.heads_q, case.seq_q), *[(case.heads_kv, case.seq_k)] * 2)
    )  # fmt: skip
    # the gradient that out.sum() gives; not tiny numbers, because fp16 could not represent their gradients
    if kind.gradient == "expanded":
        one = 0.5 + torch.rand(1, 1, 1, 1, device=device, generator=generator)
        return q, k, v, one.to(q.dtype).expand_as(q)
    return q, k, v, made(kind.gradient, case.heads_q, case.seq_q)


def computed(backend: AttentionBackend, inputs: Sequence[Tensor], case: Case, backward: bool) -> list[Tensor]:
    """Return [out] or, with backward, [out, dq, dk, dv]."""
    q, k, v, gradient = inputs
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    out = backend(*leaves, causal=case.kind.causal, align=case.kind.align, scale=case.kind.scale)
    return [out.detach(), *(torch.autograd.grad(out, leaves, gradient) if backward else ())]


def exact(inputs: Sequence[Tensor], case: Case, backward: bool) -> list[tuple[Tensor, Tensor]]:
    """Return (float64 value, size of each row's terms) for each result; errors are measured against these.

    A gradient is a sum that may cancel to nothing while its terms keep their rounding: ds = p (dp − δ) with δ = do · o,
    where o was rounded. That rounding changes a row of dq by about scale ‖do‖ ‖o‖ / √d times the row of p k, and a row
    of dk by the sum over its queries of p scale ‖do‖ ‖o‖ ‖q‖ / √d.
    """
    naive, (q, k, _, gradient) = _backend("naive"), [x.double() for x in inputs]
    values = computed(naive, [x.double() for x in inputs], case, backward)
    terms = [value.norm(dim=-1) for value in values]
    if backward:
        scale = abs(case.kind.scale or case.kind.d_head**-0.5)
        moved = scale * gradient.norm(dim=-1) * values[0].norm(dim=-1) / math.sqrt(case.kind.d_head)
        spread = (moved * q.norm(dim=-1)).unsqueeze(-1).expand_as(q)
        seen, *_, collected = computed(naive, [q, k, k, spread], case, True)
        terms[1] = terms[1].hypot(moved * seen.norm(dim=-1))
        terms[2] = terms[2].hypot(collected[..., 0])
    return list(zip(values, terms, strict=True))


def errors(got: Tensor, reference: Tensor, terms: Tensor) -> tuple[float, float]:
    """Return (‖got − reference‖ / ‖terms‖, the largest ratio of a row).

    Terms of a row below a tenth of the root mean square of all rows count as that tenth. Both are inf for another shape
    and for a number that is not finite.
    """
    if got.shape != reference.shape or not got.isfinite().all():
        return math.inf, math.inf
    rows = (got.double() - reference).norm(dim=-1)
    size = max(float(terms.norm()), torch.finfo(got.dtype).tiny)
    tenth = 0.1 * size / math.sqrt(terms.numel())
    return float(rows.norm()) / size, float((rows / terms.clamp(min=tenth)).max())


def rounding_of_scores(inputs: Sequence[Tensor], case: Case) -> float:
    """Return the relative error of an attention weight when its score is rounded to the dtype."""
    q, k = inputs[0].double(), inputs[1].double()
    grouped = q.unflatten(1, (case.heads_kv, case.kind.group)).flatten(2, 3)  # query head h is of key head h // group
    scale = abs(case.kind.scale or case.kind.d_head**-0.5)
    return torch.finfo(inputs[0].dtype).eps / 2 * scale * float((grouped @ k.mT).abs().max())


@dataclass
class Tally:
    """Counts and errors so far.

    largest: (dtype, result, whole or row) → (error, case). squares: (backend, dtype, result) → sum of squared errors
    over the cases that both backends serve. others_fail: cases in which the other backend fails.
    """

    served: int = 0
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    largest: dict[tuple[str, str, str], tuple[float, int]] = field(default_factory=dict)
    squares: defaultdict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    compared: Counter[str] = field(default_factory=Counter)
    others_fail: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Fuzz:
    name: str
    seed: int
    kinds: int
    scores: int
    device: torch.device
    against: str | None = None

    def command(self, number: int) -> str:
        return (
            f"python scripts/fuzz_attention.py {self.name} --seed {self.seed} --kinds {self.kinds} --scores "
            f"{self.scores} --device {self.device.type} --case {number}"
        )

    def run(self, numbers: Sequence[int], expired: Callable[[], bool]) -> tuple[Tally, int]:
        """Return (the tally, the number of cases that were drawn)."""
        tally, choice = Tally(), kinds(self.seed, self.kinds)
        backends = {name: _backend(name) for name in (self.name, self.against) if name}
        for done, number in enumerate(numbers):
            if expired() or tally.failed >= MOST_FAILURES:
                return tally, done
            case = drawn(self.seed, number, choice, self.scores)
            for complaint in self._try(case, number, backends, tally):
                tally.failed += 1
                print(f"case {number}, {case}:\n    {complaint}\n    {self.command(number)}", flush=True)
        return tally, len(numbers)

    def _try(self, case: Case, number: int, backends: dict[str, AttentionBackend], tally: Tally) -> Iterator[str]:
        """Return None, or the failure of the case."""
        backend, backward = backends[self.name], True
        if reason := backend.unavailable(case.call(self.device.type)):
            tally.refused[reason] += 1
            backward = False
            if backend.unavailable(case.call(self.device.type, needs_backward=False)):
                return
        inputs = tensors(case, self.seed, number, self.device)
        reference = exact(inputs, case, backward)
        try:
            got = computed(backend, inputs, case, backward)
        except Exception as error:  # any error of a kernel is a finding
            yield f"raised {type(error).__name__}: {error}"
            return
        tally.served += 1
        found = {what: errors(g, *r) for what, g, r in zip(RESULTS, got, reference, strict=False)}
        dtype, bound = case.kind.dtype, backend.tolerance[case.kind.dtype]
        bound += rounding_of_scores(inputs, case) if backend.rounds_scores else 0
        for what, both in found.items():
            for of, error in zip(("whole", "worst row"), both, strict=True):
                tally.largest[dtype, what, of] = max(tally.largest.get((dtype, what, of), (0.0, 0)), (error, number))
        if bad := _beyond(found, bound):
            text = "; ".join(f"{what} {whole:.3g}, worst row {row:.3g}" for what, (whole, row) in bad.items())
            yield f"relative error beyond {bound:.3g}, of a row {ROW_FACTOR * bound:.3g}: {text}"
        elif self.against and backward and not backends[self.against].unavailable(case.call(self.device.type)):
            try:
                theirs = computed(backends[self.against], inputs, case, backward)
            except Exception:  # skip cases that the other backend cannot run
                tally.others_fail.append(number)
                return
            others = {what: errors(g, *r) for what, g, r in zip(RESULTS, theirs, reference, strict=True)}
            if _beyond(others, bound):
                tally.others_fail.append(number)
                return
            tally.compared[dtype] += 1
            for what in RESULTS:
                tally.squares[self.name, dtype, what] += found[what][0] ** 2
                tally.squares[self.against, dtype, what] += others[what][0] ** 2


def _beyond(found: dict[str, tuple[float, float]], bound: float) -> dict[str, tuple[float, float]]:
    return {what: both for what, both in found.items() if not (both[0] <= bound and both[1] <= ROW_FACTOR * bound)}


def _backend(name: str) -> AttentionBackend:
    found = plugins.get("attention", name)
    return found if isinstance(found, AttentionBackend) else AttentionBackend(found)


def summary(fuzz: Fuzz, tally: Tally, drawn_cases: int, asked: int) -> Iterator[str]:
    early = "" if drawn_cases == asked else f" of {asked}: the budget was spent or {MOST_FAILURES} had failed"
    yield f"{fuzz.name} on {fuzz.device.type}, seed {fuzz.seed}: {drawn_cases} cases{early}"
    yield f"{tally.served} served, {tally.failed} failed, {sum(tally.refused.values())} refused"
    for reason, count in tally.refused.most_common():
        yield f"    {count} × {reason}"
    for (dtype, what, of), (error, number) in sorted(tally.largest.items()):
        yield f"largest error, {dtype} {what}, {of}: {error:.2e}, case {number}"
    for dtype, what, ratio in ratios(fuzz, tally):
        verdict = "" if ratio <= AGAINST_FACTOR else f": above {AGAINST_FACTOR}"
        count = tally.compared[dtype]
        yield f"error over {fuzz.against}'s, {dtype} {what}: {ratio:.3f}{verdict} ({count} cases)"
    if tally.others_fail:
        cases = f"{len(tally.others_fail)} cases: {tally.others_fail[:5]}"
        yield f"{fuzz.against} raised, or is beyond {fuzz.name}'s bound, in {cases}"
    if fuzz.against and not tally.compared:
        yield f"no case was served by both {fuzz.name} and {fuzz.against}"


def ratios(fuzz: Fuzz, tally: Tally) -> Iterator[tuple[str, str, float]]:
    """Return (dtype, result, root mean square of the errors over the other backend's)."""
    for name, dtype, what in sorted(tally.squares):
        if name == fuzz.name != fuzz.against:
            theirs = tally.squares[str(fuzz.against), dtype, what]
            yield dtype, what, math.sqrt(tally.squares[name, dtype, what] / theirs) if theirs else math.inf


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("backend", help="a name, path.py:function or package.module:function")
    parser.add_argument("--against", metavar="BACKEND", help="backend to compare the errors with")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--case", type=int, metavar="K", help="run only case K")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, default=24, help="combinations to compile kernels for")
    parser.add_argument("--scores", type=int, help="most scores of one case (default: 2**23 on a GPU, else 2**14)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no new case after this many seconds")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    for name, least in {"cases": 1, "kinds": 1, "scores": 64, "case": 0}.items():
        if (value := getattr(args, name)) is not None and value < least:
            parser.error(f"--{name} is {value}; it must be at least {least}")
    try:
        device = resolve(args.device).torch
        fuzz = Fuzz(args.backend, args.seed, args.kinds, args.scores or SCORES[device.type], device, args.against)
        numbers = range(args.cases) if args.case is None else range(args.case, args.case + 1)
        ends = time.monotonic() + args.budget_s
        tally, done = fuzz.run(numbers, lambda: time.monotonic() > ends)
    except (ConfigError, DeviceUnavailable) as error:
        print(f"fuzz_attention: {error}", file=sys.stderr)
        return EXIT_MALFORMED
    print("\n".join(summary(fuzz, tally, done, len(numbers))))
    worse = any(ratio > AGAINST_FACTOR for *_, ratio in ratios(fuzz, tally))
    if tally.failed or worse or (args.against and tally.served and not tally.compared):
        return EXIT_FAILED
    return 0 if tally.served else EXIT_NOTHING


if __name__ == "__main__":
    raise SystemExit(main())
