"""The layout of Llama, Mistral, Qwen2 and Qwen3 in Hugging Face folders, and parts of other layouts.

Letters: D width, F hidden width, V vocabulary, H heads, G kv-heads, K key width.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

from twoaxis.checkpoints.layouts.state_map import Entry, Part, StateMap, entry
from twoaxis.core.errors import ConfigError
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import DecoderConfig
from twoaxis.sequence.heads import HeadsConfig


class HeadNames(NamedTuple):
    """The names of a layout for the modules of attention, with `{}` for `q`, `k` or `v`."""

    projection: str
    output: str
    norm: str


IGNORED = ("*.rotary_emb.inv_freq",)
"""Tensors of older folders that are no parameters."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS, MLP = HeadNames("{}_proj", "o_proj", "{}_norm"), ("gate_proj", "up_proj", "down_proj")


def llama(config: DecoderConfig) -> StateMap:
    """The whole decoder, with the plain residual.

    Raises:
        ConfigError: sublayers other than attention and SwiGLU.
    """
    return StateMap("llama", tuple(body(config)), ignored=IGNORED, tied=tied(config, HEAD, EMBEDDING))


def tied(config: DecoderConfig, head: str, embedding: str) -> dict[str, str]:
    """A tied head, which some files contain."""
    return {head: embedding} if config.tie_embeddings else {}


def body(config: DecoderConfig) -> Iterator[Entry]:
    """Everything but the depth mixers."""
    check_blocks(config)
    D, sites = config.d_model, config.stack.sites
    yield from embedding_and_head(config, EMBEDDING, "model.norm.weight", HEAD)
    for layer, (attention, swiglu) in enumerate(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield entry(f"{ours}.attention.norm.gain", f"{theirs}.input_layernorm.weight", D)
        yield from heads(cast(HeadsConfig, attention), D, f"{ours}.attention.mixer", f"{theirs}.self_attn", HEADS)
        yield entry(f"{ours}.swiglu.norm.gain", f"{theirs}.post_attention_layernorm.weight", D)
        F = cast(SwiGLUConfig, swiglu).width_at(sites[2 * layer + 1])
        yield from gated_mlp(D, F, f"{ours}.swiglu.mixer", f"{theirs}.mlp", MLP)


def embedding_and_head(config: DecoderConfig, embedding: str, norm: str, head: str) -> Iterator[Entry]:
    """The embedding, the last norm and the head, by their names in the layout."""
    V, D = config.vocab_size, config.d_model
    yield entry("embedding.weight", embedding, V, D)
    yield entry("norm.gain", norm, D)
    if not config.tie_embeddings:
        yield entry("head.weight", head, V, D)


def heads(config: HeadsConfig, d_model: int, ours: str, theirs: str, names: HeadNames) -> Iterator[Entry]:
    """Attention: the projections to heads and back, their biases, and the norms of queries and keys."""
    D, K, H, G = d_model, config.key_width(d_model), config.n_heads, config.kv_heads
    rows = {"q": H * K, "k": G * K, "v": G * K}
    projections = {f"{theirs}.{names.projection.format(x)}": n for x, n in rows.items()}
    yield Entry(f"{ours}.qkv.weight", tuple(Part(f"{name}.weight", (n, D)) for name, n in projections.items()))
    if config.bias == "qkv":
        yield Entry(f"{ours}.qkv_bias", tuple(Part(f"{name}.bias", (n,)) for name, n in projections.items()))
    yield entry(f"{ours}.output.weight", f"{theirs}.{names.output}.weight", D, H * K)
    if config.qk_norm != "none":
        for x in "qk":
            width = K if config.qk_norm_over == "head" else rows[x]
            yield entry(f"{ours}.{x}_gain", f"{theirs}.{names.norm.format(x)}.weight", width)


def gated_mlp(d_model: int, d_ff: int, ours: str, theirs: str, names: tuple[str, str, str]) -> Iterator[Entry]:
    """SwiGLU, by the names of gate, value and output; our gate and value are one matrix."""
    gate, up, down = names
    yield Entry(f"{ours}.gate_up.weight", tuple(Part(f"{theirs}.{name}.weight", (d_ff, d_model)) for name in (gate, up)))
    yield entry(f"{ours}.down.weight", f"{theirs}.{down}.weight", d_model, d_ff)


def check_blocks(config: DecoderConfig) -> None:
    """Refuses blocks without names in a layout.

    Raises:
        ConfigError: sublayers other than attention and SwiGLU.
    """
    for block in config.layers:
        kinds = [sublayer.kind for sublayer in block]
        if kinds != ["attention", "swiglu"]:
            raise ConfigError(f"blocks of {kinds}: must be ['attention', 'swiglu'] in this layout; keep our own format")
