"""Configuration files in TOML or JSON, read as plain data."""

import tomllib
from pathlib import Path
from typing import Any

from twoaxis.core.errors import ConfigError, TwoAxisError
from twoaxis.core.text import json_value, read_text


def read_config_file(path: Path, what: str, error: type[TwoAxisError] = ConfigError) -> dict[str, Any]:
    """Reads a table: JSON from `.json` files and files that begin with a brace, else TOML; errors have the class `error`."""
    if path.suffix in (".yaml", ".yml"):
        raise error(f"{what} {path}: is YAML: must be TOML, or JSON with a name that ends in .json; convert it")
    text = read_text(path, f"{what} {path}", "check the path", error)
    # TOML cannot begin with a brace.
    form = "json" if path.suffix == ".json" or text.lstrip().startswith("{") else "toml"
    try:
        data = json_value(text) if form == "json" else tomllib.loads(text)
    except (ValueError, RecursionError) as cause:
        raise error(f"{what} {path}: is not {form} ({cause}); correct the file") from None
    if not isinstance(data, dict):
        raise error(f"{what} {path}: must hold a table of keys and values; correct the file")
    return data


def is_record(path: Path) -> bool:
    """Whether a file is the recorded recipe of a run folder, which has a tokenizer next to it."""
    return path.name == "config.json" and (path.parent / "tokenizer.json").is_file()
