"""DeepSeek-V3 and Kimi: latent attention, and experts behind a few dense layers.

Kimi K2 has the form of DeepSeek-V3. Kimi Linear, and the text decoder of Kimi K3, have linear attention in most layers.
"""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import AttentionResidualsConfig, DepthConfig, ResidualConfig
from twoaxis.planner.model.delta_attention import KimiDeltaAttention
from twoaxis.planner.model.experts import Experts
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.hugging_face.llama import SILU, model, n_layers, swiglu
from twoaxis.planner.model.latent_attention import LatentAttention
from twoaxis.planner.model.part import Part
from twoaxis.planner.model.shape import ModelShape

ROUTING = {"n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"}
"""How experts are chosen and weighed, which costs nothing that is counted."""

KNOWN = ROUTING | {"head_dim", "qk_head_dim", "num_nextn_predict_layers", "intermediate_size", "rope_interleave"}
"""Keys that are not read, or not always: widths that follow from others, layers that generation leaves out, and so on."""

ACTIVATIONS = (*SILU, "situ")

ROUTER = {"moe_renormalize", "moe_router_activation_func", "num_expert_group", "use_grouped_topk"}
LAYERS = {"layer_types", "mlp_layer_types", "first_k_dense_replace", "linear_num_heads", "linear_head_dim"}
OF_KIMI = (
    KNOWN
    | ROUTER
    | LAYERS
    | {"linear_conv_kernel_dim", "linear_attn_config.gate_lower_bound", "activation_situ_beta", "activation_situ_linear_beta"}
)
"""Keys that are not read, or not always: how experts are chosen, other ways to state the layers, and what costs nothing."""

OF_PARTS = {"vision_config", "ignore_index", "media_placeholder_token_id", "image_placeholder", "use_unified_vision_chunk"}
"""Keys beside the text decoder."""


def read_deepseek_v3(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` deepseek_v3 and kimi_k2.

    The layers of `num_nextn_predict_layers`, which predict further tokens and which generation can do without, are left out,
    as in transformers.
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
    """Latent attention by the keys of these families."""
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
    """Refuses what newer models of the family add."""
    fields.refuse(
        "index_topk", "the indexer of sparse attention is not modelled in this family; remove it to plan the dense form"
    )
    if fields.size("moe_layer_freq", default=1) != 1:
        got = fields.size("moe_layer_freq")
        raise ConfigError(problem("moe_layer_freq", got, "1, experts in every layer", "other patterns are not modelled"))


def read_kimi_linear(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` kimi_linear, with the keys that the text decoder of Kimi K3 adds to it.

    `attn_res_block_size` counts layers: block Attention Residuals. The published model holds a read before the first sublayer
    that does nothing, 2 D parameters which are left out here.
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
    """Dense layers first, then experts, which work in a latent where the file has a width for it."""
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
