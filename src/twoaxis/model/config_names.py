"""What `config.json` of transformers calls the fields of our configuration."""

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "twoaxis"
"""What `config.json` calls a model of this library."""

CONFIG_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "depth": "depth",
    "blocks": "blocks",
}
"""Ours by theirs."""


def decoder_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain data of a `DecoderConfig`, from that of a `config.json`; what is left out is left out.

    Example:
        >>> decoder_fields({"model_type": "twoaxis", "hidden_size": 8, "use_cache": True})
        {'d_model': 8}
    """
    return {ours: data[theirs] for theirs, ours in CONFIG_NAMES.items() if theirs in data}
