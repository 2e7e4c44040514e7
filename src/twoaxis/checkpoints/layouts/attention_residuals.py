"""The layouts of Attention Residuals: flash-linear-attention, AttnRes-Qwen3, Kimi K3 and Inkling-2.

Letters: D width.
"""

from collections.abc import Iterator

from twoaxis.checkpoints.layouts.llama import EMBEDDING, HEAD, IGNORED, body, tied
from twoaxis.checkpoints.layouts.state_map import Constant, DepthPaths, Entry, Part, Stack, StateMap, depth_paths, entry
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


def inkling2(paths: DepthPaths) -> StateMap:
    """The reads of Inkling-2, with images and text: `attention_input` and `mlp_input` of each layer, and `final_input`.

    Three queries of global attention are one tensor there.

    Source: transformers, Inkling2ForConditionalGeneration
    Raises:
        ConfigError: another depth mixer, another form of it, or blocks of other than two sublayers.
    """
    return _inkling2(paths, "inkling2", "model.language_model.")


def inkling2_text(paths: DepthPaths) -> StateMap:
    """The reads of Inkling-2 in a model of text alone.

    Source: transformers, Inkling2ForCausalLM
    Raises:
        ConfigError: another depth mixer, another form of it, or blocks of other than two sublayers.
    """
    return _inkling2(paths, "inkling2_text", "model.")


def _inkling2(paths: DepthPaths, layout: str, root: str) -> StateMap:
    depth, D = paths.depth, paths.d_model
    if not isinstance(depth, AttentionResidualsConfig) or depth.form != "inkling2":
        raise ConfigError(problem("depth", depth.kind, "attention_residuals with form='inkling2'", "use that"))
    paths.check_pairs()
    entries, stacks = [entry(f"{paths.ends}.query.pseudo_query", f"{root}final_input.query", D)], []
    # The first sublayer has one source and no query.
    for site, ours in list(zip(paths.stack.sites, paths.mixers, strict=True))[1:]:
        theirs = f"{root}layers.{site.block}.{('attention', 'mlp')[site.index % 2]}_input.query"
        if depth.splits_views(site):
            queries = tuple(f"{ours}.{name}.pseudo_query" for name in ("query", "key_query", "value_query"))
            stacks.append(Stack(Part(theirs, (3, D)), queries, 0))
        else:
            entries.append(entry(f"{ours}.query.pseudo_query", theirs, D))
    return StateMap(layout, tuple(entries), family=("*_input.query",), stacks=tuple(stacks))


def _reads(paths: DepthPaths, layer: str, names: tuple[str, str], last: str) -> tuple[tuple[Entry, ...], tuple[Constant, ...]]:
    """The reads before every sublayer, and the last read; the weight of the first is constant, since it has one source."""
    depth = paths.depth
    if not isinstance(depth, AttentionResidualsConfig) or depth.query == "token" or depth.key_rank is not None:
        allowed = "attention_residuals with static queries and no key_rank"
        raise ConfigError(problem("depth", depth.kind, allowed, "leave its options out"))
    if depth.form == "inkling2":
        raise ConfigError(problem("depth.form", depth.form, "'report', whose reads have a gain", "leave form out"))
    paths.check_pairs()
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
