"""MUDDFormer and MUDDPythia, by the keys of their authors' own files."""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import MUDDFormerConfig
from twoaxis.feed_forward import GELUConfig, SwiGLUConfig
from twoaxis.feed_forward.base import rising_width
from twoaxis.planner.model.biased import Biased
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.hugging_face.llama import MOST_LAYERS
from twoaxis.planner.model.part import OwnPart, Part
from twoaxis.planner.model.shape import ModelShape
from twoaxis.sequence import AttentionConfig

KNOWN = {"head_dim", "use_layer_cache", "rope_base"}
"""Keys that are not read: a width that follows from others, an engine, and what costs nothing."""


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
    return Biased(config, 4 * width) if biased else OwnPart(config)


def _feed_forward(fields: Fields, hidden: int, pythia: bool) -> Part:
    return Biased(GELUConfig(d_ff=hidden), hidden + fields.size("dim")) if pythia else OwnPart(SwiGLUConfig(d_ff=hidden))
