"""Reading models from Hugging Face folders, without transformers: `config.json` and safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from twoaxis.core.errors import CheckpointError, problem
from twoaxis.core.folders import check_utf8
from twoaxis.core.parameters import materialize
from twoaxis.core.text import read_text
from twoaxis.interop.configuration import decoder_config, layout_of
from twoaxis.interop.safetensors_folder import read_json, read_tensors
from twoaxis.interop.state_maps import state_map
from twoaxis.model import Decoder, DecoderConfig


class Pretrained(NamedTuple):
    """A model with its tokenizer.

    Attributes:
        model: in float32, in evaluation mode.
        tokenizer: the text of its `tokenizer.json`; None without one.
        end_of_document: the token that ends a text, as the tokenizer spells it; None where nothing says it.
    """

    model: Decoder
    tokenizer: str | None = None
    end_of_document: str | None = None


def read_pretrained(path: Path) -> Pretrained:
    """Reads a Hugging Face folder, or a GGUF file.

    Raises:
        CheckpointError: nothing there, or a file that is missing or damaged.
        ConfigError: a model that our decoder cannot be.
    """
    if path.suffix == ".gguf":
        from twoaxis.interop.gguf_file import read_gguf

        return read_gguf(path)
    return read_folder(path)


def read_folder(folder: Path) -> Pretrained:
    """Reads a model that our decoder can be: of type llama (SmolLM2 and many others), mistral, qwen2, qwen3, MUDDFormer, ....

    Raises:
        CheckpointError: a file that is missing or damaged, or tensors that do not fit the configuration.
        ConfigError: a model that our decoder cannot be.
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
