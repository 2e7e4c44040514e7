import pytest
import torch
from torch.nn import functional as F

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise
from twoaxis.ledger.sublayer import sublayer_cache_bytes
from twoaxis.local import LocalSWAConfig
from twoaxis.sequence import GatedDeltaNetConfig
from twoaxis.sequence.gated_delta_net import GatedDeltaNet
from twoaxis.testing.measured import reachable_tensors, storage_bytes
from twoaxis.testing.toy import TOKENS, toy_context, toy_mixer, toy_site

LAYOUT = TokenLayout.contiguous(TOKENS)


def fresh(**options: object) -> GatedDeltaNet:
    mixer = GatedDeltaNetConfig.from_data(options).build(toy_site()).double()
    initialise(mixer, 0)
    return mixer


def test_published_initial_decay() -> None:
    mixer = fresh(n_heads=64, head_dim=1)
    rate, step = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert rate.min() > 0 and rate.max() <= 16 and len(rate.unique()) == 64
    assert abs(rate.mean() - 8) < 4 * 16 / 12**0.5 / 8
    assert step.min() > 0.0009999 and step.max() < 0.1001
    # The logarithm is uniform over two decades.
    assert abs(step.log10().mean() + 2) < 4 * 2 / 12**0.5 / 8 and step.log10().std() > 0.4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates_stay_between_their_limits_and_follow_the_token(dtype: torch.dtype) -> None:
    mixer = toy_mixer(GatedDeltaNetConfig(n_heads=2), dtype=dtype)
    decay_log, beta = mixer._gates(toy_context().to(dtype))
    assert decay_log.dtype == beta.dtype == torch.float32 and decay_log.shape == beta.shape == (2, 2, TOKENS)
    assert decay_log.max() < 0 and beta.min() > 0 and beta.max() < 1
    assert decay_log.std(dim=-1).min() > 0 and beta.std(dim=-1).min() > 0


def test_a_zero_output_projection_adds_nothing_and_trains() -> None:
    mixer = fresh(n_heads=2, output_init="zero")
    y, _ = mixer(toy_context(), LAYOUT)
    assert not y.any()
    y.sum().backward()
    assert mixer.output.weight.grad is not None and mixer.output.weight.grad.all()


def test_short_swa_stands_in_the_place_of_the_convolution() -> None:
    swa = {"kind": "local_swa", "window": 3, "n_heads": 1, "head_dim": 4}
    mixer = fresh(n_heads=2, projected_local=swa)
    assert isinstance(mixer.config.projected_local, LocalSWAConfig)
    bare = fresh(n_heads=2, projected_local=None)
    silent = fresh(n_heads=2, projected_local={**swa, "output_init": "zero"})
    outputs = [one(toy_context(), LAYOUT)[0] for one in (mixer, bare, silent)]
    # With a zero output projection it gives queries, keys and values back as they are.
    assert torch.equal(outputs[2], outputs[1])
    assert (outputs[0] - outputs[1]).abs().amin(dim=-1).max() > 1e-6
    names = {name for name, _ in mixer.named_parameters()} - {name for name, _ in bare.named_parameters()}
    assert names == {"projected_local.qkv.weight", "projected_local.output.weight"}


def test_local_mixers_at_both_places_see_their_channels() -> None:
    mixer = fresh(n_heads=2, head_dim=3, value_dim=5, input_local="canon")
    assert mixer.input_local is not None and mixer.input_local.weight.shape == (8, 4)
    assert mixer.projected_local is not None and mixer.projected_local.weight.shape == (2 * (3 + 3 + 5), 4)


def test_the_scale_of_queries_and_keys_does_not_matter() -> None:
    config = GatedDeltaNetConfig(n_heads=2, projected_local=None, qk_eps=1e-20)
    mixer = toy_mixer(config)
    y, _ = mixer(toy_context(), LAYOUT)
    with torch.no_grad():
        mixer.qkv.weight[: 2 * 8] *= 100
    torch.testing.assert_close(mixer(toy_context(), LAYOUT)[0], y)
    q, k, _ = mixer._heads(mixer.qkv(toy_context()))
    for x in (q, k):
        torch.testing.assert_close(x.square().sum(-1), torch.ones(2, 2, TOKENS, dtype=x.dtype))


@pytest.mark.parametrize(("dtype", "element_bytes"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_cache_keeps_its_size_and_the_precision_of_its_state(dtype: torch.dtype, element_bytes: int) -> None:
    config = GatedDeltaNetConfig(n_heads=2, head_dim=3, value_dim=5)
    mixer, sizes = toy_mixer(config, dtype=dtype), []
    for tokens in (3, 200):
        with torch.no_grad():
            _, cache = mixer(toy_context(tokens=tokens).to(dtype), TokenLayout.contiguous(tokens), mixer.new_cache())
        assert cache.state.shape == (2, 2, 5, 3) and cache.state.dtype == torch.float32
        sizes.append(storage_bytes(reachable_tensors(cache)))
        assert sizes[-1] == sublayer_cache_bytes(config, toy_site(), Shape(2, tokens, element_bytes))
    assert sizes[0] == sizes[1]


def test_a_state_serves_only_the_document_it_ends_in() -> None:
    mixer = toy_mixer(GatedDeltaNetConfig(n_heads=2))
    x = toy_context(batch=1, tokens=12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    whole, _ = mixer(x, TokenLayout.packed(documents))
    for cut in (4, 5, 6):
        layout = TokenLayout.packed(documents)
        with torch.no_grad():
            first, cache = mixer(x[:, :cut], layout.part(0, cut), mixer.new_cache())
            second, _ = mixer(x[:, cut:], layout.part(cut, 12).after(documents[:, :cut]), cache)
        torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
        alone, _ = mixer(x[:, 5:], TokenLayout.contiguous(7))
        torch.testing.assert_close(torch.cat((first, second), dim=1)[:, 5:], alone)


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="n_heads=3: must be a divisor of d_model=8, or given with a head_dim; set head_dim"):
        GatedDeltaNetConfig(n_heads=3).check(8)
    GatedDeltaNetConfig(n_heads=3, head_dim=5).check(8)
    with pytest.raises(ConfigError, match="projected_local: unknown local mixer 'convolution'"):
        GatedDeltaNetConfig.from_data({"projected_local": "convolution"})


def test_keys_have_length_1_in_half_precision() -> None:
    """One over the root of 12 is no number of bfloat16, so a rounded length would be off by the same in every key."""
    mixer = toy_mixer(GatedDeltaNetConfig(n_heads=4, head_dim=12), dtype=torch.bfloat16)
    channels = torch.randn(8, 64, 4 * 36, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys = mixer._heads(channels)[1].double()
    assert abs(float(keys.square().sum(-1).mean()) - 1) < 5e-4
