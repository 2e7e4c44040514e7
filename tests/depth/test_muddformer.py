import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis import ConfigError, Decoder, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.core.views import QKV
from twoaxis.depth import MUDDFormerConfig, ResidualConfig
from twoaxis.depth.base import StreamEnds
from twoaxis.depth.residual import Residual
from twoaxis.depth.token_sums import BlockOutputs
from twoaxis.ledger.stack import trace_stack
from twoaxis.model.cost import decoder_cost
from twoaxis.testing.measured import trace
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD, decoder_config, toy_decoder, toy_tokens

COMBINATIONS = [
    {"ways": ways, "weights": weights, "source_norm": source_norm, "post_norm": post_norm, **sparsity}
    for ways, weights, source_norm, post_norm, sparsity in itertools.product(
        ("qkvr", "single"),
        ("dynamic", "static"),
        ("none", "rms"),
        ("none", "all", "residual"),
        ({}, {"dilation": 2, "period": 2}, {"window": 1}),
    )
    if (source_norm, post_norm) != ("rms", "none")
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_is_the_residual_at_first(options: dict[str, Any]) -> None:
    """Bit for bit with one view; separate ones are projected one by one, which some processors round otherwise."""
    for dtype, n_layers in ((torch.float32, 3), (torch.bfloat16, 4), (torch.float32, 1)):
        found, expected = fresh_logits(MUDDFormerConfig(**options), dtype, n_layers), residual_logits(dtype, n_layers)
        if options["ways"] == "single":
            assert torch.equal(found, expected)
        rounding = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


def fresh_logits(config: MUDDFormerConfig | ResidualConfig, dtype: torch.dtype, n_layers: int) -> Tensor:
    return Decoder.build(decoder_config(config, n_layers=n_layers)).to(dtype)(toy_tokens()).detach()


@functools.cache
def residual_logits(dtype: torch.dtype, n_layers: int) -> Tensor:
    return fresh_logits(ResidualConfig(), dtype, n_layers)


class Parallel(ResidualConfig):
    """A plain stream to which both sublayers of a block add what they make of its input."""

    def build(self, stack: Any) -> Any:
        return [_Parallel() for _ in stack.sites], StreamEnds()


class _Parallel(Residual):
    def read(self, state: Any, layout: Any = None, cache: Any = None) -> Any:
        return state if isinstance(state, Tensor) else state[0], None, cache

    def write(self, state: Any, update: Tensor, context: Any, carry: Any) -> Any:
        return (state, update) if isinstance(state, Tensor) else state[0] + state[1] + update


@pytest.mark.parametrize(
    "options", [{}, {"source_norm": "rms", "post_norm": "all"}, {"period": 2}, {"ways": "single", "window": 1}], ids=str
)
def test_is_the_parallel_residual_at_first(options: dict[str, Any]) -> None:
    ours, plain = (
        Decoder.build(decoder_config(config)).double()
        for config in (MUDDFormerConfig(residual="parallel", **options), Parallel())
    )
    torch.testing.assert_close(ours(toy_tokens()), plain(toy_tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ({"window": 3}, {}),
        ({"window": 99}, {}),
        ({"dilation": 1, "period": 1}, {}),
        ({"window": 3, "source_norm": "rms", "post_norm": "all"}, {"source_norm": "rms", "post_norm": "all"}),
    ],
    ids=str,
)
def test_a_window_of_all_blocks_reads_them_all(options: dict[str, Any], full: dict[str, Any]) -> None:
    models = [toy_decoder(MUDDFormerConfig(**given)) for given in (options, full)]
    models[0].load_state_dict(models[1].state_dict())
    assert torch.equal(models[0](toy_tokens()), models[1](toy_tokens()))


@given(L=st.integers(1, 13), k=st.integers(1, 5), p=st.integers(1, 5))
def test_sums_are_what_the_rule_says(L: int, k: int, p: int) -> None:
    expected = {i: tuple(j for j in range(i + 1) if (i - j) % k == 0) for i in range(1, L + 1) if i % p == 0}
    assert MUDDFormerConfig(dilation=k, period=p).sums(L) == expected


@given(L=st.integers(1, 13), n=st.integers(1, 15))
def test_a_window_reads_the_newest_outputs_and_the_embedding(L: int, n: int) -> None:
    found = MUDDFormerConfig(window=n).sums(L)
    assert found == {i: tuple(sorted({0, *range(max(0, i - n + 1), i + 1)})) for i in range(1, L + 1)}


@pytest.mark.parametrize("options", [{}, {"source_norm": "rms"}, {"residual": "parallel"}], ids=str)
def test_sources_are_pairwise_distinct(options: dict[str, Any]) -> None:
    model = toy_decoder(MUDDFormerConfig(**options), n_layers=5)
    for state in trace(model, toy_tokens()).states:
        assert isinstance(state, BlockOutputs)
        held = [*state.sources] if options.get("residual") == "parallel" else [*state.sources, state.stream]
        for a, b in itertools.combinations(held, 2):
            assert a.data_ptr() != b.data_ptr() and not torch.allclose(a, b)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        # Before each sublayer of four blocks of two, and at the end.
        ({}, [1, 2, 2, 3, 3, 4, 4, 5, 5]),
        ({"window": 1}, [1, 2, 2, 2, 2, 2, 2, 2, 2]),
        ({"period": 2}, [1, 2, 2, 3, 3, 4, 4, 5, 5]),
        ({"period": 5}, [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"dilation": 2}, [1, 2, 2, 3, 3, 4, 4, 3, 3]),
        ({"residual": "parallel"}, [1, 2, 2, 4, 3, 5, 4, 6, 5]),
        ({"residual": "parallel", "source_norm": "rms"}, [1, 3, 2, 4, 3, 5, 4, 6, 5]),
    ],
    ids=str,
)
def test_the_state_holds_only_what_is_read_again(options: dict[str, Any], held: list[int]) -> None:
    config = MUDDFormerConfig(**options)
    stack = LayerStack(1, 1e-6, (2,) * 4)
    found = trace_stack(config, stack, Shape(1, 1))
    assert [found.state_elements(index) for index in range(9)] == held


