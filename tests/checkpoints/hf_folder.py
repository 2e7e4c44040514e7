"""Small Hugging Face folders, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from twoaxis.checkpoints.layouts import state_map
from twoaxis.checkpoints.published_config import decoder_config, layout_of
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
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def byte_tokenizer(*special: str, begin: str | None = None) -> Tokenizer:
    """A tokenizer of bytes with special tokens behind them, one of which may begin every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if begin is not None:
        marked = [(begin, engine.token_to_id(begin))]
        engine.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=marked)
    return engine


@torch.no_grad()
def random_model(config: Any, seed: int = 0) -> Decoder:
    """A decoder away from its initial values, in evaluation mode."""
    model = Decoder.build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()
