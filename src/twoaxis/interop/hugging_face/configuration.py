"""A decoder's configuration in the form that transformers saves and loads."""

import importlib
from typing import Any, Self

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from twoaxis.model import DecoderConfig
from twoaxis.model.config import SublayerConfig
from twoaxis.model.config_json import CONFIG_NAMES, MODEL_TYPE, decoder_fields
from twoaxis.sequence import SequenceConfig


class TwoAxisConfig(PreTrainedConfig):
    """The fields of a `DecoderConfig` under the names of transformers, and what its own tools read.

    `decoder_config` is the configuration that the model is built from; `from_decoder` is its inverse. `layer_types` and the
    numbers of heads are derived from the blocks and describe them to other tools; setting them changes nothing.

    Args:
        vocab_size: token ids are below this.
        hidden_size: width D of the model (`d_model`).
        num_hidden_layers: number of blocks (`n_layers`).
        max_position_embeddings: largest number of tokens of one document (`max_seq_len`).
        rms_norm_eps: eps of every RMSNorm (`norm_eps`).
        tie_word_embeddings: whether the output head is the embedding matrix (`tie_embeddings`).
        embedding_std: as in `DecoderConfig`.
        embedding_norm: as in `DecoderConfig`.
        embedding_local: as in `DecoderConfig`.
        depth: the depth mixer, by table or bare kind.
        blocks: the sublayers of each block, as in `DecoderConfig`.
        parametrization: as in `DecoderConfig`.
        base_d_model: as in `DecoderConfig`.
        base_n_layers: as in `DecoderConfig`.
        init_seed: of the initial values of a new model.

    Raises:
        ConfigError: anything that cannot be built.

    Example:
        >>> config = TwoAxisConfig(depth="deep_delta", blocks=[["short_swa", "swiglu"], ["attention", "swiglu"]])
        >>> config.layer_types, config.decoder_config.depth.kind
        (['sliding_attention', 'full_attention'], 'deep_delta')
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012, so transformers declares it

    vocab_size: int = 256
    hidden_size: int = 64
    num_hidden_layers: int = 2
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    embedding_std: float | None = None
    embedding_norm: str = "none"
    embedding_local: dict | str | None = None
    depth: dict | str = "residual"
    blocks: list | tuple = (("attention", "swiglu"),)
    parametrization: str = "standard"
    base_d_model: int | None = None
    base_n_layers: int | None = None
    init_seed: int = 0
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Completes the depth mixer and the blocks, and derives what describes them."""
        decoder = self.decoder_config
        data = decoder.to_data()
        self.depth, self.blocks, self.embedding_local = data["depth"], data["blocks"], data["embedding_local"]
        super().__post_init__(**{**kwargs, **_description(decoder)})
        # Registers the models, which take seconds to import.
        importlib.import_module("twoaxis.interop.hugging_face.modeling")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Reads what a folder has recorded, perhaps by an older version: options that it lacks mean what was computed then."""
        sizes = {name: getattr(cls, theirs) for theirs, name in CONFIG_NAMES.items() if _is_required(name)}
        # Of transformers itself, which acts on it.
        ours = {name: value for name, value in config_dict.items() if name != "quantization_config"}
        recorded = DecoderConfig.from_record({**sizes, **decoder_fields(ours)}).to_data()
        return super().from_dict(config_dict | {theirs: recorded[name] for theirs, name in CONFIG_NAMES.items()}, **kwargs)

    @classmethod
    def from_decoder(cls, decoder: DecoderConfig, **fields: Any) -> Self:
        """The configuration of this decoder; `fields` are other ones of this class, such as `eos_token_id`."""
        data = decoder.to_data()
        return cls(**{theirs: data[ours] for theirs, ours in CONFIG_NAMES.items()}, **fields)

    @property
    def decoder_config(self) -> DecoderConfig:
        """The configuration that the model is built from."""
        return DecoderConfig.from_data({ours: getattr(self, theirs) for theirs, ours in CONFIG_NAMES.items()})


def _is_required(name: str) -> bool:
    return DecoderConfig.model_fields[name].is_required()


def _description(decoder: DecoderConfig) -> dict[str, Any]:
    shapes = [slot.heads for slot in decoder.stack.slots if slot.heads is not None]
    described: dict[str, Any] = {"layer_types": [_layer_type(block, decoder.d_model) for block in decoder.layers]}
    if shapes:
        first = shapes[0]
        described |= {
            "num_attention_heads": first.n_heads,
            "num_key_value_heads": first.n_kv_heads,
            "head_dim": first.head_dim,
        }
    attends = [part for part in decoder.parts if isinstance(part, SequenceConfig) and part.head_shape(decoder.d_model)]
    windows = [part.pair_window for part in attends if part.pair_window is not None]
    # Engines give this window to every layer that is called sliding.
    return described | ({"sliding_window": windows[0]} if windows else {})


def _layer_type(block: tuple[SublayerConfig, ...], d_model: int) -> str:
    """The name of transformers that best describes what a block remembers of earlier tokens."""
    sequence = [sublayer for sublayer in block if isinstance(sublayer, SequenceConfig)]
    attends = [sublayer for sublayer in sequence if sublayer.head_shape(d_model) or sublayer.pair_window is None]
    if any(sublayer.receptive_field is None for sublayer in sequence if sublayer not in attends):
        return "hybrid" if attends else "linear_attention"
    if any(sublayer.receptive_field is None for sublayer in attends):
        return "full_attention"
    # A block that remembers nothing has no name of its own; it is a convolution over one token.
    return "sliding_attention" if attends else "conv"


AutoConfig.register(MODEL_TYPE, TwoAxisConfig, exist_ok=True)
