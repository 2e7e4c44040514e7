"""Files of a published model that training does not change: tokenizer options, chat template, generation options.

A run that begins with a published model copies these files, and an export restores them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.checkpoints.published_folder import parse_json, read_json
from twoaxis.core.errors import CheckpointError, problem
from twoaxis.core.text import decode_text

if TYPE_CHECKING:
    from twoaxis.data.chat_template import ChatTemplate

FOLDER = "source"
"""The folder of these files in a run."""

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
TOKENS_MAP, CHAT_TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
FILES = (TOKENIZER_CONFIG, TOKENS_MAP, CHAT_TEMPLATE, GENERATION_CONFIG)

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


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
            numbers = "a number, and above 0 unless it is top_k or min_p"
            allowed = "the number of a token, or a list of them" if name in TOKENS else numbers
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
    # `do_sample` is true here.
    least = 0 if name in ("top_k", "min_p") else 1e-9
    return name == "do_sample" or (isinstance(value, int | float) and value >= least)
