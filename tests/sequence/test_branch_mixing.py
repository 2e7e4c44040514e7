"""Local mixing of the branches of Gated DeltaNet: convolution, ShortSWA with projections, and ShortSWA without."""

from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.cost import Shape, chunk_pairs, visible_pairs
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.ledger.sublayer import sublayer_cache_bytes
from twoaxis.local import BranchSWAConfig, LocalSWAConfig
from twoaxis.sequence import AttentionConfig, GatedDeltaNetConfig
from twoaxis.testing import sequence_checks
from twoaxis.testing.decoding import decode_mixer
from twoaxis.testing.measured import gradients
from twoaxis.testing.sharded import ON_TWO_RANKS
from twoaxis.testing.toy import TOKENS, noise, toy_context, toy_cost, toy_mixer, toy_site

LAYOUT = TokenLayout.contiguous(TOKENS)
SIZES = {"n_heads": 2, "head_dim": 2, "value_dim": 3}
OWN = {"kind": "local_swa", "n_heads": 1, "head_dim": 4}
FORMS: dict[str, dict[str, Any]] = {
    "conv": {"projected_local": {"kind": "canon", "form": "plain", "activation": "silu"}},
    "own, joint": {"projected_local": OWN},
    "own, apart": {"projected_local": OWN, "projected_over": "branch"},
    "shared": {"projected_local": {"kind": "branch_swa", "scores": "shared"}},
    "self": {"projected_local": {"kind": "branch_swa", "scores": "self"}},
}
WINDOWED = [name for name in FORMS if name != "conv"]
# A convolution has no kind of window.
KINDS = [("conv", "sliding"), *((form, kind) for form in WINDOWED for kind in ("sliding", "chunk"))]


def config(form: str, /, **options: Any) -> GatedDeltaNetConfig:
    """The layer with a branch mixer of this form, and these options of it."""
    local = {**FORMS[form]["projected_local"], **options}
    return GatedDeltaNetConfig.from_data({**SIZES, **FORMS[form], "projected_local": local})


def without_local() -> Any:
    return toy_mixer(GatedDeltaNetConfig.from_data({**SIZES, "projected_local": None}))


def alike(mixer: Any, other: Any) -> Any:
    """Gives the parameters that both have to the first."""
    mixer.load_state_dict({**mixer.state_dict(), **other.state_dict()})
    return mixer


def output(mixer: Any, layout: TokenLayout = LAYOUT, x: Tensor | None = None) -> Tensor:
    return mixer(toy_context() if x is None else x, layout)[0]


@pytest.mark.parametrize("window_kind", ["sliding", "chunk"])
@pytest.mark.parametrize("form", ["shared", "self"])
def test_a_window_of_one_token_is_no_local_mixer(form: str, window_kind: str) -> None:
    bare = without_local()
    mixer = alike(toy_mixer(config(form, window=1, window_kind=window_kind, form="plain", activation="none")), bare)
    torch.testing.assert_close(output(mixer), output(bare), rtol=0, atol=1e-14)


def test_a_window_of_one_token_with_projections_is_that_of_values() -> None:
    mixer = toy_mixer(LocalSWAConfig(window=1, n_heads=2, n_kv_heads=2, head_dim=4, form="plain"))
    x = noise((2, TOKENS, 8), "channels")
    expected = x @ mixer.qkv.weight[-8:].T @ mixer.output.weight.T
    torch.testing.assert_close(output(mixer, x=x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("form", WINDOWED)
def test_a_window_over_all_tokens_is_the_same_for_both_kinds(form: str) -> None:
    outputs = [output(toy_mixer(config(form, window=w, window_kind=k))) for w in (9, 30) for k in ("sliding", "chunk")]
    for one in outputs[1:]:
        torch.testing.assert_close(one, outputs[0], rtol=0, atol=1e-13)
    assert not torch.allclose(output(toy_mixer(config(form, window=3))), outputs[0], atol=1e-3)


def test_shared_scores_over_all_tokens_are_attention_with_the_queries_and_keys_of_the_layer() -> None:
    parts = ((2, 4), (2, 4), (2, 3))
    mixer = BranchSWAConfig(window=30, scores="shared", form="plain", activation="none", parts=parts).build(22, toy_site())
    x = noise((2, TOKENS, 22), "channels")
    attention = toy_mixer(AttentionConfig(n_heads=2), d_model=8)
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in x.split([8, 8, 6], dim=-1))
    turned_q, turned_k = (attention._rotate(y.transpose(1, 2), LAYOUT).transpose(1, 2) for y in (q, k))
    mixed = [
        torch.nn.functional.scaled_dot_product_attention(turned_q, turned_k, u, is_causal=True).transpose(1, 2).flatten(2)
        for u in (q, k, v)
    ]
    torch.testing.assert_close(output(mixer, x=x), torch.cat(mixed, dim=-1))


SILENT = [(form, {"output_init": "zero"}) for form in WINDOWED[:2]] + [(form, {}) for form in WINDOWED[2:]]


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(("form", "options"), SILENT)
def test_a_fresh_mixer_changes_nothing_and_trains(form: str, options: dict[str, Any], activation: str) -> None:
    # What is left of it is the activation: that of a convolution whose only tap is the current token.
    identity = {"kind": "canon", "form": "plain", "taps_init": "identity", "activation": activation}
    bare = toy_mixer(GatedDeltaNetConfig.from_data({**SIZES, "projected_local": identity}))
    with torch.no_grad():
        bare.projected_local.weight.copy_(torch.eye(4)[-1].expand(14, 4))
    mixer = config(form, activation=activation, window=3, **options).build(toy_site()).double()
    shared = {name: value for name, value in bare.state_dict().items() if "local" not in name}
    mixer.load_state_dict({**mixer.state_dict(), **shared})
    torch.testing.assert_close(output(mixer), output(bare), rtol=0, atol=1e-14)
    weights = noise((2, TOKENS, 8), "loss")
    found, expected = (gradients(one, (output(one) * weights).sum()) for one in (mixer, bare))
    for name in shared:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-13)
    own = [gradient for name, gradient in found.items() if name.endswith(("gamma", "output.weight")) and "local" in name]
    assert own and all((gradient != 0).all() for gradient in own)


