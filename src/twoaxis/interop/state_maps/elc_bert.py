"""The layout of ELC-BERT: the logits of its combinations."""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import ElcBertConfig
from twoaxis.interop.state_maps.places import Places
from twoaxis.interop.state_maps.state_map import Constant, Entry, Part, StateMap

LOGITS = "prev_layer_weights"


def elc_bert(places: Places) -> StateMap:
    """The logits of every block, and of the last combination of `weighted_output`.

    Source: ltgoslo/elc-bert, arXiv:2311.02265
    Raises:
        ConfigError: another depth mixer.
    """
    depth = places.depth
    if not isinstance(depth, ElcBertConfig):
        raise ConfigError(problem("depth", depth.kind, "elc_bert", "use the layout of its own method"))
    # One source has weight 1 whatever its logit is.
    first = Constant(Part(f"transformer.layers.0.{LOGITS}", (1,)), 1.0 if depth.variant == "base" else 0.0)
    entries, start = [], 0
    for block, length in enumerate(places.stack.block_lengths):
        if block:
            name = f"transformer.layers.{block}.{LOGITS}"
            entries.append(Entry(f"{places.mixers[start]}.combination.logits", (Part(name, (block + 1,)),)))
        start += length
    if depth.variant == "weighted_output":
        last = Part(f"transformer.{LOGITS}", (places.n_blocks + 1,))
        entries.append(Entry(f"{places.ends}.combination.logits", (last,)))
    return StateMap("elc_bert", tuple(entries), (first,), family=(f"*.{LOGITS}",))
