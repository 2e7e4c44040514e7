"""Reads the keys of a `config.json` with their type, range and default, and errors that name them.

Keys that were read are recorded, so that the others can be refused.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from twoaxis.core.errors import ConfigError, problem
from twoaxis.model.config_json import refuse_unread

REMEDY = "correct it in the file"


class Fields:
    """A table of keys and values; a value of null counts as left out, as it does for transformers.

    Args:
        data: the table.
        where: the prefix of each name in an error, such as `text_config.`.

    Raises:
        ConfigError: from each method, for a key that is missing without a default, or holds something else.

    Example:
        >>> Fields({"hidden_size": 64, "num_key_value_heads": None}).size("num_key_value_heads", default=8)
        8
    """

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self.data, self.where = data, where
        self._read: set[str] = set()
        self._tables: dict[str, Fields] = {}

    def refuse_unread(self, known: Collection[str] = ()) -> None:
        """Refuses unread keys that are not empty, here and in inner tables.

        Args:
            known: keys that may stay unread; those of a table begin with its name and a dot.
        """
        refuse_unread(self.data, {*known, *self._read, *self._tables}, self.where)
        for name, table in self._tables.items():
            if name not in known:
                table.refuse_unread([key.removeprefix(f"{name}.") for key in known if key.startswith(f"{name}.")])

    def given(self, name: str) -> Any:
        """The raw value; None for a key that is left out."""
        self._read.add(name)
        return self.data.get(name)

    def has(self, name: str) -> bool:
        """Whether the key is present and not null."""
        return self.given(name) is not None

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int | None = None) -> int:
        """A whole number, under the first of its names that is present."""
        there = [one for one in names if self.has(one)]
        name = there[0] if there else names[0]
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
            allowed = f"a whole number >= {least}" if most is None else f"a whole number from {least} to {most}"
            raise ConfigError(problem(self.where + name, value, allowed, REMEDY))
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number of at least 1; None for null, the default for a missing key."""
        if name in self.data and self.given(name) is None:
            return None
        return self.size(name) if self.has(name) else default

    def number(self, name: str, default: float, least: float = 0.0, most: float | None = None) -> float:
        """A finite number above `least`, and at most `most`."""
        value = self._value(name, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if not ok or not least < value < float("inf") or (most is not None and value > most):
            allowed = f"a number > {least:g}" + ("" if most is None else f" and <= {most:g}")
            raise ConfigError(problem(self.where + name, value, allowed, REMEDY))
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(problem(self.where + name, value, "true or false", REMEDY))
        return value

    def word(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """One of some words; others mean an architecture that is not modelled."""
        value = self._value(name, default)
        if value not in allowed:
            raise ConfigError(problem(self.where + name, value, f"one of {', '.join(allowed)}", "others are not modelled"))
        return value

    def words(self, name: str, allowed: Sequence[str], length: int) -> list[str] | None:
        """One word per layer, at least; None for a key that is left out."""
        values = self._list(name)
        if values is None:
            return None
        for value in values:
            if value not in allowed:
                what = f"{self.where}{name} entry"
                raise ConfigError(problem(what, value, f"one of {', '.join(allowed)}", "other layers are not modelled"))
        return self._one_per_layer(name, values, length)

    def sizes(self, name: str, least: int, most: int | None = None, length: int | None = None) -> list[int] | None:
        """Whole numbers, one per layer where a length is given; None for a key that is left out."""
        values = self._list(name)
        if values is None:
            return None
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
                allowed = f"a whole number >= {least}" + ("" if most is None else f" and <= {most}")
                raise ConfigError(problem(f"{self.where}{name} entry", value, allowed, REMEDY))
        return values if length is None else self._one_per_layer(name, values, length)

    def table(self, name: str) -> "Fields":
        """A table inside this one; an empty one for a key that is left out."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(problem(self.where + name, value, "a table", REMEDY))
        return self._tables.setdefault(name, Fields(value or {}, f"{self.where}{name}."))

    def refuse(self, name: str, why: str) -> None:
        """Refuses a key unless its value is false, 0, null or empty."""
        if value := self.given(name):
            shown = "a table" if isinstance(value, Mapping) else repr(value)
            raise ConfigError(f"{self.where}{name}={shown}: {why}")

    def _value(self, name: str, default: Any) -> Any:
        if self.has(name):
            return self.given(name)
        if default is None:
            raise ConfigError(
                f"{self.where}{name} is missing: a model of this family has no size without it; add it to the file"
            )
        return default

    def _list(self, name: str) -> list[Any] | None:
        value = self.given(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(problem(self.where + name, value, "a list", REMEDY))
        return value

    def _one_per_layer(self, name: str, values: list[Any], length: int) -> list[Any]:
        # Checkpoints may list layers behind the last one, which predict further tokens.
        if len(values) < length:
            what = f"entries of {self.where}{name}"
            raise ConfigError(problem(what, len(values), f"at least num_hidden_layers={length}", REMEDY))
        return values[:length]
