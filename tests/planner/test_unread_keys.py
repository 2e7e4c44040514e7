"""Keys that no reader uses: files as they are published are read, and whatever else asks for something is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twoaxis.checkpoints.gguf_file import llama_table
from twoaxis.checkpoints.published_config import decoder_config
from twoaxis.core.errors import ConfigError
from twoaxis.planner.model import read_model
from twoaxis.planner.model.hugging_face import FAMILIES, read_hugging_face

CONFIGS = (*(Path(__file__).parent / "configs").iterdir(), *(Path(__file__).parents[2] / "examples" / "models").glob("*.json"))

SAVED: dict[str, Any] = {
    # What transformers and other programs write beside the architecture, in old and new files.
    "_name_or_path": "somewhere",
    "_attn_implementation_autoset": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
    "bos_token_id": 1,
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "eos_token_id": [2, 3],
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0},
    "neftune_noise_alpha": 0.0,
    "output_attentions": False,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "quantization_config": {"quant_method": "fp8"},
    "return_dict": True,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "temperature": 1.0,
    "top_k": 50,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"dtype": "q4"},
    "transformers_version": "4.57.1",
    "unsloth_fixed": True,
    "use_cache": True,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"aux_loss_alpha": 0.001, "ep_size": 1, "n_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    | {"scoring_func": "softmax", "seq_aux": True, "topk_group": 1, "topk_method": "greedy", "head_dim": 64},
    "deepseek_v3": {"ep_size": 1, "norm_topk_prob": True, "qk_head_dim": 192, "head_dim": 64, "rope_interleave": True},
    "deepseek_v4": {"norm_topk_prob": True, "expert_dtype": "fp4", "num_hash_layers": 3, "router_jitter_noise": 0.0},
    "gpt_neox": {"hidden_dropout": 0.0, "classifier_dropout": 0.1, "is_decoder": True, "rotary_emb_base": 10000},
    "kimi_k2": {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "norm_topk_prob": True},
    "kimi_k3": {"media_placeholder_token_id": 163605, "ignore_index": -100, "use_unified_vision_chunk": True},
    "kimi_linear": {"use_grouped_topk": True, "qk_head_dim": 192, "linear_num_heads": 32, "rope_scaling": None},
    "llama": {"mlp_bias": False, "is_llama_config": True, "rope_interleaved": False, "max_sequence_length": 2048},
    "mixtral": {"output_router_logits": False, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0},
    "muddformer": {"use_gradient_checkpointing": False, "is_training": False, "use_layer_cache": True},
    "muddpythia": {"use_layer_cache": True, "is_training": False},
    "qwen2": {"use_mrope": False},
    "qwen2_moe": {"norm_topk_prob": False, "qkv_bias": True, "layer_types": ["full_attention"] * 24},
    "qwen3": {"layer_types": ["full_attention"] * 36},
    "qwen3_attnres": {"attnres_use_null_source": False, "attnres_num_heads": 8, "attnres_hyper_n": 4},
    "qwen3_moe": {"router_aux_loss_coef": 0.001, "max_window_layers": 48, "use_sliding_window": False, "sliding_window": None},
}
"""What further keys published files of each family hold."""

BUILT = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""What files of the families that transformers builds call their language model."""

LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}

FOREIGN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("llama", {"sliding_window": 8}),
    ("llama", {"no_rope_layers": [1, 1, 1, 0]}),
    ("llama", {"no_rope_layer_interval": 4}),
    ("llama", {"attn_logit_softcapping": 50.0}),
    ("llama", {"embedding_multiplier": 12.0}),
    ("llama", {"is_causal": False}),
    ("llama", {"use_bidirectional_attention": True}),
    ("llama", {"linear_attn_config": {"num_heads": 4}}),
    ("llama", {"pruned_heads": {"0": [1]}}),
    ("llama", {"shared_expert_intermediate_size": 8}),
    ("mistral", {"head_gate": "sigmoid"}),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 4}}),
    ("qwen3", {"attn_output_gate": True}),
    ("qwen3", {"full_attention_interval": 4, "linear_num_key_heads": 2}),
    ("qwen3_attnres", {"attnres_recency_bias_init": 3.0}),
]


