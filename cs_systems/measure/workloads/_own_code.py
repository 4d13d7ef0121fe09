"""User's own code compared with the code it replaces, on small inputs, after the measured steps.

A comparison does not affect the steps: it has its own tensors, and restores the random numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.own_code import OwnCodeRow, sameness
from cs_systems.config import FIELDS, Mode, RunConfig
from cs_systems.core import plugins
from cs_systems.core.shapes import ModelConfig
from cs_systems.measure.workloads._language_model import logits_of
from cs_systems.model.attention import AttentionCall
from cs_systems.model.attention.naive import BACKEND as NAIVE
from cs_systems.model.training.clipping import KIND as CLIPPING
from cs_systems.model.training.clipping import clip_function
from cs_systems.model.training.data import KIND as DATA
from cs_systems.model.training.data import batch_function
from cs_systems.model.training.losses import KIND as LOSS
from cs_systems.model.training.losses import loss_function
from cs_systems.model.training.optimizers import KIND as OPTIMIZER
from cs_systems.model.training.optimizers import optimizer_class
from cs_systems.model.transformer import BasicTransformerLM

STEPS = 20  # steps of an optimizer
SHAPES = ((64, 32), (64,))  # shapes of a weight and a bias
MAX_NORM = 1.0
LARGE = 1000.0  # factor for logits, so that their exponentials overflow
LENGTH = 128  # sequence length of an attention call
SMALL = ModelConfig("small own", d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=64, context_length=16)


def own_code(config: RunConfig, optimizer: str | None, device: torch.device) -> list[OwnCodeRow]:
    """Return a row for each function or optimizer of the user's own in a training step.

    optimizer: the name of the optimizer that the step has, or None.
    """
    found = []
    for field, each in FIELDS.items():
        compare = _COMPARED.get(each.field.plugin)
        name = optimizer if each.field.plugin == OPTIMIZER else getattr(config, field)
        if compare is None or name is None or not plugins.is_foreign(name):
            continue
        if not (each.field.plugin == LOSS and config.mode is Mode.FORWARD) and (made := compare(name, device)):
            found.append(row(each.option, name, *made))
    return found


Pairs = Iterable[tuple[Tensor, Tensor]]
# name of the reference, and a function that returns (own, reference) for each output
Compared = tuple[str, Callable[[], Pairs]]


def row(option: str, name: str, reference: str, pairs: Callable[[], Pairs]) -> OwnCodeRow:
    """Return the row of a comparison; an exception of the user's code is its note."""
    error, note, same = None, "", "failed"
    try:
        with _random_numbers_kept():
            error = max((_difference(own, exact) for own, exact in pairs()), key=lambda x: (math.isnan(x), x))
        same = sameness(error)
        if not math.isfinite(error):
            error, note = None, "inf or NaN where the reference is finite"
    except Exception as raised:  # errors of the user's code, which already ran in the step
        note = f"{type(raised).__name__}: {raised}"
    return {
        "option": option, "code": name, "reference": reference, "same": same, "error": error, "note": note,
    }  # fmt: skip


def _difference(own: Tensor, exact: Tensor) -> float:
    """Return the largest difference over the largest value of the reference."""
    if own.shape != exact.shape:
        raise ValueError(f"shape {tuple(own.shape)} instead of {tuple(exact.shape)}")
    own, exact = own.detach().double(), exact.detach().double()
    largest, difference = float(exact.abs().max()), float((own - exact).abs().max())
    return difference / largest if largest else difference


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    of_numpy = numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        numpy.random.set_state(of_numpy)


def _optimizer(name: str, device: torch.device) -> Compared | None:
    """Compare with torch's class of the same name: the change of the parameters; None if torch has none."""
    known = {each.lower(): each for each in torch.optim.__all__}
    word = name.rpartition(":")[2].lower().removeprefix("get_").removesuffix("_cls")
    if (reference := known.get(word)) is None:
        return None

    def pairs() -> Pairs:
        cls, options = optimizer_class(name)
        torchs = getattr(torch.optim, reference)
        accepted = inspect.signature(torchs).parameters
        expected = _changes(torchs, {each: value for each, value in options.items() if each in accepted}, device)
        return zip(_changes(cls, options, device), expected, strict=True)

    return f"torch.optim.{reference}", pairs


def _changes(cls: Callable[..., Any], options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """Return the change of the parameters by STEPS steps."""
    random = torch.Generator().manual_seed(0)
    before = [torch.randn(shape, generator=random).to(device) for shape in SHAPES]
    params = [nn.Parameter(x.clone()) for x in before]
    optimizer = cls(params, **options)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random).to(device)
        optimizer.step()
    return [p.detach() - x for p, x in zip(params, before, strict=True)]


