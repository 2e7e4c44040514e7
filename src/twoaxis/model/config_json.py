"""Keys of a `config.json`: the names of our fields in transformers, keys without effect, and keys that are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from twoaxis.core.errors import ConfigError

MODEL_TYPE = "twoaxis"
"""The `model_type` of a model of this library."""

CONFIG_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "embedding_std": "embedding_std",
    "embedding_norm": "embedding_norm",
    "embedding_local": "embedding_local",
    "depth": "depth",
    "blocks": "blocks",
    "parametrization": "parametrization",
    "base_d_model": "base_d_model",
    "base_n_layers": "base_n_layers",
}
"""Our fields by their key in `config.json`."""


ARCHITECTURES = ("TwoAxisForCausalLM", "TwoAxisModel")

DESCRIBED = ("layer_types", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
"""Keys for other programs, derived from `blocks`."""


def decoder_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain data of a `DecoderConfig` from that of a `config.json`; absent keys stay absent.

    Raises:
        ConfigError: a key that is set and not read.

    Example:
        >>> decoder_fields({"model_type": "twoaxis", "hidden_size": 8, "use_cache": True})
        {'d_model': 8}
    """
    refuse_architectures(data, ARCHITECTURES)
    refuse_unread(data, (*CONFIG_NAMES, *DESCRIBED, "architectures", "init_seed"))
    return {ours: data[theirs] for theirs, ours in CONFIG_NAMES.items() if theirs in data}


WITHOUT_EFFECT = frozenset(
    # Format, and the program that saved it.
    {"model_type", "transformers_version", "auto_map", "name_or_path", "dtype", "torch_dtype", "torchscript", "use_bfloat16"}
    # Special tokens and tokenizer.
    | {"bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"}
    | {"forced_bos_token_id", "forced_eos_token_id", "tokenizer_class", "prefix", "task_specific_params"}
    | {"max_sequence_length", "model_max_length", "seq_length"}
    # Outputs of a call, and its implementation.
    | {"use_cache", "return_dict", "return_dict_in_generate", "output_hidden_states", "output_attentions", "output_scores"}
    | {"output_router_logits", "chunk_size_feed_forward", "attn_implementation", "pretraining_tp", "ep_size", "is_decoder"}
    # Training: initial values, dropout, losses.
    | {"initializer_range", "attention_dropout", "hidden_dropout", "classifier_dropout", "resid_pdrop", "embd_pdrop"}
    | {"attn_pdrop", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "neftune_noise_alpha"}
    | {"gradient_checkpointing", "use_gradient_checkpointing", "is_training"}
    # Classification heads, which `architectures` would name.
    | {"id2label", "label2id", "num_labels", "problem_type", "finetuning_task"}
    # Sampling, which older files keep here.
    | {"do_sample", "temperature", "top_k", "top_p", "typical_p", "min_length", "max_length", "max_new_tokens", "num_beams"}
    | {"num_beam_groups", "diversity_penalty", "length_penalty", "repetition_penalty", "no_repeat_ngram_size"}
    | {"encoder_no_repeat_ngram_size", "num_return_sequences", "early_stopping", "bad_words_ids", "suppress_tokens"}
    | {"begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values"}
)
"""Keys of any family that do not change what the model computes."""

OF_TOOLS = ("_", "unsloth_", "transformers.js")
"""Prefixes of keys that tools write for their own use."""

ON_BY_DEFAULT = ("causal", "is_causal", "use_rope")
"""Last parts of keys that change the model by being false."""

SHOWN = 60
"""Characters of a value that an error quotes."""


def refuse_unread(data: Mapping[str, Any], read: Collection[str], where: str = "") -> None:
    """Refuses a key that is set and not read; false, 0, null and empty values count as not set.

    Args:
        data: the table.
        read: keys that are read, or known to have no effect here, in addition to `WITHOUT_EFFECT`.
        where: prefix of each name in an error, such as `text_config.`.

    Raises:
        ConfigError: naming the first such key.

    Example:
        >>> refuse_unread({"hidden_size": 8, "use_cache": True, "attn_output_gate": False}, {"hidden_size"})
    """
    for name, value in data.items():
        if name in read or name in WITHOUT_EFFECT or name.startswith(OF_TOOLS):
            continue
        is_set = value is False if name.rpartition(".")[2] in ON_BY_DEFAULT else bool(value)
        if is_set:
            quoted = repr(value)
            shown = "a table" if isinstance(value, Mapping) else quoted[:SHOWN] + ("..." if len(quoted) > SHOWN else "")
            allowed = "must be left out, since it is not read for models of this type and may change what they compute"
            raise ConfigError(f"{where}{name}={shown}: {allowed}; remove it where it does not")


def refuse_architectures(data: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses a file whose `architectures` are not the language model of its type, such as one with a classification head.

    Raises:
        ConfigError: another architecture.
    """
    named = data.get("architectures") or []
    for one in named if isinstance(named, list) else [named]:
        if one not in known:
            allowed = f"must be {' or '.join(known)}, the language model of this type, whose shape alone is known"
            raise ConfigError(f"architectures={named!r}: {allowed}; correct it where the file holds that model")
