"""Our reading of Hugging Face folders computes what transformers does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.checkpoints.published_folder import read_pretrained

transformers = pytest.importorskip("transformers", reason="without transformers there is nothing to compare with")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}

FIRST = {"original_max_position_embeddings": 16}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.2}
BETAS = {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("Llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}}),
        ("Llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, **LLAMA3}}),
        ("Llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, **LLAMA3, **FIRST}}),
        ("Mistral", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, **FIRST}}),
        ("Qwen2", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "truncate": False, **FIRST}}),
        ("Qwen3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, **MSCALE, **FIRST}}),
        ("Qwen3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, **BETAS, **FIRST}}),
        ("Mistral", {"sliding_window": 5}),
        ("Qwen2", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 16}),
    ],
    ids=str,
)
def test_logits(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    ours = read_pretrained(tmp_path).model
    tokens = torch.randint(61, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=5e-6)
