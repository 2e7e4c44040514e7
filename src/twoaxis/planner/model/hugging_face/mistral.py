"""Mistral and Mixtral: a sliding window, and in Mixtral experts in the place of the feed-forward."""

from twoaxis.planner.model.experts import Experts
from twoaxis.planner.model.hugging_face.dense import SILU, attention, head_dim, model, n_layers, refuse_experts, swiglu
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.shape import ModelShape

KV_HEADS = 8
"""The default of both families."""


def read_mistral(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` mistral: all layers see a window of 4096 tokens, unless the file has another one or null."""
    refuse_experts(fields)
    fields.refuse("layer_types", "must be left out, since all layers of this model_type are alike; remove it")
    window = fields.optional_size("sliding_window", default=4096)
    block = (attention(fields, head_dim(fields), window, kv_heads=KV_HEADS), swiglu(fields))
    return model(fields, name, (block,) * n_layers(fields), max_seq_len=131_072)


def read_mixtral(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` mixtral: every layer has experts, none of them shared."""
    fields.word("hidden_act", "silu", SILU)
    experts = Experts(
        width=fields.size("hidden_size"),
        n_experts=fields.size("num_local_experts", "num_experts", default=8),
        per_token=fields.size("num_experts_per_tok", default=2),
        d_expert=fields.size("intermediate_size"),
    )
    window = fields.optional_size("sliding_window")
    block = (attention(fields, head_dim(fields), window, kv_heads=KV_HEADS), experts)
    layers = n_layers(fields)
    return model(fields, name, (block,) * layers, max_seq_len=131_072, norm_eps=fields.number("rms_norm_eps", 1e-5))
