"""Reading Llama-like models from GGUF files, with the library gguf.

Letters: H heads, K key width.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoaxis.core.errors import CheckpointError, ConfigError, problem
from twoaxis.interop.checkpoints import Pretrained, build_model
from twoaxis.interop.configuration import decoder_config

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
"""Modules of a layer, by what the file calls them."""

ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

CONTROL = 3
"""The type of tokens that no text spells."""

PRE_TOKENIZERS = ("gpt-2", "smollm")
"""How texts are cut before byte-pair encoding; the second one cuts digits apart first."""


def read_gguf(path: Path) -> Pretrained:
    """Reads a file of architecture llama, whatever its quantisation; weights become float32.

    Raises:
        ConfigError: the library is missing, or a model that our decoder cannot be.
        CheckpointError: a file that cannot be read, or that lacks tensors.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(f"{path}: needs the library gguf; install twoaxis[gguf]") from None
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is no GGUF file ({error}); fetch it again") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ConfigError(problem("general.architecture", fields.get("general.architecture"), "'llama'", "choose another file"))
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        tensors[layout_name(tensor.name)] = torch.from_numpy(values.copy()).float()
    config = decoder_config(llama_table(fields, tied="lm_head.weight" not in tensors))
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        tensors[name] = rotated_by_halves(tensors[name], config.d_model // fields["llama.attention.head_count"])
    end = fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]]
    return Pretrained(build_model(config, "llama", tensors), tokenizer_json(fields), end)


def tokenizer_json(fields: dict[str, Any]) -> str:
    """The text of a `tokenizer.json` that cuts texts as the file says.

    Raises:
        ConfigError: a tokenizer other than byte-level pairs, or one that cuts texts in another way.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        allowed = f"gpt2 with one of {', '.join(PRE_TOKENIZERS)}"
        raise ConfigError(problem("tokenizer", f"{model} with {pre}", allowed, "choose another file"))
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    engine = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    engine.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return engine.to_str()


def llama_table(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """The table of a `config.json`."""
    keys = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "vocab_size": "vocab_size",
    }
    data: dict[str, Any] = {ours: fields[f"llama.{theirs}"] for ours, theirs in keys.items() if f"llama.{theirs}" in fields}
    if fields.get("llama.rope.scaling.type", "none") != "none":
        names = {"rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length"}
        scaling = {ours: fields.get(f"llama.rope.scaling.{theirs}") for ours, theirs in names.items()}
        data["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    # The file keeps it in float32, of which this is the shortest spelling.
    data["rms_norm_eps"] = float(f"{data['rms_norm_eps']:.6g}")
    return {"model_type": "llama", "tie_word_embeddings": tied, **data}


def layout_name(theirs: str) -> str:
    """The name in a Hugging Face folder; names that are not known stay, to be refused."""
    if theirs in ENDS:
        return ENDS[theirs]
    if not theirs.startswith("blk."):
        return theirs
    _, layer, module, what = theirs.split(".")
    return f"model.layers.{layer}.{NAMES.get(module, module)}.{what}"


def rotated_by_halves(weight: Tensor, head_dim: int) -> Tensor:
    """From pairs of channels side by side to halves, which is how rotations find the pairs here."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
