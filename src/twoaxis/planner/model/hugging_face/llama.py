"""Llama, and models saved in its form, such as SmolLM2."""

from twoaxis.planner.model.hugging_face.dense import attention, head_dim, model, n_layers, refuse_experts, swiglu
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.shape import ModelShape


def read_llama(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` llama: grouped-query attention and SwiGLU, both with biases where the file says so."""
    refuse_experts(fields)
    biases = "all" if fields.flag("attention_bias", False) else "none"
    block = (attention(fields, head_dim(fields), biases=biases), swiglu(fields))
    return model(fields, name, (block,) * n_layers(fields), max_seq_len=2048)
