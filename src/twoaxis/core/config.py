"""Frozen configurations; errors for unknown keys suggest the nearest known one."""

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails

from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.strict_types import strict

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
        called: its name in errors; by default its kind, or the words of its class name.
        inside: configurations of fields that are declared as plain data, by the name of the field.

    Raises:
        ConfigError: at construction, for any invalid value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True, allow_inf_nan=False)

    unrecorded: ClassVar[Mapping[str, Any]] = {}
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
        return {**cls.unrecorded, **data} if _reads_record.get() and isinstance(data, Mapping) else data

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
    if kind is not None and isinstance(kind.default, str):
        return repr(kind.default)
    return f"the {config.called or re.sub(r'(?<!^)(?=[A-Z])', ' ', config.__name__.removesuffix('Config')).lower()}"
