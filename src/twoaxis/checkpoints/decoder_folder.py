"""Folders of our own models, without transformers: `config.json`, `model.safetensors` and the tokenizer.

They are the folders that `twoaxis.interop.hugging_face` writes and reads, less the files that only transformers needs.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from twoaxis.checkpoints.layouts.state_map import Entry, Part, StateMap
from twoaxis.checkpoints.published_folder import (
    GENERATION_CONFIG,
    SINGLE,
    check_model_folder,
    end_of_document,
    read_json,
    read_tensors,
    read_tokenizer,
    write_source_files,
)
from twoaxis.core.errors import CheckpointError, ConfigError, problem
from twoaxis.core.files import check_utf8, new_folder
from twoaxis.core.parameters import materialize
from twoaxis.core.text import read_text
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer, load_tokenizer
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.config_json import ARCHITECTURES, CONFIG_NAMES, MODEL_TYPE, decoder_fields

DEFINITION_FILE = "twoaxis_tokenizer.json"
"""The tokenizer as this library defines it."""


class DecoderFolder(NamedTuple):
    """The content of a folder.

    Attributes:
        model: the decoder, in float32, whatever the file has.
        tokenizer: None when there is none in the folder.
    """

    model: Decoder
    tokenizer: Tokenizer | None


def write_decoder(
    model: Decoder, folder: Path, tokenizer: Tokenizer | None = None, source_files: Mapping[str, bytes] | None = None
) -> Path:
    """Writes a model in its own dtype, its tokenizer and its source files; the folder appears whole or not at all.

    Raises:
        DataError: the folder holds something, or cannot be written.
    """
    data, dtype = model.config.to_data(), str(model.embedding.weight.dtype).removeprefix("torch.")
    config = {"architectures": [ARCHITECTURES[0]], "model_type": MODEL_TYPE, "dtype": dtype}
    config |= {theirs: data[ours] for theirs, ours in CONFIG_NAMES.items()}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _names(model).save(model).items()}
    with new_folder(folder) as draft:
        _write_json(draft / "config.json", config)
        save_file(tensors, draft / SINGLE, metadata={"format": "pt"})
        # safetensors makes its files private, whatever the umask.
        shutil.copymode(draft / "config.json", draft / SINGLE)
        if tokenizer is not None:
            (draft / DEFINITION_FILE).write_text(tokenizer.definition, encoding="utf-8")
            end = tokenizer.end_of_document
            if ends := sorted(model.end_tokens | ({end} if end is not None else set())):
                settings = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": ends[0] if end is None else end}
                _write_json(draft / GENERATION_CONFIG, settings)
            write_source_files(source_files or {}, draft)
    return folder


def read_decoder(folder: Path) -> DecoderFolder:
    """Reads a model of this library, which `write_decoder` or transformers has written.

    Raises:
        CheckpointError: no folder of such a model, or a damaged one.
    """
    data = read_json(check_model_folder(folder) / "config.json")
    if (kind := data.get("model_type")) != MODEL_TYPE:
        remedy = "other models become ones of this library by `twoaxis retrofit`"
        raise CheckpointError(f"folder {folder}: model_type={kind!r} must be {MODEL_TYPE!r}; {remedy}")
    try:
        config = DecoderConfig.from_record(decoder_fields(data))
    except ConfigError as error:
        raise CheckpointError(f"folder {folder}: config.json: {error}") from None
    with torch.device("meta"):
        names = _names(Decoder(config))
    tensors = read_tensors(folder)
    try:
        # Before the model takes memory: a damaged configuration may be of any size.
        names.check(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"folder {folder}: weights and config.json differ ({error}); export it again") from None
    model = materialize(lambda: Decoder(config))
    names.load(model, tensors)
    return DecoderFolder(model.eval(), _read_tokenizer(folder))


def tokenizer_from(source: str) -> Tokenizer:
    """The tokenizer of a folder, or that of bytes.

    Args:
        source: a folder, or `bytes`.

    Raises:
        CheckpointError: a folder without a tokenizer, or with a damaged one.
    """
    if source == "bytes":
        return ByteTokenizer()
    found = _read_tokenizer(check_utf8(Path(source), "folder"))
    if found is None:
        allowed = f"a folder with {DEFINITION_FILE} or tokenizer.json, or bytes"
        raise CheckpointError(problem("--tokenizer", source, allowed, "name the folder that the model was exported to"))
    return found


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, ours or another one; None without one."""
    if (folder / DEFINITION_FILE).exists():
        path = folder / DEFINITION_FILE
        return load_tokenizer(read_text(path, str(path), "export it again", CheckpointError))
    text = read_tokenizer(folder)
    return None if text is None else SubwordTokenizer(text, end_of_document(folder), f"tokenizer of {folder}")


def _names(model: Decoder) -> StateMap:
    """The names in transformers, where the head stands outside the decoder."""
    entries = []
    for ours, parameter in model.named_parameters():
        name = "lm_head.weight" if ours == "head.weight" else f"model.decoder.{ours}"
        entries.append(Entry(ours, (Part(name, tuple(parameter.shape)),)))
    tied = {} if model.head is not None else {"lm_head.weight": "model.decoder.embedding.weight"}
    return StateMap("twoaxis", tuple(entries), tied=tied)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
