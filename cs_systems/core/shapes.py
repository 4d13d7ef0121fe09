"""Shapes: the model of a training step, and one attention call."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Annotated, Any

from cs_systems.core.fields import Field, check_values
from cs_systems.core.validation import ConfigError, arguments_checked, fields_checked, one_of

MOST_LAYERS = 10_000  # a checkpoint plan lists each layer
MOST_TRIED = 1 << 16  # largest number searched for divisors, which bounds the time
ALIGNMENTS = ("upper_left", "lower_right")


def causal_offset(seq_q: int, seq_k: int, align: str) -> int:
    """Return how many keys beyond its own index a causal query sees; if negative, that many queries see no key.

    Raises ConfigError for an unknown alignment, which would otherwise be taken for `upper_left`.
    """
    one_of("alignment", align, ALIGNMENTS)
    return seq_k - seq_q if align == "lower_right" else 0


@fields_checked
@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a BasicTransformerLM; `context_length` is its longest sequence, in tokens."""

    name: Annotated[
        str, Field("name of the sizes", option="--size", takes="many", column=False, spoken=True, short="name")
    ] = "custom"
    d_model: Annotated[int, Field("width of the model", takes="one", heading="d_model", short="d", least=1)] = 768
    d_ff: Annotated[
        int, Field("width of the feed-forward layers", takes="one", heading="d_ff", short="ff", least=1)
    ] = 3072
    num_layers: Annotated[int, Field("number of blocks", takes="one", heading="layers", short="L", least=1)] = 12
    num_heads: Annotated[int, Field("attention heads per block", takes="one", short="h", least=1)] = 12
    vocab_size: Annotated[int, Field("tokens in the vocabulary", takes="one", short="V", least=1)] = 10_000
    context_length: Annotated[int, Field("tokens per sequence", takes="many", heading="ctx", spoken=True, least=1)] = (
        512
    )
    rope_theta: Annotated[float, Field("base of the rotary embedding", takes="one", short="θ", above=0)] = 10_000.0

    def __post_init__(self) -> None:
        check_values(self)
        if self.num_layers > MOST_LAYERS:
            raise ConfigError(f"num_layers is {self.num_layers}; it must be at most {MOST_LAYERS:,}", "num_layers")
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}{self._origin()}; "
                f"choose {self._fitting()}",
                "d_model",
                "num_heads",
            )
        if self.d_head % 2:
            raise ConfigError(
                f"d_model {self.d_model} divided by num_heads {self.num_heads}{self._origin()} gives {self.d_head}, "
                f"but rotary embeddings need an even number; choose {self._fitting()}",
                "d_model",
                "num_heads",
            )

    def _fitting(self) -> str:
        """Return sizes that would fit, for a message: the nearest numbers of heads, else a width."""
        heads = sorted(_divisors(self.d_model // 2, self.num_heads)[:3]) if self.d_model % 2 == 0 else []
        width = f"a d_model that is a multiple of {2 * self.num_heads}"
        return f"num_heads among {', '.join(map(str, heads))}" if heads else width

    def _origin(self) -> str:
        """Return where num_heads may come from, because it may not be among the given options."""
        preset = PRESETS.get(self.name)
        if self.num_heads != (preset or ModelConfig).num_heads:
            return ""
        return " of the preset" if preset else " (the default)"

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    @property
    def label(self) -> str:
        """Name of the preset with the changed fields, without the context length: `large+num_layers=32`."""
        return "+".join([self.name, *(f"{name}={value}" for name, value in self.changed().items())])

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the preset of the same name, except the context length."""
        preset = PRESETS.get(self.name, self)
        names = (f.name for f in dataclasses.fields(self) if f.name not in ("name", "context_length"))
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(preset, name)}


def _preset(name: str, d_model: int, d_ff: int, num_layers: int, num_heads: int, **rest: int) -> ModelConfig:
    return ModelConfig(name, d_model, d_ff, num_layers, num_heads, **rest)


PRESETS: dict[str, ModelConfig] = {
    preset.name: preset
    for preset in (
        _preset("tiny", 64, 128, 2, 4, vocab_size=256, context_length=64),
        _preset("small", 768, 3072, 12, 12),
        _preset("medium", 1024, 4096, 24, 16),
        _preset("large", 1280, 5120, 36, 20),
        _preset("xl", 1600, 6400, 48, 25),
        _preset("xl-2025", 1600, 6400, 48, 25),
        _preset("2.7B", 2560, 10240, 32, 32),
        _preset("xl-2026", 2560, 10240, 32, 32),
        _preset("10B", 4608, 12288, 50, 36),
        _preset("8B", 4096, 11008, 34, 32, vocab_size=151_936, context_length=32_768),
    )
}
# The public course that introduced these names changed the shape of `xl` in 2026. A plain `xl` keeps the first shape,
# because records and tables of earlier versions say `xl` for it.
EDITIONS = {"xl": ("xl-2025", "xl-2026")}  # a name with two shapes: the edition that it means, and the other


def edition(name: str) -> str | None:
    """Return which shape a size name means, and the name of the other, if it has two shapes; None for other names."""
    if name not in EDITIONS:
        return None
    taken, other = EDITIONS[name]
    return f"size {name} means {taken} ({_numbers(taken)}); the later shape of that name is {other} ({_numbers(other)})"


def _numbers(name: str) -> str:
    """Return the shape of a preset as text."""
    size = PRESETS[name]
    return f"d_model {size.d_model}, d_ff {size.d_ff}, {size.num_layers} layers, {size.num_heads} heads"


@arguments_checked
def preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the preset `name` with fields replaced: `preset("large", num_layers=32)`.

    `xl` is `xl-2025`, the shape in the course's handout of 2025; `xl-2026` is the shape of 2026.
    """
    one_of("size", name, PRESETS)
    return replace(PRESETS[name], **overrides)


def _divisors(number: int, near: int) -> list[int]:
    """Return the divisors of a number, nearest to `near` first."""
    found = [n for n in range(1, min(number, MOST_TRIED) + 1) if number % n == 0]
    return sorted(found, key=lambda n: abs(n - near))


@dataclass(frozen=True)
class AttentionCall:
    """Description of an attention call before it is made. `dtype` is torch's name without the prefix: "bfloat16"."""

    device: str  # "cpu" or "cuda"
    dtype: str
    d_head: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    causal: bool = False
    align: str = "upper_left"
    needs_backward: bool = True
    window: int | None = None


@fields_checked
@dataclass(frozen=True)
class AttentionShape:
    """Shape of one attention call.

    Shape:
        q: (batch, heads, seq, d_head).
        k, v: (batch, heads_kv, seq_k, d_head).

    window: a causal query sees only the last `window` keys up to its own (Beltagy et al. 2020, section 3.1); None: all.
    """

    batch: Annotated[
        int, Field("sequences per call", aliases=("--batch-size",), takes="many", spoken=True, axis=2, least=1)
    ] = 8
    heads: Annotated[int, Field("query heads", takes="many", spoken=True, axis=3, least=1)] = 16
    seq: Annotated[
        int, Field("queries per sequence", aliases=("--context-length",), takes="many", spoken=True, axis=1, least=1)
    ] = 1024
    d_head: Annotated[
        int, Field("dimension of one head", takes="many", heading="d_head", spoken=True, axis=4, least=1)
    ] = 64
    causal: Annotated[
        bool, Field("causal mask", takes="one", words=lambda value: "causal" if value else "", spoken=True)
    ] = False
    heads_kv: Annotated[
        int | None,
        Field(
            "key and value heads", takes="many", usual="as many as --heads", like="heads", words="heads_kv {}", least=1
        ),
    ] = None
    seq_k: Annotated[
        int | None,
        Field("keys per sequence", takes="many", usual="as many as queries", like="seq", words="seq_k {}", least=1),
    ] = None
    align: Annotated[
        str,
        Field(
            "corner of the causal mask if --seq and --seq-k differ: upper_left, lower_right",
            takes="one",
            values=ALIGNMENTS,
            called="alignment",
        ),
    ] = "upper_left"
    window: Annotated[
        int | None,
        Field("keys that a causal query sees, up to its own", takes="many", usual="all", words="window {}", least=1),
    ] = None

    def __post_init__(self) -> None:
        check_values(self)
        if self.window is not None and not self.causal:
            raise ConfigError(
                f"window is {self.window}, but causal is False; set causal=True, or leave out window", "window"
            )
        if self.heads % self.kv_heads:
            fitting = sorted(_divisors(self.heads, self.kv_heads)[:8])
            raise ConfigError(
                f"heads {self.heads} is not a multiple of heads_kv {self.heads_kv}; "
                f"choose heads_kv among {', '.join(map(str, fitting))}",
                "heads",
                "heads_kv",
            )

    @property
    def kv_heads(self) -> int:
        return self.heads if self.heads_kv is None else self.heads_kv

    @property
    def key_length(self) -> int:
        return self.seq if self.seq_k is None else self.seq_k

    @property
    def offset(self) -> int | None:
        """Number of keys after its own index that a query sees: query i sees the keys up to i + offset.

        None means all.
        """
        return causal_offset(self.seq, self.key_length, self.align) if self.causal else None
