"""DeepSeek-V3, Kimi, and DeepSeek-V4: latent or compressed attention, experts, and parallel residual streams (mHC).

Kimi K2 has the form of DeepSeek-V3. Kimi Linear, and the text decoder of Kimi K3, have linear attention in most layers.
"""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import AttentionResidualsConfig, DepthConfig, MHCConfig, ResidualConfig
from twoaxis.planner.model.compressed_attention import CompressedAttention, Compressor, Indexer
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.hugging_face.llama_family import SILU, model, n_layers, swiglu
from twoaxis.planner.model.latent_attention import KimiDeltaAttention, LatentAttention
from twoaxis.planner.model.part import Experts, Part
from twoaxis.planner.model.shape import ModelShape

ROUTING = {"n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"}
"""How experts are selected and weighted, which changes no count."""

KNOWN_V3 = ROUTING | {"head_dim", "qk_head_dim", "num_nextn_predict_layers", "intermediate_size", "rope_interleave"}
"""Keys that are not always read: widths that follow from others, layers that generation leaves out, and so on."""

ACTIVATIONS = (*SILU, "situ")

ROUTER = {"moe_renormalize", "moe_router_activation_func", "num_expert_group", "use_grouped_topk"}
LAYERS = {"layer_types", "mlp_layer_types", "first_k_dense_replace", "linear_num_heads", "linear_head_dim"}
OF_KIMI = (
    KNOWN_V3
    | ROUTER
    | LAYERS
    | {"linear_conv_kernel_dim", "linear_attn_config.gate_lower_bound", "activation_situ_beta", "activation_situ_linear_beta"}
)
"""Keys that are not always read: the selection of experts, other ways to state the layers, and options without a cost."""

OF_PARTS = {"vision_config", "ignore_index", "media_placeholder_token_id", "image_placeholder", "use_unified_vision_chunk"}
"""Keys that do not concern the text decoder."""


