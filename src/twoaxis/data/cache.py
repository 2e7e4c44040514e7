"""The cache folder of trained tokenizers and token shards."""

import os
from pathlib import Path

CACHE_VARIABLE = "TWOAXIS_CACHE"
"""The environment variable that names the cache folder."""

CACHE_REMEDY = f"free space there or set {CACHE_VARIABLE} to another folder"
"""The remedy when the cache cannot be written."""


CachePath = str | os.PathLike[str] | None
"""A cache folder; None is the default one."""


def cache_folder(path: CachePath = None) -> Path:
    """Returns the given folder, else the one in `TWOAXIS_CACHE`, else `~/.cache/twoaxis`."""
    return Path(path or os.environ.get(CACHE_VARIABLE) or "~/.cache/twoaxis").expanduser()