def test_biases_start_from_the_post_norm_alone() -> None:
    for source_norm, post_norm in itertools.product(("none", "rms"), ("none", "all", "residual")):
        config = MUDDFormerConfig.from_data({"source_norm": source_norm, "post_norm": post_norm})
        ends = config.build(LayerStack(4, 1e-6, (2,) * 3))[1]
        initialise(ends, 0)
        newest = 1.0 if post_norm == "none" else 0.0
        assert ends.get_parameter("sum.static").tolist() == [[0.0, 0.0, 0.0, newest]]


def test_hidden_widths_of_the_released_model() -> None:
    config = MUDDFormerConfig(hidden="round64", expand_last=4)
    stack = LayerStack(8, 1e-6, (2,) * 32)
    found = [config.sum_form(stack, i).hidden for i in range(1, 33)]
    assert [found.count(width) for width in (64, 128, 192)] == [14, 16, 2]
    assert [i for i, width in enumerate(found) if width == 192] == [30, 31]


def parameters_at_2_8_billion(options: dict[str, Any]) -> tuple[int, int]:
    """Those of the mixers, and all."""
    attention = {"kind": "attention", "n_heads": 32, "qk_norm": "before_rope"}
    body = {"vocab_size": 50432, "d_model": 2560, "n_layers": 32, "tie_embeddings": False}
    blocks = [[attention, {"kind": "swiglu", "d_ff": 6912, "d_ff_by_depth": "rising"}]]
    config = DecoderConfig.from_data({**body, "blocks": blocks, "depth": {"kind": "muddformer", **options}})
    shape = Shape(1, 1)
    own = sum(config.depth.cost(site, shape).params for site in config.stack.sites)
    own += config.depth.ends_cost(config.stack, shape).params
    return own, decoder_cost(config, shape).params


