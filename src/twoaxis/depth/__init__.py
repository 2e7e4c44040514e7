"""Floor 2: the depth axis. One row per method that reads and writes the residual stream."""

from math import ceil

from twoaxis.core.position import LayerStack
from twoaxis.core.registry import Row, Table
from twoaxis.depth.attention_residuals import AttentionResiduals, AttentionResidualsConfig
from twoaxis.depth.axis import DepthAxis
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer
from twoaxis.depth.deep_cross_attention import DeepCrossAttention, DeepCrossAttentionConfig
from twoaxis.depth.deep_delta import DeepDelta, DeepDeltaConfig
from twoaxis.depth.delta_attention_residuals import DeltaAttentionResiduals, DeltaAttentionResidualsConfig
from twoaxis.depth.denseformer import DenseFormer, DenseFormerConfig
from twoaxis.depth.depth_attention import DepthAttention, DepthAttentionConfig
from twoaxis.depth.elc_bert import ElcBert, ElcBertConfig
from twoaxis.depth.frac_connections import FracConnections, FracConnectionsConfig
from twoaxis.depth.gated_residual import GatedResidual, GatedResidualConfig
from twoaxis.depth.hyper_connections import HyperConnections, HyperConnectionsConfig
from twoaxis.depth.laurel import Laurel, LaurelConfig
from twoaxis.depth.laurel_gemma3n import LaurelGemma3n, LaurelGemma3nConfig
from twoaxis.depth.lime import Lime, LimeConfig
from twoaxis.depth.mhc import MHC, MHCConfig
from twoaxis.depth.muddformer import MUDDFormer, MUDDFormerConfig
from twoaxis.depth.per_layer_embedding import PerLayerEmbedding, PerLayerEmbeddingConfig
from twoaxis.depth.residual import Residual, ResidualConfig
from twoaxis.depth.residual_scalars import ResidualScalars, ResidualScalarsConfig
from twoaxis.depth.value_embedding import ValueEmbedding, ValueEmbeddingConfig
from twoaxis.depth.value_residual import ValueResidual, ValueResidualConfig
from twoaxis.depth.vertical_attention import VerticalAttention, VerticalAttentionConfig

SOURCE_BLOCKS = 8
"""The number of source blocks that the report on Attention Residuals chooses, arXiv:2603.15031, section 5."""


NANOCHAT = {
    "embedding": "normalised_start",
    "granularity": "block",
    "backout_layer": "middle",
    "init": "nanochat",
}
"""The residual scalars of karpathy/nanochat."""


def _in_blocks(stack: LayerStack) -> dict[str, int]:
    return {"block_size": ceil(stack.n_sublayers / SOURCE_BLOCKS)}


