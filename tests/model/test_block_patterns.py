"""Published orders of layers: those of their sources, and models of any size from their names."""

import json
from pathlib import Path
from typing import Any

import pytest

from twoaxis.cli import main
from twoaxis.core.config import apply_overrides
from twoaxis.core.errors import ConfigError
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.block_patterns import EVIDENCE, LETTERS, PATTERNS
from twoaxis.planner.model import read_model
from twoaxis.train import TrainConfig

PUBLISHED: dict[str, tuple[str, int, int]] = {
    # The first layers, and how many see a window (or have taps or a state) and all tokens.
    "gpt_oss": ("LGLGLG", 18, 18),
    "mimo_v2_flash": ("GLLLLGLLLLLG", 39, 9),
    "granite_swa": ("GLLLGLLL", 18, 6),
    "flint": ("GGLLLGLLLG", 35, 14),
    "lfm3": ("CCGCLCGCLCGCLCGCLCGCLCGC", 18, 6),
    "step_flash": ("GLLLGLLLG", 33, 12),
    "kolibri": ("LLLLGLLLLG", 40, 10),
    "gemma3n": ("LLLLGLLLLG", 28, 7),
    "gemma4": ("LLLLLGLLLLLG", 25, 5),
    "muse_glimmer": ("LLLGLLLG", 39, 13),
    "muse_spark": ("LGLLLGLLLG", 46, 16),
    "olmo3": ("LLLGLLLG", 24, 8),
    "exaone4": ("LLLGLLLG", 24, 8),
    "cohere2": ("LLLGLLLG", 30, 10),
    "lara_mini": ("DLDGLDLDGL", 27, 7),
    "qwen3_next": ("DDDGDDDG", 36, 12),
    "olmo_hybrid": ("DDDGDDDG", 24, 8),
}
"""As the configurations of the models list them; nanochat has no number of layers."""


def decoder(blocks: Any, **sizes: Any) -> DecoderConfig:
    return DecoderConfig.from_data({"vocab_size": 8, "d_model": 64, "n_layers": 6, **sizes, "blocks": blocks})


