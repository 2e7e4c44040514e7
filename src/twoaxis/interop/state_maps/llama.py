"""The layout of Llama, Mistral, Qwen2 and Qwen3 in Hugging Face folders.

Letters: D width, F hidden width, V vocabulary.
"""

from collections.abc import Iterator
from typing import cast

from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.interop.state_maps.state_map import Entry, Part, StateMap
from twoaxis.interop.state_maps.sublayers import HeadNames, check_blocks, gated_mlp, heads
from twoaxis.model import DecoderConfig
from twoaxis.sequence.heads import HeadsConfig

IGNORED = ("*.rotary_emb.inv_freq",)
"""What older folders hold besides parameters."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS, MLP = HeadNames("{}_proj", "o_proj", "{}_norm"), ("gate_proj", "up_proj", "down_proj")


def llama(config: DecoderConfig) -> StateMap:
    """The whole decoder, with the plain residual.

    Raises:
        ConfigError: sublayers other than attention and SwiGLU.
    """
    return StateMap("llama", tuple(body(config)), ignored=IGNORED, tied=tied(config, HEAD, EMBEDDING))


def tied(config: DecoderConfig, head: str, embedding: str) -> dict[str, str]:
    """A tied head, which is sometimes saved all the same."""
    return {head: embedding} if config.tie_embeddings else {}


def body(config: DecoderConfig) -> Iterator[Entry]:
    """Everything but the depth mixers."""
    check_blocks(config)
    V, D = config.vocab_size, config.d_model
    yield Entry("embedding.weight", (Part(EMBEDDING, (V, D)),))
    yield Entry("norm.gain", (Part("model.norm.weight", (D,)),))
    if not config.tie_embeddings:
        yield Entry("head.weight", (Part(HEAD, (V, D)),))
    sites = config.stack.sites
    for layer, (attention, swiglu) in enumerate(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield Entry(f"{ours}.attention.norm.gain", (Part(f"{theirs}.input_layernorm.weight", (D,)),))
        yield from heads(cast(HeadsConfig, attention), D, f"{ours}.attention.mixer", f"{theirs}.self_attn", HEADS)
        yield Entry(f"{ours}.swiglu.norm.gain", (Part(f"{theirs}.post_attention_layernorm.weight", (D,)),))
        F = cast(SwiGLUConfig, swiglu).width_at(sites[2 * layer + 1])
        yield from gated_mlp(D, F, f"{ours}.swiglu.mixer", f"{theirs}.mlp", MLP)
