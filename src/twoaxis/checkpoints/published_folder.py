"""Hugging Face folders without transformers: `config.json`, `tokenizer.json`, safetensors, and untouched files.

A run that begins with a published model copies these files, and an export restores them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from twoaxis.checkpoints.layouts import state_map
from twoaxis.checkpoints.published_config import decoder_config, layout_of
from twoaxis.core.errors import CheckpointError, problem
from twoaxis.core.files import check_utf8
from twoaxis.core.parameters import materialize
from twoaxis.core.text import decode_text, json_value, read_text
from twoaxis.model import Decoder, DecoderConfig

if TYPE_CHECKING:
    from twoaxis.data.chat_template import ChatTemplate


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

FSDP_SHARDS = "pytorch_model_fsdp_0"
"""The folder in which accelerate keeps the shards of a model."""


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


def check_model_folder(folder: Path) -> Path:
    """Refuses a path that is not UTF-8, and a checkpoint that has the model only in shards of FSDP; returns the folder.

    Raises:
        CheckpointError: such a checkpoint.
        DataError: such a path.
    """
    check_utf8(folder, "folder")
    if (shards := folder / FSDP_SHARDS).is_dir() and not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        remedy = f"save with fsdp_config state_dict_type FULL_STATE_DICT, or run `accelerate merge-weights {shards} OUT`"
        raise CheckpointError(f"folder {folder}: holds {FSDP_SHARDS}, shards of a model: must hold {SINGLE}; {remedy}")
    return folder


def read_folder(folder: Path) -> Pretrained:
    """Reads a model of a supported type: llama (SmolLM2 and many others), mistral, qwen2, qwen3, MUDDFormer, ....

    Raises:
        CheckpointError: a file that is missing or damaged, or tensors that do not fit the configuration.
        ConfigError: a model that is not supported.
    """
    data = read_json(check_model_folder(folder) / "config.json")
    model = build_model(decoder_config(data), layout_of(data), read_tensors(folder))
    return Pretrained(model, read_tokenizer(folder), end_of_document(folder))


def build_model(config: DecoderConfig, layout: str, tensors: Mapping[str, Tensor]) -> Decoder:
    """Builds a model from the tensors of a published layout.

    Raises:
        CheckpointError: tensors that do not fit the configuration.
    """
    table = state_map(layout, config)
    # Before the model takes memory: a damaged configuration may be of any size.
    table.check(tensors)
    model = materialize(lambda: Decoder(config))
    table.load(model, tensors)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads every tensor of a folder, as it is stored.

    Raises:
        CheckpointError: no safetensors; a shard that is missing or damaged, lacks a tensor of the index, or repeats one.
    """
    tensors: dict[str, Tensor] = {}
    for name, expected in _files(folder).items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{folder / name}: cannot be read ({reason}); fetch the file again") from None
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{folder / name}: holds {twice[0]!r}, as a file before it: must be in one; fetch both again")
        if missing := sorted(set(expected) - found.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{folder / name}: lacks {missing[0]!r}{more}, which the index says it has; fetch it again")
        tensors.update(found)
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


FOLDER = "source"
"""The folder of these files in a run."""

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
TOKENS_MAP, CHAT_TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
FILES = (TOKENIZER_CONFIG, TOKENS_MAP, CHAT_TEMPLATE, GENERATION_CONFIG)

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SAMPLING = {
    "do_sample": "true or false",
    "temperature": "a number > 0",
    "top_k": "a whole number >= 0",
    "top_p": "a number > 0 and <= 1",
    "min_p": "a number from 0 to 1",
    "repetition_penalty": "a number > 0",
}
"""The options of sampling, each with what it may be."""


def read_source_files(source: Path) -> dict[str, bytes]:
    """The files by name, of a Hugging Face folder or of a run with copies; empty for anything else.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    folder = source / FOLDER if (source / "checkpoints").is_dir() else source
    try:
        return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror or error}); allow it") from None


def keep_source_files(source: Path) -> Callable[[Path], None]:
    """Returns a function that writes these files into a run, for `save_trained`."""
    found = read_source_files(source)
    return lambda run: write_source_files(found, run / FOLDER)


def write_source_files(source_files: Mapping[str, bytes], folder: Path) -> None:
    """Writes the files, without references to remote code."""
    if source_files:
        folder.mkdir(exist_ok=True)
    for name, content in source_files.items():
        (folder / name).write_bytes(content)
    if TOKENIZER_CONFIG in source_files:
        data = read_json(folder / TOKENIZER_CONFIG)
        if data.pop("auto_map", None) is not None:
            (folder / TOKENIZER_CONFIG).write_text(json.dumps(data, indent=2), encoding="utf-8")


def generation_defaults(source_files: Mapping[str, bytes]) -> dict[str, Any]:
    """The begin, end and padding tokens of generation, and its sampling options if it samples.

    Raises:
        CheckpointError: the file is damaged, or has an invalid value.

    Example:
        >>> generation_defaults({"generation_config.json": b'{"eos_token_id": [2, 7], "transformers_version": "4.40"}'})
        {'eos_token_id': [2, 7]}
    """
    if GENERATION_CONFIG not in source_files:
        return {}
    data = parse_json(source_files[GENERATION_CONFIG], GENERATION_CONFIG)
    # Transformers refuses to save sampling options without sampling.
    names = (*TOKENS, *SAMPLING) if data.get("do_sample") else TOKENS
    found = {name: data[name] for name in names if data.get(name) is not None}
    for name, value in found.items():
        if not _fits(name, value):
            allowed = SAMPLING.get(name, "the number of a token, or a list of them")
            raise CheckpointError(f"{GENERATION_CONFIG}: {problem(name, value, allowed, 'correct the file of the model')}")
    return found


def chat_template(source_files: Mapping[str, bytes]) -> "ChatTemplate | None":
    """The chat template of the model; None without one. Of several templates, the one named `default`.

    Raises:
        CheckpointError: a damaged file, or an invalid template.

    Example:
        >>> template = chat_template({"chat_template.jinja": b"{{ bos_token }}{{ messages[0].content }}",
        ...     "tokenizer_config.json": b'{"bos_token": {"content": "<s>"}}'})
        >>> template.render([{"role": "user", "content": "Hello"}])
        '<s>Hello'
    """
    config = _table(source_files, TOKENIZER_CONFIG)
    source, where = config.get("chat_template"), f"chat_template of {TOKENIZER_CONFIG}"
    if CHAT_TEMPLATE in source_files:
        source, where = decode_text(source_files[CHAT_TEMPLATE], CHAT_TEMPLATE, CheckpointError), CHAT_TEMPLATE
    elif isinstance(source, list) and all(isinstance(one, dict) for one in source):
        named = {one.get("name"): one.get("template") for one in source}
        source = named.get("default", named)
    if source is None:
        return None
    if not isinstance(source, str):
        allowed = "a text, or a list with one named 'default'"
        raise CheckpointError(problem(where, source, allowed, "correct the file of the model"))
    from twoaxis.data.chat_template import ChatTemplate

    return ChatTemplate(source, _token_names(_table(source_files, TOKENS_MAP)) | _token_names(config), where)


def _table(source_files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(source_files[name], name) if name in source_files else {}


def _token_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """The text of each token with a role such as `bos_token`."""
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in data.items()}
    return {name: one for name, one in texts.items() if name in NAMED and isinstance(one, str)}


def _fits(name: str, value: Any) -> bool:
    if name in TOKENS:
        return all(type(token) is int and token >= 0 for token in (value if isinstance(value, list) else [value]))
    if name == "do_sample":
        return isinstance(value, bool)
    if name == "top_k":
        return type(value) is int and value >= 0
    least, most = (0.0 if name == "min_p" else 1e-9), (1.0 if name in ("top_p", "min_p") else sys.float_info.max)
    return type(value) in (int, float) and least <= value <= most
