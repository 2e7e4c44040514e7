"""Generation may move weights in memory; nobody can tell afterwards, or meanwhile from the values."""

import pytest
import torch

from twoaxis import Decoder, DecoderConfig, generate
from twoaxis.model.generate import WORTH_A_LAYOUT_TOKENS, column_major_weights, stream
from twoaxis.ops.cpu.step_kernels import LEAST_WEIGHTS, MOST_ROWS
from twoaxis.ops.kernels import without_kernels


def model(tied: bool = True) -> Decoder:
    config = DecoderConfig.from_data({"vocab_size": 13, "d_model": 8, "n_layers": 2, "tie_embeddings": tied})
    return Decoder.build(config)


@pytest.mark.parametrize("tied", [True, False])
def test_values_and_parameters_stay(tied: bool) -> None:
    decoder = model(tied)
    before = {name: parameter for name, parameter in decoder.named_parameters()}
    values = {name: value.clone() for name, value in decoder.state_dict().items()}
    with column_major_weights(decoder):
        assert decoder.get_parameter("blocks.0.attention.mixer.qkv.weight").stride() == (1, 24)
        assert all(torch.equal(value, values[name]) for name, value in decoder.state_dict().items())
    assert all(before[name] is parameter and parameter.is_contiguous() for name, parameter in decoder.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in decoder.state_dict().items())


def test_weights_that_the_kernel_of_few_rows_reads_stay_as_they_are() -> None:
    decoder = Decoder.build({"vocab_size": 13, "d_model": 128, "n_layers": 1})
    output, qkv = (decoder.get_parameter(f"blocks.0.attention.mixer.{name}.weight") for name in ("output", "qkv"))
    assert qkv.numel() >= LEAST_WEIGHTS > output.numel()
    for rows, stays in ((None, False), (MOST_ROWS, True), (MOST_ROWS + 1, False)):
        with column_major_weights(decoder, rows):
            assert qkv.is_contiguous() == stays and not output.is_contiguous()
    with without_kernels(), column_major_weights(decoder, 1):
        assert not qkv.is_contiguous()


def test_an_update_meanwhile_is_kept() -> None:
    decoder = model()
    with column_major_weights(decoder), torch.no_grad():
        decoder.head_weight.add_(1)
        expected = decoder.head_weight.clone()
    assert torch.equal(decoder.head_weight, expected)


def test_an_unfinished_stream_gives_the_layout_back_when_dropped() -> None:
    decoder = model()
    steps = stream(decoder, [[1, 2]], WORTH_A_LAYOUT_TOKENS)
    next(steps)
    assert not decoder.head_weight.is_contiguous()
    del steps
    assert decoder.head_weight.is_contiguous()


def test_trains_after_generating_in_inference_mode() -> None:
    decoder = model()
    with torch.inference_mode():
        long = generate(decoder, [[1, 2, 3]], WORTH_A_LAYOUT_TOKENS)
    assert long[0][:5] == generate(decoder, [[1, 2, 3]], 5)[0]
    total, _ = decoder.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))
    total.backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
