"""Tests of ranges in forward and backward against the graph itself and the trace of torch.profiler."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from cs_systems.config import PRESETS, Phase
from cs_systems.instrument.annotate import RecordFunctionRanges, annotate
from cs_systems.instrument.hooks import BackwardRanges, annotate_model, annotated
from cs_systems.instrument.structure import range_name
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training.losses import cross_entropy

CONFIG = replace(PRESETS["tiny"], num_layers=3)
TOKENS = torch.randint(CONFIG.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
Event = dict[str, Any]


class Journal:
    """Ranges that record each push and pop with its thread, and require that they nest."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open: dict[int, list[str]] = {}

    def push(self, name: str) -> None:
        self.events.append(name)
        self.open.setdefault(threading.get_ident(), []).append(name)

    def pop(self) -> None:
        self.events.append(f"/{self.open[threading.get_ident()].pop()}")

    def here(self) -> tuple[str, ...]:
        return tuple(self.open.get(threading.get_ident(), ()))

    @property
    def all_closed(self) -> bool:
        return not any(self.open.values())


def model(attention: str = "naive") -> BasicTransformerLM:
    torch.manual_seed(0)
    return BasicTransformerLM(CONFIG, attention)


def train_step(model: Callable[..., Tensor], bf16: bool = False) -> None:
    with annotate("step"):
        with annotate(Phase.FORWARD), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(TOKENS)
        with annotate(Phase.LOSS), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = cross_entropy(logits, TOKENS)
        with annotate(Phase.BACKWARD):
            loss.backward()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("token_embeddings", "embedding"), ("layers.11", "block 11"), ("layers.0.ln2", "norm"),
        ("layers.0.attn", "attention"), ("layers.0.attn.k_proj", "projections"), ("layers.0.attn.rope", "rope"),
        ("layers.0.attn.output_proj", "output"), ("layers.3.ffn", "ffn"), ("ln_final", "final norm"),
        ("lm_head", "lm_head"), ("", None), ("layers", None), ("layers.0.ffn.w1", None),
    ],
)  # fmt: skip
def test_modules_have_expected_range_names(path: str, name: str | None) -> None:
    assert range_name(path) == name


def test_each_range_name_has_a_meaning() -> None:
    from cs_systems.core.range_names import meaning

    names = {name for path, _ in model().named_modules() if (name := range_name(path))}
    assert len(names) == 9 + CONFIG.num_layers
    for name in names:
        assert any(meaning(name)), name


def test_forward_ranges_nest_like_modules() -> None:
    journal = Journal()
    hooks = annotate_model(net := model(), journal)
    with torch.no_grad():
        net(TOKENS)
    events = journal.events
    assert journal.all_closed
    assert events[:5] == ["embedding", "/embedding", "block 0", "norm", "/norm"]
    assert events[5:13] == ["attention", *["projections", "/projections"] * 3, "rope"]
    assert events[-4:] == ["final norm", "/final norm", "lm_head", "/lm_head"]
    assert Counter(events)["ffn"] == Counter(events)["/ffn"] == CONFIG.num_layers
    hooks.remove()
    net(TOKENS)
    assert journal.events == events


def test_raising_module_closes_its_ranges() -> None:
    journal = Journal()
    net = model()
    net.layers[1].get_submodule("ffn").forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError), annotated(journal, net):
        train_step(net)
    assert journal.all_closed


def test_backward_opens_ranges_in_reverse() -> None:
    journal = Journal()
    net = model()
    with annotated(journal, net):
        train_step(net)
    assert journal.all_closed
    backward = journal.events[journal.events.index(Phase.BACKWARD) + 1 :]
    assert backward[:6] == ["loss", "/loss", "lm_head", "/lm_head", "final norm", "/final norm"]
    blocks = [event for event in backward if event.startswith("block")]
    assert blocks == ["block 2", "block 1", "block 0"]  # each is opened once
    assert backward[-5:] == ["/block 0", "embedding", "/embedding", "/backward", "/step"]
    inside = backward[backward.index("block 1") : backward.index("/block 1")]
    parts = [e for e in inside if e in ("ffn", "attention", "output", "value", "softmax", "scores", "rope")]
    assert parts == ["ffn", "attention", "output", "value", "softmax", "scores", "rope"]


