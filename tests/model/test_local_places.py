"""Local mixers at their places: what they see, what they carry from call to call, and what cannot be built."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import FEED_FORWARD, LOCAL, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import perturb, saved_bytes
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.ledger.decoder_memory import decoder_cache_bytes, decoder_saved_bytes, recomputing_saved_bytes
from twoaxis.ledger.meter import held_bytes
from twoaxis.local import CanonConfig, DynamicConvConfig, LocalConfig, SmearConfig, TokenShiftConfig
from twoaxis.model.cache import join_rows, keep_rows
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision
from twoaxis.sequence import AttentionConfig, GatedShortConvConfig
from twoaxis.testing.causality import receptive_field_is_exact
from twoaxis.testing.toy import D_MODEL, toy_context, toy_mixer, toy_site, toy_tokens

SMEAR = SmearConfig(gate_channels=4)
MIXERS = [SMEAR, SmearConfig(form="channel"), TokenShiftConfig(), DynamicConvConfig(rank=2), GatedShortConvConfig(kernel=7)]
INKLING: dict[str, Any] = {
    "kind": "attention",
    "n_heads": 2,
    "qk_norm": "after_local",
    "projected_local": {"kind": "dynamic_conv", "taps": "per_head", "head_dim": 4, "scale": "unit_variance"},
    "projected_branches": ["k", "v"],
    "update_local": {"kind": "canon", "scale": "unit_variance"},
}


def decoder(**changes: Any) -> Decoder:
    """A small decoder away from its start."""
    data = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "embedding_norm": "rms", "blocks": [[INKLING, "swiglu"]], **changes}
    return perturb(Decoder.build(DecoderConfig.from_data(data)).double())


def in_chunks(mixer: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """The output from a cache, and how many tokens the cache holds behind each chunk."""
    cache, parts, held, start = mixer.new_cache(), [], [], 0
    for part in x.split(sizes, dim=1):
        made, cache = mixer(part, TokenLayout.contiguous(part.shape[1], start=start), cache)
        parts.append(made)
        held.append(cache.length)
        start += part.shape[1]
    return torch.cat(parts, dim=1), held


@pytest.mark.parametrize("config", MIXERS, ids=lambda config: config.kind)
@torch.no_grad()
def test_a_second_chunk_of_several_tokens_sees_the_token_before_it(config: Any) -> None:
    """Caches that look at the length of a chunk, not at their history, lose it there."""
    mixer, x = toy_mixer(config), toy_context(tokens=11)
    whole, _ = mixer(x, TokenLayout.contiguous(11))
    for sizes in ((3, 8), (3, 1, 7), (10, 1), (1,) * 11):
        torch.testing.assert_close(in_chunks(mixer, x, sizes)[0], whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("config", MIXERS, ids=lambda config: config.kind)
@torch.no_grad()
def test_a_cache_holds_one_token_less_than_is_seen(config: Any) -> None:
    """Transformers holds as many as there are taps."""
    _, held = in_chunks(toy_mixer(config), toy_context(tokens=12), (1, 1, 7, 3))
    field = config.receptive_field
    assert held == [min(tokens, field - 1) for tokens in (1, 2, 9, 12)]


@torch.no_grad()
def test_the_first_token_of_each_packed_document_has_none_before_it() -> None:
    x, layout = toy_context(tokens=9), TokenLayout.packed(torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, 3]]).expand(2, -1))
    starts = [0, 3, 5, 6]
    first = x[:, starts]
    shift, smear, channel = (toy_mixer(config) for config in (TokenShiftConfig(), SMEAR, SmearConfig(form="channel")))
    torch.testing.assert_close(shift(x, layout)[0][:, starts], (1 - shift.mu) * first)
    assert torch.equal(smear(x, layout)[0][:, starts], first)
    torch.testing.assert_close(channel(x, layout)[0][:, starts], (1 - torch.sigmoid(channel.share)) * first)
    dynamic = toy_mixer(DynamicConvConfig(rank=2, form="plain"))
    taps = (first @ dynamic.factors.weight.T) @ dynamic.up[0] + dynamic.static[0]
    torch.testing.assert_close(dynamic(x, layout)[0][:, starts], taps * first)


@torch.no_grad()
def test_the_first_tap_is_that_of_the_current_token_and_the_last_one_of_canon() -> None:
    """Static taps carried from one to the other are turned round."""
    dynamic, canon = toy_mixer(DynamicConvConfig(rank=1, kernel=3)), toy_mixer(CanonConfig(kernel=3))
    dynamic.up.zero_()
    dynamic.static.copy_(canon.weight.T.flip(0))
    layout = TokenLayout.contiguous(9)
    torch.testing.assert_close(dynamic(toy_context(), layout)[0], canon(toy_context(), layout)[0])
    dynamic.static.zero_()
    dynamic.static[1] = 1.0
    y, _ = dynamic(toy_context(), layout)
    assert torch.equal(y[:, 1:], toy_context()[:, 1:] + toy_context()[:, :-1])


@torch.no_grad()
def test_keys_are_normalised_behind_their_convolution() -> None:
    """So a scale of the convolution changes no score; with the norm before it, it does."""
    same, other = [], []
    for scale in ("none", "unit_variance"):
        canon = {"kind": "canon", "scale": scale}
        for order, found in (("after_local", same), ("before_rope", other)):
            data = {"n_heads": 2, "qk_norm": order, "projected_local": canon, "projected_branches": ["k"]}
            mixer = toy_mixer(AttentionConfig.from_data(data))
            mixer.norm_eps = 1e-30
            found.append(mixer(toy_context(), TokenLayout.contiguous(9))[0])
    torch.testing.assert_close(*same)
    assert (other[0] - other[1]).abs().max() > 1e-3


@torch.no_grad()
def test_branches_that_are_not_named_are_left_alone() -> None:
    for chosen in (["q"], ["k"], ["v"], ["q", "v"], ["k", "v"]):
        data = {"n_heads": 4, "n_kv_heads": 2, "projected_local": "token_shift", "projected_branches": chosen}
        config = AttentionConfig.from_data(data)
        mixer, heads = toy_mixer(config), toy_mixer(config).project(toy_context(), TokenLayout.contiguous(9))[0]
        whole = torch.cat(heads[:3], dim=2)
        q_k, v, _ = mixer._mix_projected(whole, toy_context(), TokenLayout.contiguous(9), None)
        made = dict(zip("qkv", (*q_k.split((4, 2), dim=2), v), strict=True))
        assert [name for name, one in made.items() if not torch.equal(one, getattr(heads, name))] == chosen


@torch.no_grad()
def test_heads_in_two_steps_are_one_pass() -> None:
    mixer, layout, x = toy_mixer(AttentionConfig.from_data(INKLING)), TokenLayout.contiguous(9), toy_context()
    heads, _ = mixer.project(x, layout)
    assert torch.equal(mixer.attend(heads, layout, None, x)[0], mixer(x, layout)[0])


@torch.no_grad()
def test_a_depth_mixer_that_mixes_heads_leaves_the_context_to_the_taps() -> None:
    model, tokens = decoder(depth={"kind": "value_residual", "variant": "gated"}), toy_tokens()
    whole = model(tokens)
    first, cache = model(tokens[:, :5], cache=model.new_cache())
    second, _ = model(tokens[:, 5:], cache=cache)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)


def test_separate_views_are_no_context_of_taps() -> None:
    with pytest.raises(ConfigError, match="or options with one view"):
        decoder(depth="muddformer")
    without = {name: value for name, value in INKLING.items() if "local" not in name and "branches" not in name}
    blocks = [[{**without, "qk_norm": "before_rope", "update_local": "canon"}, "swiglu"]]
    assert decoder(depth="muddformer", blocks=blocks)(toy_tokens()).isfinite().all()


def test_a_block_sees_what_its_mixers_see_one_behind_the_other() -> None:
    """A convolution of k tokens, a window of w and a convolution of the update: w + 2 (k - 1)."""
    config = AttentionConfig.from_data({**INKLING, "window": 3})
    assert config.receptive_field == 3 + 2 * 3
    receptive_field_is_exact.run(config)


@torch.no_grad()
def test_a_mixer_behind_the_embedding_comes_before_everything_else() -> None:
    """Also before what depth mixers keep of the embedding; its own input is the normalised embedding."""
    model, layout = decoder(depth="residual_scalars", embedding_local=SMEAR), TokenLayout.contiguous(9)
    plain = decoder(depth="residual_scalars")
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "embedding_local" not in name})
    assert model.embedding_local is not None
    mixed, _ = model.embedding_local(model.embed(toy_tokens()), layout)
    assert torch.equal(model.hidden(model.embed(toy_tokens()))[0], plain.hidden(mixed)[0])


@pytest.mark.parametrize("row", list(LOCAL), ids=lambda row: row.kind)
@torch.no_grad()
def test_a_cache_behind_the_embedding_goes_with_its_rows(row: Any) -> None:
    model, tokens = decoder(embedding_local=row.example(next(iter(row.examples)))), toy_tokens(batch=3, tokens=12)
    whole, caches = model(tokens), []
    for index, length in enumerate((4, 1, 7)):
        caches.append(model(tokens[index : index + 1, :length], cache=model.new_cache())[1])
    cache = keep_rows(join_rows(caches), torch.tensor([2, 0]))
    for step in range(3):
        given = torch.stack((tokens[2, 7 + step], tokens[0, 4 + step])).unsqueeze(1)
        logits, cache = model(given, cache=cache)
        torch.testing.assert_close(logits[:, 0], torch.stack((whole[2, 7 + step], whole[0, 4 + step])))


@pytest.mark.parametrize("local", [SMEAR, TokenShiftConfig(), DynamicConvConfig(rank=3), CanonConfig()], ids=lambda c: c.kind)
def test_a_mixer_behind_the_embedding_costs_what_is_declared(local: LocalConfig) -> None:
    model, tokens, shape = decoder(embedding_local=local), toy_tokens(), Shape(2, 9, element_bytes=8)
    config, plain = model.config, model.config.replace(embedding_local=None)
    own = local.cost(D_MODEL, toy_site(), shape)
    assert decoder_cost(config, shape) == decoder_cost(plain, shape) + own
    assert decoder_cost(config, shape).params == sum(parameter.numel() for parameter in model.parameters())

    def measured(recompute: bool) -> int:
        run = lambda: model.loss(tokens, tokens.roll(-1, 1), recompute=recompute)[0]  # noqa: E731
        return saved_bytes(run, lambda loss: [*model.parameters(), loss, tokens, tokens.roll(-1, 1)])

    assert measured(False) == decoder_saved_bytes(config, shape)
    assert recomputing_saved_bytes(config, shape) > recomputing_saved_bytes(plain, shape)
    _, cache = model(tokens, cache=model.new_cache())
    assert held_bytes((cache.sublayers, cache.ends, cache.embedding)) == decoder_cache_bytes(config, shape)
    planned, without = (coefficients(ModelShape.of_decoder(one))["ends"] for one in (config, plain))
    assert planned["params"] - without["params"] == own.params
    assert planned["matmul"] - without["matmul"] == local.cost(D_MODEL, toy_site(), Shape(1, 1)).matmul_flops
    assert planned["cache_fixed"] - without["cache_fixed"] == Precision().cache * D_MODEL * (local.receptive_field - 1)


def test_shares_start_by_depth() -> None:
    """1 - (c/C)^(p (1 - l/L)): of the last block more of the token itself, of the first channel nothing."""
    sites = LayerStack(4, 1e-6, (2, 2)).sites
    first, last = (TokenShiftConfig(power=0.5).build(4, site).mu for site in (sites[0], sites[3]))
    for mu, exponent in ((first, 0.5), (last, 0.25)):
        torch.testing.assert_close(mu.detach(), 1 - (torch.arange(4) / 4) ** exponent)


@torch.no_grad()
def test_what_a_sublayer_emits_for_the_depth_mixer_alone_is_not_mixed() -> None:
    slots = (SublayerInfo("attention", update_extra=3),)
    site = LayerStack(8, 1e-6, (1,), slots).sites[0]
    for data in (INKLING, {"kind": "swiglu", "update_local": "canon"}, {"kind": "gated_delta_net", "update_local": "canon"}):
        table = FEED_FORWARD if data["kind"] == "swiglu" else SEQUENCE
        mixed, bare = (table.parse(one).build(site) for one in (data, {**data, "update_local": None}))
        mixed, bare = mixed.double(), bare.double()
        bare.load_state_dict({name: p for name, p in mixed.state_dict().items() if not name.startswith("update_local")})
        layout = TokenLayout.contiguous(9)
        expected, got = bare(toy_context(), layout)[0], mixed(toy_context(), layout)[0]
        assert torch.equal(got[..., 8:], expected[..., 8:])
        assert torch.equal(got[..., :8], mixed.get_submodule("update_local")(expected[..., :8], layout, None, toy_context())[0])


REFUSED = [
    ({"projected_branches": ["k"]}, "projected_branches=.*: must be left out without projected_local; remove it"),
    (
        {"projected_local": "canon", "projected_branches": ["v", "k"]},
        r"projected_branches=\['v', 'k'\]: must be some of q, k and v, in this order",
    ),
    ({"projected_local": "canon", "projected_branches": []}, r"projected_branches=\[\]: must be some of q, k and v"),
    ({"qk_norm": "after_local"}, "qk_norm='after_local': must be none, before_rope or after_rope; use before_rope"),
    (
        {"projected_local": {"kind": "dynamic_conv", "taps": "per_head", "head_dim": 5}},
        "head_dim=5: must be a divisor of the 24 channels of its place",
    ),
    ({"update_local": {"kind": "smear"}}, "gate_channels=24: must be at most the 8 channels of its place; lower it"),
    ({"input_local": {"kind": "dynamic_conv", "head_dim": 4}}, "head_dim=4: must be left out with taps='low_rank'"),
    ({"input_local": {"kind": "smear", "form": "channel", "gate_channels": 4}}, "gate_channels=4: must be left out with form="),
    (
        {"input_local": {"kind": "canon", "scale": "unit_variance", "form": "plain"}},
        "scale='unit_variance': must be left out unless form='residual'",
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_cannot_be_built_is_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        decoder(blocks=[[{"kind": "attention", "n_heads": 2, **options}, "swiglu"]])
    assert "\n" not in str(caught.value)


def test_a_mixer_behind_the_embedding_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="gate_channels=24: must be at most the 8 channels"):
        decoder(embedding_local="smear")
