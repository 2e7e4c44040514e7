"""Golden fixtures as checkpoints: by the names of a layout they compute the authors' logits, and are saved as they were."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from twoaxis.checkpoints.layouts import LAYOUTS, DepthPaths, StateMap, state_map
from twoaxis.core.errors import CheckpointError, ConfigError
from twoaxis.core.measure import perturb
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.depth import DEPTH
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.sequence import heads

FIXTURES = Path(__file__).parent.parent / "parity" / "fixtures"
RELEASED = {"kind": "deep_delta", "value_target": "code"}
CHANNELS = {**RELEASED, "value_channels": 4}
BOTH = {"n_heads": 4, "qk_norm": "before_rope"}

DECODERS: list[tuple[str, str, dict[str, Any], dict[str, Any], int]] = [
    ("deep_delta", "ddl-vdim1", {"depth": RELEASED, "norm_eps": 1e-5}, {"n_heads": 4, "qk_norm": "after_rope"}, 85),
    (
        "deep_delta",
        "ddl-tc-ec",
        {"depth": {**CHANNELS, "compressor": "time", "expansion": "embedding_conv"}, "norm_eps": 1e-5},
        {"n_heads": 4, "qk_norm": "after_rope"},
        85,
    ),
    (
        "deep_delta",
        "ddl-cc",
        {"depth": {**CHANNELS, "compressor": "channel"}, "norm_eps": 1e-5},
        {"n_heads": 4, "qk_norm": "after_rope"},
        85,
    ),
    ("attnres_qwen3", "attnres-full-qwen3", {"depth": "attention_residuals"}, {**BOTH, "n_kv_heads": 2}, 68),
    (
        "attnres_fla",
        "attnres-block4",
        {"depth": {"kind": "attention_residuals", "block_size": 4}, "tie_embeddings": False},
        {"n_heads": 4},
        72,
    ),
    ("llama", "swa-mistral", {"n_layers": 3, "tie_embeddings": False}, {"n_heads": 4, "n_kv_heads": 2, "window": 4}, 64),
    (
        "muddformer",
        "muddformer-qkvr-f64",
        {"d_model": 16, "tie_embeddings": False, "depth": {"kind": "muddformer", "hidden": "round64", "expand_last": 4}},
        {"n_heads": 4, "qk_norm": "before_rope"},
        256,
    ),
]

MUDD = {"kind": "muddformer", "hidden": "round64", "expand_last": 4}
ELC, DENSE = "elc_bert", "denseformer"
MIXERS: list[tuple[str, str, dict[str, Any], int, int]] = [
    ("muddformer_sums", "muddpythia-qkvr-f64", {**MUDD, "residual": "parallel"}, 16, 4),
    ("denseformer", "denseformer-lm-2x3", {"kind": DENSE, "dilation": 2, "period": 3}, 24, 6),
    (
        "denseformer_training",
        "denseformer-exp-group2-k2",
        {"kind": DENSE, "dilation": 2, "period": 2, "stored": "groups"},
        24,
        6,
    ),
    ("connect_to_last", "denseformer-connecttolast", {"kind": DENSE, "variant": "connect_to_last"}, 32, 4),
    ("skip_gains", "denseformer-skipgains", {"kind": DENSE, "variant": "skip_gains"}, 32, 4),
    ("gpt_bert", "denseformer-sublayer-gptbert", {"kind": DENSE, "granularity": "sublayer"}, 32, 3),
    ("elc_bert", "elcbert-base", {"kind": ELC, "variant": "base"}, 32, 4),
    ("elc_bert", "elcbert-weighted_output", {"kind": ELC, "variant": "weighted_output"}, 32, 4),
    ("deepseek_v4", "mhc-deepseekv4-iters20-f64", {"kind": "mhc", "preset": "deepseek_v4"}, 32, 4),
    ("deepseek_v4_raw", "mhc-deepseekv4-iters20-f64", {"kind": "mhc", "preset": "deepseek_v4"}, 32, 4),
    ("deepseek_v41", "mhc-v41-iters20-f64", {"kind": "mhc", "preset": "deepseek_v41"}, 24, 3),
    ("kimi_k3", "attnres-block-qwen3", {"kind": "attention_residuals", "block_size": 2, "count": "layer"}, 32, 4),
]
"""The layout, the fixture, the depth mixer, the width and the blocks."""


def _fixture(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All tensors of a fixture, and its parameters by the authors' names."""
    stored = load_file(FIXTURES / f"{name}.safetensors")
    return stored, {key.removeprefix("param/"): value for key, value in stored.items() if key.startswith("param/")}