@pytest.mark.parametrize(("form", "window_kind"), KINDS)
@pytest.mark.parametrize("chunks", [(1,) * 17, (3,) * 6, (4,) * 5, (5,) * 4, (6,) * 3, (2, 1, 7, 1, 6)], ids=str)
def test_any_chunks_are_one_pass(form: str, window_kind: str, chunks: tuple[int, ...]) -> None:
    options = {} if form == "conv" else {"window": 5, "window_kind": window_kind}
    mixer, x = toy_mixer(config(form, **options)), toy_context(tokens=17)
    full = output(mixer, TokenLayout.contiguous(17), x)
    with torch.no_grad():
        torch.testing.assert_close(decode_mixer(mixer, x, chunks), full, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("form", "window_kind"), KINDS)
def test_documents_begin_anew_with_convolution_window_and_state(form: str, window_kind: str) -> None:
    options = {} if form == "conv" else {"window": 4, "window_kind": window_kind}
    mixer, x = toy_mixer(config(form, **options)), toy_context(batch=1, tokens=13)
    documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 4])
    layout = TokenLayout.packed(documents)
    whole = output(mixer, layout, x)
    for start, stop in ((0, 3), (3, 9), (9, 13)):
        alone = output(mixer, TokenLayout.contiguous(stop - start), x[:, start:stop])
        torch.testing.assert_close(whole[:, start:stop], alone, rtol=0, atol=1e-13)
    for cut in (2, 3, 5, 8, 11):
        with torch.no_grad():
            first, cache = mixer(x[:, :cut], layout.part(0, cut), mixer.new_cache())
            second, _ = mixer(x[:, cut:], layout.part(cut, 13).after(documents[:, :cut]), cache)
        torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", WINDOWED)