def graph_of(root: Node | None, stop: set[Node]) -> Iterator[Node]:
    """Return the nodes reached from `root` before any of `stop`."""
    waiting, seen = [root], set(stop)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("attention", ["naive", "sdpa_math", "flash_torch"])
def test_each_node_runs_in_the_ranges_of_its_block(attention: str, bf16: bool) -> None:
    """Without sequence numbers: a block's nodes lie between its output and its input."""
    journal, net = Journal(), model(attention)
    ran: list[tuple[str, tuple[str, ...]]] = []

    def watch(block: str, inputs: Tensor, output: Tensor) -> None:
        # A parameter that autocast converts is converted where it is used first: inside the block.
        for node in graph_of(output.grad_fn, {inputs.grad_fn} if inputs.grad_fn else set()):
            node.register_hook(lambda *_: ran.append((block, journal.here())))

    for number, layer in enumerate(net.layers):
        layer.register_forward_hook(lambda _, args, out, number=number: watch(f"block {number}", args[0], out))
    with annotated(journal, net):
        train_step(net, bf16)
    assert {block for block, _ in ran} == {"block 0", "block 1", "block 2"}
    assert len(ran) > 3 * 30
    assert [(block, stack) for block, stack in ran if block not in stack] == []


def test_wrong_label_is_detected() -> None:
    """The test above fails if the open ranges are stored one node too late."""
    journal, net = Journal(), model()
    ranges = BackwardRanges(journal)
    hooks = annotate_model(net, ranges)
    seen: list[tuple[str, ...]] = []

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        assert output.grad_fn is not None
        output.grad_fn.register_hook(lambda *_: seen.append(journal.here()))

    net.layers[1].register_forward_hook(watch)
    ranges.push(Phase.FORWARD)
    logits = net(TOKENS)
    ranges.pop()
    ranges._thread.numbers[:] = [number - 1 for number in ranges._thread.numbers]
    ranges.push(Phase.BACKWARD)
    stop = ranges.roots.install()
    logits.sum().backward()
    stop()
    ranges.pop()
    hooks.remove()
    assert len(seen) == 1
    assert "block 1" not in seen[0]


def test_retained_graph_reopens_ranges_in_each_backward() -> None:
    journal = Journal()
    x = torch.ones(3, requires_grad=True)
    with annotated(journal):
        with annotate(Phase.FORWARD), annotate("scores"):
            y = (x * x).sum()
        for _ in range(2):
            with annotate(Phase.BACKWARD):
                torch.autograd.grad(y, x, retain_graph=True)
    once = ["backward", "scores", "/scores", "/backward"]
    assert journal.events == ["forward", "scores", "/scores", "/forward", *once, *once]


def test_backward_skips_unused_module_and_opens_both_tied_ones() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.layers[2].weight = self.layers[0].weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            self.layers[1](x)  # unused
            out: Tensor = self.layers[2](x)
            return out

    journal, net = Journal(), Tied()
    with annotated(journal, net):
        with annotate(Phase.FORWARD):
            out = net(torch.ones(2, 4))
        with annotate(Phase.BACKWARD):
            out.sum().backward()
    backward = journal.events[journal.events.index(Phase.BACKWARD) :]
    assert backward == ["backward", "block 2", "/block 2", "block 0", "/block 0", "/backward"]


def test_backward_ranges_open_in_the_thread_that_runs_it() -> None:
    """On CUDA, autograd runs backward in its own thread; on a CPU, in the calling thread: here, another one."""
    journal, net = Journal(), model()
    ranges = BackwardRanges(journal)
    hooks = annotate_model(net, ranges)
    ranges.push(Phase.FORWARD)
    loss = net(TOKENS).sum()
    ranges.pop()
    hooks.remove()
    ranges.push(Phase.BACKWARD)
    ranges._attach([loss.grad_fn])
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert journal.here() == (Phase.BACKWARD,)  # nothing was opened here
    ranges.pop()
    assert journal.all_closed
    assert journal.events.count("block 1") == 2
    assert set(journal.open) == {threading.get_ident(), thread.ident}


