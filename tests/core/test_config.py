import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from pydantic import BeforeValidator

from twoaxis import ConfigError, DecoderConfig
from twoaxis.core.config import Config
from twoaxis.core.registry import Row
from twoaxis.depth import DEPTH, DeepDeltaConfig
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.sequence import SEQUENCE, AttentionConfig, ShortSWAConfig
from twoaxis.train import TrainConfig

SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "n_layers": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 2}, "unknown key 'n_layer' in the model; did you mean 'n_layers'?"),
        ({"self": 2}, "unknown key 'self' in the model; "),
        ({"depth": {"kind": "deep_delta", "self": 1}}, "depth: unknown key 'self' in 'deep_delta'; "),
        ({"zzz": 2}, "unknown key 'zzz' in the model; choose one of base_d_model, base_n_layers, blocks, d_model, depth, "),
        (
            {"depth": {"kind": "deep_delta", "betainit": 1}},
            "depth: unknown key 'betainit' in 'deep_delta'; did you mean 'beta_init'?",
        ),
        ({"depth": "residul"}, "depth: unknown depth mixer 'residul'; did you mean 'residual'?"),
        ({"depth": 3}, "depth: depth mixer=3: must be a table with a 'kind'; choose one of residual, "),
        ({"depth": {"beta_init": 1.0}}, "depth: depth mixer={'beta_init': 1.0}: must be a table with a 'kind'; choose one of "),
        ({"depth": {"kind": "deep_delta", "beta_init": 2.0}}, "depth: beta_init=2.0: must be inside (0, 2)"),
        ({"depth": {"kind": "attention_residuals", "block_size": 0}}, "depth: block_size=0: must be >= 1; "),
        ({"depth": {"kind": "attention_residuals", "block_size": [1, 0]}}, "depth: block_size.1=0: must be >= 1; "),
        ({"depth": {"kind": "attention_residuals", "block_size": "x"}}, "depth: block_size='x': must be a whole number"),
        ({"blocks": [["attentoin", "swiglu"]]}, "blocks.0.0: unknown sublayer 'attentoin'; did you mean 'attention'?"),
        (
            {"blocks": [["attention", {"kind": "swiglu", "dff": 3}]]},
            "blocks.0.1: unknown key 'dff' in 'swiglu'; did you mean 'd_ff'?",
        ),
        ({"blocks": []}, "blocks=[]: must be one or more blocks of at least one sublayer each; write for example "),
        ({"blocks": [[]]}, "blocks=[[]]: must be one or more blocks of at least one sublayer each; write for example "),
        (
            {"blocks": [["swiglu"]] * 3},
            "blocks=3: must be at most n_layers=2 patterns; drop the patterns that no block would use",
        ),
        ({"n_layers": 0}, "n_layers=0: "),
        ({"d_model": "wide"}, "d_model='wide': "),
        ({"norm_eps": 0.0}, "norm_eps=0.0: "),
        (
            {"d_model": 9},
            "n_heads=4: must be a divisor of d_model=9 with an even quotient, or given with a head_dim; set head_dim",
        ),
        ({"d_model": 12}, "n_heads=4: must be a divisor of d_model=12 with an even quotient, or given with a head_dim; "),
        ({"n_layers": 0, "d_model": 0}, " (and 1 more)"),
    ],
)
def test_error_is_one_line_that_says_what_got_allowed_remedy(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(**{**SIZES, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if not message.startswith(" "):
        assert str(caught.value).startswith(message)


def test_missing_key() -> None:
    with pytest.raises(ConfigError, match=r"^vocab_size is missing in the model: it has no default; add it"):
        DecoderConfig.from_data({"d_model": 8, "n_layers": 1})
    with pytest.raises(ConfigError, match=r"^model=3: must be a table of keys and values; see `twoaxis show`$"):
        DecoderConfig.from_data(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [AttentionConfig, ShortSWAConfig])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 2), (8, 3), (8, 0), (8, 16)])
def test_impossible_head_counts(config: type, heads: int, kv_heads: int) -> None:
    # Case A17: integer division hides these until a kernel fails.
    message = f"n_kv_heads={kv_heads}: must be a divisor of n_heads={heads}; use n_kv_heads=1 or n_heads for the extremes"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        config(n_heads=heads, n_kv_heads=kv_heads)


@pytest.mark.parametrize("config", [AttentionConfig, ShortSWAConfig])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_possible_head_counts(config: type, kv_heads: int) -> None:
    assert config(n_heads=8, n_kv_heads=kv_heads, head_dim=6).kv_heads == kv_heads


@pytest.mark.parametrize("config", [AttentionConfig, ShortSWAConfig])
@pytest.mark.parametrize(("key", "value"), [("window", 0), ("window", -1), ("n_heads", 0), ("head_dim", 3), ("rope_theta", 0)])
def test_values_that_cannot_be(config: type, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}={re.escape(repr(value))}: "):
        config(**{key: value})


def test_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        DecoderConfig(**SIZES).d_model = 3  # type: ignore[misc]


@pytest.mark.parametrize("row", [*DEPTH, *SEQUENCE], ids=lambda row: row.kind)
def test_round_trip(row) -> None:  # type: ignore[no-untyped-def]
    for name in row.examples:
        config = row.example(name)
        assert type(config).from_data(config.to_data()) == config


def test_round_trip_of_a_decoder() -> None:
    blocks = [["short_swa", {"kind": "attention", "window": 5}], ["gelu"]]
    config = DecoderConfig.from_data({**SIZES, "depth": {"kind": "deep_delta", "beta_init": 0.5}, "blocks": blocks})
    again = DecoderConfig.from_data(config.to_data())
    assert again == config
    assert isinstance(again.depth, DeepDeltaConfig) and again.depth.beta_init == 0.5
    assert [len(block) for block in again.layers] == [2, 1]


