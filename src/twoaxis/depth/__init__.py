"""Floor 2: the depth axis. One row per way to read and write the residual stream."""

from twoaxis.core.table import Row, Table
from twoaxis.depth.attention_residuals import AttentionResidualsConfig
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.depth.deep_delta import DeepDelta, DeepDeltaConfig
from twoaxis.depth.denseformer import DenseFormerConfig
from twoaxis.depth.depth_attention import DepthAttentionConfig
from twoaxis.depth.elc_bert import ElcBertConfig
from twoaxis.depth.lime import LimeConfig
from twoaxis.depth.residual import ResidualConfig
from twoaxis.depth.residual_scalars import ResidualScalarsConfig
from twoaxis.depth.value_residual import ValueResidualConfig
from twoaxis.depth.vertical_attention import VerticalAttentionConfig

DEPTH: Table[DepthConfig] = Table(
    "depth mixer",
    DepthConfig,
    "twoaxis.depth",
    [
        Row(ResidualConfig, "adds every update to one stream", {"default": {}}),
        Row(ResidualScalarsConfig, "learned scalars on the stream and on the embedding", {"default": {}}),
        Row(
            AttentionResidualsConfig,
            "reads a softmax mixture of all earlier outputs or block sums",
            {"full": {}, "block2": {"block_size": 2}, "block3": {"block_size": 3}},
        ),
        Row(
            DepthAttentionConfig,
            "attends to a window of earlier states of the stream: ShortSWA along depth",
            {
                "window3": {"window": 3, "n_heads": 2, "head_dim": 3},
                "replace": {"window": None, "n_heads": 2, "head_dim": 4, "mode": "replace", "states": "raw"},
                "itself": {"window": 1, "n_heads": 1},
            },
        ),
        Row(
            DeepDeltaConfig,
            "overwrites the stream along the update's direction",
            {
                "code": {},
                "paper": {"value_target": "paper"},
                "two_layer": {"gate": "two_layer", "gate_width": 5, "value_target": "code_linear"},
                "write_only": {"update_rule": "write_only"},
            },
        ),
        Row(
            DenseFormerConfig,
            "sums all earlier block outputs with free weights after each block",
            {
                "1x1": {},
                "2x1": {"dilation": 2},
                "2x2_sublayers": {"dilation": 2, "period": 2, "granularity": "sublayer"},
                "last": {"last": 1},
                "connect_to_last": {"variant": "connect_to_last", "older_init": 0.1},
                "skip_gains": {"variant": "skip_gains"},
            },
        ),
        Row(
            ElcBertConfig,
            "reads a learned convex sum of earlier block outputs, which hold no residual stream",
            {variant: {"variant": variant} for variant in ("base", "zero", "normalized", "weighted_output")},
        ),
        Row(
            VerticalAttentionConfig,
            "reads a learned convex sum of normalised layer outputs (a reconstruction)",
            {
                "default": {},
                "gated": {"source": "output", "skip": "gated", "head": "mixture", "norm_kind": "l2"},
                "weights": {"norm": "weights", "embedding": "first_input", "granularity": "sublayer", "newest_logit": 1.0},
                "sum": {"source": "output", "norm": "sum", "norm_kind": "layer", "head": "mixture"},
                "added": {"skip": "added", "norm": "none", "embedding": "first_input"},
            },
            status="contrib",
        ),
        Row(
            LimeConfig,
            "attends with keys and values routed from the heads of all earlier layers",
            {"released": {}, "plain": {"init": "plain"}},
        ),
        Row(
            ValueResidualConfig,
            "attends with the first layer's values mixed into each layer's own",
            {
                "learnable": {},
                "plain": {"first": 0.0, "own": 1.0},
                "constant": {"variant": "constant", "first": 2.0, "own": 1.0, "layers": [2]},
                "dense": {"variant": "dense"},
                "gated": {"variant": "gated"},
                "svformer": {"variant": "svformer"},
            },
        ),
    ],
)

__all__ = [
    "DEPTH",
    "AttentionResidualsConfig",
    "DeepDelta",
    "DeepDeltaConfig",
    "DenseFormerConfig",
    "DepthAttentionConfig",
    "DepthConfig",
    "DepthEnds",
    "DepthMixer",
    "ElcBertConfig",
    "LimeConfig",
    "ResidualConfig",
    "ResidualScalarsConfig",
    "ValueResidualConfig",
    "VerticalAttentionConfig",
]