def refused(read: Any, data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plan(data: dict[str, Any]) -> Any:
    return read_hugging_face(data, "model")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_published_file_is_read_with_all_its_keys(path: Path, tmp_path: Path) -> None:
    """Catches a list of known keys that leaves out what real files hold."""
    data = json.loads(path.read_text())
    kind = data["model_type"]
    named = FAMILIES[kind].architectures[0] if kind in FAMILIES else BUILT[kind]
    whole = {**SAVED, **data, **PUBLISHED.get(kind, {}), "architectures": [named]}
    if kind == "kimi_k3":
        whole["text_config"] = {**SAVED, **data["text_config"], **PUBLISHED["kimi_linear"]}
    (tmp_path / path.name).write_text(json.dumps(whole))
    read, plain = read_model(tmp_path / path.name), read_model(path)
    assert replace(read, not_counted=()) == replace(plain, not_counted=())
    # Of families that are built, keys that transformers does not read are said.
    assert {line.partition(":")[0] for line in read.not_counted} <= {
        "quantization_config",
        "moe_layer_freq=1",
        "max_window_layers=48",
    }


@pytest.mark.parametrize(("kind", "keys"), FOREIGN, ids=[f"{kind}-{next(reversed(keys))}" for kind, keys in FOREIGN])
def test_a_key_that_nobody_reads_is_refused_by_every_reader(kind: str, keys: dict[str, Any]) -> None:
    """Catches readers that ignore what they do not know: a plan, or a model, of something else."""
    data = {**LLAMA, "model_type": kind}
    readers = [plan, decoder_config] if kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3_attnres") else [plan]
    for read in readers:
        # The key alone is to blame.
        read(data)
        assert refused(read, {**data, **keys}).startswith(f"{next(iter(keys))}=")


def test_keys_inside_tables_are_read_or_refused_too() -> None:
    data = json.loads(next(path for path in CONFIGS if path.stem == "kimi-linear-48b").read_text())
    data["linear_attn_config"]["gate_lower_bound"] = -5.0
    plan(data)
    data["linear_attn_config"]["conv_of_values"] = True
    assert "linear_attn_config.conv_of_values=True: must be left out" in refused(plan, data)


@pytest.mark.parametrize(
    "named", [["LlamaForSequenceClassification"], ["LlamaModel"], ["LlamaForCausalLMEagle3"], ["Phi3ForCausalLM"], "LlamaModel"]
)
def test_another_model_than_the_type_stands_for_is_refused(named: Any) -> None:
    """Catches checkpoints with another head, or none, that are read as language models."""
    for read in (plan, decoder_config):
        assert "architectures=" in refused(read, {**LLAMA, "architectures": named})
        assert read({**LLAMA, "architectures": None}) == read({**LLAMA, "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("key", ["rope_of_ours", "mixers", "architectures"])
def test_our_own_files_are_held_to_the_same(key: str, tmp_path: Path) -> None:
    theirs: dict[str, Any] = {"model_type": "twoaxis", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(theirs | {"layer_types": ["full_attention"] * 3, "init_seed": 3, "transformers_version": "5"}))
    assert read_model(path).n_layers == 3
    path.write_text(json.dumps(theirs | {key: ["TwoAxisForTokenClassification"]}))
    with pytest.raises(ConfigError, match=f"{key}="):
        read_model(path)


def test_a_gguf_file_is_held_to_the_same() -> None:
    fields: dict[str, Any] = {
        "llama.embedding_length": 32,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": ["a"],
        "llama.expert_count": 0,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    llama_table(fields, tied=True)
    asking = {"attention.sliding_window": 4, "expert_count": 8, "attention.causal": False, "logit_scale": 0.5}
    for name, value in asking.items():
        with pytest.raises(ConfigError, match=rf"llama\.{name}={value}: must be left out"):
            llama_table({**fields, f"llama.{name}": value}, tied=True)
