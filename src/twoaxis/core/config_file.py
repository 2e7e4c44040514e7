"""Files that hold configurations: TOML or JSON, read as plain data."""

import json
import tomllib
from pathlib import Path
from typing import Any

from twoaxis.core.errors import ConfigError, TwoAxisError


def read_config_file(path: Path, what: str, error: type[TwoAxisError] = ConfigError) -> dict[str, Any]:
    """Reads a table of keys and values; `.json` files as JSON, all others as TOML.

    Args:
        path: the file.
        what: what it should hold, for the message.
        error: what to raise when it cannot be read or parsed, or holds something else.
    """
    if path.suffix in (".yaml", ".yml"):
        raise error(f"{what} {path}: is YAML: must be TOML, or JSON with a name that ends in .json; convert it")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{what} {path}: cannot be read ({getattr(cause, 'strerror', None) or cause}); check the path") from None
    except ValueError as cause:
        raise error(f"{what} {path}: is not {path.suffix[1:] or 'toml'} ({cause}); correct the file") from None
    if not isinstance(data, dict):
        raise error(f"{what} {path}: must hold a table of keys and values; correct the file")
    return data


def is_record(path: Path) -> bool:
    """Whether a file is what a run folder has recorded of its recipe, which stands beside its tokenizer."""
    return path.name == "config.json" and (path.parent / "tokenizer.json").is_file()