DEPTH: Table[DepthConfig] = Table(
    "depth mixer",
    DepthConfig,
    "twoaxis.depth",
    [
        Row(
            ResidualConfig,
            "adds every update to one stream",
            {"default": {}},
            certified={"default": "swa-mistral"},
        ),
        Row(
            ResidualScalarsConfig,
            "learned scalars on the stream and on the embedding",
            {
                "default": {},
                "normalised_start": {"embedding": "normalised_start"},
                "raw": {"embedding": "raw"},
                "nanochat": NANOCHAT,
            },
            certified={"nanochat": "nanochat-ve-f64"},
            sums="read",
        ),
        Row(
            AttentionResidualsConfig,
            "reads a softmax mixture of all earlier outputs or block sums",
            {
                "full": {},
                "block2": {"block_size": 2},
                "block3": {"block_size": 3},
                "layers": {"block_size": 2, "count": "layer"},
                "heads": {"n_heads": 2},
                "token": {"query": "token", "n_heads": 2},
                "low_rank": {"key_rank": 3, "block_size": 2, "source_prior": "log_count"},
                "low_rank_heads": {"key_rank": 4, "n_heads": 2, "key_scale": "head", "query": "token"},
                "sum": {"mixture": "sum", "block_size": 2},
                "two_phase": {"schedule": "two_phase"},
                "two_phase_block3": {"schedule": "two_phase", "block_size": 3, "n_heads": 2, "mixture": "sum"},
                "inkling2": {"form": "inkling2", "block_size": 2, "count": "layer"},
            },
            certified={
                "full": "attnres-full",
                "block2": "attnres-block2",
                "block3": "attnres-block4",
                "layers": "attnres-block-qwen3",
                "two_phase": "attnres-full",
                "inkling2": "attnres-inkling2-op",
            },
            at_scale={
                "AttnRes full": {},
                "AttnRes blocks": _in_blocks,
                "AttnRes blocks, two-phase": lambda stack: {**_in_blocks(stack), "schedule": "two_phase"},
            },
            retrofit={"mixture": "sum"},
            sums="read",
        ),
        Row(
            DeltaAttentionResidualsConfig,
            "adds a softmax mixture of earlier outputs or block deltas to the stream it reads",
            {
                "delta": {},
                "block": {"block_size": 2, "embedding": "first_read"},
                "as_released": {"block_size": 2, "entries": "as_released"},
                "retrofit": {"block_size": 3, "running_source": "included"},
                "alpha_null": {"gate": "alpha", "null_source": "learned", "count": "layer"},
                "null": {"null_source": "learned"},
                "values": {"value_routing": "separate"},
                "released_values": {"value_routing": "separate", "embedding": "never"},
            },
            certified={
                "delta": "deltares",
                "block": "deltares-block",
                "as_released": "deltares-block-asreleased",
                "null": "deltares-null",
                "released_values": "deltares-v",
            },
            at_scale={"Delta AttnRes": {}, "Delta AttnRes blocks": _in_blocks},
            retrofit={"gate": "alpha"},
            sums="read",
        ),
        Row(
            DepthAttentionConfig,
            "attends to a window of earlier states between blocks: ShortSWA along depth",
            {
                "paper": {"window": 2, "n_heads": 2, "head_dim": 3},
                "all": {"window": None, "n_heads": 1, "states": "raw", "head": "read"},
                "sublayers": {"window": 3, "n_heads": 2, "granularity": "sublayer", "output": "none"},
                "in_place": {"window": None, "n_heads": 1, "mode": "replace", "output": "none", "head": "read"},
                "scaled": {"window": 3, "n_heads": 4, "output_init": "scaled"},
                "itself": {"window": 1, "n_heads": 1},
                "own": {"projections": "own", "granularity": "sublayer", "window": 3, "n_heads": 2, "head_dim": 3},
                "own_replace": {
                    "projections": "own",
                    "granularity": "sublayer",
                    "window": None,
                    "n_heads": 2,
                    "head_dim": 4,
                    "mode": "replace",
                    "states": "raw",
                },
                "own_itself": {"projections": "own", "granularity": "sublayer", "window": 1, "n_heads": 1},
                "own_blocks": {"projections": "own", "window": 2, "n_heads": 2, "head": "read"},
            },
            at_scale={"Depth ShortSWA": {}},
            sums="read",
        ),
        Row(
            DeepCrossAttentionConfig,
            "reads sums of all earlier block deltas, separately for q, k and v",
            {
                "dca": {},
                "k1": {"k": 1, "score_vector": "per_source", "activation": "silu"},
                "package": {"k": 1, "middle": "drop", "score_norm": "rms", "activation": "relu", "score_std": 0.01},
                "v1": {"variant": "v1"},
                "v2": {"variant": "v2", "k": 1},
                "v3": {"variant": "v3", "activation": "identity"},
            },
            certified={"package": "dca-gpt-k1", "v1": "dca-grn-v1"},
            at_scale={"DCA k=1": {"k": 1}, "DCA": {}},
            sums="read",
        ),
        Row(
            DeepDeltaConfig,
            "overwrites the stream along the update's direction",
            {
                "paper": {},
                "code": {"value_target": "code"},
                "two_layer": {"gate": "two_layer", "gate_width": 5, "value_target": "code_linear"},
                "two_layer_bias": {"gate": "two_layer_bias", "gate_width": 5},
                "write_only": {"update_rule": "write_only"},
                "blend": {"blend": "annealed"},
                "ddl_tc": {"preset": "ddl_tc"},
                "time_code": {"value_channels": 3, "compressor": "time", "value_target": "code"},
                "time_conv": {"value_channels": 2, "compressor": "time", "expansion": "embedding_conv", "kernel_size": 3},
                "channel_linear": {"value_channels": 4, "compressor": "channel", "value_target": "code_linear"},
                "ddl_cc_ec": {"preset": "ddl_cc_ec"},
                "channel_conv_code": {
                    "value_channels": 3,
                    "compressor": "channel",
                    "expansion": "embedding_conv",
                    "value_target": "code",
                },
                "channel_write_only": {"value_channels": 2, "compressor": "channel", "update_rule": "write_only"},
            },
            certified={
                "code": "ddl-vdim1",
                "two_layer": "ddl-vdim1-twolayerbeta",
                "time_code": "ddl-tc",
                "channel_conv_code": "ddl-cc-ec",
            },
            at_scale={
                "DDL": {},
                "DDL CC": {"value_channels": 4, "compressor": "channel"},
                "DDL TC": {"value_channels": 4, "compressor": "time"},
            },
            retrofit={"blend": "annealed"},
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
            certified={
                "1x1": "denseformer-lm-1x1",
                "2x1": "denseformer-lm-2x1",
                "connect_to_last": "denseformer-connecttolast",
                "skip_gains": "denseformer-skipgains",
            },
            at_scale={"DenseFormer 1x1": {}, "DenseFormer 4x5": {"dilation": 4, "period": 5}},
            sums="read",
        ),
        Row(
            ElcBertConfig,
            "reads a learned convex sum of earlier block outputs, which hold no residual stream",
            {
                **{variant: {"variant": variant} for variant in ("base", "zero", "normalized", "weighted_output")},
                "raw_embedding": {"variant": "normalized", "embedding_norm": "none"},
                "normed_embedding": {"variant": "weighted_output", "embedding_norm": "layer"},
                "blend": {"variant": "weighted_output", "blend": "annealed"},
            },
            certified={
                "base": "elcbert-base",
                "zero": "elcbert-zero",
                "normalized": "elcbert-normalized",
                "weighted_output": "elcbert-weighted_output",
            },
            at_scale={"ELC-BERT": {}},
            retrofit={"variant": "weighted_output", "blend": "annealed"},
            sums="read",
        ),
        Row(
            FracConnectionsConfig,
            "cuts the residual stream into fractions that each sublayer reads, mixes and writes",
            {
                "dynamic": {"n_fractions": 2},
                "static": {"weights": "static"},
                "lucidrains": {"form": "lucidrains", "n_fractions": 2},
                "lucidrains_streams": {"form": "lucidrains", "n_streams": 2, "n_fractions": 2},
                "lucidrains_static": {"form": "lucidrains", "n_fractions": 4, "weights": "static"},
            },
            certified={"lucidrains": "frac-dynamic-lucidrains-f64", "lucidrains_streams": "hc-dynamic-s2f2-lucidrains-f64"},
            at_scale={"Frac-Connections": {}},
            sums="read",
        ),
        Row(
            HyperConnectionsConfig,
            "keeps n residual streams that each sublayer reads, mixes and writes with learned weights",
            {
                "dynamic": {},
                "static": {"weights": "static", "n_streams": 3},
                "affine": {"n_streams": 2, "norm": "layer_affine", "activation": "none"},
                "lucidrains": {"n_streams": 3, "norm": "rms_gain"},
                "one_stream": {"n_streams": 1},
            },
            certified={
                "dynamic": "hc-dynamic-paper-f64",
                "static": "hc-static-paper-f64",
                "lucidrains": "hc-dynamic-lucidrains-f64",
                "one_stream": "hc-dynamic-paper-f64",
            },
            at_scale={"Hyper-Connections": {}},
            sums="read",
        ),
        Row(
            MHCConfig,
            "reads, mixes and writes n residual streams, mixing them by doubly stochastic matrices",
            {
                "paper": {},
                "deepseek_v4": {"preset": "deepseek_v4", "rounds": 3, "init": "deepseek_v4"},
                "glm5": {"preset": "glm5", "n_streams": 2, "rounds": 2, "init": "deepseek_v4"},
                "lucidrains": {"preset": "lucidrains_v2", "n_streams": 3, "rounds": 3, "init": "lucidrains"},
                "logarithms": {"preset": "lucidrains_v1", "n_streams": 2, "start": "log"},
                "hy_v4": {"preset": "hy_v4", "n_streams": 3, "init": "hy_v4", "write_magnitude": 1.5},
                "identity": {"preset": "hy_v4", "n_streams": 2, "write_eps": 0.0, "read_out": "mean"},
            },
            certified={
                "deepseek_v4": "mhc-deepseekv4-iters2-f64",
                "glm5": "mhc-glm5next-f64",
                "lucidrains": "mhc-lucidrains-v2-f64",
                "logarithms": "mhc-lucidrains-v1-logdomain-f64",
                "hy_v4": "ihc-hyv4-f64",
            },
            at_scale={"mHC": {}},
            sums="read",
        ),
        Row(
            GatedResidualConfig,
            "reads n residual streams through a low-rank elementwise gate and mixes none of them",
            {"preserving": {"rank": 5}, "normal": {"n_streams": 2, "rank": 3, "init": "normal"}},
            certified={"preserving": "gatedres-qwen4exp-f64", "normal": "gatedres-qwen4exp-f64"},
            at_scale={"gated residual": lambda stack: {"rank": min(320, stack.d_model)}},
            sums="read",
        ),
        Row(
            MUDDFormerConfig,
            "sums all block outputs for queries, keys, values and the residual, with weights that depend on the token",
            {
                "qkvr": {},
                "released": {"hidden": "round64", "expand_last": 4, "gelu": "tanh"},
                "norms": {"source_norm": "rms", "post_norm": "all"},
                "source_norm": {"source_norm": "rms"},
                "norms_code": {
                    "source_norm": "rms",
                    "post_norm": "residual",
                    "hidden": "round64",
                    "expand_last": 4,
                    "gelu": "tanh",
                },
                "single_2x2": {"ways": "single", "dilation": 2, "period": 2, "post_norm": "residual"},
                "static_parallel": {"weights": "static", "residual": "parallel", "period": 2},
                "parallel": {"residual": "parallel", "source_norm": "rms", "window": 1},
                "pythia": {"residual": "parallel", "hidden": "round64", "expand_last": 4},
            },
            certified={
                "qkvr": "muddformer-plainhid-f64",
                "released": "muddformer-jax-nonorm-f32",
                "norms_code": "muddformer-jax-prepostnorm-f32",
                "pythia": "muddpythia-qkvr-f64",
            },
            at_scale={"MUDDFormer": {}},
            sums="read",
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
            at_scale={"Vertical Attention": {}},
            retrofit={"skip": "gated"},
            sums="read",
        ),
        Row(
            LaurelConfig,
            "learns weights and low-rank maps of the residual way of each block",
            {
                "rw_lr": {"rank": 3},
                "rw": {"variant": "rw", "bound": "sigmoid"},
                "lr": {"variant": "lr", "rank": 2, "granularity": "sublayer"},
                "pa": {"variant": "pa", "rank": 3, "n_previous": 2},
                "identity": {"variant": "rw_lr_pa", "previous_map": "identity", "granularity": "sublayer"},
                "rw_lr_pa": {"variant": "rw_lr_pa", "rank": 2},
            },
            at_scale={"LAuReL": {}},
        ),
        Row(
            LaurelGemma3nConfig,
            "averages the stream with a low-rank map of the input of attention, as in Gemma 3n",
            {"default": {"rank": 3}},
            certified={"default": "laurel-lr-gemma3n-f64"},
            at_scale={"LAuReL of Gemma 3n": {}},
        ),
        Row(
            LimeConfig,
            "attends with keys and values routed from the heads of all earlier layers",
            {"released": {}, "plain": {"init": "plain"}},
            certified={"released": "lime-static-llama-f64", "plain": "lime-static-llama-f64"},
            at_scale={"LIMe": {}},
            retrofit={"init": "plain"},
        ),
        Row(
            ValueResidualConfig,
            "attends with the first layer's values mixed into each layer's own",
            {
                "learnable": {},
                "plain": {"first": 0.0, "own": 1.0},
                "constant": {"variant": "constant", "first": 2.0, "own": 1.0, "layers": [2]},
                "plus": {"variant": "plus"},
                "dense": {"variant": "dense"},
                "gated": {"variant": "gated"},
                "svformer": {"variant": "svformer"},
            },
            certified={
                "constant": "valueres-resformer-llama-f64",
                "gated": "valueres-learned-xt-f64",
                "svformer": "valueres-svformer-llama-f64",
            },
            retrofit={"first": 0.0, "own": 1.0},
        ),
        Row(
            ValueEmbeddingConfig,
            "attends with values to which rows of tables of tokens are added, gated",
            {
                "default": {},
                "nanochat": {"stream": {"kind": "residual_scalars", **NANOCHAT}},
                "modded": {"gate": "modded"},
                "none": {"gate": "none", "layers": [0]},
                "plain": {"init": "plain"},
            },
            certified={"nanochat": "nanochat-ve-f64"},
            at_scale={"value embeddings": {}},
            retrofit={"init": "plain"},
        ),
        Row(
            PerLayerEmbeddingConfig,
            "adds a vector of the token, gated by the stream, behind every block",
            {
                "default": {"d_embedding": 3},
                "gemma3n": {"preset": "gemma3n", "d_embedding": 4, "stream": {"kind": "laurel_gemma3n", "rank": 3}},
                "plain": {"d_embedding": 3, "init": "plain"},
            },
            certified={"default": "gemma4-ple-f64"},
            at_scale={"per-layer embeddings": {}},
            retrofit={"init": "plain"},
        ),
    ],
)