def _loss(name: str, device: torch.device) -> Compared:
    """Compare the loss and the gradient of the logits, for usual and for large logits."""

    def pairs() -> Pairs:
        targets = torch.randint(100, (64,)).to(device)
        for scale in (1.0, LARGE):
            logits = scale * torch.randn(64, 100).to(device)
            own, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
            losses = loss_function(name)(own, targets), nn.functional.cross_entropy(exact, targets)
            yield losses
            yield _gradient(losses[0], own), _gradient(losses[1], exact)

    return "F.cross_entropy", pairs


def _gradient(output: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(output, of)[0]


def _clip(name: str, device: torch.device) -> Compared:
    """Compare clipped gradients with a norm above and below the limit; one parameter has no gradient."""

    def clipped(function: Callable[..., Any], scale: float) -> Tensor:
        random = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in (*SHAPES, (3,))]
        for p in params[:-1]:
            p.grad = scale * torch.randn(p.shape, generator=random).to(device)
        function(params, MAX_NORM)
        return torch.cat([p.grad.flatten() for p in params if p.grad is not None])

    def pairs() -> Pairs:
        for scale in (1.0, 1e-4):
            yield clipped(clip_function(name), scale), clipped(nn.utils.clip_grad_norm_, scale)

    return "clip_grad_norm_", pairs


def _data(name: str, device: torch.device) -> Compared:
    """Compare batches from the tokens 0, 1, 2, …: each token is the previous one plus 1, each target the next token."""

    def pairs() -> Pairs:
        batch, length, dataset = 64, 8, numpy.arange(20)
        inputs, targets = (x.cpu() for x in batch_function(name)(dataset, batch, length, device))
        first = inputs[:, :1]
        yield inputs, first + torch.arange(length)
        yield targets, first + torch.arange(1, length + 1)
        if len(first.unique()) == 1:
            raise ValueError("all sequences begin at one place")

    return "windows", pairs


_COMPARED: dict[str, Callable[[str, torch.device], Compared | None]] = {
    OPTIMIZER: _optimizer, LOSS: _loss, CLIPPING: _clip, DATA: _data,
}  # fmt: skip


IGNORES_MASK = "is_causal has no effect"


def attention_row(name: str, function: Callable[..., Any], call: AttentionCall) -> OwnCodeRow:
    """Compare an attention function with naive in float64: the output, and the gradients that the call needs.

    A causal call with the same result as without the mask has a note.
    """

    def pairs(causal: bool = call.causal) -> Pairs:
        dtype = getattr(torch, call.dtype)
        q = (2, call.heads_q, min(call.seq_q, LENGTH), call.d_head)
        k = (2, call.heads_kv, min(call.seq_k, LENGTH), call.d_head)
        options: dict[str, Any] = {"causal": call.causal, "align": call.align, "scale": None}
        options |= {} if call.window is None else {"window": call.window}
        leaves = [torch.randn(shape).to(call.device, dtype).requires_grad_(call.needs_backward) for shape in (q, k, k)]
        exacts = [x.detach().double().requires_grad_(call.needs_backward) for x in leaves]
        own, exact = function(*leaves, **options), NAIVE(*exacts, **options | {"causal": causal})
        yield own, exact
        if call.needs_backward:
            gradient = torch.randn(exact.shape).to(call.device, dtype)
            yield from zip(
                torch.autograd.grad(own, leaves, gradient),
                torch.autograd.grad(exact, exacts, gradient.double()),
                strict=True,
            )

    option, reference = FIELDS["attention"].option, "naive in float64"
    found = row(option, name, f"causal {reference}" if call.causal else reference, pairs)
    if call.causal and found["same"] == "no" and row(option, name, reference, partial(pairs, False))["same"] == "yes":
        return {**found, "note": IGNORES_MASK}
    return found


def model_row(name: str, make: Callable[[ModelConfig], nn.Module], device: torch.device) -> OwnCodeRow:
    """Compare the logits of a language model with the built-in model's, for the same parameters."""

    def pairs() -> Pairs:
        built_in, own = BasicTransformerLM(SMALL).to(device), make(SMALL).to(device)
        state = {key: value.detach() for key, value in built_in.named_parameters()}
        names = {key: p.shape for key, p in own.named_parameters()}
        if lacking := [key for key, value in state.items() if names.get(key) != value.shape]:
            raise ValueError(f"no parameter {lacking[0]} of shape {tuple(state[lacking[0]].shape)} to compare by")
        own.load_state_dict(state, strict=False)
        tokens = torch.randint(SMALL.vocab_size, (2, SMALL.context_length)).to(device)
        with torch.no_grad():
            yield logits_of(own.eval()(tokens)), built_in(tokens)

    return row(FIELDS["workload"].option, name, "BasicTransformerLM", pairs)
