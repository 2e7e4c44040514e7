"""Reading Hugging Face folders without transformers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twoaxis import Decoder, DecoderConfig
from twoaxis.checkpoints.decoder_folder import read_decoder, write_decoder
from twoaxis.checkpoints.published_config import decoder_config
from twoaxis.checkpoints.published_folder import read_pretrained
from twoaxis.core.errors import CheckpointError, ConfigError

from .hf_folder import BASE, write_folder

TOKENS = torch.arange(20)[None]
MUDD = {
    # In the place of those that other types have.
    **dict.fromkeys(BASE),
    **{"dim": 32, "n_layer": 3, "n_head": 4, "n_local_heads": 4, "intermediate_size": 256, "vocab_size": 256, "block_size": 64},
    **{"norm_eps": 1e-6, "rope_base": 5e3, "use_qk_norm": True, "round64": True, "expand_last": True, "dense_type": "qkvr"},
}
"""The keys of MUDDFormer's own files."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2", "tie_word_embeddings": False},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "mistral", "sliding_window": 4},
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
        {"model_type": "qwen3_attnres", "attnres_num_blocks": 2},
        {"model_type": "qwen3_attnres", "attnres_mode": "full"},
        {"model_type": "muddformer", "tie_word_embeddings": False, **MUDD},
    ],
    ids=lambda changes: changes.get("model_type", "llama") + ("-scaled" if "rope_parameters" in changes else ""),
)
def test_a_folder_is_read_as_it_was_written(changes: dict[str, Any], tmp_path: Path) -> None:
    model = write_folder(tmp_path, **changes)
    found = read_pretrained(tmp_path)
    assert torch.equal(found.model(TOKENS), model(TOKENS))
    assert found.tokenizer and not found.model.training


def test_shards(tmp_path: Path) -> None:
    model = write_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for name, keys in files.items():
        save_file({key: tensors[key] for key in keys}, tmp_path / name)
    index = {"weight_map": {key: name for name, keys in files.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(read_pretrained(tmp_path).model(TOKENS), model(TOKENS))
    save_file({key: tensors[key] for key in names[6:]}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks '{names[5]}', which the index says it has"):
        read_pretrained(tmp_path)
    save_file({key: tensors[key] + (key == names[0]) for key in (names[0], *names[5:])}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=f"b.safetensors: holds '{names[0]}', as a file before it"):
        read_pretrained(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors: cannot be read"):
        read_pretrained(tmp_path)
    index["weight_map"][names[0]] = "../b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must be a file of the folder"):
        read_pretrained(tmp_path)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    assert {parameter.dtype for parameter in read_pretrained(tmp_path).model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_codes_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: (10 * tensors[name]).to(dtype)}, path)
    with pytest.raises(CheckpointError, match=rf"1 of another type \({name} is {dtype}\): all tensors must fit the model"):
        read_pretrained(tmp_path)


def test_one_error_lists_all_tensors_that_do_not_fit(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if "layers.2" in name]:
        tensors[name.replace("layers.2", "layers.3")] = tensors.pop(name)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as error:
        read_pretrained(tmp_path)
    message = str(error.value)
    assert "9 missing (model.layers.2.input_layernorm.weight, " in message
    assert "9 unexpected (model.layers.3." in message
    assert all(message.count(f"layers.{layer}.") == 9 for layer in (2, 3))
    assert "1 of another shape (model.norm.weight is [7], must be [32])" in message


def test_a_configuration_without_bounds_takes_no_memory(tmp_path: Path) -> None:
    write_folder(tmp_path / "theirs")
    write_decoder(Decoder.build(DecoderConfig(vocab_size=8, d_model=8, n_layers=1)), tmp_path / "ours")
    for folder, read in (("theirs", read_pretrained), ("ours", read_decoder)):
        path = tmp_path / folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 10**12}))
        with pytest.raises(CheckpointError, match=r"1 of another shape \(model.*, must be \[1000000000000, "):
            read(tmp_path / folder)


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    read_pretrained(tmp_path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        read_pretrained(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        read_pretrained(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"convert pytorch_model.bin, a pickle, which is never read"):
        read_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2': must be one of llama, mistral, qwen2, qwen3"),
        ({"model_type": "gpt_neox"}, "model_type='gpt_neox': must be one of llama, mistral"),
        ({"attention_bias": True}, "sublayer attention with biases: must be one that our decoder has"),
        ({"mlp_bias": True}, "sublayer swiglu with biases: must be one that our decoder has"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': must be one of silu"),
        ({"hidden_size": None}, "hidden_size is missing"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type='dynamic': must be default or one of linear,",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rope type='longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_scaling: factor is missing in 'linear'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling: factor=0.5: must be >= 1"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing in 'llama3'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "mscale": 1}}, "rope_parameters.mscale=1: must be one of"),
        ({"rope_parameters": {"rope_type": "yarn", "truncate": 0}}, "rope_parameters.truncate=0: must be true or false"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn': must be a table"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: must be left out with rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: must be 1"),
        ({"rope_theta": "large", "rope_parameters": None}, "rope_theta='large': must be a number > 0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "must be one for all"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: must be absent"),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["conv"] * 3}, "layer_types="),
        ({"model_type": "qwen3_attnres", "attnres_mode": "delta"}, "attnres_mode='delta': must be one of block, full"),
        ({"model_type": "qwen3_attnres", "attnres_use_null_source": True}, "attnres_use_null_source=True"),
        ({"model_type": "muddformer", **MUDD, "use_linear_bias": True}, "norm='layer': must be 'rms'"),
    ],
    ids=str,
)
def test_what_our_decoder_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder_config({"model_type": "llama", **BASE, **changes})


def test_older_keys() -> None:
    old = {**BASE, "model_type": "llama", "rope_parameters": None, "rope_theta": 5e5}
    assert decoder_config(old).blocks[0][0].rope_theta == 5e5  # type: ignore[union-attr]
    missing = {name: value for name, value in old.items() if name != "hidden_size"}
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        decoder_config(missing)


def test_published_depth_mixers() -> None:
    blocks: Any = decoder_config({**BASE, "model_type": "qwen3_attnres", "attnres_num_blocks": 2}).depth
    full: Any = decoder_config({**BASE, "model_type": "qwen3_attnres", "attnres_mode": "full"}).depth
    assert (blocks.block_size, blocks.count, full.block_size) == (2, "layer", 1)
    mudd = decoder_config({"model_type": "muddformer", **MUDD})
    sublayers: Any = mudd.layers
    assert [block[0].rope_theta for block in sublayers] == [5e3] * 3
    assert [block[1].d_ff for block in sublayers] == [128, 256, 384]


def test_windows_of_qwen2() -> None:
    qwen = {**BASE, "model_type": "qwen2", "sliding_window": 4, "max_window_layers": 1}
    assert len(decoder_config(qwen).blocks) == 1
    mixed = decoder_config({**qwen, "use_sliding_window": True})
    assert [block[0].window for block in mixed.layers] == [None, 4, 4]  # type: ignore[union-attr]


def test_what_tells_the_types_apart() -> None:
    heads: dict[str, Any] = {
        kind: decoder_config({**BASE, "model_type": kind}).blocks[0][0] for kind in ("llama", "mistral", "qwen2", "qwen3")
    }
    assert {kind: (one.qk_norm, one.bias) for kind, one in heads.items()} == {
        "llama": ("none", "none"),
        "mistral": ("none", "none"),
        "qwen2": ("none", "qkv"),
        "qwen3": ("before_rope", "none"),
    }
