"""The options at which every mixer is compared with its equation and its initial values are kept.

All examples of the tables, and here what no example has. `test_every_option` says which option lacks a case.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from twoaxis.core.config import Config
from twoaxis.core.registry import Row, Table
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.sequence import SEQUENCE

TABLES: tuple[Table[Any], ...] = (DEPTH, SEQUENCE, FEED_FORWARD, LOCAL)

MORE: dict[str, dict[str, dict[str, Any]]] = {
    "attention_residuals": {
        "uneven_blocks": {"block_size": [2, 4], "n_heads": 2},
        "cooler_heads": {"n_heads": 4, "key_scale": "head", "block_size": 2},
    },
    "delta_attention_residuals": {
        "uneven_blocks": {"block_size": [2, 4], "running_source": "included", "null_source": "learned", "gate": "alpha"},
    },
    "residual_scalars": {"early_backout": {"backout_layer": 0, "embedding": "raw"}},
    "depth_attention": {
        "zero_output": {"n_heads": 2, "output_init": "zero", "head": "read", "window": 2},
        "scaled_scores": {"n_heads": 2, "qk_norm": "head", "temperature": "learned", "window": 3},
        "own_scales": {
            "n_heads": 2,
            "qk_norm": "head",
            "temperature": "learned",
            "projections": "own",
            "granularity": "sublayer",
        },
    },
    "deep_cross_attention": {"relu": {"activation": "relu", "k": 1}},
    "norm_placement": {
        "large_eps": {"placement": "deepnorm", "layer_eps": 0.1},
        "plain_outputs": {"placement": "keel", "output_init": "plain"},
        "two_post_blocks": {"placement": "mix", "post_blocks": 2},
        "no_post_block": {"placement": "mix", "post_blocks": 0},
        "mix_blend": {"placement": "mix", "post_blocks": 2, "blend": "annealed"},
        "reordered_blend": {"placement": "reordered", "blend": "annealed"},
        "sandwich_blend": {"blend": "annealed"},
    },
    "residual_dual": {"large_eps": {"layer_eps": 0.1}},
    "deep_delta": {
        "half_open": {"beta_init": 0.5, "direction_eps": 0.3, "context_eps": 0.1},
        "ddl": {"preset": "ddl"},
        "ddl_tc_ec": {"preset": "ddl_tc_ec", "gate": "two_layer", "gate_width": 3},
        "ddl_cc": {"preset": "ddl_cc", "value_target": "code"},
        "blended_code": {"blend": "annealed", "value_target": "code", "update_rule": "write_only"},
    },
    "denseformer": {
        "groups": {"stored": "groups", "period": 3, "older_init": 0.2},
        "groups_apart": {"stored": "groups", "period": 2, "dilation": 2, "granularity": "sublayer"},
    },
    "elc_bert": {"large_eps": {"variant": "normalized", "source_eps": 0.1}},
    "frac_connections": {
        "large_scores": {"scale_init": 0.3, "n_fractions": 2},
        "unmixed_static": {"residual": "identity", "weights": "static", "n_fractions": 2},
        "unmixed_streams": {"residual": "identity", "form": "lucidrains", "n_streams": 2, "n_fractions": 2},
    },
    "hyper_connections": {
        "large_scores": {"scale_init": 0.3, "layer_eps": 0.1, "n_streams": 2},
        "large_eps": {"norm": "rms", "rms_eps": 0.1, "read_out": "mean", "n_streams": 2},
        "unmixed_affine": {"residual": "identity", "norm": "layer_affine", "n_streams": 3},
    },
    "mhc": {
        "every_eps": {
            "scores": "joint",
            "norm_eps": 0.1,
            "residual": "sinkhorn",
            "rounds": 2,
            "order": "destinations_first",
            "start": "exp_minus_max",
            "start_eps": 0.1,
            "sum_eps": 0.05,
            "read_eps": 0.02,
            "write_eps": 0.03,
            "n_streams": 3,
        },
        "by_stream": {"scores": "per_stream", "rounds": 1, "start": "softmax", "start_eps": 0.1, "read_out": "mean"},
        "lucidrains_jointly": {
            "preset": "lucidrains_v2",
            "scores": "joint",
            "order": "destinations_first",
            "rounds": 1,
            "n_streams": 2,
        },
        "hy_v4_mixed": {"preset": "hy_v4", "residual": "sinkhorn", "order": "sources_first", "rounds": 1, "n_streams": 2},
        "unmixed": {"residual": "identity", "read_out": "learned", "scores": "per_stream", "n_streams": 2},
        "glm_as_sum": {"preset": "glm5", "read_out": "sum", "start": "exp", "rounds": 1, "init": "lucidrains"},
        "lucidrains_v1": {"preset": "lucidrains_v1", "rounds": 2, "n_streams": 3, "init": "lucidrains"},
        "lucidrains_unmixed": {"residual": "identity", "scores": "per_stream", "n_streams": 3, "init": "lucidrains"},
        "deepseek_v41_mean": {"preset": "deepseek_v41", "read_out": "mean", "rounds": 1, "n_streams": 3},
        "deepseek_v41_now": {"preset": "deepseek_v41", "read": "current", "read_out": "learned", "rounds": 1, "n_streams": 2},
        "depthbench_mean": {"preset": "depthbench", "rounds": 2, "n_streams": 3, "read_out": "mean", "init": "preserving"},
        "depthbench_linear": {"preset": "depthbench", "rounds": 1, "n_streams": 2, "coefficients": "linear"},
        "tanh": {"coefficients": "tanh", "scores": "per_stream", "rounds": 1, "n_streams": 2},
        "delayed_permutations": {"residual": "permutations", "read": "delayed", "read_out": "learned", "init": "mhc_lite"},
        "eight": {"residual": "kronecker", "n_streams": 8},
        "five": {"residual": "spectral", "n_streams": 5, "init": "mhc_lite"},
        "three": {"residual": "spectral", "n_streams": 3, "coefficients": "tanh"},
        "two": {"residual": "spectral", "n_streams": 2},
        "own_destinations": {"residual": "destination_softmax", "scores": "per_stream", "init": "depthbench"},
        "drawn": {"residual": "orthogonal", "init": "deepseek_v4"},
    },
    "two_lanes": {
        "from_first": {"first_block": 0, "backout_block": 1},
        "parted": {"first_block": 1, "init": "released"},
    },
    "muddformer": {
        "large_eps": {"weight_eps": 0.5, "dilation": 2, "post_norm": "all"},
        "wide_at_last": {"expand_last": 2, "ways": "single"},
    },
    "laurel": {
        "shared": {"variant": "rw_lr_pa", "rank": 2, "previous_map": "shared", "bound": "sigmoid"},
        "separate": {"variant": "pa", "rank": 2, "previous_map": "separate"},
    },
    "value_embedding": {"last": {"layers": [2], "gate": "modded", "stream": "residual_scalars"}},
    "value_residual": {
        "weighted": {"first": 0.3, "own": 0.8},
        "plus_sparse": {"variant": "plus", "first": 0.3, "own": 0.8, "layers": [2]},
        "dense_sparse": {"variant": "dense", "layers": [2]},
    },
    "mixture_of_depths_attention": {
        "post_off": {"norm": "post", "weights": "off"},
        "post_attention": {"norm": "post", "slots": "attention", "weights": "uniform"},
    },
    "attention": {
        "small_base": {"n_heads": 2, "rope_theta": 100.0, "output_init": "zero", "qk_norm": "after_rope", "bias": "qkv"},
        "branch_swa": {"n_heads": 2, "projected_local": {"kind": "branch_swa", "scores": "shared", "window": 3}},
        "norm_over_all": {"n_heads": 2, "n_kv_heads": 1, "qk_norm": "after_rope", "qk_norm_over": "all_heads", "rope_dim": 2},
        "keys_behind_rotation": {"n_heads": 4, "n_kv_heads": 2, "qk_norm": "key_after_rope", "sink": "learned"},
        "full_sink": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "sink": "learned"},
        "linear": {"n_heads": 2, "head_dim": 4, "rope_scaling": {"kind": "linear", "factor": 3.0}},
        "llama3": {
            "n_heads": 1,
            "rope_scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_seq_len": 100,
            },
        },
        "yarn": {"n_heads": 1, "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 3000}},
        "yarn_exact": {
            "n_heads": 1,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_seq_len": 300,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "bounds": "exact",
                "attention_factor": 1.3,
            },
        },
    },
    "short_swa": {
        "sink": {"n_heads": 2, "window": 3, "sink": "learned", "rope_theta": 50.0},
        "token_sink": {"n_heads": 2, "window": 3, "sink": "per_token", "bias": "all"},
        "keys_behind_canon": {
            "n_heads": 2,
            "qk_norm": "after_local",
            "projected_local": {"kind": "canon", "kernel": 3},
            "projected_branches": ["k"],
            "update_local": {"kind": "smear", "gate_channels": 2},
        },
    },
    "short_conv": {"identity": {"taps_init": "identity", "activation": "none"}},
    "kv_shift": {
        "inside": {"n_heads": 2, "form": "token", "qk_norm": "before_rope", "projected_local": "canon", "bias": "qkv"},
        "token_sink": {"n_heads": 2, "sink": "per_token", "input_local": "canon"},
    },
    "path_attention": {"large_eps": {"n_heads": 2, "w_eps": 0.5, "qk_norm": "per_head", "forget_gate": "inside_scale"}},
    "ngram_embedding": {
        "compressed": {"rows": [7], "compression": [i % 9 for i in range(30)], "fill_id": 3, "heads": 3, "key_eps": 0.3},
        "every_number": {
            **{"order": 2, "heads": 1, "rows": [12], "row_width": 5, "seed": 3, "conv_eps": 0.2, "kernel": 3},
            **{"end_ids": [4], "blank_ids": [5], "hash_vocab": 40, "document_reset": "none"},
        },
        "hash_only": {"rows": [9, 11], "document_reset": "hash_only", "gate": "copysign", "row_multiple": 16},
        "plain_keys": {"preset": "engram", "heads": 1, "rows": [9], "row_width": 2, "conv": "none", "maps": "linear"},
        "splitmix": {"hash": "splitmix64", "rows": [8], "seed": 7},
        "polynomial": {"hash": "polynomial", "rows": [8], "blank_ids": [0], "order": 4},
        "signs": {
            **{"hash": "int32", "order": 2, "heads": 1, "rows": [40], "row_width": None, "maps": "none", "gate": "none"},
            **{"conv": "none", "sign_rows": 5},
        },
        "ungated": {"gate": "none", "conv": "none", "rows": [15], "maps": "biased"},
    },
    "gated_delta_net": {
        "large_eps": {"n_heads": 2, "head_dim": 3, "qk_eps": 0.5},
        "silent_swa": {"n_heads": 2, "projected_local": {"kind": "local_swa", "output_init": "zero"}},
        "branch_conv": {"n_heads": 2, "projected_over": "branch"},
        "shared_chunk": {
            "n_heads": 1,
            "projected_local": {
                "kind": "branch_swa",
                "scores": "shared",
                "window": 4,
                "window_kind": "chunk",
                "form": "plain",
                "rope_theta": 9.0,
            },
        },
        "dynamic": {
            "n_heads": 2,
            "input_local": "token_shift",
            "projected_local": {"kind": "dynamic_conv", "rank": 2},
            "projected_over": "branch",
            "update_local": {"kind": "canon", "scale": "unit_variance"},
        },
        "dynamic_jointly": {
            "n_heads": 2,
            "input_local": "token_shift",
            "projected_local": {"kind": "dynamic_conv", "rank": 2},
        },
    },
    "canon": {
        "both": {"kernel": 3, "activation": "silu", "bias": "channel"},
        "returned": {"kernel": 2, "taps_init": "identity"},
    },
    "dynamic_conv": {
        "scaled": {"scale": "unit_variance", "rank": 2, "form": "plain", "kernel": 2},
        "heads": {"taps": "per_head", "head_dim": 4, "kernel": 3},
    },
    "token_shift": {"slow": {"power": 0.2}},
    "smear": {"wide": {"gate_channels": 6}},
    "local_swa": {
        "small_base": {"window": 4, "n_heads": 2, "n_kv_heads": 1, "head_dim": 6, "rope_theta": 20.0},
        "chunk": {"window": 4, "n_heads": 2, "head_dim": 4, "window_kind": "chunk", "activation": "silu"},
    },
    "branch_swa": {
        "parts": {"parts": [[2, 1], [1, 4], [1, 2]], "window": 3, "form": "residual"},
        "shared": {"parts": [[1, 2], [1, 2], [1, 4]], "window": 3, "scores": "shared", "rope_theta": 20.0},
        "chunk": {"window": 4, "window_kind": "chunk", "activation": "none", "form": "plain"},
    },
    "relu2": {"local": {"d_ff": 16, "input_local": "canon", "projected_local": {"kind": "local_swa", "window": 2}}},
    "gelu": {
        "rising": {"d_ff": 256, "d_ff_by_depth": "rising"},
        "dynamic": {
            "d_ff": 16,
            "projected_local": {"kind": "dynamic_conv", "taps": "per_head", "head_dim": 4},
            "update_local": {"kind": "dynamic_conv", "rank": 2},
        },
    },
}


class Case(NamedTuple):
    """A configuration by the name of its case, and the options that it was made from."""

    name: str
    config: Any
    options: dict[str, Any]


def rows_of(table: Table[Any]) -> list[Row[Any]]:
    """The rows of this package; what others add is theirs to test."""
    return [row for row in table if row.config.__module__.startswith("twoaxis.")]


def cases_of(row: Row[Any]) -> Iterator[Case]:
    """The examples of a row and what is here for it."""
    for name, options in {**row.examples, **MORE.get(row.kind, {})}.items():
        yield Case(f"{row.kind}-{name}", row.config.from_data(options), dict(options))


def every_case() -> list[Case]:
    """The cases of all tables."""
    return [case for table in TABLES for row in rows_of(table) for case in cases_of(row)]


def nested(config: Config) -> Iterator[Config]:
    """A configuration and those within it."""
    yield config
    for name in type(config).model_fields:
        if isinstance(value := getattr(config, name), Config):
            yield from nested(value)
