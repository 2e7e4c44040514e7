"""The registry of an axis, open to other packages: one row per mixer, and the sections of its docstring."""

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest
from twoaxis.core.position import LayerStack

_SECTION = re.compile(r"^([A-Z][a-z]+):\s*")


def sections(documented: type) -> dict[str, str]:
    r"""Returns each `Name: text` section of a class docstring, line by line, and the text before them as `Summary`.

    Example:
        >>> class Halving:
        ...     '''Halves what it reads.
        ...
        ...     Equation: y = x / 2
        ...     Cost:     flops D
        ...               per token
        ...     '''
        >>> sections(Halving)
        {'Summary': 'Halves what it reads.', 'Equation': 'y = x / 2', 'Cost': 'flops D\nper token'}
    """
    found: dict[str, list[str]] = {"Summary": []}
    current = "Summary"
    for line in inspect.cleandoc(documented.__doc__ or "").splitlines():
        if heading := _SECTION.match(line):
            current = heading[1]
            found[current] = [line[heading.end() :]]
        elif line.strip():
            found[current].append(line.strip())
    return {name: "\n".join(line for line in lines if line) for name, lines in found.items()}


def source(documented: type) -> str:
    """The first clause of the `Source` section of a mixer, in one line.

    Example:
        >>> class Halving:
        ...     '''Halves what it reads.
        ...
        ...     Source: Zeno, Paradoxes; checked with a ruler
        ...     '''
        >>> source(Halving)
        'Zeno, Paradoxes'
    """
    return " ".join(sections(documented).get("Source", "").split()).partition(";")[0]


C = TypeVar("C", bound=Config)

SIZES = frozenset({"block_size", "count", "d_ff", "hash_vocab", "head_dim", "layers", "n_kv_heads", "rounds", "value_dim"})
"""Options for the size of an operator, the unit of its sizes, or its layers."""

ENGINES = frozenset({"impl", "schedule"})
"""Options for the implementation of an operator."""


def choices(config: Config) -> dict[str, Any]:
    """Returns the options that determine the operator of a configuration: no sizes, initial values and engines.

    A number counts as given or not if its default is None, and as one or many if its default is 1.

    Example:
        >>> class Mixture(Config):
        ...     weights: Literal["static", "dynamic"] = "static"
        ...     window: int | None = None
        ...     n_heads: int = 1
        ...     eps: float = 1e-6
        >>> choices(Mixture(window=3))
        {'weights': 'static', 'window': 'given', 'n_heads': 'one'}
    """
    found: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if name in SIZES | ENGINES or name.endswith("init") or float in typing.get_args(info.annotation):
            continue
        if isinstance(value, Config):
            found[name] = choices(value)
        elif isinstance(value, str) or value is None:
            found[name] = value
        elif isinstance(value, int) and info.default is None:
            found[name] = "given"
        elif isinstance(value, int) and info.default == 1:
            found[name] = "one" if value == 1 else "many"
    return found


@dataclass(frozen=True)
class Row(Generic[C]):
    """One mixer.

    Attributes:
        config: the configuration class; its default `kind` names the row.
        summary: one line.
        examples: the variants for tests, docs and benchmarks, by name, as keyword arguments.
        status: `core` for methods with published equations, else `contrib`.
        certified: the examples whose operator equals public code in outputs and all gradients, each with the golden
            tensors in tests/parity that prove it and name that code. Other examples are reconstructed: from text, from code
            that was changed or copied by hand, or with an additional option.
        at_scale: the forms that plans compare, by the name they have there: options, or a function that chooses them for the
            sublayers of a model. None means the defaults, under the words of the kind.
        retrofit: options with which a trained model goes on as it is, where the defaults do not or only a blend does.
        sums: whether audits find the weighted sums of sources that it reads.
    """

    config: type[C]
    summary: str
    examples: Mapping[str, Mapping[str, Any]]
    status: Literal["core", "contrib"] = "core"
    certified: Mapping[str, str] = field(default_factory=dict)
    at_scale: Mapping[str, Mapping[str, Any] | Callable[[LayerStack], Mapping[str, Any]]] | None = None
    retrofit: Mapping[str, Any] = field(default_factory=dict)
    sums: Literal["none", "read"] = "none"

    @property
    def kind(self) -> str:
        """The name of the mixer in configurations."""
        return self.config.model_fields["kind"].default

    def example(self, name: str) -> C:
        """Builds an example configuration."""
        return self.config(**self.examples[name])

    def certified_by(self, config: Config) -> str | None:
        """The golden tensors that certify the operator of a configuration; None if it is reconstructed."""
        operator = choices(config)
        found = (fixture for name, fixture in self.certified.items() if choices(self.example(name)) == operator)
        return next(found, None)

    @property
    def evidence(self) -> str:
        """Whether the first example is `certified` or `reconstructed`, and the examples that differ from it."""
        first, *others = [name in self.certified for name in self.examples]
        words = {True: "certified", False: "reconstructed"}
        if all(one == first for one in others):
            return words[first]
        different = ", ".join(name for name in self.examples if (name in self.certified) != first)
        return f"{words[first]}; {words[not first]}: {different}"


class Table(Generic[C]):
    """The mixers of one axis by kind; `group` is the entry point through which packages add rows."""

    def __init__(self, what: str, base: type[C], group: str, rows: list[Row[C]]) -> None:
        self.what, self._base, self._group = what, base, group
        self._rows: dict[str, Row[C]] = {}
        self._plugins_loaded = False
        for row in rows:
            self.add(row)

    def add(self, row: Row[C]) -> None:
        """Adds a row; the kind must be new."""
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
        """Returns a configuration from a table with `kind`, a bare kind, or a configuration."""
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
        own, self._plugins_loaded = dict(self._rows), True
        try:
            for entry in entry_points(group=self._group):
                self.add(self._loaded(entry))
        except BaseException:
            # The next use fails as well, and does not go on without these rows.
            self._rows, self._plugins_loaded = own, False
            raise

    def _loaded(self, entry: EntryPoint) -> Row[C]:
        what = f"{self.what} {entry.name!r} of another package, {entry.value}"
        try:
            loaded: Row[C] | Callable[[], Row[C]] = entry.load()
            row = loaded if isinstance(loaded, Row) else loaded()
        except Exception as error:
            raise ConfigError(f"{what}: cannot be loaded ({error!r}); repair that package or uninstall it") from error
        if missing := getattr(row.config, "__abstractmethods__", ()):
            raise ConfigError(f"{what}: {row.config.__name__} has no {', '.join(sorted(missing))}; define it there")
        return row
