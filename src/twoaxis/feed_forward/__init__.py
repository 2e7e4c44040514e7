"""Floor 2: feed-forward sublayers. One row per kind."""

from twoaxis.core.registry import Row, Table
from twoaxis.feed_forward.base import FeedForward, FeedForwardConfig
from twoaxis.feed_forward.plain import GELU, GELUConfig, ReLU2, ReLU2Config
from twoaxis.feed_forward.swiglu import SwiGLU, SwiGLUConfig

FEED_FORWARD: Table[FeedForwardConfig] = Table(
    "feed-forward",
    FeedForwardConfig,
    "twoaxis.feed_forward",
    [
        Row(
            SwiGLUConfig,
            "gated by SiLU",
            {
                "default": {},
                "rising": {"d_ff": 256, "d_ff_by_depth": "rising"},
                "canon": {
                    "d_ff": 16,
                    "input_local": {"kind": "canon", "kernel": 3},
                    "projected_local": {"kind": "canon", "kernel": 2, "taps_init": "zero"},
                },
                "inkling2": {
                    "d_ff": 16,
                    "update_local": {"kind": "canon", "scale": "unit_variance", "taps_init": "zero"},
                },
            },
            certified={"default": "swa-mistral", "canon": "canon-abcd"},
        ),
        Row(
            GELUConfig,
            "Gaussian error linear unit",
            {"erf": {}, "tanh": {"form": "tanh"}, "canon": {"d_ff": 16, "projected_local": "canon"}},
        ),
        Row(ReLU2Config, "squared ReLU", {"default": {}}, certified={"default": "nanochat-ve-f64"}),
    ],
)

__all__ = [
    "FEED_FORWARD",
    "GELU",
    "FeedForward",
    "FeedForwardConfig",
    "GELUConfig",
    "ReLU2",
    "ReLU2Config",
    "SwiGLU",
    "SwiGLUConfig",
]
