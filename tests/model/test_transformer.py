"""Model: parameter names, shapes, and logits compared with an independent implementation in einx."""

from __future__ import annotations

import einx
import pytest
import torch
from torch import Tensor

from cs_systems.config import PRESETS, ConfigError, preset
from cs_systems.formulas.cost import parameter_count
from cs_systems.model.transformer import BasicTransformerLM, RMSNorm

TINY = PRESETS["tiny"]


@pytest.fixture(scope="module")
def model() -> BasicTransformerLM:
    torch.manual_seed(0)
    return BasicTransformerLM(TINY)


def test_parameters_have_the_specified_names(model: BasicTransformerLM) -> None:
    expected = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    for i in range(TINY.num_layers):
        block = {"ln1", "ln2", "ffn.w1", "ffn.w2", "ffn.w3"}
        block |= {f"attn.{name}_proj" for name in ("q", "k", "v", "output")}
        expected |= {f"layers.{i}.{name}.weight" for name in block}
    assert set(model.state_dict()) == expected
    assert model.lm_head.weight is not model.token_embeddings.weight


@pytest.mark.parametrize("size", ["tiny", "small", "xl", "8B"])
def test_parameter_count_matches_the_cost_model(size: str) -> None:
    with torch.device("meta"):
        model = BasicTransformerLM(PRESETS[size])
    assert sum(p.numel() for p in model.parameters()) == parameter_count(PRESETS[size])


def reference(model: BasicTransformerLM, tokens: Tensor) -> Tensor:
    """Compute the model in float64, written from the papers with named axes."""
    w = {name: p.double() for name, p in model.named_parameters()}
    c = model.config
    length = tokens.shape[1]

    def norm(x: Tensor, g: Tensor) -> Tensor:
        return x / torch.sqrt(einx.mean("b s ([d])", x**2) + 1e-5) * g

    def project(x: Tensor, name: str) -> Tensor:
        return einx.dot("b s [i], o [i] -> b s o", x, w[name])

    def rotate(x: Tensor) -> Tensor:  # one complex number for each adjacent pair
        k = x.shape[-1]
        frequency = c.rope_theta ** (-torch.arange(0, k, 2, dtype=torch.float64) / k)
        angle = einx.multiply("s, i -> s i", torch.arange(length, dtype=torch.float64), frequency)
        pairs = torch.view_as_complex(einx.id("b h s (i two) -> b h s i two", x, two=2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    x = w["token_embeddings.weight"][tokens]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for i in range(c.num_layers):
        h = norm(x, w[f"layers.{i}.ln1.weight"])
        q, k, v = (
            einx.id("b s (h k) -> b h s k", project(h, f"layers.{i}.attn.{n}_proj.weight"), h=c.num_heads)
            for n in "qkv"
        )
        scores = einx.dot("b h q [k], b h s [k] -> b h q s", rotate(q), rotate(k)) / c.d_head**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = einx.id("b h s k -> b s (h k)", einx.dot("b h q [s], b h [s] k -> b h q k", weights, v))
        x = x + project(out, f"layers.{i}.attn.output_proj.weight")
        h = norm(x, w[f"layers.{i}.ln2.weight"])
        gate = project(h, f"layers.{i}.ffn.w1.weight")
        x = x + project(gate * gate.sigmoid() * project(h, f"layers.{i}.ffn.w3.weight"), f"layers.{i}.ffn.w2.weight")
    return project(norm(x, w["ln_final.weight"]), "lm_head.weight")


def test_logits_match_a_float64_reference(model: BasicTransformerLM) -> None:
    tokens = torch.randint(TINY.vocab_size, (2, 37))
    logits = model(tokens)
    assert logits.shape == (2, 37, TINY.vocab_size)
    torch.testing.assert_close(logits.double(), reference(model, tokens), rtol=1e-4, atol=1e-4)


def test_logits_do_not_depend_on_later_tokens(model: BasicTransformerLM) -> None:
    tokens = torch.randint(TINY.vocab_size, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % TINY.vocab_size
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:])


def test_attention_can_be_any_function() -> None:
    seen = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        seen.append((q.shape, causal))
        return v

    BasicTransformerLM(TINY, attention)(torch.zeros(3, 8, dtype=torch.int64))
    assert seen == [((3, TINY.num_heads, 8, TINY.d_head), True)] * TINY.num_layers


def test_sequence_longer_than_the_context_is_refused(model: BasicTransformerLM) -> None:
    with pytest.raises(ConfigError, match="length 65 exceeds the model's context length 64; use a shorter sequence"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'naiv'; did you mean naive"):
        BasicTransformerLM(TINY, "naiv")


def test_initialisation_is_a_truncated_normal() -> None:
    torch.manual_seed(1)
    with torch.device("cpu"):
        model = BasicTransformerLM(preset("tiny", num_layers=1, d_ff=512))
    weight = model.layers[0].ffn.w1.weight  # type: ignore[union-attr]
    std = (2 / sum(weight.shape)) ** 0.5
    assert weight.abs().max() <= 3 * std
    assert abs(float(weight.detach().std()) / std - 1) < 0.05


def test_rmsnorm_of_float64_is_computed_in_float64() -> None:
    norm = RMSNorm(16).double()
    x = torch.randn(4, 16, dtype=torch.float64)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), exact, rtol=1e-12, atol=1e-12)
