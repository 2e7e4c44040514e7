"""Llama, Mistral, Qwen2 and Qwen3, and Qwen3 with Attention Residuals: what our decoder can be, with or without biases."""

from twoaxis.depth import AttentionResidualsConfig
from twoaxis.planner.model.hugging_face.dense import attention, head_dim, model, n_layers, refuse_experts, swiglu
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.shape import ModelShape

LAYERS = ("full_attention", "sliding_attention")
WINDOW = 4096
FULL_LAYERS = 28
"""The default of `max_window_layers`."""

OF_QWEN = {"sliding_window", "max_window_layers"}
"""Keys that are not read where no window is used, or where `layer_types` says which layers have it."""

OF_ATTNRES = OF_QWEN | {"attnres_num_heads", "attnres_hyper_n", "attnres_num_blocks"}
"""With what only modes have that are refused."""


def read_llama(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` llama: grouped-query attention and SwiGLU, both with biases where the file says so."""
    refuse_experts(fields)
    biases = "all" if fields.flag("attention_bias", False) else "none"
    block = (attention(fields, head_dim(fields), biases=biases), swiglu(fields))
    return model(fields, name, (block,) * n_layers(fields), max_seq_len=2048)


def read_mistral(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` mistral: all layers see a window of 4096 tokens, unless the file has another one or null."""
    refuse_experts(fields)
    fields.refuse("layer_types", "must be left out, since all layers of this model_type are alike; remove it")
    window = fields.optional_size("sliding_window", default=4096)
    block = (attention(fields, head_dim(fields), window, kv_heads=8), swiglu(fields))
    return model(fields, name, (block,) * n_layers(fields), max_seq_len=131_072)


def read_qwen2(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen2: queries, keys and values have biases."""
    refuse_experts(fields)
    layers = [attention(fields, head_dim(fields), window, "qkv") for window in _windows(fields)]
    return model(fields, name, [(mixer, swiglu(fields)) for mixer in layers], max_seq_len=32_768)


def read_qwen3(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen3: queries and keys have a norm per head, whose default width is 128."""
    refuse_experts(fields)
    biases = "all" if fields.flag("attention_bias", False) else "none"
    width = head_dim(fields, default=128)
    layers = [attention(fields, width, window, biases, qk_norm="before_rope") for window in _windows(fields)]
    return model(fields, name, [(mixer, swiglu(fields)) for mixer in layers], max_seq_len=32_768)


def read_qwen3_attnres(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen3_attnres: Qwen3 with Attention Residuals, of blocks or of single sublayers."""
    fields.word("attnres_gate_type", "bias", ("bias",))
    fields.refuse("attnres_use_null_source", "a source of zeros is not modelled; plan a model without")
    mode = fields.word("attnres_mode", "block", ("block", "full"))
    n_blocks = fields.size("attnres_num_blocks", default=8)
    blocks = {"block_size": -(-n_layers(fields) // n_blocks), "count": "layer"} if mode == "block" else {}
    return read_qwen3(fields, name).with_depth(AttentionResidualsConfig.from_data(blocks))


def _windows(fields: Fields) -> list[int | None]:
    """The window of each layer: of all layers behind the first `max_window_layers`, where windows are used at all."""
    layers, window = n_layers(fields), _window(fields)
    types = fields.words("layer_types", LAYERS, layers)
    if types is not None:
        return [window or fields.size("sliding_window") if kind == "sliding_attention" else None for kind in types]
    full = fields.size("max_window_layers", default=FULL_LAYERS, least=0)
    return [window if layer >= full else None for layer in range(layers)]


def _window(fields: Fields) -> int | None:
    return fields.optional_size("sliding_window", default=WINDOW) if fields.flag("use_sliding_window", False) else None
