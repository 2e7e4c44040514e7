import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack
from twoaxis.depth import GatedResidualConfig
from twoaxis.testing.measured import gradients, trace
from twoaxis.testing.toy import noise, toy_decoder, toy_tokens

D = 8


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_fresh_read_is_half_the_normalised_stream(n: int) -> None:
    mixer = GatedResidualConfig(n_streams=n, rank=3).build(LayerStack(D, 1e-20, (2,)))[0][1]
    initialise(mixer, 0)
    mixer.double()
    x, update = noise((2, 3, D), "x"), noise((2, 3, D), "update")
    view, carry, _ = mixer.read((x,) * n)
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
    torch.testing.assert_close(view, normalised / 2, rtol=1e-6, atol=0)
    for stream in mixer.write((x,) * n, update, view, carry):
        torch.testing.assert_close(stream, x + update, rtol=0, atol=1e-14)


def test_streams_are_never_mixed() -> None:
    mixer = GatedResidualConfig(n_streams=3, rank=2, init="normal").build(LayerStack(D, 1e-6, (2,)))[0][0]
    initialise(mixer, 0)
    mixer.double()
    state = tuple(noise((1, 2, D), f"stream {j}") for j in range(3))
    view, carry, _ = mixer.read(state)
    for stream, before in zip(mixer.write(state, torch.zeros_like(view), view, carry), state, strict=True):
        assert torch.equal(stream, before)


def test_write_weights_lie_between_zero_and_two() -> None:
    model = toy_decoder(GatedResidualConfig(rank=3))
    run = trace(model, toy_tokens())
    for block in model.blocks:
        for sublayer in block.sublayers:  # type: ignore[union-attr,operator]
            _, mixing, _ = sublayer.depth.read(run.states[1])
            assert mixing.write.min() > 0 and mixing.write.max() < 2
            assert mixing.write.dtype == torch.float64


def test_streams_part_after_two_steps() -> None:
    model, tokens = toy_decoder(GatedResidualConfig(rank=3), perturbed=False), toy_tokens()
    for _ in range(2):
        logits = model(tokens)
        found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * found[name]
    last = [stream.detach() for stream in trace(model, tokens).states[-1]]
    assert min(float((last[i] - last[j]).abs().max()) for i in range(4) for j in range(i)) > 1e-6


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="rank=0: must be >= 1"):
        GatedResidualConfig(rank=0)
