"""What `config.json` of transformers calls the fields of our configuration."""

from collections.abc import Mapping
from typing import Any

from twoaxis.model.unread_keys import refuse_architectures, refuse_unread

MODEL_TYPE = "twoaxis"
"""What `config.json` calls a model of this library."""

CONFIG_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "embedding_std": "embedding_std",
    "embedding_norm": "embedding_norm",
    "depth": "depth",
    "blocks": "blocks",
}
"""Ours by theirs."""


ARCHITECTURES = ("TwoAxisForCausalLM", "TwoAxisModel")

DESCRIBED = ("layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
"""Keys that say for other programs what follows from `blocks`."""


def decoder_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain data of a `DecoderConfig`, from that of a `config.json`; what is left out is left out.

    Raises:
        ConfigError: a key that is not ours and asks for something.

    Example:
        >>> decoder_fields({"model_type": "twoaxis", "hidden_size": 8, "use_cache": True})
        {'d_model': 8}
    """
    refuse_architectures(data, ARCHITECTURES)
    refuse_unread(data, (*CONFIG_NAMES, *DESCRIBED, "architectures", "init_seed"))
    return {ours: data[theirs] for theirs, ours in CONFIG_NAMES.items() if theirs in data}
