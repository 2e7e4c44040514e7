"""DeepSeek-V4: compressed attention, experts in every layer, and a residual of several streams (mHC)."""

from twoaxis.core.errors import ConfigError, problem
from twoaxis.depth import MHCConfig
from twoaxis.planner.model.compressed_attention import CompressedAttention, Compressor, Indexer
from twoaxis.planner.model.experts import Experts
from twoaxis.planner.model.hugging_face.deepseek_v3 import ROUTING
from twoaxis.planner.model.hugging_face.fields import Fields
from twoaxis.planner.model.hugging_face.llama import SILU, model, n_layers
from twoaxis.planner.model.shape import ModelShape

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Published files state the layers by their rates."""


ALTERNATIVES = {"compress_ratios", "compress_rates", "compress_rate_csa", "compress_rate_hca", "num_hash_layers"}
INDEXER = {"index_n_heads", "index_head_dim", "index_topk"}
KNOWN = ROUTING | ALTERNATIVES | INDEXER | {"swiglu_limit", "compress_rope_theta", "num_nextn_predict_layers", "expert_dtype"}
"""Keys that are not read, or not always: other ways to state the layers, what only some layers have, and what costs nothing."""


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