def _decoder_config(options: Mapping[str, Any], attention: Mapping[str, Any], d_ff: int) -> DecoderConfig:
    swiglu = {"kind": "swiglu", "d_ff": d_ff, "d_ff_by_depth": "rising" if d_ff == 256 else "equal"}
    blocks = [[{"kind": "attention", **attention}, swiglu]]
    return DecoderConfig.from_data({"vocab_size": 61, "d_model": 32, "n_layers": 4, "blocks": blocks, **options})


def _saved_as_loaded(table: StateMap, saved: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    constant = {entry.part.name for entry in table.constants}
    assert set(saved) == set(table.parts)
    for name, tensor in saved.items():
        assert tensor.shape == tensors[name].shape, name
        assert name in constant or torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(("layout", "fixture", "options", "attention", "d_ff"), DECODERS, ids=[row[1] for row in DECODERS])
def test_a_whole_decoder(
    layout: str, fixture: str, options: Any, attention: Any, d_ff: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, tensors = _fixture(fixture)
    config = _decoder_config(options, attention, d_ff)
    model, table = Decoder(config).double(), state_map(layout, config)
    table.load(model, tensors)
    tokens = stored.get("input/input_ids", stored.get("input/ids"))
    assert tokens is not None
    if "buffer/freqs_cis" in stored:
        # Their table of angles is rounded to half precision.
        cos, sin = (half[: tokens.shape[1]].double() for half in stored["buffer/freqs_cis"].unbind(-1))
        turn = torch.cat((cos, cos), -1)[None, :, None], torch.cat((-sin, sin), -1)[None, :, None]
        monkeypatch.setattr(heads, "layout_rotation", lambda *_: turn)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), stored["output/logits"], rtol=1e-9, atol=1e-9)
    _saved_as_loaded(table, table.save(model), tensors)


def _published(name: str, layout: str) -> str:
    """The wrappers of some fixtures number sublayers, where checkpoints name layers and sites."""
    if match := re.fullmatch(r"(?:hc|sites)\.(\d+)\.(\w+)", name):
        layer, site, what = int(match[1]) // 2, ("attn", "ffn")[int(match[1]) % 2], match[2]
        raw = layout in ("deepseek_v4_raw", "deepseek_v41")
        return f"layers.{layer}.hc_{site}_{what}" if raw else f"model.layers.{layer}.{site}_hc.{what}"
    if name.startswith("head.hc_"):
        return name.replace("head.hc_", "hc_head_" if layout.endswith("raw") else "model.hc_head.hc_")
    if layout == "kimi_k3":
        name = name.replace("attn_res", "self_attention_res").replace("final_res", "output_attn_res")
        return f"language_model.{name}"
    return name


class _Mixers(nn.Module):
    def __init__(self, kind: Mapping[str, Any], d_model: int, n_blocks: int) -> None:
        super().__init__()
        depth = DEPTH.parse(kind)
        slots = (SublayerInfo("attention", takes_views=True), SublayerInfo("swiglu")) * n_blocks
        stack = depth.prepare(LayerStack(d_model, 1e-6, (2,) * n_blocks, slots))
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        self.paths = DepthPaths(depth, stack, tuple(f"mixers.{index}" for index in range(stack.n_sublayers)))
        initialise(self, 0)
        self.double()


