"""Our modules in models of other code bases: the examples, and what they rest on. See test_drop_in_llama for transformers."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from twoaxis import DEPTH, ConfigError, Decoder, DecoderConfig, TokenLayout, initialise_parts
from twoaxis.core.parameters import DeclaredModule
from twoaxis.depth import MHC, AttentionResiduals, AttentionResidualsConfig, DeepDelta, DeepDeltaConfig, DepthAxis, MUDDFormer
from twoaxis.sequence import ShortSWA, ShortSWAConfig

from ..scripts import ROOT, load_script

TOKENS = torch.arange(24).view(2, 12) * 7 % 256
MODULES = ["deep_delta", "attention_residuals", "short_swa"]


def ours(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that belong to our modules, by name."""
    parts = [name for name, module in model.named_modules() if isinstance(module, DeclaredModule)]
    return {name: p for name, p in model.named_parameters() if any(name.startswith(f"{part}.") for part in parts)}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script(ROOT / "examples" / "drop_in" / "nanogpt.py")


def build(example: ModuleType, name: str) -> nn.Module:
    torch.manual_seed(0)
    makes = {
        "plain": example.GPT,
        "deep_delta": lambda config: example.GPT(config, example.DeepDeltaBlock),
        "attention_residuals": example.AttentionResidualsGPT,
        "short_swa": lambda config: example.GPT(config, example.ShortSWABlock),
    }
    return makes[name](example.GPTConfig())


@pytest.mark.parametrize(("name", "same"), [("attention_residuals", True), ("short_swa", True), ("deep_delta", False)])
def test_a_trained_gpt_is_unchanged_where_the_method_allows(example: ModuleType, name: str, same: bool) -> None:
    plain, other = build(example, "plain"), build(example, name)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    lost = other.load_state_dict(plain.state_dict(), strict=False)
    assert not lost.unexpected_keys and lost.missing_keys
    difference = (other(TOKENS) - plain(TOKENS)).abs().max().item()
    assert difference < 1e-6 * plain(TOKENS).abs().max().item() if same else difference > 1e-2


@pytest.mark.parametrize("name", MODULES)
def test_it_learns_with_every_new_parameter_and_looks_only_back(example: ModuleType, name: str) -> None:
    model = build(example, name)
    losses = example.train(model, Path(__file__).read_bytes(), steps=4)
    assert losses[-1] < losses[0] - 0.3
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    assert ours(model)
    assert not [name for name, p in ours(model).items() if p.grad is None or not p.grad.any()]
    changed = TOKENS.clone()
    changed[:, 7] += 1
    before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 8], after[:, 8])


def test_our_parts_start_by_their_place_and_yours_are_left_alone() -> None:
    host: Any = nn.ModuleList([nn.Linear(8, 8), *(ShortSWA(ShortSWAConfig(n_heads=2), 8) for _ in range(2))])
    theirs = host[0].weight.clone()
    initialise_parts(host, seed=0)
    first, second = (host[index].qkv.weight.clone() for index in (1, 2))
    assert torch.equal(host[0].weight, theirs) and not torch.equal(first, second)
    initialise_parts(host, seed=0)
    assert torch.equal(host[1].qkv.weight, first)


IN_A_DECODER = {
    *(row.kind for row in DEPTH if row.example(next(iter(row.examples))).design.heads != "none"),
    *("value_embedding", "per_layer_embedding"),
}
"""Mixers that work inside attention or look tokens up."""


@pytest.mark.parametrize("kind", [row.kind for row in DEPTH if row.kind not in IN_A_DECODER])
def test_the_axis_of_another_model_computes_what_our_decoder_does(kind: str) -> None:
    row = next(row for row in DEPTH if row.kind == kind)
    depth = row.example(next(iter(row.examples)))
    sizes = {"vocab_size": 16, "d_model": 16, "n_layers": 4, "blocks": [["attention", "gelu"]]}
    decoder: Any = Decoder.build(DecoderConfig.from_data({**sizes, "depth": depth.to_data()}))
    axis = DepthAxis(depth, 16, 4)
    mixers = [sublayer.depth for block in decoder.blocks for sublayer in block.sublayers]
    for mine, other in zip((*axis.mixers, axis.ends), (*mixers, decoder.ends), strict=True):
        mine.load_state_dict(other.state_dict())
    embeddings, layout = torch.randn(2, 3, 16), TokenLayout.contiguous(3)
    state = axis.enter(embeddings)
    for block, layer in zip(axis.blocks, decoder.blocks, strict=True):
        for mixer, sublayer in zip(block, layer.sublayers, strict=True):
            state = mixer(state, sublayer.normalise, lambda context, f=sublayer.mixer: f(context, layout)[0])
    assert torch.equal(decoder.norm(axis.leave(state)), decoder.hidden(embeddings)[0])


