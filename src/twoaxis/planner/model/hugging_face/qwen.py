"""Qwen2 and Qwen3, dense and with experts: biased projections in Qwen2, a norm of queries and keys in Qwen3."""

from collections.abc import Sequence

from twoaxis.depth import AttentionResidualsConfig
from twoaxis.planner.model.experts import Experts
from twoaxis.planner.model.hugging_face.dense import SILU, attention, head_dim, model, n_layers, refuse_experts, swiglu
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.part import Part
from twoaxis.planner.model.shape import ModelShape

LAYERS = ("full_attention", "sliding_attention")
WINDOW = 4096
FULL_LAYERS = 28
"""The default of `max_window_layers`."""

KNOWN = {"sliding_window", "max_window_layers"}
"""Keys that are not read where no window is used, or where `layer_types` says which layers have it."""

OF_EXPERTS = KNOWN | {"norm_topk_prob", "intermediate_size"}

OF_ATTNRES = KNOWN | {"attnres_num_heads", "attnres_hyper_n", "attnres_num_blocks"}
"""With what only modes have that are refused."""


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


def read_qwen2_moe(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen2_moe: experts, and a shared one behind a gate of the token."""
    biases = "qkv" if fields.flag("qkv_bias", True) else "none"
    mixers = [attention(fields, head_dim(fields), window, biases) for window in _alternating_windows(fields)]
    experts = Experts(
        width=fields.size("hidden_size"),
        n_experts=fields.size("num_experts", default=60),
        per_token=fields.size("num_experts_per_tok", default=4),
        d_expert=fields.size("moe_intermediate_size"),
        d_shared=fields.size("shared_expert_intermediate_size", default=5632),
        shared_gate="token",
    )
    return model(fields, name, _with_experts(fields, mixers, experts), max_seq_len=32_768)


def read_qwen3_moe(fields: Fields, name: str) -> ModelShape:
    """Reads `model_type` qwen3_moe: experts, none of them shared."""
    biases = "all" if fields.flag("attention_bias", False) else "none"
    mixer = attention(fields, head_dim(fields), _window(fields), biases, qk_norm="before_rope")
    experts = Experts(
        width=fields.size("hidden_size"),
        n_experts=fields.size("num_experts", "num_local_experts", default=128),
        per_token=fields.size("num_experts_per_tok", default=8),
        d_expert=fields.size("moe_intermediate_size"),
    )
    mixers = [mixer] * n_layers(fields)
    return model(fields, name, _with_experts(fields, mixers, experts), max_seq_len=32_768)


def _with_experts(fields: Fields, mixers: Sequence[Part], experts: Experts) -> list[tuple[Part, Part]]:
    """Every `decoder_sparse_step`-th layer has experts, unless it is listed as dense."""
    fields.word("hidden_act", "silu", SILU)
    step, dense = fields.size("decoder_sparse_step", default=1), fields.sizes("mlp_only_layers", least=0) or []
    routed = [layer not in dense and (layer + 1) % step == 0 for layer in range(len(mixers))]
    return [(mixer, experts if has else swiglu(fields)) for mixer, has in zip(mixers, routed, strict=True)]


def _windows(fields: Fields) -> list[int | None]:
    """The window of each layer: of all layers behind the first `max_window_layers`, where windows are used at all."""
    layers, window = n_layers(fields), _window(fields)
    types = fields.words("layer_types", LAYERS, layers)
    if types is not None:
        return [window or fields.size("sliding_window") if kind == "sliding_attention" else None for kind in types]
    full = fields.size("max_window_layers", default=FULL_LAYERS, least=0)
    return [window if layer >= full else None for layer in range(layers)]


def _alternating_windows(fields: Fields) -> list[int | None]:
    """As in the Qwen2 with experts of transformers: every other layer among the first `max_window_layers`."""
    layers, window = n_layers(fields), _window(fields)
    types = fields.words("layer_types", LAYERS, layers)
    if types is not None:
        return [window or fields.size("sliding_window") if kind == "sliding_attention" else None for kind in types]
    last = fields.size("max_window_layers", default=FULL_LAYERS, least=0)
    return [window if layer % 2 == 0 and layer < last else None for layer in range(layers)]


def _window(fields: Fields) -> int | None:
    return fields.optional_size("sliding_window", default=WINDOW) if fields.flag("use_sliding_window", False) else None
