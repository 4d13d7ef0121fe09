"""Models of families with memory predicted before it was measured; every size is given explicitly.

Each is a factory (config, device) that returns a model with random weights, and its batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs_systems.config import RunConfig
from cs_systems.machine.device import Device

WORDS, LENGTH = 16000, 1024
# Sizes of most decoders, by the names that their configurations share.
SIZES = {
    "vocab_size": WORDS, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "max_position_embeddings": LENGTH,
}  # fmt: skip
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _language(model: nn.Module, config: RunConfig, length: int = LENGTH) -> Any:
    ids = torch.randint(3, WORDS, (config.batch_size, length))
    return model, {"input_ids": ids, "labels": ids}


def gemma(config: RunConfig, device: Device) -> Any:
    from transformers import GemmaConfig, GemmaForCausalLM

    return _language(GemmaForCausalLM(GemmaConfig(num_key_value_heads=1, head_dim=64, **_ENDS, **SIZES)), config)


def gemma3(config: RunConfig, device: Device) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"] * 3
    made = Gemma3TextConfig(
        num_key_value_heads=4, head_dim=64, sliding_window=256, layer_types=layers, query_pre_attn_scalar=64,
        attention_dropout=0.0, **_ENDS, **SIZES,
    )  # fmt: skip
    return _language(Gemma3ForCausalLM(made), config)


def qwen3_moe(config: RunConfig, device: Device) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = Qwen3MoeConfig(
        num_key_value_heads=3, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, output_router_logits=False,
        tie_word_embeddings=False, **_ENDS, **SIZES,
    )  # fmt: skip
    return _language(Qwen3MoeForCausalLM(made), config)


def deepseek_v3(config: RunConfig, device: Device) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    made = DeepseekV3Config(
        num_key_value_heads=12, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1,
        moe_intermediate_size=512, first_k_dense_replace=1, **_ENDS, **SIZES,
    )  # fmt: skip
    return _language(DeepseekV3ForCausalLM(made), config)


def opt(config: RunConfig, device: Device) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    made = OPTConfig(
        vocab_size=WORDS, hidden_size=768, word_embed_proj_dim=768, ffn_dim=3072, num_hidden_layers=6,
        num_attention_heads=12, max_position_embeddings=LENGTH, dropout=0.1, attention_dropout=0.1, layerdrop=0.0,
        **_ENDS,
    )  # fmt: skip
    return _language(OPTForCausalLM(made), config)


def falcon(config: RunConfig, device: Device) -> Any:
    from transformers import FalconConfig, FalconForCausalLM

    made = FalconConfig(
        vocab_size=WORDS, hidden_size=768, num_hidden_layers=6, num_attention_heads=12, multi_query=True,
        new_decoder_architecture=False, parallel_attn=True, bias=False, alibi=False, hidden_dropout=0.0,
        attention_dropout=0.0, ffn_hidden_size=3072, max_position_embeddings=LENGTH, **_ENDS,
    )  # fmt: skip
    return _language(FalconForCausalLM(made), config)


def gpt_bigcode(config: RunConfig, device: Device) -> Any:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    made = GPTBigCodeConfig(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=768, n_layer=6, n_head=12, n_inner=3072, multi_query=True,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, **_ENDS,
    )  # fmt: skip
    return _language(GPTBigCodeForCausalLM(made), config)


def bloom(config: RunConfig, device: Device) -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    made = BloomConfig(
        vocab_size=WORDS, hidden_size=768, n_layer=6, n_head=12, hidden_dropout=0.0, attention_dropout=0.0, **_ENDS
    )
    return _language(BloomForCausalLM(made), config, LENGTH // 2)


def mpt(config: RunConfig, device: Device) -> Any:
    from transformers import MptConfig, MptForCausalLM

    made = MptConfig(vocab_size=WORDS, d_model=768, n_heads=12, n_layers=6, expansion_ratio=4, max_seq_len=LENGTH)
    return _language(MptForCausalLM(made), config, LENGTH // 2)


def phi(config: RunConfig, device: Device) -> Any:
    from transformers import PhiConfig, PhiForCausalLM

    made = PhiConfig(
        num_key_value_heads=12, partial_rotary_factor=0.5, resid_pdrop=0.1, embd_pdrop=0.0, attention_dropout=0.0,
        qk_layernorm=False, **_ENDS, **SIZES,
    )  # fmt: skip
    return _language(PhiForCausalLM(made), config)


def stablelm(config: RunConfig, device: Device) -> Any:
    from transformers import StableLmConfig, StableLmForCausalLM

    made = StableLmConfig(num_key_value_heads=4, partial_rotary_factor=0.25, attention_dropout=0.0, **_ENDS, **SIZES)
    return _language(StableLmForCausalLM(made), config)


def cohere(config: RunConfig, device: Device) -> Any:
    from transformers import CohereConfig, CohereForCausalLM

    return _language(CohereForCausalLM(CohereConfig(num_key_value_heads=6, **_ENDS, **SIZES)), config)


def granite(config: RunConfig, device: Device) -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    made = GraniteConfig(num_key_value_heads=12, attention_dropout=0.1, **_ENDS, **SIZES)
    return _language(GraniteForCausalLM(made), config)


def olmo2(config: RunConfig, device: Device) -> Any:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return _language(Olmo2ForCausalLM(Olmo2Config(num_key_value_heads=12, **_ENDS, **SIZES)), config)


def mistral(config: RunConfig, device: Device) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    made = MistralConfig(num_key_value_heads=4, head_dim=64, sliding_window=256, **_ENDS, **SIZES)
    return _language(MistralForCausalLM(made), config)


def bart(config: RunConfig, device: Device) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE.items()}
    made = BartConfig(
        vocab_size=WORDS, d_model=768, max_position_embeddings=LENGTH, dropout=0.1, attention_dropout=0.1,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, decoder_start_token_id=1, forced_eos_token_id=1, **sides, **_ENDS,
    )  # fmt: skip
    model, batch = _language(BartForConditionalGeneration(made), config, LENGTH // 2)
    return model, batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


_SIDE = {"layers": 4, "ffn_dim": 3072, "attention_heads": 12}


def whisper(config: RunConfig, device: Device) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _SIDE.items()}
    made = WhisperConfig(
        vocab_size=WORDS, num_mel_bins=80, d_model=768, max_source_positions=1500, max_target_positions=448,
        dropout=0.0, attention_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, apply_spec_augment=False,
        decoder_start_token_id=1, begin_suppress_tokens=None, **sides, **_ENDS,
    )  # fmt: skip
    sound = torch.randn(config.batch_size, 80, 3000)
    return WhisperForConditionalGeneration(made), {
        "input_features": sound,
        "labels": torch.randint(3, WORDS, (config.batch_size, 256)),
    }


def wav2vec2(config: RunConfig, device: Device) -> Any:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    made = Wav2Vec2Config(
        vocab_size=32, hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=12,
        layerdrop=0.0, apply_spec_augment=False, hidden_dropout=0.1, attention_dropout=0.1, final_dropout=0.0,
        activation_dropout=0.1, feat_proj_dropout=0.0, ctc_loss_reduction="mean", **_ENDS,
    )  # fmt: skip
    sound = torch.randn(config.batch_size, 160_000)
    return Wav2Vec2ForCTC(made), {"input_values": sound, "labels": torch.randint(3, 32, (config.batch_size, 100))}


def dinov2(config: RunConfig, device: Device) -> Any:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    made = Dinov2Config(
        hidden_size=768, num_hidden_layers=8, num_attention_heads=12, mlp_ratio=4, image_size=224, patch_size=14,
        num_labels=1000, drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _images(Dinov2ForImageClassification(made), config)


def swin(config: RunConfig, device: Device) -> Any:
    from transformers import SwinConfig, SwinForImageClassification

    made = SwinConfig(
        image_size=224, patch_size=4, embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7,
        mlp_ratio=4.0, num_labels=1000, drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _images(SwinForImageClassification(made), config)


def _images(model: nn.Module, config: RunConfig) -> Any:
    images = torch.randn(4 * config.batch_size, 3, 224, 224)
    return model, {"pixel_values": images, "labels": torch.arange(len(images))}


class _GraphAttention(nn.Module):
    """Layer of graph attention: a softmax over the edges that end in each node, by scatters."""

    def __init__(self, d_in: int, d_out: int, heads: int) -> None:
        super().__init__()
        self.heads, self.d_out = heads, d_out
        self.project = nn.Linear(d_in, heads * d_out, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.randn(heads, d_out)) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        z = self.project(x).view(-1, self.heads, self.d_out)
        scores = (z * self.of_source).sum(-1)[source] + (z * self.of_target).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        nodes = scores.new_full((len(x), self.heads), -torch.inf)
        highest = nodes.scatter_reduce(0, target[:, None].expand_as(scores), scores, "amax")
        weights = (scores - highest[target]).exp()
        weights = weights / torch.zeros_like(highest).index_add(0, target, weights)[target]
        messages = weights[..., None] * z[source]
        return torch.zeros_like(messages[: len(x)]).index_add(0, target, messages).flatten(1)


class _GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_GraphAttention(256, 64, 4) for _ in range(3)])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.elu(layer(x, edges))
        return x


def graph_attention(config: RunConfig, device: Device) -> Any:
    batch = {"x": torch.randn(20_000, 256), "edges": torch.randint(20_000, (2, 200_000))}
    return _GraphNetwork(), batch, lambda y: y.square().mean()


def pyg_gat(config: RunConfig, device: Device) -> Any:
    from torch_geometric.nn import GAT

    batch = {"x": torch.randn(20_000, 256), "edge_index": torch.randint(20_000, (2, 400_000))}
    return GAT(256, 256, 3, heads=4), batch, lambda y: y.square().mean()


class _DiTBlock(nn.Module):
    """Block of a diffusion transformer: a condition scales, shifts and gates attention and the feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(condition)[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.feed_forward(self.norm2(x) * (1 + scale2) + shift2)


class _DiT(nn.Module):
    def __init__(self, width: int = 768, blocks: int = 6) -> None:
        super().__init__()
        self.patches = nn.Linear(16, width)
        self.blocks = nn.ModuleList([_DiTBlock(width, 12) for _ in range(blocks)])
        self.out = nn.Linear(width, 16)

    def forward(self, patches: Tensor, condition: Tensor) -> Tensor:
        x = self.patches(patches)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def dit(config: RunConfig, device: Device) -> Any:
    batch = {"patches": torch.randn(2 * config.batch_size, 1024, 16), "condition": torch.randn(8, 768)}
    return _DiT(), batch, lambda y: y.square().mean()


def encoder(config: RunConfig, device: Device) -> Any:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return model, torch.randn(2 * config.batch_size, 1024, 768), lambda y: y.square().mean()


# Families with a wrong or missing prediction that was corrected before it was frozen.
MENDED = ("gemma", "qwen3_moe", "deepseek_v3", "opt", "wav2vec2", "graph_attention", "pyg_gat")
NEW = (
    "gemma3", "falcon", "gpt_bigcode", "bloom", "mpt", "phi", "stablelm", "cohere", "granite", "olmo2", "mistral",
    "bart", "whisper", "dinov2", "swin", "dit", "encoder",
)  # fmt: skip
