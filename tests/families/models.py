"""Small models of many families, each with a batch of its natural form, from configurations with random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, BATCH = 64, 8, 2
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


Made = tuple[nn.Module, Callable[[], Any], Callable[[Any], Tensor]]  # model, forward, loss of its output


@dataclass(frozen=True)
class Family:
    """One family: how to build it, and what its structure is.

    make: returns the model, a function that runs forward, and a function from its output to the loss.
    stacks: path of each list of blocks → number of blocks.
    parts: path → its part, for some paths.
    needs: the package that it needs besides torch.
    """

    make: Callable[[], Made]
    stacks: Mapping[str, int]
    parts: Mapping[str, str | None] = field(default_factory=dict)
    needs: str | None = "transformers"

    @property
    def is_missing(self) -> bool:
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


def _tokens() -> Tensor:
    return torch.randint(3, WORDS, (BATCH, LENGTH))


def _with_labels(model: nn.Module, **inputs: Any) -> Made:
    return model, lambda: model(**inputs), lambda output: output.loss


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **SIZES))
    tokens = _tokens()
    return _with_labels(model, input_ids=tokens, labels=tokens)


def lora() -> Made:
    from peft import LoraConfig, get_peft_model

    model, *_ = llama()
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))  # type: ignore[arg-type]
    tokens = _tokens()
    return _with_labels(model, input_ids=tokens, labels=tokens)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    tokens = _tokens()
    return _with_labels(GPT2LMHeadModel(config), input_ids=tokens, labels=tokens)


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    tokens = _tokens()
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **SIZES))
    return _with_labels(model, input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    tokens = _tokens()
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return _with_labels(T5ForConditionalGeneration(config), input_ids=tokens, labels=tokens)


def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    tokens = _tokens()
    config = MixtralConfig(vocab_size=WORDS, num_key_value_heads=2, num_local_experts=2, **SIZES)
    return _with_labels(MixtralForCausalLM(config), input_ids=tokens, labels=tokens)


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **SIZES))
    return _with_labels(model, pixel_values=torch.randn(BATCH, 3, 16, 16), labels=torch.tensor([0, 1]))


def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": WORDS, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, **SIZES}
    vision = {"image_size": 16, "patch_size": 8, **SIZES}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    return _with_labels(model, input_ids=_tokens(), pixel_values=torch.randn(BATCH, 3, 16, 16), return_loss=True)


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
              (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    config = WhisperConfig(
        vocab_size=WORDS, d_model=16, num_mel_bins=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, max_source_positions=8, max_target_positions=16, **layers,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    return _with_labels(model, input_features=torch.randn(BATCH, 4, 16), labels=_tokens())


def mamba() -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    tokens = _tokens()
    model = MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4))
    return _with_labels(model, input_ids=tokens, labels=tokens)


class Residual(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.downsample(x))  # the same module twice, in place


class ResNet(nn.Module):
    """Stages of residual blocks, then a linear classifier."""

    def __init__(self, width: int = 4, blocks: tuple[int, ...] = (2, 1), classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        for number, count in enumerate(blocks, 1):
            inputs, outputs = width * 2 ** max(number - 2, 0), width * 2 ** (number - 1)
            made = [Residual(inputs if n == 0 else outputs, outputs, 1 + (n == 0 < number - 1)) for n in range(count)]
            setattr(self, f"layer{number}", nn.Sequential(*made))
        self.stages = len(blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(outputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def resnet() -> Made:
    model, images = ResNet(), torch.randn(BATCH, 3, 8, 8)
    return model, lambda: model(images), lambda output: nn.functional.cross_entropy(output, torch.tensor([0, 1]))


class Down(nn.Module):
    """Two convolutions and a smaller image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = self.norm(self.conv(x)).relu()
        return {"kept": kept, "smaller": self.pool(kept)}


