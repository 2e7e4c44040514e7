"""Sizes of published models as their public `config.json` has them, and how many parameters their authors state.

A count is an integer where the authors state it to the last parameter, and billions as a string where they round it.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """One model.

    Attributes:
        config: the keys that set sizes.
        params: parameters as published; an exact count, or billions, good to one unit of the last digit.
        source: where that is published.
        active: billions that one token uses, rounded in the same way; None where all are used, or nothing is stated.
        without: `embedding` where the statement leaves the embedding out, `embeddings` for embedding and head.
        active_without: the same of `active`.
    """

    config: dict[str, Any]
    params: int | str
    source: str
    active: str | None = None
    without: str = ""
    active_without: str = ""


def sizes(
    model_type: str, vocab: int, width: int, layers: int, heads: int, kv_heads: int | None = None, **others: Any
) -> dict[str, Any]:
    """The keys that most files have; those that are None are left out."""
    found = {"model_type": model_type, "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers}
    found |= {"num_attention_heads": heads} | ({} if kv_heads is None else {"num_key_value_heads": kv_heads})
    ff = others.pop("ff", None)
    return found | ({} if ff is None else {"intermediate_size": ff}) | others


HALF = ["sliding_attention", "full_attention"]
DEEPSEEK: dict[str, Any] = sizes(
    "deepseek_v3", 129280, 7168, 61, 128, 128, ff=18432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840, tie_word_embeddings=False,
)  # fmt: skip

# fmt: off
PUBLISHED: dict[str, Published] = {
    "llama-3-8b": Published(sizes("llama", 128256, 4096, 32, 32, 8, ff=14336, tie_word_embeddings=False), "8.03",
        "model card"),
    "mistral-7b": Published(sizes("mistral", 32000, 4096, 32, 32, 8, ff=14336, sliding_window=4096), "7.24", "model card"),
    "mixtral-8x7b": Published(sizes("mixtral", 32000, 4096, 32, 32, 8, ff=14336, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None), "46.7", "model card", "12.9"),
    "qwen2.5-7b": Published(sizes("qwen2", 152064, 3584, 28, 28, 4, ff=18944, tie_word_embeddings=False), "7.61",
        "model card"),
    "qwen3-8b": Published(sizes("qwen3", 151936, 4096, 36, 32, 8, ff=12288, head_dim=128), "8.2", "model card"),
    "qwen3-30b-a3b": Published(sizes("qwen3_moe", 151936, 2048, 48, 32, 4, ff=6144, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1), "30.5", "model card", "3.3"),
    "qwen3-next-80b-a3b": Published(sizes("qwen3_next", 151936, 2048, 48, 16, 2, ff=5120, head_dim=256,
        full_attention_interval=4, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4), "80", "model card", "3", active_without="embeddings"),
    "gpt2": Published({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions":
        1024}, 124_439_808, "the parameters of its public checkpoint, as cited throughout the literature"),
    "gpt-j-6b": Published({"model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False}, "6.05", "model card"),
    "gpt-neox-20b": Published(sizes("gpt_neox", 50432, 6144, 44, 64, ff=24576, rotary_pct=0.25, use_parallel_residual=True,
        tie_word_embeddings=False), 20_554_567_680, "arXiv:2204.06745, section 2"),
    "falcon-7b": Published(sizes("falcon", 65024, 4544, 32, 71, multi_query=True, parallel_attn=True, bias=False,
        alibi=False, new_decoder_architecture=False), "7", "model card"),
    "bloom-7b1": Published({"model_type": "bloom", "vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32},
        7_069_016_064, "model card"),
    "opt-6.7b": Published(sizes("opt", 50272, 4096, 32, 32, ffn_dim=16384, word_embed_proj_dim=4096,
        max_position_embeddings=2048), "6.7", "arXiv:2205.01068"),
    "mpt-7b": Published({"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32,
        "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "attn_config": {"alibi": True}}, "6.7", "model card"),
    "stablelm-3b-4e1t": Published(sizes("stablelm", 50304, 2560, 32, 32, 32, ff=6912, tie_word_embeddings=False),
        2_795_443_200, "model card"),
    "stablelm-2-1.6b": Published(sizes("stablelm", 100352, 2048, 24, 32, 32, ff=5632, use_qkv_bias=True,
        tie_word_embeddings=False), "1.64", "model card"),
    "stablelm-2-12b": Published(sizes("stablelm", 100352, 5120, 40, 32, 8, ff=13824, qk_layernorm=True,
        use_parallel_residual=True, tie_word_embeddings=False), "12.14", "model card"),
    "command-r-v01": Published(sizes("cohere", 256000, 8192, 40, 64, 64, ff=22528, logit_scale=0.0625), "35", "model card"),
    "starcoder2-7b": Published(sizes("starcoder2", 49152, 4608, 32, 36, 4, ff=18432, use_bias=True, sliding_window=4096),
        "7.17", "model card"),
    "mamba-2.8b": Published({"model_type": "mamba", "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64,
        "state_size": 16}, "2.8", "arXiv:2312.00752"),
    "mamba-codestral-7b": Published({"model_type": "mamba2", "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers":
        64, "state_size": 128, "num_heads": 128, "head_dim": 64, "n_groups": 8, "expand": 2, "conv_kernel": 4,
        "tie_word_embeddings": False}, 7_285_403_648, "model card"),
    "falcon-mamba-7b": Published({"model_type": "falcon_mamba", "vocab_size": 65024, "hidden_size": 4096,
        "intermediate_size": 8192, "num_hidden_layers": 64, "state_size": 16, "tie_word_embeddings": False}, "7.27",
        "model card"),
    "jamba-v0.1": Published(sizes("jamba", 65536, 4096, 32, 32, 8, ff=14336, num_experts=16, num_experts_per_tok=2,
        attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256, tie_word_embeddings=False), "52", "model card", "12"),
    "bamba-9b": Published(sizes("bamba", 128256, 4096, 32, 32, 8, ff=14336, attn_layer_indices=[9, 18, 27],
        mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        tie_word_embeddings=False), "9.78", "model card"),
    "zamba2-1.2b": Published(sizes("zamba2", 32000, 2048, 38, 32, 32, ff=8192, num_mem_blocks=1, layers_block_type=["hybrid"
        if layer % 6 == 5 else "mamba" for layer in range(38)], mamba_d_state=128, mamba_ngroups=1, n_mamba_heads=64,
        mamba_headdim=64, adapter_rank=128, use_shared_attention_adapter=True, use_mem_rope=True), "1.2", "model card"),
    "exaone-3.5-7.8b": Published({"model_type": "exaone", "vocab_size": 102400, "hidden_size": 4096, "intermediate_size":
        14336, "num_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}, "6.98",
        "model card, without embeddings", without="embeddings"),
    "exaone-4.0-32b": Published(sizes("exaone4", 102400, 5120, 64, 40, 8, ff=27392, sliding_window=4096,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16, tie_word_embeddings=False), "30.95",
        "model card, without embeddings", without="embeddings"),
    "smollm3-3b": Published(sizes("smollm3", 128256, 2048, 36, 16, 4, ff=11008, no_rope_layer_interval=4,
        tie_word_embeddings=True), "3.08", "model card"),
    "ernie-4.5-0.3b": Published(sizes("ernie4_5", 103424, 1024, 18, 16, 2, ff=3072, head_dim=128, tie_word_embeddings=True),
        "0.36", "model card"),
    "ernie-4.5-21b-a3b": Published(sizes("ernie4_5_moe", 103424, 2560, 28, 20, 4, ff=12288, moe_num_experts=64, moe_k=6,
        moe_num_shared_experts=2, moe_intermediate_size=1536, moe_layer_start_index=1, tie_word_embeddings=True), "21",
        "model card", "3"),
    "minimax-text-01": Published(sizes("minimax", 200064, 6144, 80, 64, 8, ff=9216, head_dim=128, num_local_experts=32,
        num_experts_per_tok=2, layer_types=(["linear_attention"] * 7 + ["full_attention"]) * 10, tie_word_embeddings=False),
        "456", "model card", "45.9", active_without="embeddings"),
    "minimax-m2": Published(sizes("minimax_m2", 200064, 3072, 62, 48, 8, ff=1536, head_dim=128, num_local_experts=256,
        num_experts_per_tok=8, tie_word_embeddings=False), "229", "model card", "10", active_without="embeddings"),
    "hunyuan-7b": Published(sizes("hunyuan_v1_dense", 128167, 4096, 32, 32, 8, ff=14336, head_dim=128, use_qk_norm=True,
        tie_word_embeddings=True), "7.5", "model card"),
    "hunyuan-a13b": Published(sizes("hunyuan_v1_moe", 128167, 4096, 32, 32, 8, ff=3072, head_dim=128, num_experts=64,
        moe_topk=8, num_shared_expert=1, moe_intermediate_size=3072, tie_word_embeddings=True), "80", "model card", "13"),
    "dots.llm1": Published(sizes("dots1", 152064, 4096, 62, 32, 32, ff=10944, moe_intermediate_size=1408,
        n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
        tie_word_embeddings=False), "142", "model card", "14"),
    "afm-4.5b": Published(sizes("arcee", 128004, 2560, 36, 20, 4, ff=18432, head_dim=128, tie_word_embeddings=False), "4.6",
        "model card"),
    "lfm2-1.2b": Published(sizes("lfm2", 65536, 2048, 16, 32, 8, block_ff_dim=12288, block_multiple_of=256,
        block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        1_170_340_608, "model card"),
    "seed-oss-36b": Published(sizes("seed_oss", 155136, 5120, 64, 80, 8, ff=27648, head_dim=128, attention_bias=True,
        attention_out_bias=False, tie_word_embeddings=False), "36", "model card"),
    "apertus-8b": Published(sizes("apertus", 131072, 4096, 32, 32, 8, ff=21504, tie_word_embeddings=False), "8.05",
        "model card"),
    "gemma-7b": Published(sizes("gemma", 256000, 3072, 28, 16, 16, ff=24576, head_dim=256), "8.54", "model card"),
    "gemma-2-27b": Published(sizes("gemma2", 256000, 4608, 46, 32, 16, ff=36864, head_dim=128, sliding_window=4096),
        26_047_480_320, "arXiv:2408.00118, table 2, without embedding", without="embedding"),
    "gemma-3-1b": Published(sizes("gemma3_text", 262144, 1152, 26, 4, 1, ff=6912, head_dim=256, sliding_window=512,
        sliding_window_pattern=6), "1.00", "model card"),
    "phi-3-mini": Published(sizes("phi3", 32064, 3072, 32, 32, 32, ff=8192, sliding_window=2047, tie_word_embeddings=False),
        "3.82", "model card"),
    "phi-2": Published(sizes("phi", 51200, 2560, 32, 32, 32, ff=10240, partial_rotary_factor=0.4), "2.78", "model card"),
    "phi-3.5-moe": Published(sizes("phimoe", 32064, 4096, 32, 32, 8, ff=6400, num_local_experts=16, num_experts_per_tok=2,
        attention_bias=True, lm_head_bias=True, sliding_window=131072, tie_word_embeddings=False), "41.9", "model card",
        "6.6"),
    "gpt-oss-20b": Published(sizes("gpt_oss", 201088, 2880, 24, 64, 8, ff=2880, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, layer_types=HALF * 12, tie_word_embeddings=False), "20.91",
        "model card, arXiv:2508.10925, table 1", "3.61", active_without="embedding"),
    "glm-4-9b": Published(sizes("glm4", 151552, 4096, 40, 32, 2, ff=13696, head_dim=128, attention_bias=True,
        partial_rotary_factor=0.5, tie_word_embeddings=False), "9.4", "model card"),
    "olmo-1b": Published(sizes("olmo", 50304, 2048, 16, 16, 16, ff=8192, tie_word_embeddings=True), "1.18",
        "arXiv:2402.00838"),
    "olmo-2-7b": Published(sizes("olmo2", 100352, 4096, 32, 32, 32, ff=11008, tie_word_embeddings=False), "7.3",
        "model card"),
    "olmoe-1b-7b": Published(sizes("olmoe", 50304, 2048, 16, 16, 16, ff=1024, num_experts=64, num_experts_per_tok=8,
        tie_word_embeddings=False), "6.92", "model card", "1.28"),
    "granite-3.1-8b": Published(sizes("granite", 49155, 4096, 40, 32, 8, ff=12800, tie_word_embeddings=True,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0, attention_multiplier=0.0078125), "8.17",
        "model card"),
    "nemotron-h-8b": Published(sizes("nemotron_h", 131072, 4096, 52, 32, 8, ff=21504, head_dim=128, mamba_num_heads=128,
        mamba_head_dim=64, n_groups=8, ssm_state_size=128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", tie_word_embeddings=False), "8.1",
        "arXiv:2504.03624"),
    "deepseek-v2-lite": Published(sizes("deepseek_v2", 102400, 2048, 27, 16, 16, ff=10944, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        max_position_embeddings=163840, tie_word_embeddings=False), "15.7", "model card", "2.4",
        active_without="embedding"),
    "deepseek-v3": Published(DEEPSEEK, "671", "arXiv:2412.19437", "37"),
    "deepseek-v3.2": Published(DEEPSEEK | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64,
        "index_topk": 2048}, "671", "arXiv:2512.02556, of the layers that DeepSeek-V3 has", "37", active_without="embedding"),
    "recurrent-gemma-2b": Published(sizes("recurrent_gemma", 256000, 2560, 26, 10, 1, ff=15360, lru_width=2560,
        attention_window_size=2048, block_types=["recurrent", "recurrent", "attention"]), "2.68", "arXiv:2404.07839"),
    "cohere2-7b": Published(sizes("cohere2", 256000, 4096, 32, 32, 8, ff=14336, head_dim=128, sliding_window=4096,
        sliding_window_pattern=4), "8.03", "model card"),
}
# fmt: on
