"""Strict types for configuration fields: no boolean or text for a number, and integers of 64 bits."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from pydantic_core import core_schema

LARGEST, SMALLEST = 2**63 - 1, -(2**63)
"""Default bounds of integers: those of torch."""

_LEAVES = frozenset({"int", "float", "bool", "str"})
_AS_THEY_ARE = frozenset({"default", "metadata", "expected", "keys_schema"})
"""Keys of a schema whose values are no schemas, and dictionary keys, which are always text in JSON."""


def strict(schema: Any) -> Any:
    """Returns a schema of pydantic without conversions between numbers, booleans and texts.

    Equal numbers are still accepted: 2 for a float, and 1e3 for the integer 1000.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(strict(one) for one in schema)
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _AS_THEY_ARE else strict(value) for key, value in schema.items()}
    if found.get("type") not in _LEAVES:
        return found
    found["strict"] = True
    return _whole(found) if found["type"] == "int" else found


def _whole(schema: Mapping[str, Any]) -> Any:
    bounds = {} if "lt" in schema else {"le": LARGEST}
    bounds |= {} if "gt" in schema else {"ge": SMALLEST}
    return core_schema.no_info_before_validator_function(_without_point, {**bounds, **schema})  # pyright: ignore[reportArgumentType]


def _without_point(value: Any) -> Any:
    # Integers of numpy and other libraries are accepted; a boolean is none.
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if whole or (type(value) is float and value.is_integer()) else value
