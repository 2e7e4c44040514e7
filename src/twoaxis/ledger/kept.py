"""Measurements that are kept in the cache folder, by what was measured, the code and the PyTorch that ran."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from twoaxis.core import measure
from twoaxis.core.errors import DataError
from twoaxis.core.files import cache_folder, replacing

Data = dict[str, Any]

_ANNOUNCE: ContextVar[Callable[[str], None] | None] = ContextVar("_ANNOUNCE", default=None)


def read_or_measure(key: tuple[Any, ...], measure: Callable[[], Data]) -> Data:
    """The measurement of a key as plain data: from the cache folder, else made and written there.

    A folder that cannot be written costs time, not the result. The first measurement within `announcing` is announced.

    Args:
        key: all that the result depends on besides code; its `repr` must say everything.
        measure: makes the result.
    """
    try:
        path = cache_folder() / "measured" / f"{_name(key)}.json"
    except DataError:  # There is no home folder.
        return measure()
    with suppress(OSError, ValueError):
        kept = json.loads(path.read_bytes())
        if isinstance(kept, dict) and kept.get("key") == repr(key):
            return kept["found"]
    if (announce := _ANNOUNCE.get()) is not None:
        announce(f"measures memory and traffic of depth mixers, once for this version; keeps them in {path.parent}")
        _ANNOUNCE.set(None)
    found = measure()
    with suppress(OSError, DataError), replacing(path) as file:
        file.write(json.dumps({"key": repr(key), "found": found}).encode())
    return found


@contextmanager
def announcing(announce: Callable[[str], None]) -> Iterator[None]:
    """Calls back within the block before the first measurement that takes time."""
    token = _ANNOUNCE.set(announce)
    try:
        yield
    finally:
        _ANNOUNCE.reset(token)


def _name(key: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr((key, torch.__version__, _code())).encode()).hexdigest()[:40]


@lru_cache(maxsize=1)
def _code() -> str:
    """A hash of the package's version and of all of its files."""
    root, found = Path(measure.__file__).parents[1], hashlib.sha256(version("twoaxis").encode())
    for path in sorted(root.rglob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()
