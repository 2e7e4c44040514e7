"""The table of an axis: one row per mixer, open to other packages through an entry point."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, Literal, TypeVar

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Row(Generic[C]):
    """One mixer: its configuration class and what a reader of the table wants to know first.

    Attributes:
        config: the configuration class; its default `kind` names the row.
        summary: what the mixer does, in one line.
        examples: the variants that tests, docs and benchmarks run, by name, as keyword arguments.
        status: `core` for published methods with parity evidence, `contrib` for everything else.
    """

    config: type[C]
    summary: str
    examples: Mapping[str, Mapping[str, Any]]
    status: Literal["core", "contrib"] = "core"

    @property
    def kind(self) -> str:
        """The name of the mixer in configurations."""
        return self.config.model_fields["kind"].default

    def example(self, name: str) -> C:
        """Builds one of the example configurations."""
        return self.config(**self.examples[name])


class Table(Generic[C]):
    """The mixers of one axis by kind; `group` is the entry point through which packages add rows."""

    def __init__(self, what: str, base: type[C], group: str, rows: list[Row[C]]) -> None:
        self.what, self._base, self._group = what, base, group
        self._rows: dict[str, Row[C]] = {}
        self._plugins_loaded = False
        for row in rows:
            self.add(row)

    def add(self, row: Row[C]) -> None:
        """Adds a row; a kind that exists already is an error, since names fix the semantics."""
        if row.kind in self._rows:
            raise ConfigError(f"{self.what} {row.kind!r} exists already; give the new row another kind")
        self._rows[row.kind] = row

    def __iter__(self) -> Iterator[Row[C]]:
        self._load_plugins()
        return iter(self._rows.values())

    def __contains__(self, kind: str) -> bool:
        self._load_plugins()
        return kind in self._rows

    def __getitem__(self, kind: str) -> Row[C]:
        if kind not in self:
            raise ConfigError(f"unknown {self.what} {kind!r}; {nearest(kind, self._rows)}")
        return self._rows[kind]

    def parse(self, data: Any) -> C:
        """Reads a configuration of this axis from a table with `kind`, a bare kind, or a configuration."""
        if isinstance(data, self._base):
            return data
        if isinstance(data, str):
            data = {"kind": data}
        if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
            raise ConfigError(f"{self.what}={data!r}: must be a table with a 'kind'; choose one of {', '.join(self._rows)}")
        return self[data["kind"]].config(**data)

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for entry in entry_points(group=self._group):
            row: Row[C] | Callable[[], Row[C]] = entry.load()
            self.add(row if isinstance(row, Row) else row())