def attentions(config: DecoderConfig) -> list[Any]:
    return [part for part in config.parts if part.kind == "attention"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_order_is_that_of_its_source(name: str) -> None:
    first, near, everywhere = PUBLISHED[name]
    letters = PATTERNS[name].layers(near + everywhere)
    assert letters.startswith(first) and letters.count("G") == everywhere and len(letters) == near + everywhere


def test_orders_keep_their_ends_at_any_number_of_layers() -> None:
    assert [PATTERNS["nanochat"].layers(n) for n in (1, 3, 5)] == ["L", "LLG", "LLLGG"]
    assert [PATTERNS["mimo_v2_flash"].layers(n) for n in (1, 2, 6, 7)] == ["G", "GL", "GLLLLG", "GLLLLGL"]
    assert [PATTERNS["muse_spark"].layers(n) for n in (2, 4, 5)] == ["LG", "LLLG", "GLLLG"]
    assert [PATTERNS["flint"].layers(n) for n in (2, 4)] == ["GG", "GGLG"]


@pytest.mark.parametrize("name", PATTERNS)
def test_every_order_is_a_model_of_any_depth(name: str) -> None:
    assert set(PATTERNS[name].order) <= set(LETTERS) and set(PATTERNS[name].evidence.split()) <= set(EVIDENCE)
    for n_layers in (1, 2, 3, 7, 50):
        config = decoder({"preset": name, "n_heads": 8}, n_layers=n_layers)
        mixers = [block[0] for block in config.layers]
        kinds = {"gated_delta_net": "D", "gated_short_conv": "C"}
        seen = ("G" if getattr(mixer, "window", None) is None else "L" for mixer in mixers)
        letters = [kinds.get(mixer.kind, letter) for mixer, letter in zip(mixers, seen, strict=True)]
        assert "".join(letters) == PATTERNS[name].layers(n_layers)
    Decoder.build(decoder({"preset": name, "n_heads": 4, "window": 4}))


def test_gpt_oss_alternates_windows_of_128_with_sinks() -> None:
    local, everywhere = attentions(decoder("gpt_oss"))[:2]
    assert (local.window, everywhere.window) == (128, None)
    for one in (local, everywhere):
        assert (one.sink, one.sink_init, one.bias, one.rope_theta) == ("learned", "normal", "all", 150_000)
    assert len(decoder("gpt_oss").blocks) == 2


def test_windows_count_the_current_token() -> None:
    # The source of both counts the tokens before it: 128 and 512.
    assert {one.window for one in attentions(decoder("mimo_v2_flash"))} == {129, None}
    assert {one.window for one in attentions(decoder("flint"))} == {513, None}


def test_mimo_has_sinks_and_twice_the_kv_heads_in_its_windows() -> None:
    config = decoder({"preset": "mimo_v2_flash", "n_heads": 64, "head_dim": 192})
    everywhere, local = attentions(config)[:2]
    assert (local.sink, local.kv_heads, local.rope_theta, local.rope_dim) == ("learned", 8, 10_000, 64)
    assert (everywhere.sink, everywhere.kv_heads, everywhere.rope_theta, everywhere.rope_dim) == ("none", 4, 5_000_000, 64)


def test_global_layers_rotate_otherwise_or_not() -> None:
    assert [one.rope_dim for one in attentions(decoder("exaone4"))[:4]] == [None, None, None, 0]
    gemma = attentions(decoder({"preset": "gemma4", "head_dim": 32}))
    assert [(one.rope_dim, one.rope_theta) for one in gemma[4:]] == [(None, 10_000), (8, 1_000_000)]


def test_the_window_of_nanochat_is_a_quarter_of_the_longest_sequence() -> None:
    for longest, window in ((2048, 512), (2049, 640), (100, 128)):
        assert attentions(decoder("nanochat", max_seq_len=longest))[0].window == window
    assert attentions(decoder({"preset": "nanochat", "window": 9}))[0].window == 9


def test_sizes_and_parts_that_an_order_leaves_open() -> None:
    config = decoder(
        {"preset": "granite_swa", "n_heads": 20, "head_dim": 8, "window": 16, "feed_forward": {"kind": "gelu", "d_ff": 32}}
    )
    local = attentions(config)[1]
    assert (local.n_heads, local.kv_heads, local.head_dim, local.window, local.sink) == (20, 4, 8, 16, "learned")
    assert config.blocks[0][1].kind == "gelu"
    # A group that does not divide the heads becomes the next that does.
    assert attentions(decoder({"preset": "granite_swa", "n_heads": 12, "head_dim": 4}))[0].kv_heads == 2
    assert attentions(decoder({"preset": "granite_swa", "n_heads": 13, "head_dim": 4}))[0].kv_heads == 1
    assert {one.sink for one in attentions(decoder({"preset": "gpt_oss", "sink": "none"}))} == {"none"}
    assert {(one.sink, one.sink_init) for one in attentions(decoder({"preset": "flint", "sink": "per_token"}))} == {
        ("per_token", "normal")
    }
    hybrid = decoder({"preset": "lara_mini", "n_heads": 8})
    assert [block[0].kind for block in hybrid.layers[:3]] == ["gated_delta_net", "attention", "gated_delta_net"]


def test_records_hold_the_blocks_and_no_name() -> None:
    config = decoder("gpt_oss")
    data = json.loads(json.dumps(config.to_data()))
    assert isinstance(data["blocks"], list) and "gpt_oss" not in json.dumps(data)
    assert DecoderConfig.from_record(data) == config == DecoderConfig.from_data(data)
    recipe = TrainConfig.from_data({"model": {"d_model": 64, "n_layers": 2, "blocks": "olmo3"}, "steps": 1})
    assert isinstance(recipe.model["blocks"], list) and recipe.model["blocks"][0][0]["window"] == 4096


def test_overrides_name_an_order_and_its_options() -> None:
    base = {"vocab_size": 8, "d_model": 64, "n_layers": 4}
    for overrides in (["blocks=gemma3n", "blocks.window=8"], ["blocks.preset=gemma3n", "blocks.window=8"]):
        config = DecoderConfig.from_data(apply_overrides(base, overrides))
        assert config == decoder({"preset": "gemma3n", "window": 8}, n_layers=4)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"blocks": "gpt_os"}, "unknown order of blocks 'gpt_os'; did you mean 'gpt_oss'?"),
        ({"blocks": "attention"}, "unknown order of blocks 'attention'; choose one of"),
        ({"blocks": {"preset": "gpt_oss", "windw": 3}}, "did you mean 'window'?"),
        ({"blocks": {"preset": "gpt_oss", "window": 0}}, "window"),
        ({"blocks": {"window": 4}}, "preset"),
        ({"blocks": "gpt_oss", "n_layers": 0}, "n_layers=0"),
        ({"blocks": "gpt_oss", "n_layers": None}, "n_layers"),
        ({"blocks": {"preset": "gpt_oss", "n_heads": 5}}, "n_heads=5: must be a divisor of d_model=64"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_data({"vocab_size": 8, "d_model": 64, "n_layers": 4, **data})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_reads_a_name(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text('vocab_size = 64\nd_model = 64\nn_layers = 12\nblocks = { preset = "mimo_v2_flash", n_heads = 16 }\n')
    model = read_model(path)
    assert model.n_layers == 12
    assert [part.windows for part in model.parts[:4:2]] == [(), (128, 129)]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_list_shows_every_order(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "blocks", *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["blocks"].keys() == PATTERNS.keys()
    else:
        assert all(f"\n{name} " in out for name in PATTERNS)