def test_chunks_begin_at_absolute_positions(form: str) -> None:
    mixer = toy_mixer(config(form, window=4, window_kind="chunk"))
    x = toy_context()
    base, moved, whole_chunks = (output(mixer, TokenLayout.contiguous(TOKENS, start)) for start in (0, 1, 8))
    assert not torch.allclose(moved, base, atol=1e-4)
    torch.testing.assert_close(whole_chunks, base, rtol=0, atol=1e-12)
    local = mixer.projected_local
    channels = mixer.qkv(x).detach()
    base = local(channels, LAYOUT)[0]
    for source in range(TOKENS):
        changed = channels.clone()
        changed[:, source] += 1.0
        seen = (local(changed, LAYOUT)[0] != base).any(-1).any(0)
        assert seen.tolist() == [source <= t and source // 4 == t // 4 for t in range(TOKENS)]


CHUNK_CHECKS = [
    pytest.param(form, check, id=f"{form}-{check.name}")
    for index, form in enumerate(WINDOWED)
    for number, check in enumerate(sequence_checks())
    if check not in ON_TWO_RANKS and not check.slow and check.name != "position_offset_invariance" and (index + number) % 4 == 1
]


@pytest.mark.parametrize(("form", "check"), CHUNK_CHECKS)
def test_chunks_pass_every_check_but_that_of_the_offset(form: str, check: Any) -> None:
    """Absolute positions are what a chunk is made of, so it stands in no table; each form takes every fourth check."""
    check.run(config(form, window=4, window_kind="chunk"))


@pytest.mark.parametrize("window_kind", ["sliding", "chunk"])
@pytest.mark.parametrize("window", [1, 3, 8, 128])
def test_costs_are_those_of_visible_pairs(window: int, window_kind: str) -> None:
    H, K, V, tokens = 2, 4, 6, 50
    layout = TokenLayout.contiguous(tokens)
    queries, keys = layout.chunk_documents(window, tokens)
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = (age >= 0) & (age < window)
    pairs = int((seen & (queries[0, :, None] == keys[0, None, :])).sum()) if window_kind == "chunk" else int(seen.sum())
    count = chunk_pairs if window_kind == "chunk" else visible_pairs
    assert count(tokens, window) == pairs
    bare = toy_cost(GatedDeltaNetConfig(n_heads=H, head_dim=K, value_dim=V, projected_local=None), Shape(3, tokens))
    for form, pair, params in (("shared", 2 * H * (3 * K + V), 0), ("self", 4 * H * (2 * K + V), 0), ("own, joint", 16, 0)):
        local = {**FORMS[form]["projected_local"], "window": window, "window_kind": window_kind}
        if "own" not in form:
            local["form"] = "plain"
        else:
            params = 2 * H * (2 * K + V) * (1 + 1) * 4
        cost = toy_cost(
            GatedDeltaNetConfig.from_data({"n_heads": H, "head_dim": K, "value_dim": V, "projected_local": local}),
            Shape(3, tokens),
        )
        assert cost.pair_flops - bare.pair_flops == 3 * pair * pairs, form
        assert cost.params - bare.params == params, form


def test_the_share_of_shared_scores_is_five_eighths_of_window_over_width() -> None:
    """Of the FLOPs of the projections, with values twice as wide as keys: 3.9 % at a width of 2048 and a window of 128."""
    local = {"kind": "branch_swa", "scores": "shared", "form": "plain", "window": 128}
    layer = GatedDeltaNetConfig.from_data({"n_heads": 16, "projected_local": local})
    shape, tokens = Shape(1, 4096), 4096
    cost = layer.local_cost(toy_site(2048), shape)
    K, V = 128, 256
    projections = tokens * 2 * 2048 * 16 * (2 * K + 3 * V)
    mean = visible_pairs(tokens, 128) / tokens
    assert cost.pair_flops / projections == pytest.approx(0.625 * mean / 2048, rel=1e-12)
    assert cost.pair_flops / projections == pytest.approx(0.0385, abs=2e-4)


@pytest.mark.parametrize(
    ("form", "numbers"),
    [("conv", 3 * 14), ("own, joint", 2 * 4 * 3), ("own, apart", 3 * 2 * 4 * 3), ("shared", 3 * 14), ("self", 3 * 14)],
)
def test_the_cache_holds_the_state_and_the_last_tokens_of_what_scores_need(form: str, numbers: int) -> None:
    options = {} if form == "conv" else {"window": 4}
    for tokens in (3, 50):
        held = sublayer_cache_bytes(config(form, **options), toy_site(), Shape(2, tokens, element_bytes=8))
        assert held == 2 * 8 * (2 * 2 * 3 + numbers)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    shared = {"kind": "branch_swa", "scores": "shared"}
    with pytest.raises(ConfigError, match="head_dim=3: must be an even number for queries and keys, since RoPE turns pairs"):
        GatedDeltaNetConfig.from_data({**SIZES, "head_dim": 3, "projected_local": shared}).check(8)
    with pytest.raises(ConfigError, match=r"scores='shared' with heads \(4, 2, 2\): must be 'self' here, since a head needs"):
        AttentionConfig.from_data({"n_heads": 4, "n_kv_heads": 2, "projected_local": shared})
    with pytest.raises(ConfigError, match="scores='shared' with no queries, keys and values: must be 'self' here"):
        AttentionConfig.from_data({"n_heads": 4, "input_local": shared})
    with pytest.raises(ConfigError, match=r"parts=\(\(1, 4\),\): must be 8 channels, not 4; leave them out"):
        BranchSWAConfig(parts=((1, 4),)).build(8, toy_site())
    with pytest.raises(ConfigError, match=r"parts=\(\(0, 4\),\): must be pairs of heads and width >= 1; leave them out"):
        BranchSWAConfig(parts=((0, 4),))
    with pytest.raises(
        ConfigError, match="projected_over='branch' with branch_swa, which keeps branches apart: must be 'joint'"
    ):
        GatedDeltaNetConfig.from_data({"projected_local": "branch_swa", "projected_over": "branch"})
    with pytest.raises(ConfigError, match="projected_over='branch' without projected_local: must be 'joint'; leave it out"):
        GatedDeltaNetConfig.from_data({"projected_local": None, "projected_over": "branch"})
