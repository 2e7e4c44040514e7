import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twoaxis import ConfigError, Decoder, DecoderConfig
from twoaxis.core.cost import Shape
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import DenseFormerConfig, ResidualConfig
from twoaxis.ledger.stack import trace_stack
from twoaxis.testing import declared_costs, gradient, state
from twoaxis.testing.toy import decoder_config, toy_decoder, toy_tokens

FOUR_BY_FIVE = {5: (1, 5), 10: (2, 6, 10), 15: (3, 7, 11, 15), 20: (0, 4, 8, 12, 16, 20)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_output_is_stored_when_the_period_is_the_papers() -> None:
    assert DenseFormerConfig(dilation=4, period=5).rows(20) == FOUR_BY_FIVE


def test_only_groups_are_stored_when_the_period_is_the_training_codes() -> None:
    rows = DenseFormerConfig(dilation=4, period=5, stored="groups").rows(20)
    assert rows == {5: (5,), 10: (10,), 15: (15,), 20: (0, 20)}


@given(k=st.integers(1, 5), p=st.integers(1, 5), L=st.integers(1, 13))
def test_rows_are_what_the_equation_says(k: int, p: int, L: int) -> None:
    expected = {i: tuple(j for j in range(i + 1) if j % k == i % k) for i in range(1, L + 1) if i % p == 0}
    assert DenseFormerConfig(dilation=k, period=p).rows(L) == expected


def test_with_dilation_and_period_four_no_row_after_the_fifth_output_reads_it() -> None:
    assert all(5 not in row for row in DenseFormerConfig(dilation=4, period=4).rows(48).values())


def test_the_newest_outputs_and_the_embedding() -> None:
    assert DenseFormerConfig(last=2).rows(4) == {1: (0, 1), 2: (0, 1, 2), 3: (0, 2, 3), 4: (0, 3, 4)}


def test_number_of_weights_in_all() -> None:
    L = 7
    assert sum(len(row) for row in DenseFormerConfig().rows(L).values()) == L * (L + 3) // 2


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, [1, 3, 4, 5, 1]),
        ({"dilation": 2}, [1, 3, 4, 3, 1]),
        ({"dilation": 2, "period": 2}, [1, 2, 3, 3, 1]),
        ({"period": 5}, [1, 1, 1, 1, 1]),
        ({"variant": "connect_to_last"}, [1, 2, 3, 4, 1]),
    ],
)
def test_the_state_holds_only_what_is_read_again(options: dict, held: list[int]) -> None:
    config = DenseFormerConfig(**options)
    stack = LayerStack(1, 1e-6, (1,) * 4)
    # The stream beside what later rows read, where it is not the newest of them.
    found = trace_stack(config, stack, Shape(1, 1))
    assert [found.state_elements(index) for index in range(5)] == held


@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"dilation": 4, "period": 5}, {"granularity": "sublayer"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_hot_rows_are_the_residual_bit_for_bit(options: dict, dtype: torch.dtype) -> None:
    dense, plain = (
        Decoder.build(decoder_config(config, n_layers=5)).to(dtype)
        for config in (DenseFormerConfig(**options), ResidualConfig())
    )
    assert torch.equal(dense(toy_tokens()), plain(toy_tokens()))


@given(L=st.integers(1, 5), B=st.integers(1, 2), T=st.integers(1, 2), D=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_is_a_free_sum_of_what_blocks_add(L: int, B: int, T: int, D: int, seed: int) -> None:
    """Rows alpha over cumulative outputs and rows beta over the additions of blocks are one function: beta = alpha M."""
    stack = LayerStack(D, 1e-6, (1,) * L)
    config = DenseFormerConfig()
    mixers = [mixer.double() for mixer in config.build(stack)[0]]
    alpha = [normal(end + 1, seed=seed + end) for end in range(1, L + 1)]
    weight = normal(D, D, seed=seed)
    embeddings = normal(B, T, D, seed=seed + 50)

    current = config.build(stack)[1].enter(embeddings)[0]
    for mixer, row in zip(mixers, alpha, strict=True):
        mixer.get_parameter("weights").data = row
        view, carry, _ = mixer.read(current)
        assert isinstance(view, Tensor)
        current = mixer.write(current, torch.tanh(view @ weight), view, carry)

    # Row j of M writes output j as a sum of additions; the embedding is the addition 0.
    M = torch.zeros(L + 1, L + 1, dtype=torch.float64)
    M[0, 0] = 1
    beta, additions = M[0], [embeddings]
    for j, row in enumerate(alpha, start=1):
        read = sum((b * a for b, a in zip(beta, additions, strict=False)), torch.zeros_like(embeddings))
        additions.append(torch.tanh(read @ weight))
        M[j] = beta
        M[j, j] += 1
        beta = row @ M[: j + 1]
    expected = sum((b * a for b, a in zip(beta, additions, strict=True)), torch.zeros_like(embeddings))
    torch.testing.assert_close(config.build(stack)[1].leave(current)[0], expected, rtol=1e-10, atol=1e-10)


def test_one_hot_rows_are_sums_with_weight_one() -> None:
    L = 4
    M = torch.eye(1, L + 1)
    beta = M[0]
    for j in range(1, L + 1):
        M = torch.cat((M, (beta + torch.eye(L + 1)[j])[None]))
        beta = torch.eye(j + 1)[j] @ M
    assert torch.equal(beta, torch.ones(L + 1))


GROUPED = DenseFormerConfig(dilation=2, period=2, stored="groups")


def test_groups_keep_every_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that build other depths cannot run on groups, which have to fill the stack."""
    for module in (declared_costs, gradient, state):
        monkeypatch.setattr(module, "toy_decoder", lambda config, **kw: toy_decoder(config, **{**kw, "n_layers": 4}))
    for check in (
        declared_costs.depth_params_are_exact,
        gradient.gradcheck_read_write,
        gradient.gradients_reach_parameters,
        gradient.fused_equals_reference,
        state.pipeline_cut,
    ):
        check.run(GROUPED)


def test_initial_rows() -> None:
    stack = LayerStack(2, 1e-6, (2,) * 3)
    mixer = DenseFormerConfig(variant="connect_to_last").build(stack)[0][-1]
    initialise(mixer, 0)
    assert mixer.get_parameter("weights").tolist() == pytest.approx([1e-4, 1e-4, 1e-4, 1.0])
    assert not list(DenseFormerConfig(variant="connect_to_last").build(stack)[0][1].parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "skip_gains", "dilation": 2}, "dilation=2: must be left out, since 'skip_gains' has no such rows"),
        ({"variant": "connect_to_last", "last": 2}, "last=2: must be left out"),
        ({"dilation": 2, "last": 2}, "last=2: must be None when dilation > 1"),
        ({"period": 0}, "period=0: must be >= 1"),
    ],
)
def test_options_that_exclude_each_other(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DenseFormerConfig(**options)


def test_groups_have_to_fill_the_stack() -> None:
    with pytest.raises(ConfigError, match="period=2: must be a divisor of the 3 blocks"):
        DecoderConfig(vocab_size=4, d_model=8, n_layers=3, depth=GROUPED)