def read_deepseek_v3(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` deepseek_v3 and kimi_k2.

    The layers of `num_nextn_predict_layers`, which predict further tokens, are left out, as in transformers.
    """
    refuse_sparse_layers(fields)
    fields.word("hidden_act", "silu", SILU)
    d_expert, layers = fields.size("moe_intermediate_size"), n_layers(fields)
    # A key of null says that there are none.
    shared = fields.size("n_shared_experts", default=0 if "n_shared_experts" in fields.data else 1, least=0)
    routed = Experts(
        width=fields.size("hidden_size"),
        n_experts=fields.size("n_routed_experts", default=256),
        per_token=fields.size("num_experts_per_tok", default=8),
        d_expert=d_expert,
        d_shared=d_expert * shared,
        router="corrected",
    )
    mixer, first = latent_attention(fields, q_rank=1536), fields.size("first_k_dense_replace", default=3, least=0)
    blocks = [(mixer, swiglu(fields) if layer < first else routed) for layer in range(layers)]
    return model(fields, name, blocks, 4096)


def latent_attention(fields: Fields, q_rank: int | None, **options) -> LatentAttention:
    """Reads latent attention."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    if kv_heads != heads:
        allowed = f"num_attention_heads={heads}, since all heads widen one latent"
        raise ConfigError(problem("num_key_value_heads", kv_heads, allowed, "correct it in the file"))
    return LatentAttention(
        n_heads=heads,
        kv_rank=fields.size("kv_lora_rank", default=512),
        q_rank=fields.optional_size("q_lora_rank", default=q_rank),
        nope_dim=fields.size("qk_nope_head_dim", default=128),
        rope_dim=fields.size("qk_rope_head_dim", default=64),
        value_dim=fields.size("v_head_dim", default=128),
        biases="outer" if fields.flag("attention_bias", False) else "none",
        **options,
    )


def refuse_sparse_layers(fields: Fields) -> None:
    """Refuses options of newer models of the family."""
    fields.refuse(
        "index_topk", "the indexer of sparse attention is not modelled in this family; remove it to plan the dense form"
    )
    if fields.size("moe_layer_freq", default=1) != 1:
        got = fields.size("moe_layer_freq")
        raise ConfigError(problem("moe_layer_freq", got, "1, experts in every layer", "other patterns are not modelled"))


def read_kimi_linear(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` kimi_linear, with the keys that the text decoder of Kimi K3 adds to it.

    `attn_res_block_size` counts layers: block Attention Residuals. The published model has a read without effect before
    the first sublayer, whose 2 D parameters are left out here.
    """
    refuse_sparse_layers(fields)
    n = n_layers(fields)
    full, linear, routed = _full_layers(fields, n), _linear(fields), _feed_forwards(fields, n)
    positions = "none" if fields.flag("mla_use_nope", True) else "rotary"
    gate = "full" if fields.flag("mla_use_output_gate", False) else "none"
    latent = latent_attention(fields, q_rank=None, positions=positions, output_gate=gate)
    blocks = [(latent if layer in full else linear, routed[layer]) for layer in range(n)]
    length = fields.size("model_max_length", default=1_048_576)
    eps = fields.number("rms_norm_eps", 1e-5)
    return model(fields, name, blocks, length, norm_eps=eps, depth=_depth(fields))


def read_kimi_k3(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` kimi_k3: its text decoder alone, which the name of the model then says."""
    text = fields.table("text_config")
    text.word("model_type", "kimi_linear", ("kimi_linear",))
    return read_kimi_linear(text, f"{name} (text decoder)")


def _depth(fields: Fields) -> DepthConfig:
    size = fields.optional_size("attn_res_block_size")
    return ResidualConfig() if size is None else AttentionResidualsConfig(block_size=size, count="layer")


def _full_layers(fields: Fields, n: int) -> set[int]:
    """Layers with latent attention, counted from 0; files count them from 1."""
    table = fields.table("linear_attn_config")
    full, linear = (table.sizes(key, least=1, most=n) for key in ("full_attn_layers", "kda_layers"))
    if full is not None:
        if linear is not None and sorted(full + linear) != list(range(1, n + 1)):
            allowed = f"each of the layers 1 to {n} once, together with full_attn_layers"
            raise ConfigError(problem("linear_attn_config.kda_layers", linear, allowed, "correct the two lists"))
        return {layer - 1 for layer in full}
    types = fields.words("layer_types", ("full_attention", "linear_attention"), n)
    if types is not None:
        return {layer for layer, kind in enumerate(types) if kind == "full_attention"}
    return {layer for layer in range(n) if layer and layer % 4 == 0}


def _linear(fields: Fields) -> KimiDeltaAttention:
    table = fields.table("linear_attn_config")
    return KimiDeltaAttention(
        n_heads=table.size("num_heads", default=fields.size("linear_num_heads", default=32)),
        head_dim=table.size("head_dim", default=fields.size("linear_head_dim", default=128)),
        kernel=table.size("short_conv_kernel_size", default=fields.size("linear_conv_kernel_dim", default=4), least=2, most=8),
        gate="full" if table.flag("use_full_rank_gate", False) else "low_rank",
    )


def _feed_forwards(fields: Fields, n: int) -> list[Part]:
    """Dense layers first, then experts, in a latent if the file has a width for it."""
    dense, types = swiglu(fields, activations=ACTIVATIONS), fields.words("mlp_layer_types", ("dense", "sparse"), n)
    first = fields.size("first_k_dense_replace", default=1, least=0)
    is_dense = [layer < first for layer in range(n)] if types is None else [kind == "dense" for kind in types]
    if "num_experts" in fields.data and not fields.given("num_experts"):
        return [dense] * n
    d_expert, width = fields.size("moe_intermediate_size"), fields.optional_size("routed_expert_hidden_size")
    latent = "none" if width is None else "rms" if fields.flag("latent_moe_use_norm", False) else "plain"
    experts = Experts(
        width=width or fields.size("hidden_size"),
        n_experts=fields.size("num_experts", "num_local_experts", default=256),
        per_token=fields.size("num_experts_per_token", "num_experts_per_tok", default=8),
        d_expert=d_expert,
        d_shared=d_expert * fields.size("num_shared_experts", "n_shared_experts", default=1, least=0),
        router="corrected",
        latent=latent,
    )
    return [dense if own else experts for own in is_dense]


SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""The form of a layer by its rate in published files."""


ALTERNATIVES = {"compress_ratios", "compress_rates", "compress_rate_csa", "compress_rate_hca", "num_hash_layers"}
INDEXER = {"index_n_heads", "index_head_dim", "index_topk"}
KNOWN_V4 = (
    ROUTING | ALTERNATIVES | INDEXER | {"swiglu_limit", "compress_rope_theta", "num_nextn_predict_layers", "expert_dtype"}
)
"""Keys that are not always read: other ways to state the layers, options of some layers, and options without a cost."""


def read_deepseek_v4(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` deepseek_v4: defaults are those of transformers, the sizes of DeepSeek-V4-Flash.

    The layers of `num_nextn_predict_layers` are left out, as in transformers.
    """
    fields.word("hidden_act", "silu", SILU)
    if fields.size("num_key_value_heads", default=1) != 1:
        got = fields.size("num_key_value_heads")
        raise ConfigError(problem("num_key_value_heads", got, "1, one key for all heads", "correct it in the file"))
    for key in ("attention_bias", "mlp_bias"):
        fields.refuse(key, "must be false, since biases are not modelled in this family; remove it")
    n = n_layers(fields)
    hashed = _hash_layers(fields, n)
    blocks = [(_attention(fields, kind), _experts(fields, hashed[layer])) for layer, kind in enumerate(_layer_types(fields, n))]
    return model(fields, name, blocks, max_seq_len=1_048_576, depth=_streams(fields))


def _streams(fields: Fields) -> MHCConfig:
    eps = fields.number("hc_eps", 1e-6)
    return MHCConfig(
        preset="deepseek_v4",
        n_streams=fields.size("hc_mult", default=4, least=2),
        rounds=fields.size("hc_sinkhorn_iters", default=20),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        start_eps=eps,
        sum_eps=eps,
        read_eps=eps,
    )


def _layer_types(fields: Fields, n: int) -> list[str]:
    """The form of attention in each layer: by name, by rate, or as in transformers heavy twice, then alternating."""
    types = fields.words("layer_types", tuple(OF_RATIO.values()), n)
    if types is not None:
        return types
    ratios = fields.sizes("compress_ratios", least=0, length=n)
    if ratios is None:
        return [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(n)]
    for ratio in ratios:
        if ratio not in OF_RATIO:
            raise ConfigError(problem("compress_ratios entry", ratio, "0, 4 or 128", "name the layers in layer_types"))
    return [OF_RATIO[ratio] for ratio in ratios]


def _attention(fields: Fields, kind: str) -> CompressedAttention:
    heads, width, groups = (
        fields.size("num_attention_heads"),
        fields.size("head_dim", default=512),
        fields.size("o_groups", default=8),
    )
    if heads * width % groups:
        allowed = f"a divisor of all {heads * width} channels of the heads"
        raise ConfigError(problem("o_groups", groups, allowed, "correct one of them"))
    part = fields.number("partial_rotary_factor", 64 / 512, most=1)
    return CompressedAttention(
        n_heads=heads,
        head_dim=width,
        q_rank=fields.size("q_lora_rank", default=1024),
        rope_dim=fields.size("qk_rope_head_dim", default=int(width * part), most=width),
        window=fields.size("sliding_window", default=128),
        groups=groups,
        output_rank=fields.size("o_lora_rank", default=1024),
        compressor=_compressor(fields, kind),
    )


def _compressor(fields: Fields, kind: str) -> Compressor | None:
    rates = fields.table("compress_rates")
    if kind == HEAVY:
        return Compressor(rates.size(HEAVY, default=fields.size("compress_rate_hca", default=128)))
    if kind == SPARSE:
        indexer = Indexer(
            n_heads=fields.size("index_n_heads", default=64),
            head_dim=fields.size("index_head_dim", default=128),
            top_k=fields.size("index_topk", default=512),
        )
        return Compressor(rates.size(SPARSE, default=fields.size("compress_rate_csa", default=4)), indexer)
    return None


def _hash_layers(fields: Fields, n: int) -> list[bool]:
    """Whether the experts of each layer are found by token id."""
    types = fields.words("mlp_layer_types", ("hash_moe", "moe"), n)
    if types is not None:
        return [kind == "hash_moe" for kind in types]
    first = fields.size("num_hash_layers", default=3, least=0)
    return [layer < first for layer in range(n)]


def _experts(fields: Fields, hashed: bool) -> Experts:
    # transformers gives the shared experts the width of one, whatever their number.
    if fields.size("n_shared_experts", default=1) != 1:
        got = fields.size("n_shared_experts")
        raise ConfigError(problem("n_shared_experts", got, "1", "other numbers are not defined in this family"))
    d_expert = fields.size("moe_intermediate_size")
    return Experts(
        width=fields.size("hidden_size"),
        n_experts=fields.size("n_routed_experts", default=256),
        per_token=fields.size("num_experts_per_tok", default=6),
        d_expert=d_expert,
        d_shared=d_expert,
        router="hash" if hashed else "corrected",
    )
