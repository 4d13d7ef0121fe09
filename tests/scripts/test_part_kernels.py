"""Benchmark of the parts' kernels: every implementation is compared with float64 before it is measured.

The functions of other libraries are compared on a GPU, or on a CPU where they run there; what is not installed is
skipped. Functions that torch.compile makes run eagerly here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs_systems.config import ModelConfig, preset
from cs_systems.machine.device import resolve

MODEL = replace(preset("tiny"), d_model=64, d_ff=128, num_heads=4, context_length=16, vocab_size=112)
IN_TRITON = ("swiglu", "swiglu, joined", "norm", "addition and norm", "rotation", "feed-forward", "embedding")
CASES = (*IN_TRITON, "linear in fp8", "linear and loss")
ON_CPU = ("torchao", "torchao rowwise")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
    return importlib.import_module("part_kernels")


def checked(script: Any, name: str, make: Callable[[ModelConfig], Any], device: str) -> None:
    """Raise WrongResult unless a function of a case is right."""
    where = resolve(device)
    check = script.Check(script.CASES[name], MODEL, where)
    with where.torch:
        function = make(MODEL)
    check(function)


def test_every_case_is_tested_and_every_peer_has_known_cases(script: Any) -> None:
    assert {*CASES} == {*script.CASES}
    assert {name for peer in script.PEERS.values() for name in peer.functions} <= {*CASES}


@pytest.mark.parametrize("name", CASES)
@DEVICES
def test_plain_function_in_bfloat16_passes(name: str, device: str, script: Any) -> None:
    checked(script, name, script.CASES[name].plain, device)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in CASES),
        *((name, "cpu") for name in CASES if name not in IN_TRITON),
    ],
)
def test_our_function_passes(name: str, device: str, script: Any) -> None:
    checked(script, name, script.CASES[name].ours, device)


PAIRS = {
    "liger": ("swiglu", "norm", "addition and norm", "embedding", "linear and loss"),
    "quack": ("norm", "addition and norm", "rotation", "feed-forward", "linear and loss"),
    "torchao": ("linear in fp8",),
    "torchao rowwise": ("linear in fp8",),
}


@pytest.mark.peers
@pytest.mark.parametrize(("peer", "name"), [(peer, name) for peer, names in PAIRS.items() for name in names])
@DEVICES
@pytest.mark.timeout(400)  # quack tries many configurations of a product
@pytest.mark.filterwarnings("ignore")  # the libraries' own, when they are imported
def test_installed_peer_passes(peer: str, name: str, device: str, script: Any) -> None:
    library = script.PEERS[peer]
    assert {*library.functions} == {*PAIRS[peer]}
    if library.version() is None:
        pytest.skip(f"{library.package} is not installed: pip install {library.package}")
    if device == "cpu" and peer not in ON_CPU:
        pytest.skip(f"{peer} has no kernels for a CPU")
    checked(script, name, library.functions[name], device)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factor", [1.3, float("nan")])
def test_wrong_gradient_is_found_though_the_outputs_are_right(name: str, factor: float, script: Any) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return factor * gradients[0]

    def make(model: ModelConfig) -> Any:
        plain = script.CASES[name].plain(model)
        return lambda x, *rest: plain(Scaled.apply(x), *rest)

    with pytest.raises(script.WrongResult, match=r"gradient 1 is off by (0\.3|nan) of its norm, the tolerance is 0\."):
        checked(script, name, make, "cpu")


def measured(script: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(script, "SAMPLE_BYTES", 1)
    rows: list[dict[str, Any]] = script.rows_of(name, MODEL, resolve("cpu"))
    return rows


def test_wrong_peer_is_reported_and_not_measured(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = {"linear and loss": lambda model: lambda hidden, weight: 2 * (hidden @ weight.t()).float().mean()}
    peers = {"other": script.PEERS["liger"].__class__("Other", "torch", doubled)}  # an installed package
    monkeypatch.setattr(script, "PEERS", peers)
    rows = measured(script, "linear and loss", monkeypatch)
    assert [(r["implementation"], r.get("pass")) for r in rows] == [
        ("other", None), ("ours", "both"), ("compiled", "both"),
    ]  # fmt: skip
    assert rows[0]["reason"].startswith("WrongResult: output 1 is off by")
    text = script.page(rows, "a CPU", {"torch": "1.2"})
    assert "other, linear and loss, tiny: WrongResult: output 1 is off by" in text
    assert "a CPU, torch 1.2, bf16" in text
    assert "Beside the compiled plain modules our kernels are" in text
    assert "times as fast in both together." in text


def test_peer_that_is_not_installed_is_a_note(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = script.PEERS["quack"].__class__("quack", "no-such-package", script.PEERS["quack"].functions)
    monkeypatch.setattr(script, "PEERS", {"quack": absent})
    rows = measured(script, "linear and loss", monkeypatch)
    assert {r["implementation"] for r in rows} == {"ours", "compiled"}
    text = script.page(rows, "a CPU", {absent.package: absent.version()})
    assert "no-such-package is not installed: pip install no-such-package" in text


def test_product_has_flops_and_other_functions_have_bytes(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(script, "linear in fp8", monkeypatch)
    tokens = 4 * MODEL.context_length
    forward = 2 * tokens * MODEL.d_model * MODEL.d_ff
    assert {r["pass"]: r["flops"] for r in rows} == {"forward": forward, "backward": 2 * forward}
    assert all(r["flops_per_s"] == pytest.approx(r["flops"] / r["median_s"]) for r in rows)
    width = 2 * MODEL.d_model  # bytes of a row
    assert script.CASES["norm"].work(MODEL) == (
        "bytes",
        {"forward": 2 * tokens * width, "backward": 4 * tokens * width},
    )
    embedding = {"forward": 2 * tokens * width, "backward": (tokens + MODEL.vocab_size) * width}
    assert script.CASES["embedding"].work(MODEL) == ("bytes", embedding)


@pytest.mark.slow
@pytest.mark.timeout(120)  # torch.compile
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_function_is_compared_and_then_called_again_and_again(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled backward may reuse the graph's buffers, and then cannot run twice."""
    monkeypatch.setattr(script, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(script, "implementations", lambda name, model: [("compiled", lambda: compiled(name, model))])

    def compiled(name: str, model: ModelConfig) -> Any:
        return torch.compile(script.CASES[name].plain(model), dynamic=False)

    with torch.compiler.set_stance("default"):
        rows = script.rows_of("norm", MODEL, resolve("cpu"))
    assert [(row["pass"], row.get("reason")) for row in rows] == [("forward", None), ("backward", None)]
