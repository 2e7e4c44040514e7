import pytest

from twoaxis import ConfigError, DecoderConfig
from twoaxis.core.config import apply_overrides, parse_value

DATA = {
    "steps": 3,
    "model": {"depth": {"kind": "deep_delta", "beta_init": 0.5}, "blocks": [["attention", {"kind": "swiglu", "d_ff": 8}]]},
}


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("steps=10", ["steps"], 10),
        ("rate=3e-4", ["rate"], 0.0003),
        ("name = plain words ", ["name"], "plain words"),
        ("name='3'", ["name"], "3"),
        ("on=true", ["on"], True),
        ("path=a=b", ["path"], "a=b"),
        ("new.table.key=[1, 2]", ["new", "table", "key"], [1, 2]),
        ("model.depth.beta_init=1.5", ["model", "depth"], {"kind": "deep_delta", "beta_init": 1.5}),
        ("model.depth.kind=residual", ["model", "depth"], {"kind": "residual"}),
        ("model.depth.kind=deep_delta", ["model", "depth"], {"kind": "deep_delta", "beta_init": 0.5}),
        ("model.depth=residual", ["model", "depth"], "residual"),
        ("model.blocks.0.0.window=4", ["model", "blocks", 0, 0], {"kind": "attention", "window": 4}),
        ("model.blocks.0.1=gelu", ["model", "blocks", 0, 1], "gelu"),
        ("model.blocks.0.1.kind=gelu", ["model", "blocks", 0, 1], {"kind": "gelu"}),
    ],
)
def test_sets_one_value(override: str, path: list, expected: object) -> None:
    before = repr(DATA)
    found = apply_overrides(DATA, [override])
    for part in path:
        found = found[part]
    assert found == expected
    assert repr(DATA) == before, "the given data is never changed"


def test_the_later_value_of_a_key_counts() -> None:
    found = apply_overrides({"depth": "residual"}, ["depth.kind=deep_delta", "depth.beta_init=0.5", "depth.beta_init=1.5"])
    assert found == {"depth": {"kind": "deep_delta", "beta_init": 1.5}}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["schedule.kind=wsd", "schedule.warmup_steps=7"], {"kind": "wsd", "warmup_steps": 7}),
        (["schedule=wsd", "schedule.warmup_steps=7"], {"kind": "wsd", "warmup_steps": 7}),
        (["schedule=wsd", "schedule.kind=wsd"], {"kind": "wsd"}),
        (["schedule={kind='wsd', min_ratio=0.5}", "schedule.min_ratio=0.1"], {"kind": "wsd", "min_ratio": 0.1}),
    ],
)
def test_words_count_in_any_order(overrides: list[str], expected: object) -> None:
    """A kind once dropped the keys that words before it had set, unknown ones too."""
    data = {"schedule": {"kind": "cosine", "min_ratio": 0.2}}
    assert [apply_overrides(data, words)["schedule"] for words in (overrides, overrides[::-1])] == [expected, expected]


@pytest.mark.parametrize("table", ["schedule=cosine", "schedule={warmup_steps=7}", "schedule={kind='constant'}"])
def test_two_kinds_for_one_table_are_refused(table: str) -> None:
    message = "override 'schedule.kind=wsd': must not change the kind of a table that .schedule="
    for words in ([table, "schedule.kind=wsd"], ["schedule.kind=wsd", table]):
        with pytest.raises(ConfigError, match=message):
            apply_overrides({"schedule": "cosine"}, words)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': must have the form key=value; write for example model.d_model=256"),
        ("=3", "override '=3': must have the form key=value; "),
        ("steps.more=3", "override 'steps.more=3': 'more' is not inside a table; shorten the path"),
        ("steps.more.still=3", "override 'steps.more.still=3': 'more' is not inside a table; shorten the path"),
        ("model.blocks.1.0=gelu", "override 'model.blocks.1.0=gelu': '1' must be a number from 0 to 0; count from 0"),
        ("model.blocks.0.x=gelu", "override 'model.blocks.0.x=gelu': 'x' must be a number from 0 to 1; count from 0"),
        ("model.blocks.0.²=gelu", "override 'model.blocks.0.²=gelu': '²' must be a number from 0 to 1; count from 0"),
    ],
)
def test_bad_override(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(DATA, [override])
    assert str(caught.value).startswith(message)


def test_an_unknown_key_is_caught_by_the_configuration() -> None:
    data = apply_overrides({"vocab_size": 16, "d_model": 8, "n_layers": 1}, ["depth.kind=deep_delta", "depth.beta=1"])
    with pytest.raises(ConfigError, match=r"^depth: unknown key 'beta' in 'deep_delta'; did you mean 'beta_init'\?$"):
        DecoderConfig.from_data(data)


def test_values_are_toml() -> None:
    assert parse_value("{kind = 'gelu'}") == {"kind": "gelu"}
    assert parse_value("1_000") == 1000


@pytest.mark.parametrize("text", ["10\nrate = 3", "9" * 5000, "[" * 5000])
def test_what_toml_reads_as_more_or_not_at_all_is_a_text(text: str) -> None:
    """Catches a second line that is dropped, and errors of Python where the option has one."""
    assert parse_value(text) == text
