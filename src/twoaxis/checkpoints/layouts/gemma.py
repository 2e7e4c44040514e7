"""The layouts of the per-layer embeddings of Gemma 4, in transformers.

Letters: L layers, V vocabulary, D width, p width of the vectors.
"""

from twoaxis.checkpoints.layouts.state_map import DepthPaths, Part, Stack, StateMap, entry
from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import PerLayerEmbeddingConfig

OF_ALL_LAYERS = {
    "table": ("embed_tokens_per_layer.weight", 1),
    "context_map": ("per_layer_model_projection.weight", 0),
}
"""Our parameters of each layer that are one tensor there, with the dimension along which layers follow each other."""

OF_A_LAYER = {
    "gate": "per_layer_input_gate.weight",
    "output": "per_layer_projection.weight",
    "gain": "post_per_layer_input_norm.weight",
    "scale": "layer_scalar",
}


def gemma4(paths: DepthPaths) -> StateMap:
    """The per-layer embeddings of a model of text and images.

    Source: transformers, Gemma4ForConditionalGeneration
    Raises:
        ConfigError: another depth mixer, or another preset of it.
    """
    return _gemma4(paths, "gemma4", "model.language_model.")


def gemma4_text(paths: DepthPaths) -> StateMap:
    """The per-layer embeddings of a model of text alone.

    Source: transformers, Gemma4ForCausalLM
    Raises:
        ConfigError: another depth mixer, or another preset of it.
    """
    return _gemma4(paths, "gemma4_text", "model.")


def _gemma4(paths: DepthPaths, layout: str, root: str) -> StateMap:
    depth, stack = paths.depth, paths.stack
    if not isinstance(depth, PerLayerEmbeddingConfig) or depth.preset != "gemma4" or stack.vocab_size is None:
        raise ConfigError(problem("depth", depth.kind, "per_layer_embedding with preset='gemma4'", "use that"))
    L, D, p, V = stack.n_blocks, stack.d_model, depth.d_embedding, stack.vocab_size
    closing = [paths.mixers[site.index] for site in stack.sites if site.closes_block]
    shapes = {"gate": (p, D), "output": (D, p), "gain": (D,), "scale": (1,), "table": (V, L * p), "context_map": (L * p, D)}
    entries = [entry(f"{paths.ends}.context_gain", f"{root}per_layer_projection_norm.weight", p)]
    for layer, ours in enumerate(closing):
        entries += [
            entry(f"{ours}.{name}", f"{root}layers.{layer}.{theirs}", *shapes[name]) for name, theirs in OF_A_LAYER.items()
        ]
    stacks = tuple(
        Stack(Part(f"{root}{theirs}", shapes[name]), tuple(f"{ours}.{name}" for ours in closing), dim)
        for name, (theirs, dim) in OF_ALL_LAYERS.items()
    )
    family = (f"{root}*per_layer*", f"{root}layers.*.layer_scalar")
    return StateMap(layout, tuple(entries), family=family, stacks=stacks)
