from abc import ABC, abstractmethod
from typing import Literal

import pytest

from twoaxis.core import registry as module
from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError
from twoaxis.core.registry import Row, Table


class Mixer(Config):
    kind: str = "base"


class Plain(Mixer):
    kind: Literal["plain"] = "plain"  # type: ignore[assignment]
    width: int = 1


class Plugin(Mixer):
    kind: Literal["plugin"] = "plugin"  # type: ignore[assignment]


PLAIN: Row[Mixer] = Row(Plain, "plain", {"default": {}, "wide": {"width": 9}})
PLUGIN: Row[Mixer] = Row(Plugin, "from another package", {"default": {}}, status="contrib")


class Form(Mixer):
    kind: Literal["form"] = "form"  # type: ignore[assignment]
    weights: Literal["static", "dynamic"] = "static"
    window: int | None = None
    n_heads: int = 1
    head_dim: int | None = None
    output_init: Literal["zero", "scaled"] = "zero"
    impl: Literal["fused", "reference"] = "fused"
    inner: Plain | None = None
    eps: float = 1e-6


FORM: Row[Mixer] = Row(Form, "forms", {"a": {}, "b": {"window": 3}}, certified={"a": "golden-a"})


@pytest.mark.parametrize(
    ("options", "fixture"),
    [
        ({}, "golden-a"),
        ({"head_dim": 9, "output_init": "scaled", "impl": "reference", "eps": 0.5}, "golden-a"),
        ({"weights": "dynamic"}, None),
        ({"window": 1}, None),
        ({"n_heads": 2}, None),
        ({"inner": Plain()}, None),
    ],
)
def test_what_certifies_an_operator_is_its_form_and_not_its_size(options: dict[str, object], fixture: str | None) -> None:
    assert FORM.certified_by(Form.from_data(options)) == fixture


def test_evidence_names_the_forms_that_are_reconstructed() -> None:
    assert (FORM.evidence, PLAIN.evidence) == ("certified; reconstructed: b", "reconstructed")
    assert Row(Plain, "plain", {"a": {}}, certified={"a": "x"}).evidence == "certified"
    late: Row[Mixer] = Row(Form, "forms", {"a": {"n_heads": 2}, "b": {}, "c": {"window": 1}}, certified={"b": "x"})
    assert late.evidence == "reconstructed; certified: b"


def make() -> Table[Mixer]:
    return Table("mixer", Mixer, "twoaxis.test", [PLAIN])


class Entry:
    name, value = "some", "package:row"

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded

    def load(self) -> object:
        return self.loaded


@pytest.fixture(params=[PLUGIN, lambda: PLUGIN], ids=["a row", "a function that returns a row"])
def plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked = []

    def entry_points(group: str) -> list[Entry]:
        asked.append(group)
        return [Entry(request.param)]

    monkeypatch.setattr(module, "entry_points", entry_points)
    return asked


def test_rows() -> None:
    table = make()
    assert [row.kind for row in table] == ["plain"]
    assert "plain" in table and "plugin" not in table
    assert table["plain"].example("wide") == Plain(width=9)
    assert table["plain"].status == "core"


def test_another_package_adds_a_row(plugin: list[str]) -> None:
    table = make()
    assert plugin == [], "importing asks no other package"
    assert [row.kind for row in table] == ["plain", "plugin"]
    assert table.parse("plugin") == Plugin()
    assert [row.kind for row in table] == ["plain", "plugin"]
    assert plugin == ["twoaxis.test"], "other packages are asked once"


def test_an_existing_kind_cannot_be_added() -> None:
    with pytest.raises(ConfigError, match=r"^mixer 'plain' exists already; give the new row another kind$"):
        make().add(PLAIN)


def test_another_package_cannot_replace_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "entry_points", lambda group: [Entry(PLUGIN), Entry(PLAIN)])
    table = make()
    # Catches a table that does without the row when it is used again.
    for _ in range(2):
        with pytest.raises(ConfigError, match="mixer 'plain' exists already"):
            list(table)


def test_a_package_that_cannot_be_loaded_is_an_error_at_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no module named 'x'")

    monkeypatch.setattr(module, "entry_points", lambda group: [Entry(PLUGIN), Entry(broken)])
    table, message = make(), r"^mixer 'some' of another package, package:row: cannot be loaded \(ImportError"
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            table["plain"]


def test_unknown_kind() -> None:
    with pytest.raises(ConfigError, match=r"^unknown mixer 'plane'; did you mean 'plain'\?$"):
        make()["plane"]
    with pytest.raises(ConfigError, match=r"^unknown mixer 'xyz'; choose one of plain$"):
        make().parse({"kind": "xyz"})


@pytest.mark.parametrize("data", [3, None, [], {}, {"width": 2}, {"kind": 3}])
def test_data_without_a_kind(data: object) -> None:
    with pytest.raises(ConfigError, match=r"must be a table with a 'kind'; choose one of plain$"):
        make().parse(data)


def test_parse_accepts_every_form() -> None:
    table = make()
    config = Plain(width=3)
    assert table.parse(config) is config
    assert table.parse("plain") == Plain()
    assert table.parse({"kind": "plain", "width": 3}) == config


class Unfinished(Mixer, ABC):
    kind: Literal["unfinished"] = "unfinished"  # type: ignore[assignment]

    @property
    @abstractmethod
    def design(self) -> str: ...


def test_a_row_of_another_package_whose_configuration_is_unfinished_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an error at the first use of the row, which asks to report it as one of ours."""
    monkeypatch.setattr(module, "entry_points", lambda group: [Entry(Row(Unfinished, "unfinished", {"default": {}}))])
    message = r"^mixer 'some' of another package, package:row: Unfinished has no design; define it there$"
    with pytest.raises(ConfigError, match=message):
        list(make())
