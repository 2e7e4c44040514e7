"""Hugging Face folders, read without transformers: `config.json`, `tokenizer.json` and safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from twoaxis.checkpoints.configuration import decoder_config, layout_of
from twoaxis.checkpoints.layouts import state_map
from twoaxis.core.errors import CheckpointError, problem
from twoaxis.core.folders import check_utf8
from twoaxis.core.parameters import materialize
from twoaxis.core.text import decode_text, json_value, read_text
from twoaxis.model import Decoder, DecoderConfig

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Pretrained(NamedTuple):
    """A model with its tokenizer.

    Attributes:
        model: in float32, in evaluation mode.
        tokenizer: the text of its `tokenizer.json`; None without one.
        end_of_document: the name of the token that ends a text; None if unknown.
    """

    model: Decoder
    tokenizer: str | None = None
    end_of_document: str | None = None


def read_pretrained(path: Path) -> Pretrained:
    """Reads a Hugging Face folder, or a GGUF file.

    Raises:
        CheckpointError: a file that is missing or damaged.
        ConfigError: a model that is not supported.
    """
    if path.suffix == ".gguf":
        from twoaxis.checkpoints.gguf_file import read_gguf

        return read_gguf(path)
    return read_folder(path)


def read_folder(folder: Path) -> Pretrained:
    """Reads a model of a supported type: llama (SmolLM2 and many others), mistral, qwen2, qwen3, MUDDFormer, ....

    Raises:
        CheckpointError: a file that is missing or damaged, or tensors that do not fit the configuration.
        ConfigError: a model that is not supported.
    """
    data = read_json(check_utf8(folder, "folder") / "config.json")
    model = build_model(decoder_config(data), layout_of(data), read_tensors(folder))
    return Pretrained(model, read_tokenizer(folder), end_of_document(folder))


def build_model(config: DecoderConfig, layout: str, tensors: Mapping[str, Tensor]) -> Decoder:
    """Builds a model from the tensors of a published layout.

    Raises:
        CheckpointError: tensors that do not fit the configuration.
    """
    model = materialize(lambda: Decoder(config))
    state_map(layout, config).load(model, tensors)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads every tensor of a folder, as it is stored.

    Raises:
        CheckpointError: no safetensors, a shard that is missing or damaged, or one without a tensor of the index.
    """
    tensors: dict[str, Tensor] = {}
    for name, expected in _files(folder).items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118, not a dict
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{folder / name}: cannot be read ({reason}); fetch the file again") from None
        if missing := sorted(set(expected) - tensors.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{folder / name}: lacks {missing[0]!r}{more}, which the index says it has; fetch it again")
    return tensors


def _files(folder: Path) -> dict[str, list[str]]:
    """The files, each with its tensors in the index; a single file takes precedence, as in transformers."""
    if (folder / SINGLE).exists():
        return {SINGLE: []}
    if (folder / INDEX).exists():
        found: dict[str, list[str]] = {}
        weights = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map; fetch the file again")
        for key, name in weights.items():
            if Path(str(name)).name != name:
                raise CheckpointError(f"{folder / INDEX}: shard={name!r}: must be a file of the folder; fetch the index again")
            found.setdefault(name, []).append(key)
        return found
    other = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
    remedy = f"convert {other[0]}, a pickle, which is never read" if other else "name the folder of a checkpoint"
    raise CheckpointError(f"{folder}: must hold {SINGLE} or {INDEX}; {remedy}")


def read_tokenizer(folder: Path) -> str | None:
    """The text of `tokenizer.json`; None without one.

    Raises:
        CheckpointError: it cannot be read, or is not in UTF-8.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    return read_text(path, str(path), "fetch the file again", CheckpointError)


def end_of_document(folder: Path) -> str | None:
    """The token that ends a text, from `tokenizer_config.json`.

    Raises:
        CheckpointError: the file is damaged, or its `eos_token` is no token.
    """
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.exists() else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise CheckpointError(f"{path}: {problem('eos_token', token, 'a token of the tokenizer', 'correct it in the file')}")
    return token


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON table.

    Raises:
        CheckpointError: it is missing, damaged or no table.
    """
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); name the folder of a whole checkpoint") from None


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Reads a JSON table from the content of a file.

    Raises:
        CheckpointError: it is damaged or no table.
    """
    text = decode_text(content, where, CheckpointError)
    try:
        data = json_value(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: cannot be read ({error}); name the folder of a whole checkpoint") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: must be a table; name the folder of a whole checkpoint")
    return data
