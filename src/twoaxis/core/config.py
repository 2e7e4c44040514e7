"""Frozen configurations, read from files and overrides: types are strict, and an unknown key is an error with a suggestion."""

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from twoaxis.core.errors import ConfigError, TwoAxisError, nearest, problem
from twoaxis.core.text import json_value, read_text

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


_ALTERNATIVE = re.compile(r"int|float|str|bool|constrained-\w+|[\w-]+\[.*\]")
"""Names of alternatives that pydantic adds to the location of an error in a union."""

_WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table of keys and values",
    "path_type": "a path",
}
"""The allowed value by pydantic's type of the error."""

# Tables build nested configurations themselves, so the validation context of pydantic does not reach them.
_reads_record: ContextVar[bool] = ContextVar("_reads_record", default=False)


class Config(BaseModel):
    """Base of every configuration: frozen, strict about keys and types, and readable from plain data.

    Attributes:
        unrecorded: the values of options missing in older records, where they differ from the default.
        presets: the options that each value of the field `preset` fixes.
        called: its name in errors; by default its kind, or the words of its class name.
        inside: configurations of fields that are declared as plain data, by the name of the field.

    Raises:
        ConfigError: at construction, for any invalid value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True, allow_inf_nan=False)

    unrecorded: ClassVar[Mapping[str, Any]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    called: ClassVar[str] = ""
    inside: ClassVar[Mapping[str, type["Config"]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return strict(handler(source))

    # Hidden from type checkers, which then have the typed constructor of pydantic.
    if not TYPE_CHECKING:
        # `self` may be a key of the data.
        def __init__(self, /, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise ConfigError(_in_one_line(error, type(self))) from None

    @model_validator(mode="before")
    @classmethod
    def _as_recorded(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        preset = data.get("preset")
        fixed = cls.presets.get(preset, {}) if isinstance(preset, str) else {}
        return {**fixed, **(cls.unrecorded if _reads_record.get() else {}), **data}

    @model_validator(mode="after")
    def _as_preset(self) -> Self:
        preset = getattr(self, "preset", "")
        for option, value in self.presets.get(preset, {}).items():
            if getattr(self, option) != value:
                allowed = f"{value!r} with preset={preset!r}"
                raise ConfigError(problem(option, getattr(self, option), allowed, "leave one of the two out"))
        return self

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Builds the configuration from plain data, such as a parsed TOML or JSON file."""
        if not isinstance(data, Mapping):
            what = _title(cls).removeprefix("the ")
            raise ConfigError(f"{what}={data!r}: must be a table of keys and values; see `twoaxis show`")
        return cls(**data)

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Returns a configuration unchanged, or builds it from a table or a bare kind."""
        if isinstance(data, cls):
            return data
        table: Any = {"kind": data} if isinstance(data, str) and "kind" in cls.model_fields else data
        return cls.from_data(table)

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Self:
        """Builds the configuration of a run folder or an exported folder, possibly of an older version.

        A record has every option of its version. Missing options, nested ones too, have the value in `unrecorded`, or else
        their default.
        """
        token = _reads_record.set(True)
        try:
            return cls.from_data(data)
        finally:
            _reads_record.reset(token)

    @classmethod
    def checked_data(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Checks plain data and returns it with every option, as `from_data` and `to_data` do; equal data is checked once."""
        try:
            text = json.dumps(data)
            # JSON turns a key that is a number into text.
            plain = json.loads(text) == data
        except (TypeError, ValueError, RecursionError):
            text, plain = "", False
        return json.loads(_checked_text(cls, text, _reads_record.get())) if plain else cls.from_data(data).to_data()

    def to_data(self) -> dict[str, Any]:
        """The configuration as JSON-ready data for `from_data`."""
        return self.model_dump(mode="json")

    def refuse_options(self, names: Iterable[str], reason: str, remedy: str) -> None:
        """Raises ConfigError for an option that is not at its default although nothing reads it."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(problem(name, getattr(self, name), f"left out{reason}", remedy))

    @classmethod
    def remedy_for_key(cls, key: str) -> str:
        """The remedy for an unknown key: the table that it belongs to, the nearest key, or all keys."""
        nested = {name: field.annotation for name, field in cls.model_fields.items()} | dict(cls.inside)
        for name, one in nested.items():
            if isinstance(one, type) and issubclass(one, Config) and key in one.model_fields:
                return f"it belongs to {name}: write {name}.{key}"
        return nearest(key, cls.model_fields)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changed fields, validated like a new configuration."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})


@lru_cache(maxsize=1024)
def _checked_text(config: type[Config], text: str, recorded: bool) -> str:
    """The complete data as text; `recorded` is part of the key only."""
    return json.dumps(config.from_data(json.loads(text)).to_data())


def _in_one_line(error: ValidationError, config: type[Config]) -> str:
    errors = error.errors()
    # In a union, the alternative with the deepest error is the intended one.
    first = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    path = _path(first)
    others = {_path(e) for e in errors if e["loc"][:1] != first["loc"][:1] or len(e["loc"]) == len(first["loc"])} - {path}
    more = f" (and {len(others)} more)" if others else ""
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError | ValueError):
        # The message of a validator may begin with the field.
        where, _, last = path.rpartition(".")
        where = where if str(cause).startswith(f"{last}=") else path
        return (f"{where}: {cause}" if where else str(cause)) + more
    if first["type"] == "extra_forbidden":
        return f"unknown key {path!r} in {_title(config)}; {config.remedy_for_key(path)}{more}"
    if first["type"] == "missing":
        return f"{path} is missing in {_title(config)}: it has no default; add it{more}"
    allowed, remedy = _expected(first)
    return problem(path, first["input"], allowed, remedy or f"correct it in {_title(config)}") + more


def _path(error: ErrorDetails) -> str:
    """The dotted path of the value, without pydantic's names of alternatives."""
    return ".".join(str(part) for part in error["loc"] if isinstance(part, int) or not _ALTERNATIVE.fullmatch(part))


