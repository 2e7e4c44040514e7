"""Floor 2: the sequence axis. One row per mixer along positions."""

from twoaxis.core.table import Row, Table
from twoaxis.sequence.attention import AttentionConfig
from twoaxis.sequence.base import HeadMixer, SequenceConfig, SequenceMixer
from twoaxis.sequence.short_swa import ShortSWAConfig

SEQUENCE: Table[SequenceConfig] = Table(
    "sequence mixer",
    SequenceConfig,
    "twoaxis.sequence",
    [
        Row(
            AttentionConfig,
            "softmax attention over all earlier tokens, or over a window of them",
            {
                "mha": {"n_heads": 2},
                "gqa": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "qk_norm": "before_rope"},
                "mqa": {"n_heads": 2, "n_kv_heads": 1, "qk_norm": "after_rope"},
                "window": {"n_heads": 2, "window": 3},
            },
        ),
        Row(
            ShortSWAConfig,
            "softmax attention over a short window, with projections of its own",
            {
                "window4": {"n_heads": 2, "window": 4},
                "zero_output": {"n_heads": 2, "window": 3, "output_init": "zero"},
                "window1": {"n_heads": 2, "n_kv_heads": 2, "window": 1},
            },
        ),
    ],
)

__all__ = ["SEQUENCE", "AttentionConfig", "HeadMixer", "SequenceConfig", "SequenceMixer", "ShortSWAConfig"]
