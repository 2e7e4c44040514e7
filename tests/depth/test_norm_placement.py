"""Norm placements, ResiDual and SiameseNorm: relations between them, what a sublayer is told, and how models start."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twoaxis.checkpoints.retrofit import convert, target_config
from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, Normal, NormalRows, initial_values, matrix_std
from twoaxis.core.position import HeadShape, LayerStack, SublayerInfo
from twoaxis.core.registry import Row
from twoaxis.depth import DEPTH, DepthAxis, NormPlacement, NormPlacementConfig, SiameseNorm, SiameseNormConfig
from twoaxis.model import Decoder
from twoaxis.model.cost import decoder_cost
from twoaxis.sequence import SEQUENCE
from twoaxis.testing.measured import gradients, sublayer_list
from twoaxis.testing.toy import FEED_FORWARD, decoder_config, noise, toy_decoder, toy_tokens
from twoaxis.train.parallel.stage import build_part

D = 8
EXACT: Any = {"rtol": 1e-13, "atol": 1e-13}


def placed(placement: str, **options: Any) -> NormPlacementConfig:
    return NormPlacementConfig.from_data({"placement": placement, **options})


def model_of(config: Any, like: Decoder | None = None, **changes: Any) -> Decoder:
    """A toy decoder away from its start, with the parameters that it shares with another one."""
    model = toy_decoder(config, **changes)
    if like is not None:
        shared = {name: value for name, value in like.state_dict().items() if name in model.state_dict()}
        model.load_state_dict(shared, strict=False)
    return model


@torch.no_grad()
def same(one: Decoder, other: Decoder) -> bool:
    return torch.allclose(one(toy_tokens()), other(toy_tokens()), rtol=1e-11, atol=1e-11)


def mixer(config: Any, index: int, n_layers: int = 3, sublayers: int = 2) -> Any:
    stack = config.prepare(LayerStack(D, 1e-6, (sublayers,) * n_layers))
    return config.build(stack)[0][index].double()


@pytest.mark.parametrize("config", [placed("pre"), placed("mix", post_blocks=0)], ids=repr)
def test_without_a_norm_of_its_own_it_is_the_plain_model(config: NormPlacementConfig) -> None:
    plain, model = toy_decoder(DEPTH["residual"].example("default")), model_of(config)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert same(plain, model)
    assert config.init_equivalence.relation == "exact"


def test_mix_is_post_norm_in_its_first_blocks() -> None:
    post = model_of(placed("post"))
    assert same(post, model_of(placed("mix", post_blocks=3), post))
    assert not same(post, model_of(placed("mix", post_blocks=2), post))
    for blocks, count in ((1, 1), (2, 2), (0.5, 1), (0.9, 2), (0.01, 1)):
        names = [name for name in model_of(placed("mix", post_blocks=blocks)).state_dict() if name.startswith("blocks")]
        assert {name[:8] for name in names if name.endswith("depth.gain")} == {f"blocks.{block}" for block in range(count)}
        assert {name[:8] for name in names if name.endswith(".norm.gain")} == {f"blocks.{block}" for block in range(count, 3)}


def test_a_quarter_of_the_blocks_is_post_norm_by_default() -> None:
    assert [placed("mix").count_post_blocks(LayerStack(D, 1e-6, (2,) * n)) for n in (1, 4, 7, 12, 32)] == [1, 1, 1, 3, 8]


def test_layer_scaling_is_the_plain_model_with_smaller_gains() -> None:
    plain = toy_decoder(DEPTH["residual"].example("default"))
    scaled = model_of(placed("layer_scaling"), plain)
    # A factor that is without effect would be plain pre-norm in silence.
    assert not same(plain, scaled)
    with torch.no_grad():
        for block in range(3):
            for kind in ("attention", "swiglu"):
                scaled.get_parameter(f"blocks.{block}.{kind}.norm.gain").mul_((block + 1) ** 0.5)
    assert same(plain, scaled)


def test_keel_starts_as_pre_norm() -> None:
    x, y = noise((2, 3, D), "x"), noise((2, 3, D), "y")
    keel, post = placed("keel"), mixer(placed("post"), 0)
    assert torch.equal(mixer(keel, 0).write(x, y, x, None), x + y)
    torch.testing.assert_close(mixer(keel, 1).write(x, y, x, None), post.write(x, y, x, None), **EXACT)
    torch.testing.assert_close(mixer(keel, 2).write(x, y, x, None), post.write(6 * x, y, x, None), **EXACT)
    one = LayerStack(D, 1e-6, (1,))
    assert keel.form(one.sites[0]) == placed("pre").form(one.sites[0])


def test_deepnorm_of_one_sublayer_is_post_norm_of_a_centred_sum() -> None:
    """Its alpha is 1 there, and a LayerNorm of numbers with mean 0 is an RMSNorm."""
    x, y = (each - each.mean(-1, keepdim=True) for each in (noise((2, 3, D), "x"), noise((2, 3, D), "y")))
    deepnorm = mixer(placed("deepnorm", layer_eps=1e-6), 0, n_layers=1, sublayers=1)
    post = mixer(placed("post"), 0, n_layers=1, sublayers=1)
    torch.testing.assert_close(deepnorm.write(x, y, x, None), post.write(x, y, x, None), **EXACT)


def test_residual_dual_is_deepnorm_without_alpha_beside_the_residual() -> None:
    dual = mixer(DEPTH["residual_dual"].example("default"), 1)
    deepnorm = mixer(placed("deepnorm"), 0, n_layers=1, sublayers=1)
    x, r, y = (noise((2, 3, D), name) for name in "xry")
    left, total = dual.write((x, r), y, x, None)
    torch.testing.assert_close(left, deepnorm.write(x, y, x, None), **EXACT)
    assert torch.equal(total, r + y)


def test_siamese_norm_without_y_is_post_norm() -> None:
    """The norm of a sum is at the start of the next sublayer; updates are smaller by their share."""
    first, second = (mixer(SiameseNormConfig(), index) for index in (2, 3))
    for each in (first, second):
        each.y_gain.data.zero_()
    x, y, z = (noise((2, 3, D), name) for name in "xyz")
    view, carry, _ = first.read((x, y))
    following = second.read(first.write((x, y), z, view, carry))[0]
    torch.testing.assert_close(following, mixer(placed("post"), 0).write(view, z / 2, view, None), **EXACT)


@pytest.mark.parametrize("form", ["post_pre", "hybrid_pre"])
def test_siamese_norm_trains_away_from_the_plain_model(form: Any) -> None:
    model = toy_decoder(SiameseNormConfig(form=form, init="preserving"), perturbed=False, norm_eps=1e-20)
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    # The streams are equal before the first sublayer, so that a gain of one is a factor on both.
    moved = [name for name in found if name.endswith("x_gain") and found[name].abs().max() > 1e-9]
    assert len(moved) >= 5


def test_heads_take_the_place_of_a_norm_in_the_hybrid_form() -> None:
    config = SiameseNormConfig(form="hybrid_pre")
    unknown = config.prepare(LayerStack(D, 1e-6, (2, 2)))
    assert [site.slot.norm for site in unknown.sites] == ["none", "rms"] * 2
    heads = SublayerInfo("attention", heads=HeadShape(2, 2, 4))
    known = LayerStack(D, 1e-6, (3,), (SublayerInfo("short_conv"), heads, SublayerInfo("swiglu")))
    assert [site.slot.norm for site in config.prepare(known).sites] == ["rms", "none", "rms"]


PLACEMENTS = ("post", "deepnorm", "reordered", "keel", "sandwich")


@pytest.mark.parametrize(
    "options",
    [*({"kind": "norm_placement", "placement": each} for each in PLACEMENTS), {"kind": "residual_dual"}],
    ids=lambda options: "-".join(options.values()),
)
def test_a_blend_ends_as_the_placement(options: dict[str, Any]) -> None:
    bare = model_of(DEPTH.parse(options))
    blended = model_of(DEPTH.parse({**options, "blend": "annealed"}), bare)
    assert not same(bare, blended)
    for name, parameter in blended.named_parameters():
        if name.endswith(".blend"):
            parameter.data.fill_(1.0)
    assert same(bare, blended)


def declared(model: Decoder, name: str) -> Any:
    owner, _, parameter = name.rpartition(".mixer.")
    return model.get_submodule(f"{owner}.mixer").declarations[parameter]  # type: ignore[index]


def test_deepnorm_starts_values_outputs_and_feed_forwards_smaller() -> None:
    config = decoder_config(placed("deepnorm"), n_layers=6)
    model, plain, beta = Decoder(config), Decoder(decoder_config(placed("post"), n_layers=6)), (8 * 6) ** -0.25
    attention, wide = "blocks.3.attention", matrix_std(D)
    assert declared(model, f"{attention}.mixer.qkv.weight").init == NormalRows(wide, 8, beta * wide)
    assert declared(model, f"{attention}.mixer.output.weight").init == Normal(beta * matrix_std(8))
    assert declared(model, "blocks.3.swiglu.mixer.gate_up.weight").init == Normal(beta * wide)
    assert declared(model, "blocks.3.swiglu.mixer.down.weight").init == Normal(beta * matrix_std(16))
    found, expected = ({id(p): v for p, v in initial_values(each, 0)} for each in (model, plain))
    qkv, other = (
        values[id(each.get_parameter(f"{attention}.mixer.qkv.weight"))] for each, values in ((model, found), (plain, expected))
    )
    # Queries and keys start as in any model with the same seed; values are 8 of 24 rows.
    assert torch.equal(qkv[:16], other[:16])
    torch.testing.assert_close(qkv[16:], beta * other[16:])


@pytest.mark.parametrize("row", [*SEQUENCE], ids=lambda row: row.kind)
def test_every_output_of_a_sequence_mixer_starts_at_the_scale_of_the_placement(row: Row) -> None:
    sequence = next(one for one in map(row.example, row.examples) if getattr(one, "output_init", "scaled") == "scaled")
    model = Decoder(decoder_config(placed("deepnorm"), blocks=((sequence, FEED_FORWARD),)))
    mixer = sublayer_list(model)[0].mixer
    if isinstance(output := getattr(mixer, "output", None), nn.Linear):
        beta = (4 * len(sublayer_list(model))) ** -0.25
        assert mixer.declarations["output.weight"].init == Normal(beta * matrix_std(output.in_features))


def test_layer_scaling_starts_with_outputs_that_depth_does_not_scale() -> None:
    for config, factor in ((placed("layer_scaling"), 1.0), (placed("sandwich"), 1 / 6**0.5)):
        model = Decoder(decoder_config(config))
        for name, fan_in in (("attention.mixer.output.weight", 8), ("swiglu.mixer.down.weight", 16)):
            assert declared(model, f"blocks.2.{name}").init.std == pytest.approx(factor * matrix_std(fan_in))
    assert placed("layer_scaling").output_init == "plain"
    assert "output_init='plain'" in repr(placed("layer_scaling"))
    with pytest.raises(ConfigError, match="output_init='scaled': must be 'plain' with placement='layer_scaling'"):
        placed("layer_scaling", output_init="scaled")


def test_a_zero_output_stays_zero() -> None:
    blocks = [[{"kind": "attention", "n_heads": 2, "head_dim": 4, "output_init": "zero"}, {"kind": "swiglu", "d_ff": 16}]]
    model = Decoder(decoder_config(placed("deepnorm")).replace(blocks=blocks))
    assert declared(model, "blocks.0.attention.mixer.output.weight").init == Constant(0.0)


REFUSED: dict[str, dict[str, Any]] = {
    "placement='layer_norm_scaling': must be 'pre', 'post', 'sandwich'": {"placement": "layer_norm_scaling"},
    "placement='LNS'": {"placement": "LNS"},
    "post_blocks=1.5: must be a whole number of blocks, or a fraction below 1": {"placement": "mix", "post_blocks": 1.5},
    r"post_blocks=2: must be left out, which placement='post'": {"placement": "post", "post_blocks": 2},
    "layer_eps=0.1: must be left out, which placement='keel'": {"placement": "keel", "layer_eps": 0.1},
    "blend='annealed': must be 'none' with placement='layer_scaling'": {"placement": "layer_scaling", "blend": "annealed"},
    "blend='annealed': must be 'none' with placement='pre'": {"placement": "pre", "blend": "annealed"},
    "output_init='plain': must be left out with placement='deepnorm'": {"placement": "deepnorm", "output_init": "plain"},
    "output_init='plain': must be left out": {"placement": "post", "output_init": "plain", "blend": "annealed"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals(said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NormPlacementConfig.from_data(REFUSED[said])


def test_more_post_blocks_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="post_blocks=4: must be at most the 3 blocks of the model"):
        decoder_config(placed("mix", post_blocks=4))


def test_the_number_of_post_blocks_is_in_the_record_and_not_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POST_NUM", "3")
    monkeypatch.setenv("NORM_TYPE", "pre")
    config = placed("mix", post_blocks=1)
    assert "post_blocks=1" in repr(config) and config.to_data()["post_blocks"] == 1
    assert NormPlacementConfig.from_data(config.to_data()) == config
    assert config.count_post_blocks(LayerStack(D, 1e-6, (2,) * 8)) == 1


@pytest.mark.parametrize("placement", ["layer_scaling", "deepnorm", "keel", "mix"])
def test_a_stage_counts_the_blocks_of_the_whole_model(placement: str) -> None:
    config = decoder_config(placed(placement), n_layers=4)
    options: dict[str, Any] = {"holds_first": False, "holds_last": False, "seed": 0}
    part = build_part(config, [2, 3], **options, device=torch.device("cpu"), dtype=torch.float64)
    whole = sublayer_list(Decoder.build(config).double())[4:]
    for ours, other in zip((one for block in (2, 3) for one in part.blocks[block].sublayers), whole, strict=True):  # type: ignore[union-attr]
        assert ours.depth.form == other.depth.form
        state, update = noise((1, 2, D), "state"), noise((1, 2, D), "update")
        assert torch.equal(ours.normalise(state), other.normalise(state))
        assert torch.equal(ours.depth.write(state, update, state, None), other.depth.write(state, update, state, None))


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "keel"])
def test_norms_of_a_model_are_counted(placement: str) -> None:
    config = decoder_config(placed(placement))
    norms = {"pre": 6, "post": 6, "sandwich": 12, "keel": 11}[placement]
    model = Decoder(config)
    assert sum(name.endswith("gain") for name, _ in model.named_parameters()) == norms + 1
    cost = decoder_cost(config, Shape(1, 1))
    assert cost.params == sum(parameter.numel() for parameter in model.parameters())
    residual = decoder_cost(config.replace(depth="residual"), Shape(1, 1))
    # 4 operations per norm and feature; keel multiplies the stream in 4 sublayers.
    assert cost.elementwise_flops - residual.elementwise_flops == 4 * D * (norms - 6) + (4 * D if placement == "keel" else 0)


@pytest.mark.parametrize("placement", ["layer_scaling", "post", "sandwich", "deepnorm", "keel", "reordered"])
def test_outside_of_a_decoder_the_norm_of_the_host_is_used_as_the_placement_says(placement: str) -> None:
    """The host calls `mixer(x, norm, sublayer)` everywhere, and the mixer leaves the norm out or scales it."""
    config = decoder_config(placed(placement))
    model = toy_decoder(placed(placement))
    axis = DepthAxis(config.depth, d_model=D, n_layers=3, norm_eps=config.norm_eps).double()
    tokens = toy_tokens()
    state = axis.enter(model.embed(tokens))
    for mixer, sublayer in zip((each for block in axis.blocks for each in block), sublayer_list(model), strict=True):
        mixer.load_state_dict(sublayer.depth.state_dict())
        gain = getattr(sublayer.norm, "gain", None)

        def norm(x: Tensor, gain: Any = gain) -> Tensor:
            assert gain is not None, "called where the placement has no norm"
            return nn.functional.rms_norm(x, (D,), gain, config.norm_eps)

        state = mixer(state, norm, lambda context, s=sublayer: s.mixer(context, TokenLayout.contiguous(tokens.shape[1]))[0])
    torch.testing.assert_close(model.norm(axis.leave(state)), model.hidden(model.embed(tokens))[0], rtol=1e-11, atol=1e-12)


def test_one_mixer_alone_knows_its_block() -> None:
    scaled = NormPlacement(d_model=2, n_layers=4, sublayers=2, index=7, placement="layer_scaling")
    x = torch.ones(1, 1, 2)
    assert torch.equal(scaled(x, norm=lambda view: view, sublayer=lambda context: context), 1.5 * x)
    siamese = SiameseNorm(d_model=2, n_layers=4, sublayers=2, index=6, form="hybrid_pre")
    assert siamese.norm_scale is None


def test_a_plan_measures_blocks_that_differ_in_a_factor_once() -> None:
    slot = SublayerInfo("attention", norm_scale=0.5)
    assert slot == replace(slot, norm_scale=0.25) and slot != replace(slot, norm="none")


def test_a_norm_that_a_placement_has_no_use_for_is_not_lost_in_silence() -> None:
    base = Decoder(decoder_config(DEPTH["residual"].example("default")))
    with pytest.raises(ConfigError, match=r"norm\.gain' \(and 5 more\) would be lost"):
        convert(base, target_config(base.config, {"kind": "norm_placement", "placement": "post", "blend": "none"}))
