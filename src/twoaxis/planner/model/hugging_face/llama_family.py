"""Llama, Mistral, Qwen2, Qwen3 (also with Attention Residuals) and MUDDFormer, and the readers that other families share.

The common keys define softmax attention, a SwiGLU, and the model around its blocks.
"""

from collections.abc import Sequence
from typing import Any, Literal

from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import AttentionResidualsConfig, MUDDFormerConfig
from twoaxis.feed_forward import GELUConfig, SwiGLUConfig
from twoaxis.feed_forward.base import rising_width
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.part import Biased, NativeSublayer, Part
from twoaxis.planner.model.shape import ModelShape
from twoaxis.sequence import AttentionConfig

Biases = Literal["none", "qkv", "all"]
SILU = ("silu", "swish")

MOST_LAYERS = 10_000
"""More than any model has, and few enough to plan."""

NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts")

LAYERS = ("full_attention", "sliding_attention")
WINDOW = 4096
FULL_LAYERS = 28
"""The default of `max_window_layers`."""

OF_QWEN = {"sliding_window", "max_window_layers"}
"""Keys that are not read if no window is used, or if `layer_types` names the layers with one."""

OF_ATTNRES = OF_QWEN | {"attnres_num_heads", "attnres_hyper_n", "attnres_num_blocks"}
"""Also the keys of modes that are refused."""


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
    """Reads grouped-query attention from the common keys.

    Args:
        fields: the keys.
        width: channels of one head.
        window: tokens seen; None means all.
        biases: projections that have them.
        kv_heads: if the file has no key for them; None, or a key of null, means as many as heads.
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
    return Biased(config, fields.size("hidden_size")) if biases == "all" else NativeSublayer(config)


def swiglu(fields: Fields, name: str = "intermediate_size", activations: Sequence[str] = SILU) -> Part:
    """Reads a SwiGLU with the hidden width of this key, and with biases if `mlp_bias` is true."""
    fields.word("hidden_act", "silu", activations)
    config, width = SwiGLUConfig(d_ff=fields.size(name)), fields.size(name)
    return Biased(config, 2 * width + fields.size("hidden_size")) if fields.flag("mlp_bias", False) else NativeSublayer(config)


def refuse_experts(fields: Fields) -> None:
    """Refuses experts in a family without them."""
    for name in NOT_DENSE:
        fields.refuse(name, "must be left out, since models of this type have no experts; correct model_type or remove it")


def model(fields: Fields, name: str, blocks: Sequence[Sequence[Part]], max_seq_len: int, **others: Any) -> ModelShape:
    """Reads the model around its blocks from the common keys.

    Args:
        fields: the keys.
        name: of the model.
        blocks: the sublayers of each block.
        max_seq_len: if `max_position_embeddings` is left out.
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


