"""What most families share: softmax attention and a SwiGLU by the common keys, and the whole model around its blocks."""

from collections.abc import Sequence
from typing import Any, Literal

from twoaxis.core.errors import ConfigError, problem
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.planner.model.biased import Biased
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.part import OwnPart, Part
from twoaxis.planner.model.shape import ModelShape
from twoaxis.sequence import AttentionConfig

Biases = Literal["none", "qkv", "all"]
SILU = ("silu", "swish")

MOST_LAYERS = 10_000
"""Beyond any model, and few enough to plan."""

NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts")


def n_layers(fields: Fields) -> int:
    """Blocks of the model."""
    return fields.size("num_hidden_layers", most=MOST_LAYERS)


def head_dim(fields: Fields, default: int | None = None) -> int:
    """Channels of one head: as given, or the width divided by the heads."""
    if fields.has("head_dim"):
        return fields.size("head_dim", least=2)
    if default is not None:
        return default
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if width % heads:
        allowed = f"a divisor of hidden_size={width}, or given with a head_dim"
        raise ConfigError(problem("num_attention_heads", heads, allowed, "correct one of them"))
    return width // heads


def attention(
    fields: Fields, width: int, window: int | None = None, biases: Biases = "none", kv_heads: int | None = None, **options: Any
) -> Part:
    """Grouped-query attention by the common keys.

    Args:
        fields: the keys.
        width: channels of one head.
        window: tokens seen; None means all.
        biases: projections that have them.
        kv_heads: of a file that has no key for them; as many as there are heads when it is None, or where the key is null.
        options: further ones of `AttentionConfig`.
    """
    heads = fields.size("num_attention_heads")
    missing = heads if kv_heads is None or "num_key_value_heads" in fields.data else kv_heads
    kv_heads = fields.size("num_key_value_heads", default=missing)
    if heads % kv_heads:
        allowed = f"a divisor of num_attention_heads={heads}"
        raise ConfigError(problem("num_key_value_heads", kv_heads, allowed, "correct one of them"))
    if width % 2:
        raise ConfigError(problem("head_dim", width, "even, since rotary positions turn pairs of channels", "correct it"))
    bias = "none" if biases == "none" else "qkv"
    config = AttentionConfig(n_heads=heads, n_kv_heads=kv_heads, head_dim=width, window=window, bias=bias, **options)
    return Biased(config, fields.size("hidden_size")) if biases == "all" else OwnPart(config)


def swiglu(fields: Fields, name: str = "intermediate_size", activations: Sequence[str] = SILU) -> Part:
    """A SwiGLU whose hidden width is the key of this name, with biases where `mlp_bias` says so."""
    fields.word("hidden_act", "silu", activations)
    config, width = SwiGLUConfig(d_ff=fields.size(name)), fields.size(name)
    return Biased(config, 2 * width + fields.size("hidden_size")) if fields.flag("mlp_bias", False) else OwnPart(config)


def refuse_experts(fields: Fields) -> None:
    """Refuses experts in a family without any."""
    for name in NOT_DENSE:
        fields.refuse(name, "must be left out, since models of this type have no experts; correct model_type or remove it")


def model(fields: Fields, name: str, blocks: Sequence[Sequence[Part]], max_seq_len: int, **others: Any) -> ModelShape:
    """The model around its blocks, by the common keys.

    Args:
        fields: the keys.
        name: what the model is called.
        blocks: the sublayers of each block.
        max_seq_len: tokens where `max_position_embeddings` is left out.
        others: further attributes of `ModelShape`.
    """
    return ModelShape(
        name=name,
        vocab_size=fields.size("vocab_size"),
        d_model=fields.size("hidden_size"),
        blocks=tuple(tuple(block) for block in blocks),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_seq_len=fields.size("max_position_embeddings", default=max_seq_len),
        **{"norm_eps": fields.number("rms_norm_eps", 1e-6), **others},
    )
