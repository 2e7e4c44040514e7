"""Mistral and Mixtral: a sliding window, and in Mixtral experts in the place of the feed-forward."""

from twoaxis.planner.model.experts import Experts
from twoaxis.planner.model.hugging_face.dense import SILU, attention, head_dim, model, n_layers, refuse_experts, swiglu
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.shape import ModelShape


def read_mistral(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` mistral: all layers see a window of 4096 tokens, unless the file has another one or null."""
    refuse_experts(fields)
    fields.refuse("layer_types", "must be left out, since all layers of this model_type are alike; remove it")
    window = fields.optional_size("sliding_window", default=4096)
    block = (attention(_with_kv_heads(fields), head_dim(fields), window), swiglu(fields))
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
    block = (attention(_with_kv_heads(fields), head_dim(fields), fields.optional_size("sliding_window")), experts)
    layers = n_layers(fields)
    return model(fields, name, (block,) * layers, max_seq_len=131_072, norm_eps=fields.number("rms_norm_eps", 1e-5))


def _with_kv_heads(fields: Fields) -> Fields:
    """A missing number of kv-heads is 8 in this family, and null is all heads."""
    return fields if "num_key_value_heads" in fields.data else Fields({**fields.data, "num_key_value_heads": 8}, fields.where)