def test_mixers_are_built_from_plain_data_as_in_a_decoder() -> None:
    # Caught: AttributeError of str and dict.
    data = {"kind": "attention_residuals", "block_size": 2}
    for given in (data, AttentionResidualsConfig(block_size=2)):
        axis = DepthAxis(given, 8, 2)
        assert [type(mixer).__name__ for mixer in axis.mixers] == ["AttentionResiduals"] * 4
    assert DeepDelta("deep_delta", 8).config == DeepDelta({}, 8).config == DeepDeltaConfig()
    assert ShortSWA({"window": 2}, 8).config == ShortSWAConfig(window=2)
    for build, message in (
        (lambda: DepthAxis("deep_dleta", 8, 2), "^unknown depth mixer 'deep_dleta'; did you mean 'deep_delta'"),
        (lambda: DepthAxis({"beta": 1}, 8, 2), "^depth mixer={'beta': 1}: must be a table with a 'kind'; choose one of"),
        (lambda: DeepDelta({"betainit": 1}, 8), "^unknown key 'betainit' in 'deep_delta'; did you mean 'beta_init'"),
        (lambda: DeepDelta("short_swa", 8), "^kind='short_swa': must be 'deep_delta'; "),
        (lambda: ShortSWA(2, 8), "^'short_swa'=2: must be a table of keys and values"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=message) as error:
            build()
        assert "\n" not in str(error.value)


def test_a_state_that_skipped_sublayers_is_refused() -> None:
    # Caught: fewer sources were read out as if they were all, or an index was out of range.
    for kind in ("attention_residuals", "muddformer", "denseformer"):
        axis = DepthAxis(kind, 8, 3)

        def run(*blocks: int, axis: DepthAxis = axis) -> torch.Tensor:
            state = axis.enter(torch.randn(1, 2, 8))
            for mixer in (mixer for block in blocks for mixer in axis.blocks[block]):
                state = mixer(state, lambda views: views, lambda context: getattr(context, "q", context))
            return axis.leave(state)

        assert run(0, 1, 2).shape == (1, 2, 8)
        message = r"^tensors of the depth state=\d+: must be \d+ at this position; begin with axis.enter and call every mixer"
        for blocks in ((0, 1), (0, 2)):
            with pytest.raises(ConfigError, match=message):
                run(*blocks)


@pytest.mark.parametrize("make", [AttentionResiduals, MHC, MUDDFormer])
def test_hidden_states_are_no_state_of_a_mixer_that_keeps_more(make: Any) -> None:
    """Catches errors of tuples and shapes deep inside, where a stranger puts such a mixer in the place of one shortcut."""
    row, x = make.config_class().kind, torch.randn(2, 3, 8)
    for mixer in (make(d_model=8), DepthAxis(row, 8, 2).mixers[0]):
        message = f"^state of {make.__name__}='a tensor': must be what `enter` of a DepthAxis returns, .*; make a DepthAxis"
        with pytest.raises(ConfigError, match=message):
            mixer(x, nn.Identity(), nn.Identity())


@pytest.mark.parametrize("writes", ["norm", "sublayer"])
@pytest.mark.parametrize("kind", ["attention_residuals", "depth_attention", "denseformer", "residual"])
def test_a_host_that_writes_into_the_state_is_refused(kind: str, writes: str) -> None:
    axis = DepthAxis(kind, d_model=8, n_layers=2)
    host: dict[str, Any] = {"norm": lambda x: x * 0.5, "sublayer": lambda context: context * 2}
    # A norm of the host hands its sublayer what it has read.
    host |= {"norm": lambda x: x.mul_(0.5)} if writes == "norm" else {"norm": lambda x: x, "sublayer": lambda x: x.add_(1)}
    with torch.no_grad(), pytest.raises(ConfigError, match="state, by norm or sublayer='written in place': must be read only"):
        state = axis.enter(torch.ones(1, 2, 8))
        for mixer in axis.mixers:
            state = mixer(state, **host)


def test_what_only_our_decoder_can_use_is_refused() -> None:
    for kind in sorted(IN_A_DECODER):
        with pytest.raises(ConfigError, match=f"{kind}.*must be used in a Decoder|use it in a Decoder"):
            DepthAxis(DEPTH.parse(kind), 8, 2)
    with pytest.raises(ConfigError, match="takes more than the update of a sublayer: must be used in a Decoder"):
        DepthAxis(AttentionResidualsConfig(key_rank=2), 8, 2)
    sizes = {"vocab_size": 16, "d_model": 8, "n_layers": 2}
    decoder: Any = Decoder.build(DecoderConfig.from_data({**sizes, "depth": "value_residual"}))
    with pytest.raises(ConfigError, match="ValueResidual mixes the heads inside attention: must be used in a Decoder"):
        decoder.blocks[1].attention.depth(torch.ones(1, 1, 8), nn.Identity(), nn.Identity())


def test_short_swa_knows_documents_by_its_layout_and_continues_with_one() -> None:
    module = ShortSWA(ShortSWAConfig(n_heads=2, window=3), 8)
    initialise_parts(module, seed=0)
    x = torch.randn(1, 6, 8)
    whole, _ = module(x)
    packed, _ = module(x, TokenLayout.packed(torch.tensor([[0, 0, 0, 1, 1, 1]])))
    assert torch.equal(packed[:, :3], whole[:, :3]) and not torch.allclose(packed[:, 3:], whole[:, 3:])
    torch.testing.assert_close(packed[:, 3:], module(x[:, 3:])[0])
    first, cache = module(x[:, :4], TokenLayout.contiguous(4), module.new_cache())
    second, _ = module(x[:, 4:], TokenLayout.contiguous(2, start=4), cache)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
    with pytest.raises(ConfigError, match="layout=None: must be given with a cache"):
        module(x, cache=module.new_cache())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"d_model": 0}, r"^d_model=0: must be a whole number >= 1; correct it$"),
        ({"d_model": 8.0}, r"^d_model=8.0: must be a whole number >= 1; correct it$"),
        ({"n_layers": 0}, r"^n_layers=0: must be a whole number >= 1; correct it$"),
        ({"sublayers": 0}, r"^sublayers=0: must be a whole number >= 1; correct it$"),
        ({"norm_eps": -1.0}, r"^norm_eps=-1.0: must be a finite number > 0; leave it out for 1e-6$"),
    ],
)
def test_sizes_of_an_axis_are_checked(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DepthAxis("attention_residuals", **{"d_model": 8, "n_layers": 2, **sizes})
