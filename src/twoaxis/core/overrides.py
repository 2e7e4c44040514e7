"""`key=value` overrides on plain configuration data, checked afterwards by the configuration itself."""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError

C = TypeVar("C", bound=Config)


def with_overrides(config: C, overrides: Sequence[str]) -> C:
    """Returns the configuration with each `dotted.path=value` set, as by `apply_overrides`."""
    return type(config).from_data(apply_overrides(config.to_data(), overrides)) if overrides else config


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of the data with each `dotted.path=value` set.

    A value is read as TOML and, failing that, as a bare string; list items are addressed by number.
    Setting a `kind` drops the other keys of that table, since they belonged to the old kind.

    Raises:
        ConfigError: an override without `=`, or a path through something that is not a table.

    Example:
        >>> apply_overrides({"model": {"depth": "residual"}}, ["model.depth.kind=deep_delta", "steps=10"])
        {'model': {'depth': {'kind': 'deep_delta'}}, 'steps': 10}
    """
    result = copy.deepcopy(dict(data))
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"override {override!r}: must have the form key=value; write for example model.d_model=256")
        _set(result, path.strip().split("."), parse_value(text), override)
    return result


def parse_value(text: str) -> Any:
    """Reads one override value as TOML, or as the bare string when it is not TOML.

    Example:
        >>> parse_value("3e-4"), parse_value("cosine"), parse_value("[1, 2]")
        (0.0003, 'cosine', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _set(node: Any, path: list[str], value: Any, override: str) -> None:
    *parents, last = path
    for part in parents:
        node = _descend(node, part, override)
    if isinstance(node, list):
        node[_position(node, last, override)] = value
    elif isinstance(node, dict):
        if last == "kind" and node.get("kind") != value:
            node.clear()
        node[last] = value
    else:
        raise ConfigError(f"override {override!r}: {last!r} is not inside a table; shorten the path")


def _descend(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        position = _position(node, part, override)
        if isinstance(node[position], str):
            node[position] = {"kind": node[position]}
        return node[position]
    if not isinstance(node, dict):
        raise ConfigError(f"override {override!r}: {part!r} is not inside a table; shorten the path")
    child = node.setdefault(part, {})
    # A bare string is the short form of a table that only names its kind.
    if isinstance(child, str):
        child = node[part] = {"kind": child}
    return child


def _position(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} must be a number from 0 to {len(node) - 1}; count from 0")
    return int(part)