class Up(nn.Module):
    """Larger image, and two convolutions together with what was kept."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.conv = nn.Conv2d(2 * outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor, *, kept: Tensor) -> Tensor:
        return self.conv(torch.cat([self.up(x), kept], 1)).relu()


class UNet(nn.Module):
    """Numbered siblings down and up, dicts between them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = Down(3, width), Down(width, 2 * width)
        self.middle = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.up1, self.up2 = Up(4 * width, 2 * width), Up(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(first["smaller"])
        x = self.up1(self.middle(second["smaller"]), kept=second["kept"])
        out: Tensor = self.head(self.up2(x, kept=first["kept"]))
        return out


def unet() -> Made:
    model, images = UNet(), torch.randn(BATCH, 3, 8, 8)
    return model, lambda: model(images), lambda output: nn.functional.mse_loss(output, images)


class Tagger(nn.Module):
    """LSTM between an embedding and a classifier."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.classifier = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        out: Tensor = self.classifier(hidden)
        return out


def lstm() -> Made:
    model, tokens = Tagger(), _tokens()
    return model, lambda: model(tokens), lambda out: nn.functional.cross_entropy(out.transpose(1, 2), tokens)


class Gan(nn.Module):
    """Generator and discriminator; the output is the loss of the discriminator and that of the generator."""

    def __init__(self, width: int = 4, pixels: int = 8) -> None:
        super().__init__()
        side = pixels // 4
        self.generator = nn.Sequential(
            nn.Linear(width, 4 * width * side**2), nn.Unflatten(1, (4 * width, side, side)),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(4 * width * side**2, 1),
        )  # fmt: skip

    def forward(self, noise: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(noise)
        softplus = nn.functional.softplus
        real, known = self.discriminator(images), self.discriminator(made.detach())
        return (softplus(-real) + softplus(known)).mean(), softplus(-self.discriminator(made)).mean()


def gan() -> Made:
    model, noise, images = Gan(), torch.randn(BATCH, 4), torch.randn(BATCH, 3, 8, 8)
    return model, lambda: model(noise, images), sum


_LLAMA = "model.layers.1"
FAMILIES = {
    "llama": Family(
        llama,
        {"model.layers": 2},
        {
            "model.embed_tokens": "embedding", f"{_LLAMA}.self_attn": "attention",
            f"{_LLAMA}.self_attn.q_proj": "attention.projections", f"{_LLAMA}.self_attn.o_proj": "attention.output",
            f"{_LLAMA}.mlp": "ffn", f"{_LLAMA}.mlp.down_proj": "ffn", f"{_LLAMA}.input_layernorm": "norm",
            "model.norm": "norm", "lm_head": "head", "model": None, _LLAMA: None,
        },
    ),
    "lora": Family(
        lora,
        {"base_model.model.model.layers": 2},
        {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default": "attention.projections",
            "base_model.model.model.layers.0.self_attn.o_proj": "attention.output",
            "base_model.model.lm_head": "head",
        },
        needs="peft",
    ),
    "gpt2": Family(
        gpt2,
        {"transformer.h": 2},
        {
            "transformer.h.0.attn.c_attn": "attention.projections", "transformer.h.0.attn.c_proj": "attention.output",
            "transformer.h.0.mlp.c_fc": "ffn", "transformer.h.0.ln_1": "norm", "transformer.wpe": "embedding",
        },
    ),
    "bert": Family(
        bert,
        {"bert.encoder.layer": 2},
        {
            "bert.encoder.layer.1.output.dense": "ffn", "bert.encoder.layer.1.intermediate.dense": "ffn",
            "bert.encoder.layer.1.attention.self.query": "attention.projections",
            "bert.encoder.layer.1.attention.output.dense": "attention.output",
            "bert.embeddings.word_embeddings": "embedding", "cls.predictions.decoder": "head",
        },
    ),
    "t5": Family(
        t5,
        {"encoder.block": 2, "decoder.block": 2},
        {
            "decoder.block.0.layer.1.EncDecAttention.k": "attention.projections",
            "decoder.block.0.layer.2.DenseReluDense.wo": "ffn", "encoder.block.0.layer.0.SelfAttention.o":
            "attention.output", "shared": "embedding",
        },
    ),
    "mixtral": Family(
        mixtral,
        {"model.layers": 2},
        {"model.layers.0.mlp.gate": "ffn", "model.layers.0.mlp.experts": "ffn"},
    ),
    "vit": Family(
        vit,
        {"vit.layers": 2},
        {"vit.embeddings.patch_embeddings.projection": "embedding", "vit.layers.0.mlp.fc1": "ffn"},
    ),
    "clip": Family(
        clip,
        {"text_model.encoder.layers": 2, "vision_model.encoder.layers": 2},
        {"visual_projection": "head", "vision_model.encoder.layers.0.self_attn.out_proj": "attention.output"},
    ),
    "whisper": Family(
        whisper,
        {"model.encoder.layers": 2, "model.decoder.layers": 2},
        {
            "model.encoder.conv1": "convolution", "model.encoder.layers.0.fc1": "ffn",
            "model.decoder.layers.0.encoder_attn.v_proj": "attention.projections", "proj_out": "head",
        },
    ),
    "mamba": Family(
        mamba,
        {"backbone.layers": 2},
        {"backbone.layers.0.mixer.conv1d": "mixer", "backbone.layers.0.norm": "norm"},
    ),
    "resnet": Family(
        resnet,
        {"layer1": 2, "layer2": 1},
        {"layer1.0.conv1": "convolution", "layer2.0.bn1": "norm", "fc": "head", "avgpool": "pooling"},
        needs=None,
    ),
    "unet": Family(
        unet,
        {"down": 2, "up": 2},
        {"down1.conv": "convolution", "down2.norm": "norm", "up1.up": "convolution", "head": "head"},
        needs=None,
    ),
    "lstm": Family(
        lstm,
        {},
        {"lstm": "recurrent", "embedding": "embedding", "classifier": "head"},
        needs=None,
    ),
    "gan": Family(
        gan,
        {},
        {"generator.2": "convolution", "generator.3": "norm", "discriminator.0": "convolution"},
        needs=None,
    ),
}  # fmt: skip