def _expected(error: ErrorDetails) -> tuple[str, str | None]:
    context = error.get("ctx", {})
    for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if key in context:
            return f"{sign} {context[key]}", None
    if error["type"] in _WORDS:
        return _WORDS[error["type"]], None
    for key, bound in (("max_length", "at most"), ("min_length", "at least")):
        if key in context and "actual_length" not in context:
            return f"{bound} {context[key]} characters", None
        if key in context:
            items = "item" if context[key] == 1 else "items"
            remedy = "leave some out" if key == "max_length" else "give some"
            return f"{bound} {context[key]} {items}, not {context['actual_length']}", remedy
    message = error["msg"].removeprefix("Input should be ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        return message, nearest(error["input"], re.findall(r"'([^']*)'", context["expected"]))
    return message[:1].lower() + message[1:], None


def _title(config: type[Config]) -> str:
    kind = config.model_fields.get("kind")
    if kind is not None and isinstance(kind.default, str) and not config.called:
        return repr(kind.default)
    return f"the {config.called or re.sub(r'(?<!^)(?=[A-Z])', ' ', config.__name__.removesuffix('Config')).lower()}"


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


C = TypeVar("C", bound=Config)


def with_overrides(config: C, overrides: Sequence[str]) -> C:
    """Returns the configuration with each `dotted.path=value` set, as by `apply_overrides`."""
    return type(config).from_data(apply_overrides(config.to_data(), overrides)) if overrides else config


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of the data with each `dotted.path=value` set.

    A value is read as TOML, or else as a bare string. List items are addressed by number. Another `kind` drops the other keys
    that the data has in its table, except where kinds share them (`drops_keys`), and none that an override sets. The order
    counts for two values of the same key only: the later one is set.

    Raises:
        ConfigError: an override without `=`, a path through something that is not a table, or another `kind` than the one of a
            table that an override sets as a whole.

    Example:
        >>> apply_overrides({"model": {"depth": "residual"}}, ["model.depth.kind=deep_delta", "steps=10"])
        {'model': {'depth': {'kind': 'deep_delta'}}, 'steps': 10}
    """
    result, words = copy.deepcopy(dict(data)), list[tuple[list[str], Any, str]]()
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"override {override!r}: must have the form key=value; write for example model.d_model=256")
        words.append((path.strip().split("."), parse_value(text), override))
    # Tables before their keys, and a kind before the keys next to it, so that none of them drops another.
    words.sort(key=lambda word: (len(word[0]), word[0][-1] != "kind"))
    before: dict[tuple[str, ...], str] = {}
    for path, value, override in words:
        _set(result, path, value, override, before)
        before[tuple(path)] = override
    return result


def parse_value(text: str) -> Any:
    """Reads a value as TOML, or else as a bare string.

    Example:
        >>> parse_value("3e-4"), parse_value("cosine"), parse_value("[1, 2]")
        (0.0003, 'cosine', [1, 2])
    """
    try:
        table = tomllib.loads(f"value = {text}")
    # Also very long numbers and very deep nesting.
    except (ValueError, RecursionError):
        return text.strip()
    # A second line could set another key, which nothing would read.
    return table["value"] if len(table) == 1 else text.strip()


def drops_keys(table: str, old: Mapping[str, Any], kind: Any) -> bool:
    """Whether the other keys of a table belong to its old kind only; optimizers share theirs, and so their learning rate."""
    return table != "optimizer" and old.get("kind") != kind


def _set(node: Any, path: list[str], value: Any, override: str, before: Mapping[tuple[str, ...], str]) -> None:
    *parents, last = path
    table = parents[-1] if parents else ""
    for part in parents:
        node = _descend(node, part, override)
    if isinstance(node, list):
        node[_position(node, last, override)] = value
    elif isinstance(node, dict):
        if last == "kind" and drops_keys(table, node, value):
            _check_not_set(parents, override, before)
            node.clear()
        node[last] = value
    else:
        raise ConfigError(f"override {override!r}: {last!r} is not inside a table; shorten the path")


def _check_not_set(table: list[str], override: str, before: Mapping[tuple[str, ...], str]) -> None:
    """Raises ConfigError if an override before this one sets the table, or one around it, as a whole."""
    whole = next((before[outer] for n in range(len(table)) if (outer := tuple(table[: n + 1])) in before), None)
    if whole is not None:
        raise ConfigError(
            f"override {override!r}: must not change the kind of a table that {whole!r} sets; name the kind in one of the two"
        )


def _descend(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        position = _position(node, part, override)
        if isinstance(node[position], str):
            node[position] = {"kind": node[position]}
        return node[position]
    if not isinstance(node, dict):
        raise ConfigError(f"override {override!r}: {part!r} is not inside a table; shorten the path")
    child = node.setdefault(part, {})
    # A bare string is short for a table with that `kind`.
    if isinstance(child, str):
        child = node[part] = {"kind": child}
    return child


def _position(node: list[Any], part: str, override: str) -> int:
    positions = [str(position) for position in range(len(node))]
    if part not in positions:
        raise ConfigError(f"override {override!r}: {part!r} must be a number from 0 to {len(node) - 1}; count from 0")
    return positions.index(part)
