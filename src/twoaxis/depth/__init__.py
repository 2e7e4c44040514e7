"""Floor 2: the depth axis. One row per way to read and write the residual stream."""

from twoaxis.core.table import Row, Table
from twoaxis.depth.attention_residuals import AttentionResidualsConfig
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.depth.deep_delta import DeepDelta, DeepDeltaConfig
from twoaxis.depth.residual import ResidualConfig
from twoaxis.depth.residual_scalars import ResidualScalarsConfig

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
            DeepDeltaConfig,
            "overwrites the stream along the update's direction",
            {
                "code": {},
                "paper": {"value_target": "paper"},
                "two_layer": {"gate": "two_layer", "gate_width": 5, "value_target": "code_linear"},
                "write_only": {"update_rule": "write_only"},
            },
        ),
    ],
)

__all__ = [
    "DEPTH",
    "AttentionResidualsConfig",
    "DeepDelta",
    "DeepDeltaConfig",
    "DepthConfig",
    "DepthEnds",
    "DepthMixer",
    "ResidualConfig",
    "ResidualScalarsConfig",
]
