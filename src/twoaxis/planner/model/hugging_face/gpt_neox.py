"""GPT-NeoX and Pythia: biased projections, LayerNorm, rotation of a part of each head, and branches side by side."""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.feed_forward import GELUConfig
from twoaxis.planner.model.biased import Biased
from twoaxis.planner.model.hugging_face.dense import attention, model, n_layers, refuse_experts
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.shape import ModelShape

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")

KNOWN = {"rotary_emb_base", "rotary_pct"}
"""Keys that are not read, or not where `rope_parameters` says the same."""


def read_gpt_neox(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` gpt_neox: one head count for queries, keys and values, whose heads divide the width."""
    refuse_experts(fields)
    fields.refuse("num_key_value_heads", "must be left out, since this model_type has as many kv-heads as heads; remove it")
    width, heads, hidden = fields.size("hidden_size"), fields.size("num_attention_heads"), fields.size("intermediate_size")
    if width % heads:
        raise ConfigError(problem("num_attention_heads", heads, f"a divisor of hidden_size={width}", "correct one of them"))
    fields.word("hidden_act", "gelu", GELU)
    rotary = fields.table("rope_parameters")
    part = (rotary if rotary.has("partial_rotary_factor") else fields).number(
        "partial_rotary_factor" if rotary.has("partial_rotary_factor") else "rotary_pct", 0.25, most=1
    )
    biases = "all" if fields.flag("attention_bias", True) else "none"
    block = (
        attention(fields, width // heads, biases=biases, rope_dim=int(width // heads * part) // 2 * 2),
        Biased(GELUConfig(d_ff=hidden), hidden + width),
    )
    return model(
        fields,
        name,
        (block,) * n_layers(fields),
        max_seq_len=2048,
        norm="layer",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        branches="parallel" if fields.flag("use_parallel_residual", True) else "sequential",
    )
