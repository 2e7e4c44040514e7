"""Floor 2: the sequence axis. One row per mixer along positions."""

from twoaxis.core.registry import Row, Table
from twoaxis.sequence.attention import Attention, AttentionConfig
from twoaxis.sequence.base import HeadMixer, SequenceConfig, SequenceMixer
from twoaxis.sequence.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from twoaxis.sequence.gated_short_conv import GatedShortConv, GatedShortConvConfig
from twoaxis.sequence.kv_shift import KVShift, KVShiftConfig
from twoaxis.sequence.ngram_embedding import NgramEmbedding, NgramEmbeddingConfig
from twoaxis.sequence.path_attention import PathAttention, PathAttentionConfig
from twoaxis.sequence.short_conv import ShortConv, ShortConvConfig
from twoaxis.sequence.short_swa import ShortSWA, ShortSWAConfig

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
                "bias": {
                    "n_heads": 4,
                    "n_kv_heads": 2,
                    "head_dim": 4,
                    "bias": "qkv",
                    "rope_scaling": {
                        "kind": "yarn",
                        "factor": 4.0,
                        "original_max_seq_len": 4,
                        "beta_fast": 1,
                        "beta_slow": 0.25,
                    },
                },
                "sink": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "window": 3, "sink": "learned"},
                "gpt_oss": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "window": 3, "sink": "learned", "bias": "all"},
                "token_sink": {"n_heads": 2, "window": 3, "sink": "per_token", "sink_init": "normal"},
                "canon": {
                    "n_heads": 2,
                    "n_kv_heads": 1,
                    "head_dim": 4,
                    "window": 2,
                    "qk_norm": "before_rope",
                    "qk_norm_over": "all_heads",
                    "rope_dim": 2,
                    "input_local": "canon",
                    "projected_local": {"kind": "canon", "kernel": 2, "form": "plain", "activation": "silu"},
                },
                "inkling2": {
                    "n_heads": 4,
                    "n_kv_heads": 2,
                    "head_dim": 4,
                    "qk_norm": "after_local",
                    "projected_local": {
                        "kind": "dynamic_conv",
                        "taps": "per_head",
                        "head_dim": 4,
                        "scale": "unit_variance",
                        "static_init": "zero",
                    },
                    "projected_branches": ["k", "v"],
                    "update_local": {"kind": "canon", "scale": "unit_variance", "taps_init": "zero"},
                },
                "local_swa": {
                    "n_heads": 2,
                    "rope_dim": 0,
                    "input_local": {"kind": "local_swa", "window": 3, "n_heads": 1, "head_dim": 4, "output_init": "zero"},
                    "projected_local": {"kind": "local_swa", "window": 2, "n_heads": 2, "head_dim": 4},
                },
            },
            certified={
                "mha": "attnres-full",
                "gqa": "attnres-full-qwen3",
                "mqa": "ddl-vdim1",
                "window": "swa-mistral",
                "gpt_oss": "swa-sink-gptoss",
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
            certified={
                "window4": "swa-fla-layer",
                "zero_output": "swa-fla-layer",
                "window1": "swa-fla-layer",
            },
        ),
        Row(
            ShortConvConfig,
            "a short causal convolution of each channel as a sublayer of its own",
            {
                "default": {},
                "zero": {"kernel": 2, "taps_init": "zero"},
                "residual": {"kernel": 3, "form": "residual", "activation": "none", "bias": "channel"},
            },
            certified={"default": "shortconv-op", "zero": "shortconv-op"},
        ),
        Row(
            GatedShortConvConfig,
            "a short convolution between two gates, with projections of its own",
            {"default": {}, "lfm3": {"kernel": 7}, "zero_output": {"output_init": "zero"}},
            certified={
                "default": "gated-shortconv-lfm",
                "lfm3": "gated-shortconv-lfm",
                "zero_output": "gated-shortconv-lfm",
            },
        ),
        Row(
            KVShiftConfig,
            "attention whose keys and values are mixed with those of the token before",
            {
                "fixed": {"n_heads": 2, "n_kv_heads": 1, "window": 3},
                "token": {"n_heads": 2, "form": "token"},
                "identity": {"n_heads": 2, "shift_init": "identity"},
            },
            certified={"token": "kvshift-op"},
        ),
        Row(
            PathAttentionConfig,
            "attention whose positions are reflections by the tokens in between",
            {
                "qk_norm": {"n_heads": 2, "w_rank": 2, "w_kernel": 2, "qk_norm": "per_head", "output_init": "zero"},
                "default": {"n_heads": 2, "w_rank": 3},
                "gqa": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 3, "w_map": "full", "forget_gate": "inside_scale"},
            },
            certified={"qk_norm": "path-attn-layer"},
        ),
        Row(
            NgramEmbeddingConfig,
            "adds rows of hashed tables of n-grams, gated by the stream",
            {
                "engram_tiny": {"rows": [53]},
                "engram": {"preset": "engram", "heads": 2, "rows": [31, 37], "row_width": 3, "kernel": 2},
                "deepseek_v41": {"preset": "deepseek_v41", "heads": 2, "rows": [41], "row_width": 3},
                "qwen4exp": {
                    "preset": "qwen4exp",
                    "heads": 2,
                    "rows": [43],
                    "row_width": 4,
                    "row_multiple": 8,
                    "fill_id": 2,
                    "end_ids": [2],
                    "kernel": 2,
                },
                "longcat": {"preset": "longcat", "heads": 2, "rows": [40], "row_width": 3},
                "modded": {"preset": "modded", "rows": [60], "sign_rows": 16},
                "bigram_tiny": {"preset": "bigram_tiny", "rows": [61]},
            },
            certified={
                "engram": "engram-demo",
                "deepseek_v41": "engram-v41",
                "qwen4exp": "ple-qwen4exp",
                "longcat": "ngram-embed-longcat",
            },
        ),
        Row(
            GatedDeltaNetConfig,
            "overwrites a decaying state along each token's key: a global mixer of linear cost",
            {
                "default": {"n_heads": 2},
                "conv": {
                    "n_heads": 2,
                    "head_dim": 3,
                    "value_dim": 5,
                    "input_local": "canon",
                    "projected_local": {"kind": "canon", "kernel": 2, "activation": "silu"},
                    "output_init": "zero",
                },
                "swa": {
                    "n_heads": 2,
                    "head_dim": 3,
                    "value_dim": 4,
                    "projected_local": {"kind": "local_swa", "window": 3, "n_heads": 1, "head_dim": 4},
                },
                "bare": {"n_heads": 1, "value_dim": 3, "projected_local": None},
                "own": {
                    "n_heads": 2,
                    "value_dim": 3,
                    "projected_local": {"kind": "local_swa", "window": 2, "n_heads": 1, "head_dim": 4, "activation": "silu"},
                    "projected_over": "branch",
                },
                "shared": {
                    "n_heads": 2,
                    "head_dim": 2,
                    "value_dim": 3,
                    "projected_local": {"kind": "branch_swa", "window": 3, "scores": "shared"},
                },
                "self": {
                    "n_heads": 2,
                    "head_dim": 3,
                    "value_dim": 4,
                    "projected_local": {"kind": "branch_swa", "window": 2, "form": "residual"},
                },
            },
            certified={"default": "gdn-layer"},
        ),
    ],
)

__all__ = [
    "SEQUENCE",
    "Attention",
    "AttentionConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedShortConv",
    "GatedShortConvConfig",
    "HeadMixer",
    "KVShift",
    "KVShiftConfig",
    "NgramEmbedding",
    "NgramEmbeddingConfig",
    "PathAttention",
    "PathAttentionConfig",
    "SequenceConfig",
    "SequenceMixer",
    "ShortConv",
    "ShortConvConfig",
    "ShortSWA",
    "ShortSWAConfig",
]
