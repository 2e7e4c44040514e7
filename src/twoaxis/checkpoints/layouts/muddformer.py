"""The layouts of MUDDFormer and MUDDPythia.

Letters: D width, C ways, S sources, K hidden width of the weights, F hidden width of a feed-forward.
"""

from collections.abc import Iterator
from typing import cast

from twoaxis.checkpoints.layouts.llama import HeadNames, check_blocks, embedding_and_head, gated_mlp, heads, tied
from twoaxis.checkpoints.layouts.state_map import DepthPaths, Entry, StateMap, depth_paths, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import MUDDFormerConfig
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.model import DecoderConfig
from twoaxis.sequence.heads import HeadsConfig

FAMILY = ("dense_bs.*", "dynamic_dense.*")
"""The names of the sums."""

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
HEADS, MLP = HeadNames("w{}", "wo", "{}_norm"), ("w1", "w3", "w2")


def muddformer(config: DecoderConfig) -> StateMap:
    """The whole decoder of MUDDFormer-2.8B; its rotation table is rounded to bfloat16, ours is not.

    Source: Caiyun-AI/MUDDFormer, arXiv:2502.12170v2
    Raises:
        ConfigError: another depth mixer, or sums without names in the layout.
    """
    check_blocks(config)
    sums = muddformer_sums(depth_paths(config))
    return StateMap("muddformer", (*_body(config), *sums.entries), tied=tied(config, HEAD, EMBEDDING))


def muddformer_sums(paths: DepthPaths) -> StateMap:
    """The sums alone: of MUDDFormer, and of MUDDPythia, whose biases and LayerNorms are not supported.

    Raises:
        ConfigError: another depth mixer, or sums without names in the layout.
    """
    depth = paths.depth
    released = {"ways": "qkvr", "weights": "dynamic", "source_norm": "none", "post_norm": "none", "dilation": 1, "period": 1}
    if not isinstance(depth, MUDDFormerConfig) or any(getattr(depth, name) != value for name, value in released.items()):
        wanted = ", ".join(f"{name}={value!r}" for name, value in released.items())
        raise ConfigError(problem("depth", depth.kind, f"muddformer with {wanted}", "leave its other options out"))
    return StateMap("muddformer_sums", tuple(_sums(paths, depth)), family=FAMILY)


def _sums(paths: DepthPaths, depth: MUDDFormerConfig) -> Iterator[Entry]:
    L, D, start = paths.n_blocks, paths.d_model, 0
    for i, sources in depth.sums(L).items():
        start += paths.stack.block_lengths[i - 1]
        form, ours = depth.sum_form(paths.stack, i), f"{paths.prefix(start)}.sum"
        C, S, K = form.n_ways, len(sources), form.hidden
        yield entry(f"{ours}.static", f"dense_bs.{i - 1}", C, S)
        yield entry(f"{ours}.to_hidden", f"dynamic_dense.{i - 1}.w1.weight", K, D)
        yield entry(f"{ours}.to_weights", f"dynamic_dense.{i - 1}.w2.weight", C * S, K)


def _body(config: DecoderConfig) -> Iterator[Entry]:
    D, sites = config.d_model, config.stack.sites
    yield from embedding_and_head(config, EMBEDDING, "norm.weight", HEAD)
    for layer, (attention, swiglu) in enumerate(config.layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        norms = ("attention_norms.0", "attention_norms.1", "attention_norms.2") if layer else ("attention_norm",)
        for name, norm in zip(("norm", "key_norm", "value_norm"), norms, strict=False):
            yield entry(f"{ours}.attention.{name}.gain", f"{theirs}.{norm}.weight", D)
        yield from heads(cast(HeadsConfig, attention), D, f"{ours}.attention.mixer", f"{theirs}.attention", HEADS)
        yield entry(f"{ours}.swiglu.norm.gain", f"{theirs}.ffn_norm.weight", D)
        F = cast(SwiGLUConfig, swiglu).width_at(sites[2 * layer + 1])
        yield from gated_mlp(D, F, f"{ours}.swiglu.mixer", f"{theirs}.feed_forward", MLP)
