"""DeepSeek-V3, and Kimi K2, which has its form: latent attention, and experts behind a few dense layers."""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.planner.model.experts import Experts
from twoaxis.planner.model.hugging_face.dense import SILU, model, n_layers, swiglu
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.latent_attention import LatentAttention
from twoaxis.planner.model.shape import ModelShape

ROUTING = {"n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"}
"""How experts are chosen and weighed, which costs nothing that is counted."""

KNOWN = ROUTING | {"head_dim", "qk_head_dim", "num_nextn_predict_layers", "intermediate_size", "rope_interleave"}
"""Keys that are not read, or not always: widths that follow from others, layers that generation leaves out, and so on."""


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
