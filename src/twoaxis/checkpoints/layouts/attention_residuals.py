"""The layouts of Attention Residuals: flash-linear-attention, AttnRes-Qwen3 and Kimi K3.

Letters: D width.
"""

from collections.abc import Iterator

from twoaxis.checkpoints.layouts.llama import EMBEDDING, HEAD, IGNORED, body, tied
from twoaxis.checkpoints.layouts.state_map import Constant, DepthPaths, Entry, Part, StateMap, depth_paths, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import AttentionResidualsConfig
from twoaxis.model import DecoderConfig

FLA = {
    "self_attn": "attn",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "embed_tokens": "embeddings",
}
"""The names of flash-linear-attention for the parts of a Llama."""


def attnres_qwen3(config: DecoderConfig) -> StateMap:
    """The whole decoder of AttnRes-Qwen3, with `final_res` as its last read.

    Source: wdlctc/open-attention-residuals
    Raises:
        ConfigError: another depth mixer, or reads that are more than a query and a gain.
    """
    paths = depth_paths(config)
    entries, constants = _reads(paths, "model.layers.{}.", ("attn_res", "mlp_res"), "model.final_res")
    return StateMap("attnres_qwen3", (*body(config), *entries), constants, IGNORED, tied=tied(config, HEAD, EMBEDDING))


def attnres_fla(config: DecoderConfig) -> StateMap:
    """The whole decoder of flash-linear-attention with `attnres_block_size`.

    Source: fla-org/flash-linear-attention
    Raises:
        ConfigError: another depth mixer, or reads that are more than a query and a gain.
    """
    paths = depth_paths(config)
    entries, constants = _reads(paths, "model.layers.{}.", ("attn_res", "mlp_res"), "model.res")
    named = [Entry(one.ours, tuple(part._replace(name=_in_fla(part.name)) for part in one.parts)) for one in body(config)]
    shared = tied(config, HEAD, _in_fla(EMBEDDING))
    return StateMap("attnres_fla", (*named, *entries), constants, IGNORED, tied=shared)


def kimi_k3(paths: DepthPaths) -> StateMap:
    """The reads of Kimi K3 in the text part of its checkpoint; blocks count transformer layers.

    Source: Kimi K3, arXiv:2607.24653; names as in its checkpoint
    Raises:
        ConfigError: another depth mixer, or reads that are more than a query and a gain.
    """
    root = "language_model.model"
    names = ("self_attention_res", "mlp_res")
    entries, constants = _reads(paths, root + ".layers.{}.", names, f"{root}.output_attn_res")
    return StateMap("kimi_k3", entries, constants, family=("*_res_proj.weight", "*_res_norm.weight"))


def _reads(paths: DepthPaths, layer: str, names: tuple[str, str], last: str) -> tuple[tuple[Entry, ...], tuple[Constant, ...]]:
    """The reads before every sublayer, and the last read; the weight of the first is constant, since it has one source."""
    depth = paths.depth
    if not isinstance(depth, AttentionResidualsConfig) or depth.query == "token" or depth.key_rank is not None:
        allowed = "attention_residuals with static queries and no key_rank"
        raise ConfigError(problem("depth", depth.kind, allowed, "leave its options out"))
    if depth.form == "inkling2":
        raise ConfigError(problem("depth.form", depth.form, "'report', whose reads have a gain", "leave form out"))
    if set(paths.stack.block_lengths) != {2}:
        raise ConfigError(problem("blocks", paths.stack.block_lengths, "of two sublayers each", "use another layout"))
    D = paths.d_model
    first, *others = [f"{layer.format(index // 2)}{names[index % 2]}" for index in range(len(paths.mixers))]
    constants = (Constant(Part(f"{first}_proj.weight", (1, D)), 0.0), Constant(Part(f"{first}_norm.weight", (D,)), 1.0))
    reads = enumerate((*others, last), 1)
    return tuple(one for index, theirs in reads for one in _read(paths.prefix(index), theirs, D)), constants


def _read(ours: str, theirs: str, D: int) -> Iterator[Entry]:
    yield entry(f"{ours}.query.pseudo_query", f"{theirs}_proj.weight", 1, D)
    yield entry(f"{ours}.query.key_gain", f"{theirs}_norm.weight", D)


def _in_fla(name: str) -> str:
    return ".".join(FLA.get(word, word) for word in name.split("."))
