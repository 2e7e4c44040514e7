"""Published models of 40 families: what is counted without downloading anything equals what their authors state."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError
from twoaxis.ledger.decoder_memory import decoder_cache_bytes
from twoaxis.ledger.published import PublishedModel, count_published
from twoaxis.ledger.published.build import build
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.model import ModelShape, read_model
from twoaxis.planner.model.published import read_published

from .published_configs import PUBLISHED, Published

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48}


def params(model: ModelShape) -> int:
    return decoder_cost(model, Shape(1, 1)).params


def active(model: ModelShape) -> float:
    routed = [part.routed for part in model.parts if part.routed is not None]
    return params(model) - sum(one.params * (one.experts - one.used) for one in routed)


def left_out(model: ModelShape, what: str) -> int:
    """Parameters that a statement does not count: nothing, the embedding, or embedding and head."""
    return model.vocab_size * model.d_model * {"": 0, "embedding": 1, "embeddings": 1 if model.tie_embeddings else 2}[what]


def agrees(count: float, stated: int | str) -> bool:
    """Whether a count is the one that is stated, to the last parameter or to one unit of the last digit of billions."""
    if isinstance(stated, int):
        return count == stated
    return abs(count / 1e9 - float(stated)) < 10.0 ** -len(stated.partition(".")[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_counted_as_its_authors_state(name: str) -> None:
    """Catches sublayers that are missed, counted twice, or counted with parameters that belong elsewhere."""
    published: Published = PUBLISHED[name]
    model = read_published(published.config, name)
    assert agrees(params(model) - left_out(model, published.without), published.params), params(model)
    if published.active is not None:
        assert agrees(active(model) - left_out(model, published.active_without), published.active), active(model)
    # A product with every matrix that a token uses, and with the head.
    flops = decoder_cost(model, Shape(1, 1)).matmul_flops / 2
    used = active(model) - left_out(model, "embeddings") + model.vocab_size * model.d_model
    assert 0.99 < flops / used < 1.01 or "zamba" in name, flops / used
    assert not any("products of activations" in line for line in model.not_counted), model.not_counted


def test_at_least_25_families_are_held_to_published_counts() -> None:
    assert len({published.config["model_type"] for published in PUBLISHED.values()}) >= 40
    assert all(published.source for published in PUBLISHED.values())


def counted(kind: str, **keys: Any) -> PublishedModel:
    return count_published({"model_type": kind, **GROUPED, **keys})


def cache(model: ModelShape, tokens: int) -> int:
    return decoder_cache_bytes(model, Shape(1, tokens, 2))


def read(kind: str, **keys: Any) -> ModelShape:
    return read_published({"model_type": kind, **GROUPED, **keys}, "small")


def test_windows_bound_attention_and_cache() -> None:
    types = ["sliding_attention", "full_attention"]
    model = read("gemma2", head_dim=8, sliding_window=5, layer_types=types)
    assert [block[0].windows for block in model.blocks] == [(4, 5), ()]
    assert cache(model, 100) - cache(model, 99) == 2 * 2 * 8 * 2
    # This family has the window as an attribute of all layers.
    assert [block[0].windows for block in read("exaone4", sliding_window=5, layer_types=types).blocks] == [(4, 5), ()]
    pairs = decoder_cost(model, Shape(1, 100)).pair_flops
    assert pairs == 4 * 4 * 8 * (5 * 6 // 2 + 95 * 5 + 100 * 101 // 2)


def test_a_state_of_fixed_size_is_counted_once_per_sequence() -> None:
    model = read_published(
        {"model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8}
        | {"head_dim": 8, "n_groups": 1, "expand": 2, "conv_kernel": 4},
        "small",
    )
    # In float32 a state of each head, and as many tokens as the kernel has taps of what the convolution reads.
    assert cache(model, 1) == cache(model, 1000) == 2 * (8 * 8 * 8 * 4 + (64 + 2 * 8) * 4 * 2)


def test_latent_attention_keeps_latents_and_an_indexer_bounds_what_a_query_sees() -> None:
    keys: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8}
    keys |= {"qk_rope_head_dim": 4, "v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 8}
    keys |= {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    plain = read("deepseek_v3", **keys)
    assert cache(plain, 50) == 50 * 2 * (16 + 4) * 2
    sparse = read("deepseek_v32", index_head_dim=16, index_n_heads=2, index_topk=6, **keys)
    assert cache(sparse, 50) == 50 * 2 * (16 + 4 + 16) * 2
    assert sparse.blocks[0][0].windows == (6,)


def test_branches_side_by_side_are_found() -> None:
    assert read("gpt_neox", num_key_value_heads=None).branches == "parallel"
    assert read("gpt_neox", num_key_value_heads=None, use_parallel_residual=False).branches == "sequential"
    assert read("cohere").branches == "parallel" and read("mixtral").branches == "sequential"


def test_keys_that_change_the_architecture_are_used_or_said() -> None:
    tied, untied = counted("mixtral", tie_word_embeddings=True), counted("mixtral", tie_word_embeddings=False)
    assert (tied.tied, untied.params - tied.params) == (True, 64 * 32)
    assert counted("mixtral", num_local_experts=4).params < tied.params
    said = counted("mixtral", n_shared_experts=1, quantization_config={"quant_method": "fp8"}).not_counted
    assert [line.partition(":")[0] for line in said] == ["n_shared_experts=1", "quantization_config"]
    assert "may change the model" in said[0]


def test_tables_of_positions_compute_nothing() -> None:
    def small(positions: int) -> Cost:
        keys = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": positions}
        return decoder_cost(read_published({"model_type": "gpt2", **keys}, "small"), Shape(1, 3))

    few, many = small(10), small(5000)
    assert many == few + Cost(params=4990 * 32, table_params=4990 * 32) and few.table_params == 10 * 32


def test_what_text_does_not_reach_is_said_and_costs_parameters_alone() -> None:
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    both: dict[str, Any] = {"text_config": {**GROUPED, "head_dim": 8}, "vision_config": {**vision, "patch_size": 14}}
    text, seeing = read("gemma3_text", head_dim=8), read("gemma3", **both)
    more = params(seeing) - params(text)
    assert [line.partition(":")[0] for line in seeing.not_counted] == ["model.vision_tower", "model.multi_modal_projector"]
    assert decoder_cost(seeing, Shape(1, 3)) == decoder_cost(text, Shape(1, 3)) + Cost(params=more, table_params=more)
    assert more > 32 * 32 and not text.not_counted
    # A tower with more layers than the language model does not stand in for it.
    both["vision_config"]["num_hidden_layers"] = 3
    assert [len(read("gemma3", **both).blocks), len(seeing.blocks)] == [2, 2]


def test_layers_that_share_a_cache_keep_none_and_need_no_note() -> None:
    keys: dict[str, Any] = {"head_dim": 8, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    keys |= {"num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 5}
    keys |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16}
    model = read("gemma3n_text", **keys)
    assert (cache(model, 50), model.not_counted) == (2 * 2 * 8 * 2 * (4 + 50), ())
    # The embedding of every layer's input is a table too.
    assert decoder_cost(model, Shape(1, 1)).table_params == 64 * 4 * 16


def test_what_transformers_cannot_run_without_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralModel

    whole = counted("mixtral")
    monkeypatch.setattr(MixtralModel, "forward", lambda *_, **__: 1 / 0)
    without = counted("mixtral")
    assert "not counted" in without.not_counted[0] and "division by zero" in without.not_counted[0]
    assert without.params == whole.params
    assert [[sub.matmul for sub in block] for block in without.blocks] == [
        [sub.matmul for sub in block] for block in whole.blocks
    ]


def test_remote_code_is_never_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "get_class_from_dynamic_module", lambda *_, **__: pytest.fail("followed auto_map"))
    built = build({"model_type": "gemma", **GROUPED, "auto_map": {"AutoModelForCausalLM": "who--ever.Model"}})
    assert type(built.model).__module__.startswith("transformers.models.gemma")


def refusal(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as caught:
        read_model(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_an_unknown_family_names_the_nearest(tmp_path: Path) -> None:
    assert "did you mean 'mixtral'?" in refusal(tmp_path, {"model_type": "mixtrall"})
    for other in ("zzz", "qwen9_next", "llava", "bert_generation_x", 7):
        message = refusal(tmp_path, {"model_type": other})
        assert f"model_type={other!r}: must be a causal language model that transformers" in message
        assert "did you mean" not in message and "describe its shape in TOML" in message


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": "32"}, "model_type='gemma': transformers cannot build it"),
        ({"num_attention_heads": 5}, "num_key_value_heads=2: must be a divisor of num_attention_heads=5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be a whole number up to 10000"),
        ({"architectures": ["GemmaForSequenceClassification"]}, "architectures="),
        ({"text_config": {"hidden_size": 8}}, "text_config=a table: a model of several parts is not modelled"),
    ],
)
def test_a_file_that_cannot_be_built_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, {"model_type": "gemma", **GROUPED, "head_dim": 8, **change})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_size_is_named(tmp_path: Path, key: str) -> None:
    """Catches a model that is filled up with the sizes of another one."""
    data = {name: value for name, value in GROUPED.items() if name != key}
    assert f"{key} is missing" in refusal(tmp_path, {"model_type": "gemma", **data})


def test_more_experts_for_a_token_than_there_are() -> None:
    with pytest.raises(ConfigError, match="experts per token=9: must be at most the 8 experts; correct one of them"):
        read("mixtral", num_local_experts=8, num_experts_per_tok=9)