@pytest.mark.parametrize(
    ("layout", "fixture", "depth", "d_model", "n_blocks"), MIXERS, ids=[f"{row[0]}-{row[1]}" for row in MIXERS]
)
def test_depth_mixers_alone(layout: str, fixture: str, depth: Any, d_model: int, n_blocks: int) -> None:
    """Every parameter of the mixers has a place; other tensors of the checkpoint are none of the layout's business."""
    _, tensors = _fixture(fixture)
    tensors = {_published(name, layout): tensor for name, tensor in tensors.items()}
    model = _Mixers(depth, d_model, n_blocks)
    build = LAYOUTS[layout].mixers
    assert build is not None
    table = build(model.paths)
    assert set(table.names()) == {name for name, _ in model.named_parameters()}
    table.load(model, tensors)
    _saved_as_loaded(table, table.save(model), tensors)
    stray = next(iter(table.parts)).replace("0", "77", 1)
    if stray not in table.parts:
        with pytest.raises(CheckpointError, match="1 unexpected"):
            table.load(model, {**tensors, stray: torch.zeros(1)})


def test_nothing_is_loaded_unless_everything_fits() -> None:
    _, tensors = _fixture("ddl-vdim1")
    _, _, options, attention, d_ff = DECODERS[0]
    config = _decoder_config(options, attention, d_ff)
    model = Decoder.build(config).double()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    tensors["ln_f.weight"] = tensors["ln_f.weight"][:3]
    with pytest.raises(
        CheckpointError, match=r"layout 'deep_delta': 1 of another shape \(ln_f.weight is \[3\], must be \[32\]\)"
    ):
        state_map("deep_delta", config).load(model, tensors)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_decoder_without_a_place_for_all_its_parameters_is_refused() -> None:
    config = _decoder_config({"depth": "denseformer"}, {"n_heads": 4}, 64)
    with pytest.raises(ConfigError, match=r"has no place for parameter 'blocks.0.swiglu.depth.weights'"):
        state_map("llama", config)
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        state_map("llamas", config)
    with pytest.raises(ConfigError, match="depth='denseformer': must be elc_bert"):
        state_map("elc_bert", config)


@pytest.mark.parametrize("layout", [name for name, row in LAYOUTS.items() if row.decoder])
def test_options_that_a_layout_has_no_fixture_for(layout: str) -> None:
    """Without norms of queries and keys, with tied embeddings, and with widths that rise, out and back."""
    depth = {"deep_delta": RELEASED, "muddformer": MUDD, "llama": "residual"}.get(layout, "attention_residuals")
    config = _decoder_config({"depth": depth, "tie_embeddings": True}, {"n_heads": 4}, 256)
    model, other = Decoder.build(config, seed=0), Decoder.build(config, seed=1)
    table = state_map(layout, config)
    saved = table.save(model)
    table.load(other, saved)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    ((head, embedding),) = table.tied.items()
    table.load(other, {**saved, head: saved[embedding].clone()})
    with pytest.raises(CheckpointError, match=f"{head} differs from {embedding}, but both are tied"):
        table.load(other, {**saved, head: saved[embedding] + 1})


MHC = {"kind": "mhc", "preset": "deepseek_v4"}
PLACES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "deepseek_v4": (MHC, {"attention.depth.fn": "model.layers.1.attn_hc.fn", "swiglu.depth.fn": "model.layers.1.ffn_hc.fn"}),
    "deepseek_v4_raw": (MHC, {"attention.depth.fn": "layers.1.hc_attn_fn", "swiglu.depth.fn": "layers.1.hc_ffn_fn"}),
    "deepseek_v41": (
        {**MHC, "preset": "deepseek_v41"},
        {"attention.depth.scale": "layers.1.hc_attn_scale", "swiglu.depth.scale": "layers.1.hc_ffn_scale"},
    ),
    "kimi_k3": (
        {"kind": "attention_residuals", "block_size": 2, "count": "layer"},
        {
            "attention.depth.query.pseudo_query": "language_model.model.layers.1.self_attention_res_proj.weight",
            "swiglu.depth.query.key_gain": "language_model.model.layers.1.mlp_res_norm.weight",
        },
    ),
    "skip_gains": (
        {"kind": DENSE, "variant": "skip_gains"},
        {"attention.depth.gain": "transformer.h.1.gain_attn", "swiglu.depth.gain": "transformer.h.1.gain_mlp"},
    ),
}
"""By layout, the names of parameters in the second block; tensors of equal shapes could change places in both directions."""