class Fails(torch.autograd.Function):
    """Identity with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("no gradient")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_raising_backward_closes_ranges_in_their_thread(device: str) -> None:
    journal, net, tokens = Journal(), model().to(device), TOKENS.to(device)
    failing = net.layers[1].register_forward_hook(lambda _, __, output: Fails.apply(output))

    def step() -> None:
        with annotate(Phase.FORWARD):
            logits = net(tokens)
        with annotate(Phase.BACKWARD):
            logits.sum().backward()

    with annotated(journal, net):
        with pytest.raises(ArithmeticError, match="no gradient"):
            step()
        assert "block 2" in journal.events[journal.events.index("backward") :]
        assert journal.all_closed
        failing.remove()
        before = len(journal.events)
        step()
    assert journal.all_closed
    assert [e for e in journal.events[before:] if e == "block 1"] == ["block 1"] * 2


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_listener_does_not_recompile_the_model(compiled: bool) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    net = model()
    run = torch.compile(net, backend="aot_eager") if compiled else net
    train_step(run)
    before = counters["stats"]["unique_graphs"]
    journal = Journal()
    with annotated(journal, None if compiled else net):
        train_step(run)
    assert counters["stats"]["unique_graphs"] == before
    assert journal.all_closed
    phases = [e for e in journal.events if e in [p.value for p in Phase]]
    assert phases == ["forward", "loss", "backward", "loss"]
    assert ("block 0" in journal.events) is not compiled


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("attention", ["naive", "sdpa_math"])
def test_kineto_trace_has_each_backward_operator_in_its_block(attention: str, bf16: bool, tmp_path: Path) -> None:
    """Two routes lead to a backward operator's block.

    The ranges open on its thread and the forward operator with its sequence number agree on over 98% of the operators,
    and the ranges cover as many.
    """
    net = model(attention)
    train_step(net, bf16)
    with torch.profiler.profile() as profiler, annotated(RecordFunctionRanges(), net):
        train_step(net, bf16)
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    (backward,) = (r for r in ranges if r["name"] == "backward")

    total = covered = checked = agreed = 0
    forward_ops = {e["args"]["Sequence number"]: e for e in sorted(ops, key=start) if is_forward(e)}
    for op in (e for e in ops if holds(backward, e) and e["args"].get("Fwd thread id")):
        mine = layer(ranges, op)
        total += 1
        covered += mine is not None
        made = forward_ops.get(op["args"]["Sequence number"])
        if made is not None:
            checked += 1
            agreed += mine == layer(ranges, made)
    assert covered > 0.98 * total > 0
    assert checked > 0.9 * total
    assert agreed > 0.98 * checked
    wrong = sum(
        1
        for op in ops
        if holds(backward, op)
        and op["args"].get("Fwd thread id")
        and op["args"]["Sequence number"] in forward_ops
        and layer(ranges, forward_ops[op["args"]["Sequence number"]]) != "block 1"
    )
    assert wrong > 0.5 * checked  # if every operator were in block 1, the routes would disagree


def start(event: Event) -> float:
    return float(event["ts"])


def is_forward(op: Event) -> bool:
    return "Sequence number" in op["args"] and not op["args"].get("Fwd thread id")


def holds(outer: Event, inner: Event) -> bool:
    end = inner["ts"] + inner["dur"]
    return bool(outer["tid"] == inner["tid"] and outer["ts"] <= inner["ts"] and end <= outer["ts"] + outer["dur"])


def layer(ranges: list[Event], op: Event) -> str | None:
    """Return the layer or named module with the range that contains the operator, on the operator's thread."""
    from cs_systems.core.range_names import meaning

    found = [meaning(r["name"]).layer for r in sorted(ranges, key=start) if holds(r, op)]
    return next((name for name in reversed(found) if name), None)