def test_parameters_of_the_released_model() -> None:
    own, total = parameters_at_2_8_billion({"hidden": "round64", "expand_last": 4})
    assert total == pytest.approx(2.8049e9, rel=1e-4)
    assert own == pytest.approx(8.776e6, rel=1e-3)


def test_share_of_parameters_in_the_paper_is_of_the_blocks() -> None:
    own, _ = parameters_at_2_8_billion({})
    assert own / (12 * 32 * 2560**2) == pytest.approx(0.00225, rel=1e-2)


@pytest.mark.parametrize("residual", ["sequential", "parallel"])
def test_normed_sources_alone_start_as_a_normed_stream(residual: str) -> None:
    config = MUDDFormerConfig.from_data({"source_norm": "rms", "residual": residual})
    assert config.init_equivalence.relation == "none"
    model = Decoder.build(decoder_config(config)).double()
    run = trace(model, toy_tokens())
    expected = F.rms_norm(run.states[2].stream, (model.config.d_model,), eps=model.config.norm_eps)
    torch.testing.assert_close(run.views[2][0], expected)


def test_first_block_and_passed_blocks_have_one_norm() -> None:
    model = toy_decoder(MUDDFormerConfig(period=2), n_layers=4)
    separate = [hasattr(block.attention, "key_norm") for block in model.blocks]
    assert separate == [False, False, True, False]


def test_separate_inputs_need_a_sublayer_that_takes_them() -> None:
    message = "depth mixer 'muddformer' reads separate q, k and v before 'swiglu' in block 1: must be a mixer that takes them"
    with pytest.raises(ConfigError, match=message):
        decoder_config(MUDDFormerConfig(), blocks=((FEED_FORWARD, ATTENTION),))
    toy_decoder(MUDDFormerConfig(ways="single"), blocks=((FEED_FORWARD, ATTENTION),))(toy_tokens())
    # No block but the first opens with the feed-forward, or none reads a sum.
    toy_decoder(MUDDFormerConfig(), blocks=((FEED_FORWARD, ATTENTION), (ATTENTION,)), n_layers=2)(toy_tokens())
    toy_decoder(MUDDFormerConfig(period=3), blocks=((FEED_FORWARD, ATTENTION),))(toy_tokens())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 2, "dilation": 2}, "window=2: must be None when dilation > 1"),
        ({"weights": "static", "hidden": "round64"}, "hidden='round64': must be left out"),
        ({"weights": "static", "expand_last": 4}, "expand_last=4: must be left out"),
        ({"ways": "qkv"}, "ways='qkv': must be"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MUDDFormerConfig.from_data(options)


@given(
    B=st.integers(1, 2), T=st.integers(1, 3), D=st.integers(1, 3), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4)
)
@settings(max_examples=20, deadline=None)
def test_blocks_of_any_length(B: int, T: int, D: int, lengths: list[int]) -> None:
    """What a block adds is the sum of what its sublayers add; at first every read is the plain stream."""
    stack = LayerStack(D, 1e-6, tuple(lengths))
    config = MUDDFormerConfig()
    mixers = [mixer.double() for mixer in config.build(stack)[0]]
    for mixer in mixers:
        initialise(mixer, 0)
    ends = config.build(stack)[1].double()
    initialise(ends, 0)
    plain = normal(B, T, D)
    state = ends.enter(plain)[0]
    for index, mixer in enumerate(mixers):
        views, carry, _ = mixer.read(state)
        for view in views if isinstance(views, QKV) else (views,):
            torch.testing.assert_close(view, plain)
        update = normal(B, T, D, seed=index + 1)
        state, plain = mixer.write(state, update, views, carry), plain + update
    torch.testing.assert_close(ends.leave(state)[0], plain)