__all__ = [
    "DEPTH",
    "MHC",
    "AttentionResiduals",
    "AttentionResidualsConfig",
    "DeepCrossAttention",
    "DeepCrossAttentionConfig",
    "DeepDelta",
    "DeepDeltaConfig",
    "DeltaAttentionResiduals",
    "DeltaAttentionResidualsConfig",
    "DenseFormer",
    "DenseFormerConfig",
    "DepthAttention",
    "DepthAttentionConfig",
    "DepthAxis",
    "DepthConfig",
    "DepthEnds",
    "DepthMixer",
    "ElcBert",
    "ElcBertConfig",
    "FracConnections",
    "FracConnectionsConfig",
    "GatedResidual",
    "GatedResidualConfig",
    "HyperConnections",
    "HyperConnectionsConfig",
    "Laurel",
    "LaurelConfig",
    "LaurelGemma3n",
    "LaurelGemma3nConfig",
    "Lime",
    "LimeConfig",
    "MHCConfig",
    "MUDDFormer",
    "MUDDFormerConfig",
    "PerLayerEmbedding",
    "PerLayerEmbeddingConfig",
    "Residual",
    "ResidualConfig",
    "ResidualScalars",
    "ResidualScalarsConfig",
    "ValueEmbedding",
    "ValueEmbeddingConfig",
    "ValueResidual",
    "ValueResidualConfig",
    "VerticalAttention",
    "VerticalAttentionConfig",
]