def read_llama(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` llama: grouped-query attention and SwiGLU, both with biases if the file has them."""
    refuse_experts(fields)
    biases = "all" if fields.flag("attention_bias", False) else "none"
    block = (attention(fields, head_dim(fields), biases=biases), swiglu(fields))
    return model(fields, name, (block,) * n_layers(fields), max_seq_len=2048)


def read_mistral(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` mistral: all layers see a window of 4096 tokens, unless the file has another one or null."""
    refuse_experts(fields)
    fields.refuse("layer_types", "must be left out, since all layers of this model_type are alike; remove it")
    window = fields.optional_size("sliding_window", default=4096)
    block = (attention(fields, head_dim(fields), window, kv_heads=8), swiglu(fields))
    return model(fields, name, (block,) * n_layers(fields), max_seq_len=131_072)


def read_qwen2(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen2: queries, keys and values have biases."""
    refuse_experts(fields)
    layers = [attention(fields, head_dim(fields), window, "qkv") for window in _windows(fields)]
    return model(fields, name, [(mixer, swiglu(fields)) for mixer in layers], max_seq_len=32_768)


def read_qwen3(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen3: queries and keys have a norm per head, whose default width is 128."""
    refuse_experts(fields)
    biases = "all" if fields.flag("attention_bias", False) else "none"
    width = head_dim(fields, default=128)
    layers = [attention(fields, width, window, biases, qk_norm="before_rope") for window in _windows(fields)]
    return model(fields, name, [(mixer, swiglu(fields)) for mixer in layers], max_seq_len=32_768)


def read_qwen3_attnres(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen3_attnres: Qwen3 with Attention Residuals, of blocks or of single sublayers."""
    fields.word("attnres_gate_type", "bias", ("bias",))
    fields.refuse("attnres_use_null_source", "a source of zeros is not modelled; plan a model without")
    mode = fields.word("attnres_mode", "block", ("block", "full"))
    n_blocks = fields.size("attnres_num_blocks", default=8)
    blocks = {"block_size": -(-n_layers(fields) // n_blocks), "count": "layer"} if mode == "block" else {}
    return read_qwen3(fields, name).with_depth(AttentionResidualsConfig.from_data(blocks))


def _windows(fields: Fields) -> list[int | None]:
    """The window of each layer: if windows are used, of all layers after the first `max_window_layers`."""
    layers, window = n_layers(fields), _window(fields)
    types = fields.words("layer_types", LAYERS, layers)
    if types is not None:
        return [window or fields.size("sliding_window") if kind == "sliding_attention" else None for kind in types]
    full = fields.size("max_window_layers", default=FULL_LAYERS, least=0)
    return [window if layer >= full else None for layer in range(layers)]


def _window(fields: Fields) -> int | None:
    return fields.optional_size("sliding_window", default=WINDOW) if fields.flag("use_sliding_window", False) else None


MUDDFORMER_KEYS = {"head_dim", "use_layer_cache", "rope_base"}
"""Keys that are not read: a width that follows from others, an engine, and an option without a cost."""


def read_muddformer(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` muddformer and muddpythia, the latter with biases, LayerNorm and a parallel residual.

    Only the form that both families publish is modelled: separate sums for queries, keys, values and residual, with dynamic
    weights.
    """
    for key, must in (("sepln", True), ("dynamic_dense", True), ("dense", True)):
        if fields.flag(key, True) is not must:
            raise ConfigError(problem(key, not must, "true", "other forms are not modelled"))
    fields.word("dense_type", "qkvr", ("qkvr",))
    pythia = fields.flag("use_linear_bias", False)
    layers, mean = fields.size("n_layer", most=MOST_LAYERS), fields.size("intermediate_size")
    depth = MUDDFormerConfig(
        residual="parallel" if fields.flag("use_parallel_residual", False) else "sequential",
        hidden="round64" if fields.flag("round64", False) else "paper",
        expand_last=4 if fields.flag("expand_last", False) else 1,
    )
    blocks = [
        (_attention(fields, pythia), _feed_forward(fields, rising_width(mean, block, layers), pythia))
        for block in range(layers)
    ]
    return ModelShape(
        name,
        fields.size("vocab_size"),
        fields.size("dim"),
        tuple(blocks),
        depth,
        fields.flag("tie_word_embeddings", False),
        norm="layer" if pythia else "rms",
        norm_eps=fields.number("norm_eps", 1e-5 if pythia else 1e-6),
        max_seq_len=fields.size("block_size", default=2048),
    )


def _attention(fields: Fields, biased: bool) -> Part:
    width, heads = fields.size("dim"), fields.size("n_head")
    if width % heads:
        raise ConfigError(problem("n_head", heads, f"a divisor of dim={width}", "correct one of them"))
    if fields.size("n_local_heads", default=heads) != heads:
        got = fields.size("n_local_heads")
        raise ConfigError(problem("n_local_heads", got, f"n_head={heads}", "other numbers do not work in the authors' code"))
    config = AttentionConfig(
        n_heads=heads,
        head_dim=width // heads,
        rope_dim=int(width // heads * fields.number("rotary_pct", 1.0, most=1)) // 2 * 2,
        qk_norm="before_rope" if fields.flag("use_qk_norm", False) else "none",
    )
    return Biased(config, 4 * width) if biased else NativeSublayer(config)


def _feed_forward(fields: Fields, hidden: int, pythia: bool) -> Part:
    return Biased(GELUConfig(d_ff=hidden), hidden + fields.size("dim")) if pythia else NativeSublayer(SwiGLUConfig(d_ff=hidden))
