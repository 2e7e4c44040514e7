"""Configurations of published models: totals, costs and caches equal those of the models themselves; bad files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers for families that are not read as plain data")

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.ledger.decoder_memory import decoder_cache_bytes
from twoaxis.ledger.stack import trace_stack
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.model import ModelShape, read_model
from twoaxis.planner.model.hugging_face import FAMILIES, NOT_MODELLED, read_hugging_face

CONFIGS = Path(__file__).parent / "configs"
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"

TOTALS = {
    # Counted by transformers 5.24 on models built without memory, with the correction of its routers, which are buffers there.
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v4-flash": 284_332_240_471,
    "deepseek-v4-pro": 1_572_997_201_763,
    "kimi-k2": 1_026_408_232_448,
    "kimi-linear-48b": 49_122_681_728,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "pythia-6.9b": 6_857_302_016,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    # Published as 2.8 trillion; written out from the shapes of its tensors.
    "kimi-k3": 2_779_484_461_664,
    # Published as 2.8049, 1.4200 and 2.7850 billion, counted on the authors' own classes.
    "muddformer-2.8b": 2_804_871_709,
    "muddpythia-1.4b": 1_419_950_149,
    "muddpythia-2.8b": 2_784_962_589,
    # Qwen3 8B with a query and a gain for each of 72 reads; their first one has one source, so that neither does anything.
    "qwen3-8b-attnres": 8_190_735_360 + 72 * 2 * 4096,
}

USED = {
    # Parameters of one token, as published: billions, and how far the rounding of the publication may be off.
    "deepseek-v2-lite": (2.66, 0.3),
    "deepseek-v3": (37, 0.6),
    "deepseek-v4-flash": (13, 0.9),
    "deepseek-v4-pro": (49, 0.9),
    "kimi-k2": (32, 0.9),
    "kimi-linear-48b": (3, 0.5),
    "mixtral-8x7b": (12.9, 0.05),
    "qwen1.5-moe-a2.7b": (2.7, 0.05),
    "qwen3-30b-a3b": (3.3, 0.06),
}

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

MEASURED: list[tuple[str, dict[str, Any], int, int, int]] = [
    # Parameters, FLOPs of matrix products with parameters (torch's counter) and bytes of the cache that transformers 5.24 holds
    # on two rows of 24 tokens in float32. Its mistral holds 16 bytes, its kimi_linear one more token of each convolution, and
    # its deepseek_v4 counts a grouped product among those of activations; these are taken off or added here.
    ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}, 20064, 1_671_168, 12288),
    ("qwen2", GROUPED, 19744, 1_671_168, 12288),
    ("qwen3", GROUPED | {"head_dim": 16, "attention_bias": True}, 26144, 2_260_992, 24576),
    (
        "qwen2_moe",
        GROUPED
        | ROUTED
        | {
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 40,
            "num_experts": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        48640,
        3_535_872,
        24576,
    ),
    ("qwen3_moe", GROUPED | ROUTED | {"head_dim": 16, "num_experts": 6}, 44640, 2_297_856, 24576),
    ("mistral", GROUPED | {"sliding_window": 8}, 19616, 1_671_168, 3600 - 16),
    ("mixtral", GROUPED | {"num_local_experts": 4}, 47520, 2_580_480, 12288),
    ("gpt_neox", SMALL | {"num_hidden_layers": 2}, 19168, 1_572_864, 24576),
    (
        "deepseek_v2",
        SMALL
        | LATENT
        | ROUTED
        | {
            "num_hidden_layers": 3,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
        },
        61200,
        3_883_008,
        11520,
    ),
    (
        "deepseek_v3",
        SMALL
        | LATENT
        | ROUTED
        | {
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "attention_bias": True,
        },
        66420,
        3_471_360,
        11520,
    ),
    (
        "kimi_linear",
        SMALL
        | LATENT
        | {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "q_lora_rank": None,
        }
        | {
            "linear_attn_config": {
                "num_heads": 3,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
            }
        },
        64710,
        3_274_752,
        11520 - 2 * 2 * 72 * 4,
    ),
]

V4 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 3,
    "index_head_dim": 8,
    "index_topk": 2,
    "partial_rotary_factor": 0.25,
}

ONE_KEY = V4 | {"num_key_value_heads": 1}


def config(name: str) -> Path:
    path = CONFIGS / f"{name}.json"
    return path if path.is_file() else EXAMPLES / path.name


def params(model: ModelShape) -> int:
    return decoder_cost(model, Shape(1, 1)).params


def used(model: ModelShape) -> float:
    routed = [part.routed for part in model.parts if part.routed is not None]
    return params(model) - sum(one.params * (one.experts - one.used) for one in routed)


def small(model_type: str, data: dict[str, Any]) -> ModelShape:
    return read_hugging_face({"model_type": model_type, **data}, "small")


def refusal(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        read_model(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


@pytest.mark.parametrize("name", TOTALS)
def test_a_published_model_has_its_published_parameters(name: str) -> None:
    assert params(read_model(config(name))) == TOTALS[name]


@pytest.mark.parametrize("name", USED)
def test_a_token_uses_the_published_part_of_them(name: str) -> None:
    published, rounding = USED[name]
    assert used(read_model(config(name))) / 1e9 == pytest.approx(published, abs=rounding)


def test_every_shipped_configuration_is_tested() -> None:
    assert {path.stem for path in (*CONFIGS.iterdir(), *EXAMPLES.glob("*.json"))} == set(TOTALS)
    assert {read["model_type"] for read in map(json.loads, (config(name).read_text() for name in TOTALS))} >= set(FAMILIES)


@pytest.mark.parametrize("model_type, data, parameters, matmul, cache", MEASURED, ids=[row[0] for row in MEASURED])
def test_costs_equal_those_measured_on_transformers(
    model_type: str, data: dict[str, Any], parameters: int, matmul: int, cache: int
) -> None:
    cost = decoder_cost(small(model_type, data), Shape(batch=2, tokens=24))
    held = decoder_cache_bytes(small(model_type, data), Shape(batch=2, tokens=24))
    assert (cost.params, cost.matmul_flops, held) == (parameters, matmul, cache)


def test_costs_of_deepseek_v4_equal_those_measured_on_transformers() -> None:
    cost = decoder_cost(small("deepseek_v4", V4), Shape(batch=2, tokens=24))
    grouped = 2 * 48 * 3 * (4 * 16 * 12)
    assert (cost.params, cost.matmul_flops) == (103_479, 5_449_728 + grouped)
    # transformers holds keys twice where no entries are, and no buffer at the end of an entry; here buffers count as full.
    entries_and_windows = 6680 - 24 - 2 * 7 * 16 * 4
    overlaps = 2 * 4 * (16 + 8) * 2 * 4
    buffers = 2 * 4 * (2 * 16 + 2 * 8) * 2 * 4 + 2 * 8 * 16 * 2 * 4
    assert cost.cache_bytes == entries_and_windows + buffers
    assert entries_and_windows - overlaps == 2 * 4 * (3 * 7 * 16 + 6 * (16 + 8) + 3 * 16)


def test_deepseek_v4_keeps_several_streams() -> None:
    depth = read_model(config("deepseek-v4-flash")).depth
    assert (depth.kind, depth.controls().streams) == ("mhc", 4)


def test_kimi_k3_reads_blocks_of_layers() -> None:
    model = read_model(config("kimi-k3"))
    assert model.depth.to_data()["block_size"] == 12 and model.depth.to_data()["count"] == "layer"
    # The embedding and, of 93 layers, eight blocks.
    assert len(trace_stack(model.depth, model.stack, Shape(1, 1, 4), traffic=False).states[-1]) >= 9
    assert "text decoder" in model.name


def test_linear_attention_keeps_a_state_per_sequence_and_latents_per_token() -> None:
    model = read_model(config("kimi-linear-48b"))
    short, long = (decoder_cache_bytes(model, Shape(1, tokens, 2)) for tokens in (1000, 2000))
    assert long - short == 1000 * 7 * (512 + 64) * 2
    assert short - (long - short) == 20 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2)


def test_windows_follow_the_layers_that_have_them() -> None:
    data = GROUPED | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    windows = [block[0].windows for block in small("qwen2", data).blocks]
    assert windows == [(), (), (), (4, 5)]
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    windows = [block[0].windows for block in small("qwen2", data | {"layer_types": types}).blocks]
    assert windows == [(4, 5), (), (), (4, 5)]
    # Of the first three layers, every other one.
    windows = [block[0].windows for block in small("qwen2_moe", data | ROUTED | {"num_experts": 4}).blocks]
    assert windows == [(4, 5), (), (4, 5), ()]


def test_mistral_has_a_window_unless_it_says_null() -> None:
    assert small("mistral", GROUPED).blocks[0][0].windows == (4095, 4096)
    assert small("mistral", GROUPED | {"sliding_window": None}).blocks[0][0].windows == ()


def test_gpt_neox_has_branches_side_by_side_and_biased_norms() -> None:
    model = small("gpt_neox", SMALL | {"num_hidden_layers": 1, "rotary_pct": 0.5})
    assert (model.branches, model.norm) == ("parallel", "layer")
    assert small("gpt_neox", SMALL | {"num_hidden_layers": 1, "use_parallel_residual": False}).branches == "sequential"
    # Three norms with a gain and a bias each.
    assert params(model) == 2 * 64 * 32 + 3 * 2 * 32 + 4 * 32 * 33 + 2 * 32 * 48 + 48 + 32


def test_keys_that_say_nothing_of_the_architecture_are_ignored() -> None:
    plain = small("llama", GROUPED)
    assert small("llama", GROUPED | {"bos_token_id": 1, "rope_scaling": {"type": "linear"}, "use_cache": True}) == plain


def test_a_file_that_is_not_json_or_no_table_is_refused(tmp_path: Path) -> None:
    assert "is not json" in refusal(tmp_path, "{")
    assert "must hold a table" in refusal(tmp_path, [1])


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_a_missing_size_is_named(tmp_path: Path, key: str) -> None:
    data = {name: value for name, value in GROUPED.items() if name != key}
    assert f"{key} is missing" in refusal(tmp_path, {"model_type": "llama", **data})


@pytest.mark.parametrize(
    "model_type, change, message",
    [
        ("llama", {"hidden_size": -32}, "hidden_size=-32: must be a whole number >= 1"),
        ("llama", {"hidden_size": 32.0}, "hidden_size=32.0: must be a whole number"),
        ("llama", {"hidden_size": "32"}, "hidden_size='32': must be a whole number"),
        ("llama", {"hidden_size": True}, "hidden_size=True: must be a whole number"),
        ("llama", {"num_hidden_layers": 10**9}, "must be a whole number from 1 to 10000"),
        ("llama", {"num_attention_heads": 5}, "num_attention_heads=5: must be a divisor of hidden_size=32"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: must be a divisor of num_attention_heads=4"),
        ("llama", {"head_dim": 7}, "head_dim=7: must be even"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps=0: must be a number > 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a number > 0"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu': must be one of silu"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8: must be left out"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2},
            "layer_types=['full_attention', 'full_attention']: must be left out",
        ),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "layer_types entry='linear_attention': must be one of"),
        ("qwen2", {"layer_types": ["full_attention"]}, "entries of layer_types=1: must be at least num_hidden_layers=2"),
        ("qwen2", {"layer_types": "full_attention"}, "layer_types='full_attention': must be a list"),
        ("deepseek_v3", ROUTED, "num_key_value_heads=2: must be num_attention_heads=4"),
        ("deepseek_v3", ROUTED | {"index_topk": 64}, "index_topk=64: the indexer"),
        ("deepseek_v3", ROUTED | {"moe_layer_freq": 2}, "moe_layer_freq=2: must be 1"),
        ("kimi_k2", {}, "moe_intermediate_size is missing"),
        ("deepseek_v4", ROUTED | {"num_key_value_heads": 2}, "num_key_value_heads=2: must be 1"),
        ("deepseek_v4", ONE_KEY | {"hc_mult": 1}, "hc_mult=1: must be a whole number >= 2"),
        (
            "deepseek_v4",
            ONE_KEY | {"layer_types": None, "compress_ratios": [3] * 3},
            "compress_ratios entry=3",
        ),
        ("deepseek_v4", ONE_KEY | {"o_groups": 3}, "o_groups=3: must be a divisor"),
        ("deepseek_v4", ONE_KEY | {"n_shared_experts": 2}, "n_shared_experts=2: must be 1"),
        ("deepseek_v4", ONE_KEY | {"attention_bias": True}, "attention_bias=True: must be false"),
        (
            "deepseek_v4",
            ONE_KEY | {"compress_rates": {"heavily_compressed_attention": 0}},
            "compress_rates.heavily_compressed_attention=0: must be a whole number >= 1",
        ),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [0]}}, "linear_attn_config.full_attn_layers entry=0"),
        (
            "kimi_linear",
            {"num_key_value_heads": 4, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}},
            "linear_attn_config.kda_layers=[1, 2]: must be each of the layers 1 to 2 once",
        ),
        ("kimi_k3", {}, "text_config.num_hidden_layers is missing"),
        ("kimi_k3", {"text_config": {"model_type": "llama"}}, "text_config.model_type='llama': must be one of kimi_linear"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_bad_value_is_named(tmp_path: Path, model_type: str, change: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, {"model_type": model_type, **GROUPED, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sepln": False}, "sepln=False: must be true"),
        ({"dense_type": "l"}, "dense_type='l': must be one of qkvr"),
        ({"n_head": 3}, "n_head=3: must be a divisor of dim=32"),
        ({"n_local_heads": 2}, "n_local_heads=2: must be n_head=4"),
        ({"n_layer": None}, "n_layer is missing"),
    ],
)
def test_a_bad_value_of_muddformer_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = {"model_type": "muddformer", "vocab_size": 64, "dim": 32, "n_layer": 2, "n_head": 4, "intermediate_size": 256}
    assert read_hugging_face(data, "small").depth.kind == "muddformer"
    assert message in refusal(tmp_path, data | change)


@pytest.mark.parametrize("key", NOT_MODELLED)
def test_what_is_not_modelled_is_refused(tmp_path: Path, key: str) -> None:
    message = refusal(tmp_path, {"model_type": "llama", **GROUPED, key: {"hidden_size": 8}})
    assert f"{key}=a table" in message and "not modelled" in message
    assert small("llama", GROUPED | {key: False}) == small("llama", GROUPED)
