"""The layouts of DenseFormer (package, training code, baselines), GPT-BERT and ELC-BERT.

Letters: S sources.
"""

from collections.abc import Mapping

from twoaxis.checkpoints.layouts.state_map import Constant, DepthPaths, Entry, Part, StateMap, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import DenseFormerConfig, ElcBertConfig

LOGITS = "prev_layer_weights"


def denseformer(paths: DepthPaths) -> StateMap:
    """The rows of the authors' package under the name `dwa`, one linear map without bias each.

    Source: epfml/DenseFormer, denseformer/

    Raises:
        ConfigError: another depth mixer, rows after sublayers, or a baseline.
    """
    depth = _config(paths, "dwa", "block")
    names = {end: f"dwa.alphas.{end - 1}.weight" for end in depth.rows(paths.n_blocks)}
    return StateMap("denseformer", _rows(paths, depth, names), family=("dwa.*",))


def denseformer_training(paths: DepthPaths) -> StateMap:
    """The rows of the authors' training code, with groups of blocks.

    Source: epfml/DenseFormer, experiments/models/denseformer.py
    Raises:
        ConfigError: another depth mixer, rows after sublayers, or a baseline.
    """
    depth = _config(paths, "dwa", "block")
    names = {end: f"weights.{end // depth.period - 1}.weight" for end in depth.rows(paths.n_blocks)}
    return StateMap("denseformer_training", _rows(paths, depth, names), family=("weights.*",))


def connect_to_last(paths: DepthPaths) -> StateMap:
    """The baseline that sums all block outputs before the head, one tensor per weight.

    Source: epfml/DenseFormer, experiments/models/connecttolast.py
    Raises:
        ConfigError: another depth mixer or variant.
    """
    _config(paths, "connect_to_last", "block")
    parts = tuple(Part(f"mixer.weight.{i}", (1,)) for i in range(paths.n_blocks + 1))
    return StateMap("connect_to_last", (Entry(f"{paths.mixers[-1]}.weights", parts),), family=("mixer.weight.*",))


def skip_gains(paths: DepthPaths) -> StateMap:
    """The baseline that scales the stream before each sublayer.

    Source: epfml/DenseFormer, experiments/models/skipgains.py
    Raises:
        ConfigError: another depth mixer or variant, or blocks of other than two sublayers.
    """
    _config(paths, "skip_gains", "block")
    paths.check_pairs()
    gains = (f"transformer.h.{index // 2}.gain_{'mlp' if index % 2 else 'attn'}" for index in range(len(paths.mixers)))
    entries = tuple(entry(f"{ours}.gain", name, 1) for ours, name in zip(paths.mixers, gains, strict=True))
    return StateMap("skip_gains", entries, family=("*.gain_mlp", "*.gain_attn"))


def gpt_bert(paths: DepthPaths) -> StateMap:
    """The rows of GPT-BERT, one after every sublayer.

    Source: ltgoslo/gpt-bert, arXiv:2410.24159
    Raises:
        ConfigError: another depth mixer, rows after blocks, or a baseline.
    """
    depth = _config(paths, "dwa", "sublayer")
    names = {end: f"encoder.dwa_modules.alphas.{end - 1}" for end in depth.rows(len(paths.mixers))}
    return StateMap("gpt_bert", _rows(paths, depth, names, matrix=False), family=("encoder.dwa_modules.*",))


def _config(paths: DepthPaths, variant: str, granularity: str) -> DenseFormerConfig:
    depth = paths.depth
    if not isinstance(depth, DenseFormerConfig) or (depth.variant, depth.granularity) != (variant, granularity):
        allowed = f"denseformer with variant={variant!r} and granularity={granularity!r}"
        raise ConfigError(problem("depth", depth.to_data(), allowed, "use its own layout"))
    return depth


def _rows(paths: DepthPaths, depth: DenseFormerConfig, names: Mapping[int, str], matrix: bool = True) -> tuple[Entry, ...]:
    lengths = paths.stack.block_lengths if depth.granularity == "block" else (1,) * paths.stack.n_sublayers
    rows = depth.rows_of(paths.stack)
    found = []
    for end, name in names.items():
        S, last = len(rows[end]), sum(lengths[:end]) - 1
        found.append(entry(f"{paths.mixers[last]}.weights", name, *((1, S) if matrix else (S,))))
    return tuple(found)


def elc_bert(paths: DepthPaths) -> StateMap:
    """The logits of every block, and of the last combination of `weighted_output`.

    Source: ltgoslo/elc-bert, arXiv:2311.02265
    Raises:
        ConfigError: another depth mixer.
    """
    depth = paths.depth
    if not isinstance(depth, ElcBertConfig):
        raise ConfigError(problem("depth", depth.kind, "elc_bert", "use the layout of its own method"))
    # A single source has weight 1 for any logit.
    first = Constant(Part(f"transformer.layers.0.{LOGITS}", (1,)), 1.0 if depth.variant == "base" else 0.0)
    entries, start = [], 0
    for block, length in enumerate(paths.stack.block_lengths):
        if block:
            name = f"transformer.layers.{block}.{LOGITS}"
            entries.append(entry(f"{paths.mixers[start]}.combination.logits", name, block + 1))
        start += length
    if depth.variant == "weighted_output":
        entries.append(entry(f"{paths.ends}.combination.logits", f"transformer.{LOGITS}", paths.n_blocks + 1))
    return StateMap("elc_bert", tuple(entries), (first,), family=(f"*.{LOGITS}",))
