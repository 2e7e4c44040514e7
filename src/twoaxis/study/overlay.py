"""Laying the changes of an arm over the base recipe."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from twoaxis.core.errors import ConfigError
from twoaxis.core.overrides import apply_overrides

Changes = Mapping[str, Any] | Sequence[str]
"""A table of changes, or a list of `key=value`."""


def overlay(base: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns a copy of the base with the changes in it.

    Tables are merged key by key, everything else is replaced. A table whose `kind` changes is replaced whole, since
    its other keys belonged to the old kind.

    Raises:
        ConfigError: a list with something else than `key=value` in it.

    Example:
        >>> base = {"model": {"d_model": 64, "depth": {"kind": "deep_delta", "beta_init": 0.5}}}
        >>> overlay(base, {"model": {"depth": {"kind": "attention_residuals", "block_size": 4}}})
        {'model': {'d_model': 64, 'depth': {'kind': 'attention_residuals', 'block_size': 4}}}
        >>> overlay(base, ["model.depth.beta_init=1.5"])
        {'model': {'d_model': 64, 'depth': {'kind': 'deep_delta', 'beta_init': 1.5}}}
    """
    if isinstance(changes, Mapping):
        return _merged(base, changes)
    if isinstance(changes, str) or not all(isinstance(change, str) for change in changes):
        raise ConfigError(f"overrides={changes!r}: must be a table or a list of 'key=value'; correct the arm")
    return apply_overrides(base, changes)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        old = result.get(key)
        # A bare string is the short form of a table that only names its kind.
        if isinstance(value, Mapping) and isinstance(old, str):
            old = {"kind": old}
        if not (isinstance(old, Mapping) and isinstance(value, Mapping)):
            result[key] = copy.deepcopy(value)
        elif value.get("kind", old.get("kind")) != old.get("kind"):
            result[key] = copy.deepcopy(dict(value))
        else:
            result[key] = _merged(old, value)
    return result
