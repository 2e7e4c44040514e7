"""What stands beside a published model and training leaves as it is: how texts and chats are put to it, and what ends answers.

A run that begins with a published model keeps these files, and an export gives them back.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twoaxis.core.errors import CheckpointError, problem
from twoaxis.interop.safetensors_folder import read_json

FOLDER = "companions"
"""Where a run keeps them."""

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja", GENERATION_CONFIG)

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_companions(source: Path) -> dict[str, bytes]:
    """The files by name, of a Hugging Face folder or of a run that has kept them; none of anything else.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    folder = source / FOLDER if (source / "checkpoints").is_dir() else source
    try:
        return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror or error}); allow it") from None


def keep_companions(source: Path) -> Callable[[Path], None]:
    """What `save_trained` writes into a run besides."""
    found = read_companions(source)
    return lambda run: write_companions(found, run / FOLDER)


def write_companions(companions: Mapping[str, bytes], folder: Path) -> None:
    """Writes the files, without what would run code."""
    if companions:
        folder.mkdir(exist_ok=True)
    for name, content in companions.items():
        (folder / name).write_bytes(content)
    if TOKENIZER_CONFIG in companions:
        data = read_json(folder / TOKENIZER_CONFIG)
        if data.pop("auto_map", None) is not None:
            (folder / TOKENIZER_CONFIG).write_text(json.dumps(data, indent=2), encoding="utf-8")


def generation_defaults(companions: Mapping[str, bytes]) -> dict[str, Any]:
    """The tokens that begin, end and fill answers, and how answers are drawn where they are.

    Raises:
        CheckpointError: the file is damaged, or names something that is no token.

    Example:
        >>> generation_defaults({"generation_config.json": b'{"eos_token_id": [2, 7], "transformers_version": "4.40"}'})
        {'eos_token_id': [2, 7]}
    """
    if GENERATION_CONFIG not in companions:
        return {}
    try:
        data = json.loads(companions[GENERATION_CONFIG])
    except ValueError as error:
        raise CheckpointError(f"{GENERATION_CONFIG}: is no JSON ({error}); correct it beside the model") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{GENERATION_CONFIG}: must be a table; correct it beside the model")
    for name in TOKENS:
        value = data.get(name)
        if value is not None and not all(type(token) is int for token in (value if isinstance(value, list) else [value])):
            allowed = "the number of a token, or a list of them"
            raise CheckpointError(f"{GENERATION_CONFIG}: {problem(name, value, allowed, 'correct it beside the model')}")
    # Transformers refuses to save a temperature that nothing is drawn by.
    names = (*TOKENS, *SAMPLING) if data.get("do_sample") else TOKENS
    return {name: data[name] for name in names if data.get(name) is not None}
