"""Small GGUF files, written by the library gguf from a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoaxis.checkpoints.gguf_file import ENDS, NAMES
from twoaxis.checkpoints.published_folder import read_tensors

from .hf_folder import byte_tokenizer

NAMES_IN_FILE = {ours: theirs for theirs, ours in NAMES.items()}
ENDS_IN_FILE = {ours: theirs for theirs, ours in ENDS.items()}


def write_gguf(path: Path, folder: Path, **changes: Any) -> None:
    """Writes a llama as its converter does; changes replace keys, and None leaves one out."""
    import gguf

    data = json.loads((folder / "config.json").read_text())
    letters = sorted(byte_tokenizer().get_vocab().items(), key=lambda pair: pair[1])
    tokens = ["<|end|>", *(letter for letter, _ in letters), "ab"]
    fields = {
        "llama.embedding_length": data["hidden_size"],
        "llama.block_count": data["num_hidden_layers"],
        "llama.context_length": data["max_position_embeddings"],
        "llama.attention.head_count": data["num_attention_heads"],
        "llama.attention.head_count_kv": data["num_key_value_heads"],
        "llama.feed_forward_length": data["intermediate_size"],
        "llama.attention.layer_norm_rms_epsilon": data["rms_norm_eps"],
        "llama.vocab_size": data["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in fields.items():
        if value is not None:
            adders[type(value)](name, value)
    for name, tensor in read_tensors(folder).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = in_pairs(tensor, data["hidden_size"] // data["num_attention_heads"])
        writer.add_tensor(name_in_file(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Puts row i of the first half of each head and row i of its second one side by side, as the converter does."""
    return torch.cat([torch.stack(head.chunk(2), 1).flatten(0, 1) for head in weight.split(head_dim)])


def name_in_file(name: str) -> str:
    """What the converter calls a tensor."""
    if name in ENDS_IN_FILE:
        return ENDS_IN_FILE[name]
    layer, module = name.removeprefix("model.layers.").split(".", 1)
    module, _, what = module.rpartition(".")
    return f"blk.{layer}.{NAMES_IN_FILE[module]}.{what}"
