"""Reads a model from a file, a folder, or a preset."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twoaxis.core.config import is_record, read_config_file
from twoaxis.core.errors import ConfigError, nearest
from twoaxis.model import DecoderConfig
from twoaxis.model.config_json import MODEL_TYPE, decoder_fields
from twoaxis.planner.model.hugging_face import read_hugging_face
from twoaxis.planner.model.shape import ModelShape

CONFIG_FILE = "config.json"
PRESETS = Path(__file__).parent / "presets"
"""One file each, with the source of its numbers."""


def preset_names() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(sorted(_presets()))


def read_model(source: str | Path) -> ModelShape:
    """Reads a model from a file, a folder, or the table of presets.

    Args:
        source: a Hugging Face `config.json`, ours or of another family; a TOML or JSON file with a decoder of this library, or
            with a recipe whose `model` has a vocab_size; a folder with a `config.json` of any of these; or the name of a
            preset. A file takes precedence over a preset of its name.

    Raises:
        ConfigError: in one line, naming the file and the key, when it cannot be read or planned.

    Example:
        >>> read_model("dense-7b").n_layers
        32
    """
    path = Path(source)
    if path.is_dir():
        path = path / CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"model {source}: the folder holds no {CONFIG_FILE}; name the file")
    elif path.suffix == ".gguf":
        raise ConfigError(f"model {source}: must be a config.json, a TOML or a preset; plan the config.json of the same model")
    elif not path.is_file():
        path = _preset(str(source))
    name = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    data = read_config_file(path, "model")
    try:
        return _of_data(data, name, recorded=is_record(path))
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None


def _presets() -> dict[str, Path]:
    return {path.stem: path for path in PRESETS.iterdir() if path.suffix in (".toml", ".json")}


def _preset(name: str) -> Path:
    presets = _presets()
    if name not in presets:
        raise ConfigError(f"model {name!r}: is no file, no folder and no preset; {nearest(name, presets)}")
    return presets[name]


def _of_data(data: Mapping[str, Any], name: str, recorded: bool) -> ModelShape:
    if data.get("model_type") == MODEL_TYPE:
        return ModelShape.of_decoder(DecoderConfig.from_record(decoder_fields(data)), name)
    if "model_type" in data:
        return read_hugging_face(data, name)
    decoder = data.get("model", data)
    if not isinstance(decoder, Mapping) or "d_model" not in decoder:
        allowed = "a Hugging Face config with model_type, a decoder with d_model, or a recipe with a model table"
        raise ConfigError(f"must hold {allowed}; see `twoaxis show`")
    if decoder.get("vocab_size") is None:
        raise ConfigError("vocab_size is missing: a plan reads no tokenizer, which sets it in training; add it to the model")
    read = DecoderConfig.from_record if recorded else DecoderConfig.from_data
    shape = ModelShape.of_decoder(read(decoder), name)
    optimizer = data.get("optimizer") if "model" in data else None
    return shape if not isinstance(optimizer, Mapping) else shape.with_optimizer(optimizer.get("kind", "adamw"))
