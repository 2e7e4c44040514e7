"""Small Hugging Face folders, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from twoaxis.interop.configuration import decoder_config, layout_of
from twoaxis.interop.state_maps import state_map
from twoaxis.model import Decoder

BASE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def write_folder(folder: Path, **changes: Any) -> Decoder:
    """Writes a folder with random weights and a tokenizer of bytes, and returns our model of it."""
    data = {"model_type": "llama", "tie_word_embeddings": True, **BASE, **changes}
    config = decoder_config(data)
    model = random_model(config)
    tensors = state_map(layout_of(data), config).save(model)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.save(str(folder / "tokenizer.json"))
    return model


@torch.no_grad()
def random_model(config: Any, seed: int = 0) -> Decoder:
    """A decoder away from its initial values, in evaluation mode."""
    model = Decoder.build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()