@pytest.mark.parametrize("layout", PLACES)
def test_tensors_of_equal_shapes_have_their_own_places(layout: str) -> None:
    depth, expected = PLACES[layout]
    config = _decoder_config({"depth": depth, "n_layers": 3}, {"n_heads": 4}, 64)
    names = state_map(layout, config).names()
    assert {ours: names[f"blocks.1.{ours}"] for ours in expected} == {ours: (name,) for ours, name in expected.items()}


def test_the_files_of_deepseek_v4() -> None:
    """By the names of its card, with heads that predict further tokens, which are no part of the model."""
    config = _decoder_config({"depth": {"kind": "mhc", "preset": "deepseek_v4"}, "n_layers": 2}, {"n_heads": 4}, 64)
    raw = state_map("deepseek_v4_raw", config)
    ends = ("fn", "base", "scale")
    layers = [f"layers.{layer}.hc_{site}_{end}" for layer in (0, 1) for site in ("attn", "ffn") for end in ends]
    assert set(raw.parts) == {*layers, *(f"hc_head_{end}" for end in ends)}
    outside = {"mtp.0.hc_attn_fn": torch.zeros(1), "mtp.0.hc_ffn_base": torch.zeros(1), "mtp.0.hc_head_fn": torch.zeros(1)}
    raw.check({**raw.save(Decoder.build(config)), **outside})
    with pytest.raises(CheckpointError, match=r"1 unexpected \(layers.2.hc_attn_fn\)"):
        raw.check({**raw.save(Decoder.build(config)), "layers.2.hc_attn_fn": torch.zeros(1)})
    named = state_map("deepseek_v4", config)
    layers = [f"model.layers.{layer}.{site}_hc.{end}" for layer in (0, 1) for site in ("attn", "ffn") for end in ends]
    assert set(named.parts) == {*layers, *(f"model.hc_head.hc_{end}" for end in ends)}
    named.check({**named.save(Decoder.build(config)), "model.mtp.0.attn_hc.fn": torch.zeros(1)})


def test_the_files_of_deepseek_v41() -> None:
    """Those of V4 without a head, for a delayed read alone; a V4 file has one too many of them."""
    config = _decoder_config({"depth": {"kind": "mhc", "preset": "deepseek_v41"}, "n_layers": 2}, {"n_heads": 4}, 64)
    table, ends = state_map("deepseek_v41", config), ("fn", "base", "scale")
    layers = [f"layers.{layer}.hc_{site}_{end}" for layer in (0, 1) for site in ("attn", "ffn") for end in ends]
    saved = table.save(Decoder.build(config))
    assert set(saved) == set(layers) and {tensor.dtype for tensor in saved.values()} == {torch.float32}
    table.check({**saved, "mtp.0.hc_attn_fn": torch.zeros(1)})
    other = _decoder_config({"depth": {"kind": "mhc", "preset": "deepseek_v4"}, "n_layers": 2}, {"n_heads": 4}, 64)
    with pytest.raises(ConfigError, match="read='current': must be 'delayed' in this layout; use preset='deepseek_v41'"):
        state_map("deepseek_v41", other)
    with pytest.raises(ConfigError, match="read='delayed': must be 'current' in this layout"):
        state_map("deepseek_v4_raw", config)


@pytest.mark.parametrize(("layout", "root"), [("gemma4", "model.language_model."), ("gemma4_text", "model.")])
def test_the_files_of_gemma_4(layout: str, root: str) -> None:
    """By the names of transformers 5.24: tables and maps of all layers are one tensor there, and the scalar is a buffer."""
    depth = {"kind": "per_layer_embedding", "d_embedding": 3}
    config = _decoder_config({"depth": depth, "n_layers": 2}, {"n_heads": 4}, 64)
    model, other = Decoder.build(config, seed=0), Decoder.build(config, seed=1)
    table = state_map(layout, config)
    shapes = {
        "embed_tokens_per_layer.weight": (61, 6),
        "per_layer_model_projection.weight": (6, 32),
        "per_layer_projection_norm.weight": (3,),
    }
    for layer in (0, 1):
        shapes |= {
            f"layers.{layer}.per_layer_input_gate.weight": (3, 32),
            f"layers.{layer}.per_layer_projection.weight": (32, 3),
            f"layers.{layer}.post_per_layer_input_norm.weight": (32,),
            f"layers.{layer}.layer_scalar": (1,),
        }
    saved = table.save(model)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {root + name: one for name, one in shapes.items()}
    second = model.get_parameter("blocks.1.swiglu.depth.table")
    assert torch.equal(saved[f"{root}embed_tokens_per_layer.weight"][:, 3:], second)
    table.load(other, {**saved, f"{root}embed_tokens.weight": torch.zeros(1), f"{root}layers.0.mlp.up_proj.weight": second})
    ours = {name: value for name, value in model.state_dict().items() if ".depth." in name or name.startswith("ends.")}
    assert set(ours) == set(table.names())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in ours.items())
    with pytest.raises(CheckpointError, match=rf"1 unexpected \({root}layers.2.layer_scalar\)"):
        table.check({**saved, f"{root}layers.2.layer_scalar": torch.zeros(1)})
    with pytest.raises(ConfigError, match="depth='per_layer_embedding': must be per_layer_embedding with preset='gemma4'"):
        state_map(layout, config.replace(depth={**depth, "preset": "gemma3n"}))


