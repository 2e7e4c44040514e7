"""The layout of Llama, Mistral, Qwen2 and Qwen3 in Hugging Face folders.

Letters: D width, H heads, G kv-heads, K key width, F hidden width, V vocabulary.
"""

from collections.abc import Iterator
from typing import cast

from twoaxis.core.errors import ConfigError
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.interop.state_maps.state_map import Entry, Part, StateMap
from twoaxis.model import DecoderConfig
from twoaxis.sequence.heads import HeadsConfig

IGNORED = ("*.rotary_emb.inv_freq",)
"""What older folders hold besides parameters."""


def llama(config: DecoderConfig) -> StateMap:
    """The whole decoder, with the plain residual.

    Raises:
        ConfigError: sublayers other than attention and SwiGLU.
    """
    return StateMap("llama", tuple(body(config)), ignored=ignored(config))


def ignored(config: DecoderConfig) -> tuple[str, ...]:
    """Names that say nothing about the parameters; a tied head is sometimes saved all the same."""
    return (*IGNORED, "lm_head.weight") if config.tie_embeddings else IGNORED


def body(config: DecoderConfig) -> Iterator[Entry]:
    """Everything but the depth mixers."""
    check_blocks(config)
    V, D = config.vocab_size, config.d_model
    yield Entry("embedding.weight", (Part("model.embed_tokens.weight", (V, D)),))
    yield Entry("norm.gain", (Part("model.norm.weight", (D,)),))
    if not config.tie_embeddings:
        yield Entry("head.weight", (Part("lm_head.weight", (V, D)),))
    for layer, (attention, swiglu) in enumerate(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield Entry(f"{ours}.attention.norm.gain", (Part(f"{theirs}.input_layernorm.weight", (D,)),))
        yield from heads(cast(HeadsConfig, attention), D, f"{ours}.attention.mixer", f"{theirs}.self_attn")
        yield Entry(f"{ours}.swiglu.norm.gain", (Part(f"{theirs}.post_attention_layernorm.weight", (D,)),))
        F = cast(SwiGLUConfig, swiglu).hidden_width(D)
        yield from gated_mlp(f"{ours}.swiglu.mixer", f"{theirs}.mlp", D, F)


def heads(config: HeadsConfig, d_model: int, ours: str, theirs: str, projects_values: bool = True) -> Iterator[Entry]:
    """Attention: the projections to heads and back, their biases, and the norms of queries and keys."""
    D, K, H, G = d_model, config.key_width(d_model), config.n_heads, config.kv_heads
    rows = {"q": H * K, "k": G * K} | ({"v": G * K} if projects_values else {})
    yield Entry(f"{ours}.qkv.weight", tuple(Part(f"{theirs}.{x}_proj.weight", (n, D)) for x, n in rows.items()))
    if config.bias == "qkv":
        yield Entry(f"{ours}.qkv_bias", tuple(Part(f"{theirs}.{x}_proj.bias", (n,)) for x, n in rows.items()))
    yield Entry(f"{ours}.output.weight", (Part(f"{theirs}.o_proj.weight", (D, H * K)),))
    if config.qk_norm != "none":
        for x in "qk":
            width = K if config.qk_norm_over == "head" else rows[x]
            yield Entry(f"{ours}.{x}_gain", (Part(f"{theirs}.{x}_norm.weight", (width,)),))


def gated_mlp(ours: str, theirs: str, d_model: int, d_ff: int) -> Iterator[Entry]:
    """SwiGLU: gate and value in one matrix of ours."""
    gate_up = tuple(Part(f"{theirs}.{name}_proj.weight", (d_ff, d_model)) for name in ("gate", "up"))
    yield Entry(f"{ours}.gate_up.weight", gate_up)
    yield Entry(f"{ours}.down.weight", (Part(f"{theirs}.down_proj.weight", (d_model, d_ff)),))


def check_blocks(config: DecoderConfig) -> None:
    """Refuses blocks that the layout has no names for.

    Raises:
        ConfigError: sublayers other than attention and SwiGLU.
    """
    for block in config.layers:
        kinds = [sublayer.kind for sublayer in block]
        if kinds != ["attention", "swiglu"]:
            raise ConfigError(f"blocks of {kinds}: must be ['attention', 'swiglu'] in this layout; keep our own format")