def test_checked_data_is_what_a_configuration_says_and_belongs_to_the_caller() -> None:
    data: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "n_layers": 2}
    for _ in range(2):
        found = DecoderConfig.checked_data(data)
        assert found == DecoderConfig.from_data(data).to_data() and found["embedding_std"] is None
        found["blocks"].clear()
    record = TrainConfig.from_record({"model": data})
    assert record.model["embedding_std"] == 0.02, "a record means what was computed before"
    assert TrainConfig.from_data({"model": data}).model["embedding_std"] is None
    with pytest.raises(ConfigError, match="d_model"):
        DecoderConfig.checked_data({**data, "d_model": True})
    with pytest.raises(ConfigError, match="nope"):
        DecoderConfig.checked_data({**data, "nope": 1})


def test_replace_checks_again() -> None:
    config = DecoderConfig(**SIZES)
    assert config.replace(n_layers=3).n_layers == 3
    assert config.replace(depth="deep_delta").depth.kind == "deep_delta"
    with pytest.raises(ConfigError, match="did you mean 'n_layers'"):
        config.replace(n_layer=3)


class Inner(Config):
    """A younger option beside an old one."""

    old: int = 1
    young: str = "new"

    unrecorded: ClassVar[Mapping[str, Any]] = {"young": "as before"}


class Outer(Config):
    """Holds another configuration, as tables build it: without the context of the one around it."""

    inner: Annotated[Inner, BeforeValidator(lambda data: Inner(**data) if isinstance(data, dict) else data)] = Inner()


def test_a_record_without_a_younger_option_means_what_was_computed_before() -> None:
    assert Inner.from_record({"old": 2}) == Inner(old=2, young="as before")
    assert Outer.from_record({"inner": {"old": 3}}).inner == Inner(old=3, young="as before")
    # What is written down counts.
    assert Outer.from_record({"inner": {"young": "new"}}).inner.young == "new"
    assert Outer.from_record(Outer().to_data()) == Outer()


def test_only_records_are_read_as_records() -> None:
    with pytest.raises(ConfigError, match="unknown key 'older'"):
        Outer.from_record({"inner": {"older": 1}})
    assert Inner().young == Inner.from_data({}).young == Outer.from_data({"inner": {"old": 1}}).inner.young == "new"
    assert Inner(old=2).replace(old=3).young == "new"


@pytest.mark.parametrize("row", [*DEPTH, *SEQUENCE, *FEED_FORWARD, *LOCAL], ids=lambda row: row.kind)
def test_declared_values_of_older_records_are_options_that_differ_from_the_default(row: Row[Config]) -> None:
    """A declaration that equals the default, or names no option, would be a mistake."""
    for option, value in row.config.unrecorded.items():
        now, then = row.config(), row.config.from_record({"kind": row.kind})
        assert getattr(then, option) == value != getattr(now, option)


@pytest.mark.parametrize(
    ("config", "keys", "remedy"),
    [
        (DecoderConfig, {"n_heads": 5}, "it belongs to a sublayer such as 'attention': write it in blocks, as blocks=[[{kind="),
        (DecoderConfig, {"d_ff": 5}, "it belongs to a sublayer such as 'swiglu': write it in blocks"),
        (DecoderConfig, {"block_size": 5}, "it belongs to a depth mixer such as 'attention_residuals': write depth.block_size"),
        (TrainConfig, {"d_model": 5}, "it belongs to model: write model.d_model"),
        (TrainConfig, {"seq_len": 5}, "it belongs to data: write data.seq_len"),
        (TrainConfig, {"data": {"seqlen": 5}}, "data: unknown key 'seqlen' in the data; did you mean 'seq_len'?"),
        (TrainConfig, {"lr": 5}, "it belongs to optimizer: write optimizer.lr"),
    ],
)
def test_a_key_of_another_table_is_sent_where_it_belongs(config: type[Config], keys: dict[str, Any], remedy: str) -> None:
    """Catches remedies that name the key that looks most alike, or all keys of the wrong table."""
    with pytest.raises(ConfigError) as caught:
        config.from_data(({"model": SIZES} if config is TrainConfig else SIZES) | keys)
    assert remedy in str(caught.value)


def every_config(base: type[Config] = Config) -> Iterator[type[Config]]:
    for config in base.__subclasses__():
        if config.__module__.startswith("twoaxis.") and not inspect.isabstract(config):
            yield config
        yield from every_config(config)


def test_no_error_names_a_class() -> None:
    """Catches words of ours that no user can know, in what every configuration says of keys, types and tables."""
    for name in ("study", "interop.serve.work", "planner.hardware", "audit"):
        importlib.import_module(f"twoaxis.{name}")
    found = sorted(set(every_config()), key=lambda config: config.__qualname__)
    names = re.compile(rf"\b({'|'.join(config.__name__ for config in found)})\b")
    said = 0
    for config in found:
        fields = config.model_fields
        wrong = [
            {"nonsense": 1},
            [1],
            {},
            *({name: object()} for name in fields),
            *({name: [[{"nonsense": 1}]]} for name in fields),
        ]
        for data in wrong:
            try:
                config.from_data(data)  # type: ignore[arg-type]
            except ConfigError as error:
                said += 1
                assert not names.search(str(error)), error
                assert "\n" not in str(error), error
    assert said > 5 * len(found) > 100


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    config = DecoderConfig(vocab_size=np.int64(8), d_model=np.int32(32), n_layers=1)  # type: ignore[arg-type]
    assert type(config.vocab_size) is int and config.vocab_size == 8
    with pytest.raises(ConfigError, match="vocab_size=True: must be a whole number"):
        DecoderConfig(vocab_size=True, d_model=32, n_layers=1)