@pytest.mark.parametrize(("layout", "root"), [("inkling2", "model.language_model."), ("inkling2_text", "model.")])
def test_the_files_of_inkling_2(layout: str, root: str) -> None:
    """The queries of a model that transformers builds: three of global attention in one tensor, none before layer 0."""
    transformers = pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
    kinds = ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "layer_types": kinds, "n_routed_experts": 8, "unpadded_vocab_size": 61}
    with torch.device("meta"):
        theirs = transformers.Inkling2ForCausalLM(transformers.Inkling2TextConfig(**sizes, vocab_size=61))
    expected = {n.replace("model.", root, 1): p.shape for n, p in theirs.named_parameters() if n.endswith("_input.query")}
    attention = {"kind": "attention", "n_heads": 4}
    blocks = [[{**attention, "window": 4}, "swiglu"], [{**attention, "window": 4}, "swiglu"], [attention, "swiglu"]]
    blocks.append(blocks[0])
    depth = {"kind": "attention_residuals", "form": "inkling2", "block_size": 2, "count": "layer"}
    config = DecoderConfig.from_data({"vocab_size": 61, "d_model": 32, "n_layers": 4, "blocks": blocks, "depth": depth})
    model, other = (perturb(Decoder.build(config, seed=seed)) for seed in (0, 1))
    table = state_map(layout, config)
    saved = table.save(model)
    assert {name: tensor.shape for name, tensor in saved.items()} == expected
    # As transformers unbinds them: queries, keys, values.
    ours = [f"blocks.2.attention.depth.{name}.pseudo_query" for name in ("query", "key_query", "value_query")]
    stacked = torch.stack([model.get_parameter(name) for name in ours])
    assert torch.equal(saved[f"{root}layers.2.attention_input.query"], stacked)
    table.load(other, {**saved, f"{root}norm.weight": torch.zeros(1)})
    for name in table.names():
        assert torch.equal(model.get_parameter(name), other.get_parameter(name)), name
    assert set(table.names()) == {name for name, _ in model.named_parameters() if name.endswith("pseudo_query")}
    with pytest.raises(CheckpointError, match="of another shape"):
        table.check({**saved, f"{root}layers.2.attention_input.query": torch.zeros(32)})
    with pytest.raises(ConfigError, match="must be attention_residuals with form='inkling2'"):
        state_map(layout, config.replace(depth="attention_residuals"))


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        ("deep_delta", "value_target='paper': must be a target of the released code, .*; set value_target='code'"),
        ({**RELEASED, "gate": "two_layer_bias"}, "gate='two_layer_bias': must be 'linear' or 'two_layer' of the released code"),
        ("residual", "depth='residual': must be deep_delta; use kind='deep_delta' with value_target='code'"),
    ],
)
def test_the_layout_of_released_deltas_refuses_what_their_code_has_not(depth: Any, message: str) -> None:
    blocks = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    config = DecoderConfig.from_data({"vocab_size": 7, "d_model": 8, "n_layers": 1, "blocks": blocks, "depth": depth})
    with pytest.raises(ConfigError, match=message):
        state_map("deep_delta", config)
